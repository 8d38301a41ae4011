/*
 * hotpath.c: bench-hotpath [ROUNDS]: nanoseconds a launch, as one number on standard output.
 *
 * Looks cuLaunchKernel up as libcudart does (dlsym on libcuda.so.1), launches on one stream in a loop, and prints the
 * time of the fastest of its rounds divided by the launches in it. Which libcuda.so.1 and whether Rigel stands in front of it
 * is decided by who starts it: src/bench-hotpath.ts, in four ways in turn.
 */
#include "cuda_abi.h"

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { ROUNDS = 40, LAUNCHES = 20000 };

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

int main(int argc, char **argv)
{
    int rounds = argc > 1 ? atoi(argv[1]) : ROUNDS;
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) {
        fprintf(stderr, "bench-hotpath: %s\n", dlerror());
        return 1;
    }
    CUresult (*init)(unsigned);
    CUresult (*launch)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **,
                       void **);
    *(void **)&init = dlsym(driver, "cuInit");
    *(void **)&launch = dlsym(driver, "cuLaunchKernel");
    if (!init || !launch || init(0) != CUDA_SUCCESS) {
        fprintf(stderr, "bench-hotpath: no usable cuInit and cuLaunchKernel\n");
        return 1;
    }
    static char function[64], stream[64];
    uint64_t best = UINT64_MAX;
    for (int round = 0; round < rounds; round++) {
        uint64_t start = now_ns();
        for (int i = 0; i < LAUNCHES; i++)
            launch((CUfunction)function, 1, 1, 1, 32, 1, 1, 0, (CUstream)stream, NULL, NULL);
        uint64_t took = now_ns() - start;
        if (took < best)
            best = took;
    }
    printf("%.2f\n", (double)best / LAUNCHES);
    return 0;
}
