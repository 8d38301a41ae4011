/*
 * record.h: the recording: the file in which a client tells what it asks of the GPU, launch by launch or only counted, to the
 * control process that made it (rigel profile; the match of a launch against a profile).
 *
 * Vocabulary
 *   kind    one kernel of one shape, one graph, or copies or memsets of one size: entered once, launched any number of times
 *   entry   one thing that happened: a launch, how long it took, a wait, the end of a request. A ring that the control process drains
 *   level   how much is told: counts only; every launch (RG_REC_LOG); every launch and how long it took (RG_REC_TIMED)
 *
 * Rules, as in segment.h
 *   1. Fixed layout, one owner: the tables below. [control] and [client] say who writes a field, [any] several clients by atomics.
 *   2. Whatever instant a client is killed at: an entry is there once its number is in its first word; a kind once `state` is 1.
 *   3. A full ring or table loses what comes, counts it, and nobody waits.
 *   4. One process at a time writes entries (`owner`); all processes of a client count.
 */
#ifndef RIGEL_RECORD_H
#define RIGEL_RECORD_H

#include "estimate.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define RG_RECORDING_MAGIC 0x31304345524c4752ull /* "RGLREC01" in memory */
enum {
    RG_REC_VERSION = 1,
    RG_REC_KINDS = 8192,
    RG_REC_NAME_BYTES = 4 << 20,
    RG_REC_WORDS = 8, /* of an entry */
};

enum rg_record_level { RG_REC_COUNT = 0, RG_REC_QUIET, RG_REC_LOG, RG_REC_TIMED }; /* QUIET: requests alone */
enum rg_record_mechanism { RG_REC_ANY = 0, RG_REC_EVENTS, RG_REC_CUPTI };

/* What a kind is; from COPY_H2D on, `bytes` tells kinds apart. */
enum rg_record_work {
    RG_REC_KERNEL = 0,
    RG_REC_GRAPH,
    RG_REC_COPY_H2D,
    RG_REC_COPY_D2H,
    RG_REC_COPY_D2D,
    RG_REC_MEMSET,
};

/*
 * Entries. Word 0: 1 + the entry's number. Word 1: type, `flag` << 8, kind << 16, thread << 48. The others by type:
 *   LAUNCH    2 launch number, 3 begin and 4 end of the call, 5 stream, 6 number of the cuBLAS call it is part of or 0, 7 where
 *             it stands for another kernel (rigel_stand_for) 1 + the kind that the GPU really runs, else 0.
 *             flag: 2 while launches are timed, and 1 if this one is
 *   TIMED     2 launch number, 3 duration as the events have it
 *   GPU       2 correlation id, 3 start, 4 end, 5 stream, 6 graph (0: none): a record of CUPTI's, in its order
 *   REQUEST   3 time, 4 latency. flag: enum rg_record_source; kind: the level in force
 *   WAIT      3 begin and 4 end of a blocking wait. flag: nothing was left on the GPU then
 *   GEMM      2 number of the call, 3 m, 4 n, 5 k, 6 batch; kind: 1 + cudaDataType of its operands
 * Times are CLOCK_MONOTONIC nanoseconds; CUPTI's are brought to it.
 */
enum rg_record_type {
    RG_REC_LAUNCH = 1,
    RG_REC_TIME,
    RG_REC_GPU,
    RG_REC_REQUEST,
    RG_REC_WAIT,
    RG_REC_GEMM,
};
enum rg_record_source { RG_REC_REPORTED = 1, RG_REC_WAITED, RG_REC_IDLE }; /* IDLE: the agent saw it, not the program */

#define RG_REC_HEADER_FIELDS(F) \
    F(u64, magic, 1)      /* [control] stored last */ \
    F(u32, version, 1)    /* [control] */ \
    F(u32, capacity, 1)   /* [control] entries of the ring, a power of two; 0: counts only */ \
    F(u32, level, 1)      /* [control] enum rg_record_level that is asked for */ \
    F(u32, wanted, 1)     /* [control] enum rg_record_mechanism that may be used */ \
    F(u64, taken, 1)      /* [control] entries that were drained */ \
    F(u64, owner, 1)      /* [any] owner word of the process that writes entries; 0: none yet */ \
    F(u64, begun, 1)      /* [client] entries begun */ \
    F(u64, lost, 1)       /* [client] entries that found the ring full */ \
    F(u64, untimed, 1)    /* [client] launches that were to be timed and could not be */ \
    F(u64, timed, 1)      /* [client] launches of which a time is there or will be */ \
    F(u64, dropped, 1)    /* [client] records that CUPTI says it dropped */ \
    F(u64, event_ns, 1)   /* [client] time between two events with nothing between them: the least seen */ \
    F(u32, in_force, 1)   /* [client] level that is in force: what was timed at a higher one is in the ring */ \
    F(u32, mechanism, 1)  /* [client] enum rg_record_mechanism in use; 0: not decided yet */ \
    F(u32, cupti_version, 1) /* [client] as cuptiGetVersion has it */ \
    F(u32, sms, 1)        /* [client] of the device */ \
    F(u32, kinds, 1)      /* [any] kinds entered, or being so */ \
    F(u32, names, 1)      /* [any] bytes of names given out */ \
    F(u32, kinds_lost, 1) /* [any] launches of kinds that found no room */ \
    F(u32, others, 1)     /* [any] further processes, whose launches are not in the ring */ \
    F(char, device, 96)   /* [client] its name */ \
    F(char, why, 160)     /* [client] why not CUPTI */

#define RG_REC_KIND_FIELDS(F) \
    F(u64, key, 1)          /* [any] taken by compare-and-swap: hash of what follows; 0: free */ \
    F(u64, bytes, 1)        /* [any] copied or set */ \
    F(u64, count, 1)        /* [any] launches */ \
    F(u64, node_count, 1)   /* [any] launches as part of a graph */ \
    F(u32, state, 1)        /* [any] 1 once all but the counts is there */ \
    F(u32, work, 1)         /* [any] enum rg_record_work */ \
    F(u32, grid_x, 1)       /* [any] 0: no shape */ \
    F(u32, grid_y, 1)       /* [any] */ \
    F(u32, grid_z, 1)       /* [any] */ \
    F(u32, block_x, 1)      /* [any] */ \
    F(u32, block_y, 1)      /* [any] */ \
    F(u32, block_z, 1)      /* [any] */ \
    F(u32, registers, 1)    /* [any] for each thread */ \
    F(u32, shared_bytes, 1) /* [any] for each block */ \
    F(u32, sms, 1)          /* [any] SMs that it fills by the driver's occupancy; 0: not known */ \
    F(u32, name_at, 1)      /* [any] in the file's names */ \
    F(u32, name_bytes, 1)   /* [any] without the end; 0: no name */

typedef struct {
    RG_REC_HEADER_FIELDS(RG_MEMBER)
} rg_record_header;
typedef struct {
    RG_REC_KIND_FIELDS(RG_MEMBER)
} rg_record_kind;
typedef struct {
    _Alignas(64) rg_record_header header;
    _Alignas(64) rg_record_kind kinds[RG_REC_KINDS];
    char names[RG_REC_NAME_BYTES];
    _Alignas(64) _Atomic uint64_t entries[][RG_REC_WORDS];
} rg_recording;

/* What a kind is known by. */
typedef struct {
    enum rg_record_work work;
    const char *name; /* NULL: none */
    rg_dims dims;
    uint32_t registers, shared_bytes, sms;
    uint64_t bytes;
} rg_record_facts;

/* rg_record_enter: index of the kind with these facts in the file, entered if new; -1: no room. `sms` is no part of what it is. */
int rg_record_enter(rg_recording *r, const rg_record_facts *facts);

/* rg_record_put: writes an entry whose words from the second on these are; false if the ring is full, which is counted. */
bool rg_record_put(rg_recording *r, const uint64_t words[RG_REC_WORDS - 1]);

/* rg_record_word: an entry's word 1. */
static inline uint64_t rg_record_word(enum rg_record_type type, uint32_t flag, uint32_t kind, uint32_t thread)
{
    return (uint64_t)type | (uint64_t)flag << 8 | (uint64_t)kind << 16 | (uint64_t)thread << 48;
}

/* rg_record_open: maps a recording; NULL and the reason in `why` where it is missing, somebody else's or of another version. */
rg_recording *rg_record_open(const char *path, char *why, size_t why_bytes);

#endif
