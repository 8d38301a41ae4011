/*
 * test-collective.c: NCCL's calls as a client makes them, with a stand-in NCCL: its kernels at the gate, and communicators split off.
 *
 * The client's parts are linked into this program, and NCCL is loaded, whose launches come to them. A communicator has one rank.
 */
#include "client-testing.h"
#include "collective.h"

#include <glob.h>

static CUstream stream;
static ncclComm_t world;
static void *nccl;

static void become_of(const char *class)
{
    ncclUniqueId id = {{0}};
    prepare_waiting_client("collective", class);
    attach_client();
    load_kernels(NULL);
    CHECK_EQUAL(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    nccl = dlopen(in_build_folder("nccl/libnccl.so.2"), RTLD_NOW);
    CHECK(nccl != NULL);
    snprintf(id.internal, sizeof id.internal, "%s", scratch("meeting"));
    CHECK_EQUAL(ncclCommInitRank(&world, 1, id, 0), ncclSuccess);
}

static void become(void)
{
    become_of("best-effort");
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

static rg_communicator *row(int i)
{
    return &seg->communicators[rg.slot_index * RG_MAX_COMMUNICATORS + i];
}

static void a_communicator_split_off_has_a_row(void)
{
    become();
    ncclComm_t other = split_off(1);
    CHECK(row(0)->handle == (uintptr_t)world && row(1)->handle == (uintptr_t)other);
    CHECK_EQUAL(row(0)->entered, 1);
    reduce(other);
    CHECK_EQUAL(row(1)->entered, 1);
    CHECK_EQUAL(ncclCommDestroy(other), ncclSuccess);
    CHECK_EQUAL(row(1)->key, 0);
    CHECK_EQUAL(ncclCommSplit(world, NCCL_SPLIT_NOCOLOR, 0, &other, NULL), ncclSuccess);
    CHECK(!other && row(1)->key == 0);
    CHECK_EQUAL(rg.slot->communicators_lost, 0);
    leave();
}

/* Past Rigel too: the ranks' counts are compared. */
static void collectives_past_rigel_are_counted(void)
{
    become_of("high");
    CHECK_EQUAL(rigel_bypass_begin(), 0);
    reduce(world);
    reduce(world);
    CHECK_EQUAL(row(0)->entered, 2);
    CHECK_EQUAL(rg_launches(rg.slot), 0);
    ncclComm_t other = split_off(1);
    CHECK(row(1)->handle == (uintptr_t)other);
    CHECK_EQUAL(ncclCommDestroy(other), ncclSuccess);
    CHECK_EQUAL(row(1)->key, 0);
    rigel_bypass_end();
    reduce(world);
    CHECK_EQUAL(row(0)->entered, 4);
    CHECK_EQUAL(rg_launches(rg.slot), 1);
    leave();
}

static void those_split_off_in_a_group_have_rows_at_its_end(void)
{
    become();
    ncclComm_t first = NULL, second = NULL, none = NULL, again = NULL;
    CHECK_EQUAL(ncclGroupStart(), ncclSuccess);
    CHECK_EQUAL(ncclCommSplit(world, 1, 0, &first, NULL), ncclSuccess);
    CHECK_EQUAL(ncclCommSplit(world, NCCL_SPLIT_NOCOLOR, 0, &none, NULL), ncclSuccess);
    CHECK_EQUAL(ncclGroupStart(), ncclSuccess);
    CHECK_EQUAL(ncclCommSplit(world, 1, 0, &second, NULL), ncclSuccess);
    CHECK_EQUAL(ncclGroupEnd(), ncclSuccess);
    CHECK(!first && row(1)->key == 0);
    CHECK_EQUAL(ncclGroupEnd(), ncclSuccess);
    CHECK(first && second && !none);
    CHECK(row(1)->handle == (uintptr_t)first && row(2)->handle == (uintptr_t)second && row(3)->key == 0);
    CHECK(row(1)->key != row(2)->key && row(1)->key != row(0)->key);
    CHECK_EQUAL(row(0)->entered, 3);
    CHECK_EQUAL(row(1)->size, 1);
    reduce(second);
    CHECK_EQUAL(row(2)->entered, 1);
    /* Nothing of it is left for the next group. */
    CHECK_EQUAL(ncclGroupStart(), ncclSuccess);
    CHECK_EQUAL(ncclCommSplit(second, 1, 0, &again, NULL), ncclSuccess);
    CHECK_EQUAL(ncclGroupEnd(), ncclSuccess);
    CHECK(row(3)->handle == (uintptr_t)again && row(4)->key == 0);
    CHECK_EQUAL(rg.slot->communicators_lost, 0);
    leave();
}

/* Nobody knows when the program has it: that it is missing is counted. */
static void one_split_off_without_blocking_counts_as_lost(void)
{
    become();
    struct {
        size_t size;
        unsigned magic, version;
        int blocking;
    } config = {.size = sizeof config};
    ncclComm_t made = NULL, child = NULL;
    CHECK_EQUAL(ncclCommSplit(world, 1, 0, &made, &config), ncclInProgress);
    CHECK(made == NULL);
    CHECK_EQUAL(rg.slot->communicators_lost, 1);
    ncclResult_t (*ask)(ncclComm_t, ncclResult_t *), state = ncclInProgress;
    *(void **)&ask = dlsym(nccl, "ncclCommGetAsyncError");
    CHECK(ask != NULL);
    CHECK_EQUAL(ask(world, &state), ncclSuccess);
    CHECK(state == ncclSuccess && made != NULL);
    reduce(made);
    CHECK_EQUAL(ncclCommSplit(made, 1, 0, &child, NULL), ncclSuccess);
    CHECK_EQUAL(rg.slot->communicators_lost, 2);
    CHECK_EQUAL(ncclGroupStart(), ncclSuccess);
    CHECK_EQUAL(ncclCommSplit(world, 1, 0, &made, &config), ncclSuccess);
    CHECK_EQUAL(rg.slot->communicators_lost, 2);
    CHECK_EQUAL(ncclGroupEnd(), ncclInProgress);
    CHECK_EQUAL(rg.slot->communicators_lost, 3);
    CHECK(row(1)->key == 0);
    leave();
}

int main(int argc, char **argv)
{
    (void)argc;
    ensure_environment("LD_LIBRARY_PATH", in_build_folder("sim"), argv);
    int failures = 0;
    RUN(kernels_of_nccl_pass_the_gate_though_nobody_tells_their_names);
    RUN(a_communicator_split_off_has_a_row);
    RUN(collectives_past_rigel_are_counted);
    RUN(those_split_off_in_a_group_have_rows_at_its_end);
    RUN(one_split_off_without_blocking_counts_as_lost);
    return failures ? 1 : 0;
}
