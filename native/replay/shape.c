/*
 * shape.c: see shape.h. Units of allocation as in NVIDIA's occupancy calculator: registers by 256 for a warp, shared
 * memory by 128 bytes.
 */
#include "shape.h"

#include <string.h>

#define WARP 32u
#define REGISTER_UNIT 256u
#define SHARED_UNIT 128u
#define ORION_THREADS 1024u /* no shape is recorded: a block that fills its SM's share of issue slots */

static uint32_t min32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static uint32_t rounded_up(uint32_t value, uint32_t unit)
{
    return (value + unit - 1) / unit * unit;
}

/* Blocks of these resources that an SM holds. */
static uint32_t occupancy(const rg_shape_device *d, uint32_t warps, uint32_t registers, uint32_t shared_bytes)
{
    uint32_t blocks = min32(d->blocks_per_sm, d->threads_per_sm / (warps * WARP));
    uint32_t warp_registers = rounded_up(registers * WARP, REGISTER_UNIT);
    if (warp_registers)
        blocks = min32(blocks, d->registers_per_sm / (warps * warp_registers));
    uint32_t shared = rounded_up(shared_bytes + d->reserved_shared_bytes, SHARED_UNIT);
    if (shared)
        blocks = min32(blocks, d->shared_bytes_per_sm / shared);
    return blocks;
}

/* The dynamic shared memory with which an SM holds no more than `blocks` of this many warps; 0: no need for any. */
static uint32_t limiting_shared_bytes(const rg_shape_device *d, uint32_t warps, uint32_t blocks)
{
    if (occupancy(d, warps, RG_SHAPE_REGISTERS, 0) <= blocks)
        return 0;
    uint32_t room = d->shared_bytes_per_sm / blocks / SHARED_UNIT * SHARED_UNIT;
    uint32_t bytes = room > d->reserved_shared_bytes ? room - d->reserved_shared_bytes : 0;
    return min32(bytes, d->shared_bytes_per_block);
}

void rg_shape_plan(const rg_profile_op *op, const rg_shape_device *d, rg_shape *out)
{
    memset(out, 0, sizeof(*out));
    if (op->sms) {
        out->blocks = min32(op->sms, d->sms);
        out->block[0] = min32(ORION_THREADS, d->threads_per_sm);
        out->block[1] = out->block[2] = 1;
        out->blocks_per_sm = 1;
        out->warps_per_sm = out->block[0] / WARP;
        /* Just over half of an SM's shared memory keeps a second block off it and leaves room for other kernels. */
        uint32_t half = d->shared_bytes_per_sm / 2 / SHARED_UNIT * SHARED_UNIT + SHARED_UNIT;
        out->shared_bytes = min32(half, d->shared_bytes_per_block);
        out->block_ns = op->duration_ns;
        return;
    }
    memcpy(out->block, op->block, sizeof(out->block));
    uint32_t threads = op->block[0] * op->block[1] * op->block[2];
    uint32_t warps = (threads + WARP - 1) / WARP;
    uint32_t held = occupancy(d, warps, op->registers, op->shared_bytes);
    if (held == 0)
        held = 1; /* recorded on a larger GPU: the replayed kernel itself always fits */
    uint64_t blocks = rg_profile_blocks(op), room = (uint64_t)held * d->sms;
    uint64_t waves = (blocks + room - 1) / room;
    uint64_t most = op->duration_ns / RG_SHAPE_MIN_BLOCK_NS;
    if (waves > 1 && waves > most) {
        waves = most ? most : 1;
        blocks = waves * room;
    }
    if (blocks > INT32_MAX) { /* the largest grid of one dimension */
        waves = INT32_MAX / room;
        blocks = waves * room;
    }
    out->blocks = (uint32_t)blocks;
    out->blocks_per_sm = held;
    out->shared_bytes = limiting_shared_bytes(d, warps, held);
    uint64_t fullest = (blocks + d->sms - 1) / d->sms;
    out->warps_per_sm = warps * (fullest < held ? (uint32_t)fullest : held);
    out->block_ns = op->duration_ns / waves;
}

uint32_t rg_profile_sms(const rg_profile_op *op, uint32_t sms)
{
    const rg_shape_device device = {
        .sms = sms,
        .threads_per_sm = 2048,
        .blocks_per_sm = 32,
        .registers_per_sm = 65536,
        .shared_bytes_per_sm = 233472,
        .shared_bytes_per_block = 232448,
        .reserved_shared_bytes = 1024,
    };
    rg_shape shape;
    rg_shape_plan(op, &device, &shape);
    uint64_t blocks = op->sms ? op->sms : rg_profile_blocks(op);
    uint64_t filled = (blocks + shape.blocks_per_sm - 1) / shape.blocks_per_sm;
    return filled < sms ? (uint32_t)filled : sms;
}
