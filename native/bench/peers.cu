/*
 * peers.cu: what processes get of a GPU that they share in time slices, by how long these are: how short a slice can be, and whoever has
 * it still comes forward.
 *
 *   nvcc -O2 -std=c++17 -arch=native -o peers native/bench/peers.cu && ./peers [processes, at most 4]
 *
 * The processes, without Rigel, launch kernels back to back, 16 ahead of the GPU. Large kernels have all registers and shared memory of the
 * GPU, which a switch has to save, small ones 1 block of 128 threads a multiprocessor. For each slice, first with all processes in
 * slices of that length, then with the first one so and the others in those of the driver: kernels that each has finished, of 100 that one
 * finishes alone. A process that gets 0.0 does not come forward at all.
 */
#include <csignal>
#include <cstdio>
#include <cstring>
#include <cuda_runtime.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "channels.h"

enum { MOST = 4, AHEAD = 16, DRIVER_US = 2048 };

static struct Shared {
    volatile bool stop, large; /* the kernels */
    volatile int active, ready, failed;
    volatile unsigned slice_us[MOST], set_us[MOST];
    alignas(64) volatile unsigned long long done[MOST][8]; /* kernels */
} *shared;

static int sms, shared_bytes; /* of each process's GPU: multiprocessors, and the most shared memory that a block may have */

__global__ void __launch_bounds__(1024, 1) large(int iterations, unsigned words, unsigned *blocks, volatile unsigned long long *done, unsigned *out)
{
    extern __shared__ unsigned kept[];
    unsigned x[48];
    for (int k = 0; k < 48; k++)
        x[k] = threadIdx.x * 31 + k;
    for (unsigned i = threadIdx.x; i < words; i += blockDim.x)
        kept[i] = i;
    for (int i = 0; i < iterations; i++)
        for (int k = 0; k < 48; k++)
            x[k] = x[k] * 1664525u + kept[(x[(k + 1) % 48] >> 8) % words];
    unsigned sum = 0;
    for (int k = 0; k < 48; k++)
        sum ^= x[k];
    if (sum == 12345)
        *out = sum;
    __syncthreads();
    if (threadIdx.x == 0 && atomicAdd(blocks, 1) % gridDim.x == gridDim.x - 1)
        *done = *done + 1;
}

__global__ void small(int iterations, unsigned *blocks, volatile unsigned long long *done, unsigned *out)
{
    unsigned x = threadIdx.x;
    for (int i = 0; i < iterations; i++)
        x = x * 1664525u + 1013904223u;
    if (x == 12345)
        *out = x;
    __syncthreads();
    if (threadIdx.x == 0 && atomicAdd(blocks, 1) % gridDim.x == gridDim.x - 1)
        *done = *done + 1;
}

static void launch(bool is_large, unsigned *blocks, volatile unsigned long long *done)
{
    if (is_large)
        large<<<sms, 1024, shared_bytes>>>(100, shared_bytes / 4, blocks, done, blocks + 1);
    else
        small<<<sms, 128>>>(20000, blocks, done, blocks + 1);
}

static int process(int me)
{
    unsigned *blocks;
    void *mapped = nullptr;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0);
    cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0);
    cudaHostRegister((void *)shared, sizeof *shared, cudaHostRegisterMapped);
    cudaHostGetDevicePointer(&mapped, (void *)shared, 0);
    volatile unsigned long long *done = ((Shared *)mapped)->done[me];
    cudaFuncSetAttribute(large, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    cudaMalloc(&blocks, 64);
    cudaMemset(blocks, 0, 64);
    for (int i = 0; i < 4; i++)
        launch(i & 1, blocks, done);
    cudaError_t launched_ok = cudaGetLastError(), e = cudaDeviceSynchronize();
    e = launched_ok != cudaSuccess ? launched_ok : e;
    if (e != cudaSuccess || !find_channels()) {
        fprintf(stderr, "peers: process %d cannot run, or control its channels: %s\n", me, cudaGetErrorString(e));
        __atomic_add_fetch(&shared->failed, 1, __ATOMIC_SEQ_CST);
    }
    __atomic_add_fetch(&shared->ready, 1, __ATOMIC_SEQ_CST);
    for (unsigned long long launched = shared->done[me][0]; !shared->stop;) {
        unsigned wanted = shared->slice_us[me];
        if (wanted != shared->set_us[me]) {
            if (set_slice(wanted) != 0)
                __atomic_add_fetch(&shared->failed, 1, __ATOMIC_SEQ_CST);
            shared->set_us[me] = wanted;
        }
        if (me >= shared->active || launched - shared->done[me][0] >= AHEAD) {
            usleep(20);
            continue;
        }
        launch(shared->large, blocks, done);
        launched++;
    }
    return 0;
}

/* Kernels a second of each of those that are active. */
static void measure(int active, double *rate)
{
    unsigned long long before[MOST];
    for (int i = 0; i < MOST; i++)
        while (shared->set_us[i] != shared->slice_us[i] && i < active)
            usleep(100);
    shared->active = active;
    usleep(150000);
    double begin = now_us();
    for (int i = 0; i < active; i++)
        before[i] = shared->done[i][0];
    usleep(400000);
    for (int i = 0; i < active; i++)
        rate[i] = (shared->done[i][0] - before[i]) * 1e6 / (now_us() - begin);
    shared->active = 0;
    for (int i = 0; i < MOST; i++)
        shared->slice_us[i] = DRIVER_US;
    for (unsigned long long sum = ~0ull, last; sum != (last = shared->done[0][0] + shared->done[1][0] + shared->done[2][0] + shared->done[3][0]); sum = last)
        usleep(50000); /* until what is queued has ended */
}

static void row(const char *who, unsigned slice_us, int active, bool all, double alone)
{
    double rate[MOST], sum = 0;
    for (int i = 0; i < active; i++)
        shared->slice_us[i] = all || i == 0 ? slice_us : DRIVER_US;
    measure(active, rate);
    printf("%s, slices of %4u us %s:", who, slice_us, all ? "all      " : "the first");
    for (int i = 0; i < active; i++) {
        printf(" %5.1f", rate[i] / alone * 100);
        sum += rate[i];
    }
    printf("; together %5.1f\n", sum / alone * 100);
}

int main(int argc, char **argv)
{
    setvbuf(stdout, nullptr, _IOLBF, 0);
    int processes = argc > 1 ? atoi(argv[1]) : 3, status = 0;
    if (processes < 2 || processes > MOST) {
        fprintf(stderr, "peers: expected 2 to %d processes\n", MOST);
        return 2;
    }
    shared = (Shared *)mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (int i = 0; i < MOST; i++)
        shared->slice_us[i] = DRIVER_US;
    pid_t pids[MOST];
    for (int i = 0; i < processes; i++)
        if ((pids[i] = fork()) == 0)
            _exit(process(i));
    while (shared->ready < processes) {
        if (waitpid(-1, &status, WNOHANG) > 0) {
            fprintf(stderr, "peers: a process ended before it had begun\n");
            return 1; /* and so do the others */
        }
        usleep(1000);
    }
    for (int is_large = 1; is_large >= 0 && !shared->failed; is_large--) {
        double alone;
        shared->large = is_large;
        measure(1, &alone);
        printf("%s kernels: %.0f a second alone, %.0f us each\n", is_large ? "large" : "small", alone, 1e6 / alone);
        for (int active = 2; active <= processes; active++)
            for (unsigned slice_us : {50u, 75u, 100u, 150u, 200u, 300u, 500u, 1000u, (unsigned)DRIVER_US})
                for (int all = 1; all >= 0; all--) {
                    char who[32];
                    snprintf(who, sizeof who, "%d processes", active);
                    if (all || slice_us < DRIVER_US)
                        row(who, slice_us, active, all, alone);
                }
    }
    int failed = shared->failed;
    shared->stop = true;
    for (int i = 0; i < processes; i++)
        waitpid(pids[i], &status, 0);
    return failed ? 1 : 0;
}
