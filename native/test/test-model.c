/*
 * test-model.c: the model of a GPU against schedules worked out by hand, and against random programs.
 *
 * Every number compared here stands in a comment that says where it comes from. Times are exact: the model has no
 * tolerance. Unless a test says otherwise the GPU has 2 SMs of 4 blocks and 1024 threads, and nothing takes time but
 * blocks and bytes (no launch latency, no switch cost).
 */
#include "../sim/model.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static const char *test_name;
static int failures;

__attribute__((format(printf, 3, 4))) static void check(bool ok, int line, const char *format, ...)
{
    if (ok) return;
    va_list args;
    va_start(args, format);
    fprintf(stderr, "test-model.c:%d: %s: ", line, test_name);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    failures++;
}
#define EQUAL(got, want) \
    do { \
        unsigned long long got_ = (unsigned long long)(got), want_ = (unsigned long long)(want); \
        check(got_ == want_, __LINE__, "%s is %llu, expected %llu", #got, got_, want_); \
    } while (0)
#define TRUE(condition) check(condition, __LINE__, "not true: %s", #condition)

static const rg_model_params tiny = {
    .name = "tiny",
    .sms = 2,
    .threads_per_sm = 1024,
    .blocks_per_sm = 4,
    .registers_per_sm = 65536,
    .shared_bytes_per_sm = 64 * 1024,
    .threads_per_block = 1024,
    .shared_bytes_per_block = 64 * 1024,
    .memory_bytes = 1000,
    .memory_bytes_per_us = 10000, /* 10 bytes/ns */
    .h2d_bytes_per_us = 1000,     /* 1 byte/ns */
    .d2h_bytes_per_us = 1000,
    .slice_ns = 1000,
    .shared = 1,
};

static rg_model *model_new(const rg_model_params *params)
{
    rg_model *m = mmap(NULL, sizeof *m, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (m == MAP_FAILED) abort();
    rg_model_init(m, params);
    return m;
}
static void model_free(rg_model *m) { munmap(m, sizeof *m); }

static uint32_t context(rg_model *m)
{
    uint32_t c = 0;
    EQUAL(rg_model_add_context(m, &c), 0);
    return c;
}
static uint32_t stream(rg_model *m, uint32_t c, int priority)
{
    uint32_t s = 0;
    EQUAL(rg_model_create_stream(m, c, priority, RG_MODEL_NON_BLOCKING, &s), 0);
    return s;
}
static uint32_t event(rg_model *m, uint32_t c)
{
    uint32_t e = 0;
    EQUAL(rg_model_create_event(m, c, &e), 0);
    return e;
}

/* Blocks of 256 threads: four fill one of the tiny GPU's SMs, eight the whole. */
static rg_model_kernel blocks(uint64_t count, uint64_t block_ns)
{
    return (rg_model_kernel){.blocks = count, .threads = 256, .registers = 32, .block_ns = block_ns};
}
static uint64_t launch(rg_model *m, uint32_t s, uint64_t count, uint64_t block_ns)
{
    rg_model_kernel k = blocks(count, block_ns);
    uint64_t ticket = 0;
    EQUAL(rg_model_submit_kernel(m, s, &k, RG_MODEL_INHERIT, &ticket), 0);
    return ticket;
}
static uint64_t copy(rg_model *m, uint32_t s, rg_model_transfer t, uint64_t bytes)
{
    uint64_t ticket = 0;
    EQUAL(rg_model_submit_transfer(m, s, t, bytes, &ticket), 0);
    return ticket;
}

/* Lets time pass until the ticket is finished; its time, or NEVER if nothing more happens. */
static uint64_t end_of(rg_model *m, uint32_t s, uint64_t ticket)
{
    while (!rg_model_done(m, s, ticket)) {
        uint64_t next = rg_model_next_event(m);
        if (next == RG_MODEL_NEVER) return next;
        rg_model_advance(m, next);
    }
    return m->now;
}
static void run_out(rg_model *m)
{
    for (uint64_t next; (next = rg_model_next_event(m)) != RG_MODEL_NEVER;) rg_model_advance(m, next);
}
static uint64_t busy_ns(rg_model *m, uint32_t c)
{
    rg_model_context_stats s;
    EQUAL(rg_model_get_context_stats(m, c, &s), 0);
    return s.busy_ns;
}

/* Blocks resident on each SM, from the runs. */
static void residents(const rg_model *m, uint32_t domain, unsigned *out)
{
    const rg_model_domain *d = &m->domains[domain];
    for (uint32_t i = 0, sm = 0; i < d->runs; i++)
        for (; sm < d->run_end[i]; sm++) out[sm] = (unsigned)((m->whole & 0xffff) - (d->room[i] & 0xffff));
}

static void test_waves(void)
{
    rg_model *m = model_new(&tiny);
    uint32_t c = context(m), s = stream(m, c, 0);
    /* 8 blocks fit at once; 20 blocks are waves of 8, 8 and 4: 3 x 100 ns. A wave is one event. */
    EQUAL(end_of(m, s, launch(m, s, 20, 100)), 300);
    rg_model_stats stats;
    rg_model_get_stats(m, &stats);
    EQUAL(stats.cohorts, 3);
    /* Both SMs are busy all the time: the last 4 blocks go 2 and 2. */
    EQUAL(stats.sm_busy_ns, 600);
    EQUAL(busy_ns(m, c), 300);
    /* One block more than a wave costs a whole wave, on one SM: 2 x 50 ns, 2 x 50 + 50 SM-ns. */
    EQUAL(end_of(m, s, launch(m, s, 9, 50)), 400);
    rg_model_get_stats(m, &stats);
    EQUAL(stats.sm_busy_ns, 600 + 150);
    rg_model_context_stats cs;
    rg_model_get_context_stats(m, c, &cs);
    EQUAL(cs.kernels, 2);
    EQUAL(cs.blocks, 29);
    model_free(m);
}

static uint32_t occupancy(const rg_model *m, uint32_t threads, uint32_t registers, uint32_t shared)
{
    rg_model_kernel k = {.blocks = 1, .threads = threads, .registers = registers, .shared_bytes = shared};
    return rg_model_occupancy(&m->p, &k);
}

static void test_occupancy(void)
{
    rg_model *m = model_new(rg_model_preset("h200"));
    /* H200: 2048 threads, 32 blocks, 65536 registers, 228 KiB of shared memory an SM, 1 KiB of it reserved a block. */
    EQUAL(occupancy(m, 256, 32, 0), 8);           /* 2048 / 256 threads */
    EQUAL(occupancy(m, 1024, 32, 0), 2);          /* 2048 / 1024; registers: 65536 / (32 x 1024) = 2 as well */
    EQUAL(occupancy(m, 32, 16, 0), 32);           /* 64 warps, but 32 blocks */
    EQUAL(occupancy(m, 256, 128, 0), 2);          /* 128 x 256 = 32768 registers a block */
    EQUAL(occupancy(m, 256, 129, 0), 1);          /* 129 x 32 is rounded up to 4352 a warp: 34816 a block */
    EQUAL(occupancy(m, 96, 40, 0), 17);           /* 3 warps of 1280 registers: 65536 / 3840; the calculator: 48 warps, 16 */
    EQUAL(occupancy(m, 128, 32, 100 * 1024), 2);  /* 228 / 101 */
    EQUAL(occupancy(m, 128, 32, 227 * 1024), 1);
    EQUAL(occupancy(m, 128, 32, 227 * 1024 + 1), 0); /* more than one block may have */
    EQUAL(occupancy(m, 1025, 32, 0), 0);
    EQUAL(occupancy(m, 1024, 65, 0), 0);          /* 32 warps x 2304 = 73728 registers: no SM has that */
    EQUAL(occupancy(m, 0, 32, 0), 0);
    uint32_t c = context(m), s = stream(m, c, 0);
    rg_model_kernel k = {.blocks = 1, .threads = 1025, .block_ns = 1};
    EQUAL(rg_model_submit_kernel(m, s, &k, 0, NULL), RG_MODEL_INVALID);
    k = (rg_model_kernel){.blocks = 0, .threads = 32, .block_ns = 1};
    EQUAL(rg_model_submit_kernel(m, s, &k, 0, NULL), RG_MODEL_INVALID);
    /* A whole wave of the H200: 132 SMs x 8 blocks = 1056; 1057 blocks need a second one. 2000 ns launch each. */
    EQUAL(end_of(m, s, launch(m, s, 1056, 1000)), 3000);
    EQUAL(end_of(m, s, launch(m, s, 1057, 1000)), 3000 + 4000);
    TRUE(rg_model_preset("a100") && rg_model_preset("l4") && !rg_model_preset("abacus"));
    model_free(m);
}

static void test_placement(void)
{
    rg_model *m = model_new(&tiny);
    uint32_t c = context(m), s1 = stream(m, c, 0), s2 = stream(m, c, 0);
    unsigned on[2];
    /* Each block goes where most room is, the lower SM first: 0, 1, 0. */
    launch(m, s1, 3, 100);
    rg_model_advance(m, 0);
    residents(m, 0, on);
    EQUAL(on[0], 2);
    EQUAL(on[1], 1);
    /* Two more: SM 1 has more room (3 against 2), then both have 2, so SM 0. */
    launch(m, s2, 2, 100);
    rg_model_advance(m, 1);
    residents(m, 0, on);
    EQUAL(on[0], 3);
    EQUAL(on[1], 2);
    run_out(m);
    residents(m, 0, on);
    EQUAL(on[0] + on[1], 0);
    model_free(m);
}

static void test_two_kernels(void)
{
    rg_model *m = model_new(&tiny);
    uint32_t c = context(m), s1 = stream(m, c, 0), s2 = stream(m, c, 0);
    /* A has 6 of 8 places until 100. B's first 2 blocks fit beside it (0 to 50), its other 2 follow (50 to 100). */
    uint64_t a = launch(m, s1, 6, 100), b = launch(m, s2, 4, 50);
    rg_model_advance(m, 99);
    TRUE(!rg_model_done(m, s1, a) && !rg_model_done(m, s2, b));
    rg_model_advance(m, 100);
    TRUE(rg_model_done(m, s1, a) && rg_model_done(m, s2, b));
    EQUAL(busy_ns(m, c), 100);
    /* Different footprints: A's blocks of 1024 threads fill an SM each, so B waits for all of A; then 4 + 4 blocks. */
    rg_model_kernel big = {.blocks = 2, .threads = 1024, .registers = 32, .block_ns = 70};
    uint64_t t;
    EQUAL(rg_model_submit_kernel(m, s1, &big, RG_MODEL_INHERIT, &t), 0);
    b = launch(m, s2, 8, 30);
    EQUAL(end_of(m, s1, t), 170);
    EQUAL(end_of(m, s2, b), 200);
    model_free(m);
}

/*
 * Two kernels that each fill the GPU as far as an SM holds them: A by shared memory (one block an SM), B by threads (three beside A's
 * block). Together they want 1.75 of the GPU: with full contention each goes at 1 / 1.75 of its speed.
 */
static void test_contention(void)
{
    rg_model_params p = tiny;
    p.sm_contention = 1000;
    p.mixed_contention = 500;
    rg_model *m = model_new(&p);
    uint32_t c = context(m), s1 = stream(m, c, 0), s2 = stream(m, c, 0);
    rg_model_kernel a = {.blocks = 2, .threads = 256, .registers = 32, .shared_bytes = 60 * 1024, .block_ns = 1000};
    uint64_t ta, tb;
    EQUAL(rg_model_submit_kernel(m, s1, &a, RG_MODEL_INHERIT, &ta), 0);
    tb = launch(m, s2, 6, 700);
    /* Rates are in 1/1024: 1024 / 1.75 is 585. B ends when 700 x 1024 are done, A has 300 x 1024 left, at full speed. */
    EQUAL(end_of(m, s2, tb), 1226); /* 716800 / 585 = 1225.3 */
    EQUAL(end_of(m, s1, ta), 1226 + 300); /* 1024000 - 1226 x 585 = 306790, / 1024 = 299.6 */

    /* What begins later slows from then on: A alone to 500, then 500 more of it at 585, to 500 + 512000 / 585 = 1375.2. */
    uint64_t from = m->now;
    EQUAL(rg_model_submit_kernel(m, s1, &a, RG_MODEL_INHERIT, &ta), 0);
    rg_model_advance(m, from + 500);
    tb = launch(m, s2, 6, 10000);
    EQUAL(end_of(m, s1, ta), from + 1376);
    run_out(m);
    EQUAL(m->domains[0].clock[0].weight + m->domains[0].clock[1].weight, 0);

    /* A bound by memory: half of it counts for B, which has 0.25 too much then (1024 / 1.25 = 819), and A takes half of the time
     * that the 0.75 too much would add (1024 / 1.375 = 744). */
    from = m->now;
    a.memory_bound = true;
    a.block_ns = 10000;
    EQUAL(rg_model_submit_kernel(m, s1, &a, RG_MODEL_INHERIT, &ta), 0);
    tb = launch(m, s2, 6, 700);
    EQUAL(end_of(m, s2, tb), from + 876); /* 716800 / 819 = 875.2 */
    EQUAL(end_of(m, s1, ta), from + 876 + 9364); /* (10240000 - 876 x 744) / 1024 = 9363.5 */
    model_free(m);
}

/* A roofline: two kernels on an SM each, that alone take 0.8 and 0.4 of the bandwidth: 1.2 of it together. */
static void test_bandwidth(void)
{
    rg_model *m = model_new(&tiny);
    uint32_t c = context(m), s1 = stream(m, c, 0), s2 = stream(m, c, 0);
    rg_model_kernel a = blocks(4, 1000), b = blocks(4, 1000);
    uint64_t ta, tb;
    a.memory_bound = b.memory_bound = true;
    a.memory_permille = 800;
    b.memory_permille = 400;
    EQUAL(rg_model_submit_kernel(m, s1, &a, RG_MODEL_INHERIT, &ta), 0);
    EQUAL(rg_model_submit_kernel(m, s2, &b, RG_MODEL_INHERIT, &tb), 0);
    EQUAL(end_of(m, s2, tb), 1201); /* 1024 / 1.2 = 853; 1024000 / 853 = 1200.5 */
    EQUAL(m->now, end_of(m, s1, ta));
    /* One that is not bound by it keeps its 0.4, and leaves 0.6 of the 0.8: 1024 / 1.333 = 768. */
    uint64_t from = m->now;
    b.memory_bound = false;
    EQUAL(rg_model_submit_kernel(m, s1, &a, RG_MODEL_INHERIT, &ta), 0);
    EQUAL(rg_model_submit_kernel(m, s2, &b, RG_MODEL_INHERIT, &tb), 0);
    EQUAL(end_of(m, s2, tb), from + 1000);
    EQUAL(end_of(m, s1, ta), from + 1000 + 250); /* (1024 - 768) x 1000 / 1024 */
    /* Within the bandwidth nothing is slower, and as nodes of a graph they count alike. */
    uint32_t g = 0;
    from = m->now;
    EQUAL(rg_model_create_graph(m, c, &g), 0);
    EQUAL(rg_model_graph_kernel(m, g, &a, RG_MODEL_INHERIT), 0);
    a.memory_permille = 200;
    EQUAL(rg_model_submit_graph(m, s1, g, &ta), 0);
    EQUAL(rg_model_submit_kernel(m, s2, &a, RG_MODEL_INHERIT, &tb), 0);
    EQUAL(end_of(m, s1, ta), from + 1000);
    model_free(m);
}

/* L: 16 blocks of 100 ns, two waves. H: 4 blocks of 30 ns, comes at 10. */
static void test_priority(void)
{
    rg_model *m = model_new(&tiny);
    uint32_t c = context(m), low = stream(m, c, 0), high = stream(m, c, -5);
    uint64_t l = launch(m, low, 16, 100);
    rg_model_advance(m, 10);
    uint64_t h = launch(m, high, 4, 30);
    /* Nothing is preempted. At 100 H has the first 4 places, L's second wave starts with 4, the rest follows at 130. */
    EQUAL(end_of(m, high, h), 130);
    TRUE(!rg_model_done(m, low, l));
    EQUAL(end_of(m, low, l), 230);
    /* The priority of one launch beats that of its stream: same schedule with H in a priority-0 stream. */
    uint32_t plain = stream(m, c, 0);
    uint64_t start = m->now;
    l = launch(m, low, 16, 100);
    rg_model_advance(m, start + 10);
    rg_model_kernel k = blocks(4, 30);
    EQUAL(rg_model_submit_kernel(m, plain, &k, -1, &h), 0);
    EQUAL(end_of(m, plain, h), start + 130);
    EQUAL(end_of(m, low, l), start + 230);
    /* And a stream's priority can be changed for what comes after. */
    int priority;
    EQUAL(rg_model_set_priority(m, plain, -9), 0);
    EQUAL(rg_model_get_priority(m, plain, &priority), 0);
    TRUE(priority == -5);
    start = m->now;
    l = launch(m, low, 16, 100);
    h = launch(m, plain, 4, 30);
    /* Both arrive at the same instant: H goes first (0 to 30); L: 4 at 0, 4 at 30, 4 at 100, 4 at 130. */
    EQUAL(end_of(m, plain, h), start + 30);
    EQUAL(end_of(m, low, l), start + 230);
    model_free(m);
}

static void test_fifo(void)
{
    rg_model *m = model_new(&tiny);
    uint32_t c = context(m), s1 = stream(m, c, 0), s2 = stream(m, c, 0);
    /* As above without priority: L's second wave is placed before H, which starts at 200. */
    uint64_t l = launch(m, s1, 16, 100);
    rg_model_advance(m, 10);
    uint64_t h = launch(m, s2, 4, 30);
    EQUAL(end_of(m, s1, l), 200);
    EQUAL(end_of(m, s2, h), 230);
    /* L of 12 blocks leaves 4 places in its second wave: H runs in them, from 100 to 130. */
    uint64_t start = m->now;
    l = launch(m, s1, 12, 100);
    rg_model_advance(m, start + 10);
    h = launch(m, s2, 4, 30);
    EQUAL(end_of(m, s2, h), start + 130);
    EQUAL(end_of(m, s1, l), start + 200);
    model_free(m);
}

static void test_latencies(void)
{
    rg_model_params p = tiny;
    p.launch_ns = 20;
    p.chain_ns = 10;
    rg_model *m = model_new(&p);
    uint32_t c = context(m), s = stream(m, c, 0);
    /* First: submitted at 0, starts at 20, ends at 120. Second, submitted with it: 120 + 10 to 230. */
    uint64_t a = launch(m, s, 1, 100), b = launch(m, s, 1, 100);
    EQUAL(end_of(m, s, a), 120);
    EQUAL(end_of(m, s, b), 230);
    /* An idle stream: 500 + 20. Submitted 5 ns before the one before it ends (620): not before 615 + 20. */
    rg_model_advance(m, 500);
    a = launch(m, s, 1, 100);
    rg_model_advance(m, 615);
    b = launch(m, s, 1, 100);
    EQUAL(end_of(m, s, a), 620);
    EQUAL(end_of(m, s, b), 735);
    model_free(m);
}

static void test_slices(void)
{
    rg_model_params p = tiny;
    p.shared = 0;
    rg_model *m = model_new(&p);
    uint32_t a = context(m), b = context(m), sa = stream(m, a, 0), sb = stream(m, b, -5);
    /* 2500 ns each, slices of 1000: A 0, B 1000, A 2000, B 3000, A 4000 to 4500 (done, yields), B to 5000.
     * Stream priority does not reach across time slices. */
    uint64_t ta = launch(m, sa, 8, 2500), tb = launch(m, sb, 8, 2500);
    EQUAL(end_of(m, sa, ta), 4500);
    EQUAL(end_of(m, sb, tb), 5000);
    EQUAL(busy_ns(m, a), 2500);
    EQUAL(busy_ns(m, b), 2500);
    rg_model_stats stats;
    rg_model_get_stats(m, &stats);
    EQUAL(stats.switches, 5);
    EQUAL(stats.sm_busy_ns, 2 * 5000);
    model_free(m);

    /* The same with 100 ns a switch: B 1100-2100, A 2200-3200, B 3300-4300, A 4400-4900, B 5000-5500. */
    p.switch_ns = 100;
    m = model_new(&p);
    a = context(m), b = context(m), sa = stream(m, a, 0), sb = stream(m, b, 0);
    ta = launch(m, sa, 8, 2500), tb = launch(m, sb, 8, 2500);
    EQUAL(end_of(m, sa, ta), 4900);
    EQUAL(end_of(m, sb, tb), 5500);
    EQUAL(busy_ns(m, a), 2500);
    EQUAL(busy_ns(m, b), 2500);
    rg_model_get_stats(m, &stats);
    EQUAL(stats.sm_busy_ns, 2 * 5000);
    model_free(m);
}

static void test_slice_grid(void)
{
    rg_model_params p = tiny;
    p.shared = 0;
    rg_model *m = model_new(&p);
    uint32_t a = context(m), b = context(m), sa = stream(m, a, 0), sb = stream(m, b, 0);
    /* Alone, A's slices end at 1000, 2000, 3000 without effect. B comes at 2500: the slice ends at 3000. B is done and
     * yields at 3200; A goes on with the 7000 ns it had left: 10200. */
    uint64_t ta = launch(m, sa, 8, 10000);
    rg_model_advance(m, 2500);
    uint64_t tb = launch(m, sb, 8, 200);
    EQUAL(end_of(m, sb, tb), 3200);
    EQUAL(end_of(m, sa, ta), 10200);
    /* A work that comes exactly at a boundary gets the SMs there: A from 10200, B's 50 ns at 11200. */
    ta = launch(m, sa, 8, 5000);
    rg_model_advance(m, 11200);
    tb = launch(m, sb, 8, 50);
    EQUAL(end_of(m, sb, tb), 11250);
    EQUAL(end_of(m, sa, ta), 15250);
    /* Several waves across slices: B has 3 waves of 300 from 15250 on; A comes at 15300, its slice starts at 16250 -
     * but B is done at 16150 and yields. A: 16150 to 16250. */
    tb = launch(m, sb, 24, 300);
    rg_model_advance(m, 15300);
    ta = launch(m, sa, 8, 100);
    EQUAL(end_of(m, sb, tb), 16150);
    EQUAL(end_of(m, sa, ta), 16250);
    model_free(m);
}

/* Three contexts take turns in order; new blocks of a frozen context are dispatched when it is back. */
static void test_slices_of_three(void)
{
    rg_model_params p = tiny;
    p.shared = 0;
    p.switch_ns = 10;
    rg_model *m = model_new(&p);
    uint32_t s[3];
    uint64_t t[3];
    for (int i = 0; i < 3; i++) s[i] = stream(m, context(m), 0);
    /* Each 16 blocks of 600 ns: two waves, 1200 ns. Slices of 1000, 10 between: 0: 0-1000, 1: 1010-2010, 2: 2020-3020,
     * 0: 3030-3230, 1: 3240-3440, 2: 3450-3650. Wave 2 of each starts after 600 ns of its own time. */
    for (int i = 0; i < 3; i++) t[i] = launch(m, s[i], 16, 600);
    EQUAL(end_of(m, s[0], t[0]), 3230);
    EQUAL(end_of(m, s[1], t[1]), 3440);
    EQUAL(end_of(m, s[2], t[2]), 3650);
    model_free(m);
}

/* What a context needs to have its state back counts in its slice, and in one that is no longer than that it does nothing, ever. */
static void test_slices_and_state(void)
{
    rg_model_params p = tiny;
    p.shared = 0;
    p.switch_ns = 10;
    p.restore_ns = 6;
    p.slice_ns = 100;
    rg_model *m = model_new(&p);
    uint32_t a = context(m), b = context(m), sa = stream(m, a, 0), sb = stream(m, b, 0);
    /* A 0-100, with nobody's state before it; B 110-204, A 214-308, B 318-324, A 334-390. Alone for longer A's slices go on from 334 - 6:
     * C of 50, which comes at 600, waits for 628. */
    uint64_t ta = launch(m, sa, 8, 250), tb = launch(m, sb, 8, 100);
    EQUAL(end_of(m, sb, tb), 324);
    EQUAL(end_of(m, sa, ta), 390);
    rg_model_advance(m, 391);
    ta = launch(m, sa, 8, 500);
    rg_model_advance(m, 600);
    tb = launch(m, sb, 8, 50);
    EQUAL(end_of(m, sb, tb), 688);
    model_free(m);

    m = model_new(&p);
    a = context(m), b = context(m), sa = stream(m, a, 0), sb = stream(m, b, 0);
    EQUAL(rg_model_set_slice(m, a, 6) | rg_model_set_slice(m, b, 4), 0);
    /* A has one slice before there is anything to switch from. */
    launch(m, sa, 8, 20), launch(m, sb, 8, 20);
    rg_model_advance(m, 100000);
    EQUAL(busy_ns(m, a), 6);
    EQUAL(busy_ns(m, b), 0);
    /* One more, and each comes forward by that in each of its slices. */
    EQUAL(rg_model_set_slice(m, a, 7) | rg_model_set_slice(m, b, 7), 0);
    rg_model_advance(m, 100000 + 2 * 12 * 20);
    EQUAL(busy_ns(m, a), 20);
    EQUAL(busy_ns(m, b), 20);
    model_free(m);
}

/* Slices of different lengths, shorter than a kernel, and changed while they run. */
static void test_slice_lengths(void)
{
    rg_model_params p = tiny;
    p.shared = 0;
    p.switch_ns = 10;
    rg_model *m = model_new(&p);
    uint32_t a = context(m), b = context(m), sa = stream(m, a, 0), sb = stream(m, b, 0);
    EQUAL(rg_model_set_slice(m, a, 100), 0);
    /* A needs 250 in slices of 100, B 1500 in slices of 1000: A 0-100, B 110-1110, A 1120-1220, B 1230-1730 (done,
     * yields), A 1740-1790. */
    uint64_t ta = launch(m, sa, 8, 250), tb = launch(m, sb, 8, 1500);
    EQUAL(end_of(m, sb, tb), 1730);
    EQUAL(end_of(m, sa, ta), 1790);
    EQUAL(busy_ns(m, a), 250);
    EQUAL(busy_ns(m, b), 1500);
    rg_model_stats stats;
    rg_model_get_stats(m, &stats);
    EQUAL(stats.switches, 4);
    /* Alone, short slices cost nothing. A's follow one another from 1740, when it got the SMs: B, which comes at 2050,
     * waits for 2140 and runs 2150 to 2180. A ran 140 of its 1000: 2190 to 3050. */
    rg_model_advance(m, 2000);
    ta = launch(m, sa, 8, 1000);
    rg_model_advance(m, 2050);
    tb = launch(m, sb, 8, 30);
    EQUAL(end_of(m, sb, tb), 2180);
    EQUAL(end_of(m, sa, ta), 3050);
    rg_model_get_stats(m, &stats);
    EQUAL(stats.switches, 6);
    model_free(m);

    /* A change holds for the slice in progress. A's 1000 from 0 become 500 at 300: B from 510. B's become 45 at 600,
     * which is 2 x 45 after 510: A from 610, for 500. Then B 1120-1165, A 1175-1675, B 1685-... */
    m = model_new(&p);
    a = context(m), b = context(m), sa = stream(m, a, 0), sb = stream(m, b, 0);
    ta = launch(m, sa, 8, 1600), tb = launch(m, sb, 8, 200);
    rg_model_advance(m, 300);
    EQUAL(rg_model_set_slice(m, a, 500), 0);
    rg_model_advance(m, 509);
    EQUAL(busy_ns(m, a), 500);
    rg_model_advance(m, 600);
    EQUAL(busy_ns(m, b), 90);
    EQUAL(rg_model_set_slice(m, b, 45), 0);
    /* A has 1100 left at 610: -1110, 1175-1675, 1740-1840. B: 90, 45 (-1165), 45 (-1730), 20 from 1850. */
    EQUAL(end_of(m, sa, ta), 1840);
    EQUAL(end_of(m, sb, tb), 1870);
    EQUAL(rg_model_set_slice(m, a, 0), RG_MODEL_INVALID);
    EQUAL(rg_model_remove_context(m, a), 0);
    EQUAL(rg_model_set_slice(m, a, 50), RG_MODEL_INVALID);
    /* Who comes into its place has the preset's slice. */
    a = context(m);
    EQUAL(m->contexts[a & 0xffff].slice_ns, 1000);
    model_free(m);
}

/* A context without work keeps the SMs for 30 ns, but not beyond its slice. */
static void test_slices_idle(void)
{
    rg_model_params p = tiny;
    p.shared = 0;
    p.switch_ns = 100;
    p.idle_ns = 30;
    rg_model *m = model_new(&p);
    uint32_t a = context(m), b = context(m), sa = stream(m, a, 0), sb = stream(m, b, 0);
    /* A is done at 200 and goes on from 220 to 270; at 300 it has had nothing for 30: B 400 to 900. */
    uint64_t ta = launch(m, sa, 8, 200);
    rg_model_advance(m, 10);
    uint64_t tb = launch(m, sb, 8, 500);
    rg_model_advance(m, 220);
    ta = launch(m, sa, 8, 50);
    EQUAL(end_of(m, sa, ta), 270);
    EQUAL(rg_model_next_event(m), 300);
    EQUAL(end_of(m, sb, tb), 900);
    /* B has the SMs until 930, A from 1030 on. Its slice ends at 2030, and its work at 2010: B from 2130. */
    rg_model_advance(m, 905);
    ta = launch(m, sa, 8, 980);
    rg_model_advance(m, 1100);
    tb = launch(m, sb, 8, 100);
    EQUAL(end_of(m, sa, ta), 2010);
    EQUAL(end_of(m, sb, tb), 2230);
    /* B has had nothing for long when A comes at 2500. */
    rg_model_advance(m, 2500);
    EQUAL(end_of(m, sa, launch(m, sa, 8, 10)), 2610);
    model_free(m);
}

/* As measured: a best-effort context with short slices under long kernels, another with long ones and short kernels. */
static void test_slices_asymmetric(void)
{
    const uint64_t us = 1000;
    rg_model_params p = tiny;
    p.shared = 0;
    p.slice_ns = 2000 * us;
    p.switch_ns = 160 * us;
    rg_model *m = model_new(&p);
    uint32_t high = context(m), low = context(m), sh = stream(m, high, 0), sl = stream(m, low, 0);
    EQUAL(rg_model_set_slice(m, high, 10000 * us), 0);
    EQUAL(rg_model_set_slice(m, low, 50 * us), 0);
    uint64_t t = 0, first = launch(m, sl, 8, 2360 * us), second = launch(m, sl, 8, 2360 * us);
    rg_model_advance(m, 1010 * us);
    for (int i = 0; i < 20; i++) t = launch(m, sh, 8, 4 * us);
    /* The slice ends at 1050, the switch at 1210, 20 x 4 at 1290. With the preset's slices it would end at 2240. */
    EQUAL(end_of(m, sh, t), 1290 * us);
    /* Low goes on at 1450 with the 1310 it had left. */
    EQUAL(end_of(m, sl, first), 2760 * us);
    /* High's 12 ms, from 3000 on: low's slices count from 1450, so it loses the SMs at 3000. High 3160-13160, low 50
     * from 13320, high from 13530 the last 2000. Low had 240 + 50 of its second kernel: 15690 + 2070. */
    rg_model_advance(m, 3000 * us);
    t = launch(m, sh, 8, 12000 * us);
    EQUAL(end_of(m, sh, t), 15530 * us);
    EQUAL(end_of(m, sl, second), 17760 * us);
    model_free(m);
}

static rg_model *suspendable(uint32_t *a, uint32_t *b, uint32_t *sa, uint32_t *sb)
{
    rg_model_params p = tiny;
    p.shared = 0;
    p.switch_ns = 100;
    p.stopped_switch_ns = 40;
    p.preempt_ns = 50;
    rg_model *m = model_new(&p);
    *a = context(m), *b = context(m), *sa = stream(m, *a, 0), *sb = stream(m, *b, 0);
    return m;
}

static void test_suspend_running(void)
{
    uint32_t a, b, sa, sb;
    rg_model *m = suspendable(&a, &b, &sa, &sb);
    /* A, of 1000, is suspended at 300 and leaves at 350. At 400 it launches 100 more. Nothing happens until 2000.
     * Resumed then, it has the SMs at 2100, and the remaining 650 end at 2750, the 100 at 2850. */
    uint64_t ta = launch(m, sa, 8, 1000);
    rg_model_advance(m, 300);
    EQUAL(rg_model_suspend(m, a, true), 0);
    rg_model_advance(m, 320);
    EQUAL(rg_model_suspend(m, a, true), 0); /* no second 50 ns */
    EQUAL(rg_model_next_event(m), 350);
    rg_model_advance(m, 400);
    EQUAL(rg_model_next_event(m), RG_MODEL_NEVER);
    EQUAL(busy_ns(m, a), 350);
    uint64_t more = launch(m, sa, 8, 100);
    EQUAL(rg_model_earliest(m, sa, more), RG_MODEL_NEVER);
    EQUAL(rg_model_context_earliest(m, a, more), RG_MODEL_NEVER);
    EQUAL(rg_model_room_earliest(m, sa, 1), RG_MODEL_NEVER);
    rg_model_advance(m, 2000);
    TRUE(!rg_model_done(m, sa, ta));
    EQUAL(rg_model_suspend(m, a, false), 0);
    EQUAL(end_of(m, sa, ta), 2750);
    EQUAL(end_of(m, sa, more), 2850);
    EQUAL(busy_ns(m, a), 1100);
    rg_model_stats stats;
    rg_model_get_stats(m, &stats);
    EQUAL(stats.sm_busy_ns, 2 * 1100);
    EQUAL(stats.switches, 1);
    model_free(m);

    /* Resumed before it left: nothing is lost. */
    m = suspendable(&a, &b, &sa, &sb);
    ta = launch(m, sa, 8, 1000);
    rg_model_advance(m, 300);
    EQUAL(rg_model_suspend(m, a, true), 0);
    rg_model_advance(m, 349);
    EQUAL(rg_model_suspend(m, a, false), 0);
    EQUAL(end_of(m, sa, ta), 1000);
    model_free(m);

    /* A kernel that ends within the 50 ns is done, and the next of its stream does not start. */
    m = suspendable(&a, &b, &sa, &sb);
    ta = launch(m, sa, 8, 330), more = launch(m, sa, 8, 70);
    rg_model_advance(m, 300);
    EQUAL(rg_model_suspend(m, a, true), 0);
    EQUAL(end_of(m, sa, ta), 330);
    EQUAL(end_of(m, sa, more), RG_MODEL_NEVER);
    EQUAL(busy_ns(m, a), 330);
    rg_model_advance(m, 1000);
    EQUAL(rg_model_suspend(m, a, false), 0);
    EQUAL(end_of(m, sa, more), 1170);
    model_free(m);
}

/* Suspending B takes the SMs from A, which has them, for 30: from 300 on, its 1000 end at 1030; where nobody has work there, from nobody. */
static void test_suspend_disturbs(void)
{
    rg_model_params p = tiny;
    p.shared = 0;
    p.switch_ns = 100;
    p.slice_ns = 10000;
    p.disturb_ns = 30;
    rg_model *m = model_new(&p);
    uint32_t a = context(m), b = context(m), sa = stream(m, a, 0), sb = stream(m, b, 0);
    uint64_t ta = launch(m, sa, 8, 1000), tb;
    rg_model_advance(m, 300);
    EQUAL(rg_model_suspend(m, b, true), 0);
    EQUAL(rg_model_suspend(m, b, true), 0); /* no second time */
    EQUAL(end_of(m, sa, ta), 1030);
    EQUAL(busy_ns(m, a), 1000);
    EQUAL(rg_model_suspend(m, b, false), 0);
    rg_model_advance(m, 2000);
    EQUAL(rg_model_suspend(m, b, true), 0);
    rg_model_advance(m, 2001);
    ta = launch(m, sa, 8, 50);
    EQUAL(end_of(m, sa, ta), 2051);
    /* B waits for them, for the end of A's slice. */
    EQUAL(rg_model_suspend(m, b, false), 0);
    rg_model_advance(m, 3000);
    ta = launch(m, sa, 8, 1000);
    tb = launch(m, sb, 8, 10);
    rg_model_advance(m, 3300);
    EQUAL(rg_model_suspend(m, b, true), 0);
    EQUAL(end_of(m, sa, ta), 4030);
    EQUAL(end_of(m, sb, tb), RG_MODEL_NEVER);
    /* While they go over from A to B, from 5000 to 5100, they are nobody's: suspended then, A costs B nothing. */
    rg_model_advance(m, 5000);
    EQUAL(rg_model_suspend(m, b, false), 0);
    rg_model_advance(m, 5050);
    EQUAL(rg_model_suspend(m, a, true), 0);
    EQUAL(end_of(m, sb, tb), 5110);
    model_free(m);
}

/* Two waves; the second one's blocks are placed only when the context is back. */
static void test_suspend_waves(void)
{
    uint32_t a, b, sa, sb;
    rg_model *m = suspendable(&a, &b, &sa, &sb);
    /* A: 12 blocks of 400. Suspended at 350, it leaves at 400, at the very instant at which its first 8 end. B has the
     * empty SMs 100 after it comes at 500, for 30. A is resumed at 610 and has them at 730: the last 4, 730 to 1130. */
    uint64_t ta = launch(m, sa, 12, 400);
    rg_model_advance(m, 350);
    EQUAL(rg_model_suspend(m, a, true), 0);
    rg_model_advance(m, 500);
    uint64_t tb = launch(m, sb, 8, 30);
    rg_model_advance(m, 610);
    EQUAL(rg_model_suspend(m, a, false), 0);
    EQUAL(end_of(m, sb, tb), 630);
    EQUAL(end_of(m, sa, ta), 1130);
    model_free(m);
}

/* A stop takes no time, but where its context is stopped: the stream waits there until that is over. */
static void test_stops(void)
{
    uint32_t a, b, sa, sb;
    rg_model *m = model_new(&tiny);
    a = context(m), b = context(m), sa = stream(m, a, 0), sb = stream(m, b, 0);
    uint32_t beside = stream(m, a, 0);
    uint64_t first = launch(m, sa, 4, 100), stop, second, third, other;
    EQUAL(rg_model_submit_stop(m, sa, &stop), 0);
    second = launch(m, sa, 4, 50);
    EQUAL(end_of(m, sa, second), 150);
    /* Stopped at 150: what is launched then runs to its stop, from 150 to 250, and so does what has no stop in front of it, in another
     * stream and another context. */
    EQUAL(rg_model_stop(m, a, true), 0);
    EQUAL(rg_model_stop(m, a, true), 0);
    first = launch(m, sa, 2, 100);
    EQUAL(rg_model_submit_stop(m, sa, &stop), 0);
    second = launch(m, sa, 2, 50);
    third = launch(m, beside, 2, 70);
    EQUAL(rg_model_submit_stop(m, sb, NULL), 0);
    other = launch(m, sb, 2, 30);
    EQUAL(end_of(m, sb, other), 180);
    EQUAL(end_of(m, beside, third), 220);
    EQUAL(end_of(m, sa, first), 250);
    EQUAL(end_of(m, sa, stop), RG_MODEL_NEVER);
    EQUAL(rg_model_earliest(m, sa, second), RG_MODEL_NEVER);
    EQUAL(rg_model_context_earliest(m, a, second), RG_MODEL_NEVER);
    EQUAL(rg_model_next_event(m), RG_MODEL_NEVER);
    /* No more at 400: 400 to 450. */
    rg_model_advance(m, 400);
    EQUAL(rg_model_stop(m, a, false), 0);
    EQUAL(end_of(m, sa, second), 450);
    /* Over before the stream came to its stop, it stops nobody. */
    EQUAL(rg_model_stop(m, a, true), 0);
    first = launch(m, sa, 2, 100);
    EQUAL(rg_model_submit_stop(m, sa, NULL), 0);
    second = launch(m, sa, 2, 50);
    rg_model_advance(m, 500);
    EQUAL(rg_model_stop(m, a, false), 0);
    EQUAL(end_of(m, sa, second), 600);
    /* A context that goes takes its stops with it; the next one in its place is not stopped. */
    EQUAL(rg_model_stop(m, a, true), 0);
    EQUAL(rg_model_submit_stop(m, sa, NULL), 0);
    EQUAL(rg_model_remove_context(m, a), 0);
    a = context(m), sa = stream(m, a, 0);
    EQUAL(rg_model_submit_stop(m, sa, NULL), 0);
    second = launch(m, sa, 2, 50);
    EQUAL(end_of(m, sa, second), 650);
    EQUAL(rg_model_stop(m, 12345, true), RG_MODEL_INVALID);
    model_free(m);

    /* A is stopped from 0 on. Its blocking stream stops at 100, and what is ordered behind it does too: its NULL stream, and B, which waits for
     * A's event; A's other stream, which is not ordered with it, goes on: 100 beside the first, for half the GPU is enough. From 300 on the
     * second kernel runs to 350; then the NULL stream's to 380, and B's, from 300 on, to 340. */
    m = model_new(&tiny);
    a = context(m), b = context(m), sb = stream(m, b, 0), beside = stream(m, a, 0);
    uint32_t null = 0, e = event(m, a);
    EQUAL(rg_model_create_stream(m, a, 0, RG_MODEL_BLOCKING, &sa), 0);
    EQUAL(rg_model_create_stream(m, a, 0, RG_MODEL_LEGACY, &null), 0);
    EQUAL(rg_model_stop(m, a, true), 0);
    first = launch(m, sa, 4, 100);
    EQUAL(rg_model_submit_stop(m, sa, &stop), 0);
    EQUAL(rg_model_record(m, e, sa, NULL), 0);
    second = launch(m, sa, 2, 50);
    third = launch(m, null, 2, 30);
    EQUAL(rg_model_wait(m, e, sb, NULL), 0);
    other = launch(m, sb, 2, 40);
    EQUAL(end_of(m, beside, launch(m, beside, 4, 100)), 100);
    TRUE(rg_model_done(m, sa, first));
    EQUAL(end_of(m, null, third), RG_MODEL_NEVER);
    EQUAL(end_of(m, sb, other), RG_MODEL_NEVER);
    EQUAL(rg_model_event_earliest(m, e), RG_MODEL_NEVER);
    EQUAL(rg_model_room_earliest(m, sa, 1), RG_MODEL_NEVER);
    EQUAL(rg_model_earliest(m, sa, second), RG_MODEL_NEVER);
    rg_model_advance(m, 300);
    EQUAL(rg_model_stop(m, a, false), 0);
    EQUAL(end_of(m, sb, other), 340);
    EQUAL(end_of(m, sa, second), 350);
    EQUAL(end_of(m, null, third), 380);
    model_free(m);

    /* In time slices who is at a stop does not want the SMs: B has them once A's first is done, at 100, and keeps them. */
    m = suspendable(&a, &b, &sa, &sb);
    EQUAL(rg_model_stop(m, a, true), 0);
    launch(m, sa, 8, 100);
    EQUAL(rg_model_submit_stop(m, sa, NULL), 0);
    second = launch(m, sa, 8, 50);
    other = launch(m, sb, 8, 5000);
    EQUAL(end_of(m, sb, other), 5140); /* exchanged in 40, not 100: there is nothing of A's to save */
    EQUAL(rg_model_stop(m, a, false), 0);
    EQUAL(end_of(m, sa, second), 5290);
    model_free(m);
}

static void test_suspend_beside(void)
{
    uint32_t a, b, sa, sb;
    rg_model *m = suspendable(&a, &b, &sa, &sb);
    /* B waits for A's slice to end at 1000. A is suspended at 300 and leaves at 350: B has the SMs at 450, and keeps
     * them for all its 2000, for nobody else wants them. A, resumed at 3000, has them at 3100, and 650 left. */
    uint64_t ta = launch(m, sa, 8, 1000), tb = 0;
    rg_model_advance(m, 10);
    tb = launch(m, sb, 8, 2000);
    rg_model_advance(m, 300);
    EQUAL(rg_model_suspend(m, a, true), 0);
    EQUAL(end_of(m, sb, tb), 2450);
    rg_model_advance(m, 3000);
    EQUAL(rg_model_suspend(m, a, false), 0);
    EQUAL(end_of(m, sa, ta), 3750);
    model_free(m);

    /* Suspended at 980, A loses the SMs at the end of its slice as ever: B from 1100. Resumed at 1200, A waits for B's
     * slice to end at 2100: 2200 on, with 1500 left: the slice ends at 3200, B's last 500 at 3800, A's at 4400. */
    m = suspendable(&a, &b, &sa, &sb);
    ta = launch(m, sa, 8, 2500), tb = launch(m, sb, 8, 1500);
    rg_model_advance(m, 980);
    EQUAL(rg_model_suspend(m, a, true), 0);
    rg_model_advance(m, 1200);
    EQUAL(busy_ns(m, a), 1000);
    EQUAL(busy_ns(m, b), 100);
    EQUAL(rg_model_suspend(m, a, false), 0);
    EQUAL(end_of(m, sb, tb), 3800);
    EQUAL(end_of(m, sa, ta), 4400);
    model_free(m);

    /* Three: B and C take turns while A is suspended. A leaves at 50; B 150-1150, C 1250-2050 (done), B 2150-2650. */
    m = suspendable(&a, &b, &sa, &sb);
    uint32_t sc = stream(m, context(m), 0);
    ta = launch(m, sa, 8, 100), tb = launch(m, sb, 8, 1500);
    uint64_t tc = launch(m, sc, 8, 800);
    rg_model_advance(m, 0);
    EQUAL(rg_model_suspend(m, a, true), 0);
    EQUAL(end_of(m, sc, tc), 2050);
    EQUAL(end_of(m, sb, tb), 2650);
    EQUAL(rg_model_suspend(m, a, false), 0);
    EQUAL(end_of(m, sa, ta), 2800); /* 50 left, from 2750 */
    model_free(m);
}

static void test_suspend_waiting(void)
{
    uint32_t a, b, sa, sb;
    rg_model *m = suspendable(&a, &b, &sa, &sb);
    /* B waits for the SMs from 10 on and is suspended at 100: A's 2500 run through. B, resumed at 2600, from 2700. */
    uint64_t ta = launch(m, sa, 8, 2500);
    rg_model_advance(m, 10);
    uint64_t tb = launch(m, sb, 8, 200);
    rg_model_advance(m, 100);
    EQUAL(rg_model_suspend(m, b, true), 0);
    EQUAL(end_of(m, sa, ta), 2500);
    rg_model_advance(m, 2600);
    EQUAL(rg_model_suspend(m, b, false), 0);
    EQUAL(end_of(m, sb, tb), 2900);
    rg_model_stats stats;
    rg_model_get_stats(m, &stats);
    EQUAL(stats.switches, 1);

    /* Idle, with the SMs: B is suspended at 3000 and leaves at 3050. What it launches stays; the copy of 40 bytes in
     * another stream does not need it, the one behind the kernel does, and so does a record. Resumed at 3500: the
     * kernel runs 3600-3630, the copy to 3670. */
    uint32_t copies = stream(m, b, 0), e = event(m, b);
    rg_model_advance(m, 3000);
    EQUAL(rg_model_suspend(m, b, true), 0);
    rg_model_advance(m, 3100);
    tb = launch(m, sb, 8, 30);
    uint64_t behind = copy(m, sb, RG_MODEL_H2D, 40), beside = copy(m, copies, RG_MODEL_H2D, 40);
    EQUAL(rg_model_record(m, e, copies, NULL), 0);
    EQUAL(end_of(m, copies, beside), 3140);
    EQUAL(end_of(m, sb, tb), RG_MODEL_NEVER);
    TRUE(!rg_model_event_done(m, e, NULL));
    EQUAL(rg_model_event_earliest(m, e), RG_MODEL_NEVER);
    rg_model_advance(m, 3500);
    EQUAL(rg_model_suspend(m, b, false), 0);
    uint64_t reached = 0;
    TRUE(rg_model_event_done(m, e, &reached));
    EQUAL(reached, 3500);
    EQUAL(end_of(m, sb, tb), 3630);
    EQUAL(end_of(m, sb, behind), 3670);
    model_free(m);

    /* Suspended on its way to the SMs: A's slice ends at 1000, B would have them at 1100; A has them back then. */
    m = suspendable(&a, &b, &sa, &sb);
    ta = launch(m, sa, 8, 1500), tb = launch(m, sb, 8, 200);
    rg_model_advance(m, 1050);
    EQUAL(rg_model_suspend(m, b, true), 0);
    EQUAL(end_of(m, sa, ta), 1600);
    EQUAL(end_of(m, sb, tb), RG_MODEL_NEVER);
    model_free(m);
}

static void test_suspend_both(void)
{
    uint32_t a, b, sa, sb;
    rg_model *m = suspendable(&a, &b, &sa, &sb);
    /* Both are suspended at 100; A leaves at 150. B is resumed at 500: 600 to 1600, for its slice, with A resumed at
     * 700 beside it, lasts till then as well. A: from 1700 the 850 it had left. */
    uint64_t ta = launch(m, sa, 8, 1000), tb = launch(m, sb, 8, 1000);
    rg_model_advance(m, 100);
    EQUAL(rg_model_suspend(m, a, true), 0);
    EQUAL(rg_model_suspend(m, b, true), 0);
    rg_model_advance(m, 500);
    EQUAL(rg_model_next_event(m), RG_MODEL_NEVER);
    EQUAL(busy_ns(m, a), 150);
    EQUAL(busy_ns(m, b), 0);
    EQUAL(rg_model_suspend(m, b, false), 0);
    rg_model_advance(m, 700);
    EQUAL(rg_model_suspend(m, a, false), 0);
    EQUAL(end_of(m, sb, tb), 1600);
    EQUAL(end_of(m, sa, ta), 2550);
    model_free(m);

    /* Removed while suspended, at 200: B, with the SMs to itself from 250, ends its 1000 at 1250. And while leaving:
     * the next A is suspended at 2400 and removed at 2430, while it still runs; nothing is left to save: B at once. */
    m = suspendable(&a, &b, &sa, &sb);
    launch(m, sa, 8, 1000), tb = launch(m, sb, 8, 1000);
    rg_model_advance(m, 100);
    EQUAL(rg_model_suspend(m, a, true), 0);
    rg_model_advance(m, 200);
    EQUAL(rg_model_remove_context(m, a), 0);
    EQUAL(end_of(m, sb, tb), 1250);
    EQUAL(rg_model_suspend(m, a, false), RG_MODEL_INVALID);
    a = context(m), sa = stream(m, a, 0); /* in A's place, and not suspended */
    ta = launch(m, sa, 8, 1000);
    EQUAL(end_of(m, sa, ta), 2350);
    launch(m, sa, 8, 1000);
    rg_model_advance(m, 2400);
    tb = launch(m, sb, 8, 70);
    EQUAL(rg_model_suspend(m, a, true), 0);
    rg_model_advance(m, 2430);
    EQUAL(rg_model_remove_context(m, a), 0);
    EQUAL(end_of(m, sb, tb), 2500);
    EQUAL(rg_model_next_event(m), RG_MODEL_NEVER);
    model_free(m);

    /* Under `shared` there is neither. */
    m = model_new(&tiny);
    a = context(m), sa = stream(m, a, 0);
    EQUAL(rg_model_suspend(m, a, true), RG_MODEL_SHARED);
    EQUAL(rg_model_set_slice(m, a, 100), RG_MODEL_SHARED);
    EQUAL(end_of(m, sa, launch(m, sa, 8, 10)), 10);
    model_free(m);
}

static void test_copies(void)
{
    rg_model *m = model_new(&tiny);
    uint32_t c = context(m), s1 = stream(m, c, 0), s2 = stream(m, c, 0), s3 = stream(m, c, 0), s4 = stream(m, c, 0);
    /* 1 byte/ns each way: two uploads one after the other (500, 800), the download beside them (400), the kernel beside
     * all of them (300). */
    uint64_t up1 = copy(m, s1, RG_MODEL_H2D, 500), up2 = copy(m, s2, RG_MODEL_H2D, 300);
    uint64_t down = copy(m, s3, RG_MODEL_D2H, 400), k = launch(m, s4, 8, 300);
    EQUAL(end_of(m, s4, k), 300);
    EQUAL(end_of(m, s3, down), 400);
    EQUAL(end_of(m, s1, up1), 500);
    EQUAL(end_of(m, s2, up2), 800);
    /* 10 bytes/ns of memory: 2000 bytes are set in 200 ns; copied, they are read and written: 400. One engine: 600. */
    uint64_t set = copy(m, s1, RG_MODEL_MEMSET, 2000), move = copy(m, s2, RG_MODEL_D2D, 2000);
    EQUAL(end_of(m, s1, set), 1000);
    EQUAL(end_of(m, s2, move), 1400);
    /* A byte is rounded up to a nanosecond, nothing takes no time. In a stream the copy waits for the kernel. */
    launch(m, s1, 8, 100);
    EQUAL(end_of(m, s1, copy(m, s1, RG_MODEL_MEMSET, 1)), 1501);
    EQUAL(end_of(m, s1, copy(m, s1, RG_MODEL_H2D, 0)), 1502);
    rg_model_context_stats cs;
    rg_model_get_context_stats(m, c, &cs);
    EQUAL(cs.transfers, 7);
    EQUAL(busy_ns(m, c), 300 + 100);
    model_free(m);

    /* Copies go on while another context has the SMs. */
    rg_model_params p = tiny;
    p.shared = 0;
    m = model_new(&p);
    uint32_t sa = stream(m, context(m), 0), sb = stream(m, context(m), 0);
    launch(m, sa, 8, 5000);
    EQUAL(end_of(m, sb, copy(m, sb, RG_MODEL_H2D, 700)), 700);
    model_free(m);
}

static void test_events(void)
{
    rg_model *m = model_new(&tiny);
    uint32_t c = context(m), s1 = stream(m, c, 0), s2 = stream(m, c, 0), e = event(m, c);
    uint64_t at, t;
    TRUE(rg_model_event_done(m, e, &at) && at == 0); /* never recorded: done, and a wait for it passes */
    EQUAL(rg_model_wait(m, e, s2, NULL), 0);
    EQUAL(end_of(m, s2, launch(m, s2, 8, 10)), 10);
    /* s1: kernel 10 to 110, record. s2 waits, then 50 ns: 110 to 160. */
    launch(m, s1, 8, 100);
    EQUAL(rg_model_record(m, e, s1, NULL), 0);
    TRUE(!rg_model_event_done(m, e, NULL));
    EQUAL(rg_model_wait(m, e, s2, NULL), 0);
    t = launch(m, s2, 8, 50);
    EQUAL(end_of(m, s2, t), 160);
    TRUE(rg_model_event_done(m, e, &at) && at == 110);
    /* A wait is for the last record at the time of the wait: the second record (kernel of 1000 ns in s1) is none of it.
     * s1: 160-260 record, 260-1260 record. s2 waits for the first: 260-270 beside s1's 4 blocks. */
    launch(m, s1, 4, 100);
    rg_model_record(m, e, s1, NULL);
    rg_model_wait(m, e, s2, NULL);
    t = launch(m, s2, 4, 10);
    launch(m, s1, 4, 1000);
    rg_model_record(m, e, s1, NULL);
    EQUAL(end_of(m, s2, t), 270);
    TRUE(!rg_model_event_done(m, e, NULL));
    /* Destroyed with a wait pending: the wait is kept; the id is dead. */
    rg_model_wait(m, e, s2, NULL);
    t = launch(m, s2, 8, 40);
    EQUAL(rg_model_destroy_event(m, e), 0);
    EQUAL(rg_model_destroy_event(m, e), RG_MODEL_INVALID);
    EQUAL(rg_model_record(m, e, s1, NULL), RG_MODEL_INVALID);
    EQUAL(end_of(m, s2, t), 1300);
    uint32_t elsewhere = stream(m, context(m), 0);
    e = event(m, c);
    EQUAL(rg_model_record(m, e, elsewhere, NULL), RG_MODEL_INVALID); /* of another context */
    EQUAL(rg_model_wait(m, e, elsewhere, NULL), 0);
    model_free(m);
}

static void test_graph(void)
{
    rg_model_params p = tiny;
    p.launch_ns = 20;
    p.chain_ns = 10;
    p.graph_node_ns = 5;
    rg_model *m = model_new(&p);
    uint32_t c = context(m), s = stream(m, c, 0), g = 0;
    EQUAL(rg_model_create_graph(m, c, &g), 0);
    rg_model_kernel k = blocks(8, 100), two_waves = blocks(16, 15);
    EQUAL(rg_model_graph_kernel(m, g, &k, RG_MODEL_INHERIT), 0);
    EQUAL(rg_model_graph_transfer(m, g, RG_MODEL_H2D, 50), 0);
    EQUAL(rg_model_graph_kernel(m, g, &two_waves, -5), 0);
    /* 20-120, 125-175, 180-210; the kernel after the graph: 220-320. The second launch: 330-430, 435-485, 490-520. */
    uint64_t t1, t2, tk;
    EQUAL(rg_model_submit_graph(m, s, g, &t1), 0);
    tk = launch(m, s, 8, 100);
    EQUAL(rg_model_submit_graph(m, s, g, &t2), 0);
    TRUE(rg_model_earliest(m, s, t1) <= 210);
    EQUAL(end_of(m, s, t1), 210);
    EQUAL(end_of(m, s, tk), 320);
    /* Destroyed while it is queued: it still runs. No node can be added to one that is in use. */
    EQUAL(rg_model_graph_kernel(m, g, &k, 0), RG_MODEL_INVALID);
    EQUAL(rg_model_destroy_graph(m, g), 0);
    EQUAL(rg_model_submit_graph(m, s, g, NULL), RG_MODEL_INVALID);
    EQUAL(end_of(m, s, t2), 520);
    rg_model_context_stats cs;
    rg_model_get_context_stats(m, c, &cs);
    EQUAL(cs.kernels, 5);
    EQUAL(cs.transfers, 2);
    /* An empty graph is done at its turn, at once. */
    EQUAL(rg_model_create_graph(m, c, &g), 0);
    launch(m, s, 8, 80); /* 540-620 */
    EQUAL(rg_model_submit_graph(m, s, g, &t1), 0);
    EQUAL(end_of(m, s, t1), 620);
    model_free(m);
}

static void test_legacy_stream(void)
{
    rg_model *m = model_new(&tiny);
    uint32_t c = context(m), null = 0, b1 = 0, b2 = 0, free_running = stream(m, c, 0), other = stream(m, context(m), 0);
    EQUAL(rg_model_create_stream(m, c, 0, RG_MODEL_LEGACY, &null), 0);
    EQUAL(rg_model_create_stream(m, c, 0, RG_MODEL_LEGACY, &b1), RG_MODEL_INVALID);
    EQUAL(rg_model_create_stream(m, c, 0, RG_MODEL_BLOCKING, &b1), 0);
    EQUAL(rg_model_create_stream(m, c, 0, RG_MODEL_BLOCKING, &b2), 0);
    /* b1 0-100; NULL waits for it: 100-150; b2 was launched later: 150-160. The others do not take part: 0-10. */
    uint64_t t1 = launch(m, b1, 1, 100), t2 = launch(m, null, 1, 50), t3 = launch(m, b2, 1, 10);
    uint64_t t4 = launch(m, free_running, 1, 10), t5 = launch(m, other, 1, 10);
    EQUAL(end_of(m, free_running, t4), 10);
    EQUAL(end_of(m, other, t5), 10);
    EQUAL(end_of(m, b1, t1), 100);
    EQUAL(end_of(m, null, t2), 150);
    EQUAL(end_of(m, b2, t3), 160);
    /* A destroyed stream's work still holds the NULL stream back: b2 160-260, NULL 260-265. */
    launch(m, b2, 1, 100);
    EQUAL(rg_model_destroy_stream(m, b2), 0);
    t2 = launch(m, null, 1, 5);
    EQUAL(end_of(m, null, t2), 265);
    model_free(m);
}

static void test_removal(void)
{
    rg_model *m = model_new(&tiny);
    uint32_t a = context(m), b = context(m), sa = stream(m, a, 0), sb = stream(m, b, 0), ea = event(m, a);
    EQUAL(rg_model_allocate(m, a, 700), 0);
    EQUAL(rg_model_allocate(m, b, 400), RG_MODEL_NO_MEMORY);
    /* A holds every place and has a second wave, copies, and a record that B waits for. Killed at 30: B starts then. */
    launch(m, sa, 16, 100);
    rg_model_record(m, ea, sa, NULL);
    uint32_t sa2 = stream(m, a, -5), sb2 = stream(m, b, 0);
    copy(m, sa2, RG_MODEL_H2D, 1000);
    uint64_t up = copy(m, sb2, RG_MODEL_H2D, 60);
    rg_model_wait(m, ea, sb, NULL);
    uint64_t tb = launch(m, sb, 8, 100);
    rg_model_advance(m, 30);
    EQUAL(rg_model_remove_context(m, a), 0);
    EQUAL(end_of(m, sb2, up), 90); /* the upload engine is free from 30 on: 30 + 60 */
    EQUAL(end_of(m, sb, tb), 130);
    EQUAL(rg_model_allocate(m, b, 400), 0);
    rg_model_stats stats;
    rg_model_get_stats(m, &stats);
    EQUAL(stats.memory_bytes, 400);
    EQUAL(stats.sm_busy_ns, 2 * 130);
    /* Everything of A's is gone. */
    rg_model_kernel k = blocks(1, 1);
    EQUAL(rg_model_submit_kernel(m, sa, &k, 0, NULL), RG_MODEL_INVALID);
    EQUAL(rg_model_remove_context(m, a), RG_MODEL_INVALID);
    TRUE(rg_model_done(m, sa, 1) && rg_model_event_done(m, ea, NULL) && rg_model_context_done(m, a, UINT64_MAX));
    EQUAL(rg_model_next_event(m), RG_MODEL_NEVER);
    unsigned on[2];
    residents(m, 0, on);
    EQUAL(on[0] + on[1], 0);
    model_free(m);

    /* Under time slices: the active context is removed at 30, B has the SMs at once. */
    rg_model_params p = tiny;
    p.shared = 0;
    p.switch_ns = 100;
    m = model_new(&p);
    a = context(m), b = context(m), sa = stream(m, a, 0), sb = stream(m, b, 0);
    launch(m, sa, 8, 500);
    rg_model_advance(m, 10);
    tb = launch(m, sb, 8, 3000);
    rg_model_advance(m, 30);
    EQUAL(rg_model_remove_context(m, a), 0);
    a = context(m), sa = stream(m, a, 0);
    rg_model_advance(m, 100);
    launch(m, sa, 16, 400); /* B 30-1030, A 1130 on; A is removed at 1200, with nothing to save: B at once */
    rg_model_advance(m, 1200);
    EQUAL(rg_model_remove_context(m, a), 0);
    EQUAL(end_of(m, sb, tb), 1200 + 2000);
    EQUAL(busy_ns(m, b), 3000);
    model_free(m);
}

static void test_limits(void)
{
    rg_model *m = model_new(&tiny);
    uint32_t c = context(m), s = stream(m, c, 0), other = stream(m, c, 0);
    for (int i = 0; i < RG_MODEL_STREAM_DEPTH; i++) launch(m, s, 1, 10);
    rg_model_kernel k = blocks(1, 10);
    EQUAL(rg_model_submit_kernel(m, s, &k, 0, NULL), RG_MODEL_FULL);
    EQUAL(rg_model_submit_kernel(m, other, &k, 0, NULL), 0); /* each stream has its own */
    rg_model_advance(m, 10);
    EQUAL(rg_model_submit_kernel(m, s, &k, 0, NULL), 0);
    EQUAL(rg_model_submit_kernel(m, s, &k, 0, NULL), RG_MODEL_FULL);
    run_out(m);
    EQUAL(m->now, 10250); /* 1025 kernels of 10 ns, one after the other */
    /* Memory: 1000 bytes. */
    EQUAL(rg_model_allocate(m, c, 1000), 0);
    EQUAL(rg_model_allocate(m, c, 1), RG_MODEL_NO_MEMORY);
    EQUAL(rg_model_release(m, c, 1001), RG_MODEL_INVALID);
    EQUAL(rg_model_release(m, c, 400), 0);
    EQUAL(rg_model_allocate(m, c, 400), 0);
    /* Tables: 64 contexts. Ids are not reused at once. */
    uint32_t id = 0, last = 0, first = 0;
    for (int i = 1; i < RG_MODEL_MAX_CONTEXTS; i++) last = context(m);
    EQUAL(rg_model_add_context(m, &id), RG_MODEL_NO_SLOT);
    EQUAL(rg_model_remove_context(m, last), 0);
    first = context(m);
    TRUE(first != last);
    EQUAL(rg_model_create_stream(m, last, 0, 0, &id), RG_MODEL_INVALID);
    EQUAL(rg_model_destroy_stream(m, 0), RG_MODEL_INVALID);
    EQUAL(rg_model_destroy_stream(m, s), 0);
    EQUAL(rg_model_destroy_stream(m, s), RG_MODEL_INVALID);
    model_free(m);
}

/* A process dies inside the model: whatever it left, the others go on. */
static void test_recover(void)
{
    for (int shared = 0; shared < 2; shared++) {
        rg_model_params p = tiny;
        p.shared = (uint32_t)shared;
        rg_model *m = model_new(&p);
        uint32_t a = context(m), b = context(m), sa = stream(m, a, 0), sb = stream(m, b, 0), e = event(m, a), g = 0;
        rg_model_kernel k = blocks(8, 100);
        EQUAL(rg_model_create_graph(m, a, &g), 0);
        EQUAL(rg_model_graph_kernel(m, g, &k, 0), 0);
        EQUAL(rg_model_allocate(m, b, 300), 0);
        uint64_t ta = launch(m, sa, 24, 700), tb = launch(m, sb, 24, 700), stopped = 0;
        rg_model_record(m, e, sa, NULL);
        rg_model_wait(m, e, sb, NULL);
        copy(m, sb, RG_MODEL_H2D, 500);
        rg_model_advance(m, 900);
        if (!shared) EQUAL(rg_model_suspend(m, a, true), 0);
        uint32_t at_a_stop = stream(m, b, 0);
        EQUAL(rg_model_stop(m, b, true), 0);
        EQUAL(rg_model_submit_stop(m, at_a_stop, &stopped), 0);
        EQUAL(rg_model_earliest(m, at_a_stop, stopped), RG_MODEL_NEVER);
        /* Half a change, whatever it was. */
        m->op_free = 12345;
        m->ops[3].next = 7;
        m->domains[0].clock[0].heap = 99;
        m->timers = 77;
        rg_model_recover(m);
        TRUE(rg_model_done(m, sa, ta) && rg_model_done(m, sb, tb) && rg_model_event_done(m, e, NULL));
        TRUE(rg_model_done(m, at_a_stop, stopped));
        EQUAL(rg_model_next_event(m), RG_MODEL_NEVER);
        EQUAL(rg_model_submit_stop(m, at_a_stop, &stopped), 0);
        EQUAL(end_of(m, at_a_stop, stopped), RG_MODEL_NEVER); /* stopped as before */
        EQUAL(rg_model_stop(m, b, false), 0);
        EQUAL(end_of(m, at_a_stop, stopped), 900);
        rg_model_stats stats;
        rg_model_get_stats(m, &stats);
        EQUAL(stats.memory_bytes, 300);
        EQUAL(rg_model_submit_graph(m, sa, g, &ta), 0);
        if (!shared) {
            EQUAL(end_of(m, sa, ta), RG_MODEL_NEVER); /* suspended as before */
            EQUAL(rg_model_suspend(m, a, false), 0);
        }
        EQUAL(end_of(m, sa, ta), 1000);
        EQUAL(end_of(m, sb, launch(m, sb, 16, 100)), 1200);
        EQUAL(rg_model_remove_context(m, a), 0);
        EQUAL(rg_model_remove_context(m, b), 0);
        model_free(m);
    }
}

/* ---- Random programs */

static uint64_t random_state;
static uint32_t random_below(uint32_t n)
{
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)((random_state >> 33) % n);
}

enum { STREAMS = 6, EVENTS = 3 /* one a context */, CONTEXTS = 3, STEPS = 400 };
typedef struct {
    rg_model *m;
    uint32_t contexts[CONTEXTS], streams[STREAMS], events[EVENTS], graph;
    uint64_t tickets[STREAMS];
} program;

/* Room, recounted from the cohorts, must be what the runs say, and never below nothing. */
static void check_room(const rg_model *m)
{
    for (uint32_t d = 0; d < (m->p.shared ? 1 : RG_MODEL_MAX_CONTEXTS); d++) {
        if (!m->p.shared && !m->contexts[d].used) continue;
        uint64_t used[RG_MODEL_MAX_SMS][4] = {{0}};
        uint32_t stack[RG_MODEL_MAX_COHORTS], depth = 0;
        uint64_t weight[2] = {0}, demand[2] = {0};
        for (int kind = 0; kind < 2; kind++)
            if (m->domains[d].clock[kind].heap) stack[depth++] = m->domains[d].clock[kind].heap;
        while (depth) {
            const rg_model_cohort *c = &m->cohorts[stack[--depth]];
            uint32_t total = 0;
            for (uint32_t i = 0, sm = 0; i < c->runs; i++)
                for (; sm < c->run_end[i]; sm++) {
                    total += c->count[i];
                    for (int lane = 0; lane < 4; lane++)
                        used[sm][lane] += c->count[i] * (c->need >> lane * 16 & 0xffff);
                }
            EQUAL(total, c->total);
            weight[c->bound] += c->weight;
            demand[c->bound] += c->demand;
            if (c->child) stack[depth++] = c->child;
            if (c->sibling) stack[depth++] = c->sibling;
        }
        for (int kind = 0; kind < 2; kind++) {
            EQUAL(m->domains[d].clock[kind].weight, weight[kind]);
            EQUAL(m->domains[d].clock[kind].demand, demand[kind]);
        }
        uint32_t busy = 0;
        const rg_model_domain *dom = &m->domains[d];
        EQUAL(dom->run_end[dom->runs - 1], m->p.sms);
        for (uint32_t i = 0, sm = 0; i < dom->runs; i++)
            for (; sm < dom->run_end[i]; sm++) {
                busy += dom->room[i] != m->whole;
                for (int lane = 0; lane < 4; lane++) {
                    uint64_t whole = m->whole >> lane * 16 & 0xffff;
                    TRUE(used[sm][lane] <= whole);
                    EQUAL((dom->room[i] >> lane * 16 & 0xffff) + used[sm][lane], whole);
                }
            }
        EQUAL(busy, dom->busy_sms);
    }
}

static void program_start(program *g, uint64_t seed)
{
    random_state = seed;
    rg_model_params p = tiny;
    p.sms = 1 + random_below(9);
    p.blocks_per_sm = 1 + random_below(16);
    p.shared = random_below(2);
    p.switch_ns = random_below(2) * random_below(200);
    p.launch_ns = random_below(2) * random_below(60);
    p.chain_ns = random_below(2) * random_below(30);
    p.graph_node_ns = random_below(20);
    p.slice_ns = 1 + random_below(2000);
    p.preempt_ns = random_below(2) * random_below(100);
    p.disturb_ns = random_below(2) * random_below(100);
    p.sm_contention = random_below(2) * random_below(1500);
    p.mixed_contention = random_below(1001);
    p.idle_ns = random_below(2) * random_below(300);
    g->m = model_new(&p);
    for (int i = 0; i < CONTEXTS; i++) g->contexts[i] = context(g->m);
    for (int i = 0; i < STREAMS; i++) {
        int sync = i < CONTEXTS ? RG_MODEL_LEGACY : (int)random_below(2);
        g->tickets[i] = 0;
        EQUAL(rg_model_create_stream(g->m, g->contexts[i % CONTEXTS], -(int)random_below(6), sync, &g->streams[i]), 0);
    }
    for (int i = 0; i < EVENTS; i++) g->events[i] = event(g->m, g->contexts[i]);
    rg_model_create_graph(g->m, g->contexts[0], &g->graph);
    for (uint32_t i = random_below(5); i; i--) {
        rg_model_kernel k = blocks(1 + random_below(40), 1 + random_below(100));
        if (random_below(3)) rg_model_graph_kernel(g->m, g->graph, &k, -(int)random_below(6));
        else rg_model_graph_transfer(g->m, g->graph, (rg_model_transfer)random_below(4), random_below(300));
    }
}

static void program_step(program *g)
{
    uint32_t s = random_below(STREAMS), what = random_below(100), event_id = g->events[random_below(EVENTS)];
    uint64_t t = 0;
    rg_model_kernel k = {
        .blocks = 1 + random_below(random_below(4) ? 30 : 400),
        .threads = 1 + random_below(1024),
        .registers = random_below(64),
        .shared_bytes = random_below(2) * random_below(40000),
        .block_ns = random_below(500),
        .memory_permille = random_below(1001),
        .memory_bound = random_below(2),
    };
    uint64_t bytes = random_below(2000);
    int priority = random_below(3) ? RG_MODEL_INHERIT : -(int)random_below(6);
    if (what < 57) rg_model_submit_kernel(g->m, g->streams[s], &k, priority, &t);
    else if (what < 60) rg_model_submit_stop(g->m, g->streams[s], &t);
    else if (what < 75) rg_model_submit_transfer(g->m, g->streams[s], (rg_model_transfer)(what % 4), bytes, &t);
    else if (what < 83) rg_model_record(g->m, g->events[s % CONTEXTS], g->streams[s], &t);
    else if (what < 91) rg_model_wait(g->m, event_id, g->streams[s], &t);
    else if (what < 96) rg_model_submit_graph(g->m, g->streams[s], g->graph, &t);
    else if (what < 97) rg_model_set_priority(g->m, g->streams[s], -(int)random_below(6));
    else if (what < 98) rg_model_set_slice(g->m, g->contexts[s % CONTEXTS], 1 + random_below(2000));
    else if (what < 99) rg_model_suspend(g->m, g->contexts[s % CONTEXTS], random_below(2));
    else rg_model_stop(g->m, g->contexts[s % CONTEXTS], random_below(2));
    if (t) g->tickets[s] = t;
}

static void program_resume(program *g)
{
    for (int i = 0; i < CONTEXTS; i++) {
        rg_model_suspend(g->m, g->contexts[i], false);
        rg_model_stop(g->m, g->contexts[i], false);
    }
}

/* mode 0: one advance to each step's time; 1: many small ones; 2: event by event, with every invariant checked. */
static void program_run(program *g, uint64_t seed, int mode)
{
    program_start(g, seed);
    uint64_t now = 0;
    for (int step = 0; step < STEPS; step++) {
        now += random_below(4) ? random_below(60) : random_below(3000);
        if (mode == 1)
            for (uint64_t t = g->m->now; t < now; t += 1 + (now - t) / 3) rg_model_advance(g->m, t);
        if (mode == 2) {
            uint64_t bound[STREAMS];
            for (int i = 0; i < STREAMS; i++) bound[i] = rg_model_earliest(g->m, g->streams[i], g->tickets[i]);
            for (uint64_t next; (next = rg_model_next_event(g->m)) <= now;) {
                TRUE(next >= g->m->now);
                rg_model_advance(g->m, next);
                check_room(g->m);
                for (int i = 0; i < STREAMS; i++)
                    TRUE(!rg_model_done(g->m, g->streams[i], g->tickets[i]) || g->m->now >= bound[i]);
            }
        }
        rg_model_advance(g->m, now);
        program_step(g);
    }
    program_resume(g);
    if (mode == 2) run_out(g->m);
    rg_model_advance(g->m, now + 100 * 1000 * 1000);
    EQUAL(rg_model_next_event(g->m), RG_MODEL_NEVER);
    for (int i = 0; i < STREAMS; i++) TRUE(rg_model_stream_idle(g->m, g->streams[i]));
    for (int i = 0; i < EVENTS; i++) TRUE(rg_model_event_done(g->m, g->events[i], NULL));
    check_room(g->m);
}

static void test_random_programs(void)
{
    for (uint64_t seed = 1; seed <= 60 && !failures; seed++) {
        program run[3];
        for (int mode = 0; mode < 3; mode++) program_run(&run[mode], seed, mode);
        /* However time was cut up, the whole state is the same, to the byte. */
        check(!memcmp(run[0].m, run[1].m, sizeof *run[0].m), __LINE__, "seed %d: small steps differ", (int)seed);
        check(!memcmp(run[0].m, run[2].m, sizeof *run[0].m), __LINE__, "seed %d: single events differ", (int)seed);
        for (int mode = 0; mode < 3; mode++) model_free(run[mode].m);
    }
}

/* Contexts are removed at random instants under full load: the rest finishes, room and memory come back. */
static void test_random_removals(void)
{
    for (uint64_t seed = 1; seed <= 60 && !failures; seed++) {
        program g;
        program_start(&g, seed * 7919);
        uint64_t now = 0;
        for (int step = 0; step < STEPS; step++) {
            now += random_below(80);
            rg_model_advance(g.m, now);
            program_step(&g);
            if (random_below(60) == 0) {
                uint32_t which = random_below(CONTEXTS);
                EQUAL(rg_model_remove_context(g.m, g.contexts[which]), 0);
                check_room(g.m);
                g.contexts[which] = context(g.m);
                EQUAL(rg_model_allocate(g.m, g.contexts[which], 300), 0);
                for (uint32_t i = which; i < STREAMS; i += CONTEXTS)
                    rg_model_create_stream(g.m, g.contexts[which], 0, i < CONTEXTS ? 2 : 1, &g.streams[i]);
                g.events[which] = event(g.m, g.contexts[which]);
                if (which == 0) rg_model_create_graph(g.m, g.contexts[0], &g.graph);
            }
        }
        program_resume(&g);
        run_out(g.m);
        check_room(g.m);
        for (int i = 0; i < STREAMS; i++) TRUE(rg_model_stream_idle(g.m, g.streams[i]));
        for (int i = 0; i < CONTEXTS; i++) EQUAL(rg_model_remove_context(g.m, g.contexts[i]), 0);
        rg_model_stats stats;
        rg_model_get_stats(g.m, &stats);
        EQUAL(stats.memory_bytes, 0);
        model_free(g.m);
    }
}

int main(void)
{
    static const struct {
        const char *name;
        void (*run)(void);
    } tests[] = {
        {"waves", test_waves},
        {"occupancy", test_occupancy},
        {"placement", test_placement},
        {"two kernels share SMs", test_two_kernels},
        {"contention for SMs", test_contention},
        {"contention for bandwidth", test_bandwidth},
        {"priority at block boundaries", test_priority},
        {"first come, first served", test_fifo},
        {"launch and chain latency", test_latencies},
        {"time slices", test_slices},
        {"time slices: alignment, waves", test_slice_grid},
        {"time slices: three contexts", test_slices_of_three},
        {"time slices: lengths", test_slice_lengths},
        {"time slices: state", test_slices_and_state},
        {"time slices: without work", test_slices_idle},
        {"time slices: short and long", test_slices_asymmetric},
        {"suspended while it runs", test_suspend_running},
        {"suspended, another has the SMs", test_suspend_disturbs},
        {"suspended between waves", test_suspend_waves},
        {"suspended beside others", test_suspend_beside},
        {"stops", test_stops},
        {"suspended while it does not run", test_suspend_waiting},
        {"all suspended", test_suspend_both},
        {"copies", test_copies},
        {"events", test_events},
        {"graphs", test_graph},
        {"legacy stream", test_legacy_stream},
        {"removal of a context", test_removal},
        {"limits and ids", test_limits},
        {"recovery", test_recover},
        {"random programs", test_random_programs},
        {"random removals", test_random_removals},
    };
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
        test_name = tests[i].name;
        tests[i].run();
    }
    return failures ? 1 : 0;
}
