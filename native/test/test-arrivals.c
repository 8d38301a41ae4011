/*
 * test-arrivals.c: requests that are seen coming by what arrives at the program's sockets and pipes (arrivals.c): what is watched, when the GPU comes over,
 * and what the program may do meanwhile. As test-stay.c; when the GPU comes for which arrivals is in test-policy.c.
 */
#include "gate-testing.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

/* Like that of an agent that finds that the GPU may stay. */
static void beat(void)
{
    rg_stay_beat(0, true);
    rg_arrivals_beat();
}

static void become_a_server(void)
{
    become_one_to_stay_with();
    seg->settings.high_slice_us = 1; /* the GPU stays after no request */
}

static void request(void)
{
    launch(spin, NULL, 1000000);
    CHECK_EQUAL(cuStreamSynchronize(NULL), CUDA_SUCCESS);
}

/* A connection: what is sent into one end arrives at the other. */
typedef struct {
    int to, from;
} connection;

static connection a_pipe(void)
{
    int ends[2];
    CHECK_EQUAL(pipe(ends), 0);
    return (connection){ends[1], ends[0]};
}

static connection a_socket(void)
{
    int ends[2];
    CHECK_EQUAL(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    return (connection){ends[0], ends[1]};
}

static connection over_tcp(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    connection c = {socket(AF_INET, SOCK_STREAM, 0), -1};
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    CHECK_EQUAL(bind(listener, (struct sockaddr *)&address, size), 0);
    CHECK_EQUAL(listen(listener, 1), 0);
    CHECK_EQUAL(getsockname(listener, (struct sockaddr *)&address, &size), 0);
    CHECK_EQUAL(connect(c.to, (struct sockaddr *)&address, size), 0);
    c.from = accept(listener, NULL, NULL);
    CHECK(c.from >= 0);
    close(listener);
    return c;
}

static void send_one(connection c)
{
    CHECK_EQUAL(write(c.to, "x", 1), 1);
}

static void receive_one(connection c)
{
    char byte;
    CHECK_EQUAL(read(c.from, &byte, 1), 1);
}

/*
 * One comes, while there is nothing else, right after another one, or amid it; 10 ms of work of the program's own later it is launched, and 2 ms after
 * its end it is out of the next one's way.
 */
static enum { ALONE, AFTER, AMID } comes;
static void serve_one(connection c)
{
    if (comes == AFTER)
        request();
    if (comes == AMID)
        launch(spin, NULL, 5000000);
    send_one(c);
    if (comes == AMID)
        CHECK_EQUAL(cuStreamSynchronize(NULL), CUDA_SUCCESS);
    receive_one(c);
    usleep(10000);
    request();
    usleep(2000);
    beat();
}

static uint64_t foreseen(void)
{
    return atomic_load(&rg.slot->foreseen);
}

static void until_one_is_foreseen(connection c)
{
    uint64_t before = foreseen();
    for (int i = 0; i < 3000 && foreseen() == before; i++)
        serve_one(c);
    CHECK(foreseen() > before);
}

static void foresees(connection c)
{
    become_a_server();
    beat();
    until_one_is_foreseen(c);
    CHECK(rg.slot->ahead >= foreseen());
    until_one_is_foreseen(c);
    done();
}

static void foresees_by_a_pipe(void)
{
    foresees(a_pipe());
}

static void foresees_by_a_socket(void)
{
    foresees(a_socket());
}

static void foresees_by_tcp(void)
{
    foresees(over_tcp());
}

static void foresees_what_comes_right_after_a_request(void)
{
    comes = AFTER;
    foresees(a_pipe());
}

/*
 * Also beside such as come in two parts, the first right after a request and the second when that is longer ago: that is no other one, beside which the
 * first has come to nothing.
 */
static void foresees_it_beside_what_comes_in_parts(void)
{
    enum { MANY = 10 };
    become_a_server();
    connection c = a_pipe();
    beat();
    int did = 0;
    for (int i = 0; i < 3000 && did < MANY; i++) {
        bool in_parts = i % 2;
        request();
        if (in_parts) {
            usleep(500);
            send_one(c);
            usleep(500);
        }
        uint64_t before = foreseen();
        send_one(c);
        for (int k = 0; k <= in_parts; k++)
            receive_one(c);
        usleep(10000);
        did += !in_parts && foreseen() > before;
        request();
        usleep(2000);
        beat();
    }
    CHECK_EQUAL(did, MANY);
    done();
}

static void foresees_what_comes_amid_one(void)
{
    comes = AMID;
    foresees(a_pipe());
}

/* Also where it is looked as the end of that one is noted: at first the client is not busy any more, and when that was is not known. */
static void *notes_an_end(void *unused)
{
    usleep(2000);
    atomic_store(&RG_PROCESS->busy[0], 0);
    usleep(5000);
    atomic_store(&RG_PROCESS->busy[0], 1);
    return unused;
}

static void as_the_end_is_noted(void)
{
    comes = AMID;
    become_a_server();
    connection c = a_pipe();
    beat();
    bool did = false;
    for (int round = 0; round < 30 && !did; round++) { /* some are left out */
        pthread_t thread;
        until_one_is_foreseen(c);
        CHECK_EQUAL(pthread_create(&thread, NULL, notes_an_end, NULL), 0);
        launch(spin, NULL, 30000000);
        send_one(c);
        CHECK_EQUAL(cuStreamSynchronize(NULL), CUDA_SUCCESS);
        receive_one(c);
        uint64_t before = foreseen();
        usleep(10000);
        did = foreseen() > before;
        CHECK_EQUAL(pthread_join(thread, NULL), 0);
        request();
        usleep(2000);
        beat();
    }
    CHECK(did);
    done();
}

/* One that has come before the one that is served first was launched, and is not read until that is over. */
static void foresees_what_has_come_before_another_began(void)
{
    become_a_server();
    connection c = a_pipe();
    beat();
    bool did = false;
    for (int i = 0; i < 3000 && !did; i++) {
        send_one(c);
        send_one(c);
        receive_one(c);
        usleep(10000);
        launch(spin, NULL, 5000000);
        uint64_t before = foreseen();
        CHECK_EQUAL(cuStreamSynchronize(NULL), CUDA_SUCCESS);
        receive_one(c);
        usleep(10000);
        did = foreseen() > before;
        request();
        usleep(2000);
        beat();
    }
    CHECK(did);
    done();
}

/*
 * How many tries have done it, of which nearly all have to: one that has not, as where the machine is late, takes back three. Where every other one
 * fails, to get to ten so is as unlikely as ten in a row.
 */
static int more_of(int nearly_all, bool did)
{
    return did ? nearly_all + 1 : nearly_all > 3 ? nearly_all - 3 : 0;
}

/* What is left over, which the program does not read before the next one, is none that has come: each is foreseen, and nothing else. */
static void foresees_where_something_is_left_unread(void)
{
    enum { MANY = 10 };
    become_a_server();
    connection c = a_pipe();
    beat();
    send_one(c);
    int nearly_all = 0;
    for (int i = 0; i < 800 && nearly_all < MANY; i++) {
        uint64_t before = foreseen();
        send_one(c);
        receive_one(c);
        usleep(i % 4 ? 30000 + i % 7 * 1500 : 10000); /* most begin long before it is looked whether they have */
        bool only = foreseen() > before;
        launch(spin, NULL, 500000);
        before = foreseen();
        CHECK_EQUAL(cuStreamSynchronize(NULL), CUDA_SUCCESS);
        usleep(60000); /* for longer than another one would be waited for */
        nearly_all = more_of(nearly_all, only && foreseen() == before);
        beat();
    }
    CHECK_EQUAL(nearly_all, MANY);
    done();
}

/*
 * Nor does what the program reads after the request that it is of keep the next one from being foreseen, where that cannot be foreseen by it: what has
 * come with the request, or amid it.
 */
static void beside_what_is_read_later(bool amid)
{
    enum { MANY = 10 };
    become_a_server();
    connection c = a_pipe();
    beat();
    int nearly_all = 0;
    for (int i = 0; i < 800 && nearly_all < MANY; i++) {
        bool soon = i % 3 == 0; /* else so late that another one would not be waited for any more */
        usleep(soon ? 5000 : 60000);
        uint64_t before = foreseen();
        send_one(c);
        if (!amid)
            send_one(c);
        receive_one(c);
        usleep(soon ? 11000 : 10000); /* so that it is not decided by the machine's being late */
        if (soon)
            nearly_all = more_of(nearly_all, foreseen() > before);
        launch(spin, NULL, 5000000);
        if (amid)
            send_one(c);
        CHECK_EQUAL(cuStreamSynchronize(NULL), CUDA_SUCCESS);
        receive_one(c);
        beat();
    }
    CHECK_EQUAL(nearly_all, MANY);
    done();
}
static void foresees_beside_what_is_read_later(void)
{
    beside_what_is_read_later(false);
}
static void foresees_beside_what_comes_amid_and_is_read_later(void)
{
    beside_what_is_read_later(true);
}

/* Nor does what came to nothing, once the GPU has waited for it: the next one is foreseen, also within the time for which one might begin yet. */
static void foresees_behind_what_came_to_nothing(void)
{
    enum { MANY = 10 };
    become_a_server();
    seg->settings.stay_us = 5000;
    connection c = a_pipe();
    beat();
    int did = 0;
    for (int i = 0; i < 800 && did < MANY; i++) {
        bool is_behind = i % 8 == 7;
        if (is_behind) {
            send_one(c);
            receive_one(c);
            usleep(44000);
        }
        uint64_t before = foreseen();
        send_one(c);
        receive_one(c);
        usleep(10000);
        did += is_behind && foreseen() > before;
        request();
        usleep(2000);
        beat();
    }
    CHECK_EQUAL(did, MANY);
    done();
}

/* And has streams stop, with the GPU there before the launch. */
static void has_streams_stop(void)
{
    become_a_server();
    connection c = a_pipe();
    beat();
    for (;;) {
        until_one_is_foreseen(c);
        atomic_store(&seg->stops[0].word[OTHER], RG_STOP_ARMED);
        uint64_t before = foreseen();
        send_one(c);
        for (int i = 0; i < 1000 && foreseen() == before; i++)
            usleep(100);
        receive_one(c);
        if (foreseen() > before)
            break; /* else it was one of those that are left out */
        request();
    }
    CHECK_EQUAL(atomic_load(&seg->stops[0].word[OTHER]), RG_STOP_STOPPED);
    CHECK(atomic_load(&rg.stays) & 1);
    request();
    CHECK(!(atomic_load(&rg.stays) & 1));
    done();
}

/* What comes for requests past Rigel: the GPU does not come for them. */
static void not_past_rigel(void)
{
    become_a_server();
    connection c = a_pipe();
    beat();
    until_one_is_foreseen(c);
    uint64_t before = foreseen();
    CHECK_EQUAL(rigel_bypass_begin(), 0);
    for (int i = 0; i < 4; i++) {
        send_one(c);
        usleep(60000); /* for longer than it would be waited for */
        receive_one(c);
    }
    CHECK_EQUAL(foreseen(), before);
    rigel_bypass_end();
    until_one_is_foreseen(c);
    done();
}

/* Best-effort streams do not go on between a request and one that has come amid it: they are to stop for that before the first is over. */
static void has_none_go_on_between_two(void)
{
    become_a_server();
    connection c = a_pipe();
    beat();
    bool did = false;
    for (int round = 0; round < 100 && !did; round++) { /* some are left out */
        for (int i = 0; i < 20; i++) { /* each follows at once */
            launch(spin, NULL, 2000000);
            send_one(c);
            usleep(1000);
            CHECK_EQUAL(cuStreamSynchronize(NULL), CUDA_SUCCESS);
            receive_one(c);
            request();
            usleep(2000);
            beat();
        }
        atomic_store(&seg->devices[0].coming_until_ns, 0);
        launch(spin, NULL, 1000);
        CHECK(atomic_load(&RG_PROCESS->busy[0]));
        send_one(c);
        for (int i = 0; i < 20 && !did; i++) {
            usleep(1000);
            did = atomic_load(&seg->devices[0].coming_until_ns) != 0;
        }
        CHECK(atomic_load(&RG_PROCESS->busy[0])); /* nobody has waited for it */
        CHECK_EQUAL(cuStreamSynchronize(NULL), CUDA_SUCCESS);
        receive_one(c);
        request();
    }
    CHECK(did);
    done();
}

/* ---- what is watched ---- */

/* The last descriptor of that kind; -1: there is none. */
static int last_of(const char *kind)
{
    DIR *d = opendir("/proc/self/fd");
    int found = -1;
    CHECK(d != NULL);
    for (struct dirent *e; (e = readdir(d));) {
        char path[300], what[64] = "";
        snprintf(path, sizeof path, "/proc/self/fd/%s", e->d_name);
        if (readlink(path, what, sizeof what - 1) > 0 && strcmp(what, kind) == 0)
            found = atoi(e->d_name) > found ? atoi(e->d_name) : found;
    }
    closedir(d);
    return found;
}

/* Those of Rigel's. */
static int own_epoll(void)
{
    return last_of("anon_inode:[eventpoll]");
}
static int own_eventfd(void)
{
    return last_of("anon_inode:[eventfd]");
}

/* How many files it watches that have, or had, that number. */
static int watched(int fd)
{
    char path[64], line[256];
    int found = 0;
    snprintf(path, sizeof path, "/proc/self/fdinfo/%d", own_epoll());
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof line, f)) {
        int target;
        found += sscanf(line, "tfd: %d", &target) == 1 && target == fd;
    }
    if (f)
        fclose(f);
    return found;
}

static bool watches(int fd)
{
    return watched(fd) != 0;
}

/* A server with one that is watched. */
static connection become_one_with_a_pipe(void)
{
    become_a_server();
    connection c = a_pipe();
    beat();
    WAIT_FOR(watches(c.from));
    return c;
}

/* One by a connection that is new, of which nothing is known, by what those before were like. */
static void foresees_by_a_new_connection(void)
{
    enum { TOO_FEW = RG_POLICY_ARRIVALS / 2 };
    become_a_server();
    connection first = a_pipe();
    beat();
    bool did = false;
    for (int round = 0; round < 30 && !did; round++) { /* some are left out, or late on a busy machine */
        until_one_is_foreseen(first);
        connection another = a_pipe();
        WAIT_FOR(watches(another.from));
        uint64_t before = foreseen();
        for (int i = 0; i < TOO_FEW; i++)
            serve_one(another);
        did = foreseen() > before;
    }
    CHECK(did);
    done();
}

/* Each by a connection of its own, at which nothing has come before. */
static void foresees_the_first_of_a_connection(void)
{
    become_a_server();
    connection first = a_pipe();
    beat();
    bool did = false;
    for (int round = 0; round < 30 && !did; round++) {
        until_one_is_foreseen(first);
        connection another = round % 2 ? a_socket() : a_pipe();
        WAIT_FOR(watches(another.from));
        usleep(20000); /* what it was ready for as it was added would be seen by now */
        uint64_t before = foreseen();
        serve_one(another);
        did = foreseen() > before;
    }
    CHECK(did);
    done();
}

/* A file system may have to ask somebody else for what this one is asked. */
static _Atomic int a_file = -1;
static _Atomic uint32_t asked;
int fstat(int fd, struct stat *s)
{
    asked += fd == a_file;
    return (int)syscall(SYS_newfstatat, fd, "", s, AT_EMPTY_PATH);
}

static void watches_sockets_and_pipes_alone(void)
{
    become_a_server();
    connection pipe = a_pipe(), tcp = over_tcp(), local = a_socket();
    int event = eventfd(0, 0), file = open("/dev/zero", O_RDONLY), kernels = socket(AF_NETLINK, SOCK_RAW, 0);
    CHECK(event >= 0 && file >= 0 && kernels >= 0);
    a_file = file;
    beat();
    for (int fds[] = {pipe.from, tcp.from, tcp.to, local.from, local.to}, i = 0; i < 5; i++)
        WAIT_FOR(watches(fds[i]));
    CHECK(!watches(event));
    CHECK(!watches(file));
    connection later = a_pipe(); /* is found */
    WAIT_FOR(watches(later.from));
    CHECK(!watches(event));
    CHECK(!watches(file));
    CHECK(!watches(kernels));
    CHECK_EQUAL(asked, 0);
    close(pipe.from);
    CHECK(!watches(pipe.from)); /* as if nobody had */
    CHECK_EQUAL(a_pipe().from, pipe.from);
    WAIT_FOR(watches(pipe.from));
    done();
}

/* What comes to a file that the program has closed, and its child has, is not taken for what comes to another one that has its number. */
static void another_has_the_number(void)
{
    connection c = become_one_with_a_pipe();
    int childs = dup(c.from);
    close(c.from);
    connection another = a_pipe();
    CHECK_EQUAL(another.from, c.from);
    WAIT_FOR(watched(another.from) == 2);
    send_one(c);
    WAIT_FOR(watched(another.from) == 1);
    until_one_is_foreseen(another);
    close(childs);
    done();
}

/* The numbers that the program's files get are as they would be. */
static void takes_no_number_of_the_programs(void)
{
    become_a_server();
    int before = eventfd(0, 0), after;
    beat();
    connection c = a_pipe();
    WAIT_FOR(watches(c.from));
    after = eventfd(0, 0);
    CHECK_EQUAL(c.from, before + 1);
    CHECK_EQUAL(after, before + 3);
    CHECK(own_epoll() > before + 100);
    CHECK(fcntl(own_epoll(), F_GETFD) & FD_CLOEXEC);
    done();
}

static void with_a_few_descriptors_alone(void)
{
    become_a_server();
    CHECK_EQUAL(setrlimit(RLIMIT_NOFILE, &(struct rlimit){24, 24}), 0);
    for (int i = 0; i < 3; i++) {
        beat();
        request();
    }
    CHECK_EQUAL(own_epoll(), -1);
    done();
}

/* Or with two left, which is one too few while it takes them: the program has both again. */
static void with_all_but_two_taken(void)
{
    int fds[64], n = 0;
    become_a_server();
    CHECK_EQUAL(setrlimit(RLIMIT_NOFILE, &(struct rlimit){64, 64}), 0);
    while ((fds[n] = dup(0)) >= 0)
        n++;
    CHECK(n > 2);
    close(fds[0]);
    close(fds[n - 1]);
    beat();
    CHECK_EQUAL(dup(0), fds[0]);
    CHECK_EQUAL(dup(0), fds[n - 1]);
    request();
    done();
}

/* Where there is nobody to give way, or it is not wanted, nothing is watched. */
static void watches_nothing_in_vain(void)
{
    become_a_server();
    connection c = a_pipe();
    seg->settings.arrivals = 0;
    beat();
    CHECK_EQUAL(own_epoll(), -1);
    seg->settings.arrivals = 1;
    beat();
    WAIT_FOR(watches(c.from));
    rg_stay_beat(0, false);
    rg_arrivals_beat();
    WAIT_FOR(!watches(c.from));
    beat();
    WAIT_FOR(watches(c.from));
    atomic_store(&seg->settings.arrivals, 0);
    beat();
    WAIT_FOR(!watches(c.from));
    atomic_store(&seg->settings.arrivals, 1);
    beat();
    WAIT_FOR(watches(c.from));
    rigel_request_coming(); /* it says so itself */
    beat();
    WAIT_FOR(!watches(c.from));
    done();
}

/* ---- what the program may do ---- */

static void close_all(void)
{
    for (int fd = 3; fd < 5000; fd++)
        close(fd);
}

/*
 * Its threads end then, and are none that keep the process (agent.c). What the program opens after that under those numbers is its own: nothing is
 * written there.
 */
static void the_program_closes_what_it_takes(void)
{
    become_one_with_a_pipe();
    uint32_t threads = atomic_load(&rg_own_threads);
    int theirs[] = {own_epoll(), own_eventfd()};
    CHECK(threads > 0);
    close_all();
    CHECK_EQUAL(fcntl(theirs[0], F_GETFD), -1);
    WAIT_FOR(atomic_load(&rg_own_threads) == threads - 2);
    int file = open(scratch("arrivals-file"), O_RDWR | O_CREAT | O_TRUNC, 0600);
    for (int i = 0; i < 2; i++)
        CHECK_EQUAL(dup2(file, theirs[i]), theirs[i]);
    request();
    beat();
    rigel_shutdown();
    for (int i = 0; i < 2; i++)
        CHECK_EQUAL(lseek(theirs[i], 0, SEEK_END), 0);
    done();
}

/* So it does where others are under those numbers at once, which it is not to wait for, nor to look at for ever; and at the end is not to be told by. */
static void the_program_takes_its_numbers(void)
{
    connection c = become_one_with_a_pipe();
    rg_stay_beat(0, false);
    rg_arrivals_beat();
    WAIT_FOR(!watches(c.from));
    uint32_t threads = atomic_load(&rg_own_threads);
    int file = open(scratch("arrivals-file"), O_RDWR | O_CREAT | O_TRUNC, 0600), number = own_eventfd();
    CHECK_EQUAL(dup2(file, number), number);
    WAIT_FOR(atomic_load(&rg_own_threads) == threads - 2);
    rigel_shutdown();
    CHECK_EQUAL(lseek(file, 0, SEEK_END), 0);
    done();
}

/* For which the C library interrupts every thread of the process, whatever it waits in and signals it blocks: Rigel's goes on, watching or not. */
static void the_program_sets_its_user(void)
{
    connection c = become_one_with_a_pipe();
    uint32_t threads = atomic_load(&rg_own_threads);
    for (int watching = 1; watching >= 0; watching--) {
        for (int i = 0; i < 100; i++) {
            CHECK_EQUAL(setuid(getuid()), 0);
            usleep(1000);
        }
        CHECK_EQUAL(atomic_load(&rg_own_threads), threads);
        rg_stay_beat(0, false);
        rg_arrivals_beat();
        WAIT_FOR(!watches(c.from));
    }
    beat();
    until_one_is_foreseen(c);
    done();
}

/* A child has the numbers, and no thread; what it does with them is nothing to the parent. */
static void beside_a_child(void)
{
    connection c = become_one_with_a_pipe();
    pid_t child = fork();
    if (child == 0) {
        close_all();
        rigel_shutdown();
        _exit(0);
    }
    int status = -1;
    CHECK_EQUAL(waitpid(child, &status, 0), child);
    CHECK_EQUAL(status, 0);
    until_one_is_foreseen(c);
    done();
}

/* Rigel's threads are waited for as long as they take (rg_join): on a busy machine that may be more than it would wait for. */
int pthread_timedjoin_np(pthread_t thread, void **result, const struct timespec *limit)
{
    (void)limit;
    return pthread_join(thread, result);
}

/* And the program has the descriptors that it took. */
static void ends_with_rigel(void)
{
    become_a_server();
    connection c = a_pipe();
    beat();
    until_one_is_foreseen(c);
    rigel_shutdown();
    CHECK_EQUAL(own_epoll(), -1);
    CHECK_EQUAL(own_eventfd(), -1);
    uint64_t before = foreseen();
    for (int i = 0; i < 20; i++) {
        send_one(c);
        receive_one(c);
        usleep(1000);
    }
    CHECK_EQUAL(foreseen(), before);
    done();
}

/* Many at once, from another thread, with requests in between and beats: for the sanitizer. */
static connection many[40];
static _Atomic bool ended;
static void *sends(void *unused)
{
    for (int i = 0; !atomic_load(&ended); i++) {
        send_one(many[i % 40]);
        receive_one(many[i % 40]);
        if (i % 100 == 99)
            usleep(1000);
    }
    return unused;
}

static void beside_many_arrivals(void)
{
    pthread_t thread;
    become_a_server();
    for (int i = 0; i < 40; i++)
        many[i] = i % 2 ? a_socket() : a_pipe();
    beat();
    CHECK_EQUAL(pthread_create(&thread, NULL, sends, NULL), 0);
    for (int i = 0; i < 100; i++) {
        usleep(5000);
        request();
        beat();
    }
    atomic_store(&ended, true);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    done();
}

/* Which of its two threads has found out last what has come, by its number, and is to be late from then on; 1: whichever will; 0: neither is to be. */
static _Atomic int finder;

/* arrivals.c looks for what has arrived by this, and `waits` as it is about to for as long as it is said to be late. */
static _Atomic uint64_t found_ns;
static _Atomic uint32_t looks, looks_too_soon;
static _Atomic bool late, waits;
static _Atomic uint64_t looked_ns; /* as it last was, when */
int epoll_wait(int fd, struct epoll_event *events, int most, int timeout)
{
    enum { MOST_OF_A_REST_NS = 25000 };
    if (atomic_load(&late)) {
        atomic_store(&waits, true);
        while (atomic_load(&late))
            usleep(100);
        atomic_store(&looked_ns, rg_now_ns());
        atomic_store(&waits, false);
    }
    uint64_t before = atomic_load(&found_ns);
    looks += before != 0;
    looks_too_soon += before && rg_now_ns() - before < MOST_OF_A_REST_NS;
    int n = (int)syscall(SYS_epoll_pwait, fd, events, most, timeout, NULL, (size_t)0), none = 1;
    if (n > 0)
        atomic_compare_exchange_strong(&finder, &none, gettid());
    atomic_store(&found_ns, n > 0 ? rg_now_ns() : 0);
    return n;
}

/*
 * What it sees of a request only once that has begun, or is over, as its thread was late by less than a millisecond, is none that has come amid it, or
 * after it. As late as it is to be it may be later, the machine's doing: of ten times that it is not, one or two may be on the edge.
 */
static void what_is_seen_late(bool is_over)
{
    enum { MANY = 10, EDGE = 2, LATE_NS = 800000 };
    comes = is_over ? AFTER : AMID;
    become_a_server();
    connection c = over_tcp(); /* for whose being writable it is watched, so that it is ready where all is read */
    beat();
    until_one_is_foreseen(c);
    int as_meant = 0, did = 0;
    for (int i = 0; i < 1000 && as_meant < MANY; i++) {
        serve_one(c);
        usleep(2000);
        atomic_store(&late, true);
        send_one(c);
        WAIT_FOR(atomic_load(&waits));
        receive_one(c);
        uint64_t before = foreseen(), began_ns = rg_now_ns();
        launch(spin, NULL, is_over ? 400000 : 5000000);
        atomic_store(&late, is_over);
        CHECK_EQUAL(cuStreamSynchronize(NULL), CUDA_SUCCESS);
        atomic_store(&late, false);
        usleep(30000); /* three times what it would be foreseen by */
        if (atomic_load(&looked_ns) - began_ns < LATE_NS) {
            as_meant++;
            did += foreseen() > before;
        }
    }
    CHECK_EQUAL(as_meant, MANY);
    CHECK(did <= EDGE);
    done();
}
static void what_is_seen_once_a_request_has_begun(void)
{
    what_is_seen_late(false);
}
static void what_is_seen_once_a_request_is_over(void)
{
    what_is_seen_late(true);
}

/* Where the program has read what comes before it is seen, as a thread does that waits for it, it is foreseen all the same. */
static void foresees_what_is_read_first(void)
{
    enum { MANY = 10 };
    become_a_server();
    connection c = over_tcp();
    beat();
    int did = 0;
    for (int i = 0; i < 3000 && did < MANY; i++) {
        uint64_t before = foreseen();
        atomic_store(&late, true);
        send_one(c);
        WAIT_FOR(atomic_load(&waits));
        receive_one(c);
        atomic_store(&late, false);
        usleep(10000);
        did += foreseen() > before;
        request();
        usleep(2000);
        beat();
    }
    CHECK_EQUAL(did, MANY);
    done();
}

/* The first of the two threads is late to run once something has come: it is to be, and is. */
static _Atomic bool first_is_to_be_late, first_is_late;
static _Atomic bool short_waits_end_late;
int ppoll(struct pollfd *fds, nfds_t n, const struct timespec *left, const sigset_t *mask)
{
    char name[16] = "";
    struct timespec t = *left; /* the kernel writes what is left of it there */
    prctl(PR_GET_NAME, name);
    int found = (int)syscall(SYS_ppoll, fds, n, &t, mask, (size_t)8);
    int whose = atomic_load(&finder);
    if (found > 0 && whose && whose != gettid() && strcmp(name, "rigel-arrivals2") == 0) {
        while (atomic_load(&finder) == 1)
            usleep(100);
        found = (int)syscall(SYS_ppoll, fds, n, &t, mask, (size_t)8); /* as where it finds nothing left when it wakes up */
    }
    while (found > 0 && atomic_load(&first_is_to_be_late) && strcmp(name, "rigel-arrivals") == 0) {
        atomic_store(&first_is_late, true);
        usleep(100);
    }
    while (atomic_load(&finder) == gettid())
        usleep(100);
    if (found == 0 && atomic_load(&short_waits_end_late) && left->tv_sec == 0 && left->tv_nsec < 1000000)
        usleep(200);
    return found;
}

/*
 * Where waits for a time end late, the GPU comes sooner: of requests that begin 10 ms after what they come by it is told 9.8 ms after that or later,
 * where none do, and 9.6, where some do.
 */
static void sooner_where_processors_are_late(void)
{
    enum { OWN_NS = 10000000, SOONER_NS = 9800000 };
    become_a_server();
    connection c = a_pipe();
    beat();
    atomic_store(&short_waits_end_late, true);
    bool sooner = false;
    for (int i = 0; i < 3000 && !sooner; i++) {
        uint64_t before = foreseen(), sent_ns = rg_now_ns();
        send_one(c);
        receive_one(c);
        while (rg_now_ns() - sent_ns < OWN_NS && !sooner) {
            sooner = foreseen() > before && rg_now_ns() - sent_ns < SOONER_NS;
            usleep(10);
        }
        request();
        usleep(2000);
        beat();
    }
    CHECK(sooner);
    done();
}

/* Where the first one is late to run once something has come, the other one does what there is to do. */
static void while_the_first_is_late(void)
{
    enum { MANY = 10 };
    become_a_server();
    connection c = a_pipe();
    beat();
    until_one_is_foreseen(c);
    int did = 0;
    for (int i = 0; i < 1000 && did < MANY; i++) {
        atomic_store(&first_is_late, false);
        atomic_store(&first_is_to_be_late, true);
        uint64_t before = foreseen();
        send_one(c);
        receive_one(c);
        usleep(10000);
        did += atomic_load(&first_is_late) && foreseen() > before;
        request();
        usleep(2000);
        atomic_store(&first_is_to_be_late, false);
        beat();
    }
    CHECK_EQUAL(did, MANY);
    done();
}

/* Nor has the one that has seen it come to be there when it is due; the other one was too late for it, and sleeps on. */
static void while_the_finder_is_late(void)
{
    enum { MANY = 12 };
    become_a_server();
    connection c = a_pipe();
    beat();
    until_one_is_foreseen(c);
    int nearly_all = 0;
    for (int i = 0; i < 1500 && nearly_all < MANY; i++) {
        bool counts = i % 3 == 2; /* and begins 1.2 ms after it is due, not 0.2 as the others: the machine may be late, too */
        uint64_t before = foreseen();
        atomic_store(&finder, 1);
        send_one(c);
        WAIT_FOR(atomic_load(&finder) > 1);
        receive_one(c);
        usleep(counts ? 11000 : 10000);
        if (counts)
            nearly_all = more_of(nearly_all, foreseen() > before);
        request();
        usleep(2000);
        atomic_store(&finder, 0);
        beat();
    }
    CHECK_EQUAL(nearly_all, MANY);
    done();
}

/* It rests after each look that has found something, also amid a request, whose end is looked for meanwhile: a flood takes no processor. */
static void rests_in_a_flood(void)
{
    connection c = become_one_with_a_pipe();
    launch(spin, NULL, 5000000);
    looks = looks_too_soon = 0;
    for (int i = 0; i < 1000000 && looks < 1000; i++) {
        send_one(c);
        receive_one(c);
    }
    CHECK_EQUAL(looks_too_soon, 0);
    CHECK_EQUAL(cuStreamSynchronize(NULL), CUDA_SUCCESS);
    done();
}

/* What much comes to that nothing is foreseen by is not watched for a while; what else there is, is. */
static void a_flood_is_left_alone(void)
{
    become_a_server();
    connection c = a_pipe(), flood = a_pipe();
    beat();
    WAIT_FOR(watches(flood.from));
    while (watches(flood.from))
        for (int i = 0; i < 1000; i++) {
            send_one(flood);
            receive_one(flood);
        }
    CHECK(watches(c.from));
    until_one_is_foreseen(c);
    done();
}

int main(int argc, char **argv)
{
    (void)argc;
    ensure_environment("LD_LIBRARY_PATH", in_build_folder("sim"), argv);
    int failures = 0;
    RUN(foresees_by_a_pipe);
    RUN(foresees_by_a_socket);
    RUN(foresees_by_tcp);
    RUN(foresees_what_comes_right_after_a_request);
    RUN(foresees_it_beside_what_comes_in_parts);
    RUN(foresees_what_comes_amid_one);
    RUN(as_the_end_is_noted);
    RUN(foresees_what_has_come_before_another_began);
    RUN(foresees_where_something_is_left_unread);
    RUN(foresees_beside_what_is_read_later);
    RUN(foresees_beside_what_comes_amid_and_is_read_later);
    RUN(foresees_behind_what_came_to_nothing);
    RUN(what_is_seen_once_a_request_has_begun);
    RUN(what_is_seen_once_a_request_is_over);
    RUN(foresees_what_is_read_first);
    RUN(while_the_first_is_late);
    RUN(while_the_finder_is_late);
    RUN(sooner_where_processors_are_late);
    RUN(has_streams_stop);
    RUN(has_none_go_on_between_two);
    RUN(not_past_rigel);
    RUN(watches_sockets_and_pipes_alone);
    RUN(foresees_by_a_new_connection);
    RUN(foresees_the_first_of_a_connection);
    RUN(another_has_the_number);
    RUN(takes_no_number_of_the_programs);
    RUN(with_a_few_descriptors_alone);
    RUN(with_all_but_two_taken);
    RUN(watches_nothing_in_vain);
    RUN(the_program_closes_what_it_takes);
    RUN(the_program_takes_its_numbers);
    RUN(the_program_sets_its_user);
    RUN(beside_a_child);
    RUN(ends_with_rigel);
    RUN(beside_many_arrivals);
    RUN(rests_in_a_flood);
    RUN(a_flood_is_left_alone);
    return failures != 0;
}
