/*
 * guard.c: keeps programs running that use cuBLAS handles where they do not belong, and says so.
 *
 * A cuBLAS handle belongs to the context that was current when it was made, takes some 64 MiB of its memory, and is not safe
 * for two threads at once. Schedulers and pipelines break these rules by accident, and what they see is NOT_INITIALIZED,
 * EXECUTION_FAILED or wrong results. For every call in cublas.def the guard checks, in the caller's thread:
 *
 *   no_context        the thread has no current context: binds one (see guard-create.c)
 *   null_handle       runs the call on a handle of the pool
 *   wrong_context     the handle belongs to another context than the current one. If the operands are the handle's context's, that
 *                     context is made current for the call; else the call runs on a handle of the pool
 *   in_use_elsewhere  another thread is inside a call on this handle, or has set another stream or a workspace on it since this thread
 *                     set its stream and before it could use that: runs on a handle of the pool, on the stream that this thread set
 *
 * and makes handles one at a time (create_retried, create_failed). A handle of the pool gets what the program's handle
 * carries: the stream, if it belongs to this context (foreign_stream: it does not, the NULL stream is used), then the
 * workspace, which setting the stream resets, then the other settings. What a handle carries is known from the program's own
 * calls, so the program's handle is never asked, let alone altered: another thread may be using it.
 *
 * Handles made before the guard could see them are not known and pass through.
 *
 * RIGEL_GUARD=repair does all that; `warn` counts, says it once and passes through; `off` passes through.
 *
 * Rules
 *   1. A known handle used rightly costs one look-up, one question for the current context, one compare-and-swap and one
 *      store, and is never replaced. Threads that share one under a lock of theirs set their stream and use it under that.
 *   2. While a stream is captured nothing is repaired (making a handle would end the capture), and the driver is asked for
 *      nothing but the current context.
 *   3. In a process that is no client (any more: exit, fork) every call passes straight through, so no lock outlives a fork. Where its
 *      work goes past Rigel for now so does every call that computes; handles, and what is set on them, are followed.
 *   4. Handles of the pool are never destroyed at exit. They are when a handle cannot be made for want of memory.
 *   5. Every wait ends by itself.
 */
#include "guard-inside.h"
#include "record-client.h"

#include <stdlib.h>
#include <string.h>

/* ---- The program's handles ---- */

typedef struct {
    _Alignas(64) _Atomic(uintptr_t) key; /* the handle; 0 never used, GONE destroyed */
    _Atomic(uintptr_t) context;          /* that was current when it was made */
    _Atomic(uintptr_t) owner;            /* the thread that is inside a call on it: address of its rg_thread_mark */
    _Atomic int device;
    _Atomic uint32_t made;                      /* counts those that had this place */
    _Atomic(uintptr_t) stream_by, workspace_by; /* the threads that set what it carries; 0: nobody */
    rg_carried carried;
} known_handle;
enum { GONE = 1, PROBES = 64 };
static known_handle handles[RG_GUARD_HANDLES];
static pthread_mutex_t handles_lock = PTHREAD_MUTEX_INITIALIZER; /* for changing keys; finding takes none */

static inline uint32_t hash(uintptr_t key)
{
    return (uint32_t)((uint64_t)key * 0x9e3779b97f4a7c15u >> 54);
}
_Static_assert(RG_GUARD_HANDLES == 1 << 10, "hash keeps ten bits");

static inline known_handle *find(cublasHandle_t h)
{
    uintptr_t key = (uintptr_t)h;
    for (uint32_t i = hash(key), n = 0; n < PROBES; i = (i + 1) % RG_GUARD_HANDLES, n++) {
        uintptr_t k = atomic_load_explicit(&handles[i].key, memory_order_acquire);
        if (RG_LIKELY(k == key))
            return key > GONE ? &handles[i] : NULL;
        if (k == 0)
            return NULL;
    }
    return NULL;
}

static void remember(cublasHandle_t h, CUcontext context, int device)
{
    uintptr_t key = (uintptr_t)h;
    known_handle *place = NULL;
    pthread_mutex_lock(&handles_lock);
    for (uint32_t i = hash(key), n = 0; n < PROBES; i = (i + 1) % RG_GUARD_HANDLES, n++) {
        uintptr_t k = atomic_load(&handles[i].key);
        if (k == key || (k <= GONE && !place))
            place = &handles[i];
        if (k == key || k == 0)
            break;
    }
    if (place) {
        rg_carried_clear(&place->carried);
        atomic_store_explicit(&place->stream_by, 0, memory_order_relaxed);
        atomic_store_explicit(&place->workspace_by, 0, memory_order_relaxed);
        atomic_fetch_add_explicit(&place->made, 1, memory_order_relaxed);
        atomic_store_explicit(&place->context, (uintptr_t)context, memory_order_relaxed);
        atomic_store_explicit(&place->device, device, memory_order_relaxed);
        atomic_store_explicit(&place->owner, 0, memory_order_relaxed);
        atomic_store_explicit(&place->key, key, memory_order_release);
    }
    pthread_mutex_unlock(&handles_lock);
}

static void forget(known_handle *e)
{
    pthread_mutex_lock(&handles_lock);
    atomic_store(&e->key, GONE);
    pthread_mutex_unlock(&handles_lock);
}

/* ---- Green contexts ---- */

enum { GREENS = 64 }; /* the latest */
static _Atomic(uintptr_t) greens[GREENS];

void rg_guard_green(CUcontext context)
{
    static _Atomic uint32_t made;
    for (int i = 0; i < GREENS; i++)
        if (atomic_load(&greens[i]) == (uintptr_t)context)
            return;
    atomic_store(&greens[atomic_fetch_add(&made, 1) % GREENS], (uintptr_t)context);
}

static bool is_green(CUcontext context)
{
    for (int i = 0; i < GREENS; i++)
        if (atomic_load_explicit(&greens[i], memory_order_relaxed) == (uintptr_t)context)
            return true;
    return false;
}

/* ---- State of the guard and of a thread ---- */

_Atomic int rg_guard_mode = GUARD_OFF;
_Thread_local uint64_t rg_guard_calls INITIAL_EXEC;
_Thread_local bool rg_guard_creating INITIAL_EXEC;
_Thread_local int rg_guard_selected_device INITIAL_EXEC = -1;
static _Thread_local INITIAL_EXEC rg_carried of_null; /* what this thread has set on a NULL handle */
_Atomic int rg_guard_last_device = -1;
/* The stream that this thread set last, on which handle, and whether it has yet to be used. */
static _Thread_local INITIAL_EXEC struct {
    known_handle *e;
    uint32_t made, destroyed;
    bool unused;
    CUstream stream;
} bound;
static _Atomic uint32_t streams_destroyed;

void rg_guard_forget_stream(void)
{
    /* Whoever's stream was overtaken takes what the others have set. */
    atomic_fetch_add(&streams_destroyed, 1);
}

void rg_guard_attach(void)
{
    const char *text = getenv("RIGEL_GUARD");
    int mode = GUARD_REPAIR;
    if (text && strcmp(text, "off") == 0)
        mode = GUARD_OFF;
    else if (text && strcmp(text, "warn") == 0)
        mode = GUARD_WARN;
    else if (text && *text && strcmp(text, "repair") != 0)
        rg_say("rigel: RIGEL_GUARD is \"%s\", expected \"off\", \"warn\" or \"repair\"; using \"repair\"", text);
    atomic_store(&rg_guard_mode, mode);
    atomic_store(&rg.slot->guard_mode, (uint32_t)mode);
    atomic_store(&rg.slot->guard_handles, 0); /* what a process before us left open went with it */
}

void rg_guard_selected(CUcontext context)
{
    if (!context || !rg_is_client() || atomic_load(&rg.captures))
        return;
    rg_guard_selected_device = rg_guard_device();
    if (atomic_load_explicit(&rg_guard_last_device, memory_order_relaxed) != rg_guard_selected_device)
        atomic_store_explicit(&rg_guard_last_device, rg_guard_selected_device, memory_order_relaxed);
}

/* ---- A guarded call ---- */

typedef struct {
    known_handle *held; /* the program's handle, this thread's for the call */
    rg_pooled *lent;    /* or one of the pool */
    bool pushed;        /* the handle's context was made current */
} guarded;

static inline bool claim(known_handle *e)
{
    uintptr_t nobody = 0;
    return atomic_compare_exchange_strong_explicit(&e->owner, &nobody, rg_guard_self(), memory_order_acquire, memory_order_relaxed);
}

static inline void release(known_handle *e)
{
    atomic_store_explicit(&e->owner, 0, memory_order_release);
}

/* This thread has set a stream on the handle and not used it yet. */
static inline bool is_bound(const known_handle *e)
{
    return bound.unused && bound.e == e && bound.made == atomic_load_explicit(&e->made, memory_order_relaxed);
}

/* And another thread has meanwhile set another, or a workspace for another: what the handle carries is not what this thread wants. */
static inline bool is_overtaken(const known_handle *e)
{
    uintptr_t workspace_by = atomic_load_explicit(&e->workspace_by, memory_order_relaxed);
    return atomic_load_explicit(&e->carried.stream, memory_order_relaxed) != (uintptr_t)bound.stream ||
           (workspace_by && workspace_by != atomic_load_explicit(&e->stream_by, memory_order_relaxed));
}

/* Whether this thread, whose handle it is for a call, may use it with what it carries. Its own stream may be gone if any has been
 * destroyed: then what the others have set is all there is. */
static inline bool carries_ours(const known_handle *e)
{
    if (RG_LIKELY(!is_bound(e)))
        return true;
    if (RG_UNLIKELY(is_overtaken(e)) && bound.destroyed == atomic_load(&streams_destroyed))
        return false;
    bound.unused = false;
    return true;
}

/* Puts a handle of the pool in the place of `h`; `h` itself if there is none. The program's handle is held meanwhile if it is
 * free and what it carries is used, so that nobody else uses that; not while a handle is made or waited for. */
static cublasHandle_t replace(cublasHandle_t h, known_handle *e, enum rg_blas call, CUcontext current, guarded *g)
{
    if (g->held)
        release(g->held);
    g->held = NULL;
    rg_pooled *p = rg_pool_take(current, call);
    if (e && claim(e))
        g->held = e;
    if (!p)
        return h;
    rg_carried *carried = e ? &e->carried : &of_null;
    bool ours = e && is_bound(e) && bound.destroyed == atomic_load(&streams_destroyed);
    if (g->held && ours && is_overtaken(e)) {
        release(e);
        g->held = NULL;
    }
    CUstream stream = ours ? bound.stream : (CUstream)atomic_load_explicit(&carried->stream, memory_order_relaxed);
    rg_pool_mirror(p, carried, stream, g->held != NULL, call, current);
    rg_guard_repaired();
    g->lent = p;
    return p->handle;
}

/* Everything but a known handle, used in its context by one thread. Returns the handle to use. */
static __attribute__((noinline, cold)) cublasHandle_t enter_slowly(cublasHandle_t h, known_handle *e, enum rg_blas call,
                                                                   const void *operand, CUcontext current, guarded *g)
{
    if (rg_guard_creating || (e && !g->held && atomic_load(&e->owner) == rg_guard_self()))
        return h; /* cuBLAS calls itself */
    if (!current) {
        rg_guard_note(NO_CONTEXT, call, NULL, e ? atomic_load(&e->device) : rg_guard_selected_device);
        if (rg_guard_repairing()) {
            CUcontext own = e ? (CUcontext)atomic_load(&e->context) : NULL;
            if (own && RG_REAL(cuCtxSetCurrent) && RG_REAL(cuCtxSetCurrent)(own) == CUDA_SUCCESS)
                rg_thread_context((uintptr_t)(current = own));
            else
                current = rg_guard_bind_device(rg_guard_choose_device());
            if (current)
                rg_guard_repaired();
        }
        if (!current)
            return h;
    }
    if (!h) {
        rg_guard_note(NULL_HANDLE, call, current, rg_guard_device());
        return rg_guard_repairing() ? replace(h, NULL, call, current, g) : h;
    }
    if (!e)
        return h;
    CUcontext own = (CUcontext)atomic_load(&e->context);
    if (own != current && !is_green(current)) {
        rg_guard_note(WRONG_CONTEXT, call, current, rg_guard_device());
        if (!rg_guard_repairing())
            return h;
        if (rg_belongs_to((uintptr_t)operand, current, rg_guard_device()) != 0 ||
            rg_belongs_to((uintptr_t)operand, own, atomic_load(&e->device)) != 1 ||
            rg_real.cuCtxPushCurrent_v2(own) != CUDA_SUCCESS)
            return replace(h, e, call, current, g);
        g->pushed = true;
        current = own;
        if (claim(e)) {
            g->held = e;
            if (carries_ours(e)) {
                rg_guard_repaired();
                return h;
            }
        }
    } else if (g->held || claim(e)) {
        g->held = e;
        if (carries_ours(e))
            return h;
    }
    rg_guard_note(IN_USE_ELSEWHERE, call, current, atomic_load(&e->device));
    return rg_guard_repairing() ? replace(h, e, call, current, g) : h;
}

static inline cublasHandle_t enter(cublasHandle_t h, enum rg_blas call, const void *operand, guarded *g)
{
    *g = (guarded){NULL, NULL, false};
    rg_guard_calls++;
    CUcontext current = NULL;
    known_handle *e = find(h);
    rg_real.cuCtxGetCurrent(&current);
    if (RG_LIKELY(e && current && (uintptr_t)current == atomic_load_explicit(&e->context, memory_order_relaxed) && claim(e))) {
        g->held = e;
        if (RG_LIKELY(carries_ours(e)))
            return h;
    }
    return enter_slowly(h, e, call, operand, current, g);
}

static __attribute__((noinline, cold)) void leave_slowly(guarded *g)
{
    CUcontext ignored;
    if (g->lent)
        rg_pool_give_back(g->lent);
    if (g->pushed)
        rg_real.cuCtxPopCurrent_v2(&ignored);
}

static inline void leave(guarded *g)
{
    if (RG_LIKELY(g->held != NULL))
        release(g->held);
    if (RG_UNLIKELY(g->lent || g->pushed))
        leave_slowly(g);
}

/* Setting something on a handle that another thread is using waits for that thread, a little: it is about to return. NULL: not
 * known, or not to be had. */
static known_handle *hold(cublasHandle_t h)
{
    known_handle *e = find(h);
    if (!e || atomic_load(&e->owner) == rg_guard_self())
        return NULL;
    for (uint64_t until = 0; !claim(e); rg_guard_nap()) {
        if (!rg_guard_repairing() || (until && rg_now_ns() >= until))
            return NULL;
        if (!until)
            until = rg_now_ns() + RG_GUARD_BUSY_MS * 1000000ull;
    }
    return e;
}

/* ---- The functions ---- */

#define RG_BLAS_CALL(symbol, params, args, operand, ...) \
    cublasStatus_t symbol params \
    { \
        RG_BLAS_CALLED(symbol, args); \
        if (RG_UNLIKELY(!rg_guard_active())) \
            return real_ args; \
        guarded guarded_; \
        rg_blas_count(RG_OP_##symbol); \
        h = enter(h, RG_BLAS_##symbol, operand, &guarded_); \
        rg_record_gemm product_ = {__VA_ARGS__}; \
        bool recorded_ = RG_UNLIKELY(rg_recorded != NULL) && product_.m; \
        uint64_t before_ = recorded_ ? rg_record_gemm_begin(&product_) : 0; \
        cublasStatus_t result_ = real_ args; \
        if (recorded_) \
            rg_record_gemm_end(before_); \
        leave(&guarded_); \
        return result_; \
    }
#define RG_BLAS_SET(symbol, setting, type) \
    cublasStatus_t symbol(cublasHandle_t h, type value) \
    { \
        RG_BLAS_CALLED(symbol, (h, value)); \
        return set(h, RG_BLAS_##symbol, SETTING_##setting, (uintptr_t)value); \
    }
#define RG_BLAS_UNKNOWN (-1)
#define RG_BLAS_GET(symbol, setting, type, initial) \
    cublasStatus_t symbol(cublasHandle_t h, type *value) \
    { \
        RG_BLAS_CALLED(symbol, (h, value)); \
        uintptr_t found_ = 0; \
        if (h || !value || !get_of_null(RG_BLAS_##symbol, SETTING_##setting, initial, &found_)) \
            return real_(h, value); \
        *value = (type)found_; \
        return CUBLAS_STATUS_SUCCESS; \
    }
#define RG_BLAS_SPECIAL(...)

/* Whether a NULL handle is being made good for: what is set on it goes to this thread's handle of the pool. */
static bool stands_in(cublasHandle_t h, enum rg_blas call)
{
    if (h || !rg_guard_active() || rg_guard_creating)
        return false;
    rg_guard_calls++;
    rg_guard_note(NULL_HANDLE, call, rg_guard_context(), rg_guard_device());
    if (!rg_guard_repairing())
        return false;
    rg_guard_repaired();
    return true;
}

static void carry(rg_carried *c, enum rg_setting setting, uintptr_t value)
{
    atomic_store_explicit(&c->value[setting], value, memory_order_relaxed);
    atomic_fetch_or_explicit(&c->set, 1u << setting, memory_order_release);
}

static cublasStatus_t set(cublasHandle_t h, enum rg_blas call, enum rg_setting setting, uintptr_t value)
{
    if (stands_in(h, call)) {
        carry(&of_null, setting, value);
        return CUBLAS_STATUS_SUCCESS;
    }
    known_handle *held = rg_guard_follows() ? hold(h) : NULL;
    cublasStatus_t r = rg_blas_set(setting, h, value);
    known_handle *e = held ? held : rg_guard_follows() ? find(h) : NULL;
    if (e && r == CUBLAS_STATUS_SUCCESS)
        carry(&e->carried, setting, value);
    if (held)
        release(held);
    return r;
}

static bool get_of_null(enum rg_blas call, enum rg_setting setting, intptr_t initial, uintptr_t *value)
{
    bool is_set = atomic_load_explicit(&of_null.set, memory_order_relaxed) >> setting & 1;
    if ((!is_set && initial == RG_BLAS_UNKNOWN) || !stands_in(NULL, call))
        return false;
    *value = is_set ? atomic_load_explicit(&of_null.value[setting], memory_order_relaxed) : (uintptr_t)initial;
    return true;
}

#include "cublas.def"

cublasStatus_t cublasSetStream_v2(cublasHandle_t h, CUstream stream)
{
    RG_BLAS_CALLED(cublasSetStream_v2, (h, stream));
    if (stands_in(h, RG_BLAS_cublasSetStream_v2)) {
        atomic_store_explicit(&of_null.stream, (uintptr_t)stream, memory_order_relaxed);
        return CUBLAS_STATUS_SUCCESS;
    }
    known_handle *held = rg_guard_follows() ? hold(h) : NULL;
    cublasStatus_t r = real_(h, stream);
    known_handle *e = held ? held : rg_guard_follows() ? find(h) : NULL;
    if (e && r == CUBLAS_STATUS_SUCCESS) {
        atomic_store_explicit(&e->carried.workspace, 0, memory_order_relaxed);
        atomic_store_explicit(&e->workspace_by, 0, memory_order_relaxed);
        atomic_store_explicit(&e->carried.stream, (uintptr_t)stream, memory_order_relaxed);
        atomic_store_explicit(&e->stream_by, rg_guard_self(), memory_order_relaxed);
        bound.e = e;
        bound.made = atomic_load_explicit(&e->made, memory_order_relaxed);
        bound.destroyed = atomic_load(&streams_destroyed);
        bound.stream = stream;
        bound.unused = true;
    }
    if (held)
        release(held);
    return r;
}

cublasStatus_t cublasGetStream_v2(cublasHandle_t h, CUstream *stream)
{
    RG_BLAS_CALLED(cublasGetStream_v2, (h, stream));
    if (h || !stream || !stands_in(h, RG_BLAS_cublasGetStream_v2))
        return real_(h, stream);
    *stream = (CUstream)atomic_load_explicit(&of_null.stream, memory_order_relaxed);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t h, void *workspace, size_t bytes)
{
    RG_BLAS_CALLED(cublasSetWorkspace_v2, (h, workspace, bytes));
    if (stands_in(h, RG_BLAS_cublasSetWorkspace_v2))
        return CUBLAS_STATUS_SUCCESS; /* whose memory it is cannot be known; cuBLAS's own does as well */
    known_handle *held = rg_guard_follows() ? hold(h) : NULL;
    cublasStatus_t r = real_(h, workspace, bytes);
    known_handle *e = held ? held : rg_guard_follows() ? find(h) : NULL;
    if (e && r == CUBLAS_STATUS_SUCCESS) {
        atomic_store_explicit(&e->carried.workspace_bytes, bytes, memory_order_relaxed);
        atomic_store_explicit(&e->carried.workspace, (uintptr_t)workspace, memory_order_relaxed);
        atomic_store_explicit(&e->workspace_by, rg_guard_self(), memory_order_relaxed);
    }
    if (held)
        release(held);
    return r;
}

cublasStatus_t cublasCreate_v2(cublasHandle_t *out)
{
    static _Atomic bool joined;
    RG_BLAS_CALLED(cublasCreate_v2, (out));
    /* It may be the program's first use of CUDA, and so by several threads at once: cuBLAS would initialise the driver too. */
    if (!rg_guard_creating && !rg_is_client() && rg_interposing() && !atomic_load(&joined)) {
        if (rg_real_ready() && RG_REAL(cuInit)(0) == CUDA_SUCCESS)
            rg_client_attach();
        atomic_store(&joined, true);
    }
    if (!rg_guard_follows() || rg_guard_creating || !out || atomic_load(&rg.captures))
        return real_(out);
    rg_blas_count(RG_OP_cublasCreate_v2);
    rg_guard_calls++;
    CUcontext current = rg_guard_context();
    if (!current) {
        rg_guard_note(NO_CONTEXT, RG_BLAS_cublasCreate_v2, NULL, rg_guard_selected_device);
        if (rg_guard_repairing() && (current = rg_guard_bind_device(rg_guard_choose_device())))
            rg_guard_repaired();
    }
    cublasStatus_t r;
    if (rg_guard_repairing()) {
        r = rg_guard_create(out, RG_BLAS_cublasCreate_v2, current);
    } else {
        rg_guard_creating = true;
        r = real_(out);
        rg_guard_creating = false;
        if (r != CUBLAS_STATUS_SUCCESS && r != CUBLAS_STATUS_INVALID_VALUE) {
            rg_guard_note(CREATE_FAILED, RG_BLAS_cublasCreate_v2, current, rg_guard_device());
            rg_guard_explain(r, rg_guard_device(), NULL);
        }
    }
    /* Where none was current, cuBLAS has made one so. */
    if (r == CUBLAS_STATUS_SUCCESS && (current = rg_guard_context())) {
        remember(*out, current, rg_guard_device());
        rg_guard_count_handles(1);
        atomic_store_explicit(&rg.slot->guard_major, (uint32_t)atomic_load(&rg_blas_major), memory_order_relaxed);
    }
    return r;
}

cublasStatus_t cublasDestroy_v2(cublasHandle_t h)
{
    RG_BLAS_CALLED(cublasDestroy_v2, (h));
    known_handle *e = rg_guard_follows() ? find(h) : NULL;
    if (e) {
        rg_blas_count(RG_OP_cublasDestroy_v2);
        /* Before it is destroyed: another thread may get a handle at the same address the moment after. */
        CUcontext own = (CUcontext)atomic_load(&e->context);
        forget(e);
        rg_guard_count_handles(-1);
        if (rg_guard_repairing() && !rg_guard_context() && RG_REAL(cuCtxSetCurrent))
            RG_REAL(cuCtxSetCurrent)(own);
    }
    return real_(h);
}

void rg_guard_forget_context(CUcontext context, CUdevice d)
{
    for (int i = 0; context && i < GREENS; i++) {
        uintptr_t its = (uintptr_t)context;
        atomic_compare_exchange_strong(&greens[i], &its, 0); /* another context may have the handle next */
    }
    for (int i = 0; i < RG_GUARD_HANDLES; i++) {
        known_handle *e = &handles[i];
        if (atomic_load(&e->key) > GONE &&
            (context ? atomic_load(&e->context) == (uintptr_t)context : atomic_load(&e->device) == d)) {
            forget(e);
            rg_guard_count_handles(-1);
        }
    }
    rg_pool_forget(context, d);
}
