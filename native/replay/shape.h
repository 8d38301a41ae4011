/*
 * shape.h: how a profile's kernel row is laid over the SMs of a device: blocks, how many of them an SM holds, and how
 * long each must take so that the whole takes as long as recorded.
 *
 * rigel-replay launches these shapes, the virtual-time scenario submits them to the model. Pure arithmetic.
 */
#ifndef RIGEL_SHAPE_H
#define RIGEL_SHAPE_H

#include "profile.h"

typedef struct {
    uint32_t sms, threads_per_sm, blocks_per_sm, registers_per_sm;
    uint32_t shared_bytes_per_sm;
    uint32_t shared_bytes_per_block; /* the most a block can ask for */
    uint32_t reserved_shared_bytes;  /* what the system takes of each resident block's shared memory */
} rg_shape_device;

typedef struct {
    uint32_t blocks;
    uint32_t block[3];
    uint32_t shared_bytes; /* dynamic; so large that an SM holds blocks_per_sm of them and no more */
    uint32_t blocks_per_sm;
    uint32_t warps_per_sm; /* busy ones while the grid is at its fullest */
    uint64_t block_ns;
} rg_shape;

/*
 * rg_shape_plan: the shape for a kernel row.
 *
 *   Rigel's rows  the recorded grid; an SM holds what registers, shared memory and threads of the recorded kernel
 *                 allow; waves = ceil(blocks / (blocks_per_sm * sms)), block_ns = duration / waves
 *   Orion's rows  SM_usage blocks, one for each SM (Orion's own files go far beyond a GPU's SMs; the rest is cut),
 *                 block_ns = Duration
 *
 * Several waves whose blocks would be shorter than RG_SHAPE_MIN_BLOCK_NS are made fewer: starting a block takes the
 * hardware that long, so the kernel would take longer than recorded.
 */
#define RG_SHAPE_MIN_BLOCK_NS 2000u
void rg_shape_plan(const rg_profile_op *op, const rg_shape_device *device, rg_shape *out);

/* Registers each thread of the replayed kernel uses (ptxas 13.0 for sm_80 to sm_100). */
#define RG_SHAPE_REGISTERS 8u

#endif
