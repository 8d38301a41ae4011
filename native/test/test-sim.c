/*
 * test-sim.c: the simulated libcuda.so.1 from the outside: error codes, data, streams, capture, processes.
 *
 * Loads build/sim/libcuda.so.1 beside it, or RIGEL_SIM_LIB. Each test runs in a process of its own with a shared file
 * of its own. Nothing here depends on how fast the machine is: a kernel that must not be finished takes an hour, and
 * ends with its context or its process.
 */
#include "../cuda_abi.h"
#include "../sim/sim-control.h"

#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* ---- The driver, as function pointers with the functions' own names */

#define LAUNCH_PARAMS \
    (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **)
#define FUNCTIONS(F) \
    F(cuInit, (unsigned)) \
    F(cuDriverGetVersion, (int *)) \
    F(cuGetProcAddress, (const char *, void **, int, uint64_t)) \
    F(cuGetProcAddress_v2, (const char *, void **, int, uint64_t, int *)) \
    F(cuGetErrorName, (CUresult, const char **)) \
    F(cuGetErrorString, (CUresult, const char **)) \
    F(cuDeviceGet, (CUdevice *, int)) \
    F(cuDeviceGetCount, (int *)) \
    F(cuDeviceGetName, (char *, int, CUdevice)) \
    F(cuDeviceGetUuid_v2, (CUuuid *, CUdevice)) \
    F(cuDeviceGetAttribute, (int *, int, CUdevice)) \
    F(cuDeviceTotalMem_v2, (size_t *, CUdevice)) \
    F(cuDeviceGetPCIBusId, (char *, int, CUdevice)) \
    F(cuDeviceGetByPCIBusId, (CUdevice *, const char *)) \
    F(cuDevicePrimaryCtxRetain, (CUcontext *, CUdevice)) \
    F(cuDevicePrimaryCtxRelease_v2, (CUdevice)) \
    F(cuDevicePrimaryCtxReset_v2, (CUdevice)) \
    F(cuDevicePrimaryCtxGetState, (CUdevice, unsigned *, int *)) \
    F(cuCtxCreate_v2, (CUcontext *, unsigned, CUdevice)) \
    F(cuCtxDestroy_v2, (CUcontext)) \
    F(cuCtxPushCurrent_v2, (CUcontext)) \
    F(cuCtxPopCurrent_v2, (CUcontext *)) \
    F(cuCtxSetCurrent, (CUcontext)) \
    F(cuCtxGetCurrent, (CUcontext *)) \
    F(cuCtxGetDevice, (CUdevice *)) \
    F(cuCtxSynchronize, (void)) \
    F(cuCtxSynchronize_v2, (CUcontext)) \
    F(cuCtxGetStreamPriorityRange, (int *, int *)) \
    F(cuStreamCreate, (CUstream *, unsigned)) \
    F(cuStreamCreateWithPriority, (CUstream *, unsigned, int)) \
    F(cuStreamDestroy_v2, (CUstream)) \
    F(cuStreamQuery, (CUstream)) \
    F(cuStreamQuery_ptsz, (CUstream)) \
    F(cuStreamSynchronize, (CUstream)) \
    F(cuStreamSynchronize_ptsz, (CUstream)) \
    F(cuStreamGetCtx, (CUstream, CUcontext *)) \
    F(cuStreamGetFlags, (CUstream, unsigned *)) \
    F(cuStreamGetId, (CUstream, unsigned long long *)) \
    F(cuStreamGetPriority, (CUstream, int *)) \
    F(cuStreamGetAttribute, (CUstream, int, CUlaunchAttributeValue *)) \
    F(cuStreamSetAttribute, (CUstream, int, const CUlaunchAttributeValue *)) \
    F(cuStreamSetAttribute_ptsz, (CUstream, int, const CUlaunchAttributeValue *)) \
    F(cuStreamWaitEvent, (CUstream, CUevent, unsigned)) \
    F(cuStreamBeginCapture_v2, (CUstream, int)) \
    F(cuStreamBeginCapture_v2_ptsz, (CUstream, int)) \
    F(cuStreamBeginCaptureToGraph, (CUstream, CUgraph, const CUgraphNode *, const void *, size_t, int)) \
    F(cuStreamEndCapture, (CUstream, CUgraph *)) \
    F(cuStreamEndCapture_ptsz, (CUstream, CUgraph *)) \
    F(cuStreamIsCapturing, (CUstream, CUstreamCaptureStatus *)) \
    F(cuStreamGetCaptureInfo_v2, \
      (CUstream, CUstreamCaptureStatus *, uint64_t *, CUgraph *, const CUgraphNode **, size_t *)) \
    F(cuThreadExchangeStreamCaptureMode, (CUstreamCaptureMode *)) \
    F(cuEventCreate, (CUevent *, unsigned)) \
    F(cuEventDestroy_v2, (CUevent)) \
    F(cuEventRecord, (CUevent, CUstream)) \
    F(cuEventRecordWithFlags, (CUevent, CUstream, unsigned)) \
    F(cuEventQuery, (CUevent)) \
    F(cuEventSynchronize, (CUevent)) \
    F(cuEventElapsedTime, (float *, CUevent, CUevent)) \
    F(cuModuleLoadData, (CUmodule *, const void *)) \
    F(cuModuleUnload, (CUmodule)) \
    F(cuModuleGetFunction, (CUfunction *, CUmodule, const char *)) \
    F(cuLibraryLoadData, (CUlibrary *, const void *, void *, void **, unsigned, void *, void **, unsigned)) \
    F(cuLibraryGetKernel, (CUkernel *, CUlibrary, const char *)) \
    F(cuLibraryUnload, (CUlibrary)) \
    F(cuKernelGetFunction, (CUfunction *, CUkernel)) \
    F(cuKernelGetName, (const char **, CUkernel)) \
    F(cuFuncGetName, (const char **, CUfunction)) \
    F(cuFuncGetAttribute, (int *, int, CUfunction)) \
    F(cuFuncSetAttribute, (CUfunction, int, int)) \
    F(cuFuncSetBlockShape, (CUfunction, int, int, int)) \
    F(cuParamSetv, (CUfunction, int, void *, unsigned)) \
    F(cuLaunchGrid, (CUfunction, int, int)) \
    F(cuOccupancyMaxActiveBlocksPerMultiprocessor, (int *, CUfunction, int, size_t)) \
    F(cuLaunchKernel, LAUNCH_PARAMS) \
    F(cuLaunchKernel_ptsz, LAUNCH_PARAMS) \
    F(cuLaunchKernelEx, (const CUlaunchConfig *, CUfunction, void **, void **)) \
    F(cuLaunchCooperativeKernel, \
      (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **)) \
    F(cuMemAlloc_v2, (CUdeviceptr *, size_t)) \
    F(cuMemAllocPitch_v2, (CUdeviceptr *, size_t *, size_t, size_t, unsigned)) \
    F(cuMemAllocManaged, (CUdeviceptr *, size_t, unsigned)) \
    F(cuMemAllocHost_v2, (void **, size_t)) \
    F(cuMemFree_v2, (CUdeviceptr)) \
    F(cuMemFreeHost, (void *)) \
    F(cuMemAllocAsync, (CUdeviceptr *, size_t, CUstream)) \
    F(cuMemFreeAsync, (CUdeviceptr, CUstream)) \
    F(cuMemHostRegister_v2, (void *, size_t, unsigned)) \
    F(cuMemHostUnregister, (void *)) \
    F(cuMemGetInfo_v2, (size_t *, size_t *)) \
    F(cuMemcpy, (CUdeviceptr, CUdeviceptr, size_t)) \
    F(cuMemcpyHtoD_v2, (CUdeviceptr, const void *, size_t)) \
    F(cuMemcpyDtoH_v2, (void *, CUdeviceptr, size_t)) \
    F(cuMemcpyDtoD_v2, (CUdeviceptr, CUdeviceptr, size_t)) \
    F(cuMemcpyDtoH_v2_ptds, (void *, CUdeviceptr, size_t)) \
    F(cuMemcpyAsync, (CUdeviceptr, CUdeviceptr, size_t, CUstream)) \
    F(cuMemcpyHtoDAsync_v2, (CUdeviceptr, const void *, size_t, CUstream)) \
    F(cuMemcpyDtoHAsync_v2, (void *, CUdeviceptr, size_t, CUstream)) \
    F(cuMemcpyDtoDAsync_v2, (CUdeviceptr, CUdeviceptr, size_t, CUstream)) \
    F(cuMemcpy2D_v2, (const CUDA_MEMCPY2D *)) \
    F(cuMemcpy3D_v2, (const CUDA_MEMCPY3D *)) \
    F(cuMemsetD8_v2, (CUdeviceptr, unsigned char, size_t)) \
    F(cuMemsetD8Async, (CUdeviceptr, unsigned char, size_t, CUstream)) \
    F(cuMemsetD16_v2, (CUdeviceptr, unsigned short, size_t)) \
    F(cuMemsetD32_v2, (CUdeviceptr, unsigned, size_t)) \
    F(cuMemsetD2D8_v2, (CUdeviceptr, size_t, unsigned char, size_t, size_t)) \
    F(cuMemsetD2D32Async, (CUdeviceptr, size_t, unsigned, size_t, size_t, CUstream)) \
    F(cuGraphCreate, (CUgraph *, unsigned)) \
    F(cuGraphDestroy, (CUgraph)) \
    F(cuGraphInstantiateWithFlags, (CUgraphExec *, CUgraph, unsigned long long)) \
    F(cuGraphExecDestroy, (CUgraphExec)) \
    F(cuGraphLaunch, (CUgraphExec, CUstream)) \
    F(cuGraphGetNodes, (CUgraph, CUgraphNode *, size_t *)) \
    F(cuGraphNodeGetType, (CUgraphNode, int *)) \
    F(cuGraphKernelNodeGetParams_v2, (CUgraphNode, CUDA_KERNEL_NODE_PARAMS *))
#define POINTER(name, params) static CUresult(*name) params;
FUNCTIONS(POINTER)
static __typeof__(rigelSimSetTimeslice) *set_timeslice;
static __typeof__(rigelSimSuspend) *suspend;

/* ---- Checks */

static int failures;
static const char *test_name = "";
static char library[4096], state_path[256];

__attribute__((format(printf, 3, 4))) static void check(int ok, int line, const char *format, ...)
{
    if (ok) return;
    va_list args;
    va_start(args, format);
    fprintf(stderr, "test-sim.c:%d: %s: ", line, test_name);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    failures++;
}
#define TRUE(condition) check(condition, __LINE__, "not true: %s", #condition)
#define EQUAL(got, want) \
    do { \
        long long got_ = (long long)(got), want_ = (long long)(want); \
        check(got_ == want_, __LINE__, "%s is %lld, expected %lld (%s)", #got, got_, want_, #want); \
    } while (0)
#define OK(call) EQUAL(call, CUDA_SUCCESS)

static void *load_library(void)
{
    void *h = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (!h) {
        fprintf(stderr, "test-sim.c: %s\n", dlerror());
        exit(1);
    }
#define RESOLVE(name, params) \
    *(void **)&name = dlsym(h, #name); \
    check(name != NULL, __LINE__, "%s is not exported", #name);
    FUNCTIONS(RESOLVE)
    *(void **)&set_timeslice = dlsym(h, "rigelSimSetTimeslice");
    *(void **)&suspend = dlsym(h, "rigelSimSuspend");
    TRUE(set_timeslice && suspend);
    if (failures) exit(1);
    return h;
}

static const char ptx[] = ".version 6.0\n.target sm_52\n.address_size 64\n"
                          ".visible .entry rigel_spin(.param .u64 iterations, .param .u64 block_ns) { ret; }\n"
                          ".visible .entry plain_kernel() { ret; }\n";
static CUcontext context;
static CUmodule module;
static CUfunction spin;

static void start(void)
{
    load_library();
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    OK(cuModuleLoadData(&module, ptx));
    OK(cuModuleGetFunction(&spin, module, "rigel_spin"));
}

enum { WHOLE_GPU = 132 * 2 }; /* blocks of 1024 threads that fill an H200 */
static const uint64_t AN_HOUR = 3600ull * 1000 * 1000 * 1000;

/* Blocks of 1024 threads that take this long. */
static CUresult launch(unsigned blocks, uint64_t block_ns, CUstream s)
{
    uint64_t iterations = 0;
    void *params[] = {&iterations, &block_ns};
    return cuLaunchKernel(spin, blocks, 1, 1, 1024, 1, 1, 0, s, params, NULL);
}

static CUstream stream(unsigned flags, int priority)
{
    CUstream s = NULL;
    OK(cuStreamCreateWithPriority(&s, flags, priority));
    return s;
}

static CUevent event(void)
{
    CUevent e = NULL;
    OK(cuEventCreate(&e, 0));
    return e;
}

/* ---- One process */

static void test_before_init(void)
{
    load_library();
    int n = 0;
    void *p;
    CUcontext c;
    OK(cuDriverGetVersion(&n));
    EQUAL(n, 13000);
    EQUAL(cuDriverGetVersion(NULL), CUDA_ERROR_INVALID_VALUE);
    OK(cuGetProcAddress("cuInit", &p, 13000, 0));
    EQUAL(cuDeviceGetCount(&n), CUDA_ERROR_NOT_INITIALIZED);
    EQUAL(cuCtxGetCurrent(&c), CUDA_ERROR_NOT_INITIALIZED);
    EQUAL(cuStreamQuery(NULL), CUDA_ERROR_NOT_INITIALIZED);
    EQUAL(cuMemAlloc_v2((CUdeviceptr *)&p, 1), CUDA_ERROR_NOT_INITIALIZED);
    EQUAL(cuLaunchKernel(NULL, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), CUDA_ERROR_NOT_INITIALIZED);
    EQUAL(cuInit(1), CUDA_ERROR_INVALID_VALUE);
    OK(cuInit(0));
    OK(cuInit(0));
    OK(cuDeviceGetCount(&n));
    EQUAL(n, 1);
    struct stat s;
    EQUAL(stat(state_path, &s), 0);
    EQUAL(s.st_mode & 0777, 0600);
    const char *text;
    OK(cuGetErrorName(CUDA_ERROR_INVALID_HANDLE, &text));
    TRUE(!strcmp(text, "CUDA_ERROR_INVALID_HANDLE"));
    OK(cuGetErrorString(CUDA_ERROR_OUT_OF_MEMORY, &text));
    TRUE(!strcmp(text, "out of memory"));
    EQUAL(cuGetErrorName(12345, &text), CUDA_ERROR_INVALID_VALUE);
    TRUE(!text);
}

/* Every exported name, from the library's own symbol table. */
static size_t exported(void *handle, const char **names, size_t room)
{
    struct link_map *map = NULL;
    const ElfW(Sym) *symbols = NULL;
    const char *strings = NULL;
    const uint32_t *hash = NULL;
    dlinfo(handle, RTLD_DI_LINKMAP, &map);
    for (const ElfW(Dyn) *d = map->l_ld; d->d_tag != DT_NULL; d++) {
        if (d->d_tag == DT_SYMTAB) symbols = (const void *)d->d_un.d_ptr;
        if (d->d_tag == DT_STRTAB) strings = (const void *)d->d_un.d_ptr;
        if (d->d_tag == DT_GNU_HASH) hash = (const void *)d->d_un.d_ptr;
    }
    const uint32_t *buckets = hash + 4 + hash[2] * (sizeof(ElfW(Addr)) / 4), *chains = buckets + hash[0];
    size_t n = 0;
    for (uint32_t b = 0; b < hash[0]; b++)
        for (uint32_t i = buckets[b]; i; i = chains[i - hash[1]] & 1 ? 0 : i + 1)
            if (n < room) names[n++] = strings + symbols[i].st_name;
    return n;
}

static void test_lookup(void)
{
    static const struct {
        const char *name, *symbol, *per_thread;
        int version;
    } table[] = {
#define RG_EXPORT(name, version, symbol) {#name, #symbol, #symbol, version},
#define RG_EXPORT_PT(name, version, symbol, per_thread) {#name, #symbol, #per_thread, version},
#include "../sim/driver-exports.def"
#undef RG_EXPORT
#undef RG_EXPORT_PT
    };
    const size_t rows = sizeof table / sizeof *table;
    void *h = load_library(), *p;
    int status;
    for (size_t i = 0; i < rows; i++)
        for (uint64_t flags = 0; flags <= 2; flags++) {
            const char *want = flags == 2 ? table[i].per_thread : table[i].symbol;
            p = NULL, status = -1;
            EQUAL(cuGetProcAddress_v2(table[i].name, &p, table[i].version, flags, &status), CUDA_SUCCESS);
            check(p && p == dlsym(h, want), __LINE__, "%s is not %s", table[i].name, want);
            EQUAL(status, CU_GET_PROC_ADDRESS_SUCCESS);
            p = NULL;
            EQUAL(cuGetProcAddress(table[i].name, &p, table[i].version, flags), CUDA_SUCCESS);
            check(p == dlsym(h, want), __LINE__, "%s is not %s", table[i].name, want);
        }
    /* Nothing is exported that cannot be looked up, and nothing that is not the driver's. */
    static const char *names[4096];
    size_t count = exported(h, names, 4096);
    TRUE(count > 200);
    for (size_t n = 0; n < count; n++) {
        int found = !strcmp(names[n], "rigel_sim_marker") || !strncmp(names[n], "rigelSim", 8);
        for (size_t i = 0; i < rows && !found; i++)
            found = !strcmp(table[i].symbol, names[n]) || !strcmp(table[i].per_thread, names[n]);
        check(found, __LINE__, "%s is exported, but not in driver-exports.def", names[n]);
    }
    /* What Rigel stands in front of is all there. */
    static const char *const hooked[] = {
#define RG_WORK(symbol, ...) #symbol,
#define RG_SPECIAL(symbol, ...) #symbol,
#include "../hooks.def"
    };
    for (size_t i = 0; i < sizeof hooked / sizeof *hooked; i++)
        check(dlsym(h, hooked[i]) != NULL, __LINE__, "%s is hooked, but not exported", hooked[i]);
    /* Versions: the newest that is not too new. */
    OK(cuGetProcAddress_v2("cuCtxCreate", &p, 12000, 0, &status));
    TRUE(p == dlsym(h, "cuCtxCreate_v3"));
    OK(cuGetProcAddress_v2("cuMemAlloc", &p, 3000, 0, &status));
    TRUE(!p && status == CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
    OK(cuGetProcAddress_v2("cuAbacus", &p, 13000, 0, &status));
    TRUE(!p && status == CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
    OK(cuGetProcAddress_v2("cuInit", &p, 13000, 0, NULL));
    EQUAL(cuGetProcAddress("cuAbacus", &p, 13000, 0), CUDA_ERROR_NOT_FOUND);
    EQUAL(cuGetProcAddress_v2("cuInit", &p, 13010, 0, &status), CUDA_ERROR_INVALID_VALUE);
    EQUAL(cuGetProcAddress_v2("cuInit", &p, 13000, 3, &status), CUDA_ERROR_INVALID_VALUE);
    EQUAL(cuGetProcAddress_v2(NULL, &p, 13000, 0, &status), CUDA_ERROR_INVALID_VALUE);
}

static int attribute(int which, CUdevice d)
{
    int value = -1;
    OK(cuDeviceGetAttribute(&value, which, d));
    return value;
}

static void test_devices(void)
{
    setenv("RIGEL_SIM_DEVICES", "3", 1);
    setenv("RIGEL_SIM_PRESET", "a100", 1);
    load_library();
    OK(cuInit(0));
    int count;
    CUdevice d;
    OK(cuDeviceGetCount(&count));
    EQUAL(count, 3);
    EQUAL(cuDeviceGet(&d, 3), CUDA_ERROR_INVALID_DEVICE);
    EQUAL(cuDeviceGet(&d, -1), CUDA_ERROR_INVALID_DEVICE);
    CUuuid uuid[3];
    char name[100], bus[20];
    size_t bytes;
    for (int i = 0; i < 3; i++) {
        OK(cuDeviceGet(&d, i));
        OK(cuDeviceGetUuid_v2(&uuid[i], d));
        OK(cuDeviceGetPCIBusId(bus, sizeof bus, d));
        OK(cuDeviceGetByPCIBusId(&d, bus));
        EQUAL(d, i);
    }
    EQUAL(cuDeviceGetByPCIBusId(&d, "0000:42:00.0"), CUDA_ERROR_INVALID_DEVICE);
    TRUE(memcmp(&uuid[0], &uuid[1], 16) && memcmp(&uuid[1], &uuid[2], 16) && memcmp(&uuid[0], &uuid[2], 16));
    OK(cuDeviceGetName(name, sizeof name, 0));
    TRUE(!strcmp(name, "NVIDIA A100-SXM4-80GB (simulated)"));
    OK(cuDeviceGetName(name, 7, 0));
    TRUE(!strcmp(name, "NVIDIA"));
    OK(cuDeviceTotalMem_v2(&bytes, 0));
    EQUAL(bytes, 80ll << 30);
    EQUAL(attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 1), 108);
    EQUAL(attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 1), 8);
    EQUAL(attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 1), 163 * 1024);
    EQUAL(attribute(CU_DEVICE_ATTRIBUTE_WARP_SIZE, 1), 32);
    EQUAL(attribute(CU_DEVICE_ATTRIBUTE_INTEGRATED, 1), 0);
    EQUAL(cuDeviceGetAttribute(&count, 0, 0), CUDA_ERROR_INVALID_VALUE);
    EQUAL(cuDeviceGetAttribute(&count, 16, 9), CUDA_ERROR_INVALID_DEVICE);
    /* Work on one device does not keep another one busy; an event of another device can be waited for. */
    CUcontext a, b;
    OK(cuCtxCreate_v2(&a, 0, 1));
    OK(cuModuleLoadData(&module, ptx));
    OK(cuModuleGetFunction(&spin, module, "rigel_spin"));
    OK(launch(WHOLE_GPU, AN_HOUR, NULL));
    CUevent e = event();
    OK(cuCtxCreate_v2(&b, 0, 2));
    OK(cuModuleLoadData(&module, ptx));
    OK(cuModuleGetFunction(&spin, module, "rigel_spin"));
    OK(launch(WHOLE_GPU, 1000, NULL));
    OK(cuStreamWaitEvent(NULL, e, 0));
    OK(cuCtxSynchronize());
    OK(cuCtxDestroy_v2(b));
    OK(cuCtxDestroy_v2(a));
}

static void test_no_device(void)
{
    setenv("RIGEL_SIM_DEVICES", "0", 1);
    load_library();
    EQUAL(cuInit(0), CUDA_ERROR_NO_DEVICE);
    setenv("RIGEL_SIM_DEVICES", "1", 1);
    setenv("RIGEL_SIM_PRESET", "abacus", 1);
    EQUAL(cuInit(0), CUDA_ERROR_OPERATING_SYSTEM);
    setenv("RIGEL_SIM_PRESET", "l4", 1);
    unlink(state_path);
    FILE *f = fopen(state_path, "w");
    fchmod(fileno(f), 0644);
    fclose(f);
    EQUAL(cuInit(0), CUDA_ERROR_OPERATING_SYSTEM); /* open to others */
    unlink(state_path);
    f = fopen(state_path, "w"); /* somebody's leftovers: made anew */
    fputs("not a simulated GPU", f);
    fchmod(fileno(f), 0600);
    fclose(f);
    OK(cuInit(0));
    EQUAL(attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 0), 58);
}

static void *no_context(void *unused)
{
    CUcontext c = (CUcontext)1;
    CUdevice d;
    CUdeviceptr p;
    CUstream s;
    CUevent e;
    OK(cuCtxGetCurrent(&c));
    TRUE(!c);
    EQUAL(cuCtxGetDevice(&d), CUDA_ERROR_INVALID_CONTEXT);
    EQUAL(cuCtxSynchronize(), CUDA_ERROR_INVALID_CONTEXT);
    EQUAL(cuMemAlloc_v2(&p, 8), CUDA_ERROR_INVALID_CONTEXT);
    EQUAL(cuStreamCreate(&s, 0), CUDA_ERROR_INVALID_CONTEXT);
    EQUAL(cuEventCreate(&e, 0), CUDA_ERROR_INVALID_CONTEXT);
    EQUAL(cuStreamQuery(NULL), CUDA_ERROR_INVALID_CONTEXT);
    EQUAL(cuStreamSynchronize(CU_STREAM_PER_THREAD), CUDA_ERROR_INVALID_CONTEXT);
    EQUAL(launch(1, 1, NULL), CUDA_ERROR_INVALID_CONTEXT);
    EQUAL(cuMemsetD8_v2(4096, 0, 1), CUDA_ERROR_INVALID_CONTEXT);
    EQUAL(cuCtxPopCurrent_v2(&c), CUDA_ERROR_INVALID_CONTEXT);
    OK(cuCtxSynchronize_v2(context));
    return unused;
}

static void test_contexts(void)
{
    start();
    pthread_t t;
    pthread_create(&t, NULL, no_context, NULL); /* the binding is the thread's own */
    pthread_join(t, NULL);
    CUcontext c, other;
    CUdevice d;
    CUstream s;
    OK(cuStreamCreate(&s, 0));
    OK(cuStreamGetCtx(s, &c));
    TRUE(c == context);
    OK(cuStreamGetCtx(NULL, &c));
    TRUE(c == context);
    OK(cuCtxCreate_v2(&other, 0, 0));
    OK(cuCtxGetCurrent(&c));
    TRUE(c == other);
    OK(cuCtxGetDevice(&d));
    EQUAL(d, 0);
    /* Functions, streams and events of one context in the other. */
    CUstream s2;
    CUmodule m2;
    CUfunction f2;
    CUevent e2;
    OK(cuStreamCreate(&s2, 0));
    OK(cuModuleLoadData(&m2, ptx));
    OK(cuModuleGetFunction(&f2, m2, "plain_kernel"));
    OK(cuEventCreate(&e2, 0));
    EQUAL(launch(1, 1, s2), CUDA_ERROR_INVALID_HANDLE); /* spin is of the first context */
    OK(cuLaunchKernel(f2, 1, 1, 1, 1, 1, 1, 0, s2, NULL, NULL));
    EQUAL(cuLaunchKernel(f2, 1, 1, 1, 1, 1, 1, 0, s, NULL, NULL), CUDA_ERROR_INVALID_HANDLE);
    EQUAL(cuEventRecord(e2, s), CUDA_ERROR_INVALID_HANDLE);
    OK(cuEventRecord(e2, s2));
    OK(cuStreamWaitEvent(s, e2, 0));
    OK(cuStreamSynchronize(s));
    /* Destroyed: it, and what was made in it, are told from live ones. */
    OK(cuCtxPushCurrent_v2(context));
    OK(cuCtxDestroy_v2(other));
    EQUAL(cuCtxDestroy_v2(other), CUDA_ERROR_INVALID_CONTEXT);
    EQUAL(cuStreamQuery(s2), CUDA_ERROR_INVALID_HANDLE);
    EQUAL(cuEventQuery(e2), CUDA_ERROR_INVALID_HANDLE);
    EQUAL(cuModuleGetFunction(&f2, m2, "plain_kernel"), CUDA_ERROR_INVALID_HANDLE);
    EQUAL(cuCtxSetCurrent(other), CUDA_ERROR_INVALID_CONTEXT);
    OK(cuCtxPopCurrent_v2(&c));
    TRUE(c == context);
    OK(cuCtxGetCurrent(&c));
    TRUE(c == other); /* still on the stack, but of no use */
    EQUAL(cuCtxSynchronize(), CUDA_ERROR_CONTEXT_IS_DESTROYED);
    OK(cuCtxPopCurrent_v2(&c));
    /* The primary context is counted. */
    unsigned flags;
    int active;
    OK(cuCtxGetCurrent(&c));
    TRUE(c == context);
    EQUAL(cuCtxDestroy_v2(context), CUDA_ERROR_INVALID_CONTEXT);
    OK(cuDevicePrimaryCtxRetain(&c, 0));
    TRUE(c == context);
    OK(cuDevicePrimaryCtxRelease_v2(0));
    OK(cuDevicePrimaryCtxGetState(0, &flags, &active));
    EQUAL(active, 1);
    OK(cuDevicePrimaryCtxRelease_v2(0));
    EQUAL(cuDevicePrimaryCtxRelease_v2(0), CUDA_ERROR_INVALID_CONTEXT);
    OK(cuDevicePrimaryCtxGetState(0, &flags, &active));
    EQUAL(active, 0);
    EQUAL(cuStreamQuery(s), CUDA_ERROR_INVALID_HANDLE);
    OK(cuDevicePrimaryCtxRetain(&c, 0));
    TRUE(c != context); /* a handle is not given out twice */
    /* Made-up handles. */
    OK(cuCtxSetCurrent(c));
    EQUAL(cuStreamQuery((CUstream)0x1234), CUDA_ERROR_INVALID_HANDLE);
    EQUAL(cuStreamQuery((CUstream)&c), CUDA_ERROR_INVALID_HANDLE);
    EQUAL(cuEventQuery((CUevent)c), CUDA_ERROR_INVALID_HANDLE);
    EQUAL(cuLaunchKernel(NULL, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), CUDA_ERROR_INVALID_HANDLE);
    EQUAL(cuGraphLaunch(NULL, NULL), CUDA_ERROR_INVALID_VALUE);
}

static void test_modules(void)
{
    start();
    CUfunction f;
    CUmodule m;
    CUlibrary l;
    CUkernel k;
    const char *name;
    int value;
    EQUAL(cuModuleLoadData(&m, NULL), CUDA_ERROR_INVALID_VALUE);
    EQUAL(cuModuleLoadData(&m, "\x7f" "ELF"), CUDA_ERROR_INVALID_IMAGE);
    EQUAL(cuModuleGetFunction(&f, module, "nothing"), CUDA_ERROR_NOT_FOUND);
    EQUAL(cuModuleGetFunction(&f, module, NULL), CUDA_ERROR_INVALID_VALUE);
    EQUAL(cuModuleGetFunction(&f, (CUmodule)0x10, "rigel_spin"), CUDA_ERROR_INVALID_HANDLE);
    OK(cuModuleGetFunction(&f, module, "rigel_spin"));
    TRUE(f == spin);
    OK(cuFuncGetName(&name, spin));
    TRUE(!strcmp(name, "rigel_spin"));
    OK(cuLibraryLoadData(&l, ptx, NULL, NULL, 0, NULL, NULL, 0));
    OK(cuLibraryGetKernel(&k, l, "plain_kernel"));
    OK(cuKernelGetName(&name, k));
    TRUE(!strcmp(name, "plain_kernel"));
    OK(cuKernelGetFunction(&f, k));
    OK(cuLaunchKernel(f, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL));
    OK(cuLaunchKernel((CUfunction)k, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL)); /* libcudart does this */
    OK(cuLibraryUnload(l));
    EQUAL(cuLaunchKernel((CUfunction)k, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL), CUDA_ERROR_INVALID_HANDLE);
    OK(cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, spin));
    EQUAL(value, 1024);
    EQUAL(cuFuncGetAttribute(&value, 99, spin), CUDA_ERROR_INVALID_VALUE);
    /* Shared memory limits how many blocks an SM holds: 228 KiB, 1 KiB a block for the system. */
    OK(cuOccupancyMaxActiveBlocksPerMultiprocessor(&value, spin, 256, 0));
    EQUAL(value, 8);
    OK(cuOccupancyMaxActiveBlocksPerMultiprocessor(&value, spin, 256, 75 * 1024));
    EQUAL(value, 3);
    OK(cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, spin));
    EQUAL(value, 48 * 1024);
    EQUAL(cuFuncSetAttribute(spin, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 228 * 1024),
          CUDA_ERROR_INVALID_VALUE);
    uint64_t iterations = 0, ns = 1000;
    void *params[] = {&iterations, &ns};
    EQUAL(cuLaunchKernel(spin, 1, 1, 1, 32, 1, 1, 75 * 1024, NULL, params, NULL), CUDA_ERROR_INVALID_VALUE);
    OK(cuFuncSetAttribute(spin, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 75 * 1024));
    OK(cuLaunchKernel(spin, 1, 1, 1, 32, 1, 1, 75 * 1024, NULL, params, NULL));
    /* Shapes. */
    EQUAL(cuLaunchKernel(spin, 0, 1, 1, 32, 1, 1, 0, NULL, params, NULL), CUDA_ERROR_INVALID_VALUE);
    EQUAL(cuLaunchKernel(spin, 1, 65536, 1, 32, 1, 1, 0, NULL, params, NULL), CUDA_ERROR_INVALID_VALUE);
    EQUAL(cuLaunchKernel(spin, 1, 1, 1, 1025, 1, 1, 0, NULL, params, NULL), CUDA_ERROR_INVALID_VALUE);
    EQUAL(cuLaunchKernel(spin, 1, 1, 1, 32, 32, 2, 0, NULL, params, NULL), CUDA_ERROR_INVALID_VALUE);
    EQUAL(cuLaunchKernel(spin, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL), CUDA_ERROR_INVALID_VALUE);
    EQUAL(cuLaunchKernel(spin, 1, 1, 1, 32, 1, 1, 0, (CUstream)99, params, NULL), CUDA_ERROR_INVALID_HANDLE);
    /* Parameters in one buffer. */
    uint64_t buffer[2] = {0, 2000};
    size_t size = sizeof buffer;
    void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, buffer, CU_LAUNCH_PARAM_BUFFER_SIZE, &size, CU_LAUNCH_PARAM_END};
    OK(cuLaunchKernel(spin, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, extra));
    EQUAL(cuLaunchKernel(spin, 1, 1, 1, 32, 1, 1, 0, NULL, params, extra), CUDA_ERROR_INVALID_VALUE);
    size = 8;
    EQUAL(cuLaunchKernel(spin, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, extra), CUDA_ERROR_INVALID_VALUE);
    /* The launches of old; a cooperative grid has to fit: 132 SMs x 2. */
    EQUAL(cuLaunchGrid(spin, 1, 1), CUDA_ERROR_INVALID_VALUE); /* no block shape yet */
    OK(cuFuncSetBlockShape(spin, 64, 1, 1));
    OK(cuParamSetv(spin, 8, &ns, sizeof ns));
    OK(cuLaunchGrid(spin, 10, 10));
    OK(cuLaunchCooperativeKernel(spin, WHOLE_GPU, 1, 1, 1024, 1, 1, 0, NULL, params));
    EQUAL(cuLaunchCooperativeKernel(spin, WHOLE_GPU + 1, 1, 1, 1024, 1, 1, 0, NULL, params),
          CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
    OK(cuCtxSynchronize());
    OK(cuModuleUnload(module));
    EQUAL(launch(1, 1, NULL), CUDA_ERROR_INVALID_HANDLE);
}

static void test_streams(void)
{
    start();
    int least, greatest, priority;
    unsigned flags;
    unsigned long long id1, id2;
    OK(cuCtxGetStreamPriorityRange(&least, &greatest));
    EQUAL(least, 0);
    EQUAL(greatest, -5);
    CUstream s = stream(CU_STREAM_NON_BLOCKING, -99), t = stream(0, 0);
    OK(cuStreamGetPriority(s, &priority));
    EQUAL(priority, -5);
    OK(cuStreamGetFlags(s, &flags));
    EQUAL(flags, CU_STREAM_NON_BLOCKING);
    OK(cuStreamGetId(s, &id1));
    OK(cuStreamGetId(t, &id2));
    TRUE(id1 != id2);
    EQUAL(cuStreamCreate(&t, 8), CUDA_ERROR_INVALID_VALUE);
    /* The priority attribute, on every kind of stream. */
    CUstream kinds[] = {s, t, NULL, CU_STREAM_LEGACY, CU_STREAM_PER_THREAD};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        CUlaunchAttributeValue v = {.priority = -3}, got = {.priority = 7};
        OK(cuStreamSetAttribute(kinds[i], CU_LAUNCH_ATTRIBUTE_PRIORITY, &v));
        OK(cuStreamGetAttribute(kinds[i], CU_LAUNCH_ATTRIBUTE_PRIORITY, &got));
        EQUAL(got.priority, -3);
        EQUAL(cuStreamSetAttribute(kinds[i], 1, &v), CUDA_ERROR_NOT_SUPPORTED);
    }
    CUlaunchAttributeValue v = {.priority = -1};
    OK(cuStreamSetAttribute_ptsz(NULL, CU_LAUNCH_ATTRIBUTE_PRIORITY, &v));
    OK(cuStreamGetPriority(CU_STREAM_PER_THREAD, &priority));
    EQUAL(priority, -1);
    OK(cuStreamGetPriority(NULL, &priority));
    EQUAL(priority, -3);
    /* Orders: a stream waits for its own work only; the legacy one for blocking streams, and they for it. */
    OK(cuStreamQuery(s));
    OK(launch(1, AN_HOUR, t));
    EQUAL(cuStreamQuery(t), CUDA_ERROR_NOT_READY);
    OK(launch(1, 1000, s));
    OK(cuStreamSynchronize(s));
    OK(launch(1, 1000, NULL));
    EQUAL(cuStreamQuery(NULL), CUDA_ERROR_NOT_READY);
    EQUAL(cuStreamQuery(CU_STREAM_LEGACY), CUDA_ERROR_NOT_READY);
    CUstream late = stream(0, 0), free_running = stream(CU_STREAM_NON_BLOCKING, 0);
    OK(launch(1, 1000, late));
    OK(launch(1, 1000, free_running));
    OK(cuStreamSynchronize(free_running));
    EQUAL(cuStreamQuery(late), CUDA_ERROR_NOT_READY);
    OK(cuStreamDestroy_v2(late)); /* its work is still there */
    EQUAL(cuStreamDestroy_v2(late), CUDA_ERROR_INVALID_HANDLE);
    EQUAL(cuStreamQuery(late), CUDA_ERROR_INVALID_HANDLE);
    EQUAL(cuStreamDestroy_v2(CU_STREAM_LEGACY), CUDA_ERROR_INVALID_HANDLE);
    /* The GPU is full of hour-long blocks: nothing else runs, whatever its priority. */
    OK(cuDevicePrimaryCtxReset_v2(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    OK(cuModuleLoadData(&module, ptx));
    OK(cuModuleGetFunction(&spin, module, "rigel_spin"));
    s = stream(1, 0), t = stream(1, -5);
    OK(launch(WHOLE_GPU, AN_HOUR, s));
    OK(launch(1, 1, t));
    EQUAL(cuStreamQuery(t), CUDA_ERROR_NOT_READY);
    OK(cuDevicePrimaryCtxReset_v2(0));
}

static void test_events(void)
{
    start();
    CUstream s = stream(1, 0), t = stream(1, 0);
    CUevent a = event(), b = event(), untimed;
    float ms;
    OK(cuEventCreate(&untimed, CU_EVENT_DISABLE_TIMING));
    EQUAL(cuEventCreate(&untimed, 64), CUDA_ERROR_INVALID_VALUE);
    OK(cuEventQuery(a)); /* never recorded */
    OK(cuEventSynchronize(a));
    EQUAL(cuEventElapsedTime(&ms, a, b), CUDA_ERROR_INVALID_HANDLE);
    OK(cuEventRecord(a, s));
    OK(launch(1, 2000000, s));
    OK(cuEventRecordWithFlags(b, s, 0));
    OK(cuEventRecord(untimed, s));
    OK(cuEventSynchronize(b));
    OK(cuEventElapsedTime(&ms, a, b));
    TRUE(ms >= 2.0f); /* in the model's time: the kernel takes exactly 2 ms */
    OK(cuEventElapsedTime(&ms, b, a));
    TRUE(ms <= -2.0f);
    OK(cuStreamSynchronize(s));
    EQUAL(cuEventElapsedTime(&ms, a, untimed), CUDA_ERROR_INVALID_HANDLE);
    OK(launch(1, AN_HOUR, s));
    OK(cuEventRecord(b, s));
    EQUAL(cuEventQuery(b), CUDA_ERROR_NOT_READY);
    EQUAL(cuEventElapsedTime(&ms, a, b), CUDA_ERROR_NOT_READY);
    OK(cuStreamWaitEvent(t, b, 0));
    OK(launch(1, 1, t));
    EQUAL(cuStreamQuery(t), CUDA_ERROR_NOT_READY);
    OK(cuEventDestroy_v2(b));
    EQUAL(cuEventQuery(b), CUDA_ERROR_INVALID_HANDLE);
    EQUAL(cuEventRecord(b, s), CUDA_ERROR_INVALID_HANDLE);
    EQUAL(cuStreamWaitEvent(t, b, 0), CUDA_ERROR_INVALID_HANDLE);
    EQUAL(cuStreamQuery(t), CUDA_ERROR_NOT_READY); /* it still waits */
    OK(cuDevicePrimaryCtxReset_v2(0));
}

static pthread_barrier_t context_is_set;
static void *blocked_launch(void *s)
{
    OK(cuCtxSetCurrent(context));
    pthread_barrier_wait(&context_is_set);
    CUresult r = CUDA_SUCCESS;
    for (int i = 0; i < 3000 && r == CUDA_SUCCESS; i++) r = launch(1, 1, s);
    return (void *)(intptr_t)r;
}

/* A stream takes 1024 operations; then the caller waits: behind an hour-long kernel, until the context goes. */
static void test_full_queue(void)
{
    start();
    CUstream s = stream(1, 0), t = stream(1, 0);
    for (int i = 0; i < 5000; i++) OK(launch(1, 1, t));
    OK(cuStreamSynchronize(t));
    OK(launch(1, AN_HOUR, s));
    pthread_t thread;
    void *result;
    pthread_barrier_init(&context_is_set, NULL, 2);
    pthread_create(&thread, NULL, blocked_launch, s);
    pthread_barrier_wait(&context_is_set);
    for (int i = 0; i < 100; i++) {
        OK(launch(1, 1, t)); /* other streams are not full */
        OK(cuStreamSynchronize(t));
    }
    OK(cuDevicePrimaryCtxReset_v2(0));
    pthread_join(thread, &result);
    TRUE(result != NULL); /* an error; which one depends on where it was */
}

/* ---- Memory */

static void test_memory(void)
{
    start();
    size_t total, before, after, pitch;
    CUdeviceptr p, q, r, m;
    OK(cuMemGetInfo_v2(&before, &total));
    EQUAL(total, 141ll << 30);
    EQUAL(before, total);
    EQUAL(cuMemAlloc_v2(&p, 0), CUDA_ERROR_INVALID_VALUE);
    EQUAL(cuMemAlloc_v2(NULL, 1), CUDA_ERROR_INVALID_VALUE);
    EQUAL(cuMemAlloc_v2(&p, total + 1), CUDA_ERROR_OUT_OF_MEMORY);
    OK(cuMemAlloc_v2(&p, 100ull << 30));
    EQUAL(cuMemAlloc_v2(&q, 50ull << 30), CUDA_ERROR_OUT_OF_MEMORY);
    OK(cuMemAlloc_v2(&q, 1 << 20));
    OK(cuMemGetInfo_v2(&after, &total));
    EQUAL(before - after, (100ll << 30) + (1 << 20));
    TRUE(p % 512 == 0 && q % 512 == 0 && (q >= p + (100ull << 30) || q + (1 << 20) <= p));
    /* A hundred gigabytes of one byte cost nothing until something else is written. */
    unsigned char host[4096], back[4096];
    OK(cuMemcpyDtoH_v2(back, p + (7ull << 30), sizeof back));
    for (size_t i = 0; i < sizeof back; i++) TRUE(back[i] == 0);
    OK(cuMemsetD8_v2(p, 0x5a, 100ull << 30));
    OK(cuMemcpyDtoH_v2(back, p + (99ull << 30), sizeof back));
    for (size_t i = 0; i < sizeof back; i++) TRUE(back[i] == 0x5a);
    OK(cuMemFree_v2(p));
    EQUAL(cuMemFree_v2(p), CUDA_ERROR_INVALID_VALUE);
    EQUAL(cuMemFree_v2(q + 512), CUDA_ERROR_INVALID_VALUE);
    OK(cuMemFree_v2(0));
    /* Data. */
    for (size_t i = 0; i < sizeof host; i++) host[i] = (unsigned char)(i * 7 + i / 256);
    OK(cuMemAlloc_v2(&r, 1 << 20));
    OK(cuMemcpyHtoD_v2(q + 100, host, sizeof host));
    OK(cuMemcpyDtoD_v2(r + 5, q + 100, sizeof host));
    OK(cuMemcpyDtoH_v2(back, r + 5, sizeof back));
    TRUE(!memcmp(host, back, sizeof back));
    CUstream s = stream(1, 0);
    OK(cuMemsetD8Async(r, 0, 1 << 20, s));
    OK(cuMemcpyHtoDAsync_v2(r + 64, host, 1000, s));
    OK(cuMemcpyDtoDAsync_v2(q, r, 4096, s));
    OK(cuMemcpyDtoHAsync_v2(back, q, 4096, s));
    OK(cuStreamSynchronize(s));
    for (size_t i = 0; i < 4096; i++) EQUAL(back[i], i >= 64 && i < 1064 ? host[i - 64] : 0);
    OK(cuMemcpyDtoH_v2_ptds(back, q + 64, 1000));
    TRUE(!memcmp(back, host, 1000));
    memset(back, 0, sizeof back);
    OK(cuMemcpy((CUdeviceptr)(uintptr_t)back, q + 64, 500)); /* which way follows from the addresses */
    TRUE(!memcmp(back, host, 500));
    OK(cuMemcpyAsync(q, (CUdeviceptr)(uintptr_t)host, 600, s));
    OK(cuMemcpyAsync((CUdeviceptr)(uintptr_t)back, q, 600, s));
    OK(cuStreamSynchronize(s));
    TRUE(!memcmp(back, host, 600));
    /* Wider memsets, a large one of zeros over data, rows. */
    uint32_t words[64];
    OK(cuMemsetD32_v2(q, 0x01020304, 64));
    OK(cuMemsetD16_v2(q + 128, 0xbeef, 4));
    OK(cuMemcpyDtoH_v2(words, q, sizeof words));
    for (size_t i = 0; i < 64; i++) EQUAL(words[i], i == 32 || i == 33 ? 0xbeefbeef : 0x01020304);
    EQUAL(cuMemsetD32_v2(q + 2, 0, 1), CUDA_ERROR_INVALID_VALUE);
    OK(cuMemsetD8_v2(q + 10, 0, (1 << 20) - 20));
    OK(cuMemcpyDtoH_v2(back, q, 4096));
    for (size_t i = 10; i < 4096; i++) EQUAL(back[i], 0);
    TRUE(back[9] == 0x03 && back[8] == 0x04);
    OK(cuMemAllocPitch_v2(&m, &pitch, 100, 10, 4));
    EQUAL(pitch, 512);
    OK(cuMemsetD2D8_v2(m, pitch, 9, 100, 10));
    OK(cuMemsetD2D32Async(m, pitch, 0x07070707, 5, 2, s));
    CUDA_MEMCPY2D rows = {.srcMemoryType = CU_MEMORYTYPE_DEVICE, .srcDevice = m, .srcPitch = pitch, .srcXInBytes = 10,
                          .srcY = 1, .dstMemoryType = CU_MEMORYTYPE_HOST, .dstHost = back, .dstPitch = 50,
                          .WidthInBytes = 50, .Height = 9};
    OK(cuMemcpy2D_v2(&rows));
    for (size_t i = 0; i < 450; i++) EQUAL(back[i], i < 10 ? 7 : 9);
    CUDA_MEMCPY3D box = {.srcMemoryType = CU_MEMORYTYPE_HOST, .srcHost = host, .srcPitch = 16, .srcHeight = 4,
                         .dstMemoryType = CU_MEMORYTYPE_DEVICE, .dstDevice = q, .dstPitch = 32, .dstHeight = 8,
                         .WidthInBytes = 16, .Height = 4, .Depth = 3};
    OK(cuMemcpy3D_v2(&box));
    OK(cuMemcpyDtoH_v2(back, q, 32 * 8 * 3));
    for (size_t z = 0; z < 3; z++)
        for (size_t y = 0; y < 4; y++) TRUE(!memcmp(back + z * 256 + y * 32, host + z * 64 + y * 16, 16));
    box.srcMemoryType = CU_MEMORYTYPE_ARRAY;
    EQUAL(cuMemcpy3D_v2(&box), CUDA_ERROR_NOT_SUPPORTED);
    /* Bad pointers. */
    EQUAL(cuMemcpyHtoD_v2(r, host, (1 << 20) + 1), CUDA_ERROR_INVALID_VALUE);
    EQUAL(cuMemcpyHtoD_v2(12345, host, 1), CUDA_ERROR_INVALID_VALUE);
    EQUAL(cuMemcpyHtoD_v2(r, NULL, 1), CUDA_ERROR_INVALID_VALUE);
    EQUAL(cuMemcpyDtoH_v2(host, (CUdeviceptr)(uintptr_t)host, 1), CUDA_ERROR_INVALID_VALUE);
    EQUAL(cuMemsetD8_v2(r + (1 << 20) - 1, 0, 2), CUDA_ERROR_INVALID_VALUE);
    OK(cuMemcpyHtoD_v2(r, host, 0));
    /* The host's own: pinned, managed, registered, stream-ordered. */
    void *pinned;
    OK(cuMemAllocHost_v2(&pinned, 100000));
    memset(pinned, 3, 100000);
    OK(cuMemcpyHtoDAsync_v2(r, pinned, 100000, s));
    OK(cuMemFreeHost(pinned));
    EQUAL(cuMemFreeHost(pinned), CUDA_ERROR_INVALID_VALUE);
    OK(cuMemAllocManaged(&m, 5000, 1));
    memset((void *)(uintptr_t)m, 42, 5000);
    OK(cuMemcpyDtoH_v2(back, m, 4096));
    TRUE(back[4095] == 42);
    OK(cuMemFree_v2(m));
    OK(cuMemHostRegister_v2(host, sizeof host, 0));
    EQUAL(cuMemHostRegister_v2(host + 8, 8, 0), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    OK(cuMemHostUnregister(host));
    EQUAL(cuMemHostUnregister(host), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    OK(cuMemAllocAsync(&m, 1000, s));
    OK(cuMemFreeAsync(m, s));
    OK(cuMemFree_v2(q));
    OK(cuDevicePrimaryCtxReset_v2(0)); /* with r and the pitched one still allocated */
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    OK(cuMemGetInfo_v2(&after, &total));
    EQUAL(after, total);
    EQUAL(cuMemcpyDtoH_v2(back, r, 1), CUDA_ERROR_INVALID_VALUE);
}

/* ---- Capture and graphs */

static int status_of(CUstream s)
{
    CUstreamCaptureStatus status = (CUstreamCaptureStatus)-1;
    OK(cuStreamIsCapturing(s, &status));
    return (int)status;
}

/* Ends a capture that is lost. */
static void end_lost(CUstream s)
{
    CUgraph g = (CUgraph)1;
    EQUAL(status_of(s), CU_STREAM_CAPTURE_STATUS_INVALIDATED);
    EQUAL(launch(1, 1, s), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    EQUAL(cuStreamEndCapture(s, &g), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    TRUE(!g);
    EQUAL(status_of(s), CU_STREAM_CAPTURE_STATUS_NONE);
    OK(launch(1, 1, s));
    OK(cuStreamSynchronize(s));
}

static void test_graphs(void)
{
    start();
    CUstream s = stream(1, -2), t = stream(1, 0);
    CUdeviceptr a, b;
    CUgraph g;
    CUgraphExec exec;
    unsigned char host[100], back[100];
    OK(cuMemAlloc_v2(&a, 100));
    OK(cuMemAlloc_v2(&b, 100));
    /* Nothing of what is captured happens before the graph is launched; then copies see the data of that moment. */
    OK(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
    EQUAL(status_of(s), CU_STREAM_CAPTURE_STATUS_ACTIVE);
    EQUAL(status_of(t), CU_STREAM_CAPTURE_STATUS_NONE);
    OK(cuMemcpyHtoDAsync_v2(a, host, 100, s));
    OK(launch(3, 1000, s));
    OK(cuMemcpyDtoDAsync_v2(b, a, 100, s));
    OK(cuMemsetD8Async(b, 1, 10, s));
    OK(cuMemcpyDtoHAsync_v2(back, b, 100, s));
    CUstreamCaptureStatus status;
    uint64_t id = 0;
    CUgraph capturing;
    const CUgraphNode *last;
    size_t count = 0;
    OK(cuStreamGetCaptureInfo_v2(s, &status, &id, &capturing, &last, &count));
    TRUE(id && count == 1 && *last);
    EQUAL(cuGraphDestroy(capturing), CUDA_ERROR_INVALID_VALUE);
    OK(cuStreamEndCapture(s, &g));
    TRUE(g == capturing);
    EQUAL(status_of(s), CU_STREAM_CAPTURE_STATUS_NONE);
    CUgraphNode nodes[8];
    OK(cuGraphGetNodes(g, NULL, &count));
    EQUAL(count, 5);
    count = 8;
    OK(cuGraphGetNodes(g, nodes, &count));
    EQUAL(count, 5);
    const int kinds[] = {CU_GRAPH_NODE_TYPE_MEMCPY, CU_GRAPH_NODE_TYPE_KERNEL, CU_GRAPH_NODE_TYPE_MEMCPY,
                         CU_GRAPH_NODE_TYPE_MEMSET, CU_GRAPH_NODE_TYPE_MEMCPY};
    for (size_t i = 0; i < count; i++) {
        int kind;
        OK(cuGraphNodeGetType(nodes[i], &kind));
        EQUAL(kind, kinds[i]);
    }
    CUDA_KERNEL_NODE_PARAMS params;
    OK(cuGraphKernelNodeGetParams_v2(nodes[1], &params));
    TRUE(params.func == spin && params.gridDimX == 3 && params.blockDimX == 1024);
    EQUAL(cuGraphKernelNodeGetParams_v2(nodes[0], &params), CUDA_ERROR_INVALID_VALUE);
    OK(cuGraphInstantiateWithFlags(&exec, g, 0));
    for (int round = 1; round <= 3; round++) {
        memset(host, round * 16, sizeof host);
        memset(back, 0, sizeof back);
        OK(cuGraphLaunch(exec, t));
        OK(cuStreamSynchronize(t));
        for (size_t i = 0; i < 100; i++) EQUAL(back[i], i < 10 ? 1 : round * 16);
    }
    /* More nodes for the same graph. */
    OK(cuStreamBeginCaptureToGraph(s, g, NULL, NULL, 0, CU_STREAM_CAPTURE_MODE_RELAXED));
    OK(launch(1, 1, s));
    OK(cuStreamEndCapture(s, &capturing));
    TRUE(g == capturing);
    OK(cuGraphGetNodes(g, NULL, &count));
    EQUAL(count, 6);
    OK(cuGraphDestroy(g));
    EQUAL(cuGraphDestroy(g), CUDA_ERROR_INVALID_VALUE);
    EQUAL(cuGraphNodeGetType(nodes[0], (int *)&count), CUDA_ERROR_INVALID_VALUE);
    /* A graph is one operation of its stream: an hour-long node keeps what follows back, other streams run. */
    OK(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
    OK(launch(1, AN_HOUR, s));
    OK(cuStreamEndCapture(s, &g));
    CUgraphExec hour;
    OK(cuGraphInstantiateWithFlags(&hour, g, 0));
    OK(cuGraphLaunch(hour, s));
    EQUAL(cuStreamQuery(s), CUDA_ERROR_NOT_READY);
    OK(cuGraphLaunch(exec, t));
    OK(cuStreamSynchronize(t));
    OK(cuGraphExecDestroy(hour)); /* while it runs */
    EQUAL(cuGraphLaunch(hour, t), CUDA_ERROR_INVALID_VALUE);
    EQUAL(cuStreamQuery(s), CUDA_ERROR_NOT_READY);
    OK(cuGraphExecDestroy(exec));
    OK(cuGraphCreate(&g, 0));
    OK(cuGraphInstantiateWithFlags(&exec, g, 0));
    OK(cuGraphLaunch(exec, t)); /* empty */
    OK(cuStreamSynchronize(t));
    OK(cuDevicePrimaryCtxReset_v2(0));
}

static void *query_elsewhere(void *e)
{
    return (void *)(intptr_t)cuEventQuery(e);
}

static void *end_elsewhere(void *s)
{
    CUgraph g;
    return (void *)(intptr_t)cuStreamEndCapture(s, &g);
}

static CUresult in_thread(void *(*function)(void *), void *argument)
{
    pthread_t t;
    void *result;
    pthread_create(&t, NULL, function, argument);
    pthread_join(t, &result);
    return (CUresult)(intptr_t)result;
}

static void test_capture_errors(void)
{
    start();
    CUstream s = stream(1, 0), t = stream(1, 0), u = stream(1, 0), blocking = stream(0, 0);
    CUevent fork = event(), join = event(), plain = event(), unused = event();
    CUgraph g;
    CUdeviceptr p;
    OK(cuEventRecord(plain, t));
    EQUAL(cuStreamEndCapture(s, &g), CUDA_ERROR_ILLEGAL_STATE);
    EQUAL(cuStreamBeginCapture_v2(NULL, 0), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    EQUAL(cuStreamBeginCapture_v2(s, 3), CUDA_ERROR_INVALID_VALUE);
    OK(cuStreamBeginCapture_v2(s, 0));
    EQUAL(cuStreamBeginCapture_v2(s, 0), CUDA_ERROR_ILLEGAL_STATE);
    OK(cuStreamEndCapture(s, &g));
    OK(cuGraphDestroy(g));
    /* The stream itself must not be queried or waited for, nor its context. */
    OK(cuStreamBeginCapture_v2(s, 0));
    EQUAL(cuStreamQuery(s), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    end_lost(s);
    OK(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_RELAXED));
    EQUAL(cuStreamSynchronize(s), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    end_lost(s);
    OK(cuStreamBeginCapture_v2(s, 0));
    EQUAL(cuCtxSynchronize(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    end_lost(s);
    /* Calls that are unsafe during a capture: of this thread, or of another one in global mode. */
    OK(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    EQUAL(cuEventQuery(plain), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    end_lost(s);
    OK(cuStreamBeginCapture_v2(s, 0));
    EQUAL(cuMemAlloc_v2(&p, 8), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    end_lost(s);
    OK(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    OK(in_thread(query_elsewhere, plain));
    EQUAL(status_of(s), CU_STREAM_CAPTURE_STATUS_ACTIVE);
    OK(cuStreamEndCapture(s, &g));
    OK(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
    EQUAL(in_thread(query_elsewhere, plain), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    end_lost(s);
    OK(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_RELAXED));
    OK(cuMemAlloc_v2(&p, 8));
    OK(cuEventQuery(plain));
    OK(cuStreamEndCapture(s, &g));
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    OK(cuThreadExchangeStreamCaptureMode(&mode));
    EQUAL(mode, CU_STREAM_CAPTURE_MODE_GLOBAL);
    OK(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
    OK(cuMemFree_v2(0));
    OK(cuEventQuery(plain)); /* allowed: the thread said so */
    OK(cuStreamEndCapture(s, &g));
    OK(cuThreadExchangeStreamCaptureMode(&mode));
    mode = (CUstreamCaptureMode)7;
    EQUAL(cuThreadExchangeStreamCaptureMode(&mode), CUDA_ERROR_INVALID_VALUE);
    /* Ended by another thread, or on another stream. */
    OK(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    EQUAL(in_thread(end_elsewhere, s), CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    OK(cuStreamEndCapture(s, &g));
    OK(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_RELAXED));
    OK(in_thread(end_elsewhere, s));
    /* Another stream joins by waiting for an event of the capture, and must be joined in turn. */
    OK(cuStreamBeginCapture_v2(s, 0));
    OK(launch(1, 1, s));
    OK(cuEventRecord(fork, s));
    EQUAL(cuEventQuery(fork), CUDA_ERROR_CAPTURED_EVENT);
    EQUAL(cuEventSynchronize(fork), CUDA_ERROR_CAPTURED_EVENT);
    EQUAL(status_of(s), CU_STREAM_CAPTURE_STATUS_ACTIVE);
    OK(cuStreamWaitEvent(t, fork, 0));
    OK(cuStreamWaitEvent(t, unused, 0)); /* never recorded: nothing */
    EQUAL(status_of(t), CU_STREAM_CAPTURE_STATUS_ACTIVE);
    OK(launch(1, 1, t));
    OK(cuEventRecord(join, t));
    OK(cuStreamWaitEvent(s, join, 0));
    OK(cuStreamEndCapture(s, &g));
    EQUAL(status_of(t), CU_STREAM_CAPTURE_STATUS_NONE);
    size_t count;
    OK(cuGraphGetNodes(g, NULL, &count));
    EQUAL(count, 2);
    EQUAL(cuEventQuery(join), CUDA_ERROR_CAPTURED_EVENT); /* until it is recorded again */
    OK(cuEventRecord(join, t));
    OK(cuEventSynchronize(join));
    OK(cuStreamBeginCapture_v2(s, 0));
    OK(cuEventRecord(fork, s));
    OK(cuStreamWaitEvent(t, fork, 0));
    OK(launch(1, 1, t));
    EQUAL(cuStreamEndCapture(s, &g), CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
    TRUE(!g && status_of(t) == CU_STREAM_CAPTURE_STATUS_NONE);
    OK(cuStreamBeginCapture_v2(s, 0));
    OK(cuEventRecord(fork, s));
    OK(cuStreamWaitEvent(t, fork, 0));
    EQUAL(cuStreamEndCapture(t, &g), CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    end_lost(s);
    /* Work from outside, and two captures that would become one. */
    OK(cuStreamBeginCapture_v2(s, 0));
    EQUAL(cuStreamWaitEvent(s, join, 0), CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    end_lost(s);
    OK(cuStreamBeginCapture_v2(s, 0));
    OK(cuStreamBeginCapture_v2(u, 0));
    OK(cuEventRecord(fork, s));
    EQUAL(cuStreamWaitEvent(u, fork, 0), CUDA_ERROR_STREAM_CAPTURE_MERGE);
    end_lost(s);
    end_lost(u);
    /* A blocking stream's capture and the legacy stream do not go together; a non-blocking one's does. */
    CUstreamCaptureStatus status;
    OK(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_RELAXED));
    OK(launch(1, 1, NULL));
    OK(cuStreamEndCapture(s, &g));
    OK(cuStreamBeginCapture_v2(blocking, CU_STREAM_CAPTURE_MODE_RELAXED));
    EQUAL(cuStreamIsCapturing(NULL, &status), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    EQUAL(status_of(blocking), CU_STREAM_CAPTURE_STATUS_ACTIVE);
    EQUAL(launch(1, 1, NULL), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    end_lost(blocking);
    OK(cuStreamBeginCapture_v2(blocking, 0));
    EQUAL(cuMemsetD8_v2(p, 0, 8), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    end_lost(blocking);
    /* What has no node. */
    OK(cuStreamBeginCapture_v2(s, 0));
    EQUAL(cuMemAllocAsync(&p, 8, s), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    end_lost(s);
    /* The per-thread stream can be captured. A stream that is destroyed takes its capture with it. */
    OK(cuStreamBeginCapture_v2_ptsz(NULL, 0));
    OK(launch(1, 1, CU_STREAM_PER_THREAD));
    OK(cuStreamEndCapture_ptsz(NULL, &g));
    OK(cuStreamBeginCapture_v2(u, 0));
    OK(cuStreamDestroy_v2(u));
    OK(cuCtxSynchronize());
}

/* ---- Threads */

enum { THREADS = 4, ROUNDS = 300 };
static void *busy_thread(void *number)
{
    uint64_t block_ns = 500, iterations = 0;
    void *params[] = {&iterations, &block_ns};
    unsigned char host[64], back[64];
    OK(cuCtxSetCurrent(context));
    CUstream s = stream((uintptr_t)number & 1, 0);
    CUevent e = event();
    CUdeviceptr p;
    OK(cuMemAlloc_v2(&p, 64));
    memset(host, (int)(uintptr_t)number, sizeof host);
    for (int i = 0; i < ROUNDS; i++) {
        OK(cuLaunchKernel_ptsz(spin, 5, 1, 1, 64, 1, 1, 0, NULL, params, NULL));
        OK(launch(2, 700, s));
        OK(cuMemcpyHtoDAsync_v2(p, host, 64, s));
        OK(cuMemcpyDtoHAsync_v2(back, p, 64, s));
        OK(cuEventRecord(e, s));
        CUresult r = cuEventQuery(e);
        TRUE(r == CUDA_SUCCESS || r == CUDA_ERROR_NOT_READY);
        if (i % 16 == 0) OK(cuEventSynchronize(e));
        if (i % 32 == 0) OK(cuStreamSynchronize_ptsz(NULL));
        if (i % 64 == 0) OK(launch(1, 100, NULL));
    }
    OK(cuStreamSynchronize(s));
    OK(cuStreamSynchronize_ptsz(NULL));
    TRUE(!memcmp(host, back, sizeof host));
    OK(cuStreamDestroy_v2(s));
    OK(cuEventDestroy_v2(e));
    OK(cuMemFree_v2(p));
    return NULL;
}

static void *capturing_thread(void *unused)
{
    OK(cuCtxSetCurrent(context));
    CUstream s = stream(1, 0);
    for (int i = 0; i < 50; i++) {
        CUgraph g;
        CUgraphExec exec;
        OK(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        OK(launch(4, 300, s));
        OK(launch(4, 300, s));
        OK(cuStreamEndCapture(s, &g));
        OK(cuGraphInstantiateWithFlags(&exec, g, 0));
        OK(cuGraphLaunch(exec, s));
        OK(cuGraphLaunch(exec, s));
        OK(cuGraphExecDestroy(exec));
        OK(cuGraphDestroy(g));
    }
    OK(cuStreamSynchronize(s));
    return unused;
}

static void *one_launch(void *unused)
{
    OK(cuCtxSetCurrent(context));
    OK(launch(1, 100, CU_STREAM_PER_THREAD));
    return unused;
}

static void test_threads(void)
{
    start();
    for (int i = 0; i < 2500; i++) { /* more than the model has streams: a thread's goes with it */
        pthread_t short_lived;
        pthread_create(&short_lived, NULL, one_launch, NULL);
        pthread_join(short_lived, NULL);
    }
    pthread_t t[THREADS + 1];
    for (uintptr_t i = 0; i < THREADS; i++) pthread_create(&t[i], NULL, busy_thread, (void *)(i + 1));
    pthread_create(&t[THREADS], NULL, capturing_thread, NULL);
    for (int i = 0; i <= THREADS; i++) pthread_join(t[i], NULL);
    OK(cuCtxSynchronize());
    /* The per-thread stream is another one in each thread: another thread's is empty. */
    OK(launch(1, AN_HOUR, CU_STREAM_PER_THREAD));
    EQUAL(cuStreamQuery_ptsz(NULL), CUDA_ERROR_NOT_READY);
    OK(cuDevicePrimaryCtxReset_v2(0));
}

/* ---- Processes */

typedef struct {
    pid_t pid;
    int to, from;
} peer;

static void tell(int fd, char c) { TRUE(write(fd, &c, 1) == 1); }
static char hear(int fd)
{
    char c = 0;
    while (read(fd, &c, 1) < 0 && errno == EINTR) continue;
    return c;
}

/* Another client of the same GPU, which runs `body` with a pipe each way. To be made before this process uses one. */
static peer spawn(void (*body)(int in, int out))
{
    int down[2], up[2];
    TRUE(!pipe(down) && !pipe(up));
    peer p = {fork(), down[1], up[0]};
    if (!p.pid) {
        close(down[1]);
        close(up[0]);
        start();
        body(down[0], up[1]);
        exit(failures ? 1 : 0);
    }
    close(down[0]);
    close(up[1]);
    return p;
}

static void reap_peer(peer p, int killed)
{
    int status = -1;
    EQUAL(waitpid(p.pid, &status, 0), p.pid);
    if (killed) TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    else TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* Takes the whole GPU for an hour, and 100 GiB; says so; waits to be killed. */
static void hog(int in, int out)
{
    CUdeviceptr p;
    OK(cuMemAlloc_v2(&p, 100ull << 30));
    OK(launch(WHOLE_GPU, AN_HOUR, NULL));
    OK(launch(WHOLE_GPU, AN_HOUR, NULL));
    EQUAL(cuStreamQuery(NULL), CUDA_ERROR_NOT_READY);
    tell(out, failures ? 'f' : 'r');
    hear(in);
}

static size_t free_memory(void)
{
    size_t free_bytes = 0, total;
    OK(cuMemGetInfo_v2(&free_bytes, &total));
    return free_bytes;
}

static void after_the_hog(peer p, int expect_waiting)
{
    CUdeviceptr m;
    EQUAL(free_memory(), 41ll << 30);
    EQUAL(cuMemAlloc_v2(&m, 60ull << 30), CUDA_ERROR_OUT_OF_MEMORY);
    OK(launch(WHOLE_GPU, 1000, NULL));
    if (expect_waiting) {
        for (int i = 0; i < 1000; i++) EQUAL(cuStreamQuery(NULL), CUDA_ERROR_NOT_READY);
    } else {
        OK(cuStreamSynchronize(NULL));
        OK(launch(WHOLE_GPU, 5000000, NULL)); /* several slices */
    }
    kill(p.pid, SIGKILL);
    OK(cuStreamSynchronize(NULL));
    siginfo_t ended;
    EQUAL(waitid(P_PID, (id_t)p.pid, &ended, WEXITED | WNOWAIT), 0);
    OK(cuMemAlloc_v2(&m, 60ull << 30)); /* while it is a zombie */
    reap_peer(p, 1);
    OK(cuMemFree_v2(m));
    EQUAL(free_memory(), 141ll << 30);
}

/* Time slices: beside a client that never ends, another one's work goes on. */
static void test_time_slices(void)
{
    peer p = spawn(hog);
    EQUAL(hear(p.from), 'r');
    start();
    after_the_hog(p, 0);
}

/* Sharing: blocks that run are not preempted, so who comes second waits until the first is gone. */
static void test_sharing_full(void)
{
    setenv("RIGEL_SIM_MPS", "1", 1);
    peer p = spawn(hog);
    EQUAL(hear(p.from), 'r');
    start();
    after_the_hog(p, 1);
}

static void half(int in, int out)
{
    OK(launch(WHOLE_GPU / 2, AN_HOUR, NULL));
    tell(out, 'r');
    hear(in);
    OK(cuDevicePrimaryCtxReset_v2(0));
}

/* Sharing: what the one leaves of the SMs the other has. */
static void test_sharing_half(void)
{
    setenv("RIGEL_SIM_MPS", "1", 1);
    peer p = spawn(half);
    EQUAL(hear(p.from), 'r');
    start();
    for (int i = 0; i < 20; i++) OK(launch(WHOLE_GPU, 1000, NULL));
    OK(cuCtxSynchronize());
    tell(p.to, 'q');
    reap_peer(p, 0);
}

/* Leaves without a word to the driver, or with memory and work at exit. */
static void leave_at_once(int in, int out)
{
    CUdeviceptr p;
    OK(cuMemAlloc_v2(&p, 1ull << 30));
    OK(launch(WHOLE_GPU, AN_HOUR, NULL));
    tell(out, 'r');
    if (hear(in) == 'u') _exit(0);
}

static void test_exit_with_work(void)
{
    setenv("RIGEL_SIM_MPS", "1", 1);
    peer a = spawn(leave_at_once), b = spawn(leave_at_once);
    EQUAL(hear(a.from), 'r');
    EQUAL(hear(b.from), 'r');
    start();
    OK(launch(1, 1000, NULL));
    EQUAL(cuStreamQuery(NULL), CUDA_ERROR_NOT_READY);
    tell(a.to, 'u');
    tell(b.to, 'e');
    OK(cuStreamSynchronize(NULL));
    reap_peer(a, 0);
    reap_peer(b, 0);
    OK(cuCtxSynchronize());
    /* The last look at /proc may have been before the end: the next one is at most 10 ms later. */
    while (free_memory() != 141ull << 30) usleep(1000);
}

/* Calls everything that changes the model, until killed. */
static void storm(int in, int out)
{
    (void)in;
    CUstream s = stream(1, -1);
    CUevent e = event();
    tell(out, 'r');
    for (unsigned i = 1;; i++) {
        CUdeviceptr p = 0;
        OK(launch(1 + i % 300, 500, i % 3 ? s : NULL));
        OK(cuEventRecord(e, s));
        cuEventQuery(e);
        if (i % 7 == 0) OK(cuStreamWaitEvent(NULL, e, 0));
        if (i % 11 == 0) OK(cuMemAlloc_v2(&p, 1 << 20));
        if (p && i % 2) OK(cuMemFree_v2(p));
        if (i % 50 == 0) {
            OK(cuStreamDestroy_v2(s));
            s = stream(1, 0);
        }
        if (i % 40 == 0) suspend(0, i % 80 == 0); /* no such thing under MPS */
        if (i % 41 == 0) set_timeslice(0, i % 100 + 1);
    }
}

/* Clients are killed at whatever instruction they are at, also with the lock held: the survivor's work all ends. */
static void kills(int mps)
{
    setenv("RIGEL_SIM_MPS", mps ? "1" : "0", 1);
    peer victims[12];
    enum { VICTIMS = sizeof victims / sizeof *victims };
    for (int i = 0; i < VICTIMS; i++) victims[i] = spawn(storm);
    start();
    CUstream s = stream(1, -5);
    CUevent e = event();
    for (int i = 0; i < VICTIMS; i++) {
        EQUAL(hear(victims[i].from), 'r');
        for (int k = 0; k < 30; k++) {
            OK(launch(50, 2000, s));
            OK(cuEventRecord(e, s));
        }
        OK(cuEventSynchronize(e));
        OK(launch(50, 2000, s));
        kill(victims[i].pid, SIGKILL);
        OK(cuStreamSynchronize(s));
        reap_peer(victims[i], 1);
    }
    OK(cuCtxSynchronize());
    while (free_memory() != 141ull << 30) usleep(1000);
}
static void test_kills_sliced(void) { kills(0); }
static void test_kills_shared(void) { kills(1); }

/* ---- Slices and suspension */

/* The whole GPU for an hour; then controls itself as it is told, and says when it has. */
static void controlled(int in, int out)
{
    OK(launch(WHOLE_GPU, AN_HOUR, NULL));
    tell(out, 'r');
    for (char c; (c = hear(in)) != 'q'; tell(out, c)) {
        if (c == 's') EQUAL(suspend(0, 1), 0);
        if (c == 'r') EQUAL(suspend(0, 0), 0);
        if (c == 't') EQUAL(set_timeslice(0, 50), 0);
        if (failures) exit(1);
    }
    OK(cuDevicePrimaryCtxReset_v2(0));
}

static void order(peer p, char what)
{
    tell(p.to, what);
    EQUAL(hear(p.from), what);
}

/*
 * The model's time for a kernel of 20 ms that follows one of 50 ms. All of it has to be in the queue before the first
 * one is done, else the time would be this machine's: then once more.
 */
static double twenty_ms(void)
{
    float ms = 0;
    CUevent from = event(), to = event();
    for (int in_time = 0; !in_time;) {
        OK(launch(WHOLE_GPU, 50000000, NULL));
        OK(cuEventRecord(from, NULL));
        OK(launch(WHOLE_GPU, 20000000, NULL));
        OK(cuEventRecord(to, NULL));
        in_time = cuEventQuery(from) == CUDA_ERROR_NOT_READY;
        OK(cuEventSynchronize(to));
    }
    OK(cuEventElapsedTime(&ms, from, to));
    OK(cuEventDestroy_v2(from));
    OK(cuEventDestroy_v2(to));
    return ms;
}

/* What a process does to itself the other one sees in the time that its kernel takes: 20 ms, and what it has to
 * wait. */
static void test_controls(void)
{
    peer p = spawn(controlled);
    EQUAL(hear(p.from), 'r');
    start();
    /* Slices of 2.048 ms each and switches of 0.17: ten times (2.048 + 0.34) between the pieces, or nine. */
    double ms = twenty_ms();
    check(ms >= 20 + 9 * 2.388 && ms <= 20.1 + 10 * 2.388, __LINE__, "%f ms beside equal slices", ms);
    order(p, 't'); /* 50 us: each wait is 0.39 ms */
    ms = twenty_ms();
    check(ms >= 20 + 9 * 0.39 && ms <= 20.1 + 10 * 0.39, __LINE__, "%f ms beside slices of 50 us", ms);
    EQUAL(set_timeslice(0, 10000), 0); /* and only two or three of them */
    ms = twenty_ms();
    check(ms >= 20 + 1 * 0.39 && ms <= 20.1 + 3 * 0.39, __LINE__, "%f ms with slices of 10 ms", ms);
    order(p, 's');
    ms = twenty_ms();
    check(ms >= 20 && ms <= 20.1, __LINE__, "%f ms beside a suspended process", ms);
    order(p, 'r');
    ms = twenty_ms();
    check(ms >= 20 + 1 * 0.39 && ms <= 20.1 + 3 * 0.39, __LINE__, "%f ms beside a resumed process", ms);
    order(p, 's');
    tell(p.to, 'q'); /* ends suspended, by itself */
    reap_peer(p, 0);
    ms = twenty_ms();
    check(ms >= 20 && ms <= 20.1, __LINE__, "%f ms alone", ms);
}

static _Atomic int accepted, finished;

static void *launch_many(void *s)
{
    OK(cuCtxSetCurrent(context));
    for (int i = 0; i < 1500; i++) {
        OK(launch(WHOLE_GPU, 1000, s));
        atomic_fetch_add(&accepted, 1);
    }
    return NULL;
}

static void *synchronise(void *unused)
{
    OK(cuCtxSetCurrent(context));
    OK(cuCtxSynchronize());
    atomic_store(&finished, 1);
    return unused;
}

/* Suspended, it launches until a queue is full, and waits for work in vain; then it is resumed and all of it is
 * done. */
static void suspended(int in, int out)
{
    enum { COUNT = 200 };
    CUevent done[COUNT];
    CUstream s = stream(1, 0), full = stream(1, 0);
    for (int i = 0; i < COUNT; i++) done[i] = event();
    CUcontext second;
    CUmodule its_module;
    CUfunction its_kernel;
    OK(launch(WHOLE_GPU, 1000, NULL));
    OK(cuCtxSynchronize());
    EQUAL(suspend(0, 1), 0);
    EQUAL(suspend(0, 1), 0);
    for (int i = 0; i < COUNT; i++) {
        OK(launch(WHOLE_GPU, 1000, s));
        OK(cuEventRecord(done[i], s));
    }
    pthread_t launcher, waiter;
    pthread_create(&launcher, NULL, launch_many, full);
    pthread_create(&waiter, NULL, synchronise, NULL);
    while (atomic_load(&accepted) < 1024) usleep(1000);
    /* A context from after the suspension is not suspended. */
    OK(cuCtxCreate_v2(&second, 0, 0));
    OK(cuModuleLoadData(&its_module, ptx));
    OK(cuModuleGetFunction(&its_kernel, its_module, "plain_kernel"));
    OK(cuLaunchKernel(its_kernel, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL));
    OK(cuCtxSynchronize());
    OK(cuCtxDestroy_v2(second));
    tell(out, 's');
    EQUAL(hear(in), 'p'); /* the other one has done its work */
    for (int i = 0; i < COUNT; i++) EQUAL(cuEventQuery(done[i]), CUDA_ERROR_NOT_READY);
    EQUAL(atomic_load(&accepted), 1024);
    EQUAL(atomic_load(&finished), 0);
    EQUAL(suspend(0, 0), 0);
    pthread_join(launcher, NULL);
    pthread_join(waiter, NULL);
    OK(cuCtxSynchronize());
    for (int i = 0; i < COUNT; i++) EQUAL(cuEventQuery(done[i]), CUDA_SUCCESS);
    EQUAL(atomic_load(&accepted), 1500);
    EQUAL(atomic_load(&finished), 1);
}

static void test_suspended(void)
{
    peer p = spawn(suspended);
    EQUAL(hear(p.from), 's');
    start();
    for (int i = 0; i < 50; i++) OK(launch(WHOLE_GPU, 1000000, NULL));
    OK(cuCtxSynchronize());
    tell(p.to, 'p');
    reap_peer(p, 0);
}

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Stopped in the middle of a kernel, which goes on where it was: it takes its own time and the pause. */
static void test_suspended_kernel(void)
{
    start();
    CUevent from = event(), to = event();
    OK(cuEventRecord(from, NULL));
    OK(launch(WHOLE_GPU, 300000000, NULL));
    OK(cuEventRecord(to, NULL));
    EQUAL(suspend(0, 1), 0);
    double stopped = seconds();
    int before_the_end = cuEventQuery(to) == CUDA_ERROR_NOT_READY; /* else this machine slept for long */
    for (int i = 0; i < 400; i++) {
        usleep(1000);
        EQUAL(cuEventQuery(to), before_the_end ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS);
    }
    double pause_ms = 1000 * (seconds() - stopped);
    EQUAL(suspend(0, 0), 0);
    OK(cuEventSynchronize(to));
    float ms = 0;
    OK(cuEventElapsedTime(&ms, from, to));
    if (before_the_end) check(ms >= 300 + pause_ms, __LINE__, "%f ms with a pause of %f", (double)ms, pause_ms);
}

/* Killed while suspended, with the GPU's queue and 100 GiB: as after_the_hog, and nobody else is suspended. */
static void suspended_hog(int in, int out)
{
    CUdeviceptr p;
    OK(cuMemAlloc_v2(&p, 100ull << 30));
    OK(launch(WHOLE_GPU, AN_HOUR, NULL));
    EQUAL(suspend(0, 1), 0);
    OK(launch(WHOLE_GPU, AN_HOUR, NULL));
    tell(out, failures ? 'f' : 'r');
    hear(in);
}

static void test_killed_suspended(void)
{
    peer p = spawn(suspended_hog);
    EQUAL(hear(p.from), 'r');
    start();
    after_the_hog(p, 0);
    OK(launch(WHOLE_GPU, 3000000, NULL));
    OK(cuCtxSynchronize());
}

static void *control_thread(void *number)
{
    for (int i = 0; i < 100; i++) {
        EQUAL(suspend(0, ((int)(intptr_t)number + i) % 2), 0); /* without a current context */
        EQUAL(set_timeslice(0, (uint64_t)(20 + i)), 0);
    }
    return NULL;
}

static void test_control_errors(void)
{
    CUcontext c;
    load_library();
    EQUAL(suspend(0, 1), -ENODEV);
    EQUAL(set_timeslice(0, 100), -ENODEV);
    OK(cuInit(0));
    EQUAL(suspend(0, 1), -ENODEV);
    OK(cuDevicePrimaryCtxRetain(&c, 0));
    EQUAL(suspend(1, 1), -ENODEV);
    EQUAL(suspend(1000, 1), -ENODEV);
    EQUAL(set_timeslice(0, 0), -EINVAL);
    EQUAL(set_timeslice(0, 1000001), -EINVAL);
    EQUAL(set_timeslice(0, UINT64_MAX), -EINVAL);
    EQUAL(set_timeslice(0, 1000000), 0);
    EQUAL(suspend(0, 0), 0); /* it is not */
    /* Several threads at once, while others launch and wait. */
    start();
    pthread_t threads[4], waiter;
    for (int i = 0; i < 4; i++) pthread_create(&threads[i], NULL, control_thread, (void *)(intptr_t)i);
    for (int i = 0; i < 300; i++) OK(launch(WHOLE_GPU, 10000, NULL));
    pthread_create(&waiter, NULL, synchronise, NULL);
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    EQUAL(suspend(0, 0), 0);
    pthread_join(waiter, NULL);
    OK(cuCtxSynchronize());
    /* It ends with the context. */
    EQUAL(suspend(0, 1), 0);
    OK(cuDevicePrimaryCtxReset_v2(0));
    EQUAL(suspend(0, 0), -ENODEV);
    start();
    OK(launch(1, 1000, NULL));
    OK(cuCtxSynchronize());
}

static void test_control_shared(void)
{
    setenv("RIGEL_SIM_MPS", "1", 1);
    start();
    EQUAL(suspend(0, 1), -ENOTSUP);
    EQUAL(set_timeslice(0, 100), -ENOTSUP);
    OK(launch(WHOLE_GPU, 1000, NULL));
    OK(cuCtxSynchronize());
}

/* A child of fork has no driver; the parent keeps its. */
static void test_fork(void)
{
    start();
    CUevent e = event();
    OK(launch(1, 1000, NULL));
    pid_t pid = fork();
    if (!pid) {
        int n;
        CUdeviceptr p;
        EQUAL(cuInit(0), CUDA_ERROR_NOT_INITIALIZED);
        EQUAL(cuDeviceGetCount(&n), CUDA_ERROR_NOT_INITIALIZED);
        EQUAL(cuMemAlloc_v2(&p, 8), CUDA_ERROR_NOT_INITIALIZED);
        EQUAL(launch(1, 1, NULL), CUDA_ERROR_NOT_INITIALIZED);
        EQUAL(cuEventQuery(e), CUDA_ERROR_NOT_INITIALIZED);
        EQUAL(suspend(0, 1), -ENODEV); /* it would be the parent that is suspended */
        exit(failures ? 1 : 0); /* runs the exit handlers: they must leave the parent's contexts alone */
    }
    int status;
    waitpid(pid, &status, 0);
    EQUAL(status, 0);
    OK(launch(1, 1000, NULL));
    OK(cuCtxSynchronize());
}

static void after_the_driver(void)
{
    CUcontext c;
    int n;
    EQUAL(cuCtxSynchronize(), CUDA_ERROR_DEINITIALIZED);
    EQUAL(cuDeviceGetCount(&n), CUDA_ERROR_DEINITIALIZED);
    EQUAL(cuCtxGetCurrent(&c), CUDA_ERROR_DEINITIALIZED);
    EQUAL(cuInit(0), CUDA_ERROR_DEINITIALIZED);
    EQUAL(suspend(0, 1), -ENODEV);
    EQUAL(set_timeslice(0, 100), -ENODEV);
    if (failures) _exit(1);
}

static void *wait_for_ever(void *unused)
{
    OK(cuCtxSetCurrent(context));
    pthread_barrier_wait(&context_is_set);
    cuCtxSynchronize();
    return unused;
}

/* Handlers run last in, first out: one from before cuInit runs after the driver's own. */
static void test_exit(void)
{
    atexit(after_the_driver);
    start();
    pthread_t t;
    OK(launch(WHOLE_GPU, AN_HOUR, NULL));
    pthread_barrier_init(&context_is_set, NULL, 2);
    pthread_create(&t, NULL, wait_for_ever, NULL); /* and somebody still waits */
    pthread_detach(t);
    pthread_barrier_wait(&context_is_set);
}

/* The UUID is the file's: the same for all its clients, and again after they have all gone. */
static void test_uuid(void)
{
    CUuuid uuid[3];
    for (int i = 0; i < 3; i++) {
        int fd[2];
        TRUE(!pipe(fd));
        pid_t pid = fork();
        if (!pid) {
            load_library();
            OK(cuInit(0));
            OK(cuDeviceGetUuid_v2(&uuid[0], 0));
            TRUE(write(fd[1], &uuid[0], 16) == 16);
            exit(failures ? 1 : 0);
        }
        TRUE(read(fd[0], &uuid[i], 16) == 16);
        waitpid(pid, NULL, 0);
    }
    TRUE(!memcmp(&uuid[0], &uuid[1], 16) && !memcmp(&uuid[1], &uuid[2], 16));
}

/* What the file was made with holds while anybody uses it; who comes when nobody does makes it anew. */
static void l4_client(int in, int out)
{
    EQUAL(attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 0), 58);
    tell(out, 'r');
    hear(in);
}

static void test_who_decides(void)
{
    setenv("RIGEL_SIM_PRESET", "l4", 1);
    peer first = spawn(l4_client);
    EQUAL(hear(first.from), 'r');
    setenv("RIGEL_SIM_PRESET", "a100", 1);
    peer second = spawn(l4_client);
    EQUAL(hear(second.from), 'r');
    kill(first.pid, SIGKILL);
    kill(second.pid, SIGKILL);
    reap_peer(first, 1);
    reap_peer(second, 1);
    start();
    EQUAL(attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 0), 108);
}

/* ---- */

static const struct {
    const char *name;
    void (*run)(void);
} tests[] = {
    {"before cuInit", test_before_init},
    {"cuGetProcAddress", test_lookup},
    {"devices", test_devices},
    {"no device, bad files", test_no_device},
    {"contexts and handles", test_contexts},
    {"modules and launches", test_modules},
    {"streams", test_streams},
    {"events", test_events},
    {"a full queue", test_full_queue},
    {"memory", test_memory},
    {"graphs", test_graphs},
    {"capture errors", test_capture_errors},
    {"threads", test_threads},
    {"two processes, time slices", test_time_slices},
    {"two processes, shared and full", test_sharing_full},
    {"two processes, shared halves", test_sharing_half},
    {"exit with work", test_exit_with_work},
    {"kills, time slices", test_kills_sliced},
    {"kills, shared", test_kills_shared},
    {"controls, two processes", test_controls},
    {"controls, suspended", test_suspended},
    {"controls, in a kernel", test_suspended_kernel},
    {"controls, killed", test_killed_suspended},
    {"controls, errors and threads", test_control_errors},
    {"controls, shared", test_control_shared},
    {"fork", test_fork},
    {"end of the process", test_exit},
    {"uuid", test_uuid},
    {"who decides what the GPU is", test_who_decides},
};

static int run_test(size_t i)
{
    snprintf(state_path, sizeof state_path, "%s/rigel-test-sim-XXXXXX", access("/dev/shm", W_OK) ? "/tmp" : "/dev/shm");
    int fd = mkstemp(state_path);
    if (fd < 0) {
        perror(state_path);
        return 1;
    }
    close(fd);
    pid_t pid = fork();
    if (!pid) {
        test_name = tests[i].name;
        setenv("RIGEL_SIM_STATE", state_path, 1);
        tests[i].run();
        exit(failures ? 1 : 0);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    unlink(state_path);
    if (status) fprintf(stderr, "test-sim: %s: failed (status %#x)\n", tests[i].name, (unsigned)status);
    return status != 0;
}

int main(int argc, char **argv)
{
    const char *path = getenv("RIGEL_SIM_LIB");
    if (path) {
        snprintf(library, sizeof library, "%s", path);
    } else {
        ssize_t n = readlink("/proc/self/exe", library, sizeof library - 64);
        char *slash = n > 0 ? memrchr(library, '/', (size_t)n) : NULL;
        if (!slash) return 1;
        strcpy(slash, "/sim/libcuda.so.1");
    }
    unsetenv("RIGEL_SIM_PRESET");
    unsetenv("RIGEL_SIM_MPS");
    unsetenv("RIGEL_SIM_DEVICES");
    int failed = 0;
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++)
        if (argc < 2 || strstr(tests[i].name, argv[1])) failed += run_test(i);
    return failed ? 1 : 0;
}
