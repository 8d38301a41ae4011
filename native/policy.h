/*
 * policy.h: what a launch may do, decided from plain numbers.
 *
 * The gate (gate.c) asks this in the launching thread; the virtual-time scenario (sim/scenario.c) asks the same code.
 * Pure: no clock, no memory, no atomics. Whoever calls collects the numbers and does the waiting.
 */
#ifndef RIGEL_POLICY_H
#define RIGEL_POLICY_H

#include <stdbool.h>
#include <stdint.h>

enum rg_policy {
    RG_POLICY_NONE = 0,     /* measure only: everything passes */
    RG_POLICY_PRIORITY = 1, /* best-effort work waits while a high client has work, and is limited in flight otherwise */
};

enum rg_verdict {
    RG_PASS = 0,          /* launch now */
    RG_PASS_STARVED,      /* launch now: it has waited as long as anything may */
    RG_WAIT_HIGH,         /* wait until no high client has work */
    RG_WAIT_INFLIGHT,     /* wait until earlier launches of this client have finished */
};

/* The end of a hold that nobody takes back: best-effort launches are never lost. */
#define RG_HOLD_LIMIT_NS 5000000000ull

/* One launch, as the limits count it; shorter ones may count for less (rg_policy_weight). */
enum { RG_POLICY_LAUNCH = 1024 };

typedef struct {
    uint32_t policy;         /* enum rg_policy */
    bool best_effort;        /* the launching client is of class best-effort */
    bool high_busy;          /* some other client of class high has work on the device */
    bool preemptible;        /* the GPU itself is taken from this client then: its launches need not wait */
    uint32_t inflight;       /* launches of this client not known to be finished, in RG_POLICY_LAUNCH-ths */
    uint32_t inflight_limit; /* likewise; 0: no limit */
    uint32_t corun_limit;    /* the same while a high client is busy; 0: none may start then */
    uint32_t credit;         /* launches that the starvation bound still lets out in this period */
    uint64_t waited_ns;      /* how long this launch has waited for the same thing without progress */
    uint64_t starvation_ns;  /* bound on that */
    bool hold;               /* nothing of best-effort may start, whether or not a high client has work */
} rg_policy_view;

/*
 * rg_policy_decide: the verdict for one launch.
 * A starved client is still limited in flight, so one batch of `inflight_limit` launches (the credit) goes out per
 * starvation period, not the whole backlog. The in-flight wait has the same bound, for kernels that wait for work which
 * their own program has yet to launch.
 */
static inline enum rg_verdict rg_policy_decide(const rg_policy_view *v)
{
    if (v->policy == RG_POLICY_NONE || !v->best_effort || (v->preemptible && !v->hold))
        return RG_PASS;
    if (v->hold && v->waited_ns < RG_HOLD_LIMIT_NS)
        return RG_WAIT_HIGH;
    bool starved = v->waited_ns >= v->starvation_ns;
    if (v->inflight_limit && v->inflight >= v->inflight_limit)
        return starved ? RG_PASS_STARVED : RG_WAIT_INFLIGHT;
    if (!v->high_busy || v->inflight < v->corun_limit)
        return RG_PASS;
    return v->credit || starved ? RG_PASS_STARVED : RG_WAIT_HIGH;
}

/*
 * rg_policy_weight: what a launch counts for in flight: its duration in units of `unit_ns`, where that is known; one launch
 * where it is not. The limit is there to bound the work that a high client finds in front of it. Counting a 5 us kernel
 * like any other starves the GPU whenever a program launches small ones (ResNet-50 training: 370 of 737 kernels are under
 * 20 us and together 9% of its time); counting a 6 ms one so lets three of them queue up (GPT-2's output layer).
 */
static inline uint32_t rg_policy_weight(uint64_t duration_ns, uint64_t unit_ns)
{
    if (!duration_ns || !unit_ns)
        return RG_POLICY_LAUNCH;
    uint64_t weight = duration_ns * RG_POLICY_LAUNCH / unit_ns, most = RG_POLICY_LAUNCH << 16;
    return (uint32_t)(weight < RG_POLICY_LAUNCH / 32 ? RG_POLICY_LAUNCH / 32 : weight > most ? most : weight);
}

/*
 * rg_policy_batch: after how much launched work the gate records one event to learn that it has finished. Half the limit:
 * while one half is waited for, the other keeps the GPU fed. One by one while running beside a busy high client.
 */
static inline uint32_t rg_policy_batch(const rg_policy_view *v)
{
    return v->inflight_limit < 4 * RG_POLICY_LAUNCH || v->high_busy ? 1 : v->inflight_limit / 2;
}

#endif
