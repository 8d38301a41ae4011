/*
 * hang-program.c: programs that hang as users' programs did; linked against NCCL and the driver.
 *
 *   late  RANK SIZE FILE  three collectives, then rank 1 loads data for ever and the others go to the fourth
 *   skip  RANK SIZE FILE  rank 1 leaves the fourth out and is done; the others wait for what they launched
 *   absent RANK SIZE FILE rank 1 never makes the communicator
 *   fine  RANK SIZE FILE  collectives without end, all ranks, some of them on a communicator made by a split
 *   lost  RANK SIZE FILE  the same, with a communicator more that is split off without blocking
 *   spin                  a kernel that does not end, a few behind it, then waits for all
 *   busy                  short kernels without end, of which some are always unfinished
 *   loop                  short kernels without end
 *   idle                  a kernel, and then nothing
 *   thread                the same, and the main thread ends before another one
 *
 * `dlsym` as another argument at the end: NCCL is looked up and not linked, as JAX does. Knows nothing of Rigel. Ends when it is killed.
 */
#include "cuda_abi.h"
#include "testing.h"

#include <dlfcn.h>
#include <pthread.h>

typedef struct {
    char internal[128];
} unique_id;
typedef struct communicator communicator;

CUresult cuInit(unsigned flags);
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d);
CUresult cuCtxSetCurrent(CUcontext c);
CUresult cuCtxSynchronize(void);
CUresult cuModuleLoadData(CUmodule *module, const void *image);
CUresult cuModuleGetFunction(CUfunction *f, CUmodule module, const char *name);
CUresult cuStreamCreate(CUstream *s, unsigned flags);
CUresult cuStreamSynchronize(CUstream s);
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned smem,
                        CUstream s, void **params, void **extra);
int ncclCommInitRank(communicator **out, int size, unique_id id, int rank);
int ncclCommSplit(communicator *c, int color, int key, communicator **out, void *config);
int ncclAllReduce(const void *send, void *recv, size_t count, int type, int op, communicator *c, CUstream s);

static const char ptx[] = ".version 6.0\n.target sm_52\n.address_size 64\n"
                          ".visible .entry long_rigel_spin(.param .u64 n, .param .u64 ns)\n{ ret; }\n"
                          ".visible .entry short_rigel_spin(.param .u64 n, .param .u64 ns)\n{ ret; }\n";
static CUfunction longer, shorter;
static CUstream stream;
static __typeof__(&ncclAllReduce) all_reduce = ncclAllReduce;

static void launch(CUfunction f, uint64_t ns)
{
    uint64_t n = 1;
    void *params[] = {&n, &ns};
    CHECK_EQUAL(cuLaunchKernel(f, 1, 1, 1, 32, 1, 1, 0, stream, params, NULL), CUDA_SUCCESS);
}

static void reduce(communicator *c)
{
    launch(shorter, 20000);
    CHECK_EQUAL(all_reduce(NULL, NULL, 1000, 7, 0, c, stream), 0);
    CHECK_EQUAL(cuStreamSynchronize(stream), CUDA_SUCCESS);
}

static void sleep_for_ever(void)
{
    for (;;)
        pause();
}

static void *other_thread(void *nothing)
{
    sleep_for_ever();
    return nothing;
}

static void ranks(const char *what, int rank, int size, const char *path)
{
    unique_id id = {{0}};
    communicator *world = NULL, *half = NULL, *another = NULL;
    snprintf(id.internal, sizeof id.internal, "%s", path);
    if (strcmp(what, "absent") == 0 && rank == 1)
        sleep_for_ever();
    CHECK_EQUAL(ncclCommInitRank(&world, size, id, rank), 0);
    bool lost = strcmp(what, "lost") == 0, fine = lost || strcmp(what, "fine") == 0;
    if (fine)
        CHECK_EQUAL(ncclCommSplit(world, 5, rank, &half, NULL), 0);
    if (lost) {
        struct {
            size_t size;
            unsigned magic, version;
            int blocking;
        } config = {.size = sizeof config};
        CHECK_EQUAL(ncclCommSplit(world, 6, rank, &another, &config), 7); /* ncclInProgress */
    }
    bool apart = getenv("RIGEL_SIM_NCCL") != NULL; /* ranks that wait on the GPU do not wait for each other there in time */
    for (int i = 0; (i < 3 || fine) && !apart; i++) {
        reduce(world);
        if (fine)
            reduce(half);
    }
    if (rank == 1 && strcmp(what, "late") == 0)
        sleep_for_ever();
    if (rank == 1 && strcmp(what, "skip") == 0) {
        CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
        sleep_for_ever();
    }
    reduce(world);
    sleep_for_ever();
}

int main(int argc, char **argv)
{
    CUcontext context;
    CUmodule module;
    CHECK(argc >= 2);
    CHECK_EQUAL(cuInit(0), CUDA_SUCCESS);
    CHECK_EQUAL(cuDevicePrimaryCtxRetain(&context, 0), CUDA_SUCCESS);
    CHECK_EQUAL(cuCtxSetCurrent(context), CUDA_SUCCESS);
    CHECK_EQUAL(cuModuleLoadData(&module, ptx), CUDA_SUCCESS);
    CHECK_EQUAL(cuModuleGetFunction(&longer, module, "long_rigel_spin"), CUDA_SUCCESS);
    CHECK_EQUAL(cuModuleGetFunction(&shorter, module, "short_rigel_spin"), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamCreate(&stream, 1), CUDA_SUCCESS);
    launch(shorter, 20000);
    CHECK_EQUAL(cuStreamSynchronize(stream), CUDA_SUCCESS);
    const char *what = argv[1];
    if (argc == 6 && strcmp(argv[5], "dlsym") == 0) {
        void *library = dlopen("libnccl.so.2", RTLD_NOW);
        CHECK(library != NULL);
        *(void **)&all_reduce = dlsym(library, "ncclAllReduce");
        CHECK(all_reduce != NULL);
    }
    if (argc >= 5)
        ranks(what, atoi(argv[2]), atoi(argv[3]), argv[4]);
    if (strcmp(what, "spin") == 0) {
        launch(longer, 3600000000000u);
        launch(shorter, 20000);
        launch(shorter, 20000);
        cuStreamSynchronize(stream);
    }
    if (strcmp(what, "busy") == 0) {
        launch(longer, 3600000000000u);
        for (CUstream second = NULL; cuStreamCreate(&second, 1) == CUDA_SUCCESS;) {
            stream = second;
            while (true) {
                launch(shorter, 20000);
                usleep(1000);
            }
        }
    }
    if (strcmp(what, "thread") == 0) {
        pthread_t other;
        CHECK_EQUAL(pthread_create(&other, NULL, other_thread, NULL), 0);
        pthread_exit(NULL);
    }
    while (strcmp(what, "loop") == 0)
        launch(shorter, 20000);
    sleep_for_ever();
}
