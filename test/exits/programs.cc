/*
 * programs.cc: programs whose C++ objects use CUDA when they are destroyed: `programs WAY`; without one it lists them.
 *
 * Where an object's destructor runs, relative to the end of the driver, is decided by when the object was made: before cuInit or
 * after it. See counts.h; expected is whatever the bare program does.
 */
#include "program.h"

#include <atomic>
#include <exception>
#include <stdexcept>
#include <thread>

extern "C" void use_library();

namespace {

/* Frees memory, launches and waits when it goes. */
struct holder {
    const char *name;
    CUdeviceptr device = 0;
    void *host = nullptr;
    bool filled = false;

    explicit holder(const char *name) : name(name) {}

    void fill()
    {
        need(cuMemAlloc_v2(&device, 4096) == CUDA_SUCCESS, "cuMemAlloc");
        need(cuMemAllocHost_v2(&host, 4096) == CUDA_SUCCESS, "cuMemAllocHost");
        filled = true;
    }

    ~holder()
    {
        if (!filled)
            return;
        tell(name, cuMemFree_v2(device), cuMemFreeHost(host), cuCtxSynchronize());
        tell(name, launch(SHORT_NS), cuCtxSynchronize(), cuCtxSetCurrent(the_context));
    }
};

/* Has a thread that launches, which its destructor ends and joins, as thread pools do. */
struct worker {
    std::atomic<bool> stop{false};
    std::thread thread;

    void begin()
    {
        thread = std::thread([this] {
            cuCtxSetCurrent(the_context);
            while (!stop && launch(SHORT_NS) == CUDA_SUCCESS)
                cuCtxSynchronize();
        });
    }

    ~worker()
    {
        if (!thread.joinable())
            return;
        stop = true;
        thread.join();
        tell("joined", 0, 0, 0);
    }
};

holder global("global");
worker global_worker;

holder &singleton()
{
    static holder instance("singleton");
    return instance;
}

worker &singleton_worker()
{
    static worker instance;
    return instance;
}

void way_static_object()
{
    start();
    global.fill();
    launch_some(20);
    leaving();
}

void way_singleton_from_before_cuda()
{
    singleton();
    start();
    singleton().fill();
    launch_some(20);
    leaving();
}

/* Its destructor runs before the driver ends: what it launches is accepted, and nobody can say so afterwards. */
void way_singleton_from_after_cuda()
{
    start();
    singleton().fill();
    launch_some(20);
    leaving();
}

void way_static_object_by_quick_exit()
{
    start();
    global.fill();
    launch_some(20);
    leaving();
    std::quick_exit(7);
}

void way_static_object_by_exit_in_thread()
{
    start();
    global.fill();
    singleton().fill();
    std::thread([] {
        leaving();
        std::exit(7);
    }).join();
}

void way_thread_local_object()
{
    static thread_local holder local("thread");
    start();
    local.fill();
    std::thread([] {
        cuCtxSetCurrent(the_context);
        local.name = "other";
        local.fill();
        launch_some(10);
    }).join();
    launch_some(10);
    leaving();
}

void way_library()
{
    use_library();
    launch_some(0);
}

void way_library_and_static_object()
{
    use_library();
    start();
    global.fill();
    singleton().fill();
    launch_some(20);
    leaving();
}

void way_exception()
{
    start();
    global.fill();
    launch_some(20);
    leaving();
    throw std::runtime_error("nobody catches this");
}

void way_exception_in_thread()
{
    start();
    launch_some(20);
    leaving();
    std::thread([] { throw std::runtime_error("nobody catches this"); }).join();
}

void way_worker_joined_by_static_object()
{
    start();
    launch_some(20);
    leaving();
    global_worker.begin();
}

void way_worker_joined_by_singleton()
{
    start();
    launch_some(20);
    leaving();
    singleton_worker().begin();
}

const struct {
    const char *name;
    void (*body)();
} ways[] = {
    {"static-object", way_static_object},
    {"singleton-from-before-cuda", way_singleton_from_before_cuda},
    {"singleton-from-after-cuda", way_singleton_from_after_cuda},
    {"static-object-by-quick-exit", way_static_object_by_quick_exit},
    {"static-object-by-exit-in-thread", way_static_object_by_exit_in_thread},
    {"thread-local-object", way_thread_local_object},
    {"library", way_library},
    {"library-and-static-object", way_library_and_static_object},
    {"exception", way_exception},
    {"exception-in-thread", way_exception_in_thread},
    {"worker-joined-by-static-object", way_worker_joined_by_static_object},
    {"worker-joined-by-singleton", way_worker_joined_by_singleton},
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
