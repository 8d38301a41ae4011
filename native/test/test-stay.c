/*
 * test-stay.c: a high client with which the GPU stays for a moment after a request, or to which it comes ahead of its input (stay.c): when, and what ends it. On the simulated GPU no code runs,
 * so that what the GPU does of it is not seen here; which calls are made is, and what the two sides say to each other. As test-preempt.c.
 */
#include "gate-testing.h"
#include "record-client.h"

/* Launches that are not the program's: where, and the words that the first of the two looks at. */
static _Atomic int launched;
static CUstream stay_stream;
static _Atomic uint32_t *words;
static CUresult refusal;
static __typeof__(&cuLaunchKernel) real_launch;
static CUresult note_launch(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, CUstream s,
                            void **params, void **extra)
{
    if (bx == 1) {
        atomic_fetch_add(&launched, 1);
        stay_stream = s;
        words = params ? *(_Atomic uint32_t **)params[0] : words;
        if (refusal)
            return refusal;
    }
    return real_launch(f, gx, gy, gz, bx, by, bz, shared, s, params, extra);
}

static _Atomic int recorded;
static __typeof__(&cuEventRecord) real_record;
static CUresult count_record(CUevent e, CUstream s)
{
    atomic_fetch_add(&recorded, 1);
    return real_record(e, s);
}

static void become_one_that_may(void)
{
    become_one_to_stay_with();
    real_launch = RG_REAL(cuLaunchKernel);
    *(__typeof__(&note_launch) *)&rg_real.hooked[RG_HOOK_cuLaunchKernel] = note_launch;
    rg_stay_beat(0, true);
}

/* What had been said to that one as the program began to wait. */
static _Atomic uint32_t *told;
static _Atomic uint32_t told_then;
static __typeof__(&cuStreamSynchronize) real_wait;
static CUresult note_wait(CUstream s)
{
    atomic_store(&told_then, told[1]);
    return real_wait(s);
}

static void wait_and_note(_Atomic uint32_t *pair)
{
    told = pair;
    real_wait = RG_REAL(cuStreamSynchronize);
    *(__typeof__(&note_wait) *)&rg_real.hooked[RG_HOOK_cuStreamSynchronize] = note_wait;
    CHECK_EQUAL(cuStreamSynchronize(NULL), CUDA_SUCCESS);
    *(__typeof__(&note_wait) *)&rg_real.hooked[RG_HOOK_cuStreamSynchronize] = real_wait;
}

static void wait_for_it(void)
{
    CHECK_EQUAL(cuStreamSynchronize(NULL), CUDA_SUCCESS);
}

static void request(void)
{
    launch(spin, NULL, 1000000);
    wait_for_it();
}

/* What the last request that has been waited for found. */
static uint32_t had_stayed(void)
{
    return rg_waited_stayed(rg.slot->waited_ring[(rg.slot->waited - 1) % RG_WAITED]);
}

/* What the stream has said; the simulated GPU writes it when somebody asks. */
static uint32_t stream_said(_Atomic uint32_t *pair)
{
    rg_real.rigelSimWrites(0);
    return atomic_load(&pair[0]);
}

static bool stays_now(void)
{
    return atomic_load(&rg.stays) & 1;
}

/* Requests, one after the other, until the GPU stays after one: a machine that is busy puts pauses between them. */
static void until_it_stays(void)
{
    for (int i = 0; i < 5000 && !stays_now(); i++) {
        request();
        rg_stay_beat(0, true);
    }
    CHECK(stays_now());
}

static void it_stays_until_the_next_has_begun(void)
{
    become_one_that_may();
    request();
    CHECK_EQUAL(had_stayed(), RG_STAYED_NOT);
    for (int i = 0; i < 20; i++) {
        uint64_t had = rg.slot->stays;
        until_it_stays();
        CHECK_EQUAL(rg.slot->stays, had + 1);
        CHECK_EQUAL(atomic_load(&launched), 2 * (rg.slot->stays + rg.slot->ahead)); /* one comes ahead of two launches after a pause, the machine's */
        CHECK_EQUAL(stream_said(words), 0);
        CHECK_EQUAL(words[1], 0);
        _Atomic uint32_t *before = words;
        launch(spin, NULL, 1000);
        CHECK(!stays_now());
        CHECK_EQUAL(before[1], 1); /* more may follow */
        launch(spin, NULL, 1000);
        CHECK_EQUAL(before[1], 1);
        wait_and_note(before);
        CHECK_EQUAL(atomic_load(&told_then), 2); /* that was all */
        CHECK_EQUAL(before[1], 2);
        CHECK_EQUAL(stream_said(before), 1); /* and has begun */
        CHECK_EQUAL(had_stayed(), RG_STAYED_BEHIND);
        CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS); /* which nothing stays after */
        CHECK(!stays_now());
        CHECK_EQUAL(before[1], 2);
    }
    done();
}

/* The input comes first: for its time the GPU stays still. */
static void it_stays_while_the_input_comes(void)
{
    become_one_that_may();
    CUdeviceptr input;
    char *host;
    CHECK_EQUAL(cu.cuMemAlloc_v2(&input, 1 << 20), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuMemHostAlloc((void **)&host, 1 << 20, 0), CUDA_SUCCESS);
    until_it_stays();
    CHECK_EQUAL(cuMemcpyHtoDAsync_v2(input, host, 1 << 20, NULL), CUDA_SUCCESS);
    CHECK(stays_now());
    CHECK_EQUAL(stream_said(words), 0);
    CHECK_EQUAL(words[1], 1); /* it is coming */
    _Atomic uint32_t *before = words;
    launch(spin, NULL, 1000);
    CHECK(!stays_now());
    CHECK_EQUAL(before[1], 1);
    wait_for_it();
    CHECK_EQUAL(before[1], 2);
    CHECK_EQUAL(stream_said(before), 1);
    done();
}

/* An input that is waited for by itself: the rest comes at once, or not in time. */
static void behind_an_input_alone(void)
{
    become_one_that_may();
    CUdeviceptr to;
    char *host;
    CHECK_EQUAL(cu.cuMemAlloc_v2(&to, 1 << 20), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuMemHostAlloc((void **)&host, 1 << 20, 0), CUDA_SUCCESS);
    until_it_stays();
    _Atomic uint32_t *it = words;
    CHECK_EQUAL(cuMemcpyHtoDAsync_v2(to, host, 1 << 20, NULL), CUDA_SUCCESS);
    CHECK_EQUAL(it[1], 1);
    wait_for_it();
    CHECK(stays_now());
    CHECK_EQUAL(it[1], 0);
    CHECK_EQUAL(stream_said(it), 0);
    launch(spin, NULL, 1000000);
    CHECK_EQUAL(it[1], 1);
    CHECK(words == it);
    wait_for_it();
    CHECK_EQUAL(it[1], 2);
    CHECK_EQUAL(stream_said(it), 1);
    CHECK_EQUAL(rg.slot->ahead, 0);
    done();
}

static CUgraphExec a_graph(void)
{
    CUstream side;
    CUgraph graph;
    CUgraphExec exec;
    CHECK_EQUAL(cuStreamCreate(&side, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamBeginCapture_v2(side, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    launch(spin, side, 1000000);
    CHECK_EQUAL(cuStreamEndCapture(side, &graph), CUDA_SUCCESS);
    CHECK_EQUAL(cuGraphInstantiateWithFlags(&exec, graph, 0), CUDA_SUCCESS);
    return exec;
}

/* The first graph of several is not all: the GPU leaves where it has fetched that one before the next is queued. */
static void until_all_graphs_are_launched(void)
{
    become_one_that_may();
    CUgraphExec exec = a_graph();
    until_it_stays();
    _Atomic uint32_t *it = words;
    launch(spin, NULL, 1000);
    for (int i = 0; i < 3; i++) {
        CHECK_EQUAL(cuGraphLaunch(exec, NULL), CUDA_SUCCESS);
        CHECK_EQUAL(it[1], 1);
    }
    wait_for_it();
    CHECK_EQUAL(it[1], 2);
    CHECK_EQUAL(stream_said(it), 1);
    done();
}

/* ---- ahead of the input ---- */

static CUdeviceptr input;
static char *host_input;

/* It stays after none: slices are too short for that. */
static void become_one_with_inputs(void)
{
    become_one_that_may();
    seg->settings.high_slice_us = 1;
    CHECK_EQUAL(cu.cuMemAlloc_v2(&input, 16 << 20), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuMemHostAlloc((void **)&host_input, 16 << 20, 0), CUDA_SUCCESS);
    request(); /* of what length they are */
    rg_stay_beat(0, true);
}

static void take_input(size_t bytes)
{
    CHECK_EQUAL(cuMemcpyHtoDAsync_v2(input, host_input, bytes, NULL), CUDA_SUCCESS);
}

/* Behind an input that was waited for by itself, until it is over. */
static void nothing_follows(void)
{
    uint32_t us = seg->settings.stay_us;
    CHECK(stays_now());
    CHECK_EQUAL(words[1], 0);
    seg->settings.stay_us = 1;
    usleep(200); /* by when it has come over */
    take_input(1 << 10);
    wait_for_it();
    CHECK(!stays_now());
    seg->settings.stay_us = us;
}

static void request_with_input(void)
{
    take_input(1 << 20);
    launch(spin, NULL, 1000000);
    wait_for_it();
    rg_stay_beat(0, true);
}

/* Until it comes ahead of one's input, which is here then: of so many before that it has not. */
static int until_it_comes(void)
{
    uint64_t before = rg.slot->ahead;
    int i = 0;
    for (; i < 5000; i++) {
        take_input(1 << 20);
        if (rg.slot->ahead > before)
            break;
        launch(spin, NULL, 1000000);
        wait_for_it();
        rg_stay_beat(0, true);
    }
    CHECK_EQUAL(rg.slot->ahead, before + 1);
    CHECK(stays_now());
    return i;
}

static void it_comes_while_the_input_does(void)
{
    become_one_with_inputs();
    real_record = RG_REAL(cuEventRecord);
    *(__typeof__(&count_record) *)&rg_real.hooked[RG_HOOK_cuEventRecord] = count_record;
    for (int i = 0; i < 20; i++) {
        int n = atomic_load(&launched);
        until_it_comes();
        CHECK_EQUAL(atomic_load(&recorded), 0); /* behind nothing */
        CHECK_EQUAL(atomic_load(&launched), n + 2);
        CHECK_EQUAL(rg.slot->stays, 0);
        CHECK_EQUAL(words[1], 1);
        CHECK_EQUAL(stream_said(words), 0);
        launch(spin, NULL, 1000000);
        CHECK(!stays_now());
        CHECK_EQUAL(words[1], 1);
        wait_and_note(words);
        CHECK_EQUAL(atomic_load(&told_then), 2);
        CHECK_EQUAL(words[1], 2);
        CHECK_EQUAL(stream_said(words), 1);
        CHECK_EQUAL(had_stayed(), RG_STAYED_AHEAD);
    }
    done();
}

/* Not for an input that takes less than the calls, or longer than it would stay, nor amid a request, nor where it is there. */
static void for_which_inputs_it_does_not(void)
{
    become_one_with_inputs();
    until_it_comes();
    launch(spin, NULL, 1000000);
    wait_for_it();
    int n = atomic_load(&launched);
    for (int i = 0; i < 10; i++) {
        take_input(i % 2 ? 1 << 10 : 16 << 20);
        take_input(1 << 20);
        launch(spin, NULL, 1000000);
        take_input(1 << 20);
        wait_for_it();
    }
    CHECK_EQUAL(atomic_load(&launched), n);
    seg->settings.high_slice_us = 1000000000;
    until_it_stays();
    uint64_t before = rg.slot->ahead;
    n = atomic_load(&launched);
    take_input(1 << 20);
    CHECK_EQUAL(atomic_load(&launched), n);
    CHECK_EQUAL(rg.slot->ahead, before);
    CHECK_EQUAL(words[1], 1);
    done();
}

static CUresult copy_within(void)
{
    return cuMemcpyDtoDAsync_v2(input, input + (8 << 20), 1 << 20, NULL);
}

static CUresult copy_box(int from, int to)
{
    CUDA_MEMCPY2D c = {.srcMemoryType = from, .srcHost = host_input, .srcDevice = input + (8 << 20), .srcPitch = 1 << 10,
                       .dstMemoryType = to,   .dstHost = host_input, .dstDevice = input,             .dstPitch = 1 << 10,
                       .WidthInBytes = 1 << 10, .Height = 1 << 10};
    return cuMemcpy2DAsync_v2(&c, NULL);
}

/* Nor for a copy of such a size that is none: there the GPU comes over for the copy itself. */
static void before_no_other_copy(void)
{
    become_one_with_inputs();
    until_it_comes();
    launch(spin, NULL, 1000000);
    wait_for_it();
    uint64_t before = rg.slot->ahead;
    for (int i = 0; i < 30; i++) {
        CHECK_EQUAL(i % 3 == 0   ? copy_within()
                    : i % 3 == 1 ? copy_box(CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_DEVICE)
                                 : copy_box(CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_HOST),
                    CUDA_SUCCESS);
        launch(spin, NULL, 1000000);
        wait_for_it();
        rg_stay_beat(0, true);
    }
    CHECK_EQUAL(rg.slot->ahead, before);
    for (int i = 0; i < 5000 && rg.slot->ahead == before; i++) {
        CHECK_EQUAL(copy_box(CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_DEVICE), CUDA_SUCCESS);
        launch(spin, NULL, 1000000);
        wait_for_it();
        rg_stay_beat(0, true);
    }
    CHECK_EQUAL(rg.slot->ahead, before + 1);
    done();
}

/* When the last request ended, as the client knows it. */
static void ended_at(uint64_t ns)
{
    atomic_store(&rg_share_of(seg, 0, RG_PROCESS->slot_index)->idle_ns, ns);
}

/* A request of so many launches behind an input of so many bytes (0: none), the last having ended then; whether the GPU came ahead of it. */
static bool comes_ahead_of(int launches, size_t bytes, uint64_t ended_ns)
{
    uint64_t before = rg.slot->ahead;
    ended_at(ended_ns);
    if (bytes)
        take_input(bytes);
    for (int i = 0; i < launches; i++)
        launch(spin, NULL, 1000000);
    bool comes = rg.slot->ahead > before;
    if (comes) {
        CHECK_EQUAL(rg.slot->ahead, before + 1);
        CHECK(!stays_now());
        CHECK_EQUAL(words[1], 1); /* more may follow */
        wait_and_note(words);
        CHECK_EQUAL(atomic_load(&told_then), 2); /* that was all */
        CHECK_EQUAL(stream_said(words), 1); /* and has begun */
    } else {
        wait_for_it();
    }
    rg_stay_beat(0, true);
    return comes;
}

/* Which the GPU would leave between two of them; not where it is still there, or where there is one, or what it begins with waits by itself. */
static void ahead_of_the_first_of_several_launches(void)
{
    enum { LONG_AGO = 1 };
    become_one_with_inputs();
    for (int i = 0; i < 30; i++)
        CHECK(!comes_ahead_of(1, 1 << 10, LONG_AGO));
    for (size_t bytes = 0; bytes <= 1 << 12; bytes += 1 << 12) {
        int i = 0;
        for (; i < 5000 && !comes_ahead_of(2, bytes, LONG_AGO); i++)
            ;
        CHECK(i < 5000);
    }
    for (int i = 0; i < 30; i++) {
        CHECK(!comes_ahead_of(2, 1 << 12, rg_clock_ns() + 1000000000));
        CHECK(!comes_ahead_of(2, 16 << 20, LONG_AGO)); /* nor for an input that it would not stay for */
    }
    uint64_t before = rg.slot->ahead;
    for (int i = 0; i < 30; i++) {
        char result[16];
        ended_at(LONG_AGO);
        CHECK_EQUAL(cuMemcpyDtoH_v2(result, input, sizeof result), CUDA_SUCCESS);
        wait_for_it();
    }
    CHECK_EQUAL(rg.slot->ahead, before);
    done();
}

/* Requests that the GPU is soon done with, or that launch for long. */
static void before_which_requests_it_does_not_come(void)
{
    become_one_with_inputs();
    until_it_comes();
    uint64_t worked_ns, wait_ns = UINT64_MAX;
    for (int i = 0; i < 1000 && wait_ns >= 300000; i++) { /* it may be the machine's */
        launch(spin, NULL, 1000);
        wait_for_it(); /* which was short */
        rg_waited_times(rg.slot->waited_ring[(rg.slot->waited - 1) % RG_WAITED], &worked_ns, &wait_ns);
    }
    int n = atomic_load(&launched);
    take_input(1 << 20);
    launch(spin, NULL, 1000000);
    usleep(RG_STAY_LAUNCH_NS / 1000 + 1);
    launch(spin, NULL, 1000000);
    wait_for_it(); /* and that one launched for long */
    take_input(1 << 20);
    CHECK_EQUAL(atomic_load(&launched), n);
    launch(spin, NULL, 1000000);
    wait_for_it();
    until_it_comes();
    done();
}

/* That another client of the process begins a request, after however long, ends none that is coming. */
static void *request_of_another(void *unused)
{
    CHECK_EQUAL(cuCtxSetCurrent(context), CUDA_SUCCESS);
    CHECK_EQUAL(rigel_client_enter("another", "high"), 0);
    CUstream s;
    CHECK_EQUAL(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CHECK_EQUAL(cuMemcpyHtoDAsync_v2(input + (8 << 20), host_input, 1 << 10, s), CUDA_SUCCESS);
    rigel_client_leave();
    return unused;
}

static void while_another_client_begins(void)
{
    become_one_with_inputs();
    until_it_comes();
    _Atomic uint32_t *it = words;
    pthread_t thread;
    CHECK_EQUAL(pthread_create(&thread, NULL, request_of_another, NULL), 0);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    CHECK(stays_now());
    CHECK_EQUAL(it[1], 1);
    launch(spin, NULL, 1000000);
    CHECK_EQUAL(cuStreamSynchronize(NULL), CUDA_SUCCESS);
    CHECK_EQUAL(stream_said(it), 1);
    done();
}

/* A thread's own default stream is no other thread's to use. */
static void for_no_thread_of_its_own(void)
{
    become_one_that_may();
    until_it_stays();
    launch(spin, NULL, 1000000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuMemAlloc_v2(&input, 1 << 20), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuMemHostAlloc((void **)&host_input, 1 << 20, 0), CUDA_SUCCESS);
    int n = atomic_load(&launched);
    for (int i = 0; i < 100; i++) {
        CHECK_EQUAL(cuMemcpyHtoDAsync_v2(input, host_input, 1 << 20, CU_STREAM_PER_THREAD), CUDA_SUCCESS);
        launch(spin, CU_STREAM_PER_THREAD, 1000000);
        CHECK_EQUAL(cuStreamSynchronize(CU_STREAM_PER_THREAD), CUDA_SUCCESS);
        rg_stay_beat(0, true);
    }
    CHECK_EQUAL(atomic_load(&launched), n);
    done();
}

/* Inputs without a launch behind them: it is tried after two more, then four, and so on, until one has some. */
static void less_often_where_it_is_in_vain(void)
{
    become_one_with_inputs();
    for (int round = 1; round < 8; round++) {
        if (round == 3) { /* one that it stays for, with no input, says nothing of those */
            seg->settings.high_slice_us = 1000000000;
            until_it_stays();
            seg->settings.high_slice_us = 1;
            request();
        }
        until_it_comes();
        wait_for_it();
        nothing_follows();
        uint64_t before = rg.slot->ahead;
        for (int i = 0; i < 1 << round; i++)
            request_with_input();
        CHECK_EQUAL(rg.slot->ahead, before);
    }
    until_it_comes();
    launch(spin, NULL, 1000000);
    wait_for_it();
    until_it_comes(); /* in vain once, as far as is known */
    wait_for_it();
    nothing_follows();
    uint64_t before = rg.slot->ahead;
    for (int i = 0; i < 2; i++)
        request_with_input();
    CHECK_EQUAL(rg.slot->ahead, before);
    CHECK(until_it_comes() < 200); /* not after 256 */
    done();
}

/* After ten of them in vain, and more, it is every 1024th. */
static void how_often_at_least(void)
{
    enum { MOST = 10 };
    become_one_with_inputs();
    for (int round = 1; round < MOST + 3; round++) {
        CHECK(until_it_comes() < 500);
        wait_for_it();
        nothing_follows();
        uint64_t before = rg.slot->ahead;
        for (int i = 0; i < 1 << (round < MOST ? round : MOST); i++) {
            take_input(1 << 20);
            wait_for_it();
        }
        CHECK_EQUAL(rg.slot->ahead, before);
    }
    done();
}

/* Inputs one after the other, each waited for by itself: it is over in its time all the same. */
static void behind_inputs_one_after_the_other(void)
{
    become_one_that_may();
    seg->settings.stay_us = 100000;
    CHECK_EQUAL(cu.cuMemAlloc_v2(&input, 1 << 20), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuMemHostAlloc((void **)&host_input, 1 << 20, 0), CUDA_SUCCESS);
    until_it_stays();
    _Atomic uint32_t *it = words;
    for (int i = 0; i < 3; i++) {
        usleep(40000);
        take_input(1 << 10);
        wait_for_it(); /* which may take so long on a busy machine that another one stays after it */
    }
    launch(spin, NULL, 1000);
    CHECK(!stays_now());
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    CHECK_EQUAL(stream_said(it), 0); /* no call for it */
    done();
}

/* And ahead of them: one that has gone before the launch was in vain. */
static void ahead_of_inputs_one_after_the_other(void)
{
    become_one_with_inputs();
    for (int round = 1; round < 3; round++) {
        seg->settings.stay_us = 100000;
        until_it_comes();
        wait_for_it();
        for (int i = 0; i < 3; i++) {
            usleep(40000);
            take_input(1 << 10);
            wait_for_it();
        }
        launch(spin, NULL, 1000000);
        wait_for_it();
        uint64_t before = rg.slot->ahead;
        for (int i = 0; i < 1 << round; i++)
            request_with_input();
        CHECK_EQUAL(rg.slot->ahead, before);
    }
    done();
}

/* Where the GPU has stayed after a request, and the next has no launch, it was not for the input. */
static void in_vain_after_a_request(void)
{
    become_one_with_inputs();
    for (int i = 0; i < 9; i++) {
        seg->settings.high_slice_us = 1000000000;
        until_it_stays();
        seg->settings.high_slice_us = 1;
        take_input(1 << 20);
        wait_for_it();
        nothing_follows();
    }
    CHECK(until_it_comes() < 500); /* after nine in vain: 512 at least */
    done();
}

/* Nor was one for nothing that a launch followed, however that is waited for. */
static void not_in_vain_before_a_launch(void)
{
    enum { REQUESTS = 100 };
    become_one_with_inputs();
    int without = 0;
    for (int i = 0; i < REQUESTS; i++) {
        without += until_it_comes();
        launch(spin, NULL, 1000000);
        CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    }
    CHECK(without < REQUESTS * 3 / 2); /* a busy machine's; else two for each */
    done();
}

/* As the agent does: nobody has waited for it. */
static void found_over(void)
{
    rg_tracks_clear();
    CHECK(rg_idle_check(RG_PROCESS, 0));
}

/* ---- ahead of a request that is said to be coming ---- */

static _Atomic uint64_t *stop_word(void)
{
    return &seg->stops[0].word[OTHER];
}

/* A best-effort client's streams stop at its word, which is armed anew, as if nothing had been said before. Whether they do. */
static bool stops_as_announced(void)
{
    atomic_store(stop_word(), RG_STOP_ARMED);
    atomic_store(&seg->devices[0].coming_until_ns, 0);
    rigel_request_coming();
    bool stops = atomic_load(stop_word()) == RG_STOP_STOPPED;
    CHECK_EQUAL(atomic_load(&seg->devices[0].coming_until_ns) > rg_now_ns(), stops);
    return stops;
}

/* Whether the GPU comes as one is said to be coming: with streams stopped, and told for how long. */
static bool comes_as_announced(void)
{
    uint64_t before = rg.slot->ahead, now = rg_now_ns();
    int n = atomic_load(&launched);
    bool stops = stops_as_announced(), comes = rg.slot->ahead > before;
    CHECK_EQUAL(stops, comes);
    CHECK_EQUAL(rg.slot->ahead, before + comes);
    CHECK_EQUAL(atomic_load(&launched), n + 2 * comes);
    if (comes) {
        CHECK(stays_now());
        CHECK_EQUAL(words[1], 0); /* nothing has come yet */
        CHECK(atomic_load(&seg->devices[0].coming_until_ns) > now + 4000 * 1000000ull);
        CHECK(atomic_load(&seg->devices[0].coming_until_ns) < now + 3600000000000);
    }
    return comes;
}

static void become_one_that_announces(void)
{
    become_one_with_inputs();
    until_it_comes(); /* what it takes for that is there */
    launch(spin, NULL, 1000000);
    wait_for_it();
}

/* Of so many before that it has not come. */
static int until_it_comes_as_announced(void)
{
    int i = 0;
    for (; i < 5000 && !comes_as_announced(); i++)
        request(); /* one that was short, the machine's doing */
    CHECK(i < 5000);
    return i;
}

/* It stays until the request is launched as a whole, whatever it begins with, and no more comes ahead of that. */
static void it_comes_for_one_that_is_announced(void)
{
    become_one_that_announces();
    for (int i = 0; i < 20; i++) {
        until_it_comes_as_announced();
        int n = atomic_load(&launched);
        if (i % 2) {
            take_input(1 << 20);
            CHECK(stays_now());
        }
        launch(spin, NULL, 1000000);
        CHECK(!stays_now());
        CHECK_EQUAL(words[1], 1);
        CHECK_EQUAL(atomic_load(&launched), n);
        wait_and_note(words);
        CHECK_EQUAL(atomic_load(&told_then), 2);
        CHECK_EQUAL(stream_said(words), 1);
        CHECK_EQUAL(had_stayed(), RG_STAYED_ANNOUNCED);
    }
    done();
}

/* Once it is launched nothing is waited for any more, unless another one is said to be coming for longer. */
static void what_is_announced_has_come(void)
{
    become_one_that_announces();
    until_it_comes_as_announced();
    launch(spin, NULL, 1000000);
    CHECK(atomic_load(&seg->devices[0].coming_until_ns) <= rg_now_ns());
    wait_for_it();
    until_it_comes_as_announced();
    uint64_t later = rg_now_ns() + 7200000000000;
    rg_device_coming(seg, 0, later);
    launch(spin, NULL, 1000000);
    CHECK_EQUAL(atomic_load(&seg->devices[0].coming_until_ns), later);
    wait_for_it();
    done();
}

/* Said twice, it has come; amid a request, or from a best-effort client or one that may not, it says nothing. */
static void when_announcing_does_nothing(void)
{
    become_one_that_announces();
    until_it_comes_as_announced();
    int n = atomic_load(&launched);
    rigel_request_coming();
    CHECK_EQUAL(atomic_load(&launched), n);
    launch(spin, NULL, 1000000);
    CHECK(!comes_as_announced());
    wait_for_it();
    static rg_recording recording;
    enum { NOBODY, NOT_KEPT_OFF, LATE, NEVER, RECORDED, BEST_EFFORT, HELD, NOT_ALLOWED, WHY };
    for (int why = 0; why < WHY; why++) {
        atomic_store(&seg->stops[0].armed, why == NOBODY ? 0 : 1ull << OTHER);
        seg->settings.suspend = why != NOT_KEPT_OFF;
        seg->settings.need_us = why == LATE;
        seg->settings.stay_us = why == NEVER ? 0 : 1000000;
        rg_recorded = why == RECORDED ? &recording : NULL;
        rg_segment_hold(seg, why == HELD ? RG_HOLD_LIMIT_MS : 0);
        request();
        rg_stay_beat(0, why != NOT_ALLOWED);
        uint32_t mode = atomic_load(&RG_PROCESS->mode);
        atomic_store(&RG_PROCESS->mode, why == BEST_EFFORT ? RG_MODE_BEST_EFFORT : mode);
        for (int i = 0; i < 20; i++)
            CHECK(!comes_as_announced());
        atomic_store(&RG_PROCESS->mode, mode);
    }
    rg_stay_beat(0, true);
    until_it_comes_as_announced();
    done();
}

/* Where the GPU is there still it is only told that more comes, and streams stop. */
static void announced_where_it_stays(void)
{
    become_one_that_announces();
    seg->settings.high_slice_us = 1000000000;
    until_it_stays();
    _Atomic uint32_t *it = words;
    int n = atomic_load(&launched);
    CHECK(stops_as_announced());
    CHECK_EQUAL(atomic_load(&launched), n);
    CHECK_EQUAL(it[1], 1);
    launch(spin, NULL, 1000000);
    wait_and_note(it);
    CHECK_EQUAL(atomic_load(&told_then), 2);
    CHECK_EQUAL(stream_said(it), 1);
    CHECK_EQUAL(had_stayed(), RG_STAYED_ANNOUNCED);
    request();
    CHECK(had_stayed() != RG_STAYED_ANNOUNCED);
    done();
}

/* For requests that it neither comes ahead of nor stays after. */
static void announced_and_nothing_else(void)
{
    become_one_that_may();
    seg->settings.high_slice_us = 1;
    for (int i = 0; i < 10; i++) {
        request();
        rg_stay_beat(0, true);
    }
    CHECK(!comes_as_announced()); /* the agent has to make something for it first */
    rg_stay_beat(0, true);
    until_it_comes_as_announced();
    CHECK_EQUAL(rg.slot->stays, 0);
    done();
}

/* Nothing is launched until the GPU would have gone, however long that takes. */
static void launch_late(void)
{
    seg->settings.stay_us = 0;
    atomic_store(&seg->stops[0].armed, 0);
    usleep(1500);
    request();
    CHECK(!stays_now());
    seg->settings.stay_us = 1000000;
    atomic_store(&seg->stops[0].armed, 1ull << OTHER);
}

/* So many are left out after so many in vain, one after the other. */
static int left_out(int in_vain)
{
    return in_vain > 1 ? 1 << (in_vain - 1) : 0;
}

/*
 * It is tried again at once, then after two more, then four, and so on, until one is launched in time; also where it is said twice, as of requests that come
 * in parts or to several threads. That it comes ahead of inputs is another matter.
 */
static void announced_in_vain(void)
{
    become_one_that_announces();
    for (int round = 1; round < 8; round++) {
        until_it_comes_as_announced();
        if (round % 2)
            rigel_request_coming();
        launch_late();
        for (int i = 0; i < left_out(round); i++)
            CHECK(!comes_as_announced());
    }
    CHECK(until_it_comes() < 200);
    launch(spin, NULL, 1000000);
    wait_for_it();
    until_it_comes_as_announced();
    launch(spin, NULL, 1000000);
    wait_for_it();
    until_it_comes_as_announced();
    done();
}

/* One that the host is late with now and then is no reason to leave out any. */
static void announced_in_vain_now_and_then(void)
{
    enum { TIMES = 50 };
    become_one_that_announces();
    int without = 0;
    for (int i = 0; i < TIMES; i++) {
        without += until_it_comes_as_announced();
        launch_late();
        without += until_it_comes_as_announced();
        launch(spin, NULL, 1000000);
        wait_for_it();
    }
    CHECK(without < TIMES * 3 / 2); /* a busy machine's; else two for each */
    done();
}

/* And where the GPU is there still from the request before: streams stop for that as well. */
static void announced_in_vain_where_it_stays(void)
{
    become_one_that_announces();
    for (int round = 1; round < 6; round++) {
        seg->settings.high_slice_us = 1000000000;
        until_it_stays();
        CHECK(stops_as_announced());
        launch_late();
        until_it_stays();
        for (int i = 0; i < left_out(round); i++)
            CHECK(!stops_as_announced());
    }
    CHECK(stops_as_announced());
    launch(spin, NULL, 1000000); /* in time */
    wait_for_it();
    until_it_stays();
    CHECK(stops_as_announced());
    done();
}

/*
 * Of those that are seen coming none is left out, however many are in vain: that is learned where they are seen. Each is waited for as long as it is said,
 * and what its program says is coming as ever.
 */
static void seen_in_vain(void)
{
    enum { TIMES = 8, WAIT_US = 3000 };
    become_one_that_announces();
    for (int i = 0; i < TIMES; i++) {
        int tries = 0;
        uint64_t now = 0;
        for (; tries < 5000 && (now = rg_now_ns(), !rg_stay_seen(RG_PROCESS, 0, WAIT_US)); tries++)
            request(); /* one that was short, the machine's doing */
        CHECK(tries < 5000);
        uint64_t until = atomic_load(&seg->devices[0].coming_until_ns);
        CHECK(until > now + WAIT_US * 1000ull);
        CHECK(until < rg_now_ns() + WAIT_US * 1000ull + 1000000);
        usleep(WAIT_US + 1000);
        rg_stay_coming(0, rg_clock_ns()); /* which finds that it is over */
        CHECK(!stays_now());
        request();
    }
    CHECK(until_it_comes_as_announced() < 1 << (TIMES - 2)); /* a busy machine's; else as many as are left out */
    usleep(WAIT_US + 1000);
    rg_stay_coming(0, rg_clock_ns());
    CHECK(stays_now());
    done();
}

/* Where the driver refuses, or something is captured, best-effort work stops more and more rarely. */
static void announced_where_nothing_can_be_launched(void)
{
    for (int captured = 0; captured < 2; captured++) {
        if (!captured)
            become_one_that_announces();
        until_it_comes_as_announced();
        launch(spin, NULL, 1000000); /* which ends what is known to be in vain */
        wait_for_it();
        rg_stay_beat(0, true);
        refusal = captured ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
        atomic_fetch_add(&rg.captures, captured);
        uint64_t before = rg.slot->ahead;
        int stops = 0;
        for (int i = 0; i < 100; i++)
            stops += stops_as_announced();
        CHECK(stops > 0);
        CHECK(stops < 10); /* the 1st, 2nd, 5th, 10th, 19th, 36th, 69th */
        CHECK_EQUAL(rg.slot->ahead, before);
        refusal = CUDA_SUCCESS;
        atomic_fetch_sub(&rg.captures, captured);
    }
    done();
}

/* However the program learns that an input alone is there. */
static void synchronize_context(void)
{
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    CHECK(!stays_now());
    CHECK_EQUAL(words[1], 3);
}

static void look_at_it(void)
{
    while (cuStreamQuery(NULL) != CUDA_SUCCESS)
        usleep(10);
}

static void in_vain_whoever_finds_out(void)
{
    become_one_with_inputs();
    void (*const find_out[])(void) = {wait_for_it, synchronize_context, look_at_it, found_over};
    for (unsigned i = 0; i < sizeof find_out / sizeof *find_out; i++) {
        until_it_comes();
        launch(spin, NULL, 1000000); /* one that was not */
        wait_for_it();
        until_it_comes();
        find_out[i]();
        if (find_out[i] != synchronize_context)
            nothing_follows();
        uint64_t before = rg.slot->ahead;
        for (int k = 0; k < 2; k++)
            request_with_input();
        CHECK_EQUAL(rg.slot->ahead, before);
    }
    done();
}

/* The program does not say that it waits: what the agent finds over is, and the next one is another. */
static void a_program_that_does_not_wait(void)
{
    become_one_with_inputs();
    until_it_comes();
    launch(spin, NULL, 1000);
    _Atomic uint32_t *before = words;
    CHECK_EQUAL(before[1], 1);
    found_over();
    CHECK_EQUAL(before[1], 2); /* the GPU does not stay for what is done */
    until_it_comes();
    CHECK_EQUAL(before[1], 2);
    CHECK(words != before);
    done();
}

/* So late that it is over: the next request is not slowed down by a call for it. */
static void it_is_over_in_time(void)
{
    become_one_that_may();
    until_it_stays();
    seg->settings.stay_us = 1;
    usleep(10);
    launch(spin, NULL, 1000);
    CHECK(!stays_now());
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    CHECK_EQUAL(stream_said(words), 0);
    CHECK_EQUAL(words[1], 0);
    done();
}

/* What waits for all of the context is not to wait for that. */
static void who_waits_for_the_context_ends_it(void)
{
    become_one_that_may();
    until_it_stays();
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    CHECK(!stays_now());
    CHECK_EQUAL(stream_said(words), 0);
    CHECK_EQUAL(words[1], 3);
    until_it_stays();
    launch(spin, NULL, 1000); /* amid a request, likewise */
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    CHECK_EQUAL(words[1], 3);
    done();
}

/* A copy that waits, amid a request: what is launched after it is to come, though no request begins. */
static void it_stays_amid_a_request(void)
{
    become_one_that_may();
    CUdeviceptr p;
    char result[16];
    CHECK_EQUAL(cu.cuMemAlloc_v2(&p, 1 << 20), CUDA_SUCCESS);
    for (int i = 0; i < 5000; i++) {
        launch(spin, NULL, 1000000);
        CHECK_EQUAL(cuMemcpyDtoHAsync_v2(result, p, sizeof result, NULL), CUDA_SUCCESS);
        if (stays_now())
            break;
        wait_for_it();
        rg_stay_beat(0, true);
        if (stays_now())
            request();
    }
    CHECK(stays_now());
    _Atomic uint32_t *it = words;
    CHECK_EQUAL(it[1], 0);
    launch(spin, NULL, 1000);
    CHECK_EQUAL(it[1], 1);
    wait_for_it();
    CHECK_EQUAL(it[1], 2);
    done();
}

/* The words are one context's: a stream of another one is not told to write there. */
static void for_a_request_in_another_context(void)
{
    become_one_that_may();
    CUcontext own;
    CHECK_EQUAL(cu.cuCtxCreate_v2(&own, 0, 0), CUDA_SUCCESS);
    CHECK_EQUAL(cuCtxSetCurrent(context), CUDA_SUCCESS);
    until_it_stays();
    _Atomic uint32_t *it = words;
    CHECK_EQUAL(cuCtxSetCurrent(own), CUDA_SUCCESS);
    load_kernels(NULL);
    launch(spin, NULL, 1000);
    CHECK_EQUAL(it[0], 1);
    CHECK_EQUAL(it[1], 1);
    wait_for_it();
    CHECK_EQUAL(it[1], 2);
    done();
}

/* Another thread does while the stream is about to be told that the request begins. */
static __typeof__(rg_real.cuStreamWriteValue32_v2) real_write;
static CUresult note_write(CUstream s, CUdeviceptr at, uint32_t value, unsigned flags)
{
    rg_stay_waits();
    return real_write(s, at, value, flags);
}

static void who_waits_as_a_request_begins_ends_it(void)
{
    become_one_that_may();
    real_write = rg_real.cuStreamWriteValue32_v2;
    until_it_stays();
    rg_real.cuStreamWriteValue32_v2 = note_write;
    launch(spin, NULL, 1000);
    CHECK_EQUAL(words[1], 3);
    wait_for_it();
    done();
}

/* What a child of fork frees is the parent's: it ends nothing there. */
static void a_child_ends_nothing(void)
{
    become_one_that_may();
    CUdeviceptr p;
    CHECK_EQUAL(cu.cuMemAlloc_v2(&p, 1 << 20), CUDA_SUCCESS);
    for (int i = 0; i < 2; i++) {
        until_it_stays();
        _Atomic uint32_t *it = words;
        if (i)
            launch(spin, NULL, 1000);
        pid_t child = fork();
        if (!child) {
            cuMemFree_v2(p);
            _exit(0);
        }
        CHECK_EQUAL(waitpid(child, NULL, 0), child);
        CHECK_EQUAL(it[1], i);
        wait_for_it();
    }
    done();
}

/* A second wait for the same work finds it staying. */
static void once_for_a_request(void)
{
    become_one_that_may();
    until_it_stays();
    int n = atomic_load(&launched);
    for (int i = 0; i < 10; i++)
        wait_for_it();
    CHECK_EQUAL(atomic_load(&launched), n);
    CHECK(stays_now());
    done();
}

/* Each reason by itself, and then without it. */
static void when_it_does_not(void)
{
    become_one_that_may();
    static rg_recording recording;
    enum { NOBODY, NOT_KEPT_OFF, LATE_US, LATE_PART, NEED, NEVER, RECORDED, NOT_ALLOWED, NOTHING, WHY };
    for (int why = 0; why < WHY; why++) {
        atomic_store(&seg->stops[0].armed, why == NOBODY ? 0 : 1ull << OTHER);
        seg->settings.suspend = why != NOT_KEPT_OFF;
        seg->settings.defer_us = why == LATE_US;
        seg->settings.defer_ppm = why == LATE_PART;
        seg->settings.need_us = why == NEED;
        seg->settings.stay_us = why == NEVER ? 0 : 1000000;
        rg_recorded = why == RECORDED ? &recording : NULL; /* it would tell of kernels that are not the program's */
        if (why == NOTHING) {
            until_it_stays();
            CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
            int n = atomic_load(&launched);
            rg_stay_beat(0, false); /* nor where it could */
            for (int i = 0; i < 100; i++)
                request();
            CHECK_EQUAL(atomic_load(&launched), n);
            break;
        }
        for (int i = 0; i < 100; i++) {
            request();
            rg_stay_beat(0, why != NOT_ALLOWED);
        }
        CHECK(!stays_now());
        CHECK_EQUAL(atomic_load(&launched), 0);
    }
    done();
}

/* Requests, and the agent's beats, after which nothing stays. */
static void nothing_stays(void)
{
    rg_stay_beat(0, true); /* from now on */
    request();
    int n = atomic_load(&launched);
    for (int i = 0; i < 100; i++) {
        request();
        ended_at(1);
        take_input(1 << 20); /* nor is there anything ahead of it */
        request();
        rg_stay_beat(0, true);
    }
    CHECK_EQUAL(atomic_load(&launched), n);
}

/* With nobody to keep the GPU from: in a hold, and where the best-effort client is a high one by now, paused, elsewhere, or at nothing for a second. */
static void not_with_nobody_beside(void)
{
    become_one_with_inputs();
    seg->settings.high_slice_us = 1000000000;
    rg_client *other = &seg->clients[OTHER];
    other[1].devices = 1; /* one that has never done anything */
    other[1].state = RG_LIVE;
    until_it_stays();
    int n = 0;
    for (int i = 0; i <= 100; i++) {
        rg_segment_hold(seg, RG_HOLD_LIMIT_MS); /* it would end by itself */
        request();
        n = i ? n : atomic_load(&launched);
    }
    CHECK_EQUAL(atomic_load(&launched), n);
    rg_segment_hold(seg, 0);
    until_it_stays();
    atomic_store(&other->class, RG_CLASS_HIGH);
    nothing_stays();
    atomic_store(&other->class, RG_CLASS_BEST_EFFORT);
    until_it_stays();
    atomic_store(&other->devices, 2);
    nothing_stays();
    atomic_store(&other->devices, 1);
    until_it_stays();
    atomic_store(&other->state, RG_FREE);
    nothing_stays();
    atomic_store(&other->state, RG_LIVE);
    until_it_stays();
    rg_account *account = &seg->accounts[RG_MAX_CLIENTS - 1];
    atomic_store(&account->slots, 1ull << OTHER);
    atomic_store(&account->paused_until_ns, UINT64_MAX);
    nothing_stays();
    atomic_store(&account->paused_until_ns, 0);
    until_it_stays();
    for (int suspended = 0; suspended < 2; suspended++) { /* which Rigel's own thread says */
        atomic_store(&other_thread()->doing, suspended ? RG_OP_suspended | RG_DOING : RG_OP_cuCtxSynchronize);
        usleep(1100000);
        nothing_stays();
        atomic_fetch_add(&other->launches[0], 1);
        until_it_stays();
    }
    done();
}

/* Requests with pauses between them, or that leave the GPU to others before they end, or are short. */
static void for_which_requests_it_does_not(void)
{
    become_one_that_may();
    for (int i = 0; i < 100; i++) {
        usleep(RG_POLICY_SHORT_PAUSE_NS / 1000 + 1);
        request();
        rg_stay_beat(0, true);
    }
    for (int i = 0; i < 100; i++) {
        launch(spin, NULL, 1000);
        usleep(RG_STAY_LAUNCH_NS / 1000 + 1);
        launch(spin, NULL, 1000000);
        wait_for_it();
        rg_stay_beat(0, true);
    }
    CHECK_EQUAL(atomic_load(&launched), 0);
    until_it_stays(); /* after others it does */
    done();
}

/* The GPU would be taken from the next one amid it: then it may as well go before. Two of these take longer than 2 ms, one does not. */
static void for_requests_that_one_slice_is_too_short_for(void)
{
    become_one_that_may();
    seg->settings.stay_us = 100;
    seg->settings.high_slice_us = 2000;
    for (int i = 0; i < 300; i++) {
        request();
        rg_stay_beat(0, true);
    }
    CHECK_EQUAL(atomic_load(&launched), 0);
    seg->settings.high_slice_us = 100000;
    until_it_stays();
    done();
}

/* A slice has room for four of them at most: after one in four the GPU goes. */
static void as_long_as_a_slice_lasts(void)
{
    enum { REQUESTS = 200 };
    become_one_that_may();
    seg->settings.stay_us = 1000;
    seg->settings.high_slice_us = 5500;
    until_it_stays();
    uint64_t before = rg.slot->stays;
    for (int i = 0; i < REQUESTS; i++)
        request();
    CHECK(rg.slot->stays - before <= REQUESTS * 9 / 10); /* more where a pause is longer than it stays: another slice */
    CHECK(rg.slot->stays > before);
    done();
}

/* It goes with its context, and comes again with the next. */
static void it_goes_and_comes_with_contexts(void)
{
    become_one_that_may();
    CUcontext own;
    for (int i = 0; i < 3; i++) {
        CHECK_EQUAL(cu.cuCtxCreate_v2(&own, 0, 0), CUDA_SUCCESS);
        CHECK_EQUAL(cuCtxSetCurrent(own), CUDA_SUCCESS);
        load_kernels(NULL);
        until_it_stays();
        CHECK_EQUAL(cuCtxDestroy_v2(own), CUDA_SUCCESS);
        CHECK(!stays_now());
        CHECK_EQUAL(words[1], 3);
    }
    done();
}

/* Where a launch of it fails nothing stays, and nobody asks what ended it. */
static void a_driver_that_refuses(void)
{
    become_one_that_may();
    until_it_stays();
    launch(spin, NULL, 1000000);
    refusal = CUDA_ERROR_OUT_OF_MEMORY;
    wait_for_it();
    int n = atomic_load(&launched);
    for (int i = 0; i < 5000 && atomic_load(&launched) == n; i++)
        request();
    CHECK(atomic_load(&launched) > n);
    CHECK(!stays_now());
    CHECK_EQUAL(rg.slot->stays, 1);
    done();
}

/* While something is captured nothing is added to what the program does. */
static void not_during_a_capture(void)
{
    become_one_that_may();
    until_it_stays();
    launch(spin, NULL, 1000);
    wait_for_it();
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    CUstream side;
    CUgraph graph;
    CHECK_EQUAL(cuStreamCreate(&side, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamBeginCapture_v2(side, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    int n = atomic_load(&launched);
    for (int i = 0; i < 100; i++)
        request();
    CHECK_EQUAL(atomic_load(&launched), n);
    CHECK_EQUAL(cuStreamEndCapture(side, &graph), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuGraphDestroy(graph), CUDA_SUCCESS);
    done();
}

/* An event outlives its stream: who waits for it while other work is covered too does not bring the stream back. */
static CUstream gone;
static bool used_gone;
static CUresult note_record(CUevent e, CUstream s)
{
    used_gone |= gone && s == gone;
    return s == gone ? CUDA_SUCCESS : real_record(e, s);
}

static void a_stream_that_is_gone(void)
{
    become_one_that_may();
    real_record = RG_REAL(cuEventRecord);
    *(__typeof__(&note_record) *)&rg_real.hooked[RG_HOOK_cuEventRecord] = note_record;
    CUevent of_gone, of_other;
    CUstream other;
    CHECK_EQUAL(cuEventCreate(&of_gone, CU_EVENT_DISABLE_TIMING), CUDA_SUCCESS);
    CHECK_EQUAL(cuEventCreate(&of_other, CU_EVENT_DISABLE_TIMING), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    for (int i = 0; i < 100; i++) {
        CUstream s;
        gone = NULL;
        CHECK_EQUAL(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
        until_it_stays();
        launch(spin, s, 1000);
        CHECK_EQUAL(cuEventRecord(of_gone, s), CUDA_SUCCESS);
        launch(spin, other, 1000000);
        CHECK_EQUAL(cuEventRecord(of_other, other), CUDA_SUCCESS);
        CHECK_EQUAL(cuStreamDestroy_v2(s), CUDA_SUCCESS);
        gone = s;
        CHECK_EQUAL(cuEventSynchronize(of_gone), CUDA_SUCCESS);
        CHECK(!used_gone);
        CHECK_EQUAL(cuEventSynchronize(of_other), CUDA_SUCCESS);
    }
    done();
}

/* Who waits for a stream that has nothing to do, while another one is busy. */
static void not_behind_another_stream(void)
{
    become_one_that_may();
    CUstream idle;
    CUevent end;
    CHECK_EQUAL(cuStreamCreate(&idle, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CHECK_EQUAL(cuEventCreate(&end, CU_EVENT_DISABLE_TIMING), CUDA_SUCCESS);
    launch(spin, idle, 1000);
    CHECK_EQUAL(cuStreamSynchronize(idle), CUDA_SUCCESS);
    for (int i = 0; i < 5000 && !stays_now(); i++) {
        launch(spin, NULL, 1000000);
        CHECK_EQUAL(cuEventRecord(end, NULL), CUDA_SUCCESS);
        CHECK_EQUAL(cuStreamSynchronize(idle), CUDA_SUCCESS);
        CHECK(!stays_now());
        CHECK_EQUAL(cuEventSynchronize(end), CUDA_SUCCESS);
        rg_stay_beat(0, true);
    }
    CHECK(stays_now());
    done();
}

/* A launch for one device says nothing of another. */
static void each_device_by_itself(void)
{
    setenv("RIGEL_SIM_DEVICES", "2", 1);
    become_one_that_may();
    atomic_fetch_or(&seg->stops[1].armed, 1ull << OTHER);
    atomic_store(&seg->clients[OTHER].devices, 3);
    CUcontext second;
    launch(spin, NULL, 1000);
    wait_for_it();
    CUfunction first_spin = spin;
    CHECK_EQUAL(cu.cuDevicePrimaryCtxRetain(&second, 1), CUDA_SUCCESS);
    CHECK_EQUAL(cuCtxSetCurrent(second), CUDA_SUCCESS);
    load_kernels(NULL);
    for (int i = 0; i < 5000 && !(atomic_load(&rg.stays) >> 1); i++) {
        request();
        rg_stay_beat(1, true);
    }
    CHECK_EQUAL(atomic_load(&rg.stays), 2);
    _Atomic uint32_t *of_second = words;
    CHECK_EQUAL(cuCtxSetCurrent(context), CUDA_SUCCESS);
    launch(first_spin, NULL, 1000);
    CHECK_EQUAL(atomic_load(&rg.stays), 2);
    CHECK_EQUAL(of_second[1], 0);
    CHECK_EQUAL(cuCtxSetCurrent(second), CUDA_SUCCESS);
    launch(spin, NULL, 1000);
    CHECK_EQUAL(atomic_load(&rg.stays), 0);
    CHECK_EQUAL(of_second[1], 1);
    wait_for_it();
    CHECK_EQUAL(of_second[1], 2);
    rg_real.rigelSimWrites(1);
    CHECK_EQUAL(of_second[0], 1);
    done();
}

/* The driver waits for all of the context before it frees: not for that. */
static void who_frees_memory_ends_it(void)
{
    become_one_that_may();
    CUdeviceptr p;
    CHECK_EQUAL(cu.cuMemAlloc_v2(&p, 1 << 20), CUDA_SUCCESS);
    until_it_stays();
    CHECK_EQUAL(cuMemFree_v2(p), CUDA_SUCCESS);
    CHECK(!stays_now());
    CHECK_EQUAL(words[1], 3);
    done();
}

/* While a stream or a context is taken away by another thread it may be this one's. */
static void not_while_a_stream_is_taken_away(void)
{
    become_one_that_may();
    until_it_stays();
    launch(spin, NULL, 1000);
    wait_for_it();
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    atomic_fetch_add(&rg_taking_away, 1);
    int n = atomic_load(&launched);
    for (int i = 0; i < 100; i++)
        request();
    CHECK_EQUAL(atomic_load(&launched), n);
    atomic_fetch_sub(&rg_taking_away, 1);
    until_it_stays();
    done();
}

/* Threads with requests of their own, and one that ends what stays: all of it is over in the end. */
static _Atomic bool threads_end;
static void *requests_of_a_thread(void *stream)
{
    CUdeviceptr p;
    char *host;
    CHECK_EQUAL(cuCtxSetCurrent(context), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuMemAlloc_v2(&p, 1 << 20), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuMemHostAlloc((void **)&host, 1 << 20, 0), CUDA_SUCCESS);
    while (!atomic_load(&threads_end)) {
        CHECK_EQUAL(cuMemcpyHtoDAsync_v2(p, host, 1 << 20, stream), CUDA_SUCCESS);
        launch(spin, stream, 500000);
        CHECK_EQUAL(cuStreamSynchronize(stream), CUDA_SUCCESS);
    }
    return NULL;
}

static void *who_frees(void *unused)
{
    CHECK_EQUAL(cuCtxSetCurrent(context), CUDA_SUCCESS);
    while (!atomic_load(&threads_end)) {
        CUdeviceptr p;
        CHECK_EQUAL(cu.cuMemAlloc_v2(&p, 1 << 20), CUDA_SUCCESS);
        CHECK_EQUAL(cuMemFree_v2(p), CUDA_SUCCESS);
        usleep(100);
    }
    return unused;
}

static void several_threads(void)
{
    enum { THREADS = 3 };
    become_one_that_may();
    until_it_stays();
    pthread_t threads[THREADS + 1];
    for (int i = 0; i < THREADS; i++) {
        CUstream s;
        CHECK_EQUAL(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
        CHECK_EQUAL(pthread_create(&threads[i], NULL, requests_of_a_thread, s), 0);
    }
    CHECK_EQUAL(pthread_create(&threads[THREADS], NULL, who_frees, NULL), 0);
    for (int i = 0; i < 300; i++) {
        rg_stay_beat(0, true);
        usleep(1000);
    }
    atomic_store(&threads_end, true);
    for (int i = 0; i <= THREADS; i++)
        CHECK_EQUAL(pthread_join(threads[i], NULL), 0);
    request();
    CHECK_EQUAL(atomic_load(&rg.stays_open), 0);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    CHECK(!stays_now());
    done();
}

/* Requests that did not begin before it was over, as the GPU says: it is in their way. */
static void not_where_it_is_in_the_way(void)
{
    become_one_that_may();
    enum { LATE = 4 };
    for (int i = 0; i < 21; i++) { /* now and then */
        until_it_stays();
        _Atomic uint32_t *it = words;
        request();
        it[1] = i % 2 ? LATE : it[1];
    }
    for (int i = 0; i < 2; i++) {
        until_it_stays();
        _Atomic uint32_t *it = words;
        request();
        it[1] = LATE;
        CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    }
    int n = atomic_load(&launched);
    for (int i = 0; i < 300; i++) {
        request();
        rg_stay_beat(0, true);
    }
    CHECK_EQUAL(atomic_load(&launched), n);
    done();
}

int main(int argc, char **argv)
{
    (void)argc;
    ensure_environment("LD_LIBRARY_PATH", in_build_folder("sim"), argv);
    int failures = 0;
    RUN(it_stays_until_the_next_has_begun);
    RUN(it_stays_while_the_input_comes);
    RUN(behind_an_input_alone);
    RUN(until_all_graphs_are_launched);
    RUN(it_comes_while_the_input_does);
    RUN(for_which_inputs_it_does_not);
    RUN(before_no_other_copy);
    RUN(ahead_of_the_first_of_several_launches);
    RUN(before_which_requests_it_does_not_come);
    RUN(while_another_client_begins);
    RUN(for_no_thread_of_its_own);
    RUN(less_often_where_it_is_in_vain);
    RUN(how_often_at_least);
    RUN(behind_inputs_one_after_the_other);
    RUN(ahead_of_inputs_one_after_the_other);
    RUN(in_vain_after_a_request);
    RUN(not_in_vain_before_a_launch);
    RUN(in_vain_whoever_finds_out);
    RUN(it_comes_for_one_that_is_announced);
    RUN(what_is_announced_has_come);
    RUN(when_announcing_does_nothing);
    RUN(announced_where_it_stays);
    RUN(announced_and_nothing_else);
    RUN(announced_in_vain);
    RUN(announced_in_vain_now_and_then);
    RUN(announced_in_vain_where_it_stays);
    RUN(seen_in_vain);
    RUN(announced_where_nothing_can_be_launched);
    RUN(a_program_that_does_not_wait);
    RUN(it_is_over_in_time);
    RUN(who_waits_for_the_context_ends_it);
    RUN(it_stays_amid_a_request);
    RUN(for_a_request_in_another_context);
    RUN(who_waits_as_a_request_begins_ends_it);
    RUN(a_child_ends_nothing);
    RUN(once_for_a_request);
    RUN(when_it_does_not);
    RUN(not_with_nobody_beside);
    RUN(for_which_requests_it_does_not);
    RUN(for_requests_that_one_slice_is_too_short_for);
    RUN(as_long_as_a_slice_lasts);
    RUN(it_goes_and_comes_with_contexts);
    RUN(a_driver_that_refuses);
    RUN(not_during_a_capture);
    RUN(a_stream_that_is_gone);
    RUN(not_behind_another_stream);
    RUN(each_device_by_itself);
    RUN(who_frees_memory_ends_it);
    RUN(not_while_a_stream_is_taken_away);
    RUN(several_threads);
    RUN(not_where_it_is_in_the_way);
    return failures ? 1 : 0;
}
