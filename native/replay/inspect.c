/* inspect.c: loads the driver and asks it who it is. Uses nothing of the replay: a driver that lacks functions is shown, too. */
#include "inspect.h"

#include "../cuda_abi.h"

#include <dlfcn.h>
#include <gnu/libc-version.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void rg_print_json(const char *text)
{
    if (!text) {
        fputs("null", stdout);
        return;
    }
    putchar('"');
    for (; *text; text++) {
        unsigned char c = (unsigned char)*text;
        if (c == '"' || c == '\\')
            printf("\\%c", c);
        else if (c < 32)
            printf("\\u%04x", c);
        else
            putchar(c);
    }
    putchar('"');
}

/* A function pointer is copied as bytes: ISO C has no conversion from dlsym's pointer to it. */
#define FIND(pointer, library, name)                     \
    do {                                                 \
        void *address = dlsym(library, name);            \
        memcpy(&(pointer), &address, sizeof(pointer));   \
    } while (0)

int rg_inspect(void)
{
    CUresult (*init)(unsigned) = NULL, (*driver_version)(int *) = NULL, (*error_name)(CUresult, const char **) = NULL,
             (*device_count)(int *) = NULL, (*device_get)(CUdevice *, int) = NULL,
             (*device_attribute)(int *, int, CUdevice) = NULL;
    int version = 0, count = 0;
    CUresult result = CUDA_SUCCESS;
    const char *name = NULL, *why = NULL;
    char *path = NULL;
    Dl_info info;
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!library) {
        why = dlerror();
    } else {
        void *symbol = dlsym(library, "cuInit");
        if (symbol && dladdr(symbol, &info) && info.dli_fname)
            path = realpath(info.dli_fname, NULL);
        FIND(init, library, "cuInit");
        FIND(driver_version, library, "cuDriverGetVersion");
        FIND(error_name, library, "cuGetErrorName");
        FIND(device_count, library, "cuDeviceGetCount");
        FIND(device_get, library, "cuDeviceGet");
        FIND(device_attribute, library, "cuDeviceGetAttribute");
        if (!init)
            why = "it has no cuInit";
    }
    if (driver_version)
        driver_version(&version);
    if (init) {
        result = init(0);
        if (result != CUDA_SUCCESS && error_name)
            error_name(result, &name);
        if (result == CUDA_SUCCESS && device_count)
            device_count(&count);
    }
    fputs("{\"glibc\":", stdout);
    rg_print_json(gnu_get_libc_version());
    fputs(",\"library\":", stdout);
    rg_print_json(path);
    fputs(",\"load_error\":", stdout);
    rg_print_json(why);
    printf(",\"cuda_version\":%d,\"init_error\":%d,\"init_error_name\":", version, (int)result);
    rg_print_json(name);
    printf(",\"simulated\":%s,\"devices\":[", library && dlsym(library, "rigel_sim_marker") ? "true" : "false");
    for (int i = 0; i < count; i++) {
        CUdevice device;
        int mode = 0;
        if (device_get && device_attribute && device_get(&device, i) == CUDA_SUCCESS)
            device_attribute(&mode, CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, device);
        printf("%s{\"compute_mode\":%d}", i ? "," : "", mode);
    }
    puts("]}");
    free(path);
    return 0;
}
