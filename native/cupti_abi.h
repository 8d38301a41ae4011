/*
 * cupti_abi.h: the part of CUPTI's binary interface that Rigel uses: the activity API, and the fields of its records that have been
 * at the same place in every release since CUDA 11.0 (those of graphs: node since 11.0, graph since 11.6).
 *
 * Source: cupti_activity.h and cupti_activity_deprecated.h of CUDA 13.0 (CUPTI API 130001), which hold all earlier forms of the
 * records: CUpti_ActivityKernel5 to 10, CUpti_ActivityMemcpy4 to 6, CUpti_ActivityMemset2 to 4, CUpti_ActivityMemcpyPtoP3 and 4.
 * Offsets of every field below were compared with all of those by a program compiled against the header. Records have grown at
 * their end only, so nothing beyond these fields is read, and a record's size is never used: cuptiActivityGetNextRecord steps.
 */
#ifndef RIGEL_CUPTI_ABI_H
#define RIGEL_CUPTI_ABI_H

#include "cuda_abi.h"

typedef int CUptiResult;
enum { CUPTI_SUCCESS = 0, CUPTI_ERROR_MAX_LIMIT_REACHED = 12, CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED = 39 };

/* CUpti_ActivityKind. */
enum {
    CUPTI_ACTIVITY_KIND_MEMCPY = 1,
    CUPTI_ACTIVITY_KIND_MEMSET = 2,
    CUPTI_ACTIVITY_KIND_KERNEL = 3,
    CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL = 10,
    CUPTI_ACTIVITY_KIND_MEMCPY2 = 22,
};
enum { CUPTI_ACTIVITY_FLAG_FLUSH_FORCED = 1 };
/* CUpti_ActivityMemcpyKind, as far as it has a direction. */
enum {
    CUPTI_ACTIVITY_MEMCPY_KIND_HTOD = 1,
    CUPTI_ACTIVITY_MEMCPY_KIND_DTOH = 2,
    CUPTI_ACTIVITY_MEMCPY_KIND_HTOA = 3,
    CUPTI_ACTIVITY_MEMCPY_KIND_ATOH = 4,
};
enum { CUPTI_FIRST_WITH_GRAPHS = 17 }; /* cuptiGetVersion of CUDA 11.6: records have graphId */

typedef struct {
    uint32_t kind;
} CUpti_Activity;

typedef struct {
    uint32_t kind;
    uint8_t cacheConfig, sharedMemoryConfig;
    uint16_t registersPerThread;
    uint32_t partitionedGlobalCacheRequested, partitionedGlobalCacheExecuted;
    uint64_t start, end, completed;
    uint32_t deviceId, contextId, streamId;
    int32_t gridX, gridY, gridZ, blockX, blockY, blockZ;
    int32_t staticSharedMemory, dynamicSharedMemory;
    uint32_t localMemoryPerThread, localMemoryTotal;
    uint32_t correlationId;
    int64_t gridId;
    const char *name;
    void *reserved0;
    uint64_t queued, submitted;
    uint8_t launchType, isSharedMemoryCarveoutRequested, sharedMemoryCarveoutRequested, padding;
    uint32_t sharedMemoryExecuted;
    uint64_t graphNodeId; /* 0: no graph's */
    uint32_t shmemLimitConfig;
    uint32_t graphId;
} CUpti_ActivityKernel;

typedef struct {
    uint32_t kind;
    uint8_t copyKind, srcKind, dstKind, flags;
    uint64_t bytes, start, end;
    uint32_t deviceId, contextId, streamId, correlationId;
    uint32_t runtimeCorrelationId, pad;
    void *reserved0;
    uint64_t graphNodeId;
    uint32_t graphId;
} CUpti_ActivityMemcpy;

/* CUPTI_ACTIVITY_KIND_MEMCPY2: between devices. */
typedef struct {
    uint32_t kind;
    uint8_t copyKind, srcKind, dstKind, flags;
    uint64_t bytes, start, end;
    uint32_t deviceId, contextId, streamId;
    uint32_t srcDeviceId, srcContextId, dstDeviceId, dstContextId, correlationId;
    void *reserved0;
    uint64_t graphNodeId;
    uint32_t graphId;
} CUpti_ActivityMemcpyPtoP;

typedef struct {
    uint32_t kind, value;
    uint64_t bytes, start, end;
    uint32_t deviceId, contextId, streamId, correlationId;
    uint16_t flags, memoryKind;
    uint32_t pad;
    void *reserved0;
    uint64_t graphNodeId;
    uint32_t graphId;
} CUpti_ActivityMemset;

typedef void (*CUpti_BuffersCallbackRequestFunc)(uint8_t **buffer, size_t *size, size_t *most_records);
typedef void (*CUpti_BuffersCallbackCompleteFunc)(CUcontext context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid);
typedef void (*CUpti_CallbackFunc)(void *data, int domain, uint32_t id, const void *parameters);

#define RG_CUPTI_FUNCTIONS(X) \
    X(cuptiGetVersion, (uint32_t *)) \
    X(cuptiSubscribe, (void **, CUpti_CallbackFunc, void *)) \
    X(cuptiUnsubscribe, (void *)) \
    X(cuptiGetTimestamp, (uint64_t *)) \
    X(cuptiActivityRegisterCallbacks, (CUpti_BuffersCallbackRequestFunc, CUpti_BuffersCallbackCompleteFunc)) \
    X(cuptiActivityEnable, (int)) \
    X(cuptiActivityDisable, (int)) \
    X(cuptiActivityFlushAll, (uint32_t)) \
    X(cuptiActivityGetNextRecord, (uint8_t *, size_t, CUpti_Activity **)) \
    X(cuptiActivityGetNumDroppedRecords, (CUcontext, uint32_t, size_t *))

#endif
