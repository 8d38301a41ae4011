/*
 * collective.h: NCCL's binary interface as far as Rigel uses it, and the names that collective.c exports.
 *
 * Source: NVIDIA's nccl.h (github.com/NVIDIA/nccl, src/nccl.h.in). The same in every libnccl.so.2.
 */
#ifndef RIGEL_COLLECTIVE_H
#define RIGEL_COLLECTIVE_H

#include "library.h"

typedef int ncclResult_t;
typedef struct ncclComm *ncclComm_t;
typedef struct {
    char internal[128];
} ncclUniqueId;
enum { ncclSuccess = 0, ncclSystemError = 2, ncclInvalidUsage = 5, ncclInProgress = 7 };
enum { NCCL_SPLIT_NOCOLOR = -1 };

enum rg_nccl {
#define RG_NCCL_CALL(symbol, ...) RG_NCCL_##symbol,
#define RG_NCCL_SPECIAL(symbol, ...) RG_NCCL_##symbol,
#include "nccl.def"
#undef RG_NCCL_CALL
#undef RG_NCCL_SPECIAL
    RG_NCCL_COUNT
};

extern rg_library rg_nccl;

/* Prototypes of all of them: the names this library exports. */
#pragma GCC visibility push(default)
#define RG_NCCL_CALL(symbol, kind, params, ...) ncclResult_t symbol params;
#define RG_NCCL_SPECIAL(symbol, params, ...) ncclResult_t symbol params;
#include "nccl.def"
#undef RG_NCCL_CALL
#undef RG_NCCL_SPECIAL
#pragma GCC visibility pop

#endif
