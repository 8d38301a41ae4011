/*
 * guard.c: keeps programs running that use cuBLAS handles where they do not belong, and says so.
 *
 * A cuBLAS handle belongs to the context that was current when it was made, takes some 64 MiB of its memory, and is not safe
 * for two threads at once. Schedulers and pipelines break these rules by accident, and what they see is NOT_INITIALIZED,
 * EXECUTION_FAILED or wrong results. For every call in cublas.def the guard checks, in the caller's thread:
 *
 *   no_context        the thread has no current context: binds one (see choose_device)
 *   null_handle       runs the call on a handle of the pool
 *   wrong_context     the handle belongs to another context than the current one. If the operands are the handle's context's, that
 *                     context is made current for the call; else the call runs on a handle of the pool
 *   in_use_elsewhere  another thread is inside a call on this handle: runs on a handle of the pool
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
 *      store, and is never replaced.
 *   2. While a stream is captured nothing is repaired (making a handle would end the capture), and the driver is asked for
 *      nothing but the current context.
 *   3. In a process that is no client (any more: exit, fork) every call passes straight through, so no lock outlives a fork.
 *   4. Handles of the pool are never destroyed at exit. They are when a handle cannot be made for want of memory.
 *   5. Every wait ends by itself.
 */
#include "guard.h"
#include "record-client.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* ---- The real cuBLAS ---- */

#define RG_BLAS_CALL(symbol, ...) #symbol,
#define RG_BLAS_SET(symbol, ...) #symbol,
#define RG_BLAS_GET(symbol, ...) #symbol,
#define RG_BLAS_SPECIAL(symbol, ...) #symbol,
static const char *const names[RG_BLAS_COUNT] = {
#include "cublas.def"
};
#undef RG_BLAS_CALL
#undef RG_BLAS_SET
#undef RG_BLAS_GET
#undef RG_BLAS_SPECIAL
#define RG_BLAS_CALL(symbol, ...) (void *)symbol,
#define RG_BLAS_SET(symbol, ...) (void *)symbol,
#define RG_BLAS_GET(symbol, ...) (void *)symbol,
#define RG_BLAS_SPECIAL(symbol, ...) (void *)symbol,
static void *const ours[RG_BLAS_COUNT] = {
#include "cublas.def"
};
#undef RG_BLAS_CALL
#undef RG_BLAS_SET
#undef RG_BLAS_GET
#undef RG_BLAS_SPECIAL

static _Atomic(void *) real[RG_BLAS_COUNT]; /* NULL where this cuBLAS has no such function */
static _Atomic bool found;
static _Atomic int major_version;

/* The cuBLAS that the program has loaded, or NULL. Never loads one. */
static void *loaded_library(void)
{
    static const char *const sonames[] = {"libcublas.so.13", "libcublas.so.12", "libcublas.so.11"};
    void *handle = NULL, *create = rg_look_up(RTLD_NEXT, "cublasCreate_v2");
    Dl_info info;
    if (create && dladdr(create, &info) && info.dli_fname)
        handle = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    for (size_t i = 0; !handle && i < sizeof sonames / sizeof *sonames; i++)
        handle = dlopen(sonames[i], RTLD_NOW | RTLD_NOLOAD);
    return handle;
}

/* Finds the real functions, in `library` or in whichever cuBLAS is loaded. It stays loaded from here on: our pointers lead into
 * it. Look-ups take the loader's lock, so none is made under one of ours; two threads may both do this and find the same. */
static bool fill(void *library)
{
    if (atomic_load_explicit(&found, memory_order_acquire))
        return true;
    void *handle = library ? library : loaded_library(), *functions[RG_BLAS_COUNT];
    if (!handle)
        return false;
    for (int i = 0; i < RG_BLAS_COUNT; i++) {
        /* Whoever is preloaded behind us has its turn, as the program's linking would have it. */
        void *next = rg_look_up(RTLD_NEXT, names[i]);
        functions[i] = next ? next : rg_look_up(handle, names[i]);
        if (functions[i] == ours[i])
            functions[i] = NULL;
    }
    cublasStatus_t (*property)(int, int *);
    int major = 0;
    *(void **)&property = rg_look_up(handle, "cublasGetProperty");
    if (property && property(CUBLAS_MAJOR_VERSION, &major) == CUBLAS_STATUS_SUCCESS)
        atomic_store_explicit(&major_version, major, memory_order_relaxed);
    dlerror(); /* what was not found is not the program's concern */
    if (!functions[RG_BLAS_cublasCreate_v2])
        return false; /* something else that has a name of cuBLAS's */
    for (int i = 0; i < RG_BLAS_COUNT; i++)
        atomic_store_explicit(&real[i], functions[i], memory_order_relaxed);
    atomic_store_explicit(&found, true, memory_order_release);
    return true;
}

static inline void *real_function(enum rg_blas call)
{
    void *p = atomic_load_explicit(&real[call], memory_order_relaxed);
    if (RG_UNLIKELY(!p) && fill(NULL))
        p = atomic_load_explicit(&real[call], memory_order_relaxed);
    return p;
}

/* What a call answers whose function this cuBLAS lacks, or that is made where there is none: never in a program that
 * found the function in its cuBLAS. */
static cublasStatus_t missing(void)
{
    return atomic_load(&found) ? CUBLAS_STATUS_NOT_SUPPORTED : CUBLAS_STATUS_NOT_INITIALIZED;
}

#define REAL(symbol) ((__typeof__(&symbol))real_function(RG_BLAS_##symbol))

bool rg_guard_look_up(void *handle, const char *name, bool interposing, void **answer)
{
    int call = -1;
    for (int i = 0; i < RG_BLAS_COUNT && call < 0; i++)
        if (strcmp(name, names[i]) == 0)
            call = i;
    if (call < 0 || handle == RTLD_NEXT)
        return false;
    void *p;
    if (handle == RTLD_DEFAULT) {
        p = rg_look_up(RTLD_NEXT, name);
        if (!p && fill(NULL))
            p = atomic_load(&real[call]);
    } else {
        p = rg_look_up(handle, name);
        if (p == ours[call]) /* the handle of the whole program, in which we come first */
            p = rg_look_up(RTLD_NEXT, name);
        Dl_info info;
        if (p && interposing && !atomic_load(&found) && dladdr(p, &info) && info.dli_fname)
            fill(dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD));
    }
    /* Of a second cuBLAS in the process its own functions are handed out. */
    *answer = p && interposing && fill(NULL) && p == atomic_load(&real[call]) ? ours[call] : p;
    /* dlerror is to tell of this look-up and of none that was made on the way. */
    if (p)
        dlerror();
    else
        rg_look_up(RTLD_NEXT, name);
    return true;
}

/* ---- Settings that a handle carries ---- */

enum setting {
#define RG_BLAS_CALL(...)
#define RG_BLAS_SET(symbol, setting, ...) SETTING_##setting,
#define RG_BLAS_GET(...)
#define RG_BLAS_SPECIAL(...)
#include "cublas.def"
#undef RG_BLAS_SET
#undef RG_BLAS_GET
    SETTINGS
};

static cublasStatus_t set_really(enum setting setting, cublasHandle_t h, uintptr_t value)
{
    switch (setting) {
#define RG_BLAS_SET(symbol, setting, type) \
    case SETTING_##setting: return REAL(symbol) ? REAL(symbol)(h, (type)value) : CUBLAS_STATUS_NOT_SUPPORTED;
#define RG_BLAS_GET(...)
#include "cublas.def"
#undef RG_BLAS_SET
#undef RG_BLAS_GET
    default: return CUBLAS_STATUS_INVALID_VALUE;
    }
}

static cublasStatus_t get_really(enum setting setting, cublasHandle_t h, uintptr_t *value)
{
    switch (setting) {
#define RG_BLAS_SET(...)
#define RG_BLAS_GET(symbol, setting, type, first) \
    case SETTING_##setting: { \
        type v = (type)0; \
        cublasStatus_t r = REAL(symbol) ? REAL(symbol)(h, &v) : CUBLAS_STATUS_NOT_SUPPORTED; \
        *value = (uintptr_t)v; \
        return r; \
    }
#include "cublas.def"
#undef RG_BLAS_SET
#undef RG_BLAS_GET
    default: return CUBLAS_STATUS_INVALID_VALUE;
    }
}
#undef RG_BLAS_CALL
#undef RG_BLAS_SPECIAL

/* What the program has set on a handle. Words of their own: another thread may read them while one is set. */
typedef struct {
    _Atomic(uintptr_t) stream, workspace, workspace_bytes; /* workspace 0: cuBLAS's own */
    _Atomic uint32_t set;                                  /* bit per setting */
    _Atomic(uintptr_t) value[SETTINGS];
} carried;

static void clear(carried *c)
{
    atomic_store_explicit(&c->stream, 0, memory_order_relaxed);
    atomic_store_explicit(&c->workspace, 0, memory_order_relaxed);
    atomic_store_explicit(&c->set, 0, memory_order_relaxed);
}

/* ---- The program's handles ---- */

typedef struct {
    _Alignas(64) _Atomic(uintptr_t) key; /* the handle; 0 never used, GONE destroyed */
    _Atomic(uintptr_t) context;          /* that was current when it was made */
    _Atomic(uintptr_t) owner;            /* the thread that is inside a call on it: address of its rg_thread_mark */
    _Atomic int device;
    carried carried;
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
        clear(&place->carried);
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

/* ---- State of the guard, of a thread, and what it reports ---- */

enum { OFF = 1, WARN, REPAIR }; /* as in the segment */
static _Atomic int guard_mode = OFF;
#define INITIAL_EXEC __attribute__((tls_model("initial-exec")))
static _Thread_local INITIAL_EXEC uint64_t calls; /* guarded calls of this thread */
static _Thread_local INITIAL_EXEC bool creating;  /* inside cublasCreate of the real cuBLAS, which may call others */
static _Thread_local INITIAL_EXEC int selected_device = -1;
static _Thread_local INITIAL_EXEC carried of_null; /* what this thread has set on a NULL handle */
static _Atomic int last_device = -1;               /* that any thread selected */
static _Atomic(const char *) failed_call;
static _Atomic CUresult failed_code;

static inline bool active(void)
{
    return RG_LIKELY(atomic_load_explicit(&rg.mode, memory_order_relaxed) != RG_MODE_BARE) &&
           atomic_load_explicit(&guard_mode, memory_order_relaxed) != OFF;
}

/* Repairs are made by this mode, and outside captures. */
static bool repairing(void)
{
    return atomic_load_explicit(&guard_mode, memory_order_relaxed) == REPAIR && !atomic_load(&rg.captures);
}

static inline uintptr_t self(void)
{
    return (uintptr_t)&rg_thread_mark;
}

void rg_guard_attach(void)
{
    const char *text = getenv("RIGEL_GUARD");
    int mode = REPAIR;
    if (text && strcmp(text, "off") == 0)
        mode = OFF;
    else if (text && strcmp(text, "warn") == 0)
        mode = WARN;
    else if (text && *text && strcmp(text, "repair") != 0)
        rg_say("rigel: RIGEL_GUARD is \"%s\", expected \"off\", \"warn\" or \"repair\"; using \"repair\"", text);
    atomic_store(&guard_mode, mode);
    atomic_store(&rg.slot->guard_mode, (uint32_t)mode);
    atomic_store(&rg.slot->guard_handles, 0); /* what a process before us left open went with it */
}

void rg_guard_driver_failed(const char *call, CUresult code)
{
    atomic_store_explicit(&failed_call, call, memory_order_relaxed);
    atomic_store_explicit(&failed_code, code, memory_order_relaxed);
}

static CUcontext current_context(void)
{
    CUcontext c = NULL;
    return rg_real.cuCtxGetCurrent && rg_real.cuCtxGetCurrent(&c) == CUDA_SUCCESS ? c : NULL;
}

/* The device of the current context; -1 without one. */
static int current_device(void)
{
    CUdevice d;
    return rg_real.cuCtxGetDevice && rg_real.cuCtxGetDevice(&d) == CUDA_SUCCESS ? d : -1;
}

void rg_guard_selected(CUcontext context)
{
    if (!context || atomic_load_explicit(&rg.mode, memory_order_relaxed) == RG_MODE_BARE || atomic_load(&rg.captures))
        return;
    selected_device = current_device();
    if (atomic_load_explicit(&last_device, memory_order_relaxed) != selected_device)
        atomic_store_explicit(&last_device, selected_device, memory_order_relaxed);
}

enum cause {
    NULL_HANDLE = 1,
    WRONG_CONTEXT,
    NO_CONTEXT,
    IN_USE_ELSEWHERE,
    FOREIGN_STREAM,
    CREATE_FAILED,
    CREATE_RETRIED,
};
static const char *const cause_text[] = {
    "",
    "was called with a NULL handle",
    "was called with a handle of another context than the current one",
    "was called on a thread without a current context",
    "was called with a handle that another thread was using at that moment",
    "was to run on a stream of another context",
    "could not make a handle",
    "could make a handle only at the second attempt",
};

/* Counts, and enters the event in the ring of the segment: what it was last of all, so that a torn entry is seen as such. */
static void note(enum cause cause, enum rg_blas call, CUcontext context, int device)
{
    rg_client *c = rg.slot;
    _Atomic uint64_t *counter[] = {NULL,
                                   &c->guard_null_handle,
                                   &c->guard_wrong_context,
                                   &c->guard_no_context,
                                   &c->guard_in_use_elsewhere,
                                   &c->guard_foreign_stream,
                                   &c->guard_create_failed,
                                   &c->guard_create_retried};
    atomic_fetch_add_explicit(counter[cause], 1, memory_order_relaxed);
    uint64_t event = atomic_fetch_add_explicit(&c->guard_events, 1, memory_order_relaxed), name[4] = {0};
    _Atomic uint64_t *word = &c->guard_ring[event % RG_GUARD_EVENTS * RG_GUARD_EVENT_WORDS];
    strncpy((char *)name, names[call], sizeof name - 1);
    atomic_store_explicit(&word[0], 0, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    atomic_store_explicit(&word[1], (uint64_t)(uint32_t)device << 32 | (uint32_t)gettid(), memory_order_relaxed);
    atomic_store_explicit(&word[2], (uintptr_t)context, memory_order_relaxed);
    atomic_store_explicit(&word[3], calls, memory_order_relaxed);
    for (int i = 0; i < 4; i++)
        atomic_store_explicit(&word[4 + i], name[i], memory_order_relaxed);
    atomic_store_explicit(&word[0], (event + 1) << 8 | cause, memory_order_release);
    static _Atomic bool said;
    if (atomic_load(&guard_mode) == WARN && !atomic_exchange(&said, true))
        rg_say("rigel: %s %s (thread %d, device %d); passed on as it is, as RIGEL_GUARD is \"warn\" (repair: \"repair\"); more of "
            "the kind are counted only",
            names[call], cause_text[cause], (int)gettid(), device);
}

static void repaired(void)
{
    atomic_fetch_add_explicit(&rg.slot->guard_repaired, 1, memory_order_relaxed);
}

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
static int choose_device(void)
{
    int count = 0, only = -1, actives = 0;
    bool zero = false, last_is_active = false;
    int last = atomic_load_explicit(&last_device, memory_order_relaxed);
    if (!rg_real.cuDeviceGetCount || rg_real.cuDeviceGetCount(&count) != CUDA_SUCCESS || count < 1)
        return -1;
    if (count == 1)
        return 0;
    if (atomic_load(&major_version) == 11)
        return -1;
    if (selected_device >= 0)
        return selected_device;
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
static CUcontext bind_device(int device)
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

static size_t make_room(CUcontext context);

static void count_handles(int by)
{
    atomic_fetch_add_explicit(&rg.slot->guard_handles, (uint64_t)by, memory_order_relaxed);
}

/* One line, at most every ten seconds, that tells why there is no handle and what helps. */
static void explain(cublasStatus_t status, int device)
{
    static _Atomic uint64_t last_ns;
    uint64_t now = rg_now_ns(), last = atomic_load(&last_ns);
    if ((last && now - last < 10000000000u) || !atomic_compare_exchange_strong(&last_ns, &last, now))
        return;
    char memory[96] = "free memory unknown", others[256] = "", driver[96] = "none seen";
    size_t free_bytes = 0, total = 0;
    if (rg_real.cuMemGetInfo_v2 && rg_real.cuMemGetInfo_v2(&free_bytes, &total) == CUDA_SUCCESS)
        snprintf(memory, sizeof memory, "%zu of %zu MiB free", free_bytes >> 20, total >> 20);
    size_t at = 0;
    for (int i = 0; i < RG_MAX_CLIENTS && at < sizeof others - RG_NAME_BYTES - 24; i++) {
        rg_client *c = &rg.segment->clients[i];
        uint64_t n = atomic_load(&c->guard_handles);
        if (atomic_load(&c->state) == RG_LIVE && n && c != rg.slot)
            at += (size_t)snprintf(others + at, sizeof others - at, ", %.*s %llu", RG_NAME_BYTES - 1, c->name,
                                   (unsigned long long)n);
    }
    const char *call = atomic_load(&failed_call);
    if (call)
        snprintf(driver, sizeof driver, "%s returned %d", call, atomic_load(&failed_code));
    rg_say("rigel: cublasCreate failed with status %d%s on device %d: %s; handles alive, about 64 MiB each: this process %llu%s; "
        "last failing driver call: %s; free memory there, or make one handle per thread and device and keep it",
        status,
        status == CUBLAS_STATUS_ALLOC_FAILED      ? " (out of memory)"
        : status == CUBLAS_STATUS_NOT_INITIALIZED ? " (CUDA could not be initialised)"
                                                  : "",
        device, memory, (unsigned long long)atomic_load(&rg.slot->guard_handles), others, driver);
}

/*
 * Makes a handle in the current context, one thread at a time, twice if need be. Idle handles of the pool are given up for
 * the second attempt; this is the place to pause best-effort clients, should they hold memory that they would give back.
 */
static cublasStatus_t create(cublasHandle_t *out, enum rg_blas call, CUcontext current)
{
    bool locked = lock_creation();
    creating = true;
    cublasStatus_t r = REAL(cublasCreate_v2)(out);
    if (r != CUBLAS_STATUS_SUCCESS && r != CUBLAS_STATUS_INVALID_VALUE) {
        make_room(current);
        cublasStatus_t again = REAL(cublasCreate_v2)(out);
        note(again == CUBLAS_STATUS_SUCCESS ? CREATE_RETRIED : CREATE_FAILED, call, current, current_device());
        if (again == CUBLAS_STATUS_SUCCESS)
            repaired();
        else
            explain(again, current_device());
        r = again;
    }
    creating = false;
    if (locked)
        pthread_mutex_unlock(&create_lock);
    return r;
}

/* ---- The pool ---- */

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
} pooled;
static pooled pool[RG_POOL];

/* Takes an idle handle of the context: this thread's last one if it can be. */
static pooled *take_idle(CUcontext context)
{
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < RG_POOL; i++) {
            pooled *p = &pool[i];
            uintptr_t nobody = 0;
            if (atomic_load_explicit(&p->context, memory_order_relaxed) != (uintptr_t)context ||
                (pass == 0 && atomic_load_explicit(&p->last, memory_order_relaxed) != self()) ||
                !atomic_compare_exchange_strong(&p->owner, &nobody, self()))
                continue;
            if (atomic_load(&p->context) == (uintptr_t)context)
                return p;
            atomic_store(&p->owner, 0);
        }
    return NULL;
}

static void give_back(pooled *p)
{
    atomic_store_explicit(&p->last, self(), memory_order_relaxed);
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
static pooled *add(CUcontext context, enum rg_blas call)
{
    pooled *place = NULL;
    cublasHandle_t h = NULL;
    for (int i = 0; i < RG_POOL && !place; i++) {
        uintptr_t nobody = 0;
        if (atomic_load(&pool[i].context) || !atomic_compare_exchange_strong(&pool[i].owner, &nobody, self()))
            continue;
        if (atomic_load(&pool[i].context))
            atomic_store(&pool[i].owner, 0);
        else
            place = &pool[i];
    }
    if (!place)
        return NULL;
    /* Entered before it is counted and made: of several threads here at once, none goes beyond the share. */
    atomic_store(&place->device, current_device());
    atomic_store(&place->context, (uintptr_t)context);
    if (count_pool(context) > RG_POOL_PER_CONTEXT || create(&h, call, context) != CUBLAS_STATUS_SUCCESS) {
        atomic_store(&place->context, 0);
        atomic_store(&place->owner, 0);
        return NULL;
    }
    place->handle = h;
    place->changed = place->asked = 0;
    count_handles(1);
    return place;
}

/* Destroys the idle handles of the context, which is current. Returns how many. */
static size_t make_room(CUcontext context)
{
    size_t freed = 0;
    for (int i = 0; context && i < RG_POOL; i++) {
        pooled *p = &pool[i];
        uintptr_t nobody = 0;
        if (atomic_load(&p->context) != (uintptr_t)context || !atomic_compare_exchange_strong(&p->owner, &nobody, self()))
            continue;
        if (atomic_load(&p->context) == (uintptr_t)context) {
            REAL(cublasDestroy_v2)(p->handle);
            atomic_store(&p->context, 0);
            count_handles(-1);
            freed++;
        }
        atomic_store(&p->owner, 0);
    }
    return freed;
}

enum { BUSY_WAIT_MS = 1000 }; /* a call on the host takes microseconds, or as long as the gate holds it back */

static void nap(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
}

/* A handle of the pool for the current context, this thread's until give_back. NULL: none can be made and all are in use. */
static pooled *take(CUcontext context, enum rg_blas call)
{
    uint64_t until = rg_now_ns() + BUSY_WAIT_MS * 1000000ull;
    for (bool tried = false;; nap()) {
        pooled *p = take_idle(context);
        if (!p && !tried)
            p = add(context, call);
        if (p || rg_now_ns() >= until || !count_pool(context))
            return p;
        tried = true;
    }
}

/* Whose device memory is: the context's (1), another's (0). Memory of virtual allocations and of pools has no context: there the
 * device decides; -1 where nothing is known. */
static int belongs_to(uintptr_t memory, CUcontext context, int device)
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
 * Gives the handle what the program's carries: stream, then workspace, then the rest. A workspace only if no other thread can
 * be using it, even on the same stream: the kernels of two multiplications that take turns there would overwrite each
 * other's parts. Without one the handle has cuBLAS's own.
 */
static void mirror(pooled *p, carried *c, bool exclusive, enum rg_blas call, CUcontext context)
{
    CUstream stream = (CUstream)atomic_load_explicit(&c->stream, memory_order_relaxed);
    CUcontext owner = context;
    if ((uintptr_t)stream > (uintptr_t)CU_STREAM_PER_THREAD && rg_real.cuStreamGetCtx &&
        (rg_real.cuStreamGetCtx(stream, &owner) != CUDA_SUCCESS || owner != context)) {
        note(FOREIGN_STREAM, call, context, atomic_load(&p->device));
        stream = NULL;
    }
    int device = atomic_load(&p->device);
    REAL(cublasSetStream_v2)(p->handle, stream);
    uintptr_t workspace = atomic_load_explicit(&c->workspace, memory_order_relaxed);
    if (exclusive && belongs_to(workspace, context, device) == 1 && REAL(cublasSetWorkspace_v2))
        REAL(cublasSetWorkspace_v2)
        (p->handle, (void *)workspace, atomic_load_explicit(&c->workspace_bytes, memory_order_relaxed));
    uint32_t set = atomic_load_explicit(&c->set, memory_order_acquire);
    if (belongs_to(atomic_load_explicit(&c->value[SETTING_EMULATION_BIT_COUNT_POINTER], memory_order_relaxed), context, device) != 1)
        set &= ~(1u << SETTING_EMULATION_BIT_COUNT_POINTER);
    for (uint32_t i = 0; (set | p->changed) >> i; i++) {
        uint32_t bit = 1u << i;
        if (set & bit) {
            if (!(p->asked & bit) && get_really(i, p->handle, &p->first[i]) == CUBLAS_STATUS_SUCCESS)
                p->asked |= bit;
            if (set_really(i, p->handle, atomic_load_explicit(&c->value[i], memory_order_relaxed)) == CUBLAS_STATUS_SUCCESS)
                p->changed |= bit;
        } else if (p->changed & p->asked & bit && set_really(i, p->handle, p->first[i]) == CUBLAS_STATUS_SUCCESS) {
            p->changed &= ~bit;
        }
    }
}

/* ---- A guarded call ---- */

typedef struct {
    known_handle *held; /* the program's handle, this thread's for the call */
    pooled *lent;       /* or one of the pool */
    bool pushed;        /* the handle's context was made current */
} guarded;

static inline bool claim(known_handle *e)
{
    uintptr_t nobody = 0;
    return atomic_compare_exchange_strong_explicit(&e->owner, &nobody, self(), memory_order_acquire, memory_order_relaxed);
}

static inline void release(known_handle *e)
{
    atomic_store_explicit(&e->owner, 0, memory_order_release);
}

/* Puts a handle of the pool in the place of `h`; `h` itself if there is none. The program's handle is held meanwhile if it is
 * free, so that nobody else uses what it carries. */
static cublasHandle_t replace(cublasHandle_t h, known_handle *e, enum rg_blas call, CUcontext current, guarded *g)
{
    pooled *p = take(current, call);
    if (!p)
        return h;
    if (e && claim(e))
        g->held = e;
    mirror(p, e ? &e->carried : &of_null, g->held != NULL, call, current);
    repaired();
    g->lent = p;
    return p->handle;
}

/* Everything but a known handle, used in its context by one thread. Returns the handle to use. */
static __attribute__((noinline, cold)) cublasHandle_t enter_slowly(cublasHandle_t h, known_handle *e, enum rg_blas call,
                                                                   const void *operand, CUcontext current, guarded *g)
{
    if (creating || (e && atomic_load(&e->owner) == self()))
        return h; /* cuBLAS calls itself */
    if (!current) {
        note(NO_CONTEXT, call, NULL, e ? atomic_load(&e->device) : selected_device);
        if (repairing()) {
            CUcontext own = e ? (CUcontext)atomic_load(&e->context) : NULL;
            if (own && RG_REAL(cuCtxSetCurrent) && RG_REAL(cuCtxSetCurrent)(own) == CUDA_SUCCESS)
                current = own;
            else
                current = bind_device(choose_device());
            if (current)
                repaired();
        }
        if (!current)
            return h;
    }
    if (!h) {
        note(NULL_HANDLE, call, current, current_device());
        return repairing() ? replace(h, NULL, call, current, g) : h;
    }
    if (!e)
        return h;
    CUcontext own = (CUcontext)atomic_load(&e->context);
    if (own != current) {
        note(WRONG_CONTEXT, call, current, current_device());
        if (!repairing())
            return h;
        if (belongs_to((uintptr_t)operand, current, current_device()) != 0 ||
            belongs_to((uintptr_t)operand, own, atomic_load(&e->device)) != 1 ||
            rg_real.cuCtxPushCurrent_v2(own) != CUDA_SUCCESS)
            return replace(h, e, call, current, g);
        g->pushed = true;
        current = own;
        if (claim(e)) {
            repaired();
            g->held = e;
            return h;
        }
    } else if (claim(e)) {
        g->held = e;
        return h;
    }
    note(IN_USE_ELSEWHERE, call, current, atomic_load(&e->device));
    return repairing() ? replace(h, e, call, current, g) : h;
}

static inline cublasHandle_t enter(cublasHandle_t h, enum rg_blas call, const void *operand, guarded *g)
{
    *g = (guarded){NULL, NULL, false};
    calls++;
    CUcontext current = NULL;
    known_handle *e = find(h);
    rg_real.cuCtxGetCurrent(&current);
    if (RG_LIKELY(e && current && (uintptr_t)current == atomic_load_explicit(&e->context, memory_order_relaxed) && claim(e))) {
        g->held = e;
        return h;
    }
    return enter_slowly(h, e, call, operand, current, g);
}

static __attribute__((noinline, cold)) void leave_slowly(guarded *g)
{
    CUcontext ignored;
    if (g->lent)
        give_back(g->lent);
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
    if (!e || atomic_load(&e->owner) == self())
        return NULL;
    for (uint64_t until = 0; !claim(e); nap()) {
        if (!repairing() || (until && rg_now_ns() >= until))
            return NULL;
        if (!until)
            until = rg_now_ns() + BUSY_WAIT_MS * 1000000ull;
    }
    return e;
}

/* ---- The functions ---- */

#define RG_BLAS_CALL(symbol, params, args, operand, ...) \
    cublasStatus_t symbol params \
    { \
        __typeof__(&symbol) real_ = REAL(symbol); \
        if (RG_UNLIKELY(!real_)) \
            return missing(); \
        if (RG_UNLIKELY(!active())) \
            return real_ args; \
        guarded guarded_; \
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
        return REAL(symbol) ? set(h, RG_BLAS_##symbol, SETTING_##setting, (uintptr_t)value) : missing(); \
    }
#define RG_BLAS_UNKNOWN (-1)
#define RG_BLAS_GET(symbol, setting, type, initial) \
    cublasStatus_t symbol(cublasHandle_t h, type *value) \
    { \
        if (!REAL(symbol)) \
            return missing(); \
        uintptr_t found_ = 0; \
        if (h || !value || !get_of_null(RG_BLAS_##symbol, SETTING_##setting, initial, &found_)) \
            return REAL(symbol)(h, value); \
        *value = (type)found_; \
        return CUBLAS_STATUS_SUCCESS; \
    }
#define RG_BLAS_SPECIAL(...)

/* Whether a NULL handle is being made good for: what is set on it goes to this thread's handle of the pool. */
static bool stands_in(cublasHandle_t h, enum rg_blas call)
{
    if (h || !active() || creating)
        return false;
    calls++;
    note(NULL_HANDLE, call, current_context(), current_device());
    if (!repairing())
        return false;
    repaired();
    return true;
}

static void carry(carried *c, enum setting setting, uintptr_t value)
{
    atomic_store_explicit(&c->value[setting], value, memory_order_relaxed);
    atomic_fetch_or_explicit(&c->set, 1u << setting, memory_order_release);
}

static cublasStatus_t set(cublasHandle_t h, enum rg_blas call, enum setting setting, uintptr_t value)
{
    if (stands_in(h, call)) {
        carry(&of_null, setting, value);
        return CUBLAS_STATUS_SUCCESS;
    }
    known_handle *held = active() ? hold(h) : NULL;
    cublasStatus_t r = set_really(setting, h, value);
    known_handle *e = held ? held : active() ? find(h) : NULL;
    if (e && r == CUBLAS_STATUS_SUCCESS)
        carry(&e->carried, setting, value);
    if (held)
        release(held);
    return r;
}

static bool get_of_null(enum rg_blas call, enum setting setting, intptr_t initial, uintptr_t *value)
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
    if (!REAL(cublasSetStream_v2))
        return missing();
    if (stands_in(h, RG_BLAS_cublasSetStream_v2)) {
        atomic_store_explicit(&of_null.stream, (uintptr_t)stream, memory_order_relaxed);
        return CUBLAS_STATUS_SUCCESS;
    }
    known_handle *held = active() ? hold(h) : NULL;
    cublasStatus_t r = REAL(cublasSetStream_v2)(h, stream);
    known_handle *e = held ? held : active() ? find(h) : NULL;
    if (e && r == CUBLAS_STATUS_SUCCESS) {
        atomic_store_explicit(&e->carried.workspace, 0, memory_order_relaxed);
        atomic_store_explicit(&e->carried.stream, (uintptr_t)stream, memory_order_relaxed);
    }
    if (held)
        release(held);
    return r;
}

cublasStatus_t cublasGetStream_v2(cublasHandle_t h, CUstream *stream)
{
    if (!REAL(cublasGetStream_v2))
        return missing();
    if (h || !stream || !stands_in(h, RG_BLAS_cublasGetStream_v2))
        return REAL(cublasGetStream_v2)(h, stream);
    *stream = (CUstream)atomic_load_explicit(&of_null.stream, memory_order_relaxed);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t h, void *workspace, size_t bytes)
{
    if (!REAL(cublasSetWorkspace_v2))
        return missing();
    if (stands_in(h, RG_BLAS_cublasSetWorkspace_v2))
        return CUBLAS_STATUS_SUCCESS; /* whose memory it is cannot be known; cuBLAS's own does as well */
    known_handle *held = active() ? hold(h) : NULL;
    cublasStatus_t r = REAL(cublasSetWorkspace_v2)(h, workspace, bytes);
    known_handle *e = held ? held : active() ? find(h) : NULL;
    if (e && r == CUBLAS_STATUS_SUCCESS) {
        atomic_store_explicit(&e->carried.workspace_bytes, bytes, memory_order_relaxed);
        atomic_store_explicit(&e->carried.workspace, (uintptr_t)workspace, memory_order_relaxed);
    }
    if (held)
        release(held);
    return r;
}

cublasStatus_t cublasCreate_v2(cublasHandle_t *out)
{
    static _Atomic bool joined;
    if (!REAL(cublasCreate_v2))
        return missing();
    /* It may be the program's first use of CUDA, and so by several threads at once: cuBLAS would initialise the driver too. */
    if (!creating && atomic_load(&rg.mode) == RG_MODE_BARE && rg_interposing() && !atomic_load(&joined)) {
        if (rg_real_ready() && RG_REAL(cuInit)(0) == CUDA_SUCCESS)
            rg_client_attach();
        atomic_store(&joined, true);
    }
    if (!active() || creating || !out || atomic_load(&rg.captures))
        return REAL(cublasCreate_v2)(out);
    calls++;
    CUcontext current = current_context();
    if (!current) {
        note(NO_CONTEXT, RG_BLAS_cublasCreate_v2, NULL, selected_device);
        if (repairing() && (current = bind_device(choose_device())))
            repaired();
    }
    cublasStatus_t r;
    if (repairing()) {
        r = create(out, RG_BLAS_cublasCreate_v2, current);
    } else {
        creating = true;
        r = REAL(cublasCreate_v2)(out);
        creating = false;
        if (r != CUBLAS_STATUS_SUCCESS && r != CUBLAS_STATUS_INVALID_VALUE) {
            note(CREATE_FAILED, RG_BLAS_cublasCreate_v2, current, current_device());
            explain(r, current_device());
        }
    }
    /* Where none was current, cuBLAS has made one so. */
    if (r == CUBLAS_STATUS_SUCCESS && (current = current_context())) {
        remember(*out, current, current_device());
        count_handles(1);
        atomic_store_explicit(&rg.slot->guard_major, (uint32_t)atomic_load(&major_version), memory_order_relaxed);
    }
    return r;
}

cublasStatus_t cublasDestroy_v2(cublasHandle_t h)
{
    if (!REAL(cublasDestroy_v2))
        return missing();
    known_handle *e = active() ? find(h) : NULL;
    if (e) {
        /* Before it is destroyed: another thread may get a handle at the same address the moment after. */
        CUcontext own = (CUcontext)atomic_load(&e->context);
        forget(e);
        count_handles(-1);
        if (repairing() && !current_context() && RG_REAL(cuCtxSetCurrent))
            RG_REAL(cuCtxSetCurrent)(own);
    }
    return REAL(cublasDestroy_v2)(h);
}

void rg_guard_forget_context(CUcontext context, CUdevice d)
{
    for (int i = 0; i < RG_GUARD_HANDLES; i++) {
        known_handle *e = &handles[i];
        if (atomic_load(&e->key) > GONE &&
            (context ? atomic_load(&e->context) == (uintptr_t)context : atomic_load(&e->device) == d)) {
            forget(e);
            count_handles(-1);
        }
    }
    for (int i = 0; i < RG_POOL; i++) {
        pooled *p = &pool[i];
        if (atomic_load(&p->context) &&
            (context ? atomic_load(&p->context) == (uintptr_t)context : atomic_load(&p->device) == d)) {
            atomic_store(&p->context, 0);
            count_handles(-1);
        }
    }
}
