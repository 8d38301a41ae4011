/*
 * test-collective.c: NCCL's calls as a client makes them, with a stand-in NCCL: its kernels at the gate.
 *
 * The client's parts are linked into this program, and NCCL is loaded, whose launches come to them. A communicator has one rank.
 */
#include "client-testing.h"
#include "collective.h"

#include <glob.h>

static CUstream stream;
static ncclComm_t world;

static void become(void)
{
    ncclUniqueId id = {{0}};
    prepare_waiting_client("collective", "best-effort");
    attach_client();
    load_kernels(NULL);
    CHECK_EQUAL(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CHECK(dlopen(in_build_folder("nccl/libnccl.so.2"), RTLD_NOW) != NULL);
    snprintf(id.internal, sizeof id.internal, "%s", scratch("meeting"));
    CHECK_EQUAL(ncclCommInitRank(&world, 1, id, 0), ncclSuccess);
}

static void leave(void)
{
    char pattern[PATH_MAX];
    glob_t meetings;
    snprintf(pattern, sizeof pattern, "%s*", scratch("meeting"));
    if (glob(pattern, 0, NULL, &meetings) == 0)
        for (size_t i = 0; i < meetings.gl_pathc; i++)
            unlink(meetings.gl_pathv[i]);
    done();
}

static void reduce(ncclComm_t comm)
{
    CHECK_EQUAL(ncclAllReduce(NULL, NULL, 1000, 7, 0, comm, stream), ncclSuccess);
}

static ncclComm_t split_off(int color)
{
    ncclComm_t made = NULL;
    CHECK_EQUAL(ncclCommSplit(world, color, 0, &made, NULL), ncclSuccess);
    CHECK(made != NULL);
    return made;
}

/* Every communicator of the stand-in has a kernel of its own: what is known of one says nothing of another's. */
static void kernels_of_nccl_pass_the_gate_though_nobody_tells_their_names(void)
{
    become();
    ncclComm_t other = split_off(1);
    rg_real.cuFuncGetName = NULL;
    rg_real.cuKernelGetName = NULL;
    CHECK_EQUAL(rg.slot->passed, 0);
    reduce(world);
    CHECK_EQUAL(rg.slot->passed, 1);
    CHECK_EQUAL(ncclGroupStart(), ncclSuccess);
    reduce(other);
    CHECK_EQUAL(rg.slot->passed, 1);
    CHECK_EQUAL(ncclGroupEnd(), ncclSuccess);
    CHECK_EQUAL(rg.slot->passed, 2);
    reduce(other);
    CHECK_EQUAL(rg.slot->passed, 3);
    launch_blocks(spin, stream, 1, 1000); /* the program's own */
    CHECK_EQUAL(rg.slot->passed, 3);
    CHECK_EQUAL(cuStreamSynchronize(stream), CUDA_SUCCESS);
    leave();
}

int main(int argc, char **argv)
{
    (void)argc;
    ensure_environment("LD_LIBRARY_PATH", in_build_folder("sim"), argv);
    int failures = 0;
    RUN(kernels_of_nccl_pass_the_gate_though_nobody_tells_their_names);
    return failures ? 1 : 0;
}
