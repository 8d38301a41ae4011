/*
 * stay.c: keeps the GPU with a high client's process for a moment after a request, where the next one often follows at once.
 *
 * Where processes have the GPU in time slices, one that was interrupted is back as soon as the GPU has nothing more to begin for the other, and a request
 * that follows 30 us later waits for two exchanges of processes and the slice between them, some 320 us (an H200). A kernel that runs on is no
 * use against that by itself: once the GPU has fetched all that was launched the other process is next, and what is launched from then on comes after it. With
 * one more kernel behind it, which the GPU has yet to begin, it is not, and the next request takes what it takes alone (native/bench/follow.cu,
 * docs/experiments.md).
 *
 * So, as a program begins to wait for a request that is the GPU's, two kernels go out on a stream of Rigel's in the program's context, behind an event in
 * the program's: `rigel_stay`, one thread that looks at two words of the host's memory until the next request has begun, or its time is over; and
 * `rigel_behind`, which does nothing. That it has begun takes both words: all that it consists of is queued, as the host says once the program waits for
 * it, and what is before its first launch in that stream, such as its input, is done, as the stream says by itself (cuStreamWriteValue32). The first of
 * several graphs is not enough: where the GPU has fetched that before the next is queued, it leaves (decoding: docs/experiments.md). The calls for it are
 * made while the program waits anyway, but for that one. `rigel_stay` keeps a block that takes all of a multiprocessor off one of them, so it is there for
 * no longer than that.
 *
 * Where the GPU is with another process as a request begins, it takes 137 us to come over (native/bench/switch.cu), and does not begin to while nothing
 * but an input is copied. So in front of one that takes as long as the calls, the same two kernels go out: the GPU comes over meanwhile, and stays. So they do
 * in front of a request of several launches, which the GPU would leave between two of them for the same reason as after it. And so they do before a request
 * that its program says is coming (rigel_request_coming), or that is seen coming (arrivals.c), with best-effort streams stopped for as long.
 *
 * Not where there is nothing to keep the GPU from, with which it costs: while such a kernel is about and no other process has work, what a graph has
 * in it takes longer: a request of GPT-2 decoding 6.8 to 7.0 ms in place of 6.5 (docs/experiments.md). So not in a hold, which is to tell what requests take
 * alone, nor beside best-effort clients that are paused or do nothing.
 *
 * Not while something is captured or recorded, nor where another high client shares the GPU. What waits for all of a context (cuCtxSynchronize, cuMemFree)
 * ends it first; what else does so in the driver, and has no hook (cuMemFreeHost), waits for its end.
 */
#include "record-client.h"

/* What requests have to keep the GPU busy for: four calls of the driver are made meanwhile. */
#define LEAST_WAIT_NS 300000u
/* The least input that the GPU comes over ahead of: for two calls, some 10 us, and at 48 GB a second from pinned memory this takes as long. And the most:
 * longer than it stays. */
#define LEAST_INPUT (512u << 10)
#define MOST_INPUT (8u << 20)
/* What the GPU takes to come over from another process (native/bench/switch.cu). */
#define COMES_NS 137000u
/* Best-effort clients that have launched nothing for so long, and whose threads are in no call, have no work. */
#define LATELY_NS 1000000000u
/* For how much longer the GPU stays once the next request has begun: for its input, and until all of it is queued. */
#define MORE_NS 1000000u
/* What the host says: nothing more has come; something has, and more may follow; all is queued; there is nothing to stay for. The GPU: queued, but not begun
 * in time. */
enum { ALONE, COMING, LAUNCHED, OVER, LATE };
/* So often one after the other: what stays is in its way (streams that share a queue: CUDA_DEVICE_MAX_CONNECTIONS), or its input takes too long. */
enum { LATES = 2 };
/* In front of a request that has begun; or of one that is said to be coming; else behind one: as enum rg_stayed. */
enum { AHEAD, ANNOUNCED, BEHIND, REASONS = BEHIND };
/* What the stream says, in the first of a pair of words. One has begun before the last but one is over. */
enum { BEGINS = 1, PAIRS = 8 };

static const char image[] =
    ".version 6.0\n.target sm_50\n.address_size 64\n"
    ".visible .entry rigel_stay(.param .u64 words, .param .u32 ns, .param .u32 more_ns)\n"
    "{\n"
    "    .reg .pred %p<3>;\n    .reg .b32 %r<2>;\n    .reg .b64 %l<4>;\n"
    "    ld.param.u64 %l0, [words];\n    ld.param.u32 %r0, [ns];\n    ld.param.u32 %r1, [more_ns];\n"
    "    mov.u64 %l1, %globaltimer;\n    cvt.u64.u32 %l2, %r0;\n    add.u64 %l1, %l1, %l2;\n"
    "    cvt.u64.u32 %l2, %r1;\n    add.u64 %l2, %l1, %l2;\n"
    "again:\n"
    "    ld.volatile.v2.u32 {%r0, %r1}, [%l0];\n    mov.u64 %l3, %globaltimer;\n"
    "    setp.eq.u32 %p0, %r1, 0;\n    setp.lt.and.u64 %p1, %l3, %l1, %p0;\n    @%p1 bra again;\n" /* ALONE */
    "    setp.eq.u32 %p0, %r1, 1;\n    setp.lt.and.u64 %p1, %l3, %l2, %p0;\n    @%p1 bra again;\n" /* COMING */
    "    setp.eq.u32 %p0, %r1, 2;\n    setp.lt.and.u64 %p1, %l3, %l2, %p0;\n    setp.eq.and.u32 %p2, %r0, 0, %p1;\n    @%p2 bra again;\n" /* LAUNCHED */
    "    setp.eq.and.u32 %p2, %r0, 0, %p0;\n    @%p2 st.volatile.u32 [%l0+4], 4;\n" /* LATE */
    "    ret;\n}\n"
    ".visible .entry rigel_behind()\n{\n    ret;\n}\n";

static struct {
    _Atomic(CUcontext) context; /* where all of this is; NULL: nowhere, for now */
    _Atomic(CUcontext) wanted;  /* where it would be of use */
    _Atomic bool allowed, refused, announces; /* the last: its program says that requests are coming, wherever its streams are */
    _Atomic uint32_t taken; /* a thread is at it, or the agent: never waited for */
    CUstream stream;
    CUevent event;
    CUfunction stay, behind;
    CUdeviceptr at;        /* a page that stays, for good: a pair of words for each stay, in turn; */
    _Atomic uint32_t *page;
    _Atomic uint32_t pair; /* that of the last one */
    uint32_t lates;        /* one after the other */
    uint64_t seen_ns;      /* when the busy period began whose pause was noted last */
    uint64_t since_ns;     /* since when the process has had the GPU by that */
    _Atomic bool followed; /* the last one was still there as the next request was launched */
    _Atomic uint32_t why;  /* why the last one went out */
    _Atomic uint64_t until_ns; /* until when a request is waited for that has been said to be coming since, or was by that; 0: none has */
    _Atomic uint32_t seen_us; /* that was not said, but is seen coming, and waited for so long (arrivals.c, where it is learned what comes to nothing) */
    rg_member *_Atomic of; /* whose the last one is, */
    _Atomic uint64_t began_ns; /* and since when it is there; 0: behind what is not done, as far as is known */
    _Atomic uint32_t in_vain[REASONS], skip[REASONS]; /* so many, one after the other, had no launch to stay for; so many more times there is none */
    uint64_t short_pauses; /* a bit per pause between two of them: it was short; the last one is the lowest */
} stays[RG_MAX_DEVICES];

static bool take(uint32_t device)
{
    uint32_t free = 0;
    return atomic_compare_exchange_strong(&stays[device].taken, &free, 1);
}

static void give(uint32_t device)
{
    atomic_store(&stays[device].taken, 0);
}

/* ---- the agent's part ---- */

/* In the current context. A page of its own each time: that of a context that is gone may be registered still. */
static bool make(uint32_t device)
{
    CUmodule module;
    int least = 0, greatest = 0;
    void *page = rg_stops_new_page();
    rg_real.cuCtxGetStreamPriorityRange(&least, &greatest);
    if (rg_real.cuModuleLoadData(&module, image) != CUDA_SUCCESS ||
        rg_real.cuModuleGetFunction(&stays[device].stay, module, "rigel_stay") != CUDA_SUCCESS ||
        rg_real.cuModuleGetFunction(&stays[device].behind, module, "rigel_behind") != CUDA_SUCCESS ||
        RG_REAL(cuEventCreate)(&stays[device].event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS ||
        rg_stops_register(page, &stays[device].at) != CUDA_SUCCESS ||
        RG_REAL(cuStreamCreateWithPriority)(&stays[device].stream, CU_STREAM_NON_BLOCKING, least) != CUDA_SUCCESS)
        return false; /* what was made goes with the context */
    stays[device].page = page;
    stays[device].lates = 0;
    return true;
}

/* Whether a thread of that client is in a call of the driver: it waits for what it has launched, or to launch more. */
static bool is_in_a_call(int slot)
{
    for (int k = 0; k < RG_MAX_THREADS; k++) {
        uint32_t doing = atomic_load_explicit(&rg.segment->threads[slot * RG_MAX_THREADS + k].doing, memory_order_relaxed);
        if (doing & RG_DOING && doing != (RG_OP_suspended | RG_DOING))
            return true;
    }
    return false;
}

/* Whether a best-effort client has work there, as far as is known, that the GPU would go to. */
static bool has_somebody_beside(uint32_t device)
{
    static struct {
        uint64_t progress, at_ns;
    } seen[RG_MAX_CLIENTS];
    bool has = false;
    uint64_t now = rg_now_ns(), off = rg_slots_until(rg_account_until);
    for (int i = 0; i < RG_MAX_CLIENTS; i++) {
        rg_client *c = &rg.segment->clients[i];
        if (atomic_load(&c->state) != RG_LIVE || atomic_load(&c->class) == RG_CLASS_HIGH || !(atomic_load(&c->devices) >> device & 1) ||
            off >> i & 1)
            continue;
        uint64_t progress = rg_progress(c);
        if (progress != seen[i].progress || is_in_a_call(i))
            seen[i].at_ns = now;
        seen[i].progress = progress;
        has |= rg_since(seen[i].at_ns, now) < LATELY_NS;
    }
    return has;
}

uint32_t rg_stay_allowed(void)
{
    uint32_t devices = 0;
    for (uint32_t i = 0; i < RG_MAX_DEVICES; i++)
        devices |= (uint32_t)atomic_load(&stays[i].allowed) << i;
    return devices;
}

void rg_stay_beat(uint32_t device, bool allowed)
{
    enum { TRIES = 8 }; /* contexts, one after the other */
    static uint32_t tries;
    bool several;
    CUcontext wanted = atomic_load(&stays[device].wanted), popped;
    allowed = allowed && has_somebody_beside(device);
    atomic_store(&stays[device].allowed, allowed);
    bool useful = wanted || atomic_load(&stays[device].announces);
    if (!allowed || !useful || atomic_load(&stays[device].context) || atomic_load(&stays[device].refused) || atomic_load(&rg.captures) ||
        !rg_real.cuModuleLoadData || !rg_real.cuModuleGetFunction || !rg_real.cuMemHostRegister_v2 || !rg_real.cuMemHostGetDevicePointer_v2 ||
        !rg_real.cuCtxGetStreamPriorityRange || !rg_agent_enter())
        return;
    CUcontext there = rg_stops_context(device, &several); /* what is wanted may have gone just before */
    wanted = wanted ? wanted : there;
    if (wanted && wanted == there && take(device)) {
        bool ok = rg_real.cuCtxPushCurrent_v2(wanted) == CUDA_SUCCESS;
        if (ok) {
            ok = make(device);
            rg_real.cuCtxPopCurrent_v2(&popped);
        }
        atomic_store(&stays[device].context, ok ? wanted : NULL);
        atomic_store(&stays[device].refused, !ok || ++tries >= TRIES);
        give(device);
    }
    pthread_mutex_unlock(&rg_agent_lock);
}

void rg_stay_forget_context(CUcontext context, CUdevice d)
{
    for (uint32_t i = 0; i < RG_MAX_DEVICES; i++) {
        CUcontext now = atomic_load(&stays[i].context);
        if (now && (context ? now == context : atomic_load(&rg.ordinal[i]) == d)) {
            atomic_store(&stays[i].context, NULL);
            rg_stay_ends();
        }
        if (context ? atomic_load(&stays[i].wanted) == context : atomic_load(&rg.ordinal[i]) == d)
            atomic_store(&stays[i].wanted, NULL);
    }
}

/* ---- the program's threads ---- */

/* How long the client's last request launched, and waited at its end; false: none is known. */
static bool last_request(const rg_client *c, uint32_t device, uint64_t *worked_ns, uint64_t *wait_ns)
{
    uint64_t n = atomic_load(&c->waited);
    uint64_t entry = n ? atomic_load_explicit(&c->waited_ring[(n - 1) % RG_WAITED], memory_order_relaxed) : 0;
    rg_waited_times(entry, worked_ns, wait_ns);
    return n && (entry & 15) == device;
}

/* Whether the client's requests are the GPU's, as the last one was. */
static bool are_the_gpus(const rg_member *m, uint32_t device)
{
    uint64_t worked_ns, wait_ns;
    return last_request(m->slot, device, &worked_ns, &wait_ns) && worked_ns < RG_STAY_LAUNCH_NS && wait_ns >= LEAST_WAIT_NS;
}

/*
 * Whether requests are the GPU's, and often follow one another, and the next one, if it is like the last, is over within the slice that this one has
 * begun: a slice that ends amid a request costs that as much, and the GPU that leaves in between begins another one. Under `taken`.
 */
static bool is_of_use(const rg_track *t, uint32_t device, uint64_t stay_ns)
{
    const rg_member *m = rg_track_member(t);
    const rg_share *share = rg_share_of(rg.segment, device, m->slot_index);
    uint64_t busy = atomic_load(&m->period[device].busy_since), now = rg_clock_ns(), worked_ns, wait_ns;
    uint64_t idle = atomic_load_explicit(&share->idle_ns, memory_order_relaxed);
    uint32_t slice_us = atomic_load_explicit(&share->slice_us, memory_order_relaxed);
    if (busy > stays[device].seen_ns) { /* of several clients in turn none is noted twice */
        stays[device].short_pauses = stays[device].short_pauses << 1 | (idle && rg_since(idle, busy) < RG_POLICY_SHORT_PAUSE_NS);
        stays[device].seen_ns = busy;
        if (!atomic_exchange(&stays[device].followed, false))
            stays[device].since_ns = busy;
    }
    slice_us = slice_us ? slice_us : atomic_load_explicit(&rg.segment->settings.high_slice_us, memory_order_relaxed);
    return rg_policy_follows(stays[device].short_pauses) && rg_since(busy, now) < RG_STAY_LAUNCH_NS &&
           last_request(m->slot, device, &worked_ns, &wait_ns) && wait_ns >= LEAST_WAIT_NS &&
           rg_since(stays[device].since_ns, now) + wait_ns + stay_ns + worked_ns + wait_ns <= slice_us * 1000ull;
}

/* The word of the last stay that the host writes; the one before it is the stream's. */
static _Atomic uint32_t *said(uint32_t device)
{
    return &stays[device].page[2 * atomic_load(&stays[device].pair) + 1];
}

static CUdeviceptr words_at(uint32_t device)
{
    return stays[device].at + 2 * sizeof(uint32_t) * atomic_load(&stays[device].pair);
}

/* Whether the GPU staying is in the way of the requests that follow; of the last but one, which is over, it is known. */
static bool is_in_the_way(uint32_t device)
{
    uint32_t last_but_one = (atomic_load(&stays[device].pair) + PAIRS - 1) % PAIRS;
    uint32_t is = atomic_load(&stays[device].page[2 * last_but_one + 1]);
    if (is == LATE)
        stays[device].lates++;
    else if (is == LAUNCHED)
        stays[device].lates = 0;
    return stays[device].lates >= LATES;
}

/*
 * No launch came. In front of a request: so many more have none, twice as many each time. Not so after one that was announced alone, as requests are that
 * the host is late with now and then.
 */
static void was_in_vain(uint32_t device, uint32_t why)
{
    enum { MOST = 10 };
    uint32_t n = atomic_fetch_add(&stays[device].in_vain[why], 1) + (why != ANNOUNCED);
    if (n)
        atomic_store(&stays[device].skip[why], 1u << (n < MOST ? n : MOST));
}

/* Whether this one is left out for that. Under `taken`. */
static bool is_skipped(uint32_t device, uint32_t why)
{
    return atomic_load(&stays[device].skip[why]) && atomic_fetch_sub(&stays[device].skip[why], 1);
}

/* The last one was. */
static void last_was_in_vain(uint32_t device)
{
    uint32_t seen_us = atomic_load(&stays[device].seen_us); /* before that goes: then another one may be said to be coming */
    if (atomic_exchange(&stays[device].until_ns, 0)) {
        if (!seen_us)
            was_in_vain(device, ANNOUNCED);
    } else if (atomic_load(&stays[device].why) == AHEAD) {
        was_in_vain(device, AHEAD);
    }
}

/* For how long it stays if nothing comes. */
static uint32_t stay_us(uint32_t why)
{
    uint32_t us = atomic_load_explicit(&rg.segment->settings.stay_us, memory_order_relaxed), times = why == ANNOUNCED ? RG_STAY_ANNOUNCED : 1;
    return us < UINT32_MAX / 1000 / times ? us * times : UINT32_MAX / 1000; /* nanoseconds have as many bits */
}

/* Whether the last one is still there. If not, that is noted. */
static bool is_there(uint32_t device, uint64_t now_ns)
{
    uint32_t bit = 1u << device;
    uint64_t began = atomic_load(&stays[device].began_ns); /* inputs that were waited for by themselves do not prolong it */
    uint64_t more_ns = atomic_load(said(device)) == COMING ? MORE_NS : 0;
    uint32_t why = atomic_load(&stays[device].why), seen_us = why == ANNOUNCED ? atomic_load(&stays[device].seen_us) : 0;
    if (!began || rg_since(began, now_ns) <= (seen_us ? seen_us : stay_us(why)) * 1000ull + more_ns)
        return true;
    if (atomic_fetch_and(&rg.stays, ~bit) & bit)
        last_was_in_vain(device);
    return false;
}

void rg_stay_all_launched(uint32_t device)
{
    uint32_t bit = 1u << device;
    if (!((atomic_load(&rg.stays) | atomic_load(&rg.stays_open)) & bit))
        return;
    _Atomic uint32_t *word = said(device); /* before the bit goes: then another thread may begin the next one */
    if (atomic_fetch_and(&rg.stays_open, ~bit) & bit) {
        atomic_store(word, LAUNCHED);
    } else if (atomic_load(&rg.stays) & bit) {
        uint32_t coming = COMING; /* an input that is waited for by itself; or another thread has ended it since */
        atomic_compare_exchange_strong(word, &coming, ALONE);
    }
}

void rg_stay_done(const rg_member *m, uint32_t device, uint64_t now_ns)
{
    uint64_t unknown = 0;
    rg_stay_all_launched(device);
    if (atomic_load(&rg.stays) >> device & 1 && atomic_load(&stays[device].of) == m)
        atomic_compare_exchange_strong(&stays[device].began_ns, &unknown, now_ns);
}

/* In the current context, `behind` what that stream has, or at once (NULL). Where one of the calls fails nothing stays, or with nothing behind it. */
static void launch(rg_member *m, uint32_t device, uint32_t why, const rg_track *behind, uint32_t us)
{
    rg_stay_all_launched(device); /* another thread's launch may have come before this one's input */
    if (is_in_the_way(device)) { /* not in this process any more */
        atomic_store(&stays[device].refused, true);
        atomic_store(&stays[device].context, NULL);
        return;
    }
    atomic_store(&stays[device].pair, (atomic_load(&stays[device].pair) + 1) % PAIRS);
    atomic_store(said(device) - 1, 0);
    atomic_store(said(device), why == AHEAD ? COMING : ALONE);
    atomic_store(&stays[device].why, why);
    if (why != ANNOUNCED)
        atomic_store(&stays[device].until_ns, 0);
    atomic_store(&stays[device].of, m);
    atomic_store(&stays[device].began_ns, behind ? 0 : rg_clock_ns() + COMES_NS);
    CUdeviceptr words = words_at(device);
    uint32_t ns = us * 1000, more_ns = MORE_NS;
    void *params[] = {&words, &ns, &more_ns};
    if ((behind && (RG_REAL(cuEventRecord)(stays[device].event, behind->stream) != CUDA_SUCCESS ||
                    rg_real.cuStreamWaitEvent(stays[device].stream, stays[device].event, 0) != CUDA_SUCCESS)) ||
        RG_REAL(cuLaunchKernel)(stays[device].stay, 1, 1, 1, 1, 1, 1, 0, stays[device].stream, params, NULL) != CUDA_SUCCESS)
        return;
    atomic_fetch_or(&rg.stays, 1u << device);
    atomic_fetch_add_explicit(behind ? &m->slot->stays : &m->slot->ahead, 1, memory_order_relaxed);
    RG_REAL(cuLaunchKernel)(stays[device].behind, 1, 1, 1, 1, 1, 1, 0, stays[device].stream, NULL, NULL);
}

/* In the context, while neither that nor the stream (NULL: none is needed) is taken away, and no capture begins. */
static void launch_in(CUcontext context, rg_member *m, uint32_t device, uint32_t why, const rg_track *t, uint32_t us)
{
    CUcontext current = NULL, popped;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (!rg_agent_enter())
        return;
    if (!atomic_load(&rg.captures) && (!t || atomic_load(&t->key)) && context == atomic_load(&stays[device].context)) {
        if (rg_real.cuThreadExchangeStreamCaptureMode)
            rg_real.cuThreadExchangeStreamCaptureMode(&mode);
        rg_real.cuCtxGetCurrent(&current);
        bool pushed = current != context && rg_real.cuCtxPushCurrent_v2(context) == CUDA_SUCCESS;
        if (pushed || current == context)
            launch(m, device, why, why == BEHIND ? t : NULL, us);
        if (pushed)
            rg_real.cuCtxPopCurrent_v2(&popped);
        if (rg_real.cuThreadExchangeStreamCaptureMode)
            rg_real.cuThreadExchangeStreamCaptureMode(&mode);
    }
    pthread_mutex_unlock(&rg_agent_lock);
}

static bool is_high(const rg_member *m)
{
    return atomic_load(&m->mode) & RG_MODE_HIGH;
}

/* Whether it is to stay where requests are such; `us`: for how long. */
static bool may_stay(const rg_member *m, uint32_t device, uint32_t *us)
{
    const rg_settings *s = &rg.segment->settings;
    *us = stay_us(BEHIND);
    return *us && atomic_load(&stays[device].allowed) && atomic_load(&rg.segment->stops[device].armed) && atomic_load(&s->suspend) &&
           rg_gives_way_at_once(s) && !rg_recorded && is_high(m) && !(atomic_load(&rg.stays) >> device & 1) &&
           !(atomic_load_explicit(&s->hold_until_ms, memory_order_relaxed) && rg_hold_left_ms(s, rg_now_ns()));
}

/* Whether it can there. Under `taken`. */
static bool can_stay(const rg_track *t, uint32_t device)
{
    CUcontext context = atomic_load(&stays[device].context);
    if (!context)
        atomic_store(&stays[device].wanted, t->context);
    return context && context == t->context && !t->owner && RG_REAL(cuLaunchKernel);
}

/*
 * Whether the request that has begun is of several launches, as most of its kind, and the GPU has gone since the one before: where it has not, one more
 * slice would go on, and end amid the next request.
 */
static bool is_in_parts(const rg_track *t, uint32_t device)
{
    const rg_member *m = rg_track_member(t);
    const rg_share *share = rg_share_of(rg.segment, device, m->slot_index);
    uint64_t busy = atomic_load(&m->period[device].busy_since), idle = atomic_load_explicit(&share->idle_ns, memory_order_relaxed);
    return atomic_load_explicit(&share->usual_launches, memory_order_relaxed) > 1 && rg_since(idle, busy) >= RG_POLICY_SHORT_PAUSE_NS;
}

void rg_stay_ahead(const rg_track *t, enum rg_kind kind, uint64_t units)
{
    uint32_t device = rg_track_device(t), us;
    bool copies = kind == RG_COPY, input = copies && units >= LEAST_INPUT && units <= MOST_INPUT;
    rg_member *m = rg_track_member(t);
    if (kind == RG_COPYWAIT || (copies && units > MOST_INPUT) || !may_stay(m, device, &us) || !(input || is_in_parts(t, device)) || !take(device))
        return;
    if (!is_skipped(device, AHEAD) && are_the_gpus(m, device) && can_stay(t, device))
        launch_in(t->context, m, device, AHEAD, t, us);
    give(device);
}

/*
 * Under `taken`; `seen_us`: for how long it is waited for, where it is seen; 0: where its program says so; `there`: the GPU is, behind a request or for
 * one that was announced. What cannot be launched, as while something is captured, was in vain as well: best-effort work stops for it all the same.
 */
static bool announced(rg_member *m, uint32_t device, uint32_t seen_us, bool there, uint64_t now_ns)
{
    CUcontext context = atomic_load(&stays[device].context);
    uint32_t us = seen_us ? seen_us : stay_us(ANNOUNCED);
    atomic_store(&stays[device].announces, true);
    if (there ? atomic_load(&stays[device].until_ns) != 0 : !context || !are_the_gpus(m, device) || !RG_REAL(cuLaunchKernel))
        return false; /* that is known already; or there is nothing to be done for it */
    if (is_skipped(device, ANNOUNCED))
        return false;
    uint64_t until_ns = now_ns + COMES_NS + us * 1000ull; /* it is there then, and for so long */
    atomic_store(&stays[device].seen_us, seen_us);
    atomic_store(&stays[device].until_ns, until_ns);
    rg_device_coming(rg.segment, device, until_ns);
    if (there)
        rg_stay_coming(device, now_ns);
    else
        launch_in(context, m, device, ANNOUNCED, NULL, us);
    bool stays_there = atomic_load(&rg.stays) >> device & 1;
    if (!stays_there && atomic_exchange(&stays[device].until_ns, 0) && !there) /* else it has been launched, or ended, just now */
        was_in_vain(device, ANNOUNCED);
    return stays_there;
}

static bool is_coming(rg_member *m, uint32_t device, uint32_t seen_us)
{
    uint64_t now = rg_clock_ns();
    uint32_t us;
    if (!atomic_load(&stays[device].allowed) || atomic_load(&m->busy[device]))
        return false;
    bool there = atomic_load(&rg.stays) >> device & 1 && is_there(device, now);
    if (!(there ? is_high(m) : may_stay(m, device, &us)) || !take(device))
        return false;
    bool any = announced(m, device, seen_us, there, now);
    give(device);
    return any;
}

void rg_stay_announced(rg_member *m, uint32_t devices)
{
    for (devices &= atomic_load(&m->slot->devices); devices; devices &= devices - 1)
        is_coming(m, (uint32_t)__builtin_ctz(devices), 0);
}

bool rg_stay_seen(rg_member *m, uint32_t device, uint32_t wait_us)
{
    return atomic_load(&m->slot->devices) >> device & 1 && is_coming(m, device, wait_us);
}

void rg_stay_follows(const rg_member *m, uint32_t device, uint32_t after_us)
{
    uint64_t worked_ns, wait_ns;
    uint32_t us;
    if (may_stay(m, device, &us) && are_the_gpus(m, device) && last_request(m->slot, device, &worked_ns, &wait_ns) &&
        !atomic_load(&stays[device].skip[ANNOUNCED]))
        rg_device_coming(rg.segment, device, atomic_load(&m->period[device].busy_since) + worked_ns + wait_ns + after_us * 1000ull);
}

void rg_stay_begin(const rg_track *t)
{
    if (!t)
        return;
    uint32_t device = rg_track_device(t), us;
    rg_member *m = rg_track_member(t);
    if (is_high(m))
        rg_stay_all_launched(device);
    if (!may_stay(m, device, &us) /* or it is a second wait for the same */ || !take(device))
        return;
    if (is_of_use(t, device, us * 1000ull) && can_stay(t, device))
        launch_in(t->context, m, device, BEHIND, t, us);
    give(device);
}

void rg_stay_coming(uint32_t device, uint64_t now_ns)
{
    if (atomic_load(&rg.stays) >> device & 1 && is_there(device, now_ns) && atomic_load(said(device)) == ALONE)
        atomic_store(said(device), COMING);
}

void rg_stay_launches(const rg_track *t)
{
    if (!t)
        rg_stay_ends();
    uint32_t device = t ? rg_track_device(t) : 0, bit = 1u << device;
    /* Of one device, by one thread; another client's launch is no request. */
    if (!t || !is_high(rg_track_member(t)) || !(atomic_fetch_and(&rg.stays, ~bit) & bit))
        return;
    uint32_t why = atomic_load(&stays[device].why);
    uint64_t until_ns = atomic_exchange(&stays[device].until_ns, 0);
    if (why == BEHIND)
        atomic_store(&stays[device].followed, true);
    uint32_t not = RG_STAYED_NOT;
    atomic_compare_exchange_strong(&rg_track_member(t)->period[device].stayed, &not, until_ns ? RG_STAYED_ANNOUNCED : RG_STAYED_AHEAD + why);
    if (until_ns)
        rg_device_came(rg.segment, device, until_ns);
    if (until_ns || why == AHEAD)
        atomic_store(&stays[device].in_vain[until_ns ? ANNOUNCED : AHEAD], 0);
    _Atomic uint32_t *word = said(device);
    CUdeviceptr words = words_at(device);
    atomic_store(word, COMING);
    atomic_fetch_or(&rg.stays_open, bit); /* before the call, during which another thread may wait */
    bool told = !t->owner && t->context == atomic_load(&stays[device].context) && rg_real.cuStreamWriteValue32_v2 &&
                rg_real.cuStreamWriteValue32_v2(t->stream, words, BEGINS, CU_STREAM_WRITE_VALUE_DEFAULT) == CUDA_SUCCESS;
    if (!told) /* then it is over once all is queued */
        atomic_store(word - 1, BEGINS);
}

void rg_stay_ends(void)
{
    uint32_t without = atomic_exchange(&rg.stays, 0);
    for (uint32_t devices = without | atomic_exchange(&rg.stays_open, 0); devices; devices &= devices - 1) {
        uint32_t device = (uint32_t)__builtin_ctz(devices);
        atomic_store(said(device), OVER);
        if (without >> device & 1)
            last_was_in_vain(device);
    }
}
