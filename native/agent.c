/*
 * agent.c: one thread per client that does what must not be done on the launch path.
 *
 * Heartbeat, for everybody. For a high client also: noticing that it is idle when the program does not wait for the GPU
 * itself (it polls, uses host callbacks, or simply stops). After a spell without launches the agent records one untimed
 * event on each stream with unfinished work and asks for it until it is done.
 *
 * It works in the context the stream belongs to, never in "device 0", and in relaxed capture mode, so that nothing it does
 * counts against a capture elsewhere. It holds rg_agent_lock while it uses a stream, which keeps the stream alive and captures
 * from beginning. All signals are blocked in it: the program's handlers run in the program's threads.
 */
#include "client.h"

#include <linux/futex.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

pthread_mutex_t rg_agent_lock = PTHREAD_MUTEX_INITIALIZER;

static pthread_t thread;
static _Atomic uint32_t started, stopping;

enum { BEAT_NS = 100000000, WATCH_NS = 2000000 };

/* Sleeps up to `ns`, or until rg_agent_stop. */
static void agent_sleep(uint64_t ns)
{
    struct timespec t = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    syscall(SYS_futex, &stopping, FUTEX_WAIT_PRIVATE, 0, &t, NULL, 0);
}

/* Everything this client has ever queued; only compared for change. */
static uint64_t issued(void)
{
    rg_client *c = rg.slot;
    return atomic_load(&c->launches) + atomic_load(&c->graph_launches) + atomic_load(&c->copies) + atomic_load(&c->memsets);
}

/* Covers the track's work with an event of the agent's. */
static void cover_with_event(rg_track *t)
{
    CUcontext popped;
    if (rg_real.cuCtxPushCurrent_v2(t->context) != CUDA_SUCCESS)
        return;
    /* A per-thread stream cannot be named from here. The legacy stream waits for it (both are blocking streams). */
    CUstream stream = t->own_thread ? CU_STREAM_LEGACY : t->stream;
    if (!t->agent_event)
        rg_real.cuEventCreate(&t->agent_event, CU_EVENT_DISABLE_TIMING);
    uint64_t state = atomic_load(&t->state), token = rg_token(RG_TOKEN_EVENT);
    /* The token goes in first: a launch between it and the record makes the track dirty and the event covers too much. */
    if (t->agent_event && state != RG_CLEAN && (state & 3) != RG_TOKEN_WAIT &&
        atomic_compare_exchange_strong(&t->state, &state, token)) {
        if (RG_REAL(cuEventRecord)(t->agent_event, stream) == CUDA_SUCCESS)
            t->agent_token = token;
        else
            atomic_compare_exchange_strong(&t->state, &token, RG_DIRTY);
    }
    rg_real.cuCtxPopCurrent_v2(&popped);
}

/* Looks after every unfinished track of a high client that launches nothing at the moment. True if it ended a period. */
static void watch_tracks(void)
{
    for (uint32_t i = 0; i < atomic_load(&rg.track_count); i++) {
        rg_track *t = &rg.tracks[i];
        uint64_t done = 0;
        pthread_mutex_lock(&rg_agent_lock);
        uint64_t state = atomic_load(&t->state);
        if (atomic_load(&t->key) && !atomic_load(&rg.captures) && state != RG_CLEAN && (state & 3) != RG_TOKEN_WAIT) {
            if (state != t->agent_token)
                cover_with_event(t);
            if (atomic_load(&t->state) == t->agent_token &&
                RG_REAL(cuEventQuery)(t->agent_event) != CUDA_ERROR_NOT_READY)
                done = t->agent_token;
        }
        pthread_mutex_unlock(&rg_agent_lock);
        if (done) {
            uint64_t before = atomic_load(&rg.slot->requests);
            rg_track_finished(t, done);
            atomic_fetch_add_explicit(&rg.slot->agent_idle, atomic_load(&rg.slot->requests) != before, memory_order_relaxed);
        }
    }
}

static bool any_busy(void)
{
    for (int i = 0; i < RG_MAX_DEVICES; i++)
        if (atomic_load_explicit(&rg.busy[i], memory_order_relaxed))
            return true;
    return false;
}

/* Says again that this client is busy, should somebody have taken it for dead while it was stopped. */
static void assert_busy(void)
{
    for (int i = 0; i < RG_MAX_DEVICES; i++)
        if (atomic_load(&rg.busy[i]) && !(atomic_load(&rg.segment->devices[i].high_busy) >> rg.slot_index & 1))
            atomic_fetch_or(&rg.segment->devices[i].high_busy, 1ull << rg.slot_index);
}

static void *agent_main(void *unused)
{
    (void)unused;
    uint64_t seen = 0, seen_at = 0, beat = 0, needed_at = 0, needed = 0;
    prctl(PR_SET_NAME, "rigel-agent");
    prctl(PR_SET_TIMERSLACK, 1000);
    CUstreamCaptureMode relaxed = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (rg_real.cuThreadExchangeStreamCaptureMode)
        rg_real.cuThreadExchangeStreamCaptureMode(&relaxed);
    while (!atomic_load(&stopping) && atomic_load(&rg.mode) != RG_MODE_BARE) {
        uint64_t now = rg_now_ns();
        if (now - beat >= BEAT_NS) {
            atomic_store(&rg.slot->heartbeat_ns, now);
            assert_busy();
            beat = now;
        }
        if (atomic_load(&rg.mode) != RG_MODE_HIGH) {
            agent_sleep(BEAT_NS);
            continue;
        }
        uint64_t quiet_ns = (uint64_t)atomic_load(&rg.segment->settings.quiet_us) * 1000u;
        uint64_t n = issued();
        bool busy = any_busy();
        if (n != seen) {
            seen = n;
            seen_at = now;
        } else if (busy && now - seen_at >= quiet_ns) {
            watch_tracks();
        }
        /* Programs that wait for the GPU never need the agent, so it looks seldom; once it was needed it looks often for
         * a second, and not at all often in a program that does nothing. */
        uint64_t ended = atomic_load(&rg.slot->agent_idle);
        if (ended != needed) {
            needed = ended;
            needed_at = now;
        }
        if ((busy && now - seen_at >= quiet_ns) || (needed_at && now - needed_at < 1000000000u))
            agent_sleep(quiet_ns);
        else if (now - seen_at < 1000000000u)
            agent_sleep(WATCH_NS);
        else
            agent_sleep(BEAT_NS / 5);
    }
    return NULL;
}

bool rg_agent_start(void)
{
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    bool ok = pthread_create(&thread, NULL, agent_main, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    atomic_store(&started, ok);
    return ok;
}

void rg_agent_stop(void)
{
    if (!atomic_exchange(&started, 0))
        return;
    atomic_store(&stopping, 1);
    syscall(SYS_futex, &stopping, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
    if (pthread_equal(pthread_self(), thread))
        return;
    /* Bounded: should the driver never return to the agent, the process exits without it. */
    struct timespec limit;
    clock_gettime(CLOCK_REALTIME, &limit);
    limit.tv_nsec += 200000000;
    if (limit.tv_nsec >= 1000000000) {
        limit.tv_sec++;
        limit.tv_nsec -= 1000000000;
    }
    pthread_timedjoin_np(thread, NULL, &limit);
}
