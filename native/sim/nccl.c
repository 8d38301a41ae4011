/*
 * nccl.c: a stand-in libnccl.so.2: ranks in processes of their own that really wait for each other, on the simulated GPU.
 *
 * The unique id holds the path of a file that all ranks map; in it each says how many collectives it has entered. What a collective
 * computes is not computed. Where ranks wait is chosen by RIGEL_SIM_NCCL:
 *   host (default)  in the call, until all have come, as in NCCL's first collective of a communicator
 *   gpu             on the GPU: the kernel of who comes before the others does not end (an hour), as nothing on the simulated GPU
 *                   could end it; the call returns, and the program waits where it synchronises
 *
 * What is called in a group is done at the outermost group's end; until then a split has made no communicator. A split that is asked
 * not to block makes it when the program asks the parent how far that is (ncclCommGetAsyncError).
 */
#include "../cuda_abi.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
enum { RANKS = 16, JOBS = 32, OK = 0, SYSTEM_ERROR = 2, INVALID_USAGE = 5, IN_PROGRESS = 7 };

typedef struct {
    char internal[128];
} unique_id;

typedef struct {
    _Atomic uint64_t joined[RANKS], entered[RANKS], splits[RANKS];
} meeting;

/* nccl.h's ncclConfig_t, its beginning. */
typedef struct {
    size_t size;
    unsigned magic, version;
    int blocking;
} configuration;

typedef struct communicator communicator;

/* A collective, or a split, which has `out`. */
typedef struct {
    communicator *c, **out;
    CUstream stream;
    int color;
    bool blocking;
} job;

struct communicator {
    meeting *m;
    int rank, size;
    CUmodule module;
    CUfunction kernel;
    job later; /* a split that does not block */
    char path[128];
};

CUresult cuModuleLoadData(CUmodule *module, const void *image);
CUresult cuModuleGetFunction(CUfunction *f, CUmodule module, const char *name);
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned smem,
                        CUstream s, void **params, void **extra);

static const char ptx[] = ".version 6.0\n.target sm_52\n.address_size 64\n"
                          ".visible .entry ncclDevKernel_rigel_spin(.param .u64 n, .param .u64 ns)\n{ ret; }\n";

static bool all_at(const communicator *c, _Atomic uint64_t *counts, uint64_t least)
{
    for (int i = 0; i < c->size; i++)
        if (atomic_load(&counts[i]) < least)
            return false;
    return true;
}

static int join(communicator **out, int size, const char *path, int rank)
{
    int fd = size >= 1 && size <= RANKS && rank >= 0 && rank < size ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600) : -1;
    communicator *c = calloc(1, sizeof *c);
    if (fd < 0 || !c || ftruncate(fd, sizeof(meeting)) != 0 ||
        (c->m = mmap(NULL, sizeof(meeting), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)) == MAP_FAILED)
        return SYSTEM_ERROR;
    close(fd);
    c->rank = rank;
    c->size = size;
    snprintf(c->path, sizeof c->path, "%s", path);
    if (cuModuleLoadData(&c->module, ptx) || cuModuleGetFunction(&c->kernel, c->module, "ncclDevKernel_rigel_spin"))
        return SYSTEM_ERROR;
    atomic_store(&c->m->joined[rank], 1);
    while (!all_at(c, c->m->joined, 1))
        usleep(500);
    *out = c;
    return OK;
}

static int communicate(communicator *c, CUstream s)
{
    const char *where = getenv("RIGEL_SIM_NCCL");
    uint64_t mine = atomic_fetch_add(&c->m->entered[c->rank], 1) + 1, n = 1, ns = 5000;
    if (where && strcmp(where, "gpu") == 0)
        ns = all_at(c, c->m->entered, mine) ? ns : 3600000000000u;
    else
        while (!all_at(c, c->m->entered, mine))
            usleep(500);
    void *params[] = {&n, &ns};
    return cuLaunchKernel(c->kernel, 1, 1, 1, 32, 1, 1, 0, s, params, NULL) ? SYSTEM_ERROR : OK;
}

/* All ranks of one colour; the key is not looked at, as ranks keep their order. */
static int split(communicator *c, int color, communicator **out)
{
    char path[128];
    uint64_t number = atomic_fetch_add(&c->m->splits[c->rank], 1) + 1;
    while (!all_at(c, c->m->splits, number))
        usleep(500);
    if (color < 0)
        return OK;
    snprintf(path, sizeof path, "%.90s-%llu-%d", c->path, (unsigned long long)number, color);
    return join(out, c->size, path, c->rank); /* every rank gives the same colour here */
}

static _Thread_local job jobs[JOBS];
static _Thread_local int job_count, groups;

static int perform(const job *j)
{
    if (!j->out)
        return communicate(j->c, j->stream);
    if (j->blocking)
        return split(j->c, j->color, j->out);
    j->c->later = *j;
    return IN_PROGRESS;
}

static int perform_or_put_off(job j)
{
    if (!j.c || job_count == JOBS)
        return INVALID_USAGE;
    if (!groups)
        return perform(&j);
    jobs[job_count++] = j;
    return OK;
}

static int collective(communicator *c, CUstream s)
{
    return perform_or_put_off((job){.c = c, .stream = s});
}

#pragma GCC diagnostic ignored "-Wunused-parameter"
#pragma GCC diagnostic ignored "-Wmissing-prototypes"

API int ncclCommInitRank(communicator **out, int size, unique_id id, int rank)
{
    return join(out, size, id.internal, rank);
}

API int ncclCommInitRankConfig(communicator **out, int size, unique_id id, int rank, void *config)
{
    return join(out, size, id.internal, rank);
}

API int ncclCommSplit(communicator *c, int color, int key, communicator **out, configuration *config)
{
    *out = NULL;
    return perform_or_put_off((job){.c = c, .out = out, .color = color, .blocking = !config || config->blocking});
}

API int ncclCommGetAsyncError(communicator *c, int *state)
{
    job j = c->later;
    c->later = (job){0};
    j.blocking = true;
    *state = j.c ? perform(&j) : OK;
    return OK;
}

API int ncclCommUserRank(const communicator *c, int *rank)
{
    *rank = c->rank;
    return OK;
}

API int ncclCommCount(const communicator *c, int *size)
{
    *size = c->size;
    return OK;
}

API int ncclCommDestroy(communicator *c)
{
    free(c);
    return OK;
}

API int ncclAllReduce(const void *send, void *recv, size_t count, int type, int op, communicator *c, CUstream s)
{
    return collective(c, s);
}

API int ncclBroadcast(const void *send, void *recv, size_t count, int type, int root, communicator *c, CUstream s)
{
    return collective(c, s);
}

API int ncclSend(const void *send, size_t count, int type, int peer, communicator *c, CUstream s)
{
    return OK;
}

API int ncclRecv(void *recv, size_t count, int type, int peer, communicator *c, CUstream s)
{
    return OK;
}

API int ncclGroupStart(void)
{
    groups++;
    return OK;
}

API int ncclGroupEnd(void)
{
    int result = OK;
    if (!groups)
        return INVALID_USAGE;
    if (--groups)
        return OK;
    for (int i = 0; i < job_count; i++) {
        int r = perform(&jobs[i]);
        result = r ? r : result;
    }
    job_count = 0;
    return result;
}
