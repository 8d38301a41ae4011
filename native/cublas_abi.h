/*
 * cublas_abi.h: the part of cuBLAS's binary interface that Rigel uses.
 *
 * Rigel builds without cuBLAS and never links it. Types are reduced to what the calling convention sees: every enumeration is
 * an int, every array of device pointers a pointer. Source: NVIDIA's "cuBLAS Library" manual (docs.nvidia.com/cuda/cublas), the
 * chapters on types and on helper functions; these values have been the same in cuBLAS 11, 12 and 13.
 */
#ifndef RIGEL_CUBLAS_ABI_H
#define RIGEL_CUBLAS_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef int cublasStatus_t;
typedef struct cublasContext *cublasHandle_t;

enum {
    CUBLAS_STATUS_SUCCESS = 0,
    CUBLAS_STATUS_NOT_INITIALIZED = 1,
    CUBLAS_STATUS_ALLOC_FAILED = 3,
    CUBLAS_STATUS_INVALID_VALUE = 7,
    CUBLAS_STATUS_EXECUTION_FAILED = 13,
    CUBLAS_STATUS_INTERNAL_ERROR = 14,
    CUBLAS_STATUS_NOT_SUPPORTED = 15,
};
enum { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1, CUBLAS_OP_C = 2 };
enum { CUBLAS_POINTER_MODE_HOST = 0, CUBLAS_POINTER_MODE_DEVICE = 1 };
enum { CUBLAS_MAJOR_VERSION = 0 }; /* libraryPropertyType of cublasGetProperty */

#endif
