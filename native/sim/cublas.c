/*
 * cublas.c: a stand-in libcublas.so for tests, over whatever libcuda.so.1 there is (the simulated one).
 *
 * It exports every function of cublas.def and holds callers to cuBLAS's rules ("cuBLAS Library" manual, "cuBLAS context",
 * "Thread safety", cublasCreate, cublasSetStream, cublasSetWorkspace), where the real one would go on to corrupt something:
 *
 *   - a NULL or destroyed handle: NOT_INITIALIZED
 *   - making a handle takes 64 MiB of the current context's memory: ALLOC_FAILED when there is none. Where no context is current,
 *     the primary one of device 0 is made so, which is what the CUDA runtime inside cuBLAS does on a thread that has selected
 *     no device
 *   - a handle of another context than the current one, an operand of another context, a stream of another context:
 *     EXECUTION_FAILED
 *   - a handle used by two threads at once: INTERNAL_ERROR, and counted as corrupted
 *   - RIGEL_CUBLAS_STRICT=1: handles made by two threads at once: NOT_INITIALIZED, as was reported from the field; NVIDIA's manual
 *     calls cublasCreate safe
 *
 * Each computing call launches one kernel on the handle's stream. cublasSgemm and cublasSgemmStridedBatched compute besides, on the
 * host, if a product is small and the stream is not being captured; the others leave their results as they are.
 *
 * Built once for each major version, whose number is RG_BLAS_MAJOR. Never used by anything but tests.
 */
#include "../cublas_abi.h"
#include "../cuda_abi.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cublas.h"

enum { HANDLE_BYTES = 64 << 20, SMALL = 1 << 18, LIVE = 0x6c697665, SETTINGS = 16 };

struct cublasContext {
    _Atomic int state; /* LIVE, or destroyed: never freed, so that a stale handle is recognised */
    _Atomic int busy;
    CUcontext context;
    CUmodule module;
    CUfunction kernel;
    CUdeviceptr memory;
    _Atomic(CUstream) stream;
    _Atomic(uintptr_t) workspace;
    _Atomic(uintptr_t) settings[SETTINGS];
};

API rigel_cublas_statistics rigel_cublas_counts;
API void (*_Atomic rigel_cublas_inside)(const char *);

#define DRIVER(X) \
    X(cuInit, (unsigned)) \
    X(cuCtxGetCurrent, (CUcontext *)) \
    X(cuCtxSetCurrent, (CUcontext)) \
    X(cuDevicePrimaryCtxRetain, (CUcontext *, CUdevice)) \
    X(cuMemAlloc_v2, (CUdeviceptr *, size_t)) \
    X(cuMemFree_v2, (CUdeviceptr)) \
    X(cuPointerGetAttribute, (void *, int, CUdeviceptr)) \
    X(cuModuleLoadData, (CUmodule *, const void *)) \
    X(cuModuleGetFunction, (CUfunction *, CUmodule, const char *)) \
    X(cuModuleUnload, (CUmodule)) \
    X(cuStreamIsCapturing, (CUstream, CUstreamCaptureStatus *)) \
    X(cuMemcpyDtoHAsync_v2, (void *, CUdeviceptr, size_t, CUstream)) \
    X(cuMemcpyHtoDAsync_v2, (CUdeviceptr, const void *, size_t, CUstream)) \
    X(cuLaunchKernel, (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, \
                       void **))
static struct {
#define MEMBER(symbol, params) CUresult(*symbol) params;
    DRIVER(MEMBER)
} cu;
static int ready;

static void find_driver(void)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    ready = driver != NULL;
#define FIND(symbol, params) ready &= driver && (*(void **)&cu.symbol = dlsym(driver, #symbol)) != NULL;
    DRIVER(FIND)
    ready &= ready && cu.cuInit(0) == CUDA_SUCCESS;
}

static void inside(const char *call)
{
    void (*f)(const char *) = atomic_load(&rigel_cublas_inside);
    if (f)
        f(call);
}

static const char ptx[] = ".version 6.0\n.target sm_52\n.address_size 64\n"
                          ".visible .entry rigel_spin(.param .u64 n, .param .u64 ns)\n{ ret; }\n";

static cublasStatus_t make(cublasHandle_t *out)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, find_driver);
    CUcontext context = NULL;
    if (!ready || cu.cuCtxGetCurrent(&context) != CUDA_SUCCESS)
        return CUBLAS_STATUS_NOT_INITIALIZED;
    if (!context && (cu.cuDevicePrimaryCtxRetain(&context, 0) != CUDA_SUCCESS || cu.cuCtxSetCurrent(context) != CUDA_SUCCESS))
        return CUBLAS_STATUS_NOT_INITIALIZED;
    struct cublasContext *h = calloc(1, sizeof *h);
    if (!h)
        return CUBLAS_STATUS_ALLOC_FAILED;
    h->context = context;
    if (cu.cuMemAlloc_v2(&h->memory, HANDLE_BYTES) != CUDA_SUCCESS) {
        free(h);
        return CUBLAS_STATUS_ALLOC_FAILED;
    }
    if (cu.cuModuleLoadData(&h->module, ptx) != CUDA_SUCCESS ||
        cu.cuModuleGetFunction(&h->kernel, h->module, "rigel_spin") != CUDA_SUCCESS) {
        cu.cuMemFree_v2(h->memory);
        free(h);
        return CUBLAS_STATUS_NOT_INITIALIZED;
    }
    atomic_store(&h->settings[5], 0xffff); /* special values for emulation; all others begin with 0 */
    atomic_store(&h->state, LIVE);
    *out = h;
    atomic_fetch_add(&rigel_cublas_counts.created, 1);
    return CUBLAS_STATUS_SUCCESS;
}

API cublasStatus_t cublasCreate_v2(cublasHandle_t *out);
API cublasStatus_t cublasCreate_v2(cublasHandle_t *out)
{
    static _Atomic int making;
    if (!out)
        return CUBLAS_STATUS_INVALID_VALUE;
    int others = atomic_fetch_add(&making, 1), most = atomic_load(&rigel_cublas_counts.most_creating);
    while (most < others + 1 && !atomic_compare_exchange_weak(&rigel_cublas_counts.most_creating, &most, others + 1))
        continue;
    inside("cublasCreate_v2");
    const char *strict = getenv("RIGEL_CUBLAS_STRICT");
    cublasStatus_t r = others && strict && *strict == '1' ? CUBLAS_STATUS_NOT_INITIALIZED : make(out);
    atomic_fetch_sub(&making, 1);
    return r;
}

static int is_live(cublasHandle_t h)
{
    return h && atomic_load(&h->state) == LIVE;
}

/* Every use of a handle lies between begin and end. */
static cublasStatus_t begin(cublasHandle_t h)
{
    if (!is_live(h))
        return CUBLAS_STATUS_NOT_INITIALIZED;
    if (atomic_exchange(&h->busy, 1)) {
        atomic_fetch_add(&rigel_cublas_counts.corrupted, 1);
        return CUBLAS_STATUS_INTERNAL_ERROR;
    }
    return CUBLAS_STATUS_SUCCESS;
}

static void end(cublasHandle_t h)
{
    atomic_store(&h->busy, 0);
}

API cublasStatus_t cublasDestroy_v2(cublasHandle_t h);
API cublasStatus_t cublasDestroy_v2(cublasHandle_t h)
{
    cublasStatus_t r = begin(h);
    if (r)
        return r;
    atomic_store(&h->state, 0);
    cu.cuMemFree_v2(h->memory);
    cu.cuModuleUnload(h->module);
    atomic_fetch_add(&rigel_cublas_counts.destroyed, 1);
    end(h);
    return CUBLAS_STATUS_SUCCESS;
}

API cublasStatus_t cublasGetProperty(int what, int *value);
API cublasStatus_t cublasGetProperty(int what, int *value)
{
    *value = what == CUBLAS_MAJOR_VERSION ? RG_BLAS_MAJOR : 0;
    return CUBLAS_STATUS_SUCCESS;
}

API cublasStatus_t cublasSetStream_v2(cublasHandle_t h, CUstream stream);
API cublasStatus_t cublasSetStream_v2(cublasHandle_t h, CUstream stream)
{
    cublasStatus_t r = begin(h);
    if (r)
        return r;
    atomic_store(&h->stream, stream);
    atomic_store(&h->workspace, 0);
    end(h);
    return CUBLAS_STATUS_SUCCESS;
}

API cublasStatus_t cublasGetStream_v2(cublasHandle_t h, CUstream *stream);
API cublasStatus_t cublasGetStream_v2(cublasHandle_t h, CUstream *stream)
{
    if (!is_live(h))
        return CUBLAS_STATUS_NOT_INITIALIZED;
    *stream = atomic_load(&h->stream);
    return CUBLAS_STATUS_SUCCESS;
}

API cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t h, void *workspace, size_t bytes);
API cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t h, void *workspace, size_t bytes)
{
    cublasStatus_t r = begin(h);
    if (r)
        return r;
    (void)bytes;
    atomic_store(&h->workspace, (uintptr_t)workspace);
    end(h);
    return CUBLAS_STATUS_SUCCESS;
}

static int ours(uintptr_t pointer, CUcontext context)
{
    CUcontext owner = NULL;
    return !pointer || cu.cuPointerGetAttribute(&owner, CU_POINTER_ATTRIBUTE_CONTEXT, pointer) != CUDA_SUCCESS ||
           owner == context;
}

/* The rules of a computing call, and its kernel. Begun, in success. */
static cublasStatus_t run(cublasHandle_t h, const char *call, const void *operand)
{
    cublasStatus_t r = begin(h);
    CUcontext current = NULL;
    if (r)
        return r;
    rigel_cublas_record seen = {.handle = h,
                                .stream = atomic_load(&h->stream),
                                .workspace = atomic_load(&h->workspace),
                                .call = call};
    for (int i = 0; i < SETTINGS; i++)
        seen.settings[i] = atomic_load(&h->settings[i]);
    rigel_cublas_last = seen;
    inside(call);
    uint64_t n = 1, ns = 1000;
    void *params[] = {&n, &ns};
    cu.cuCtxGetCurrent(&current);
    if (current != h->context || !ours((uintptr_t)operand, current) || !ours(atomic_load(&h->workspace), current) ||
        cu.cuLaunchKernel(h->kernel, 1, 1, 1, 128, 1, 1, 0, atomic_load(&h->stream), params, NULL) != CUDA_SUCCESS) {
        end(h);
        return CUBLAS_STATUS_EXECUTION_FAILED;
    }
    atomic_fetch_add(&rigel_cublas_counts.calls, 1);
    return CUBLAS_STATUS_SUCCESS;
}
API _Thread_local rigel_cublas_record rigel_cublas_last;

/* In the order of cublas.def. */
enum setting {
#define RG_BLAS_CALL(...)
#define RG_BLAS_SET(symbol, setting, ...) SETTING_##setting,
#define RG_BLAS_GET(...)
#define RG_BLAS_SPECIAL(...)
#include "cublas.def"
#undef RG_BLAS_CALL
#undef RG_BLAS_SET
#undef RG_BLAS_GET
};
_Static_assert(SETTING_EMULATION_SPECIAL_VALUES == 5, "set in make");

#pragma GCC diagnostic ignored "-Wunused-parameter"
#define RG_BLAS_CALL(symbol, params, args, operand, ...) \
    API cublasStatus_t symbol params; \
    API cublasStatus_t symbol params \
    { \
        cublasStatus_t r_ = run(h, #symbol, operand); \
        if (r_ == CUBLAS_STATUS_SUCCESS) \
            end(h); \
        return r_; \
    }
#define RG_BLAS_SET(symbol, setting, type) \
    API cublasStatus_t symbol(cublasHandle_t h, type value); \
    API cublasStatus_t symbol(cublasHandle_t h, type value) \
    { \
        cublasStatus_t r_ = begin(h); \
        if (r_) \
            return r_; \
        atomic_store(&h->settings[SETTING_##setting], (uintptr_t)value); \
        end(h); \
        return CUBLAS_STATUS_SUCCESS; \
    }
#define RG_BLAS_GET(symbol, setting, type, first) \
    API cublasStatus_t symbol(cublasHandle_t h, type *value); \
    API cublasStatus_t symbol(cublasHandle_t h, type *value) \
    { \
        if (!is_live(h)) \
            return CUBLAS_STATUS_NOT_INITIALIZED; \
        *value = (type)atomic_load(&h->settings[SETTING_##setting]); \
        return CUBLAS_STATUS_SUCCESS; \
    }
/* Those that compute are below. */
#define cublasSgemm_v2 other_sgemm
#define cublasSgemmStridedBatched other_strided
#include "cublas.def"
#undef cublasSgemm_v2
#undef cublasSgemmStridedBatched

static float element(const float *x, int transposed, int ld, int row, int column)
{
    return transposed ? x[(size_t)row * (size_t)ld + (size_t)column] : x[(size_t)column * (size_t)ld + (size_t)row];
}

static size_t bytes_of(int rows, int columns, int ld)
{
    return sizeof(float) * ((size_t)ld * (size_t)(columns - 1) + (size_t)rows);
}

/* One product, on the host, of a handle in use. */
static cublasStatus_t compute(cublasHandle_t h, int ta, int tb, int m, int n, int k, const void *alpha, CUdeviceptr a, int lda,
                              CUdeviceptr b, int ldb, const void *beta, CUdeviceptr c, int ldc)
{
    CUstream s = atomic_load(&h->stream);
    size_t sa = ta ? bytes_of(k, m, lda) : bytes_of(m, k, lda), sb = tb ? bytes_of(n, k, ldb) : bytes_of(k, n, ldb),
           sc = bytes_of(m, n, ldc);
    float *x = malloc(sa), *y = malloc(sb), *z = malloc(sc), al = 0, be = 0;
    int ok = x && y && z;
    if (atomic_load(&h->settings[SETTING_POINTER_MODE]) == CUBLAS_POINTER_MODE_DEVICE) {
        ok = ok && !cu.cuMemcpyDtoHAsync_v2(&al, (CUdeviceptr)(uintptr_t)alpha, sizeof al, s) &&
             !cu.cuMemcpyDtoHAsync_v2(&be, (CUdeviceptr)(uintptr_t)beta, sizeof be, s);
    } else {
        al = *(const float *)alpha;
        be = *(const float *)beta;
    }
    /* Bytes move during the call that submits the copy, on the simulated GPU. */
    ok = ok && !cu.cuMemcpyDtoHAsync_v2(x, a, sa, s) && !cu.cuMemcpyDtoHAsync_v2(y, b, sb, s) &&
         !cu.cuMemcpyDtoHAsync_v2(z, c, sc, s);
    for (int j = 0; ok && j < n; j++)
        for (int i = 0; i < m; i++) {
            float sum = 0, *to = &z[(size_t)j * (size_t)ldc + (size_t)i];
            for (int l = 0; l < k; l++)
                sum += element(x, ta, lda, i, l) * element(y, tb, ldb, l, j);
            *to = al * sum + (be != 0 ? be * *to : 0);
        }
    ok = ok && cu.cuMemcpyHtoDAsync_v2(c, z, sc, s) == CUDA_SUCCESS;
    free(x);
    free(y);
    free(z);
    return ok ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

static cublasStatus_t multiply(cublasHandle_t h, const char *call, int ta, int tb, int m, int n, int k, const void *alpha, const void *a,
                               int lda, long long as, const void *b, int ldb, long long bs, const void *beta, void *c, int ldc,
                               long long cs, int count)
{
    cublasStatus_t r = run(h, call, c);
    if (r)
        return r;
    CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE;
    cu.cuStreamIsCapturing(atomic_load(&h->stream), &capturing);
    if (!ours((uintptr_t)a, h->context) || !ours((uintptr_t)b, h->context))
        r = CUBLAS_STATUS_EXECUTION_FAILED;
    else if (!capturing && m > 0 && n > 0 && k > 0 && (long)m * n * k <= SMALL && c)
        for (int i = 0; i < count && !r; i++)
            r = compute(h, ta, tb, m, n, k, alpha, (CUdeviceptr)((uintptr_t)a + (uintptr_t)(as * i) * sizeof(float)), lda,
                        (CUdeviceptr)((uintptr_t)b + (uintptr_t)(bs * i) * sizeof(float)), ldb, beta,
                        (CUdeviceptr)((uintptr_t)c + (uintptr_t)(cs * i) * sizeof(float)), ldc);
    end(h);
    return r;
}

API cublasStatus_t cublasSgemm_v2 RG_GEMM_PARAMS(int);
API cublasStatus_t cublasSgemm_v2 RG_GEMM_PARAMS(int)
{
    return multiply(h, "cublasSgemm_v2", ta, tb, m, n, k, alpha, a, lda, 0, b, ldb, 0, beta, c, ldc, 0, 1);
}

API cublasStatus_t cublasSgemmStridedBatched RG_STRIDED_PARAMS(int);
API cublasStatus_t cublasSgemmStridedBatched RG_STRIDED_PARAMS(int)
{
    return multiply(h, "cublasSgemmStridedBatched", ta, tb, m, n, k, alpha, a, lda, as, b, ldb, bs, beta, c, ldc, cs, count);
}

/* Of libcublasLt.so. Its stream is an argument, and its handle may be a cuBLAS one, which several threads may use at once ("cuBLAS
 * Library" manual, cublasLtMatmul). */
API cublasStatus_t cublasLtMatmul RG_LT_PARAMS;
API cublasStatus_t cublasLtMatmul RG_LT_PARAMS
{
    uint64_t count = 1, ns = 1000;
    void *params[] = {&count, &ns};
    CUcontext current = NULL;
    if (!is_live(h))
        return CUBLAS_STATUS_NOT_INITIALIZED;
    cu.cuCtxGetCurrent(&current);
    return current == h->context && cu.cuLaunchKernel(h->kernel, 1, 1, 1, 128, 1, 1, 0, stream, params, NULL) == CUDA_SUCCESS
               ? CUBLAS_STATUS_SUCCESS
               : CUBLAS_STATUS_EXECUTION_FAILED;
}
