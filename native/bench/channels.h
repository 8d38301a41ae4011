/*
 * channels.h: a process's own channels, without Rigel, for the programs here: found by its calls of the driver, disabled, and their time slice.
 *
 * The interface is that of native/channel.c, which says where it comes from. Include it in one file of a program only. Needs CUDA's runtime.
 */
#ifndef RIGEL_BENCH_CHANNELS_H
#define RIGEL_BENCH_CHANNELS_H

#include <cstdarg>
#include <cstdint>
#include <cstdlib>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <vector>

static inline double now_us()
{
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

struct Object {
    uint32_t client, handle, parent, cls;
    int fd;
};
struct Control {
    uint32_t client, object, command, flags;
    uint64_t params;
    uint32_t size, status;
};
static std::vector<Object> *objects; /* never freed: libcuda's ioctls go on until the end */
static std::vector<Object> channels;
static Object subdevice, group;

extern "C" int ioctl(int fd, unsigned long request, ...) noexcept
{
    va_list arguments;
    va_start(arguments, request);
    uint32_t *a = va_arg(arguments, uint32_t *);
    va_end(arguments);
    int result = (int)syscall(SYS_ioctl, fd, request, a);
    if (result == 0 && _IOC_TYPE(request) == 'F' && _IOC_NR(request) == 0x2b && a) {
        if (!objects)
            objects = new std::vector<Object>;
        objects->push_back({a[0], a[2], a[1], a[3], fd});
    }
    return result;
}

static int control(const Object &on, uint32_t command, void *params, uint32_t size)
{
    Control c = {on.client, on.handle, command, 0, (uint64_t)params, size, ~0u};
    return syscall(SYS_ioctl, on.fd, _IOWR('F', 0x2a, Control), &c) == 0 ? (int)c.status : -1;
}

static const Object *find(uint32_t client, uint32_t handle)
{
    for (const Object &o : *objects)
        if (o.client == client && o.handle == handle)
            return &o;
    return nullptr;
}

static bool find_channels()
{
    for (const Object &o : *objects) {
        if (o.cls < 0xc3c0 || (o.cls & 0xff) != 0xc0)
            continue;
        const Object *channel = find(o.client, o.parent), *its_group = channel ? find(channel->client, channel->parent) : nullptr;
        if (!its_group || its_group->cls != 0xa06c)
            return false; /* MPS */
        channels.push_back(*channel);
        group = *its_group;
    }
    for (const Object &o : *objects)
        if (o.cls == 0x2080 && !channels.empty() && o.parent == group.parent)
            subdevice = o;
    return !channels.empty();
}

/* Disables the channels, or enables them again; `only_scheduling`: they stay on the GPU until their slice ends. */
static inline int suspend(bool off, bool only_scheduling = false)
{
    struct {
        uint8_t disable;
        uint32_t count;
        uint8_t only_scheduling, rewind;
        uint64_t event;
        uint32_t client[64], channel[64];
    } d = {};
    d.disable = off;
    d.only_scheduling = only_scheduling;
    for (const Object &c : channels) {
        d.client[d.count] = c.client;
        d.channel[d.count++] = c.handle;
    }
    return control(subdevice, 0x2080110b, &d, sizeof d);
}

static int set_slice(uint64_t us)
{
    return control(group, 0xa06c0103, &us, sizeof us);
}

/* Where kernels are interrupted: 0: between them; 1: between blocks; 2: anywhere, as libcuda has it. NV2080_CTRL_CMD_GR_SET_CTXSW_PREEMPTION_MODE. */
static inline int set_mode(uint32_t mode)
{
    struct {
        uint32_t flags, channel, graphics, compute;
        uint64_t route[2];
    } p = {1, group.handle, 0, mode, {0, 0}};
    return control(subdevice, 0x20801210, &p, sizeof p);
}

#endif
