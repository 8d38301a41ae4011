/*
 * preempt.cu: what a process can do about its own channels on the GPU, and what it costs: the numbers in native/channel.c.
 *
 *   nvcc -O2 -std=c++17 -arch=native -o preempt native/bench/preempt.cu && ./preempt [slice in us of the best-effort process]
 *
 * Two processes, without Rigel and without MPS. One fills the GPU with kernels of some 2.4 ms (on an H200) back to back; the other
 * has a request of 20 short kernels every 10 to 15 ms, at once or with 50 us of host time between them. Shown for the slices alone, and
 * for suspension while a request goes on, in the form that waits until the channels are off. Last, a stress: random suspensions
 * of a process that launches on four streams and waits for them.
 *
 * The interface is that of native/channel.c, which says where it comes from. Uses no CUDA that Rigel hooks.
 */
#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <vector>

static double now_us()
{
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

/* ---- this process's channels ---- */

struct Object {
    uint32_t client, handle, parent, cls;
    int fd;
};
struct Control {
    uint32_t client, object, command, flags;
    uint64_t params;
    uint32_t size, status;
};
struct Disable {
    uint8_t disable;
    uint32_t count;
    uint8_t only_scheduling, rewind;
    uint64_t event;
    uint32_t client[64], channel[64];
};
static std::vector<Object> *objects; /* never freed: libcuda's ioctls go on until the end */
static std::vector<Object> channels;
static Object subdevice, group;

extern "C" int ioctl(int fd, unsigned long request, ...) noexcept
{
    va_list arguments;
    va_start(arguments, request);
    uint32_t *a = va_arg(arguments, uint32_t *);
    va_end(arguments);
    int result = (int)syscall(SYS_ioctl, fd, request, a);
    if (result == 0 && _IOC_TYPE(request) == 'F' && _IOC_NR(request) == 0x2b && a) {
        if (!objects)
            objects = new std::vector<Object>;
        objects->push_back({a[0], a[2], a[1], a[3], fd});
    }
    return result;
}

static int control(const Object &on, uint32_t command, void *params, uint32_t size)
{
    Control c = {on.client, on.handle, command, 0, (uint64_t)params, size, ~0u};
    return syscall(SYS_ioctl, on.fd, _IOWR('F', 0x2a, Control), &c) == 0 ? (int)c.status : -1;
}

static const Object *find(uint32_t client, uint32_t handle)
{
    for (const Object &o : *objects)
        if (o.client == client && o.handle == handle)
            return &o;
    return nullptr;
}

static bool find_channels()
{
    for (const Object &o : *objects) {
        if (o.cls < 0xc3c0 || (o.cls & 0xff) != 0xc0)
            continue;
        const Object *channel = find(o.client, o.parent), *its_group = channel ? find(channel->client, channel->parent) : nullptr;
        if (!its_group || its_group->cls != 0xa06c)
            return false; /* MPS */
        channels.push_back(*channel);
        group = *its_group;
    }
    for (const Object &o : *objects)
        if (o.cls == 0x2080 && !channels.empty() && o.parent == group.parent)
            subdevice = o;
    return !channels.empty();
}

static int set_slice(uint64_t us)
{
    return control(group, 0xa06c0103, &us, sizeof us);
}

static int suspend(bool on)
{
    Disable d = {};
    d.disable = on;
    for (const Object &c : channels) {
        d.client[d.count] = c.client;
        d.channel[d.count++] = c.handle;
    }
    return control(subdevice, 0x2080110b, &d, sizeof d);
}

/* ---- the two processes ---- */

__global__ void work(long long iterations, unsigned *out)
{
    unsigned x = threadIdx.x;
    for (long long i = 0; i < iterations; i++)
        x = x * 1664525u + 1013904223u;
    if (x == 12345)
        *out = x;
}

static struct Shared {
    volatile int busy, ready, stop, suspending;
    volatile long kernels, calls[2];
    volatile double spent_us[2];
} *shared;

enum { SMS = 132, LONG = 400000, SHORT = LONG / 400 };

static void *stand_aside(void *)
{
    int off = 0;
    while (!shared->stop) {
        int wanted = shared->suspending && shared->busy;
        if (wanted == off)
            continue;
        double before = now_us();
        if (suspend(wanted) != 0)
            shared->stop = 1;
        shared->spent_us[wanted] += now_us() - before;
        shared->calls[wanted]++;
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

static int best_effort(uint64_t slice_us)
{
    unsigned *out;
    cudaMalloc(&out, 64);
    work<<<SMS * 8, 256>>>(SHORT, out);
    cudaDeviceSynchronize();
    if (!find_channels() || set_slice(slice_us) != 0) {
        fprintf(stderr, "preempt: this process cannot control its channels here\n");
        shared->stop = shared->ready = 1;
        return 1;
    }
    pthread_t thread;
    pthread_create(&thread, nullptr, stand_aside, nullptr);
    cudaEvent_t events[8];
    for (cudaEvent_t &e : events)
        cudaEventCreateWithFlags(&e, cudaEventDisableTiming);
    shared->ready = 1;
    for (long k = 0; !shared->stop; shared->kernels = ++k) {
        if (k >= 8)
            cudaEventSynchronize(events[k % 8]);
        work<<<SMS * 8, 256>>>(LONG, out);
        cudaEventRecord(events[k % 8]);
    }
    pthread_join(thread, nullptr);
    cudaDeviceSynchronize();
    stress(out);
    return 0;
}

static void requests(const char *name, bool host_time, unsigned *out, cudaStream_t stream)
{
    std::vector<double> took;
    long before = shared->kernels;
    double begin = now_us();
    for (int r = 0; r < 150; r++) {
        usleep(10000 + rand() % 5000);
        double t = now_us();
        shared->busy = 1;
        for (int i = 0; i < 20; i++) {
            work<<<SMS, 256, 0, stream>>>(SHORT, out);
            for (double g = now_us(); host_time && now_us() - g < 50;)
                continue;
        }
        cudaStreamSynchronize(stream);
        took.push_back(now_us() - t);
        shared->busy = 0;
    }
    std::sort(took.begin(), took.end());
    printf("%-11s %s: p50 %.0f p99 %.0f max %.0f us; beside it %.0f kernels/s\n", name, host_time ? "50 us between" : "at once      ",
           took[75], took[148], took.back(), (shared->kernels - before) * 1e6 / (now_us() - begin));
}

int main(int argc, char **argv)
{
    setvbuf(stdout, nullptr, _IOLBF, 0);
    shared = (Shared *)mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    uint64_t slice_us = argc > 1 ? strtoull(argv[1], nullptr, 10) : 50;
    pid_t child = fork();
    if (child == 0)
        _exit(best_effort(slice_us));
    while (!shared->ready)
        usleep(1000);
    unsigned *out;
    cudaStream_t stream;
    cudaMalloc(&out, 64);
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    for (int i = 0; i < 20; i++)
        work<<<SMS, 256, 0, stream>>>(SHORT, out);
    cudaStreamSynchronize(stream);
    if (!shared->stop && find_channels())
        set_slice(10000);
    for (int suspending = 0; suspending < 2 && !shared->stop; suspending++) {
        shared->suspending = suspending;
        requests(suspending ? "suspended" : "slices", false, out, stream);
        requests(suspending ? "suspended" : "slices", true, out, stream);
    }
    if (shared->calls[0] && shared->calls[1])
        printf("suspend %.0f us, resume %.0f us\n", shared->spent_us[1] / shared->calls[1], shared->spent_us[0] / shared->calls[0]);
    shared->stop = 1;
    int status = 0;
    waitpid(child, &status, 0);
    requests("alone", false, out, stream);
    requests("alone", true, out, stream);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
