/*
 * naive-preload.c: what interposing schedulers did that broke their clients (S1 to S5), for test-cublas-scenarios.c and the tests
 * gpipe, gpu-gpipe, gpu-guard and exits.
 *
 * NAIVE=stream: every stream that a program sets on its handle becomes the NULL stream.
 * NAIVE=create: handles are made by threads of the scheduler's, which have no current context.
 * NAIVE=scheduler: multiplications are carried out by a thread of the scheduler's, which works on device 0.
 * NAIVE=handle: all threads of the program get the handle that was made first, and share it.
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
cublasStatus_t cublasCreate_v2(cublasHandle_t *h);
cublasStatus_t cublasDestroy_v2(cublasHandle_t h);
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

/* The next library's; or the loaded library's, where it was loaded for one library alone, as PyTorch's are. */
static void *next_of(const char *name)
{
    static const char *const sonames[] = {"libcuda.so.1", "libcublas.so.13", "libcublas.so.12", "libcublas.so.11"};
    void *found = dlsym(RTLD_NEXT, name);
    for (size_t i = 0; !found && i < sizeof sonames / sizeof *sonames; i++) {
        void *library = dlopen(sonames[i], RTLD_NOW | RTLD_NOLOAD);
        if (library)
            found = dlsym(library, name);
    }
    return found;
}

typedef struct {
    cublasHandle_t h;
    cublasStatus_t status;
} creation;

static void *create(void *argument)
{
    creation *c = argument;
    cublasStatus_t (*next)(cublasHandle_t *);
    *(void **)&next = next_of("cublasCreate_v2");
    c->status = next(&c->h);
    return NULL;
}

static creation first;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static void create_first(void)
{
    create(&first);
}

cublasStatus_t cublasCreate_v2(cublasHandle_t *h)
{
    creation c = {.status = CUBLAS_STATUS_INTERNAL_ERROR};
    if (is("handle")) {
        pthread_once(&once, create_first);
        c = first;
    } else if (is("create")) {
        pthread_t t;
        if (pthread_create(&t, NULL, create, &c) == 0)
            pthread_join(t, NULL);
    } else {
        create(&c);
    }
    *h = c.h;
    return c.status;
}

cublasStatus_t cublasDestroy_v2(cublasHandle_t h)
{
    cublasStatus_t (*next)(cublasHandle_t);
    *(void **)&next = next_of("cublasDestroy_v2");
    return is("handle") ? CUBLAS_STATUS_SUCCESS : next(h);
}

cublasStatus_t cublasSetStream_v2(cublasHandle_t h, CUstream stream)
{
    cublasStatus_t (*next)(cublasHandle_t, CUstream);
    *(void **)&next = next_of("cublasSetStream_v2");
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
    *(void **)&next = next_of("cublasSgemm_v2");
    *(void **)&retain = next_of("cuDevicePrimaryCtxRetain");
    *(void **)&select = next_of("cuCtxSetCurrent");
    retain(&context, 0);
    select(context);
    j->status = next(j->h, j->ta, j->tb, j->m, j->n, j->k, j->alpha, j->a, j->lda, j->b, j->ldb, j->beta, j->c, j->ldc);
    return NULL;
}

cublasStatus_t cublasSgemm_v2 PARAMS
{
    cublasStatus_t(*next) PARAMS;
    *(void **)&next = next_of("cublasSgemm_v2");
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
    *(void **)&next = next_of("cuLaunchKernel");
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
