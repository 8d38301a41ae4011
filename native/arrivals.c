/*
 * arrivals.c: sees requests of a high client coming, by what arrives at its process's sockets and pipes.
 *
 * A server has work of its own between what it gets and its first launch: it reads, decodes, batches. If that takes about as long each time, the GPU
 * can come over meanwhile (stay.c), as it does where the program says so itself (rigel_request_coming), without which the request waits for that, 137 us.
 *
 * Two threads watch the process's sockets and pipes, by one epoll, beside whatever the program does to read them: of that nothing is hooked, and nothing
 * is read here. Whichever runs first does what there is to do. The other one is for where a processor is late, as those of a virtual machine are whose host
 * is busy: what comes wakes up the program's thread as well, which is ahead then.
 *
 * Each socket and pipe is a source, and for each it is noted how long after something had come to it the next request began. Where most of the last ones
 * began within the time for which the GPU waits (rg_policy_foresees), it comes over that long after the next. What comes while the client is busy is
 * learned by itself, and counts from the end of that: a program that serves one after the other reads it then. So is what comes right after, which may
 * have to do with the request that has just been answered. Of a source that is new it is what all had.
 *
 * Once a request has begun that was foreseen by a source, it is looked whether more has come to that in the meantime which the program has not read: that
 * is the next one, which came before this one was launched, and counts as what comes amid it.
 *
 * What comes to nothing counts here alone: where it is more than one of four, nothing is foreseen by it.
 *
 * Only sockets, of IP and UNIX, and pipes: to poll others may mean something to their driver, as it does to NVIDIA's, or send what is to go out (AF_XDP).
 * A socket is watched for being writable, too, as it always is: then the GPU comes also where the program has read all by the time that it is
 * looked. Where a stream of UNIX sockets becomes writable the peer has read, so that these are watched for input alone.
 *
 * Costs: nothing of the program's time, and a few microseconds of another processor or two for what arrives, at most each 50 us; none where no best-effort
 * client is beside. Where nothing is foreseen by thousands of arrivals of a source, it is not watched for some seconds; nor is any, by many more.
 */
#include "client.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

/* File descriptors above are not watched. Those of Rigel's are at the end, where no program looks for them. */
enum { SOURCES = 4096, OWN = 16 };
/* After so many numbers in a row that are none no more are looked for. */
enum { ENOUGH = 256 };
enum { EVENTS = 32, PENDING = 32 };
enum { SCAN_NS = 500000000, BEAT_MS = 100, REST_NS = 50000 };
/* The second thread looks no more often than this whether something has begun, or is over; nor for what the first one sees. */
enum { SPARE_NS = 200000 };
/* What begins later has another cause. */
enum { LOST_NS = 50000000 };
/* What ends so long after it was to is late. */
enum { WAIT_LATE_NS = 100000 };
/* What comes so soon after a request may be of that one. */
enum { AFTERMATH_NS = 1000000 };
/* What comes so soon after the last is another part of that: 600 KB over TCP come within 0.3 ms, 2.4 MB within 1.6, with up to 1.0 ms between (on two
 * processors). */
enum { PART_NS = 1000000 };
/* So late these threads may be: what is seen within that time of a request's beginning, and has been read, may have come before that. */
enum { LATE_NS = 1000000 };
/* So often it is looked whether the request is over amid which something came; after so long each time an eighth of what has passed since; and until then. */
enum { AMID_NS = 50000, AMID_LONG_NS = 5000000, LONGEST_NS = 500000000 };
/* After a request has begun, or is to have: until it is looked whether it has. Later each time as well. */
enum { LOOK_NS = 200000 };
/* What begins within that time of its end has best-effort streams stopped between the two. */
enum { BETWEEN_US = 300 };
/* When something comes: while the client has nothing to do; right after a request; amid one. */
enum when { IDLE, AFTER, AMID, WHENS };
/* So many arrivals that nothing was foreseen by, of a source, or of all: for so long it is not watched, or none is. */
enum { USELESS = 4096, ALL_USELESS = 65536 };
static const uint64_t PAUSE_NS = 10000000000ull;

typedef struct {
    uint32_t us[RG_POLICY_ARRIVALS]; /* until requests began, in turn */
    uint32_t n;
    uint16_t whose; /* the last one's */
} experience;

typedef struct {
    uint64_t came_ns; /* nothing has begun since; 0: nothing has come */
    uint64_t last_ns; /* when something came last */
    uint64_t due_ns;  /* then the GPU comes over; 0: it does not, or has */
    uint64_t look_ns; /* then it is looked whether what it has come over for has begun; 0: it has not come over */
    uint64_t until_ns; /* it has: until when it waits for that */
    uint16_t whose;   /* for whom */
    uint16_t began;   /* whose request began last of those that had come to it; 0: not known */
    uint16_t amid;    /* whose request is not over yet; 0: none */
    enum when when;
    bool watched, is_new; /* the latter: it was ready as it was added, which no event has said yet */
    uint32_t asked;   /* in that turn an event says whether there is something that the program has not read; 0: it was not asked */
    bool found;       /* what has come was found so */
    uint32_t wait_us; /* for how long it is waited for */
    uint32_t useless; /* arrivals since something was foreseen by one */
    uint32_t file;    /* of those that have had this number which one it is, with what comes to it */
    uint64_t paused_until;
    experience had[WHENS];
} source;

/* Whose: 1 + member << 4 | device; 0: nobody's. */
static rg_member *member_of(uint16_t whose)
{
    return &rg.members[(whose - 1u) >> 4];
}
static uint32_t device_of(uint16_t whose)
{
    return (whose - 1u) & 15;
}

static source sources[SOURCES];
static experience all[WHENS];
static uint16_t pending[PENDING]; /* those at which something came */
static uint32_t pendings, useless;
static uint64_t paused_until;
static bool watching;
static int own = -1, wakes = -1, due = -1; /* epoll, and an eventfd and a timer in it; -1: none */
static uint64_t timed_ns; /* when the timer ends, as something is due; 0: it does not */
static uint32_t turn; /* in which it is looked what has arrived */
static uint64_t looked_ns, rests_until_ns; /* then all that had come was seen; until then nothing else is looked for */
static uint64_t late_waits; /* a bit for each of the last waits for a time: it ended late; the last one is the lowest */
static bool asks; /* some are to tell whether there is something that has not been read: it is looked at once */
static bool stale; /* the epoll has files that are not at their number any more */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* whose all of this is, while it looks */
enum { FIRST, SPARE, THREADS };
static struct {
    pthread_t thread;
    _Atomic uint32_t started, over;
} threads[THREADS];
static _Atomic uint32_t stopping, wanted, told;
static dev_t device; /* what no file of the program's is on, but an epoll, eventfd or timer of its own */
static ino_t inode;

/* ---- what is watched ---- */

/* With a number that the program's files do not get, which are given the lowest that are free. */
static int high_number(int fd)
{
    struct rlimit limit = {1024, 1024};
    getrlimit(RLIMIT_NOFILE, &limit);
    rlim_t least = (limit.rlim_cur < SOURCES ? limit.rlim_cur : SOURCES) - OWN;
    int high = fd < 0 || limit.rlim_cur < 2 * OWN ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, (int)least);
    if (fd >= 0)
        close(fd);
    return high;
}

static void unmake(void)
{
    if (own >= 0)
        close(own);
    if (wakes >= 0)
        close(wakes);
    if (due >= 0)
        close(due);
}

/* An epoll that watches `wakes` and `due`; -1: there is none to be had. */
static int new_epoll(void)
{
    int new = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event e = {.events = EPOLLIN, .data.u64 = SOURCES};
    if (new < 0 || (epoll_ctl(new, EPOLL_CTL_ADD, wakes, &e) == 0 && epoll_ctl(new, EPOLL_CTL_ADD, due, &e) == 0))
        return new;
    close(new);
    return -1;
}

static bool make(void)
{
    struct stat s;
    wakes = high_number(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    due = high_number(wakes < 0 ? -1 : timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
    own = high_number(due < 0 ? -1 : new_epoll());
    if (own >= 0 && fstat(wakes, &s) == 0) {
        device = s.st_dev;
        inode = s.st_ino;
        return true;
    }
    unmake();
    return false;
}

/* Whether these numbers are Rigel's still: the program may have closed them, and have others of its own under them since. */
static bool are_own(void)
{
    int fds[] = {own, wakes, due};
    struct stat s;
    for (int i = 0; i < 3; i++)
        if (fstat(fds[i], &s) != 0 || s.st_dev != device || s.st_ino != inode)
            return false;
    return true;
}

/* Past libc: the program may close and open it meanwhile, which is no race between them, though a sanitizer that follows files takes it for one. */
static bool set(int operation, int fd, struct epoll_event *e)
{
    return syscall(SYS_epoll_ctl, own, operation, fd, e) == 0;
}

/*
 * What it is watched for; 0: it is neither such a socket nor a pipe, or, `closed`, nothing. Asked without fstat, for which a network's file system may ask its
 * server, and wait for it.
 */
static uint32_t events_of(int fd, bool *closed)
{
    int domain = AF_UNIX;
    socklen_t size = sizeof domain;
    bool is = getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0;
    *closed = !is && errno == EBADF;
    if (is ? domain != AF_UNIX && domain != AF_INET && domain != AF_INET6 : *closed || fcntl(fd, F_GETPIPE_SZ) < 0)
        return 0;
    return EPOLLET | EPOLLIN | (domain == AF_UNIX ? 0 : EPOLLOUT);
}

/*
 * A file that the program has closed stays in the epoll while another process has it, such as a child, or it is open under another number. It cannot be
 * taken out: the epoll is replaced by a new one, under the same number.
 */
static void begin_anew(void)
{
    int new = new_epoll();
    if (new < 0)
        return;
    stale = dup3(new, own, O_CLOEXEC) != own;
    close(new);
}

/* What comes under this number from now on is of another file. */
static void unwatch(uint32_t fd)
{
    if (!sources[fd].watched)
        return;
    set(EPOLL_CTL_DEL, (int)fd, NULL);
    sources[fd].file++;
    sources[fd].watched = false;
}

/* Whether it is ready for what it is watched for. Past libc as well. */
static bool is_ready(int fd, uint32_t events)
{
    struct pollfd p = {.fd = fd, .events = (short)(events & (EPOLLIN | EPOLLOUT))};
    return syscall(SYS_ppoll, &p, 1, &(struct timespec){0}, NULL, (size_t)0) != 0;
}

/* What the program has opened since is watched, too. What it closes is not any more, by itself, where nobody else has it. */
static void scan(uint64_t now_ns)
{
    if (stale)
        begin_anew();
    for (int fd = 0, closed = 0; fd < SOURCES && closed < ENOUGH; fd++) {
        source *at = &sources[fd];
        bool is_closed;
        uint32_t of = events_of(fd, &is_closed);
        closed = is_closed ? closed + 1 : 0;
        if (is_closed)
            at->paused_until = 0;
        if (!of || now_ns < at->paused_until) {
            unwatch((uint32_t)fd);
            continue;
        }
        struct epoll_event e = {.events = of, .data.u64 = (uint64_t)(at->file + 1) << 32 | (uint32_t)fd};
        if (set(EPOLL_CTL_ADD, fd, &e)) { /* else it is already */
            at->file++;
            at->watched = true;
            at->is_new = is_ready(fd, of); /* then an event says so */
            at->asked = 0;
        }
    }
}

/* What has come to it. */
static void forget(source *s)
{
    s->came_ns = s->due_ns = s->look_ns = 0;
    s->amid = 0;
}

static void watch_none(void)
{
    for (uint32_t fd = 0; fd < SOURCES; fd++) {
        unwatch(fd);
        forget(&sources[fd]);
    }
    pendings = 0;
}

/* ---- what comes of it ---- */

/* Calls it for each device of each high client of the process. */
static void each_of_the_process(void (*look)(uint16_t whose, void *at), void *at)
{
    for (uint32_t i = 0; i < atomic_load(&rg.member_count); i++) {
        const rg_member *m = &rg.members[i];
        for (uint32_t devices = atomic_load(&m->mode) & RG_MODE_HIGH ? atomic_load(&m->slot->devices) : 0; devices; devices &= devices - 1)
            look((uint16_t)(1 + (i << 4 | (uint32_t)__builtin_ctz(devices))), at);
    }
}

static uint64_t busy_since(uint16_t whose)
{
    return atomic_load(&member_of(whose)->period[device_of(whose)].busy_since);
}

static uint64_t idle_since(uint16_t whose)
{
    return atomic_load_explicit(&rg_share_of(rg.segment, device_of(whose), member_of(whose)->slot_index)->idle_ns, memory_order_relaxed);
}

typedef struct {
    uint64_t ns, began_ns; /* the first that has begun after that, as far as is known; 0: none */
    uint16_t whose;
} beginning;

static void first_after(uint16_t whose, void *at)
{
    beginning *b = at;
    uint64_t began = busy_since(whose);
    if (began > b->ns && (!b->began_ns || began < b->began_ns)) {
        b->began_ns = began;
        b->whose = whose;
    }
}

typedef struct {
    uint64_t now_ns;
    uint16_t busy; /* who is */
    bool just_now; /* somebody was */
    bool began;    /* just now, since it was last looked what has arrived, somebody has whose requests come to it */
    uint16_t of;   /* whose these are; 0: not known */
} activity;

static void is_at_one(uint16_t whose, void *at)
{
    activity *a = at;
    uint64_t idle = idle_since(whose);
    a->busy = atomic_load(&member_of(whose)->busy[device_of(whose)]) ? whose : a->busy;
    a->just_now |= idle && rg_since(idle, a->now_ns) < AFTERMATH_NS;
    uint64_t began = busy_since(whose);
    a->began |= (!a->of || a->of == whose) && began > looked_ns && rg_since(began, a->now_ns) < LATE_NS;
}

static void learn(experience *e, uint32_t us, uint16_t whose)
{
    if (us != RG_POLICY_NEVER && whose != e->whose) {
        e->n = 0; /* what was learned is of another client, or GPU */
        e->whose = whose;
    }
    e->us[e->n++ % RG_POLICY_ARRIVALS] = us;
}

static void came_to(source *s, uint32_t us, uint16_t whose)
{
    s->began = us == RG_POLICY_NEVER ? s->began : whose;
    learn(&s->had[s->when], us, whose);
    learn(&all[s->when], us, whose);
    forget(s);
}

static uint32_t stay_us(void)
{
    uint32_t us = atomic_load_explicit(&rg.segment->settings.stay_us, memory_order_relaxed), most = UINT32_MAX / 2000 / RG_STAY_ANNOUNCED;
    return RG_STAY_ANNOUNCED * (us < most ? us : most);
}

/* Whether a request is foreseen by what has come to it; whose, and how long after that the GPU is to come. */
static bool foresees(source *s, uint32_t *after_us)
{
    const experience *e = s->had[s->when].n >= RG_POLICY_ARRIVALS / 2 ? &s->had[s->when] : &all[s->when];
    uint32_t known = e->n < RG_POLICY_ARRIVALS ? e->n : RG_POLICY_ARRIVALS;
    if (!e->whose || !rg_policy_foresees(e->us, known, rg_policy_ahead_us(late_waits), stay_us(), after_us, &s->wait_us))
        return false;
    useless = s->useless = 0;
    s->whose = e->whose;
    return true;
}

static void foresee(source *s)
{
    uint32_t after_us;
    if (foresees(s, &after_us))
        s->due_ns = s->came_ns + after_us * 1000ull;
}

/* Has it tell whether there is something that the program has not read: as an event, if the number is that file's still. */
static void ask(uint32_t fd)
{
    source *s = &sources[fd];
    bool closed;
    struct epoll_event e = {.events = events_of((int)fd, &closed), .data.u64 = (uint64_t)s->file << 32 | fd};
    if (s->watched && e.events && set(EPOLL_CTL_MOD, (int)fd, &e)) {
        s->asked = turn + 1;
        asks = true;
    }
}

/* Amid a request: whether it follows at once is seen by what those did before. */
static void foresee_behind(source *s)
{
    uint32_t after_us;
    if (foresees(s, &after_us) && after_us < BETWEEN_US && s->whose == s->amid)
        rg_stay_follows(member_of(s->whose), device_of(s->whose), BETWEEN_US);
}

/* Whether the request is over amid which something came: then it counts as having come at its end. */
static bool is_behind(source *s)
{
    bool busy = atomic_load(&member_of(s->amid)->busy[device_of(s->amid)]);
    uint64_t idle = idle_since(s->amid);
    if (busy ? busy_since(s->amid) <= s->came_ns : idle < s->came_ns) /* the latter: when it ended is about to be noted */
        return false;
    s->amid = 0;
    s->came_ns = idle > s->came_ns ? idle : s->came_ns;
    if (!busy)
        foresee(s);
    return true;
}

/* Whether the program's work goes past Rigel for now (rigel_bypass_begin): of its requests nothing is known, and nothing is done for them. */
static bool is_past(void)
{
    return atomic_load(&rg.mode) == RG_MODE_BARE;
}

/* What has begun since is noted, and what has not come to anything. */
static void look_back(uint64_t now_ns)
{
    uint32_t kept = 0;
    bool past = is_past();
    for (uint32_t i = 0; i < pendings; i++) {
        source *s = &sources[pending[i]];
        if (past) {
            forget(s);
            continue;
        }
        if (s->amid && !is_behind(s)) {
            if (rg_since(s->came_ns, now_ns) < LONGEST_NS)
                pending[kept++] = pending[i];
            else
                forget(s);
            continue;
        }
        beginning b = {.ns = s->came_ns};
        each_of_the_process(first_after, &b);
        uint64_t after = rg_since(s->came_ns, b.began_ns ? b.began_ns : now_ns);
        if (b.began_ns && after < LOST_NS) {
            bool had_come = s->look_ns != 0;
            came_to(s, (uint32_t)(after / 1000), b.whose);
            if (had_come)
                ask(pending[i]);
        } else if (after >= LOST_NS) {
            came_to(s, RG_POLICY_NEVER, 0);
        } else {
            pending[kept++] = pending[i];
        }
    }
    pendings = kept;
}

/*
 * Whether what comes takes the place of what came before, if it is no part of that (`is_part`), which would be counted as having come to nothing. So it
 * does where the GPU has waited for that in vain; or where that was unread, or came amid a request that is over, and such are known to be no sign of the
 * next one.
 */
static bool takes_its_place(const source *s, enum when when, bool is_part, uint64_t now_ns)
{
    if (is_part)
        return false;
    if (s->look_ns && now_ns > s->until_ns)
        return true;
    bool no_sign = s->had[s->when].n >= RG_POLICY_ARRIVALS / 2 && !s->amid && !s->due_ns && !s->look_ns;
    return (s->when == AFTER && when == IDLE) || ((s->found || s->when == AMID) && when != AMID && no_sign);
}

/* `unread`: there is something that the program has not read. */
static void arrived(uint32_t fd, uint32_t file, bool unread, uint64_t now_ns)
{
    source *s = &sources[fd];
    activity a = {.now_ns = now_ns, .of = s->began};
    if (file != s->file) {
        stale = true;
        return;
    }
    bool asked = s->asked == turn;
    if (asked && !unread)
        return;
    if (s->is_new || is_past()) {
        s->is_new = false;
        return;
    }
    useless++;
    if (++s->useless >= USELESS) {
        unwatch(fd);
        s->useless = 0;
        s->paused_until = now_ns + PAUSE_NS;
    }
    each_of_the_process(is_at_one, &a);
    if (!unread && a.began)
        return; /* it may have come before that, and is seen now, as these threads were late: no other one */
    enum when when = a.busy ? AMID : a.just_now ? AFTER : IDLE;
    bool is_part = rg_since(s->last_ns, now_ns) < PART_NS;
    s->last_ns = asked ? s->last_ns : now_ns;
    if (asked && when == IDLE)
        return; /* what is left unread after that is no request that waited for its turn */
    if (s->came_ns && !takes_its_place(s, when, is_part, now_ns))
        return; /* more of the same */
    if (s->came_ns) {
        if (s->found && !s->look_ns)
            forget(s);
        else
            came_to(s, RG_POLICY_NEVER, 0);
    } else if (pendings < PENDING) {
        pending[pendings++] = (uint16_t)fd;
    } else {
        return;
    }
    s->came_ns = now_ns;
    s->found = asked;
    s->when = when;
    s->amid = a.busy;
    if (s->amid)
        foresee_behind(s);
    else
        foresee(s);
}

/*
 * What is due wakes up both threads, whichever has seen it come. Past libc, as what is watched: where the program has closed the timer, that is nothing it
 * has to hear of.
 */
static void set_timer(uint64_t at_ns)
{
    if (at_ns == timed_ns)
        return;
    uint64_t left = at_ns ? rg_since(rg_clock_ns(), at_ns) + 1 : 0; /* 0 would be none */
    struct itimerspec t = {.it_value = {(time_t)(left / 1000000000u), (long)(left % 1000000000u)}};
    syscall(SYS_timerfd_settime, due, 0, &t, NULL);
    timed_ns = at_ns;
}

/* Has the GPU come over for what is due; when it is to be looked again for all else, by one that looks no more often than each `rest_ns`. */
static uint64_t come(uint64_t now_ns, uint64_t rest_ns)
{
    uint64_t next = UINT64_MAX, due_ns = 0;
    for (uint32_t i = 0; i < pendings; i++) {
        source *s = &sources[pending[i]];
        if (s->due_ns && s->due_ns <= now_ns) {
            s->due_ns = 0;
            s->look_ns = now_ns + rg_policy_ahead_us(late_waits) * 1000ull + LOOK_NS;
            s->until_ns = now_ns + (rg_policy_ahead_us(late_waits) + s->wait_us) * 1000ull;
            if (rg_stay_seen(member_of(s->whose), device_of(s->whose), s->wait_us))
                atomic_fetch_add_explicit(&member_of(s->whose)->slot->foreseen, 1, memory_order_relaxed);
        }
        uint64_t eighth = rg_since(s->came_ns + AMID_LONG_NS, now_ns) / 8, again = now_ns + (eighth > AMID_NS ? eighth : AMID_NS);
        if (s->look_ns && s->look_ns <= now_ns)
            s->look_ns = now_ns + LOOK_NS + rg_since(s->came_ns, now_ns) / 8;
        uint64_t at = s->amid ? again : s->look_ns ? s->look_ns : UINT64_MAX;
        next = at < next ? at : next;
        if (s->due_ns && !s->amid && (!due_ns || s->due_ns < due_ns))
            due_ns = s->due_ns;
    }
    set_timer(due_ns);
    return next > now_ns + rest_ns ? next : now_ns + rest_ns;
}

/* ---- the threads ---- */

/* Whether waiting has ended by no event, or a signal: the C library's own, by which setuid has every thread set it, cannot be blocked. */
static bool is_none(int waited)
{
    return waited == 0 || (waited < 0 && errno == EINTR);
}

/* What has come: how much; less than 0: it cannot be told any more, as the program has closed what that takes. Under `lock`, as what follows. */
static int look_once(void)
{
    struct epoll_event events[EVENTS];
    asks = false;
    turn++;
    uint64_t looks_ns = rg_clock_ns();
    int n = epoll_wait(own, events, EVENTS, 0);
    uint64_t now = rg_clock_ns();
    if (n > 0)
        look_back(now);
    for (int i = 0; i < n && watching; i++)
        if (events[i].data.u64 != SOURCES)
            arrived((uint32_t)events[i].data.u64, (uint32_t)(events[i].data.u64 >> 32), events[i].events & EPOLLIN, now);
    looked_ns = looks_ns;
    if (n > 0) {
        now = rg_clock_ns();
        come(now, 0);
        rests_until_ns = timed_ns && timed_ns < now + REST_NS ? timed_ns : now + REST_NS; /* whatever else arrives until then is seen after the rest */
    }
    return n;
}

/* And what was asked for meanwhile: it is there at once, and nothing else is taken for it that comes later. */
static int look_what_has_come(void)
{
    int n = look_once(), more = n;
    while (more >= 0 && asks) {
        more = look_once();
        n += more > 0 ? more : 0;
    }
    return more < 0 ? more : n;
}

/* Until when there is nothing to do, if nothing comes, and nothing is due: by a thread that looks no more often than each `rest_ns`. */
static uint64_t nothing_until(uint64_t now_ns, uint64_t rest_ns)
{
    look_back(now_ns);
    if (asks)
        look_what_has_come();
    uint64_t next = come(now_ns, rest_ns), most = now_ns + BEAT_MS * 1000000ull;
    return next < most ? next : most;
}

static void sleep_ns(uint64_t ns)
{
    if (ns)
        nanosleep(&(struct timespec){(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)}, NULL);
}

/* False: that cannot be done any more. */
static bool look(int which)
{
    struct pollfd p = {.fd = own, .events = POLLIN};
    pthread_mutex_lock(&lock);
    uint64_t now = rg_clock_ns(), next = nothing_until(now, which == SPARE ? SPARE_NS : 0);
    pthread_mutex_unlock(&lock);
    uint64_t left = rg_since(rg_clock_ns(), next);
    struct timespec t = {(time_t)(left / 1000000000u), (long)(left % 1000000000u)};
    int waited = ppoll(&p, 1, &t, NULL), n = 0;
    bool none = is_none(waited), late = rg_since(next, rg_clock_ns()) > WAIT_LATE_NS;
    if (!none && (waited < 0 || (p.revents & (POLLNVAL | POLLERR))))
        return false;
    pthread_mutex_lock(&lock);
    uint64_t rest_ns = none ? 0 : rg_since(rg_clock_ns(), rests_until_ns);
    if (none)
        looked_ns = now > looked_ns ? now : looked_ns; /* nothing had come by then */
    else if (!rest_ns) /* else the other one has just looked */
        n = look_what_has_come();
    if (waited == 0 && left)
        late_waits = late_waits << 1 | late;
    if (!rest_ns)
        rest_ns = n > 0 ? rg_since(rg_clock_ns(), rests_until_ns) : n == 0 && !none && which == SPARE ? SPARE_NS : 0;
    pthread_mutex_unlock(&lock);
    sleep_ns(rest_ns);
    return n >= 0;
}

/* Whether anything is watched from now on: the first thread sees to that. */
static bool watch(uint64_t now_ns)
{
    static uint64_t scanned_ns;
    bool wants = atomic_load(&wanted) && now_ns >= paused_until;
    if (!wants && watching)
        watch_none();
    if (wants && (!watching || now_ns - scanned_ns >= SCAN_NS)) {
        scan(now_ns);
        scanned_ns = now_ns;
    }
    watching = wants;
    if (useless >= ALL_USELESS) {
        useless = 0;
        paused_until = now_ns + PAUSE_NS;
    }
    return wants;
}

static void *arrivals_main(void *at)
{
    int which = (int)(intptr_t)at;
    bool ok = true;
    rg_thread_is_prompt(which == FIRST ? "rigel-arrivals" : "rigel-arrivals2");
    while (ok && !atomic_load(&stopping) && rg_is_client() && are_own()) {
        pthread_mutex_lock(&lock);
        bool watches = which == FIRST ? watch(rg_now_ns()) : watching;
        pthread_mutex_unlock(&lock);
        struct pollfd p = {.fd = wakes, .events = POLLIN};
        ok = watches ? look(which) : is_none(poll(&p, 1, BEAT_MS)); /* else it is to stop, or the program has closed it */
    }
    atomic_store(&threads[which].over, 1);
    atomic_fetch_sub(&rg_own_threads, 1); /* the others may be at work for long */
    return NULL;
}

void rg_arrivals_told(void)
{
    atomic_store_explicit(&told, 1, memory_order_relaxed);
}

void rg_arrivals_beat(void)
{
    static bool failed;
    bool on = rg_stay_allowed() && atomic_load(&rg.segment->settings.arrivals) && atomic_load(&rg.segment->settings.stay_us) && !atomic_load(&told);
    atomic_store(&wanted, on);
    if (!on || failed || atomic_load(&threads[FIRST].started))
        return;
    bool made = make();
    for (int i = 0; i < (made ? THREADS : 0) && !failed; i++) {
        bool ok = rg_thread_start(&threads[i].thread, arrivals_main, (void *)(intptr_t)i);
        atomic_store(&threads[i].started, ok);
        failed = !ok;
    }
    failed |= !made;
    if (made && !atomic_load(&threads[FIRST].started))
        unmake();
}

void rg_arrivals_stop(void)
{
    uint64_t one = 1;
    bool joined = true, are_over = true;
    atomic_store(&stopping, 1);
    if (!atomic_load(&threads[FIRST].started))
        return;
    for (int i = 0; i < THREADS; i++)
        are_over &= !atomic_load(&threads[i].started) || atomic_load(&threads[i].over);
    if (!are_over && are_own() && write(wakes, &one, sizeof one) < 0) {
        /* The program has closed it: then it is found within a tenth of a second. */
    }
    for (int i = 0; i < THREADS; i++)
        joined &= !atomic_load(&threads[i].started) || rg_join(threads[i].thread);
    if (joined /* or the process exits without them */ && are_own())
        unmake(); /* or goes on without Rigel */
}
