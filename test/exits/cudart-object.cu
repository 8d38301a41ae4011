/*
 * cudart-object.cu: a library's global singleton that uses the CUDA runtime: its destructor frees memory, launches and waits, and
 * tells the runtime's answers. Linked before or after cudart-programs.cu, because nvcc's start-up code of each object registers
 * its end with atexit in the order of linking, and some programs fail by it and others do not.
 */
#include "cudart.h"

__global__ void touch(int *x)
{
    if (x)
        x[threadIdx.x] += 1;
}

namespace {

struct held {
    int *device = nullptr;
    void *host = nullptr;
    bool used = false;

    /* "early" in the program's arguments: CUDA is first used before main, so that the end of the runtime comes after ours. */
    held()
    {
        char line[256] = "";
        FILE *arguments = fopen("/proc/self/cmdline", "r");
        size_t n = arguments ? fread(line, 1, sizeof line - 1, arguments) : 0;
        for (size_t i = 0; i < n; i++)
            if (strncmp(line + i, "early", 5) == 0 && !used)
                use();
        if (arguments)
            fclose(arguments);
    }

    void use()
    {
        need(cudaMalloc(&device, 4096) == cudaSuccess, "cudaMalloc");
        need(cudaMallocHost(&host, 4096) == cudaSuccess, "cudaMallocHost");
        used = true;
    }

    ~held()
    {
        if (!used)
            return;
        tell("object free host", cudaFreeHost(host), 0, 0);
        tell("object free", cudaFree(device), 0, 0);
        device = nullptr; /* to touch what is freed would be an error of the context, which the library's next use would meet */
        tell("object launch", count_launch([] { touch<<<1, 32>>>(object_memory()); }), 0, 0);
        tell("object synchronize", cudaDeviceSynchronize(), cudaGetLastError(), 0);
    }

    static int *object_memory();
} object;

int *held::object_memory()
{
    return object.device;
}

} // namespace

void use_object()
{
    object.use();
    need(count_launch([] { touch<<<1, 32>>>(held::object_memory()); }) == cudaSuccess, "a launch");
}

/* As library.cc has it, where this file alone is made a library. */
extern "C" __attribute__((visibility("default"))) void use_library()
{
    use_object();
    leaving();
}
