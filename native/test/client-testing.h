/*
 * client-testing.h: what test programs share that become a client: its segment, its environment, the simulated GPU and a kernel.
 *
 * The client's parts are linked into such a program, so that sanitizers see them; the hooks are called by name, what Rigel does not
 * hook through `cu`, and both reach the simulated libcuda.so.1. Each case is a process, with files of its own.
 */
#ifndef RIGEL_CLIENT_TESTING_H
#define RIGEL_CLIENT_TESTING_H

#include "client.h"
#include "rigel.h"
#include "testing.h"

static rg_segment *seg;
static const char *segment_path;
static CUcontext context;
static CUfunction spin; /* a kernel whose blocks each take the time that it is given */
enum { OTHER = 40 };    /* slot of a client that is not there, but that the others take to be alive */
#define NEVER_QUIET_US 4000000000u /* agent_ends_periods */

#define DRIVER_FUNCTIONS(X) \
    X(cuDeviceGetName, (char *, int, CUdevice)) \
    X(cuDeviceTotalMem_v2, (size_t *, CUdevice)) \
    X(cuDevicePrimaryCtxRetain, (CUcontext *, CUdevice)) \
    X(cuDevicePrimaryCtxGetState, (CUdevice, unsigned *, int *)) \
    X(cuCtxCreate_v2, (CUcontext *, unsigned, CUdevice)) \
    X(cuCtxAttach, (CUcontext *, unsigned)) \
    X(cuCtxSetCurrent, (CUcontext)) \
    X(cuCtxGetCurrent, (CUcontext *)) \
    X(cuModuleLoadData, (CUmodule *, const void *)) \
    X(cuModuleGetFunction, (CUfunction *, CUmodule, const char *)) \
    X(cuStreamGetPriority, (CUstream, int *)) \
    X(cuStreamWaitEvent, (CUstream, CUevent, unsigned)) \
    X(cuEventCreate, (CUevent *, unsigned)) \
    X(cuGraphGetNodes, (CUgraph, CUgraphNode *, size_t *)) \
    X(cuGraphCreate, (CUgraph *, unsigned)) \
    X(cuGraphDestroy, (CUgraph)) \
    X(cuMemAlloc_v2, (CUdeviceptr *, size_t)) \
    X(cuMemGetInfo_v2, (size_t *, size_t *)) \
    X(cuMemHostAlloc, (void **, size_t, unsigned)) \
    X(cuMemAddressReserve, (CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long)) \
    X(cuMemSetAccess, (CUdeviceptr, size_t, const CUmemAccessDesc *, size_t)) \
    X(cuDeviceGetDefaultMemPool, (CUmemoryPool *, CUdevice)) \
    X(cuMemPoolCreate, (CUmemoryPool *, const CUmemPoolProps *)) \
    X(cuMemPoolSetAttribute, (CUmemoryPool, int, void *)) \
    X(cuMemPoolGetAttribute, (CUmemoryPool, int, void *))
static struct {
#define MEMBER(symbol, params) CUresult(*symbol) params;
    DRIVER_FUNCTIONS(MEMBER)
#undef MEMBER
} cu;

#define PTX_HEADER ".version 6.0\n.target sm_52\n.address_size 64\n"
#define PTX_KERNEL(name) ".visible .entry " name "(.param .u64 n, .param .u64 ns)\n{ ret; }\n"

/* A new segment in this file, opened. */
static inline rg_segment *fresh_segment(const char *path)
{
    char why[512];
    unlink(path);
    CHECK_EQUAL(rg_segment_create(path), 0);
    rg_segment *made = rg_segment_open(path, why, sizeof why);
    CHECK(made != NULL);
    return made;
}

/* What this process becomes is a client of this class and of a segment of its own, with a simulated GPU of its own. */
static inline void prepare_client(const char *what, const char *class)
{
    char sim[64];
    segment_path = scratch(what);
    seg = fresh_segment(segment_path);
    snprintf(sim, sizeof sim, "%s-sim", what);
    setenv("RIGEL_SEGMENT", segment_path, 1);
    setenv("RIGEL_CLASS", class, 1);
    setenv("RIGEL_NAME", "test", 1);
    setenv("RIGEL_SIM_STATE", scratch(sim), 1);
}

/* The same for cases about waiting: nobody is let out for having waited long, and the gate is what holds, unless a case says so. */
static inline void prepare_waiting_client(const char *what, const char *class)
{
    prepare_client(what, class);
    atomic_store(&seg->clients[OTHER].heartbeat_ns, UINT64_MAX / 2); /* never stale */
    seg->settings.starvation_us = 600000000;
    seg->settings.preempt = 0; /* the simulated GPU offers it; then nobody waits here */
}

static inline void find_driver(void)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    CHECK(driver != NULL);
#define FIND(symbol, params) *(void **)&cu.symbol = dlsym(driver, #symbol); CHECK(cu.symbol != NULL);
    DRIVER_FUNCTIONS(FIND)
#undef FIND
}

/* Attaches: the driver is initialised, and the first GPU's context current. */
static inline void attach_client(void)
{
    find_driver();
    CHECK_EQUAL(cuInit(0), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuDevicePrimaryCtxRetain(&context, 0), CUDA_SUCCESS);
    CHECK_EQUAL(cuCtxSetCurrent(context), CUDA_SUCCESS);
}

/* Loads a module that has `rigel_spin`; NULL: one that has nothing else. */
static inline CUmodule load_kernels(const char *ptx)
{
    CUmodule module;
    CHECK_EQUAL(cu.cuModuleLoadData(&module, ptx ? ptx : PTX_HEADER PTX_KERNEL("rigel_spin")), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuModuleGetFunction(&spin, module, "rigel_spin"), CUDA_SUCCESS);
    return module;
}

/*
 * The driver gives the handles of kernels that are gone out again; the simulated one does not. So a kernel here becomes another as some module is
 * unloaded: from then on the driver has this name for it. Rigel's agent has to have stopped.
 */
static CUresult (*name_before)(const char **, CUfunction);
static CUfunction reborn;
static const char *reborn_name;
static inline CUresult name_now(const char **name, CUfunction f)
{
    CUresult r = name_before(name, f);
    *name = r == CUDA_SUCCESS && f == reborn ? reborn_name : *name;
    return r;
}
static inline void unload_and_give_out_again(CUfunction f, const char *name)
{
    CUmodule other;
    CHECK_EQUAL(cu.cuModuleLoadData(&other, PTX_HEADER PTX_KERNEL("other")), CUDA_SUCCESS);
    if (!name_before)
        name_before = rg_real.cuFuncGetName;
    rg_real.cuFuncGetName = name_now;
    reborn = f;
    reborn_name = name;
    CHECK_EQUAL(cuModuleUnload(other), CUDA_SUCCESS);
}

/* Launches that many blocks of one warp. */
static inline void launch_blocks(CUfunction f, CUstream s, unsigned blocks, uint64_t block_ns)
{
    uint64_t n = 1;
    void *params[] = {&n, &block_ns};
    CHECK_EQUAL(cuLaunchKernel(f, blocks, 1, 1, 32, 1, 1, 0, s, params, NULL), CUDA_SUCCESS);
}

/* So many more signs of life of this client: after two the agent has done all that it does at one since this was called. */
static inline void beats(int n)
{
    for (uint64_t seen; n; n--) {
        seen = atomic_load(&rg.slot->heartbeat_ns);
        WAIT_FOR(atomic_load(&rg.slot->heartbeat_ns) != seen);
    }
}

/*
 * Whether the agent asks the GPU soon after a high client's last launch if it is idle, or never. Never where a case is not about the agent:
 * then no busy period ends because a thread has lost its processor between two calls. As it returns the agent goes by what was said last.
 */
static inline void agent_ends_periods(bool soon)
{
    seg->settings.quiet_us = soon ? 250 : NEVER_QUIET_US;
    if (!soon)
        beats(1);
}

/* Removes the files of this process. */
static inline void done(void)
{
    unlink(getenv("RIGEL_SIM_STATE"));
    unlink(segment_path);
}

#endif
