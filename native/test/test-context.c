/*
 * test-context.c: captures, streams and contexts that come and go, and attaching and leaving. As test-gate.c.
 */
#include "gate-testing.h"

#include <fcntl.h>
#include <semaphore.h>

/* ---- captures, streams and contexts that come and go ---- */

static CUgraphExec capture(CUstream s, CUfunction f, int kernels)
{
    CUgraph graph;
    CUgraphExec exec;
    CHECK_EQUAL(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
    for (int i = 0; i < kernels; i++)
        launch(f, s, 1000);
    CHECK_EQUAL(cuStreamEndCapture(s, &graph), CUDA_SUCCESS);
    CHECK_EQUAL(cuGraphInstantiateWithFlags(&exec, graph, 0), CUDA_SUCCESS);
    size_t nodes = 0;
    CHECK_EQUAL(cu.cuGraphGetNodes(graph, NULL, &nodes), CUDA_SUCCESS);
    CHECK_EQUAL(nodes, kernels);
    return exec;
}

static void capture_passes_and_a_graph_is_one_unit(void)
{
    become("best-effort");
    CUstream s;
    CHECK_EQUAL(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    launch(spin, s, 1000);
    other_busy(true);
    CUgraphExec exec = capture(s, spin, 50); /* nobody waits, and nothing of Rigel's gets into the graph */
    CHECK_EQUAL(rg.slot->passed, 50);
    CHECK_EQUAL(rg.slot->gate_waits, 0);
    CHECK_EQUAL(rg.captures, 0);
    seg->settings.starvation_us = 1000;
    CHECK_EQUAL(cuGraphLaunch(exec, s), CUDA_SUCCESS);
    CHECK_EQUAL(rg.slot->gate_waits, 1);
    CHECK_EQUAL(rg.slot->graph_launches, 1);
    CHECK_EQUAL(rg.members[0].inflight[0], 2 * RG_POLICY_LAUNCH);
    CHECK_EQUAL(cuStreamSynchronize(s), CUDA_SUCCESS);
    CUgraphExec communicating = capture(s, nccl, 3);
    CHECK_EQUAL(cuGraphLaunch(communicating, s), CUDA_SUCCESS);
    CHECK_EQUAL(rg.slot->gate_waits, 1);
    done();
}

static void *per_thread_work(void *context)
{
    CHECK_EQUAL(cu.cuCtxSetCurrent((CUcontext)context), CUDA_SUCCESS);
    uint64_t n = 1, ns = 2000;
    void *params[] = {&n, &ns};
    for (int i = 0; i < 50; i++)
        CHECK_EQUAL(cuLaunchKernel_ptsz(spin, 1, 1, 1, 32, 1, 1, 0, NULL, params, NULL), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamSynchronize_ptsz(NULL), CUDA_SUCCESS);
    return NULL;
}

static void captures_are_counted_right(void)
{
    become("best-effort");
    CUstream a, b;
    CUgraph graph;
    CHECK_EQUAL(cuStreamCreate(&a, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamCreate(&b, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    launch(spin, b, 1000);
    CHECK_EQUAL(cuStreamBeginCapture_v2(a, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    CHECK_EQUAL(rg.captures, 1);
    CHECK(cuStreamEndCapture(b, &graph) != CUDA_SUCCESS); /* not capturing: ends nothing */
    CHECK_EQUAL(rg.captures, 1);
    CHECK_EQUAL(cuStreamDestroy_v2(a), CUDA_SUCCESS); /* with its capture open */
    CHECK_EQUAL(rg.captures, 0);
    CHECK_EQUAL(cuStreamBeginCapture_v2(b, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamEndCapture(b, &graph), CUDA_SUCCESS);
    CHECK_EQUAL(rg.captures, 0);
    /* Of streams that were never launched on, where another is captured already. */
    CUstream c, d;
    CHECK_EQUAL(cuStreamCreate(&c, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamCreate(&d, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamBeginCapture_v2(b, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamBeginCapture_v2(c, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    CHECK_EQUAL(rg.captures, 2);
    CHECK(cuStreamEndCapture(d, &graph) != CUDA_SUCCESS);
    CHECK_EQUAL(rg.captures, 2);
    CHECK_EQUAL(cuStreamEndCapture(c, &graph), CUDA_SUCCESS);
    CHECK_EQUAL(rg.captures, 1);
    CHECK_EQUAL(cuStreamBeginCapture_v2(c, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamDestroy_v2(c), CUDA_SUCCESS);
    CHECK_EQUAL(rg.captures, 1);
    CHECK_EQUAL(cuStreamEndCapture(b, &graph), CUDA_SUCCESS);
    CHECK_EQUAL(rg.captures, 0);
    CHECK_EQUAL(cu.cuGraphCreate(&graph, 0), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamBeginRecaptureToGraph(b, CU_STREAM_CAPTURE_MODE_RELAXED, graph, NULL, NULL), CUDA_SUCCESS);
    CHECK_EQUAL(rg.captures, 1);
    CHECK_EQUAL(cuStreamEndCapture(b, &graph), CUDA_SUCCESS);
    CHECK_EQUAL(rg.captures, 0);
    done();
}

/* Those that are open in a context end with it, be it on streams that are not known otherwise, since they began during another. */
static void captures_end_with_their_context(void)
{
    setenv("RIGEL_SIM_DEVICES", "2", 1);
    become("best-effort");
    CUstream a, b, elsewhere, in_own;
    CUgraph graph;
    CUcontext primary = current(), second, own;
    CHECK_EQUAL(cuStreamCreate(&a, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamCreate(&b, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamBeginCapture_v2(a, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamBeginCapture_v2(b, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuDevicePrimaryCtxRetain(&second, 1), CUDA_SUCCESS);
    CHECK_EQUAL(cuCtxSetCurrent(second), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamCreate(&elsewhere, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamBeginCapture_v2(elsewhere, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuCtxCreate_v2(&own, 0, 1), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamCreate(&in_own, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamBeginCapture_v2(in_own, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    CHECK_EQUAL(rg.captures, 4);
    CHECK_EQUAL(cuCtxDestroy_v2(own), CUDA_SUCCESS);
    CHECK_EQUAL(rg.captures, 3);
    CHECK_EQUAL(cuDevicePrimaryCtxReset_v2(0), CUDA_SUCCESS);
    CHECK_EQUAL(rg.captures, 1);
    CHECK_EQUAL(cuCtxSetCurrent(second), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamEndCapture(elsewhere, &graph), CUDA_SUCCESS);
    CHECK_EQUAL(rg.captures, 0);
    /* The gate holds again. */
    CHECK_EQUAL(cu.cuDevicePrimaryCtxRetain(&primary, 0), CUDA_SUCCESS);
    CHECK_EQUAL(cuCtxSetCurrent(primary), CUDA_SUCCESS);
    load_kernels(ptx);
    seg->settings.starvation_us = 1000;
    other_busy(true);
    launch(spin, NULL, 1000);
    CHECK_EQUAL(rg.slot->gate_waits, 1);
    done();
}

/* Nor does one end whose device is not known because a context is taken away that there is not. */
static void no_context_takes_no_capture(void)
{
    become("best-effort");
    CUstream a, b;
    CUgraph graph;
    CUcontext first = current(), own;
    CHECK_EQUAL(cuStreamCreate(&a, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamCreate(&b, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamBeginCapture_v2(a, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuCtxCreate_v2(&own, 0, 0), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamBeginCapture_v2(b, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    CHECK(cuCtxDestroy_v2(NULL) != CUDA_SUCCESS);
    CHECK_EQUAL(rg.captures, 2);
    CHECK_EQUAL(cuCtxSetCurrent(first), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamEndCapture(b, &graph), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamEndCapture(a, &graph), CUDA_SUCCESS);
    CHECK_EQUAL(rg.captures, 0);
    done();
}

static void an_event_that_is_recorded_during_a_capture_stands_for_nothing_older(void)
{
    become_high_without_agent();
    CUstream work, other, captured;
    CUgraph graph;
    CUevent event;
    rg_track *track;
    CHECK_EQUAL(cuStreamCreate(&work, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamCreate(&captured, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CHECK_EQUAL(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), CUDA_SUCCESS);
    launch(spin, work, 1000);
    CHECK_EQUAL(cuEventRecord(event, work), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamBeginCapture_v2(captured, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    CHECK_EQUAL(cuEventRecord(event, other), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamEndCapture(captured, &graph), CUDA_SUCCESS);
    CHECK_EQUAL(rg_event_wait_begin(event, &track), 0);
    done();
}

static void *capture_without_end(void *context)
{
    CHECK_EQUAL(cu.cuCtxSetCurrent((CUcontext)context), CUDA_SUCCESS);
    launch(spin, CU_STREAM_PER_THREAD, 1000);
    CHECK_EQUAL(cuStreamBeginCapture_v2(CU_STREAM_PER_THREAD, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    CHECK_EQUAL(rg.captures, 1);
    return NULL;
}

/* A thread's own stream goes with it, and so does a capture that is open on it, whatever else is known of the stream. */
static void a_capture_goes_with_its_thread(void)
{
    become_high_without_agent(); /* which leaves the stream's work unfinished */
    pthread_t thread;
    CHECK_EQUAL(pthread_create(&thread, NULL, capture_without_end, current()), 0);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    CHECK_EQUAL(rg.captures, 0);
    done();
}

/* It has one in each context, and each capture is that of one. */
static void a_thread_captures_in_two_contexts(void)
{
    become("best-effort");
    CUcontext first = current(), own;
    CUgraph graph;
    CHECK_EQUAL(cuStreamBeginCapture_v2(CU_STREAM_PER_THREAD, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuCtxCreate_v2(&own, 0, 0), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamBeginCapture_v2(CU_STREAM_PER_THREAD, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    CHECK_EQUAL(rg.captures, 2);
    CHECK_EQUAL(cuStreamEndCapture(CU_STREAM_PER_THREAD, &graph), CUDA_SUCCESS);
    CHECK_EQUAL(rg.captures, 1);
    CHECK_EQUAL(cuCtxDestroy_v2(own), CUDA_SUCCESS);
    CHECK_EQUAL(rg.captures, 1);
    CHECK_EQUAL(cuCtxSetCurrent(first), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamEndCapture(CU_STREAM_PER_THREAD, &graph), CUDA_SUCCESS);
    CHECK_EQUAL(rg.captures, 0);
    done();
}

static _Atomic int captures_too, other_has_ended;
static void *capture_until_another_has_ended(void *context)
{
    capture_without_end(context);
    atomic_store(&captures_too, 1);
    WAIT_FOR(atomic_load(&other_has_ended));
    return NULL;
}

/* Nor does what a thread ends end another's. */
static void threads_capture_their_own_streams(void)
{
    become_high_without_agent();
    CUgraph graph;
    pthread_t thread;
    CHECK_EQUAL(pthread_create(&thread, NULL, capture_until_another_has_ended, current()), 0);
    WAIT_FOR(atomic_load(&captures_too));
    CHECK_EQUAL(cuStreamBeginCapture_v2(CU_STREAM_PER_THREAD, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamEndCapture(CU_STREAM_PER_THREAD, &graph), CUDA_SUCCESS);
    CHECK_EQUAL(rg.captures, 1);
    atomic_store(&other_has_ended, 1);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    CHECK_EQUAL(rg.captures, 0);
    done();
}

/* Two devices, default streams only: each launch and each wait belongs to the device whose context is current. */
static void default_streams_of_two_contexts_are_told_apart(void)
{
    setenv("RIGEL_SIM_DEVICES", "2", 1);
    become_high_without_agent();
    CUcontext first = current(), second;
    CUmodule module;
    CUfunction other_spin;
    launch(spin, NULL, 1000);
    CHECK_EQUAL(cu.cuDevicePrimaryCtxRetain(&second, 1), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuCtxSetCurrent(second), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuModuleLoadData(&module, ptx), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuModuleGetFunction(&other_spin, module, "rigel_spin"), CUDA_SUCCESS);
    launch(other_spin, NULL, 1000);
    launch(other_spin, CU_STREAM_PER_THREAD, 1000);
    CHECK_EQUAL(seg->devices[0].high_busy, 1);
    CHECK_EQUAL(seg->devices[1].high_busy, 1);
    CHECK_EQUAL(cuStreamSynchronize(NULL), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamSynchronize(CU_STREAM_PER_THREAD), CUDA_SUCCESS);
    CHECK_EQUAL(seg->devices[0].high_busy, 1);
    CHECK_EQUAL(seg->devices[1].high_busy, 0);
    CHECK_EQUAL(cu.cuCtxSetCurrent(first), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamSynchronize(NULL), CUDA_SUCCESS);
    CHECK_EQUAL(seg->devices[0].high_busy, 0);
    CHECK_EQUAL(rg.slot->devices, 3);
    done();
}

/* After a reset the context's handle may be the same, but its events are gone: the limit and the busy bit must still work. */
static void a_reset_context_starts_afresh(void)
{
    become("best-effort");
    for (int i = 0; i < 20; i++)
        launch(spin, NULL, 20000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    CHECK_EQUAL(cuDevicePrimaryCtxReset_v2(0), CUDA_SUCCESS);
    CUcontext context;
    CUmodule module;
    CHECK_EQUAL(cu.cuDevicePrimaryCtxRetain(&context, 0), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuCtxSetCurrent(context), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuModuleLoadData(&module, ptx), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuModuleGetFunction(&spin, module, "rigel_spin"), CUDA_SUCCESS);
    uint64_t waits = rg.slot->inflight_waits;
    for (int i = 0; i < 60; i++) { /* 41 to the limit while they count for what the segment knows of the kernel: 20 us */
        launch(spin, NULL, 1000000);
        CHECK(rg.members[0].inflight[0] < 20 * RG_POLICY_LAUNCH);
    }
    CHECK(rg.slot->inflight_waits > waits);
    CHECK_EQUAL(rg.slot->starved, 0);
    done();
}

static CUresult (*real_destroy)(CUevent), (*real_query)(CUevent), (*real_release)(CUdevice);
static _Atomic int dead_events, context_released, all_launched;
static CUresult look_at_destroy(CUevent e)
{
    CUresult r = real_destroy(e);
    dead_events += r != CUDA_SUCCESS;
    return r;
}
static CUresult look_at_query(CUevent e)
{
    CUresult r = real_query(e);
    dead_events += r != CUDA_SUCCESS && r != CUDA_ERROR_NOT_READY;
    return r;
}
/* The context is gone, and who released it does not know yet. */
static CUresult slow_release(CUdevice d)
{
    CUresult r = real_release(d);
    atomic_store(&context_released, 1);
    WAIT_FOR(atomic_load(&all_launched));
    return r;
}

static void *use_and_release(void *unused)
{
    CUcontext own;
    CUmodule module;
    CUfunction own_spin;
    CHECK_EQUAL(cu.cuDevicePrimaryCtxRetain(&own, 1), CUDA_SUCCESS);
    CHECK_EQUAL(cuCtxSetCurrent(own), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuModuleLoadData(&module, ptx), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuModuleGetFunction(&own_spin, module, "rigel_spin"), CUDA_SUCCESS);
    for (int i = 0; i < 40; i++)
        launch(own_spin, NULL, 1000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    CHECK_EQUAL(cuDevicePrimaryCtxRelease_v2(1), CUDA_SUCCESS);
    return unused;
}

/* What works on another device meanwhile never uses an event of a context that has been released. */
static void events_of_a_released_context_are_not_used(void)
{
    setenv("RIGEL_SIM_DEVICES", "2", 1);
    become("best-effort");
#define REPLACE(old, symbol, new) \
    *(void **)&old = rg_real.hooked[RG_HOOK_##symbol]; \
    rg_real.hooked[RG_HOOK_##symbol] = (void *)(uintptr_t)new
    REPLACE(real_destroy, cuEventDestroy_v2, look_at_destroy);
    REPLACE(real_query, cuEventQuery, look_at_query);
    REPLACE(real_release, cuDevicePrimaryCtxRelease_v2, slow_release);
#undef REPLACE
    pthread_t thread;
    CHECK_EQUAL(pthread_create(&thread, NULL, use_and_release, NULL), 0);
    WAIT_FOR(atomic_load(&context_released));
    for (int i = 0; i < 40; i++)
        launch(spin, NULL, 1000);
    atomic_store(&all_launched, 1);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    CHECK_EQUAL(dead_events, 0);
    done();
}

/* A library may retain and release the context round every call: what is in flight stays so. */
static void a_release_that_is_not_the_last_ends_nothing(void)
{
    become("best-effort");
    CUcontext same;
    CHECK_EQUAL(cuDevicePrimaryCtxRetain(&same, 0), CUDA_SUCCESS);
    CHECK_EQUAL(cuDevicePrimaryCtxRetain(&same, 0), CUDA_SUCCESS);
    for (int i = 0; i < 4; i++)
        launch(spin, NULL, 3600000000000);
    uint32_t before = atomic_load(&RG_PROCESS->inflight[0]);
    CHECK(before > 0);
    CHECK_EQUAL(cuDevicePrimaryCtxRelease_v2(0), CUDA_SUCCESS);
    CHECK_EQUAL(atomic_load(&RG_PROCESS->inflight[0]), before);
    done();
    _exit(0); /* the simulated GPU would be waited for */
}

/* Launches in a context of its own, which is current then; nobody but its end tells that the work is done. */
static CUcontext busy_in_a_context(void)
{
    CUcontext own;
    CUdeviceptr p;
    CHECK_EQUAL(cu.cuCtxCreate_v2(&own, 0, 0), CUDA_SUCCESS);
    load_kernels(ptx);
    CHECK_EQUAL(cuMemAlloc_v2(&p, 1 << 20), CUDA_SUCCESS);
    launch(spin, NULL, 1000);
    CHECK_EQUAL(busy_word(), 1);
    return own;
}

/* PyCUDA's end of a context. */
static void a_context_that_is_detached_is_gone_with_the_last_who_attached(void)
{
    become_high_without_agent();
    CUcontext own = busy_in_a_context(), same;
    CHECK_EQUAL(cu.cuCtxAttach(&same, 0), CUDA_SUCCESS);
    CHECK_EQUAL(cuCtxDetach(own), CUDA_SUCCESS);
    CHECK_EQUAL(busy_word(), 1);
    CHECK_EQUAL(rg.slot->memory_bytes, 1 << 20);
    CHECK_EQUAL(cuCtxDetach(own), CUDA_SUCCESS);
    CHECK_EQUAL(busy_word(), 0);
    CHECK_EQUAL(rg.slot->memory_bytes, 0);
    CHECK(cuCtxDetach(own) != CUDA_SUCCESS);
    done();
}

/* A program that makes a context for every task: those that are gone make room for the one that it works in. */
static void the_context_in_use_is_always_known(void)
{
    become_high_without_agent();
    CUcontext own[RG_MAX_CONTEXTS + 2];
    for (int i = 0; i < RG_MAX_CONTEXTS + 2; i++) {
        own[i] = busy_in_a_context();
        bool known = false;
        for (int k = 0; k < RG_MAX_CONTEXTS; k++)
            known |= rg.slot->contexts[2 * k] == (uintptr_t)own[i] && rg.slot->contexts[2 * k + 1] == 1;
        CHECK(known);
        CHECK_EQUAL(cuCtxDestroy_v2(own[i]), CUDA_SUCCESS);
    }
    CHECK_EQUAL(rg.slot->contexts_full, 0);
    /* Those that are all there at once have room for so many; the next one is said not to be known. */
    for (int i = 0; i < RG_MAX_CONTEXTS; i++)
        busy_in_a_context();
    CHECK_EQUAL(rg.slot->contexts_full, 0);
    busy_in_a_context();
    CHECK_EQUAL(rg.slot->contexts_full, 1);
    done();
}

/* Green contexts as far as Rigel is concerned; the simulated GPU has none. */
static CUresult green_is_context(CUcontext *c, CUgreenCtx green)
{
    *c = (CUcontext)green;
    return CUDA_SUCCESS;
}
static CUresult green_ends(CUgreenCtx green)
{
    CHECK_EQUAL(rg_track_find(rg_track_key(NULL)) == NULL, true);
    return RG_REAL(cuCtxDestroy_v2)((CUcontext)green);
}
static CUresult green_stream(CUstream *s, CUgreenCtx green, unsigned flags, int priority)
{
    (void)green;
    return RG_REAL(cuStreamCreateWithPriority)(s, flags, priority);
}

static void a_green_context_goes_like_any_other(void)
{
    become_high_without_agent();
#define REPLACE(symbol, new) rg_real.hooked[RG_HOOK_##symbol] = (void *)(uintptr_t)new
    REPLACE(cuCtxFromGreenCtx, green_is_context);
    REPLACE(cuGreenCtxDestroy, green_ends);
    REPLACE(cuGreenCtxStreamCreate, green_stream);
#undef REPLACE
    CUstream s;
    int priority = 99;
    CUcontext green = busy_in_a_context();
    CHECK_EQUAL(cuGreenCtxStreamCreate(&s, (CUgreenCtx)green, CU_STREAM_NON_BLOCKING, -1), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuStreamGetPriority(s, &priority), CUDA_SUCCESS);
    CHECK_EQUAL(priority, -5); /* a high client's, of those that it has raised */
    CHECK_EQUAL(cuGreenCtxDestroy((CUgreenCtx)green), CUDA_SUCCESS);
    CHECK_EQUAL(busy_word(), 0);
    done();
}

static void per_thread_streams_of_many_threads_do_not_lock_up(void)
{
    become("best-effort");
    pthread_t threads[6];
    for (int i = 0; i < 6; i++)
        CHECK_EQUAL(pthread_create(&threads[i], NULL, per_thread_work, current()), 0);
    for (int i = 0; i < 6; i++)
        CHECK_EQUAL(pthread_join(threads[i], NULL), 0);
    CHECK_EQUAL(rg_launches(rg.slot), 300);
    CHECK_EQUAL(rg.slot->starved, 0);
    done();
}

/* ---- attaching and leaving ---- */

static void leaving_is_final_and_may_be_said_twice(void)
{
    become("high");
    launch(spin, NULL, 1000);
    rigel_report_request(1000000);
    CHECK_EQUAL(busy_word(), 1);
    rigel_shutdown();
    rigel_shutdown();
    CHECK_EQUAL(busy_word(), 0);
    CHECK_EQUAL(rg.slot->state, RG_EXITED);
    CHECK_EQUAL(rg.slot->reports, 1);
    launch(spin, NULL, 1000);
    rigel_report_request(1000000);
    CHECK_EQUAL(busy_word(), 0);
    CHECK_EQUAL(rg_launches(rg.slot), 1);
    CHECK_EQUAL(rg.slot->reports, 1);
    done();
}

static void a_forked_child_is_no_client(void)
{
    become("high");
    launch(spin, NULL, 1000);
    pid_t pid = fork();
    if (pid == 0) {
        /* The driver refuses a forked child; Rigel must neither crash nor touch the parent's slot. */
        uint64_t n = 1;
        void *params[] = {&n, &n};
        cuLaunchKernel(spin, 1, 1, 1, 32, 1, 1, 0, NULL, params, NULL);
        rigel_shutdown();
        exit(0);
    }
    int status = -1;
    CHECK_EQUAL(waitpid(pid, &status, 0), pid);
    CHECK_EQUAL(status, 0);
    CHECK_EQUAL(rg.slot->state, RG_LIVE);
    CHECK_EQUAL(rg_launches(rg.slot), 1);
    done();
}

static void exit_leaves_the_slot_finished(void)
{
    int out[2];
    CHECK_EQUAL(pipe(out), 0);
    pid_t pid = fork();
    if (pid == 0) {
        become("high");
        CHECK_EQUAL(write(out[1], segment_path, strlen(segment_path) + 1), (ssize_t)strlen(segment_path) + 1);
        launch(spin, NULL, 1000);
        unlink(getenv("RIGEL_SIM_STATE"));
        exit(7);
    }
    char path[PATH_MAX] = "", why[512];
    CHECK(read(out[0], path, sizeof path - 1) > 0);
    int status;
    CHECK_EQUAL(waitpid(pid, &status, 0), pid);
    CHECK(WIFEXITED(status));
    CHECK_EQUAL(WEXITSTATUS(status), 7);
    seg = rg_segment_open(path, why, sizeof why);
    CHECK(seg != NULL);
    CHECK_EQUAL(seg->clients[0].state, RG_EXITED);
    CHECK_EQUAL(rg_launches(&seg->clients[0]), 1);
    CHECK(seg->clients[0].exited_ns >= seg->clients[0].attached_ns);
    CHECK_EQUAL(busy_word(), 0);
    unlink(path);
}

static void refused_segment_leaves_the_program_bare(void)
{
    setenv("RIGEL_SIM_STATE", scratch("refused-sim"), 1);
    setenv("RIGEL_SEGMENT", "/nonexistent/segment", 1);
    setenv("RIGEL_CLASS", "high", 1);
    CHECK(freopen("/dev/null", "w", stderr) != NULL);
    CHECK_EQUAL(cuInit(0), CUDA_SUCCESS);
    CHECK_EQUAL(rg.mode, RG_MODE_BARE);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_ERROR_INVALID_CONTEXT); /* the driver's own answer */
    unlink(getenv("RIGEL_SIM_STATE"));
}

static sem_t inside, go_on;
static CUresult (*destroy_context)(CUcontext);

static CUresult slow_destroy(CUcontext c)
{
    sem_post(&inside);
    while (sem_wait(&go_on) != 0)
        continue;
    return destroy_context(c);
}

static void *end_context(void *context)
{
    CHECK_EQUAL(cuCtxDestroy_v2((CUcontext)context), CUDA_SUCCESS);
    return NULL;
}

/* The driver may wait, in a context that ends, for what another thread has yet to begin elsewhere. */
static void a_context_that_takes_long_to_end_keeps_nobody_waiting(void)
{
    become_high_without_agent();
    CUcontext first = current(), second;
    CUstream stream, other;
    CUgraph graph;
    pthread_t thread;
    CHECK(sem_init(&inside, 0, 0) == 0 && sem_init(&go_on, 0, 0) == 0);
    CHECK_EQUAL(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    launch(spin, stream, 1000);
    CHECK_EQUAL(cu.cuCtxCreate_v2(&second, 0, 0), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuCtxSetCurrent(first), CUDA_SUCCESS);
    destroy_context = RG_REAL(cuCtxDestroy_v2);
    CUresult (*slow)(CUcontext) = slow_destroy;
    memcpy(&rg_real.hooked[RG_HOOK_cuCtxDestroy_v2], &slow, sizeof slow);
    CHECK_EQUAL(pthread_create(&thread, NULL, end_context, second), 0);
    while (sem_wait(&inside) != 0)
        continue;
    CHECK(!rg_agent_enter()); /* nobody uses a stream that is not his own */
    CHECK_EQUAL(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamEndCapture(stream, &graph), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamDestroy_v2(other), CUDA_SUCCESS);
    CHECK_EQUAL(sem_post(&go_on), 0);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    CHECK(rg_agent_enter());
    pthread_mutex_unlock(&rg_agent_lock);
    done();
}

/* Nobody reads what Rigel says, or nobody any more: neither keeps the program waiting, nor ends it. */
static void a_line_never_waits_and_never_kills(void)
{
    int ends[2], kept = dup(STDERR_FILENO);
    char full[65536] = {0};
    CHECK_EQUAL(pipe(ends), 0);
    CHECK_EQUAL(dup2(ends[1], STDERR_FILENO), STDERR_FILENO);
    CHECK_EQUAL(fcntl(ends[1], F_SETFL, O_NONBLOCK), 0);
    while (write(ends[1], full, sizeof full) > 0)
        continue;
    CHECK_EQUAL(fcntl(ends[1], F_SETFL, 0), 0);
    errno = 7;
    rg_say("nobody empties this pipe");
    CHECK_EQUAL(errno, 7);
    CHECK_EQUAL(close(ends[0]), 0);
    rg_say("nobody reads from this pipe");
    CHECK_EQUAL(errno, 7);
    sigset_t pending;
    CHECK(sigpending(&pending) == 0 && !sigismember(&pending, SIGPIPE));
    CHECK_EQUAL(dup2(kept, STDERR_FILENO), STDERR_FILENO);
}

int main(int argc, char **argv)
{
    (void)argc;
    ensure_environment("LD_LIBRARY_PATH", in_build_folder("sim"), argv);
    int failures = 0;
    RUN(capture_passes_and_a_graph_is_one_unit);
    RUN(captures_are_counted_right);
    RUN(captures_end_with_their_context);
    RUN(an_event_that_is_recorded_during_a_capture_stands_for_nothing_older);
    RUN(no_context_takes_no_capture);
    RUN(a_capture_goes_with_its_thread);
    RUN(a_thread_captures_in_two_contexts);
    RUN(threads_capture_their_own_streams);
    RUN(default_streams_of_two_contexts_are_told_apart);
    RUN(a_reset_context_starts_afresh);
    RUN(events_of_a_released_context_are_not_used);
    RUN(a_release_that_is_not_the_last_ends_nothing);
    RUN(a_context_that_is_detached_is_gone_with_the_last_who_attached);
    RUN(the_context_in_use_is_always_known);
    RUN(a_green_context_goes_like_any_other);
    RUN(per_thread_streams_of_many_threads_do_not_lock_up);
    RUN(a_context_that_takes_long_to_end_keeps_nobody_waiting);
    RUN(leaving_is_final_and_may_be_said_twice);
    RUN(a_forked_child_is_no_client);
    RUN(exit_leaves_the_slot_finished);
    RUN(refused_segment_leaves_the_program_bare);
    RUN(a_line_never_waits_and_never_kills);
    return failures ? 1 : 0;
}
