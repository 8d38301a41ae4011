/*
 * graph-cut.c: cuts a graph into executable graphs that follow one another: order, durations, parts. graph.c says what for.
 *
 * A part is what is left of a clone when the rest has been destroyed in it, so nodes keep whatever they have. It lies between two
 * points of a topological order, so no path from one node of it to another leads outside; what led outside is left to the
 * order in which the pieces are launched. Cutting goes by halves of halves: n nodes in p pieces take n log p clones and
 * removals, not n p.
 */
#include "graph.h"

#include <stdlib.h>
#include <string.h>

enum {
    MOST_PIECES = 1 << 12, /* at once, of all graphs together */
    GRAPH_PIECES = 512,    /* of one graph */
};
/* What a node counts for of which nothing is known, where no more than that is left. */
#define NODE_NS 2000u

static _Atomic uint32_t made;

/* ---- order ---- */

typedef struct {
    CUgraphNode node;
    uint32_t index; /* among the graph's nodes */
} place_of_node;

static int by_node(const void *a, const void *b)
{
    uintptr_t x = (uintptr_t)((const place_of_node *)a)->node, y = (uintptr_t)((const place_of_node *)b)->node;
    return (x > y) - (x < y);
}

static int by_index(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

/* The edges: from and to one after the other, to be freed; `n` of them. NULL if they cannot be had, a true pointer if there are none. */
static CUgraphNode *edges_of(CUgraph graph, size_t *n)
{
    CUresult r = rg_real.cuGraphGetEdges_v2 ? rg_real.cuGraphGetEdges_v2(graph, NULL, NULL, NULL, n)
                                            : rg_real.cuGraphGetEdges(graph, NULL, NULL, n);
    /* What is said of an edge (cuda.h, CUgraphEdgeData) has 8 bytes, and is asked for as edges that say something cannot be had
     * without. */
    CUgraphNode *edges = r == CUDA_SUCCESS ? calloc(3 * *n + 1, sizeof *edges) : NULL;
    if (edges && *n) {
        CUgraphNode *to = edges + *n;
        r = rg_real.cuGraphGetEdges_v2 ? rg_real.cuGraphGetEdges_v2(graph, edges, to, (uint64_t *)(void *)(to + *n), n)
                                       : rg_real.cuGraphGetEdges(graph, edges, to, n);
    }
    if (r == CUDA_SUCCESS)
        return edges;
    free(edges);
    return NULL;
}

/* The edges as pairs of indices among the nodes, from and to one after the other; false if an end of one is no node of the graph. */
static bool resolve(const CUgraphNode *nodes, uint32_t n, const CUgraphNode *edges, size_t edge_count, uint32_t *ends)
{
    place_of_node *places = calloc(n, sizeof *places);
    bool ok = places;
    for (uint32_t i = 0; ok && i < n; i++)
        places[i] = (place_of_node){.node = nodes[i], .index = i};
    if (ok)
        qsort(places, n, sizeof *places, by_node);
    for (size_t e = 0; ok && e < 2 * edge_count; e++) {
        place_of_node wanted = {.node = edges[e]}, *found = bsearch(&wanted, places, n, sizeof *places, by_node);
        ok = found;
        ends[e] = found ? found->index : 0;
    }
    free(places);
    return ok;
}

/*
 * Indices in a topological order: in rounds, each of which takes, in the order of the indices, what waits for nothing any more. False if
 * there is none, or no memory.
 */
static bool sort_by_rounds(uint32_t n, const uint32_t *from, const uint32_t *to, size_t edge_count, uint32_t *order)
{
    /* Whom node i is waited for by: followers[begins[i]..begins[i + 1]); and how many each waits for. */
    size_t *begins = calloc(n + 2u, sizeof *begins);
    uint32_t *followers = calloc(edge_count + 1, sizeof *followers), *waits = calloc(n, sizeof *waits), taken = 0;
    bool ok = begins && followers && waits;
    for (size_t e = 0; ok && e < edge_count; e++) {
        begins[from[e] + 2]++;
        waits[to[e]]++;
    }
    for (uint32_t i = 0; ok && i < n; i++) {
        begins[i + 1] += begins[i];
        if (!waits[i])
            order[taken++] = i;
    }
    for (size_t e = 0; ok && e < edge_count; e++)
        followers[begins[from[e] + 1]++] = to[e];
    for (uint32_t done = 0, round = taken; ok && done < taken; round = taken) {
        for (; done < round; done++)
            for (size_t f = begins[order[done]]; f < begins[order[done] + 1]; f++)
                if (!--waits[followers[f]])
                    order[taken++] = followers[f];
        qsort(order + round, taken - round, sizeof *order, by_index);
    }
    free(begins);
    free(followers);
    free(waits);
    return ok && taken == n;
}

/*
 * The graph's nodes in a topological order, to be freed; `n` of them. The driver's own where it is one: it is that of the
 * program, which put together what belongs together.
 */
static CUgraphNode *ordered_nodes(CUgraph graph, uint32_t *n)
{
    size_t count = 0, edge_count = 0;
    if (rg_real.cuGraphGetNodes(graph, NULL, &count) != CUDA_SUCCESS || !count)
        return NULL;
    CUgraphNode *nodes = calloc(2 * count, sizeof *nodes), *listed = nodes ? nodes + count : NULL;
    CUgraphNode *edges = edges_of(graph, &edge_count);
    uint32_t *ends = calloc(2 * edge_count + count, sizeof *ends), *order = ends ? ends + 2 * edge_count : NULL;
    bool ok = nodes && edges && ends && rg_real.cuGraphGetNodes(graph, nodes, &count) == CUDA_SUCCESS &&
              resolve(nodes, (uint32_t)count, edges, edge_count, ends);
    bool sorted = true;
    for (size_t e = 0; ok && e < edge_count; e++)
        sorted &= ends[e] < ends[edge_count + e];
    if (ok && !sorted) {
        memcpy(listed, nodes, count * sizeof *nodes);
        ok = sort_by_rounds((uint32_t)count, ends, ends + edge_count, edge_count, order);
        for (uint32_t i = 0; ok && i < count; i++)
            nodes[i] = listed[order[i]];
    }
    free(edges);
    free(ends);
    if (!ok) {
        free(nodes);
        return NULL;
    }
    *n = (uint32_t)count;
    return nodes;
}

/* ---- durations ---- */

/* How long a node takes, as far as is known; 0: not known. `unknown` becomes true if that is so of a kernel. */
static uint64_t node_ns(CUgraphNode node, const rg_track *t, bool *unknown)
{
    int type = -1;
    CUDA_KERNEL_NODE_PARAMS p;
    CUgraph child;
    uint64_t ns = 0;
    if (rg_real.cuGraphNodeGetType(node, &type) != CUDA_SUCCESS)
        return 0;
    if (type == CU_GRAPH_NODE_TYPE_KERNEL) {
        const char *name = NULL;
        if (rg_real.cuGraphKernelNodeGetParams_v2 && rg_real.cuGraphKernelNodeGetParams_v2(node, &p) == CUDA_SUCCESS)
            name = rg_function_name(rg_node_function(&p));
        if (name)
            ns = rg_duration_elsewhere(
                t, name, rg_dims_of(p.gridDimX, p.gridDimY, p.gridDimZ, p.blockDimX, p.blockDimY, p.blockDimZ));
        *unknown |= !ns;
    } else if (type == CU_GRAPH_NODE_TYPE_GRAPH && rg_real.cuGraphChildGraphNodeGetGraph &&
               rg_real.cuGraphChildGraphNodeGetGraph(node, &child) == CUDA_SUCCESS) {
        size_t n = 0;
        if (rg_real.cuGraphGetNodes(child, NULL, &n) != CUDA_SUCCESS || !n)
            return 0;
        CUgraphNode *nodes = calloc(n, sizeof *nodes);
        if (nodes && rg_real.cuGraphGetNodes(child, nodes, &n) == CUDA_SUCCESS)
            for (size_t i = 0; i < n; i++)
                ns += node_ns(nodes[i], t, unknown);
        free(nodes);
    }
    return ns;
}

uint32_t rg_pieces_guess(CUgraph graph, const rg_track *t)
{
    bool unknown = false;
    uint64_t sum = 0;
    size_t n = 0;
    CUgraphNode *nodes = rg_real.cuGraphGetNodes(graph, NULL, &n) == CUDA_SUCCESS ? calloc(n + 1, sizeof *nodes) : NULL;
    if (!nodes || rg_real.cuGraphGetNodes(graph, nodes, &n) != CUDA_SUCCESS)
        unknown = true;
    for (size_t i = 0; i < n && !unknown; i++)
        sum += node_ns(nodes[i], t, &unknown);
    free(nodes);
    return unknown ? 0 : sum < UINT32_MAX ? (uint32_t)sum : UINT32_MAX;
}

/* Fills in what the nodes take that are not known, so that all add up to `total_ns`. Zero becomes of none. */
static void level(uint64_t *ns, uint32_t n, uint64_t total_ns)
{
    uint64_t known = 0, unknown = 0;
    for (uint32_t i = 0; i < n; i++) {
        known += ns[i];
        unknown += !ns[i];
    }
    uint64_t rest = total_ns > known ? total_ns - known : 0;
    uint64_t each = unknown == n ? total_ns / n : unknown && rest / unknown > NODE_NS ? rest / unknown : NODE_NS;
    uint64_t sum = known + unknown * each;
    for (uint32_t i = 0; i < n; i++) {
        ns[i] = (uint64_t)((double)(ns[i] ? ns[i] : each) * (double)total_ns / (double)(sum ? sum : 1));
        ns[i] += !ns[i];
    }
}

/* ---- parts ---- */

/*
 * Where pieces of about `piece_ns` begin: begins[0..pieces], the last being n. A piece ends where the next node would bring it
 * further from that than it is.
 */
static uint32_t divide(const uint64_t *ns, uint32_t n, uint64_t piece_ns, uint32_t *begins)
{
    uint32_t pieces = 0;
    uint64_t in = 0;
    begins[0] = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (in && in + ns[i] / 2 > piece_ns) {
            begins[++pieces] = i;
            in = 0;
        }
        in += ns[i];
    }
    begins[++pieces] = n;
    return pieces;
}

/* Makes pieces[from..to) of the graph, which is given up whatever becomes of it. `nodes` are those of the graph, in order. */
static bool split(CUgraph graph, CUgraphNode *nodes, uint32_t from, uint32_t to, const uint32_t *begins, CUstream stream,
                  unsigned long long flags, CUgraphExec *pieces)
{
    if (to - from == 1) {
        CUresult r = RG_REAL(cuGraphInstantiateWithFlags)(&pieces[from], graph, flags);
        rg_real.cuGraphDestroy(graph);
        if (r != CUDA_SUCCESS)
            pieces[from] = NULL;
        /* Memory that it takes on the GPU is missed now rather than in the middle of a launch. */
        else if (rg_real.cuGraphUpload)
            r = rg_real.cuGraphUpload(pieces[from], stream);
        return r == CUDA_SUCCESS;
    }
    uint32_t middle = from + (to - from) / 2, left = begins[middle] - begins[from], n = begins[to] - begins[from];
    CUgraph second = NULL;
    CUgraphNode *copies = calloc(n, sizeof *copies);
    bool ok = copies && rg_real.cuGraphClone(&second, graph) == CUDA_SUCCESS;
    for (uint32_t i = 0; ok && i < n; i++)
        ok = rg_real.cuGraphNodeFindInClone(&copies[i], nodes[i], second) == CUDA_SUCCESS;
    for (uint32_t i = 0; ok && i < n; i++)
        ok = rg_real.cuGraphDestroyNode(i < left ? copies[i] : nodes[i]) == CUDA_SUCCESS;
    if (ok)
        ok = split(graph, nodes, from, middle, begins, stream, flags, pieces);
    else
        rg_real.cuGraphDestroy(graph);
    if (ok)
        ok = split(second, copies + left, middle, to, begins, stream, flags, pieces);
    else if (second)
        rg_real.cuGraphDestroy(second);
    free(copies);
    return ok;
}

/* What is known of the nodes' durations, with the rest filled in; to be freed. */
static uint64_t *durations_of(CUgraphNode *nodes, uint32_t n, const rg_track *t, uint64_t total_ns)
{
    bool unknown = false;
    uint64_t *ns = calloc(n, sizeof *ns);
    for (uint32_t i = 0; ns && i < n; i++)
        ns[i] = node_ns(nodes[i], t, &unknown);
    if (ns)
        level(ns, n, total_ns);
    return ns;
}

static void enter_durations(const rg_pieces *pieces, const uint64_t *ns, const uint32_t *begins)
{
    for (uint32_t p = 0; p < pieces->count; p++) {
        uint64_t sum = 0;
        for (uint32_t i = begins[p]; i < begins[p + 1]; i++)
            sum += ns[i];
        rg_graph_unknown(pieces->execs[p]); /* the driver gives the handles of graphs that are gone out again */
        rg_duration_reset(rg_duration_key((uintptr_t)pieces->execs[p], RG_DIMS_UNIT),
                          sum < UINT32_MAX ? (uint32_t)sum : UINT32_MAX);
    }
}

enum rg_whole rg_pieces_make(rg_pieces *pieces, CUgraph graph, unsigned long long flags, const rg_track *t,
                             uint64_t total_ns, uint64_t piece_ns)
{
    enum rg_whole why = RG_WHOLE_DRIVER;
    uint32_t n = 0, count = 0;
    CUgraphNode *nodes = ordered_nodes(graph, &n);
    uint64_t *ns = nodes ? durations_of(nodes, n, t, total_ns) : NULL;
    uint32_t *begins = nodes ? calloc(n + 1u, sizeof *begins) : NULL;
    if (ns && begins) {
        do
            count = divide(ns, n, piece_ns, begins);
        while (count > GRAPH_PIECES && (piece_ns *= 2));
        why = count < 2 ? RG_WHOLE_ONE : atomic_fetch_add(&made, count) + count > MOST_PIECES ? RG_WHOLE_ROOM : RG_WHOLE_NONE;
        if (why == RG_WHOLE_ROOM)
            atomic_fetch_sub(&made, count);
    }
    if (why == RG_WHOLE_NONE) {
        *pieces = (rg_pieces){.execs = calloc(count, sizeof *pieces->execs), .count = count};
        if (pieces->execs && split(graph, nodes, 0, count, begins, t->stream, flags, pieces->execs)) {
            enter_durations(pieces, ns, begins);
        } else {
            if (!pieces->execs)
                rg_real.cuGraphDestroy(graph);
            rg_pieces_drop(pieces, false);
            why = RG_WHOLE_DRIVER;
        }
    } else {
        rg_real.cuGraphDestroy(graph);
    }
    free(nodes);
    free(ns);
    free(begins);
    return why;
}

void rg_pieces_drop(rg_pieces *pieces, bool gone)
{
    for (uint32_t i = 0; pieces->execs && i < pieces->count && !gone; i++)
        if (pieces->execs[i])
            RG_REAL(cuGraphExecDestroy)(pieces->execs[i]);
    atomic_fetch_sub(&made, pieces->count);
    free(pieces->execs);
    *pieces = (rg_pieces){0};
}
