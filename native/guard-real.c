/*
 * guard-real.c: the real cuBLAS: its table of functions (library.c), and calling it by setting (guard.c).
 */
#include "guard-inside.h"

#define RG_BLAS_CALL(symbol, ...) #symbol,
#define RG_BLAS_SET(symbol, ...) #symbol,
#define RG_BLAS_GET(symbol, ...) #symbol,
#define RG_BLAS_SPECIAL(symbol, ...) #symbol,
static const char *const names[RG_BLAS_COUNT] = {
#include "cublas.def"
};
#undef RG_BLAS_CALL
#undef RG_BLAS_SET
#undef RG_BLAS_GET
#undef RG_BLAS_SPECIAL
#define RG_BLAS_CALL(symbol, ...) (void *)symbol,
#define RG_BLAS_SET(symbol, ...) (void *)symbol,
#define RG_BLAS_GET(symbol, ...) (void *)symbol,
#define RG_BLAS_SPECIAL(symbol, ...) (void *)symbol,
static void *const ours[RG_BLAS_COUNT] = {
#include "cublas.def"
};
#undef RG_BLAS_CALL
#undef RG_BLAS_SET
#undef RG_BLAS_GET
#undef RG_BLAS_SPECIAL

_Atomic int rg_blas_major;

static void entered(void *handle)
{
    cublasStatus_t (*property)(int, int *);
    int major = 0;
    *(void **)&property = rg_look_up(handle, "cublasGetProperty");
    if (property && property(CUBLAS_MAJOR_VERSION, &major) == CUBLAS_STATUS_SUCCESS)
        atomic_store_explicit(&rg_blas_major, major, memory_order_relaxed);
}

static _Atomic(void *) real[RG_COPIES * RG_BLAS_COUNT];
static const char *const sonames[] = {"libcublas.so.13", "libcublas.so.12", "libcublas.so.11", NULL};
rg_library rg_cublas = {
    .names = names,
    .ours = ours,
    .real = real,
    .count = RG_BLAS_COUNT,
    .known_by = RG_BLAS_cublasCreate_v2,
    .sonames = sonames,
    .entered = entered,
};

cublasStatus_t rg_blas_missing(void)
{
    return atomic_load(&rg_cublas.found) ? CUBLAS_STATUS_NOT_SUPPORTED : CUBLAS_STATUS_NOT_INITIALIZED;
}

/* ---- Settings ---- */

#define RG_BLAS_CALL(...)
#define RG_BLAS_SPECIAL(...)
cublasStatus_t rg_blas_set(enum rg_setting setting, cublasHandle_t h, uintptr_t value)
{
    switch (setting) {
#define RG_BLAS_SET(symbol, setting, type) \
    case SETTING_##setting: return REAL(symbol) ? REAL(symbol)(h, (type)value) : CUBLAS_STATUS_NOT_SUPPORTED;
#define RG_BLAS_GET(...)
#include "cublas.def"
#undef RG_BLAS_SET
#undef RG_BLAS_GET
    default: return CUBLAS_STATUS_INVALID_VALUE;
    }
}

cublasStatus_t rg_blas_get(enum rg_setting setting, cublasHandle_t h, uintptr_t *value)
{
    switch (setting) {
#define RG_BLAS_SET(...)
#define RG_BLAS_GET(symbol, setting, type, first) \
    case SETTING_##setting: { \
        type v = (type)0; \
        cublasStatus_t r = REAL(symbol) ? REAL(symbol)(h, &v) : CUBLAS_STATUS_NOT_SUPPORTED; \
        *value = (uintptr_t)v; \
        return r; \
    }
#include "cublas.def"
#undef RG_BLAS_SET
#undef RG_BLAS_GET
    default: return CUBLAS_STATUS_INVALID_VALUE;
    }
}
#undef RG_BLAS_CALL
#undef RG_BLAS_SPECIAL
