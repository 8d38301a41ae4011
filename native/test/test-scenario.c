/*
 * test-scenario.c: scenarios in virtual time: tiny ones worked out by hand, and the demo.
 *
 * The tiny GPU has no latencies and one block to an SM, so that every number below can be followed on paper.
 */
#include "../sim/scenario.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int failures;

#define EQUAL(got, expected)                                                                                        \
    do {                                                                                                            \
        uint64_t got_ = (got), expected_ = (expected);                                                              \
        if (got_ != expected_) {                                                                                    \
            fprintf(stderr, "%s:%d: %s: got %" PRIu64 ", expected %" PRIu64 "\n", __func__, __LINE__, #got, got_,    \
                    expected_);                                                                                     \
            failures++;                                                                                             \
        }                                                                                                           \
    } while (0)

#define HOLDS(condition)                                                         \
    do {                                                                         \
        if (!(condition)) {                                                      \
            fprintf(stderr, "%s:%d: %s\n", __func__, __LINE__, #condition);      \
            failures++;                                                          \
        }                                                                        \
    } while (0)

#define HEADER                                                                                                  \
    "name,kind,stream,grid_x,grid_y,grid_z,block_x,block_y,block_z,registers,shared_bytes,bytes,duration_ns,gap_ns\n"

static rg_profile profile_of(const char *rows)
{
    static char text[1 << 16], error[RG_PROFILE_ERROR_BYTES];
    rg_profile p;
    snprintf(text, sizeof(text), HEADER "%s", rows);
    if (rg_profile_parse("rows", text, strlen(text), &p, error, sizeof(error)) < 0) {
        fprintf(stderr, "%s\n", error);
        exit(1);
    }
    return p;
}

static void run(const rg_scenario_options *o, rg_scenario_mode mode, const rg_scenario_client *clients, uint32_t count,
                rg_scenario_result *results)
{
    char error[256] = "";
    if (rg_scenario_run(o, mode, clients, count, results, error, sizeof(error)) < 0) {
        fprintf(stderr, "rg_scenario_run: %s\n", error);
        exit(1);
    }
}

/* `sms` SMs that hold one block of 32 threads each; launches take 1 us, nothing else takes time. */
static rg_scenario_options tiny(uint32_t sms, uint64_t duration_ns)
{
    rg_scenario_options o = rg_scenario_defaults();
    o.gpu.sms = sms;
    o.gpu.blocks_per_sm = 1;
    o.gpu.launch_ns = o.gpu.chain_ns = o.gpu.switch_ns = o.gpu.idle_ns = o.gpu.disturb_ns = 0;
    o.gpu.shared = 1;
    o.duration_ns = duration_ns;
    o.launch_ns = 1000;
    o.record_ns = o.wake_ns = 0;
    o.inflight = 2;
    o.unit_us = 0; /* every launch counts as one */
    o.spin_us = 1000;
    o.min_share_ppm = 0; /* unless a case says so, as the next */
    o.stop_us = 0;
    return o;
}

#define US 1000ull

/* Gap 5 us, launch at 5, kernel 5 to 15, back at 6, sync at 7 waits until 15. */
static void test_closed_loop(void)
{
    rg_profile p = profile_of("k,kernel,0,1,1,1,32,1,1,16,0,0,10000,5000\nsync,sync,0,0,0,0,0,0,0,0,0,0,0,1000\n");
    rg_scenario_client client = {.profiles = &p, .profile_count = 1};
    rg_scenario_options o = tiny(1, 100 * US);
    rg_scenario_result r;
    run(&o, RG_SCENARIO_ALONE, &client, 1, &r);
    EQUAL(r.requests, 7); /* begun at 0, 15, ... 90 */
    EQUAL(r.iterations, 7);
    EQUAL(r.launches, 7);
    EQUAL(r.p50_ns, 15 * US);
    EQUAL(r.p99_ns, 15 * US);
    client.iterations = 3;
    run(&o, RG_SCENARIO_ALONE, &client, 1, &r);
    EQUAL(r.requests, 3);
    rg_profile_free(&p);
}

/* Of two kinds that take 15 us and 35, the second also where nothing in its profile waits: drawn by seed 1 are 0, 1, 0, 1, 0, 1, 1, 0. */
static void test_several_profiles(void)
{
    rg_profile kinds[2] = {profile_of("k,kernel,0,1,1,1,32,1,1,16,0,0,10000,5000\nsync,sync,0,0,0,0,0,0,0,0,0,0,0,1000\n"),
                           profile_of("k,kernel,0,1,1,1,32,1,1,16,0,0,30000,5000\n")};
    rg_scenario_client client = {.profiles = kinds, .profile_count = 2, .draw_seed = 1};
    rg_scenario_options o = tiny(1, 100 * US);
    rg_scenario_result r;
    char error[256];
    run(&o, RG_SCENARIO_ALONE, &client, 1, &r);
    EQUAL(r.requests, 4); /* begun at 0, 15, 50, 65 */
    o.duration_ns = 1000 * US;
    client.iterations = 8;
    run(&o, RG_SCENARIO_ALONE, &client, 1, &r);
    EQUAL(r.requests, 8);
    EQUAL(r.p50_ns, 15 * US);
    EQUAL(r.p95_ns, 35 * US);
    /* As many of each as are drawn. */
    enum { MANY = 1000 };
    uint64_t short_ones = 0;
    for (uint64_t seed = 1; seed <= 3; seed++, short_ones = 0) {
        for (uint64_t i = 0; i < MANY; i++)
            short_ones += rg_profiles_draw(seed, i, 2) == 0;
        client.draw_seed = seed;
        client.iterations = 0;
        o.duration_ns = (short_ones * 15 + (MANY - short_ones) * 35) * US;
        run(&o, RG_SCENARIO_ALONE, &client, 1, &r);
        EQUAL(r.requests, MANY);
    }
    client.profile_count = 0;
    HOLDS(rg_scenario_run(&o, RG_SCENARIO_ALONE, &client, 1, &r, error, sizeof(error)) == -1);
    HOLDS(strcmp(error, "client 0: expected 1 to 16 profiles, got 0") == 0);
    for (int i = 0; i < 2; i++)
        rg_profile_free(&kinds[i]);
}

/* Due at 10, 20, 30, 40; each takes 15: done at 25, 40, 55, 70. */
static void test_open_loop(void)
{
    rg_profile p = profile_of("k,kernel,0,1,1,1,32,1,1,16,0,0,10000,5000\nsync,sync,0,0,0,0,0,0,0,0,0,0,0,1000\n");
    rg_scenario_client client = {
        .profiles = &p, .profile_count = 1, .open_loop = true, .arrivals = RG_ARRIVALS_UNIFORM, .mean_gap_ns = 10 * US};
    rg_scenario_options o = tiny(1, 50 * US);
    rg_scenario_result r;
    run(&o, RG_SCENARIO_ALONE, &client, 1, &r);
    EQUAL(r.requests, 4);
    EQUAL(r.p50_ns, 20 * US);
    EQUAL(r.p95_ns, 30 * US);
    EQUAL(r.p99_ns, 30 * US);
    rg_profile_free(&p);
}

/*
 * A kernel of 10 us back to back, launched every 1 us. The 16 that may be ahead are reached at 16, with 17 launched and
 * 1 finished; from then on one goes out for each that ends: at 20, 30, ... 90.
 */
static void test_running_ahead(void)
{
    rg_profile p = profile_of("k,kernel,0,1,1,1,32,1,1,16,0,0,10000,0\n");
    rg_scenario_client client = {.profiles = &p, .profile_count = 1};
    rg_scenario_options o = tiny(1, 100 * US);
    rg_scenario_result r;
    run(&o, RG_SCENARIO_ALONE, &client, 1, &r);
    EQUAL(r.iterations, 10);
    EQUAL(r.launches, 17 + 8);
    EQUAL(r.requests, 0);
    rg_profile_free(&p);
}

/* Two SMs, 8 blocks: 4 waves of a quarter each. Other streams run beside; the sync waits for both. */
static void test_waves_and_streams(void)
{
    rg_profile p = profile_of("a,kernel,0,1,1,1,32,1,1,16,0,0,40000,0\n"
                              "b,kernel,1,3,1,1,32,1,1,16,0,0,40000,0\n"
                              "sync,sync,0,0,0,0,0,0,0,0,0,0,0,0\n");
    rg_scenario_client client = {.profiles = &p, .profile_count = 1, .iterations = 1};
    rg_scenario_options o = tiny(2, 1000 * US);
    rg_scenario_result r;
    run(&o, RG_SCENARIO_ALONE, &client, 1, &r);
    /* a: 0 to 40 on one SM. b, 3 blocks of 20: two in turn on the other SM, 1 to 41; the third on a's, 40 to 60. */
    EQUAL(r.p50_ns, 60 * US);
    rg_profile_free(&p);
}

/* A client with one request, due at `due_ns`. */
static rg_scenario_client one_request(const rg_profile *profile, uint64_t due_ns)
{
    return (rg_scenario_client){.profiles = profile, .profile_count = 1,
                                .open_loop = true,
                                .arrivals = RG_ARRIVALS_UNIFORM,
                                .mean_gap_ns = due_ns,
                                .iterations = 1};
}

static const char high_rows[] = "k,kernel,0,1,1,1,32,1,1,16,0,0,50000,0\nsync,sync,0,0,0,0,0,0,0,0,0,0,0,0\n";
static const char low_rows[] = "k,kernel,0,1,1,1,32,1,1,16,0,0,10000,0\n";

/*
 * High: one request at 100, a kernel of 50 on an SM of its own. Best-effort: 10 us kernels, 2 in flight, so an event
 * for each. Launches at 0, 1, then whenever one is finished: 10, 20, ... 90. At 100 the high client is busy: it waits
 * until 150, launches, and at once again, for the kernel of 100 to 110 is found finished; then at 160, ... 190.
 */
static void test_gate(void)
{
    rg_profile high = profile_of(high_rows), low = profile_of(low_rows);
    rg_scenario_client clients[2] = {
        one_request(&high, 100 * US),
        {.profiles = &low, .profile_count = 1, .best_effort = true},
    };
    rg_scenario_options o = tiny(2, 200 * US);
    rg_scenario_result r[2];
    run(&o, RG_SCENARIO_GOVERNED, clients, 2, r);
    EQUAL(r[0].requests, 1);
    EQUAL(r[0].p50_ns, 50 * US);
    EQUAL(r[1].launches, 17);
    EQUAL(r[1].iterations, 16); /* all but the one launched at 190 */
    EQUAL(r[1].gate_waits, 1);
    EQUAL(r[1].gate_wait_ns, 50 * US);
    EQUAL(r[1].inflight_waits, 14); /* from 2, 11, 21, ... 91 and 152, 161, 171, 181 */
    EQUAL(r[1].inflight_wait_ns, 8 * US + 9 * 9 * US + 8 * US + 3 * 9 * US);
    EQUAL(r[1].starved, 0);

    /* Ungoverned nothing waits: back to back from 0, 20 kernels in 200 us; the high one has an SM of its own. */
    run(&o, RG_SCENARIO_UNGOVERNED, clients, 2, r);
    EQUAL(r[0].p50_ns, 50 * US);
    EQUAL(r[1].iterations, 20);
    EQUAL(r[1].gate_waits + r[1].inflight_waits, 0);

    /* Without the policy the gate is open. */
    o.policy = RG_POLICY_NONE;
    run(&o, RG_SCENARIO_GOVERNED, clients, 2, r);
    EQUAL(r[1].iterations, 20);
    EQUAL(r[1].inflight_waits, 0);
    rg_profile_free(&high);
    rg_profile_free(&low);
}

/*
 * A gate that sleeps: spins 5 us, then wakes 7 us after what it waits for. The high client is idle at 150, so the next
 * launch is at 157. In-flight waits beyond the spin look every 30 us and wake: from 2, spun to 7, then at 44.
 */
static void test_sleeping_gate(void)
{
    rg_profile high = profile_of(high_rows), low = profile_of(low_rows);
    rg_scenario_client clients[2] = {
        one_request(&high, 100 * US),
        {.profiles = &low, .profile_count = 1, .best_effort = true, .iterations = 3},
    };
    rg_scenario_options o = tiny(2, 400 * US);
    o.spin_us = 5;
    o.wake_ns = 7 * US;
    rg_scenario_result r[2];
    run(&o, RG_SCENARIO_GOVERNED, clients, 2, r);
    EQUAL(r[1].inflight_waits, 1);
    EQUAL(r[1].inflight_wait_ns, 42 * US);

    clients[1].best_effort = true;
    clients[1].iterations = 0;
    o.inflight = 0; /* no limit: only the high client holds it back */
    o.duration_ns = 300 * US;
    clients[0].iterations = 1;
    run(&o, RG_SCENARIO_GOVERNED, clients, 2, r);
    EQUAL(r[1].gate_waits, 1);
    EQUAL(r[1].inflight_waits, 0);
    rg_profile_free(&high);
    rg_profile_free(&low);
}

/* How often best-effort work was let go on by then, all ticks together. */
static uint64_t starved_in_ticks;
static int note_starved(void *user, rg_scenario_tick *t)
{
    (void)user;
    starved_in_ticks += t->starved;
    return 0;
}

/*
 * A high client that is busy for long: at 10, for 1000 us. Best-effort waits from 10 to 110 (bound 100 us), then
 * launches its batch of two at 110 and 111; the first of them is finished at 120: waits again until 220, and so on.
 */
static void test_starvation(void)
{
    rg_profile high = profile_of("k,kernel,0,1,1,1,32,1,1,16,0,0,1000000,0\nsync,sync,0,0,0,0,0,0,0,0,0,0,0,0\n");
    rg_profile low = profile_of(low_rows);
    rg_scenario_client clients[2] = {
        one_request(&high, 10 * US),
        {.profiles = &low, .profile_count = 1, .best_effort = true},
    };
    rg_scenario_options o = tiny(2, 500 * US);
    o.starvation_us = 100;
    o.tick_ns = 50 * US;
    o.on_tick = note_starved;
    starved_in_ticks = 0;
    rg_scenario_result r[2];
    run(&o, RG_SCENARIO_GOVERNED, clients, 2, r);
    EQUAL(r[1].starved, 4);          /* at 110, 220, 330, 440 */
    EQUAL(starved_in_ticks, 4);
    EQUAL(r[1].launches, 2 + 4 * 2); /* 0 and 1, then two for each */
    EQUAL(r[1].iterations, 10);
    rg_profile_free(&high);
    rg_profile_free(&low);
}

/*
 * As test_gate, with one launch allowed beside a busy high client: at 100 one is in flight (the kernel of 100 to 110),
 * so it waits until that is finished and launches at 110, 120, 130 and 140; at 150 the gate is open again.
 */
static void test_corun(void)
{
    rg_profile high = profile_of(high_rows), low = profile_of(low_rows);
    rg_scenario_client clients[2] = {one_request(&high, 100 * US), {.profiles = &low, .profile_count = 1, .best_effort = true}};
    rg_scenario_options o = tiny(2, 150 * US);
    o.corun = 1;
    rg_scenario_result r[2];
    run(&o, RG_SCENARIO_GOVERNED, clients, 2, r);
    EQUAL(r[0].p50_ns, 50 * US);
    EQUAL(r[1].launches, 11 + 4);
    EQUAL(r[1].gate_waits, 4);
    EQUAL(r[1].gate_wait_ns, 10 * US + 3 * 9 * US);
    rg_profile_free(&high);
    rg_profile_free(&low);
}

/*
 * One SM. Best-effort: kernels of 10 blocks of 10 us, back to back. High: due at 105. Governed, it has priority and
 * gets the SM when the running block ends, at 110; ungoverned when the whole kernel of 100 to 200 is done.
 */
static void test_priority(void)
{
    rg_profile high = profile_of(high_rows);
    rg_profile low = profile_of("k,kernel,0,10,1,1,32,1,1,16,0,0,100000,0\n");
    rg_scenario_client clients[2] = {one_request(&high, 105 * US), {.profiles = &low, .profile_count = 1, .best_effort = true}};
    rg_scenario_options o = tiny(1, 400 * US);
    rg_scenario_result r[2];
    run(&o, RG_SCENARIO_GOVERNED, clients, 2, r);
    EQUAL(r[0].p50_ns, 55 * US);
    run(&o, RG_SCENARIO_UNGOVERNED, clients, 2, r);
    EQUAL(r[0].p50_ns, 145 * US);
    rg_profile_free(&high);
    rg_profile_free(&low);
}

/*
 * One SM that is exchanged in 10 us and left in 5. Best-effort: kernels of 1000 us, back to back from 0. High: 50 us,
 * due at 105. What best-effort has by `end` is one kernel more than 1 us before.
 */
static void preempted(rg_scenario_options *o, uint64_t high_us, uint64_t end_us)
{
    rg_profile high = profile_of(high_rows);
    rg_profile low = profile_of("k,kernel,0,1,1,1,32,1,1,16,0,0,1000000,0\n");
    rg_scenario_client clients[2] = {one_request(&high, 105 * US), {.profiles = &low, .profile_count = 1, .best_effort = true}};
    rg_scenario_result r[2];
    for (uint64_t early = 0; early < 2; early++) {
        o->duration_ns = (end_us - early) * US;
        run(o, RG_SCENARIO_PREEMPT, clients, 2, r);
        EQUAL(r[0].p50_ns, high_us * US);
        EQUAL(r[1].iterations, 1 - early);
        EQUAL(r[1].gate_waits + r[1].inflight_waits, 0);
    }
    rg_profile_free(&high);
    rg_profile_free(&low);
}

/*
 * As test_starvation, with a tenth of the time for best-effort work: 10 us at 100, 200, ... us of the high client's work,
 * which began at 10. One kernel of 10 us empties the bucket at 110, 210, ... 410; the starvation bound itself is never reached.
 */
static void test_least_share(void)
{
    rg_profile high = profile_of("k,kernel,0,1,1,1,32,1,1,16,0,0,1000000,0\nsync,sync,0,0,0,0,0,0,0,0,0,0,0,0\n");
    rg_profile low = profile_of(low_rows);
    rg_scenario_client clients[2] = {one_request(&high, 10 * US), {.profiles = &low, .profile_count = 1, .best_effort = true}};
    rg_scenario_options o = tiny(2, 500 * US);
    o.starvation_us = 100;
    o.min_share_ppm = 100000;
    o.tick_ns = 50 * US;
    o.on_tick = note_starved;
    starved_in_ticks = 0;
    rg_scenario_result r[2], slo[2];
    run(&o, RG_SCENARIO_GOVERNED, clients, 2, r);
    EQUAL(r[1].shared, 4);
    EQUAL(starved_in_ticks, 4);
    EQUAL(r[1].starved, 0);
    EQUAL(r[1].launches, 2 + 4); /* 0 and 1, then at 110, 210, 310, 410 */
    EQUAL(r[1].charged_ns, 60 * US);
    o.policy = RG_POLICY_SLO;
    run(&o, RG_SCENARIO_GOVERNED, clients, 2, slo);
    HOLDS(memcmp(r, slo, sizeof(r)) == 0);
    rg_profile_free(&high);
    rg_profile_free(&low);
}

/*
 * Off the GPU it is the same, and with short slices alone: best-effort work that always has something queued has its share beside high
 * work that never ends, and beside requests of 500 us one after the other, between which the high client is idle for an instant.
 */
static void test_least_share_off_the_gpu(void)
{
    static const char *const HIGH[] = {
        "k,kernel,0,1,1,1,32,1,1,16,0,0,500000,0\n",
        "k,kernel,0,1,1,1,32,1,1,16,0,0,500000,0\nsync,sync,0,0,0,0,0,0,0,0,0,0,0,0\n",
    };
    static const uint32_t PPM[] = {10000, 50000, 300000, 500000};
    enum { KINDS = sizeof(HIGH) / sizeof(*HIGH), SHARES = sizeof(PPM) / sizeof(*PPM) };
    for (size_t i = 0; i < KINDS * SHARES * 2; i++) {
        rg_profile high = profile_of(HIGH[i / SHARES % KINDS]), low = profile_of("k,kernel,0,1,1,1,32,1,1,16,0,0,100000,0\n");
        rg_scenario_client clients[2] = {{.profiles = &high, .profile_count = 1}, {.profiles = &low, .profile_count = 1, .best_effort = true}};
        rg_scenario_options o = tiny(1, 5000000 * US);
        rg_scenario_result r[2];
        uint32_t ppm = PPM[i % SHARES];
        o.gpu.shared = 0;
        o.suspend_ns = o.resume_ns = o.gpu.preempt_ns = 0;
        o.suspend = i / SHARES / KINDS;
        o.high_slice_us = 10000;
        o.be_slice_us = 50;
        o.starvation_us = 100000;
        o.min_share_ppm = ppm;
        o.tick_ns = 100000 * US;
        o.on_tick = note_starved;
        starved_in_ticks = 0;
        run(&o, RG_SCENARIO_PREEMPT, clients, 2, r);
        HOLDS(starved_in_ticks <= r[1].starved && starved_in_ticks + 20 >= r[1].starved); /* but those since the last tick */
        double had = 1.0 * (double)r[1].iterations, share = had / (had + 5 * (double)r[0].iterations);
        HOLDS(share > 0.95e-6 * ppm);
        if (i / SHARES % KINDS == 0) /* else it has a slice between two requests, too */
            HOLDS(share < 1.05e-6 * ppm + 0.005); /* 50 us in 10 ms where it is not suspended */
        HOLDS(r[1].starved > 0);
        /* Requests with a break of more than 1 ms between any two owe nothing. */
        clients[0] = (rg_scenario_client){
            .profiles = &high, .profile_count = 1, .open_loop = true, .arrivals = RG_ARRIVALS_UNIFORM, .mean_gap_ns = 1700 * US, .iterations = 1000};
        run(&o, RG_SCENARIO_PREEMPT, clients, 2, r);
        EQUAL(r[1].starved, 0);
        rg_profile_free(&high);
        rg_profile_free(&low);
    }
}

/* It comes as rarely as is said, and is as much. */
static void test_least_share_once_in_a_period(void)
{
    static const uint32_t PERIODS_US[] = {0, 400000, 1000000};
    rg_profile high = profile_of("k,kernel,0,1,1,1,32,1,1,16,0,0,500000,0\n");
    rg_profile low = profile_of("k,kernel,0,1,1,1,32,1,1,16,0,0,100000,0\n");
    rg_scenario_client clients[2] = {{.profiles = &high, .profile_count = 1}, {.profiles = &low, .profile_count = 1, .best_effort = true}};
    for (size_t i = 0; i < sizeof(PERIODS_US) / sizeof(*PERIODS_US); i++) {
        rg_scenario_options o = tiny(1, 10000000 * US);
        rg_scenario_result r[2];
        o.gpu.shared = 0;
        o.suspend_ns = o.resume_ns = o.gpu.preempt_ns = 0;
        o.suspend = true;
        o.high_slice_us = 10000;
        o.be_slice_us = 50;
        o.starvation_us = 100000;
        o.min_share_ppm = 50000;
        o.share_period_us = PERIODS_US[i];
        run(&o, RG_SCENARIO_PREEMPT, clients, 2, r);
        uint64_t period_us = PERIODS_US[i] ? PERIODS_US[i] : 100000;
        uint64_t piece_us = (period_us + 10000) / 19; /* a twentieth of all three */
        /* First after 100 ms; a piece ends once the high client has had a slice after it. */
        uint64_t times = (10000000 - 100000) / (period_us + piece_us + 10000) + 1;
        HOLDS(r[1].starved == times);
        double share = 1e-5 * (double)r[1].iterations;
        HOLDS(share > 0.0475 && share < 0.0525 + 1e-7 * (double)piece_us);
    }
    rg_profile_free(&high);
    rg_profile_free(&low);
}

/*
 * Longer slices are no share: what high clients wait for as it is back keeps it off still. Two of them, whose requests are four kernels of 75 us, and
 * one with steps of 8 ms beside two best-effort clients.
 */
static void test_least_share_in_long_slices(void)
{
    const char *rows[] = {"k,kernel,0,1,1,1,32,1,1,16,0,0,75000,25000\nk,kernel,0,1,1,1,32,1,1,16,0,0,75000,25000\n"
                          "k,kernel,0,1,1,1,32,1,1,16,0,0,75000,25000\nk,kernel,0,1,1,1,32,1,1,16,0,0,75000,25000\nsync,sync,0,0,0,0,0,0,0,0,0,0,0,0\n",
                          "k,kernel,0,1,1,1,32,1,1,16,0,0,8000000,20000\nsync,sync,0,0,0,0,0,0,0,0,0,0,0,0\n"};
    static const uint32_t SLICES_US[] = {50, 2048, 16000};
    for (size_t i = 0; i < 2 * 3 * 2; i++) {
        size_t two_low = i / 6;
        uint32_t ppm = i % 2 && !two_low ? 300000 : 50000;
        rg_profile high = profile_of(rows[two_low]), low = profile_of("k,kernel,0,1,1,1,32,1,1,16,0,0,100000,0\n");
        rg_scenario_client clients[3] = {{.profiles = &high, .profile_count = 1}, {.profiles = two_low ? &low : &high, .profile_count = 1, .best_effort = two_low}, {.profiles = &low, .profile_count = 1, .best_effort = true}};
        rg_scenario_options o = tiny(1, 4000000 * US);
        rg_scenario_result r[3];
        o.gpu.shared = 0;
        o.suspend = o.drain = true;
        o.be_slice_us = SLICES_US[i / 2 % 3];
        o.high_slice_us = 10000;
        o.starvation_us = 100000;
        o.min_share_ppm = ppm;
        run(&o, RG_SCENARIO_PREEMPT, clients, 3, r);
        double had = 100e3 * (double)(r[2].iterations + two_low * r[1].iterations);
        HOLDS(had > 0.8e-6 * ppm * 4e9);
        rg_profile_free(&high);
        rg_profile_free(&low);
    }
}

/*
 * Stops, under MPS: best-effort kernels of 100 us on one SM, a stop in front of each but the first, and one request at 105 that has the other SM.
 */
static void test_stops(void)
{
    static const struct {
        const char *high;
        bool suspend;
        uint32_t defer_us, stop_us;
        uint64_t stop_ns, gpu_ns, latency_us, third_us; /* what a stop costs; the request's; when the third kernel ends */
    } CASES[] = {
        /* Launched at 105 and 306, done at 356. The second kernel ends at 200, and nobody stops. */
        {"k,kernel,0,1,1,1,32,1,1,16,0,0,50000,0\nk,kernel,0,1,1,1,32,1,1,16,0,0,50000,200000\n", false, 0, 100, 0, 0, 251, 300},
        /* Stopped, the third begins at 356: not when the request only waits, from 307 on. */
        {"k,kernel,0,1,1,1,32,1,1,16,0,0,50000,0\nk,kernel,0,1,1,1,32,1,1,16,0,0,50000,200000\n", true, 0, 100, 0, 0, 251, 456},
        /* With a stop for each 300 us the first one is in front of the fourth. */
        {"k,kernel,0,1,1,1,32,1,1,16,0,0,50000,0\nk,kernel,0,1,1,1,32,1,1,16,0,0,50000,200000\n", true, 0, 300, 0, 0, 251, 300},
        /* Put off for longer than it lasts, a request has it stopped as it waits: from 106 until it is done, at 255. */
        {"k,kernel,0,1,1,1,32,1,1,16,0,0,150000,0\n", true, 100000, 100, 0, 0, 150, 355},
        /* Each stop makes the kernel behind it longer by 3. */
        {"k,kernel,0,1,1,1,32,1,1,16,0,0,50000,0\n", false, 0, 100, 0, 3000, 50, 306},
        /* And the program's launch longer by 200: the second kernel is launched at 1, the third at 202. */
        {"k,kernel,0,1,1,1,32,1,1,16,0,0,50000,0\n", false, 0, 100, 200000, 0, 50, 302},
    };
    for (size_t i = 0; i < sizeof(CASES) / sizeof(*CASES); i++) {
        char rows[256];
        snprintf(rows, sizeof(rows), "%ssync,sync,0,0,0,0,0,0,0,0,0,0,0,0\n", CASES[i].high);
        rg_profile high = profile_of(rows), low = profile_of("k,kernel,0,1,1,1,32,1,1,16,0,0,100000,0\n");
        rg_scenario_client clients[2] = {one_request(&high, 105 * US), {.profiles = &low, .profile_count = 1, .best_effort = true}};
        rg_scenario_options o = tiny(2, 0);
        rg_scenario_result r[2];
        o.suspend = CASES[i].suspend;
        o.defer_us = CASES[i].defer_us;
        o.stop_us = CASES[i].stop_us;
        o.stop_ns = CASES[i].stop_ns;
        o.stop_gpu_ns = CASES[i].gpu_ns;
        o.suspend_delay_us = o.resume_delay_us = 0;
        for (uint64_t early = 0; early < 2; early++) {
            o.duration_ns = (CASES[i].third_us - early) * US;
            run(&o, RG_SCENARIO_PREEMPT, clients, 2, r);
            EQUAL(r[0].p50_ns, CASES[i].latency_us * US);
            EQUAL(r[1].iterations, 3 - early);
            EQUAL(r[1].gate_waits + r[1].inflight_waits, 0);
            EQUAL(r[1].suspensions, CASES[i].suspend);
        }
        rg_profile_free(&high);
        rg_profile_free(&low);
    }
}

/* In time slices, a suspension of requests for as long as they launch, of which little costs time. */
static rg_scenario_options preempting(uint64_t duration_ns, uint32_t slice_us)
{
    rg_scenario_options o = tiny(1, duration_ns);
    o.gpu.shared = 0;
    o.gpu.switch_ns = o.gpu.preempt_ns = 1 * US;
    o.suspend_delay_us = o.resume_delay_us = 0;
    o.suspend_ns = o.resume_ns = 2 * US;
    o.be_slice_us = slice_us;
    o.high_slice_us = 10000;
    o.suspend = o.drain = true;
    return o;
}

/*
 * A host's moments: of 32 us of work 2 are launches, and the gaps grow with the rest. Twice as long: 10 us before the first launch, at 10, 51 and 72; over in 72.
 * As ever, 37; as fast as can be, a tenth of the gaps.
 */
static void test_moments(void)
{
    static const rg_scenario_moment slow[] = {{0, 62 * US}}, fast[] = {{0, 1 * US}}, both[] = {{0, 62 * US}, {7200 * US, 32 * US}, {14000 * US, 32 * US}};
    rg_profile p = profile_of("k,kernel,0,1,1,1,32,1,1,16,0,0,1000,5000\nk,kernel,0,1,1,1,32,1,1,16,0,0,1000,20000\nsync,sync,0,0,0,0,0,0,0,0,0,0,0,10000\n");
    rg_scenario_options o = tiny(1, 7200 * US);
    rg_scenario_client client = {.profiles = &p, .profile_count = 1, .moments = slow, .moment_count = 1};
    rg_scenario_result r;
    run(&o, RG_SCENARIO_ALONE, &client, 1, &r);
    EQUAL(r.p50_ns, 72 * US);
    EQUAL(r.p99_ns, 72 * US);
    client.moments = fast;
    run(&o, RG_SCENARIO_ALONE, &client, 1, &r);
    EQUAL(r.p50_ns, 5500);
    /* 100 of the first, 185 of the others, ten times over. */
    o.duration_ns = 10 * 14032 * US;
    client.moments = both;
    client.moment_count = 3;
    run(&o, RG_SCENARIO_ALONE, &client, 1, &r);
    HOLDS(r.iterations > 2820 && r.iterations < 2870);
    EQUAL(r.p50_ns, 37 * US);
    EQUAL(r.p99_ns, 72 * US);
    rg_profile_free(&p);
}

/*
 * Best-effort clients that never rest, kernels of 100 us on one SM that is exchanged in 100: 20 or 21 in each of the driver's slices, and of two 80 in each
 * where one alone would be suspended in slices of 16 ms, of four 40.
 */
static void test_peers_slices(void)
{
    static const struct {
        uint32_t clients, slice_us;
        bool suspend;
        uint64_t least, most;
    } CASES[] = {{2, 50, true, 9450, 9600}, {2, 8000, true, 9700, 9800}, {2, 16000, true, 9850, 9900}, {4, 16000, true, 9700, 9800}, {2, 16000, false, 9450, 9600}};
    for (size_t i = 0; i < sizeof(CASES) / sizeof(*CASES); i++) {
        rg_profile low = profile_of("k,kernel,0,1,1,1,32,1,1,16,0,0,100000,0\n");
        rg_scenario_client clients[4] = {{.profiles = &low, .profile_count = 1, .best_effort = true}, {.profiles = &low, .profile_count = 1, .best_effort = true}, {.profiles = &low, .profile_count = 1, .best_effort = true}, {.profiles = &low, .profile_count = 1, .best_effort = true}};
        rg_scenario_options o = preempting(1000000 * US, CASES[i].slice_us);
        rg_scenario_result r[4];
        uint64_t all = 0;
        o.gpu.switch_ns = o.gpu.stopped_switch_ns = 100 * US;
        o.suspend = CASES[i].suspend;
        run(&o, RG_SCENARIO_PREEMPT, clients, CASES[i].clients, r);
        for (uint32_t k = 0; k < CASES[i].clients; k++)
            all += r[k].iterations;
        HOLDS(all >= CASES[i].least && all <= CASES[i].most);
        rg_profile_free(&low);
    }
}

/* Two best-effort clients in turn, tick by tick, but in the first and the last of ten. Counts what is launched by the one that waits, whose queue is full soon. */
static int alternate(void *user, rg_scenario_tick *t)
{
    uint64_t *waited = user, waits = t->turns == 1 ? 0 : t->turns == 2 ? 1 : 2;
    *waited += t->turns ? t->launched[waits] : 0;
    t->turns = t->now_ns >= 900000 * US ? 0 : t->turns == 1 ? 2 : 1;
    return 0;
}

/* While both have the GPU they are exchanged every 2 ms, for 100 us; in turns only as one ends. */
static void test_turns(void)
{
    rg_profile low = profile_of("k,kernel,0,1,1,1,32,1,1,16,0,0,100000,0\n");
    rg_scenario_client clients[2] = {{.profiles = &low, .profile_count = 1, .best_effort = true}, {.profiles = &low, .profile_count = 1, .best_effort = true}};
    rg_scenario_options o = preempting(1000000 * US, 50);
    rg_scenario_result r[2];
    uint64_t waited = 0;
    o.gpu.switch_ns = o.gpu.stopped_switch_ns = 100 * US;
    o.tick_ns = 100000 * US;
    o.on_tick = alternate;
    o.user = &waited;
    run(&o, RG_SCENARIO_PREEMPT, clients, 2, r);
    HOLDS(r[0].iterations + r[1].iterations >= 9800 && r[0].iterations + r[1].iterations <= 9950);
    HOLDS(r[0].iterations >= 4850 && r[0].iterations <= 5050);
    HOLDS(waited < 100);
    rg_profile_free(&low);
}

/*
 * Stops in time slices, on one SM that is exchanged in 10 us, and in 4 from a client that has stopped. Best-effort: kernels of 100 us, with a stop
 * in front of each; a request of 50 us is launched at 105, and waits from 106 on. The second kernel has 95 us left then.
 */
static void test_stops_in_slices(void)
{
    static const struct {
        uint32_t slice_us, defer_us;
        uint64_t kernel_us, latency_us, end_us; /* when the second kernel ends; of kernels of 2000 us the first */
    } CASES[] = {
        /* The driver's slice: the second kernel ends at 200, high 204 to 254. */
        {0, 0, 100, 149, 200},
        /* A slice ends at 150: high 160 to 210. Stopped until then, best-effort has 50 left at 220, since nothing stops what runs. */
        {50, 0, 100, 105, 270},
        /* Put off, it stops as the request waits, 30 us after that. */
        {0, 100000, 100, 149, 200},
        /* Long kernels are suspended, too: called at 105, in effect at 125, off the SM at 130. High 140 to 190. It waits, so that the call to
         * resume begins at 130: in effect at 145, and 1870 left at 200. */
        {0, 0, 2000, 85, 2070},
    };
    for (size_t i = 0; i < sizeof(CASES) / sizeof(*CASES); i++) {
        char rows[256];
        snprintf(rows, sizeof(rows), "k,kernel,0,1,1,1,32,1,1,16,0,0,%llu000,0\n", (unsigned long long)CASES[i].kernel_us);
        rg_profile high = profile_of(high_rows), low = profile_of(rows);
        rg_scenario_client clients[2] = {one_request(&high, 105 * US), {.profiles = &low, .profile_count = 1, .best_effort = true}};
        rg_scenario_options o = tiny(1, 0);
        rg_scenario_result r[2];
        o.gpu.shared = 0;
        o.gpu.switch_ns = 10 * US;
        o.gpu.stopped_switch_ns = 4 * US;
        o.gpu.preempt_ns = 5 * US;
        o.be_slice_us = CASES[i].slice_us;
        o.defer_us = CASES[i].defer_us;
        o.stop_us = 50;
        o.stop_ns = o.stop_gpu_ns = 0;
        o.suspend = o.drain = true;
        o.suspend_delay_us = CASES[i].defer_us ? 30 : 1000; /* not waited for where high clients stop streams by themselves */
        o.resume_delay_us = 0;
        o.suspend_ns = 20 * US;
        o.resume_ns = 15 * US;
        for (uint64_t early = 0; early < 2; early++) {
            o.duration_ns = (CASES[i].end_us - early) * US;
            run(&o, RG_SCENARIO_PREEMPT, clients, 2, r);
            EQUAL(r[0].p50_ns, CASES[i].latency_us * US);
            EQUAL(r[1].iterations, (CASES[i].kernel_us == 100 ? 2 : 1) - early);
            EQUAL(r[1].gate_waits + r[1].inflight_waits, 0);
            EQUAL(r[1].suspensions, 1);
        }
        rg_profile_free(&high);
        rg_profile_free(&low);
    }
}

/*
 * Of four requests every 15 ms, for which streams stop, the second is there while the first is served: the program launches for it 30 us after that one's
 * end. Best-effort work comes back for that twice; from then on it is known that requests follow one another, and waited for. Not where the
 * pause is longer (250 us), nor where it gives way late: each has a suspension of its own.
 */
static void test_requests_that_follow(void)
{
    enum { TIMES = 20, REQUESTS = 4 * TIMES };
    static const struct {
        uint32_t pause_us, defer_us;
        uint64_t suspensions, p95_us; /* of those that are second, once that is known: without another exchange of processes, of 20 us, and what runs */
    } CASES[] = {{30, 0, 3 * TIMES + 2, 289}, {250, 0, REQUESTS, 730}, {30, 1, REQUESTS, 319}};
    for (size_t i = 0; i < sizeof(CASES) / sizeof(*CASES); i++) {
        char rows[256];
        snprintf(rows, sizeof(rows), "k,kernel,0,1,1,1,32,1,1,16,0,0,100000,%u000\nsync,sync,0,0,0,0,0,0,0,0,0,0,0,0\n", CASES[i].pause_us);
        rg_profile high = profile_of(rows), low = profile_of("k,kernel,0,1,1,1,32,1,1,16,0,0,10000,0\n");
        uint64_t gaps_ns[] = {5000 * US, 0, 5000 * US, 5000 * US};
        rg_arrivals list = {.kind = RG_ARRIVALS_LIST, .gaps_ns = gaps_ns, .gap_count = 4};
        rg_scenario_client clients[2] = {
            {.profiles = &high, .profile_count = 1, .open_loop = true, .arrivals = RG_ARRIVALS_LIST, .list = &list, .iterations = REQUESTS},
            {.profiles = &low, .profile_count = 1, .best_effort = true},
        };
        rg_scenario_options o = preempting(TIMES * 15000 * US + 10000 * US, 50);
        rg_scenario_result r[2];
        o.gpu.stopped_switch_ns = 20 * US;
        o.stop_us = 10;
        o.stop_ns = o.stop_gpu_ns = 0;
        o.defer_us = CASES[i].defer_us;
        run(&o, RG_SCENARIO_PREEMPT, clients, 2, r);
        EQUAL(r[0].requests, REQUESTS);
        EQUAL(r[1].suspensions, CASES[i].suspensions);
        EQUAL(r[0].p95_ns, CASES[i].p95_us * US);
        rg_profile_free(&high);
        rg_profile_free(&low);
    }
}

/*
 * The same client has a long kernel behind a short one. Only while that one runs (0 to 100) a request stops its streams and no more: that ends at
 * 100, and from 104 on high runs for 50 us. Of the long one it has to be suspended: called at 105, off the SM at 130, high 140 to 190.
 */
static void test_stops_of_long_work(void)
{
    static const struct {
        uint64_t at_us, latency_us;
    } CASES[] = {{30, 124}, {105, 85}};
    for (size_t i = 0; i < sizeof(CASES) / sizeof(*CASES); i++) {
        rg_profile high = profile_of(high_rows);
        rg_profile low = profile_of("k,kernel,0,1,1,1,32,1,1,16,0,0,100000,0\nl,kernel,0,1,1,1,32,1,1,16,0,0,2000000,0\n");
        rg_scenario_client clients[2] = {one_request(&high, CASES[i].at_us * US), {.profiles = &low, .profile_count = 1, .best_effort = true}};
        rg_scenario_options o = tiny(1, 500 * US);
        rg_scenario_result r[2];
        o.gpu.shared = 0;
        o.gpu.switch_ns = 10 * US;
        o.gpu.stopped_switch_ns = 4 * US;
        o.gpu.preempt_ns = 5 * US;
        o.be_slice_us = 0;
        o.stop_us = 50;
        o.stop_ns = o.stop_gpu_ns = 0;
        o.suspend = o.drain = true;
        o.resume_delay_us = 0;
        o.suspend_ns = 20 * US;
        o.resume_ns = 15 * US;
        run(&o, RG_SCENARIO_PREEMPT, clients, 2, r);
        EQUAL(r[0].p50_ns, CASES[i].latency_us * US);
        EQUAL(r[1].suspensions, 1);
        rg_profile_free(&high);
        rg_profile_free(&low);
    }
}

/*
 * Beside kernels of 20 ms, in slices of 50 us. The call that takes those off the GPU is in effect 100 us after a request begins, which has the SM by then, and
 * loses it for 40. Requests that launch all at once are spared that from the second on; of those that launch on after 0.6 ms each has it, and
 * finds no best-effort work on the GPU then, 200 us after the end of what it had launched first.
 */
static void test_brief_requests(void)
{
    static const char *const HIGH[] = {
        "k,kernel,0,1,1,1,32,1,1,16,0,0,400000,0\nsync,sync,0,0,0,0,0,0,0,0,0,0,0,0\n",
        "k,kernel,0,1,1,1,32,1,1,16,0,0,400000,0\nk,kernel,0,1,1,1,32,1,1,16,0,0,400000,699000\nsync,sync,0,0,0,0,0,0,0,0,0,0,0,0\n",
    };
    for (int brief = 1; brief >= 0; brief--) {
        rg_profile high = profile_of(HIGH[!brief]), low = profile_of("k,kernel,0,1,1,1,32,1,1,16,0,0,20000000,0\n");
        rg_scenario_client clients[2] = {one_request(&high, 10000 * US), {.profiles = &low, .profile_count = 1, .best_effort = true}};
        rg_scenario_options o = preempting(100000 * US, 50);
        rg_scenario_result r[2];
        clients[0].iterations = 9;
        o.suspend_ns = 100 * US;
        o.gpu.disturb_ns = 40 * US;
        o.stop_us = 10;
        o.stop_ns = o.stop_gpu_ns = 0;
        run(&o, RG_SCENARIO_PREEMPT, clients, 2, r);
        EQUAL(r[0].requests, 9);
        EQUAL(r[0].p50_ns, (brief ? 44 + 1 + 400 : 700 + 400) * US); /* what is left of a slice, the exchange, and its own */
        rg_profile_free(&high);
        rg_profile_free(&low);
    }
}

/* A request of two kernels at 10 us: the loop is told for how long it was launched and for how long it was then waited for. */
static rg_scenario_wait told[4];
static uint32_t told_count;
static int note_waits(void *user, rg_scenario_tick *t)
{
    (void)user;
    for (uint32_t i = 0; i < t->wait_count && told_count < 4; i++)
        told[told_count++] = t->waits[i];
    return 0;
}

static void test_waits(void)
{
    rg_profile high = profile_of("k,kernel,0,1,1,1,32,1,1,16,0,0,100000,0\nk,kernel,0,1,1,1,32,1,1,16,0,0,20000,30000\n"
                                 "sync,sync,0,0,0,0,0,0,0,0,0,0,0,0\n");
    rg_profile low = profile_of(low_rows);
    rg_scenario_client clients[2] = {one_request(&high, 10 * US), {.profiles = &low, .profile_count = 1, .best_effort = true}};
    rg_scenario_options o = tiny(2, 500 * US);
    o.tick_ns = 50 * US;
    o.on_tick = note_waits;
    rg_scenario_result r[2];
    run(&o, RG_SCENARIO_GOVERNED, clients, 2, r);
    EQUAL(told_count, 1);
    EQUAL(told[0].client, 0);
    EQUAL(told[0].worked_ns, 32 * US); /* two launches of 1 us, and the host gap before the second */
    EQUAL(told[0].worked_ns + told[0].waited_ns, r[0].p50_ns);
    EQUAL(told[0].kind, 0); /* all are of one */
    /* Of two kinds that begin with another kernel, drawn by seed 1: 0, 1, 0, 1. */
    rg_profile kinds[2] = {high, profile_of("k,kernel,0,2,1,1,32,1,1,16,0,0,50000,0\nsync,sync,0,0,0,0,0,0,0,0,0,0,0,0\n")};
    clients[0].profiles = kinds;
    clients[0].profile_count = 2;
    clients[0].draw_seed = 1;
    clients[0].mean_gap_ns = 100 * US;
    clients[0].iterations = 4;
    told_count = 0;
    run(&o, RG_SCENARIO_GOVERNED, clients, 2, r);
    EQUAL(told_count, 4);
    for (int i = 0; i < 4; i++) {
        HOLDS(told[i].kind != 0);
        HOLDS((told[i].kind == told[0].kind) == (i % 2 == 0));
        HOLDS((told[i].kind == told[1].kind) == (i % 2 == 1));
    }
    rg_profile_free(&kinds[1]);
    rg_profile_free(&high);
    rg_profile_free(&low);
}

/* Who wants to know how far it is hears of it as often as was asked for, and changes nothing. */
static uint64_t heard_ns;
static uint32_t heard_count;
static void note_progress(void *user, uint64_t now_ns)
{
    (void)user;
    HOLDS(now_ns >= heard_ns + 100 * US);
    heard_ns = now_ns;
    heard_count++;
}

static void test_progress(void)
{
    rg_profile low = profile_of("k,kernel,0,1,1,1,32,1,1,16,0,0,30000,0\n");
    rg_scenario_client client = {.profiles = &low, .profile_count = 1, .best_effort = true};
    rg_scenario_options o = tiny(2, 1000 * US);
    rg_scenario_result silent, told_of;
    run(&o, RG_SCENARIO_GOVERNED, &client, 1, &silent);
    o.progress_ns = 100 * US;
    o.on_progress = note_progress;
    run(&o, RG_SCENARIO_GOVERNED, &client, 1, &told_of);
    HOLDS(heard_count >= 5 && heard_count <= 10);
    EQUAL(memcmp(&silent, &told_of, sizeof(silent)), 0);
    rg_profile_free(&low);
}

static void test_preempt(void)
{
    rg_scenario_options o = tiny(1, 0);
    o.gpu.shared = 0;
    o.gpu.switch_ns = 10 * US;
    o.gpu.preempt_ns = 5 * US;
    o.suspend_delay_us = o.resume_delay_us = 0;
    o.drain = false;
    o.suspend_ns = 20 * US;
    o.resume_ns = 15 * US;

    /* Slices alone: best-effort's third ends at 150. High 160 to 210; best-effort has 850 left at 220. */
    o.be_slice_us = 50;
    o.suspend = false;
    preempted(&o, 105, 1070);
    /* The GPU's slices, of 2048: the one that runs ends then, and the first kernel at 1000. */
    o.be_slice_us = 0;
    preempted(&o, 2048 + 10 + 50 - 105, 1000);

    /* Suspended: called at 105, in effect at 125, off the SM at 130. High 140 to 190. The call to resume begins at 220
     * and is in effect at 235; best-effort has 870 left at 245. */
    o.suspend = true;
    o.resume_delay_us = 30;
    preempted(&o, 85, 1115);
    /* Both: the slice ends at 150, and the call that begins at 165 has no use any more: in effect at 185. High is idle
     * at 210; resumed at 225, best-effort has 850 left at 235. */
    o.be_slice_us = 50;
    o.suspend_delay_us = 60;
    o.resume_delay_us = 0;
    preempted(&o, 105, 1085);
    /* In effect at 185 it takes the SM from high until 192. High is idle at 217; resumed at 232, best-effort has 850 left at 242. */
    o.gpu.disturb_ns = 7 * US;
    preempted(&o, 112, 1092);
    o.gpu.disturb_ns = 0;
    /* It takes effect at 255, and cannot be stopped at 210. Best-effort runs from 220 to 260, when the call returns.
     * Resumed at 275 it has 810 left at 285. */
    o.suspend_ns = 90 * US;
    preempted(&o, 105, 1095);
    /* A request that is over before the delay is: as with slices alone. */
    o.suspend_delay_us = 106;
    preempted(&o, 105, 1070);
    /* High waits from 106 on. Off the SM at 130, best-effort is resumed at 145, while high is on it, from 140 to 190;
     * it has 870 left at 200. */
    o.be_slice_us = 0;
    o.suspend_ns = 20 * US;
    o.suspend_delay_us = 0;
    o.drain = true;
    preempted(&o, 85, 1070);
    o.drain = false;

    /* A second request, at 210, before the resumption at 225 is begun: best-effort stays off from 130 to the end. */
    rg_profile high = profile_of(high_rows), low = profile_of("k,kernel,0,1,1,1,32,1,1,16,0,0,140000,0\n");
    rg_scenario_client clients[2] = {one_request(&high, 105 * US), {.profiles = &low, .profile_count = 1, .best_effort = true}};
    rg_scenario_result r[2];
    char error[256] = "";
    clients[0].iterations = 2;
    o.resume_delay_us = 35;
    o.duration_ns = 285 * US;
    run(&o, RG_SCENARIO_PREEMPT, clients, 2, r);
    EQUAL(r[0].requests, 2);
    EQUAL(r[0].p50_ns, 50 * US); /* the second: the SM is its own */
    EQUAL(r[0].p99_ns, 85 * US);
    EQUAL(r[1].iterations, 0);

    o.gpu.shared = 1;
    o.stop_us = 0;
    HOLDS(rg_scenario_run(&o, RG_SCENARIO_PREEMPT, clients, 2, r, error, sizeof(error)) == -1);
    HOLDS(strstr(error, "MPS"));
    rg_profile_free(&high);
    rg_profile_free(&low);
}

/*
 * Requests of 20 launches, one every 10 us: the tenth is made 90 us after the first. From the third request on the part of its launches
 * says when best-effort work is taken off the GPU; before that the time does.
 */
static void test_part_of_a_request(void)
{
    enum { REQUESTS = 6, LAUNCHES = 20 };
    char rows[LAUNCHES * 64] = "";
    for (int i = 0; i < LAUNCHES; i++)
        strcat(rows, "h,kernel,0,1,1,1,32,1,1,16,0,0,1000,9000\n");
    rg_profile high = profile_of(rows), low = profile_of("k,kernel,0,1,1,1,32,1,1,16,0,0,1000,0\n");
    rg_scenario_client clients[2] = {one_request(&high, 3000 * US), {.profiles = &low, .profile_count = 1, .best_effort = true}};
    clients[0].iterations = REQUESTS;
    rg_scenario_options o = preempting(20000 * US, 500);
    rg_scenario_result by_time[2], by_part[2];
    o.defer_us = 90;
    run(&o, RG_SCENARIO_PREEMPT, clients, 2, by_time);
    EQUAL(by_time[0].requests, REQUESTS);
    EQUAL(by_time[1].suspensions, REQUESTS);
    o.defer_ppm = 500000;
    run(&o, RG_SCENARIO_PREEMPT, clients, 2, by_part);
    EQUAL(by_part[0].p50_ns, by_time[0].p50_ns);
    EQUAL(by_part[0].p99_ns, by_time[0].p99_ns);
    EQUAL(by_part[1].finished, by_time[1].finished);
    /* A time that never comes: the first two are not cut short. */
    o.defer_us = 100000;
    run(&o, RG_SCENARIO_PREEMPT, clients, 2, by_part);
    EQUAL(by_part[1].suspensions, REQUESTS - 2);
    o.defer_ppm = 0;
    run(&o, RG_SCENARIO_PREEMPT, clients, 2, by_time);
    EQUAL(by_time[1].suspensions, 0);
    /* What is left of a request takes 95 us 5 us after its ninth launch: (80 + 2 of 10) / 11 each. In one that is slower it is as much. */
    o.need_us = 95;
    run(&o, RG_SCENARIO_PREEMPT, clients, 2, by_part);
    EQUAL(by_part[1].suspensions, REQUESTS - 2);
    o.need_us = 0;
    o.defer_us = 85;
    run(&o, RG_SCENARIO_PREEMPT, clients, 2, by_time);
    EQUAL(by_part[0].p50_ns, by_time[0].p50_ns);
    o.defer_us = 100000;
    /* In slices that are long, a request that waits sooner than that cuts the slice short. */
    o.be_slice_us = 5000;
    run(&o, RG_SCENARIO_PREEMPT, clients, 2, by_part);
    EQUAL(by_part[1].suspensions, REQUESTS);
    /* The gate, under MPS: best-effort work goes on until then, and waits at each request. */
    o.gpu.shared = 1;
    o.gpu.sms = 2;
    o.defer_us = 90;
    run(&o, RG_SCENARIO_GOVERNED, clients, 2, by_time);
    o.defer_ppm = 500000;
    run(&o, RG_SCENARIO_GOVERNED, clients, 2, by_part);
    EQUAL(by_part[1].gate_waits, REQUESTS);
    EQUAL(by_part[1].gate_wait_ns, by_time[1].gate_wait_ns);
    o.defer_us = 100000;
    run(&o, RG_SCENARIO_GOVERNED, clients, 2, by_part);
    EQUAL(by_part[1].gate_waits, REQUESTS - 2);
    rg_profile_free(&high);
    rg_profile_free(&low);
}

/*
 * Requests of 20 launches and of 40, one every 10 us, drawn as 0, 1, 0, 1, 0, 1, 1, 0, 0, 0; best-effort work waits from the half of one on. Told
 * apart by the first launch, each kind is known after two of its own. Not told apart, those of 40 are what is usual from the sixth request on, and
 * the shorter ones of the next four wait at their last launch only.
 */
static void test_kinds_of_requests(void)
{
    enum { REQUESTS = 10 };
    static const struct {
        const char *name; /* of the first kernel of the longer ones; the others' is "h" */
        int grid;
        bool reports; /* a replay, whose kernels have no names of their own */
        uint64_t waits;
    } cases[] = {{"h", 1, false, 4}, {"g", 1, false, REQUESTS - 4}, {"h", 2, false, REQUESTS - 4}, {"g", 1, true, 4}, {"g", 2, true, REQUESTS - 4}};
    rg_profile low = profile_of("k,kernel,0,1,1,1,32,1,1,16,0,0,1000,0\n");
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        rg_profile kinds[2];
        for (int kind = 0; kind < 2; kind++) {
            char rows[40 * 64];
            char *at = rows + sprintf(rows, "%s,kernel,0,%d,1,1,32,1,1,16,0,0,1000,9000\n", kind ? cases[i].name : "h", kind ? cases[i].grid : 1);
            for (int k = 1; k < 20 << kind; k++)
                at += sprintf(at, "h,kernel,0,1,1,1,32,1,1,16,0,0,1000,9000\n");
            kinds[kind] = profile_of(rows);
        }
        rg_scenario_client clients[2] = {one_request(kinds, 3000 * US), {.profiles = &low, .profile_count = 1, .best_effort = true}};
        clients[0].profile_count = 2;
        clients[0].draw_seed = 1;
        clients[0].iterations = REQUESTS;
        clients[0].reports = cases[i].reports;
        rg_scenario_options o = tiny(3, 35000 * US);
        rg_scenario_result r[2];
        o.defer_us = 100000;
        o.defer_ppm = 500000;
        run(&o, RG_SCENARIO_GOVERNED, clients, 2, r);
        EQUAL(r[0].requests, REQUESTS);
        EQUAL(r[1].gate_waits, cases[i].waits);
        for (int kind = 0; kind < 2; kind++)
            rg_profile_free(&kinds[kind]);
    }
    rg_profile_free(&low);
}

/*
 * Requests of 80 launches, one every 25 us, each of which begins 34 us after the last one is over, before anybody is awake: best-effort work
 * comes back in each that leaves the GPU to it for 1 ms, and in no other. Of the first two nothing is known yet.
 */
static void test_one_request_after_the_other(void)
{
    enum { REQUESTS = 10, LAUNCHES = 80 };
    char rows[LAUNCHES * 64] = "";
    for (int i = 0; i < LAUNCHES; i++)
        strcat(rows, "h,kernel,0,1,1,1,32,1,1,16,0,0,1000,24000\n");
    rg_profile high = profile_of(rows), low = profile_of("k,kernel,0,1,1,1,32,1,1,16,0,0,1000,0\n");
    rg_scenario_client clients[2] = {
        {.profiles = &high, .profile_count = 1, .open_loop = true, .arrivals = RG_ARRIVALS_UNIFORM, .mean_gap_ns = 2010 * US, .iterations = REQUESTS},
        {.profiles = &low, .profile_count = 1, .best_effort = true},
    };
    rg_scenario_options o = preempting(25000 * US, 50);
    rg_scenario_result r[2];
    o.resume_delay_us = 150;
    o.defer_us = 100000;
    o.starvation_us = 1000000;
    o.need_us = 500;
    run(&o, RG_SCENARIO_PREEMPT, clients, 2, r);
    EQUAL(r[0].requests, REQUESTS);
    EQUAL(r[1].suspensions, REQUESTS - 2);
    uint64_t between = r[1].finished;
    o.need_us = 1200;
    run(&o, RG_SCENARIO_PREEMPT, clients, 2, r);
    EQUAL(r[1].suspensions, 1);
    HOLDS(r[1].finished < between);
    /* Who has had the GPU between them is owed nothing. */
    o.need_us = 500;
    o.starvation_us = 10000;
    o.be_slice_us = 2000;
    o.duration_ns = 2000000 * US;
    clients[0].iterations = 900;
    run(&o, RG_SCENARIO_PREEMPT, clients, 2, r);
    EQUAL(r[0].requests, 900);
    EQUAL(r[1].starved, 0);
    rg_profile_free(&high);
    rg_profile_free(&low);
}

/*
 * Requests of 80 us one after the other, so that high work goes on for 400 us with an idle instant every 80: nothing leaks into
 * them once a break (1 ms of idle time) is behind; the same work without any break gets the share.
 */
static void test_least_share_leaves_requests_alone(void)
{
    rg_profile high = profile_of("k,kernel,0,1,1,1,32,1,1,16,0,0,80000,0\nsync,sync,0,0,0,0,0,0,0,0,0,0,0,0\n");
    rg_profile low = profile_of("k,kernel,0,1,1,1,32,1,1,16,0,0,10000,0\n");
    rg_scenario_client clients[2] = {
        {.profiles = &high, .profile_count = 1, .open_loop = true, .arrivals = RG_ARRIVALS_UNIFORM, .mean_gap_ns = 1080 * US, .iterations = 10},
        {.profiles = &low, .profile_count = 1, .best_effort = true},
    };
    rg_scenario_options o = tiny(2, 20000 * US);
    o.starvation_us = 100;
    o.min_share_ppm = 500000;
    rg_scenario_result r[2];
    run(&o, RG_SCENARIO_GOVERNED, clients, 2, r);
    EQUAL(r[0].p99_ns, 80 * US);
    EQUAL(r[1].shared + r[1].starved, 0);
    clients[0].mean_gap_ns = 1079 * US; /* idle for 999 us: it is one spell now */
    run(&o, RG_SCENARIO_GOVERNED, clients, 2, r);
    HOLDS(r[1].shared > 0);
    rg_profile_free(&high);
    rg_profile_free(&low);
}

/* ---- fair */

/* The folder of the recorded profiles: RIGEL_PROFILES, or profiles/ of the tree this program was built in. */
static rg_profile recorded(const char *name)
{
    const char *folder = getenv("RIGEL_PROFILES");
    char self[3072] = "", path[4096], error[RG_PROFILE_ERROR_BYTES];
    if (!folder) {
        ssize_t bytes = readlink("/proc/self/exe", self, sizeof(self) - 1);
        char *slash = bytes > 0 ? strrchr(self, '/') : NULL;
        if (slash)
            *slash = '\0';
        snprintf(path, sizeof(path), "%s/../../profiles/%s.csv", self, name);
    } else {
        snprintf(path, sizeof(path), "%s/%s.csv", folder, name);
    }
    rg_profile p;
    if (rg_profile_read(path, &p, error, sizeof(error)) < 0) {
        fprintf(stderr, "%s (RIGEL_PROFILES names another folder)\n", error);
        exit(1);
    }
    return p;
}

/* GPU time that each of `count` clients was charged in `duration_ns`, all launching without a rest. */
static void fair_run(uint32_t mps, const rg_profile *const *profiles, const uint32_t *weights, uint32_t count,
                     uint64_t duration_ns, rg_scenario_result *r)
{
    rg_scenario_client clients[RG_SCENARIO_MAX_CLIENTS] = {0};
    rg_scenario_result again[RG_SCENARIO_MAX_CLIENTS];
    for (uint32_t i = 0; i < count; i++)
        clients[i] = (rg_scenario_client){.profiles = profiles[i], .profile_count = 1, .best_effort = i > 0, .weight = weights[i]};
    rg_scenario_options o = rg_scenario_defaults();
    o.gpu.shared = mps;
    o.duration_ns = duration_ns;
    o.policy = RG_POLICY_FAIR;
    run(&o, RG_SCENARIO_GOVERNED, clients, count, r);
    run(&o, RG_SCENARIO_GOVERNED, clients, count, again);
    HOLDS(memcmp(r, again, count * sizeof(*r)) == 0);
}

/* Whether all shares are within `percent` of what the weights say. */
static bool proportional(const rg_scenario_result *r, const uint32_t *weights, uint32_t count, uint64_t percent)
{
    uint64_t all = 0, weight = 0;
    for (uint32_t i = 0; i < count; i++) {
        all += r[i].charged_ns;
        weight += weights[i];
    }
    for (uint32_t i = 0; i < count; i++) {
        uint64_t due = all * weights[i] / weight, got = r[i].charged_ns;
        uint64_t off = got > due ? got - due : due - got;
        if (off * 100 > due * percent) {
            fprintf(stderr, "client %u: charged %" PRIu64 " ns, due %" PRIu64 "\n", i, got, due);
            return false;
        }
    }
    return true;
}

/* One of four is of class high, two have kernels of 6 ms beside the others' of a few us: all get the same. */
static void test_fair_shares(void)
{
    rg_profile training = recorded("h200-resnet50-train-bs64"), gpt = recorded("h200-gpt2-train-bs8x512");
    const rg_profile *profiles[4] = {&training, &gpt, &training, &gpt};
    static const uint32_t equal[4] = {1000, 1000, 1000, 1000}, doubling[3] = {1000, 2000, 4000};
    rg_scenario_result r[4];
    for (uint32_t mps = 0; mps < 2; mps++) {
        fair_run(mps, profiles, equal, 4, 1000000000, r);
        HOLDS(proportional(r, equal, 4, 3));
        fair_run(mps, profiles, doubling, 3, 1000000000, r);
        HOLDS(proportional(r, doubling, 3, 5));
    }
    rg_profile_free(&training);
    rg_profile_free(&gpt);
}

/*
 * Kernels of 1 ms on one SM, two clients of equal weight, 2 ms of quantum. The second comes at 20 ms, when the first has had all:
 * it starts level, and does not get the 20 ms that it missed: at 60 ms the first has had 40, the second 20, give or take the
 * quantum and what is in flight.
 */
static void test_fair_idle_time_is_not_saved(void)
{
    rg_profile now = profile_of("k,kernel,0,1,1,1,32,1,1,16,0,0,1000000,0\n");
    rg_profile later = profile_of("k,kernel,0,1,1,1,32,1,1,16,0,0,1000000,20000000\n"
                                  "k,kernel,0,1,1,1,32,1,1,16,0,0,1000000,0\n"
                                  "k,kernel,0,1,1,1,32,1,1,16,0,0,1000000,0\n"
                                  "k,kernel,0,1,1,1,32,1,1,16,0,0,1000000,0\n"
                                  "k,kernel,0,1,1,1,32,1,1,16,0,0,1000000,0\n"
                                  "k,kernel,0,1,1,1,32,1,1,16,0,0,1000000,0\n"
                                  "k,kernel,0,1,1,1,32,1,1,16,0,0,1000000,0\n"
                                  "k,kernel,0,1,1,1,32,1,1,16,0,0,1000000,0\n"
                                  "k,kernel,0,1,1,1,32,1,1,16,0,0,1000000,0\n"
                                  "k,kernel,0,1,1,1,32,1,1,16,0,0,1000000,0\n"
                                  "sync,sync,0,0,0,0,0,0,0,0,0,0,0,0\n");
    rg_scenario_client clients[2] = {{.profiles = &now, .profile_count = 1, .best_effort = true},
                                     {.profiles = &later, .profile_count = 1, .best_effort = true, .iterations = 1}};
    rg_scenario_options o = tiny(1, 60000 * US);
    o.policy = RG_POLICY_FAIR;
    rg_scenario_result r[2];
    run(&o, RG_SCENARIO_GOVERNED, clients, 2, r);
    /* Its 10 kernels take the second at least 10, at most twice that and the quantum, and what the first had in flight. */
    EQUAL(r[1].requests, 1);
    HOLDS(r[1].p50_ns >= (20000 + 18000) * US);
    HOLDS(r[1].p50_ns <= (20000 + 20000 + 2000 + 2000 + 1000) * US);
    rg_profile_free(&now);
    rg_profile_free(&later);
}

/* Kernels of 4.4 s, longer than 32 bits hold in ns, are charged as the longest ones: beside those of 1 s they get about half, not nearly all. */
static void test_fair_charges_the_longest_kernels(void)
{
    rg_profile lengthy = profile_of("k,kernel,0,1,1,1,32,1,1,16,0,0,4400000000,0\n");
    rg_profile brief = profile_of("k,kernel,0,1,1,1,32,1,1,16,0,0,1000000000,0\n");
    rg_scenario_client clients[2] = {{.profiles = &lengthy, .profile_count = 1, .best_effort = true},
                                     {.profiles = &brief, .profile_count = 1, .best_effort = true}};
    rg_scenario_options o = tiny(1, 400000000 * US);
    o.policy = RG_POLICY_FAIR;
    o.starvation_us = 100000000;
    rg_scenario_result r[2];
    run(&o, RG_SCENARIO_GOVERNED, clients, 2, r);
    HOLDS(r[1].iterations >= 150 && r[1].iterations <= 250);
    rg_profile_free(&lengthy);
    rg_profile_free(&brief);
}

/* ---- orion */

/*
 * Two SMs. High: a kernel of 100 us bound by compute on one, from 10. Best-effort: 10 us on one SM, bound by memory in one case
 * and by compute in the other. The first runs beside it, the second waits until 110. No more than 10 us outstanding, so one
 * at a time: at 0, 10, 20, ... in the first case.
 */
static rg_scenario_result orion_run(const char *low_row, uint32_t sms_limit)
{
    static char text[512], error[RG_PROFILE_ERROR_BYTES];
    static const char names[] = "Name,Profile,Memory_footprint,SM_usage,Duration\n";
    rg_profile high, low;
    snprintf(text, sizeof(text), "%sgemm,1,0,1,100000\n", names);
    if (rg_profile_parse("high", text, strlen(text), &high, error, sizeof(error)) < 0)
        exit(1);
    char rows[512];
    snprintf(rows, sizeof(rows), "%s%s", names, low_row);
    if (rg_profile_parse("low", rows, strlen(rows), &low, error, sizeof(error)) < 0)
        exit(1);
    rg_scenario_client clients[2] = {one_request(&high, 10 * US), {.profiles = &low, .profile_count = 1, .best_effort = true}};
    rg_scenario_options o = tiny(3, 200 * US);
    o.policy = RG_POLICY_ORION;
    o.sms_limit = sms_limit;
    o.outstanding_us = 10;
    rg_scenario_result r[2];
    run(&o, RG_SCENARIO_GOVERNED, clients, 2, r);
    EQUAL(r[0].p50_ns, 100 * US);
    rg_profile_free(&high);
    rg_profile_free(&low);
    return r[1];
}

static void test_orion(void)
{
    rg_scenario_result beside = orion_run("relu,0,0,1,10000\n", 2), same = orion_run("gemm,1,0,1,10000\n", 2);
    rg_scenario_result wide = orion_run("relu,0,0,2,10000\n", 2), narrow = orion_run("relu,0,0,2,10000\n", 3);
    rg_scenario_result unknown = orion_run("relu,-1,0,1,10000\n", 2);
    EQUAL(beside.iterations, 20); /* 0 to 200 without a gap */
    EQUAL(beside.gate_waits, 0);
    EQUAL(unknown.iterations, 20);
    EQUAL(narrow.iterations, 20);
    EQUAL(same.iterations, 10); /* 0, then 110 to 190 */
    EQUAL(same.gate_wait_ns, 100 * US);
    EQUAL(wide.iterations, same.iterations);
}

/*
 * One kernel of 20 us, which is all that may be outstanding, and nothing more. It never waits for it; the other best-effort client, which
 * launches as many as it may, goes on all the same once it is finished.
 */
static void test_orion_of_the_idle_nothing_is_outstanding(void)
{
    rg_profile few = profile_of("k,kernel,0,1,1,1,32,1,1,16,0,0,20000,0\n"), many = profile_of(low_rows);
    rg_scenario_client clients[2] = {{.profiles = &few, .profile_count = 1, .best_effort = true, .iterations = 1},
                                     {.profiles = &many, .profile_count = 1, .best_effort = true}};
    rg_scenario_options o = tiny(2, 1000 * US);
    o.policy = RG_POLICY_ORION;
    o.inflight = 8;
    o.outstanding_us = 20;
    o.spin_us = 5; /* until then it looks at its own alone */
    rg_scenario_result r[2];
    run(&o, RG_SCENARIO_GOVERNED, clients, 2, r);
    EQUAL(r[0].launches, 1);
    HOLDS(r[1].iterations >= 40);
    EQUAL(r[1].starved, 0);
    rg_profile_free(&few);
    rg_profile_free(&many);
}

/* Virtual time of a run; with --table as long as the demo's. */
static uint64_t recorded_ns = 3000000000;

/* ---- The demo: the recorded profiles, ResNet-50 inference at Poisson 60/s beside ResNet-50 training */

/* What is compared to the last integer. */
typedef struct {
    uint64_t requests, p50_ns, p95_ns, p99_ns;                   /* high */
    uint64_t iterations, launches, gate_wait_ns, inflight_waits; /* best-effort */
} numbers;

static void compare(const char *what, const rg_scenario_result r[2], const numbers *expected)
{
    numbers got = {r[0].requests,   r[0].p50_ns,   r[0].p95_ns,       r[0].p99_ns,
                   r[1].iterations, r[1].launches, r[1].gate_wait_ns, r[1].inflight_waits};
    if (memcmp(&got, expected, sizeof(got)) == 0)
        return;
    fprintf(stderr, "%s: the numbers changed. If the model, the policy or the profiles did, record:\n    {", what);
    for (size_t i = 0; i < sizeof(got) / sizeof(uint64_t); i++)
        fprintf(stderr, "%s%" PRIu64, i ? ", " : "", ((const uint64_t *)&got)[i]);
    fprintf(stderr, "},\n");
    failures++;
}

/* A training job of class high that never rests: the others get a twentieth of the GPU's time, together, and nobody nothing. */
static void test_demo_least_share(void)
{
    rg_profile training = recorded("h200-resnet50-train-bs64"), gpt = recorded("h200-gpt2-train-bs8x512");
    rg_scenario_client clients[4] = {{.profiles = &training, .profile_count = 1},
                                     {.profiles = &training, .profile_count = 1},
                                     {.profiles = &training, .profile_count = 1, .best_effort = true},
                                     {.profiles = &gpt, .profile_count = 1, .best_effort = true}};
    rg_scenario_options o = rg_scenario_defaults();
    rg_scenario_result r[4];
    o.duration_ns = 2000000000;
    for (uint32_t mps = 0; mps < 2; mps++) {
        o.gpu.shared = mps;
        run(&o, RG_SCENARIO_GOVERNED, clients + 1, 2, r);
        HOLDS(r[1].charged_ns * 100 >= o.duration_ns * 9 / 2 && r[1].charged_ns * 100 <= o.duration_ns * 6);
        run(&o, RG_SCENARIO_GOVERNED, clients, 4, r); /* two and two: GPT-2's kernels of 6 ms overdraw */
        HOLDS((r[2].charged_ns + r[3].charged_ns) * 100 >= o.duration_ns * 9 / 2);
        HOLDS((r[2].charged_ns + r[3].charged_ns) * 100 <= o.duration_ns * 8);
        HOLDS(r[2].charged_ns * 100 >= o.duration_ns && r[3].charged_ns * 100 >= o.duration_ns);
    }
    rg_profile_free(&training);
    rg_profile_free(&gpt);
}

static void test_demo(const char *gpu, uint32_t mps, const numbers expected[3])
{
    static const char *const modes[] = {"alone", "ungoverned", "governed"};
    rg_profile serving = recorded("h200-resnet50-infer-bs4"), training = recorded("h200-resnet50-train-bs64");
    rg_scenario_client clients[2] = {
        {.profiles = &serving, .profile_count = 1,
         .open_loop = true,
         .arrivals = RG_ARRIVALS_POISSON,
         .mean_gap_ns = 1000000000 / 60,
         .seed = 1},
        {.profiles = &training, .profile_count = 1, .best_effort = true},
    };
    rg_scenario_options o = rg_scenario_defaults();
    o.gpu.shared = mps;
    o.duration_ns = recorded_ns;
    rg_scenario_result r[3][2], again[2];
    for (int mode = RG_SCENARIO_ALONE; mode <= RG_SCENARIO_GOVERNED; mode++) {
        run(&o, (rg_scenario_mode)mode, clients, 2, r[mode]);
        run(&o, (rg_scenario_mode)mode, clients, 2, again);
        HOLDS(memcmp(r[mode], again, sizeof(again)) == 0);
        char what[64];
        snprintf(what, sizeof(what), "%s, %s", gpu, modes[mode]);
        compare(what, r[mode], &expected[mode]);
    }
    HOLDS(2 * r[RG_SCENARIO_UNGOVERNED][0].p99_ns >= 3 * r[RG_SCENARIO_ALONE][0].p99_ns);
    HOLDS(5 * r[RG_SCENARIO_GOVERNED][0].p99_ns <= 6 * r[RG_SCENARIO_ALONE][0].p99_ns);
    HOLDS(5 * r[RG_SCENARIO_GOVERNED][1].iterations >= 4 * r[RG_SCENARIO_ALONE][1].iterations);
    rg_profile_free(&serving);
    rg_profile_free(&training);
}

/* Recorded with this program; see compare(). */
static const numbers in_slices[3] = {
    {189, 2466200, 4633839, 6812699, 94, 75383, 0, 0},
    {189, 3639288, 7273997, 10669195, 82, 66320, 0, 0},
    {189, 2466200, 4809418, 6812699, 80, 63589, 460176342, 5159},
};
static const numbers under_mps[3] = {
    {189, 2466200, 4633839, 6812699, 94, 75383, 0, 0},
    {189, 4767739, 9440530, 14057347, 92, 73861, 0, 0},
    {189, 2466200, 4633839, 6812699, 81, 64761, 444036887, 5228},
};

/* ---- Without MPS: the policy beside slices and suspension, for two recorded pairs; --table prints what it comes to */

enum { ALONE, SLICED, PRIORITY, SHORT_SLICES, SUSPENDED, SUSPENDED_UNTIL_IDLE, PRIORITY_SHORT_SLICES, STOPPED, WAYS };
static const char *const way_names[WAYS] = {
    "alone",     "time slices",          "priority",                  "slices of 50 us",
    "suspended", "suspended until idle", "priority, slices of 50 us", "stopped",
};

static void run_way(int way, const rg_scenario_client clients[2], rg_scenario_result r[2])
{
    static const rg_scenario_mode modes[WAYS] = {
        RG_SCENARIO_ALONE,   RG_SCENARIO_UNGOVERNED, RG_SCENARIO_GOVERNED, RG_SCENARIO_PREEMPT,
        RG_SCENARIO_PREEMPT, RG_SCENARIO_PREEMPT,    RG_SCENARIO_PREEMPT,  RG_SCENARIO_PREEMPT,
    };
    rg_scenario_options o = rg_scenario_defaults();
    o.duration_ns = recorded_ns;
    o.stop_us = way == STOPPED ? o.stop_us : 0;
    o.suspend = way == SUSPENDED || way == SUSPENDED_UNTIL_IDLE || way == STOPPED;
    o.drain = way == SUSPENDED || way == STOPPED;
    o.gate = way == PRIORITY_SHORT_SLICES;
    run(&o, modes[way], clients, 2, r);
}

static void test_pair(const char *high, const char *low, bool table, const numbers expected[WAYS])
{
    rg_profile serving = recorded(high), training = recorded(low);
    rg_scenario_client clients[2] = {
        {.profiles = &serving, .profile_count = 1,
         .open_loop = true,
         .arrivals = RG_ARRIVALS_POISSON,
         .mean_gap_ns = 1000000000 / 60,
         .seed = 1},
        {.profiles = &training, .profile_count = 1, .best_effort = true},
    };
    rg_scenario_result r[WAYS][2];
    for (int way = 0; way < WAYS; way++) {
        run_way(way, clients, r[way]);
        char what[128];
        snprintf(what, sizeof(what), "%s, %s", high, way_names[way]);
        if (!table)
            compare(what, r[way], &expected[way]);
        else
            printf("%-25s %-27s p50 %.2f  p99 %.2f  share %.2f\n", high, way_names[way],
                   (double)r[way][0].p50_ns / (double)r[ALONE][0].p50_ns,
                   (double)r[way][0].p99_ns / (double)r[ALONE][0].p99_ns,
                   (double)r[way][1].iterations / (double)r[ALONE][1].iterations);
    }
    /* Suspended, the high client has nearly what it has alone, for no less of the others' work than 0.95 of the
     * gate's. */
    HOLDS(20 * r[SUSPENDED][0].p99_ns <= 21 * r[ALONE][0].p99_ns);
    HOLDS(r[SUSPENDED][0].p99_ns <= r[PRIORITY][0].p99_ns);
    HOLDS(20 * r[SUSPENDED][1].iterations >= 19 * r[PRIORITY][1].iterations);
    rg_profile_free(&serving);
    rg_profile_free(&training);
}

/* Recorded with this program; see compare(). */
static const numbers resnet50[WAYS] = {
    {189, 2466200, 4633839, 6812699, 94, 75383, 0, 0},
    {189, 3639288, 7273997, 10669195, 82, 66320, 0, 0},
    {189, 2466200, 4809418, 6812699, 80, 63589, 460176342, 5159},
    {189, 2757177, 5215793, 7950699, 77, 61936, 0, 0},
    {189, 2466200, 4633839, 6812699, 77, 62517, 0, 0},
    {189, 2466200, 4633839, 6812699, 77, 62539, 0, 0},
    {189, 2757177, 5215793, 7950699, 76, 60865, 330503716, 5144},
    {189, 2757177, 5008892, 7950699, 76, 61518, 0, 0},
};
static const numbers bert_gpt2[WAYS] = {
    {189, 3589706, 7056430, 10448286, 33, 31974, 0, 0},
    {189, 7775362, 23967337, 32483692, 25, 24454, 0, 0},
    {189, 4531051, 8876912, 11515071, 25, 23994, 647826439, 3005},
    {189, 3593490, 7182138, 10700198, 26, 24456, 0, 0},
    {189, 3801822, 7250886, 10894549, 25, 24454, 0, 0},
    {189, 3799423, 7239823, 10655725, 25, 24454, 0, 0},
    {189, 3593490, 7182138, 10700198, 25, 24276, 195669625, 3127},
    {189, 3599879, 7257125, 10692764, 25, 24454, 0, 0},
};

int main(int argc, char **argv)
{
    bool table = argc > 1 && strcmp(argv[1], "--table") == 0;
    if (table) {
        recorded_ns = 10000000000;
        test_pair("h200-resnet50-infer-bs4", "h200-resnet50-train-bs64", table, resnet50);
        test_pair("h200-bert-infer-bs2x128", "h200-gpt2-train-bs8x512", table, bert_gpt2);
        return failures ? 1 : 0;
    }
    test_closed_loop();
    test_several_profiles();
    test_open_loop();
    test_running_ahead();
    test_waves_and_streams();
    test_gate();
    test_sleeping_gate();
    test_starvation();
    test_priority();
    test_corun();
    test_preempt();
    test_stops();
    test_moments();
    test_peers_slices();
    test_turns();
    test_stops_in_slices();
    test_requests_that_follow();
    test_stops_of_long_work();
    test_brief_requests();
    test_part_of_a_request();
    test_kinds_of_requests();
    test_one_request_after_the_other();
    test_least_share();
    test_waits();
    test_progress();
    test_least_share_leaves_requests_alone();
    test_least_share_off_the_gpu();
    test_least_share_once_in_a_period();
    test_least_share_in_long_slices();
    test_fair_shares();
    test_fair_idle_time_is_not_saved();
    test_fair_charges_the_longest_kernels();
    test_orion();
    test_orion_of_the_idle_nothing_is_outstanding();
    test_demo_least_share();
    test_demo("time slices", 0, in_slices);
    test_demo("MPS", 1, under_mps);
    test_pair("h200-resnet50-infer-bs4", "h200-resnet50-train-bs64", table, resnet50);
    test_pair("h200-bert-infer-bs2x128", "h200-gpt2-train-bs8x512", table, bert_gpt2);
    return failures ? 1 : 0;
}
