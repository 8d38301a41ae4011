/*
 * collective.c: counts NCCL's collectives, for each communicator that this process takes part in.
 *
 * A collective hangs when one rank does not come to it, and no rank can see which. Each rank is a client with a slot of its own, so
 * the segment can: every process writes down how many collectives it has entered on each communicator (rg_communicator), and a
 * reader compares those of one communicator, which are matched by the id that all its ranks were given.
 *
 * Calls go through unchanged, in the caller's thread. What NCCL launches comes through hooks.c like any other kernel. Communication is never
 * held at the gate (gate.c): kernels are known for it by their names, and, since drivers before CUDA 12.3 do not tell these, by being
 * launched inside a call of NCCL's. Where this process is no client, nothing else happens at all. Where its work goes past Rigel for
 * now they are counted, or this rank would seem to be behind the others from then on.
 */
#include "collective.h"

#include "estimate.h"

#include <string.h>

#define RG_NCCL_CALL(symbol, ...) #symbol,
#define RG_NCCL_SPECIAL(symbol, ...) #symbol,
static const char *const names[RG_NCCL_COUNT] = {
#include "nccl.def"
};
#undef RG_NCCL_CALL
#undef RG_NCCL_SPECIAL
#define RG_NCCL_CALL(symbol, ...) (void *)symbol,
#define RG_NCCL_SPECIAL(symbol, ...) (void *)symbol,
static void *const ours[RG_NCCL_COUNT] = {
#include "nccl.def"
};
#undef RG_NCCL_CALL
#undef RG_NCCL_SPECIAL

/* ---- the real functions ---- */

static _Atomic(void *) real[RG_COPIES * RG_NCCL_COUNT];
static const char *const sonames[] = {"libnccl.so.2", NULL};
rg_library rg_nccl = {
    .names = names,
    .ours = ours,
    .real = real,
    .count = RG_NCCL_COUNT,
    .known_by = RG_NCCL_ncclCommInitRank,
    .sonames = sonames,
};

static bool failed(ncclResult_t r)
{
    return r != ncclSuccess && r != ncclInProgress;
}

/* First in a function of an NCCL name: `real_` is what its caller is linked with. Returns where there is none, where that is another
 * copy of NCCL than the first, or where nothing is counted. */
#define CALLED(symbol, args) \
    bool further_; \
    __typeof__(&symbol) real_ = \
        (__typeof__(&symbol))rg_library_called(&rg_nccl, RG_NCCL_##symbol, __builtin_return_address(0), &further_); \
    if (RG_UNLIKELY(!real_)) \
        return ncclSystemError; \
    if (RG_UNLIKELY(further_ || !rg_is_client())) \
        return real_ args

/* ---- the table ---- */

static rg_communicator *row_at(int i)
{
    return &rg.segment->communicators[rg.slot_index * RG_MAX_COMMUNICATORS + i];
}

static rg_communicator *row_of(ncclComm_t comm)
{
    for (int i = 0; comm && i < RG_MAX_COMMUNICATORS; i++)
        if (atomic_load_explicit(&row_at(i)->handle, memory_order_relaxed) == (uintptr_t)comm)
            return row_at(i);
    return NULL;
}

/* A row for a communicator about to be made. NULL: all are taken, which is counted. */
static rg_communicator *enter(uint64_t key, uint32_t rank, uint32_t size)
{
    for (int i = 0; i < RG_MAX_COMMUNICATORS; i++) {
        rg_communicator *c = row_at(i);
        uint64_t none = 0;
        if (!atomic_compare_exchange_strong(&c->key, &none, key))
            continue;
        atomic_store(&c->handle, 0);
        atomic_store(&c->rank, rank);
        atomic_store(&c->size, size);
        atomic_store(&c->entered, 0);
        atomic_store(&c->peers, 0);
        atomic_store(&c->splits, 0);
        atomic_store(&c->operation, 0);
        atomic_store(&c->elements, 0);
        atomic_store(&c->at_tick, rg_tick());
        return c;
    }
    atomic_fetch_add(&rg.slot->communicators_lost, 1);
    return NULL;
}

static void leave(rg_communicator *c)
{
    if (!c)
        return;
    atomic_store(&c->handle, 0);
    atomic_store(&c->key, 0);
}

static uint64_t key_of(const ncclUniqueId *id)
{
    uint64_t key = 1, word;
    for (size_t i = 0; i < sizeof id->internal; i += sizeof word) {
        memcpy(&word, id->internal + i, sizeof word);
        key = rg_hash_fold(key, word);
    }
    return key | 1;
}

/* A communicator is being made: all its ranks have to come to that, too. */
#define MAKE(symbol, args, key_, rank_, size_) \
    CALLED(symbol, args); \
    rg_communicator *row = enter(key_, (uint32_t)(rank_), (uint32_t)(size_)); \
    rg_op op = rg_wait_op(RG_OP_##symbol, 0); \
    ncclResult_t r = real_ args; \
    bool made = !failed(r) && *out; \
    rg_op_end(&op, RG_TRACE_collective, made ? 0 : RG_RECORD_FAILED, 0); \
    if (row && made) \
        atomic_store(&row->handle, (uintptr_t)*out); \
    else \
        leave(row); \
    return r

ncclResult_t ncclCommInitRank(ncclComm_t *out, int size, ncclUniqueId id, int rank)
{
    MAKE(ncclCommInitRank, (out, size, id, rank), key_of(&id), rank, size);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int size, ncclUniqueId id, int rank, void *config)
{
    MAKE(ncclCommInitRankConfig, (out, size, id, rank, config), key_of(&id), rank, size);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t *out, int size, int rank, int n, ncclUniqueId *ids, void *config)
{
    MAKE(ncclCommInitRankScalable, (out, size, rank, n, ids, config), ids && n > 0 ? key_of(&ids[0]) : 1, rank, size);
}

/* Splits that this thread has called for in a group, at whose end NCCL makes what they ask for; and in how many groups it is. */
static _Thread_local struct {
    ncclComm_t *out;
    uint64_t key;
} splits[RG_MAX_COMMUNICATORS];
static _Thread_local uint32_t split_count, groups;

/*
 * Who is in a communicator that is split off, and as which rank, is known once it is made: until then there is no row for it. There never
 * is for one that is made later still, as it does not block (`made` is NULL), or that was split off from one without a row (`key` is 0);
 * that is counted.
 */
static void enter_split(ncclComm_t made, uint64_t key)
{
    ncclResult_t (*ask_rank)(ncclComm_t, int *) = NULL, (*ask_size)(ncclComm_t, int *) = NULL;
    void *library = rg_library_loaded(&rg_nccl);
    int rank = 0, size = 0;
    if (library) {
        *(void **)&ask_rank = rg_look_up(library, "ncclCommUserRank");
        *(void **)&ask_size = rg_look_up(library, "ncclCommCount");
    }
    if (!made || !key || !ask_rank || !ask_size || ask_rank(made, &rank) != ncclSuccess || ask_size(made, &size) != ncclSuccess) {
        atomic_fetch_add(&rg.slot->communicators_lost, 1);
        return;
    }
    rg_communicator *row = enter(key, (uint32_t)rank, (uint32_t)size);
    if (row)
        atomic_store(&row->handle, (uintptr_t)made);
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *out, void *config)
{
    CALLED(ncclCommSplit, (comm, color, key, out, config));
    rg_communicator *parent = row_of(comm);
    uint64_t number = parent ? atomic_fetch_add(&parent->splits, 1) + 1 : 0;
    uint64_t entered = parent ? atomic_fetch_add(&parent->entered, 1) + 1 : 0;
    uint64_t family = parent ? rg_hash_fold(atomic_load(&parent->key), number) : 0;
    uint64_t own = parent ? rg_hash_fold(family, (uint64_t)(uint32_t)color) | 1 : 0;
    rg_op op = rg_wait_op(RG_OP_ncclCommSplit, (uintptr_t)comm);
    if (parent) {
        atomic_store(&parent->operation, RG_OP_ncclCommSplit);
        atomic_store(&parent->at_tick, op.tick);
    }
    ncclResult_t r = real_(comm, color, key, out, config);
    rg_op_end(&op, RG_TRACE_collective, failed(r) ? RG_RECORD_FAILED : 0, entered);
    if (failed(r) || color == NCCL_SPLIT_NOCOLOR)
        return r;
    if (groups && split_count < RG_MAX_COMMUNICATORS) {
        splits[split_count].out = out;
        splits[split_count++].key = own;
    } else {
        enter_split(groups ? NULL : *out, own);
    }
    return r;
}

#define END(symbol) \
    ncclResult_t symbol(ncclComm_t comm) \
    { \
        CALLED(symbol, (comm)); \
        rg_communicator *row = row_of(comm); \
        rg_op op = rg_wait_op(RG_OP_##symbol, (uintptr_t)comm); \
        ncclResult_t r = real_(comm); \
        rg_op_end(&op, RG_TRACE_call, r ? RG_RECORD_FAILED : 0, 0); \
        leave(row); \
        return r; \
    }
END(ncclCommDestroy)
END(ncclCommAbort)

/* ---- communication ---- */

_Thread_local uint32_t rg_communicating;

enum { COLLECTIVE, PEER };

/* Before the call: entered means that this rank has come to it. Returns the number of the collective on its communicator. */
static uint64_t note(rg_communicator *c, uint32_t operation, int kind, uint64_t elements, uint64_t tick)
{
    if (!c)
        return 0;
    atomic_store_explicit(&c->operation, operation, memory_order_relaxed);
    atomic_store_explicit(&c->elements, elements, memory_order_relaxed);
    atomic_store_explicit(&c->at_tick, tick, memory_order_relaxed);
    return atomic_fetch_add(kind == COLLECTIVE ? &c->entered : &c->peers, 1) + 1;
}

#define RG_NCCL_CALL(symbol, KIND, params, args, COUNT) \
    ncclResult_t symbol params \
    { \
        CALLED(symbol, args); \
        rg_communicator *row = row_of(comm); \
        rg_op call = rg_wait_op(RG_OP_##symbol, (uintptr_t)comm); \
        uint64_t number = note(row, RG_OP_##symbol, KIND, COUNT, call.tick); \
        rg_communicating++; \
        ncclResult_t r = real_ args; \
        rg_communicating--; \
        rg_op_end(&call, RG_TRACE_collective, failed(r) ? RG_RECORD_FAILED : 0, number); \
        return r; \
    }
#define RG_NCCL_SPECIAL(symbol, ...)
#include "nccl.def"
#undef RG_NCCL_CALL
#undef RG_NCCL_SPECIAL

ncclResult_t ncclGroupStart(void)
{
    CALLED(ncclGroupStart, ());
    ncclResult_t r = real_();
    groups += r == ncclSuccess;
    return r;
}

/* What a group holds is done at its end, which may wait for other ranks; at the outermost one's, where they are in one another. */
ncclResult_t ncclGroupEnd(void)
{
    CALLED(ncclGroupEnd, ());
    rg_op op = rg_wait_op(RG_OP_ncclGroupEnd, 0);
    rg_communicating++;
    ncclResult_t r = real_();
    rg_communicating--;
    groups -= groups > 0;
    rg_op_end(&op, RG_TRACE_collective, failed(r) ? RG_RECORD_FAILED : 0, 0);
    for (uint32_t i = 0; !groups && !failed(r) && i < split_count; i++)
        enter_split(*splits[i].out, splits[i].key);
    split_count = groups ? split_count : 0;
    return r;
}
