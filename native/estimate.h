/*
 * estimate.h: the segment's table of how long kernels take, shared by all clients of the same program.
 *
 * Keyed by what is the same in every process: a hash of the program, the device's name, the kernel's name, grid and block.
 * The program is part of it because the shape does not always say how much a kernel does (a matrix product over another inner
 * dimension has the same grid), and the device's name because it decides how fast it is done.
 *
 * Lock-free, and valid whatever instant a writer is killed at: keys are taken by compare-and-swap and never change or
 * go; the estimate and its count of samples are one word each; who finds an entry whose description (name, shape, device) is
 * missing writes it, and all write the same. A full neighbourhood refuses: the kernel is then learned by each process alone.
 *
 * Never on the launch path: clients come here at a kernel's first launch and with a finished sample.
 */
#ifndef RIGEL_ESTIMATE_H
#define RIGEL_ESTIMATE_H

#include "segment.h"

#include <stdbool.h>

/* Grid and block of a launch, without loss within CUDA's limits (2^31-1, 65535, 65535 and 1024, 1024, 64). */
typedef struct {
    uint64_t grid;  /* x, y << 32, z << 48 */
    uint64_t block; /* x, y << 16, z << 32; 0: work without a shape, a copy or memset */
} rg_dims;

#define RG_DIMS_NONE ((rg_dims){0, 0}) /* a copy or memset */
#define RG_DIMS_UNIT ((rg_dims){0, 1}) /* a graph, or a launch whose shape was set before */
#define RG_DIMS_ANY ((rg_dims){0, 2})  /* every shape of a kernel: profiles that hold no shapes */

static inline rg_dims rg_dims_of(unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz)
{
    return (rg_dims){gx | (uint64_t)gy << 32 | (uint64_t)gz << 48, bx | (uint64_t)by << 16 | (uint64_t)bz << 32};
}

/* rg_dims_hash: grid and block folded into one number; the same in every process and version. */
static inline uint64_t rg_dims_hash(rg_dims dims)
{
    uint64_t h = dims.grid * 0x9e3779b97f4a7c15u;
    return (h ^ h >> 29 ^ dims.block) * 0xc2b2ae3d27d4eb4fu;
}

/* How many samples an estimate that came from elsewhere is doubted for: see rg_estimate_next. */
enum { RG_ESTIMATE_DOUBT = 3 };

/*
 * rg_estimate_next: the estimate after one more sample. A sample also holds whatever delayed the kernel, so the estimate falls
 * at once to a shorter one and rises slowly; faster while it is `doubted`, so that a wrong one is not believed for long.
 */
static inline uint32_t rg_estimate_next(uint32_t old_ns, uint32_t sample_ns, bool doubted)
{
    if (!old_ns || sample_ns <= old_ns)
        return sample_ns;
    return old_ns + (sample_ns - old_ns) / (doubted ? 2 : 16);
}

/* What is known of a kernel besides its duration; for people and the cache of the control process. */
typedef struct {
    uint64_t program;
    uint32_t device; /* 1 + index in the segment */
    rg_dims dims;
    const char *name;
} rg_estimate_facts;

/* rg_text_hash: of a name; never 0. rg_hash_fold: a hash with one more word in it. */
uint64_t rg_text_hash(const char *text);
uint64_t rg_hash_fold(uint64_t hash, uint64_t word);

/* rg_estimate_key: never 0. `device` counts as far as it fits the segment's device table. */
uint64_t rg_estimate_key(uint64_t program, const char *device, uint64_t kernel_hash, rg_dims dims);

/* rg_estimate_find, rg_estimate_enter: the entry's index; -1 if it is not there, or has no room. */
int rg_estimate_find(rg_segment *seg, uint64_t key);
int rg_estimate_enter(rg_segment *seg, uint64_t key);

/* rg_estimate_describe: writes down what the entry stands for, if nobody has. */
void rg_estimate_describe(rg_segment *seg, int at, const rg_estimate_facts *facts);

/* rg_estimate_sample: takes one more timed launch in. */
void rg_estimate_sample(rg_segment *seg, int at, uint32_t sample_ns);

#endif
