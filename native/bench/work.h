/*
 * work.h: what several programs here do on a GPU: a kernel of a given length, a word of the host's memory that the GPU waits on, and CHECK.
 *
 * Include it in one file of a program only. Needs CUDA's runtime, and the driver's header.
 */
#ifndef RIGEL_BENCH_WORK_H
#define RIGEL_BENCH_WORK_H

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cuda.h>
#include <cuda_runtime.h>
#include <unistd.h>

/* Ends the process where a call of CUDA's, or one that returns 0 if all is well, fails; by _exit, as some are in a child of fork. */
#define CHECK(call)                                                                               \
    do {                                                                                          \
        int error = (int)(call);                                                                  \
        if (error) {                                                                              \
            fprintf(stderr, "%s: %s: error %d\n", program_invocation_short_name, #call, error);   \
            _exit(1);                                                                             \
        }                                                                                         \
    } while (0)

/* Iterations of `work` take a microsecond on an H200, and an H200 and an H100 have so many multiprocessors: lengths are nominal elsewhere. */
enum { SMS = 132, ITERATIONS_PER_US = 170 };

__global__ void work(long long iterations, unsigned *out)
{
    unsigned x = threadIdx.x;
    for (long long i = 0; i < iterations; i++)
        x = x * 1664525u + 1013904223u;
    if (x == 12345)
        *out = x;
}

/* The device's address of a page of the host's memory. */
static inline CUdeviceptr mapped(volatile uint32_t *word)
{
    void *at = nullptr;
    CHECK(cudaHostRegister((void *)word, 4096, cudaHostRegisterMapped));
    CHECK(cudaHostGetDevicePointer(&at, (void *)word, 0));
    return (CUdeviceptr)at;
}

/* A stop in the NULL stream (native/stop.c): what is launched there from now on waits until the word is 0. */
static inline void stop_at(CUdeviceptr word)
{
    static CUresult (*wait_value)(CUstream, CUdeviceptr, cuuint32_t, unsigned);
    cudaDriverEntryPointQueryResult found;
    if (!wait_value)
        CHECK(cudaGetDriverEntryPointByVersion("cuStreamWaitValue32", (void **)&wait_value, 12000, cudaEnableDefault, &found));
    CHECK(wait_value(nullptr, word, 0, CU_STREAM_WAIT_VALUE_EQ));
}

#endif
