/*
 * stop.c: stops in best-effort streams: what keeps a client off the GPU between two kernels, whether the driver lets it control channels of
 * its own (preempt.c) or not (MPS).
 *
 * A stop is a wait of the stream for a word in host memory (cuStreamWaitValue32), put in front of a kernel once `stop_us` of work have been
 * launched since the last one. The GPU looks at the word by itself: while it says so nothing behind a stop begins, and what runs goes on to
 * its end; when it says so no more the stream goes on. Either takes one store, and no call. The word is in the segment, so that a high client
 * that begins to launch stops all that are armed by itself (rg_stop_best_effort), before any thread here is awake. Launches queue up on the GPU
 * as they do without Rigel, where the gate holds them in the program, a few at a time: to fill the GPU again after each request takes the
 * program a while.
 * On an H200 under MPS a stop costs the program 1 to 2 us and the GPU 3; beside kernels of 300 us 20 short ones take 187 us with stops, 546 without
 * and 144 alone (p50s; native/bench/preempt.cu). Without MPS, beside kernels of 73 us, it is 241 us with stops, 291 with slices of 50 us, and 108 to
 * 120 alone: one that has to interrupt a kernel is there later. From a process that has stopped, or has nothing to do, it takes 137 us
 * (native/bench/switch.cu).
 *
 * What lasts for RG_POLICY_LONG_NS no stop ends soon, and may have to be interrupted (preempt.c). When that runs the GPU tells by itself: the stream
 * writes a word of its own in front of it and one behind it (cuStreamWriteValue32). Beside GPT-2's training 12 to 30 in 110 of BERT's requests, of
 * 3.5 ms, come upon such a kernel, and to suspend it for the others, too, cost each of them 0.2 ms (an H100; docs/experiments.md).
 *
 * All stops on a device are in streams of one context, in which the word's page is registered: with that context the registration goes,
 * and what waits for the word in another one would fault. A process with two contexts on a device has none. Where the segment's page cannot be
 * registered a page of the process's own takes its place, and only its own thread stops it.
 */
#include "client.h"

#include <string.h>
#include <sys/mman.h>

enum { PAGE_BYTES = 4096, UNKNOWN_NS = 100000 /* what a kernel is taken to last before it is known */ };
enum { LATELY_NS = 1000000000 };
_Static_assert(RG_MAX_TRACKS * sizeof(uint32_t) <= PAGE_BYTES, "a word for each");
_Static_assert(sizeof(rg_stop_page) == PAGE_BYTES && offsetof(rg_segment, stops) % PAGE_BYTES == 0, "the driver registers pages");

static struct {
    _Atomic(CUcontext) context; /* NULL: no stops, for now */
    CUdeviceptr at;
    _Atomic(_Atomic uint64_t *) word; /* in a page that stays, for good: whoever is about to write it may be late */
    _Atomic bool refused;
    uint32_t pages; /* that were given up; agent thread only */
    /* Of each track whether the GPU is at work on what lasts for RG_POLICY_LONG_NS, as it tells by itself. NULL: it does not, */
    _Atomic(_Atomic uint32_t *) long_words;
    CUdeviceptr long_at;
    _Atomic uint64_t long_until_ns; /* and this is when all of that, of what was launched so far, is over at the earliest */
    _Atomic uint32_t *long_page; /* agent thread only */
} stops[RG_MAX_DEVICES];

CUcontext rg_stops_context(uint32_t device, bool *several)
{
    CUcontext only = NULL;
    *several = false;
    for (uint32_t i = 0; i < atomic_load(&rg.track_count); i++) {
        const rg_track *t = &rg.tracks[i];
        CUcontext context = atomic_load(&t->key) && rg_track_device(t) == device ? atomic_load(&t->context) : NULL;
        *several |= context && only && context != only;
        only = context ? context : only;
    }
    return *several ? NULL : only;
}

void *rg_stops_new_page(void)
{
    void *page = mmap(NULL, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return page == MAP_FAILED ? NULL : page;
}

/* The word is in the segment's page, and not in one of the process's own. */
static bool is_shared(uint32_t device, const _Atomic uint64_t *word)
{
    return (uintptr_t)word - (uintptr_t)&rg.segment->stops[device] < PAGE_BYTES;
}

CUresult rg_stops_register(void *page, CUdeviceptr *at)
{
    CUresult r = page ? rg_real.cuMemHostRegister_v2(page, PAGE_BYTES, CU_MEMHOSTREGISTER_DEVICEMAP) : CUDA_ERROR_OUT_OF_MEMORY;
    return r != CUDA_SUCCESS ? r : rg_real.cuMemHostGetDevicePointer_v2(at, page, 0);
}

static CUresult register_word(uint32_t device, _Atomic uint64_t *word)
{
    void *page = (void *)((uintptr_t)word & ~(uintptr_t)(PAGE_BYTES - 1));
    CUresult r = rg_stops_register(page, &stops[device].at);
    if (r == CUDA_SUCCESS) {
        stops[device].at += (uintptr_t)word - (uintptr_t)page;
        atomic_store(word, RG_STOP_FREE);
        atomic_store(&stops[device].word, word);
    }
    return r;
}

/* Where the GPU tells of long work in this context: not where the page is registered still, of a context that was taken for gone. */
static void register_long(uint32_t device)
{
    void *page = stops[device].long_page = stops[device].long_page ? stops[device].long_page : rg_stops_new_page();
    if (!rg_real.cuStreamWriteValue32_v2 || rg_stops_register(page, &stops[device].long_at) != CUDA_SUCCESS)
        return;
    memset(page, 0, PAGE_BYTES);
    atomic_store(&stops[device].long_words, page);
}

/*
 * Agent thread only, whose capture mode is relaxed. The caller holds rg_agent_lock: the context stays. Where the page is registered still, of
 * a context that was taken for gone, another one takes its place; the word in it stays RG_STOP_FREE from then on.
 */
static void enter(uint32_t device, CUcontext context)
{
    enum { PAGES = 64 };
    CUcontext popped;
    if (rg_real.cuCtxPushCurrent_v2(context) != CUDA_SUCCESS)
        return;
    _Atomic uint64_t *word = atomic_load(&stops[device].word);
    CUresult r = register_word(device, word ? word : &rg.segment->stops[device].word[rg.slot_index]);
    bool own = !word || r == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    if (r != CUDA_SUCCESS && own && ++stops[device].pages < PAGES)
        r = register_word(device, rg_stops_new_page());
    if (r == CUDA_SUCCESS)
        register_long(device);
    rg_real.cuCtxPopCurrent_v2(&popped);
    if (r == CUDA_SUCCESS)
        atomic_store(&stops[device].context, context);
    else if (r == CUDA_ERROR_NOT_SUPPORTED || r == CUDA_ERROR_NOT_PERMITTED || r == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
        atomic_store(&stops[device].refused, true);
}

enum rg_stops rg_stops_ready(uint32_t device)
{
    bool several;
    CUcontext context = rg_stops_context(device, &several), now = atomic_load(&stops[device].context);
    if (atomic_load(&stops[device].refused) || several || !atomic_load(&rg.segment->settings.stop_us) || !rg_real.cuStreamWaitValue32_v2 ||
        !rg_real.cuMemHostRegister_v2 || !rg_real.cuMemHostGetDevicePointer_v2)
        return RG_STOPS_NONE;
    if (now && (!context || context == now))
        return RG_STOPS_READY;
    if (!context || now || atomic_load(&rg.captures) || !rg_agent_enter())
        return RG_STOPS_LATER;
    /* It may have gone just before. */
    if (rg_stops_context(device, &several) == context)
        enter(device, context);
    pthread_mutex_unlock(&rg_agent_lock);
    return atomic_load(&stops[device].context) ? RG_STOPS_READY : RG_STOPS_LATER;
}

static bool is_armed(uint32_t device)
{
    return atomic_load(&rg.segment->stops[device].armed) >> rg.slot_index & 1;
}

/* The word, and what the simulated GPU looks at in its place. */
static void write_word(uint32_t device, _Atomic uint64_t *word, bool stopped, bool tell)
{
    bool armed = !stopped && is_armed(device);
    uint64_t free = RG_STOP_FREE;
    atomic_store(word, stopped ? RG_STOP_STOPPED : armed ? RG_STOP_ARMED : RG_STOP_FREE);
    if (armed && !is_armed(device)) /* disarmed since (rg_stop_arm), by the agent; or armed */
        atomic_store(word, RG_STOP_FREE);
    else if (!stopped && !armed && is_armed(device))
        atomic_compare_exchange_strong(word, &free, RG_STOP_ARMED);
    if (tell && rg_real.rigelSimStop)
        rg_real.rigelSimStop((unsigned)atomic_load(&rg.ordinal[device]), stopped);
}

void rg_stops_forget_context(CUcontext context, CUdevice d)
{
    for (uint32_t i = 0; i < RG_MAX_DEVICES; i++) {
        CUcontext now = atomic_load(&stops[i].context);
        if (!now || (context ? now != context : atomic_load(&rg.ordinal[i]) != d))
            continue;
        _Atomic uint64_t *word = atomic_load(&stops[i].word); /* once there is no context it may be another's */
        atomic_store(&stops[i].context, NULL);
        atomic_store(&stops[i].long_words, NULL);
        rg_stops_arm(i, false);
        write_word(i, word, false, true); /* nothing waits for the word when its page goes */
        atomic_store(&rg.preemptible[i], RG_NOT_PREEMPTIBLE); /* until there are some again */
    }
}

bool rg_stops_there(uint32_t device)
{
    return atomic_load(&stops[device].context) != NULL;
}

void rg_stops_arm(uint32_t device, bool armed)
{
    bool can = rg_stops_there(device) && is_shared(device, atomic_load(&stops[device].word));
    if (armed && can && !is_armed(device))
        rg_stop_arm(rg.segment, device, rg.slot_index, true);
    /* Or another thread has ended the context since. */
    if (is_armed(device) && !(armed && rg_stops_there(device)))
        rg_stop_arm(rg.segment, device, rg.slot_index, false);
}

bool rg_stops_taken(uint32_t device)
{
    _Atomic uint64_t *word = atomic_load(&stops[device].word);
    return word && atomic_load(word) == RG_STOP_STOPPED;
}

bool rg_stops_long(uint32_t device)
{
    const _Atomic uint32_t *long_words = atomic_load(&stops[device].long_words);
    if (long_words && rg_real.rigelSimWrites)
        rg_real.rigelSimWrites((unsigned)atomic_load(&rg.ordinal[device]));
    for (uint32_t i = 0; long_words && i < atomic_load(&rg.track_count); i++)
        if (atomic_load_explicit(&long_words[i], memory_order_relaxed))
            return true;
    uint64_t until = atomic_load(&stops[device].long_until_ns);
    return until && rg_now_ns() < until + LATELY_NS;
}

/* One of several that say so at once may be lost: then it is over sooner. */
static void launches_long(uint32_t device, uint64_t ns)
{
    uint64_t until = atomic_load_explicit(&stops[device].long_until_ns, memory_order_relaxed), now = rg_now_ns();
    atomic_store_explicit(&stops[device].long_until_ns, (until > now ? until : now) + ns, memory_order_relaxed);
}

void rg_stops_began(uint32_t device)
{
    launches_long(device, RG_POLICY_LONG_NS);
}

bool rg_stops_set(uint32_t device, bool stopped, bool tell)
{
    _Atomic uint64_t *word = atomic_load(&stops[device].word);
    if (!word || (stopped && !rg_stops_there(device)))
        return false;
    write_word(device, word, stopped, tell);
    if (!stopped || (rg_stops_there(device) && atomic_load(&stops[device].word) == word))
        return true;
    /* Who ends the context may have written before this did. Pairs with rg_stops_forget_context and enter: the context, then the word. */
    write_word(device, word, false, tell);
    return false;
}

static bool is_capture_error(CUresult r) /* there is one somewhere, now */
{
    return r >= CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED && r <= CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
}

/*
 * Has the GPU tell whether it is at work on something long of this track. False: it cannot. Of two threads that launch into one stream, or a
 * stream that has the place of one that was just destroyed, it may say no for as long as one such kernel takes.
 */
static bool tell_long(const rg_track *t, uint32_t device, uint32_t is)
{
    if (!atomic_load(&stops[device].long_words) || atomic_load(&t->context) != atomic_load(&stops[device].context))
        return false;
    CUdeviceptr at = stops[device].long_at + sizeof(uint32_t) * (size_t)(t - rg.tracks);
    CUresult r = rg_real.cuStreamWriteValue32_v2(t->stream, at, is, CU_STREAM_WRITE_VALUE_DEFAULT);
    if (r != CUDA_SUCCESS && (!is || !is_capture_error(r)))
        atomic_store(&stops[device].long_words, NULL); /* what it says would never change again */
    return r == CUDA_SUCCESS;
}

int rg_stop_before(rg_track *t, enum rg_kind kind, uintptr_t units, rg_dims dims)
{
    uint32_t device = rg_track_device(t);
    rg_duration *d = rg_duration_of(rg_duration_key(units, dims));
    uint32_t seen = rg_duration_launched(d, t, kind, units, dims); /* first: what follows goes by what is known of it */
    uint32_t known = atomic_load_explicit(&d->duration_ns, memory_order_relaxed);
    uint64_t ns = known ? known : UNKNOWN_NS, most = (uint64_t)atomic_load_explicit(&rg.segment->settings.stop_us, memory_order_relaxed) * 1000;
    uint64_t sum = atomic_load_explicit(&t->since_stop_ns, memory_order_relaxed) + ns;
    /* Who communicates waits for others, who may be in front of no stop. */
    bool communicates = atomic_load_explicit(&d->communicates, memory_order_relaxed);
    bool is_long = ns >= RG_POLICY_LONG_NS || communicates || (kind == RG_GRAPH && !known), told = false;
    is_long &= atomic_load_explicit(&rg.preemptible[device], memory_order_relaxed) != RG_STOPPABLE; /* nothing else to interrupt it with */
    if (sum > most && !communicates && atomic_load(&t->context) == atomic_load(&stops[device].context)) {
        CUresult r = rg_real.cuStreamWaitValue32_v2(t->stream, stops[device].at, RG_STOP_ARMED, CU_STREAM_WAIT_VALUE_GEQ);
        if (r == CUDA_ERROR_NOT_SUPPORTED || r == CUDA_ERROR_NOT_PERMITTED)
            atomic_store(&stops[device].refused, true);
        if (r != CUDA_SUCCESS && !is_capture_error(r))
            rg_stops_forget_context(t->context, -1); /* the gate holds it, until the agent has registered the page anew */
        /* Without a stop in front of it, it might begin when nobody asks any more (suspends_too in preempt.c). */
        told = RG_UNLIKELY(is_long) && r == CUDA_SUCCESS && tell_long(t, device, 1);
        sum = ns;
    }
    atomic_store_explicit(&t->since_stop_ns, sum < UINT32_MAX ? (uint32_t)sum : UINT32_MAX, memory_order_relaxed);
    if (RG_UNLIKELY(is_long) && !told)
        launches_long(device, ns);
    int sample = rg_sample_stopped(t, d, seen);
    return RG_LIKELY(!told) ? sample : RG_STOP_LONG | (sample < 0 ? RG_STOP_NO_SAMPLE : sample);
}

void rg_stop_after(int what, rg_track *t, bool ok)
{
    int sample = what & RG_STOP_NO_SAMPLE;
    if (sample != RG_STOP_NO_SAMPLE)
        rg_sample_end(sample, t, ok);
    if ((what & RG_STOP_LONG) && !tell_long(t, rg_track_device(t), 0))
        launches_long(rg_track_device(t), RG_POLICY_LONG_NS);
}
