/*
 * channel.c: the GPU channels of this process: finding them, their time slice, taking them off the GPU and putting them back.
 *
 * A channel is the queue through which a context hands work to the GPU; a context's compute channels form a channel group, and
 * the GPU switches between groups in the middle of kernels. Without MPS each process has groups of its own, and the driver lets
 * a process control them without privileges (seen on H100s and H200s, driver 580.159, and see the sources below):
 *   - the time slice of a group: how long it keeps the GPU once another has work. libcuda sets 2048 us;
 *   - disabling channels: they are taken off the GPU wherever their kernels are, and go on from there once enabled.
 * Measured on an H200, 20 short kernels beside a process that fills the GPU with 2.4 ms kernels, p99: slices of 2048 us 2336
 * us, 200 us 451 us, 50 us 315 us, alone 106 us (native/bench/preempt.cu). Disabling takes 380 to 580 us, enabling 150 to 300 us, as seen by the caller.
 *
 * Source of the interface: NVIDIA's open-gpu-kernel-modules (MIT): nvos.h (NVOS00, NVOS21, NVOS54, NVOS64), ctrla06c.h
 * (NVA06C_CTRL_CMD_SET_TIMESLICE), ctrl2080fifo.h (NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS), ctrl2080gpu.h
 * (NV2080_CTRL_CMD_GPU_GET_GID_INFO). The same in releases 535 to 610. What a driver does differently answers with an error,
 * and then this process is held back at the gate instead.
 *
 * Channels are found by watching this process's own ioctls on the driver's device (interpose.c hands them over). Under MPS the
 * group belongs to the server: no group is found, and nothing is controlled. On the simulated GPU the stand-in libcuda has
 * the two controls as functions.
 */
#include "client.h"

#include <errno.h>
#include <sched.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    RM_MAGIC = 'F',
    RM_FREE = 0x29,
    RM_CONTROL = 0x2a,
    RM_ALLOC = 0x2b,
    CLASS_DEVICE = 0x0080,
    CLASS_SUBDEVICE = 0x2080,
    CLASS_GROUP = 0xa06c,
};
enum { GET_GID_INFO = 0x2080014a, DISABLE_CHANNELS = 0x2080110b, GID_BINARY = 2 };
#define SET_TIMESLICE 0xa06c0103u
#define GET_TIMESLICE 0xa06c0104u

typedef struct {
    uint32_t root, parent, object, class;
} rm_alloc; /* the common beginning of NVOS21_PARAMETERS and NVOS64_PARAMETERS */
typedef struct {
    uint32_t root, parent, object, status;
} rm_free; /* NVOS00_PARAMETERS */
typedef struct {
    uint32_t client, object, command, flags;
    uint64_t params;
    uint32_t params_size, status;
} rm_control; /* NVOS54_PARAMETERS */
typedef struct {
    uint32_t index, flags, length;
    uint8_t data[256];
} rm_gid;
typedef struct {
    uint8_t disable;
    uint32_t count;
    uint8_t only_scheduling, rewind;
    uint64_t event;
    uint32_t client[64], channel[64];
} rm_disable;
_Static_assert(sizeof(rm_control) == 32 && sizeof(rm_gid) == 268 && sizeof(rm_disable) == 536, "the driver checks sizes");

/* Channels are of class 0xc36f (Volta), 0xc46f, 0xc56f, 0xc86f (Hopper), 0xc96f...; compute objects 0xc3c0, 0xc5c0, 0xc6c0... */
static bool is_channel(uint32_t class)
{
    return class >= 0xc36f && class <= 0xffff && (class & 0xff) == 0x6f;
}

static bool is_compute(uint32_t class)
{
    return class >= 0xc3c0 && class <= 0xffff && (class & 0xff) == 0xc0;
}

/* ---- what this process has allocated ---- */

typedef struct {
    uint32_t client, object, parent, class;
    int fd;
} rm_object;

enum { OBJECTS = 2048 };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static rm_object objects[OBJECTS];
static uint32_t object_count;
static _Atomic uint32_t generation;
static _Atomic bool off; /* a forked child, or a table that overflowed */

uint32_t rg_channel_generation(void)
{
    return atomic_load_explicit(&generation, memory_order_relaxed);
}

void rg_channel_off(void)
{
    atomic_store(&off, true);
}

/* A thread that never gets the lock (a child of fork, whose parent held it) does without channels, and goes on. */
static bool take_lock(void)
{
    for (int tries = 0; tries < 100000; tries++) {
        if (pthread_mutex_trylock(&lock) == 0)
            return true;
        sched_yield();
    }
    rg_channel_off();
    return false;
}

static void remember(int fd, const rm_alloc *a)
{
    uint32_t class = a->class;
    if (class != CLASS_DEVICE && class != CLASS_SUBDEVICE && class != CLASS_GROUP && !is_channel(class) && !is_compute(class))
        return;
    if (!take_lock())
        return;
    if (object_count < OBJECTS)
        objects[object_count++] = (rm_object){a->root, a->object, a->parent, class, fd};
    else
        rg_channel_off();
    atomic_fetch_add(&generation, 1);
    pthread_mutex_unlock(&lock);
}

static void drop_children(uint32_t client, uint32_t object)
{
    for (uint32_t i = 0; i < object_count; i++)
        if (objects[i].client == client && (objects[i].object == object || client == object)) {
            objects[i] = objects[--object_count];
            i--;
        }
    for (uint32_t i = 0; i < object_count; i++)
        if (objects[i].client == client && objects[i].parent == object) {
            drop_children(client, objects[i].object);
            i = (uint32_t)-1;
        }
}

static void forget(const rm_free *f)
{
    if (!take_lock())
        return;
    uint32_t before = object_count;
    drop_children(f->root, f->object);
    if (object_count != before)
        atomic_fetch_add(&generation, 1);
    pthread_mutex_unlock(&lock);
}

void rg_channel_saw(int fd, unsigned long request, const void *argument)
{
    /* A failed allocation that is remembered does no harm: nothing hangs below it. A failed release has released nothing. */
    if (_IOC_TYPE(request) != RM_MAGIC || !argument || atomic_load_explicit(&off, memory_order_relaxed))
        return;
    if (_IOC_NR(request) == RM_ALLOC && _IOC_SIZE(request) >= sizeof(rm_alloc))
        remember(fd, argument);
    else if (_IOC_NR(request) == RM_FREE && _IOC_SIZE(request) >= sizeof(rm_free) && !((const rm_free *)argument)->status)
        forget(argument);
}

/* ---- the driver's controls ---- */

/* One control. 0, or -1 where the driver refused. Reaches the kernel directly: nobody else's business. */
static int control(int fd, uint32_t client, uint32_t object, uint32_t command, void *params, uint32_t size)
{
    rm_control c = {client, object, command, 0, (uint64_t)(uintptr_t)params, size, ~0u};
    int saved = errno;
    long rc = syscall(SYS_ioctl, fd, _IOWR(RM_MAGIC, RM_CONTROL, rm_control), &c);
    errno = saved;
    return rc == 0 && c.status == 0 ? 0 : -1;
}

/* Of the first `n` of a table. */
static const rm_object *find_object(const rm_object *table, uint32_t n, uint32_t client, uint32_t object)
{
    for (uint32_t i = 0; i < n; i++)
        if (table[i].client == client && table[i].object == object)
            return &table[i];
    return NULL;
}

/* Whether `device` (an RM handle) is the GPU with this UUID. */
static bool is_gpu(const rm_object *device, const rm_object *subdevice, const char uuid[16])
{
    rm_gid gid = {.flags = GID_BINARY, .length = 16};
    return control(device->fd, subdevice->client, subdevice->object, GET_GID_INFO, &gid, sizeof gid) == 0 &&
           memcmp(gid.data, uuid, 16) == 0;
}

enum rg_found rg_channels_find(rg_channels *found, const char uuid[16], CUdevice ordinal)
{
    memset(found, 0, sizeof *found);
    found->generation = rg_channel_generation();
    if (rg_real.rigelSimSetTimeslice && rg_real.rigelSimSuspend) {
        found->simulated = true;
        found->ordinal = (unsigned)ordinal;
        int result = rg_real.rigelSimSetTimeslice(found->ordinal, 0); /* changes nothing: no context, shared, or no slice */
        return result == -ENODEV ? RG_CHANNELS_NONE : result == -ENOTSUP ? RG_CHANNELS_FOREIGN : RG_CHANNELS_FOUND;
    }
    if (atomic_load(&off))
        return RG_CHANNELS_FOREIGN;
    /* The driver may take long to answer, and the program's threads take the lock in every allocation: it is asked about a copy. */
    static rm_object copy[OBJECTS];
    static pthread_mutex_t copy_lock = PTHREAD_MUTEX_INITIALIZER; /* threads of Rigel's alone */
    bool foreign = false;
    const rm_object *mine = NULL, *mine_subdevice = NULL; /* the device that was found to be this GPU */
    pthread_mutex_lock(&copy_lock);
    uint32_t n = 0;
    if (take_lock()) {
        n = object_count;
        memcpy(copy, objects, n * sizeof *copy);
        pthread_mutex_unlock(&lock);
    } else {
        foreign = true;
    }
    for (uint32_t i = 0; i < n && !foreign; i++) {
        if (!is_compute(copy[i].class))
            continue;
        const rm_object *channel = find_object(copy, n, copy[i].client, copy[i].parent);
        const rm_object *group = channel ? find_object(copy, n, channel->client, channel->parent) : NULL;
        if (!channel || !is_channel(channel->class))
            continue;
        if (!group || group->class != CLASS_GROUP) {
            foreign = true; /* the group is somebody else's: MPS */
            break;
        }
        const rm_object *device = find_object(copy, n, group->client, group->parent), *subdevice = NULL;
        for (uint32_t k = 0; device && k < n; k++)
            if (copy[k].class == CLASS_SUBDEVICE && copy[k].client == device->client && copy[k].parent == device->object)
                subdevice = &copy[k];
        if (!device || !subdevice)
            continue;
        if (device != mine) {
            if (!is_gpu(device, subdevice, uuid))
                continue;
            mine = device;
            mine_subdevice = subdevice;
        }
        if (found->channels == RG_CHANNELS) {
            foreign = true; /* a part of them would not do */
            break;
        }
        found->fd = channel->fd;
        found->subdevice_client = mine_subdevice->client;
        found->subdevice = mine_subdevice->object;
        found->client[found->channels] = channel->client;
        found->channel[found->channels++] = channel->object;
        uint32_t g = 0;
        while (g < found->groups && found->group[g] != group->object)
            g++;
        if (g == found->groups && g < RG_CHANNEL_GROUPS) {
            found->group_client[g] = group->client;
            found->group[g] = group->object;
            found->groups++;
        }
    }
    pthread_mutex_unlock(&copy_lock);
    if (foreign)
        found->channels = 0;
    return foreign ? RG_CHANNELS_FOREIGN : found->channels ? RG_CHANNELS_FOUND : RG_CHANNELS_NONE;
}

int rg_channels_slice(const rg_channels *c, uint64_t slice_us)
{
    if (c->simulated)
        return rg_real.rigelSimSetTimeslice(c->ordinal, slice_us) == 0 ? 0 : -1;
    int result = 0;
    for (uint32_t g = 0; g < c->groups; g++)
        if (control(c->fd, c->group_client[g], c->group[g], SET_TIMESLICE, &slice_us, sizeof slice_us) != 0)
            result = -1;
    return result;
}

static int disable_some(const rg_channels *c, uint32_t from, uint32_t count, bool disable)
{
    /* Never `only_scheduling`, which leaves the channels on the GPU until their slice ends: enabled again before that, work that
     * had been queued meanwhile was never noticed and its program waited for ever (H200, within seconds of a stress of 4
     * streams; none in 1,718 suspensions with it off). */
    rm_disable d = {.disable = disable, .count = count};
    memcpy(d.client, c->client + from, count * sizeof *d.client);
    memcpy(d.channel, c->channel + from, count * sizeof *d.channel);
    return control(c->fd, c->subdevice_client, c->subdevice, DISABLE_CHANNELS, &d, sizeof d);
}

int rg_channels_suspend(const rg_channels *c)
{
    if (c->simulated)
        return rg_real.rigelSimSuspend(c->ordinal, 1) == 0 ? 0 : -1;
    return disable_some(c, 0, c->channels, true);
}

static bool is_gone(const rg_channels *c, uint32_t i)
{
    bool known = take_lock(), gone = known && !find_object(objects, object_count, c->client[i], c->channel[i]);
    if (known)
        pthread_mutex_unlock(&lock);
    return gone;
}

int rg_channels_resume(const rg_channels *c)
{
    if (c->simulated) {
        int result = rg_real.rigelSimSuspend(c->ordinal, 0);
        return result == 0 || result == -ENODEV ? 0 : -1; /* gone, as below */
    }
    if (disable_some(c, 0, c->channels, false) == 0)
        return 0;
    /* One of them may be gone, or go meanwhile: no reason to leave the others where they are. */
    uint32_t refused = 0;
    for (uint32_t i = 0; i < c->channels; i++)
        refused += !is_gone(c, i) && disable_some(c, i, 1, false) != 0 && !is_gone(c, i);
    return refused ? -1 : 0;
}
