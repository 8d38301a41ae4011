/*
 * in-place.h: what a launch through Rigel costs in a program as it is. Only in a library built for that (make in-place): hooks.c wraps each
 * function that launches a kernel.
 *
 * One of each two launches, drawn by chance, calls the driver at once: the two kinds are neighbours in the same request, so that what
 * the processor and the GPU do meanwhile is the same for both, and a few nanoseconds of the ten microseconds that the driver takes show. In the
 * time of a launch is all that Rigel does in it, and what it makes the driver wait for; not what the program waits for later.
 * A launch past Rigel is not counted; that the client is busy it finds out by the others of the request.
 *
 * RIGEL_IN_PLACE names the file that is written when the program ends, for src/bench-in-place.ts: a text line for each
 * request of the thread that launched first: the nanoseconds of its launches, as far as they fit, below zero those past Rigel.
 */
#ifndef RIGEL_BENCH_IN_PLACE_H
#define RIGEL_BENCH_IN_PLACE_H

#include "client.h"

#include <stdio.h>
#include <stdlib.h>

enum { IN_PLACE_REQUESTS = 6000, IN_PLACE_LAUNCHES = 512 };

static struct {
    int32_t (*ticks)[IN_PLACE_LAUNCHES];
    uint16_t launches[IN_PLACE_REQUESTS];
    uint32_t request, launch;
    uint64_t requests_seen, random, begin_ns, begin_tick;
    _Atomic(const char *) thread; /* the one that is measured */
} in_place;

/* Whether this launch is measured, by this thread; and if it is, whether it goes past Rigel. */
static inline bool in_place_measures(bool *past)
{
    const char *nobody = NULL;
    if (atomic_load(&rg.mode) != RG_MODE_HIGH)
        return false;
    if (atomic_load(&in_place.thread) != &rg_thread_mark) {
        if (!atomic_compare_exchange_strong(&in_place.thread, &nobody, &rg_thread_mark))
            return false;
        in_place.ticks = calloc(IN_PLACE_REQUESTS, sizeof *in_place.ticks);
        in_place.random = 88172645463325252ull;
        in_place.begin_ns = rg_now_ns();
        in_place.begin_tick = rg_tick();
    }
    uint64_t requests = atomic_load_explicit(&rg.slot->requests, memory_order_relaxed);
    if (requests != in_place.requests_seen && in_place.launch) {
        in_place.request += in_place.request < IN_PLACE_REQUESTS;
        in_place.launch = 0;
    }
    in_place.requests_seen = requests;
    uint64_t x = in_place.random;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    in_place.random = x;
    *past = x >> 40 & 1;
    return in_place.ticks && in_place.request < IN_PLACE_REQUESTS;
}

static inline void in_place_add(uint64_t ticks, bool past)
{
    if (in_place.launch < IN_PLACE_LAUNCHES) {
        int32_t n = ticks < INT32_MAX ? (int32_t)ticks : INT32_MAX;
        in_place.ticks[in_place.request][in_place.launch++] = past ? -n : n;
        in_place.launches[in_place.request] = (uint16_t)in_place.launch;
    }
}

__attribute__((destructor)) static void in_place_write(void)
{
    const char *path = getenv("RIGEL_IN_PLACE");
    FILE *file = in_place.ticks && path ? fopen(path, "w") : NULL;
    if (!file)
        return;
    uint64_t ns = rg_now_ns() - in_place.begin_ns, ticks = rg_tick() - in_place.begin_tick;
    double rate = ticks ? (double)ns / (double)ticks : 1;
    for (uint32_t r = 0; r < in_place.request && r < IN_PLACE_REQUESTS; r++) /* the last one may not be whole */
        for (uint32_t i = 0; i < in_place.launches[r]; i++)
            fprintf(file, "%.0f%c", in_place.ticks[r][i] * rate, i + 1 < in_place.launches[r] ? ' ' : '\n');
    fclose(file);
}

#define RG_MEASURED(symbol, kind, args) \
    { \
        bool past_; \
        if (kind != RG_LAUNCH || !in_place_measures(&past_)) \
            return symbol##_hook args; \
        uint64_t begin_ = rg_tick(); \
        CUresult result_ = past_ ? RG_CALL(symbol, args) : symbol##_hook args; \
        in_place_add(rg_tick() - begin_, past_); \
        return result_; \
    }

#endif
