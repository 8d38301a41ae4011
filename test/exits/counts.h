/*
 * counts.h: what all programs here share that end in all ways; C11 and C++17, with or without the CUDA runtime's headers.
 *
 * What they print is the same each time: the same program is run bare and under Rigel, and compared. They know nothing of Rigel
 * but the name of rigel_shutdown.
 *
 * What a program has launched it writes to the file EXITS_COUNTS, which outlives it: for each thread the launches that it has
 * begun and those that have been accepted, and, from the moment when it leaves, how many had been accepted by then.
 */
#ifndef RIGEL_EXITS_COUNTS_H
#define RIGEL_EXITS_COUNTS_H

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

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

/* This thread's place in the file. */
static inline uint64_t count_place(void)
{
    if (!count_index)
        count_index = __atomic_add_fetch(&counts->threads, 1, __ATOMIC_RELAXED);
    need(count_index <= COUNT_THREADS, "a place for another thread");
    return count_index - 1;
}

static inline void count_begun(void)
{
    __atomic_add_fetch(&counts->of[count_place()].begun, 1, __ATOMIC_RELAXED);
}

static inline void count_accepted(void)
{
    __atomic_add_fetch(&counts->of[count_place()].accepted, 1, __ATOMIC_RELAXED);
}

/* From here on the program is on its way out: what was accepted by now must not be missing from anybody's count. */
static inline void leaving(void)
{
    uint64_t sum = 0;
    for (int i = 0; i < COUNT_THREADS; i++)
        sum += __atomic_load_n(&counts->of[i].accepted, __ATOMIC_RELAXED);
    __atomic_store_n(&counts->left, sum + 1, __ATOMIC_RELAXED);
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

/* How long a kernel lasts that is not meant to end: EXITS_LONG_S, or an hour. */
static inline uint64_t long_ns(void)
{
    const char *seconds = getenv("EXITS_LONG_S");
    return (seconds ? strtoull(seconds, NULL, 10) : 3600) * 1000000000u;
}

/* What hangs ends, and what crashes leaves nothing behind. */
static inline void begin(void)
{
    struct rlimit no_core = {0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    alarm(120);
}

/* A line that is written at once: stdio may have been closed by now. */
static inline void tell(const char *what, int a, int b, int c)
{
    char line[128];
    int n = snprintf(line, sizeof line, "%s %d %d %d\n", what, a, b, c);
    need(write(STDOUT_FILENO, line, (size_t)n) == n, "writing");
}

#endif
