/*
 * driver-virtual.c: device memory that is not one plain pointer: physical allocations and their mappings, pools, arrays.
 *
 * The bytes of a physical allocation are a file in memory, which mappings of it share; an address it is mapped at can be used on
 * the host too. A pool keeps what was freed up to its release threshold, at the call that frees rather than at the next
 * synchronisation. Arrays take memory, and nothing can be copied to or from them. All three are charged to a context of the
 * model, the current one of whoever allocates, for the model knows no other owner: they outlive it, their share does not.
 */
#include "driver.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { GRANULARITY = 2 << 20 };

CUresult sim_charge(int device, uint32_t context, uint64_t bytes)
{
    for (int attempt = 0;; attempt++) {
        rg_model *m = sim_lock(device);
        int full = rg_model_allocate(m, context, bytes);
        sim_unlock();
        if (!full) return CUDA_SUCCESS;
        if (attempt) return CUDA_ERROR_OUT_OF_MEMORY;
        sim_reap(0); /* the memory may be a dead process's */
    }
}

static void uncharge(int device, uint32_t context, uint64_t bytes)
{
    rg_model *m = sim_lock(device);
    rg_model_release(m, context, bytes);
    sim_unlock();
}

/* A new object that is charged so much of the current context's device. */
static CUresult make(sim_type type, uint64_t bytes, sim_object **out)
{
    sim_object *context;
    CUresult r = sim_current(&context);
    if (r || (r = sim_charge(context->device, context->id, bytes))) return r;
    pthread_mutex_lock(&sim.lock);
    sim_object *o = sim_new(type, type == SIM_ARRAY ? context : NULL);
    if (o) o->device = context->device;
    if (o) o->id = context->id;
    pthread_mutex_unlock(&sim.lock);
    if (!o) uncharge(context->device, context->id, bytes);
    *out = o;
    return o ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* ---- Physical memory */

API CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *prop, int option)
{
    CUresult r = sim_enter();
    if (r) return r;
    if (!bytes || !prop || option < 0 || option > 1) return CUDA_ERROR_INVALID_VALUE;
    *bytes = GRANULARITY;
    return CUDA_SUCCESS;
}

API CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t bytes, const CUmemAllocationProp *prop,
                         unsigned long long flags)
{
    CUresult r = sim_enter();
    if (r) return r;
    if (!out || !prop || !bytes || bytes % GRANULARITY || flags) return CUDA_ERROR_INVALID_VALUE;
    if (prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE || prop->requestedHandleTypes) return CUDA_ERROR_NOT_SUPPORTED;
    sim_object *o;
    if ((r = make(SIM_PHYSICAL, bytes, &o))) return r;
    o->physical.bytes = bytes;
    o->physical.handles = 1;
    o->physical.file = -1;
    *out = (uintptr_t)sim_handle(o);
    return CUDA_SUCCESS;
}

/* The caller holds sim.lock. */
static void delete_unused(sim_object *o)
{
    if (o->physical.handles || o->physical.mappings) return;
    uncharge(o->device, o->id, o->physical.bytes);
    if (o->physical.file >= 0) close(o->physical.file);
    sim_delete(o);
}

API CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    CUresult r = sim_enter();
    if (r) return r;
    pthread_mutex_lock(&sim.lock);
    sim_object *o = sim_get((void *)(uintptr_t)handle, SIM_PHYSICAL);
    if (!o || !o->physical.handles) {
        r = CUDA_ERROR_INVALID_VALUE;
    } else {
        o->physical.handles--;
        delete_unused(o);
    }
    pthread_mutex_unlock(&sim.lock);
    return r;
}

/* Mappings of this process. Under sim.lock. */
typedef struct mapping {
    struct mapping *next;
    uint64_t address, bytes;
    sim_object *physical;
} mapping;
static mapping *mappings;

API CUresult cuMemAddressReserve(CUdeviceptr *out, size_t bytes, size_t alignment, CUdeviceptr wanted,
                                 unsigned long long flags)
{
    CUresult r = sim_enter();
    (void)wanted; /* a hint */
    if (r) return r;
    if (!out || !bytes || bytes % GRANULARITY || alignment > GRANULARITY || flags) return CUDA_ERROR_INVALID_VALUE;
    char *p = mmap(NULL, bytes + GRANULARITY, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    size_t before = (size_t)(-(uintptr_t)p & (GRANULARITY - 1));
    if (before) munmap(p, before);
    munmap(p + before + bytes, GRANULARITY - before);
    *out = (uintptr_t)(p + before);
    return CUDA_SUCCESS;
}

API CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes)
{
    CUresult r = sim_enter();
    if (r) return r;
    pthread_mutex_lock(&sim.lock);
    for (mapping *m = mappings; m && r == CUDA_SUCCESS; m = m->next)
        if (m->address - address < bytes) r = CUDA_ERROR_INVALID_VALUE; /* still mapped */
    if (r == CUDA_SUCCESS && munmap((void *)(uintptr_t)address, bytes)) r = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&sim.lock);
    return r;
}

/* Puts the bytes where they are to be seen. The caller holds sim.lock. */
static CUresult map_file(sim_object *o, uint64_t address, uint64_t bytes, uint64_t offset)
{
    if (o->physical.file < 0) {
        o->physical.file = memfd_create("rigel-sim-physical", MFD_CLOEXEC);
        if (o->physical.file < 0 || ftruncate(o->physical.file, (off_t)o->physical.bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    }
    void *p = mmap((void *)(uintptr_t)address, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, o->physical.file,
                   (off_t)offset);
    return p == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : sim_enter_mapping(address, bytes);
}

API CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                      unsigned long long flags)
{
    CUresult r = sim_enter();
    if (r) return r;
    if (!address || !bytes || address % GRANULARITY || bytes % GRANULARITY || flags) return CUDA_ERROR_INVALID_VALUE;
    mapping *m = malloc(sizeof *m);
    if (!m) return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&sim.lock);
    sim_object *o = sim_get((void *)(uintptr_t)handle, SIM_PHYSICAL);
    if (!o || !o->physical.handles || offset + bytes > o->physical.bytes) r = CUDA_ERROR_INVALID_VALUE;
    for (mapping *other = mappings; other && r == CUDA_SUCCESS; other = other->next)
        if (other->address - address < bytes || address - other->address < other->bytes) r = CUDA_ERROR_INVALID_VALUE;
    if (r == CUDA_SUCCESS) r = map_file(o, address, bytes, offset);
    if (r == CUDA_SUCCESS) {
        o->physical.mappings++;
        *m = (mapping){mappings, address, bytes, o};
        mappings = m;
    }
    pthread_mutex_unlock(&sim.lock);
    if (r) free(m);
    return r;
}

/* Whole mappings, one or several side by side. */
API CUresult cuMemUnmap(CUdeviceptr address, size_t bytes)
{
    CUresult r = sim_enter();
    if (r) return r;
    uint64_t covered = 0;
    pthread_mutex_lock(&sim.lock);
    for (mapping *m = mappings; m; m = m->next)
        if (m->address - address < bytes && m->address - address + m->bytes <= bytes) covered += m->bytes;
    if (!bytes || covered != bytes) r = CUDA_ERROR_INVALID_VALUE;
    for (mapping **at = &mappings; *at && r == CUDA_SUCCESS;) {
        mapping *m = *at;
        if (m->address - address >= bytes) {
            at = &m->next;
            continue;
        }
        sim_leave_mapping(m->address);
        mmap((void *)(uintptr_t)m->address, m->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        m->physical->physical.mappings--;
        delete_unused(m->physical);
        *at = m->next;
        free(m);
    }
    pthread_mutex_unlock(&sim.lock);
    return r;
}

/* Every mapping can be read and written by every device. */
API CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
    CUresult r = sim_enter();
    if (r) return r;
    return address && bytes && access && count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *out, void *address)
{
    CUresult r = sim_enter();
    if (r) return r;
    r = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sim.lock);
    for (mapping *m = mappings; m && out && r; m = m->next)
        if ((uintptr_t)address - m->address < m->bytes) {
            m->physical->physical.handles++;
            *out = (uintptr_t)sim_handle(m->physical);
            r = CUDA_SUCCESS;
        }
    pthread_mutex_unlock(&sim.lock);
    return r;
}

/* Nothing can be shared between processes here. */
API CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *out, void *handle, int type)
{
    CUresult r = sim_enter();
    (void)out, (void)handle, (void)type;
    return r ? r : CUDA_ERROR_NOT_SUPPORTED;
}

/* ---- Pools */

static CUresult default_pool(int device, sim_object **pool)
{
    pthread_mutex_lock(&sim.lock);
    if (!sim.device[device].pool && (sim.device[device].pool = sim_new(SIM_POOL, NULL)))
        sim.device[device].pool->device = device;
    *pool = sim.device[device].pool;
    pthread_mutex_unlock(&sim.lock);
    return *pool ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult sim_pool(CUmemoryPool handle, int device, sim_object **pool)
{
    if (!handle) return default_pool(device, pool);
    *pool = sim_get(handle, SIM_POOL);
    return *pool ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Gives back what is kept, down to `keep` bytes in all. The caller holds sim.lock. */
static void trim(sim_object *pool, uint64_t keep)
{
    if (keep < pool->pool.used) keep = pool->pool.used;
    if (pool->pool.reserved <= keep) return;
    uncharge(pool->device, pool->pool.context, pool->pool.reserved - keep);
    pool->pool.reserved = keep;
}

CUresult sim_pool_take(sim_object *pool, const sim_object *context, uint64_t bytes)
{
    CUresult r = CUDA_SUCCESS;
    pthread_mutex_lock(&sim.lock);
    if (pool->pool.context != context->id && sim_charge(pool->device, pool->pool.context, 0)) {
        /* It has none yet, or that has gone with all that the pool had. */
        pool->pool.context = context->id;
        pool->pool.reserved = pool->pool.used = 0;
    }
    uint64_t kept = pool->pool.reserved - pool->pool.used, more = bytes > kept ? bytes - kept : 0;
    if (r == CUDA_SUCCESS && more) r = sim_charge(pool->device, pool->pool.context, more);
    if (r == CUDA_SUCCESS) {
        pool->pool.reserved += more;
        pool->pool.used += bytes;
    }
    pthread_mutex_unlock(&sim.lock);
    return r;
}

void sim_pool_return(void *handle, uint64_t bytes)
{
    sim_object *pool = sim_get(handle, SIM_POOL);
    if (!pool) return;
    pool->pool.used -= bytes < pool->pool.used ? bytes : pool->pool.used;
    trim(pool, pool->pool.threshold);
}

void sim_pool_give(void *handle, uint64_t bytes)
{
    pthread_mutex_lock(&sim.lock);
    sim_pool_return(handle, bytes);
    pthread_mutex_unlock(&sim.lock);
}

API CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *out, CUdevice device)
{
    CUresult r = sim_enter();
    sim_object *pool;
    if (r) return r;
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    if (device < 0 || device >= sim.devices) return CUDA_ERROR_INVALID_DEVICE;
    if ((r = default_pool(device, &pool)) == CUDA_SUCCESS) *out = sim_handle(pool);
    return r;
}

API CUresult cuDeviceGetMemPool(CUmemoryPool *out, CUdevice device)
{
    CUresult r = sim_enter();
    sim_object *pool;
    if (r) return r;
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    if (device < 0 || device >= sim.devices) return CUDA_ERROR_INVALID_DEVICE;
    if ((r = default_pool(device, &pool)) == CUDA_SUCCESS) *out = sim_handle(pool);
    return r;
}

/* There are no pools of host memory. */
static CUresult pool_of(CUmemoryPool *out, const CUmemLocation *location)
{
    if (!location) return CUDA_ERROR_INVALID_VALUE;
    return location->type == CU_MEM_LOCATION_TYPE_DEVICE ? cuDeviceGetMemPool(out, location->id) : CUDA_ERROR_NOT_SUPPORTED;
}

API CUresult cuMemGetDefaultMemPool(CUmemoryPool *out, CUmemLocation *location, int type)
{
    (void)type;
    return pool_of(out, location);
}

API CUresult cuMemGetMemPool(CUmemoryPool *out, CUmemLocation *location, int type)
{
    (void)type;
    return pool_of(out, location);
}

API CUresult cuMemPoolCreate(CUmemoryPool *out, const CUmemPoolProps *props)
{
    CUresult r = sim_enter();
    if (r) return r;
    if (!out || !props || props->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
    if (props->location.id < 0 || props->location.id >= sim.devices) return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&sim.lock);
    sim_object *pool = sim_new(SIM_POOL, NULL);
    if (pool) pool->device = props->location.id;
    if (pool) *out = sim_handle(pool);
    pthread_mutex_unlock(&sim.lock);
    return pool ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult with_pool(CUmemoryPool handle, void (*what)(sim_object *, int, uint64_t *), int attribute, uint64_t *value)
{
    CUresult r = sim_enter();
    if (r) return r;
    pthread_mutex_lock(&sim.lock);
    sim_object *pool = sim_get(handle, SIM_POOL);
    if (pool) what(pool, attribute, value);
    pthread_mutex_unlock(&sim.lock);
    return pool ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static void get(sim_object *pool, int attribute, uint64_t *value)
{
    *value = attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD      ? pool->pool.threshold
             : attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT ? pool->pool.reserved
                                                                 : pool->pool.used;
}

API CUresult cuMemPoolGetAttribute(CUmemoryPool pool, int attribute, void *value)
{
    if (!value) return CUDA_ERROR_INVALID_VALUE;
    if (attribute != CU_MEMPOOL_ATTR_RELEASE_THRESHOLD && attribute != CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT &&
        attribute != CU_MEMPOOL_ATTR_USED_MEM_CURRENT)
        return CUDA_ERROR_NOT_SUPPORTED;
    return with_pool(pool, get, attribute, value);
}

static void set_threshold(sim_object *pool, int attribute, uint64_t *value)
{
    (void)attribute;
    pool->pool.threshold = *value;
}

API CUresult cuMemPoolSetAttribute(CUmemoryPool pool, int attribute, void *value)
{
    if (!value) return CUDA_ERROR_INVALID_VALUE;
    if (attribute != CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) return CUDA_ERROR_NOT_SUPPORTED;
    return with_pool(pool, set_threshold, attribute, value);
}

static void trim_to(sim_object *pool, int attribute, uint64_t *value)
{
    (void)attribute;
    trim(pool, *value);
}

API CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep)
{
    uint64_t value = keep;
    return with_pool(pool, trim_to, 0, &value);
}

static void destroy(sim_object *pool, int attribute, uint64_t *value)
{
    (void)attribute, (void)value;
    trim(pool, 0);
    sim_delete(pool);
}

/* What is still allocated from it stays, and stays charged until its context goes. */
API CUresult cuMemPoolDestroy(CUmemoryPool pool)
{
    for (int d = 0; d < sim.devices; d++)
        if (sim.device[d].pool && pool == sim_handle(sim.device[d].pool)) return CUDA_ERROR_INVALID_VALUE;
    return with_pool(pool, destroy, 0, NULL);
}

/* ---- Arrays */

/* Bytes of one texel; 0: a format that is not simulated. */
static size_t texel_bytes(int format, unsigned channels)
{
    if (channels != 1 && channels != 2 && channels != 4) return 0;
    switch (format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8: return channels;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF: return 2 * channels;
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT: return 4 * channels;
    default: return 0;
    }
}

static CUresult make_array(void *out, const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned levels)
{
    CUresult r = sim_enter();
    if (r || (r = sim_unsafe())) return r;
    if (!out || !d || !d->Width || !texel_bytes(d->Format, d->NumChannels)) return CUDA_ERROR_INVALID_VALUE;
    if (d->Flags & ~(unsigned)CUDA_ARRAY3D_LAYERED) return CUDA_ERROR_NOT_SUPPORTED;
    uint64_t bytes = 0, w = d->Width, h = d->Height ? d->Height : 1, depth = d->Depth ? d->Depth : 1;
    if (w > 1 << 17 || h > 1 << 17 || depth > 1 << 14) return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < levels; i++) {
        bytes += w * h * depth * texel_bytes(d->Format, d->NumChannels);
        if (w == 1 && h == 1 && (depth == 1 || d->Flags)) break;
        w = w > 1 ? w / 2 : 1;
        h = h > 1 ? h / 2 : 1;
        if (depth > 1 && !d->Flags) depth /= 2;
    }
    sim_object *o;
    if ((r = make(SIM_ARRAY, bytes, &o))) return r;
    o->array.bytes = bytes;
    *(void **)out = sim_handle(o);
    return CUDA_SUCCESS;
}

static CUresult destroy_array(void *handle)
{
    CUresult r = sim_enter();
    if (r || (r = sim_unsafe())) return r;
    pthread_mutex_lock(&sim.lock);
    sim_object *o = sim_get(handle, SIM_ARRAY);
    if (o) {
        uncharge(o->device, o->id, o->array.bytes);
        sim_delete(o);
    }
    pthread_mutex_unlock(&sim.lock);
    return o ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

API CUresult cuArrayCreate_v2(CUarray *out, const CUDA_ARRAY_DESCRIPTOR *d)
{
    if (!d) return CUDA_ERROR_INVALID_VALUE;
    CUDA_ARRAY3D_DESCRIPTOR full = {.Width = d->Width, .Height = d->Height, .Format = d->Format};
    full.NumChannels = d->NumChannels;
    return make_array(out, &full, 1);
}

API CUresult cuArray3DCreate_v2(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *d)
{
    return make_array(out, d, 1);
}

API CUresult cuMipmappedArrayCreate(CUmipmappedArray *out, const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned levels)
{
    return make_array(out, d, levels ? levels : 1); /* as many as there can be, and one at the least */
}

API CUresult cuArrayDestroy(CUarray array)
{
    return destroy_array(array);
}

API CUresult cuMipmappedArrayDestroy(CUmipmappedArray array)
{
    return destroy_array(array);
}
