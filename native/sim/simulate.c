/*
 * simulate.c: rigel-simulate, a scenario (scenario.h) as a program: a description on standard input, results as JSON on standard
 * output. `rigel simulate` runs one for each way and point, so that they use all processors and one that fails ends alone.
 *
 * The description is lines of a key and a value, the value being the rest of the line:
 *
 *   preset h200                  a GPU of presets.def
 *   gpu.slice_ns 2048000         a field of rg_model_params
 *   mode preempt                 alone, ungoverned, governed or preempt
 *   duration_ns 10000000000      a field of rg_scenario_options
 *   tick_ns 100000000            likewise: first the shape of the histograms goes out, and at every tick one line goes out and one
 *                                comes in, see on_tick
 *   client                       begins a client; what follows is its own
 *   profile /a/b.csv             several: each request is of one of them, by chance (rg_profiles_draw), each as often as another
 *   class high                   or best-effort
 *   reports 1                    see rg_scenario_client, likewise iterations, weight and draw_seed
 *   rate uniform 20000000 1      or poisson: mean gap in ns, and seed
 *   arrivals /a/gaps.json        a list
 *   moment 0 5000000             of its host: since then a request takes its program so long; in ns, one after the other
 *   run                          ends it
 *
 * At every hundredth of the duration, roughly, {"now_ns": n} goes out.
 *
 * It must never read a clock. Exit: 0; 2 for a description or a profile that is wrong; 1 for everything else. Errors are one line on
 * standard error.
 */
#include "scenario.h"

#include "../replay/shape.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#define VALUE_BYTES 8192
#define GAP_MAX_NS 1000000000000000ull /* between requests: 0.000001 a second is the least rate of a configuration */

__attribute__((noreturn, format(printf, 2, 3))) static void give_up(int status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    exit(status);
}

/* ---- Fields that are numbers */

typedef struct {
    const char *name;
    size_t offset, bytes;
} number_field;

#define FIELD(type, name) {#name, offsetof(type, name), sizeof(((type *)0)->name)}
#define GPU(name) {"gpu." #name, offsetof(rg_scenario_options, gpu.name), sizeof(((rg_scenario_options *)0)->gpu.name)}
#define OPTION(name) FIELD(rg_scenario_options, name)
static const number_field option_fields[] = {
    GPU(launch_ns),     GPU(chain_ns),          GPU(graph_node_ns),     GPU(slice_ns),       GPU(switch_ns), GPU(restore_ns),
    GPU(idle_ns),       GPU(preempt_ns),        GPU(disturb_ns),        GPU(shared),            GPU(memory_bytes_per_us), GPU(h2d_bytes_per_us),
    GPU(d2h_bytes_per_us), GPU(sm_contention),  GPU(mixed_contention),
    OPTION(duration_ns), OPTION(policy),        OPTION(inflight),       OPTION(unit_us),     OPTION(corun),
    OPTION(starvation_us), OPTION(spin_us),     OPTION(bulk_bytes),     OPTION(min_share_ppm), OPTION(share_period_us), OPTION(quantum_us),
    OPTION(sms_limit),  OPTION(outstanding_us), OPTION(launch_ns),      OPTION(record_ns),   OPTION(wake_ns),
    OPTION(tick_ns),    OPTION(be_slice_us),    OPTION(high_slice_us),  OPTION(gate),        OPTION(suspend),
    OPTION(drain),      OPTION(defer_us),       OPTION(defer_ppm),      OPTION(need_us),        OPTION(slow_ppm),
    OPTION(suspend_delay_us), OPTION(resume_delay_us), OPTION(suspend_ns),
    OPTION(resume_ns),  OPTION(stop_us),        OPTION(stop_ns),        OPTION(stop_gpu_ns),
};
#define CLIENT(name) FIELD(rg_scenario_client, name)
static const number_field client_fields[] = {CLIENT(reports), CLIENT(iterations), CLIENT(weight), CLIENT(draw_seed)};

static uint64_t number(const char *key, const char *text, uint64_t most)
{
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end || errno || value > most)
        give_up(2, "%s: expected a whole number from 0 to %" PRIu64 ", got \"%s\"", key, most, text);
    return value;
}

/* False where the table has no such field. */
static bool set_number(const number_field *fields, size_t count, void *in, const char *key, const char *text)
{
    for (size_t i = 0; i < count; i++) {
        if (strcmp(fields[i].name, key) != 0)
            continue;
        uint8_t *at = (uint8_t *)in + fields[i].offset;
        uint64_t most = fields[i].bytes == 8 ? UINT64_MAX : fields[i].bytes == 4 ? UINT32_MAX : 1;
        uint64_t value = number(key, text, most);
        uint32_t value32 = (uint32_t)value;
        bool truth = value != 0;
        if (fields[i].bytes == 8)
            memcpy(at, &value, 8);
        else if (fields[i].bytes == 4)
            memcpy(at, &value32, 4);
        else
            memcpy(at, &truth, sizeof(truth));
        return true;
    }
    return false;
}
#define SET_NUMBER(fields, in, key, text) set_number(fields, sizeof(fields) / sizeof(*(fields)), in, key, text)

/* ---- The description */

typedef struct {
    rg_scenario_options options;
    rg_scenario_mode mode;
    rg_scenario_client clients[RG_SCENARIO_MAX_CLIENTS];
    rg_profiles profiles[RG_SCENARIO_MAX_CLIENTS];
    rg_arrivals lists[RG_SCENARIO_MAX_CLIENTS];
    rg_scenario_moment *moments[RG_SCENARIO_MAX_CLIENTS];
    uint32_t count;
} description;

static void set_preset(description *d, const char *name)
{
    const rg_model_params *preset = rg_model_preset(name);
    if (!preset)
        give_up(2, "preset: expected h200, a100 or l4, got \"%s\"", name);
    uint32_t shared = d->options.gpu.shared;
    d->options.gpu = *preset;
    d->options.gpu.shared = shared;
}

static void set_mode(description *d, const char *name)
{
    static const char *const names[] = {"alone", "ungoverned", "governed", "preempt"};
    for (int i = 0; i < 4; i++)
        if (strcmp(names[i], name) == 0) {
            d->mode = (rg_scenario_mode)i;
            return;
        }
    give_up(2, "mode: expected alone, ungoverned, governed or preempt, got \"%s\"", name);
}

static void set_rate(rg_scenario_client *c, char *value)
{
    char kind[16], gap[32], seed[32], more;
    if (sscanf(value, "%15s %31s %31s %c", kind, gap, seed, &more) != 3)
        give_up(2, "rate: expected a kind, a mean gap in ns and a seed, got \"%s\"", value);
    if (strcmp(kind, "uniform") != 0 && strcmp(kind, "poisson") != 0)
        give_up(2, "rate: expected uniform or poisson, got \"%s\"", kind);
    c->open_loop = true;
    c->arrivals = kind[0] == 'u' ? RG_ARRIVALS_UNIFORM : RG_ARRIVALS_POISSON;
    c->mean_gap_ns = number("rate", gap, GAP_MAX_NS);
    c->seed = number("rate", seed, UINT64_MAX);
}

static void add_moment(description *d, uint32_t index, char *value)
{
    rg_scenario_client *c = &d->clients[index];
    uint32_t n = c->moment_count;
    char at[32], work[32], more;
    if (n == RG_SCENARIO_MOST_MOMENTS)
        give_up(2, "moment: expected at most %d of a client", RG_SCENARIO_MOST_MOMENTS);
    if (sscanf(value, "%31s %31s %c", at, work, &more) != 2)
        give_up(2, "moment: expected two times in ns, got \"%s\"", value);
    rg_scenario_moment moment = {number("moment", at, UINT64_MAX), number("moment", work, RG_PROFILE_MAX_NS)};
    if (!moment.work_ns || (n && moment.at_ns <= d->moments[index][n - 1].at_ns))
        give_up(2, "moment: expected work, and each later than the one before, got \"%s %s\"", at, work);
    if (!(n & (n - 1))) {
        d->moments[index] = realloc(d->moments[index], (n ? 2 * (size_t)n : 1) * sizeof(moment));
        if (!d->moments[index])
            give_up(1, "out of memory");
    }
    d->moments[index][n] = moment;
    c->moments = d->moments[index];
    c->moment_count = n + 1;
}

static void set_of_client(description *d, uint32_t index, const char *key, char *value)
{
    rg_scenario_client *c = &d->clients[index];
    char error[RG_PROFILE_ERROR_BYTES];
    if (strcmp(key, "profile") == 0) {
        if (rg_profiles_add(&d->profiles[index], value, error, sizeof(error)) < 0)
            give_up(2, "%s", error);
        c->profiles = d->profiles[index].of;
        c->profile_count = d->profiles[index].count;
    } else if (strcmp(key, "arrivals") == 0) {
        if (rg_arrivals_read(value, &d->lists[index], error, sizeof(error)) < 0)
            give_up(2, "%s", error);
        c->open_loop = true;
        c->arrivals = RG_ARRIVALS_LIST;
        c->list = &d->lists[index];
    } else if (strcmp(key, "class") == 0) {
        c->best_effort = strcmp(value, "best-effort") == 0;
        if (!c->best_effort && strcmp(value, "high") != 0)
            give_up(2, "class: expected high or best-effort, got \"%s\"", value);
    } else if (strcmp(key, "rate") == 0) {
        set_rate(c, value);
    } else if (strcmp(key, "moment") == 0) {
        add_moment(d, index, value);
    } else if (!SET_NUMBER(client_fields, c, key, value)) {
        give_up(2, "unknown key \"%s\" of a client", key);
    }
}

/* One line without its end; the value is what follows the first space. False at the end of the input. */
static bool read_line(char line[VALUE_BYTES], char **value)
{
    if (!fgets(line, VALUE_BYTES, stdin))
        return false;
    size_t bytes = strcspn(line, "\n");
    if (line[bytes] != '\n')
        give_up(2, "a line is longer than %d bytes, or has no end", VALUE_BYTES - 2);
    line[bytes] = '\0';
    char *space = strchr(line, ' ');
    *value = space ? space + 1 : line + bytes;
    if (space)
        *space = '\0';
    return true;
}

static void read_description(description *d)
{
    static char line[VALUE_BYTES];
    char *value;
    d->options = rg_scenario_defaults();
    while (read_line(line, &value)) {
        if (strcmp(line, "run") == 0) {
            for (uint32_t i = 0; i < d->count; i++)
                if (!d->clients[i].profile_count)
                    give_up(2, "client %u has no profile", i);
            return;
        }
        if (strcmp(line, "client") == 0) {
            if (d->count == RG_SCENARIO_MAX_CLIENTS)
                give_up(2, "expected at most %d clients", RG_SCENARIO_MAX_CLIENTS);
            d->clients[d->count++].draw_seed = 1;
        } else if (d->count) {
            set_of_client(d, d->count - 1, line, value);
        } else if (strcmp(line, "preset") == 0) {
            set_preset(d, value);
        } else if (strcmp(line, "mode") == 0) {
            set_mode(d, value);
        } else if (!SET_NUMBER(option_fields, &d->options, line, value)) {
            give_up(2, "unknown key \"%s\"", line);
        }
    }
    give_up(2, "the description ends without \"run\"");
}

/* ---- Results */

/*
 * One tick: out goes {"launches": n, "launched": [n of a client, ...], "starved": n, "requests": [[bucket, count], ...], "waits": [[client,
 * kind, began ns, worked ns, waited ns], ...]}, in comes a line "suspend defer_us defer_ppm need_us slice_us inflight corun stop_us share_period_us hold turns" of
 * eleven numbers, or "keep hold turns", which leaves the settings as they are. Each client's bit in `turns` says that it waits for its turn.
 */
static int on_tick(void *user, rg_scenario_tick *t)
{
    static char line[VALUE_BYTES];
    char *rest;
    unsigned v[10];
    const description *d = user;
    printf("{\"launches\":%" PRIu64 ",\"starved\":%" PRIu64 ",\"launched\":[", t->launches, t->starved);
    for (uint32_t i = 0; i < d->count; i++)
        printf("%s%" PRIu64, i ? "," : "", t->launched[i]);
    printf("],\"requests\":[");
    const char *comma = "";
    for (uint32_t i = 0; i < RG_HIST_BUCKETS; i++)
        if (t->requests[i]) {
            printf("%s[%u,%" PRIu64 "]", comma, i, t->requests[i]);
            comma = ",";
        }
    printf("],\"waits\":[");
    for (uint32_t i = 0; i < t->wait_count; i++)
        printf("%s[%u,%" PRIu64 ",%" PRIu64 ",%" PRIu64 ",%" PRIu64 "]", i ? "," : "", t->waits[i].client, t->waits[i].kind >> 12, t->waits[i].began_ns,
               t->waits[i].worked_ns, t->waits[i].waited_ns); /* of a kind as much as a number of JavaScript holds */
    puts("]}");
    fflush(stdout);
    if (!read_line(line, &rest))
        return -1;
    if (rest != line + strlen(line))
        rest[-1] = ' ';
    if (sscanf(line, "keep %u %" SCNu64, &v[0], &t->turns) == 2) {
        t->hold = v[0] != 0;
        return 0;
    }
    if (sscanf(line, "%u %u %u %u %u %u %u %u %u %u %" SCNu64, &v[0], &v[1], &v[2], &v[3], &v[4], &v[5], &v[6], &v[7], &v[8], &v[9], &t->turns) != 11)
        give_up(2, "expected eleven numbers in answer to a tick, got \"%s\"", line);
    t->suspend = v[0];
    t->defer_us = v[1];
    t->defer_ppm = v[2];
    t->need_us = v[3];
    t->slice_us = v[4];
    t->inflight = v[5];
    t->corun = v[6];
    t->stop_us = v[7];
    t->share_period_us = v[8];
    t->hold = v[9] != 0;
    return 0;
}

static void on_progress(void *user, uint64_t now_ns)
{
    (void)user;
    printf("{\"now_ns\":%" PRIu64 "}\n", now_ns);
    fflush(stdout);
}

/* GPU time of one iteration: what its kernels and copies take alone. */
static uint64_t gpu_ns(const rg_profile *p)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < p->op_count; i++)
        sum += p->ops[i].kind == RG_PROFILE_SYNC ? 0 : p->ops[i].duration_ns;
    return sum;
}

/* GPU time and launches of an iteration are means over the profiles, which come equally often. */
static void print_result(const rg_scenario_client *c, const rg_scenario_result *r)
{
#define RESULT(name) printf(",\"" #name "\":%" PRIu64, r->name)
    uint64_t sum_ns = 0, launches = 0;
    for (uint32_t i = 0; i < c->profile_count; i++) {
        sum_ns += gpu_ns(&c->profiles[i]);
        launches += c->profiles[i].launches;
    }
    printf("{\"gpu_ns\":%" PRIu64 ",\"launches_per_iteration\":%.15g", sum_ns / c->profile_count, (double)launches / c->profile_count);
    RESULT(iterations);
    RESULT(launches);
    RESULT(finished);
    RESULT(charged_ns);
    RESULT(requests);
    RESULT(p50_ns);
    RESULT(p95_ns);
    RESULT(p99_ns);
    RESULT(gate_waits);
    RESULT(gate_wait_ns);
    RESULT(inflight_waits);
    RESULT(inflight_wait_ns);
    RESULT(starved);
    RESULT(shared);
    RESULT(suspensions);
    putchar('}');
#undef RESULT
}

/* The part of the best-effort clients' time in long kernels, the largest of any, as rg_durations_beat tells of real ones. */
static double long_part(const description *d)
{
    double most = 0;
    for (uint32_t i = 0; i < d->count; i++) {
        const rg_scenario_client *c = &d->clients[i];
        uint64_t sum_ns = 0, long_ns = 0;
        for (const rg_profile *p = c->profiles; c->best_effort && p < c->profiles + c->profile_count; p++)
            for (uint32_t k = 0; k < p->op_count; k++) {
                uint64_t ns = p->ops[k].kind == RG_PROFILE_KERNEL ? p->ops[k].duration_ns : 0;
                sum_ns += ns;
                long_ns += ns >= RG_POLICY_STOP_NS ? ns : 0;
            }
        double part = sum_ns ? (double)long_ns / (double)sum_ns : 0;
        most = part > most ? part : most;
    }
    return most;
}

int main(int argc, char **argv)
{
    static description d;
    static rg_scenario_result results[RG_SCENARIO_MAX_CLIENTS];
    char error[256] = "";
    if (argc > 1)
        give_up(2, "%s: takes no arguments but a description on standard input; `rigel simulate` writes it", argv[0]);
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* whoever started it has no more use for it */
    read_description(&d);
    if (d.options.tick_ns)
        printf("{\"buckets\":%d,\"sub_bits\":%d,\"min_shift\":%d,\"long_part\":%.3f}\n", RG_HIST_BUCKETS, RG_HIST_SUB_BITS,
               RG_HIST_MIN_SHIFT, long_part(&d));
    if (!d.options.sms_limit)
        d.options.sms_limit = d.options.gpu.sms;
    d.options.on_tick = on_tick;
    d.options.user = &d;
    d.options.progress_ns = d.options.duration_ns / 100;
    d.options.on_progress = on_progress;
    if (rg_scenario_run(&d.options, d.mode, d.clients, d.count, results, error, sizeof(error)) < 0)
        give_up(1, "%s", error);
    printf("{\"clients\":[");
    for (uint32_t i = 0; i < d.count; i++) {
        if (i)
            putchar(',');
        print_result(&d.clients[i], &results[i]);
        rg_profiles_free(&d.profiles[i]);
        rg_arrivals_free(&d.lists[i]);
        free(d.moments[i]);
    }
    puts("]}");
    return ferror(stdout) || fflush(stdout) ? 1 : 0;
}
