/*
 * cupti.c: how long launches take, from CUPTI's activity records, where a program has CUPTI and nobody else uses it.
 *
 * CUPTI is opened where the program has it loaded already (PyTorch's wheels bring one), else by its soname or where the toolkit
 * puts it; RIGEL_CUPTI names one. It is used by one tool at a time in a process: where CUDA_INJECTION64_PATH names another, or
 * somebody is subscribed, this one keeps off. A program that starts a profiler of its own later takes CUPTI over, and the
 * recording ends there.
 *
 * CUPTI calls back on a thread of its own with a buffer of records, which become entries of the ring.
 */
#include "cupti_abi.h"
#include "record-client.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A buffer comes back once all of its records are complete: on a GPU that is never idle, when it is full. */
enum { BUFFER_BYTES = 1 << 18, BUFFER_ALIGN = 8, POLL_NS = 20000000 };

static struct {
#define RG_CUPTI_MEMBER(symbol, params) CUptiResult(*symbol) params;
    RG_CUPTI_FUNCTIONS(RG_CUPTI_MEMBER)
#undef RG_CUPTI_MEMBER
} cupti;

static const int kinds[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMSET,
                            CUPTI_ACTIVITY_KIND_MEMCPY2};
enum { KINDS = sizeof kinds / sizeof kinds[0] };

static uint64_t clock_ahead_ns; /* CUPTI's clock less CLOCK_MONOTONIC, modulo 2^64 */

static void put(int kind, uint32_t correlation, uint64_t start, uint64_t end, uint32_t stream, uint32_t graph)
{
    if (kind < 0)
        atomic_fetch_add(&rg_recorded->header.kinds_lost, 1);
    else if (start && end) /* else it was under way when it was flushed */
        rg_record_put(rg_recorded,
                      (uint64_t[RG_REC_WORDS - 1]){rg_record_word(RG_REC_GPU, 0, (uint32_t)kind, 0), correlation,
                                                      start - clock_ahead_ns, end - clock_ahead_ns, stream, graph});
}

static void put_kernel(const CUpti_ActivityKernel *a)
{
    char *readable = a->name ? rg_demangled(a->name) : NULL;
    rg_record_facts facts = {
        .work = RG_REC_KERNEL,
        .name = readable ? readable : a->name ? a->name : "unknown kernel",
        .dims = rg_dims_of((unsigned)a->gridX, (unsigned)a->gridY, (unsigned)a->gridZ, (unsigned)a->blockX,
                           (unsigned)a->blockY, (unsigned)a->blockZ),
        .registers = a->registersPerThread,
        .shared_bytes = (uint32_t)(a->staticSharedMemory + a->dynamicSharedMemory),
    };
    put(rg_record_enter(rg_recorded, &facts), a->correlationId, a->start, a->end, a->streamId, a->graphId);
    free(readable);
}

static void put_copy(uint32_t kind, uint64_t bytes, uint32_t correlation, uint64_t start, uint64_t end, uint32_t stream,
                     uint32_t graph)
{
    enum rg_record_work work = RG_REC_COPY_D2D;
    if (kind == CUPTI_ACTIVITY_MEMCPY_KIND_HTOD || kind == CUPTI_ACTIVITY_MEMCPY_KIND_HTOA)
        work = RG_REC_COPY_H2D;
    else if (kind == CUPTI_ACTIVITY_MEMCPY_KIND_DTOH || kind == CUPTI_ACTIVITY_MEMCPY_KIND_ATOH)
        work = RG_REC_COPY_D2H;
    rg_record_facts facts = {.work = work, .bytes = bytes};
    put(rg_record_enter(rg_recorded, &facts), correlation, start, end, stream, graph);
}

static void put_record(const CUpti_Activity *record)
{
    switch (record->kind) {
    case CUPTI_ACTIVITY_KIND_KERNEL:
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: put_kernel((const CUpti_ActivityKernel *)record); break;
    case CUPTI_ACTIVITY_KIND_MEMCPY: {
        const CUpti_ActivityMemcpy *a = (const CUpti_ActivityMemcpy *)record;
        put_copy(a->copyKind, a->bytes, a->correlationId, a->start, a->end, a->streamId, a->graphId);
        break;
    }
    case CUPTI_ACTIVITY_KIND_MEMCPY2: {
        const CUpti_ActivityMemcpyPtoP *a = (const CUpti_ActivityMemcpyPtoP *)record;
        put_copy(a->copyKind, a->bytes, a->correlationId, a->start, a->end, a->streamId, a->graphId);
        break;
    }
    case CUPTI_ACTIVITY_KIND_MEMSET: {
        const CUpti_ActivityMemset *a = (const CUpti_ActivityMemset *)record;
        rg_record_facts facts = {.work = RG_REC_MEMSET, .bytes = a->bytes};
        put(rg_record_enter(rg_recorded, &facts), a->correlationId, a->start, a->end, a->streamId, a->graphId);
        break;
    }
    default: break;
    }
}

static void buffer_wanted(uint8_t **buffer, size_t *size, size_t *most_records)
{
    *buffer = aligned_alloc(BUFFER_ALIGN, BUFFER_BYTES);
    *size = *buffer ? BUFFER_BYTES : 0;
    *most_records = 0; /* as many as fit */
}

static void buffer_filled(CUcontext context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid)
{
    (void)size;
    CUpti_Activity *record = NULL;
    size_t dropped = 0;
    while (valid && cupti.cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS)
        put_record(record);
    if (cupti.cuptiActivityGetNumDroppedRecords(context, stream, &dropped) == CUPTI_SUCCESS && dropped)
        atomic_fetch_add(&rg_recorded->header.dropped, dropped);
    free(buffer);
}

static void never_called(void *data, int domain, uint32_t id, const void *parameters)
{
    (void)data, (void)domain, (void)id, (void)parameters;
}

static void *find_library(void)
{
    static const char *const sonames[] = {"libcupti.so.13", "libcupti.so.12", "libcupti.so.11.8", "libcupti.so.11.7", "libcupti.so.11.6"};
    static const char *const places[] = {"/usr/local/cuda/lib64/libcupti.so", "/usr/local/cuda/extras/CUPTI/lib64/libcupti.so"};
    enum { SONAMES = sizeof sonames / sizeof sonames[0], PLACES = sizeof places / sizeof places[0] };
    const char *given = getenv("RIGEL_CUPTI");
    void *library = given && *given ? dlopen(given, RTLD_NOW) : NULL;
    if (given && *given)
        return library;
    for (int i = 0; i < SONAMES && !library; i++)
        library = dlopen(sonames[i], RTLD_NOW | RTLD_NOLOAD);
    /* The machine's own CUPTI can make nothing of the simulated GPU. */
    bool simulated = rg_real.rigelSimSetTimeslice != NULL;
    for (int i = 0; i < SONAMES && !library && !simulated; i++)
        library = dlopen(sonames[i], RTLD_NOW);
    for (int i = 0; i < PLACES && !library && !simulated; i++)
        library = dlopen(places[i], RTLD_NOW);
    return library;
}

bool rg_cupti_start(char *why, size_t why_bytes)
{
    const char *injected = getenv("CUDA_INJECTION64_PATH");
    void *subscriber = NULL;
    uint32_t version = 0;
    if (injected && *injected) {
        snprintf(why, why_bytes, "another tool is in this process (CUDA_INJECTION64_PATH is set)");
        return false;
    }
    void *library = find_library();
    if (!library) {
        snprintf(why, why_bytes, "no libcupti.so is found; RIGEL_CUPTI can name one");
        return false;
    }
#define RG_CUPTI_FIND(symbol, params) \
    if (!(*(void **)&cupti.symbol = rg_look_up(library, #symbol))) { \
        snprintf(why, why_bytes, "libcupti.so has no " #symbol); \
        return false; \
    }
    RG_CUPTI_FUNCTIONS(RG_CUPTI_FIND)
#undef RG_CUPTI_FIND
    if (cupti.cuptiGetVersion(&version) != CUPTI_SUCCESS || version < CUPTI_FIRST_WITH_GRAPHS) {
        snprintf(why, why_bytes, "libcupti.so is older than CUDA 11.6 (version %u)", version);
        return false;
    }
    CUptiResult r = cupti.cuptiSubscribe(&subscriber, never_called, NULL);
    if (r != CUPTI_SUCCESS) {
        snprintf(why, why_bytes, "somebody else uses CUPTI in this process (cuptiSubscribe said %d)", r);
        return false;
    }
    cupti.cuptiUnsubscribe(subscriber);
    r = cupti.cuptiActivityRegisterCallbacks(buffer_wanted, buffer_filled);
    if (r != CUPTI_SUCCESS) {
        snprintf(why, why_bytes, "cuptiActivityRegisterCallbacks said %d", r);
        return false;
    }
    atomic_store(&rg_recorded->header.cupti_version, version);
    return true;
}

bool rg_cupti_on(void)
{
    uint64_t theirs = 0, before = rg_now_ns();
    if (cupti.cuptiGetTimestamp(&theirs) == CUPTI_SUCCESS)
        clock_ahead_ns = theirs - (before + (rg_now_ns() - before) / 2);
    for (int i = 0; i < KINDS; i++)
        if (cupti.cuptiActivityEnable(kinds[i]) != CUPTI_SUCCESS && kinds[i] != CUPTI_ACTIVITY_KIND_MEMCPY2) {
            while (i-- > 0)
                cupti.cuptiActivityDisable(kinds[i]);
            return false;
        }
    return true;
}

void rg_cupti_off(void)
{
    for (int i = 0; i < KINDS; i++)
        cupti.cuptiActivityDisable(kinds[i]);
    cupti.cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
}

void rg_cupti_poll(void)
{
    static uint64_t last_ns;
    uint64_t now = rg_now_ns();
    if (atomic_load(&rg_recorded->header.mechanism) != RG_REC_CUPTI || now - last_ns < POLL_NS)
        return;
    last_ns = now;
    cupti.cuptiActivityFlushAll(0);
}
