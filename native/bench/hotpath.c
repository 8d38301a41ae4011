/*
 * hotpath.c: bench-hotpath [ROUNDS | cold CALLS [launch | null | sync | event | request]]: nanoseconds a launch, as one number on standard output.
 *
 * Looks cuLaunchKernel up as libcudart does (dlsym on libcuda.so.1), launches on one stream in a loop, and prints the
 * time of the fastest of its rounds divided by the launches in it. Which libcuda.so.1 and whether Rigel stands in front of it
 * is decided by who starts it: src/bench-hotpath.ts, in several ways in turn.
 * BENCH_BYPASS=1: past Rigel (rigel_bypass_begin).
 * `cold`: the median of so many calls of which each finds the caches disturbed (cold.h): of a launch, of one on the NULL stream, of a
 * synchronisation of the stream after a launch, or of an event recorded after one. `request`: of so many requests of 229 launches of
 * 25 kernels, as ResNet-50's are, of which each request finds all caches disturbed, and each launch those of the first level.
 */
#include "cuda_abi.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <time.h>

#include "cold.h"

enum { ROUNDS = 40, LAUNCHES = 20000, COLD_CALLS = 1000, REQUEST = 229, KERNELS = 25, KERNEL_BYTES = 848 };

static CUresult (*init)(unsigned);
static CUresult (*launch)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **);
static CUresult (*synchronize)(CUstream);
static CUresult (*record)(CUevent, CUstream);
static char function[64], stream[64], event[64], kernels[KERNELS][KERNEL_BYTES];

static void one_launch(void)
{
    launch((CUfunction)function, 1, 1, 1, 32, 1, 1, 0, (CUstream)stream, NULL, NULL);
}

static void one_of_many(int i)
{
    launch((CUfunction)kernels[i * 7 % KERNELS], 1, 1, 1, 32, 1, 1, 0, (CUstream)stream, NULL, NULL);
}

static void one_null_launch(void)
{
    launch((CUfunction)function, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL);
}

static void one_sync(void)
{
    synchronize((CUstream)stream);
}

static void one_event(void)
{
    record((CUevent)event, (CUstream)stream);
}

int main(int argc, char **argv)
{
    bool is_cold = argc > 1 && strcmp(argv[1], "cold") == 0;
    int rounds = argc > 1 && !is_cold ? atoi(argv[1]) : ROUNDS;
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) {
        fprintf(stderr, "bench-hotpath: %s\n", dlerror());
        return 1;
    }
    *(void **)&init = dlsym(driver, "cuInit");
    *(void **)&launch = dlsym(driver, "cuLaunchKernel");
    *(void **)&synchronize = dlsym(driver, "cuStreamSynchronize");
    *(void **)&record = dlsym(driver, "cuEventRecord");
    if (!init || !launch || !synchronize || !record || init(0) != CUDA_SUCCESS) {
        fprintf(stderr, "bench-hotpath: no usable driver\n");
        return 1;
    }
    const char *bypass = getenv("BENCH_BYPASS");
    int (*begin)(void) = NULL;
    *(void **)&begin = dlsym(RTLD_DEFAULT, "rigel_bypass_begin");
    if (bypass && (!begin || begin() != 0)) {
        fprintf(stderr, "bench-hotpath: Rigel cannot be bypassed here\n");
        return 1;
    }
    if (is_cold) {
        int calls = argc > 2 ? atoi(argv[2]) : COLD_CALLS;
        const char *what = argc > 3 ? argv[3] : "launch";
        if (strcmp(what, "request") == 0)
            return cold_report_requests(calls, REQUEST, one_of_many);
        if (strcmp(what, "null") == 0)
            return cold_report(calls, NULL, one_null_launch);
        if (strcmp(what, "sync") == 0)
            return cold_report(calls, one_launch, one_sync);
        if (strcmp(what, "event") == 0)
            return cold_report(calls, one_launch, one_event);
        return cold_report(calls, NULL, one_launch);
    }
    const char *settle = getenv("BENCH_SETTLE_MS"); /* until Rigel's agent has seen what this client can do */
    if (settle) {
        launch((CUfunction)function, 1, 1, 1, 32, 1, 1, 0, (CUstream)stream, NULL, NULL);
        usleep((useconds_t)atoi(settle) * 1000);
    }
    uint64_t best = UINT64_MAX;
    for (int round = 0; round < rounds; round++) {
        uint64_t start = cold_now_ns();
        for (int i = 0; i < LAUNCHES; i++)
            launch((CUfunction)function, 1, 1, 1, 32, 1, 1, 0, (CUstream)stream, NULL, NULL);
        uint64_t took = cold_now_ns() - start;
        if (took < best)
            best = took;
    }
    printf("%.2f\n", (double)best / LAUNCHES);
    return 0;
}
