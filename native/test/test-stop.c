/*
 * test-stop.c: a best-effort client whose streams stop between two kernels (stop.c), as it has no channels of its own (under MPS), or in
 * its time slices. As test-preempt.c.
 */
#include "gate-testing.h"

#include <sys/prctl.h>
#include <sys/syscall.h>

static rg_device *dev0(void)
{
    return &seg->devices[0];
}

/* Another client of class high begins to launch; waits for what it has; is done. */
static void other_launches(void)
{
    rg_device_busy(dev0(), OTHER, rg_now_ns());
    rg_device_launching(dev0(), OTHER, true);
}

static void other_waits(void)
{
    rg_device_launching(dev0(), OTHER, false);
    rg_device_wake(dev0());
}

static void other_is_done(void)
{
    rg_device_idle(dev0(), OTHER, rg_now_ns());
    rg_device_wake(dev0());
}

/* Stops that have been put in streams, and what the driver says to that. */
static __typeof__(rg_real.cuStreamWaitValue32_v2) real_stop;
static _Atomic int stopped_before;
static _Atomic CUresult answer;
static _Atomic(CUdeviceptr) stops_at; /* where the GPU looks */
static CUresult stop(CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags)
{
    atomic_fetch_add(&stopped_before, 1);
    atomic_store(&stops_at, address);
    return atomic_load(&answer) ? atomic_load(&answer) : real_stop(stream, address, value, flags);
}

/* A best-effort client under MPS, before its agent has looked at what it can do. */
static void become_under_mps(void)
{
    setenv("RIGEL_SIM_MPS", "1", 1);
    CHECK(rg_real_ready()); /* replaced before there are threads of Rigel's */
    real_stop = rg_real.cuStreamWaitValue32_v2;
    rg_real.cuStreamWaitValue32_v2 = stop;
    become("best-effort");
    launch(spin, NULL, 1000);
    seg->settings.preempt = 1;
}

static void become_stoppable(void)
{
    become_under_mps();
    WAIT_FOR(atomic_load(&rg.preemptible[0]) == RG_STOPPABLE);
    CHECK_EQUAL(rg.slot->preemption, RG_PREEMPTION_STOPS);
    CHECK_EQUAL(rg.slot->slice_us, 0);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
}

static _Atomic int synchronised;
static void *synchronise(void *context)
{
    CHECK_EQUAL(cu.cuCtxSetCurrent((CUcontext)context), CUDA_SUCCESS);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    atomic_store(&synchronised, 1);
    return NULL;
}

static pthread_t begin_to_synchronise(void)
{
    pthread_t thread;
    atomic_store(&synchronised, 0);
    CHECK_EQUAL(pthread_create(&thread, NULL, synchronise, current()), 0);
    return thread;
}

/* It launches on, beyond any limit; its work waits on the GPU until the high client is done with what it has launched. */
static void stops_until_high_clients_are_idle(void)
{
    become_stoppable();
    for (int i = 0; i < 3; i++) {
        uint64_t off_ns = atomic_load(&rg.slot->suspended_ns);
        other_launches();
        WAIT_FOR(atomic_load(&rg.slot->suspensions) == (uint64_t)i + 1);
        for (int k = 0; k < 100; k++)
            launch(spin, NULL, 200000);
        CHECK_EQUAL(rg.slot->gate_waits + rg.slot->inflight_waits, 0);
        pthread_t thread = begin_to_synchronise();
        usleep(50000);
        other_waits();
        usleep(50000);
        CHECK_EQUAL(atomic_load(&synchronised), 0);
        CHECK_EQUAL(atomic_load(&rg.slot->suspended_ns), off_ns);
        other_is_done();
        CHECK_EQUAL(pthread_join(thread, NULL), 0);
        WAIT_FOR(atomic_load(&rg.slot->suspended_ns) > off_ns); /* it is told a moment later */
    }
    CHECK_EQUAL(rg.slot->starved, 0);
    done();
}

/* A high client that waits before best-effort work has stopped has the GPU to itself for what it waits for. */
static void stops_when_a_request_waits(void)
{
    become_stoppable();
    seg->settings.defer_us = 60000000;
    other_launches();
    usleep(20000);
    CHECK_EQUAL(rg.slot->suspensions, 0);
    other_waits();
    WAIT_FOR(atomic_load(&rg.slot->suspensions) == 1);
    CHECK_EQUAL(atomic_load(&rg.slot->suspended_ns), 0);
    other_is_done();
    WAIT_FOR(atomic_load(&rg.slot->suspended_ns) > 0);
    done();
}

/* A hold stops it, and ends by itself; where suspension is off nothing else does. */
static void a_hold_stops_it(void)
{
    become_stoppable();
    seg->settings.suspend = 0;
    other_launches();
    launch(spin, NULL, 200000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    CHECK_EQUAL(rg.slot->suspensions, 0);
    rg_segment_hold(seg, RG_HOLD_LIMIT_MS);
    WAIT_FOR(atomic_load(&rg.slot->suspensions) == 1);
    for (int k = 0; k < 3; k++)
        launch(spin, NULL, 200000);
    rg_segment_hold(seg, 30);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS); /* once the hold has ended by itself */
    done();
}

/* Where high clients never rest it gets its due all the same. */
static void nobody_is_stopped_for_ever(void)
{
    become_stoppable();
    seg->settings.starvation_us = 20000;
    other_launches();
    WAIT_FOR(atomic_load(&rg.slot->suspensions) == 1);
    for (int k = 0; k < 3; k++)
        launch(spin, NULL, 200000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    WAIT_FOR(atomic_load(&rg.slot->starved) > 0);
    done();
}

/* There is a stop for so much work, by what is known of kernels, in each stream; what is not known yet counts as 100 us. */
static void a_stop_for_so_much_work(void)
{
    become_stoppable();
    seg->settings.stop_us = 250;
    CUstream other;
    CHECK_EQUAL(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    static const struct {
        uint32_t kernel_ns;
        int launches, stops;
    } cases[] = {{0, 12, 5}, {50000, 20, 3}, {249000, 10, 9}, {600000, 10, 10}, {1000, 200, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        unsigned blocks = 2 + (unsigned)i; /* a kernel of its own */
        uint64_t key = rg_duration_key((uintptr_t)spin, rg_dims_of(blocks, 1, 1, 32, 1, 1));
        rg_duration_reset(key, cases[i].kernel_ns);
        atomic_store(&rg_duration_of(key)->seen, RG_SAMPLE_FIRST); /* and is not timed */
        rg_track *t = rg_track_of(NULL);
        atomic_store(&t->since_stop_ns, 0);
        atomic_store(&rg_track_of(other)->since_stop_ns, 0);
        int before = atomic_load(&stopped_before);
        for (int k = 0; k < cases[i].launches; k++) {
            launch_blocks(spin, NULL, blocks, 1000);
            launch_blocks(spin, other, blocks, 1000);
        }
        CHECK_EQUAL(atomic_load(&stopped_before) - before, 2 * cases[i].stops);
    }
    /* None in front of work that others wait for, from the first on, however much is in front of that. */
    launch_blocks(spin, NULL, 5, 1000); /* of 600 us, as was said */
    int before = atomic_load(&stopped_before);
    for (unsigned k = 0; k < 10; k++)
        launch_blocks(nccl, NULL, 1 + k / 5, 200000);
    CHECK_EQUAL(atomic_load(&stopped_before), before);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    done();
}

/* How long its kernels take is learned as long as too little is known of them. */
static void its_kernels_are_timed(void)
{
    become_stoppable();
    for (int i = 0; i < 40; i++) {
        launch_blocks(spin, NULL, 3, 300000);
        CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    }
    rg_samples_poll();
    CHECK(rg.slot->samples <= 2 * RG_SAMPLE_FIRST); /* of this kernel, and of the first one */
    uint64_t key = rg_duration_key((uintptr_t)spin, rg_dims_of(3, 1, 1, 32, 1, 1));
    uint32_t ns = atomic_load(&rg_duration_of(key)->duration_ns);
    CHECK(ns >= 300000 && ns < 3000000);
    done();
}

static _Atomic int no_more;
static void *requests(void *unused)
{
    while (!atomic_load(&no_more)) {
        other_launches();
        usleep(3000);
        other_is_done();
        usleep(5000);
    }
    return unused;
}

/* Also beside requests, where it launches far ahead of the GPU: a stop is no part of what is timed. */
static void timed_beside_requests(void)
{
    enum { KERNELS = 10 };
    pthread_t thread;
    CHECK_EQUAL(pthread_create(&thread, NULL, requests, NULL), 0);
    WAIT_FOR(atomic_load(&rg.slot->suspensions) > 2);
    int known = 0;
    for (int i = 0; i < 300; i++)
        for (unsigned k = 0; k < KERNELS; k++)
            launch_blocks(spin, NULL, 3 + k, 200000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    rg_samples_poll();
    for (unsigned k = 0; k < KERNELS; k++)
        known += rg_duration_of(rg_duration_key((uintptr_t)spin, rg_dims_of(3 + k, 1, 1, 32, 1, 1)))->duration_ns != 0;
    CHECK_EQUAL(known, KERNELS);
    atomic_store(&no_more, 1);
    pthread_join(thread, NULL);
    done();
}

static void its_kernels_are_timed_beside_requests(void)
{
    become_stoppable();
    timed_beside_requests();
}

static void become_stoppable_in_slices(void)
{
    become("best-effort");
    launch(spin, NULL, 1000);
    seg->settings.preempt = 1;
    WAIT_FOR(atomic_load(&rg.preemptible[0]) == RG_STOPPABLE_SLICED);
    CHECK_EQUAL(rg.slot->preemption, RG_PREEMPTION_ON);
    CHECK(rg.slot->slice_us > 0);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    WAIT_FOR(!rg_stops_long(0)); /* what was queued before may be */
    WAIT_FOR(atomic_load(&rg.segment->stops[0].armed) >> rg.slot_index & 1); /* at the end of the beat */
}

/* Kernels of so many blocks, of so long each, to their end. */
static void launch_and_wait(unsigned blocks, uint64_t block_ns)
{
    for (int i = 0; i < 10; i++)
        launch_blocks(spin, NULL, blocks, block_ns);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
}

/* The GPU looks at the slot's own word, which says nothing of who had the slot before: he may have ended as he was stopped. */
static void the_word_is_its_own(void)
{
    setenv("RIGEL_SIM_MPS", "1", 1);
    CHECK(rg_real_ready());
    real_stop = rg_real.cuStreamWaitValue32_v2;
    rg_real.cuStreamWaitValue32_v2 = stop;
    prepare_waiting_client("gate", "best-effort");
    CHECK_EQUAL(rg_segment_claim(seg, "first", RG_CLASS_BEST_EFFORT, rg_now_ns()), 0); /* whose word is where the page begins */
    seg->settings.policy = policy;
    attach_client();
    load_kernels(ptx);
    launch(spin, NULL, 1000);
    _Atomic uint64_t *word = &rg.segment->stops[0].word[rg.slot_index];
    CHECK(rg.slot_index > 0);
    atomic_store(word, RG_STOP_STOPPED);
    seg->settings.preempt = 1;
    WAIT_FOR(atomic_load(&rg.preemptible[0]) == RG_STOPPABLE);
    CHECK(atomic_load(word) != RG_STOP_STOPPED);
    seg->settings.stop_us = 1;
    int before = atomic_load(&stopped_before);
    launch(spin, NULL, 200000);
    CHECK_EQUAL(atomic_load(&stopped_before), before + 1);
    CHECK(atomic_load(&stops_at) == (CUdeviceptr)(uintptr_t)word); /* the simulated GPU's are addresses of this process */
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    done();
}

/* What the segment knows of a kernel counts from its first launch on: how many stops there are, and that it is long. */
static void what_is_known_of_a_kernel_counts_at_once(void)
{
    become_stoppable_in_slices();
    const char *device = seg->devices[0].name;
    for (unsigned blocks = 2; blocks <= 3; blocks++) {
        int at = rg_estimate_enter(seg, rg_estimate_key(rg.program, device, rg_text_hash("rigel_spin"), rg_dims_of(blocks, 1, 1, 32, 1, 1)));
        CHECK(at >= 0);
        atomic_store(&seg->estimates[at].duration_ns, blocks == 2 ? 20000 : 2000000);
    }
    rg_track *t = rg_track_of(NULL);
    atomic_store(&t->since_stop_ns, 0);
    launch_blocks(spin, NULL, 2, 1000);
    CHECK_EQUAL(t->since_stop_ns, 20000);
    launch_blocks(spin, NULL, 3, 300000000);
    CHECK_EQUAL(t->since_stop_ns, 2000000);
    WAIT_FOR(rg_stops_long(0)); /* while the GPU is at it */
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    CHECK(!rg_stops_long(0));
    done();
}

static void in_its_slices_they_are_timed_too(void)
{
    become_stoppable_in_slices();
    timed_beside_requests();
}

/* Without stops for a moment, while high clients are busy and it had its due, it is at the gate, and has them again. */
static void a_moment_without_stops_ends_nothing(void)
{
    become_stoppable();
    seg->settings.starvation_us = 20000;
    other_launches();
    for (int i = 0; i < 2; i++) {
        WAIT_FOR(atomic_load(&rg.slot->starved) > 0);
        CUcontext first = current(), second = NULL;
        if (i == 0) {
            seg->settings.stop_us = 0;
        } else {
            CHECK_EQUAL(cuCtxCreate_v2(&second, 0, 0), CUDA_SUCCESS);
            load_kernels(ptx);
            launch(spin, NULL, 1000);
        }
        WAIT_FOR(atomic_load(&rg.slot->preemption) == RG_PREEMPTION_OFF);
        WAIT_FOR(atomic_load(&rg.preemptible[0]) == RG_NOT_PREEMPTIBLE);
        usleep(100000); /* some dues */
        if (i == 0)
            seg->settings.stop_us = 250;
        else
            CHECK_EQUAL(cuCtxDestroy_v2(second), CUDA_SUCCESS);
        CHECK_EQUAL(cu.cuCtxSetCurrent(first), CUDA_SUCCESS);
        WAIT_FOR(atomic_load(&rg.preemptible[0]) == RG_STOPPABLE);
    }
    done();
}

/* A reset that has taken nothing of its context away: another page then. */
static void a_page_that_is_registered_still_is_no_end(void)
{
    become_stoppable();
    CHECK_EQUAL(cuDevicePrimaryCtxReset_v2(0), CUDA_SUCCESS);
    CUcontext own;
    CHECK_EQUAL(cuCtxCreate_v2(&own, 0, 0), CUDA_SUCCESS);
    load_kernels(ptx);
    launch(spin, NULL, 1000);
    WAIT_FOR(atomic_load(&rg.preemptible[0]) == RG_STOPPABLE);
    seg->settings.stop_us = 1;
    for (int i = 0; i < 3; i++) {
        CHECK_EQUAL(cuDevicePrimaryCtxReset_v2(0), CUDA_SUCCESS); /* not ours */
        CHECK_EQUAL(rg.preemptible[0], RG_NOT_PREEMPTIBLE);
        launch(spin, NULL, 1000);
        WAIT_FOR(atomic_load(&rg.preemptible[0]) == RG_STOPPABLE);
        launch(spin, NULL, 1000);
        CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    }
    done();
}

/* With 0 the gate holds it, and so where the driver has no such wait; both as long as that is so, or for good. */
static void the_gate_where_there_are_no_stops(void)
{
    become_under_mps();
    seg->settings.stop_us = 0;
    other_launches();
    WAIT_FOR(atomic_load(&rg.slot->preemption) == RG_PREEMPTION_OFF);
    CHECK_EQUAL(rg.preemptible[0], RG_NOT_PREEMPTIBLE);
    seg->settings.stop_us = 250;
    WAIT_FOR(atomic_load(&rg.preemptible[0]) == RG_STOPPABLE);
    WAIT_FOR(atomic_load(&rg.slot->suspensions) == 1);
    seg->settings.stop_us = 0; /* in the middle of a request */
    WAIT_FOR(atomic_load(&rg.slot->preemption) == RG_PREEMPTION_OFF);
    other_is_done();
    WAIT_FOR(atomic_load(&rg.slot->suspended_ns) > 0);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    seg->settings.stop_us = 1;
    WAIT_FOR(atomic_load(&rg.preemptible[0]) == RG_STOPPABLE);
    atomic_store(&answer, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED); /* of this stream, at this moment */
    launch(spin, NULL, 200000);
    CHECK_EQUAL(rg.preemptible[0], RG_STOPPABLE);
    atomic_store(&answer, CUDA_ERROR_NOT_SUPPORTED);
    launch(spin, NULL, 200000);
    CHECK_EQUAL(rg.preemptible[0], RG_NOT_PREEMPTIBLE);
    WAIT_FOR(atomic_load(&rg.slot->preemption) == RG_PREEMPTION_OFF);
    int before = atomic_load(&stopped_before);
    for (int i = 0; i < 5; i++)
        launch(spin, NULL, 200000);
    CHECK_EQUAL(atomic_load(&stopped_before), before);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    done();
}

/* The page that the GPU looks at goes with its context, and comes again with the next one. Two contexts at once cannot have it. */
static void stops_go_and_come_with_contexts(void)
{
    become_stoppable();
    seg->settings.stop_us = 1;
    for (int i = 0; i < 2; i++) {
        CHECK_EQUAL(cuDevicePrimaryCtxReset_v2(0), CUDA_SUCCESS);
        CHECK_EQUAL(rg.preemptible[0], RG_NOT_PREEMPTIBLE);
        CUcontext context;
        CHECK_EQUAL(cu.cuDevicePrimaryCtxRetain(&context, 0), CUDA_SUCCESS);
        CHECK_EQUAL(cu.cuCtxSetCurrent(context), CUDA_SUCCESS);
        load_kernels(ptx);
        launch(spin, NULL, 1000);
        WAIT_FOR(atomic_load(&rg.preemptible[0]) == RG_STOPPABLE);
    }
    other_launches();
    WAIT_FOR(atomic_load(&rg.slot->suspensions) == 1);
    for (int k = 0; k < 3; k++)
        launch(spin, NULL, 200000);
    pthread_t thread = begin_to_synchronise();
    usleep(50000);
    CHECK_EQUAL(atomic_load(&synchronised), 0);
    other_is_done();
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    CUcontext first = current(), second;
    CHECK_EQUAL(cuCtxCreate_v2(&second, 0, 0), CUDA_SUCCESS);
    load_kernels(ptx);
    int before = atomic_load(&stopped_before);
    for (int k = 0; k < 5; k++)
        launch(spin, NULL, 200000);
    CHECK_EQUAL(atomic_load(&stopped_before), before);
    WAIT_FOR(!atomic_load(&rg.preemptible[0]));
    CHECK_EQUAL(rg.slot->preemption, RG_PREEMPTION_OFF);
    CHECK_EQUAL(rg_stops_ready(0), RG_STOPS_NONE);
    CUstream last; /* of the one that has the page, and of which a launch came last */
    CHECK_EQUAL(cu.cuCtxSetCurrent(first), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamCreate(&last, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    load_kernels(ptx);
    launch(spin, last, 1000);
    CHECK_EQUAL(rg_stops_ready(0), RG_STOPS_NONE);
    CHECK_EQUAL(cuCtxDestroy_v2(second), CUDA_SUCCESS);
    WAIT_FOR(atomic_load(&rg.preemptible[0]) == RG_STOPPABLE);
    done();
}

/* The page that the GPU looks at, as it is registered, and what it says when the driver is asked to end its context. */
static __typeof__(rg_real.cuMemHostRegister_v2) real_register;
static _Atomic(_Atomic uint64_t *) page;
static CUresult register_page(void *at, size_t bytes, unsigned flags)
{
    atomic_store(&page, at);
    return real_register(at, bytes, flags);
}

static uint32_t word(void)
{
    _Atomic uint64_t *words = atomic_load(&page);
    return (uint32_t)atomic_load(&words[words == rg.segment->stops[0].word ? rg.slot_index : 0]);
}

static CUresult (*real_release)(CUdevice), (*real_detach)(CUcontext);
static uint32_t word_at_end;
static CUresult release(CUdevice d)
{
    word_at_end = word();
    return real_release(d);
}

static CUresult detach(CUcontext c)
{
    word_at_end = word();
    return real_detach(c);
}

static void watch_page(void)
{
    CHECK(rg_real_ready());
    rg_real.cuStreamWriteValue32_v2 = NULL; /* for which there would be another page */
    real_register = rg_real.cuMemHostRegister_v2;
    rg_real.cuMemHostRegister_v2 = register_page;
    *(void **)&real_release = rg_real.hooked[RG_HOOK_cuDevicePrimaryCtxRelease_v2];
    rg_real.hooked[RG_HOOK_cuDevicePrimaryCtxRelease_v2] = (void *)release;
    *(void **)&real_detach = rg_real.hooked[RG_HOOK_cuCtxDetach];
    rg_real.hooked[RG_HOOK_cuCtxDetach] = (void *)detach;
}

/* The driver waits for streams whose context goes: these go on, whatever high clients do, before it is asked to. */
static void a_context_ends_though_it_is_stopped(void)
{
    watch_page();
    become_stoppable();
    for (int i = 0; i < 2; i++) {
        if (i) {
            CUcontext own;
            CHECK_EQUAL(cuCtxCreate_v2(&own, 0, 0), CUDA_SUCCESS);
            load_kernels(ptx);
            launch(spin, NULL, 1000);
            WAIT_FOR(atomic_load(&rg.preemptible[0]) == RG_STOPPABLE);
        }
        uint64_t before = atomic_load(&rg.slot->suspensions);
        other_launches();
        WAIT_FOR(atomic_load(&rg.slot->suspensions) > before && word() == RG_STOP_STOPPED);
        for (int k = 0; k < 3; k++)
            launch(spin, NULL, 200000);
        word_at_end = RG_STOP_STOPPED;
        CHECK_EQUAL(i ? cuCtxDetach(current()) : cuDevicePrimaryCtxRelease_v2(0), CUDA_SUCCESS);
        CHECK_EQUAL(word_at_end, RG_STOP_FREE);
        CHECK_EQUAL(word(), RG_STOP_FREE);
        CHECK_EQUAL(rg.preemptible[0], RG_NOT_PREEMPTIBLE);
        other_is_done();
        WAIT_FOR(atomic_load(&rg.slot->suspended_ns) > 0);
    }
    done();
}

static __typeof__(rg_real.rigelSimStop) real_sim_stop;
static int end_meanwhile(unsigned ordinal, int stopped)
{
    int r = real_sim_stop(ordinal, stopped);
    if (stopped)
        rg_stops_forget_context(current(), -1);
    return r;
}

/* Whoever stops the streams finds that their context has gone meanwhile, and leaves nothing that would wait. */
static void a_context_that_goes_meanwhile_is_not_stopped(void)
{
    watch_page();
    real_sim_stop = rg_real.rigelSimStop;
    rg_real.rigelSimStop = end_meanwhile;
    become_stoppable();
    seg->settings.stop_us = 1;
    CHECK(!rg_stops_set(0, true, true));
    CHECK_EQUAL(word(), RG_STOP_FREE);
    WAIT_FOR(atomic_load(&rg.preemptible[0]) == RG_STOPPABLE); /* again */
    for (int k = 0; k < 3; k++)
        launch(spin, NULL, 1000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    done();
}

/* A client that leaves while it is stopped leaves nothing behind that waits. */
static void leaving_while_stopped(void)
{
    become_stoppable();
    other_launches();
    WAIT_FOR(atomic_load(&rg.slot->suspensions) == 1);
    for (int k = 0; k < 3; k++)
        launch(spin, NULL, 200000);
    rigel_shutdown();
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    done();
}

/* What a high client that begins to launch does by itself: it stops what is armed, and leaves the rest to who owns it. */
static void a_high_client_stops_them_by_itself(void)
{
    watch_page();
    become_stoppable();
    WAIT_FOR(word() == RG_STOP_ARMED);
    /* Not where best-effort work may go on for now. */
    rg_settings *s = &seg->settings;
    _Atomic uint32_t *later[] = {&s->defer_us, &s->defer_ppm, &s->need_us};
    for (size_t i = 0; i <= sizeof later / sizeof *later; i++) {
        if (i)
            atomic_store(later[i - 1], 1000000);
        else
            s->suspend = 0;
        rg_stop_best_effort(rg.segment, 0);
        CHECK_EQUAL(word(), RG_STOP_ARMED);
        if (i)
            atomic_store(later[i - 1], 0);
        else
            s->suspend = 1;
    }
    for (uint64_t i = 1; i <= 3; i++) {
        rg_device_busy(dev0(), OTHER, rg_now_ns());
        rg_stop_best_effort(rg.segment, 0);
        CHECK_EQUAL(word(), RG_STOP_STOPPED);
        rg_device_launching(dev0(), OTHER, true);
        other_waits(); /* before anybody has looked, it may be */
        WAIT_FOR(atomic_load(&rg.slot->suspensions) == i);
        CHECK_EQUAL(word(), RG_STOP_STOPPED);
        other_is_done();
        WAIT_FOR(word() == RG_STOP_ARMED);
    }
    /* Of a request that is over, or whose client is gone, nothing stays. */
    rg_stop_best_effort(rg.segment, 0);
    WAIT_FOR(word() == RG_STOP_ARMED);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    CHECK_EQUAL(rg.slot->suspensions, 3);
    done();
}

/* Whoever has left Rigel, has its due, has become a high client or is not to be preempted any more is stopped by nobody. */
static void who_is_not_armed_is_stopped_by_nobody(void)
{
    watch_page();
    become_stoppable();
    seg->settings.preempt = 0;
    WAIT_FOR(word() == RG_STOP_FREE);
    rg_stop_best_effort(rg.segment, 0);
    CHECK_EQUAL(word(), RG_STOP_FREE);
    seg->settings.preempt = 1;
    WAIT_FOR(word() == RG_STOP_ARMED);
    seg->settings.min_share_ppm = 500000;
    seg->settings.starvation_us = 20000;
    other_launches();
    for (uint64_t starved = rg.slot->starved, i = 1; i <= 3; i++) {
        WAIT_FOR(atomic_load(&rg.slot->starved) >= starved + i && word() == RG_STOP_FREE);
        rg_stop_best_effort(rg.segment, 0); /* this due may end at any time, and it stop for itself */
    }
    other_is_done();
    seg->settings.starvation_us = 60000000;
    WAIT_FOR(word() == RG_STOP_ARMED);
    atomic_store(&rg.account->wanted_class, RG_CLASS_HIGH);
    WAIT_FOR(word() == RG_STOP_FREE && rg.slot->class == RG_CLASS_HIGH);
    atomic_store(&rg.account->wanted_class, RG_CLASS_BEST_EFFORT);
    WAIT_FOR(word() == RG_STOP_ARMED);
    rg_stop_best_effort(rg.segment, 0);
    rigel_shutdown();
    CHECK_EQUAL(word(), RG_STOP_FREE);
    rg_stop_best_effort(rg.segment, 0);
    CHECK_EQUAL(word(), RG_STOP_FREE);
    done();
}

/* What another process would do with a slot of one that was killed. */
static void nothing_is_armed_of_who_is_gone(void)
{
    become_stoppable();
    WAIT_FOR(atomic_load(&rg.segment->stops[0].armed) == 1ull << rg.slot_index);
    rg_stop_arm(rg.segment, 0, OTHER, true);
    seg->clients[OTHER].state = RG_LIVE;
    CHECK_EQUAL(rg_segment_reap(rg.segment), 1);
    CHECK_EQUAL(atomic_load(&rg.segment->stops[0].armed), 1ull << rg.slot_index);
    done();
}

/* A page of the segment that cannot be registered, as in a file system whose pages the driver does not pin: one of its own, and no less. */
static CUresult refuse_shared(void *at, size_t bytes, unsigned flags)
{
    return at == (void *)&rg.segment->stops[0] ? CUDA_ERROR_INVALID_VALUE : register_page(at, bytes, flags);
}

static void a_page_of_its_own_where_the_segment_is_refused(void)
{
    watch_page();
    rg_real.cuMemHostRegister_v2 = refuse_shared;
    become_stoppable();
    CHECK_EQUAL(word(), RG_STOP_FREE);
    CHECK_EQUAL(atomic_load(&rg.segment->stops[0].armed), 0);
    other_launches();
    WAIT_FOR(word() == RG_STOP_STOPPED);
    other_is_done();
    WAIT_FOR(word() == RG_STOP_FREE);
    /* Nothing waits for that one either when it goes with its context. */
    other_launches();
    WAIT_FOR(word() == RG_STOP_STOPPED);
    CHECK_EQUAL(cuDevicePrimaryCtxReset_v2(0), CUDA_SUCCESS);
    CHECK_EQUAL(word(), RG_STOP_FREE);
    other_is_done();
    done();
}

/* What the agent does for a page. */
static _Atomic int registered, pushed, popped;
static _Atomic CUresult register_answer;
static CUresult (*real_push)(CUcontext), (*real_pop)(CUcontext *);
static CUresult count_register(void *at, size_t bytes, unsigned flags)
{
    atomic_fetch_add(&registered, 1);
    return atomic_load(&register_answer) ? atomic_load(&register_answer) : real_register(at, bytes, flags);
}

static CUresult count_push(CUcontext c)
{
    atomic_fetch_add(&pushed, rg_agent_is_self());
    return real_push(c);
}

static CUresult count_pop(CUcontext *c)
{
    atomic_fetch_add(&popped, rg_agent_is_self());
    return real_pop(c);
}

/* Not while something is captured, nor again where the driver has refused it for good; and it leaves the context that was current. */
static void a_page_is_registered_at_the_right_moment(void)
{
    setenv("RIGEL_SIM_MPS", "1", 1);
    CHECK(rg_real_ready());
    real_register = rg_real.cuMemHostRegister_v2;
    rg_real.cuMemHostRegister_v2 = count_register;
    real_push = rg_real.cuCtxPushCurrent_v2;
    rg_real.cuCtxPushCurrent_v2 = count_push;
    real_pop = rg_real.cuCtxPopCurrent_v2;
    rg_real.cuCtxPopCurrent_v2 = count_pop;
    become("best-effort");
    launch(spin, NULL, 1000);
    CUstream s;
    CUgraph graph;
    CHECK_EQUAL(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    seg->settings.preempt = 1;
    beats(3);
    CHECK_EQUAL(registered, 0);
    CHECK_EQUAL(cuStreamEndCapture(s, &graph), CUDA_SUCCESS);
    WAIT_FOR(atomic_load(&rg.preemptible[0]) == RG_STOPPABLE);
    WAIT_FOR(atomic_load(&pushed) > 0 && atomic_load(&pushed) == atomic_load(&popped));
    atomic_store(&register_answer, CUDA_ERROR_NOT_PERMITTED);
    CHECK_EQUAL(cuDevicePrimaryCtxReset_v2(0), CUDA_SUCCESS);
    int before = atomic_load(&registered);
    CHECK_EQUAL(cu.cuDevicePrimaryCtxRetain(&context, 0), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuCtxSetCurrent(context), CUDA_SUCCESS);
    load_kernels(ptx);
    launch(spin, NULL, 1000);
    WAIT_FOR(atomic_load(&registered) > before);
    beats(2);
    before = atomic_load(&registered);
    beats(3);
    CHECK_EQUAL(registered, before);
    CHECK_EQUAL(rg_stops_ready(0), RG_STOPS_NONE);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    done();
}

static __typeof__(rg_real.rigelSimSuspend) real_sim_suspend;
static _Atomic int suspended, resumed;
static int count_suspensions(unsigned ordinal, int suspend)
{
    atomic_fetch_add(suspend ? &suspended : &resumed, 1);
    return real_sim_suspend(ordinal, suspend);
}

static void become_counted(void)
{
    CHECK(rg_real_ready());
    real_sim_suspend = rg_real.rigelSimSuspend;
    rg_real.rigelSimSuspend = count_suspensions;
    become_stoppable_in_slices();
}

/* A client that has its channels, too: its streams stop in its slices, and it is suspended only for what no stop ends soon. */
static void stops_in_its_slices(void)
{
    become_counted();
    uint64_t key = rg_duration_key((uintptr_t)spin, rg_dims_of(2, 1, 1, 32, 1, 1));
    for (uint32_t i = 0, n = 1; i < 5; i++, n++) {
        bool is_long = i > 0 && i < 4, at_gaps = i == 1, in_long_slices = i == 2, outlasts = i == 4;
        if (outlasts) {
            while (rg_stops_long(0))
                usleep(10000);
            other_waited(30000000);
        }
        rg_duration_reset(key, is_long ? 2000000 : 20000);
        seg->settings.slice_us = in_long_slices ? 16000 : 50;
        if (i) /* there has been high work then */
            WAIT_FOR(rg.slot->slice_us == (in_long_slices ? 16000 : RG_POLICY_LEAST_SLICE_US));
        atomic_store(&suspended, 0);
        uint64_t off_ns = atomic_load(&rg.slot->suspended_ns);
        rg_device_busy(dev0(), OTHER, rg_now_ns());
        launch_blocks(spin, NULL, 2, is_long ? 300000000 : 20000); /* the GPU is at it */
        if (!i || at_gaps)
            rg_device_launching(dev0(), OTHER, true);
        rg_stop_best_effort(rg.segment, 0);
        if (i && !at_gaps) { /* it waits already */
            atomic_fetch_add(&dev0()->busy_wake, 1);
            rg_preempt_wake();
        }
        WAIT_FOR(atomic_load(&rg.slot->suspensions) == n);
        for (int k = 0; k < 100; k++)
            launch_blocks(spin, NULL, 2, 20000);
        pthread_t thread = begin_to_synchronise();
        usleep(20000);
        CHECK_EQUAL(atomic_load(&synchronised), 0);
        CHECK_EQUAL(atomic_load(&suspended), at_gaps || in_long_slices || outlasts);
        other_is_done();
        CHECK_EQUAL(pthread_join(thread, NULL), 0);
        WAIT_FOR(atomic_load(&rg.slot->suspended_ns) > off_ns);
    }
    /* Without stops it has channels still. */
    seg->settings.stop_us = 0;
    WAIT_FOR(atomic_load(&rg.preemptible[0]) != RG_STOPPABLE_SLICED);
    CHECK_EQUAL(rg.slot->preemption, RG_PREEMPTION_ON);
    CHECK(rg.preemptible[0] != RG_NOT_PREEMPTIBLE);
    done();
}

/* Until then, in nanoseconds from now; 0: not any more. */
static void other_is_coming(uint64_t ns)
{
    if (!ns)
        atomic_store(&dev0()->coming_until_ns, 0);
    else
        rg_device_coming(rg.segment, 0, rg_now_ns() + ns);
}

/* Whenever it is said after a request: streams that stop still for what may follow that at once do not go on before it has come. */
static void stops_for_what_is_coming_after_a_request(void)
{
    const uint64_t LONG_NS = 600000000000;
    become_stoppable_in_slices();
    for (int i = 0; i < 60; i++) {
        other_launches();
        WAIT_FOR(rg_stops_taken(0));
        usleep(2000);
        other_is_done();
        for (uint64_t until = rg_now_ns() + (uint64_t)i % 20 * 10000; rg_now_ns() < until;)
            continue;
        other_is_coming(LONG_NS);
        usleep(3000);
        CHECK(rg_stops_taken(0));
        other_is_coming(0);
        other_launches();
        other_is_done(); /* which wakes it */
        WAIT_FOR(!rg_stops_taken(0));
    }
    done();
}

/* Its streams stop for a request that is said to be coming: until that is over if it comes, and if not for as long as it is waited for. Not for its due, nor
 * where suspension is off. */
static void stops_for_what_is_coming(void)
{
    const uint64_t LONG_NS = 600000000000;
    become_stoppable_in_slices();
    for (uint64_t i = 0; i < 3; i++) {
        uint64_t off_ns = atomic_load(&rg.slot->suspended_ns);
        other_is_coming(LONG_NS);
        CHECK(rg_stops_taken(0)); /* at once */
        WAIT_FOR(atomic_load(&rg.slot->suspensions) == i + 1);
        for (int k = 0; k < 100; k++)
            launch(spin, NULL, 200000);
        pthread_t thread = begin_to_synchronise();
        usleep(50000);
        CHECK_EQUAL(atomic_load(&synchronised), 0);
        if (i) {
            other_launches();
            other_is_coming(0);
            usleep(20000);
            if (i == 2)
                other_waits();
            usleep(20000);
            CHECK_EQUAL(atomic_load(&synchronised), 0);
            other_is_done();
        } else {
            other_is_coming(0);
        }
        CHECK_EQUAL(pthread_join(thread, NULL), 0);
        WAIT_FOR(atomic_load(&rg.slot->suspended_ns) > off_ns);
        CHECK(!rg_stops_taken(0));
        CHECK_EQUAL(rg.slot->suspensions, i + 1);
    }
    /* One that is over by itself, which is known to have been in time only where they stop before that. */
    other_is_coming(LONG_NS);
    WAIT_FOR(atomic_load(&rg.slot->suspensions) == 4);
    atomic_store(&dev0()->coming_until_ns, rg_now_ns() + 30000000);
    for (int k = 0; k < 100; k++)
        launch(spin, NULL, 20000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    CHECK(rg_now_ns() >= atomic_load(&dev0()->coming_until_ns));
    seg->settings.suspend = 0;
    other_is_coming(LONG_NS);
    CHECK(!rg_stops_taken(0));
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    /* Amid one suspension may end. */
    seg->settings.suspend = 1;
    other_is_coming(LONG_NS + LONG_NS);
    CHECK(rg_stops_taken(0));
    seg->settings.suspend = 0;
    WAIT_FOR(!rg_stops_taken(0));
    done();
}

/*
 * What it is suspended for besides comes back as the request waits, while its streams stop still: off once more where the request goes on, and where
 * the next one has begun.
 */
static void suspended_again_as_launches_go_on(void)
{
    become_counted();
    rg_duration_reset(rg_duration_key((uintptr_t)spin, rg_dims_of(2, 1, 1, 32, 1, 1)), 2000000);
    seg->settings.starvation_us = 600000000; /* not on a busy machine either */
    launch_blocks(spin, NULL, 2, 60000000000); /* the GPU is at it for a minute */
    WAIT_FOR(rg_stops_long(0));
    other_launches();
    WAIT_FOR(atomic_load(&suspended) == 1);
    for (int i = 1; i <= 4; i++) {
        int before = atomic_load(&resumed);
        other_waits();
        WAIT_FOR(atomic_load(&resumed) > before);
        CHECK(rg_stops_taken(0));
        if (i & 1)
            rg_device_launching(dev0(), OTHER, true);
        else
            other_launches(); /* as if it had been idle for an instant */
        WAIT_FOR(atomic_load(&suspended) == i + 1);
    }
    CHECK_EQUAL(rg.slot->suspensions, 1);
    other_is_done();
    WAIT_FOR(!rg_stops_taken(0));
    done();
}

/* Two requests for each of which it is seen that the high clients had been idle for next to nothing: until a time to come. */
static void requests_follow(void)
{
    for (uint64_t i = 0, n = rg.slot->suspensions; i < 2; i++) {
        atomic_store(&dev0()->idle_ns, rg_now_ns() + 10000000000);
        other_launches();
        WAIT_FOR(atomic_load(&rg.slot->suspensions) == n + i + 1);
        other_waits();
        other_is_done();
        WAIT_FOR(!rg_stops_taken(0));
    }
}

/*
 * Where requests follow one another its streams stop a little longer than there is one, here until 80 ms from now, and for the next one, also where that
 * has launched all before anybody is awake. Whatever takes this test so long says nothing, and is tried again.
 */
static void what_follows_is_waited_for(void)
{
    become_stoppable_in_slices();
    seg->settings.starvation_us = 600000000;
    bool in_time = false;
    for (int tries = 0; tries < 20 && !in_time; tries++) {
        requests_follow();
        uint64_t n = atomic_load(&rg.slot->suspensions) + 1;
        other_launches();
        WAIT_FOR(atomic_load(&rg.slot->suspensions) == n);
        other_waits();
        uint64_t until = rg_now_ns() + 80000000;
        rg_device_idle(dev0(), OTHER, until - RG_POLICY_FOLLOWS_NS);
        rg_device_wake(dev0());
        usleep(20000);
        bool stopped = rg_stops_taken(0);
        in_time = rg_now_ns() < until;
        CHECK(stopped || !in_time);
        rg_device_busy(dev0(), OTHER, rg_now_ns());
        in_time &= rg_now_ns() < until;
        usleep(200000);
        if (in_time) {
            CHECK(rg_stops_taken(0));
            CHECK_EQUAL(rg.slot->suspensions, n);
        }
        other_is_done();
        WAIT_FOR(!rg_stops_taken(0));
    }
    CHECK(in_time);
    done();
}

/* And what is suspended besides stays so as the request waits, until none has followed. */
static void what_is_long_is_off_until_none_follows(void)
{
    become_counted();
    seg->settings.starvation_us = 600000000;
    requests_follow();
    rg_duration_reset(rg_duration_key((uintptr_t)spin, rg_dims_of(2, 1, 1, 32, 1, 1)), 2000000);
    launch_blocks(spin, NULL, 2, 60000000000);
    WAIT_FOR(rg_stops_long(0));
    int before = atomic_load(&suspended), back = atomic_load(&resumed);
    other_launches();
    WAIT_FOR(atomic_load(&suspended) == before + 1);
    other_waits();
    usleep(50000);
    CHECK_EQUAL(atomic_load(&resumed), back);
    uint64_t until = rg_now_ns() + 80000000;
    rg_device_idle(dev0(), OTHER, until - RG_POLICY_FOLLOWS_NS);
    rg_device_wake(dev0());
    usleep(20000);
    bool off = atomic_load(&resumed) == back;
    CHECK(off || rg_now_ns() >= until);
    WAIT_FOR(atomic_load(&resumed) == back + 1);
    WAIT_FOR(!rg_stops_taken(0));
    done();
}

/* The C library's; for the thread that takes this client off the GPU the time is what a test says, where it says any, and later at each look by a step. */
static _Atomic uint64_t its_time_ns, its_step_ns;
int clock_gettime(clockid_t clock, struct timespec *t)
{
    uint64_t ns = clock == CLOCK_MONOTONIC ? atomic_load(&its_time_ns) : 0;
    char name[16] = "";
    if (!ns || prctl(PR_GET_NAME, name) != 0 || strcmp(name, "rigel-preempt") != 0)
        return (int)syscall(SYS_clock_gettime, clock, t);
    atomic_compare_exchange_strong(&its_time_ns, &(uint64_t){ns}, ns + atomic_load(&its_step_ns)); /* or the test has said another */
    *t = (struct timespec){(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    return 0;
}

/* Nor is it back in a pause of less than 1 ms where half of the last ones were as short: of one user, say, who asks again at once. */
static void what_is_long_is_off_where_pauses_are_short(void)
{
    become_counted();
    seg->settings.starvation_us = 600000000;
    uint64_t now = rg_now_ns();
    for (int i = 0; i < 8; i++) {
        uint64_t n = rg.slot->suspensions;
        atomic_store(&its_time_ns, now);
        atomic_store(&dev0()->idle_ns, now - 1000);
        other_launches();
        WAIT_FOR(atomic_load(&rg.slot->suspensions) == n + 1);
        other_waits();
        rg_device_idle(dev0(), OTHER, now);
        atomic_store(&its_time_ns, now += 10000000);
        rg_device_wake(dev0());
        WAIT_FOR(!rg_stops_taken(0));
    }
    rg_duration_reset(rg_duration_key((uintptr_t)spin, rg_dims_of(2, 1, 1, 32, 1, 1)), 2000000);
    launch_blocks(spin, NULL, 2, 60000000000);
    WAIT_FOR(rg_stops_long(0));
    int before = atomic_load(&suspended), back = atomic_load(&resumed);
    atomic_store(&dev0()->idle_ns, now - 1000);
    other_launches();
    WAIT_FOR(atomic_load(&suspended) == before + 1);
    other_waits();
    rg_device_idle(dev0(), OTHER, now);
    atomic_store(&its_time_ns, now + 900000);
    rg_device_wake(dev0());
    usleep(50000);
    CHECK_EQUAL(atomic_load(&resumed), back);
    CHECK(rg_stops_taken(0));
    atomic_store(&its_time_ns, now + 1000000);
    WAIT_FOR(atomic_load(&resumed) == back + 1);
    WAIT_FOR(!rg_stops_taken(0));
    atomic_store(&its_time_ns, 0);
    done();
}

/* Beside high work, with a kernel on the GPU that lasts for a minute; the last requests of the other client launched for 150 us. */
static void work_for_long(void)
{
    become_counted();
    seg->settings.starvation_us = 600000000;
    seg->settings.slice_us = 50;
    other_launches();
    WAIT_FOR(rg.slot->slice_us == RG_POLICY_LEAST_SLICE_US && atomic_load(&rg.slot->suspensions) == 1); /* there is high work */
    other_is_done();
    WAIT_FOR(!rg_stops_taken(0) && atomic_load(&rg.slot->suspended_ns));
    rg_duration_reset(rg_duration_key((uintptr_t)spin, rg_dims_of(2, 1, 1, 32, 1, 1)), 2000000);
    launch_blocks(spin, NULL, 2, 60000000000);
    WAIT_FOR(rg_stops_long(0));
    usleep(20000); /* no short pause */
    other_worked_and_waited(150000, 1000000);
}

/* A request begins that has launched for no time yet, however long this takes, or for much longer than those before. */
static void begin(bool has_launched_on)
{
    atomic_store(&rg_share_of(seg, 0, OTHER)->began_ns, has_launched_on ? rg_now_ns() - 5000000 : rg_now_ns() + 600000000000ull);
    uint64_t n = atomic_load(&rg.slot->suspensions) + 1;
    other_launches();
    WAIT_FOR(atomic_load(&rg.slot->suspensions) == n && rg_stops_taken(0));
    usleep(20000);
}

static void end(void)
{
    other_is_done();
    WAIT_FOR(!rg_stops_taken(0));
    usleep(20000);
}

/*
 * A request that launches all at once, as the last ones did, leaves the GPU to nobody: what runs long is suspended only if it launches on for longer. Whatever
 * takes this test so long that it would be seen by chance (100 ms) says nothing, and is tried again.
 */
static void what_is_long_is_left_to_slices_for_brief_requests(void)
{
    work_for_long();
    int before = atomic_load(&suspended);
    begin(false);
    other_waits();
    usleep(20000);
    end();
    CHECK_EQUAL(atomic_load(&suspended), before);
    for (int again = 0; again < 2; again++) { /* as it launches on; and as it does so after it has waited */
        bool in_time = false;
        for (int tries = 0; tries < 20 && !in_time; tries++) {
            begin(false);
            before = atomic_load(&suspended);
            if (again)
                other_waits();
            usleep(2000);
            uint64_t since = rg_now_ns();
            atomic_store(&rg_share_of(seg, 0, OTHER)->began_ns, since - 5000000);
            if (again)
                rg_device_launching(dev0(), OTHER, true); /* as rg_drain_end, which wakes nobody for that */
            WAIT_FOR(atomic_load(&suspended) == before + 1);
            in_time = rg_now_ns() - since < 50000000;
            end();
        }
        CHECK(in_time);
    }
    before = atomic_load(&suspended);
    other_worked_and_waited(RG_POLICY_BRIEF_NS + 100000, 1000000);
    begin(false);
    CHECK_EQUAL(atomic_load(&suspended), before + 1);
    end();
    done();
}

/* The next one has begun before anybody is awake for the end of one that had launched on: it is looked at like the first. */
static void what_is_long_is_off_for_the_next_that_launches_on(void)
{
    work_for_long();
    int before = atomic_load(&suspended), back = atomic_load(&resumed);
    begin(true);
    CHECK_EQUAL(atomic_load(&suspended), before + 1);
    other_waits();
    WAIT_FOR(atomic_load(&resumed) > back);
    atomic_store(&rg_share_of(seg, 0, OTHER)->began_ns, rg_now_ns() + 600000000000ull);
    other_launches();
    usleep(20000);
    CHECK_EQUAL(atomic_load(&suspended), before + 1);
    atomic_store(&rg_share_of(seg, 0, OTHER)->began_ns, rg_now_ns() - 5000000);
    WAIT_FOR(atomic_load(&suspended) == before + 2);
    end();
    done();
}

/* One that waits for what it launched long ago makes another one's request no less brief. */
static void who_only_waits_does_not_launch_on(void)
{
    enum { THIRD = 9 };
    work_for_long();
    int before = atomic_load(&suspended);
    rg_client *third = &seg->clients[THIRD];
    atomic_store(&third->waited_ring[0], 150000ull / RG_WAITED_NS << 32 | 1000000 / RG_WAITED_NS << 4);
    atomic_store(&third->began_ring[0], rg_now_ns());
    atomic_store(&third->waited, 1);
    begin(false);
    other_waits();
    usleep(2000);
    atomic_store(&rg_share_of(seg, 0, OTHER)->began_ns, rg_now_ns() - 5000000);
    atomic_store(&rg_share_of(seg, 0, THIRD)->began_ns, rg_now_ns() + 600000000000ull);
    rg_device_busy(dev0(), THIRD, rg_now_ns());
    rg_device_launching(dev0(), THIRD, true);
    rg_device_wake(dev0());
    usleep(20000);
    CHECK_EQUAL(atomic_load(&suspended), before);
    rg_device_idle(dev0(), THIRD, rg_now_ns());
    end();
    done();
}

/* Whichever of its looks at the time is the first by which a request launches for longer than those before. */
static void what_is_long_is_off_as_soon_as_a_request_is_not_brief(void)
{
    work_for_long();
    atomic_store(&its_step_ns, 20000);
    for (uint64_t look = 0; look < 40; look++) {
        int before = atomic_load(&suspended);
        uint64_t now = rg_now_ns();
        atomic_store(&rg_share_of(seg, 0, OTHER)->began_ns, now + look * 20000 - 300000); /* twice what those did */
        atomic_store(&its_time_ns, now);
        other_launches();
        WAIT_FOR(atomic_load(&suspended) == before + 1);
        atomic_store(&its_time_ns, 0);
        end();
    }
    done();
}

/* A hold, and a pause, are meant, whatever requests are like. */
static void what_is_long_is_off_for_a_hold_amid_a_brief_request(void)
{
    work_for_long();
    int before = atomic_load(&suspended);
    begin(false);
    CHECK_EQUAL(atomic_load(&suspended), before);
    for (int tries = 0; tries < 500 && atomic_load(&suspended) == before; tries++) { /* for 5 of the 30 s after which nothing is known of requests */
        rg_segment_hold(seg, RG_HOLD_LIMIT_MS);
        usleep(10000);
    }
    CHECK_EQUAL(atomic_load(&suspended), before + 1);
    rg_segment_hold(seg, 0);
    end();
    done();
}

/* What is due amid a brief request is no reason not to look at it again. */
static void what_is_long_is_off_for_who_launches_on_after_what_is_due(void)
{
    work_for_long();
    int before = atomic_load(&suspended);
    begin(false);
    uint64_t n = atomic_load(&rg.slot->starved);
    seg->settings.starvation_us = 20000;
    rg_device_wake(dev0());
    WAIT_FOR(atomic_load(&rg.slot->starved) > n);
    seg->settings.starvation_us = 600000000;
    WAIT_FOR(rg_stops_taken(0));
    usleep(20000);
    CHECK_EQUAL(atomic_load(&suspended), before);
    atomic_store(&rg_share_of(seg, 0, OTHER)->began_ns, rg_now_ns() - 5000000);
    WAIT_FOR(atomic_load(&suspended) == before + 1);
    end();
    done();
}

/*
 * Programs that wait time and again for next to nothing launch all at once each time, and leave the GPU to it in between: half of eight pauses were short, and two
 * very short. How long they seem is up to when the thread is awake, so there are as many as it takes.
 */
static void what_is_long_is_off_for_bursts_that_follow(void)
{
    work_for_long();
    int before = atomic_load(&suspended);
    for (int i = 0; i < 3; i++) {
        begin(false);
        end();
    }
    CHECK_EQUAL(atomic_load(&suspended), before);
    for (int tries = 0; tries < 100 && atomic_load(&suspended) == before; tries++) {
        uint64_t n = atomic_load(&rg.slot->suspensions) + 1;
        atomic_store(&dev0()->idle_ns, rg_now_ns());
        other_launches();
        WAIT_FOR(atomic_load(&rg.slot->suspensions) == n && rg_stops_taken(0));
        end();
    }
    CHECK_EQUAL(atomic_load(&suspended), before + 1);
    done();
}

static _Atomic int refused;
static int refuse_to_resume(unsigned ordinal, int suspend)
{
    return !suspend && atomic_load(&refused) ? -1 : real_sim_suspend(ordinal, suspend);
}

/* The gate holds who could not be put back on the GPU, and nobody stops its streams any more. */
static void who_failed_to_come_back_is_stopped_by_nobody(void)
{
    watch_page();
    real_sim_suspend = rg_real.rigelSimSuspend;
    rg_real.rigelSimSuspend = refuse_to_resume;
    become_stoppable_in_slices();
    WAIT_FOR(word() == RG_STOP_ARMED);
    rg_duration_reset(rg_duration_key((uintptr_t)spin, rg_dims_of(2, 1, 1, 32, 1, 1)), 2000000);
    launch_blocks(spin, NULL, 2, 20000);
    atomic_store(&refused, 1);
    other_launches();
    WAIT_FOR(atomic_load(&rg.slot->suspensions) == 1);
    other_is_done();
    WAIT_FOR(!atomic_load(&rg.preemptible[0]) && word() == RG_STOP_FREE);
    rg_stop_best_effort(rg.segment, 0);
    CHECK_EQUAL(word(), RG_STOP_FREE);
    atomic_store(&refused, 0);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    done();
}

/* Stops that end in the middle of a request: its channels are suspended in their place. */
static void suspended_where_stops_end(void)
{
    become_counted();
    other_launches();
    WAIT_FOR(atomic_load(&rg.slot->suspensions) == 1);
    CHECK_EQUAL(atomic_load(&suspended), 0);
    seg->settings.stop_us = 0;
    WAIT_FOR(atomic_load(&rg.slot->suspensions) == 2);
    CHECK_EQUAL(atomic_load(&suspended), 1);
    for (int k = 0; k < 3; k++)
        launch(spin, NULL, 200000);
    pthread_t thread = begin_to_synchronise();
    usleep(20000);
    CHECK_EQUAL(atomic_load(&synchronised), 0);
    other_is_done();
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    done();
}

static __typeof__(rg_real.rigelSimSetTimeslice) real_slice;
static _Atomic int slices_wait, waiting;
static int slow_slice(unsigned device, uint64_t us)
{
    while (atomic_load(&slices_wait)) {
        atomic_store(&waiting, 1);
        usleep(1000);
    }
    return real_slice(device, us);
}

/* The driver takes its time for the agent, as while programs start on some GPU: streams stop and go on meanwhile. */
static void stops_while_the_driver_is_busy(void)
{
    CHECK(rg_real_ready());
    real_slice = rg_real.rigelSimSetTimeslice;
    rg_real.rigelSimSetTimeslice = slow_slice;
    become_stoppable_in_slices();
    atomic_store(&slices_wait, 1);
    seg->settings.slice_us = 16000;
    WAIT_FOR(atomic_load(&waiting));
    for (int i = 0; i < 3; i++) { /* its thread has nothing to do, meanwhile, and looks again */
        atomic_fetch_add(&dev0()->busy_wake, 1);
        rg_preempt_wake();
        usleep(10000);
    }
    other_launches();
    WAIT_FOR(rg_stops_taken(0));
    CHECK_EQUAL(atomic_load(&rg.slot->suspensions), 0); /* which it counts once that is done */
    atomic_store(&slices_wait, 0);
    WAIT_FOR(atomic_load(&rg.slot->suspensions) == 1);
    atomic_store(&waiting, 0);
    atomic_store(&slices_wait, 1);
    seg->settings.slice_us = 50;
    WAIT_FOR(atomic_load(&waiting));
    other_is_done();
    WAIT_FOR(!rg_stops_taken(0));
    atomic_store(&slices_wait, 0);
    done();
}

static __typeof__(rg_real.cuMemHostRegister_v2) real_register;
static _Atomic int register_waits, registering;
static CUresult register_slowly(void *at, size_t bytes, unsigned flags)
{
    while (atomic_load(&register_waits)) {
        atomic_store(&registering, 1);
        usleep(1000);
    }
    return real_register(at, bytes, flags);
}

/* The driver does not let the agent register the page before the GPU has done what was taken off it: that comes back all the same. */
static void it_is_back_while_the_agent_is_in_the_driver(void)
{
    CHECK(rg_real_ready());
    real_register = rg_real.cuMemHostRegister_v2;
    rg_real.cuMemHostRegister_v2 = register_slowly;
    become("best-effort");
    launch(spin, NULL, 1000);
    seg->settings.stop_us = 0;
    seg->settings.preempt = 1;
    WAIT_FOR(atomic_load(&rg.preemptible[0]));
    other_launches();
    WAIT_FOR(atomic_load(&rg.slot->suspensions) == 1);
    atomic_store(&register_waits, 1);
    seg->settings.stop_us = 250;
    WAIT_FOR(atomic_load(&registering));
    other_is_done();
    WAIT_FOR(atomic_load(&rg.slot->suspended_ns) > 0);
    launch(spin, NULL, 1000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    atomic_store(&register_waits, 0);
    WAIT_FOR(atomic_load(&rg.preemptible[0]) == RG_STOPPABLE_SLICED);
    done();
}

/* It tells for how much of its time its kernels are long: not known, none, nearly all, and none again. */
static void how_much_of_it_is_long(void)
{
    become_stoppable_in_slices();
    CHECK_EQUAL(atomic_load(&rg.slot->long_part), 0);
    for (int i = 0; i < 3; i++) {
        bool is_long = i == 1;
        for (uint32_t part = 0; !part || (is_long ? part < 901 : part > 101); part = atomic_load(&rg.slot->long_part))
            launch_and_wait(is_long ? 3 : 2, is_long ? 1000000 : 100000);
    }
    done();
}

static CUresult (*real_write)(CUstream, CUdeviceptr, uint32_t, unsigned);
static _Atomic CUresult write_answer;
static CUresult write_value(CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags)
{
    return atomic_load(&write_answer) ? atomic_load(&write_answer) : real_write(stream, address, value, flags);
}

/* Something long is running for as long as the GPU is at it, in whichever stream, and not while it is queued behind a stop. */
static void long_while_the_gpu_is_at_it(void)
{
    CHECK(rg_real_ready());
    real_write = rg_real.cuStreamWriteValue32_v2;
    rg_real.cuStreamWriteValue32_v2 = write_value;
    become_stoppable_in_slices();
    CUstream other;
    CHECK_EQUAL(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    uint64_t key = rg_duration_key((uintptr_t)spin, rg_dims_of(2, 1, 1, 32, 1, 1));
    for (int i = 0; i < 2; i++) {
        rg_duration_reset(key, 2000000);
        CHECK(!rg_stops_long(0));
        launch(spin, NULL, 1000);
        launch_blocks(spin, i ? other : NULL, 2, 300000000);
        launch(spin, i ? NULL : other, 1000); /* what is short in another stream says nothing */
        WAIT_FOR(rg_stops_long(0));
        CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
        CHECK(!rg_stops_long(0));
    }
    rg_duration_reset(key, 2000000);
    other_launches();
    WAIT_FOR(rg_stops_taken(0));
    launch_blocks(spin, NULL, 2, 1000);
    usleep(20000);
    CHECK(rg_stops_taken(0));
    CHECK(!rg_stops_long(0));
    other_is_done();
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    /* What has no stop in front of it may begin at any time: a graph of which nothing is known, and counts as little. */
    launch(spin, NULL, 1000);
    int what = rg_stop_before(rg_track_of(NULL), RG_GRAPH, 12345, RG_DIMS_UNIT);
    CHECK(rg_stops_long(0));
    if (what >= 0)
        rg_stop_after(what, rg_track_of(NULL), true);
    WAIT_FOR(!rg_stops_long(0));
    /* Where the GPU cannot tell any more, what was launched lately may be running. */
    atomic_store(&write_answer, CUDA_ERROR_NOT_SUPPORTED);
    rg_duration_reset(key, 2000000);
    launch_blocks(spin, NULL, 2, 1000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    CHECK(rg_stops_long(0));
    atomic_store(&write_answer, 0);
    WAIT_FOR(!rg_stops_long(0));
    rg_duration_reset(key, 2000000);
    launch_blocks(spin, NULL, 2, 1000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    CHECK(rg_stops_long(0));
    done();
}

/* Where the GPU cannot tell, what lasts for longer than it counts as launched lately is long until then, and so is a graph of which nothing is known. */
static void long_for_as_long_as_it_may_run(void)
{
    CHECK(rg_real_ready());
    rg_real.cuStreamWriteValue32_v2 = NULL;
    become_stoppable_in_slices();
    CHECK(!rg_stops_long(0));
    rg_stops_began(0); /* what was queued before may be anything */
    CHECK(rg_stops_long(0));
    WAIT_FOR(!rg_stops_long(0));
    rg_duration_reset(rg_duration_key((uintptr_t)spin, rg_dims_of(2, 1, 1, 32, 1, 1)), 3600000000);
    launch_blocks(spin, NULL, 2, 1000);
    usleep(1200000);
    CHECK(rg_stops_long(0));
    done();
}

static void a_graph_is_long_until_it_is_known(void)
{
    become_stoppable_in_slices();
    CHECK(!rg_stops_long(0));
    int what = rg_stop_before(rg_track_of(NULL), RG_GRAPH, 12345, RG_DIMS_UNIT);
    CHECK(rg_stops_long(0));
    if (what >= 0)
        rg_stop_after(what, rg_track_of(NULL), true);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    WAIT_FOR(!rg_stops_long(0));
    done();
}

/* Its thread gives and takes while the agent's looks at channels and stops: for ThreadSanitizer. */
static void dues_beside_beats(void)
{
    become_stoppable_in_slices();
    seg->settings.min_share_ppm = 500000;
    seg->settings.starvation_us = 3000;
    other_launches();
    for (int i = 0; i < 10; i++)
        usleep(100000);
    other_is_done();
    WAIT_FOR(rg.slot->starved > 0);
    done();
}

int main(int argc, char **argv)
{
    (void)argc;
    ensure_environment("LD_LIBRARY_PATH", in_build_folder("sim"), argv);
    int failures = 0;
    RUN(stops_until_high_clients_are_idle);
    RUN(stops_when_a_request_waits);
    RUN(a_hold_stops_it);
    RUN(nobody_is_stopped_for_ever);
    RUN(a_stop_for_so_much_work);
    RUN(its_kernels_are_timed);
    RUN(its_kernels_are_timed_beside_requests);
    RUN(the_word_is_its_own);
    RUN(what_is_known_of_a_kernel_counts_at_once);
    RUN(in_its_slices_they_are_timed_too);
    RUN(a_moment_without_stops_ends_nothing);
    RUN(a_page_that_is_registered_still_is_no_end);
    RUN(the_gate_where_there_are_no_stops);
    RUN(stops_go_and_come_with_contexts);
    RUN(a_context_ends_though_it_is_stopped);
    RUN(a_context_that_goes_meanwhile_is_not_stopped);
    RUN(leaving_while_stopped);
    RUN(a_high_client_stops_them_by_itself);
    RUN(who_is_not_armed_is_stopped_by_nobody);
    RUN(nothing_is_armed_of_who_is_gone);
    RUN(a_page_of_its_own_where_the_segment_is_refused);
    RUN(a_page_is_registered_at_the_right_moment);
    RUN(stops_in_its_slices);
    RUN(stops_for_what_is_coming);
    RUN(stops_for_what_is_coming_after_a_request);
    RUN(suspended_again_as_launches_go_on);
    RUN(what_follows_is_waited_for);
    RUN(what_is_long_is_off_until_none_follows);
    RUN(what_is_long_is_off_where_pauses_are_short);
    RUN(what_is_long_is_left_to_slices_for_brief_requests);
    RUN(what_is_long_is_off_as_soon_as_a_request_is_not_brief);
    RUN(what_is_long_is_off_for_the_next_that_launches_on);
    RUN(who_only_waits_does_not_launch_on);
    RUN(what_is_long_is_off_for_a_hold_amid_a_brief_request);
    RUN(what_is_long_is_off_for_who_launches_on_after_what_is_due);
    RUN(what_is_long_is_off_for_bursts_that_follow);
    RUN(who_failed_to_come_back_is_stopped_by_nobody);
    RUN(suspended_where_stops_end);
    RUN(stops_while_the_driver_is_busy);
    RUN(it_is_back_while_the_agent_is_in_the_driver);
    RUN(how_much_of_it_is_long);
    RUN(long_while_the_gpu_is_at_it);
    RUN(long_for_as_long_as_it_may_run);
    RUN(a_graph_is_long_until_it_is_known);
    RUN(dues_beside_beats);
    return failures ? 1 : 0;
}
