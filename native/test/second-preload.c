/*
 * second-preload.c: another library that is preloaded and has its own dlsym, as profilers and other interposers do.
 * Passes everything on by RTLD_NEXT, which resolves relative to the caller, to the C library's by its version: a dlsym of
 * another preloaded library has none and is passed over.
 */
#include <dlfcn.h>

static _Thread_local int depth;

__attribute__((visibility("default"))) void *dlsym(void *restrict handle, const char *restrict name);
void *dlsym(void *restrict handle, const char *restrict name)
{
    static void *(*next)(void *, const char *);
    if (!next)
        *(void **)&next = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
    if (!next || depth > 8)
        return (void *)0;
    depth++;
    void *found = next(handle, name);
    depth--;
    return found;
}
