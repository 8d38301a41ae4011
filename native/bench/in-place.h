/*
 * in-place.h: what calls through Rigel cost in a program as it is. Only in a library built for that (make in-place): hooks.c wraps each
 * function that launches a kernel, copies, sets memory, or waits.
 *
 * One of each four calls, drawn by chance, goes to the driver at once: the two kinds are neighbours in the same request, so that what
 * the processor and the GPU do meanwhile is the same for both, and a few nanoseconds of the five microseconds that the driver takes show. No
 * more of them: what Rigel touches in every launch would be in farther caches, and where each second launch went past it, one through it took
 * twice as much more. For the same reason what has to be done for the measuring is done when a call is over, not before the next. In the
 * time of a call is all that Rigel does in it, and what it makes the driver wait for. What Rigel's lines push out of the near caches shows
 * in the time until the next call, which is the program's own. A call past Rigel is not counted; that the client is busy it finds out by
 * the others of the request. A wait past Rigel is made known to it afterwards, by another one that has nothing to wait for.
 *
 * RIGEL_IN_PLACE names the file that is written when the program ends, for src/bench-in-place.ts: a text line for each
 * request of the thread that launched first, none where it has too many calls, and in it for each call: l (launch), c (copy or memset) or w
 * (wait); its nanoseconds, below zero past Rigel; a colon; those until the next call, 0 where that is not known.
 */
#ifndef RIGEL_BENCH_IN_PLACE_H
#define RIGEL_BENCH_IN_PLACE_H

#include "client.h"

#include <stdio.h>
#include <stdlib.h>

enum { RG_WAIT = -1 }; /* beside enum rg_kind: a wait for the GPU */
enum { IN_PLACE_REQUESTS = 6000, IN_PLACE_CALLS = 2048 };

typedef struct {
    int32_t ticks;    /* below zero: past Rigel */
    uint32_t after;   /* until the next call */
    char kind;
} in_place_call;

static struct {
    in_place_call (*calls)[IN_PLACE_CALLS];
    uint16_t count[IN_PLACE_REQUESTS];
    uint32_t request;
    bool next_past;   /* what was drawn for the next call */
    uint64_t requests_seen, random, begin_ns, begin_tick, last_tick; /* last_tick: when the last call was over; 0: another came since */
    _Atomic(const char *) thread; /* the one that is measured */
} in_place;

/* What is told of a call; 0: nothing. */
static inline char in_place_kind(int kind)
{
    return kind == RG_LAUNCH ? 'l' : kind == RG_COPY || kind == RG_MEMSET ? 'c' : kind == RG_WAIT ? 'w' : 0;
}

/* A call is over: which request the next one is of, and whether it goes past Rigel. */
static inline void in_place_draw(void)
{
    uint64_t requests = atomic_load_explicit(&rg.slot->requests, memory_order_relaxed);
    if (requests != in_place.requests_seen && in_place.request < IN_PLACE_REQUESTS && in_place.count[in_place.request]) {
        in_place.request++;
        in_place.last_tick = 0;
    }
    in_place.requests_seen = requests;
    uint64_t x = in_place.random;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    in_place.random = x;
    bool first = in_place.request < IN_PLACE_REQUESTS && !in_place.count[in_place.request];
    in_place.next_past = !(x >> 40 & 3) && !first; /* the first marks the client as busy, and no other is to have that in its time */
}

/* Whether this call is measured, by this thread; and if it is, whether it goes past Rigel. */
static inline bool in_place_measures(int kind, bool *past)
{
    const char *nobody = NULL;
    *past = false;
    if (atomic_load(&rg.mode) != RG_MODE_HIGH)
        return false;
    if (atomic_load(&in_place.thread) != &rg_thread_mark) {
        if (kind != RG_LAUNCH || !atomic_compare_exchange_strong(&in_place.thread, &nobody, &rg_thread_mark))
            return false;
        in_place.calls = calloc(IN_PLACE_REQUESTS, sizeof *in_place.calls);
        in_place.random = 88172645463325252ull;
        in_place.begin_ns = rg_now_ns();
        in_place.begin_tick = rg_tick();
    }
    if (!in_place_kind(kind) || !in_place.calls) {
        in_place.last_tick = 0;
        return false;
    }
    if (atomic_load_explicit(&rg.slot->requests, memory_order_relaxed) != in_place.requests_seen)
        in_place_draw(); /* a call that is not measured has ended the request, or the agent has */
    *past = in_place.next_past;
    return in_place.request < IN_PLACE_REQUESTS;
}

static inline void in_place_add(int kind, uint64_t begin, uint64_t end, bool past)
{
    uint64_t ticks = end - begin, after = begin - in_place.last_tick;
    uint16_t n = in_place.count[in_place.request];
    in_place_call *call = in_place.calls[in_place.request] + n;
    if (n && in_place.last_tick)
        call[-1].after = after < UINT32_MAX ? (uint32_t)after : UINT32_MAX;
    in_place.last_tick = 0;
    if (n < IN_PLACE_CALLS) {
        int32_t t = ticks < INT32_MAX ? (int32_t)ticks : INT32_MAX;
        *call = (in_place_call){past ? -t : t, 0, in_place_kind(kind)};
        in_place.count[in_place.request] = n + 1;
        in_place.last_tick = rg_tick();
    }
    in_place_draw();
}

__attribute__((destructor)) static void in_place_write(void)
{
    const char *path = getenv("RIGEL_IN_PLACE");
    FILE *file = in_place.calls && path ? fopen(path, "w") : NULL;
    if (!file)
        return;
    uint64_t ns = rg_now_ns() - in_place.begin_ns, ticks = rg_tick() - in_place.begin_tick;
    double rate = ticks ? (double)ns / (double)ticks : 1;
    for (uint32_t r = 0; r < in_place.request; r++) /* the last one may not be whole */
        for (uint32_t i = 0; i < in_place.count[r] && in_place.count[r] < IN_PLACE_CALLS; i++) {
            const in_place_call *call = &in_place.calls[r][i];
            fprintf(file, "%c%.0f:%.0f%c", call->kind, call->ticks * rate, call->after * rate, i + 1 < in_place.count[r] ? ' ' : '\n');
        }
    fclose(file);
}

#define RG_MEASURED(symbol, kind, args) \
    { \
        bool past_; \
        if (!in_place_measures(kind, &past_)) \
            return symbol##_hook args; \
        uint64_t begin_ = rg_tick(); \
        CUresult result_ = past_ ? RG_CALL(symbol, args) : symbol##_hook args; \
        uint64_t end_ = rg_tick(); \
        if (past_ && (int)(kind) == RG_WAIT) \
            symbol##_hook args; \
        in_place_add(kind, begin_, end_, past_); \
        return result_; \
    }

#endif
