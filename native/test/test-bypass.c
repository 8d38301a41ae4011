/*
 * test-bypass.c: work that goes past Rigel for a while (rigel_bypass_begin): what is seen of it, what goes on being followed, what ends
 * it, and what is left of it. As test-gate.c.
 */
#include "account.h"
#include "gate-testing.h"
#include "record-client.h"


#define OK(call) CHECK_EQUAL(call, CUDA_SUCCESS)

static CUstream stream(void)
{
    CUstream s;
    OK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
    return s;
}

static bool past(void)
{
    return atomic_load(&rg.mode) == RG_MODE_BARE;
}

/* One launch that is waited for goes through Rigel: it is counted, and a request of its own. */
static void goes_through(void)
{
    uint64_t launches = rg_launches(rg.slot), requests = rg.slot->requests;
    launch(spin, NULL, 1000);
    CHECK_EQUAL(rg_launches(rg.slot), launches + 1);
    CHECK_EQUAL(busy_word(), 1ull << rg.slot_index);
    OK(cuCtxSynchronize());
    CHECK_EQUAL(busy_word(), 0);
    CHECK_EQUAL(rg.slot->requests, requests + 1);
}

/* Calls of this thread that are counted, for whichever client. */
static uint64_t calls_of(uint32_t operation)
{
    return rg_this.calls ? atomic_load(&rg_this.calls->count[operation]) : 0;
}

/* Calls of a client, as far as they have been added up. */
static uint64_t calls_for(const rg_member *m, uint32_t operation)
{
    rg_calls_add();
    return atomic_load(&seg->calls[m->slot_index].count[operation]);
}

/* ---- what is seen ---- */

static void nothing_is_counted(void)
{
    become_high_without_agent();
    CUstream s = stream();
    CUevent e;
    CUdeviceptr p;
    CUgraph graph;
    CUgraphExec exec;
    char host[64];
    OK(cuEventCreate(&e, CU_EVENT_DEFAULT));
    OK(cuMemAlloc_v2(&p, sizeof host));
    OK(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
    launch(spin, s, 1000);
    OK(cuStreamEndCapture(s, &graph));
    OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
    goes_through();
    uint64_t launches = rg_launches(rg.slot), requests = rg.slot->requests, passed = rg.slot->passed, records = rg.slot->records;
    uint64_t waits = calls_of(RG_OP_cuStreamSynchronize), queries = calls_of(RG_OP_cuEventQuery);

    CHECK_EQUAL(rigel_bypass_begin(), 0);
    for (int i = 0; i < 3; i++) {
        launch(spin, s, 1000);
        launch(spin, NULL, 1000);
        OK(cuGraphLaunch(exec, s));
        OK(cuMemcpyHtoDAsync_v2(p, host, sizeof host, s));
        OK(cuMemsetD8Async(p, 0, sizeof host, s));
        OK(cuMemcpyDtoH_v2(host, p, sizeof host));
        OK(cuEventRecord(e, s));
        CHECK_EQUAL(busy_word(), 0);
        OK(cuEventSynchronize(e));
        OK(cuEventQuery(e));
        OK(cuStreamQuery(s));
        OK(cuStreamSynchronize(s));
        OK(cuCtxSynchronize());
        rigel_report_request(1000);
    }
    CHECK_EQUAL(rg_launches(rg.slot), launches);
    CHECK_EQUAL(rg.slot->graph_launches, 0);
    CHECK_EQUAL(rg.slot->copies, 0);
    CHECK_EQUAL(rg.slot->memsets, 0);
    CHECK_EQUAL(rg.slot->passed, passed);
    CHECK_EQUAL(rg.slot->records, records);
    CHECK_EQUAL(rg.slot->reports, 0);
    CHECK_EQUAL(calls_of(RG_OP_cuStreamSynchronize), waits);
    CHECK_EQUAL(calls_of(RG_OP_cuEventQuery), queries);
    rigel_bypass_end();

    CHECK_EQUAL(rg.slot->requests, requests);
    goes_through();
    OK(cuGraphLaunch(exec, s));
    CHECK_EQUAL(rg.slot->graph_launches, 1);
    CHECK_EQUAL(busy_word(), 1);
    OK(cuStreamSynchronize(s));
    CHECK_EQUAL(busy_word(), 0);
    done();
}

static void as_many_ends_as_beginnings(void)
{
    become_high_without_agent();
    rigel_bypass_end(); /* of none */
    goes_through();
    CHECK_EQUAL(rigel_bypass_begin(), 0);
    CHECK_EQUAL(rigel_bypass_begin(), 0);
    rigel_bypass_end();
    CHECK(past());
    rigel_bypass_end();
    CHECK(!past());
    rigel_bypass_end();
    goes_through();
    CHECK_EQUAL(rigel_bypass_begin(), 0);
    CHECK(past());
    done();
}

/* The agent goes on: nobody takes the client for dead. */
static void the_client_lives_on(void)
{
    become("high");
    goes_through();
    CHECK_EQUAL(rigel_bypass_begin(), 0);
    beats(3);
    CHECK(past());
    CHECK_EQUAL(atomic_load(&rg.slot->state), RG_LIVE);
    rigel_bypass_end();
    launch(spin, NULL, 1000);
    CHECK_EQUAL(busy_word(), 1);
    agent_ends_periods(true);
    WAIT_FOR(busy_word() == 0);
    done();
}

static void time_slices_stay(void)
{
    become("high");
    seg->settings.preempt = 1;
    goes_through();
    WAIT_FOR(atomic_load(&rg.slot->slice_us) == seg->settings.high_slice_us);
    CHECK_EQUAL(rigel_bypass_begin(), 0);
    beats(3);
    CHECK_EQUAL(rg.slot->slice_us, seg->settings.high_slice_us);
    rigel_bypass_end();
    done();
}

/* ---- a request under way ---- */

static void a_request_under_way_ends_uncounted(void)
{
    become_high_without_agent();
    CUstream s = stream(), t = stream();
    goes_through();
    uint64_t requests = rg.slot->requests;
    launch(spin, s, 200000000);
    CHECK_EQUAL(busy_word(), 1);
    uint32_t wake = atomic_load(&seg->devices[0].wake);
    CHECK_EQUAL(rigel_bypass_begin(), 0);
    CHECK_EQUAL(busy_word(), 0);
    CHECK_EQUAL(atomic_load(&seg->devices[0].high_launching), 0);
    CHECK(atomic_load(&seg->devices[0].wake) != wake); /* who waits for it looks again */
    OK(cuStreamSynchronize(s));
    rigel_bypass_end();
    CHECK_EQUAL(busy_word(), 0);
    CHECK_EQUAL(rg.slot->requests, requests);
    /* What was waited for unseen holds nothing up, on whichever stream it was. */
    launch(spin, t, 1000);
    CHECK_EQUAL(busy_word(), 1);
    OK(cuStreamSynchronize(t));
    CHECK_EQUAL(busy_word(), 0);
    CHECK_EQUAL(rg.slot->requests, requests + 1);
    done();
}

static void what_is_unfinished_at_the_end_holds_nobody_back(void)
{
    become("high");
    goes_through();
    uint64_t requests = rg.slot->requests;
    CHECK_EQUAL(rigel_bypass_begin(), 0);
    CHECK_EQUAL(rg_real.rigelSimSuspend(0, 1), 0); /* nothing is done before it is resumed */
    launch(spin, NULL, 1000);
    rigel_bypass_end();
    CHECK_EQUAL(busy_word(), 0);
    agent_ends_periods(true);
    beats(1);
    CHECK_EQUAL(busy_word(), 0);
    agent_ends_periods(false);
    CHECK_EQUAL(busy_word(), 0);
    CHECK_EQUAL(rg_real.rigelSimSuspend(0, 0), 0);
    OK(cuCtxSynchronize());
    CHECK_EQUAL(rg.slot->requests, requests);
    goes_through();
    done();
}

/* An event that was recorded again past Rigel tells nothing of the stream where Rigel saw it recorded. */
static void an_event_recorded_again_is_not_taken_for_the_one_before(void)
{
    become_high_without_agent();
    CUstream s = stream(), t = stream();
    CUevent e;
    OK(cuEventCreate(&e, CU_EVENT_DISABLE_TIMING));
    launch(spin, s, 1000);
    OK(cuEventRecord(e, s));
    CHECK_EQUAL(rigel_bypass_begin(), 0);
    OK(cuEventRecord(e, t));
    OK(cuStreamSynchronize(s));
    rigel_bypass_end();
    launch(spin, s, 3600ull * 1000000000);
    OK(cuEventSynchronize(e));
    OK(cuEventQuery(e));
    CHECK_EQUAL(busy_word(), 1);
    done();
}

/* ---- threads that are inside a call ---- */

static __typeof__(&cuLaunchKernel) real_launch;
static _Atomic int inside, go_on;
static CUresult launch_and_stay(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                                unsigned shared, CUstream s, void **params, void **extra)
{
    CUresult r = real_launch(f, gx, gy, gz, bx, by, bz, shared, s, params, extra);
    atomic_store(&inside, 1);
    WAIT_FOR(atomic_load(&go_on));
    return r;
}

static void *launch_one(void *unused)
{
    (void)unused;
    OK(cuCtxSetCurrent(context));
    launch(spin, NULL, 1000);
    return NULL;
}

static pthread_t stay_in_a_launch(void)
{
    pthread_t thread;
    real_launch = (__typeof__(&cuLaunchKernel))rg_real.hooked[RG_HOOK_cuLaunchKernel];
    atomic_store(&inside, 0);
    atomic_store(&go_on, 0);
    rg_real.hooked[RG_HOOK_cuLaunchKernel] = (void *)launch_and_stay;
    CHECK_EQUAL(pthread_create(&thread, NULL, launch_one, NULL), 0);
    WAIT_FOR(atomic_load(&inside));
    return thread;
}

static void leave_the_launch(pthread_t thread)
{
    atomic_store(&go_on, 1);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    rg_real.hooked[RG_HOOK_cuLaunchKernel] = (void *)real_launch;
}

/* Begun through Rigel, it returns past it: the device does not stay marked busy. */
static void a_launch_that_returns_past_rigel_marks_nothing(void)
{
    become_high_without_agent();
    goes_through();
    pthread_t thread = stay_in_a_launch();
    CHECK_EQUAL(busy_word(), 1);
    CHECK_EQUAL(rigel_bypass_begin(), 0);
    CHECK_EQUAL(busy_word(), 0);
    leave_the_launch(thread);
    CHECK_EQUAL(busy_word(), 0);
    OK(cuCtxSynchronize());
    rigel_bypass_end();
    CHECK_EQUAL(busy_word(), 0);
    goes_through();
    done();
}

/* Begun past Rigel, it returns when all goes through it again; and one that was begun through it, two switches later. */
static void a_launch_that_is_overtaken_by_the_end(void)
{
    become_high_without_agent();
    CHECK_EQUAL(rigel_bypass_begin(), 0);
    pthread_t thread = stay_in_a_launch();
    rigel_bypass_end();
    leave_the_launch(thread);
    CHECK_EQUAL(busy_word(), 0);
    goes_through();
    thread = stay_in_a_launch();
    CHECK_EQUAL(rigel_bypass_begin(), 0);
    rigel_bypass_end();
    leave_the_launch(thread);
    CHECK_EQUAL(busy_word(), 1); /* it is marked once more when the driver has returned */
    OK(cuCtxSynchronize());
    CHECK_EQUAL(busy_word(), 0);
    done();
}

static _Atomic bool enough;
static void *launch_on(void *of)
{
    CUstream s = of;
    OK(cuCtxSetCurrent(context));
    for (int i = 0; !atomic_load(&enough); i++) {
        CUdeviceptr p;
        launch(spin, s, 1000);
        if (i % 4 == 3)
            OK(cuStreamSynchronize(s));
        if (i % 8 == 5) {
            OK(cuMemAlloc_v2(&p, 4096));
            OK(cuMemFree_v2(p));
        }
    }
    OK(cuStreamSynchronize(s));
    return NULL;
}

/* Four threads launch and allocate while it is switched three hundred times; in the end nothing is left of it. */
static void *stays_a_client(void *unused)
{
    (void)unused;
    uintptr_t times = 0;
    while (!atomic_load(&enough))
        times += !rg_is_client();
    return (void *)times;
}

static void switched_under_load(void)
{
    become("high");
    agent_ends_periods(true);
    pthread_t threads[4], observer;
    void *times;
    CHECK_EQUAL(pthread_create(&observer, NULL, stays_a_client, NULL), 0);
    for (int i = 0; i < 4; i++)
        CHECK_EQUAL(pthread_create(&threads[i], NULL, launch_on, i ? stream() : NULL), 0);
    for (int i = 0; i < 300; i++) {
        CHECK_EQUAL(rigel_bypass_begin(), 0);
        usleep(300);
        rigel_bypass_end();
        usleep(300);
    }
    atomic_store(&enough, true);
    for (int i = 0; i < 4; i++)
        CHECK_EQUAL(pthread_join(threads[i], NULL), 0);
    CHECK_EQUAL(pthread_join(observer, &times), 0);
    CHECK_EQUAL((uintptr_t)times, 0); /* its agent would have ended, and what it freed would have stayed in its account */
    WAIT_FOR(busy_word() == 0 && atomic_load(&seg->devices[0].high_launching) == 0);
    CHECK_EQUAL(rg_account_used(seg, rg.account), 0);
    CHECK_EQUAL(rg_memory_tracked(), 0);
    agent_ends_periods(false);
    goes_through();
    done();
}

/* ---- what goes on being followed ---- */

static uint64_t used(void)
{
    return rg_account_used(seg, rg.account);
}

static void memory_is_accounted_as_ever(void)
{
    enum { MiB = 1 << 20 };
    setenv("RIGEL_MEMORY", "10485760", 1);
    become_high_without_agent();
    CUdeviceptr before, meanwhile, p;
    CUcontext own;
    CUstream s = stream();
    OK(cuMemAlloc_v2(&before, MiB));
    CHECK_EQUAL(rigel_bypass_begin(), 0);
    OK(cuMemAlloc_v2(&meanwhile, 2 * MiB));
    CHECK_EQUAL(used(), 3 * MiB);
    OK(cuMemFree_v2(before));
    CHECK_EQUAL(used(), 2 * MiB);
    OK(cuMemAllocAsync(&p, MiB, s));
    CHECK_EQUAL(used(), 3 * MiB);
    OK(cuMemFreeAsync(p, s));
    CHECK_EQUAL(used(), 2 * MiB);
    CHECK_EQUAL(cuMemAlloc_v2(&p, 20 * MiB), CUDA_ERROR_OUT_OF_MEMORY);
    CHECK_EQUAL(rg.account->denied, 1);
    /* What goes with its context. */
    OK(cuCtxCreate_v2(&own, 0, 0));
    OK(cuMemAlloc_v2(&p, MiB));
    CHECK_EQUAL(used(), 3 * MiB);
    OK(cuCtxDestroy_v2(own));
    CHECK_EQUAL(used(), 2 * MiB);
    rigel_bypass_end();
    CHECK_EQUAL(used(), 2 * MiB);
    OK(cuMemFree_v2(meanwhile));
    CHECK_EQUAL(used(), 0);
    CHECK_EQUAL(rg_memory_tracked(), 0);
    done();
}

/* A stream that is destroyed meanwhile is not looked after any more: the next with its handle is another one. */
static void streams_come_and_go(void)
{
    become("high");
    int priority = 0;
    CUstream s = stream(), made;
    launch(spin, s, 1000);
    OK(cuStreamSynchronize(s));
    CHECK_EQUAL(rigel_bypass_begin(), 0);
    CHECK(rg_track_find(rg_track_key(s)) != NULL);
    OK(cuStreamDestroy_v2(s));
    CHECK(rg_track_find((uintptr_t)s) == NULL);
    made = stream();
    rigel_bypass_end();
    OK(cu.cuStreamGetPriority(made, &priority));
    CHECK_EQUAL(priority, -4); /* a high client's */
    launch(spin, made, 1000);
    OK(cuStreamSynchronize(made));
    goes_through();
    done();
}

static uint32_t tracks_of_threads(void)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < RG_MAX_TRACKS; i++)
        n += atomic_load(&rg.tracks[i].key) && atomic_load(&rg.tracks[i].owner);
    return n;
}

static void *launch_and_end_past_rigel(void *unused)
{
    (void)unused;
    OK(cuCtxSetCurrent(context));
    launch(spin, CU_STREAM_PER_THREAD, 1000);
    OK(cuStreamSynchronize(CU_STREAM_PER_THREAD));
    CHECK_EQUAL(tracks_of_threads(), 1);
    CHECK_EQUAL(rigel_bypass_begin(), 0);
    return NULL;
}

/* A thread that ends meanwhile takes its per-thread stream with it. */
static void threads_end(void)
{
    become_high_without_agent();
    pthread_t thread;
    CHECK_EQUAL(pthread_create(&thread, NULL, launch_and_end_past_rigel, NULL), 0);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    CHECK(past());
    CHECK_EQUAL(tracks_of_threads(), 0);
    rigel_bypass_end();
    goes_through();
    done();
}

static int capturing(CUstream s)
{
    int status = -1;
    OK(rg_real.cuStreamIsCapturing(s, &status));
    return status;
}

/* A capture begun through Rigel and ended past it, and the other way round: nothing is added to it either way. */
static void captures_cross_the_switch(void)
{
    become("high");
    seg->settings.quiet_us = 100; /* the agent looks for what it could record events on */
    CUstream s = stream(), t = stream();
    CUgraph graph;
    CUgraphExec exec;
    for (int way = 0; way < 2; way++) {
        size_t nodes = 0;
        uint64_t launches = rg_launches(rg.slot);
        if (way)
            CHECK_EQUAL(rigel_bypass_begin(), 0);
        OK(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
        CHECK_EQUAL(atomic_load(&rg.captures), 1);
        launch(spin, s, 1000);
        if (way)
            rigel_bypass_end();
        else
            CHECK_EQUAL(rigel_bypass_begin(), 0);
        launch(spin, s, 1000);
        launch(spin, t, 1000);
        usleep(20000); /* time for the agent to do wrong in */
        CHECK_EQUAL(capturing(s), CU_STREAM_CAPTURE_STATUS_ACTIVE);
        OK(cuStreamEndCapture(s, &graph));
        CHECK_EQUAL(atomic_load(&rg.captures), 0);
        OK(cu.cuGraphGetNodes(graph, NULL, &nodes));
        CHECK_EQUAL(nodes, 2);
        OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
        if (!way)
            rigel_bypass_end();
        CHECK_EQUAL(rg_launches(rg.slot), launches);
        uint64_t graphs = rg.slot->graph_launches;
        OK(cuGraphLaunch(exec, s));
        CHECK_EQUAL(rg.slot->graph_launches, graphs + 1);
        OK(cuStreamSynchronize(s));
        OK(cuGraphExecDestroy(exec));
    }
    WAIT_FOR(busy_word() == 0);
    agent_ends_periods(false);
    goes_through();
    done();
}

/* ---- who may not ---- */

static void best_effort_clients_may_not(void)
{
    become("best-effort");
    CHECK_EQUAL(rigel_bypass_begin(), -EPERM);
    CHECK_EQUAL(atomic_load(&rg.mode), RG_MODE_BEST_EFFORT);
    rigel_bypass_end(); /* which it must not; nothing happens */
    CHECK_EQUAL(atomic_load(&rg.mode), RG_MODE_BEST_EFFORT);
    seg->settings.policy = RG_POLICY_NONE;
    CHECK_EQUAL(rigel_bypass_begin(), -EPERM);
    done();
}

static void policies_that_hold_high_clients_back_do_not_allow_it(void)
{
    static const uint32_t gating[] = {RG_POLICY_FAIR, RG_POLICY_ORION};
    for (int i = 0; i < 2; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            policy = gating[i];
            become("high");
            uint32_t mode = atomic_load(&rg.mode);
            CHECK_EQUAL(rigel_bypass_begin(), -EPERM);
            CHECK_EQUAL(atomic_load(&rg.mode), mode);
            /* As soon as it has become another: before the client has taken that over. */
            seg->settings.policy = RG_POLICY_PRIORITY;
            WAIT_FOR(atomic_load(&rg.mode) == RG_MODE_HIGH);
            seg->settings.policy = gating[i];
            CHECK_EQUAL(rigel_bypass_begin(), -EPERM);
            done();
            _exit(0);
        }
        int status;
        CHECK(waitpid(pid, &status, 0) == pid);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
}

static void what_is_recorded_is_recorded_whole(void)
{
    const char *path = scratch("recording");
    CHECK_EQUAL(rigel_record_create(path, 1 << 12), 0);
    setenv("RIGEL_RECORD", path, 1);
    become("high");
    CHECK(rg_recorded != NULL);
    CHECK_EQUAL(rigel_bypass_begin(), -EBUSY);
    CHECK(!past());
    unlink(path);
    done();
}

static void without_a_client_there_is_none(void)
{
    prepare_waiting_client("gate", "high");
    find_driver();
    CHECK_EQUAL(rigel_bypass_begin(), -ENODEV);
    rigel_bypass_end();
    attach_client();
    load_kernels(NULL);
    CHECK_EQUAL(rigel_bypass_begin(), 0);
    CHECK(past());
    done();
}

/* ---- what ends it ---- */

static void it_ends_when_the_client_becomes_best_effort(void)
{
    become("high");
    goes_through();
    CHECK_EQUAL(rigel_bypass_begin(), 0);
    atomic_store(&rg.account->wanted_class, RG_CLASS_BEST_EFFORT);
    WAIT_FOR(atomic_load(&rg.mode) == RG_MODE_BEST_EFFORT);
    WAIT_FOR(atomic_load(&rg.bypass) == RG_BYPASS_OFF);
    CHECK_EQUAL(rg.slot->class, RG_CLASS_BEST_EFFORT);
    /* The gate holds it. */
    pthread_t thread;
    uint64_t launches = rg_launches(rg.slot);
    other_busy(true);
    CHECK_EQUAL(pthread_create(&thread, NULL, launch_one, NULL), 0);
    WAIT_FOR(rg_launches(rg.slot) == launches + 1);
    WAIT_FOR(atomic_load(&seg->devices[0].waiters) == 1);
    other_busy(false);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    CHECK_EQUAL(rigel_bypass_begin(), -EPERM);
    /* High again, it does not come back by itself; the end that is due does nothing, and another may be begun. */
    atomic_store(&rg.account->wanted_class, RG_CLASS_HIGH);
    WAIT_FOR(atomic_load(&rg.mode) == RG_MODE_HIGH);
    rigel_bypass_end();
    CHECK(!past());
    CHECK_EQUAL(rigel_bypass_begin(), 0);
    CHECK(past());
    rigel_bypass_end();
    CHECK(!past());
    done();
}

static void it_ends_when_the_policy_becomes_another(void)
{
    become("high");
    goes_through();
    CHECK_EQUAL(rigel_bypass_begin(), 0);
    seg->settings.policy = RG_POLICY_SLO;
    beats(1);
    CHECK(past());
    seg->settings.policy = RG_POLICY_FAIR;
    WAIT_FOR(atomic_load(&rg.mode) == RG_MODE_FAIR);
    rigel_bypass_end();
    CHECK_EQUAL(atomic_load(&rg.mode), RG_MODE_FAIR);
    done();
}

/* ---- several clients ---- */

static void *enter_and_launch(void *class)
{
    OK(cuCtxSetCurrent(context));
    CHECK_EQUAL(rigel_client_enter(class, class), 0);
    launch(spin, NULL, 1000);
    OK(cuCtxSynchronize());
    rigel_client_leave();
    return NULL;
}

static rg_member *launch_as(const char *class)
{
    pthread_t thread;
    CHECK_EQUAL(pthread_create(&thread, NULL, enter_and_launch, (void *)class), 0);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    for (uint32_t i = 1; i < atomic_load(&rg.member_count); i++)
        if (strcmp(rg.members[i].name, class) == 0)
            return &rg.members[i];
    CHECK(!"the client is there");
    return NULL;
}

static void all_clients_of_the_process(void)
{
    become_high_without_agent();
    goes_through();
    rg_member *high = launch_as("high");
    CHECK_EQUAL(rg_launches(high->slot), 1);
    CHECK_EQUAL(high->slot->requests, 1);
    CHECK_EQUAL(rigel_bypass_begin(), 0);
    launch_as("high");
    CHECK_EQUAL(rg_launches(high->slot), 1);
    CHECK(past());
    rigel_bypass_end();
    launch_as("high");
    CHECK_EQUAL(rg_launches(high->slot), 2);
    CHECK_EQUAL(high->slot->requests, 2);
    CHECK_EQUAL(busy_word(), 0);
    done();
}

/* Who is which client then is known afterwards: calls count for the right one. */
static void a_client_that_is_entered_and_left_past_rigel(void)
{
    become_high_without_agent();
    OK(cuStreamQuery(NULL));
    WAIT_FOR(calls_for(RG_PROCESS, RG_OP_cuStreamQuery) == 1);
    CHECK_EQUAL(rigel_bypass_begin(), 0);
    CHECK_EQUAL(rigel_client_enter("high", "high"), 0);
    rigel_bypass_end();
    OK(cuStreamQuery(NULL));
    WAIT_FOR(calls_for(&rg.members[1], RG_OP_cuStreamQuery) == 1);
    CHECK_EQUAL(calls_for(RG_PROCESS, RG_OP_cuStreamQuery), 1);
    CHECK_EQUAL(rigel_bypass_begin(), 0);
    rigel_client_leave();
    rigel_bypass_end();
    OK(cuStreamQuery(NULL));
    WAIT_FOR(calls_for(RG_PROCESS, RG_OP_cuStreamQuery) == 2);
    done();
}

static void a_best_effort_client_that_is_entered_ends_it(void)
{
    become_high_without_agent();
    CHECK_EQUAL(rigel_bypass_begin(), 0);
    rg_member *low = launch_as("best-effort");
    CHECK_EQUAL(rg_launches(low->slot), 1);
    CHECK_EQUAL(atomic_load(&rg.mode), RG_MODE_HIGH | RG_MODE_BEST_EFFORT);
    rigel_bypass_end();
    CHECK_EQUAL(atomic_load(&rg.mode), RG_MODE_HIGH | RG_MODE_BEST_EFFORT);
    CHECK_EQUAL(rigel_bypass_begin(), -EPERM);
    launch_as("best-effort");
    CHECK_EQUAL(rg_launches(low->slot), 2);
    done();
}

/* Of a process that is none itself the threads that have entered one are. */
static void where_only_threads_are_clients(void)
{
    setenv("RIGEL_THREADS", "1", 1);
    become_high_without_agent();
    CHECK_EQUAL(rigel_bypass_begin(), 0);
    rg_member *high = launch_as("high");
    CHECK_EQUAL(rg_launches(high->slot), 0);
    rigel_bypass_end();
    CHECK_EQUAL(atomic_load(&rg.mode), RG_MODE_ATTACHED | RG_MODE_HIGH);
    launch_as("high");
    CHECK_EQUAL(rg_launches(high->slot), 1);
    done();
}

/* ---- the end of the process's part in Rigel ---- */

static void shutdown_in_the_midst_of_it(void)
{
    become("high");
    launch(spin, NULL, 1000);
    CHECK_EQUAL(rigel_bypass_begin(), 0);
    rigel_shutdown();
    CHECK_EQUAL(atomic_load(&rg.slot->state), RG_EXITED);
    CHECK(!rg_is_client());
    rigel_bypass_end();
    CHECK(past());
    CHECK_EQUAL(rigel_bypass_begin(), -ENODEV);
    launch(spin, NULL, 1000);
    OK(cuCtxSynchronize());
    CHECK_EQUAL(busy_word(), 0);
    done();
}

static void *switch_on_and_off(void *unused)
{
    (void)unused;
    while (!atomic_load(&enough))
        if (rigel_bypass_begin() == 0)
            rigel_bypass_end();
    return NULL;
}

/* However the two meet, nothing goes through Rigel afterwards. Each round is a process, as there is one shutdown in each. */
static void shutdown_while_it_is_switched(void)
{
    for (int i = 0; i < 10; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            become("high");
            pthread_t threads[2];
            for (int k = 0; k < 2; k++)
                CHECK_EQUAL(pthread_create(&threads[k], NULL, switch_on_and_off, NULL), 0);
            usleep((useconds_t)(200 * i));
            rigel_shutdown();
            CHECK_EQUAL(atomic_load(&rg.slot->state), RG_EXITED);
            usleep(1000);
            atomic_store(&enough, true);
            for (int k = 0; k < 2; k++)
                CHECK_EQUAL(pthread_join(threads[k], NULL), 0);
            CHECK(past());
            CHECK(!rg_is_client());
            done();
            _exit(0);
        }
        int status;
        CHECK(waitpid(pid, &status, 0) == pid);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
}

/* By exit: the slot is free for the next, as after any other end. */
static void the_program_ends_in_the_midst_of_it(void)
{
    prepare_waiting_client("gate", "high");
    pid_t pid = fork();
    if (pid == 0) {
        attach_client();
        load_kernels(NULL);
        launch(spin, NULL, 1000000000);
        CHECK_EQUAL(rigel_bypass_begin(), 0);
        launch(spin, NULL, 1000);
        exit(0);
    }
    int status;
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK_EQUAL(atomic_load(&seg->clients[0].state), RG_EXITED);
    CHECK_EQUAL(busy_word(), 0);
    done();
}

static void a_forked_child_is_no_client(void)
{
    become_high_without_agent();
    CUdeviceptr p;
    OK(cuMemAlloc_v2(&p, 4096));
    CHECK_EQUAL(rigel_bypass_begin(), 0);
    pid_t pid = fork();
    if (pid == 0) {
        CHECK(!rg_is_client());
        CHECK_EQUAL(rigel_bypass_begin(), -ENODEV);
        rigel_bypass_end();
        CHECK(past());
        (void)cuMemFree_v2(p); /* the driver's answer, whatever that is; the parent's account is not the child's */
        _exit(0);
    }
    int status;
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(past() && rg_is_client());
    CHECK_EQUAL(used(), 4096);
    rigel_bypass_end();
    goes_through();
    done();
}

int main(int argc, char **argv)
{
    (void)argc;
    ensure_environment("LD_LIBRARY_PATH", in_build_folder("sim"), argv);
    int failures = 0;
    RUN(nothing_is_counted);
    RUN(as_many_ends_as_beginnings);
    RUN(the_client_lives_on);
    RUN(time_slices_stay);
    RUN(a_request_under_way_ends_uncounted);
    RUN(what_is_unfinished_at_the_end_holds_nobody_back);
    RUN(an_event_recorded_again_is_not_taken_for_the_one_before);
    RUN(a_launch_that_returns_past_rigel_marks_nothing);
    RUN(a_launch_that_is_overtaken_by_the_end);
    RUN(switched_under_load);
    RUN(memory_is_accounted_as_ever);
    RUN(streams_come_and_go);
    RUN(threads_end);
    RUN(captures_cross_the_switch);
    RUN(best_effort_clients_may_not);
    RUN(policies_that_hold_high_clients_back_do_not_allow_it);
    RUN(what_is_recorded_is_recorded_whole);
    RUN(without_a_client_there_is_none);
    RUN(it_ends_when_the_client_becomes_best_effort);
    RUN(it_ends_when_the_policy_becomes_another);
    RUN(all_clients_of_the_process);
    RUN(a_client_that_is_entered_and_left_past_rigel);
    RUN(a_best_effort_client_that_is_entered_ends_it);
    RUN(where_only_threads_are_clients);
    RUN(shutdown_in_the_midst_of_it);
    RUN(shutdown_while_it_is_switched);
    RUN(the_program_ends_in_the_midst_of_it);
    RUN(a_forked_child_is_no_client);
    return failures ? 1 : 0;
}
