/*
 * replay.c: rigel-replay, a program that asks of the GPU what a recorded profile says another program asked: the same
 * launches in the same order, with the same durations, SM footprint and host gaps, in a closed loop or at a rate. Of several profiles
 * each request is of one, drawn by its number (profiles.h).
 *
 * It is an ordinary CUDA client, on a real GPU and on the simulated one alike: it links no CUDA library, uses the
 * driver API only, and knows Rigel by optional symbols (rigel.h). One thread launches; a second one is there for
 * an idle time-out only, and shares one word with it.
 *
 * What it must keep to
 *   1. A request's latency counts from its due time, whatever happened to the requests before it (open loop).
 *   2. Percentiles are nearest-rank over every sample: the smallest sample that at least q% of all do not exceed.
 *   3. Nothing is ended because it takes long, unless --idle-timeout-s asks for it. --idle-ms is only how often a wait at the
 *      end says that it waits.
 *   4. SIGTERM and SIGINT end it after the request in progress; the report is printed all the same.
 *   5. With --log, every iteration is written down by when it fell due (or ended) after the start, in order; with --alternate, also
 *      whether it went past Rigel.
 *   6. Exit: 0; 2 for bad arguments or a bad profile; 1 for a CUDA failure, with the call and the error, and for an idle
 *      time-out, with what was waited for; the report is printed then, too.
 */
#include "../cuda_abi.h"
#include "arrivals.h"
#include "calibrate.h"
#include "driver.h"
#include "inspect.h"
#include "profiles.h"
#include "shape.h"
#include "spin_ptx.h"

#include <dlfcn.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>

#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define NS_PER_S 1000000000ull
#define NS_PER_MS 1000000ull
#define SPIN_NS 50000ull /* the end of every wait is spun: a sleep wakes up to 50 us late */
#define NAP_NS (50 * NS_PER_MS) /* of a wait that a signal ends */
#define AHEAD 16u        /* iterations a program that never waits may be ahead; the driver's queue ends sooner */

/*
 * What the GPU takes to start and end a grid is part of every recorded duration and is there again when it is replayed.
 * An empty kernel's recorded duration on an H200 is about 1 us.
 */
#define EMPTY_KERNEL_NS 1000u


/*
 * What an idle time-out looks at: the number of the call of the driver that the program is in, odd, or of the last one, even; TIMED_OUT
 * from when the program is being ended, by the thread that put it there and then owns everything.
 */
#define TIMED_OUT UINT64_MAX
static _Atomic uint64_t call_state;

/* Another thread ends the program: this one has nothing left to do. */
static void stay_if_timed_out(void)
{
    while (atomic_load(&call_state) == TIMED_OUT)
        pause();
}

/* Ends the program when a driver call failed: as a client it has nothing left to do then. */
static void check(CUresult result, const char *call)
{
    if (result == CUDA_SUCCESS)
        return;
    stay_if_timed_out();
    rg_check(result, call);
}
#define CU(name, ...) check(rg_cu.name(__VA_ARGS__), #name)

/* ---- Time */

static volatile sig_atomic_t stop_asked;

static void on_stop_signal(int signal_number)
{
    (void)signal_number;
    stop_asked = 1;
}

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * NS_PER_S + (uint64_t)t.tv_nsec;
}

static void pause_cpu(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Sleeps until shortly before, then spins. With `breakable`, returns early once a stop is asked for. */
static void wait_until(uint64_t due_ns, bool breakable)
{
    uint64_t now;
    while ((now = now_ns()) < due_ns && !(breakable && stop_asked)) {
        if (due_ns - now <= SPIN_NS) {
            pause_cpu();
            continue;
        }
        uint64_t until = due_ns - SPIN_NS;
        if (breakable && until - now > NAP_NS) /* a signal that comes before the sleep does not end it */
            until = now + NAP_NS;
        struct timespec t = {(time_t)(until / NS_PER_S), (long)(until % NS_PER_S)};
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL);
    }
}

/* ---- Options */

typedef struct {
    const char *profiles[RG_PROFILES_MOST], *arrivals, *windows, *log;
    uint32_t profile_count;
    uint64_t iterations; /* 0: no limit */
    double duration_s;   /* 0: no limit */
    double start_at;     /* UNIX time; 0: as soon as it is ready */
    double rate;         /* 0: closed loop, unless `arrivals` is a file */
    double idle_timeout_s; /* 0: none */
    uint64_t seed, warmup, idle_ms, alternate; /* alternate: 1 + seed; 0: not */
    int device;
    bool probe, inspect, calibrate, closed;
} options;

static const char usage[] =
    "usage: rigel-replay --profile FILE [--profile FILE ...] [options]\n"
    "Launches what a kernel profile (Orion's or Rigel's format) recorded, on the GPU or the simulated one.\n"
    "\n"
    "  --profile FILE        the kernel profile; up to 16 of them: each request is of one, by chance, each as often\n"
    "  --iterations N        end after N requests or iterations\n"
    "  --duration-s S        end after S seconds; with neither, run until SIGTERM\n"
    "  --rate R              R requests a second, open loop; without, one after the other\n"
    "  --arrivals KIND       uniform, poisson (default), or FILE: a JSON list of gaps in seconds, repeated\n"
    "  --closed              of these, those that fall due while the one before is served are left out: one user, who asks again\n"
    "  --seed N              of the Poisson arrivals, and of which profile a request is (default 1)\n"
    "  --windows FILE        in a closed loop, a JSON list of seconds: pause, work, pause, ...; then pause until the end\n"
    "  --warmup N            requests or iterations before measuring, of each profile in turn (default 3, or one of each)\n"
    "  --start-at T          measure from this UNIX time on, in seconds; what falls due before it is ready is left out\n"
    "  --alternate SEED      of each two requests one goes past Rigel (rigel_bypass_begin), by chance the first or the second\n"
    "  --log FILE            write every latency by its due time, or every end of an iteration, as JSON\n"
    "  --device I            index of the GPU (default 0)\n"
    "  --idle-ms MS          how often a wait for the GPU at the end is reported (default 500)\n"
    "  --idle-timeout-s S    end with an error once a launch or a wait has not returned for S seconds (default: never)\n"
    "  --probe               print the devices as a JSON array and exit\n"
    "  --calibrate           measure the device, print progress and what was measured as JSON lines and exit\n"
    "  --inspect             print what the driver says of itself as a JSON object and exit\n"
    "  --help\n"
    "\n"
    "One JSON line on standard output at the end: iterations, and latencies of requests from their due times.\n";

__attribute__((noreturn, format(printf, 1, 2))) static void bad_arguments(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fputs("rigel-replay: ", stderr);
    vfprintf(stderr, format, args);
    fputs("\nrigel-replay: --help lists the options\n", stderr);
    va_end(args);
    exit(2);
}

static double number_option(const char *name, const char *text, double least, double most)
{
    char *end;
    errno = 0;
    double value = strtod(text, &end);
    if (end == text || *end || errno || !(value >= least && value <= most))
        bad_arguments("%s: expected a number from %g to %g, got \"%s\"", name, least, most, text);
    return value;
}

static uint64_t integer_option(const char *name, const char *text, uint64_t least, uint64_t most)
{
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end || errno || value < least || value > most)
        bad_arguments("%s: expected an integer from %" PRIu64 " to %" PRIu64 ", got \"%s\"", name, least, most, text);
    return value;
}

static options read_options(int argc, char **argv)
{
    options o = {.seed = 1, .warmup = UINT64_MAX, .idle_ms = 500};
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i], *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0) {
            fputs(usage, stdout);
            exit(0);
        }
        if (strcmp(name, "--probe") == 0) {
            o.probe = true;
            continue;
        }
        if (strcmp(name, "--calibrate") == 0) {
            o.calibrate = true;
            continue;
        }
        if (strcmp(name, "--inspect") == 0) {
            o.inspect = true;
            continue;
        }
        if (strcmp(name, "--closed") == 0) {
            o.closed = true;
            continue;
        }
        static const char *const with_value[] = {"--profile", "--iterations", "--duration-s", "--rate", "--arrivals",
                                                 "--seed",    "--warmup",     "--device",     "--idle-ms", "--start-at", "--log",
                                                 "--idle-timeout-s", "--alternate", "--windows"};
        bool known = false;
        for (size_t k = 0; k < sizeof(with_value) / sizeof(with_value[0]); k++)
            known |= strcmp(name, with_value[k]) == 0;
        if (!known)
            bad_arguments("unknown option \"%s\"", name);
        if (!value)
            bad_arguments("%s: expected a value", name);
        i++;
        if (strcmp(name, "--profile") == 0 && o.profile_count == RG_PROFILES_MOST)
            bad_arguments("--profile: expected at most %u of them", RG_PROFILES_MOST);
        if (strcmp(name, "--profile") == 0)
            o.profiles[o.profile_count++] = value;
        else if (strcmp(name, "--iterations") == 0)
            o.iterations = integer_option(name, value, 1, UINT64_MAX);
        else if (strcmp(name, "--duration-s") == 0)
            o.duration_s = number_option(name, value, 1e-3, 1e7);
        else if (strcmp(name, "--rate") == 0)
            o.rate = number_option(name, value, 1e-6, 1e6);
        else if (strcmp(name, "--arrivals") == 0)
            o.arrivals = value;
        else if (strcmp(name, "--windows") == 0)
            o.windows = value;
        else if (strcmp(name, "--start-at") == 0)
            o.start_at = number_option(name, value, 1, 1e11);
        else if (strcmp(name, "--log") == 0)
            o.log = value;
        else if (strcmp(name, "--idle-timeout-s") == 0)
            o.idle_timeout_s = number_option(name, value, 1e-3, 86400);
        else if (strcmp(name, "--alternate") == 0)
            o.alternate = 1 + integer_option(name, value, 0, UINT32_MAX);
        else if (strcmp(name, "--seed") == 0)
            o.seed = integer_option(name, value, 0, UINT64_MAX);
        else if (strcmp(name, "--warmup") == 0)
            o.warmup = integer_option(name, value, 0, UINT64_MAX - 1);
        else if (strcmp(name, "--device") == 0)
            o.device = (int)integer_option(name, value, 0, 1023);
        else
            o.idle_ms = integer_option(name, value, 1, 3600000);
    }
    if (!o.probe && !o.inspect && !o.calibrate && !o.profile_count)
        bad_arguments("--profile: expected the file of a kernel profile");
    if (o.warmup == UINT64_MAX)
        o.warmup = o.profile_count > 3 ? o.profile_count : 3;
    return o;
}

/* The arrivals of the options; false for a closed loop. */
static bool open_arrivals(const options *o, rg_arrivals *out)
{
    bool poisson = !o->arrivals || strcmp(o->arrivals, "poisson") == 0;
    if (!poisson && strcmp(o->arrivals, "uniform") != 0) {
        char error[RG_PROFILE_ERROR_BYTES];
        if (rg_arrivals_read(o->arrivals, out, error, sizeof(error)) < 0)
            bad_arguments("--arrivals: %s", error);
        return true;
    }
    if (o->rate <= 0) {
        if (o->arrivals)
            bad_arguments("--arrivals %s: expected --rate with it", o->arrivals);
        if (o->closed)
            bad_arguments("--closed: expected --rate or --arrivals with it");
        return false;
    }
    enum rg_arrivals_kind kind = poisson ? RG_ARRIVALS_POISSON : RG_ARRIVALS_UNIFORM;
    rg_arrivals_init(out, kind, (uint64_t)(1e9 / o->rate + 0.5), o->seed);
    return true;
}

/* The spells of --windows, as gaps: of pause and work in turn. Without, none. */
static void open_windows(const options *o, bool open_loop, rg_arrivals *out)
{
    char error[RG_PROFILE_ERROR_BYTES];
    if (!o->windows)
        return;
    if (open_loop)
        bad_arguments("--windows: expected no --rate and no --arrivals with it: requests come when they fall due");
    if (rg_arrivals_read(o->windows, out, error, sizeof(error)) < 0)
        bad_arguments("--windows: %s", error);
}

/* ---- Output */

static int device_attribute(CUdevice device, int attribute)
{
    int value = 0;
    CU(cuDeviceGetAttribute, &value, attribute, device);
    return value;
}

/* --probe: the devices as JSON; none is an answer, not a failure. */
static int probe(void)
{
    char why[256];
    int count = 0;
    if (!rg_load_driver(why, sizeof(why))) {
        rg_say("no CUDA driver: %s", why);
    } else {
        CUresult result = rg_cu.cuInit(0);
        if (result == CUDA_SUCCESS)
            result = rg_cu.cuDeviceGetCount(&count);
        if (result != CUDA_SUCCESS)
            rg_say("no device: %s (%d)", rg_error_name(result), (int)result);
    }
    putchar('[');
    for (int i = 0; i < count; i++) {
        CUdevice device;
        char name[256] = "";
        CUuuid uuid;
        size_t memory_bytes = 0;
        CU(cuDeviceGet, &device, i);
        CU(cuDeviceGetName, name, sizeof(name), device);
        CU(cuDeviceGetUuid, &uuid, device);
        CU(cuDeviceTotalMem, &memory_bytes, device);
        printf("%s{\"index\":%d,\"name\":", i ? "," : "", i);
        rg_print_json(name);
        /* As nvidia-smi writes it, and CUDA_VISIBLE_DEVICES takes it: a part of a GPU is named after its profile (MIG user guide). */
        printf(",\"uuid\":\"%s-", strstr(name, " MIG ") ? "MIG" : "GPU");
        for (int b = 0; b < 16; b++)
            printf("%s%02x", b == 4 || b == 6 || b == 8 || b == 10 ? "-" : "", (unsigned char)uuid.bytes[b]);
        printf("\",\"simulated\":%s,\"sms\":%d,\"memory_bytes\":%zu,\"exclusive\":%s}", rg_simulated ? "true" : "false",
               device_attribute(device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT), memory_bytes,
               device_attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_MODE) == CU_COMPUTEMODE_EXCLUSIVE_PROCESS ? "true" : "false");
    }
    puts("]");
    return 0;
}

/* ---- The client */

typedef struct {
    uint64_t *ns;
    size_t count, capacity;
} samples;

typedef struct {
    rg_profile_op op;
    rg_shape shape;
    uint64_t chain; /* iterations of the spin kernel */
    uint32_t stands_for[9]; /* what rigel_stand_for is told of the recorded kernel */
} step;

typedef struct {
    const options *o;
    rg_profiles profiles;
    step *steps[RG_PROFILES_MOST]; /* of each profile */
    uint32_t stream_count;         /* of the one that has the most */
    bool waits;                    /* for every request (rg_profiles_wait) */
    CUfunction spin;
    CUstream streams[RG_PROFILE_MAX_STREAMS]; /* the first is the NULL stream, as PyTorch's default stream is */
    CUdeviceptr memory, memory_to;
    void *host;
    uint64_t last_return_ns; /* of the launch before: host gaps count from it */
    uint64_t launches, iterations;
    bool measuring;
    samples latencies;
    samples ends;      /* with --log: of iterations, in order */
    samples log_latencies, log_past;
    uint64_t late_ns;  /* how long after --start-at it was ready */
    uint64_t start_ns; /* of measuring */
    const char *doing; /* with --idle-timeout-s: the call that it is in */

    CUevent ahead[AHEAD]; /* ends of iterations that are not known to be finished */
    uint32_t ahead_first, ahead_count;
    uint64_t last_finish_ns;

    /* librigel's, when the program runs under it */
    void (*report_request)(uint64_t latency_ns);
    void (*describe_launch)(uint32_t sms, int bound, uint64_t duration_ns);
    void (*stand_for)(const char *name, const uint32_t *shape);
    int (*bypass_begin)(void);
    void (*bypass_end)(void);
    uint32_t sms; /* of the device */
    bool past;    /* Rigel, now */
} client;

static void keep_sample(samples *s, uint64_t ns)
{
    if (s->count == s->capacity) {
        s->capacity = s->capacity ? s->capacity * 2 : 4096;
        s->ns = realloc(s->ns, s->capacity * sizeof(*s->ns));
        if (!s->ns) {
            rg_say("out of memory for %zu latencies", s->capacity);
            exit(1);
        }
    }
    s->ns[s->count++] = ns;
}

static int compare_ns(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* Nearest rank, in sorted samples. */
static uint64_t percentile_ns(const samples *s, uint64_t percent)
{
    size_t rank = (size_t)((s->count * percent + 99) / 100);
    return s->ns[rank ? rank - 1 : 0];
}

/* The kernel as it was recorded, for whoever counts or records what this program launches. */
static void describe(step *s, uint32_t sms)
{
    const rg_profile_op *op = &s->op;
    memcpy(&s->stands_for[0], op->grid, sizeof(op->grid));
    memcpy(&s->stands_for[3], op->block, sizeof(op->block));
    s->stands_for[6] = op->registers;
    s->stands_for[7] = op->shared_bytes;
    s->stands_for[8] = rg_profile_sms(op, sms);
}

static void launch_spin(client *c, const rg_shape *shape, uint64_t chain, CUstream stream)
{
    uint64_t block_ns = shape->block_ns;
    void *params[] = {&chain, &block_ns};
    CU(cuLaunchKernel, c->spin, shape->blocks, 1, 1, shape->block[0], shape->block[1], shape->block[2],
       shape->shared_bytes, stream, params, NULL);
}

/* The program is about to be in a call that may not return; it has returned. Nothing without an idle time-out. */
static void enter_call(client *c, const char *what)
{
    if (c->o->idle_timeout_s <= 0)
        return;
    c->doing = what;
    atomic_fetch_add(&call_state, 1);
}

static void leave_call(const client *c)
{
    if (c->o->idle_timeout_s <= 0)
        return;
    uint64_t in = atomic_load(&call_state);
    if (in == TIMED_OUT || !atomic_compare_exchange_strong(&call_state, &in, in + 1))
        stay_if_timed_out();
}

static void synchronize(client *c)
{
    enter_call(c, "a wait for the GPU");
    for (uint32_t i = 0; i < c->stream_count; i++)
        CU(cuStreamSynchronize, c->streams[i]);
    leave_call(c);
}

static void launch(client *c, const step *s)
{
    const rg_profile_op *op = &s->op;
    CUstream stream = c->streams[op->stream];
    size_t bytes = op->bytes ? (size_t)op->bytes : 1;
    switch (op->kind) {
    case RG_PROFILE_KERNEL:
        if (c->describe_launch) { /* all its kernels have one name: only the profile tells them apart */
            uint32_t fills = (s->shape.blocks + s->shape.blocks_per_sm - 1) / s->shape.blocks_per_sm;
            c->describe_launch(fills < c->sms ? fills : c->sms, op->bound, op->duration_ns);
        }
        if (c->stand_for)
            c->stand_for(op->name, s->stands_for);
        enter_call(c, op->name);
        launch_spin(c, &s->shape, s->chain, stream);
        leave_call(c);
        break;
    case RG_PROFILE_MEMSET:
        enter_call(c, op->name);
        CU(cuMemsetD8Async, c->memory, 0, bytes, stream);
        leave_call(c);
        break;
    case RG_PROFILE_COPY_H2D:
        enter_call(c, op->name);
        CU(cuMemcpyHtoDAsync, c->memory, c->host, bytes, stream);
        leave_call(c);
        break;
    case RG_PROFILE_COPY_D2H:
        enter_call(c, op->name);
        CU(cuMemcpyDtoHAsync, c->host, c->memory, bytes, stream);
        leave_call(c);
        break;
    case RG_PROFILE_COPY_D2D:
        enter_call(c, op->name);
        CU(cuMemcpyDtoDAsync, c->memory_to, c->memory, bytes, stream);
        leave_call(c);
        break;
    case RG_PROFILE_SYNC:
        synchronize(c);
        break;
    }
}

/* Launches one iteration of a profile with its host gaps. */
static void launch_iteration(client *c, uint32_t kind)
{
    const rg_profile *profile = &c->profiles.of[kind];
    c->last_return_ns = now_ns();
    for (uint32_t i = 0; i < profile->op_count; i++) {
        const step *s = &c->steps[kind][i];
        if (s->op.gap_ns)
            wait_until(c->last_return_ns + s->op.gap_ns, false);
        launch(c, s);
        c->last_return_ns = now_ns();
    }
    if (c->measuring)
        c->launches += profile->launches;
}

/* One more iteration has finished at `end_ns`; `latency_ns` is since its due time, or since the one before it. */
static void count_iteration(client *c, uint64_t end_ns, uint64_t latency_ns)
{
    if (!c->measuring)
        return;
    c->iterations++;
    if (c->o->log) {
        keep_sample(&c->ends, end_ns);
        keep_sample(&c->log_latencies, latency_ns);
        if (c->o->alternate)
            keep_sample(&c->log_past, c->past);
    }
    if (c->report_request)
        c->report_request(latency_ns);
}

static uint32_t kind_of(const client *c, uint64_t iteration)
{
    return rg_profiles_draw(c->o->seed, iteration, c->profiles.count);
}

/* A request: waited for, with its latency since `due_ns`. */
static void serve_request(client *c, uint64_t iteration, uint64_t due_ns)
{
    uint32_t kind = kind_of(c, iteration);
    launch_iteration(c, kind);
    if (!c->profiles.of[kind].waits)
        synchronize(c);
    uint64_t end_ns = now_ns(), latency_ns = end_ns - due_ns;
    c->last_finish_ns = end_ns;
    if (c->measuring)
        keep_sample(&c->latencies, latency_ns);
    count_iteration(c, end_ns, latency_ns);
}

/* Takes iterations off the front that are finished; with `wait`, waits for one first. */
static void collect_ahead(client *c, bool wait)
{
    uint32_t ended = 0;
    for (; ended < c->ahead_count; ended++) {
        CUevent event = c->ahead[(c->ahead_first + ended) % AHEAD];
        if (wait && ended == 0) {
            enter_call(c, "a wait for an iteration");
            CU(cuEventSynchronize, event);
            leave_call(c);
            continue;
        }
        CUresult result = rg_cu.cuEventQuery(event);
        if (result == CUDA_ERROR_NOT_READY)
            break;
        check(result, "cuEventQuery");
    }
    if (ended == 0)
        return;
    /* When those that are seen together have ended is not known: each has had its part of the time since the last that was seen. */
    uint64_t now = now_ns(), each_ns = (now - c->last_finish_ns) / ended;
    for (uint32_t i = 0; i < ended; i++)
        count_iteration(c, now, each_ns);
    c->last_finish_ns = now;
    c->ahead_first = (c->ahead_first + ended) % AHEAD;
    c->ahead_count -= ended;
}

/* An iteration of a program that does not wait for it, as a training loop does not. */
static void run_ahead(client *c, uint64_t iteration)
{
    uint32_t kind = kind_of(c, iteration);
    const rg_profile *profile = &c->profiles.of[kind];
    if (c->ahead_count == AHEAD)
        collect_ahead(c, true);
    launch_iteration(c, kind);
    uint32_t stream = profile->ops[profile->op_count - 1].stream;
    CU(cuEventRecord, c->ahead[(c->ahead_first + c->ahead_count) % AHEAD], c->streams[stream]);
    c->ahead_count++;
    collect_ahead(c, false);
}

/* Waits for all work, however long it takes, and says so every --idle-ms. */
static void drain(client *c)
{
    uint64_t start_ns = now_ns(), said_ns = start_ns;
    enter_call(c, "the wait for all that was launched");
    for (uint32_t i = 0; i < c->stream_count; i++) {
        CUresult result;
        while ((result = rg_cu.cuStreamQuery(c->streams[i])) == CUDA_ERROR_NOT_READY) {
            uint32_t before = c->ahead_count;
            collect_ahead(c, false);
            if (c->ahead_count != before) { /* an iteration has ended */
                leave_call(c);
                enter_call(c, "the wait for all that was launched");
            }
            struct timespec nap = {0, NS_PER_MS / 2};
            nanosleep(&nap, NULL);
            uint64_t now = now_ns();
            if (now - said_ns >= c->o->idle_ms * NS_PER_MS) {
                said_ns = now;
                rg_say("waiting for the GPU to finish what was launched: %llu ms so far",
                    (unsigned long long)(now - start_ns) / NS_PER_MS);
            }
        }
        check(result, "cuStreamQuery");
    }
    leave_call(c);
    collect_ahead(c, false);
    synchronize(c); /* done already: tells whoever watches this client that it waited */
}

/* ---- Set-up */

/* What a launch of this shape and chain takes: the least of several. */
static double launch_ms(client *c, const rg_shape *shape, uint64_t chain, CUevent from, CUevent to)
{
    float least_ms = 1e9f;
    for (int i = 0; i < 10; i++) {
        float ms;
        CU(cuEventRecord, from, NULL);
        launch_spin(c, shape, chain, NULL);
        CU(cuEventRecord, to, NULL);
        CU(cuEventSynchronize, to);
        CU(cuEventElapsedTime, &ms, from, to);
        least_ms = ms < least_ms ? ms : least_ms;
    }
    return (double)least_ms;
}

/*
 * The chain's length for each kernel. More warps on an SM share its issue slots, so ns per iteration is measured for
 * several numbers of warps and interpolated. Each is the difference of two lengths, so that what a launch costs drops
 * out, and the least of several, so that other programs on the GPU do not count.
 */
static void calibrate(client *c, const rg_shape_device *device)
{
    static const uint32_t warps[] = {1, 4, 8, 16, 32, 64};
    enum { POINTS = sizeof(warps) / sizeof(warps[0]), CHAIN = 2000, TRIES = 50 };
    double ns[POINTS];
    uint32_t points = 0;
    CUevent from, to;
    CU(cuEventCreate, &from, CU_EVENT_DEFAULT);
    CU(cuEventCreate, &to, CU_EVENT_DEFAULT);
    for (uint32_t i = 0; i < POINTS && warps[i] * 32 <= device->threads_per_sm; i++, points++) {
        uint32_t blocks_per_sm = warps[i] > 32 ? 2 : 1;
        rg_shape shape = {.blocks = device->sms * blocks_per_sm, .block = {warps[i] * 32 / blocks_per_sm, 1, 1}};
        if (i == 0)
            launch_ms(c, &shape, 20 * CHAIN, from, to); /* raises the clocks */
        double once_ms = INFINITY, twice_ms = INFINITY;
        ns[i] = 0;
        for (int tries = 0; tries < TRIES && !(ns[i] > 0.1); tries++) { /* another program that does the same may be in the way of all of one length */
            twice_ms = fmin(twice_ms, launch_ms(c, &shape, 2 * CHAIN, from, to));
            once_ms = fmin(once_ms, launch_ms(c, &shape, CHAIN, from, to));
            ns[i] = (twice_ms - once_ms) * 1e6 / CHAIN;
        }
        if (!(ns[i] > 0.1)) {
            rg_say("calibration: %g ns an iteration with %u warps on an SM; expected at least 0.1", ns[i], warps[i]);
            exit(1);
        }
    }
    for (uint32_t kind = 0; kind < c->profiles.count; kind++)
        for (uint32_t i = 0; i < c->profiles.of[kind].op_count; i++) {
            step *s = &c->steps[kind][i];
            if (s->op.kind != RG_PROFILE_KERNEL)
                continue;
            uint32_t at = 1;
            while (at < points - 1 && warps[at] < s->shape.warps_per_sm)
                at++;
            double part = ((double)s->shape.warps_per_sm - warps[at - 1]) / (double)(warps[at] - warps[at - 1]);
            double chain_ns = ns[at - 1] + (ns[at] - ns[at - 1]) * (part < 0 ? 0 : part > 1 ? 1 : part);
            double busy_ns = s->shape.block_ns > EMPTY_KERNEL_NS ? (double)(s->shape.block_ns - EMPTY_KERNEL_NS) : 0;
            s->chain = (uint64_t)(busy_ns / chain_ns + 0.5);
        }
}

/* For the largest copy of any profile. */
static void make_memory(client *c)
{
    uint64_t most = 0;
    bool used = false, host = false, second = false;
    for (uint32_t kind = 0; kind < c->profiles.count; kind++)
        for (uint32_t i = 0; i < c->profiles.of[kind].op_count; i++) {
            const rg_profile_op *op = &c->profiles.of[kind].ops[i];
            if (op->kind == RG_PROFILE_KERNEL || op->kind == RG_PROFILE_SYNC)
                continue;
            used = true;
            host |= op->kind == RG_PROFILE_COPY_H2D || op->kind == RG_PROFILE_COPY_D2H;
            second |= op->kind == RG_PROFILE_COPY_D2D;
            most = op->bytes > most ? op->bytes : most;
        }
    size_t bytes = most ? (size_t)most : 1;
    if (used)
        CU(cuMemAlloc, &c->memory, bytes);
    if (second)
        CU(cuMemAlloc, &c->memory_to, bytes);
    if (host)
        CU(cuMemHostAlloc, &c->host, bytes, 0);
}

static rg_shape_device device_limits(CUdevice device)
{
    return (rg_shape_device){
        .sms = (uint32_t)device_attribute(device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
        .threads_per_sm = (uint32_t)device_attribute(device, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR),
        .blocks_per_sm = (uint32_t)device_attribute(device, CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR),
        .registers_per_sm = (uint32_t)device_attribute(device, CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR),
        .shared_bytes_per_sm =
            (uint32_t)device_attribute(device, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR),
        .shared_bytes_per_block =
            (uint32_t)device_attribute(device, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
        .reserved_shared_bytes =
            (uint32_t)device_attribute(device, CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK),
    };
}

static step *steps_of(const rg_profile *profile, const rg_shape_device *limits)
{
    step *steps = calloc(profile->op_count, sizeof(*steps));
    if (!steps) {
        rg_say("out of memory for %u operations", profile->op_count);
        exit(1);
    }
    for (uint32_t i = 0; i < profile->op_count; i++) {
        steps[i].op = profile->ops[i];
        if (profile->ops[i].kind == RG_PROFILE_KERNEL) {
            rg_shape_plan(&profile->ops[i], limits, &steps[i].shape);
            describe(&steps[i], limits->sms);
        }
    }
    return steps;
}

static void set_up(client *c)
{
    char why[256];
    if (!rg_load_driver(why, sizeof(why))) {
        rg_say("no CUDA driver: %s", why);
        exit(1);
    }
    CU(cuInit, 0);
    int count = 0;
    CU(cuDeviceGetCount, &count);
    if (c->o->device >= count)
        bad_arguments("--device: expected an index below %d, the number of devices, got %d", count, c->o->device);
    CUdevice device;
    CUcontext context;
    CUmodule module;
    CU(cuDeviceGet, &device, c->o->device);
    CU(cuDevicePrimaryCtxRetain, &context, device);
    CU(cuCtxSetCurrent, context);
    CU(cuModuleLoadData, &module, rg_spin_ptx);
    CU(cuModuleGetFunction, &c->spin, module, RG_SPIN_KERNEL);
    for (uint32_t i = 1; i < c->stream_count; i++)
        CU(cuStreamCreate, &c->streams[i], CU_STREAM_NON_BLOCKING);
    for (uint32_t i = 0; i < AHEAD; i++)
        CU(cuEventCreate, &c->ahead[i], CU_EVENT_DISABLE_TIMING);
    rg_shape_device limits = device_limits(device);
    CU(cuFuncSetAttribute, c->spin, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
       (int)limits.shared_bytes_per_block);
    /* One division of the L1 cache for all launches: changing it makes an SM run empty first. May be refused. */
    (void)rg_cu.cuFuncSetAttribute(c->spin, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100);
    make_memory(c);
    for (uint32_t kind = 0; kind < c->profiles.count; kind++)
        c->steps[kind] = steps_of(&c->profiles.of[kind], &limits);
    if (!rg_simulated)
        calibrate(c, &limits);
    /* Exported by librigel.so when it is preloaded. */
    void *report = dlsym(RTLD_DEFAULT, "rigel_report_request");
    memcpy(&c->report_request, &report, sizeof(report));
    void *describe = dlsym(RTLD_DEFAULT, "rigel_describe_launch");
    memcpy(&c->describe_launch, &describe, sizeof(describe));
    void *stand_for = dlsym(RTLD_DEFAULT, "rigel_stand_for");
    memcpy(&c->stand_for, &stand_for, sizeof(stand_for));
    void *bypass_begin = dlsym(RTLD_DEFAULT, "rigel_bypass_begin"), *bypass_end = dlsym(RTLD_DEFAULT, "rigel_bypass_end");
    memcpy(&c->bypass_begin, &bypass_begin, sizeof(bypass_begin));
    memcpy(&c->bypass_end, &bypass_end, sizeof(bypass_end));
    c->sms = limits.sms;
}

/* ---- Run */

/* Waits for --start-at. Returns it as CLOCK_MONOTONIC, also if it has passed. */
static uint64_t wait_for_start(client *c)
{
    uint64_t now = now_ns();
    if (c->o->start_at <= 0)
        return now;
    struct timespec wall;
    clock_gettime(CLOCK_REALTIME, &wall);
    double left_s = c->o->start_at - ((double)wall.tv_sec + (double)wall.tv_nsec / 1e9);
    if (left_s < 0) {
        c->late_ns = (uint64_t)(-left_s * 1e9);
        rg_say("late by %.3f s: set-up ended after --start-at", -left_s);
        return now > c->late_ns ? now - c->late_ns : 0;
    }
    uint64_t start_ns = now + (uint64_t)(left_s * 1e9);
    wait_until(start_ns, true);
    return start_ns;
}

static void warm_up(client *c)
{
    for (uint64_t i = 0; i < c->o->warmup && !stop_asked; i++) {
        launch_iteration(c, (uint32_t)(i % c->profiles.count));
        synchronize(c);
    }
    synchronize(c);
}

/* Through Rigel or past it, from the next request on. */
static void go_past(client *c, bool past)
{
    int error = c->bypass_begin && c->bypass_end ? 0 : -ENODEV;
    if (past && !c->past && !error)
        error = c->bypass_begin();
    else if (!past && c->past)
        c->bypass_end();
    if (error) {
        rg_say("--alternate: Rigel cannot be bypassed here (%s); run it as a high client (rigel run --class high)", strerror(-error));
        exit(1);
    }
    c->past = past;
}

static void run_open_loop(client *c, rg_arrivals *arrivals, uint64_t start_ns, uint64_t end_ns)
{
    uint64_t due_ns = start_ns, random = c->o->alternate, served = 0;
    bool first_past = false;
    for (uint64_t i = 0; c->o->iterations == 0 || i < c->o->iterations; i++) {
        due_ns += rg_arrivals_next_gap_ns(arrivals);
        while (c->o->closed && due_ns < now_ns() && due_ns < end_ns) /* while the one before was served */
            due_ns += rg_arrivals_next_gap_ns(arrivals);
        if (due_ns >= end_ns) {
            wait_until(end_ns, true);
            break;
        }
        if (due_ns < start_ns + c->late_ns)
            continue;
        if (c->o->alternate) { /* before it is due: what that costs is in no latency */
            first_past = served % 2 ? first_past : rg_random(&random) & 1;
            go_past(c, first_past != served++ % 2);
        }
        wait_until(due_ns, true);
        if (stop_asked)
            break;
        serve_request(c, i, due_ns);
    }
    if (c->past)
        go_past(c, false);
}

/* Until when to pause by --windows at this moment: 0 where it is time to work, UINT64_MAX after the last spell. */
static uint64_t pause_at(const rg_arrivals *windows, uint64_t start_ns, uint64_t now)
{
    uint64_t to_ns = start_ns;
    for (size_t i = 0; i < windows->gap_count; i++) {
        to_ns += windows->gaps_ns[i];
        if (now < to_ns)
            return i % 2 == 1 ? 0 : to_ns;
    }
    return windows->gap_count ? UINT64_MAX : 0;
}

/* Pauses until it is time to work, or to end, with nothing left on the GPU. */
static void keep_to(client *c, const rg_arrivals *windows, uint64_t start_ns, uint64_t end_ns)
{
    uint64_t to_ns, now;
    while (!stop_asked && (now = now_ns()) < end_ns && (to_ns = pause_at(windows, start_ns, now)) != 0) {
        drain(c); /* takes as long as it takes: another spell may have begun by then, or ended */
        wait_until(to_ns < end_ns ? to_ns : end_ns, true);
    }
}

static void run_closed_loop(client *c, const rg_arrivals *windows, uint64_t start_ns, uint64_t end_ns)
{
    for (uint64_t i = 0; (c->o->iterations == 0 || i < c->o->iterations) && !stop_asked; i++) {
        keep_to(c, windows, start_ns, end_ns);
        uint64_t now = now_ns();
        if (now >= end_ns || stop_asked)
            break;
        if (c->waits)
            serve_request(c, i, now);
        else
            run_ahead(c, i);
    }
}

static void print_milliseconds(const char *name, const samples *s, uint64_t percent)
{
    if (s->count)
        printf(",\"%s\":%.6f", name, (double)percentile_ns(s, percent) / 1e6);
    else
        printf(",\"%s\":null", name);
}

static void print_report(client *c, uint64_t elapsed_ns)
{
    samples *s = &c->latencies;
    if (s->count)
        qsort(s->ns, s->count, sizeof(*s->ns), compare_ns);
    double elapsed_s = (double)elapsed_ns / 1e9;
    fputs("{\"profile\":", stdout);
    rg_print_json(c->o->profiles[0]);
    for (uint32_t i = 0; c->o->profile_count > 1 && i < c->o->profile_count; i++) {
        fputs(i ? "," : ",\"profiles\":[", stdout);
        rg_print_json(c->o->profiles[i]);
    }
    if (c->o->profile_count > 1)
        putchar(']');
    printf(",\"iterations\":%" PRIu64 ",\"elapsed_s\":%.6f,\"iterations_per_s\":%.6f,\"launches\":%" PRIu64,
           c->iterations, elapsed_s, elapsed_ns ? (double)c->iterations / elapsed_s : 0.0, c->launches);
    printf(",\"requests\":{\"count\":%zu", s->count);
    print_milliseconds("p50_ms", s, 50);
    print_milliseconds("p95_ms", s, 95);
    print_milliseconds("p99_ms", s, 99);
    puts("}}");
    fflush(stdout);
}

/* --log: seconds are since the start. False if the file cannot be written. */
static bool write_log(const client *c, bool open_loop, uint64_t start_ns)
{
    FILE *file = fopen(c->o->log, "w");
    if (!file)
        return false;
    fprintf(file, "{\"late_s\":%.6f,\"%s\":[", (double)c->late_ns / 1e9, open_loop ? "requests" : "ends_s");
    for (size_t i = 0; i < c->ends.count; i++) {
        uint64_t latency_ns = c->log_latencies.ns[i];
        double end_s = ((double)c->ends.ns[i] - (double)start_ns) / 1e9;
        if (open_loop)
            fprintf(file, "%s[%.6f,%.6f]", i ? "," : "", end_s - (double)latency_ns / 1e9, (double)latency_ns / 1e6);
        else
            fprintf(file, "%s%.6f", i ? "," : "", end_s);
    }
    if (c->o->alternate)
        fputs("],\"past\":[", file);
    for (size_t i = 0; i < c->log_past.count; i++)
        fprintf(file, "%s%s", i ? "," : "", c->log_past.ns[i] ? "true" : "false");
    fputs("]}\n", file);
    return fclose(file) == 0;
}

/* Ends the program once it has been in one call for too long. */
static void *watch_idle(void *of)
{
    client *c = of;
    uint64_t most_ns = (uint64_t)(c->o->idle_timeout_s * 1e9), seen = 0, since_ns = now_ns();
    uint64_t nap_ns = most_ns / 8 < 100 * NS_PER_MS ? most_ns / 8 : 100 * NS_PER_MS;
    for (;;) {
        struct timespec nap = {(time_t)(nap_ns / NS_PER_S), (long)(nap_ns % NS_PER_S)};
        nanosleep(&nap, NULL);
        uint64_t state = atomic_load(&call_state), now = now_ns();
        if (state != seen || state % 2 == 0) {
            seen = state;
            since_ns = now;
        } else if (now - since_ns >= most_ns && atomic_compare_exchange_strong(&call_state, &state, TIMED_OUT)) {
            break;
        }
    }
    rg_say("idle time-out: %s has not returned for %g s; ended (replay.idle_timeout_s, or --idle-timeout-s, is how long it may take)",
        c->doing, c->o->idle_timeout_s);
    print_report(c, c->measuring ? c->last_finish_ns - c->start_ns : 0);
    exit(1);
}

int main(int argc, char **argv)
{
    options o = read_options(argc, argv);
    if (o.inspect)
        return rg_inspect();
    if (o.probe)
        return probe();
    if (o.calibrate)
        return rg_calibrate(o.device);
    static client c;
    rg_arrivals arrivals = {0}, windows = {0};
    c.o = &o;
    char error[RG_PROFILE_ERROR_BYTES];
    for (uint32_t i = 0; i < o.profile_count; i++) {
        if (rg_profiles_add(&c.profiles, o.profiles[i], error, sizeof(error)) < 0) {
            rg_say("%s", error);
            return 2;
        }
        uint32_t streams = c.profiles.of[i].streams;
        c.stream_count = streams > c.stream_count ? streams : c.stream_count;
    }
    c.waits = rg_profiles_wait(c.profiles.of, c.profiles.count);
    bool open_loop = open_arrivals(&o, &arrivals);
    if (o.alternate && !open_loop)
        bad_arguments("--alternate: expected --rate, or a list of --arrivals, with it");
    open_windows(&o, open_loop, &windows);

    struct sigaction action = {.sa_handler = on_stop_signal}; /* no SA_RESTART: a sleep between requests ends at once */
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    prctl(PR_SET_TIMERSLACK, 1ul); /* default 50 us: as long as many a host gap */

    set_up(&c);
    pthread_t watcher;
    if (o.idle_timeout_s > 0 && pthread_create(&watcher, NULL, watch_idle, &c) != 0) {
        rg_say("--idle-timeout-s: no thread for it");
        return 1;
    }
    warm_up(&c);
    uint64_t start_ns = c.start_ns = wait_for_start(&c);
    uint64_t end_ns = o.duration_s > 0 ? start_ns + (uint64_t)(o.duration_s * 1e9) : UINT64_MAX;
    c.last_finish_ns = start_ns;
    c.measuring = true;
    if (open_loop)
        run_open_loop(&c, &arrivals, start_ns, end_ns);
    else
        run_closed_loop(&c, &windows, start_ns, end_ns);
    drain(&c);
    print_report(&c, c.last_finish_ns - start_ns);
    if (o.log && !write_log(&c, open_loop, start_ns)) {
        rg_say("--log %s: %s; choose a file that can be written", o.log, strerror(errno));
        return 1;
    }
    return 0;
}
