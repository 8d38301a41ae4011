/*
 * test-graph.c: best-effort graphs at the gate go out in pieces, on the simulated GPU.
 *
 * The client's parts are linked into this program, so that the driver's functions behind them can be watched, and made to fail, by
 * putting another function into rg_real. What a graph does is copies besides kernels: their data show what ran before what.
 */
#include "client-testing.h"
#include "graph.h"

enum { CELL = 64 };

static CUstream stream;

/* ---- the driver, watched ---- */

static rg_driver plain; /* as it was */
static _Atomic int alive; /* clones and executable graphs of Rigel's */
static _Atomic int calls, fail_at; /* calls that can be made to fail; which of them does, 0: none */
static _Atomic int launches, launch_fails_at, busy_at, event_waits;
static CUgraphExec launched[4096];

static bool failing(void)
{
    return atomic_fetch_add(&calls, 1) + 1 == atomic_load(&fail_at);
}

static CUresult clone_graph(CUgraph *clone, CUgraph graph)
{
    CUresult r = failing() ? CUDA_ERROR_OUT_OF_MEMORY : plain.cuGraphClone(clone, graph);
    atomic_fetch_add(&alive, r == CUDA_SUCCESS);
    return r;
}

static CUresult find_node(CUgraphNode *found, CUgraphNode node, CUgraph clone)
{
    return failing() ? CUDA_ERROR_INVALID_VALUE : plain.cuGraphNodeFindInClone(found, node, clone);
}

static CUresult destroy_node(CUgraphNode node)
{
    return failing() ? CUDA_ERROR_INVALID_VALUE : plain.cuGraphDestroyNode(node);
}

/* The handle of a graph that is gone, which the driver gives to the next one that is made; that one's own. */
static CUgraphExec handed_out_again, behind_it;

static CUgraphExec own(CUgraphExec exec)
{
    return behind_it && exec == handed_out_again ? behind_it : exec;
}

static _Atomic int uploads;
static CUresult upload(CUgraphExec exec, CUstream s)
{
    atomic_fetch_add(&uploads, 1);
    return failing() ? CUDA_ERROR_OUT_OF_MEMORY : plain.cuGraphUpload(own(exec), s);
}

static CUresult destroy_graph(CUgraph graph)
{
    atomic_fetch_sub(&alive, 1);
    return plain.cuGraphDestroy(graph);
}

static CUresult instantiate(CUgraphExec *exec, CUgraph graph, unsigned long long flags)
{
    CUresult r = failing() ? CUDA_ERROR_OUT_OF_MEMORY
                           : ((__typeof__(&cuGraphInstantiateWithFlags))plain.hooked[RG_HOOK_cuGraphInstantiateWithFlags])(
                                 exec, graph, flags);
    atomic_fetch_add(&alive, r == CUDA_SUCCESS);
    if (handed_out_again && !behind_it) {
        behind_it = *exec;
        *exec = handed_out_again;
    }
    return r;
}

static CUresult destroy_exec(CUgraphExec exec)
{
    atomic_fetch_sub(&alive, 1);
    return ((__typeof__(&cuGraphExecDestroy))plain.hooked[RG_HOOK_cuGraphExecDestroy])(own(exec));
}

static CUresult wait_event(CUstream s, CUevent event, unsigned flags)
{
    atomic_fetch_add(&event_waits, 1);
    return plain.cuStreamWaitEvent(s, event, flags);
}

static void other_busy(bool yes)
{
    if (yes)
        atomic_fetch_or(&seg->devices[0].high_busy, 1ull << OTHER);
    else
        rg_segment_clear_busy(seg, OTHER);
}

static CUresult launch_graph(CUgraphExec exec, CUstream s)
{
    int n = atomic_fetch_add(&launches, 1);
    if (n + 1 == atomic_load(&launch_fails_at))
        return CUDA_ERROR_LAUNCH_FAILED;
    launched[n % 4096] = exec;
    if (n + 1 == atomic_load(&busy_at))
        other_busy(true);
    return ((__typeof__(&cuGraphLaunch))plain.hooked[RG_HOOK_cuGraphLaunch])(own(exec), s);
}

/* The driver's order of nodes, backwards. */
static CUresult nodes_backwards(CUgraph graph, CUgraphNode *nodes, size_t *n)
{
    CUresult r = plain.cuGraphGetNodes(graph, nodes, n);
    for (size_t i = 0; nodes && i < *n / 2; i++) {
        CUgraphNode node = nodes[i];
        nodes[i] = nodes[*n - 1 - i];
        nodes[*n - 1 - i] = node;
    }
    return r;
}

static CUgraphNode strange_node;
static CUresult type_of(CUgraphNode node, int *type)
{
    CUresult r = plain.cuGraphNodeGetType(node, type);
    if (strange_node == NULL)
        strange_node = node;
    if (node == strange_node)
        *type = 6; /* waits for an event */
    return r;
}

static void watch(void)
{
    plain = rg_real;
    rg_real.cuGraphClone = clone_graph;
    rg_real.cuGraphNodeFindInClone = find_node;
    rg_real.cuGraphDestroyNode = destroy_node;
    rg_real.cuGraphUpload = upload;
    rg_real.cuGraphDestroy = destroy_graph;
    rg_real.cuStreamWaitEvent = wait_event;
    rg_real.hooked[RG_HOOK_cuGraphInstantiateWithFlags] = (void *)instantiate;
    rg_real.hooked[RG_HOOK_cuGraphExecDestroy] = (void *)destroy_exec;
    rg_real.hooked[RG_HOOK_cuGraphLaunch] = (void *)launch_graph;
}

/* ---- a client ---- */

static CUfunction nccl; /* a kernel of NCCL's, going by its name */

static void load_modules(void)
{
    CUmodule module = load_kernels(PTX_HEADER PTX_KERNEL("rigel_spin") PTX_KERNEL("ncclDevKernel_rigel_spin"));
    CHECK_EQUAL(cu.cuModuleGetFunction(&nccl, module, "ncclDevKernel_rigel_spin"), CUDA_SUCCESS);
}

static void become(uint32_t policy)
{
    prepare_waiting_client("graph", "best-effort");
    seg->settings.policy = policy;
    attach_client();
    load_modules();
    CHECK_EQUAL(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    watch();
}

static void spin_on(CUstream s, uint64_t block_ns)
{
    launch_blocks(spin, s, 1, block_ns);
}

static void copy(CUdeviceptr to, CUdeviceptr from, CUstream s)
{
    CHECK_EQUAL(cuMemcpyDtoDAsync_v2(to, from, CELL, s), CUDA_SUCCESS);
}

static CUdeviceptr cells(int n)
{
    CUdeviceptr p;
    CHECK_EQUAL(cuMemAlloc_v2(&p, (size_t)n * CELL), CUDA_SUCCESS);
    CHECK_EQUAL(cuMemsetD8_v2(p, 0, (size_t)n * CELL), CUDA_SUCCESS);
    return p;
}

static void put(CUdeviceptr cell, unsigned char value)
{
    CHECK_EQUAL(cuMemsetD8_v2(cell, value, CELL), CUDA_SUCCESS);
}

static int value_of(CUdeviceptr cell)
{
    unsigned char host[CELL];
    CHECK_EQUAL(cuMemcpyDtoH_v2(host, cell, CELL), CUDA_SUCCESS);
    for (int i = 1; i < CELL; i++)
        CHECK_EQUAL(host[i], host[0]);
    return host[0];
}

/* Kernels of 10 us and copies in turn: what is in the first cell wanders to the last. */
static CUgraph chain(CUdeviceptr first, int steps)
{
    CUgraph graph;
    CHECK_EQUAL(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    for (int i = 0; i < steps; i++) {
        spin_on(stream, 10000);
        copy(first + (CUdeviceptr)(i + 1) * CELL, first + (CUdeviceptr)i * CELL, stream);
    }
    CHECK_EQUAL(cuStreamEndCapture(stream, &graph), CUDA_SUCCESS);
    return graph;
}

/* As PyTorch does it: the graph is gone once there is an executable one. */
static CUgraphExec executable(CUgraph graph)
{
    CUgraphExec exec;
    CHECK_EQUAL(cuGraphInstantiateWithFlags(&exec, graph, 0), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuGraphDestroy(graph), CUDA_SUCCESS);
    return exec;
}

/* As if it had been launched before and had taken that long. */
static void known(CUgraphExec exec, uint32_t ns)
{
    rg_duration_reset(rg_duration_key((uintptr_t)exec, RG_DIMS_UNIT), ns);
}

static void launch(CUgraphExec exec)
{
    CHECK_EQUAL(cuGraphLaunch(exec, stream), CUDA_SUCCESS);
}

static void synchronise(void)
{
    CHECK_EQUAL(cuStreamSynchronize(stream), CUDA_SUCCESS);
}

static CUgraphExec twin;
static void *launch_twin(void *n)
{
    CHECK_EQUAL(cuCtxSetCurrent(context), CUDA_SUCCESS);
    for (intptr_t i = 0; i < (intptr_t)n; i++)
        launch(twin);
    return NULL;
}

/* ---- cases ---- */

static void a_long_graph_goes_out_in_pieces(void)
{
    become(RG_POLICY_PRIORITY);
    CUdeviceptr p = cells(41);
    CUgraphExec exec = executable(chain(p, 40));
    CHECK_EQUAL(alive, 2); /* the clone, and the program's own */
    put(p, 7);
    launch(exec); /* nothing is known of it yet */
    synchronise();
    CHECK_EQUAL(value_of(p + 40 * CELL), 7);
    CHECK_EQUAL(launches, 1);
    known(exec, 8000000); /* 80 nodes: pieces of 400 us are 4 of them */
    for (int round = 1; round <= 3; round++) {
        put(p, (unsigned char)(10 * round));
        launch(exec);
        synchronise();
        CHECK_EQUAL(value_of(p + 40 * CELL), 10 * round);
        CHECK_EQUAL(launches, 1 + 20 * round);
        for (int i = 0; i < 20; i++)
            CHECK(launched[1 + i] == launched[1 + 20 * (round - 1) + i] && launched[1 + i] != exec);
    }
    CHECK_EQUAL(alive, 21);
    CHECK_EQUAL(uploads, 20); /* what they take on the GPU was there before the first of them went out */
    CHECK_EQUAL(rg.slot->graphs_cut, 1);
    CHECK_EQUAL(rg.slot->graph_pieces, 60);
    CHECK_EQUAL(rg.slot->graph_launches, 4);
    CHECK_EQUAL(rg.slot->graphs_whole, 0);
    CHECK_EQUAL(cuGraphExecDestroy(exec), CUDA_SUCCESS);
    CHECK_EQUAL(alive, 0);
    done();
}

static void a_graph_is_cut_once_its_duration_is_learned(void)
{
    become(RG_POLICY_PRIORITY);
    CUdeviceptr p = cells(101);
    CUgraphExec exec = executable(chain(p, 100)); /* a millisecond at least */
    launch(exec);
    synchronise();
    CHECK_EQUAL(launches, 1);
    launch(exec);
    CHECK_EQUAL(rg.slot->graphs_cut, 1);
    CHECK(launches >= 3);
    done();
}

/* A thread launches a graph of 20 pieces, of which five are out when a high client has work. What end_pieces looks at. */
static CUdeviceptr begin_pieces(pthread_t *thread)
{
    become(RG_POLICY_PRIORITY);
    CUdeviceptr p = cells(41);
    twin = executable(chain(p, 40));
    put(p, 3);
    known(twin, 8000000);
    atomic_store(&busy_at, 5);
    CHECK_EQUAL(pthread_create(thread, NULL, launch_twin, (void *)1), 0);
    WAIT_FOR(atomic_load(&seg->devices[0].waiters) == 1);
    return p;
}

static void end_pieces(pthread_t thread, CUdeviceptr p)
{
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    synchronise();
    CHECK_EQUAL(launches, 20);
    CHECK_EQUAL(value_of(p + 40 * CELL), 3);
}

static void pieces_wait_for_a_high_client(void)
{
    pthread_t thread;
    CUdeviceptr p = begin_pieces(&thread);
    CHECK_EQUAL(atomic_load(&launches), 5); /* the rest is not on the GPU */
    other_busy(false);
    end_pieces(thread, p);
    CHECK(rg.slot->gate_waits >= 1);
    done();
}

/* Whether a thread of this process waits for the end of a pause. */
static bool waits_paused(void)
{
    for (int i = 0; i < RG_MAX_THREADS; i++)
        if (atomic_load(&rg_rec.threads[i].doing) == (RG_OP_paused | RG_DOING))
            return true;
    return false;
}

/* A pause that comes while a graph goes out holds what is left of it, too. */
static void pieces_wait_for_the_end_of_a_pause(void)
{
    pthread_t thread;
    CUdeviceptr p = begin_pieces(&thread);
    atomic_store(&rg.account->paused_until_ns, UINT64_MAX);
    WAIT_FOR(atomic_load(&RG_PROCESS->mode) & RG_MODE_PAUSED);
    other_busy(false);
    WAIT_FOR(waits_paused() || atomic_load(&launches) == 20);
    CHECK_EQUAL(launches, 6); /* the one that had begun to wait */
    atomic_store(&rg.account->paused_until_ns, 0);
    end_pieces(thread, p);
    CHECK_EQUAL(rg.slot->graph_launches, 1);
    done();
}

static void pieces_learn_their_durations(void)
{
    become(RG_POLICY_PRIORITY);
    CUgraphExec exec = executable(chain(cells(21), 20));
    known(exec, 4000000);
    for (int i = 0; i < 6; i++) {
        launch(exec);
        synchronise();
        rg_samples_poll();
    }
    uint32_t timed = 0;
    for (int i = 0; i < 10; i++) {
        rg_duration *d = rg_duration_of(rg_duration_key((uintptr_t)launched[i], RG_DIMS_UNIT));
        CHECK(d->duration_ns > 0);
        CHECK_EQUAL(d->seen, 6);
        timed += d->samples;
    }
    CHECK(timed > 0);
    done();
}

/* Two branches side by side, again and again, in whatever order the driver lists the nodes. */
static void branches_stay_in_order(void)
{
    become(RG_POLICY_PRIORITY);
    enum { STEPS = 16 };
    CUdeviceptr a = cells(STEPS + 1), b = cells(STEPS), c = cells(STEPS), d = cells(STEPS);
    CUstream side;
    CUevent fork, join;
    CUgraph graph;
    CHECK_EQUAL(cuStreamCreate(&side, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuEventCreate(&fork, CU_EVENT_DISABLE_TIMING), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuEventCreate(&join, CU_EVENT_DISABLE_TIMING), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    for (int i = 0; i < STEPS; i++) {
        spin_on(stream, 10000);
        CHECK_EQUAL(cuEventRecord(fork, stream), CUDA_SUCCESS);
        CHECK_EQUAL(cu.cuStreamWaitEvent(side, fork, 0), CUDA_SUCCESS);
        copy(c + (CUdeviceptr)i * CELL, a + (CUdeviceptr)i * CELL, side);
        copy(b + (CUdeviceptr)i * CELL, a + (CUdeviceptr)i * CELL, stream);
        copy(d + (CUdeviceptr)i * CELL, c + (CUdeviceptr)i * CELL, side);
        CHECK_EQUAL(cuEventRecord(join, side), CUDA_SUCCESS);
        CHECK_EQUAL(cu.cuStreamWaitEvent(stream, join, 0), CUDA_SUCCESS);
        copy(a + (CUdeviceptr)(i + 1) * CELL, b + (CUdeviceptr)i * CELL, stream);
    }
    CHECK_EQUAL(cuStreamEndCapture(stream, &graph), CUDA_SUCCESS);
    rg_real.cuGraphGetNodes = nodes_backwards;
    CUgraphExec exec = executable(graph);
    known(exec, 10000000); /* 80 nodes */
    put(a, 9);
    launch(exec);
    synchronise();
    CHECK(launches >= 16);
    CHECK_EQUAL(value_of(a + STEPS * CELL), 9);
    for (int i = 0; i < STEPS; i++)
        CHECK_EQUAL(value_of(d + (CUdeviceptr)i * CELL), 9);
    CHECK_EQUAL(cuGraphExecDestroy(exec), CUDA_SUCCESS);
    CHECK_EQUAL(alive, 0);
    done();
}

static void known_kernels_make_the_first_launch_go_in_pieces(void)
{
    become(RG_POLICY_PRIORITY);
    for (int i = 0; i < 4; i++) {
        spin_on(stream, 200000);
        synchronise();
        rg_samples_poll();
    }
    CUgraph graph;
    CHECK_EQUAL(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    for (int i = 0; i < 12; i++)
        spin_on(stream, 200000);
    CHECK_EQUAL(cuStreamEndCapture(stream, &graph), CUDA_SUCCESS);
    CUgraphExec exec = executable(graph);
    launch(exec); /* 2.4 ms at least, going by its kernels */
    CHECK_EQUAL(rg.slot->graphs_cut, 1);
    CHECK(rg.slot->graph_pieces >= 5);
    /* How long one takes is not known where it is not of one of them. */
    CHECK_EQUAL(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    for (int i = 0; i < 12; i++)
        spin_on(stream, 200000);
    launch_blocks(spin, stream, 2, 200000);
    CHECK_EQUAL(cuStreamEndCapture(stream, &graph), CUDA_SUCCESS);
    launch(executable(graph));
    CHECK_EQUAL(rg.slot->graphs_cut, 1);
    done();
}

/* The simulated GPU has no graphs in graphs: here copies are such. */
static CUgraph inside_of_copies;
static CUresult copies_are_graphs(CUgraphNode node, int *type)
{
    CUresult r = plain.cuGraphNodeGetType(node, type);
    *type = *type == CU_GRAPH_NODE_TYPE_KERNEL ? CU_GRAPH_NODE_TYPE_KERNEL : CU_GRAPH_NODE_TYPE_GRAPH;
    return r;
}

static CUresult inside_of(CUgraphNode node, CUgraph *inside)
{
    (void)node;
    *inside = inside_of_copies;
    return CUDA_SUCCESS;
}

static CUgraph kernels_and_copy(unsigned kernels, CUdeviceptr cell)
{
    CUgraph graph;
    CHECK_EQUAL(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    for (unsigned i = 0; i < kernels; i++)
        spin_on(stream, 200000);
    if (cell)
        copy(cell, cell + CELL, stream);
    CHECK_EQUAL(cuStreamEndCapture(stream, &graph), CUDA_SUCCESS);
    return graph;
}

/* A graph in a graph takes as long as all that is in it, if that is known of all of it. */
static void a_graph_in_a_graph_takes_what_is_in_it(void)
{
    become(RG_POLICY_PRIORITY);
    rg_agent_stop();
    for (int i = 0; i < 4; i++) {
        spin_on(stream, 200000);
        synchronise();
        rg_samples_poll();
    }
    const rg_track *t = rg_track_find(rg_track_key(stream));
    uint32_t one = rg_duration_elsewhere(t, "rigel_spin", rg_dims_of(1, 1, 1, 32, 1, 1));
    CHECK(one >= 200000);
    CUgraph outside = kernels_and_copy(2, cells(2));
    CHECK_EQUAL(rg_pieces_guess(outside, t), 2 * one);
    rg_real.cuGraphNodeGetType = copies_are_graphs;
    rg_real.cuGraphChildGraphNodeGetGraph = inside_of;
    inside_of_copies = kernels_and_copy(3, 0);
    CHECK_EQUAL(rg_pieces_guess(outside, t), 5 * one);
    CHECK_EQUAL(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    launch_blocks(spin, stream, 2, 200000); /* of this shape for the first time */
    spin_on(stream, 200000);
    CHECK_EQUAL(cuStreamEndCapture(stream, &inside_of_copies), CUDA_SUCCESS);
    CHECK_EQUAL(rg_pieces_guess(outside, t), 0);
    done();
}

static void what_is_short_or_not_held_here_goes_out_whole(void)
{
    become(RG_POLICY_PRIORITY);
    CUgraphExec exec = executable(chain(cells(21), 20));
    known(exec, 300000);
    launch(exec);
    known(exec, 4000000);
    atomic_store(&rg.preemptible[0], 1);
    launch(exec);
    atomic_store(&rg.preemptible[0], 0);
    seg->settings.inflight = 0;
    launch(exec);
    seg->settings.inflight = 8;
    seg->settings.policy = RG_POLICY_NONE;
    launch(exec);
    CHECK_EQUAL(launches, 4);
    CHECK_EQUAL(rg.slot->graphs_cut + rg.slot->graphs_whole, 0);
    seg->settings.policy = RG_POLICY_FAIR;
    launch(exec);
    CHECK_EQUAL(launches, 14);
    done();
}

/* A graph that is a chain of empty nodes, the last of which the driver lists first: nodes are numbers from 1 in the chain's order. */
enum { CHAIN = 60000 };
static CUgraphNode found[CHAIN];
static size_t chain_length = CHAIN;
static bool with_a_strange_edge;
static uint32_t founds, instantiated, instantiate_fails_at, chains_gone, executables_gone;
static unsigned long long flags_seen;

static CUgraphNode link_of(size_t number)
{
    return (CUgraphNode)(uintptr_t)number;
}

static CUresult chain_nodes(CUgraph graph, CUgraphNode *nodes, size_t *n)
{
    (void)graph;
    *n = chain_length;
    for (size_t i = 0; nodes && i < chain_length; i++)
        nodes[i] = link_of(chain_length - i);
    return CUDA_SUCCESS;
}

static CUresult chain_edges(CUgraph graph, CUgraphNode *from, CUgraphNode *to, uint64_t *data, size_t *n)
{
    (void)graph;
    (void)data;
    *n = chain_length - 1;
    for (size_t i = 0; from && i < chain_length - 1; i++) {
        from[i] = link_of(i + 1);
        to[i] = link_of(i + 2);
    }
    if (from && with_a_strange_edge)
        to[chain_length - 2] = link_of(chain_length + 1);
    return CUDA_SUCCESS;
}

static CUresult empty_type(CUgraphNode node, int *type)
{
    (void)node;
    *type = CU_GRAPH_NODE_TYPE_EMPTY;
    return CUDA_SUCCESS;
}

static CUresult chain_clone(CUgraph *clone, CUgraph graph)
{
    *clone = graph;
    return CUDA_SUCCESS;
}

static CUresult chain_find(CUgraphNode *copy, CUgraphNode node, CUgraph clone)
{
    (void)clone;
    if (founds < CHAIN)
        found[founds++] = node;
    *copy = node;
    return CUDA_SUCCESS;
}

static CUresult chain_remove(CUgraphNode node)
{
    (void)node;
    return CUDA_SUCCESS;
}

static CUresult chain_destroy(CUgraph graph)
{
    (void)graph;
    chains_gone++;
    return CUDA_SUCCESS;
}

static CUresult chain_instantiate(CUgraphExec *exec, CUgraph graph, unsigned long long flags)
{
    (void)graph;
    flags_seen = flags;
    *exec = (CUgraphExec)(uintptr_t)(0x1000 + 16 * ++instantiated); /* where it fails, too: that is none */
    return instantiated == instantiate_fails_at ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

static CUresult chain_exec_destroy(CUgraphExec exec)
{
    (void)exec;
    executables_gone++;
    return CUDA_SUCCESS;
}

static CUresult chain_upload(CUgraphExec exec, CUstream s)
{
    (void)exec, (void)s;
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static void drive_chains(void)
{
    rg_real = (rg_driver){
        .cuGraphGetNodes = chain_nodes,
        .cuGraphGetEdges_v2 = chain_edges,
        .cuGraphNodeGetType = empty_type,
        .cuGraphClone = chain_clone,
        .cuGraphNodeFindInClone = chain_find,
        .cuGraphDestroyNode = chain_remove,
        .cuGraphDestroy = chain_destroy,
    };
    rg_real.hooked[RG_HOOK_cuGraphInstantiateWithFlags] = (void *)chain_instantiate;
    rg_real.hooked[RG_HOOK_cuGraphExecDestroy] = (void *)chain_exec_destroy;
}

/* In a time that grows with the square of their number this would not come to an end. */
static void many_nodes_listed_backwards_are_put_in_order(void)
{
    static rg_track track;
    rg_pieces pieces = {0};
    drive_chains();
    CHECK_EQUAL(rg_pieces_make(&pieces, (CUgraph)0x10, 0, &track, 1000000000, 500000000), RG_WHOLE_NONE);
    CHECK_EQUAL(pieces.count, 2);
    CHECK_EQUAL(founds, CHAIN);
    for (size_t i = 0; i < CHAIN; i++)
        CHECK(found[i] == link_of(i + 1));
}

static enum rg_whole cut_chain(rg_pieces *pieces, uint64_t node_ns, uint64_t piece_ns)
{
    static rg_track track;
    *pieces = (rg_pieces){0};
    return rg_pieces_make(pieces, (CUgraph)0x10, 2, &track, chain_length * node_ns, piece_ns);
}

/* As many pieces as there may be, of one graph and of all; what gets none, or gives its own back, takes no room. */
static void so_many_pieces_have_room(void)
{
    enum { MOST = 512, GRAPHS = 8, NODE_NS = 1000000 };
    rg_pieces full[GRAPHS], more;
    chain_length = 2 * MOST;
    drive_chains();
    for (int i = 0; i < GRAPHS; i++) {
        CHECK_EQUAL(cut_chain(&full[i], NODE_NS, i % 2 ? NODE_NS : 2 * NODE_NS), RG_WHOLE_NONE); /* shorter ones would be twice as many */
        CHECK_EQUAL(full[i].count, MOST);
    }
    CHECK_EQUAL(flags_seen, 2);
    CHECK_EQUAL(chains_gone, GRAPHS * MOST);
    for (int i = 0; i < 3; i++)
        CHECK_EQUAL(cut_chain(&more, NODE_NS, 512 * NODE_NS), RG_WHOLE_ROOM);
    CHECK_EQUAL(cut_chain(&more, NODE_NS, 2 * MOST * NODE_NS), RG_WHOLE_ONE);
    CHECK_EQUAL(chains_gone, GRAPHS * MOST + 4);
    CHECK_EQUAL(executables_gone, 0);
    rg_pieces_drop(&full[0], true);
    CHECK_EQUAL(executables_gone, 0);
    CHECK_EQUAL(cut_chain(&full[0], NODE_NS, 2 * NODE_NS), RG_WHOLE_NONE);
    rg_pieces_drop(&full[0], false);
    CHECK_EQUAL(executables_gone, MOST);
    CHECK_EQUAL(cut_chain(&full[0], NODE_NS, 2 * NODE_NS), RG_WHOLE_NONE);
    rg_pieces_drop(&full[0], false);
    rg_pieces_drop(&full[0], false); /* of none */
    /* So does what fails: of what there is then everything goes. */
    executables_gone = instantiated = 0;
    instantiate_fails_at = 100;
    CHECK_EQUAL(cut_chain(&more, NODE_NS, 2 * NODE_NS), RG_WHOLE_DRIVER);
    CHECK_EQUAL(executables_gone, 99);
    rg_real.cuGraphUpload = chain_upload;
    executables_gone = 0;
    CHECK_EQUAL(cut_chain(&more, NODE_NS, 2 * NODE_NS), RG_WHOLE_DRIVER);
    CHECK_EQUAL(executables_gone, 1);
    rg_real.cuGraphUpload = NULL;
    CHECK_EQUAL(cut_chain(&full[0], NODE_NS, 2 * NODE_NS), RG_WHOLE_NONE);
}

/* Nodes that are longer than pieces are a piece each, the first as well; what is known of a piece is what its nodes take. */
static void a_long_node_is_a_piece(void)
{
    rg_pieces pieces;
    chain_length = 8;
    drive_chains();
    CHECK_EQUAL(cut_chain(&pieces, 1000000, 400000), RG_WHOLE_NONE);
    CHECK_EQUAL(pieces.count, 8);
    for (int i = 0; i < 8; i++)
        CHECK_EQUAL(rg_duration_of(rg_duration_key((uintptr_t)pieces.execs[i], RG_DIMS_UNIT))->duration_ns, 1000000);
    CHECK_EQUAL(cut_chain(&pieces, 250000, 400000), RG_WHOLE_NONE);
    CHECK_EQUAL(pieces.count, 4); /* two are nearer to that than one */
    for (int i = 0; i < 4; i++)
        CHECK_EQUAL(rg_duration_of(rg_duration_key((uintptr_t)pieces.execs[i], RG_DIMS_UNIT))->duration_ns, 500000);
    /* Of what the driver does not tell in full no order is made. */
    with_a_strange_edge = true;
    chains_gone = 0;
    CHECK_EQUAL(cut_chain(&pieces, 1000000, 400000), RG_WHOLE_DRIVER);
    CHECK_EQUAL(chains_gone, 1);
}

/* So many kernels one after the other. */
static CUgraph kernels(CUfunction f, int n)
{
    CUgraph graph;
    CHECK_EQUAL(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    for (int i = 0; i < n; i++)
        launch_blocks(f, stream, 1, 10000);
    CHECK_EQUAL(cuStreamEndCapture(stream, &graph), CUDA_SUCCESS);
    return graph;
}

/* Cuts a graph whose first piece has the handle of one that is gone: it is not taken for that one. */
static void cut_with_handle_of(CUgraphExec gone)
{
    CUgraphExec exec = executable(kernels(spin, 20));
    uint64_t cuts = rg.slot->graphs_cut;
    uint64_t passed = rg.slot->passed;
    known(exec, 4000000);
    handed_out_again = gone;
    launch(exec);
    CHECK(behind_it != NULL);
    CHECK_EQUAL(rg.slot->graphs_cut, cuts + 1);
    synchronise();
    rg_duration *d = rg_duration_of(rg_duration_key((uintptr_t)gone, RG_DIMS_UNIT));
    CHECK_EQUAL(d->shared, 0);
    CHECK_EQUAL(d->communicates, 0);
    CHECK_EQUAL(rg.slot->passed, passed);
}

static void a_piece_is_not_taken_for_a_destroyed_graph(void)
{
    become(RG_POLICY_PRIORITY);
    CUgraphExec exec = executable(kernels(spin, 30));
    launch(exec);
    synchronise();
    CHECK_EQUAL(cuGraphExecDestroy(exec), CUDA_SUCCESS);
    cut_with_handle_of(exec);
    done();
}

static void a_piece_does_not_pass_for_a_destroyed_graph_of_nccl(void)
{
    become(RG_POLICY_PRIORITY);
    CUgraphExec exec = executable(kernels(nccl, 1));
    uint64_t passed = rg.slot->passed;
    launch(exec);
    synchronise();
    CHECK_EQUAL(rg.slot->passed, passed + 1);
    CHECK_EQUAL(cuGraphExecDestroy(exec), CUDA_SUCCESS);
    cut_with_handle_of(exec);
    done();
}

static void a_piece_is_not_taken_for_a_graph_that_went_with_its_context(void)
{
    become(RG_POLICY_PRIORITY);
    CUgraphExec exec = executable(kernels(spin, 30));
    launch(exec);
    synchronise();
    CHECK_EQUAL(cuDevicePrimaryCtxReset_v2(0), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuDevicePrimaryCtxRetain(&context, 0), CUDA_SUCCESS);
    CHECK_EQUAL(cuCtxSetCurrent(context), CUDA_SUCCESS);
    load_modules();
    CHECK_EQUAL(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    cut_with_handle_of(exec);
    done();
}

/* The n-th handle of those that have their place in the table of graphs in common. */
static CUgraphExec sharing(int n)
{
    uintptr_t exec = 0x1000;
    for (int found = -1; (uint64_t)exec * 0x9e3779b97f4a7c15u >> 54 != 77 || ++found < n;)
        exec += 16;
    return (CUgraphExec)exec;
}

static bool communicates(CUgraphExec exec)
{
    rg_graph_facts facts;
    rg_graph_known(exec, &facts);
    return facts.communicates;
}

static uint64_t hash_of(CUgraphExec exec)
{
    rg_graph_facts facts;
    rg_graph_known(exec, &facts);
    return facts.hash;
}

static void graphs_that_share_a_place_are_all_known(void)
{
    enum { PLACES = 8 };
    become(RG_POLICY_PRIORITY);
    CUgraph theirs = kernels(nccl, 1), plain_ones[PLACES + 1];
    rg_graph_note(sharing(0), theirs, 0);
    CHECK(communicates(sharing(0)));
    for (int i = 1; i <= PLACES; i++)
        plain_ones[i] = kernels(spin, i);
    for (int i = 1; i < PLACES; i++)
        rg_graph_note(sharing(i), plain_ones[i], 0);
    CHECK(communicates(sharing(0)));
    for (int i = 1; i < PLACES; i++)
        for (int other = 1; other < PLACES; other++)
            CHECK_EQUAL(hash_of(sharing(i)) == hash_of(sharing(other)), i == other);
    /* One that goes makes room, and the others stay. */
    rg_graph_forget(sharing(3));
    CHECK_EQUAL(hash_of(sharing(3)), 0);
    rg_graph_note(sharing(PLACES), plain_ones[PLACES], 0);
    for (int i = 1; i <= PLACES; i++)
        CHECK_EQUAL(hash_of(sharing(i)) != 0, i != 3);
    /* Where there is none, who must not be held is still known. */
    rg_graph_note(sharing(3), plain_ones[3], 0);
    CHECK(hash_of(sharing(3)) != 0);
    CHECK(communicates(sharing(0)));
    /* The same handle again is one graph. */
    rg_graph_note(sharing(0), plain_ones[1], 0);
    CHECK(!communicates(sharing(0)));
    rg_graph_forget(sharing(0));
    CHECK_EQUAL(hash_of(sharing(0)), 0);
    done();
}

/* Launches a graph that is long but is not to be cut, twice, and says what is counted. */
static uint32_t whole_because(CUgraphExec exec)
{
    int before = atomic_load(&launches);
    uint64_t counted = rg.slot->graphs_whole;
    known(exec, 9000000);
    launch(exec);
    launch(exec);
    synchronise();
    CHECK_EQUAL(launches, before + 2);
    CHECK(launched[before] == exec && launched[before + 1] == exec);
    CHECK_EQUAL(rg.slot->graphs_whole, counted + 1);
    return rg.slot->graph_whole;
}

static void what_cannot_be_cut_says_why(void)
{
    become(RG_POLICY_PRIORITY);
    CUdeviceptr p = cells(41);
    CHECK_EQUAL(whole_because(executable(chain(p, 3))), RG_WHOLE_FEW);
    rg_real.cuGraphNodeGetType = type_of;
    CHECK_EQUAL(whole_because(executable(chain(p, 10))), RG_WHOLE_KIND);
    rg_real.cuGraphNodeGetType = plain.cuGraphNodeGetType;
    CUgraph device_launch = chain(p, 10);
    CUgraphExec exec;
    rg_real.hooked[RG_HOOK_cuGraphInstantiateWithFlags] = NULL; /* the simulated driver has no such graphs: by the other form */
    CUDA_GRAPH_INSTANTIATE_PARAMS params = {.flags = 2};
    CHECK_EQUAL(cuGraphInstantiateWithParams(&exec, device_launch, &params), CUDA_SUCCESS);
    CHECK_EQUAL(whole_because(exec), RG_WHOLE_DRIVER);
    rg_real.hooked[RG_HOOK_cuGraphInstantiateWithFlags] = (void *)instantiate;
    for (int i = 0; i < 200; i++)
        exec = executable(chain(p, 5));
    CHECK_EQUAL(whole_because(exec), RG_WHOLE_ROOM);
    CHECK_EQUAL(rg.slot->graphs_cut, 0);
    done();
}

static CUresult is_updatable(CUgraphNode node, int attribute, CUlaunchAttributeValue *value)
{
    (void)node;
    int is = attribute == CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE;
    memcpy(value, &is, sizeof is);
    return CUDA_SUCCESS;
}

/* Kernels may change it, or launch it, while it is in pieces. */
static void what_the_gpu_may_change_goes_out_whole(void)
{
    become(RG_POLICY_PRIORITY);
    CUdeviceptr p = cells(41);
    rg_real.cuGraphKernelNodeGetAttribute = is_updatable;
    CHECK_EQUAL(whole_because(executable(chain(p, 10))), RG_WHOLE_KIND);
    rg_real.cuGraphKernelNodeGetAttribute = plain.cuGraphKernelNodeGetAttribute;
    CUgraph graph = chain(p, 10);
    CUgraphExec exec = executable(chain(p, 10));
    rg_graph_note(exec, graph, CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH); /* of the handle of one whose end was not seen */
    CHECK_EQUAL(whole_because(exec), RG_WHOLE_KIND);
    CHECK_EQUAL(rg.slot->graphs_cut, 0);
    done();
}

/* Graphs that go leave room for as many others. */
static void graphs_that_go_make_room(void)
{
    become(RG_POLICY_PRIORITY);
    CUdeviceptr p = cells(41);
    CUgraph graph = chain(p, 40);
    for (int i = 0; i < 1100; i++) { /* more nodes than are kept at once, and more pieces */
        CUgraphExec exec;
        CHECK_EQUAL(cuGraphInstantiateWithFlags(&exec, graph, 0), CUDA_SUCCESS);
        if (i >= 850) {
            known(exec, 8000000);
            launch(exec);
            CHECK_EQUAL(rg.slot->graphs_cut, i - 849);
        }
        CHECK_EQUAL(cuGraphExecDestroy(exec), CUDA_SUCCESS);
    }
    synchronise();
    CHECK_EQUAL(rg.slot->graphs_whole, 0);
    done();
}

static CUresult no_record(CUevent event, CUstream s)
{
    (void)event, (void)s;
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static int waits_for_it;
static CUresult wait_for_stream(CUstream s)
{
    waits_for_it += s == stream;
    return CUDA_SUCCESS;
}

/* Where no event can follow the pieces they are waited for: what another stream launches comes after them. */
static void pieces_that_no_event_follows_are_waited_for(void)
{
    become(RG_POLICY_PRIORITY);
    CUgraphExec exec = executable(chain(cells(21), 20));
    known(exec, 4000000);
    rg_real.hooked[RG_HOOK_cuStreamSynchronize] = (void *)wait_for_stream;
    launch(exec);
    CHECK_EQUAL(launches, 10);
    CHECK_EQUAL(waits_for_it, 0);
    rg_real.hooked[RG_HOOK_cuEventRecord] = (void *)no_record;
    launch(exec);
    CHECK_EQUAL(launches, 20);
    CHECK_EQUAL(waits_for_it, 1);
    done();
}

/* Some of them may be NCCL's. */
static void what_has_no_names_goes_out_whole(void)
{
    become(RG_POLICY_PRIORITY);
    rg_real.cuFuncGetName = NULL; /* as before CUDA 12.3 */
    rg_real.cuKernelGetName = NULL;
    CHECK_EQUAL(whole_because(executable(chain(cells(41), 40))), RG_WHOLE_DRIVER);
    CHECK_EQUAL(alive, 1);
    CHECK_EQUAL(rg.slot->graphs_cut, 0);
    done();
}

static void a_changed_graph_goes_out_whole(void)
{
    become(RG_POLICY_PRIORITY);
    CUdeviceptr p = cells(41), q = cells(41);
    CUgraphExec exec = executable(chain(p, 40));
    known(exec, 8000000);
    put(p, 1);
    put(q, 2);
    launch(exec);
    CHECK_EQUAL(launches, 20);
    CUgraph other = chain(q, 40);
    char result[64] = {0};
    CHECK_EQUAL(cuGraphExecUpdate_v2(exec, other, result), CUDA_SUCCESS);
    CHECK_EQUAL(alive, 1);
    CHECK_EQUAL(whole_because(exec), RG_WHOLE_CHANGED);
    CHECK_EQUAL(value_of(p + 40 * CELL), 1);
    CHECK_EQUAL(value_of(q + 40 * CELL), 2);
    /* The old handle, made anew from a graph, is another graph. */
    CHECK_EQUAL(cuGraphExecDestroy(exec), CUDA_SUCCESS);
    exec = executable(other);
    known(exec, 8000000);
    launch(exec);
    CHECK_EQUAL(launches, 42);
    done();
}

/* The simulated driver changes graphs as a whole only. */
static CUresult set_kernel(CUgraphExec exec, CUgraphNode node, const void *params)
{
    (void)exec, (void)node;
    return params ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult set_any(CUgraphExec exec, CUgraphNode node, void *params)
{
    return set_kernel(exec, node, params);
}

static CUresult set_graph(CUgraphExec exec, CUgraphNode node, CUgraph graph)
{
    return set_kernel(exec, node, graph);
}

/* In each of these ways kernels of NCCL's may come into a graph that had none: from then on it is never held. */
static void a_graph_into_which_nccl_comes_is_not_held(void)
{
    enum { WAYS = 8 };
    become(RG_POLICY_PRIORITY);
    rg_real.hooked[RG_HOOK_cuGraphExecKernelNodeSetParams] = (void *)set_kernel;
    rg_real.hooked[RG_HOOK_cuGraphExecKernelNodeSetParams_v2] = (void *)set_kernel;
    rg_real.hooked[RG_HOOK_cuGraphExecChildGraphNodeSetParams] = (void *)set_graph;
    rg_real.hooked[RG_HOOK_cuGraphExecNodeSetParams] = (void *)set_any;
    CUgraph theirs = kernels(nccl, 1);
    for (int way = 0; way < WAYS; way++) {
        CUgraphExec exec = executable(kernels(spin, way % 2 ? 20 : 1));
        CUgraphNode bad, node = NULL;
        int why;
        char result[64] = {0};
        CUDA_KERNEL_NODE_PARAMS ours = {.func = spin}, kernel = {.func = nccl}, as_kernel = {.kern = (CUkernel)nccl};
        CUgraphNodeParams any = {.type = CU_GRAPH_NODE_TYPE_KERNEL, .kernel = kernel},
                          graph = {.type = CU_GRAPH_NODE_TYPE_GRAPH, .graph = theirs}, memset = {.type = CU_GRAPH_NODE_TYPE_MEMSET};
        uint64_t passed = rg.slot->passed;
        launch(exec);
        CHECK_EQUAL(cuGraphExecKernelNodeSetParams_v2(exec, node, &ours), CUDA_SUCCESS);
        CHECK_EQUAL(cuGraphExecKernelNodeSetParams_v2(exec, node, NULL), CUDA_ERROR_INVALID_VALUE);
        CHECK_EQUAL(cuGraphExecNodeSetParams(exec, node, &memset), CUDA_SUCCESS);
        CHECK_EQUAL(cuGraphExecNodeSetParams(exec, node, NULL), CUDA_ERROR_INVALID_VALUE);
        launch(exec);
        CHECK_EQUAL(rg.slot->passed, passed);
        CUresult r = way == 0   ? cuGraphExecUpdate_v2(exec, theirs, result)
                     : way == 1 ? cuGraphExecUpdate(exec, theirs, &bad, &why)
                     : way == 2 ? cuGraphExecKernelNodeSetParams(exec, node, &kernel)
                     : way == 3 ? cuGraphExecKernelNodeSetParams_v2(exec, node, &kernel)
                     : way == 4 ? cuGraphExecKernelNodeSetParams_v2(exec, node, &as_kernel)
                     : way == 5 ? cuGraphExecChildGraphNodeSetParams(exec, node, theirs)
                     : way == 6 ? cuGraphExecNodeSetParams(exec, node, &any)
                                : cuGraphExecNodeSetParams(exec, node, &graph);
        CHECK_EQUAL(r, CUDA_SUCCESS);
        launch(exec);
        CHECK_EQUAL(rg.slot->passed, passed + 1);
        CHECK(communicates(exec));
        synchronise();
        CHECK_EQUAL(cuGraphExecDestroy(exec), CUDA_SUCCESS);
    }
    done();
}

static uint32_t walks;

static CUresult counted_nodes(CUgraph graph, CUgraphNode *nodes, size_t *n)
{
    walks++;
    return plain.cuGraphGetNodes(graph, nodes, n);
}

/* What a program changes before each launch is looked through only where that decides what is held. */
static void a_high_clients_changes_are_not_looked_through(void)
{
    become(RG_POLICY_PRIORITY);
    CUgraphExec exec = executable(kernels(spin, 2));
    CUgraph g = kernels(spin, 2);
    char result[64] = {0};
    rg_real.cuGraphGetNodes = counted_nodes;
    walks = 0;
    CHECK_EQUAL(cuGraphExecUpdate_v2(exec, g, result), CUDA_SUCCESS);
    CHECK(walks > 0);
    atomic_store(&rg.account->wanted_class, RG_CLASS_HIGH);
    WAIT_FOR(atomic_load(&rg.mode) == RG_MODE_HIGH);
    walks = 0;
    CHECK_EQUAL(cuGraphExecUpdate_v2(exec, g, result), CUDA_SUCCESS);
    CHECK_EQUAL(walks, 0);
    done();
}

static void failures_leave_nothing_and_are_not_seen(void)
{
    become(RG_POLICY_PRIORITY);
    CUdeviceptr p = cells(21);
    int cut = 0;
    /* Every call that may fail, one after the other: those of 20 pieces are some 500. */
    for (int at = 2; !cut; at += at < 30 ? 1 : 37) {
        CUgraph graph = chain(p, 10);
        CUgraphExec exec;
        put(p, (unsigned char)(at & 0x7f));
        atomic_store(&calls, 0);
        atomic_store(&fail_at, at); /* the first is the program's own instantiation */
        CHECK_EQUAL(cuGraphInstantiateWithFlags(&exec, graph, 0), CUDA_SUCCESS);
        CHECK_EQUAL(cu.cuGraphDestroy(graph), CUDA_SUCCESS);
        known(exec, 4000000);
        uint64_t cuts = rg.slot->graphs_cut, whole = rg.slot->graphs_whole;
        launch(exec);
        synchronise();
        CHECK_EQUAL(value_of(p + 10 * CELL), at & 0x7f);
        cut = (int)(rg.slot->graphs_cut - cuts);
        CHECK_EQUAL(rg.slot->graphs_whole - whole, !cut);
        if (!cut) {
            CHECK_EQUAL(rg.slot->graph_whole, RG_WHOLE_DRIVER);
            CHECK_EQUAL(alive, 1);
        }
        CHECK_EQUAL(cuGraphExecDestroy(exec), CUDA_SUCCESS);
        CHECK_EQUAL(alive, 0);
    }
    CHECK(atomic_load(&calls) < atomic_load(&fail_at) && atomic_load(&calls) > 60);
    done();
}

static void what_a_piece_fails_with_is_the_result(void)
{
    become(RG_POLICY_PRIORITY);
    CUdeviceptr p = cells(21);
    CUgraphExec exec = executable(chain(p, 20));
    known(exec, 4000000);
    atomic_store(&launch_fails_at, 4);
    CHECK_EQUAL(cuGraphLaunch(exec, stream), CUDA_ERROR_LAUNCH_FAILED);
    CHECK_EQUAL(rg.slot->graph_pieces, 3);
    synchronise();
    /* Nothing of the first is out: the whole goes. */
    atomic_store(&launch_fails_at, 5);
    put(p, 5);
    launch(exec);
    synchronise();
    CHECK_EQUAL(launches, 6);
    CHECK(launched[5] == exec);
    CHECK_EQUAL(value_of(p + 20 * CELL), 5);
    CHECK_EQUAL(rg.slot->graph_launches, 2);
    CHECK_EQUAL(alive, 1);
    done();
}

static void launches_on_several_streams_come_one_after_the_other(void)
{
    become(RG_POLICY_PRIORITY);
    CUgraphExec exec = executable(chain(cells(21), 20));
    CUstream other;
    CHECK_EQUAL(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    launch(exec); /* whole, here */
    known(exec, 4000000);
    CHECK_EQUAL(cuGraphLaunch(exec, other), CUDA_SUCCESS); /* whole, since the driver orders it behind the one before */
    CHECK_EQUAL(launches, 2);
    CHECK_EQUAL(event_waits, 0);
    CHECK_EQUAL(cuGraphLaunch(exec, other), CUDA_SUCCESS); /* pieces */
    CHECK_EQUAL(launches, 12);
    CHECK_EQUAL(event_waits, 0);
    launch(exec); /* pieces, behind those on the other stream */
    CHECK_EQUAL(launches, 22);
    CHECK_EQUAL(event_waits, 1);
    seg->settings.policy = RG_POLICY_NONE;
    CHECK_EQUAL(cuGraphLaunch(exec, other), CUDA_SUCCESS); /* whole, behind the pieces */
    CHECK_EQUAL(launches, 23);
    CHECK_EQUAL(event_waits, 2);
    CHECK_EQUAL(rg.slot->graphs_whole, 0);
    done();
}

static CUresult is_capturing(CUstream s, int *status)
{
    (void)s;
    *status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    return CUDA_SUCCESS;
}

static void captures_let_it_pass_whole(void)
{
    become(RG_POLICY_PRIORITY);
    CUgraphExec exec = executable(chain(cells(21), 20));
    CUstream other, third;
    CUgraph graph;
    CHECK_EQUAL(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamCreate(&third, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    known(exec, 4000000);
    launch(exec);
    CHECK_EQUAL(launches, 10);
    CHECK_EQUAL(cuStreamBeginCapture_v2(other, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
    rg_real.cuStreamIsCapturing = is_capturing;
    CHECK_EQUAL(cuGraphLaunch(exec, third), CUDA_SUCCESS); /* as if that were captured: it does not run now */
    CHECK_EQUAL(launches, 11);
    CHECK_EQUAL(event_waits, 0);
    rg_real.cuStreamIsCapturing = plain.cuStreamIsCapturing;
    CHECK_EQUAL(cuGraphLaunch(exec, third), CUDA_SUCCESS);
    CHECK_EQUAL(launches, 12);
    CHECK(launched[11] == exec);
    CHECK_EQUAL(event_waits, 1); /* behind the pieces */
    CHECK_EQUAL(cuStreamEndCapture(other, &graph), CUDA_SUCCESS);
    launch(exec); /* that may still run on the third stream: once more whole, and then in pieces */
    launch(exec);
    CHECK_EQUAL(launches, 23);
    done();
}

/* Past Rigel, too, a graph comes after its pieces, which went out when its client was a best-effort one. */
static void past_rigel_it_comes_behind_its_pieces(void)
{
    become(RG_POLICY_PRIORITY);
    CUgraphExec exec = executable(chain(cells(21), 20));
    CUstream other;
    CHECK_EQUAL(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    known(exec, 4000000);
    launch(exec);
    CHECK_EQUAL(launches, 10);
    atomic_store(&rg.account->wanted_class, RG_CLASS_HIGH);
    WAIT_FOR(atomic_load(&rg.mode) == RG_MODE_HIGH);
    CHECK_EQUAL(rigel_bypass_begin(), 0);
    CHECK_EQUAL(cuGraphLaunch(exec, other), CUDA_SUCCESS);
    CHECK_EQUAL(launches, 11);
    CHECK(launched[10] == exec);
    CHECK_EQUAL(event_waits, 1);
    CHECK_EQUAL(cuGraphLaunch(exec, stream), CUDA_SUCCESS); /* the driver orders it behind the whole */
    CHECK_EQUAL(event_waits, 1);
    CHECK_EQUAL(rg.slot->graph_launches, 1);
    CHECK_EQUAL(cuGraphExecDestroy(exec), CUDA_SUCCESS);
    CHECK_EQUAL(alive, 0);
    rigel_bypass_end();
    done();
}

static void threads_do_not_mix_their_pieces(void)
{
    become(RG_POLICY_PRIORITY);
    CUdeviceptr p = cells(21);
    twin = executable(chain(p, 20));
    known(twin, 4000000);
    put(p, 4);
    launch(twin);
    pthread_t threads[3];
    for (int i = 0; i < 3; i++)
        CHECK_EQUAL(pthread_create(&threads[i], NULL, launch_twin, (void *)5), 0);
    for (int i = 0; i < 3; i++)
        CHECK_EQUAL(pthread_join(threads[i], NULL), 0);
    synchronise();
    CHECK_EQUAL(launches, 160);
    for (int i = 0; i < 160; i++)
        CHECK(launched[i] == launched[i % 10]);
    CHECK_EQUAL(value_of(p + 20 * CELL), 4);
    done();
}

static void graphs_end_with_their_program_or_context(void)
{
    become(RG_POLICY_PRIORITY);
    CUgraphExec exec = executable(chain(cells(21), 20));
    known(exec, 4000000);
    launch(exec);
    CHECK_EQUAL(cuGraphExecDestroy(exec), CUDA_SUCCESS); /* while it runs */
    CHECK_EQUAL(alive, 0);
    synchronise();
    exec = executable(chain(cells(21), 20));
    known(exec, 4000000);
    launch(exec);
    CHECK_EQUAL(alive, 11);
    synchronise();
    CHECK_EQUAL(cuDevicePrimaryCtxReset_v2(0), CUDA_SUCCESS);
    CHECK_EQUAL(alive, 11); /* they have gone with it: nothing is asked of them any more */
    cuGraphExecDestroy(exec);
    CHECK_EQUAL(alive, 10); /* nor by a program that takes its own away now: their handles may be others' */
    CHECK_EQUAL(cu.cuDevicePrimaryCtxRetain(&context, 0), CUDA_SUCCESS);
    CHECK_EQUAL(cuCtxSetCurrent(context), CUDA_SUCCESS);
    load_modules();
    CHECK_EQUAL(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    exec = executable(chain(cells(21), 20));
    known(exec, 4000000);
    int before = atomic_load(&launches);
    launch(exec);
    synchronise();
    CHECK_EQUAL(launches - before, 10);
    done();
}

int main(int argc, char **argv)
{
    (void)argc;
    ensure_environment("LD_LIBRARY_PATH", in_build_folder("sim"), argv);
    int failures = 0;
    RUN(a_long_graph_goes_out_in_pieces);
    RUN(a_graph_is_cut_once_its_duration_is_learned);
    RUN(pieces_wait_for_a_high_client);
    RUN(pieces_wait_for_the_end_of_a_pause);
    RUN(pieces_learn_their_durations);
    RUN(branches_stay_in_order);
    RUN(known_kernels_make_the_first_launch_go_in_pieces);
    RUN(a_graph_in_a_graph_takes_what_is_in_it);
    RUN(what_is_short_or_not_held_here_goes_out_whole);
    RUN(what_cannot_be_cut_says_why);
    RUN(what_the_gpu_may_change_goes_out_whole);
    RUN(graphs_that_go_make_room);
    RUN(pieces_that_no_event_follows_are_waited_for);
    RUN(what_has_no_names_goes_out_whole);
    RUN(a_changed_graph_goes_out_whole);
    RUN(a_graph_into_which_nccl_comes_is_not_held);
    RUN(a_high_clients_changes_are_not_looked_through);
    RUN(failures_leave_nothing_and_are_not_seen);
    RUN(what_a_piece_fails_with_is_the_result);
    RUN(launches_on_several_streams_come_one_after_the_other);
    RUN(captures_let_it_pass_whole);
    RUN(past_rigel_it_comes_behind_its_pieces);
    RUN(threads_do_not_mix_their_pieces);
    RUN(graphs_end_with_their_program_or_context);
    RUN(many_nodes_listed_backwards_are_put_in_order);
    RUN(so_many_pieces_have_room);
    RUN(a_long_node_is_a_piece);
    RUN(graphs_that_share_a_place_are_all_known);
    RUN(a_piece_is_not_taken_for_a_destroyed_graph);
    RUN(a_piece_does_not_pass_for_a_destroyed_graph_of_nccl);
    RUN(a_piece_is_not_taken_for_a_graph_that_went_with_its_context);
    return failures ? 1 : 0;
}
