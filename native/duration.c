/*
 * duration.c: learns how long a best-effort client's kernels take, by timing a few of them.
 *
 * A sample is a pair of timing events round one launch (0.78 us each to record, measured on an H200): the first
 * RG_SAMPLE_FIRST launches of a kernel of one function, grid and block, then one in RG_SAMPLE_EVERY. What lies between
 * the events also holds whatever delayed the kernel, so the estimate falls at once to a shorter sample and rises slowly.
 * Samples are taken in by whoever polls the gate's batches; a sample is owned by whoever moved its state, so nothing locks.
 *
 * Must never: wait for an event. Used in relaxed capture mode only (rg_gate_wait), but for recording.
 */
#include "client.h"

rg_duration rg_durations[RG_DURATIONS];

enum { SAMPLE_FREE = 0, SAMPLE_BUSY, SAMPLE_RECORDED };
enum { SAMPLES = 16 };

static struct {
    _Atomic uint32_t state;
    CUcontext context; /* that the events belong to */
    CUdevice device;
    uint32_t index; /* of the device in the segment */
    CUevent start, stop;
    rg_duration *duration;
    uint64_t key;
} samples[SAMPLES];

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
    atomic_store(&d->duration_ns, 0);
    atomic_store(&d->seen, 0);
    atomic_store(&d->samples, 0);
    atomic_store(&d->least_ns, 0);
    atomic_store(&d->price_ns, 0);
    atomic_store(&d->charged, 0);
    atomic_store(&d->kernel, 0);
    atomic_store(&d->key, key);
    return d;
}

void rg_duration_first(rg_duration *d, enum rg_kind kind, uintptr_t units)
{
    bool yes = kind == RG_GRAPH ? rg_graph_communicates((CUgraphExec)units) : rg_function_communicates((CUfunction)units);
    atomic_store(&d->communicates, yes);
}

int rg_sample_begin(rg_track *t, rg_duration *duration)
{
    /* Events need the track's context to be current; where it is not, somebody else will sample this kernel. */
    CUcontext current = NULL;
    if (rg_real.cuCtxGetCurrent(&current) != CUDA_SUCCESS || current != t->context || !rg_real.cuEventElapsedTime)
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
                rg_real.cuEventCreate(events[e], CU_EVENT_DEFAULT);
        }
        samples[i].context = current;
        samples[i].device = t->cu_device;
        samples[i].index = t->device;
        samples[i].duration = duration;
        samples[i].key = atomic_load(&duration->key);
        if (samples[i].start && samples[i].stop && RG_REAL(cuEventRecord)(samples[i].start, t->stream) == CUDA_SUCCESS)
            return i;
        atomic_store(&samples[i].state, SAMPLE_FREE);
        return -1;
    }
    return -1;
}

void rg_sample_end(int i, rg_track *t, bool ok)
{
    ok = ok && RG_REAL(cuEventRecord)(samples[i].stop, t->stream) == CUDA_SUCCESS;
    atomic_store(&samples[i].state, ok ? SAMPLE_RECORDED : SAMPLE_FREE);
}

static void take_in(rg_duration *d, uint64_t key, uint32_t device, float ms)
{
    if (atomic_load(&d->key) != key || !(ms >= 0 && ms < 4000))
        return;
    uint32_t sample = (uint32_t)(ms * 1e6f) + 1, old = atomic_load(&d->duration_ns);
    atomic_store(&d->duration_ns, old == 0 || sample < old ? sample : old + (sample - old) / 16);
    uint32_t least = atomic_load(&d->least_ns), price = atomic_load(&d->price_ns);
    if (least == 0 || sample < least)
        atomic_store(&d->least_ns, least = sample);
    /* The first ones of a program that starts beside others hold much of theirs: not to be charged by one alone. */
    if (atomic_fetch_add(&d->samples, 1) + 1 >= RG_SAMPLE_FIRST && price != least) {
        atomic_store(&d->price_ns, least);
        rg_gate_recharge(device, atomic_load(&d->charged), price, least);
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
        if (r == CUDA_SUCCESS && rg_real.cuEventElapsedTime(&ms, samples[i].start, samples[i].stop) == CUDA_SUCCESS)
            take_in(samples[i].duration, samples[i].key, samples[i].index, ms);
        atomic_store(&samples[i].state, r == CUDA_ERROR_NOT_READY ? SAMPLE_RECORDED : SAMPLE_FREE);
    }
}

void rg_samples_forget(CUcontext context, CUdevice d)
{
    for (int i = 0; i < SAMPLES; i++) {
        uint32_t state = atomic_load(&samples[i].state);
        if (!samples[i].context || (context ? samples[i].context != context : samples[i].device != d) ||
            state == SAMPLE_BUSY || !atomic_compare_exchange_strong(&samples[i].state, &state, SAMPLE_BUSY))
            continue;
        samples[i].start = samples[i].stop = NULL;
        samples[i].context = NULL;
        atomic_store(&samples[i].state, SAMPLE_FREE);
    }
}
