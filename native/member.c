/*
 * member.c: the clients of this process: itself, and those that its threads have entered (rigel_client_enter).
 *
 * A client has a slot of its own in the segment from the first time that a thread enters it until the process ends; threads that
 * enter the same name are the same client. Whose a launch is, is asked in the launch path (rg_member_of):
 *   1. the client that the stream belongs to. A stream belongs to who named it (rigel_client_stream) or launched on it
 *      first from a thread that had entered; until then to who made it. So autograd's threads, which are shared and launch
 *      on the stream of the forward pass, count for the right one, and of a pool of streams that PyTorch makes at once in whichever
 *      thread comes first each goes to who uses it;
 *   2. else the client that the thread has entered;
 *   3. else the process's own; under RIGEL_THREADS=1 nobody: such a launch goes straight to the driver and is not counted.
 * A client that the last thread has left keeps its streams until somebody else launches on them.
 *
 * Python's interpreter lock: a thread that waits at the gate for a high client of its own process while it holds the lock may be
 * what the other waits for. To let go of the lock there would be no way out: code of the program that runs meanwhile may wait,
 * with the lock held, for a lock that this thread's callers hold, and then this thread never gets it back, which no bound on the
 * wait ends. So it does not wait at all. What launches holding it is rare: PyTorch's bindings, CuPy, JAX and Triton
 * let it go around their launches.
 *
 * A process whose clients are all high ones may send its work past Rigel for a while (rigel_bypass_begin). Its mode, the word that every
 * hook reads first, is bare then, as if it were no client; those of its clients stay. What has to be known afterwards asks rg_is_client
 * instead: what is allocated, made, set and destroyed, captures, the agent.
 *
 * Must never: make a CUDA call (but for priorities, through track.c), or lock, allocate or make a system call in rg_member_of.
 */
#include "guard.h"
#include "record-client.h"
#include "rigel.h"

#include <dlfcn.h>
#include <errno.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { NESTED = 16, STREAMS = 2048, PROBES = 32 };

static pthread_mutex_t members_lock = PTHREAD_MUTEX_INITIALIZER;
static bool attached, ended, alone;    /* under the lock; `ended`: not in this process any more */
static _Atomic bool any_high;          /* some client here has a mode with the high bit */

/* What a thread has entered, innermost last. */
static _Thread_local __attribute__((tls_model("initial-exec"))) struct {
    rg_member *entered[NESTED];
    uint32_t depth;
    struct {
        uint64_t begun_ns;
        uint32_t depth; /* of what was entered when it began */
    } open[NESTED + 1];  /* requests that have begun, one for each client around, innermost last */
    uint32_t requests;
    uint32_t device;     /* 1 + index of the one that the last request launched on; 0: none yet */
} mine;

static pthread_key_t exit_key;
static bool exit_key_made;

/* ---- streams ---- */

/*
 * Which stream is whose: its handle (0 free, GONE was used), and how it is known << 8 | 1 + index of the client; 0 while the entry is
 * being made or taken out: then it goes by its threads, as where there is no room.
 */
enum { GONE = 1 };
enum { MADE = 0 << 8, USED = 1 << 8, HOW = 0xff00 };
typedef struct {
    _Atomic uintptr_t stream;
    _Atomic uint32_t owner;
} claim;
static claim claims[STREAMS];

static uint32_t owner_word(uint32_t how, const rg_member *m)
{
    return how | (uint32_t)(m - rg.members + 1);
}

static bool claimable(CUstream stream)
{
    return (uintptr_t)stream > 2;
}

static uint32_t claim_place(CUstream stream)
{
    return (uint32_t)((uint64_t)(uintptr_t)stream * 0x9e3779b97f4a7c15u >> 53);
}

static claim *claim_find(CUstream stream)
{
    for (uint32_t i = claim_place(stream), n = 0; n < PROBES; i = (i + 1) % STREAMS, n++) {
        uintptr_t found = atomic_load_explicit(&claims[i].stream, memory_order_acquire);
        if (found == (uintptr_t)stream)
            return &claims[i];
        if (!found)
            return NULL;
    }
    return NULL;
}

static void claim_put(CUstream stream, uint32_t how, const rg_member *m)
{
    claim *c = claim_find(stream);
    for (uint32_t i = claim_place(stream), n = 0; !c && n < PROBES; i = (i + 1) % STREAMS, n++) {
        uintptr_t old = atomic_load_explicit(&claims[i].stream, memory_order_relaxed);
        if ((old <= GONE && atomic_compare_exchange_strong(&claims[i].stream, &old, (uintptr_t)stream)) ||
            old == (uintptr_t)stream)
            c = &claims[i];
    }
    if (c)
        atomic_store_explicit(&c->owner, owner_word(how, m), memory_order_relaxed);
}

static void claim_drop(claim *c)
{
    atomic_store(&c->owner, 0);
    atomic_store(&c->stream, GONE);
}

rg_member *rg_member_mine(void)
{
    return mine.depth ? mine.entered[mine.depth - 1] : NULL;
}

rg_member *rg_member_of(CUstream stream)
{
    rg_member *own = rg_member_mine();
    if (claimable(stream)) {
        claim *c = claim_find(stream);
        uint32_t owner = c ? atomic_load_explicit(&c->owner, memory_order_relaxed) : 0;
        if (owner && ((owner & HOW) == USED || !own))
            return &rg.members[(owner & ~(uint32_t)HOW) - 1];
        if (own)
            claim_put(stream, USED, own);
    }
    return own ? own : atomic_load_explicit(&RG_PROCESS->mode, memory_order_relaxed) ? RG_PROCESS : NULL;
}

uint32_t rg_thread_slot(void)
{
    const rg_member *own = rg_member_mine();
    return (uint32_t)(own && atomic_load(&own->mode) ? own->slot_index : rg.slot_index);
}

uint32_t rg_member_index(void)
{
    const rg_member *own = rg_member_mine();
    return own ? (uint32_t)(own - rg.members) : 0;
}

void rg_member_made(CUstream stream)
{
    rg_member *own = rg_member_mine();
    if (own && claimable(stream))
        claim_put(stream, MADE, own);
}

void rg_member_unmade(CUstream stream)
{
    if (!atomic_load_explicit(&rg.several, memory_order_relaxed))
        return;
    if (stream) {
        claim *c = claimable(stream) ? claim_find(stream) : NULL;
        if (c)
            claim_drop(c);
        return;
    }
    /* Handles of streams that went with their context come back as others. What is still there is found by its next launch. */
    for (uint32_t i = 0; i < STREAMS; i++)
        if (atomic_load(&claims[i].stream) > GONE)
            claim_drop(&claims[i]);
}

/* The last thread has left: the client's streams stay its own until another client launches on them. */
static void claims_loosen(const rg_member *m)
{
    for (uint32_t i = 0; i < STREAMS; i++) {
        uint32_t owner = owner_word(USED, m);
        if (atomic_load_explicit(&claims[i].owner, memory_order_relaxed) == owner)
            atomic_compare_exchange_strong(&claims[i].owner, &owner, owner_word(MADE, m));
    }
}

/* ---- Python ---- */

static struct {
    int (*initialized)(void), (*check)(void);
} python;

/* Under the lock. */
static void find_python(void)
{
    if (python.check)
        return;
    void *initialized = rg_look_up(RTLD_DEFAULT, "Py_IsInitialized"), *check = rg_look_up(RTLD_DEFAULT, "PyGILState_Check");
    if (!initialized || !check)
        return;
    *(void **)&python.initialized = initialized;
    __atomic_store_n((void **)&python.check, check, __ATOMIC_RELEASE);
}

bool rg_member_holds_python(void)
{
    if (RG_LIKELY(!atomic_load_explicit(&rg.several, memory_order_relaxed)) || !atomic_load(&any_high))
        return false;
    int (*check)(void) = NULL;
    *(void **)&check = __atomic_load_n((void **)&python.check, __ATOMIC_ACQUIRE);
    return check && python.initialized() && check();
}

/* ---- attaching ---- */

uint32_t rg_member_class(void)
{
    if (!atomic_load_explicit(&rg.several, memory_order_relaxed))
        return atomic_load(&rg.slot->class);
    return atomic_load(&any_high) ? RG_CLASS_HIGH : RG_CLASS_BEST_EFFORT;
}

static uint32_t mode_of(uint32_t class)
{
    uint32_t policy = atomic_load(&rg.segment->settings.policy);
    if (policy == RG_POLICY_FAIR)
        return RG_MODE_FAIR;
    if (class == RG_CLASS_BEST_EFFORT)
        return RG_MODE_BEST_EFFORT;
    return policy == RG_POLICY_ORION ? RG_MODE_SHOWN : RG_MODE_HIGH;
}

/* Gives a client its slot. Under the lock. False if all are taken. */
static bool give_slot(rg_member *m)
{
    /* Other processes' threads may have entered the name, too, and a process may have it. */
    char account[RG_ACCOUNT_NAME_BYTES];
    snprintf(account, sizeof account, "%.*s/%s", RG_NAME_BYTES - 1, rg.slot->name, m->name);
    uint32_t class = rg_account_class(rg.segment, account, m->class);
    int index = rg_segment_claim(rg.segment, m->name, class, rg_now_ns());
    if (index < 0)
        return false;
    m->slot_index = index;
    m->slot = &rg.segment->clients[index];
    atomic_store(&m->inverse_weight, atomic_load(&RG_PROCESS->inverse_weight));
    atomic_store(&m->slot->weight, atomic_load(&rg.slot->weight));
    atomic_store(&m->slot->parent, (uint32_t)rg.slot_index + 1);
    rg_account_leave(rg.segment, index);
    m->account = rg_account_enter(rg.segment, account);
    uint32_t mode = mode_of(class);
    bool first_high = (mode & RG_MODE_HIGH) && !atomic_exchange(&any_high, true);
    atomic_store_explicit(&m->mode, mode, memory_order_release);
    /* Bare: past Rigel for now, or it has left (rigel_shutdown), and stays so. */
    uint32_t all = atomic_load(&rg.mode);
    while (all != RG_MODE_BARE && !atomic_compare_exchange_weak(&rg.mode, &all, all | mode))
        continue;
    if (first_high && mode != RG_MODE_FAIR)
        rg_preempt_wake();
    return true;
}

void rg_members_attach(uint32_t mode, bool only_threads)
{
    pthread_mutex_lock(&members_lock);
    attached = true;
    alone = only_threads;
    rg_member *self = RG_PROCESS;
    self->slot = rg.slot;
    self->slot_index = rg.slot_index;
    self->account = rg.account;
    self->class = atomic_load(&rg.slot->class);
    snprintf(self->name, sizeof self->name, "%s", rg.slot->name);
    atomic_store(&self->mode, alone ? RG_MODE_BARE : mode);
    atomic_store(&any_high, !alone && (mode & RG_MODE_HIGH));
    if (alone)
        atomic_store(&rg.several, 1);
    uint32_t n = atomic_load(&rg.member_count);
    atomic_store(&rg.member_count, n ? n : 1);
    atomic_store(&rg.mode, alone ? RG_MODE_ATTACHED : mode);
    rg_changed();
    for (uint32_t i = 1; i < n; i++) {
        rg_member *m = &rg.members[i];
        m->slot = rg.slot; /* never used while its mode is bare; but never NULL */
        if (!give_slot(m))
            rg_say("rigel: all %d client slots are taken: threads of client %s run without Rigel (end other clients first)",
                RG_MAX_CLIENTS, m->name);
    }
    pthread_mutex_unlock(&members_lock);
}

uint64_t rg_account_turn(const rg_account *account)
{
    return atomic_load(&rg.segment->settings.policy) == RG_POLICY_SLO ? atomic_load(&account->turn_until_ns) : 0;
}

uint64_t rg_account_until(const rg_account *account)
{
    uint64_t paused = atomic_load(&account->paused_until_ns), turn = rg_account_turn(account);
    return paused > turn ? paused : turn;
}

uint64_t rg_slots_until(uint64_t (*until)(const rg_account *account))
{
    uint64_t slots = 0, now = rg_now_ns();
    for (int i = 0; i < RG_MAX_CLIENTS; i++) {
        const rg_account *account = &rg.segment->accounts[i];
        if (until(account) > now)
            slots |= atomic_load(&account->slots);
    }
    return slots;
}

bool rg_member_is_paused(const rg_member *m)
{
    /* The agent, which takes the mode back, may be waiting in the driver for the very work that is held back. Nor is it waited for where a turn is over. */
    uint32_t mode = atomic_load_explicit(&m->mode, memory_order_acquire);
    if (!m->account || atomic_load(&rg.segment->settings.shutdown))
        return false;
    uint64_t until = 0;
    if (mode & RG_MODE_PAUSED)
        until = rg_account_until(m->account);
    else if ((mode & RG_MODE_FAIR) == RG_MODE_BEST_EFFORT)
        until = rg_account_turn(m->account);
    return until && until > rg_now_ns();
}

bool rg_member_paused(void)
{
    if (!atomic_load_explicit(&rg.several, memory_order_relaxed))
        return rg_member_is_paused(RG_PROCESS);
    bool any = false;
    for (uint32_t i = 0; i < atomic_load(&rg.member_count); i++) {
        bool paused = rg_member_is_paused(&rg.members[i]);
        any |= paused;
        if (!paused && atomic_load(&rg.members[i].mode))
            return false;
    }
    return any;
}

/* The modes of all clients together. Under the lock, as what follows. */
static uint32_t joined_modes(void)
{
    uint32_t all = alone ? RG_MODE_ATTACHED : RG_MODE_BARE;
    for (uint32_t i = 0; i < atomic_load(&rg.member_count); i++)
        all |= atomic_load(&rg.members[i].mode);
    return all;
}

/* What the hooks read. Not once this process has left Rigel, or while its work goes past it. */
static void join_modes(void)
{
    uint32_t all = joined_modes(), before = atomic_load(&rg.mode);
    atomic_store(&any_high, (all & RG_MODE_HIGH) != 0);
    while (before != RG_MODE_BARE && !atomic_compare_exchange_weak(&rg.mode, &before, all | (before & RG_MODE_RECORDED)))
        continue;
    rg_changed();
}

/* ---- past Rigel ---- */

static uint32_t bypasses; /* begun and not ended; under the lock */

/* Whether no client of this process is ever held back: each is a high one, and the policy gates none of those. */
static bool may_bypass(void)
{
    uint32_t policy = atomic_load(&rg.segment->settings.policy);
    for (uint32_t i = 0; i < atomic_load(&rg.member_count); i++) {
        uint32_t mode = atomic_load(&rg.members[i].mode);
        if (mode != RG_MODE_BARE && mode != RG_MODE_HIGH)
            return false;
    }
    return policy != RG_POLICY_FAIR && policy != RG_POLICY_ORION;
}

/*
 * Turns every hook into a pass-through, and the clients idle: their waits will not be seen. A thread that is inside a launch may mark its
 * work after that, which is nobody's then (rg_busy_begin). False: this process is leaving Rigel.
 */
static bool bypass_on(void)
{
    uint32_t off = RG_BYPASS_OFF;
    if (!atomic_compare_exchange_strong(&rg.bypass, &off, RG_BYPASS_ON)) /* first: rg_is_client is true all along */
        return false;
    atomic_store(&rg.mode, RG_MODE_BARE);
    rg_changed();
    for (uint32_t i = 0; i < atomic_load(&rg.member_count); i++)
        if (atomic_load(&rg.members[i].mode) != RG_MODE_BARE)
            rg_busy_end(&rg.members[i]);
    return true;
}

/* Through Rigel again. Of events recorded, and streams set on handles, before the program may have made use meanwhile: they tell nothing. */
static void bypass_off(void)
{
    uint32_t on = RG_BYPASS_ON;
    if (atomic_load(&rg.bypass) != RG_BYPASS_ON)
        return;
    rg_tracks_clear();
    rg_guard_forget_stream();
    atomic_store(&rg.mode, joined_modes());
    if (!atomic_compare_exchange_strong(&rg.bypass, &on, RG_BYPASS_OFF))
        atomic_store(&rg.mode, RG_MODE_BARE); /* this process has left Rigel meanwhile */
    rg_changed();
}

int rigel_bypass_begin(void)
{
    if (atomic_load(&rg.bypass) == RG_BYPASS_NONE)
        return -ENODEV;
    pthread_mutex_lock(&members_lock);
    int error = ended ? -ENODEV : rg_recorded ? -EBUSY : !may_bypass() ? -EPERM : 0;
    if (!error && atomic_load(&rg.bypass) != RG_BYPASS_ON && !bypass_on())
        error = -ENODEV;
    bypasses += !error;
    pthread_mutex_unlock(&members_lock);
    return error;
}

void rigel_bypass_end(void)
{
    if (atomic_load(&rg.bypass) == RG_BYPASS_NONE)
        return;
    pthread_mutex_lock(&members_lock);
    if (bypasses && --bypasses == 0 && !ended)
        bypass_off();
    pthread_mutex_unlock(&members_lock);
}

/* ---- changing ---- */

/*
 * In this order, so that at no moment a high client is kept off the GPU as a best-effort one, or is marked busy by nobody's leave: to high,
 * the channels first, then the mode, and with it what was launched before counts as unfinished; to best-effort, the mode, then
 * the busy bits. A launch that is under way in another thread goes out as what it was begun as, and so does each
 * piece of a graph.
 */
void rg_member_become(rg_member *m, uint32_t class, bool paused)
{
    pthread_mutex_lock(&members_lock);
    uint32_t before = atomic_load(&m->mode), mode = mode_of(class);
    if (paused && class == RG_CLASS_BEST_EFFORT)
        mode |= RG_MODE_PAUSED;
    if (ended || before == RG_MODE_BARE || (before == mode && atomic_load(&m->slot->class) == class)) {
        pthread_mutex_unlock(&members_lock);
        return;
    }
    bool raised = class == RG_CLASS_HIGH && atomic_load(&m->slot->class) != RG_CLASS_HIGH;
    if (atomic_exchange(&m->slot->class, class) != class) {
        atomic_store(&rg.steered, true);
        m->restamp = true;
    }
    if (raised) {
        atomic_store(&any_high, true);
        rg_preempt_wake();
        rg_preempt_settle();
        for (uint32_t d = 0; d < RG_MAX_DEVICES; d++) {
            rg_share_settle(rg.segment, d, m->slot_index, UINT64_MAX);
            /* What it has launched so far was no request. */
            rg_requests_forget(m, d);
        }
    }
    /* Of kernels that it has launched as a high client under orion only the profile was looked up (rg_gate_show). */
    if (!(before & RG_MODE_BEST_EFFORT) && (mode & RG_MODE_BEST_EFFORT))
        rg_durations_doubt();
    /* Whoever leaves Rigel meanwhile has stored its own. */
    atomic_compare_exchange_strong(&m->mode, &before, mode);
    join_modes();
    if ((before & RG_MODE_HIGH) && !(mode & RG_MODE_HIGH))
        rg_busy_end(m);
    else if (!(before & RG_MODE_HIGH) && (mode & RG_MODE_HIGH))
        rg_busy_suspect(m);
    if (!may_bypass())
        bypass_off();
    syscall(SYS_futex, &m->mode, FUTEX_WAKE_PRIVATE, 0x7fffffff, NULL, NULL, 0);
    rg_preempt_wake();
    pthread_mutex_unlock(&members_lock);
}

void rg_members_leave(void)
{
    /* A handler that ends the process may have interrupted the very thread that holds the lock, and never return to it. */
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec++;
    bool locked = pthread_mutex_timedlock(&members_lock, &until) == 0;
    ended = true;
    uint64_t now = rg_now_ns();
    for (uint32_t i = 0; i < atomic_load(&rg.member_count); i++) {
        rg_member *m = &rg.members[i];
        uint32_t mode = atomic_exchange(&m->mode, RG_MODE_BARE);
        if (i && mode == RG_MODE_BARE)
            continue;
        rg_busy_leave(m);
        atomic_store(&m->slot->exited_ns, now);
        atomic_store(&m->slot->state, RG_EXITED);
    }
    if (locked)
        pthread_mutex_unlock(&members_lock);
}

/* ---- entering and leaving ---- */

static void leave(rg_member *m)
{
    if (atomic_fetch_sub(&m->threads, 1) == 1)
        claims_loosen(m);
}

/* A thread that ends leaves what it has entered. */
static void thread_ends(void *unused)
{
    (void)unused;
    while (mine.depth)
        leave(mine.entered[--mine.depth]);
}

static void make_key(void)
{
    exit_key_made = pthread_key_create(&exit_key, thread_ends) == 0;
}

static int class_of(const char *text)
{
    if (!text || !*text)
        text = getenv("RIGEL_CLASS");
    return !text                               ? RG_CLASS_NONE
           : strcmp(text, "high") == 0         ? RG_CLASS_HIGH
           : strcmp(text, "best-effort") == 0  ? RG_CLASS_BEST_EFFORT
                                               : RG_CLASS_NONE;
}

/* One that fits, whole, into its slot, and on a line. */
static bool is_name(const char *text)
{
    size_t n = 0;
    while (text && n < RG_NAME_BYTES && (unsigned char)text[n] >= ' ' && text[n] != 0x7f)
        n++;
    return n && n < RG_NAME_BYTES && !text[n];
}

/* The client of this name and class, made if new. Under the lock. NULL and the reason, negative errno. */
static rg_member *find_or_make(const char *name, uint32_t class, int *error)
{
    uint32_t n = atomic_load(&rg.member_count);
    for (uint32_t i = 0; i < n; i++) {
        rg_member *m = &rg.members[i];
        if ((i == 0 && (!attached || alone)) || strncmp(m->name, name, sizeof m->name - 1) != 0)
            continue;
        *error = m->class != class ? -EEXIST : atomic_load(&m->mode) == RG_MODE_BARE && attached ? -ENOSPC : 0;
        return *error ? NULL : m;
    }
    n = n ? n : 1; /* the first is the process's, though it is not there yet */
    if (n >= RG_MAX_CLIENTS) {
        *error = -ENOSPC;
        return NULL;
    }
    rg_member *m = &rg.members[n];
    m->class = class;
    m->slot = rg.slot;
    snprintf(m->name, sizeof m->name, "%s", name);
    atomic_store(&rg.several, 1); /* before it has a class that the process's may be (rg_member_class) */
    rg_changed();
    if (attached && !give_slot(m)) {
        *error = -ENOSPC;
        return NULL;
    }
    atomic_store(&rg.member_count, n + 1);
    if (attached && !may_bypass())
        bypass_off();
    return m;
}

/* The thread is another client now: what it calls counts for that. */
static void turned(void)
{
    if (rg_is_client())
        rg_calls_belong(rg_thread_slot());
}

int rigel_client_enter(const char *name, const char *class)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    int number = class_of(class), error = 0;
    const char *segment = getenv("RIGEL_SEGMENT"), *disable = getenv("RIGEL_DISABLE");
    if (!segment || !*segment || (disable && *disable && strcmp(disable, "0") != 0) || !rg_interposing())
        return -ENODEV;
    if (!is_name(name) || number == RG_CLASS_NONE)
        return -EINVAL;
    if (mine.depth == NESTED)
        return -EOVERFLOW;
    pthread_once(&once, make_key);
    if (!exit_key_made)
        return -EAGAIN; /* nobody would notice that the thread ends */
    pthread_mutex_lock(&members_lock);
    find_python();
    rg_member *m = ended ? NULL : find_or_make(name, (uint32_t)number, &error);
    if (m)
        atomic_fetch_add(&m->threads, 1);
    pthread_mutex_unlock(&members_lock);
    if (!m)
        return error ? error : -ENODEV;
    mine.entered[mine.depth++] = m;
    pthread_setspecific(exit_key, &mine);
    turned();
    return 0;
}

int rigel_client_stream(void *stream)
{
    rg_member *own = rg_member_mine();
    if (!own)
        return -ENODEV;
    if (!claimable((CUstream)stream))
        return -EINVAL;
    claim_put((CUstream)stream, USED, own);
    return 0;
}

void rigel_client_leave(void)
{
    if (!mine.depth)
        return;
    leave(mine.entered[--mine.depth]);
    turned();
}

/* ---- work ---- */

rg_member *rg_work_member(CUstream stream)
{
    rg_member *m = rg_member_of(stream);
    return m && atomic_load_explicit(&m->mode, memory_order_acquire) != RG_MODE_BARE ? m : NULL;
}

rg_work rg_work_several_begin(rg_member *m, enum rg_kind kind, rg_track *t, uintptr_t units, rg_dims dims)
{
    rg_calls_belong((uint32_t)m->slot_index);
    uint32_t mode = atomic_load_explicit(&m->mode, memory_order_relaxed);
    rg_work work = rg_work_begin(m, mode, kind, t, units, dims);
    work.mode = mode;
    return work;
}

void rg_work_several_end(rg_member *m, enum rg_kind kind, rg_work work, bool ok)
{
    rg_work_end(m, work.mode, kind, work, ok);
}

/* ---- requests ---- */

/* Whose requests the calling thread's are; NULL: nobody's. */
static rg_member *reporter(void)
{
    if (atomic_load_explicit(&rg.mode, memory_order_relaxed) == RG_MODE_BARE)
        return NULL;
    rg_member *own = rg_member_mine();
    own = own ? own : RG_PROCESS;
    return atomic_load(&own->mode) == RG_MODE_BARE ? NULL : own;
}

/* A request has ended: on which device did this thread launch? */
static void note_device(const rg_member *m)
{
    uint32_t now = rg_this.row ? atomic_load_explicit(&rg_this.row->device, memory_order_relaxed) : 0, before = mine.device;
    mine.device = now ? now : before;
    if (!now || !before || now == before)
        return;
    atomic_fetch_add(&m->slot->moves, 1);
    atomic_store_explicit(&rg_this.row->moves, atomic_load_explicit(&rg_this.row->moves, memory_order_relaxed) + 1, memory_order_relaxed);
}

void rigel_report_request(uint64_t latency_ns)
{
    rg_member *m = reporter();
    if (!m)
        return;
    if (rg_recorded)
        rg_record_request(RG_REC_REPORTED, rg_now_ns(), latency_ns);
    rg_hist_add(&m->slot->report_ns, latency_ns);
    atomic_fetch_add_explicit(&m->slot->reports, 1, memory_order_relaxed);
    note_device(m);
}

void rigel_request_coming(void)
{
    rg_member *m = reporter();
    rg_arrivals_told();
    if (m && atomic_load(&m->mode) & RG_MODE_HIGH)
        rg_stay_announced(m, UINT32_MAX);
}

/* In the place of one that this client has begun, and of what those inside have left open. */
void rigel_request_begin(void)
{
    while (mine.requests && mine.open[mine.requests - 1].depth >= mine.depth)
        mine.requests--;
    mine.open[mine.requests].depth = mine.depth;
    mine.open[mine.requests++].begun_ns = rg_now_ns();
}

void rigel_request_end(void)
{
    while (mine.requests > 1 && mine.open[mine.requests - 1].depth > mine.depth)
        mine.requests--;
    if (mine.requests)
        rigel_report_request(rg_now_ns() - mine.open[--mine.requests].begun_ns);
}

void rg_members_forked(void)
{
    /* Another thread may have held the lock; nobody else is here now. */
    pthread_mutex_init(&members_lock, NULL);
    ended = true;
    atomic_store(&rg.mode, RG_MODE_BARE);
    rg_changed();
    atomic_store(&rg.bypass, RG_BYPASS_NONE);
    atomic_store(&rg_gate_held, 0); /* those threads are the parent's */
}
