/*
 * model.h: a GPU as a discrete-event model: streams, kernels, copies, events, graphs, priorities, several processes.
 *
 * The whole GPU is one flat structure of fixed-size arrays linked by indices, so that it can live in a file that
 * several processes map at different addresses, be copied with memcpy and be compared with memcmp. Time is nanoseconds
 * handed in by the caller: the stand-in driver hands in the wall clock, a scenario hands in virtual time.
 *
 * It must never read a clock, take a lock, allocate, follow a pointer stored in itself, or use floating point.
 *
 * Vocabulary
 *   context   one process's (or one created) CUDA context; its memory and work go when it is removed
 *   stream    FIFO of operations; an operation starts when the one before it in its stream is done
 *   kernel    a grid of equal blocks, each taking `block_ns` on the SM it is placed on
 *   cohort    blocks of one kernel that started at the same instant; they end at the same instant: one event
 *   domain    contexts that can be on the SMs together: all of them when `shared` (MPS), else each one alone
 *   engine    a serial resource for copies: host-to-device, device-to-host, and device memory (device copies, memsets)
 *   ticket    number of an operation, rising over the whole model; 0 is none
 *
 * Rules of the model, each tested with hand-worked numbers in test/test-model.c
 *   1. Blocks are dispatched in the order (priority, arrival); a kernel's first block starts only when every kernel
 *      before it in that order has all its blocks placed ("leftover"). Running blocks are never preempted by priority:
 *      a high-priority kernel takes freed room first. Source: Amert et al., "GPU Scheduling on the NVIDIA TX2: Hidden
 *      Details Revealed", RTSS 2017, and Olmedo et al., "Dissecting the CUDA scheduling hierarchy", RTAS 2020.
 *   2. A block goes to the SM that has room for most blocks of its kernel, the lowest-numbered of several. Source:
 *      Gilman et al., "Demystifying the Placement Policies of the NVIDIA GPU Thread Block Scheduler for Concurrent
 *      Kernels", SIGMETRICS Performance Evaluation Review 2020.
 *   3. Room on an SM is counted in blocks, warps, registers and shared memory with the occupancy calculator's units.
 *   4. Without `shared`, one context owns the SMs at a time. It is exchanged at the end of its slice, or when it has
 *      had no work for `idle_ns`, at a cost of `switch_ns` in which no block runs. The last
 *      `restore_ns` of that are the first of the slice of the one that comes: in slices as short nobody comes forward. The blocks
 *      of a context that lost the SMs keep what remained of their time. An uncontested context's slices follow one another from the moment it
 *      got the SMs. Each context has a slice length of its own. From a context without work that is stopped (rule 9) to another it costs
 *      `stopped_switch_ns`: there is nothing to save.
 *   5. Copies and memsets do not use SMs and do not take part in time slices.
 *   6. Blocks of several kernels side by side slow one another, all of a kind alike and at once. A kernel that fills the
 *      GPU as far as an SM holds it is taken to use all of the GPU: what is placed beyond that adds `sm_contention` of it to
 *      everybody's time. Kernels bound by memory take, of that, `mixed_contention` as their part, and besides share the bandwidth
 *      that others leave by what each asks for (a roofline). With both 0 and no kernel's demand known, durations do not depend on
 *      what runs beside. Copies take no part.
 *   7. At one instant: endings, then what they let start, then arrivals, then exchange of contexts, then dispatch.
 *   8. A suspended context starts nothing but copies and memsets (they go through channels that are not suspended) and
 *      does not get the SMs. If it has them, its blocks run on for `preempt_ns`, unless it loses the SMs before; then
 *      the SMs are empty, and whoever gets them next, itself or another, pays a switch. What it has queued stays. If another context has
 *      the SMs, no block of that runs for `disturb_ns`, after which it has another slice.
 *   9. A stop is an operation that takes no time, unless its context is stopped: then it waits until that is so no more, and with it what
 *      follows in its stream. What runs runs on.
 */
#ifndef RIGEL_SIM_MODEL_H
#define RIGEL_SIM_MODEL_H

#include <limits.h>
#include <stdbool.h>
#include <stdint.h>

enum {
    RG_MODEL_MAX_SMS = 160,
    RG_MODEL_MAX_BLOCKS_PER_SM = 64,
    RG_MODEL_MAX_CONTEXTS = 64,
    RG_MODEL_MAX_STREAMS = 2048,
    RG_MODEL_MAX_EVENTS = 16384,
    RG_MODEL_MAX_OPS = 65536,
    RG_MODEL_MAX_COHORTS = 8192, /* one domain needs at most SMs x blocks per SM: 132 x 32 */
    RG_MODEL_MAX_GRAPHS = 1024,
    RG_MODEL_MAX_NODES = 65536,
    /* Launches a stream takes before the caller has to wait; NVIDIA states no number, its users count 1024:
     * forums.developer.nvidia.com/t/68937 ("the buffer size is about 1000 kernels", one for each stream). */
    RG_MODEL_STREAM_DEPTH = 1024,
    RG_MODEL_HIGHEST_PRIORITY = -5, /* cuCtxGetStreamPriorityRange on an H200: 0 to -5 */
    RG_MODEL_LOWEST_PRIORITY = 0,
    RG_MODEL_PRIORITIES = 6,
    RG_MODEL_INHERIT = INT_MIN, /* a kernel's priority: that of its stream */
};

#define RG_MODEL_NEVER UINT64_MAX

/* What functions that can fail return: 0 or one of these. */
enum {
    RG_MODEL_FULL = -1,      /* the stream (or the model) holds as many operations as it can: wait and try again */
    RG_MODEL_INVALID = -2,   /* no such context, stream, event or graph; or a kernel no SM can ever hold */
    RG_MODEL_NO_MEMORY = -3, /* device memory would be exceeded */
    RG_MODEL_NO_SLOT = -4,   /* the model's table of contexts, streams, events or graphs is full */
    RG_MODEL_SHARED = -5,    /* the contexts share the SMs: there are no slices and nothing to suspend */
};

/* A GPU. presets.def has three with their sources; a test may make one of two SMs and no latencies. */
typedef struct {
    char name[64];
    uint32_t sms;
    uint32_t threads_per_sm, blocks_per_sm, registers_per_sm, shared_bytes_per_sm;
    uint32_t threads_per_block, shared_bytes_per_block; /* the most one block may ask for (opt-in shared memory) */
    uint32_t reserved_shared_bytes;                     /* the system's share of shared memory, per resident block */
    uint32_t compute_major, compute_minor;
    uint32_t clock_khz, memory_clock_khz, memory_bus_bits, l2_bytes;
    uint64_t memory_bytes;
    uint64_t memory_bytes_per_us, h2d_bytes_per_us, d2h_bytes_per_us;
    uint64_t launch_ns;     /* from submitting to an idle stream to the earliest start */
    uint64_t chain_ns;      /* from the end of one operation to the start of the next in its stream */
    uint64_t graph_node_ns; /* the same between two nodes of a graph */
    uint64_t slice_ns, switch_ns;
    uint64_t stopped_switch_ns;
    uint64_t restore_ns; /* of switch_ns, what counts in the slice that follows */
    uint64_t idle_ns;    /* how long a context without work keeps the SMs from others that have some */
    uint64_t preempt_ns; /* from suspending a context that is on the SMs to their being empty */
    uint64_t disturb_ns; /* what suspending one that is not on them takes of whoever is */
    uint32_t sm_contention;    /* thousandths: 1000, kernels that want twice the GPU take twice as long; 0, no longer */
    uint32_t mixed_contention; /* thousandths of that, between kernels bound by memory and others */
    uint32_t shared; /* 1: contexts share the SMs (MPS); 0: time slices */
} rg_model_params;

typedef struct {
    uint64_t blocks;
    uint32_t threads;          /* per block */
    uint32_t registers;        /* per thread */
    uint32_t shared_bytes;     /* per block, static and dynamic */
    uint64_t block_ns;         /* 0 counts as 1 */
    uint32_t memory_permille;  /* of the memory's bandwidth that it takes with the GPU to itself; 0: not known */
    bool memory_bound;         /* it takes longer when it gets less of it */
} rg_model_kernel;

typedef enum { RG_MODEL_H2D = 0, RG_MODEL_D2H = 1, RG_MODEL_D2D = 2, RG_MODEL_MEMSET = 3 } rg_model_transfer;

typedef struct {
    uint64_t kernels, transfers, blocks; /* finished; graph nodes count one by one */
    uint64_t busy_ns;                    /* time during which at least one of the context's blocks ran */
    uint64_t memory_bytes;
} rg_model_context_stats;

typedef struct {
    uint64_t sm_busy_ns; /* sum over SMs of the time with at least one running block */
    uint64_t switches;   /* exchanges of the context that owns the SMs */
    uint64_t memory_bytes;
    uint64_t cohorts;    /* dispatches so far: the model's own work */
} rg_model_stats;

/* ---- Inside. Callers use the functions below; the fields are here so that the size is known and tests can look. */

/* Resources in four 16-bit lanes: blocks, warps, registers/256, shared memory/128. Lanes never borrow: see fit(). */
typedef uint64_t rg_model_lanes;

typedef struct {
    uint64_t seq;       /* ticket */
    uint64_t submit_ns; /* time of the call */
    uint64_t arrive_ns; /* earliest start, once every dependence is met; 0 before */
    uint64_t min_ns;    /* what it takes at least, on an empty GPU */
    uint64_t amount;    /* kernel: ns per block; transfer: bytes; record, wait: the event's version */
    uint64_t launch;    /* kernel: number of this dispatch, unique; a graph's nodes have one each */
    rg_model_lanes need;
    uint64_t demand;      /* of one block: bandwidth, in thousandths << 20 */
    uint64_t blocks_left; /* not placed yet */
    uint32_t running;     /* placed and not ended */
    uint32_t next;        /* in its stream */
    uint32_t ready_next;  /* in a priority level or an engine */
    uint32_t target;      /* event or graph slot */
    uint32_t node;        /* graph: node being run */
    uint32_t capacity;    /* kernel: blocks an empty GPU holds */
    uint16_t stream;
    uint8_t kind;  /* of the operation */
    uint8_t doing; /* kind of the work in progress: a graph's is its node's */
    int8_t priority;
    uint8_t phase;
    uint8_t transfer;
    uint8_t bound; /* by memory: 1 */
} rg_model_op;

typedef struct {
    uint64_t end; /* by the clock of its kind in its domain */
    uint64_t seq; /* orders equal ends */
    uint64_t launch, demand;
    rg_model_lanes need;
    uint32_t op, total, weight, child, sibling;
    uint8_t context, bound;
    uint8_t runs;
    uint8_t run_end[RG_MODEL_MAX_SMS];
    uint8_t count[RG_MODEL_MAX_SMS]; /* blocks on each SM of the run */
} rg_model_cohort;

typedef struct {
    /* Of kernels not bound by memory, and of those that are: how far their blocks have come, in 1/1024 ns. The clocks run at
     * `rate` a nanosecond, 1024 without contention, and stand still while the domain does not have the SMs. */
    struct {
        uint64_t done;
        uint32_t rate;
        uint32_t heap;   /* cohorts by end */
        uint64_t weight; /* of its cohorts: of 2^20 for the whole GPU */
        uint64_t demand; /* of its cohorts, for bandwidth: of 1000 << 20 */
    } clock[2];
    uint64_t since;     /* when the clocks were last brought up to date */
    uint64_t saturated; /* launch of the head kernel that was tried and found no more room; 0: not known */
    uint32_t load;      /* kernels that run, are ready or on their way: it wants the SMs */
    uint32_t busy_sms;
    struct {
        uint32_t head, tail;
    } ready[RG_MODEL_PRIORITIES];
    /* The SMs' room in runs of neighbours with equal room: run i goes from run_end[i - 1] up to run_end[i]. Blocks are
     * spread evenly, so that there are a few runs, not one for each SM. */
    uint32_t runs;
    uint8_t run_end[RG_MODEL_MAX_SMS];
    rg_model_lanes room[RG_MODEL_MAX_SMS];
} rg_model_domain;

typedef struct {
    uint64_t memory_bytes, busy_ns, busy_since, kernels, transfers, blocks;
    uint32_t pending;  /* operations not done */
    uint32_t resident; /* cohorts on the SMs */
    uint32_t streams;  /* list; stored + 1 */
    uint32_t legacy;   /* stream + 1; 0: none */
    uint32_t blocking; /* streams ordered with it */
    uint64_t slice_ns;
    uint16_t generation;
    uint8_t used;
    uint8_t suspended;
    uint8_t stopped;
} rg_model_context;

typedef struct {
    uint64_t done_ns; /* when the last finished operation ended */
    uint32_t head, tail, depth;
    uint32_t next_in_context, next_pump, next_waiter; /* lists of streams; stored + 1 */
    uint16_t generation;
    uint8_t context;
    int8_t priority;
    uint8_t state;
    uint8_t blocking; /* orders itself with the context's legacy stream */
    uint8_t legacy;
    uint8_t pumping;
    uint8_t waits; /* its first operation waits for an event, or for other streams (legacy order) */
} rg_model_stream;

typedef struct {
    uint64_t requested, done; /* versions: one for each record */
    uint64_t time_ns;         /* of the last record that was reached */
    uint64_t ticket;          /* of the last record */
    uint32_t refs;            /* queued records and waits */
    uint32_t waiters;         /* streams + 1 */
    uint32_t stream;          /* id of the last record's stream */
    uint16_t generation;
    uint8_t context, state;
} rg_model_event;

typedef struct {
    rg_model_lanes need;
    uint64_t amount, blocks, min_ns, demand;
    uint32_t next, capacity;
    uint8_t kind, transfer, bound;
    int8_t priority;
} rg_model_node;

typedef struct {
    uint64_t min_ns;
    uint32_t head, tail, count, refs;
    uint16_t generation;
    uint8_t context, state;
} rg_model_graph;

typedef struct {
    rg_model_params p;
    rg_model_lanes whole; /* an empty SM */
    uint64_t now;
    uint64_t last_ticket, last_launch, last_cohort;

    /* Time slices. */
    int32_t active;      /* domain on the SMs, -1: none */
    int32_t next_active; /* while switching: the one that comes */
    uint64_t slice_from; /* when `active` got the SMs */
    uint64_t slice_spent; /* of the slice that began then, before it */
    uint64_t slice_end;  /* 0: nobody else wants them */
    uint64_t idle_from;  /* when `active` last ran out of work */
    uint64_t switch_end; /* 0: not switching */
    uint64_t preempt_at; /* when `active` has to leave, if it is suspended */
    uint32_t vacated;    /* domain + 1 that a suspension took off the SMs, until somebody gets them; 0: none */
    uint8_t disturbed;   /* another one than that on the SMs was suspended at this instant */
    uint32_t wanting;    /* domains with load that are not suspended */
    uint8_t kick;        /* something changed outside an instant: look at the present again */

    uint64_t sm_busy_ns, sm_busy_since, switches;
    uint64_t memory_bytes;
    uint32_t op_free, op_used, cohort_free, cohort_used, node_free, node_used;
    uint32_t stream_hint, event_hint, graph_hint;
    uint32_t pump_head, pump_tail; /* streams + 1 */
    uint32_t ended;                /* cohorts that ended at this instant and still hold their room */
    uint32_t timers;
    struct {
        uint64_t end_ns;
        uint32_t head, tail;
    } engine[3];
    struct {
        uint64_t at, seq;
        uint32_t stream;
    } timer[RG_MODEL_MAX_STREAMS]; /* heap: arrivals */

    rg_model_context contexts[RG_MODEL_MAX_CONTEXTS];
    rg_model_domain domains[RG_MODEL_MAX_CONTEXTS];
    rg_model_stream streams[RG_MODEL_MAX_STREAMS];
    rg_model_event events[RG_MODEL_MAX_EVENTS];
    rg_model_graph graphs[RG_MODEL_MAX_GRAPHS];
    rg_model_cohort cohorts[RG_MODEL_MAX_COHORTS + 1]; /* 0 is no cohort; likewise below */
    rg_model_op ops[RG_MODEL_MAX_OPS + 1];
    rg_model_node nodes[RG_MODEL_MAX_NODES + 1];
} rg_model;

/* ---- Set-up */

/* rg_model_preset: parameters of a known GPU ("h200", "a100", "l4"; slices, not shared), or NULL. */
const rg_model_params *rg_model_preset(const char *name);

/* rg_model_init: makes a GPU at time 0. `m` must be zero-filled; pages that are not needed are not touched. */
void rg_model_init(rg_model *m, const rg_model_params *params);

/*
 * rg_model_recover: after a caller died inside one of these functions, makes the model consistent again: everything
 * that was in flight counts as finished now, contexts, streams, events, graphs and memory stay.
 */
void rg_model_recover(rg_model *m);

/* ---- Time. Every function below acts at the model's present, which only rg_model_advance moves. */

/* rg_model_advance: lets everything up to and including `now_ns` happen. Going back is ignored. */
void rg_model_advance(rg_model *m, uint64_t now_ns);

/* rg_model_next_event: when something next happens by itself (maybe now), or RG_MODEL_NEVER. */
uint64_t rg_model_next_event(const rg_model *m);

/* ---- Contexts, streams and memory. Ids are never 0 and not reused soon. */

int rg_model_add_context(rg_model *m, uint32_t *context);

/* rg_model_remove_context: its work stops this instant; its streams, events, graphs and memory go. */
int rg_model_remove_context(rg_model *m, uint32_t context);

/*
 * rg_model_set_slice: the length of the context's slices, from the one in progress on; 0 is INVALID. A new context has
 * the preset's. rg_model_suspend: whether the context is suspended (rule 8); telling it what it is already changes
 * nothing. Both at any time; SHARED under `shared`: on the GPU, suspending one MPS client stalls the others.
 */
int rg_model_set_slice(rg_model *m, uint32_t context, uint64_t ns);
int rg_model_suspend(rg_model *m, uint32_t context, bool suspended);

/* rg_model_stop: whether the context is stopped (rule 9). As rg_model_suspend, and under `shared` too. */
int rg_model_stop(rg_model *m, uint32_t context, bool stopped);

enum { RG_MODEL_NON_BLOCKING = 0, RG_MODEL_BLOCKING = 1, RG_MODEL_LEGACY = 2 };

/*
 * rg_model_create_stream: `sync` tells how it is ordered with the context's legacy stream (CUDA's NULL stream): the
 * legacy stream's work starts after all earlier work of blocking streams and before all later. One legacy stream a
 * context.
 */
int rg_model_create_stream(rg_model *m, uint32_t context, int priority, int sync, uint32_t *stream);

/* rg_model_destroy_stream: takes nothing more; what is queued still runs. */
int rg_model_destroy_stream(rg_model *m, uint32_t stream);

/* rg_model_set_priority: for kernels submitted from now on. Clamped to the range. */
int rg_model_set_priority(rg_model *m, uint32_t stream, int priority);
int rg_model_get_priority(const rg_model *m, uint32_t stream, int *priority);

int rg_model_allocate(rg_model *m, uint32_t context, uint64_t bytes);
int rg_model_release(rg_model *m, uint32_t context, uint64_t bytes);

/* ---- Work. `ticket` may be NULL. */

int rg_model_submit_kernel(rg_model *m, uint32_t stream, const rg_model_kernel *k, int priority, uint64_t *ticket);
int rg_model_submit_transfer(rg_model *m, uint32_t stream, rg_model_transfer t, uint64_t bytes, uint64_t *ticket);

/* rg_model_occupancy: blocks of the kernel one empty SM holds; 0 when none fits. */
uint32_t rg_model_occupancy(const rg_model_params *p, const rg_model_kernel *k);

/*
 * Events. A record is reached when everything before it in its stream is done; event and stream must be of one context.
 * A wait, in a stream of any context, is for the last record so far.
 */
int rg_model_create_event(rg_model *m, uint32_t context, uint32_t *event);
int rg_model_destroy_event(rg_model *m, uint32_t event);
int rg_model_record(rg_model *m, uint32_t event, uint32_t stream, uint64_t *ticket);
int rg_model_wait(rg_model *m, uint32_t event, uint32_t stream, uint64_t *ticket);

/* rg_model_runs_long: the GPU has begun with a kernel or graph of the context that takes this long at least. */
bool rg_model_runs_long(const rg_model *m, uint32_t context, uint64_t ns);

/* A stop, for rg_model_stop. */
int rg_model_submit_stop(rg_model *m, uint32_t stream, uint64_t *ticket);

/* Graphs: a chain of nodes that one operation runs in the order they were added. None can be added while it runs. */
int rg_model_create_graph(rg_model *m, uint32_t context, uint32_t *graph);
int rg_model_destroy_graph(rg_model *m, uint32_t graph);
int rg_model_graph_kernel(rg_model *m, uint32_t graph, const rg_model_kernel *k, int priority);
int rg_model_graph_transfer(rg_model *m, uint32_t graph, rg_model_transfer t, uint64_t bytes);
int rg_model_submit_graph(rg_model *m, uint32_t stream, uint32_t graph, uint64_t *ticket);

/* ---- Questions. Unknown streams, events and contexts count as done. */

/* rg_model_done: the operation with this ticket in this stream is finished. */
bool rg_model_done(const rg_model *m, uint32_t stream, uint64_t ticket);
bool rg_model_stream_idle(const rg_model *m, uint32_t stream);
/* rg_model_context_done: everything of the context up to and including this ticket is finished. */
bool rg_model_context_done(const rg_model *m, uint32_t context, uint64_t ticket);
/* rg_model_event_done: its last record was reached, at *time_ns (0: never recorded). */
bool rg_model_event_done(const rg_model *m, uint32_t event, uint64_t *time_ns);

/*
 * rg_model_earliest: no ticket of this stream up to `ticket` is finished before this time, unless a context is removed,
 * or a context's slice, suspension or stop changes. RG_MODEL_NEVER: not before its context is resumed, or stopped no
 * more (at a stop that its stream has come to).
 * For waiters: sleeping until then costs one wake-up where waking at every event of the model would cost hundreds.
 */
uint64_t rg_model_earliest(const rg_model *m, uint32_t stream, uint64_t ticket);
uint64_t rg_model_context_earliest(const rg_model *m, uint32_t context, uint64_t ticket);
uint64_t rg_model_event_earliest(const rg_model *m, uint32_t event);
/* rg_model_room_earliest: the first `count` operations of the stream's queue are not finished before this time. */
uint64_t rg_model_room_earliest(const rg_model *m, uint32_t stream, uint32_t count);

int rg_model_get_context_stats(const rg_model *m, uint32_t context, rg_model_context_stats *out);
void rg_model_get_stats(const rg_model *m, rg_model_stats *out);

#endif
