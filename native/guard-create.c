/*
 * guard-create.c: contexts for threads that have none, and handles made one at a time (guard.c).
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
    if (device < 0 || !rg_real.cuDevicePrimaryCtxRetain || !RG_REAL(cuCtxSetCurrent))
        return NULL;
    if (rg_real.cuDevicePrimaryCtxGetState)
        rg_real.cuDevicePrimaryCtxGetState(device, &flags, &was_active);
    if (rg_real.cuDevicePrimaryCtxRetain(&c, device) != CUDA_SUCCESS)
        return NULL;
    bool bound = RG_REAL(cuCtxSetCurrent)(c) == CUDA_SUCCESS;
    /* The program's own references keep it; only if it has none must ours stay, as the CUDA runtime's would. */
    if (was_active && RG_REAL(cuDevicePrimaryCtxRelease_v2))
        RG_REAL(cuDevicePrimaryCtxRelease_v2)(device);
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

/*
 * Makes a handle in the current context, one thread at a time, twice if need be. Idle handles of the pool are given up for
 * the second attempt; this is the place to pause best-effort clients, should they hold memory that they would give back.
 */
cublasStatus_t rg_guard_create(cublasHandle_t *out, enum rg_blas call, CUcontext current)
{
    bool locked = lock_creation();
    rg_guard_creating = true;
    cublasStatus_t r = REAL(cublasCreate_v2)(out);
    if (r != CUBLAS_STATUS_SUCCESS && r != CUBLAS_STATUS_INVALID_VALUE) {
        rg_pool_make_room(current);
        cublasStatus_t again = REAL(cublasCreate_v2)(out);
        rg_guard_note(again == CUBLAS_STATUS_SUCCESS ? CREATE_RETRIED : CREATE_FAILED, call, current, rg_guard_device());
        if (again == CUBLAS_STATUS_SUCCESS)
            rg_guard_repaired();
        else
            rg_guard_explain(again, rg_guard_device());
        r = again;
    }
    rg_guard_creating = false;
    if (locked)
        pthread_mutex_unlock(&create_lock);
    return r;
}
