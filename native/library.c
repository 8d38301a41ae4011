/*
 * library.c: finding the real functions of a library that librigel.so stands in front of, and answering for their names.
 *
 * Never loads one; the one that the program has loaded stays loaded once its functions are known, as our pointers lead into it.
 * Look-ups take the loader's lock, so none is made under one of ours: two threads may both look, and find the same.
 */
#include "library.h"

#include <dlfcn.h>
#include <string.h>

void *rg_library_of(void *function)
{
    Dl_info info;
    return function && dladdr(function, &info) && info.dli_fname ? dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD) : NULL;
}

void *rg_library_loaded(const rg_library *l)
{
    void *handle = rg_library_of(rg_look_up(RTLD_NEXT, l->names[l->known_by]));
    for (const char *const *soname = l->sonames; !handle && *soname; soname++)
        handle = dlopen(*soname, RTLD_NOW | RTLD_NOLOAD);
    return handle;
}

/* As rg_library_find, from the library with this handle; NULL: from whichever is loaded. */
static bool fill(rg_library *l, void *handle)
{
    if (atomic_load_explicit(&l->found, memory_order_acquire))
        return true;
    if (!handle)
        handle = rg_library_loaded(l);
    if (!handle)
        return false;
    void *functions[l->count];
    for (int i = 0; i < l->count; i++) {
        /* Whoever is preloaded behind us has its turn, as the program's linking would have it. */
        void *next = rg_look_up(RTLD_NEXT, l->names[i]);
        functions[i] = next ? next : rg_look_up(handle, l->names[i]);
        if (functions[i] == l->ours[i])
            functions[i] = NULL;
    }
    bool is = functions[l->known_by] != NULL;
    if (is && l->entered)
        l->entered(handle);
    dlerror(); /* what was not found is not the program's concern */
    if (!is)
        return false;
    for (int i = 0; i < l->count; i++)
        atomic_store_explicit(&l->real[i], functions[i], memory_order_relaxed);
    atomic_store_explicit(&l->found, true, memory_order_release);
    return true;
}

bool rg_library_find(rg_library *l)
{
    return fill(l, NULL);
}

bool rg_library_look_up(rg_library *l, void *handle, const char *name, bool interposing, void **answer)
{
    int at = 0;
    while (at < l->count && strcmp(name, l->names[at]) != 0)
        at++;
    if (at == l->count || handle == RTLD_NEXT)
        return false;
    void *p;
    if (handle == RTLD_DEFAULT) {
        p = rg_look_up(RTLD_NEXT, name);
        if (!p)
            p = rg_library_function(l, at);
    } else {
        p = rg_look_up(handle, name);
        if (p == l->ours[at]) /* the handle of the whole program, in which we come first */
            p = rg_look_up(RTLD_NEXT, name);
        if (p && interposing && !atomic_load(&l->found))
            fill(l, rg_library_of(p));
    }
    /* Of a second one in the process its own functions are handed out. */
    *answer = p && interposing && p == rg_library_function(l, at) ? l->ours[at] : p;
    /* dlerror is to tell of this look-up and of none that was made on the way. */
    if (p)
        dlerror();
    else
        rg_look_up(RTLD_NEXT, name);
    return true;
}
