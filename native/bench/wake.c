/*
 * wake.c: bench-wake [PROGRAMS [WAKES]]: how long a thread takes to run once it is woken, beside so many programs that keep the processors
 * busy (default: 4 for each), without rg_thread_is_prompt and with it, in turn, three times.
 *
 * A thread that sleeps on a word (futex) is woken every 3 to 6 ms, WAKES times (default: 1000). A line for each time: p50, p99 and the longest, in
 * microseconds.
 */
#include "thread.h"

#include <limits.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { ROUNDS = 3, FOR_EACH = 4, WAKES = 1000, MOST = 100000 };

static _Atomic uint32_t word, ran;
static _Atomic uint64_t woken_ns;
static uint64_t took_ns[MOST];
static bool prompt;

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Until it has been woken so many times. */
static void *sleeper(void *wakes)
{
    if (prompt)
        rg_thread_is_prompt("prompt");
    else
        prctl(PR_SET_TIMERSLACK, 1000);
    for (uint32_t seen = 0; seen < *(uint32_t *)wakes;) {
        syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
        if (atomic_load(&word) == seen)
            continue;
        took_ns[seen++] = now_ns() - atomic_load(&woken_ns);
        atomic_store(&ran, seen);
    }
    return NULL;
}

static int by_size(const void *a, const void *b)
{
    uint64_t one = *(const uint64_t *)a, other = *(const uint64_t *)b;
    return (one > other) - (one < other);
}

static void one_round(uint32_t wakes)
{
    pthread_t thread;
    unsigned seed = 1;
    atomic_store(&word, 0);
    atomic_store(&ran, 0);
    if (!rg_thread_start(&thread, sleeper, &wakes)) {
        fputs("bench-wake: no thread\n", stderr);
        exit(1);
    }
    for (uint32_t i = 1; i <= wakes; i++) {
        const struct timespec gap = {0, 3000000 + rand_r(&seed) % 3000000};
        nanosleep(&gap, NULL);
        while (atomic_load(&ran) != i - 1)
            nanosleep(&(struct timespec){0, 1000000}, NULL);
        atomic_store(&woken_ns, now_ns());
        atomic_store(&word, i);
        syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
    }
    pthread_join(thread, NULL);
    qsort(took_ns, wakes, sizeof(*took_ns), by_size);
    printf("%-8s p50 %6.1f  p99 %7.1f  longest %7.1f us\n", prompt ? "prompt" : "usual", (double)took_ns[wakes / 2] / 1e3,
           (double)took_ns[wakes * 99ull / 100] / 1e3, (double)took_ns[wakes - 1] / 1e3);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    long programs = argc > 1 ? atol(argv[1]) : FOR_EACH * processors, wakes = argc > 2 ? atol(argv[2]) : WAKES;
    if (programs < 0 || programs > 100000 || wakes < 1 || wakes > MOST) {
        fprintf(stderr, "usage: bench-wake [PROGRAMS [WAKES]]: up to 100000, 1 to %d\n", MOST);
        return 2;
    }
    printf("%ld busy programs, %ld processors\n", programs, processors);
    fflush(stdout);
    for (long i = 0; i < programs; i++)
        if (fork() == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            for (volatile uint64_t n = 0;; n++)
                continue;
        }
    for (int i = 0; i < 2 * ROUNDS; i++) {
        prompt = i % 2;
        one_round((uint32_t)wakes);
    }
    return 0; /* with which the programs end */
}
