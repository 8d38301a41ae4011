/*
 * preempt.c: keeps best-effort clients off the GPU while a high client has work, by their channels (channel.c) and stops in their streams (stop.c).
 *
 * Where it works (`rg.preemptible`), it takes the gate's place: best-effort launches go out at once, however long their kernels
 * and graphs are, and wait on the GPU instead of in the program. Three means:
 *   - time slices: long for a high client, short for a best-effort one, so that the GPU itself switches to a high client within
 *     a slice (and not back while it has work queued) from its first kernel on;
 *   - suspension: one thread per process with best-effort clients, and device, sleeps until a high client becomes busy, disables the
 *     channels, and enables them when the high client is idle, or waits for all it has launched and will be done within its slice (or has launched
 *     all that its requests usually do, and when the next request has begun by then and leaves the GPU to best-effort work for a while). That
 *     takes some 500 us and 250 us; until it holds the slices do. It keeps best-effort work out of the gaps between the launches of a
 *     request, each of which would cost the request a switch and back;
 *   - stops: its streams stop between two kernels (stop.c), at once and until the high clients are idle; where requests often follow one another at
 *     once, until none has (RG_POLICY_FOLLOWS_NS). Then suspension is for what no stop ends soon (long kernels and graphs, while a request is
 *     launched that does not launch all at once, or one may follow, or slices are long), and for requests that outlast the high client's slice.
 * Where the driver lets it control none of its channels (MPS) there are stops alone: nothing else keeps best-effort work behind what high
 * clients have queued.
 * Two best-effort clients with short slices would spend their time switching, and so would two high ones: whoever finds another
 * of its class at work on the device goes back to the driver's slice; or, if it is best-effort and suspended in longer ones, to a part of
 * those (rg_policy_peers_slice_us). Who waits for its turn (src/slo-turns.ts), as if it were paused, is at work for nobody.
 *
 * Bounds: a suspension ends when the high clients are idle, when this client leaves Rigel, and with the process. Where high clients
 * have made no break for the starvation bound, and this client has had no more than the least share (min_share_ppm, a hundredth at least) of the
 * last ten such times, it gets that share of one at once. Whatever fails, the channels are enabled and the gate holds this client
 * from then on. That the process has no channels at the moment, since its context was reset or released, is no failure: the gate
 * holds it until there are some again.
 */
#include "client.h"

#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { DRIVER_SLICE_US = 2048, WAIT_NS = 100000000, REFUSALS = 20 };
enum { LINGER_NS = 1000000 };

typedef struct {
    _Atomic bool started, suspended, failed;
    _Atomic bool stops;         /* its streams have them */
    bool stopped, channels_off; /* suspended that way, and by its channels */
    pthread_t thread;
    uint32_t device;
    CUdevice ordinal;
    pthread_mutex_t lock; /* over the channels and everything done with them */
    rg_channels channels;
    rg_channels held; /* those that were disabled */
    enum rg_found found;
    uint64_t slice_us; /* as set; 0: not by us */
    bool giving_back;  /* the slice is a longer one, for a moment */
    uint32_t refusals; /* beats in a row in which the driver refused */
    rg_op op; /* the suspension under way; only the thread's, as is the next */
    bool again; /* it goes on after a due that was given back */
    rg_policy_had had; /* only the thread's, as what follows */
    uint32_t short_gaps;   /* bit per idle time of the high clients: it was short; the last one is the lowest */
    uint64_t short_pauses; /* likewise, very short */
    uint64_t cut_after; /* 1 + when the high clients had been idle before a long slice was last cut short */
    struct {
        uint64_t after, busy, progress, at_ns; /* 1 + when the high clients had been idle; who was busy, and what that one had launched; when */
    } back; /* before the end of a request that had launched all */
    uint64_t asked; /* when the high clients had been idle before the request of which that was asked last */
    bool between; /* it comes back into a request that leaves the GPU to it for a while */
    uint64_t seen_progress, seen_ns; /* of the request under way, and since when */
} preemptor;

static preemptor preemptors[RG_MAX_DEVICES] = {[0 ... RG_MAX_DEVICES - 1] = {.lock = PTHREAD_MUTEX_INITIALIZER}};
static _Atomic bool stopping;
static uint64_t beat_launches[RG_MAX_CLIENTS];

static bool wanted(void)
{
    rg_settings *s = &rg.segment->settings;
    uint32_t policy = atomic_load(&s->policy);
    bool by_class = policy == RG_POLICY_PRIORITY || policy == RG_POLICY_SLO;
    return atomic_load(&s->preempt) && by_class && !atomic_load(&s->shutdown) &&
           rg_is_client() && !atomic_load(&stopping);
}

/* The same for suspension: a client may become a high one while it is off the GPU. */
static bool may_stand_aside(void)
{
    return wanted() && rg_member_class() != RG_CLASS_HIGH;
}

/* Its slices are those of a late suspension that is wanted no more, until the next beat, and would keep each request waiting that comes meanwhile
 * (16 ms: decoding on an H200, as policy slo gave up a trial). */
static bool long_still(const preemptor *p)
{
    uint32_t us = atomic_load(&rg_share_of(rg.segment, p->device, rg.slot_index)->slice_us);
    return us > DRIVER_SLICE_US && us > atomic_load(&rg.segment->settings.slice_us);
}

/* Whether requests suspend it. */
static bool suspends(const preemptor *p)
{
    return atomic_load(&rg.segment->settings.suspend) || long_still(p);
}

/* Whether best-effort work is to be off the device; when to look again, if nobody wakes us, in `again_ns`. */
static bool to_stand_aside(const preemptor *p, uint64_t *again_ns)
{
    const rg_device *dev = &rg.segment->devices[p->device];
    uint32_t hold_ms = atomic_load(&rg.segment->settings.hold_until_ms) ? rg_hold_left_ms(&rg.segment->settings, rg_now_ns()) : 0;
    *again_ns = hold_ms && hold_ms * 1000000ull < WAIT_NS ? hold_ms * 1000000ull : WAIT_NS;
    if (rg_member_class() == RG_CLASS_HIGH)
        return false; /* a thread has entered a high client: what is suspended is all of the process */
    if (rg_member_paused()) {
        const rg_account *account = RG_PROCESS->account;
        uint64_t left_ns = account ? rg_since(rg_now_ns(), rg_account_until(account)) : 0;
        *again_ns = left_ns && left_ns < *again_ns ? left_ns : *again_ns;
        return true;
    }
    uint64_t launching = atomic_load(&dev->high_launching) & atomic_load(&dev->high_busy);
    return hold_ms || (launching && suspends(p));
}

/* For how long a request is still waited for that a high client has said is coming, and streams stop (rigel_request_coming). */
static uint64_t coming_ns(const preemptor *p)
{
    return rg_since(rg_now_ns(), atomic_load(&rg.segment->devices[p->device].coming_until_ns));
}

/* Whether high clients may stop this process's streams by themselves: not where it gives the GPU to nobody, or has its due. Under the lock. */
static bool may_be_stopped(const preemptor *p)
{
    return atomic_load(&p->stops) && atomic_load(&rg.preemptible[p->device]) >= RG_STOPPABLE_SLICED && may_stand_aside() && !p->giving_back;
}

/* Another thread may change that, and then disarm, at any time: so it is asked again once they are armed. */
static void arm(const preemptor *p)
{
    rg_stops_arm(p->device, may_be_stopped(p));
    if (!may_be_stopped(p))
        rg_stops_arm(p->device, false);
}

/* A high client has stopped them; it is busy still, or its request is coming, and it may do that, or they go on. */
static bool was_stopped(const preemptor *p, bool act)
{
    if (atomic_load(&p->suspended) || !rg_stops_taken(p->device))
        return false;
    if (act && atomic_load(&rg.segment->settings.suspend) && (atomic_load(&rg.segment->devices[p->device].high_busy) || coming_ns(p)))
        return true;
    if (!act) /* until a beat finds that it may again */
        rg_stops_arm(p->device, false);
    rg_stops_set(p->device, false, true);
    return false;
}

static bool held_back(void)
{
    rg_settings *s = &rg.segment->settings;
    return rg_member_paused() || (atomic_load(&s->hold_until_ms) && rg_hold_left_ms(s, rg_now_ns()));
}

static void wait_on(_Atomic uint32_t *word, uint32_t value, uint64_t ns)
{
    struct timespec t = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    syscall(SYS_futex, word, FUTEX_WAIT, value, &t, NULL, 0);
}

static void wake(_Atomic uint32_t *word)
{
    atomic_fetch_add(word, 1);
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Looks the channels up again if the process made or freed some, of which the simulated GPU does not tell. */
static enum rg_found refresh(preemptor *p)
{
    if (p->found == RG_CHANNELS_FOUND && !p->channels.simulated && p->channels.generation == rg_channel_generation())
        return p->found;
    p->found = rg_channels_find(&p->channels, rg.segment->devices[p->device].uuid, p->ordinal);
    if (!p->channels.simulated)
        p->slice_us = 0;
    return p->found;
}

/* Whether this process can be taken off a device, for each of its clients: they have the same channels. A client as a whole can
 * be if it can on every device that it uses. */
static void say(uint32_t device, uint32_t preemption)
{
    for (uint32_t k = 0; k < atomic_load(&rg.member_count); k++) {
        const rg_member *m = &rg.members[k];
        if (k && !atomic_load(&m->mode))
            continue; /* it has no slot */
        atomic_store(&rg_share_of(rg.segment, device, m->slot_index)->preemption, preemption);
        uint32_t all = RG_PREEMPTION_ON, devices = atomic_load(&m->slot->devices);
        for (uint32_t d = 0; d < RG_MAX_DEVICES; d++) {
            uint32_t there = devices >> d & 1 ? atomic_load(&rg_share_of(rg.segment, d, m->slot_index)->preemption) : RG_PREEMPTION_ON;
            if (there == RG_PREEMPTION_STOPS && all != RG_PREEMPTION_OFF)
                all = RG_PREEMPTION_STOPS;
            else if (there != RG_PREEMPTION_ON)
                all = RG_PREEMPTION_OFF;
        }
        atomic_store(&m->slot->preemption, devices ? all : RG_PREEMPTION_UNKNOWN);
    }
}

static bool slice(preemptor *p, uint64_t us)
{
    if (p->slice_us != us && rg_channels_slice(&p->channels, us) != 0)
        return false;
    p->slice_us = us;
    for (uint32_t k = 0; k < atomic_load(&rg.member_count); k++)
        if (!k || atomic_load(&rg.members[k].mode)) /* else it has no slot */
            atomic_store(&rg_share_of(rg.segment, p->device, rg.members[k].slot_index)->slice_us, (uint32_t)us);
    atomic_store(&rg.slot->slice_us, (uint32_t)us);
    return true;
}

/* ---- suspension ---- */

/* Not in this process any more: the gate holds it from now on. */
static void fail(preemptor *p)
{
    atomic_store(&p->failed, true);
    atomic_store(&rg.preemptible[p->device], 0);
    rg_stops_arm(p->device, false);
    say(p->device, RG_PREEMPTION_OFF);
}

/*
 * For how long at most the client's requests on that device launched, and waited for all that, of the last ones; false: none is known that is not old.
 * Of a request that waits several times it is known only for how long in all.
 */
static bool lately(const rg_client *c, uint32_t device, uint64_t now, uint64_t *worked_ns, uint64_t *wait_ns)
{
    enum { LATELY = 4 };
    const uint64_t FRESH_NS = 30000000000ull; /* programs that warm up take longer than they do later */
    uint64_t n = atomic_load(&c->waited);
    uint32_t seen = 0;
    *worked_ns = *wait_ns = 0;
    for (uint64_t i = n; i > 0 && n - i < RG_WAITED / 2 && seen < LATELY; i--) {
        uint64_t at = (i - 1) % RG_WAITED, entry = atomic_load_explicit(&c->waited_ring[at], memory_order_relaxed);
        if (rg_since(atomic_load_explicit(&c->began_ring[at], memory_order_relaxed), now) > FRESH_NS)
            break;
        if ((entry & 15) != device)
            continue;
        uint64_t worked, wait;
        rg_waited_times(entry, &worked, &wait);
        *worked_ns = worked > *worked_ns ? worked : *worked_ns;
        *wait_ns = wait > *wait_ns ? wait : *wait_ns;
        seen++;
    }
    return seen;
}

/*
 * Whether high clients wait for so much, as they did lately, that they may need the GPU for longer than their slice; best-effort work has been
 * off it `since`.
 */
static bool outlasts_slice(const preemptor *p, uint64_t since)
{
    rg_device *dev = &rg.segment->devices[p->device];
    rg_settings *s = &rg.segment->settings;
    uint64_t now = rg_now_ns(), busy = suspends(p) ? atomic_load(&dev->high_busy) : 0;
    for (; busy; busy &= busy - 1) {
        int slot = __builtin_ctzll(busy);
        const rg_share *share = rg_share_of(rg.segment, p->device, slot);
        uint64_t worked_ns, wait_ns, began = atomic_load(&share->began_ns);
        uint64_t kept_ns = rg_since(began > since ? began : since, now);
        uint32_t slice_us = atomic_load(&share->slice_us);
        lately(&rg.segment->clients[slot], p->device, now, &worked_ns, &wait_ns);
        if (rg_policy_outlasts(kept_ns, wait_ns, (slice_us ? slice_us : atomic_load(&s->high_slice_us)) * 1000ull))
            return true;
    }
    return false;
}

/* For how long the requests that launch may still do so and be such as leave the GPU to nobody before they end (rg_policy_brief); 0: not all are. */
static uint64_t brief_ns(const preemptor *p)
{
    const rg_device *dev = &rg.segment->devices[p->device];
    uint64_t now = rg_now_ns(), launching = atomic_load(&dev->high_launching) & atomic_load(&dev->high_busy), least_ns = launching ? WAIT_NS : 0;
    for (; launching && least_ns; launching &= launching - 1) {
        int slot = __builtin_ctzll(launching);
        uint64_t worked_ns, wait_ns, began = atomic_load(&rg_share_of(rg.segment, p->device, slot)->began_ns);
        bool known = lately(&rg.segment->clients[slot], p->device, now, &worked_ns, &wait_ns);
        uint64_t left_ns = began && known ? rg_policy_brief(rg_since(began, now), worked_ns) : 0; /* it has just ended; or none is known */
        least_ns = left_ns < least_ns ? left_ns : least_ns;
    }
    return least_ns;
}

/*
 * Programs that wait for the GPU in the middle of what they do (a token of a decoding loop, a step of a solver) are idle for an
 * instant many times a request. To come back in each would cost the next part a switch. So where half of the last idle times
 * were shorter than LINGER_NS, the next one is waited for that long before it is believed.
 */
static bool bursts(const preemptor *p)
{
    return __builtin_popcount(p->short_gaps & 0xff) >= 4;
}

/* They are at work again, and had been idle. A hold is none of theirs. */
static void note_pause(preemptor *p)
{
    uint64_t idle = atomic_load(&rg.segment->devices[p->device].idle_ns);
    if (!held_back())
        p->short_pauses = p->short_pauses << 1 | (idle && rg_since(idle, rg_now_ns()) < RG_POLICY_SHORT_PAUSE_NS);
}

/* Whether the next request is expected at once, and best-effort work stays off the GPU for that. Who gives way late leaves it most of that one anyway. */
static bool follows(const preemptor *p)
{
    bool sliced = atomic_load(&rg.preemptible[p->device]) == RG_STOPPABLE_SLICED; /* under MPS nothing is exchanged */
    return p->stopped && sliced && rg_gives_way_at_once(&rg.segment->settings) && rg_policy_follows(p->short_pauses);
}

/*
 * Where its streams stop: that is not enough. Between its launches a request leaves the GPU to what runs, which slices end as it waits; and
 * what they have interrupted is back after each slice of a high client, and in each pause of one that waits time and again in the middle of what it does.
 */
static bool suspends_too(const preemptor *p)
{
    uint64_t again_ns;
    uint32_t slice_us = atomic_load(&rg_share_of(rg.segment, p->device, rg.slot_index)->slice_us); /* p->slice_us is under the lock */
    return outlasts_slice(p, rg_now_ns()) ||
           (rg_stops_long(p->device) &&
            (slice_us > RG_POLICY_SHORT_SLICE_US || (to_stand_aside(p, &again_ns) && (held_back() || (bursts(p) && follows(p)) || !brief_ns(p)))));
}

/* Whether the driver has done it; counted if it took long. */
static bool switch_channels(const rg_channels *channels, bool on)
{
    uint64_t began_ns = rg_now_ns();
    bool ok = (on ? rg_channels_resume(channels) : rg_channels_suspend(channels)) == 0;
    if (rg_now_ns() - began_ns >= RG_POLICY_SLOW_CALL_NS)
        atomic_fetch_add_explicit(&rg.slot->slow_calls, 1, memory_order_relaxed);
    return ok;
}

/*
 * Disables the channels as they are known; under the lock. False if the driver refused; some of them may be off then, and that counts as all of them
 * (channels_off) until they are not.
 */
static bool disable(preemptor *p)
{
    p->held = p->channels;
    p->channels_off = true; /* whoever ends meanwhile has to enable them */
    bool ok = switch_channels(&p->held, false);
    p->channels_off = ok || !switch_channels(&p->held, true);
    return ok;
}

/*
 * False if it is not off the GPU: since there is nothing to suspend, and the gate holds it until a beat finds something; or refused. Its streams stop
 * before it has the lock, which the agent may have for as long as the driver takes to set slices: up to 100 ms while programs start on some GPU. So do
 * they go on (resume): that they stop is this thread's alone.
 */
static bool suspend(preemptor *p)
{
    uint64_t since = rg_now_ns();
    bool stopped = atomic_load(&p->stops) && !atomic_load(&stopping) && rg_stops_set(p->device, true, true);
    pthread_mutex_lock(&p->lock);
    enum rg_found found = atomic_load(&stopping) ? RG_CHANNELS_NONE : refresh(p);
    bool ok = false, off = false;
    p->stopped = stopped && found != RG_CHANNELS_NONE;
    if (stopped && !p->stopped)
        rg_stops_set(p->device, false, true);
    p->channels_off = false;
    if (found == RG_CHANNELS_FOUND && (!p->stopped || suspends_too(p))) {
        ok = disable(p);
        off = p->channels_off;
        if (!ok)
            found = refresh(p); /* they may have gone just now */
    }
    if (p->stopped)
        ok = off = true;
    if (off) {
        p->op = rg_wait_op(RG_OP_suspended, p->device);
        rg_policy_off(&p->had, atomic_load(&rg.segment->devices[p->device].idle_ns), since);
    }
    atomic_store(&p->suspended, off);
    pthread_mutex_unlock(&p->lock);
    if (!ok && found != RG_CHANNELS_FOUND) /* there is nothing at the moment, neither channels nor stops */
        atomic_store(&rg.preemptible[p->device], 0);
    else if (!ok)
        fail(p);
    return ok;
}

/* Its channels alone: whether they are on again. */
static bool enable(preemptor *p)
{
    pthread_mutex_lock(&p->lock);
    p->channels_off = !switch_channels(&p->held, true);
    pthread_mutex_unlock(&p->lock);
    return !p->channels_off;
}

/* Whether its streams stop, its channels are on, and that could be changed. */
static bool could_suspend_too(const preemptor *p)
{
    return p->stopped && !p->channels_off && atomic_load(&rg.preemptible[p->device]) == RG_STOPPABLE_SLICED;
}

/* Off the GPU, too, where its streams stop already: if that is wanted still once it has the lock. */
static void disable_too(preemptor *p)
{
    pthread_mutex_lock(&p->lock);
    if (!atomic_load(&stopping) && suspends_too(p) && refresh(p) == RG_CHANNELS_FOUND)
        disable(p);
    pthread_mutex_unlock(&p->lock);
}

/*
 * Enables what was disabled, whatever the process has made or freed meanwhile: those channels as they were known then, and those
 * there are now. If the driver refuses, the client counts as suspended still, and preempt_main tries again.
 */
static void resume(preemptor *p)
{
    if (!atomic_load(&p->suspended)) /* which nobody else changes; the lock may be long in coming (suspend) */
        return;
    if (p->stopped)
        rg_stops_set(p->device, false, true);
    p->stopped = false;
    pthread_mutex_lock(&p->lock);
    bool refused = p->channels_off && !switch_channels(&p->held, true);
    if (refused) /* they may be gone, with their context */
        refused = refresh(p) == RG_CHANNELS_FOUND && !switch_channels(&p->channels, true);
    atomic_store(&p->suspended, refused);
    p->channels_off = refused;
    if (!refused) {
        rg_op_end(&p->op, RG_TRACE_suspension, p->again ? RG_RECORD_CONTINUED : 0, p->device);
        rg_policy_on(&p->had, !p->between && atomic_load(&rg.segment->devices[p->device].high_busy), rg_now_ns());
    } else {
        fail(p);
    }
    pthread_mutex_unlock(&p->lock);
}

/* Whether high clients have made a break, as the least share counts them: programs that wait for each of their steps make none. */
static bool rested(rg_device *dev, uint64_t now)
{
    uint64_t idle = atomic_load(&dev->idle_ns); /* may be later than `now` */
    return !atomic_load(&dev->high_busy) && now > idle && now - idle >= RG_POLICY_BREAK_NS;
}

static rg_policy_due_view due_view(const preemptor *p)
{
    const rg_device *dev = &rg.segment->devices[p->device];
    const rg_settings *s = &rg.segment->settings;
    uint32_t slice_us = atomic_load(&rg_share_of(rg.segment, p->device, rg.slot_index)->slice_us); /* 0: there are none, or not by us */
    uint32_t starvation_us = atomic_load(&s->starvation_us);
    return (rg_policy_due_view){
        .spell_ns = atomic_load(&dev->spell_ns),
        .idle_ns = atomic_load(&dev->idle_ns),
        .short_slices = (slice_us && slice_us <= RG_POLICY_SHORT_SLICE_US) || !atomic_load(&s->suspend),
        .starvation_ns = (uint64_t)starvation_us * 1000u,
        .period_ns = rg_policy_share_period(starvation_us, atomic_load(&s->share_period_us)),
        .min_share_ppm = atomic_load(&s->min_share_ppm),
    };
}

/*
 * Whether high clients have gone on without a break for the starvation bound, since this client last had its due, a period ago or more, and it has had
 * no more than its share lately; or when that can be.
 */
static bool is_due(preemptor *p, uint64_t *left_ns)
{
    rg_device *dev = &rg.segment->devices[p->device];
    rg_policy_due_view v = due_view(p);
    uint64_t now = rg_now_ns();
    rg_policy_count(&p->had, &v, now);
    *left_ns = WAIT_NS;
    if (!v.spell_ns || rested(dev, now))
        return false;
    bool runs = !p->had.off && !v.short_slices;
    uint64_t in_ns = rg_policy_due_in(&p->had, &v, runs, now);
    *left_ns = in_ns < WAIT_NS ? in_ns : WAIT_NS;
    return !in_ns;
}

/* This client runs for its due, in a slice that a busy high client cannot cut short, or beside it. */
static void give_back(preemptor *p)
{
    rg_device *dev = &rg.segment->devices[p->device];
    rg_settings *s = &rg.segment->settings;
    rg_policy_due_view v = due_view(p);
    uint64_t away_ns = rg_policy_away(&p->had, &v, rg_now_ns());
    pthread_mutex_lock(&p->lock);
    bool beside = p->found != RG_CHANNELS_FOUND; /* where there are no slices */
    uint64_t high_ns = beside ? 0 : (uint64_t)atomic_load(&s->high_slice_us) * 1000u;
    uint64_t due_ns = beside ? rg_policy_due_beside(away_ns, v.min_share_ppm) : rg_policy_due(away_ns, high_ns, v.min_share_ppm);
    uint64_t usual = p->slice_us;
    p->giving_back = true;
    rg_stops_arm(p->device, false);
    if (p->found == RG_CHANNELS_FOUND)
        slice(p, due_ns / 1000 > RG_POLICY_LEAST_SLICE_US ? due_ns / 1000 : RG_POLICY_LEAST_SLICE_US);
    pthread_mutex_unlock(&p->lock);
    resume(p);
    atomic_fetch_add_explicit(&rg.slot->starved, 1, memory_order_relaxed);
    /* Only a break in high work ends this before its time. That is looked for, so that no high client has to wake anybody. */
    for (uint64_t now = rg_now_ns(), end = now + due_ns + high_ns; now < end; now = rg_now_ns()) {
        if (rested(dev, now) || !may_stand_aside() || held_back())
            break;
        uint64_t left_ns = end - now;
        wait_on(&dev->wake, atomic_load(&dev->wake), left_ns < RG_POLICY_BREAK_NS ? left_ns : RG_POLICY_BREAK_NS);
    }
    pthread_mutex_lock(&p->lock);
    p->giving_back = false;
    arm(p);
    if (p->found == RG_CHANNELS_FOUND && usual)
        slice(p, usual);
    pthread_mutex_unlock(&p->lock);
    p->had.given_ns = rg_now_ns();
    p->had.credit_ns = 0;
}

/* ---- when to come back ---- */

/* Whether its streams stop for a request that is coming. */
static bool stops_for_coming(const preemptor *p)
{
    return atomic_load(&p->stops) && (!p->channels_off || follows(p)) && suspends(p) && !held_back() && coming_ns(p);
}

/*
 * True if high clients are at work again, or are said to be soon, before they have been idle for that long; not later than `deadline`, and not where
 * suspension is no longer wanted. One that had launched all before this thread was awake is at work all the same.
 */
static bool linger(preemptor *p, uint64_t stay_ns, uint64_t deadline)
{
    rg_device *dev = &rg.segment->devices[p->device];
    uint64_t until = 0, again_ns;
    for (;;) {
        uint32_t seen = atomic_load(&dev->busy_wake);
        uint64_t now = rg_now_ns();
        bool busy = atomic_load(&dev->high_busy);
        if (to_stand_aside(p, &again_ns) || (until && busy) || stops_for_coming(p))
            return true;
        if (now >= deadline || !may_stand_aside() || !atomic_load(&rg.segment->settings.suspend))
            return false;
        /* What it waits for may take long; counted is from when that is done. */
        if (!busy)
            until = atomic_load(&dev->idle_ns) + stay_ns;
        if (until && now >= until)
            return false;
        atomic_fetch_add(&dev->busy_waiters, 1);
        if (!to_stand_aside(p, &again_ns))
            wait_on(&dev->busy_wake, seen, until ? until - now : LINGER_NS / 10);
        atomic_fetch_sub(&dev->busy_waiters, 1);
    }
}

/*
 * Whether to stay off the GPU though they only wait. Streams that stop are back at once, so they stop for as long as there is work; what is suspended
 * besides comes back meanwhile, unless that would be in the way of the next request.
 */
static bool outlasts(const preemptor *p, uint64_t since)
{
    if (atomic_load(&p->stops) && (!p->channels_off || follows(p)))
        return (suspends(p) && atomic_load(&rg.segment->devices[p->device].high_busy)) || stops_for_coming(p);
    return outlasts_slice(p, since);
}

/*
 * Whether all that high clients are at has begun since best-effort work was taken off the GPU, and leaves it to it for so long that to come back for
 * that is worth it: where one request follows another at once it has begun before this thread is awake.
 */
static bool comes_between(preemptor *p, uint64_t since)
{
    const rg_device *dev = &rg.segment->devices[p->device];
    uint64_t now = rg_now_ns(), idle = atomic_load(&dev->idle_ns), look_ns;
    if (idle <= since || idle == p->asked || !atomic_load(&dev->high_busy) || held_back())
        return false;
    p->asked = idle; /* once: that it takes longer than it seemed to is no reason to come back amid it */
    return rg_device_until_late(rg.segment, p->device, now, rg_since(idle, now), &look_ns) >= RG_POLICY_BETWEEN_NS;
}

/* The client at work on the device, where it is the only one and its requests launch `usual`, each; what it has launched, and in the one under way; or -1. */
static int regular_client(const preemptor *p, uint64_t *progress, uint64_t *made, uint32_t *usual)
{
    uint64_t busy = atomic_load(&rg.segment->devices[p->device].high_busy);
    if (!busy || busy & (busy - 1))
        return -1;
    int slot = __builtin_ctzll(busy);
    const rg_share *share = rg_share_of(rg.segment, p->device, slot);
    uint64_t began = atomic_load(&share->began_launches);
    *progress = rg_progress(&rg.segment->clients[slot]);
    *made = *progress > began ? *progress - began : 0;
    *usual = atomic_load(&share->usual_launches);
    return rg_policy_regular(*usual, atomic_load(&share->usual_votes)) && atomic_load(&share->alike) ? slot : -1;
}

/* Whether it is back before the end of the request under way, which has launched more since, or not. */
static bool came_back_early(const preemptor *p, bool more)
{
    const rg_device *dev = &rg.segment->devices[p->device];
    uint64_t busy = atomic_load(&dev->high_busy);
    return p->back.after == atomic_load(&dev->idle_ns) + 1 && busy == p->back.busy &&
           (p->back.progress != rg_progress(&rg.segment->clients[__builtin_ctzll(busy)])) == more;
}

/*
 * Whether the request under way has launched all that those like it do, though its program does not wait for it yet; or when to look again: later
 * and later where it launches nothing. Best-effort work that begins to come back then is there as the GPU is done, in place of 0.4 ms later.
 */
static bool has_launched_all(preemptor *p, uint64_t since, uint64_t *look_ns)
{
    enum { LEAST_NS = 20000 };
    const rg_device *dev = &rg.segment->devices[p->device];
    uint64_t made, progress, now = rg_now_ns(), idle = atomic_load(&dev->idle_ns);
    uint32_t usual;
    bool may = p->channels_off && !p->stopped && !bursts(p) && !held_back();
    int slot = may ? regular_client(p, &progress, &made, &usual) : -1;
    *look_ns = WAIT_NS;
    if (slot < 0 || made > usual)
        return false;
    const rg_share *share = rg_share_of(rg.segment, p->device, slot);
    if (made == usual) {
        if (outlasts_slice(p, since) || atomic_load(&dev->idle_ns) != idle)
            return false;
        p->back.after = idle + 1;
        p->back.busy = 1ull << slot;
        p->back.progress = progress;
        p->back.at_ns = now;
        return true;
    }
    if (progress != p->seen_progress)
        p->seen_ns = now;
    p->seen_progress = progress;
    uint64_t began = atomic_load(&share->began_ns), spent = began ? rg_since(began, now) : 0, least_ns = LEAST_NS + (now - p->seen_ns) / 4;
    uint64_t left_ns = rg_policy_until_late(made, usual, spent, atomic_load(&share->usual_ns), 0, 1) / 2;
    left_ns = left_ns < least_ns ? least_ns : left_ns;
    *look_ns = left_ns < WAIT_NS ? left_ns : WAIT_NS;
    return false;
}

/* Adds what it has been off the GPU for since it was counted last. */
static void count_off(uint64_t *counted)
{
    uint64_t now = rg_now_ns();
    atomic_fetch_add_explicit(&rg.slot->suspended_ns, now - *counted, memory_order_relaxed);
    *counted = now;
}

/* Off the GPU until no high client is busy. */
static void stand_aside(preemptor *p)
{
    rg_device *dev = &rg.segment->devices[p->device];
    const uint64_t OFTEN_NS = 250000000; /* who looks once a second is to see what belongs to that second, or most of it */
    uint64_t since = rg_now_ns(), counted = since, again_ns, left_ns, look_ns, idle = atomic_load(&dev->idle_ns);
    uint64_t enabled_ns = 0; /* since when the channels are on, though its streams stop, and high clients only wait */
    bool may_suspend_too;    /* if what is under way launches for longer than it seemed to */
    p->back.after = came_back_early(p, false) ? p->back.after : 0; /* else it has gone on after all, or is over */
    p->cut_after = idle + 1; /* and is not cut short when it is back */
    p->short_gaps = p->short_gaps << 1 | (idle && since - idle < LINGER_NS);
    note_pause(p);
    p->again = false;
    if (!suspend(p))
        return;
    atomic_fetch_add_explicit(&rg.slot->suspensions, 1, memory_order_relaxed);
    may_suspend_too = could_suspend_too(p);
    while (may_stand_aside()) {
        uint32_t seen = atomic_load(&dev->wake);
        if (p->stopped && !rg_stops_taken(p->device))
            break; /* there are no stops any more: it is looked for what else there is */
        if (rg_now_ns() - counted > OFTEN_NS) /* high clients that never rest, or a pause */
            count_off(&counted);
        if (held_back())
            p->had.given_ns = rg_now_ns(); /* a hold is short, and meant, and a pause is asked for */
        if (is_due(p, &left_ns)) {
            count_off(&counted);
            give_back(p);
            since = counted = rg_now_ns();
            if (atomic_load(&p->suspended)) /* it was refused, and has to be tried again */
                break;
            if ((!to_stand_aside(p, &again_ns) && !outlasts(p, since)) || !may_stand_aside())
                break;
            p->again = true;
            if (!suspend(p))
                break;
            may_suspend_too = could_suspend_too(p);
            continue;
        }
        if (!to_stand_aside(p, &again_ns)) {
            if (outlasts(p, since)) { /* no more comes of them, but for the end of what they wait for */
                if (!enabled_ns && may_suspend_too && could_suspend_too(p) && rg_stops_long(p->device))
                    enabled_ns = rg_now_ns();
                atomic_fetch_add(&dev->waiters, 1);
                look_ns = enabled_ns ? LINGER_NS / 10 + (rg_now_ns() - enabled_ns) / 4 : WAIT_NS; /* that it launches again would wake nobody */
                left_ns = left_ns < look_ns ? left_ns : look_ns;
                look_ns = atomic_load(&dev->high_busy) ? WAIT_NS : coming_ns(p); /* that it does not come would wake nobody */
                left_ns = left_ns < look_ns ? left_ns : look_ns;
                if (left_ns && may_stand_aside())
                    wait_on(&dev->wake, seen, left_ns);
                atomic_fetch_sub(&dev->waiters, 1);
                continue;
            }
            bool more = follows(p) && linger(p, RG_POLICY_FOLLOWS_NS, rg_now_ns() + left_ns);
            /* Each call to let it back, and off again, delays a request; and what little it gets done in between brings it back for the next one. */
            if (!more && p->channels_off && bursts(p) && follows(p))
                more = linger(p, LINGER_NS, rg_now_ns() + left_ns);
            if (!more && p->stopped && p->channels_off && enable(p)) {
                enabled_ns = rg_now_ns(); /* its streams stop still */
                continue;
            }
            if (!more && !bursts(p))
                break;
            more = more || linger(p, LINGER_NS, rg_now_ns() + left_ns);
            p->short_gaps = p->short_gaps << 1 | more;
            if (!more)
                break;
            note_pause(p);
            may_suspend_too = could_suspend_too(p);
            continue;
        }
        p->between = comes_between(p, since);
        if (p->between || has_launched_all(p, since, &look_ns))
            break;
        may_suspend_too |= enabled_ns != 0;
        enabled_ns = 0;
        bool could = may_suspend_too && could_suspend_too(p);
        /* Looked at first: a request that is brief no more by the look of suspends_too is suspended for, and one that is brief still is looked at again. */
        uint64_t still_brief_ns = could ? brief_ns(p) : 0;
        if (could && suspends_too(p))
            disable_too(p); /* what it was off for is back, in the way of the next request: one graph of GPT-2's training, for a slice of 16 ms */
        may_suspend_too = still_brief_ns;
        look_ns = may_suspend_too && still_brief_ns < look_ns ? still_brief_ns : look_ns;
        left_ns = left_ns < look_ns ? left_ns : look_ns;
        atomic_fetch_add(&dev->waiters, 1);
        if (to_stand_aside(p, &again_ns))
            wait_on(&dev->wake, seen, left_ns < again_ns ? left_ns : again_ns);
        atomic_fetch_sub(&dev->waiters, 1);
    }
    bool off = atomic_load(&p->suspended);
    uint64_t until = rg_now_ns();
    resume(p);
    p->between = false;
    if (off)
        atomic_fetch_add_explicit(&rg.slot->suspended_ns, until - counted, memory_order_relaxed);
}

/*
 * A request waits before best-effort work was suspended: a long slice is cut short, once for all that goes on without a break, and none is
 * let into requests that outlast the high client's.
 */
static bool cuts_short(preemptor *p)
{
    rg_settings *s = &rg.segment->settings;
    rg_device *dev = &rg.segment->devices[p->device];
    uint64_t busy = atomic_load(&dev->high_busy), idle = atomic_load(&dev->idle_ns);
    bool waits = busy && !(atomic_load(&dev->high_launching) & busy);
    if (waits && came_back_early(p, true)) {
        p->back.after = 0;
        p->cut_after = 0; /* of what it has launched since nothing may have run */
    }
    if (!waits || !suspends(p) || p->cut_after == idle + 1 || !may_stand_aside() ||
        (atomic_load(&s->slice_us) <= RG_POLICY_SHORT_SLICE_US && !long_still(p) && !outlasts(p, rg_now_ns())))
        return false;
    p->cut_after = idle + 1;
    return true;
}

/*
 * Whether the high clients' work is still there to stand aside for when it is far enough (rg_device_until_late). Most requests launch for longer
 * than the GPU needs for what they launch (ResNet-50, batch 4, on an H200: 2.6 ms and 1.2 ms), so the GPU may begin late and still be
 * done when the last launch is: what best-effort work gets of the GPU until then costs the request nothing. A request that waits
 * for what it has launched sooner gets the GPU within a slice, and keeps it; a long slice ends with a suspension for that. A request that
 * comes to nothing (its launches stop for the starvation bound) is stood aside for.
 */
static bool still_there(preemptor *p)
{
    enum { LOOK_NS = 100000, MOST_NS = 300000 };
    rg_settings *s = &rg.segment->settings;
    rg_device *dev = &rg.segment->devices[p->device];
    uint64_t again_ns, left_ns, since = rg_now_ns();
    for (;;) {
        uint32_t seen = atomic_load(&dev->wake);
        uint64_t spent = rg_now_ns() - since, most = (uint64_t)atomic_load(&s->starvation_us) * 1000u;
        bool late = !rg_device_until_late(rg.segment, p->device, since + spent, spent, &left_ns);
        if (!to_stand_aside(p, &again_ns))
            return cuts_short(p);
        if (late && spent < most && may_stand_aside() && !held_back() && came_back_early(p, false)) {
            uint64_t look_ns = LOOK_NS + (rg_now_ns() - p->back.at_ns) / 4; /* nobody wakes it, whatever begins */
            wait_on(&dev->wake, seen, look_ns < MOST_NS ? look_ns : MOST_NS);
            continue;
        }
        if (late || spent >= most || !may_stand_aside() || held_back())
            return true;
        left_ns = left_ns < most - spent ? left_ns : most - spent;
        atomic_fetch_add(&dev->waiters, 1);
        if (to_stand_aside(p, &again_ns))
            wait_on(&dev->wake, seen, left_ns < again_ns ? left_ns : again_ns);
        atomic_fetch_sub(&dev->waiters, 1);
    }
}

static void *preempt_main(void *argument)
{
    preemptor *p = argument;
    rg_device *dev = &rg.segment->devices[p->device];
    rg_thread_is_prompt("rigel-preempt");
    while (!atomic_load(&stopping) && rg_is_client()) {
        uint64_t again_ns, left_ns = WAIT_NS;
        uint32_t seen = atomic_load(&dev->busy_wake);
        bool act = !atomic_load(&p->failed) && atomic_load(&rg.preemptible[p->device]) && may_stand_aside();
        if (act && is_due(p, &left_ns)) {
            give_back(p);
            continue;
        }
        if (act && to_stand_aside(p, &again_ns)) {
            if (still_there(p))
                stand_aside(p);
            continue;
        }
        resume(p); /* of which nothing is left to do, unless the driver refused it */
        if (act && !atomic_load(&dev->high_busy) && coming_ns(p))
            rg_stop_best_effort(rg.segment, p->device); /* it was said as they went on */
        bool stopped = was_stopped(p, act);
        if (!act) {
            wait_on(&dev->busy_wake, seen, WAIT_NS);
            continue;
        }
        if (stopped || cuts_short(p)) { /* it had launched all before this thread was awake */
            stand_aside(p);
            continue;
        }
        /* Again after it is said that somebody waits: a high client looks for that once it has said that it launches. */
        atomic_fetch_add(&dev->busy_waiters, 1);
        if (!to_stand_aside(p, &again_ns) && !rg_stops_taken(p->device))
            wait_on(&dev->busy_wake, seen, left_ns);
        atomic_fetch_sub(&dev->busy_waiters, 1);
    }
    resume(p);
    return NULL;
}

/* ---- the agent's part ---- */

/* Who of this class, other than this client and those that wait for their turn, has launched something since the last beat. */
static uint32_t peers(uint32_t device, uint32_t class)
{
    uint64_t waits = rg_slots_until(rg_account_turn); /* for their turn, off the GPU */
    uint32_t n = 0;
    for (int i = 0; i < RG_MAX_CLIENTS; i++) {
        rg_client *c = &rg.segment->clients[i];
        if (atomic_load(&c->owner) == atomic_load(&rg.slot->owner) || atomic_load(&c->state) != RG_LIVE ||
            atomic_load(&c->class) != class || !(atomic_load(&c->devices) >> device & 1) || waits >> i & 1)
            continue;
        uint64_t launches = rg_progress(c);
        n += launches != beat_launches[i];
    }
    return n;
}

/* What this process has launched, as all of its clients. */
static uint64_t launched(void)
{
    uint64_t n = 0;
    for (uint32_t k = 0; k < atomic_load(&rg.member_count); k++) {
        const rg_member *m = &rg.members[k];
        if (!k || atomic_load(&m->mode)) /* else it has no slot */
            n += rg_progress(m->slot);
    }
    return n;
}

static void start(preemptor *p)
{
    bool ok = rg_thread_start(&p->thread, preempt_main, p);
    atomic_store(&p->started, ok);
    if (!ok)
        fail(p);
}

/*
 * Nobody but high clients, of which it is none, may share the device with this process: whoever looks after the segment has seen no stranger
 * on it, and the segment has no other client there, at work or not: one that gets nothing done launches nothing either.
 */
static bool has_it_to_itself(uint32_t device, uint32_t class)
{
    if (rg_now_ns() >= atomic_load(&rg.segment->devices[device].own_until_ns))
        return false;
    for (int i = 0; i < RG_MAX_CLIENTS; i++) {
        rg_client *c = &rg.segment->clients[i];
        if (atomic_load(&c->owner) != atomic_load(&rg.slot->owner) && atomic_load(&c->state) == RG_LIVE &&
            (class == RG_CLASS_HIGH || atomic_load(&c->class) != RG_CLASS_HIGH) && atomic_load(&c->devices) >> device & 1)
            return false;
    }
    return true;
}

/* Whether a high client has had work there in the last seconds, or has some. */
static bool has_high_work(const rg_device *dev)
{
    const uint64_t LATELY_NS = 5000000000ull;
    uint64_t idle = atomic_load(&dev->idle_ns);
    return atomic_load(&dev->high_busy) || (idle && rg_since(idle, rg_now_ns()) < LATELY_NS);
}

/*
 * How long the slices of a client of this class are to be. Beside strangers short ones cost it and them much of the GPU: it has them for high clients
 * that are at work, not for those that may come.
 */
static uint64_t wanted_slice_us(uint32_t device, uint32_t class)
{
    rg_settings *s = &rg.segment->settings;
    uint64_t us = class == RG_CLASS_HIGH ? atomic_load(&s->high_slice_us) : atomic_load(&s->slice_us);
    uint32_t others = rg_member_paused() ? 0 : peers(device, class); /* as it is to be when its turn comes: then nobody is there to set it at once */
    if (others)
        return class == RG_CLASS_HIGH || !atomic_load(&s->suspend) ? DRIVER_SLICE_US : rg_policy_peers_slice_us(us, others, DRIVER_SLICE_US);
    if (us >= RG_POLICY_LEAST_SLICE_US || has_it_to_itself(device, class))
        return us;
    return class == RG_CLASS_HIGH || has_high_work(&rg.segment->devices[device]) ? RG_POLICY_LEAST_SLICE_US : DRIVER_SLICE_US;
}

void rg_preempt_beat(void)
{
    uint32_t class = rg_member_class(), devices = atomic_load(&rg.slot->devices);
    for (uint32_t d = 0; d < RG_MAX_DEVICES; d++) {
        preemptor *p = &preemptors[d];
        if (!(devices >> d & 1))
            continue;
        if (atomic_load(&p->failed)) {
            pthread_mutex_lock(&p->lock);
            if (p->slice_us && p->found == RG_CHANNELS_FOUND)
                slice(p, DRIVER_SLICE_US);
            pthread_mutex_unlock(&p->lock);
            fail(p);
            continue;
        }
        if (!atomic_load(&p->started))
            p->device = d;
        bool on = wanted();
        uint64_t wanted_us = wanted_slice_us(d, class);
        bool ok = false;
        /* Before the lock, without which its channels do not come back: the driver may make it wait for what the GPU has to do first. */
        enum rg_stops ready = on && class == RG_CLASS_BEST_EFFORT ? rg_stops_ready(d) : RG_STOPS_NONE;
        pthread_mutex_lock(&p->lock);
        p->ordinal = atomic_load(&rg.ordinal[d]);
        if (p->channels.simulated && p->slice_us && !p->giving_back)
            p->slice_us = on ? 0 : p->slice_us; /* it does not tell of new contexts: set the slice of all again */
        if (on && p->giving_back && p->found == RG_CHANNELS_FOUND)
            ok = true;
        else if (on || p->slice_us)
            ok = refresh(p) == RG_CHANNELS_FOUND && slice(p, on ? wanted_us : DRIVER_SLICE_US);
        bool none = p->found != RG_CHANNELS_FOUND; /* nobody has refused anything */
        bool may_stop = on && class == RG_CLASS_BEST_EFFORT && (ok || p->found == RG_CHANNELS_FOREIGN);
        bool stops = may_stop && ready == RG_STOPS_READY;
        atomic_store(&p->stops, stops);
        ok |= stops;
        /* Enabling what is enabled: shows that this driver would let it be disabled. */
        if (ok && on && class == RG_CLASS_BEST_EFFORT && !atomic_load(&p->started) && !none)
            ok = rg_channels_resume(&p->channels) == 0;
        pthread_mutex_unlock(&p->lock);
        ok = ok && on;
        rg_stay_beat(d, ok && !none && class == RG_CLASS_HIGH && !p->channels.simulated && !peers(d, class));
        if (ok && class == RG_CLASS_BEST_EFFORT && !atomic_load(&p->started))
            start(p);
        p->refusals = ok || !on || none ? 0 : p->refusals + 1;
        if (p->refusals > REFUSALS)
            fail(p);
        ok = ok && !atomic_load(&p->failed);
        say(d, !ok ? RG_PREEMPTION_OFF : none ? RG_PREEMPTION_STOPS : RG_PREEMPTION_ON);
        uint32_t preemptible = launched() < RG_SAMPLED_LAUNCHES ? RG_PREEMPTIBLE_NEW : RG_PREEMPTIBLE;
        preemptible = !stops ? preemptible : none ? RG_STOPPABLE : RG_STOPPABLE_SLICED;
        uint32_t now = ok && class == RG_CLASS_BEST_EFFORT ? preemptible : RG_NOT_PREEMPTIBLE;
        if (now == RG_STOPPABLE_SLICED && atomic_load(&rg.preemptible[d]) != now)
            rg_stops_began(d); /* before anybody finds that its streams stop: what is queued may be long */
        uint32_t before = atomic_exchange(&rg.preemptible[d], now);
        if (before == RG_NOT_PREEMPTIBLE && now != RG_NOT_PREEMPTIBLE)
            wake(&rg.segment->devices[d].busy_wake); /* its thread sleeps as one that has nothing to do, through requests and holds */
        /* It may have become high meanwhile, and have said so before (rg_preempt_wake), or have lost the context with its stops. */
        if (rg_member_class() == RG_CLASS_HIGH || (stops && !rg_stops_there(d)))
            atomic_store(&rg.preemptible[d], 0);
        pthread_mutex_lock(&p->lock); /* not while it has its due */
        arm(p);
        pthread_mutex_unlock(&p->lock);
    }
    for (int i = 0; i < RG_MAX_CLIENTS; i++)
        beat_launches[i] = rg_progress(&rg.segment->clients[i]);
}

void rg_preempt_wake(void)
{
    for (uint32_t d = 0; d < RG_MAX_DEVICES; d++) {
        rg_device *dev = &rg.segment->devices[d];
        if (rg_member_class() == RG_CLASS_HIGH)
            atomic_store(&rg.preemptible[d], 0);
        if (!(atomic_load(&rg.slot->devices) >> d & 1))
            continue;
        if (rg_member_class() == RG_CLASS_HIGH)
            rg_stops_arm(d, false);
        wake(&dev->wake);
        wake(&dev->busy_wake);
    }
}

void rg_preempt_settle(void)
{
    const struct timespec step = {0, 1000000};
    for (uint32_t tries = 0, d = 0; tries < 200 && d < RG_MAX_DEVICES;)
        if (atomic_load(&preemptors[d].started) && atomic_load(&preemptors[d].suspended))
            tries += nanosleep(&step, NULL) == 0;
        else
            d++;
}

void rg_preempt_stop(void)
{
    atomic_store(&stopping, true);
    for (uint32_t d = 0; d < RG_MAX_DEVICES; d++) {
        preemptor *p = &preemptors[d];
        if (!atomic_load(&p->started))
            continue;
        rg_device *dev = &rg.segment->devices[d];
        wake(&dev->wake);
        wake(&dev->busy_wake);
        /* Bounded, and then the channels are enabled from here: a process must never end with its work held back. Not so on the
         * simulated GPU, whose lock may be held by the very thread that a signal handler has interrupted to come here. */
        bool joined = rg_join(p->thread);
        rg_stops_arm(d, false);
        if (joined)
            continue;
        rg_stops_set(d, false, false);
        if (atomic_load(&p->suspended) && p->channels_off && !p->held.simulated)
            rg_channels_resume(&p->held);
    }
}

void rg_preempt_end(void)
{
    struct timespec limit; /* of all devices together */
    clock_gettime(CLOCK_REALTIME, &limit);
    limit.tv_sec++;
    for (uint32_t d = 0; d < RG_MAX_DEVICES; d++) {
        preemptor *p = &preemptors[d];
        if (pthread_mutex_timedlock(&p->lock, &limit) != 0)
            continue; /* a thread of ours that did not return from the driver */
        /* As it was last said to be: of channels that are new what is set is not known yet. */
        uint32_t said = atomic_load(&rg_share_of(rg.segment, d, rg.slot_index)->slice_us);
        if (p->found == RG_CHANNELS_FOUND && said && said != DRIVER_SLICE_US)
            slice(p, DRIVER_SLICE_US);
        pthread_mutex_unlock(&p->lock);
    }
}
