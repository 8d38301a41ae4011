/*
 * test-steer.c: what a client does when its class, weight, policy or pause is changed while it runs, on the simulated GPU.
 *
 * As in test-gate.c the client's parts are linked in, the hooks are called by name, each case is a process, and "another client" is
 * a slot that the test sets itself.
 */
#include "client-testing.h"

static rg_account *account;

static void prepare(const char *class)
{
    prepare_waiting_client("steer", class);
    seg->settings.quiet_us = NEVER_QUIET_US;
}

static void attach(void)
{
    attach_client();
    load_kernels(NULL);
    account = rg.account;
    CHECK(account != NULL);
}

static void launch(CUstream s, uint64_t block_ns)
{
    launch_blocks(spin, s, 1, block_ns);
}

static void become(const char *class)
{
    prepare(class);
    attach();
    launch(NULL, 1000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
}

static void become_preemptible(void)
{
    become("best-effort");
    seg->settings.preempt = 1;
    WAIT_FOR(atomic_load(&rg.preemptible[0]));
}

static uint32_t mode(void)
{
    return atomic_load(&rg.mode);
}

static bool own_busy(void)
{
    return atomic_load(&seg->devices[0].high_busy) >> rg.slot_index & 1;
}

static void other_launches(bool on)
{
    rg_device *dev = &seg->devices[0];
    if (on) {
        rg_device_busy(dev, OTHER, rg_now_ns());
        rg_device_launching(dev, OTHER, true);
    } else {
        rg_device_idle(dev, OTHER, rg_now_ns());
        rg_device_wake(dev);
    }
}

/* ---- a thread that launches and waits ---- */

static _Atomic int launched, finished;
static void *work(void *unused)
{
    (void)unused;
    CHECK_EQUAL(cu.cuCtxSetCurrent(context), CUDA_SUCCESS);
    launch(NULL, 1000);
    atomic_store(&launched, 1);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    atomic_store(&finished, 1);
    return NULL;
}

static pthread_t start(void)
{
    pthread_t thread;
    atomic_store(&launched, 0);
    atomic_store(&finished, 0);
    CHECK_EQUAL(pthread_create(&thread, NULL, work, NULL), 0);
    return thread;
}

static void join(pthread_t thread)
{
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    CHECK_EQUAL(atomic_load(&finished), 1);
}

/* ---- class ---- */

static void to_high_and_back(void)
{
    become("best-effort");
    agent_ends_periods(true);
    atomic_store(&account->wanted_class, RG_CLASS_HIGH);
    WAIT_FOR(mode() == RG_MODE_HIGH);
    CHECK_EQUAL(rg.slot->class, RG_CLASS_HIGH);
    /* What was launched before is found to be done by the agent. */
    WAIT_FOR(atomic_load(&rg.slot->agent_idle) == 1);
    CHECK(!own_busy());
    agent_ends_periods(false);
    uint64_t requests = rg.slot->requests;
    launch(NULL, 1000);
    CHECK(own_busy());
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    CHECK(!own_busy());
    CHECK_EQUAL(rg.slot->requests, requests + 1);
    /* A high client waits for nobody. */
    other_launches(true);
    launch(NULL, 1000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);

    atomic_store(&account->wanted_class, RG_CLASS_BEST_EFFORT);
    WAIT_FOR(mode() == RG_MODE_BEST_EFFORT);
    CHECK_EQUAL(rg.slot->class, RG_CLASS_BEST_EFFORT);
    pthread_t thread = start();
    WAIT_FOR(atomic_load(&seg->devices[0].waiters) == 1);
    CHECK_EQUAL(atomic_load(&launched), 0);
    CHECK(!own_busy());
    other_launches(false);
    join(thread);
    CHECK_EQUAL(rg.slot->gate_waits, 1);
    done();
}

/* A busy period of which all work is done already: whoever finished it came between the track's mark and the client's. */
static void a_busy_period_without_work_ends(void)
{
    become("high");
    launch(NULL, 1000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    CHECK(!own_busy());
    rg_busy_begin(RG_PROCESS, 0, 0);
    CHECK(own_busy());
    agent_ends_periods(true);
    WAIT_FOR(!own_busy());
    done();
}

/* In the middle of a busy period: no bit of it is left. */
static void a_busy_client_becomes_best_effort(void)
{
    become("high");
    launch(NULL, 500000000);
    CHECK(own_busy());
    atomic_store(&account->wanted_class, RG_CLASS_BEST_EFFORT);
    WAIT_FOR(mode() == RG_MODE_BEST_EFFORT);
    WAIT_FOR(!own_busy());
    CHECK_EQUAL(atomic_load(&seg->devices[0].high_launching), 0);
    launch(NULL, 1000);
    CHECK(!own_busy());
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    CHECK(!own_busy());
    done();
}

/* What other ranks wait for is never held, in a graph of the time when nothing of it was, either. */
static void a_graph_of_nccl_stays_one(void)
{
    prepare("high");
    attach();
    CUfunction nccl;
    CUstream s;
    CUgraph graph;
    CUgraphExec exec;
    CUmodule module = load_kernels(PTX_HEADER PTX_KERNEL("rigel_spin") PTX_KERNEL("ncclDevKernel_AllReduce"));
    CHECK_EQUAL(cu.cuModuleGetFunction(&nccl, module, "ncclDevKernel_AllReduce"), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    launch_blocks(nccl, s, 1, 1000);
    CHECK_EQUAL(cuStreamEndCapture(s, &graph), CUDA_SUCCESS);
    CHECK_EQUAL(cuGraphInstantiateWithFlags(&exec, graph, 0), CUDA_SUCCESS);
    atomic_store(&account->wanted_class, RG_CLASS_BEST_EFFORT);
    WAIT_FOR(mode() == RG_MODE_BEST_EFFORT);
    seg->settings.starvation_us = 1000;
    other_launches(true);
    uint64_t passed = rg.slot->passed;
    CHECK_EQUAL(cuGraphLaunch(exec, s), CUDA_SUCCESS);
    CHECK_EQUAL(rg.slot->gate_waits, 0);
    CHECK_EQUAL(rg.slot->passed, passed + 1);
    launch(s, 1000); /* anything else waits */
    CHECK_EQUAL(rg.slot->gate_waits, 1);
    CHECK_EQUAL(cuStreamSynchronize(s), CUDA_SUCCESS);
    done();
}

/* And the other way: work that is still on the GPU makes it a busy high client. */
static void unfinished_work_counts_for_a_client_that_becomes_high(void)
{
    become("best-effort");
    agent_ends_periods(true);
    CHECK_EQUAL(rg_real.rigelSimSuspend(0, 1), 0); /* nothing is done before it is resumed */
    launch(NULL, 1000);
    atomic_store(&account->wanted_class, RG_CLASS_HIGH);
    WAIT_FOR(mode() == RG_MODE_HIGH);
    WAIT_FOR(own_busy());
    usleep(20000); /* time for the agent to do wrong in */
    CHECK(own_busy());
    CHECK_EQUAL(rg_real.rigelSimSuspend(0, 0), 0);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    WAIT_FOR(!own_busy());
    done();
}

static void who_waits_at_the_gate_goes_when_it_becomes_high(void)
{
    become("best-effort");
    other_launches(true);
    pthread_t thread = start();
    WAIT_FOR(atomic_load(&seg->devices[0].waiters) == 1);
    atomic_store(&account->wanted_class, RG_CLASS_HIGH);
    join(thread);
    done();
}

/* Off the GPU for another high client, it is back on it before it is one. */
static void who_is_suspended_returns_when_it_becomes_high(void)
{
    become_preemptible();
    CHECK_EQUAL(rg.slot->slice_us, 2048);
    other_launches(true);
    WAIT_FOR(atomic_load(&rg.slot->suspensions) == 1);
    pthread_t thread = start();
    WAIT_FOR(atomic_load(&launched));
    atomic_store(&account->wanted_class, RG_CLASS_HIGH);
    join(thread);
    WAIT_FOR(mode() == RG_MODE_HIGH);
    WAIT_FOR(atomic_load(&rg.slot->slice_us) == seg->settings.high_slice_us);
    CHECK_EQUAL(rg.preemptible[0], 0);
    /* Its own work does not put it off. */
    for (int i = 0; i < 20; i++) {
        launch(NULL, 1000000);
        CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    }
    CHECK_EQUAL(rg.slot->suspensions, 1);

    /* Short slices are nothing for two high clients, though neither launches anything at the moment. */
    atomic_store(&seg->devices[0].own_until_ns, UINT64_MAX);
    seg->settings.high_slice_us = 60;
    WAIT_FOR(atomic_load(&rg.slot->slice_us) == 60);
    atomic_store(&seg->clients[OTHER].class, RG_CLASS_HIGH);
    atomic_store(&seg->clients[OTHER].devices, 1);
    atomic_store(&seg->clients[OTHER].state, RG_LIVE);
    WAIT_FOR(atomic_load(&rg.slot->slice_us) == RG_POLICY_LEAST_SLICE_US);
    atomic_store(&seg->devices[0].own_until_ns, 0);

    atomic_store(&account->wanted_class, RG_CLASS_BEST_EFFORT);
    WAIT_FOR(atomic_load(&rg.slot->suspensions) == 2);
    CHECK_EQUAL(rg.slot->slice_us, RG_POLICY_LEAST_SLICE_US);
    other_launches(false);
    launch(NULL, 1000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    done();
}

static int priority_of(CUstream s)
{
    int priority = 99;
    CHECK_EQUAL(cu.cuStreamGetPriority(s, &priority), CUDA_SUCCESS);
    return priority;
}

static int (*real_slice)(unsigned, uint64_t);
static _Atomic int counting, slices;
static _Atomic uint32_t preemptible_then;

/* While the agent sets the slice of a best-effort client that becomes a high one; and when it comes by again. */
static int become_high_meanwhile(unsigned ordinal, uint64_t us)
{
    int n = us && atomic_load(&counting) ? atomic_fetch_add(&slices, 1) : -1; /* 0 asks whether there is a context */
    if (n == 0)
        rg_member_become(RG_PROCESS, RG_CLASS_HIGH, false);
    else if (n == 1)
        atomic_store(&preemptible_then, atomic_load(&rg.preemptible[0]));
    return real_slice(ordinal, us);
}

static void who_has_just_become_high_is_not_preemptible(void)
{
    CHECK(rg_real_ready()); /* replaced before there are threads of Rigel's */
    real_slice = rg_real.rigelSimSetTimeslice;
    rg_real.rigelSimSetTimeslice = become_high_meanwhile;
    become_preemptible();
    atomic_store(&counting, 1);
    WAIT_FOR(atomic_load(&slices) >= 2);
    CHECK_EQUAL(mode(), RG_MODE_HIGH);
    CHECK_EQUAL(preemptible_then, 0);
    done();
}

static void streams_follow_the_class(void)
{
    become("best-effort");
    CUstream plain, raised, unused;
    CHECK_EQUAL(cuStreamCreate(&plain, 1), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamCreateWithPriority(&raised, 1, -5), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamCreate(&unused, 1), CUDA_SUCCESS);
    launch(plain, 1000);
    launch(raised, 1000);
    CHECK_EQUAL(priority_of(plain), 0);
    CHECK_EQUAL(priority_of(raised), -1);
    atomic_store(&account->wanted_class, RG_CLASS_HIGH);
    WAIT_FOR(priority_of(plain) == -4 && priority_of(raised) == -5 && priority_of(NULL) == -4);
    launch(unused, 1000); /* made as a best-effort stream, used for the first time now */
    CHECK_EQUAL(priority_of(unused), -4);
    atomic_store(&account->wanted_class, RG_CLASS_BEST_EFFORT);
    WAIT_FOR(priority_of(plain) == 0 && priority_of(raised) == -1 && priority_of(unused) == 0 && priority_of(NULL) == 0);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    done();
}

/* What was asked before this process began holds for it. */
static void a_later_process_is_of_the_class_asked(void)
{
    prepare("best-effort");
    rg_account *before = rg_account_enter(seg, "test");
    CHECK(before != NULL);
    atomic_store(&before->wanted_class, RG_CLASS_HIGH);
    attach();
    CHECK_EQUAL(mode(), RG_MODE_HIGH);
    CHECK_EQUAL(rg.slot->class, RG_CLASS_HIGH);
    launch(NULL, 1000);
    CHECK(own_busy());
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    done();
}

/* ---- pauses ---- */

static void paused_until_resumed(void)
{
    become("best-effort");
    atomic_store(&account->paused_until_ns, UINT64_MAX);
    WAIT_FOR(mode() & RG_MODE_PAUSED);
    uint64_t launches = rg_launches(rg.slot);
    pthread_t thread = start();
    WAIT_FOR(rg_launches(rg.slot) == launches + 1);
    usleep(50000);
    CHECK_EQUAL(atomic_load(&launched), 0);
    atomic_store(&account->paused_until_ns, 0);
    join(thread);
    CHECK(rg.slot->paused_ns > 0);
    CHECK_EQUAL(rg.slot->gate_waits, 0);
    done();
}

/* Paused, with a launch that waits. */
static pthread_t paused_launch(void)
{
    uint64_t launches = rg_launches(rg.slot);
    atomic_store(&account->paused_until_ns, UINT64_MAX);
    WAIT_FOR(mode() & RG_MODE_PAUSED);
    pthread_t thread = start();
    WAIT_FOR(rg_launches(rg.slot) == launches + 1);
    return thread;
}

static void paused_under_fair(void)
{
    become("best-effort");
    atomic_store(&seg->settings.policy, RG_POLICY_FAIR);
    WAIT_FOR((mode() & RG_MODE_FAIR) == RG_MODE_FAIR);
    pthread_t thread = paused_launch();
    usleep(50000);
    CHECK_EQUAL(atomic_load(&launched), 0);
    atomic_store(&account->paused_until_ns, 0);
    join(thread);
    /* There are no turns, nor does the agent find any. */
    atomic_store(&account->turn_until_ns, UINT64_MAX);
    beats(2);
    CHECK(!rg_member_is_paused(RG_PROCESS));
    CHECK(!(mode() & RG_MODE_PAUSED));
    done();
}

static void paused_is_off_the_gpu(void)
{
    become_preemptible();
    launch(NULL, 100000000);
    atomic_store(&account->paused_until_ns, UINT64_MAX);
    WAIT_FOR(mode() & RG_MODE_PAUSED);
    WAIT_FOR(atomic_load(&rg.slot->suspensions) == 1);
    seg->settings.starvation_us = 1000; /* a pause is no waiting for somebody who does not come to an end */
    usleep(100000);
    CHECK_EQUAL(rg.slot->starved, 0);
    CHECK_EQUAL(rg.slot->suspensions, 1);
    atomic_store(&account->paused_until_ns, 0);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    launch(NULL, 1000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    WAIT_FOR(atomic_load(&rg.slot->suspended_ns) > 0);
    done();
}

/* Some thread of this process waits for that. */
static bool in_wait(uint32_t operation)
{
    bool any = false;
    for (uint32_t i = 0; i < RG_MAX_THREADS; i++)
        any |= atomic_load(&seg->threads[rg.slot_index * RG_MAX_THREADS + i].doing) == (operation | RG_DOING);
    return any;
}

/* It is another client's turn, for as long as that was said, whether it is said again or not. */
static void another_clients_turn(void)
{
    become_preemptible();
    atomic_store(&seg->settings.policy, RG_POLICY_SLO);
    launch(NULL, 100000000);
    atomic_store(&account->turn_until_ns, UINT64_MAX);
    WAIT_FOR(mode() & RG_MODE_PAUSED);
    WAIT_FOR(atomic_load(&rg.slot->suspensions) == 1);
    uint64_t launches = rg_launches(rg.slot);
    pthread_t thread = start();
    WAIT_FOR(rg_launches(rg.slot) == launches + 1);
    WAIT_FOR(in_wait(RG_OP_wait_turn));
    CHECK_EQUAL(atomic_load(&launched), 0);
    atomic_store(&account->turn_until_ns, rg_now_ns() + 50000000);
    join(thread);
    /* A pause goes on when it is its turn, and the other way round. */
    thread = paused_launch();
    WAIT_FOR(in_wait(RG_OP_paused));
    atomic_store(&account->turn_until_ns, UINT64_MAX);
    atomic_store(&account->turn_until_ns, 0);
    usleep(50000);
    CHECK_EQUAL(atomic_load(&launched), 0);
    atomic_store(&account->turn_until_ns, UINT64_MAX);
    atomic_store(&account->paused_until_ns, 0);
    usleep(50000);
    CHECK_EQUAL(atomic_load(&launched), 0);
    atomic_store(&account->turn_until_ns, 0);
    join(thread);
    done();
}

static void pauses_have_an_end(void)
{
    become("best-effort");
    pthread_t thread = paused_launch();
    atomic_store(&account->paused_until_ns, rg_now_ns() + 50000000); /* the time that was said */
    join(thread);
    thread = paused_launch();
    seg->settings.shutdown = 1;
    join(thread);
    seg->settings.shutdown = 0;
    thread = paused_launch();
    atomic_store(&account->wanted_class, RG_CLASS_HIGH); /* which is never held back */
    join(thread);
    atomic_store(&account->wanted_class, RG_CLASS_BEST_EFFORT);
    thread = paused_launch();
    unlink(segment_path); /* nobody could resume it */
    join(thread);
    done();
}

/* Nor could anybody where there is another segment of that name by now. */
static void a_pause_ends_with_its_segment(void)
{
    become("best-effort");
    pthread_t thread = paused_launch();
    const char *other = scratch("steer-other");
    fresh_segment(other);
    CHECK_EQUAL(rename(other, segment_path), 0);
    join(thread);
    done();
}

/* The agent may be in the driver, which waits for what is held back: as good as none. */
static void a_pause_ends_without_the_agent(void)
{
    become("best-effort");
    pthread_t thread = paused_launch();
    rg_agent_stop();
    atomic_store(&account->paused_until_ns, rg_now_ns() + 50000000);
    join(thread);
    CHECK(mode() & RG_MODE_PAUSED);
    launch(NULL, 1000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    done();
}

static void who_was_paused_is_back_without_the_agent(void)
{
    become_preemptible();
    launch(NULL, 100000000);
    atomic_store(&account->paused_until_ns, UINT64_MAX);
    WAIT_FOR(atomic_load(&rg.slot->suspensions) == 1);
    rg_agent_stop();
    atomic_store(&account->paused_until_ns, rg_now_ns() + 50000000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    CHECK(mode() & RG_MODE_PAUSED);
    done();
}

static void leaving_ends_a_pause(void)
{
    become("best-effort");
    pthread_t thread = paused_launch();
    rigel_shutdown();
    join(thread);
    launch(NULL, 1000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    done();
}

static void a_high_client_is_not_paused(void)
{
    become("high");
    atomic_store(&account->paused_until_ns, UINT64_MAX);
    beats(2);
    launch(NULL, 1000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    CHECK(!(mode() & RG_MODE_PAUSED));
    done();
}

/* ---- weight and policy ---- */

static void weight_changes(void)
{
    become("best-effort");
    beats(2);
    CHECK_EQUAL(rg.slot->weight, RG_POLICY_WEIGHT_ONE); /* nothing is asked */
    atomic_store(&account->wanted_weight, 2500);
    WAIT_FOR(atomic_load(&rg.slot->weight) == 2500);
    WAIT_FOR(atomic_load(&RG_PROCESS->inverse_weight) == rg_policy_inverse(2500));
    done();
}

/* A weight that is none counts as 1. */
static void weights_as_they_are_given(void)
{
    static const struct {
        const char *given;
        uint32_t weight;
    } cases[] = {{"2.5", 2500},  {"100", 100000}, {"0.01", 10}, {"", 1000},    {"x", 1000}, {"2x", 1000},
                 {"0.009", 1000}, {"101", 1000},   {"-1", 1000}, {"nan", 1000}, {NULL, 1000}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            if (cases[i].given)
                setenv("RIGEL_WEIGHT", cases[i].given, 1);
            become("best-effort");
            CHECK_EQUAL(rg.slot->weight, cases[i].weight);
            CHECK_EQUAL(RG_PROCESS->inverse_weight, rg_policy_inverse(cases[i].weight));
            done();
            exit(0);
        }
        int status = -1;
        CHECK_EQUAL(waitpid(pid, &status, 0), pid);
        CHECK_EQUAL(status, 0);
    }
}

/* Priorities are set from when a policy has them, of all streams that there are; not by those that have none. Also past Rigel for now. */
static void streams_follow_the_policy(void)
{
    const uint32_t none[] = {RG_POLICY_NONE, RG_POLICY_FAIR, RG_POLICY_NONE};
    for (int i = 0; i < 3; i++) {
        bool past = i == 2;
        pid_t pid = fork();
        if (pid == 0) {
            prepare("high");
            seg->settings.policy = none[i];
            attach();
            CUstream s;
            CHECK_EQUAL(cuStreamCreate(&s, 1), CUDA_SUCCESS);
            launch(s, 1000);
            CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
            int before = priority_of(s);
            beats(2);
            CHECK(before != -4 && priority_of(s) == before);
            if (past)
                CHECK_EQUAL(rigel_bypass_begin(), 0);
            seg->settings.policy = RG_POLICY_PRIORITY;
            if (past) {
                beats(2);
                rigel_bypass_end();
            }
            WAIT_FOR(priority_of(s) == -4);
            done();
            exit(0);
        }
        int status = -1;
        CHECK_EQUAL(waitpid(pid, &status, 0), pid);
        CHECK_EQUAL(status, 0);
    }
}

static void policy_changes(void)
{
    become("best-effort");
    seg->settings.policy = RG_POLICY_FAIR;
    WAIT_FOR(mode() == RG_MODE_FAIR);
    launch(NULL, 1000);
    CHECK(own_busy());
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    agent_ends_periods(true);
    atomic_store(&account->paused_until_ns, UINT64_MAX);
    WAIT_FOR(mode() == (RG_MODE_FAIR | RG_MODE_PAUSED));
    WAIT_FOR(!own_busy());
    atomic_store(&account->paused_until_ns, 0);
    launch(NULL, 1000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    seg->settings.policy = RG_POLICY_PRIORITY;
    WAIT_FOR(mode() == RG_MODE_BEST_EFFORT);
    WAIT_FOR(!own_busy());
    other_launches(true);
    pthread_t thread = start();
    WAIT_FOR(atomic_load(&seg->devices[0].waiters) == 1);
    seg->settings.policy = RG_POLICY_NONE;
    join(thread);
    done();
}

/* ---- all at once ---- */

static _Atomic bool enough;
static void *launch_on(void *unused)
{
    (void)unused;
    CHECK_EQUAL(cu.cuCtxSetCurrent(context), CUDA_SUCCESS);
    for (int i = 0; !atomic_load(&enough); i++) {
        launch(NULL, 1000);
        if (i % 4 == 3)
            CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    }
    return NULL;
}

/* Four threads launch while everything changes ten times; in the end nothing is left of it. */
static void changes_under_load(void)
{
    become_preemptible();
    agent_ends_periods(true);
    seg->settings.starvation_us = 5000;
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        CHECK_EQUAL(pthread_create(&threads[i], NULL, launch_on, NULL), 0);
    for (int i = 0; i < 10; i++) {
        other_launches(i % 3 != 0);
        atomic_store(&account->wanted_class, i % 2 ? RG_CLASS_HIGH : RG_CLASS_BEST_EFFORT);
        atomic_store(&account->paused_until_ns, i % 4 == 2 ? UINT64_MAX : 0);
        seg->settings.policy = i % 5 == 4 ? RG_POLICY_FAIR : RG_POLICY_PRIORITY;
        WAIT_FOR(atomic_load(&rg.slot->class) == account->wanted_class);
    }
    other_launches(false);
    atomic_store(&account->paused_until_ns, 0);
    seg->settings.policy = RG_POLICY_PRIORITY;
    atomic_store(&enough, true);
    for (int i = 0; i < 4; i++)
        CHECK_EQUAL(pthread_join(threads[i], NULL), 0);
    atomic_store(&account->wanted_class, RG_CLASS_BEST_EFFORT);
    WAIT_FOR(mode() == RG_MODE_BEST_EFFORT);
    WAIT_FOR(atomic_load(&seg->devices[0].high_busy) == 0 && atomic_load(&seg->devices[0].high_launching) == 0);
    launch(NULL, 1000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    done();
}

/* All that the loop of policy slo moves. */
#define MOVED(S) S(suspend) S(defer_us) S(defer_ppm) S(need_us) S(slice_us) S(inflight) S(corun) S(stop_us) S(share_period_us)

/* A loop that has died while it tried settings leaves those that there were before; one that lives, tries none or has kept none, its own. */
static void a_trial_ends_with_its_loop(void)
{
    enum { DIED, LIVES, TRIES_NONE, KEPT_NONE, HOW };
    enum { AGO_NS = 4000000000u };
    become("best-effort");
    for (int how = 0; how < HOW; how++) {
        uint32_t n = 0;
        seg->control.trying = 0;
#define TRY(name) \
    n++; \
    seg->settings.name = 64 + n; \
    seg->control.kept_##name = 8 + n;
        MOVED(TRY)
        seg->control.kept = how != KEPT_NONE;
        seg->control.beat_ns = how == LIVES ? rg_now_ns() + 3600000000000u : rg_now_ns() - AGO_NS;
        seg->control.trying = how != TRIES_NONE;
        if (how == DIED)
            WAIT_FOR(atomic_load(&seg->settings.share_period_us) == 8 + n); /* the last one that is put back */
        else if (how == KEPT_NONE)
            WAIT_FOR(!atomic_load(&seg->control.trying));
        else
            beats(2);
        CHECK_EQUAL(seg->control.trying, how == LIVES);
        n = 0;
#define TRIED(name) CHECK_EQUAL(seg->settings.name, (how == DIED ? 8 : 64) + ++n);
        MOVED(TRIED)
    }
    done();
}

int main(int argc, char **argv)
{
    (void)argc;
    ensure_environment("LD_LIBRARY_PATH", in_build_folder("sim"), argv);
    int failures = 0;
    RUN(to_high_and_back);
    RUN(a_busy_period_without_work_ends);
    RUN(a_busy_client_becomes_best_effort);
    RUN(a_graph_of_nccl_stays_one);
    RUN(unfinished_work_counts_for_a_client_that_becomes_high);
    RUN(who_waits_at_the_gate_goes_when_it_becomes_high);
    RUN(who_is_suspended_returns_when_it_becomes_high);
    RUN(who_has_just_become_high_is_not_preemptible);
    RUN(streams_follow_the_class);
    RUN(a_later_process_is_of_the_class_asked);
    RUN(paused_until_resumed);
    RUN(paused_under_fair);
    RUN(paused_is_off_the_gpu);
    RUN(another_clients_turn);
    RUN(pauses_have_an_end);
    RUN(a_pause_ends_with_its_segment);
    RUN(a_pause_ends_without_the_agent);
    RUN(who_was_paused_is_back_without_the_agent);
    RUN(leaving_ends_a_pause);
    RUN(a_high_client_is_not_paused);
    RUN(streams_follow_the_policy);
    RUN(weights_as_they_are_given);
    RUN(weight_changes);
    RUN(policy_changes);
    RUN(a_trial_ends_with_its_loop);
    RUN(changes_under_load);
    return failures ? 1 : 0;
}
