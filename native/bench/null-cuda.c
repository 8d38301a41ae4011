/*
 * null-cuda.c: a libcuda.so.1 whose launch does nothing, for bench/hotpath.c.
 *
 * Every function the benchmark or librigel.so calls answers success at once, so what is timed is the call and what Rigel
 * adds to it. Never used by anything else.
 */
#include "cuda_abi.h"

#include <string.h>

#define NOTHING(symbol, params) \
    CUresult symbol params; \
    CUresult symbol params \
    { \
        return CUDA_SUCCESS; \
    }
#pragma GCC diagnostic ignored "-Wunused-parameter"
#pragma GCC visibility push(default)

NOTHING(cuInit, (unsigned flags))
NOTHING(cuLaunchKernel, (CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                         unsigned smem, CUstream s, void **params, void **extra))
NOTHING(cuCtxPushCurrent_v2, (CUcontext c))
NOTHING(cuStreamSetAttribute, (CUstream s, int id, const void *value))
NOTHING(cuThreadExchangeStreamCaptureMode, (int *mode))
NOTHING(cuEventRecord, (CUevent e, CUstream s))
NOTHING(cuEventQuery, (CUevent e))
NOTHING(cuStreamSynchronize, (CUstream s))

#ifdef RG_STOPS
/* As the simulated GPU under MPS, as far as Rigel asks: nothing to suspend, and a wait for a word, which costs nothing here either. */
#include <errno.h>
int rigelSimSetTimeslice(unsigned ordinal, uint64_t us);
int rigelSimSetTimeslice(unsigned ordinal, uint64_t us)
{
    return -ENOTSUP;
}
int rigelSimSuspend(unsigned ordinal, int suspend);
int rigelSimSuspend(unsigned ordinal, int suspend)
{
    return -ENOTSUP;
}
NOTHING(cuMemHostRegister_v2, (void *p, size_t bytes, unsigned flags))
NOTHING(cuMemHostGetDevicePointer_v2, (CUdeviceptr *out, void *p, unsigned flags))
NOTHING(cuStreamWaitValue32_v2, (CUstream s, CUdeviceptr at, uint32_t value, unsigned flags))
#endif

static char context, event;

CUresult cuCtxGetCurrent(CUcontext *c);
CUresult cuCtxGetCurrent(CUcontext *c)
{
    *c = (CUcontext)&context;
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext *c);
CUresult cuCtxPopCurrent_v2(CUcontext *c)
{
    return cuCtxGetCurrent(c);
}

CUresult cuStreamGetCtx(CUstream s, CUcontext *c);
CUresult cuStreamGetCtx(CUstream s, CUcontext *c)
{
    return cuCtxGetCurrent(c);
}

CUresult cuCtxGetDevice(CUdevice *d);
CUresult cuCtxGetDevice(CUdevice *d)
{
    *d = 0;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice d);
CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice d)
{
    memset(uuid, 7, sizeof *uuid);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int bytes, CUdevice d);
CUresult cuDeviceGetName(char *name, int bytes, CUdevice d)
{
    strncpy(name, "null", (size_t)bytes);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest);
CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = -5;
    return CUDA_SUCCESS;
}

/* What a launch counts as one for in flight, as it does where durations are not known. */
CUresult cuEventElapsedTime(float *ms, CUevent a, CUevent b);
CUresult cuEventElapsedTime(float *ms, CUevent a, CUevent b)
{
    *ms = 0.1f;
    return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent *e, unsigned flags);
CUresult cuEventCreate(CUevent *e, unsigned flags)
{
    *e = (CUevent)&event;
    return CUDA_SUCCESS;
}
