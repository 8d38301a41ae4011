/*
 * switch.cu: how long a request waits for the GPU to come over from another process, whose streams have stopped (native/stop.c) or which has
 * nothing to do, and what could hide that: the numbers in docs/experiments.md.
 *
 *   nvcc -O2 -std=c++17 -arch=native -o switch native/bench/switch.cu
 *   ./switch [requests of each kind [where the GPU interrupts kernels of both: 0 between them, 1 between blocks, 2 anywhere (libcuda's)]]
 *
 * Two processes, without Rigel. One has kernels back to back, a stop in front of each, or one kernel that was over a millisecond before,
 * with nothing behind it or with a stop and another kernel. The other one every 5 to 8 ms has a request like one of ResNet-50's: its input
 * (none, or 2.4 MB from pinned memory or the program's own) and one CUDA graph of 60 kernels of 5 us (on an H200). As it begins it stops the
 * first process, and then, in the second quarter of the requests, has the GPU set 4 bytes, on another stream, so that it comes over while the input is copied; in
 * the third it has it run a kernel there that ends once the graph is launched, so that it does not go back either; and in the last that kernel ends
 * once the input has come as well, and has another one behind it, as the GPU leaves a process all of whose work it has fetched (native/stay.c).
 *
 * The channels are those of native/bench/channels.h. Uses no CUDA that Rigel hooks.
 */
#include <algorithm>
#include <cuda.h>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include "channels.h"
#include "work.h"

enum { KERNELS = 60, INPUT = 4 * 3 * 224 * 224 * 4 };

enum { OVER = 1, STOPPED };

static struct Shared {
    volatile int ready, end, paused, length_us, slice_us, one;
    volatile long kernels;
    alignas(4096) volatile uint32_t word; /* the best-effort process's streams stop */
    char rest[4092];
    alignas(4096) volatile uint32_t scratch[2];
    char rest2[4092];
} *shared;

static int best_effort(int mode)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    unsigned *out;
    CUdeviceptr word = mapped(&shared->word);
    CHECK(cudaMalloc(&out, 64));
    CHECK(cudaDeviceSynchronize());
    if (!find_channels() || set_mode((uint32_t)mode) != 0)
        return fprintf(stderr, "switch: this process cannot control its channels here\n"), 1;
    cudaEvent_t events[8];
    for (cudaEvent_t &e : events)
        CHECK(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
    int slice_us = 0;
    for (long k = 0; !shared->end;) {
        if (slice_us != shared->slice_us && set_slice((uint64_t)(slice_us = shared->slice_us)) != 0)
            return fprintf(stderr, "switch: no slice of %d us\n", slice_us), 1;
        shared->ready = 1;
        if (shared->one) { /* one kernel, and in front of the next a stop, or nothing */
            work<<<SMS * 8, 256>>>((long long)shared->length_us * ITERATIONS_PER_US, out);
            if (shared->one == OVER) {
                CHECK(cudaDeviceSynchronize());
            } else {
                shared->word = 1;
                stop_at(word);
                work<<<SMS * 8, 256>>>((long long)shared->length_us * ITERATIONS_PER_US, out);
            }
            shared->one = 0;
        }
        if (shared->paused) {
            if (shared->word) {
                usleep(20);
                continue;
            }
            CHECK(cudaDeviceSynchronize());
            usleep(100);
            continue;
        }
        if (k >= 8)
            CHECK(cudaEventSynchronize(events[k % 8]));
        stop_at(word);
        work<<<SMS * 8, 256>>>((long long)shared->length_us * ITERATIONS_PER_US, out);
        CHECK(cudaEventRecord(events[k % 8]));
        shared->kernels = ++k;
    }
    CHECK(cudaDeviceSynchronize());
    return 0;
}

/* The first process has said why it ended. */
static void alive(pid_t child)
{
    if (waitpid(child, nullptr, WNOHANG))
        _exit(1);
    usleep(20);
}

/* Keeps the GPU with its process until it is told, or for a while. */
__global__ void hold(const volatile uint32_t *until, uint32_t value, long long ns)
{
    long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        __nanosleep(500);
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (*until != value && now - begin < ns);
}

/* The same until the second word is set, too. */
__global__ void keep(const volatile uint32_t *until, uint32_t value, long long ns)
{
    long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    while ((until[0] != value || until[1] != value) && now - begin < ns);
}

__global__ void nothing()
{
}

enum { NO_COPY, PINNED, OWN, INPUTS };
static const char *const inputs[] = {"no copy", "pinned memory", "own memory"};
enum { ALONE, MEMSET, HOLD, KEEP, WAYS };
static const char *const ways[] = {"by itself      ", "behind a memset", "behind a hold  ", "kept           "};

int main(int argc, char **argv)
{
    setvbuf(stdout, nullptr, _IOLBF, 0);
    int n = argc > 1 ? atoi(argv[1]) : 200, mode = argc > 2 ? atoi(argv[2]) : 2;
    if (n < 10 || mode < 0 || mode > 2)
        return fprintf(stderr, "switch: expected 10 requests or more, and a mode of 0, 1 or 2\n"), 2;
    shared = (Shared *)mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    shared->paused = 1;
    shared->length_us = 60;
    shared->slice_us = 50;
    pid_t child = fork();
    if (child == 0)
        _exit(best_effort(mode));
    unsigned *out;
    void *pinned, *input, *own = malloc(INPUT);
    cudaStream_t stream, side;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    memset(own, 1, INPUT);
    CHECK(cudaMalloc(&out, 64));
    CHECK(cudaMalloc(&input, INPUT));
    CHECK(cudaMallocHost(&pinned, INPUT));
    void *scratch = (void *)mapped(&shared->scratch[0]);
    CUresult (*write_value)(CUstream, CUdeviceptr, cuuint32_t, unsigned);
    cudaDriverEntryPointQueryResult found;
    CHECK(cudaGetDriverEntryPointByVersion("cuStreamWriteValue32", (void **)&write_value, 12000, cudaEnableDefault, &found));
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithPriority(&side, cudaStreamNonBlocking, -5));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < KERNELS; i++)
        work<<<SMS, 256, 0, stream>>>(20 * ITERATIONS_PER_US, out); /* a block on each: a fourth of the 20 us */
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaMemsetAsync(scratch, 0, 4, side));
    hold<<<1, 1, 0, side>>>((uint32_t *)scratch, 0, 1000000);
    keep<<<1, 1, 0, side>>>((uint32_t *)scratch, 0, 1000000);
    nothing<<<1, 1, 0, side>>>();
    uint32_t held = 0;
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaDeviceSynchronize());
    if (!find_channels() || set_slice(10000) != 0 || set_mode((uint32_t)mode) != 0)
        return fprintf(stderr, "switch: this process cannot control its channels here\n"), 1;
    while (!shared->ready)
        alive(child);
    static const struct {
        int length_us, slice_us, one;
    } beside[] = {{0, 50, 0}, {20, 50, OVER}, {20, 50, STOPPED}, {60, 50, 0}, {60, 300, 0}, {200, 50, 0}, {2000, 50, 0}};
    for (int in = 0; in < INPUTS; in++)
        for (auto b : beside) {
            shared->paused = !b.length_us || b.one;
            shared->length_us = b.length_us;
            shared->slice_us = b.slice_us;
            usleep(50000);
            for (int ahead = 0; ahead < WAYS; ahead++) {
                std::vector<double> took;
                double began = now_us();
                long before = shared->kernels;
                for (int r = 0; r < n; r++) {
                    usleep(5000 + rand() % 3000);
                    if (b.one) {
                        for (shared->one = b.one; shared->one;)
                            alive(child);
                        usleep(1000);
                    }
                    double t = now_us();
                    shared->word = 1;
                    if (ahead == MEMSET)
                        CHECK(cudaMemsetAsync(scratch, 0, 4, side));
                    if (ahead == HOLD)
                        hold<<<1, 1, 0, side>>>((uint32_t *)scratch, ++held, 1000000);
                    if (ahead == KEEP) {
                        keep<<<1, 1, 0, side>>>((uint32_t *)scratch, ++held, 1000000);
                        nothing<<<1, 1, 0, side>>>();
                    }
                    if (in)
                        CHECK(cudaMemcpyAsync(input, in == OWN ? own : pinned, INPUT, cudaMemcpyHostToDevice, stream));
                    if (ahead == KEEP)
                        CHECK(write_value(stream, (CUdeviceptr)scratch + 4, held, 0));
                    CHECK(cudaGraphLaunch(exec, stream));
                    shared->scratch[0] = held;
                    CHECK(cudaStreamSynchronize(stream));
                    took.push_back(now_us() - t);
                    CHECK(cudaStreamSynchronize(side));
                    shared->word = 0;
                }
                std::sort(took.begin(), took.end());
                printf("%-13s %s: p50 %.0f p90 %.0f p99 %.0f us; beside ", inputs[in], ways[ahead],
                       took[n / 2], took[n * 9 / 10], took[n * 99 / 100]);
                if (!b.length_us)
                    printf("nothing\n");
                else if (b.one)
                    printf("one that %s\n", b.one == OVER ? "is through" : "has stopped");
                else
                    printf("kernels of %d us in slices of %d, %.0f a second\n", b.length_us, b.slice_us,
                           (shared->kernels - before) * 1e6 / (now_us() - began));
            }
        }
    shared->end = 1;
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
