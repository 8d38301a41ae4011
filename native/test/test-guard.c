/*
 * test-guard.c: what the cuBLAS guard does, over the stand-in cuBLAS and the simulated GPU.
 *
 * The client's parts are linked into this program, so that sanitizers see them; the guarded functions are called by name, as a
 * program linked to cuBLAS calls them, and reach whichever libcublas.so.N the case has loaded. Each case is a process. Who is
 * inside a call when is decided by the stand-in's hook, never by time.
 */
#include "client-testing.h"
#include "guard-inside.h"
#include "sim/cublas.h"

#include <pthread.h>

static void *blas;
static CUcontext primary[2];

static rigel_cublas_statistics *counts;
static void (*_Atomic *inside)(const char *);

static rigel_cublas_record *last(void)
{
    return dlsym(blas, "rigel_cublas_last"); /* of the calling thread */
}

/* Becomes a client with a fresh segment, two simulated GPUs, a cuBLAS and this guard mode; no context yet. */
static void become_without_context(const char *guard, const char *soname)
{
    prepare_client("guard", "high");
    setenv("RIGEL_SIM_DEVICES", "2", 1);
    setenv("RIGEL_SIM_PRESET", "l4", 1);
    setenv("RIGEL_GUARD", guard, 1);
    blas = dlopen(soname, RTLD_NOW);
    if (!blas)
        fprintf(stderr, "%s\n", dlerror());
    CHECK(blas != NULL);
    find_driver();
    *(void **)&counts = dlsym(blas, "rigel_cublas_counts");
    *(void **)&inside = dlsym(blas, "rigel_cublas_inside");
    CHECK(counts && inside);
}

static void become_with(const char *guard, const char *soname)
{
    become_without_context(guard, soname);
    CHECK_EQUAL(cuInit(0), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuDevicePrimaryCtxRetain(&primary[0], 0), CUDA_SUCCESS);
    CHECK_EQUAL(cuCtxSetCurrent(primary[0]), CUDA_SUCCESS);
}

static void become(const char *guard)
{
    become_with(guard, "libcublas.so.12");
}

static void second_device(void)
{
    CHECK_EQUAL(cu.cuDevicePrimaryCtxRetain(&primary[1], 1), CUDA_SUCCESS);
}

static CUcontext current(void)
{
    CUcontext c = NULL;
    CHECK_EQUAL(cu.cuCtxGetCurrent(&c), CUDA_SUCCESS);
    return c;
}

static rg_client *me(void)
{
    return &seg->clients[0];
}

/* Two by two matrices in the current context: A = [1 2; 3 4], B = [5 6; 7 8], so A B = [19 22; 43 50]. */
typedef struct {
    CUdeviceptr a, b, c;
} matrices;

static matrices allocate(void)
{
    static const float a[] = {1, 3, 2, 4}, b[] = {5, 7, 6, 8}, nothing[4];
    matrices m;
    CHECK_EQUAL(cu.cuMemAlloc_v2(&m.a, sizeof a), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuMemAlloc_v2(&m.b, sizeof b), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuMemAlloc_v2(&m.c, sizeof a), CUDA_SUCCESS);
    CHECK_EQUAL(cuMemcpyHtoD_v2(m.a, a, sizeof a), CUDA_SUCCESS);
    CHECK_EQUAL(cuMemcpyHtoD_v2(m.b, b, sizeof b), CUDA_SUCCESS);
    CHECK_EQUAL(cuMemcpyHtoD_v2(m.c, nothing, sizeof nothing), CUDA_SUCCESS);
    return m;
}

static cublasStatus_t multiply(cublasHandle_t h, const matrices *m)
{
    float one = 1, zero = 0;
    return cublasSgemm_v2(h, CUBLAS_OP_N, CUBLAS_OP_N, 2, 2, 2, &one, (void *)(uintptr_t)m->a, 2, (void *)(uintptr_t)m->b, 2,
                          &zero, (void *)(uintptr_t)m->c, 2);
}

static bool is_product(const matrices *m)
{
    float c[4];
    CHECK_EQUAL(cuMemcpyDtoH_v2(c, m->c, sizeof c), CUDA_SUCCESS);
    return c[0] == 19 && c[1] == 43 && c[2] == 22 && c[3] == 50;
}

static CUstream stream(void)
{
    CUstream s;
    CHECK_EQUAL(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    return s;
}

static cublasHandle_t handle(void)
{
    cublasHandle_t h = NULL;
    CHECK_EQUAL(cublasCreate_v2(&h), CUBLAS_STATUS_SUCCESS);
    CHECK(h != NULL);
    return h;
}

static void nothing_was_counted(void)
{
    CHECK_EQUAL(me()->guard_events, 0);
    CHECK_EQUAL(me()->guard_repaired, 0);
}

/* ---- Used rightly ---- */

static void a_handle_used_rightly_is_never_replaced(void)
{
    become("repair");
    cublasHandle_t h = handle();
    matrices m = allocate();
    CUstream s = stream(), found;
    CHECK_EQUAL(cublasSetStream_v2(h, s), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(cublasSetMathMode(h, 3), CUBLAS_STATUS_SUCCESS);
    for (int i = 0; i < 100; i++) {
        CHECK_EQUAL(multiply(h, &m), CUBLAS_STATUS_SUCCESS);
        CHECK(last()->handle == h);
        CHECK(last()->stream == s);
    }
    CHECK(is_product(&m));
    CHECK_EQUAL(cublasGetStream_v2(h, &found), CUBLAS_STATUS_SUCCESS);
    CHECK(found == s);
    CHECK_EQUAL(counts->created, 1);
    CHECK_EQUAL(me()->guard_handles, 1);
    CHECK_EQUAL(me()->guard_major, 12);
    CHECK_EQUAL(me()->guard_mode, 3);
    nothing_was_counted();
    CHECK_EQUAL(cublasDestroy_v2(h), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(me()->guard_handles, 0);
    CHECK_EQUAL(multiply(h, &m), CUBLAS_STATUS_NOT_INITIALIZED); /* cuBLAS's own answer: it is no longer known */
    done();
}

static void every_major_version_is_guarded(void)
{
    static const char *const sonames[] = {"libcublas.so.11", "libcublas.so.12", "libcublas.so.13"};
    for (int i = 0; i < 3; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            become_with("repair", sonames[i]);
            matrices m = allocate();
            CHECK_EQUAL(multiply(handle(), &m), CUBLAS_STATUS_SUCCESS);
            CHECK_EQUAL(multiply(NULL, &m), CUBLAS_STATUS_SUCCESS);
            CHECK(is_product(&m));
            CHECK_EQUAL(me()->guard_major, 11 + i);
            CHECK_EQUAL(me()->guard_null_handle, 1);
            /* What this version lacks is not called. */
            CHECK_EQUAL(cublasHgemm_64(NULL, 0, 0, 1, 1, 1, NULL, NULL, 1, NULL, 1, NULL, NULL, 1),
                        i == 0 ? CUBLAS_STATUS_NOT_SUPPORTED : CUBLAS_STATUS_SUCCESS);
            CHECK_EQUAL(cublasSetEmulationStrategy(handle(), 2), i < 2 ? CUBLAS_STATUS_NOT_SUPPORTED : CUBLAS_STATUS_SUCCESS);
            done();
            _exit(0);
        }
        int status;
        CHECK_EQUAL(waitpid(pid, &status, 0), pid);
        CHECK_EQUAL(status, 0);
    }
}

/* ---- NULL handles ---- */

static void a_null_handle_runs_on_the_pool(void)
{
    become("repair");
    matrices m = allocate();
    CUstream s = stream(), found = NULL;
    int mode = -1;
    CHECK_EQUAL(cublasSetStream_v2(NULL, s), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(cublasSetMathMode(NULL, 3), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(multiply(NULL, &m), CUBLAS_STATUS_SUCCESS);
    CHECK(is_product(&m));
    CHECK(last()->stream == s);
    CHECK_EQUAL(last()->settings[0], 3);
    cublasHandle_t first = last()->handle;
    CHECK_EQUAL(cublasGetStream_v2(NULL, &found), CUBLAS_STATUS_SUCCESS);
    CHECK(found == s);
    CHECK_EQUAL(cublasGetMathMode(NULL, &mode), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(mode, 3);
    CHECK_EQUAL(cublasGetPointerMode_v2(NULL, &mode), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(mode, 0);
    CHECK_EQUAL(multiply(NULL, &m), CUBLAS_STATUS_SUCCESS);
    CHECK(last()->handle == first); /* no second handle is made for nothing */
    CHECK_EQUAL(counts->created, 1);
    CHECK_EQUAL(me()->guard_null_handle, 7);
    CHECK_EQUAL(me()->guard_repaired, 7);
    done();
}

/* What a process that does this, with that, says on standard error; its wait status. */
static int said_by(void (*does)(int), int with, char *text, size_t size)
{
    int out[2], status;
    CHECK_EQUAL(pipe(out), 0);
    pid_t pid = fork();
    if (pid == 0) {
        dup2(out[1], STDERR_FILENO);
        does(with);
        done();
        _exit(0);
    }
    close(out[1]);
    size_t n = 0;
    for (ssize_t got; (got = read(out[0], text + n, size - 1 - n)) > 0;)
        n += (size_t)got;
    text[n] = 0;
    close(out[0]);
    CHECK_EQUAL(waitpid(pid, &status, 0), pid);
    if (status)
        fprintf(stderr, "status %x, said: %s\n", status, text);
    return status;
}

static const char *const modes[] = {"off", "warn", "repair"};

static void multiply_without_a_handle(int mode)
{
    become(modes[mode]);
    matrices m = allocate();
    for (int k = 0; k < 2; k++)
        CHECK_EQUAL(multiply(NULL, &m), mode == 2 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_INITIALIZED);
    CHECK_EQUAL(me()->guard_null_handle, mode == 0 ? 0 : 2);
    CHECK_EQUAL(me()->guard_repaired, mode == 2 ? 2 : 0);
    CHECK_EQUAL(counts->created, mode == 2 ? 1 : 0);
    CHECK_EQUAL(me()->guard_mode, mode + 1);
}

static void modes_say_what_is_done(void)
{
    for (int i = 0; i < 3; i++) {
        char text[4096];
        CHECK_EQUAL(said_by(multiply_without_a_handle, i, text, sizeof text), 0);
        char *line = strstr(text, "rigel: cublasSgemm_v2 was called with a NULL handle");
        CHECK_EQUAL(line != NULL, i == 1); /* said once, with what would help */
        CHECK(i != 1 || (strstr(line, "\"repair\"") && !strstr(line + 1, "rigel: ")));
    }
}

static void without_a_client_nothing_is_guarded(void)
{
    become_without_context("repair", "libcublas.so.12");
    setenv("RIGEL_SEGMENT", "", 1);
    cublasHandle_t h = handle(); /* binds device 0, as without Rigel */
    CHECK_EQUAL(rg.mode, RG_MODE_BARE);
    matrices m = allocate();
    CHECK_EQUAL(multiply(h, &m), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(multiply(NULL, &m), CUBLAS_STATUS_NOT_INITIALIZED);
    done();
}

/* ---- Contexts ---- */

static void operands_of_the_current_context_run_on_the_pool(void)
{
    become("repair");
    second_device();
    cublasHandle_t h = handle();
    CUstream s = stream();
    CUdeviceptr workspace;
    CHECK_EQUAL(cu.cuMemAlloc_v2(&workspace, 4096), CUDA_SUCCESS);
    CHECK_EQUAL(cublasSetStream_v2(h, s), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(cublasSetWorkspace_v2(h, (void *)(uintptr_t)workspace, 4096), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(cublasSetMathMode(h, 2), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(cublasSetAtomicsMode(h, 1), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(cublasSetSmCountTarget(h, 17), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(cuCtxSetCurrent(primary[1]), CUDA_SUCCESS);
    matrices m = allocate();
    CHECK_EQUAL(multiply(h, &m), CUBLAS_STATUS_SUCCESS);
    CHECK(is_product(&m));
    CHECK(last()->handle != h);
    CHECK(last()->stream == NULL); /* that of the handle belongs elsewhere */
    CHECK_EQUAL(last()->workspace, 0);
    CHECK_EQUAL(last()->settings[0], 2);
    CHECK_EQUAL(last()->settings[2], 1);
    CHECK_EQUAL(last()->settings[3], 17);
    CHECK_EQUAL(me()->guard_wrong_context, 1);
    CHECK_EQUAL(me()->guard_foreign_stream, 1);
    CHECK_EQUAL(me()->guard_repaired, 1);
    CHECK(current() == primary[1]);
    /* A stream of this context that the program set is the stream it gets. */
    CUstream here = stream();
    CHECK_EQUAL(cublasSetStream_v2(h, here), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(multiply(h, &m), CUBLAS_STATUS_SUCCESS);
    CHECK(last()->stream == here);
    CHECK_EQUAL(last()->workspace, 0);
    CHECK_EQUAL(me()->guard_foreign_stream, 1);
    /* So is a workspace of this context. */
    CHECK_EQUAL(cu.cuMemAlloc_v2(&workspace, 4096), CUDA_SUCCESS);
    CHECK_EQUAL(cublasSetWorkspace_v2(h, (void *)(uintptr_t)workspace, 4096), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(multiply(h, &m), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(last()->workspace, workspace);
    CHECK(last()->stream == here);
    CHECK_EQUAL(counts->created, 2);
    done();
}

static void operands_of_the_handles_context_take_the_call_there(void)
{
    become("repair");
    second_device();
    cublasHandle_t h = handle();
    CUstream s = stream();
    CHECK_EQUAL(cublasSetStream_v2(h, s), CUBLAS_STATUS_SUCCESS);
    matrices m = allocate();
    CHECK_EQUAL(cuCtxSetCurrent(primary[1]), CUDA_SUCCESS);
    CHECK_EQUAL(multiply(h, &m), CUBLAS_STATUS_SUCCESS);
    CHECK(last()->handle == h);
    CHECK(last()->stream == s);
    CHECK(current() == primary[1]);
    CHECK_EQUAL(cuCtxSetCurrent(primary[0]), CUDA_SUCCESS);
    CHECK(is_product(&m));
    CHECK_EQUAL(me()->guard_wrong_context, 1);
    CHECK_EQUAL(me()->guard_repaired, 1);
    CHECK_EQUAL(counts->created, 1);
    done();
}

/* As the program asked, on the SMs that it asked for: where the handle's context would be made current, it would run on all of them and
 * beside what was launched before. */
static void a_green_context_is_no_wrong_one(void)
{
    become("repair");
    cublasHandle_t h = handle();
    matrices m = allocate();
    CUcontext green;
    CHECK_EQUAL(cu.cuCtxCreate_v2(&green, 0, 0), CUDA_SUCCESS);
    rg_guard_green(green);
    CHECK_EQUAL(cuCtxSetCurrent(green), CUDA_SUCCESS);
    CHECK(multiply(h, &m) != CUBLAS_STATUS_SUCCESS); /* the stand-in's green contexts are like any other */
    CHECK(current() == green);
    CHECK_EQUAL(me()->guard_wrong_context, 0);
    CHECK_EQUAL(me()->guard_repaired, 0);
    CHECK_EQUAL(counts->created, 1);
    done();
}

static void two_contexts_of_one_device_are_told_apart(void)
{
    become("repair");
    cublasHandle_t h = handle();
    CUcontext other;
    CHECK_EQUAL(cu.cuCtxCreate_v2(&other, 0, 0), CUDA_SUCCESS);
    matrices m = allocate();
    CHECK_EQUAL(multiply(h, &m), CUBLAS_STATUS_SUCCESS);
    CHECK(last()->handle != h);
    CHECK(is_product(&m));
    CHECK_EQUAL(me()->guard_wrong_context, 1);
    done();
}

static cublasHandle_t made, given;
static matrices operands;
static cublasStatus_t status_there;
static CUcontext context_there;
static uint64_t context_shown;

static void *make_there(void *unused)
{
    status_there = cublasCreate_v2(&made);
    context_there = current();
    context_shown = rg_this.row->context;
    return unused;
}

static void *multiply_there(void *unused)
{
    status_there = multiply(given, &operands);
    context_there = current();
    context_shown = rg_this.row->context;
    return unused;
}

static void in_a_thread(void *(*body)(void *))
{
    pthread_t t;
    CHECK_EQUAL(pthread_create(&t, NULL, body, NULL), 0);
    CHECK_EQUAL(pthread_join(t, NULL), 0);
}

static int active_primary(CUdevice d)
{
    unsigned flags;
    int yes = -1;
    CHECK_EQUAL(cu.cuDevicePrimaryCtxGetState(d, &flags, &yes), CUDA_SUCCESS);
    return yes;
}

static void a_thread_without_context_gets_the_device_in_use(void)
{
    become_without_context("repair", "libcublas.so.12");
    CHECK_EQUAL(cuInit(0), CUDA_SUCCESS);
    second_device(); /* the rank's own device is 1; 0 is somebody else's */
    CHECK_EQUAL(cuCtxSetCurrent(primary[1]), CUDA_SUCCESS);
    operands = allocate();
    in_a_thread(make_there);
    CHECK_EQUAL(status_there, CUBLAS_STATUS_SUCCESS);
    CHECK(context_there == primary[1]);
    CHECK_EQUAL(context_shown, (uint64_t)(uintptr_t)primary[1]);
    CHECK_EQUAL(active_primary(0), 0);
    CHECK_EQUAL(me()->guard_no_context, 1);
    /* And a handle brings its own context. */
    given = made;
    in_a_thread(multiply_there);
    CHECK_EQUAL(status_there, CUBLAS_STATUS_SUCCESS);
    CHECK(context_there == primary[1]);
    CHECK_EQUAL(context_shown, (uint64_t)(uintptr_t)primary[1]);
    CHECK(is_product(&operands));
    CHECK_EQUAL(me()->guard_no_context, 2);
    CHECK_EQUAL(me()->guard_repaired, 2);
    CHECK_EQUAL(active_primary(0), 0);
    given = NULL;
    in_a_thread(multiply_there);
    CHECK_EQUAL(status_there, CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(me()->guard_no_context, 3);
    CHECK_EQUAL(me()->guard_null_handle, 1);
    done();
}

/* Program of two devices: a thread that selected nothing is on device 0 by CUDA's rule, whatever others have selected. */
static void where_cuda_has_a_rule_it_stands(void)
{
    become("repair");
    second_device();
    CHECK_EQUAL(cuCtxSetCurrent(primary[1]), CUDA_SUCCESS);
    in_a_thread(make_there);
    CHECK_EQUAL(status_there, CUBLAS_STATUS_SUCCESS);
    CHECK(context_there == primary[0]);
    CHECK_EQUAL(me()->guard_no_context, 1);
    CHECK_EQUAL(me()->guard_repaired, 0); /* cuBLAS has done it */
    done();
}

static void *select_clear_make(void *unused)
{
    CHECK_EQUAL(cuCtxSetCurrent(primary[1]), CUDA_SUCCESS);
    CHECK_EQUAL(cuCtxSetCurrent(NULL), CUDA_SUCCESS);
    return make_there(unused);
}

static void what_the_thread_itself_selected_comes_first(void)
{
    become("repair");
    second_device();
    in_a_thread(select_clear_make);
    CHECK_EQUAL(status_there, CUBLAS_STATUS_SUCCESS);
    CHECK(context_there == primary[1]);
    done();
}

static void *select_clear_make_past_rigel(void *unused)
{
    CHECK_EQUAL(rigel_bypass_begin(), 0);
    CHECK_EQUAL(cuCtxSetCurrent(primary[1]), CUDA_SUCCESS);
    CHECK_EQUAL(cuCtxSetCurrent(NULL), CUDA_SUCCESS);
    rigel_bypass_end();
    return make_there(unused);
}

static void what_was_selected_past_rigel_counts_as_well(void)
{
    become("repair");
    second_device();
    in_a_thread(select_clear_make_past_rigel);
    CHECK_EQUAL(status_there, CUBLAS_STATUS_SUCCESS);
    CHECK(context_there == primary[1]);
    done();
}

static void cublas_11_decides_itself_between_devices(void)
{
    become_without_context("repair", "libcublas.so.11");
    CHECK_EQUAL(cuInit(0), CUDA_SUCCESS);
    second_device();
    CHECK_EQUAL(cuCtxSetCurrent(primary[1]), CUDA_SUCCESS);
    in_a_thread(make_there);
    CHECK_EQUAL(status_there, CUBLAS_STATUS_SUCCESS);
    CHECK(context_there != primary[1]);
    CHECK_EQUAL(me()->guard_no_context, 1);
    CHECK_EQUAL(me()->guard_repaired, 0);
    done();
}

static void a_reset_device_takes_its_handles_along(void)
{
    become("repair");
    cublasHandle_t h = handle();
    matrices m = allocate();
    CHECK_EQUAL(multiply(NULL, &m), CUBLAS_STATUS_SUCCESS);
    cublasHandle_t old = last()->handle;
    CHECK_EQUAL(me()->guard_handles, 2);
    CHECK_EQUAL(cuDevicePrimaryCtxReset_v2(0), CUDA_SUCCESS);
    CHECK_EQUAL(me()->guard_handles, 0);
    CHECK_EQUAL(cu.cuDevicePrimaryCtxRetain(&primary[0], 0), CUDA_SUCCESS);
    CHECK_EQUAL(cuCtxSetCurrent(primary[0]), CUDA_SUCCESS);
    m = allocate();
    CHECK_EQUAL(multiply(NULL, &m), CUBLAS_STATUS_SUCCESS);
    CHECK(last()->handle != old);
    CHECK_EQUAL(multiply(h, &m), CUBLAS_STATUS_EXECUTION_FAILED); /* not known any more: cuBLAS's own answer */
    done();
}

static void nothing_is_repaired_during_capture(void)
{
    become("repair");
    cublasHandle_t h = handle();
    CUstream s = stream();
    matrices m = allocate();
    CUgraph graph;
    size_t nodes = 0;
    CHECK_EQUAL(cublasSetStream_v2(h, s), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
    CHECK_EQUAL(multiply(h, &m), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(multiply(NULL, &m), CUBLAS_STATUS_NOT_INITIALIZED);
    CHECK_EQUAL(cuStreamEndCapture(s, &graph), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuGraphGetNodes(graph, NULL, &nodes), CUDA_SUCCESS);
    CHECK_EQUAL(nodes, 1);
    CHECK_EQUAL(me()->guard_null_handle, 1);
    CHECK_EQUAL(me()->guard_repaired, 0);
    CHECK_EQUAL(counts->created, 1);
    done();
}

/* ---- Threads ---- */

static _Atomic int holding, held;
static void hold_first_gemm(const char *call)
{
    if (strcmp(call, "cublasSgemm_v2") == 0 && atomic_exchange(&holding, 0)) {
        atomic_store(&held, 1);
        WAIT_FOR(!atomic_load(&held));
    }
}

static void *multiply_and_be_held(void *m)
{
    CHECK_EQUAL(cuCtxSetCurrent(primary[0]), CUDA_SUCCESS);
    CHECK_EQUAL(multiply(given, m), CUBLAS_STATUS_SUCCESS);
    return NULL;
}

/* Puts another thread inside a call on `given`. */
static pthread_t hold_handle(matrices *m)
{
    pthread_t t;
    atomic_store(inside, hold_first_gemm);
    atomic_store(&holding, 1);
    CHECK_EQUAL(pthread_create(&t, NULL, multiply_and_be_held, m), 0);
    WAIT_FOR(atomic_load(&held));
    return t;
}

static void let_go(pthread_t t)
{
    atomic_store(&held, 0);
    CHECK_EQUAL(pthread_join(t, NULL), 0);
}

static void a_handle_in_use_elsewhere_is_stood_in_for(void)
{
    become_with("repair", "libcublas.so.13");
    CUstream s = stream();
    CUdeviceptr workspace;
    matrices m = allocate(), n = allocate();
    CHECK_EQUAL(cu.cuMemAlloc_v2(&workspace, 4096), CUDA_SUCCESS);
    given = handle();
    CHECK_EQUAL(cublasSetStream_v2(given, s), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(cublasSetWorkspace_v2(given, (void *)(uintptr_t)workspace, 4096), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(cublasSetMathMode(given, 2), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(cublasSetEmulationStrategy(given, 2), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(cublasSetEmulationSpecialValuesSupport(given, 1), CUBLAS_STATUS_SUCCESS);
    pthread_t t = hold_handle(&m);
    CHECK_EQUAL(multiply(given, &n), CUBLAS_STATUS_SUCCESS);
    CHECK(last()->handle != given);
    CHECK(last()->stream == s);
    CHECK_EQUAL(last()->workspace, 0); /* the other thread is using the program's */
    CHECK_EQUAL(last()->settings[0], 2);
    CHECK_EQUAL(last()->settings[4], 2);
    CHECK_EQUAL(last()->settings[5], 1);
    CHECK(is_product(&n));
    let_go(t);
    CHECK(is_product(&m));
    CHECK_EQUAL(counts->corrupted, 0);
    CHECK_EQUAL(me()->guard_in_use_elsewhere, 1);
    /* Now it is free again. */
    CHECK_EQUAL(multiply(given, &n), CUBLAS_STATUS_SUCCESS);
    CHECK(last()->handle == given);
    CHECK_EQUAL(me()->guard_in_use_elsewhere, 1);
    /* The handle of the pool keeps nothing of what it stood in for. */
    CHECK_EQUAL(multiply(NULL, &n), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(counts->created, 2);
    CHECK(last()->stream == NULL);
    CHECK_EQUAL(last()->workspace, 0);
    CHECK_EQUAL(last()->settings[0], 0);
    CHECK_EQUAL(last()->settings[4], 0);
    CHECK_EQUAL(last()->settings[5], 0xffff);
    done();
}

static void a_handle_in_use_is_only_counted_where_the_mode_says_so(void)
{
    become("warn");
    CHECK(freopen("/dev/null", "w", stderr) != NULL);
    matrices m = allocate(), n = allocate();
    given = handle();
    pthread_t t = hold_handle(&m);
    CHECK_EQUAL(multiply(given, &n), CUBLAS_STATUS_INTERNAL_ERROR);
    let_go(t);
    CHECK_EQUAL(counts->corrupted, 1);
    CHECK_EQUAL(me()->guard_in_use_elsewhere, 1);
    CHECK_EQUAL(me()->guard_repaired, 0);
    done();
}

static CUstream others;
static CUdeviceptr others_workspace;
static void *set_others(void *unused)
{
    (void)unused;
    CHECK_EQUAL(cuCtxSetCurrent(primary[0]), CUDA_SUCCESS);
    if (others_workspace)
        CHECK_EQUAL(cublasSetWorkspace_v2(given, (void *)(uintptr_t)others_workspace, 4096), CUBLAS_STATUS_SUCCESS);
    else
        CHECK_EQUAL(cublasSetStream_v2(given, others), CUBLAS_STATUS_SUCCESS);
    return NULL;
}

static void another_thread_sets_its_own(void)
{
    pthread_t t;
    CHECK_EQUAL(pthread_create(&t, NULL, set_others, NULL), 0);
    CHECK_EQUAL(pthread_join(t, NULL), 0);
}

/* Threads that share a handle without a lock, each setting its stream before it multiplies: each gets its own. */
static void a_stream_overtaken_by_another_threads_is_kept(void)
{
    become("repair");
    CUstream s = stream();
    CUdeviceptr workspace;
    matrices m = allocate();
    CHECK_EQUAL(cu.cuMemAlloc_v2(&workspace, 4096), CUDA_SUCCESS);
    given = handle();
    others = stream();
    CHECK_EQUAL(cublasSetStream_v2(given, s), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(cublasSetMathMode(given, 2), CUBLAS_STATUS_SUCCESS);
    another_thread_sets_its_own();
    CHECK_EQUAL(cublasSetWorkspace_v2(given, (void *)(uintptr_t)workspace, 4096), CUBLAS_STATUS_SUCCESS);
    for (int i = 0; i < 2; i++) { /* and stays so until it sets one again */
        CHECK_EQUAL(multiply(given, &m), CUBLAS_STATUS_SUCCESS);
        CHECK(last()->handle != given);
        CHECK(last()->stream == s);
        CHECK_EQUAL(last()->workspace, 0); /* of the program's handle the other thread may make use */
        CHECK_EQUAL(last()->settings[0], 2);
        CHECK_EQUAL(me()->guard_in_use_elsewhere, i + 1);
    }
    CHECK(is_product(&m));
    /* The handle itself is as the threads left it. */
    CUstream found;
    CHECK_EQUAL(cublasGetStream_v2(given, &found), CUBLAS_STATUS_SUCCESS);
    CHECK(found == others);
    /* A workspace of another thread's on its own stream: theirs is not used. */
    CHECK_EQUAL(cublasSetStream_v2(given, s), CUBLAS_STATUS_SUCCESS);
    others_workspace = workspace;
    another_thread_sets_its_own();
    CHECK_EQUAL(multiply(given, &m), CUBLAS_STATUS_SUCCESS);
    CHECK(last()->handle != given);
    CHECK(last()->stream == s);
    CHECK_EQUAL(last()->workspace, 0);
    CHECK_EQUAL(me()->guard_in_use_elsewhere, 3);
    CHECK_EQUAL(me()->guard_repaired, 3);
    /* With nobody between the two it is used as it is. */
    CHECK_EQUAL(cublasSetStream_v2(given, s), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(cublasSetWorkspace_v2(given, (void *)(uintptr_t)workspace, 4096), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(multiply(given, &m), CUBLAS_STATUS_SUCCESS);
    CHECK(last()->handle == given);
    CHECK(last()->stream == s);
    CHECK_EQUAL(last()->workspace, workspace);
    CHECK_EQUAL(me()->guard_in_use_elsewhere, 3);
    done();
}

/* Who sets a stream for others to use, and who has used the one that it set, takes the handle as it is. */
static void a_stream_set_by_another_thread_is_used(void)
{
    become("repair");
    CUstream s = stream();
    matrices m = allocate();
    given = handle();
    others = stream();
    another_thread_sets_its_own();
    CHECK_EQUAL(multiply(given, &m), CUBLAS_STATUS_SUCCESS);
    CHECK(last()->handle == given);
    CHECK(last()->stream == others);
    CHECK_EQUAL(cublasSetStream_v2(given, s), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(multiply(given, &m), CUBLAS_STATUS_SUCCESS);
    another_thread_sets_its_own();
    CHECK_EQUAL(multiply(given, &m), CUBLAS_STATUS_SUCCESS);
    CHECK(last()->handle == given);
    CHECK(last()->stream == others);
    nothing_was_counted();
    done();
}

/* Threads may set the same stream, or set theirs back to that of before when they have used it. */
static void the_same_stream_set_by_another_thread_is_used(void)
{
    become("repair");
    CUstream s = stream();
    matrices m = allocate();
    given = handle();
    CHECK_EQUAL(cublasSetStream_v2(given, s), CUBLAS_STATUS_SUCCESS);
    others = stream();
    another_thread_sets_its_own();
    others = s;
    another_thread_sets_its_own();
    CHECK_EQUAL(multiply(given, &m), CUBLAS_STATUS_SUCCESS);
    CHECK(last()->handle == given);
    CHECK(last()->stream == s);
    nothing_was_counted();
    done();
}

/* A stream that is gone by agreement is not asked for. */
static void a_destroyed_stream_is_not_kept(void)
{
    become("repair");
    CUstream s = stream();
    matrices m = allocate();
    given = handle();
    others = stream();
    CHECK_EQUAL(cublasSetStream_v2(given, s), CUBLAS_STATUS_SUCCESS);
    another_thread_sets_its_own();
    CHECK_EQUAL(cuStreamDestroy_v2(s), CUDA_SUCCESS);
    CHECK_EQUAL(multiply(given, &m), CUBLAS_STATUS_SUCCESS);
    CHECK(last()->handle == given);
    CHECK(last()->stream == others);
    nothing_was_counted();
    done();
}

static _Thread_local bool is_overtaken_now;
static void *set_and_multiply(void *m)
{
    CHECK_EQUAL(cuCtxSetCurrent(primary[0]), CUDA_SUCCESS);
    CHECK_EQUAL(cublasSetStream_v2(given, others), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(multiply(given, m), CUBLAS_STATUS_SUCCESS);
    CHECK(last()->handle == given);
    CHECK(last()->stream == others);
    return NULL;
}

static matrices of_others;
static void let_another_use_it(const char *call)
{
    pthread_t t;
    (void)call;
    if (!is_overtaken_now)
        return;
    CHECK_EQUAL(pthread_create(&t, NULL, set_and_multiply, &of_others), 0);
    CHECK_EQUAL(pthread_join(t, NULL), 0);
}

/* While a handle stands in for it, and while that is made, who came last has the program's handle for itself. */
static void an_overtaken_thread_does_not_hold_the_handle(void)
{
    become("repair");
    CUstream s = stream();
    matrices m = allocate();
    of_others = allocate();
    given = handle();
    others = stream();
    CHECK_EQUAL(cublasSetStream_v2(given, s), CUBLAS_STATUS_SUCCESS);
    another_thread_sets_its_own();
    atomic_store(inside, let_another_use_it);
    is_overtaken_now = true;
    CHECK_EQUAL(multiply(given, &m), CUBLAS_STATUS_SUCCESS); /* makes one */
    CHECK(last()->handle != given);
    CHECK(last()->stream == s);
    is_overtaken_now = false;
    CHECK(is_product(&m));
    CHECK_EQUAL(counts->created, 2);
    CHECK_EQUAL(counts->corrupted, 0);
    CHECK_EQUAL(me()->guard_in_use_elsewhere, 1);
    CHECK_EQUAL(me()->guard_repaired, 1);
    done();
}

static void an_overtaken_stream_is_only_counted_where_the_mode_says_so(void)
{
    become("warn");
    CHECK(freopen("/dev/null", "w", stderr) != NULL);
    matrices m = allocate();
    given = handle();
    others = stream();
    CHECK_EQUAL(cublasSetStream_v2(given, stream()), CUBLAS_STATUS_SUCCESS);
    another_thread_sets_its_own();
    CHECK_EQUAL(multiply(given, &m), CUBLAS_STATUS_SUCCESS);
    CHECK(last()->handle == given);
    CHECK(last()->stream == others);
    CHECK_EQUAL(me()->guard_in_use_elsewhere, 1);
    CHECK_EQUAL(me()->guard_repaired, 0);
    done();
}

/* ---- Past Rigel (rigel_bypass_begin) ---- */

static void past_the_guard_nothing_is_repaired(void)
{
    become("repair");
    matrices m = allocate(), n = allocate();
    given = handle();
    pthread_t t = hold_handle(&m);
    CHECK_EQUAL(rigel_bypass_begin(), 0);
    CHECK_EQUAL(multiply(given, &n), CUBLAS_STATUS_INTERNAL_ERROR); /* the stand-in's, of a handle in use */
    CHECK_EQUAL(multiply(NULL, &n), CUBLAS_STATUS_NOT_INITIALIZED);
    CHECK_EQUAL(cublasSetStream_v2(NULL, stream()), CUBLAS_STATUS_NOT_INITIALIZED);
    let_go(t);
    CHECK_EQUAL(counts->created, 1);
    nothing_was_counted();
    rigel_bypass_end();
    CHECK_EQUAL(multiply(NULL, &n), CUBLAS_STATUS_SUCCESS);
    CHECK(is_product(&n));
    CHECK_EQUAL(me()->guard_null_handle, 1);
    /* The handle that was held when it began is free. */
    CHECK_EQUAL(multiply(given, &m), CUBLAS_STATUS_SUCCESS);
    CHECK(last()->handle == given);
    CHECK_EQUAL(me()->guard_in_use_elsewhere, 0);
    done();
}

/* Handles that are made, changed and destroyed past it are known as they are then. */
static void what_becomes_of_handles_past_the_guard_is_known(void)
{
    become("repair");
    CUstream s = stream(), later = stream();
    matrices m = allocate(), n = allocate();
    cublasHandle_t gone = handle();
    given = handle();
    CHECK_EQUAL(cublasSetStream_v2(given, s), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(multiply(given, &m), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(rigel_bypass_begin(), 0);
    CHECK_EQUAL(cublasSetStream_v2(given, later), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(cublasSetMathMode(given, 2), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(multiply(given, &m), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(cublasDestroy_v2(gone), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(me()->guard_handles, 1);
    cublasHandle_t made = handle();
    CHECK_EQUAL(me()->guard_handles, 2);
    rigel_bypass_end();
    nothing_was_counted();
    cublasHandle_t both[] = {given, made};
    for (int i = 0; i < 2; i++) {
        given = both[i];
        pthread_t t = hold_handle(&m);
        CHECK_EQUAL(multiply(given, &n), CUBLAS_STATUS_SUCCESS);
        CHECK(last()->handle != given);
        CHECK(last()->stream == (i ? NULL : later));
        CHECK_EQUAL(last()->settings[0], i ? 0 : 2);
        CHECK(is_product(&n));
        let_go(t);
    }
    CHECK_EQUAL(counts->corrupted, 0);
    CHECK_EQUAL(me()->guard_in_use_elsewhere, 2);
    done();
}

/* Whether a stream that was set has been used cannot be known where it may have been used past the guard: what the others set holds. */
static void a_stream_that_may_have_been_used_past_the_guard_is_not_kept(void)
{
    become("repair");
    matrices m = allocate();
    given = handle();
    others = stream();
    CHECK_EQUAL(cublasSetStream_v2(given, stream()), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(rigel_bypass_begin(), 0);
    CHECK_EQUAL(multiply(given, &m), CUBLAS_STATUS_SUCCESS);
    rigel_bypass_end();
    another_thread_sets_its_own();
    CHECK_EQUAL(multiply(given, &m), CUBLAS_STATUS_SUCCESS);
    CHECK(last()->handle == given);
    CHECK(last()->stream == others);
    CHECK_EQUAL(rigel_bypass_begin(), 0);
    CHECK_EQUAL(cublasSetStream_v2(given, stream()), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(multiply(given, &m), CUBLAS_STATUS_SUCCESS);
    rigel_bypass_end();
    another_thread_sets_its_own();
    CHECK_EQUAL(multiply(given, &m), CUBLAS_STATUS_SUCCESS);
    CHECK(last()->handle == given);
    CHECK(last()->stream == others);
    nothing_was_counted();
    done();
}

static _Atomic int inside_now, stay;
static void stay_inside(const char *call)
{
    if (strcmp(call, "cublasSgemm_v2") == 0) {
        atomic_fetch_add(&inside_now, 1);
        WAIT_FOR(!atomic_load(&stay));
    }
}

static void *multiply_null(void *m)
{
    CHECK_EQUAL(cuCtxSetCurrent(primary[0]), CUDA_SUCCESS);
    CHECK_EQUAL(multiply(NULL, m), CUBLAS_STATUS_SUCCESS);
    return NULL;
}

/* With all handles of the pool in use, the next thread waits for one. */
static void the_pool_is_bounded(void)
{
    become("repair");
    pthread_t t[RG_POOL_PER_CONTEXT + 1];
    matrices m[RG_POOL_PER_CONTEXT + 1];
    atomic_store(&stay, 1);
    atomic_store(inside, stay_inside);
    for (int i = 0; i <= RG_POOL_PER_CONTEXT; i++) {
        m[i] = allocate();
        CHECK_EQUAL(pthread_create(&t[i], NULL, multiply_null, &m[i]), 0);
        if (i < RG_POOL_PER_CONTEXT)
            WAIT_FOR(atomic_load(&inside_now) == i + 1);
        else
            WAIT_FOR(me()->guard_null_handle == RG_POOL_PER_CONTEXT + 1);
    }
    usleep(2000); /* time to do wrong in */
    CHECK_EQUAL(inside_now, RG_POOL_PER_CONTEXT);
    atomic_store(&stay, 0);
    for (int i = 0; i <= RG_POOL_PER_CONTEXT; i++) {
        CHECK_EQUAL(pthread_join(t[i], NULL), 0);
        CHECK(is_product(&m[i]));
    }
    CHECK_EQUAL(counts->created, RG_POOL_PER_CONTEXT);
    done();
}

/* 32 threads, each in and out of a client, on a shared handle, on NULL, on their own, and across devices; all results right, no handle
 * used by two, every call counted for its client. TEST_SECONDS: how long; 12 rounds unless told. */
enum { THREADS = 32 };
enum { ROUNDS = 12, CLIENTS = 8 };
static const char *const names[CLIENTS] = {"c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7"};
static uint64_t rounds_until_ns;
static _Atomic int rounds[2]; /* of threads on each device */
static _Atomic int rounds_of[CLIENTS + 1]; /* of each client, and of none */
static bool another_round(int round)
{
    return rounds_until_ns ? rg_now_ns() < rounds_until_ns : round < ROUNDS;
}

static void *make_use_destroy(void *number)
{
    int i = (int)(intptr_t)number, device = i % 2;
    CHECK_EQUAL(cuCtxSetCurrent(primary[device]), CUDA_SUCCESS);
    matrices m = allocate();
    CUstream s = stream();
    for (int round = 0; another_round(round); round++) {
        const char *class = i % 2 ? "best-effort" : "high";
        bool enters = round % 2; /* else the calls are the process's own */
        if (enters)
            CHECK_EQUAL(rigel_client_enter(names[i % CLIENTS], class), 0);
        rigel_request_begin();
        cublasHandle_t own = handle();
        CHECK_EQUAL(cublasSetStream_v2(own, s), CUBLAS_STATUS_SUCCESS);
        CHECK_EQUAL(multiply(own, &m), CUBLAS_STATUS_SUCCESS);
        CHECK(last()->handle == own && last()->stream == s);
        CHECK_EQUAL(multiply(given, &m), CUBLAS_STATUS_SUCCESS);
        CHECK_EQUAL(multiply(NULL, &m), CUBLAS_STATUS_SUCCESS);
        CHECK_EQUAL(cublasSetMathMode(own, i), CUBLAS_STATUS_SUCCESS);
        CHECK_EQUAL(multiply(own, &m), CUBLAS_STATUS_SUCCESS);
        CHECK_EQUAL(last()->settings[0], i);
        CHECK_EQUAL(cublasDestroy_v2(own), CUBLAS_STATUS_SUCCESS);
        rigel_request_end();
        if (enters)
            rigel_client_leave();
        atomic_fetch_add(&rounds[device], 1);
        atomic_fetch_add(&rounds_of[enters ? i % CLIENTS : CLIENTS], 1);
    }
    CHECK(is_product(&m));
    return NULL;
}

static void many_threads_at_once(void)
{
    const char *seconds = getenv("TEST_SECONDS");
    become("repair");
    second_device();
    given = handle();
    if (seconds)
        rounds_until_ns = rg_now_ns() + strtoull(seconds, NULL, 10) * 1000000000u;
    pthread_t t[THREADS];
    for (int i = 0; i < THREADS; i++)
        CHECK_EQUAL(pthread_create(&t[i], NULL, make_use_destroy, (void *)(intptr_t)i), 0);
    for (int i = 0; i < THREADS; i++)
        CHECK_EQUAL(pthread_join(t[i], NULL), 0);
    CHECK_EQUAL(counts->corrupted, 0);
    CHECK(seconds || rounds[0] == THREADS / 2 * ROUNDS);
    CHECK_EQUAL(counts->calls, (rounds[0] + rounds[1]) * 4);
    rg_calls_add();
    CHECK_EQUAL(rg.member_count, CLIENTS + 1);
    for (uint32_t i = 0; i < rg.member_count; i++) {
        rg_client *c = rg.members[i].slot;
        int which = !i ? CLIENTS : c->name[strlen(c->name) - 1] - '0', slot = (int)(c - rg.segment->clients);
        CHECK_EQUAL(rg.segment->calls[slot].count[RG_OP_cublasSgemm_v2], rounds_of[which] * 4);
        CHECK_EQUAL(rg.segment->calls[slot].count[RG_OP_cublasDestroy_v2], rounds_of[which]);
        CHECK_EQUAL(c->reports, rounds_of[which]);
        CHECK_EQUAL(rg.members[i].threads, 0);
    }
    CHECK_EQUAL(me()->guard_null_handle, rounds[0] + rounds[1]);
    CHECK_EQUAL(me()->guard_wrong_context, rounds[1]);
    CHECK_EQUAL(me()->guard_create_failed, 0);
    int pooled = counts->created - counts->destroyed - 1;
    CHECK(pooled >= 2 && pooled <= 2 * RG_POOL_PER_CONTEXT);
    CHECK_EQUAL(me()->guard_handles, pooled + 1);
    if (seconds)
        printf("%d threads made, used and destroyed %d handles, in and out of %d clients, in %s s\n", THREADS, rounds[0] + rounds[1], CLIENTS, seconds);
    done();
}

/* ---- Making handles ---- */

static pthread_barrier_t together;
static void *make_together(void *unused)
{
    cublasHandle_t h = NULL;
    CHECK_EQUAL(cuCtxSetCurrent(primary[0]), CUDA_SUCCESS);
    pthread_barrier_wait(&together);
    CHECK_EQUAL(cublasCreate_v2(&h), CUBLAS_STATUS_SUCCESS);
    return unused;
}

static void linger(const char *call)
{
    (void)call;
    usleep(20000);
}

static void handles_are_made_one_at_a_time(void)
{
    setenv("RIGEL_CUBLAS_STRICT", "1", 1);
    become("repair");
    pthread_t t[4];
    atomic_store(inside, linger);
    pthread_barrier_init(&together, NULL, 4);
    for (int i = 0; i < 4; i++)
        CHECK_EQUAL(pthread_create(&t[i], NULL, make_together, NULL), 0);
    for (int i = 0; i < 4; i++)
        CHECK_EQUAL(pthread_join(t[i], NULL), 0);
    CHECK_EQUAL(counts->most_creating, 1);
    nothing_was_counted();
    done();
}

/* Leaves `bytes` of the device free. */
static void fill_memory(size_t bytes)
{
    size_t free_bytes, total;
    CUdeviceptr p;
    CHECK_EQUAL(cu.cuMemGetInfo_v2(&free_bytes, &total), CUDA_SUCCESS);
    CHECK(free_bytes > bytes);
    CHECK_EQUAL(cu.cuMemAlloc_v2(&p, free_bytes - bytes), CUDA_SUCCESS);
}

static _Atomic int attempts;

/* A best-effort client that has allocated and freed a GiB, which its pool keeps, and stays until `from` ends. */
static void keep_a_pool(int from)
{
    CUresult (*default_pool)(CUmemoryPool *, CUdevice), (*set)(CUmemoryPool, int, void *);
    CUmemoryPool pool;
    CUdeviceptr p;
    uint64_t threshold = UINT64_MAX;
    char byte;
    CHECK_EQUAL(read(from, &byte, 1), 1);
    setenv("RIGEL_CLASS", "best-effort", 1);
    setenv("RIGEL_NAME", "train", 1);
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    *(void **)&default_pool = dlsym(driver, "cuDeviceGetDefaultMemPool");
    *(void **)&set = dlsym(driver, "cuMemPoolSetAttribute");
    CHECK_EQUAL(cuInit(0), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuDevicePrimaryCtxRetain(&primary[0], 0), CUDA_SUCCESS);
    CHECK_EQUAL(cuCtxSetCurrent(primary[0]), CUDA_SUCCESS);
    CHECK_EQUAL(default_pool(&pool, 0), CUDA_SUCCESS);
    CHECK_EQUAL(set(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold), CUDA_SUCCESS);
    CHECK_EQUAL(cuMemAllocAsync(&p, 1 << 30, NULL), CUDA_SUCCESS);
    CHECK_EQUAL(cuMemsetD8Async(p, 1, 4096, NULL), CUDA_SUCCESS);
    CHECK_EQUAL(cuMemFreeAsync(p, NULL), CUDA_SUCCESS);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    CHECK_EQUAL(read(from, &byte, 1), 0);
    exit(0);
}

static void pools_of_best_effort_clients_make_room(void)
{
    int to[2];
    CHECK_EQUAL(pipe(to), 0);
    become_without_context("repair", "libcublas.so.12");
    pid_t pid = fork();
    if (pid == 0) {
        close(to[1]);
        keep_a_pool(to[0]);
    }
    CHECK_EQUAL(cuInit(0), CUDA_SUCCESS);
    CHECK_EQUAL(cu.cuDevicePrimaryCtxRetain(&primary[0], 0), CUDA_SUCCESS);
    CHECK_EQUAL(cuCtxSetCurrent(primary[0]), CUDA_SUCCESS);
    matrices m = allocate();
    CHECK_EQUAL(write(to[1], "!", 1), 1); /* the first slot is ours */
    rg_client *other = &seg->clients[1];
    WAIT_FOR(other->pool_kept_bytes == 1 << 30);
    fill_memory(32 << 20);
    atomic_store(&rg_guard_answer_ms, 60000); /* not on a busy machine either */
    cublasHandle_t h = handle();
    CHECK_EQUAL(me()->guard_create_retried, 1);
    CHECK_EQUAL(me()->guard_create_failed, 0);
    CHECK_EQUAL(me()->guard_repaired, 1);
    CHECK_EQUAL(other->pool_returned_bytes, 1 << 30);
    CHECK_EQUAL(seg->settings.hold_until_ms, 0); /* it goes on */
    WAIT_FOR(other->pool_kept_bytes == 0);
    CHECK_EQUAL(multiply(h, &m), CUBLAS_STATUS_SUCCESS);
    CHECK(is_product(&m));
    close(to[1]);
    int status;
    CHECK_EQUAL(waitpid(pid, &status, 0), pid);
    CHECK_EQUAL(status, 0);
    done();
}

static void own_pools_make_room(void)
{
    CUresult (*default_pool)(CUmemoryPool *, CUdevice), (*set)(CUmemoryPool, int, void *);
    CUmemoryPool pool;
    CUdeviceptr p;
    uint64_t threshold = UINT64_MAX;
    become("repair");
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    *(void **)&default_pool = dlsym(driver, "cuDeviceGetDefaultMemPool");
    *(void **)&set = dlsym(driver, "cuMemPoolSetAttribute");
    matrices m = allocate();
    CHECK_EQUAL(default_pool(&pool, 0), CUDA_SUCCESS);
    CHECK_EQUAL(set(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold), CUDA_SUCCESS);
    CHECK_EQUAL(cuMemAllocAsync(&p, 1 << 30, NULL), CUDA_SUCCESS);
    CHECK_EQUAL(cuMemFreeAsync(p, NULL), CUDA_SUCCESS);
    CHECK_EQUAL(cuCtxSynchronize(), CUDA_SUCCESS);
    fill_memory(32 << 20);
    CHECK_EQUAL(multiply(handle(), &m), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(me()->guard_create_retried, 1);
    CHECK_EQUAL(seg->header.trim, 0); /* nobody else was asked: there is nobody */
    done();
}

static void idle_handles_of_the_pool_make_room(void)
{
    become("repair");
    matrices m = allocate();
    CHECK_EQUAL(multiply(NULL, &m), CUBLAS_STATUS_SUCCESS);
    fill_memory(32 << 20); /* not enough for a handle, but for the one that the pool has */
    cublasHandle_t h = handle();
    CHECK_EQUAL(me()->guard_create_retried, 1);
    CHECK_EQUAL(me()->guard_create_failed, 0);
    CHECK_EQUAL(counts->destroyed, 1);
    CHECK_EQUAL(me()->guard_handles, 1);
    CHECK_EQUAL(multiply(h, &m), CUBLAS_STATUS_SUCCESS);
    done();
}

static void count_attempts(const char *call)
{
    atomic_fetch_add(&attempts, strcmp(call, "cublasCreate_v2") == 0);
}

static void fail_to_make_handles(int unused)
{
    (void)unused;
    become("repair");
    atomic_store(inside, count_attempts);
    rg_client *other = &seg->clients[7];
    strcpy(other->name, "train");
    other->guard_handles = 5;
    other->memory_bytes = 300 << 20;
    other->state = RG_LIVE;
    cublasHandle_t h = handle(), none = NULL;
    fill_memory(32 << 20);
    CHECK(cuMemcpyHtoD_v2(12345, "x", 1) != CUDA_SUCCESS);
    for (int i = 0; i < 3; i++)
        CHECK_EQUAL(cublasCreate_v2(&none), CUBLAS_STATUS_ALLOC_FAILED);
    matrices m = {1, 2, 3};
    CHECK_EQUAL(multiply(NULL, &m), CUBLAS_STATUS_NOT_INITIALIZED); /* no handle could be made for it either */
    CHECK_EQUAL(me()->guard_create_failed, 4);
    CHECK_EQUAL(attempts, 5); /* one each, and the handle that could be made: there is nothing to try again with */
    CHECK_EQUAL(seg->settings.hold_until_ms, 0);
    CHECK_EQUAL(cublasDestroy_v2(h), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(cublasCreate_v2(&none), CUBLAS_STATUS_SUCCESS);
    other->state = RG_FREE;
}

static void a_failure_is_explained(void)
{
    char text[4096];
    uint64_t begun_ns = rg_now_ns();
    CHECK_EQUAL(said_by(fail_to_make_handles, 0, text, sizeof text), 0);
    uint64_t took_ns = rg_now_ns() - begun_ns;
    char *line = strstr(text, "rigel: cublasCreate failed with status 3 (out of memory) on device 0: 32 of 24576 MiB free; in use by "
                              "clients, of it about 64 MiB for each handle: this process 0 MiB (handles: 1), train 300 MiB "
                              "(handles: 5); not tried again, as no memory pool, here or in a best-effort client, keeps anything "
                              "that could be given back; last failing driver call: cuMemcpyHtoD_v2 returned 1; free memory there");
    if (!line)
        fprintf(stderr, "said: %s\n", text);
    CHECK(line && (!strstr(line + 1, "rigel: ") || took_ns >= 10000000000)); /* once in ten seconds */
}

static void fail_beside_many_clients(int unused)
{
    (void)unused;
    become("repair");
    for (int i = 1; i <= 40; i++) {
        memset(seg->clients[i].name, 'n', RG_NAME_BYTES - 1);
        memcpy(seg->clients[i].name, "a-training-job-", 15);
        seg->clients[i].name[61] = (char)('0' + i / 10);
        seg->clients[i].name[62] = (char)('0' + i % 10);
        seg->clients[i].memory_bytes = (uint64_t)(100 + i) << 20;
        seg->clients[i].state = RG_LIVE;
    }
    fill_memory(32 << 20);
    cublasHandle_t none = NULL;
    CHECK_EQUAL(cublasCreate_v2(&none), CUBLAS_STATUS_ALLOC_FAILED);
    for (int i = 1; i <= 40; i++)
        seg->clients[i].state = RG_FREE;
}

/* More than a line has room for: who has most is named, the others are added up; and the line is whole. */
static void a_failure_beside_many_clients_is_explained(void)
{
    char text[4096];
    int named = 0, more = 0, sum = 0, expected = 0;
    CHECK_EQUAL(said_by(fail_beside_many_clients, 0, text, sizeof text), 0);
    for (const char *at = text; (at = strstr(at, ", a-training-job-")); at++, named++)
        CHECK_EQUAL(atoi(at + 2 + 61), 40 - named);
    const char *rest = strstr(text, "MiB (handles: 0), ");
    for (const char *at = rest; at; at = strstr(at + 1, "MiB (handles: 0), "))
        rest = at;
    CHECK(rest && sscanf(rest, "MiB (handles: 0), %d more %d MiB;", &more, &sum) == 2);
    CHECK(named >= 2);
    CHECK_EQUAL(named + more, 40);
    for (int i = 1; i <= more; i++)
        expected += 100 + i;
    CHECK_EQUAL(sum, expected);
    CHECK(strstr(text, "or make one handle per thread and device and keep it\n") != NULL);
}

static void the_first_call_may_be_to_make_a_handle(void)
{
    become_without_context("repair", "libcublas.so.12");
    cublasHandle_t h = handle();
    CHECK_EQUAL(rg.mode, RG_MODE_HIGH);
    CHECK_EQUAL(me()->guard_handles, 1);
    matrices m = allocate();
    CHECK_EQUAL(multiply(h, &m), CUBLAS_STATUS_SUCCESS);
    done();
}

/* ---- Leaving ---- */

static void *make_and_be_held(void *unused)
{
    cublasHandle_t h = NULL;
    CHECK_EQUAL(cuCtxSetCurrent(primary[0]), CUDA_SUCCESS);
    CHECK_EQUAL(cublasCreate_v2(&h), CUBLAS_STATUS_SUCCESS);
    return unused;
}

static void hold_creation(const char *call)
{
    (void)call;
    if (atomic_exchange(&holding, 0)) {
        atomic_store(&held, 1);
        WAIT_FOR(!atomic_load(&held));
    }
}

static void a_forked_child_passes_through(void)
{
    become("repair");
    matrices m = allocate();
    CHECK_EQUAL(multiply(NULL, &m), CUBLAS_STATUS_SUCCESS);
    pthread_t t;
    atomic_store(&holding, 1);
    atomic_store(inside, hold_creation);
    CHECK_EQUAL(pthread_create(&t, NULL, make_and_be_held, NULL), 0);
    WAIT_FOR(atomic_load(&held)); /* it holds the lock now, and never will in the child */
    uint64_t events = me()->guard_events;
    pid_t pid = fork();
    if (pid == 0) {
        cublasHandle_t h = NULL;
        atomic_store(inside, NULL);
        CHECK(cublasCreate_v2(&h) != CUBLAS_STATUS_SUCCESS); /* CUDA does not work in a forked child */
        CHECK_EQUAL(multiply(NULL, &m), CUBLAS_STATUS_NOT_INITIALIZED);
        exit(3);
    }
    int status;
    CHECK_EQUAL(waitpid(pid, &status, 0), pid);
    CHECK(WIFEXITED(status));
    CHECK_EQUAL(WEXITSTATUS(status), 3);
    CHECK_EQUAL(me()->guard_events, events);
    let_go(t);
    done();
}

static void exit_leaves_the_pool_alone(void)
{
    pid_t pid = fork();
    if (pid == 0) {
        become("repair");
        matrices m = allocate();
        CHECK_EQUAL(multiply(handle(), &m), CUBLAS_STATUS_SUCCESS);
        CHECK_EQUAL(multiply(NULL, &m), CUBLAS_STATUS_SUCCESS);
        done();
        exit(7);
    }
    int status;
    CHECK_EQUAL(waitpid(pid, &status, 0), pid);
    CHECK(WIFEXITED(status));
    CHECK_EQUAL(WEXITSTATUS(status), 7);
}

static void after_shutdown_calls_pass_through(void)
{
    become("repair");
    cublasHandle_t h = handle();
    matrices m = allocate();
    CHECK_EQUAL(multiply(NULL, &m), CUBLAS_STATUS_SUCCESS);
    rigel_shutdown();
    CHECK_EQUAL(multiply(h, &m), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(multiply(NULL, &m), CUBLAS_STATUS_NOT_INITIALIZED);
    CHECK_EQUAL(cublasDestroy_v2(h), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(counts->destroyed, 1); /* the pool's handle lives on */
    done();
}

/* ---- What is told ---- */

static const _Atomic uint64_t *event(int place)
{
    return &me()->guard_ring[place * RG_GUARD_EVENT_WORDS];
}

static void events_that_are_alike_are_one(void)
{
    become_with("repair", "libcublas.so.13");
    matrices m = allocate();
    CHECK_EQUAL(cublasSetFixedPointEmulationMantissaControl(NULL, 0), CUBLAS_STATUS_SUCCESS);
    for (int i = 0; i < 100; i++)
        CHECK_EQUAL(multiply(NULL, &m), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(cuCtxSetCurrent(NULL), CUDA_SUCCESS);
    CHECK_EQUAL(multiply(NULL, &m), CUBLAS_STATUS_SUCCESS);
    CHECK_EQUAL(me()->guard_events, 103); /* the last one had no context either */
    static const struct {
        const char *call;
        uint64_t number, cause, context, index, times;
    } expected[] = {{"cublasSetFixedPointEmulationMantissaControl", 1, 1, 1, 1, 1},
                    {"cublasSgemm_v2", 103, 1, 1, 102, 101},
                    {"cublasSgemm_v2", 102, 3, 0, 102, 1}};
    for (int i = 0; i < 3; i++) {
        const _Atomic uint64_t *word = event(i);
        CHECK_EQUAL(word[0], expected[i].number << 8 | expected[i].cause);
        CHECK_EQUAL((uint32_t)word[1], (uint32_t)gettid());
        CHECK_EQUAL(word[2], expected[i].context ? (uintptr_t)primary[0] : 0);
        CHECK_EQUAL(word[3], expected[i].index);
        CHECK_EQUAL(word[4], expected[i].times);
        CHECK(strcmp((const char *)(uintptr_t)&word[5], expected[i].call) == 0);
    }
    CHECK_EQUAL(*event(3), 0);
    done();
}

static void *multiply_null_and_leave(void *m)
{
    CHECK_EQUAL(cuCtxSetCurrent(primary[0]), CUDA_SUCCESS);
    CHECK_EQUAL(multiply(NULL, m), CUBLAS_STATUS_SUCCESS);
    return NULL;
}

static void the_last_events_are_kept(void)
{
    become("repair");
    matrices m = allocate();
    CHECK_EQUAL(multiply(NULL, &m), CUBLAS_STATUS_SUCCESS);
    for (int i = 0; i < RG_GUARD_EVENTS + 4; i++) { /* threads of their own, so no two are alike */
        pthread_t t;
        CHECK_EQUAL(pthread_create(&t, NULL, multiply_null_and_leave, &m), 0);
        CHECK_EQUAL(pthread_join(t, NULL), 0);
        CHECK_EQUAL(multiply(NULL, &m), CUBLAS_STATUS_SUCCESS);
    }
    CHECK_EQUAL(me()->guard_events, 2 * RG_GUARD_EVENTS + 9);
    uint64_t least = UINT64_MAX, most = 0;
    for (int i = 0; i < RG_GUARD_EVENTS; i++) {
        uint64_t number = *event(i) >> 8;
        least = number < least ? number : least;
        most = number > most ? number : most;
    }
    CHECK_EQUAL(most, 2 * RG_GUARD_EVENTS + 9); /* this thread's, which is kept however many others there are */
    CHECK_EQUAL(event(0)[4], RG_GUARD_EVENTS + 5);
    CHECK_EQUAL(counts->created, 1); /* all on one handle, in turn */
    CHECK_EQUAL(least, 12); /* of the others the last fifteen, of every second number */
    done();
}

static void names_are_only_found_where_cublas_is(void)
{
    void *found = &found;
    CHECK(rg_library_look_up(&rg_cublas, RTLD_DEFAULT, "cublasSgemm_v2", true, &found));
    CHECK(found == NULL);
    CHECK(dlerror() != NULL);
    CHECK(!rg_library_look_up(&rg_cublas, RTLD_NEXT, "cublasSgemm_v2", true, &found));
    CHECK(!rg_library_look_up(&rg_cublas, RTLD_DEFAULT, "cublasNoSuchFunction", true, &found));
    CHECK_EQUAL(cublasCreate_v2((cublasHandle_t *)&found), CUBLAS_STATUS_NOT_INITIALIZED);
    become("repair");
    CHECK(rg_library_look_up(&rg_cublas, RTLD_DEFAULT, "cublasSgemm_v2", true, &found));
    CHECK(found == (void *)cublasSgemm_v2);
    CHECK(rg_library_look_up(&rg_cublas, RTLD_DEFAULT, "cublasSetEmulationStrategy", true, &found));
    CHECK(found == NULL); /* cuBLAS 12 has none */
    dlerror();
    CHECK(rg_library_look_up(&rg_cublas, blas, "cublasDgemm_v2_64", true, &found));
    CHECK(found == (void *)cublasDgemm_v2_64);
    CHECK(dlerror() == NULL);
    CHECK(rg_library_look_up(&rg_cublas, blas, "cublasDgemm_v2_64", false, &found)); /* no client: the real one */
    CHECK(found == dlsym(blas, "cublasDgemm_v2_64"));
    void *second = dlopen("libcublas.so.13", RTLD_NOW);
    CHECK(rg_library_look_up(&rg_cublas, second, "cublasDgemm_v2_64", true, &found));
    CHECK(found == dlsym(second, "cublasDgemm_v2_64")); /* the guard knows one cuBLAS */
    done();
}

int main(int argc, char **argv)
{
    (void)argc;
    char path[2 * PATH_MAX];
    snprintf(path, sizeof path, "%s:%s", in_build_folder("sim"), in_build_folder("cublas"));
    ensure_environment("LD_LIBRARY_PATH", path, argv);
    int failures = 0;
    RUN(a_handle_used_rightly_is_never_replaced);
    RUN(every_major_version_is_guarded);
    RUN(a_null_handle_runs_on_the_pool);
    RUN(modes_say_what_is_done);
    RUN(without_a_client_nothing_is_guarded);
    RUN(operands_of_the_current_context_run_on_the_pool);
    RUN(operands_of_the_handles_context_take_the_call_there);
    RUN(a_green_context_is_no_wrong_one);
    RUN(two_contexts_of_one_device_are_told_apart);
    RUN(a_thread_without_context_gets_the_device_in_use);
    RUN(where_cuda_has_a_rule_it_stands);
    RUN(what_the_thread_itself_selected_comes_first);
    RUN(what_was_selected_past_rigel_counts_as_well);
    RUN(cublas_11_decides_itself_between_devices);
    RUN(a_reset_device_takes_its_handles_along);
    RUN(nothing_is_repaired_during_capture);
    RUN(a_handle_in_use_elsewhere_is_stood_in_for);
    RUN(a_handle_in_use_is_only_counted_where_the_mode_says_so);
    RUN(a_stream_overtaken_by_another_threads_is_kept);
    RUN(a_stream_set_by_another_thread_is_used);
    RUN(the_same_stream_set_by_another_thread_is_used);
    RUN(a_destroyed_stream_is_not_kept);
    RUN(an_overtaken_thread_does_not_hold_the_handle);
    RUN(an_overtaken_stream_is_only_counted_where_the_mode_says_so);
    RUN(past_the_guard_nothing_is_repaired);
    RUN(what_becomes_of_handles_past_the_guard_is_known);
    RUN(a_stream_that_may_have_been_used_past_the_guard_is_not_kept);
    RUN(the_pool_is_bounded);
    RUN(many_threads_at_once);
    RUN(handles_are_made_one_at_a_time);
    RUN(idle_handles_of_the_pool_make_room);
    RUN(pools_of_best_effort_clients_make_room);
    RUN(own_pools_make_room);
    RUN(a_failure_is_explained);
    RUN(a_failure_beside_many_clients_is_explained);
    RUN(the_first_call_may_be_to_make_a_handle);
    RUN(a_forked_child_passes_through);
    RUN(exit_leaves_the_pool_alone);
    RUN(after_shutdown_calls_pass_through);
    RUN(events_that_are_alike_are_one);
    RUN(the_last_events_are_kept);
    RUN(names_are_only_found_where_cublas_is);
    return failures ? 1 : 0;
}
