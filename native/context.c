/*
 * context.c: which contexts a client has, and where a stream or event was used in one that it does not belong to.
 *
 * A stream and an event belong to the context that was current when it was made; who made which is kept in a table of this
 * process that forgets where it is full. It is asked when the driver has refused a call for its handle or context, and when a
 * thread turns to another stream, or goes on with the one that it had in another context: a call that names a stream of another
 * context than the current one may run, and what it launches is then not where the program thinks it is. What is found is counted,
 * and the last ones are named in the slot of the process.
 *
 * Never on the path of a call that succeeds on the stream, and in the context, that its thread used before.
 */
#include "client.h"

#include <sys/syscall.h>
#include <unistd.h>

enum { HANDLES = 2048, PROBES = 8 };

/* Handles made by this process; `context` 0: being written, RG_CONTEXT_GONE: destroyed, and then it may be anybody's next one. */
static struct {
    _Atomic uintptr_t handle, context;
} made[HANDLES];

static uint32_t place_of(const void *handle)
{
    return (uint32_t)((uint64_t)(uintptr_t)handle * 0x9e3779b97f4a7c15u >> 53);
}

static void note(const void *handle, uintptr_t context)
{
    uint32_t at = place_of(handle), use = at, rank = 0;
    for (uint32_t n = 0; n < PROBES; n++) {
        uint32_t i = (at + n) % HANDLES;
        uintptr_t found = atomic_load(&made[i].handle);
        uint32_t now = found == (uintptr_t)handle ? 3 : !found ? 2 : atomic_load(&made[i].context) == RG_CONTEXT_GONE;
        if (now > rank) {
            rank = now;
            use = i;
        }
    }
    atomic_store(&made[use].context, 0);
    atomic_store(&made[use].handle, (uintptr_t)handle);
    atomic_store(&made[use].context, context);
}

/* Context of a stream or event; 0: not known. */
static uintptr_t owner_of(const void *handle)
{
    uint32_t at = place_of(handle);
    for (uint32_t n = 0; n < PROBES; n++)
        if (atomic_load(&made[(at + n) % HANDLES].handle) == (uintptr_t)handle)
            return atomic_load(&made[(at + n) % HANDLES].context);
    return 0;
}

static uintptr_t current(void)
{
    CUcontext c = NULL;
    rg_real.cuCtxGetCurrent(&c);
    return (uintptr_t)c;
}

void rg_context_made(const void *handle)
{
    uintptr_t context = current();
    if (context)
        note(handle, context);
}

void rg_context_unmade(const void *handle)
{
    if (owner_of(handle))
        note(handle, RG_CONTEXT_GONE);
}

/* ---- which contexts there are ---- */

/* Its own entry; else a free one; else that of a context that is no more. The caller holds the lock of the tracks. */
void rg_context_seen(rg_client *slot, CUcontext context, uint32_t device)
{
    int use = -1, rank = 0;
    for (int i = 0; i < RG_MAX_CONTEXTS; i++) {
        uint64_t found = atomic_load(&slot->contexts[2 * i]), where = atomic_load(&slot->contexts[2 * i + 1]);
        int now = found == (uintptr_t)context ? 3 : !found ? 2 : (where & RG_CONTEXT_ENDED) != 0;
        if (now > rank) {
            rank = now;
            use = i;
        }
    }
    if (use < 0) {
        atomic_store(&slot->contexts_full, 1);
        return;
    }
    atomic_store(&slot->contexts[2 * use], (uintptr_t)context);
    atomic_store(&slot->contexts[2 * use + 1], device + 1);
}

void rg_context_gone(CUcontext context, CUdevice d)
{
    for (uint32_t k = 0; k < atomic_load(&rg.member_count); k++) {
        rg_client *slot = rg.members[k].slot;
        for (int i = 0; slot && i < RG_MAX_CONTEXTS; i++) {
            uint64_t device = atomic_load(&slot->contexts[2 * i + 1]);
            bool its = context ? atomic_load(&slot->contexts[2 * i]) == (uintptr_t)context
                               : device && atomic_load(&rg.ordinal[(device - 1) % RG_MAX_DEVICES]) == d;
            if (device && its)
                atomic_fetch_or(&slot->contexts[2 * i + 1], RG_CONTEXT_ENDED);
        }
    }
    for (uint32_t i = 0; i < HANDLES && context; i++)
        if (atomic_load(&made[i].context) == (uintptr_t)context)
            atomic_store(&made[i].context, RG_CONTEXT_GONE);
}

/* ---- what was used in the wrong one ---- */

static void record(uint32_t operation, CUresult result, const void *handle, uintptr_t owner, uintptr_t current)
{
    rg_client *slot = rg.slot;
    rg_member *m = rg_member_mine();
    uint64_t n = atomic_fetch_add(&slot->misuses, 1) + 1;
    _Atomic uint64_t *entry = &slot->misuse_ring[n % RG_MISUSES * RG_MISUSE_WORDS];
    atomic_store(&entry[0], 0);
    atomic_store(&entry[1], (uint64_t)operation << 32 | (uint32_t)syscall(SYS_gettid));
    atomic_store(&entry[2], (uint64_t)result << 32 | (uint32_t)(m ? m->slot_index : rg.slot_index));
    atomic_store(&entry[3], current);
    atomic_store(&entry[4], owner);
    atomic_store(&entry[5], (uintptr_t)handle);
    atomic_store(&entry[6], rg_now_ns());
    atomic_store(&entry[0], n);
}

void rg_context_refused(uint32_t operation, CUresult result, const void *handle, const void *other)
{
    if (result != CUDA_ERROR_INVALID_HANDLE && result != CUDA_ERROR_INVALID_CONTEXT && result != CUDA_ERROR_CONTEXT_IS_DESTROYED)
        return;
    uintptr_t owner = (uintptr_t)handle > 2 ? owner_of(handle) : 0, now = (uintptr_t)other > 2 ? owner_of(other) : 0;
    if (owner > RG_CONTEXT_GONE && owner == now)
        return; /* for another reason: an event that keeps no time, say */
    record(operation, result, handle, owner, now ? now : current());
}

void rg_context_turned(uint32_t operation, const rg_track *t)
{
    uintptr_t now = current(), owner = (uintptr_t)atomic_load_explicit(&t->context, memory_order_relaxed);
    atomic_store_explicit(&rg_this.row->context, now, memory_order_relaxed);
    if (now && owner && now != owner)
        record(operation, CUDA_SUCCESS, atomic_load(&t->stream), owner, now);
}
