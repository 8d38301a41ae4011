/*
 * arrivals.c: bench-arrivals [ROUNDS]: what it costs a program that Rigel watches its sockets (native/arrivals.c).
 *
 * A client with nothing to foresee sends one byte to another process over TCP, which sends it back, 3,000 times without that and 3,000 times with it; each
 * round (default: 5) is a process of its own. A line for each: microseconds for one there and back, and what Rigel's threads have of a processor meanwhile.
 */
#include "test/gate-testing.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/wait.h>

enum { TIMES = 3000 };

static int peer(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0), fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    CHECK_EQUAL(bind(listener, (struct sockaddr *)&address, size), 0);
    CHECK_EQUAL(listen(listener, 1), 0);
    CHECK_EQUAL(getsockname(listener, (struct sockaddr *)&address, &size), 0);
    if (fork() == 0) {
        char byte;
        int from = accept(listener, NULL, NULL);
        setsockopt(from, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        close(fd);
        while (read(from, &byte, 1) == 1 && write(from, &byte, 1) == 1)
            continue;
        _exit(0);
    }
    CHECK_EQUAL(connect(fd, (struct sockaddr *)&address, size), 0);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    close(listener);
    return fd;
}

static double seconds(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void there_and_back(const char *what, int fd)
{
    char byte = 0;
    double began = seconds(CLOCK_MONOTONIC), all = seconds(CLOCK_PROCESS_CPUTIME_ID), own = seconds(CLOCK_THREAD_CPUTIME_ID);
    for (int i = 0; i < TIMES; i++) {
        CHECK_EQUAL(write(fd, &byte, 1), 1);
        CHECK_EQUAL(read(fd, &byte, 1), 1);
    }
    double took = seconds(CLOCK_MONOTONIC) - began;
    double rigels = seconds(CLOCK_PROCESS_CPUTIME_ID) - all - (seconds(CLOCK_THREAD_CPUTIME_ID) - own);
    printf("%s %.1f us, %.2f of a processor", what, took / TIMES * 1e6, rigels / took);
}

static void one_round(void)
{
    int fd = peer();
    become_one_to_stay_with();
    there_and_back("unwatched", fd);
    rg_stay_beat(0, true);
    rg_arrivals_beat();
    usleep(50000); /* its thread has found the socket */
    there_and_back("; watched", fd);
    puts("");
    close(fd);
    CHECK(wait(NULL) > 0);
    done();
}

int main(int argc, char **argv)
{
    int rounds = argc > 1 ? atoi(argv[1]) : 5, failures = 0;
    if (rounds < 1)
        return fprintf(stderr, "bench-arrivals: expected 1 round or more\n"), 2;
    ensure_environment("LD_LIBRARY_PATH", in_build_folder("sim"), argv);
    setvbuf(stdout, NULL, _IONBF, 0);
    while (rounds--)
        RUN(one_round);
    return failures != 0;
}
