/*
 * blas.h: what test programs of users that call cuBLAS share: the calls, as in NVIDIA's headers, a device, a handle, a neighbour.
 */
#ifndef RIGEL_TEST_BLAS_H
#define RIGEL_TEST_BLAS_H

#include "cublas_abi.h"
#include "cuda_abi.h"
#include "sim/cublas.h"
#include "testing.h"

#include <pthread.h>

CUresult cuInit(unsigned flags);
CUresult cuDeviceGetCount(int *count);
CUresult cuDevicePrimaryCtxGetState(CUdevice d, unsigned *flags, int *active);
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d);
CUresult cuCtxSetCurrent(CUcontext c);
CUresult cuMemAlloc_v2(CUdeviceptr *p, size_t n);
CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total);
CUresult cuMemcpyHtoD_v2(CUdeviceptr d, const void *h, size_t n);
CUresult cuMemcpyDtoH_v2(void *h, CUdeviceptr d, size_t n);
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr d, const void *h, size_t n, CUstream s);
CUresult cuMemcpyDtoHAsync_v2(void *h, CUdeviceptr d, size_t n, CUstream s);
CUresult cuStreamCreate(CUstream *s, unsigned flags);
CUresult cuStreamSynchronize(CUstream s);
CUresult cuStreamBeginCapture_v2(CUstream s, int mode);
CUresult cuStreamEndCapture(CUstream s, CUgraph *g);
CUresult cuGraphGetNodes(CUgraph g, CUgraphNode *nodes, size_t *count);
cublasStatus_t cublasCreate_v2(cublasHandle_t *h);
cublasStatus_t cublasSetStream_v2(cublasHandle_t h, CUstream s);
cublasStatus_t cublasGetStream_v2(cublasHandle_t h, CUstream *s);
cublasStatus_t cublasSgemm_v2(cublasHandle_t h, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int lda,
                              const void *b, int ldb, const void *beta, void *c, int ldc);
cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t h, int ta, int tb, int m, int n, int k, const void *alpha, const void *a,
                                         int lda, long long as, const void *b, int ldb, long long bs, const void *beta, void *c,
                                         int ldc, long long cs, int count);

static inline void select_device(CUdevice d)
{
    CUcontext c;
    CHECK_EQUAL(cuDevicePrimaryCtxRetain(&c, d), CUDA_SUCCESS);
    CHECK_EQUAL(cuCtxSetCurrent(c), CUDA_SUCCESS);
}

static inline cublasHandle_t handle(void)
{
    cublasHandle_t h = NULL;
    CHECK_EQUAL(cublasCreate_v2(&h), CUBLAS_STATUS_SUCCESS);
    return h;
}

/*
 * Set as rigel_cublas_inside: threads that make handles meet there. With MEET=1, for where nobody keeps them apart, the first waits until
 * it is met; else it gives the others time to.
 */
static inline void linger(const char *call)
{
    if (strcmp(call, "cublasCreate_v2") != 0)
        return;
    if (getenv("MEET"))
        WAIT_FOR(rigel_cublas_counts.most_creating > 1);
    else
        usleep(50000);
}

/* Starts this program again as another process, without whatever is preloaded, that fills device 0 up to 16 MiB and lives until this
 * one ends. */
static inline void move_in(void)
{
    int to[2], from[2];
    char byte;
    CHECK(pipe(to) == 0 && pipe(from) == 0);
    if (fork() == 0) {
        dup2(to[0], STDIN_FILENO);
        dup2(from[1], STDOUT_FILENO);
        close(to[1]);
        unsetenv("LD_PRELOAD");
        execl("/proc/self/exe", "neighbour", "neighbour", (char *)NULL);
        _exit(1);
    }
    close(from[1]);
    CHECK(read(from[0], &byte, 1) == 1);
    /* `to` stays open until we end. */
}

/* What main does for that: whether this process is the neighbour, which has gone by then. */
static inline bool was_neighbour(int argc, char **argv)
{
    size_t free_bytes, total;
    CUdeviceptr p;
    char byte;
    if (argc != 2 || strcmp(argv[1], "neighbour") != 0)
        return false;
    CHECK_EQUAL(cuInit(0), CUDA_SUCCESS);
    select_device(0);
    CHECK_EQUAL(cuMemGetInfo_v2(&free_bytes, &total), CUDA_SUCCESS);
    CHECK_EQUAL(cuMemAlloc_v2(&p, free_bytes - (16 << 20)), CUDA_SUCCESS);
    CHECK(write(STDOUT_FILENO, "!", 1) == 1);
    CHECK(read(STDIN_FILENO, &byte, 1) == 0);
    return true;
}

#endif
