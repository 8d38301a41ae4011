/*
 * guard.c: bench-guard [cold CALLS]: nanoseconds a call of cublasSgemm, as one number on standard output.
 *
 * Looks cuBLAS up as CuPy does (dlsym on libcublas.so.12), multiplies with one handle in a loop, and prints the time of the
 * fastest of its rounds divided by the calls in it. What stands in front of the null libraries is decided by who starts it:
 * src/bench-hotpath.ts. `cold`: the median of so many calls of which each finds the caches disturbed (cold.h).
 */
#include "cublas_abi.h"
#include "cuda_abi.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "cold.h"

enum { ROUNDS = 40, CALLS = 20000 };

static cublasStatus_t (*gemm)(cublasHandle_t, int, int, int, int, int, const float *, const float *, int, const float *, int,
                              const float *, float *, int);
static cublasHandle_t h;

static void one_gemm(void)
{
    gemm(h, 0, 0, 2, 2, 2, NULL, NULL, 2, NULL, 2, NULL, NULL, 2);
}

int main(int argc, char **argv)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *blas = dlopen("libcublas.so.12", RTLD_NOW);
    CUresult (*init)(unsigned);
    cublasStatus_t (*create)(cublasHandle_t *);
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
    if (argc > 2 && strcmp(argv[1], "cold") == 0)
        return cold_report(atoi(argv[2]), NULL, one_gemm);
    uint64_t best = UINT64_MAX;
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t start = cold_now_ns();
        for (int i = 0; i < CALLS; i++)
            gemm(h, 0, 0, 2, 2, 2, NULL, NULL, 2, NULL, 2, NULL, NULL, 2);
        uint64_t took = cold_now_ns() - start;
        if (took < best)
            best = took;
    }
    printf("%.2f\n", (double)best / CALLS);
    return 0;
}
