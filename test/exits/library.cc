/*
 * library.cc: a shared library whose static object uses CUDA as libraries' do, linked into programs.cc and opened and closed by
 * programs.py: its destructor frees memory, launches and waits, and tells the driver's answers.
 */
#include "program.h"

namespace {

struct held {
    CUdeviceptr device = 0;
    void *host = nullptr;
    bool used = false;

    void use()
    {
        start();
        need(cuMemAlloc_v2(&device, 4096) == CUDA_SUCCESS, "cuMemAlloc");
        need(cuMemAllocHost_v2(&host, 4096) == CUDA_SUCCESS, "cuMemAllocHost");
        launch_some(10);
        used = true;
    }

    ~held()
    {
        if (!used)
            return;
        tell("library free", cuMemFree_v2(device), cuMemFreeHost(host), 0);
        tell("library launch", launch(SHORT_NS), cuCtxSynchronize(), 0);
    }
} object;

} // namespace

extern "C" __attribute__((visibility("default"))) void use_library()
{
    object.use();
    leaving();
}
