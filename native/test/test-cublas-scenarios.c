/*
 * test-cublas-scenarios.c: programs that fail without the guard, or behind an interposer of the kind that broke them, and
 * run under Rigel; and how programs that look cuBLAS up find it.
 *
 * The programs are cublas-program.c's, each run as it is, behind naive-preload.c, and under Rigel in the three modes of the
 * guard. This program is linked with no cuBLAS.
 */
#include "client.h"
#include "testing.h"

enum { BARE, NAIVE, REPAIR, WARN, GUARD_OFF, WAYS };
static const char *const way_names[WAYS] = {"as it is", "behind the naive interposer", "under Rigel", "under Rigel, guard warn",
                                            "under Rigel, guard off"};
typedef struct {
    const char *program, *naive;
    bool runs[WAYS];
    size_t counter; /* of rg_client, which tells of the failure; 0: nothing is to be counted */
} scenario;
#define COUNTER(name) offsetof(rg_client, guard_##name)
static const scenario scenarios[] = {
    {"s1", "stream", {true, false, true, true, true}, 0},
    {"s2", "", {false, false, true, false, false}, COUNTER(no_context)},
    {"s3", "scheduler", {true, false, true, true, true}, 0},
    {"s4", "", {false, false, true, false, false}, 0},
    {"s5a", "", {false, false, true, false, false}, COUNTER(wrong_context)},
    {"s5b", "", {false, false, true, false, false}, COUNTER(in_use_elsewhere)},
    {"lt", "", {true, false, true, true, true}, 0},
};

static rg_segment *fresh_segment(const char **path)
{
    char why[512];
    *path = scratch("scenario");
    unlink(*path);
    CHECK_EQUAL(rg_segment_create(*path), 0);
    rg_segment *seg = rg_segment_open(*path, why, sizeof why);
    CHECK(seg != NULL);
    return seg;
}

static int failures;

static void run(const scenario *s, int way)
{
    const char *path, *state = scratch("scenario-sim");
    char text[4096] = "";
    int out[2];
    rg_segment *seg = fresh_segment(&path);
    CHECK_EQUAL(pipe(out), 0);
    pid_t pid = fork();
    if (pid == 0) {
        dup2(out[1], STDERR_FILENO);
        setenv("RIGEL_SIM_STATE", state, 1);
        setenv("RIGEL_SIM_DEVICES", "2", 1);
        setenv("NAIVE", s->naive, 1);
        if (way != REPAIR)
            setenv("MEET", "1", 1);
        if (way == NAIVE)
            setenv("LD_PRELOAD", in_build_folder("naive-preload.so"), 1);
        if (way >= REPAIR) {
            setenv("LD_PRELOAD", in_build_folder("librigel.so"), 1);
            setenv("RIGEL_SEGMENT", path, 1);
            setenv("RIGEL_CLASS", "high", 1);
            setenv("RIGEL_NAME", s->program, 1);
            setenv("RIGEL_GUARD", way == REPAIR ? "repair" : way == WARN ? "warn" : "off", 1);
        }
        execl(in_build_folder("cublas-program"), "cublas-program", s->program, (char *)NULL);
        _exit(127);
    }
    close(out[1]);
    ssize_t n = 0, got;
    while ((got = read(out[0], text + n, sizeof text - 1 - (size_t)n)) > 0)
        n += got;
    close(out[0]);
    int status = -1;
    waitpid(pid, &status, 0);
    const rg_client *c = &seg->clients[0];
    uint64_t counted = s->counter ? *(const _Atomic uint64_t *)((const char *)c + s->counter) : c->guard_events;
    bool watched = way == REPAIR || way == WARN, ran = WIFEXITED(status) && WEXITSTATUS(status) == 0;
    bool failed = WIFEXITED(status) && WEXITSTATUS(status) == 1 && strstr(text, "expected 0");
    bool right = s->runs[way] ? ran : failed;
    /* Counted where the guard looks; repaired where it may; the multiplication's kernel went through the hooks. */
    if (s->counter ? counted != (watched ? c->guard_repaired == (way == REPAIR) ? 1u : ~0u : 0u)
                   : s->runs[WARN] && counted != 0)
        right = false;
    if (way >= REPAIR && ran && rg_launches(c) < 1)
        right = false;
    if (!right) {
        fprintf(stderr, "%s %s: status %x, expected it to %s; counted %llu, repaired %llu, launches %llu; it said:\n%s", s->program,
                way_names[way], (unsigned)status, s->runs[way] ? "run" : "fail", (unsigned long long)counted,
                (unsigned long long)c->guard_repaired, (unsigned long long)rg_launches(c), text);
        failures++;
    }
    unlink(path);
    unlink(state);
}

static bool lies_in(const void *pointer, const char *library)
{
    Dl_info info;
    return pointer && dladdr(pointer, &info) && info.dli_fname && strstr(info.dli_fname, library) != NULL;
}

/* Started again with librigel.so preloaded: cuBLAS is not there until it is loaded, and then each name is found where it is. */
static int look_up(bool client)
{
    void *program = dlopen(NULL, RTLD_NOW);
    CHECK(dlsym(RTLD_DEFAULT, "cublasCreate_v2") == NULL);
    CHECK(dlerror() != NULL);
    CHECK(dlsym(program, "cublasSgemm_v2") == NULL);
    CHECK(dlerror() != NULL);
    void *blas = dlopen("libcublas.so.12", RTLD_NOW);
    CHECK(blas != NULL);
    const char *home = client ? "librigel.so" : "libcublas.so";
    dlerror();
#define RG_BLAS_CALL(symbol, ...) #symbol,
#define RG_BLAS_SET(symbol, ...) #symbol,
#define RG_BLAS_GET(symbol, ...) #symbol,
#define RG_BLAS_SPECIAL(symbol, ...) #symbol,
    static const char *const names[] = {
#include "cublas.def"
    };
    int there = 0;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        void *p = dlsym(blas, names[i]);
        CHECK_EQUAL(p == NULL, strstr(names[i], "Emulation") != NULL); /* cuBLAS 12 has none */
        CHECK_EQUAL(dlerror() == NULL, p != NULL);
        CHECK(!p || lies_in(p, home));
        there += p != NULL;
    }
    CHECK(there > 80);
    CHECK(lies_in(dlsym(blas, "cublasGetProperty"), "libcublas.so")); /* not guarded */
    CHECK(lies_in(dlsym(blas, "cublasLtMatmul"), "libcublas.so"));
    CHECK(lies_in(dlvsym(blas, "cublasSgemm_v2", "libcublas.so"), "libcublas.so"));
    CHECK_EQUAL(lies_in(dlsym(RTLD_DEFAULT, "cublasSgemm_v2"), home), true);
    return 0;
}

static void look_ups(const char *way)
{
    pid_t pid = fork();
    if (pid == 0) {
        setenv("LD_PRELOAD", in_build_folder("librigel.so"), 1);
        setenv("LD_LIBRARY_PATH", in_build_folder("cublas"), 1);
        setenv("TEST_LOOK_UP", way, 1);
        if (strcmp(way, "stranger") != 0)
            setenv("RIGEL_SEGMENT", "/nonexistent/segment", 1);
        execl("/proc/self/exe", "test-cublas-scenarios", (char *)NULL);
        _exit(127);
    }
    int status = -1;
    waitpid(pid, &status, 0);
    if (status) {
        fprintf(stderr, "looking names up as a %s: status %x\n", way, (unsigned)status);
        failures++;
    }
}

int main(void)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    puts("a preloaded library would come before the sanitizer's runtime; run without SANITIZE");
    return 77;
#endif
    const char *way = getenv("TEST_LOOK_UP");
    if (way)
        return look_up(strcmp(way, "client") == 0);
    for (size_t i = 0; i < sizeof scenarios / sizeof *scenarios; i++)
        for (int w = 0; w < WAYS; w++)
            if (w != NAIVE || *scenarios[i].naive)
                run(&scenarios[i], w);
    look_ups("client");
    look_ups("stranger");
    return failures ? 1 : 0;
}
