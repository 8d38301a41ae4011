/*
 * test-record.c: the recording: its ring and kinds with several writers, and what a client tells of its launches.
 *
 * The client's parts are linked into this program and run on the simulated GPU, each case in a process of its own.
 */
#include "client-testing.h"
#include "record-client.h"

#include <pthread.h>
#include <sys/stat.h>

static rg_recording *file;

static void prepare(uint32_t capacity, uint32_t level)
{
    char why[512];
    const char *path = scratch("recording");
    prepare_client("record", "high");
    seg->settings.quiet_us = 600000000; /* only the program's own waits end a request */
    unlink(path);
    CHECK_EQUAL(rigel_record_create(path, capacity), 0);
    CHECK_EQUAL(rigel_record_create(path, capacity), -EEXIST);
    file = rg_record_open(path, why, sizeof why);
    CHECK(file != NULL);
    atomic_store(&file->header.level, level);
    atomic_store(&file->header.wanted, RG_REC_EVENTS);
    setenv("RIGEL_RECORD", path, 1);
}

static void gone(void)
{
    done();
    unlink(getenv("RIGEL_RECORD"));
}

static void become(void)
{
    attach_client();
    load_kernels(NULL);
}

static void launch(CUstream s, unsigned grid, uint64_t block_ns)
{
    uint64_t n = 1;
    void *params[] = {&n, &block_ns};
    CHECK_EQUAL(cuLaunchKernel(spin, grid, 1, 1, 32, 1, 1, 64, s, params, NULL), CUDA_SUCCESS);
}

static rg_record_kind *kind_with(unsigned grid)
{
    for (int i = 0; i < RG_REC_KINDS; i++)
        if (atomic_load(&file->kinds[i].state) && atomic_load(&file->kinds[i].grid_x) == grid)
            return &file->kinds[i];
    return NULL;
}

/* Entries of a type. */
static uint32_t entries(enum rg_record_type type)
{
    uint32_t n = 0;
    uint64_t begun = atomic_load(&file->header.begun);
    for (uint64_t i = 0; i < begun; i++)
        n += atomic_load(&file->entries[i % file->header.capacity][0]) == i + 1 &&
             (atomic_load(&file->entries[i % file->header.capacity][1]) & 0xff) == (uint64_t)type;
    return n;
}

/* A page that is not there when it is written to ends the program that writes, where the folder has no room left by then. */
static void a_recording_has_all_of_its_room(void)
{
    prepare(1 << 12, RG_REC_LOG);
    struct stat st;
    CHECK_EQUAL(stat(getenv("RIGEL_RECORD"), &st), 0);
    CHECK(st.st_blocks * 512 >= st.st_size);
    gone();
}

static void a_full_ring_loses_and_counts(void)
{
    prepare(8, RG_REC_LOG);
    for (uint64_t i = 0; i < 11; i++)
        CHECK_EQUAL(rg_record_put(file, (uint64_t[RG_REC_WORDS - 1]){i}), i < 8);
    CHECK_EQUAL(file->header.lost, 3);
    atomic_store(&file->header.taken, 8);
    CHECK(rg_record_put(file, (uint64_t[RG_REC_WORDS - 1]){77}));
    CHECK_EQUAL(file->entries[0][0], 9);
    CHECK_EQUAL(file->entries[0][1], 77);
    gone();
}

/* Four processes enter the same kinds at once: each kind is there once, whole. */
static void writers_at_once_enter_a_kind_once(void)
{
    enum { WRITERS = 4, KINDS = 300 };
    pid_t pids[WRITERS];
    prepare(0, RG_REC_COUNT);
    for (int w = 0; w < WRITERS; w++)
        if ((pids[w] = fork()) == 0) {
            char name[32];
            for (unsigned i = 0; i < KINDS; i++) {
                snprintf(name, sizeof name, "kernel %u", i);
                rg_record_facts facts = {.work = RG_REC_KERNEL, .name = name, .dims = rg_dims_of(i + 1, 1, 1, 32, 1, 1)};
                CHECK(rg_record_enter(file, &facts) >= 0);
            }
            _exit(0);
        }
    for (int w = 0; w < WRITERS; w++) {
        int status = -1;
        CHECK_EQUAL(waitpid(pids[w], &status, 0), pids[w]);
        CHECK_EQUAL(status, 0);
    }
    CHECK_EQUAL(file->header.kinds, KINDS);
    for (unsigned i = 0; i < KINDS; i++) {
        char name[32];
        snprintf(name, sizeof name, "kernel %u", i);
        rg_record_kind *k = kind_with(i + 1);
        CHECK(k != NULL);
        CHECK(strcmp(file->names + k->name_at, name) == 0);
    }
    gone();
}

static void launches_are_told_with_their_times(void)
{
    enum { LAUNCHES = 40 };
    prepare(1024, RG_REC_TIMED);
    become();
    CHECK_EQUAL(file->header.mechanism, RG_REC_EVENTS);
    for (int i = 0; i < LAUNCHES; i++)
        launch(NULL, 66, 30000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    WAIT_FOR(entries(RG_REC_TIME) == LAUNCHES);
    CHECK_EQUAL(entries(RG_REC_LAUNCH), LAUNCHES);
    CHECK_EQUAL(entries(RG_REC_WAIT), 1);
    CHECK_EQUAL(entries(RG_REC_REQUEST), 1);
    rg_record_kind *k = kind_with(66);
    CHECK_EQUAL(k->count, LAUNCHES);
    CHECK_EQUAL(k->shared_bytes, 64);
    CHECK(k->sms > 0 && k->sms <= 66);
    for (uint32_t i = 0; i < file->header.begun; i++)
        if ((file->entries[i][1] & 0xff) == RG_REC_TIME)
            CHECK(file->entries[i][3] >= 30000);
    /* A lower level is in force once all times are there. */
    launch(NULL, 66, 30000);
    atomic_store(&file->header.level, RG_REC_QUIET);
    WAIT_FOR(file->header.in_force == RG_REC_QUIET);
    CHECK_EQUAL(entries(RG_REC_TIME), LAUNCHES + 1);
    launch(NULL, 66, 1000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    CHECK_EQUAL(entries(RG_REC_LAUNCH), LAUNCHES + 1);
    rigel_shutdown();
    gone();
}

static void what_stands_for_another_is_told_as_that(void)
{
    static const uint32_t shape[9] = {7, 8, 9, 64, 2, 1, 40, 512, 5};
    prepare(64, RG_REC_LOG);
    become();
    rigel_stand_for("void attention<64>(float*)", shape);
    launch(NULL, 66, 1000);
    launch(NULL, 66, 1000);
    rg_record_kind *k = kind_with(7), *own = kind_with(66);
    CHECK_EQUAL(k->count, 1);
    CHECK(strcmp(file->names + k->name_at, "void attention<64>(float*)") == 0);
    CHECK_EQUAL(k->registers, 40);
    CHECK_EQUAL(k->sms, 5);
    CHECK_EQUAL(own->count, 1);
    rigel_shutdown();
    gone();
}

static void *launcher(void *stream)
{
    CHECK_EQUAL(cuCtxSetCurrent(context), CUDA_SUCCESS);
    for (int i = 0; i < 300; i++) {
        launch(stream, (unsigned)(i % 10) + 1, 500);
        if (i % 50 == 49)
            CHECK_EQUAL(cuStreamSynchronize(stream), CUDA_SUCCESS);
    }
    return NULL;
}

/* Threads launch while the level goes up and down: nothing is lost, and each launch is counted. */
static void threads_launch_at_once(void)
{
    enum { THREADS = 4 };
    pthread_t threads[THREADS];
    CUstream streams[THREADS];
    prepare(1 << 14, RG_REC_TIMED);
    become();
    for (int i = 0; i < THREADS; i++)
        CHECK_EQUAL(cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    for (int i = 0; i < THREADS; i++)
        CHECK_EQUAL(pthread_create(&threads[i], NULL, launcher, streams[i]), 0);
    for (int i = 0; i < 20; i++) {
        atomic_store(&file->header.level, i % 2 ? RG_REC_TIMED : RG_REC_LOG);
        usleep(2000);
    }
    for (int i = 0; i < THREADS; i++)
        CHECK_EQUAL(pthread_join(threads[i], NULL), 0);
    atomic_store(&file->header.level, RG_REC_LOG);
    WAIT_FOR(file->header.in_force == RG_REC_LOG);
    uint64_t counted = 0;
    for (unsigned grid = 1; grid <= 10; grid++)
        counted += kind_with(grid)->count;
    CHECK_EQUAL(counted, THREADS * 300);
    CHECK_EQUAL(entries(RG_REC_LAUNCH), THREADS * 300);
    CHECK_EQUAL(entries(RG_REC_TIME), file->header.timed);
    CHECK_EQUAL(file->header.lost, 0);
    rigel_shutdown();
    gone();
}

/* The kernel of this name and grid. */
static rg_record_kind *kind_named(const char *name, unsigned grid)
{
    for (int i = 0; i < RG_REC_KINDS; i++)
        if (atomic_load(&file->kinds[i].state) && atomic_load(&file->kinds[i].grid_x) == grid &&
            strcmp(file->names + file->kinds[i].name_at, name) == 0)
            return &file->kinds[i];
    return NULL;
}

/* A kernel that comes at the handle of one whose module was unloaded is told by its own name. */
static void a_handle_given_out_again_is_told_as_another_kernel(void)
{
    prepare(1024, RG_REC_LOG);
    become();
    rg_agent_stop();
    launch(NULL, 66, 1000);
    unload_and_give_out_again(spin, "second");
    launch(NULL, 66, 1000);
    launch(NULL, 66, 1000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    CHECK_EQUAL(kind_named("rigel_spin", 66)->count, 1);
    CHECK(kind_named("second", 66) != NULL);
    CHECK_EQUAL(kind_named("second", 66)->count, 2);
    rigel_shutdown();
    gone();
}

static CUgraphExec given_out;

static CUresult instantiate_again(CUgraphExec *exec, CUgraph graph, unsigned long long flags)
{
    (void)graph;
    (void)flags;
    *exec = given_out;
    return CUDA_SUCCESS;
}

static CUgraphExec graph_of(CUstream s, unsigned kernels)
{
    CUgraph graph;
    CUgraphExec exec;
    CHECK_EQUAL(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
    for (unsigned i = 0; i < kernels; i++)
        launch(s, i + 1, 1000);
    CHECK_EQUAL(cuStreamEndCapture(s, &graph), CUDA_SUCCESS);
    CHECK_EQUAL(cuGraphInstantiateWithFlags(&exec, graph, 0), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuGraphDestroy(graph), CUDA_SUCCESS);
    return exec;
}

/* So is a graph at the handle of one that was destroyed: here the driver's is the first one still, and only its name is that of the second. */
static void a_graph_at_a_handle_given_out_again_is_told_as_another(void)
{
    CUstream s;
    prepare(1024, RG_REC_LOG);
    become();
    rg_agent_stop();
    CHECK_EQUAL(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    given_out = graph_of(s, 2);
    CHECK_EQUAL(cuGraphLaunch(given_out, s), CUDA_SUCCESS);
    rg_real.hooked[RG_HOOK_cuGraphInstantiateWithFlags] = (void *)instantiate_again;
    CHECK(graph_of(s, 3) == given_out);
    CHECK_EQUAL(cuGraphLaunch(given_out, s), CUDA_SUCCESS);
    CHECK_EQUAL(cuGraphLaunch(given_out, s), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamSynchronize(s), CUDA_SUCCESS);
    CHECK_EQUAL(kind_named("graph of 2 kernels from rigel_spin", 0)->count, 1);
    CHECK(kind_named("graph of 3 kernels from rigel_spin", 0) != NULL);
    CHECK_EQUAL(kind_named("graph of 3 kernels from rigel_spin", 0)->count, 2);
    rigel_shutdown();
    gone();
}

static _Atomic int all_gone;

static void *launch_in_contexts_that_go(void *unused)
{
    uint64_t n = 1, ns = 1000;
    void *params[] = {&n, &ns};
    for (int i = 0; i < 30; i++) {
        CUcontext own;
        CUmodule module;
        CUfunction f;
        CHECK_EQUAL(cuCtxCreate_v2(&own, 0, 0), CUDA_SUCCESS);
        CHECK_EQUAL(cu.cuModuleLoadData(&module, PTX_HEADER PTX_KERNEL("rigel_spin")), CUDA_SUCCESS);
        CHECK_EQUAL(cu.cuModuleGetFunction(&f, module, "rigel_spin"), CUDA_SUCCESS);
        for (int k = 0; k < 10; k++)
            CHECK_EQUAL(cuLaunchKernel(f, 5, 1, 1, 32, 1, 1, 0, NULL, params, NULL), CUDA_SUCCESS);
        CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
        CHECK_EQUAL(cuCtxDestroy_v2(own), CUDA_SUCCESS);
    }
    atomic_store(&all_gone, 1);
    return unused;
}

/* Of the launches in contexts that go some have no times; every launch in one that stays has, and the ring goes on. */
static void contexts_go_while_another_thread_is_timed(void)
{
    pthread_t thread;
    uint64_t made = 0;
    prepare(1 << 16, RG_REC_TIMED);
    become();
    WAIT_FOR(file->header.in_force == RG_REC_TIMED);
    CHECK_EQUAL(pthread_create(&thread, NULL, launch_in_contexts_that_go, NULL), 0);
    while (!atomic_load(&all_gone)) {
        if (made == 10000) { /* the recording has no room for many more */
            usleep(1000);
            continue;
        }
        launch(NULL, 66, 1000);
        CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
        if (++made % 1000 == 0)
            WAIT_FOR(entries(RG_REC_TIME) >= made); /* no more are timed at once than there are events for */
    }
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    for (int i = 0; i < 40; i++, made++)
        launch(NULL, 66, 1000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    atomic_store(&file->header.level, RG_REC_LOG);
    WAIT_FOR(file->header.in_force == RG_REC_LOG);
    CHECK_EQUAL(kind_with(66)->count, made);
    CHECK(entries(RG_REC_TIME) >= made);
    CHECK_EQUAL(file->header.lost, 0);
    rigel_shutdown();
    gone();
}

/* ---- contexts that go, with their events ---- */

/* The driver's, which Rigel has got before it has any thread; here nothing is done while it is held up. */
static rg_driver plain;
static _Atomic bool held_up;
enum { EVENTS = 64 };
static CUevent stale[EVENTS]; /* of a context that is gone */
static _Atomic uint32_t made, gone_with_it, stale_uses;
static CUevent events_made[EVENTS];

static void use(CUevent event)
{
    bool its = !event;
    for (uint32_t i = 0; i < atomic_load(&gone_with_it); i++)
        its |= event == stale[i];
    atomic_fetch_add(&stale_uses, its);
}

static CUresult create(CUevent *event, unsigned flags)
{
    CUresult r = ((__typeof__(&cuEventCreate))plain.hooked[RG_HOOK_cuEventCreate])(event, flags);
    uint32_t n = atomic_fetch_add(&made, 1);
    if (n < EVENTS)
        events_made[n] = *event;
    return r;
}

static CUresult query(CUevent event)
{
    use(event);
    return atomic_load(&held_up) ? CUDA_ERROR_NOT_READY : ((__typeof__(&cuEventQuery))plain.hooked[RG_HOOK_cuEventQuery])(event);
}

static CUresult record(CUevent event, CUstream s)
{
    use(event);
    return ((__typeof__(&cuEventRecord))plain.hooked[RG_HOOK_cuEventRecord])(event, s);
}

static CUresult destroy(CUevent event)
{
    use(event);
    return ((__typeof__(&cuEventDestroy_v2))plain.hooked[RG_HOOK_cuEventDestroy_v2])(event);
}

static void become_watched(void)
{
    prepare(1 << 14, RG_REC_TIMED);
    CHECK(rg_real_ready());
    plain = rg_real;
    rg_real.hooked[RG_HOOK_cuEventCreate] = (void *)create;
    rg_real.hooked[RG_HOOK_cuEventQuery] = (void *)query;
    rg_real.hooked[RG_HOOK_cuEventRecord] = (void *)record;
    rg_real.hooked[RG_HOOK_cuEventDestroy_v2] = (void *)destroy;
    become();
    rg_agent_stop(); /* it has events of its own */
}

/* So many launches, each of which is told with its time. */
static void launch_timed(unsigned n)
{
    for (uint32_t before = entries(RG_REC_TIME), left = n; left; left--) {
        launch(NULL, 66, 1000);
        if (left % 512 == 1)
            WAIT_FOR(entries(RG_REC_TIME) == before + n + 1 - left);
    }
    CHECK_EQUAL(file->header.untimed, 0);
}

/* Events go with their context: they are not asked for after it, nor recorded or destroyed as their places are used again, of which none is lost. */
static void events_go_with_their_context(void)
{
    enum { PLACES = 4096, BEFORE = 5, UNFINISHED = 2 }; /* of a few launches the times are there, of some not yet */
    CUcontext its;
    become_watched();
    CHECK_EQUAL(cuCtxCreate_v2(&its, 0, 0), CUDA_SUCCESS);
    CUfunction kept = spin;
    load_kernels(NULL);
    launch_timed(BEFORE);
    atomic_store(&held_up, true);
    for (int i = 0; i < UNFINISHED; i++)
        launch(NULL, 66, 1000);
    CHECK_EQUAL(cuCtxDestroy_v2(its), CUDA_SUCCESS);
    CHECK(made >= 2 * (BEFORE + UNFINISHED) && made < EVENTS);
    memcpy(stale, events_made, sizeof stale);
    atomic_store(&gone_with_it, atomic_load(&made));
    atomic_store(&held_up, false);
    CHECK_EQUAL(cuCtxSetCurrent(context), CUDA_SUCCESS);
    spin = kept;
    launch_timed(PLACES + 100);
    CHECK_EQUAL(stale_uses, 0);
    /* Nor is the event of a context that is still there for a launch in another one. */
    CHECK_EQUAL(cuCtxCreate_v2(&its, 0, 0), CUDA_SUCCESS);
    load_kernels(NULL);
    launch_timed(BEFORE);
    CHECK_EQUAL(entries(RG_REC_TIME), BEFORE + PLACES + 100 + BEFORE);
    rigel_shutdown();
    gone();
}

/* As they do with all contexts of a device; those of another one stay. */
static void events_go_with_their_device(void)
{
    become_watched();
    atomic_store(&held_up, true);
    launch(NULL, 66, 1000);
    rg_record_forget_context(NULL, 7);
    atomic_store(&held_up, false);
    WAIT_FOR(entries(RG_REC_TIME) == 1);
    atomic_store(&held_up, true);
    launch(NULL, 66, 1000);
    rg_record_forget_context(NULL, 0);
    memcpy(stale, events_made, sizeof stale);
    atomic_store(&gone_with_it, atomic_load(&made));
    atomic_store(&held_up, false);
    launch(NULL, 66, 1000);
    WAIT_FOR(entries(RG_REC_TIME) == 2);
    CHECK_EQUAL(stale_uses, 0);
    rigel_shutdown();
    gone();
}

/* A file that cannot be used costs one line and nothing else. */
static void an_unusable_recording_stops_nothing(void)
{
    prepare(64, RG_REC_TIMED);
    CHECK_EQUAL(truncate(getenv("RIGEL_RECORD"), 100), 0);
    become();
    launch(NULL, 66, 1000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    CHECK(rg_recorded == NULL);
    CHECK_EQUAL(rg_launches(rg.slot), 1);
    rigel_shutdown();
    gone();
}

int main(int argc, char **argv)
{
    (void)argc;
    ensure_environment("LD_LIBRARY_PATH", in_build_folder("sim"), argv);
    int failures = 0;
    RUN(a_recording_has_all_of_its_room);
    RUN(a_full_ring_loses_and_counts);
    RUN(writers_at_once_enter_a_kind_once);
    RUN(launches_are_told_with_their_times);
    RUN(what_stands_for_another_is_told_as_that);
    RUN(threads_launch_at_once);
    RUN(a_handle_given_out_again_is_told_as_another_kernel);
    RUN(a_graph_at_a_handle_given_out_again_is_told_as_another);
    RUN(contexts_go_while_another_thread_is_timed);
    RUN(events_go_with_their_context);
    RUN(events_go_with_their_device);
    RUN(an_unusable_recording_stops_nothing);
    return failures ? 1 : 0;
}
