/*
 * test-duration.c: the segment's table of kernel durations: concurrent and killed writers, a full table, and what a client makes
 * of it: seeding, samples written back, names as profiles have them, graphs.
 *
 * The client's parts are linked into this program and run on the simulated GPU, each case in a process of its own; a second
 * client is a forked process that becomes one of the same segment. Nothing here depends on how long anything takes: how long a
 * kernel is taken to last is compared with what the simulated GPU was told, or with what was put into the table.
 */
#include "client-testing.h"

#include <math.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#define MANGLED "_Z4gemmIfLi4EEvPfi"
#define READABLE "void gemm<float, 4>(float*, int)"
static const char ptx[] = PTX_HEADER PTX_KERNEL("rigel_spin") PTX_KERNEL(MANGLED) PTX_KERNEL("ncclDevKernel_AllReduce");
static CUfunction gemm, nccl;
static char device_name[256];

/* Makes a segment; clients that this process and its children become are of the program 0xabc. */
static void prepare(void)
{
    prepare_waiting_client("duration", "best-effort"); /* where the GPU is taken away instead, durations are not learned */
    setenv("RIGEL_PROGRAM", "abc", 1);
}

static void become(void)
{
    attach_client();
    CHECK_EQUAL(cu.cuDeviceGetName(device_name, sizeof device_name, 0), CUDA_SUCCESS);
    CUmodule module = load_kernels(ptx);
    CHECK_EQUAL(cu.cuModuleGetFunction(&gemm, module, MANGLED), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuModuleGetFunction(&nccl, module, "ncclDevKernel_AllReduce"), CUDA_SUCCESS);
}

/* Launches one kernel after the other until that many were timed. */
static void launch_until_sampled(CUfunction f, unsigned grid, uint64_t block_ns, uint64_t samples)
{
    uint64_t want = rg.slot->samples + samples;
    for (int i = 0; rg.slot->samples < want; i++) {
        CHECK(i < 100000);
        launch_blocks(f, NULL, grid, block_ns);
        CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
        rg_samples_poll();
    }
}

/* What this process holds for a launch, and what the segment holds for the kernel. */
static uint32_t own(CUfunction f, unsigned grid)
{
    return rg_duration_of(rg_duration_key((uintptr_t)f, rg_dims_of(grid, 1, 1, 32, 1, 1)))->duration_ns;
}

static rg_estimate *shared(const char *name, unsigned grid)
{
    uint64_t key = rg_estimate_key(0xabc, device_name, rg_text_hash(name), rg_dims_of(grid, 1, 1, 32, 1, 1));
    int at = rg_estimate_find(seg, key);
    return at < 0 ? NULL : &seg->estimates[at];
}

static void in_child(void (*body)(void))
{
    pid_t pid = fork();
    if (pid == 0) {
        body();
        exit(0);
    }
    int status = -1;
    CHECK_EQUAL(waitpid(pid, &status, 0), pid);
    CHECK_EQUAL(status, 0);
}

/* As the control process does it: a profile's row, or with a count of samples one of the cache. */
static void put(const char *name, unsigned grid, uint32_t duration_ns, uint32_t samples)
{
    char simulated[256];
    snprintf(simulated, sizeof simulated, "%s", "NVIDIA H200 (simulated)");
    uint64_t key = rigel_estimate_key(0xabc, simulated, name, grid, 1, 1, 32, 1, 1);
    int at = rigel_estimate_enter(getenv("RIGEL_SEGMENT"), key);
    CHECK(at >= 0);
    seg->estimates[at].duration_ns = duration_ns;
    seg->estimates[at].samples = samples;
    if (!samples)
        seg->header.name_seeds++;
}

/* ---- the table ---- */

static void the_estimate_falls_at_once_and_rises_slowly(void)
{
    CHECK_EQUAL(rg_estimate_next(0, 5000, false), 5000);
    CHECK_EQUAL(rg_estimate_next(5000, 700, false), 700);
    CHECK_EQUAL(rg_estimate_next(1000, 17000, false), 2000);
    CHECK_EQUAL(rg_estimate_next(1000, 17000, true), 9000);
    CHECK_EQUAL(rg_estimate_next(1000, UINT32_MAX, true), 1000 + (UINT32_MAX - 1000) / 2);
}

static void dimensions_are_kept_whole(void)
{
    seg = fresh_segment(scratch("dims"));
    rg_dims most = rg_dims_of(2147483647, 65535, 65534, 1024, 1023, 64);
    rg_estimate_facts facts = {.program = 7, .device = 3, .dims = most, .name = "kernel"};
    int at = rg_estimate_enter(seg, 12345);
    rg_estimate_describe(seg, at, &facts);
    rg_estimate *e = &seg->estimates[at];
    CHECK_EQUAL(e->grid_x, 2147483647);
    CHECK_EQUAL(e->grid_y, 65535);
    CHECK_EQUAL(e->grid_z, 65534);
    CHECK_EQUAL(e->block_x, 1024);
    CHECK_EQUAL(e->block_y, 1023);
    CHECK_EQUAL(e->block_z, 64);
    CHECK_EQUAL(e->device, 3);
    CHECK(strcmp(e->name, "kernel") == 0);
    unlink(scratch("dims"));
}

/* Everything that tells kernels apart is in the key, and a device's name as far as the segment holds it. */
static void keys_tell_kernels_apart(void)
{
    rg_dims dims = rg_dims_of(1, 2, 3, 4, 5, 6);
    uint64_t hash = rg_text_hash("a"), key = rg_estimate_key(1, "GPU", hash, dims);
    CHECK(key != 0);
    CHECK(key == rg_estimate_key(1, "GPU", rg_text_hash("a"), dims));
    CHECK(key != rg_estimate_key(2, "GPU", hash, dims));
    CHECK(key != rg_estimate_key(1, "GPU 2", hash, dims));
    CHECK(key != rg_estimate_key(1, "GPU", rg_text_hash("b"), dims));
    CHECK(key != rg_estimate_key(1, "GPU", hash, rg_dims_of(1, 2, 4, 4, 5, 6)));
    CHECK(key != rg_estimate_key(1, "GPU", hash, rg_dims_of(2, 1, 3, 4, 5, 6)));
    CHECK(key != rg_estimate_key(1, "GPU", hash, rg_dims_of(1, 2, 3, 4, 6, 5)));
    CHECK(key == rigel_estimate_key(1, "GPU", "a", 1, 2, 3, 4, 5, 6));
    CHECK(rigel_estimate_key(1, "GPU", "a", 0, 0, 0, 0, 0, 0) == rg_estimate_key(1, "GPU", hash, RG_DIMS_ANY));
    char longer[300], cut[300];
    memset(longer, 'x', sizeof longer);
    longer[sizeof longer - 1] = 0;
    memcpy(cut, longer, sizeof cut);
    cut[RG_DEVICE_NAME_BYTES - 1] = 0;
    CHECK(rg_estimate_key(1, longer, hash, dims) == rg_estimate_key(1, cut, hash, dims));
}

static uint64_t key_number(uint32_t i)
{
    return rg_hash_fold(rg_text_hash("kernel"), i) | 1;
}

/* Eight processes enter the same 500 kernels and take samples in, at once: none is entered twice, no sample is lost. */
static void writers_at_once_lose_nothing(void)
{
    enum { WRITERS = 8, KERNELS = 500, ROUNDS = 40 };
    seg = fresh_segment(scratch("writers"));
    int go[2];
    pid_t pids[WRITERS];
    CHECK_EQUAL(pipe(go), 0);
    for (int w = 0; w < WRITERS; w++) {
        pids[w] = fork();
        if (pids[w] == 0) {
            char byte;
            CHECK_EQUAL(read(go[0], &byte, 1), 1);
            for (int round = 0; round < ROUNDS; round++)
                for (uint32_t i = 0; i < KERNELS; i++) {
                    int at = rg_estimate_enter(seg, key_number(i));
                    CHECK(at >= 0);
                    rg_estimate_facts facts = {.program = i, .dims = rg_dims_of(i + 1, 1, 1, 32, 1, 1), .name = "kernel"};
                    rg_estimate_describe(seg, at, &facts);
                    rg_estimate_sample(seg, at, 1000 + i + (uint32_t)w);
                }
            _exit(0);
        }
    }
    CHECK_EQUAL(write(go[1], "12345678", WRITERS), WRITERS);
    for (int w = 0; w < WRITERS; w++) {
        int status = -1;
        CHECK_EQUAL(waitpid(pids[w], &status, 0), pids[w]);
        CHECK_EQUAL(status, 0);
    }
    uint32_t taken = 0;
    for (uint32_t i = 0; i < RG_MAX_ESTIMATES; i++)
        taken += seg->estimates[i].key != 0;
    CHECK_EQUAL(taken, KERNELS);
    for (uint32_t i = 0; i < KERNELS; i++) {
        int at = rg_estimate_find(seg, key_number(i));
        CHECK(at >= 0);
        CHECK_EQUAL(seg->estimates[at].samples, WRITERS * ROUNDS);
        CHECK(seg->estimates[at].duration_ns >= 1000 + i && seg->estimates[at].duration_ns < 1000 + i + WRITERS);
        CHECK_EQUAL(seg->estimates[at].program, i);
        CHECK_EQUAL(seg->estimates[at].grid_x, i + 1);
        CHECK(strcmp(seg->estimates[at].name, "kernel") == 0);
    }
    unlink(scratch("writers"));
}

/* Two processes, in step, enter keys whose place is the same: each gets an entry of its own. */
static void keys_that_meet_at_one_place_both_get_in(void)
{
    enum { MEETINGS = 3000 };
    seg = fresh_segment(scratch("meet"));
    _Atomic uint32_t *step = mmap(NULL, 2 * sizeof *step, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(step != MAP_FAILED);
    pid_t pids[2];
    for (uint32_t w = 0; w < 2; w++) {
        pids[w] = fork();
        if (pids[w] == 0) {
            for (uint32_t i = 1; i <= MEETINGS; i++) {
                atomic_store(&step[w], i);
                for (uint32_t spins = 0; atomic_load(&step[1 - w]) < i; spins++)
                    if (spins % 1000 == 999)
                        sched_yield();
                CHECK(rg_estimate_enter(seg, (uint64_t)i * 2 << 40 | (w + 1)) >= 0);
            }
            _exit(0);
        }
    }
    for (int w = 0; w < 2; w++) {
        int status = -1;
        CHECK_EQUAL(waitpid(pids[w], &status, 0), pids[w]);
        CHECK_EQUAL(status, 0);
    }
    for (uint64_t i = 1; i <= MEETINGS; i++) {
        int first = rg_estimate_find(seg, i * 2 << 40 | 1), second = rg_estimate_find(seg, i * 2 << 40 | 2);
        CHECK(first >= 0 && second >= 0);
        CHECK(first != second);
    }
    unlink(scratch("meet"));
}

/*
 * Writers killed at whatever instant the signal finds them, 200 in all, on a table they keep filling. Whatever they leave can be
 * used: every key is there once, takes samples in, and gets its description from the next who comes.
 */
static void writers_killed_at_any_instant(void)
{
    enum { KERNELS = 3000 };
    seg = fresh_segment(scratch("killed"));
    uint32_t seed = 4711;
    for (int round = 0; round < 50; round++) {
        pid_t pids[4];
        for (int w = 0; w < 4; w++) {
            pids[w] = fork();
            if (pids[w] == 0)
                for (uint32_t i = (uint32_t)(round * 37 + w);; i++) {
                    int at = rg_estimate_enter(seg, key_number(i % KERNELS));
                    rg_estimate_facts facts = {.program = 1, .device = 1, .dims = rg_dims_of(1, 1, 1, 32, 1, 1), .name = "kernel"};
                    rg_estimate_sample(seg, at, 1000 + i % 7);
                    rg_estimate_describe(seg, at, &facts);
                }
        }
        seed = seed * 1103515245u + 12345u;
        usleep(100 + (seed >> 16) % 1000);
        for (int w = 0; w < 4; w++) {
            kill(pids[w], SIGKILL);
            waitpid(pids[w], NULL, 0);
        }
    }
    for (uint32_t i = 0; i < KERNELS; i++) {
        int at = rg_estimate_enter(seg, key_number(i));
        CHECK(at >= 0);
        CHECK_EQUAL(rg_estimate_find(seg, key_number(i)), at);
        rg_estimate *e = &seg->estimates[at];
        CHECK(e->duration_ns == 0 || (e->duration_ns >= 1000 && e->duration_ns < 1007));
        CHECK(e->name[RG_KERNEL_NAME_BYTES - 1] == 0);
        rg_estimate_facts facts = {.program = 1, .device = 1, .dims = rg_dims_of(1, 1, 1, 32, 1, 1), .name = "kernel"};
        rg_estimate_describe(seg, at, &facts);
        CHECK_EQUAL(e->state, 1);
        CHECK_EQUAL(e->grid_x, 1);
        CHECK(strcmp(e->name, "kernel") == 0);
        uint32_t samples = e->samples;
        rg_estimate_sample(seg, at, 1000);
        CHECK_EQUAL(e->samples, samples + 1);
        CHECK_EQUAL(e->duration_ns, 1000);
    }
    uint32_t taken = 0;
    for (uint32_t i = 0; i < RG_MAX_ESTIMATES; i++)
        taken += seg->estimates[i].key != 0;
    CHECK_EQUAL(taken, KERNELS);
    unlink(scratch("killed"));
}

static void a_full_table_refuses_and_keeps_what_it_has(void)
{
    seg = fresh_segment(scratch("full"));
    uint32_t entered = 0, refused = 0;
    for (uint32_t i = 0; entered < RG_MAX_ESTIMATES; i++) {
        CHECK(i < 100 * RG_MAX_ESTIMATES);
        if (rg_estimate_enter(seg, key_number(i)) >= 0)
            entered++;
        else if (entered < RG_MAX_ESTIMATES * 3 / 4)
            refused++;
    }
    CHECK(refused < RG_MAX_ESTIMATES / 100); /* three quarters full, nearly everything has room */
    CHECK_EQUAL(rg_estimate_enter(seg, 1), -1);
    CHECK_EQUAL(rg_estimate_find(seg, 1), -1);
    CHECK_EQUAL(rigel_estimate_enter(scratch("full"), 1), -1);
    CHECK_EQUAL(rigel_estimate_enter("/nonexistent/segment", 1), -1);
    CHECK(rg_estimate_find(seg, key_number(0)) >= 0);
    unlink(scratch("full"));
}

/* All that is known of a kernel, but for what it is known by. */
static void know(rg_duration *d)
{
    d->duration_ns = d->seen = d->samples = d->least_ns = d->price_ns = d->charged = d->kernel = d->doubt = d->shared = 3;
    d->communicates = d->graph = true;
}

static bool nothing_is_known(const rg_duration *d)
{
    return !d->seen && !d->samples && !d->least_ns && !d->price_ns && !d->charged && !d->kernel && !d->shared && !d->graph;
}

/* A kernel that takes the place of another, or has its handle, has none of what was known of that one. */
static void in_anothers_place_nothing_is_known(void)
{
    enum { PLACE = 77 };
    rg_duration *first = NULL;
    for (uint64_t i = 0; i < RG_DURATION_PROBES; i++) {
        rg_duration *d = rg_duration_of((uint64_t)PLACE << 52 | i << 1 | 1);
        CHECK(nothing_is_known(d));
        first = first ? first : d;
        know(d);
    }
    CHECK(rg_duration_of((uint64_t)PLACE << 52 | 101) == first);
    CHECK(nothing_is_known(first) && !first->duration_ns && !first->doubt);
    CHECK(!nothing_is_known(first + 1));
    for (uint32_t ns = 0; ns <= 5000; ns += 5000) {
        know(first);
        rg_duration_reset((uint64_t)PLACE << 52 | 101, ns);
        CHECK(nothing_is_known(first) && !first->communicates);
        CHECK_EQUAL(first->duration_ns, ns);
        CHECK_EQUAL(first->doubt, ns ? RG_ESTIMATE_DOUBT : 0);
    }
}

/* ---- clients ---- */

static void learn_one(void)
{
    become();
    launch_until_sampled(spin, 1, 300000, 4);
    CHECK_EQUAL(rg.slot->durations_seeded, 0);
    CHECK(own(spin, 1) >= 300000);
}

/* A process counts on in the slot of one of its name that has ended: another name starts from nothing. */
static void meet_again(void)
{
    setenv("RIGEL_NAME", "again", 1);
    become();
    uint32_t known = shared("rigel_spin", 1)->duration_ns;
    launch_blocks(spin, NULL, 1, 300000);
    CHECK_EQUAL(rg.slot->durations_seeded, 1);
    CHECK_EQUAL(own(spin, 1), known);
    /* It counts for what is known of it already, 300 us being three units. */
    CHECK(rg.members[0].inflight[0] >= 3 * RG_POLICY_LAUNCH && rg.members[0].inflight[0] < 4096 * RG_POLICY_LAUNCH);
    /* Another shape is another kernel. */
    launch_blocks(spin, NULL, 2, 300000);
    CHECK_EQUAL(rg.slot->durations_seeded, 1);
    CHECK_EQUAL(own(spin, 2), 0);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
}

static void meet_as_another_program(void)
{
    setenv("RIGEL_NAME", "another", 1);
    setenv("RIGEL_PROGRAM", "def", 1);
    become();
    launch_blocks(spin, NULL, 1, 300000);
    CHECK_EQUAL(rg.slot->durations_seeded, 0);
    CHECK_EQUAL(own(spin, 1), 0);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
}

static void clients_of_one_program_share_what_they_learn(void)
{
    prepare();
    in_child(learn_one);
    snprintf(device_name, sizeof device_name, "%s", seg->devices[0].name);
    rg_estimate *e = shared("rigel_spin", 1);
    CHECK(e != NULL);
    CHECK_EQUAL(e->samples, 4);
    CHECK(e->duration_ns >= 300000);
    CHECK_EQUAL(e->used, 1);
    CHECK_EQUAL(e->device, 1);
    CHECK_EQUAL(e->program, 0xabc);
    CHECK_EQUAL(e->grid_x, 1);
    CHECK_EQUAL(e->block_x, 32);
    CHECK(strcmp(e->name, "rigel_spin") == 0);
    in_child(meet_again);
    in_child(meet_as_another_program);
    CHECK_EQUAL(e->samples, 4);
    done();
}

/* Without RIGEL_PROGRAM (or with one that is no number), clients of one name are one program. */
static void program_by_name(void)
{
    unsetenv("RIGEL_PROGRAM");
    become();
    CHECK(rg.program == rg_text_hash("test"));
}

static void program_of_nonsense(void)
{
    setenv("RIGEL_PROGRAM", "12x", 1);
    become();
    CHECK(rg.program == rg_text_hash("test"));
}

static void a_program_without_a_number_goes_by_its_name(void)
{
    prepare();
    in_child(program_by_name);
    in_child(program_of_nonsense);
    done();
}

/* What is known is not believed for long where it is wrong: too long falls at the first sample, too short is soon above half. */
static void wrong_estimates_are_soon_corrected(void)
{
    prepare();
    put("rigel_spin", 1, 900000000, 5);
    put("rigel_spin", 2, 1000, 5);
    become();
    launch_blocks(spin, NULL, 1, 20000);
    CHECK_EQUAL(own(spin, 1), 900000000);
    /* The first launch, which may load the code, is not timed where something is known. */
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    rg_samples_poll();
    CHECK_EQUAL(rg.slot->samples, 0);
    launch_until_sampled(spin, 1, 20000, 1);
    CHECK(own(spin, 1) < 900000000);
    CHECK(shared("rigel_spin", 1)->duration_ns < 900000000);
    launch_until_sampled(spin, 2, 2000000, 3);
    CHECK(own(spin, 2) > 1000000);
    CHECK(shared("rigel_spin", 2)->samples == 8);
    CHECK(rg.slot->durations_seeded == 2);
    done();
}

static float said_ms;
static CUresult elapsed(float *ms, CUevent start, CUevent stop)
{
    (void)start, (void)stop;
    *ms = said_ms;
    return CUDA_SUCCESS;
}

static void launch_and_take_in(unsigned grid)
{
    launch_blocks(spin, NULL, grid, 1000);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    rg_samples_poll();
}

/* A sample of no time that there is says nothing, one of more than can be kept that much, and one of a kernel that has lost its place nothing here. */
static void odd_samples_do_no_harm(void)
{
    prepare();
    become();
    rg_real.cuEventElapsedTime = elapsed;
    rg_duration *d = rg_duration_of(rg_duration_key((uintptr_t)spin, rg_dims_of(3, 1, 1, 32, 1, 1)));
    for (int i = 0; i < 2; i++) {
        said_ms = i ? -1 : NAN;
        launch_and_take_in(3);
        CHECK(d->seen > 0);
        CHECK_EQUAL(d->samples, 0);
        CHECK_EQUAL(d->duration_ns, 0);
    }
    said_ms = 1e9f;
    launch_and_take_in(3);
    CHECK_EQUAL(rg.slot->samples, 1);
    CHECK_EQUAL(d->samples, 1);
    CHECK_EQUAL(d->duration_ns, 4000000001);
    uint64_t key = atomic_load(&d->key);
    said_ms = 1;
    launch_blocks(spin, NULL, 3, 1000);
    atomic_store(&d->key, key ^ 2);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    rg_samples_poll();
    CHECK_EQUAL(rg.slot->samples, 2);
    CHECK_EQUAL(d->samples, 1);
    CHECK_EQUAL(d->duration_ns, 4000000001);
    done();
}

/* An estimate that came from elsewhere is doubted for three samples; what a launch is charged is the shortest of four, and shorter ones later. */
static void samples_make_an_estimate_and_a_price(void)
{
    enum { MS = 1000000 };
    static const struct {
        float ms;
        uint32_t least_ns, price_ns;
    } samples[] = {{5, 5 * MS + 1, 0}, {3, 3 * MS + 1, 0}, {4, 3 * MS + 1, 0}, {6, 3 * MS + 1, 3 * MS + 1}, {4, 3 * MS + 1, 3 * MS + 1}, {2, 2 * MS + 1, 2 * MS + 1}};
    prepare();
    become();
    rg_agent_stop();
    rg_real.cuEventElapsedTime = elapsed;
    uint64_t key = rg_duration_key((uintptr_t)spin, rg_dims_of(3, 1, 1, 32, 1, 1));
    rg_duration *d = rg_duration_of(key);
    for (uint32_t i = 0; i < sizeof samples / sizeof *samples; i++) {
        if (i >= RG_SAMPLE_FIRST)
            atomic_store(&d->seen, RG_SAMPLE_EVERY); /* it is time for one more */
        said_ms = samples[i].ms;
        launch_and_take_in(3);
        CHECK_EQUAL(d->samples, i + 1);
        CHECK_EQUAL(d->least_ns, samples[i].least_ns);
        CHECK_EQUAL(d->price_ns, samples[i].price_ns);
    }
    rg_duration_reset(key, MS);
    said_ms = 17;
    launch_and_take_in(3); /* what is known is not timed at first */
    CHECK_EQUAL(d->duration_ns, MS);
    uint32_t ns = MS;
    for (uint32_t i = 0; i < RG_ESTIMATE_DOUBT + 2; i++) {
        if (i >= RG_ESTIMATE_DOUBT)
            atomic_store(&d->seen, RG_SAMPLE_EVERY);
        launch_and_take_in(3);
        ns = rg_estimate_next(ns, 17 * MS + 1, i < RG_ESTIMATE_DOUBT);
        CHECK_EQUAL(d->duration_ns, ns);
    }
    done();
}

/* A profile says how long kernels take, by names as they are or as people read them, for one shape or for all. */
static void profiles_seed(void)
{
    prepare();
    put("rigel_spin", 1, 111000, 0);
    put("rigel_spin", 0, 222000, 0);
    void *cxx = dlopen("libstdc++.so.6", RTLD_NOW); /* as a C++ program has it */
    put(READABLE, 1, 333000, 0);
    put(READABLE, 0, 444000, 0);
    become();
    launch_blocks(spin, NULL, 1, 1000);
    CHECK_EQUAL(own(spin, 1), 111000);
    launch_blocks(spin, NULL, 5, 1000);
    CHECK_EQUAL(own(spin, 5), 222000);
    CHECK_EQUAL(shared("rigel_spin", 5)->duration_ns, 222000);
    CHECK_EQUAL(shared("rigel_spin", 5)->samples, 0);
    CHECK_EQUAL(rg.slot->durations_seeded, 2);
    launch_blocks(gemm, NULL, 1, 1000);
    launch_blocks(gemm, NULL, 2, 1000);
    CHECK_EQUAL(own(gemm, 1), cxx ? 333000 : 0);
    CHECK_EQUAL(own(gemm, 2), cxx ? 444000 : 0);
    CHECK_EQUAL(rg.slot->durations_seeded, cxx ? 4 : 2);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    done();
}

static CUgraphExec capture(CUstream s, const unsigned *grids, int n)
{
    CUgraph graph;
    CUgraphExec exec;
    CHECK_EQUAL(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
    for (int i = 0; i < n; i++)
        launch_blocks(spin, s, grids[i], 50000);
    CHECK_EQUAL(cuStreamEndCapture(s, &graph), CUDA_SUCCESS);
    CHECK_EQUAL(cuGraphInstantiateWithFlags(&exec, graph, 0), CUDA_SUCCESS);
    return exec;
}

static CUstream stream(void)
{
    CUstream s;
    CHECK_EQUAL(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    return s;
}

static void learn_graph(void)
{
    become();
    CUstream s = stream();
    CUgraphExec exec = capture(s, (unsigned[]){1, 2, 3}, 3);
    for (int i = 0; rg.slot->samples < 2; i++) {
        CHECK(i < 100000);
        CHECK_EQUAL(cuGraphLaunch(exec, s), CUDA_SUCCESS);
        CHECK_EQUAL(cuStreamSynchronize(s), CUDA_SUCCESS);
        rg_samples_poll();
    }
    CHECK_EQUAL(rg.slot->durations_seeded, 0);
}

static void meet_graph_again(void)
{
    setenv("RIGEL_NAME", "again", 1);
    become();
    CUstream s = stream();
    /* The same kernels in another order are another graph. */
    CHECK_EQUAL(cuGraphLaunch(capture(s, (unsigned[]){1, 3, 2}, 3), s), CUDA_SUCCESS);
    CHECK_EQUAL(cuGraphLaunch(capture(s, (unsigned[]){1, 2}, 2), s), CUDA_SUCCESS);
    CHECK_EQUAL(rg.slot->durations_seeded, 0);
    CHECK_EQUAL(cuGraphLaunch(capture(s, (unsigned[]){1, 2, 3}, 3), s), CUDA_SUCCESS);
    CHECK_EQUAL(rg.slot->durations_seeded, 1);
    CHECK_EQUAL(cuGraphLaunch(capture(s, (unsigned[]){1, 2, 3}, 3), s), CUDA_SUCCESS); /* made again */
    CHECK_EQUAL(rg.slot->durations_seeded, 2);
    CHECK_EQUAL(cuStreamSynchronize(s), CUDA_SUCCESS);
}

static void graphs_are_known_again(void)
{
    prepare();
    in_child(learn_graph);
    int found = 0;
    for (uint32_t i = 0; i < RG_MAX_ESTIMATES; i++) {
        rg_estimate *e = &seg->estimates[i];
        if (!e->key)
            continue;
        found++;
        CHECK(strcmp(e->name, "graph of 3 kernels from rigel_spin") == 0);
        CHECK_EQUAL(e->grid_x, 0);
        CHECK(e->duration_ns >= 150000);
        CHECK(e->samples >= 2);
    }
    CHECK_EQUAL(found, 1);
    in_child(meet_graph_again);
    done();
}

/* Communication kernels are not learned: they never count in flight. A table without room stops nobody from learning alone. */
static void what_is_not_shared(void)
{
    prepare();
    for (uint32_t i = 0; i < RG_MAX_ESTIMATES; i++)
        seg->estimates[i].key = 2;
    become();
    launch_blocks(nccl, NULL, 1, 1000);
    CHECK_EQUAL(seg->header.unshared, 0);
    launch_until_sampled(spin, 1, 20000, 4);
    CHECK_EQUAL(seg->header.unshared, 1);
    CHECK(own(spin, 1) >= 20000);
    CHECK_EQUAL(rg.slot->durations_seeded, 0);
    done();
}

static void *meet_in_a_thread(void *context)
{
    CHECK_EQUAL(cu.cuCtxSetCurrent((CUcontext)context), CUDA_SUCCESS);
    CUstream s = stream();
    for (unsigned grid = 1; grid <= 40; grid++)
        launch_blocks(spin, s, grid, 1000);
    CHECK_EQUAL(cuStreamSynchronize(s), CUDA_SUCCESS);
    return NULL;
}

/* Threads that meet the same new kernels at once: each kernel is seeded once. */
static void threads_seed_each_kernel_once(void)
{
    prepare();
    for (unsigned grid = 1; grid <= 40; grid++)
        put("rigel_spin", grid, 5000, 9);
    become();
    CUcontext context = NULL;
    CHECK_EQUAL(rg_real.cuCtxGetCurrent(&context), CUDA_SUCCESS);
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        CHECK_EQUAL(pthread_create(&threads[i], NULL, meet_in_a_thread, context), 0);
    for (int i = 0; i < 4; i++)
        CHECK_EQUAL(pthread_join(threads[i], NULL), 0);
    CHECK_EQUAL(rg.slot->durations_seeded, 40);
    CHECK_EQUAL(rg_launches(rg.slot), 160);
    done();
}

static _Atomic int forgotten, polled, stale_uses;
static _Thread_local bool forgets;
static CUevent stale[2];
static pthread_t forgetting;
static CUresult (*real_query)(CUevent), (*real_create)(CUevent *, unsigned), (*real_record)(CUevent, CUstream);

/* The C library's; the thread that forgets lets the one that asks go on, and waits for it. */
int sched_yield(void)
{
    if (forgets) {
        atomic_store(&forgotten, 1);
        WAIT_FOR(atomic_load(&polled));
    }
    return (int)syscall(SYS_sched_yield);
}

static void *forget_samples(void *context)
{
    forgets = true;
    rg_samples_forget((CUcontext)context, -1);
    atomic_store(&forgotten, 1);
    return NULL;
}

static CUresult query_while_forgotten(CUevent event)
{
    if (event != stale[1])
        return real_query(event);
    CHECK_EQUAL(pthread_create(&forgetting, NULL, forget_samples, context), 0);
    WAIT_FOR(atomic_load(&forgotten));
    return CUDA_SUCCESS;
}

static CUresult create(CUevent *event, unsigned flags)
{
    CUresult r = real_create(event, flags);
    if (flags == CU_EVENT_DEFAULT)
        stale[stale[0] ? 1 : 0] = *event;
    return r;
}

static CUresult record(CUevent event, CUstream s)
{
    if (atomic_load(&polled) && (event == stale[0] || event == stale[1]))
        atomic_fetch_add(&stale_uses, 1);
    return real_record(event, s);
}

/* A context goes while another thread asks for a sample that was taken in it: the sample's events are not used after it. */
static void a_sample_goes_with_its_context_while_it_is_asked_for(void)
{
    prepare();
    become();
    *(void **)&real_query = rg_real.hooked[RG_HOOK_cuEventQuery];
    *(void **)&real_create = rg_real.hooked[RG_HOOK_cuEventCreate];
    *(void **)&real_record = rg_real.hooked[RG_HOOK_cuEventRecord];
    rg_real.hooked[RG_HOOK_cuEventCreate] = (void *)create;
    rg_real.hooked[RG_HOOK_cuEventRecord] = (void *)record;
    CUstream s = stream();
    launch_blocks(spin, s, 1, 1000);
    CHECK(stale[0] && stale[1]);
    CHECK_EQUAL(cuStreamSynchronize(s), CUDA_SUCCESS);
    rg_real.hooked[RG_HOOK_cuEventQuery] = (void *)query_while_forgotten;
    rg_samples_poll();
    atomic_store(&polled, 1);
    rg_real.hooked[RG_HOOK_cuEventQuery] = *(void **)&real_query;
    CHECK_EQUAL(pthread_join(forgetting, NULL), 0);
    rg_real.hooked[RG_HOOK_cuEventCreate] = *(void **)&real_create;
    launch_blocks(spin, s, 2, 1000);
    CHECK_EQUAL(stale_uses, 0);
    done();
}

static uint32_t asked;
static CUresult count_query(CUevent event)
{
    asked++;
    return real_query(event);
}

/* What was timed in a context that is gone is asked for no more: its events went with it, and their handles may be others' by now. */
static void samples_go_with_their_context(void)
{
    prepare();
    become();
    rg_agent_stop();
    *(void **)&real_query = rg_real.hooked[RG_HOOK_cuEventQuery];
    rg_real.hooked[RG_HOOK_cuEventQuery] = (void *)count_query;
    for (int gone = 0; gone < 2; gone++) {
        CUcontext its;
        CHECK_EQUAL(cuCtxCreate_v2(&its, 0, 0), CUDA_SUCCESS);
        load_kernels(NULL);
        launch_blocks(spin, NULL, 1, 1000);
        CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
        if (gone)
            CHECK_EQUAL(cuCtxDestroy_v2(its), CUDA_SUCCESS);
        asked = 0;
        rg_samples_poll();
        CHECK_EQUAL(asked, !gone);
    }
    done();
}

static uint32_t destroyed;
static __typeof__(&cuEventDestroy_v2) real_destroy;
static CUresult count_destroy(CUevent event)
{
    destroyed++;
    return real_destroy(event);
}

/* Kernels are timed in whichever context they are launched, by events of that one; those of another one are given back for it. */
static void samples_are_of_the_context_in_use(void)
{
    prepare();
    become();
    rg_agent_stop();
    real_destroy = RG_REAL(cuEventDestroy_v2);
    rg_real.hooked[RG_HOOK_cuEventDestroy_v2] = (void *)count_destroy;
    launch_until_sampled(spin, 1, 20000, RG_SAMPLE_FIRST);
    CHECK_EQUAL(destroyed, 0);
    CUcontext its;
    CHECK_EQUAL(cuCtxCreate_v2(&its, 0, 0), CUDA_SUCCESS);
    load_kernels(NULL);
    launch_until_sampled(spin, 2, 20000, RG_SAMPLE_FIRST);
    CHECK_EQUAL(destroyed, 2);
    CHECK(own(spin, 2) >= 20000);
    /* All of a device's go with it, and none with another device. */
    *(void **)&real_query = rg_real.hooked[RG_HOOK_cuEventQuery];
    rg_real.hooked[RG_HOOK_cuEventQuery] = (void *)count_query;
    for (CUdevice gone = 1; gone >= 0; gone--) {
        launch_blocks(spin, NULL, 3, 1000);
        CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
        rg_samples_forget(NULL, gone);
        asked = 0;
        rg_samples_poll();
        CHECK_EQUAL(asked, gone);
    }
    done();
}

static _Atomic int all_gone;

static void *launch_in_contexts_that_go(void *unused)
{
    (void)unused;
    for (unsigned i = 0; i < 30; i++) {
        CUcontext own;
        CUmodule module;
        CUfunction f;
        CHECK_EQUAL(cuCtxCreate_v2(&own, 0, 0), CUDA_SUCCESS);
        CHECK_EQUAL(cu.cuModuleLoadData(&module, ptx), CUDA_SUCCESS);
        CHECK_EQUAL(cu.cuModuleGetFunction(&f, module, MANGLED), CUDA_SUCCESS);
        for (unsigned grid = 1; grid <= 10; grid++)
            launch_blocks(f, NULL, grid, 1000);
        CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
        CHECK_EQUAL(cuCtxDestroy_v2(own), CUDA_SUCCESS);
    }
    atomic_store(&all_gone, 1);
    return NULL;
}

/* What goes with a context leaves alone what another thread times, and has in flight, in another one (for the sanitizer of threads). */
static void contexts_go_while_another_thread_launches(void)
{
    pthread_t thread;
    prepare();
    become();
    CHECK_EQUAL(pthread_create(&thread, NULL, launch_in_contexts_that_go, NULL), 0);
    for (unsigned grid = 1; !atomic_load(&all_gone); grid++) {
        launch_blocks(gemm, NULL, grid, 1000);
        if (grid % 8 == 0) {
            CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
            rg_samples_poll();
        }
    }
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    done();
}

/* A kernel that comes at the handle of one whose module was unloaded is not taken for that one. */
static void a_handle_given_out_again_is_another_kernel(void)
{
    enum { FIRST_NS = 20000, SECOND_NS = 300000 };
    prepare();
    become();
    rg_agent_stop();
    rg_dims dims = rg_dims_of(3, 1, 1, 32, 1, 1);
    rg_duration *d = rg_duration_of(rg_duration_key((uintptr_t)spin, dims));
    launch_until_sampled(spin, 3, FIRST_NS, RG_SAMPLE_FIRST);
    launch_until_sampled(gemm, 3, FIRST_NS, RG_SAMPLE_FIRST);
    uint32_t first = shared("rigel_spin", 3)->samples, kept = own(gemm, 3);
    CHECK(first > 0 && shared("rigel_spin", 3)->duration_ns < SECOND_NS);
    CHECK(strcmp(seg->names[rg_name_of(false, (uintptr_t)spin) - 1].name, "rigel_spin") == 0);

    unload_and_give_out_again(spin, "second");
    launch_until_sampled(spin, 3, SECOND_NS, RG_SAMPLE_FIRST);
    CHECK(shared("second", 3) != NULL);
    CHECK(shared("second", 3)->duration_ns >= SECOND_NS);
    CHECK_EQUAL(shared("rigel_spin", 3)->samples, first); /* for other clients, and the next launch, it is what it was */
    CHECK(own(spin, 3) >= SECOND_NS);
    CHECK(strcmp(seg->names[rg_name_of(false, (uintptr_t)spin) - 1].name, "second") == 0);

    /* What is still there is known as before, from its next launch on too. */
    launch_blocks(gemm, NULL, 3, FIRST_NS);
    CHECK_EQUAL(own(gemm, 3), kept);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);

    /* Nor does it get what the former one took, where that is looked at later. */
    launch_blocks(spin, NULL, 4, FIRST_NS);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    unload_and_give_out_again(spin, "later");
    launch_until_sampled(spin, 4, SECOND_NS, RG_SAMPLE_FIRST);
    CHECK(own(spin, 4) >= SECOND_NS);

    /* Whether it communicates, which lets it past the gate, is asked anew as well. */
    unload_and_give_out_again(spin, "ncclDevKernel_AllReduce");
    launch_blocks(spin, NULL, 3, FIRST_NS);
    CHECK(atomic_load(&d->communicates));
    CHECK_EQUAL(d->shared, 0);
    unload_and_give_out_again(spin, "third");
    launch_blocks(spin, NULL, 3, FIRST_NS);
    CHECK(!atomic_load(&d->communicates));
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);

    /* As it is where the module went with its context. */
    CUcontext other;
    reborn_name = "ncclDevKernel_AllReduce";
    launch_blocks(spin, NULL, 3, FIRST_NS);
    CHECK(!atomic_load(&d->communicates)); /* it has not gone yet */
    CHECK_EQUAL(cuCtxCreate_v2(&other, 0, 0), CUDA_SUCCESS);
    CHECK_EQUAL(cuCtxDestroy_v2(other), CUDA_SUCCESS);
    CHECK_EQUAL(cuCtxSetCurrent(context), CUDA_SUCCESS);
    launch_blocks(spin, NULL, 3, FIRST_NS);
    CHECK(atomic_load(&d->communicates));
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    done();
}

/* Without a name, or an estimate in the segment, nothing tells whether it is another one: it is learned anew. */
static void a_handle_given_out_again_is_learned_anew_where_the_table_is_full(void)
{
    enum { FIRST_NS = 20000, SECOND_NS = 300000 };
    prepare();
    for (uint32_t i = 0; i < RG_MAX_ESTIMATES; i++)
        seg->estimates[i].key = 2;
    become();
    rg_agent_stop();
    launch_until_sampled(spin, 3, FIRST_NS, RG_SAMPLE_FIRST);
    CHECK(own(spin, 3) >= FIRST_NS);
    unload_and_give_out_again(spin, "second");
    launch_until_sampled(spin, 3, SECOND_NS, RG_SAMPLE_FIRST);
    CHECK_EQUAL(seg->header.unshared, 2);
    CHECK(own(spin, 3) >= SECOND_NS);
    done();
}

int main(int argc, char **argv)
{
    (void)argc;
    ensure_environment("LD_LIBRARY_PATH", in_build_folder("sim"), argv);
    int failures = 0;
    RUN(the_estimate_falls_at_once_and_rises_slowly);
    RUN(dimensions_are_kept_whole);
    RUN(keys_tell_kernels_apart);
    RUN(writers_at_once_lose_nothing);
    RUN(keys_that_meet_at_one_place_both_get_in);
    RUN(writers_killed_at_any_instant);
    RUN(a_full_table_refuses_and_keeps_what_it_has);
    RUN(in_anothers_place_nothing_is_known);
    RUN(clients_of_one_program_share_what_they_learn);
    RUN(a_program_without_a_number_goes_by_its_name);
    RUN(wrong_estimates_are_soon_corrected);
    RUN(odd_samples_do_no_harm);
    RUN(samples_make_an_estimate_and_a_price);
    RUN(profiles_seed);
    RUN(graphs_are_known_again);
    RUN(what_is_not_shared);
    RUN(threads_seed_each_kernel_once);
    RUN(a_sample_goes_with_its_context_while_it_is_asked_for);
    RUN(samples_go_with_their_context);
    RUN(samples_are_of_the_context_in_use);
    RUN(contexts_go_while_another_thread_launches);
    RUN(a_handle_given_out_again_is_another_kernel);
    RUN(a_handle_given_out_again_is_learned_anew_where_the_table_is_full);
    return failures ? 1 : 0;
}
