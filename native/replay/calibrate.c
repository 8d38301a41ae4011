/*
 * calibrate.c: measures what the simulator's model of a GPU needs to know of one: copies, launches, time slices, and how far kernels slow
 * one another side by side.
 *
 * One thread, one process. Times are those of the GPU's own events, but for what a launch takes its caller. Kernels side by side are in two
 * streams of one context, which is also what MPS makes of two processes; time slices are those of two contexts, which do not run side by side,
 * whether one process made them or two. On the simulated GPU the same is launched; kernels say there how long they take.
 *
 * It changes no setting of the device, and nothing that it makes outlives it. Another program on the GPU spoils every number; medians
 * over several kernels keep out single disturbances only.
 */
#include "calibrate.h"

#include "driver.h"
#include "inspect.h"
#include "spin_ptx.h"
#include "stream_ptx.h"

#include <inttypes.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CU(name, ...) rg_check(rg_cu.name(__VA_ARGS__), #name)

/* What a kernel takes that does nothing: CUPTI's duration of one on an H200. Recorded durations hold it, chain_ns does not. */
#define EMPTY_NS 1000.0
#define US 1000.0
#define MS 1000000.0

enum { STREAM_PERMILLE = 800 }; /* of the simulated GPU's bandwidth */

/* A kernel as it is launched; `chain` makes it last `block_ns`. */
typedef struct {
    CUfunction function;
    bool streams;
    uint32_t blocks, threads, shared_bytes;
    uint64_t chain, block_ns;
    CUdeviceptr from;
    double rate; /* of a streaming one alone: bytes a nanosecond */
} work;

/* One context: its own functions, streams and events. */
enum { EVENTS = 1024 };
typedef struct {
    CUcontext context;
    CUfunction spin, stream;
    CUstream streams[2];
    CUevent events[EVENTS];
} side;

typedef struct {
    uint32_t sms, threads_per_sm, shared_bytes_per_sm;
    uint64_t mask; /* of each half of the memory that is read */
    CUdeviceptr memory;
    uint32_t step, steps;
} bench;

/* ---- Numbers */

static double host_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Sorts them. */
static double median(double *values, uint32_t count)
{
    if (!count)
        return NAN;
    qsort(values, count, sizeof(*values), compare_doubles);
    return count % 2 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
}

/* What is not a number stays so. */
static double at_least_0(double value)
{
    return value < 0 ? 0 : value;
}

static double between_ns(CUevent from, CUevent to)
{
    float ms;
    CU(cuEventElapsedTime, &ms, from, to);
    return (double)ms * MS;
}

/* ---- Output */

/* What was measured, printed at the end. NAN: it could not be. */
enum { VALUES = 32 };
static struct {
    const char *key;
    double value;
} values[VALUES];
static uint32_t value_count;

static void keep(const char *key, double value)
{
    if (value_count == VALUES) {
        rg_say("more than %d values", VALUES);
        exit(1);
    }
    values[value_count].key = key;
    values[value_count++].value = value;
}

static void print_number(double value)
{
    if (isfinite(value))
        printf("%.10g", value);
    else
        fputs("null", stdout);
}

static void step(bench *b, const char *what)
{
    printf("{\"step\":\"%s\",\"at\":%u,\"of\":%u}\n", what, b->step++, b->steps);
    fflush(stdout);
}

/* ---- Kernels */

static void make_side(side *s, CUcontext context)
{
    CUmodule spin, stream;
    s->context = context;
    CU(cuCtxSetCurrent, context);
    CU(cuModuleLoadData, &spin, rg_spin_ptx);
    CU(cuModuleGetFunction, &s->spin, spin, RG_SPIN_KERNEL);
    CU(cuModuleLoadData, &stream, rg_stream_ptx);
    CU(cuModuleGetFunction, &s->stream, stream, RG_STREAM_KERNEL);
    for (int i = 0; i < 2; i++)
        CU(cuStreamCreate, &s->streams[i], CU_STREAM_NON_BLOCKING);
    for (int i = 0; i < EVENTS; i++)
        CU(cuEventCreate, &s->events[i], CU_EVENT_DEFAULT);
}

/* One division of the L1 cache for all launches: changing it makes an SM run empty first. May be refused. */
static void allow_shared(side *s, CUdevice device)
{
    int most = 0;
    CU(cuDeviceGetAttribute, &most, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device);
    CUfunction both[] = {s->spin, s->stream};
    for (int i = 0; i < 2; i++) {
        CU(cuFuncSetAttribute, both[i], CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, most);
        (void)rg_cu.cuFuncSetAttribute(both[i], CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100);
    }
}

static void launch(const bench *b, const work *w, CUstream stream)
{
    uint64_t chain = w->chain, block_ns = w->block_ns, permille = STREAM_PERMILLE, from = w->from, mask = b->mask;
    void *spin[] = {&chain, &block_ns}, *streaming[] = {&chain, &block_ns, &permille, &from, &mask};
    CU(cuLaunchKernel, w->function, w->blocks, 1, 1, w->threads, 1, 1, w->shared_bytes, stream,
       w->streams ? streaming : spin, NULL);
}

/* What it takes now, between two events: the least of several. */
static double least_ns(const bench *b, const side *s, const work *w)
{
    double least = INFINITY;
    for (int i = 0; i < 5; i++) {
        CU(cuEventRecord, s->events[0], s->streams[0]);
        launch(b, w, s->streams[0]);
        CU(cuEventRecord, s->events[1], s->streams[0]);
        CU(cuEventSynchronize, s->events[1]);
        least = fmin(least, between_ns(s->events[0], s->events[1]));
    }
    return least;
}

/* Makes it last `ns` alone. What an iteration takes is the difference of two lengths, so that what a launch costs drops out. */
static void fit(const bench *b, const side *s, work *w, double ns)
{
    w->block_ns = (uint64_t)ns;
    w->chain = 1;
    if (rg_simulated)
        return;
    uint64_t chain = w->streams ? 4 : 2000;
    double slope;
    for (;;) { /* long enough for the clock of events, and for the GPU's to rise */
        w->chain = 2 * chain;
        double twice = least_ns(b, s, w);
        w->chain = chain;
        slope = (twice - least_ns(b, s, w)) / (double)chain;
        if ((slope > 0 && twice > 400 * US) || chain > UINT64_MAX / 8)
            break;
        chain *= 2;
    }
    w->chain = ns > EMPTY_NS ? (uint64_t)((ns - EMPTY_NS) / slope + 0.5) : 0;
    if (w->streams)
        w->rate = (double)w->blocks * w->threads * 16 * RG_STREAM_LOADS / slope;
}

static work spinning(const side *s, uint32_t blocks, uint32_t threads, uint32_t shared_bytes)
{
    return (work){.function = s->spin, .blocks = blocks, .threads = threads, .shared_bytes = shared_bytes};
}

static work streaming(const bench *b, const side *s, uint32_t blocks, uint32_t threads, uint32_t shared_bytes, int half)
{
    work w = spinning(s, blocks, threads, shared_bytes);
    w.function = s->stream;
    w.streams = true;
    w.from = b->memory + (half ? b->mask + 1 : 0);
    return w;
}

/* ---- Copies */

typedef enum { DEVICE, TO_DEVICE, TO_HOST } direction;

static double copies_ns(const bench *b, const side *s, direction way, void *host, size_t bytes)
{
    enum { COPIES = 8 };
    double least = INFINITY;
    CUdeviceptr other = b->memory + b->mask + 1;
    for (int round = 0; round < 4; round++) {
        CU(cuEventRecord, s->events[0], s->streams[0]);
        for (int i = 0; i < COPIES; i++) {
            if (way == DEVICE)
                CU(cuMemcpyDtoDAsync, other, b->memory, bytes, s->streams[0]);
            else if (way == TO_DEVICE)
                CU(cuMemcpyHtoDAsync, b->memory, host, bytes, s->streams[0]);
            else
                CU(cuMemcpyDtoHAsync, host, b->memory, bytes, s->streams[0]);
        }
        CU(cuEventRecord, s->events[1], s->streams[0]);
        CU(cuEventSynchronize, s->events[1]);
        least = fmin(least, between_ns(s->events[0], s->events[1]));
    }
    return least / COPIES;
}

/* Bytes a microsecond: by the difference of two sizes, so that what a copy costs to start drops out. */
static double copy_rate(const bench *b, const side *s, direction way, void *host, size_t bytes)
{
    double whole = copies_ns(b, s, way, host, bytes), half = copies_ns(b, s, way, host, bytes / 2);
    double moved = (double)(bytes - bytes / 2) * (way == DEVICE ? 2 : 1); /* each byte is read and written */
    return moved * US / (whole - half);
}

static void measure_copies(bench *b, const side *s)
{
    size_t host_bytes = rg_simulated ? 4u << 20 : 128u << 20;
    void *host;
    CU(cuMemHostAlloc, &host, host_bytes, 0);
    memset(host, 0, host_bytes);
    step(b, "copies within the device");
    keep("memory_bytes_per_us", copy_rate(b, s, DEVICE, NULL, (size_t)b->mask + 1));
    step(b, "copies from and to the host");
    keep("h2d_bytes_per_us", copy_rate(b, s, TO_DEVICE, host, host_bytes));
    keep("d2h_bytes_per_us", copy_rate(b, s, TO_HOST, host, host_bytes));
}

/* ---- Launches */

/* From the beginning of the first to the end of the last of `count` kernels that wait in one stream before the first begins. */
static double row_ns(const bench *b, const side *s, const work *before, const work *w, uint32_t count)
{
    double least = INFINITY;
    for (int round = 0; round < 5; round++) {
        launch(b, before, s->streams[0]);
        CU(cuEventRecord, s->events[0], s->streams[0]);
        for (uint32_t i = 0; i < count; i++)
            launch(b, w, s->streams[0]);
        CU(cuEventRecord, s->events[1], s->streams[0]);
        CU(cuEventSynchronize, s->events[1]);
        least = fmin(least, between_ns(s->events[0], s->events[1]));
    }
    return least;
}

static void measure_launches(bench *b, const side *s)
{
    enum { ROUNDS = 50, SHORT = 50, LONG = 300 };
    work empty = spinning(s, 1, 32, 0), before = empty;
    double calls[ROUNDS], trips[ROUNDS];
    step(b, "launches");
    fit(b, s, &before, 5 * MS); /* longer than it takes to launch the others */
    empty.block_ns = (uint64_t)EMPTY_NS;
    for (int i = 0; i < ROUNDS; i++) {
        double begun = host_ns();
        launch(b, &empty, s->streams[0]);
        calls[i] = host_ns() - begun;
        CU(cuStreamSynchronize, s->streams[0]);
        trips[i] = host_ns() - begun;
    }
    double row = row_ns(b, s, &before, &empty, LONG) - row_ns(b, s, &before, &empty, SHORT);
    keep("chain_ns", at_least_0(row / (LONG - SHORT) - EMPTY_NS));
    keep("launch_call_ns", rg_simulated ? NAN : median(calls, ROUNDS));
    keep("round_trip_ns", rg_simulated ? NAN : median(trips, ROUNDS));
}

/* ---- Kernels side by side */

enum { KERNELS = 12 };

/* What each of several in a row takes, in ns by where it ended, after `from`. */
static double usual_ns(const side *s, uint32_t first, CUevent from, double until_ns)
{
    double ns[KERNELS];
    uint32_t count = 0;
    for (uint32_t i = 1; i < KERNELS; i++) /* the first one saw the other begin */
        if (between_ns(from, s->events[first + i + 1]) <= until_ns)
            ns[count++] = between_ns(s->events[first + i], s->events[first + i + 1]);
    return median(ns, count);
}

static void launch_row(const bench *b, const side *s, const work *w, uint32_t first, CUstream stream)
{
    CU(cuEventRecord, s->events[first], stream);
    for (uint32_t i = 0; i < KERNELS; i++) {
        launch(b, w, stream);
        CU(cuEventRecord, s->events[first + i + 1], stream);
    }
}

static double alone_ns(const bench *b, const side *s, const work *w)
{
    launch_row(b, s, w, 1, s->streams[0]);
    CU(cuEventSynchronize, s->events[1 + KERNELS]);
    return usual_ns(s, 1, s->events[1], INFINITY);
}

typedef struct {
    const char *first, *second, *sms;
    double first_slower, second_slower;
} pair;

enum { PAIRS = 7 };
static pair pairs[PAIRS];
static uint32_t pair_count;

/* How much longer each takes beside the other. Returns by how much the two together are slowed: the harmonic mean. */
static double run_pair(bench *b, const side *s, const char *names[3], const work *before, const work *one, const work *two)
{
    enum { GATE = 0, ONE = 1, TWO = ONE + KERNELS + 1 };
    step(b, "kernels side by side");
    double one_ns = alone_ns(b, s, one), two_ns = alone_ns(b, s, two);
    launch(b, before, s->streams[0]);
    CU(cuEventRecord, s->events[GATE], s->streams[0]);
    CU(cuStreamWaitEvent, s->streams[1], s->events[GATE], 0);
    launch_row(b, s, one, ONE, s->streams[0]);
    launch_row(b, s, two, TWO, s->streams[1]);
    for (int i = 0; i < 2; i++)
        CU(cuStreamSynchronize, s->streams[i]);
    CUevent from = s->events[GATE];
    double until = fmin(between_ns(from, s->events[ONE + KERNELS]), between_ns(from, s->events[TWO + KERNELS])) + 1;
    pair p = {names[0], names[1], names[2], usual_ns(s, ONE, from, until) / one_ns, usual_ns(s, TWO, from, until) / two_ns};
    pairs[pair_count++] = p;
    return 2 / (1 / p.first_slower + 1 / p.second_slower);
}

/*
 * `compute` takes so much shared memory that an SM holds one block of it: to the model it fills the GPU. `beside` and `memory` fill what it
 * leaves of an SM's threads, all but one of the blocks that an SM holds. `few` has a quarter of the SMs to itself when it is alone.
 */
static void measure_pairs(bench *b, const side *s)
{
    enum { THREADS = 512 };
    uint32_t held = b->threads_per_sm / THREADS, more = b->shared_bytes_per_sm / 2 + 1024, half = b->sms / 2;
    work before = spinning(s, 1, 32, 0), compute = spinning(s, b->sms, THREADS, more),
         beside = spinning(s, b->sms * (held - 1), THREADS, 0),
         memory = streaming(b, s, b->sms * (held - 1), THREADS, 0, 0), other = streaming(b, s, b->sms, THREADS, 0, 1),
         few = spinning(s, b->sms / 4 ? b->sms / 4 : 1, THREADS, 0), half_compute = spinning(s, half, THREADS, more), half_memory = streaming(b, s, half, THREADS, more, 0),
         half_other = streaming(b, s, half, THREADS, more, 1);
    work *all[] = {&before, &compute, &beside, &memory, &other, &few, &half_compute, &half_memory, &half_other};
    step(b, "kernels alone");
    for (uint32_t i = 0; i < sizeof(all) / sizeof(*all); i++)
        fit(b, s, all[i], i ? 2 * MS : 5 * MS);
    work widest = memory, eighth = streaming(b, s, b->sms / 8 ? b->sms / 8 : 1, 1024, more, 0);
    widest.blocks = b->sms * held;
    fit(b, s, &widest, 2 * MS);
    fit(b, s, &eighth, 2 * MS);
    keep("read_bytes_per_us", rg_simulated ? NAN : widest.rate * US);
    keep("half_read_bytes_per_us", rg_simulated ? NAN : half_memory.rate * US);
    keep("eighth_read_bytes_per_us", rg_simulated ? NAN : eighth.rate * US);

    double room = (held - 1.0) / held;
    double sm = run_pair(b, s, (const char *[]){"compute", "compute", "same"}, &before, &compute, &beside);
    double mixed = run_pair(b, s, (const char *[]){"compute", "memory", "same"}, &before, &compute, &memory);
    run_pair(b, s, (const char *[]){"memory", "memory", "same"}, &before, &memory, &other);
    run_pair(b, s, (const char *[]){"compute", "compute", "some"}, &before, &few, &beside);
    run_pair(b, s, (const char *[]){"compute", "compute", "apart"}, &before, &half_compute, &half_compute);
    run_pair(b, s, (const char *[]){"compute", "memory", "apart"}, &before, &half_compute, &half_memory);
    run_pair(b, s, (const char *[]){"memory", "memory", "apart"}, &before, &half_memory, &half_other);
    /* The model's rule 6 in native/sim/model.h, solved for its constants. */
    double contention = at_least_0((sm - 1) / room);
    keep("sm_contention", contention * 1000);
    keep("mixed_contention", contention > 0 ? at_least_0((mixed - 1) / (room * contention)) * 1000 : NAN);
}

/* ---- Time slices */

/* Keeps the GPU busy in another context for `kernels` times 4 ms of its own. */
static void busy_with(const bench *b, const side *s, const work *w, uint32_t kernels)
{
    CU(cuCtxSetCurrent, s->context);
    for (uint32_t i = 0; i < kernels; i++)
        launch(b, w, s->streams[0]);
}

/* A kernel after the other in one context, beside another that always has work: where one takes long, the other one had the GPU. */
static void measure_slices(bench *b, const side *s, const side *rival, const work *long_one)
{
    enum { ROW = 700, LEAST_GAPS = 5, MARGIN_NS = 300000 };
    static double took[ROW], sorted[ROW], gaps[ROW];
    uint32_t count = 0, first = 0, last = 0;
    step(b, "time slices");
    CU(cuCtxSetCurrent, s->context);
    work w = spinning(s, b->sms, 512, 0);
    fit(b, s, &w, 100 * US);
    busy_with(b, rival, long_one, 45);
    CU(cuCtxSetCurrent, s->context);
    CU(cuEventRecord, s->events[0], s->streams[0]);
    for (int i = 0; i < ROW; i++) {
        launch(b, &w, s->streams[0]);
        CU(cuEventRecord, s->events[i + 1], s->streams[0]);
    }
    CU(cuStreamSynchronize, s->streams[0]);
    for (int i = 0; i < ROW; i++)
        sorted[i] = took[i] = between_ns(s->events[i], s->events[i + 1]);
    double usual = median(sorted, ROW);
    for (uint32_t i = 1; i < ROW; i++) { /* the first gap may be part of one: it is where the row begins */
        if (took[i] < usual + MARGIN_NS)
            continue;
        if (!count)
            first = i;
        last = i;
        gaps[count++] = took[i] - usual;
    }
    CU(cuCtxSetCurrent, rival->context);
    CU(cuStreamSynchronize, rival->streams[0]);
    CU(cuCtxSetCurrent, s->context);
    double gap = NAN, slice = NAN;
    if (count >= LEAST_GAPS) {
        double period = between_ns(s->events[first + 1], s->events[last + 1]) / (count - 1);
        gap = median(gaps, count);
        slice = period - gap; /* the other one's is the same: both have the driver's */
    }
    if (slice < 3.0 * (double)w.block_ns) /* it waits for kernels, not for slices: the contexts share the GPU, as under MPS */
        gap = slice = NAN;
    keep("slice_ns", slice);
    keep("switch_ns", at_least_0((gap - slice) / 2));
}

/* The part of kernels that find the GPU taken away from them, when each comes so long after the one before. */
static double taken(bench *b, const side *s, const side *rival, const work *w, const work *long_one, size_t bytes,
                    void *host, double *idle_ns)
{
    enum { ROW = 40, PER = 3, MARGIN_NS = 300000 };
    double took[ROW], sorted[ROW];
    uint32_t late = 0;
    for (int round = 0; round < 2; round++) { /* alone, for how long the gap is; beside the other */
        if (round)
            busy_with(b, rival, long_one, 2 + ROW * 24 / 40);
        CU(cuCtxSetCurrent, s->context);
        for (uint32_t i = 0; i < ROW; i++) {
            const CUevent *e = &s->events[i * PER];
            CU(cuEventRecord, e[0], s->streams[0]);
            CU(cuStreamWaitEvent, s->streams[1], e[0], 0);
            if (bytes)
                CU(cuMemcpyHtoDAsync, b->memory, host, bytes, s->streams[1]);
            CU(cuEventRecord, e[1], s->streams[1]);
            CU(cuStreamWaitEvent, s->streams[0], e[1], 0);
            launch(b, w, s->streams[0]);
            CU(cuEventRecord, e[2], s->streams[0]);
        }
        CU(cuStreamSynchronize, s->streams[0]);
        for (uint32_t i = 0; i < ROW; i++)
            took[i] = between_ns(s->events[i * PER], s->events[i * PER + 2]);
        if (!round) {
            memcpy(sorted, took, sizeof(sorted));
            *idle_ns = median(sorted, ROW) - (double)w->block_ns;
        } else {
            for (uint32_t i = 1; i < ROW; i++)
                late += took[i] > *idle_ns + (double)w->block_ns + MARGIN_NS;
        }
    }
    CU(cuCtxSetCurrent, rival->context);
    CU(cuStreamSynchronize, rival->streams[0]);
    CU(cuCtxSetCurrent, s->context);
    return (double)late / (ROW - 1);
}

/*
 * How long a context may have nothing to do before another gets the GPU: where half of its kernels have to wait for a slice. Where they do after
 * the shortest gap that can be made, half of that.
 */
static void measure_idle(bench *b, const side *s, const side *rival, const work *long_one, double chain_ns)
{
    enum { HALVINGS = 10 }; /* and one before: rg_calibrate counts the steps */
    size_t least = 4096, most = b->mask < (24u << 20) ? 2 * ((size_t)b->mask + 1) : 48u << 20;
    void *host;
    double idle_ns = 0, kept_ns = 0, lost_ns = NAN;
    CU(cuCtxSetCurrent, s->context);
    CU(cuMemHostAlloc, &host, most, 0);
    work w = spinning(s, b->sms, 512, 0);
    fit(b, s, &w, 20 * US);
    step(b, "idle contexts");
    if (taken(b, s, rival, &w, long_one, 0, host, &idle_ns) > 0.5) { /* two hops between streams are too long already */
        lost_ns = idle_ns;
        most = least;
    } else {
        kept_ns = idle_ns;
    }
    for (int i = 0; i < HALVINGS; i++) {
        step(b, "idle contexts");
        if (least == most)
            continue;
        size_t bytes = (size_t)sqrt((double)least * (double)most) & ~(size_t)15;
        if (taken(b, s, rival, &w, long_one, bytes, host, &idle_ns) > 0.5) {
            most = bytes;
            lost_ns = idle_ns;
        } else {
            least = bytes;
            kept_ns = idle_ns;
        }
    }
    keep("idle_ns", at_least_0((kept_ns + lost_ns) / 2 - chain_ns)); /* work is on its way for the rest */
}

/* ---- All of it */

static double value_of(const char *key)
{
    for (uint32_t i = 0; i < value_count; i++)
        if (strcmp(values[i].key, key) == 0)
            return values[i].value;
    return NAN;
}

static void print_result(const char *name, const bench *b)
{
    fputs("{\"device\":{\"name\":", stdout);
    rg_print_json(name);
    printf(",\"sms\":%u,\"simulated\":%s},\"values\":{", b->sms, rg_simulated ? "true" : "false");
    for (uint32_t i = 0; i < value_count; i++) {
        printf("%s\"%s\":", i ? "," : "", values[i].key);
        print_number(values[i].value);
    }
    fputs("},\"pairs\":[", stdout);
    for (uint32_t i = 0; i < pair_count; i++) {
        const pair *p = &pairs[i];
        printf("%s{\"first\":\"%s\",\"second\":\"%s\",\"sms\":\"%s\",\"first_slower\":", i ? "," : "", p->first, p->second, p->sms);
        print_number(p->first_slower);
        fputs(",\"second_slower\":", stdout);
        print_number(p->second_slower);
        putchar('}');
    }
    puts("]}");
    fflush(stdout);
}

static int attribute(CUdevice device, int which)
{
    int value = 0;
    CU(cuDeviceGetAttribute, &value, which, device);
    return value;
}

int rg_calibrate(int index)
{
    static side own, rival;
    bench b = {.steps = 3 + 1 + PAIRS + 1 + 11};
    char why[256], name[256] = "";
    CUdevice device;
    CUcontext primary, second;
    if (!rg_load_driver(why, sizeof(why))) {
        rg_say("no CUDA driver: %s", why);
        return 1;
    }
    CU(cuInit, 0);
    CU(cuDeviceGet, &device, index);
    CU(cuDeviceGetName, name, sizeof(name), device);
    b.sms = (uint32_t)attribute(device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    b.threads_per_sm = (uint32_t)attribute(device, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR);
    b.shared_bytes_per_sm = (uint32_t)attribute(device, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);

    CU(cuDevicePrimaryCtxRetain, &primary, device);
    make_side(&own, primary);
    allow_shared(&own, device);
    size_t free_bytes, total_bytes, half = rg_simulated ? 8u << 20 : 1u << 30; /* far beyond the L2 cache */
    CU(cuMemGetInfo, &free_bytes, &total_bytes);
    while (half > 8u << 20 && half > free_bytes / 4)
        half /= 2;
    b.mask = half - 1;
    CU(cuMemAlloc, &b.memory, 2 * half);
    CU(cuMemsetD8Async, b.memory, 0, 2 * half, own.streams[0]);
    CU(cuStreamSynchronize, own.streams[0]);

    measure_copies(&b, &own);
    measure_launches(&b, &own);
    measure_pairs(&b, &own);

    CU(cuCtxCreate, &second, 0, device);
    make_side(&rival, second);
    allow_shared(&rival, device);
    work long_one = spinning(&rival, b.sms * 2, b.threads_per_sm / 2, 0);
    fit(&b, &rival, &long_one, 4 * MS);
    measure_slices(&b, &own, &rival, &long_one);
    if (isnan(value_of("slice_ns")))
        keep("idle_ns", NAN);
    else
        measure_idle(&b, &own, &rival, &long_one, value_of("chain_ns"));
    CU(cuCtxDestroy, second);
    print_result(name, &b);
    return 0;
}
