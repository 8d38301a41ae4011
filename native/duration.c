/*
 * duration.c: learns how long a best-effort client's kernels take, by timing a few of them.
 *
 * A sample is a pair of timing events round one launch (0.78 us each to record, measured on an H200): the first
 * RG_SAMPLE_FIRST launches of a kernel of one function, grid and block, then one in RG_SAMPLE_EVERY. What lies between
 * the events also holds whatever delayed the kernel, so the estimate falls at once to a shorter sample and rises slowly.
 * A kernel that is new to this process starts with what the segment knows of it (estimate.h): from other clients of the same
 * program, from an earlier run, or from a profile. What this process then uses is learned by it alone, as two functions may
 * have one name; its samples go to the segment too.
 * Samples are taken in by whoever polls the gate's batches, in a client that passes no gate by who takes the next one; a sample is
 * owned by whoever moved its state, so nothing locks.
 *
 * Must never: wait for an event. Used in relaxed capture mode only (rg_gate_wait), but for recording.
 */
#include "client.h"

#include <stdlib.h>

rg_duration rg_durations[RG_DURATIONS];
_Atomic uint32_t rg_charged[RG_MAX_CLIENTS - 1][RG_DURATIONS];

enum { SAMPLE_FREE = 0, SAMPLE_BUSY, SAMPLE_RECORDED };
enum { SAMPLES = 16, POLL_NS = 1000000 };

static struct {
    _Atomic uint32_t state;
    uint32_t shared; /* as in rg_duration; it stays with the kernel, whatever becomes of that entry */
    _Atomic(CUcontext) context; /* that the events belong to; this and the next are read by who does not own it, too (rg_samples_forget) */
    _Atomic CUdevice device;
    uint32_t index; /* of the device in the segment */
    CUevent start, stop;
    rg_duration *duration;
    rg_member *member;
    uint64_t key;
    uint64_t suspensions; /* of the process, when it began */
    bool stops;           /* that is by stops in its streams */
} samples[SAMPLES];

static void clear(rg_duration *d)
{
    atomic_store(&d->duration_ns, 0);
    atomic_store(&d->seen, 0);
    atomic_store(&d->samples, 0);
    atomic_store(&d->least_ns, 0);
    atomic_store(&d->price_ns, 0);
    atomic_store(&d->charged, 0);
    for (uint32_t k = 1; k < atomic_load(&rg.member_count); k++)
        atomic_store(rg_duration_charged(d, &rg.members[k]), 0);
    atomic_store(&d->kernel, 0);
    atomic_store(&d->shared, 0);
    atomic_store(&d->doubt, 0);
    atomic_store(&d->graph, false);
}

rg_duration *rg_duration_add(uint64_t key)
{
    rg_duration *d = NULL;
    for (uint32_t i = 0; i < RG_DURATION_PROBES; i++) {
        d = &rg_durations[((key >> 52) + i) % RG_DURATIONS];
        uint64_t found = 0;
        /* Another thread may have entered the same kernel a moment ago. */
        if (atomic_compare_exchange_strong(&d->key, &found, key) || found == key)
            return d;
    }
    /* Eight neighbours taken: the kernel whose own place this is makes room. */
    d = &rg_durations[(key >> 52) % RG_DURATIONS];
    clear(d);
    atomic_store(&d->key, key);
    return d;
}

void rg_duration_reset(uint64_t key, uint32_t ns)
{
    rg_duration *d = rg_duration_of(key);
    clear(d);
    atomic_store(&d->communicates, false);
    atomic_store(&d->doubt, ns ? RG_ESTIMATE_DOUBT : 0);
    atomic_store(&d->duration_ns, ns);
}

/* ---- what the segment knows ---- */

void rg_durations_attach(void)
{
    const char *given = getenv("RIGEL_PROGRAM");
    char *end = NULL;
    rg.program = given ? strtoull(given, &end, 16) : 0;
    if (!given || !*given || *end) /* started by hand: clients of one name are taken for one program */
        rg.program = rg_text_hash(rg.slot->name);
}

static uint32_t duration_of_key(const char *device, uint64_t kernel_hash, rg_dims dims)
{
    int at = rg_estimate_find(rg.segment, rg_estimate_key(rg.program, device, kernel_hash, dims));
    return at < 0 ? 0 : atomic_load(&rg.segment->estimates[at].duration_ns);
}

/* What a profile says of a kernel: by its name as it is or as people read it, of this shape or of any. */
static uint32_t duration_of_name(const char *device, const char *name, rg_dims dims)
{
    char *read = rg_demangled(name);
    uint32_t ns = read ? duration_of_key(device, rg_text_hash(read), dims) : 0;
    if (!ns)
        ns = duration_of_key(device, rg_text_hash(name), RG_DIMS_ANY);
    if (!ns && read)
        ns = duration_of_key(device, rg_text_hash(read), RG_DIMS_ANY);
    free(read);
    return ns;
}

uint32_t rg_duration_elsewhere(const rg_track *t, const char *name, rg_dims dims)
{
    const char *device = rg.segment->devices[atomic_load(&t->device)].name;
    uint32_t ns = duration_of_key(device, rg_text_hash(name), dims);
    return ns || !atomic_load(&rg.segment->header.name_seeds) ? ns : duration_of_name(device, name, dims);
}

void rg_durations_doubt(void)
{
    for (uint32_t i = 0; i < RG_DURATIONS; i++)
        if (atomic_load_explicit(&rg_durations[i].seen, memory_order_relaxed) && !atomic_load(&rg_durations[i].graph))
            atomic_store_explicit(&rg_durations[i].seen, 0, memory_order_relaxed);
}

/* Its estimate in the segment is this one (0: none). Where it was another it is another kernel, which had the same handle; where there was none
 * (no room, or no name) nothing tells, and what was timed before may be of another one. */
static void becomes(rg_duration *d, uint32_t shared)
{
    uint32_t before = atomic_load(&d->shared);
    if (before ? before != shared : atomic_load(&d->samples) != 0)
        clear(d);
    atomic_store(&d->shared, shared);
}

/* Finds or enters the kernel among the estimates of the segment; its duration, if that is known there, becomes this process's. */
static void share(rg_duration *d, const rg_track *t, uint64_t kernel_hash, const char *name, rg_dims dims, bool graph)
{
    uint32_t device = atomic_load(&t->device);
    const char *device_name = rg.segment->devices[device].name;
    int at = rg_estimate_enter(rg.segment, rg_estimate_key(rg.program, device_name, kernel_hash, dims));
    uint32_t ns = 0, none = 0;
    becomes(d, (uint32_t)(at + 1));
    if (at >= 0) {
        rg_estimate *e = &rg.segment->estimates[at];
        rg_estimate_facts facts = {.program = rg.program, .device = device + 1, .dims = dims, .name = name};
        rg_estimate_describe(rg.segment, at, &facts);
        atomic_store(&e->used, 1);
        ns = atomic_load(&e->duration_ns);
    } else {
        atomic_fetch_add(&rg.segment->header.unshared, 1);
    }
    if (!ns && !graph && atomic_load(&rg.segment->header.name_seeds)) {
        ns = duration_of_name(device_name, name, dims);
        if (ns && at >= 0)
            atomic_compare_exchange_strong(&rg.segment->estimates[at].duration_ns, &none, ns);
        none = 0;
    }
    if (ns && atomic_compare_exchange_strong(&d->duration_ns, &none, ns)) {
        atomic_store(&d->doubt, RG_ESTIMATE_DOUBT);
        atomic_fetch_add_explicit(&rg_track_member(t)->slot->durations_seeded, 1, memory_order_relaxed);
    }
}

void rg_duration_first(rg_duration *d, const rg_track *t, enum rg_kind kind, uintptr_t units, rg_dims dims)
{
    if (kind == RG_GRAPH) {
        rg_graph_facts graph;
        rg_graph_known((CUgraphExec)units, &graph);
        atomic_store(&d->graph, true);
        atomic_store(&d->communicates, graph.communicates);
        if (graph.hash && !graph.communicates)
            share(d, t, graph.hash, graph.label, dims, true);
        return;
    }
    const char *name = rg_function_name((CUfunction)units);
    bool communicates = rg_communicating || rg_name_communicates(name);
    atomic_store(&d->communicates, communicates);
    if (name && *name && !communicates)
        share(d, t, rg_text_hash(name), name, dims, false);
    else
        becomes(d, 0);
}

void rg_durations_beat(void)
{
    static uint32_t before[RG_DURATIONS]; /* launches, when it was last told */
    const uint64_t ENOUGH_NS = 100000000;
    uint64_t sum_ns = 0, long_ns = 0;
    if (rg_member_class() == RG_CLASS_HIGH)
        return; /* nobody stops it */
    for (uint32_t i = 0; i < RG_DURATIONS; i++) {
        const rg_duration *d = &rg_durations[i];
        uint32_t seen = atomic_load_explicit(&d->seen, memory_order_relaxed);
        /* Beside others' work the shortest sample is closest. */
        uint64_t each_ns = atomic_load_explicit(&d->least_ns, memory_order_relaxed);
        uint64_t ns = each_ns * (seen >= before[i] ? seen - before[i] : seen); /* it may be another kernel's place now */
        sum_ns += ns;
        long_ns += each_ns >= RG_POLICY_STOP_NS ? ns : 0;
    }
    if (sum_ns < ENOUGH_NS)
        return;
    for (uint32_t i = 0; i < RG_DURATIONS; i++)
        before[i] = atomic_load_explicit(&rg_durations[i].seen, memory_order_relaxed);
    for (uint32_t k = 0; k < atomic_load(&rg.member_count); k++)
        if (!k || atomic_load(&rg.members[k].mode)) /* else it has no slot */
            atomic_store(&rg.members[k].slot->long_part, (uint32_t)(1 + 1000 * long_ns / sum_ns));
}

/* ---- samples ---- */

int rg_sample_begin(rg_track *t, rg_duration *duration)
{
    /* Events need the track's context to be current; where it is not, somebody else will sample this kernel. */
    CUcontext current = NULL;
    if (rg_real.cuCtxGetCurrent(&current) != CUDA_SUCCESS || current != t->context || !rg_real.cuEventElapsedTime)
        return -1;
    /* A kernel's first launch may load its code, which counts in the sample: better no sample where there is an estimate. */
    if (atomic_load(&duration->seen) == 1 && atomic_load(&duration->duration_ns))
        return -1;
    for (int i = 0; i < SAMPLES; i++) {
        uint32_t free = SAMPLE_FREE;
        if (atomic_load_explicit(&samples[i].state, memory_order_relaxed) != SAMPLE_FREE ||
            !atomic_compare_exchange_strong(&samples[i].state, &free, SAMPLE_BUSY))
            continue;
        CUevent *events[2] = {&samples[i].start, &samples[i].stop};
        for (int e = 0; e < 2; e++) {
            if (*events[e] && samples[i].context != current) {
                RG_REAL(cuEventDestroy_v2)(*events[e]);
                *events[e] = NULL;
            }
            if (!*events[e])
                RG_REAL(cuEventCreate)(events[e], CU_EVENT_DEFAULT);
        }
        samples[i].context = current;
        samples[i].device = t->cu_device;
        samples[i].index = t->device;
        samples[i].duration = duration;
        samples[i].member = rg_track_member(t);
        samples[i].key = atomic_load(&duration->key);
        samples[i].shared = atomic_load(&duration->shared);
        samples[i].suspensions = atomic_load(&rg.slot->suspensions);
        samples[i].stops = atomic_load(&rg.preemptible[t->device]) >= RG_STOPPABLE_SLICED;
        if (samples[i].start && samples[i].stop && RG_REAL(cuEventRecord)(samples[i].start, t->stream) == CUDA_SUCCESS)
            return i;
        atomic_store(&samples[i].state, SAMPLE_FREE);
        return -1;
    }
    return -1;
}

/* Takes in what has finished, where nobody polls at the gate. */
static void poll_seldom(void)
{
    static _Atomic uint64_t polled_ns;
    uint64_t now = rg_now_ns(), before = atomic_load(&polled_ns);
    /* Not at each launch: where the GPU is far behind, none of them has finished for long. */
    if (now - before >= POLL_NS && atomic_compare_exchange_strong(&polled_ns, &before, now)) {
        CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
        if (rg_real.cuThreadExchangeStreamCaptureMode)
            rg_real.cuThreadExchangeStreamCaptureMode(&mode);
        rg_samples_poll();
        if (rg_real.cuThreadExchangeStreamCaptureMode)
            rg_real.cuThreadExchangeStreamCaptureMode(&mode);
    }
}

uint32_t rg_duration_launched(rg_duration *d, const rg_track *t, enum rg_kind kind, uintptr_t units, rg_dims dims)
{
    uint32_t seen = atomic_load_explicit(&d->seen, memory_order_relaxed);
    if (seen == 0)
        rg_duration_first(d, t, kind, units, dims);
    atomic_store_explicit(&d->seen, seen + 1, memory_order_relaxed);
    return seen;
}

int rg_sample_ungated(rg_track *t, enum rg_kind kind, uintptr_t units, rg_dims dims)
{
    rg_duration *d = rg_duration_of(rg_duration_key(units, dims));
    rg_duration_launched(d, t, kind, units, dims);
    if (atomic_load(&d->communicates) || atomic_load(&d->samples) >= RG_SAMPLE_FIRST || atomic_load(&rg.captures))
        return -1;
    poll_seldom();
    return atomic_load(&d->samples) < RG_SAMPLE_FIRST ? rg_sample_begin(t, d) : -1;
}

int rg_sample_stopped(rg_track *t, rg_duration *d, uint32_t seen)
{
    if ((seen >= RG_SAMPLE_FIRST && (seen & (RG_SAMPLE_EVERY - 1))) || atomic_load(&d->communicates) || atomic_load(&rg.captures))
        return -1;
    poll_seldom();
    return rg_sample_begin(t, d);
}

void rg_sample_end(int i, rg_track *t, bool ok)
{
    ok = ok && RG_REAL(cuEventRecord)(samples[i].stop, t->stream) == CUDA_SUCCESS;
    atomic_store(&samples[i].state, ok ? SAMPLE_RECORDED : SAMPLE_FREE);
}

static void take_in(rg_member *m, rg_duration *d, uint64_t key, uint32_t shared, uint32_t device, float ms)
{
    const float MOST_MS = 4000; /* what fits */
    if (!(ms >= 0))
        return;
    ms = ms < MOST_MS ? ms : MOST_MS;
    uint32_t sample = (uint32_t)(ms * 1e6f) + 1;
    atomic_fetch_add_explicit(&m->slot->samples, 1, memory_order_relaxed);
    if (shared)
        rg_estimate_sample(rg.segment, (int)shared - 1, sample);
    if (atomic_load(&d->key) != key || atomic_load(&d->shared) != shared) /* that kernel is not known any more, or another one has its handle */
        return;
    uint8_t doubt = atomic_load(&d->doubt);
    if (doubt)
        atomic_store(&d->doubt, (uint8_t)(doubt - 1));
    atomic_store(&d->duration_ns, rg_estimate_next(atomic_load(&d->duration_ns), sample, doubt > 0));
    uint32_t least = atomic_load(&d->least_ns), price = atomic_load(&d->price_ns);
    if (least == 0 || sample < least)
        atomic_store(&d->least_ns, least = sample);
    /* The first ones of a program that starts beside others hold much of theirs: not to be charged by one alone. */
    if (atomic_fetch_add(&d->samples, 1) + 1 >= RG_SAMPLE_FIRST && price != least) {
        atomic_store(&d->price_ns, least);
        /* Everybody pays for their own launches, whoever's were timed. */
        for (uint32_t k = 0; k < atomic_load(&rg.member_count); k++) {
            uint32_t launches = atomic_load(rg_duration_charged(d, &rg.members[k]));
            if (launches)
                rg_gate_recharge(&rg.members[k], device, launches, price, least);
        }
    }
}

void rg_samples_poll(void)
{
    for (int i = 0; i < SAMPLES; i++) {
        uint32_t recorded = SAMPLE_RECORDED;
        if (atomic_load_explicit(&samples[i].state, memory_order_relaxed) != SAMPLE_RECORDED ||
            !atomic_compare_exchange_strong(&samples[i].state, &recorded, SAMPLE_BUSY))
            continue;
        CUresult r = RG_REAL(cuEventQuery)(samples[i].stop);
        float ms = 0;
        /* Time off the GPU is none of the kernel's; a stop is in front of its first event. In its slices it may be taken off later, too: few
         * are, and an estimate rises slowly (rg_estimate_next). */
        bool throughout = samples[i].stops || atomic_load(&rg.slot->suspensions) == samples[i].suspensions;
        if (r == CUDA_SUCCESS && throughout && rg_real.cuEventElapsedTime(&ms, samples[i].start, samples[i].stop) == CUDA_SUCCESS)
            take_in(samples[i].member, samples[i].duration, samples[i].key, samples[i].shared, samples[i].index, ms);
        atomic_store(&samples[i].state, r == CUDA_ERROR_NOT_READY ? SAMPLE_RECORDED : SAMPLE_FREE);
    }
}

static bool is_in(int i, CUcontext context, CUdevice d)
{
    CUcontext its = atomic_load(&samples[i].context);
    return its && (context ? its == context : atomic_load(&samples[i].device) == d);
}

void rg_samples_forget(CUcontext context, CUdevice d)
{
    for (int i = 0; i < SAMPLES; i++) {
        /* Whoever is using it now is done in a moment; only a driver that never returns makes us leave it. */
        for (int tries = 0; rg_give_way(tries); tries++) {
            uint32_t state = atomic_load(&samples[i].state);
            if (!is_in(i, context, d))
                break;
            if (state != SAMPLE_BUSY && atomic_compare_exchange_strong(&samples[i].state, &state, SAMPLE_BUSY)) {
                /* Who had it has perhaps given it events of another context's meanwhile. */
                bool its = is_in(i, context, d);
                if (its) {
                    samples[i].start = samples[i].stop = NULL;
                    samples[i].context = NULL;
                }
                atomic_store(&samples[i].state, its ? SAMPLE_FREE : state);
                break;
            }
        }
    }
}
