/*
 * policy.h: what a launch may do, decided from plain numbers.
 *
 * The gate (gate.c) asks this in the launching thread; the virtual-time scenario (sim/scenario.c) asks the same code.
 * Pure: no clock, no memory, no atomics. Whoever calls collects the numbers and does the waiting. What the default policy
 * needs is inline; the rest of the policies, and the arithmetic of waits, are in policy.c.
 *
 *   none      measures only
 *   priority  best-effort launches wait while a high client has work, and are limited in flight otherwise. Where high clients
 *             never rest, `min_share` of the GPU's time goes to best-effort work all the same
 *   slo       decides as priority does; a control loop elsewhere moves its settings (inflight, corun, suspend, defer_us, defer_ppm,
 *             need_us, slice_us, hold)
 *   fair      all clients alike, by weights: start-time fair queueing of GPU time
 *   orion     the published rules of Orion, reimplemented
 */
#ifndef RIGEL_POLICY_H
#define RIGEL_POLICY_H

#include <stdbool.h>
#include <stdint.h>

/* What is on the launch path: left to itself GCC puts parts of it out of line, with their results in memory. */
#define RG_INLINE inline __attribute__((always_inline))
/* Seldom called: what leads there stays out of the code that launches run through. */
#define RG_COLD __attribute__((cold, noinline))
/* Asks for a cache line, to read it or to write to it, and waits for nothing. Any address will do. */
#define RG_AHEAD(address) __builtin_prefetch((const void *)(address), 0)
#if defined(__x86_64__) /* which gcc has no instruction for unless told that the processor is newer than 2014; others ignore it */
#define RG_AHEAD_TO_WRITE(address) __asm__ volatile("prefetchw (%0)" : : "r"(address))
#else
#define RG_AHEAD_TO_WRITE(address) __builtin_prefetch((const void *)(address), 1)
#endif

enum rg_policy {
    RG_POLICY_NONE = 0,
    RG_POLICY_PRIORITY = 1,
    RG_POLICY_SLO = 2,
    RG_POLICY_FAIR = 3,
    RG_POLICY_ORION = 4,
};

enum rg_verdict {
    RG_PASS = 0,          /* launch now */
    RG_PASS_STARVED,      /* launch now: it has waited as long as anything may */
    RG_PASS_SHARE,        /* launch now: out of the least share that best-effort work has; to be paid for (rg_policy_pay) */
    RG_WAIT_HIGH,         /* wait until no high client has work; this and what follows are waits (rg_policy_waits) */
    RG_WAIT_INFLIGHT,     /* wait until earlier launches of this client have finished */
    RG_WAIT_TURN,         /* fair: wait until the others have had as much */
};

/* One launch, as the limits count it; shorter ones may count for less (rg_policy_weight). */
enum { RG_POLICY_LAUNCH = 1024 };

/* What bounds a kernel, as Orion's profiles say it. */
enum rg_bound { RG_BOUND_UNKNOWN = 0, RG_BOUND_MEMORY = 1, RG_BOUND_COMPUTE = 2 };

typedef struct {
    uint32_t policy;         /* enum rg_policy */
    bool best_effort;        /* the launching client is of class best-effort; not asked under fair */
    bool high_busy;          /* some other client of class high has work on the device */
    bool preemptible;        /* this client's work can be taken off the GPU: it need not wait at the gate */
    bool hold;               /* best-effort work is held back altogether, for a time */
    uint32_t inflight;       /* launches of this client on the device not known to be finished, in RG_POLICY_LAUNCH-ths */
    uint32_t inflight_limit; /* likewise; 0: no limit */
    uint32_t corun_limit;    /* the same while a high client is busy; 0: none may start then */
    uint32_t credit;         /* launches that the starvation bound still lets out in this period */
    uint64_t waited_ns;      /* how long this launch has waited for the same thing without progress */
    uint64_t starvation_ns;  /* bound on that */
    uint64_t allowance_ns;   /* priority, slo: GPU time out of the least share (rg_policy_allowance) */

    uint64_t lead_ns;        /* fair: virtual time of this client minus that of the slowest active one */
    uint64_t quantum_ns;     /* fair: the most by which a client may be ahead */

    bool profiled;           /* orion: the kernel is in a profile, so that the next three are known */
    uint32_t sms;            /* orion: SMs that the kernel fills */
    uint32_t bound;          /* orion: enum rg_bound, of the kernel */
    uint32_t high_bound;     /* orion: enum rg_bound, of the kernel that the high client launched last */
    uint32_t sms_limit;      /* orion: SM_THRESHOLD */
    uint64_t outstanding_ns; /* orion: GPU time of all best-effort kernels not known to be finished */
    uint64_t outstanding_limit_ns; /* orion: DUR_THRESHOLD */
} rg_policy_view;

/* rg_policy_decide: the verdict for one launch, under any policy. */
enum rg_verdict rg_policy_decide(const rg_policy_view *v);

/*
 * rg_policy_decide_inline: the same for none, priority and slo, on the launch path.
 * A starved client is still limited in flight, so one batch of `inflight_limit` launches (the credit) goes out per
 * starvation period, not the whole backlog. The in-flight wait has the same bound, for kernels that wait for work which
 * their own program has yet to launch. `hold` ends by itself.
 */
static RG_INLINE enum rg_verdict rg_policy_decide_inline(const rg_policy_view *v)
{
    if (v->policy == RG_POLICY_NONE || !v->best_effort || v->preemptible)
        return RG_PASS;
    if (v->hold)
        return RG_WAIT_HIGH;
    bool starved = v->waited_ns >= v->starvation_ns;
    if (v->inflight_limit && v->inflight >= v->inflight_limit)
        return starved ? RG_PASS_STARVED : RG_WAIT_INFLIGHT;
    if (!v->high_busy || v->inflight < v->corun_limit)
        return RG_PASS;
    if (v->allowance_ns)
        return RG_PASS_SHARE;
    return v->credit || starved ? RG_PASS_STARVED : RG_WAIT_HIGH;
}

static inline bool rg_policy_waits(enum rg_verdict verdict)
{
    return verdict >= RG_WAIT_HIGH;
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
    bool beside = v->high_busy && v->policy != RG_POLICY_FAIR;
    return v->inflight_limit < 4 * RG_POLICY_LAUNCH || beside ? 1 : v->inflight_limit / 2;
}

/*
 * The least share: best-effort work gets `min_share_ppm` millionths of the GPU's time even if high clients never rest. A token
 * bucket in GPU time: it is filled when high clients have been busy without a break for as long as the starvation bound, so that
 * no work gets into ordinary requests, and again after each such time (after a second where the bound is longer), with the
 * share of that time. At once, because under time slices a launch every few milliseconds costs a change of context each:
 * let in singly, 5% cost ResNet-50 training 20% of its speed on the simulated GPU. A launch may overdraw the bucket, since a
 * kernel cannot be cut; what is in it when it is filled again is lost.
 */

/* A break: high clients idle for so long. A training loop that reads its loss is idle for less after each step. */
#define RG_POLICY_BREAK_NS 1000000u

/* rg_policy_allowance: what is in the bucket: `busy_ns` into a spell without a break, `paid_ns` having been taken out. */
uint64_t rg_policy_allowance(uint64_t busy_ns, uint64_t paid_ns, uint64_t starvation_ns, uint32_t min_share_ppm);

/* rg_policy_pay: `paid_ns` after a launch of `cost_ns`. What ran over is not kept for later. */
uint64_t rg_policy_pay(uint64_t busy_ns, uint64_t paid_ns, uint64_t starvation_ns, uint32_t min_share_ppm,
                       uint64_t cost_ns);

/*
 * rg_policy_outlasts: whether a high client that has had the GPU to itself for `kept_ns`, slice by slice, and waits for what it has launched,
 * for `wait_ns` as it usually does (0: not known), may have work there when the slice ends. Best-effort work that is back by then has one
 * of its own.
 */
bool rg_policy_outlasts(uint64_t kept_ns, uint64_t wait_ns, uint64_t slice_ns);

/*
 * rg_policy_credit: what best-effort work that is taken off the GPU has had of it beyond its share, after `passed_ns` more in which it had it for
 * `ran_ns`. No more than its share of ten starvation bounds: it may go without for so long, if it has had enough before; nor less than nothing by more.
 */
int64_t rg_policy_credit(int64_t credit_ns, uint64_t passed_ns, uint64_t ran_ns, uint64_t starvation_ns, uint32_t min_share_ppm);

/*
 * What it has had, kept by whoever takes it off the GPU: a thread of each client (preempt.c), and scenario-agent.c for all in simulation. Zeroed at
 * first. rg_policy_off, rg_policy_on: it is off the GPU from now on, or back; what high clients wait for as it comes back (`high_busy`) keeps it off
 * still, until they are idle. rg_policy_count: brings `credit_ns` up to now. It has had what it was not off, or, in short slices, in which it has next
 * to nothing of the GPU beside high clients, their breaks; what was before `given_ns` does not count.
 */
typedef struct {
    int64_t credit_ns; /* rg_policy_credit */
    uint64_t given_ns; /* when it last had its due, or was held back on purpose */
    bool off;
    uint64_t off_since_ns, off_sum_ns; /* for how long in all, until it last came back */
    uint64_t back_ns;  /* when that was, if high clients were busy; 0: they were not, or have been idle since */
    uint64_t looked_ns, off_then_ns, spell_then_ns, idle_then_ns; /* as it was last counted */
} rg_policy_had;

typedef struct {
    uint64_t spell_ns, idle_ns; /* of the device (segment.h) */
    bool short_slices;
    uint64_t starvation_ns, period_ns; /* rg_policy_share_period */
    uint32_t min_share_ppm;
} rg_policy_due_view;

void rg_policy_off(rg_policy_had *had, uint64_t idle_ns, uint64_t now_ns);
void rg_policy_on(rg_policy_had *had, bool high_busy, uint64_t now_ns);
void rg_policy_count(rg_policy_had *had, const rg_policy_due_view *view, uint64_t now_ns);

/*
 * rg_policy_share_period: from one time that it has its share to the next, of the settings of these names. Each of them delays the requests that are
 * under way, all the longer the longer it is, so where there are many of these few are delayed if it comes rarely.
 */
static inline uint64_t rg_policy_share_period(uint32_t starvation_us, uint32_t share_period_us)
{
    return (starvation_us > share_period_us ? starvation_us : share_period_us) * 1000ull;
}

/*
 * rg_policy_due_in: in how long it is to have its share: once high clients have gone on without a break for the starvation bound since it last had, a
 * period has passed since then, and the credit is used up. UINT64_MAX: not as long as it has the GPU (`runs`).
 */
uint64_t rg_policy_due_in(const rg_policy_had *had, const rg_policy_due_view *view, bool runs, uint64_t now_ns);

/*
 * rg_policy_away: of how long it then has its share: a period, or what has passed since it last had it, where that is less as the period has become longer
 * since; the starvation bound, where it never had.
 */
uint64_t rg_policy_away(const rg_policy_had *had, const rg_policy_due_view *view, uint64_t now_ns);

/*
 * rg_policy_due: the same where best-effort work was off the GPU for `away_ns` (rg_policy_away; preempt.c): for how long it then has the GPU, while
 * high clients are let on for `high_slice_ns` only, so that it has its share of all three. A hundredth at least: off for ever is
 * nobody; half at most.
 */
uint64_t rg_policy_due(uint64_t away_ns, uint64_t high_slice_ns, uint32_t min_share_ppm);

/*
 * rg_policy_due_beside: the same where it runs beside the high clients (stop.c), of whose GPU it then gets about half: for how long it does, so
 * that it has its share of both times. Four tenths at most, for which that is four times as long as it was away.
 */
uint64_t rg_policy_due_beside(uint64_t away_ns, uint32_t min_share_ppm);

/*
 * rg_policy_usual: learns how many launches a client's requests make; called at the end of each, with what it has `made` and for how long
 * it has launched (`took_ns`). `usual` is the number that requests with most of the launches have, give or take an eighth, and `votes` by
 * how many launches they outnumber the others (a majority vote, Boyer and Moore 1981), no more than in eight of them, and each of the
 * others for a sixteenth of one at least, so that it follows a program that changes. `usual_ns` is for how long those requests launch, a
 * quarter of it the last one's. Returns what that request was: one of those, another, or the first of others that are usual from now on.
 */
enum rg_request { RG_REQUEST_USUAL, RG_REQUEST_OTHER, RG_REQUEST_NEW };
enum rg_request rg_policy_usual(uint32_t *usual, uint32_t *votes, uint64_t *usual_ns, uint64_t made, uint64_t took_ns);

/* rg_policy_regular: requests are so much alike, and of launches enough, that these tell how far one of them has come. */
static inline bool rg_policy_regular(uint32_t usual, uint32_t votes)
{
    return usual >= 16 && votes / 2 >= usual;
}

/* Slices up to this are no more than a suspension takes: nobody is suspended to end one. */
#define RG_POLICY_SHORT_SLICE_US 1000u

/* Kernels (or graphs) of so long are rather interrupted, by a suspension that takes 500 us, than waited for until the next stop. */
#define RG_POLICY_LONG_NS 1500000u

/*
 * rg_policy_brief: for how long a request that has launched for `launched_ns` may still launch before best-effort work that slices have interrupted is
 * taken off the GPU as well, where the last ones launched for `worked_ns` at most (UINT64_MAX: none is known); 0: at once. To disable
 * channels takes the GPU from whoever is at work there for 0.2 ms (bench/follow.cu), and what was interrupted comes back only where a
 * request leaves the GPU to it between its launches: one that launches all at once, as CUDA graphs are, has nothing from that. What it
 * waits for in between counts as launching. Twice as long as the last ones, where those launched for RG_POLICY_BRIEF_NS at most.
 */
#define RG_POLICY_BRIEF_NS 500000u
uint64_t rg_policy_brief(uint64_t launched_ns, uint64_t worked_ns);

/*
 * Kernels (or graphs) of so long: where these are much of what a client launches a suspension is there sooner than the next stop. On an H200 they have 0.04
 * of the time of ResNet-50's training, none of BERT's, 0.22 of MobileNetV2's and GPT-2's; on an H100, whose kernels take up to 1.4 times as long, 0.06
 * and 0.24. (Of 500 us it would be 0.06 and, on an H100, 0.13 of ResNet-50's: profiles/.)
 */
#define RG_POLICY_STOP_NS 750000u

/*
 * A call that takes a client off the GPU, or lets it back, of so long was held up. On an H100 it takes 0.26 to 0.44 ms, 0.6 at the 99th percentile, and 2 at
 * most; where programs start on some GPU of the host 5 at the 99th percentile, and up to 110 (bench/suspend.cu).
 */
#define RG_POLICY_SLOW_CALL_NS 2000000u

/*
 * rg_policy_alike: in so many requests in a row has what they launched been the same; called at the end of each, with what was `usual` until then, what it has
 * `made`, and what rg_policy_usual says it `is`. From RG_POLICY_ALIKE on the next one is taken to launch as much, and to have launched all once it has.
 * One that then goes on has best-effort work in its way: that is not tried again before 64 more have launched what is usual. One that launches far less
 * is in nobody's way.
 */
#define RG_POLICY_ALIKE 8
int32_t rg_policy_alike(int32_t alike, uint32_t usual, uint64_t made, enum rg_request is);

/*
 * Programs that serve requests from a queue begin the next one soon after the last: of 4,000 requests of BERT as one graph, 60 a second at random, on an
 * H200's host 0.24 did within 300 us, half of those within 33 and nine in ten within 100. To come back for that long is an exchange of processes there and
 * another one back, some 300 us of the GPU, in the way of that request. So where two of the last 64 pauses were shorter than RG_POLICY_SHORT_PAUSE_NS, as
 * whoever has to wake up sees them, streams that have stopped in time slices go on when nothing has followed for RG_POLICY_FOLLOWS_NS. (Under MPS nothing is
 * exchanged.)
 */
#define RG_POLICY_FOLLOWS_NS 100000u
#define RG_POLICY_SHORT_PAUSE_NS 200000u

/* rg_policy_follows: whether requests often follow one another at once; a bit for each pause between them, set: it was short. */
static inline bool rg_policy_follows(uint64_t short_pauses)
{
    return short_pauses & (short_pauses - 1);
}

/* Of a source of requests (arrivals.c) so many arrivals are remembered, the last ones; and nothing is foreseen by less than half of that. */
#define RG_POLICY_ARRIVALS 16
/* No request came of it. */
#define RG_POLICY_NEVER UINT32_MAX

/*
 * rg_policy_ahead_us: how long before the first launch of a request that is seen coming the GPU is to begin to come over: the calls for it take some 35 us,
 * and it 137 (bench/switch.cu). Where processors are late, as those of a virtual machine are whose host is busy, whoever sees to it may be so, too:
 * `late_waits`, a bit for each of the last 64 waits for a time: it ended late. Where they are not,
 * fewer than 1 in 100 do (an H200's host: p99 45 us).
 */
uint32_t rg_policy_ahead_us(uint64_t late_waits);

/*
 * rg_policy_foresees: whether requests are foreseen by what arrives: `us`, so many, are how long after the last arrivals a request began. If so the GPU
 * comes over `after_us` later: `ahead_us` before the earliest, of sixteen the second; and three of four must have begun from then on and within the time
 * for which it waits then, `wait_us`: `stay_us`, or, where more have begun within that, up to twice as long, if by what came before it waits for no more
 * than two thirds of `stay_us` on average.
 */
bool rg_policy_foresees(const uint32_t us[RG_POLICY_ARRIVALS], uint32_t n, uint32_t ahead_us, uint32_t stay_us, uint32_t *after_us, uint32_t *wait_us);

/* Best-effort work that is off the GPU comes back if it can have it for so long: to come back and to go again are calls of 0.26 and 0.43 ms. */
#define RG_POLICY_BETWEEN_NS 1000000u

/*
 * The shortest slice of a process that may not have the GPU to itself while no high client has work. The GPU restores what a process had on it in
 * the first part of its slice: beside one another two processes whose kernels fill an H200's registers and shared memory get nothing done in slices
 * of 50 or 75 us, ever, 8% of what one gets alone in 100 us, and 36% in 200 us; in 50 to 150 us beside one in the driver's slices nothing, and 5% in 200
 * us (bench/peers.cu).
 */
#define RG_POLICY_LEAST_SLICE_US 200u

/*
 * rg_policy_peers_slice_us: the slices of a best-effort process beside `peers` others, where one alone would have slices of `alone_us` and is suspended in
 * time: the driver's, in place of shorter ones, in which they would do nothing but switch; and of longer ones a part, so that all of them together take no longer
 * than the slice of one. Each that is over costs them an exchange of 0.14 ms and more, 7% of the driver's 2 ms.
 */
static inline uint64_t rg_policy_peers_slice_us(uint64_t alone_us, uint32_t peers, uint64_t drivers_us)
{
    uint64_t part_us = alone_us / (peers + 1);
    return part_us > drivers_us ? part_us : drivers_us;
}

/*
 * rg_policy_pace: what each launch of a request takes its program, in nanoseconds; 0: not known yet. It is the request's own pace so far,
 * `made` of `usual` launches in `spent_ns`, in which the `usual_ns` that requests like it took last (0: unknown) stand for an eighth of the
 * launches, since the first few say little of the rest. No more than four times that of those: a program that has stood still for long, for
 * its processor or for the GPU, goes on as fast as ever.
 */
uint64_t rg_policy_pace(uint64_t made, uint32_t usual, uint64_t spent_ns, uint64_t usual_ns);

/*
 * The course of requests that are alike: programs launch more in one part of a request than in another (BERT, batch 2, on an H200's host: of its
 * launches the first eighth takes 0.16 of the time, half of them 0.53). `more` says of as many parts of the launches, 1/8, 2/8 and so on, how much more
 * of the time is over then than of the launches, in RG_POLICY_ONE; all 0: each takes as long.
 */
enum { RG_POLICY_COURSE = 7, RG_POLICY_ONE = 1 << 16 };

/* rg_policy_course: how many launches a request that has made `made` of `usual` would have made, did each take as long. */
uint64_t rg_policy_course(const int64_t more[RG_POLICY_COURSE], uint64_t made, uint32_t usual);

/*
 * rg_policy_learn_course: a request that launched for `took_ns` had made `part` of its launches, in RG_POLICY_ONE, after `spent_ns`. A sixteenth of what
 * that differs from what was known is learned, of an eighth at most; an eighth of the launches is taken to last for a 64th of the time at least.
 */
void rg_policy_learn_course(int64_t more[RG_POLICY_COURSE], uint32_t part, uint64_t spent_ns, uint64_t took_ns);

/*
 * rg_policy_until_late: for how long a request still launches, at its pace, until it has come far enough for best-effort work to give way: it
 * has made this part of its launches (`ppm`, in millionths; 0: none), or the rest of them takes no longer than `need_ns` (0: none).
 * 0: it has; UINT64_MAX: nothing tells the pace. The rest as rg_policy_pace has it; `made` are those of an
 * even request (rg_policy_course) where that matters and no part of them is asked for. `spent_ns` counts up to 17 s.
 */
uint64_t rg_policy_until_late(uint64_t made, uint32_t usual, uint64_t spent_ns, uint64_t usual_ns, uint32_t ppm, uint64_t need_ns);

/*
 * rg_policy_waited: a request that worked for so long, and waited for the GPU for so long at its end, did so for a 32nd of the time or more.
 * rg_policy_balance: what part of the time for which requests are taken to need the GPU (need_us) it is for one kind of them, in RG_POLICY_ONE:
 * some more each time where more of that kind have waited lately than of others (`own`, `all`, likewise), some less where fewer. Between half
 * and twice. So about as many wait of each kind, and need_us, which the latencies of all decide on, is not what the longest ones need.
 */
static inline bool rg_policy_waited(uint64_t worked_ns, uint64_t waited_ns)
{
    return waited_ns > worked_ns / 32;
}
uint32_t rg_policy_balance(uint32_t part, uint32_t own, uint32_t all);

/*
 * fair: start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996) of GPU time. A client's virtual time is the GPU time that
 * it was charged over its weight. A launch goes when its client is ahead of the slowest active one by no more than a quantum;
 * a client that comes back from being idle starts at the slowest active one's time, so that idle time is not saved up.
 *
 * The charge is the sum of the kernels' own durations as learned, not the time that passes: under time slices that would hold
 * the others' slices too, under MPS, where kernels of several clients run side by side, it would charge each for being slowed
 * down by the others. What a client pays then does not depend on who else is there. Nor does it depend on how many SMs a
 * kernel fills: under MPS a client of small kernels pays for the whole GPU, as it would need it alone.
 */
#define RG_POLICY_WEIGHT_ONE 1000u    /* weights are in thousandths: 10 to 100000 */
/* A client counts as active for so long after its last work: what it takes a program to launch again. Longer, and the GPU would
 * stand idle while others wait for one that does not come; shorter, and a program that waits for each result loses its lag. */
#define RG_POLICY_GRACE_NS 250000u

/* rg_policy_inverse: what rg_policy_virtual takes for a weight: computed once, since a launch should not divide. */
uint64_t rg_policy_inverse(uint32_t weight);

/* rg_policy_virtual: virtual time for a charge of GPU time (below 2^32 ns: no kernel is longer). */
static inline uint64_t rg_policy_virtual(uint32_t charge_ns, uint64_t inverse)
{
    return charge_ns * inverse >> 22;
}

#endif
