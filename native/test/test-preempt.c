/*
 * test-preempt.c: a best-effort client that is taken off the GPU (preempt.c). As test-gate.c.
 */
#include "gate-testing.h"

#include <dirent.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <ucontext.h>

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

/* A best-effort client whose channels can be controlled, as the simulated GPU's can, and whose streams have no stops: test-stop.c. */
static void become_preemptible(void)
{
    become("best-effort");
    launch(spin, NULL, 1000);
    seg->settings.stop_us = 0;
    seg->settings.preempt = 1;
    WAIT_FOR(atomic_load(&rg.preemptible[0]));
    CHECK_EQUAL(rg.slot->preemption, RG_PREEMPTION_ON);
    CHECK_EQUAL(rg.slot->slice_us, 2048); /* the driver's: it is not known to have the GPU to itself, and no high client has had work */
    CHECK(seg->settings.slice_us < RG_POLICY_LEAST_SLICE_US);
}

/* Its thread, which has slept as one that has nothing to do, is awake as it has: a request may have begun before. */
static void awake_as_it_becomes_preemptible(void)
{
    become("best-effort");
    launch(spin, NULL, 1000);
    other_launches(true);
    for (int i = 0; i < 3; i++) {
        uint32_t before = atomic_load(&dev0()->busy_wake);
        uint64_t off_ns = atomic_load(&rg.slot->suspended_ns);
        seg->settings.preempt = 1;
        WAIT_FOR(atomic_load(&rg.preemptible[0]));
        WAIT_FOR(atomic_load(&dev0()->busy_wake) != before);
        WAIT_FOR(atomic_load(&rg.slot->suspensions) == (uint64_t)i + 1);
        seg->settings.preempt = 0;
        WAIT_FOR(!atomic_load(&rg.preemptible[0]));
        WAIT_FOR(atomic_load(&rg.slot->suspended_ns) > off_ns);
    }
    done();
}

/* In short ones several processes may get nothing done, and who gets nothing done launches nothing by which it could be seen. */
static void slices_are_short_only_where_it_has_the_gpu_to_itself(void)
{
    become_preemptible();
    other_launches(true);
    other_launches(false);
    atomic_store(&dev0()->idle_ns, rg_now_ns() + 3600000000000); /* lately, for as long as this takes */
    WAIT_FOR(atomic_load(&rg.slot->slice_us) == RG_POLICY_LEAST_SLICE_US);
    atomic_store(&dev0()->own_until_ns, UINT64_MAX);
    WAIT_FOR(atomic_load(&rg.slot->slice_us) == seg->settings.slice_us);
    /* Another best-effort client has a context there. */
    atomic_store(&seg->clients[OTHER].class, RG_CLASS_BEST_EFFORT);
    atomic_store(&seg->clients[OTHER].devices, 1);
    atomic_store(&seg->clients[OTHER].state, RG_LIVE);
    WAIT_FOR(atomic_load(&rg.slot->slice_us) == RG_POLICY_LEAST_SLICE_US);
    atomic_store(&seg->clients[OTHER].class, RG_CLASS_HIGH);
    WAIT_FOR(atomic_load(&rg.slot->slice_us) == seg->settings.slice_us);
    /* Nobody looks any more whether other programs are. */
    atomic_store(&dev0()->own_until_ns, rg_now_ns());
    WAIT_FOR(atomic_load(&rg.slot->slice_us) == RG_POLICY_LEAST_SLICE_US);
    /* Nor is there anybody any more for whom they are short. */
    atomic_store(&dev0()->idle_ns, rg_now_ns() - 6000000000ull);
    WAIT_FOR(atomic_load(&rg.slot->slice_us) == 2048);
    seg->settings.slice_us = RG_POLICY_LEAST_SLICE_US + 1;
    WAIT_FOR(atomic_load(&rg.slot->slice_us) == RG_POLICY_LEAST_SLICE_US + 1);
    done();
}

/* Beside another best-effort client that launches the driver's, or half of those in which it is suspended; then its own again. */
static void slices_beside_another_best_effort_client(void)
{
    become_preemptible();
    other_launches(true);
    other_launches(false);
    atomic_store(&dev0()->idle_ns, rg_now_ns() + 3600000000000); /* lately, for as long as this takes */
    atomic_store(&dev0()->own_until_ns, UINT64_MAX);
    WAIT_FOR(atomic_load(&rg.slot->slice_us) == seg->settings.slice_us);
    atomic_store(&seg->clients[OTHER].class, RG_CLASS_BEST_EFFORT);
    atomic_store(&seg->clients[OTHER].devices, 1);
    atomic_store(&seg->clients[OTHER].state, RG_LIVE);
#define LAUNCHING(us) (atomic_fetch_add(&seg->clients[OTHER].launches[0], 1), atomic_load(&rg.slot->slice_us) == (us))
    WAIT_FOR(LAUNCHING(2048));
    seg->settings.slice_us = 16000;
    WAIT_FOR(LAUNCHING(8000));
    seg->settings.suspend = 0;
    WAIT_FOR(LAUNCHING(2048));
    WAIT_FOR(atomic_load(&rg.slot->slice_us) == 16000);
    /* While that one waits for its turn, what it has launched as that began is none. */
    seg->settings.suspend = 1;
    seg->settings.policy = RG_POLICY_SLO;
    WAIT_FOR(LAUNCHING(8000));
    atomic_store(&seg->accounts[OTHER].slots, 1ull << OTHER);
    atomic_store(&seg->accounts[OTHER].turn_until_ns, UINT64_MAX);
    WAIT_FOR(LAUNCHING(16000));
    atomic_store(&seg->accounts[OTHER].turn_until_ns, rg_now_ns());
    WAIT_FOR(LAUNCHING(8000));
    done();
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
    atomic_fetch_add(&rg.slot->launches[0], RG_SAMPLED_LAUNCHES);
    WAIT_FOR(atomic_load(&rg.preemptible[0]) == RG_PREEMPTIBLE);
    for (int i = 0; i < 20; i++)
        launch_blocks(spin, NULL, 2, 1000); /* another one, then */
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    rg_samples_poll();
    CHECK_EQUAL(rg.slot->samples, samples);
    CHECK_EQUAL(rg.slot->gate_waits, 0);
    done();
}

/* The time that a kernel is off the GPU is none of its own. */
static void what_was_taken_off_the_gpu_is_not_timed(void)
{
    become_preemptible();
    seg->settings.starvation_us = 60000000; /* not on a busy machine either */
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    rg_samples_poll();
    uint64_t samples = rg.slot->samples;
    launch_blocks(spin, NULL, 3, 1000000); /* of this shape for the first time */
    other_launches(true);
    WAIT_FOR(atomic_load(&rg.slot->suspensions) == 1);
    other_launches(false);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    rg_samples_poll();
    CHECK_EQUAL(rg.slot->samples, samples);
    launch_blocks(spin, NULL, 3, 1000000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    rg_samples_poll();
    CHECK_EQUAL(rg.slot->samples, samples + 1);
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
    rg_segment_hold(seg, RG_HOLD_LIMIT_MS);
    WAIT_FOR(atomic_load(&rg.slot->suspensions) == 3);
    launch(spin, NULL, 1000);
    rg_segment_hold(seg, 30);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS); /* once the hold has ended by itself */
    done();
}

/* But not where the high client has waited for longer than its slice lately: it may be in the middle of a request when that ends. */
static void stays_away_from_requests_that_outlast_their_slice(void)
{
    become_preemptible();
    seg->settings.starvation_us = 60000000;
    for (int i = 0; i < 3; i++) {
        bool longer = i == 1;
        other_waited(longer ? 30000000 : 1000000);
        seg->settings.high_slice_us = 1000000000; /* within which even a busy machine gets here from the suspension */
        if (longer)
            seg->settings.high_slice_us = 10000;
        uint64_t suspensions = atomic_load(&rg.slot->suspensions), off_ns = atomic_load(&rg.slot->suspended_ns);
        other_launches(true);
        WAIT_FOR(atomic_load(&rg.slot->suspensions) == suspensions + 1);
        rg_device_launching(dev0(), OTHER, false);
        rg_device_wake(dev0());
        if (longer)
            usleep(50000);
        else
            WAIT_FOR(atomic_load(&rg.slot->suspended_ns) > off_ns);
        CHECK_EQUAL(atomic_load(&rg.slot->suspended_ns) > off_ns, !longer);
        other_launches(false);
        WAIT_FOR(atomic_load(&rg.slot->suspended_ns) > off_ns);
    }
    /* Also where it has yet to be suspended when they wait, though its own slices are short. */
    uint64_t off_ns = atomic_load(&rg.slot->suspended_ns), suspensions = atomic_load(&rg.slot->suspensions);
    seg->settings.defer_us = 1000000000;
    CHECK(seg->settings.slice_us <= RG_POLICY_SHORT_SLICE_US);
    for (int i = 0; i < 2; i++) {
        seg->settings.high_slice_us = i ? 10000 : 1000000000;
        other_waited(30000000);
        other_launches(true);
        usleep(5000);
        rg_device_launching(dev0(), OTHER, false);
        rg_device_wake(dev0());
        if (i)
            WAIT_FOR(atomic_load(&rg.slot->suspensions) == suspensions + 1);
        usleep(20000);
        CHECK_EQUAL(atomic_load(&rg.slot->suspensions), suspensions + i);
        CHECK_EQUAL(atomic_load(&rg.slot->suspended_ns), off_ns);
        other_launches(false);
    }
    WAIT_FOR(atomic_load(&rg.slot->suspended_ns) > off_ns);
    seg->settings.defer_us = 0;
    /* Nor does it wait for that once there is no more suspension. */
    seg->settings.high_slice_us = 1;
    off_ns = atomic_load(&rg.slot->suspended_ns);
    suspensions = atomic_load(&rg.slot->suspensions);
    other_launches(true);
    WAIT_FOR(atomic_load(&rg.slot->suspensions) == suspensions + 1);
    rg_device_launching(dev0(), OTHER, false);
    rg_device_wake(dev0());
    seg->settings.suspend = 0;
    WAIT_FOR(atomic_load(&rg.slot->suspended_ns) > off_ns);
    other_launches(false);
    done();
}

/* How long those on another device waited, or the last ones did long ago, tells nothing of the next one here. */
static void requests_elsewhere_and_of_long_ago_tell_nothing(void)
{
    become_preemptible();
    seg->settings.high_slice_us = 4200000;
    for (int i = 0; i < 2; i++) {
        uint64_t suspensions = atomic_load(&rg.slot->suspensions);
        other_waited(1000000);
        uint64_t n = atomic_load(&seg->clients[OTHER].waited);
        other_waited(4000000000); /* at any time that is longer than what is left of the slice */
        for (int k = 0; k < 4; k++)
            if (i == 0)
                atomic_fetch_or(&seg->clients[OTHER].waited_ring[(n + k) % RG_WAITED], 1); /* the second device */
            else
                atomic_store(&seg->clients[OTHER].began_ring[(n + k) % RG_WAITED], 0); /* as the machine was started */
        other_launches(true);
        WAIT_FOR(atomic_load(&rg.slot->suspensions) == suspensions + 1);
        launch(spin, NULL, 1000);
        rg_device_launching(dev0(), OTHER, false);
        rg_device_wake(dev0());
        CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS); /* it is back */
        other_launches(false);
    }
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

/* So does who is on and off all the time, beside requests one after the other, none of which takes as long; and who has short slices. */
static void requests_one_after_the_other_starve_nobody(void)
{
    become_preemptible();
    seg->settings.starvation_us = 20000;
    for (uint32_t suspend = 2; suspend--;) {
        seg->settings.suspend = suspend;
        for (uint64_t starved = rg.slot->starved; atomic_load(&rg.slot->starved) < starved + 2;) {
            other_launches(true);
            usleep(1000);
            other_launches(false);
        }
    }
    done();
}

/* Less often, and so much the longer each time but the first, where there is a period for that. */
static void its_share_comes_once_in_a_period(void)
{
    become_preemptible();
    uint32_t usual_us = rg.slot->slice_us;
    seg->settings.starvation_us = 20000;
    seg->settings.min_share_ppm = 500000;
    seg->settings.share_period_us = 500000;
    other_launches(true);
    WAIT_FOR(atomic_load(&rg.slot->starved) == 1);
    CHECK(atomic_load(&rg.slot->slice_us) < 100000);
    WAIT_FOR(atomic_load(&rg.slot->slice_us) > 500000);
    seg->settings.share_period_us = 10000000; /* not once more on a busy machine either */
    other_launches(false); /* a break ends it */
    WAIT_FOR(atomic_load(&rg.slot->slice_us) == usual_us);
    other_launches(true);
    usleep(100000);
    CHECK_EQUAL(rg.slot->starved, 2);
    seg->settings.share_period_us = 20000;
    WAIT_FOR(atomic_load(&rg.slot->starved) >= 4);
    done();
}

/* A hold that has ended by itself is over: a suspension is put off as before it. */
static void an_old_hold_takes_nobody_off(void)
{
    become_preemptible();
    seg->settings.defer_us = 60000000;
    seg->settings.hold_until_ms = (uint32_t)(rg_now_ns() / 1000000) - 1000;
    other_launches(true);
    launch(spin, NULL, 1000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    usleep(20000);
    CHECK_EQUAL(rg.slot->suspensions, 0);
    done();
}

/* The other client's requests make 100 launches each. */
static void other_is_regular(void)
{
    rg_share *share = rg_share_of(seg, 0, OTHER);
    atomic_store(&share->usual_launches, 100);
    atomic_store(&share->usual_votes, 800);
    seg->settings.defer_us = 60000000;
    seg->settings.defer_ppm = 400000;
    seg->settings.starvation_us = 600000000; /* not on a busy machine either */
}

/* How far a request has come is told by its launches, whatever the clock says. */
static void suspended_when_so_much_of_a_request_is_launched(void)
{
    become_preemptible();
    other_is_regular();
    other_launches(true);
    atomic_store(&seg->clients[OTHER].launches[0], 39);
    usleep(20000);
    CHECK_EQUAL(rg.slot->suspensions, 0);
    atomic_fetch_add(&seg->clients[OTHER].launches[1], 1);
    WAIT_FOR(atomic_load(&rg.slot->suspensions) == 1);
    /* The next one begins where that one ended. */
    other_launches(false);
    WAIT_FOR(atomic_load(&rg.slot->suspended_ns) > 0);
    atomic_store(&rg_share_of(seg, 0, OTHER)->began_launches, 40);
    other_launches(true);
    usleep(20000);
    CHECK_EQUAL(rg.slot->suspensions, 1);
    /* Of others it is the clock that counts. */
    atomic_store(&rg_share_of(seg, 0, OTHER)->usual_votes, 100);
    seg->settings.defer_us = 1000;
    WAIT_FOR(atomic_load(&rg.slot->suspensions) == 2);
    done();
}

/* Or by how long the rest of its launches takes; one that launches nothing at the moment takes longer and longer. */
static void suspended_when_little_time_is_left_of_a_request(void)
{
    become_preemptible();
    other_is_regular();
    rg_share *share = rg_share_of(seg, 0, OTHER);
    seg->settings.defer_ppm = 0;
    seg->settings.need_us = 50000;
    atomic_store(&share->usual_ns, 100000000);
    atomic_store(&share->began_ns, rg_now_ns());
    other_launches(true);
    usleep(20000);
    CHECK_EQUAL(rg.slot->suspensions, 0);
    atomic_store(&seg->clients[OTHER].launches[0], 99);
    WAIT_FOR(atomic_load(&rg.slot->suspensions) == 1);
    done();
}

/* The other client's next request is under way before anybody has seen that the last one is over. */
static void other_goes_on(void)
{
    rg_share *share = rg_share_of(seg, 0, OTHER);
    rg_device_idle(dev0(), OTHER, rg_now_ns());
    atomic_store(&share->began_launches, atomic_load(&seg->clients[OTHER].launches[0]));
    atomic_store(&share->began_ns, rg_now_ns());
    rg_device_busy(dev0(), OTHER, rg_now_ns());
    rg_device_launching(dev0(), OTHER, true);
    rg_device_wake(dev0());
}

/* A request that leaves the GPU to best-effort work at first does that also where it follows on another at once. */
static void back_as_the_next_request_begins(void)
{
    become_preemptible();
    other_is_regular();
    seg->settings.defer_ppm = 0;
    seg->settings.need_us = 50000;
    atomic_store(&rg_share_of(seg, 0, OTHER)->usual_ns, 60000000000); /* a minute, so not late in this one on a busy machine either */
    other_launches(true);
    for (uint64_t i = 1; i <= 3; i++) {
        atomic_fetch_add(&seg->clients[OTHER].launches[0], 100);
        WAIT_FOR(atomic_load(&rg.slot->suspensions) == i);
        other_goes_on();
        launch(spin, NULL, 1000);
        CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    }
    done();
}

/* Requests that are alike to the last launch have best-effort work come back as that is launched, until one of them goes on. */
static void back_as_all_is_launched_and(bool waits)
{
    become_preemptible();
    other_is_regular();
    seg->settings.slice_us = 16000; /* nothing else ends one that runs then */
    WAIT_FOR(rg.slot->slice_us == 16000);
    seg->settings.defer_us = seg->settings.defer_ppm = 0;
    rg_share *share = rg_share_of(seg, 0, OTHER);
    _Atomic uint64_t *launches = &seg->clients[OTHER].launches[0];
    atomic_store(&share->usual_ns, 1000000);
    enum { ALIKE = 1, GOES_ON = 2 }; /* until the first, and after the second, they are not known to launch no more */
    for (int i = 0; i <= GOES_ON + 1; i++) {
        uint64_t before = atomic_load(&rg.slot->suspensions);
        atomic_store(&share->alike, i >= ALIKE && i <= GOES_ON);
        atomic_store(&share->began_ns, rg_now_ns());
        other_launches(true);
        WAIT_FOR(atomic_load(&rg.slot->suspensions) == before + 1);
        launch(spin, NULL, 1000);
        atomic_fetch_add(launches, 99);
        usleep(5000);
        CHECK_EQUAL(cuStreamQuery(NULL), CUDA_ERROR_NOT_READY);
        atomic_fetch_add(launches, 1);
        if (i == ALIKE || i == GOES_ON) {
            CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
            usleep(5000);
            CHECK_EQUAL(rg.slot->suspensions, before + 1);
        }
        if (i == GOES_ON) {
            atomic_fetch_add(launches, 30);
            if (waits) {
                rg_device_launching(dev0(), OTHER, false);
                rg_device_wake(dev0());
            }
            WAIT_FOR(atomic_load(&rg.slot->suspensions) == before + 2);
            if (!waits)
                launch(spin, NULL, 1000);
        }
        usleep(5000);
        CHECK_EQUAL(cuStreamQuery(NULL), i == ALIKE || (i == GOES_ON && waits) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY);
        other_launches(false);
        CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
        atomic_store(&share->began_launches, atomic_load(launches));
        usleep(5000); /* a pause, not one between two parts of a request */
    }
    done();
}

static void back_as_all_is_launched(void)
{
    back_as_all_is_launched_and(false);
}

static void a_request_that_goes_on_and_waits_is_suspended_for(void)
{
    back_as_all_is_launched_and(true);
}

/* So few launches tell nothing, and of two high clients at once the other one may launch more: it comes back when they wait. */
static void back_as_they_wait(void)
{
    enum { ANOTHER = OTHER + 1 };
    become_preemptible();
    other_is_regular();
    seg->settings.defer_us = seg->settings.defer_ppm = 0;
    rg_share *share = rg_share_of(seg, 0, OTHER);
    atomic_store(&seg->clients[ANOTHER].heartbeat_ns, UINT64_MAX / 2); /* never stale: a beat would say that it is idle */
    for (uint64_t two = 0; two < 2; two++) {
        uint64_t before = atomic_load(&rg.slot->suspensions);
        uint32_t usual = two ? 100 : 8;
        atomic_store(&share->usual_launches, usual);
        atomic_store(&share->alike, 1);
        atomic_store(&share->began_launches, atomic_load(&seg->clients[OTHER].launches[0]));
        if (two)
            rg_device_busy(dev0(), ANOTHER, rg_now_ns());
        other_launches(true);
        WAIT_FOR(atomic_load(&rg.slot->suspensions) == before + 1);
        launch(spin, NULL, 1000);
        atomic_fetch_add(&seg->clients[OTHER].launches[0], usual);
        rg_device_wake(dev0());
        usleep(20000);
        CHECK_EQUAL(cuStreamQuery(NULL), CUDA_ERROR_NOT_READY);
        if (two)
            rg_device_idle(dev0(), ANOTHER, rg_now_ns());
        other_launches(false);
        CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
        usleep(5000);
    }
    done();
}

/* One that stops launching and never waits is stood aside for, too, and best-effort work gets its due. */
static void a_request_that_stops_is_waited_for_so_long(void)
{
    become_preemptible();
    other_is_regular();
    seg->settings.starvation_us = 20000;
    other_launches(true);
    atomic_store(&seg->clients[OTHER].launches[0], 39);
    WAIT_FOR(atomic_load(&rg.slot->suspensions) >= 1 && atomic_load(&rg.slot->starved) >= 2);
    done();
}

/* Who has run until requests were far enough has had its share, though they make no break; not so who is off the GPU for all of them. */
static void who_has_run_is_owed_nothing(void)
{
    become_preemptible();
    seg->settings.slice_us = 16000;
    seg->settings.starvation_us = 20000;
    seg->settings.defer_us = 5000;
    WAIT_FOR(rg.slot->slice_us == 16000);
    for (int i = 0; i < 30; i++) {
        other_launches(true);
        WAIT_FOR(atomic_load(&rg.slot->suspensions) == (uint64_t)i + 1);
        usleep(5000);
        uint64_t off_ns = atomic_load(&rg.slot->suspended_ns);
        other_launches(false);
        WAIT_FOR(atomic_load(&rg.slot->suspended_ns) > off_ns);
    }
    CHECK_EQUAL(rg.slot->starved, 0);
    seg->settings.defer_us = 0;
    other_launches(true);
    WAIT_FOR(atomic_load(&rg.slot->starved) >= 2);
    done();
}

/* With its due it has had its share: what it went without before that gives it no second one, once it has run for a while. */
static void what_it_went_without_is_settled_with_its_due(void)
{
    become_preemptible();
    seg->settings.slice_us = 16000;
    seg->settings.starvation_us = 100000;
    WAIT_FOR(rg.slot->slice_us == 16000);
    other_launches(true);
    WAIT_FOR(atomic_load(&rg.slot->starved) == 1);
    seg->settings.share_period_us = 600000000;
    usleep(1200000); /* without, for longer than counts */
    seg->settings.share_period_us = 0;
    WAIT_FOR(atomic_load(&rg.slot->starved) == 2);
    other_launches(false); /* a break ends it */
    WAIT_FOR(atomic_load(&rg.slot->slice_us) == 16000);
    usleep(40000);
    uint64_t suspensions = atomic_load(&rg.slot->suspensions);
    other_launches(true);
    WAIT_FOR(atomic_load(&rg.slot->suspensions) > suspensions);
    usleep(180000); /* of 760 ms at least for which it may do without */
    CHECK_EQUAL(rg.slot->starved, 2);
    WAIT_FOR(atomic_load(&rg.slot->starved) > 2);
    done();
}

/* In short slices high clients' breaks are what it has had, also where the first request after one is over before its thread looks. */
static void a_break_is_a_share(void)
{
    become_preemptible();
    seg->settings.starvation_us = 200000;
    other_launches(true);
    WAIT_FOR(atomic_load(&rg.slot->suspensions) == 1);
    other_launches(false);
    WAIT_FOR(atomic_load(&rg.slot->suspended_ns) > 0);
    for (bool again = true; again;) {
        usleep(300000);
        other_launches(true);
        uint64_t spell = atomic_load(&dev0()->spell_ns);
        other_launches(false);
        other_launches(true);
        again = atomic_load(&dev0()->spell_ns) != spell; /* this thread was held up */
        if (again)
            other_launches(false);
    }
    usleep(400000); /* of 2 s for which it may do without */
    CHECK_EQUAL(rg.slot->starved, 0);
    WAIT_FOR(atomic_load(&rg.slot->starved) > 0);
    done();
}

/* One that waits before that does not wait for the end of a long slice; a short one ends by itself. */
static void a_long_slice_ends_when_a_request_waits(void)
{
    become_preemptible();
    other_is_regular();
    for (uint32_t slice_us = 300; slice_us <= 30000; slice_us *= 100) {
        uint64_t before = atomic_load(&rg.slot->suspensions);
        seg->settings.slice_us = slice_us;
        WAIT_FOR(atomic_load(&rg.slot->slice_us) == slice_us);
        other_launches(true);
        usleep(5000);
        CHECK_EQUAL(rg.slot->suspensions, before);
        rg_device_launching(dev0(), OTHER, false);
        rg_device_wake(dev0());
        if (slice_us > RG_POLICY_SHORT_SLICE_US)
            WAIT_FOR(atomic_load(&rg.slot->suspensions) == before + 1);
        else
            usleep(20000);
        CHECK_EQUAL(rg.slot->suspensions, before + (slice_us > RG_POLICY_SHORT_SLICE_US));
        /* It is back at once, and what it has launched runs. */
        launch(spin, NULL, 1000);
        CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
        /* Once is enough: the GPU is with the other client for as long as that has work. */
        for (int i = 0; i < 3; i++) {
            rg_device_launching(dev0(), OTHER, true);
            usleep(2000);
            rg_device_launching(dev0(), OTHER, false);
            rg_device_wake(dev0());
            usleep(2000);
        }
        CHECK_EQUAL(rg.slot->suspensions, before + (slice_us > RG_POLICY_SHORT_SLICE_US));
        other_launches(false);
    }
    /* Also where it waits before anybody has seen it launch; not where it has been suspended for. */
    for (int i = 0; i < 10; i++) {
        uint64_t before = atomic_load(&rg.slot->suspensions);
        other_launches(true);
        if (i & 1)
            atomic_store(&seg->clients[OTHER].launches[0], 40);
        if (i & 1)
            WAIT_FOR(atomic_load(&rg.slot->suspensions) == before + 1);
        rg_device_launching(dev0(), OTHER, false);
        rg_device_wake(dev0());
        WAIT_FOR(atomic_load(&rg.slot->suspensions) == before + 1);
        launch(spin, NULL, 1000);
        CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
        usleep(2000);
        CHECK_EQUAL(rg.slot->suspensions, before + 1);
        other_launches(false);
        atomic_store(&seg->clients[OTHER].launches[0], 0);
    }
    done();
}

/* Until a beat the slices are those of before: who comes meanwhile, and would not suspend it any more, is not to wait for one. */
static void slices_that_are_long_still_keep_nobody_waiting(void)
{
    become_preemptible();
    for (int waits = 0; waits < 2; waits++) {
        seg->settings.suspend = 1;
        seg->settings.slice_us = 16000;
        WAIT_FOR(atomic_load(&rg.slot->slice_us) == 16000);
        uint64_t before = rg.slot->suspensions;
        /* Again where the beat comes first. */
        for (int tries = 0; rg.slot->suspensions == before && tries < 200; tries++) {
            seg->settings.suspend = 1;
            seg->settings.slice_us = 16000;
            WAIT_FOR(atomic_load(&rg.slot->slice_us) == 16000);
            seg->settings.suspend = 0;
            seg->settings.slice_us = 50;
            if (waits) { /* it has launched all before the thread is awake */
                rg_device_busy(dev0(), OTHER, rg_now_ns());
                rg_segment_hold(seg, 0);
            } else {
                other_launches(true);
            }
            for (int i = 0; i < 50 && rg.slot->suspensions == before && atomic_load(&rg.slot->slice_us) == 16000; i++)
                usleep(1000);
            other_launches(false);
        }
        CHECK(rg.slot->suspensions > before);
        /* And no longer than that. */
        WAIT_FOR(atomic_load(&rg.slot->slice_us) < 16000);
        before = rg.slot->suspensions;
        other_launches(true);
        beats(2);
        CHECK_EQUAL(rg.slot->suspensions, before);
        other_launches(false);
    }
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

/* A process without a context has nothing that could be taken off the GPU, however long and whoever asks; later it has again. */
static void preemptible_again_after_a_reset(void)
{
    become_preemptible();
    for (int i = 0; i < 2; i++) {
        CHECK_EQUAL(cuDevicePrimaryCtxReset_v2(0), CUDA_SUCCESS);
        other_launches(i);
        beats(i ? 3 : 25);
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

static _Atomic int slowly, calls;
static int suspend_slowly(unsigned ordinal, int suspend)
{
    if (atomic_load(&slowly))
        usleep(RG_POLICY_SLOW_CALL_NS / 1000);
    int result = real_suspend(ordinal, suspend);
    atomic_fetch_add(&calls, 1);
    return result;
}

/* Suspended and back so often. */
static void go_off_and_on(int times)
{
    for (int i = 0; i < times; i++) {
        int before = atomic_load(&calls);
        other_launches(true);
        WAIT_FOR(atomic_load(&calls) > before);
        before = atomic_load(&calls);
        other_launches(false);
        WAIT_FOR(atomic_load(&calls) > before);
    }
}

/* Of calls that the driver holds up it is counted how many there were, and not of others (a machine under load may be slow in some). */
static void calls_that_are_held_up_are_counted(void)
{
    CHECK(rg_real_ready());
    real_suspend = rg_real.rigelSimSuspend;
    rg_real.rigelSimSuspend = suspend_slowly;
    become_preemptible();
    go_off_and_on(10);
    uint64_t few = atomic_load(&rg.slot->slow_calls);
    CHECK(few < (uint64_t)atomic_load(&calls));
    int before = atomic_load(&calls);
    atomic_store(&slowly, 1);
    go_off_and_on(3);
    WAIT_FOR(atomic_load(&rg.slot->slow_calls) >= few + (uint64_t)(atomic_load(&calls) - before));
    CHECK(atomic_load(&calls) - before >= 6);
    done();
}

static int (*real_slice)(unsigned, uint64_t);
static _Atomic int gone;
static int no_slice_where_it_is_gone(unsigned ordinal, uint64_t us)
{
    return atomic_load(&gone) ? -ENODEV : real_slice(ordinal, us);
}

static int refuse_where_it_is_gone(unsigned ordinal, int suspend)
{
    int result = real_suspend(ordinal, suspend);
    return atomic_load(&gone) && !suspend ? -EIO : result;
}

static int (*set_slice)(unsigned, uint64_t);
static int refuse_slice(unsigned ordinal, uint64_t us)
{
    (void)ordinal, (void)us;
    return -EPERM;
}

static void beats_of_its_own(int n)
{
    for (int i = 0; i < n; i++)
        rg_preempt_beat();
}

/* A driver that refuses so often in a row is believed; one that does it less often may have been busy. */
static void a_driver_that_always_refuses_is_believed(void)
{
    enum { REFUSALS = 20 }; /* of preempt.c */
    become_preemptible();
    rg_agent_stop();
    set_slice = rg_real.rigelSimSetTimeslice;
    for (int more = 0; more < 2; more++) {
        rg_real.rigelSimSetTimeslice = refuse_slice;
        beats_of_its_own(REFUSALS + more);
        CHECK_EQUAL(rg.preemptible[0], 0);
        CHECK_EQUAL(rg.slot->preemption, RG_PREEMPTION_OFF);
        rg_real.rigelSimSetTimeslice = set_slice;
        beats_of_its_own(2);
        CHECK_EQUAL(rg.slot->preemption, more ? RG_PREEMPTION_OFF : RG_PREEMPTION_ON);
        CHECK_EQUAL(rg.preemptible[0] != 0, !more);
    }
    done();
}

/* Its context ends just as its channels are to come back: that is no refusal, and in the next context it is suspended as before. */
static void channels_that_go_as_they_come_back_are_no_failure(void)
{
    CHECK(rg_real_ready());
    real_suspend = rg_real.rigelSimSuspend;
    real_slice = rg_real.rigelSimSetTimeslice;
    rg_real.rigelSimSuspend = refuse_where_it_is_gone;
    rg_real.rigelSimSetTimeslice = no_slice_where_it_is_gone;
    become_preemptible();
    other_launches(true);
    WAIT_FOR(atomic_load(&rg.slot->suspensions) == 1);
    atomic_store(&gone, 1);
    other_launches(false);
    WAIT_FOR(atomic_load(&rg.slot->suspended_ns) > 0);
    atomic_store(&gone, 0);
    other_launches(true);
    WAIT_FOR(atomic_load(&rg.slot->suspensions) == 2);
    CHECK_EQUAL(rg.slot->preemption, RG_PREEMPTION_ON);
    other_launches(false);
    launch(spin, NULL, 1000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    done();
}

/* Beside high clients that never rest it is told meanwhile for how long it has been off the GPU. */
static void time_off_the_gpu_is_told_meanwhile(void)
{
    become_preemptible();
    seg->settings.starvation_us = 20000;
    other_launches(true);
    WAIT_FOR(atomic_load(&rg.slot->starved) >= 2);
    CHECK(atomic_load(&rg.slot->suspended_ns) > 0);
    CHECK_EQUAL(atomic_load(&rg.slot->suspensions), 1);
    other_launches(false);
    done();
}

/* Also where nobody is due: who looks once a second is shown what belongs to that second. */
static void time_off_the_gpu_is_told_in_the_second_it_belongs_to(void)
{
    enum { TRIES = 20, SOON_NS = 500000000 }; /* on a machine under load it is looked at later, but not each time */
    become_preemptible();
    seg->settings.starvation_us = 60000000;
    uint64_t told_ns = SOON_NS;
    for (int i = 0; i < TRIES && told_ns >= SOON_NS; i++) {
        uint64_t before = atomic_load(&rg.slot->suspended_ns), now;
        other_launches(true);
        WAIT_FOR(atomic_load(&rg.slot->suspensions) == (uint64_t)i + 1);
        WAIT_FOR((now = atomic_load(&rg.slot->suspended_ns)) > before);
        told_ns = now - before;
        other_launches(false);
        launch(spin, NULL, 1000);
        CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS); /* it is back */
    }
    CHECK(told_ns < SOON_NS);
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

/* The driver's interface as far as channel.c looks at it: an object is allocated below another; a question to one. */
typedef struct {
    uint32_t root, parent, object, class;
} allocation;
#define ALLOCATE _IOWR('F', 0x2b, char[32])
#define QUESTION _IOWR('F', 0x2a, char[32])

static void allocated(uint32_t parent, uint32_t object, uint32_t class)
{
    rg_channel_saw(-1, ALLOCATE, &(allocation){1, parent, object, class});
}

static _Atomic int asked, answered;
static void answer_late(int signal, siginfo_t *info, void *context)
{
    (void)signal, (void)info, (void)context;
    atomic_store(&asked, 1);
    while (!atomic_load(&answered))
        usleep(1000);
}

static enum rg_found first_found;
static void *find_channels(void *channels)
{
    static const char uuid[16] = "";
    first_found = rg_channels_find(channels, uuid, 0);
    return NULL;
}

/* Questions to the driver are answered by this from now on. False: not here. */
static bool answer_with(void (*handler)(int, siginfo_t *, void *))
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_ioctl, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[1])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)QUESTION, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog filter = {sizeof code / sizeof *code, code};
    struct sigaction action = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0)
        return false;
    CHECK_EQUAL(sigaction(SIGSYS, &action, NULL), 0);
    return true;
}

/* The driver may take long to say which GPU a channel is on, while another process makes its context, say. The program goes on making its
 * own meanwhile. */
static void the_program_does_not_wait_for_a_question_to_the_driver(void)
{
    if (!answer_with(answer_late))
        return;
    allocated(1, 10, 0x0080); /* a device, its GPU, a group of channels, a channel, what computes there */
    allocated(10, 11, 0x2080);
    allocated(10, 12, 0xa06c);
    allocated(12, 13, 0xc86f);
    allocated(13, 14, 0xcbc0);
    rg_channels channels;
    pthread_t thread;
    CHECK_EQUAL(pthread_create(&thread, NULL, find_channels, &channels), 0);
    WAIT_FOR(atomic_load(&asked));
    allocated(12, 15, 0xc86f);
    atomic_store(&answered, 1);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    CHECK_EQUAL(first_found, RG_CHANNELS_NONE); /* the answer was an error: on no GPU that is known */
    find_channels(&channels);
    CHECK_EQUAL(first_found, RG_CHANNELS_NONE); /* and all is still known that the process has */
}

static void released(uint32_t object, uint32_t status)
{
    rg_channel_saw(-1, _IOWR('F', 0x29, char[16]), &(allocation){1, 0, object, status});
}

static enum rg_found found_now(void)
{
    rg_channels channels;
    find_channels(&channels);
    return first_found;
}

/* What computes in a channel of no group of this process's is under MPS. What hangs below what is released goes with it. */
static void channels_go_with_what_they_hang_below(void)
{
    allocated(1, 10, 0x0080);
    allocated(10, 13, 0xc86f); /* below the device itself */
    CHECK_EQUAL(found_now(), RG_CHANNELS_NONE);
    allocated(13, 14, 0xcbc0);
    CHECK_EQUAL(found_now(), RG_CHANNELS_FOREIGN);
    uint32_t generation = rg_channel_generation();
    released(10, 3); /* refused */
    released(99, 0); /* nothing that is known */
    CHECK_EQUAL(rg_channel_generation(), generation);
    CHECK_EQUAL(found_now(), RG_CHANNELS_FOREIGN);
    released(10, 0);
    CHECK(rg_channel_generation() != generation);
    /* Neither the channel nor what computes there is left: what comes by their numbers is not theirs. */
    allocated(10, 13, 0xc86f);
    CHECK_EQUAL(found_now(), RG_CHANNELS_NONE);
    released(13, 0);
    allocated(13, 14, 0xcbc0);
    CHECK_EQUAL(found_now(), RG_CHANNELS_NONE);
    /* However much it is. */
    for (uint32_t group = 20; group < 24; group++) {
        allocated(10, group, 0xa06c);
        for (uint32_t channel = 4 * group; channel < 4 * group + 4; channel++) {
            allocated(group, channel, 0xc86f);
            allocated(channel, channel + 100, 0xcbc0);
        }
    }
    released(10, 0);
    allocated(1, 10, 0x0080);
    for (uint32_t channel = 80; channel < 96; channel++)
        allocated(10, channel, 0xc86f);
    CHECK_EQUAL(found_now(), RG_CHANNELS_NONE);
    /* All of a client's goes with it. */
    allocated(1, 13, 0xc86f);
    CHECK_EQUAL(found_now(), RG_CHANNELS_FOREIGN);
    released(1, 0);
    CHECK_EQUAL(found_now(), RG_CHANNELS_NONE);
}

/* Of what a program allocates most is none of Rigel's business, and other devices' requests are not at all. */
static void what_is_no_channel_is_not_known(void)
{
    static const uint32_t classes[] = {0x0041, 0x006f, 0x00c0, 0xc26f, 0xc3b5, 0xc2c0, 0xc371, 0xc3c1, 0x1006f, 0x100c0};
    uint32_t generation = rg_channel_generation();
    for (uint32_t i = 0; i < sizeof classes / sizeof *classes; i++)
        allocated(1, 10 + i, classes[i]);
    rg_channel_saw(-1, _IOWR('X', 0x2b, char[32]), &(allocation){1, 1, 30, 0x0080});
    rg_channel_saw(-1, _IOWR('F', 0x2b, char[8]), &(allocation){1, 1, 30, 0x0080});
    rg_channel_saw(-1, _IOWR('F', 0x2c, char[32]), &(allocation){1, 1, 30, 0x0080});
    rg_channel_saw(-1, ALLOCATE, NULL);
    CHECK_EQUAL(rg_channel_generation(), generation);
    CHECK_EQUAL(found_now(), RG_CHANNELS_NONE);
}

/* Of more than there is room for a part is not controlled. */
static void more_than_there_is_room_for(void)
{
    allocated(1, 10, 0x0080);
    for (uint32_t i = 0; i < 2047; i++)
        allocated(10, 100 + i, 0xa06c);
    CHECK_EQUAL(found_now(), RG_CHANNELS_NONE);
    allocated(10, 3000, 0xa06c);
    CHECK_EQUAL(found_now(), RG_CHANNELS_FOREIGN);
}

#if defined(__x86_64__)
/* A driver that has two GPUs, and what it was last told (channel.c has where these are from). */
typedef struct {
    uint32_t client, object, command, flags;
    uint64_t params;
    uint32_t params_size, status;
} question;
typedef struct {
    uint8_t disable;
    uint32_t count;
    uint8_t only_scheduling, rewind;
    uint64_t event;
    uint32_t client[64], channel[64];
} channels_told;
static uint64_t slice_of[64];   /* by group */
static uint32_t refused_object; /* of groups, and channels: whoever names it is refused */
static channels_told told;      /* and by how many calls, of which GPU */
static uint32_t times_told, told_of;
static bool disabled[256]; /* by channel */

static void answer_as_the_driver(int signal, siginfo_t *info, void *context)
{
    ucontext_t *at = context;
    question *q = (question *)(uintptr_t)at->uc_mcontext.gregs[REG_RDX]; /* the call's third argument */
    void *params = (void *)(uintptr_t)q->params;
    (void)signal, (void)info;
    at->uc_mcontext.gregs[REG_RAX] = 0;
    q->status = q->client != 1;
    if (q->status)
        return;
    if (q->command == 0x2080014a) { /* which GPU */
        memset((char *)params + 12, q->object == 11 ? 'A' : 'B', 16);
    } else if (q->command == 0xa06c0103) { /* a time slice */
        q->status = q->object == refused_object;
        slice_of[q->object] = q->status ? slice_of[q->object] : *(uint64_t *)params;
    } else {
        memcpy(&told, params, sizeof told);
        told_of = q->object;
        times_told++;
        for (uint32_t i = 0; i < told.count; i++)
            q->status |= told.channel[i] == refused_object;
        for (uint32_t i = 0; i < told.count && !q->status; i++)
            disabled[told.channel[i]] = told.disable;
    }
}

/* A channel, and what computes there. */
static void channel_in(uint32_t group, uint32_t channel)
{
    allocated(group, channel, 0xc86f);
    allocated(channel, channel + 100, 0xcbc0);
}

/* What is controlled are the channels in which something computes, of one GPU, all of them and with their groups. */
static void the_channels_of_a_gpu_are_controlled(void)
{
    const char a[] = "AAAAAAAAAAAAAAAA", b[] = "BBBBBBBBBBBBBBBB", c[] = "CCCCCCCCCCCCCCCC";
    if (!answer_with(answer_as_the_driver))
        return;
    allocated(1, 10, 0x0080);
    allocated(10, 11, 0x2080);
    allocated(10, 12, 0xa06c);
    channel_in(12, 13);
    channel_in(12, 14);
    allocated(12, 15, 0xc86f); /* copies */
    allocated(10, 16, 0xa06c);
    channel_in(16, 17);
    allocated(1, 20, 0x0080);
    allocated(20, 21, 0x2080);
    allocated(20, 22, 0xa06c);
    channel_in(22, 23);
    allocated(1, 30, 0x0080); /* of which it is not known what GPU it is */
    allocated(30, 32, 0xa06c);
    channel_in(32, 33);
    rg_channels of_a, of_b, none;
    CHECK_EQUAL(rg_channels_find(&of_a, a, 0), RG_CHANNELS_FOUND);
    CHECK_EQUAL(of_a.channels, 3);
    CHECK_EQUAL(of_a.groups, 2);
    CHECK_EQUAL(of_a.fd, -1); /* that by which they were allocated */
    CHECK_EQUAL(of_a.generation, rg_channel_generation());
    CHECK_EQUAL(rg_channels_find(&of_b, b, 1), RG_CHANNELS_FOUND);
    CHECK_EQUAL(of_b.channels, 1);
    CHECK_EQUAL(of_b.groups, 1);
    CHECK_EQUAL(rg_channels_find(&none, c, 2), RG_CHANNELS_NONE);
    /* Slices: what one group is refused the others have. */
    CHECK_EQUAL(rg_channels_slice(&of_a, 50), 0);
    CHECK(slice_of[12] == 50 && slice_of[16] == 50 && !slice_of[22]);
    refused_object = 12;
    CHECK_EQUAL(rg_channels_slice(&of_a, 200), -1);
    CHECK(slice_of[12] == 50 && slice_of[16] == 200);
    refused_object = 0;
    /* All at once. */
    CHECK_EQUAL(rg_channels_suspend(&of_a), 0);
    CHECK(times_told == 1 && told_of == 11 && told.count == 3 && !told.only_scheduling && !told.rewind && told.client[0] == 1);
    CHECK(disabled[13] && disabled[14] && disabled[17] && !disabled[15] && !disabled[23]);
    CHECK_EQUAL(rg_channels_suspend(&of_b), 0);
    CHECK(told_of == 21 && disabled[23]);
    CHECK_EQUAL(rg_channels_resume(&of_a), 0);
    CHECK(times_told == 3 && !disabled[13] && !disabled[14] && !disabled[17] && disabled[23]);
    /* Nothing is off where one is refused; the others come back where one does not, which is a failure unless that one is gone. */
    refused_object = 14;
    CHECK_EQUAL(rg_channels_suspend(&of_a), -1);
    disabled[13] = disabled[17] = true;
    CHECK_EQUAL(rg_channels_resume(&of_a), -1);
    CHECK(!disabled[13] && !disabled[17]);
    disabled[13] = disabled[17] = true;
    uint32_t generation = rg_channel_generation();
    released(14, 0);
    CHECK(rg_channel_generation() != generation);
    CHECK_EQUAL(rg_channels_resume(&of_a), 0);
    CHECK(!disabled[13] && !disabled[17]);
    CHECK_EQUAL(rg_channels_find(&of_a, a, 0), RG_CHANNELS_FOUND);
    CHECK_EQUAL(of_a.channels, 2);
    /* One that comes is seen; of more than can be controlled a part would not do. */
    generation = rg_channel_generation();
    for (uint32_t i = of_a.channels; i < RG_CHANNELS; i++)
        channel_in(12, 34 + i);
    CHECK(rg_channel_generation() != generation);
    CHECK_EQUAL(rg_channels_find(&of_a, a, 0), RG_CHANNELS_FOUND);
    CHECK_EQUAL(of_a.channels, RG_CHANNELS);
    channel_in(12, 34 + RG_CHANNELS);
    CHECK_EQUAL(rg_channels_find(&of_a, a, 0), RG_CHANNELS_FOREIGN);
    CHECK_EQUAL(of_a.channels, 0);
    /* A child of fork has none of them. */
    rg_channel_off();
    CHECK_EQUAL(rg_channels_find(&of_b, b, 1), RG_CHANNELS_FOREIGN);
    generation = rg_channel_generation();
    allocated(1, 250, 0x0080);
    CHECK_EQUAL(rg_channel_generation(), generation);
}
#endif

/* The thread of this process that is called so; 0: there is none. */
static pid_t thread_called(const char *name)
{
    DIR *tasks = opendir("/proc/self/task");
    pid_t found = 0;
    for (struct dirent *task; tasks && !found && (task = readdir(tasks));) {
        char path[300], comm[32] = "";
        snprintf(path, sizeof(path), "/proc/self/task/%s/comm", task->d_name);
        FILE *file = fopen(path, "r");
        if (file && fgets(comm, sizeof(comm), file) && strncmp(comm, name, strlen(name)) == 0)
            found = atoi(task->d_name);
        if (file)
            fclose(file);
    }
    if (tasks)
        closedir(tasks);
    return found;
}

/* Its thread runs as soon as it is woken: it has the shortest slice of the processor that Linux gives, where it gives any, and the nice value of the
 * program. The program's own threads have what they had. */
static void its_thread_is_prompt_and_no_other(void)
{
    rg_thread_attributes had = {0}, asked, own = {0}, its = {0};
    CHECK_EQUAL(setpriority(PRIO_PROCESS, 0, 3), 0);
    CHECK_EQUAL(syscall(SYS_sched_getattr, 0, &had, sizeof(had), 0), 0);
    asked = had;
    asked.runtime_ns = 100000;
    CHECK_EQUAL(syscall(SYS_sched_setattr, 0, &asked, 0), 0);
    CHECK_EQUAL(syscall(SYS_sched_getattr, 0, &asked, sizeof(asked), 0), 0);
    CHECK_EQUAL(syscall(SYS_sched_setattr, 0, &had, 0), 0);
    become_preemptible();
    pid_t thread = 0;
    WAIT_FOR((thread = thread_called("rigel-preempt")) != 0); /* it names itself */
    WAIT_FOR(syscall(SYS_sched_getattr, thread, &its, sizeof(its), 0) == 0 && its.runtime_ns == asked.runtime_ns);
    CHECK_EQUAL(its.nice, 3);
    CHECK_EQUAL(its.policy, SCHED_OTHER);
    CHECK_EQUAL(syscall(SYS_sched_getattr, 0, &own, sizeof(own), 0), 0);
    CHECK(own.runtime_ns == had.runtime_ns && own.nice == 3);
}

int main(int argc, char **argv)
{
    (void)argc;
    ensure_environment("LD_LIBRARY_PATH", in_build_folder("sim"), argv);
    int failures = 0;
    RUN(preemptible_and_timed_while_new);
    RUN(awake_as_it_becomes_preemptible);
    RUN(slices_are_short_only_where_it_has_the_gpu_to_itself);
    RUN(slices_beside_another_best_effort_client);
    RUN(what_was_taken_off_the_gpu_is_not_timed);
    RUN(suspended_while_high_launches);
    RUN(stays_away_from_requests_that_outlast_their_slice);
    RUN(requests_elsewhere_and_of_long_ago_tell_nothing);
    RUN(suspension_ends_by_the_starvation_bound);
    RUN(its_share_comes_once_in_a_period);
    RUN(requests_one_after_the_other_starve_nobody);
    RUN(an_old_hold_takes_nobody_off);
    RUN(suspended_when_so_much_of_a_request_is_launched);
    RUN(suspended_when_little_time_is_left_of_a_request);
    RUN(back_as_the_next_request_begins);
    RUN(back_as_all_is_launched);
    RUN(a_request_that_goes_on_and_waits_is_suspended_for);
    RUN(back_as_they_wait);
    RUN(a_request_that_stops_is_waited_for_so_long);
    RUN(who_has_run_is_owed_nothing);
    RUN(what_it_went_without_is_settled_with_its_due);
    RUN(a_break_is_a_share);
    RUN(a_long_slice_ends_when_a_request_waits);
    RUN(slices_that_are_long_still_keep_nobody_waiting);
    RUN(preemption_can_be_changed_at_any_time);
    RUN(preemptible_again_after_a_reset);
    RUN(a_suspension_that_failed_is_undone_until_that_succeeds);
    RUN(calls_that_are_held_up_are_counted);
    RUN(a_driver_that_always_refuses_is_believed);
    RUN(channels_that_go_as_they_come_back_are_no_failure);
    RUN(time_off_the_gpu_is_told_meanwhile);
    RUN(time_off_the_gpu_is_told_in_the_second_it_belongs_to);
    RUN(leaving_while_suspended);
    RUN(its_thread_is_prompt_and_no_other);
    RUN(the_program_does_not_wait_for_a_question_to_the_driver);
    RUN(channels_go_with_what_they_hang_below);
    RUN(what_is_no_channel_is_not_known);
    RUN(more_than_there_is_room_for);
#if defined(__x86_64__)
    RUN(the_channels_of_a_gpu_are_controlled);
#endif
    return failures ? 1 : 0;
}
