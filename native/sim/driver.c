/*
 * driver.c: initialisation, devices, contexts, error texts, objects and the end of the process.
 *
 * Result codes follow the reference manual ("CUDA Driver API", CUDA 13.0), function by function; where it leaves a case
 * open, the comment at the place says what was chosen.
 */
#include "driver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

sim_process sim = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* Its presence tells rigel-replay and tests that the GPU is simulated. */
extern const int rigel_sim_marker;
API const int rigel_sim_marker = 1;

/* ---- Objects: chunks that are never freed, so that a stale handle can be looked up; a handle holds a generation. */

enum { CHUNK = 256, CHUNKS = 4096 };
#define HANDLE_TAG 0x5au

static _Atomic(sim_object *) chunks[CHUNKS];
static uint32_t object_count; /* objects ever made; index 0 is none */
static sim_object *free_first, *free_last;

static sim_object *object_at(uint32_t index)
{
    if (index / CHUNK >= CHUNKS) return NULL;
    sim_object *chunk = atomic_load_explicit(&chunks[index / CHUNK], memory_order_acquire);
    return chunk ? &chunk[index % CHUNK] : NULL;
}

sim_object *sim_new(sim_type type, sim_object *context)
{
    /* Oldest first: a handle that was just destroyed is not given out again at once. */
    sim_object *o = free_first;
    uint32_t index, generation;
    if (o && object_count >= CHUNK) {
        free_first = o->next;
        if (!free_first) free_last = NULL;
    } else {
        index = object_count + 1;
        if (index / CHUNK >= CHUNKS) return NULL;
        if (!object_at(index)) {
            sim_object *chunk = calloc(CHUNK, sizeof *chunk);
            if (!chunk) return NULL;
            atomic_store_explicit(&chunks[index / CHUNK], chunk, memory_order_release);
        }
        o = object_at(index);
        o->index = ++object_count;
    }
    index = o->index;
    generation = (o->generation + 1) & 0xffffff;
    memset((char *)o + sizeof o->handle, 0, sizeof *o - sizeof o->handle);
    o->index = index;
    o->generation = generation;
    o->type = type;
    o->context = context;
    o->device = context ? context->device : 0;
    atomic_store_explicit(&o->handle, (uint64_t)HANDLE_TAG << 56 | (uint64_t)generation << 32 | index,
                          memory_order_release);
    return o;
}

void sim_delete(sim_object *o)
{
    atomic_store_explicit(&o->handle, 0, memory_order_release);
    o->next = NULL;
    if (free_last) free_last->next = o;
    else free_first = o;
    free_last = o;
}

sim_object *sim_get(const void *handle, sim_type type)
{
    uint64_t h = (uint64_t)(uintptr_t)handle;
    if (h >> 56 != HANDLE_TAG) return NULL;
    sim_object *o = object_at((uint32_t)h);
    if (!o || atomic_load_explicit(&o->handle, memory_order_acquire) != h) return NULL;
    return o->type == type ? o : NULL;
}

sim_object *sim_each(const sim_object *previous)
{
    for (uint32_t i = previous ? previous->index + 1 : 1; i <= object_count; i++) {
        sim_object *o = object_at(i);
        if (atomic_load(&o->handle)) return o;
    }
    return NULL;
}

/* ---- Threads and phases */

static _Thread_local sim_thread thread;
static pthread_key_t thread_key; /* its destructor is the only way to learn that a thread ends */

/* A thread's default streams go with it; what is queued in them still runs. */
static void end_thread(void *unused)
{
    (void)unused;
    for (int i = 0; i < thread.stream_count && atomic_load(&sim.phase) == SIM_RUNNING; i++)
        sim_destroy_stream(thread.streams[i]);
    thread.stream_count = 0;
}

CUresult sim_keep_thread_stream(void *handle)
{
    if (thread.stream_count == SIM_THREAD_STREAMS || pthread_setspecific(thread_key, &thread))
        return CUDA_ERROR_OUT_OF_MEMORY;
    thread.streams[thread.stream_count++] = handle;
    return CUDA_SUCCESS;
}

sim_thread *sim_self(void)
{
    return &thread;
}

CUresult sim_enter(void)
{
    switch (atomic_load_explicit(&sim.phase, memory_order_acquire)) {
    case SIM_RUNNING: return CUDA_SUCCESS;
    case SIM_ENDED: return CUDA_ERROR_DEINITIALIZED;
    default: return CUDA_ERROR_NOT_INITIALIZED;
    }
}

CUresult sim_current(sim_object **context)
{
    CUresult r = sim_enter();
    if (r) return r;
    if (!thread.depth || !thread.stack[thread.depth - 1]) return CUDA_ERROR_INVALID_CONTEXT;
    *context = sim_get(thread.stack[thread.depth - 1], SIM_CONTEXT);
    return *context ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

/* A child has the memory of its parent but none of its contexts: every call fails in it, as with the real driver. */
static void in_child(void)
{
    if (atomic_load(&sim.phase) == SIM_RUNNING) atomic_store(&sim.phase, SIM_FORKED);
}

static void at_end(void)
{
    int running = SIM_RUNNING;
    if (atomic_compare_exchange_strong(&sim.phase, &running, SIM_ENDED)) sim_detach();
}

API CUresult cuInit(unsigned flags)
{
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    /* Another thread may have held the lock when its process forked. */
    if (atomic_load(&sim.phase) == SIM_FORKED) return CUDA_ERROR_NOT_INITIALIZED;
    pthread_mutex_lock(&sim.lock);
    CUresult r = CUDA_SUCCESS;
    switch (atomic_load(&sim.phase)) {
    case SIM_UNBORN:
        r = sim_attach(&sim.devices);
        if (r == CUDA_SUCCESS && !sim.devices) {
            sim_detach();
            r = CUDA_ERROR_NO_DEVICE;
        }
        if (r != CUDA_SUCCESS) break;
        pthread_key_create(&thread_key, end_thread);
        pthread_atfork(NULL, NULL, in_child);
        atexit(at_end);
        at_quick_exit(at_end); /* Bun leaves that way */
        atomic_store_explicit(&sim.phase, SIM_RUNNING, memory_order_release);
        break;
    case SIM_RUNNING: break;
    case SIM_ENDED: r = CUDA_ERROR_DEINITIALIZED; break;
    default: r = CUDA_ERROR_NOT_INITIALIZED; break;
    }
    pthread_mutex_unlock(&sim.lock);
    return r;
}

API CUresult cuDriverGetVersion(int *version)
{
    if (!version) return CUDA_ERROR_INVALID_VALUE;
    *version = SIM_DRIVER_VERSION;
    return CUDA_SUCCESS;
}

API CUresult cuGetProcAddress(const char *name, void **out, int version, uint64_t flags)
{
    return sim_get_proc_address(name, out, version, flags);
}

API CUresult cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status)
{
    return sim_get_proc_address_v2(name, out, version, flags, status);
}

/* ---- Devices */

static CUresult enter_device(CUdevice device)
{
    CUresult r = sim_enter();
    if (r) return r;
    return device >= 0 && device < sim.devices ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

API CUresult cuDeviceGetCount(int *count)
{
    CUresult r = sim_enter();
    if (r) return r;
    if (!count) return CUDA_ERROR_INVALID_VALUE;
    *count = sim.devices;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    CUresult r = enter_device(ordinal);
    if (r) return r;
    if (!device) return CUDA_ERROR_INVALID_VALUE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetName(char *name, int length, CUdevice device)
{
    CUresult r = enter_device(device);
    if (r) return r;
    if (!name || length <= 0) return CUDA_ERROR_INVALID_VALUE;
    snprintf(name, (size_t)length, "%s", sim_params(device)->name);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device)
{
    CUresult r = enter_device(device);
    if (r) return r;
    if (!uuid) return CUDA_ERROR_INVALID_VALUE;
    sim_uuid(device, uuid->bytes);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
    CUresult r = enter_device(device);
    if (r) return r;
    if (!uuid) return CUDA_ERROR_INVALID_VALUE;
    sim_uuid(device, uuid->bytes);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    CUresult r = enter_device(device);
    if (r) return r;
    if (!bytes) return CUDA_ERROR_INVALID_VALUE;
    *bytes = sim_params(device)->memory_bytes;
    return CUDA_SUCCESS;
}

/* The simulated devices sit at 0000:10:00.0, 0000:11:00.0 and so on. */
API CUresult cuDeviceGetPCIBusId(char *id, int length, CUdevice device)
{
    CUresult r = enter_device(device);
    if (r) return r;
    if (!id || length <= 0) return CUDA_ERROR_INVALID_VALUE;
    snprintf(id, (size_t)length, "0000:%02X:00.0", 0x10 + device);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *id)
{
    CUresult r = sim_enter();
    if (r) return r;
    if (!device || !id) return CUDA_ERROR_INVALID_VALUE;
    unsigned domain = 0, bus, slot, function = 0;
    int fields = sscanf(id, "%x:%x:%x.%x", &domain, &bus, &slot, &function);
    if (fields < 3) {
        domain = function = 0;
        fields = sscanf(id, "%x:%x.%x", &bus, &slot, &function);
        if (fields < 2) return CUDA_ERROR_INVALID_VALUE;
    }
    if (domain || slot || function || bus < 0x10 || bus >= 0x10u + (unsigned)sim.devices)
        return CUDA_ERROR_INVALID_DEVICE;
    *device = (int)bus - 0x10;
    return CUDA_SUCCESS;
}

/* An attribute that is not listed is a feature the simulated GPU does not have: 0. */
API CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    enum { LAST_ATTRIBUTE = 147 }; /* of CUDA 13.0 */
    CUresult r = enter_device(device);
    if (r) return r;
    if (!value || attribute <= 0 || attribute > LAST_ATTRIBUTE) return CUDA_ERROR_INVALID_VALUE;
    const rg_model_params *p = sim_params(device);
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = (int)p->threads_per_block; break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: *value = 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: *value = 64; break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: *value = 0x7fffffff; break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: *value = 65535; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *value = 48 * 1024; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: *value = (int)p->registers_per_sm; break;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *value = (int)p->clock_khz; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = (int)p->sms; break;
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH: *value = 1; break;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: *value = 0x10 + device; break;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: *value = (int)p->memory_clock_khz; break;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *value = (int)p->memory_bus_bits; break;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: *value = (int)p->l2_bytes; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *value = (int)p->threads_per_sm; break;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: *value = 2; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = (int)p->compute_major; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = (int)p->compute_minor; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = (int)p->shared_bytes_per_sm; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = (int)p->shared_bytes_per_block; break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: *value = (int)p->blocks_per_sm; break;
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: *value = (int)p->reserved_shared_bytes; break;
    default: *value = 0; break;
    }
    return CUDA_SUCCESS;
}

API CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice device)
{
    CUresult r = enter_device(device);
    if (r) return r;
    if (!major || !minor) return CUDA_ERROR_INVALID_VALUE;
    *major = (int)sim_params(device)->compute_major;
    *minor = (int)sim_params(device)->compute_minor;
    return CUDA_SUCCESS;
}

/* ---- Contexts. The functions below that make or destroy one hold sim.lock. */

static CUresult make_context(int device, unsigned flags, int primary, sim_object **out)
{
    sim_object *c = sim_new(SIM_CONTEXT, NULL);
    if (!c) return CUDA_ERROR_OUT_OF_MEMORY;
    c->device = device;
    c->ctx.flags = flags;
    c->ctx.primary = primary;
    sim_reap(0);
    rg_model *m = sim_lock(device);
    int full = rg_model_add_context(m, &c->id);
    if (!full) sim_own_context(device, c->id);
    sim_unlock();
    if (full || sim_new_stream(c, 0, 0, 1, &c->ctx.legacy)) {
        sim_delete(c);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = c;
    return CUDA_SUCCESS;
}

/* Everything that goes with a context goes: handles are stale afterwards, memory is free, work in flight is cut. */
static void drop_context(sim_object *c)
{
    for (sim_object *o = sim_each(NULL); o; o = sim_each(o))
        if (o->context == c && o->type == SIM_STREAM) sim_capture_leave(o);
    for (sim_object *o = sim_each(NULL); o; o = sim_each(o)) {
        if (o->context != c) continue;
        switch (o->type) {
        case SIM_MODULE: sim_delete_module(o); break;
        case SIM_GRAPH: sim_delete_graph(o); break;
        case SIM_EXEC: sim_delete_exec(o); break;
        case SIM_STREAM:
        case SIM_ARRAY:
        case SIM_EVENT: sim_delete(o); break;
        default: break; /* functions and nodes go with theirs */
        }
    }
    sim_forget_memory(c);
    sim_lock(c->device);
    sim_remove_context(c->device, c->id);
    sim_unlock();
    sim_delete(c);
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    CUresult r = enter_device(device);
    if (r) return r;
    if (!context) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sim.lock);
    if (!sim.device[device].primary)
        r = make_context(device, sim.device[device].primary_flags, 1, &sim.device[device].primary);
    if (r == CUDA_SUCCESS) {
        sim.device[device].primary_refs++;
        *context = sim_handle(sim.device[device].primary);
    }
    pthread_mutex_unlock(&sim.lock);
    return r;
}

static CUresult release_primary(CUdevice device, int all)
{
    CUresult r = enter_device(device);
    if (r) return r;
    pthread_mutex_lock(&sim.lock);
    if (!sim.device[device].primary_refs && !all) r = CUDA_ERROR_INVALID_CONTEXT;
    else if (all) sim.device[device].primary_refs = 0;
    else sim.device[device].primary_refs--;
    if (r == CUDA_SUCCESS && !sim.device[device].primary_refs && sim.device[device].primary) {
        drop_context(sim.device[device].primary);
        sim.device[device].primary = NULL;
    }
    pthread_mutex_unlock(&sim.lock);
    return r;
}

API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    return release_primary(device, 0);
}

API CUresult cuDevicePrimaryCtxReset_v2(CUdevice device)
{
    return release_primary(device, 1);
}

/* The names of before CUDA 4 and 11 whose interface is the same: programs that were built then still use them. */
API CUresult cuDevicePrimaryCtxRelease(CUdevice device)
{
    return release_primary(device, 0);
}

API CUresult cuDevicePrimaryCtxReset(CUdevice device)
{
    return release_primary(device, 1);
}

API CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags)
{
    CUresult r = enter_device(device);
    if (r) return r;
    pthread_mutex_lock(&sim.lock);
    sim.device[device].primary_flags = flags;
    if (sim.device[device].primary) sim.device[device].primary->ctx.flags = flags;
    pthread_mutex_unlock(&sim.lock);
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    CUresult r = enter_device(device);
    if (r) return r;
    if (!flags || !active) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sim.lock);
    *flags = sim.device[device].primary_flags;
    *active = sim.device[device].primary != NULL;
    pthread_mutex_unlock(&sim.lock);
    return CUDA_SUCCESS;
}

static CUresult create_context(CUcontext *context, unsigned flags, CUdevice device)
{
    CUresult r = enter_device(device);
    if (r) return r;
    if (!context) return CUDA_ERROR_INVALID_VALUE;
    if (thread.depth == SIM_CONTEXT_STACK) return CUDA_ERROR_OUT_OF_MEMORY;
    sim_object *c;
    pthread_mutex_lock(&sim.lock);
    r = make_context(device, flags, 0, &c);
    pthread_mutex_unlock(&sim.lock);
    if (r) return r;
    *context = sim_handle(c);
    thread.stack[thread.depth++] = *context;
    return CUDA_SUCCESS;
}

API CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device)
{
    return create_context(context, flags, device);
}

/* Affinity to some of the SMs, and green contexts, are not simulated. */
API CUresult cuCtxCreate_v3(CUcontext *context, void *affinity, int count, unsigned flags, CUdevice device)
{
    return affinity || count ? CUDA_ERROR_NOT_SUPPORTED : create_context(context, flags, device);
}

API CUresult cuCtxCreate_v4(CUcontext *context, void *params, unsigned flags, CUdevice device)
{
    return params ? CUDA_ERROR_NOT_SUPPORTED : create_context(context, flags, device);
}

static CUresult destroy_context(CUcontext context)
{
    CUresult r = sim_enter();
    if (r) return r;
    pthread_mutex_lock(&sim.lock);
    sim_object *c = sim_get(context, SIM_CONTEXT);
    if (!c || c->ctx.primary) r = CUDA_ERROR_INVALID_CONTEXT; /* the primary one is released, not destroyed */
    else drop_context(c);
    pthread_mutex_unlock(&sim.lock);
    if (r == CUDA_SUCCESS && thread.depth && thread.stack[thread.depth - 1] == (void *)context) thread.depth--;
    return r;
}

API CUresult cuCtxDestroy_v2(CUcontext context)
{
    return destroy_context(context);
}

API CUresult cuCtxDestroy(CUcontext context)
{
    return destroy_context(context);
}

/* Both are of the current context. */
static sim_object *attachable(void)
{
    sim_object *c = thread.depth ? sim_get(thread.stack[thread.depth - 1], SIM_CONTEXT) : NULL;
    return c && !c->ctx.primary ? c : NULL;
}

API CUresult cuCtxAttach(CUcontext *context, unsigned flags)
{
    CUresult r = sim_enter();
    if (r) return r;
    if (!context || flags) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sim.lock);
    sim_object *c = attachable();
    if (c) c->ctx.attached++;
    *context = c ? sim_handle(c) : NULL;
    pthread_mutex_unlock(&sim.lock);
    return c ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

API CUresult cuCtxDetach(CUcontext context)
{
    CUresult r = sim_enter();
    if (r) return r;
    pthread_mutex_lock(&sim.lock);
    sim_object *c = attachable();
    if (!c || (CUcontext)sim_handle(c) != context) r = CUDA_ERROR_INVALID_CONTEXT;
    int last = r == CUDA_SUCCESS && !c->ctx.attached;
    if (r == CUDA_SUCCESS && !last) c->ctx.attached--;
    pthread_mutex_unlock(&sim.lock);
    return last ? destroy_context(context) : r;
}

/* The simulated GPU's SMs are not given out in parts. */
API CUresult cuCtxFromGreenCtx(CUcontext *context, CUgreenCtx green)
{
    (void)context, (void)green;
    return CUDA_ERROR_NOT_SUPPORTED;
}

API CUresult cuGreenCtxDestroy(CUgreenCtx green)
{
    (void)green;
    return CUDA_ERROR_NOT_SUPPORTED;
}

API CUresult cuGreenCtxStreamCreate(CUstream *stream, CUgreenCtx green, unsigned flags, int priority)
{
    (void)stream, (void)green, (void)flags, (void)priority;
    return CUDA_ERROR_NOT_SUPPORTED;
}

API CUresult cuCtxPushCurrent_v2(CUcontext context)
{
    CUresult r = sim_enter();
    if (r) return r;
    if (context && !sim_get(context, SIM_CONTEXT)) return CUDA_ERROR_INVALID_CONTEXT;
    if (thread.depth == SIM_CONTEXT_STACK) return CUDA_ERROR_OUT_OF_MEMORY;
    thread.stack[thread.depth++] = context;
    return CUDA_SUCCESS;
}

API CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
    CUresult r = sim_enter();
    if (r) return r;
    if (!thread.depth) return CUDA_ERROR_INVALID_CONTEXT;
    void *top = thread.stack[--thread.depth];
    if (context) *context = top;
    return CUDA_SUCCESS;
}

API CUresult cuCtxSetCurrent(CUcontext context)
{
    CUresult r = sim_enter();
    if (r) return r;
    if (context && !sim_get(context, SIM_CONTEXT)) return CUDA_ERROR_INVALID_CONTEXT;
    /* "Replaces the top of the stack"; NULL pops it. */
    if (thread.depth) thread.depth--;
    if (context) thread.stack[thread.depth++] = context;
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetCurrent(CUcontext *context)
{
    CUresult r = sim_enter();
    if (r) return r;
    if (!context) return CUDA_ERROR_INVALID_VALUE;
    *context = thread.depth ? thread.stack[thread.depth - 1] : NULL;
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetDevice(CUdevice *device)
{
    sim_object *c;
    CUresult r = sim_current(&c);
    if (r) return r;
    if (!device) return CUDA_ERROR_INVALID_VALUE;
    *device = c->device;
    return CUDA_SUCCESS;
}

/* The context meant: the current one for NULL. */
static CUresult named_context(CUcontext context, sim_object **out)
{
    CUresult r = context ? sim_enter() : sim_current(out);
    if (r || !context) return r;
    *out = sim_get(context, SIM_CONTEXT);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

API CUresult cuCtxGetDevice_v2(CUdevice *device, CUcontext context)
{
    sim_object *c;
    CUresult r = named_context(context, &c);
    if (r) return r;
    if (!device) return CUDA_ERROR_INVALID_VALUE;
    *device = c->device;
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetId(CUcontext context, unsigned long long *id)
{
    sim_object *c;
    CUresult r = named_context(context, &c);
    if (r) return r;
    if (!id) return CUDA_ERROR_INVALID_VALUE;
    *id = (uint64_t)(uintptr_t)sim_handle(c) & 0xffffffffffffff; /* never given out twice */
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetFlags(unsigned *flags)
{
    sim_object *c;
    CUresult r = sim_current(&c);
    if (r) return r;
    if (!flags) return CUDA_ERROR_INVALID_VALUE;
    *flags = c->ctx.flags;
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetApiVersion(CUcontext context, unsigned *version)
{
    sim_object *c;
    CUresult r = named_context(context, &c);
    if (r) return r;
    if (!version) return CUDA_ERROR_INVALID_VALUE;
    *version = 3020; /* what every context made by cuCtxCreate_v2 and later says */
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    sim_object *c;
    CUresult r = sim_current(&c);
    if (r) return r;
    if (least) *least = RG_MODEL_LOWEST_PRIORITY;
    if (greatest) *greatest = RG_MODEL_HIGHEST_PRIORITY;
    return CUDA_SUCCESS;
}

static CUresult synchronize(sim_object *c)
{
    CUresult r = sim_context_conflict(c);
    if (r) return r;
    rg_model *m = sim_lock(c->device);
    sim_until until = {SIM_UNTIL_CONTEXT, c->id, m->last_ticket};
    sim_unlock();
    return sim_wait(c->device, until);
}

API CUresult cuCtxSynchronize(void)
{
    sim_object *c;
    CUresult r = sim_current(&c);
    return r ? r : synchronize(c);
}

API CUresult cuCtxSynchronize_v2(CUcontext context)
{
    sim_object *c;
    CUresult r = named_context(context, &c);
    return r ? r : synchronize(c);
}

/* ---- Errors */

/* Every code that the simulated driver returns or that cuda_abi.h names. */
#define ERRORS(E) \
    E(CUDA_SUCCESS, "no error") \
    E(CUDA_ERROR_INVALID_VALUE, "invalid argument") \
    E(CUDA_ERROR_OUT_OF_MEMORY, "out of memory") \
    E(CUDA_ERROR_NOT_INITIALIZED, "initialization error") \
    E(CUDA_ERROR_DEINITIALIZED, "driver shutting down") \
    E(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected") \
    E(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal") \
    E(CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid") \
    E(CUDA_ERROR_INVALID_CONTEXT, "invalid device context") \
    E(CUDA_ERROR_FILE_NOT_FOUND, "file not found") \
    E(CUDA_ERROR_OPERATING_SYSTEM, "OS call failed or operation not supported on this OS") \
    E(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle") \
    E(CUDA_ERROR_ILLEGAL_STATE, "the operation cannot be performed in the present state") \
    E(CUDA_ERROR_NOT_FOUND, "named symbol not found") \
    E(CUDA_ERROR_NOT_READY, "device not ready") \
    E(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered") \
    E(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "too many resources requested for launch") \
    E(CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE, "cannot set while device is active in this process") \
    E(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed") \
    E(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "part or all of the requested memory range is already mapped") \
    E(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "pointer does not correspond to a registered memory region") \
    E(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure") \
    E(CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, "too many blocks in cooperative launch") \
    E(CUDA_ERROR_NOT_PERMITTED, "operation not permitted") \
    E(CUDA_ERROR_NOT_SUPPORTED, "operation not supported") \
    E(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing") \
    E(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "operation failed due to a previous error during capture") \
    E(CUDA_ERROR_STREAM_CAPTURE_MERGE, "operation would result in a merge of separate capture sequences") \
    E(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "capture was not ended in the same stream as it began") \
    E(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "capturing stream has unjoined work") \
    E(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "dependency created on uncaptured work in another stream") \
    E(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "operation would make the legacy stream depend on a capturing stream") \
    E(CUDA_ERROR_CAPTURED_EVENT, "operation not permitted on an event last recorded in a capturing stream") \
    E(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "attempt to end a thread-local capture sequence from another thread") \
    E(CUDA_ERROR_UNKNOWN, "unknown error")

static const struct {
    CUresult code;
    const char *name, *text;
} errors[] = {
#define E(code, text) {code, #code, text},
    ERRORS(E)
#undef E
};

static CUresult find_error(CUresult code, const char **out, int name)
{
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    *out = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof *errors && !*out; i++)
        if (errors[i].code == code) *out = name ? errors[i].name : errors[i].text;
    return *out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuGetErrorName(CUresult code, const char **name)
{
    return find_error(code, name, 1);
}

API CUresult cuGetErrorString(CUresult code, const char **text)
{
    return find_error(code, text, 0);
}
