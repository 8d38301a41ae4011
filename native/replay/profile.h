/*
 * profile.h: a kernel profile, what one iteration (or request) of a program asks of the GPU, in launch order.
 *
 * Two formats are read. Which one a file has is known by its header line, never by its name:
 *
 *   Rigel's   # rigel-profile 1; key=value; ...
 *             name,kind,stream,grid_x,...,duration_ns,gap_ns        (see COLUMNS in profile.c; imported profiles
 *                                                                   have FURTHER_COLUMNS after them, recordings,
 *                                                                   version 2, RECORDED_COLUMNS after those)
 *   Orion's   Name,Profile,Memory_footprint,SM_usage,Duration       (no gaps, no shapes)
 *
 * Pure: it reads text into memory. It must never touch a GPU, print, or end the program.
 */
#ifndef RIGEL_PROFILE_H
#define RIGEL_PROFILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Limits of what is read; a file beyond them is refused with the line and the limit. */
#define RG_PROFILE_MAX_BYTES (256u << 20)
#define RG_PROFILE_MAX_OPS 1000000u
#define RG_PROFILE_MAX_NAME_BYTES 65535u
#define RG_PROFILE_MAX_STREAMS 32u
#define RG_PROFILE_MAX_NS 3600000000000ull /* an hour: no single operation or gap is longer */
#define RG_PROFILE_ERROR_BYTES 512u        /* enough for any error that is written */

enum rg_profile_kind {
    RG_PROFILE_KERNEL,
    RG_PROFILE_MEMSET,
    RG_PROFILE_COPY_H2D,
    RG_PROFILE_COPY_D2H,
    RG_PROFILE_COPY_D2D,
    RG_PROFILE_SYNC, /* the host waits here until all that was launched has finished */
};

typedef struct {
    const char *name; /* owned by the profile */
    enum rg_profile_kind kind;
    uint32_t stream; /* below rg_profile.streams */
    uint32_t grid[3], block[3];
    uint32_t registers;    /* for each thread */
    uint32_t shared_bytes; /* for each block */
    uint32_t sms;          /* SMs in use where no shape is known (grid and block are 0), as in Orion's rows; else 0 */
    int32_t bound;         /* 1 compute, 0 memory, -1 unknown or without the column */
    uint64_t bytes;        /* copied or set */
    uint64_t dram_bytes;   /* to and from device memory; 0: not known */
    uint64_t duration_ns;  /* GPU time */
    uint64_t gap_ns;       /* host time from the return of the launch before to the start of this one */
} rg_profile_op;

typedef struct {
    bool orion;
    bool waits; /* the last row is a sync: an iteration ends when its work has finished, else the program runs ahead */
    char *facts; /* "device=NVIDIA H200; ..." of the first line; "" for Orion's */
    rg_profile_op *ops;
    uint32_t op_count;
    uint32_t launches; /* ops that are not a sync */
    uint32_t streams;
    void *text; /* storage of names and facts */
} rg_profile;

/*
 * rg_profile_read: reads the file at `path` into `out`. Returns 0, or -1 with one line in `error`:
 * "file:line: field 'duration_ns': expected an integer from 0 to 3600000000000, got "x"".
 */
int rg_profile_read(const char *path, rg_profile *out, char *error, size_t error_bytes);

/* rg_profile_parse: the same for text already in memory; `path` is what errors name. */
int rg_profile_parse(const char *path, const char *text, size_t bytes, rg_profile *out, char *error,
                     size_t error_bytes);

/* rg_profile_free: releases what a successful read filled in. Harmless on a zeroed profile. */
void rg_profile_free(rg_profile *profile);

/* rg_profile_blocks: blocks of a kernel row's grid (up to 2^63: the product of the limits of each axis). */
uint64_t rg_profile_blocks(const rg_profile_op *op);

/*
 * rg_profile_sms: how many of a device's `sms` SMs a kernel row fills, in shape.c: what Orion's rows say, else its blocks over
 * what an SM holds of them. That is the same on V100, A100, H100 and H200 but for shared memory, of which the H100's is taken.
 */
uint32_t rg_profile_sms(const rg_profile_op *op, uint32_t sms);

#endif
