/*
 * scenario.c: see scenario.h: the clients, what they launch, and the loop. A loop over instants: the model is advanced to the next instant at which anything can
 * change, then the clients act in their order until none of them can.
 */
#include "scenario-inside.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void rg_scenario_fail(scenario *s, const char *what)
{
    if (!s->failed)
        snprintf(s->error, s->error_bytes, "%s", what);
    s->failed = true;
}

/* Thousandths: an import calls a kernel bound by memory from 600 on; this is the middle of what that may be. */
enum { MEMORY_BOUND = 800 };

/* ---- Iterations */

static void finish_request(scenario *s, player *p)
{
    if (p->latency_count == p->latency_capacity) {
        size_t wanted = p->latency_capacity ? 2 * p->latency_capacity : 1024;
        uint64_t *more = realloc(p->latencies, wanted * sizeof(*more));
        if (!more) {
            rg_scenario_fail(s, "out of memory for latencies");
            return;
        }
        p->latencies = more;
        p->latency_capacity = wanted;
    }
    p->latencies[p->latency_count++] = s->now - p->due_ns;
    if (s->tick.requests && !p->of->best_effort && p->of->reports)
        s->tick.requests[rg_hist_bucket(s->now - p->due_ns)]++;
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
    return p->of->open_loop || p->waited_for;
}

/* From the moment on, or the first. */
static void begin_moment(player *p, uint32_t moment)
{
    const uint64_t LEAST_PPM = 100000, MOST_PPM = 1000000000;
    const rg_scenario_moment *all = p->of->moments;
    uint32_t next = moment + 1;
    p->moment = moment;
    p->moment_until += next < p->of->moment_count ? all[next].at_ns - all[moment].at_ns : all[moment].work_ns;
    uint64_t gaps_ns = all[moment].work_ns > p->own_launch_ns ? all[moment].work_ns - p->own_launch_ns : 0;
    p->pace_ppm = p->own_gaps_ns ? gaps_ns * 1000000 / p->own_gaps_ns : 1000000;
    p->pace_ppm = p->pace_ppm < LEAST_PPM ? LEAST_PPM : p->pace_ppm > MOST_PPM ? MOST_PPM : p->pace_ppm;
}

/* What a gap takes the program at this moment. Spells and moments are the same however the GPU is shared. */
static uint64_t gap_of(const scenario *s, player *p, uint64_t gap_ns)
{
    if (p->of->moment_count) {
        while (p->moment_until <= s->now)
            begin_moment(p, (p->moment + 1) % p->of->moment_count);
        return gap_ns / 1000000 * p->pace_ppm + gap_ns % 1000000 * p->pace_ppm / 1000000;
    }
    if (!s->o->slow_ppm)
        return gap_ns;
    while (p->spell_until <= s->now) {
        p->slow = !p->slow;
        p->spell_until += rg_arrivals_next_gap_ns(&p->spells);
    }
    return p->slow ? gap_ns + gap_ns * s->o->slow_ppm / 1000000 : gap_ns;
}

static void go_to_op(scenario *s, player *p, uint32_t op, uint64_t return_ns)
{
    p->op = op;
    if (op < p->profile->op_count) {
        p->state = OP;
        p->at = return_ns + gap_of(s, p, p->profile->ops[op].gap_ns);
        return;
    }
    if (waits(p)) { /* a last row that is no sync: the request is waited for all the same */
        p->state = SYNC;
        p->at = return_ns;
        return;
    }
    uint32_t last = p->profile->op_count - 1;
    uint32_t stream = p->profile->ops[last].stream;
    uint32_t slot = (p->ahead_first + p->ahead_count++) % AHEAD;
    p->ahead[slot].stream = p->streams[stream];
    p->ahead[slot].ticket = p->stream_ticket[stream];
    p->state = NEXT;
    p->at = return_ns;
    (void)s;
}

static void begin_iteration(scenario *s, player *p)
{
    uint32_t kind = rg_profiles_draw(p->of->draw_seed, p->begun++, p->of->profile_count);
    p->profile = &p->of->profiles[kind];
    p->shapes = p->all_shapes[kind];
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

/* ---- Launches */

static bool gated(const scenario *s, const player *p, const rg_profile_op *op)
{
    if (!p->governed || op->kind == RG_PROFILE_SYNC)
        return false;
    return op->kind == RG_PROFILE_KERNEL || op->bytes >= s->o->bulk_bytes;
}

/* The part of the memory's bandwidth that a kernel takes alone; bound by memory and no more known of it: MEMORY_BOUND. */
static uint32_t memory_permille(const scenario *s, const rg_profile_op *op)
{
    uint64_t most = s->o->gpu.memory_bytes_per_us * (op->duration_ns / 1000 + 1) / 1000;
    if (!op->dram_bytes || !most)
        return op->bound == 0 ? MEMORY_BOUND : 0;
    uint64_t permille = op->dram_bytes / most;
    return permille < 1000 ? (uint32_t)permille : 1000;
}

static int submit(scenario *s, player *p, const rg_profile_op *op, uint64_t *ticket)
{
    uint32_t stream = p->streams[op->stream];
    const rg_shape *shape = &p->shapes[p->op];
    uint64_t at_once = (uint64_t)shape->blocks_per_sm * s->o->gpu.sms, waves = at_once ? (shape->blocks + at_once - 1) / at_once : 1;
    uint64_t bytes = op->bytes ? op->bytes : 1;
    rg_model_kernel kernel = {
        .blocks = shape->blocks,
        .threads = shape->block[0] * shape->block[1] * shape->block[2],
        .registers = op->registers,
        .shared_bytes = op->shared_bytes,
        .block_ns = shape->block_ns + (p->behind_stop ? s->o->stop_gpu_ns / waves : 0),
        .memory_permille = memory_permille(s, op),
        .memory_bound = op->bound == 0,
    };
    switch (op->kind) {
    case RG_PROFILE_KERNEL:
        /* What it took of an SM when it was recorded, it keeps from others here; but not what Orion's rows do not tell, or another GPU's. */
        if (op->sms || rg_model_occupancy(&s->o->gpu, &kernel) != shape->blocks_per_sm) {
            kernel.registers = RG_SHAPE_REGISTERS;
            kernel.shared_bytes = shape->shared_bytes;
        }
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

/* A stop in front of the present operation, if it is time for one (rg_stop_before). Looked at once, however often it is tried. */
static int submit_stop(scenario *s, player *p, const rg_profile_op *op)
{
    if (!rg_scenario_stops(s) || !p->of->best_effort || op->kind != RG_PROFILE_KERNEL || p->stops_at == p->result->launches + 1)
        return 0;
    uint64_t *since_ns = &p->since_stop_ns[op->stream];
    p->behind_stop = *since_ns + op->duration_ns > s->o->stop_us * 1000ull;
    int result = p->behind_stop ? rg_model_submit_stop(s->model, p->streams[op->stream], NULL) : 0;
    if (result)
        return result;
    *since_ns = p->behind_stop ? op->duration_ns : *since_ns + op->duration_ns;
    p->stops_at = p->result->launches + 1;
    return 0;
}

/* Launches the present operation, or waits for room in its stream. */
static bool launch(scenario *s, player *p)
{
    const rg_profile_op *op = &p->profile->ops[p->op];
    uint64_t ticket = 0;
    int result = submit_stop(s, p, op);
    if (!result)
        result = submit(s, p, op, &ticket);
    if (result == RG_MODEL_FULL) {
        bool waited = p->state == QUEUE;
        p->state = QUEUE;
        p->at = NEVER;
        return !waited;
    }
    if (result < 0) {
        rg_scenario_fail(s, "the model refused an operation: a kernel that no SM can hold");
        p->state = DONE;
        return true;
    }
    uint64_t return_ns = s->now + s->o->launch_ns + (p->behind_stop ? s->o->stop_ns : 0);
    p->behind_stop = false;
    p->last_ticket = p->stream_ticket[op->stream] = ticket;
    p->result->launches++;
    if (op->kind == RG_PROFILE_KERNEL) {
        p->made++;
        rg_scenario_request_launches(s, p);
    }
    if (p->of->best_effort)
        s->tick.launches++;
    s->tick.launched[p - s->players]++;
    if (gated(s, p, op)) {
        /* The gate has learned a kernel's duration by timing it; here it is known from the start. */
        uint32_t weight = op->kind == RG_PROFILE_KERNEL ? rg_policy_weight(op->duration_ns, s->o->unit_us * 1000ull)
                                                        : RG_POLICY_LAUNCH;
        p->inflight += weight;
        p->unbatched[op->stream] += weight;
        p->outstanding_ns += rg_scenario_cost_of(p);
        p->unbatched_ns[op->stream] += rg_scenario_cost_of(p);
        uint64_t cost_ns = rg_scenario_cost_of(p), most_ns = UINT32_MAX; /* to the gate, too, no kernel is longer than what fits */
        p->virtual_ns += rg_policy_virtual((uint32_t)(cost_ns < most_ns ? cost_ns : most_ns), p->inverse);
        p->result->charged_ns += rg_scenario_cost_of(p);
        rg_policy_view view = rg_scenario_view_of(s, p);
        if (p->unbatched[op->stream] >= rg_policy_batch(&view)) {
            rg_scenario_record_batch(p, op->stream);
            return_ns += s->o->record_ns;
        }
    }
    go_to_op(s, p, p->op + 1, return_ns);
    return true;
}

static bool act_on_op(scenario *s, player *p)
{
    const rg_profile_op *op = &p->profile->ops[p->op];
    if (op->kind == RG_PROFILE_SYNC) {
        p->state = SYNC;
        p->at = s->now;
        return true;
    }
    if (p->marks && !p->busy)
        rg_scenario_become_busy(s, p);
    if (p->marks && !p->of->best_effort)
        p->launching = true;
    if (p->marks && !p->of->best_effort && op->kind == RG_PROFILE_KERNEL)
        s->high_bound = rg_scenario_bound_of(op);
    if (gated(s, p, op)) {
        if (p->virtual_ns < s->virtual_ns)
            p->virtual_ns = s->virtual_ns; /* it was idle */
        rg_scenario_settle(s, p);
        rg_policy_view view = rg_scenario_view_of(s, p);
        view.credit = 0; /* as rg_gate_view: the first decision knows of no wait and no credit */
        view.starvation_ns = 1;
        rg_scenario_put_off(s, &view);
        enum rg_verdict verdict = rg_policy_decide(&view);
        if (verdict == RG_WAIT_TURN) { /* before it waits, it looks who is the slowest by now */
            rg_scenario_look_up_virtual(s, p);
            view.lead_ns = rg_scenario_lead(s, p);
            verdict = rg_policy_decide(&view);
        }
        if (rg_policy_waits(verdict)) {
            rg_scenario_enter_gate(s, p, verdict);
            return true;
        }
    }
    return launch(s, p);
}

static bool act_on_sync(scenario *s, player *p)
{
    if (p->launching)
        p->wait_ns = s->now;
    p->launching = false;
    if (p->last_ticket && !rg_model_context_done(s->model, p->context, p->last_ticket)) {
        p->at = NEVER;
        return false;
    }
    rg_scenario_become_idle(s, p);
    /* Past the last row, or on it: the request is over. */
    if (waits(p) && p->op + 1 >= p->profile->op_count) {
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
        if (!timer && !(rg_scenario_watches_batches(s, p) && rg_scenario_batch_done(s, p, false)) && !rg_scenario_sees_turn(s, p))
            return false;
        return rg_scenario_look_again(s, p) ? launch(s, p) : true;
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
        watching |= p->at == NEVER || rg_scenario_watches_batches(s, p);
    }
    if (watching) {
        uint64_t event = rg_model_next_event(s->model);
        next = event < next ? event : next;
    }
    /* The end of the duration is an instant: what is finished then is what counts. */
    if (s->now < s->o->duration_ns && next > s->o->duration_ns)
        next = s->o->duration_ns;
    if (s->next_tick_ns < next)
        next = s->next_tick_ns;
    return next;
}

static void count_finished(scenario *s, player *p)
{
    rg_model_context_stats stats;
    if (rg_model_get_context_stats(s->model, p->context, &stats) == 0)
        p->result->finished = stats.kernels + stats.transfers;
}

/* The end of the duration: programs that run ahead stop; requests that fell due are still served. */
static void end_duration(scenario *s)
{
    for (uint32_t i = 0; i < s->count; i++) {
        player *p = &s->players[i];
        count_finished(s, p);
        if (waits(p) || p->state == DONE)
            continue;
        collect_ahead(s, p);
        if (p->state == GATE)
            rg_scenario_leave_gate(p);
        p->state = DONE;
        p->busy = false;
    }
}

/* Asks the control loop, and does what it says. */
static void tick(scenario *s)
{
    rg_scenario_options *o = s->o;
    rg_scenario_tick *t = &s->tick;
    bool held = s->hold;
    t->now_ns = s->now;
    t->suspend = o->suspend;
    t->defer_us = o->defer_us;
    t->defer_ppm = o->defer_ppm;
    t->need_us = o->need_us;
    t->slice_us = o->be_slice_us;
    t->inflight = o->inflight;
    t->corun = o->corun;
    t->stop_us = o->stop_us;
    t->share_period_us = o->share_period_us;
    t->hold = false;
    if (o->on_tick(o->user, t) != 0) {
        rg_scenario_fail(s, "the control loop ended");
        return;
    }
    bool slices = t->slice_us != o->be_slice_us || (t->suspend != 0) != o->suspend;
    o->suspend = t->suspend != 0;
    o->defer_us = t->defer_us;
    o->defer_ppm = t->defer_ppm;
    o->need_us = t->need_us;
    o->be_slice_us = t->slice_us;
    o->inflight = t->inflight;
    o->corun = t->corun;
    o->stop_us = t->stop_us;
    o->share_period_us = t->share_period_us;
    s->hold = t->hold;
    if (s->mode == RG_SCENARIO_PREEMPT && !o->gpu.shared && t->turns != s->turns)
        rg_scenario_give_turns(s, t->turns);
    if (slices && s->mode == RG_SCENARIO_PREEMPT)
        rg_scenario_set_slices(s);
    if (held && !s->hold)
        rg_scenario_wake_gate(s);
    memset(t->requests, 0, RG_HIST_BUCKETS * sizeof(*t->requests));
    t->wait_count = 0;
    t->launches = t->starved = 0;
    memset(t->launched, 0, sizeof(t->launched));
    t->shared = false;
    s->next_tick_ns += o->tick_ns;
    if (s->next_tick_ns > o->duration_ns) {
        s->next_tick_ns = NEVER;
        s->hold = false;
        if (s->turns)
            rg_scenario_give_turns(s, 0);
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
            rg_scenario_fail(s, "the scenario waits for something that will never happen");
            return;
        }
        s->now = next > s->now ? next : s->now;
        rg_model_advance(s->model, s->now);
        if (!ended && s->now >= s->o->duration_ns) {
            ended = true;
            end_duration(s);
        }
        if (s->now >= s->next_tick_ns)
            tick(s);
        if (s->now >= s->next_progress_ns) {
            s->o->on_progress(s->o->user, s->now);
            s->next_progress_ns = s->now + s->o->progress_ns;
        }
        bool any;
        do {
            any = false;
            for (uint32_t i = 0; i < s->count; i++)
                while (!s->failed && act(s, &s->players[i]))
                    any = true;
            while (!s->failed && rg_scenario_agent_act(s))
                any = true;
        } while (any && !s->failed);
    }
    if (!ended && !s->failed) /* all of them have launched all before: what that is still at work on */
        rg_model_advance(s->model, s->o->duration_ns);
    for (uint32_t i = 0; !ended && i < s->count; i++)
        count_finished(s, &s->players[i]);
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

/* What one of the profiles is on this GPU, and what it adds to what is known of all. */
static bool add_profile(scenario *s, player *p, uint32_t kind, const rg_shape_device *device)
{
    const rg_profile *profile = &p->of->profiles[kind];
    rg_shape *shapes = p->all_shapes[kind] = calloc(profile->op_count, sizeof(*shapes));
    if (!shapes)
        return false;
    uint64_t sum_ns = 0;
    for (uint32_t i = 0; i < profile->op_count; i++) {
        const rg_profile_op *op = &profile->ops[i];
        p->own_gaps_ns += i ? op->gap_ns : 0;
        if (op->kind != RG_PROFILE_KERNEL)
            continue;
        rg_shape_plan(op, device, &shapes[i]);
        sum_ns += op->duration_ns;
    }
    p->own_launch_ns += s->o->launch_ns * profile->launches;
    p->stream_count = profile->streams > p->stream_count ? profile->streams : p->stream_count;
    s->long_requests |= !p->of->best_effort && waits(p) && s->o->high_slice_us && sum_ns >= s->o->high_slice_us * 1000ull;
    return true;
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
    bool on_its_own = s->mode == RG_SCENARIO_PREEMPT && s->o->gpu.shared;
    bool fair = governed && s->o->policy == RG_POLICY_FAIR;
    /* As rg_stream_prioritise gives the NULL stream: one below the highest for high clients, else the lowest. */
    int priority = (governed || on_its_own) && !fair && !of->best_effort ? RG_MODEL_HIGHEST_PRIORITY + 1 : RG_MODEL_LOWEST_PRIORITY;
    p->of = of;
    p->result = result;
    p->governed = governed && (fair || of->best_effort);
    p->marks = (governed && (fair || !of->best_effort)) || (s->mode == RG_SCENARIO_PREEMPT && !of->best_effort);
    p->inverse = rg_policy_inverse(of->weight);
    if (of->open_loop && of->arrivals == RG_ARRIVALS_LIST)
        p->arrivals = *of->list;
    else if (of->open_loop)
        rg_arrivals_init(&p->arrivals, of->arrivals, of->mean_gap_ns, of->seed);
    uint64_t seed = ~of->seed;
    rg_arrivals_init(&p->spells, RG_ARRIVALS_POISSON, RG_SCENARIO_SPELL_NS, seed);
    p->slow = rg_random(&seed) & 1;
    p->spell_until = rg_arrivals_next_gap_ns(&p->spells);
    p->waited_for = rg_profiles_wait(of->profiles, of->profile_count);
    for (uint32_t kind = 0; kind < of->profile_count; kind++)
        if (!add_profile(s, p, kind, &device))
            return false;
    p->profile = &of->profiles[0];
    p->shapes = p->all_shapes[0];
    p->own_gaps_ns /= of->profile_count;
    p->own_launch_ns /= of->profile_count;
    if (of->moment_count)
        begin_moment(p, (uint32_t)(rg_random(&seed) % of->moment_count));
    if (rg_model_add_context(s->model, &p->context) < 0)
        return false;
    for (uint32_t i = 0; i < p->stream_count; i++) {
        int sync = i ? RG_MODEL_NON_BLOCKING : RG_MODEL_LEGACY;
        if (rg_model_create_stream(s->model, p->context, priority, sync, &p->streams[i]) < 0)
            return false;
    }
    return true;
}

static int run_together(const rg_scenario_options *o, rg_scenario_mode mode, const rg_scenario_client *clients,
                        uint32_t count, rg_scenario_result *results, char *error, size_t error_bytes)
{
    rg_scenario_options own = *o;
    scenario s = {.o = &own, .mode = mode, .count = count, .error = error, .error_bytes = error_bytes};
    bool ticks = o->tick_ns && o->on_tick && mode != RG_SCENARIO_ALONE;
    s.agent.at = NEVER;
    s.next_tick_ns = ticks ? o->tick_ns : NEVER;
    s.next_progress_ns = o->on_progress ? o->progress_ns : NEVER;
    s.tick.requests = ticks ? calloc(RG_HIST_BUCKETS, sizeof(*s.tick.requests)) : NULL;
    s.tick.waits = ticks ? calloc(RG_SCENARIO_WAITS, sizeof(*s.tick.waits)) : NULL;
    s.model = calloc(1, sizeof(*s.model));
    s.players = calloc(count, sizeof(*s.players));
    if (!s.model || !s.players || (ticks && (!s.tick.requests || !s.tick.waits))) {
        rg_scenario_fail(&s, "out of memory");
    } else {
        rg_model_init(s.model, &o->gpu);
        for (uint32_t i = 0; i < count && !s.failed; i++)
            if (!set_up(&s, &s.players[i], &clients[i], &results[i]))
                rg_scenario_fail(&s, "out of memory, or out of the model's contexts or streams");
        rg_scenario_forget_requests(&s);
    }
    if (!s.failed && mode == RG_SCENARIO_PREEMPT)
        rg_scenario_set_slices(&s);
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
        for (uint32_t k = 0; k < RG_PROFILES_MOST; k++)
            free(p->all_shapes[k]);
    }
    free(s.tick.requests);
    free(s.tick.waits);
    free(s.players);
    free(s.model);
    return s.failed ? -1 : 0;
}

rg_scenario_options rg_scenario_defaults(void)
{
    const rg_settings s = RG_SETTINGS_DEFAULT;
    return (rg_scenario_options){
        .gpu = *rg_model_preset("h200"),
        .duration_ns = 10000000000,
        .policy = s.policy,
        .inflight = s.inflight,
        .unit_us = s.unit_us,
        .corun = s.corun,
        .starvation_us = s.starvation_us,
        .spin_us = s.spin_us,
        .bulk_bytes = s.bulk_bytes,
        .min_share_ppm = s.min_share_ppm,
        .share_period_us = s.share_period_us,
        .quantum_us = s.quantum_us,
        .sms_limit = s.sms_limit,
        .outstanding_us = s.outstanding_us,
        .defer_us = s.defer_us,
        .defer_ppm = s.defer_ppm,
        .need_us = s.need_us,
        .launch_ns = 2600,
        .record_ns = 170,
        .wake_ns = 50000,
        .be_slice_us = s.slice_us,
        .high_slice_us = s.high_slice_us,
        .suspend = s.suspend,
        .drain = true,
        .suspend_delay_us = 50,
        .resume_delay_us = 50,
        .suspend_ns = 280000,
        .resume_ns = 230000,
        .stop_us = s.stop_us,
        .stop_ns = 1200,
        .stop_gpu_ns = 3000,
    };
}

int rg_scenario_run(const rg_scenario_options *options, rg_scenario_mode mode, const rg_scenario_client *clients,
                    uint32_t count, rg_scenario_result *results, char *error, size_t error_bytes)
{
    if (count == 0 || count > RG_SCENARIO_MAX_CLIENTS) {
        snprintf(error, error_bytes, "expected 1 to %d clients, got %u", RG_SCENARIO_MAX_CLIENTS, count);
        return -1;
    }
    if (mode == RG_SCENARIO_PREEMPT && options->gpu.shared && !options->stop_us) {
        snprintf(error, error_bytes, "processes that share the GPU (MPS) have no slices and cannot be suspended; they have stops, with a stop_us");
        return -1;
    }
    for (uint32_t i = 0; i < count; i++)
        if (clients[i].profile_count == 0 || clients[i].profile_count > RG_PROFILES_MOST) {
            snprintf(error, error_bytes, "client %u: expected 1 to %u profiles, got %u", i, RG_PROFILES_MOST, clients[i].profile_count);
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
