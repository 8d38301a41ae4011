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

#include <linux/futex.h>
#include <sched.h>
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
    CUdevice device;
    CUevent event;
} batches[BATCHES];

/* ---- in flight ---- */

void rg_retire(uint32_t weight)
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
            !atomic_compare_exchange_strong(&batches[i].state, &free, BATCH_FILLING))
            continue;
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
            ok = rg_real.cuEventCreate(&batches[i].event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS;
            batches[i].context = t->context;
            batches[i].device = t->cu_device;
        }
        /* A stream handle of 1 or 2 names the special streams in every form of the call. */
        ok = ok && RG_REAL(cuEventRecord)(batches[i].event, t->stream) == CUDA_SUCCESS;
        if (pushed)
            rg_real.cuCtxPopCurrent_v2(&popped);
        batches[i].weight = n;
        if (!ok)
            rg_retire(n); /* cannot be followed: do not hold anybody back for it */
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
            rg_retire(batches[i].weight);
        any |= done;
        atomic_store(&batches[i].state, done ? BATCH_FREE : BATCH_RECORDED);
    }
    return any;
}

/* Covers launches that no event follows yet, on every stream that this thread can name. Another thread may be about to destroy
 * one of them, or to capture on it: it holds the lock while it does, and this thread tries again later. */
static void batches_flush(void)
{
    if (pthread_mutex_trylock(&rg_agent_lock) != 0)
        return;
    uint32_t n = atomic_load(&rg.captures) ? 0 : atomic_load(&rg.track_count);
    for (uint32_t i = 0; i < n; i++) {
        rg_track *t = &rg.tracks[i];
        if (atomic_load(&t->key) && atomic_load(&t->unbatched) && (!t->owner || t->owner == &rg_thread_mark))
            rg_batch_record(t);
    }
    pthread_mutex_unlock(&rg_agent_lock);
}

void rg_batch_forget(CUcontext context, CUdevice d)
{
    for (int i = 0; i < BATCHES; i++) {
        if (!batches[i].event || (context ? batches[i].context != context : batches[i].device != d))
            continue;
        /* Whoever is using it now is done in a moment; only a driver that never returns makes us leave it. */
        for (int tries = 0; tries < 1000; tries++) {
            uint32_t state = atomic_load(&batches[i].state);
            if ((state == BATCH_RECORDED || state == BATCH_FREE) &&
                atomic_compare_exchange_strong(&batches[i].state, &state, BATCH_FILLING)) {
                if (state == BATCH_RECORDED)
                    rg_retire(batches[i].weight);
                batches[i].event = NULL;
                atomic_store(&batches[i].state, BATCH_FREE);
                break;
            }
            sched_yield();
        }
    }
}

/* ---- communication kernels ---- */

/* Executable graphs, with "holds communication kernels" in the lowest bit. A table without chains: of two that share a place the
 * later one is known. Functions are asked by name whenever they are new (rg_duration_first). */
static _Atomic uintptr_t graphs[1024];

static _Atomic uintptr_t *graph_place(uintptr_t exec)
{
    return &graphs[(uint64_t)exec * 0x9e3779b97f4a7c15u >> 54];
}

/* NCCL's kernels are named ncclDevKernel_... (2.19 and later) or ncclKernel_...; NVSHMEM's nvshmem...  */
static bool communication_name(const char *name)
{
    return name && (strncmp(name, "nccl", 4) == 0 || strncmp(name, "nvshmem", 7) == 0);
}

bool rg_function_communicates(CUfunction f)
{
    const char *name = NULL;
    /* libcudart passes a CUkernel where a CUfunction is declared. The driver tells them apart, and so must we by asking: each
     * of the two answers CUDA_ERROR_INVALID_HANDLE for the other kind (seen on an H200, CUDA 13.0). */
    if (rg_real.cuFuncGetName && rg_real.cuFuncGetName(&name, f) == CUDA_SUCCESS)
        return communication_name(name);
    return rg_real.cuKernelGetName && rg_real.cuKernelGetName(&name, (CUkernel)f) == CUDA_SUCCESS &&
           communication_name(name);
}

static bool holds_communication(CUgraph graph, int depth)
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
                yes = rg_function_communicates(params.func ? params.func : (CUfunction)params.kern);
            else if (type == CU_GRAPH_NODE_TYPE_GRAPH && rg_real.cuGraphChildGraphNodeGetGraph &&
                     rg_real.cuGraphChildGraphNodeGetGraph(all[i], &child) == CUDA_SUCCESS)
                yes = holds_communication(child, depth + 1);
        }
    }
    if (all != nodes)
        free(all);
    return yes;
}

void rg_graph_note(CUgraphExec exec, CUgraph graph)
{
    uintptr_t place = (uintptr_t)exec | holds_communication(graph, 0);
    atomic_store_explicit(graph_place((uintptr_t)exec), place, memory_order_relaxed);
}

bool rg_graph_communicates(CUgraphExec exec)
{
    return atomic_load_explicit(graph_place((uintptr_t)exec), memory_order_relaxed) == ((uintptr_t)exec | 1);
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
    if (atomic_load(&dev->high_busy) || atomic_load(&rg.segment->settings.hold))
        syscall(SYS_futex, &dev->wake, FUTEX_WAIT, before, &limit, NULL, 0);
    atomic_fetch_sub(&dev->waiters, 1);
}

void rg_gate_wait(rg_track *t, enum rg_verdict verdict)
{
    /* Launches that may still go out in this starvation period; shared by the client's threads. */
    static _Atomic uint32_t credit;
    rg_device *dev = &rg.segment->devices[t->device];
    rg_settings *s = &rg.segment->settings;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (rg_real.cuThreadExchangeStreamCaptureMode)
        rg_real.cuThreadExchangeStreamCaptureMode(&mode);
    uint64_t now = rg_now_ns();
    uint64_t since = now;      /* this kind of wait began, or last saw progress */
    uint64_t spin_until = 0;
    naps napped = {0};
    uint64_t spent_ns[2] = {0, 0}; /* waiting for high clients; waiting for our own launches */
    while (verdict == RG_WAIT_HIGH || verdict == RG_WAIT_INFLIGHT) {
        /* Somebody began a capture, or this process left Rigel: nothing of ours may stand in the way any more. */
        if (atomic_load(&rg.captures) || atomic_load(&rg.mode) != RG_MODE_BEST_EFFORT)
            break;
        if (!spin_until) {
            spin_until = now + (uint64_t)atomic_load_explicit(&s->spin_us, memory_order_relaxed) * 1000u;
            batches_flush();
        }
        bool own = verdict == RG_WAIT_INFLIGHT || (atomic_load_explicit(&s->corun, memory_order_relaxed) &&
                                                   atomic_load_explicit(&rg.inflight, memory_order_relaxed));
        bool progress = own && batches_poll();
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
    if (rg_real.cuThreadExchangeStreamCaptureMode)
        rg_real.cuThreadExchangeStreamCaptureMode(&mode);
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
