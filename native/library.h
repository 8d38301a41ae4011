/*
 * library.h: a library that librigel.so stands in front of, by exporting its names (library.c): cuBLAS (guard.c), NCCL (collective.c).
 */
#ifndef RIGEL_LIBRARY_H
#define RIGEL_LIBRARY_H

#include "client.h"

/* One is made for each such library, and its tables from the library's .def file, by which the functions are numbered. */
typedef struct {
    const char *const *names;  /* what librigel.so exports, */
    void *const *ours;         /* its functions of these names, */
    _Atomic(void *) *real;     /* and the library's own: NULL where it lacks one, and until it is found */
    int count;                 /* of each */
    int known_by;              /* the function without which it is another library, that has a name like these */
    const char *const *sonames; /* where to look for it besides behind us; NULL at the end */
    void (*entered)(void *handle); /* if not NULL: called when it is found, before others know; twice if two threads find it at once */
    _Atomic bool found;
} rg_library;

/* rg_library_of: the library that this function is in, or NULL; to be closed by nobody: it stays loaded. */
void *rg_library_of(void *function);

/* rg_library_loaded: the one that the program has loaded, or NULL: none is loaded for it. */
void *rg_library_loaded(const rg_library *l);

/* rg_library_find: fills `real` from the one that is loaded, which stays loaded from here on, unless that has been done. False if there
 * is none. */
bool rg_library_find(rg_library *l);

/* rg_library_function: the real function, NULL where there is none. One load once it is found. */
static inline void *rg_library_function(rg_library *l, int number)
{
    void *p = atomic_load_explicit(&l->real[number], memory_order_relaxed);
    if (RG_UNLIKELY(!p) && rg_library_find(l))
        p = atomic_load_explicit(&l->real[number], memory_order_relaxed);
    return p;
}

/*
 * rg_library_look_up: the answer of dlsym(handle, name). False: whatever the real dlsym answers. True with *answer NULL: not
 * there, and dlerror says so. Exporting these names must not make programs believe that the library is loaded where it is not.
 */
bool rg_library_look_up(rg_library *l, void *handle, const char *name, bool interposing, void **answer);

#endif
