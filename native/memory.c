/*
 * memory.c: counts the device memory that this client takes, and refuses what would exceed its limit.
 *
 * Every call that allocates passes here: the account (account.h) is charged before the driver is called where there is a
 * limit, after it where there is none; a call that fails gives its charge back, and its error reaches the program. What is
 * charged is kept in a table from pointer or handle to size, so that whoever frees it gives back the same.
 *
 *   counted       cuMemAlloc, Pitch (whole rows), Managed (all of it, wherever its pages are): what cuMemGetAddressRange says
 *                 stream-ordered allocations: what was asked for, until cuMemFreeAsync or cuMemFree is called
 *                 cuMemCreate on a device: until its last handle is released and its last mapping gone
 *                 arrays: texels times their size, of all layers and levels; the driver does not tell what it adds
 *   not counted   what a context takes for itself (about 500 MiB on real GPUs), code, stacks and heaps of kernels; host memory, also
 *                 from pools of it; another process's memory (cuIpcOpenMemHandle, imported handles: its maker is charged); the memory of
 *                 graphs' own allocation nodes; what a pool keeps after a free
 *
 * All of it goes on while the process's work goes past Rigel (rg_is_client).
 *
 * nvidia-smi and NVML are not hooked: they show the device itself.
 *
 * A pool keeps what was freed up to its release threshold, which is 0 until the program raises it. Charging for that would
 * refuse a program memory that it could have from its own pool. Not looking at it would let a program hold twice its limit: once
 * in the pool and once outside, or in another one. So before memory is taken under a limit, the process's pools, but the one that it comes
 * from, give back what they keep, if all together would exceed the limit (trim_pools). What the pools of a client's other processes keep is not seen.
 *
 * The table is split by hash; each part has a mutex that is never held while the driver is called, or at a fork or exit: a
 * forked child and an exiting process pass straight through. An entry leaves the table before the driver frees what it stands
 * for, because the driver may hand the same address to another thread at once; if freeing fails it goes back.
 */
#include "guard.h"

#include <stdlib.h>

/* A physical allocation; alive while a handle or a mapping is. */
typedef struct {
    uint64_t bytes;
    _Atomic uint32_t references;
} physical;

enum kind { POINTER, ARRAY, MIPMAPPED, HANDLE, MAPPING, POOLED };

typedef struct entry {
    struct entry *next;
    uint64_t key; /* pointer or handle */
    uint64_t bytes; /* charged; MAPPING: mapped; HANDLE: 0 once the physical allocation has it */
    uint64_t serial; /* rg_memory_mark */
    CUcontext context; /* that it goes with; NULL: none */
    physical *physical; /* HANDLE, MAPPING */
    enum kind kind;
    uint32_t references; /* HANDLE: cuMemRelease calls that are due */
} entry;

enum { PARTS = 32, FIRST_CHAINS = 32 };
static struct {
    _Alignas(64) pthread_mutex_t lock;
    entry *first[FIRST_CHAINS], **chains; /* `first` until there are many */
    uint64_t room, count;
} table[PARTS] = {[0 ... PARTS - 1] = {.lock = PTHREAD_MUTEX_INITIALIZER, .room = FIRST_CHAINS}};

static _Atomic uint64_t serial, tracked;

/* ---- The table. */

static uint64_t hash_of(enum kind kind, uint64_t key)
{
    uint64_t h = (key ^ (uint64_t)kind << 60) * 0x9e3779b97f4a7c15u;
    return h ^ h >> 29;
}

/* The chain of this hash in its part, which the caller has locked. */
static entry **chain_of(uint32_t part, uint64_t hash)
{
    entry **chains = table[part].chains ? table[part].chains : table[part].first;
    return &chains[(hash >> 5) % table[part].room];
}

static entry **find(uint32_t part, enum kind kind, uint64_t key)
{
    entry **at = chain_of(part, hash_of(kind, key));
    while (*at && ((*at)->key != key || (*at)->kind != kind))
        at = &(*at)->next;
    return at;
}

/* Twice the chains. Where there is no memory for it, the chains grow longer instead. */
static void grow(uint32_t part)
{
    uint64_t room = table[part].room;
    entry **old = table[part].chains ? table[part].chains : table[part].first, **fresh = calloc(room * 2, sizeof *fresh);
    if (!fresh)
        return;
    for (uint64_t i = 0; i < room; i++)
        for (entry *e = old[i], *next; e; e = next) {
            next = e->next;
            entry **at = &fresh[(hash_of(e->kind, e->key) >> 5) % (room * 2)];
            e->next = *at;
            *at = e;
        }
    free(table[part].chains);
    table[part].chains = fresh;
    table[part].room = room * 2;
}

/* Enters `e`; returns an entry of the same key that was there, whose memory must have gone without being freed. */
static entry *put(entry *e)
{
    uint32_t part = hash_of(e->kind, e->key) % PARTS;
    pthread_mutex_lock(&table[part].lock);
    entry **at = find(part, e->kind, e->key), *old = *at;
    if (old)
        *at = old->next;
    else if (++table[part].count > 2 * table[part].room)
        grow(part);
    at = chain_of(part, hash_of(e->kind, e->key));
    e->next = *at;
    *at = e;
    pthread_mutex_unlock(&table[part].lock);
    return old;
}

static entry *take(enum kind kind, uint64_t key)
{
    uint32_t part = hash_of(kind, key) % PARTS;
    pthread_mutex_lock(&table[part].lock);
    entry **at = find(part, kind, key), *e = *at;
    if (e) {
        *at = e->next;
        table[part].count--;
    }
    pthread_mutex_unlock(&table[part].lock);
    return e;
}

/* Takes out every entry that is wanted, as a list. For what happens seldom: it looks at all of them. */
static entry *take_all(bool (*wanted)(const entry *, uint64_t, uint64_t), uint64_t a, uint64_t b)
{
    entry *list = NULL;
    for (uint32_t part = 0; part < PARTS; part++) {
        pthread_mutex_lock(&table[part].lock);
        entry **chains = table[part].chains ? table[part].chains : table[part].first;
        for (uint64_t i = 0; i < table[part].room; i++)
            for (entry **at = &chains[i]; *at;) {
                entry *e = *at;
                if (!wanted(e, a, b)) {
                    at = &e->next;
                    continue;
                }
                *at = e->next;
                table[part].count--;
                e->next = list;
                list = e;
            }
        pthread_mutex_unlock(&table[part].lock);
    }
    return list;
}

uint64_t rg_memory_tracked(void)
{
    return atomic_load(&tracked);
}

uint64_t rg_memory_mark(void)
{
    return atomic_load(&serial);
}

/* ---- Charging. */

static void give_back(uint64_t bytes)
{
    rg_account_return(rg.segment, rg.slot_index, bytes);
}

static void drop_physical(physical *p)
{
    if (atomic_fetch_sub(&p->references, 1) != 1)
        return;
    give_back(p->bytes);
    atomic_fetch_sub(&tracked, 1);
    free(p);
}

/* What an entry stands for is gone, and so is the entry. */
static void drop(entry *e)
{
    if (!e)
        return;
    if (e->physical) {
        drop_physical(e->physical);
    } else {
        give_back(e->bytes);
        atomic_fetch_sub(&tracked, 1);
    }
    free(e);
}

static void drop_list(entry *list)
{
    for (entry *next; list; list = next) {
        next = list->next;
        drop(list);
    }
}

static void put_list(entry *list)
{
    for (entry *next; list; list = next) {
        next = list->next;
        drop(put(list));
    }
}

/* The context that an allocation in this stream goes with; without a stream, the current one. */
static CUcontext context_of(CUstream stream)
{
    CUcontext c = NULL;
    if ((uintptr_t)stream > 2 && rg_real.cuStreamGetCtx && rg_real.cuStreamGetCtx(stream, &c) == CUDA_SUCCESS && c)
        return c;
    if (rg_real.cuCtxGetCurrent)
        rg_real.cuCtxGetCurrent(&c);
    return c;
}

/* ---- Pools. */

/* A few of them. Those that do not fit are simply not known. */
enum { POOLS = 16 };
typedef struct {
    CUmemoryPool at[POOLS];
    _Atomic uint32_t count; /* at most so many entries are taken; those of destroyed pools are NULL */
} pool_set;

static pool_set pools;      /* that this process has allocated device memory from */
static pool_set host_pools; /* of host memory: what comes from them is no device memory */
/* Readers use the pools. A pool leaves the sets before it is destroyed, and nothing is held then. */
static pthread_rwlock_t pools_lock = PTHREAD_RWLOCK_INITIALIZER;

/* Memory has come from some device's current pool, which was not looked up. */
static _Atomic bool current_used;

/*
 * How many pools the driver was asked to destroy, and how many of those it has: until then it may still say that one of them is a device's current one, and
 * whoever has just heard that would enter it again.
 */
static _Atomic uint32_t ending, ended;

static bool has_pool(const pool_set *set, CUmemoryPool pool)
{
    bool has = false;
    if (!pool || !atomic_load_explicit(&set->count, memory_order_relaxed))
        return false;
    pthread_rwlock_rdlock(&pools_lock);
    for (uint32_t i = 0; i < atomic_load(&set->count); i++)
        has |= set->at[i] == pool;
    pthread_rwlock_unlock(&pools_lock);
    return has;
}

/* Under the lock. */
static void put_pool(pool_set *set, CUmemoryPool pool)
{
    uint32_t at = 0, n = atomic_load(&set->count);
    while (at < n && set->at[at] && set->at[at] != pool)
        at++;
    if (at < POOLS) {
        set->at[at] = pool;
        if (at == n)
            atomic_store(&set->count, n + 1);
    }
}

static void add_pool(pool_set *set, CUmemoryPool pool)
{
    if (has_pool(set, pool))
        return;
    pthread_rwlock_wrlock(&pools_lock);
    put_pool(set, pool);
    pthread_rwlock_unlock(&pools_lock);
}

/* That of this device, and what it is; not while some pool is being destroyed: then the next look finds it. */
static CUmemoryPool add_current_pool(CUdevice device)
{
    CUmemoryPool pool = NULL;
    uint32_t done = atomic_load(&ended), begun = atomic_load(&ending);
    if (begun != done || rg_real.cuDeviceGetMemPool(&pool, device) != CUDA_SUCCESS || !pool || has_pool(&pools, pool))
        return pool;
    pthread_rwlock_wrlock(&pools_lock);
    if (atomic_load(&ending) == begun)
        put_pool(&pools, pool);
    pthread_rwlock_unlock(&pools_lock);
    return pool;
}

/* Whether it was there. */
static bool remove_pool(pool_set *set, CUmemoryPool pool)
{
    bool had = false;
    pthread_rwlock_wrlock(&pools_lock);
    for (uint32_t i = 0; pool && i < atomic_load(&set->count); i++)
        if (set->at[i] == pool) {
            set->at[i] = NULL;
            had = true;
        }
    pthread_rwlock_unlock(&pools_lock);
    return had;
}

static bool may_look_at_pools(void)
{
    return rg_is_client() && rg_real.cuMemPoolGetAttribute && rg_real.cuMemPoolTrimTo &&
           !atomic_load_explicit(&rg.captures, memory_order_relaxed);
}

static bool is_limited(void)
{
    return atomic_load_explicit(&rg.account->limit_bytes, memory_order_relaxed) != 0;
}

/* The stream's device, whatever context is current; -1: not known. */
static CUdevice device_of(CUstream stream)
{
    CUcontext context = context_of(stream), now = NULL, popped;
    CUdevice device = -1;
    bool other = rg_real.cuCtxGetCurrent(&now) == CUDA_SUCCESS && now != context;
    if (other && rg_real.cuCtxPushCurrent_v2(context) != CUDA_SUCCESS)
        return -1;
    CUresult r = rg_real.cuCtxGetDevice(&device);
    if (other)
        rg_real.cuCtxPopCurrent_v2(&popped);
    return r == CUDA_SUCCESS ? device : -1;
}

/*
 * The pool that an allocation in this stream comes from that names none: the current one of its device, which is known from then on. NULL: without
 * a limit it is looked up when it is needed; or it is not known.
 */
static CUmemoryPool current_pool(CUstream stream)
{
    if (!is_limited() || !may_look_at_pools() || !rg_real.cuDeviceGetMemPool)
        return NULL;
    CUdevice device = device_of(stream);
    return device >= 0 ? add_current_pool(device) : NULL;
}

/* Device memory has come from this pool. NULL: from a current one. */
static void note_pool(CUmemoryPool pool)
{
    if (!may_look_at_pools())
        return;
    if (pool)
        add_pool(&pools, pool);
    else if (!atomic_load_explicit(&current_used, memory_order_relaxed))
        atomic_store(&current_used, true);
}

/* What this pool keeps though nobody uses it. The caller holds pools_lock. */
static uint64_t kept_by(CUmemoryPool pool)
{
    uint64_t reserved, in_use;
    return pool && rg_real.cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved) == CUDA_SUCCESS &&
                   rg_real.cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &in_use) == CUDA_SUCCESS &&
                   reserved > in_use
               ? reserved - in_use
               : 0;
}

/* What the known pools keep, but this one. The caller holds pools_lock. */
static uint64_t kept_bytes(CUmemoryPool but)
{
    uint64_t kept = 0;
    for (uint32_t i = 0; i < atomic_load(&pools.count); i++)
        if (pools.at[i] != but)
            kept += kept_by(pools.at[i]);
    return kept;
}

static void trim_all(CUmemoryPool but)
{
    for (uint32_t i = 0; i < atomic_load(&pools.count); i++)
        if (pools.at[i] && pools.at[i] != but)
            rg_real.cuMemPoolTrimTo(pools.at[i], 0);
}

/* Before `bytes` are taken outside of pools (NULL), or from one: what that keeps itself need not be given back for them. */
static void trim_pools(uint64_t bytes, CUmemoryPool from)
{
    if (!atomic_load_explicit(&pools.count, memory_order_relaxed) || !may_look_at_pools() || !is_limited())
        return;
    pthread_rwlock_rdlock(&pools_lock);
    uint64_t kept = kept_bytes(from), limit = atomic_load(&rg.account->limit_bytes), its = 0;
    for (uint32_t i = 0; kept && from && i < atomic_load(&pools.count); i++)
        if (pools.at[i] == from) /* else it may be none */
            its = kept_by(from);
    uint64_t all = rg_account_used(rg.segment, rg.account) + kept, more = bytes > its ? bytes : its;
    if (kept && bytes <= limit && (more > limit || all > limit - more))
        trim_all(from);
    pthread_rwlock_unlock(&pools_lock);
}

/* Looks the devices' current pools up that memory may have come from. */
static void note_current_pools(void)
{
    uint32_t devices = atomic_load(&rg.slot->devices);
    for (uint32_t d = 0; atomic_load(&current_used) && rg_real.cuDeviceGetMemPool && d < RG_MAX_DEVICES; d++)
        if (devices >> d & 1)
            add_current_pool(atomic_load(&rg.ordinal[d]));
}

uint64_t rg_memory_pools_kept(void)
{
    if (!may_look_at_pools())
        return 0;
    note_current_pools();
    pthread_rwlock_rdlock(&pools_lock);
    uint64_t kept = kept_bytes(NULL);
    pthread_rwlock_unlock(&pools_lock);
    return kept;
}

uint64_t rg_memory_pools_trim(void)
{
    if (!may_look_at_pools())
        return 0;
    note_current_pools();
    pthread_rwlock_rdlock(&pools_lock);
    uint64_t before = kept_bytes(NULL), after = before;
    if (before) {
        trim_all(NULL);
        after = kept_bytes(NULL);
    }
    pthread_rwlock_unlock(&pools_lock);
    return before > after ? before - after : 0;
}

void rg_memory_beat(void)
{
    uint32_t asked = atomic_load(&rg.segment->header.trim);
    if (asked != atomic_load(&rg.slot->trimmed) && atomic_load(&rg.slot->class) == RG_CLASS_BEST_EFFORT) {
        atomic_fetch_add(&rg.slot->pool_returned_bytes, rg_memory_pools_trim());
        /* Last of all: whoever asked reads what was given back once it sees this. */
        atomic_store(&rg.slot->trimmed, asked);
    }
    atomic_store(&rg.slot->pool_kept_bytes, rg_memory_pools_kept());
}

/* The program has this pool, of memory of this type and in this place. Managed memory is counted wherever it is. */
static void pool_seen(CUmemoryPool pool, int type, const CUmemLocation *location)
{
    if (rg_is_client() && type == CU_MEM_ALLOCATION_TYPE_PINNED && location->type >= CU_MEM_LOCATION_TYPE_HOST &&
        location->type <= CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT)
        add_pool(&host_pools, pool);
}

CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *props)
{
    CUresult r = RG_CALL(cuMemPoolCreate, (pool, props));
    if (r == CUDA_SUCCESS)
        pool_seen(*pool, props->allocType, &props->location);
    return r;
}

#define RG_GET_POOL(symbol) \
    CUresult symbol(CUmemoryPool *pool, CUmemLocation *location, int type) \
    { \
        CUresult r = RG_CALL(symbol, (pool, location, type)); \
        if (r == CUDA_SUCCESS) \
            pool_seen(*pool, type, location); \
        return r; \
    }
RG_GET_POOL(cuMemGetDefaultMemPool)
RG_GET_POOL(cuMemGetMemPool)

CUresult cuMemPoolDestroy(CUmemoryPool pool)
{
    if (!rg_is_client())
        return RG_CALL(cuMemPoolDestroy, (pool));
    atomic_fetch_add(&ending, 1);
    bool known = remove_pool(&pools, pool), known_host = remove_pool(&host_pools, pool);
    CUresult r = RG_CALL(cuMemPoolDestroy, (pool));
    atomic_fetch_add(&ended, 1);
    /* A default one cannot be destroyed. */
    if (r != CUDA_SUCCESS && known)
        add_pool(&pools, pool);
    if (r != CUDA_SUCCESS && known_host)
        add_pool(&host_pools, pool);
    return r;
}

/* ---- Allocations. */

/*
 * begin: before the driver is asked for `bytes`. False: the limit does not allow it, and the driver is not to be asked.
 * `*out` is for end; NULL where nothing is counted, in a process that is no client or has no host memory for an entry.
 */
static bool begin(entry **out, enum kind kind, uint64_t bytes, CUstream stream)
{
    *out = NULL;
    if (!rg_is_client())
        return true;
    if (kind != POOLED)
        trim_pools(bytes, NULL);
    bool limited = atomic_load(&rg.account->limit_bytes) != 0;
    if (limited && !rg_account_charge(rg.segment, rg.account, rg.slot_index, bytes))
        return false;
    entry *e = calloc(1, sizeof *e);
    if (!e) {
        if (limited)
            give_back(bytes);
        return true;
    }
    e->kind = kind == POOLED ? POINTER : kind; /* either is freed by either call */
    e->bytes = limited ? bytes : 0;
    e->serial = atomic_fetch_add(&serial, 1) + 1;
    e->context = kind == HANDLE ? NULL : context_of(stream);
    *out = e;
    return true;
}

/* The driver has refused, or the program is refused what the driver has given. */
static void cancel(entry *e)
{
    if (!e)
        return;
    give_back(e->bytes);
    free(e);
}

/* Charges the rest of what the driver has taken, or gives back what it has not. False: the limit does not allow the rest. */
static bool settle(entry *e, uint64_t bytes)
{
    if (bytes < e->bytes)
        give_back(e->bytes - bytes);
    else if (bytes > e->bytes && !rg_account_charge(rg.segment, rg.account, rg.slot_index, bytes - e->bytes))
        return false;
    e->bytes = bytes;
    return true;
}

/* Enters what has been charged. */
static void enter(entry *e, uint64_t key)
{
    e->key = key;
    atomic_fetch_add(&tracked, 1);
    rg_account_note_peak(rg.segment, rg.account);
    drop(put(e));
}

/* end: after the driver has answered, for what takes exactly `bytes`. */
static void end(entry *e, CUresult r, uint64_t key, uint64_t bytes)
{
    if (r != CUDA_SUCCESS)
        rg_guard_driver_failed("allocation of memory", r);
    if (!e)
        return;
    if (r != CUDA_SUCCESS) {
        cancel(e);
        return;
    }
    if (bytes > e->bytes) /* there was no limit when it began */
        rg_account_add(rg.segment, rg.slot_index, bytes - e->bytes);
    e->bytes = bytes;
    enter(e, key);
}

/*
 * The same for plain memory, of which the driver may have taken more than was asked for: it is asked how much, except during
 * captures. Should that be more than the limit allows, the memory goes back.
 */
static CUresult end_plain(entry *e, CUresult r, CUdeviceptr *pointer, uint64_t bytes)
{
    if (r != CUDA_SUCCESS)
        rg_guard_driver_failed("allocation of memory", r);
    if (!e || r != CUDA_SUCCESS) {
        cancel(e);
        return r;
    }
    CUdeviceptr base = 0;
    size_t taken = 0;
    if (!atomic_load_explicit(&rg.captures, memory_order_relaxed) && rg_real.cuMemGetAddressRange_v2 &&
        rg_real.cuMemGetAddressRange_v2(&base, &taken, *pointer) == CUDA_SUCCESS && base == *pointer && taken > bytes)
        bytes = taken;
    if (!settle(e, bytes)) {
        RG_CALL(cuMemFree_v2, (*pointer));
        *pointer = 0;
        cancel(e);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    enter(e, *pointer);
    return r;
}

/* What is freed: taken out of the table before the driver is asked; after it, gone or put back. */
static entry *free_begin(enum kind kind, uint64_t key)
{
    return rg_is_client() ? take(kind, key) : NULL;
}

static CUresult free_end(entry *e, CUresult r)
{
    if (e && r == CUDA_SUCCESS)
        drop(e);
    else if (e)
        drop(put(e));
    return r;
}

/* The driver's call, seen in the thread's row and the records: it may wait for the whole device. */
#define RG_SEEN(kind, symbol, args, bytes) \
    ({ \
        rg_op op_ = rg_op_begin(RG_OP_##symbol, true); \
        CUresult seen_ = RG_CALL(symbol, args); \
        rg_op_end(&op_, kind, seen_ ? RG_RECORD_FAILED : 0, bytes); \
        seen_; \
    })
#define RG_CALL_SEEN(kind, symbol, args, bytes) \
    (rg_is_client() ? RG_SEEN(kind, symbol, args, bytes) : RG_CALL(symbol, args))

/* ---- Plain memory. */

CUresult cuMemAlloc_v2(CUdeviceptr *p, size_t n)
{
    entry *e;
    if (!begin(&e, POINTER, n, NULL))
        return CUDA_ERROR_OUT_OF_MEMORY;
    return end_plain(e, RG_CALL_SEEN(RG_TRACE_alloc, cuMemAlloc_v2, (p, n), n), p, n);
}

CUresult cuMemAllocPitch_v2 RG_PITCH
{
    entry *e;
    uint64_t least = height && width > UINT64_MAX / height ? UINT64_MAX : (uint64_t)width * height;
    if (!begin(&e, POINTER, least, NULL))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult r = RG_CALL_SEEN(RG_TRACE_alloc, cuMemAllocPitch_v2, (p, pitch, width, height, element), least);
    return end_plain(e, r, p, r == CUDA_SUCCESS ? (uint64_t)*pitch * height : 0);
}

CUresult cuMemAllocManaged(CUdeviceptr *p, size_t n, unsigned flags)
{
    entry *e;
    if (!begin(&e, POINTER, n, NULL))
        return CUDA_ERROR_OUT_OF_MEMORY;
    return end_plain(e, RG_CALL_SEEN(RG_TRACE_alloc, cuMemAllocManaged, (p, n, flags), n), p, n);
}

CUresult cuMemFree_v2(CUdeviceptr p)
{
    rg_stay_waits();
    entry *e = free_begin(POINTER, p);
    uint64_t bytes = e ? e->bytes : 0;
    return free_end(e, RG_CALL_SEEN(RG_TRACE_free, cuMemFree_v2, (p), bytes));
}

/* ---- Stream-ordered memory. */

/*
 * What is allocated in a captured stream belongs to the graph. Asking a stream whether it is captured does no harm to any
 * capture; of the legacy stream the answer is an error while another one is, and it is not captured then.
 */
static bool captured(CUstream stream)
{
    int status = CU_STREAM_CAPTURE_STATUS_NONE;
    return atomic_load_explicit(&rg.captures, memory_order_relaxed) && rg_real.cuStreamIsCapturing &&
           rg_real.cuStreamIsCapturing(stream, &status) == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE;
}

#define RG_ALLOC_ASYNC(symbol, params, args, pool, stream) \
    CUresult symbol params \
    { \
        entry *e; \
        if (captured(stream)) \
            return RG_CALL(symbol, args); \
        if (rg_is_client() && has_pool(&host_pools, pool)) \
            return RG_CALL_SEEN(RG_TRACE_alloc, symbol, args, n); \
        if (rg_is_client()) \
            trim_pools(n, (pool) ? (pool) : current_pool(stream)); \
        if (!begin(&e, POOLED, n, stream)) \
            return CUDA_ERROR_OUT_OF_MEMORY; \
        CUresult r = RG_CALL_SEEN(RG_TRACE_alloc, symbol, args, n); \
        if (r == CUDA_SUCCESS) \
            note_pool(pool); \
        end(e, r, r == CUDA_SUCCESS ? *p : 0, n); \
        return r; \
    }
#define RG_POOL_PARAMS (CUdeviceptr * p, size_t n, CUmemoryPool pool, CUstream s)
RG_ALLOC_ASYNC(cuMemAllocAsync, (CUdeviceptr * p, size_t n, CUstream s), (p, n, s), NULL, s)
RG_ALLOC_ASYNC(cuMemAllocAsync_ptsz, (CUdeviceptr * p, size_t n, CUstream s), (p, n, s), NULL, RG_PTDS(s))
RG_ALLOC_ASYNC(cuMemAllocFromPoolAsync, RG_POOL_PARAMS, (p, n, pool, s), pool, s)
RG_ALLOC_ASYNC(cuMemAllocFromPoolAsync_ptsz, RG_POOL_PARAMS, (p, n, pool, s), pool, RG_PTDS(s))

#define RG_FREE_ASYNC(symbol, stream) \
    CUresult symbol(CUdeviceptr p, CUstream s) \
    { \
        entry *e = captured(stream) ? NULL : free_begin(POINTER, p); \
        uint64_t bytes = e ? e->bytes : 0; \
        return free_end(e, RG_CALL_SEEN(RG_TRACE_free, symbol, (p, s), bytes)); \
    }
RG_FREE_ASYNC(cuMemFreeAsync, s)
RG_FREE_ASYNC(cuMemFreeAsync_ptsz, RG_PTDS(s))

/* ---- Physical memory, handles to it and mappings of it. It goes with no context. */

static physical *hold(physical *p)
{
    atomic_fetch_add(&p->references, 1);
    return p;
}

/* One reference more to a handle; false if it is none of ours. */
static bool retain(uint64_t handle)
{
    uint32_t part = hash_of(HANDLE, handle) % PARTS;
    pthread_mutex_lock(&table[part].lock);
    entry *e = *find(part, HANDLE, handle);
    if (e)
        e->references++;
    pthread_mutex_unlock(&table[part].lock);
    return e != NULL;
}

/* An entry for something else that keeps the physical allocation; NULL where there is no memory for it. */
static entry *entry_for(enum kind kind, physical *p)
{
    entry *e = calloc(1, sizeof *e);
    if (!e)
        return NULL;
    e->kind = kind;
    e->physical = hold(p);
    e->references = 1;
    return e;
}

CUresult cuMemCreate(RG_HANDLE *h, size_t n, const CUmemAllocationProp *prop, unsigned long long flags)
{
    entry *e = NULL;
    physical *p = NULL;
    if (prop && prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE && !begin(&e, HANDLE, n, NULL))
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (e && !(p = calloc(1, sizeof *p))) {
        cancel(e);
        e = NULL;
    }
    CUresult r = RG_CALL_SEEN(RG_TRACE_alloc, cuMemCreate, (h, n, prop, flags), n);
    if (!e)
        return r;
    if (r != CUDA_SUCCESS) {
        free(p);
        cancel(e);
        return r;
    }
    p->bytes = n;
    if (n > e->bytes)
        rg_account_add(rg.segment, rg.slot_index, n - e->bytes);
    e->bytes = 0;
    e->physical = hold(p);
    e->references = 1;
    enter(e, *h);
    return r;
}

CUresult cuMemRelease(RG_HANDLE h)
{
    if (!rg_is_client())
        return RG_CALL(cuMemRelease, (h));
    uint32_t part = hash_of(HANDLE, h) % PARTS;
    pthread_mutex_lock(&table[part].lock);
    entry **at = find(part, HANDLE, h), *e = *at;
    bool known = e != NULL;
    if (e && e->references > 1) {
        e->references--;
        e = NULL;
    } else if (e) {
        *at = e->next;
        table[part].count--;
    }
    pthread_mutex_unlock(&table[part].lock);
    CUresult r = RG_CALL(cuMemRelease, (h));
    if (known && !e && r != CUDA_SUCCESS)
        retain(h);
    return free_end(e, r);
}

/* A new handle's entry for the physical allocation that is mapped at the address; NULL if it is none of ours. */
static entry *handle_of_mapping(uint64_t address)
{
    entry *found = NULL;
    for (uint32_t part = 0; part < PARTS && !found; part++) {
        pthread_mutex_lock(&table[part].lock);
        entry **chains = table[part].chains ? table[part].chains : table[part].first;
        for (uint64_t i = 0; i < table[part].room && !found; i++)
            for (entry *e = chains[i]; e && !found; e = e->next)
                if (e->kind == MAPPING && address - e->key < e->bytes)
                    found = entry_for(HANDLE, e->physical);
        pthread_mutex_unlock(&table[part].lock);
    }
    return found;
}

CUresult cuMemRetainAllocationHandle(RG_HANDLE *h, void *address)
{
    CUresult r = RG_CALL(cuMemRetainAllocationHandle, (h, address));
    if (r != CUDA_SUCCESS || !rg_is_client() || retain(*h))
        return r;
    /* Every handle had been released: this is a new one to what only a mapping has kept. */
    entry *e = handle_of_mapping((uintptr_t)address);
    if (e) {
        e->key = *h;
        drop(put(e));
    }
    return r;
}

CUresult cuMemImportFromShareableHandle(RG_HANDLE *h, void *shared, int type)
{
    CUresult r = RG_CALL(cuMemImportFromShareableHandle, (h, shared, type));
    if (r == CUDA_SUCCESS && rg_is_client())
        retain(*h); /* of another process, and charged to that one, unless it is known here */
    return r;
}

CUresult cuMemMap(CUdeviceptr p, size_t n, size_t offset, RG_HANDLE h, unsigned long long flags)
{
    entry *e = NULL;
    if (rg_is_client()) {
        uint32_t part = hash_of(HANDLE, h) % PARTS;
        pthread_mutex_lock(&table[part].lock);
        entry *handle = *find(part, HANDLE, h);
        if (handle)
            e = entry_for(MAPPING, handle->physical);
        pthread_mutex_unlock(&table[part].lock);
    }
    CUresult r = RG_CALL(cuMemMap, (p, n, offset, h, flags));
    if (!e)
        return r;
    e->key = p;
    e->bytes = n;
    drop(r == CUDA_SUCCESS ? put(e) : e);
    return r;
}

static bool mapped_within(const entry *e, uint64_t address, uint64_t bytes)
{
    return e->kind == MAPPING && e->key - address < bytes;
}

CUresult cuMemUnmap(CUdeviceptr p, size_t n)
{
    entry *list = NULL;
    if (rg_is_client()) {
        list = take(MAPPING, p);
        if (list)
            list->next = NULL;
        if (!list || list->bytes != n) { /* several mappings in one call */
            entry *others = take_all(mapped_within, p, n);
            if (list)
                list->next = others;
            else
                list = others;
        }
    }
    CUresult r = RG_CALL(cuMemUnmap, (p, n));
    if (r == CUDA_SUCCESS)
        drop_list(list);
    else
        put_list(list);
    return r;
}

/* ---- Arrays. */

/* Bytes of one texel, times two: some formats have half a byte. Formats not named take four bytes a channel. */
static uint64_t texel_half_bytes(int format, unsigned channels)
{
    switch (format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8: return 2 * channels;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF: return 4 * channels;
    /* Pictures: all channels of a texel, of which 4:2:0 has 1.5 and 4:2:2 two. 10 bits take 16, but for those packed into 32. */
    case CU_AD_FORMAT_NV12: return 3;
    case CU_AD_FORMAT_NV16:
    case CU_AD_FORMAT_YUY2: return 4;
    case CU_AD_FORMAT_P010:
    case CU_AD_FORMAT_P016:
    case CU_AD_FORMAT_Y444_PLANAR8:
    case CU_AD_FORMAT_YUV444_8bit_SemiPlanar: return 6;
    case CU_AD_FORMAT_P210:
    case CU_AD_FORMAT_P216:
    case CU_AD_FORMAT_Y210:
    case CU_AD_FORMAT_Y216:
    case CU_AD_FORMAT_AYUV:
    case CU_AD_FORMAT_Y410:
    case CU_AD_FORMAT_UNORM_INT_101010_2: return 8;
    case CU_AD_FORMAT_Y444_PLANAR10:
    case CU_AD_FORMAT_YUV444_16bit_SemiPlanar: return 12;
    case CU_AD_FORMAT_Y416: return 16;
    case CU_AD_FORMAT_BC1_UNORM:
    case CU_AD_FORMAT_BC1_UNORM_SRGB:
    case CU_AD_FORMAT_BC4_UNORM:
    case CU_AD_FORMAT_BC4_SNORM: return 1;
    default: break;
    }
    if (format >= CU_AD_FORMAT_BC2_UNORM && format <= CU_AD_FORMAT_BC7_UNORM_SRGB)
        return 2;
    if ((format >= CU_AD_FORMAT_UNORM_INT8X1 && format <= CU_AD_FORMAT_UNORM_INT8X4) ||
        (format >= CU_AD_FORMAT_SNORM_INT8X1 && format <= CU_AD_FORMAT_SNORM_INT8X4))
        return 2 * channels;
    if (format > CU_AD_FORMAT_UNORM_INT8X4 && format <= CU_AD_FORMAT_SNORM_INT16X4)
        return 4 * channels;
    return 8 * channels;
}

/* What the levels of an array take; nothing where memory is mapped into it later. */
static uint64_t array_bytes(const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned levels)
{
    if (!d || d->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING))
        return 0;
    bool layers = d->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP);
    uint64_t sum = 0, w = d->Width, h = d->Height ? d->Height : 1, depth = d->Depth ? d->Depth : 1, bytes;
    for (unsigned i = 0; i < levels; i++) {
        if (__builtin_mul_overflow(w, h, &bytes) || __builtin_mul_overflow(bytes, depth, &bytes) ||
            __builtin_mul_overflow(bytes, texel_half_bytes(d->Format, d->NumChannels), &bytes))
            return UINT64_MAX / 2;
        sum += (bytes + 1) / 2;
        if (w == 1 && h == 1 && (layers || depth == 1))
            break;
        w = w > 1 ? w / 2 : 1;
        h = h > 1 ? h / 2 : 1;
        depth = depth > 1 && !layers ? depth / 2 : depth;
    }
    return sum;
}

CUresult cuArrayCreate_v2(CUarray *a, const CUDA_ARRAY_DESCRIPTOR *d)
{
    CUDA_ARRAY3D_DESCRIPTOR full = {0};
    if (d)
        full = (CUDA_ARRAY3D_DESCRIPTOR){
            .Width = d->Width, .Height = d->Height, .Format = d->Format, .NumChannels = d->NumChannels};
    entry *e;
    uint64_t bytes = array_bytes(&full, 1);
    if (!begin(&e, ARRAY, bytes, NULL))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult r = RG_CALL(cuArrayCreate_v2, (a, d));
    end(e, r, r == CUDA_SUCCESS ? (uintptr_t)*a : 0, bytes);
    return r;
}

CUresult cuArray3DCreate_v2(CUarray *a, const CUDA_ARRAY3D_DESCRIPTOR *d)
{
    entry *e;
    uint64_t bytes = array_bytes(d, 1);
    if (!begin(&e, ARRAY, bytes, NULL))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult r = RG_CALL(cuArray3DCreate_v2, (a, d));
    end(e, r, r == CUDA_SUCCESS ? (uintptr_t)*a : 0, bytes);
    return r;
}

CUresult cuArrayDestroy(CUarray a)
{
    rg_stay_waits();
    entry *e = free_begin(ARRAY, (uintptr_t)a);
    return free_end(e, RG_CALL(cuArrayDestroy, (a)));
}

CUresult cuMipmappedArrayCreate(CUmipmappedArray *a, const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned levels)
{
    entry *e;
    uint64_t bytes = array_bytes(d, levels ? levels : 1); /* as the driver has it */
    if (!begin(&e, MIPMAPPED, bytes, NULL))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult r = RG_CALL(cuMipmappedArrayCreate, (a, d, levels));
    end(e, r, r == CUDA_SUCCESS ? (uintptr_t)*a : 0, bytes);
    return r;
}

CUresult cuMipmappedArrayDestroy(CUmipmappedArray a)
{
    entry *e = free_begin(MIPMAPPED, (uintptr_t)a);
    return free_end(e, RG_CALL(cuMipmappedArrayDestroy, (a)));
}

/* ---- Contexts. */

static bool went_with(const entry *e, uint64_t context, uint64_t mark)
{
    return (uintptr_t)e->context == context && e->serial <= mark && e->kind != HANDLE && e->kind != MAPPING;
}

void rg_memory_forget_context(CUcontext context, uint64_t mark)
{
    if (context)
        drop_list(take_all(went_with, (uintptr_t)context, mark));
}

/* Retaining is the only way to learn its handle, and only done while it is there (it would be made otherwise) and matters. */
CUcontext rg_memory_primary(CUdevice device)
{
    unsigned flags;
    int active = 0;
    CUcontext primary = NULL;
    if (!atomic_load(&tracked) || !rg_real.cuDevicePrimaryCtxGetState || !RG_REAL(cuDevicePrimaryCtxRetain) ||
        rg_real.cuDevicePrimaryCtxGetState(device, &flags, &active) != CUDA_SUCCESS || !active ||
        RG_REAL(cuDevicePrimaryCtxRetain)(&primary, device) != CUDA_SUCCESS)
        return NULL;
    if (rg_real.hooked[RG_HOOK_cuDevicePrimaryCtxRelease_v2])
        RG_REAL(cuDevicePrimaryCtxRelease_v2)(device);
    else
        RG_REAL(cuDevicePrimaryCtxRelease)(device);
    return primary;
}

/* ---- What the program is told. Under a limit the device is as large as the limit. */

CUresult cuMemGetInfo_v2(size_t *left, size_t *total)
{
    CUresult r = RG_CALL(cuMemGetInfo_v2, (left, total));
    uint64_t limit = r == CUDA_SUCCESS && rg_is_client() ? atomic_load(&rg.account->limit_bytes) : 0;
    if (!limit)
        return r;
    uint64_t used = rg_account_used(rg.segment, rg.account), room = limit > used ? limit - used : 0;
    if (total && *total > limit) /* a driver may take NULL */
        *total = limit;
    if (left && *left > room)
        *left = room;
    return r;
}

CUresult cuDeviceTotalMem_v2(size_t *total, CUdevice d)
{
    CUresult r = RG_CALL(cuDeviceTotalMem_v2, (total, d));
    uint64_t limit = r == CUDA_SUCCESS && rg_is_client() ? atomic_load(&rg.account->limit_bytes) : 0;
    if (limit && total && *total > limit)
        *total = limit;
    return r;
}
