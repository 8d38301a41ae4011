/*
 * program.h: what the programs that end in all ways (programs.c, programs.cc, library.cc) share; C11 and C++17.
 *
 * They are linked against libcuda.so.1, the simulated one or a real one, and know nothing of Rigel but the name of
 * rigel_shutdown. What they print is the same each time: the same program is run bare and under Rigel, and compared.
 *
 * What a program has launched it writes to the file EXITS_COUNTS, which outlives it: for each thread the launches that it has
 * begun and those that have been accepted, and, from the moment when it leaves, how many had been accepted by then.
 */
#ifndef RIGEL_EXITS_PROGRAM_H
#define RIGEL_EXITS_PROGRAM_H

#include "../../native/cuda_abi.h"
#include "../../native/replay/spin_ptx.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifdef __cplusplus
extern "C" {
#endif
CUresult cuInit(unsigned flags);
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d);
CUresult cuCtxSetCurrent(CUcontext c);
CUresult cuCtxSynchronize(void);
CUresult cuModuleLoadData(CUmodule *m, const void *image);
CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name);
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                        CUstream s, void **params, void **extra);
CUresult cuMemAlloc_v2(CUdeviceptr *p, size_t n);
CUresult cuMemFree_v2(CUdeviceptr p);
CUresult cuMemAllocHost_v2(void **p, size_t n);
CUresult cuMemFreeHost(void *p);
#ifdef __cplusplus
}
#endif

enum { COUNT_THREADS = 64, SHORT_NS = 5000 };

/* The file. `left` is 1 more than what had been accepted when the program left; 0: it did not say. */
typedef struct {
    uint64_t left, threads;
    struct {
        uint64_t begun, accepted;
    } of[COUNT_THREADS];
} count_file;

static count_file *counts;
static __thread uint64_t count_index; /* 1 more than this thread's place; 0 none yet */
static CUcontext the_context;
static CUfunction the_kernel;

/* Ends the program where it cannot go on: the harness sees the status and the line. */
static inline void need(int ok, const char *what)
{
    if (ok)
        return;
    fprintf(stderr, "exits: %s failed\n", what);
    _exit(99);
}

static inline void open_counts(void)
{
    const char *path = getenv("EXITS_COUNTS");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    need(fd >= 0, "opening EXITS_COUNTS");
    counts = (count_file *)mmap(NULL, sizeof *counts, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    need(counts != MAP_FAILED, "mapping EXITS_COUNTS");
    close(fd);
}

/* One kernel of so many nanoseconds on the NULL stream (on a real GPU, some 19 ns an iteration). */
static inline CUresult launch(uint64_t ns)
{
    uint64_t iterations = ns / 19 + 1;
    void *params[] = {&iterations, &ns};
    if (!count_index)
        count_index = __atomic_add_fetch(&counts->threads, 1, __ATOMIC_RELAXED);
    need(count_index <= COUNT_THREADS, "a place for another thread");
    __atomic_add_fetch(&counts->of[count_index - 1].begun, 1, __ATOMIC_RELAXED);
    CUresult r = cuLaunchKernel(the_kernel, 1, 1, 1, 32, 1, 1, 0, NULL, params, NULL);
    if (r == CUDA_SUCCESS)
        __atomic_add_fetch(&counts->of[count_index - 1].accepted, 1, __ATOMIC_RELAXED);
    return r;
}

/* From here on the program is on its way out: what was accepted by now must not be missing from anybody's count. */
static inline void leaving(void)
{
    uint64_t sum = 0;
    for (int i = 0; i < COUNT_THREADS; i++)
        sum += __atomic_load_n(&counts->of[i].accepted, __ATOMIC_RELAXED);
    __atomic_store_n(&counts->left, sum + 1, __ATOMIC_RELAXED);
}

static inline void start(void)
{
    CUmodule module;
    if (!counts)
        open_counts();
    need(cuInit(0) == CUDA_SUCCESS, "cuInit");
    need(cuDevicePrimaryCtxRetain(&the_context, 0) == CUDA_SUCCESS, "cuDevicePrimaryCtxRetain");
    need(cuCtxSetCurrent(the_context) == CUDA_SUCCESS, "cuCtxSetCurrent");
    need(cuModuleLoadData(&module, rg_spin_ptx) == CUDA_SUCCESS, "cuModuleLoadData");
    need(cuModuleGetFunction(&the_kernel, module, RG_SPIN_KERNEL) == CUDA_SUCCESS, "cuModuleGetFunction");
}

static inline void launch_some(int n)
{
    for (int i = 0; i < n; i++)
        need(launch(SHORT_NS) == CUDA_SUCCESS, "cuLaunchKernel");
}

/* Ends Rigel's part in this process, as a user would write it. */
static inline void shut_rigel_down(void)
{
    void (*f)(void);
    *(void **)&f = dlsym(RTLD_DEFAULT, "rigel_shutdown");
    if (f)
        f();
}

/* Whether this program is held back by somebody else from its first launch on, so that it cannot wait for many. */
static inline int is_held(void)
{
    const char *held = getenv("EXITS_HELD");
    return held && *held == '1';
}

/* A line that is written at once: stdio may have been closed by now. */
static inline void tell(const char *what, int a, int b, int c)
{
    char line[128];
    int n = snprintf(line, sizeof line, "%s %d %d %d\n", what, a, b, c);
    need(write(STDOUT_FILENO, line, (size_t)n) == n, "writing");
}

#endif
