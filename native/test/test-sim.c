/* test-sim.c: the simulated libcuda.so.1 in one process: error codes, look-ups, contexts, streams, events, memory. */
#include "sim-testing.h"

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
    int status, newest;
    OK(cuDriverGetVersion(&newest));
    for (size_t i = 0; i < rows; i++)
        for (uint64_t flags = 0; flags <= 2; flags++) {
            if (table[i].version > newest) { /* there for who calls it by name */
                EQUAL(cuGetProcAddress_v2(table[i].name, &p, newest, flags, &status), CUDA_SUCCESS);
                TRUE(!p && status == CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
                continue;
            }
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

/* Launches behind a stop wait for room as others do, and go on when another thread says that it is over. None is captured. */
static void test_stop(void)
{
    static _Alignas(4096) uint32_t page[1024];
    start();
    CUdeviceptr word;
    OK(cuMemHostRegister_v2(page, sizeof page, CU_MEMHOSTREGISTER_DEVICEMAP));
    OK(cuMemHostGetDevicePointer_v2(&word, page, 0));
    EQUAL(word, (CUdeviceptr)(uintptr_t)page);
    CUstream s = stream(1, 0);
    CUgraph graph;
    OK(cuStreamBeginCapture_v2(s, 0));
    EQUAL(cuStreamWaitValue32_v2(s, word, 1, CU_STREAM_WAIT_VALUE_GEQ), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    EQUAL(cuStreamEndCapture(s, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    EQUAL(set_stopped(0, 1), 0);
    OK(cuStreamWaitValue32_v2(s, word, 1, CU_STREAM_WAIT_VALUE_GEQ));
    for (int i = 1; i < 1024; i++) OK(launch(1, 1, s));
    pthread_t thread;
    void *result;
    pthread_barrier_init(&context_is_set, NULL, 2);
    pthread_create(&thread, NULL, blocked_launch, s);
    pthread_barrier_wait(&context_is_set);
    usleep(20000);
    EQUAL(cuStreamQuery(s), CUDA_ERROR_NOT_READY);
    EQUAL(set_stopped(0, 0), 0);
    pthread_join(thread, &result);
    TRUE(result == NULL); /* all 3000 */
    OK(cuStreamSynchronize(s));
    /* With its context everything at a stop goes, and a new one is not stopped. */
    EQUAL(set_stopped(0, 1), 0);
    OK(cuStreamWaitValue32_v2(s, word, 1, CU_STREAM_WAIT_VALUE_GEQ));
    OK(cuDevicePrimaryCtxReset_v2(0));
    EQUAL(set_stopped(0, 1), -ENODEV);
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    OK(cuMemHostRegister_v2(page, sizeof page, 0));
    OK(cuStreamWaitValue32_v2(NULL, word, 1, CU_STREAM_WAIT_VALUE_GEQ));
    OK(cuCtxSynchronize());
}

/* A stream writes a value once what is in front of it is done, also behind a stop; with its context it writes no more. */
static void test_write(void)
{
    static _Alignas(4096) _Atomic uint32_t page[1024];
    start();
    CUdeviceptr word = (CUdeviceptr)(uintptr_t)page;
    CUstream s = stream(1, 0);
    EQUAL(look_at_writes(99), -ENODEV);
    EQUAL(cuStreamWriteValue32_v2(s, word, 1, CU_STREAM_WRITE_VALUE_DEFAULT), CUDA_ERROR_INVALID_VALUE);
    OK(cuMemHostRegister_v2(page, sizeof page, CU_MEMHOSTREGISTER_DEVICEMAP));
    EQUAL(cuStreamWriteValue32_v2(s, word + 2, 1, CU_STREAM_WRITE_VALUE_DEFAULT), CUDA_ERROR_INVALID_VALUE);
    EQUAL(cuStreamWriteValue32_v2(s, word, 1, 1), CUDA_ERROR_NOT_SUPPORTED);
    CUgraph graph;
    OK(cuStreamBeginCapture_v2(s, 0));
    TRUE(cuStreamWriteValue32_v2(s, word, 1, CU_STREAM_WRITE_VALUE_DEFAULT) != CUDA_SUCCESS);
    EQUAL(cuStreamEndCapture(s, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    EQUAL(set_stopped(0, 1), 0);
    OK(cuStreamWaitValue32_v2(s, word + 64, 1, CU_STREAM_WAIT_VALUE_GEQ));
    for (uint32_t i = 1; i <= 5000; i++) { /* more than it keeps: of those that are done none */
        CUresult r = cuStreamWriteValue32_v2(s, word + 4 * (i & 1), i, CU_STREAM_WRITE_VALUE_DEFAULT);
        TRUE(r == (i <= 4096 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY));
    }
    OK(cuStreamWaitValue32_v2(NULL, word + 64, 1, CU_STREAM_WAIT_VALUE_GEQ));
    EQUAL(look_at_writes(0), 0);
    EQUAL(page[0], 0);
    EQUAL(set_stopped(0, 0), 0);
    OK(cuCtxSynchronize());
    EQUAL(look_at_writes(0), 0);
    EQUAL(page[0], 4096);
    EQUAL(page[1], 4095);
    EQUAL(set_stopped(0, 1), 0);
    OK(cuStreamWaitValue32_v2(s, word + 64, 1, CU_STREAM_WAIT_VALUE_GEQ));
    OK(cuStreamWriteValue32_v2(s, word, 1, CU_STREAM_WRITE_VALUE_DEFAULT));
    OK(cuDevicePrimaryCtxReset_v2(0));
    EQUAL(look_at_writes(0), 0);
    EQUAL(page[0], 4096);
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

/* ---- */

static const sim_test tests[] = {
    {"before cuInit", test_before_init},
    {"cuGetProcAddress", test_lookup},
    {"devices", test_devices},
    {"no device, bad files", test_no_device},
    {"contexts and handles", test_contexts},
    {"modules and launches", test_modules},
    {"streams", test_streams},
    {"events", test_events},
    {"a full queue", test_full_queue},
    {"stops", test_stop},
    {"writes", test_write},
    {"memory", test_memory},
};

int main(int argc, char **argv)
{
    return run_tests(argc, argv, tests, sizeof tests / sizeof *tests);
}
