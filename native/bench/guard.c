/*
 * guard.c: nanoseconds a call of cublasSgemm, as one number on standard output.
 *
 * Looks cuBLAS up as CuPy does (dlsym on libcublas.so.12), multiplies with one handle in a loop, and prints the time of the
 * fastest of its rounds divided by the calls in it. What stands in front of the null libraries is decided by who starts it:
 * src/bench-hotpath.ts.
 */
#include "cublas_abi.h"
#include "cuda_abi.h"

#include <dlfcn.h>
#include <stdio.h>
#include <time.h>

enum { ROUNDS = 40, CALLS = 20000 };

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

int main(void)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *blas = dlopen("libcublas.so.12", RTLD_NOW);
    CUresult (*init)(unsigned);
    cublasStatus_t (*create)(cublasHandle_t *);
    cublasStatus_t (*gemm)(cublasHandle_t, int, int, int, int, int, const float *, const float *, int, const float *, int,
                           const float *, float *, int);
    cublasHandle_t h;
    if (!driver || !blas) {
        fprintf(stderr, "bench-guard: %s\n", dlerror());
        return 1;
    }
    *(void **)&init = dlsym(driver, "cuInit");
    *(void **)&create = dlsym(blas, "cublasCreate_v2");
    *(void **)&gemm = dlsym(blas, "cublasSgemm_v2");
    if (!init || !create || !gemm || init(0) != CUDA_SUCCESS || create(&h) != CUBLAS_STATUS_SUCCESS) {
        fprintf(stderr, "bench-guard: no usable driver and cuBLAS\n");
        return 1;
    }
    uint64_t best = UINT64_MAX;
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t start = now_ns();
        for (int i = 0; i < CALLS; i++)
            gemm(h, 0, 0, 2, 2, 2, NULL, NULL, 2, NULL, 2, NULL, NULL, 2);
        uint64_t took = now_ns() - start;
        if (took < best)
            best = took;
    }
    printf("%.2f\n", (double)best / CALLS);
    return 0;
}
