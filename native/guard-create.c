/*
 * guard-create.c: contexts for threads that have none, and handles made one at a time, with what is done where one cannot be made
 * (guard.c).
 */
#include "guard-inside.h"

#include <time.h>

/* ---- Threads without a context ---- */

/*
 * The device to bind on a thread that has no current context and names no handle. Known are which devices have a primary
 * context (what the program uses) and what it selected:
 *   - the device that this thread itself had selected before;
 *   - else the only device whose primary context is active: in one-device-per-process programs the rank's own, whichever it is;
 *   - else, with several, the one the program selected last, unless device 0 is among them: a thread that has selected nothing is
 *     on device 0 by the CUDA runtime's rule, and a program that counts on that is right.
 * Otherwise -1: nothing is bound, and cuBLAS decides as it would without Rigel. So too with cuBLAS 11 and several devices:
 * cudaSetDevice of CUDA 11 makes no context current, so a choice could contradict the program's (since CUDA 12 it does; see
 * cudaSetDevice in the "CUDA Runtime API" manual).
 */
int rg_guard_choose_device(void)
{
    int count = 0, only = -1, actives = 0;
    bool zero = false, last_is_active = false;
    int last = atomic_load_explicit(&rg_guard_last_device, memory_order_relaxed);
    if (!rg_real.cuDeviceGetCount || rg_real.cuDeviceGetCount(&count) != CUDA_SUCCESS || count < 1)
        return -1;
    if (count == 1)
        return 0;
    if (atomic_load(&rg_blas_major) == 11)
        return -1;
    if (rg_guard_selected_device >= 0)
        return rg_guard_selected_device;
    for (int d = 0; d < count; d++) {
        unsigned flags;
        int active_now = 0;
        if (rg_real.cuDevicePrimaryCtxGetState && rg_real.cuDevicePrimaryCtxGetState(d, &flags, &active_now) == CUDA_SUCCESS &&
            active_now) {
            only = d;
            actives++;
            zero |= d == 0;
            last_is_active |= d == last;
        }
    }
    return actives == 1 ? only : !zero && last_is_active ? last : -1;
}

/* Makes the device's primary context current; NULL if that cannot be. */
CUcontext rg_guard_bind_device(int device)
{
    unsigned flags;
    int was_active = 1;
    CUcontext c = NULL;
    if (device < 0 || !RG_REAL(cuDevicePrimaryCtxRetain) || !RG_REAL(cuCtxSetCurrent))
        return NULL;
    if (rg_real.cuDevicePrimaryCtxGetState)
        rg_real.cuDevicePrimaryCtxGetState(device, &flags, &was_active);
    if (RG_REAL(cuDevicePrimaryCtxRetain)(&c, device) != CUDA_SUCCESS)
        return NULL;
    bool bound = RG_REAL(cuCtxSetCurrent)(c) == CUDA_SUCCESS;
    /* The program's own references keep it; only if it has none must ours stay, as the CUDA runtime's would. */
    if (was_active && RG_REAL(cuDevicePrimaryCtxRelease_v2))
        RG_REAL(cuDevicePrimaryCtxRelease_v2)(device);
    if (bound)
        rg_thread_context((uintptr_t)c);
    return bound ? c : NULL;
}

/* ---- Making handles ---- */

static pthread_mutex_t create_lock = PTHREAD_MUTEX_INITIALIZER;
enum { CREATE_WAIT_S = 30 }; /* the first handle of a process takes seconds where kernels are loaded from a slow disk */

static bool lock_creation(void)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += CREATE_WAIT_S;
    return pthread_mutex_timedlock(&create_lock, &until) == 0;
}

/* Waiting for best-effort clients: their agents look ten times a second. */
enum { PAUSE_MS = 1000 };
_Atomic uint32_t rg_guard_answer_ms = 1000;

/* Whether this client's pools may keep memory of the device, whose index in the segment is known only once it was launched on. */
static bool may_give(int slot, int index)
{
    rg_client *c = &rg.segment->clients[slot];
    return slot != rg.slot_index && atomic_load(&c->state) == RG_LIVE && atomic_load(&c->class) == RG_CLASS_BEST_EFFORT &&
           atomic_load(&c->pool_kept_bytes) && (index < 0 || atomic_load(&c->devices) >> index & 1);
}

static int index_of(int device)
{
    uint32_t devices = atomic_load(&rg.slot->devices);
    for (int d = 0; d < RG_MAX_DEVICES; d++)
        if (devices >> d & 1 && atomic_load(&rg.ordinal[d]) == device)
            return d;
    return -1;
}

/* Asks best-effort clients for what their memory pools keep, and waits until all have answered, for a moment. */
static void ask_others(rg_relief *relief, int device)
{
    int index = index_of(device);
    uint64_t asked = 0, before = 0, after = 0;
    for (int i = 0; i < RG_MAX_CLIENTS; i++)
        if (may_give(i, index)) {
            asked |= 1ull << i;
            before += atomic_load(&rg.segment->clients[i].pool_returned_bytes);
        }
    relief->others = (uint32_t)__builtin_popcountll(asked);
    if (!asked)
        return;
    uint32_t question = atomic_fetch_add(&rg.segment->header.trim, 1) + 1;
    uint64_t until = rg_now_ns() + atomic_load(&rg_guard_answer_ms) * 1000000ull;
    for (bool all = false; !all && rg_now_ns() < until; rg_guard_nap()) {
        all = true;
        for (int i = 0; i < RG_MAX_CLIENTS; i++) {
            rg_client *c = &rg.segment->clients[i];
            all &= !(asked >> i & 1) || atomic_load(&c->state) != RG_LIVE || (int32_t)(atomic_load(&c->trimmed) - question) >= 0;
        }
    }
    for (int i = 0; i < RG_MAX_CLIENTS; i++)
        if (asked >> i & 1)
            after += atomic_load(&rg.segment->clients[i].pool_returned_bytes);
    relief->others_bytes = after > before ? after - before : 0;
}

/*
 * Makes a handle once more, if anything could be given back for it: idle handles of the guard's own pool, what this process's
 * memory pools keep, and what those of best-effort clients keep. Nothing else can be had from a program: what it has allocated is
 * its own, the cache of PyTorch's allocator included. While a high client tries again, best-effort clients are paused, so
 * that they do not take what they have just given.
 */
static cublasStatus_t again(cublasHandle_t *out, CUcontext current, cublasStatus_t failed, rg_relief *relief)
{
    relief->handles = rg_pool_make_room(current);
    relief->own_bytes = rg_memory_pools_trim();
    if (!relief->capped)
        ask_others(relief, rg_guard_device());
    if (!relief->handles && !relief->own_bytes && !relief->others_bytes)
        return failed;
    rg_settings *s = &rg.segment->settings;
    bool pause = relief->others_bytes && atomic_load(&rg.slot->class) == RG_CLASS_HIGH;
    uint64_t begun = rg_now_ns();
    uint32_t held_ms = rg_hold_left_ms(s, begun); /* by the control loop */
    if (pause && held_ms < PAUSE_MS)
        rg_segment_hold(rg.segment, PAUSE_MS);
    cublasStatus_t r = REAL(cublasCreate_v2)(out);
    if (pause && held_ms < PAUSE_MS) {
        uint64_t took_ms = (rg_now_ns() - begun) / 1000000;
        rg_segment_hold(rg.segment, held_ms > took_ms ? held_ms - (uint32_t)took_ms : 0);
    }
    return r;
}

cublasStatus_t rg_guard_create(cublasHandle_t *out, enum rg_blas call, CUcontext current)
{
    bool locked = lock_creation();
    rg_guard_creating = true;
    uint64_t denied = atomic_load(&rg.account->denied);
    cublasStatus_t r = REAL(cublasCreate_v2)(out);
    if (r != CUBLAS_STATUS_SUCCESS && r != CUBLAS_STATUS_INVALID_VALUE) {
        rg_relief relief = {.capped = atomic_load(&rg.account->denied) != denied};
        r = again(out, current, r, &relief);
        rg_guard_note(r == CUBLAS_STATUS_SUCCESS ? CREATE_RETRIED : CREATE_FAILED, call, current, rg_guard_device());
        if (r == CUBLAS_STATUS_SUCCESS)
            rg_guard_repaired();
        else
            rg_guard_explain(r, rg_guard_device(), &relief);
    }
    rg_guard_creating = false;
    if (locked)
        pthread_mutex_unlock(&create_lock);
    return r;
}
