/*
 * driver.h: what the parts of the simulated driver share.
 *
 * The simulated libcuda.so.1 is the CUDA driver API over the model in model.h. Several processes share one simulated
 * GPU: the model is in a file they all map, and whoever calls moves it on to the present (CLOCK_MONOTONIC). There is no
 * daemon and no thread; a call that waits sleeps until the model says that something can have changed.
 *
 *   driver.c          initialisation, devices, contexts, errors, the end of the process
 *   driver-state.c    the shared file, its lock, waiting, clients that died, what each has had of the GPU
 *   driver-stream.c   streams and events
 *   driver-graph.c    stream capture and graphs
 *   driver-launch.c   modules, functions, kernel launches
 *   driver-memory.c   allocation, copies, memsets
 *   driver-virtual.c  physical memory and its mappings, pools, arrays
 *   driver-lookup.c   cuGetProcAddress, from driver-exports.def
 *   driver-trace.c    what was done when, for a stand-in of CUPTI
 *
 * It must never call a cu* function through its exported name (the name may be somebody else's, preloaded), print
 * except for one line when the shared file cannot be used, or end the process.
 *
 * Two locks, taken in this order: `lock` of this process (objects, captures, allocations), then the shared file's.
 */
#ifndef RIGEL_SIM_DRIVER_H
#define RIGEL_SIM_DRIVER_H

#include "../cuda_abi.h"
#include "model.h"

#include <pthread.h>
#include <stdatomic.h>

/* Exported, and bound to ourselves wherever we take the address: cuGetProcAddress must return our own functions. */
#define API __attribute__((visibility("protected")))

enum { SIM_MAX_DEVICES = 16, SIM_DRIVER_VERSION = 13000, SIM_CAPTURE_STREAMS = 64 };

/* ---- Handles: objects of this process. A handle is a number that is never an address; a stale one is recognised. */

typedef enum {
    SIM_NONE,
    SIM_CONTEXT,
    SIM_STREAM,
    SIM_EVENT,
    SIM_MODULE, /* CUmodule and CUlibrary */
    SIM_FUNCTION, /* CUfunction and CUkernel */
    SIM_GRAPH,
    SIM_EXEC,
    SIM_NODE,
    SIM_PHYSICAL,
    SIM_ARRAY, /* CUarray and CUmipmappedArray */
    SIM_POOL,
} sim_type;

typedef struct sim_object sim_object;
typedef struct sim_capture sim_capture;

/* Bytes that a copy or memset moves. Addresses are looked up when it is done, not before: a graph is launched later. */
typedef struct {
    int is_set;
    uint64_t dst, src;
    size_t width, height, depth, dst_pitch, src_pitch, dst_slice, src_slice;
    uint32_t value, value_bytes; /* of a memset: 1, 2 or 4 bytes, over and over */
} sim_move;

/* One operation for a stream, executed or captured. */
typedef struct {
    enum { SIM_KERNEL, SIM_TRANSFER, SIM_LAUNCH_GRAPH, SIM_RECORD, SIM_WAIT, SIM_STOP } kind;
    rg_model_kernel kernel;
    int priority;
    rg_model_transfer transfer;
    uint64_t bytes;
    uint32_t target; /* model's id of the graph or event */
    sim_move move;
    CUDA_KERNEL_NODE_PARAMS params; /* of a kernel, for the captured graph */
} sim_work;

struct sim_object {
    _Atomic uint64_t handle; /* 0 while it is on the free list */
    sim_type type;
    uint32_t index, generation;
    sim_object *context; /* that it goes with */
    sim_object *next;    /* free list; a graph's nodes */
    int device;
    uint32_t id; /* the model's */
    union {
        struct {
            sim_object *legacy; /* the NULL stream */
            unsigned flags;
            int primary;
            unsigned attached; /* cuCtxAttach: so many cuCtxDetach end nothing */
        } ctx;
        struct {
            _Atomic(sim_capture *) capture;
            unsigned flags;
            uint32_t capture_index; /* its place in the capture */
            int legacy;
        } stream;
        struct {
            unsigned flags;
            _Atomic int recorded;
            _Atomic uint64_t capture; /* id of the capture it was last recorded in; 0: none */
            uint32_t clock[SIM_CAPTURE_STREAMS];
        } event;
        struct {
            char **names;
            sim_object **functions;
            size_t count;
        } module;
        struct {
            const char *name;
            sim_object *module;
            int registers;
            _Atomic int dynamic_shared; /* the most a launch may ask for */
            int spins; /* rigel_spin: its second parameter is the time each block takes */
            int streams; /* rigel_stream: and its third, of the memory's bandwidth */
            unsigned block[3], shared; /* for cuLaunch and its kin */
            unsigned char param[64];
        } function;
        struct {
            sim_object *first, *last;
            size_t count;
            int capturing; /* owned by a capture in progress */
        } graph;
        struct {
            sim_move *moves;
            size_t count;
            sim_work *works; /* all nodes */
            size_t work_count;
        } exec;
        struct {
            sim_object *graph;
            sim_work work;
            sim_object **after; /* the nodes it comes after */
            uint32_t after_count;
            uint32_t capture_index, ordinal; /* captured: its stream's place in the capture, its own among that stream's nodes */
            uint64_t capture;
            void *original; /* handle: it is a clone of that one */
        } node;
        struct {
            uint64_t bytes;
            uint32_t context, handles, mappings; /* the model's context that it is charged to */
            int file; /* what holds its bytes */
        } physical;
        struct {
            uint64_t bytes;
        } array;
        struct {
            uint64_t reserved, used, threshold; /* bytes */
            uint32_t context; /* the model's context that it is charged to; 0: none yet */
        } pool;
    };
};

/* sim_new: a zeroed object of this type; NULL when memory ends. The caller holds sim.lock, as for sim_delete. */
sim_object *sim_new(sim_type type, sim_object *context);
void sim_delete(sim_object *o);
/* sim_get: the object behind a handle, or NULL if it is not a live one of this type. */
sim_object *sim_get(const void *handle, sim_type type);
/* sim_each: the next live object after `previous` (NULL: the first); for scans when something big is destroyed. */
sim_object *sim_each(const sim_object *previous);
static inline void *sim_handle(const sim_object *o)
{
    return (void *)(uintptr_t)atomic_load_explicit(&((sim_object *)(uintptr_t)o)->handle, memory_order_relaxed);
}

/* ---- Process and thread */

typedef struct {
    pthread_mutex_t lock;
    _Atomic int phase; /* enum below */
    int devices;
    _Atomic int captures; /* in progress, in the whole process */
    struct {
        sim_object *primary, *pool; /* pool: the default one, once somebody has asked for it */
        unsigned primary_refs, primary_flags;
    } device[SIM_MAX_DEVICES];
} sim_process;
enum { SIM_UNBORN, SIM_RUNNING, SIM_FORKED, SIM_ENDED };
extern sim_process sim;

enum { SIM_CONTEXT_STACK = 64, SIM_THREAD_STREAMS = 32 };
typedef struct {
    void *stack[SIM_CONTEXT_STACK]; /* handles; the last one is current */
    int depth;
    int capture_mode;
    void *streams[SIM_THREAD_STREAMS]; /* handles: this thread's default stream in each context */
    int stream_count;
} sim_thread;
sim_thread *sim_self(void);
/* sim_keep_thread_stream: the stream is this thread's and goes when the thread ends. */
CUresult sim_keep_thread_stream(void *handle);

/* sim_enter: every function's first line: CUDA_SUCCESS, NOT_INITIALIZED (also after fork) or DEINITIALIZED. */
CUresult sim_enter(void);
/* sim_current: sim_enter, and this thread's current context; INVALID_CONTEXT without one. */
CUresult sim_current(sim_object **context);

/* ---- driver-state.c */

/* sim_attach: maps the shared file and enters this process in it. 0, or the error of cuInit. */
CUresult sim_attach(int *devices);
/* sim_detach: takes this process and its contexts out of it. */
void sim_detach(void);
/* sim_lock: the model of a device, moved on to the present, locked until sim_unlock. */
rg_model *sim_lock(int device);
void sim_unlock(void);
/* sim_params: the device's parameters, which never change. */
const rg_model_params *sim_params(int device);
void sim_uuid(int device, char out[16]);
/* sim_own_context: the model's new context belongs to this process. sim_remove_context: it goes, with its work. The caller of either
 * holds sim_lock. */
void sim_own_context(int device, uint32_t context);
void sim_remove_context(int device, uint32_t context);

typedef struct {
    enum { SIM_UNTIL_STREAM, SIM_UNTIL_CONTEXT, SIM_UNTIL_EVENT } kind;
    uint32_t id;
    uint64_t ticket;
} sim_until;
/* sim_wait: returns when it is done; DEINITIALIZED if the process ends meanwhile. */
CUresult sim_wait(int device, sim_until until);
/* sim_wait_for_room: returns when a stream that was full may have room. */
CUresult sim_wait_for_room(int device, uint32_t stream);
/* sim_reap: at most every `every_ms`, removes the contexts of processes that are gone. */
void sim_reap(unsigned every_ms);

/* ---- driver-stream.c */

/* sim_stream: the stream behind a handle; NULL, legacy and per-thread ones are those of the current context. */
CUresult sim_stream(CUstream handle, int per_thread, sim_object **stream);
/* sim_submit: gives the work to the stream, or to the capture it is in. Waits while the stream's queue is full. */
CUresult sim_submit(sim_object *stream, const sim_work *work, uint64_t *ticket);
/* sim_destroy_stream: the handle is stale afterwards; what is queued still runs. INVALID_HANDLE if it is none. */
CUresult sim_destroy_stream(void *handle);
CUresult sim_new_stream(sim_object *context, unsigned flags, int priority, int legacy, sim_object **stream);

/* ---- driver-graph.c */

/* sim_unsafe: STREAM_CAPTURE_UNSUPPORTED (and the captures are lost) if this call may not be made during a capture. */
CUresult sim_unsafe(void);
/* sim_legacy_use: the same for using the legacy stream while a blocking stream of its context captures (IMPLICIT). */
CUresult sim_legacy_use(sim_object *legacy);
/* sim_capture_conflict: the stream captures: the capture is lost, and the call that asked gets the error. */
CUresult sim_capture_conflict(sim_object *stream);
/* sim_context_conflict: the same if any stream of the context captures. */
CUresult sim_context_conflict(sim_object *context);
CUresult sim_capture_add(sim_object *stream, const sim_work *work);
CUresult sim_capture_record(sim_object *stream, sim_object *event);
CUresult sim_capture_wait(sim_object *stream, sim_object *event);
/* sim_capture_leave: the stream is about to be destroyed. */
void sim_capture_leave(sim_object *stream);
void sim_delete_graph(sim_object *graph);
void sim_delete_exec(sim_object *exec);
void sim_delete_module(sim_object *module);

/* ---- driver-trace.c */

/* sim_tracing: whether submissions are traced. */
bool sim_tracing(void);
/* sim_trace: the work has just been submitted to the model, which is locked. */
void sim_trace(rg_model *m, const sim_object *stream, const sim_work *work);
/* sim_trace_graph: what this thread submits from here on belongs to this graph (0: to none), and is one call. */
void sim_trace_graph(uint32_t graph);

/* ---- driver-memory.c */

/* sim_do_move: moves the bytes, now. What lies outside of any allocation by now is left alone. */
void sim_do_move(const sim_move *move);
/* sim_enter_mapping: bytes of a mapping become memory that copies reach; OUT_OF_MEMORY. sim_leave_mapping: no longer. */
CUresult sim_enter_mapping(uint64_t address, uint64_t bytes);
void sim_leave_mapping(uint64_t address);
/* sim_is_registered: it is memory of the host that the program has registered. */
bool sim_is_registered(uint64_t address);
/* sim_forget_memory: the context's allocations are gone. The caller holds sim.lock. */
void sim_forget_memory(const sim_object *context);

/* ---- driver-virtual.c */

/* sim_charge: takes so much of the device's memory for a context; OUT_OF_MEMORY if there is not so much. */
CUresult sim_charge(int device, uint32_t context, uint64_t bytes);
/* sim_pool_take: so much from a pool, which takes it from the device if it has not kept enough. sim_pool_give: back;
 * sim_pool_return: the same where the caller holds sim.lock. */
CUresult sim_pool_take(sim_object *pool, const sim_object *context, uint64_t bytes);
void sim_pool_give(void *pool, uint64_t bytes);
void sim_pool_return(void *pool, uint64_t bytes);
/* sim_pool: the pool behind a handle, or the device's default one for NULL. */
CUresult sim_pool(CUmemoryPool handle, int device, sim_object **pool);

/* ---- driver-lookup.c: the bodies of cuGetProcAddress, whose names its table declares differently. */

CUresult sim_get_proc_address(const char *name, void **out, int version, uint64_t flags);
CUresult sim_get_proc_address_v2(const char *name, void **out, int version, uint64_t flags, int *status);

#endif
