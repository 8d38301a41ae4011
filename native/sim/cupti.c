/*
 * cupti.c: a stand-in libcupti.so.13 over the simulated driver: the functions of cupti_abi.h, with records as large as those of
 * CUDA 13.0 (CUpti_ActivityKernel10, CUpti_ActivityMemcpy6, CUpti_ActivityMemset4) and times on a clock of its own.
 *
 * Records are made and buffers handed over when a flush asks for them, in the thread that asks. RIGEL_SIM_CUPTI_BUSY=1: somebody
 * else is subscribed.
 */
#include "cupti_abi.h"
#include "sim/sim-control.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))

enum { VERSION = 130001, KERNEL_BYTES = 216, MEMCPY_BYTES = 96, MEMSET_BYTES = 88, MOST_KINDS = 64 };
#define CLOCK_AHEAD_NS 1700000000000000000ull /* CUPTI's clock is no CLOCK_MONOTONIC */

static CUpti_BuffersCallbackRequestFunc buffer_wanted;
static CUpti_BuffersCallbackCompleteFunc buffer_filled;
static _Bool enabled[MOST_KINDS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void (*trace)(int on);
static int (*traced)(rigel_sim_activity *);
static uint64_t (*trace_lost)(void);

static int find_driver(void)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (!driver) return 0;
    *(void **)&trace = dlsym(driver, "rigelSimTrace");
    *(void **)&traced = dlsym(driver, "rigelSimTraced");
    *(void **)&trace_lost = dlsym(driver, "rigelSimTraceLost");
    return trace && traced && trace_lost;
}

EXPORT CUptiResult cuptiGetVersion(uint32_t *version)
{
    *version = VERSION;
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiSubscribe(void **subscriber, CUpti_CallbackFunc callback, void *data)
{
    const char *busy = getenv("RIGEL_SIM_CUPTI_BUSY");
    (void)callback, (void)data;
    if (busy && *busy == '1') return CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED;
    /* A tool may initialise the driver, by whichever cuInit the program has, also where it is called from within that. */
    int (*init)(unsigned);
    *(void **)&init = dlsym(RTLD_DEFAULT, "cuInit");
    if (init) init(0);
    *subscriber = &lock;
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiUnsubscribe(void *subscriber)
{
    return subscriber == &lock ? CUPTI_SUCCESS : 1;
}

EXPORT CUptiResult cuptiGetTimestamp(uint64_t *now)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    *now = (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec + CLOCK_AHEAD_NS;
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiActivityRegisterCallbacks(CUpti_BuffersCallbackRequestFunc wanted,
                                                  CUpti_BuffersCallbackCompleteFunc filled)
{
    buffer_wanted = wanted;
    buffer_filled = filled;
    return CUPTI_SUCCESS;
}

static CUptiResult set(int kind, _Bool on)
{
    if (kind < 0 || kind >= MOST_KINDS || !find_driver()) return 1;
    pthread_mutex_lock(&lock);
    enabled[kind] = on;
    int any = 0;
    for (int i = 0; i < MOST_KINDS; i++) any |= enabled[i];
    trace(any);
    pthread_mutex_unlock(&lock);
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiActivityEnable(int kind)
{
    return set(kind, 1);
}

EXPORT CUptiResult cuptiActivityDisable(int kind)
{
    return set(kind, 0);
}

static size_t size_of(uint32_t kind)
{
    if (kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) return KERNEL_BYTES;
    return kind == CUPTI_ACTIVITY_KIND_MEMCPY ? MEMCPY_BYTES : MEMSET_BYTES;
}

static void put(uint8_t *at, const rigel_sim_activity *a)
{
    static const uint8_t directions[] = {CUPTI_ACTIVITY_MEMCPY_KIND_HTOD, CUPTI_ACTIVITY_MEMCPY_KIND_DTOH, 8};
    uint64_t start = a->start_ns + CLOCK_AHEAD_NS, end = a->end_ns + CLOCK_AHEAD_NS;
    if (a->what == 0) {
        CUpti_ActivityKernel k = {
            .kind = CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,
            .registersPerThread = (uint16_t)a->registers,
            .start = start,
            .end = end,
            .deviceId = a->device,
            .contextId = a->context,
            .streamId = a->stream,
            .gridX = (int32_t)a->grid[0],
            .gridY = (int32_t)a->grid[1],
            .gridZ = (int32_t)a->grid[2],
            .blockX = (int32_t)a->block[0],
            .blockY = (int32_t)a->block[1],
            .blockZ = (int32_t)a->block[2],
            .dynamicSharedMemory = (int32_t)a->shared_bytes,
            .correlationId = a->correlation,
            .name = a->name,
            .graphNodeId = a->node,
            .graphId = a->graph,
        };
        memcpy(at, &k, sizeof k);
    } else if (a->what == 1) {
        CUpti_ActivityMemcpy c = {
            .kind = CUPTI_ACTIVITY_KIND_MEMCPY,
            .copyKind = directions[a->direction],
            .bytes = a->bytes,
            .start = start,
            .end = end,
            .deviceId = a->device,
            .contextId = a->context,
            .streamId = a->stream,
            .correlationId = a->correlation,
            .graphNodeId = a->node,
            .graphId = a->graph,
        };
        memcpy(at, &c, sizeof c);
    } else {
        CUpti_ActivityMemset s = {
            .kind = CUPTI_ACTIVITY_KIND_MEMSET,
            .bytes = a->bytes,
            .start = start,
            .end = end,
            .deviceId = a->device,
            .contextId = a->context,
            .streamId = a->stream,
            .correlationId = a->correlation,
            .graphNodeId = a->node,
            .graphId = a->graph,
        };
        memcpy(at, &s, sizeof s);
    }
}

EXPORT CUptiResult cuptiActivityFlushAll(uint32_t flags)
{
    (void)flags;
    uint8_t *buffer = NULL;
    size_t size = 0, used = 0, most = 0;
    rigel_sim_activity a;
    if (!buffer_wanted || !find_driver()) return CUPTI_SUCCESS;
    pthread_mutex_lock(&lock);
    while (traced(&a)) {
        uint32_t kind = a.what == 0   ? CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL
                        : a.what == 1 ? CUPTI_ACTIVITY_KIND_MEMCPY
                                      : CUPTI_ACTIVITY_KIND_MEMSET;
        if (buffer && used + size_of(kind) > size) {
            buffer_filled(NULL, 0, buffer, size, used);
            buffer = NULL;
        }
        if (!buffer) {
            buffer_wanted(&buffer, &size, &most);
            used = 0;
        }
        if (!buffer || size < size_of(kind)) break;
        memset(buffer + used, 0, size_of(kind));
        put(buffer + used, &a);
        used += size_of(kind);
    }
    if (buffer) buffer_filled(NULL, 0, buffer, size, used);
    pthread_mutex_unlock(&lock);
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiActivityGetNextRecord(uint8_t *buffer, size_t valid, CUpti_Activity **record)
{
    uint8_t *at = *record ? (uint8_t *)*record + size_of((*record)->kind) : buffer;
    if (at >= buffer + valid) return CUPTI_ERROR_MAX_LIMIT_REACHED;
    *record = (CUpti_Activity *)at;
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiActivityGetNumDroppedRecords(CUcontext context, uint32_t stream, size_t *dropped)
{
    static uint64_t told;
    (void)context, (void)stream;
    uint64_t lost = trace_lost ? trace_lost() : 0;
    *dropped = (size_t)(lost - told);
    told = lost;
    return CUPTI_SUCCESS;
}
