/*
 * test-gate.c: what a best-effort client does at the gate, and under fair every client, on the simulated GPU.
 *
 * The client's parts are linked into this program (so that sanitizers see them); the hooks are called by name, and reach the
 * simulated libcuda.so.1. Each case is a process. What a launch waits for, the test sets itself (gate-testing.h).
 */
#include "gate-testing.h"

#include <sys/prctl.h>

/* ---- best-effort ---- */

static _Atomic int launched;
static void *launch_one(void *context)
{
    CHECK_EQUAL(cu.cuCtxSetCurrent((CUcontext)context), CUDA_SUCCESS);
    launch(spin, NULL, 1000);
    atomic_store(&launched, 1);
    return NULL;
}

static void waits_while_high_is_busy(void)
{
    become("best-effort");
    launch(spin, NULL, 1000);
    other_busy(true);
    pthread_t thread;
    CHECK_EQUAL(pthread_create(&thread, NULL, launch_one, current()), 0);
    WAIT_FOR(atomic_load(&seg->devices[0].waiters) == 1);
    CHECK_EQUAL(atomic_load(&launched), 0);
    other_busy(false);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    CHECK_EQUAL(rg_launches(rg.slot), 2);
    CHECK_EQUAL(rg.slot->gate_waits, 1);
    CHECK(rg.slot->gate_wait_ns > 0);
    CHECK_EQUAL(rg.slot->starved, 0);
    CHECK_EQUAL(seg->devices[0].waiters, 0);
    done();
}

/* Beside a request of which a part is launched it goes on, within its limit; later it waits. */
static void goes_on_for_a_part_of_a_request(void)
{
    become("best-effort");
    launch(spin, NULL, 1000);
    rg_share *share = rg_share_of(seg, 0, OTHER);
    atomic_store(&share->usual_launches, 100);
    atomic_store(&share->usual_votes, 800);
    seg->settings.defer_ppm = 400000;
    seg->settings.starvation_us = 600000000;
    rg_device_busy(&seg->devices[0], OTHER, rg_now_ns());
    rg_device_launching(&seg->devices[0], OTHER, true);
    atomic_store(&seg->clients[OTHER].launches[0], 39);
    for (int i = 0; i < 30; i++)
        launch(spin, NULL, 1000);
    CHECK_EQUAL(rg.slot->gate_waits, 0);
    CHECK(rg.slot->inflight_waits > 0);
    atomic_store(&seg->clients[OTHER].launches[0], 40);
    usleep(1000); /* it looks again after 0.2 ms at most */
    pthread_t thread;
    CHECK_EQUAL(pthread_create(&thread, NULL, launch_one, current()), 0);
    WAIT_FOR(atomic_load(&seg->devices[0].waiters) == 1);
    CHECK_EQUAL(atomic_load(&launched), 0);
    rg_device_idle(&seg->devices[0], OTHER, rg_now_ns());
    rg_device_wake(&seg->devices[0]);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    CHECK_EQUAL(rg.slot->gate_waits, 1);
    done();
}

static void starvation_bound_lets_one_batch_out(void)
{
    become("best-effort");
    seg->settings.starvation_us = 1000;
    launch(spin, NULL, 1000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    other_busy(true);
    for (int i = 0; i < 8; i++) /* the in-flight limit: one starvation period is enough for all */
        launch(spin, NULL, 1000);
    CHECK_EQUAL(rg.slot->starved, 1);
    launch(spin, NULL, 1000);
    CHECK_EQUAL(rg.slot->starved, 2);
    CHECK(busy_word() == 1ull << OTHER);
    CHECK(seg->devices[0].paid_ns > 0); /* of the least share */
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL; /* the thread's own again */
    CHECK_EQUAL(rg_real.cuThreadExchangeStreamCaptureMode(&mode), CUDA_SUCCESS);
    CHECK_EQUAL(mode, CU_STREAM_CAPTURE_MODE_GLOBAL);
    done();
}

/* What is left of a batch when the high client becomes idle does not let anything into its next request. */
static void a_batch_ends_as_high_is_idle(void)
{
    become("best-effort");
    seg->settings.starvation_us = 1000;
    seg->settings.unit_us = 0;
    launch(spin, NULL, 1000);
    other_busy(true);
    launch(spin, NULL, 1000);
    CHECK_EQUAL(rg.slot->starved, 1);
    other_busy(false);
    seg->settings.starvation_us = 600000000;
    while (!rg.slot->inflight_waits)
        launch(spin, NULL, 20000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    other_busy(true);
    seg->settings.starvation_us = 1000;
    launch(spin, NULL, 1000);
    CHECK_EQUAL(rg.slot->starved, 2);
    done();
}

static void a_capture_lets_out_who_waits(void)
{
    become("best-effort");
    CUstream s;
    CUgraph graph;
    CHECK_EQUAL(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    launch(spin, NULL, 1000);
    other_busy(true);
    pthread_t thread;
    CHECK_EQUAL(pthread_create(&thread, NULL, launch_one, current()), 0);
    WAIT_FOR(atomic_load(&seg->devices[0].waiters) == 1);
    CHECK_EQUAL(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    CHECK_EQUAL(rg.slot->starved, 0);
    CHECK_EQUAL(cuStreamEndCapture(s, &graph), CUDA_SUCCESS);
    done();
}

static void a_capture_lets_out_who_is_paused(void)
{
    become("best-effort");
    CUstream s;
    CUgraph graph;
    CHECK_EQUAL(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    launch(spin, NULL, 1000);
    atomic_store(&rg.account->paused_until_ns, UINT64_MAX);
    WAIT_FOR(rg_member_is_paused(RG_PROCESS));
    pthread_t thread;
    CHECK_EQUAL(pthread_create(&thread, NULL, launch_one, current()), 0);
    WAIT_FOR(atomic_load(&rg_gate_held) == 1);
    CHECK_EQUAL(atomic_load(&launched), 0);
    CHECK_EQUAL(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    CHECK(rg_member_is_paused(RG_PROCESS));
    CHECK_EQUAL(cuStreamEndCapture(s, &graph), CUDA_SUCCESS);
    done();
}

static CUstream captured;
static CUresult query_as_a_capture_begins(CUevent event)
{
    (void)event;
    if (!atomic_load(&rg.captures)) {
        pthread_mutex_unlock(&rg_agent_lock);
        CHECK_EQUAL(cuStreamBeginCapture_v2(captured, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    }
    return CUDA_ERROR_NOT_READY;
}

/* Nor does who waits record an event once one has begun: it may be on that very stream. */
static void no_event_is_recorded_in_a_capture(void)
{
    become("best-effort");
    rg_agent_stop();
    seg->settings.unit_us = 0;
    seg->settings.spin_us = 0;
    CUstream s;
    CUgraph graph;
    CHECK_EQUAL(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamCreate(&captured, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    for (int i = 0; i < 8; i++) /* half a batch follows the first four, and no event the others yet */
        launch(spin, i < 4 ? NULL : i < 7 ? s : captured, 1000);
    const rg_track *t = rg_track_find(rg_track_key(s));
    CHECK_EQUAL(t->unbatched, 3 * RG_POLICY_LAUNCH);
    rg_real.hooked[RG_HOOK_cuEventQuery] = (void *)query_as_a_capture_begins;
    pthread_mutex_lock(&rg_agent_lock); /* somebody else has it as the wait begins, so that nothing is recorded then */
    launch(spin, NULL, 1000);
    CHECK_EQUAL(rg.slot->inflight_waits, 1);
    CHECK_EQUAL(rg.captures, 1);
    CHECK_EQUAL(t->unbatched, 3 * RG_POLICY_LAUNCH);
    CHECK_EQUAL(cuStreamEndCapture(captured, &graph), CUDA_SUCCESS);
    CHECK_EQUAL(rg.slot->starved, 0);
    done();
}

static const rg_track *_Atomic of_a_thread;
static _Atomic int may_end;
static void *launch_on_its_own_stream(void *context)
{
    CHECK_EQUAL(cu.cuCtxSetCurrent((CUcontext)context), CUDA_SUCCESS);
    for (int i = 0; i < 66; i++) /* more than there are events to follow them */
        launch(spin, CU_STREAM_PER_THREAD, 1000);
    atomic_store(&of_a_thread, rg_track_find(rg_track_key(CU_STREAM_PER_THREAD)));
    WAIT_FOR(atomic_load(&may_end));
    return NULL;
}

/* Another thread's per-thread stream cannot be named: what this thread would record on is its own. */
static void nobody_records_on_a_threads_own_stream(void)
{
    become("best-effort");
    seg->settings.unit_us = 0;
    seg->settings.inflight = 100;
    CHECK_EQUAL(rg_real.rigelSimSuspend(0, 1), 0);
    pthread_t thread;
    CHECK_EQUAL(pthread_create(&thread, NULL, launch_on_its_own_stream, current()), 0);
    WAIT_FOR(atomic_load(&of_a_thread));
    uint32_t unbatched = atomic_load(&of_a_thread->unbatched);
    CHECK_EQUAL(unbatched, 2 * RG_POLICY_LAUNCH);
    CHECK_EQUAL(rg_real.rigelSimSuspend(0, 0), 0);
    seg->settings.inflight = 2;
    seg->settings.starvation_us = 100000; /* nothing else lets it out */
    launch(spin, NULL, 1000);
    CHECK_EQUAL(atomic_load(&of_a_thread->unbatched), unbatched);
    CHECK(RG_PROCESS->inflight[0] >= unbatched);
    atomic_store(&may_end, 1);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    done();
}

static CUresult no_record(CUevent event, CUstream s)
{
    (void)event, (void)s;
    return CUDA_ERROR_INVALID_HANDLE;
}

static CUresult no_query(CUevent event)
{
    (void)event;
    return CUDA_ERROR_ILLEGAL_ADDRESS;
}

/* What no event tells of counts as done: nobody would ever learn that it is. */
static void what_cannot_be_followed_holds_nobody(void)
{
    become("best-effort");
    seg->settings.unit_us = 0;
    void *query = rg_real.hooked[RG_HOOK_cuEventQuery];
    rg_real.hooked[RG_HOOK_cuEventQuery] = (void *)no_query;
    for (int i = 0; i < 100; i++)
        launch(spin, NULL, 1000);
    CHECK(rg.slot->inflight_waits > 0);
    rg_real.hooked[RG_HOOK_cuEventQuery] = query;
    rg_real.hooked[RG_HOOK_cuEventRecord] = (void *)no_record;
    for (int i = 0; i < 100; i++)
        launch(spin, NULL, 1000);
    CHECK_EQUAL(rg.slot->starved, 0);
    CHECK(RG_PROCESS->inflight[0] <= 8 * RG_POLICY_LAUNCH);
    done();
}

/* Nor does what has gone with its stream, or its context, whether or not an event follows it. */
static void what_has_gone_holds_nobody(void)
{
    become("best-effort");
    seg->settings.unit_us = 0;
    seg->settings.inflight = 64;
    CUcontext first = current(), own_context;
    CUstream s;
    CHECK_EQUAL(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    launch(spin, s, 1000);
    CHECK_EQUAL(RG_PROCESS->inflight[0], RG_POLICY_LAUNCH);
    CHECK_EQUAL(cuStreamDestroy_v2(s), CUDA_SUCCESS);
    CHECK_EQUAL(RG_PROCESS->inflight[0], 0);
    CHECK_EQUAL(cu.cuCtxCreate_v2(&own_context, 0, 0), CUDA_SUCCESS);
    load_kernels(ptx);
    for (int i = 0; i < 40; i++) /* more than go without an event */
        launch(spin, NULL, 1000);
    CHECK_EQUAL(RG_PROCESS->inflight[0], 40 * RG_POLICY_LAUNCH);
    CHECK(rg_track_find(rg_track_key(NULL))->unbatched < 40 * RG_POLICY_LAUNCH);
    CHECK_EQUAL(cuCtxDestroy_v2(own_context), CUDA_SUCCESS);
    CHECK_EQUAL(RG_PROCESS->inflight[0], 0);
    CHECK_EQUAL(cuCtxSetCurrent(first), CUDA_SUCCESS);
    done();
}

/* And no more than that: neither what was done by then, nor what there is in another context. */
static void what_has_gone_counts_as_done_once(void)
{
    become("best-effort");
    seg->settings.unit_us = 0;
    CUcontext first = current(), own_context;
    CUfunction first_spin = spin;
    CHECK_EQUAL(cu.cuCtxCreate_v2(&own_context, 0, 0), CUDA_SUCCESS);
    load_kernels(ptx);
    for (int i = 0; i < 8; i++)
        launch(spin, NULL, 1000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    for (int i = 0; i < 4; i++) /* the first finds that those are done, and an event follows these: the other one is free */
        launch(spin, NULL, 1000);
    CHECK_EQUAL(RG_PROCESS->inflight[0], 4 * RG_POLICY_LAUNCH);
    CHECK_EQUAL(cuCtxSetCurrent(first), CUDA_SUCCESS);
    for (int i = 0; i < 3; i++)
        launch(first_spin, NULL, 3600000000000);
    CHECK_EQUAL(cuCtxDestroy_v2(own_context), CUDA_SUCCESS);
    CHECK_EQUAL(cuCtxSetCurrent(first), CUDA_SUCCESS);
    CHECK_EQUAL(RG_PROCESS->inflight[0], 3 * RG_POLICY_LAUNCH);
    seg->settings.inflight = 3;
    seg->settings.starvation_us = 1000;
    launch(first_spin, NULL, 1000); /* asks for all that is not done */
    CHECK_EQUAL(RG_PROCESS->inflight[0], 4 * RG_POLICY_LAUNCH);
    done();
    _exit(0); /* the simulated GPU would be waited for */
}

/* More streams than are followed at once: those that go make room, and the others stay where they are found. */
static void streams_that_go_make_room(void)
{
    enum { STREAMS = RG_MAX_TRACKS + 1 };
    become("best-effort");
    seg->settings.inflight = 0;
    CUstream streams[STREAMS];
    rg_track *tracks[STREAMS];
    for (int i = 0; i < STREAMS; i++) {
        CHECK_EQUAL(cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
        launch(spin, streams[i], 1000);
        tracks[i] = rg_track_find((uintptr_t)streams[i]);
    }
    CHECK_EQUAL(rg.full, 1);
    CHECK(!tracks[STREAMS - 1]);
    for (int i = 0; i < STREAMS - 1; i += 3)
        CHECK_EQUAL(cuStreamDestroy_v2(streams[i]), CUDA_SUCCESS);
    for (int i = 0; i < STREAMS - 1; i++)
        CHECK(rg_track_find((uintptr_t)streams[i]) == (i % 3 ? tracks[i] : NULL));
    launch(spin, streams[STREAMS - 1], 1000);
    CHECK(rg_track_find((uintptr_t)streams[STREAMS - 1]) != NULL);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    /* Those that have their place in the index in common. */
    uintptr_t keys[3];
    int n = 0;
    for (uintptr_t key = 0x10000000; n < 3; key += 16)
        if (rg_track_hash(key) == RG_TRACK_INDEX - 1) /* and wraps round */
            keys[n++] = key;
    for (int i = 0; i < 3; i++) {
        tracks[i] = rg_track_add(NULL, keys[i]);
        CHECK(tracks[i] != NULL);
    }
    rg_track_forget((CUstream)keys[0]);
    CHECK(rg_track_find(keys[0]) == NULL);
    CHECK(rg_track_find(keys[1]) == tracks[1] && rg_track_find(keys[2]) == tracks[2]);
    done();
}

/* As many captures at once as there are places to remember them in, and more. */
static void many_captures_all_end(void)
{
    enum { STREAMS = 100 };
    become("best-effort");
    CUstream streams[STREAMS];
    CUgraph graph;
    for (int i = 0; i < STREAMS; i++) {
        CHECK_EQUAL(cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
        CHECK_EQUAL(cuStreamBeginCapture_v2(streams[i], CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    }
    CHECK_EQUAL(rg.captures, STREAMS);
    for (int i = 0; i < STREAMS; i++)
        CHECK_EQUAL(cuStreamEndCapture(streams[i], &graph), CUDA_SUCCESS);
    CHECK_EQUAL(rg.captures, 0);
    done();
}

/* How many threads are at this. */
static uint32_t threads_at(uint32_t operation)
{
    uint32_t n = 0;
    for (int i = 0; i < RG_MAX_THREADS; i++)
        n += atomic_load(&seg->threads[rg.slot_index * RG_MAX_THREADS + i].doing) == (operation | RG_DOING);
    return n;
}

static CUdeviceptr large;
static char large_host[16];
static void *copy_large(void *context)
{
    CHECK_EQUAL(cu.cuCtxSetCurrent((CUcontext)context), CUDA_SUCCESS);
    CHECK_EQUAL(cuMemcpyHtoDAsync_v2(large, large_host, sizeof large_host, NULL), CUDA_SUCCESS);
    return NULL;
}

/* A client that is paused may hand small things over, as one that waits for a high client may. */
static void small_copies_pass_a_pause(void)
{
    become("best-effort");
    CHECK_EQUAL(cu.cuMemAlloc_v2(&large, sizeof large_host), CUDA_SUCCESS);
    launch(spin, NULL, 1000);
    atomic_store(&rg.account->paused_until_ns, UINT64_MAX);
    WAIT_FOR(atomic_load(&RG_PROCESS->mode) & RG_MODE_PAUSED);
    atomic_store(&seg->settings.bulk_bytes, sizeof large_host + 1);
    copy_large(current());
    CHECK_EQUAL(rg.slot->copies, 1);
    CHECK_EQUAL(rg.slot->paused_ns, 0);
    pthread_t threads[2];
    CHECK_EQUAL(pthread_create(&threads[0], NULL, launch_one, current()), 0);
    WAIT_FOR(atomic_load(&rg_gate_held) == 1);
    atomic_store(&seg->settings.bulk_bytes, sizeof large_host);
    CHECK_EQUAL(pthread_create(&threads[1], NULL, copy_large, current()), 0);
    WAIT_FOR(atomic_load(&rg_gate_held) == 2);
    WAIT_FOR(threads_at(RG_OP_paused) == 2);
    CHECK_EQUAL(atomic_load(&launched), 0);
    atomic_store(&seg->settings.shutdown, 1); /* as the launch ends, which holds nobody back any more */
    for (int i = 0; i < 2; i++)
        CHECK_EQUAL(pthread_join(threads[i], NULL), 0);
    CHECK(rg.slot->paused_ns > 0);
    done();
}

static void stale_high_client_is_ignored(void)
{
    become("best-effort");
    launch(spin, NULL, 1000);
    atomic_store(&seg->clients[OTHER].heartbeat_ns, 1);
    other_busy(true);
    launch(spin, NULL, 1000);
    CHECK_EQUAL(rg.slot->stale_cleared, 1);
    CHECK_EQUAL(busy_word(), 0);
    done();
}

static void shutdown_setting_opens_the_gate(void)
{
    become("best-effort");
    launch(spin, NULL, 1000);
    other_busy(true);
    pthread_t thread;
    CHECK_EQUAL(pthread_create(&thread, NULL, launch_one, current()), 0);
    WAIT_FOR(atomic_load(&seg->devices[0].waiters) == 1);
    atomic_store(&seg->settings.shutdown, 1);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    done();
}

/* The rest of the end has gone on: nobody is held any more, or so long has been waited for who is (gate.c, SETTLE_NS). */
static void was_waited_for(uint64_t since_ns)
{
    CHECK(atomic_load(&rg_gate_held) == 0 || rg_now_ns() - since_ns >= 50000000);
    WAIT_FOR(atomic_load(&rg_gate_held) == 0); /* who is held gets through, however little of a processor it has had */
}

/* As the program ends: whoever is at the gate gets through to the driver before the rest of the end goes on. */
static void the_end_waits_for_who_is_held(void)
{
    become("best-effort");
    launch(spin, NULL, 1000);
    CHECK_EQUAL(rg_gate_held, 0);
    other_busy(true);
    for (int paused = 0; paused < 2; paused++) {
        pthread_t thread;
        if (paused)
            atomic_fetch_or(&RG_PROCESS->mode, RG_MODE_PAUSED);
        CHECK_EQUAL(pthread_create(&thread, NULL, launch_one, current()), 0);
        WAIT_FOR(atomic_load(&rg_gate_held) == 1);
        pid_t child = fork(); /* which has nobody to wait for */
        if (child == 0)
            _exit(atomic_load(&rg_gate_held) == 0 ? 0 : 1);
        int status = -1;
        CHECK_EQUAL(waitpid(child, &status, 0), child);
        CHECK_EQUAL(status, 0);
        uint32_t mode = atomic_exchange(&rg.mode, RG_MODE_BARE);
        uint64_t since_ns = rg_now_ns();
        rg_gate_settle();
        was_waited_for(since_ns);
        CHECK_EQUAL(pthread_join(thread, NULL), 0);
        atomic_fetch_and(&RG_PROCESS->mode, ~(uint32_t)RG_MODE_PAUSED);
        atomic_store(&rg.mode, mode);
    }
    /* The thread that ends the program may be one that a handler has interrupted there. */
    rg_this.held = true;
    atomic_store(&rg_gate_held, 1);
    rg_gate_settle();
    rg_gate_called();
    CHECK_EQUAL(rg_gate_held, 0);
    other_busy(false);
    pthread_t thread;
    other_busy(true);
    CHECK_EQUAL(pthread_create(&thread, NULL, launch_one, current()), 0);
    WAIT_FOR(atomic_load(&rg_gate_held) == 1);
    uint64_t since_ns = rg_now_ns();
    rigel_shutdown();
    was_waited_for(since_ns);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    done();
}

static void policy_none_measures_only(void)
{
    become("best-effort");
    atomic_store(&seg->settings.policy, RG_POLICY_NONE);
    other_busy(true);
    for (int i = 0; i < 100; i++)
        launch(spin, NULL, 1000);
    CHECK_EQUAL(rg_launches(rg.slot), 100);
    CHECK_EQUAL(rg.slot->gate_waits + rg.slot->inflight_waits, 0);
    CHECK_EQUAL(rg.members[0].inflight[0], 0);
    done();
}

static void in_flight_is_limited(void)
{
    become("best-effort");
    seg->settings.unit_us = 0; /* each counts for one, however long it takes on a machine under load */
    CUstream streams[3];
    for (int i = 0; i < 3; i++)
        CHECK_EQUAL(cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    for (int i = 0; i < 300; i++) {
        launch(spin, streams[i % 3], 20000);
        CHECK(rg.members[0].inflight[0] < 9 * RG_POLICY_LAUNCH);
    }
    CHECK(rg.slot->inflight_waits > 0);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    done();
}

/* A kernel that never ends until its own program launches more (a spin-wait across streams) must not lock the program up. */
static void in_flight_wait_is_bounded(void)
{
    become("best-effort");
    seg->settings.starvation_us = 2000;
    prctl(PR_SET_TIMERSLACK, 70000);
    launch(spin, NULL, 3600000000000);
    for (int i = 0; i < 8; i++)
        launch(spin, NULL, 1000);
    CHECK(rg_launches(rg.slot) == 9);
    CHECK_EQUAL(rg.slot->inflight_waits, 1);
    CHECK_EQUAL(rg.slot->starved, 0); /* it is its own work that it waited for */
    CHECK_EQUAL(seg->devices[0].paid_ns, 0); /* no high client had to wait for it */
    CHECK_EQUAL(prctl(PR_GET_TIMERSLACK), 70000); /* the program's own again */
    done();
    _exit(0); /* the simulated GPU would be waited for */
}

/* Two devices, each current in turn. */
static CUcontext own[2];
static CUfunction own_spin[2];

static void become_on_two_devices(void)
{
    setenv("RIGEL_SIM_DEVICES", "2", 1);
    become("best-effort");
    own[0] = current();
    own_spin[0] = spin;
    CHECK_EQUAL(cu.cuDevicePrimaryCtxRetain(&own[1], 1), CUDA_SUCCESS);
    CHECK_EQUAL(cuCtxSetCurrent(own[1]), CUDA_SUCCESS);
    load_kernels(ptx);
    own_spin[1] = spin;
}

static void launch_on(int device, uint64_t block_ns)
{
    CHECK_EQUAL(cuCtxSetCurrent(own[device]), CUDA_SUCCESS);
    launch(own_spin[device], NULL, block_ns);
}

static _Atomic int through;
static void *launch_on_the_second(void *unused)
{
    while (!atomic_load(&through)) {
        launch_on(1, 1000);
        usleep(1000);
    }
    return unused;
}

/* What is unfinished on one GPU keeps nothing off another, be it that it never comes to an end. */
static void each_device_has_its_own_limit(void)
{
    become_on_two_devices();
    seg->settings.unit_us = 0;
    for (int i = 0; i < 8; i++)
        launch_on(0, 3600000000000);
    for (int i = 0; i < 8; i++)
        launch_on(1, 1000);
    CHECK_EQUAL(rg.slot->inflight_waits, 0);
    CHECK_EQUAL(RG_PROCESS->inflight[0], 8 * RG_POLICY_LAUNCH);
    for (int i = 0; i < 40; i++)
        launch_on(1, 1000);
    CHECK(RG_PROCESS->inflight[1] <= 8 * RG_POLICY_LAUNCH);
    CHECK_EQUAL(rg.slot->starved, 0);
    /* How well it goes on there puts the bound here off by nothing. */
    pthread_t thread;
    seg->settings.starvation_us = 500000; /* longer than it ever takes there */
    CHECK_EQUAL(pthread_create(&thread, NULL, launch_on_the_second, NULL), 0);
    launch_on(0, 1000);
    atomic_store(&through, 1);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    CHECK_EQUAL(RG_PROCESS->inflight[0], 9 * RG_POLICY_LAUNCH);
    done();
    _exit(0); /* the simulated GPU would be waited for */
}

/* An event that has told of work in one context is none for work in another: that would go unfollowed. */
static void each_context_has_its_own_events(void)
{
    become_on_two_devices();
    seg->settings.unit_us = 0;
    for (int i = 0; i < 8; i++)
        launch_on(0, 1000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    launch_on(0, 1000); /* finds that they are done */
    CHECK_EQUAL(RG_PROCESS->inflight[0], RG_POLICY_LAUNCH);
    for (int i = 0; i < 4; i++)
        launch_on(1, 1000);
    CHECK_EQUAL(RG_PROCESS->inflight[1], 4 * RG_POLICY_LAUNCH);
    done();
}

static CUresult (*real_query)(CUevent);
static uint32_t queries;
static CUresult query_slowly(CUevent event)
{
    if (!queries++)
        usleep(100000);
    return real_query(event);
}

/* Who sees that its work comes to an end waits for it from then on. */
static void the_bound_counts_from_what_ended_last(void)
{
    become("best-effort");
    rg_agent_stop();
    seg->settings.unit_us = 0;
    CUstream s;
    CHECK_EQUAL(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    for (int i = 0; i < 4; i++)
        launch(spin, NULL, 1000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    for (int i = 0; i < 4; i++)
        launch(spin, s, 3600000000000);
    *(void **)&real_query = rg_real.hooked[RG_HOOK_cuEventQuery];
    rg_real.hooked[RG_HOOK_cuEventQuery] = (void *)query_slowly;
    seg->settings.inflight = 4;
    seg->settings.starvation_us = 100000;
    launch(spin, NULL, 1000);
    CHECK_EQUAL(RG_PROCESS->inflight[0], 5 * RG_POLICY_LAUNCH);
    CHECK(rg.slot->inflight_wait_ns >= 200000000);
    done();
    _exit(0); /* the simulated GPU would be waited for */
}

/* A batch that the starvation bound lets out on one GPU is none on another. */
static void each_device_has_its_own_credit(void)
{
    become_on_two_devices();
    launch_on(0, 1000);
    launch_on(1, 1000);
    seg->settings.starvation_us = 2000;
    for (int i = 0; i < 2; i++)
        atomic_fetch_or(&seg->devices[i].high_busy, 1ull << OTHER);
    for (int i = 0; i < 6; i++)
        launch_on(i % 2, 1000);
    CHECK_EQUAL(rg.slot->gate_waits, 6);
    CHECK_EQUAL(rg.slot->starved, 2);
    done();
}

/* Kernels whose place in the table is the same keep an entry each, as long as there are no more than can be probed. */
static void kernels_that_share_a_place_are_all_known(void)
{
    rg_dims shapes[RG_DURATION_PROBES + 1];
    rg_duration *entries[RG_DURATION_PROBES];
    uint32_t found = 0;
    for (unsigned grid = 1; found < RG_DURATION_PROBES + 1; grid++) {
        rg_dims shape = rg_dims_of(grid, 1, 1, 32, 1, 1);
        if (rg_duration_key(64, shape) >> 52 == 4093) /* and wraps round */
            shapes[found++] = shape;
    }
    for (uint32_t i = 0; i < RG_DURATION_PROBES; i++) {
        entries[i] = rg_duration_of(rg_duration_key(64, shapes[i]));
        CHECK_EQUAL(entries[i]->seen, 0);
        atomic_store(&entries[i]->seen, i + 1);
        atomic_store(&entries[i]->duration_ns, 1000 * (i + 1));
    }
    for (uint32_t i = 0; i < RG_DURATION_PROBES; i++) {
        CHECK(rg_duration_of(rg_duration_key(64, shapes[i])) == entries[i]);
        CHECK_EQUAL(entries[i]->duration_ns, 1000 * (i + 1));
    }
    /* One more takes the first's place, and starts from nothing. */
    CHECK(rg_duration_of(rg_duration_key(64, shapes[RG_DURATION_PROBES])) == entries[0]);
    CHECK_EQUAL(entries[0]->seen + entries[0]->duration_ns, 0);
}

static void small_copies_pass_bulk_copies_wait(void)
{
    become("best-effort");
    CUdeviceptr p;
    static char host[1 << 17];
    CHECK_EQUAL(cu.cuMemAlloc_v2(&p, sizeof host), CUDA_SUCCESS);
    launch(spin, NULL, 1000);
    seg->settings.starvation_us = 1000;
    other_busy(true);
    CHECK_EQUAL(cuMemcpyHtoDAsync_v2(p, host, 65535, NULL), CUDA_SUCCESS);
    CHECK_EQUAL(cuMemsetD8Async(p, 0, 100, NULL), CUDA_SUCCESS);
    CHECK_EQUAL(rg.slot->gate_waits, 0);
    CHECK_EQUAL(cuMemcpyHtoDAsync_v2(p, host, 65536, NULL), CUDA_SUCCESS);
    CHECK_EQUAL(rg.slot->gate_waits, 1);
    CHECK_EQUAL(rg.slot->copies, 2);
    CHECK_EQUAL(rg.slot->memsets, 1);
    done();
}

/* What ranks and stages hand each other: whoever waits for it may be what this client waits for. */
static void copies_between_devices_never_wait(void)
{
    enum { BYTES = 1 << 17 };
    setenv("RIGEL_SIM_DEVICES", "2", 1);
    become("best-effort");
    CUdeviceptr here, too, there;
    CUcontext first = current(), second;
    CHECK_EQUAL(cu.cuMemAlloc_v2(&here, BYTES), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuMemAlloc_v2(&too, BYTES), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuDevicePrimaryCtxRetain(&second, 1), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuCtxSetCurrent(second), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuMemAlloc_v2(&there, BYTES), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuCtxSetCurrent(first), CUDA_SUCCESS);
    launch(spin, NULL, 1000);
    seg->settings.starvation_us = 1000;
    other_busy(true);
    CHECK_EQUAL(cuMemcpyAsync(there, here, BYTES, NULL), CUDA_SUCCESS);
    CHECK_EQUAL(cuMemcpyDtoDAsync_v2(here, there, BYTES, NULL), CUDA_SUCCESS);
    CHECK_EQUAL(cuMemcpy(there, here, BYTES), CUDA_SUCCESS);
    CHECK_EQUAL(cuMemcpyDtoD_v2(here, there, BYTES), CUDA_SUCCESS);
    CHECK_EQUAL(cuMemcpyPeer(there, second, here, first, BYTES), CUDA_SUCCESS);
    CHECK_EQUAL(cuMemcpyPeerAsync(there, second, here, first, BYTES, NULL), CUDA_SUCCESS);
    CUDA_MEMCPY2D lines = {.srcMemoryType = CU_MEMORYTYPE_DEVICE, .srcDevice = here, .dstMemoryType = CU_MEMORYTYPE_UNIFIED,
                           .dstDevice = there, .WidthInBytes = BYTES / 2, .Height = 2};
    CUDA_MEMCPY3D box = {.srcMemoryType = CU_MEMORYTYPE_DEVICE, .srcDevice = here, .dstMemoryType = CU_MEMORYTYPE_DEVICE,
                         .dstDevice = there, .WidthInBytes = BYTES / 4, .Height = 2, .Depth = 2};
    CHECK_EQUAL(cuMemcpy2D_v2(&lines), CUDA_SUCCESS);
    CHECK_EQUAL(cuMemcpy2DUnaligned_v2(&lines), CUDA_SUCCESS);
    CHECK_EQUAL(cuMemcpy2DAsync_v2(&lines, NULL), CUDA_SUCCESS);
    CHECK_EQUAL(cuMemcpy3D_v2(&box), CUDA_SUCCESS);
    CHECK_EQUAL(cuMemcpy3DAsync_v2(&box, NULL), CUDA_SUCCESS);
    CHECK_EQUAL(cuMemcpy3DPeer(&box), CUDA_SUCCESS);
    CHECK_EQUAL(cuMemcpy3DPeerAsync(&box, NULL), CUDA_SUCCESS);
    CUdeviceptr to[] = {too, there}, from[] = {here, here};
    size_t sizes[] = {BYTES, 1};
    CHECK_EQUAL(cuMemcpyBatchAsync_v2(to, from, sizes, 2, NULL, NULL, 0, NULL), CUDA_SUCCESS);
    CHECK_EQUAL(rg.slot->gate_waits, 0);
    CHECK_EQUAL(rg.slot->copies, 14);
    CHECK_EQUAL(cuMemcpyDtoDAsync_v2(here, too, BYTES, NULL), CUDA_SUCCESS);
    CHECK_EQUAL(rg.slot->gate_waits, 1);
    lines.dstDevice = box.dstDevice = too;
    CHECK_EQUAL(cuMemcpy2DAsync_v2(&lines, NULL), CUDA_SUCCESS);
    CHECK_EQUAL(cuMemcpy3DAsync_v2(&box, NULL), CUDA_SUCCESS);
    CHECK_EQUAL(cuMemcpyBatchAsync(to, from, sizes, 1, NULL, NULL, 0, NULL, NULL), CUDA_SUCCESS);
    CHECK_EQUAL(rg.slot->gate_waits, 4);
    done();
}

/* Work by names that few programs use: it counts, and what is large waits. Some the simulated GPU refuses, but not before they have. */
static void rare_forms_of_work_are_work(void)
{
    enum { BYTES = 1 << 17 };
    become("best-effort");
    CUdeviceptr p;
    CUstream s;
    CHECK_EQUAL(cu.cuMemAlloc_v2(&p, BYTES), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    launch(spin, s, 1000);
    seg->settings.starvation_us = 1000;
    other_busy(true);
    uint64_t one = 1, ns = 1000;
    void *params[] = {&one, &ns};
    CUDA_LAUNCH_PARAMS part = {spin, 1, 1, 1, 32, 1, 1, 0, s, params};
    CHECK_EQUAL(cuLaunchCooperativeKernelMultiDevice(&part, 1, 0), CUDA_SUCCESS);
    CHECK_EQUAL(rg_launches(rg.slot), 2);
    CHECK_EQUAL(rg.slot->gate_waits, 1);
    CUDA_MEMCPY3D_BATCH_OP boxes[2] = {
        {.src.type = CU_MEMCPY_OPERAND_TYPE_POINTER, .dst.type = CU_MEMCPY_OPERAND_TYPE_POINTER, .width = 1, .height = 1, .depth = 1},
        {.src.type = CU_MEMCPY_OPERAND_TYPE_POINTER, .dst.type = CU_MEMCPY_OPERAND_TYPE_POINTER, .width = BYTES, .height = 1, .depth = 1},
    };
    CUmemDecompressParams parts[2] = {{.srcNumBytes = BYTES}, {.srcNumBytes = BYTES, .dstNumBytes = 1}};
    size_t sizes[] = {1, BYTES};
    for (uint64_t large = 0; large < 2; large++) { /* the first is small, both together are large */
        cuMemcpyWithAttributesAsync(p, p, large ? BYTES : 1, NULL, s);
        cuMemcpy3DWithAttributesAsync(&boxes[large], 0, s);
        cuMemcpy3DBatchAsync(1 + large, boxes, NULL, 0, s);
        cuMemcpy3DBatchAsync_v2(1 + large, boxes, 0, s);
        cuMemPrefetchBatchAsync(&p, sizes, 1 + large, NULL, NULL, 0, 0, s);
        cuMemDiscardAndPrefetchBatchAsync(&p, sizes, 1 + large, NULL, NULL, 0, 0, s);
        cuMemBatchDecompressAsync(large ? parts : parts + 1, 1 + large, 0, NULL, s);
        CHECK_EQUAL(rg.slot->copies, 7 * (1 + large));
        CHECK_EQUAL(rg.slot->gate_waits, 1 + 7 * large);
    }
    done();
}

static void communication_kernels_never_wait(void)
{
    become("best-effort");
    launch(spin, NULL, 1000);
    other_busy(true);
    for (int i = 0; i < 20; i++)
        launch(nccl, NULL, 1000);
    CHECK_EQUAL(rg.slot->passed, 20);
    CHECK_EQUAL(rg.slot->gate_waits, 0);
    done();
}

/* A held client waits though nobody is busy; the starvation bound does not let it out. A hold ends by itself, if nobody ends it. */
static void hold_has_an_end(void)
{
    become("best-effort");
    seg->settings.starvation_us = 1;
    launch(spin, NULL, 1000);
    rg_segment_hold(seg, RG_HOLD_LIMIT_MS);
    pthread_t thread;
    CHECK_EQUAL(pthread_create(&thread, NULL, launch_one, current()), 0);
    WAIT_FOR(atomic_load(&seg->devices[0].waiters) == 1);
    usleep(10000); /* several sleeps, far beyond the bound */
    CHECK_EQUAL(atomic_load(&launched), 0);
    rg_segment_hold(seg, 0);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    CHECK_EQUAL(rg.slot->starved, 0);
    CHECK_EQUAL(rg.slot->gate_waits, 1);
    rg_segment_hold(seg, RG_HOLD_LIMIT_MS);
    CHECK_EQUAL(pthread_create(&thread, NULL, launch_one, current()), 0);
    WAIT_FOR(atomic_load(&seg->devices[0].waiters) == 1);
    rg_segment_hold(seg, 30); /* waits those 30 ms */
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    CHECK_EQUAL(rg.slot->gate_waits, 2);
    /* A time far ahead is nobody's wish: what is left in a segment whose clock began anew. */
    atomic_store(&seg->settings.hold_until_ms, (uint32_t)(rg_now_ns() / 1000000) + 2 * RG_HOLD_LIMIT_MS);
    launch(spin, NULL, 1000);
    CHECK_EQUAL(rg.slot->gate_waits, 2);
    done();
}

/* A spell of high work goes on over idle times below a millisecond, and over a change of clients. */
static void breaks_end_a_spell(void)
{
    become("best-effort");
    rg_device *dev = &seg->devices[0];
    enum { US = 1000 };
    rg_device_busy(dev, OTHER, 10000 * US);
    CHECK_EQUAL(dev->spell_ns, 10000 * US);
    atomic_store(&dev->paid_ns, 7);
    rg_device_busy(dev, OTHER + 1, 11000 * US);
    rg_device_idle(dev, OTHER, 12000 * US);
    CHECK_EQUAL(dev->idle_ns, 0);
    rg_device_idle(dev, OTHER + 1, 13000 * US);
    CHECK_EQUAL(dev->idle_ns, 13000 * US);
    rg_device_busy(dev, OTHER, 13999 * US);
    CHECK_EQUAL(dev->spell_ns, 10000 * US);
    CHECK_EQUAL(dev->paid_ns, 7);
    rg_device_idle(dev, OTHER, 14000 * US);
    rg_device_busy(dev, OTHER, 15000 * US);
    CHECK_EQUAL(dev->spell_ns, 15000 * US);
    CHECK_EQUAL(dev->paid_ns, 0);
    /* The clock of another client's process may be a little ahead. */
    atomic_store(&dev->paid_ns, 7);
    rg_device_idle(dev, OTHER, 16000 * US);
    rg_device_busy(dev, OTHER + 1, 16000 * US - 300);
    CHECK_EQUAL(dev->spell_ns, 15000 * US);
    CHECK_EQUAL(dev->paid_ns, 7);
    done();
}

static void least_share_comes_only_after_the_bound(void)
{
    become("best-effort");
    rg_device *dev = &seg->devices[0];
    seg->settings.inflight = 0;
    launch(spin, NULL, 1000);
    rg_device_busy(dev, OTHER, rg_now_ns());
    pthread_t thread;
    CHECK_EQUAL(pthread_create(&thread, NULL, launch_one, current()), 0);
    WAIT_FOR(atomic_load(&dev->waiters) == 1); /* 600 s to go */
    CHECK_EQUAL(atomic_load(&launched), 0);
    CHECK_EQUAL(rg.slot->shared, 0);
    /* The same spell, had it begun with the clock, which is when the machine was started, and that time the bound, or 600 s of it: 50 ms
     * are there, and a kernel that is not known costs 0.1 of them. */
    uint64_t now = rg_now_ns(), bound_ns = now < 600000000000 ? now / 1000 * 1000 - 1000 : 600000000000;
    uint64_t spell_ns = now - bound_ns, more_ns = now + 1000000000; /* as much again comes in then */
    atomic_store(&dev->spell_ns, spell_ns);
    atomic_store(&seg->settings.starvation_us, (uint32_t)(bound_ns / 1000));
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    CHECK_EQUAL(rg.slot->shared, 1);
    uint64_t paid_ns = dev->paid_ns;
    CHECK(paid_ns == 100000 || (paid_ns > 100000 && rg_now_ns() >= more_ns));
    for (int i = 1; i < 500; i++)
        launch(spin, NULL, 1000);
    CHECK_EQUAL(rg.slot->shared, 500);
    paid_ns = dev->paid_ns;
    CHECK(paid_ns == 50000000 || (paid_ns > 50000000 && rg_now_ns() >= more_ns));
    CHECK_EQUAL(rg.slot->starved, 0);
    CHECK_EQUAL(pthread_create(&thread, NULL, launch_one, current()), 0);
    WAIT_FOR(atomic_load(&dev->waiters) == 1 || rg_now_ns() >= more_ns); /* nothing is left of it */
    uint64_t shared = rg.slot->shared;
    CHECK(shared == 500 || rg_now_ns() >= more_ns);
    other_busy(false);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    done();
}

/* ---- fair ---- */

enum { MS = 1000000 };

static rg_share *share_of(int slot)
{
    return rg_share_of(seg, 0, slot);
}

static void fair_waits_for_the_slowest(const char *class)
{
    policy = RG_POLICY_FAIR;
    become(class);
    rg_device *dev = &seg->devices[0];
    launch(spin, NULL, 1000); /* a track, so that the thread below has nothing to set up */
    rg_device_busy(dev, OTHER, rg_now_ns());
    atomic_store(&share_of(OTHER)->virtual_ns, 5);
    atomic_store(&share_of(0)->virtual_ns, 10 * MS);
    atomic_store(&dev->virtual_ns, 4);
    pthread_t thread;
    CHECK_EQUAL(pthread_create(&thread, NULL, launch_one, current()), 0);
    WAIT_FOR(atomic_load(&dev->virtual_ns) == 5); /* it has looked */
    CHECK_EQUAL(atomic_load(&launched), 0);
    atomic_store(&share_of(OTHER)->virtual_ns, 7 * MS);
    WAIT_FOR(atomic_load(&dev->virtual_ns) == 7 * MS); /* and again: still 3 ms ahead */
    CHECK_EQUAL(atomic_load(&launched), 0);
    atomic_store(&share_of(OTHER)->virtual_ns, 9 * MS); /* less than a quantum */
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    CHECK_EQUAL(rg.slot->gate_waits, 1);
    CHECK_EQUAL(rg.slot->starved, 0);
    done();
}

static void fair_best_effort_waits(void)
{
    fair_waits_for_the_slowest("best-effort");
}

static void fair_high_waits_as_well(void)
{
    fair_waits_for_the_slowest("high");
}

/* Who sees that the slowest goes on waits for it from then on, and is no idle one meanwhile. */
static void fair_bound_counts_from_when_the_slowest_went_on(void)
{
    policy = RG_POLICY_FAIR;
    become("best-effort");
    rg_device *dev = &seg->devices[0];
    launch(spin, NULL, 1000);
    rg_device_busy(dev, OTHER, rg_now_ns());
    atomic_store(&share_of(OTHER)->virtual_ns, 5);
    atomic_store(&share_of(0)->virtual_ns, 10 * MS);
    pthread_t thread;
    CHECK_EQUAL(pthread_create(&thread, NULL, launch_one, current()), 0);
    WAIT_FOR(atomic_load(&dev->virtual_ns) == 5);
    usleep(100000);
    uint64_t since = rg_now_ns();
    WAIT_FOR(atomic_load(&share_of(0)->idle_ns) > since + 5 * MS); /* it is active for so long (IN_GATE_NS): seen later than `since` */
    atomic_store(&share_of(OTHER)->virtual_ns, 7 * MS);
    WAIT_FOR(atomic_load(&dev->virtual_ns) == 7 * MS);
    seg->settings.starvation_us = 100000;
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    CHECK(rg_now_ns() - since >= 100 * MS);
    CHECK_EQUAL(rg.slot->starved, 1);
    done();
}

static void fair_ignores_the_idle_and_levels_who_comes_back(void)
{
    policy = RG_POLICY_FAIR;
    become("best-effort");
    rg_device *dev = &seg->devices[0];
    atomic_store(&share_of(OTHER)->virtual_ns, 5);
    atomic_store(&share_of(OTHER)->idle_ns, 1); /* long ago */
    atomic_store(&share_of(0)->virtual_ns, 100 * MS);
    launch(spin, NULL, 1000);
    CHECK_EQUAL(rg.slot->gate_waits, 0);
    CHECK(dev->virtual_ns >= 100 * MS);
    /* Others have gone on while this client did nothing. */
    atomic_store(&dev->virtual_ns, 900 * MS);
    launch(spin, NULL, 1000);
    CHECK(share_of(0)->virtual_ns >= 900 * MS);
    done();
}

/* 100 kernels of 1 ms: 100 ms of GPU time and a little, whether or not their duration was known, or right, when they went out. */
static void fair_charges_what_was_launched(void)
{
    policy = RG_POLICY_FAIR;
    setenv("RIGEL_WEIGHT", "4", 1);
    become("best-effort");
    seg->settings.unit_us = 0; /* eight at once, so that some go out before the first is known */
    for (int i = 0; i < 100; i++)
        launch(spin, NULL, 1 * MS);
    CHECK_EQUAL(rg.slot->weight, 4000);
    uint64_t charged = rg.slot->charged_ns;
    CHECK(charged >= 100ull * MS && charged < 300ull * MS);
    CHECK(share_of(0)->virtual_ns >= charged / 4 - 100 && share_of(0)->virtual_ns < charged); /* a weight of 4 */
    CHECK(rg.slot->inflight_waits > 0);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    CHECK_EQUAL(busy_word(), 0); /* its requests are seen, as those of any high client */
    CHECK(rg.slot->requests >= 1);
    CHECK(share_of(0)->idle_ns > 0);
    done();
}

/* Charged by an estimate that was wrong: what was too much comes back, and no more than there is. */
static void fair_charges_what_it_was_in_the_end(void)
{
    policy = RG_POLICY_FAIR;
    become("best-effort");
    atomic_store(&share_of(0)->virtual_ns, 10000);
    atomic_store(&rg.slot->charged_ns, 20000);
    rg_gate_recharge(RG_PROCESS, 0, 3, 2000, 500);
    CHECK_EQUAL(share_of(0)->virtual_ns, 10000 - 3 * 1500);
    CHECK_EQUAL(rg.slot->charged_ns, 20000 - 3 * 1500);
    rg_gate_recharge(RG_PROCESS, 0, 2, 500, 1500);
    CHECK_EQUAL(share_of(0)->virtual_ns, 10000 - 3 * 1500 + 2 * 1000);
    CHECK_EQUAL(rg.slot->charged_ns, 20000 - 3 * 1500 + 2 * 1000);
    rg_gate_recharge(RG_PROCESS, 0, 100, 1000, 0);
    CHECK_EQUAL(share_of(0)->virtual_ns, 0);
    CHECK_EQUAL(rg.slot->charged_ns, 0);
    done();
}

static _Atomic uint32_t left_inflight;

/* More launches than there are events to follow them. */
static void *leave_launches(void *context)
{
    CHECK_EQUAL(cu.cuCtxSetCurrent((CUcontext)context), CUDA_SUCCESS);
    launch(spin, CU_STREAM_PER_THREAD, 500000000);
    for (int i = 0; i < 200; i++)
        launch(spin, CU_STREAM_PER_THREAD, 1000);
    const rg_track *t = rg_track_find(rg_track_key(CU_STREAM_PER_THREAD));
    CHECK(t->unbatched > 0);
    atomic_store(&left_inflight, rg.members[0].inflight[0] - t->unbatched);
    return NULL;
}

static void fair_takes_what_an_ended_thread_left_for_done(void)
{
    policy = RG_POLICY_FAIR;
    become("best-effort");
    seg->settings.inflight = 0; /* nobody waits, so nobody looks which events are done */
    pthread_t thread;
    CHECK_EQUAL(pthread_create(&thread, NULL, leave_launches, current()), 0);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    CHECK_EQUAL(rg.members[0].inflight[0], left_inflight);
    done();
}

/* ---- orion ---- */

/* What is to be outstanding still when it is looked at lasts for so long: the agent looks every 2 ms. */
enum { LONG_NS = 100000000 };

static void orion_lets_out_what_does_not_disturb(void)
{
    policy = RG_POLICY_ORION;
    become("best-effort");
    rg_device *dev = &seg->devices[0];
    seg->settings.sms_limit = 2;
    seg->settings.outstanding_us = 1000000;
    uint64_t shape = rg_dims_hash(rg_dims_of(1, 1, 1, 32, 1, 1));
    CHECK(rg_kernel_put(seg, rg_kernel_key("rigel_spin", shape), 1, RG_BOUND_MEMORY));
    rg_device_busy(dev, OTHER, rg_now_ns());
    atomic_store(&dev->high_bound, RG_BOUND_COMPUTE);
    for (int i = 0; i < 20; i++)
        launch(spin, NULL, 1000);
    launch(spin, NULL, LONG_NS);
    CHECK_EQUAL(rg.slot->gate_waits, 0);
    CHECK_EQUAL(rg.slot->unprofiled, 0);
    CHECK(dev->outstanding_ns > 0);
    WAIT_FOR(dev->outstanding_ns == share_of(0)->outstanding_ns); /* the agent changes one after the other */
    pthread_t thread;
    atomic_store(&dev->high_bound, RG_BOUND_MEMORY);
    CHECK_EQUAL(pthread_create(&thread, NULL, launch_one, current()), 0);
    WAIT_FOR(atomic_load(&dev->waiters) == 1);
    CHECK_EQUAL(atomic_load(&launched), 0);
    atomic_store(&dev->high_bound, RG_BOUND_COMPUTE);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    /* A program that describes its launches is believed rather than the table; once each. */
    rigel_describe_launch(1, 0, 5000);
    launch(spin, NULL, 1000);
    CHECK_EQUAL(rg.slot->gate_waits, 1);
    seg->settings.starvation_us = 1000;
    rigel_describe_launch(2, 0, 5000);
    launch(spin, NULL, 1000);
    CHECK_EQUAL(rg.slot->gate_waits, 2);
    /* In no profile: waits for the high client to be idle, or for the bound. */
    other_busy(false);
    launch(nccl, NULL, 1000); /* never waits, never counts */
    CHECK_EQUAL(rg.slot->unprofiled, 0);
    uint64_t n = 1, ns = 1000;
    void *params[] = {&n, &ns};
    CHECK_EQUAL(cuLaunchKernel(spin, 2, 1, 1, 32, 1, 1, 0, NULL, params, NULL), CUDA_SUCCESS);
    CHECK_EQUAL(rg.slot->unprofiled, 1);
    done();
}

/* What is not known to leave the high client alone waits from the first launch of its request on. */
static void orion_puts_nothing_off(void)
{
    policy = RG_POLICY_ORION;
    become("best-effort");
    rg_device *dev = &seg->devices[0];
    rg_share *share = share_of(OTHER);
    launch(spin, NULL, 1000);
    atomic_store(&share->usual_launches, 100);
    atomic_store(&share->usual_votes, 800);
    seg->settings.defer_ppm = 400000;
    rg_device_busy(dev, OTHER, rg_now_ns());
    rg_device_launching(dev, OTHER, true);
    pthread_t thread;
    CHECK_EQUAL(pthread_create(&thread, NULL, launch_one, current()), 0);
    WAIT_FOR(atomic_load(&dev->waiters) == 1);
    usleep(20000); /* time to do wrong in */
    CHECK_EQUAL(atomic_load(&launched), 0);
    rg_device_idle(dev, OTHER, rg_now_ns());
    rg_device_wake(dev);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    CHECK_EQUAL(rg.slot->gate_waits, 1);
    done();
}

/* Nothing outstanding is allowed beyond 3 us: each launch waits until the one before is known to be finished. */
static void orion_limits_what_is_outstanding(void)
{
    policy = RG_POLICY_ORION;
    become("best-effort");
    rg_device *dev = &seg->devices[0];
    seg->settings.sms_limit = 2;
    seg->settings.outstanding_us = 3;
    for (int i = 0; i < 20; i++) {
        rigel_describe_launch(1, -1, 10000);
        launch(spin, NULL, 1000);
        CHECK(dev->outstanding_ns < 20000);
    }
    CHECK(rg.slot->inflight_waits > 0);
    CHECK_EQUAL(rg.slot->starved, 0);
    rg_share_settle(seg, 0, 0, UINT64_MAX); /* as whoever finds it dead does */
    CHECK_EQUAL(dev->outstanding_ns, 0);
    rg_share_settle(seg, 0, 0, 5000);
    CHECK_EQUAL(dev->outstanding_ns, 0);
    done();
}

/* What is done is not outstanding, whatever has become of the unit, or for a while of the policy, since it was charged. */
static void orion_leaves_nothing_outstanding(void)
{
    policy = RG_POLICY_ORION;
    become("best-effort");
    rg_device *dev = &seg->devices[0];
    for (int i = 0; i < 2; i++) {
        seg->settings.outstanding_us = 0;
        for (int k = 0; k < 6; k++) {
            rigel_describe_launch(1, -1, 100000);
            launch(spin, NULL, k ? 1000 : LONG_NS);
        }
        CHECK(dev->outstanding_ns >= 200000); /* of the last of them no event tells yet */
        CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
        if (i) {
            seg->settings.policy = RG_POLICY_PRIORITY;
            seg->settings.inflight = 1;
            launch(spin, NULL, 1000); /* waits until it is known that the others are done */
            seg->settings.policy = RG_POLICY_ORION;
            seg->settings.inflight = 8;
        } else {
            seg->settings.unit_us = 10;
        }
        seg->settings.outstanding_us = 100;
        rigel_describe_launch(1, -1, 50000); /* of which it is not learned how long it takes here */
        launch(spin, NULL, 1000);
        CHECK(dev->outstanding_ns <= 100000);
        seg->settings.unit_us = 100;
    }
    CHECK_EQUAL(rg.slot->starved, 0);
    done();
}

/* Other clients may launch no more until it is known that this one's work is done, and it may not launch again for long. */
static void orion_sees_the_end_of_what_nothing_follows(void)
{
    policy = RG_POLICY_ORION;
    become("best-effort");
    rg_device *dev = &seg->devices[0];
    for (int k = 0; k < 3; k++) {
        rigel_describe_launch(1, -1, 100000);
        launch(spin, NULL, 1000);
    }
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    WAIT_FOR(atomic_load(&dev->outstanding_ns) == 0);
    CHECK_EQUAL(share_of(0)->outstanding_ns, 0);
    CHECK_EQUAL(rg.slot->gate_waits + rg.slot->inflight_waits, 0);
    done();
}

static void orion_shows_what_high_kernels_are_bound_by(void)
{
    policy = RG_POLICY_ORION;
    become("high");
    rg_device *dev = &seg->devices[0];
    CHECK(rg_kernel_put(seg, rg_kernel_key("rigel_spin", 0), 1, RG_BOUND_COMPUTE)); /* whatever the shape */
    launch(spin, NULL, 1000);
    CHECK_EQUAL(dev->high_bound, RG_BOUND_COMPUTE);
    CHECK_EQUAL(busy_word(), 1);
    rigel_describe_launch(1, 0, 1000);
    launch(spin, NULL, 1000);
    CHECK_EQUAL(dev->high_bound, RG_BOUND_MEMORY);
    launch(nccl, NULL, 1000);
    CHECK_EQUAL(dev->high_bound, RG_BOUND_UNKNOWN);
    CHECK_EQUAL(rg.slot->gate_waits + rg.slot->inflight_waits, 0);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    CHECK_EQUAL(busy_word(), 0);
    done();
}

/* What it launched as a high client was only looked up in the profiles. */
static void orion_finds_out_what_communicates_when_a_class_changes(void)
{
    policy = RG_POLICY_ORION;
    become("high");
    launch(nccl, NULL, 1000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    atomic_store(&rg.account->wanted_class, RG_CLASS_BEST_EFFORT);
    WAIT_FOR(atomic_load(&rg.mode) == RG_MODE_BEST_EFFORT);
    other_busy(true);
    launch(nccl, NULL, 1000); /* never waits, never counts */
    CHECK_EQUAL(rg.slot->passed, 1);
    CHECK_EQUAL(rg.slot->gate_waits, 0);
    CHECK_EQUAL(rg.slot->unprofiled, 0);
    done();
}

int main(int argc, char **argv)
{
    (void)argc;
    ensure_environment("LD_LIBRARY_PATH", in_build_folder("sim"), argv);
    int failures = 0;
    RUN(waits_while_high_is_busy);
    RUN(goes_on_for_a_part_of_a_request);
    RUN(starvation_bound_lets_one_batch_out);
    RUN(a_batch_ends_as_high_is_idle);
    RUN(a_capture_lets_out_who_waits);
    RUN(a_capture_lets_out_who_is_paused);
    RUN(no_event_is_recorded_in_a_capture);
    RUN(nobody_records_on_a_threads_own_stream);
    RUN(what_cannot_be_followed_holds_nobody);
    RUN(what_has_gone_holds_nobody);
    RUN(what_has_gone_counts_as_done_once);
    RUN(streams_that_go_make_room);
    RUN(many_captures_all_end);
    RUN(small_copies_pass_a_pause);
    RUN(stale_high_client_is_ignored);
    RUN(shutdown_setting_opens_the_gate);
    RUN(the_end_waits_for_who_is_held);
    RUN(policy_none_measures_only);
    RUN(in_flight_is_limited);
    RUN(in_flight_wait_is_bounded);
    RUN(each_device_has_its_own_limit);
    RUN(each_context_has_its_own_events);
    RUN(the_bound_counts_from_what_ended_last);
    RUN(each_device_has_its_own_credit);
    RUN(kernels_that_share_a_place_are_all_known);
    RUN(small_copies_pass_bulk_copies_wait);
    RUN(hold_has_an_end);
    RUN(breaks_end_a_spell);
    RUN(least_share_comes_only_after_the_bound);
    RUN(fair_best_effort_waits);
    RUN(fair_high_waits_as_well);
    RUN(fair_bound_counts_from_when_the_slowest_went_on);
    RUN(fair_ignores_the_idle_and_levels_who_comes_back);
    RUN(fair_charges_what_was_launched);
    RUN(fair_charges_what_it_was_in_the_end);
    RUN(fair_takes_what_an_ended_thread_left_for_done);
    RUN(orion_lets_out_what_does_not_disturb);
    RUN(orion_puts_nothing_off);
    RUN(orion_limits_what_is_outstanding);
    RUN(orion_leaves_nothing_outstanding);
    RUN(orion_sees_the_end_of_what_nothing_follows);
    RUN(orion_shows_what_high_kernels_are_bound_by);
    RUN(orion_finds_out_what_communicates_when_a_class_changes);
    RUN(copies_between_devices_never_wait);
    RUN(rare_forms_of_work_are_work);
    RUN(communication_kernels_never_wait);
    return failures ? 1 : 0;
}
