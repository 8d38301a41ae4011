/* thread.h: threads of Rigel's own, in programs that know nothing of them. */
#ifndef RG_THREAD_H
#define RG_THREAD_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

/* What sched_getattr(2) and sched_setattr(2) take: struct sched_attr of linux/sched/types.h, which cannot be included beside every sched.h. */
typedef struct {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime_ns, deadline_ns, period_ns;
} rg_thread_attributes;

/* rg_own_threads: how many Rigel has started in this process, but for those that have ended before it does. */
extern _Atomic uint32_t rg_own_threads;

/*
 * rg_thread_start: a thread that runs `main` on `argument`. All signals are blocked in it: the program's handlers run in the program's threads.
 * False if the system has none.
 */
bool rg_thread_start(pthread_t *thread, void *(*main)(void *), void *argument);

/*
 * rg_thread_is_prompt: of the calling thread, one of Rigel's: what it is called (15 characters at most), and that it runs as soon as it is
 * woken, also where other programs keep the processors busy. For that it asks for a short slice of its processor: Linux lets a thread
 * whose slice ends sooner run first (EEVDF; sched_setattr(2)), and it has not used any, as it sleeps. It takes no privilege, and its nice value stays.
 * With four busy programs for each processor the slowest hundredth of wake-ups took 4 ms without, and 0.03 ms at most with it (native/bench/wake.c).
 */
void rg_thread_is_prompt(const char *name);

/* rg_join: joins a thread of Rigel's within 200 ms. False if it did not end, since the driver did not return to it, say. */
bool rg_join(pthread_t thread);

#endif
