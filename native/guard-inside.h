/*
 * guard-inside.h: what the parts of the cuBLAS guard share: guard.c has its rules.
 *
 *   guard.c         the guarded calls: whose handle it is, and what is done about it
 *   guard-real.c    the real cuBLAS: its functions, and settings by number
 *   guard-pool.c    handles of the guard's own, and how one takes another's place
 *   guard-create.c  contexts for threads without one; handles made one at a time, and what is done where that fails
 *   guard-report.c  counts, the last events, and what is said
 */
#ifndef RIGEL_GUARD_INSIDE_H
#define RIGEL_GUARD_INSIDE_H

#include "guard.h"

/* ---- guard-real.c ---- */

/* rg_blas_major: major version of the cuBLAS that was found. */
extern _Atomic int rg_blas_major;

/* The real function behind a name, typed as ours. NULL where there is none. */
#define REAL(symbol) ((__typeof__(&symbol))rg_library_function(&rg_cublas, RG_BLAS_##symbol))

/* First in a function of a cuBLAS name: `real_` is what its caller is linked with. Returns where there is none, or where that is another
 * copy than the guard's. */
#define RG_BLAS_CALLED(symbol, args) \
    bool further_; \
    __typeof__(&symbol) real_ = \
        (__typeof__(&symbol))rg_library_called(&rg_cublas, RG_BLAS_##symbol, __builtin_return_address(0), &further_); \
    if (RG_UNLIKELY(!real_)) \
        return rg_blas_missing(); \
    if (RG_UNLIKELY(further_)) \
        return real_ args

/* rg_blas_missing: what a call answers whose function this cuBLAS lacks, or that is made where there is none: never in a program
 * that found the function in its cuBLAS. */
cublasStatus_t rg_blas_missing(void);

/* ---- What a handle carries ---- */

enum rg_setting {
#define RG_BLAS_CALL(...)
#define RG_BLAS_SET(symbol, setting, ...) SETTING_##setting,
#define RG_BLAS_GET(...)
#define RG_BLAS_SPECIAL(...)
#include "cublas.def"
#undef RG_BLAS_SET
#undef RG_BLAS_GET
    SETTINGS
};
#undef RG_BLAS_CALL
#undef RG_BLAS_SPECIAL

/* rg_blas_set, rg_blas_get: one setting of a handle, by the real functions. */
cublasStatus_t rg_blas_set(enum rg_setting setting, cublasHandle_t h, uintptr_t value);
cublasStatus_t rg_blas_get(enum rg_setting setting, cublasHandle_t h, uintptr_t *value);

/* What the program has set on a handle. Words of their own: another thread may read them while one is set. */
typedef struct {
    _Atomic(uintptr_t) stream, workspace, workspace_bytes; /* workspace 0: cuBLAS's own */
    _Atomic uint32_t set;                                  /* bit per setting */
    _Atomic(uintptr_t) value[SETTINGS];
} rg_carried;

static inline void rg_carried_clear(rg_carried *c)
{
    atomic_store_explicit(&c->stream, 0, memory_order_relaxed);
    atomic_store_explicit(&c->workspace, 0, memory_order_relaxed);
    atomic_store_explicit(&c->set, 0, memory_order_relaxed);
}

/* ---- State of the guard and of a thread (guard.c) ---- */

enum { GUARD_OFF = 1, GUARD_WARN, GUARD_REPAIR }; /* as in the segment */
extern _Atomic int rg_guard_mode;
#define INITIAL_EXEC __attribute__((tls_model("initial-exec")))
extern _Thread_local uint64_t rg_guard_calls INITIAL_EXEC; /* guarded calls of this thread */
extern _Thread_local bool rg_guard_creating INITIAL_EXEC; /* inside cublasCreate of the real cuBLAS, which may call others */
extern _Thread_local int rg_guard_selected_device INITIAL_EXEC; /* by this thread; -1 */
extern _Atomic int rg_guard_last_device; /* that any thread selected; -1 */

/* Calls are guarded. */
static inline bool rg_guard_active(void)
{
    return RG_LIKELY(atomic_load_explicit(&rg.mode, memory_order_relaxed) != RG_MODE_BARE) &&
           atomic_load_explicit(&rg_guard_mode, memory_order_relaxed) != GUARD_OFF;
}

/* What handles there are and what is set on them is followed, also while the process's work goes past Rigel: it holds later. */
static inline bool rg_guard_follows(void)
{
    return rg_is_client() && atomic_load_explicit(&rg_guard_mode, memory_order_relaxed) != GUARD_OFF;
}

/* One more call of this name, for the client that this thread works for. */
static inline void rg_blas_count(uint32_t operation)
{
    if (RG_UNLIKELY(!rg_this.calls))
        rg_thread_enter();
    rg_call_count(operation);
}

/* Repairs are made by this mode, and outside captures. */
static inline bool rg_guard_repairing(void)
{
    return atomic_load_explicit(&rg_guard_mode, memory_order_relaxed) == GUARD_REPAIR && !atomic_load(&rg.captures);
}

/* The calling thread. */
static inline uintptr_t rg_guard_self(void)
{
    return (uintptr_t)&rg_thread_mark;
}

static inline CUcontext rg_guard_context(void)
{
    CUcontext c = NULL;
    return rg_real.cuCtxGetCurrent && rg_real.cuCtxGetCurrent(&c) == CUDA_SUCCESS ? c : NULL;
}

/* The device of the current context; -1 without one. */
static inline int rg_guard_device(void)
{
    CUdevice d;
    return rg_real.cuCtxGetDevice && rg_real.cuCtxGetDevice(&d) == CUDA_SUCCESS ? d : -1;
}

/* ---- guard-pool.c ---- */

typedef struct {
    _Alignas(64) _Atomic(uintptr_t) owner; /* thread that uses it or makes it; 0: idle */
    _Atomic(uintptr_t) context;            /* 0: this place is free */
    _Atomic(uintptr_t) last;               /* thread that used it last */
    _Atomic int device;
    /* The owner's: */
    cublasHandle_t handle;
    uint32_t changed;           /* settings that differ from those of a new handle */
    uint32_t asked;             /* settings whose first value is known */
    uintptr_t first[SETTINGS];
} rg_pooled;

enum { RG_GUARD_BUSY_MS = 1000 }; /* a call on the host takes microseconds, or as long as the gate holds it back */

/* A moment's sleep, between two looks at something that another thread is about to do. */
void rg_guard_nap(void);

/* rg_pool_take: a handle of the pool for the current context, this thread's until rg_pool_give_back. NULL: none can be made and all
 * are in use. */
rg_pooled *rg_pool_take(CUcontext context, enum rg_blas call);
void rg_pool_give_back(rg_pooled *p);

/* rg_pool_mirror: gives the handle this stream, and what else the program's carries; `exclusive`: no other thread can be using that
 * meanwhile. */
void rg_pool_mirror(rg_pooled *p, rg_carried *c, CUstream stream, bool exclusive, enum rg_blas call, CUcontext context);

/* rg_pool_make_room: destroys the idle handles of the context, which is current. Returns how many. */
size_t rg_pool_make_room(CUcontext context);

/* rg_pool_forget: the context (or, if NULL, every context of device `d`) goes, and its handles with it. */
void rg_pool_forget(CUcontext context, CUdevice d);

/* rg_belongs_to: whose device memory is: the context's (1), another's (0), not known (-1). */
int rg_belongs_to(uintptr_t memory, CUcontext context, int device);

/* ---- guard-create.c ---- */

/* rg_guard_choose_device: the device to bind on a thread without a context, -1: none is; rg_guard_bind_device: makes its primary context
 * current, NULL if that cannot be. */
int rg_guard_choose_device(void);
CUcontext rg_guard_bind_device(int device);

/* For how long best-effort clients are waited for to give back what their memory pools keep. */
extern _Atomic uint32_t rg_guard_answer_ms;

/* rg_guard_create: makes a handle in the current context, one thread at a time, as `call` needs it. */
cublasStatus_t rg_guard_create(cublasHandle_t *out, enum rg_blas call, CUcontext current);

/* ---- guard-report.c ---- */

enum rg_guard_cause {
    NULL_HANDLE = 1,
    WRONG_CONTEXT,
    NO_CONTEXT,
    IN_USE_ELSEWHERE,
    FOREIGN_STREAM,
    CREATE_FAILED,
    CREATE_RETRIED,
};

/* rg_guard_note: counts, and enters the event in the ring of the segment. */
void rg_guard_note(enum rg_guard_cause cause, enum rg_blas call, CUcontext context, int device);

/* rg_guard_repaired: counts a call that ran in another way than the program asked. */
void rg_guard_repaired(void);

/* rg_guard_count_handles: so many handles more are alive, or fewer. */
void rg_guard_count_handles(int by);

/* What was tried for a handle that could not be made at once. */
typedef struct {
    bool capped;           /* the client's own limit of memory stood in the way */
    size_t handles;        /* of the pool, given up */
    uint64_t own_bytes;    /* given back by this process's memory pools, */
    uint64_t others_bytes; /* and by those of best-effort clients, */
    uint32_t others;       /* of which so many had something to give */
} rg_relief;

/* rg_guard_explain: one line, at most every ten seconds, that tells why there is no handle, what was tried (NULL: nothing), and what
 * helps. */
void rg_guard_explain(cublasStatus_t status, int device, const rg_relief *relief);

#endif
