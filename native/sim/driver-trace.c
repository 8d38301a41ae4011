/*
 * driver-trace.c: what this process asked of the simulated GPU, and when that was done, for a stand-in of CUPTI.
 *
 * Behind each submission goes an event of the model's, under the same lock, so nothing comes between them. A stream does one
 * thing after the other: one begins when it was submitted or when the one before it has ended, whichever is later.
 */
#include "driver.h"
#include "sim-control.h"

#include <string.h>
#include <time.h>

enum { PENDING = 12288, STREAMS = 4096 };

static _Atomic int tracing;
static _Atomic uint64_t lost;
static _Atomic uint32_t calls;
static pthread_mutex_t trace_lock = PTHREAD_MUTEX_INITIALIZER; /* inside the shared file's lock */
static struct {
    rigel_sim_activity activity;
    uint64_t submitted_ns;
    uint32_t event;
} pending[PENDING];
static uint64_t first, next;              /* of those pending, by number */
static uint64_t stream_ended_ns[STREAMS]; /* by the model's id of the stream */

static _Thread_local uint32_t graph_now, graph_call, graph_node;

bool sim_tracing(void)
{
    return atomic_load_explicit(&tracing, memory_order_relaxed);
}

void sim_trace_graph(uint32_t graph)
{
    graph_now = graph;
    graph_node = 0;
    graph_call = graph ? atomic_fetch_add(&calls, 1) + 1 : 0;
}

static void describe(rigel_sim_activity *a, const sim_object *stream, const sim_work *w)
{
    *a = (rigel_sim_activity){
        .what = w->kind == SIM_KERNEL ? 0 : w->transfer == RG_MODEL_MEMSET ? 2 : 1,
        .direction = w->transfer == RG_MODEL_H2D ? 0 : w->transfer == RG_MODEL_D2H ? 1 : 2,
        .bytes = w->bytes,
        .stream = stream->id,
        .context = stream->context->id,
        .device = (uint32_t)stream->device,
        .correlation = graph_now ? graph_call : atomic_fetch_add(&calls, 1) + 1,
        .graph = graph_now,
        .node = graph_now ? ++graph_node : 0,
    };
    const sim_object *f = w->kind == SIM_KERNEL ? sim_get(w->params.func, SIM_FUNCTION) : NULL;
    if (!f) return;
    a->name = f->function.name;
    a->registers = (uint32_t)f->function.registers;
    a->shared_bytes = w->params.sharedMemBytes;
    memcpy(a->grid, (const uint32_t[]){w->params.gridDimX, w->params.gridDimY, w->params.gridDimZ}, sizeof a->grid);
    memcpy(a->block, (const uint32_t[]){w->params.blockDimX, w->params.blockDimY, w->params.blockDimZ}, sizeof a->block);
}

void sim_trace(rg_model *m, const sim_object *stream, const sim_work *work)
{
    uint32_t event = 0;
    struct timespec t;
    if (work->kind != SIM_KERNEL && work->kind != SIM_TRANSFER) return;
    clock_gettime(CLOCK_MONOTONIC, &t);
    pthread_mutex_lock(&trace_lock);
    if (next - first >= PENDING || rg_model_create_event(m, stream->context->id, &event)) {
        atomic_fetch_add(&lost, 1);
    } else if (rg_model_record(m, event, stream->id, NULL)) {
        rg_model_destroy_event(m, event);
        atomic_fetch_add(&lost, 1);
    } else {
        describe(&pending[next % PENDING].activity, stream, work);
        pending[next % PENDING].submitted_ns = (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
        pending[next % PENDING].event = event;
        next++;
    }
    pthread_mutex_unlock(&trace_lock);
}

API void rigelSimTrace(int on)
{
    atomic_store(&tracing, on);
}

API uint64_t rigelSimTraceLost(void)
{
    return atomic_load(&lost);
}

API int rigelSimTraced(rigel_sim_activity *activity)
{
    int found = 0;
    if (sim_enter() != CUDA_SUCCESS) return 0;
    pthread_mutex_lock(&trace_lock);
    uint32_t device = pending[first % PENDING].activity.device;
    int any = first != next;
    pthread_mutex_unlock(&trace_lock);
    if (!any) return 0;
    rg_model *m = sim_lock((int)device);
    pthread_mutex_lock(&trace_lock);
    uint64_t end_ns = 0;
    rigel_sim_activity *a = &pending[first % PENDING].activity;
    if (first != next && a->device == device && rg_model_event_done(m, pending[first % PENDING].event, &end_ns)) {
        uint64_t *before = &stream_ended_ns[a->stream % STREAMS], submitted = pending[first % PENDING].submitted_ns;
        a->start_ns = submitted > *before ? submitted : *before;
        a->end_ns = end_ns > a->start_ns ? end_ns : a->start_ns;
        *before = a->end_ns;
        rg_model_destroy_event(m, pending[first % PENDING].event);
        *activity = *a;
        first++;
        found = 1;
    }
    pthread_mutex_unlock(&trace_lock);
    sim_unlock();
    return found;
}
