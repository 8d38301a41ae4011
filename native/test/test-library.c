/*
 * test-library.c: where a process has several copies of cuBLAS or NCCL, each caller gets the one that it is linked with.
 *
 * The programs' side of it is in copies.c: two versions of cuBLAS, with a library linked to each, and a plugin with copies of its own.
 * Whichever comes first, everything must work as it does without librigel.so: where that is switched off, where the process is
 * no client, and where it is one.
 */
#include "segment.h"
#include "testing.h"

static const char *const ways[] = {"bare", "stranger", "disabled", "client"};
static const char *const orders[] = {"12 11 p", "11 12 p", "p 12 11", "p 11 12"};
enum { WAYS = sizeof ways / sizeof *ways, ORDERS = sizeof orders / sizeof *orders };

static int use(const char *library, const char *name)
{
    void *handle = dlopen(in_build_folder(library), RTLD_NOW | RTLD_LOCAL);
    if (!handle)
        fprintf(stderr, "%s\n", dlerror());
    CHECK(handle);
    int (*call)(void);
    *(void **)&call = dlsym(handle, name);
    CHECK(call);
    return call();
}

static int in_order(const char *order)
{
    for (const char *c = order; *c; c += c[0] == 'p' ? 1 : 2) {
        if (*c == ' ')
            c++;
        bool plugin = *c == 'p', eleven = c[1] == '1';
        CHECK_EQUAL(plugin ? use("copies/plugin.so", "plugin")
                    : eleven ? use("copies/user11.so", "user11")
                             : use("copies/user12.so", "user12"), 0);
    }
    return 0;
}

int main(int argc, char **argv)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    puts("a preloaded library would come before the sanitizer's runtime; run without SANITIZE");
    return 77;
#endif
    if (argc > 1)
        return in_order(argv[1]);
    int failures = 0;
    const char *segment = scratch("library"), *state = scratch("library-sim");
    setenv("RIGEL_SIM_STATE", state, 1);
    CHECK_EQUAL(rg_segment_create(segment), 0);
    for (int i = 0; i < WAYS * ORDERS; i++) {
        const char *way = ways[i / ORDERS], *order = orders[i % ORDERS];
        pid_t pid = fork();
        if (pid == 0) {
            alarm(100);
            setenv("LD_LIBRARY_PATH", in_build_folder("sim"), 1);
            if (strcmp(way, "bare") != 0)
                setenv("LD_PRELOAD", in_build_folder("librigel.so"), 1);
            if (strcmp(way, "disabled") == 0)
                setenv("RIGEL_DISABLE", "1", 1);
            if (strcmp(way, "disabled") == 0 || strcmp(way, "client") == 0) {
                setenv("RIGEL_SEGMENT", segment, 1);
                setenv("RIGEL_CLASS", "high", 1);
            }
            execv("/proc/self/exe", (char *const[]){argv[0], (char *)order, NULL});
            _exit(1);
        }
        int status = 1;
        waitpid(pid, &status, 0);
        if (status != 0)
            fprintf(stderr, "%s, \"%s\": failed (%x)\n", way, order, status);
        failures += status != 0;
    }
    unlink(segment);
    unlink(state);
    return failures ? 1 : 0;
}
