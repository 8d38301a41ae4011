/*
 * null-cublas.c: a libcublas.so.12 whose multiplication does nothing, for bench/guard.c. Never used by anything else.
 */
#include "cublas_abi.h"
#include "cuda_abi.h"

#pragma GCC diagnostic ignored "-Wunused-parameter"
#pragma GCC visibility push(default)

static char handle;

cublasStatus_t cublasCreate_v2(cublasHandle_t *out);
cublasStatus_t cublasCreate_v2(cublasHandle_t *out)
{
    *out = (cublasHandle_t)&handle;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSgemm_v2(cublasHandle_t h, int ta, int tb, int m, int n, int k, const float *alpha, const float *a, int lda,
                              const float *b, int ldb, const float *beta, float *c, int ldc);
cublasStatus_t cublasSgemm_v2(cublasHandle_t h, int ta, int tb, int m, int n, int k, const float *alpha, const float *a, int lda,
                              const float *b, int ldb, const float *beta, float *c, int ldc)
{
    return CUBLAS_STATUS_SUCCESS;
}
