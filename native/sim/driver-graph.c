/*
 * driver-graph.c: stream capture and graphs.
 *
 * Which call is an error during a capture, and which error, follows the CUDA Programming Guide, "Creating a Graph Using
 * Stream Capture: Prohibited and Unhandled Operations, Invalidation", and cuThreadExchangeStreamCaptureMode in the
 * reference manual. A capture that was invalidated stays so until cuStreamEndCapture on its first stream.
 *
 * A graph runs as a chain, in the order its nodes were captured: branches that a real GPU would run side by side run
 * one after the other. What each node comes after is known all the same, for programs that take graphs apart.
 * Nodes are kernels, copies and memsets; capturing anything else is refused.
 *
 * Whether all streams were joined is told by vector clocks: each stream counts its nodes, an event carries the counts
 * of what it comes after, and a wait takes them over. At the end the first stream must have everybody's.
 */
#include "driver.h"

#include <stdlib.h>
#include <string.h>

struct sim_capture {
    sim_capture *next;
    uint64_t id;
    const sim_thread *thread; /* that began it */
    int mode, lost, into_given_graph;
    sim_object *graph;
    sim_object *streams[SIM_CAPTURE_STREAMS]; /* the first began it; NULL: destroyed since */
    uint32_t count;
    uint32_t clock[SIM_CAPTURE_STREAMS][SIM_CAPTURE_STREAMS];
    uint32_t covered[SIM_CAPTURE_STREAMS][SIM_CAPTURE_STREAMS]; /* as far as a stream's nodes have edges for it */
};

/* All captures in progress, guarded by sim.lock like everything in this file. */
static sim_capture *captures;
static uint64_t last_capture;

/* ---- Graphs */

static void delete_nodes(sim_object *graph)
{
    for (sim_object *n = graph->graph.first, *next; n; n = next) {
        next = n->next;
        free(n->node.after);
        sim_delete(n);
    }
}

void sim_delete_graph(sim_object *graph)
{
    delete_nodes(graph);
    sim_delete(graph);
}

void sim_delete_exec(sim_object *exec)
{
    rg_model *m = sim_lock(exec->device);
    rg_model_destroy_graph(m, exec->id); /* launches under way still run */
    sim_unlock();
    free(exec->exec.moves);
    free(exec->exec.works);
    sim_delete(exec);
}

static CUresult add_node(sim_object *graph, const sim_work *work)
{
    sim_object *n = sim_new(SIM_NODE, graph->context);
    if (!n) return CUDA_ERROR_OUT_OF_MEMORY;
    n->node.graph = graph;
    n->node.work = *work;
    if (graph->graph.last) graph->graph.last->next = n;
    else graph->graph.first = n;
    graph->graph.last = n;
    graph->graph.count++;
    return CUDA_SUCCESS;
}

/* An edge; OUT_OF_MEMORY. */
static CUresult come_after(sim_object *node, sim_object *other)
{
    sim_object **more = realloc(node->node.after, (node->node.after_count + 1) * sizeof *more);
    if (!more) return CUDA_ERROR_OUT_OF_MEMORY;
    node->node.after = more;
    more[node->node.after_count++] = other;
    return CUDA_SUCCESS;
}

API CUresult cuGraphCreate(CUgraph *graph, unsigned flags)
{
    sim_object *context;
    CUresult r = sim_current(&context);
    if (r) return r;
    if (!graph || flags) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sim.lock);
    sim_object *g = sim_new(SIM_GRAPH, context);
    if (g) *graph = sim_handle(g);
    pthread_mutex_unlock(&sim.lock);
    return g ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API CUresult cuGraphDestroy(CUgraph graph)
{
    CUresult r = sim_enter();
    if (r) return r;
    pthread_mutex_lock(&sim.lock);
    sim_object *g = sim_get(graph, SIM_GRAPH);
    if (!g || g->graph.capturing) r = CUDA_ERROR_INVALID_VALUE;
    else sim_delete_graph(g);
    pthread_mutex_unlock(&sim.lock);
    return r;
}

static int add_to_model(rg_model *m, uint32_t id, const sim_work *w)
{
    if (w->kind == SIM_KERNEL) return rg_model_graph_kernel(m, id, &w->kernel, w->priority);
    return rg_model_graph_transfer(m, id, w->transfer, w->bytes);
}

static CUresult make_exec(sim_object *graph, sim_object *exec)
{
    exec->exec.moves = malloc((graph->graph.count + 1) * sizeof *exec->exec.moves);
    exec->exec.works = malloc((graph->graph.count + 1) * sizeof *exec->exec.works);
    if (!exec->exec.moves || !exec->exec.works) {
        free(exec->exec.moves);
        free(exec->exec.works);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    rg_model *m = sim_lock(exec->device);
    int full = rg_model_create_graph(m, exec->context->id, &exec->id);
    for (const sim_object *n = graph->graph.first; n && !full; n = n->next) {
        full = add_to_model(m, exec->id, &n->node.work);
        exec->exec.works[exec->exec.work_count++] = n->node.work;
        if (n->node.work.kind == SIM_TRANSFER) exec->exec.moves[exec->exec.count++] = n->node.work.move;
    }
    if (full) rg_model_destroy_graph(m, exec->id);
    sim_unlock();
    if (full) {
        free(exec->exec.moves);
        free(exec->exec.works);
    }
    return full ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

/* The clone of a node of the graph `original`, whose nodes were cloned in their order. */
static sim_object *counterpart(const sim_object *original, const sim_object *clone, const sim_object *node)
{
    sim_object *c = clone->graph.first;
    for (const sim_object *n = original->graph.first; n && n != node; n = n->next) c = c->next;
    return c;
}

API CUresult cuGraphClone(CUgraph *clone, CUgraph original)
{
    CUresult r = sim_enter();
    if (r) return r;
    if (!clone) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sim.lock);
    sim_object *g = sim_get(original, SIM_GRAPH);
    sim_object *c = g && !g->graph.capturing ? sim_new(SIM_GRAPH, g->context) : NULL;
    if (!c) r = g && !g->graph.capturing ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE;
    for (sim_object *n = c ? g->graph.first : NULL; n && !r; n = n->next) {
        r = add_node(c, &n->node.work);
        if (r == CUDA_SUCCESS) c->graph.last->node.original = sim_handle(n);
        for (uint32_t i = 0; i < n->node.after_count && !r; i++)
            r = come_after(c->graph.last, counterpart(g, c, n->node.after[i]));
    }
    if (c && r) sim_delete_graph(c);
    if (r == CUDA_SUCCESS) *clone = sim_handle(c);
    pthread_mutex_unlock(&sim.lock);
    return r;
}

API CUresult cuGraphNodeFindInClone(CUgraphNode *found, CUgraphNode original, CUgraph clone)
{
    CUresult r = sim_enter();
    if (r) return r;
    if (!found) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sim.lock);
    sim_object *c = sim_get(clone, SIM_GRAPH);
    sim_object *n = c ? c->graph.first : NULL;
    while (n && n->node.original != (void *)original) n = n->next;
    if (n) *found = sim_handle(n);
    pthread_mutex_unlock(&sim.lock);
    return n && original ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuGraphDestroyNode(CUgraphNode node)
{
    CUresult r = sim_enter();
    if (r) return r;
    pthread_mutex_lock(&sim.lock);
    sim_object *n = sim_get(node, SIM_NODE);
    sim_object *g = n ? n->node.graph : NULL, *before = NULL;
    if (!n || g->graph.capturing) {
        pthread_mutex_unlock(&sim.lock);
        return CUDA_ERROR_INVALID_VALUE;
    }
    for (sim_object *o = g->graph.first; o; o = o->next) {
        uint32_t kept = 0;
        for (uint32_t i = 0; i < o->node.after_count; i++)
            if (o->node.after[i] != n) o->node.after[kept++] = o->node.after[i];
        o->node.after_count = kept;
        if (o->next == n) before = o;
    }
    if (before) before->next = n->next;
    else g->graph.first = n->next;
    if (g->graph.last == n) g->graph.last = before;
    g->graph.count--;
    free(n->node.after);
    sim_delete(n);
    pthread_mutex_unlock(&sim.lock);
    return CUDA_SUCCESS;
}

/* All edges here have default data: all bytes 0. */
static CUresult get_edges(CUgraph graph, CUgraphNode *from, CUgraphNode *to, uint64_t *data, size_t *count)
{
    CUresult r = sim_enter();
    if (r) return r;
    if (!count || !from != !to || (data && !from)) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sim.lock);
    sim_object *g = sim_get(graph, SIM_GRAPH);
    size_t room = from ? *count : 0, edges = 0;
    for (const sim_object *n = g ? g->graph.first : NULL; n; n = n->next)
        for (uint32_t i = 0; i < n->node.after_count; i++, edges++) {
            if (edges >= room) continue;
            from[edges] = sim_handle(n->node.after[i]);
            to[edges] = sim_handle(n);
            if (data) data[edges] = 0;
        }
    for (size_t i = edges; i < room; i++) from[i] = to[i] = NULL;
    if (g && (!from || room > edges)) *count = edges;
    pthread_mutex_unlock(&sim.lock);
    return g ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuGraphGetEdges(CUgraph graph, CUgraphNode *from, CUgraphNode *to, size_t *count)
{
    return get_edges(graph, from, to, NULL, count);
}

API CUresult cuGraphGetEdges_v2(CUgraph graph, CUgraphNode *from, CUgraphNode *to, uint64_t *data, size_t *count)
{
    return get_edges(graph, from, to, data, count);
}

static CUresult instantiate(CUgraphExec *out, CUgraph graph)
{
    CUresult r = sim_enter();
    if (r) return r;
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sim.lock);
    sim_object *g = sim_get(graph, SIM_GRAPH);
    sim_object *e = g && !g->graph.capturing ? sim_new(SIM_EXEC, g->context) : NULL;
    if (!g || g->graph.capturing) r = CUDA_ERROR_INVALID_VALUE;
    else if (!e) r = CUDA_ERROR_OUT_OF_MEMORY;
    else if ((r = make_exec(g, e))) sim_delete(e);
    if (r == CUDA_SUCCESS) *out = sim_handle(e);
    pthread_mutex_unlock(&sim.lock);
    return r;
}

/* The three older and the newer form differ in what they tell about a graph that cannot be made: here there is none. */
API CUresult cuGraphInstantiate(CUgraphExec *exec, CUgraph graph, CUgraphNode *error_node, char *log, size_t log_bytes)
{
    if (error_node) *error_node = NULL;
    if (log && log_bytes) *log = '\0';
    return instantiate(exec, graph);
}

API CUresult cuGraphInstantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *error_node, char *log,
                                   size_t log_bytes)
{
    if (error_node) *error_node = NULL;
    if (log && log_bytes) *log = '\0';
    return instantiate(exec, graph);
}

static CUresult instantiate_with_flags(CUgraphExec *exec, CUgraph graph, unsigned long long flags)
{
    enum { KNOWN = 1 | 2 | 8 }; /* free on launch, upload, use node priority (nodes always have their own here) */
    return flags & ~(unsigned long long)KNOWN ? CUDA_ERROR_NOT_SUPPORTED : instantiate(exec, graph);
}

API CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags)
{
    return instantiate_with_flags(exec, graph, flags);
}

static CUresult instantiate_with_params(CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params)
{
    if (!params) return CUDA_ERROR_INVALID_VALUE;
    params->hErrNode_out = NULL;
    CUresult r = instantiate_with_flags(exec, graph, params->flags);
    params->result_out = r ? 1 : 0;
    return r;
}

API CUresult cuGraphInstantiateWithParams(CUgraphExec *e, CUgraph g, CUDA_GRAPH_INSTANTIATE_PARAMS *p)
{
    return instantiate_with_params(e, g, p);
}

API CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec *e, CUgraph g, CUDA_GRAPH_INSTANTIATE_PARAMS *p)
{
    return instantiate_with_params(e, g, p);
}

/* A real driver refuses a graph of another shape; here any is taken. Launches under way still run as they were. */
static CUresult update(CUgraphExec exec, CUgraph graph)
{
    CUresult r = sim_enter();
    if (r) return r;
    pthread_mutex_lock(&sim.lock);
    sim_object *e = sim_get(exec, SIM_EXEC), *g = sim_get(graph, SIM_GRAPH);
    if (!e || !g || g->graph.capturing) r = CUDA_ERROR_INVALID_VALUE;
    sim_object updated = {0};
    if (r == CUDA_SUCCESS) {
        updated.context = e->context;
        updated.device = e->device;
        r = make_exec(g, &updated);
    }
    if (r == CUDA_SUCCESS) {
        rg_model *m = sim_lock(e->device);
        rg_model_destroy_graph(m, e->id);
        sim_unlock();
        free(e->exec.moves);
        e->id = updated.id;
        e->exec = updated.exec;
    }
    pthread_mutex_unlock(&sim.lock);
    return r;
}

API CUresult cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode *error_node, int *result)
{
    CUresult r = result ? update(exec, graph) : CUDA_ERROR_INVALID_VALUE;
    if (error_node) *error_node = NULL;
    if (result) *result = r ? 1 : 0;
    return r;
}

/* The result is an int and two nodes. */
API CUresult cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, void *result)
{
    if (!result) return CUDA_ERROR_INVALID_VALUE;
    CUresult r = update(exec, graph);
    memset(result, 0, sizeof(int) + 2 * sizeof(void *));
    *(int *)result = r ? 1 : 0;
    return r;
}

/* An executable graph is changed as a whole only. */
static CUresult change_node(CUgraphExec exec, CUgraphNode node)
{
    CUresult r = sim_enter();
    if (r) return r;
    return sim_get(exec, SIM_EXEC) && sim_get(node, SIM_NODE) ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
}

#define CHANGE_NODE(symbol, ...) \
    API CUresult symbol(CUgraphExec exec, CUgraphNode node, __VA_ARGS__) \
    { \
        return change_node(exec, node); \
    }
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
CHANGE_NODE(cuGraphExecKernelNodeSetParams, const void *p)
CHANGE_NODE(cuGraphExecKernelNodeSetParams_v2, const void *p)
CHANGE_NODE(cuGraphExecMemcpyNodeSetParams, const void *p, CUcontext c)
CHANGE_NODE(cuGraphExecMemsetNodeSetParams, const void *p, CUcontext c)
CHANGE_NODE(cuGraphExecHostNodeSetParams, const void *p)
CHANGE_NODE(cuGraphExecChildGraphNodeSetParams, CUgraph g)
CHANGE_NODE(cuGraphExecEventRecordNodeSetEvent, CUevent e)
CHANGE_NODE(cuGraphExecEventWaitNodeSetEvent, CUevent e)
CHANGE_NODE(cuGraphExecExternalSemaphoresSignalNodeSetParams, const void *p)
CHANGE_NODE(cuGraphExecExternalSemaphoresWaitNodeSetParams, const void *p)
CHANGE_NODE(cuGraphExecBatchMemOpNodeSetParams, const void *p)
CHANGE_NODE(cuGraphExecNodeSetParams, void *p)
CHANGE_NODE(cuGraphNodeSetEnabled, unsigned enabled)
#pragma GCC diagnostic pop

API CUresult cuGraphExecDestroy(CUgraphExec exec)
{
    CUresult r = sim_enter();
    if (r) return r;
    pthread_mutex_lock(&sim.lock);
    sim_object *e = sim_get(exec, SIM_EXEC);
    if (e) sim_delete_exec(e);
    pthread_mutex_unlock(&sim.lock);
    return e ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult launch(int pt, CUgraphExec exec, CUstream stream)
{
    sim_object *context, *s;
    CUresult r = sim_current(&context);
    if (r || (r = sim_stream(stream, pt, &s))) return r;
    sim_object *e = sim_get(exec, SIM_EXEC);
    if (!e || e->device != s->device) return CUDA_ERROR_INVALID_VALUE;
    if (sim_tracing() && !atomic_load(&s->stream.capture)) {
        sim_trace_graph(e->id + 1);
        for (size_t i = 0; i < e->exec.work_count && r == CUDA_SUCCESS; i++) r = sim_submit(s, &e->exec.works[i], NULL);
        sim_trace_graph(0);
        return r;
    }
    if (!atomic_load(&s->stream.capture))
        for (size_t i = 0; i < e->exec.count; i++) sim_do_move(&e->exec.moves[i]);
    sim_work w = {.kind = SIM_LAUNCH_GRAPH, .target = e->id};
    return sim_submit(s, &w, NULL);
}

API CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream)
{
    return launch(0, exec, stream);
}

API CUresult cuGraphLaunch_ptsz(CUgraphExec exec, CUstream stream)
{
    return launch(1, exec, stream);
}

/* There is nothing to upload to: this checks its arguments. */
static CUresult upload(int pt, CUgraphExec exec, CUstream stream)
{
    sim_object *s;
    CUresult r = sim_enter();
    if (r || (r = sim_stream(stream, pt, &s))) return r;
    return sim_get(exec, SIM_EXEC) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuGraphUpload(CUgraphExec exec, CUstream stream)
{
    return upload(0, exec, stream);
}

API CUresult cuGraphUpload_ptsz(CUgraphExec exec, CUstream stream)
{
    return upload(1, exec, stream);
}

API CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count)
{
    CUresult r = sim_enter();
    if (r) return r;
    if (!count) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sim.lock);
    sim_object *g = sim_get(graph, SIM_GRAPH);
    if (!g) r = CUDA_ERROR_INVALID_VALUE;
    if (g && nodes) {
        const sim_object *n = g->graph.first;
        size_t room = *count;
        for (size_t i = 0; i < room; i++) {
            nodes[i] = n ? sim_handle(n) : NULL;
            n = n ? n->next : NULL;
        }
        if (room > g->graph.count) *count = g->graph.count;
    } else if (g) {
        *count = g->graph.count;
    }
    pthread_mutex_unlock(&sim.lock);
    return r;
}

API CUresult cuGraphNodeGetType(CUgraphNode node, int *type)
{
    CUresult r = sim_enter();
    if (r) return r;
    sim_object *n = sim_get(node, SIM_NODE);
    if (!n || !type) return CUDA_ERROR_INVALID_VALUE;
    *type = n->node.work.kind == SIM_KERNEL ? CU_GRAPH_NODE_TYPE_KERNEL
            : n->node.work.move.is_set      ? CU_GRAPH_NODE_TYPE_MEMSET
                                            : CU_GRAPH_NODE_TYPE_MEMCPY;
    return CUDA_SUCCESS;
}

/* The arguments themselves are not kept: kernelParams and extra are NULL. */
API CUresult cuGraphKernelNodeGetParams_v2(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS *params)
{
    CUresult r = sim_enter();
    if (r) return r;
    sim_object *n = sim_get(node, SIM_NODE);
    if (!n || n->node.work.kind != SIM_KERNEL || !params) return CUDA_ERROR_INVALID_VALUE;
    *params = n->node.work.params;
    return CUDA_SUCCESS;
}

/* ---- What may not be done during a capture */

CUresult sim_unsafe(void)
{
    if (!atomic_load_explicit(&sim.captures, memory_order_acquire)) return CUDA_SUCCESS;
    const sim_thread *self = sim_self();
    CUresult r = CUDA_SUCCESS;
    pthread_mutex_lock(&sim.lock);
    for (sim_capture *c = captures; c; c = c->next) {
        int own = c->thread == self && c->mode != CU_STREAM_CAPTURE_MODE_RELAXED &&
                  self->capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED;
        int global = c->thread != self && c->mode == CU_STREAM_CAPTURE_MODE_GLOBAL &&
                     self->capture_mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
        if (!own && !global) continue;
        c->lost = 1;
        r = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    pthread_mutex_unlock(&sim.lock);
    return r;
}

/* The captures that have a stream of this context among theirs; only blocking streams if so asked. */
static int lose_captures(const sim_object *context, int only_blocking)
{
    int lost = 0;
    for (sim_capture *c = captures; c; c = c->next)
        for (uint32_t i = 0; i < c->count; i++) {
            const sim_object *s = c->streams[i];
            if (!s || s->context != context) continue;
            if (only_blocking && (s->stream.flags & CU_STREAM_NON_BLOCKING)) continue;
            c->lost = 1;
            lost = 1;
        }
    return lost;
}

CUresult sim_legacy_use(sim_object *legacy)
{
    pthread_mutex_lock(&sim.lock);
    int lost = lose_captures(legacy->context, 1);
    pthread_mutex_unlock(&sim.lock);
    return lost ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : CUDA_SUCCESS;
}

CUresult sim_capture_conflict(sim_object *stream)
{
    if (!atomic_load_explicit(&sim.captures, memory_order_acquire)) return CUDA_SUCCESS;
    if (stream->stream.legacy) return sim_legacy_use(stream);
    CUresult r = CUDA_SUCCESS;
    pthread_mutex_lock(&sim.lock);
    sim_capture *c = atomic_load(&stream->stream.capture);
    if (c) {
        r = c->lost ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        c->lost = 1;
    }
    pthread_mutex_unlock(&sim.lock);
    return r;
}

CUresult sim_context_conflict(sim_object *context)
{
    if (!atomic_load_explicit(&sim.captures, memory_order_acquire)) return CUDA_SUCCESS;
    pthread_mutex_lock(&sim.lock);
    int lost = lose_captures(context, 0);
    pthread_mutex_unlock(&sim.lock);
    return lost ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

/* ---- Capture */

/* The stream's capture, if work may still be added to it. The caller holds sim.lock. */
static CUresult live_capture(const sim_object *stream, sim_capture **c)
{
    *c = atomic_load(&((sim_object *)(uintptr_t)stream)->stream.capture);
    if (!*c) return CUDA_ERROR_ILLEGAL_STATE; /* another thread ended it at this moment */
    return (*c)->lost ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
}

/* The new node of a stream comes after the stream's last one, and after what the stream has waited for since. */
static CUresult add_edges(sim_capture *c, uint32_t own, sim_object *node)
{
    CUresult r = CUDA_SUCCESS;
    sim_object *before = NULL; /* the node that was last in the graph */
    int first = 1;
    node->node.capture = c->id;
    node->node.capture_index = own;
    node->node.ordinal = c->clock[own][own] + 1;
    for (sim_object *n = c->graph->graph.first; n && n != node && !r; n = n->next) {
        before = n;
        uint32_t of = n->node.capture_index;
        if (n->node.capture != c->id || n->node.ordinal != c->clock[own][of] || n->node.ordinal <= c->covered[own][of]) continue;
        r = come_after(node, n);
        first = 0;
    }
    if (first && before && before->node.capture != c->id && !r) r = come_after(node, before); /* into a given graph */
    memcpy(c->covered[own], c->clock[own], sizeof c->covered[own]);
    c->covered[own][own] = c->clock[own][own]++; /* this one is the next one's edge */
    return r;
}

CUresult sim_capture_add(sim_object *stream, const sim_work *work)
{
    sim_capture *c;
    pthread_mutex_lock(&sim.lock);
    CUresult r = live_capture(stream, &c);
    if (r == CUDA_SUCCESS && work->kind != SIM_KERNEL && work->kind != SIM_TRANSFER) {
        c->lost = 1;
        r = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    if (r == CUDA_SUCCESS) r = add_node(c->graph, work);
    if (r == CUDA_SUCCESS) {
        /* A kernel that takes its stream's priority takes the one of now: at launch there is no such stream. */
        sim_work *w = &c->graph->graph.last->node.work;
        if (w->kind == SIM_KERNEL && w->priority == RG_MODEL_INHERIT) {
            rg_model *m = sim_lock(stream->device);
            rg_model_get_priority(m, stream->id, &w->priority);
            sim_unlock();
        }
        r = add_edges(c, stream->stream.capture_index, c->graph->graph.last);
    }
    pthread_mutex_unlock(&sim.lock);
    return r;
}

CUresult sim_capture_record(sim_object *stream, sim_object *event)
{
    sim_capture *c;
    pthread_mutex_lock(&sim.lock);
    CUresult r = live_capture(stream, &c);
    if (r == CUDA_SUCCESS) {
        memcpy(event->event.clock, c->clock[stream->stream.capture_index], sizeof event->event.clock);
        atomic_store(&event->event.capture, c->id);
    }
    pthread_mutex_unlock(&sim.lock);
    return r;
}

/* The stream takes part in the capture from now on. */
static CUresult join_capture(sim_capture *c, sim_object *stream)
{
    if (stream->context != c->graph->context || c->count == SIM_CAPTURE_STREAMS) return CUDA_ERROR_NOT_SUPPORTED;
    stream->stream.capture_index = c->count;
    c->streams[c->count++] = stream;
    atomic_store(&stream->stream.capture, c);
    return CUDA_SUCCESS;
}

static CUresult wait_in_capture(sim_object *stream, sim_object *event)
{
    sim_capture *mine = atomic_load(&stream->stream.capture), *its = captures;
    uint64_t id = atomic_load(&event->event.capture);
    while (its && its->id != id) its = its->next;
    if (mine && mine->lost) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (!id) {
        if (!atomic_load(&event->event.recorded)) return CUDA_SUCCESS; /* nothing to wait for */
        mine->lost = 1;
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    if (!its) { /* recorded in a capture that is over */
        if (mine) mine->lost = 1;
        return mine ? CUDA_ERROR_STREAM_CAPTURE_ISOLATION : CUDA_ERROR_CAPTURED_EVENT;
    }
    if (its->lost) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (mine && mine != its) {
        mine->lost = its->lost = 1;
        return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    }
    if (stream->stream.legacy) {
        its->lost = 1;
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    CUresult r = mine ? CUDA_SUCCESS : join_capture(its, stream);
    if (r) return r;
    uint32_t *clock = its->clock[stream->stream.capture_index];
    for (uint32_t i = 0; i < SIM_CAPTURE_STREAMS; i++)
        if (event->event.clock[i] > clock[i]) clock[i] = event->event.clock[i];
    return CUDA_SUCCESS;
}

CUresult sim_capture_wait(sim_object *stream, sim_object *event)
{
    pthread_mutex_lock(&sim.lock);
    CUresult r = wait_in_capture(stream, event);
    pthread_mutex_unlock(&sim.lock);
    return r;
}

/* The capture is over: its streams are ordinary ones again. A graph it made for nobody goes. */
static void end_capture(sim_capture *c, int keep_graph)
{
    for (uint32_t i = 0; i < c->count; i++)
        if (c->streams[i]) atomic_store(&c->streams[i]->stream.capture, NULL);
    sim_capture **link = &captures;
    while (*link != c) link = &(*link)->next;
    *link = c->next;
    atomic_fetch_sub(&sim.captures, 1);
    c->graph->graph.capturing = 0;
    if (!keep_graph && !c->into_given_graph) sim_delete_graph(c->graph);
    free(c);
}

void sim_capture_leave(sim_object *stream)
{
    sim_capture *c = atomic_load(&stream->stream.capture);
    if (!c) return;
    c->lost = 1;
    if (c->streams[0] == stream) end_capture(c, 0);
    else c->streams[stream->stream.capture_index] = NULL;
}

static CUresult begin(int pt, CUstream stream, int mode, CUgraph into)
{
    sim_object *s, *g = NULL;
    CUresult r = sim_enter();
    if (r || (r = sim_stream(stream, pt, &s))) return r;
    if (mode < CU_STREAM_CAPTURE_MODE_GLOBAL || mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
    if (s->stream.legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    pthread_mutex_lock(&sim.lock);
    sim_capture *c = calloc(1, sizeof *c);
    if (into) g = sim_get(into, SIM_GRAPH);
    if (!c) r = CUDA_ERROR_OUT_OF_MEMORY;
    else if (atomic_load(&s->stream.capture)) r = CUDA_ERROR_ILLEGAL_STATE;
    else if (into && (!g || g->graph.capturing)) r = CUDA_ERROR_INVALID_VALUE;
    else if (!into && !(g = sim_new(SIM_GRAPH, s->context))) r = CUDA_ERROR_OUT_OF_MEMORY;
    if (r == CUDA_SUCCESS) {
        g->graph.capturing = 1;
        c->id = ++last_capture;
        c->thread = sim_self();
        c->mode = mode;
        c->graph = g;
        c->into_given_graph = into != NULL;
        c->next = captures;
        captures = c;
        atomic_fetch_add(&sim.captures, 1);
        join_capture(c, s);
    } else {
        free(c);
    }
    pthread_mutex_unlock(&sim.lock);
    return r;
}

API CUresult cuStreamBeginCapture(CUstream stream)
{
    return begin(0, stream, CU_STREAM_CAPTURE_MODE_GLOBAL, NULL);
}

API CUresult cuStreamBeginCapture_ptsz(CUstream stream)
{
    return begin(1, stream, CU_STREAM_CAPTURE_MODE_GLOBAL, NULL);
}

API CUresult cuStreamBeginCapture_v2(CUstream stream, int mode)
{
    return begin(0, stream, mode, NULL);
}

API CUresult cuStreamBeginCapture_v2_ptsz(CUstream stream, int mode)
{
    return begin(1, stream, mode, NULL);
}

/* New nodes come after all that the graph has, whatever dependencies are named: the graph is a chain. */
static CUresult begin_to_graph(int pt, CUstream stream, CUgraph graph, const CUgraphNode *nodes, size_t count, int mode)
{
    if (!graph || (count && !nodes)) return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++)
        if (!sim_get(nodes[i], SIM_NODE)) return CUDA_ERROR_INVALID_VALUE;
    return begin(pt, stream, mode, graph);
}

API CUresult cuStreamBeginCaptureToGraph(CUstream s, CUgraph g, const CUgraphNode *nodes, const void *edges,
                                         size_t count, int mode)
{
    (void)edges;
    return begin_to_graph(0, s, g, nodes, count, mode);
}

API CUresult cuStreamBeginCaptureToGraph_ptsz(CUstream s, CUgraph g, const CUgraphNode *nodes, const void *edges,
                                              size_t count, int mode)
{
    (void)edges;
    return begin_to_graph(1, s, g, nodes, count, mode);
}

/* Whether what is captured is what the graph has is not looked at: only an empty one is taken. */
static CUresult begin_recapture(int pt, CUstream stream, int mode, CUgraph graph)
{
    size_t nodes = 0;
    CUresult r = graph ? cuGraphGetNodes(graph, NULL, &nodes) : CUDA_ERROR_INVALID_VALUE;
    return r ? r : nodes ? CUDA_ERROR_NOT_SUPPORTED : begin(pt, stream, mode, graph);
}

API CUresult cuStreamBeginRecaptureToGraph(CUstream s, int mode, CUgraph g, void *callback, void *data)
{
    (void)callback, (void)data;
    return begin_recapture(0, s, mode, g);
}

API CUresult cuStreamBeginRecaptureToGraph_ptsz(CUstream s, int mode, CUgraph g, void *callback, void *data)
{
    (void)callback, (void)data;
    return begin_recapture(1, s, mode, g);
}

static int all_joined(const sim_capture *c)
{
    for (uint32_t i = 0; i < c->count; i++)
        if (c->clock[0][i] < c->clock[i][i]) return 0;
    return 1;
}

static CUresult end(int pt, CUstream stream, CUgraph *graph)
{
    sim_object *s;
    CUresult r = sim_enter();
    if (r || (r = sim_stream(stream, pt, &s))) return r;
    if (!graph) return CUDA_ERROR_INVALID_VALUE;
    *graph = NULL;
    pthread_mutex_lock(&sim.lock);
    sim_capture *c = atomic_load(&s->stream.capture);
    if (!c) {
        r = CUDA_ERROR_ILLEGAL_STATE;
    } else if (c->streams[0] != s) {
        c->lost = 1;
        r = CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    } else if (c->mode != CU_STREAM_CAPTURE_MODE_RELAXED && c->thread != sim_self()) {
        r = CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    } else {
        r = c->lost           ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
            : !all_joined(c) ? CUDA_ERROR_STREAM_CAPTURE_UNJOINED
                             : CUDA_SUCCESS;
        if (r == CUDA_SUCCESS) *graph = sim_handle(c->graph);
        end_capture(c, r == CUDA_SUCCESS);
    }
    pthread_mutex_unlock(&sim.lock);
    return r;
}

API CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph)
{
    return end(0, stream, graph);
}

API CUresult cuStreamEndCapture_ptsz(CUstream stream, CUgraph *graph)
{
    return end(1, stream, graph);
}

/* What a capture tells about itself. */
typedef struct {
    int status;
    uint64_t id;
    CUgraph graph;
    const CUgraphNode *last; /* what the next node comes after */
    size_t count;
} capture_info;

static CUresult get_info(int pt, CUstream stream, capture_info *info)
{
    static _Thread_local CUgraphNode last;
    sim_object *s;
    CUresult r = sim_enter();
    if (r || (r = sim_stream(stream, pt, &s))) return r;
    memset(info, 0, sizeof *info);
    if (!atomic_load_explicit(&sim.captures, memory_order_acquire)) return CUDA_SUCCESS;
    pthread_mutex_lock(&sim.lock);
    sim_capture *c = atomic_load(&s->stream.capture);
    if (c) {
        info->status = c->lost ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
        info->id = c->id;
        info->graph = sim_handle(c->graph);
        last = c->graph->graph.last ? sim_handle(c->graph->graph.last) : NULL;
        info->last = &last;
        info->count = last ? 1 : 0;
    }
    if (s->stream.legacy) /* asking does not invalidate */
        for (c = captures; c; c = c->next)
            for (uint32_t i = 0; i < c->count; i++)
                if (c->streams[i] && c->streams[i]->context == s->context &&
                    !(c->streams[i]->stream.flags & CU_STREAM_NON_BLOCKING))
                    r = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    pthread_mutex_unlock(&sim.lock);
    return r;
}

static CUresult is_capturing(int pt, CUstream stream, CUstreamCaptureStatus *status)
{
    capture_info info;
    if (!status) return CUDA_ERROR_INVALID_VALUE;
    CUresult r = get_info(pt, stream, &info);
    if (r == CUDA_SUCCESS) *status = (CUstreamCaptureStatus)info.status;
    return r;
}

API CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status)
{
    return is_capturing(0, stream, status);
}

API CUresult cuStreamIsCapturing_ptsz(CUstream stream, CUstreamCaptureStatus *status)
{
    return is_capturing(1, stream, status);
}

static CUresult capture_details(int pt, CUstream stream, CUstreamCaptureStatus *status, uint64_t *id, CUgraph *graph,
                                const CUgraphNode **nodes, const void **edges, size_t *count)
{
    capture_info info;
    if (!status) return CUDA_ERROR_INVALID_VALUE;
    CUresult r = get_info(pt, stream, &info);
    if (r) return r;
    *status = (CUstreamCaptureStatus)info.status;
    if (id) *id = info.id;
    if (graph) *graph = info.graph;
    if (nodes) *nodes = info.last;
    if (edges) *edges = NULL;
    if (count) *count = info.count;
    return CUDA_SUCCESS;
}

API CUresult cuStreamGetCaptureInfo(CUstream s, CUstreamCaptureStatus *status, uint64_t *id)
{
    return capture_details(0, s, status, id, NULL, NULL, NULL, NULL);
}

API CUresult cuStreamGetCaptureInfo_ptsz(CUstream s, CUstreamCaptureStatus *status, uint64_t *id)
{
    return capture_details(1, s, status, id, NULL, NULL, NULL, NULL);
}

API CUresult cuStreamGetCaptureInfo_v2(CUstream s, CUstreamCaptureStatus *status, uint64_t *id, CUgraph *graph,
                                       const CUgraphNode **nodes, size_t *count)
{
    return capture_details(0, s, status, id, graph, nodes, NULL, count);
}

API CUresult cuStreamGetCaptureInfo_v2_ptsz(CUstream s, CUstreamCaptureStatus *status, uint64_t *id, CUgraph *graph,
                                            const CUgraphNode **nodes, size_t *count)
{
    return capture_details(1, s, status, id, graph, nodes, NULL, count);
}

API CUresult cuStreamGetCaptureInfo_v3(CUstream s, CUstreamCaptureStatus *status, uint64_t *id, CUgraph *graph,
                                       const CUgraphNode **nodes, const void **edges, size_t *count)
{
    return capture_details(0, s, status, id, graph, nodes, edges, count);
}

API CUresult cuStreamGetCaptureInfo_v3_ptsz(CUstream s, CUstreamCaptureStatus *status, uint64_t *id, CUgraph *graph,
                                            const CUgraphNode **nodes, const void **edges, size_t *count)
{
    return capture_details(1, s, status, id, graph, nodes, edges, count);
}

API CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
    CUresult r = sim_enter();
    if (r) return r;
    if (!mode || (int)*mode < CU_STREAM_CAPTURE_MODE_GLOBAL || (int)*mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    sim_thread *self = sim_self();
    int before = self->capture_mode;
    self->capture_mode = *mode;
    *mode = (CUstreamCaptureMode)before;
    return CUDA_SUCCESS;
}
