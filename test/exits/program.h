/*
 * program.h: what the programs that use the driver (programs.c, programs.cc, library.cc) share: they are linked against
 * libcuda.so.1, the simulated one or a real one.
 */
#ifndef RIGEL_EXITS_PROGRAM_H
#define RIGEL_EXITS_PROGRAM_H

#include "../../native/cuda_abi.h"
#include "../../native/replay/spin_ptx.h"
#include "counts.h"

#ifdef __cplusplus
extern "C" {
#endif
CUresult cuInit(unsigned flags);
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d);
CUresult cuCtxSetCurrent(CUcontext c);
CUresult cuCtxSynchronize(void);
CUresult cuModuleLoadData(CUmodule *m, const void *image);
CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name);
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                        CUstream s, void **params, void **extra);
CUresult cuMemAlloc_v2(CUdeviceptr *p, size_t n);
CUresult cuMemFree_v2(CUdeviceptr p);
CUresult cuMemAllocHost_v2(void **p, size_t n);
CUresult cuMemFreeHost(void *p);
#ifdef __cplusplus
}
#endif

static CUcontext the_context;
static CUfunction the_kernel;

/* One kernel of so many nanoseconds on the NULL stream (on a real GPU, some 19 ns an iteration). */
static inline CUresult launch(uint64_t ns)
{
    uint64_t iterations = ns / 19 + 1;
    void *params[] = {&iterations, &ns};
    count_begun();
    CUresult r = cuLaunchKernel(the_kernel, 1, 1, 1, 32, 1, 1, 0, NULL, params, NULL);
    if (r == CUDA_SUCCESS)
        count_accepted();
    return r;
}

static inline void start(void)
{
    CUmodule module;
    if (!counts)
        open_counts();
    need(cuInit(0) == CUDA_SUCCESS, "cuInit");
    need(cuDevicePrimaryCtxRetain(&the_context, 0) == CUDA_SUCCESS, "cuDevicePrimaryCtxRetain");
    need(cuCtxSetCurrent(the_context) == CUDA_SUCCESS, "cuCtxSetCurrent");
    need(cuModuleLoadData(&module, rg_spin_ptx) == CUDA_SUCCESS, "cuModuleLoadData");
    need(cuModuleGetFunction(&the_kernel, module, RG_SPIN_KERNEL) == CUDA_SUCCESS, "cuModuleGetFunction");
}

static inline void launch_some(int n)
{
    for (int i = 0; i < n; i++)
        need(launch(SHORT_NS) == CUDA_SUCCESS, "cuLaunchKernel");
}

#endif
