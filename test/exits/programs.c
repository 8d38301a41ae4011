/*
 * programs.c: a program for each way to end or to fork: `programs WAY`; without one it lists them.
 *
 * Each uses the driver, then leaves. Those with "launching" in their name have threads that go on launching meanwhile. See
 * counts.h; expected is whatever the bare program does.
 */
#define _GNU_SOURCE
#include "program.h"

#include <errno.h>
#include <signal.h>
#include <spawn.h>
#include <stdbool.h>
#include <sys/time.h>
#include <sys/wait.h>

enum { THREADS = 3, ENOUGH = 20 };

/* ---- threads that launch ---- */

static int stop_launching;
static pthread_t launchers[THREADS];

static void *launch_on(void *unused)
{
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, NULL);
    need(cuCtxSetCurrent(the_context) == CUDA_SUCCESS, "cuCtxSetCurrent");
    while (!__atomic_load_n(&stop_launching, __ATOMIC_RELAXED)) {
        for (int i = 0; i < 8; i++)
            if (launch(SHORT_NS) != CUDA_SUCCESS)
                pause(); /* the driver is going: this thread will not see the end of it */
        cuCtxSynchronize();
    }
    return unused;
}

static uint64_t launched_by(int i)
{
    return __atomic_load_n(is_held() ? &counts->of[i].begun : &counts->of[i].accepted, __ATOMIC_RELAXED);
}

static void start_launching(void)
{
    int before = (int)__atomic_load_n(&counts->threads, __ATOMIC_RELAXED);
    for (int i = 0; i < THREADS; i++)
        need(pthread_create(&launchers[i], NULL, launch_on, NULL) == 0, "pthread_create");
    for (int i = before; i < before + THREADS; i++)
        while (launched_by(i) < (is_held() ? 1 : ENOUGH))
            usleep(100);
    if (is_held())
        usleep(20000); /* by now, most likely, they wait */
}

static void join_launching(void)
{
    __atomic_store_n(&stop_launching, 1, __ATOMIC_RELAXED);
    for (int i = 0; i < THREADS; i++)
        need(pthread_join(launchers[i], NULL) == 0, "pthread_join");
}

static void *exit_7(void *unused)
{
    leaving();
    exit(7);
    return unused;
}

static void in_a_thread(void *(*body)(void *), bool join)
{
    pthread_t t;
    need(pthread_create(&t, NULL, body, NULL) == 0, "pthread_create");
    if (join)
        need(pthread_join(t, NULL) == 0, "pthread_join");
}

/* ---- leaving ---- */

static void way_return(void)
{
    start();
    launch_some(40);
    leaving();
}

static void way_return_when_done(void)
{
    start();
    launch_some(40);
    need(cuCtxSynchronize() == CUDA_SUCCESS, "cuCtxSynchronize");
    leaving();
}

static void way_without_launching(void)
{
    start();
    leaving();
}

static void way_exit(void)
{
    start();
    launch_some(40);
    exit_7(NULL);
}

static void way_exit_in_thread(void)
{
    start();
    launch_some(40);
    in_a_thread(exit_7, true);
}

static void *exit_7_later(void *unused)
{
    usleep(2000);
    return exit_7(unused);
}

static void way_exit_while_waiting(void)
{
    start();
    launch_some(10);
    need(launch(long_ns()) == CUDA_SUCCESS, "cuLaunchKernel");
    in_a_thread(exit_7_later, false);
    cuCtxSynchronize();
    pause(); /* the driver may answer before the process is gone */
}

static void way_exit_while_launching(void)
{
    start();
    start_launching();
    exit_7(NULL);
}

static void way_immediate_exit_while_launching(void)
{
    start();
    start_launching();
    leaving();
    _exit(7);
}

static void way_quick_exit_while_launching(void)
{
    start();
    start_launching();
    leaving();
    quick_exit(7);
}

static void way_abort_while_launching(void)
{
    start();
    start_launching();
    leaving();
    abort();
}

static void *launch_a_little(void *unused)
{
    need(cuCtxSetCurrent(the_context) == CUDA_SUCCESS, "cuCtxSetCurrent");
    launch_some(ENOUGH);
    return unused;
}

static void way_main_ends_before_its_threads(void)
{
    start();
    for (int i = 0; i < THREADS; i++)
        in_a_thread(launch_a_little, false);
    pthread_exit(NULL);
}

/* ---- signals ---- */

static void die_of(int signal)
{
    start();
    start_launching();
    leaving();
    kill(getpid(), signal);
    pause();
}

static void way_sigterm(void)
{
    die_of(SIGTERM);
}

static void way_sigint(void)
{
    die_of(SIGINT);
}

static void way_sigkill(void)
{
    die_of(SIGKILL);
}

static void way_sigsegv(void)
{
    die_of(SIGSEGV);
}

static void on_signal_exit(int signal)
{
    (void)signal;
    exit_7(NULL);
}

static void way_sigterm_handler_exits(void)
{
    start();
    signal(SIGTERM, on_signal_exit);
    start_launching();
    kill(getpid(), SIGTERM);
    for (;;)
        pause();
}

static void on_signal_shut_down(int signal)
{
    (void)signal;
    shut_rigel_down();
    _exit(7);
}

/* The signal comes in the middle of whatever launching and waiting does. */
static void way_signal_amid_launching(void)
{
    struct itimerval when = {.it_value = {.tv_usec = 1000 + getpid() % 64 * 50}};
    start();
    launch_some(ENOUGH);
    signal(SIGALRM, on_signal_shut_down);
    setitimer(ITIMER_REAL, &when, NULL);
    for (;;) {
        launch(SHORT_NS);
        cuCtxSynchronize();
    }
}

/* ---- handlers at exit ---- */

static CUdeviceptr device_memory;
static void *host_memory;

static void take_memory(void)
{
    need(cuMemAlloc_v2(&device_memory, 4096) == CUDA_SUCCESS, "cuMemAlloc");
    need(cuMemAllocHost_v2(&host_memory, 4096) == CUDA_SUCCESS, "cuMemAllocHost");
}

static void clean_up(void)
{
    tell("free", cuMemFree_v2(device_memory), cuMemFreeHost(host_memory), 0);
    tell("launch", launch(SHORT_NS), cuCtxSynchronize(), cuCtxSetCurrent(the_context));
}

static void clean_up_and_leave(void)
{
    clean_up();
    leaving();
}

static void way_handler_from_before_cuda(void)
{
    atexit(clean_up);
    start();
    take_memory();
    way_return();
}

static void way_handler_from_after_cuda(void)
{
    start();
    take_memory();
    atexit(clean_up_and_leave);
    launch_some(10);
}

static void way_handlers_around_cuda_and_launching(void)
{
    atexit(clean_up);
    start();
    take_memory();
    start_launching();
    exit_7(NULL);
}

/* ---- rigel_shutdown ---- */

static void way_shutdown(void)
{
    way_return();
    shut_rigel_down();
    need(launch(SHORT_NS) == CUDA_SUCCESS && cuCtxSynchronize() == CUDA_SUCCESS, "launching on");
}

static void way_shutdown_twice(void)
{
    way_return();
    shut_rigel_down();
    shut_rigel_down();
}

static void *shut_down(void *unused)
{
    shut_rigel_down();
    return unused;
}

static void way_shutdown_in_thread(void)
{
    way_return();
    in_a_thread(shut_down, true);
}

static void way_shutdown_in_many_threads_and_exit(void)
{
    way_return();
    for (int i = 0; i < THREADS; i++)
        in_a_thread(shut_down, false);
    exit(7);
}

static void way_shutdown_while_launching(void)
{
    uint64_t before[COUNT_THREADS];
    start();
    start_launching();
    leaving();
    shut_rigel_down();
    for (int i = 0; i < COUNT_THREADS; i++)
        before[i] = __atomic_load_n(&counts->of[i].accepted, __ATOMIC_RELAXED);
    for (int i = 0; i < COUNT_THREADS; i++)
        while (before[i] && __atomic_load_n(&counts->of[i].accepted, __ATOMIC_RELAXED) < before[i] + ENOUGH)
            usleep(100);
    join_launching();
    need(cuCtxSynchronize() == CUDA_SUCCESS, "cuCtxSynchronize");
}

static void way_shutdown_in_handler_from_before_cuda(void)
{
    atexit(shut_rigel_down);
    way_return();
}

/* ---- forking ---- */

static void tell_end_of(pid_t child)
{
    int status = 0;
    while (waitpid(child, &status, 0) < 0)
        need(errno == EINTR, "waitpid");
    tell("child", WIFEXITED(status), WEXITSTATUS(status), WIFSIGNALED(status) ? WTERMSIG(status) : 0);
}

/* Forks with the GPU at work; the child does that, the parent goes on. */
static void fork_and(void (*child)(void))
{
    start();
    launch_some(20);
    pid_t pid = fork();
    if (pid == 0)
        child();
    tell_end_of(pid);
    launch_some(20);
    need(cuCtxSynchronize() == CUDA_SUCCESS, "cuCtxSynchronize");
    leaving();
}

static void child_exits(void)
{
    exit(3);
}

static void child_exits_at_once(void)
{
    _exit(3);
}

static void child_exits_quickly(void)
{
    quick_exit(3);
}

static void child_aborts(void)
{
    abort();
}

/* The counts are shared, so this one is not counted in. */
static void child_launches(void)
{
    uint64_t n = 1;
    void *params[] = {&n, &n};
    alarm(20);
    tell("init", cuInit(0), cuCtxSetCurrent(the_context), 0);
    tell("launch", cuLaunchKernel(the_kernel, 1, 1, 1, 32, 1, 1, 0, NULL, params, NULL), cuCtxSynchronize(),
         cuMemAlloc_v2(&device_memory, 4096));
    exit(3);
}

static void child_shuts_rigel_down(void)
{
    shut_rigel_down();
    exit(3);
}

static void child_becomes_another(void)
{
    execl("/proc/self/exe", "programs", "return", (char *)NULL);
    _exit(98);
}

static void way_fork_exit(void)
{
    fork_and(child_exits);
}

static void way_fork_immediate_exit(void)
{
    fork_and(child_exits_at_once);
}

static void way_fork_quick_exit(void)
{
    fork_and(child_exits_quickly);
}

static void way_fork_abort(void)
{
    fork_and(child_aborts);
}

static void way_fork_launch(void)
{
    fork_and(child_launches);
}

static void way_fork_shutdown(void)
{
    fork_and(child_shuts_rigel_down);
}

static void way_fork_exec(void)
{
    fork_and(child_becomes_another);
}

/* Without the handlers of pthread_atfork, as clone() has it. */
static void way_bare_fork(void)
{
    start();
    launch_some(20);
    pid_t pid = _Fork();
    if (pid == 0) {
        shut_rigel_down();
        _exit(3);
    }
    tell_end_of(pid);
    launch_some(20);
    need(cuCtxSynchronize() == CUDA_SUCCESS, "cuCtxSynchronize");
    leaving();
}

static void way_fork_while_launching(void)
{
    start();
    start_launching();
    for (int i = 0; i < 3; i++) {
        pid_t pid = fork();
        if (pid == 0)
            child_launches();
        tell_end_of(pid);
    }
    join_launching();
    need(cuCtxSynchronize() == CUDA_SUCCESS, "cuCtxSynchronize");
    leaving();
}

static void way_fork_before_cuda(void)
{
    open_counts();
    pid_t pid = fork();
    start();
    launch_some(20);
    need(cuCtxSynchronize() == CUDA_SUCCESS, "cuCtxSynchronize");
    if (pid == 0)
        exit(3);
    tell_end_of(pid);
    leaving();
}

static void way_spawn(void)
{
    extern char **environ;
    char *arguments[] = {"programs", "return", NULL};
    pid_t pid;
    start();
    launch_some(20);
    need(posix_spawn(&pid, "/proc/self/exe", NULL, NULL, arguments, environ) == 0, "posix_spawn");
    tell_end_of(pid);
    launch_some(20);
    leaving();
}

/* ---- for others ---- */

/* Keeps the GPU until a line comes, and then leaves as it says. */
static void way_busy(void)
{
    char how[32] = "";
    start();
    need(launch(long_ns()) == CUDA_SUCCESS, "cuLaunchKernel");
    tell("busy", 0, 0, 0);
    need(read(STDIN_FILENO, how, sizeof how - 1) >= 0, "reading");
    leaving();
    if (strncmp(how, "exit", 4) == 0)
        exit(7);
    if (strncmp(how, "quick_exit", 10) == 0)
        quick_exit(7);
    if (strncmp(how, "shutdown", 8) == 0) {
        shut_rigel_down();
        need(read(STDIN_FILENO, how, sizeof how) >= 0, "reading");
        exit(7);
    }
    kill(getpid(), strncmp(how, "abort", 5) == 0 ? SIGABRT : SIGKILL);
}

/* Says that it begins, launches, and says that it is done. */
static void way_wait_for_turn(void)
{
    start();
    tell("begun", 0, 0, 0);
    launch_some(40);
    need(cuCtxSynchronize() == CUDA_SUCCESS, "cuCtxSynchronize");
    leaving();
}

static const struct {
    const char *name;
    void (*body)(void);
} ways[] = {
    {"return", way_return},
    {"return-when-done", way_return_when_done},
    {"without-launching", way_without_launching},
    {"exit", way_exit},
    {"exit-in-thread", way_exit_in_thread},
    {"exit-while-waiting", way_exit_while_waiting},
    {"exit-while-launching", way_exit_while_launching},
    {"immediate-exit-while-launching", way_immediate_exit_while_launching},
    {"quick-exit-while-launching", way_quick_exit_while_launching},
    {"abort-while-launching", way_abort_while_launching},
    {"main-ends-before-its-threads", way_main_ends_before_its_threads},
    {"sigterm", way_sigterm},
    {"sigint", way_sigint},
    {"sigkill", way_sigkill},
    {"sigsegv", way_sigsegv},
    {"sigterm-handler-exits", way_sigterm_handler_exits},
    {"signal-amid-launching", way_signal_amid_launching},
    {"handler-from-before-cuda", way_handler_from_before_cuda},
    {"handler-from-after-cuda", way_handler_from_after_cuda},
    {"handlers-around-cuda-and-launching", way_handlers_around_cuda_and_launching},
    {"shutdown", way_shutdown},
    {"shutdown-twice", way_shutdown_twice},
    {"shutdown-in-thread", way_shutdown_in_thread},
    {"shutdown-in-many-threads-and-exit", way_shutdown_in_many_threads_and_exit},
    {"shutdown-while-launching", way_shutdown_while_launching},
    {"shutdown-in-handler-from-before-cuda", way_shutdown_in_handler_from_before_cuda},
    {"fork-exit", way_fork_exit},
    {"fork-immediate-exit", way_fork_immediate_exit},
    {"fork-quick-exit", way_fork_quick_exit},
    {"fork-abort", way_fork_abort},
    {"fork-launch", way_fork_launch},
    {"fork-shutdown", way_fork_shutdown},
    {"fork-exec", way_fork_exec},
    {"bare-fork", way_bare_fork},
    {"fork-while-launching", way_fork_while_launching},
    {"fork-before-cuda", way_fork_before_cuda},
    {"spawn", way_spawn},
    {"busy", way_busy},
    {"wait-for-turn", way_wait_for_turn},
};

int main(int argc, char **argv)
{
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        if (argc < 2) {
            puts(ways[i].name);
        } else if (strcmp(argv[1], ways[i].name) == 0) {
            begin();
            ways[i].body();
            return 5;
        }
    }
    return argc < 2 ? 0 : 97;
}
