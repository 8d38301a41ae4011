/*
 * handover.cu: when the GPU leaves a process whose channels are disabled (native/channel.c), when the other one begins, and for how long it does
 * nothing in between; and the same of what else the driver offers. The numbers in docs/experiments.md.
 *
 *   nvcc -O2 -std=c++17 -arch=native -I native/bench -o handover native/bench/handover.cu -lcuda && ./handover [trials of each kind]
 *
 * Two processes, without Rigel, that count in memory of the host while their kernels run. One has kernels of some half a millisecond back to back, which
 * fill the GPU, in slices of 16 ms. The other one launches a kernel 0.3 ms before the first is taken off the GPU. Once that is over the
 * first is let back. Medians, in microseconds from the beginning of each call.
 */
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cuda_runtime.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <thread>

#include "channels.h"
#include "work.h"

enum { SLICE_US = 16000, LIMIT_US = 30000 };

static struct Shared {
    std::atomic<uint64_t> asked, launched, ended; /* kernels of the second process */
    std::atomic<double> first;                    /* when its last one was first seen to count */
    std::atomic<bool> ready, quit;
} *shared;

__global__ void count(long long iterations, volatile unsigned *counter, unsigned from)
{
    __shared__ unsigned scratch[8192];
    unsigned x = threadIdx.x + 1;
    for (long long i = 0; i < iterations; i++) {
        for (int k = 0; k < 8; k++) { /* xorshift (Marsaglia 2003): steps of a linear congruence would be made one by the compiler */
            x ^= x << 13;
            x ^= x >> 17;
            x ^= x << 5;
        }
        scratch[x >> 8 & 8191] = x;
        if (i % 8 == 0 && blockIdx.x == 0 && threadIdx.x == 0) /* a store to the host's memory is slow: this block is to take no longer than others */
            *counter = from + (unsigned)i + 1;
    }
    if (x == 12345)
        counter[8] = scratch[3];
}

struct Counter {
    volatile unsigned *host, *device;
    Counter()
    {
        CHECK(cudaHostAlloc((void **)&host, 64, cudaHostAllocMapped));
        CHECK(cudaHostGetDevicePointer((void **)&device, (void *)host, 0));
        count<<<1, 32>>>(10, device, 0);
        CHECK(cudaDeviceSynchronize());
    }
};

static void second()
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    Counter counter;
    shared->ready = true;
    for (uint64_t n = 0; !shared->quit;) {
        if (shared->asked == n)
            continue;
        n = shared->asked;
        *counter.host = 0;
        count<<<SMS, 256>>>(4000, counter.device, 0);
        shared->launched = n;
        while (!*counter.host && !shared->quit)
            ;
        shared->first = now_us();
        CHECK(cudaDeviceSynchronize());
        shared->ended = n;
    }
    _exit(0);
}

static int disable_one_by_one()
{
    std::vector<Object> all = channels;
    int result = 0;
    for (const Object &channel : all) {
        channels = {channel};
        result |= suspend(true);
    }
    channels = all;
    return result;
}

/* NVA06C_CTRL_CMD_PREEMPT: the group makes way once, and is as runnable as before. */
static int preempt(bool wait)
{
    struct {
        uint8_t wait, manual_timeout;
        uint32_t timeout_us;
    } p = {wait, 0, 0};
    return control(group, 0xa06c0105, &p, sizeof p);
}

static const struct Way {
    const char *name;
    int (*off)();
    int (*on)();
    bool stays; /* off the GPU until it is let back, so nothing has to be launched meanwhile */
} WAYS[] = {
    {"disabled, all in one call", [] { return suspend(true); }, [] { return suspend(false); }, true},
    {"disabled, one by one", disable_one_by_one, [] { return suspend(false); }, true},
    {"not scheduled, and preempted", [] { return suspend(true, true) | preempt(false); }, [] { return suspend(false, true); }, true},
    {"preempted, waited for", [] { return preempt(true); }, [] { return 0; }, false},
    {"preempted", [] { return preempt(false); }, [] { return 0; }, false},
    {"slice of 50 us", [] { return set_slice(50); }, [] { return set_slice(SLICE_US); }, false},
};

static double median(std::vector<double> &list)
{
    std::sort(list.begin(), list.end());
    return list.empty() ? -1 : list[list.size() / 2];
}

int main(int argc, char **argv)
{
    int trials = argc > 1 ? atoi(argv[1]) : 100;
    shared = (Shared *)mmap(nullptr, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t child = fork();
    if (child == 0)
        second();
    Counter counter;
    if (!find_channels()) {
        fprintf(stderr, "handover: this process cannot control its channels here\n");
        shared->quit = true;
        return 1;
    }
    while (!shared->ready)
        if (waitpid(child, nullptr, WNOHANG) == child)
            return 1;
    CHECK(set_slice(SLICE_US));
    std::atomic<double> last{0}; /* when it was last seen to count */
    std::atomic<bool> over{false};
    std::thread watch([&] {
        for (unsigned seen = 0; !over;)
            if (unsigned now = *counter.host; now != seen) {
                seen = now;
                last = now_us();
            }
    });
    cudaEvent_t events[4];
    for (cudaEvent_t &event : events)
        CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    unsigned from = 0, at = 0;
    auto feed = [&] {
        if (waitpid(child, nullptr, WNOHANG) == child) /* it has said why */
            _exit(1);
        for (cudaError_t done; (done = cudaEventQuery(events[at % 4])) != cudaErrorNotReady; at++, from += 100000) {
            CHECK(done);
            count<<<SMS * 4, 256, 0, stream>>>(2000, counter.device, from);
            CHECK(cudaEventRecord(events[at % 4], stream));
        }
    };
    auto feed_for = [&](double us) {
        for (double until = now_us() + us; now_us() < until;)
            feed();
    };
    printf("%zu channels; us\n%-30s %8s %8s %8s %8s %8s %8s\n", channels.size(), "", "call", "leaves", "begins", "idle", "back", "begins");
    for (const Way &way : WAYS) {
        std::vector<double> call, leaves, begins, idle, back, again;
        int result = 0;
        for (int t = 0; t < trials; t++) {
            feed_for(3000 + t % 7 * 531);
            shared->asked++;
            while (shared->launched != shared->asked)
                feed();
            feed_for(300);
            double off = now_us();
            result |= way.off();
            double done = now_us();
            while (shared->ended != shared->asked && now_us() < done + LIMIT_US)
                if (!way.stays)
                    feed();
            double left = last, first = shared->first, on = now_us();
            bool ran = shared->ended == shared->asked;
            result |= way.on();
            double enabled = now_us();
            while (last <= on && now_us() < enabled + LIMIT_US)
                feed();
            double counts = last;
            while (shared->ended != shared->asked)
                feed();
            if (!ran || first < off || left > first + 300 || counts <= on) /* its turn came before the call, or the first was back already, or never */
                continue;
            call.push_back(done - off);
            leaves.push_back(left - off);
            begins.push_back(first - off);
            idle.push_back(first - left);
            back.push_back(enabled - on);
            again.push_back(counts - on);
        }
        printf("%-30s %8.0f %8.0f %8.0f %8.0f %8.0f %8.0f", way.name, median(call), median(leaves), median(begins), median(idle), median(back), median(again));
        printf("  (%zu of %d%s)\n", call.size(), trials, result ? "; the driver refused" : "");
        fflush(stdout);
    }
    over = true;
    watch.join();
    shared->quit = true;
    waitpid(child, nullptr, 0);
    return 0;
}
