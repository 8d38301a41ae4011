/*
 * model-inside.h: what model.c (tables and questions) and model-time.c (what happens as time passes) share.
 * Nobody else includes it.
 */
#ifndef RIGEL_SIM_MODEL_INSIDE_H
#define RIGEL_SIM_MODEL_INSIDE_H

#include "model.h"

enum { OP_NONE, OP_KERNEL, OP_TRANSFER, OP_RECORD, OP_WAIT, OP_GRAPH, OP_STOP };
enum { PHASE_QUEUED, PHASE_ARRIVING, PHASE_READY, PHASE_RUNNING };
enum { SLOT_FREE, SLOT_USED, SLOT_CLOSING };
enum { WAITS_NOT, WAITS_EVENT, WAITS_LEGACY };
enum { ENGINE_H2D, ENGINE_D2H, ENGINE_MEMORY, ENGINES };

/* Ids carry the slot's generation, so that a stale one is recognised: they start at 1 << 16. */
static inline uint32_t slot_of(uint32_t id) { return id & 0xffff; }
static inline uint32_t id_of(uint32_t slot, uint16_t generation) { return (uint32_t)generation << 16 | slot; }

static inline uint32_t domain_of(const rg_model *m, uint32_t context) { return m->p.shared ? 0 : context; }

static inline rg_model_lanes lanes(uint64_t blocks, uint64_t warps, uint64_t registers, uint64_t shared)
{
    return blocks | warps << 16 | registers << 32 | shared << 48;
}

/* How many times `need` goes into `room`, lane by lane: no caller ever takes more, so lanes never borrow. */
static inline uint32_t fit(rg_model_lanes room, rg_model_lanes need)
{
    uint32_t most = (uint32_t)(room & 0xffff) / (uint32_t)(need & 0xffff);
    for (int shift = 16; shift < 64; shift += 16) {
        uint32_t each = (uint32_t)(need >> shift & 0xffff);
        if (!each) continue;
        uint32_t n = (uint32_t)(room >> shift & 0xffff) / each;
        if (n < most) most = n;
    }
    return most;
}

static inline uint32_t engine_of(uint8_t transfer)
{
    return transfer == RG_MODEL_H2D ? ENGINE_H2D : transfer == RG_MODEL_D2H ? ENGINE_D2H : ENGINE_MEMORY;
}

static inline int priority_level(int8_t priority) { return priority - RG_MODEL_HIGHEST_PRIORITY; }

/* model-time.c */
uint64_t rg_model_transfer_ns(const rg_model *m, uint8_t transfer, uint64_t bytes);
void rg_model_pump(rg_model *m, uint32_t stream);     /* look at the stream's first operation again, soon */
void rg_model_pump_all(rg_model *m);                  /* and now */
void rg_model_cut(rg_model *m, uint32_t context);     /* take a context's work out of queues, engines and SMs */
void rg_model_empty_domain(rg_model *m, uint32_t domain); /* every SM idle, nothing queued */
void rg_model_reset_time(rg_model *m);                /* nothing runs, nothing is on its way */
void rg_model_free_stream(rg_model *m, uint32_t stream); /* model.c */
void rg_model_drop_event_ref(rg_model *m, uint32_t event);
void rg_model_drop_graph_ref(rg_model *m, uint32_t graph);

#endif
