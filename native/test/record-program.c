/*
 * record-program.c: a program to be recorded: record-program ITERATIONS [ahead]. Linked against cuBLAS and the driver.
 *
 * An iteration is a copy to the device, two kernels, a matrix product by cuBLAS, a memset, a CUDA graph of three kernels, and a
 * copy back. It ends with a wait, and a pause; with `ahead` the program only waits for the iteration before the last, as a training loop does.
 *
 * Knows nothing of Rigel.
 */
#include "cublas_abi.h"
#include "cuda_abi.h"
#include "testing.h"

/* As in NVIDIA's headers. */
CUresult cuInit(unsigned flags);
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d);
CUresult cuCtxSetCurrent(CUcontext c);
CUresult cuModuleLoadData(CUmodule *m, const void *image);
CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name);
CUresult cuMemAlloc_v2(CUdeviceptr *p, size_t n);
CUresult cuMemHostAlloc(void **p, size_t n, unsigned flags);
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr d, const void *h, size_t n, CUstream s);
CUresult cuMemcpyDtoHAsync_v2(void *h, CUdeviceptr d, size_t n, CUstream s);
CUresult cuMemsetD8Async(CUdeviceptr d, unsigned char v, size_t n, CUstream s);
CUresult cuStreamCreate(CUstream *s, unsigned flags);
CUresult cuStreamSynchronize(CUstream s);
CUresult cuEventCreate(CUevent *e, unsigned flags);
CUresult cuEventRecord(CUevent e, CUstream s);
CUresult cuEventSynchronize(CUevent e);
CUresult cuStreamBeginCapture_v2(CUstream s, int mode);
CUresult cuStreamEndCapture(CUstream s, CUgraph *g);
CUresult cuGraphInstantiateWithFlags(CUgraphExec *x, CUgraph g, unsigned long long flags);
CUresult cuGraphLaunch(CUgraphExec x, CUstream s);
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned smem,
                        CUstream s, void **params, void **extra);
cublasStatus_t cublasCreate_v2(cublasHandle_t *h);
cublasStatus_t cublasSetStream_v2(cublasHandle_t h, CUstream s);
cublasStatus_t cublasSgemm_v2(cublasHandle_t h, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int lda,
                              const void *b, int ldb, const void *beta, void *c, int ldc);

static const char ptx[] = ".version 6.0\n.target sm_52\n.address_size 64\n"
                          ".visible .entry softmax_warp_forward(.param .u64 n)\n{ ret; }\n"
                          ".visible .entry layer_norm_kernel(.param .u64 n)\n{ ret; }\n"
                          ".visible .entry gelu_elementwise_kernel(.param .u64 n)\n{ ret; }\n";

static CUfunction softmax, norm, gelu;

static void launch(CUfunction f, unsigned gx, unsigned gy, unsigned bx, unsigned shared, CUstream s)
{
    uint64_t n = 1;
    void *params[] = {&n};
    CHECK_EQUAL(cuLaunchKernel(f, gx, gy, 1, bx, 1, 1, shared, s, params, NULL), CUDA_SUCCESS);
}

int main(int argc, char **argv)
{
    enum { BYTES = 1 << 16 };
    long iterations = argc > 1 ? atol(argv[1]) : 1;
    int ahead = argc > 2 && strcmp(argv[2], "ahead") == 0;
    CUcontext context;
    CUmodule module;
    CUstream s;
    CUgraph graph;
    CUgraphExec exec;
    CUevent ends[2];
    CUdeviceptr device;
    void *host;
    cublasHandle_t blas;
    CHECK_EQUAL(cuInit(0), CUDA_SUCCESS);
    CHECK_EQUAL(cuDevicePrimaryCtxRetain(&context, 0), CUDA_SUCCESS);
    CHECK_EQUAL(cuCtxSetCurrent(context), CUDA_SUCCESS);
    CHECK_EQUAL(cuModuleLoadData(&module, ptx), CUDA_SUCCESS);
    CHECK_EQUAL(cuModuleGetFunction(&softmax, module, "softmax_warp_forward"), CUDA_SUCCESS);
    CHECK_EQUAL(cuModuleGetFunction(&norm, module, "layer_norm_kernel"), CUDA_SUCCESS);
    CHECK_EQUAL(cuModuleGetFunction(&gelu, module, "gelu_elementwise_kernel"), CUDA_SUCCESS);
    CHECK_EQUAL(cuMemAlloc_v2(&device, BYTES), CUDA_SUCCESS);
    CHECK_EQUAL(cuMemHostAlloc(&host, BYTES, 0), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CHECK_EQUAL(cuEventCreate(&ends[0], CU_EVENT_DISABLE_TIMING) | cuEventCreate(&ends[1], CU_EVENT_DISABLE_TIMING), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
    launch(norm, 300, 1, 256, 0, s);
    launch(gelu, 40, 2, 128, 0, s);
    launch(norm, 300, 1, 256, 0, s);
    CHECK_EQUAL(cuStreamEndCapture(s, &graph), CUDA_SUCCESS);
    CHECK_EQUAL(cuGraphInstantiateWithFlags(&exec, graph, 0), CUDA_SUCCESS);
    CHECK_EQUAL(cublasCreate_v2(&blas), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(cublasSetStream_v2(blas, s), CUBLAS_STATUS_SUCCESS);
    const float one = 1, zero = 0;
    for (long i = 0; i < iterations; i++) {
        CHECK_EQUAL(cuMemcpyHtoDAsync_v2(device, host, 4096, s), CUDA_SUCCESS);
        launch(softmax, 66, 1, 128, 2048, s);
        launch(softmax, 132, 1, 128, 2048, s);
        CHECK_EQUAL(cublasSgemm_v2(blas, 0, 0, 64, 32, 16, &one, (void *)(uintptr_t)device, 64, (void *)(uintptr_t)device, 16,
                                   &zero, (void *)(uintptr_t)device, 64),
                    CUBLAS_STATUS_SUCCESS);
        CHECK_EQUAL(cuMemsetD8Async(device, 0, 8192, s), CUDA_SUCCESS);
        CHECK_EQUAL(cuGraphLaunch(exec, s), CUDA_SUCCESS);
        CHECK_EQUAL(cuMemcpyDtoHAsync_v2(host, device, 1024, s), CUDA_SUCCESS);
        if (!ahead) {
            CHECK_EQUAL(cuStreamSynchronize(s), CUDA_SUCCESS);
            usleep(300); /* or a busy machine would not keep up with what it launches */
            continue;
        }
        CHECK_EQUAL(cuEventRecord(ends[i % 2], s), CUDA_SUCCESS);
        if (i > 0)
            CHECK_EQUAL(cuEventSynchronize(ends[(i - 1) % 2]), CUDA_SUCCESS);
    }
    CHECK_EQUAL(cuStreamSynchronize(s), CUDA_SUCCESS);
    return 0;
}
