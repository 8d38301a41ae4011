/*
 * naive-preload.c: what interposing schedulers did that broke their clients, for test-cublas-scenarios.c and test/exits.test.ts.
 *
 * NAIVE=stream: every stream that a program sets on its handle becomes the NULL stream.
 * NAIVE=scheduler: multiplications are carried out by a thread of the scheduler's, which works on device 0.
 * NAIVE=destructor: the scheduler waits for the work of its client when it is unloaded, and ends the process if that fails.
 */
#include "cublas_abi.h"
#include "cuda_abi.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#pragma GCC visibility push(default)
cublasStatus_t cublasSetStream_v2(cublasHandle_t h, CUstream stream);
#define PARAMS \
    (cublasHandle_t h, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int lda, const void *b, int ldb, \
     const void *beta, void *c, int ldc)
cublasStatus_t cublasSgemm_v2 PARAMS;
#define LAUNCH_PARAMS \
    (CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, CUstream s, \
     void **params, void **extra)
CUresult cuLaunchKernel LAUNCH_PARAMS;
#pragma GCC visibility pop

static int is(const char *way)
{
    const char *now = getenv("NAIVE");
    return now && strcmp(now, way) == 0;
}

cublasStatus_t cublasSetStream_v2(cublasHandle_t h, CUstream stream)
{
    cublasStatus_t (*next)(cublasHandle_t, CUstream);
    *(void **)&next = dlsym(RTLD_NEXT, "cublasSetStream_v2");
    return next(h, is("stream") ? NULL : stream);
}

typedef struct {
    cublasHandle_t h;
    int ta, tb, m, n, k, lda, ldb, ldc;
    const void *alpha, *a, *b, *beta;
    void *c;
    cublasStatus_t status;
} job;

static void *schedule(void *argument)
{
    job *j = argument;
    CUcontext context;
    cublasStatus_t(*next) PARAMS;
    CUresult (*retain)(CUcontext *, CUdevice);
    CUresult (*select)(CUcontext);
    *(void **)&next = dlsym(RTLD_NEXT, "cublasSgemm_v2");
    *(void **)&retain = dlsym(RTLD_NEXT, "cuDevicePrimaryCtxRetain");
    *(void **)&select = dlsym(RTLD_NEXT, "cuCtxSetCurrent");
    retain(&context, 0);
    select(context);
    j->status = next(j->h, j->ta, j->tb, j->m, j->n, j->k, j->alpha, j->a, j->lda, j->b, j->ldb, j->beta, j->c, j->ldc);
    return NULL;
}

cublasStatus_t cublasSgemm_v2 PARAMS
{
    cublasStatus_t(*next) PARAMS;
    *(void **)&next = dlsym(RTLD_NEXT, "cublasSgemm_v2");
    if (!is("scheduler"))
        return next(h, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    job j = {h, ta, tb, m, n, k, lda, ldb, ldc, alpha, a, b, beta, c, CUBLAS_STATUS_INTERNAL_ERROR};
    pthread_t t;
    if (pthread_create(&t, NULL, schedule, &j) == 0)
        pthread_join(t, NULL);
    return j.status;
}

static int launched;
CUresult cuLaunchKernel LAUNCH_PARAMS
{
    CUresult(*next) LAUNCH_PARAMS;
    *(void **)&next = dlsym(RTLD_NEXT, "cuLaunchKernel");
    if (!next) /* the driver was loaded for one library alone, as PyTorch's are */
        *(void **)&next = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuLaunchKernel");
    launched = 1;
    return next(f, gx, gy, gz, bx, by, bz, shared, s, params, extra);
}

__attribute__((destructor)) static void unload(void)
{
    CUresult (*synchronize)(void);
    *(void **)&synchronize = dlsym(RTLD_NEXT, "cuCtxSynchronize");
    CUresult r = launched && is("destructor") ? synchronize() : CUDA_SUCCESS;
    if (r == CUDA_SUCCESS)
        return;
    fprintf(stderr, "scheduler: cuCtxSynchronize returned %d\n", r);
    abort();
}
