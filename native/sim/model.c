/*
 * model.c: the model's tables (contexts, streams, events, graphs, queues) and the questions callers ask of it.
 * What happens as time passes is in model-time.c. The rules for both stand in model.h.
 */
#include "model-inside.h"

#include <string.h>

static const struct {
    const char *key;
    rg_model_params params;
} presets[] = {
#define RG_PRESET(key, ...) {#key, {__VA_ARGS__}},
#include "presets.def"
#undef RG_PRESET
};

const rg_model_params *rg_model_preset(const char *name)
{
    for (size_t i = 0; i < sizeof presets / sizeof *presets; i++)
        if (!strcmp(presets[i].key, name)) return &presets[i].params;
    return NULL;
}

static rg_model_lanes whole_sm(const rg_model_params *p)
{
    return lanes(p->blocks_per_sm, p->threads_per_sm / 32, p->registers_per_sm / 256, p->shared_bytes_per_sm / 128);
}

/*
 * The CUDA occupancy calculator's units: warps of 32 threads, registers in 256s per warp. Its rounding of the warps that an SM's registers
 * suffice for down to a multiple of four (a quarter of the registers is of each of four parts) is left out: lanes cannot have it.
 */
static bool needs(const rg_model_params *p, const rg_model_kernel *k, rg_model_lanes *need)
{
    if (!k->blocks || !k->threads || k->threads > p->threads_per_block) return false;
    if (k->shared_bytes > p->shared_bytes_per_block) return false;
    uint64_t warps = (k->threads + 31) / 32;
    uint64_t registers = warps * (((uint64_t)k->registers * 32 + 255) / 256);
    uint64_t shared = ((uint64_t)k->shared_bytes + p->reserved_shared_bytes + 127) / 128;
    if (registers > 0xffff) return false;
    *need = lanes(1, warps, registers, shared);
    return fit(whole_sm(p), *need) > 0;
}

uint32_t rg_model_occupancy(const rg_model_params *p, const rg_model_kernel *k)
{
    rg_model_lanes need;
    return needs(p, k, &need) ? fit(whole_sm(p), need) : 0;
}

void rg_model_init(rg_model *m, const rg_model_params *params)
{
    m->p = *params;
    m->whole = whole_sm(params);
    rg_model_reset_time(m);
}

/* ---- Slots */

static rg_model_context *context_at(const rg_model *m, uint32_t id)
{
    uint32_t i = slot_of(id);
    if (i >= RG_MODEL_MAX_CONTEXTS) return NULL;
    const rg_model_context *c = &m->contexts[i];
    return c->used && id_of(i, c->generation) == id ? (rg_model_context *)c : NULL;
}

static rg_model_stream *stream_at(const rg_model *m, uint32_t id)
{
    uint32_t i = slot_of(id);
    if (i >= RG_MODEL_MAX_STREAMS) return NULL;
    const rg_model_stream *s = &m->streams[i];
    return s->state == SLOT_USED && id_of(i, s->generation) == id ? (rg_model_stream *)s : NULL;
}

static rg_model_event *event_at(const rg_model *m, uint32_t id)
{
    uint32_t i = slot_of(id);
    if (i >= RG_MODEL_MAX_EVENTS) return NULL;
    const rg_model_event *e = &m->events[i];
    return e->state == SLOT_USED && id_of(i, e->generation) == id ? (rg_model_event *)e : NULL;
}

static rg_model_graph *graph_at(const rg_model *m, uint32_t id)
{
    uint32_t i = slot_of(id);
    if (i >= RG_MODEL_MAX_GRAPHS) return NULL;
    const rg_model_graph *g = &m->graphs[i];
    return g->state == SLOT_USED && id_of(i, g->generation) == id ? (rg_model_graph *)g : NULL;
}

/* Tables are searched from where the last search ended: creation is rare, and there is no list to break. */
#define FIND_SLOT(table, size, hint, field, found) \
    do { \
        found = -1; \
        for (uint32_t i_ = 0; i_ < (size) && found < 0; i_++) { \
            uint32_t at_ = ((hint) + i_) % (size); \
            if ((table)[at_].field == SLOT_FREE) found = (int32_t)at_; \
        } \
        if (found >= 0) (hint) = ((uint32_t)found + 1) % (size); \
    } while (0)

static uint16_t next_generation(uint16_t generation)
{
    return generation == UINT16_MAX ? 1 : (uint16_t)(generation + 1);
}

/* ---- Contexts and memory */

int rg_model_add_context(rg_model *m, uint32_t *context)
{
    uint32_t i = 0;
    while (i < RG_MODEL_MAX_CONTEXTS && m->contexts[i].used) i++;
    if (i == RG_MODEL_MAX_CONTEXTS) return RG_MODEL_NO_SLOT;
    rg_model_context *c = &m->contexts[i];
    uint16_t generation = next_generation(c->generation);
    memset(c, 0, sizeof *c);
    c->generation = generation;
    c->slice_ns = m->p.slice_ns;
    if (!m->p.shared) rg_model_empty_domain(m, i);
    c->used = 1; /* last: what rg_model_recover goes by */
    *context = id_of(i, generation);
    return 0;
}

int rg_model_allocate(rg_model *m, uint32_t context, uint64_t bytes)
{
    rg_model_context *c = context_at(m, context);
    if (!c) return RG_MODEL_INVALID;
    if (bytes > m->p.memory_bytes - m->memory_bytes) return RG_MODEL_NO_MEMORY;
    c->memory_bytes += bytes;
    m->memory_bytes += bytes;
    return 0;
}

int rg_model_release(rg_model *m, uint32_t context, uint64_t bytes)
{
    rg_model_context *c = context_at(m, context);
    if (!c || bytes > c->memory_bytes) return RG_MODEL_INVALID;
    c->memory_bytes -= bytes;
    m->memory_bytes -= bytes;
    return 0;
}

int rg_model_set_slice(rg_model *m, uint32_t context, uint64_t ns)
{
    rg_model_context *c = context_at(m, context);
    if (!c || !ns) return RG_MODEL_INVALID;
    if (m->p.shared) return RG_MODEL_SHARED;
    c->slice_ns = ns;
    if (m->active == (int32_t)slot_of(context)) {
        m->slice_end = 0; /* exchange() finds the end anew */
        m->kick = 1;
    }
    return 0;
}

static void pump_context(rg_model *m, const rg_model_context *c)
{
    for (uint32_t i = c->streams; i; i = m->streams[i - 1].next_in_context) rg_model_pump(m, i - 1);
    rg_model_pump_all(m);
}

int rg_model_suspend(rg_model *m, uint32_t context, bool suspended)
{
    rg_model_context *c = context_at(m, context);
    uint32_t slot = slot_of(context);
    if (!c) return RG_MODEL_INVALID;
    if (m->p.shared) return RG_MODEL_SHARED;
    if (c->suspended == suspended) return 0;
    c->suspended = suspended;
    if (m->domains[slot].load) m->wanting = suspended ? m->wanting - 1 : m->wanting + 1;
    m->kick = 1;
    if (suspended) {
        if (m->active == (int32_t)slot) m->preempt_at = m->now + m->p.preempt_ns;
        else if (m->active >= 0 && m->domains[m->active].load) m->disturbed = m->p.disturb_ns > 0;
        return 0;
    }
    pump_context(m, c);
    return 0;
}

int rg_model_stop(rg_model *m, uint32_t context, bool stopped)
{
    rg_model_context *c = context_at(m, context);
    if (!c) return RG_MODEL_INVALID;
    bool was = c->stopped;
    c->stopped = stopped;
    if (was && !stopped) pump_context(m, c);
    return 0;
}

/* ---- Events */

static void free_event(rg_model_event *e)
{
    uint16_t generation = e->generation;
    memset(e, 0, sizeof *e);
    e->generation = generation;
}

void rg_model_drop_event_ref(rg_model *m, uint32_t event)
{
    rg_model_event *e = &m->events[event];
    if (!--e->refs && e->state == SLOT_CLOSING) free_event(e);
}

int rg_model_create_event(rg_model *m, uint32_t context, uint32_t *event)
{
    int32_t i;
    if (!context_at(m, context)) return RG_MODEL_INVALID;
    FIND_SLOT(m->events, RG_MODEL_MAX_EVENTS, m->event_hint, state, i);
    if (i < 0) return RG_MODEL_NO_SLOT;
    rg_model_event *e = &m->events[i];
    e->generation = next_generation(e->generation);
    e->context = (uint8_t)slot_of(context);
    e->state = SLOT_USED;
    *event = id_of((uint32_t)i, e->generation);
    return 0;
}

int rg_model_destroy_event(rg_model *m, uint32_t event)
{
    rg_model_event *e = event_at(m, event);
    if (!e) return RG_MODEL_INVALID;
    e->state = SLOT_CLOSING;
    if (!e->refs) free_event(e);
    return 0;
}

/* ---- Graphs */

static void free_graph(rg_model *m, rg_model_graph *g)
{
    uint16_t generation = g->generation;
    if (g->head) {
        m->nodes[g->tail].next = m->node_free;
        m->node_free = g->head;
    }
    memset(g, 0, sizeof *g);
    g->generation = generation;
}

void rg_model_drop_graph_ref(rg_model *m, uint32_t graph)
{
    rg_model_graph *g = &m->graphs[graph];
    if (!--g->refs && g->state == SLOT_CLOSING) free_graph(m, g);
}

int rg_model_create_graph(rg_model *m, uint32_t context, uint32_t *graph)
{
    int32_t i;
    if (!context_at(m, context)) return RG_MODEL_INVALID;
    FIND_SLOT(m->graphs, RG_MODEL_MAX_GRAPHS, m->graph_hint, state, i);
    if (i < 0) return RG_MODEL_NO_SLOT;
    rg_model_graph *g = &m->graphs[i];
    g->generation = next_generation(g->generation);
    g->context = (uint8_t)slot_of(context);
    g->state = SLOT_USED;
    *graph = id_of((uint32_t)i, g->generation);
    return 0;
}

int rg_model_destroy_graph(rg_model *m, uint32_t graph)
{
    rg_model_graph *g = graph_at(m, graph);
    if (!g) return RG_MODEL_INVALID;
    g->state = SLOT_CLOSING;
    if (!g->refs) free_graph(m, g);
    return 0;
}

static int8_t clamp_priority(int priority)
{
    if (priority < RG_MODEL_HIGHEST_PRIORITY) return RG_MODEL_HIGHEST_PRIORITY;
    return (int8_t)(priority > RG_MODEL_LOWEST_PRIORITY ? RG_MODEL_LOWEST_PRIORITY : priority);
}

/* Time a kernel takes with the GPU to itself: whole waves. */
static uint64_t waves_ns(uint64_t blocks, uint32_t capacity, uint64_t block_ns)
{
    return (blocks + capacity - 1) / capacity * block_ns;
}

/* What one resident block asks of the memory's bandwidth: the kernel's demand is that of as many as an empty GPU holds. */
static uint64_t block_demand(const rg_model_kernel *k, uint32_t capacity)
{
    uint64_t resident = k->blocks < capacity ? k->blocks : capacity;
    uint64_t permille = k->memory_permille < 1000 ? k->memory_permille : 1000;
    return (permille << 20) / resident;
}

static int add_node(rg_model *m, uint32_t graph, const rg_model_node *node)
{
    rg_model_graph *g = graph_at(m, graph);
    if (!g || g->refs) return RG_MODEL_INVALID;
    uint32_t i = m->node_free;
    if (i) m->node_free = m->nodes[i].next;
    else if (m->node_used < RG_MODEL_MAX_NODES) i = ++m->node_used;
    else return RG_MODEL_NO_SLOT;
    m->nodes[i] = *node;
    m->nodes[i].next = 0;
    if (g->tail) m->nodes[g->tail].next = i;
    else g->head = i;
    g->tail = i;
    g->min_ns += node->min_ns + (g->count ? m->p.graph_node_ns : 0);
    g->count++;
    return 0;
}

int rg_model_graph_kernel(rg_model *m, uint32_t graph, const rg_model_kernel *k, int priority)
{
    rg_model_node node;
    memset(&node, 0, sizeof node); /* padding too: models are compared byte by byte */
    if (!needs(&m->p, k, &node.need)) return RG_MODEL_INVALID;
    node.kind = OP_KERNEL;
    node.blocks = k->blocks;
    node.amount = k->block_ns ? k->block_ns : 1;
    node.priority = clamp_priority(priority == RG_MODEL_INHERIT ? RG_MODEL_LOWEST_PRIORITY : priority);
    node.capacity = fit(m->whole, node.need) * m->p.sms;
    node.min_ns = waves_ns(node.blocks, node.capacity, node.amount);
    node.demand = block_demand(k, node.capacity);
    node.bound = k->memory_bound;
    return add_node(m, graph, &node);
}

int rg_model_graph_transfer(rg_model *m, uint32_t graph, rg_model_transfer t, uint64_t bytes)
{
    rg_model_node node;
    memset(&node, 0, sizeof node);
    node.kind = OP_TRANSFER;
    node.transfer = (uint8_t)t;
    node.amount = bytes;
    node.min_ns = rg_model_transfer_ns(m, node.transfer, bytes);
    return add_node(m, graph, &node);
}

/* ---- Streams */

void rg_model_free_stream(rg_model *m, uint32_t stream)
{
    rg_model_stream *s = &m->streams[stream];
    rg_model_context *c = &m->contexts[s->context];
    uint32_t *link = &c->streams;
    while (*link && *link != stream + 1) link = &m->streams[*link - 1].next_in_context;
    if (*link) *link = s->next_in_context;
    if (s->blocking) c->blocking--;
    if (c->legacy == stream + 1) c->legacy = 0;
    uint16_t generation = s->generation;
    memset(s, 0, sizeof *s);
    s->generation = generation;
}

int rg_model_create_stream(rg_model *m, uint32_t context, int priority, int sync, uint32_t *stream)
{
    int32_t i;
    rg_model_context *c = context_at(m, context);
    if (!c || (sync == RG_MODEL_LEGACY && c->legacy)) return RG_MODEL_INVALID;
    FIND_SLOT(m->streams, RG_MODEL_MAX_STREAMS, m->stream_hint, state, i);
    if (i < 0) return RG_MODEL_NO_SLOT;
    rg_model_stream *s = &m->streams[i];
    s->generation = next_generation(s->generation);
    s->context = (uint8_t)slot_of(context);
    s->priority = clamp_priority(priority);
    s->blocking = sync == RG_MODEL_BLOCKING;
    s->legacy = sync == RG_MODEL_LEGACY;
    s->state = SLOT_USED;
    s->next_in_context = c->streams;
    c->streams = (uint32_t)i + 1;
    if (s->blocking) c->blocking++;
    if (s->legacy) c->legacy = (uint32_t)i + 1;
    *stream = id_of((uint32_t)i, s->generation);
    return 0;
}

int rg_model_destroy_stream(rg_model *m, uint32_t stream)
{
    rg_model_stream *s = stream_at(m, stream);
    if (!s) return RG_MODEL_INVALID;
    s->state = SLOT_CLOSING;
    if (!s->head) rg_model_free_stream(m, slot_of(stream));
    return 0;
}

int rg_model_set_priority(rg_model *m, uint32_t stream, int priority)
{
    rg_model_stream *s = stream_at(m, stream);
    if (!s) return RG_MODEL_INVALID;
    s->priority = clamp_priority(priority);
    return 0;
}

int rg_model_get_priority(const rg_model *m, uint32_t stream, int *priority)
{
    const rg_model_stream *s = stream_at(m, stream);
    if (!s) return RG_MODEL_INVALID;
    *priority = s->priority;
    return 0;
}

/* ---- Submission */

/* A new operation for the stream, not queued yet; NULL with the reason in *why. */
static rg_model_op *new_op(rg_model *m, uint32_t stream, uint8_t kind, uint32_t *index, int *why)
{
    const rg_model_stream *s = stream_at(m, stream);
    *why = RG_MODEL_INVALID;
    if (!s) return NULL;
    *why = RG_MODEL_FULL;
    if (s->depth >= RG_MODEL_STREAM_DEPTH) return NULL;
    uint32_t i = m->op_free;
    if (i) m->op_free = m->ops[i].next;
    else if (m->op_used < RG_MODEL_MAX_OPS) i = ++m->op_used;
    else return NULL;
    *why = 0;
    *index = i;
    rg_model_op *op = &m->ops[i];
    memset(op, 0, sizeof *op);
    op->kind = op->doing = kind;
    op->stream = (uint16_t)slot_of(stream);
    return op;
}

static int queue_op(rg_model *m, uint32_t index, uint64_t *ticket)
{
    rg_model_op *op = &m->ops[index];
    rg_model_stream *s = &m->streams[op->stream];
    op->seq = ++m->last_ticket;
    op->submit_ns = m->now;
    if (s->tail) m->ops[s->tail].next = index;
    else s->head = index;
    s->tail = index;
    s->depth++;
    m->contexts[s->context].pending++;
    if (ticket) *ticket = op->seq;
    if (s->head == index) {
        rg_model_pump(m, op->stream);
        rg_model_pump_all(m);
    }
    return 0;
}

int rg_model_submit_kernel(rg_model *m, uint32_t stream, const rg_model_kernel *k, int priority, uint64_t *ticket)
{
    rg_model_lanes need;
    uint32_t i;
    int why;
    if (!needs(&m->p, k, &need)) return RG_MODEL_INVALID;
    rg_model_op *op = new_op(m, stream, OP_KERNEL, &i, &why);
    if (!op) return why;
    op->need = need;
    op->amount = k->block_ns ? k->block_ns : 1;
    op->blocks_left = k->blocks;
    op->capacity = fit(m->whole, need) * m->p.sms;
    op->min_ns = waves_ns(k->blocks, op->capacity, op->amount);
    op->demand = block_demand(k, op->capacity);
    op->bound = k->memory_bound;
    op->priority = priority == RG_MODEL_INHERIT ? m->streams[op->stream].priority : clamp_priority(priority);
    return queue_op(m, i, ticket);
}

int rg_model_submit_transfer(rg_model *m, uint32_t stream, rg_model_transfer t, uint64_t bytes, uint64_t *ticket)
{
    uint32_t i;
    int why;
    rg_model_op *op = new_op(m, stream, OP_TRANSFER, &i, &why);
    if (!op) return why;
    op->transfer = (uint8_t)t;
    op->amount = bytes;
    op->min_ns = rg_model_transfer_ns(m, op->transfer, bytes);
    return queue_op(m, i, ticket);
}

int rg_model_submit_graph(rg_model *m, uint32_t stream, uint32_t graph, uint64_t *ticket)
{
    uint32_t i;
    int why;
    rg_model_graph *g = graph_at(m, graph);
    if (!g) return RG_MODEL_INVALID;
    rg_model_op *op = new_op(m, stream, OP_GRAPH, &i, &why);
    if (!op) return why;
    op->target = slot_of(graph);
    op->min_ns = g->min_ns;
    g->refs++;
    return queue_op(m, i, ticket);
}

int rg_model_record(rg_model *m, uint32_t event, uint32_t stream, uint64_t *ticket)
{
    uint32_t i;
    int why;
    rg_model_event *e = event_at(m, event);
    if (!e) return RG_MODEL_INVALID;
    const rg_model_stream *s = stream_at(m, stream);
    if (!s || s->context != e->context) return RG_MODEL_INVALID;
    rg_model_op *op = new_op(m, stream, OP_RECORD, &i, &why);
    if (!op) return why;
    op->target = slot_of(event);
    op->amount = ++e->requested;
    e->refs++;
    e->stream = stream;
    e->ticket = m->last_ticket + 1; /* what queue_op is about to give */
    return queue_op(m, i, ticket);
}

int rg_model_wait(rg_model *m, uint32_t event, uint32_t stream, uint64_t *ticket)
{
    uint32_t i;
    int why;
    rg_model_event *e = event_at(m, event);
    if (!e) return RG_MODEL_INVALID;
    rg_model_op *op = new_op(m, stream, OP_WAIT, &i, &why);
    if (!op) return why;
    op->target = slot_of(event);
    op->amount = e->requested;
    e->refs++;
    return queue_op(m, i, ticket);
}

int rg_model_submit_stop(rg_model *m, uint32_t stream, uint64_t *ticket)
{
    uint32_t i;
    int why;
    return new_op(m, stream, OP_STOP, &i, &why) ? queue_op(m, i, ticket) : why;
}

/* ---- Removal and recovery */

static void unlink_waiter(rg_model *m, uint32_t event, uint32_t stream)
{
    uint32_t *link = &m->events[event].waiters;
    while (*link && *link != stream + 1) link = &m->streams[*link - 1].next_waiter;
    if (*link) *link = m->streams[*link - 1].next_waiter;
}

static void drop_queue(rg_model *m, uint32_t stream)
{
    rg_model_stream *s = &m->streams[stream];
    if (s->waits == WAITS_EVENT) unlink_waiter(m, m->ops[s->head].target, stream);
    while (s->head) {
        uint32_t i = s->head;
        rg_model_op *op = &m->ops[i];
        s->head = op->next;
        if (op->kind == OP_RECORD || op->kind == OP_WAIT) rg_model_drop_event_ref(m, op->target);
        if (op->kind == OP_GRAPH) rg_model_drop_graph_ref(m, op->target);
        op->next = m->op_free;
        m->op_free = i;
    }
}

/* Nothing will reach the context's events any more: streams of other contexts must not wait for ever. */
static void release_waiters(rg_model *m, uint32_t event)
{
    rg_model_event *e = &m->events[event];
    if (e->done < e->requested) e->time_ns = m->now;
    e->done = e->requested;
    while (e->waiters) {
        uint32_t stream = e->waiters - 1;
        e->waiters = m->streams[stream].next_waiter;
        m->streams[stream].waits = WAITS_NOT;
        rg_model_pump(m, stream);
    }
}

int rg_model_remove_context(rg_model *m, uint32_t context)
{
    rg_model_context *c = context_at(m, context);
    uint32_t slot = slot_of(context);
    if (!c) return RG_MODEL_INVALID;
    rg_model_cut(m, slot);
    for (uint32_t i = c->streams; i; i = m->streams[i - 1].next_in_context) drop_queue(m, i - 1);
    while (c->streams) rg_model_free_stream(m, c->streams - 1);
    for (uint32_t i = 0; i < RG_MODEL_MAX_EVENTS; i++) {
        rg_model_event *e = &m->events[i];
        if (e->state == SLOT_FREE || e->context != slot) continue;
        release_waiters(m, i);
        e->state = SLOT_CLOSING;
        if (!e->refs) free_event(e);
    }
    for (uint32_t i = 0; i < RG_MODEL_MAX_GRAPHS; i++) {
        rg_model_graph *g = &m->graphs[i];
        if (g->state == SLOT_FREE || g->context != slot) continue;
        g->state = SLOT_CLOSING;
        if (!g->refs) free_graph(m, g);
    }
    m->memory_bytes -= c->memory_bytes;
    c->memory_bytes = 0;
    c->used = 0;
    c->suspended = c->stopped = 0;
    rg_model_pump_all(m);
    return 0;
}

void rg_model_recover(rg_model *m)
{
    rg_model_reset_time(m);
    m->op_free = m->op_used = 0;
    m->memory_bytes = 0;
    for (uint32_t i = 0; i < RG_MODEL_MAX_CONTEXTS; i++) {
        rg_model_context *c = &m->contexts[i];
        c->streams = c->legacy = c->blocking = c->pending = c->resident = 0;
        if (!c->used) c->memory_bytes = 0;
        m->memory_bytes += c->memory_bytes;
    }
    for (uint32_t i = 0; i < RG_MODEL_MAX_STREAMS; i++) {
        rg_model_stream *s = &m->streams[i];
        s->head = s->tail = s->depth = s->next_waiter = s->next_pump = 0;
        s->waits = WAITS_NOT;
        s->pumping = 0;
        if (s->state != SLOT_USED || !m->contexts[s->context].used) {
            uint16_t generation = s->generation;
            memset(s, 0, sizeof *s);
            s->generation = generation;
            continue;
        }
        rg_model_context *c = &m->contexts[s->context];
        s->next_in_context = c->streams;
        c->streams = i + 1;
        if (s->blocking) c->blocking++;
        if (s->legacy) c->legacy = i + 1;
    }
    for (uint32_t i = 0; i < RG_MODEL_MAX_EVENTS; i++) {
        rg_model_event *e = &m->events[i];
        if (e->state != SLOT_USED || !m->contexts[e->context].used) {
            free_event(e);
            continue;
        }
        e->refs = e->waiters = 0;
        if (e->done < e->requested) e->time_ns = m->now;
        e->done = e->requested;
    }
    /* The list of free nodes may be broken: those on it are given up, unless no graph is left. */
    uint32_t claimed = 0;
    for (uint32_t i = 0; i < RG_MODEL_MAX_GRAPHS; i++) {
        rg_model_graph *g = &m->graphs[i];
        if (g->state != SLOT_USED || !m->contexts[g->context].used) {
            uint16_t generation = g->generation;
            memset(g, 0, sizeof *g);
            g->generation = generation;
            continue;
        }
        g->refs = 0;
        claimed |= g->head;
    }
    m->node_free = 0;
    if (!claimed) m->node_used = 0;
}

/* ---- Questions */

bool rg_model_done(const rg_model *m, uint32_t stream, uint64_t ticket)
{
    const rg_model_stream *s = stream_at(m, stream);
    return !s || !s->head || m->ops[s->head].seq > ticket;
}

bool rg_model_stream_idle(const rg_model *m, uint32_t stream)
{
    return rg_model_done(m, stream, UINT64_MAX - 1);
}

bool rg_model_context_done(const rg_model *m, uint32_t context, uint64_t ticket)
{
    const rg_model_context *c = context_at(m, context);
    if (!c || !c->pending) return true;
    for (uint32_t i = c->streams; i; i = m->streams[i - 1].next_in_context) {
        const rg_model_stream *s = &m->streams[i - 1];
        if (s->head && m->ops[s->head].seq <= ticket) return false;
    }
    return true;
}

bool rg_model_runs_long(const rg_model *m, uint32_t context, uint64_t ns)
{
    const rg_model_context *c = context_at(m, context);
    for (uint32_t i = c ? c->streams : 0; i; i = m->streams[i - 1].next_in_context) {
        const rg_model_op *op = &m->ops[m->streams[i - 1].head];
        bool is_work = m->streams[i - 1].head && (op->kind == OP_KERNEL || op->kind == OP_GRAPH);
        if (is_work && op->phase != PHASE_QUEUED && op->min_ns >= ns) return true;
    }
    return false;
}

bool rg_model_event_done(const rg_model *m, uint32_t event, uint64_t *time_ns)
{
    const rg_model_event *e = event_at(m, event);
    if (time_ns) *time_ns = e ? e->time_ns : 0;
    return !e || e->done == e->requested;
}

/* When the operation at the head of a stream can be done at the earliest. */
static uint64_t head_earliest(const rg_model *m, const rg_model_op *op)
{
    uint32_t context = m->streams[op->stream].context, domain = domain_of(m, context);
    switch (op->phase) {
    case PHASE_QUEUED:
        if (m->contexts[context].suspended && op->kind != OP_TRANSFER) return RG_MODEL_NEVER;
        if (m->contexts[context].stopped && op->kind == OP_STOP) return RG_MODEL_NEVER;
        break;
    case PHASE_ARRIVING:
        return op->arrive_ns + (op->kind == OP_GRAPH ? 0 : op->min_ns);
    case PHASE_RUNNING:
        if (op->doing == OP_TRANSFER) return m->engine[engine_of(op->transfer)].end_ns;
        break;
    default:
        break;
    }
    if (op->doing == OP_KERNEL && op->phase != PHASE_QUEUED && m->active != (int32_t)domain) {
        /* Another context has the SMs: until its slice ends or, at the earliest, its queued work does. */
        if (m->contexts[context].suspended) return RG_MODEL_NEVER;
        if (m->next_active >= 0) return m->switch_end + 1;
        if (m->active < 0) return m->now;
        const rg_model_context *c = &m->contexts[m->active];
        uint64_t idle = m->now;
        for (uint32_t i = c->streams; i && !c->blocking; i = m->streams[i - 1].next_in_context) {
            const rg_model_op *first = &m->ops[m->streams[i - 1].head];
            if (!m->streams[i - 1].head || first->kind != OP_KERNEL || first->phase == PHASE_QUEUED) continue;
            uint64_t at = m->now; /* kernels that follow a running one without anything else to wait for */
            for (uint32_t o = first->next; o && at < m->slice_end && m->ops[o].kind == OP_KERNEL; o = m->ops[o].next)
                at += m->ops[o].min_ns;
            if (at > idle) idle = at;
        }
        if (m->slice_end && m->slice_end < idle) idle = m->slice_end;
        if (c->suspended && m->preempt_at < idle) idle = m->preempt_at;
        return idle + m->p.switch_ns;
    }
    if (op->doing == OP_KERNEL && op->phase != PHASE_QUEUED)
        return m->now + waves_ns(op->blocks_left, op->capacity ? op->capacity : 1, op->amount);
    return m->now;
}

static uint64_t queue_earliest(const rg_model *m, const rg_model_stream *s, uint64_t ticket)
{
    if (!s->head || m->ops[s->head].seq > ticket) return m->now;
    uint64_t at = head_earliest(m, &m->ops[s->head]), next = rg_model_next_event(m);
    if (at == RG_MODEL_NEVER) return at;
    for (uint32_t i = m->ops[s->head].next; i && m->ops[i].seq <= ticket; i = m->ops[i].next) at += m->ops[i].min_ns;
    return at > next ? at : next;
}

uint64_t rg_model_earliest(const rg_model *m, uint32_t stream, uint64_t ticket)
{
    const rg_model_stream *s = stream_at(m, stream);
    return s ? queue_earliest(m, s, ticket) : m->now;
}

uint64_t rg_model_context_earliest(const rg_model *m, uint32_t context, uint64_t ticket)
{
    const rg_model_context *c = context_at(m, context);
    uint64_t latest = m->now;
    for (uint32_t i = c ? c->streams : 0; i; i = m->streams[i - 1].next_in_context) {
        uint64_t at = queue_earliest(m, &m->streams[i - 1], ticket);
        if (at > latest) latest = at;
    }
    return latest;
}

uint64_t rg_model_event_earliest(const rg_model *m, uint32_t event)
{
    const rg_model_event *e = event_at(m, event);
    return e && e->done != e->requested ? rg_model_earliest(m, e->stream, e->ticket) : m->now;
}

uint64_t rg_model_room_earliest(const rg_model *m, uint32_t stream, uint32_t count)
{
    const rg_model_stream *s = stream_at(m, stream);
    uint32_t op = s ? s->head : 0;
    for (uint32_t i = 1; i < count && op && m->ops[op].next; i++) op = m->ops[op].next;
    return op ? queue_earliest(m, s, m->ops[op].seq) : m->now;
}

int rg_model_get_context_stats(const rg_model *m, uint32_t context, rg_model_context_stats *out)
{
    const rg_model_context *c = context_at(m, context);
    if (!c) return RG_MODEL_INVALID;
    bool on_sms = m->p.shared || m->active == (int32_t)slot_of(context);
    *out = (rg_model_context_stats){
        .kernels = c->kernels,
        .transfers = c->transfers,
        .blocks = c->blocks,
        .busy_ns = c->busy_ns + (c->resident && on_sms ? m->now - c->busy_since : 0),
        .memory_bytes = c->memory_bytes,
    };
    return 0;
}

void rg_model_get_stats(const rg_model *m, rg_model_stats *out)
{
    uint32_t busy = m->active < 0 ? 0 : m->domains[m->active].busy_sms;
    *out = (rg_model_stats){
        .sm_busy_ns = m->sm_busy_ns + busy * (m->now - m->sm_busy_since),
        .switches = m->switches,
        .memory_bytes = m->memory_bytes,
        .cohorts = m->last_cohort,
    };
}
