/*
 * scenario-gate.c: the gate of a scenario: what a launch sees, how it waits, and when a high client is busy (gate.c, track.c).
 */
#include "scenario-inside.h"

bool rg_scenario_high_busy(const scenario *s)
{
    for (uint32_t i = 0; i < s->count; i++)
        if (s->players[i].busy)
            return true;
    return false;
}

void rg_scenario_look_up_virtual(scenario *s, const player *asking)
{
    uint64_t least = asking->virtual_ns;
    for (uint32_t i = 0; i < s->count; i++) {
        const player *p = &s->players[i];
        bool active = p->busy || p->state == GATE || (p->idle_ns && s->now - p->idle_ns < RG_POLICY_GRACE_NS);
        if (active && p->virtual_ns < least)
            least = p->virtual_ns;
    }
    if (least > s->virtual_ns)
        s->virtual_ns = least;
}

uint64_t rg_scenario_lead(const scenario *s, const player *p)
{
    return p->virtual_ns > s->virtual_ns ? p->virtual_ns - s->virtual_ns : 0;
}

uint32_t rg_scenario_bound_of(const rg_profile_op *op)
{
    return op->bound < 0 ? RG_BOUND_UNKNOWN : op->bound ? RG_BOUND_COMPUTE : RG_BOUND_MEMORY;
}

static uint32_t sms_of(const scenario *s, const player *p)
{
    const rg_shape *shape = &p->shapes[p->op];
    uint32_t sms = (shape->blocks + shape->blocks_per_sm - 1) / shape->blocks_per_sm;
    return sms < s->o->gpu.sms ? sms : s->o->gpu.sms;
}

rg_policy_view rg_scenario_view_of(const scenario *s, const player *p)
{
    rg_policy_view v = {
        .policy = s->o->policy,
        .best_effort = p->of->best_effort,
        .high_busy = rg_scenario_high_busy(s),
        .hold = s->hold,
        .inflight = p->inflight,
        .inflight_limit = s->o->inflight * RG_POLICY_LAUNCH,
        .corun_limit = s->o->corun * RG_POLICY_LAUNCH,
        .credit = p->credit,
        .starvation_ns = (uint64_t)s->o->starvation_us * 1000,
        .lead_ns = rg_scenario_lead(s, p),
        .quantum_ns = (uint64_t)s->o->quantum_us * 1000,
    };
    if (s->o->policy == RG_POLICY_ORION && p->op < p->profile->op_count) {
        const rg_profile_op *op = &p->profile->ops[p->op];
        v.profiled = op->kind == RG_PROFILE_KERNEL;
        v.sms = v.profiled ? sms_of(s, p) : 0;
        v.bound = rg_scenario_bound_of(op);
        v.high_bound = s->high_bound;
        v.sms_limit = s->o->sms_limit;
        v.outstanding_limit_ns = (uint64_t)s->o->outstanding_us * 1000;
        for (uint32_t i = 0; i < s->count; i++)
            v.outstanding_ns += s->players[i].outstanding_ns;
    }
    return v;
}

void rg_scenario_record_batch(player *p, uint32_t stream)
{
    if (p->batch_count == BATCHES || !p->unbatched[stream])
        return;
    p->batches[p->batch_count++] =
        (batch){p->streams[stream], p->unbatched[stream], p->stream_ticket[stream], p->unbatched_ns[stream]};
    p->unbatched[stream] = 0;
    p->unbatched_ns[stream] = 0;
}

bool rg_scenario_sees_turn(scenario *s, player *p)
{
    if (p->state != GATE || p->verdict != RG_WAIT_TURN || s->now >= p->spin_until)
        return false;
    rg_scenario_look_up_virtual(s, p);
    return rg_scenario_lead(s, p) <= (uint64_t)s->o->quantum_us * 1000;
}

bool rg_scenario_watches_batches(const scenario *s, const player *p)
{
    return p->state == GATE && s->now < p->spin_until && (p->verdict == RG_WAIT_INFLIGHT || s->o->corun);
}

bool rg_scenario_batch_done(scenario *s, player *p, bool take)
{
    bool any = false;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < p->batch_count; i++) {
        bool done = rg_model_done(s->model, p->batches[i].stream, p->batches[i].ticket);
        any |= done;
        if (done && take) {
            p->inflight -= p->batches[i].weight;
            p->outstanding_ns -= p->batches[i].outstanding_ns;
        } else {
            p->batches[kept++] = p->batches[i];
        }
    }
    p->batch_count = kept;
    return any;
}

void rg_scenario_settle(scenario *s, const player *asking)
{
    for (uint32_t i = 0; s->o->policy == RG_POLICY_ORION && i < s->count; i++) {
        player *p = &s->players[i];
        if (p == asking || p->state == GATE)
            continue;
        for (uint32_t k = 0; k < p->stream_count; k++)
            rg_scenario_record_batch(p, k);
        rg_scenario_batch_done(s, p, true);
    }
}

/* Whether a client that waits for high ones also looks at its own launches: fewer in flight may let it go on. */
static bool naps(const scenario *s, const player *p)
{
    return s->o->corun && p->inflight;
}

/* When a held-back client next looks again by itself. */
static void set_gate_timer(scenario *s, player *p)
{
    if (s->now < p->spin_until)
        p->at = p->spin_until;
    else
        p->at = s->now + (p->verdict != RG_WAIT_HIGH || naps(s, p) ? NAP_NS : SLEEP_NS) + s->o->wake_ns;
    uint64_t starves = p->since + (uint64_t)s->o->starvation_us * 1000;
    if (s->now < p->spin_until && starves < p->at)
        p->at = starves;
}

/* Into the spell of high clients' work; 0: none. */
static uint64_t busy_ns(const scenario *s)
{
    return rg_scenario_high_busy(s) ? s->now - s->spell_ns : 0;
}

/* Of a request that is like the others: when it has come far enough, at its pace; NEVER: its launches tell. As until_late in segment.c. */
static uint64_t late_at(const scenario *s, player *p)
{
    const rg_scenario_options *o = s->o;
    int64_t course[RG_POLICY_COURSE];
    for (int i = 0; i < RG_POLICY_COURSE; i++)
        course[i] = (int64_t)atomic_load(&p->share->course[i]);
    uint32_t usual = rg_scenario_usual(p), part = atomic_load(&p->share->need_part);
    uint64_t need_ns = (uint64_t)o->need_us * 1000, spent_ns = s->now - p->busy_ns;
    need_ns = part ? need_ns * part / RG_POLICY_ONE : need_ns;
    uint64_t made = o->defer_ppm ? p->made : rg_policy_course(course, p->made, usual);
    uint64_t left_ns = rg_policy_until_late(made, usual, spent_ns, atomic_load(&p->share->usual_ns), o->defer_ppm, need_ns);
    if (p->made && p->made < usual && !p->seen_late) {
        p->seen_part = (uint32_t)(p->made * RG_POLICY_ONE / usual);
        p->seen_ns = spent_ns;
        p->seen_late = !left_ns;
    }
    return left_ns && (!o->need_us || left_ns == UINT64_MAX) ? NEVER : s->now + left_ns;
}

uint64_t rg_scenario_late_at(const scenario *s, uint64_t since)
{
    uint64_t defer_ns = (uint64_t)s->o->defer_us * 1000, at = NEVER;
    bool by_launches = s->o->defer_ppm || s->o->need_us;
    if (!defer_ns && !by_launches)
        return since;
    for (uint32_t i = 0; i < s->count; i++) {
        player *p = &s->players[i];
        if (!p->busy || p->of->best_effort)
            continue;
        uint64_t its = since + defer_ns;
        if (by_launches && rg_scenario_usual(p))
            its = p->made && !p->launching ? s->now : late_at(s, p);
        at = its < at ? its : at;
    }
    return at;
}

void rg_scenario_put_off(const scenario *s, rg_policy_view *v)
{
    if (v->policy <= RG_POLICY_SLO && rg_scenario_late_at(s, s->spell_ns) > s->now)
        v->high_busy = false;
}

static uint64_t allowance(const scenario *s)
{
    bool has = s->o->policy == RG_POLICY_PRIORITY || s->o->policy == RG_POLICY_SLO;
    uint64_t starvation_ns = (uint64_t)s->o->starvation_us * 1000;
    return has ? rg_policy_allowance(busy_ns(s), s->paid_ns, starvation_ns, s->o->min_share_ppm) : 0;
}

void rg_scenario_enter_gate(scenario *s, player *p, enum rg_verdict verdict)
{
    for (uint32_t i = 0; i < p->stream_count; i++)
        rg_scenario_record_batch(p, i);
    p->state = GATE;
    p->verdict = verdict;
    p->since = p->looked = s->now;
    p->spin_until = s->now + (uint64_t)s->o->spin_us * 1000;
    p->spent_ns[0] = p->spent_ns[1] = 0;
    set_gate_timer(s, p);
    if (verdict == RG_WAIT_HIGH && allowance(s))
        p->at = s->now;
}

void rg_scenario_leave_gate(player *p)
{
    rg_scenario_result *r = p->result;
    r->gate_waits += p->spent_ns[0] > 0;
    r->gate_wait_ns += p->spent_ns[0];
    r->inflight_waits += p->spent_ns[1] > 0;
    r->inflight_wait_ns += p->spent_ns[1];
}

uint64_t rg_scenario_cost_of(const player *p)
{
    const rg_profile_op *op = &p->profile->ops[p->op];
    return op->kind == RG_PROFILE_KERNEL ? op->duration_ns : 0;
}

bool rg_scenario_look_again(scenario *s, player *p)
{
    bool progress = (p->verdict != RG_WAIT_HIGH || s->o->corun) && rg_scenario_batch_done(s, p, true);
    uint64_t before = s->virtual_ns;
    p->spent_ns[p->verdict == RG_WAIT_INFLIGHT] += s->now - p->looked;
    p->looked = s->now;
    if (s->o->policy == RG_POLICY_FAIR)
        rg_scenario_look_up_virtual(s, p);
    if ((progress && p->verdict == RG_WAIT_INFLIGHT) || (p->verdict == RG_WAIT_TURN && s->virtual_ns > before))
        p->since = s->now;
    rg_scenario_settle(s, p);
    rg_policy_view view = rg_scenario_view_of(s, p);
    view.waited_ns = s->now - p->since;
    view.allowance_ns = allowance(s);
    rg_scenario_put_off(s, &view);
    enum rg_verdict next = rg_policy_decide(&view);
    bool full = view.inflight_limit && view.inflight >= view.inflight_limit;
    if (next == RG_PASS_STARVED && !full) {
        if (!p->credit) {
            p->credit = view.policy != RG_POLICY_FAIR && s->o->inflight ? s->o->inflight : 1;
            p->result->starved++;
            s->tick.starved++;
        }
        p->credit--;
    } else if (!view.high_busy) {
        p->credit = 0;
    }
    if (next == RG_PASS_SHARE || (next == RG_PASS_STARVED && view.high_busy))
        s->paid_ns = rg_policy_pay(busy_ns(s), s->paid_ns, view.starvation_ns, s->o->min_share_ppm, rg_scenario_cost_of(p));
    p->result->shared += next == RG_PASS_SHARE;
    s->tick.starved += next == RG_PASS_SHARE && !s->tick.shared;
    s->tick.shared |= next == RG_PASS_SHARE;
    if (!rg_policy_waits(next)) {
        rg_scenario_leave_gate(p);
        return true;
    }
    if (next != p->verdict)
        p->since = s->now;
    if (next != p->verdict || progress)
        p->spin_until = s->now + (uint64_t)s->o->spin_us * 1000;
    p->verdict = next;
    set_gate_timer(s, p);
    return false;
}

void rg_scenario_become_busy(scenario *s, player *p)
{
    if (!rg_scenario_high_busy(s) && (!s->spell_ns || s->now - s->idle_ns >= RG_POLICY_BREAK_NS)) {
        s->spell_ns = s->now;
        s->paid_ns = 0;
    }
    p->busy = true;
    p->busy_ns = s->now;
    if (!p->of->best_effort)
        rg_scenario_request_begins(s, p);
}

void rg_scenario_wake_gate(scenario *s)
{
    for (uint32_t i = 0; i < s->count; i++) {
        player *q = &s->players[i];
        if (q->state != GATE || q->verdict != RG_WAIT_HIGH)
            continue;
        uint64_t awake = s->now < q->spin_until ? s->now : s->now + s->o->wake_ns;
        q->at = awake < q->at ? awake : q->at;
    }
}

void rg_scenario_become_idle(scenario *s, player *p)
{
    if (!p->busy)
        return;
    p->busy = false;
    p->idle_ns = s->now;
    if (!p->launching) {
        if (!p->of->best_effort)
            rg_scenario_request_ends(s, p);
        p->made = p->seen_ns = 0;
        p->seen_late = false;
        uint32_t at = p->waits++ % (sizeof p->waited_ns / sizeof *p->waited_ns);
        p->waited_ns[at] = s->now - p->wait_ns;
        p->worked_ns[at] = p->wait_ns - p->busy_ns;
    }
    if (s->tick.requests && !p->of->best_effort && !p->of->reports)
        s->tick.requests[rg_hist_bucket(s->now - p->busy_ns)]++;
    if (s->tick.waits && !p->of->best_effort && !p->launching && s->tick.wait_count < RG_SCENARIO_WAITS)
        s->tick.waits[s->tick.wait_count++] =
            (rg_scenario_wait){(uint32_t)(p - s->players), rg_scenario_kind(s, p), p->busy_ns, p->wait_ns - p->busy_ns, s->now - p->wait_ns};
    if (rg_scenario_high_busy(s))
        return;
    s->idle_ns = s->now;
    rg_scenario_wake_gate(s);
}
