/*
 * test-memory.c: what is counted as a client's device memory, and what its limit does, on the simulated GPU.
 *
 * The client's parts are linked into this program; the hooks are called by name. Each case is a process, and so is each client
 * of a case. What Rigel counts is compared with what the case itself has added up and with what the simulated GPU has left.
 */
#include "client-testing.h"

#include <sys/mman.h>
#include <sys/prctl.h>

enum { KiB = 1 << 10, MiB = 1 << 20 };
#define GiB (1ull << 30)
#define OK(call) CHECK_EQUAL(call, CUDA_SUCCESS)

/* A segment and a simulated GPU of this case's own. */
static void prepare(void)
{
    prepare_client("memory", "best-effort");
}

/* Becomes a process of the client, with the limit in its environment and a context. */
static void become(const char *name, const char *memory)
{
    setenv("RIGEL_NAME", name, 1);
    if (memory)
        setenv("RIGEL_MEMORY", memory, 1);
    else
        unsetenv("RIGEL_MEMORY");
    attach_client();
    CHECK(rg.mode == RG_MODE_BEST_EFFORT);
}

static uint64_t used(void)
{
    return rg_account_used(rg.segment, rg.account);
}

/* Bytes that the GPU has given away, to anybody. */
static uint64_t taken(void)
{
    size_t left, total;
    OK(cu.cuMemGetInfo_v2(&left, &total));
    return total - left;
}

static uint64_t round_up(uint64_t bytes, uint64_t to)
{
    return (bytes + to - 1) / to * to;
}

static const CUmemAllocationProp on_device = {
    .type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};

static CUDA_ARRAY3D_DESCRIPTOR texture(size_t w, size_t h, size_t d, int format, unsigned channels)
{
    return (CUDA_ARRAY3D_DESCRIPTOR){.Width = w, .Height = h, .Depth = d, .Format = format, .NumChannels = channels};
}

/* ---- Each kind by itself. */

static void each_kind_is_counted_and_given_back(void)
{
    prepare();
    become("kinds", NULL);
    CUdeviceptr p, q;
    size_t pitch;
    OK(cuMemAlloc_v2(&p, 1000));
    CHECK_EQUAL(used(), 1000);
    OK(cuMemAllocPitch_v2(&q, &pitch, 700, 10, 4));
    CHECK_EQUAL(pitch, 1024);
    CHECK_EQUAL(used(), 1000 + 10240);
    OK(cuMemFree_v2(p));
    OK(cuMemFree_v2(q));
    CHECK_EQUAL(used(), 0);
    OK(cuMemAllocManaged(&p, 5000, CU_MEM_ATTACH_GLOBAL));
    CHECK_EQUAL(used(), 5000);
    OK(cuMemFree_v2(p));
    CHECK_EQUAL(used(), 0);

    CUarray array;
    CUmipmappedArray mipmaps;
    CUDA_ARRAY_DESCRIPTOR flat = {.Width = 100, .Height = 10, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 2};
    OK(cuArrayCreate_v2(&array, &flat));
    CHECK_EQUAL(used(), 100 * 10 * 8);
    OK(cuArrayDestroy(array));
    CUDA_ARRAY3D_DESCRIPTOR d = texture(64, 32, 16, CU_AD_FORMAT_HALF, 4);
    OK(cuArray3DCreate_v2(&array, &d));
    CHECK_EQUAL(used(), 64 * 32 * 16 * 8);
    OK(cuArrayDestroy(array));
    d = texture(8, 4, 0, CU_AD_FORMAT_UNSIGNED_INT8, 1);
    OK(cuMipmappedArrayCreate(&mipmaps, &d, 10));
    CHECK_EQUAL(used(), 32 + 8 + 2 + 1); /* 8x4, 4x2, 2x1, 1x1: it has no more levels */
    OK(cuMipmappedArrayDestroy(mipmaps));
    OK(cuMipmappedArrayCreate(&mipmaps, &d, 0));
    CHECK_EQUAL(used(), 32); /* the driver makes one level of none */
    OK(cuMipmappedArrayDestroy(mipmaps));
    d = texture(8, 4, 6, CU_AD_FORMAT_UNSIGNED_INT8, 1);
    d.Flags = CUDA_ARRAY3D_LAYERED;
    OK(cuMipmappedArrayCreate(&mipmaps, &d, 2));
    CHECK_EQUAL(used(), 32 * 6 + 8 * 6); /* layers do not shrink */
    OK(cuMipmappedArrayDestroy(mipmaps));
    OK(cuMipmappedArrayCreate(&mipmaps, &d, 10));
    CHECK_EQUAL(used(), (32 + 8 + 2 + 1) * 6); /* nor do they add levels */
    OK(cuMipmappedArrayDestroy(mipmaps));
    CHECK_EQUAL(used(), 0);

    /* The host's memory is not the device's. */
    void *host;
    OK(cu.cuMemHostAlloc(&host, MiB, 0));
    CHECK_EQUAL(used(), 0);
    CHECK_EQUAL(rg_memory_tracked(), 0);
    CHECK_EQUAL(taken(), 0);
    CHECK_EQUAL(rg.account->peak_bytes, 64 * 32 * 16 * 8);
    CHECK_EQUAL(rg.account->denied, 0);
    done();
}

static CUresult make_any_array(CUarray *a, const CUDA_ARRAY3D_DESCRIPTOR *d)
{
    (void)d;
    *a = (CUarray)(uintptr_t)0x7777;
    return CUDA_SUCCESS;
}

/* Formats with more to a texel than channels of one width, by their numbers in cuda.h; the simulated GPU has none of them. */
static void texels_of_pictures_are_as_large_as_they_are(void)
{
    static const struct {
        int format;
        unsigned channels, bytes; /* of 16 x 16 texels */
    } PICTURES[] = {
        {0x50, 4, 1024}, /* UNORM_INT_101010_2 */
        {0x91, 4, 128},  /* BC1_UNORM */
        {0x9e, 4, 256},  /* BC7_UNORM_SRGB */
        {0x9f, 3, 768},  /* P010 */
        {0xa1, 3, 768},  /* P016 */
        {0xa2, 3, 512},  /* NV16 */
        {0xa3, 3, 1024}, /* P210 */
        {0xa4, 3, 1024}, /* P216 */
        {0xa5, 2, 512},  /* YUY2 */
        {0xa6, 2, 1024}, /* Y210 */
        {0xa7, 2, 1024}, /* Y216 */
        {0xa8, 4, 1024}, /* AYUV */
        {0xa9, 4, 1024}, /* Y410 */
        {0xb0, 3, 384},  /* NV12 */
        {0xb1, 4, 2048}, /* Y416 */
        {0xb2, 3, 768},  /* Y444_PLANAR8 */
        {0xb3, 3, 1536}, /* Y444_PLANAR10 */
        {0xb4, 3, 768},  /* YUV444_8bit_SemiPlanar */
        {0xb5, 3, 1536}, /* YUV444_16bit_SemiPlanar */
        {0xc2, 4, 1024}, /* UNORM_INT8X4 */
        {0xcb, 4, 2048}, /* SNORM_INT16X4 */
    };
    prepare();
    become("pictures", NULL);
    rg_real.hooked[RG_HOOK_cuArray3DCreate_v2] = (void *)make_any_array;
    for (size_t i = 0; i < sizeof PICTURES / sizeof *PICTURES; i++) {
        CUarray array;
        CUDA_ARRAY3D_DESCRIPTOR d = texture(16, 16, 0, PICTURES[i].format, PICTURES[i].channels);
        OK(cuArray3DCreate_v2(&array, &d)); /* the one before has gone: it has the same handle */
        CHECK_EQUAL(used(), PICTURES[i].bytes);
    }
    done();
}

/* The pool gives nothing back by itself. */
static void keeps_all(CUmemoryPool pool)
{
    uint64_t threshold = UINT64_MAX;
    OK(cu.cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
}

static void stream_ordered_memory_is_counted_until_it_is_freed(void)
{
    prepare();
    become("async", NULL);
    CUstream s;
    CUdeviceptr p, q;
    CUmemoryPool pool, own;
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    OK(cuStreamCreate(&s, 0));
    OK(cu.cuDeviceGetDefaultMemPool(&pool, 0));
    OK(cu.cuMemPoolCreate(&own, &props));
    uint64_t reserved;
    keeps_all(pool);
    OK(cuMemAllocAsync(&p, MiB, s));
    OK(cuMemAllocAsync_ptsz(&q, 2 * MiB, NULL));
    CHECK_EQUAL(used(), 3 * MiB);
    OK(cuMemFreeAsync(p, s));
    OK(cuMemFree_v2(q)); /* either call frees either kind */
    CHECK_EQUAL(used(), 0);
    /* The pool has kept it, and nobody is charged for that. */
    OK(cu.cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved));
    CHECK_EQUAL(reserved, 3 * MiB);
    CHECK_EQUAL(taken(), 3 * MiB);
    OK(cuMemAllocFromPoolAsync(&p, MiB, own, s));
    OK(cuMemAllocFromPoolAsync_ptsz(&q, 5, own, NULL));
    CHECK_EQUAL(used(), MiB + 5);
    OK(cuMemFreeAsync_ptsz(q, NULL));
    OK(cuMemFreeAsync(p, s));
    CHECK_EQUAL(used(), 0);
    /* A free that fails changes nothing. */
    OK(cuMemAllocAsync(&p, 77, s));
    CHECK(cuMemFreeAsync(p, (CUstream)(uintptr_t)0x1234560) != CUDA_SUCCESS);
    CHECK(cuMemFree_v2(p + 1) != CUDA_SUCCESS);
    CHECK_EQUAL(used(), 77);
    OK(cuMemFreeAsync(p, s));
    CHECK(cuMemFreeAsync(p, s) != CUDA_SUCCESS);
    CHECK_EQUAL(used(), 0);
    CHECK_EQUAL(rg_memory_tracked(), 0);
    done();
}

/* A driver with pools of any memory, which the simulated one does not have: each is known by its place and type. */
static CUmemoryPool pool_of(int location, int type)
{
    return (CUmemoryPool)(uintptr_t)(0x1000 + 16 * location + type);
}

static CUresult make_pool(CUmemoryPool *pool, const CUmemPoolProps *props)
{
    *pool = pool_of(props->location.type, props->allocType);
    return CUDA_SUCCESS;
}

static CUresult get_pool(CUmemoryPool *pool, CUmemLocation *location, int type)
{
    *pool = pool_of(location->type, type);
    return CUDA_SUCCESS;
}

static CUresult destroy_pool(CUmemoryPool pool)
{
    (void)pool;
    return CUDA_SUCCESS;
}

static CUresult take_from_pool(CUdeviceptr *p, size_t n, CUmemoryPool pool, CUstream s)
{
    static CUdeviceptr next = 0x7f0000000000;
    (void)pool, (void)s;
    *p = next;
    next += n;
    return CUDA_SUCCESS;
}

static CUresult give_to_pool(CUdeviceptr p, CUstream s)
{
    (void)p, (void)s;
    return CUDA_SUCCESS;
}

/* A driver that says of a pool that it is the current one until it has destroyed it. */
#define OWN ((CUmemoryPool)(uintptr_t)0x5000)
static _Atomic uint32_t asked_destroyed;
static _Atomic bool own_is_gone, ends_as_it_is_told;

static CUresult current_pool(CUmemoryPool *pool, CUdevice device)
{
    (void)device;
    *pool = atomic_load(&own_is_gone) ? (CUmemoryPool)(uintptr_t)0x6000 : OWN;
    if (atomic_exchange(&ends_as_it_is_told, false))
        OK(cuMemPoolDestroy(OWN)); /* as another thread does just then */
    return CUDA_SUCCESS;
}

static CUresult ask_pool(CUmemoryPool pool, int attribute, void *value)
{
    (void)attribute;
    *(uint64_t *)value = 0;
    if (pool == OWN && atomic_load(&own_is_gone))
        atomic_fetch_add(&asked_destroyed, 1);
    return CUDA_SUCCESS;
}

static CUresult destroy_slowly(CUmemoryPool pool)
{
    CHECK(pool == OWN);
    for (int beat = 0; beat < 3; beat++)
        rg_memory_pools_kept(); /* as an agent looks meanwhile */
    atomic_store(&own_is_gone, true);
    return CUDA_SUCCESS;
}

static CUresult take_from_current(CUdeviceptr *p, size_t n, CUstream s)
{
    return take_from_pool(p, n, NULL, s);
}

/* The driver is asked nothing about a pool that it was told to destroy, though it was the device's current one. */
static void a_destroyed_pool_is_not_asked(void)
{
    prepare();
    become("own pool", NULL);
    rg_agent_stop(); /* this thread looks, as the agent does at its beats */
    CUdeviceptr p;
    OK(cuMemAlloc_v2(&p, 1000));
    OK(cuMemsetD8Async(p, 0, 1000, NULL)); /* the device is used */
    rg_real.cuMemPoolGetAttribute = ask_pool;
    rg_real.cuDeviceGetMemPool = current_pool;
    rg_real.hooked[RG_HOOK_cuMemAllocAsync] = (void *)take_from_current;
    rg_real.hooked[RG_HOOK_cuMemPoolDestroy] = (void *)destroy_slowly;
    OK(cuMemAllocAsync(&p, 10, NULL));
    rg_memory_pools_kept(); /* it is known now */
    OK(cuMemPoolDestroy(OWN));
    rg_memory_pools_kept();
    CHECK_EQUAL(atomic_load(&asked_destroyed), 0);
    atomic_store(&own_is_gone, false);
    atomic_store(&ends_as_it_is_told, true);
    for (int beat = 0; beat < 3; beat++)
        rg_memory_pools_kept();
    WAIT_FOR(atomic_load(&own_is_gone));
    CHECK_EQUAL(atomic_load(&asked_destroyed), 0);
    done();
}

/* Whether memory from this pool counts as the client's. */
static bool counts(CUmemoryPool pool)
{
    CUdeviceptr p, q;
    uint64_t before = used();
    OK(cuMemAllocFromPoolAsync(&p, 1000, pool, NULL));
    OK(cuMemAllocFromPoolAsync_ptsz(&q, 1000, pool, NULL));
    uint64_t counted = used() - before;
    CHECK(counted == 0 || counted == 2000);
    CHECK_EQUAL(cuMemAllocFromPoolAsync(&p, GiB, pool, NULL), counted ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS);
    OK(cuMemFreeAsync(p, NULL));
    OK(cuMemFreeAsync(q, NULL));
    return counted;
}

static void host_memory_from_a_pool_is_not_counted(void)
{
    prepare();
    become("host", "100000");
    rg_real.hooked[RG_HOOK_cuMemPoolCreate] = (void *)make_pool;
    rg_real.hooked[RG_HOOK_cuMemGetMemPool] = rg_real.hooked[RG_HOOK_cuMemGetDefaultMemPool] = (void *)get_pool;
    rg_real.hooked[RG_HOOK_cuMemPoolDestroy] = (void *)destroy_pool;
    rg_real.hooked[RG_HOOK_cuMemAllocFromPoolAsync] = (void *)take_from_pool;
    rg_real.hooked[RG_HOOK_cuMemAllocFromPoolAsync_ptsz] = (void *)take_from_pool;
    rg_real.hooked[RG_HOOK_cuMemFreeAsync] = (void *)give_to_pool;
    enum { MANAGED = 2, LAST = CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT, MADE = 0, GOT = 1, GOT_DEFAULT = 2 };
    for (int way = MADE; way <= GOT_DEFAULT; way++)
        for (int type = CU_MEM_ALLOCATION_TYPE_PINNED; type <= MANAGED; type++)
            for (int place = 0; place <= LAST + 1; place++) {
                CUmemPoolProps props = {.allocType = type, .location = {place, 0}};
                CUmemoryPool pool = NULL;
                OK(way == MADE  ? cuMemPoolCreate(&pool, &props)
                   : way == GOT ? cuMemGetMemPool(&pool, &props.location, type)
                                : cuMemGetDefaultMemPool(&pool, &props.location, type));
                bool host = type == CU_MEM_ALLOCATION_TYPE_PINNED && place >= CU_MEM_LOCATION_TYPE_HOST && place <= LAST;
                CHECK_EQUAL(counts(pool), !host);
                CHECK_EQUAL(cuMemPoolDestroy(pool), CUDA_SUCCESS);
                CHECK(counts(pool)); /* another one, of the same handle, that we have not seen made */
            }
    for (int i = 0; i < 100; i++) { /* more than are known at once */
        CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_HOST, 0}};
        CUmemoryPool pool;
        OK(cuMemPoolCreate(&pool, &props));
        CHECK(!counts(pool));
        OK(cuMemPoolDestroy(pool));
    }
    done();
}

/* A default pool cannot be destroyed: whoever tries is told so, and the pool stays what it was. */
static void a_pool_that_is_not_destroyed_is_still_known(void)
{
    prepare();
    become("stays", "104857600");
    CUmemoryPool pool;
    CUdeviceptr p;
    OK(cu.cuDeviceGetDefaultMemPool(&pool, 0));
    keeps_all(pool);
    OK(cuMemAllocAsync(&p, 80 * MiB, NULL));
    OK(cuMemFreeAsync(p, NULL));
    CHECK_EQUAL(cuMemPoolDestroy(pool), CUDA_ERROR_INVALID_VALUE);
    OK(cuMemAlloc_v2(&p, 50 * MiB));
    CHECK_EQUAL(taken(), 50 * MiB); /* what it kept went back */
    OK(cuMemFree_v2(p));
    /* One of host memory. */
    rg_real.hooked[RG_HOOK_cuMemGetDefaultMemPool] = (void *)get_pool;
    rg_real.hooked[RG_HOOK_cuMemAllocFromPoolAsync] = rg_real.hooked[RG_HOOK_cuMemAllocFromPoolAsync_ptsz] = (void *)take_from_pool;
    rg_real.hooked[RG_HOOK_cuMemFreeAsync] = (void *)give_to_pool;
    CUmemLocation host = {CU_MEM_LOCATION_TYPE_HOST, 0};
    OK(cuMemGetDefaultMemPool(&pool, &host, CU_MEM_ALLOCATION_TYPE_PINNED));
    CHECK(!counts(pool));
    CHECK_EQUAL(cuMemPoolDestroy(pool), CUDA_ERROR_INVALID_VALUE);
    CHECK(!counts(pool));
    done();
}

/* What is allocated in a captured stream belongs to the graph, and is the driver's alone to refuse. */
static void captured_allocations_are_the_graphs(void)
{
    prepare();
    become("captured", "1000");
    CUstream s;
    CUgraph graph;
    CUdeviceptr p;
    OK(cuStreamCreate(&s, 0));
    OK(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_RELAXED));
    OK(cuMemAlloc_v2(&p, 600)); /* not in the stream */
    CHECK_EQUAL(used(), 600);
    CHECK_EQUAL(cuMemAllocAsync(&p, 5000, s), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED); /* as the simulated GPU answers */
    CHECK_EQUAL(rg.account->denied, 0);
    CHECK_EQUAL(cuStreamEndCapture(s, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    CHECK_EQUAL(cuMemAllocAsync(&p, 5000, s), CUDA_ERROR_OUT_OF_MEMORY);
    CHECK_EQUAL(rg.account->denied, 1);
    CHECK_EQUAL(used(), 600);
    /* A free there is a node of the graph: what it names is the program's until the graph runs. */
    OK(cuMemAllocAsync(&p, 300, NULL));
    OK(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_RELAXED));
    rg_real.hooked[RG_HOOK_cuMemFreeAsync] = (void *)give_to_pool;
    OK(cuMemFreeAsync(p, s));
    CHECK_EQUAL(used(), 900);
    OK(cuStreamEndCapture(s, &graph));
    OK(cuMemFreeAsync(p, s));
    CHECK_EQUAL(used(), 600);
    done();
}

static CUresult refuse_release(CUmemGenericAllocationHandle h)
{
    (void)h;
    return CUDA_ERROR_INVALID_VALUE;
}

static CUmemGenericAllocationHandle imported;

/* One that this process has exported itself. */
static CUresult import_own(CUmemGenericAllocationHandle *h, void *shared, int type)
{
    (void)shared, (void)type;
    *h = imported;
    return CUDA_SUCCESS;
}

static CUresult release_any(CUmemGenericAllocationHandle h)
{
    (void)h;
    return CUDA_SUCCESS;
}

static CUresult create_anywhere(CUmemGenericAllocationHandle *h, size_t n, const CUmemAllocationProp *prop, unsigned long long flags)
{
    (void)n, (void)prop, (void)flags;
    *h = 0x4321;
    return CUDA_SUCCESS;
}

static void physical_memory_is_counted_until_nothing_holds_it(void)
{
    prepare();
    become("virtual", NULL);
    CUmemGenericAllocationHandle h, again, other;
    CUdeviceptr at;
    CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, 3};
    OK(cuMemCreate(&h, 4 * MiB, &on_device, 0));
    CHECK_EQUAL(used(), 4 * MiB);
    OK(cu.cuMemAddressReserve(&at, 16 * MiB, 0, 0, 0));
    CHECK_EQUAL(used(), 4 * MiB); /* addresses are free */
    OK(cuMemMap(at, 2 * MiB, 0, h, 0));
    OK(cuMemMap(at + 2 * MiB, 4 * MiB, 0, h, 0)); /* the same memory twice */
    OK(cu.cuMemSetAccess(at, 6 * MiB, &access, 1));
    CHECK_EQUAL(used(), 4 * MiB);
    OK(cuMemsetD8_v2(at, 7, 2 * MiB));
    unsigned char byte = 0;
    OK(cuMemcpyDtoH_v2(&byte, at + 2 * MiB + 5, 1));
    CHECK_EQUAL(byte, 7);
    /* Handles: one more by the address, then all released; the mappings keep the memory. */
    OK(cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)(at + 3 * MiB)));
    OK(cuMemRelease(h));
    OK(cuMemRelease(again));
    CHECK(cuMemRelease(h) != CUDA_SUCCESS);
    CHECK_EQUAL(used(), 4 * MiB);
    OK(cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)(at + 5 * MiB))); /* amid the second mapping */
    CHECK(cuMemUnmap(at, MiB) != CUDA_SUCCESS); /* fails, and changes nothing */
    CHECK_EQUAL(used(), 4 * MiB);
    OK(cuMemRetainAllocationHandle(&h, (void *)(uintptr_t)at)); /* the same handle twice */
    CHECK_EQUAL(h, again);
    void *release = rg_real.hooked[RG_HOOK_cuMemRelease];
    rg_real.hooked[RG_HOOK_cuMemRelease] = (void *)refuse_release;
    CHECK_EQUAL(cuMemRelease(h), CUDA_ERROR_INVALID_VALUE); /* fails, and changes nothing */
    rg_real.hooked[RG_HOOK_cuMemRelease] = release;
    OK(cuMemUnmap(at, 6 * MiB)); /* both */
    CHECK_EQUAL(used(), 4 * MiB);
    OK(cuMemRelease(h));
    CHECK_EQUAL(used(), 4 * MiB);
    OK(cuMemRelease(again));
    CHECK_EQUAL(used(), 0);
    /* Released before it is unmapped, as a program does that needs no handle. */
    OK(cuMemCreate(&h, 2 * MiB, &on_device, 0));
    OK(cuMemCreate(&other, 2 * MiB, &on_device, 0));
    OK(cuMemMap(at, 2 * MiB, 0, h, 0));
    OK(cuMemRelease(h));
    OK(cuMemRelease(other));
    CHECK_EQUAL(used(), 2 * MiB);
    CHECK(cuMemUnmap(at, MiB) != CUDA_SUCCESS);
    CHECK_EQUAL(used(), 2 * MiB);
    OK(cuMemUnmap(at, 2 * MiB));
    CHECK_EQUAL(used(), 0);
    /* A mapping that fails keeps nothing. */
    OK(cuMemCreate(&h, 2 * MiB, &on_device, 0));
    CHECK(cuMemMap(at + 1, 2 * MiB, 0, h, 0) != CUDA_SUCCESS);
    OK(cuMemRelease(h));
    CHECK_EQUAL(used(), 0);
    /* What fails, and what is the host's, is not charged. */
    CUmemAllocationProp on_host = on_device;
    on_host.location.type = CU_MEM_LOCATION_TYPE_HOST;
    CHECK(cuMemCreate(&h, 2 * MiB, &on_host, 0) != CUDA_SUCCESS);
    CHECK(cuMemCreate(&h, 2 * MiB + 1, &on_device, 0) != CUDA_SUCCESS);
    CHECK(cuMemImportFromShareableHandle(&h, NULL, 1) != CUDA_SUCCESS);
    CHECK_EQUAL(used(), 0);
    CHECK_EQUAL(rg_memory_tracked(), 0);
    CHECK_EQUAL(taken(), 0);
    /* Of a driver that can do more: the host's is nobody's still; what comes back to who shared it is held once more. */
    rg_real.hooked[RG_HOOK_cuMemCreate] = (void *)create_anywhere;
    rg_real.hooked[RG_HOOK_cuMemImportFromShareableHandle] = (void *)import_own;
    rg_real.hooked[RG_HOOK_cuMemRelease] = (void *)release_any;
    OK(cuMemCreate(&h, 2 * MiB, &on_host, 0));
    CHECK_EQUAL(used(), 0);
    OK(cuMemRelease(h));
    OK(cuMemCreate(&imported, 2 * MiB, &on_device, 0));
    OK(cuMemImportFromShareableHandle(&h, NULL, 1));
    OK(cuMemRelease(h));
    CHECK_EQUAL(used(), 2 * MiB);
    OK(cuMemRelease(imported));
    CHECK_EQUAL(used(), 0);
    done();
}

/* The driver gives the handle out again, and another thread allocates in that context, before this one is back from it. */
static CUresult destroy_and_make_again(CUcontext c)
{
    CUdeviceptr p;
    CUcontext now;
    OK(cu.cuCtxGetCurrent(&now));
    CHECK(now == c);
    OK(cuMemAlloc_v2(&p, 70));
    return CUDA_SUCCESS;
}

static void contexts_take_their_memory_with_them(void)
{
    prepare();
    become("contexts", NULL);
    CUdeviceptr p;
    CUcontext own;
    CUarray array;
    CUDA_ARRAY3D_DESCRIPTOR d = texture(16, 16, 0, CU_AD_FORMAT_FLOAT, 1);
    OK(cuMemAlloc_v2(&p, 1000)); /* of the primary context */
    OK(cu.cuCtxCreate_v2(&own, 0, 0));
    for (int i = 0; i < 50; i++)
        OK(cuMemAlloc_v2(&p, MiB));
    OK(cuArray3DCreate_v2(&array, &d));
    CUstream s;
    OK(cuStreamCreate(&s, 0));
    OK(cu.cuCtxSetCurrent(context));
    OK(cuMemAllocAsync(&p, 512, s)); /* of the stream's, whatever is current */
    OK(cu.cuCtxSetCurrent(own));
    CHECK_EQUAL(used(), 1000 + 50 * MiB + 1024 + 512);
    CHECK(cuCtxDestroy_v2((CUcontext)(uintptr_t)0x10) != CUDA_SUCCESS);
    CHECK_EQUAL(used(), 1000 + 50 * MiB + 1024 + 512);
    OK(cuCtxDestroy_v2(own));
    CHECK_EQUAL(used(), 1000);
    CHECK_EQUAL(rg_memory_tracked(), 1);
    /* The primary one: retained twice, so the first release leaves it. */
    OK(cu.cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuDevicePrimaryCtxRelease_v2(0));
    CHECK_EQUAL(used(), 1000);
    OK(cuDevicePrimaryCtxRelease_v2(0));
    CHECK_EQUAL(used(), 0);
    OK(cu.cuDevicePrimaryCtxRetain(&context, 0));
    OK(cu.cuCtxSetCurrent(context));
    OK(cuMemAlloc_v2(&p, 500));
    OK(cu.cuCtxCreate_v2(&own, 0, 0));
    OK(cuMemAlloc_v2(&p, 30));
    OK(cuDevicePrimaryCtxReset_v2(0)); /* the other context of the device stays */
    CHECK_EQUAL(used(), 30);
    rg_real.hooked[RG_HOOK_cuCtxDestroy_v2] = (void *)destroy_and_make_again;
    OK(cuCtxDestroy_v2(own));
    CHECK_EQUAL(used(), 70);
    CHECK_EQUAL(rg_memory_tracked(), 1);
    done();
}

/* Whoever needs memory asks for what pools keep: of best-effort clients alone. */
static void no_high_clients_pools_are_asked_for_what_they_keep(void)
{
    prepare();
    become("asked", NULL);
    rg_agent_stop(); /* this thread looks, as the agent does at its beats */
    CUmemoryPool pool;
    CUdeviceptr p;
    OK(cu.cuDeviceGetDefaultMemPool(&pool, 0));
    keeps_all(pool);
    OK(cuMemAllocAsync(&p, 50 * MiB, NULL));
    OK(cuMemsetD8Async(p, 0, 1000, NULL)); /* the device is used */
    OK(cuMemFreeAsync(p, NULL));
    atomic_fetch_add(&seg->header.trim, 1);
    atomic_store(&rg.slot->class, RG_CLASS_HIGH);
    rg_memory_beat();
    CHECK_EQUAL(rg.slot->trimmed, 0);
    CHECK_EQUAL(rg.slot->pool_kept_bytes, 50 * MiB);
    CHECK_EQUAL(taken(), 50 * MiB);
    atomic_store(&rg.slot->class, RG_CLASS_BEST_EFFORT);
    rg_memory_beat();
    CHECK_EQUAL(rg.slot->trimmed, 1);
    CHECK_EQUAL(rg.slot->pool_returned_bytes, 50 * MiB);
    CHECK_EQUAL(rg.slot->pool_kept_bytes, 0);
    CHECK_EQUAL(taken(), 0);
    done();
}

/* ---- The limit. */

static int calls;
static CUresult answer;
static CUresult (*real_alloc)(CUdeviceptr *, size_t);
static CUresult counting_alloc(CUdeviceptr *p, size_t n)
{
    calls++;
    return answer ? answer : real_alloc(p, n);
}

static void count_calls(void)
{
    *(void **)&real_alloc = rg_real.hooked[RG_HOOK_cuMemAlloc_v2];
    CHECK(real_alloc != NULL);
    rg_real.hooked[RG_HOOK_cuMemAlloc_v2] = (void *)counting_alloc;
}

/* The last byte fits; one more is refused, without the driver, and leaves no trace. */
static void the_limit_is_exact(void)
{
    prepare();
    become("exact", "104857600");
    count_calls();
    CUdeviceptr p, q, r = 42;
    OK(cuMemAlloc_v2(&p, 100 * MiB - 1));
    OK(cuMemAlloc_v2(&q, 1));
    CHECK_EQUAL(used(), 100 * MiB);
    CHECK_EQUAL(calls, 2);
    uint64_t before = taken();
    CHECK_EQUAL(cuMemAlloc_v2(&r, 1), CUDA_ERROR_OUT_OF_MEMORY);
    CHECK_EQUAL(cuMemAlloc_v2(&r, SIZE_MAX), CUDA_ERROR_OUT_OF_MEMORY);
    CHECK_EQUAL(cuMemAllocAsync(&r, 1, NULL), CUDA_ERROR_OUT_OF_MEMORY);
    CHECK_EQUAL(cuMemAllocManaged(&r, 1, CU_MEM_ATTACH_GLOBAL), CUDA_ERROR_OUT_OF_MEMORY);
    size_t pitch = 43;
    CHECK_EQUAL(cuMemAllocPitch_v2(&r, &pitch, 1, 1, 4), CUDA_ERROR_OUT_OF_MEMORY);
    CHECK_EQUAL(cuMemAllocPitch_v2(&r, &pitch, SIZE_MAX, SIZE_MAX, 4), CUDA_ERROR_OUT_OF_MEMORY);
    CUmemGenericAllocationHandle h = 44;
    CHECK_EQUAL(cuMemCreate(&h, 2 * MiB, &on_device, 0), CUDA_ERROR_OUT_OF_MEMORY);
    CUarray array = (CUarray)45;
    CUDA_ARRAY3D_DESCRIPTOR d = texture(1, 0, 0, CU_AD_FORMAT_UNSIGNED_INT8, 1);
    CHECK_EQUAL(cuArray3DCreate_v2(&array, &d), CUDA_ERROR_OUT_OF_MEMORY);
    CHECK_EQUAL(rg.account->denied, 8);
    CHECK_EQUAL(rg.account->denied_bytes, 1);
    CHECK_EQUAL(rg.account->denied_at_bytes, 100 * MiB);
    /* No trace. */
    CHECK_EQUAL(calls, 2);
    CHECK(r == 42 && pitch == 43 && h == 44 && array == (CUarray)45);
    CHECK_EQUAL(used(), 100 * MiB);
    CHECK_EQUAL(rg_memory_tracked(), 2);
    CHECK_EQUAL(taken(), before);
    CHECK_EQUAL(rg.account->peak_bytes, 100 * MiB);
    /* Nothing, and nonsense, is the driver's to answer. */
    CHECK_EQUAL(cuMemAlloc_v2(&r, 0), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQUAL(calls, 3);
    OK(cuMemFree_v2(q));
    OK(cuMemAlloc_v2(&q, 1));
    OK(cuMemFree_v2(p));
    OK(cuMemFree_v2(q));
    CHECK_EQUAL(used(), 0);
    CHECK_EQUAL(taken(), 0);
    done();
}

static CUresult as_a_whole_page(CUdeviceptr *base, size_t *bytes, CUdeviceptr p)
{
    *base = p;
    *bytes = 2 * MiB;
    return CUDA_SUCCESS;
}

/* Rows are longer than was asked for, and the driver alone knows by how much: what does not fit then goes back to it. */
static void what_the_driver_adds_counts_against_the_limit(void)
{
    prepare();
    become("rows", "10000");
    CUdeviceptr p;
    size_t pitch;
    CHECK_EQUAL(cuMemAllocPitch_v2(&p, &pitch, 100, 20, 4), CUDA_ERROR_OUT_OF_MEMORY); /* 2000 asked for, 10240 taken */
    CHECK_EQUAL(p, 0);
    CHECK_EQUAL(used(), 0);
    CHECK_EQUAL(taken(), 0);
    CHECK_EQUAL(rg.account->denied, 1);
    /* More than there are numbers for. */
    CHECK_EQUAL(cuMemAllocPitch_v2(&p, &pitch, SIZE_MAX, SIZE_MAX, 4), CUDA_ERROR_OUT_OF_MEMORY);
    CHECK_EQUAL(rg.account->denied, 2);
    CHECK_EQUAL(rg.account->denied_bytes, UINT64_MAX);
    OK(cuMemAllocPitch_v2(&p, &pitch, 100, 19, 4));
    CHECK_EQUAL(used(), 19 * 512);
    OK(cuMemFree_v2(p));
    CHECK_EQUAL(used(), 0);
    /* One that gives out whole pages. */
    rg_real.cuMemGetAddressRange_v2 = as_a_whole_page;
    CHECK_EQUAL(cuMemAlloc_v2(&p, 1000), CUDA_ERROR_OUT_OF_MEMORY);
    CHECK_EQUAL(used(), 0);
    CHECK_EQUAL(taken(), 0);
    atomic_store(&rg.account->limit_bytes, 3 * MiB);
    OK(cuMemAlloc_v2(&p, 1000));
    CHECK_EQUAL(used(), 2 * MiB);
    OK(cuMemFree_v2(p));
    CHECK_EQUAL(used(), 0);
    done();
}

static void the_drivers_errors_are_its_own(void)
{
    static const char *const limits[] = {NULL, "1099511627776"};
    for (int i = 0; i < 2; i++) {
        fflush(NULL);
        pid_t pid = fork();
        if (pid == 0) {
            prepare();
            become("errors", limits[i]);
            CUdeviceptr p;
            CHECK_EQUAL(cuMemAlloc_v2(&p, 500 * GiB), CUDA_ERROR_OUT_OF_MEMORY); /* more than the GPU has */
            CHECK_EQUAL(cuMemAllocAsync(&p, 500 * GiB, NULL), CUDA_ERROR_OUT_OF_MEMORY);
            CHECK_EQUAL(cuMemAllocAsync(&p, 5, (CUstream)(uintptr_t)0x1234560), CUDA_ERROR_INVALID_HANDLE);
            CUarray array;
            CUDA_ARRAY3D_DESCRIPTOR bad = texture(4, 4, 0, CU_AD_FORMAT_FLOAT, 3);
            CHECK_EQUAL(cuArray3DCreate_v2(&array, &bad), CUDA_ERROR_INVALID_VALUE);
            count_calls();
            answer = CUDA_ERROR_ILLEGAL_ADDRESS;
            CHECK_EQUAL(cuMemAlloc_v2(&p, 5), CUDA_ERROR_ILLEGAL_ADDRESS);
            CHECK_EQUAL(calls, 1);
            CHECK_EQUAL(used(), 0);
            CHECK_EQUAL(rg.account->denied, 0);
            CHECK_EQUAL(rg.account->peak_bytes, 0);
            CHECK_EQUAL(rg_memory_tracked(), 0);
            done();
            exit(0);
        }
        int status = 1;
        waitpid(pid, &status, 0);
        CHECK_EQUAL(status, 0);
    }
}

static void programs_are_told_the_limit(void)
{
    prepare();
    become("told", "1000000");
    size_t left, total;
    CUdeviceptr p;
    OK(cuMemAlloc_v2(&p, 300000));
    OK(cuMemGetInfo_v2(&left, &total));
    CHECK_EQUAL(total, 1000000);
    CHECK_EQUAL(left, 700000);
    OK(cuDeviceTotalMem_v2(&total, 0));
    CHECK_EQUAL(total, 1000000);
    /* Lowered below what is in use: nothing is left. */
    atomic_store(&rg.account->limit_bytes, 200000);
    OK(cuMemGetInfo_v2(&left, &total));
    CHECK_EQUAL(left, 0);
    CHECK_EQUAL(cuMemAlloc_v2(&p, 1), CUDA_ERROR_OUT_OF_MEMORY);
    /* More than the GPU has, or than others have left of it: the GPU's own numbers. */
    size_t real_left, real_total;
    atomic_store(&rg.account->limit_bytes, 1000 * GiB);
    OK(cu.cuMemGetInfo_v2(&real_left, &real_total));
    OK(cuMemGetInfo_v2(&left, &total));
    CHECK(left == real_left && total == real_total);
    atomic_store(&rg.account->limit_bytes, 0);
    OK(cuMemGetInfo_v2(&left, &total));
    CHECK(left == real_left && total == real_total);
    OK(cuDeviceTotalMem_v2(&total, 0));
    CHECK_EQUAL(total, real_total);
    done();
}

static CUresult info_of_either(size_t *left, size_t *total)
{
    if (left)
        *left = 60 * GiB;
    if (total)
        *total = 80 * GiB;
    return answer;
}

static CUresult total_if_asked(size_t *total, CUdevice d)
{
    (void)d;
    return info_of_either(NULL, total);
}

/* What the driver makes of a program that does not want one of the numbers is its own affair. */
static void who_does_not_ask_is_not_told(void)
{
    prepare();
    become("told", "1000000");
    rg_real.hooked[RG_HOOK_cuMemGetInfo_v2] = (void *)info_of_either;
    rg_real.hooked[RG_HOOK_cuDeviceTotalMem_v2] = (void *)total_if_asked;
    size_t left = 0, total = 0;
    OK(cuMemGetInfo_v2(NULL, &total));
    OK(cuMemGetInfo_v2(&left, NULL));
    CHECK_EQUAL(total, 1000000);
    CHECK_EQUAL(left, 1000000);
    OK(cuMemGetInfo_v2(NULL, NULL));
    OK(cuDeviceTotalMem_v2(NULL, 0));
    answer = CUDA_ERROR_INVALID_VALUE;
    CHECK_EQUAL(cuMemGetInfo_v2(NULL, &total), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQUAL(cuDeviceTotalMem_v2(NULL, 0), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQUAL(total, 80 * GiB);
    done();
}

static void a_limit_that_is_no_number_is_none(void)
{
    prepare();
    int out[2], saved = dup(STDERR_FILENO);
    CHECK_EQUAL(pipe(out), 0);
    dup2(out[1], STDERR_FILENO);
    become("nonsense", "-5");
    dup2(saved, STDERR_FILENO);
    char line[512] = "";
    ssize_t n = read(out[0], line, sizeof line - 1);
    CHECK(n > 0 && strstr(line, "RIGEL_MEMORY is \"-5\", expected a number of bytes") && strchr(line, '\n') == line + n - 1);
    CHECK_EQUAL(rg.account->limit_bytes, 0);
    CUdeviceptr p;
    OK(cuMemAlloc_v2(&p, 10));
    CHECK_EQUAL(used(), 10);
    done();
}

/* What a pool keeps after a free is not charged, and goes back before it and the rest exceed the limit. */
static void pools_give_back_what_they_keep(void)
{
    prepare();
    become("keeper", "104857600");
    CUmemoryPool pools[2];
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    CUdeviceptr p, q;
    OK(cu.cuDeviceGetDefaultMemPool(&pools[0], 0));
    OK(cu.cuMemPoolCreate(&pools[1], &props));
    for (int i = 0; i < 2; i++)
        keeps_all(pools[i]);
    OK(cuMemAllocAsync(&p, 50 * MiB, NULL));
    OK(cuMemAllocFromPoolAsync(&q, 30 * MiB, pools[1], NULL));
    CHECK_EQUAL(cuMemAllocAsync(&p, 21 * MiB, NULL), CUDA_ERROR_OUT_OF_MEMORY);
    OK(cuMemFreeAsync(p, NULL));
    OK(cuMemFreeAsync(q, NULL));
    CHECK_EQUAL(used(), 0);
    CHECK_EQUAL(taken(), 80 * MiB);
    OK(cuMemAlloc_v2(&p, 20 * MiB)); /* beside the 80 that are kept, it just fits */
    CHECK_EQUAL(taken(), 100 * MiB);
    OK(cuMemAllocAsync(&q, 50 * MiB, NULL)); /* from what is kept */
    CHECK_EQUAL(taken(), 100 * MiB);
    OK(cuMemFreeAsync(q, NULL));
    CHECK_EQUAL(cuMemAlloc_v2(&q, 101 * MiB), CUDA_ERROR_OUT_OF_MEMORY); /* never fits: nothing is given back for it */
    CHECK_EQUAL(taken(), 100 * MiB);
    OK(cuMemAlloc_v2(&q, 1));
    CHECK_EQUAL(taken(), 20 * MiB + 512);
    CHECK_EQUAL(used(), 20 * MiB + 1);
    OK(cuMemFree_v2(q));
    OK(cuMemFree_v2(p));
    /* A pool that was destroyed is not asked any more. */
    OK(cuMemAllocFromPoolAsync(&q, 30 * MiB, pools[1], NULL));
    OK(cuMemFreeAsync(q, NULL));
    OK(cuMemPoolDestroy(pools[1]));
    OK(cuMemAlloc_v2(&p, 100 * MiB));
    CHECK_EQUAL(taken(), 100 * MiB);
    OK(cuMemFree_v2(p));
    CHECK_EQUAL(used(), 0);
    done();
}

/* Nor does what one pool keeps exceed the limit beside what comes from another. */
static void one_pool_gives_back_for_another(void)
{
    prepare();
    become("pools", "104857600");
    CUmemoryPool own[2];
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    CUdeviceptr p, q;
    for (int i = 0; i < 2; i++) {
        OK(cu.cuMemPoolCreate(&own[i], &props));
        keeps_all(own[i]);
    }
    OK(cuMemAllocFromPoolAsync(&p, 60 * MiB, own[0], NULL));
    OK(cuMemFreeAsync(p, NULL));
    OK(cuMemAllocFromPoolAsync(&p, 40 * MiB, own[1], NULL)); /* beside the 60 that are kept, it just fits */
    CHECK_EQUAL(taken(), 100 * MiB);
    OK(cuMemAllocFromPoolAsync(&q, 60 * MiB, own[0], NULL)); /* what the pool itself keeps it need not give back */
    CHECK_EQUAL(taken(), 100 * MiB);
    OK(cuMemFreeAsync(q, NULL));
    CHECK_EQUAL(cuMemAllocFromPoolAsync(&q, 101 * MiB, own[1], NULL), CUDA_ERROR_OUT_OF_MEMORY);
    CHECK_EQUAL(taken(), 100 * MiB);
    OK(cuMemAllocFromPoolAsync(&q, 1 * MiB, own[1], NULL));
    CHECK_EQUAL(taken(), 41 * MiB);
    CHECK_EQUAL(used(), 41 * MiB);
    OK(cuMemFreeAsync(q, NULL));
    OK(cuMemFreeAsync(p, NULL));
    OK(cuMemAllocAsync(&p, 80 * MiB, NULL)); /* the device's current pool */
    CHECK_EQUAL(taken(), 80 * MiB);
    OK(cuMemFreeAsync(p, NULL));
    done();
}

/* The pool is that of the stream's device, whatever device is current. */
static void the_pool_is_that_of_the_streams_device(void)
{
    setenv("RIGEL_SIM_DEVICES", "2", 1);
    prepare();
    become("devices", "104857600");
    CUmemoryPool pool;
    CUcontext second;
    CUstream s;
    CUdeviceptr p;
    uint64_t reserved;
    OK(cu.cuDevicePrimaryCtxRetain(&second, 1));
    OK(cuCtxSetCurrent(second));
    OK(cuStreamCreate(&s, 0));
    OK(cuCtxSetCurrent(context));
    OK(cu.cuDeviceGetDefaultMemPool(&pool, 1));
    keeps_all(pool);
    OK(cuMemAllocAsync(&p, 80 * MiB, s));
    OK(cuMemFreeAsync(p, s));
    OK(cuMemAlloc_v2(&p, 50 * MiB));
    OK(cu.cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved));
    CHECK_EQUAL(reserved, 0);
    CUcontext now;
    OK(cu.cuCtxGetCurrent(&now));
    CHECK(now == context);
    done();
}

/* ---- Threads. */

enum { THREADS = 8, OPERATIONS = 1250, HELD = 24 };

static CUmemoryPool shared_pool;

typedef struct {
    int kind;
    CUdeviceptr p;
    CUarray array;
    CUmipmappedArray mipmaps;
    CUmemGenericAllocationHandle h;
} holding;

static uint32_t next_random(uint32_t *seed)
{
    *seed = *seed * 1664525u + 1013904223u;
    return *seed >> 8;
}

static void give_up(holding *one, CUstream s)
{
    switch (one->kind) {
    case 0: break;
    case 1: case 2: case 3: OK(cuMemFree_v2(one->p)); break;
    case 4: OK(cuMemFreeAsync(one->p, s)); break;
    case 5: OK(cuMemFreeAsync_ptsz(one->p, s)); break;
    case 6: OK(cuMemRelease(one->h)); break;
    case 7: OK(cuArrayDestroy(one->array)); break;
    case 8: OK(cuMipmappedArrayDestroy(one->mipmaps)); break;
    case 9:
        OK(cuMemUnmap(one->p, 2 * MiB));
        OK(cuMemRelease(one->h));
        break;
    default: CHECK(false);
    }
    one->kind = 0;
}

static _Atomic uint64_t refused;

/* Takes something of a random kind and size; being refused is fine. */
static void take_something(holding *one, uint32_t *seed, CUstream s, CUdeviceptr addresses)
{
    size_t n = next_random(seed) % (3 * MiB) + 1, pitch;
    CUDA_ARRAY3D_DESCRIPTOR d = texture(next_random(seed) % 500 + 1, next_random(seed) % 500, 0, CU_AD_FORMAT_FLOAT, 4);
    int kind = (int)(next_random(seed) % 9) + 1;
    CUresult r = CUDA_ERROR_UNKNOWN;
    switch (kind) {
    case 1: r = cuMemAlloc_v2(&one->p, n); break;
    case 2: r = cuMemAllocPitch_v2(&one->p, &pitch, n / 1000 + 1, 100, 8); break;
    case 3: r = cuMemAllocManaged(&one->p, n, CU_MEM_ATTACH_GLOBAL); break;
    case 4: r = cuMemAllocAsync(&one->p, n, s); break;
    case 5: r = cuMemAllocFromPoolAsync_ptsz(&one->p, n, shared_pool, s); break;
    case 6: r = cuMemCreate(&one->h, round_up(n, 2 * MiB), &on_device, 0); break;
    case 7: r = cuArray3DCreate_v2(&one->array, &d); break;
    case 8: r = cuMipmappedArrayCreate(&one->mipmaps, &d, 4); break;
    case 9:
        r = cuMemCreate(&one->h, 2 * MiB, &on_device, 0);
        one->p = addresses;
        if (r == CUDA_SUCCESS)
            OK(cuMemMap(addresses, 2 * MiB, 0, one->h, 0));
        break;
    }
    if (r == CUDA_SUCCESS)
        one->kind = kind;
    else
        atomic_fetch_add(&refused, 1);
    CHECK(r == CUDA_SUCCESS || r == CUDA_ERROR_OUT_OF_MEMORY);
}

static void *allocate_at_random(void *number)
{
    uint32_t seed = (uint32_t)(uintptr_t)number * 7919 + 1;
    holding held[HELD] = {0};
    CUdeviceptr addresses;
    CUstream s;
    OK(cu.cuCtxSetCurrent(context));
    OK(cuStreamCreate(&s, 0));
    OK(cu.cuMemAddressReserve(&addresses, HELD * 2 * MiB, 0, 0, 0));
    for (int i = 0; i < OPERATIONS; i++) {
        uint32_t at = next_random(&seed) % HELD;
        if (held[at].kind)
            give_up(&held[at], s);
        else
            take_something(&held[at], &seed, s, addresses + at * 2 * MiB);
    }
    for (int i = 0; i < HELD; i++)
        give_up(&held[i], s);
    return NULL;
}

static void random_work_accounts_to_zero(const char *limit)
{
    prepare();
    become("threads", limit);
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    OK(cu.cuMemPoolCreate(&shared_pool, &props));
    pthread_t threads[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++)
        CHECK_EQUAL(pthread_create(&threads[i], NULL, allocate_at_random, (void *)i), 0);
    for (int i = 0; i < THREADS; i++)
        CHECK_EQUAL(pthread_join(threads[i], NULL), 0);
    CHECK_EQUAL(used(), 0);
    CHECK_EQUAL(rg_memory_tracked(), 0);
    CHECK_EQUAL(taken(), 0);
    CHECK_EQUAL(rg.account->denied, atomic_load(&refused));
    CHECK(rg.account->peak_bytes > 10 * MiB);
    done();
}

static void ten_thousand_operations_of_8_threads(void)
{
    random_work_accounts_to_zero(NULL);
    CHECK_EQUAL(atomic_load(&refused), 0);
}

static void the_same_at_a_limit(void)
{
    random_work_accounts_to_zero("41943040");
    CHECK(atomic_load(&refused) > 0);
    CHECK(rg.account->peak_bytes <= 40 * MiB);
}

static void *allocate_for_ever(void *unused)
{
    (void)unused;
    CUdeviceptr p;
    OK(cu.cuCtxSetCurrent(context));
    for (;;) {
        CUresult r = cuMemAlloc_v2(&p, 6 * MiB);
        if (r == CUDA_SUCCESS)
            r = cuMemFree_v2(p);
        if (r == CUDA_ERROR_DEINITIALIZED)
            return NULL;
    }
}

/* Whatever the threads hold at a fork or at the exit that ends this case, nobody waits for it. */
static void fork_and_exit_in_the_midst(void)
{
    prepare();
    become("midst", "20971520");
    pthread_t thread;
    for (int i = 0; i < 4; i++) {
        CHECK_EQUAL(pthread_create(&thread, NULL, allocate_for_ever, NULL), 0);
        CHECK_EQUAL(pthread_detach(thread), 0);
    }
    WAIT_FOR(rg.account->denied > 0);
    for (int i = 0; i < 50; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            CUdeviceptr p;
            alarm(50);
            CHECK(cuMemAlloc_v2(&p, 1) != CUDA_SUCCESS);
            CHECK(cuMemFree_v2(4096) != CUDA_SUCCESS);
            _exit(0);
        }
        int status = 1;
        waitpid(pid, &status, 0);
        CHECK_EQUAL(status, 0);
    }
    CHECK(used() <= 20 * MiB);
    done();
}

/* ---- Processes. */

/* Runs `body` as another process of this case, which must not have become a client yet. */
static pid_t other(void (*body)(void))
{
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* some never end by themselves */
        body();
        exit(0);
    }
    return pid;
}

static void ends_well(pid_t pid)
{
    int status = 1;
    waitpid(pid, &status, 0);
    CHECK_EQUAL(status, 0);
}

static void ends_killed(pid_t pid)
{
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
}

static uint64_t used_by(int account)
{
    return rg_account_used(seg, &seg->accounts[account]);
}

/* What processes of a case share. */
typedef struct {
    _Atomic int ready, go, failures;
    _Atomic uint64_t count;
} meeting;
static meeting *shared;

static void meet(void)
{
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
}

static void churn_forever(void)
{
    become("victim", "67108864");
    atomic_fetch_add(&shared->ready, 1);
    uint32_t seed = (uint32_t)getpid();
    for (;;) {
        CUdeviceptr p[4] = {0};
        for (int i = 0; i < 4; i++)
            if (cuMemAlloc_v2(&p[i], next_random(&seed) % (16 * MiB) + 1) != CUDA_SUCCESS)
                p[i] = 0;
        for (int i = 0; i < 4; i++)
            if (p[i])
                OK(cuMemFree_v2(p[i]));
        atomic_fetch_add(&shared->count, 1);
    }
}

/* Two processes of a client, killed at any instant, again and again: what they had is nobody's, and the limit still works. */
static void killed_processes_return_to_zero(void)
{
    prepare();
    meet();
    uint32_t seed = 99;
    for (int round = 0; round < 40; round++) {
        atomic_store(&shared->ready, 0);
        pid_t a = other(churn_forever), b = other(churn_forever);
        WAIT_FOR(atomic_load(&shared->ready) == 2);
        usleep(next_random(&seed) % 3000);
        CHECK(used_by(0) <= 64 * MiB);
        ends_killed(a);
        ends_killed(b);
        rg_segment_reap(seg); /* one of them may have cleared the other away */
        CHECK_EQUAL(used_by(0), 0);
    }
    CHECK(atomic_load(&shared->count) > 0);
    CHECK(seg->accounts[0].peak_bytes <= 64 * MiB);
    become("victim", "67108864");
    CUdeviceptr p, q;
    OK(cuMemAlloc_v2(&p, 64 * MiB));
    CHECK_EQUAL(cuMemAlloc_v2(&q, 1), CUDA_ERROR_OUT_OF_MEMORY);
    CHECK_EQUAL(used(), 64 * MiB);
    done();
}

static CUresult wait_in_the_driver(CUdeviceptr *p, size_t n)
{
    (void)p, (void)n;
    atomic_store(&shared->ready, 1);
    while (true)
        pause();
    return CUDA_ERROR_UNKNOWN;
}

static void charge_and_hang(void)
{
    become("hung", "1000");
    rg_real.hooked[RG_HOOK_cuMemAlloc_v2] = (void *)wait_in_the_driver;
    CUdeviceptr p;
    cuMemAlloc_v2(&p, 1000);
}

static void killed_between_charging_and_allocating(void)
{
    prepare();
    meet();
    pid_t pid = other(charge_and_hang);
    WAIT_FOR(atomic_load(&shared->ready));
    CHECK_EQUAL(used_by(0), 1000);
    ends_killed(pid);
    CHECK_EQUAL(used_by(0), 1000); /* nobody has looked yet */
    /* Who comes next looks. */
    become("hung", "1000");
    CUdeviceptr p;
    OK(cuMemAlloc_v2(&p, 1000));
    CHECK_EQUAL(used(), 1000);
    CHECK_EQUAL(rg.account->denied, 0);
    done();
}

/* A process that was there before looks when it needs the room. */
static void killed_beside_another_process(void)
{
    prepare();
    meet();
    pid_t pid = other(charge_and_hang);
    WAIT_FOR(atomic_load(&shared->ready));
    become("hung", "1000");
    CUdeviceptr p;
    CHECK_EQUAL(cuMemAlloc_v2(&p, 1), CUDA_ERROR_OUT_OF_MEMORY);
    ends_killed(pid);
    OK(cuMemAlloc_v2(&p, 1000));
    CHECK_EQUAL(used(), 1000);
    CHECK_EQUAL(rg.account->denied, 1);
    done();
}

static void die_with_the_lock(void)
{
    become("locked", "1000");
    atomic_store(&rg.account->lock, atomic_load(&rg.slot->owner));
    atomic_store(&shared->ready, 1);
    for (;;)
        pause();
}

static void a_lock_whose_owner_died_is_taken(void)
{
    prepare();
    meet();
    pid_t pid = other(die_with_the_lock);
    WAIT_FOR(atomic_load(&shared->ready));
    uint64_t lock = atomic_load(&seg->accounts[0].lock);
    CHECK(lock != 0);
    ends_killed(pid);
    become("locked", "1000");
    CUdeviceptr p;
    OK(cuMemAlloc_v2(&p, 1000));
    CHECK_EQUAL(cuMemAlloc_v2(&p, 1), CUDA_ERROR_OUT_OF_MEMORY);
    CHECK_EQUAL(rg.account->lock, 0);
    /* One of a process that lives and never lets go is waited for, then passed. */
    atomic_store(&rg.account->lock, 1); /* init */
    OK(cuMemFree_v2(p));
    OK(cuMemAlloc_v2(&p, 1000));
    CHECK_EQUAL(cuMemAlloc_v2(&p, 1), CUDA_ERROR_OUT_OF_MEMORY);
    done();
}

/* Two processes that ask at once are told one after the other: who has the lock is waited for, as long as it lives, for a while. */
static void who_has_the_lock_is_waited_for(void)
{
    const uint64_t AT_LEAST_NS = 100000000; /* account.h */
    prepare();
    become("locked", "1000");
    atomic_store(&rg.account->lock, 1); /* init */
    uint64_t since = rg_now_ns();
    CHECK(rg_account_charge(seg, rg.account, rg.slot_index, 1000));
    CHECK(rg_now_ns() - since >= AT_LEAST_NS);
    CHECK_EQUAL(rg.account->lock, 1); /* it is not ours to give back */
    CHECK(!rg_account_charge(seg, rg.account, rg.slot_index, 1));
    atomic_store(&rg.account->lock, 0);
    rg_account_return(seg, rg.slot_index, 1000);
    done();
}

/* What an account is entered with, and for whom: also where the slot was another client's before. */
static void an_account_has_its_own_slots(void)
{
    prepare();
    rg_account *first = rg_account_enter(seg, "first"), *second = rg_account_enter(seg, "second");
    CHECK(first && second && first != second && rg_account_enter(seg, "first") == first);
    CHECK(strcmp(first->name, "first") == 0 && strcmp(second->name, "second") == 0);
    CHECK(rg_account_join(seg, 3, "first") == first && rg_account_join(seg, 4, "first") == first);
    const rg_account *third = rg_account_join(seg, 5, "third");
    CHECK(third && strcmp(third->name, "third") == 0 && third->slots == 1 << 5);
    CHECK_EQUAL(first->slots, 1 << 3 | 1 << 4);
    CHECK(rg_account_join(seg, 3, "second") == second);
    CHECK_EQUAL(first->slots, 1 << 4);
    CHECK_EQUAL(second->slots, 1 << 3);
    /* The class that is asked of all of a client, where one is. */
    CHECK_EQUAL(rg_account_class(seg, "first", RG_CLASS_HIGH), RG_CLASS_HIGH);
    for (uint32_t class = RG_CLASS_HIGH; class <= RG_CLASS_BEST_EFFORT; class++) {
        atomic_store(&first->wanted_class, class);
        for (uint32_t started = RG_CLASS_HIGH; started <= RG_CLASS_BEST_EFFORT; started++)
            CHECK_EQUAL(rg_account_class(seg, "first", started), class);
    }
    atomic_store(&first->wanted_class, 77);
    CHECK_EQUAL(rg_account_class(seg, "first", RG_CLASS_BEST_EFFORT), RG_CLASS_BEST_EFFORT);
    done();
}

/* With an exec ends all that the program before it had in the segment, and nothing of another process's, or of this program's other clients. */
static void an_exec_ends_what_was_before(void)
{
    enum { FORMER, STRANGER, MINE, NOW, SLOTS };
    prepare();
    int slots[SLOTS];
    uint64_t owners[SLOTS];
    for (int i = 0; i < SLOTS; i++) {
        char name[32];
        snprintf(name, sizeof name, "client %d", i);
        slots[i] = rg_segment_claim(seg, name, RG_CLASS_HIGH, rg_now_ns());
        CHECK(slots[i] >= 0);
        rg_account_join(seg, slots[i], name);
        rg_device_busy(&seg->devices[1], slots[i], rg_now_ns());
        owners[i] = seg->clients[slots[i]].owner;
    }
    atomic_store(&seg->clients[slots[FORMER]].image, seg->clients[slots[NOW]].image + 2);
    atomic_store(&seg->clients[slots[STRANGER]].image, seg->clients[slots[NOW]].image + 2);
    atomic_store(&seg->clients[slots[STRANGER]].owner, owners[STRANGER] + 1);
    atomic_store(&seg->accounts[0].lock, owners[FORMER]);
    atomic_store(&seg->accounts[1].lock, owners[STRANGER] + 1);
    CHECK(rg_account_join(seg, slots[NOW], "client 3") != NULL);
    for (int i = 0; i < SLOTS; i++) {
        CHECK_EQUAL(seg->clients[slots[i]].state, i == FORMER ? RG_DEAD : RG_LIVE);
        CHECK_EQUAL(seg->devices[1].high_busy >> slots[i] & 1, i != FORMER);
    }
    CHECK_EQUAL(rg_segment_claim(seg, "client 0", RG_CLASS_HIGH, rg_now_ns()), slots[FORMER]);
    CHECK_EQUAL(seg->accounts[0].lock, 0);
    CHECK_EQUAL(seg->accounts[1].lock, owners[STRANGER] + 1);
    done();
}

static void one_half_for_ever(void)
{
    become("half", "1000000");
    CUdeviceptr p;
    atomic_fetch_add(&shared->ready, 1);
    WAIT_FOR(atomic_load(&shared->go));
    for (int i = 0; i < 3000; i++) {
        if (cuMemAlloc_v2(&p, 500000) != CUDA_SUCCESS) {
            atomic_fetch_add(&shared->failures, 1);
            continue;
        }
        OK(cuMemFree_v2(p));
    }
}

static void too_much_for_ever(void)
{
    become("half", "1000000");
    CUdeviceptr p;
    atomic_fetch_add(&shared->ready, 1);
    WAIT_FOR(atomic_load(&shared->go));
    for (int i = 0; i < 3000; i++)
        CHECK_EQUAL(cuMemAlloc_v2(&p, 1000001), CUDA_ERROR_OUT_OF_MEMORY);
}

/* The processes of a client share its limit: two halves always fit, whatever else is asked for and refused meanwhile. */
static void processes_of_a_client_share_its_limit(void)
{
    prepare();
    meet();
    pid_t pids[] = {other(one_half_for_ever), other(one_half_for_ever), other(too_much_for_ever)};
    WAIT_FOR(atomic_load(&shared->ready) == 3);
    atomic_store(&shared->go, 1);
    for (int i = 0; i < 3; i++)
        ends_well(pids[i]);
    CHECK_EQUAL(atomic_load(&shared->failures), 0);
    CHECK_EQUAL(seg->accounts[0].denied, 3000);
    CHECK(seg->accounts[0].peak_bytes <= 1000000);
    CHECK_EQUAL(used_by(0), 0);
    CHECK_EQUAL(seg->accounts[1].key, 0);
    done();
}

static void hold_700(void)
{
    become("pair", NULL);
    CUdeviceptr p;
    OK(cuMemAlloc_v2(&p, 700));
    atomic_store(&shared->ready, 1);
    WAIT_FOR(atomic_load(&shared->go));
}

static void another_client(void)
{
    become("stranger", NULL);
    CUdeviceptr p;
    OK(cuMemAlloc_v2(&p, 5000));
    CHECK_EQUAL(used(), 5000);
}

static void what_one_process_holds_the_other_cannot(void)
{
    prepare();
    meet();
    pid_t first = other(hold_700);
    WAIT_FOR(atomic_load(&shared->ready));
    become("pair", "1000");
    CUdeviceptr p;
    CHECK_EQUAL(cuMemAlloc_v2(&p, 301), CUDA_ERROR_OUT_OF_MEMORY);
    OK(cuMemAlloc_v2(&p, 300));
    CHECK_EQUAL(used(), 1000);
    size_t left, total;
    OK(cuMemGetInfo_v2(&left, &total));
    CHECK(left == 0 && total == 1000);
    pid_t second = fork(); /* a forked child is no client, and its driver refuses everything */
    if (second == 0) {
        CHECK(cuMemAlloc_v2(&p, 1) != CUDA_ERROR_OUT_OF_MEMORY);
        CHECK(cuMemFree_v2(p) != CUDA_SUCCESS);
        _exit(0);
    }
    ends_well(second);
    CHECK_EQUAL(used(), 1000);
    atomic_store(&shared->go, 1);
    ends_well(first);
    CHECK_EQUAL(used(), 300);
    done();
}

static void hold_with_a_limit(void)
{
    become("again", "1000");
    atomic_store(&shared->ready, 1);
    WAIT_FOR(atomic_load(&shared->go));
}

static void have_its_limit(void)
{
    become("again", NULL);
    CHECK_EQUAL(rg.account->limit_bytes, 1000);
}

static void have_none(void)
{
    become("again", NULL);
    CHECK_EQUAL(rg.account->limit_bytes, 0);
}

/* A limit is gone with the last process of the client, unless it was asked for meanwhile: the next one has what it is told itself. */
static void a_limit_ends_with_its_client(void)
{
    prepare();
    meet();
    pid_t first = other(hold_with_a_limit);
    WAIT_FOR(atomic_load(&shared->ready));
    ends_well(other(have_its_limit)); /* beside one that has it */
    atomic_store(&shared->go, 1);
    ends_well(first);
    CHECK_EQUAL(seg->accounts[0].limit_bytes, 1000);
    ends_well(other(have_none));
    atomic_store(&shared->ready, 0);
    atomic_store(&shared->go, 0);
    first = other(hold_with_a_limit);
    WAIT_FOR(atomic_load(&shared->ready));
    ends_killed(first);
    ends_well(other(have_none));
    atomic_store(&seg->accounts[0].wanted_limit, 1);
    atomic_store(&seg->accounts[0].limit_bytes, 1000);
    ends_well(other(have_its_limit));
    done();
}

static void have_nonsense(void)
{
    become("again", "40GiB");
    CHECK_EQUAL(rg.account->limit_bytes, 0);
}

/* Nor does who is told what is no number go on with what those that have ended were told. */
static void nonsense_is_no_limit_of_those_before(void)
{
    prepare();
    meet();
    atomic_store(&shared->go, 1);
    ends_well(other(hold_with_a_limit));
    CHECK_EQUAL(seg->accounts[0].limit_bytes, 1000);
    ends_well(other(have_nonsense));
    done();
}

static void another_clients_memory_is_its_own(void)
{
    prepare();
    meet();
    pid_t first = other(hold_700);
    WAIT_FOR(atomic_load(&shared->ready));
    ends_well(other(another_client));
    CHECK_EQUAL(used_by(0), 700);
    CHECK_EQUAL(seg->accounts[1].peak_bytes, 5000);
    CHECK(strcmp(seg->accounts[0].name, "pair") == 0 && strcmp(seg->accounts[1].name, "stranger") == 0);
    atomic_store(&shared->go, 1);
    ends_well(first);
    CHECK_EQUAL(used_by(0), 0);
    done();
}

/* An exec keeps the process and takes its device memory: the program that follows starts from nothing. */
static void exec_starts_from_nothing(void)
{
    prepare();
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        become("exec", "1000");
        CUdeviceptr p;
        OK(cuMemAlloc_v2(&p, 1000));
        setenv("TEST_AFTER_EXEC", "1", 1);
        execl("/proc/self/exe", "test-memory", (char *)NULL);
        _exit(1);
    }
    ends_well(pid);
    CHECK_EQUAL(seg->accounts[0].peak_bytes, 1000);
    CHECK_EQUAL(used_by(0), 0);
    done();
}

static int after_exec(void)
{
    become("exec", getenv("RIGEL_MEMORY")); /* environment survives an exec, and so does the limit */
    CUdeviceptr p;
    CHECK_EQUAL(used(), 0);
    OK(cuMemAlloc_v2(&p, 1000));
    CHECK_EQUAL(used(), 1000);
    CHECK_EQUAL(cuMemAlloc_v2(&p, 1), CUDA_ERROR_OUT_OF_MEMORY);
    return 0;
}

int main(int argc, char **argv)
{
    (void)argc;
    ensure_environment("LD_LIBRARY_PATH", in_build_folder("sim"), argv);
    if (getenv("TEST_AFTER_EXEC"))
        return after_exec();
    int failures = 0;
    RUN(each_kind_is_counted_and_given_back);
    RUN(texels_of_pictures_are_as_large_as_they_are);
    RUN(stream_ordered_memory_is_counted_until_it_is_freed);
    RUN(host_memory_from_a_pool_is_not_counted);
    RUN(a_destroyed_pool_is_not_asked);
    RUN(a_pool_that_is_not_destroyed_is_still_known);
    RUN(captured_allocations_are_the_graphs);
    RUN(physical_memory_is_counted_until_nothing_holds_it);
    RUN(contexts_take_their_memory_with_them);
    RUN(no_high_clients_pools_are_asked_for_what_they_keep);
    RUN(the_limit_is_exact);
    RUN(what_the_driver_adds_counts_against_the_limit);
    RUN(the_drivers_errors_are_its_own);
    RUN(programs_are_told_the_limit);
    RUN(who_does_not_ask_is_not_told);
    RUN(a_limit_that_is_no_number_is_none);
    RUN(pools_give_back_what_they_keep);
    RUN(one_pool_gives_back_for_another);
    RUN(the_pool_is_that_of_the_streams_device);
    RUN(ten_thousand_operations_of_8_threads);
    RUN(the_same_at_a_limit);
    RUN(fork_and_exit_in_the_midst);
    RUN(killed_processes_return_to_zero);
    RUN(killed_between_charging_and_allocating);
    RUN(killed_beside_another_process);
    RUN(a_lock_whose_owner_died_is_taken);
    RUN(who_has_the_lock_is_waited_for);
    RUN(an_account_has_its_own_slots);
    RUN(an_exec_ends_what_was_before);
    RUN(processes_of_a_client_share_its_limit);
    RUN(what_one_process_holds_the_other_cannot);
    RUN(a_limit_ends_with_its_client);
    RUN(nonsense_is_no_limit_of_those_before);
    RUN(another_clients_memory_is_its_own);
    RUN(exec_starts_from_nothing);
    return failures ? 1 : 0;
}
