/*
 * library.h: a library that librigel.so stands in front of, by exporting its names (library.c): cuBLAS (guard.c), NCCL (collective.c).
 */
#ifndef RIGEL_LIBRARY_H
#define RIGEL_LIBRARY_H

#include "client.h"

/*
 * One is made for each such library, and its tables from the library's .def file, by which the functions are numbered.
 *
 * A process may have several copies of it: of another major version, or in a plugin that was linked with one statically. The copy
 * that is found first is the one that Rigel deals with. Calls from what is linked with a further one go straight there.
 */
enum { RG_COPIES = 4, RG_CALLERS = 1024, RG_CALLER_PROBES = 16 };
typedef struct {
    const char *const *names;  /* what librigel.so exports, */
    void *const *ours;         /* its functions of these names, */
    _Atomic(void *) *real;     /* and the library's own, of RG_COPIES copies: NULL where one lacks it, and until it is found */
    int count;                 /* of each */
    int known_by;              /* the function without which it is another library, that has a name like these */
    const char *const *sonames; /* where to look for it besides behind us; NULL at the end */
    void (*entered)(void *handle); /* if not NULL: called when it is found, before others know; twice if two threads find it at once */
    _Atomic bool found;
    _Atomic(uintptr_t) base[RG_COPIES];   /* where each copy begins in memory; 0: there is none */
    _Atomic uint64_t callers[RG_CALLERS]; /* page of a caller << 8 | 1 + the copy that it is linked with; by page */
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

/* rg_library_caller: the copy that the code at this address is linked with; 0 too where it is with none that can be told. */
int rg_library_caller(rg_library *l, const void *caller);

/*
 * rg_library_called: what a caller of ours (its return address) would have called without us; NULL where there is none. `*further`: in
 * a copy that is not Rigel's concern. Two loads once the caller is known.
 */
static inline void *rg_library_called(rg_library *l, int number, const void *caller, bool *further)
{
    uint64_t page = (uintptr_t)caller >> 12;
    uint64_t word = atomic_load_explicit(&l->callers[page % RG_CALLERS], memory_order_acquire);
    int copy = RG_LIKELY(word >> 8 == page) ? (int)(word & 255) - 1 : rg_library_caller(l, caller);
    *further = copy != 0;
    return RG_LIKELY(!copy) ? rg_library_function(l, number)
                            : atomic_load_explicit(&l->real[copy * l->count + number], memory_order_relaxed);
}

/*
 * rg_library_look_up: the answer of dlsym(handle, name). False: whatever the real dlsym answers. True with *answer NULL: not
 * there, and dlerror says so. Exporting these names must not make programs believe that the library is loaded where it is not.
 */
bool rg_library_look_up(rg_library *l, void *handle, const char *name, bool interposing, void **answer);

#endif
