/*
 * follow.cu: what taking a best-effort process's channels off the GPU (native/channel.c) does to a request that has it, and to another one that begins soon
 * after, where its streams stop for both anyway (native/stop.c); and what keeps the GPU with the process of the two in between (native/stay.c). The
 * numbers in docs/experiments.md.
 *
 *   nvcc -O2 -std=c++17 -arch=native -I native/bench -o follow native/bench/follow.cu -lcuda && ./follow [pairs of requests of each kind]
 *
 * Two processes, without Rigel. One has kernels back to back, in slices of 50 us, a stop in front of each. The other one has two requests every 6 to 9
 * ms, each a CUDA graph of some 1 ms of kernels that leave most of the GPU idle, the second so long after it saw the end of the first. Shown for no
 * best-effort work; for streams that go on between the two, and that stop for both; and for channels that are disabled besides, as the first request
 * begins or 0.3 ms later, until both are over, or until the first is (that call goes on into the second); and not scheduled in place of disabled. Then
 * for streams that go on between the two while a kernel of one thread keeps the GPU, from the end of the first until the second is launched, 200 us at
 * most: by itself, and with others behind it that do nothing, the same with no best-effort work; and from the beginning of the first.
 */
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cuda.h>
#include <cuda_runtime.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <thread>

#include "channels.h"
#include "work.h"

enum { KERNELS = 200 };

enum way { ALONE, GOES_ON, STOPS, DISABLED, DISABLED_LATER, ENABLED_BETWEEN, UNSCHEDULED_LATER, KEPT, KEPT_1, KEPT_8, KEPT_ALONE, FROM_START, WAYS };
static const char *const ways[] = {"alone",          "goes on between",            "stops for both",       "disabled at once",
                                    "disabled later", "disabled later, on between", "not scheduled, later", "kept",
                                    "kept, one behind", "kept, 8 behind", "kept, one behind, alone", "kept from the start, 8"};
static const int behind[WAYS] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 8, 1, 8}; /* so many more kernels */

/* Keeps the GPU with this process for so long, or until the word has changed. */
__global__ void keep(const volatile uint32_t *word, uint32_t is, unsigned long long ns)
{
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    while (*word == is && now - begin < ns);
}

__global__ void nothing()
{
}

static struct Shared {
    std::atomic<int> ready, quit, length_us, paused;
    std::atomic<int> off, is_off, late_us; /* what its channels are to be, and are; how much later */
    std::atomic<int> only_scheduling;
    std::atomic<long> kernels;
    alignas(4096) volatile uint32_t word; /* its streams stop */
    char rest[4092];
    alignas(4096) volatile uint32_t kept; /* changes as the second request is launched */
    char rest2[4092];
} *shared;

static int best_effort()
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    unsigned *out;
    CUdeviceptr word = mapped(&shared->word);
    CHECK(cudaMalloc(&out, 64));
    CHECK(cudaDeviceSynchronize());
    if (!find_channels() || set_slice(50) != 0)
        return fprintf(stderr, "follow: this process cannot control its channels here\n"), 1;
    std::thread agent([] {
        for (int off = 0; !shared->quit;)
            if (shared->off != off) {
                off = !off;
                if (off && shared->late_us)
                    usleep(shared->late_us);
                CHECK(suspend(off, off && shared->only_scheduling));
                shared->is_off = off;
            }
    });
    cudaEvent_t events[8];
    for (cudaEvent_t &e : events)
        CHECK(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
    shared->ready = 1;
    for (long k = 0; !shared->quit;) {
        if (shared->paused) {
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
    agent.join();
    CHECK(cudaDeviceSynchronize());
    return 0;
}

static void keep_it(int way, cudaStream_t stream, const volatile uint32_t *kept, unsigned long long us)
{
    keep<<<1, 1, 0, stream>>>(kept, shared->kept, us * 1000);
    for (int i = 0; i < behind[way]; i++)
        nothing<<<1, 1, 0, stream>>>();
}

static void until(double at)
{
    while (now_us() < at)
        ;
}

int main(int argc, char **argv)
{
    setvbuf(stdout, nullptr, _IOLBF, 0);
    int n = argc > 1 ? atoi(argv[1]) : 60;
    if (n < 10)
        return fprintf(stderr, "follow: expected 10 pairs or more\n"), 2;
    shared = (Shared *)mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    shared->paused = 1;
    shared->length_us = 60;
    pid_t child = fork();
    if (child == 0)
        _exit(best_effort());
    unsigned *out;
    cudaStream_t stream, keeper;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t end;
    CHECK(cudaMalloc(&out, 64));
    CHECK(cudaEventCreateWithFlags(&end, cudaEventDisableTiming));
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&keeper, cudaStreamNonBlocking));
    const volatile uint32_t *kept = (const volatile uint32_t *)mapped(&shared->kept);
    keep_it(KEPT_1, keeper, kept, 0);
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < KERNELS; i++)
        work<<<SMS, 256, 0, stream>>>(20 * ITERATIONS_PER_US, out); /* a block on each: a fourth of the 20 us */
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaDeviceSynchronize());
    if (!find_channels() || set_slice(10000) != 0)
        return fprintf(stderr, "follow: this process cannot control its channels here\n"), 1;
    while (!shared->ready)
        if (waitpid(child, nullptr, WNOHANG))
            return 1;
    for (int length : {60, 300, 2000})
        for (int gap : {30, 120}) {
            printf("kernels of %d us, %d us between two requests\n%-28s first: p50    p90  second: p50    p90   kernels a second\n", length, gap, "");
            for (int way = 0; way < WAYS; way++) {
                std::vector<double> first, second;
                shared->paused = way == ALONE || way == KEPT_ALONE;
                shared->length_us = length;
                shared->late_us = way == DISABLED ? 0 : 300;
                shared->only_scheduling = way == UNSCHEDULED_LATER;
                usleep(50000);
                long before = shared->kernels;
                double began = now_us();
                for (int r = 0; r < n; r++) {
                    bool disables = way >= DISABLED && way < KEPT;
                    usleep(6000 + rand() % 3000);
                    double t = now_us(), t1, t2, t3;
                    shared->word = 1;
                    if (disables)
                        shared->off = 1;
                    if (way == FROM_START)
                        keep_it(way, keeper, kept, 2000);
                    CHECK(cudaGraphLaunch(exec, stream));
                    CHECK(cudaEventRecord(end, stream));
                    if (way >= KEPT && way < FROM_START) {
                        CHECK(cudaStreamWaitEvent(keeper, end, 0));
                        keep_it(way, keeper, kept, 200);
                    }
                    CHECK(cudaEventSynchronize(end));
                    t1 = now_us();
                    if (way == GOES_ON || way >= KEPT)
                        shared->word = 0;
                    if (way == ENABLED_BETWEEN)
                        shared->off = 0;
                    until(t1 + gap);
                    t2 = now_us();
                    shared->word = 1;
                    CHECK(cudaGraphLaunch(exec, stream));
                    shared->kept = shared->kept + 1;
                    CHECK(cudaEventRecord(end, stream));
                    CHECK(cudaEventSynchronize(end));
                    t3 = now_us();
                    shared->off = 0;
                    shared->word = 0;
                    first.push_back(t1 - t);
                    second.push_back(t3 - t2);
                    while (shared->is_off)
                        if (waitpid(child, nullptr, WNOHANG))
                            return 1;
                }
                std::sort(first.begin(), first.end());
                std::sort(second.begin(), second.end());
                printf("%-28s %10.0f %6.0f  %10.0f %6.0f   %10.0f\n", ways[way], first[n / 2], first[n * 9 / 10], second[n / 2], second[n * 9 / 10],
                       (shared->kernels - before) * 1e6 / (now_us() - began));
            }
        }
    shared->quit = 1;
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
