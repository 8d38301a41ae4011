/*
 * test-member.c: several clients in one process, on the simulated GPU: whose a launch is, what each is counted, and that
 * clients of one process stand in each other's way only where their classes say so.
 *
 * As in test-gate.c the client's parts are linked in, the hooks are called by name, and each case is a process.
 * TEST_SECONDS=10 makes the last case run for so long.
 */
#include "client-testing.h"

#include <sys/wait.h>

/* What the gate asks of Python, in a program that says itself whether it holds the lock. */
static _Thread_local int holds_python;
__attribute__((visibility("default"))) int Py_IsInitialized(void);
__attribute__((visibility("default"))) int PyGILState_Check(void);
int Py_IsInitialized(void)
{
    return 1;
}
int PyGILState_Check(void)
{
    return holds_python;
}

static void prepare(const char *class)
{
    prepare_waiting_client("member", class);
    setenv("RIGEL_NAME", "process", 1);
    seg->settings.quiet_us = 600000000; /* only the program's own waits end a busy period */
}

static void attach(void)
{
    attach_client();
    load_kernels(NULL);
}

static void become(const char *class)
{
    prepare(class);
    attach();
}

static void launch(CUstream s, uint64_t block_ns)
{
    launch_blocks(spin, s, 1, block_ns);
}

static CUstream stream(void)
{
    CUstream s;
    CHECK_EQUAL(cuStreamCreate(&s, 1), CUDA_SUCCESS);
    return s;
}

static rg_client *slot_of(const char *name)
{
    for (int i = 0; i < RG_MAX_CLIENTS; i++)
        if (atomic_load(&seg->clients[i].state) != RG_FREE && strcmp(seg->clients[i].name, name) == 0)
            return &seg->clients[i];
    fprintf(stderr, "no client %s\n", name);
    _exit(1);
}

/* ---- threads that do one thing ---- */

typedef struct {
    const char *name, *class; /* NULL name: enters nothing */
    CUstream stream;          /* NULL: the NULL stream */
    int launches;
    uint64_t block_ns;
    _Atomic int done;
} job;

static void *work(void *argument)
{
    job *j = argument;
    CHECK_EQUAL(cu.cuCtxSetCurrent(context), CUDA_SUCCESS);
    if (j->name)
        CHECK_EQUAL(rigel_client_enter(j->name, j->class), 0);
    for (int i = 0; i < j->launches; i++)
        launch(j->stream, j->block_ns);
    atomic_store(&j->done, 1);
    if (j->name)
        rigel_client_leave();
    return NULL;
}

static pthread_t start(job *j)
{
    pthread_t thread;
    CHECK_EQUAL(pthread_create(&thread, NULL, work, j), 0);
    return thread;
}

static void run(job *j)
{
    CHECK_EQUAL(pthread_join(start(j), NULL), 0);
}

/* ---- whose a launch is ---- */

static void each_client_has_its_own_counts(void)
{
    become("best-effort");
    launch(NULL, 1000);
    job a = {.name = "a", .launches = 3, .block_ns = 1000}, b = {.name = "b", .class = "high", .launches = 5, .block_ns = 1000};
    run(&a); /* all three use the NULL stream */
    run(&b);
    CHECK_EQUAL(slot_of("b")->requests, 0);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS); /* else the next would wait for b's */
    launch(NULL, 1000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    CHECK_EQUAL(rg_launches(rg.slot), 2);
    CHECK_EQUAL(rg_launches(slot_of("a")), 3);
    CHECK_EQUAL(slot_of("a")->class, RG_CLASS_BEST_EFFORT); /* the process's */
    CHECK_EQUAL(rg_launches(slot_of("b")), 5);
    CHECK_EQUAL(slot_of("b")->class, RG_CLASS_HIGH);
    CHECK_EQUAL(slot_of("b")->requests, 1);
    CHECK_EQUAL(rg.slot->requests + slot_of("a")->requests, 0);
    CHECK_EQUAL(slot_of("a")->parent, rg.slot_index + 1);
    CHECK_EQUAL(rg.slot->parent, 0);
    CHECK_EQUAL(slot_of("a")->devices, 1);
    run(&a); /* again: the same client */
    CHECK_EQUAL(rg_launches(slot_of("a")), 6);
    CHECK_EQUAL(rg.member_count, 3);
    CHECK_EQUAL(rg.members[1].threads, 0);
    rigel_shutdown();
    CHECK_EQUAL(slot_of("a")->state, RG_EXITED);
    CHECK_EQUAL(slot_of("b")->state, RG_EXITED);
    CHECK_EQUAL(seg->devices[0].high_busy, 0);
    done();
}

/* A slot that a process of another client had before is that client's no more: neither its limit nor its pause are this one's. */
static void a_slot_is_no_former_clients(void)
{
    prepare("best-effort");
    pid_t pid = fork();
    if (pid == 0) {
        int slot = rg_segment_claim(seg, "a", RG_CLASS_BEST_EFFORT, rg_now_ns());
        CHECK(slot >= 0 && rg_account_join(seg, slot, "a") != NULL);
        _exit(0);
    }
    int status = 1;
    waitpid(pid, &status, 0);
    CHECK_EQUAL(status, 0);
    const rg_account *former = rg_account_enter(seg, "a");
    CHECK(former->slots != 0);
    attach();
    CHECK_EQUAL(rigel_client_enter("a", "best-effort"), 0);
    CHECK_EQUAL(former->slots, 0);
    done();
}

/* Under fair, what launches turn out to cost is charged to who made them, whoever's launches were timed. */
static void each_client_pays_for_its_own_launches(void)
{
    prepare("best-effort");
    seg->settings.policy = RG_POLICY_FAIR;
    attach();
    rg_agent_stop();
    job a = {.name = "a", .launches = 3, .block_ns = 1000};
    run(&a);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    launch(NULL, 1000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    CHECK_EQUAL(slot_of("a")->charged_ns + rg.slot->charged_ns, 0); /* what they cost is not known yet */
    rg_samples_poll();
    CHECK_EQUAL(slot_of("a")->samples + rg.slot->samples, RG_SAMPLE_FIRST);
    CHECK(rg.slot->charged_ns > 0);
    CHECK_EQUAL(slot_of("a")->charged_ns, 3 * rg.slot->charged_ns);
    done();
}

/* As autograd's threads do: they have entered nothing, and launch on the stream of whoever ran the forward pass. */
static void a_stream_belongs_to_a_client(void)
{
    become("best-effort");
    CHECK_EQUAL(rigel_client_enter("a", NULL), 0);
    CUstream own = stream(), made = stream(), pooled = stream();
    launch(own, 1000);
    job helper = {.stream = own, .launches = 4, .block_ns = 1000};
    run(&helper);
    CHECK_EQUAL(rg_launches(slot_of("a")), 5);
    helper.stream = made; /* never launched on by its maker */
    run(&helper);
    CHECK_EQUAL(rg_launches(slot_of("a")), 9);
    job b = {.name = "b", .stream = pooled, .launches = 2, .block_ns = 1000}; /* b launches first on what a has made */
    run(&b);
    b.stream = own; /* which is a's, whoever launches */
    run(&b);
    CHECK_EQUAL(rg_launches(slot_of("b")), 2);
    CHECK_EQUAL(rg_launches(slot_of("a")), 11);
    rigel_client_leave();
    run(&b); /* a has left: b may have it */
    CHECK_EQUAL(rg_launches(slot_of("b")), 4);
    CHECK_EQUAL(rigel_client_stream(own), -ENODEV);
    CHECK_EQUAL(rigel_client_enter("a", NULL), 0);
    CHECK_EQUAL(rigel_client_stream(own), 0);
    CHECK_EQUAL(rigel_client_stream(NULL), -EINVAL);
    rigel_client_leave();
    launch(own, 1000); /* by nobody */
    CHECK_EQUAL(rg_launches(slot_of("a")), 12);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    /* A stream that is gone is nobody's, though another may come by its handle. */
    CHECK_EQUAL(cuStreamDestroy_v2(own), CUDA_SUCCESS);
    CUstream again = stream();
    launch(again, 1000);
    CHECK_EQUAL(rg_launches(rg.slot), 1);
    CHECK_EQUAL(cuDevicePrimaryCtxReset_v2(0), CUDA_SUCCESS);
    CHECK_EQUAL(seg->devices[0].high_busy, 0);
    done();
}

/* A driver's launch that takes so long that the stream is another client's before it is back. */
static __typeof__(&cuLaunchKernel) real_launch;
static CUstream handed_over;
static _Atomic bool takes_long;

static void *take_over(void *unused)
{
    (void)unused;
    CHECK_EQUAL(cu.cuCtxSetCurrent(context), CUDA_SUCCESS);
    CHECK_EQUAL(rigel_client_enter("b", "best-effort"), 0);
    CHECK_EQUAL(rigel_client_stream(handed_over), 0);
    launch(handed_over, 1000);
    return NULL;
}

static CUresult launch_late(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, CUstream s,
                            void **parameters, void **extra)
{
    if (atomic_exchange(&takes_long, false)) {
        pthread_t thread;
        CHECK_EQUAL(pthread_create(&thread, NULL, take_over, NULL), 0);
        CHECK_EQUAL(pthread_join(thread, NULL), 0);
    }
    return real_launch(f, gx, gy, gz, bx, by, bz, shared, s, parameters, extra);
}

/* What a client has in flight is not counted for ever where its stream changes hands in the middle of a launch. */
static void a_stream_changes_hands_amid_a_launch(void)
{
    become("best-effort");
    CHECK_EQUAL(rigel_client_enter("a", "best-effort"), 0);
    rg_member *a = rg_member_mine();
    handed_over = stream();
    real_launch = (__typeof__(real_launch))rg_real.hooked[RG_HOOK_cuLaunchKernel];
    rg_real.hooked[RG_HOOK_cuLaunchKernel] = (void *)launch_late;
    launch(handed_over, 1000);
    CHECK(atomic_load(&a->inflight[0]) != 0);
    atomic_store(&takes_long, true);
    launch(handed_over, 1000);
    CHECK_EQUAL(atomic_load(&a->inflight[0]), 0);
    CHECK_EQUAL(rg_launches(slot_of("a")), 2);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    done();
}

/* After rigel_shutdown has begun all passes, whoever enters a client then. */
static void entering_as_rigel_leaves(void)
{
    become("best-effort");
    atomic_store(&rg.mode, RG_MODE_BARE); /* the first thing that it does */
    CHECK_EQUAL(rigel_client_enter("late", "best-effort"), 0);
    CHECK_EQUAL(rg.mode, RG_MODE_BARE);
    CHECK_EQUAL(rg_member_mine()->mode, RG_MODE_BEST_EFFORT);
    done();
}

static void *abandon(void *unused)
{
    (void)unused;
    CHECK_EQUAL(cu.cuCtxSetCurrent(context), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamBeginCapture_v2(CU_STREAM_PER_THREAD, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    return NULL;
}

/* A capture on a thread's own stream ends as it does, whatever clients the thread has entered or left meanwhile, and with the thread. */
static void a_capture_is_its_threads(void)
{
    become("high");
    CUgraph graph;
    CHECK_EQUAL(cuStreamBeginCapture_v2(CU_STREAM_PER_THREAD, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), CUDA_SUCCESS);
    CHECK_EQUAL(rigel_client_enter("inner", "high"), 0);
    CHECK_EQUAL(rg.captures, 1);
    CHECK_EQUAL(cuStreamEndCapture(CU_STREAM_PER_THREAD, &graph), CUDA_SUCCESS);
    CHECK_EQUAL(rg.captures, 0);
    CHECK_EQUAL(cuStreamBeginCapture_v2(CU_STREAM_PER_THREAD, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), CUDA_SUCCESS);
    rigel_client_leave();
    CHECK_EQUAL(cuStreamEndCapture(CU_STREAM_PER_THREAD, &graph), CUDA_SUCCESS);
    CHECK_EQUAL(rg.captures, 0);
    /* Also one that was begun beside another one. */
    CUstream s = stream();
    CHECK_EQUAL(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    pthread_t thread;
    CHECK_EQUAL(pthread_create(&thread, NULL, abandon, NULL), 0);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    CHECK_EQUAL(rg.captures, 1);
    CHECK_EQUAL(cuStreamEndCapture(s, &graph), CUDA_SUCCESS);
    CHECK_EQUAL(rg.captures, 0);
    done();
}

static _Atomic bool ended_making;

static void *make_streams(void *unused)
{
    CHECK_EQUAL(cu.cuCtxSetCurrent(context), CUDA_SUCCESS);
    while (!atomic_load(&ended_making))
        CHECK_EQUAL(cuStreamDestroy_v2(stream()), CUDA_SUCCESS);
    return unused;
}

/* A fork amid a capture, while other threads hold Rigel's locks: the child gets the driver's answer. */
static void a_child_ends_its_parents_capture(void)
{
    become("high");
    CUstream s = stream();
    CUgraph graph;
    pthread_t threads[2];
    CHECK_EQUAL(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    for (int i = 0; i < 2; i++)
        CHECK_EQUAL(pthread_create(&threads[i], NULL, make_streams, NULL), 0);
    for (int i = 0; i < 200; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            alarm(20);
            _exit(cuStreamEndCapture(s, &graph) == CUDA_SUCCESS);
        }
        int status;
        CHECK_EQUAL(waitpid(pid, &status, 0), pid);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    atomic_store(&ended_making, true);
    for (int i = 0; i < 2; i++)
        CHECK_EQUAL(pthread_join(threads[i], NULL), 0);
    CHECK_EQUAL(cuStreamEndCapture(s, &graph), CUDA_SUCCESS);
    CHECK_EQUAL(rg.captures, 0);
    done();
}

/* Clients that were entered before the driver was there get their slot when it is. */
static void entering_before_the_driver(void)
{
    prepare("best-effort");
    CHECK_EQUAL(rigel_client_enter("early", "high"), 0);
    attach();
    launch(NULL, 1000);
    CHECK_EQUAL(rg_launches(slot_of("early")), 1);
    CHECK(seg->devices[0].high_busy != 0);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    CHECK_EQUAL(seg->devices[0].high_busy, 0);
    done();
}

static void what_cannot_be_entered(void)
{
    CHECK_EQUAL(rigel_client_enter("a", "high"), -ENODEV); /* no Rigel */
    rigel_client_leave();
    rigel_request_end();
    become("best-effort");
    seg->settings.quiet_us = 250;
    setenv("RIGEL_DISABLE", "1", 1);
    CHECK_EQUAL(rigel_client_enter("a", "high"), -ENODEV);
    unsetenv("RIGEL_DISABLE");
    CHECK_EQUAL(rigel_client_enter("", "high"), -EINVAL);
    CHECK_EQUAL(rigel_client_enter(NULL, "high"), -EINVAL);
    CHECK_EQUAL(rigel_client_enter("a", "low"), -EINVAL);
    CHECK_EQUAL(rigel_client_enter("a\nb", "high"), -EINVAL);
    CHECK_EQUAL(rigel_client_enter("a\x7f", "high"), -EINVAL);
    char longest[RG_NAME_BYTES + 1];
    memset(longest, 'n', RG_NAME_BYTES);
    longest[RG_NAME_BYTES] = 0;
    CHECK_EQUAL(rigel_client_enter(longest, "high"), -EINVAL); /* not a client of the name that is left of it */
    CHECK_EQUAL(rg.member_count, 1);
    CHECK_EQUAL(rigel_client_enter("a", "high"), 0);
    CHECK_EQUAL(rigel_client_enter("a", "best-effort"), -EEXIST);
    for (int i = 0; i < 15; i++)
        CHECK_EQUAL(rigel_client_enter(i % 2 ? "a" : "process", i % 2 ? "high" : NULL), 0);
    CHECK_EQUAL(rigel_client_enter("a", "high"), -EOVERFLOW);
    launch(NULL, 1000); /* the last entered was "process", which is the process itself */
    CHECK_EQUAL(rg_launches(rg.slot), 1);
    rigel_client_leave();
    launch(NULL, 1000);
    CHECK_EQUAL(rg_launches(slot_of("a")), 1);
    for (int i = 0; i < 20; i++)
        rigel_client_leave();
    launch(NULL, 1000);
    CHECK_EQUAL(rg_launches(rg.slot), 2);
    char name[32];
    for (int i = 0; i < RG_MAX_CLIENTS - 2; i++) {
        snprintf(name, sizeof name, "client-%d", i);
        CHECK_EQUAL(rigel_client_enter(name, NULL), 0);
        rigel_client_leave();
    }
    CHECK_EQUAL(rigel_client_enter("one too many", NULL), -ENOSPC);
    launch(NULL, 1000);
    CHECK_EQUAL(rg_launches(rg.slot), 3);
    pid_t pid = fork();
    if (pid == 0)
        _exit(rigel_client_enter("a", "high") == -ENODEV ? 0 : 1);
    int status;
    CHECK_EQUAL(waitpid(pid, &status, 0), pid);
    CHECK_EQUAL(status, 0);
    rigel_shutdown();
    CHECK_EQUAL(rigel_client_enter("a", "high"), -ENODEV);
    done();
}

static void requests_are_the_threads_clients(void)
{
    become("best-effort");
    rigel_request_begin();
    rigel_request_end();
    rigel_request_end();
    CHECK_EQUAL(rg.slot->reports, 1);
    CHECK_EQUAL(rigel_client_enter("a", NULL), 0);
    rigel_request_begin();
    rigel_request_end();
    rigel_report_request(1000);
    rigel_client_leave();
    CHECK_EQUAL(rg.slot->reports, 1);
    CHECK_EQUAL(slot_of("a")->reports, 2);
    done();
}

/* An iteration of the process's, and of each client in it. */
static void a_request_may_have_those_of_other_clients_in_it(void)
{
    become("best-effort");
    for (int round = 0; round < 3; round++) {
        rigel_request_begin();
        for (int i = 0; i < 2; i++) {
            CHECK_EQUAL(rigel_client_enter(i ? "b" : "a", NULL), 0);
            rigel_request_begin();
            usleep(5000);
            if (round < 2) /* else it fails */
                rigel_request_end();
            rigel_client_leave();
        }
        rigel_request_end();
    }
    CHECK_EQUAL(rg.slot->reports, 3);
    CHECK_EQUAL(slot_of("a")->reports, 2);
    CHECK_EQUAL(slot_of("b")->reports, 2);
    for (int i = rg_hist_bucket(10000000) - 1; i >= 0; i--)
        CHECK_EQUAL(rg.slot->report_ns.count[i], 0); /* each took at least what was in it */
    CHECK_EQUAL(rigel_client_enter("a", NULL), 0);
    rigel_request_begin();
    rigel_client_leave();
    rigel_request_end(); /* as the one that it is in then */
    rigel_request_end();
    CHECK_EQUAL(rg.slot->reports, 4);
    CHECK_EQUAL(slot_of("a")->reports, 2);
    rigel_request_begin();
    rigel_request_begin();
    rigel_request_end();
    rigel_request_end();
    CHECK_EQUAL(rg.slot->reports, 5);
    done();
}

/* ---- threads that are no client ---- */

static void threads_that_are_no_client_pass_through(void)
{
    prepare("best-effort");
    setenv("RIGEL_THREADS", "1", 1);
    attach();
    atomic_fetch_or(&seg->devices[0].high_busy, 1ull << OTHER);
    CUstream s = stream();
    for (int i = 0; i < 50; i++)
        launch(i % 2 ? s : NULL, 1000); /* would wait for ever if it were a client's */
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    CHECK_EQUAL(rg_launches(rg.slot) + rg.slot->passed + rg.slot->gate_waits, 0);
    CHECK_EQUAL(seg->devices[0].high_busy, 1ull << OTHER);
    job a = {.name = "a", .launches = 1, .block_ns = 1000};
    pthread_t thread = start(&a);
    WAIT_FOR(atomic_load(&seg->devices[0].waiters) == 1);
    launch(NULL, 1000);
    rg_segment_clear_busy(seg, OTHER);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    CHECK_EQUAL(slot_of("a")->gate_waits, 1);
    CHECK_EQUAL(rg_launches(rg.slot), 0);
    CHECK_EQUAL(rg.slot->state, RG_LIVE);
    done();
}

/* ---- clients of both classes in one process ---- */

static void a_thread_waits_for_a_high_one_beside_it(void)
{
    become("best-effort");
    CHECK_EQUAL(rigel_client_enter("fast", "high"), 0);
    CUstream s = stream();
    int high = 0, low = 0;
    CHECK_EQUAL(cu.cuStreamGetPriority(s, &high), CUDA_SUCCESS);
    launch(s, 1000);
    job slow = {.name = "slow", .launches = 1, .block_ns = 1000};
    pthread_t thread = start(&slow);
    WAIT_FOR(atomic_load(&seg->devices[0].waiters) == 1);
    CHECK_EQUAL(atomic_load(&slow.done), 0);
    CHECK_EQUAL(cuStreamSynchronize(s), CUDA_SUCCESS);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    CHECK_EQUAL(slot_of("slow")->gate_waits, 1);
    CHECK_EQUAL(slot_of("fast")->gate_waits, 0);
    CHECK_EQUAL(slot_of("fast")->requests, 1);
    rigel_client_leave();
    CHECK_EQUAL(rigel_client_enter("slow", NULL), 0);
    CUstream t = stream();
    CHECK_EQUAL(cu.cuStreamGetPriority(t, &low), CUDA_SUCCESS);
    CHECK(low > high);
    done();
}

/* What was counted in flight when a launch came to the gate is counted out, though its client was a high one when it went. */
static void a_launch_ends_as_what_it_was_begun_as(void)
{
    become("best-effort");
    seg->settings.inflight = 1;
    rg_device_busy(&seg->devices[0], OTHER, rg_now_ns());
    job slow = {.name = "slow", .launches = 1, .block_ns = 1000};
    pthread_t thread = start(&slow);
    WAIT_FOR(rg.member_count == 2 && atomic_load(&seg->devices[0].waiters) == 1);
    rg_member *m = &rg.members[1];
    atomic_store(&m->account->wanted_class, RG_CLASS_HIGH);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    atomic_store(&m->account->wanted_class, RG_CLASS_BEST_EFFORT);
    WAIT_FOR(atomic_load(&m->mode) == RG_MODE_BEST_EFFORT);
    rg_segment_clear_busy(seg, OTHER);
    atomic_store(&slow.done, 0);
    thread = start(&slow);
    WAIT_FOR(atomic_load(&slow.done)); /* the one before is not taken to be in flight still */
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    CHECK_EQUAL(rg_launches(slot_of("slow")), 2);
    done();
}

/* Streams go with their context, and are nobody's then: their handles come back as others. */
static void streams_that_went_with_their_context_are_nobodys(void)
{
    become("best-effort");
    CHECK_EQUAL(rigel_client_enter("own", NULL), 0);
    CUcontext own;
    CHECK_EQUAL(cu.cuCtxCreate_v2(&own, 0, 0), CUDA_SUCCESS);
    CUstream s = stream();
    rigel_client_leave();
    CHECK(rg_member_of(s) == &rg.members[1]);
    CHECK_EQUAL(cuCtxDestroy_v2(own), CUDA_SUCCESS);
    CHECK(rg_member_of(s) == RG_PROCESS);
    done();
}

/* A thread that holds Python's lock may be what the high one waits for. */
static void a_thread_with_pythons_lock_does_not_wait(void)
{
    become("best-effort");
    CHECK_EQUAL(rigel_client_enter("fast", "high"), 0);
    launch(stream(), 1000);
    rigel_client_leave();
    CHECK_EQUAL(rigel_client_enter("slow", NULL), 0);
    holds_python = 1;
    launch(NULL, 1000);
    CHECK_EQUAL(slot_of("slow")->passed, 1);
    CHECK_EQUAL(slot_of("slow")->gate_waits, 0);
    /* Not for the end of a pause of its own client either. */
    rg_member *m = &rg.members[2];
    atomic_store(&m->account->paused_until_ns, UINT64_MAX);
    WAIT_FOR(rg_member_is_paused(m));
    launch(NULL, 1000);
    CHECK_EQUAL(slot_of("slow")->passed, 3); /* the high one is at work still, besides */
    CHECK_EQUAL(slot_of("slow")->paused_ns, 0);
    done();
}

/* What is suspended is the whole process: not one that has a high client. */
static void a_process_with_a_high_thread_is_not_suspended(void)
{
    become("best-effort");
    job slow = {.name = "slow", .launches = 1, .block_ns = 1000};
    run(&slow);
    seg->settings.preempt = 1;
    WAIT_FOR(atomic_load(&rg.preemptible[0])); /* all are best-effort so far */
    rg_device_busy(&seg->devices[0], OTHER, rg_now_ns());
    rg_device_launching(&seg->devices[0], OTHER, true);
    WAIT_FOR(atomic_load(&rg.slot->suspensions) == 1);
    CHECK_EQUAL(rigel_client_enter("fast", "high"), 0);
    CUstream s = stream();
    launch(s, 1000);
    CHECK_EQUAL(cuStreamSynchronize(s), CUDA_SUCCESS); /* though the other goes on */
    CHECK_EQUAL(rg.preemptible[0], 0);
    WAIT_FOR(atomic_load(&rg.slot->suspended_ns) > 0); /* whose thread does not wait any more */
    pthread_t thread = start(&slow);
    WAIT_FOR(atomic_load(&seg->devices[0].waiters) >= 1);
    CHECK_EQUAL(rg_launches(slot_of("slow")), 2);
    rg_segment_clear_busy(seg, OTHER);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    done();
}

/* For how long its kernels are timed goes by what all of its clients have launched. */
static void new_by_the_launches_of_all_its_clients(void)
{
    become("best-effort");
    job slow = {.name = "slow", .launches = 1, .block_ns = 1000};
    run(&slow);
    seg->settings.stop_us = 0;
    seg->settings.preempt = 1;
    WAIT_FOR(atomic_load(&rg.preemptible[0]) == RG_PREEMPTIBLE_NEW);
    atomic_fetch_add(&slot_of("slow")->launches[0], RG_SAMPLED_LAUNCHES);
    WAIT_FOR(atomic_load(&rg.preemptible[0]) == RG_PREEMPTIBLE);
    done();
}

static int (*real_slice)(unsigned, uint64_t);
static _Atomic int counting, entered;
static _Atomic uint32_t preemptible_then;

/* While the agent sets the slice, and before it looks for the class of the process again. */
static int enter_meanwhile(unsigned ordinal, uint64_t us)
{
    if (atomic_exchange(&counting, 0)) {
        CHECK_EQUAL(rigel_client_enter("fast", "high"), 0);
        atomic_store(&preemptible_then, atomic_load(&rg.preemptible[0]));
        rigel_client_leave();
        atomic_store(&entered, 1);
    }
    return real_slice(ordinal, us);
}

/* Its first client beside the process's own is a high one. */
static void a_process_that_gets_a_high_thread_is_not_preemptible(void)
{
    CHECK(rg_real_ready());
    real_slice = rg_real.rigelSimSetTimeslice;
    rg_real.rigelSimSetTimeslice = enter_meanwhile;
    become("best-effort");
    launch(NULL, 1000);
    seg->settings.preempt = 1;
    WAIT_FOR(atomic_load(&rg.preemptible[0]));
    atomic_store(&counting, 1);
    WAIT_FOR(atomic_load(&entered));
    CHECK_EQUAL(preemptible_then, 0);
    done();
}

/* The agent finds out that a high client is idle though another client of the process goes on launching. */
static void idle_beside_a_thread_that_never_rests(void)
{
    become("best-effort");
    seg->settings.corun = 4; /* it need not wait */
    CHECK_EQUAL(rigel_client_enter("fast", "high"), 0);
    CUstream s = stream();
    launch(s, 1000);
    rigel_client_leave();
    agent_ends_periods(true);
    CHECK_EQUAL(rigel_client_enter("slow", NULL), 0);
    CUstream t = stream();
    for (int i = 0; atomic_load(&slot_of("fast")->agent_idle) == 0; i++) {
        CHECK(i < 1000000);
        launch(t, 1000);
        usleep(50);
    }
    CHECK_EQUAL(slot_of("fast")->requests, 1);
    done();
}

/* ---- what the view of contexts is made of ---- */

static uint64_t calls_of(const rg_client *slot, uint32_t operation)
{
    return atomic_load(&seg->calls[slot - seg->clients].count[operation]);
}

static void calls_are_counted_by_client_and_operation(void)
{
    become("best-effort");
    CUstream s = stream();
    for (int i = 0; i < 6; i++)
        launch(s, 1000);
    job a = {.name = "a", .launches = 3, .block_ns = 1000};
    run(&a);
    CHECK_EQUAL(rigel_client_enter("b", NULL), 0);
    CUstream t = stream();
    launch(t, 1000);
    CHECK_EQUAL(cuStreamSynchronize(t), CUDA_SUCCESS);
    job helper = {.stream = t, .launches = 4, .block_ns = 1000};
    run(&helper);
    rigel_client_leave();
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    WAIT_FOR(calls_of(slot_of("process"), RG_OP_cuLaunchKernel) == 6);
    WAIT_FOR(calls_of(slot_of("process"), RG_OP_cuCtxSynchronize) == 1);
    CHECK_EQUAL(calls_of(slot_of("process"), RG_OP_cuStreamSynchronize), 0);
    CHECK_EQUAL(calls_of(slot_of("a"), RG_OP_cuLaunchKernel), 3);
    CHECK_EQUAL(calls_of(slot_of("b"), RG_OP_cuLaunchKernel), 5);
    CHECK_EQUAL(calls_of(slot_of("b"), RG_OP_cuStreamSynchronize), 1);
    launch(s, 1000);
    rigel_shutdown(); /* counts are final at once */
    CHECK_EQUAL(calls_of(slot_of("process"), RG_OP_cuLaunchKernel), 7);
    done();
}

static _Atomic bool enters;

static void *add_meanwhile(void *own)
{
    WAIT_FOR(atomic_load(&enters));
    usleep(2000);
    atomic_store(&((rg_own_calls *)own)->busy, 0);
    return NULL;
}

/* A thread becomes another client while the agent is adding up what it has called: that stays the former one's. */
static void calls_stay_with_the_client_that_made_them(void)
{
    become("best-effort");
    CUstream s = stream();
    for (int i = 0; i < 6; i++)
        launch(s, 1000);
    WAIT_FOR(atomic_exchange(&rg_this.calls->busy, 1) == 0); /* as the agent, which has gone past them */
    pthread_t t;
    CHECK_EQUAL(pthread_create(&t, NULL, add_meanwhile, rg_this.calls), 0);
    atomic_store(&enters, true);
    CHECK_EQUAL(rigel_client_enter("a", NULL), 0);
    launch(NULL, 1000);
    CHECK_EQUAL(pthread_join(t, NULL), 0);
    rigel_shutdown();
    CHECK_EQUAL(calls_of(slot_of("process"), RG_OP_cuLaunchKernel), 6);
    CHECK_EQUAL(calls_of(slot_of("a"), RG_OP_cuLaunchKernel), 1);
    done();
}

static const _Atomic uint64_t *misuse(uint64_t number)
{
    const _Atomic uint64_t *entry = &rg.slot->misuse_ring[number % RG_MISUSES * RG_MISUSE_WORDS];
    CHECK_EQUAL(entry[0], number);
    return entry;
}

static void handles_in_a_wrong_context_are_named(void)
{
    become("best-effort");
    CUstream s = stream();
    CUevent e;
    CHECK_EQUAL(cuEventCreate(&e, 2), CUDA_SUCCESS);
    launch(s, 1000);
    CHECK_EQUAL(rg.slot->misuses, 0);
    CHECK_EQUAL(rg.slot->contexts[0], (uint64_t)(uintptr_t)context);
    CHECK_EQUAL(rg.slot->contexts[1], 1);
    CUcontext other;
    CHECK_EQUAL(cu.cuCtxCreate_v2(&other, 0, 0), CUDA_SUCCESS);
    CHECK_EQUAL(cuCtxSetCurrent(other), CUDA_SUCCESS);
    CUstream t = stream();
    CHECK(cuEventRecord(e, t) != CUDA_SUCCESS); /* an event of the first context, a stream of the second */
    CHECK_EQUAL(rg.slot->misuses, 1);
    CHECK_EQUAL(misuse(1)[1] >> 32, RG_OP_cuEventRecord);
    CHECK_EQUAL(misuse(1)[1] & UINT32_MAX, gettid());
    CHECK_EQUAL(misuse(1)[3], (uint64_t)(uintptr_t)other);
    CHECK_EQUAL(misuse(1)[4], (uint64_t)(uintptr_t)context);
    CHECK_EQUAL(misuse(1)[5], (uint64_t)(uintptr_t)e);
    CHECK_EQUAL(cuCtxSetCurrent(context), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamDestroy_v2(s), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamSynchronize(s), CUDA_ERROR_INVALID_HANDLE);
    CHECK_EQUAL(rg.slot->misuses, 2);
    CHECK_EQUAL(misuse(2)[2] >> 32, CUDA_ERROR_INVALID_HANDLE);
    CHECK_EQUAL(misuse(2)[4], RG_CONTEXT_GONE);
    CHECK_EQUAL(cuCtxDestroy_v2(other), CUDA_SUCCESS);
    CHECK_EQUAL(cuCtxSetCurrent(context), CUDA_SUCCESS);
    CHECK(cuStreamSynchronize(t) != CUDA_SUCCESS); /* it went with its context */
    CHECK_EQUAL(misuse(3)[4], RG_CONTEXT_GONE);
    launch(NULL, 1000);
    CHECK_EQUAL(rg.slot->misuses, 3);
    done();
}

static void waits_with_a_wrong_event_are_named(void)
{
    become("best-effort");
    CUstream s = stream();
    CUevent e, f, gone;
    CHECK_EQUAL(cuEventCreate(&e, 0), CUDA_SUCCESS);
    CHECK_EQUAL(cuEventCreate(&gone, 2), CUDA_SUCCESS);
    CHECK_EQUAL(cuEventRecord(e, s), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamWaitEvent(s, e, 0), CUDA_SUCCESS);
    CUcontext other;
    CHECK_EQUAL(cuCtxCreate_v2(&other, 0, 0), CUDA_SUCCESS);
    CHECK_EQUAL(cuEventCreate(&f, 0), CUDA_SUCCESS);
    CUstream t = stream();
    CHECK_EQUAL(cuEventRecord(f, t), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamWaitEvent(t, e, 0), CUDA_SUCCESS); /* a stream may wait for another context */
    CHECK_EQUAL(rg.slot->misuses, 0);
    float ms;
    CHECK_EQUAL(cuEventElapsedTime(&ms, e, f), CUDA_ERROR_INVALID_HANDLE);
    CHECK_EQUAL(rg.slot->misuses, 1);
    CHECK_EQUAL(misuse(1)[1] >> 32, RG_OP_cuEventElapsedTime);
    CHECK_EQUAL(misuse(1)[3], (uint64_t)(uintptr_t)other);
    CHECK_EQUAL(misuse(1)[4], (uint64_t)(uintptr_t)context);
    CHECK_EQUAL(cuEventDestroy_v2(gone), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamWaitEvent(s, gone, 0), CUDA_ERROR_INVALID_HANDLE);
    CHECK_EQUAL(rg.slot->misuses, 2);
    CHECK_EQUAL(misuse(2)[1] >> 32, RG_OP_cuStreamWaitEvent);
    CHECK_EQUAL(misuse(2)[4], RG_CONTEXT_GONE);
    CHECK_EQUAL(misuse(2)[5], (uint64_t)(uintptr_t)gone);
    done();
}

/* As the driver says it, after every way to change it. */
static void the_current_context_of_a_thread_is_known(void)
{
    become("best-effort");
    CHECK_EQUAL(cuCtxSetCurrent(context), CUDA_SUCCESS);
    CUstream s = stream();
    launch(s, 1000);
    CHECK_EQUAL(rg_this.row->context, (uint64_t)(uintptr_t)context);
    CUcontext made, ignored;
    CHECK_EQUAL(cuCtxCreate_v2(&made, 0, 0), CUDA_SUCCESS);
    CHECK_EQUAL(rg_this.row->context, (uint64_t)(uintptr_t)made);
    CHECK_EQUAL(cuCtxPushCurrent_v2(context), CUDA_SUCCESS);
    CHECK_EQUAL(rg_this.row->context, (uint64_t)(uintptr_t)context);
    CHECK_EQUAL(cuCtxPopCurrent_v2(&ignored), CUDA_SUCCESS);
    CHECK_EQUAL(rg_this.row->context, (uint64_t)(uintptr_t)made);
    CHECK_EQUAL(cuCtxDestroy_v2(made), CUDA_SUCCESS);
    CHECK_EQUAL(rg_this.row->context, (uint64_t)(uintptr_t)context);
    CHECK_EQUAL(cuCtxPopCurrent_v2(&ignored), CUDA_SUCCESS);
    CHECK_EQUAL(rg_this.row->context, 0);
    CHECK_EQUAL(rg.slot->misuses, 0);
    done();
}

/* It goes on with the stream that it had: the driver lets that through. */
static void the_stream_of_the_context_before_is_named(void)
{
    become("best-effort");
    CHECK_EQUAL(cuCtxSetCurrent(context), CUDA_SUCCESS);
    CUstream s = stream();
    CUdeviceptr p;
    CHECK_EQUAL(cuMemAlloc_v2(&p, 64), CUDA_SUCCESS);
    CHECK_EQUAL(cuMemsetD8Async(p, 1, 64, s), CUDA_SUCCESS);
    CUcontext other;
    CHECK_EQUAL(cuCtxCreate_v2(&other, 0, 0), CUDA_SUCCESS);
    for (int i = 0; i < 2; i++) {
        CHECK_EQUAL(cuMemsetD8Async(p, 1, 64, s), CUDA_SUCCESS);
        CHECK_EQUAL(rg.slot->misuses, 1); /* once for as long as it stays there */
        CHECK_EQUAL(rg_this.row->context, (uint64_t)(uintptr_t)other);
        CHECK_EQUAL(rg_this.row->stream, (uint64_t)(uintptr_t)s);
    }
    CHECK_EQUAL(misuse(1)[2] >> 32, CUDA_SUCCESS);
    CHECK_EQUAL(misuse(1)[3], (uint64_t)(uintptr_t)other);
    CHECK_EQUAL(misuse(1)[4], (uint64_t)(uintptr_t)context);
    CHECK_EQUAL(cuCtxSetCurrent(context), CUDA_SUCCESS);
    CHECK_EQUAL(cuMemsetD8Async(p, 1, 64, s), CUDA_SUCCESS);
    CHECK_EQUAL(rg.slot->misuses, 1);
    done();
}

/* A thread of a serving process that is on another device in its next request. */
static void a_thread_that_changes_its_device(void)
{
    setenv("RIGEL_SIM_DEVICES", "2", 1);
    become("best-effort");
    CUcontext second;
    CHECK_EQUAL(cu.cuDevicePrimaryCtxRetain(&second, 1), CUDA_SUCCESS);
    for (int request = 0; request < 4; request++) {
        rigel_request_begin();
        CHECK_EQUAL(cuCtxSetCurrent(request < 2 ? context : second), CUDA_SUCCESS);
        CUdeviceptr p = 0;
        CHECK_EQUAL(cuMemAlloc_v2(&p, 64), CUDA_SUCCESS);
        CHECK_EQUAL(cuMemsetD8_v2(p, 1, 64), CUDA_SUCCESS);
        rigel_request_end();
    }
    CHECK_EQUAL(rg.slot->moves, 1);
    CHECK_EQUAL(rg_this.row->moves, 1);
    CHECK_EQUAL(rg.slot->devices, 3);
    CHECK_EQUAL(rg.slot->contexts[2], (uint64_t)(uintptr_t)second);
    CHECK_EQUAL(rg.slot->contexts[3], 2);
    done();
}

/* Whether it can be taken off the GPU is said for each device. */
static void preemption_is_said_for_each_device(void)
{
    setenv("RIGEL_SIM_DEVICES", "2", 1);
    become("best-effort");
    seg->settings.preempt = 1;
    launch(NULL, 1000);
    CUcontext second;
    CHECK_EQUAL(cu.cuDevicePrimaryCtxRetain(&second, 1), CUDA_SUCCESS);
    WAIT_FOR(atomic_load(&rg_share_of(seg, 0, rg.slot_index)->preemption) == RG_PREEMPTION_ON);
    CHECK_EQUAL(rg_share_of(seg, 1, rg.slot_index)->preemption, RG_PREEMPTION_UNKNOWN);
    CHECK_EQUAL(cuCtxSetCurrent(second), CUDA_SUCCESS);
    CUdeviceptr p = 0;
    CHECK_EQUAL(cuMemAlloc_v2(&p, 64), CUDA_SUCCESS);
    CHECK_EQUAL(cuMemsetD8_v2(p, 1, 64), CUDA_SUCCESS);
    WAIT_FOR(atomic_load(&rg_share_of(seg, 1, rg.slot_index)->preemption) == RG_PREEMPTION_ON);
    WAIT_FOR(atomic_load(&rg.slot->preemption) == RG_PREEMPTION_ON);
    CHECK_EQUAL(rg_share_of(seg, 1, rg.slot_index)->slice_us, 2048);
    done();
}

/* ---- tracks of per-thread streams ---- */

enum { THREADS = 40 };
static pthread_barrier_t launched, looked;

/* A stream of this thread's for each of nine clients. */
static void *fill_tracks(void *unused)
{
    CHECK_EQUAL(cu.cuCtxSetCurrent(context), CUDA_SUCCESS);
    launch(CU_STREAM_PER_THREAD, 1000);
    for (int i = 0; i < 8; i++) {
        char name[] = {'m', (char)('0' + i), 0};
        CHECK_EQUAL(rigel_client_enter(name, "best-effort"), 0);
        launch(CU_STREAM_PER_THREAD, 1000);
        rigel_client_leave();
    }
    pthread_barrier_wait(&launched);
    pthread_barrier_wait(&looked);
    return unused;
}

static int tracks_of_threads(void)
{
    int n = 0;
    for (int i = 0; i < RG_MAX_TRACKS; i++)
        n += rg.tracks[i].key && rg.tracks[i].owner;
    return n;
}

/* More streams than there is room for take no place from a thread that is there: it may be at the gate with its track in hand. */
static void a_track_goes_with_its_thread(void)
{
    become("best-effort");
    CHECK_EQUAL(rigel_client_enter("mine", "best-effort"), 0);
    launch(CU_STREAM_PER_THREAD, 1000);
    uintptr_t key = rg_track_key(CU_STREAM_PER_THREAD);
    const rg_track *mine = rg_track_find(key);
    CHECK(mine != NULL);
    uint32_t serial = mine->serial;
    pthread_t threads[THREADS];
    pthread_barrier_init(&launched, NULL, THREADS + 1);
    pthread_barrier_init(&looked, NULL, THREADS + 1);
    for (int i = 0; i < THREADS; i++)
        CHECK_EQUAL(pthread_create(&threads[i], NULL, fill_tracks, NULL), 0);
    pthread_barrier_wait(&launched);
    CHECK_EQUAL(tracks_of_threads(), RG_MAX_TRACKS);
    CHECK(rg_track_find(key) == mine);
    CHECK_EQUAL(mine->serial, serial);
    pthread_barrier_wait(&looked);
    for (int i = 0; i < THREADS; i++)
        CHECK_EQUAL(pthread_join(threads[i], NULL), 0);
    CHECK_EQUAL(tracks_of_threads(), 1);
    launch(CU_STREAM_PER_THREAD, 1000);
    CHECK_EQUAL(mine->serial, serial);
    CHECK_EQUAL(rg_launches(rg.slot), THREADS);
    done();
}

/* ---- all at once ---- */

static _Atomic bool enough;

static void *come_and_go(void *argument)
{
    static const char *const names[8] = {"m0", "m1", "m2", "m3", "m4", "m5", "m6", "m7"};
    unsigned seed = (unsigned)(uintptr_t)argument * 7919 + 1;
    CHECK_EQUAL(cu.cuCtxSetCurrent(context), CUDA_SUCCESS);
    for (int round = 0; round < 6 || (getenv("TEST_SECONDS") && !atomic_load(&enough)); round++) {
        int which = rand_r(&seed) % 9;
        if (which < 8)
            CHECK_EQUAL(rigel_client_enter(names[which], which % 4 == 0 ? "high" : "best-effort"), 0);
        rigel_request_begin();
        CUstream own = stream(), *streams[] = {&own, &(CUstream){NULL}, &(CUstream){CU_STREAM_PER_THREAD}};
        for (int i = 0; i < 8; i++)
            launch(*streams[rand_r(&seed) % 3], 1000);
        CHECK_EQUAL(round % 2 ? cuStreamSynchronize(own) : cuCtxSynchronize(), CUDA_SUCCESS);
        rigel_request_end();
        CHECK_EQUAL(cuStreamDestroy_v2(own), CUDA_SUCCESS);
        if (which < 8)
            rigel_client_leave();
    }
    return (void *)(uintptr_t)rand_r(&seed);
}

static void many_threads_come_and_go(void)
{
    become("best-effort");
    seg->settings.starvation_us = 2000;
    seg->settings.quiet_us = 250;
    pthread_t threads[32];
    for (uintptr_t i = 0; i < 32; i++)
        CHECK_EQUAL(pthread_create(&threads[i], NULL, come_and_go, (void *)i), 0);
    if (getenv("TEST_SECONDS")) {
        alarm(100 + (unsigned)atoi(getenv("TEST_SECONDS")));
        sleep((unsigned)atoi(getenv("TEST_SECONDS")));
        atomic_store(&enough, true);
    }
    for (int i = 0; i < 32; i++)
        CHECK_EQUAL(pthread_join(threads[i], NULL), 0);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    uint64_t launches = 0, reports = 0;
    for (uint32_t i = 0; i < rg.member_count; i++) {
        launches += rg_launches(rg.members[i].slot);
        reports += rg.members[i].slot->reports;
        CHECK_EQUAL(rg.members[i].threads, 0);
        if (i)
            CHECK_EQUAL(rg.members[i].slot->parent, rg.slot_index + 1);
    }
    CHECK_EQUAL(launches, reports * 8);
    CHECK(reports >= 32 * 6);
    WAIT_FOR(seg->devices[0].high_busy == 0);
    done();
}

int main(int argc, char **argv)
{
    (void)argc;
    ensure_environment("LD_LIBRARY_PATH", in_build_folder("sim"), argv);
    int failures = 0;
    RUN(each_client_has_its_own_counts);
    RUN(each_client_pays_for_its_own_launches);
    RUN(a_slot_is_no_former_clients);
    RUN(a_stream_belongs_to_a_client);
    RUN(a_stream_changes_hands_amid_a_launch);
    RUN(entering_as_rigel_leaves);
    RUN(a_capture_is_its_threads);
    RUN(a_child_ends_its_parents_capture);
    RUN(entering_before_the_driver);
    RUN(what_cannot_be_entered);
    RUN(requests_are_the_threads_clients);
    RUN(a_request_may_have_those_of_other_clients_in_it);
    RUN(threads_that_are_no_client_pass_through);
    RUN(a_thread_waits_for_a_high_one_beside_it);
    RUN(a_launch_ends_as_what_it_was_begun_as);
    RUN(streams_that_went_with_their_context_are_nobodys);
    RUN(a_thread_with_pythons_lock_does_not_wait);
    RUN(a_process_with_a_high_thread_is_not_suspended);
    RUN(a_process_that_gets_a_high_thread_is_not_preemptible);
    RUN(new_by_the_launches_of_all_its_clients);
    RUN(idle_beside_a_thread_that_never_rests);
    RUN(calls_are_counted_by_client_and_operation);
    RUN(calls_stay_with_the_client_that_made_them);
    RUN(handles_in_a_wrong_context_are_named);
    RUN(waits_with_a_wrong_event_are_named);
    RUN(the_current_context_of_a_thread_is_known);
    RUN(the_stream_of_the_context_before_is_named);
    RUN(a_thread_that_changes_its_device);
    RUN(preemption_is_said_for_each_device);
    RUN(a_track_goes_with_its_thread);
    RUN(many_threads_come_and_go);
    return failures ? 1 : 0;
}
