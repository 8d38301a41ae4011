/*
 * driver.h: the CUDA driver for the programs of this folder: found at run time, so that none of them links it.
 */
#ifndef RIGEL_REPLAY_DRIVER_H
#define RIGEL_REPLAY_DRIVER_H

#include "../cuda_abi.h"

#include <stdbool.h>
#include <stddef.h>

#define RG_DRIVER(X)                                                                                                     \
    X(cuInit, "cuInit", (unsigned int flags))                                                                         \
    X(cuGetErrorName, "cuGetErrorName", (CUresult error, const char **name))                                          \
    X(cuDeviceGetCount, "cuDeviceGetCount", (int *count))                                                             \
    X(cuDeviceGet, "cuDeviceGet", (CUdevice * device, int index))                                                     \
    X(cuDeviceGetName, "cuDeviceGetName", (char *name, int bytes, CUdevice device))                                   \
    X(cuDeviceGetUuid, "cuDeviceGetUuid_v2", (CUuuid * uuid, CUdevice device))                                        \
    X(cuDeviceTotalMem, "cuDeviceTotalMem_v2", (size_t * bytes, CUdevice device))                                     \
    X(cuDeviceGetAttribute, "cuDeviceGetAttribute", (int *value, int attribute, CUdevice device))                     \
    X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (CUcontext * context, CUdevice device))                   \
    X(cuCtxSetCurrent, "cuCtxSetCurrent", (CUcontext context))                                                        \
    X(cuModuleLoadData, "cuModuleLoadData", (CUmodule * module, const void *image))                                   \
    X(cuModuleGetFunction, "cuModuleGetFunction", (CUfunction * function, CUmodule module, const char *name))         \
    X(cuFuncSetAttribute, "cuFuncSetAttribute", (CUfunction function, int attribute, int value))                      \
    X(cuStreamCreate, "cuStreamCreate", (CUstream * stream, unsigned int flags))                                      \
    X(cuStreamQuery, "cuStreamQuery", (CUstream stream))                                                              \
    X(cuStreamSynchronize, "cuStreamSynchronize", (CUstream stream))                                                  \
    X(cuEventCreate, "cuEventCreate", (CUevent * event, unsigned int flags))                                          \
    X(cuEventRecord, "cuEventRecord", (CUevent event, CUstream stream))                                               \
    X(cuEventQuery, "cuEventQuery", (CUevent event))                                                                  \
    X(cuEventSynchronize, "cuEventSynchronize", (CUevent event))                                                      \
    X(cuEventElapsedTime, "cuEventElapsedTime", (float *ms, CUevent from, CUevent to))                                \
    X(cuMemAlloc, "cuMemAlloc_v2", (CUdeviceptr * memory, size_t bytes))                                              \
    X(cuMemHostAlloc, "cuMemHostAlloc", (void **memory, size_t bytes, unsigned int flags))                            \
    X(cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2", (CUdeviceptr to, const void *from, size_t bytes, CUstream stream))   \
    X(cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2", (void *to, CUdeviceptr from, size_t bytes, CUstream stream))         \
    X(cuMemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2", (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream))   \
    X(cuMemsetD8Async, "cuMemsetD8Async", (CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream))       \
    X(cuCtxCreate, "cuCtxCreate_v2", (CUcontext * context, unsigned int flags, CUdevice device))                      \
    X(cuCtxDestroy, "cuCtxDestroy_v2", (CUcontext context))                                                           \
    X(cuStreamWaitEvent, "cuStreamWaitEvent", (CUstream stream, CUevent event, unsigned int flags))                   \
    X(cuMemGetInfo, "cuMemGetInfo_v2", (size_t * free_bytes, size_t * total_bytes))                                   \
    X(cuLaunchKernel, "cuLaunchKernel",                                                                               \
      (CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z, unsigned int block_x,      \
       unsigned int block_y, unsigned int block_z, unsigned int shared_bytes, CUstream stream, void **params,         \
       void **extra))

#define RG_DRIVER_POINTER(name, symbol, params) CUresult(*name) params;
typedef struct {
    RG_DRIVER(RG_DRIVER_POINTER)
} rg_driver;

/* The functions, once rg_load_driver has returned true; and whether they are the simulated GPU's. */
extern rg_driver rg_cu;
extern bool rg_simulated;

/* rg_load_driver: fills rg_cu from libcuda.so.1; false with the reason in `why`. */
bool rg_load_driver(char *why, size_t why_bytes);

/* rg_error_name: never NULL. */
const char *rg_error_name(CUresult error);

/* rg_say: one line on standard error. */
__attribute__((format(printf, 1, 2))) void rg_say(const char *format, ...);

/* rg_check: ends the program with one line if a call failed. */
void rg_check(CUresult result, const char *call);

#endif
