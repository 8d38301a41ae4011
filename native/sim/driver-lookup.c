/*
 * driver-lookup.c: cuGetProcAddress in both forms, from the table of what this library exports.
 *
 * A name has a function for each version of its binary interface; the newest that the asker's CUDA version knows is
 * meant. The pointer is always that of an exported symbol: libcudart and Rigel's interposer rely on it.
 */
#include "driver.h"

#include <string.h>

/* Declared without their types: only the addresses matter, and protected visibility makes them our own. */
#define RG_EXPORT(name, version, symbol) API void symbol(void);
#define RG_EXPORT_PT(name, version, symbol, per_thread) \
    API void symbol(void); \
    API void per_thread(void);
#include "driver-exports.def"
#undef RG_EXPORT
#undef RG_EXPORT_PT

static const struct {
    const char *name;
    int version;
    void (*function)(void), (*per_thread)(void);
} table[] = {
#define RG_EXPORT(name, version, symbol) {#name, version, symbol, symbol},
#define RG_EXPORT_PT(name, version, symbol, per_thread) {#name, version, symbol, per_thread},
#include "driver-exports.def"
};

static CUresult look_up(const char *name, void **out, int version, uint64_t flags, int *status)
{
    if (!name || !out || version > SIM_DRIVER_VERSION || flags > CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM)
        return CUDA_ERROR_INVALID_VALUE;
    int known = 0, best = -1;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        if (strcmp(table[i].name, name)) continue;
        known = 1;
        if (table[i].version <= version && (best < 0 || table[i].version > table[best].version)) best = (int)i;
    }
    int per_thread = flags == CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
    *out = best < 0     ? NULL
           : per_thread ? (void *)(uintptr_t)table[best].per_thread
                        : (void *)(uintptr_t)table[best].function;
    *status = best >= 0 ? CU_GET_PROC_ADDRESS_SUCCESS
              : known   ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                        : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return CUDA_SUCCESS;
}

/* CUDA 11's form has no status: what is not there is an error. */
CUresult sim_get_proc_address(const char *name, void **out, int version, uint64_t flags)
{
    int status;
    CUresult r = look_up(name, out, version, flags, &status);
    return r == CUDA_SUCCESS && status != CU_GET_PROC_ADDRESS_SUCCESS ? CUDA_ERROR_NOT_FOUND : r;
}

CUresult sim_get_proc_address_v2(const char *name, void **out, int version, uint64_t flags, int *status)
{
    int ignored;
    return look_up(name, out, version, flags, status ? status : &ignored);
}
