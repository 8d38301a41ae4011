/*
 * record.c: what a client tells in its recording (record.h): counts of what it launches, or every launch with its time.
 *
 * Only in a process that was asked for it (RIGEL_RECORD); in others the launch path has one test of a bit that it has loaded
 * anyway. A launch is told by the thread that makes it: what it is, when the driver's call began and ended, what cuBLAS call
 * it is part of. How long it took comes from CUPTI (cupti.c), or from a pair of timing events round it, which this file's
 * thread looks at in the order in which they were recorded. Events serialise nothing between streams; within one, the GPU
 * puts a time stamp before and after each kernel, the cost of which is measured (`event_ns`) and left to the reader to take off.
 *
 * Must never: wait for the GPU in a thread of the program, end or hold up the program because the recording is full or gone.
 */
#include "record-client.h"
#include "replay/profile.h"
#include "rigel.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

rg_recording *rg_recorded;

enum { POLL_NS = 1000000, TIMINGS = 4096, CALIBRATIONS = 64, CALIBRATE_EVERY = 32, POLL_AT_ONCE = 256 };

static bool writes; /* this process has the ring */
static _Atomic uint64_t launches;
static _Atomic int stopping;
static pthread_t thread;
static bool started;

/* What this thread's launch is, between rg_record_begin and rg_record_end. */
static _Thread_local struct {
    int kind, timing, really; /* really: -1: `kind` */
    uint64_t number, begin_ns;
    uint32_t level;
} now_launching;

/* What rigel_stand_for said of this thread's next kernel. */
static _Thread_local struct {
    const char *name;
    const uint32_t *shape;
} standing_for;

static _Thread_local uint64_t gemm_call; /* the cuBLAS call that this thread is in; 0: none */

static uint32_t thread_number(void)
{
    static _Atomic uint32_t last;
    static _Thread_local uint32_t mine;
    if (!mine)
        mine = atomic_fetch_add(&last, 1) + 1;
    return mine & 0xffff;
}

static uint32_t level_now(void)
{
    return writes ? atomic_load_explicit(&rg_recorded->header.level, memory_order_relaxed) : RG_REC_COUNT;
}

/* ---- kinds: what was launched, as this process knows it -> index in the file ---- */

enum { KNOWN = 16384, KNOWN_PROBES = 16 };
static _Atomic uint32_t unloaded; /* how often handles of kernels may have become others': part of what is known of one */
static struct {
    _Atomic uint64_t key;
    _Atomic int32_t kind; /* 1 + index; -1: no room in the file; 0: being looked up */
} known[KNOWN];

/* SMs that a grid fills: as the driver says how many of its blocks one holds. */
static uint32_t sms_of(CUfunction f, rg_dims dims, uint32_t dynamic_bytes)
{
    uint64_t blocks = (uint64_t)(uint32_t)dims.grid * (dims.grid >> 32 & 0xffff) * (dims.grid >> 48);
    int threads = (int)((dims.block & 0xffff) * (dims.block >> 16 & 0xffff) * (dims.block >> 32)), held = 0;
    uint32_t all = atomic_load(&rg_recorded->header.sms);
    if (!all || !rg_real.cuOccupancyMaxActiveBlocksPerMultiprocessor || threads <= 0 ||
        rg_real.cuOccupancyMaxActiveBlocksPerMultiprocessor(&held, f, threads, dynamic_bytes) != CUDA_SUCCESS || held <= 0)
        return 0;
    uint64_t filled = (blocks + (uint64_t)held - 1) / (uint64_t)held;
    return filled < all ? (uint32_t)filled : all;
}

static uint32_t attribute_of(CUfunction f, int attribute)
{
    int value = 0;
    return rg_real.cuFuncGetAttribute && rg_real.cuFuncGetAttribute(&value, attribute, f) == CUDA_SUCCESS && value > 0
               ? (uint32_t)value
               : 0;
}

/* The device of the current context, once. */
static void learn_device(void)
{
    CUdevice device;
    int sms = 0;
    rg_record_header *h = &rg_recorded->header;
    if (atomic_load(&h->sms) || rg_real.cuCtxGetDevice(&device) != CUDA_SUCCESS || !rg_real.cuDeviceGetAttribute ||
        rg_real.cuDeviceGetAttribute(&sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device) != CUDA_SUCCESS || sms <= 0)
        return;
    char name[sizeof h->device] = "";
    rg_real.cuDeviceGetName(name, sizeof name, device);
    for (size_t i = 0; i + 1 < sizeof name; i++)
        __atomic_store_n(&h->device[i], name[i], __ATOMIC_RELAXED);
    atomic_store(&h->sms, (uint32_t)sms);
}

static int enter_kernel(CUfunction given, rg_dims dims, uint32_t dynamic_bytes)
{
    CUfunction f = given;
    const char *name = rg_function_name(given);
    int held;
    /* libcudart passes a CUkernel where a CUfunction is declared: what does not take one gets its function. */
    if (rg_real.cuKernelGetFunction && rg_real.cuFuncGetAttribute &&
        rg_real.cuFuncGetAttribute(&held, CU_FUNC_ATTRIBUTE_NUM_REGS, given) != CUDA_SUCCESS &&
        rg_real.cuKernelGetFunction(&f, (CUkernel)given) != CUDA_SUCCESS)
        f = given;
    char *readable = name ? rg_demangled(name) : NULL;
    rg_record_facts facts = {
        .work = RG_REC_KERNEL,
        .name = readable ? readable : name ? name : "unknown kernel",
        .dims = dims,
        .registers = attribute_of(f, CU_FUNC_ATTRIBUTE_NUM_REGS),
        .shared_bytes = attribute_of(f, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES) + dynamic_bytes,
        .sms = sms_of(f, dims, dynamic_bytes),
    };
    int kind = rg_record_enter(rg_recorded, &facts);
    free(readable);
    return kind;
}

static int enter_stand_in(const char *name, const uint32_t s[9])
{
    rg_record_facts facts = {
        .work = RG_REC_KERNEL,
        .name = name,
        .dims = rg_dims_of(s[0], s[1], s[2], s[3], s[4], s[5]),
        .registers = s[6],
        .shared_bytes = s[7],
        .sms = s[8],
    };
    return rg_record_enter(rg_recorded, &facts);
}

static enum rg_record_work work_of(const rg_record_what *w)
{
    if (w->kind == RG_MEMSET)
        return RG_REC_MEMSET;
    if (strstr(w->call, "HtoD") || strstr(w->call, "HtoA"))
        return RG_REC_COPY_H2D;
    return strstr(w->call, "toH") ? RG_REC_COPY_D2H : RG_REC_COPY_D2D;
}

static int enter(const rg_record_what *w)
{
    if (w->kind == RG_LAUNCH)
        return enter_kernel((CUfunction)w->units, w->dims, w->shared_bytes);
    rg_record_facts facts = {.work = RG_REC_GRAPH};
    rg_graph_facts graph;
    if (w->kind == RG_GRAPH) {
        rg_graph_known((CUgraphExec)w->units, &graph);
        facts.name = graph.label[0] ? graph.label : "graph";
    } else {
        facts.work = work_of(w);
        facts.bytes = w->units;
    }
    return rg_record_enter(rg_recorded, &facts);
}

enum { GRAPHS = 1024 };
typedef struct {
    uintptr_t exec;
    uint32_t count;
    int32_t kinds[];
} graph_nodes;
static graph_nodes *_Atomic graphs[GRAPHS]; /* one whose place is taken by another is forgotten, and stays allocated */

static graph_nodes *_Atomic *graph_place(uintptr_t exec)
{
    return &graphs[(uint32_t)(rg_hash_fold(1, exec) >> 40) % GRAPHS];
}

/* What the executable graph is made of; NULL: not known. */
static graph_nodes *nodes_of(uintptr_t exec)
{
    graph_nodes *g = atomic_load(graph_place(exec));
    return g && g->exec == exec ? g : NULL;
}

/* Index of what is launched, or of what it stands for; -1: no room. One probe where nothing collides; what is new costs what
 * asking the driver costs. */
static int kind_of(const rg_record_what *w, const char *name, const uint32_t *shape)
{
    bool stands = name != NULL;
    uint64_t key;
    if (stands) {
        key = rg_hash_fold(rg_hash_fold(1, (uintptr_t)name), (uintptr_t)shape);
    } else {
        key = rg_hash_fold(rg_hash_fold(rg_hash_fold(w->units, w->dims.grid), w->dims.block), w->shared_bytes);
        if (w->kind > RG_GRAPH)
            key = rg_hash_fold(key, 1 + work_of(w));
        else if (w->kind == RG_LAUNCH)
            key = rg_hash_fold(key, atomic_load_explicit(&unloaded, memory_order_relaxed));
        else /* the driver gives the handles of graphs out again, too */
            key = rg_hash_fold(key, (uintptr_t)nodes_of(w->units));
    }
    key |= 1;
    for (uint32_t i = 0; i < KNOWN_PROBES; i++) {
        uint32_t at = (uint32_t)((key >> 40) + i) % KNOWN;
        uint64_t found = atomic_load_explicit(&known[at].key, memory_order_relaxed);
        if (found == key) {
            int32_t kind = atomic_load_explicit(&known[at].kind, memory_order_acquire);
            if (kind)
                return kind > 0 ? kind - 1 : -1;
            break; /* another thread is at it: the file finds it all the same */
        }
        if (found || !atomic_compare_exchange_strong(&known[at].key, &found, key))
            continue;
        int kind = stands ? enter_stand_in(name, shape) : enter(w);
        atomic_store_explicit(&known[at].kind, kind < 0 ? -1 : kind + 1, memory_order_release);
        return kind;
    }
    return stands ? enter_stand_in(name, shape) : enter(w);
}

void rg_record_functions_forget(void)
{
    atomic_fetch_add(&unloaded, 1);
}

void rigel_stand_for(const char *name, const uint32_t *shape)
{
    standing_for.name = name;
    standing_for.shape = shape;
}

/* ---- graphs: what each is made of ---- */

typedef struct {
    int32_t *kinds;
    uint32_t count, room;
} node_list;

static void add_node(node_list *list, const CUDA_KERNEL_NODE_PARAMS *p)
{
    if (list->count == list->room) {
        uint32_t room = list->room ? list->room * 2 : 256;
        int32_t *more = realloc(list->kinds, room * sizeof *more);
        if (!more)
            return;
        list->kinds = more;
        list->room = room;
    }
    rg_dims dims = rg_dims_of(p->gridDimX, p->gridDimY, p->gridDimZ, p->blockDimX, p->blockDimY, p->blockDimZ);
    list->kinds[list->count++] = enter_kernel(rg_node_function(p), dims, p->sharedMemBytes);
}

static void add_nodes(node_list *list, CUgraph graph, int depth)
{
    size_t n = 0;
    if (!rg_real.cuGraphGetNodes || !rg_real.cuGraphNodeGetType || depth > 4 ||
        rg_real.cuGraphGetNodes(graph, NULL, &n) != CUDA_SUCCESS || !n)
        return;
    CUgraphNode *nodes = malloc(n * sizeof *nodes);
    if (!nodes || rg_real.cuGraphGetNodes(graph, nodes, &n) != CUDA_SUCCESS)
        n = 0;
    for (size_t i = 0; i < n; i++) {
        int type = -1;
        CUDA_KERNEL_NODE_PARAMS params;
        CUgraph child;
        rg_real.cuGraphNodeGetType(nodes[i], &type);
        if (type == CU_GRAPH_NODE_TYPE_KERNEL && rg_real.cuGraphKernelNodeGetParams_v2 &&
            rg_real.cuGraphKernelNodeGetParams_v2(nodes[i], &params) == CUDA_SUCCESS)
            add_node(list, &params);
        else if (type == CU_GRAPH_NODE_TYPE_GRAPH && rg_real.cuGraphChildGraphNodeGetGraph &&
                 rg_real.cuGraphChildGraphNodeGetGraph(nodes[i], &child) == CUDA_SUCCESS)
            add_nodes(list, child, depth + 1);
    }
    free(nodes);
}

void rg_record_graph(CUgraphExec exec, CUgraph graph)
{
    node_list list = {0};
    learn_device();
    add_nodes(&list, graph, 0);
    graph_nodes *made = malloc(sizeof *made + list.count * sizeof *list.kinds);
    if (made) {
        made->exec = (uintptr_t)exec;
        made->count = list.count;
        if (list.count)
            memcpy(made->kinds, list.kinds, list.count * sizeof *list.kinds);
        /* Another thread may be counting the one that was there. */
        atomic_store(graph_place((uintptr_t)exec), made);
    }
    free(list.kinds);
}

static void count_nodes(uintptr_t exec)
{
    graph_nodes *g = nodes_of(exec);
    for (uint32_t i = 0; g && i < g->count; i++)
        if (g->kinds[i] >= 0)
            atomic_fetch_add_explicit(&rg_recorded->kinds[g->kinds[i]].node_count, 1, memory_order_relaxed);
}

/* ---- times by events ---- */

enum { TIMING_FREE = 0, TIMING_BUSY, TIMING_RECORDED, TIMING_LOST };
static struct {
    _Atomic uint32_t state;
    _Atomic(CUcontext) context; /* that the events belong to; this and the next are read by who does not own it, too */
    _Atomic CUdevice device;
    CUevent start, stop;
    uint64_t number; /* of the launch; 0: nothing lies between the two events */
} timings[TIMINGS]; /* a ring: places are given out and looked at in turn */
static _Atomic uint64_t timings_begun, timings_done;
static _Atomic uint32_t calibrations;

static void put_time(uint64_t number, uint64_t ns)
{
    rg_record_put(rg_recorded, (uint64_t[RG_REC_WORDS - 1]){rg_record_word(RG_REC_TIME, 0, 0, 0), number, ns});
}

/* A place with two events of the current context; -1: none is free, or this context cannot be used now. */
static int timing_begin(CUstream stream, uint64_t number)
{
    CUcontext current = NULL;
    uint64_t at = atomic_load(&timings_begun);
    if (rg_real.cuCtxGetCurrent(&current) != CUDA_SUCCESS || !current || !rg_real.cuEventElapsedTime)
        return -1;
    do
        if (at - atomic_load(&timings_done) >= TIMINGS)
            return -1;
    while (!atomic_compare_exchange_weak(&timings_begun, &at, at + 1));
    int i = (int)(at % TIMINGS);
    uint32_t free_state = TIMING_FREE;
    /* It is free, but that who ends a context may look at it (rg_record_forget_context). */
    for (int tries = 0; !atomic_compare_exchange_strong(&timings[i].state, &free_state, TIMING_BUSY); free_state = TIMING_FREE)
        if (!rg_give_way(tries++))
            return -1;
    CUevent *events[2] = {&timings[i].start, &timings[i].stop};
    for (int e = 0; e < 2; e++) {
        if (*events[e] && timings[i].context != current) {
            RG_REAL(cuEventDestroy_v2)(*events[e]);
            *events[e] = NULL;
        }
        if (!*events[e] && RG_REAL(cuEventCreate)(events[e], CU_EVENT_DEFAULT) != CUDA_SUCCESS)
            *events[e] = NULL;
    }
    CUdevice device = -1;
    rg_real.cuCtxGetDevice(&device);
    timings[i].context = current;
    timings[i].device = device;
    timings[i].number = number;
    if (timings[i].start && timings[i].stop && RG_REAL(cuEventRecord)(timings[i].start, stream) == CUDA_SUCCESS)
        return i;
    atomic_store(&timings[i].state, TIMING_LOST);
    return -1;
}

static bool timing_end(int i, CUstream stream, bool ok)
{
    ok = ok && RG_REAL(cuEventRecord)(timings[i].stop, stream) == CUDA_SUCCESS;
    atomic_store(&timings[i].state, ok ? TIMING_RECORDED : TIMING_LOST);
    return ok;
}

/* Takes in what is finished, in turn, a few at a time; false when there is nothing more to be had now. */
static bool timings_poll(void)
{
    bool more = false;
    if (!rg_agent_enter())
        return false;
    for (int n = 0; n < POLL_AT_ONCE && !atomic_load(&rg.captures); n++) {
        uint64_t at = atomic_load(&timings_done);
        uint32_t i = (uint32_t)(at % TIMINGS), state = atomic_load(&timings[i].state);
        CUcontext popped;
        float ms = 0;
        if (at == atomic_load(&timings_begun) || state == TIMING_BUSY || state == TIMING_FREE)
            break;
        if (state == TIMING_RECORDED) {
            bool pushed = rg_real.cuCtxPushCurrent_v2(timings[i].context) == CUDA_SUCCESS;
            CUresult r = RG_REAL(cuEventQuery)(timings[i].stop);
            if (r == CUDA_SUCCESS)
                r = rg_real.cuEventElapsedTime(&ms, timings[i].start, timings[i].stop);
            if (pushed)
                rg_real.cuCtxPopCurrent_v2(&popped);
            if (r == CUDA_ERROR_NOT_READY)
                break;
            uint64_t ns = ms > 0 ? (uint64_t)((double)ms * 1e6 + 0.5) : 0, least = atomic_load(&rg_recorded->header.event_ns);
            if (r == CUDA_SUCCESS && timings[i].number)
                put_time(timings[i].number, ns);
            else if (r == CUDA_SUCCESS && (!atomic_load(&calibrations) || ns < least))
                atomic_store(&rg_recorded->header.event_ns, ns);
            if (r == CUDA_SUCCESS && !timings[i].number)
                atomic_fetch_add(&calibrations, 1);
        }
        atomic_store(&timings[i].state, TIMING_FREE);
        atomic_store(&timings_done, at + 1);
        more = true;
    }
    pthread_mutex_unlock(&rg_agent_lock);
    return more;
}

static bool timing_is_in(uint32_t i, CUcontext context, CUdevice d)
{
    CUcontext its = atomic_load(&timings[i].context);
    return its && (context ? its == context : atomic_load(&timings[i].device) == d);
}

void rg_record_forget_context(CUcontext context, CUdevice d)
{
    if (!rg_recorded)
        return;
    for (uint32_t i = 0; i < TIMINGS; i++)
        for (int tries = 0; timing_is_in(i, context, d) && rg_give_way(tries); tries++) {
            uint32_t state = atomic_load(&timings[i].state);
            if (state == TIMING_BUSY || !atomic_compare_exchange_strong(&timings[i].state, &state, TIMING_BUSY))
                continue;
            /* Who had it has perhaps given it events of another context's meanwhile. */
            bool its = timing_is_in(i, context, d);
            if (its) {
                timings[i].start = timings[i].stop = NULL;
                timings[i].context = NULL;
            }
            atomic_store(&timings[i].state, its && state == TIMING_RECORDED ? TIMING_LOST : state);
            break;
        }
}

/* ---- launches ---- */

void rg_record_begin(const rg_record_what *what)
{
    uint32_t level = level_now();
    learn_device();
    now_launching.timing = -1;
    now_launching.level = level;
    bool stands = standing_for.name && what->kind == RG_LAUNCH;
    now_launching.kind =
        level == RG_REC_QUIET ? -1 : kind_of(what, stands ? standing_for.name : NULL, standing_for.shape);
    now_launching.really = stands && level >= RG_REC_LOG ? kind_of(what, NULL, NULL) : -1;
    standing_for.name = NULL;
    if (level < RG_REC_LOG)
        return;
    now_launching.number = atomic_fetch_add_explicit(&launches, 1, memory_order_relaxed) + 1;
    if (level == RG_REC_TIMED && atomic_load(&rg_recorded->header.mechanism) == RG_REC_EVENTS &&
        atomic_load(&rg_recorded->header.in_force) == RG_REC_TIMED) {
        CUstream stream = what->stream;
        if (now_launching.number % CALIBRATE_EVERY == 1 && atomic_load(&calibrations) < CALIBRATIONS) {
            int empty = timing_begin(stream, 0);
            if (empty >= 0)
                timing_end(empty, stream, true);
        }
        now_launching.timing = timing_begin(stream, now_launching.number);
    }
    now_launching.begin_ns = rg_now_ns();
}

void rg_record_end(const rg_record_what *what, bool ok)
{
    uint64_t end_ns = now_launching.level >= RG_REC_LOG ? rg_now_ns() : 0;
    int kind = now_launching.kind;
    bool timed = false, measured = false;
    if (now_launching.timing >= 0)
        timed = timing_end(now_launching.timing, what->stream, ok);
    if (!ok || now_launching.level == RG_REC_QUIET)
        return;
    if (kind < 0) {
        atomic_fetch_add(&rg_recorded->header.kinds_lost, 1);
        return;
    }
    atomic_fetch_add_explicit(&rg_recorded->kinds[kind].count, 1, memory_order_relaxed);
    if (what->kind == RG_GRAPH)
        count_nodes(what->units);
    if (now_launching.level < RG_REC_LOG)
        return;
    /* What has been given events is timed, though another level has come into force between the look at it and them. */
    if (now_launching.timing >= 0 ||
        (now_launching.level == RG_REC_TIMED && atomic_load(&rg_recorded->header.in_force) == RG_REC_TIMED)) {
        measured = true;
        timed |= atomic_load(&rg_recorded->header.mechanism) == RG_REC_CUPTI;
        atomic_fetch_add(timed ? &rg_recorded->header.timed : &rg_recorded->header.untimed, 1);
    }
    rg_record_put(rg_recorded, (uint64_t[RG_REC_WORDS - 1]){
                                   rg_record_word(RG_REC_LAUNCH, (measured ? 2u : 0) | timed, (uint32_t)kind, thread_number()),
                                   now_launching.number, now_launching.begin_ns, end_ns, rg_track_key(what->stream), gemm_call,
                                   (uint64_t)(now_launching.really + 1)});
}

void rg_record_request(enum rg_record_source source, uint64_t at_ns, uint64_t latency_ns)
{
    if (level_now() < RG_REC_QUIET)
        return;
    uint32_t level = level_now(), in_force = atomic_load(&rg_recorded->header.in_force);
    if (level == RG_REC_TIMED && in_force != RG_REC_TIMED)
        level = RG_REC_LOG; /* what it launched has not been timed */
    if (source == RG_REC_WAITED && rg_agent_is_self())
        source = RG_REC_IDLE;
    rg_record_put(rg_recorded, (uint64_t[RG_REC_WORDS - 1]){
                                   rg_record_word(RG_REC_REQUEST, (uint32_t)source, level, thread_number()), 0, at_ns, latency_ns});
}

uint64_t rg_record_wait_begin(void)
{
    return level_now() < RG_REC_LOG ? 0 : rg_now_ns();
}

void rg_record_wait_end(uint64_t begin_ns)
{
    bool busy = false;
    for (uint32_t m = 0; m < atomic_load(&rg.member_count); m++)
        for (int i = 0; i < RG_MAX_DEVICES; i++)
            busy |= atomic_load_explicit(&rg.members[m].busy[i], memory_order_relaxed) != 0;
    if (begin_ns)
        rg_record_put(rg_recorded, (uint64_t[RG_REC_WORDS - 1]){rg_record_word(RG_REC_WAIT, !busy, 0, thread_number()), 0,
                                                                  begin_ns, rg_now_ns()});
}

uint64_t rg_record_gemm_begin(const rg_record_gemm *gemm)
{
    static _Atomic uint64_t calls;
    uint64_t before = gemm_call;
    if (level_now() < RG_REC_LOG)
        return before;
    gemm_call = atomic_fetch_add(&calls, 1) + 1;
    rg_record_put(rg_recorded, (uint64_t[RG_REC_WORDS - 1]){rg_record_word(RG_REC_GEMM, 0, (uint32_t)gemm->type + 1, 0),
                                                              gemm_call, gemm->m, gemm->n, gemm->k, gemm->batch});
    return before;
}

void rg_record_gemm_end(uint64_t before)
{
    gemm_call = before;
}

/* ---- the thread ---- */

static void say_why(const char *why)
{
    rg_record_header *h = &rg_recorded->header;
    for (size_t i = 0; i + 1 < sizeof h->why; i++) {
        __atomic_store_n(&h->why[i], why[i], __ATOMIC_RELAXED);
        if (!why[i])
            break;
    }
}

static void choose_mechanism(void)
{
    char why[sizeof rg_recorded->header.why] = "";
    rg_record_header *h = &rg_recorded->header;
    bool cupti = atomic_load(&h->wanted) != RG_REC_EVENTS && rg_cupti_start(why, sizeof why);
    say_why(why);
    atomic_store(&h->mechanism, cupti ? RG_REC_CUPTI : RG_REC_EVENTS);
}

/* Brings into force what is asked for. What was timed until now is in the ring before a lower level is said to be in force. */
static void follow_level(uint32_t level)
{
    rg_record_header *h = &rg_recorded->header;
    uint32_t before = atomic_load(&h->in_force);
    if (level == before)
        return;
    if (level == RG_REC_TIMED) {
        if (!atomic_load(&h->mechanism))
            choose_mechanism();
        if (atomic_load(&h->mechanism) == RG_REC_CUPTI && !rg_cupti_on())
            atomic_store(&h->mechanism, RG_REC_EVENTS);
    } else if (before == RG_REC_TIMED) {
        if (atomic_load(&h->mechanism) == RG_REC_CUPTI)
            rg_cupti_off();
        else if (atomic_load(&timings_begun) != atomic_load(&timings_done) && atomic_load(&stopping) == 0)
            return; /* not yet */
    }
    atomic_store(&h->in_force, level);
}

static void *record_main(void *unused)
{
    (void)unused;
    prctl(PR_SET_NAME, "rigel-record");
    CUstreamCaptureMode relaxed = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (rg_real.cuThreadExchangeStreamCaptureMode)
        rg_real.cuThreadExchangeStreamCaptureMode(&relaxed);
    for (bool last = false; !last;) {
        last = atomic_load(&stopping);
        while (timings_poll())
            continue;
        if (atomic_load(&rg_recorded->header.in_force) == RG_REC_TIMED)
            rg_cupti_poll();
        follow_level(last ? RG_REC_COUNT : level_now());
        if (!last)
            nanosleep(&(struct timespec){.tv_nsec = POLL_NS}, NULL);
    }
    return NULL;
}

/* The ring is the first process's; one that has gone leaves it to the next. */
static bool claim_ring(void)
{
    rg_record_header *h = &rg_recorded->header;
    uint64_t me = atomic_load(&rg.slot->owner), owner = atomic_load(&h->owner);
    if (!atomic_load(&h->capacity))
        return false;
    if ((!owner || !rg_owner_alive(owner)) && atomic_compare_exchange_strong(&h->owner, &owner, me)) {
        atomic_store(&h->in_force, RG_REC_COUNT);
        return true;
    }
    atomic_fetch_add(&h->others, 1);
    return false;
}

bool rg_record_attach(void)
{
    const char *path = getenv("RIGEL_RECORD");
    char why[512];
    if (!path || !*path)
        return false;
    rg_recorded = rg_record_open(path, why, sizeof why);
    if (!rg_recorded) {
        rg_say("rigel: %s; what this program launches is not recorded", why);
        return false;
    }
    writes = claim_ring();
    if (!writes)
        return true;
    /* From the first launch on, if that is asked for. */
    follow_level(level_now());
    started = rg_thread_start(&thread, record_main, NULL);
    if (!started)
        writes = false;
    return true;
}

void rg_record_stop(void)
{
    if (!started)
        return;
    started = false;
    atomic_store(&stopping, 1);
    if (!pthread_equal(pthread_self(), thread))
        rg_join(thread); /* or the process exits without it */
}
