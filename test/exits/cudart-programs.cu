/*
 * cudart-programs.cu: programs that use the CUDA runtime, linked to it as a shared or as a static library, and that end or fork in
 * all ways: `programs WAY`; without one it lists them. See counts.h; expected is whatever the bare program does.
 */
#include "cudart.h"

#include <atomic>
#include <sys/wait.h>
#include <thread>

__global__ void add(int *x, int n)
{
    for (int i = 0; i < n; i++)
        x[threadIdx.x] += i;
}

namespace {

int *memory;

cudaError_t launch_add()
{
    return count_launch([] { add<<<1, 32>>>(memory, 100); });
}

void start_cudart()
{
    need(cudaMalloc(&memory, 4096) == cudaSuccess, "cudaMalloc");
    for (int i = 0; i < 20; i++)
        need(launch_add() == cudaSuccess, "a launch");
}

/* Frees memory, launches and waits when it goes. */
struct holder {
    const char *name;
    int *device = nullptr;
    void *host = nullptr;

    explicit holder(const char *name) : name(name) {}

    void fill()
    {
        need(cudaMalloc(&device, 4096) == cudaSuccess, "cudaMalloc");
        need(cudaMallocHost(&host, 4096) == cudaSuccess, "cudaMallocHost");
    }

    ~holder()
    {
        if (!host)
            return;
        tell(name, cudaFreeHost(host), cudaFree(device), cudaDeviceSynchronize());
        tell(name, launch_add(), cudaDeviceSynchronize(), cudaGetLastError());
    }
};

holder global("global");

holder &singleton()
{
    static holder instance("singleton");
    return instance;
}

void launch_in_threads()
{
    static std::atomic<int> ready{0};
    for (int i = 0; i < 3; i++)
        std::thread([] {
            for (int n = 0; launch_add() == cudaSuccess; n++) {
                ready += n == 20;
                cudaDeviceSynchronize();
            }
            pause();
        }).detach();
    while (ready < 3)
        usleep(100);
}

void way_return()
{
    start_cudart();
    leaving();
}

void way_static_object()
{
    start_cudart();
    global.fill();
    leaving();
}

void way_singleton_from_before_cuda()
{
    singleton();
    start_cudart();
    singleton().fill();
    leaving();
}

void way_singleton_from_after_cuda()
{
    start_cudart();
    singleton().fill();
    leaving();
}

void way_object_of_another_file()
{
    use_object();
    start_cudart();
    leaving();
}

/* The object has used CUDA before main, by this program's name. */
void way_early_object_of_another_file()
{
    start_cudart();
    leaving();
}

void way_device_reset()
{
    start_cudart();
    global.fill();
    leaving();
    need(cudaDeviceReset() == cudaSuccess, "cudaDeviceReset");
}

void way_exit_in_thread()
{
    start_cudart();
    global.fill();
    std::thread([] {
        leaving();
        exit(7);
    }).join();
}

void way_exit_while_launching()
{
    start_cudart();
    launch_in_threads();
    leaving();
    exit(7);
}

void way_quick_exit_while_launching()
{
    start_cudart();
    launch_in_threads();
    leaving();
    quick_exit(7);
}

void way_fork_launch()
{
    start_cudart();
    pid_t pid = fork();
    if (pid == 0) {
        alarm(20);
        add<<<1, 32>>>(memory, 1);
        tell("child", cudaGetLastError(), cudaDeviceSynchronize(), cudaMalloc(&memory, 4096));
        exit(3);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    tell("child", WIFEXITED(status), WEXITSTATUS(status), WIFSIGNALED(status) ? WTERMSIG(status) : 0);
    need(launch_add() == cudaSuccess, "a launch");
    leaving();
}

void way_shutdown()
{
    start_cudart();
    global.fill();
    leaving();
    shut_rigel_down();
    shut_rigel_down();
}

const struct {
    const char *name;
    void (*body)();
} ways[] = {
    {"return", way_return},
    {"static-object", way_static_object},
    {"singleton-from-before-cuda", way_singleton_from_before_cuda},
    {"singleton-from-after-cuda", way_singleton_from_after_cuda},
    {"object-of-another-file", way_object_of_another_file},
    {"early-object-of-another-file", way_early_object_of_another_file},
    {"device-reset", way_device_reset},
    {"exit-in-thread", way_exit_in_thread},
    {"exit-while-launching", way_exit_while_launching},
    {"quick-exit-while-launching", way_quick_exit_while_launching},
    {"fork-launch", way_fork_launch},
    {"shutdown", way_shutdown},
};

} // namespace

int main(int argc, char **argv)
{
    for (const auto &way : ways) {
        if (argc < 2) {
            puts(way.name);
        } else if (strcmp(argv[1], way.name) == 0) {
            begin();
            way.body();
            return 5;
        }
    }
    return argc < 2 ? 0 : 97;
}
