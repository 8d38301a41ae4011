/* driver.c: see driver.h. */
#include "driver.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

rg_driver rg_cu;
bool rg_simulated;

void rg_say(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fputs("rigel-replay: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
}

bool rg_load_driver(char *why, size_t why_bytes)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!library) {
        snprintf(why, why_bytes, "%s", dlerror());
        return false;
    }
    rg_simulated = dlsym(library, "rigel_sim_marker") != NULL;
    /* A function pointer is copied as bytes: ISO C has no conversion from dlsym's pointer to it. */
#define DRIVER_LOAD(name, symbol, params)                                   \
    {                                                                       \
        void *address = dlsym(library, symbol);                             \
        if (!address) {                                                     \
            snprintf(why, why_bytes, "libcuda.so.1 has no " symbol);        \
            return false;                                                   \
        }                                                                   \
        memcpy(&rg_cu.name, &address, sizeof(address));                        \
    }
    RG_DRIVER(DRIVER_LOAD)
    return true;
}

const char *rg_error_name(CUresult error)
{
    const char *name = NULL;
    return rg_cu.cuGetErrorName(error, &name) == CUDA_SUCCESS && name ? name : "unknown error";
}

void rg_check(CUresult result, const char *call)
{
    if (result == CUDA_SUCCESS)
        return;
    rg_say("%s: %s (%d)", call, rg_error_name(result), (int)result);
    exit(1);
}
