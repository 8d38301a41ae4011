/*
 * cublas-program.c: programs that use cuBLAS as users' programs did when they failed; linked against cuBLAS and the driver.
 *
 *   s1  sets its stream on its handle, captures it, multiplies
 *   s2  works on device 1, device 0 being full of somebody else's data; a fresh thread makes a handle and multiplies
 *   s3  works on device 1
 *   s4  four threads make their handles at the same moment
 *   s5a makes a handle on device 0 and uses it for matrices on device 1, which is current
 *   s5b shares one handle between two threads, one of which is inside a call when the other makes its own
 *
 * Knows nothing of Rigel. Exit status 0: all products are right. 1: it failed; the reason is on standard error.
 */
#include "cublas_abi.h"
#include "cuda_abi.h"
#include "sim/cublas.h"
#include "testing.h"

#include <pthread.h>

/* As in NVIDIA's headers. */
CUresult cuInit(unsigned flags);
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d);
CUresult cuCtxSetCurrent(CUcontext c);
CUresult cuMemAlloc_v2(CUdeviceptr *p, size_t n);
CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total);
CUresult cuMemcpyHtoD_v2(CUdeviceptr d, const void *h, size_t n);
CUresult cuMemcpyDtoH_v2(void *h, CUdeviceptr d, size_t n);
CUresult cuStreamCreate(CUstream *s, unsigned flags);
CUresult cuStreamSynchronize(CUstream s);
CUresult cuStreamBeginCapture_v2(CUstream s, int mode);
CUresult cuStreamEndCapture(CUstream s, CUgraph *g);
CUresult cuGraphGetNodes(CUgraph g, CUgraphNode *nodes, size_t *count);
cublasStatus_t cublasCreate_v2(cublasHandle_t *h);
cublasStatus_t cublasSetStream_v2(cublasHandle_t h, CUstream s);
cublasStatus_t cublasGetStream_v2(cublasHandle_t h, CUstream *s);
cublasStatus_t cublasSgemm_v2(cublasHandle_t h, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int lda,
                              const void *b, int ldb, const void *beta, void *c, int ldc);

typedef struct {
    CUdeviceptr a, b, c;
} matrices;

static void select_device(CUdevice d)
{
    CUcontext c;
    CHECK_EQUAL(cuDevicePrimaryCtxRetain(&c, d), CUDA_SUCCESS);
    CHECK_EQUAL(cuCtxSetCurrent(c), CUDA_SUCCESS);
}

static matrices allocate(void)
{
    static const float a[] = {1, 3, 2, 4}, b[] = {5, 7, 6, 8}, c[4];
    matrices m;
    CHECK_EQUAL(cuMemAlloc_v2(&m.a, sizeof a) | cuMemAlloc_v2(&m.b, sizeof b) | cuMemAlloc_v2(&m.c, sizeof c), CUDA_SUCCESS);
    CHECK_EQUAL(cuMemcpyHtoD_v2(m.a, a, sizeof a) | cuMemcpyHtoD_v2(m.b, b, sizeof b) | cuMemcpyHtoD_v2(m.c, c, sizeof c),
                CUDA_SUCCESS);
    return m;
}

static void multiply(cublasHandle_t h, const matrices *m)
{
    float one = 1, zero = 0;
    CHECK_EQUAL(cublasSgemm_v2(h, CUBLAS_OP_N, CUBLAS_OP_N, 2, 2, 2, &one, (void *)(uintptr_t)m->a, 2,
                               (void *)(uintptr_t)m->b, 2, &zero, (void *)(uintptr_t)m->c, 2),
                CUBLAS_STATUS_SUCCESS);
}

static void expect_product(const matrices *m)
{
    float c[4];
    CHECK_EQUAL(cuMemcpyDtoH_v2(c, m->c, sizeof c), CUDA_SUCCESS);
    CHECK(c[0] == 19 && c[1] == 43 && c[2] == 22 && c[3] == 50);
}

static cublasHandle_t handle(void)
{
    cublasHandle_t h = NULL;
    CHECK_EQUAL(cublasCreate_v2(&h), CUBLAS_STATUS_SUCCESS);
    return h;
}

static matrices shared;
static cublasHandle_t shared_handle;

static void s1(void)
{
    CUstream s, found;
    CUgraph graph;
    size_t nodes = 0;
    select_device(0);
    matrices m = allocate();
    cublasHandle_t h = handle();
    CHECK_EQUAL(cuStreamCreate(&s, CU_STREAM_DEFAULT), CUDA_SUCCESS);
    CHECK_EQUAL(cublasSetStream_v2(h, s), CUBLAS_STATUS_SUCCESS);
    multiply(h, &m);
    expect_product(&m);
    CHECK_EQUAL(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    multiply(h, &m);
    CHECK_EQUAL(cuStreamEndCapture(s, &graph), CUDA_SUCCESS);
    CHECK_EQUAL(cuGraphGetNodes(graph, NULL, &nodes), CUDA_SUCCESS);
    CHECK_EQUAL(nodes, 1);
    CHECK_EQUAL(cublasGetStream_v2(h, &found), CUBLAS_STATUS_SUCCESS);
    CHECK(found == s);
}

/* Another process, which leaves 16 MiB of device 0 and lives until its standard input ends. */
static void neighbour(void)
{
    size_t free_bytes, total;
    CUdeviceptr p;
    char byte;
    CHECK_EQUAL(cuInit(0), CUDA_SUCCESS);
    select_device(0);
    CHECK_EQUAL(cuMemGetInfo_v2(&free_bytes, &total), CUDA_SUCCESS);
    CHECK_EQUAL(cuMemAlloc_v2(&p, free_bytes - (16 << 20)), CUDA_SUCCESS);
    CHECK(write(STDOUT_FILENO, "!", 1) == 1);
    CHECK(read(STDIN_FILENO, &byte, 1) == 0);
}

static void move_in(void)
{
    int to[2], from[2];
    char byte;
    CHECK(pipe(to) == 0 && pipe(from) == 0);
    if (fork() == 0) {
        dup2(to[0], STDIN_FILENO);
        dup2(from[1], STDOUT_FILENO);
        close(to[1]);
        unsetenv("LD_PRELOAD");
        execl("/proc/self/exe", "neighbour", "neighbour", (char *)NULL);
        _exit(1);
    }
    close(from[1]);
    CHECK(read(from[0], &byte, 1) == 1);
    /* `to` stays open until we end. */
}

static void *make_and_multiply(void *unused)
{
    multiply(handle(), &shared);
    return unused;
}

static void in_a_thread(void *(*body)(void *))
{
    pthread_t t;
    CHECK_EQUAL(pthread_create(&t, NULL, body, NULL), 0);
    CHECK_EQUAL(pthread_join(t, NULL), 0);
}

static void s2(void)
{
    select_device(1);
    shared = allocate();
    in_a_thread(make_and_multiply);
    expect_product(&shared);
}

static void s3(void)
{
    select_device(1);
    matrices m = allocate();
    multiply(handle(), &m);
    expect_product(&m);
}

static pthread_barrier_t together;
static void *make_together(void *unused)
{
    select_device(0);
    matrices m = allocate();
    pthread_barrier_wait(&together);
    cublasHandle_t h = handle();
    multiply(h, &m);
    expect_product(&m);
    return unused;
}

static void linger(const char *call)
{
    if (strcmp(call, "cublasCreate_v2") == 0)
        usleep(50000);
}

static void s4(void)
{
    pthread_t t[4];
    setenv("RIGEL_CUBLAS_STRICT", "1", 1);
    atomic_store(&rigel_cublas_inside, linger);
    pthread_barrier_init(&together, NULL, 4);
    for (int i = 0; i < 4; i++)
        CHECK_EQUAL(pthread_create(&t[i], NULL, make_together, NULL), 0);
    for (int i = 0; i < 4; i++)
        CHECK_EQUAL(pthread_join(t[i], NULL), 0);
}

static void s5a(void)
{
    select_device(0);
    cublasHandle_t h = handle();
    select_device(1);
    matrices m = allocate();
    multiply(h, &m);
    expect_product(&m);
}

static _Atomic int hold = 1, held;
static void hold_first(const char *call)
{
    if (strcmp(call, "cublasSgemm_v2") == 0 && atomic_exchange(&hold, 0)) {
        atomic_store(&held, 1);
        WAIT_FOR(!atomic_load(&held));
    }
}

static void *multiply_shared(void *unused)
{
    select_device(0);
    multiply(shared_handle, &shared);
    return unused;
}

static void s5b(void)
{
    pthread_t t;
    select_device(0);
    matrices m = allocate();
    shared = allocate();
    shared_handle = handle();
    atomic_store(&rigel_cublas_inside, hold_first);
    CHECK_EQUAL(pthread_create(&t, NULL, multiply_shared, NULL), 0);
    WAIT_FOR(atomic_load(&held));
    multiply(shared_handle, &m);
    atomic_store(&held, 0);
    CHECK_EQUAL(pthread_join(t, NULL), 0);
    expect_product(&m);
    expect_product(&shared);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*body)(void);
    } programs[] = {{"s1", s1}, {"s2", s2}, {"s3", s3}, {"s4", s4}, {"s5a", s5a}, {"s5b", s5b}};
    const char *name = argc > 1 ? argv[1] : "";
    alarm(100);
    if (strcmp(name, "neighbour") == 0) {
        neighbour();
        return 0;
    }
    if (strcmp(name, "s2") == 0)
        move_in();
    CHECK_EQUAL(cuInit(0), CUDA_SUCCESS);
    for (size_t i = 0; i < sizeof programs / sizeof *programs; i++)
        if (strcmp(name, programs[i].name) == 0) {
            programs[i].body();
            return 0;
        }
    fprintf(stderr, "cublas-program: no program %s\n", name);
    return 2;
}
