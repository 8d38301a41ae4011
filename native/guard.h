/*
 * guard.h: the cuBLAS guard (guard.c) as the other parts of librigel.so see it, and the names it exports.
 */
#ifndef RIGEL_GUARD_H
#define RIGEL_GUARD_H

#include "client.h"
#include "cublas_abi.h"
#include "library.h"

enum rg_blas {
#define RG_BLAS_CALL(symbol, ...) RG_BLAS_##symbol,
#define RG_BLAS_SET(symbol, ...) RG_BLAS_##symbol,
#define RG_BLAS_GET(symbol, ...) RG_BLAS_##symbol,
#define RG_BLAS_SPECIAL(symbol, ...) RG_BLAS_##symbol,
#include "cublas.def"
#undef RG_BLAS_CALL
#undef RG_BLAS_SET
#undef RG_BLAS_GET
#undef RG_BLAS_SPECIAL
    RG_BLAS_COUNT
};

extern rg_library rg_cublas;

/* Prototypes of all guarded functions: the names this library exports. */
#pragma GCC visibility push(default)
#define RG_BLAS_CALL(symbol, params, ...) cublasStatus_t symbol params;
#define RG_BLAS_SET(symbol, setting, type) cublasStatus_t symbol(cublasHandle_t h, type value);
#define RG_BLAS_GET(symbol, setting, type, first) cublasStatus_t symbol(cublasHandle_t h, type *value);
#define RG_BLAS_SPECIAL(symbol, params, ...) cublasStatus_t symbol params;
#include "cublas.def"
#undef RG_BLAS_CALL
#undef RG_BLAS_SET
#undef RG_BLAS_GET
#undef RG_BLAS_SPECIAL
#pragma GCC visibility pop

enum {
    RG_POOL = 64,            /* handles that the guard may make in one process, */
    RG_POOL_PER_CONTEXT = 8, /* and in one context: 64 MiB of device memory each */
    RG_GUARD_HANDLES = 1024, /* places for the program's handles that are known */
};

/* rg_guard_attach: reads RIGEL_GUARD. Called once, when the process has its slot and is about to become a client. */
void rg_guard_attach(void);

/* rg_guard_green: this context is a part of its device's SMs, given as a context (a green one): memory and handles of the primary context
 * are good in it. */
void rg_guard_green(CUcontext context);

/* rg_guard_forget_context: the context (or, if NULL, every context of device `d`) goes, and its handles with it. */
void rg_guard_forget_context(CUcontext context, CUdevice d);

/* rg_guard_forget_stream: the program destroys a stream, or has used handles past the guard: streams set before may be gone, or used. */
void rg_guard_forget_stream(void);

/* rg_guard_selected: the program has made a context current on this thread. */
void rg_guard_selected(CUcontext context);

/* rg_guard_driver_failed: a driver call of the program failed: named where a handle cannot be made. Static storage. */
RG_COLD void rg_guard_driver_failed(const char *call, CUresult code);

#endif
