/*
 * gate-testing.h: what test-gate.c, test-busy.c, test-preempt.c, test-stop.c, test-stay.c, test-arrivals.c and test-context.c share: how to become a
 * client, another client.
 *
 * "Another client" is a slot and a busy bit that the test sets itself, so nothing depends on timing: a launch that must wait is seen
 * waiting before it is let go.
 */
#ifndef RIGEL_GATE_TESTING_H
#define RIGEL_GATE_TESTING_H

#include "client-testing.h"

static uint32_t policy = RG_POLICY_PRIORITY;

static const char ptx[] = PTX_HEADER PTX_KERNEL("rigel_spin") ".visible .entry ncclDevKernel_AllReduce(.param .u64 n)\n{ ret; }\n";
static CUfunction nccl;

/* Becomes a client of the given class with a fresh segment and a context. Its agent ends no busy period (agent_ends_periods). */
static inline void become(const char *class)
{
    prepare_waiting_client("gate", class);
    seg->settings.policy = policy;
    seg->settings.quiet_us = NEVER_QUIET_US;
    attach_client();
    CUmodule module = load_kernels(ptx);
    CHECK_EQUAL(cu.cuModuleGetFunction(&nccl, module, "ncclDevKernel_AllReduce"), CUDA_SUCCESS);
}

static inline void launch(CUfunction f, CUstream s, uint64_t block_ns)
{
    launch_blocks(f, s, 1, block_ns);
}

static inline uint64_t busy_word(void)
{
    return atomic_load(&seg->devices[0].high_busy);
}

static inline void other_busy(bool yes)
{
    if (yes)
        atomic_fetch_or(&seg->devices[0].high_busy, 1ull << OTHER);
    else
        rg_segment_clear_busy(seg, OTHER);
}

/* The last requests of the other client launched for so long, and waited. */
static inline void other_worked_and_waited(uint64_t worked_ns, uint64_t ns)
{
    uint64_t n = atomic_load(&seg->clients[OTHER].waited);
    for (int k = 0; k < 4; k++) {
        atomic_store(&seg->clients[OTHER].waited_ring[(n + k) % RG_WAITED], worked_ns / RG_WAITED_NS << 32 | ns / RG_WAITED_NS << 4);
        atomic_store(&seg->clients[OTHER].began_ring[(n + k) % RG_WAITED], rg_now_ns());
    }
    atomic_store(&seg->clients[OTHER].waited, n + 4);
}

static inline void other_waited(uint64_t ns)
{
    other_worked_and_waited(0, ns);
}

static inline CUcontext current(void)
{
    CUcontext c = NULL;
    CHECK_EQUAL(rg_real.cuCtxGetCurrent(&c), CUDA_SUCCESS);
    return c;
}

/* The agent is kept out of these cases: it must be the program's own wait that ends the period. */
static inline void become_high_without_agent(void)
{
    become("high");
    rg_agent_stop(); /* or it ends nothing, should it not have ended yet */
}

/* A best-effort client beside, which waits for its work: in that thread. */
static inline rg_thread *other_thread(void)
{
    return &seg->threads[OTHER * RG_MAX_THREADS];
}
static inline void other_works(void)
{
    atomic_store(&seg->clients[OTHER].class, RG_CLASS_BEST_EFFORT);
    atomic_store(&seg->clients[OTHER].devices, 1);
    atomic_store(&seg->clients[OTHER].state, RG_LIVE);
    atomic_store(&other_thread()->doing, RG_OP_cuCtxSynchronize | RG_DOING);
}

/* A high client with which the GPU may stay, for as long as can be, once rg_stay_beat has made what that takes. */
static inline void become_one_to_stay_with(void)
{
    become_high_without_agent(); /* which would say that it may not, on the simulated GPU */
    atomic_fetch_or(&seg->stops[0].armed, 1ull << OTHER);
    other_works();
    seg->settings.stay_us = 1000000;
    seg->settings.high_slice_us = 1000000000;
}

#endif
