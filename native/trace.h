/*
 * trace.h: what every thread of a client does and waits in, and the client's last operations.
 *
 * Two things, both in the segment, both written by the thread that does the operation and readable at any instant, also
 * after the process was killed:
 *   threads   one row a thread (rg_thread): the call it is in and since when, the last one it finished, kernel, device, context
 *   records   a ring of the client's last RG_TRACE_RECORDS operations (rg_trace), while settings.trace is 1
 *
 * A record is four words of which each carries the number of its lap in the top 12 bits, so there is no order to keep
 * between the stores and nothing to wait for: a reader takes a record whose four laps are the same, and leaves out one that
 * is being written, was left half-written by a kill, or was overtaken by a writer a lap ahead. A thread takes up to
 * RG_RECORD_BLOCK places at once, since an atomic addition waits for all that was stored before it (10 to 20 ns on an H200
 * host's Intel processor). What stands in a place that it has taken and not come to is of the lap before, and left out as well.
 *
 * Times are ticks: the processor's own counter where it is invariant and the kernel itself keeps time by it (10 ns to
 * read in a virtual machine, clock_gettime 25 ns), else nanoseconds of CLOCK_MONOTONIC. The header says which, and what
 * both clocks said when the segment was made; a reader looks at both again and has the rate.
 * A launch, memset or copy that need not wait takes the time once, and is recorded before it is made; all else when it has returned. Of
 * launches of a high client that follow one another (rg_again in client.h) one in four takes the time, unless anything has come between
 * (a virtual machine on an H200's host takes 20 to 50 ns for it, a launch comes every 10 us); a reader spreads the others. With records off
 * all have the time of the agent's last beat.
 *
 * Rule: what is inline here has no lock, allocation, system call or log, but where a thread or a kernel is new.
 */
#ifndef RIGEL_TRACE_H
#define RIGEL_TRACE_H

#include "segment.h"

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

/* What an operation is; in a record, and in the layout by name. */
#define RG_TRACE_KINDS(X) \
    X(none) X(launch) X(graph) X(copy) X(memset) X(sync) X(event_sync) X(gate) X(suspension) X(request) X(alloc) X(free) \
    X(collective) X(call)
enum rg_trace_kind {
#define RG_ENUM(name) RG_TRACE_##name,
    RG_TRACE_KINDS(RG_ENUM)
#undef RG_ENUM
};

/* Operations besides the hooked functions of the driver, whose numbers are 1 + enum rg_hook, and of NCCL and cuBLAS, which follow. */
#define RG_TRACE_OPERATIONS(X) \
    X(wait_high)     /* at the gate, because a high client is busy */ \
    X(wait_turn)     /* at the gate, because it is another client's turn */ \
    X(wait_inflight) /* at the gate, because so much of its own work is unfinished */ \
    X(paused)        /* at the gate, until it is resumed */ \
    X(suspended)     /* its channels are off the GPU; Rigel's own thread says so */ \
    X(request)       /* a high client's busy period */
enum rg_trace_operation {
    RG_OP_NONE = 0,
#define RG_WORK(symbol, ...) RG_OP_##symbol,
#define RG_SPECIAL(symbol, ...) RG_OP_##symbol,
#include "hooks.def"
#undef RG_WORK
#undef RG_SPECIAL
#define RG_NCCL_CALL(symbol, ...) RG_OP_##symbol,
#define RG_NCCL_SPECIAL(symbol, ...) RG_OP_##symbol,
#include "nccl.def"
#undef RG_NCCL_CALL
#undef RG_NCCL_SPECIAL
#define RG_BLAS_CALL(symbol, ...) RG_OP_##symbol,
#define RG_BLAS_SPECIAL(symbol, ...) RG_OP_##symbol,
#define RG_BLAS_SET(...)
#define RG_BLAS_GET(...)
#include "cublas.def"
#undef RG_BLAS_CALL
#undef RG_BLAS_SPECIAL
#undef RG_BLAS_SET
#undef RG_BLAS_GET
#define RG_ENUM(name) RG_OP_##name,
    RG_TRACE_OPERATIONS(RG_ENUM)
#undef RG_ENUM
    RG_OP_COUNT
};
extern const char *const rg_op_names[RG_OP_COUNT]; /* of enum rg_trace_operation */

/*
 * The words of a record, below the lap:
 *   0  tick at its beginning
 *   1  operation | kind << 10 | thread id << 16 | 1 + track << 38 | RG_RECORD_FAILED | RG_RECORD_CONTINUED
 *   2  argument: launch, graph: name | weight in flight there << 16; copy, memset, alloc, free: bytes; else the operation's own
 *   3  ticks it lasted; 0: not measured (a launch that returned at once)
 */
enum { RG_RECORD_WORDS = 4, RG_RECORD_BITS = 52, RG_RECORD_LAPS = 4095 };
#define RG_RECORD_MASK ((1ull << RG_RECORD_BITS) - 1)
#define RG_RECORD_FAILED (1ull << 46)    /* the call returned an error */
#define RG_RECORD_CONTINUED (1ull << 47) /* of a wait in several pieces, not the first of its operation */

/* The recorder of this client. */
typedef struct {
    /* What a launch reads, one cache line. */
    _Alignas(64) _Atomic uint64_t epoch; /* rg_changed, in the high half; in the low one the agent's beats */
    rg_trace *trace;
    _Atomic uint64_t *records;    /* rg_client.records */
    _Atomic uint32_t *on;         /* settings.trace */
    _Atomic uint64_t beat_tick;   /* when the agent last looked at the clock */
    bool processor;               /* ticks are the processor's */
    _Atomic bool ranges;          /* a tool is told of every operation (nvtx.c) */
    rg_thread *threads;           /* RG_MAX_THREADS rows */
    rg_segment *segment;
    _Atomic uint64_t *lost;       /* rg_client.threads_lost */
} rg_recorder;
extern rg_recorder rg_rec;

/*
 * rg_changed: something is not as it was that a thread of a high client takes for granted which goes on launching on its stream (rg_again
 * in client.h): that nobody has taken the stream's work for all there is (a token in its track), or the client for idle; class, records,
 * captures, clients, streams. Said after the change, and before the driver is called for its sake: what was launched without knowing of it
 * is in front of that call then. Said every 100 ms by the agent, too, for what nobody says: a context that is set by no hook.
 */
#define RG_EPOCH (1ull << 32)
static inline void rg_changed(void)
{
    atomic_fetch_add(&rg_rec.epoch, RG_EPOCH);
}

/*
 * What one thread has called: it alone counts (and who takes the row of one that ended unseen), whoever has `busy` adds what is new to the
 * client's counts in the segment. Once in 100 ms, when the thread ends, and when its work becomes another client's.
 */
typedef struct {
    _Alignas(64) _Atomic uint32_t busy;
    _Atomic uint32_t client; /* slot */
    _Atomic uint64_t from;   /* 1 + the row's `launches` when the first of those came that are not in `count` (rg_again); 0: none are */
    _Atomic uint32_t again;  /* the operation that those are */
    _Atomic uint64_t count[RG_MAX_OPERATIONS];
    uint64_t added[RG_MAX_OPERATIONS];
} rg_own_calls;
_Static_assert((int)RG_OP_COUNT <= (int)RG_MAX_OPERATIONS, "operations");

/* The calling thread: what a launch needs is one cache line. */
typedef struct {
    _Alignas(64) rg_thread *row; /* NULL before its first operation. Where the table is full, a row that nobody reads. */
    rg_own_calls *calls; /* NULL as `row` is */
    uint64_t record;     /* where its next record goes, of `left` places that follow one another */
    uintptr_t stream;    /* that it goes on launching on, and what of its records that decides; as of `epoch` (client.h, rg_again) */
    uint64_t who;
    _Atomic uint64_t *launches; /* of rg_client.launches, the one that it alone raises; NULL: none */
    uint64_t epoch;      /* that of the process, 1 added to the high half, as of when it last took the time; 0: its next launch has to look */
    uint16_t lap;        /* the one that the places are all of */
    uint8_t left;
    uint8_t untimed;     /* so many launches more have the time of the last one (rg_again) */
    bool held;           /* it has waited at the gate, and not yet made the call that it waited with */
    bool counts;         /* it has tried to take one of `launches` */
    uint8_t block;       /* how many places it took last */
    bool uncounted;      /* not all that it has launched is among its calls (rg_again_count) */
} rg_this_thread;
_Static_assert(sizeof(rg_this_thread) == 64, "one cache line");
extern _Thread_local rg_this_thread rg_this __attribute__((tls_model("initial-exec")));

/* rg_call_count: one more. In a client, where the thread has a row. */
static inline void rg_call_count(uint32_t operation)
{
    _Atomic uint64_t *count = &rg_this.calls->count[operation];
    atomic_store_explicit(count, atomic_load_explicit(count, memory_order_relaxed) + 1, memory_order_relaxed);
}

/* rg_calls_belong: what this thread calls from here on is this client's. rg_calls_add: adds up what all threads have called. */
void rg_calls_belong(uint32_t slot);
void rg_calls_add(void);

/*
 * rg_again_count: a thread that goes on launching (rg_again in client.h) counts its calls in its row's `launches` only; this adds them to
 * the others, before the thread is in another operation. Who adds up the calls of all threads finds them where they are.
 */
void rg_again_count(void);

/* rg_trace_attach: called once while the process becomes a client. */
void rg_trace_attach(rg_segment *seg, int slot);

/* rg_trace_beat: called by the agent whenever it wakes: what has not returned by then takes long. */
void rg_trace_beat(void);

/* rg_launches_take: takes one of rg_client.launches for the calling thread, unless it has tried before. */
RG_COLD void rg_launches_take(void);

/* rg_thread_slot: slot of the client that the calling thread is (member.c). */
uint32_t rg_thread_slot(void);

/* rg_thread_enter: slow half of rg_op_begin: takes a row for this thread. */
RG_COLD rg_thread *rg_thread_enter(void);

/* rg_processor_ticks: whether the processor's counter serves as a clock here. rg_both_clocks: what it and the kernel's say at one moment;
 * returns for how many ticks that lasted. */
bool rg_processor_ticks(void);
uint64_t rg_both_clocks(uint64_t *tick, uint64_t *ns);

static inline uint64_t rg_processor_tick(void)
{
#if defined(__x86_64__)
    return __rdtsc();
#elif defined(__aarch64__)
    uint64_t ticks;
    __asm__ volatile("mrs %0, cntvct_el0" : "=r"(ticks));
    return ticks;
#else
    return 0;
#endif
}

static inline uint64_t rg_tick(void)
{
    return __builtin_expect(rg_rec.processor, 1) ? rg_processor_tick() : rg_now_ns();
}

/*
 * The kernel's clock by the processor's counter. What reads the kernel's is in no near cache, nor in any TLB, where a program
 * looks at it a few times a request: half a microsecond a look on an H200's host. The agent compares the two clocks every 100 ms.
 */
typedef struct {
    _Alignas(64) _Atomic uint32_t version; /* odd: it is being written */
    _Atomic uint64_t tick, ns; /* both clocks at one moment */
    _Atomic uint64_t rate;     /* 2^32 ths of a ns a tick; 0: not known */
} rg_clock_pair;
extern rg_clock_pair rg_clock;
enum { RG_CLOCK_BEHIND_NS = 1000, RG_CLOCK_LAST_NS = 1000000000 };

/*
 * rg_clock_ns: CLOCK_MONOTONIC a microsecond ago, to within one, so that it is not ahead of what others read of the kernel's; but while the
 * kernel's clock is being corrected, 50 us at 500 ppm. Two looks may be in the wrong order by that much: rg_since. Where the clocks have not
 * been compared lately, the kernel's own.
 */
static RG_INLINE uint64_t rg_clock_ns(void)
{
    uint32_t version = atomic_load_explicit(&rg_clock.version, memory_order_acquire);
    uint64_t tick = atomic_load_explicit(&rg_clock.tick, memory_order_acquire);
    uint64_t ns = atomic_load_explicit(&rg_clock.ns, memory_order_acquire), rate = atomic_load_explicit(&rg_clock.rate, memory_order_acquire);
    if (__builtin_expect(rate && !(version & 1) && version == atomic_load_explicit(&rg_clock.version, memory_order_relaxed), 1)) {
        __extension__ typedef unsigned __int128 product;
        uint64_t passed = (uint64_t)((product)(rg_processor_tick() - tick) * rate >> 32);
        if (__builtin_expect(passed < RG_CLOCK_LAST_NS, 1))
            return ns + passed;
    }
    return rg_now_ns() - RG_CLOCK_BEHIND_NS;
}

/* rg_since: nanoseconds from one time to another. */
static inline uint64_t rg_since(uint64_t from_ns, uint64_t to_ns)
{
    return to_ns > from_ns ? to_ns - from_ns : 0;
}

/* rg_clock_beat: compares the clocks; called by the agent every 100 ms. */
void rg_clock_beat(void);

/*
 * rg_name_of: 1 + index in the segment's names of a kernel or graph, 0 if it has none. A probe of a cache, in which a word is
 * handle << 16 | name. The driver gives handles out again for other kernels and graphs: rg_name_forget forgets the name of
 * one, rg_names_forget those of all. A request has few kernels, each many times (ResNet-50 25 in 229 launches).
 */
enum { RG_NAME_CACHE = 4096 };
extern _Atomic uint64_t rg_name_cache[RG_NAME_CACHE];
RG_COLD uint32_t rg_name_late(bool graph, uintptr_t handle);
void rg_name_forget(uintptr_t handle);
void rg_names_forget(void);
static inline _Atomic uint64_t *rg_name_entry_of(uintptr_t handle)
{
    return &rg_name_cache[(uint64_t)handle * 0x9e3779b97f4a7c15u >> 52];
}
/* 48 bits of a handle: all there are of an address, and enough of what the simulated GPU hands out. */
static inline uint64_t rg_name_key(uintptr_t handle)
{
    return ((uint64_t)handle ^ (uint64_t)handle >> 48) & 0xffffffffffffull;
}
static RG_INLINE uint32_t rg_name_of(bool graph, uintptr_t handle)
{
    uint64_t word = atomic_load_explicit(rg_name_entry_of(handle), memory_order_relaxed);
    return __builtin_expect(word >> 16 == rg_name_key(handle), 1) ? (uint32_t)(word & 0xffff) : rg_name_late(graph, handle);
}

/* rg_name_enter: 1 + index of a name, entered if new; 0 if there is no room. */
uint32_t rg_name_enter(const char *name);

/* rg_record_take: slow half of rg_record: takes places for this thread, one at first, and twice as many each time. Returns the first.
 * Places that are so far behind are given up (rg_record_catch_up): others will soon come round to them. */
enum { RG_RECORD_BLOCK = 64, RG_RECORD_BEHIND = RG_TRACE_RECORDS / 4, RG_RECORD_LOOK = 256 };
RG_COLD uint64_t rg_record_take(void);

/* rg_record_next: one record, at the thread's next place. A signal handler that records, too, may have interrupted this: its place is
 * another one, unless it comes between the first two statements here, and then one record is lost. */
static RG_INLINE uint64_t rg_record_next(uint32_t operation, enum rg_trace_kind kind, uint64_t who, uint64_t argument, uint64_t tick,
                                         uint64_t ticks)
{
    rg_trace *trace = rg_rec.trace;
    uint64_t n = rg_this.record;
    if (__builtin_expect(!rg_this.left, 0))
        n = rg_record_take();
    rg_this.record = n + 1;
    rg_this.left--;
    atomic_signal_fence(memory_order_seq_cst);
    uint64_t lap = (uint64_t)rg_this.lap << RG_RECORD_BITS;
    _Atomic uint64_t *word = &trace->records[n % RG_TRACE_RECORDS * RG_RECORD_WORDS];
    atomic_store_explicit(&word[0], lap | (tick & RG_RECORD_MASK), memory_order_relaxed);
    atomic_store_explicit(&word[1], lap | who | (uint64_t)kind << 10 | operation, memory_order_relaxed);
    atomic_store_explicit(&word[2], lap | (argument & RG_RECORD_MASK), memory_order_relaxed);
    atomic_store_explicit(&word[3], lap | (ticks & RG_RECORD_MASK), memory_order_relaxed);
    /* The ring is so long that the place of the next one is in no near cache: by the time that it is written, it will be. */
    RG_AHEAD_TO_WRITE(&trace->records[(n + 1) % RG_TRACE_RECORDS * RG_RECORD_WORDS]);
    return n;
}

/* rg_record_catch_up: gives this thread's places up if they are far behind. It takes half as many next time. */
static RG_INLINE void rg_record_catch_up(void)
{
    uint64_t behind = atomic_load_explicit(rg_rec.records, memory_order_relaxed) - rg_this.record;
    if (__builtin_expect(behind > RG_RECORD_BEHIND, 0) && rg_this.left) {
        rg_this.left = 0;
        rg_this.block /= 4; /* it records so seldom, or so many threads do, that others come round */
    }
}

/* rg_record: one record; the caller has looked whether they are wanted. */
static RG_INLINE uint64_t rg_record(uint32_t operation, enum rg_trace_kind kind, uint32_t tid, uint64_t marks, uint64_t argument,
                                    uint64_t tick, uint64_t ticks)
{
    rg_record_catch_up();
    return rg_record_next(operation, kind, (uint64_t)tid << 16 | marks, argument, tick, ticks);
}

/* An operation under way. */
typedef struct {
    rg_thread *row;
    uint64_t tick, beat, outer_tick;
    uint32_t operation, outer; /* outer: the row's `doing` before */
    bool on, ranged;
} rg_op;

/* rg_nvtx_push, rg_nvtx_pop: tell a tool that an operation begins and ends; only where rg_rec.ranges says so (nvtx.c). */
RG_COLD void rg_nvtx_push(uint32_t operation);
RG_COLD void rg_nvtx_pop(void);

/*
 * rg_op_begin: this thread is in `operation` from now on. `exact`: its time is measured whether records are on or not; for what
 * may wait. rg_op_end: it has returned. Operations nest (a collective launches a kernel). In a client only.
 */
static RG_INLINE rg_op rg_op_begin(uint32_t operation, bool exact)
{
    rg_op op = {.row = rg_this.row, .operation = operation};
    if (__builtin_expect(!op.row, 0))
        op.row = rg_thread_enter();
    if (__builtin_expect(rg_this.uncounted, 0))
        rg_again_count();
    rg_call_count(operation);
    op.outer = atomic_load_explicit(&op.row->doing, memory_order_relaxed);
    op.outer_tick = atomic_load_explicit(&op.row->since_tick, memory_order_relaxed);
    op.beat = atomic_load_explicit(&rg_rec.beat_tick, memory_order_relaxed);
    op.on = atomic_load_explicit(rg_rec.on, memory_order_relaxed) != 0;
    if (exact)
        rg_this.epoch = 0; /* what it launches meanwhile, and what it launches next, is another thing */
    rg_this.untimed = 0;
    op.tick = __builtin_expect(op.on, 1) || exact ? rg_tick() : op.beat;
    atomic_store_explicit(&op.row->before, op.outer & ~RG_DOING, memory_order_relaxed);
    atomic_store_explicit(&op.row->before_tick, op.outer_tick, memory_order_relaxed);
    if (exact) {
        uint64_t n = atomic_load_explicit(&op.row->calls, memory_order_relaxed);
        atomic_store_explicit(&op.row->calls, n + 1, memory_order_relaxed);
    }
    atomic_store_explicit(&op.row->since_tick, op.tick, memory_order_relaxed);
    atomic_store_explicit(&op.row->doing, operation | RG_DOING, memory_order_release);
    op.ranged = atomic_load_explicit(&rg_rec.ranges, memory_order_acquire);
    if (__builtin_expect(op.ranged, 0))
        rg_nvtx_push(operation);
    return op;
}

/* rg_wait_op: the same for what waits for `object`. */
static inline rg_op rg_wait_op(uint32_t operation, uint64_t object)
{
    rg_op op = rg_op_begin(operation, true);
    atomic_store_explicit(&op.row->object, object, memory_order_relaxed);
    return op;
}

/* rg_thread_context: this thread's current context is this one now; 0: it has none. */
void rg_thread_context(uint64_t context);

static RG_INLINE void rg_op_returned(const rg_op *op)
{
    if (__builtin_expect(op->outer & RG_DOING, 0)) {
        atomic_store_explicit(&op->row->since_tick, op->outer_tick, memory_order_relaxed);
        atomic_store_explicit(&op->row->doing, op->outer, memory_order_release);
    } else {
        atomic_store_explicit(&op->row->doing, op->operation, memory_order_relaxed);
    }
    if (__builtin_expect(op->ranged, 0))
        rg_nvtx_pop();
}

/* `marks`: 1 + track << 38 and the flags. */
static RG_INLINE void rg_op_end(const rg_op *op, enum rg_trace_kind kind, uint64_t marks, uint64_t argument)
{
    rg_op_returned(op);
    if (__builtin_expect(op->on, 1))
        rg_record(op->operation, kind, atomic_load_explicit(&op->row->tid, memory_order_relaxed), marks, argument, op->tick,
                  rg_tick() - op->tick);
}

/*
 * For what mostly returns at once, and was begun as not exact, these two in place of rg_op_end, so that little has to be kept and done
 * when it has returned. rg_op_note: records it; it is about to be called. Returns its place. rg_op_done: it has returned; that it
 * `failed` is added, and its time if it outlasted a beat of the agent (rg_op_amend).
 */
static RG_INLINE uint64_t rg_op_note(const rg_op *op, enum rg_trace_kind kind, uint64_t marks, uint64_t argument)
{
    if (__builtin_expect(!op->on, 0))
        return 0;
    return rg_record(op->operation, kind, atomic_load_explicit(&op->row->tid, memory_order_relaxed), marks, argument, op->tick, 0);
}
RG_COLD void rg_op_amend(uint64_t record, uint64_t tick, bool failed); /* `tick`: when it began; 0: that is not known */
static RG_INLINE void rg_op_done(const rg_op *op, uint64_t record, bool failed)
{
    rg_op_returned(op);
    if (__builtin_expect(failed || atomic_load_explicit(&rg_rec.beat_tick, memory_order_relaxed) != op->beat, 0) && op->on)
        rg_op_amend(record, op->tick, failed);
}

#endif
