/*
 * scenario-agent.c: what takes the best-effort processes of a scenario off the GPU and puts them back (preempt.c): a thread in each
 * that sleeps until a high client launches, suspends, and resumes when that is over.
 *
 * Streams stop (stop.c), which takes no time, and at once where a high client does it by itself. Under MPS nothing else is done, and in time
 * slices only where a best-effort client is at work on a long kernel, or requests outlast their slice; then they stop and are suspended here as
 * one, for as long as they are suspended.
 * They all do the same at the same time, so there is one of them; but whoever waits for its turn is off the GPU throughout. As in
 * preempt.c: a suspension may be put off (defer_us, defer_ppm, need_us) and lasts through the short gaps of programs that have many of
 * them; where high clients make no break for the starvation bound best-effort work gets its due.
 */
#include "scenario-inside.h"

enum { LINGER_NS = 1000000, LOOK_NS = 20000 }; /* as preempt.c */

static void stop_best_effort(scenario *s, bool stopped)
{
    for (uint32_t i = 0; i < s->count; i++)
        if (s->players[i].of->best_effort && rg_model_stop(s->model, s->players[i].context, stopped) < 0)
            rg_scenario_fail(s, "the model refused a stop");
}

static bool waits_for_turn(const scenario *s, const player *p)
{
    return s->turns >> (p - s->players) & 1;
}

static void suspend_best_effort(scenario *s, bool suspended)
{
    s->agent.disabled = suspended && !rg_scenario_by_stops(s);
    for (uint32_t i = 0; i < s->count; i++) {
        player *p = &s->players[i];
        if (!p->of->best_effort)
            continue;
        /* Back on it in any case: since then the loop may have changed how. */
        bool by_channels = suspended ? !rg_scenario_by_stops(s) : !s->o->gpu.shared;
        if (by_channels && rg_model_suspend(s->model, p->context, suspended || waits_for_turn(s, p)) < 0)
            rg_scenario_fail(s, "the model refused a suspension");
    }
    if (!suspended || rg_scenario_by_stops(s))
        stop_best_effort(s, suspended);
}

/* Others of its class on the device that wait for their turn, or do not. */
static uint32_t peers(const scenario *s, const player *p, bool waiting)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < s->count; i++) {
        const player *other = &s->players[i];
        n += other != p && other->of->best_effort == p->of->best_effort && waits_for_turn(s, other) == waiting;
    }
    return n;
}

static uint64_t slice_ns(const scenario *s, const player *p, uint64_t slice_us)
{
    uint64_t drivers_ns = s->o->gpu.slice_ns;
    uint32_t others = peers(s, p, false);
    if (!slice_us)
        return drivers_ns;
    if (slice_us < RG_POLICY_LEAST_SLICE_US && peers(s, p, true))
        slice_us = RG_POLICY_LEAST_SLICE_US; /* it does not have the GPU to itself for good */
    if (!others)
        return slice_us * 1000;
    return p->of->best_effort && s->o->suspend ? rg_policy_peers_slice_us(slice_us, others, drivers_ns / 1000) * 1000 : drivers_ns;
}

static void set_slice_ns(scenario *s, const player *p, uint64_t ns)
{
    if (!s->o->gpu.shared && rg_model_set_slice(s->model, p->context, ns) < 0)
        rg_scenario_fail(s, "the model refused a time slice");
}

void rg_scenario_set_slices(scenario *s)
{
    for (uint32_t i = 0; i < s->count; i++)
        set_slice_ns(s, &s->players[i], slice_ns(s, &s->players[i], s->players[i].of->best_effort ? s->o->be_slice_us : s->o->high_slice_us));
}

void rg_scenario_give_turns(scenario *s, uint64_t turns)
{
    s->turns = turns;
    for (uint32_t i = 0; i < s->count; i++) {
        const player *p = &s->players[i];
        if (p->of->best_effort && rg_model_suspend(s->model, p->context, s->agent.disabled || waits_for_turn(s, p)) < 0)
            rg_scenario_fail(s, "the model refused a suspension");
    }
    rg_scenario_set_slices(s);
}

/* Whether best-effort processes are to be off the GPU. */
static bool stands_aside(const scenario *s)
{
    if (s->hold)
        return true;
    for (uint32_t i = 0; s->o->suspend && i < s->count; i++)
        if (s->o->drain ? s->players[i].launching : s->players[i].busy)
            return true;
    return false;
}

static bool bursts(const scenario *s)
{
    return __builtin_popcount(s->agent.short_gaps & 0xff) >= 4;
}

static uint64_t starvation_ns(const scenario *s)
{
    return (uint64_t)s->o->starvation_us * 1000;
}

/* When high clients make the break that ends a spell, if they stay idle. */
static uint64_t rests(const scenario *s)
{
    return rg_scenario_high_busy(s) ? NEVER : s->idle_ns + RG_POLICY_BREAK_NS;
}

/* Each best-effort client has the same slices, or those of the driver. */
static bool has_short_slices(const scenario *s)
{
    for (uint32_t i = 0; !s->o->gpu.shared && i < s->count; i++)
        if (s->players[i].of->best_effort && slice_ns(s, &s->players[i], s->o->be_slice_us) <= RG_POLICY_SHORT_SLICE_US * 1000ull)
            return true;
    return false;
}

static rg_policy_due_view due_view(const scenario *s)
{
    return (rg_policy_due_view){
        .spell_ns = s->spell_ns,
        .idle_ns = s->idle_ns,
        .short_slices = !s->o->suspend || has_short_slices(s),
        .starvation_ns = starvation_ns(s),
        .period_ns = rg_policy_share_period(s->o->starvation_us, s->o->share_period_us),
        .min_share_ppm = s->o->min_share_ppm,
    };
}

/* For how long it then has it. */
static uint64_t due_us(const scenario *s)
{
    rg_policy_due_view v = due_view(s);
    uint64_t away_ns = rg_policy_away(&s->agent.had, &v, s->now);
    uint64_t ns = s->o->gpu.shared ? rg_policy_due_beside(away_ns, v.min_share_ppm) : rg_policy_due(away_ns, s->o->high_slice_us * 1000ull, v.min_share_ppm);
    uint64_t us = ns / 1000;
    return us ? us : 1;
}

/* When best-effort work is to have its due, if high clients go on. */
static uint64_t is_due(scenario *s)
{
    rg_policy_had *had = &s->agent.had;
    rg_policy_due_view v = due_view(s);
    rg_policy_count(had, &v, s->now);
    if (s->hold || s->now >= rests(s))
        return NEVER;
    bool runs = !had->off && !v.short_slices;
    uint64_t in_ns = rg_policy_due_in(had, &v, runs, s->now);
    return in_ns == UINT64_MAX ? NEVER : s->now + in_ns;
}

static uint64_t earlier(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static bool gives_way_at_once(const scenario *s)
{
    return s->o->suspend && !s->o->defer_us && !s->o->defer_ppm && !s->o->need_us;
}

static void note_pause(scenario *s)
{
    if (!s->hold)
        s->agent.short_pauses = s->agent.short_pauses << 1 | (s->idle_ns && s->now - s->idle_ns < RG_POLICY_SHORT_PAUSE_NS);
}

/* As in preempt.c: the next request is expected at once. */
static bool follows(const scenario *s)
{
    return rg_scenario_stops(s) && !s->o->gpu.shared && gives_way_at_once(s) && rg_policy_follows(s->agent.short_pauses);
}

/* As in preempt.c: what high clients wait for may last longer than their slice; best-effort work has been off the GPU since then. */
static bool outlasts(const scenario *s, uint64_t off_ns)
{
    if (rg_scenario_by_stops(s) || follows(s))
        return s->o->suspend && rg_scenario_high_busy(s);
    for (uint32_t i = 0; s->o->suspend && i < s->count; i++) {
        const player *p = &s->players[i];
        if (p->of->best_effort || !p->busy)
            continue;
        uint64_t wait_ns = 0, from = off_ns > p->busy_ns ? off_ns : p->busy_ns;
        for (uint32_t k = 0; k < sizeof p->waited_ns / sizeof *p->waited_ns; k++)
            wait_ns = p->waited_ns[k] > wait_ns ? p->waited_ns[k] : wait_ns;
        if (rg_policy_outlasts(s->agent.since > from ? s->agent.since - from : 0, wait_ns, slice_ns(s, p, s->o->high_slice_us)))
            return true;
    }
    return false;
}

/* Off the GPU, with nothing to stand aside for: when it comes back. */
static uint64_t comes_back(scenario *s)
{
    if (outlasts(s, s->agent.off_ns)) {
        s->agent.stays = true;
        return NEVER;
    }
    if (!bursts(s)) {
        uint64_t back_ns = (s->agent.stays ? s->idle_ns : s->agent.since) + (uint64_t)s->o->resume_delay_us * 1000;
        s->agent.follows = follows(s);
        uint64_t until_ns = s->agent.follows ? s->idle_ns + RG_POLICY_FOLLOWS_NS : 0;
        return back_ns > until_ns ? back_ns : until_ns;
    }
    s->agent.lingers = true;
    return rg_scenario_high_busy(s) ? NEVER : s->idle_ns + LINGER_NS;
}

/* As in preempt.c: what is there has all begun since, and leaves the GPU to best-effort work for long enough: when it comes back for that. */
static uint64_t comes_between(const scenario *s)
{
    if (s->hold || s->idle_ns <= s->agent.off_ns)
        return NEVER;
    uint64_t late_ns = rg_scenario_late_at(s, s->idle_ns), back_ns = s->agent.since + (uint64_t)s->o->resume_delay_us * 1000;
    return late_ns > s->now && late_ns - s->now >= RG_POLICY_BETWEEN_NS ? back_ns : NEVER;
}

/* The only high client at work, if its requests are alike and the one under way has launched all. */
static bool has_launched_all(const scenario *s)
{
    const player *only = NULL;
    for (uint32_t i = 0; i < s->count; i++) {
        const player *p = &s->players[i];
        if (p->of->best_effort || !p->busy)
            continue;
        if (only)
            return false;
        only = p;
    }
    /* Of requests of one profile, which launch the same, that is known from the second on. */
    bool alike = only && (only->of->profile_count == 1 || atomic_load(&only->share->alike));
    return alike && rg_scenario_usual(only) && only->made == rg_scenario_usual(only);
}

/* As in preempt.c: all is launched that is usual, and is not waited for yet: when it comes back for that. */
static uint64_t comes_early(scenario *s)
{
    bool all = s->o->drain && !s->hold && !rg_scenario_stops(s) && !bursts(s) && has_launched_all(s) && !outlasts(s, s->agent.off_ns);
    if (!all || !s->agent.all_ns)
        s->agent.all_ns = all ? s->now : 0;
    return all ? s->agent.all_ns + LOOK_NS : NEVER;
}

/* High clients stop best-effort streams by themselves, before any thread there is awake (rg_stop_best_effort). */
static bool stops_at_once(const scenario *s)
{
    return rg_scenario_stops(s) && gives_way_at_once(s);
}

/* As in preempt.c: for how long the requests that launch may still do so and be such as leave the GPU to nobody before they end. */
static uint64_t brief_ns(const scenario *s)
{
    uint64_t least_ns = NEVER;
    for (uint32_t i = 0; i < s->count; i++) {
        const player *p = &s->players[i];
        if (p->of->best_effort || !p->busy || !p->launching)
            continue;
        uint64_t worked_ns = p->waits ? 0 : UINT64_MAX;
        for (uint32_t k = 0; k < sizeof p->worked_ns / sizeof *p->worked_ns; k++)
            worked_ns = p->worked_ns[k] > worked_ns ? p->worked_ns[k] : worked_ns;
        least_ns = earlier(least_ns, rg_policy_brief(s->now - p->busy_ns, worked_ns));
    }
    return least_ns == NEVER ? 0 : least_ns;
}

/* As in preempt.c: what slices have interrupted would be in the way of the requests under way, or of the next. */
static bool is_in_the_way(const scenario *s)
{
    return !has_short_slices(s) || s->hold || (bursts(s) && follows(s)) || !brief_ns(s);
}

/* Whether streams stop, and no more; not under MPS, where there is no more. */
static bool could_suspend_too(const scenario *s)
{
    return rg_scenario_by_stops(s) && !s->o->gpu.shared;
}

/* When it acts next, in the states that wait for the high clients. */
static void look(scenario *s)
{
    bool wanted = stands_aside(s);
    /* Not suspended yet, and the high client waits already: a long slice is cut short, once. */
    bool cut = s->agent.cut_after == s->idle_ns + 1;
    if (!wanted && s->agent.state == RUNNING && s->agent.wanted && rg_scenario_high_busy(s) && s->o->suspend && !cut &&
        (s->o->be_slice_us > RG_POLICY_SHORT_SLICE_US || outlasts(s, s->now))) {
        wanted = true;
        s->agent.late_ns = earlier(s->agent.late_ns, s->now);
    }
    if (wanted != s->agent.wanted) {
        if (wanted && (s->agent.lingers || s->agent.follows)) {
            s->agent.may_suspend_too = could_suspend_too(s);
            s->agent.short_gaps = s->agent.short_gaps << 1 | 1;
            note_pause(s);
        }
        s->agent.lingers = s->agent.follows = s->agent.stays = s->agent.early = false;
        s->agent.wanted = wanted;
        s->agent.since = s->now;
        s->agent.late_ns = NEVER;
    }
    if (s->hold && s->agent.state == SUSPENDED)
        s->agent.had.given_ns = s->now; /* a hold is short, and meant */
    if (s->agent.state == RUNNING) {
        if (s->agent.late_ns > s->now)
            s->agent.late_ns = s->hold ? s->agent.since
                                       : earlier(rg_scenario_late_at(s, s->agent.since), s->agent.since + starvation_ns(s));
        uint64_t late_ns = s->agent.late_ns, delay_ns = stops_at_once(s) ? 0 : s->o->suspend_delay_us * 1000ull;
        wanted = wanted && !(s->agent.early && has_launched_all(s) && !s->hold);
        s->agent.at = earlier(wanted && late_ns != NEVER ? late_ns + delay_ns : NEVER, is_due(s));
    } else if (s->agent.state == SUSPENDED) {
        s->agent.at = earlier(wanted ? earlier(comes_between(s), comes_early(s)) : comes_back(s), is_due(s));
        if (s->agent.may_suspend_too && wanted)
            s->agent.at = earlier(s->agent.at, is_in_the_way(s) ? s->now : s->now + brief_ns(s));
    } else if (s->agent.state == GIVEN) {
        s->agent.at = s->hold ? s->now : earlier(rests(s), s->agent.given_until_ns);
    }
}

/* As suspends_too in preempt.c: what no stop ends soon has to be interrupted. */
static bool suspends_too(const scenario *s)
{
    bool runs_long = false;
    for (uint32_t i = 0; i < s->count; i++) {
        const player *p = &s->players[i];
        runs_long |= p->of->best_effort && !waits_for_turn(s, p) && rg_model_runs_long(s->model, p->context, RG_POLICY_LONG_NS);
    }
    return !s->o->gpu.shared && (s->long_requests || (runs_long && is_in_the_way(s)));
}

static void begin_suspension(scenario *s)
{
    rg_policy_off(&s->agent.had, s->idle_ns, s->now);
    for (uint32_t i = 0; i < s->count; i++)
        s->players[i].result->suspensions += s->players[i].of->best_effort && !waits_for_turn(s, &s->players[i]);
    s->agent.state = SUSPENDING;
    s->agent.channels_off = rg_scenario_stops(s) && suspends_too(s);
    s->agent.may_suspend_too = could_suspend_too(s);
    s->agent.at = s->now + (rg_scenario_by_stops(s) ? 0 : s->o->suspend_ns);
    s->agent.off_ns = s->now;
    if (rg_scenario_stops(s))
        stop_best_effort(s, true);
}

bool rg_scenario_agent_act(scenario *s)
{
    if (s->mode != RG_SCENARIO_PREEMPT)
        return false;
    look(s);
    if (s->now < s->agent.at)
        return false;
    switch (s->agent.state) {
    case RUNNING:
        if (s->now >= is_due(s)) {
            s->agent.state = GIVING;
            s->agent.at = s->now;
            break;
        }
        s->agent.cut_after = s->idle_ns + 1;
        s->agent.short_gaps = s->agent.short_gaps << 1 | (s->idle_ns && s->now - s->idle_ns < LINGER_NS);
        note_pause(s);
        begin_suspension(s);
        break;
    case SUSPENDING:
        suspend_best_effort(s, true);
        s->agent.state = LEAVING;
        s->agent.at = s->now + (rg_scenario_by_stops(s) ? 0 : s->o->gpu.preempt_ns);
        break;
    case LEAVING:
        s->agent.state = SUSPENDED;
        break;
    case SUSPENDED:
        if (s->agent.may_suspend_too && s->agent.wanted && is_in_the_way(s)) {
            s->agent.may_suspend_too = false;
            if (suspends_too(s)) {
                s->agent.channels_off = true;
                s->agent.state = SUSPENDING;
                s->agent.at = s->now + s->o->suspend_ns;
            }
            break;
        }
        if (s->agent.lingers)
            s->agent.short_gaps <<= 1;
        s->agent.lingers = s->agent.follows = false;
        s->agent.early = s->agent.wanted && has_launched_all(s);
        s->agent.between = s->agent.wanted && !s->agent.early;
        s->agent.state = s->now >= is_due(s) ? GIVING : RESUMING;
        s->agent.at = s->now + (rg_scenario_by_stops(s) ? 0 : s->o->resume_ns);
        break;
    case RESUMING:
        suspend_best_effort(s, false);
        s->agent.channels_off = false;
        rg_policy_on(&s->agent.had, !s->agent.between && rg_scenario_high_busy(s), s->now);
        s->agent.state = RUNNING;
        break;
    case GIVING:
        for (uint32_t i = 0; i < s->count; i++)
            if (s->players[i].of->best_effort && !waits_for_turn(s, &s->players[i])) {
                set_slice_ns(s, &s->players[i], (due_us(s) > RG_POLICY_LEAST_SLICE_US ? due_us(s) : RG_POLICY_LEAST_SLICE_US) * 1000);
                s->players[i].result->starved++;
                s->tick.starved++;
            }
        suspend_best_effort(s, false);
        s->agent.channels_off = false;
        rg_policy_on(&s->agent.had, rg_scenario_high_busy(s), s->now);
        s->agent.state = GIVEN;
        s->agent.given_until_ns = s->now + (due_us(s) + (s->o->gpu.shared ? 0 : s->o->high_slice_us)) * 1000;
        break;
    case GIVEN:
        rg_scenario_set_slices(s);
        s->agent.had.given_ns = s->now;
        s->agent.had.credit_ns = 0;
        s->agent.state = RUNNING;
        if (s->agent.wanted || outlasts(s, s->agent.off_ns))
            begin_suspension(s);
        break;
    }
    return true;
}
