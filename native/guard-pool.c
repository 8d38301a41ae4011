/*
 * guard-pool.c: handles of the guard's own, and how one of them takes the place of the program's (guard.c).
 */
#include "guard-inside.h"

#include <time.h>

static rg_pooled pool[RG_POOL];

/* Takes an idle handle of the context: this thread's last one if it can be. */
static rg_pooled *take_idle(CUcontext context)
{
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < RG_POOL; i++) {
            rg_pooled *p = &pool[i];
            uintptr_t nobody = 0;
            if (atomic_load_explicit(&p->context, memory_order_relaxed) != (uintptr_t)context ||
                (pass == 0 && atomic_load_explicit(&p->last, memory_order_relaxed) != rg_guard_self()) ||
                !atomic_compare_exchange_strong(&p->owner, &nobody, rg_guard_self()))
                continue;
            if (atomic_load(&p->context) == (uintptr_t)context)
                return p;
            atomic_store(&p->owner, 0);
        }
    return NULL;
}

void rg_pool_give_back(rg_pooled *p)
{
    atomic_store_explicit(&p->last, rg_guard_self(), memory_order_relaxed);
    atomic_store_explicit(&p->owner, 0, memory_order_release);
}

static int count_pool(CUcontext context)
{
    int n = 0;
    for (int i = 0; i < RG_POOL; i++)
        n += atomic_load(&pool[i].context) == (uintptr_t)context;
    return n;
}

/* Makes one more handle for the current context, unless it has its share. */
static rg_pooled *add(CUcontext context, enum rg_blas call)
{
    rg_pooled *place = NULL;
    cublasHandle_t h = NULL;
    for (int i = 0; i < RG_POOL && !place; i++) {
        uintptr_t nobody = 0;
        if (atomic_load(&pool[i].context) || !atomic_compare_exchange_strong(&pool[i].owner, &nobody, rg_guard_self()))
            continue;
        if (atomic_load(&pool[i].context))
            atomic_store(&pool[i].owner, 0);
        else
            place = &pool[i];
    }
    if (!place)
        return NULL;
    /* Entered before it is counted and made: of several threads here at once, none goes beyond the share. */
    atomic_store(&place->device, rg_guard_device());
    atomic_store(&place->context, (uintptr_t)context);
    if (count_pool(context) > RG_POOL_PER_CONTEXT || rg_guard_create(&h, call, context) != CUBLAS_STATUS_SUCCESS) {
        atomic_store(&place->context, 0);
        atomic_store(&place->owner, 0);
        return NULL;
    }
    place->handle = h;
    place->changed = place->asked = 0;
    rg_guard_count_handles(1);
    return place;
}

/* Destroys the idle handles of the context, which is current. Returns how many. */
size_t rg_pool_make_room(CUcontext context)
{
    size_t freed = 0;
    for (int i = 0; context && i < RG_POOL; i++) {
        rg_pooled *p = &pool[i];
        uintptr_t nobody = 0;
        if (atomic_load(&p->context) != (uintptr_t)context || !atomic_compare_exchange_strong(&p->owner, &nobody, rg_guard_self()))
            continue;
        if (atomic_load(&p->context) == (uintptr_t)context) {
            REAL(cublasDestroy_v2)(p->handle);
            atomic_store(&p->context, 0);
            rg_guard_count_handles(-1);
            freed++;
        }
        atomic_store(&p->owner, 0);
    }
    return freed;
}

void rg_guard_nap(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
}

/* A handle of the pool for the current context, this thread's until give_back. NULL: none can be made and all are in use. */
rg_pooled *rg_pool_take(CUcontext context, enum rg_blas call)
{
    uint64_t until = rg_now_ns() + RG_GUARD_BUSY_MS * 1000000ull;
    for (bool tried = false;; rg_guard_nap()) {
        rg_pooled *p = take_idle(context);
        if (!p && !tried)
            p = add(context, call);
        if (p || rg_now_ns() >= until || !count_pool(context))
            return p;
        tried = true;
    }
}

/* Whose device memory is: the context's (1), another's (0). Memory of virtual allocations and of pools has no context: there the
 * device decides; -1 where nothing is known. */
int rg_belongs_to(uintptr_t memory, CUcontext context, int device)
{
    CUcontext owner = NULL;
    int where = -1;
    if (!memory || !rg_real.cuPointerGetAttribute)
        return -1;
    if (rg_real.cuPointerGetAttribute(&owner, CU_POINTER_ATTRIBUTE_CONTEXT, memory) == CUDA_SUCCESS && owner)
        return owner == context;
    if (rg_real.cuPointerGetAttribute(&where, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, memory) == CUDA_SUCCESS)
        return where == device;
    return -1;
}

/*
 * Gives the handle the stream, then what the program's carries: workspace, then the rest. A workspace only if no other thread can
 * be using it, even on the same stream: the kernels of two multiplications that take turns there would overwrite each
 * other's parts. Without one the handle has cuBLAS's own.
 */
void rg_pool_mirror(rg_pooled *p, rg_carried *c, CUstream stream, bool exclusive, enum rg_blas call, CUcontext context)
{
    CUcontext owner = context;
    if ((uintptr_t)stream > (uintptr_t)CU_STREAM_PER_THREAD && rg_real.cuStreamGetCtx &&
        (rg_real.cuStreamGetCtx(stream, &owner) != CUDA_SUCCESS || owner != context)) {
        rg_guard_note(FOREIGN_STREAM, call, context, atomic_load(&p->device));
        stream = NULL;
    }
    int device = atomic_load(&p->device);
    REAL(cublasSetStream_v2)(p->handle, stream);
    uintptr_t workspace = atomic_load_explicit(&c->workspace, memory_order_relaxed);
    if (exclusive && rg_belongs_to(workspace, context, device) == 1 && REAL(cublasSetWorkspace_v2))
        REAL(cublasSetWorkspace_v2)
        (p->handle, (void *)workspace, atomic_load_explicit(&c->workspace_bytes, memory_order_relaxed));
    uint32_t set = atomic_load_explicit(&c->set, memory_order_acquire);
    if (rg_belongs_to(atomic_load_explicit(&c->value[SETTING_EMULATION_BIT_COUNT_POINTER], memory_order_relaxed), context, device) != 1)
        set &= ~(1u << SETTING_EMULATION_BIT_COUNT_POINTER);
    for (uint32_t i = 0; (set | p->changed) >> i; i++) {
        uint32_t bit = 1u << i;
        if (set & bit) {
            if (!(p->asked & bit) && rg_blas_get(i, p->handle, &p->first[i]) == CUBLAS_STATUS_SUCCESS)
                p->asked |= bit;
            if (rg_blas_set(i, p->handle, atomic_load_explicit(&c->value[i], memory_order_relaxed)) == CUBLAS_STATUS_SUCCESS)
                p->changed |= bit;
        } else if (p->changed & p->asked & bit && rg_blas_set(i, p->handle, p->first[i]) == CUBLAS_STATUS_SUCCESS) {
            p->changed &= ~bit;
        }
    }
}

void rg_pool_forget(CUcontext context, CUdevice d)
{
    for (int i = 0; i < RG_POOL; i++) {
        rg_pooled *p = &pool[i];
        if (atomic_load(&p->context) &&
            (context ? atomic_load(&p->context) == (uintptr_t)context : atomic_load(&p->device) == d)) {
            atomic_store(&p->context, 0);
            rg_guard_count_handles(-1);
        }
    }
}
