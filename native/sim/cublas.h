/*
 * cublas.h: what the stand-in cuBLAS (cublas.c) tells tests beyond its results. They find these by dlsym.
 */
#ifndef RIGEL_SIM_CUBLAS_H
#define RIGEL_SIM_CUBLAS_H

#include "../cublas_abi.h"
#include "../cuda_abi.h"

#include <stdatomic.h>

#define API __attribute__((visibility("default")))

typedef struct {
    _Atomic int created, destroyed;
    _Atomic int calls;         /* computing calls that kept the rules */
    _Atomic int corrupted;     /* uses of a handle by two threads at once */
    _Atomic int most_creating; /* threads that were making a handle at the same moment */
} rigel_cublas_statistics;
extern API rigel_cublas_statistics rigel_cublas_counts;

/* What the handle carried at this thread's last computing call. */
typedef struct {
    cublasHandle_t handle;
    CUstream stream;
    uintptr_t workspace;
    uintptr_t settings[16]; /* in the order of cublas.def */
    const char *call;
} rigel_cublas_record;
extern API _Thread_local rigel_cublas_record rigel_cublas_last;

/* Parameters of cublasLtMatmul. */
#define RG_LT_PARAMS \
    (cublasHandle_t h, void *operation, const void *alpha, const void *a, void *a_layout, const void *b, void *b_layout, \
     const void *beta, const void *c, void *c_layout, void *d, void *d_layout, const void *algorithm, void *workspace, \
     size_t workspace_bytes, CUstream stream)

/* Called, if set, in the middle of cublasCreate and of computing calls, while the handle is in use. */
extern API void (*_Atomic rigel_cublas_inside)(const char *call);

#endif
