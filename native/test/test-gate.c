/*
 * test-gate.c: what a client does at the gate, and when a high client is busy, on the simulated GPU.
 *
 * The client's parts are linked into this program (so that sanitizers see them); the hooks are called by name, and reach the
 * simulated libcuda.so.1. Each case is a process. "Another client" is a slot and a busy bit that the test sets itself, so
 * nothing here depends on timing: a launch that must wait is seen waiting before it is let go.
 */
#include "client-testing.h"

static uint32_t policy = RG_POLICY_PRIORITY;

static const char ptx[] = PTX_HEADER PTX_KERNEL("rigel_spin") ".visible .entry ncclDevKernel_AllReduce(.param .u64 n)\n{ ret; }\n";
static CUfunction nccl;

/* Becomes a client of the given class with a fresh segment and a context. */
static void become(const char *class)
{
    prepare_waiting_client("gate", class);
    seg->settings.policy = policy;
    attach_client();
    CUmodule module = load_kernels(ptx);
    CHECK_EQUAL(cu.cuModuleGetFunction(&nccl, module, "ncclDevKernel_AllReduce"), CUDA_SUCCESS);
}

static void launch(CUfunction f, CUstream s, uint64_t block_ns)
{
    launch_blocks(f, s, 1, block_ns);
}

static uint64_t busy_word(void)
{
    return atomic_load(&seg->devices[0].high_busy);
}

static void other_busy(bool yes)
{
    if (yes)
        atomic_fetch_or(&seg->devices[0].high_busy, 1ull << OTHER);
    else
        rg_segment_clear_busy(seg, OTHER);
}

static void become_high_without_agent(void);

/* ---- best-effort ---- */

static _Atomic int launched;
static void *launch_one(void *context)
{
    CHECK_EQUAL(cu.cuCtxSetCurrent((CUcontext)context), CUDA_SUCCESS);
    launch(spin, NULL, 1000);
    atomic_store(&launched, 1);
    return NULL;
}

static CUcontext current(void)
{
    CUcontext c = NULL;
    CHECK_EQUAL(rg_real.cuCtxGetCurrent(&c), CUDA_SUCCESS);
    return c;
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
    CHECK_EQUAL(rg.slot->launches, 2);
    CHECK_EQUAL(rg.slot->gate_waits, 1);
    CHECK(rg.slot->gate_wait_ns > 0);
    CHECK_EQUAL(rg.slot->starved, 0);
    CHECK_EQUAL(seg->devices[0].waiters, 0);
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

static void policy_none_measures_only(void)
{
    become("best-effort");
    atomic_store(&seg->settings.policy, RG_POLICY_NONE);
    other_busy(true);
    for (int i = 0; i < 100; i++)
        launch(spin, NULL, 1000);
    CHECK_EQUAL(rg.slot->launches, 100);
    CHECK_EQUAL(rg.slot->gate_waits + rg.slot->inflight_waits, 0);
    CHECK_EQUAL(rg.members[0].inflight, 0);
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
        CHECK(rg.members[0].inflight < 9 * RG_POLICY_LAUNCH);
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
    launch(spin, NULL, 1000000000); /* a second: far longer than the bound */
    for (int i = 0; i < 8; i++)
        launch(spin, NULL, 1000);
    CHECK(rg.slot->launches == 9);
    CHECK_EQUAL(rg.slot->inflight_waits, 1);
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
    CHECK_EQUAL(rg.slot->gate_waits, 0);
    CHECK_EQUAL(rg.slot->copies, 4);
    CHECK_EQUAL(cuMemcpyDtoDAsync_v2(here, too, BYTES, NULL), CUDA_SUCCESS);
    CHECK_EQUAL(rg.slot->gate_waits, 1);
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
    CHECK_EQUAL(rg.members[0].inflight, 2 * RG_POLICY_LAUNCH);
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
        CHECK(rg.members[0].inflight < 20 * RG_POLICY_LAUNCH);
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
        launch(spin, NULL, 300000000);
    uint32_t before = atomic_load(&RG_PROCESS->inflight);
    CHECK(before > 0);
    CHECK_EQUAL(cuDevicePrimaryCtxRelease_v2(0), CUDA_SUCCESS);
    CHECK_EQUAL(atomic_load(&RG_PROCESS->inflight), before);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
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
    CHECK_EQUAL(rg.slot->launches, 300);
    CHECK_EQUAL(rg.slot->starved, 0);
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
    rg_segment_hold(seg, 30);
    launch(spin, NULL, 1000); /* waits those 30 ms */
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
    atomic_store(&left_inflight, rg.members[0].inflight - t->unbatched);
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
    CHECK_EQUAL(rg.members[0].inflight, left_inflight);
    done();
}

/* ---- orion ---- */

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
    CHECK_EQUAL(rg.slot->gate_waits, 0);
    CHECK_EQUAL(rg.slot->unprofiled, 0);
    CHECK(dev->outstanding_ns > 0);
    CHECK_EQUAL(dev->outstanding_ns, share_of(0)->outstanding_ns);
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

/* ---- high ---- */

static void idle_after(const char *what, uint64_t requests)
{
    if (busy_word() != 0 || rg.slot->requests != requests) {
        fprintf(stderr, "%s: busy word %llx, %llu requests, expected 0 and %llu\n", what, (unsigned long long)busy_word(),
                (unsigned long long)rg.slot->requests, (unsigned long long)requests);
        _exit(1);
    }
}

/* The agent is kept out of these cases: it must be the program's own wait that ends the period. */
static void become_high_without_agent(void)
{
    become("high");
    seg->settings.quiet_us = 4000000000u;
}

/* How long the program waited, of an entry of the ring. */
static uint64_t waited_ns(int entry)
{
    return (rg.slot->waited_ring[entry] >> 4 & 0xfffffff) * RG_WAITED_NS;
}

static void every_kind_of_wait_ends_a_request(void)
{
    become_high_without_agent();
    CUstream s;
    CUevent e;
    CUdeviceptr p;
    char host[64];
    uint64_t requests = 0, begun_ns = rg_now_ns();
    CHECK_EQUAL(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuEventCreate(&e, CU_EVENT_DISABLE_TIMING), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuMemAlloc_v2(&p, sizeof host), CUDA_SUCCESS);
    CHECK_EQUAL(busy_word(), 0);
    for (int i = 0; i < 5; i++)
        launch(spin, s, 1000);
    CHECK_EQUAL(busy_word(), 1); /* slot 0 */
    CHECK_EQUAL(cuStreamSynchronize(s), CUDA_SUCCESS);
    idle_after("cuStreamSynchronize", ++requests);
    launch(spin, s, 1000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    idle_after("cuCtxSynchronize", ++requests);
    launch(spin, s, 1000);
    CHECK_EQUAL(cuEventRecord(e, s), CUDA_SUCCESS);
    CHECK_EQUAL(cuEventSynchronize(e), CUDA_SUCCESS);
    idle_after("cuEventSynchronize", ++requests);
    launch(spin, s, 1000);
    CHECK_EQUAL(cuEventRecord(e, s), CUDA_SUCCESS);
    WAIT_FOR(cuEventQuery(e) == CUDA_SUCCESS);
    idle_after("cuEventQuery", ++requests);
    launch(spin, s, 1000);
    WAIT_FOR(cuStreamQuery(s) == CUDA_SUCCESS);
    idle_after("cuStreamQuery", ++requests);
    launch(spin, NULL, 1000);
    CHECK_EQUAL(cuMemcpyDtoH_v2(host, p, sizeof host), CUDA_SUCCESS);
    idle_after("cuMemcpyDtoH", ++requests);
    launch(spin, s, 1000);
    CHECK_EQUAL(cuStreamDestroy_v2(s), CUDA_SUCCESS);
    idle_after("cuStreamDestroy", ++requests);
    uint64_t in_histogram = 0;
    for (int i = 0; i < RG_HIST_BUCKETS; i++)
        in_histogram += rg.slot->request_ns.count[i];
    CHECK_EQUAL(in_histogram, requests);
    /* Of those that ended in a wait (not a query, nor with the stream) it is known how much of them that was. */
    CHECK_EQUAL(rg.slot->waited, 4);
    uint64_t known_ns = 0;
    for (int i = 0; i < 4; i++) {
        uint64_t entry = rg.slot->waited_ring[i];
        CHECK(waited_ns(i) != 0);
        CHECK_EQUAL(entry & 15, 0); /* the device */
        known_ns += (entry >> 32) * RG_WAITED_NS + waited_ns(i);
        /* One began after the one before it was over. */
        CHECK(rg.slot->began_ring[i] >= (i ? rg.slot->began_ring[i - 1] : begun_ns) && rg.slot->began_ring[i] < rg_now_ns());
        if (i)
            CHECK(rg.slot->began_ring[i] - rg.slot->began_ring[i - 1] >=
                  (rg.slot->waited_ring[i - 1] >> 32) * RG_WAITED_NS + waited_ns(i - 1));
    }
    CHECK(known_ns > 0 && known_ns <= rg_now_ns() - begun_ns);
    CHECK_EQUAL(rg.slot->waited_ring[4], 0);
    /* A copy to memory that is not pinned waits, whatever it is called: that is no work of the program. */
    CHECK_EQUAL(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    launch(spin, s, 20000000);
    uint64_t before_ns = rg_now_ns();
    CHECK_EQUAL(cuMemcpyDtoHAsync_v2(host, p, sizeof host, s), CUDA_SUCCESS);
    uint64_t copied_ns = rg_now_ns() - before_ns;
    CHECK_EQUAL(cuStreamSynchronize(s), CUDA_SUCCESS);
    CHECK_EQUAL(rg.slot->waited, 5);
    CHECK(waited_ns(4) >= copied_ns / 2);
    CHECK(waited_ns(4) >= 10000000);
    done();
}

static void a_wait_that_does_not_cover_everything_ends_nothing(void)
{
    become_high_without_agent();
    CUstream a, b;
    CUevent e;
    CHECK_EQUAL(cuStreamCreate(&a, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamCreate(&b, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuEventCreate(&e, CU_EVENT_DISABLE_TIMING), CUDA_SUCCESS);
    launch(spin, a, 1000);
    launch(spin, b, 1000);
    CHECK_EQUAL(cuStreamSynchronize(a), CUDA_SUCCESS);
    CHECK_EQUAL(busy_word(), 1);
    CHECK_EQUAL(rg.slot->waited, 0);
    CHECK_EQUAL(cuStreamSynchronize(b), CUDA_SUCCESS);
    idle_after("both streams", 1);
    CHECK_EQUAL(rg.slot->waited, 1);
    /* What is waited for one after the other is waited for all the same. */
    launch(spin, a, 20000000);
    launch(spin, b, 1000);
    CHECK_EQUAL(cuStreamSynchronize(a), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamSynchronize(b), CUDA_SUCCESS);
    idle_after("both streams again", 2);
    CHECK(waited_ns(1) >= 10000000);
    /* An event recorded before the last launch says nothing about it. */
    launch(spin, a, 1000);
    CHECK_EQUAL(cuEventRecord(e, a), CUDA_SUCCESS);
    launch(spin, a, 1000);
    CHECK_EQUAL(cuEventSynchronize(e), CUDA_SUCCESS);
    CHECK_EQUAL(busy_word(), 1);
    CHECK_EQUAL(cuStreamSynchronize(a), CUDA_SUCCESS);
    idle_after("after the old event", 3);
    done();
}

static void the_agent_finds_what_nobody_waits_for(void)
{
    become("high");
    launch(spin, NULL, 1000);
    launch(spin, CU_STREAM_PER_THREAD, 1000);
    CHECK_EQUAL(busy_word(), 1);
    WAIT_FOR(busy_word() == 0);
    WAIT_FOR(rg.slot->agent_idle == 1);
    CHECK_EQUAL(rg.slot->requests, 1);
    done();
}

static CUevent awaited;
static uint64_t busy_after;
static void *wait_for_event(void *context)
{
    CHECK_EQUAL(cu.cuCtxSetCurrent((CUcontext)context), CUDA_SUCCESS);
    CHECK_EQUAL(cuEventSynchronize(awaited), CUDA_SUCCESS);
    busy_after = busy_word();
    return NULL;
}

static CUresult refuse_event(CUevent e)
{
    (void)e;
    return CUDA_ERROR_INVALID_HANDLE;
}

/* Whether the agent has an event of its own behind what the track has now. */
static bool agent_looks_at(const rg_track *t)
{
    pthread_mutex_lock(&rg_agent_lock);
    bool looks = atomic_load(&t->state) == t->agent_token;
    pthread_mutex_unlock(&rg_agent_lock);
    return looks;
}

/* Who is blocked until an event is the first to know, though the agent has looked at the stream before. */
static void the_agent_leaves_it_to_who_waits_for_an_event(void)
{
    become("high");
    CHECK_EQUAL(cu.cuEventCreate(&awaited, CU_EVENT_DISABLE_TIMING), CUDA_SUCCESS);
    CHECK_EQUAL(rg_real.rigelSimSuspend(0, 1), 0); /* nothing is done before it is resumed */
    launch(spin, NULL, 1000);
    CHECK_EQUAL(cuEventRecord(awaited, NULL), CUDA_SUCCESS);
    const rg_track *t = rg_track_find(rg_track_key(NULL));
    WAIT_FOR(agent_looks_at(t));
    /* A wait that fails is none. */
    void **synchronize = &rg_real.hooked[RG_HOOK_cuEventSynchronize], *before = *synchronize;
    *(CUresult(**)(CUevent))synchronize = refuse_event;
    uint64_t token = atomic_load(&t->state);
    CHECK_EQUAL(cuEventSynchronize(awaited), CUDA_ERROR_INVALID_HANDLE);
    *synchronize = before;
    WAIT_FOR(atomic_load(&t->state) != token && agent_looks_at(t));
    CHECK_EQUAL(cuEventRecord(awaited, NULL), CUDA_SUCCESS);
    pthread_t thread;
    CHECK_EQUAL(pthread_create(&thread, NULL, wait_for_event, current()), 0);
    WAIT_FOR((atomic_load(&t->state) & 3) == RG_TOKEN_WAIT);
    CHECK_EQUAL(rg_real.rigelSimSuspend(0, 0), 0);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    CHECK_EQUAL(busy_after, 0);
    CHECK_EQUAL(rg.slot->agent_idle, 0);
    idle_after("cuEventSynchronize", 1);
    done();
}

static void *per_thread_launch(void *context)
{
    CUmodule module;
    CUfunction own_spin;
    CHECK_EQUAL(cu.cuCtxSetCurrent(context), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuModuleLoadData(&module, ptx), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuModuleGetFunction(&own_spin, module, "rigel_spin"), CUDA_SUCCESS);
    uint64_t ended = rg.slot->agent_idle;
    launch(own_spin, CU_STREAM_PER_THREAD, 100000000);
    WAIT_FOR(rg.slot->agent_idle == ended + 1);
    CHECK_EQUAL(RG_REAL(cuStreamQuery)(CU_STREAM_PER_THREAD), CUDA_SUCCESS); /* it asked for this one's end */
    return NULL;
}

/* The stream of a thread that ended leaves its place to one of another context, where the event of the first is of no use. */
static void the_agent_waits_in_the_right_context(void)
{
    setenv("RIGEL_SIM_DEVICES", "2", 1);
    become("high");
    seg->settings.quiet_us = 20000; /* longer than a machine under load holds a thread up within a launch, and short beside the kernel */
    CUcontext contexts[2] = {current()};
    CHECK_EQUAL(cu.cuDevicePrimaryCtxRetain(&contexts[1], 1), CUDA_SUCCESS);
    for (int i = 0; i < 6; i++) {
        pthread_t thread;
        CHECK_EQUAL(pthread_create(&thread, NULL, per_thread_launch, contexts[i % 2]), 0);
        CHECK_EQUAL(pthread_join(thread, NULL), 0);
        CHECK_EQUAL(rg.track_count, 1);
    }
    done();
}

static void high_never_waits(void)
{
    become_high_without_agent();
    launch(spin, NULL, 1000);
    other_busy(true);
    for (int i = 0; i < 100; i++)
        launch(spin, NULL, 1000);
    CHECK_EQUAL(rg.slot->gate_waits + rg.slot->inflight_waits, 0);
    done();
}

static void *hammer(void *context)
{
    CUstream s;
    CHECK_EQUAL(cu.cuCtxSetCurrent((CUcontext)context), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    for (int i = 0; i < 300; i++) {
        for (int j = 0; j < 3; j++)
            launch(spin, s, 500);
        CHECK(busy_word() == 1);
        CHECK_EQUAL(cuStreamSynchronize(s), CUDA_SUCCESS);
    }
    CHECK_EQUAL(cuStreamDestroy_v2(s), CUDA_SUCCESS);
    return NULL;
}

/* Threads that launch and wait each on a stream of its own: while any has work the client is busy, at the end it is not. */
static void threads_keep_the_client_busy(void)
{
    become("high");
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        CHECK_EQUAL(pthread_create(&threads[i], NULL, hammer, current()), 0);
    for (int i = 0; i < 4; i++)
        CHECK_EQUAL(pthread_join(threads[i], NULL), 0);
    CHECK_EQUAL(busy_word(), 0);
    CHECK_EQUAL(rg.slot->launches, 4 * 300 * 3);
    CHECK(rg.slot->requests >= 1 && rg.slot->requests <= 4 * 300);
    done();
}

static void priorities_follow_the_class(void)
{
    become("high");
    CUstream plain, raised;
    int priority = 99;
    CHECK_EQUAL(cuStreamCreate(&plain, 0), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamCreateWithPriority(&raised, 0, -1), CUDA_SUCCESS);
    launch(spin, NULL, 1000);
    CHECK_EQUAL(cu.cuStreamGetPriority(plain, &priority), CUDA_SUCCESS);
    CHECK_EQUAL(priority, -4);
    CHECK_EQUAL(cu.cuStreamGetPriority(raised, &priority), CUDA_SUCCESS);
    CHECK_EQUAL(priority, -5);
    CHECK_EQUAL(cu.cuStreamGetPriority(NULL, &priority), CUDA_SUCCESS);
    CHECK_EQUAL(priority, -4);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    done();
}

static void best_effort_priorities_are_the_lowest(void)
{
    become("best-effort");
    CUstream raised;
    int priority = 99;
    CHECK_EQUAL(cuStreamCreateWithPriority(&raised, 0, -5), CUDA_SUCCESS);
    launch(spin, NULL, 1000);
    CHECK_EQUAL(cu.cuStreamGetPriority(raised, &priority), CUDA_SUCCESS);
    CHECK_EQUAL(priority, -1);
    CHECK_EQUAL(cu.cuStreamGetPriority(NULL, &priority), CUDA_SUCCESS);
    CHECK_EQUAL(priority, 0);
    done();
}

/* ---- joining and leaving ---- */

/* ---- taken off the GPU (preempt.c) ---- */

static rg_device *dev0(void)
{
    return &seg->devices[0];
}

/* Another client of class high begins to launch, or waits for what it has and is done. */
static void other_launches(bool on)
{
    if (on)
        rg_device_busy(dev0(), OTHER, rg_now_ns());
    else
        rg_device_idle(dev0(), OTHER, rg_now_ns());
    if (on)
        rg_device_launching(dev0(), OTHER, true);
    else
        rg_device_wake(dev0());
}

/* A best-effort client whose channels can be controlled, as the simulated GPU's can. */
static void become_preemptible(void)
{
    become("best-effort");
    launch(spin, NULL, 1000);
    seg->settings.preempt = 1;
    WAIT_FOR(atomic_load(&rg.preemptible[0]));
    CHECK_EQUAL(rg.slot->preemption, RG_PREEMPTION_ON);
    CHECK_EQUAL(rg.slot->slice_us, seg->settings.slice_us);
}

/* How long its kernels take is learned though it passes no gate, by a few samples of each, while it is new. */
static void preemptible_and_timed_while_new(void)
{
    enum { LAUNCHES = 400, MOST = 32 }; /* more than are under way at once */
    become_preemptible();
    CHECK_EQUAL(rg.preemptible[0], RG_PREEMPTIBLE_NEW);
    for (int i = 0; i < LAUNCHES || rg.slot->samples < RG_SAMPLE_FIRST; i++) {
        launch(spin, NULL, 1000);
        CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    }
    rg_samples_poll();
    uint64_t samples = rg.slot->samples;
    CHECK(samples <= MOST);
    atomic_fetch_add(&rg.slot->launches, RG_SAMPLED_LAUNCHES);
    WAIT_FOR(atomic_load(&rg.preemptible[0]) == RG_PREEMPTIBLE);
    for (int i = 0; i < 20; i++)
        launch_blocks(spin, NULL, 2, 1000); /* another one, then */
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    rg_samples_poll();
    CHECK_EQUAL(rg.slot->samples, samples);
    CHECK_EQUAL(rg.slot->gate_waits, 0);
    done();
}

static _Atomic int synchronised;
static void *synchronise(void *context)
{
    CHECK_EQUAL(cu.cuCtxSetCurrent((CUcontext)context), CUDA_SUCCESS);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    atomic_store(&synchronised, 1);
    return NULL;
}

/* It launches on, beyond any limit; its work waits on the GPU, until the high client waits for all it has launched. */
static void suspended_while_high_launches(void)
{
    become_preemptible();
    seg->settings.starvation_us = 60000000; /* not on a busy machine either */
    other_launches(true);
    WAIT_FOR(atomic_load(&rg.slot->suspensions) == 1);
    for (int i = 0; i < 100; i++)
        launch(spin, NULL, 1000);
    CHECK_EQUAL(rg.slot->gate_waits + rg.slot->inflight_waits, 0);
    pthread_t thread;
    CHECK_EQUAL(pthread_create(&thread, NULL, synchronise, current()), 0);
    usleep(20000);
    CHECK_EQUAL(atomic_load(&synchronised), 0);
    /* Still busy, but nothing more comes: what is queued has the GPU, and best-effort work may queue up behind it. */
    rg_device_launching(dev0(), OTHER, false);
    rg_device_wake(dev0());
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    WAIT_FOR(atomic_load(&rg.slot->suspended_ns) > 0); /* it is told a moment later */
    CHECK_EQUAL(rg.slot->starved, 0);
    /* The next request; this time it ends by a hold's end as well. */
    other_launches(true);
    WAIT_FOR(atomic_load(&rg.slot->suspensions) == 2);
    other_launches(false);
    launch(spin, NULL, 1000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    rg_segment_hold(seg, 50);
    WAIT_FOR(atomic_load(&rg.slot->suspensions) == 3);
    launch(spin, NULL, 1000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS); /* once the hold has ended by itself */
    done();
}

/* Nobody waits for ever: after the starvation bound it gets its due, though the high client goes on. */
static void suspension_ends_by_the_starvation_bound(void)
{
    become_preemptible();
    seg->settings.starvation_us = 20000;
    other_launches(true);
    WAIT_FOR(atomic_load(&rg.slot->suspensions) == 1);
    launch(spin, NULL, 1000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    WAIT_FOR(atomic_load(&rg.slot->starved) > 0); /* it is told a moment later */
    done();
}

/* Without suspension it has short slices; without preemption, or under another policy, the driver's and the gate again. */
static void preemption_can_be_changed_at_any_time(void)
{
    become_preemptible();
    seg->settings.suspend = 0;
    other_launches(true);
    launch(spin, NULL, 1000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    CHECK_EQUAL(rg.slot->suspensions, 0);
    seg->settings.slice_us = 300;
    WAIT_FOR(atomic_load(&rg.slot->slice_us) == 300);
    seg->settings.policy = RG_POLICY_NONE;
    WAIT_FOR(!atomic_load(&rg.preemptible[0]));
    WAIT_FOR(atomic_load(&rg.slot->slice_us) == 2048);
    seg->settings.policy = RG_POLICY_SLO;
    WAIT_FOR(atomic_load(&rg.preemptible[0]));
    done();
}

/* Looks of the agent, at channels among other things. */
static void some_beats(int n)
{
    for (uint64_t seen = rg.slot->heartbeat_ns; n; n--, seen = rg.slot->heartbeat_ns)
        WAIT_FOR(atomic_load(&rg.slot->heartbeat_ns) != seen);
}

/* A process without a context has nothing that could be taken off the GPU, however long and whoever asks; later it has again. */
static void preemptible_again_after_a_reset(void)
{
    become_preemptible();
    for (int i = 0; i < 2; i++) {
        CHECK_EQUAL(cuDevicePrimaryCtxReset_v2(0), CUDA_SUCCESS);
        other_launches(i);
        some_beats(i ? 3 : 25);
        CHECK_EQUAL(rg.preemptible[0], 0);
        other_launches(false);
        CUcontext context;
        CHECK_EQUAL(cu.cuDevicePrimaryCtxRetain(&context, 0), CUDA_SUCCESS);
        CHECK_EQUAL(cu.cuCtxSetCurrent(context), CUDA_SUCCESS);
        load_kernels(ptx);
        launch(spin, NULL, 1000);
        WAIT_FOR(atomic_load(&rg.preemptible[0]));
    }
    CHECK_EQUAL(rg.slot->preemption, RG_PREEMPTION_ON);
    other_launches(true);
    WAIT_FOR(atomic_load(&rg.slot->suspensions) == 1);
    other_launches(false);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    done();
}

static int (*real_suspend)(unsigned, int);
static _Atomic int failing, resumed;
/* Says that it has not suspended, though it has, and does not resume at first. */
static int fail_half_way(unsigned ordinal, int suspend)
{
    if (!atomic_load(&failing))
        return real_suspend(ordinal, suspend);
    if (!suspend)
        return atomic_fetch_add(&resumed, 1) < 5 ? -EIO : real_suspend(ordinal, 0);
    CHECK_EQUAL(real_suspend(ordinal, 1), 0);
    return -EIO;
}

static void a_suspension_that_failed_is_undone_until_that_succeeds(void)
{
    CHECK(rg_real_ready()); /* replaced before there are threads of Rigel's */
    real_suspend = rg_real.rigelSimSuspend;
    rg_real.rigelSimSuspend = fail_half_way;
    become_preemptible();
    atomic_store(&failing, 1);
    other_launches(true);
    WAIT_FOR(atomic_load(&resumed) == 6);
    CHECK_EQUAL(rg.preemptible[0], 0);
    other_launches(false);
    launch(spin, NULL, 1000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    done();
}

/* A client that leaves, or ends, while it is off the GPU leaves nothing behind that waits. */
static void leaving_while_suspended(void)
{
    become_preemptible();
    other_launches(true);
    WAIT_FOR(atomic_load(&rg.slot->suspensions) == 1);
    launch(spin, NULL, 1000);
    rigel_shutdown();
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    /* The driver's own: the program goes on without Rigel, which may not have waited for its thread on a machine under load. */
    WAIT_FOR(rg.slot->slice_us == 2048);
    done();
}

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
    CHECK_EQUAL(rg.slot->launches, 1);
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
    CHECK_EQUAL(rg.slot->launches, 1);
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
    CHECK_EQUAL(seg->clients[0].launches, 1);
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

int main(int argc, char **argv)
{
    (void)argc;
    ensure_environment("LD_LIBRARY_PATH", in_build_folder("sim"), argv);
    int failures = 0;
    RUN(waits_while_high_is_busy);
    RUN(starvation_bound_lets_one_batch_out);
    RUN(stale_high_client_is_ignored);
    RUN(shutdown_setting_opens_the_gate);
    RUN(policy_none_measures_only);
    RUN(in_flight_is_limited);
    RUN(in_flight_wait_is_bounded);
    RUN(kernels_that_share_a_place_are_all_known);
    RUN(small_copies_pass_bulk_copies_wait);
    RUN(hold_has_an_end);
    RUN(breaks_end_a_spell);
    RUN(least_share_comes_only_after_the_bound);
    RUN(fair_best_effort_waits);
    RUN(fair_high_waits_as_well);
    RUN(fair_ignores_the_idle_and_levels_who_comes_back);
    RUN(fair_charges_what_was_launched);
    RUN(fair_takes_what_an_ended_thread_left_for_done);
    RUN(orion_lets_out_what_does_not_disturb);
    RUN(orion_limits_what_is_outstanding);
    RUN(orion_shows_what_high_kernels_are_bound_by);
    RUN(copies_between_devices_never_wait);
    RUN(communication_kernels_never_wait);
    RUN(capture_passes_and_a_graph_is_one_unit);
    RUN(captures_are_counted_right);
    RUN(default_streams_of_two_contexts_are_told_apart);
    RUN(a_reset_context_starts_afresh);
    RUN(events_of_a_released_context_are_not_used);
    RUN(a_release_that_is_not_the_last_ends_nothing);
    RUN(per_thread_streams_of_many_threads_do_not_lock_up);
    RUN(every_kind_of_wait_ends_a_request);
    RUN(a_wait_that_does_not_cover_everything_ends_nothing);
    RUN(the_agent_finds_what_nobody_waits_for);
    RUN(the_agent_leaves_it_to_who_waits_for_an_event);
    RUN(the_agent_waits_in_the_right_context);
    RUN(high_never_waits);
    RUN(threads_keep_the_client_busy);
    RUN(priorities_follow_the_class);
    RUN(best_effort_priorities_are_the_lowest);
    RUN(preemptible_and_timed_while_new);
    RUN(suspended_while_high_launches);
    RUN(suspension_ends_by_the_starvation_bound);
    RUN(preemption_can_be_changed_at_any_time);
    RUN(preemptible_again_after_a_reset);
    RUN(a_suspension_that_failed_is_undone_until_that_succeeds);
    RUN(leaving_while_suspended);
    RUN(leaving_is_final_and_may_be_said_twice);
    RUN(a_forked_child_is_no_client);
    RUN(exit_leaves_the_slot_finished);
    RUN(refused_segment_leaves_the_program_bare);
    return failures ? 1 : 0;
}
