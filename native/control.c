/*
 * control.c: what the control process (Bun) calls in librigel.so: versions, the layout, making and repairing segments.
 *
 * Holds no state but the text of the layout. Never used by clients.
 */
#include "client.h"
#include "replay/profile.h"
#include "estimate.h"
#include "layout.h"
#include "rigel.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef RIGEL_VERSION
#error "the Makefile defines RIGEL_VERSION from package.json"
#endif

static char layout_text[65536];

static void build_layout(void)
{
    rg_layout l = {layout_text, sizeof layout_text, 0};
    rg_layout_put(&l, "{\"version\":%d,\"size\":%zu,\"histogram\":{\"buckets\":%d,\"sub_bits\":%d,\"min_shift\":%d}",
                  RG_SEGMENT_VERSION, sizeof(rg_segment), RG_HIST_BUCKETS, RG_HIST_SUB_BITS, RG_HIST_MIN_SHIFT);
#define RG_SECTION(member, type, table, many) RG_LAYOUT_SECTION(&l, rg_segment, member, type, table);
    RG_SECTIONS(RG_SECTION)
#undef RG_SECTION
    /* What the numbers in threads and records mean. */
    rg_layout_names(&l, "operations", rg_op_names, RG_OP_COUNT);
#define RG_TEXT(name) #name,
    static const char *const kinds[] = {RG_TRACE_KINDS(RG_TEXT)};
#undef RG_TEXT
    rg_layout_names(&l, "kinds", kinds, sizeof kinds / sizeof *kinds);
    rg_layout_put(&l, "}");
}

const char *rigel_version(void)
{
    return RIGEL_VERSION;
}

const char *rigel_layout(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, build_layout);
    return layout_text;
}

uint64_t rigel_now_tick(void)
{
    return rg_processor_tick();
}

int rigel_segment_create(const char *path)
{
    return rg_segment_create(path);
}

/* A thread's text for the caller. Not thread-local: a library that is loaded late gets little room for that, and has to share it. */
static pthread_key_t text_key;
static pthread_once_t text_once = PTHREAD_ONCE_INIT;

static bool text_key_made;

static void make_text_key(void)
{
    text_key_made = pthread_key_create(&text_key, free) == 0;
}

static char *text_of_thread(void)
{
    static char shared[RG_PROFILE_ERROR_BYTES]; /* where there is no memory: better than nothing */
    pthread_once(&text_once, make_text_key);
    char *text = text_key_made ? pthread_getspecific(text_key) : NULL;
    if (!text && text_key_made && (text = malloc(RG_PROFILE_ERROR_BYTES)) != NULL)
        pthread_setspecific(text_key, text);
    return text ? text : shared;
}

const char *rigel_segment_check(const char *path)
{
    char *why = text_of_thread();
    rg_segment *seg = rg_segment_open(path, why, RG_PROFILE_ERROR_BYTES);
    if (!seg)
        return why;
    munmap(seg, sizeof *seg);
    return NULL;
}

int rigel_segment_hold(const char *path, uint32_t ms)
{
    char why[512];
    rg_segment *seg = rg_segment_open(path, why, sizeof why);
    if (!seg)
        return -1;
    rg_segment_hold(seg, ms);
    munmap(seg, sizeof *seg);
    return 0;
}

/* Whether somebody has joined the segment (RIGEL_LOCK_MEMBER) other than as a client. */
static bool joined(const char *path)
{
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = RIGEL_LOCK_MEMBER, .l_len = 1};
    bool held = fd >= 0 && fcntl(fd, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
    if (fd >= 0)
        close(fd);
    return held;
}

int rigel_segment_live(const char *path)
{
    char why[RG_PROFILE_ERROR_BYTES];
    rg_segment *seg = rg_segment_open(path, why, sizeof why);
    if (!seg)
        return -1;
    int live = rg_segment_live(seg) || joined(path);
    munmap(seg, sizeof *seg);
    return live;
}

int rigel_discard(const char *path)
{
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    struct stat st;
    int err = fd < 0 || fstat(fd, &st) != 0 ||
                      fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, st.st_size) != 0
                  ? errno
                  : 0;
    if (fd >= 0)
        close(fd);
    return -err;
}

int rigel_lock(const char *path, uint32_t byte, int shared)
{
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return -errno;
    struct flock lock = {.l_type = shared ? F_RDLCK : F_WRLCK, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    struct stat locked, there;
    int err = fcntl(fd, F_OFD_SETLK, &lock) != 0 ? errno : 0;
    /* The file may have been removed, or replaced, before it was locked. */
    if (!err && (fstat(fd, &locked) != 0 || lstat(path, &there) != 0 || locked.st_ino != there.st_ino ||
                 locked.st_dev != there.st_dev))
        err = ESTALE;
    if (err) {
        close(fd);
        return -err;
    }
    return fd;
}

void rigel_unlock(int lock)
{
    close(lock);
}

uint64_t rigel_now_ns(void)
{
    return rg_now_ns();
}

int rigel_segment_reap(const char *path)
{
    char why[RG_PROFILE_ERROR_BYTES];
    rg_segment *seg = rg_segment_open(path, why, sizeof why);
    if (!seg)
        return -1;
    int n = rg_segment_reap(seg);
    munmap(seg, sizeof *seg);
    return n;
}

/* Entered by name and shape; Orion's rows have a name alone. */
static bool enter(rg_segment *seg, const rg_profile_op *op, uint32_t sms)
{
    uint64_t shape =
        op->sms ? 0 : rg_dims_hash(rg_dims_of(op->grid[0], op->grid[1], op->grid[2], op->block[0], op->block[1], op->block[2]));
    uint32_t bound = op->bound < 0 ? RG_BOUND_UNKNOWN : op->bound ? RG_BOUND_COMPUTE : RG_BOUND_MEMORY;
    return rg_kernel_put(seg, rg_kernel_key(op->name, shape), rg_profile_sms(op, sms), bound);
}

const char *rigel_segment_profile(const char *segment, const char *profile, uint32_t sms)
{
    char *why = text_of_thread();
    rg_profile p;
    rg_segment *seg = rg_segment_open(segment, why, RG_PROFILE_ERROR_BYTES);
    if (!seg)
        return why;
    bool ok = rg_profile_read(profile, &p, why, RG_PROFILE_ERROR_BYTES) == 0;
    if (ok) {
        for (uint32_t i = 0; i < p.op_count && ok; i++)
            ok = p.ops[i].kind != RG_PROFILE_KERNEL || enter(seg, &p.ops[i], sms ? sms : 1);
        if (!ok)
            snprintf(why, RG_PROFILE_ERROR_BYTES,
                     "%s: more kernels than fit: the profiles of a launch may have %d that differ in name, grid or block",
                     profile, RG_MAX_KERNELS / 4 * 3);
        rg_profile_free(&p);
    }
    munmap(seg, sizeof *seg);
    return ok ? NULL : why;
}

uint64_t rigel_profile_latency(const char *profile)
{
    char why[RG_PROFILE_ERROR_BYTES];
    rg_profile p;
    if (rg_profile_read(profile, &p, why, sizeof why) < 0)
        return 0;
    uint64_t gpu_ns = 0, host_ns = 0;
    for (uint32_t i = 0; i < p.op_count; i++) {
        gpu_ns += p.ops[i].duration_ns;
        host_ns += p.ops[i].gap_ns;
    }
    const char *said = strstr(p.facts, "iteration_ms=");
    double said_ns = said ? strtod(said + strlen("iteration_ms="), NULL) * 1e6 : 0;
    rg_profile_free(&p);
    if (said_ns >= 1 && said_ns < 1e15)
        return (uint64_t)said_ns;
    return gpu_ns > host_ns ? gpu_ns : host_ns;
}

uint64_t rigel_estimate_key(uint64_t program, const char *device, const char *kernel, uint32_t gx, uint32_t gy, uint32_t gz,
                            uint32_t bx, uint32_t by, uint32_t bz)
{
    rg_dims dims = gx ? rg_dims_of(gx, gy, gz, bx, by, bz) : RG_DIMS_ANY;
    return rg_estimate_key(program, device, rg_text_hash(kernel), dims);
}

int rigel_estimate_enter(const char *path, uint64_t key)
{
    char why[512];
    rg_segment *seg = rg_segment_open(path, why, sizeof why);
    if (!seg)
        return -1;
    int at = rg_estimate_enter(seg, key);
    munmap(seg, sizeof *seg);
    return at;
}
