/*
 * segment.c: makes, maps, claims and repairs the segment (segment.h).
 *
 * Runs in clients and in the control process alike. Never on the launch path, except rg_now_ns and rg_device_wake.
 * Never ends the process and never prints: whoever calls decides what to say.
 */
#include "segment.h"

#include "trace.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

uint64_t rg_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

uint64_t rg_both_clocks(uint64_t *tick, uint64_t *ns)
{
    uint64_t apart = UINT64_MAX;
    for (int i = 0; i < 5 && apart; i++) { /* the closest of some looks */
        uint64_t before = rg_processor_tick(), now = rg_now_ns(), took = rg_processor_tick() - before;
        if (took >= apart)
            continue;
        apart = took;
        *ns = now;
        *tick = before + took / 2;
    }
    return apart;
}

bool rg_processor_ticks(void)
{
#if defined(__aarch64__)
    return true; /* the generic timer has one rate and one value for all cores: Arm ARM, "The Generic Timer" */
#elif defined(__x86_64__)
    /* Invariant by CPUID 80000007H:EDX[8] (Intel SDM 17.17.1, AMD APM 13.2.4), and the same on all cores as far as Linux has
     * found out: it keeps time by it. */
    unsigned a, b, c, d = 0;
    char source[8] = "";
    if (!__get_cpuid(0x80000007, &a, &b, &c, &d) || !(d >> 8 & 1))
        return false;
    int fd = open("/sys/devices/system/clocksource/clocksource0/current_clocksource", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, source, sizeof source - 1) : 0;
    if (fd >= 0)
        close(fd);
    return n >= 4 && strncmp(source, "tsc\n", 4) == 0;
#else
    return false;
#endif
}

/*
 * What /proc/<pid>/stat says: field 22 (start time in clock ticks) in `ticks`; false if there is no such process or it is a
 * zombie. So is a main thread that has ended, by pthread_exit, before the others: field 20 says how many there are with it. The command
 * name in field 2 may hold spaces and parentheses, so fields are counted from the last ')'.
 */
static int process_start(uint32_t pid, uint32_t *ticks)
{
    char path[64], buf[1024];
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, buf, sizeof buf - 1);
    int error = errno;
    if (fd >= 0)
        close(fd);
    if (n < 0) {
        /* No /proc at all, or no descriptor or memory left for a look, which tells nothing: fall back on the pid alone. */
        *ticks = 0;
        if ((error == ENOENT || error == ESRCH) && access("/proc/self/stat", F_OK) == 0)
            return 0;
        return kill((pid_t)pid, 0) == 0 || errno == EPERM;
    }
    if (n == 0)
        return 0;
    buf[n] = 0;
    char *p = strrchr(buf, ')');
    if (!p || p[1] != ' ')
        return 0;
    char state = p[2];
    int field = 3;
    unsigned long threads = 0;
    for (p += 2; *p && field < 22; p++) {
        field += *p == ' ';
        if (*p == ' ' && field == 20)
            threads = strtoul(p, NULL, 10);
    }
    *ticks = (uint32_t)strtoull(p, NULL, 10);
    return state != 'X' && (state != 'Z' || threads > 1);
}

static uint64_t owner_word(uint32_t pid, uint32_t ticks)
{
    return (uint64_t)ticks << 32 | pid;
}

int rg_owner_alive(uint64_t owner)
{
    uint32_t ticks;
    if (!owner || !process_start((uint32_t)owner, &ticks))
        return 0;
    uint32_t known = (uint32_t)(owner >> 32);
    return ticks == 0 || known == 0 || ticks == known; /* 0: when it began could not be seen, now or when it claimed */
}

int rg_client_alive(const rg_client *client)
{
    return rg_owner_alive(atomic_load(&client->owner));
}

bool rg_segment_live(const rg_segment *seg)
{
    if (rg_owner_alive(atomic_load(&seg->header.creator)))
        return true;
    for (int i = 0; i < RG_MAX_CLIENTS; i++)
        if (atomic_load(&seg->clients[i].state) == RG_LIVE && rg_client_alive(&seg->clients[i]))
            return true;
    return false;
}

/* A file in the folder of `path` that has no name yet; -1 where the file system has none such. */
static int open_unnamed(const char *path)
{
    char folder[PATH_MAX];
    const char *slash = strrchr(path, '/');
    int length = slash ? (int)(slash - path) + 1 : 0;
    if (snprintf(folder, sizeof folder, "%.*s.", length, path) >= (int)sizeof folder)
        return -1;
    return open(folder, O_RDWR | O_TMPFILE | O_CLOEXEC, 0600);
}

int rg_segment_create(const char *path)
{
    /* Built without a name, or under another one, and then linked, so that nobody ever opens a half-made one. Without a name nothing
     * is left where this process is killed meanwhile. */
    char tmp[PATH_MAX];
    int fd = open_unnamed(path);
    bool named = fd < 0;
    if (snprintf(tmp, sizeof tmp, "%s.%d.tmp", path, (int)getpid()) >= (int)sizeof tmp) {
        if (!named)
            close(fd);
        return -ENAMETOOLONG;
    }
    if (named)
        fd = open(tmp, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    else
        snprintf(tmp, sizeof tmp, "/proc/self/fd/%d", fd);
    if (fd < 0)
        return -errno;
    rg_segment *seg = MAP_FAILED;
    int err = fchmod(fd, 0600) == 0 ? 0 : errno;
    if (!err)
        while ((err = posix_fallocate(fd, 0, sizeof *seg)) == EINTR)
            continue;
    if (!err) {
        seg = mmap(NULL, sizeof *seg, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (seg == MAP_FAILED)
            err = errno;
    }
    if (!err) {
        seg->header.version = RG_SEGMENT_VERSION;
        seg->header.size_bytes = sizeof *seg;
        seg->header.creator_pid = (uint32_t)getpid();
        seg->header.tick_source = rg_processor_ticks() ? RG_TICKS_PROCESSOR : RG_TICKS_NS;
        uint64_t tick, now;
        rg_both_clocks(&tick, &now);
        seg->header.created_ns = now;
        seg->header.created_tick = seg->header.tick_source ? tick : now;
        uint32_t ticks = 0;
        process_start((uint32_t)getpid(), &ticks);
        seg->header.creator = owner_word((uint32_t)getpid(), ticks);
        seg->settings = RG_SETTINGS_DEFAULT;
        seg->header.magic = RG_SEGMENT_MAGIC;
        munmap(seg, sizeof *seg);
        if (linkat(AT_FDCWD, tmp, AT_FDCWD, path, named ? 0 : AT_SYMLINK_FOLLOW) != 0)
            err = errno;
    }
    if (named)
        unlink(tmp);
    close(fd);
    return -err;
}

rg_segment *rg_segment_open(const char *path, char *why, size_t why_bytes)
{
    why[0] = 0;
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) {
        snprintf(why, why_bytes, "cannot open segment %s: %s", path, strerror(errno));
        return NULL;
    }
    struct stat st;
    rg_segment *seg = MAP_FAILED;
    if (fstat(fd, &st) != 0)
        snprintf(why, why_bytes, "cannot stat segment %s: %s", path, strerror(errno));
    else if (!S_ISREG(st.st_mode))
        snprintf(why, why_bytes, "segment %s is not a regular file", path);
    else if (st.st_uid != geteuid())
        snprintf(why, why_bytes, "segment %s belongs to user %u, this process runs as %u", path, (unsigned)st.st_uid,
                 (unsigned)geteuid());
    else if (st.st_mode & 077)
        snprintf(why, why_bytes, "segment %s is open to other users (mode %04o, expected 0600)", path,
                 (unsigned)(st.st_mode & 07777));
    else if ((uint64_t)st.st_size != sizeof *seg)
        snprintf(why, why_bytes, "segment %s has %lld bytes, this library expects %zu: it was made by another version", path,
                 (long long)st.st_size, sizeof *seg);
    else if ((seg = mmap(NULL, sizeof *seg, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)) == MAP_FAILED)
        snprintf(why, why_bytes, "cannot map segment %s: %s", path, strerror(errno));
    close(fd);
    if (seg == MAP_FAILED)
        return NULL;
    if (seg->header.magic != RG_SEGMENT_MAGIC || seg->header.version != RG_SEGMENT_VERSION ||
        seg->header.size_bytes != sizeof *seg) {
        snprintf(why, why_bytes, "segment %s is not a version %u segment (magic %016llx, version %u, size %u)", path,
                 RG_SEGMENT_VERSION, (unsigned long long)seg->header.magic, seg->header.version, seg->header.size_bytes);
        munmap(seg, sizeof *seg);
        return NULL;
    }
    return seg;
}

uint64_t rg_launches(const rg_client *c)
{
    uint64_t n = 0;
    for (int i = 0; i < RG_LAUNCH_COUNTS; i++)
        n += atomic_load(&c->launches[i]);
    return n;
}

uint64_t rg_progress(const rg_client *c)
{
    return rg_launches(c) + atomic_load(&c->graph_launches);
}

static void course_of(const rg_share *share, int64_t more[RG_POLICY_COURSE])
{
    for (int i = 0; i < RG_POLICY_COURSE; i++)
        more[i] = (int64_t)atomic_load_explicit(&share->course[i], memory_order_relaxed);
}

/* What was seen of a request (rg_share): which, whether it was late, its launches as a part of the usual ones, and how long it had launched, up to a minute. */
enum { SEEN_NS = 16 };
#define SEEN_LATE (1ull << 48)

static uint64_t which(uint64_t began_ns)
{
    return began_ns >> 10 << 49;
}

static bool same(uint64_t seen, uint64_t began_ns)
{
    return seen && seen >> 49 << 49 == which(began_ns);
}

/*
 * The first look at which it is late is the last one that counts, so that what is learned is where it is needed: who looks on at the gate would see each
 * request at its end. In no time nothing is launched: what was launched is then of the one before, which ended amid the look.
 */
static void see(rg_share *share, uint64_t made, uint32_t usual, uint64_t began_ns, uint64_t spent_ns, bool late)
{
    uint64_t spent = spent_ns / SEEN_NS, before = atomic_load_explicit(&share->seen, memory_order_relaxed);
    if (!began_ns || !made || made >= usual || !spent || spent > UINT32_MAX || (same(before, began_ns) && before & SEEN_LATE))
        return;
    atomic_store_explicit(&share->seen, which(began_ns) | (late ? SEEN_LATE : 0) | made * RG_POLICY_ONE / usual << 32 | spent, memory_order_relaxed);
}

void rg_share_learn_course(rg_share *share, uint64_t began_ns, uint64_t took_ns)
{
    int64_t more[RG_POLICY_COURSE];
    if (!atomic_load_explicit(&share->seen, memory_order_relaxed))
        return;
    uint64_t seen = atomic_exchange_explicit(&share->seen, 0, memory_order_relaxed);
    if (!same(seen, began_ns))
        return;
    course_of(share, more);
    rg_policy_learn_course(more, seen >> 32 & 0xffff, (seen & UINT32_MAX) * SEEN_NS, took_ns);
    for (int i = 0; i < RG_POLICY_COURSE; i++)
        atomic_store_explicit(&share->course[i], (uint64_t)more[i], memory_order_relaxed);
}

/* Of a client whose requests are alike, see rg_policy_until_late. */
static uint64_t until_late(const rg_settings *settings, rg_share *share, uint64_t made, uint32_t usual, uint64_t now_ns)
{
    uint32_t ppm = atomic_load_explicit(&settings->defer_ppm, memory_order_relaxed);
    uint64_t need_ns = (uint64_t)atomic_load_explicit(&settings->need_us, memory_order_relaxed) * 1000u;
    uint32_t part = atomic_load_explicit(&share->need_part, memory_order_relaxed);
    need_ns = part ? need_ns * part / RG_POLICY_ONE : need_ns;
    uint64_t began_ns = atomic_load(&share->began_ns), spent_ns = began_ns ? rg_since(began_ns, now_ns) : 0; /* it ended just now */
    int64_t more[RG_POLICY_COURSE];
    course_of(share, more);
    uint64_t come = ppm ? made : rg_policy_course(more, made, usual); /* a part of the launches is counted */
    uint64_t left_ns = rg_policy_until_late(come, usual, spent_ns, atomic_load(&share->usual_ns), ppm, need_ns);
    see(share, made, usual, began_ns, spent_ns, !left_ns);
    return left_ns;
}

/* For how long a high client at work on the device leaves it to best-effort work; when to look again, in `look_ns`. */
static uint64_t client_until_late(rg_segment *seg, uint32_t device, int slot, uint64_t now_ns, uint64_t busy_ns, uint64_t *look_ns)
{
    enum { LEAST_NS = 20000, FIRST_NS = 50000, MOST_NS = 500000 };
    const rg_settings *settings = &seg->settings;
    rg_share *share = rg_share_of(seg, device, slot);
    uint32_t usual = atomic_load_explicit(&share->usual_launches, memory_order_relaxed);
    uint64_t defer_ns = (uint64_t)atomic_load_explicit(&settings->defer_us, memory_order_relaxed) * 1000u;
    bool by_launches = atomic_load_explicit(&settings->defer_ppm, memory_order_relaxed) ||
                       atomic_load_explicit(&settings->need_us, memory_order_relaxed);
    if (!by_launches || !rg_policy_regular(usual, atomic_load_explicit(&share->usual_votes, memory_order_relaxed)))
        return *look_ns = busy_ns < defer_ns ? defer_ns - busy_ns : 0;
    uint64_t progress = rg_progress(&seg->clients[slot]), began = atomic_load(&share->began_launches);
    uint64_t made = progress > began ? progress - began : 0;
    if (made && !(atomic_load(&seg->devices[device].high_launching) >> slot & 1))
        return *look_ns = 0; /* it waits for what it has launched already; one that begins is about to say that it launches */
    uint64_t left_ns = until_late(settings, share, made, usual, now_ns), least_ns = made ? LEAST_NS : FIRST_NS;
    /* Half of what is left; where nothing tells that, soon. */
    *look_ns = left_ns == UINT64_MAX || left_ns / 2 < least_ns ? least_ns : left_ns / 2 > MOST_NS ? MOST_NS : left_ns / 2;
    return left_ns;
}

uint64_t rg_device_until_late(rg_segment *seg, uint32_t device, uint64_t now_ns, uint64_t busy_ns, uint64_t *look_ns)
{
    const rg_settings *settings = &seg->settings;
    uint64_t busy = atomic_load(&seg->devices[device].high_busy), least_ns = UINT64_MAX;
    *look_ns = UINT64_MAX;
    if (rg_gives_way_at_once(settings))
        return 0;
    for (; busy; busy &= busy - 1) {
        uint64_t its_look_ns, its_ns = client_until_late(seg, device, __builtin_ctzll(busy), now_ns, busy_ns, &its_look_ns);
        least_ns = its_ns < least_ns ? its_ns : least_ns;
        *look_ns = its_look_ns < *look_ns ? its_look_ns : *look_ns;
    }
    return least_ns;
}

static void clear_client(rg_client *c)
{
    /* Everything but the owner word: were it zero for an instant, somebody else could take the slot. */
#define RG_CLEAR_u32(name, n) atomic_store_explicit(&c->name, 0, memory_order_relaxed)
#define RG_CLEAR_u64(name, n) \
    if (offsetof(rg_client, name) != offsetof(rg_client, owner)) \
    atomic_store_explicit(&c->name, 0, memory_order_relaxed)
#define RG_CLEAR_words(name, n) \
    for (int i = 0; i < (n); i++) \
    atomic_store_explicit(&c->name[i], 0, memory_order_relaxed)
#define RG_CLEAR_char(name, n) memset(c->name, 0, n)
#define RG_CLEAR_hist(name, n) \
    for (int i = 0; i < RG_HIST_BUCKETS; i++) \
    atomic_store_explicit(&c->name.count[i], 0, memory_order_relaxed)
#define RG_CLEAR(kind, name, n) RG_CLEAR_##kind(name, n);
    RG_CLIENT_FIELDS(RG_CLEAR)
    atomic_store(&c->state, RG_CLAIMING);
}

void rg_thread_clear(rg_thread *row)
{
#define RG_CLEAR_ROW_u32(name) \
    if (offsetof(rg_thread, name) != offsetof(rg_thread, tid)) \
    atomic_store_explicit(&row->name, 0, memory_order_relaxed)
#define RG_CLEAR_ROW_u64(name) atomic_store_explicit(&row->name, 0, memory_order_relaxed)
#define RG_CLEAR_ROW_char(name)
#define RG_CLEAR_ROW(kind, name, n) RG_CLEAR_ROW_##kind(name);
    RG_THREAD_FIELDS(RG_CLEAR_ROW)
}

/* What the process that had the slot before did last. */
static void clear_trace(rg_segment *seg, int slot)
{
    for (int i = 0; i < RG_MAX_THREADS; i++) {
        rg_thread *row = &seg->threads[slot * RG_MAX_THREADS + i];
        atomic_store(&row->tid, 0);
        rg_thread_clear(row);
    }
    for (int i = 0; i < RG_TRACE_RECORDS * RG_RECORD_WORDS; i++)
        atomic_store_explicit(&seg->traces[slot].records[i], 0, memory_order_relaxed);
    atomic_store(&seg->clients[slot].records, 0);
    for (int i = 0; i < RG_MAX_COMMUNICATORS; i++) {
        atomic_store(&seg->communicators[slot * RG_MAX_COMMUNICATORS + i].handle, 0);
        atomic_store(&seg->communicators[slot * RG_MAX_COMMUNICATORS + i].key, 0);
    }
}

void rg_share_forget_course(rg_share *share)
{
    atomic_store_explicit(&share->seen, 0, memory_order_relaxed);
    for (int i = 0; i < RG_POLICY_COURSE; i++)
        atomic_store_explicit(&share->course[i], 0, memory_order_relaxed);
}

void rg_share_forget_requests(rg_share *share, uint64_t launches)
{
    atomic_store(&share->usual_votes, 0);
    atomic_store(&share->usual_launches, 0);
    atomic_store(&share->usual_ns, 0);
    atomic_store(&share->need_part, 0);
    atomic_store(&share->alike, 0);
    rg_share_forget_course(share);
    atomic_store(&share->began_ns, 0);
    atomic_store(&share->began_launches, launches);
}

/* What another client had of each device. */
static void clear_shares(rg_segment *seg, int slot)
{
    for (uint32_t d = 0; d < RG_MAX_DEVICES; d++) {
        rg_share *share = rg_share_of(seg, d, slot);
        atomic_store(&share->virtual_ns, 0);
        atomic_store(&share->idle_ns, 0);
        rg_share_forget_requests(share, 0);
    }
}

/* Which devices a process used, and how it was taken off them: the client's next one may use others. */
static void clear_devices(rg_segment *seg, int slot)
{
    rg_client *c = &seg->clients[slot];
    atomic_fetch_or(&c->past_devices, atomic_exchange(&c->devices, 0));
    atomic_store(&c->preemption, RG_PREEMPTION_UNKNOWN);
    atomic_store(&c->slice_us, 0);
    for (uint32_t d = 0; d < RG_MAX_DEVICES; d++) {
        atomic_store(&rg_share_of(seg, d, slot)->preemption, RG_PREEMPTION_UNKNOWN);
        atomic_store(&rg_share_of(seg, d, slot)->slice_us, 0);
    }
}

/* Whether the slot belongs to a client of this name (as far as it fits) and class. */
static int same_client(const rg_client *c, const char *name, uint32_t class)
{
    return atomic_load(&c->class) == class && strncmp(c->name, name, sizeof c->name - 1) == 0;
}

int rg_segment_claim(rg_segment *seg, const char *name, uint32_t class, uint64_t now_ns)
{
    uint32_t ticks = 0;
    process_start((uint32_t)getpid(), &ticks);
    uint64_t me = owner_word((uint32_t)getpid(), ticks);
    rg_segment_reap(seg);
    /* A slot is only ever taken from an owner that no longer runs, by one compare-and-swap, so two claimers cannot share it and
     * a claimer killed half-way leaves a slot that the next one may take. */
    enum { SAME_NAME, NEVER_USED, ANY_OTHER, PASSES };
    for (int pass = 0; pass < PASSES; pass++) {
        for (int i = 0; i < RG_MAX_CLIENTS; i++) {
            rg_client *c = &seg->clients[i];
            uint64_t old = atomic_load(&c->owner);
            if (pass == NEVER_USED ? old != 0 : !old || (pass == SAME_NAME && !same_client(c, name, class)) || rg_owner_alive(old))
                continue;
            if (!atomic_compare_exchange_strong(&c->owner, &old, me))
                continue;
            atomic_store(&c->state, RG_CLAIMING);
            rg_segment_end_work(seg, i);
            clear_trace(seg, i);
            atomic_store(&c->threads_lost, 0);
            atomic_store(&c->communicators_lost, 0);
            for (uint32_t d = 0; d < RG_MAX_DEVICES; d++) {
                /* What the one before was at when it ended is none of this one's requests. */
                atomic_store(&rg_share_of(seg, d, i)->began_ns, 0);
                atomic_store(&rg_share_of(seg, d, i)->began_launches, rg_progress(c));
            }
            if (!same_client(c, name, class)) {
                if (atomic_load(&c->first_launch_ns))
                    atomic_fetch_add(&seg->header.overwritten, 1);
                clear_client(c);
                clear_shares(seg, i);
                for (int k = 0; k < RG_MAX_OPERATIONS; k++)
                    atomic_store_explicit(&seg->calls[i].count[k], 0, memory_order_relaxed);
                atomic_store(&c->class, class);
                snprintf(c->name, sizeof c->name, "%s", name);
            }
            /* Before the slot is live again: only what live slots hold is in use. */
            atomic_store(&c->memory_bytes, 0);
            for (int k = 0; k < RG_MAX_CONTEXTS * 2; k++)
                atomic_store(&c->contexts[k], 0);
            atomic_store(&c->contexts_full, 0);
            clear_devices(seg, i);
            atomic_store(&c->pid, (uint32_t)getpid());
            atomic_store(&c->attached_ns, now_ns);
            atomic_store(&c->heartbeat_ns, now_ns);
            atomic_store(&c->exited_ns, 0);
            atomic_store(&c->state, RG_LIVE);
            return i;
        }
    }
    atomic_fetch_add(&seg->header.refused, 1);
    return -1;
}

/* Whether another thread or process is done with writing what device this is, which takes it microseconds. */
static bool known_soon(const rg_device *d)
{
    for (int tries = 0; tries < 1000; tries++) {
        if (atomic_load(&d->state) == 2)
            return true;
        nanosleep(&(struct timespec){.tv_nsec = 10000}, NULL);
    }
    return false;
}

int rg_segment_device(rg_segment *seg, const char uuid[16], const char *name)
{
    uint64_t key = 0xcbf29ce484222325u; /* FNV-1a */
    for (int i = 0; i < 16; i++)
        key = (key ^ (unsigned char)uuid[i]) * 0x100000001b3u;
    key |= 1;
    for (int i = 0; i < RG_MAX_DEVICES; i++) {
        rg_device *d = &seg->devices[i];
        uint64_t old = 0;
        if (!atomic_compare_exchange_strong(&d->key, &old, key) && old != key)
            continue;
        /* Who finds them missing for long writes the same bytes: who began to may have died. */
        uint32_t state = 0;
        if (atomic_compare_exchange_strong(&d->state, &state, 1) || (state == 1 && !known_soon(d))) {
            memcpy(d->uuid, uuid, sizeof d->uuid);
            snprintf(d->name, sizeof d->name, "%s", name);
            atomic_store(&d->state, 2);
        }
        return i;
    }
    return -1;
}

void rg_device_wake(rg_device *dev)
{
    atomic_fetch_add(&dev->wake, 1);
    if (atomic_load(&dev->waiters))
        syscall(SYS_futex, &dev->wake, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

uint32_t rg_hold_left_ms(const rg_settings *settings, uint64_t now_ns)
{
    uint32_t until = atomic_load(&settings->hold_until_ms);
    int32_t left = (int32_t)(until - (uint32_t)(now_ns / 1000000));
    return until && left > 0 && left <= RG_HOLD_LIMIT_MS ? (uint32_t)left : 0;
}

void rg_segment_hold(rg_segment *seg, uint32_t ms)
{
    uint32_t until = (uint32_t)(rg_now_ns() / 1000000) + (ms < RG_HOLD_LIMIT_MS ? ms : RG_HOLD_LIMIT_MS);
    atomic_store(&seg->settings.hold_until_ms, ms == 0 ? 0 : until ? until : 1);
    for (int i = 0; i < RG_MAX_DEVICES; i++) {
        rg_device *d = &seg->devices[i];
        if (!atomic_load(&d->key))
            continue;
        rg_device_wake(d);
        if (atomic_load(&d->busy_waiters)) {
            atomic_fetch_add(&d->busy_wake, 1);
            syscall(SYS_futex, &d->busy_wake, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
        }
    }
}

/* The order pairs with preempt_main: it says that it waits, then looks whether anybody is busy, or coming. */
static void wake_for_work(rg_device *dev)
{
    if (!atomic_load(&dev->busy_waiters))
        return;
    atomic_fetch_add(&dev->busy_wake, 1);
    syscall(SYS_futex, &dev->busy_wake, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void rg_device_launching(rg_device *dev, int slot, bool on)
{
    if (!on) {
        atomic_fetch_and(&dev->high_launching, ~(1ull << slot));
        return;
    }
    atomic_fetch_or(&dev->high_launching, 1ull << slot);
    wake_for_work(dev);
}

/* In this order: whoever finds its streams stopped looks for what for. */
void rg_device_coming(rg_segment *seg, uint32_t device, uint64_t until_ns)
{
    rg_device *dev = &seg->devices[device];
    uint64_t before = atomic_load(&dev->coming_until_ns);
    while (before < until_ns && !atomic_compare_exchange_weak(&dev->coming_until_ns, &before, until_ns))
        continue;
    rg_stop_best_effort(seg, device);
    wake_for_work(dev);
}

void rg_device_came(rg_segment *seg, uint32_t device, uint64_t until_ns)
{
    atomic_compare_exchange_strong(&seg->devices[device].coming_until_ns, &until_ns, 0);
}

void rg_stop_best_effort(rg_segment *seg, uint32_t device)
{
    const rg_settings *s = &seg->settings;
    uint64_t armed = atomic_load_explicit(&seg->stops[device].armed, memory_order_relaxed);
    if (!armed || !atomic_load_explicit(&s->suspend, memory_order_relaxed) || !rg_gives_way_at_once(s))
        return;
    for (; armed; armed &= armed - 1) {
        uint64_t expected = RG_STOP_ARMED;
        atomic_compare_exchange_strong(&seg->stops[device].word[__builtin_ctzll(armed)], &expected, RG_STOP_STOPPED);
    }
}

void rg_stop_arm(rg_segment *seg, uint32_t device, int slot, bool armed)
{
    rg_stop_page *stops = &seg->stops[device];
    uint64_t expected = RG_STOP_FREE;
    if (armed) {
        atomic_fetch_or(&stops->armed, 1ull << slot);
        atomic_compare_exchange_strong(&stops->word[slot], &expected, RG_STOP_ARMED);
        if (atomic_load(&stops->armed) >> slot & 1)
            return;
    }
    /* The bit, then the word: who has armed the word meanwhile looks for the bit once more. */
    atomic_fetch_and(&stops->armed, ~(1ull << slot));
    atomic_store(&stops->word[slot], RG_STOP_FREE);
}

void rg_device_busy(rg_device *dev, int slot, uint64_t now_ns)
{
    uint64_t spell = atomic_load(&dev->spell_ns), idle = atomic_load(&dev->idle_ns); /* which may be later than `now_ns` */
    if (!atomic_load(&dev->high_busy) && (!spell || (now_ns > idle && now_ns - idle >= RG_POLICY_BREAK_NS))) {
        atomic_store(&dev->spell_ns, now_ns);
        atomic_store(&dev->paid_ns, 0);
    }
    atomic_fetch_or(&dev->high_busy, 1ull << slot);
}

void rg_device_idle(rg_device *dev, int slot, uint64_t now_ns)
{
    uint64_t bit = 1ull << slot;
    rg_device_launching(dev, slot, false);
    if ((atomic_fetch_and(&dev->high_busy, ~bit) & ~bit) == 0)
        atomic_store(&dev->idle_ns, now_ns);
}

void rg_share_settle(rg_segment *seg, uint32_t device, int slot, uint64_t ns)
{
    rg_share *share = rg_share_of(seg, device, slot);
    uint64_t own = atomic_load(&share->outstanding_ns);
    while (!atomic_compare_exchange_weak(&share->outstanding_ns, &own, own > ns ? own - ns : 0))
        continue;
    /* The sum may lack what a client that was killed had added to its own part alone: never below zero. */
    uint64_t part = own > ns ? ns : own, sum = atomic_load(&seg->devices[device].outstanding_ns);
    while (part && !atomic_compare_exchange_weak(&seg->devices[device].outstanding_ns, &sum, sum > part ? sum - part : 0))
        continue;
}

uint64_t rg_kernel_key(const char *name, uint64_t shape)
{
    uint64_t key = 0xcbf29ce484222325u; /* FNV-1a */
    for (const char *p = name; *p; p++)
        key = (key ^ (unsigned char)*p) * 0x100000001b3u;
    return ((key ^ shape) * 0x9e3779b97f4a7c15u) | 1;
}

/* The place of a key: where it is, or the free one where it would be. */
static rg_kernel *kernel_place(rg_segment *seg, uint64_t key)
{
    for (uint32_t i = (uint32_t)(key >> 40), n = 0; n < RG_MAX_KERNELS; i++, n++) {
        rg_kernel *k = &seg->kernels[i % RG_MAX_KERNELS];
        uint64_t found = atomic_load_explicit(&k->key, memory_order_relaxed);
        if (found == key || !found)
            return k;
    }
    return NULL;
}

rg_kernel *rg_kernel_find(rg_segment *seg, uint64_t key)
{
    rg_kernel *k = kernel_place(seg, key);
    return k && atomic_load_explicit(&k->key, memory_order_relaxed) ? k : NULL;
}

bool rg_kernel_put(rg_segment *seg, uint64_t key, uint32_t sms, uint32_t bound)
{
    rg_kernel *k = kernel_place(seg, key);
    uint32_t used = 0;
    if (k && atomic_load(&k->key)) {
        sms = sms > k->sms ? sms : k->sms;
        bound = bound == k->bound ? bound : RG_BOUND_UNKNOWN;
    } else {
        for (uint32_t i = 0; i < RG_MAX_KERNELS; i++)
            used += atomic_load(&seg->kernels[i].key) != 0;
        if (used >= RG_MAX_KERNELS / 4 * 3)
            return false;
    }
    atomic_store(&k->sms, sms);
    atomic_store(&k->bound, bound);
    atomic_store(&k->key, key);
    return true;
}

void rg_segment_clear_busy(rg_segment *seg, int slot)
{
    uint64_t bit = 1ull << slot;
    for (int i = 0; i < RG_MAX_DEVICES; i++) {
        rg_device *d = &seg->devices[i];
        if ((atomic_load(&d->high_busy) | atomic_load(&d->high_launching)) & bit) {
            rg_device_idle(d, slot, rg_now_ns());
            rg_device_wake(d);
        }
    }
}

void rg_segment_end_work(rg_segment *seg, int slot)
{
    rg_segment_clear_busy(seg, slot);
    for (uint32_t d = 0; d < RG_MAX_DEVICES; d++) {
        rg_share_settle(seg, d, slot, UINT64_MAX);
        rg_stop_arm(seg, d, slot, false);
    }
}

int rg_segment_reap(rg_segment *seg)
{
    int reaped = 0;
    for (int i = 0; i < RG_MAX_CLIENTS; i++) {
        rg_client *c = &seg->clients[i];
        uint64_t owner = atomic_load(&c->owner);
        uint32_t state = atomic_load(&c->state);
        if ((state != RG_LIVE && state != RG_CLAIMING) || rg_owner_alive(owner) ||
            !atomic_compare_exchange_strong(&c->state, &state, RG_DEAD))
            continue;
        if (atomic_load(&c->owner) != owner) {
            /* Somebody else took the slot in between, and is alive: give back the state that was his. */
            uint32_t dead = RG_DEAD;
            atomic_compare_exchange_strong(&c->state, &dead, RG_LIVE);
            continue;
        }
        rg_segment_end_work(seg, i);
        reaped++;
    }
    return reaped;
}
