/*
 * test-segment.c: the segment as a file, as a table of slots, and after clients were killed in the middle of anything.
 */
#include "policy.h"
#include "rigel.h"
#include "segment.h"
#include "testing.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

static rg_segment *fresh(const char *path)
{
    char why[512];
    unlink(path);
    CHECK_EQUAL(rg_segment_create(path), 0);
    rg_segment *seg = rg_segment_open(path, why, sizeof why);
    CHECK(seg != NULL);
    return seg;
}

static void defaults_and_mode(void)
{
    const char *path = scratch("defaults");
    rg_segment *seg = fresh(path);
    struct stat st;
    CHECK_EQUAL(stat(path, &st), 0);
    CHECK_EQUAL(st.st_mode & 07777, 0600);
    CHECK_EQUAL(st.st_size, sizeof *seg);
    CHECK_EQUAL(seg->settings.policy, RG_POLICY_PRIORITY);
    CHECK_EQUAL(seg->settings.inflight, 8);
    CHECK_EQUAL(rg_segment_create(path), -EEXIST);
    CHECK(rigel_segment_check(path) == NULL);
    unlink(path);
    CHECK_EQUAL(rg_segment_create("/nonexistent/folder/segment"), -ENOENT);
}

/* Between two launches a program uses enough memory that each line which a launch touches costs it again. */
static void what_a_launch_needs_is_together(void)
{
#define LINE(type, field) (offsetof(type, field) / 64)
    CHECK_EQUAL(offsetof(rg_segment, clients) % 64, 0);
    CHECK_EQUAL(LINE(rg_client, launches), LINE(rg_client, graph_launches));
    CHECK_EQUAL(LINE(rg_client, launches), LINE(rg_client, copies));
    CHECK_EQUAL(LINE(rg_client, launches), LINE(rg_client, memsets));
    CHECK_EQUAL(LINE(rg_client, launches), LINE(rg_client, records));
    CHECK(LINE(rg_client, launches) != LINE(rg_client, heartbeat_ns)); /* which another thread writes */
    CHECK_EQUAL(offsetof(rg_segment, settings) % 64, 0);
    CHECK_EQUAL(LINE(rg_settings, policy), 0);
    CHECK_EQUAL(LINE(rg_settings, inflight), 0);
    CHECK_EQUAL(LINE(rg_settings, unit_us), 0);
    CHECK_EQUAL(LINE(rg_settings, corun), 0);
    CHECK_EQUAL(LINE(rg_settings, trace), 0);
    CHECK_EQUAL(LINE(rg_settings, bulk_bytes), 0);
    CHECK_EQUAL(LINE(rg_settings, shutdown), 0);
    CHECK_EQUAL(LINE(rg_settings, hold_until_ms), 0);
    CHECK_EQUAL(LINE(rg_thread, before_tick), 0);
}

static void refuse(const char *path, const char *because)
{
    char why[512];
    CHECK(rg_segment_open(path, why, sizeof why) == NULL);
    if (!strstr(why, because) || !strstr(why, path)) {
        fprintf(stderr, "the reason is \"%s\", expected \"%s\" and the path in it\n", why, because);
        _exit(1);
    }
    CHECK(strchr(why, '\n') == NULL);
    CHECK(strcmp(rigel_segment_check(path), why) == 0);
}

static void refusals(void)
{
    const char *path = scratch("refusals");
    refuse(path, "No such file");
    rg_segment *seg = fresh(path);
    CHECK_EQUAL(chmod(path, 0644), 0);
    refuse(path, "open to other users (mode 0644, expected 0600)");
    CHECK_EQUAL(chmod(path, 0600), 0);
    seg->header.version = 99;
    refuse(path, "version 99");
    seg->header.version = RG_SEGMENT_VERSION;
    seg->header.magic ^= 1;
    refuse(path, "is not a version 31 segment");
    seg->header.magic ^= 1;
    if (geteuid() == 0) {
        CHECK_EQUAL(chown(path, 12345, 0), 0);
        refuse(path, "belongs to user 12345");
        CHECK_EQUAL(chown(path, 0, 0), 0);
    }
    CHECK(rigel_segment_check(path) == NULL);
    munmap(seg, sizeof *seg);
    CHECK_EQUAL(truncate(path, 4096), 0);
    refuse(path, "has 4096 bytes");
    unlink(path);
    CHECK_EQUAL(symlink("/dev/null", path), 0);
    refuse(path, "cannot open");
    unlink(path);
    CHECK_EQUAL(mkdir(path, 0700), 0);
    refuse(path, "cannot open");
    rmdir(path);
}

/* How far requests have come: by launches where they are alike, else by the clock; the one that is furthest counts. */
static void how_far_requests_are(void)
{
    rg_segment *seg = fresh(scratch("late"));
    uint64_t again_ns, ms = 1000000;
#define LATE(busy_ns) (!rg_device_until_late(seg, 0, 1000 * ms + (busy_ns), busy_ns, &again_ns))
    seg->devices[0].high_busy = seg->devices[0].high_launching = 1 << 3;
    CHECK(LATE(0));
    seg->settings.defer_us = 2000;
    CHECK(!LATE(ms));
    CHECK_EQUAL(again_ns, ms);
    CHECK(LATE(2 * ms));
    /* It is not known yet what its requests launch. */
    seg->settings.defer_ppm = 500000;
    rg_share *share = rg_share_of(seg, 0, 3);
    share->began_launches = 1000;
    share->began_ns = 1000 * ms;
    share->usual_launches = share->usual_votes = 200;
    CHECK(LATE(2 * ms));
    share->usual_votes = 400;
    seg->clients[3].launches[0] = 600;
    seg->clients[3].launches[2] = 400;
    CHECK(!LATE(100 * ms));
    seg->clients[3].launches[2] = 440;
    seg->clients[3].graph_launches = 10;
    CHECK(!LATE(ms)); /* 50 in 1 ms, 50 to go: half of that */
    CHECK(again_ns > 400000 && again_ns <= 500000);
    seg->clients[3].launches[0] = 650;
    CHECK(LATE(ms));
    /* One that waits for what it has launched will launch no more. */
    seg->clients[3].launches[0] = 600;
    seg->devices[0].high_launching = 0;
    CHECK(LATE(ms));
    /* Another client at the same time, whose requests are not alike. */
    seg->devices[0].high_launching = seg->devices[0].high_busy = 1 << 3 | 1ull << 63;
    CHECK(!LATE(ms));
    CHECK(LATE(2 * ms));
    /* Without a time they have given way from the beginning. */
    seg->settings.defer_us = 0;
    CHECK(LATE(0));
    seg->devices[0].high_busy = 1 << 3;
    CHECK(!LATE(0));
    /* For how long the rest of its launches takes, at its own pace: in one of twice the pace that comes later. */
    seg->settings.defer_ppm = 0;
    seg->settings.need_us = 3000;
    CHECK(!LATE(0)); /* nothing tells the pace yet */
    CHECK(again_ns > 0 && again_ns <= 100000);
    seg->clients[3].launches[0] = 599;
    CHECK(!LATE(ms)); /* 49 in 1 ms: 151 take 3.1 ms */
    CHECK(again_ns <= 100000);
    seg->clients[3].launches[0] = 600;
    CHECK(LATE(ms));
    CHECK(!LATE(2 * ms));
    CHECK(again_ns > 400000 && again_ns <= 500000);
    /* 50 in 2 ms: 150 take 6. Such as need the GPU for twice as long as others have 6 ms; for half as long, 1.5. */
    share->need_part = 2 * RG_POLICY_ONE;
    CHECK(LATE(2 * ms));
    share->need_part = RG_POLICY_ONE / 2;
    CHECK(!LATE(ms));
    share->need_part = RG_POLICY_ONE;
    CHECK(LATE(ms));
    share->need_part = 0;
    /* What requests took before counts for 25 launches. */
    share->usual_ns = 8 * ms;
    CHECK(LATE(ms / 2));
    seg->clients[3].launches[0] = 550;
    CHECK(!LATE(0));
    share->usual_ns = 2 * ms;
    CHECK(LATE(0));
    /* Whichever comes first, and at the end of its launches in any case. */
    seg->settings.defer_ppm = 900000;
    CHECK(LATE(0));
    share->usual_ns = 80 * ms;
    CHECK(!LATE(0));
    seg->clients[3].launches[0] = 550 + 180;
    CHECK(LATE(20 * ms));
    seg->settings.defer_ppm = 0;
    CHECK(!LATE(40 * ms));
    seg->clients[3].launches[0] = 550 + 200;
    CHECK(LATE(5000 * ms));
    /* Half of the launches: of requests that launch more in their second half 0.75 of the time is over then. */
    share->usual_ns = 80 * ms;
    seg->settings.need_us = 20000;
    seg->clients[3].launches[0] = 550 + 100;
    CHECK(!LATE(40 * ms));
    for (int i = 0; i < RG_POLICY_COURSE; i++)
        share->course[i] = RG_POLICY_ONE / 16 * (uint64_t)(i < 3 ? i + 1 : 7 - i);
    CHECK(LATE(60 * ms));
    CHECK(!LATE(70 * ms));
    seg->settings.defer_ppm = 510000; /* counts launches */
    CHECK(!LATE(40 * ms));
    seg->settings.defer_ppm = 0;
    for (int i = 0; i < RG_POLICY_COURSE; i++)
        share->course[i] = -share->course[i];
    CHECK(!LATE(20 * ms));
    CHECK_EQUAL(again_ns, 500000);
    rg_share_forget_course(share);
    CHECK(!share->course[0] && !share->seen);
    /* How far it was when it was looked at last is learned from once it is over, in what time; of another one nothing. */
    CHECK(!LATE(30 * ms));
    CHECK(share->seen != 0);
    rg_share_learn_course(share, 1001 * ms, 60 * ms);
    CHECK(!share->seen && !share->course[3]);
    CHECK(!LATE(30 * ms));
    rg_share_learn_course(share, 1000 * ms, 40 * ms);
    CHECK_EQUAL(share->course[3], RG_POLICY_ONE / 8 / 16);
    CHECK(!share->seen && !share->course[2] && !share->course[4]);
    rg_share_learn_course(share, 1000 * ms, 40 * ms);
    CHECK_EQUAL(share->course[3], RG_POLICY_ONE / 8 / 16);
    CHECK(LATE(0)); /* in no time nothing is launched */
    CHECK(!share->seen);
    /* The first look at which it is late counts, and none after that. */
    CHECK(LATE(5 * ms));
    CHECK(LATE(6 * ms));
    CHECK_EQUAL(share->seen & UINT32_MAX, 5 * ms / 16);
    rg_share_learn_course(share, 1000 * ms, 40 * ms);
    CHECK((int64_t)share->course[3] < RG_POLICY_ONE / 8 / 16);
    rg_share_forget_requests(share, 1000);
    CHECK(!share->course[3]);
    share->began_ns = 1000 * ms;
    share->usual_launches = 200;
    share->usual_votes = 400;
    share->usual_ns = 0;
    seg->settings.need_us = 0;
    seg->settings.defer_ppm = 500000;
    /* Nobody, or a slot whose counts were cleared meanwhile. */
    seg->clients[3].launches[0] = seg->clients[3].launches[2] = 0;
    CHECK(!LATE(ms));
    seg->devices[0].high_busy = 0;
    CHECK(!LATE(ms));
    unlink(scratch("late"));
}

static void layout_says_what_c_says(void)
{
    const char *text = rigel_layout();
    char part[128];
    snprintf(part, sizeof part, "\"size\":%zu", sizeof(rg_segment));
    CHECK(strstr(text, part) != NULL);
    snprintf(part, sizeof part, "\"gate_waits\":{\"offset\":%zu,\"type\":\"u64\",\"count\":1}", offsetof(rg_client, gate_waits));
    CHECK(strstr(text, part) != NULL);
    snprintf(part, sizeof part, "\"clients\":{\"offset\":%zu,\"stride\":%zu,\"count\":64", offsetof(rg_segment, clients),
             sizeof(rg_client));
    CHECK(strstr(text, part) != NULL);
    CHECK(text[strlen(text) - 1] == '}');
}

/* Every bucket starts where the one before ends, holds its own lower bound, and is at most 1/64 wide from 2^8 on. */
static void histogram_buckets(void)
{
    CHECK_EQUAL(rg_hist_bucket(0), 0);
    CHECK_EQUAL(rg_hist_bucket(255), 0);
    CHECK_EQUAL(rg_hist_bucket(256), 1);
    CHECK_EQUAL(rg_hist_bucket(1000000), 1 + (11 << 6) + (1000000 >> 13) - 64); /* 2^19 <= 1e6: octave 11, steps of 2^13 */
    CHECK_EQUAL(rg_hist_bucket(UINT64_MAX), RG_HIST_BUCKETS - 1);
    for (uint32_t b = 1; b < RG_HIST_BUCKETS; b++) {
        uint64_t low = rg_hist_lower_ns(b);
        CHECK_EQUAL(rg_hist_bucket(low), b);
        CHECK_EQUAL(rg_hist_bucket(low - 1), b - 1);
        if (b + 1 < RG_HIST_BUCKETS)
            CHECK((rg_hist_lower_ns(b + 1) - low) * 64 <= low);
    }
}

static void devices_by_uuid(void)
{
    const char *path = scratch("devices");
    rg_segment *seg = fresh(path);
    char uuid[16] = {0};
    for (int i = 0; i < RG_MAX_DEVICES; i++) {
        uuid[3] = (char)(i + 1);
        CHECK_EQUAL(rg_segment_device(seg, uuid, "a GPU"), i);
        CHECK_EQUAL(rg_segment_device(seg, uuid, "a GPU"), i);
    }
    uuid[3] = 77;
    CHECK_EQUAL(rg_segment_device(seg, uuid, "one too many"), -1);
    /* Who began to write what the last one is has died. */
    uuid[3] = RG_MAX_DEVICES;
    rg_device *last = &seg->devices[RG_MAX_DEVICES - 1];
    memset(last->uuid, 0, sizeof last->uuid);
    atomic_store(&last->state, 1);
    CHECK_EQUAL(rg_segment_device(seg, uuid, "a GPU"), RG_MAX_DEVICES - 1);
    CHECK_EQUAL(atomic_load(&last->state), 2);
    CHECK_EQUAL(memcmp(last->uuid, uuid, sizeof last->uuid), 0);
    CHECK(strcmp(seg->devices[3].name, "a GPU") == 0);
    unlink(path);
}

/* Claims as another process and stays alive until told to end: SIGKILL. */
static pid_t claimant(rg_segment *seg, int *slot)
{
    int out[2];
    CHECK_EQUAL(pipe(out), 0);
    pid_t pid = fork();
    if (pid == 0) {
        int s = rg_segment_claim(seg, "claimant", RG_CLASS_HIGH, rg_now_ns());
        CHECK_EQUAL(write(out[1], &s, sizeof s), sizeof s);
        pause();
        _exit(0);
    }
    CHECK_EQUAL(read(out[0], slot, sizeof *slot), sizeof *slot);
    close(out[0]);
    close(out[1]);
    return pid;
}

static void end(pid_t pid)
{
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
}

static void full_then_reaped(void)
{
    const char *path = scratch("full");
    rg_segment *seg = fresh(path);
    pid_t pids[RG_MAX_CLIENTS], extra;
    int slot;
    for (int i = 0; i < RG_MAX_CLIENTS; i++) {
        pids[i] = claimant(seg, &slot);
        CHECK_EQUAL(slot, i);
    }
    extra = claimant(seg, &slot);
    CHECK_EQUAL(slot, -1);
    CHECK_EQUAL(seg->header.refused, 1);
    end(extra);
    CHECK_EQUAL(rg_segment_reap(seg), 0);
    /* One is killed while busy: others see the bit go and may have the slot. */
    atomic_fetch_or(&seg->devices[2].high_busy, 1ull << 17);
    seg->clients[17].launches[1] = 5;
    end(pids[17]);
    CHECK_EQUAL(rigel_segment_reap(path), 1);
    CHECK_EQUAL(seg->clients[17].state, RG_DEAD);
    CHECK_EQUAL(rg_launches(&seg->clients[17]), 5);
    CHECK_EQUAL(seg->devices[2].high_busy, 0);
    pids[17] = claimant(seg, &slot);
    CHECK_EQUAL(slot, 17);
    CHECK_EQUAL(seg->clients[17].state, RG_LIVE);
    CHECK_EQUAL(rg_launches(&seg->clients[17]), 5); /* the same client's: it counts on */
    for (int i = 0; i < RG_MAX_CLIENTS; i++)
        end(pids[i]);
    CHECK_EQUAL(rg_segment_reap(seg), RG_MAX_CLIENTS);
    unlink(path);
}

/* A client that is started again counts on, but may be on another GPU, and be taken off it in another way. */
static void devices_are_the_processes_own(void)
{
    const char *path = scratch("again");
    rg_segment *seg = fresh(path);
    int slot;
    pid_t pid = claimant(seg, &slot);
    rg_client *c = &seg->clients[slot];
    rg_share *share = rg_share_of(seg, 3, slot);
    atomic_store(&c->devices, 1u << 3);
    atomic_store(&c->preemption, RG_PREEMPTION_STOPS);
    atomic_store(&c->slice_us, 50);
    atomic_store(&share->preemption, RG_PREEMPTION_OFF);
    atomic_store(&share->slice_us, 50);
    atomic_store(&share->usual_launches, 229);
    atomic_store(&share->began_ns, 5); /* it ends in the middle of a request */
    atomic_store(&c->launches[0], 61);
    end(pid);
    pid = claimant(seg, &slot);
    CHECK(c == &seg->clients[slot] && c->state == RG_LIVE);
    CHECK_EQUAL(c->devices, 0);
    CHECK_EQUAL(c->past_devices, 1u << 3); /* where what it has counted so far was */
    CHECK_EQUAL(c->preemption, RG_PREEMPTION_UNKNOWN);
    CHECK_EQUAL(c->slice_us, 0);
    CHECK_EQUAL(share->preemption, RG_PREEMPTION_UNKNOWN);
    CHECK_EQUAL(share->slice_us, 0);
    CHECK_EQUAL(share->usual_launches, 229); /* what its requests are like is known still */
    CHECK_EQUAL(share->began_ns, 0);
    CHECK_EQUAL(share->began_launches, 61);
    end(pid);
    unlink(path);
}

/* With no slot left that was never used, a client of another name takes a dead one's, and that is counted. */
static void another_client_clears_what_it_takes(void)
{
    const char *path = scratch("overwritten");
    rg_segment *seg = fresh(path);
    pid_t pids[RG_MAX_CLIENTS];
    int slot;
    for (int i = 0; i < RG_MAX_CLIENTS; i++)
        pids[i] = claimant(seg, &slot);
    atomic_store(&seg->clients[9].launches[0], 7);
    atomic_store(&seg->clients[9].first_launch_ns, 1);
    end(pids[9]);
    CHECK_EQUAL(rg_segment_claim(seg, "another", RG_CLASS_HIGH, 1), 9);
    CHECK_EQUAL(rg_launches(&seg->clients[9]), 0);
    CHECK(strcmp(seg->clients[9].name, "another") == 0);
    CHECK_EQUAL(seg->header.overwritten, 1);
    for (int i = 0; i < RG_MAX_CLIENTS; i++)
        if (i != 9)
            end(pids[i]);
    unlink(path);
}

/* A finished client whose process still runs keeps its slot. */
static void exited_slot_is_kept(void)
{
    const char *path = scratch("exited");
    rg_segment *seg = fresh(path);
    int first = rg_segment_claim(seg, "first", RG_CLASS_HIGH, 1), slot;
    atomic_store(&seg->clients[first].state, RG_EXITED);
    pid_t pid = claimant(seg, &slot);
    CHECK(slot != first);
    end(pid);
    unlink(path);
}

/* A pid that was reused is not the client: the owner word holds the start time too. */
static void reused_pid_is_dead(void)
{
    const char *path = scratch("reused");
    rg_segment *seg = fresh(path);
    int slot = rg_segment_claim(seg, "me", RG_CLASS_HIGH, 1);
    CHECK(rg_client_alive(&seg->clients[slot]));
    atomic_fetch_xor(&seg->clients[slot].owner, 1ull << 40);
    CHECK(!rg_client_alive(&seg->clients[slot]));
    CHECK_EQUAL(rg_segment_reap(seg), 1);
    unlink(path);
}

/* Killed between its own part of what is outstanding and the device's sum. */
static void what_is_outstanding_is_never_below_zero(void)
{
    const char *path = scratch("outstanding");
    rg_segment *seg = fresh(path);
    atomic_store(&rg_share_of(seg, 2, 7)->outstanding_ns, 5000);
    atomic_store(&seg->devices[2].outstanding_ns, 3000);
    rg_share_settle(seg, 2, 7, UINT64_MAX);
    CHECK_EQUAL(seg->devices[2].outstanding_ns, 0);
    atomic_store(&rg_share_of(seg, 2, 7)->outstanding_ns, 5000);
    atomic_store(&seg->devices[2].outstanding_ns, 9000);
    rg_share_settle(seg, 2, 7, 1000);
    CHECK_EQUAL(rg_share_of(seg, 2, 7)->outstanding_ns, 4000);
    CHECK_EQUAL(seg->devices[2].outstanding_ns, 8000);
    unlink(path);
}

static void *stay(void *unused)
{
    for (;;)
        pause();
    return unused;
}

/* State of a process as /proc has it: of its main thread. */
static char state_of(pid_t pid)
{
    char path[64], text[512] = "";
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    CHECK(fd >= 0);
    CHECK(read(fd, text, sizeof text - 1) > 0);
    close(fd);
    return strrchr(text, ')')[2];
}

/* A process whose main thread has ended lives as long as another thread does; then it is a zombie, and dead. */
static void a_process_without_its_main_thread_lives(void)
{
    const char *path = scratch("main-ended");
    rg_segment *seg = fresh(path);
    int out[2], slot;
    CHECK_EQUAL(pipe(out), 0);
    pid_t pid = fork();
    if (pid == 0) {
        pthread_t thread;
        int s = rg_segment_claim(seg, "no-main", RG_CLASS_HIGH, rg_now_ns());
        CHECK_EQUAL(pthread_create(&thread, NULL, stay, NULL), 0);
        CHECK_EQUAL(write(out[1], &s, sizeof s), sizeof s);
        pthread_exit(NULL);
    }
    CHECK_EQUAL(read(out[0], &slot, sizeof slot), sizeof slot);
    WAIT_FOR(state_of(pid) == 'Z');
    CHECK(rg_client_alive(&seg->clients[slot]));
    CHECK_EQUAL(rg_segment_reap(seg), 0);
    kill(pid, SIGKILL);
    WAIT_FOR(!rg_client_alive(&seg->clients[slot])); /* nobody has waited for it yet */
    CHECK_EQUAL(state_of(pid), 'Z');
    CHECK_EQUAL(rg_segment_reap(seg), 1);
    CHECK_EQUAL(waitpid(pid, NULL, 0), pid);
    unlink(path);
}

/* Who cannot look takes nobody for dead that is not, and is not taken for dead later for having claimed then. */
static void without_descriptors_nobody_is_dead(void)
{
    const char *path = scratch("descriptors");
    rg_segment *seg = fresh(path);
    int first = rg_segment_claim(seg, "first", RG_CLASS_HIGH, 1), there, gone;
    pid_t lives = claimant(seg, &there), ends = claimant(seg, &gone);
    end(ends);
    struct rlimit before, none;
    CHECK_EQUAL(getrlimit(RLIMIT_NOFILE, &before), 0);
    none = before;
    none.rlim_cur = 0;
    CHECK_EQUAL(setrlimit(RLIMIT_NOFILE, &none), 0);
    CHECK(open("/proc/self/stat", O_RDONLY) < 0 && errno == EMFILE);
    CHECK(rg_client_alive(&seg->clients[first]));
    CHECK(rg_client_alive(&seg->clients[there]));
    CHECK(!rg_client_alive(&seg->clients[gone]));
    CHECK_EQUAL(rg_segment_reap(seg), 1);
    int second = rg_segment_claim(seg, "second", RG_CLASS_HIGH, 1);
    CHECK(second != first && second != there);
    CHECK_EQUAL(setrlimit(RLIMIT_NOFILE, &before), 0);
    CHECK(rg_client_alive(&seg->clients[second]));
    CHECK_EQUAL(rg_segment_reap(seg), 0);
    end(lives);
    CHECK_EQUAL(rg_segment_reap(seg), 1);
    unlink(path);
}

/*
 * Processes that claim, become busy, idle and exit as fast as they can, each killed at whatever instant the signal finds it:
 * 400 kills in all. Afterwards nothing may be left: every slot can be claimed and no busy bit stays.
 */
static void killed_at_any_instant(void)
{
    const char *path = scratch("killed");
    rg_segment *seg = fresh(path);
    uint32_t seed = 12345;
    for (int round = 0; round < 100; round++) {
        pid_t pids[4];
        for (int i = 0; i < 4; i++) {
            pids[i] = fork();
            if (pids[i] == 0)
                for (;;) {
                    int s = rg_segment_claim(seg, "victim", RG_CLASS_HIGH, rg_now_ns());
                    if (s < 0)
                        continue;
                    char uuid[16] = {(char)i};
                    int d = rg_segment_device(seg, uuid, "d");
                    atomic_fetch_or(&seg->devices[d].high_busy, 1ull << s);
                    rg_hist_add(&seg->clients[s].request_ns, 5000);
                    rg_segment_clear_busy(seg, s);
                    atomic_fetch_or(&seg->devices[d].high_busy, 1ull << s);
                    atomic_store(&seg->clients[s].state, RG_EXITED);
                    atomic_store(&seg->clients[s].owner, 0xffffffffull << 32 | (uint32_t)getpid()); /* gives it up */
                }
        }
        seed = seed * 1103515245u + 12345u;
        usleep(200 + (seed >> 16) % 1500);
        for (int i = 0; i < 4; i++)
            end(pids[i]);
    }
    rg_segment_reap(seg);
    int slot;
    pid_t pids[RG_MAX_CLIENTS];
    for (int i = 0; i < RG_MAX_CLIENTS; i++) {
        pids[i] = claimant(seg, &slot);
        CHECK(slot >= 0);
    }
    for (int i = 0; i < RG_MAX_CLIENTS; i++)
        end(pids[i]);
    rg_segment_reap(seg);
    for (int i = 0; i < RG_MAX_DEVICES; i++)
        CHECK_EQUAL(seg->devices[i].high_busy, 0);
    unlink(path);
}

/* Processes that claim at the same instant get slots of their own: 50 times 8 of them, let go by one byte each. */
static void claims_at_once_are_distinct(void)
{
    const char *path = scratch("at-once");
    for (int round = 0; round < 50; round++) {
        rg_segment *seg = fresh(path);
        int go[2], out[2];
        pid_t pids[8];
        CHECK_EQUAL(pipe(go), 0);
        CHECK_EQUAL(pipe(out), 0);
        for (int i = 0; i < 8; i++) {
            pids[i] = fork();
            if (pids[i] == 0) {
                char byte;
                CHECK_EQUAL(read(go[0], &byte, 1), 1);
                int s = rg_segment_claim(seg, "at-once", RG_CLASS_HIGH, rg_now_ns());
                CHECK_EQUAL(write(out[1], &s, sizeof s), sizeof s);
                pause();
            }
        }
        CHECK_EQUAL(write(go[1], "12345678", 8), 8);
        uint64_t taken = 0;
        for (int i = 0; i < 8; i++) {
            int s = -1;
            CHECK_EQUAL(read(out[0], &s, sizeof s), sizeof s);
            CHECK(s >= 0);
            taken |= 1ull << s;
        }
        CHECK_EQUAL(__builtin_popcountll(taken), 8);
        for (int i = 0; i < 8; i++)
            end(pids[i]);
        for (int i = 0; i < 2; i++)
            close(go[i]), close(out[i]);
        munmap(seg, sizeof *seg);
    }
    unlink(path);
}

/* A segment is in use while its maker, a client or somebody who has joined it lives; and what control processes lock in it is theirs alone, or shared. */
static void who_uses_a_segment(void)
{
    const char *path = scratch("live");
    CHECK_EQUAL(rigel_segment_live(path), -1);
    CHECK_EQUAL(rigel_segment_hold(path, 5), -1);
    CHECK_EQUAL(rigel_segment_reap(path), -1);
    CHECK_EQUAL(rigel_lock(path, 7, 0), -ENOENT);
    pid_t pid = fork();
    if (pid == 0)
        _exit(rg_segment_create(path) != 0 || rigel_segment_live(path) != 1);
    int status = -1;
    CHECK_EQUAL(waitpid(pid, &status, 0), pid);
    CHECK_EQUAL(status, 0);
    CHECK_EQUAL(rigel_segment_live(path), 0);
    int other = rigel_lock(path, RIGEL_LOCK_MEMBER + 1, 1);
    CHECK(other >= 0);
    CHECK_EQUAL(rigel_segment_live(path), 0);
    int member = rigel_lock(path, RIGEL_LOCK_MEMBER, 1);
    CHECK(member >= 0);
    CHECK_EQUAL(rigel_segment_live(path), 1);
    int second = rigel_lock(path, RIGEL_LOCK_MEMBER, 1);
    CHECK(second >= 0);
    CHECK_EQUAL(rigel_lock(path, RIGEL_LOCK_MEMBER, 0), -EAGAIN);
    rigel_unlock(member);
    CHECK_EQUAL(rigel_segment_live(path), 1);
    rigel_unlock(second);
    CHECK_EQUAL(rigel_segment_live(path), 0);
    member = rigel_lock(path, RIGEL_LOCK_MEMBER, 0);
    CHECK(member >= 0);
    CHECK_EQUAL(rigel_lock(path, RIGEL_LOCK_MEMBER, 1), -EAGAIN);
    rigel_unlock(member);
    rigel_unlock(other);
    char why[512];
    rg_segment *seg = rg_segment_open(path, why, sizeof why);
    CHECK(seg != NULL);
    CHECK_EQUAL(rigel_segment_hold(path, RG_HOLD_LIMIT_MS), 0);
    CHECK(rg_hold_left_ms(&seg->settings, rg_now_ns()) > 0);
    CHECK_EQUAL(rigel_segment_hold(path, 0), 0);
    CHECK_EQUAL(rg_hold_left_ms(&seg->settings, rg_now_ns()), 0);
    CHECK(rigel_segment_check(path) == NULL);
    CHECK(rg_segment_claim(seg, "client", RG_CLASS_HIGH, rg_now_ns()) >= 0);
    CHECK_EQUAL(rigel_segment_live(path), 1);
    unlink(path);
    CHECK(rigel_segment_check(path) != NULL);
}

int main(void)
{
    int failures = 0;
    RUN(defaults_and_mode);
    RUN(what_a_launch_needs_is_together);
    RUN(refusals);
    RUN(layout_says_what_c_says);
    RUN(how_far_requests_are);
    RUN(histogram_buckets);
    RUN(devices_by_uuid);
    RUN(who_uses_a_segment);
    RUN(full_then_reaped);
    RUN(devices_are_the_processes_own);
    RUN(another_client_clears_what_it_takes);
    RUN(exited_slot_is_kept);
    RUN(reused_pid_is_dead);
    RUN(what_is_outstanding_is_never_below_zero);
    RUN(a_process_without_its_main_thread_lives);
    RUN(without_descriptors_nobody_is_dead);
    RUN(claims_at_once_are_distinct);
    RUN(killed_at_any_instant);
    return failures ? 1 : 0;
}
