/*
 * test-busy.c: when a high client is busy, what ends that, and the priority of streams. As test-gate.c.
 */
#include "gate-testing.h"

#include <stdarg.h>
#include <sys/syscall.h>

static void idle_after(const char *what, uint64_t requests)
{
    if (busy_word() != 0 || rg.slot->requests != requests) {
        fprintf(stderr, "%s: busy word %llx, %llu requests, expected 0 and %llu\n", what, (unsigned long long)busy_word(),
                (unsigned long long)rg.slot->requests, (unsigned long long)requests);
        _exit(1);
    }
}

/* How long the program worked, and waited, of an entry of the ring. */
static uint64_t worked_ns(int entry)
{
    uint64_t worked, waited;
    rg_waited_times(rg.slot->waited_ring[entry], &worked, &waited);
    return worked;
}
static uint64_t waited_ns(int entry)
{
    uint64_t worked, waited;
    rg_waited_times(rg.slot->waited_ring[entry], &worked, &waited);
    return waited;
}

static CUresult (*real_copy)(void *, CUdeviceptr, size_t, CUstream);
static uint64_t launching_in_copy;
static CUresult copy_slowly(void *host, CUdeviceptr p, size_t n, CUstream s)
{
    launching_in_copy = seg->devices[0].high_launching;
    usleep(20000);
    return real_copy(host, p, n, s);
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
        known_ns += worked_ns(i) + waited_ns(i);
        /* One began after the one before it was over. */
        CHECK(rg.slot->began_ring[i] >= (i ? rg.slot->began_ring[i - 1] : begun_ns) && rg.slot->began_ring[i] < rg_now_ns());
        if (i)
            CHECK(rg.slot->began_ring[i] - rg.slot->began_ring[i - 1] >=
                  worked_ns(i - 1) + waited_ns(i - 1));
    }
    CHECK(known_ns > 0 && known_ns <= rg_now_ns() - begun_ns);
    CHECK_EQUAL(rg.slot->waited_ring[4], 0);
    /* A copy to memory that is not pinned waits, whatever it is called: that is no work of the program. */
    CHECK_EQUAL(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    launch(spin, s, 1000);
    *(void **)&real_copy = rg_real.hooked[RG_HOOK_cuMemcpyDtoHAsync_v2];
    rg_real.hooked[RG_HOOK_cuMemcpyDtoHAsync_v2] = (void *)copy_slowly;
    CHECK_EQUAL(cuMemcpyDtoHAsync_v2(host, p, sizeof host, s), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamSynchronize(s), CUDA_SUCCESS);
    CHECK_EQUAL(rg.slot->waited, 5);
    CHECK(waited_ns(4) >= 19000000);
    done();
}

static uint64_t launching_in_call;
static CUresult fail(void)
{
    launching_in_call = seg->devices[0].high_launching;
    return CUDA_ERROR_LAUNCH_FAILED;
}

static CUresult fail_stream(CUstream s)
{
    (void)s;
    return fail();
}

static CUresult fail_event(CUevent e)
{
    (void)e;
    return fail();
}

static CUresult fail_record(CUevent e, CUstream s)
{
    (void)e, (void)s;
    return fail();
}

/* A call that fails says nothing of the work: nobody waits for it any more, until somebody does. */
static void a_wait_that_fails_ends_nothing(void)
{
    enum { STREAM, CONTEXT, EVENT, RECORD, WAYS };
    static const struct {
        int hook;
        void *fails;
    } calls[WAYS] = {
        [STREAM] = {RG_HOOK_cuStreamSynchronize, (void *)fail_stream},
        [CONTEXT] = {RG_HOOK_cuCtxSynchronize, (void *)fail},
        [EVENT] = {RG_HOOK_cuEventSynchronize, (void *)fail_event},
        [RECORD] = {RG_HOOK_cuEventRecord, (void *)fail_record},
    };
    become_high_without_agent();
    CUstream s;
    CUevent e;
    CHECK_EQUAL(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuEventCreate(&e, CU_EVENT_DISABLE_TIMING), CUDA_SUCCESS);
    for (int way = 0; way < WAYS; way++) {
        launch(spin, s, 1000);
        if (way == EVENT)
            CHECK_EQUAL(cuEventRecord(e, s), CUDA_SUCCESS);
        void *real = rg_real.hooked[calls[way].hook];
        rg_real.hooked[calls[way].hook] = calls[way].fails;
        CUresult r = way == STREAM    ? cuStreamSynchronize(s)
                     : way == CONTEXT ? cuCtxSynchronize()
                     : way == EVENT   ? cuEventSynchronize(e)
                                      : cuEventRecord(e, s);
        CHECK_EQUAL(r, CUDA_ERROR_LAUNCH_FAILED);
        rg_real.hooked[calls[way].hook] = real;
        CHECK_EQUAL(launching_in_call, way == RECORD); /* to record is to wait for nothing */
        CHECK_EQUAL(seg->devices[0].high_launching, 1);
        CHECK_EQUAL(rg_track_find(rg_track_key(s))->state, RG_DIRTY);
        CHECK_EQUAL(busy_word(), 1);
        CHECK_EQUAL(cuStreamSynchronize(s), CUDA_SUCCESS);
        idle_after("a wait after one that failed", (uint64_t)way + 1);
    }
    done();
}

enum { SLOW_NS = 19000000 }; /* what copy_slowly takes at least */

/* Nor is more to come while it does: best-effort work that was kept off may return. What is launched after it is more. */
static void copies_to_pageable_memory_drain(void)
{
    become_high_without_agent();
    CUstream s;
    CUdeviceptr p;
    char host[64];
    void *pinned;
    uint64_t me = 1ull << rg.slot_index;
    _Atomic uint64_t *launching = &seg->devices[0].high_launching;
    CHECK_EQUAL(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CHECK_EQUAL(cuMemAlloc_v2(&p, 64), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuMemHostAlloc(&pinned, 64, 0), CUDA_SUCCESS);
    *(void **)&real_copy = rg_real.hooked[RG_HOOK_cuMemcpyDtoHAsync_v2];
    rg_real.hooked[RG_HOOK_cuMemcpyDtoHAsync_v2] = (void *)copy_slowly;
    launch(spin, s, 1000);
    CHECK_EQUAL(*launching, me);
    CHECK_EQUAL(cuMemcpyDtoHAsync_v2(pinned, p, 64, s), CUDA_SUCCESS);
    CHECK_EQUAL(launching_in_copy, me);
    CHECK_EQUAL(*launching, me);
    CHECK_EQUAL(cuMemcpyDtoHAsync_v2(host, p, 64, s), CUDA_SUCCESS);
    CHECK_EQUAL(launching_in_copy, 0);
    CHECK_EQUAL(*launching, 0);
    CHECK_EQUAL(busy_word(), me); /* until somebody has seen that it is done */
    launch(spin, s, 1000);
    CHECK_EQUAL(*launching, me);
    CHECK_EQUAL(cuMemcpyDtoHAsync_v2(host, p, 64, s), CUDA_SUCCESS);
    CHECK_EQUAL(*launching, 0);
    CHECK_EQUAL(cuStreamSynchronize(s), CUDA_SUCCESS);
    CHECK_EQUAL(busy_word(), 0);
    CHECK(waited_ns(0) >= 3 * SLOW_NS); /* in all three of them, though more was launched after two */
    /* One by itself, and one that fails. */
    CHECK_EQUAL(cuMemcpyDtoHAsync_v2(host, p, 64, s), CUDA_SUCCESS);
    CHECK_EQUAL(*launching, 0);
    CHECK_EQUAL(busy_word(), me);
    CHECK_EQUAL(cuMemcpyDtoHAsync_v2(host, 1, 64, s), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQUAL(*launching, me);
    CHECK_EQUAL(cuStreamSynchronize(s), CUDA_SUCCESS);
    CHECK_EQUAL(busy_word(), 0);
    /* What the program does with what was copied is work of its own. */
    rg_real.hooked[RG_HOOK_cuMemcpyDtoHAsync_v2] = *(void **)&real_copy;
    launch(spin, s, 1000);
    CHECK_EQUAL(cuMemcpyDtoHAsync_v2(host, p, 64, s), CUDA_SUCCESS);
    usleep(20000);
    CHECK_EQUAL(cuStreamSynchronize(s), CUDA_SUCCESS);
    CHECK_EQUAL(rg.slot->waited, 3);
    CHECK(worked_ns(2) >= SLOW_NS);
    /* Who waits for something else does not wait for it. */
    CUstream other;
    CHECK_EQUAL(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    launch(spin, s, 1000);
    CHECK_EQUAL(cuMemcpyDtoHAsync_v2(host, p, 64, s), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamSynchronize(other), CUDA_SUCCESS);
    CHECK_EQUAL(RG_PROCESS->period[0].draining, RG_DRAINED);
    CHECK_EQUAL(cuStreamQuery(s), CUDA_SUCCESS);
    CHECK_EQUAL(rg.slot->waited, 3);
    /* A look ends one, too, and tells no more than it does elsewhere. */
    launch(spin, s, 1000);
    CHECK_EQUAL(cuMemcpyDtoHAsync_v2(host, p, 64, s), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamQuery(s), CUDA_SUCCESS);
    CHECK_EQUAL(busy_word(), 0);
    CHECK_EQUAL(rg.slot->waited, 3);
    done();
}

/* The agent finds the end of one that nobody waits for: it may be in the middle of a request. */
static void the_agent_ends_what_a_copy_waited_for(void)
{
    become("high");
    const rg_share *share = rg_share_of(seg, 0, rg.slot_index);
    CUdeviceptr p;
    char host[64];
    CHECK_EQUAL(cuMemAlloc_v2(&p, 64), CUDA_SUCCESS);
    for (int request = 0; request < 4; request++) {
        for (int i = 0; i < 20; i++)
            launch(spin, NULL, 1000);
        CHECK_EQUAL(cuStreamSynchronize(NULL), CUDA_SUCCESS);
    }
    uint64_t waited = rg.slot->waited, launched = share->began_launches;
    uint32_t votes = share->usual_votes;
    for (int i = 0; i < 5; i++)
        launch(spin, NULL, 1000);
    CHECK_EQUAL(cuMemcpyDtoHAsync_v2(host, p, 64, NULL), CUDA_SUCCESS);
    CHECK(busy_word() != 0);
    agent_ends_periods(true);
    WAIT_FOR(busy_word() == 0);
    CHECK_EQUAL(rg.slot->waited, waited);
    CHECK_EQUAL(share->began_launches, launched);
    CHECK_EQUAL(share->usual_votes, votes);
    done();
}

static void *waits_for_all(void *context)
{
    CHECK_EQUAL(cu.cuCtxSetCurrent(context), CUDA_SUCCESS);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    return NULL;
}

/* A driver that queues such a copy and returns, while another thread finds that all before it is done. */
static CUresult copy_later(void *host, CUdeviceptr p, size_t n, CUstream s)
{
    (void)host, (void)p, (void)n;
    pthread_t thread;
    CHECK_EQUAL(pthread_create(&thread, NULL, waits_for_all, current()), 0);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    uint64_t one = 1, ns = 200000000;
    void *arguments[] = {&one, &ns};
    return RG_REAL(cuLaunchKernel)(spin, 1, 1, 1, 32, 1, 1, 0, s, arguments, NULL);
}

static void a_copy_that_does_not_wait_is_work(void)
{
    become_high_without_agent();
    CUdeviceptr p;
    char host[64];
    CHECK_EQUAL(cuMemAlloc_v2(&p, 64), CUDA_SUCCESS);
    rg_real.hooked[RG_HOOK_cuMemcpyDtoHAsync_v2] = (void *)copy_later;
    launch(spin, NULL, 1000);
    CHECK_EQUAL(cuMemcpyDtoHAsync_v2(host, p, 64, NULL), CUDA_SUCCESS);
    CHECK_EQUAL(busy_word(), 1ull << rg.slot_index);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    CHECK_EQUAL(busy_word(), 0);
    done();
}

static _Atomic int copy_stage;
static CUresult copy_in_stages(void *host, CUdeviceptr p, size_t n, CUstream s)
{
    (void)host, (void)p, (void)n, (void)s;
    atomic_store(&copy_stage, 1);
    WAIT_FOR(atomic_load(&copy_stage) == 2);
    return CUDA_SUCCESS;
}

static void *copies_as_another_client(void *context)
{
    char host[64];
    CHECK_EQUAL(cu.cuCtxSetCurrent(context), CUDA_SUCCESS);
    CHECK_EQUAL(rigel_client_enter("slow", "best-effort"), 0);
    CHECK_EQUAL(cuMemcpyDtoHAsync_v2(host, 1, 64, NULL), CUDA_SUCCESS);
    rigel_client_leave();
    return NULL;
}

/* What a best-effort client of the same process copies on the stream that they share is no wait of the high one. */
static void another_clients_copy_drains_nobody(void)
{
    become_high_without_agent();
    pthread_t thread;
    CHECK_EQUAL(rigel_client_enter("fast", "high"), 0);
    rg_real.hooked[RG_HOOK_cuMemcpyDtoHAsync_v2] = (void *)copy_in_stages;
    launch(spin, NULL, 1000);
    uint64_t launching = seg->devices[0].high_launching;
    CHECK(launching != 0);
    CHECK_EQUAL(pthread_create(&thread, NULL, copies_as_another_client, current()), 0);
    WAIT_FOR(atomic_load(&copy_stage) == 1);
    CHECK_EQUAL(seg->devices[0].high_launching, launching);
    atomic_store(&copy_stage, 2);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    CHECK_EQUAL(seg->devices[0].high_launching, launching);
    done();
}

static CUcontext busy_context;
static _Atomic bool busy_stop;
static CUresult launch_nothing(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                               CUstream s, void **parameters, void **extra)
{
    (void)f, (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)s, (void)parameters, (void)extra;
    return CUDA_SUCCESS;
}

static void *launches_and_waits(void *stream)
{
    CHECK_EQUAL(cu.cuCtxSetCurrent(busy_context), CUDA_SUCCESS);
    while (!atomic_load(&busy_stop)) {
        launch(spin, stream, 1000);
        CHECK_EQUAL(cuStreamSynchronize(stream), CUDA_SUCCESS);
    }
    return NULL;
}

/* Of threads that wait and launch side by side, none that launches leaves the client as one that does not. */
static void who_launches_beside_waits_is_seen(void)
{
    enum { THREADS = 3, ROUNDS = 100000 };
    become_high_without_agent();
    rg_real.hooked[RG_HOOK_cuLaunchKernel] = (void *)launch_nothing;
    CUstream streams[THREADS + 1];
    pthread_t threads[THREADS];
    uint64_t unseen = 0, me = 1ull << rg.slot_index;
    busy_context = current();
    for (int i = 0; i <= THREADS; i++)
        CHECK_EQUAL(cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    for (int i = 0; i < THREADS; i++)
        CHECK_EQUAL(pthread_create(&threads[i], NULL, launches_and_waits, streams[i]), 0);
    for (int round = 0; round < ROUNDS; round++) {
        launch(spin, streams[THREADS], 1000);
        unseen += !(seg->devices[0].high_launching & me);
        CHECK_EQUAL(cuStreamSynchronize(streams[THREADS]), CUDA_SUCCESS);
    }
    atomic_store(&busy_stop, true);
    for (int i = 0; i < THREADS; i++)
        CHECK_EQUAL(pthread_join(threads[i], NULL), 0);
    CHECK_EQUAL(unseen, 0);
    CHECK_EQUAL(busy_word(), 0);
    done();
}

/* The C library's; as Rigel wakes those who wait for a high client: whether other threads of this one may find it busy yet. */
static _Atomic int found_busy = -1;
long syscall(long number, ...)
{
    static _Atomic(void *) next;
    long (*real)(long, ...), a[6];
    va_list args;
    va_start(args, number);
    for (int i = 0; i < 6; i++)
        a[i] = va_arg(args, long);
    va_end(args);
    if (!atomic_load(&next))
        atomic_store(&next, dlsym(RTLD_NEXT, "syscall"));
    *(void **)&real = atomic_load(&next);
    if (number == SYS_futex && rg.segment && a[0] == (long)(uintptr_t)&rg.segment->devices[0].busy_wake)
        atomic_store(&found_busy, atomic_load(&RG_PROCESS->busy[0]));
    return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

/* Nobody goes on at once, since the client is busy, before it is said that it launches: whoever says so may lose its processor in between. */
static void it_launches_before_others_find_it_busy(void)
{
    become_high_without_agent();
    atomic_fetch_add(&seg->devices[0].busy_waiters, 1);
    launch(spin, NULL, 1000);
    CHECK_EQUAL(found_busy, 0);
    CHECK_EQUAL(RG_PROCESS->busy[0], 1);
    CHECK_EQUAL(seg->devices[0].high_launching, 1);
    done();
}

/* How many launches requests make is known once some were alike; one that ends in a look tells nothing. */
static void what_requests_launch_is_learned(void)
{
    enum { CLOCKS_NS = 1000000 }; /* by which rg_clock_ns and rg_now_ns may differ (trace.h) */
    become_high_without_agent();
    const rg_share *share = rg_share_of(seg, 0, rg.slot_index);
    uint64_t launches = 0;
    uint64_t first = rg_now_ns(), begun = 0;
    for (int request = 0; request < 4; request++) {
        begun = rg_now_ns();
        for (int i = 0; i < 20; i++)
            launch(spin, NULL, 1000);
        CHECK_EQUAL(share->began_launches, launches);
        CHECK_EQUAL(rg_policy_regular(share->usual_launches, share->usual_votes), request >= 2);
        launches += 20;
        CHECK(share->began_ns + CLOCKS_NS >= begun && share->began_ns <= rg_now_ns() + CLOCKS_NS);
        CHECK_EQUAL(cuStreamSynchronize(NULL), CUDA_SUCCESS);
        CHECK_EQUAL(share->began_ns, 0);
        CHECK_EQUAL(share->usual_launches, 20);
        CHECK(share->usual_ns > 0 && share->usual_ns <= rg_now_ns() - first + CLOCKS_NS);
    }
    /* An end that the program does not wait for may be one in the middle of a request: what follows goes on with it. */
    for (int i = 0; i < 5; i++)
        launch(spin, NULL, 1000);
    WAIT_FOR(cuStreamQuery(NULL) == CUDA_SUCCESS);
    CHECK_EQUAL(busy_word(), 0);
    CHECK_EQUAL(share->began_launches, launches);
    begun = share->began_ns;
    CHECK(begun > 0);
    usleep(20000);
    for (int i = 0; i < 15; i++)
        launch(spin, NULL, 1000);
    CHECK(share->began_ns >= begun + 20000000 - CLOCKS_NS && share->began_ns <= rg_now_ns() + CLOCKS_NS);
    CHECK_EQUAL(cuStreamSynchronize(NULL), CUDA_SUCCESS);
    CHECK_EQUAL(share->began_launches, launches + 20);
    CHECK_EQUAL(share->usual_votes, 100);
    /* But a whole request that it does not wait for is one. */
    for (int i = 0; i < 20; i++)
        launch(spin, NULL, 1000);
    WAIT_FOR(cuStreamQuery(NULL) == CUDA_SUCCESS);
    CHECK_EQUAL(share->began_launches, launches + 40);
    CHECK_EQUAL(share->began_ns, 0);
    CHECK_EQUAL(share->usual_votes, 100);
    /*
     * Who looks as half of its launches are made, after most of the time, tells how uneven they are; of others that is not known. Where this thread
     * was held up after the look that was not after most of the time.
     */
    seg->settings.need_us = 1;
    uint64_t look_ns;
    for (int tries = 0; tries < 50 && (int64_t)share->course[3] <= 0; tries++) {
        for (int i = 0; i < 20; i++) {
            launch(spin, NULL, 1000);
            if (i != 9)
                continue;
            usleep(20000);
            rg_device_until_late(seg, 0, rg_now_ns(), 20000000, &look_ns);
            CHECK(share->seen != 0);
        }
        CHECK(tries || share->course[3] == 0);
        CHECK_EQUAL(cuStreamSynchronize(NULL), CUDA_SUCCESS);
        CHECK_EQUAL(share->seen, 0);
    }
    CHECK((int64_t)share->course[3] > 0 && !share->course[2] && !share->course[4]);
    for (int request = 0; request < 3; request++) {
        for (int i = 0; i < 60; i++)
            launch(spin, NULL, 1000);
        CHECK_EQUAL(cuStreamSynchronize(NULL), CUDA_SUCCESS);
    }
    CHECK_EQUAL(share->usual_launches, 60);
    CHECK_EQUAL(share->course[3], 0);
    done();
}

static CUdeviceptr input_memory;

/* A request of so many launches that begins with a copy of so many bytes; what is known of those like it meanwhile. `looks`: somebody looks half way. */
static uint32_t usual_of(const rg_share *share, size_t bytes, int launches, bool looks, bool *regular)
{
    static char input[4096];
    uint64_t look_ns;
    CHECK_EQUAL(cuMemcpyHtoDAsync_v2(input_memory, input, bytes, NULL), CUDA_SUCCESS);
    uint32_t usual = share->usual_launches;
    *regular = rg_policy_regular(usual, share->usual_votes);
    for (int i = 0; i < launches; i++) {
        launch(spin, NULL, 1000);
        if (!looks || i != launches / 2 - 1)
            continue;
        usleep(20000);
        rg_device_until_late(seg, 0, rg_now_ns(), 20000000, &look_ns);
    }
    CHECK_EQUAL(share->usual_launches, usual);
    CHECK_EQUAL(cuStreamSynchronize(NULL), CUDA_SUCCESS);
    return usual;
}

/* Requests of several kinds, told by what they begin with: each is known by itself, by its launches and its course. */
static void each_kind_of_request_is_known(void)
{
    enum { ONE = 100, OTHER_KIND = 200 };
    become_high_without_agent();
    seg->settings.need_us = 1;
    CHECK_EQUAL(cuMemAlloc_v2(&input_memory, 4096), CUDA_SUCCESS);
    const rg_share *share = rg_share_of(seg, 0, rg.slot_index);
    bool regular;
    for (int request = 0; request < 4; request++)
        usual_of(share, ONE, 20, false, &regular);
    CHECK(regular);
    /* One that begins in another way is taken to be like those so far, until some have shown that it is not. */
    CHECK_EQUAL(usual_of(share, OTHER_KIND, 60, false, &regular), 20);
    CHECK(regular);
    CHECK_EQUAL(usual_of(share, ONE, 20, false, &regular), 20);
    CHECK(regular);
    CHECK_EQUAL(usual_of(share, OTHER_KIND, 60, false, &regular), 60);
    CHECK(!regular);
    /* An odd one of a kind that is known changes nothing. */
    usual_of(share, ONE, 60, false, &regular);
    CHECK_EQUAL(usual_of(share, ONE, 20, false, &regular), 20);
    for (int round = 0; round < 10; round++) {
        bool looks = round == 9;
        for (int tries = 0; !tries || (looks && tries < 50 && (int64_t)share->course[3] <= 0); tries++) { /* as above */
            CHECK_EQUAL(usual_of(share, OTHER_KIND, 60, looks, &regular), 60);
            CHECK(regular);
        }
        CHECK_EQUAL((int64_t)share->course[3] > 0, looks);
        CHECK_EQUAL(usual_of(share, ONE, 20, false, &regular), 20);
        CHECK(regular);
        CHECK_EQUAL(share->course[3], 0);
    }
    usual_of(share, OTHER_KIND, 60, false, &regular);
    CHECK((int64_t)share->course[3] > 0);
    done();
}

/* And of each it is said, with what it waited, for who compares those of a kind. */
static void of_which_kind_each_was(void)
{
    enum { REQUESTS = 100 }; /* of three kinds, in turn */
    become_high_without_agent();
    CHECK_EQUAL(cuMemAlloc_v2(&input_memory, 4096), CUDA_SUCCESS);
    const rg_share *share = rg_share_of(seg, 0, rg.slot_index);
    bool regular;
    for (size_t request = 0; request < REQUESTS; request++)
        usual_of(share, 100 << request % 3, 20, false, &regular);
    const _Atomic uint64_t *kinds = rg.slot->kind_ring;
    CHECK_EQUAL(rg.slot->waited, REQUESTS);
    for (int i = 0; i < REQUESTS; i++) {
        CHECK(kinds[i] >> 12 != 0); /* as much as src/segment.ts takes */
        for (int k = 0; k < i; k++)
            CHECK_EQUAL(kinds[k] >> 12 == kinds[i] >> 12, k % 3 == i % 3);
    }
    CHECK_EQUAL(kinds[REQUESTS], 0);
    done();
}

/* Of more kinds than there is room for, which launch the same, each is known as well as one alone. */
static void many_kinds_that_launch_the_same_are_known(void)
{
    become_high_without_agent();
    CHECK_EQUAL(cuMemAlloc_v2(&input_memory, 4096), CUDA_SUCCESS);
    const rg_share *share = rg_share_of(seg, 0, rg.slot_index);
    bool regular;
    for (size_t request = 0; request < 120; request++) {
        uint32_t usual = usual_of(share, (8 + request % 8) << (request % 40 / 8 + 3), 20, false, &regular);
        CHECK(request < 3 || (usual == 20 && regular));
    }
    done();
}

/* A request of this kind, of so many launches; what part of need_us it was taken to need. */
static uint32_t need_of(uint64_t kind, uint64_t launches, bool waits)
{
    rg_requests_begin(RG_PROCESS, 0, kind, rg_now_ns());
    uint32_t need = rg_share_of(seg, 0, rg.slot_index)->need_part;
    atomic_fetch_add(&rg.slot->launches[0], launches);
    rg_requests_end(RG_PROCESS, 0, waits);
    return need;
}

/* Of kinds of requests those that wait for the GPU more often are taken to need it for longer, others for less; one alone needs what it is said to. */
static void kinds_that_wait_need_more(void)
{
    enum { ONE = 1, OFTEN = 3, ALWAYS = 5, TINY = 7 };
    become_high_without_agent();
    /* Where need_us is not in force nothing is told by it. */
    for (int request = 0; request < 50; request++) {
        CHECK(need_of(ONE, 20, false) == RG_POLICY_ONE || request < 1);
        CHECK_EQUAL(need_of(OFTEN, 20, request % 2), RG_POLICY_ONE);
    }
    seg->settings.need_us = 1000;
    for (int request = 0; request < 50; request++)
        CHECK(need_of(ONE, 20, request % 2) == RG_POLICY_ONE || !request);
    for (int request = 0; request < 50; request++)
        CHECK_EQUAL(need_of(ONE, 20, false), RG_POLICY_ONE);
    /* What always waits keeps the GPU busy: nobody else has less for it. What launches next to nothing has no part in it. */
    uint32_t always = 0;
    for (int round = 0; round < 100; round++) {
        CHECK(need_of(ONE, 20, false) >= RG_POLICY_ONE - RG_POLICY_ONE / 8);
        always = need_of(ALWAYS, 20, true);
        need_of(TINY, 1, round % 2);
    }
    CHECK_EQUAL(always, 2 * RG_POLICY_ONE);
    CHECK_EQUAL(need_of(TINY, 1, true), RG_POLICY_ONE);
    /* Two that wait now and then, one of them more often. */
    uint32_t one = 0, often = 0;
    for (int round = 0; round < 100; round++) {
        one = need_of(ONE, 20, false);
        often = need_of(OFTEN, 20, round % 2);
    }
    CHECK(one < RG_POLICY_ONE - RG_POLICY_ONE / 4);
    CHECK(often > RG_POLICY_ONE + RG_POLICY_ONE / 4);
    done();
}

/* So many more than in holds, in which nobody else has the GPU: what waits by itself needs no more. */
static void kinds_that_wait_alone_need_no_more(void)
{
    enum { ONE = 1, OFTEN = 9, ALWAYS = 17 };
    become_high_without_agent();
    seg->settings.need_us = 1000;
    need_of(ONE, 20, false);
    need_of(OFTEN, 20, false);
    need_of(ALWAYS, 20, false);
    rg_segment_hold(seg, RG_HOLD_LIMIT_MS);
    for (int round = 0; round < 50; round++) {
        CHECK_EQUAL(need_of(ONE, 20, false), RG_POLICY_ONE);
        CHECK_EQUAL(need_of(OFTEN, 20, round % 2), RG_POLICY_ONE);
        CHECK_EQUAL(need_of(ALWAYS, 20, true), RG_POLICY_ONE);
    }
    rg_segment_hold(seg, 0);
    for (int round = 0; round < 200; round++) {
        CHECK(need_of(ONE, 20, false) > RG_POLICY_ONE - RG_POLICY_ONE / 8);
        CHECK(need_of(OFTEN, 20, round % 2) < RG_POLICY_ONE + RG_POLICY_ONE / 8);
        CHECK(need_of(ALWAYS, 20, true) >= RG_POLICY_ONE);
    }
    /* What keeps the GPU busy has more of it, at nobody's expense. */
    CHECK_EQUAL(need_of(ALWAYS, 20, true), 2 * RG_POLICY_ONE);
    /* A request that began or ended outside a hold tells nothing of those alone. */
    for (int round = 0; round < 200; round++) {
        rg_segment_hold(seg, round % 2 ? 0 : RG_HOLD_LIMIT_MS);
        rg_requests_begin(RG_PROCESS, 0, ONE, rg_now_ns());
        rg_segment_hold(seg, round % 2 ? RG_HOLD_LIMIT_MS : 0);
        atomic_fetch_add(&rg.slot->launches[0], 20);
        rg_requests_end(RG_PROCESS, 0, true);
    }
    rg_segment_hold(seg, 0);
    uint32_t one = need_of(ONE, 20, false);
    for (int round = 0; round < 200; round++) {
        need_of(OFTEN, 20, round % 2);
        one = need_of(ONE, 20, true);
    }
    CHECK(one > RG_POLICY_ONE + RG_POLICY_ONE / 4);
    done();
}

/* A request of this kind, of 20 launches, for so long. */
static void request_for(uint64_t kind, uint64_t ns)
{
    uint64_t now = rg_now_ns();
    rg_requests_begin(RG_PROCESS, 0, kind, now);
    atomic_fetch_add(&rg.slot->launches[0], 20);
    atomic_store(&RG_PROCESS->period[0].launched_at, now + ns);
    rg_requests_end(RG_PROCESS, 0, false);
}

/* For how long requests launch is known of each kind; a new one begins with what is known of all, and is not sure of it. */
static void how_long_each_kind_launches_is_known(void)
{
    enum { ONE = 1, OTHER_KIND = 9, THIRD = 17 };
    become_high_without_agent();
    const rg_share *share = rg_share_of(seg, 0, rg.slot_index);
    for (int round = 0; round < 20; round++)
        request_for(ONE, 5000000);
    CHECK_EQUAL(share->usual_votes, 8 * 20);
    rg_requests_begin(RG_PROCESS, 0, OTHER_KIND, rg_now_ns());
    CHECK_EQUAL(share->usual_ns, 5000000);
    CHECK_EQUAL(share->usual_votes, 2 * 20);
    atomic_fetch_add(&rg.slot->launches[0], 20);
    rg_requests_end(RG_PROCESS, 0, false);
    for (int round = 0; round < 60; round++)
        request_for(OTHER_KIND, 50000000);
    CHECK(share->usual_ns > 49000000);
    rg_requests_begin(RG_PROCESS, 0, ONE, rg_now_ns());
    CHECK_EQUAL(share->usual_ns, 5000000);
    /* So it is with when in it they are launched: somebody looks half way, late. */
    uint64_t look_ns, now = rg_now_ns();
    seg->settings.need_us = 1;
    atomic_store((_Atomic uint64_t *)&share->began_ns, now - 4000000);
    rg_device_busy(&seg->devices[0], rg.slot_index, now - 4000000);
    rg_device_launching(&seg->devices[0], rg.slot_index, true);
    atomic_fetch_add(&rg.slot->launches[0], 10);
    rg_device_until_late(seg, 0, now, 4000000, &look_ns);
    atomic_fetch_add(&rg.slot->launches[0], 10);
    atomic_store(&RG_PROCESS->period[0].launched_at, now + 1000000);
    rg_requests_end(RG_PROCESS, 0, false);
    CHECK((int64_t)share->course[3] > 0);
    rg_requests_begin(RG_PROCESS, 0, THIRD, rg_now_ns());
    CHECK((int64_t)share->course[3] > 0);
    rg_requests_end(RG_PROCESS, 0, false);
    done();
}

/* What a kind needs is said as soon as it is known; a request that began or ended outside a hold, or in one, tells of neither. */
static void what_a_kind_needs_is_said_at_once(void)
{
    enum { ONE = 1, OFTEN = 9 };
    become_high_without_agent();
    const rg_share *share = rg_share_of(seg, 0, rg.slot_index);
    seg->settings.need_us = 1000;
    for (int round = 0; round < 50; round++) {
        need_of(ONE, 20, false);
        need_of(OFTEN, 20, round % 2);
    }
    uint32_t before = need_of(OFTEN, 20, true);
    CHECK(share->need_part > before);
    before = share->need_part;
    for (int round = 0; round < 100; round++) {
        rg_segment_hold(seg, round % 2 ? 0 : RG_HOLD_LIMIT_MS);
        rg_requests_begin(RG_PROCESS, 0, OFTEN, rg_now_ns());
        rg_segment_hold(seg, round % 2 ? RG_HOLD_LIMIT_MS : 0);
        atomic_fetch_add(&rg.slot->launches[0], 20);
        rg_requests_end(RG_PROCESS, 0, round / 2 % 2);
    }
    rg_segment_hold(seg, 0);
    CHECK_EQUAL(share->need_part, before);
    uint32_t after = 0;
    for (int round = 0; round < 100; round++) {
        need_of(ONE, 20, false);
        after = need_of(OFTEN, 20, round % 2);
    }
    CHECK(after > before); /* more and more, as before: it does not wait so often by itself */
    done();
}

/* Whether a request has waited is told by its end: one of launches that the GPU is at work on for 50 ms after the last of them. */
static void a_wait_is_seen(void)
{
    enum { ONE = 1 };
    become_high_without_agent();
    seg->settings.need_us = 1000;
    CHECK_EQUAL(cuMemAlloc_v2(&input_memory, 4096), CUDA_SUCCESS);
    static char input[4096];
    for (int round = 0; round < 8; round++) {
        CHECK_EQUAL(cuMemcpyHtoDAsync_v2(input_memory, input, 200, NULL), CUDA_SUCCESS);
        for (int i = 0; i < 20; i++)
            launch(spin, NULL, i == 19 ? 50000000 : 1000);
        CHECK_EQUAL(cuStreamSynchronize(NULL), CUDA_SUCCESS);
        if (round > 3)
            CHECK(rg_share_of(seg, 0, rg.slot_index)->need_part > RG_POLICY_ONE);
        need_of(ONE, 20, false);
    }
    done();
}

/* What tells kinds from one another. */
static void what_a_request_begins_with(void)
{
    const rg_dims one = {1, 1}, other = {2, 1};
    const uintptr_t function = (uintptr_t)&one, another = (uintptr_t)&other;
    CHECK(rg_request_key(RG_COPY, 0, RG_DIMS_NONE) != 0);
    CHECK(rg_request_key(RG_COPY, 1000, RG_DIMS_NONE) == rg_request_key(RG_COPY, 1023, RG_DIMS_NONE));
    CHECK(rg_request_key(RG_COPY, 1000, RG_DIMS_NONE) != rg_request_key(RG_COPY, 1024, RG_DIMS_NONE));
    CHECK(rg_request_key(RG_COPY, 15, RG_DIMS_NONE) != rg_request_key(RG_COPY, 14, RG_DIMS_NONE));
    CHECK(rg_request_key(RG_COPY, SIZE_MAX, RG_DIMS_NONE) != rg_request_key(RG_COPY, SIZE_MAX / 2, RG_DIMS_NONE));
    CHECK(rg_request_key(RG_COPY, 1000, RG_DIMS_NONE) != rg_request_key(RG_MEMSET, 1000, RG_DIMS_NONE));
    CHECK(rg_request_key(RG_COPY, 1000, RG_DIMS_NONE) != rg_request_key(RG_COPYWAIT, 1000, RG_DIMS_NONE));
    CHECK(rg_request_key(RG_LAUNCH, function, one) == rg_request_key(RG_LAUNCH, function, one));
    CHECK(rg_request_key(RG_LAUNCH, function, one) != rg_request_key(RG_LAUNCH, function, other));
    CHECK(rg_request_key(RG_LAUNCH, function, one) != rg_request_key(RG_LAUNCH, another, one));
    CHECK(rg_request_key(RG_GRAPH, function, RG_DIMS_NONE) != rg_request_key(RG_GRAPH, another, RG_DIMS_NONE));
}

/* A copy that is waited for by itself is the input of what follows, and one whose end the agent has found is of the same request. */
static void the_copy_before_tells_the_kind(void)
{
    enum { COPIES = 2, COPY = 1 | COPIES, OTHER_COPY = 9 | COPIES, KERNEL = 17 }; /* as rg_request_key has them */
    become_high_without_agent();
    const rg_share *share = rg_share_of(seg, 0, rg.slot_index);
    for (int round = 0; round < 6; round++)
        for (int kind = 0; kind < 2; kind++) {
            need_of(kind ? COPY : OTHER_COPY, 0, true);
            rg_requests_begin(RG_PROCESS, 0, KERNEL, rg_now_ns());
            CHECK(round < 3 || (share->usual_launches == (kind ? 20 : 60) && rg_policy_regular(share->usual_launches, share->usual_votes)));
            atomic_fetch_add(&rg.slot->launches[0], kind ? 20 : 60);
            rg_requests_end(RG_PROCESS, 0, false);
        }
    /* Kinds that launch 40 and 80, by the copy alone. */
    for (int round = 0; round < 6; round++)
        for (uint64_t kind = 103; kind <= 111; kind += 8) {
            rg_requests_begin(RG_PROCESS, 0, kind, rg_now_ns());
            rg_requests_skip(RG_PROCESS, 0, rg_now_ns()); /* nobody waits for it */
            rg_requests_begin(RG_PROCESS, 0, KERNEL, rg_now_ns());
            if (round > 2)
                CHECK_EQUAL(share->usual_launches, kind == 103 ? 40 : 80);
            atomic_fetch_add(&rg.slot->launches[0], kind == 103 ? 40 : 80);
            rg_requests_end(RG_PROCESS, 0, false);
        }
    done();
}

/*
 * Copies that are waited for by themselves, of any size, in front of requests and behind them, are no kinds for which others are forgotten; nor do results
 * tell the kind of the next request, or one whose end the agent has found.
 */
static void copies_take_no_place(void)
{
    enum { INPUT = 3, BACK = 7, KINDS = 20 };
    become_high_without_agent();
    const rg_share *share = rg_share_of(seg, 0, rg.slot_index);
    uint64_t drawn = 1;
    for (uint64_t request = 0; request < 400; request++) {
        uint64_t kind = (drawn = drawn * 6364136223846793005u + 1442695040888963407u) >> 60;
        rg_requests_begin(RG_PROCESS, 0, kind << 16 | 1, rg_now_ns());
        CHECK(request < 200 || share->usual_launches == 20 + 20 * kind);
        atomic_fetch_add(&rg.slot->launches[0], 20 + 20 * kind);
        rg_requests_end(RG_PROCESS, 0, false);
        need_of(kind << 8 | BACK, 0, true);
    }
    for (uint64_t request = 0; request < 400; request++) {
        uint64_t kind = 32 + ((drawn = drawn * 6364136223846793005u + 1442695040888963407u) >> 62);
        rg_requests_begin(RG_PROCESS, 0, kind << 16 | INPUT, rg_now_ns());
        CHECK(request < 200 || share->usual_launches == 20 + 20 * kind);
        atomic_fetch_add(&rg.slot->launches[0], 20 + 20 * kind);
        rg_requests_end(RG_PROCESS, 0, false);
        rg_requests_begin(RG_PROCESS, 0, kind << 8 | BACK, rg_now_ns());
        rg_requests_skip(RG_PROCESS, 0, rg_now_ns());
    }
    for (uint64_t round = 0; round < 6; round++)
        for (uint64_t kind = 0; kind < KINDS; kind++) {
            need_of(kind << 8 | INPUT, 0, true);
            rg_requests_begin(RG_PROCESS, 0, kind << 16 | 1, rg_now_ns());
            CHECK(round < 3 || (share->usual_launches == 20 + 20 * kind && rg_policy_regular(share->usual_launches, share->usual_votes)));
            atomic_fetch_add(&rg.slot->launches[0], 20 + 20 * kind);
            rg_requests_end(RG_PROCESS, 0, false);
            need_of((kind + 100 + round) << 24 | BACK, 0, true);
        }
    done();
}

/* That requests launch no more than usual is known of each kind; it begins as unknown, whatever others do. */
static void a_kind_that_launches_no_more(void)
{
    enum { ONE = 1, OTHER_KIND = 9, THIRD = 17, RESULT = 31 };
    become_high_without_agent();
    const rg_share *share = rg_share_of(seg, 0, rg.slot_index);
#define ALIKE(kind, made) (need_of(kind, made, false), share->alike)
    for (int round = 0; round < 20; round++) {
        CHECK_EQUAL(ALIKE(ONE, 20), round >= RG_POLICY_ALIKE);
        CHECK_EQUAL(ALIKE(OTHER_KIND, 60 + (uint32_t)round % 2), 0);
        need_of(RESULT, 0, true);
    }
    /* As it begins the share tells of it. */
    rg_requests_begin(RG_PROCESS, 0, ONE, rg_now_ns());
    CHECK_EQUAL(share->alike, 1);
    atomic_fetch_add(&rg.slot->launches[0], 20);
    rg_requests_end(RG_PROCESS, 0, false);
    for (int round = 0; round <= RG_POLICY_ALIKE; round++)
        CHECK_EQUAL(ALIKE(THIRD, 20), round == RG_POLICY_ALIKE);
    /* One goes on: that one's kind is not taken for alike until 64 more were. */
    CHECK_EQUAL(ALIKE(ONE, 21), 0);
    CHECK_EQUAL(ALIKE(THIRD, 20), 1);
    for (int round = 0; round < 66; round++)
        CHECK_EQUAL(ALIKE(ONE, 21), round >= 63);
    rg_requests_forget(RG_PROCESS, 0);
    CHECK_EQUAL(share->alike, 0);
    done();
}

/* One that goes on tells of its kind though nobody waits for it, and of no other's where others launch something after requests that nobody waits for. */
static void a_kind_that_goes_on(void)
{
    enum { ONE = 1, OTHER_KIND = 9, THIRD = 17, INPUT = 27, LEAST = 8 };
    become_high_without_agent();
    const rg_share *share = rg_share_of(seg, 0, rg.slot_index);
    /* Nothing, as often as not, and no kind at all. */
    for (int request = 0; request < 20; request++)
        CHECK_EQUAL(ALIKE(0, 0), 0);
    for (int request = 0; request <= LEAST; request++)
        CHECK_EQUAL(ALIKE(0, 20), request == LEAST);
    rg_requests_begin(RG_PROCESS, 0, ONE, rg_now_ns());
    CHECK_EQUAL(share->alike, 0);
    atomic_fetch_add(&rg.slot->launches[0], 20);
    rg_requests_end(RG_PROCESS, 0, false);
    while (!ALIKE(ONE, 20))
        ;
    rg_requests_begin(RG_PROCESS, 0, ONE, rg_now_ns());
    atomic_fetch_add(&rg.slot->launches[0], 21);
    rg_requests_skip(RG_PROCESS, 0, rg_now_ns());
    CHECK_EQUAL(share->alike, 0);
    for (int request = 0; request < 64; request++)
        CHECK_EQUAL(ALIKE(ONE, 20), request == 63);
    for (int request = 0; request <= LEAST; request++)
        CHECK_EQUAL(ALIKE(OTHER_KIND, 60), request == LEAST);
    for (int round = 0; round < 20; round++) {
        CHECK_EQUAL(ALIKE(ONE, 20), 1);
        /* Before the next one, which is another. */
        rg_requests_begin(RG_PROCESS, 0, ONE, rg_now_ns());
        atomic_fetch_add(&rg.slot->launches[0], 1);
        rg_requests_skip(RG_PROCESS, 0, rg_now_ns());
        rg_requests_begin(RG_PROCESS, 0, OTHER_KIND, rg_now_ns());
        CHECK_EQUAL(share->usual_launches, 60);
        atomic_fetch_add(&rg.slot->launches[0], 59);
        rg_requests_end(RG_PROCESS, 0, false);
        CHECK_EQUAL(share->alike, 1);
    }
    /* What stands still for a moment early on is of the same kind, whatever it launches then. */
    rg_requests_begin(RG_PROCESS, 0, ONE, rg_now_ns());
    atomic_fetch_add(&rg.slot->launches[0], 1);
    rg_requests_skip(RG_PROCESS, 0, rg_now_ns());
    rg_requests_begin(RG_PROCESS, 0, THIRD, rg_now_ns());
    CHECK(share->usual_launches == 20 && share->alike);
    atomic_fetch_add(&rg.slot->launches[0], 19);
    rg_requests_end(RG_PROCESS, 0, false);
    CHECK_EQUAL(share->alike, 1);
    /* So is what an input has come for, though others begin as that launches. */
    for (int request = 0; request <= LEAST; request++)
        CHECK_EQUAL(ALIKE(INPUT, 40), request == LEAST);
    ALIKE(ONE, 20);
    rg_requests_begin(RG_PROCESS, 0, INPUT, rg_now_ns());
    rg_requests_skip(RG_PROCESS, 0, rg_now_ns());
    rg_requests_begin(RG_PROCESS, 0, ONE, rg_now_ns());
    CHECK(share->usual_launches == 40 && share->alike);
    rg_requests_end(RG_PROCESS, 0, false);
    done();
}

/* Who was best-effort meanwhile begins anew. */
static void kinds_are_forgotten(void)
{
    enum { ONE = 1, OTHER_KIND = 3 };
    become_high_without_agent();
    seg->settings.need_us = 1000;
    const rg_share *share = rg_share_of(seg, 0, rg.slot_index);
    for (int round = 0; round < 100; round++) {
        need_of(ONE, 20, false);
        need_of(OTHER_KIND, 60, round % 2);
    }
    CHECK(share->need_part > RG_POLICY_ONE);
    rg_requests_forget(RG_PROCESS, 0);
    CHECK(!share->usual_launches && !share->usual_votes && !share->need_part);
    rg_requests_begin(RG_PROCESS, 0, OTHER_KIND, rg_now_ns());
    CHECK(!share->usual_launches && share->need_part == RG_POLICY_ONE);
    rg_requests_end(RG_PROCESS, 0, false);
    done();
}

/* Where there are more kinds than are kept, the one that was longest ago is forgotten: not the one that has been the only one for long. */
static void the_kind_of_longest_ago_goes(void)
{
    enum { KEPT = 32, ONE = 1, OTHERS = 101 };
    become_high_without_agent();
    const rg_share *share = rg_share_of(seg, 0, rg.slot_index);
    for (uint64_t kind = 0; kind < KEPT - 1; kind++)
        need_of(OTHERS + kind, 20, false);
    for (int request = 0; request < 10; request++)
        need_of(ONE, 40, false);
    for (uint64_t kind = 0; kind < KEPT - 1; kind++)
        need_of(OTHERS + KEPT + kind, 20, false);
    need_of(ONE, 40, false);
    CHECK_EQUAL(share->usual_launches, 40);
    CHECK(rg_policy_regular(40, share->usual_votes));
    for (uint64_t kind = 0; kind < KEPT; kind++)
        need_of(OTHERS + kind, 20, false);
    rg_requests_begin(RG_PROCESS, 0, ONE, rg_now_ns());
    CHECK_EQUAL(share->usual_launches, 20);
    done();
}

/* Once as many wait of kinds as of others each needs what it is said to. */
static void kinds_that_wait_alike_need_the_same(void)
{
    enum { ONE = 1, OFTEN = 3 };
    become_high_without_agent();
    seg->settings.need_us = 1000;
    uint32_t one = 0, often = 0;
    for (int round = 0; round < 100; round++) {
        need_of(ONE, 20, false);
        need_of(OFTEN, 20, round % 2);
    }
    for (int round = 0; round < 5000; round++) {
        one = need_of(ONE, 20, false);
        often = need_of(OFTEN, 20, false);
    }
    CHECK(one > RG_POLICY_ONE - RG_POLICY_ONE / 64 && often < RG_POLICY_ONE + RG_POLICY_ONE / 64);
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

/* Who looks in vain takes nothing from who waits, or will: for an event that is recorded, or in another thread. */
static void a_look_in_vain_changes_nothing(void)
{
    become_high_without_agent();
    CUstream s;
    CHECK_EQUAL(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuEventCreate(&awaited, CU_EVENT_DISABLE_TIMING), CUDA_SUCCESS);
    for (int how = 0; how < 2; how++) {
        pthread_t thread;
        CHECK_EQUAL(rg_real.rigelSimSuspend(0, 1), 0); /* nothing is done before it is resumed */
        launch(spin, s, 1000);
        CHECK_EQUAL(cuEventRecord(awaited, s), CUDA_SUCCESS);
        const rg_track *t = rg_track_find(rg_track_key(s));
        if (how == 1) {
            CHECK_EQUAL(pthread_create(&thread, NULL, wait_for_event, current()), 0);
            WAIT_FOR((atomic_load(&t->state) & 3) == RG_TOKEN_WAIT);
        }
        CHECK_EQUAL(cuStreamQuery(s), CUDA_ERROR_NOT_READY);
        CHECK_EQUAL(rg_real.rigelSimSuspend(0, 0), 0);
        if (how == 0)
            CHECK_EQUAL(cuEventSynchronize(awaited), CUDA_SUCCESS);
        else
            CHECK_EQUAL(pthread_join(thread, NULL), 0);
        idle_after("cuEventSynchronize after a look", (uint64_t)how + 1);
    }
    done();
}

static CUstream in_turn[2];
static void *wait_in_turn(void *context)
{
    CHECK_EQUAL(cu.cuCtxSetCurrent((CUcontext)context), CUDA_SUCCESS);
    for (int i = 0; i < 2; i++)
        CHECK_EQUAL(cuStreamSynchronize(in_turn[i]), CUDA_SUCCESS);
    return NULL;
}

/* Whether a thread is in the driver, waiting for the stream. */
static bool is_waited_for(CUstream s)
{
    for (int i = 0; i < RG_MAX_THREADS; i++) {
        rg_thread *row = &seg->threads[rg.slot_index * RG_MAX_THREADS + i];
        if (atomic_load(&row->doing) == (RG_OP_cuStreamSynchronize | RG_DOING) && atomic_load(&row->object) == (uintptr_t)s)
            return true;
    }
    return false;
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
    pthread_t thread;
    CHECK_EQUAL(rg_real.rigelSimSuspend(0, 1), 0);
    launch(spin, a, 1000);
    launch(spin, b, 1000);
    in_turn[0] = a;
    in_turn[1] = b;
    CHECK_EQUAL(pthread_create(&thread, NULL, wait_in_turn, current()), 0);
    WAIT_FOR(is_waited_for(a));
    usleep(20000);
    CHECK_EQUAL(rg_real.rigelSimSuspend(0, 0), 0);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    idle_after("both streams again", 2);
    CHECK(waited_ns(1) >= SLOW_NS);
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

static CUresult copy_at_once(void *host, CUdeviceptr p, size_t n, CUstream s)
{
    (void)host, (void)p, (void)n, (void)s;
    return CUDA_SUCCESS;
}

/* What another thread does while one waits takes nothing from its wait: neither an event, nor a copy that ends first. */
static void who_waits_goes_on_waiting(void)
{
    become_high_without_agent();
    CUstream a, b;
    CUevent e;
    char host[64];
    CHECK_EQUAL(cuStreamCreate(&a, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamCreate(&b, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuEventCreate(&e, CU_EVENT_DISABLE_TIMING), CUDA_SUCCESS);
    rg_real.hooked[RG_HOOK_cuMemcpyDtoHAsync_v2] = (void *)copy_at_once;
    for (int copies = 0; copies < 2; copies++) {
        pthread_t thread;
        CHECK_EQUAL(rg_real.rigelSimSuspend(0, 1), 0);
        launch(spin, a, 1000);
        if (copies)
            launch(spin, b, 1000);
        in_turn[0] = a;
        in_turn[1] = b;
        CHECK_EQUAL(pthread_create(&thread, NULL, wait_in_turn, current()), 0);
        WAIT_FOR(is_waited_for(a));
        if (copies)
            CHECK_EQUAL(cuMemcpyDtoHAsync_v2(host, 1, sizeof host, b), CUDA_SUCCESS);
        else
            CHECK_EQUAL(cuEventRecord(e, a), CUDA_SUCCESS);
        CHECK_EQUAL(RG_PROCESS->period[0].draining, RG_DRAINING);
        CHECK_EQUAL(rg_real.rigelSimSuspend(0, 0), 0);
        CHECK_EQUAL(pthread_join(thread, NULL), 0);
        if (copies)
            CHECK_EQUAL(cuStreamSynchronize(b), CUDA_SUCCESS);
        idle_after("a wait beside another thread", (uint64_t)copies + 1);
    }
    done();
}

static void the_agent_finds_what_nobody_waits_for(void)
{
    become("high");
    launch(spin, NULL, 1000);
    launch(spin, CU_STREAM_PER_THREAD, 1000);
    CHECK_EQUAL(busy_word(), 1);
    agent_ends_periods(true);
    WAIT_FOR(busy_word() == 0);
    WAIT_FOR(rg.slot->agent_idle == 1);
    CHECK_EQUAL(rg.slot->requests, 1);
    done();
}

static void the_agent_compares_the_clocks_and_has_launches_look_again(void)
{
    become("high");
    if (rg_processor_ticks())
        WAIT_FOR(rg_clock.rate);
    uint64_t before = rg_rec.epoch / RG_EPOCH;
    WAIT_FOR(rg_rec.epoch / RG_EPOCH > before + 1); /* though nothing is called */
    done();
}

/* A program that waits for its work and pauses once is not looked at so closely that each of its pauses is an end. */
static void the_agent_looks_often_after_those_that_never_wait(void)
{
    enum { MS = 1000000 };
    rg_client slot = {.requests = 0};
    rg_member m = {.slot = &slot};
    uint64_t now = 5000ull * MS;
    CHECK(!rg_agent_looks_often(&m, now));
    atomic_store(&slot.requests, 60); /* the agent found all of these */
    atomic_store(&slot.agent_idle, 60);
    CHECK(!rg_agent_looks_often(&m, now + 999 * MS));
    CHECK(rg_agent_looks_often(&m, now += 1000 * MS));
    atomic_store(&slot.requests, 120); /* all but one */
    atomic_store(&slot.agent_idle, 119);
    CHECK(rg_agent_looks_often(&m, now + 999 * MS));
    CHECK(rg_agent_looks_often(&m, now += 1000 * MS));
    atomic_store(&slot.requests, 129); /* eight, beside one of its own */
    atomic_store(&slot.agent_idle, 127);
    CHECK(!rg_agent_looks_often(&m, now += 1000 * MS));
    atomic_store(&slot.requests, 139); /* nine */
    atomic_store(&slot.agent_idle, 136);
    CHECK(rg_agent_looks_often(&m, now += 1000 * MS));
    atomic_store(&slot.requests, 299); /* it waits now, and pauses more often than that */
    atomic_store(&slot.agent_idle, 236);
    CHECK(!rg_agent_looks_often(&m, now += 1000 * MS));
    atomic_store(&slot.requests, 360); /* and once */
    atomic_store(&slot.agent_idle, 237);
    CHECK(!rg_agent_looks_often(&m, now += 100 * MS));
    CHECK(!rg_agent_looks_often(&m, now += 900 * MS));
    CHECK(!rg_agent_looks_often(&m, now += 5000ull * MS)); /* nothing has ended */
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
    agent_ends_periods(true);
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

/* What the agent asks of the driver, from before there is one: which streams it records on, and what it leaves. */
static rg_driver plain;
static _Atomic uint32_t agent_records, agent_events, agent_pushes, agent_pops;
static _Atomic(CUstream) agent_stream; /* that of its last event */
static CUresult note_record(CUevent e, CUstream s)
{
    if (rg_agent_is_self()) {
        atomic_store(&agent_stream, s);
        atomic_fetch_add(&agent_records, 1);
    }
    return ((__typeof__(&cuEventRecord))plain.hooked[RG_HOOK_cuEventRecord])(e, s);
}

static CUresult note_create(CUevent *e, unsigned flags)
{
    atomic_fetch_add(&agent_events, rg_agent_is_self());
    return ((__typeof__(&cuEventCreate))plain.hooked[RG_HOOK_cuEventCreate])(e, flags);
}

static CUresult note_push(CUcontext c)
{
    atomic_fetch_add(&agent_pushes, rg_agent_is_self());
    return plain.cuCtxPushCurrent_v2(c);
}

static CUresult note_pop(CUcontext *c)
{
    atomic_fetch_add(&agent_pops, rg_agent_is_self());
    return plain.cuCtxPopCurrent_v2(c);
}

static void become_high_with_its_agent_watched(void)
{
    prepare_waiting_client("gate", "high");
    CHECK(rg_real_ready());
    plain = rg_real;
    rg_real.hooked[RG_HOOK_cuEventRecord] = (void *)note_record;
    rg_real.hooked[RG_HOOK_cuEventCreate] = (void *)note_create;
    rg_real.cuCtxPushCurrent_v2 = note_push;
    rg_real.cuCtxPopCurrent_v2 = note_pop;
    seg->settings.quiet_us = NEVER_QUIET_US;
    attach_client();
    load_kernels(ptx);
}

/* It has one event for a stream, and as many contexts current as before. */
static void the_agent_leaves_nothing_behind(void)
{
    enum { PERIODS = 10 };
    become_high_with_its_agent_watched();
    agent_ends_periods(true);
    for (int i = 0; i < PERIODS; i++) {
        launch(spin, NULL, 1000);
        WAIT_FOR(busy_word() == 0);
    }
    agent_ends_periods(false);
    CHECK(agent_records >= PERIODS);
    CHECK_EQUAL(agent_events, 1);
    CHECK(agent_pushes >= PERIODS);
    CHECK_EQUAL(agent_pops, agent_pushes);
    done();
}

/* It looks at no stream during a capture, at none that has nothing unfinished, and once at what is. */
static void the_agent_looks_at_what_is_unfinished_only(void)
{
    become_high_with_its_agent_watched();
    CUstream s, other;
    CUgraph graph;
    CHECK_EQUAL(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    launch(spin, other, 1000);
    CHECK_EQUAL(cuStreamSynchronize(other), CUDA_SUCCESS);
    CHECK_EQUAL(rg_real.rigelSimSuspend(0, 1), 0); /* nothing is done before it is resumed */
    launch(spin, s, 1000);
    CHECK_EQUAL(cuStreamBeginCapture_v2(other, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    agent_ends_periods(true);
    beats(2);
    CHECK_EQUAL(agent_records, 0);
    CHECK_EQUAL(cuStreamEndCapture(other, &graph), CUDA_SUCCESS);
    const rg_track *t = rg_track_find(rg_track_key(s));
    CHECK(t != NULL);
    WAIT_FOR(agent_looks_at(t));
    beats(2);
    CHECK_EQUAL(agent_records, 1);
    CHECK(atomic_load(&agent_stream) == s);
    CHECK_EQUAL(busy_word(), 1);
    CHECK_EQUAL(rg_real.rigelSimSuspend(0, 0), 0);
    WAIT_FOR(busy_word() == 0);
    done();
}

/* Launches until the next one would go by rg_again; a beat of the agent's may come between. How many that took. */
static int launch_until_again(CUstream s)
{
    int n = 0;
    if (!rg_rec.processor)
        rg_rec.processor = true; /* whatever time this host's kernel keeps */
    do
        launch(spin, s, 1000);
    while (++n < 10 && !rg_is_again(rg_rec.epoch, s));
    CHECK(n < 10);
    return n;
}

/* Nor does it look before nothing was launched for as long as was said. */
static void the_agent_leaves_alone_what_has_just_been_launched(void)
{
    become_high_with_its_agent_watched();
    seg->settings.quiet_us = 5000000;
    beats(1);
    launch(spin, NULL, 1000);
    beats(3);
    CHECK_EQUAL(agent_records, 0);
    CHECK_EQUAL(busy_word(), 1);
    done();
}

/* Others may have taken a busy client for dead, that was only stopped: it says again that it is busy, and launches. */
static void who_was_taken_for_dead_says_that_it_lives(void)
{
    become("high");
    rg_device *dev = &seg->devices[0];
    launch(spin, NULL, 1000);
    rg_segment_clear_busy(seg, rg.slot_index);
    WAIT_FOR(busy_word() == 1);
    WAIT_FOR(atomic_load(&dev->high_launching) == 1);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    beats(2);
    CHECK_EQUAL(busy_word(), 0);
    done();
}

/* A thread that goes on launching marks its stream again once the agent has looked at it: what it launches then is not covered. */
static void what_follows_on_the_agents_look_is_seen(void)
{
    become_high_with_its_agent_watched();
    CUstream s;
    CHECK_EQUAL(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CHECK_EQUAL(rg_real.rigelSimSuspend(0, 1), 0);
    for (int i = 0; i < 5; i++) {
        launch_until_again(s);
        agent_ends_periods(true);
        const rg_track *t = rg_track_find(rg_track_key(s));
        WAIT_FOR(agent_looks_at(t));
        uint64_t token = atomic_load(&t->state);
        launch(spin, s, 1000);
        CHECK(atomic_load(&t->state) != token);
        agent_ends_periods(false);
    }
    CHECK_EQUAL(rg_real.rigelSimSuspend(0, 0), 0);
    CHECK_EQUAL(cuStreamSynchronize(s), CUDA_SUCCESS);
    done();
}

static void *per_thread_launch(void *context)
{
    CUmodule module;
    CUfunction own_spin;
    CHECK_EQUAL(cu.cuCtxSetCurrent(context), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuModuleLoadData(&module, ptx), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuModuleGetFunction(&own_spin, module, "rigel_spin"), CUDA_SUCCESS);
    CUdevice device;
    CHECK_EQUAL(rg_real.cuCtxGetDevice(&device), CUDA_SUCCESS);
    uint64_t ended = rg.slot->agent_idle;
    agent_ends_periods(false);
    CHECK_EQUAL(rg_real.rigelSimSuspend((unsigned)device, 1), 0);
    launch(own_spin, CU_STREAM_PER_THREAD, 1000);
    agent_ends_periods(true);
    const rg_track *t = rg_track_find(rg_track_key(CU_STREAM_PER_THREAD));
    WAIT_FOR(agent_looks_at(t));
    usleep(20000); /* time for the agent to do wrong in */
    CHECK_EQUAL(rg.slot->agent_idle, ended); /* it asks for this one's end */
    CHECK_EQUAL(rg_real.rigelSimSuspend((unsigned)device, 0), 0);
    WAIT_FOR(rg.slot->agent_idle == ended + 1);
    return NULL;
}

/* Who ends a context may take long about it, with the lock; the client is as alive as ever. */
static void the_agent_goes_on_beside_who_ends_a_context(void)
{
    become("high");
    pthread_mutex_lock(&rg_agent_lock);
    launch(spin, NULL, 1000);
    agent_ends_periods(true);
    atomic_store(&rg.set_priorities, false); /* it wants to set them anew, besides */
    beats(3);
    CHECK_EQUAL(busy_word(), 1);
    pthread_mutex_unlock(&rg_agent_lock);
    WAIT_FOR(busy_word() == 0);
    done();
}

/* The stream of a thread that ended leaves its place to one of another context, where the event of the first is of no use. */
static void the_agent_waits_in_the_right_context(void)
{
    setenv("RIGEL_SIM_DEVICES", "2", 1);
    become("high");
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

static rg_track *with_event(CUstream s, CUcontext of)
{
    static char event;
    rg_track *t = rg_track_find(rg_track_key(s));
    CHECK(t != NULL);
    t->agent_event = (CUevent)(void *)&event; /* which nobody uses */
    t->agent_context = of;
    return t;
}

/* With a context go the agent's events in it, wherever their places have come to since; where it is not known whose they are, they may be. */
static void a_context_takes_the_agents_events_with_it(void)
{
    setenv("RIGEL_SIM_DEVICES", "2", 1);
    become_high_without_agent();
    CUcontext first = current(), own, second;
    CUstream s, others;
    CHECK_EQUAL(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    launch(spin, NULL, 1000);
    launch(spin, s, 1000);
    rg_track *here = with_event(NULL, first);
    CHECK_EQUAL(cu.cuCtxCreate_v2(&own, 0, 0), CUDA_SUCCESS);
    load_kernels(ptx);
    launch(spin, NULL, 1000);
    rg_track *its = with_event(NULL, own), *was_its = with_event(s, own);
    CHECK_EQUAL(cuCtxDestroy_v2(own), CUDA_SUCCESS);
    CHECK(here->agent_event && !its->agent_event && !was_its->agent_event);
    CHECK_EQUAL(cu.cuDevicePrimaryCtxRetain(&second, 1), CUDA_SUCCESS);
    CHECK_EQUAL(cuCtxSetCurrent(second), CUDA_SUCCESS);
    load_kernels(ptx);
    CHECK_EQUAL(cuStreamCreate(&others, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    launch(spin, NULL, 1000);
    launch(spin, others, 1000);
    rg_track *there = with_event(NULL, second), *perhaps_its = with_event(others, own);
    CHECK_EQUAL(cuDevicePrimaryCtxReset_v2(0), CUDA_SUCCESS);
    CHECK(there->agent_event && !here->agent_event && !perhaps_its->agent_event);
    done();
    _exit(0); /* no such events */
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

/* A copy to another device is work like any other, though it never waits. */
static void copies_to_another_device_are_work(void)
{
    enum { BYTES = 1 << 17 };
    setenv("RIGEL_SIM_DEVICES", "2", 1);
    become_high_without_agent();
    CUdeviceptr here, there;
    CUcontext first = current(), second;
    CHECK_EQUAL(cu.cuMemAlloc_v2(&here, BYTES), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuDevicePrimaryCtxRetain(&second, 1), CUDA_SUCCESS);
    CHECK_EQUAL(cuCtxSetCurrent(second), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuMemAlloc_v2(&there, BYTES), CUDA_SUCCESS);
    CHECK_EQUAL(cuCtxSetCurrent(first), CUDA_SUCCESS);
    CHECK_EQUAL(cuMemcpyPeerAsync(there, second, here, first, BYTES, NULL), CUDA_SUCCESS);
    CHECK_EQUAL(busy_word(), 1);
    CHECK_EQUAL(rg.slot->copies, 1);
    CHECK_EQUAL(cuStreamSynchronize(NULL), CUDA_SUCCESS);
    CHECK_EQUAL(busy_word(), 0);
    done();
}

static _Atomic bool agent_too; /* which may find all done before a launch reaches the driver */
static void *hammer(void *context)
{
    CUstream s;
    CHECK_EQUAL(cu.cuCtxSetCurrent((CUcontext)context), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    for (int i = 0; i < 300; i++) {
        for (int j = 0; j < 3; j++)
            launch(spin, s, 500);
        CHECK(busy_word() == 1 || atomic_load(&agent_too));
        CHECK_EQUAL(cuStreamSynchronize(s), CUDA_SUCCESS);
    }
    CHECK_EQUAL(cuStreamDestroy_v2(s), CUDA_SUCCESS);
    return NULL;
}

/* Threads that launch and wait each on a stream of its own: while any has work the client is busy, at the end it is not. */
static void threads_keep_the_client_busy(void)
{
    become("high");
    for (int round = 1; round <= 2; round++) {
        pthread_t threads[4];
        for (int i = 0; i < 4; i++)
            CHECK_EQUAL(pthread_create(&threads[i], NULL, hammer, current()), 0);
        for (int i = 0; i < 4; i++)
            CHECK_EQUAL(pthread_join(threads[i], NULL), 0);
        CHECK_EQUAL(busy_word(), 0);
        CHECK_EQUAL(rg_launches(rg.slot), round * 4 * 300 * 3);
        CHECK(rg.slot->requests >= 1);
        CHECK(rg.slot->requests <= 4 * 300 || round == 2);
        atomic_store(&agent_too, true);
        agent_ends_periods(true);
    }
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

/* The launch path looks at one place of the index only, which every stream but the first shares with that one here. */
static void streams_keep_their_tracks_where_they_share_a_place(void)
{
    enum { STREAMS = 100 };
    become_high_without_agent();
    CUstream s[STREAMS];
    rg_track *of[STREAMS];
    for (int i = 0; i < STREAMS; i++) {
        CHECK_EQUAL(cuStreamCreate(&s[i], CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
        uint32_t place = rg_track_hash(rg_track_key(s[i]));
        if (i && !rg.index[place])
            rg.index[place] = (uint8_t)(of[0] - rg.tracks + 1);
        of[i] = rg_track_of(s[i]);
        CHECK(of[i] && of[i]->stream == s[i]);
        CHECK(i == 0 || rg.index[place] != of[i] - rg.tracks + 1);
    }
    uint32_t tracks = rg.track_count;
    for (int i = 0; i < STREAMS; i++)
        CHECK(rg_track_of(s[i]) == of[i]);
    rg.full = 1; /* as where a stream found no room: those that are known stay so */
    for (int i = 0; i < STREAMS; i++)
        CHECK(rg_track_of(s[i]) == of[i]);
    CHECK_EQUAL(rg.track_count, tracks);
    done();
}

static uint64_t cuLaunchKernel_calls(void)
{
    rg_calls_add();
    return seg->calls[0].count[RG_OP_cuLaunchKernel];
}

static void a_launch_like_the_one_before_is_counted_and_recorded(void)
{
    become_high_without_agent();
    CUstream s;
    CHECK_EQUAL(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    for (int turn = 0; turn < 2; turn++) {
        CUstream stream = turn ? NULL : s;
        launch_until_again(stream);
        uint64_t launches = rg_launches(rg.slot), queued = rg_this.row->launches;
        uint64_t calls = cuLaunchKernel_calls();
        uint64_t number = rg_this.left ? rg_this.record : rg.slot->records;
        launch(spin, stream, 1000);
        CHECK_EQUAL(rg_launches(rg.slot), launches + 1);
        CHECK_EQUAL(cuLaunchKernel_calls(), calls + 1); /* whoever adds them up finds those as well */
        CHECK_EQUAL(rg_this.row->launches, queued + 1);
        CHECK_EQUAL(rg_this.row->doing, RG_OP_cuLaunchKernel);
        const rg_track *t = rg_track_find(rg_track_key(stream));
        const _Atomic uint64_t *word = &seg->traces[0].records[number % RG_TRACE_RECORDS * RG_RECORD_WORDS];
        uint64_t what = RG_OP_cuLaunchKernel | RG_TRACE_launch << 10 | (uint64_t)gettid() << 16 | (uint64_t)(t - rg.tracks + 1) << 38;
        CHECK_EQUAL(word[1] & RG_RECORD_MASK, what);
        CHECK_EQUAL(word[2] & RG_RECORD_MASK, rg_this.row->kernel);
        CHECK(strcmp(seg->names[rg_this.row->kernel - 1].name, "rigel_spin") == 0);
    }
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    idle_after("cuCtxSynchronize", 1);
    CHECK(!rg_this.uncounted && !rg_this.calls->from);
    CHECK_EQUAL(rg_this.calls->count[RG_OP_cuLaunchKernel], rg_launches(rg.slot));
    /* Launches share a reading of the clock; where a copy, a wait or a beat came between they do not. */
    CUdeviceptr p;
    char host[64] = "";
    CHECK_EQUAL(cu.cuMemAlloc_v2(&p, sizeof host), CUDA_SUCCESS);
    int shared = 0;
    for (int i = 0; i < 10000 && shared < 10; i++) {
        bool again = rg_is_again(rg_rec.epoch, s);
        uint64_t before = rg_this.row->since_tick, from = rg_tick();
        launch(spin, s, 1000);
        shared += again && rg_this.row->since_tick == before;
        CHECK(rg_this.row->since_tick >= before && (again || rg_this.row->since_tick >= from));
    }
    CHECK_EQUAL(shared, 10);
    launch_until_again(s);
    uint64_t from = rg_tick();
    CHECK_EQUAL(cuMemcpyHtoDAsync_v2(p, host, sizeof host, s), CUDA_SUCCESS);
    CHECK(rg_this.row->since_tick >= from);
    from = rg_tick();
    launch(spin, s, 1000);
    CHECK(rg_this.row->since_tick >= from);
    /* A memset is no reason to look again, nor is it counted among the kernels. */
    do {
        launch_until_again(s);
        launch(spin, s, 1000);
    } while (!rg_is_again(rg_rec.epoch, s) || !rg_this.uncounted);
    uint64_t memsets = rg.slot->memsets, kernels = rg_launches(rg.slot);
    uint64_t number = rg_this.left ? rg_this.record : rg.slot->records;
    uint32_t track = rg_this.row->track;
    atomic_store(&rg_this.row->track, 0); /* whoever looks at everything puts it right */
    from = rg_tick();
    CHECK_EQUAL(cuMemsetD32Async(p, 0, sizeof host / 4, s), CUDA_SUCCESS);
    CHECK_EQUAL(rg_this.row->track, 0);
    atomic_store(&rg_this.row->track, track);
    CHECK_EQUAL(rg.slot->memsets, memsets + 1);
    CHECK_EQUAL(rg_launches(rg.slot), kernels);
    CHECK_EQUAL(rg_this.row->doing, RG_OP_cuMemsetD32Async);
    CHECK_EQUAL(rg_this.row->before, RG_OP_cuLaunchKernel);
    CHECK(rg_this.row->since_tick >= from);
    const _Atomic uint64_t *word = &seg->traces[0].records[number % RG_TRACE_RECORDS * RG_RECORD_WORDS];
    CHECK_EQUAL(word[1] & 0xffff, RG_OP_cuMemsetD32Async | RG_TRACE_memset << 10);
    CHECK_EQUAL(word[2] & RG_RECORD_MASK, sizeof host);
    from = rg_tick();
    launch(spin, s, 1000);
    CHECK(rg_this.row->since_tick >= from);
    CHECK_EQUAL(rg_launches(rg.slot), kernels + 1);
    CHECK_EQUAL(rg_this.row->before, RG_OP_cuMemsetD32Async);
    /* A copy on another stream turns the thread's row there, and the next launch turns it back. */
    CUstream other;
    CHECK_EQUAL(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    launch_until_again(s);
    CHECK_EQUAL(cuMemcpyHtoDAsync_v2(p, host, sizeof host, other), CUDA_SUCCESS);
    CHECK_EQUAL(rg_this.row->stream, (uint64_t)(uintptr_t)other);
    launch(spin, s, 1000);
    CHECK_EQUAL(rg_this.row->stream, (uint64_t)(uintptr_t)s);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    CHECK_EQUAL(busy_word(), 0);
    /* Somebody's token that he has not told of yet: who finds by it that all is done tells. */
    launch_until_again(s);
    rg_track *t = rg_track_find(rg_track_key(s));
    atomic_store(&t->state, rg_token(RG_TOKEN_EVENT));
    WAIT_FOR(cuStreamQuery(s) == CUDA_SUCCESS);
    CHECK_EQUAL(busy_word(), 0);
    launch(spin, s, 1000);
    CHECK_EQUAL(busy_word(), 1);
    done();
}

static void *launch_there(void *context)
{
    CHECK_EQUAL(cu.cuCtxSetCurrent((CUcontext)context), CUDA_SUCCESS);
    launch_until_again(NULL);
    return NULL;
}

static pthread_barrier_t have_launched;
static void *launch_ten(void *context)
{
    CHECK_EQUAL(cu.cuCtxSetCurrent((CUcontext)context), CUDA_SUCCESS);
    for (int i = 0; i < 10; i++)
        launch(spin, NULL, 1000);
    pthread_barrier_wait(&have_launched);
    return NULL;
}

/* Each of the first threads that launch counts for itself, the others together; who ends leaves its place to the next. */
static void every_launch_is_counted_once(void)
{
    enum { THREADS = RG_LAUNCH_COUNTS + 1 };
    become_high_without_agent();
    for (int turn = 0; turn < 2; turn++) {
        uint64_t together = rg.slot->launches[0];
        pthread_t threads[THREADS];
        pthread_barrier_init(&have_launched, NULL, THREADS);
        for (int i = 0; i < THREADS; i++)
            CHECK_EQUAL(pthread_create(&threads[i], NULL, launch_ten, current()), 0);
        for (int i = 0; i < THREADS; i++)
            CHECK_EQUAL(pthread_join(threads[i], NULL), 0);
        CHECK_EQUAL(rg_launches(rg.slot), (turn + 1) * THREADS * 10);
        CHECK_EQUAL(rg.slot->launches[0] - together, (THREADS - (RG_LAUNCH_COUNTS - 1)) * 10);
    }
    done();
}

static void *launch_on(void *context)
{
    CHECK_EQUAL(cu.cuCtxSetCurrent((CUcontext)context), CUDA_SUCCESS);
    for (int part = 0; part < 2; part++) {
        for (int i = 0; i < 23; i++)
            launch(spin, NULL, 1000);
        CHECK(rg_this.uncounted);
        pthread_barrier_wait(&have_launched);
        pthread_barrier_wait(&have_launched);
    }
    return NULL;
}

/* Calls that a thread has yet to count are found by who adds them up, and are not counted once more. */
static void calls_of_threads_that_go_on_launching_are_counted(void)
{
    become_high_without_agent();
    launch_until_again(NULL);
    uint64_t before = rg_launches(rg.slot);
    pthread_t thread;
    pthread_barrier_init(&have_launched, NULL, 2);
    CHECK_EQUAL(pthread_create(&thread, NULL, launch_on, current()), 0);
    for (uint64_t part = 1; part <= 2; part++) {
        pthread_barrier_wait(&have_launched);
        CHECK_EQUAL(rg_launches(rg.slot), before + part * 23);
        CHECK_EQUAL(cuLaunchKernel_calls(), before + part * 23);
        pthread_barrier_wait(&have_launched);
    }
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    CHECK_EQUAL(cuLaunchKernel_calls(), before + 46);
    /* Two functions in turn are two operations. */
    uint64_t n = 1, ns = 1000;
    void *params[] = {&n, &ns};
    CUlaunchConfig config = {.gridDimX = 1, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 32, .blockDimY = 1, .blockDimZ = 1};
    launch_until_again(NULL);
    before = cuLaunchKernel_calls();
    for (int i = 0; i < 10; i++) {
        CHECK_EQUAL(cuLaunchKernelEx(&config, spin, params, NULL), CUDA_SUCCESS);
        CHECK(rg_this.uncounted);
        CHECK_EQUAL(rg_this.row->doing, RG_OP_cuLaunchKernelEx);
        launch(spin, NULL, 1000);
        CHECK_EQUAL(rg_this.row->doing, RG_OP_cuLaunchKernel);
    }
    CHECK_EQUAL(cuLaunchKernel_calls(), before + 10);
    CHECK_EQUAL(seg->calls[0].count[RG_OP_cuLaunchKernelEx], 10);
    while (!rg_this.uncounted)
        launch(spin, NULL, 1000);
    rigel_shutdown();
    CHECK_EQUAL(rg_launches(rg.slot), seg->calls[0].count[RG_OP_cuLaunchKernel] + 10);
    done();
}

/* What a launch takes for granted is looked at again once something of it has changed. */
static void a_launch_after_a_change_looks_again(void)
{
    become_high_without_agent();
    CUstream s, other;
    CUevent e;
    CUdeviceptr p;
    CUgraph graph;
    char host[64];
    CHECK_EQUAL(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuEventCreate(&e, CU_EVENT_DISABLE_TIMING), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuMemAlloc_v2(&p, sizeof host), CUDA_SUCCESS);
    for (int change = 0; change < 11; change++) {
        CUstream stream = change == 10 ? NULL : s;
        uint64_t requests = rg.slot->requests;
        launch_until_again(stream);
        switch (change) {
        case 0: CHECK_EQUAL(cuEventRecord(e, s), CUDA_SUCCESS); break;
        case 1: cuStreamQuery(s); break;
        case 2: CHECK_EQUAL(cuStreamSynchronize(s), CUDA_SUCCESS); break;
        case 3: CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS); break;
        case 4: CHECK_EQUAL(cuMemcpyDtoH_v2(host, p, sizeof host), CUDA_SUCCESS); break;
        case 5: launch(spin, other, 1000); break;
        case 6:
            CHECK_EQUAL(cuStreamBeginCapture_v2(other, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
            CHECK(!rg_is_again(rg_rec.epoch, s));
            CHECK_EQUAL(cuStreamEndCapture(other, &graph), CUDA_SUCCESS);
            break;
        case 7:
            CHECK_EQUAL(rigel_bypass_begin(), 0);
            CHECK(!rg_is_again(rg_rec.epoch, s));
            rigel_bypass_end();
            break;
        case 8: CHECK_EQUAL(cuStreamDestroy_v2(other), CUDA_SUCCESS); break;
        case 9: rg_changed(); break; /* as the agent says now and then */
        default: CHECK_EQUAL(cuCtxSetCurrent(current()), CUDA_SUCCESS); break;
        }
        CHECK(!rg_is_again(rg_rec.epoch, stream));
        launch(spin, stream, 1000);
        CHECK_EQUAL(busy_word(), 1);
        CHECK_EQUAL(rg_track_find(rg_track_key(stream))->state, RG_DIRTY);
        CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
        CHECK_EQUAL(busy_word(), 0);
        CHECK(rg.slot->requests > requests || change == 7);
    }
    /* What a thread knows is its own. */
    pthread_t thread;
    launch_until_again(NULL);
    CHECK_EQUAL(pthread_create(&thread, NULL, launch_there, current()), 0);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    CHECK_EQUAL(busy_word(), 0);
    done();
}

static CUresult (*real_launch)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **);
static enum { OVERTAKEN, REFUSED, OUTLASTS_A_BEAT } meanwhile;

/* While the driver is in a launch somebody waits for its stream, and finds all done; or it refuses the launch; or the agent looks at the
 * clock. */
static CUresult launch_meanwhile(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                                 unsigned shared, CUstream s, void **parameters, void **extra)
{
    if (meanwhile == REFUSED)
        return CUDA_ERROR_INVALID_VALUE;
    if (meanwhile == OUTLASTS_A_BEAT) {
        rg_trace_beat();
    } else {
        rg_wait_stream_end(s, rg_wait_stream_begin(s), true);
        CHECK_EQUAL(busy_word(), 0);
    }
    return real_launch(f, gx, gy, gz, bx, by, bz, shared, s, parameters, extra);
}

static void a_launch_that_is_overtaken_or_refused_is_seen(void)
{
    become_high_without_agent();
    CUstream s;
    CHECK_EQUAL(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    *(void **)&real_launch = rg_real.hooked[RG_HOOK_cuLaunchKernel];
    launch_until_again(s);
    rg_real.hooked[RG_HOOK_cuLaunchKernel] = (void *)launch_meanwhile;
    launch(spin, s, 1000);
    CHECK_EQUAL(busy_word(), 1);
    CHECK_EQUAL(rg_track_find(rg_track_key(s))->state, RG_DIRTY);
    rg_real.hooked[RG_HOOK_cuLaunchKernel] = (void *)real_launch;
    launch_until_again(s);
    while (!rg_this.left)
        launch(spin, s, 1000);
    meanwhile = REFUSED;
    rg_real.hooked[RG_HOOK_cuLaunchKernel] = (void *)launch_meanwhile;
    uint64_t number = rg_this.record;
    CHECK_EQUAL(cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, s, NULL, NULL), CUDA_ERROR_INVALID_VALUE);
    CHECK((seg->traces[0].records[number % RG_TRACE_RECORDS * RG_RECORD_WORDS + 1] & RG_RECORD_FAILED) != 0);
    CHECK_EQUAL(cuStreamSynchronize(s), CUDA_SUCCESS);
    CHECK_EQUAL(busy_word(), 0);
    done();
}

static void a_beat_tells_what_lasts_and_changes_nothing(void)
{
    become_high_without_agent();
    CUstream s;
    CHECK_EQUAL(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    *(void **)&real_launch = rg_real.hooked[RG_HOOK_cuLaunchKernel];
    meanwhile = OUTLASTS_A_BEAT;
    do
        launch_until_again(s);
    while (rg_this.left < 8);
    for (int lasts = 0; lasts < 2; lasts++) {
        uint64_t number = rg_this.record;
        if (lasts)
            rg_real.hooked[RG_HOOK_cuLaunchKernel] = (void *)launch_meanwhile;
        else
            rg_trace_beat(); /* before it: it is over by then */
        CHECK(rg_is_again(rg_rec.epoch, s));
        launch(spin, s, 1000);
        CHECK(rg_is_again(rg_rec.epoch, s));
        const _Atomic uint64_t *word = &seg->traces[0].records[number % RG_TRACE_RECORDS * RG_RECORD_WORDS];
        CHECK((word[3] & RG_RECORD_MASK) != 0 || !lasts);
        CHECK((word[3] & RG_RECORD_MASK) == 0 || lasts);
        CHECK_EQUAL(word[0] & RG_RECORD_MASK, rg_this.row->since_tick & RG_RECORD_MASK);
        /* The first launch after a beat has a time of its own, however the last one went. */
        uint64_t tick = rg_tick();
        launch(spin, s, 1000);
        CHECK(rg_this.row->since_tick >= tick || !lasts);
    }
    rg_real.hooked[RG_HOOK_cuLaunchKernel] = (void *)real_launch;
    /* Records that are turned off are looked at again by the next beat. */
    launch_until_again(s);
    atomic_store(rg_rec.on, 0);
    rg_trace_beat();
    CHECK(!rg_is_again(rg_rec.epoch, s));
    atomic_store(rg_rec.on, 1);
    rg_trace_beat();
    CHECK_EQUAL(cuStreamSynchronize(s), CUDA_SUCCESS);
    CHECK_EQUAL(busy_word(), 0);
    done();
}

static void what_a_launch_needs_is_together(void)
{
#define LINE(type, field) (offsetof(type, field) / 64)
    CHECK_EQUAL((uintptr_t)&rg % 4096, 0);
    CHECK_EQUAL(LINE(rg_client_state, several), 0);
    CHECK_EQUAL((uintptr_t)&rg_rec % 64, 0);
    CHECK_EQUAL(LINE(rg_recorder, ranges), 0);
    CHECK_EQUAL((uintptr_t)&rg_this % 64, 0);
    CHECK_EQUAL(LINE(rg_this_thread, untimed), 0);
    CHECK_EQUAL(LINE(rg_client_state, segment), 0);
    CHECK_EQUAL(LINE(rg_client_state, slot), 0);
    CHECK_EQUAL(LINE(rg_client_state, preemptible), 0);
    CHECK_EQUAL(offsetof(rg_client_state, tracks) / 4096, 0);
    CHECK_EQUAL(LINE(rg_member, inflight[7]), 0); /* all GPUs of most hosts */
    CHECK_EQUAL(LINE(rg_member, slot), 0);
    CHECK_EQUAL(LINE(rg_member, busy), 0);
    CHECK_EQUAL(sizeof(rg_period), 64);
    CHECK_EQUAL(offsetof(rg_member, period) % 64, 0);
    CHECK_EQUAL(LINE(rg_track, state), 0);
    CHECK_EQUAL(LINE(rg_track, unbatched), 0);
    CHECK_EQUAL(LINE(rg_track, device), 0);
    CHECK_EQUAL(LINE(rg_track, serial), 0);
    CHECK_EQUAL(LINE(rg_track, owner), 0);
    CHECK_EQUAL(LINE(rg_track, member), 0);
}

int main(int argc, char **argv)
{
    (void)argc;
    ensure_environment("LD_LIBRARY_PATH", in_build_folder("sim"), argv);
    int failures = 0;
    RUN(every_kind_of_wait_ends_a_request);
    RUN(a_wait_that_fails_ends_nothing);
    RUN(copies_to_pageable_memory_drain);
    RUN(the_agent_ends_what_a_copy_waited_for);
    RUN(a_copy_that_does_not_wait_is_work);
    RUN(another_clients_copy_drains_nobody);
    RUN(who_launches_beside_waits_is_seen);
    RUN(it_launches_before_others_find_it_busy);
    RUN(what_requests_launch_is_learned);
    RUN(each_kind_of_request_is_known);
    RUN(of_which_kind_each_was);
    RUN(many_kinds_that_launch_the_same_are_known);
    RUN(kinds_that_wait_need_more);
    RUN(kinds_that_wait_alone_need_no_more);
    RUN(how_long_each_kind_launches_is_known);
    RUN(what_a_kind_needs_is_said_at_once);
    RUN(a_wait_is_seen);
    what_a_request_begins_with();
    RUN(the_copy_before_tells_the_kind);
    RUN(copies_take_no_place);
    RUN(a_kind_that_launches_no_more);
    RUN(a_kind_that_goes_on);
    RUN(kinds_are_forgotten);
    RUN(the_kind_of_longest_ago_goes);
    RUN(kinds_that_wait_alike_need_the_same);
    RUN(a_look_in_vain_changes_nothing);
    RUN(a_wait_that_does_not_cover_everything_ends_nothing);
    RUN(who_waits_goes_on_waiting);
    RUN(the_agent_finds_what_nobody_waits_for);
    RUN(the_agent_compares_the_clocks_and_has_launches_look_again);
    RUN(the_agent_looks_often_after_those_that_never_wait);
    RUN(the_agent_leaves_it_to_who_waits_for_an_event);
    RUN(the_agent_leaves_nothing_behind);
    RUN(the_agent_looks_at_what_is_unfinished_only);
    RUN(the_agent_leaves_alone_what_has_just_been_launched);
    RUN(who_was_taken_for_dead_says_that_it_lives);
    RUN(what_follows_on_the_agents_look_is_seen);
    RUN(the_agent_goes_on_beside_who_ends_a_context);
    RUN(the_agent_waits_in_the_right_context);
    RUN(a_context_takes_the_agents_events_with_it);
    RUN(high_never_waits);
    RUN(copies_to_another_device_are_work);
    RUN(threads_keep_the_client_busy);
    RUN(priorities_follow_the_class);
    RUN(best_effort_priorities_are_the_lowest);
    RUN(streams_keep_their_tracks_where_they_share_a_place);
    RUN(a_launch_like_the_one_before_is_counted_and_recorded);
    RUN(every_launch_is_counted_once);
    RUN(calls_of_threads_that_go_on_launching_are_counted);
    RUN(a_launch_after_a_change_looks_again);
    RUN(a_launch_that_is_overtaken_or_refused_is_seen);
    RUN(a_beat_tells_what_lasts_and_changes_nothing);
    RUN(what_a_launch_needs_is_together);
    return failures ? 1 : 0;
}
