/*
 * trace.c: the slow half of trace.h: rows for threads that are new, names for kernels that are new, and the agent's clock.
 *
 * A row belongs to a thread from its first operation until it ends. Who finds no free row takes one whose thread is gone
 * (a thread that called the driver in its very last destructor leaves one), else it is counted in threads_lost and writes
 * into a row of the process's own that nobody reads.
 */
#include "trace.h"

#include "client.h"
#include "estimate.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

rg_recorder rg_rec;
_Thread_local rg_this_thread rg_this;
_Alignas(64) _Atomic uint64_t rg_name_cache[RG_NAME_CACHE];

static rg_own_calls own_calls[RG_MAX_THREADS + 1]; /* by row; the last is shared by those that have none, and only roughly right */
static rg_thread nobody; /* shared by all threads that found no room */
static pid_t client; /* the process whose rows they are: not its child */
static _Atomic uint64_t *launches; /* rg_client.launches */
static _Atomic uint32_t counting[RG_LAUNCH_COUNTS]; /* the thread that has taken each of them, by id; 0: none */
static pthread_key_t row_key;
static bool row_key_made;

#define RG_TEXT(name) #name,
#define RG_WORK(symbol, ...) #symbol,
#define RG_SPECIAL(symbol, ...) #symbol,
#define RG_NCCL_CALL(symbol, ...) #symbol,
#define RG_NCCL_SPECIAL(symbol, ...) #symbol,
#define RG_BLAS_CALL(symbol, ...) #symbol,
#define RG_BLAS_SPECIAL(symbol, ...) #symbol,
#define RG_BLAS_SET(...)
#define RG_BLAS_GET(...)
const char *const rg_op_names[RG_OP_COUNT] = {
    "none",
#include "hooks.def"
#include "nccl.def"
#include "cublas.def"
    RG_TRACE_OPERATIONS(RG_TEXT)
};
#undef RG_BLAS_CALL
#undef RG_BLAS_SPECIAL
#undef RG_BLAS_SET
#undef RG_BLAS_GET
#undef RG_TEXT
#undef RG_WORK
#undef RG_SPECIAL
#undef RG_NCCL_CALL
#undef RG_NCCL_SPECIAL

/* ---- the clock ---- */

void rg_trace_beat(void)
{
    static _Atomic uint32_t before; /* whether records were on */
    uint32_t on = atomic_load_explicit(rg_rec.on, memory_order_relaxed);
    if (atomic_exchange(&before, on) != on)
        rg_changed();
    atomic_store_explicit(&rg_rec.beat_tick, rg_tick(), memory_order_relaxed);
    atomic_fetch_add(&rg_rec.epoch, 1); /* in this order: rg_again_late */
}

rg_clock_pair rg_clock;

void rg_clock_beat(void)
{
    __extension__ typedef unsigned __int128 wide;
    static uint64_t last_tick, last_ns, rate;
    static uint32_t beats;
    static bool differs; /* Linux has found out meanwhile that the counter is not the same on all processors */
    if (!rg_rec.processor || differs)
        return;
    differs = beats++ % 64 == 63 && !rg_processor_ticks();
    uint64_t tick, ns, apart = rg_both_clocks(&tick, &ns);
    uint64_t found = last_ns && tick > last_tick ? (uint64_t)(((wide)(ns - last_ns) << 32) / (tick - last_tick)) : 0;
    uint64_t differ = found > rate ? found - rate : rate - found;
    if (!differs && (wide)apart * (rate ? rate : found) >> 32 > RG_CLOCK_BEHIND_NS)
        return; /* something came between: what is known serves until the next time */
    if (rate && differ >= rate >> 10)
        rate = 0; /* one clock has stood still, as in a machine that slept: from the next time on */
    else if (rate && differ < rate >> 17)
        rate += found / 8 - rate / 8; /* the mean of some, as each is a few ppm off */
    else
        rate = found; /* the first, or the kernel's clock is being corrected */
    last_tick = tick;
    last_ns = ns;
    uint32_t version = atomic_load_explicit(&rg_clock.version, memory_order_relaxed);
    atomic_store_explicit(&rg_clock.version, version + 1, memory_order_relaxed);
    atomic_store_explicit(&rg_clock.tick, tick, memory_order_release);
    atomic_store_explicit(&rg_clock.ns, ns - RG_CLOCK_BEHIND_NS, memory_order_release);
    atomic_store_explicit(&rg_clock.rate, differs ? 0 : rate, memory_order_release);
    atomic_store_explicit(&rg_clock.version, version + 2, memory_order_release);
}

/* ---- threads ---- */

/* Counts launches of a thread that are not among its calls yet. Whoever adds them up meanwhile may miss them until the next time. */
static void count_again(rg_own_calls *own, const rg_thread *row)
{
    uint64_t from = atomic_load_explicit(&own->from, memory_order_relaxed);
    if (!from)
        return;
    _Atomic uint64_t *count = &own->count[atomic_load_explicit(&own->again, memory_order_relaxed)];
    uint64_t n = atomic_load_explicit(&row->launches, memory_order_relaxed) - (from - 1);
    atomic_store_explicit(&own->from, 0, memory_order_relaxed);
    atomic_store_explicit(count, atomic_load_explicit(count, memory_order_relaxed) + n, memory_order_release);
}

void rg_again_count(void)
{
    count_again(rg_this.calls, rg_this.row);
    atomic_signal_fence(memory_order_seq_cst); /* a handler may launch at any moment */
    rg_this.uncounted = false;
}

/* Launches of a thread that are not among its calls yet: not too many, and those missing at the moment that another look finds. */
static uint64_t uncounted(const rg_own_calls *own)
{
    if (own == &own_calls[RG_MAX_THREADS])
        return 0;
    const rg_thread *row = &rg_rec.threads[own - own_calls];
    uint64_t from = atomic_load_explicit(&own->from, memory_order_acquire), n = atomic_load_explicit(&row->launches, memory_order_acquire);
    return from && from == atomic_load_explicit(&own->from, memory_order_relaxed) ? n - (from - 1) : 0;
}

/* False: another thread is adding them already, and may miss the latest. */
static bool add_calls(rg_own_calls *own)
{
    uint32_t free = 0;
    if (!atomic_compare_exchange_strong(&own->busy, &free, 1))
        return false;
    _Atomic uint64_t *sums = rg_rec.segment->calls[atomic_load(&own->client)].count;
    uint32_t again = atomic_load_explicit(&own->again, memory_order_relaxed);
    for (uint32_t i = 0; i < RG_OP_COUNT; i++) {
        /* In this order: `from` says that there are none before those that there were are in `count`. */
        uint64_t n = atomic_load_explicit(&own->count[i], memory_order_acquire);
        if (i == again)
            n += uncounted(own);
        if (n <= own->added[i])
            continue; /* those that it is counting just now come next time */
        atomic_fetch_add_explicit(&sums[i], n - own->added[i], memory_order_relaxed);
        own->added[i] = n;
    }
    atomic_store_explicit(&own->busy, 0, memory_order_release);
    return true;
}

/* What was called before is the former client's: the agent, which may be adding it, is waited for. That takes microseconds; a handler
 * that has interrupted the adding in this very thread waits for a second, and what is not added goes to the next client. */
void rg_calls_belong(uint32_t slot)
{
    if (!rg_this.row)
        rg_thread_enter();
    if (atomic_load_explicit(&rg_this.calls->client, memory_order_relaxed) == slot)
        return;
    for (int tries = 0; !add_calls(rg_this.calls) && tries < 20000; tries++)
        nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
    atomic_store_explicit(&rg_this.calls->client, slot, memory_order_relaxed);
}

void rg_calls_add(void)
{
    for (int i = 0; i <= RG_MAX_THREADS; i++)
        add_calls(&own_calls[i]);
}

/* Also of a thread that ends in a child of fork, where the rows and what is counted are the parent's. */
static void leave(void *row)
{
    if (getpid() != client)
        return;
    /* In this order, as a handler may launch at any moment. */
    rg_this.epoch = 0;
    atomic_signal_fence(memory_order_seq_cst);
    if (rg_this.uncounted)
        rg_again_count();
    if (rg_this.calls)
        add_calls(rg_this.calls);
    const _Atomic uint64_t *own = rg_this.launches;
    rg_this.launches = NULL;
    rg_this.counts = false;
    atomic_signal_fence(memory_order_seq_cst);
    if (own)
        atomic_store(&counting[own - launches], 0);
    rg_this.calls = NULL;
    rg_this.row = NULL;
    if (row != &nobody)
        atomic_store(&((rg_thread *)row)->tid, 0);
}

/* A number of the environment, plus `more`; 0 where there is none. */
static uint32_t number_in(const char *name, uint32_t more)
{
    const char *text = getenv(name);
    char *end;
    unsigned long value = text && *text >= '0' && *text <= '9' ? strtoul(text, &end, 10) : 0;
    return text && *text >= '0' && *text <= '9' && !*end && value < 1u << 30 ? (uint32_t)value + more : 0;
}

void rg_trace_attach(rg_segment *seg, int slot)
{
    client = getpid();
    rg_rec.segment = seg;
    rg_rec.threads = &seg->threads[slot * RG_MAX_THREADS];
    rg_rec.trace = &seg->traces[slot];
    rg_rec.records = &seg->clients[slot].records;
    rg_rec.on = &seg->settings.trace;
    launches = seg->clients[slot].launches;
    rg_rec.lost = &seg->clients[slot].threads_lost;
    for (int i = 0; i <= RG_MAX_THREADS; i++)
        atomic_store(&own_calls[i].client, (uint32_t)slot);
    rg_rec.processor = atomic_load(&seg->header.tick_source) == RG_TICKS_PROCESSOR;
    row_key_made = pthread_key_create(&row_key, leave) == 0;
    atomic_store(&seg->clients[slot].rank, number_in("RANK", 1));
    atomic_store(&seg->clients[slot].ranks, number_in("WORLD_SIZE", 0));
    rg_trace_beat();
}

/* Takes what is free or, `gone`, whose owner has ended. */
static bool take_from(_Atomic uint32_t *owner, uint32_t tid, bool gone)
{
    uint32_t old = atomic_load(owner);
    if (old && (!gone || syscall(SYS_tgkill, getpid(), old, 0) == 0 || errno != ESRCH))
        return false;
    return atomic_compare_exchange_strong(owner, &old, tid);
}

static rg_thread *take(uint32_t tid, bool gone)
{
    for (int i = 0; i < RG_MAX_THREADS; i++)
        if (take_from(&rg_rec.threads[i].tid, tid, gone))
            return &rg_rec.threads[i];
    return NULL;
}

void rg_launches_take(void)
{
    if (rg_this.counts)
        return;
    rg_this.counts = true;
    if (!rg_this.row)
        rg_thread_enter();
    if (rg_this.row == &nobody)
        return;
    uint32_t tid = (uint32_t)syscall(SYS_gettid);
    for (int i = 1; i < RG_LAUNCH_COUNTS; i++)
        if (take_from(&counting[i], tid, true)) {
            rg_this.launches = &launches[i];
            return;
        }
}

rg_thread *rg_thread_enter(void)
{
    uint32_t tid = (uint32_t)syscall(SYS_gettid);
    rg_thread *row = take(tid, false);
    if (!row)
        row = take(tid, true);
    if (row) {
        /* One whose thread ended unseen may have launches that nobody has counted. */
        count_again(&own_calls[row - rg_rec.threads], row);
        char name[sizeof row->name] = "";
        prctl(PR_GET_NAME, name);
        for (size_t i = 0; i < sizeof name; i++)
            __atomic_store_n(&row->name[i], name[i], __ATOMIC_RELAXED);
        rg_thread_clear(row);
    } else {
        atomic_fetch_add(rg_rec.lost, 1);
        row = &nobody;
    }
    rg_this.row = row;
    rg_this.calls = &own_calls[row == &nobody ? RG_MAX_THREADS : row - rg_rec.threads];
    rg_calls_belong(rg_thread_slot());
    if (row_key_made)
        pthread_setspecific(row_key, row);
    return row;
}

void rg_thread_context(uint64_t context)
{
    rg_this.epoch = 0; /* NULL may be another stream now */
    rg_thread *row = rg_this.row ? rg_this.row : rg_thread_enter();
    if (atomic_load_explicit(&row->context, memory_order_relaxed) == context)
        return;
    atomic_store_explicit(&row->context, context, memory_order_relaxed);
    atomic_store_explicit(&row->track, 0, memory_order_relaxed); /* whether it goes on with its stream there is looked at */
}

/* ---- records ---- */

static uint64_t lap_of(uint64_t n)
{
    return 1 + n / RG_TRACE_RECORDS % RG_RECORD_LAPS;
}

uint64_t rg_record_take(void)
{
    uint32_t block = rg_this.block ? rg_this.block * 2u : 1;
    block = block < RG_RECORD_BLOCK ? block : RG_RECORD_BLOCK;
    uint64_t n = atomic_fetch_add_explicit(rg_rec.records, block, memory_order_relaxed);
    uint64_t of_lap = RG_TRACE_RECORDS - n % RG_TRACE_RECORDS; /* those of the next one are left out */
    rg_this.block = (uint8_t)block;
    rg_this.left = (uint8_t)(block < of_lap ? block : of_lap);
    rg_this.lap = (uint16_t)lap_of(n);
    if (n % RG_RECORD_LOOK < block)
        rg_this.epoch = 0; /* now and then it is looked whether NULL is still the same stream: there are contexts that are set by no hook */
    return n;
}

void rg_op_amend(uint64_t n, uint64_t tick, bool failed)
{
    if (atomic_load(rg_rec.records) - n > RG_TRACE_RECORDS - RG_RECORD_BEHIND)
        return; /* others have come round */
    _Atomic uint64_t *word = &rg_rec.trace->records[n % RG_TRACE_RECORDS * RG_RECORD_WORDS];
    if (failed)
        atomic_fetch_or_explicit(&word[1], RG_RECORD_FAILED, memory_order_relaxed);
    if (!tick)
        return;
    uint64_t lap = lap_of(n) << RG_RECORD_BITS;
    atomic_store_explicit(&word[0], lap | (tick & RG_RECORD_MASK), memory_order_relaxed);
    atomic_store_explicit(&word[3], lap | ((rg_tick() - tick) & RG_RECORD_MASK), memory_order_relaxed);
}

/* ---- names ---- */

uint32_t rg_name_enter(const char *name)
{
    rg_name *names = rg_rec.segment->names;
    uint64_t key = rg_text_hash(name);
    for (uint32_t i = (uint32_t)(key >> 40), n = 0; n < 64; i++, n++) {
        rg_name *at = &names[i % RG_MAX_NAMES];
        uint64_t found = 0;
        if (!atomic_compare_exchange_strong(&at->key, &found, key) && found != key)
            continue;
        /* Several may write here at once: the same bytes, one by one; the last one stays zero. */
        for (size_t c = 0; !found && c + 1 < sizeof at->name && name[c]; c++)
            __atomic_store_n(&at->name[c], name[c], __ATOMIC_RELAXED);
        return i % RG_MAX_NAMES + 1;
    }
    atomic_fetch_add(&rg_rec.segment->header.names_lost, 1);
    return 0;
}

/* The other place that a handle's name may have, in the same cache line. */
static _Atomic uint64_t *second_place(uintptr_t handle)
{
    return &rg_name_cache[(rg_name_entry_of(handle) - rg_name_cache) ^ 1];
}

uint32_t rg_name_late(bool graph, uintptr_t handle)
{
    if (!handle)
        return 0;
    _Atomic uint64_t *place = rg_name_entry_of(handle), *second = second_place(handle);
    uint64_t word = atomic_load_explicit(second, memory_order_relaxed);
    if (word >> 16 == rg_name_key(handle))
        return (uint32_t)(word & 0xffff);
    uint32_t name = 0;
    if (graph) {
        rg_graph_facts facts;
        rg_graph_known((CUgraphExec)handle, &facts);
        name = rg_name_enter(facts.label[0] ? facts.label : "graph");
    } else {
        const char *text = rg_function_name((CUfunction)handle);
        name = text && *text ? rg_name_enter(text) : 0;
    }
    if (atomic_load_explicit(place, memory_order_relaxed))
        place = second;
    atomic_store_explicit(place, rg_name_key(handle) << 16 | name, memory_order_relaxed);
    return name;
}

void rg_name_forget(uintptr_t handle)
{
    _Atomic uint64_t *places[] = {rg_name_entry_of(handle), second_place(handle)};
    for (int i = 0; i < 2; i++) {
        uint64_t word = atomic_load_explicit(places[i], memory_order_relaxed);
        if (word >> 16 == rg_name_key(handle))
            atomic_compare_exchange_strong(places[i], &word, 0);
    }
}

void rg_names_forget(void)
{
    for (uint32_t i = 0; i < RG_NAME_CACHE; i++)
        if (atomic_load_explicit(&rg_name_cache[i], memory_order_relaxed))
            atomic_store_explicit(&rg_name_cache[i], 0, memory_order_relaxed);
}
