/*
 * guard-real.c: the real cuBLAS: finding it, calling it by setting, and answering for its names (guard.c).
 *
 * Never loads a cuBLAS; the one that the program has loaded stays loaded once its functions are known.
 */
#include "guard-inside.h"

#include <dlfcn.h>
#include <string.h>

#define RG_BLAS_CALL(symbol, ...) #symbol,
#define RG_BLAS_SET(symbol, ...) #symbol,
#define RG_BLAS_GET(symbol, ...) #symbol,
#define RG_BLAS_SPECIAL(symbol, ...) #symbol,
const char *const rg_blas_names[RG_BLAS_COUNT] = {
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

_Atomic(void *) rg_blas_real[RG_BLAS_COUNT];
static _Atomic bool found;
_Atomic int rg_blas_major;

/* The cuBLAS that the program has loaded, or NULL. Never loads one. */
static void *loaded_library(void)
{
    static const char *const sonames[] = {"libcublas.so.13", "libcublas.so.12", "libcublas.so.11"};
    void *handle = NULL, *create = rg_look_up(RTLD_NEXT, "cublasCreate_v2");
    Dl_info info;
    if (create && dladdr(create, &info) && info.dli_fname)
        handle = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    for (size_t i = 0; !handle && i < sizeof sonames / sizeof *sonames; i++)
        handle = dlopen(sonames[i], RTLD_NOW | RTLD_NOLOAD);
    return handle;
}

/* Finds the real functions, in `library` or in whichever cuBLAS is loaded. It stays loaded from here on: our pointers lead into
 * it. Look-ups take the loader's lock, so none is made under one of ours; two threads may both do this and find the same. */
static bool fill(void *library)
{
    if (atomic_load_explicit(&found, memory_order_acquire))
        return true;
    void *handle = library ? library : loaded_library(), *functions[RG_BLAS_COUNT];
    if (!handle)
        return false;
    for (int i = 0; i < RG_BLAS_COUNT; i++) {
        /* Whoever is preloaded behind us has its turn, as the program's linking would have it. */
        void *next = rg_look_up(RTLD_NEXT, rg_blas_names[i]);
        functions[i] = next ? next : rg_look_up(handle, rg_blas_names[i]);
        if (functions[i] == ours[i])
            functions[i] = NULL;
    }
    cublasStatus_t (*property)(int, int *);
    int major = 0;
    *(void **)&property = rg_look_up(handle, "cublasGetProperty");
    if (property && property(CUBLAS_MAJOR_VERSION, &major) == CUBLAS_STATUS_SUCCESS)
        atomic_store_explicit(&rg_blas_major, major, memory_order_relaxed);
    dlerror(); /* what was not found is not the program's concern */
    if (!functions[RG_BLAS_cublasCreate_v2])
        return false; /* something else that has a name of cuBLAS's */
    for (int i = 0; i < RG_BLAS_COUNT; i++)
        atomic_store_explicit(&rg_blas_real[i], functions[i], memory_order_relaxed);
    atomic_store_explicit(&found, true, memory_order_release);
    return true;
}

bool rg_blas_find(void)
{
    return fill(NULL);
}

cublasStatus_t rg_blas_missing(void)
{
    return atomic_load(&found) ? CUBLAS_STATUS_NOT_SUPPORTED : CUBLAS_STATUS_NOT_INITIALIZED;
}

bool rg_guard_look_up(void *handle, const char *name, bool interposing, void **answer)
{
    int call = -1;
    for (int i = 0; i < RG_BLAS_COUNT && call < 0; i++)
        if (strcmp(name, rg_blas_names[i]) == 0)
            call = i;
    if (call < 0 || handle == RTLD_NEXT)
        return false;
    void *p;
    if (handle == RTLD_DEFAULT) {
        p = rg_look_up(RTLD_NEXT, name);
        if (!p && fill(NULL))
            p = atomic_load(&rg_blas_real[call]);
    } else {
        p = rg_look_up(handle, name);
        if (p == ours[call]) /* the handle of the whole program, in which we come first */
            p = rg_look_up(RTLD_NEXT, name);
        Dl_info info;
        if (p && interposing && !atomic_load(&found) && dladdr(p, &info) && info.dli_fname)
            fill(dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD));
    }
    /* Of a second cuBLAS in the process its own functions are handed out. */
    *answer = p && interposing && fill(NULL) && p == atomic_load(&rg_blas_real[call]) ? ours[call] : p;
    /* dlerror is to tell of this look-up and of none that was made on the way. */
    if (p)
        dlerror();
    else
        rg_look_up(RTLD_NEXT, name);
    return true;
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
