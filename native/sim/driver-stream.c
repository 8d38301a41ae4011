/*
 * driver-stream.c: streams and events, and the one way by which work reaches the model.
 *
 * Which handles may be mixed follows the CUDA Programming Guide, "Multi-Device System: Stream and Event Behavior": a
 * launch into, or an event record in, a stream of another context fails; a wait for another context's event, and a
 * query or synchronization of it, succeed.
 */
#include "driver.h"
#include "sim-control.h"

#include <errno.h>
#include <string.h>

/* ---- Streams */

/* The caller holds sim.lock, except for a stream that no other thread can know yet. */
CUresult sim_new_stream(sim_object *context, unsigned flags, int priority, int legacy, sim_object **stream)
{
    sim_object *s = sim_new(SIM_STREAM, context);
    if (!s) return CUDA_ERROR_OUT_OF_MEMORY;
    s->stream.flags = flags;
    s->stream.legacy = legacy;
    int sync = legacy ? RG_MODEL_LEGACY : flags & CU_STREAM_NON_BLOCKING ? RG_MODEL_NON_BLOCKING : RG_MODEL_BLOCKING;
    rg_model *m = sim_lock(context->device);
    int full = rg_model_create_stream(m, context->id, priority, sync, &s->id);
    sim_unlock();
    if (full) {
        sim_delete(s);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *stream = s;
    return CUDA_SUCCESS;
}

/* This thread's default stream in the context; made when first used. */
static CUresult thread_stream(sim_object *context, sim_object **stream)
{
    sim_thread *self = sim_self();
    for (int i = 0; i < self->stream_count;) {
        *stream = sim_get(self->streams[i], SIM_STREAM);
        if (*stream && (*stream)->context == context) return CUDA_SUCCESS;
        if (!*stream) self->streams[i] = self->streams[--self->stream_count];
        else i++;
    }
    pthread_mutex_lock(&sim.lock);
    CUresult r = sim_new_stream(context, 0, 0, 0, stream);
    pthread_mutex_unlock(&sim.lock);
    if (r == CUDA_SUCCESS && (r = sim_keep_thread_stream(sim_handle(*stream)))) sim_destroy_stream(sim_handle(*stream));
    return r;
}

CUresult sim_stream(CUstream handle, int per_thread, sim_object **stream)
{
    sim_object *context;
    if (handle && handle != CU_STREAM_LEGACY && handle != CU_STREAM_PER_THREAD) {
        *stream = sim_get(handle, SIM_STREAM);
        return *stream ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
    }
    CUresult r = sim_current(&context);
    if (r) return r;
    if (handle == CU_STREAM_PER_THREAD || (!handle && per_thread)) return thread_stream(context, stream);
    *stream = context->ctx.legacy;
    return CUDA_SUCCESS;
}

/* sim_enter and sim_stream together. */
static CUresult enter_stream(CUstream handle, int per_thread, sim_object **stream)
{
    CUresult r = sim_enter();
    return r ? r : sim_stream(handle, per_thread, stream);
}

static int submit_to_model(rg_model *m, const sim_object *stream, const sim_work *w, uint64_t *ticket)
{
    switch (w->kind) {
    case SIM_KERNEL: return rg_model_submit_kernel(m, stream->id, &w->kernel, w->priority, ticket);
    case SIM_TRANSFER: return rg_model_submit_transfer(m, stream->id, w->transfer, w->bytes, ticket);
    case SIM_LAUNCH_GRAPH: return rg_model_submit_graph(m, stream->id, w->target, ticket);
    case SIM_RECORD: return rg_model_record(m, w->target, stream->id, ticket);
    case SIM_STOP: return rg_model_submit_stop(m, stream->id, ticket);
    default: return rg_model_wait(m, w->target, stream->id, ticket);
    }
}

CUresult sim_submit(sim_object *stream, const sim_work *work, uint64_t *ticket)
{
    if (atomic_load_explicit(&sim.captures, memory_order_acquire)) {
        if (atomic_load(&stream->stream.capture)) return sim_capture_add(stream, work);
        CUresult r = stream->stream.legacy ? sim_legacy_use(stream) : CUDA_SUCCESS;
        if (r) return r;
    }
    /* Bytes move now, in the order of the calls. No kernel looks at them, so nobody can tell that it was early. */
    if (work->kind == SIM_TRANSFER) sim_do_move(&work->move);
    for (;;) {
        rg_model *m = sim_lock(stream->device);
        int full = submit_to_model(m, stream, work, ticket);
        if (!full && sim_tracing()) sim_trace(m, stream, work);
        sim_unlock();
        if (!full) return CUDA_SUCCESS;
        if (full != RG_MODEL_FULL) return CUDA_ERROR_CONTEXT_IS_DESTROYED; /* by another thread, at this moment */
        CUresult r = sim_wait_for_room(stream->device, stream->id);
        if (r) return r;
    }
}

static CUresult create_stream(CUstream *stream, unsigned flags, int priority)
{
    sim_object *context, *s;
    CUresult r = sim_current(&context);
    if (r) return r;
    if (!stream || (flags & ~(unsigned)CU_STREAM_NON_BLOCKING)) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sim.lock);
    r = sim_new_stream(context, flags, priority, 0, &s);
    pthread_mutex_unlock(&sim.lock);
    if (r == CUDA_SUCCESS) *stream = sim_handle(s);
    return r;
}

API CUresult cuStreamCreate(CUstream *stream, unsigned flags)
{
    return create_stream(stream, flags, RG_MODEL_LOWEST_PRIORITY);
}

API CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority)
{
    return create_stream(stream, flags, priority); /* out of range: clamped, as documented */
}

CUresult sim_destroy_stream(void *handle)
{
    pthread_mutex_lock(&sim.lock);
    sim_object *s = sim_get(handle, SIM_STREAM);
    if (s) {
        sim_capture_leave(s);
        rg_model *m = sim_lock(s->device);
        rg_model_destroy_stream(m, s->id);
        sim_unlock();
        sim_delete(s);
    }
    pthread_mutex_unlock(&sim.lock);
    return s ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

/* Only streams that the program made are its to destroy; nobody but the driver knows the handles of the others. */
static CUresult destroy_stream(CUstream stream)
{
    CUresult r = sim_enter();
    return r ? r : sim_destroy_stream(stream);
}

API CUresult cuStreamDestroy_v2(CUstream stream)
{
    return destroy_stream(stream);
}

API CUresult cuStreamDestroy(CUstream stream)
{
    return destroy_stream(stream);
}

/* Each of these has a form for the legacy NULL stream and one (_ptsz) for the per-thread NULL stream. */
#define BOTH_FORMS(name, body, params, ...) \
    API CUresult name params { return body(0, __VA_ARGS__); } \
    API CUresult name##_ptsz params { return body(1, __VA_ARGS__); }

static CUresult stream_query(int pt, CUstream stream)
{
    sim_object *s;
    CUresult r = enter_stream(stream, pt, &s);
    if (r || (r = sim_capture_conflict(s))) return r;
    rg_model *m = sim_lock(s->device);
    bool idle = rg_model_stream_idle(m, s->id);
    sim_unlock();
    if (!idle) sim_reap(10);
    return idle ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
BOTH_FORMS(cuStreamQuery, stream_query, (CUstream s), s)

static CUresult stream_synchronize(int pt, CUstream stream)
{
    sim_object *s;
    CUresult r = enter_stream(stream, pt, &s);
    if (r || (r = sim_capture_conflict(s))) return r;
    rg_model *m = sim_lock(s->device);
    sim_until until = {SIM_UNTIL_STREAM, s->id, m->last_ticket};
    sim_unlock();
    return sim_wait(s->device, until);
}
BOTH_FORMS(cuStreamSynchronize, stream_synchronize, (CUstream s), s)

static CUresult stream_get_ctx(int pt, CUstream stream, CUcontext *context)
{
    sim_object *s;
    CUresult r = enter_stream(stream, pt, &s);
    if (r) return r;
    if (!context) return CUDA_ERROR_INVALID_VALUE;
    *context = sim_handle(s->context);
    return CUDA_SUCCESS;
}
BOTH_FORMS(cuStreamGetCtx, stream_get_ctx, (CUstream s, CUcontext *c), s, c)

static CUresult stream_get_device(int pt, CUstream stream, CUdevice *device)
{
    sim_object *s;
    CUresult r = enter_stream(stream, pt, &s);
    if (r) return r;
    if (!device) return CUDA_ERROR_INVALID_VALUE;
    *device = s->device;
    return CUDA_SUCCESS;
}
BOTH_FORMS(cuStreamGetDevice, stream_get_device, (CUstream s, CUdevice *d), s, d)

static CUresult stream_get_flags(int pt, CUstream stream, unsigned *flags)
{
    sim_object *s;
    CUresult r = enter_stream(stream, pt, &s);
    if (r) return r;
    if (!flags) return CUDA_ERROR_INVALID_VALUE;
    *flags = s->stream.flags;
    return CUDA_SUCCESS;
}
BOTH_FORMS(cuStreamGetFlags, stream_get_flags, (CUstream s, unsigned *f), s, f)

static CUresult stream_get_id(int pt, CUstream stream, unsigned long long *id)
{
    sim_object *s;
    CUresult r = enter_stream(stream, pt, &s);
    if (r) return r;
    if (!id) return CUDA_ERROR_INVALID_VALUE;
    *id = (uint64_t)(uintptr_t)sim_handle(s) & 0xffffffffffffff;
    return CUDA_SUCCESS;
}
BOTH_FORMS(cuStreamGetId, stream_get_id, (CUstream s, unsigned long long *id), s, id)

static CUresult stream_get_priority(int pt, CUstream stream, int *priority)
{
    sim_object *s;
    CUresult r = enter_stream(stream, pt, &s);
    if (r) return r;
    if (!priority) return CUDA_ERROR_INVALID_VALUE;
    rg_model *m = sim_lock(s->device);
    rg_model_get_priority(m, s->id, priority);
    sim_unlock();
    return CUDA_SUCCESS;
}
BOTH_FORMS(cuStreamGetPriority, stream_get_priority, (CUstream s, int *p), s, p)

/* The priority is the only stream attribute that means something here. */
static CUresult stream_get_attribute(int pt, CUstream stream, int attribute, CUlaunchAttributeValue *value)
{
    if (!value) return CUDA_ERROR_INVALID_VALUE;
    if (attribute != CU_LAUNCH_ATTRIBUTE_PRIORITY) return CUDA_ERROR_NOT_SUPPORTED;
    return stream_get_priority(pt, stream, &value->priority);
}
BOTH_FORMS(cuStreamGetAttribute, stream_get_attribute, (CUstream s, int a, CUlaunchAttributeValue *v), s, a, v)

static CUresult stream_set_attribute(int pt, CUstream stream, int attribute, const CUlaunchAttributeValue *value)
{
    sim_object *s;
    CUresult r = enter_stream(stream, pt, &s);
    if (r) return r;
    if (!value) return CUDA_ERROR_INVALID_VALUE;
    if (attribute != CU_LAUNCH_ATTRIBUTE_PRIORITY) return CUDA_ERROR_NOT_SUPPORTED;
    rg_model *m = sim_lock(s->device);
    rg_model_set_priority(m, s->id, value->priority);
    sim_unlock();
    return CUDA_SUCCESS;
}
BOTH_FORMS(cuStreamSetAttribute, stream_set_attribute, (CUstream s, int a, const CUlaunchAttributeValue *v), s, a, v)

/* ---- Events */

API CUresult cuEventCreate(CUevent *event, unsigned flags)
{
    sim_object *context;
    CUresult r = sim_current(&context);
    if (r) return r;
    const unsigned known = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING;
    if (flags & CU_EVENT_INTERPROCESS) return CUDA_ERROR_NOT_SUPPORTED;
    if (!event || (flags & ~known)) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sim.lock);
    sim_object *e = sim_new(SIM_EVENT, context);
    if (e) {
        e->event.flags = flags;
        rg_model *m = sim_lock(e->device);
        int full = rg_model_create_event(m, context->id, &e->id);
        sim_unlock();
        if (full) sim_delete(e);
        else *event = sim_handle(e);
        if (full) r = CUDA_ERROR_OUT_OF_MEMORY;
    } else {
        r = CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_unlock(&sim.lock);
    return r;
}

static CUresult destroy_event(CUevent event)
{
    CUresult r = sim_enter();
    if (r) return r;
    pthread_mutex_lock(&sim.lock);
    sim_object *e = sim_get(event, SIM_EVENT);
    if (e) {
        rg_model *m = sim_lock(e->device);
        rg_model_destroy_event(m, e->id); /* a pending record or wait is kept */
        sim_unlock();
        sim_delete(e);
    }
    pthread_mutex_unlock(&sim.lock);
    return e ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

API CUresult cuEventDestroy_v2(CUevent event)
{
    return destroy_event(event);
}

API CUresult cuEventDestroy(CUevent event)
{
    return destroy_event(event);
}

static CUresult event_record(int pt, CUevent event, CUstream stream, unsigned flags)
{
    sim_object *s;
    CUresult r = enter_stream(stream, pt, &s);
    if (r) return r;
    sim_object *e = sim_get(event, SIM_EVENT);
    if (!e || e->context != s->context) return CUDA_ERROR_INVALID_HANDLE;
    if (flags & ~(unsigned)CU_EVENT_RECORD_EXTERNAL) return CUDA_ERROR_INVALID_VALUE;
    if (atomic_load(&s->stream.capture)) return flags ? CUDA_ERROR_NOT_SUPPORTED : sim_capture_record(s, e);
    sim_work w = {.kind = SIM_RECORD, .target = e->id};
    r = sim_submit(s, &w, NULL);
    if (r) return r;
    atomic_store(&e->event.recorded, 1);
    atomic_store(&e->event.capture, 0);
    return CUDA_SUCCESS;
}
#define RECORD(pt, e, s) event_record(pt, e, s, 0)
BOTH_FORMS(cuEventRecord, RECORD, (CUevent e, CUstream s), e, s)
BOTH_FORMS(cuEventRecordWithFlags, event_record, (CUevent e, CUstream s, unsigned flags), e, s, flags)

/* A query or wait of an event: it must be live, not captured, and the call allowed at this moment. */
static CUresult enter_event(CUevent event, sim_object **e)
{
    CUresult r = sim_enter();
    if (r) return r;
    *e = sim_get(event, SIM_EVENT);
    if (!*e) return CUDA_ERROR_INVALID_HANDLE;
    if (atomic_load(&(*e)->event.capture)) return CUDA_ERROR_CAPTURED_EVENT;
    return sim_unsafe();
}

API CUresult cuEventQuery(CUevent event)
{
    sim_object *e;
    CUresult r = enter_event(event, &e);
    if (r) return r;
    rg_model *m = sim_lock(e->device);
    bool done = rg_model_event_done(m, e->id, NULL);
    sim_unlock();
    if (!done) sim_reap(10);
    return done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

API CUresult cuEventSynchronize(CUevent event)
{
    sim_object *e;
    CUresult r = enter_event(event, &e);
    return r ? r : sim_wait(e->device, (sim_until){SIM_UNTIL_EVENT, e->id, 0});
}

static CUresult elapsed(float *ms, CUevent start, CUevent end)
{
    sim_object *pair[2];
    uint64_t at[2];
    CUresult r = enter_event(start, &pair[0]);
    if (r || (r = enter_event(end, &pair[1]))) return r;
    if (!ms) return CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i < 2; i++)
        if ((pair[i]->event.flags & CU_EVENT_DISABLE_TIMING) || !atomic_load(&pair[i]->event.recorded))
            return CUDA_ERROR_INVALID_HANDLE;
    if (pair[0]->context != pair[1]->context) return CUDA_ERROR_INVALID_HANDLE;
    rg_model *m = sim_lock(pair[0]->device);
    bool done = rg_model_event_done(m, pair[0]->id, &at[0]) && rg_model_event_done(m, pair[1]->id, &at[1]);
    sim_unlock();
    if (!done) return CUDA_ERROR_NOT_READY;
    *ms = (float)((double)((int64_t)at[1] - (int64_t)at[0]) / 1e6);
    return CUDA_SUCCESS;
}

API CUresult cuEventElapsedTime(float *ms, CUevent start, CUevent end)
{
    return elapsed(ms, start, end);
}

API CUresult cuEventElapsedTime_v2(float *ms, CUevent start, CUevent end)
{
    return elapsed(ms, start, end);
}

static CUresult stream_wait(int pt, CUstream stream, CUevent event, unsigned flags)
{
    sim_object *s;
    CUresult r = enter_stream(stream, pt, &s);
    if (r) return r;
    sim_object *e = sim_get(event, SIM_EVENT);
    if (!e) return CUDA_ERROR_INVALID_HANDLE;
    if (flags) return flags == 1 ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE; /* 1: external, for graphs */
    if (atomic_load(&s->stream.capture) || atomic_load(&e->event.capture))
        return sim_capture_wait(s, e);
    if (s->device != e->device) {
        /* Another GPU's model: there is no operation for that. The caller waits instead of the stream. */
        return sim_wait(e->device, (sim_until){SIM_UNTIL_EVENT, e->id, 0});
    }
    sim_work w = {.kind = SIM_WAIT, .target = e->id};
    return sim_submit(s, &w, NULL);
}
BOTH_FORMS(cuStreamWaitEvent, stream_wait, (CUstream s, CUevent e, unsigned flags), s, e, flags)

/*
 * A wait for a word in memory: of all that the real one can wait for, for the word that rigelSimStop stands for (sim-control.h) to be 1 or more.
 * Nothing here looks at the word itself.
 */
static CUresult stream_wait_value(int pt, CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags)
{
    sim_object *s;
    CUresult r = enter_stream(stream, pt, &s);
    if (r) return r;
    if (!sim_is_registered(address) || address % sizeof value) return CUDA_ERROR_INVALID_VALUE;
    if (value != 1 || flags != CU_STREAM_WAIT_VALUE_GEQ) return CUDA_ERROR_NOT_SUPPORTED;
    sim_work w = {.kind = SIM_STOP};
    return sim_submit(s, &w, NULL);
}
BOTH_FORMS(cuStreamWaitValue32_v2, stream_wait_value, (CUstream s, CUdeviceptr at, uint32_t value, unsigned flags), s, at, value, flags)

/* Values that streams are to write, in the order of the calls; under sim_lock. */
enum { WRITES = 4096 };
static struct {
    int device;
    uint32_t context, stream;
    uint64_t ticket; /* of what is in front of it */
    CUdeviceptr at;
    uint32_t value;
} writes[WRITES];
static uint32_t write_count;

/* Those whose streams have come to them; not where their context has gone, with the registration of their memory. */
static void write_due(const rg_model *m, int device)
{
    rg_model_context_stats stats;
    uint32_t left = 0;
    for (uint32_t i = 0; i < write_count; i++) {
        if (writes[i].device != device || !rg_model_done(m, writes[i].stream, writes[i].ticket))
            writes[left++] = writes[i];
        else if (rg_model_get_context_stats(m, writes[i].context, &stats) == 0)
            atomic_store((_Atomic uint32_t *)(uintptr_t)writes[i].at, writes[i].value);
    }
    write_count = left;
}

/* To registered memory alone, in which the value stands once somebody asks for it (rigelSimWrites). */
static CUresult stream_write_value(int pt, CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags)
{
    sim_object *s;
    CUresult r = enter_stream(stream, pt, &s);
    if (r || (r = sim_capture_conflict(s))) return r;
    if (!sim_is_registered(address) || address % sizeof value) return CUDA_ERROR_INVALID_VALUE;
    if (flags != CU_STREAM_WRITE_VALUE_DEFAULT) return CUDA_ERROR_NOT_SUPPORTED;
    const rg_model *m = sim_lock(s->device);
    write_due(m, s->device);
    bool fits = write_count < WRITES;
    if (fits) {
        writes[write_count].device = s->device;
        writes[write_count].context = s->context->id;
        writes[write_count].stream = s->id;
        writes[write_count].ticket = m->last_ticket;
        writes[write_count].at = address;
        writes[write_count++].value = value;
    }
    sim_unlock();
    return fits ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
BOTH_FORMS(cuStreamWriteValue32_v2, stream_write_value, (CUstream s, CUdeviceptr at, uint32_t value, unsigned flags), s, at, value, flags)

API int rigelSimWrites(unsigned device_ordinal)
{
    if (atomic_load(&sim.phase) != SIM_RUNNING || device_ordinal >= (unsigned)sim.devices) return -ENODEV;
    const rg_model *m = sim_lock((int)device_ordinal);
    write_due(m, (int)device_ordinal);
    sim_unlock();
    return 0;
}
