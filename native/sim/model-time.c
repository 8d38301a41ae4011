/*
 * model-time.c: what happens in the model as time passes: endings, arrivals, exchange of contexts, dispatch of blocks.
 *
 * Cost is what shapes this file: a training job is 50,000 kernels a second of thousands of blocks each, and the model
 * has to stay a small part of one core. Blocks that start together are one event; a wave that is followed by an equal
 * wave of the same kernel changes nothing but an end time (the short way in `dispatch`).
 */
#include "model-inside.h"

#include <string.h>

/* ---- Cohorts: pairing heap by (end, seq). Insertion is O(1); the first is taken in O(log n) amortised. */

static bool sooner(const rg_model_cohort *a, const rg_model_cohort *b)
{
    return a->end != b->end ? a->end < b->end : a->seq < b->seq;
}

static uint32_t heap_meld(rg_model *m, uint32_t a, uint32_t b)
{
    if (!a) return b;
    if (!b) return a;
    if (sooner(&m->cohorts[b], &m->cohorts[a])) {
        uint32_t swap = a;
        a = b;
        b = swap;
    }
    m->cohorts[b].sibling = m->cohorts[a].child;
    m->cohorts[a].child = b;
    return a;
}

static void heap_push(rg_model *m, rg_model_domain *d, uint32_t cohort)
{
    uint32_t *heap = &d->clock[m->cohorts[cohort].bound].heap;
    m->cohorts[cohort].child = m->cohorts[cohort].sibling = 0;
    *heap = heap_meld(m, *heap, cohort);
}

static uint32_t heap_pop(rg_model *m, rg_model_domain *d, int bound)
{
    uint32_t top = d->clock[bound].heap, pairs = 0, rest = m->cohorts[top].child;
    while (rest) {
        uint32_t a = rest, b = m->cohorts[a].sibling;
        rest = b ? m->cohorts[b].sibling : 0;
        m->cohorts[a].sibling = 0;
        if (b) m->cohorts[b].sibling = 0;
        a = heap_meld(m, a, b);
        m->cohorts[a].sibling = pairs;
        pairs = a;
    }
    uint32_t root = 0;
    while (pairs) {
        uint32_t next = m->cohorts[pairs].sibling;
        m->cohorts[pairs].sibling = 0;
        root = heap_meld(m, root, pairs);
        pairs = next;
    }
    d->clock[bound].heap = root;
    return top;
}

static uint32_t cohort_new(rg_model *m)
{
    uint32_t c = m->cohort_free;
    if (c) m->cohort_free = m->cohorts[c].sibling;
    else if (m->cohort_used < RG_MODEL_MAX_COHORTS) c = ++m->cohort_used;
    return c;
}

static void cohort_delete(rg_model *m, uint32_t c)
{
    m->cohorts[c].sibling = m->cohort_free;
    m->cohort_free = c;
}

/* ---- The clocks of a domain: see rule 6 */

enum { FULL_RATE = 1024, WHOLE_GPU = 1 << 20 };

static void bring_up_to_date(rg_model *m, rg_model_domain *d)
{
    for (int i = 0; i < 2; i++) d->clock[i].done += d->clock[i].rate * (m->now - d->since);
    d->since = m->now;
}

static uint32_t rate_of(uint64_t permille) { return (uint32_t)(FULL_RATE * 1000ull / permille); }

/* What is placed beyond the whole GPU, in thousandths of the time that it adds. */
static uint64_t overload(const rg_model *m, uint64_t weight)
{
    return weight > WHOLE_GPU ? (weight - WHOLE_GPU) * m->p.sm_contention >> 20 : 0;
}

/* Something began or ended: how fast everything goes from now on. */
static void set_rates(rg_model *m, rg_model_domain *d)
{
    uint64_t own = d->clock[0].weight, memory = d->clock[1].weight, mixed = m->p.mixed_contention;
    uint64_t slower = 1000 + overload(m, own + memory * mixed / 1000);
    uint64_t bound = 1000 + overload(m, own + memory) * mixed / 1000;
    uint64_t most = 1000ull << 20, wanted = d->clock[1].demand, taken = d->clock[0].demand;
    uint64_t left = taken > most / 2 ? most / 2 : most - taken; /* what asks for more is itself bound by memory */
    if (wanted > left && wanted / (left / 1000) > bound) bound = wanted / (left / 1000);
    uint32_t rate[2] = {rate_of(slower), rate_of(bound)};
    if (rate[0] == d->clock[0].rate && rate[1] == d->clock[1].rate) return;
    bring_up_to_date(m, d);
    d->clock[0].rate = rate[0];
    d->clock[1].rate = rate[1];
}

/* When the first cohort of a kind ends, as things are. */
static uint64_t first_end(const rg_model *m, const rg_model_domain *d, int bound)
{
    uint32_t heap = d->clock[bound].heap;
    if (!heap) return RG_MODEL_NEVER;
    uint64_t end = m->cohorts[heap].end, done = d->clock[bound].done, rate = d->clock[bound].rate;
    if (end <= done) return d->since;
    return d->since + (rate == FULL_RATE ? (end - done + FULL_RATE - 1) / FULL_RATE : (end - done + rate - 1) / rate);
}

/* Of which kind the cohort is that ends next. */
static int first_kind(const rg_model *m, const rg_model_domain *d)
{
    if (!d->clock[1].heap) return 0;
    uint64_t a = first_end(m, d, 0), b = first_end(m, d, 1);
    if (a != b) return b < a;
    return a != RG_MODEL_NEVER && m->cohorts[d->clock[1].heap].seq < m->cohorts[d->clock[0].heap].seq;
}

static uint64_t end_of(const rg_model *m, const rg_model_domain *d, int bound, uint64_t ns)
{
    return d->clock[bound].done + d->clock[bound].rate * (m->now - d->since) + ns * FULL_RATE;
}

/* ---- Timers: binary heap of the streams whose first operation is on its way to the GPU, by (time, ticket). */

static bool timer_sooner(const rg_model *m, uint32_t a, uint32_t b)
{
    return m->timer[a].at != m->timer[b].at ? m->timer[a].at < m->timer[b].at : m->timer[a].seq < m->timer[b].seq;
}

static void timer_swap(rg_model *m, uint32_t a, uint32_t b)
{
    __typeof__(m->timer[0]) keep = m->timer[a];
    m->timer[a] = m->timer[b];
    m->timer[b] = keep;
}

static void timer_push(rg_model *m, uint64_t at, uint64_t seq, uint32_t stream)
{
    uint32_t i = m->timers++;
    m->timer[i].at = at;
    m->timer[i].seq = seq;
    m->timer[i].stream = stream;
    for (; i && timer_sooner(m, i, (i - 1) / 2); i = (i - 1) / 2) timer_swap(m, i, (i - 1) / 2);
}

static uint32_t timer_pop(rg_model *m)
{
    uint32_t stream = m->timer[0].stream;
    m->timer[0] = m->timer[--m->timers];
    for (uint32_t i = 0;;) {
        uint32_t least = i, left = 2 * i + 1;
        if (left < m->timers && timer_sooner(m, left, least)) least = left;
        if (left + 1 < m->timers && timer_sooner(m, left + 1, least)) least = left + 1;
        if (least == i) return stream;
        timer_swap(m, i, least);
        i = least;
    }
}

/* ---- Accounts */

static void sm_busy_account(rg_model *m, uint32_t busy_sms)
{
    m->sm_busy_ns += busy_sms * (m->now - m->sm_busy_since);
    m->sm_busy_since = m->now;
}

static void resident_add(rg_model *m, uint32_t context, int change)
{
    rg_model_context *c = &m->contexts[context];
    if (!c->resident) c->busy_since = m->now;
    c->resident = (uint32_t)((int)c->resident + change);
    if (!c->resident) c->busy_ns += m->now - c->busy_since;
}

static void load_add(rg_model *m, uint32_t domain, int change)
{
    rg_model_domain *d = &m->domains[domain];
    bool counts = !m->contexts[domain].suspended; /* a domain that can be suspended is one context */
    if (!d->load && counts) {
        m->wanting++;
        m->kick = 1; /* somebody new wants the SMs: exchange() has to see it */
    }
    d->load = (uint32_t)((int)d->load + change);
    if (!d->load && counts) m->wanting--;
    if (!d->load && m->active == (int32_t)domain) m->idle_from = m->now;
}

/* ---- Streams: starting the first operation of each as soon as what it depends on is done. */

void rg_model_pump(rg_model *m, uint32_t stream)
{
    rg_model_stream *s = &m->streams[stream];
    if (s->pumping) return;
    s->pumping = 1;
    s->next_pump = 0;
    if (m->pump_tail) m->streams[m->pump_tail - 1].next_pump = stream + 1;
    else m->pump_head = stream + 1;
    m->pump_tail = stream + 1;
}

/* The legacy stream's order: see rg_model_create_stream. */
static bool legacy_order_met(const rg_model *m, const rg_model_stream *s, uint64_t seq)
{
    const rg_model_context *c = &m->contexts[s->context];
    if (s->blocking && c->legacy) {
        const rg_model_stream *legacy = &m->streams[c->legacy - 1];
        return !legacy->head || m->ops[legacy->head].seq > seq;
    }
    if (!s->legacy || !c->blocking) return true;
    for (uint32_t i = c->streams; i; i = m->streams[i - 1].next_in_context) {
        const rg_model_stream *other = &m->streams[i - 1];
        if (other->blocking && other->head && m->ops[other->head].seq < seq) return false;
    }
    return true;
}

/* The first operation of the stream is done. */
static void finish(rg_model *m, uint32_t stream)
{
    rg_model_stream *s = &m->streams[stream];
    rg_model_context *c = &m->contexts[s->context];
    uint32_t op = s->head;
    s->head = m->ops[op].next;
    if (!s->head) s->tail = 0;
    s->depth--;
    s->done_ns = m->now;
    c->pending--;
    m->ops[op].next = m->op_free;
    m->op_free = op;
    if (s->head) rg_model_pump(m, stream);
    if (s->legacy && c->blocking) {
        for (uint32_t i = c->streams; i; i = m->streams[i - 1].next_in_context)
            if (m->streams[i - 1].waits == WAITS_LEGACY) rg_model_pump(m, i - 1);
    }
    if (s->blocking && c->legacy && m->streams[c->legacy - 1].waits == WAITS_LEGACY) rg_model_pump(m, c->legacy - 1);
    if (!s->head && s->state == SLOT_CLOSING) rg_model_free_stream(m, stream);
}

static void reach_event(rg_model *m, uint32_t event, uint64_t version)
{
    rg_model_event *e = &m->events[event];
    if (version > e->done) {
        e->done = version;
        e->time_ns = m->now;
    }
    uint32_t *link = &e->waiters;
    while (*link) {
        uint32_t stream = *link - 1;
        rg_model_stream *s = &m->streams[stream];
        if (m->ops[s->head].amount > e->done) {
            link = &s->next_waiter;
            continue;
        }
        *link = s->next_waiter;
        s->waits = WAITS_NOT;
        rg_model_pump(m, stream);
    }
}

/* The work of a kernel or transfer, alone or as a node of a graph, sets out for the GPU and arrives at `at`. */
static void depart(rg_model *m, uint32_t stream, rg_model_op *op, uint64_t at)
{
    op->arrive_ns = at;
    op->phase = PHASE_ARRIVING;
    if (op->doing == OP_KERNEL) load_add(m, domain_of(m, m->streams[stream].context), 1);
    timer_push(m, at, op->seq, stream);
}

static void load_node(rg_model *m, rg_model_op *op, uint32_t node)
{
    const rg_model_node *n = &m->nodes[node];
    op->node = node;
    op->doing = n->kind;
    op->transfer = n->transfer;
    op->priority = n->priority;
    op->amount = n->amount;
    op->need = n->need;
    op->blocks_left = n->blocks;
    op->capacity = n->capacity;
    op->demand = n->demand;
    op->bound = n->bound;
    op->running = 0;
}

static void start_head(rg_model *m, uint32_t stream)
{
    rg_model_stream *s = &m->streams[stream];
    rg_model_op *op = &m->ops[s->head];
    if (!s->head || op->phase != PHASE_QUEUED || s->waits == WAITS_EVENT) return;
    if (m->contexts[s->context].suspended && op->kind != OP_TRANSFER) return; /* rg_model_suspend looks again */
    if (!legacy_order_met(m, s, op->seq)) {
        s->waits = WAITS_LEGACY;
        return;
    }
    s->waits = WAITS_NOT;
    switch (op->kind) {
    case OP_STOP:
        if (!m->contexts[s->context].stopped) finish(m, stream); /* else rg_model_stop looks again */
        return;
    case OP_RECORD:
        reach_event(m, op->target, op->amount);
        rg_model_drop_event_ref(m, op->target);
        finish(m, stream);
        return;
    case OP_WAIT:
        if (m->events[op->target].done >= op->amount) {
            rg_model_drop_event_ref(m, op->target);
            finish(m, stream);
            return;
        }
        s->waits = WAITS_EVENT;
        s->next_waiter = m->events[op->target].waiters;
        m->events[op->target].waiters = stream + 1;
        return;
    case OP_GRAPH:
        if (!m->graphs[op->target].head) {
            rg_model_drop_graph_ref(m, op->target);
            finish(m, stream);
            return;
        }
        load_node(m, op, m->graphs[op->target].head);
        break;
    default:
        break;
    }
    uint64_t at = op->submit_ns + m->p.launch_ns;
    /* Work that had to wait was launched long ago; only the hand-over from what it waited for is left. */
    if (m->now > op->submit_ns && m->now + m->p.chain_ns > at) at = m->now + m->p.chain_ns;
    depart(m, stream, op, at);
}

void rg_model_pump_all(rg_model *m)
{
    while (m->pump_head) {
        uint32_t stream = m->pump_head - 1;
        rg_model_stream *s = &m->streams[stream];
        m->pump_head = s->next_pump;
        if (!m->pump_head) m->pump_tail = 0;
        s->pumping = 0;
        if (s->state != SLOT_FREE) start_head(m, stream);
    }
}

/* A kernel's last block or a transfer's last byte: the operation is done, or its next node sets out. */
static void work_done(rg_model *m, uint32_t index)
{
    rg_model_op *op = &m->ops[index];
    uint32_t stream = op->stream;
    rg_model_context *c = &m->contexts[m->streams[stream].context];
    if (op->doing == OP_KERNEL) {
        c->kernels++;
        load_add(m, domain_of(m, m->streams[stream].context), -1);
    } else {
        c->transfers++;
    }
    if (op->kind == OP_GRAPH) {
        uint32_t next = m->nodes[op->node].next;
        if (next) {
            load_node(m, op, next);
            depart(m, stream, op, m->now + m->p.graph_node_ns);
            return;
        }
        rg_model_drop_graph_ref(m, op->target);
    }
    finish(m, stream);
}

/* ---- Copies */

uint64_t rg_model_transfer_ns(const rg_model *m, uint8_t transfer, uint64_t bytes)
{
    uint64_t rate = transfer == RG_MODEL_H2D ? m->p.h2d_bytes_per_us
                    : transfer == RG_MODEL_D2H ? m->p.d2h_bytes_per_us
                                               : m->p.memory_bytes_per_us;
    if (transfer == RG_MODEL_D2D) bytes *= 2; /* each byte is read and written */
    uint64_t ns = (bytes * 1000 + rate - 1) / rate;
    return ns ? ns : 1;
}

static void engine_start(rg_model *m, uint32_t engine)
{
    uint32_t index = m->engine[engine].head;
    if (!index) {
        m->engine[engine].tail = 0;
        return;
    }
    rg_model_op *op = &m->ops[index];
    op->phase = PHASE_RUNNING;
    m->engine[engine].end_ns = m->now + rg_model_transfer_ns(m, op->transfer, op->amount);
}

static void engine_end(rg_model *m, uint32_t engine)
{
    uint32_t index = m->engine[engine].head;
    m->engine[engine].head = m->ops[index].ready_next;
    engine_start(m, engine);
    work_done(m, index);
}

/* ---- Dispatch of blocks */

static uint32_t ready_head(const rg_model_domain *d, uint32_t *level)
{
    for (uint32_t i = 0; i < RG_MODEL_PRIORITIES; i++)
        if (d->ready[i].head) {
            *level = i;
            return d->ready[i].head;
        }
    return 0;
}

static void arrive(rg_model *m, uint32_t stream)
{
    rg_model_stream *s = &m->streams[stream];
    uint32_t index = s->head;
    rg_model_op *op = &m->ops[index];
    op->phase = PHASE_READY;
    op->ready_next = 0;
    if (op->doing == OP_TRANSFER) {
        uint32_t engine = engine_of(op->transfer);
        if (m->engine[engine].head) {
            m->ops[m->engine[engine].tail].ready_next = index;
            m->engine[engine].tail = index;
        } else {
            m->engine[engine].head = m->engine[engine].tail = index;
            engine_start(m, engine);
        }
        return;
    }
    op->launch = ++m->last_launch;
    rg_model_domain *d = &m->domains[domain_of(m, s->context)];
    int level = priority_level(op->priority);
    if (d->ready[level].head) m->ops[d->ready[level].tail].ready_next = index;
    else d->ready[level].head = index;
    d->ready[level].tail = index;
}

/* A domain's runs while they are being rewritten; neighbours that come out equal are joined. */
typedef struct {
    uint32_t runs;
    uint8_t run_end[RG_MODEL_MAX_SMS];
    rg_model_lanes room[RG_MODEL_MAX_SMS];
} room_list;

static void add_room(room_list *l, uint32_t end, rg_model_lanes room)
{
    if (!l->runs || l->room[l->runs - 1] != room) l->room[l->runs++] = room;
    l->run_end[l->runs - 1] = (uint8_t)end;
}

static void set_room(rg_model_domain *d, const room_list *l)
{
    d->runs = l->runs;
    memcpy(d->room, l->room, l->runs * sizeof *l->room);
    memcpy(d->run_end, l->run_end, l->runs);
}

static void add_count(rg_model_cohort *c, uint32_t end, uint32_t count)
{
    if (!c->runs || c->count[c->runs - 1] != count) c->count[c->runs++] = (uint8_t)count;
    c->run_end[c->runs - 1] = (uint8_t)end;
}

/* Places as many of the kernel's blocks as there is room for. False when there is none. */
static bool place(rg_model *m, rg_model_domain *d, uint32_t index)
{
    rg_model_op *op = &m->ops[index];
    const rg_model_lanes need = op->need;
    uint8_t fits[RG_MODEL_MAX_SMS];
    uint64_t total = 0;
    uint32_t most = 0, from = 0;
    for (uint32_t i = 0; i < d->runs; i++) {
        uint32_t n = fit(d->room[i], need);
        fits[i] = (uint8_t)n;
        total += n * (d->run_end[i] - from);
        from = d->run_end[i];
        if (n > most) most = n;
    }
    uint32_t index_c = total ? cohort_new(m) : 0;
    if (!index_c) return false;

    /* Too few blocks for all the room: SMs with most of it give first, down to `level`; `extra` of them one more. */
    uint32_t level = 0, extra = 0;
    if (op->blocks_left < total) {
        uint32_t with[RG_MODEL_MAX_BLOCKS_PER_SM + 1] = {0}, givers = 0, taken = 0;
        total = op->blocks_left;
        from = 0;
        for (uint32_t i = 0; i < d->runs; from = d->run_end[i++]) with[fits[i]] += d->run_end[i] - from;
        for (level = most; taken + givers + with[level] <= total; level--) {
            givers += with[level];
            taken += givers;
        }
        extra = (uint32_t)total - taken;
    }

    rg_model_cohort *c = &m->cohorts[index_c];
    room_list list;
    uint32_t busy = d->busy_sms;
    list.runs = 0;
    c->runs = 0;
    from = 0;
    for (uint32_t i = 0; i < d->runs; i++) {
        uint32_t n = fits[i] > level ? fits[i] - level : 0, end = d->run_end[i], more = from;
        if (extra && fits[i] >= level) {
            more = end - from < extra ? end : from + extra;
            extra -= more - from;
            add_count(c, more, n + 1);
            add_room(&list, more, d->room[i] - (n + 1) * need);
        }
        if (more < end) {
            add_count(c, end, n);
            add_room(&list, end, d->room[i] - n * need);
        }
        if (d->room[i] == m->whole) busy += n ? end - from : more - from;
        from = end;
    }
    set_room(d, &list);
    sm_busy_account(m, d->busy_sms);
    d->busy_sms = busy;
    c->need = need;
    c->op = index;
    c->context = m->streams[op->stream].context;
    c->total = (uint32_t)total;
    c->launch = op->launch;
    c->seq = ++m->last_cohort;
    c->bound = op->bound;
    c->weight = (uint32_t)(total * (WHOLE_GPU / op->capacity));
    c->demand = total * op->demand;
    c->end = end_of(m, d, c->bound, op->amount);
    heap_push(m, d, index_c);
    d->clock[c->bound].weight += c->weight;
    d->clock[c->bound].demand += c->demand;
    op->phase = PHASE_RUNNING;
    op->blocks_left -= total;
    op->running += (uint32_t)total;
    resident_add(m, c->context, 1);
    return true;
}

static void release_room(rg_model *m, rg_model_domain *d, const rg_model_cohort *c)
{
    room_list list;
    uint32_t idle = 0;
    list.runs = 0;
    for (uint32_t i = 0, j = 0, from = 0; i < d->runs;) {
        uint32_t end = d->run_end[i] < c->run_end[j] ? d->run_end[i] : c->run_end[j];
        rg_model_lanes room = d->room[i] + c->count[j] * c->need;
        if (c->count[j] && room == m->whole) idle += end - from;
        add_room(&list, end, room);
        i += d->run_end[i] == end;
        j += c->run_end[j] == end;
        from = end;
    }
    set_room(d, &list);
    sm_busy_account(m, d->busy_sms);
    d->busy_sms -= idle;
    d->clock[c->bound].weight -= c->weight;
    d->clock[c->bound].demand -= c->demand;
}

void rg_model_empty_domain(rg_model *m, uint32_t domain)
{
    rg_model_domain *d = &m->domains[domain];
    d->load = d->busy_sms = 0;
    d->saturated = 0;
    memset(d->clock, 0, sizeof d->clock);
    d->clock[0].rate = d->clock[1].rate = FULL_RATE;
    d->since = m->now;
    memset(d->ready, 0, sizeof d->ready);
    d->runs = 1;
    d->run_end[0] = (uint8_t)m->p.sms;
    d->room[0] = m->whole;
}

static void ready_drop_head(rg_model *m, rg_model_domain *d, uint32_t level)
{
    d->ready[level].head = m->ops[d->ready[level].head].ready_next;
    if (!d->ready[level].head) d->ready[level].tail = 0;
}

/* Gives the room of what ended, and what was free before, to the kernels that are ready. */
static void place_ready(rg_model *m)
{
    uint32_t level = 0, released = 0;
    rg_model_domain *d = m->active < 0 ? NULL : &m->domains[m->active];
    uint32_t head = d ? ready_head(d, &level) : 0;
    while (m->ended) {
        uint32_t index = m->ended;
        rg_model_cohort *c = &m->cohorts[index];
        m->ended = c->sibling;
        /*
         * The short way: a wave ended, its kernel is still first in the order, and it has a whole wave left. The last
         * dispatch left it first because nothing more of it fitted anywhere, so that freeing the wave's room and
         * dispatching anew would place the same blocks on the same SMs.
         */
        if (head && c->launch == m->ops[head].launch && m->ops[head].blocks_left >= c->total) {
            m->ops[head].blocks_left -= c->total;
            m->ops[head].running += c->total;
            c->seq = ++m->last_cohort;
            c->end = end_of(m, d, c->bound, m->ops[head].amount);
            heap_push(m, d, index);
            if (!m->ops[head].blocks_left) {
                ready_drop_head(m, d, level);
                head = ready_head(d, &level);
            }
            continue;
        }
        rg_model_domain *owner = &m->domains[domain_of(m, c->context)];
        release_room(m, owner, c);
        resident_add(m, c->context, -1);
        if (owner != d) owner->saturated = 0; /* it lost the SMs at this very instant; it has room when it returns */
        cohort_delete(m, index);
        released = 1;
    }
    if (!head || (!released && m->ops[head].launch == d->saturated)) return;
    d->saturated = 0;
    while (head && place(m, d, head)) {
        if (m->ops[head].blocks_left) continue;
        ready_drop_head(m, d, level);
        head = ready_head(d, &level);
    }
    if (head) d->saturated = m->ops[head].launch;
}

static void dispatch(rg_model *m)
{
    place_ready(m);
    if (m->active >= 0) set_rates(m, &m->domains[m->active]);
}

/* ---- Time slices: which domain has the SMs */

static bool wants(const rg_model *m, int32_t domain)
{
    return m->domains[domain].load && !m->contexts[domain].suspended;
}

/* The next domain after `from`, in turn, that wants the SMs; -1: none. */
static int32_t next_wanting(const rg_model *m, int32_t from)
{
    for (int32_t i = 1; i <= RG_MODEL_MAX_CONTEXTS; i++) {
        int32_t d = (from + i) % RG_MODEL_MAX_CONTEXTS;
        if (wants(m, d)) return d;
    }
    return -1;
}

/* The domain on the SMs is suspended, and leaves at preempt_at. */
static bool leaving(const rg_model *m)
{
    return m->active >= 0 && !m->p.shared && m->contexts[m->active].suspended;
}

static void take_sms(rg_model *m, int32_t domain, uint64_t spent)
{
    rg_model_domain *d = &m->domains[domain];
    m->active = domain;
    d->since = m->now;
    m->slice_from = m->now;
    m->slice_spent = spent;
    m->slice_end = 0;
    m->sm_busy_since = m->now;
    m->contexts[domain].busy_since = m->now; /* in this mode a domain is one context */
}

static void lose_sms(rg_model *m)
{
    rg_model_domain *d = &m->domains[m->active];
    rg_model_context *c = &m->contexts[m->active];
    sm_busy_account(m, d->busy_sms);
    if (c->resident) c->busy_ns += m->now - c->busy_since;
    c->busy_since = m->now;
    bring_up_to_date(m, d);
    m->active = -1;
    m->slice_end = 0;
}

static void begin_switch(rg_model *m, int32_t to, uint64_t takes)
{
    m->next_active = to;
    m->vacated = 0;
    m->switch_end = m->now + takes;
    m->switches++;
}

/* What it takes to exchange a context without suspending it. */
static uint64_t switch_from(const rg_model *m, int32_t from)
{
    return m->contexts[from].stopped && !m->domains[from].load ? m->p.stopped_switch_ns : m->p.switch_ns;
}

/* When `active` is exchanged, which others are waiting for: at the end of its slice, or before if it has no work. */
static uint64_t slice_over(const rg_model *m)
{
    uint64_t idle = m->domains[m->active].load ? RG_MODEL_NEVER : m->idle_from + m->p.idle_ns;
    return idle < m->slice_end ? idle : m->slice_end;
}

static void exchange(rg_model *m)
{
    if (m->p.shared) return;
    if (m->next_active >= 0) {
        if (m->now < m->switch_end) return;
        /* Who was to come may have been removed or suspended meanwhile; the switch is paid for all the same. */
        int32_t to = wants(m, m->next_active) ? m->next_active : next_wanting(m, m->next_active);
        m->next_active = -1;
        if (to >= 0) take_sms(m, to, m->p.restore_ns < m->p.switch_ns ? m->p.restore_ns : m->p.switch_ns);
    }
    if (leaving(m) && m->now >= m->preempt_at) {
        m->vacated = (uint32_t)m->active + 1;
        lose_sms(m);
    }
    bool disturbed = m->disturbed && m->active >= 0 && !leaving(m);
    m->disturbed = 0;
    if (disturbed) {
        int32_t same = m->active;
        lose_sms(m);
        begin_switch(m, same, m->p.disturb_ns);
        return;
    }
    if (m->active < 0) {
        int32_t to = next_wanting(m, m->vacated ? (int32_t)m->vacated - 1 : RG_MODEL_MAX_CONTEXTS - 1);
        if (to < 0) return;
        if (m->vacated) {
            begin_switch(m, to, m->p.switch_ns);
            return;
        }
        take_sms(m, to, 0); /* nobody's state is on the SMs: nothing to save */
    }
    bool own = m->domains[m->active].load > 0;
    if (m->wanting == (own && !leaving(m))) {
        m->slice_end = 0;
        return;
    }
    if (!m->slice_end) {
        /* Uncontested slices followed one another; the one that runs now ends at the next multiple. */
        uint64_t slice = m->contexts[m->active].slice_ns, spent = m->slice_spent;
        uint64_t had = m->now - m->slice_from, slices = had ? (had + spent + slice - 1) / slice : 1;
        m->slice_end = m->slice_from + (slices * slice > spent ? slices * slice - spent : 0);
    }
    if (m->now < slice_over(m)) return;
    int32_t from = m->active;
    uint64_t takes = switch_from(m, from);
    lose_sms(m);
    begin_switch(m, next_wanting(m, from), takes);
}

/* ---- Advancing */

uint64_t rg_model_next_event(const rg_model *m)
{
    uint64_t next = m->kick ? m->now : RG_MODEL_NEVER;
    if (m->timers && m->timer[0].at < next) next = m->timer[0].at;
    for (int i = 0; i < ENGINES; i++)
        if (m->engine[i].head && m->engine[i].end_ns < next) next = m->engine[i].end_ns;
    if (m->active >= 0) {
        const rg_model_domain *d = &m->domains[m->active];
        for (int i = 0; i < 2; i++)
            if (first_end(m, d, i) < next) next = first_end(m, d, i);
        if (m->slice_end && slice_over(m) < next) next = slice_over(m);
        if (leaving(m) && m->preempt_at < next) next = m->preempt_at;
    }
    if (m->next_active >= 0 && m->switch_end < next) next = m->switch_end;
    return next;
}

static void end_cohorts(rg_model *m)
{
    if (m->active < 0) return;
    rg_model_domain *d = &m->domains[m->active];
    uint32_t *link = &m->ended;
    for (int kind = first_kind(m, d); first_end(m, d, kind) <= m->now; kind = first_kind(m, d)) {
        uint32_t index = heap_pop(m, d, kind);
        rg_model_cohort *c = &m->cohorts[index];
        rg_model_op *op = &m->ops[c->op];
        c->sibling = 0;
        *link = index;
        link = &c->sibling;
        m->contexts[c->context].blocks += c->total;
        op->running -= c->total;
        if (!op->running && !op->blocks_left) work_done(m, c->op);
    }
}

/* Everything that happens at the present, in the order of rule 7. */
static void instant(rg_model *m)
{
    do {
        end_cohorts(m);
        for (uint32_t i = 0; i < ENGINES; i++)
            if (m->engine[i].head && m->engine[i].end_ns <= m->now) engine_end(m, i);
        rg_model_pump_all(m);
        while (m->timers && m->timer[0].at <= m->now) arrive(m, timer_pop(m));
        m->kick = 0;
        exchange(m);
        dispatch(m);
    } while (rg_model_next_event(m) <= m->now);
}

void rg_model_advance(rg_model *m, uint64_t now_ns)
{
    if (now_ns < m->now) return;
    for (uint64_t next = rg_model_next_event(m); next <= now_ns; next = rg_model_next_event(m)) {
        if (next > m->now) m->now = next;
        instant(m);
    }
    m->now = now_ns;
}

/* ---- Removal and recovery */

static bool of_context(const rg_model *m, uint32_t op, uint32_t context)
{
    return m->streams[m->ops[op].stream].context == context;
}

/* Unlinks the context's operations from a list that is linked by ready_next. */
static void filter_list(rg_model *m, uint32_t *head, uint32_t *tail, uint32_t context)
{
    uint32_t *link = head;
    *tail = 0;
    while (*link) {
        if (of_context(m, *link, context)) {
            *link = m->ops[*link].ready_next;
            continue;
        }
        *tail = *link;
        link = &m->ops[*link].ready_next;
    }
}

static void cut_cohorts(rg_model *m, uint32_t context)
{
    rg_model_domain *d = &m->domains[domain_of(m, context)];
    uint32_t kept = 0;
    for (int kind = 0; kind < 2;) {
        if (!d->clock[kind].heap) {
            kind++;
            continue;
        }
        uint32_t index = heap_pop(m, d, kind);
        rg_model_cohort *c = &m->cohorts[index];
        if (c->context != context) {
            c->sibling = kept;
            kept = index;
            continue;
        }
        release_room(m, d, c);
        cohort_delete(m, index);
    }
    while (kept) {
        uint32_t index = kept;
        kept = m->cohorts[index].sibling;
        heap_push(m, d, index);
    }
    d->saturated = 0;
}

void rg_model_cut(rg_model *m, uint32_t context)
{
    rg_model_domain *d = &m->domains[domain_of(m, context)];
    rg_model_context *c = &m->contexts[context];
    bool on_sms = m->p.shared || m->active == (int32_t)context;
    if (on_sms && c->resident) c->busy_ns += m->now - c->busy_since;
    c->resident = 0;

    uint32_t before = m->timers;
    m->timers = 0;
    for (uint32_t i = 0; i < before; i++) {
        __typeof__(m->timer[0]) t = m->timer[i];
        if (m->streams[t.stream].context != context) timer_push(m, t.at, t.seq, t.stream);
    }
    for (uint32_t i = 0; i < ENGINES; i++) {
        uint32_t running = m->engine[i].head;
        filter_list(m, &m->engine[i].head, &m->engine[i].tail, context);
        if (m->engine[i].head != running) engine_start(m, i);
    }
    for (uint32_t i = 0; i < RG_MODEL_PRIORITIES; i++) filter_list(m, &d->ready[i].head, &d->ready[i].tail, context);
    /* A domain that is not on the SMs has no part in the account of busy SMs. */
    if (!on_sms) sm_busy_account(m, m->active < 0 ? 0 : m->domains[m->active].busy_sms);
    cut_cohorts(m, context);

    for (uint32_t i = c->streams; i; i = m->streams[i - 1].next_in_context) {
        const rg_model_stream *s = &m->streams[i - 1];
        const rg_model_op *op = &m->ops[s->head];
        if (s->head && op->phase != PHASE_QUEUED && op->doing == OP_KERNEL) load_add(m, domain_of(m, context), -1);
    }
    if (m->active == (int32_t)context && !m->p.shared) {
        m->active = -1;
        m->slice_end = 0;
        m->sm_busy_since = m->now;
    }
    m->kick = 1;
}

void rg_model_reset_time(rg_model *m)
{
    m->timers = 0;
    m->pump_head = m->pump_tail = 0;
    m->ended = 0;
    m->cohort_free = m->cohort_used = 0;
    m->wanting = 0;
    m->active = m->p.shared ? 0 : -1;
    m->next_active = -1;
    m->slice_end = m->switch_end = 0;
    m->preempt_at = m->vacated = m->idle_from = 0;
    m->disturbed = 0;
    m->sm_busy_since = m->now;
    m->kick = 0;
    memset(m->engine, 0, sizeof m->engine);
    for (uint32_t i = 0; i < RG_MODEL_MAX_CONTEXTS; i++) {
        if (m->p.shared ? i == 0 : m->contexts[i].used) rg_model_empty_domain(m, i);
    }
}
