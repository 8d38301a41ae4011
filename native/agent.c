/*
 * agent.c: one thread per process that does, for all its clients, what must not be done on the launch path.
 *
 * For everybody: the heartbeat, what the control plane asks (steer.c), time slices (preempt.c), and clearing away what clients left
 * whose heartbeat has stopped. For a high client also:
 * noticing that it is idle when the program does not wait for the GPU itself (it polls, uses host callbacks, or simply
 * stops). After a spell without launches the agent records one untimed event on each stream with unfinished work and asks
 * for it until it is done. And for a best-effort one under orion, noticing that its work is finished.
 *
 * It works in the context the stream belongs to, never in "device 0", and in relaxed capture mode, so that nothing it does
 * counts against a capture elsewhere. It holds rg_agent_lock while it uses a stream, which keeps the stream alive and captures
 * from beginning. All signals are blocked in it: the program's handlers run in the program's threads.
 */
#include "client.h"
#include "rigel.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

pthread_mutex_t rg_agent_lock = PTHREAD_MUTEX_INITIALIZER;
_Atomic uint32_t rg_taking_away;

static pthread_t thread;
static _Atomic uint32_t started, stopping;

enum { BEAT_NS = 100000000, WATCH_NS = 2000000 };

/* Sleeps up to `ns`, or until rg_agent_stop. */
static void agent_sleep(uint64_t ns)
{
    struct timespec t = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    syscall(SYS_futex, &stopping, FUTEX_WAIT_PRIVATE, 0, &t, NULL, 0);
}

/* Everything a client has ever queued; only compared for change. */
static uint64_t issued(const rg_member *m)
{
    const rg_client *c = m->slot;
    return rg_progress(c) + atomic_load(&c->copies) + atomic_load(&c->memsets);
}

/*
 * Covers the track's work with an event of the agent's. False where that cannot be had: then the context is broken (a kernel
 * failed, say) or going, and nothing can be waited for in it any more.
 */
static bool cover_with_event(rg_track *t)
{
    CUcontext popped, context = t->context;
    if (rg_real.cuCtxPushCurrent_v2(context) != CUDA_SUCCESS)
        return false;
    /* A thread may end, and another's stream take the place, at any time: no lock of this thread's keeps it from that. */
    if (t->agent_context != context)
        t->agent_event = NULL; /* belongs to the other context: left to it */
    t->agent_context = context;
    /* A per-thread stream cannot be named from here. The legacy stream waits for it (both are blocking streams). */
    CUstream stream = t->owner ? CU_STREAM_LEGACY : t->stream;
    bool ok = t->agent_event || RG_REAL(cuEventCreate)(&t->agent_event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS;
    ok = ok && RG_REAL(cuEventRecord)(t->agent_event, stream) == CUDA_SUCCESS;
    rg_real.cuCtxPopCurrent_v2(&popped);
    return ok;
}

/* Looks after every unfinished track of a high client that launches nothing at the moment. */
static void watch_tracks(rg_member *m)
{
    uint64_t ended = 0;
    for (uint32_t i = 0; i < atomic_load(&rg.track_count); i++) {
        rg_track *t = &rg.tracks[i];
        bool done = false;
        if (rg_track_member(t) != m)
            continue;
        if (!rg_agent_enter())
            break; /* whoever ends a context may take long; the heartbeat must go on */
        uint64_t state = atomic_load(&t->state);
        if (atomic_load(&t->key) && !atomic_load(&rg.captures) && state != RG_CLEAN && (state & 3) != RG_TOKEN_WAIT) {
            if (state != t->agent_token) {
                /* The token goes in first: a launch between it and the record makes the track dirty again. One of an event of the
                 * program's stays, and does as well: the program may find out by it, or wait for it, before the agent does. */
                uint64_t token = state == RG_DIRTY ? rg_token(RG_TOKEN_EVENT) : state;
                if (atomic_compare_exchange_strong(&t->state, &state, token)) {
                    rg_changed();
                    t->agent_token = token;
                    done = !cover_with_event(t);
                }
            }
            if (!done && atomic_load(&t->state) == t->agent_token)
                done = RG_REAL(cuEventQuery)(t->agent_event) != CUDA_ERROR_NOT_READY;
        }
        uint64_t token = t->agent_token;
        pthread_mutex_unlock(&rg_agent_lock);
        ended += done && rg_track_finished(t, token);
    }
    /* Whoever marks a track (rg_mark) may be overtaken, before it marks the client, by who finds that very work done. */
    for (uint32_t d = 0; d < RG_MAX_DEVICES; d++)
        ended += rg_idle_check(m, d);
    atomic_fetch_add_explicit(&m->slot->agent_idle, ended, memory_order_relaxed);
}

static bool any_busy(const rg_member *m)
{
    for (int i = 0; i < RG_MAX_DEVICES; i++)
        if (atomic_load_explicit(&m->busy[i], memory_order_relaxed))
            return true;
    return false;
}

/* Takes clients whose heartbeat has stopped out of every device's busy word: who was killed once two beats of it are missing, who
 * was stopped by a signal after `stale_ms`. */
static void clear_stale(uint64_t now)
{
    uint64_t stale_ns = (uint64_t)atomic_load(&rg.segment->settings.stale_ms) * 1000000u;
    for (int d = 0; d < RG_MAX_DEVICES; d++) {
        rg_device *dev = &rg.segment->devices[d];
        uint64_t busy = atomic_load(&dev->high_busy);
        for (int i = 0; busy && i < RG_MAX_CLIENTS; i++) {
            rg_client *client = &rg.segment->clients[i];
            uint64_t beat = atomic_load(&client->heartbeat_ns);
            if (!(busy >> i & 1) || now <= beat + 2 * BEAT_NS || (now - beat <= stale_ns && rg_client_alive(client)))
                continue;
            rg_device_idle(dev, i, now);
            atomic_fetch_add(&rg.slot->stale_cleared, 1);
            rg_device_wake(dev);
        }
    }
}

bool rg_agent_looks_often(rg_member *m, uint64_t now)
{
    if (now - m->ended_at < 1000000000u)
        return m->often;
    uint64_t ended = atomic_load(&m->slot->agent_idle), itself = atomic_load(&m->slot->requests) - ended;
    m->often = ended - m->ended > RG_AGENT_OFTEN * (itself - m->ended_itself);
    m->ended = ended;
    m->ended_itself = itself;
    m->ended_at = now;
    return m->often;
}

/* Looks after a high client; when to look again, in ns. */
static uint64_t watch(rg_member *m, uint64_t now)
{
    uint64_t quiet_ns = (uint64_t)atomic_load(&rg.segment->settings.quiet_us) * 1000u;
    uint64_t n = issued(m);
    bool busy = any_busy(m);
    if (n != m->seen) {
        m->seen = n;
        m->seen_at = now;
    } else if (busy && now - m->seen_at >= quiet_ns) {
        watch_tracks(m);
    }
    if (rg_agent_looks_often(m, now) || (busy && now - m->seen_at >= quiet_ns))
        return quiet_ns;
    return now - m->seen_at < 1000000000u ? WATCH_NS : BEAT_NS / 5;
}

/*
 * Looks after a best-effort client under orion, where others may launch no more until its work is known to be finished: its own threads only
 * look when they wait at the gate, and it may launch nothing for long. When to look again, in ns.
 */
static uint64_t watch_outstanding(rg_member *m, uint64_t now)
{
    uint64_t n = issued(m);
    if (n != m->seen) {
        m->seen = n;
        m->seen_at = now;
    }
    bool any = rg_gate_outstanding(m);
    if (any)
        rg_gate_look();
    return any || now - m->seen_at < 1000000000u ? WATCH_NS : BEAT_NS / 5;
}

/* Says for every client of this process that it lives. */
static void beat_all(uint64_t now)
{
    for (uint32_t i = 0; i < atomic_load(&rg.member_count); i++) {
        rg_member *m = &rg.members[i];
        if (i && !atomic_load(&m->mode))
            continue; /* it has no slot */
        atomic_store(&m->slot->heartbeat_ns, now);
        rg_busy_assert(m);
    }
}

/*
 * Whether nobody but Rigel is left: the program's main thread has ended by pthread_exit, and so have its others. The process ends
 * with its last thread, which must not be one of ours. /proc/self/stat tells of the main thread, and how many threads there are
 * with it: proc(5).
 */
static bool deserted(void)
{
    char text[512], state;
    int fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    text[n > 0 ? n : 0] = 0;
    const char *fields = strrchr(text, ')');
    unsigned threads;
    return fields &&
           sscanf(fields + 1, " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %u", &state, &threads) == 2 &&
           state == 'Z' && threads <= 1 + atomic_load(&rg_own_threads);
}

static void *agent_main(void *unused)
{
    (void)unused;
    uint64_t beat = 0;
    uint32_t beats = 0;
    prctl(PR_SET_NAME, "rigel-agent");
    prctl(PR_SET_TIMERSLACK, 1000);
    CUstreamCaptureMode relaxed = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (rg_real.cuThreadExchangeStreamCaptureMode)
        rg_real.cuThreadExchangeStreamCaptureMode(&relaxed);
    while (!atomic_load(&stopping) && rg_is_client()) {
        uint64_t now = rg_now_ns();
        rg_trace_beat();
        if (now - beat >= BEAT_NS) {
            rg_steer_beat(now);
            beat_all(now);
            clear_stale(now);
            rg_preempt_beat();
            rg_arrivals_beat();
            rg_memory_beat();
            rg_calls_add();
            rg_clock_beat();
            rg_changed();
            beat = now;
            if (++beats % 10 == 0) {
                rg_durations_beat();
                if (deserted()) {
                    rigel_shutdown();
                    break;
                }
            }
        }
        uint64_t sleep_ns = BEAT_NS;
        bool orion = atomic_load(&rg.segment->settings.policy) == RG_POLICY_ORION;
        for (uint32_t i = 0; i < atomic_load(&rg.member_count); i++) {
            uint32_t mode = atomic_load(&rg.members[i].mode);
            uint64_t again_ns = mode & RG_MODE_HIGH                     ? watch(&rg.members[i], now)
                                : orion && (mode & RG_MODE_BEST_EFFORT) ? watch_outstanding(&rg.members[i], now)
                                                                        : BEAT_NS;
            sleep_ns = again_ns < sleep_ns ? again_ns : sleep_ns;
        }
        agent_sleep(sleep_ns);
    }
    rg_preempt_end();
    return NULL;
}

bool rg_agent_start(void)
{
    bool ok = rg_thread_start(&thread, agent_main, NULL);
    atomic_store(&started, ok);
    return ok;
}

bool rg_agent_is_self(void)
{
    return atomic_load(&started) && pthread_equal(pthread_self(), thread);
}

void rg_agent_stop(void)
{
    if (!atomic_exchange(&started, 0))
        return;
    atomic_store(&stopping, 1);
    syscall(SYS_futex, &stopping, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
    if (pthread_equal(pthread_self(), thread))
        return;
    rg_join(thread); /* or the process exits without it */
}
