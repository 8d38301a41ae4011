/*
 * driver-state.c: the file that the processes on one simulated GPU share, its lock, and waiting for the model.
 *
 * The lock is a robust mutex in the file. A process that is killed while it holds it leaves the model half changed; the
 * next one to lock resets it: whatever was in flight, anybody's, counts as finished at that moment (rg_model_recover).
 * Timing is wrong once, by at most the queue's length, and nobody crashes or hangs.
 *
 * A process that is killed while it does not hold the lock leaves contexts with memory and work. Those who wait, ask or
 * start look at /proc now and then and remove them.
 *
 * With RIGEL_SIM_CLOCK=virtual, for whoever makes the file, the model's present is a word in it: every call moves it on by a nanosecond,
 * and a wait moves it to where something happens, so that what is measured on the GPU does not depend on the machine.
 *
 * How long a process's slices are, whether it is suspended, and for how long it kept the GPU busy (sim-control.h) stands with its
 * contexts in the model, and goes with them, but that a process keeps the time of those that it destroys.
 */
#include "driver.h"
#include "sim-control.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define STATE_MAGIC 0x3330494d4953475full
enum { MAX_PROCESSES = RG_MODEL_MAX_CONTEXTS };

typedef struct {
    _Atomic uint64_t magic; /* last word to be written when the file is made */
    uint64_t size;
    pthread_mutex_t lock; /* robust, between processes: everything below */
    uint32_t devices;
    _Atomic uint32_t controls;  /* slices and suspensions changed so far: those who wait for work sleep on this word */
    _Atomic uint64_t reaped_ns; /* when somebody last looked for dead processes */
    uint32_t has_clock;         /* the clock is virtual: */
    _Atomic uint64_t clock_ns;
    char uuid[SIM_MAX_DEVICES][16];
    struct {
        int32_t pid; /* 0: free */
        uint32_t reserved;
        uint64_t start_ticks; /* /proc/pid/stat field 22: tells a reused pid from the process */
        uint64_t gone_ns[SIM_MAX_DEVICES]; /* for how long contexts that it has destroyed kept a device busy */
    } process[MAX_PROCESSES];
    struct {
        uint32_t id;    /* the model's context */
        uint32_t owner; /* index in `process` + 1; 0: nobody's */
    } context[SIM_MAX_DEVICES][RG_MODEL_MAX_CONTEXTS];
    _Alignas(64) rg_model model[];
} sim_state;

static sim_state *state;
static uint32_t self; /* this process's entry */

static size_t state_bytes(uint32_t devices)
{
    return sizeof(sim_state) + devices * sizeof(rg_model);
}

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* The model's present, and that a call was made. */
static uint64_t present_ns(void)
{
    return state->has_clock ? atomic_fetch_add(&state->clock_ns, 1) + 1 : now_ns();
}

static void pause_cpu(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* ---- Who is alive */

/* Start time of a process; 0 if there is none, or only a zombie. Fields are counted from the last ')' of the name. */
static uint64_t start_ticks(int32_t pid)
{
    char path[32], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return kill(pid, 0) && errno == ESRCH ? 0 : 1; /* without /proc the pid has to do */
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    text[n > 0 ? n : 0] = '\0';
    char *field = strrchr(text, ')');
    if (!field || field[1] != ' ' || field[2] == 'Z' || field[2] == 'X') return 0;
    field += 2; /* field 3 */
    for (int i = 3; i < 22 && field; i++) field = strchr(field + 1, ' ');
    return field ? strtoull(field, NULL, 10) : 0;
}

static bool alive(int32_t pid, uint64_t ticks)
{
    return start_ticks(pid) == ticks;
}

static void remove_process(uint32_t index)
{
    for (uint32_t d = 0; d < state->devices; d++)
        for (uint32_t i = 0; i < RG_MODEL_MAX_CONTEXTS; i++)
            if (state->context[d][i].owner == index + 1) {
                rg_model_remove_context(&state->model[d], state->context[d][i].id);
                state->context[d][i].owner = 0;
            }
    state->process[index].pid = 0;
}

/* ---- Lock */

/*
 * A sleeping wait for a robust mutex can be forgotten: the owner unlocks and wakes one waiter; a third process takes
 * the lock before that waiter runs, and so without the mark that others wait; the waiter is killed, and the third one
 * wakes nobody when it unlocks. (Seen in test-sim-processes, "kills".) So nobody sleeps on this lock: it is held for about a
 * microsecond, and who finds it taken tries again.
 */
static int lock_robust(pthread_mutex_t *lock)
{
    enum { SPINS = 200, YIELDS = 20, NAP_FOR_LOCK_NS = 20000 };
    for (int tries = 0;; tries++) {
        int r = pthread_mutex_trylock(lock);
        if (r != EBUSY) return r;
        if (tries < SPINS) pause_cpu();
        else if (tries < SPINS + YIELDS) sched_yield();
        else nanosleep(&(struct timespec){.tv_nsec = NAP_FOR_LOCK_NS}, NULL); /* the owner is not running */
    }
}

static void lock_file(sim_state *s)
{
    if (lock_robust(&s->lock) != EOWNERDEAD) return;
    /* The owner was killed half-way through a change: what was in flight counts as finished, see above. */
    for (uint32_t d = 0; d < s->devices; d++) rg_model_recover(&s->model[d]);
    pthread_mutex_consistent(&s->lock);
}

static void lock_state(void)
{
    lock_file(state);
}

void sim_unlock(void)
{
    pthread_mutex_unlock(&state->lock);
}

rg_model *sim_lock(int device)
{
    lock_state();
    rg_model *m = &state->model[device];
    rg_model_advance(m, present_ns()); /* after locking: time never goes back for the model */
    return m;
}

void sim_reap(unsigned every_ms)
{
    uint64_t now = now_ns(), last = atomic_load(&state->reaped_ns);
    if (now - last < every_ms * 1000000ull || !atomic_compare_exchange_strong(&state->reaped_ns, &last, now)) return;
    for (uint32_t i = 0; i < MAX_PROCESSES; i++) {
        lock_state();
        int32_t pid = state->process[i].pid;
        uint64_t ticks = state->process[i].start_ticks;
        sim_unlock();
        if (!pid || i == self || alive(pid, ticks)) continue;
        lock_state();
        if (state->process[i].pid == pid && state->process[i].start_ticks == ticks) {
            for (uint32_t d = 0; d < state->devices; d++) rg_model_advance(&state->model[d], present_ns());
            remove_process(i);
        }
        sim_unlock();
    }
}

const rg_model_params *sim_params(int device)
{
    return &state->model[device].p;
}

void sim_uuid(int device, char out[16])
{
    memcpy(out, state->uuid[device], 16);
}

void sim_own_context(int device, uint32_t context)
{
    uint32_t slot = context & 0xffff;
    state->context[device][slot].id = context;
    state->context[device][slot].owner = self + 1;
}

static uint64_t context_busy_ns(const sim_state *s, uint32_t device, uint32_t context)
{
    rg_model_context_stats stats;
    return rg_model_get_context_stats(&s->model[device], context, &stats) ? 0 : stats.busy_ns;
}

void sim_remove_context(int device, uint32_t context)
{
    state->process[self].gone_ns[device] += context_busy_ns(state, (uint32_t)device, context);
    rg_model_remove_context(&state->model[device], context);
    state->context[device][context & 0xffff].owner = 0;
}

/* ---- The file */

#define ELSEWHERE "name another folder with --segment DIR, or TMPDIR where there is no such option"

static CUresult refuse(const char *path, const char *what, const char *remedy)
{
    fprintf(stderr, "rigel: simulated GPU: %s: %s; %s\n", path, what, remedy);
    return CUDA_ERROR_OPERATING_SYSTEM;
}

/* Stable for a name and an index: FNV-1a, as a version 8 (free form) UUID. */
static void make_uuid(const char *path, uint32_t device, char out[16])
{
    uint64_t h = 14695981039346656037ull;
    for (uint32_t part = 0; part < 2; part++) {
        for (const char *c = path; *c; c++) h = (h ^ (unsigned char)*c) * 1099511628211ull;
        h = (h ^ (device + 1)) * 1099511628211ull;
        memcpy(out + 8 * part, &h, 8);
    }
    out[6] = (char)((out[6] & 0x0f) | 0x80);
    out[8] = (char)((out[8] & 0x3f) | 0x80);
}

static uint32_t environment_number(const char *name, uint32_t otherwise, uint32_t most)
{
    const char *text = getenv(name);
    if (!text || !*text) return otherwise;
    unsigned long n = strtoul(text, NULL, 10);
    return n > most ? most : (uint32_t)n;
}

/* Both again after a signal: programs have timers of their own. */
static int reserve(int fd, size_t size)
{
    int err;
    while ((err = posix_fallocate(fd, 0, (off_t)size)) == EINTR) continue;
    return err;
}

static int take_turn(int fd)
{
    int failed;
    while ((failed = flock(fd, LOCK_EX)) && errno == EINTR) continue;
    return failed;
}

/* Makes the file's contents. The caller has the file to itself; `magic` comes last. */
static CUresult fill_state(int fd, const char *path, sim_state **out)
{
    const char *preset = getenv("RIGEL_SIM_PRESET");
    const rg_model_params *known = rg_model_preset(preset && *preset ? preset : "h200");
    if (!known) return refuse(preset, "no such GPU", "RIGEL_SIM_PRESET is h200, a100 or l4");
    uint32_t devices = environment_number("RIGEL_SIM_DEVICES", 1, SIM_MAX_DEVICES);
    size_t size = state_bytes(devices);
    /* Blocks are taken now: a full /dev/shm must be an error here, not SIGBUS in the middle of a launch. */
    if (reserve(fd, size)) return refuse(path, "no room for it", "free some, or " ELSEWHERE);
    sim_state *s = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (s == MAP_FAILED) return refuse(path, strerror(errno), ELSEWHERE);
    pthread_mutexattr_t attr;
    pthread_mutexattr_init(&attr);
    pthread_mutexattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attr, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&s->lock, &attr);
    pthread_mutexattr_destroy(&attr);
    rg_model_params params = *known;
    params.shared = environment_number("RIGEL_SIM_MPS", 0, 1);
    s->size = size;
    s->devices = devices;
    const char *clock = getenv("RIGEL_SIM_CLOCK"), *name = getenv("RIGEL_SIM_NAME"); /* several files may be one GPU, one after the other */
    s->has_clock = clock && !strcmp(clock, "virtual");
    for (uint32_t d = 0; d < devices; d++) {
        rg_model_init(&s->model[d], &params);
        if (!s->has_clock) rg_model_advance(&s->model[d], now_ns());
        make_uuid(name ? name : path, d, s->uuid[d]);
    }
    atomic_store(&s->magic, STATE_MAGIC + sizeof(rg_model)); /* another layout of the model is another file */
    *out = s;
    return CUDA_SUCCESS;
}

/* The file, mapped, if it is whole and of this layout; else NULL. */
static sim_state *map_state(int fd, off_t size)
{
    if (size < (off_t)sizeof(sim_state)) return NULL;
    sim_state *s = mmap(NULL, (size_t)size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (s == MAP_FAILED) return NULL;
    if (atomic_load(&s->magic) == STATE_MAGIC + sizeof(rg_model) && s->size == (uint64_t)size &&
        size == (off_t)state_bytes(s->devices))
        return s;
    munmap(s, (size_t)size);
    return NULL;
}

/* The same if somebody uses it; else it has to be made anew. */
static sim_state *use_state(int fd, off_t size)
{
    sim_state *s = map_state(fd, size);
    if (!s) return NULL;
    for (uint32_t i = 0; i < MAX_PROCESSES; i++)
        if (s->process[i].pid && alive(s->process[i].pid, s->process[i].start_ticks)) return s;
    munmap(s, (size_t)size);
    return NULL;
}

static CUresult enter_process(const char *path)
{
    lock_state();
    /* With an exec what this process had before is gone. */
    for (uint32_t i = 0; i < MAX_PROCESSES; i++)
        if (state->process[i].pid == getpid() ||
            (state->process[i].pid && !alive(state->process[i].pid, state->process[i].start_ticks)))
            remove_process(i);
    for (uint32_t i = 0; i < MAX_PROCESSES; i++) {
        if (state->process[i].pid) continue;
        self = i;
        memset(state->process[i].gone_ns, 0, sizeof state->process[i].gone_ns);
        state->process[i].start_ticks = start_ticks(getpid());
        state->process[i].pid = getpid();
        sim_unlock();
        return CUDA_SUCCESS;
    }
    sim_unlock();
    return refuse(path, "64 processes use it", "end some of them");
}

/* One try, with the file locked against others that start: 1 done, 0 try again (the file was replaced), -1 failed. */
static int attach_once(const char *path, CUresult *result)
{
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    struct stat opened, named;
    if (fd < 0 || take_turn(fd) || fstat(fd, &opened)) {
        *result = refuse(path, strerror(errno), "choose a folder that exists and can be written to with --segment DIR");
        if (fd >= 0) close(fd);
        return -1;
    }
    int outcome = -1;
    if (lstat(path, &named) || named.st_ino != opened.st_ino || named.st_dev != opened.st_dev) {
        outcome = 0;
    } else if (!S_ISREG(opened.st_mode) || opened.st_uid != geteuid() || (opened.st_mode & 077)) {
        *result = refuse(path, "not a private file of this user", "remove it, or " ELSEWHERE);
    } else if (opened.st_size == 0) {
        fchmod(fd, 0600); /* whatever the umask has taken: other clients use it, too */
        *result = fill_state(fd, path, &state);
        if (*result != CUDA_SUCCESS && ftruncate(fd, 0)) unlink(path);
        if (*result == CUDA_SUCCESS && (*result = enter_process(path)) == CUDA_SUCCESS) outcome = 1;
    } else if ((state = use_state(fd, opened.st_size))) {
        if ((*result = enter_process(path)) == CUDA_SUCCESS) outcome = 1;
    } else if (unlink(path)) { /* nobody lives on it; who still has it mapped keeps the old file */
        *result = refuse(path, strerror(errno), "remove it");
    } else {
        outcome = 0;
    }
    flock(fd, LOCK_UN); /* closing would not do it: the mapping keeps the file open */
    close(fd);
    return outcome;
}

CUresult sim_attach(int *devices)
{
    char fallback[64];
    const char *path = getenv("RIGEL_SIM_STATE");
    CUresult result = CUDA_ERROR_OPERATING_SYSTEM;
    if (!path || !*path) {
        snprintf(fallback, sizeof fallback, "/dev/shm/rigel-sim-%u", (unsigned)geteuid());
        path = fallback;
    }
    int outcome = 0;
    while (!outcome) outcome = attach_once(path, &result);
    if (outcome < 0) return result;
    *devices = (int)state->devices;
    return CUDA_SUCCESS;
}

void sim_detach(void)
{
    lock_state();
    for (uint32_t d = 0; d < state->devices; d++) rg_model_advance(&state->model[d], present_ns());
    remove_process(self);
    sim_unlock();
}

/* ---- What the processes have had of the GPUs */

static uint64_t busy_ns(const sim_state *s, uint32_t device, uint32_t process)
{
    uint64_t sum = s->process[process].gone_ns[device];
    for (uint32_t i = 0; i < RG_MODEL_MAX_CONTEXTS; i++)
        if (s->context[device][i].owner == process + 1) sum += context_busy_ns(s, device, s->context[device][i].id);
    return sum;
}

API uint64_t rigelSimStateBytes(uint32_t devices)
{
    return state_bytes(devices);
}

API int rigelSimBusy(const char *path, rigel_sim_busy *out, uint64_t bytes, uint64_t *at_ns)
{
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) return -errno;
    struct stat opened;
    bool mine = !fstat(fd, &opened) && S_ISREG(opened.st_mode) && opened.st_uid == geteuid();
    sim_state *s = mine ? map_state(fd, opened.st_size) : NULL;
    close(fd);
    if (!s) return -EINVAL;
    uint64_t rows = 0, room = bytes / sizeof *out;
    lock_file(s);
    /* Who looks on does not move a virtual clock. */
    *at_ns = s->has_clock ? atomic_load(&s->clock_ns) : now_ns();
    for (uint32_t d = 0; d < s->devices; d++) rg_model_advance(&s->model[d], *at_ns);
    for (uint32_t d = 0; d < s->devices; d++)
        for (uint32_t i = 0; i < MAX_PROCESSES; i++) {
            if (!s->process[i].pid) continue;
            if (rows < room) {
                memcpy(out[rows].uuid, s->uuid[d], sizeof out->uuid);
                out[rows].pid = (uint64_t)s->process[i].pid;
                out[rows].busy_ns = busy_ns(s, d, i);
            }
            rows++;
        }
    pthread_mutex_unlock(&s->lock);
    munmap(s, (size_t)opened.st_size);
    return (int)rows;
}

/* ---- Waiting */

enum {
    LEAST_SPIN_NS = 20000,    /* sleeps end late: this much before the time, at least and at most, ... */
    MOST_SPIN_NS = 100000,    /* ... a wait stops sleeping and spins */
    NAP_NS = 50000,           /* once the spinning budget of a wait is used up */
    SPIN_BUDGET_NS = 200000,  /* what one wait may spin in all */
    LONGEST_SLEEP_NS = 10000000, /* a process may have died meanwhile */
};

/* How late sleeps have ended lately, of all threads: 5 us on bare metal, ten times that on a busy virtual machine. */
static _Atomic uint64_t lateness_ns;

static uint64_t spin_margin(void)
{
    uint64_t margin = atomic_load_explicit(&lateness_ns, memory_order_relaxed) * 3 / 2;
    return margin < LEAST_SPIN_NS ? LEAST_SPIN_NS : margin > MOST_SPIN_NS ? MOST_SPIN_NS : margin;
}

/* Ends early when `controls` is no longer `seen`: what the time was worked out from has changed. */
static void sleep_until(uint64_t at, uint32_t seen)
{
    /* The default slack of 50 us would be most of a short kernel. It is the caller's thread: put it back. */
    int slack = prctl(PR_GET_TIMERSLACK);
    if (slack > 1) prctl(PR_SET_TIMERSLACK, 1);
    struct timespec t = {.tv_sec = (time_t)(at / 1000000000u), .tv_nsec = (long)(at % 1000000000u)};
    syscall(SYS_futex, &state->controls, FUTEX_WAIT_BITSET, seen, &t, NULL, FUTEX_BITSET_MATCH_ANY);
    if (slack > 1) prctl(PR_SET_TIMERSLACK, slack);
    uint64_t now = now_ns(), late = now - at, before = atomic_load(&lateness_ns);
    if (now < at) return;
    if (late > MOST_SPIN_NS) late = MOST_SPIN_NS; /* that was another program's turn, not the timer */
    atomic_store_explicit(&lateness_ns, before - before / 8 + late / 8, memory_order_relaxed);
}

/* Sleeps, then spins, up to `at` or until `controls` is no longer `seen`. What it spins is taken off the budget. */
static void wait_until(uint64_t at, uint32_t seen, uint64_t *budget)
{
    if (state->has_clock) {
        uint64_t clock = atomic_load(&state->clock_ns), to = at > clock + LONGEST_SLEEP_NS ? clock + LONGEST_SLEEP_NS : at;
        while (clock < to && !atomic_compare_exchange_weak(&state->clock_ns, &clock, to)) continue;
        return;
    }
    uint64_t now = now_ns();
    if (at > now + LONGEST_SLEEP_NS) { /* nothing to spin for at its end */
        sleep_until(now + LONGEST_SLEEP_NS, seen);
        return;
    }
    if (!*budget && at < now + NAP_NS) at = now + NAP_NS;
    uint64_t margin = *budget ? spin_margin() : 0;
    if (at > now + margin) {
        sleep_until(at - margin, seen);
        now = now_ns();
    }
    if (!*budget || atomic_load(&state->controls) != seen) return;
    uint64_t from = now;
    while (now < at) {
        pause_cpu();
        now = now_ns();
    }
    uint64_t spun = now - from + 200; /* asking the model costs something too */
    *budget = spun < *budget ? *budget - spun : 0;
}

static bool is_done(const rg_model *m, sim_until u, uint64_t *at)
{
    bool done = u.kind == SIM_UNTIL_STREAM    ? rg_model_done(m, u.id, u.ticket)
                : u.kind == SIM_UNTIL_CONTEXT ? rg_model_context_done(m, u.id, u.ticket)
                                              : rg_model_event_done(m, u.id, NULL);
    if (!done)
        *at = u.kind == SIM_UNTIL_STREAM    ? rg_model_earliest(m, u.id, u.ticket)
              : u.kind == SIM_UNTIL_CONTEXT ? rg_model_context_earliest(m, u.id, u.ticket)
                                            : rg_model_event_earliest(m, u.id);
    return done;
}

CUresult sim_wait(int device, sim_until until)
{
    for (uint64_t budget = SPIN_BUDGET_NS, at = 0;;) {
        if (atomic_load(&sim.phase) != SIM_RUNNING) return CUDA_ERROR_DEINITIALIZED;
        rg_model *m = sim_lock(device);
        bool done = is_done(m, until, &at);
        uint32_t seen = atomic_load(&state->controls); /* changes under the lock */
        sim_unlock();
        if (done) return CUDA_SUCCESS;
        sim_reap(10);
        wait_until(at, seen, &budget);
    }
}

CUresult sim_wait_for_room(int device, uint32_t stream)
{
    /* A sleep for each launch of a stream that stays full would cost more than the launches: wait for some room. */
    enum { SOME = RG_MODEL_STREAM_DEPTH / 16 };
    if (atomic_load(&sim.phase) != SIM_RUNNING) return CUDA_ERROR_DEINITIALIZED;
    uint64_t budget = 0;
    rg_model *m = sim_lock(device);
    uint64_t at = rg_model_room_earliest(m, stream, SOME);
    uint32_t seen = atomic_load(&state->controls);
    sim_unlock();
    sim_reap(10);
    wait_until(at, seen, &budget);
    return CUDA_SUCCESS;
}

/* ---- Slices, suspension and stops */

enum { SUSPEND_CALL_NS = 280000, RESUME_CALL_NS = 230000, LONGEST_SLICE_US = 1000000 };

enum what { SLICE, SUSPENSION, STOP };

/* Does it to every context this process has on the device; `ns`: of a slice. */
static int control(unsigned device, enum what what, uint64_t ns, bool on)
{
    int result = -ENODEV;
    rg_model *m = sim_lock((int)device);
    /* Asked again, under the lock: after sim_detach this process's entry may be somebody else's. */
    bool running = atomic_load(&sim.phase) == SIM_RUNNING;
    for (uint32_t i = 0; running && i < RG_MODEL_MAX_CONTEXTS; i++) {
        if (state->context[device][i].owner != self + 1) continue;
        uint32_t id = state->context[device][i].id;
        int r = what == SLICE ? rg_model_set_slice(m, id, ns) : what == STOP ? rg_model_stop(m, id, on) : rg_model_suspend(m, id, on);
        result = r == RG_MODEL_SHARED ? -ENOTSUP : r ? -EINVAL : 0;
        if (result) break;
    }
    if (!result) atomic_fetch_add(&state->controls, 1);
    sim_unlock();
    /* All of them, so that it does no harm when one is killed as it wakes. Not private: they are other processes. */
    if (!result) syscall(SYS_futex, &state->controls, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    return result;
}

/* Whether there is a device and a context, before the time of the call is spent on it. */
static int find_context(unsigned device)
{
    if (atomic_load(&sim.phase) != SIM_RUNNING || device >= (unsigned)sim.devices) return -ENODEV;
    if (sim_params((int)device)->shared) return -ENOTSUP;
    int result = -ENODEV;
    lock_state();
    for (uint32_t i = 0; i < RG_MODEL_MAX_CONTEXTS; i++)
        if (state->context[device][i].owner == self + 1) result = 0;
    sim_unlock();
    return result;
}

static void sleep_for(uint64_t ns)
{
    if (state->has_clock) {
        atomic_fetch_add(&state->clock_ns, ns);
        return;
    }
    uint64_t until = now_ns() + ns;
    struct timespec t = {.tv_sec = (time_t)(until / 1000000000u), .tv_nsec = (long)(until % 1000000000u)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR) continue;
}

API int rigelSimSetTimeslice(unsigned device_ordinal, uint64_t us)
{
    int result = find_context(device_ordinal);
    if (result) return result;
    return us && us <= LONGEST_SLICE_US ? control(device_ordinal, SLICE, us * 1000, false) : -EINVAL;
}

API int rigelSimSuspend(unsigned device_ordinal, int suspend)
{
    int result = find_context(device_ordinal);
    if (result) return result;
    sleep_for(suspend ? SUSPEND_CALL_NS : RESUME_CALL_NS);
    result = control(device_ordinal, SUSPENSION, 0, suspend);
    if (suspend && !result) sleep_for(sim_params((int)device_ordinal)->preempt_ns); /* it waits for that, also when idle */
    return result;
}

API int rigelSimStop(unsigned device_ordinal, int stopped)
{
    if (atomic_load(&sim.phase) != SIM_RUNNING || device_ordinal >= (unsigned)sim.devices) return -ENODEV;
    return control(device_ordinal, STOP, 0, stopped);
}
