/*
 * test-policy.c: every row of the decision table of policy.h, worked out by hand.
 */
#include "policy.h"
#include "testing.h"

enum { LAUNCH = RG_POLICY_LAUNCH };

/* A best-effort launch with room in flight and no high client about: passes. Each check below changes what it says. */
static const rg_policy_view base = {
    .policy = RG_POLICY_PRIORITY, .best_effort = true, .inflight_limit = 8 * LAUNCH, .starvation_ns = 1000};

#define DECIDE(...) \
    ({ \
        rg_policy_view v_ = base; \
        __VA_ARGS__; \
        rg_policy_decide(&v_); \
    })

int main(void)
{
    CHECK_EQUAL(DECIDE(), RG_PASS);
    CHECK_EQUAL(DECIDE(v_.high_busy = true), RG_WAIT_HIGH);
    CHECK_EQUAL(DECIDE(v_.inflight = 7 * LAUNCH), RG_PASS);
    CHECK_EQUAL(DECIDE(v_.inflight = 8 * LAUNCH), RG_WAIT_INFLIGHT);
    CHECK_EQUAL(DECIDE(v_.inflight = 800 * LAUNCH, v_.inflight_limit = 0), RG_PASS);
    /* The in-flight limit comes first: a launch that waits for both is told of its own work. */
    CHECK_EQUAL(DECIDE(v_.inflight = 8 * LAUNCH, v_.high_busy = true), RG_WAIT_INFLIGHT);
    /* Who never waits. */
    CHECK_EQUAL(DECIDE(v_.high_busy = true, v_.inflight = 8 * LAUNCH, v_.policy = RG_POLICY_NONE), RG_PASS);
    CHECK_EQUAL(DECIDE(v_.high_busy = true, v_.inflight = 8 * LAUNCH, v_.best_effort = false), RG_PASS);
    /* The bound: at exactly starvation_ns, for either kind of wait; the credit lets the rest of a batch out, not more. */
    CHECK_EQUAL(DECIDE(v_.high_busy = true, v_.waited_ns = 999), RG_WAIT_HIGH);
    CHECK_EQUAL(DECIDE(v_.high_busy = true, v_.waited_ns = 1000), RG_PASS_STARVED);
    CHECK_EQUAL(DECIDE(v_.inflight = 8 * LAUNCH, v_.waited_ns = 1000), RG_PASS_STARVED);
    CHECK_EQUAL(DECIDE(v_.high_busy = true, v_.credit = 1), RG_PASS_STARVED);
    CHECK_EQUAL(DECIDE(v_.high_busy = true, v_.credit = 1, v_.inflight = 8 * LAUNCH), RG_WAIT_INFLIGHT);
    /* Running beside a busy high client, if allowed, has a limit of its own. */
    CHECK_EQUAL(DECIDE(v_.high_busy = true, v_.corun_limit = 2 * LAUNCH, v_.inflight = 1 * LAUNCH), RG_PASS);
    CHECK_EQUAL(DECIDE(v_.high_busy = true, v_.corun_limit = 2 * LAUNCH, v_.inflight = 2 * LAUNCH), RG_WAIT_HIGH);

    /* A hold: whether or not anybody is busy, until its limit. */
    CHECK_EQUAL(DECIDE(v_.hold = true), RG_WAIT_HIGH);
    CHECK_EQUAL(DECIDE(v_.hold = true, v_.waited_ns = RG_HOLD_LIMIT_NS - 1), RG_WAIT_HIGH);
    CHECK_EQUAL(DECIDE(v_.hold = true, v_.waited_ns = RG_HOLD_LIMIT_NS), RG_PASS);
    CHECK_EQUAL(DECIDE(v_.hold = true, v_.preemptible = true), RG_WAIT_HIGH);
    CHECK_EQUAL(DECIDE(v_.hold = true, v_.best_effort = false), RG_PASS);
    CHECK_EQUAL(DECIDE(v_.hold = true, v_.policy = RG_POLICY_NONE), RG_PASS);

    /* Batches: half the limit, one by one for small limits and beside a busy high client. */
    rg_policy_view v = base;
    CHECK_EQUAL(rg_policy_batch(&v), 4 * LAUNCH);
    v.inflight_limit = 3 * LAUNCH;
    CHECK_EQUAL(rg_policy_batch(&v), 1);
    v.inflight_limit = 64 * LAUNCH;
    CHECK_EQUAL(rg_policy_batch(&v), 32 * LAUNCH);
    v.high_busy = true;
    CHECK_EQUAL(rg_policy_batch(&v), 1);

    /* Weights: the duration in units, never nothing; one launch where it is not known or nobody asks. */
    CHECK_EQUAL(rg_policy_weight(0, 50000), LAUNCH);
    CHECK_EQUAL(rg_policy_weight(25000, 0), LAUNCH);
    CHECK_EQUAL(rg_policy_weight(50000, 50000), LAUNCH);
    CHECK_EQUAL(rg_policy_weight(25000, 50000), LAUNCH / 2);
    CHECK_EQUAL(rg_policy_weight(6000000, 50000), 120 * LAUNCH);
    CHECK_EQUAL(rg_policy_weight(1, 50000), LAUNCH / 32);
    CHECK_EQUAL(rg_policy_weight(3600000000000, 50000), LAUNCH << 16);
    return 0;
}
