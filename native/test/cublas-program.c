/*
 * cublas-program.c: programs that use cuBLAS as users' programs did when they failed; linked against cuBLAS and the driver.
 *
 *   s1  sets its stream on its handle, captures it, multiplies
 *   s2  works on device 1, device 0 being full of somebody else's data; a fresh thread makes a handle and multiplies
 *   s3  works on device 1
 *   s4  four threads make their handles at the same moment
 *   s5a makes a handle on device 0 and uses it for matrices on device 1, which is current
 *   s5b shares one handle between two threads, one of which is inside a call when the other makes its own
 *   lt  captures a stream and multiplies there by cublasLtMatmul, whose handle is set to another stream, and while that handle is in use
 *
 * Knows nothing of Rigel. Exit status 0: all products are right. 1: it failed; the reason is on standard error.
 */
#include "blas.h"

typedef struct {
    CUdeviceptr a, b, c;
} matrices;

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

cublasStatus_t cublasLtMatmul RG_LT_PARAMS;
static cublasStatus_t multiply_lt(CUstream s)
{
    return cublasLtMatmul(shared_handle, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0, s);
}

static void multiply_lt_inside(const char *call)
{
    (void)call;
    CHECK_EQUAL(multiply_lt(NULL), CUBLAS_STATUS_SUCCESS);
}

static void lt(void)
{
    CUstream captured, other;
    CUgraph graph;
    size_t nodes = 0;
    select_device(1);
    matrices m = allocate();
    shared_handle = handle();
    CHECK_EQUAL(cuStreamCreate(&captured, 1), CUDA_SUCCESS);
    CHECK_EQUAL(cuStreamCreate(&other, 1), CUDA_SUCCESS);
    CHECK_EQUAL(cublasSetStream_v2(shared_handle, other), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(cuStreamBeginCapture_v2(captured, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    CHECK_EQUAL(multiply_lt(captured), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(multiply_lt(other), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(cuStreamEndCapture(captured, &graph), CUDA_SUCCESS);
    CHECK_EQUAL(cuGraphGetNodes(graph, NULL, &nodes), CUDA_SUCCESS);
    CHECK_EQUAL(nodes, 1);
    atomic_store(&rigel_cublas_inside, multiply_lt_inside); /* while the handle is in use */
    multiply(shared_handle, &m);
    expect_product(&m);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*body)(void);
    } programs[] = {{"s1", s1}, {"s2", s2}, {"s3", s3}, {"s4", s4}, {"s5a", s5a}, {"s5b", s5b}, {"lt", lt}};
    const char *name = argc > 1 ? argv[1] : "";
    alarm(100);
    if (was_neighbour(argc, argv))
        return 0;
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
