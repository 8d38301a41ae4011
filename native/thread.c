/* thread.c: starts, favours and joins threads of Rigel's own. */
#include "thread.h"

#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

_Atomic uint32_t rg_own_threads;

bool rg_thread_start(pthread_t *thread, void *(*main)(void *), void *argument)
{
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    bool ok = pthread_create(thread, NULL, main, argument) == 0;
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    atomic_fetch_add(&rg_own_threads, ok);
    return ok;
}

void rg_thread_is_prompt(const char *name)
{
    enum { SLICE_NS = 100000 /* the shortest that Linux takes; before 6.12, and where this is refused, nothing changes */ };
    rg_thread_attributes a = {0};
    prctl(PR_SET_NAME, name);
    prctl(PR_SET_TIMERSLACK, 1000);
    if (syscall(SYS_sched_getattr, 0, &a, sizeof(a), 0) != 0 || a.policy != SCHED_OTHER)
        return;
    a.runtime_ns = SLICE_NS;
    syscall(SYS_sched_setattr, 0, &a, 0);
}

bool rg_join(pthread_t thread)
{
    struct timespec limit;
    clock_gettime(CLOCK_REALTIME, &limit);
    limit.tv_nsec += 200000000;
    if (limit.tv_nsec >= 1000000000) {
        limit.tv_sec++;
        limit.tv_nsec -= 1000000000;
    }
    return pthread_timedjoin_np(thread, NULL, &limit) == 0;
}
