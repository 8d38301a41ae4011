/*
 * cudart.h: what the programs that use the CUDA runtime share (cudart-object.cu, cudart-programs.cu); needs nvcc. Each object file
 * has its own counts of the same file.
 */
#ifndef RIGEL_EXITS_CUDART_H
#define RIGEL_EXITS_CUDART_H

#include "counts.h"

#include <cuda_runtime.h>

/* Launches by `f`, counted as counts.h has it, and returns the runtime's answer. */
template <typename F> static cudaError_t count_launch(F f)
{
    if (!counts)
        open_counts();
    count_begun();
    f();
    cudaError_t r = cudaGetLastError();
    if (r == cudaSuccess)
        count_accepted();
    return r;
}

void use_object();

#endif
