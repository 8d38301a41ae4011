/*
 * test-interpose.c: no hooked driver function escapes, whichever way a program gets at it.
 *
 * Linked against libcuda.so.1 (the simulated one) and started again under LD_PRELOAD, this program resolves every name of
 * hooks.def in four ways: by the linker, by dlsym, and by cuGetProcAddress with flags 0 and with the per-thread-stream flag,
 * that one also through the pointer to itself which it hands out, as libcudart does. Every pointer must lie in librigel.so;
 * with RIGEL_DISABLE=1, or in a process that is no client, every looked-up pointer must be libcuda's own.
 */
#include "client.h"
#include "testing.h"

#include <ctype.h>

#define RG_WORK(symbol, ...) {#symbol, (void *)symbol},
#define RG_SPECIAL(symbol, ...) {#symbol, (void *)symbol},
static const struct {
    const char *name;
    void *linked;
} hooks[] = {
#include "hooks.def"
};
#undef RG_WORK
#undef RG_SPECIAL
enum { HOOKS = sizeof hooks / sizeof *hooks };

typedef CUresult (*get_proc_v1)(const char *, void **, int, uint64_t);
typedef CUresult (*get_proc_v2)(const char *, void **, int, uint64_t, int *);

static int lies_in(const void *pointer, const char *library)
{
    Dl_info info;
    return pointer && dladdr(pointer, &info) && info.dli_fname && strstr(info.dli_fname, library) != NULL;
}

/* The name without version and stream form, as cuGetProcAddress takes it. */
static const char *base_name(const char *name)
{
    static char base[128];
    snprintf(base, sizeof base, "%s", name);
    char *end = strstr(base, "_pt");
    if (end)
        *end = 0;
    size_t n = strlen(base);
    if (n > 3 && base[n - 3] == '_' && base[n - 2] == 'v' && isdigit((unsigned char)base[n - 1]))
        base[n - 3] = 0;
    return base;
}

static int wrong;
static void expect(const void *pointer, const char *library, const char *name, const char *way)
{
    if (lies_in(pointer, library))
        return;
    Dl_info info = {0};
    dladdr(pointer, &info);
    fprintf(stderr, "%s by %s is in %s, expected %s\n", name, way, info.dli_fname ? info.dli_fname : "nowhere", library);
    wrong++;
}

/* Looks all names up in all ways; `library` is where looked-up pointers must lie. Returns how many look-ups were checked. */
static int look_up_everything(const char *library)
{
    int checked = 0;
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    CHECK(driver != NULL);
    get_proc_v2 first, get;
    *(void **)&first = dlsym(driver, "cuGetProcAddress_v2");
    CHECK(first != NULL);
    int status = -1;
    CHECK_EQUAL(first("cuGetProcAddress", (void **)&get, 12000, 0, &status), CUDA_SUCCESS);
    CHECK_EQUAL(status, CU_GET_PROC_ADDRESS_SUCCESS);
    expect((void *)first, library, "cuGetProcAddress_v2", "dlsym");
    expect((void *)get, library, "cuGetProcAddress", "itself");
    for (int i = 0; i < HOOKS; i++) {
        expect(hooks[i].linked, "librigel.so", hooks[i].name, "linking");
        void *p = dlsym(driver, hooks[i].name);
        if (p) { /* the driver may lack old names */
            expect(p, library, hooks[i].name, "dlsym");
            checked++;
        }
        for (uint64_t flags = 0; flags <= 2; flags += 2) {
            for (int version = 2000; version <= 13000; version += 500) {
                p = NULL;
                status = -1;
                CUresult r = get(base_name(hooks[i].name), &p, version, flags, &status);
                if (r == CUDA_SUCCESS && p) {
                    expect(p, library, hooks[i].name, flags ? "cuGetProcAddress flags 2" : "cuGetProcAddress flags 0");
                    CHECK_EQUAL(status, CU_GET_PROC_ADDRESS_SUCCESS);
                    checked++;
                } else {
                    CHECK(status == CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND ||
                          status == CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
                }
            }
        }
    }
    /* What is not hooked is the driver's own; what does not exist is not found. */
    expect(dlsym(driver, "cuMemHostAlloc"), "libcuda.so", "cuMemHostAlloc", "dlsym");
    CHECK(dlsym(driver, "cuNoSuchFunction") == NULL);
    CHECK(dlerror() != NULL);
    CHECK(dlsym(RTLD_DEFAULT, "printf") == dlsym(RTLD_NEXT, "printf"));
    return checked;
}

int main(int argc, char **argv)
{
    (void)argc;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    puts("a preloaded library would come before the sanitizer's runtime; run without SANITIZE");
    return 77;
#endif
    const char *way = getenv("TEST_WAY");
    if (!way) {
        /* One process for each way, because preloading and linking happen at its start. */
        static const char *const ways[] = {"client", "disabled", "stranger", "second-before", "second-after"};
        int failures = 0;
        setenv("LD_LIBRARY_PATH", in_build_folder("sim"), 1);
        for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
            pid_t pid = fork();
            if (pid == 0) {
                char preload[2 * PATH_MAX + 2];
                const char *rigel = in_build_folder("librigel.so"), *second = in_build_folder("second-preload.so");
                snprintf(preload, sizeof preload, "%s%s%s%s%s", i == 3 ? second : "", i == 3 ? ":" : "", rigel,
                         i == 4 ? ":" : "", i == 4 ? second : "");
                setenv("LD_PRELOAD", preload, 1);
                setenv("TEST_WAY", ways[i], 1);
                setenv("RIGEL_SIM_STATE", scratch("interpose-sim"), 1);
                if (i != 2)
                    setenv("RIGEL_SEGMENT", "/nonexistent/segment", 1);
                if (i == 1)
                    setenv("RIGEL_DISABLE", "1", 1);
                execv("/proc/self/exe", argv);
                _exit(1);
            }
            int status = 1;
            waitpid(pid, &status, 0);
            if (status != 0) {
                fprintf(stderr, "%s: failed (%x)\n", ways[i], status);
                failures++;
            }
        }
        return failures ? 1 : 0;
    }
    alarm(100);
    /* Behind another library's dlsym ours is never asked; the program must work all the same. The launcher puts ours first. */
    bool hooked = strcmp(way, "disabled") != 0 && strcmp(way, "stranger") != 0 && strcmp(way, "second-before") != 0;
    int checked = look_up_everything(hooked ? "librigel.so" : "libcuda.so");
    /* 150 names or so in up to 47 look-ups each: a count that cannot be reached by accident of everything being absent. */
    CHECK(checked > 10 * HOOKS);
    printf("%s: %d hooks, %d look-ups, %d wrong\n", way, HOOKS, checked, wrong);
    unlink(getenv("RIGEL_SIM_STATE"));
    return wrong != 0;
}
