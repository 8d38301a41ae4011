/*
 * sim-testing.h: what the tests of the simulated libcuda.so.1 from the outside share: its functions, checks, a process for each test.
 *
 * Loads build/sim/libcuda.so.1 beside the program, or RIGEL_SIM_LIB. Each test runs in a process of its own with a shared file of its
 * own. Nothing in them depends on how fast the machine is: a kernel that must not be finished takes an hour, and ends with its
 * context or its process.
 */
#ifndef RIGEL_SIM_TESTING_H
#define RIGEL_SIM_TESTING_H

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
    F(cuMemHostGetDevicePointer_v2, (CUdeviceptr *, void *, unsigned)) \
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
    F(cuStreamWaitValue32_v2, (CUstream, CUdeviceptr, uint32_t, unsigned)) \
    F(cuStreamWriteValue32_v2, (CUstream, CUdeviceptr, uint32_t, unsigned)) \
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
static __typeof__(rigelSimStop) *set_stopped;
static __typeof__(rigelSimWrites) *look_at_writes;
static __typeof__(rigelSimBusy) *busy_processes;

/* ---- Checks */

static int failures;
static const char *test_name = "";
static char library[4096], state_path[256];

__attribute__((format(printf, 3, 4))) static void check(int ok, int line, const char *format, ...)
{
    if (ok) return;
    va_list args;
    va_start(args, format);
    fprintf(stderr, "%s:%d: %s: ", __BASE_FILE__, line, test_name);
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

static inline void *load_library(void)
{
    void *h = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (!h) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
#define RESOLVE(name, params) \
    *(void **)&name = dlsym(h, #name); \
    check(name != NULL, __LINE__, "%s is not exported", #name);
    FUNCTIONS(RESOLVE)
    *(void **)&set_timeslice = dlsym(h, "rigelSimSetTimeslice");
    *(void **)&suspend = dlsym(h, "rigelSimSuspend");
    *(void **)&set_stopped = dlsym(h, "rigelSimStop");
    *(void **)&look_at_writes = dlsym(h, "rigelSimWrites");
    *(void **)&busy_processes = dlsym(h, "rigelSimBusy");
    TRUE(set_timeslice && suspend && set_stopped && busy_processes);
    if (failures) exit(1);
    return h;
}

static const char ptx[] = ".version 6.0\n.target sm_52\n.address_size 64\n"
                          ".visible .entry rigel_spin(.param .u64 iterations, .param .u64 block_ns) { ret; }\n"
                          ".visible .entry plain_kernel() { ret; }\n";
static CUcontext context;
static CUmodule module;
static CUfunction spin;

static inline void start(void)
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
static inline CUresult launch(unsigned blocks, uint64_t block_ns, CUstream s)
{
    uint64_t iterations = 0;
    void *params[] = {&iterations, &block_ns};
    return cuLaunchKernel(spin, blocks, 1, 1, 1024, 1, 1, 0, s, params, NULL);
}

static inline CUstream stream(unsigned flags, int priority)
{
    CUstream s = NULL;
    OK(cuStreamCreateWithPriority(&s, flags, priority));
    return s;
}

static inline CUevent event(void)
{
    CUevent e = NULL;
    OK(cuEventCreate(&e, 0));
    return e;
}

static inline int attribute(int which, CUdevice d)
{
    int value = -1;
    OK(cuDeviceGetAttribute(&value, which, d));
    return value;
}

/* ---- Running them */

typedef struct {
    const char *name;
    void (*run)(void);
} sim_test;

static int run_test(const sim_test *test)
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
        test_name = test->name;
        setenv("RIGEL_SIM_STATE", state_path, 1);
        test->run();
        exit(failures ? 1 : 0);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    unlink(state_path);
    if (status) fprintf(stderr, "%s: failed (status %#x)\n", test->name, (unsigned)status);
    return status != 0;
}

/* What a test program's main does: all tests, or those whose name holds the argument. */
static inline int run_tests(int argc, char **argv, const sim_test *tests, size_t count)
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
    for (size_t i = 0; i < count; i++)
        if (argc < 2 || strstr(tests[i].name, argv[1])) failed += run_test(&tests[i]);
    return failed ? 1 : 0;
}

#endif
