/*
 * testing.h: what the native test programs of librigel.so share.
 *
 * A case is a function that runs in a child process of its own, because a client is a process. A check that fails says
 * where and ends the case. Exit status of a program: 0 passed, 77 cannot run here (the last line says why), else failed.
 * No check depends on how fast the machine is: cases wait for conditions, with a limit only to end a hang.
 */
#ifndef RIGEL_TESTING_H
#define RIGEL_TESTING_H

#include <dlfcn.h>
#include <errno.h>
#include <glob.h>
#include <libgen.h>
#include <limits.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
            _exit(1); \
        } \
    } while (0)
#define CHECK_EQUAL(got, want) \
    do { \
        long long got_ = (long long)(got), want_ = (long long)(want); \
        if (got_ != want_) { \
            fprintf(stderr, "%s:%d: %s is %lld, expected %lld\n", __FILE__, __LINE__, #got, got_, want_); \
            _exit(1); \
        } \
    } while (0)

/* Waits until the condition holds; a minute means it never will. */
#define WAIT_FOR(condition) \
    do { \
        for (int tries_ = 0; !(condition); tries_++) { \
            if (tries_ > 60000) { \
                fprintf(stderr, "%s:%d: never came true: %s\n", __FILE__, __LINE__, #condition); \
                _exit(1); \
            } \
            usleep(1000); \
        } \
    } while (0)

/* `name` in the folder of this program, where everything is that `make` builds. Never freed. */
static inline const char *in_build_folder(const char *name)
{
    char self[PATH_MAX], *path = NULL;
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    self[n > 0 ? n : 0] = 0;
    if (asprintf(&path, "%s/%s", dirname(self), name) < 0)
        abort();
    return path;
}

/* Starts this program again with `name=value` set, unless it is already: for variables that the loader reads. */
static inline void ensure_environment(const char *name, const char *value, char **argv)
{
    const char *now = getenv(name);
    if (now && strcmp(now, value) == 0)
        return;
    setenv(name, value, 1);
    execv("/proc/self/exe", argv);
    perror("execv");
    _exit(1);
}

/* A file name of this process in memory-backed storage where there is some. Never freed. */
static inline const char *scratch(const char *what)
{
    char *path = NULL;
    if (asprintf(&path, "%s/rigel-test-%d-%s", access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp", (int)getpid(), what) < 0)
        abort();
    return path;
}

/* What a case has left that failed, or was killed. */
static inline void remove_scratch(pid_t pid)
{
    char pattern[64];
    glob_t found;
    snprintf(pattern, sizeof pattern, "%s/rigel-test-%d-*", access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp", (int)pid);
    if (glob(pattern, GLOB_NOSORT, NULL, &found) != 0)
        return;
    for (size_t i = 0; i < found.gl_pathc; i++)
        unlink(found.gl_pathv[i]);
    globfree(&found);
}

/* Runs one case in a child. */
static inline int run_case(const char *name, void (*body)(void))
{
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        alarm(100);
        body();
        exit(0);
    }
    int status = 0;
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
        continue;
    remove_scratch(pid);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
        return 0;
    if (WIFSIGNALED(status))
        fprintf(stderr, "%s: ended by signal %d\n", name, WTERMSIG(status));
    else
        fprintf(stderr, "%s: failed\n", name);
    return 1;
}
#define RUN(body) failures += run_case(#body, body)

#endif
