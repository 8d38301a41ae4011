/*
 * preempt.cu: what a process can do to leave the GPU to another one, and what it costs: the numbers in native/channel.c and native/stop.c.
 *
 *   nvcc -O2 -std=c++17 -arch=native -o preempt native/bench/preempt.cu && ./preempt [slice in us of the best-effort process
 *       [its compute preemption mode: 0 between kernels, 1 between blocks, 2 anywhere (libcuda's), -1: left alone [blocks in a row in a long
 *       kernel [how long that is, in us [the shared memory of each of its blocks, in KiB: two of them on each multiprocessor, in place of
 *       eight without any]]]]]
 *
 * Two processes, without Rigel. One fills the GPU with kernels of 2400 us (on an H200) back to back; the other
 * has a request of 20 kernels every 10 to 15 ms, of 5 or 50 us, at once or with 50 us of host time between them. Shown for the slices
 * alone; for suspension while a request goes on, in the form that waits until the channels are off; for suspension until all of the
 * request is launched; for being preempted once, and not kept off; and with a stop (native/stop.c) in front of each of the long
 * kernels, which stops there while a request goes on. Last, a stress: random suspensions of a process that launches on four streams and
 * waits for them. With CUDA_MPS_PIPE_DIRECTORY set, under the MPS daemon there, slices are what MPS does, and of the rest there are
 * stops alone.
 *
 * The interface is that of native/channel.c, which says where it comes from; of the same sources are two that Rigel does not use:
 * ctrla06c.h (NVA06C_CTRL_CMD_PREEMPT) and ctrl2080gr.h (NV2080_CTRL_CMD_GR_SET_CTXSW_PREEMPTION_MODE). Uses no CUDA that Rigel hooks.
 */
#include <algorithm>
#include <cuda.h>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include "channels.h"
#include "work.h"

/* ---- this process's channels ---- */

/* Off the GPU for once: it is next when nobody else has work, or others' slices are over. */
static int preempt()
{
    struct {
        uint8_t wait, manual_timeout;
        uint32_t timeout_us;
    } p = {0, 0, 0};
    return control(group, 0xa06c0105, &p, sizeof p);
}

/* ---- the two processes ---- */

enum { SLICES, SUSPENDED, UNTIL_LAUNCHED, PREEMPTED, STOPS, WAYS };
static const char *const ways[] = {"slices", "suspended", "until launched", "preempted once", "stops"};

static struct Shared {
    volatile int busy, ready, stop, way;
    volatile long kernels, calls[WAYS];
    volatile double spent_us[WAYS];
    alignas(4096) volatile uint32_t word; /* the best-effort process's streams stop */
    char rest[4092];
} *shared;
static bool mps;

enum { LONG = 400000, LONG_US = 2400, SHORT = LONG / 400, MIDDLE = LONG / 40 };

static void *stand_aside(void *)
{
    int off = 0;
    while (!shared->stop) {
        int wanted = shared->busy && shared->way != STOPS ? (int)shared->way : (int)SLICES;
        if (wanted == off)
            continue;
        double before = now_us();
        bool calls = wanted || off != PREEMPTED;
        if (calls && (wanted == PREEMPTED ? preempt() : suspend(wanted)) != 0)
            shared->stop = 1;
        shared->spent_us[wanted] += calls ? now_us() - before : 0;
        shared->calls[wanted] += calls;
        off = wanted;
    }
    if (off)
        suspend(false);
    return nullptr;
}

static void *toggle(void *stop)
{
    unsigned seed = 1;
    while (!*(volatile int *)stop) {
        usleep(rand_r(&seed) % 4000 + 200);
        suspend(true);
        usleep(rand_r(&seed) % 3000 + 100);
        suspend(false);
        shared->calls[0]++;
    }
    return nullptr;
}

static void stress(unsigned *out)
{
    static volatile int stop;
    pthread_t thread;
    cudaStream_t streams[4];
    std::vector<double> took;
    unsigned seed = 7;
    for (cudaStream_t &s : streams)
        cudaStreamCreate(&s);
    shared->calls[0] = 0;
    pthread_create(&thread, nullptr, toggle, (void *)&stop);
    for (double begin = now_us(), t; (t = now_us()) - begin < 8e6;) {
        int n = rand_r(&seed) % 4;
        for (int i = 0; i <= n; i++)
            work<<<SMS * 2, 256, 0, streams[(i + n) % 4]>>>(5000, out);
        for (cudaStream_t s : streams)
            cudaStreamSynchronize(s);
        took.push_back(now_us() - t);
    }
    stop = 1;
    pthread_join(thread, nullptr);
    std::sort(took.begin(), took.end());
    printf("stress: %ld suspensions, %zu rounds, p50 %.0f p99 %.0f max %.0f us\n", shared->calls[0], took.size(),
           took[took.size() / 2], took[took.size() * 99 / 100], took.back());
}

static CUresult (*wait_value)(CUstream, CUdeviceptr, cuuint32_t, unsigned);
static CUdeviceptr map_word()
{
    void *word = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuStreamWaitValue32", (void **)&wait_value, 12000, cudaEnableDefault, &found);
    if (!wait_value || cudaHostRegister((void *)&shared->word, 4096, cudaHostRegisterMapped) != cudaSuccess ||
        cudaHostGetDevicePointer(&word, (void *)&shared->word, 0) != cudaSuccess)
        return 0;
    return (CUdeviceptr)word;
}

static int best_effort(uint64_t slice_us, int mode, int row, int length_us, int shared_kib)
{
    unsigned *out;
    /* A quarter of the threads takes a quarter of the time. */
    int at_once = shared_kib ? SMS * 2 : SMS * 8, length = (int)(LONG * (int64_t)length_us / LONG_US / row) * (shared_kib ? 4 : 1);
    size_t bytes = (size_t)shared_kib * 1024;
    CUdeviceptr word = map_word();
    if (cudaFuncSetAttribute(work, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes) != cudaSuccess)
        fprintf(stderr, "preempt: no block can have %d KiB of shared memory here\n", shared_kib);
    cudaMalloc(&out, 64);
    work<<<SMS * 8, 256>>>(SHORT, out);
    cudaDeviceSynchronize();
    if (!word || (!mps && (!find_channels() || set_slice(slice_us) != 0 || (mode >= 0 && set_mode((uint32_t)mode) != 0)))) {
        fprintf(stderr, "preempt: this process cannot control its channels here\n");
        shared->stop = shared->ready = 1;
        return 1;
    }
    for (int stops = 0; stops < 2; stops++) {
        enum { KERNELS = 400 };
        double begin = now_us(), launched;
        for (int k = 0; k < KERNELS; k++) {
            if (stops)
                wait_value(nullptr, word, 0, CU_STREAM_WAIT_VALUE_EQ);
            work<<<at_once * row, 256, bytes>>>(length, out);
        }
        launched = now_us() - begin;
        cudaDeviceSynchronize();
        printf("%d kernels alone, %s: launched in %.2f us each, took %.2f us each\n", KERNELS, stops ? "a stop in front of each" : "no stops",
               launched / KERNELS, (now_us() - begin) / KERNELS);
    }
    pthread_t thread;
    if (!mps)
        pthread_create(&thread, nullptr, stand_aside, nullptr);
    cudaEvent_t events[8];
    for (cudaEvent_t &e : events)
        cudaEventCreateWithFlags(&e, cudaEventDisableTiming);
    shared->ready = 1;
    for (long k = 0; !shared->stop; shared->kernels = ++k) {
        if (k >= 8)
            cudaEventSynchronize(events[k % 8]);
        if (shared->way == STOPS)
            wait_value(nullptr, word, 0, CU_STREAM_WAIT_VALUE_EQ);
        work<<<at_once * row, 256, bytes>>>(length, out);
        cudaEventRecord(events[k % 8]);
    }
    cudaDeviceSynchronize();
    if (mps)
        return 0;
    pthread_join(thread, nullptr);
    stress(out);
    return 0;
}

static void requests(const char *name, bool host_time, int length, unsigned *out, cudaStream_t stream)
{
    std::vector<double> took;
    long before = shared->kernels;
    double begin = now_us();
    for (int r = 0; r < 150; r++) {
        usleep(10000 + rand() % 5000);
        double t = now_us();
        shared->busy = 1;
        shared->word = shared->way == STOPS;
        for (int i = 0; i < 20; i++) {
            work<<<SMS, 256, 0, stream>>>(length, out);
            for (double g = now_us(); host_time && now_us() - g < 50;)
                continue;
        }
        if (shared->way == UNTIL_LAUNCHED)
            shared->busy = 0;
        cudaStreamSynchronize(stream);
        took.push_back(now_us() - t);
        shared->busy = 0;
        shared->word = 0;
    }
    std::sort(took.begin(), took.end());
    printf("%-14s %s of %2d us: p50 %.0f p99 %.0f max %.0f us; beside it %.0f kernels/s\n", name,
           host_time ? "50 us between" : "at once      ", length == SHORT ? 5 : 50, took[75], took[148], took.back(),
           (shared->kernels - before) * 1e6 / (now_us() - begin));
}

static void all_requests(const char *name, unsigned *out, cudaStream_t stream)
{
    requests(name, false, SHORT, out, stream);
    requests(name, false, MIDDLE, out, stream);
    requests(name, true, SHORT, out, stream);
}

int main(int argc, char **argv)
{
    setvbuf(stdout, nullptr, _IOLBF, 0);
    shared = (Shared *)mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    uint64_t slice_us = argc > 1 ? strtoull(argv[1], nullptr, 10) : 50;
    int mode = argc > 2 ? atoi(argv[2]) : -1, row = argc > 3 ? atoi(argv[3]) : 1, length_us = argc > 4 ? atoi(argv[4]) : LONG_US;
    int shared_kib = argc > 5 ? atoi(argv[5]) : 0;
    mps = getenv("CUDA_MPS_PIPE_DIRECTORY") != nullptr;
    if (row < 1 || row > LONG || mode > 2 || length_us < 1 || length_us > 10000 || shared_kib < 0 || shared_kib > 113) {
        fprintf(stderr, "preempt: expected a mode of at most 2, 1 to %d blocks in a row, 1 to 10000 us, and 0 to 113 KiB\n", LONG);
        return 2;
    }
    pid_t child = fork();
    if (child == 0)
        _exit(best_effort(slice_us, mode, row, length_us, shared_kib));
    while (!shared->ready)
        usleep(1000);
    unsigned *out;
    cudaStream_t stream;
    cudaMalloc(&out, 64);
    cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, -5); /* which only counts under MPS */
    for (int i = 0; i < 20; i++)
        work<<<SMS, 256, 0, stream>>>(SHORT, out);
    cudaStreamSynchronize(stream);
    if (!mps && !shared->stop && find_channels())
        set_slice(10000);
    for (int way = 0; way < WAYS && !shared->stop; way++) {
        if (mps && way != SLICES && way != STOPS)
            continue;
        shared->way = way;
        usleep(100000); /* of launches made the other way none is left */
        all_requests(ways[way], out, stream);
    }
    for (int way = SUSPENDED; way < WAYS; way++)
        if (shared->calls[way])
            printf("%s: %.0f us\n", ways[way], shared->spent_us[way] / shared->calls[way]);
    if (shared->calls[0])
        printf("back again: %.0f us\n", shared->spent_us[0] / shared->calls[0]);
    shared->stop = 1;
    int status = 0;
    waitpid(child, &status, 0);
    all_requests("alone", out, stream);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
