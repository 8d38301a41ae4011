/*
 * histogram.h: a log-linear histogram of durations in nanoseconds, small enough to live in the segment.
 *
 * Values are grouped by octave, each octave in 64 equal buckets, so a bucket is at most 1/64 = 1.6% wide
 * (the scheme of HdrHistogram and of mimalloc's size classes). Adding is one relaxed atomic increment: several threads
 * of one client may add at once, and a reader in another process sees whole numbers.
 * Nothing here allocates, locks or waits.
 */
#ifndef RIGEL_HISTOGRAM_H
#define RIGEL_HISTOGRAM_H

#include <stdatomic.h>
#include <stdint.h>

enum {
    RG_HIST_SUB_BITS = 6,   /* 64 buckets an octave */
    RG_HIST_MIN_SHIFT = 8,  /* below 256 ns everything is bucket 0 */
    RG_HIST_OCTAVES = 32,   /* up to 2^40 ns = 18 minutes; longer goes to the last bucket */
    RG_HIST_BUCKETS = 1 + (RG_HIST_OCTAVES << RG_HIST_SUB_BITS),
};

typedef struct {
    _Atomic uint64_t count[RG_HIST_BUCKETS];
} rg_histogram;

/* Bucket of a duration: 0 below 2^8 ns, else 1 + 64 x (octave - 8) + the 6 bits below the leading one. */
static inline uint32_t rg_hist_bucket(uint64_t ns)
{
    if (ns < (1u << RG_HIST_MIN_SHIFT))
        return 0;
    uint32_t octave = 63u - (uint32_t)__builtin_clzll(ns);
    uint32_t sub = (uint32_t)(ns >> (octave - RG_HIST_SUB_BITS)) & ((1u << RG_HIST_SUB_BITS) - 1);
    uint32_t bucket = 1 + ((octave - RG_HIST_MIN_SHIFT) << RG_HIST_SUB_BITS) + sub;
    return bucket < RG_HIST_BUCKETS ? bucket : RG_HIST_BUCKETS - 1;
}

/* Lowest duration, in ns, that falls into `bucket`; the bucket ends where the next one starts. */
static inline uint64_t rg_hist_lower_ns(uint32_t bucket)
{
    if (bucket == 0)
        return 0;
    uint32_t octave = RG_HIST_MIN_SHIFT + ((bucket - 1) >> RG_HIST_SUB_BITS);
    uint64_t sub = (bucket - 1) & ((1u << RG_HIST_SUB_BITS) - 1);
    return ((1ull << RG_HIST_SUB_BITS) + sub) << (octave - RG_HIST_SUB_BITS);
}

static inline void rg_hist_add(rg_histogram *h, uint64_t ns)
{
    atomic_fetch_add_explicit(&h->count[rg_hist_bucket(ns)], 1, memory_order_relaxed);
}

#endif
