/*
 * test-replay.c: arrivals, what is drawn of several profiles, shapes, and the rigel-replay program itself: its arguments, and a run on the simulated GPU.
 *
 * The program and the simulated GPU are those of the folder this test was built into.
 */
#include "../replay/arrivals.h"
#include "../replay/profiles.h"
#include "../replay/shape.h"
#include "../sim/model.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int failures;

#define CHECK(condition, ...)                                               \
    do {                                                                    \
        if (!(condition)) {                                                 \
            fprintf(stderr, "%s:%d: %s: ", __func__, __LINE__, #condition); \
            fprintf(stderr, __VA_ARGS__);                                   \
            fputc('\n', stderr);                                            \
            failures++;                                                     \
        }                                                                   \
    } while (0)

/* ---- Arrivals */

static void test_poisson(void)
{
    rg_arrivals a;
    enum { COUNT = 200000, MEAN_NS = 16666667 };
    rg_arrivals_init(&a, RG_ARRIVALS_POISSON, MEAN_NS, 1);
    uint64_t sum = 0, over = 0, first[3];
    for (int i = 0; i < COUNT; i++) {
        uint64_t gap_ns = rg_arrivals_next_gap_ns(&a);
        if (i < 3)
            first[i] = gap_ns;
        sum += gap_ns;
        over += gap_ns > MEAN_NS;
    }
    /* An exponential's mean, and its share beyond the mean, 1/e. Four standard errors: 0.9% and 0.43% of all. */
    CHECK(sum / COUNT > MEAN_NS / 1000 * 991 && sum / COUNT < MEAN_NS / 1000 * 1009, "%" PRIu64, sum / COUNT);
    CHECK(over > COUNT * 0.3636 && over < COUNT * 0.3722, "%" PRIu64, over);
    /* The same on every machine: -ln(x / 2^64) of xoshiro256**'s first values for seed 1, by another implementation. */
    CHECK(first[0] == 5875159 && first[1] == 10884786 && first[2] == 9249029,
          "%" PRIu64 " %" PRIu64 " %" PRIu64, first[0], first[1], first[2]);
    rg_arrivals_init(&a, RG_ARRIVALS_UNIFORM, 5, 1);
    CHECK(rg_arrivals_next_gap_ns(&a) == 5 && rg_arrivals_next_gap_ns(&a) == 5, "uniform");
}

static void test_lists(void)
{
    rg_arrivals a;
    char error[256];
    static const char good[] = " [0.5,\n 0, 1e-3 ,2.5E-3]\n";
    CHECK(rg_arrivals_parse("g", good, strlen(good), &a, error, sizeof(error)) == 0, "%s", error);
    static const uint64_t expected[] = {500000000, 0, 1000000, 2500000, 500000000};
    for (int i = 0; i < 5; i++) {
        uint64_t gap_ns = rg_arrivals_next_gap_ns(&a);
        CHECK(gap_ns == expected[i], "gap %d: %" PRIu64, i, gap_ns);
    }
    rg_arrivals_free(&a);

    static const struct {
        const char *text, *error;
    } bad[] = {
        {"", "g:1:1: expected '[': a list of gaps in seconds, got the end of the file"},
        {"{\"a\": 1}", "g:1:1: expected '[': a list of gaps in seconds, got \"{\"a\": 1}\""},
        {"[]", "g:1:2: expected a number of seconds from 0 to 3600, got \"]\""},
        {"[0.1,]", "g:1:6: expected a number of seconds from 0 to 3600, got \"]\""},
        {"[0.1,\n  -1]", "g:2:3: expected a number of seconds from 0 to 3600, got \"-1]\""},
        {"[\"1\"]", "g:1:2: expected a number of seconds from 0 to 3600, got \"\"1\"]\""},
        {"[01]", "g:1:2: expected a number of seconds from 0 to 3600, got \"01]\""},
        {"[1.]", "g:1:2: expected a number of seconds from 0 to 3600, got \"1.]\""},
        {"[1e]", "g:1:2: expected a number of seconds from 0 to 3600, got \"1e]\""},
        {"[3600.1]", "g:1:2: expected a number of seconds from 0 to 3600, got \"3600.1]\""},
        {"[1e999]", "g:1:2: expected a number of seconds from 0 to 3600, got \"1e999]\""},
        {"[NaN]", "g:1:2: expected a number of seconds from 0 to 3600, got \"NaN]\""},
        {"[1 2]", "g:1:4: expected ',' or ']', got \"2]\""},
        {"[1", "g:1:3: expected ',' or ']', got the end of the file"},
        {"[1] x", "g:1:5: expected nothing after the list, got \"x\""},
        {"[0, 0]", "g: expected at least one gap greater than 0"},
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        int rc = rg_arrivals_parse("g", bad[i].text, strlen(bad[i].text), &a, error, sizeof(error));
        CHECK(rc == -1 && strcmp(error, bad[i].error) == 0, "\"%s\":\n  got      %s\n  expected %s", bad[i].text, error,
              bad[i].error);
        CHECK(a.gaps_ns == NULL, "\"%s\": a failed read leaves nothing to free", bad[i].text);
    }
}

/* ---- Several profiles */

static void test_draws(void)
{
    /* By another implementation of splitmix64. */
    static const uint32_t by_3[] = {1, 2, 0, 2, 0, 2, 1, 0, 0, 0}, by_16[] = {5, 15, 0, 12, 3, 12, 10, 3, 2, 3}, by_seed_7[] = {2, 1, 1, 1, 1, 0, 2, 2, 2, 0};
    for (uint32_t i = 0; i < 10; i++)
        CHECK(rg_profiles_draw(1, i, 3) == by_3[i] && rg_profiles_draw(1, i, 16) == by_16[i] && rg_profiles_draw(7, i, 3) == by_seed_7[i] &&
                  rg_profiles_draw(i, 5 * i, 1) == 0, "%u", i);
    /* Each as often as another, and after each: within five standard errors. */
    enum { COUNT = 160000, KINDS = 4 };
    for (uint64_t seed = 0; seed < 4; seed++) {
        int drawn[KINDS] = {0}, after[KINDS][KINDS] = {{0}};
        uint32_t before = rg_profiles_draw(seed, 0, KINDS);
        for (uint64_t i = 1; i <= COUNT; i++) {
            uint32_t kind = rg_profiles_draw(seed, i, KINDS);
            drawn[kind]++;
            after[before][kind]++;
            before = kind;
        }
        for (int a = 0; a < KINDS; a++) {
            CHECK(abs(drawn[a] - COUNT / KINDS) < 866, "seed %" PRIu64 ", %d: %d", seed, a, drawn[a]);
            for (int b = 0; b < KINDS; b++)
                CHECK(abs(after[a][b] - COUNT / KINDS / KINDS) < 484, "seed %" PRIu64 ", %d after %d: %d", seed, b, a, after[a][b]);
        }
    }
}

/* ---- Shapes */

static rg_shape_device device_of(const rg_model_params *p)
{
    return (rg_shape_device){
        .sms = p->sms,
        .threads_per_sm = p->threads_per_sm,
        .blocks_per_sm = p->blocks_per_sm,
        .registers_per_sm = p->registers_per_sm,
        .shared_bytes_per_sm = p->shared_bytes_per_sm,
        .shared_bytes_per_block = p->shared_bytes_per_block,
        .reserved_shared_bytes = p->reserved_shared_bytes,
    };
}

static rg_profile_op kernel(uint32_t blocks, uint32_t threads, uint32_t registers, uint32_t shared_bytes,
                            uint64_t duration_ns)
{
    return (rg_profile_op){
        .kind = RG_PROFILE_KERNEL,
        .grid = {blocks, 1, 1},
        .block = {threads, 1, 1},
        .registers = registers,
        .shared_bytes = shared_bytes,
        .duration_ns = duration_ns,
    };
}

static void test_shapes(void)
{
    rg_shape_device h200 = device_of(rg_model_preset("h200"));
    rg_shape s;
    /* 64 registers: 2048 a warp, 16384 a block of 8 warps: 4 blocks an SM. 528 at a time; 1000 blocks are 2 waves. */
    rg_profile_op op = kernel(1000, 256, 64, 16384, 40000);
    rg_shape_plan(&op, &h200, &s);
    CHECK(s.blocks_per_sm == 4 && s.blocks == 1000 && s.block_ns == 20000 && s.warps_per_sm == 32,
          "%u %u %" PRIu64 " %u", s.blocks_per_sm, s.blocks, s.block_ns, s.warps_per_sm);
    CHECK(s.shared_bytes == 228 * 1024 / 4 - 1024, "%u", s.shared_bytes);
    /* Nothing but threads limits it: no shared memory is needed. Fewer blocks than SMs: one block's warps. */
    op = kernel(100, 1024, 16, 0, 7000);
    rg_shape_plan(&op, &h200, &s);
    CHECK(s.blocks_per_sm == 2 && s.shared_bytes == 0 && s.warps_per_sm == 32 && s.block_ns == 7000, "%u %u %u",
          s.blocks_per_sm, s.shared_bytes, s.warps_per_sm);
    /* 132 * 8 blocks a wave, 100 waves of 100 ns: made 5 of 2 us. */
    op = kernel(132 * 8 * 100, 256, 32, 0, 10000);
    rg_shape_plan(&op, &h200, &s);
    CHECK(s.blocks == 132 * 8 * 5 && s.block_ns == 2000, "%u %" PRIu64, s.blocks, s.block_ns);
    /* Orion's: one block for each SM, never more than there are. */
    op = (rg_profile_op){.kind = RG_PROFILE_KERNEL, .sms = 6272, .duration_ns = 446208};
    rg_shape_plan(&op, &h200, &s);
    CHECK(s.blocks == 132 && s.blocks_per_sm == 1 && s.block_ns == 446208, "%u %u", s.blocks, s.blocks_per_sm);

    /* On every GPU an SM holds exactly the planned number of the replayed kernel's blocks. */
    static const char *const presets[] = {"h200", "a100", "l4"};
    for (size_t p = 0; p < 3; p++) {
        const rg_model_params *preset = rg_model_preset(presets[p]);
        rg_shape_device device = device_of(preset);
        for (uint32_t threads = 1; threads <= 1024; threads += threads < 64 ? 21 : 96) {
            for (uint32_t registers = 0; registers <= 255; registers += 17) {
                for (uint32_t shared = 0; shared <= device.shared_bytes_per_block; shared += 3001) {
                    op = kernel(1, threads, registers, shared, 1000);
                    rg_shape_plan(&op, &device, &s);
                    rg_model_kernel replayed = {.blocks = 1,
                                                .threads = threads,
                                                .registers = RG_SHAPE_REGISTERS,
                                                .shared_bytes = s.shared_bytes,
                                                .block_ns = 1};
                    uint32_t held = rg_model_occupancy(preset, &replayed);
                    CHECK(held == s.blocks_per_sm, "%s: %u threads, %u registers, %u bytes: %u planned, %u held",
                          presets[p], threads, registers, shared, s.blocks_per_sm, held);
                    if (failures > 20)
                        exit(1);
                }
            }
        }
    }
}

/* ---- The program */

static char folder[3072];

/* Runs rigel-replay with a shell command line of arguments. Output and errors go to `out`; returns the exit status. */
static int run(const char *environment, const char *arguments, char *out, size_t out_bytes)
{
    char command[8192];
    snprintf(command, sizeof(command), "%s exec timeout 60 %s/rigel-replay %s 2>&1", environment, folder, arguments);
    FILE *pipe = popen(command, "r");
    size_t got = pipe ? fread(out, 1, out_bytes - 1, pipe) : 0;
    out[got] = '\0';
    int status = pipe ? pclose(pipe) : -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void expect(const char *environment, const char *arguments, int status, const char *contains)
{
    char out[65536];
    int got = run(environment, arguments, out, sizeof(out));
    CHECK(got == status && strstr(out, contains), "%s %s:\n  got %d: %s\n  expected %d: %s", environment, arguments,
          got, out, status, contains);
}

#define HEADER                                                                                                  \
    "name,kind,stream,grid_x,grid_y,grid_z,block_x,block_y,block_z,registers,shared_bytes,bytes,duration_ns,gap_ns\n"

static void write_file(const char *path, const char *text)
{
    FILE *file = fopen(path, "w");
    if (!file || fputs(text, file) < 0 || fclose(file) != 0) {
        perror(path);
        exit(1);
    }
}

static void read_file(const char *path, char *text, size_t bytes)
{
    FILE *file = fopen(path, "r");
    size_t got = file ? fread(text, 1, bytes - 1, file) : 0;
    CHECK(got > 0, "%s", path);
    text[got] = '\0';
    if (file)
        fclose(file);
}

static void test_arguments(const char *profile, const char *bad_profile, const char *gaps)
{
    static const char *const none = "LD_LIBRARY_PATH=/nonexistent";
    char arguments[1024], expected[1024];
    expect(none, "--help", 0, "--arrivals KIND");
    expect(none, "", 2, "--profile: expected the file of a kernel profile");
    expect(none, "--profile", 2, "--profile: expected a value");
    expect(none, "--frob", 2, "unknown option \"--frob\"");
    expect(none, "--profile x --iterations 0", 2, "--iterations: expected an integer from 1 to");
    expect(none, "--profile x --iterations -1", 2, "got \"-1\"");
    expect(none, "--profile x --rate -60", 2, "--rate: expected a number from 1e-06 to 1e+06, got \"-60\"");
    expect(none, "--profile x --rate nan", 2, "--rate: expected a number");
    expect(none, "--profile x --duration-s 1s", 2, "--duration-s: expected a number from 0.001 to 1e+07, got \"1s\"");
    expect(none, "--profile x --device -1", 2, "--device: expected an integer from 0 to 1023, got \"-1\"");
    expect(none, "--profile /nonexistent/p.csv", 2, "/nonexistent/p.csv: cannot read the profile: No such file");
    snprintf(arguments, sizeof(arguments), "--profile %s", bad_profile);
    snprintf(expected, sizeof(expected), "%s:2: field 'kind': expected kernel, memset", bad_profile);
    expect(none, arguments, 2, expected);
    snprintf(arguments, sizeof(arguments), "--profile %s --profile %s", profile, bad_profile);
    expect(none, arguments, 2, expected);
    char *at = arguments;
    for (uint32_t i = 0; i <= RG_PROFILES_MOST; i++)
        at += sprintf(at, "--profile x ");
    expect(none, arguments, 2, "--profile: expected at most 16 of them");
    snprintf(arguments, sizeof(arguments), "--profile %s --arrivals uniform", profile);
    expect(none, arguments, 2, "--arrivals uniform: expected --rate with it");
    snprintf(arguments, sizeof(arguments), "--profile %s --closed", profile);
    expect(none, arguments, 2, "--closed: expected --rate or --arrivals with it");
    snprintf(arguments, sizeof(arguments), "--profile %s --alternate 1", profile);
    expect(none, arguments, 2, "--alternate: expected --rate, or a list of --arrivals, with it");
    snprintf(arguments, sizeof(arguments), "--profile %s --windows %s", profile, gaps);
    snprintf(expected, sizeof(expected), "--windows: %s:1:6: expected a number of seconds", gaps);
    expect(none, arguments, 2, expected);
    snprintf(arguments, sizeof(arguments), "--profile %s --windows %s --rate 20", profile, gaps);
    expect(none, arguments, 2, "--windows: expected no --rate and no --arrivals with it");
    snprintf(arguments, sizeof(arguments), "--profile %s --arrivals %s", profile, gaps);
    snprintf(expected, sizeof(expected), "%s:1:6: expected a number of seconds", gaps);
    expect(none, arguments, 2, expected);
}

static double number_of(const char *json, const char *key)
{
    char quoted[64];
    snprintf(quoted, sizeof(quoted), "\"%s\":", key);
    const char *at = strstr(json, quoted);
    return at ? strtod(at + strlen(quoted), NULL) : -1;
}

static double now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

/* Runs on the simulated GPU, each with a state file of its own. */
static void test_simulated(const char *scratch, const char *serving, const char *training)
{
    char environment[8192], arguments[1024], out[65536], state[4096], library[4096];
    snprintf(library, sizeof(library), "%s/sim/libcuda.so.1", folder);
    if (access(library, R_OK) != 0) {
        fprintf(stderr, "skipped: the runs on the simulated GPU: no %s\n", library);
        return;
    }
    snprintf(state, sizeof(state), "%s/state", scratch);
    snprintf(environment, sizeof(environment), "LD_LIBRARY_PATH=%s/sim RIGEL_SIM_STATE=%s", folder, state);

    expect(environment, "--probe", 0, "[{\"index\":0,\"name\":\"NVIDIA H200 (simulated)\",\"uuid\":\"GPU-");
    expect(environment, "--probe", 0, "\"simulated\":true,\"sms\":132,\"memory_bytes\":");
    snprintf(arguments, sizeof(arguments), "--profile %s --device 7", serving);
    expect(environment, arguments, 2, "--device: expected an index below 1, the number of devices, got 7");

    snprintf(arguments, sizeof(arguments), "--profile %s --rate 20 --alternate 1", serving);
    expect(environment, arguments, 1, "--alternate: Rigel cannot be bypassed here (No such device)");

    /* A closed loop of requests of at least half a millisecond: 10 kernels of 50 us on each of two streams. */
    snprintf(arguments, sizeof(arguments), "--profile %s --iterations 20", serving);
    double begun_ms = now_ms();
    CHECK(run(environment, arguments, out, sizeof(out)) == 0, "%s", out);
    double took_ms = now_ms() - begun_ms;
    CHECK(number_of(out, "iterations") == 20 && number_of(out, "launches") == 20 * 22 && number_of(out, "count") == 20,
          "%s", out);
    double p50_ms = number_of(out, "p50_ms");
    CHECK(p50_ms >= 0.5 && p50_ms <= number_of(out, "p95_ms"), "%s", out);
    CHECK(10 * p50_ms <= took_ms, "half of them took that, one after the other, of %f ms: %s", took_ms, out);
    CHECK(number_of(out, "p95_ms") <= number_of(out, "p99_ms"), "%s", out);

    /* An open loop: 20 a second, evenly spaced. */
    snprintf(arguments, sizeof(arguments), "--profile %s --rate 20 --arrivals uniform --duration-s 1", serving);
    CHECK(run(environment, arguments, out, sizeof(out)) == 0, "%s", out);
    CHECK(number_of(out, "count") == 19, "due at 0.05, 0.10, ... 0.95: %s", out);
    snprintf(arguments, sizeof(arguments), "--profile %s --rate 2 --arrivals uniform --duration-s 0.9", serving);
    begun_ms = now_ms();
    CHECK(run(environment, arguments, out, sizeof(out)) == 0, "%s", out);
    CHECK(number_of(out, "count") == 1 && now_ms() - begun_ms >= 900, "due at 0.5, and there until the end: %s", out);

    /* Due every 0.25 ms, of half a millisecond at least: request k ends k * 0.25 ms late or later, by which its latency is more. */
    snprintf(arguments, sizeof(arguments), "--profile %s --rate 4000 --arrivals uniform --iterations 100", serving);
    CHECK(run(environment, arguments, out, sizeof(out)) == 0, "%s", out);
    CHECK(number_of(out, "count") == 100 && number_of(out, "p50_ms") >= 12 && number_of(out, "p99_ms") >= 24,
          "latency from the due time: %s", out);

    /* The same of one user: of those that fall due while the one before is served none is. */
    char log[256], logged[65536] = "";
    snprintf(log, sizeof(log), "%s/log.json", scratch);
    snprintf(arguments, sizeof(arguments), "--profile %s --rate 4000 --arrivals uniform --iterations 100 --closed --log %s", serving, log);
    CHECK(run(environment, arguments, out, sizeof(out)) == 0, "%s", out);
    read_file(log, logged, sizeof(logged));
    uint32_t served = 0;
    double free_s = 0, due_s, latency_ms;
    const char *at = strstr(logged, "\"requests\":[");
    for (at = at ? at + strlen("\"requests\":[") : ""; sscanf(at, "[%lf,%lf]", &due_s, &latency_ms) == 2; at += strcspn(at, "]") + 1, at += *at == ',') {
        CHECK(due_s > free_s, "request %u: due at %f s, the one before ended at %f", served, due_s, free_s);
        free_s = due_s + latency_ms / 1e3 - 2e-6; /* as they are rounded */
        served++;
    }
    CHECK(served >= 2 && served == number_of(out, "count"), "%u: %.100s", served, logged);

    /* A program that runs ahead: no requests, iterations as fast as the GPU: 10 kernels of 100 us. */
    snprintf(arguments, sizeof(arguments), "--profile %s --duration-s 1", training);
    begun_ms = now_ms();
    CHECK(run(environment, arguments, out, sizeof(out)) == 0, "%s", out);
    took_ms = now_ms() - begun_ms;
    CHECK(number_of(out, "count") == 0 && strstr(out, "\"p50_ms\":null"), "%s", out);
    double rate = number_of(out, "iterations_per_s"), iterations = number_of(out, "iterations");
    CHECK(iterations > 1 && rate <= 1000 && rate >= 1000 * iterations / took_ms, "%f ms: %s", took_ms, out);

    /* Each request is of one of both, also waited for where that profile does not; which one is drawn by its number. */
    for (uint64_t seed = 1; seed <= 3; seed++) {
        double launches = 0;
        for (uint64_t i = 0; i < 20; i++)
            launches += rg_profiles_draw(seed, i, 2) ? 10 : 22;
        snprintf(arguments, sizeof(arguments), "--profile %s --profile %s --iterations 20 --seed %" PRIu64 "%s", serving, training, seed,
                 seed == 3 ? " --rate 2000" : "");
        CHECK(run(environment, arguments, out, sizeof(out)) == 0, "%s", out);
        CHECK(number_of(out, "count") == 20 && number_of(out, "launches") == launches, "%f: %s", launches, out);
        snprintf(arguments, sizeof(arguments), "{\"profile\":\"%s\",\"profiles\":[\"%s\",\"%s\"],\"iterations\":20,", serving, serving, training);
        CHECK(strstr(out, arguments), "%s", out);
    }

    /* In windows: 0.5 s of the 1.6, each of which takes 1 ms of the GPU at least, and what was under way when one ended. */
    char windows[256];
    snprintf(windows, sizeof(windows), "%s/windows.json", scratch);
    write_file(windows, "[0.3, 0.2, 0.4, 0.3]");
    snprintf(arguments, sizeof(arguments), "--profile %s --duration-s 1.6 --windows %s --log %s", training, windows, log);
    begun_ms = now_ms();
    CHECK(run(environment, arguments, out, sizeof(out)) == 0, "%s", out);
    took_ms = now_ms() - begun_ms;
    CHECK(took_ms >= 1600, "it stays until the end: %f ms", took_ms);
    CHECK(number_of(out, "iterations") >= 1 && number_of(out, "iterations") <= 500 + 2 * 17, "%s", out);
    read_file(log, logged, sizeof(logged));
    const char *ends = strstr(logged, "\"ends_s\":[");
    CHECK(ends && strtod(ends + strlen("\"ends_s\":["), NULL) >= 0.301, "none before the first window: %.100s", logged);
    unlink(windows);
    unlink(log);

    /* SIGTERM: the report all the same. `timeout` sends it, so late that on this machine some requests have been served. */
    for (int seconds = 1, served = 0; !served && seconds <= 32; seconds *= 2) {
        char command[16384];
        snprintf(command, sizeof(command), "%s timeout -s TERM --preserve-status %d %s/rigel-replay --profile %s --rate 50",
                 environment, seconds, folder, serving);
        FILE *pipe = popen(command, "r");
        size_t got = pipe ? fread(out, 1, sizeof(out) - 1, pipe) : 0;
        out[got] = '\0';
        int status = pipe ? pclose(pipe) : -1;
        served = WIFEXITED(status) && WEXITSTATUS(status) == 0 && number_of(out, "count") > 10;
        CHECK(served || seconds < 32, "%d: %s", status, out);
    }
    unlink(state);
}

int main(void)
{
    test_poisson();
    test_lists();
    test_draws();
    test_shapes();

    ssize_t bytes = readlink("/proc/self/exe", folder, sizeof(folder) - 1);
    char *slash = bytes > 0 ? strrchr(folder, '/') : NULL;
    if (!slash)
        return 1;
    *slash = '\0';
    char scratch[] = "/tmp/rigel-test-replay-XXXXXX";
    if (!mkdtemp(scratch)) {
        perror("mkdtemp");
        return 1;
    }
    char serving[128], training[128], bad[128], gaps[128];
    snprintf(serving, sizeof(serving), "%s/serving.csv", scratch);
    snprintf(training, sizeof(training), "%s/training.csv", scratch);
    snprintf(bad, sizeof(bad), "%s/bad.csv", scratch);
    snprintf(gaps, sizeof(gaps), "%s/gaps.json", scratch);
    static char rows[16384];
    char *at = rows + sprintf(rows, HEADER "in,copy_h2d,0,0,0,0,0,0,0,0,0,100000,5000,5000\n");
    for (int i = 0; i < 20; i++)
        at += sprintf(at, "k%d,kernel,%d,264,1,1,256,1,1,64,16384,0,50000,3000\n", i, i % 2);
    sprintf(at, "out,copy_d2h,0,0,0,0,0,0,0,0,0,1000,2000,3000\nsync,sync,0,0,0,0,0,0,0,0,0,0,0,1000\n");
    write_file(serving, rows);
    at = rows + sprintf(rows, HEADER);
    for (int i = 0; i < 10; i++)
        at += sprintf(at, "k%d,kernel,0,4000,1,1,256,1,1,64,16384,0,100000,2000\n", i);
    write_file(training, rows);
    write_file(bad, HEADER "k,kernal,0,1,1,1,32,1,1,16,0,0,100,0\n");
    write_file(gaps, "[0.1,]");

    test_arguments(serving, bad, gaps);
    test_simulated(scratch, serving, training);

    unlink(serving);
    unlink(training);
    unlink(bad);
    unlink(gaps);
    rmdir(scratch);
    return failures ? 1 : 0;
}
