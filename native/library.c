/*
 * library.c: finding the real functions of a library that librigel.so stands in front of, and answering for their names.
 *
 * Never loads one; the one that the program has loaded stays loaded once its functions are known, as our pointers lead into it.
 * Look-ups take the loader's lock, so none is made under one of ours: two threads may both look, and find the same.
 */
#include "library.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

void *rg_library_of(void *function)
{
    Dl_info info;
    return function && dladdr(function, &info) && info.dli_fname ? dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD) : NULL;
}

static uintptr_t base_of(void *function)
{
    Dl_info info;
    return function && dladdr(function, &info) ? (uintptr_t)info.dli_fbase : 0;
}

/* Whether the file that this function is in has the library's name. */
static bool has_name(const rg_library *l, void *function)
{
    Dl_info info;
    const char *slash = dladdr(function, &info) && info.dli_fname ? strrchr(info.dli_fname, '/') : NULL;
    const char *dot = strstr(l->sonames[0], ".so");
    return slash && strncmp(slash + 1, l->sonames[0], (size_t)(dot - l->sonames[0]) + 3) == 0;
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
        /* Whoever is preloaded behind us has its turn, as the program's linking would have it; not another copy of the library. */
        void *next = rg_look_up(RTLD_NEXT, l->names[i]), *own = rg_look_up(handle, l->names[i]);
        functions[i] = next && (!own || !has_name(l, next) || base_of(next) == base_of(own)) ? next : own;
        if (functions[i] == l->ours[i])
            functions[i] = NULL;
    }
    bool is = functions[l->known_by] != NULL;
    if (is && l->entered)
        l->entered(handle);
    if (is)
        atomic_store(&l->base[0], base_of(functions[l->known_by]));
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

/*
 * What the linking of the code at this address would have come to without us: what is loaded for the whole program comes first; but
 * of two libraries with versions, and both of the library's name, its own. NULL: not known, or what the whole program has.
 */
static void *linked_with(const rg_library *l, const void *caller)
{
    Dl_info info;
    const char *name = l->names[l->known_by];
    void *handle = dladdr(caller, &info) && info.dli_fname ? dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD) : NULL;
    if (!handle)
        return NULL;
    void *own = rg_look_up(handle, name), *next = rg_look_up(RTLD_NEXT, name);
    dlclose(handle);
    if (own == l->ours[l->known_by]) /* the handle of the whole program */
        return NULL;
    return own && (!next || (has_name(l, next) && has_name(l, own))) ? own : NULL;
}

/* The copy that this function is in, entered if new; 0 where there is no room. It stays loaded, as our pointers lead into it. */
static int copy_of(rg_library *l, void *own)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    uintptr_t base = base_of(own);
    int copy = 0;
    while (copy < RG_COPIES && atomic_load(&l->base[copy]) != base)
        copy++;
    void *functions[l->count], *handle = copy < RG_COPIES ? NULL : rg_library_of(own);
    if (copy < RG_COPIES || !handle)
        return copy < RG_COPIES ? copy : 0;
    for (int i = 0; i < l->count; i++) {
        functions[i] = rg_look_up(handle, l->names[i]);
        if (functions[i] == l->ours[i])
            functions[i] = NULL;
    }
    pthread_mutex_lock(&lock);
    for (copy = 1; copy < RG_COPIES && atomic_load(&l->base[copy]) && atomic_load(&l->base[copy]) != base;)
        copy++;
    for (int i = 0; copy < RG_COPIES && i < l->count; i++)
        atomic_store_explicit(&l->real[copy * l->count + i], functions[i], memory_order_relaxed);
    if (copy < RG_COPIES)
        atomic_store(&l->base[copy], base);
    pthread_mutex_unlock(&lock);
    return copy < RG_COPIES ? copy : 0;
}

int rg_library_caller(rg_library *l, const void *caller)
{
    uint64_t page = (uintptr_t)caller >> 12;
    _Atomic uint64_t *place = NULL;
    for (int i = 0; i < RG_CALLER_PROBES; i++) {
        _Atomic uint64_t *at = &l->callers[(page + (uint64_t)i) % RG_CALLERS];
        uint64_t word = atomic_load_explicit(at, memory_order_acquire);
        if (word >> 8 == page)
            return (int)(word & 255) - 1;
        if (!word && !place)
            place = at;
    }
    void *own = linked_with(l, caller);
    if (!fill(l, rg_library_of(own)))
        return 0;
    int copy = own ? copy_of(l, own) : 0;
    dlerror(); /* what was looked up is not the program's concern */
    if (!place)
        place = &l->callers[page % RG_CALLERS];
    atomic_store_explicit(place, page << 8 | (uint64_t)(copy + 1), memory_order_release);
    return copy;
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
