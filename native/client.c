/*
 * client.c: how a process becomes a client, and how it stops being one.
 *
 * Attaching happens at the first successful cuInit, never in a constructor. Whatever goes wrong, the program runs on bare and
 * one line on standard error says why and what to do.
 *
 * Leaving: at exit handlers registered after cuInit run before the driver's own (handlers run in reverse order), so ours is
 * registered there. It turns every hook into a pass-through and makes no CUDA call; handles, events and streams are
 * left to the driver. After fork the child is no client: it passes through and owns no slot.
 */
#include "guard.h"
#include "nvtx.h"
#include "record-client.h"
#include "rigel.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/*
 * To standard error, if that takes it at once: a pipe that nobody empties must not keep the program waiting, and one that nobody reads must
 * not end it. What a pipe has room for is a page at least, so a line is written whole.
 */
static void write_line(const char *line, size_t bytes)
{
    int error = errno;
    struct pollfd out = {.fd = STDERR_FILENO, .events = POLLOUT};
    if (poll(&out, 1, 0) == 1 && out.revents == POLLOUT) {
        sigset_t pipe, before, pending;
        sigemptyset(&pipe);
        sigaddset(&pipe, SIGPIPE);
        bool blocked = pthread_sigmask(SIG_BLOCK, &pipe, &before) == 0;
        bool waited = blocked && sigpending(&pending) == 0 && sigismember(&pending, SIGPIPE);
        if (blocked && write(STDERR_FILENO, line, bytes) < 0 && errno == EPIPE && !waited)
            sigtimedwait(&pipe, NULL, &(struct timespec){0});
        if (blocked)
            pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    errno = error;
}

void rg_say(const char *format, ...)
{
    char line[1024];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(line, sizeof line - 1, format, args);
    va_end(args);
    if (n < 0)
        return;
    if (n > (int)sizeof line - 2)
        n = sizeof line - 2;
    line[n++] = '\n';
    write_line(line, (size_t)n);
}

static void after_fork_in_child(void)
{
    rg_members_forked();
    rg_channel_off();
    /* Their words are in memory that the two share. */
    atomic_store(&rg.stays, 0);
    atomic_store(&rg.stays_open, 0);
}

static pid_t client_pid;                  /* a child made without the handlers of fork (clone) is not the client */
static _Atomic(uintptr_t) shutting_down;  /* the thread that does, or did: address of its rg_thread_mark; 0: nobody yet */
static _Atomic bool shut_down;

/* Exit, while another thread shuts Rigel down: what that thread still has to write must not be lost. It takes some 0.2 s where the
 * driver does not return to one of Rigel's threads; a handler that has interrupted it waits for nothing. */
static void wait_for_shutdown(void)
{
    if (atomic_load(&shutting_down) == (uintptr_t)&rg_thread_mark)
        return;
    for (int tries = 0; tries < 10000 && !atomic_load(&shut_down); tries++)
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
}

void rigel_shutdown(void)
{
    uintptr_t nobody = 0;
    if (client_pid != getpid())
        return;
    if (!atomic_compare_exchange_strong(&shutting_down, &nobody, (uintptr_t)&rg_thread_mark)) {
        wait_for_shutdown();
        return;
    }
    /* In this order: who ends a bypass just now (rigel_bypass_end) looks at `bypass` last. */
    bool bypassed = atomic_exchange(&rg.bypass, RG_BYPASS_NONE) == RG_BYPASS_ON;
    bool was_client = atomic_exchange(&rg.mode, RG_MODE_BARE) != RG_MODE_BARE || bypassed;
    rg_changed();
    if (was_client) {
        rg_gate_settle();
        rg_preempt_stop();
        rg_arrivals_stop();
        rg_record_stop();
        rg_agent_stop();
        rg_calls_add();
        rg_members_leave();
    }
    atomic_store(&shut_down, true);
}

/* RIGEL_WEIGHT in thousandths: a number from 0.01 to 100. The launcher has checked it; anything else counts as 1. */
static uint32_t weight_of(const char *text)
{
    char *end = NULL;
    double value = text && *text ? strtod(text, &end) : 1;
    if ((end && *end) || !(value >= 0.01 && value <= 100))
        value = 1;
    return (uint32_t)(value * RG_POLICY_WEIGHT_ONE + 0.5);
}

/*
 * The client's account and its limit. Where this process is told none it is that of the client's others, if some live: not one that
 * was told to those that have ended. Where one was asked for it stays.
 */
static void join_account(const char *name)
{
    static rg_account alone; /* more names than there are accounts: the limit is then this process's */
    rg.account = rg_account_join(rg.segment, rg.slot_index, name);
    if (!rg.account) {
        atomic_store(&alone.slots, 1ull << rg.slot_index);
        rg.account = &alone;
    }
    const char *memory = getenv("RIGEL_MEMORY");
    char *end = NULL;
    errno = 0;
    bool told = memory && *memory;
    unsigned long long limit = told ? strtoull(memory, &end, 10) : 0;
    if (told && (*end || errno || !limit || memory[0] < '0' || memory[0] > '9')) {
        rg_say("rigel: RIGEL_MEMORY is \"%s\", expected a number of bytes above 0; it is as if it were not set", memory);
        told = false;
        limit = 0;
    }
    uint64_t before = atomic_load(&rg.account->limit_bytes); /* before `wanted_limit`, which is set before the limit is */
    if (!told && !rg_account_alone(rg.segment, rg.account, rg.slot_index))
        return;
    /* Another process may take away the limit of those that have ended just then. */
    while (!atomic_load(&rg.account->wanted_limit) &&
           !atomic_compare_exchange_strong(&rg.account->limit_bytes, &before, limit) && told)
        continue;
}

static void attach(void)
{
    const char *path = getenv("RIGEL_SEGMENT"), *class = getenv("RIGEL_CLASS"), *name = getenv("RIGEL_NAME");
    const char *disable = getenv("RIGEL_DISABLE");
    char why[512], fallback[32];
    if (!path || !*path || (disable && *disable && strcmp(disable, "0") != 0))
        return;
    uint32_t mode = RG_MODE_BEST_EFFORT, number = RG_CLASS_BEST_EFFORT;
    if (class && strcmp(class, "high") == 0) {
        mode = RG_MODE_HIGH;
        number = RG_CLASS_HIGH;
    } else if (!class || strcmp(class, "best-effort") != 0) {
        rg_say("rigel: RIGEL_CLASS is \"%s\", expected \"high\" or \"best-effort\"; running without Rigel", class ? class : "");
        return;
    }
    if (!name || !*name) {
        snprintf(fallback, sizeof fallback, "pid-%d", (int)getpid());
        name = fallback;
    }
    rg.segment = rg_segment_open(path, why, sizeof why);
    if (!rg.segment) {
        rg_say("rigel: %s; running without Rigel (start it with `rigel launch` or `rigel run`, as the same user)", why);
        return;
    }
    /* It may have been asked to be of another class before this process of it began. */
    number = rg_account_class(rg.segment, name, number);
    mode = number == RG_CLASS_HIGH ? RG_MODE_HIGH : RG_MODE_BEST_EFFORT;
    rg.slot_index = rg_segment_claim(rg.segment, name, number, rg_now_ns());
    if (rg.slot_index < 0) {
        rg_say("rigel: all %d client slots of %s are taken; running without Rigel (end other clients first)", RG_MAX_CLIENTS,
            path);
        return;
    }
    rg.slot = &rg.segment->clients[rg.slot_index];
    join_account(name);
    rg_trace_attach(rg.segment, rg.slot_index);
    rg_durations_attach();
    uint32_t policy = atomic_load(&rg.segment->settings.policy);
    rg_steer_attach(path);
    rg.set_priorities = policy != RG_POLICY_NONE && policy != RG_POLICY_FAIR;
    if (policy == RG_POLICY_FAIR)
        mode = RG_MODE_FAIR;
    else if (policy == RG_POLICY_ORION && mode == RG_MODE_HIGH)
        mode = RG_MODE_SHOWN;
    uint32_t weight = weight_of(getenv("RIGEL_WEIGHT"));
    atomic_store(&rg.slot->weight, weight);
    atomic_store(&rg.slot->parent, 0);
    atomic_store(&RG_PROCESS->inverse_weight, rg_policy_inverse(weight));
    const char *threads = getenv("RIGEL_THREADS");
    rg_guard_attach();
    /* Before there is anything to leave: another thread may fork, or exit, at any moment. */
    client_pid = getpid();
    pthread_atfork(NULL, NULL, after_fork_in_child);
    atexit(rigel_shutdown);
    at_quick_exit(rigel_shutdown);
    rg_members_attach(mode, threads && strcmp(threads, "1") == 0);
    if (rg_record_attach())
        atomic_fetch_or(&rg.mode, RG_MODE_RECORDED); /* before any launch */
    if (!rg_agent_start()) {
        atomic_store(&rg.mode, RG_MODE_BARE);
        rg_changed();
        rg_members_leave();
        rg_say("rigel: cannot start the agent thread; running without Rigel (check the limit on processes, ulimit -u)");
        return;
    }
    atomic_store(&rg.bypass, RG_BYPASS_OFF); /* it may be had from now on */
    if (atomic_load(&shutting_down)) /* which may have been before that */
        atomic_store(&rg.bypass, RG_BYPASS_NONE);
}

void rg_client_attach(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    static _Thread_local __attribute__((tls_model("initial-exec"))) bool inside; /* a tool that is found on the way (CUPTI) may call cuInit */
    if (inside)
        return;
    inside = true;
    pthread_once(&once, attach);
    inside = false;
    rg_nvtx_attach();
}
