/*
 * gpipe-program.c: training as in GPipe, by client threads in each rank, that uses its cuBLAS handles as users' programs did when they
 * failed: `gpipe-program HOW RANKS LOSSES`. The counterpart of test/gpu/gpipe.py for the simulated GPU. Linked against cuBLAS and the
 * driver.
 *
 * Each rank is a process that works on a device of its own, LOCAL_RANK, or on device 1 where there is one rank. It has four client
 * threads (the even ones high, the odd ones best-effort), which run the forward pass of one micro-batch each on their own streams:
 * products, and a batched one. A thread that they share runs their backward passes, on the streams of those, as PyTorch's autograd
 * does. The rank adds the gradients up in the order of the clients and takes a step. It writes its losses to LOSSES.LOCAL_RANK, to the
 * last bit, a line an iteration: they are the same whatever the handles, if the program runs at all. At its end it has a context on its own
 * device alone.
 *
 * HOW is one of
 *   right  each thread makes a handle in its own context and sets the stream that it works on; with MEET=1 their first calls meet
 *   s1     the same; the first forward passes are captured before they are run
 *   s2     threads make their handles while no context is current; where there is one rank device 0 is full of somebody else's data
 *   s3     as `right`
 *   s4     threads make their handles at the same moment
 *   s5a    the handles were made on device 0, before the rank turned to its own
 *   s5b    all threads use one handle, and are inside calls at the same moment
 *
 * Knows of Rigel only what rigel.h offers to programs, where that is there. Exit status 0: it ran. 1: a rank failed; the reason is on
 * standard error.
 */
#include "blas.h"

#include <semaphore.h>

enum { CLIENTS = 4, THREADS = CLIENTS + 1, ITERATIONS = 10, N = 8, HEADS = 2, HEAD = N / HEADS };
enum { FULL = N * N, MIXING = HEADS * HEAD * HEAD };

/* The model: y = last * mixed, where the heads of mixed are mix * those of (first * x). Matrices lie column by column. */
typedef struct {
    float first[FULL], mix[MIXING], last[FULL];
} parameters;
typedef struct {
    CUdeviceptr first, mix, last;
} on_device;

typedef struct {
    int number;
    CUstream stream;
    float loss;
    parameters gradient;
    on_device gradients;
    CUdeviceptr x, hidden, mixed, y, d_y, d_mixed, d_hidden;
    sem_t returned; /* its backward pass is done */
} client;

static const char *how;
static int device, rank;
static on_device weights;
static client clients[CLIENTS];
static cublasHandle_t handles[THREADS]; /* of the clients, then of the thread for backward passes */
static pthread_barrier_t begin, end, together;

static bool is(const char *name)
{
    return strcmp(how, name) == 0;
}

/* The function of Rigel's, which does nothing without it. */
#define RIGEL(result, name, params, args) \
    do { \
        result(*function_) params; \
        *(void **)&function_ = dlsym(RTLD_DEFAULT, #name); \
        if (function_) \
            function_ args; \
    } while (0)

static CUdeviceptr allocate(size_t floats)
{
    CUdeviceptr p;
    CHECK_EQUAL(cuMemAlloc_v2(&p, floats * sizeof(float)), CUDA_SUCCESS);
    return p;
}

static on_device allocate_parameters(void)
{
    return (on_device){allocate(FULL), allocate(MIXING), allocate(FULL)};
}

static void send(CUdeviceptr to, const float *from, size_t floats, CUstream s)
{
    CHECK_EQUAL(cuMemcpyHtoDAsync_v2(to, from, floats * sizeof(float), s), CUDA_SUCCESS);
}

static void fetch(float *to, CUdeviceptr from, size_t floats, CUstream s)
{
    CHECK_EQUAL(cuMemcpyDtoHAsync_v2(to, from, floats * sizeof(float), s), CUDA_SUCCESS);
}

/* Numbers from -1/2 to 1/2: the same in every run. */
static void fill(float *to, size_t floats, uint64_t seed)
{
    for (size_t i = 0; i < floats; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        to[i] = (float)(seed >> 40) / (1 << 24) - 0.5f;
    }
}

/* ---- products ---- */

static const float one = 1, zero = 0;
static const void *at(CUdeviceptr p)
{
    return (const void *)(uintptr_t)p;
}

static void multiply(cublasHandle_t h, int ta, int tb, CUdeviceptr a, CUdeviceptr b, CUdeviceptr c)
{
    CHECK_EQUAL(cublasSgemm_v2(h, ta, tb, N, N, N, &one, at(a), N, at(b), N, &zero, (void *)at(c), N), CUBLAS_STATUS_SUCCESS);
}

/* Of the heads of two matrices: what mixes them. */
static void multiply_to_mix(cublasHandle_t h, CUdeviceptr a, CUdeviceptr b, CUdeviceptr c)
{
    CHECK_EQUAL(cublasSgemmStridedBatched(h, CUBLAS_OP_N, CUBLAS_OP_T, HEAD, HEAD, N, &one, at(a), N, HEAD, at(b), N, HEAD, &zero,
                                          (void *)at(c), HEAD, HEAD * HEAD, HEADS),
                CUBLAS_STATUS_SUCCESS);
}

static void mix(cublasHandle_t h, int t, CUdeviceptr heads, CUdeviceptr c)
{
    CHECK_EQUAL(cublasSgemmStridedBatched(h, t, CUBLAS_OP_N, HEAD, N, HEAD, &one, at(weights.mix), HEAD, HEAD * HEAD, at(heads), N, HEAD,
                                          &zero, (void *)at(c), N, HEAD, HEADS),
                CUBLAS_STATUS_SUCCESS);
}

static void forward(cublasHandle_t h, const client *c)
{
    multiply(h, CUBLAS_OP_N, CUBLAS_OP_N, weights.first, c->x, c->hidden);
    mix(h, CUBLAS_OP_N, c->hidden, c->mixed);
    multiply(h, CUBLAS_OP_N, CUBLAS_OP_N, weights.last, c->mixed, c->y);
}

static void backward(cublasHandle_t h, const client *c)
{
    multiply(h, CUBLAS_OP_N, CUBLAS_OP_T, c->d_y, c->mixed, c->gradients.last);
    multiply(h, CUBLAS_OP_T, CUBLAS_OP_N, weights.last, c->d_y, c->d_mixed);
    multiply_to_mix(h, c->d_mixed, c->hidden, c->gradients.mix);
    mix(h, CUBLAS_OP_T, c->d_mixed, c->d_hidden);
    multiply(h, CUBLAS_OP_N, CUBLAS_OP_T, c->d_hidden, c->x, c->gradients.first);
}

/* ---- threads ---- */

/* Gives the calling thread its context and its handle, each in its way. */
static void prepare(int thread)
{
    if (!is("s2"))
        select_device(device);
    if (is("s4"))
        pthread_barrier_wait(&together);
    if (!handles[thread])
        handles[thread] = handle();
}

static void turn_to(cublasHandle_t h, CUstream s)
{
    if (!is("s5b"))
        CHECK_EQUAL(cublasSetStream_v2(h, s), CUBLAS_STATUS_SUCCESS);
}

/* One thread for all backward passes, which are done as they come. */
static client *_Atomic queue[CLIENTS];
static sem_t queued;

static void *run_backward(void *unused)
{
    prepare(CLIENTS);
    for (int done = 0; done < ITERATIONS * CLIENTS; done++) {
        client *c = NULL;
        while (sem_wait(&queued) != 0)
            continue;
        for (int i = 0; !c; i = (i + 1) % CLIENTS)
            c = atomic_exchange(&queue[i], NULL);
        turn_to(handles[CLIENTS], c->stream);
        backward(handles[CLIENTS], c);
        sem_post(&c->returned);
    }
    return unused;
}

static void capture(cublasHandle_t h, const client *c)
{
    CUgraph graph;
    size_t nodes = 0;
    CHECK_EQUAL(cuStreamBeginCapture_v2(c->stream, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    forward(h, c);
    CHECK_EQUAL(cuStreamEndCapture(c->stream, &graph), CUDA_SUCCESS);
    CHECK_EQUAL(cuGraphGetNodes(graph, NULL, &nodes), CUDA_SUCCESS);
    CHECK_EQUAL(nodes, 3);
}

static void micro_batch(client *c, int iteration)
{
    cublasHandle_t h = handles[c->number];
    float x[FULL], wanted[FULL], y[FULL], d_y[FULL];
    fill(x, FULL, (uint64_t)(1000 * rank + 10 * iteration + c->number));
    fill(wanted, FULL, (uint64_t)(100000 + 1000 * rank + 10 * iteration + c->number));
    turn_to(h, c->stream);
    if (is("s1") && iteration == 0) {
        capture(h, c);
        pthread_barrier_wait(&together); /* nothing else is launched while any thread captures */
    }
    send(c->x, x, FULL, c->stream);
    forward(h, c);
    fetch(y, c->y, FULL, c->stream);
    CHECK_EQUAL(cuStreamSynchronize(c->stream), CUDA_SUCCESS);
    c->loss = 0;
    for (int i = 0; i < FULL; i++) {
        d_y[i] = 2 * (y[i] - wanted[i]) / FULL;
        c->loss += (y[i] - wanted[i]) * (y[i] - wanted[i]) / FULL;
    }
    send(c->d_y, d_y, FULL, c->stream);
    atomic_store(&queue[c->number], c);
    sem_post(&queued);
    while (sem_wait(&c->returned) != 0)
        continue;
    fetch(c->gradient.first, c->gradients.first, FULL, c->stream);
    fetch(c->gradient.mix, c->gradients.mix, MIXING, c->stream);
    fetch(c->gradient.last, c->gradients.last, FULL, c->stream);
    CHECK_EQUAL(cuStreamSynchronize(c->stream), CUDA_SUCCESS);
}

static void *run_client(void *argument)
{
    client *c = argument;
    char name[32];
    snprintf(name, sizeof name, "stage-%d", c->number);
    RIGEL(int, rigel_client_enter, (const char *, const char *), (name, c->number % 2 ? "best-effort" : "high"));
    RIGEL(int, rigel_client_stream, (void *), (c->stream));
    prepare(c->number);
    for (int i = 0; i < ITERATIONS; i++) {
        pthread_barrier_wait(&begin);
        RIGEL(void, rigel_request_begin, (void), ());
        micro_batch(c, i);
        RIGEL(void, rigel_request_end, (void), ());
        pthread_barrier_wait(&end);
    }
    return NULL;
}

/* The first call of each client meets those of the others. */
static void meet(const char *call)
{
    static _Atomic int calls;
    if (strcmp(call, "cublasSgemm_v2") == 0 && atomic_fetch_add(&calls, 1) < CLIENTS)
        pthread_barrier_wait(&together);
}

/* ---- a rank ---- */

static void step(float *weight, size_t floats, size_t offset)
{
    for (size_t i = 0; i < floats; i++) {
        float sum = 0;
        for (int k = 0; k < CLIENTS; k++)
            sum += ((const float *)((const char *)&clients[k].gradient + offset))[i];
        weight[i] -= 0.5f * sum / CLIENTS;
    }
}

static void run_rank(const char *path)
{
    parameters now;
    pthread_t threads[THREADS];
    CUstream own;
    char text[PATH_MAX];
    alarm(100);
    CHECK_EQUAL(cuInit(0), CUDA_SUCCESS);
    pthread_barrier_init(&begin, NULL, CLIENTS + 1);
    pthread_barrier_init(&end, NULL, CLIENTS + 1);
    pthread_barrier_init(&together, NULL, is("s4") ? THREADS : CLIENTS);
    sem_init(&queued, 0, 0);
    if (is("s5a")) {
        select_device(0);
        for (int i = 0; i < THREADS; i++)
            handles[i] = handle();
    }
    select_device(device);
    if (is("s5b")) {
        handles[0] = handle();
        for (int i = 1; i < THREADS; i++)
            handles[i] = handles[0];
    }
    if (is("s5b") || (is("right") && getenv("MEET")))
        atomic_store(&rigel_cublas_inside, meet);
    if (is("s4")) {
        setenv("RIGEL_CUBLAS_STRICT", "1", 1);
        atomic_store(&rigel_cublas_inside, linger);
    }
    weights = allocate_parameters();
    fill((float *)&now, sizeof now / sizeof(float), 7);
    CHECK_EQUAL(cuStreamCreate(&own, CU_STREAM_DEFAULT), CUDA_SUCCESS);
    for (int i = 0; i < CLIENTS; i++) {
        client *c = &clients[i];
        c->number = i;
        sem_init(&c->returned, 0, 0);
        CHECK_EQUAL(cuStreamCreate(&c->stream, CU_STREAM_DEFAULT), CUDA_SUCCESS);
        c->gradients = allocate_parameters();
        CUdeviceptr *fields[] = {&c->x, &c->hidden, &c->mixed, &c->y, &c->d_y, &c->d_mixed, &c->d_hidden};
        for (size_t k = 0; k < sizeof fields / sizeof *fields; k++)
            *fields[k] = allocate(FULL);
        CHECK_EQUAL(pthread_create(&threads[i], NULL, run_client, c), 0);
    }
    CHECK_EQUAL(pthread_create(&threads[CLIENTS], NULL, run_backward, NULL), 0);
    snprintf(text, sizeof text, "%s.%d", path, rank);
    FILE *losses = fopen(text, "w");
    CHECK(losses != NULL);
    for (int i = 0; i < ITERATIONS; i++) {
        send(weights.first, now.first, FULL, own);
        send(weights.mix, now.mix, MIXING, own);
        send(weights.last, now.last, FULL, own);
        CHECK_EQUAL(cuStreamSynchronize(own), CUDA_SUCCESS);
        pthread_barrier_wait(&begin);
        pthread_barrier_wait(&end);
        step(now.first, FULL, offsetof(parameters, first));
        step(now.mix, MIXING, offsetof(parameters, mix));
        step(now.last, FULL, offsetof(parameters, last));
        fprintf(losses, "%a %a %a %a\n", clients[0].loss, clients[1].loss, clients[2].loss, clients[3].loss);
    }
    CHECK_EQUAL(fclose(losses), 0);
    for (int i = 0; i < THREADS; i++)
        CHECK_EQUAL(pthread_join(threads[i], NULL), 0);
    /* Nobody, a thread of an interposer's included, has made a context where this rank has no business. */
    int count;
    CHECK_EQUAL(cuDeviceGetCount(&count), CUDA_SUCCESS);
    for (int i = 0; i < count; i++) {
        unsigned flags;
        int active;
        CHECK_EQUAL(cuDevicePrimaryCtxGetState(i, &flags, &active), CUDA_SUCCESS);
        CHECK_EQUAL(active, i == device || (is("s5a") && i == 0));
    }
}

int main(int argc, char **argv)
{
    if (was_neighbour(argc, argv))
        return 0;
    if (argc != 4) {
        fprintf(stderr, "gpipe-program: expected HOW RANKS LOSSES\n");
        return 2;
    }
    int ranks = atoi(argv[2]), failed = 0, status;
    const char *local = getenv("LOCAL_RANK");
    how = argv[1];
    if (local) {
        rank = atoi(local);
        device = ranks == 1 ? 1 : rank;
        run_rank(argv[3]);
        return 0;
    }
    if (is("s2") && ranks == 1)
        move_in();
    /* As torchrun does. */
    for (int i = 0; i < ranks; i++)
        if (fork() == 0) {
            char text[16];
            snprintf(text, sizeof text, "%d", i);
            setenv("LOCAL_RANK", text, 1);
            execv("/proc/self/exe", argv);
            _exit(127);
        }
    for (int i = 0; i < ranks; i++)
        failed |= wait(&status) < 0 || status != 0;
    return failed;
}
