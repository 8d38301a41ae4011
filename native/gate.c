/*
 * gate.c: where best-effort work waits, and how Rigel learns that it has finished.
 *
 * Entered only when rg_policy_decide said something else than "pass" (or half a batch is full). The waiting thread is the
 * program's own: it may hold the program's locks (Python's GIL among them), so every wait has an end: the high client
 * becomes idle, the starvation bound, a heartbeat gone stale, shutdown, or this client leaving Rigel.
 *
 * Finished work is noticed by untimed events (0.17 us to record, 0.10 us to query, measured on an H200), one per
 * rg_policy_batch launches; an event is owned by whoever moved its batch's state, so nothing here takes a lock.
 */
#include "client.h"

#include <linux/futex.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { BATCH_FREE = 0, BATCH_FILLING, BATCH_RECORDED, BATCH_QUERYING };
enum { BATCHES = 64 };

static struct {
    _Atomic uint32_t state;
    uint32_t weight;
    CUcontext context; /* that `event` belongs to */
    CUevent event;
} batches[BATCHES];

/* ---- in flight ---- */

static void retire(uint32_t weight)
{
    /* Never below zero: a stream or context may have been forgotten with launches still counted. */
    uint32_t n = atomic_load(&rg.inflight);
    while (!atomic_compare_exchange_weak(&rg.inflight, &n, n > weight ? n - weight : 0))
        continue;
}

void rg_batch_record(rg_track *t)
{
    for (int i = 0; i < BATCHES; i++) {
        uint32_t free = BATCH_FREE;
        if (atomic_load_explicit(&batches[i].state, memory_order_relaxed) != BATCH_FREE ||
            (batches[i].event && batches[i].context != t->context) ||
            !atomic_compare_exchange_strong(&batches[i].state, &free, BATCH_FILLING))
            continue;
        uint32_t n = atomic_exchange(&t->unbatched, 0);
        CUcontext popped;
        /* Events are made in, and the NULL stream means that of, the current context: make it the track's. */
        CUcontext current = NULL;
        rg_real.cuCtxGetCurrent(&current);
        bool push = current != t->context;
        if (push && rg_real.cuCtxPushCurrent_v2(t->context) != CUDA_SUCCESS) {
            retire(n);
            atomic_store(&batches[i].state, BATCH_FREE);
            return;
        }
        if (!batches[i].event && rg_real.cuEventCreate(&batches[i].event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS)
            batches[i].context = t->context;
        /* A stream handle of 1 or 2 names the special streams in every form of the call. */
        bool ok = n && batches[i].event && RG_REAL(cuEventRecord)(batches[i].event, t->stream) == CUDA_SUCCESS;
        if (push)
            rg_real.cuCtxPopCurrent_v2(&popped);
        batches[i].weight = n;
        if (!ok)
            retire(n); /* cannot be followed: do not hold anybody back for it */
        atomic_store(&batches[i].state, ok ? BATCH_RECORDED : BATCH_FREE);
        return;
    }
    /* All batches are out: these launches stay unbatched and the next call tries again. */
}

/* Asks the GPU which batches are done. True if any was. */
static bool batches_poll(void)
{
    bool any = false;
    rg_samples_poll();
    for (int i = 0; i < BATCHES; i++) {
        uint32_t recorded = BATCH_RECORDED;
        if (atomic_load_explicit(&batches[i].state, memory_order_relaxed) != BATCH_RECORDED ||
            !atomic_compare_exchange_strong(&batches[i].state, &recorded, BATCH_QUERYING))
            continue;
        bool done = RG_REAL(cuEventQuery)(batches[i].event) != CUDA_ERROR_NOT_READY; /* an error ends the wait too */
        if (done)
            retire(batches[i].weight);
        any |= done;
        atomic_store(&batches[i].state, done ? BATCH_FREE : BATCH_RECORDED);
    }
    return any;
}

/* Covers launches that no event follows yet, on every stream that this thread can name. */
static void batches_flush(void)
{
    uint32_t n = atomic_load(&rg.track_count);
    for (uint32_t i = 0; i < n; i++) {
        rg_track *t = &rg.tracks[i];
        if (atomic_load(&t->key) && atomic_load(&t->unbatched) &&
            (!t->own_thread || atomic_load(&t->key) == (uintptr_t)&rg_thread_mark))
            rg_batch_record(t);
    }
}

void rg_batch_forget(CUcontext context)
{
    for (int i = 0; i < BATCHES; i++) {
        if (batches[i].context != context)
            continue;
        uint32_t state = atomic_load(&batches[i].state);
        if (state == BATCH_RECORDED && atomic_compare_exchange_strong(&batches[i].state, &state, BATCH_FILLING)) {
            retire(batches[i].weight);
            batches[i].event = NULL;
            atomic_store(&batches[i].state, BATCH_FREE);
        } else if (state == BATCH_FREE && atomic_compare_exchange_strong(&batches[i].state, &state, BATCH_FILLING)) {
            batches[i].event = NULL;
            atomic_store(&batches[i].state, BATCH_FREE);
        }
    }
}

/* ---- communication kernels ---- */

/* What is known of functions and graphs: handle with "holds communication" in the lowest bit. Lossy, so never locked. */
static _Atomic uintptr_t known[1024];

static _Atomic uintptr_t *known_place(uintptr_t handle)
{
    return &known[(uint64_t)handle * 0x9e3779b97f4a7c15u >> 54];
}

static void remember(uintptr_t handle, bool communicates)
{
    atomic_store_explicit(known_place(handle), handle | communicates, memory_order_relaxed);
}

/* NCCL's kernels are named ncclDevKernel_... (2.19 and later) or ncclKernel_...; NVSHMEM's nvshmem...  */
static bool communication_name(const char *name)
{
    return name && (strncmp(name, "nccl", 4) == 0 || strncmp(name, "nvshmem", 7) == 0);
}

static bool function_communicates(CUfunction f)
{
    uintptr_t seen = atomic_load_explicit(known_place((uintptr_t)f), memory_order_relaxed);
    if ((seen & ~(uintptr_t)1) == (uintptr_t)f)
        return seen & 1;
    const char *name = NULL;
    bool yes = false;
    /* libcudart passes a CUkernel where a CUfunction is declared; the driver tells them apart, and so must we by asking. */
    if (rg_real.cuFuncGetName && rg_real.cuFuncGetName(&name, f) == CUDA_SUCCESS)
        yes = communication_name(name);
    else if (rg_real.cuKernelGetName && rg_real.cuKernelGetName(&name, (CUkernel)f) == CUDA_SUCCESS)
        yes = communication_name(name);
    remember((uintptr_t)f, yes);
    return yes;
}

static bool graph_communicates(CUgraph graph, int depth)
{
    CUgraphNode nodes[512];
    size_t n = 0;
    if (!rg_real.cuGraphGetNodes || !rg_real.cuGraphNodeGetType || depth > 4 ||
        rg_real.cuGraphGetNodes(graph, NULL, &n) != CUDA_SUCCESS)
        return false;
    CUgraphNode *all = n <= 512 ? nodes : malloc(n * sizeof *all);
    bool yes = false;
    if (all && rg_real.cuGraphGetNodes(graph, all, &n) == CUDA_SUCCESS) {
        for (size_t i = 0; i < n && !yes; i++) {
            int type = -1;
            CUDA_KERNEL_NODE_PARAMS params;
            CUgraph child;
            if (rg_real.cuGraphNodeGetType(all[i], &type) != CUDA_SUCCESS)
                continue;
            if (type == CU_GRAPH_NODE_TYPE_KERNEL && rg_real.cuGraphKernelNodeGetParams_v2 &&
                rg_real.cuGraphKernelNodeGetParams_v2(all[i], &params) == CUDA_SUCCESS)
                yes = function_communicates(params.func ? params.func : (CUfunction)params.kern);
            else if (type == CU_GRAPH_NODE_TYPE_GRAPH && rg_real.cuGraphChildGraphNodeGetGraph &&
                     rg_real.cuGraphChildGraphNodeGetGraph(all[i], &child) == CUDA_SUCCESS)
                yes = graph_communicates(child, depth + 1);
        }
    }
    if (all != nodes)
        free(all);
    return yes;
}

void rg_graph_note(CUgraphExec exec, CUgraph graph)
{
    remember((uintptr_t)exec, graph_communicates(graph, 0));
}

static bool exempt(enum rg_kind kind, uintptr_t units)
{
    if (kind == RG_LAUNCH)
        return function_communicates((CUfunction)units);
    return kind == RG_GRAPH && atomic_load_explicit(known_place(units), memory_order_relaxed) == (units | 1);
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

/* Sleeps until the device's gate may have opened, at most 2 ms. */
static void sleep_on(rg_device *dev)
{
    uint32_t before = atomic_load(&dev->wake);
    struct timespec limit = {0, 2000000};
    atomic_fetch_add(&dev->waiters, 1);
    if (atomic_load(&dev->high_busy))
        syscall(SYS_futex, &dev->wake, FUTEX_WAIT, before, &limit, NULL, 0);
    atomic_fetch_sub(&dev->waiters, 1);
}

/* Takes clients whose heartbeat has stopped (killed, or stopped by a signal) out of the device's busy word. */
static void clear_stale(rg_device *dev, uint64_t now)
{
    uint64_t stale_ns = (uint64_t)atomic_load(&rg.segment->settings.stale_ms) * 1000000u;
    uint64_t busy = atomic_load(&dev->high_busy);
    for (int i = 0; i < RG_MAX_CLIENTS; i++) {
        if (!(busy >> i & 1))
            continue;
        uint64_t beat = atomic_load(&rg.segment->clients[i].heartbeat_ns);
        if (now > beat && now - beat > stale_ns) {
            atomic_fetch_and(&dev->high_busy, ~(1ull << i));
            atomic_fetch_add(&rg.slot->stale_cleared, 1);
        }
    }
}

void rg_gate_wait(rg_track *t, enum rg_kind kind, uintptr_t units, enum rg_verdict verdict)
{
    /* Launches that may still go out in this starvation period; shared by the client's threads. */
    static _Atomic uint32_t credit;
    if (exempt(kind, units)) {
        atomic_fetch_add_explicit(&rg.slot->passed, 1, memory_order_relaxed);
        return;
    }
    rg_device *dev = &rg.segment->devices[t->device];
    rg_settings *s = &rg.segment->settings;
    uint64_t now = rg_now_ns();
    uint64_t since = now;      /* this kind of wait began, or last saw progress */
    uint64_t spin_until = 0;
    naps napped = {0};
    uint64_t spent_ns[2] = {0, 0}; /* waiting for high clients; waiting for our own launches */
    batches_flush();
    while (verdict == RG_WAIT_HIGH || verdict == RG_WAIT_INFLIGHT) {
        /* Somebody began a capture, or this process left Rigel: nothing of ours may stand in the way any more. */
        if (atomic_load(&rg.captures) || atomic_load(&rg.mode) != RG_MODE_BEST_EFFORT)
            break;
        if (!spin_until)
            spin_until = now + (uint64_t)atomic_load_explicit(&s->spin_us, memory_order_relaxed) * 1000u;
        bool spinning = now < spin_until;
        bool corun = atomic_load_explicit(&s->corun, memory_order_relaxed);
        bool progress = (verdict == RG_WAIT_INFLIGHT || corun) && batches_poll();
        if (progress) {
            spin_until = 0;
        } else if (spinning) {
            cpu_relax();
        } else if (verdict == RG_WAIT_INFLIGHT || (corun && atomic_load_explicit(&rg.inflight, memory_order_relaxed))) {
            nap(&napped);
        } else {
            sleep_on(dev);
            clear_stale(dev, rg_now_ns());
        }
        uint64_t then = now;
        now = rg_now_ns();
        spent_ns[verdict == RG_WAIT_INFLIGHT] += now - then;
        if (progress && verdict == RG_WAIT_INFLIGHT)
            since = now;

        rg_policy_view v = rg_gate_view(t);
        v.starvation_ns = (uint64_t)atomic_load_explicit(&s->starvation_us, memory_order_relaxed) * 1000u;
        v.waited_ns = now - since;
        v.credit = atomic_load(&credit);
        enum rg_verdict next = rg_policy_decide(&v);
        bool full = v.inflight_limit && v.inflight >= v.inflight_limit;
        if (next == RG_PASS_STARVED && !full) {
            uint32_t left = v.credit;
            if (!left) {
                left = v.inflight_limit ? v.inflight_limit / RG_POLICY_LAUNCH : 1;
                atomic_fetch_add_explicit(&rg.slot->starved, 1, memory_order_relaxed);
            }
            atomic_store(&credit, left - 1);
        } else if (!v.high_busy) {
            atomic_store(&credit, 0);
        }
        if (next != verdict) {
            since = now;
            spin_until = 0;
        }
        verdict = next;
    }
    naps_end(&napped);
    if (spent_ns[0]) {
        atomic_fetch_add_explicit(&rg.slot->gate_waits, 1, memory_order_relaxed);
        atomic_fetch_add_explicit(&rg.slot->gate_wait_ns, spent_ns[0], memory_order_relaxed);
        rg_hist_add(&rg.slot->wait_ns, spent_ns[0]);
    }
    if (spent_ns[1]) {
        atomic_fetch_add_explicit(&rg.slot->inflight_waits, 1, memory_order_relaxed);
        atomic_fetch_add_explicit(&rg.slot->inflight_wait_ns, spent_ns[1], memory_order_relaxed);
    }
}
