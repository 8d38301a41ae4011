/*
 * driver-memory.c: allocation, copies and memsets.
 *
 * A device pointer is an address in a range that is reserved and never accessible: using it on the host faults, as with
 * a real GPU, and it cannot be mistaken for host memory. What the program puts there is kept in host memory that
 * appears when the first byte is written; until then an allocation is one repeated byte, so that tens of gigabytes cost
 * nothing.
 *
 * Bytes move during the call that submits the copy (see sim_submit); the copy engines of the model only take the time.
 *
 * Which calls return before their work is done follows "API Synchronization Behavior" in the reference manual:
 * synchronous copies from and to the host wait, copies within the device and memsets do not.
 */
#include "driver.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { ALIGNMENT = 512, PITCH = 512 };

typedef enum { DEVICE, MANAGED, HOST, REGISTERED, MAPPED } space_kind;
typedef struct {
    uint64_t base, bytes, charged;
    space_kind kind;
    int device;
    const sim_object *context;
    void *pool; /* handle of the pool that it is from; NULL: of none */
    unsigned char *data; /* DEVICE: contents, once written */
    unsigned char fill;  /* DEVICE: every byte of it before that */
} allocation;

/* Sorted by base. `memory_lock` comes after sim.lock and before the shared file's. */
static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;
static allocation *table;
static size_t table_count, table_room;
static struct {
    uint64_t base, bytes;
} range[SIM_MAX_DEVICES];

/* ---- The table. Callers hold memory_lock. */

/* Index of the first allocation that ends after `address`. */
static size_t find(uint64_t address)
{
    size_t low = 0, high = table_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (table[middle].base + table[middle].bytes <= address) low = middle + 1;
        else high = middle;
    }
    return low;
}

static allocation *at(uint64_t address)
{
    size_t i = find(address);
    return i < table_count && table[i].base <= address ? &table[i] : NULL;
}

static allocation *starting_at(uint64_t base)
{
    allocation *a = at(base);
    return a && a->base == base ? a : NULL;
}

static int insert(const allocation *a)
{
    if (table_count == table_room) {
        size_t room = table_room ? table_room * 2 : 256;
        allocation *grown = realloc(table, room * sizeof *grown);
        if (!grown) return 0;
        table = grown;
        table_room = room;
    }
    size_t i = find(a->base);
    memmove(&table[i + 1], &table[i], (table_count - i) * sizeof *table);
    table[i] = *a;
    table_count++;
    return 1;
}

static void erase(allocation *a)
{
    size_t i = (size_t)(a - table);
    table_count--;
    memmove(&table[i], &table[i + 1], (table_count - i) * sizeof *table);
}

/* Gives back what the entry holds on the host. */
static void drop_data(const allocation *a)
{
    if (a->kind == DEVICE && a->data) munmap(a->data, a->bytes);
    if (a->kind == MANAGED || a->kind == HOST) munmap((void *)(uintptr_t)a->base, a->bytes);
}

void sim_forget_memory(const sim_object *context)
{
    pthread_mutex_lock(&memory_lock);
    for (size_t i = table_count; i--;)
        if (table[i].context == context) {
            if (table[i].pool) sim_pool_return(table[i].pool, table[i].charged);
            drop_data(&table[i]);
            erase(&table[i]);
        }
    pthread_mutex_unlock(&memory_lock);
}

/* A free stretch of the device's addresses; 0: none. First fit: there are hundreds of allocations, not millions. */
static uint64_t free_address(int device, uint64_t bytes)
{
    if (!range[device].base) {
        /* Twice the memory: fragments must not make an allocation fail that the memory has room for. */
        uint64_t size = sim_params(device)->memory_bytes * 2;
        void *p = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) return 0;
        range[device].base = ((uint64_t)(uintptr_t)p + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        range[device].bytes = size - ALIGNMENT;
    }
    uint64_t address = range[device].base, end = address + range[device].bytes;
    for (size_t i = find(address); i < table_count && table[i].base < end; i++) {
        if (table[i].base - address >= bytes) break;
        address = table[i].base + (table[i].bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    }
    return end - address >= bytes ? address : 0;
}

static void *host_pages(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

/* ---- Contents. Allocations are looked up under the lock, bytes are moved without it: freeing memory that another
 * thread copies is the program's error, here as on a GPU. */

/* Where the bytes at an address are on the host; NULL with *fill: nothing was written there yet. */
static unsigned char *contents(uint64_t address, int to_write, unsigned char *fill)
{
    unsigned char *p = (unsigned char *)(uintptr_t)address;
    pthread_mutex_lock(&memory_lock);
    allocation *a = at(address);
    if (a && a->kind == DEVICE) {
        if (!a->data && to_write && (a->data = host_pages(a->bytes)) && a->fill) memset(a->data, a->fill, a->bytes);
        *fill = a->fill;
        p = a->data ? a->data + (address - a->base) : NULL;
    } else if (!a) {
        for (int i = 0; i < SIM_MAX_DEVICES; i++) /* device memory, freed since the copy was captured in a graph */
            if (address - range[i].base < range[i].bytes) p = NULL;
    }
    pthread_mutex_unlock(&memory_lock);
    return p;
}

static void fill_row(unsigned char *p, size_t bytes, uint32_t value, uint32_t value_bytes)
{
    if (value_bytes == 1) memset(p, (int)(value & 0xff), bytes);
    else
        for (size_t i = 0; i + value_bytes <= bytes; i += value_bytes) memcpy(p + i, &value, value_bytes);
}

/* Zeroing many pages by giving them back costs less than writing them. */
static void zero(unsigned char *p, size_t bytes)
{
    enum { WORTHWHILE = 1 << 18 };
    size_t page = (size_t)sysconf(_SC_PAGESIZE), head = (size_t)(-(uintptr_t)p & (page - 1));
    if (bytes >= WORTHWHILE) {
        size_t pages = (bytes - head) / page * page;
        if (!madvise(p + head, pages, MADV_DONTNEED)) {
            memset(p, 0, head);
            memset(p + head + pages, 0, bytes - head - pages);
            return;
        }
    }
    memset(p, 0, bytes);
}

/* Setting bytes of an allocation that holds nothing but the same byte, or all bytes of it, needs no memory. */
static int set_lazily(uint64_t address, size_t bytes, unsigned char value)
{
    pthread_mutex_lock(&memory_lock);
    allocation *a = at(address);
    int done = a && a->kind == DEVICE && !a->data && (a->fill == value || (a->base == address && a->bytes == bytes));
    if (done) a->fill = value;
    pthread_mutex_unlock(&memory_lock);
    return done;
}

static int is_device(uint64_t address)
{
    pthread_mutex_lock(&memory_lock);
    allocation *a = at(address);
    int yes = a && a->kind == DEVICE;
    pthread_mutex_unlock(&memory_lock);
    return yes;
}

static void do_set(const sim_move *m, uint64_t dst)
{
    uint32_t v = m->value, byte = v & 0xff;
    int same = m->value_bytes == 1 || (m->value_bytes == 2 ? v == byte * 0x101u : v == byte * 0x1010101u);
    if (same && set_lazily(dst, m->width, (unsigned char)byte)) return;
    unsigned char fill, *p = contents(dst, 1, &fill);
    if (!p) return;
    if (same && !byte && is_device(dst)) zero(p, m->width);
    else fill_row(p, m->width, v, m->value_bytes);
}

static void do_copy(uint64_t dst, uint64_t src, size_t bytes)
{
    unsigned char fill = 0, ignored;
    const unsigned char *from = contents(src, 0, &fill);
    if (!from) { /* nothing was written to the source */
        do_set(&(sim_move){.value = fill, .value_bytes = 1, .width = bytes}, dst);
        return;
    }
    unsigned char *to = contents(dst, 1, &ignored);
    if (to) memmove(to, from, bytes);
}

void sim_do_move(const sim_move *m)
{
    sim_move whole = *m;
    /* Rows without gaps are one. */
    if (whole.dst_pitch == whole.width && (whole.is_set || whole.src_pitch == whole.width) && whole.depth == 1) {
        whole.width *= whole.height;
        whole.height = 1;
    }
    for (size_t z = 0; z < whole.depth; z++)
        for (size_t y = 0; y < whole.height; y++) {
            uint64_t dst = whole.dst + z * whole.dst_slice + y * whole.dst_pitch;
            if (whole.is_set) do_set(&whole, dst);
            else do_copy(dst, whole.src + z * whole.src_slice + y * whole.src_pitch, whole.width);
        }
}

/* ---- Allocation */

/* In this context, of a pool, or with NULL of none. */
static CUresult allocate_from(sim_object *pool, sim_object *context, CUdeviceptr *out, size_t bytes)
{
    CUresult r;
    if (!out || !bytes) return CUDA_ERROR_INVALID_VALUE;
    if (bytes > sim_params(context->device)->memory_bytes) return CUDA_ERROR_OUT_OF_MEMORY;
    uint64_t charged = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    allocation a = {.bytes = bytes, .charged = charged, .device = context->device, .context = context};
    a.pool = pool ? sim_handle(pool) : NULL;
    r = pool ? sim_pool_take(pool, context, charged) : sim_charge(a.device, context->id, charged);
    if (r) return r;
    pthread_mutex_lock(&memory_lock);
    a.base = free_address(a.device, charged);
    int entered = a.base && insert(&a);
    pthread_mutex_unlock(&memory_lock);
    if (!entered) {
        if (pool) sim_pool_give(a.pool, charged);
        else rg_model_release(sim_lock(a.device), context->id, charged), sim_unlock();
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = a.base;
    return CUDA_SUCCESS;
}

static CUresult allocate_device(CUdeviceptr *out, size_t bytes)
{
    sim_object *context;
    CUresult r = sim_current(&context);
    return r ? r : allocate_from(NULL, context, out, bytes);
}

API CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t bytes)
{
    CUresult r = sim_enter();
    if (r || (r = sim_unsafe())) return r;
    return allocate_device(out, bytes);
}

API CUresult cuMemAllocPitch_v2(CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned element_bytes)
{
    CUresult r = sim_enter();
    if (r || (r = sim_unsafe())) return r;
    if (!pitch || !width || !height || width > SIZE_MAX / 2) return CUDA_ERROR_INVALID_VALUE;
    if (element_bytes != 4 && element_bytes != 8 && element_bytes != 16) return CUDA_ERROR_INVALID_VALUE;
    size_t row = (width + PITCH - 1) / PITCH * PITCH;
    if (height > SIZE_MAX / row) return CUDA_ERROR_OUT_OF_MEMORY;
    r = allocate_device(out, row * height);
    if (r == CUDA_SUCCESS) *pitch = row;
    return r;
}

static CUresult free_device(CUdeviceptr pointer)
{
    pthread_mutex_lock(&memory_lock);
    allocation *a = starting_at(pointer), gone;
    int found = a && (a->kind == DEVICE || a->kind == MANAGED);
    if (found) {
        gone = *a;
        if (a->kind == DEVICE && !a->pool) {
            rg_model *m = sim_lock(a->device);
            rg_model_release(m, a->context->id, a->charged);
            sim_unlock();
        }
        drop_data(a);
        erase(a);
    }
    pthread_mutex_unlock(&memory_lock);
    if (found && gone.pool) sim_pool_give(gone.pool, gone.charged);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Freeing waits for the context's work, as the real driver does. */
API CUresult cuMemFree_v2(CUdeviceptr pointer)
{
    sim_object *context;
    CUresult r = sim_current(&context);
    if (r || (r = sim_unsafe())) return r;
    if (!pointer) return CUDA_SUCCESS;
    rg_model *m = sim_lock(context->device);
    sim_until until = {SIM_UNTIL_CONTEXT, context->id, m->last_ticket};
    sim_unlock();
    r = sim_wait(context->device, until);
    return r ? r : free_device(pointer);
}

/* Stream-ordered allocation takes effect at the call: contents move then too, so the order is the same. */
static CUresult allocate_async(int pt, CUdeviceptr *out, size_t bytes, CUmemoryPool from, CUstream stream)
{
    sim_object *s, *pool;
    CUresult r = sim_enter();
    if (r || (r = sim_stream(stream, pt, &s)) || (r = sim_capture_conflict(s))) return r;
    if ((r = sim_pool(from, s->device, &pool))) return r;
    return allocate_from(pool, s->context, out, bytes);
}

static CUresult free_async(int pt, CUdeviceptr pointer, CUstream stream)
{
    sim_object *s;
    CUresult r = sim_enter();
    if (r || (r = sim_stream(stream, pt, &s)) || (r = sim_capture_conflict(s))) return r;
    return pointer ? free_device(pointer) : CUDA_SUCCESS;
}

API CUresult cuMemAllocAsync(CUdeviceptr *out, size_t bytes, CUstream stream)
{
    return allocate_async(0, out, bytes, NULL, stream);
}

API CUresult cuMemAllocAsync_ptsz(CUdeviceptr *out, size_t bytes, CUstream stream)
{
    return allocate_async(1, out, bytes, NULL, stream);
}

API CUresult cuMemAllocFromPoolAsync(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    return pool ? allocate_async(0, out, bytes, pool, stream) : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    return pool ? allocate_async(1, out, bytes, pool, stream) : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream)
{
    return free_async(0, pointer, stream);
}

API CUresult cuMemFreeAsync_ptsz(CUdeviceptr pointer, CUstream stream)
{
    return free_async(1, pointer, stream);
}

/* Memory of the host that is known to the driver: pinned, or managed (which takes no room on the device here). */
static CUresult allocate_host(void **out, size_t bytes, space_kind kind)
{
    sim_object *context;
    CUresult r = sim_current(&context);
    if (r || (r = sim_unsafe())) return r;
    if (!out || !bytes) return CUDA_ERROR_INVALID_VALUE;
    void *p = host_pages(bytes);
    if (!p) return CUDA_ERROR_OUT_OF_MEMORY;
    allocation a = {.base = (uint64_t)(uintptr_t)p, .bytes = bytes, .kind = kind, .context = context};
    pthread_mutex_lock(&memory_lock);
    int entered = insert(&a);
    pthread_mutex_unlock(&memory_lock);
    if (!entered) munmap(p, bytes);
    if (entered) *out = p;
    return entered ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API CUresult cuMemAllocHost_v2(void **out, size_t bytes)
{
    return allocate_host(out, bytes, HOST);
}

API CUresult cuMemHostAlloc(void **out, size_t bytes, unsigned flags)
{
    return flags & ~7u ? CUDA_ERROR_INVALID_VALUE : allocate_host(out, bytes, HOST);
}

API CUresult cuMemAllocManaged(CUdeviceptr *out, size_t bytes, unsigned flags)
{
    void *p;
    if (!out || (flags != 1 && flags != 2)) return CUDA_ERROR_INVALID_VALUE; /* attached to all, or to the host */
    CUresult r = allocate_host(&p, bytes, MANAGED);
    if (r == CUDA_SUCCESS) *out = (uint64_t)(uintptr_t)p;
    return r;
}

CUresult sim_enter_mapping(uint64_t address, uint64_t bytes)
{
    allocation a = {.base = address, .bytes = bytes, .kind = MAPPED};
    pthread_mutex_lock(&memory_lock);
    int entered = insert(&a);
    pthread_mutex_unlock(&memory_lock);
    return entered ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

void sim_leave_mapping(uint64_t address)
{
    pthread_mutex_lock(&memory_lock);
    allocation *a = starting_at(address);
    if (a && a->kind == MAPPED) erase(a);
    pthread_mutex_unlock(&memory_lock);
}

static CUresult forget_host(void *pointer, space_kind kind, CUresult otherwise)
{
    sim_object *context;
    CUresult r = sim_current(&context);
    if (r || (r = sim_unsafe())) return r;
    pthread_mutex_lock(&memory_lock);
    allocation *a = starting_at((uint64_t)(uintptr_t)pointer);
    if (!a || a->kind != kind) {
        r = otherwise;
    } else {
        drop_data(a);
        erase(a);
    }
    pthread_mutex_unlock(&memory_lock);
    return r;
}

API CUresult cuMemFreeHost(void *pointer)
{
    return forget_host(pointer, HOST, CUDA_ERROR_INVALID_VALUE);
}

API CUresult cuMemHostRegister_v2(void *pointer, size_t bytes, unsigned flags)
{
    sim_object *context;
    CUresult r = sim_current(&context);
    if (r || (r = sim_unsafe())) return r;
    if (!pointer || !bytes || (flags & ~15u)) return CUDA_ERROR_INVALID_VALUE;
    allocation a = {.base = (uint64_t)(uintptr_t)pointer, .bytes = bytes, .kind = REGISTERED, .context = context};
    pthread_mutex_lock(&memory_lock);
    size_t i = find(a.base);
    if (i < table_count && table[i].base < a.base + bytes) r = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    else if (!insert(&a)) r = CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_unlock(&memory_lock);
    return r;
}

bool sim_is_registered(uint64_t address)
{
    pthread_mutex_lock(&memory_lock);
    const allocation *a = at(address);
    bool is = a && a->kind == REGISTERED;
    pthread_mutex_unlock(&memory_lock);
    return is;
}

API CUresult cuMemHostUnregister(void *pointer)
{
    return forget_host(pointer, REGISTERED, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
}

/* One address space: the device reaches host memory at the host's address. */
API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *out, void *pointer, unsigned flags)
{
    sim_object *context;
    CUresult r = sim_current(&context);
    if (r) return r;
    if (!out || flags) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&memory_lock);
    allocation *a = at((uint64_t)(uintptr_t)pointer);
    if (!a || a->kind == DEVICE || a->kind == MAPPED) r = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&memory_lock);
    if (r == CUDA_SUCCESS) *out = (uint64_t)(uintptr_t)pointer;
    return r;
}

API CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    sim_object *context;
    CUresult r = sim_current(&context);
    if (r) return r;
    if (!free_bytes || !total) return CUDA_ERROR_INVALID_VALUE;
    rg_model_stats stats;
    sim_reap(10);
    rg_model *m = sim_lock(context->device);
    rg_model_get_stats(m, &stats);
    sim_unlock();
    *total = sim_params(context->device)->memory_bytes;
    *free_bytes = *total - stats.memory_bytes;
    return CUDA_SUCCESS;
}

API CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr pointer)
{
    sim_object *context;
    CUresult r = sim_current(&context);
    if (r) return r;
    pthread_mutex_lock(&memory_lock);
    allocation *a = at(pointer);
    if (a && base) *base = a->base;
    if (a && bytes) *bytes = a->bytes;
    pthread_mutex_unlock(&memory_lock);
    return a ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* Whose memory it is; of the many attributes, those that programs without textures and sharing ask for. */
API CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr pointer)
{
    CUresult r = sim_enter();
    if (r) return r;
    if (!data) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&memory_lock);
    allocation *a = at(pointer);
    if (!a) r = CUDA_ERROR_INVALID_VALUE;
    else if (attribute == CU_POINTER_ATTRIBUTE_CONTEXT) *(CUcontext *)data = sim_handle(a->context);
    else if (attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
        *(int *)data = a->kind == HOST || a->kind == REGISTERED ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
    else if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) *(int *)data = a->context->device;
    else r = CUDA_ERROR_NOT_SUPPORTED;
    pthread_mutex_unlock(&memory_lock);
    return r;
}

/* Each answer is a word or two, zeros where the driver has none: a pointer that it does not know is no error here. */
API CUresult cuPointerGetAttributes(unsigned n, int *attributes, void **data, CUdeviceptr pointer)
{
    CUresult r = sim_enter();
    if (r) return r;
    if (!n || !attributes || !data) return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < n; i++) {
        bool wide = attributes[i] == CU_POINTER_ATTRIBUTE_CONTEXT;
        if (!data[i]) return CUDA_ERROR_INVALID_VALUE;
        memset(data[i], 0, wide ? sizeof(void *) : sizeof(int));
        r = cuPointerGetAttribute(data[i], attributes[i], pointer);
        if (r && r != CUDA_ERROR_INVALID_VALUE) return r;
    }
    return CUDA_SUCCESS;
}

/* ---- Copies and memsets */

/* `bytes` at the address lie in one allocation (1), in none (0: a host pointer, maybe), or leave one (-1). */
static int known(uint64_t address, uint64_t bytes, int *device)
{
    pthread_mutex_lock(&memory_lock);
    allocation *a = at(address);
    int inside = !a ? 0 : a->base + a->bytes - address >= bytes ? 1 : -1;
    *device = a && (a->kind == DEVICE || a->kind == MANAGED || a->kind == MAPPED);
    pthread_mutex_unlock(&memory_lock);
    return inside;
}

/* Bytes from the first to the last that a box of rows touches. */
static uint64_t extent(const sim_move *m, size_t pitch, size_t slice)
{
    return (m->depth - 1) * slice + (m->height - 1) * pitch + m->width;
}

enum { ANY, MUST_BE_HOST, MUST_BE_KNOWN };
typedef struct {
    int pt, wait; /* wait: the synchronous form */
    int dst, src; /* what each end must be */
} copy_how;

static CUresult copy(const copy_how *how, const sim_move *move, CUstream stream)
{
    sim_object *context, *s;
    CUresult r = sim_current(&context);
    if (r || (r = sim_stream(stream, how->pt, &s))) return r;
    if (!move->width || !move->height || !move->depth) return CUDA_SUCCESS;
    int to_device, from_device;
    int dst = known(move->dst, extent(move, move->dst_pitch, move->dst_slice), &to_device);
    int src = known(move->src, extent(move, move->src_pitch, move->src_slice), &from_device);
    if (!move->dst || !move->src || dst < 0 || src < 0) return CUDA_ERROR_INVALID_VALUE;
    if ((how->dst == MUST_BE_KNOWN && !dst) || (how->src == MUST_BE_KNOWN && !src)) return CUDA_ERROR_INVALID_VALUE;
    sim_work w = {.kind = SIM_TRANSFER, .move = *move};
    /* From host to host the caller could do it alone; in a stream it takes its turn with the uploads. */
    w.transfer = to_device && from_device ? RG_MODEL_D2D : from_device ? RG_MODEL_D2H : RG_MODEL_H2D;
    w.bytes = move->width * move->height * move->depth;
    uint64_t ticket = 0;
    /* What goes to host memory that the driver does not know returns when it has arrived (CUDA Driver API, "API synchronization
     * behavior"), unless it is captured. */
    if (!how->wait && w.transfer == RG_MODEL_D2H && !dst) {
        r = sim_submit(s, &w, &ticket);
        return r || !ticket ? r : sim_wait(s->device, (sim_until){SIM_UNTIL_STREAM, s->id, ticket});
    }
    if (!how->wait) return sim_submit(s, &w, NULL);
    if ((r = sim_capture_conflict(s)) || (r = sim_unsafe()) || (r = sim_submit(s, &w, &ticket))) return r;
    if (w.transfer == RG_MODEL_D2D) return CUDA_SUCCESS;
    return sim_wait(s->device, (sim_until){SIM_UNTIL_STREAM, s->id, ticket});
}

static CUresult copy_line(int pt, int wait, int dst_is, int src_is, uint64_t dst, uint64_t src, size_t n, CUstream s)
{
    sim_move m = {.dst = dst, .src = src, .width = n, .height = 1, .depth = 1, .dst_pitch = n, .src_pitch = n};
    return copy(&(copy_how){pt, wait, dst_is, src_is}, &m, s);
}

#define HOST_ADDRESS(p) ((uint64_t)(uintptr_t)(p))
/* A copy's four forms: it waits or takes a stream, for the legacy or the per-thread NULL stream. */
#define LINE_COPY(waiting, streaming, dst_is, src_is, d_type, s_type) \
    API CUresult waiting(d_type d, s_type s, size_t n) \
    { \
        return copy_line(0, 1, dst_is, src_is, HOST_ADDRESS(d), HOST_ADDRESS(s), n, NULL); \
    } \
    API CUresult waiting##_ptds(d_type d, s_type s, size_t n) \
    { \
        return copy_line(1, 1, dst_is, src_is, HOST_ADDRESS(d), HOST_ADDRESS(s), n, NULL); \
    } \
    API CUresult streaming(d_type d, s_type s, size_t n, CUstream stream) \
    { \
        return copy_line(0, 0, dst_is, src_is, HOST_ADDRESS(d), HOST_ADDRESS(s), n, stream); \
    } \
    API CUresult streaming##_ptsz(d_type d, s_type s, size_t n, CUstream stream) \
    { \
        return copy_line(1, 0, dst_is, src_is, HOST_ADDRESS(d), HOST_ADDRESS(s), n, stream); \
    }
LINE_COPY(cuMemcpy, cuMemcpyAsync, ANY, ANY, CUdeviceptr, CUdeviceptr)
LINE_COPY(cuMemcpyHtoD_v2, cuMemcpyHtoDAsync_v2, MUST_BE_KNOWN, ANY, CUdeviceptr, const void *)
LINE_COPY(cuMemcpyDtoH_v2, cuMemcpyDtoHAsync_v2, ANY, MUST_BE_KNOWN, void *, CUdeviceptr)
LINE_COPY(cuMemcpyDtoD_v2, cuMemcpyDtoDAsync_v2, MUST_BE_KNOWN, MUST_BE_KNOWN, CUdeviceptr, CUdeviceptr)

/* One end of a copy of a box: its address, and what it must be. */
static CUresult box_end(int type, const void *host, CUdeviceptr device, size_t offset, uint64_t *address, int *is)
{
    switch (type) {
    case CU_MEMORYTYPE_HOST: *address = HOST_ADDRESS(host) + offset; break;
    case CU_MEMORYTYPE_DEVICE:
    case CU_MEMORYTYPE_UNIFIED: *address = device + offset; break;
    case CU_MEMORYTYPE_ARRAY: return CUDA_ERROR_NOT_SUPPORTED; /* there are no textures here */
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    *is = type == CU_MEMORYTYPE_DEVICE ? MUST_BE_KNOWN : ANY;
    return CUDA_SUCCESS;
}

static CUresult copy_box(int pt, int wait, const CUDA_MEMCPY3D *c, CUstream stream)
{
    copy_how how = {pt, wait, ANY, ANY};
    sim_move m = {.width = c->WidthInBytes, .height = c->Height, .depth = c->Depth};
    m.src_pitch = c->srcPitch ? c->srcPitch : c->WidthInBytes;
    m.dst_pitch = c->dstPitch ? c->dstPitch : c->WidthInBytes;
    m.src_slice = m.src_pitch * (c->srcHeight ? c->srcHeight : c->Height);
    m.dst_slice = m.dst_pitch * (c->dstHeight ? c->dstHeight : c->Height);
    if (m.src_pitch < m.width || m.dst_pitch < m.width || c->srcLOD || c->dstLOD) return CUDA_ERROR_INVALID_VALUE;
    size_t from = c->srcXInBytes + c->srcY * m.src_pitch + c->srcZ * m.src_slice;
    size_t to = c->dstXInBytes + c->dstY * m.dst_pitch + c->dstZ * m.dst_slice;
    CUresult r = box_end(c->srcMemoryType, c->srcHost, c->srcDevice, from, &m.src, &how.src);
    if (r || (r = box_end(c->dstMemoryType, c->dstHost, c->dstDevice, to, &m.dst, &how.dst))) return r;
    return copy(&how, &m, stream);
}

static CUresult copy_3d(int pt, int wait, const CUDA_MEMCPY3D *c, CUstream stream)
{
    CUresult r = sim_enter();
    if (r) return r;
    return c ? copy_box(pt, wait, c, stream) : CUDA_ERROR_INVALID_VALUE;
}

static CUresult copy_2d(int pt, int wait, const CUDA_MEMCPY2D *c, CUstream stream)
{
    CUresult r = sim_enter();
    if (r) return r;
    if (!c) return CUDA_ERROR_INVALID_VALUE;
    CUDA_MEMCPY3D box = {
        .srcXInBytes = c->srcXInBytes,
        .srcY = c->srcY,
        .srcMemoryType = c->srcMemoryType,
        .srcHost = c->srcHost,
        .srcDevice = c->srcDevice,
        .srcPitch = c->srcPitch,
        .dstXInBytes = c->dstXInBytes,
        .dstY = c->dstY,
        .dstMemoryType = c->dstMemoryType,
        .dstHost = c->dstHost,
        .dstDevice = c->dstDevice,
        .dstPitch = c->dstPitch,
        .WidthInBytes = c->WidthInBytes,
        .Height = c->Height,
        .Depth = 1,
    };
    return copy_box(pt, wait, &box, stream);
}

#define BOX_COPY(name, suffix, body, type, pt, wait) \
    API CUresult name##suffix(const type *c) { return body(pt, wait, c, NULL); }
#define BOX_COPY_ASYNC(name, suffix, body, type, pt) \
    API CUresult name##suffix(const type *c, CUstream s) { return body(pt, 0, c, s); }
BOX_COPY(cuMemcpy2D_v2, , copy_2d, CUDA_MEMCPY2D, 0, 1)
BOX_COPY(cuMemcpy2D_v2, _ptds, copy_2d, CUDA_MEMCPY2D, 1, 1)
BOX_COPY(cuMemcpy2DUnaligned_v2, , copy_2d, CUDA_MEMCPY2D, 0, 1)
BOX_COPY(cuMemcpy2DUnaligned_v2, _ptds, copy_2d, CUDA_MEMCPY2D, 1, 1)
BOX_COPY(cuMemcpy3D_v2, , copy_3d, CUDA_MEMCPY3D, 0, 1)
BOX_COPY(cuMemcpy3D_v2, _ptds, copy_3d, CUDA_MEMCPY3D, 1, 1)
BOX_COPY_ASYNC(cuMemcpy2DAsync_v2, , copy_2d, CUDA_MEMCPY2D, 0)
BOX_COPY_ASYNC(cuMemcpy2DAsync_v2, _ptsz, copy_2d, CUDA_MEMCPY2D, 1)
BOX_COPY_ASYNC(cuMemcpy3DAsync_v2, , copy_3d, CUDA_MEMCPY3D, 0)
BOX_COPY_ASYNC(cuMemcpy3DAsync_v2, _ptsz, copy_3d, CUDA_MEMCPY3D, 1)

/* Between devices: the contexts say nothing that the addresses do not. */
API CUresult cuMemcpyPeer(CUdeviceptr d, CUcontext to, CUdeviceptr e, CUcontext from, size_t n)
{
    (void)to, (void)from;
    return copy_line(0, 1, MUST_BE_KNOWN, MUST_BE_KNOWN, d, e, n, NULL);
}
API CUresult cuMemcpyPeer_ptds(CUdeviceptr d, CUcontext to, CUdeviceptr e, CUcontext from, size_t n)
{
    (void)to, (void)from;
    return copy_line(1, 1, MUST_BE_KNOWN, MUST_BE_KNOWN, d, e, n, NULL);
}
API CUresult cuMemcpyPeerAsync(CUdeviceptr d, CUcontext to, CUdeviceptr e, CUcontext from, size_t n, CUstream s)
{
    (void)to, (void)from;
    return copy_line(0, 0, MUST_BE_KNOWN, MUST_BE_KNOWN, d, e, n, s);
}
API CUresult cuMemcpyPeerAsync_ptsz(CUdeviceptr d, CUcontext to, CUdeviceptr e, CUcontext from, size_t n, CUstream s)
{
    (void)to, (void)from;
    return copy_line(1, 0, MUST_BE_KNOWN, MUST_BE_KNOWN, d, e, n, s);
}
BOX_COPY(cuMemcpy3DPeer, , copy_3d, CUDA_MEMCPY3D, 0, 1)
BOX_COPY(cuMemcpy3DPeer, _ptds, copy_3d, CUDA_MEMCPY3D, 1, 1)
BOX_COPY_ASYNC(cuMemcpy3DPeerAsync, , copy_3d, CUDA_MEMCPY3D, 0)
BOX_COPY_ASYNC(cuMemcpy3DPeerAsync, _ptsz, copy_3d, CUDA_MEMCPY3D, 1)

/* One after the other; in which order sources may be read is theirs. */
static CUresult copy_batch(int pt, const CUdeviceptr *to, const CUdeviceptr *from, const size_t *sizes, size_t n, size_t *bad, CUstream s)
{
    CUresult r = to && from && sizes && n ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < n && r == CUDA_SUCCESS; i++) {
        if (bad) *bad = i;
        r = copy_line(pt, 0, ANY, ANY, to[i], from[i], sizes[i], s);
    }
    return r;
}
#define BATCH(name, bad_param, bad, pt) \
    API CUresult name(CUdeviceptr *d, CUdeviceptr *e, size_t *sizes, size_t n, void *attributes, size_t *indices, size_t m bad_param, \
                      CUstream s) \
    { \
        (void)attributes, (void)indices, (void)m; \
        return copy_batch(pt, d, e, sizes, n, bad, s); \
    }
#define FAILED_ONE , size_t *failed
BATCH(cuMemcpyBatchAsync, FAILED_ONE, failed, 0)
BATCH(cuMemcpyBatchAsync_ptsz, FAILED_ONE, failed, 1)
BATCH(cuMemcpyBatchAsync_v2, , NULL, 0)
BATCH(cuMemcpyBatchAsync_v2_ptsz, , NULL, 1)

static CUresult set(int pt, int synchronous, CUdeviceptr dst, size_t pitch, uint32_t value, uint32_t value_bytes,
                    size_t width, size_t height, CUstream stream)
{
    sim_object *context, *s;
    CUresult r = sim_current(&context);
    if (r || (r = sim_stream(stream, pt, &s))) return r;
    if (!width || !height) return CUDA_SUCCESS;
    if (width > SIZE_MAX / value_bytes || dst % value_bytes) return CUDA_ERROR_INVALID_VALUE;
    width *= value_bytes;
    if (height == 1) pitch = width;
    int device;
    sim_work w = {.kind = SIM_TRANSFER, .transfer = RG_MODEL_MEMSET, .bytes = width * height};
    w.move = (sim_move){.is_set = 1, .dst = dst, .width = width, .height = height, .depth = 1, .dst_pitch = pitch};
    if (pitch < width || known(dst, extent(&w.move, pitch, 0), &device) != 1) return CUDA_ERROR_INVALID_VALUE;
    if (synchronous && ((r = sim_capture_conflict(s)) || (r = sim_unsafe()))) return r;
    w.move.value = value;
    w.move.value_bytes = value_bytes;
    return sim_submit(s, &w, NULL);
}

/* A memset's eight forms: of a line or a box; "synchronous" or in a stream; legacy or per-thread NULL stream. */
#define MEMSET(bits, type) \
    API CUresult cuMemsetD##bits##_v2(CUdeviceptr d, type v, size_t n) \
    { \
        return set(0, 1, d, 0, v, bits / 8, n, 1, NULL); \
    } \
    API CUresult cuMemsetD##bits##_v2_ptds(CUdeviceptr d, type v, size_t n) \
    { \
        return set(1, 1, d, 0, v, bits / 8, n, 1, NULL); \
    } \
    API CUresult cuMemsetD##bits##Async(CUdeviceptr d, type v, size_t n, CUstream s) \
    { \
        return set(0, 0, d, 0, v, bits / 8, n, 1, s); \
    } \
    API CUresult cuMemsetD##bits##Async_ptsz(CUdeviceptr d, type v, size_t n, CUstream s) \
    { \
        return set(1, 0, d, 0, v, bits / 8, n, 1, s); \
    } \
    API CUresult cuMemsetD2D##bits##_v2(CUdeviceptr d, size_t pitch, type v, size_t w, size_t h) \
    { \
        return set(0, 1, d, pitch, v, bits / 8, w, h, NULL); \
    } \
    API CUresult cuMemsetD2D##bits##_v2_ptds(CUdeviceptr d, size_t pitch, type v, size_t w, size_t h) \
    { \
        return set(1, 1, d, pitch, v, bits / 8, w, h, NULL); \
    } \
    API CUresult cuMemsetD2D##bits##Async(CUdeviceptr d, size_t pitch, type v, size_t w, size_t h, CUstream s) \
    { \
        return set(0, 0, d, pitch, v, bits / 8, w, h, s); \
    } \
    API CUresult cuMemsetD2D##bits##Async_ptsz(CUdeviceptr d, size_t pitch, type v, size_t w, size_t h, CUstream s) \
    { \
        return set(1, 0, d, pitch, v, bits / 8, w, h, s); \
    }
MEMSET(8, unsigned char)
MEMSET(16, unsigned short)
MEMSET(32, unsigned)

/* Arrays, prefetches, decompression, and copies of CUDA 13.2: exported, because programs and Rigel look them up, and refused, because the
 * simulated GPU has no arrays and moves no pages. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
#define REFUSED(symbol, per_thread, params) \
    API CUresult symbol params; \
    API CUresult symbol params \
    { \
        return CUDA_ERROR_NOT_SUPPORTED; \
    } \
    API CUresult symbol##_##per_thread params; \
    API CUresult symbol##_##per_thread params \
    { \
        return CUDA_ERROR_NOT_SUPPORTED; \
    }
REFUSED(cuMemcpyAtoH_v2, ptds, (void *h, CUarray a, size_t at, size_t n))
REFUSED(cuMemcpyHtoA_v2, ptds, (CUarray a, size_t at, const void *h, size_t n))
REFUSED(cuMemcpyAtoD_v2, ptds, (CUdeviceptr d, CUarray a, size_t at, size_t n))
REFUSED(cuMemcpyDtoA_v2, ptds, (CUarray a, size_t at, CUdeviceptr d, size_t n))
REFUSED(cuMemcpyAtoA_v2, ptds, (CUarray a, size_t at, CUarray b, size_t bt, size_t n))
REFUSED(cuMemcpyAtoHAsync_v2, ptsz, (void *h, CUarray a, size_t at, size_t n, CUstream s))
REFUSED(cuMemcpyHtoAAsync_v2, ptsz, (CUarray a, size_t at, const void *h, size_t n, CUstream s))
#define BOXES CUDA_MEMCPY3D_BATCH_OP *o
REFUSED(cuMemcpy3DBatchAsync, ptsz, (size_t n, BOXES, size_t *bad, unsigned long long flags, CUstream s))
REFUSED(cuMemcpy3DBatchAsync_v2, ptsz, (size_t n, BOXES, unsigned long long flags, CUstream s))
REFUSED(cuMemcpyWithAttributesAsync, ptsz, (CUdeviceptr d, CUdeviceptr e, size_t n, void *attributes, CUstream s))
REFUSED(cuMemcpy3DWithAttributesAsync, ptsz, (BOXES, unsigned long long flags, CUstream s))
#define PREFETCHES \
    (CUdeviceptr *d, size_t *sizes, size_t n, CUmemLocation *where, size_t *indices, size_t m, unsigned long long flags, CUstream s)
REFUSED(cuMemPrefetchBatchAsync, ptsz, PREFETCHES)
REFUSED(cuMemDiscardAndPrefetchBatchAsync, ptsz, PREFETCHES)
REFUSED(cuMemBatchDecompressAsync, ptsz, (CUmemDecompressParams *p, size_t n, unsigned flags, size_t *bad, CUstream s))
REFUSED(cuMemPrefetchAsync, ptsz, (CUdeviceptr d, size_t n, CUdevice where, CUstream s))
REFUSED(cuMemPrefetchAsync_v2, ptsz, (CUdeviceptr d, size_t n, uint64_t where, unsigned flags, CUstream s))
#undef REFUSED
#pragma GCC diagnostic pop
