/*
 * cold.h: what a call costs where nothing of it is in the processor's caches, for bench/hotpath.c and bench/guard.c.
 *
 * Between two launches a program like PyTorch runs some hundred thousand instructions of its own. cold_disturb does to a core what
 * those do: it walks a buffer of twice the size of the second level cache (what was there is in the third level then), reads as many
 * pages as the TLB has entries and more, jumps through code that no two jumps share a line of, and takes branches by chance.
 * Each call is timed by itself. The two clock readings are in that time: whoever subtracts a time taken in the same way is rid of them.
 */
#ifndef RIGEL_BENCH_COLD_H
#define RIGEL_BENCH_COLD_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { COLD_LINE = 64, COLD_PAGE = 4096, COLD_PAGES = 6144, COLD_CODE_LINES = 12288, COLD_PASS_LINES = 5120, COLD_BRANCHES = 8192 };

static struct {
    char *lines, *pages;
    uint32_t *line_order, line_count;
    uint16_t page_offset[COLD_PAGES];
    void (*code)(void), (*pass)(void);
    uint8_t chance[COLD_BRANCHES];
    uint64_t random;
    volatile uint64_t sink;
} cold;

static inline uint64_t cold_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static uint64_t cold_random(void)
{
    cold.random = cold.random * 6364136223846793005u + 1442695040888963407u;
    return cold.random >> 33;
}

/* 0 to n - 1 in an order of chance. */
static uint32_t *cold_order(uint32_t n)
{
    uint32_t *order = malloc(n * sizeof *order);
    for (uint32_t i = 0; order && i < n; i++) {
        uint32_t k = (uint32_t)(cold_random() % (i + 1));
        order[i] = order[k];
        order[k] = i;
    }
    return order;
}

/* Lines of code in an order of chance, each of which jumps to the next; the last one returns. */
static void (*cold_code(uint32_t lines))(void)
{
    size_t bytes = (size_t)lines * COLD_LINE;
    uint32_t *order = cold_order(lines);
    char *code = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (!order || code == MAP_FAILED)
        return NULL;
    for (uint32_t i = 0; i < lines; i++) {
        char *from = code + (size_t)order[i] * COLD_LINE;
        bool last = i + 1 == lines;
        int32_t by = last ? 0 : ((int32_t)order[i + 1] - (int32_t)order[i]) * COLD_LINE;
#if defined(__x86_64__)
        int32_t relative = by - 5;
        from[0] = last ? (char)0xc3 : (char)0xe9; /* ret, jmp */
        memcpy(from + 1, &relative, sizeof relative);
#elif defined(__aarch64__)
        uint32_t word = last ? 0xd65f03c0u : 0x14000000u | ((uint32_t)(by / 4) & 0x3ffffffu); /* ret, b */
        memcpy(from, &word, sizeof word);
#else
#error "no jumps for this processor"
#endif
    }
    void (*entry)(void);
    *(void **)&entry = code + (size_t)order[0] * COLD_LINE;
    __builtin___clear_cache(code, code + bytes);
    free(order);
    return mprotect(code, bytes, PROT_READ | PROT_EXEC) == 0 ? entry : NULL;
}

static bool cold_begin(void)
{
    long cache = sysconf(_SC_LEVEL2_CACHE_SIZE);
    size_t bytes = 2 * (size_t)(cache > 1 << 20 ? cache : 1 << 20), pages = (size_t)COLD_PAGES * COLD_PAGE;
    cold.random = 1;
    cold.line_count = (uint32_t)(bytes / COLD_LINE);
    cold.lines = malloc(bytes);
    cold.line_order = cold_order(cold.line_count);
    cold.code = cold_code(COLD_CODE_LINES);
    cold.pass = cold_code(COLD_PASS_LINES);
    /* Only read: all of it is one page of zeros, which takes as many entries of the TLB, and no room in the caches. */
    cold.pages = mmap(NULL, pages, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!cold.lines || !cold.line_order || !cold.code || !cold.pass || cold.pages == MAP_FAILED) {
        fprintf(stderr, "bench: no memory to disturb the caches with\n");
        return false;
    }
    madvise(cold.pages, pages, MADV_NOHUGEPAGE);
    memset(cold.lines, 1, bytes);
    for (int i = 0; i < COLD_PAGES; i++)
        cold.page_offset[i] = (uint16_t)(cold_random() % COLD_PAGE);
    return true;
}

static void cold_disturb(void)
{
    uint64_t sum = 0;
    cold.code();
    for (int i = 0; i < COLD_BRANCHES; i++)
        cold.chance[i] = (uint8_t)cold_random();
    for (int i = 0; i < COLD_BRANCHES; i++)
        if (cold.chance[i] & 1)
            cold.sink++;
    for (uint32_t i = 0; i < cold.line_count; i++)
        sum += (uint64_t)cold.lines[(size_t)cold.line_order[i] * COLD_LINE]++;
    for (uint32_t i = 0; i < COLD_PAGES; i++)
        sum += (uint64_t)cold.pages[(size_t)i * COLD_PAGE + cold.page_offset[i]];
    cold.sink += sum;
}

static int cold_compare(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/*
 * What the ten or twenty microseconds between two launches do: 320 KiB of code and 384 KiB of data, two thirds of it the same each time,
 * and two hundred pages. The first level caches, TLB and branch predictors hold something else then, the second level some of what was there.
 */
static inline void cold_pass(void)
{
    enum { LINES = 4096, OTHERS = 2048, PAGES = 192, BRANCHES = 1024 };
    static uint32_t turn;
    uint64_t sum = 0;
    cold.pass();
    for (uint32_t i = 0; i < LINES; i++)
        sum += (uint64_t)cold.lines[(size_t)i * COLD_LINE];
    for (uint32_t i = 0; i < OTHERS; i++)
        sum += (uint64_t)cold.lines[(size_t)cold.line_order[(turn * OTHERS + i) % cold.line_count] * COLD_LINE];
    for (uint32_t i = 0; i < PAGES; i++) {
        uint32_t page = (turn * PAGES + i) % COLD_PAGES;
        sum += (uint64_t)cold.pages[(size_t)page * COLD_PAGE + cold.page_offset[page]];
    }
    for (uint32_t i = 0; i < BRANCHES; i++)
        if (cold_random() & 1)
            cold.sink++;
    turn++;
    cold.sink += sum;
}

/*
 * Mean time of a call in a request of so many, the median over the requests, as one number on standard output: all caches are disturbed
 * before each request, and between two calls those of the first level. After a call comes an atomic operation, as in most programs:
 * what is still on its way from the caches is waited for.
 */
static inline int cold_report_requests(int requests, int calls, void (*call)(int))
{
    uint64_t *took = malloc((size_t)requests * sizeof *took);
    if (!took || !cold_begin())
        return 1;
    for (int i = -requests / 8 - 1; i < requests; i++) {
        uint64_t ns = 0;
        cold_disturb();
        for (int k = 0; k < calls; k++) {
            cold_pass();
            cold_now_ns();
            uint64_t start = cold_now_ns();
            call(k);
            __atomic_fetch_add(&cold.random, 0, __ATOMIC_SEQ_CST);
            ns += cold_now_ns() - start;
        }
        if (i >= 0)
            took[i] = ns;
    }
    qsort(took, (size_t)requests, sizeof *took, cold_compare);
    printf("%.2f\n", (double)took[requests / 2] / calls);
    free(took);
    return 0;
}

/* Median time of a call, as one number on standard output. `before` is not timed, and comes before the caches are disturbed. */
static int cold_report(int calls, void (*before)(void), void (*call)(void))
{
    uint64_t *took = malloc((size_t)calls * sizeof *took);
    if (!took || !cold_begin())
        return 1;
    for (int i = -calls / 8; i < calls; i++) {
        if (before)
            before();
        cold_disturb();
        cold_now_ns(); /* the clock itself is to be warm */
        cold_now_ns();
        uint64_t start = cold_now_ns();
        call();
        uint64_t ns = cold_now_ns() - start;
        if (i >= 0)
            took[i] = ns;
    }
    qsort(took, (size_t)calls, sizeof *took, cold_compare);
    printf("%.2f\n", (double)took[calls / 2]);
    free(took);
    return 0;
}

#endif
