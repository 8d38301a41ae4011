/* test-sim-processes.c: the simulated libcuda.so.1 with several threads and processes: time slices, sharing, ends, suspension. */
#include "sim-testing.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/time.h>

/* ---- Threads */

enum { THREADS = 4, ROUNDS = 300 };
static void *busy_thread(void *number)
{
    uint64_t block_ns = 500, iterations = 0;
    void *params[] = {&iterations, &block_ns};
    unsigned char host[64], back[64];
    OK(cuCtxSetCurrent(context));
    CUstream s = stream((uintptr_t)number & 1, 0);
    CUevent e = event();
    CUdeviceptr p;
    OK(cuMemAlloc_v2(&p, 64));
    memset(host, (int)(uintptr_t)number, sizeof host);
    for (int i = 0; i < ROUNDS; i++) {
        OK(cuLaunchKernel_ptsz(spin, 5, 1, 1, 64, 1, 1, 0, NULL, params, NULL));
        OK(launch(2, 700, s));
        OK(cuMemcpyHtoDAsync_v2(p, host, 64, s));
        OK(cuMemcpyDtoHAsync_v2(back, p, 64, s));
        OK(cuEventRecord(e, s));
        CUresult r = cuEventQuery(e);
        TRUE(r == CUDA_SUCCESS || r == CUDA_ERROR_NOT_READY);
        if (i % 16 == 0) OK(cuEventSynchronize(e));
        if (i % 32 == 0) OK(cuStreamSynchronize_ptsz(NULL));
        if (i % 64 == 0) OK(launch(1, 100, NULL));
    }
    OK(cuStreamSynchronize(s));
    OK(cuStreamSynchronize_ptsz(NULL));
    TRUE(!memcmp(host, back, sizeof host));
    OK(cuStreamDestroy_v2(s));
    OK(cuEventDestroy_v2(e));
    OK(cuMemFree_v2(p));
    return NULL;
}

static void *capturing_thread(void *unused)
{
    OK(cuCtxSetCurrent(context));
    CUstream s = stream(1, 0);
    for (int i = 0; i < 50; i++) {
        CUgraph g;
        CUgraphExec exec;
        OK(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        OK(launch(4, 300, s));
        OK(launch(4, 300, s));
        OK(cuStreamEndCapture(s, &g));
        OK(cuGraphInstantiateWithFlags(&exec, g, 0));
        OK(cuGraphLaunch(exec, s));
        OK(cuGraphLaunch(exec, s));
        OK(cuGraphExecDestroy(exec));
        OK(cuGraphDestroy(g));
    }
    OK(cuStreamSynchronize(s));
    return unused;
}

static void *one_launch(void *unused)
{
    OK(cuCtxSetCurrent(context));
    OK(launch(1, 100, CU_STREAM_PER_THREAD));
    return unused;
}

static void test_threads(void)
{
    start();
    for (int i = 0; i < 2500; i++) { /* more than the model has streams: a thread's goes with it */
        pthread_t short_lived;
        pthread_create(&short_lived, NULL, one_launch, NULL);
        pthread_join(short_lived, NULL);
    }
    pthread_t t[THREADS + 1];
    for (uintptr_t i = 0; i < THREADS; i++) pthread_create(&t[i], NULL, busy_thread, (void *)(i + 1));
    pthread_create(&t[THREADS], NULL, capturing_thread, NULL);
    for (int i = 0; i <= THREADS; i++) pthread_join(t[i], NULL);
    OK(cuCtxSynchronize());
    /* The per-thread stream is another one in each thread: another thread's is empty. */
    OK(launch(1, AN_HOUR, CU_STREAM_PER_THREAD));
    EQUAL(cuStreamQuery_ptsz(NULL), CUDA_ERROR_NOT_READY);
    OK(cuDevicePrimaryCtxReset_v2(0));
}

/* ---- Processes */

typedef struct {
    pid_t pid;
    int to, from;
} peer;

static void tell(int fd, char c) { TRUE(write(fd, &c, 1) == 1); }
static char hear(int fd)
{
    char c = 0;
    while (read(fd, &c, 1) < 0 && errno == EINTR) continue;
    return c;
}

/* Another client of the same GPU, which runs `body` with a pipe each way. To be made before this process uses one. */
static peer spawn(void (*body)(int in, int out))
{
    int down[2], up[2];
    TRUE(!pipe(down) && !pipe(up));
    peer p = {fork(), down[1], up[0]};
    if (!p.pid) {
        close(down[1]);
        close(up[0]);
        start();
        body(down[0], up[1]);
        exit(failures ? 1 : 0);
    }
    close(down[0]);
    close(up[1]);
    return p;
}

static void reap_peer(peer p, int killed)
{
    int status = -1;
    EQUAL(waitpid(p.pid, &status, 0), p.pid);
    if (killed) TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    else TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* Takes the whole GPU for an hour, and 100 GiB; says so; waits to be killed. */
static void hog(int in, int out)
{
    CUdeviceptr p;
    OK(cuMemAlloc_v2(&p, 100ull << 30));
    OK(launch(WHOLE_GPU, AN_HOUR, NULL));
    OK(launch(WHOLE_GPU, AN_HOUR, NULL));
    EQUAL(cuStreamQuery(NULL), CUDA_ERROR_NOT_READY);
    tell(out, failures ? 'f' : 'r');
    hear(in);
}

static size_t free_memory(void)
{
    size_t free_bytes = 0, total;
    OK(cuMemGetInfo_v2(&free_bytes, &total));
    return free_bytes;
}

static void after_the_hog(peer p, int expect_waiting)
{
    CUdeviceptr m;
    EQUAL(free_memory(), 41ll << 30);
    EQUAL(cuMemAlloc_v2(&m, 60ull << 30), CUDA_ERROR_OUT_OF_MEMORY);
    OK(launch(WHOLE_GPU, 1000, NULL));
    if (expect_waiting) {
        for (int i = 0; i < 1000; i++) EQUAL(cuStreamQuery(NULL), CUDA_ERROR_NOT_READY);
    } else {
        OK(cuStreamSynchronize(NULL));
        OK(launch(WHOLE_GPU, 5000000, NULL)); /* several slices */
    }
    kill(p.pid, SIGKILL);
    OK(cuStreamSynchronize(NULL));
    siginfo_t ended;
    EQUAL(waitid(P_PID, (id_t)p.pid, &ended, WEXITED | WNOWAIT), 0);
    OK(cuMemAlloc_v2(&m, 60ull << 30)); /* while it is a zombie */
    reap_peer(p, 1);
    OK(cuMemFree_v2(m));
    EQUAL(free_memory(), 141ll << 30);
}

/* Time slices: beside a client that never ends, another one's work goes on. */
static void test_time_slices(void)
{
    peer p = spawn(hog);
    EQUAL(hear(p.from), 'r');
    start();
    after_the_hog(p, 0);
}

/* Sharing: blocks that run are not preempted, so who comes second waits until the first is gone. */
static void test_sharing_full(void)
{
    setenv("RIGEL_SIM_MPS", "1", 1);
    peer p = spawn(hog);
    EQUAL(hear(p.from), 'r');
    start();
    after_the_hog(p, 1);
}

static void half(int in, int out)
{
    OK(launch(WHOLE_GPU / 2, AN_HOUR, NULL));
    tell(out, 'r');
    hear(in);
    OK(cuDevicePrimaryCtxReset_v2(0));
}

/* Sharing: what the one leaves of the SMs the other has. */
static void test_sharing_half(void)
{
    setenv("RIGEL_SIM_MPS", "1", 1);
    peer p = spawn(half);
    EQUAL(hear(p.from), 'r');
    start();
    for (int i = 0; i < 20; i++) OK(launch(WHOLE_GPU, 1000, NULL));
    OK(cuCtxSynchronize());
    tell(p.to, 'q');
    reap_peer(p, 0);
}

/* Leaves without a word to the driver, or with memory and work at exit. */
static void leave_at_once(int in, int out)
{
    CUdeviceptr p;
    OK(cuMemAlloc_v2(&p, 1ull << 30));
    OK(launch(WHOLE_GPU, AN_HOUR, NULL));
    tell(out, 'r');
    if (hear(in) == 'u') _exit(0);
}

static void test_exit_with_work(void)
{
    setenv("RIGEL_SIM_MPS", "1", 1);
    peer a = spawn(leave_at_once), b = spawn(leave_at_once);
    EQUAL(hear(a.from), 'r');
    EQUAL(hear(b.from), 'r');
    start();
    OK(launch(1, 1000, NULL));
    EQUAL(cuStreamQuery(NULL), CUDA_ERROR_NOT_READY);
    tell(a.to, 'u');
    tell(b.to, 'e');
    OK(cuStreamSynchronize(NULL));
    reap_peer(a, 0);
    reap_peer(b, 0);
    OK(cuCtxSynchronize());
    /* The last look at /proc may have been before the end: the next one is at most 10 ms later. */
    while (free_memory() != 141ull << 30) usleep(1000);
}

/* Calls everything that changes the model, until killed. */
static void storm(int in, int out)
{
    (void)in;
    CUstream s = stream(1, -1);
    CUevent e = event();
    tell(out, 'r');
    for (unsigned i = 1;; i++) {
        CUdeviceptr p = 0;
        OK(launch(1 + i % 300, 500, i % 3 ? s : NULL));
        OK(cuEventRecord(e, s));
        cuEventQuery(e);
        if (i % 7 == 0) OK(cuStreamWaitEvent(NULL, e, 0));
        if (i % 11 == 0) OK(cuMemAlloc_v2(&p, 1 << 20));
        if (p && i % 2) OK(cuMemFree_v2(p));
        if (i % 50 == 0) {
            OK(cuStreamDestroy_v2(s));
            s = stream(1, 0);
        }
        if (i % 40 == 0) suspend(0, i % 80 == 0); /* no such thing under MPS */
        if (i % 41 == 0) set_timeslice(0, i % 100 + 1);
    }
}

/* Clients are killed at whatever instruction they are at, also with the lock held: the survivor's work all ends. */
static void kills(int mps)
{
    setenv("RIGEL_SIM_MPS", mps ? "1" : "0", 1);
    peer victims[12];
    enum { VICTIMS = sizeof victims / sizeof *victims };
    for (int i = 0; i < VICTIMS; i++) victims[i] = spawn(storm);
    start();
    CUstream s = stream(1, -5);
    CUevent e = event();
    for (int i = 0; i < VICTIMS; i++) {
        EQUAL(hear(victims[i].from), 'r');
        for (int k = 0; k < 30; k++) {
            OK(launch(50, 2000, s));
            OK(cuEventRecord(e, s));
        }
        OK(cuEventSynchronize(e));
        OK(launch(50, 2000, s));
        kill(victims[i].pid, SIGKILL);
        OK(cuStreamSynchronize(s));
        reap_peer(victims[i], 1);
    }
    OK(cuCtxSynchronize());
    while (free_memory() != 141ull << 30) usleep(1000);
}
static void test_kills_sliced(void) { kills(0); }
static void test_kills_shared(void) { kills(1); }

/* ---- Slices and suspension */

/* The whole GPU for an hour; then controls itself as it is told, and says when it has. */
static void controlled(int in, int out)
{
    OK(launch(WHOLE_GPU, AN_HOUR, NULL));
    tell(out, 'r');
    for (char c; (c = hear(in)) != 'q'; tell(out, c)) {
        if (c == 's') EQUAL(suspend(0, 1), 0);
        if (c == 'r') EQUAL(suspend(0, 0), 0);
        if (c == 't') EQUAL(set_timeslice(0, 50), 0);
        if (failures) exit(1);
    }
    OK(cuDevicePrimaryCtxReset_v2(0));
}

static void order(peer p, char what)
{
    tell(p.to, what);
    EQUAL(hear(p.from), what);
}

/*
 * The model's time for a kernel of 20 ms that follows one of 50 ms. All of it has to be in the queue before the first
 * one is done, else the time would be this machine's: then once more.
 */
static double twenty_ms(void)
{
    float ms = 0;
    CUevent from = event(), to = event();
    for (int in_time = 0; !in_time;) {
        OK(launch(WHOLE_GPU, 50000000, NULL));
        OK(cuEventRecord(from, NULL));
        OK(launch(WHOLE_GPU, 20000000, NULL));
        OK(cuEventRecord(to, NULL));
        in_time = cuEventQuery(from) == CUDA_ERROR_NOT_READY;
        OK(cuEventSynchronize(to));
    }
    OK(cuEventElapsedTime(&ms, from, to));
    OK(cuEventDestroy_v2(from));
    OK(cuEventDestroy_v2(to));
    return ms;
}

/* What a process does to itself the other one sees in the time that its kernel takes: 20 ms, and what it has to
 * wait. */
static void test_controls(void)
{
    peer p = spawn(controlled);
    EQUAL(hear(p.from), 'r');
    start();
    /* Slices of 2.048 ms each, less the 0.05 for its state, and switches of 0.17: ten times (1.998 + 0.34) between the pieces, give or take one. */
    double ms = twenty_ms();
    check(ms >= 20 + 9 * 2.338 && ms <= 20.1 + 11 * 2.338, __LINE__, "%f ms beside equal slices", ms);
    order(p, 't'); /* 50 us, in which it has its state back and does nothing: each wait is 0.34 ms */
    ms = twenty_ms();
    check(ms >= 20 + 9 * 0.34 && ms <= 20.1 + 11 * 0.34, __LINE__, "%f ms beside slices of 50 us", ms);
    EQUAL(set_timeslice(0, 10000), 0); /* and only two or three of them */
    ms = twenty_ms();
    check(ms >= 20 + 1 * 0.34 && ms <= 20.1 + 3 * 0.34, __LINE__, "%f ms with slices of 10 ms", ms);
    order(p, 's');
    ms = twenty_ms();
    check(ms >= 20 && ms <= 20.1, __LINE__, "%f ms beside a suspended process", ms);
    order(p, 'r');
    ms = twenty_ms();
    check(ms >= 20 + 1 * 0.34 && ms <= 20.1 + 3 * 0.34, __LINE__, "%f ms beside a resumed process", ms);
    order(p, 's');
    tell(p.to, 'q'); /* ends suspended, by itself */
    reap_peer(p, 0);
    ms = twenty_ms();
    check(ms >= 20 && ms <= 20.1, __LINE__, "%f ms alone", ms);
}

static _Atomic int accepted, finished;

static void *launch_many(void *s)
{
    OK(cuCtxSetCurrent(context));
    for (int i = 0; i < 1500; i++) {
        OK(launch(WHOLE_GPU, 1000, s));
        atomic_fetch_add(&accepted, 1);
    }
    return NULL;
}

static void *synchronise(void *unused)
{
    OK(cuCtxSetCurrent(context));
    OK(cuCtxSynchronize());
    atomic_store(&finished, 1);
    return unused;
}

/* Suspended, it launches until a queue is full, and waits for work in vain; then it is resumed and all of it is
 * done. */
static void suspended(int in, int out)
{
    enum { COUNT = 200 };
    CUevent done[COUNT];
    CUstream s = stream(1, 0), full = stream(1, 0);
    for (int i = 0; i < COUNT; i++) done[i] = event();
    CUcontext second;
    CUmodule its_module;
    CUfunction its_kernel;
    OK(launch(WHOLE_GPU, 1000, NULL));
    OK(cuCtxSynchronize());
    EQUAL(suspend(0, 1), 0);
    EQUAL(suspend(0, 1), 0);
    for (int i = 0; i < COUNT; i++) {
        OK(launch(WHOLE_GPU, 1000, s));
        OK(cuEventRecord(done[i], s));
    }
    pthread_t launcher, waiter;
    pthread_create(&launcher, NULL, launch_many, full);
    pthread_create(&waiter, NULL, synchronise, NULL);
    while (atomic_load(&accepted) < 1024) usleep(1000);
    /* A context from after the suspension is not suspended. */
    OK(cuCtxCreate_v2(&second, 0, 0));
    OK(cuModuleLoadData(&its_module, ptx));
    OK(cuModuleGetFunction(&its_kernel, its_module, "plain_kernel"));
    OK(cuLaunchKernel(its_kernel, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL));
    OK(cuCtxSynchronize());
    OK(cuCtxDestroy_v2(second));
    tell(out, 's');
    EQUAL(hear(in), 'p'); /* the other one has done its work */
    for (int i = 0; i < COUNT; i++) EQUAL(cuEventQuery(done[i]), CUDA_ERROR_NOT_READY);
    EQUAL(atomic_load(&accepted), 1024);
    EQUAL(atomic_load(&finished), 0);
    EQUAL(suspend(0, 0), 0);
    pthread_join(launcher, NULL);
    pthread_join(waiter, NULL);
    OK(cuCtxSynchronize());
    for (int i = 0; i < COUNT; i++) EQUAL(cuEventQuery(done[i]), CUDA_SUCCESS);
    EQUAL(atomic_load(&accepted), 1500);
    EQUAL(atomic_load(&finished), 1);
}

static void test_suspended(void)
{
    peer p = spawn(suspended);
    EQUAL(hear(p.from), 's');
    start();
    for (int i = 0; i < 50; i++) OK(launch(WHOLE_GPU, 1000000, NULL));
    OK(cuCtxSynchronize());
    tell(p.to, 'p');
    reap_peer(p, 0);
}

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Stopped in the middle of a kernel, which goes on where it was: it takes its own time and the pause. */
static void test_suspended_kernel(void)
{
    start();
    CUevent from = event(), to = event();
    OK(cuEventRecord(from, NULL));
    OK(launch(WHOLE_GPU, 300000000, NULL));
    OK(cuEventRecord(to, NULL));
    EQUAL(suspend(0, 1), 0);
    double stopped = seconds();
    int before_the_end = cuEventQuery(to) == CUDA_ERROR_NOT_READY; /* else this machine slept for long */
    for (int i = 0; i < 400; i++) {
        usleep(1000);
        EQUAL(cuEventQuery(to), before_the_end ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS);
    }
    double pause_ms = 1000 * (seconds() - stopped);
    EQUAL(suspend(0, 0), 0);
    OK(cuEventSynchronize(to));
    float ms = 0;
    OK(cuEventElapsedTime(&ms, from, to));
    if (before_the_end) check(ms >= 300 + pause_ms, __LINE__, "%f ms with a pause of %f", (double)ms, pause_ms);
}

/* Killed while suspended, with the GPU's queue and 100 GiB: as after_the_hog, and nobody else is suspended. */
static void suspended_hog(int in, int out)
{
    CUdeviceptr p;
    OK(cuMemAlloc_v2(&p, 100ull << 30));
    OK(launch(WHOLE_GPU, AN_HOUR, NULL));
    EQUAL(suspend(0, 1), 0);
    OK(launch(WHOLE_GPU, AN_HOUR, NULL));
    tell(out, failures ? 'f' : 'r');
    hear(in);
}

static void test_killed_suspended(void)
{
    peer p = spawn(suspended_hog);
    EQUAL(hear(p.from), 'r');
    start();
    after_the_hog(p, 0);
    OK(launch(WHOLE_GPU, 3000000, NULL));
    OK(cuCtxSynchronize());
}

static void *control_thread(void *number)
{
    for (int i = 0; i < 100; i++) {
        EQUAL(suspend(0, ((int)(intptr_t)number + i) % 2), 0); /* without a current context */
        EQUAL(set_timeslice(0, (uint64_t)(20 + i)), 0);
    }
    return NULL;
}

static void test_control_errors(void)
{
    CUcontext c;
    load_library();
    EQUAL(suspend(0, 1), -ENODEV);
    EQUAL(set_timeslice(0, 100), -ENODEV);
    OK(cuInit(0));
    EQUAL(suspend(0, 1), -ENODEV);
    OK(cuDevicePrimaryCtxRetain(&c, 0));
    EQUAL(suspend(1, 1), -ENODEV);
    EQUAL(suspend(1000, 1), -ENODEV);
    EQUAL(set_timeslice(0, 0), -EINVAL);
    EQUAL(set_timeslice(0, 1000001), -EINVAL);
    EQUAL(set_timeslice(0, UINT64_MAX), -EINVAL);
    EQUAL(set_timeslice(0, 1000000), 0);
    EQUAL(suspend(0, 0), 0); /* it is not */
    /* Several threads at once, while others launch and wait. */
    start();
    pthread_t threads[4], waiter;
    for (int i = 0; i < 4; i++) pthread_create(&threads[i], NULL, control_thread, (void *)(intptr_t)i);
    for (int i = 0; i < 300; i++) OK(launch(WHOLE_GPU, 10000, NULL));
    pthread_create(&waiter, NULL, synchronise, NULL);
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    EQUAL(suspend(0, 0), 0);
    pthread_join(waiter, NULL);
    OK(cuCtxSynchronize());
    /* It ends with the context. */
    EQUAL(suspend(0, 1), 0);
    OK(cuDevicePrimaryCtxReset_v2(0));
    EQUAL(suspend(0, 0), -ENODEV);
    start();
    OK(launch(1, 1000, NULL));
    OK(cuCtxSynchronize());
}

static void test_control_shared(void)
{
    setenv("RIGEL_SIM_MPS", "1", 1);
    start();
    EQUAL(suspend(0, 1), -ENOTSUP);
    EQUAL(set_timeslice(0, 100), -ENOTSUP);
    OK(launch(WHOLE_GPU, 1000, NULL));
    OK(cuCtxSynchronize());
}

/* A stream that waits for a word stops there while the process says so, whether processes share the GPU or not; threads that wait go on with it. */
static void stops(const char *mps)
{
    static _Alignas(4096) uint32_t page[1024];
    CUdeviceptr word;
    setenv("RIGEL_SIM_MPS", mps, 1);
    start();
    EQUAL(set_stopped(0, 0), 0);
    EQUAL(set_stopped(99, 0), -ENODEV);
    CUstream s = stream(1, 0);
    EQUAL(cuStreamWaitValue32_v2(s, (CUdeviceptr)(uintptr_t)page, 1, CU_STREAM_WAIT_VALUE_GEQ), CUDA_ERROR_INVALID_VALUE);
    OK(cuMemHostRegister_v2(page, sizeof page, CU_MEMHOSTREGISTER_DEVICEMAP));
    OK(cuMemHostGetDevicePointer_v2(&word, page, 0));
    EQUAL(cuStreamWaitValue32_v2(s, word + 1, 1, CU_STREAM_WAIT_VALUE_GEQ), CUDA_ERROR_INVALID_VALUE);
    EQUAL(cuStreamWaitValue32_v2(s, word, 0, CU_STREAM_WAIT_VALUE_GEQ), CUDA_ERROR_NOT_SUPPORTED);
    EQUAL(cuStreamWaitValue32_v2(s, word, 1, 1), CUDA_ERROR_NOT_SUPPORTED);
    for (int i = 0; i < 2; i++) {
        OK(cuStreamWaitValue32_v2(s, word, 1, CU_STREAM_WAIT_VALUE_GEQ));
        OK(launch(WHOLE_GPU, 1000, s));
        OK(cuStreamSynchronize(s)); /* not stopped */
        EQUAL(set_stopped(0, 1), 0);
        OK(launch(WHOLE_GPU, 1000, s));
        OK(cuStreamWaitValue32_v2(s, word, 1, CU_STREAM_WAIT_VALUE_GEQ));
        CUevent before = event(), after = event();
        OK(cuEventRecord(after, s));
        OK(cuEventRecord(before, NULL));
        OK(cuEventSynchronize(before)); /* another stream goes on */
        atomic_store(&finished, 0);
        pthread_t waiter;
        pthread_create(&waiter, NULL, synchronise, NULL);
        usleep(20000);
        EQUAL(cuEventQuery(after), CUDA_ERROR_NOT_READY);
        EQUAL(atomic_load(&finished), 0);
        EQUAL(set_stopped(0, 0), 0);
        pthread_join(waiter, NULL);
        OK(cuEventQuery(after));
    }
}

static void test_stops_shared(void) { stops("1"); }
static void test_stops_sliced(void) { stops("0"); }

/* A child of fork has no driver; the parent keeps its. */
static void test_fork(void)
{
    start();
    CUevent e = event();
    OK(launch(1, 1000, NULL));
    pid_t pid = fork();
    if (!pid) {
        int n;
        CUdeviceptr p;
        EQUAL(cuInit(0), CUDA_ERROR_NOT_INITIALIZED);
        EQUAL(cuDeviceGetCount(&n), CUDA_ERROR_NOT_INITIALIZED);
        EQUAL(cuMemAlloc_v2(&p, 8), CUDA_ERROR_NOT_INITIALIZED);
        EQUAL(launch(1, 1, NULL), CUDA_ERROR_NOT_INITIALIZED);
        EQUAL(cuEventQuery(e), CUDA_ERROR_NOT_INITIALIZED);
        EQUAL(suspend(0, 1), -ENODEV); /* it would be the parent that is suspended */
        exit(failures ? 1 : 0); /* runs the exit handlers: they must leave the parent's contexts alone */
    }
    int status;
    waitpid(pid, &status, 0);
    EQUAL(status, 0);
    OK(launch(1, 1000, NULL));
    OK(cuCtxSynchronize());
}

static void after_the_driver(void)
{
    CUcontext c;
    int n;
    EQUAL(cuCtxSynchronize(), CUDA_ERROR_DEINITIALIZED);
    EQUAL(cuDeviceGetCount(&n), CUDA_ERROR_DEINITIALIZED);
    EQUAL(cuCtxGetCurrent(&c), CUDA_ERROR_DEINITIALIZED);
    EQUAL(cuInit(0), CUDA_ERROR_DEINITIALIZED);
    EQUAL(suspend(0, 1), -ENODEV);
    EQUAL(set_timeslice(0, 100), -ENODEV);
    if (failures) _exit(1);
}

static pthread_barrier_t context_is_set;
static void *wait_for_ever(void *unused)
{
    OK(cuCtxSetCurrent(context));
    pthread_barrier_wait(&context_is_set);
    cuCtxSynchronize();
    return unused;
}

/* Handlers run last in, first out: one from before cuInit runs after the driver's own. */
static void test_exit(void)
{
    atexit(after_the_driver);
    start();
    pthread_t t;
    OK(launch(WHOLE_GPU, AN_HOUR, NULL));
    pthread_barrier_init(&context_is_set, NULL, 2);
    pthread_create(&t, NULL, wait_for_ever, NULL); /* and somebody still waits */
    pthread_detach(t);
    pthread_barrier_wait(&context_is_set);
}

/* The UUID is the file's: the same for all its clients, and again after they have all gone. */
static void test_uuid(void)
{
    CUuuid uuid[3];
    for (int i = 0; i < 3; i++) {
        int fd[2];
        TRUE(!pipe(fd));
        pid_t pid = fork();
        if (!pid) {
            load_library();
            OK(cuInit(0));
            OK(cuDeviceGetUuid_v2(&uuid[0], 0));
            TRUE(write(fd[1], &uuid[0], 16) == 16);
            exit(failures ? 1 : 0);
        }
        TRUE(read(fd[0], &uuid[i], 16) == 16);
        waitpid(pid, NULL, 0);
    }
    TRUE(!memcmp(&uuid[0], &uuid[1], 16) && !memcmp(&uuid[1], &uuid[2], 16));
}

/* A program with a timer starts while somebody else has the file. */
static int ticks_to;
static void tick(int unused)
{
    (void)unused;
    tell(ticks_to, 't');
}

static void test_interrupted(void)
{
#ifdef __SANITIZE_THREAD__
    return; /* which puts handlers off while the program is in the kernel */
#endif
    int fd[2], held = open(state_path, O_RDWR);
    TRUE(!pipe(fd) && held >= 0 && !flock(held, LOCK_EX));
    pid_t pid = fork();
    if (!pid) {
        load_library();
        ticks_to = fd[1];
        struct sigaction act = {.sa_handler = tick};
        struct itimerval every = {{0, 1000}, {0, 1000}};
        TRUE(!sigaction(SIGALRM, &act, NULL) && !setitimer(ITIMER_REAL, &every, NULL));
        OK(cuInit(0));
        exit(failures ? 1 : 0);
    }
    for (int i = 0; i < 20; i++) EQUAL(hear(fd[0]), 't');
    TRUE(!flock(held, LOCK_UN));
    reap_peer((peer){pid, -1, fd[0]}, 0);
}

/* What the file was made with holds while anybody uses it; who comes when nobody does makes it anew. */
static void l4_client(int in, int out)
{
    EQUAL(attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 0), 58);
    tell(out, 'r');
    hear(in);
}

static void test_who_decides(void)
{
    setenv("RIGEL_SIM_PRESET", "l4", 1);
    peer first = spawn(l4_client);
    EQUAL(hear(first.from), 'r');
    setenv("RIGEL_SIM_PRESET", "a100", 1);
    peer second = spawn(l4_client);
    EQUAL(hear(second.from), 'r');
    kill(first.pid, SIGKILL);
    kill(second.pid, SIGKILL);
    reap_peer(first, 1);
    reap_peer(second, 1);
    start();
    EQUAL(attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 0), 108);
}

/* ---- What each process has had of the GPU */

enum { US = 1000, MS = 1000 * 1000 };

/* For how long a process has kept the GPU busy, and the time at which that was asked. */
static uint64_t busy(pid_t pid, uint64_t *at_ns)
{
    rigel_sim_busy found[8];
    CUuuid uuid;
    int n = busy_processes(state_path, found, sizeof found, at_ns);
    OK(cuDeviceGetUuid_v2(&uuid, 0));
    for (int i = 0; i < n && i < 8; i++) {
        TRUE(!memcmp(found[i].uuid, &uuid, 16));
        if (found[i].pid == (uint64_t)pid) return found[i].busy_ns;
    }
    check(0, __LINE__, "process %d is not among %d", (int)pid, n);
    return 0;
}

static void run_kernel(uint64_t ns)
{
    OK(launch(1, ns, NULL));
    OK(cuCtxSynchronize());
}

/* Does what it is asked for by a letter: a kernel of 2 ms, 30 ms of work; 'q' ends it. */
static void works(int in, int out)
{
    tell(out, 'r');
    for (char c; (c = hear(in)) != 'q'; tell(out, failures ? 'f' : 'r')) {
        if (c == '2') {
            run_kernel(2 * MS);
            continue;
        }
        for (int i = 0; i < 10; i++) OK(launch(WHOLE_GPU, 3 * MS, NULL));
        OK(cuCtxSynchronize());
    }
}

/* In virtual time: alone, every number is a kernel's own duration, or the time that passes while one runs. */
static void test_busy(void)
{
    uint64_t at, later;
    setenv("RIGEL_SIM_CLOCK", "virtual", 1);
    start();
    EQUAL(busy(getpid(), &at), 0);
    run_kernel(3 * MS);
    run_kernel(500 * US);
    EQUAL(busy(getpid(), &at), 3500 * US);
    /* Two at once are busy once, and a copy does not count. */
    CUstream s[2] = {stream(1, 0), stream(1, 0)};
    CUdeviceptr p;
    OK(cuMemAlloc_v2(&p, 1 << 20));
    OK(cuMemsetD8_v2(p, 0, 1 << 20));
    for (int i = 0; i < 2; i++) OK(launch(1, 1 * MS, s[i]));
    for (int i = 0; i < 2; i++) OK(cuStreamSynchronize(s[i]));
    uint64_t two = busy(getpid(), &at) - 3500 * US;
    TRUE(two >= 1 * MS && two < 1 * MS + 100); /* the second call came some nanoseconds after the first */
    /* What a destroyed context had stays. */
    CUcontext second;
    OK(cuCtxCreate_v2(&second, 0, 0));
    CUmodule m;
    CUfunction mine, kept = spin;
    OK(cuModuleLoadData(&m, ptx));
    OK(cuModuleGetFunction(&mine, m, "rigel_spin"));
    spin = mine;
    run_kernel(700 * US);
    spin = kept;
    EQUAL(busy(getpid(), &at), 4200 * US + two);
    OK(cuCtxDestroy_v2(second));
    OK(cuCtxSetCurrent(context));
    EQUAL(busy(getpid(), &at), 4200 * US + two);
    /* While a kernel runs, busy time is time; while its process is off the GPU, it is not. */
    OK(launch(1, AN_HOUR, s[0]));
    OK(launch(1, 1 * MS, s[1]));
    OK(cuStreamSynchronize(s[1]));
    uint64_t before = busy(getpid(), &at);
    OK(launch(1, 2 * MS, s[1]));
    OK(cuStreamSynchronize(s[1]));
    EQUAL(busy(getpid(), &later) - before, later - at);
    TRUE(later - at > 2 * MS);
    EQUAL(suspend(0, 1), 0);
    before = busy(getpid(), &at);
    EQUAL(suspend(0, 1), 0); /* takes time */
    EQUAL(busy(getpid(), &later), before);
    TRUE(later > at);
    /* Looking does not move the clock. */
    rigel_sim_busy found[1];
    EQUAL(busy_processes(state_path, found, sizeof found, &at), 1);
    EQUAL(busy_processes(state_path, found, 0, &later), 1);
    EQUAL(later, at);
}

/* Each process has its own, and what they have together is no more than the time that has passed: slices. */
static void test_busy_processes(void)
{
    uint64_t at, begun;
    setenv("RIGEL_SIM_CLOCK", "virtual", 1);
    peer a = spawn(works), b = spawn(works);
    EQUAL(hear(a.from), 'r');
    EQUAL(hear(b.from), 'r');
    start();
    EQUAL(busy(a.pid, &at), 0);
    tell(a.to, '2');
    EQUAL(hear(a.from), 'r');
    EQUAL(busy(a.pid, &at), 2 * MS);
    EQUAL(busy(b.pid, &begun), 0);
    tell(a.to, 'w');
    tell(b.to, 'w');
    EQUAL(hear(a.from), 'r');
    EQUAL(hear(b.from), 'r');
    EQUAL(busy(a.pid, &at), 32 * MS);
    EQUAL(busy(b.pid, &at), 30 * MS);
    TRUE(at - begun >= 60 * MS);
    EQUAL(busy(getpid(), &at), 0);
    tell(a.to, 'q');
    reap_peer(a, 0);
    rigel_sim_busy found[8];
    EQUAL(busy_processes(state_path, found, sizeof found, &at), 2);
    tell(b.to, 'q');
    reap_peer(b, 0);
}

static void test_busy_refused(void)
{
    uint64_t at;
    rigel_sim_busy found[8];
    load_library();
    EQUAL(busy_processes("/no/such/file", found, sizeof found, &at), -ENOENT);
    EQUAL(busy_processes(state_path, found, sizeof found, &at), -EINVAL); /* empty: nobody has made it yet */
    EQUAL(busy_processes(library, found, sizeof found, &at), -EINVAL);
    EQUAL(busy_processes("/dev/null", found, sizeof found, &at), -EINVAL);
}

/* ---- */

static const sim_test tests[] = {
    {"threads", test_threads},
    {"two processes, time slices", test_time_slices},
    {"two processes, shared and full", test_sharing_full},
    {"two processes, shared halves", test_sharing_half},
    {"exit with work", test_exit_with_work},
    {"kills, time slices", test_kills_sliced},
    {"kills, shared", test_kills_shared},
    {"controls, two processes", test_controls},
    {"controls, suspended", test_suspended},
    {"controls, in a kernel", test_suspended_kernel},
    {"controls, killed", test_killed_suspended},
    {"controls, errors and threads", test_control_errors},
    {"controls, shared", test_control_shared},
    {"stops, shared", test_stops_shared},
    {"stops, in time slices", test_stops_sliced},
    {"fork", test_fork},
    {"end of the process", test_exit},
    {"uuid", test_uuid},
    {"interrupted while it starts", test_interrupted},
    {"who decides what the GPU is", test_who_decides},
    {"busy time", test_busy},
    {"busy time, two processes", test_busy_processes},
    {"busy time, no such file", test_busy_refused},
};

int main(int argc, char **argv)
{
    return run_tests(argc, argv, tests, sizeof tests / sizeof *tests);
}
