/*
 * gate.c: where best-effort work waits, and how Rigel learns that it has finished.
 *
 * Entered only when rg_policy_decide said something else than "pass" (or half a batch is full). The waiting thread is the
 * program's own: it may hold the program's locks (Python's GIL among them), so every wait has an end: the high client
 * becomes idle, the starvation bound, a heartbeat gone stale, shutdown, or this client leaving Rigel.
 *
 * Finished work is noticed by untimed events (0.17 us to record, 0.10 us to query, measured on an H200), one per
 * rg_policy_batch of launched work; an event is owned by whoever moved its batch's state. The only lock is tried, not waited
 * for (batches_flush).
 */
#include "client.h"
#include "rigel.h"

#include <dlfcn.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { BATCH_FREE = 0, BATCH_FILLING, BATCH_RECORDED, BATCH_QUERYING };
enum { BATCHES = 64 };
#define IN_GATE_NS 5000000u /* fair: so long does a look of who waits count; several naps of a busy machine */
#define UNKNOWN_US 100u /* what a kernel is taken to last before it is known, where it has to be something */

static struct {
    _Atomic uint32_t state;
    uint32_t weight, index; /* in flight; of the device in the segment */
    rg_member *member;      /* whose */
    _Atomic(CUcontext) context; /* that `event` belongs to; these three are read by who does not own it, too (rg_batch_forget) */
    _Atomic CUdevice device;
    _Atomic(CUevent) event;
} batches[BATCHES];

/* ---- in flight ---- */

/* GPU time that a weight stands for. */
static uint64_t weight_ns(uint32_t weight)
{
    uint64_t unit_us = atomic_load_explicit(&rg.segment->settings.unit_us, memory_order_relaxed);
    return weight * (unit_us ? unit_us : UNKNOWN_US) * 1000 / RG_POLICY_LAUNCH;
}

void rg_retire(rg_member *m, uint32_t device, uint32_t weight)
{
    /* First: what another launch is charged meanwhile, which is in flight before that (rg_gate_charge), is none of this. */
    uint64_t outstanding_ns = atomic_load(&rg_share_of(rg.segment, device, m->slot_index)->outstanding_ns);
    /* Never below zero: a stream or context may have been forgotten with launches still counted. */
    uint32_t n = atomic_load(&m->inflight[device]);
    while (!atomic_compare_exchange_weak(&m->inflight[device], &n, n > weight ? n - weight : 0))
        continue;
    /* orion: it was charged by the settings of then. With nothing in flight nothing is outstanding. */
    if (RG_UNLIKELY(outstanding_ns))
        rg_share_settle(rg.segment, device, m->slot_index, n > weight ? weight_ns(weight) : outstanding_ns);
}

void rg_batch_record(rg_track *t)
{
    for (int i = 0; i < BATCHES; i++) {
        uint32_t free = BATCH_FREE;
        if (atomic_load_explicit(&batches[i].state, memory_order_relaxed) != BATCH_FREE ||
            !atomic_compare_exchange_strong(&batches[i].state, &free, BATCH_FILLING))
            continue;
        /* First: if the stream becomes another client's now, what it had for this one counts as done (rg_track_for). */
        rg_member *member = rg_track_member(t);
        uint32_t n = atomic_exchange(&t->unbatched, 0);
        /* Events are made in, and the NULL stream means that of, the current context: make it the track's. */
        CUcontext current = NULL, popped;
        rg_real.cuCtxGetCurrent(&current);
        bool pushed = current != t->context && rg_real.cuCtxPushCurrent_v2(t->context) == CUDA_SUCCESS;
        bool ok = n && (pushed || current == t->context);
        if (ok && batches[i].event && batches[i].context != t->context) {
            RG_REAL(cuEventDestroy_v2)(batches[i].event);
            batches[i].event = NULL;
        }
        if (ok && !batches[i].event) {
            CUevent event = NULL;
            ok = RG_REAL(cuEventCreate)(&event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS;
            batches[i].context = t->context;
            batches[i].device = t->cu_device;
            batches[i].event = event; /* last: with them it is this context's */
        }
        /* A stream handle of 1 or 2 names the special streams in every form of the call. */
        ok = ok && RG_REAL(cuEventRecord)(batches[i].event, t->stream) == CUDA_SUCCESS;
        if (pushed)
            rg_real.cuCtxPopCurrent_v2(&popped);
        batches[i].weight = n;
        batches[i].index = t->device;
        batches[i].member = member;
        if (!ok)
            rg_retire(batches[i].member, t->device, n); /* cannot be followed: do not hold anybody back for it */
        atomic_store(&batches[i].state, ok ? BATCH_RECORDED : BATCH_FREE);
        return;
    }
    /* All batches are out: these launches stay unbatched and the next call tries again. */
}

/* Asks the GPUs which batches are done. True if any on this device was. */
static bool batches_poll(uint32_t device)
{
    bool any = false;
    for (int i = 0; i < BATCHES; i++) {
        uint32_t recorded = BATCH_RECORDED;
        if (atomic_load_explicit(&batches[i].state, memory_order_relaxed) != BATCH_RECORDED ||
            !atomic_compare_exchange_strong(&batches[i].state, &recorded, BATCH_QUERYING))
            continue;
        bool done = RG_REAL(cuEventQuery)(batches[i].event) != CUDA_ERROR_NOT_READY; /* an error ends the wait too */
        if (done)
            rg_retire(batches[i].member, batches[i].index, batches[i].weight);
        any |= done && batches[i].index == device;
        atomic_store(&batches[i].state, done ? BATCH_FREE : BATCH_RECORDED);
    }
    return any;
}

/* Covers launches that no event follows yet, on every stream that this thread can name. Another thread may be about to destroy
 * one of them, or to capture on it: this thread tries again later then. */
static void batches_flush(void)
{
    if (!rg_agent_enter())
        return;
    uint32_t n = atomic_load(&rg.captures) ? 0 : atomic_load(&rg.track_count);
    for (uint32_t i = 0; i < n; i++) {
        rg_track *t = &rg.tracks[i];
        if (atomic_load(&t->key) && atomic_load(&t->unbatched) && (!t->owner || t->owner == &rg_thread_mark))
            rg_batch_record(t);
    }
    pthread_mutex_unlock(&rg_agent_lock);
}

bool rg_gate_outstanding(const rg_member *m)
{
    bool any = false;
    for (uint32_t d = 0; d < RG_MAX_DEVICES; d++)
        any |= atomic_load_explicit(&rg_share_of(rg.segment, d, m->slot_index)->outstanding_ns, memory_order_relaxed) != 0;
    return any;
}

void rg_gate_look(void)
{
    batches_flush();
    batches_poll(0); /* no samples: how long they took may take their context, which is the program's threads' */
}

bool rg_give_way(int tries)
{
    if (tries > 1000)
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    else if (tries > 0)
        sched_yield();
    return tries < 2000;
}

static bool batch_is_in(int i, CUcontext context, CUdevice d)
{
    return batches[i].event && (context ? batches[i].context == context : batches[i].device == d);
}

void rg_batch_forget(CUcontext context, CUdevice d)
{
    for (int i = 0; i < BATCHES; i++) {
        if (!batch_is_in(i, context, d))
            continue;
        /* Whoever is using it now is done in a moment; only a driver that never returns makes us leave it. */
        for (int tries = 0; rg_give_way(tries); tries++) {
            uint32_t state = atomic_load(&batches[i].state);
            if ((state == BATCH_RECORDED || state == BATCH_FREE) &&
                atomic_compare_exchange_strong(&batches[i].state, &state, BATCH_FILLING)) {
                /* Who had it has perhaps given it an event of another context's meanwhile. */
                bool its = batch_is_in(i, context, d);
                if (its) {
                    if (state == BATCH_RECORDED)
                        rg_retire(batches[i].member, batches[i].index, batches[i].weight);
                    batches[i].event = NULL;
                }
                atomic_store(&batches[i].state, its ? BATCH_FREE : state);
                break;
            }
        }
    }
}

/* ---- fair ---- */

/*
 * Raises the device's virtual time to that of the slowest active client. Done by who is about to wait, or waits, once for each
 * quantum of GPU time at most, so that the launch path reads one word however many clients there are.
 */
static void look_up_virtual(const rg_member *m, uint32_t device, uint64_t now)
{
    rg_device *dev = &rg.segment->devices[device];
    uint64_t busy = atomic_load(&dev->high_busy), least = UINT64_MAX;
    for (int i = 0; i < RG_MAX_CLIENTS; i++) {
        rg_share *share = rg_share_of(rg.segment, device, i);
        uint64_t idle = atomic_load_explicit(&share->idle_ns, memory_order_relaxed);
        bool active = i == m->slot_index || busy >> i & 1 || (idle && (now < idle || now - idle < RG_POLICY_GRACE_NS));
        uint64_t own = active ? atomic_load_explicit(&share->virtual_ns, memory_order_relaxed) : UINT64_MAX;
        least = own < least ? own : least;
    }
    uint64_t old = atomic_load(&dev->virtual_ns);
    while (old < least && !atomic_compare_exchange_weak(&dev->virtual_ns, &old, least))
        continue;
}

static void charge(const rg_member *m, uint32_t device, uint32_t charge_ns)
{
    rg_share *share = rg_share_of(rg.segment, device, m->slot_index);
    atomic_fetch_add_explicit(&m->slot->charged_ns, charge_ns, memory_order_relaxed);
    atomic_fetch_add_explicit(&share->virtual_ns, rg_policy_virtual(charge_ns, atomic_load_explicit(&m->inverse_weight, memory_order_relaxed)), memory_order_relaxed);
}

void rg_gate_recharge(rg_member *m, uint32_t device, uint32_t launches, uint32_t from_ns, uint32_t to_ns)
{
    rg_share *share = rg_share_of(rg.segment, device, m->slot_index);
    uint64_t off_ns = from_ns > to_ns ? from_ns - to_ns : to_ns - from_ns;
    uint64_t charged = off_ns * launches;
    uint64_t virtual = rg_policy_virtual((uint32_t)off_ns, atomic_load(&m->inverse_weight)) * launches;
    if (from_ns > to_ns) {
        /* What is given back is no credit: the next launch raises the virtual time to that of the slowest again. Never below
         * zero, were a launch counted before it is charged. */
        uint64_t old = atomic_load(&share->virtual_ns), sum = atomic_load(&m->slot->charged_ns);
        while (!atomic_compare_exchange_weak(&share->virtual_ns, &old, old > virtual ? old - virtual : 0))
            continue;
        while (!atomic_compare_exchange_weak(&m->slot->charged_ns, &sum, sum > charged ? sum - charged : 0))
            continue;
    } else {
        atomic_fetch_add(&share->virtual_ns, virtual);
        atomic_fetch_add(&m->slot->charged_ns, charged);
    }
}

/* ---- orion ---- */

/* What rigel_describe_launch said of this thread's next launch. */
static _Thread_local __attribute__((tls_model("initial-exec"))) struct {
    bool set;
    uint32_t sms, bound;
    uint64_t duration_ns;
} described;

void rigel_describe_launch(uint32_t sms, int bound, uint64_t duration_ns)
{
    described.set = true;
    described.sms = sms;
    described.bound = bound < 0 ? RG_BOUND_UNKNOWN : bound ? RG_BOUND_COMPUTE : RG_BOUND_MEMORY;
    described.duration_ns = duration_ns;
}

static const rg_kernel *kernel_of(const rg_duration *d)
{
    uint32_t k = d ? atomic_load_explicit(&d->kernel, memory_order_relaxed) : 0;
    return k ? &rg.segment->kernels[k - 1] : NULL;
}

/* The readable form of a C++ symbol, by the program's own libstdc++; NULL where it has none. To be freed. */
char *rg_demangled(const char *name)
{
    char *(*demangle)(const char *, char *, size_t *, int *) = NULL;
    void *library = strncmp(name, "_Z", 2) == 0 ? dlopen("libstdc++.so.6", RTLD_LAZY | RTLD_NOLOAD) : NULL;
    if (library)
        *(void **)&demangle = dlvsym(library, "__cxa_demangle", "CXXABI_1.3"); /* dlsym would be our own hook */
    return demangle ? demangle(name, NULL, NULL, NULL) : NULL;
}

/* Profiles name kernels as the driver does or as people read them, with or without a shape. */
void rg_gate_profile(rg_duration *d, CUfunction f, rg_dims dims)
{
    const char *name = rg_function_name(f);
    char *readable = name ? rg_demangled(name) : NULL;
    const char *names[] = {name, readable};
    rg_kernel *k = NULL;
    for (int i = 0; i < 4 && !k; i++)
        if (names[i / 2])
            k = rg_kernel_find(rg.segment, rg_kernel_key(names[i / 2], i % 2 ? 0 : rg_dims_hash(dims)));
    free(readable);
    atomic_store(&d->kernel, k ? (uint32_t)(k - rg.segment->kernels) + 1 : 0); /* it may have been another kernel (rg_durations_doubt) */
}

void rg_gate_show(const rg_track *t, enum rg_kind kind, uintptr_t units, rg_dims dims)
{
    if (kind != RG_LAUNCH)
        return;
    uint32_t bound = described.bound;
    if (!described.set) {
        rg_duration *d = rg_duration_of(rg_duration_key(units, dims));
        if (atomic_load_explicit(&d->seen, memory_order_relaxed) == 0) {
            atomic_store_explicit(&d->seen, 1, memory_order_relaxed);
            rg_gate_profile(d, (CUfunction)units, dims);
        }
        const rg_kernel *k = kernel_of(d);
        bound = k ? atomic_load_explicit(&k->bound, memory_order_relaxed) : RG_BOUND_UNKNOWN;
    }
    described.set = false;
    rg_device *dev = &rg.segment->devices[t->device];
    if (atomic_load_explicit(&dev->high_bound, memory_order_relaxed) != bound)
        atomic_store_explicit(&dev->high_bound, bound, memory_order_relaxed);
}

/* ---- what both decide on, and what both charge ---- */

/* Adds to a view what fair and orion decide on. */
static void complete(const rg_track *t, const rg_duration *d, rg_policy_view *v)
{
    rg_device *dev = &rg.segment->devices[t->device];
    rg_settings *s = &rg.segment->settings;
    if (v->policy == RG_POLICY_FAIR) {
        rg_share *share = rg_share_of(rg.segment, t->device, rg_track_member(t)->slot_index);
        uint64_t slowest = atomic_load_explicit(&dev->virtual_ns, memory_order_relaxed);
        uint64_t own = atomic_load_explicit(&share->virtual_ns, memory_order_relaxed);
        while (own < slowest && !atomic_compare_exchange_weak(&share->virtual_ns, &own, slowest))
            continue; /* it was idle */
        v->lead_ns = own > slowest ? own - slowest : 0;
        v->quantum_ns = (uint64_t)atomic_load_explicit(&s->quantum_us, memory_order_relaxed) * 1000u;
    } else if (v->policy == RG_POLICY_ORION) {
        const rg_kernel *k = kernel_of(d);
        v->profiled = k || described.set;
        if (v->profiled) {
            v->sms = described.set ? described.sms : atomic_load_explicit(&k->sms, memory_order_relaxed);
            v->bound = described.set ? described.bound : atomic_load_explicit(&k->bound, memory_order_relaxed);
        }
        v->high_bound = atomic_load_explicit(&dev->high_bound, memory_order_relaxed);
        v->sms_limit = atomic_load_explicit(&s->sms_limit, memory_order_relaxed);
        v->outstanding_ns = atomic_load_explicit(&dev->outstanding_ns, memory_order_relaxed);
        v->outstanding_limit_ns = (uint64_t)atomic_load_explicit(&s->outstanding_us, memory_order_relaxed) * 1000u;
    }
}

enum rg_verdict rg_gate_decide(const rg_track *t, const rg_duration *d)
{
    rg_policy_view v = rg_gate_view(t);
    complete(t, d, &v);
    return rg_policy_decide(&v);
}

uint32_t rg_gate_charge(rg_member *m, const rg_track *t, rg_duration *d, uint32_t policy, uint32_t weight)
{
    if (policy == RG_POLICY_ORION && described.set)
        weight = rg_policy_weight(described.duration_ns, weight_ns(RG_POLICY_LAUNCH));
    /* First: whoever retires the launches before meanwhile would take what is outstanding of this one for theirs (rg_retire). */
    atomic_fetch_add_explicit(&m->inflight[rg_track_device(t)], weight, memory_order_relaxed);
    if (policy == RG_POLICY_FAIR && d) { /* copies and memsets use no SMs: nothing to pay */
        /* The estimate rises where others slow the kernel down; that is not this client's to pay for. */
        atomic_fetch_add_explicit(rg_duration_charged(d, m), 1, memory_order_relaxed);
        charge(m, t->device, atomic_load_explicit(&d->price_ns, memory_order_relaxed));
    } else if (policy == RG_POLICY_ORION) {
        if (!described.set && d && !kernel_of(d))
            atomic_fetch_add_explicit(&m->slot->unprofiled, 1, memory_order_relaxed);
        described.set = false;
        atomic_fetch_add(&rg_share_of(rg.segment, t->device, m->slot_index)->outstanding_ns, weight_ns(weight));
        atomic_fetch_add(&rg.segment->devices[t->device].outstanding_ns, weight_ns(weight));
    }
    return weight;
}

/* ---- the least share ---- */

static uint64_t busy_for(rg_device *dev, uint64_t now)
{
    uint64_t since = atomic_load(&dev->spell_ns);
    return since && now > since && atomic_load(&dev->high_busy) ? now - since : 0;
}

/* Takes a launch's GPU time out of the bucket. */
static void pay(rg_device *dev, const rg_duration *d, uint64_t now, uint64_t starvation_ns)
{
    uint32_t known = d ? atomic_load_explicit(&d->duration_ns, memory_order_relaxed) : 0;
    uint64_t cost_ns = !d ? 0 : known ? known : weight_ns(RG_POLICY_LAUNCH);
    uint32_t ppm = atomic_load_explicit(&rg.segment->settings.min_share_ppm, memory_order_relaxed);
    uint64_t paid = atomic_load(&dev->paid_ns);
    while (!atomic_compare_exchange_weak(&dev->paid_ns, &paid,
                                         rg_policy_pay(busy_for(dev, now), paid, starvation_ns, ppm, cost_ns)))
        continue;
}

/* ---- waiting ---- */

static void cpu_relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/*
 * Short sleeps. The kernel rounds a thread's sleeps up by its timer slack, 50 us unless set: with that a nap lasts so long
 * that a GPU running kernels of a few microseconds falls idle. The slack is the program's: naps_end puts it back.
 */
typedef struct {
    int slack; /* the program's, while ours is set; 0: not set */
} naps;

static void nap(naps *n)
{
    struct timespec t = {0, 15000};
    if (!n->slack) {
        n->slack = prctl(PR_GET_TIMERSLACK);
        prctl(PR_SET_TIMERSLACK, 1);
    }
    nanosleep(&t, NULL);
}

static void naps_end(const naps *n)
{
    if (n->slack > 0)
        prctl(PR_SET_TIMERSLACK, n->slack);
}

/* Sleeps until the device's gate may have opened, at most 2 ms (the end of a hold wakes nobody). */
static void sleep_on(rg_device *dev)
{
    uint32_t before = atomic_load(&dev->wake);
    struct timespec limit = {0, 2000000};
    atomic_fetch_add(&dev->waiters, 1);
    if (atomic_load(&dev->high_busy) || rg_hold_left_ms(&rg.segment->settings, rg_now_ns()))
        syscall(SYS_futex, &dev->wake, FUTEX_WAIT, before, &limit, NULL, 0);
    atomic_fetch_sub(&dev->waiters, 1);
}

/* What a thread does that waits, for its row and its records. */
static uint32_t operation_of(enum rg_verdict verdict)
{
    return verdict == RG_WAIT_INFLIGHT ? RG_OP_wait_inflight : verdict == RG_WAIT_TURN ? RG_OP_wait_turn : RG_OP_wait_high;
}

/* A piece of a wait is over; `seen`: bit per operation whose first piece is recorded. */
static void piece_over(const rg_op *op, const rg_track *t, uint32_t *seen)
{
    uint64_t marks = (uint64_t)(t - rg.tracks + 1) << 38;
    uint32_t bit = 1u << (op->operation == RG_OP_wait_inflight);
    rg_op_end(op, RG_TRACE_gate, marks | (*seen & bit ? RG_RECORD_CONTINUED : 0), 0);
    *seen |= bit;
}

/* Best-effort work may go on for a part of the high clients' work (see preempt.c, still_there): within its limit in flight. */
static void put_off(rg_policy_view *v, uint32_t device, uint64_t now)
{
    /* To look is to read what a high client writes at each launch, which slows it down: seldom, then, however many threads ask. */
    enum { EARLY_NS = 200000, LATE_NS = 50000 };
    static _Atomic uint64_t looked[RG_MAX_DEVICES]; /* when to look again << 1 | whether it may go on until then */
    if (v->policy > RG_POLICY_SLO)
        return;
    uint64_t known = atomic_load_explicit(&looked[device], memory_order_relaxed);
    if (known >> 1 <= now) {
        uint64_t again_ns;
        bool late = !rg_device_until_late(rg.segment, device, now, busy_for(&rg.segment->devices[device], now), &again_ns);
        uint64_t next_ns = late ? LATE_NS : again_ns < EARLY_NS ? again_ns : EARLY_NS;
        known = (now + next_ns) << 1 | !late;
        atomic_store_explicit(&looked[device], known, memory_order_relaxed);
    }
    if (known & 1)
        v->high_busy = false;
}

_Atomic uint32_t rg_gate_held;

static void held(void)
{
    if (!rg_this.held)
        atomic_fetch_add(&rg_gate_held, 1);
    rg_this.held = true; /* until rg_work_end */
}

void rg_gate_called(void)
{
    rg_this.held = false;
    atomic_fetch_sub(&rg_gate_held, 1);
}

void rg_gate_settle(void)
{
    enum { SETTLE_NS = 50000000 };
    for (uint32_t i = 0; i < atomic_load(&rg.member_count); i++)
        syscall(SYS_futex, &rg.members[i].mode, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0); /* who is paused */
    /* A handler may have interrupted a thread that waits, and never return to it. */
    for (uint64_t until = rg_now_ns() + SETTLE_NS; atomic_load(&rg_gate_held) > rg_this.held && rg_now_ns() < until;)
        nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
}

void rg_gate_paused(rg_member *m, enum rg_kind kind, uintptr_t units)
{
    if (!rg_member_is_paused(m) ||
        (kind > RG_GRAPH && units < atomic_load_explicit(&rg.segment->settings.bulk_bytes, memory_order_relaxed)))
        return;
    if (rg_member_holds_python()) {
        atomic_fetch_add_explicit(&m->slot->passed, 1, memory_order_relaxed);
        return;
    }
    enum { LOOK_NS = 100000000 };
    held();
    uint64_t since = rg_now_ns();
    rg_op op = rg_wait_op(atomic_load(&m->account->paused_until_ns) > since ? RG_OP_paused : RG_OP_wait_turn, 0);
    for (uint32_t mode; mode = atomic_load(&m->mode), rg_member_is_paused(m) && !atomic_load(&rg.captures) &&
                                                          atomic_load(&rg.mode) != RG_MODE_BARE;) {
        uint64_t left_ns = rg_since(rg_now_ns(), rg_account_until(m->account));
        const struct timespec limit = {0, left_ns < LOOK_NS ? (long)left_ns : LOOK_NS};
        syscall(SYS_futex, &m->mode, FUTEX_WAIT_PRIVATE, mode, &limit, NULL, 0);
    }
    rg_op_end(&op, RG_TRACE_gate, 0, 0);
    atomic_fetch_add_explicit(&m->slot->paused_ns, rg_now_ns() - since, memory_order_relaxed);
}

void rg_gate_wait(rg_track *t, enum rg_verdict verdict, const rg_duration *d)
{
    rg_member *m = rg_track_member(t);
    rg_client *slot = m->slot;
    if (rg_member_holds_python()) {
        atomic_fetch_add_explicit(&slot->passed, 1, memory_order_relaxed);
        return;
    }
    held();
    rg_device *dev = &rg.segment->devices[t->device];
    rg_settings *s = &rg.segment->settings;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (rg_real.cuThreadExchangeStreamCaptureMode)
        rg_real.cuThreadExchangeStreamCaptureMode(&mode);
    uint64_t now = rg_now_ns();
    uint64_t since = now;      /* this kind of wait began, or last saw progress */
    uint64_t spin_until = 0;
    uint64_t slowest_before = UINT64_MAX; /* fair: the device's virtual time when last seen */
    naps napped = {0};
    uint64_t spent_ns[2] = {0, 0}; /* waiting for high clients; waiting for our own launches */
    if (verdict == RG_WAIT_TURN) { /* nobody may have looked for a quantum */
        look_up_virtual(m, t->device, now);
        rg_policy_view v = rg_gate_view(t);
        complete(t, d, &v);
        verdict = rg_policy_decide(&v);
    } else if (verdict == RG_WAIT_HIGH) {
        rg_policy_view v = rg_gate_view(t);
        put_off(&v, t->device, now);
        verdict = v.policy > RG_POLICY_SLO ? verdict : rg_policy_decide(&v);
    }
    uint32_t pieces = 0;
    rg_op op = {.row = NULL};
    if (rg_policy_waits(verdict)) {
        op = rg_wait_op(operation_of(verdict), 0);
        since = now = rg_now_ns(); /* of the wait as it is recorded, if this thread was held up before */
    }
    while (rg_policy_waits(verdict)) {
        /* Somebody began a capture, or this process left Rigel: nothing of ours may stand in the way any more. */
        if (atomic_load(&rg.captures) || !(atomic_load(&rg.mode) & atomic_load(&m->mode) & RG_MODE_BEST_EFFORT))
            break;
        if (!spin_until) {
            spin_until = now + (uint64_t)atomic_load_explicit(&s->spin_us, memory_order_relaxed) * 1000u;
            batches_flush();
        }
        bool own = verdict != RG_WAIT_HIGH || (atomic_load_explicit(&s->corun, memory_order_relaxed) &&
                                                   atomic_load_explicit(&m->inflight[t->device], memory_order_relaxed));
        if (own)
            rg_samples_poll();
        bool progress = own && batches_poll(t->device);
        if (progress) {
            spin_until = 0;
        } else if (now < spin_until) {
            cpu_relax();
        } else {
            batches_flush();
            if (own)
                nap(&napped);
            else
                sleep_on(dev);
        }
        uint64_t then = now;
        now = rg_now_ns();
        spent_ns[verdict == RG_WAIT_INFLIGHT] += now - then;
        if (progress && verdict == RG_WAIT_INFLIGHT)
            since = now;

        rg_policy_view v = rg_gate_view(t);
        v.starvation_ns = (uint64_t)atomic_load_explicit(&s->starvation_us, memory_order_relaxed) * 1000u;
        v.credit = atomic_load(&m->credit[t->device]);
        if (v.policy == RG_POLICY_FAIR) {
            /* Who waits here is active, though the GPU may be through with what it has launched. */
            atomic_store_explicit(&rg_share_of(rg.segment, t->device, m->slot_index)->idle_ns, now + IN_GATE_NS,
                                  memory_order_relaxed);
            if (verdict == RG_WAIT_TURN)
                look_up_virtual(m, t->device, now);
            uint64_t slowest = atomic_load(&dev->virtual_ns); /* by whoever looked */
            if (verdict == RG_WAIT_TURN && slowest > slowest_before)
                since = now;
            slowest_before = slowest;
        }
        put_off(&v, t->device, now);
        if (v.policy > RG_POLICY_SLO)
            complete(t, d, &v);
        else
            v.allowance_ns = rg_policy_allowance(busy_for(dev, now), atomic_load(&dev->paid_ns), v.starvation_ns,
                                                 atomic_load_explicit(&s->min_share_ppm, memory_order_relaxed));
        if (v.hold)
            since = now; /* a hold is meant: it is no waiting for somebody who does not come to an end */
        v.waited_ns = now - since;
        enum rg_verdict next = rg_policy_decide(&v);
        bool full = v.inflight_limit && v.inflight >= v.inflight_limit;
        if (next == RG_PASS_STARVED && !full) {
            uint32_t left = v.credit;
            if (!left) {
                left = v.inflight_limit && v.policy != RG_POLICY_FAIR ? v.inflight_limit / RG_POLICY_LAUNCH : 1;
                atomic_fetch_add_explicit(&slot->starved, 1, memory_order_relaxed);
            }
            atomic_store(&m->credit[t->device], left - 1);
        } else if (!v.high_busy) {
            atomic_store(&m->credit[t->device], 0);
        }
        if (next == RG_PASS_SHARE || (next == RG_PASS_STARVED && v.high_busy))
            pay(dev, d, now, v.starvation_ns);
        atomic_fetch_add_explicit(&slot->shared, next == RG_PASS_SHARE, memory_order_relaxed);
        if (next != verdict) {
            since = now;
            spin_until = 0;
            if (rg_policy_waits(next) && operation_of(next) != op.operation) {
                piece_over(&op, t, &pieces);
                op = rg_wait_op(operation_of(next), 0);
            }
        }
        verdict = next;
    }
    if (op.row)
        piece_over(&op, t, &pieces);
    naps_end(&napped);
    if (rg_real.cuThreadExchangeStreamCaptureMode)
        rg_real.cuThreadExchangeStreamCaptureMode(&mode);
    if (spent_ns[0]) {
        atomic_fetch_add_explicit(&slot->gate_waits, 1, memory_order_relaxed);
        atomic_fetch_add_explicit(&slot->gate_wait_ns, spent_ns[0], memory_order_relaxed);
        rg_hist_add(&slot->wait_ns, spent_ns[0]);
    }
    if (spent_ns[1]) {
        atomic_fetch_add_explicit(&slot->inflight_waits, 1, memory_order_relaxed);
        atomic_fetch_add_explicit(&slot->inflight_wait_ns, spent_ns[1], memory_order_relaxed);
    }
}
