/*
 * mps-cost.cu: what MPS costs a program whose short kernels follow one another, and what a process beside it that is stopped does
 * (native/stop.c): the numbers in docs/measurements.md.
 *
 *   nvcc -O2 -std=c++17 -arch=native -o mps-cost native/bench/mps-cost.cu -lcuda && ./mps-cost none && ./mps-cost stopped 4
 *
 * Beside no other process (none), one that has a context and nothing to do (idle), or one with so many streams that wait for a word in host
 * memory, each with kernels behind that (stopped). Timed are 200 kernels of 1.8 us (on an H200), as one CUDA graph and launched one by one.
 * With CUDA_MPS_PIPE_DIRECTORY set it is under the MPS daemon there. Without Rigel, and uses no CUDA that Rigel hooks.
 */
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <cuda.h>
#include <cuda_runtime.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#define CHECK(call)                                                                                                                                \
    do {                                                                                                                                           \
        int error = (int)(call);                                                                                                                   \
        if (error) {                                                                                                                               \
            fprintf(stderr, "mps-cost: %s: error %d\n", #call, error);                                                                             \
            _exit(1);                                                                                                                              \
        }                                                                                                                                          \
    } while (0)

enum { KERNELS = 200, BEHIND = 50, ROUNDS = 600, WARM = 100, FLOATS = 1 << 18 };

struct Shared {
    volatile int ready, stop;
};

__global__ void work(float *p, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float v = p[i % n];
    for (int k = 0; k < 300; k++)
        v = v * 1.0001f + 0.5f;
    p[i % n] = v;
}

static void launch(float *p, cudaStream_t stream, int kernels)
{
    for (int k = 0; k < kernels; k++)
        work<<<132, 256, 0, stream>>>(p, FLOATS);
}

static double now_us()
{
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static void companion(int stopped, Shared *shared)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    float *p;
    int least, greatest;
    CUdeviceptr at;
    CHECK(cudaFree(0));
    CHECK(cudaMalloc(&p, FLOATS * sizeof *p));
    volatile unsigned *word = (volatile unsigned *)mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(cuMemHostRegister((void *)word, 4096, CU_MEMHOSTREGISTER_DEVICEMAP));
    CHECK(cuMemHostGetDevicePointer(&at, (void *)word, 0));
    *word = 1;
    CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    std::vector<cudaStream_t> streams(stopped ? stopped : 1);
    for (cudaStream_t &stream : streams) {
        CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, least));
        launch(p, stream, 1);
    }
    CHECK(cudaDeviceSynchronize());
    for (int k = 0; k < stopped; k++) {
        CHECK(cuStreamWaitValue32((CUstream)streams[k], at, 0, CU_STREAM_WAIT_VALUE_EQ));
        launch(p, streams[k], BEHIND);
    }
    usleep(200000);
    shared->ready = 1;
    while (!shared->stop)
        usleep(1000);
    *word = 0;
    CHECK(cudaDeviceSynchronize());
    _exit(0);
}

static void show(const char *what, std::vector<double> &took)
{
    std::sort(took.begin(), took.end());
    printf("%s p50 %.1f p90 %.1f us\n", what, took[took.size() / 2], took[took.size() * 9 / 10]);
}

int main(int argc, char **argv)
{
    const char *beside = argc > 1 ? argv[1] : "none";
    bool stops = !strcmp(beside, "stopped");
    int stopped = stops ? argc > 2 ? atoi(argv[2]) : 1 : 0;
    if ((strcmp(beside, "none") && strcmp(beside, "idle") && !stops) || stopped < stops || stopped > 64) {
        fprintf(stderr, "mps-cost: expected none, idle, or stopped and 1 to 64 streams\n");
        return 2;
    }
    Shared *shared = (Shared *)mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t child = 0;
    if (strcmp(beside, "none")) {
        child = fork();
        if (child == 0)
            companion(stopped, shared);
        while (!shared->ready && waitpid(child, 0, WNOHANG) == 0)
            usleep(1000);
        if (!shared->ready) /* it has said why */
            return 1;
    }
    float *p;
    int least, greatest;
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaFree(0));
    CHECK(cudaMalloc(&p, FLOATS * sizeof *p));
    CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    launch(p, stream, KERNELS);
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    std::vector<double> replayed, launched;
    for (int round = 0; round < ROUNDS; round++) {
        double begin = now_us();
        CHECK(cudaGraphLaunch(exec, stream));
        CHECK(cudaStreamSynchronize(stream));
        if (round > WARM)
            replayed.push_back(now_us() - begin);
        begin = now_us();
        launch(p, stream, KERNELS);
        CHECK(cudaStreamSynchronize(stream));
        if (round > WARM)
            launched.push_back(now_us() - begin);
        usleep(500);
    }
    show("one graph:  ", replayed);
    show("one by one: ", launched);
    shared->stop = 1;
    if (child)
        waitpid(child, 0, 0);
    return 0;
}
