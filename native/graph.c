/*
 * graph.c: what functions and executable graphs are, and how the gate sends a long graph out in pieces.
 *
 * A best-effort graph that goes out whole keeps the requests of a high client waiting for as long as it runs, be that 89 ms
 * (GPT-2's training step). Preemption (preempt.c) takes it off the GPU; at the gate it is cut instead:
 *   - When the program instantiates a graph, a clone of it is kept, since programs destroy the graph itself right afterwards.
 *   - When the executable graph is launched, is known to last longer than a piece should, and this client is held at the gate,
 *     the clone is cut, once, by the launching thread: along a topological order into parts of about half the in-flight budget,
 *     by what is known of the kernels' durations. An executable graph is made of each part (graph-cut.c).
 *   - From then on a launch of the graph is a launch of the pieces on the same stream, one after the other, each through the
 *     gate with a duration of its own.
 * The driver's rule that a launch of an executable graph comes after its launches before holds for the pieces too: those on
 * one stream are in its order; for a launch on another stream an event follows the last piece, and is waited for there.
 *
 * Only kernels, copies, memsets, empty nodes and graphs of these are cut. Nodes that allocate or free, and conditional ones,
 * cannot be cloned (cuda.h, cuGraphClone), nodes updated from the GPU cannot be removed or instantiated twice (the same,
 * CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE). Host functions, events, semaphores and memory operations are how a graph and
 * the rest of the program wait for each other: with the launching thread still in the gate for the rest of the graph, what one of
 * them waits for might never be done. Kernels of other ranks' collectives are never held, and so never cut.
 *
 * A program that has another thread queue work on the graph's stream while it is being launched, in an order that the program leaves
 * open, may find it between two pieces. Whatever fails before the first piece is out makes the graph go out whole, as if
 * nothing of this were here; what fails later is the result of the program's call.
 */
#include "graph.h"
#include "record-client.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- what functions and graphs are ---- */

/* Executable graphs, each in one of some places from its own on. Where these are all taken a graph that does not communicate makes room,
 * and is not known any more. A graph that the program changes afterwards is known by what it was, but that it communicates from then on. */
typedef struct {
    _Atomic uintptr_t exec; /* 0: free; WRITING while the rest is being written */
    _Atomic bool communicates;
    _Atomic uint64_t hash;
    _Atomic uint32_t kernels;
    _Atomic uint32_t whole; /* enum rg_whole: why it is not cut; 0: it may be; with COUNTED, once that has been counted */
    char first[80]; /* name of the first kernel, cut to fit */
} graph_entry;
enum { GRAPHS = 1024, GRAPH_PROBES = 8 };
static graph_entry graphs[GRAPHS];
#define COUNTED 0x80000000u
#define WRITING ((uintptr_t)1)

static graph_entry *graph_place(CUgraphExec exec, uint32_t i)
{
    return &graphs[(((uint64_t)(uintptr_t)exec * 0x9e3779b97f4a7c15u >> 54) + i) % GRAPHS];
}

/* What is known of the graph; NULL: nothing. */
static graph_entry *graph_find(CUgraphExec exec)
{
    for (uint32_t i = 0; i < GRAPH_PROBES; i++)
        if (atomic_load_explicit(&graph_place(exec, i)->exec, memory_order_acquire) == (uintptr_t)exec)
            return graph_place(exec, i);
    return NULL;
}

/* A place for a graph that is new, to be written: a free one, one whose graph does not communicate, any. NULL: others are writing in all. */
static graph_entry *graph_take(CUgraphExec exec)
{
    for (int round = 0; round < 3; round++)
        for (uint32_t i = 0; i < GRAPH_PROBES; i++) {
            graph_entry *g = graph_place(exec, i);
            uintptr_t now = atomic_load(&g->exec);
            bool may = round == 0 ? now == 0 : now != WRITING && (round == 2 || !atomic_load(&g->communicates));
            if (may && atomic_compare_exchange_strong(&g->exec, &now, WRITING))
                return g;
        }
    return NULL;
}

void rg_functions_forget(void)
{
    rg_names_forget();
    rg_durations_doubt();
    rg_record_functions_forget();
}

/* NCCL's kernels are named ncclDevKernel_... (2.19 and later) or ncclKernel_...; NVSHMEM's nvshmem...  */
bool rg_name_communicates(const char *name)
{
    return name && (strncmp(name, "nccl", 4) == 0 || strncmp(name, "nvshmem", 7) == 0);
}

const char *rg_function_name(CUfunction f)
{
    const char *name = NULL;
    /* libcudart passes a CUkernel where a CUfunction is declared. The driver tells them apart, and so must we by asking: each
     * of the two answers CUDA_ERROR_INVALID_HANDLE for the other kind (seen on an H200, CUDA 13.0). */
    if (rg_real.cuFuncGetName && rg_real.cuFuncGetName(&name, f) == CUDA_SUCCESS)
        return name;
    return rg_real.cuKernelGetName && rg_real.cuKernelGetName(&name, (CUkernel)f) == CUDA_SUCCESS ? name : NULL;
}

typedef struct {
    bool communicates, nameless; /* nameless: some kernel's name cannot be had, and so what it is */
    bool kind; /* a node that is not cut */
    uint64_t hash;
    uint32_t kernels, nodes; /* nodes: of the graph itself, without those of child graphs */
    const char *first;
} graph_walk;

/* Whether kernels on the GPU may change this kernel node. */
static bool updatable(CUgraphNode node)
{
    CUlaunchAttributeValue value = {{0}};
    int is = 0;
    if (rg_real.cuGraphKernelNodeGetAttribute &&
        rg_real.cuGraphKernelNodeGetAttribute(node, CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE, &value) == CUDA_SUCCESS)
        memcpy(&is, &value, sizeof is);
    return is != 0;
}

static void walk_kernel(graph_walk *w, const CUDA_KERNEL_NODE_PARAMS *p)
{
    const char *name = rg_function_name(rg_node_function(p));
    rg_dims dims = rg_dims_of(p->gridDimX, p->gridDimY, p->gridDimZ, p->blockDimX, p->blockDimY, p->blockDimZ);
    w->communicates |= rg_name_communicates(name);
    w->nameless |= !name;
    if (name)
        w->hash = rg_hash_fold(rg_hash_fold(rg_hash_fold(w->hash, rg_text_hash(name)), dims.grid), dims.block);
    if (!w->kernels++)
        w->first = name;
}

static void walk_graph(graph_walk *w, CUgraph graph, int depth)
{
    CUgraphNode nodes[512];
    size_t n = 0;
    if (!rg_real.cuGraphGetNodes || !rg_real.cuGraphNodeGetType || depth > 4 ||
        rg_real.cuGraphGetNodes(graph, NULL, &n) != CUDA_SUCCESS) {
        w->nameless = true;
        return;
    }
    CUgraphNode *all = n <= 512 ? nodes : malloc(n * sizeof *all);
    if (!all || rg_real.cuGraphGetNodes(graph, all, &n) != CUDA_SUCCESS) {
        w->nameless = true;
        n = 0;
    }
    for (size_t i = 0; i < n && !w->communicates; i++) {
        int type = -1;
        CUDA_KERNEL_NODE_PARAMS params;
        CUgraph child;
        if (rg_real.cuGraphNodeGetType(all[i], &type) != CUDA_SUCCESS)
            w->nameless = true;
        w->hash = rg_hash_fold(w->hash, (uint64_t)type);
        w->nodes += depth == 0;
        w->kind |= type != CU_GRAPH_NODE_TYPE_KERNEL && type != CU_GRAPH_NODE_TYPE_MEMCPY && type != CU_GRAPH_NODE_TYPE_MEMSET &&
                   type != CU_GRAPH_NODE_TYPE_GRAPH && type != CU_GRAPH_NODE_TYPE_EMPTY;
        w->kind |= type == CU_GRAPH_NODE_TYPE_KERNEL && updatable(all[i]);
        if (type == CU_GRAPH_NODE_TYPE_KERNEL && rg_real.cuGraphKernelNodeGetParams_v2 &&
            rg_real.cuGraphKernelNodeGetParams_v2(all[i], &params) == CUDA_SUCCESS)
            walk_kernel(w, &params);
        else if (type == CU_GRAPH_NODE_TYPE_GRAPH && rg_real.cuGraphChildGraphNodeGetGraph &&
                 rg_real.cuGraphChildGraphNodeGetGraph(all[i], &child) == CUDA_SUCCESS)
            walk_graph(w, child, depth + 1);
        else if (type == CU_GRAPH_NODE_TYPE_KERNEL || type == CU_GRAPH_NODE_TYPE_GRAPH)
            w->nameless = true;
    }
    if (all != nodes)
        free(all);
}

/* This thread's capture mode from now on; returns the one before. */
static CUstreamCaptureMode exchange(CUstreamCaptureMode mode)
{
    if (rg_real.cuThreadExchangeStreamCaptureMode)
        rg_real.cuThreadExchangeStreamCaptureMode(&mode);
    return mode;
}

static void keep(CUgraphExec exec, CUgraph graph, unsigned long long flags, uint32_t nodes);
static void forget_former(CUgraphExec exec);

enum { LEAST_NODES = 8 };

void rg_graph_note(CUgraphExec exec, CUgraph graph, unsigned long long flags)
{
    graph_walk w = {.hash = 1};
    CUstreamCaptureMode mode = exchange(CU_STREAM_CAPTURE_MODE_RELAXED);
    walk_graph(&w, graph, 0);
    bool kind = w.kind || flags & CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH;
    /* Of kernels without names some may communicate. */
    uint32_t whole = kind                   ? RG_WHOLE_KIND
                     : w.nodes < LEAST_NODES ? RG_WHOLE_FEW
                     : w.nameless            ? RG_WHOLE_DRIVER
                                             : RG_WHOLE_NONE;
    /* The driver gives the handles of graphs that are gone out again. */
    rg_graph_unknown(exec);
    forget_former(exec);
    graph_entry *g = graph_take(exec);
    if (g) {
        atomic_store(&g->hash, w.nameless ? 0 : w.hash | 1);
        atomic_store(&g->kernels, w.kernels);
        atomic_store(&g->whole, whole);
        size_t length = w.first ? strnlen(w.first, sizeof g->first - 1) : 0;
        for (size_t i = 0; i < sizeof g->first - 1; i++)
            __atomic_store_n(&g->first[i], i < length ? w.first[i] : 0, __ATOMIC_RELAXED);
        atomic_store(&g->communicates, w.communicates);
        atomic_store(&g->exec, (uintptr_t)exec);
    }
    rg_duration_reset(rg_duration_key((uintptr_t)exec, RG_DIMS_UNIT), 0);
    if ((atomic_load(&rg.mode) & RG_MODE_BEST_EFFORT) && !w.communicates && !whole)
        keep(exec, graph, flags, w.nodes);
    exchange(mode);
}

void rg_graph_known(CUgraphExec exec, rg_graph_facts *facts)
{
    graph_entry *g = graph_find(exec);
    *facts = (rg_graph_facts){0};
    if (!g)
        return;
    char first[sizeof g->first] = "";
    bool communicates = atomic_load(&g->communicates);
    uint64_t hash = atomic_load(&g->hash);
    uint32_t kernels = atomic_load(&g->kernels);
    for (size_t i = 0; i < sizeof first - 1; i++)
        first[i] = __atomic_load_n(&g->first[i], __ATOMIC_RELAXED);
    if (atomic_load(&g->exec) != (uintptr_t)exec)
        return; /* another graph has come to this place meanwhile */
    facts->communicates = communicates;
    facts->hash = hash;
    snprintf(facts->label, sizeof facts->label, "graph of %u kernels%s%s", kernels, first[0] ? " from " : "", first);
}

void rg_graph_unknown(CUgraphExec exec)
{
    graph_entry *g = graph_find(exec);
    uintptr_t its = (uintptr_t)exec;
    if (g)
        atomic_compare_exchange_strong(&g->exec, &its, 0);
}

/* ---- graphs that may be cut ---- */

enum {
    KEPT = 128,           /* graphs of which a clone or pieces are kept at once */
    KEPT_NODES = 1 << 16, /* in all clones together */
};
/* A shorter piece would cost more to launch than it is worth to the high client; a longer one keeps that waiting. */
#define PIECE_LEAST_NS 200000u
#define PIECE_MOST_NS 400000u

typedef struct {
    _Atomic uintptr_t exec; /* 0: free, or being filled */
    pthread_mutex_t lock;   /* over what follows; held while the pieces of one launch go out, so that those of two do not mix */
    uint32_t whole;         /* enum rg_whole: goes out whole from now on */
    uint32_t moves;         /* launches that were to be in pieces but for another stream or context */
    bool counted;           /* that is counted */
    bool guessed;           /* guess_ns is made */
    uint32_t guess_ns;      /* what its kernels' durations add up to, where all are known; else 0 */
    unsigned long long flags;
    _Atomic(CUcontext) context; /* current when it was instantiated */
    _Atomic CUdevice device;
    CUgraph clone;
    uint32_t nodes; /* of the clone */
    rg_pieces pieces;
    uint32_t last; /* serial of the track that it was launched on last; 0: none, or not known */
    bool in_pieces; /* that time; `done` follows the last piece */
    CUevent done;
} kept_graph;

static kept_graph kept[KEPT] = {[0 ... KEPT - 1] = {.lock = PTHREAD_MUTEX_INITIALIZER}};
static _Atomic uint32_t kept_high; /* places of `kept` ever used */
static _Atomic uint32_t kept_nodes;
static pthread_mutex_t kept_lock = PTHREAD_MUTEX_INITIALIZER; /* over taking a place */

/* The graph's place, locked; NULL if none is kept. */
static kept_graph *find(CUgraphExec exec)
{
    uint32_t n = atomic_load_explicit(&kept_high, memory_order_acquire);
    for (uint32_t i = 0; i < n; i++) {
        if (atomic_load_explicit(&kept[i].exec, memory_order_relaxed) != (uintptr_t)exec)
            continue;
        pthread_mutex_lock(&kept[i].lock);
        if (atomic_load(&kept[i].exec) == (uintptr_t)exec)
            return &kept[i];
        pthread_mutex_unlock(&kept[i].lock);
    }
    return NULL;
}

/* Gives everything back that was made of the graph; what is still running runs on. `gone`: with its context, it has been already. */
static void drop(kept_graph *k, bool gone)
{
    rg_pieces_drop(&k->pieces, gone);
    if (k->clone && !gone)
        rg_real.cuGraphDestroy(k->clone);
    atomic_fetch_sub(&kept_nodes, k->clone ? k->nodes : 0);
    k->clone = NULL;
}

/* Nothing is kept of the graph any more, and its place is free. */
static void forget(kept_graph *k, bool gone)
{
    drop(k, gone);
    if (k->done && !gone)
        RG_REAL(cuEventDestroy_v2)(k->done);
    k->done = NULL;
    k->in_pieces = false;
    atomic_store(&k->exec, 0);
}

/* What is kept of a graph that had this handle, and went in a way that we do not see: whatever the one is that has it now, its pieces are not that. */
static void forget_former(CUgraphExec exec)
{
    kept_graph *k = find(exec);
    if (!k)
        return;
    forget(k, true);
    pthread_mutex_unlock(&k->lock);
}

static void keep(CUgraphExec exec, CUgraph graph, unsigned long long flags, uint32_t nodes)
{
    CUgraph clone = NULL;
    CUcontext context = NULL;
    CUdevice device = -1;
    kept_graph *k = NULL;
    bool can = rg_real.cuGraphClone && rg_real.cuGraphNodeFindInClone && rg_real.cuGraphDestroyNode && rg_real.cuGraphDestroy &&
               (rg_real.cuGraphGetEdges_v2 || rg_real.cuGraphGetEdges) && rg_real.cuStreamWaitEvent &&
               RG_REAL(cuGraphInstantiateWithFlags) && RG_REAL(cuGraphExecDestroy) &&
               rg_real.cuCtxGetCurrent(&context) == CUDA_SUCCESS && context && rg_real.cuCtxGetDevice(&device) == CUDA_SUCCESS;
    bool room = can && atomic_fetch_add(&kept_nodes, nodes) + nodes <= KEPT_NODES;
    if (can && !room)
        atomic_fetch_sub(&kept_nodes, nodes);
    if (room && (rg_real.cuGraphClone(&clone, graph) != CUDA_SUCCESS || !clone)) {
        clone = NULL;
        can = false;
        atomic_fetch_sub(&kept_nodes, nodes);
    }
    pthread_mutex_lock(&kept_lock);
    for (uint32_t i = 0; clone && i < KEPT && !k; i++) {
        if (atomic_load(&kept[i].exec))
            continue;
        k = &kept[i];
        pthread_mutex_lock(&k->lock);
        k->whole = RG_WHOLE_NONE;
        k->counted = k->guessed = k->in_pieces = false;
        k->guess_ns = k->last = k->moves = 0;
        k->flags = flags;
        atomic_store(&k->context, context);
        atomic_store(&k->device, device);
        k->clone = clone;
        k->nodes = nodes;
        atomic_store(&k->exec, (uintptr_t)exec);
        if (i >= atomic_load(&kept_high))
            atomic_store_explicit(&kept_high, i + 1, memory_order_release);
        pthread_mutex_unlock(&k->lock);
    }
    pthread_mutex_unlock(&kept_lock);
    if (clone && !k) {
        rg_real.cuGraphDestroy(clone);
        atomic_fetch_sub(&kept_nodes, nodes);
    }
    graph_entry *g = k ? NULL : graph_find(exec);
    if (g)
        atomic_store(&g->whole, can ? RG_WHOLE_ROOM : RG_WHOLE_DRIVER);
}

/* ---- launching ---- */

/* How long a piece should be: half of what may be in flight, as one half keeps the GPU fed while the other is waited for. Where
 * streams stop they do so between pieces: as long as between two stops. 0: this client's graphs go out whole. */
static uint64_t piece_wanted_ns(uint32_t mode, const rg_track *t)
{
    if (!t || !(mode & RG_MODE_BEST_EFFORT))
        return 0;
    rg_policy_view v = rg_gate_view(t);
    bool stops = atomic_load_explicit(&rg.preemptible[rg_track_device(t)], memory_order_relaxed) == RG_STOPPABLE;
    if (v.policy == RG_POLICY_NONE || (v.preemptible && !stops) || (!v.inflight_limit && !stops))
        return 0;
    uint64_t unit_us = atomic_load_explicit(&rg.segment->settings.unit_us, memory_order_relaxed);
    uint64_t half_ns = stops ? atomic_load_explicit(&rg.segment->settings.stop_us, memory_order_relaxed) * 1000ull
                             : (uint64_t)v.inflight_limit / RG_POLICY_LAUNCH * (unit_us ? unit_us : 100) * 1000 / 2;
    return half_ns < PIECE_LEAST_NS ? PIECE_LEAST_NS : half_ns > PIECE_MOST_NS ? PIECE_MOST_NS : half_ns;
}

/* Whether two pieces can be made of it. */
static bool too_long(uint64_t ns, uint64_t piece_ns)
{
    return ns >= piece_ns + piece_ns / 2;
}

static void count_whole(rg_member *m, uint32_t why)
{
    atomic_store_explicit(&m->slot->graph_whole, why, memory_order_relaxed);
    atomic_fetch_add_explicit(&m->slot->graphs_whole, 1, memory_order_relaxed);
}

/* What is launched on this stream next comes after the pieces that were launched last. */
static void come_after_pieces(kept_graph *k, CUstream stream, uint32_t serial)
{
    if (k->in_pieces && (!serial || serial != k->last))
        rg_real.cuStreamWaitEvent(stream, k->done, 0);
}

static CUresult launch_piece(rg_member *m, uint32_t mode, CUgraphExec piece, CUstream stream, rg_track *t, bool first,
                             uint32_t name)
{
    rg_work work = first ? rg_work_begin(m, mode, RG_GRAPH, t, (uintptr_t)piece, RG_DIMS_UNIT)
                         : rg_work_pass(m, mode, RG_GRAPH, t, (uintptr_t)piece, RG_DIMS_UNIT);
    rg_op op = rg_op_begin(RG_OP_cuGraphLaunch, false);
    uint64_t marks = rg_launch_note(op.row, t, RG_GRAPH, name, RG_OP_cuGraphLaunch);
    uint64_t noted = rg_op_note(&op, RG_TRACE_graph, marks, name | rg_work_depth(m, work) << 16);
    CUresult r = RG_REAL(cuGraphLaunch)(piece, stream);
    rg_op_done(&op, noted, r != CUDA_SUCCESS);
    rg_work_end(m, mode, RG_GRAPH, work, r == CUDA_SUCCESS);
    return r;
}

/* All pieces, in order, each as what its client is by then: it may have been paused, or become a high one, since the first went out. False: not even
 * that one did. `counted`: one has been noted as a launch of the client. */
static bool launch_pieces(kept_graph *k, rg_member *m, uint32_t mode, CUstream stream, rg_track *t, CUresult *result, bool *counted)
{
    uint32_t name = rg_name_of(true, atomic_load(&k->exec)), p = 0;
    *result = CUDA_SUCCESS;
    *counted = false;
    for (; p < k->pieces.count; p++) {
        /* Somebody began a capture, or its work goes past Rigel: from now on nothing is added to what the program does. */
        uint32_t now = p == 0 ? mode : atomic_load(&m->mode);
        bool past = atomic_load(&rg.captures) || now == RG_MODE_BARE || atomic_load(&rg.mode) == RG_MODE_BARE;
        *counted |= !past && p == 0;
        *result = past ? RG_REAL(cuGraphLaunch)(k->pieces.execs[p], stream)
                       : launch_piece(m, now, k->pieces.execs[p], stream, t, p == 0, name);
        if (*result != CUDA_SUCCESS)
            break;
    }
    atomic_fetch_add_explicit(&m->slot->graph_pieces, p, memory_order_relaxed);
    if (!p)
        return false;
    /* Should no event follow the pieces, the stream is waited for: what is launched on another one must come after them. */
    if (RG_REAL(cuEventRecord)(k->done, stream) != CUDA_SUCCESS)
        RG_REAL(cuStreamSynchronize)(stream);
    return true;
}

/* Makes pieces of the clone, which goes. If there are none afterwards, `whole` says why. */
static void cut(kept_graph *k, rg_member *m, const rg_track *t, uint64_t total_ns, uint64_t piece_ns)
{
    CUgraph clone = k->clone;
    k->clone = NULL;
    atomic_fetch_sub(&kept_nodes, k->nodes);
    if (!k->done && RG_REAL(cuEventCreate)(&k->done, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS) {
        rg_real.cuGraphDestroy(clone);
        k->done = NULL;
        k->whole = RG_WHOLE_DRIVER;
        return;
    }
    k->whole = rg_pieces_make(&k->pieces, clone, k->flags & CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY, t, total_ns, piece_ns);
    atomic_fetch_add_explicit(&m->slot->graphs_cut, !k->whole, memory_order_relaxed);
}

/* Whether the graph is to go out in pieces now; cuts it if so and if it is not yet. */
static bool in_pieces(kept_graph *k, rg_member *m, const rg_track *t, const rg_duration *d, uint64_t piece_ns)
{
    CUcontext current = NULL;
    uint64_t ns = atomic_load_explicit(&d->duration_ns, memory_order_relaxed);
    if (k->pieces.count)
        return t->context == k->context;
    if (!ns && atomic_load_explicit(&d->seen, memory_order_relaxed)) {
        rg_samples_poll(); /* the gate polls only where somebody waits */
        ns = atomic_load_explicit(&d->duration_ns, memory_order_relaxed);
    }
    if (!ns && !k->whole && !k->guessed) {
        k->guess_ns = rg_pieces_guess(k->clone, t);
        k->guessed = true;
    }
    ns = ns ? ns : k->guess_ns;
    if (!too_long(ns, piece_ns))
        return false;
    /* A launch of the whole may still run on the stream of the last time, with no event after it: once more, then it is in order. */
    bool moved = !k->whole && k->last && k->last != atomic_load_explicit(&t->serial, memory_order_relaxed);
    bool here = t->context == k->context && rg_real.cuCtxGetCurrent(&current) == CUDA_SUCCESS && current == t->context;
    if (!k->whole && !moved && here)
        cut(k, m, t, ns, piece_ns);
    k->moves += moved || !here;
    uint32_t why = k->whole ? k->whole : k->moves > 1 && !k->pieces.count ? RG_WHOLE_STREAMS : RG_WHOLE_NONE;
    if (why && !k->counted) {
        k->counted = true;
        count_whole(m, why);
    }
    return k->pieces.count;
}

bool rg_graph_launch(rg_member *m, uint32_t mode, CUgraphExec exec, CUstream stream, rg_track *t, CUresult *result)
{
    uint64_t piece_ns = piece_wanted_ns(mode, t);
    kept_graph *k = find(exec);
    rg_duration *d = piece_ns ? rg_duration_of(rg_duration_key((uintptr_t)exec, RG_DIMS_UNIT)) : NULL;
    if (!k) {
        graph_entry *g = d ? graph_find(exec) : NULL;
        uint32_t why = g ? atomic_load_explicit(&g->whole, memory_order_relaxed) : RG_WHOLE_NONE;
        if (why && !(why & COUNTED) && too_long(atomic_load_explicit(&d->duration_ns, memory_order_relaxed), piece_ns) &&
            atomic_compare_exchange_strong(&g->whole, &why, why | COUNTED))
            count_whole(m, why);
        return false;
    }
    /* A thread that is cancelled at the gate must not take the lock with it. */
    int cancel;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
    /* Known from an earlier run, or from another client of this program, it is cut at once. */
    if (d && !atomic_load_explicit(&d->seen, memory_order_relaxed))
        rg_duration_first(d, t, RG_GRAPH, (uintptr_t)exec, RG_DIMS_UNIT);
    CUstreamCaptureMode capture = exchange(CU_STREAM_CAPTURE_MODE_RELAXED);
    uint32_t serial = t ? atomic_load_explicit(&t->serial, memory_order_relaxed) : 0;
    bool pieces = d && in_pieces(k, m, t, d, piece_ns);
    /* From the whole on one stream to the pieces on another there is no event to wait for. */
    if (pieces && !k->in_pieces && k->last && k->last != serial)
        pieces = false;
    come_after_pieces(k, stream, serial);
    k->last = serial ? serial : UINT32_MAX;
    bool counted;
    if (pieces && !launch_pieces(k, m, mode, stream, t, result, &counted)) {
        /* Nothing has gone out: the whole may, and if not it is the driver's answer that the program gets. */
        atomic_fetch_sub_explicit(&m->slot->graph_launches, counted, memory_order_relaxed);
        drop(k, false);
        k->whole = RG_WHOLE_DRIVER;
        pieces = false;
    }
    k->in_pieces = pieces;
    pthread_mutex_unlock(&k->lock);
    pthread_setcancelstate(cancel, NULL);
    exchange(capture);
    return pieces;
}

void rg_graph_passes(CUgraphExec exec, CUstream stream)
{
    kept_graph *k = find(exec);
    if (!k)
        return;
    const rg_track *t = rg_track_find(rg_track_key(stream));
    uint32_t serial = t ? atomic_load_explicit(&t->serial, memory_order_relaxed) : 0;
    int status = CU_STREAM_CAPTURE_STATUS_NONE;
    if (rg_real.cuStreamIsCapturing(stream, &status) == CUDA_SUCCESS && status == CU_STREAM_CAPTURE_STATUS_NONE) {
        come_after_pieces(k, stream, serial); /* else it does not run now, but becomes part of another graph */
        k->last = serial ? serial : UINT32_MAX;
        k->in_pieces = false;
    }
    pthread_mutex_unlock(&k->lock);
}

/* It communicates, for all that is known of it from now on. */
static void communicates_now(CUgraphExec exec)
{
    graph_entry *g = graph_find(exec);
    if (g)
        atomic_store(&g->communicates, true);
    atomic_store(&rg_duration_of(rg_duration_key((uintptr_t)exec, RG_DIMS_UNIT))->communicates, true);
}

void rg_graph_changed(CUgraphExec exec, CUgraph graph, CUfunction function)
{
    graph_walk w = {.hash = 1};
    kept_graph *k = find(exec);
    if (!k && !(atomic_load(&rg.mode) & RG_MODE_BEST_EFFORT))
        return;
    CUstreamCaptureMode mode = exchange(CU_STREAM_CAPTURE_MODE_RELAXED);
    if (graph)
        walk_graph(&w, graph, 0);
    if (w.communicates || (function && rg_name_communicates(rg_function_name(function))))
        communicates_now(exec);
    if (k) {
        drop(k, false);
        k->whole = RG_WHOLE_CHANGED;
    }
    exchange(mode);
    if (k)
        pthread_mutex_unlock(&k->lock);
}

void rg_graph_forget(CUgraphExec exec)
{
    rg_graph_unknown(exec);
    kept_graph *k = find(exec);
    if (!k)
        return;
    CUstreamCaptureMode mode = exchange(CU_STREAM_CAPTURE_MODE_RELAXED);
    forget(k, false);
    exchange(mode);
    pthread_mutex_unlock(&k->lock);
}

static bool is_of(kept_graph *k, CUcontext context, CUdevice d)
{
    return atomic_load(&k->exec) && (context ? atomic_load(&k->context) == context : atomic_load(&k->device) == d);
}

void rg_graph_forget_context(CUcontext context, CUdevice d)
{
    for (uint32_t i = 0; i < atomic_load(&kept_high); i++) {
        /* One of another context may be on its way out, and wait at the gate for each of its pieces. */
        if (!is_of(&kept[i], context, d))
            continue;
        pthread_mutex_lock(&kept[i].lock);
        if (is_of(&kept[i], context, d))
            forget(&kept[i], true);
        pthread_mutex_unlock(&kept[i].lock);
    }
}
