/*
 * scenario.c: see scenario.h. A loop over instants: the model is advanced to the next instant at which anything can
 * change, then the clients act in their order until none of them can.
 */
#include "scenario.h"

#include "../replay/shape.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NEVER UINT64_MAX
#define AHEAD 16u         /* as rigel-replay: iterations a program that never waits may be ahead */
#define BATCHES 64u       /* as gate.c */
#define NAP_NS 30000u     /* as gate.c: between two looks at what is in flight */
#define SLEEP_NS 2000000u /* as gate.c: longest sleep on a busy device */

enum state {
    NEXT,  /* decides whether another iteration begins */
    DUE,   /* waits for a request to fall due */
    OP,    /* waits for the host gap before an operation */
    GATE,  /* held back by the policy */
    QUEUE, /* the stream holds as many operations as it can */
    SYNC,  /* waits for its work */
    DONE,
};

typedef struct {
    uint32_t stream, weight;
    uint64_t ticket, outstanding_ns;
} batch;

typedef struct {
    const rg_scenario_client *of;
    rg_shape *shapes; /* by operation */
    rg_arrivals arrivals;
    uint32_t context, streams[RG_PROFILE_MAX_STREAMS];
    bool governed; /* passes the gate */
    bool marks;    /* its busy periods count: high under a policy, everybody under fair */

    enum state state;
    uint64_t at; /* acts at this time, whatever else happens; NEVER: only when a condition is met */
    uint32_t op;
    uint64_t begun; /* iterations */
    uint64_t due_ns;
    uint64_t last_ticket; /* of the context */
    bool busy;            /* from first launch to idle */
    bool launching;       /* high: from first launch to the wait for all of it */
    uint64_t idle_ns;     /* when that was over */
    uint64_t virtual_ns, inverse; /* fair */
    uint64_t outstanding_ns;      /* orion */

    struct {
        uint32_t stream;
        uint64_t ticket;
    } ahead[AHEAD];
    uint32_t ahead_first, ahead_count;

    uint32_t inflight, credit, unbatched[RG_PROFILE_MAX_STREAMS];
    uint64_t unbatched_ns[RG_PROFILE_MAX_STREAMS];
    uint64_t stream_ticket[RG_PROFILE_MAX_STREAMS];
    batch batches[BATCHES];
    uint32_t batch_count;
    enum rg_verdict verdict;
    uint64_t since, spin_until, looked, spent_ns[2]; /* spent: for high clients, for its own launches */

    uint64_t *latencies;
    size_t latency_count, latency_capacity;
    rg_scenario_result *result;
} player;

typedef struct {
    const rg_scenario_options *o;
    rg_scenario_mode mode;
    rg_model *model;
    player *players;
    uint32_t count;
    uint64_t now;
    struct {
        enum { RUNNING, SUSPENDING, LEAVING, SUSPENDED, RESUMING } state;
        uint64_t at; /* acts then; NEVER: when the high clients change */
        bool busy;   /* whether a high client was when it last looked, and since when that is so */
        uint64_t since;
    } agent; /* of the best-effort processes: they all do the same at the same time */
    uint64_t virtual_ns;                /* fair: the slowest active client's, as last looked up */
    uint64_t spell_ns, idle_ns, paid_ns; /* least share: high clients busy since; idle since; paid out */
    uint32_t high_bound;                /* orion: of the last high kernel */
    char *error;
    size_t error_bytes;
    bool failed;
} scenario;

static void fail(scenario *s, const char *what)
{
    if (!s->failed)
        snprintf(s->error, s->error_bytes, "%s", what);
    s->failed = true;
}

/* ---- Iterations */

static void finish_request(scenario *s, player *p)
{
    if (p->latency_count == p->latency_capacity) {
        size_t wanted = p->latency_capacity ? 2 * p->latency_capacity : 1024;
        uint64_t *more = realloc(p->latencies, wanted * sizeof(*more));
        if (!more) {
            fail(s, "out of memory for latencies");
            return;
        }
        p->latencies = more;
        p->latency_capacity = wanted;
    }
    p->latencies[p->latency_count++] = s->now - p->due_ns;
    p->result->iterations++;
}

/* Counts iterations at the front that are finished. */
static void collect_ahead(scenario *s, player *p)
{
    while (p->ahead_count &&
           rg_model_done(s->model, p->ahead[p->ahead_first].stream, p->ahead[p->ahead_first].ticket)) {
        p->ahead_first = (p->ahead_first + 1) % AHEAD;
        p->ahead_count--;
        p->result->iterations++;
    }
}

static bool waits(const player *p)
{
    return p->of->open_loop || p->of->profile->waits;
}

static void go_to_op(scenario *s, player *p, uint32_t op, uint64_t return_ns)
{
    p->op = op;
    if (op < p->of->profile->op_count) {
        p->state = OP;
        p->at = return_ns + p->of->profile->ops[op].gap_ns;
        return;
    }
    if (waits(p)) { /* a last row that is no sync: the request is waited for all the same */
        p->state = SYNC;
        p->at = return_ns;
        return;
    }
    uint32_t last = p->of->profile->op_count - 1;
    uint32_t stream = p->of->profile->ops[last].stream;
    uint32_t slot = (p->ahead_first + p->ahead_count++) % AHEAD;
    p->ahead[slot].stream = p->streams[stream];
    p->ahead[slot].ticket = p->stream_ticket[stream];
    p->state = NEXT;
    p->at = return_ns;
    (void)s;
}

static void begin_iteration(scenario *s, player *p)
{
    p->begun++;
    go_to_op(s, p, 0, s->now);
}

static bool try_next(scenario *s, player *p)
{
    bool over = p->of->iterations && p->begun >= p->of->iterations;
    if (p->of->open_loop) {
        p->due_ns += rg_arrivals_next_gap_ns(&p->arrivals);
        p->state = over || p->due_ns >= s->o->duration_ns ? DONE : DUE;
        p->at = p->due_ns > s->now ? p->due_ns : s->now;
        return true;
    }
    if (over || s->now >= s->o->duration_ns) {
        p->state = DONE;
        return true;
    }
    if (!waits(p)) {
        collect_ahead(s, p);
        if (p->ahead_count == AHEAD) {
            p->at = NEVER; /* until the oldest is finished */
            return false;
        }
    }
    p->due_ns = s->now;
    begin_iteration(s, p);
    return true;
}

/* ---- The gate */

static bool high_busy(const scenario *s)
{
    for (uint32_t i = 0; i < s->count; i++)
        if (s->players[i].busy)
            return true;
    return false;
}

/* As rg_device.virtual_ns: raised to the slowest active client's; the one that asks is active. */
static void look_up_virtual(scenario *s, const player *asking)
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

static uint64_t lead(const scenario *s, const player *p)
{
    return p->virtual_ns > s->virtual_ns ? p->virtual_ns - s->virtual_ns : 0;
}

static uint32_t bound_of(const rg_profile_op *op)
{
    return op->bound < 0 ? RG_BOUND_UNKNOWN : op->bound ? RG_BOUND_COMPUTE : RG_BOUND_MEMORY;
}

static uint32_t sms_of(const scenario *s, const player *p)
{
    const rg_shape *shape = &p->shapes[p->op];
    uint32_t sms = (shape->blocks + shape->blocks_per_sm - 1) / shape->blocks_per_sm;
    return sms < s->o->gpu.sms ? sms : s->o->gpu.sms;
}

static rg_policy_view view_of(const scenario *s, const player *p)
{
    rg_policy_view v = {
        .policy = s->o->policy,
        .best_effort = p->of->best_effort,
        .high_busy = high_busy(s),
        .inflight = p->inflight,
        .inflight_limit = s->o->inflight * RG_POLICY_LAUNCH,
        .corun_limit = s->o->corun * RG_POLICY_LAUNCH,
        .credit = p->credit,
        .starvation_ns = (uint64_t)s->o->starvation_us * 1000,
        .lead_ns = lead(s, p),
        .quantum_ns = (uint64_t)s->o->quantum_us * 1000,
    };
    if (s->o->policy == RG_POLICY_ORION && p->op < p->of->profile->op_count) {
        const rg_profile_op *op = &p->of->profile->ops[p->op];
        v.profiled = op->kind == RG_PROFILE_KERNEL;
        v.sms = v.profiled ? sms_of(s, p) : 0;
        v.bound = bound_of(op);
        v.high_bound = s->high_bound;
        v.sms_limit = s->o->sms_limit;
        v.outstanding_limit_ns = (uint64_t)s->o->outstanding_us * 1000;
        for (uint32_t i = 0; i < s->count; i++)
            v.outstanding_ns += s->players[i].outstanding_ns;
    }
    return v;
}

static void record_batch(player *p, uint32_t stream)
{
    if (p->batch_count == BATCHES || !p->unbatched[stream])
        return;
    p->batches[p->batch_count++] =
        (batch){p->streams[stream], p->unbatched[stream], p->stream_ticket[stream], p->unbatched_ns[stream]};
    p->unbatched[stream] = 0;
    p->unbatched_ns[stream] = 0;
}

/* Held back and spinning: it sees at once when the others have caught up. */
static bool sees_turn(scenario *s, player *p)
{
    if (p->state != GATE || p->verdict != RG_WAIT_TURN || s->now >= p->spin_until)
        return false;
    look_up_virtual(s, p);
    return lead(s, p) <= (uint64_t)s->o->quantum_us * 1000;
}

/* Held back and spinning: it sees at once when its own launches finish. */
static bool watches_batches(const scenario *s, const player *p)
{
    return p->state == GATE && s->now < p->spin_until && (p->verdict == RG_WAIT_INFLIGHT || s->o->corun);
}

/* Whether a batch is finished; with `take`, those that are leave the flight. */
static bool batch_done(scenario *s, player *p, bool take)
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
    return high_busy(s) ? s->now - s->spell_ns : 0;
}

static uint64_t allowance(const scenario *s)
{
    bool has = s->o->policy == RG_POLICY_PRIORITY || s->o->policy == RG_POLICY_SLO;
    uint64_t starvation_ns = (uint64_t)s->o->starvation_us * 1000;
    return has ? rg_policy_allowance(busy_ns(s), s->paid_ns, starvation_ns, s->o->min_share_ppm) : 0;
}

static void enter_gate(scenario *s, player *p, enum rg_verdict verdict)
{
    for (uint32_t i = 0; i < p->of->profile->streams; i++)
        record_batch(p, i);
    p->state = GATE;
    p->verdict = verdict;
    p->since = p->looked = s->now;
    p->spin_until = s->now + (uint64_t)s->o->spin_us * 1000;
    p->spent_ns[0] = p->spent_ns[1] = 0;
    set_gate_timer(s, p);
    if (verdict == RG_WAIT_HIGH && allowance(s))
        p->at = s->now;
}

static void leave_gate(player *p)
{
    rg_scenario_result *r = p->result;
    r->gate_waits += p->spent_ns[0] > 0;
    r->gate_wait_ns += p->spent_ns[0];
    r->inflight_waits += p->spent_ns[1] > 0;
    r->inflight_wait_ns += p->spent_ns[1];
}

/* What the present operation costs the GPU, as far as the policies count it: copies and memsets use no SMs. */
static uint64_t cost_of(const player *p)
{
    const rg_profile_op *op = &p->of->profile->ops[p->op];
    return op->kind == RG_PROFILE_KERNEL ? op->duration_ns : 0;
}

/* One turn of the loop in rg_gate_wait. True when the launch may go. */
static bool look_again(scenario *s, player *p)
{
    bool progress = (p->verdict != RG_WAIT_HIGH || s->o->corun) && batch_done(s, p, true);
    uint64_t before = s->virtual_ns;
    p->spent_ns[p->verdict == RG_WAIT_INFLIGHT] += s->now - p->looked;
    p->looked = s->now;
    if (s->o->policy == RG_POLICY_FAIR)
        look_up_virtual(s, p);
    if ((progress && p->verdict == RG_WAIT_INFLIGHT) || (p->verdict == RG_WAIT_TURN && s->virtual_ns > before))
        p->since = s->now;
    rg_policy_view view = view_of(s, p);
    view.waited_ns = s->now - p->since;
    view.allowance_ns = allowance(s);
    enum rg_verdict next = rg_policy_decide(&view);
    bool full = view.inflight_limit && view.inflight >= view.inflight_limit;
    if (next == RG_PASS_STARVED && !full) {
        if (!p->credit) {
            p->credit = view.policy != RG_POLICY_FAIR && s->o->inflight ? s->o->inflight : 1;
            p->result->starved++;
        }
        p->credit--;
    } else if (!view.high_busy) {
        p->credit = 0;
    }
    if (next == RG_PASS_SHARE || (next == RG_PASS_STARVED && view.high_busy))
        s->paid_ns = rg_policy_pay(busy_ns(s), s->paid_ns, view.starvation_ns, s->o->min_share_ppm, cost_of(p));
    p->result->shared += next == RG_PASS_SHARE;
    if (!rg_policy_waits(next)) {
        leave_gate(p);
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

/* Its first work of a busy period. */
static void become_busy(scenario *s, player *p)
{
    if (!high_busy(s) && (!s->spell_ns || s->now - s->idle_ns >= RG_POLICY_BREAK_NS)) {
        s->spell_ns = s->now;
        s->paid_ns = 0;
    }
    p->busy = true;
}

/* A high client's work is finished: those that wait for it go on, sleepers once they are awake. */
static void become_idle(scenario *s, player *p)
{
    if (!p->busy)
        return;
    p->busy = false;
    p->idle_ns = s->now;
    if (high_busy(s))
        return;
    s->idle_ns = s->now;
    for (uint32_t i = 0; i < s->count; i++) {
        player *q = &s->players[i];
        if (q->state != GATE || q->verdict != RG_WAIT_HIGH)
            continue;
        uint64_t awake = s->now < q->spin_until ? s->now : s->now + s->o->wake_ns;
        q->at = awake < q->at ? awake : q->at;
    }
}

/* ---- Suspension */

static void suspend_best_effort(scenario *s, bool suspended)
{
    for (uint32_t i = 0; i < s->count; i++)
        if (s->players[i].of->best_effort && rg_model_suspend(s->model, s->players[i].context, suspended) < 0)
            fail(s, "the model refused a suspension");
}

/* Whether best-effort processes are to be off the GPU. */
static bool high_needs_gpu(const scenario *s)
{
    for (uint32_t i = 0; i < s->count; i++)
        if (s->o->drain ? s->players[i].launching : s->players[i].busy)
            return true;
    return false;
}

/* Lets the agent act at this instant. False when it has nothing to do now. */
static bool agent_act(scenario *s)
{
    if (s->mode != RG_SCENARIO_PREEMPT || !s->o->suspend)
        return false;
    bool busy = high_needs_gpu(s);
    if (busy != s->agent.busy) {
        s->agent.busy = busy;
        s->agent.since = s->now;
    }
    if (s->agent.state == RUNNING || s->agent.state == SUSPENDED) {
        bool wanted = busy == (s->agent.state == RUNNING);
        uint64_t delay_us = busy ? s->o->suspend_delay_us : s->o->resume_delay_us;
        s->agent.at = wanted ? s->agent.since + delay_us * 1000 : NEVER;
    }
    if (s->now < s->agent.at)
        return false;
    switch (s->agent.state) {
    case RUNNING:
        s->agent.state = SUSPENDING;
        s->agent.at = s->now + s->o->suspend_ns;
        break;
    case SUSPENDING:
        suspend_best_effort(s, true);
        s->agent.state = LEAVING;
        s->agent.at = s->now + s->o->gpu.preempt_ns;
        break;
    case LEAVING:
        s->agent.state = SUSPENDED;
        break;
    case SUSPENDED:
        s->agent.state = RESUMING;
        s->agent.at = s->now + s->o->resume_ns;
        break;
    case RESUMING:
        suspend_best_effort(s, false);
        s->agent.state = RUNNING;
        break;
    }
    return true;
}

/* ---- Launches */

static bool gated(const scenario *s, const player *p, const rg_profile_op *op)
{
    if (!p->governed || op->kind == RG_PROFILE_SYNC)
        return false;
    return op->kind == RG_PROFILE_KERNEL || op->bytes >= s->o->bulk_bytes;
}

static int submit(scenario *s, player *p, const rg_profile_op *op, uint64_t *ticket)
{
    uint32_t stream = p->streams[op->stream];
    const rg_shape *shape = &p->shapes[p->op];
    uint64_t bytes = op->bytes ? op->bytes : 1;
    rg_model_kernel kernel = {
        .blocks = shape->blocks,
        .threads = shape->block[0] * shape->block[1] * shape->block[2],
        .registers = RG_SHAPE_REGISTERS,
        .shared_bytes = shape->shared_bytes,
        .block_ns = shape->block_ns,
    };
    switch (op->kind) {
    case RG_PROFILE_KERNEL:
        return rg_model_submit_kernel(s->model, stream, &kernel, RG_MODEL_INHERIT, ticket);
    case RG_PROFILE_MEMSET:
        return rg_model_submit_transfer(s->model, stream, RG_MODEL_MEMSET, bytes, ticket);
    case RG_PROFILE_COPY_H2D:
        return rg_model_submit_transfer(s->model, stream, RG_MODEL_H2D, bytes, ticket);
    case RG_PROFILE_COPY_D2H:
        return rg_model_submit_transfer(s->model, stream, RG_MODEL_D2H, bytes, ticket);
    default:
        return rg_model_submit_transfer(s->model, stream, RG_MODEL_D2D, bytes, ticket);
    }
}

/* Launches the present operation, or waits for room in its stream. */
static bool launch(scenario *s, player *p)
{
    const rg_profile_op *op = &p->of->profile->ops[p->op];
    uint64_t ticket = 0;
    int result = submit(s, p, op, &ticket);
    if (result == RG_MODEL_FULL) {
        bool waited = p->state == QUEUE;
        p->state = QUEUE;
        p->at = NEVER;
        return !waited;
    }
    if (result < 0) {
        fail(s, "the model refused an operation: a kernel that no SM can hold");
        p->state = DONE;
        return true;
    }
    uint64_t return_ns = s->now + s->o->launch_ns;
    p->last_ticket = p->stream_ticket[op->stream] = ticket;
    p->result->launches++;
    if (gated(s, p, op)) {
        /* The gate has learned a kernel's duration by timing it; here it is known from the start. */
        uint32_t weight = op->kind == RG_PROFILE_KERNEL ? rg_policy_weight(op->duration_ns, s->o->unit_us * 1000ull)
                                                        : RG_POLICY_LAUNCH;
        p->inflight += weight;
        p->unbatched[op->stream] += weight;
        p->outstanding_ns += cost_of(p);
        p->unbatched_ns[op->stream] += cost_of(p);
        p->virtual_ns += rg_policy_virtual((uint32_t)cost_of(p), p->inverse);
        p->result->charged_ns += cost_of(p);
        rg_policy_view view = view_of(s, p);
        if (p->unbatched[op->stream] >= rg_policy_batch(&view)) {
            record_batch(p, op->stream);
            return_ns += s->o->record_ns;
        }
    }
    go_to_op(s, p, p->op + 1, return_ns);
    return true;
}

static bool act_on_op(scenario *s, player *p)
{
    const rg_profile_op *op = &p->of->profile->ops[p->op];
    if (op->kind == RG_PROFILE_SYNC) {
        p->state = SYNC;
        p->at = s->now;
        return true;
    }
    if (p->marks && !p->busy)
        become_busy(s, p);
    if (p->marks && !p->of->best_effort)
        p->launching = true;
    if (p->marks && !p->of->best_effort && op->kind == RG_PROFILE_KERNEL)
        s->high_bound = bound_of(op);
    if (gated(s, p, op)) {
        if (p->virtual_ns < s->virtual_ns)
            p->virtual_ns = s->virtual_ns; /* it was idle */
        rg_policy_view view = view_of(s, p);
        view.credit = 0; /* as rg_gate_view: the first decision knows of no wait and no credit */
        view.starvation_ns = 1;
        enum rg_verdict verdict = rg_policy_decide(&view);
        if (verdict == RG_WAIT_TURN) { /* before it waits, it looks who is the slowest by now */
            look_up_virtual(s, p);
            view.lead_ns = lead(s, p);
            verdict = rg_policy_decide(&view);
        }
        if (rg_policy_waits(verdict)) {
            enter_gate(s, p, verdict);
            return true;
        }
    }
    return launch(s, p);
}

static bool act_on_sync(scenario *s, player *p)
{
    p->launching = false;
    if (p->last_ticket && !rg_model_context_done(s->model, p->context, p->last_ticket)) {
        p->at = NEVER;
        return false;
    }
    become_idle(s, p);
    /* Past the last row, or on it: the request is over. */
    if (waits(p) && p->op + 1 >= p->of->profile->op_count) {
        finish_request(s, p);
        p->state = NEXT;
        p->at = s->now;
        return true;
    }
    go_to_op(s, p, p->op + 1, s->now);
    return true;
}

/* Lets one client act at this instant. False when it has nothing to do now. */
static bool act(scenario *s, player *p)
{
    bool timer = s->now >= p->at;
    switch (p->state) {
    case NEXT:
        return (timer || p->at == NEVER) && try_next(s, p);
    case DUE:
        if (timer)
            begin_iteration(s, p);
        return timer;
    case OP:
        return timer && act_on_op(s, p);
    case GATE:
        if (!timer && !(watches_batches(s, p) && batch_done(s, p, false)) && !sees_turn(s, p))
            return false;
        return look_again(s, p) ? launch(s, p) : true;
    case QUEUE:
        return launch(s, p);
    case SYNC:
        return (timer || p->at == NEVER) && act_on_sync(s, p);
    case DONE:
        return false;
    }
    return false;
}

/* The next instant at which a client may have something to do. */
static uint64_t next_instant(const scenario *s)
{
    uint64_t next = s->agent.at;
    bool watching = false; /* somebody waits for something that only the model can tell */
    for (uint32_t i = 0; i < s->count; i++) {
        const player *p = &s->players[i];
        if (p->state == DONE)
            continue;
        next = p->at < next ? p->at : next;
        watching |= p->at == NEVER || watches_batches(s, p);
    }
    if (watching) {
        uint64_t event = rg_model_next_event(s->model);
        next = event < next ? event : next;
    }
    /* The end of the duration is an instant: what is finished then is what counts. */
    if (s->now < s->o->duration_ns && next > s->o->duration_ns)
        next = s->o->duration_ns;
    return next;
}

/* The end of the duration: programs that run ahead stop; requests that fell due are still served. */
static void end_duration(scenario *s)
{
    for (uint32_t i = 0; i < s->count; i++) {
        player *p = &s->players[i];
        if (waits(p) || p->state == DONE)
            continue;
        collect_ahead(s, p);
        if (p->state == GATE)
            leave_gate(p);
        p->state = DONE;
        p->busy = false;
    }
}

static bool all_done(const scenario *s)
{
    for (uint32_t i = 0; i < s->count; i++)
        if (s->players[i].state != DONE)
            return false;
    return true;
}

static void play(scenario *s)
{
    bool ended = false;
    while (!s->failed && !all_done(s)) {
        uint64_t next = next_instant(s);
        if (next == NEVER) {
            fail(s, "the scenario waits for something that will never happen");
            return;
        }
        s->now = next > s->now ? next : s->now;
        rg_model_advance(s->model, s->now);
        if (!ended && s->now >= s->o->duration_ns) {
            ended = true;
            end_duration(s);
        }
        bool any;
        do {
            any = false;
            for (uint32_t i = 0; i < s->count; i++)
                while (!s->failed && act(s, &s->players[i]))
                    any = true;
            while (!s->failed && agent_act(s))
                any = true;
        } while (any && !s->failed);
    }
}

/* ---- Set-up and results */

static int compare_ns(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static uint64_t percentile(const player *p, uint64_t percent)
{
    size_t rank = (p->latency_count * percent + 99) / 100;
    return p->latency_count ? p->latencies[rank ? rank - 1 : 0] : 0;
}

static bool set_up(scenario *s, player *p, const rg_scenario_client *of, rg_scenario_result *result)
{
    const rg_model_params *gpu = &s->o->gpu;
    rg_shape_device device = {
        .sms = gpu->sms,
        .threads_per_sm = gpu->threads_per_sm,
        .blocks_per_sm = gpu->blocks_per_sm,
        .registers_per_sm = gpu->registers_per_sm,
        .shared_bytes_per_sm = gpu->shared_bytes_per_sm,
        .shared_bytes_per_block = gpu->shared_bytes_per_block,
        .reserved_shared_bytes = gpu->reserved_shared_bytes,
    };
    bool gate = s->mode == RG_SCENARIO_GOVERNED || (s->mode == RG_SCENARIO_PREEMPT && s->o->gate);
    bool governed = gate && s->o->policy != RG_POLICY_NONE;
    bool fair = governed && s->o->policy == RG_POLICY_FAIR;
    /* As rg_stream_prioritise gives the NULL stream: one below the highest for high clients, else the lowest. */
    int priority = governed && !fair && !of->best_effort ? RG_MODEL_HIGHEST_PRIORITY + 1 : RG_MODEL_LOWEST_PRIORITY;
    p->of = of;
    p->result = result;
    p->governed = governed && (fair || of->best_effort);
    p->marks = (governed && (fair || !of->best_effort)) || (s->mode == RG_SCENARIO_PREEMPT && !of->best_effort);
    p->inverse = rg_policy_inverse(of->weight);
    if (of->open_loop)
        rg_arrivals_init(&p->arrivals, of->arrivals, of->mean_gap_ns, of->seed);
    p->shapes = calloc(of->profile->op_count, sizeof(*p->shapes));
    if (!p->shapes)
        return false;
    for (uint32_t i = 0; i < of->profile->op_count; i++)
        if (of->profile->ops[i].kind == RG_PROFILE_KERNEL)
            rg_shape_plan(&of->profile->ops[i], &device, &p->shapes[i]);
    if (rg_model_add_context(s->model, &p->context) < 0)
        return false;
    uint64_t slice_us = of->best_effort ? s->o->be_slice_us : s->o->high_slice_us;
    if (s->mode == RG_SCENARIO_PREEMPT && slice_us && rg_model_set_slice(s->model, p->context, slice_us * 1000) < 0)
        return false;
    for (uint32_t i = 0; i < of->profile->streams; i++) {
        int sync = i ? RG_MODEL_NON_BLOCKING : RG_MODEL_LEGACY;
        if (rg_model_create_stream(s->model, p->context, priority, sync, &p->streams[i]) < 0)
            return false;
    }
    return true;
}

static int run_together(const rg_scenario_options *o, rg_scenario_mode mode, const rg_scenario_client *clients,
                        uint32_t count, rg_scenario_result *results, char *error, size_t error_bytes)
{
    scenario s = {.o = o, .mode = mode, .count = count, .error = error, .error_bytes = error_bytes};
    s.agent.at = NEVER;
    s.model = calloc(1, sizeof(*s.model));
    s.players = calloc(count, sizeof(*s.players));
    if (!s.model || !s.players) {
        fail(&s, "out of memory");
    } else {
        rg_model_init(s.model, &o->gpu);
        for (uint32_t i = 0; i < count && !s.failed; i++)
            if (!set_up(&s, &s.players[i], &clients[i], &results[i]))
                fail(&s, "out of memory, or out of the model's contexts or streams");
    }
    if (!s.failed)
        play(&s);
    for (uint32_t i = 0; s.players && i < count; i++) {
        player *p = &s.players[i];
        if (p->latency_count)
            qsort(p->latencies, p->latency_count, sizeof(*p->latencies), compare_ns);
        results[i].requests = p->latency_count;
        results[i].p50_ns = percentile(p, 50);
        results[i].p95_ns = percentile(p, 95);
        results[i].p99_ns = percentile(p, 99);
        free(p->latencies);
        free(p->shapes);
    }
    free(s.players);
    free(s.model);
    return s.failed ? -1 : 0;
}

rg_scenario_options rg_scenario_defaults(void)
{
    return (rg_scenario_options){
        .gpu = *rg_model_preset("h200"),
        .duration_ns = 10000000000,
        .policy = RG_POLICY_PRIORITY,
        .inflight = 8,
        .unit_us = 100,
        .starvation_us = 100000,
        .spin_us = 20,
        .bulk_bytes = 65536,
        .min_share_ppm = 50000,
        .quantum_us = RG_POLICY_QUANTUM_NS / 1000,
        .launch_ns = 2600,
        .record_ns = 170,
        .wake_ns = 50000,
        .be_slice_us = 50,
        .high_slice_us = 10000,
        .suspend = true,
        .drain = true,
        .suspend_delay_us = 50,
        .resume_delay_us = 50,
        .suspend_ns = 280000,
        .resume_ns = 230000,
    };
}

int rg_scenario_run(const rg_scenario_options *options, rg_scenario_mode mode, const rg_scenario_client *clients,
                    uint32_t count, rg_scenario_result *results, char *error, size_t error_bytes)
{
    if (count == 0 || count > RG_SCENARIO_MAX_CLIENTS) {
        snprintf(error, error_bytes, "expected 1 to %d clients, got %u", RG_SCENARIO_MAX_CLIENTS, count);
        return -1;
    }
    if (mode == RG_SCENARIO_PREEMPT && options->gpu.shared) {
        snprintf(error, error_bytes, "processes that share the GPU (MPS) have no slices and cannot be suspended");
        return -1;
    }
    memset(results, 0, count * sizeof(*results));
    if (mode != RG_SCENARIO_ALONE)
        return run_together(options, mode, clients, count, results, error, error_bytes);
    for (uint32_t i = 0; i < count; i++)
        if (run_together(options, mode, &clients[i], 1, &results[i], error, error_bytes) < 0)
            return -1;
    return 0;
}
