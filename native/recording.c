/*
 * recording.c: the recording's file (record.h): made and described for the control process, opened and written by clients.
 *
 * Knows nothing of launches. Lock-free, and valid whatever instant a writer is killed at.
 */
#include "record.h"
#include "layout.h"
#include "rigel.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { REACH = 64 }; /* how far from its place a kind may be */

static size_t size_for(uint64_t capacity)
{
    return sizeof(rg_recording) + capacity * RG_REC_WORDS * sizeof(uint64_t);
}

int rigel_record_create(const char *path, uint32_t capacity)
{
    if (capacity & (capacity - 1) || capacity > 1u << 24)
        return -EINVAL;
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return -errno;
    rg_recording *r = MAP_FAILED;
    int err = fchmod(fd, 0600) == 0 ? 0 : errno;
    /* All of its room now: a client that writes to a page for which there is none left then is ended by that. */
    if (!err)
        while ((err = posix_fallocate(fd, 0, (off_t)size_for(capacity))) == EINTR)
            continue;
    if (!err && (r = mmap(NULL, size_for(capacity), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)) == MAP_FAILED)
        err = errno;
    close(fd);
    if (err) {
        unlink(path);
        return -err;
    }
    atomic_store(&r->header.version, RG_REC_VERSION);
    atomic_store(&r->header.capacity, capacity);
    atomic_store(&r->header.magic, RG_RECORDING_MAGIC);
    munmap(r, size_for(capacity));
    return 0;
}

rg_recording *rg_record_open(const char *path, char *why, size_t why_bytes)
{
    struct stat st;
    rg_recording *r = MAP_FAILED;
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0 || fstat(fd, &st) != 0)
        snprintf(why, why_bytes, "the recording %s cannot be opened (%s)", path, strerror(errno));
    else if (!S_ISREG(st.st_mode) || st.st_uid != geteuid() || (st.st_mode & 077))
        snprintf(why, why_bytes, "the recording %s is not a file of this user alone", path);
    else if ((size_t)st.st_size < sizeof *r)
        snprintf(why, why_bytes, "the recording %s is too short", path);
    else if ((r = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)) == MAP_FAILED)
        snprintf(why, why_bytes, "the recording %s cannot be mapped (%s)", path, strerror(errno));
    if (fd >= 0)
        close(fd);
    if (r == MAP_FAILED)
        return NULL;
    if (atomic_load(&r->header.magic) == RG_RECORDING_MAGIC && atomic_load(&r->header.version) == RG_REC_VERSION &&
        size_for(atomic_load(&r->header.capacity)) == (size_t)st.st_size)
        return r;
    munmap(r, (size_t)st.st_size);
    snprintf(why, why_bytes, "the recording %s is of another version", path);
    return NULL;
}

/* Gives `bytes` of the names out and fills them; 0 bytes if there is no room for them. */
static void put_name(rg_recording *r, rg_record_kind *k, const char *name)
{
    size_t bytes = name ? strlen(name) : 0;
    uint32_t at = atomic_load(&r->header.names);
    do {
        if (!bytes || at > RG_REC_NAME_BYTES - 1 || bytes > RG_REC_NAME_BYTES - 1 - at)
            return;
    } while (!atomic_compare_exchange_weak(&r->header.names, &at, at + (uint32_t)bytes + 1));
    memcpy(r->names + at, name, bytes);
    atomic_store(&k->name_at, at);
    atomic_store(&k->name_bytes, (uint32_t)bytes);
}

int rg_record_enter(rg_recording *r, const rg_record_facts *f)
{
    uint64_t key = f->name ? rg_text_hash(f->name) : 1;
    key = rg_hash_fold(rg_hash_fold(rg_hash_fold(key, f->dims.grid), f->dims.block), f->bytes);
    key = rg_hash_fold(rg_hash_fold(key, (uint64_t)f->registers << 32 | f->shared_bytes), f->work) | 1;
    for (uint32_t i = 0; i < REACH; i++) {
        uint32_t at = (uint32_t)((key >> 40) + i) % RG_REC_KINDS;
        rg_record_kind *k = &r->kinds[at];
        uint64_t found = 0;
        if (!atomic_compare_exchange_strong(&k->key, &found, key)) {
            if (found == key)
                return (int)at;
            continue;
        }
        put_name(r, k, f->name);
        atomic_store(&k->work, (uint32_t)f->work);
        atomic_store(&k->bytes, f->bytes);
        atomic_store(&k->grid_x, (uint32_t)f->dims.grid);
        atomic_store(&k->grid_y, (uint32_t)(f->dims.grid >> 32) & 0xffff);
        atomic_store(&k->grid_z, (uint32_t)(f->dims.grid >> 48));
        atomic_store(&k->block_x, (uint32_t)f->dims.block & 0xffff);
        atomic_store(&k->block_y, (uint32_t)(f->dims.block >> 16) & 0xffff);
        atomic_store(&k->block_z, (uint32_t)(f->dims.block >> 32));
        atomic_store(&k->registers, f->registers);
        atomic_store(&k->shared_bytes, f->shared_bytes);
        atomic_store(&k->sms, f->sms);
        atomic_fetch_add(&r->header.kinds, 1);
        atomic_store(&k->state, 1);
        return (int)at;
    }
    return -1;
}

bool rg_record_put(rg_recording *r, const uint64_t words[RG_REC_WORDS - 1])
{
    uint64_t capacity = atomic_load_explicit(&r->header.capacity, memory_order_relaxed);
    uint64_t at = atomic_load(&r->header.begun);
    do {
        if (at - atomic_load(&r->header.taken) >= capacity) {
            atomic_fetch_add(&r->header.lost, 1);
            return false;
        }
    } while (!atomic_compare_exchange_weak(&r->header.begun, &at, at + 1));
    _Atomic uint64_t *entry = r->entries[at & (capacity - 1)];
    for (int i = 1; i < RG_REC_WORDS; i++)
        atomic_store_explicit(&entry[i], words[i - 1], memory_order_relaxed);
    /* Pairs with the reader's load of it: the words are there before their number is. */
    atomic_store_explicit(&entry[0], at + 1, memory_order_release);
    return true;
}

static char layout[4096];

static void build_layout(void)
{
    rg_layout l = {layout, sizeof layout, 0};
    rg_layout_put(&l, "{\"version\":%d,\"size\":%zu,\"words\":%d,\"names\":{\"offset\":%zu,\"bytes\":%d},\"entries\":{\"offset\":%zu}",
                  RG_REC_VERSION, sizeof(rg_recording), RG_REC_WORDS, offsetof(rg_recording, names), RG_REC_NAME_BYTES,
                  offsetof(rg_recording, entries));
    RG_LAYOUT_SECTION(&l, rg_recording, header, rg_record_header, RG_REC_HEADER_FIELDS);
    RG_LAYOUT_SECTION(&l, rg_recording, kinds, rg_record_kind, RG_REC_KIND_FIELDS);
    rg_layout_put(&l, "}");
}

const char *rigel_record_layout(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, build_layout);
    return layout;
}
