/*
 * client.h: what the parts of librigel.so share inside a client process.
 *
 * Vocabulary
 *   client        who holds a slot in the segment: this process, once cuInit has succeeded, and beside it threads that have
 *                 entered a client of their own (member.c)
 *   member        a client of this process, as this process has it
 *   work          a launch, graph launch, bulk copy or memset
 *   track         what is known of one stream of one context: has it unfinished work, how much of it is uncounted
 *   busy          (high class) some track of a device has unfinished work
 *   batch         (best-effort class) launches covered by one recorded event
 *   stop          a place in a best-effort stream where it stops while high clients have work (stop.c)
 *   weight        what a launch counts for in flight: 1024ths of a launch, by its learned duration (policy.h)
 *
 * Data flow: hooks.c calls rg_work_begin/rg_work_end round the real function (rg_again, where a high client's thread goes on as it did);
 * they read `rg` and the segment, and go to gate.c only when something stands in the way. Waits seen in hooks.c clear tracks (track.c);
 * when none is left the client is idle. agent.c does the same for programs that never wait, and keeps the heartbeat. client.c attaches and detaches.
 * member.c says whose a launch is, where threads of this process are clients of their own: of each client are its class, what it
 * has in flight, whether it is busy, and its counts; of the process are captures, tracks, memory, the guard, and the channels
 * that preempt.c takes off the GPU, which is why a process with a high client among its threads is never suspended.
 * guard.c stands in front of cuBLAS, apart from all that: what a call of it launches comes through hooks.c like any other.
 *
 * Rules
 *   1. The launch path (rg_again, rg_work_begin, rg_work_end, rg_track_of) has no lock, allocation, system call or log. Once a
 *      request, where a high client becomes busy or launches again after it has waited, it has a lock of this process's own, and a futex
 *      wake if a best-effort client waits for that (rg_busy_begin, rg_drain_end).
 *   2. No function of Rigel calls a hooked name: the driver is reached only through rg_real.
 *   3. While any stream is being captured nothing but the real function is called. Where that cannot be known for sure, since
 *      another thread may begin a capture at any moment, the thread is in relaxed capture mode: in any other, an event
 *      query ends a capture that is open elsewhere (seen on an H200: 900, then 901 from cuStreamEndCapture).
 *   4. Every wait ends by itself (rg_policy_decide's bound, a stale heartbeat, shutdown, exit, the end of a hold).
 *   5. A thread that holds Python's interpreter lock does not wait for a high client of its own process, which may need the
 *      lock to come to an end (rg_member_holds_python).
 */
#ifndef RIGEL_CLIENT_H
#define RIGEL_CLIENT_H

#include "account.h"
#include "cuda_abi.h"
#include "estimate.h"
#include "segment.h"
#include "thread.h"
#include "trace.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#define RG_LIKELY(x) __builtin_expect(!!(x), 1)
#define RG_UNLIKELY(x) __builtin_expect(!!(x), 0)

/* ---- interpose.c: the real driver ---- */

enum rg_hook {
#define RG_WORK(symbol, ...) RG_HOOK_##symbol,
#define RG_SPECIAL(symbol, ...) RG_HOOK_##symbol,
#include "hooks.def"
#undef RG_WORK
#undef RG_SPECIAL
    RG_HOOK_COUNT
};

/* Driver functions that Rigel calls but does not hook. */
#define RG_PLAIN_FUNCTIONS(X) \
    X(cuCtxGetCurrent, (CUcontext *)) \
    X(cuCtxPushCurrent_v2, (CUcontext)) \
    X(cuCtxPopCurrent_v2, (CUcontext *)) \
    X(cuCtxGetDevice, (CUdevice *)) \
    X(cuMemGetAddressRange_v2, (CUdeviceptr *, size_t *, CUdeviceptr)) \
    X(cuDeviceGetMemPool, (CUmemoryPool *, CUdevice)) \
    X(cuMemPoolGetAttribute, (CUmemoryPool, int, void *)) \
    X(cuMemPoolTrimTo, (CUmemoryPool, size_t)) \
    X(cuStreamIsCapturing, (CUstream, int *)) \
    X(cuCtxGetStreamPriorityRange, (int *, int *)) \
    X(cuStreamGetPriority, (CUstream, int *)) \
    X(cuDeviceGetUuid_v2, (CUuuid *, CUdevice)) \
    X(cuDeviceGetUuid, (CUuuid *, CUdevice)) \
    X(cuDeviceGetName, (char *, int, CUdevice)) \
    X(cuDevicePrimaryCtxGetState, (CUdevice, unsigned *, int *)) \
    X(cuStreamGetCtx, (CUstream, CUcontext *)) \
    X(cuStreamSetAttribute, (CUstream, int, const CUlaunchAttributeValue *)) \
    X(cuThreadExchangeStreamCaptureMode, (CUstreamCaptureMode *)) \
    X(cuEventElapsedTime, (float *, CUevent, CUevent)) \
    X(cuFuncGetName, (const char **, CUfunction)) \
    X(cuFuncGetAttribute, (int *, int, CUfunction)) \
    X(cuKernelGetFunction, (CUfunction *, CUkernel)) \
    X(cuOccupancyMaxActiveBlocksPerMultiprocessor, (int *, CUfunction, int, size_t)) \
    X(cuDeviceGetAttribute, (int *, int, CUdevice)) \
    X(cuKernelGetName, (const char **, CUkernel)) \
    X(cuGraphGetNodes, (CUgraph, CUgraphNode *, size_t *)) \
    X(cuGraphNodeGetType, (CUgraphNode, int *)) \
    X(cuGraphKernelNodeGetParams_v2, (CUgraphNode, CUDA_KERNEL_NODE_PARAMS *)) \
    X(cuGraphChildGraphNodeGetGraph, (CUgraphNode, CUgraph *)) \
    X(cuGraphKernelNodeGetAttribute, (CUgraphNode, int, CUlaunchAttributeValue *)) \
    X(cuGraphGetEdges, (CUgraph, CUgraphNode *, CUgraphNode *, size_t *)) \
    X(cuGraphGetEdges_v2, (CUgraph, CUgraphNode *, CUgraphNode *, uint64_t *, size_t *)) \
    X(cuGraphClone, (CUgraph *, CUgraph)) \
    X(cuGraphNodeFindInClone, (CUgraphNode *, CUgraphNode, CUgraph)) \
    X(cuGraphDestroyNode, (CUgraphNode)) \
    X(cuGraphDestroy, (CUgraph)) \
    X(cuGraphUpload, (CUgraphExec, CUstream)) \
    X(cuStreamWaitEvent, (CUstream, CUevent, unsigned)) \
    X(cuModuleLoadData, (CUmodule *, const void *)) \
    X(cuModuleGetFunction, (CUfunction *, CUmodule, const char *)) \
    X(cuDeviceGetCount, (int *)) \
    X(cuMemHostRegister_v2, (void *, size_t, unsigned)) \
    X(cuMemHostGetDevicePointer_v2, (CUdeviceptr *, void *, unsigned)) \
    X(cuStreamWaitValue32_v2, (CUstream, CUdeviceptr, uint32_t, unsigned)) \
    X(cuStreamWriteValue32_v2, (CUstream, CUdeviceptr, uint32_t, unsigned)) \
    X(cuMemGetInfo_v2, (size_t *, size_t *)) \
    X(cuPointerGetAttribute, (void *, int, CUdeviceptr)) \
    X(cuPointerGetAttributes, (unsigned, int *, void **, CUdeviceptr))

/* What the simulated GPU offers in place of the driver's channel controls (channel.c); 0 or -errno. */
#define RG_SIMULATOR_FUNCTIONS(X) \
    X(rigelSimSetTimeslice, (unsigned ordinal, uint64_t us)) \
    X(rigelSimSuspend, (unsigned ordinal, int suspend)) \
    X(rigelSimStop, (unsigned ordinal, int stopped)) \
    X(rigelSimWrites, (unsigned ordinal))

typedef struct {
    void *hooked[RG_HOOK_COUNT]; /* NULL where the driver has no such function */
#define RG_PLAIN(symbol, params) CUresult (*symbol) params;
    RG_PLAIN_FUNCTIONS(RG_PLAIN)
#undef RG_PLAIN
#define RG_SIMULATED(symbol, params) int (*symbol) params;
    RG_SIMULATOR_FUNCTIONS(RG_SIMULATED)
#undef RG_SIMULATED
} rg_driver;
extern rg_driver rg_real;

/* RG_REAL(symbol): the driver's function behind a hook, typed as its wrapper. May be NULL before rg_real_ready. */
#define RG_REAL(symbol) ((__typeof__(&symbol))rg_real.hooked[RG_HOOK_##symbol])

/* Prototypes of all hooked functions: the names this library exports. */
#pragma GCC visibility push(default)
#define RG_WORK(symbol, kind, params, ...) CUresult symbol params;
#define RG_SPECIAL(symbol, params, ...) CUresult symbol params;
#include "hooks.def"
#undef RG_WORK
#undef RG_SPECIAL
#pragma GCC visibility pop

/* rg_real_ready: finds the driver (already loaded, or loads it) and fills rg_real. False if there is none. Idempotent. */
bool rg_real_ready(void);

/* rg_real_late: slow half of RG_CALL: whether the driver, looked for now, has the function behind a hook. */
RG_COLD bool rg_real_late(enum rg_hook hook);

/* Calls the driver's function. A name that the driver lacks, or that is called where there is no driver at all, answers
 * CUDA_ERROR_NOT_INITIALIZED. */
#define RG_CALL(symbol, args) \
    (RG_LIKELY(rg_real.hooked[RG_HOOK_##symbol] != NULL) || rg_real_late(RG_HOOK_##symbol) ? RG_REAL(symbol) args \
                                                                                           : CUDA_ERROR_NOT_INITIALIZED)

/* rg_replace: the hook for a pointer the driver handed out, or NULL if it is not a hooked function. */
void *rg_replace(void *real);

/* rg_interposing: whether this process may become a client at all. */
bool rg_interposing(void);

/* rg_look_up: what the real dlsym finds. */
void *rg_look_up(void *handle, const char *name);

/* ---- client.c: the process as a client ---- */

enum rg_mode {
    RG_MODE_BARE = 0, /* no client, refused, forked, past Rigel for now, or at exit: pass straight through */
    RG_MODE_HIGH = 1,        /* bit: its busy periods are marked */
    RG_MODE_BEST_EFFORT = 2, /* bit: its work passes the gate */
    RG_MODE_FAIR = 3,        /* both: every client under fair, whatever its class */
    RG_MODE_SHOWN = 5,       /* a high client under orion, which says what its kernels are bound by */
    RG_MODE_RECORDED = 16,   /* bit, of the process alone: what it launches is counted or told (record.c) */
    RG_MODE_ATTACHED = 8,    /* bit, of the process alone: only threads that have entered a client are one */
    RG_MODE_PAUSED = 32,     /* bit: its work waits until it is resumed */
};

/* Whether the work of this process, a client, goes past Rigel for now (rigel_bypass_begin). Its mode is bare then. */
enum rg_bypass {
    RG_BYPASS_NONE = 0, /* it is no client: not yet, not any more */
    RG_BYPASS_OFF,      /* it is one, as it is with */
    RG_BYPASS_ON,
};

/* rg_say: one line on standard error, cut to fit; a newline is added. Not for the launch path. */
void rg_say(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* rg_client_attach: called after each successful cuInit; attaches once. */
void rg_client_attach(void);

/* ---- member.c: the clients of this process ---- */

/* RG_DRAINING: all that a high client has launched on a device is waited for; RG_DRAINED: it was, in a copy that may have waited
 * (rg_wait_stream_leave), and nothing was launched since. */
enum rg_draining { RG_LAUNCHING = 0, RG_DRAINING = 1, RG_DRAINED = 2 };

/* A high client's busy period on a device: what its end needs to know, one cache line. */
typedef struct {
    _Alignas(64) _Atomic uint32_t draining; /* enum rg_draining */
    _Atomic uint64_t busy_since;
    _Atomic uint64_t busy_tick;   /* the same for records */
    _Atomic uint64_t drain_since; /* while draining: since when */
    _Atomic uint64_t launched_at; /* not while launching: when that ended */
    _Atomic uint64_t paused_since; /* its end was found by the agent: when */
    _Atomic uint64_t inside_ns;   /* in copies that may have waited for the GPU, and in waits that were not the last */
    _Atomic uint32_t stayed;      /* enum rg_stayed */
} rg_period;

typedef struct {
    /* What a launch reads and writes: up to `inflight` of the first eight devices, one cache line. */
    _Alignas(64) _Atomic uint32_t mode; /* enum rg_mode; bare until it has a slot */
    int slot_index;
    rg_client *slot;
    _Atomic uint8_t busy[RG_MAX_DEVICES];       /* high: its bit is set in the device's high_busy */
    _Atomic uint32_t inflight[RG_MAX_DEVICES];  /* best-effort: weight of launches there that are not known to be finished */
    _Atomic uint64_t inverse_weight; /* fair: rg_policy_inverse */
    _Atomic uint32_t credit[RG_MAX_DEVICES];    /* launches that may still go out there in this starvation period */
    _Atomic uint32_t threads;  /* that have entered it */
    uint32_t class;            /* enum rg_class that it was started as; what it is now is in its slot */
    rg_account *account;       /* what is asked of it (steer.c); NULL: nothing can be */
    bool restamp;              /* its streams' priorities have yet to follow its class; agent thread only */
    uint64_t seen, seen_at;    /* agent thread only, as the next: what had ended when it last looked how often to look */
    uint64_t ended, ended_itself, ended_at;
    bool often;
    rg_period period[RG_MAX_DEVICES];
    char name[RG_NAME_BYTES];
} rg_member;

typedef struct rg_track rg_track;

/* rg_members_attach: the process has become a client of the segment; gives clients that threads have entered already a slot.
 * `alone`: threads that have entered none are no client. */
void rg_members_attach(uint32_t mode, bool alone);

/* rg_members_leave: every client of this process has ended. rg_members_forked: in the child of a fork, which is none. */
void rg_members_leave(void);
void rg_members_forked(void);

/*
 * rg_member_of: whose work on this stream is: the client that the stream belongs to, else the calling thread's, else the
 * process's. NULL: nobody's. Asked only where there are several (rg.several).
 */
rg_member *rg_member_of(CUstream stream);

/* rg_member_index: a number for the calling thread's client, 0 for the process's. */
uint32_t rg_member_index(void);

/* rg_member_made: the calling thread has made this stream. rg_member_unmade: it is about to be destroyed (NULL: any may be gone). */
void rg_member_made(CUstream stream);
void rg_member_unmade(CUstream stream);

/* rg_member_mine: the client of the calling thread; NULL: none. */
rg_member *rg_member_mine(void);

/* rg_member_class: the class that this process is of where it cannot be divided: high if any of its clients is. */
uint32_t rg_member_class(void);

/* rg_member_holds_python: the calling thread holds Python's interpreter lock, and the process has a high client. */
bool rg_member_holds_python(void);

/* rg_member_is_paused: this client may not work, as it is paused (its mode says so) or it is another's turn, and the time that was said has not
 * come. rg_member_paused: no client of this process may. rg_account_turn: until when it is another's turn, which is only under policy slo; rg_account_until:
 * and until when the client is paused. */
uint64_t rg_account_turn(const rg_account *account);
uint64_t rg_account_until(const rg_account *account);
/* rg_slots_until: a bit per slot of the clients of which that, one of the two, is yet to come. */
uint64_t rg_slots_until(uint64_t (*until)(const rg_account *account));
bool rg_member_is_paused(const rg_member *member);
bool rg_member_paused(void);

/* rg_member_become: a client of this process, which is of the class of its slot so far, is of this class from now on, or paused, or what
 * else the policy makes of it. Agent thread only. */
void rg_member_become(rg_member *member, uint32_t class, bool paused);

/* ---- steer.c: what is asked of clients while they run ---- */

/* rg_steer_attach: remembers the segment's file. rg_steer_beat: called by the agent now and then: does what is asked. */
void rg_steer_attach(const char *path);
void rg_steer_beat(uint64_t now_ns);

/* ---- context.c: contexts, and what is used in the wrong one ---- */

/* rg_context_made: the calling thread has made a stream or event; rg_context_unmade: it is about to be destroyed. */
void rg_context_made(const void *handle);
void rg_context_unmade(const void *handle);

/* rg_context_seen: a client works in this context. rg_context_gone: it (or, if NULL, all of device `d`) goes. */
void rg_context_seen(rg_client *slot, CUcontext context, uint32_t device);
void rg_context_gone(CUcontext context, CUdevice d);

/* rg_context_refused: a call with this handle (and this other one, or NULL) failed: counts it if for its handle or context, unless both
 * belong to the same one. */
RG_COLD void rg_context_refused(uint32_t operation, CUresult result, const void *handle, const void *other);

/* rg_context_turned: this thread turns to a stream: notes its current context, and counts it if the stream is of another. */
void rg_context_turned(uint32_t operation, const rg_track *track);

/* ---- track.c: streams, and when the GPU has finished ---- */

/* RG_WITHIN: for who begins a request by a copy: it does not come from host memory. */
enum rg_kind { RG_LAUNCH, RG_GRAPH, RG_COPY, RG_COPYWAIT, RG_MEMSET, RG_WITHIN };

/*
 * State of a track's work: clean, dirty, or a token (rg_token) of whoever will know when the work so far is done; new work
 * makes it dirty again, which the token's holder notices because its compare-and-swap fails. The low two bits tell a thread
 * of the program that is waiting right now (RG_TOKEN_WAIT) from a recorded event (RG_TOKEN_EVENT).
 */
enum { RG_CLEAN = 0, RG_DIRTY = 1, RG_TOKEN_WAIT = 2, RG_TOKEN_EVENT = 3 };

struct rg_track {
    /* What a launch reads and writes, one cache line. */
    _Alignas(64) _Atomic uintptr_t key; /* 0 free; what rg_track_key made of stream and context */
    _Atomic uint64_t state;     /* RG_CLEAN, RG_DIRTY, or a token: "whoever holds this token knows when it is done" */
    _Atomic uint32_t unbatched; /* best-effort: weight launched since the last batch event */
    _Atomic uint32_t device;    /* index in the segment */
    _Atomic uint32_t serial;    /* of this stream in this place: 1 + position in the low byte, how often it was taken above */
    _Atomic uint32_t since_stop_ns; /* work launched since its last stop (stop.c) */
    _Atomic(const char *) owner; /* the thread of a per-thread default stream, with which it goes, else NULL */
    _Atomic(rg_member *) member; /* whose work it has */
    _Atomic(CUstream) stream;
    _Atomic(CUcontext) context;
    _Atomic CUdevice cu_device;
    CUevent agent_event;        /* the agent's; under rg_agent_lock, */
    CUcontext agent_context;    /* as is this: where it was made, perhaps for a stream that had this place before */
    uint64_t agent_token;       /* agent thread only */
};

enum { RG_MAX_TRACKS = 254, RG_TRACK_INDEX = 1024 };

/* rg_track_add: slow half of rg_track_of: enters a stream that is new, and sets its priority. NULL if it cannot be tracked. */
RG_COLD rg_track *rg_track_add(CUstream stream, uintptr_t key);

/* rg_track_for: the track of a stream for this client's work, where there are several; what it has of another's counts as done. */
rg_track *rg_track_for(CUstream stream, rg_member *member);

/* rg_track_forget: the stream is about to be destroyed. */
void rg_track_forget(CUstream stream);

/* rg_track_forget_context: this context (or, if NULL, every context of device `d`) goes, with its streams and events. */
void rg_track_forget_context(CUcontext context, CUdevice d);

/* rg_capture_began, rg_capture_ended: keep count of captures; the latter never lets the count wrap. */
void rg_capture_began(CUstream stream);
void rg_capture_ended(CUstream stream);

/* rg_stream_prioritise: gives a stream the priority of a client of this mode; `asked` is the one the program gave it. */
void rg_stream_prioritise(CUstream stream, uint32_t mode, int asked);

/* Waits. begin returns a token for what is unfinished now; end(ok) says that it is finished. 0 tokens are harmless. */
uint64_t rg_wait_stream_begin(CUstream stream);
void rg_wait_stream_end(CUstream stream, uint64_t token, bool ok);
/* The same for who only looks. Where somebody else knows already when it will be done it is his token, not the caller's `own`: that is left
 * to him unless all is done. */
uint64_t rg_look_stream_begin(CUstream stream, bool *own);
uint64_t rg_wait_context_begin(CUcontext context);
void rg_wait_context_end(CUcontext context, uint64_t token, bool ok);

/*
 * rg_wait_stream_leave: in place of rg_wait_stream_end for a call that may have waited or not: who looks, or waits again, finds out if all is
 * done. Until then best-effort work need not be kept off the GPU, unless more is launched, but what the thread does is work of its own.
 * False: somebody knows better already, or something was launched meanwhile.
 */
bool rg_wait_stream_leave(uint64_t token);

/*
 * Events: what was recorded where, so that a finished event tells that a stream is. Tokens are taken before the driver is
 * called: what is launched meanwhile must count as later.
 */
uint64_t rg_event_record_begin(CUstream stream);
void rg_event_record_end(CUevent event, CUstream stream, uint64_t token, bool ok);
uint64_t rg_event_wait_begin(CUevent event, rg_track **track);
void rg_event_forget(CUevent event);

/* The same for a thread that is about to block until the event: its token takes the place of the event's. */
uint64_t rg_event_block_begin(CUevent event, rg_track **track);
void rg_event_block_end(rg_track *track, uint64_t token, bool ok);

/* rg_token: a new token of the kind RG_TOKEN_WAIT or RG_TOKEN_EVENT, unique in this process. */
uint64_t rg_token(uint64_t kind);

/* rg_track_finished: the work covered by `token` is done. Clean if nothing came since; true if that ended the busy period. */
bool rg_track_finished(rg_track *track, uint64_t token);

/* rg_idle_check: if no track of the client on the device has unfinished work, the busy period is over; true if it ended just now. */
bool rg_idle_check(rg_member *member, uint32_t device);

/* rg_busy_begin: marks this high client busy on the device, by work with this key (rg_request_key, or 0): slow half, taken once per busy
 * period. Whether it was not. */
bool rg_busy_begin(rg_member *member, uint32_t device, uint64_t key);

/* rg_busy_begin_with: the same by this work. */
RG_COLD void rg_busy_begin_with(rg_member *member, const rg_track *track, enum rg_kind kind, uintptr_t units, rg_dims dims);

/*
 * rg_drain: a thread is about to block until work is done. If all the work of this high client on a device is waited for, nothing
 * more may come for a while, and best-effort clients that are kept off the GPU may return: behind what is queued, as far
 * as a high client's long slice covers that (preempt.c). True if that is so somewhere; else what the thread waits for is told by rg_waited: the
 * stream, and since when. rg_drain_end: something came after all.
 */
bool rg_drain(void);
void rg_waited(const rg_track *track, uint64_t since_ns);
RG_COLD void rg_drain_end(rg_member *member, uint32_t device);

/* rg_busy_assert: sets this client's busy bits again, should somebody have taken it for dead while it was stopped. */
void rg_busy_assert(rg_member *member);

/* rg_busy_end: the client, whose mode says so already, marks its work no more. rg_busy_suspect: it does from now on; what it has
 * launched before counts as unfinished until it is known. */
void rg_busy_end(rg_member *member);
void rg_busy_suspect(rg_member *member);

/* rg_tracks_clear: what was launched before is nobody's concern any more, done or not, and no token of it finds a track. */
void rg_tracks_clear(void);

/* rg_streams_restamp: gives the streams of a client the priority of its mode. False if that has to wait: for a capture, or for who ends
 * a stream or context. */
bool rg_streams_restamp(rg_member *member);

/* rg_busy_leave: clears this client's busy bits for good; the mode is bare already. */
void rg_busy_leave(rg_member *member);

/* ---- requests.c: what a high client's requests launch, kind by kind ---- */

/* rg_request_key: the kind of a request that begins with this: bytes, function and shape, or graph. Never 0, which is none. */
uint64_t rg_request_key(enum rg_kind kind, uintptr_t units, rg_dims dims);

/* rg_requests_begin: a request of that kind begins (0: of the one before), or goes on whose program the agent took for idle: its launches
 * are counted on, so its time is too, but for the pause. */
void rg_requests_begin(rg_member *member, uint32_t device, uint64_t key, uint64_t now);

/* rg_requests_end: one is over that its program has waited for: an end that the agent finds may be in the middle of one whose program has lost its
 * processor; `waited`: for the GPU (rg_policy_waited). rg_requests_skip: such an end: of a whole request, or of one that has not launched as much
 * as usual yet and goes on. */
void rg_requests_end(rg_member *member, uint32_t device, bool waited);
void rg_requests_skip(rg_member *member, uint32_t device, uint64_t now);

/* rg_requests_kind: the key of the kind of the one under way, or the last one; 0: not known, or it was nothing but a copy. */
uint64_t rg_requests_kind(const rg_member *member, uint32_t device);

/* rg_requests_forget: nothing is known of them; what was launched so far was none. */
void rg_requests_forget(rg_member *member, uint32_t device);

/* ---- gate.c ---- */

typedef struct rg_duration rg_duration;

/*
 * rg_gate_wait: blocks the calling thread until a launch may go; `first` is the verdict that sent it here, `duration` its
 * entry, if it has one. What the least share lets out it pays for.
 */
RG_COLD void rg_gate_wait(rg_track *track, enum rg_verdict first, const rg_duration *duration);

/* rg_gate_paused: holds work of a client that is paused until it is resumed. */
RG_COLD void rg_gate_paused(rg_member *member, enum rg_kind kind, uintptr_t units);

/*
 * rg_gate_called: the call that this thread waited with has been made. rg_gate_settle: waits for that in all threads that were at the gate,
 * at most 50 ms: as Rigel leaves, so that what they launch reaches the driver before the program's end takes it down, as it would have
 * without Rigel. rg_gate_held: how many they are.
 */
RG_COLD void rg_gate_called(void);
void rg_gate_settle(void);
extern _Atomic uint32_t rg_gate_held;

/* rg_gate_decide: the decision under fair and orion, on a handful of words more, however many clients there are. */
enum rg_verdict rg_gate_decide(const rg_track *track, const rg_duration *duration);

/* rg_gate_charge: after the gate, under fair and orion: charges the launch, which is in flight from then on. What it counts for there;
 * `weight` is that as far as its duration says. */
uint32_t rg_gate_charge(rg_member *member, const rg_track *track, rg_duration *duration, uint32_t policy, uint32_t weight);

/* rg_gate_recharge: what was charged `from_ns` for each of so many launches (0: not known yet) turns out to cost `to_ns`. */
void rg_gate_recharge(rg_member *member, uint32_t device, uint32_t launches, uint32_t from_ns, uint32_t to_ns);

/* rg_gate_show: orion: what the kernel that a high client launches is bound by. */
void rg_gate_show(const rg_track *track, enum rg_kind kind, uintptr_t units, rg_dims dims);

/* rg_gate_outstanding: orion: whether work of this client is not known to be finished. rg_gate_look: finds out which is, for who launches
 * nothing; agent thread only. */
bool rg_gate_outstanding(const rg_member *member);
void rg_gate_look(void);

/* rg_gate_profile: orion: looks a kernel that is new up in the profiles. */
RG_COLD void rg_gate_profile(rg_duration *duration, CUfunction function, rg_dims dims);

/* rg_retire: so much weight is no longer in flight. */
void rg_retire(rg_member *member, uint32_t device, uint32_t weight);

/* rg_batch_record: covers the track's unbatched launches with an event. */
void rg_batch_record(rg_track *track);

/* rg_batch_forget: the context (or every context of device `d`) goes, and its events with it. */
void rg_batch_forget(CUcontext context, CUdevice d);

/* rg_give_way: lets another thread be done with what it owns, where it has been tried so often to take that. False: it has not been done
 * for 0.1 s, and never may. */
bool rg_give_way(int tries);

/* rg_demangled: a C++ name as people read it, to be freed; NULL where it is none, or the program has no C++ library to ask. */
char *rg_demangled(const char *name);

/* ---- graph.c: what functions and executable graphs are, and graphs in pieces ---- */

/* rg_function_name: a kernel's name, the driver's; NULL where the driver does not tell (before CUDA 12.3). */
const char *rg_function_name(CUfunction function);

/* rg_node_function: what a kernel node launches, which is named in one of two ways. */
static inline CUfunction rg_node_function(const CUDA_KERNEL_NODE_PARAMS *p)
{
    return p->func ? p->func : (CUfunction)p->kern;
}

/*
 * rg_functions_forget: some kernels go, with their module, library or context, and whose handles the driver will give out again is not
 * known: what any handle stands for is asked anew as it is launched next.
 */
void rg_functions_forget(void);

/* rg_name_communicates: whether a kernel of this name is one of NCCL's or NVSHMEM's. */
bool rg_name_communicates(const char *name);

/* What an executable graph consists of, as far as its launches are concerned. */
typedef struct {
    bool communicates; /* holds communication kernels */
    uint64_t hash;     /* of its kernels' names and shapes in node order; 0 not known */
    char label[128];   /* "graph of 50 kernels from gemm" */
} rg_graph_facts;

/*
 * rg_graph_note: an executable graph has been made of `graph`, with these flags (CUDA_GRAPH_INSTANTIATE_FLAG_...): remembers
 * what it consists of, and a clone of the graph where the gate may want to cut it. rg_graph_known: what it consists of, or
 * nothing (all zero).
 */
void rg_graph_note(CUgraphExec exec, CUgraph graph, unsigned long long flags);
void rg_graph_known(CUgraphExec exec, rg_graph_facts *facts);

/*
 * rg_graph_launch: launches the graph in pieces, if this is to be (`mode`: the member's; then true, and the result of the program's call in `result`).
 * Else the caller launches it whole, as if this had not been called.
 */
bool rg_graph_launch(rg_member *member, uint32_t mode, CUgraphExec exec, CUstream stream, rg_track *track, CUresult *result);

/* rg_graph_passes: the graph is about to be launched whole, while some stream is captured or as nobody's work. */
void rg_graph_passes(CUgraphExec exec, CUstream stream);

/* rg_graph_changed: the program has changed the executable graph, and perhaps put what is in `graph` into it, or `function` (else NULL). What that is
 * is looked up for best-effort clients alone: others are not held, and some change a graph of thousands of nodes before each launch.
 * rg_graph_forget: it is about to be destroyed. */
void rg_graph_changed(CUgraphExec exec, CUgraph graph, CUfunction function);
void rg_graph_forget(CUgraphExec exec);

/* rg_graph_forget_context: the context (or every context of device `d`) goes, and what was made in it. */
void rg_graph_forget_context(CUcontext context, CUdevice d);

/* ---- duration.c: how long kernels take, learned by timing a few of them ---- */

struct rg_duration {
    _Atomic uint64_t key;         /* of function and shape; 0 free */
    _Atomic uint32_t duration_ns; /* estimate; 0 not known yet */
    _Atomic uint32_t seen;        /* launches, for the choice of samples */
    _Atomic bool communicates;    /* communication kernel, by its name or as NCCL launches it: never waits, never counts in flight */
    _Atomic bool graph;           /* it is of a graph */
    _Atomic uint32_t samples;     /* taken in */
    _Atomic uint32_t least_ns;    /* the shortest of them */
    _Atomic uint32_t price_ns;    /* fair: what a launch is charged: least_ns, once there are RG_SAMPLE_FIRST of them */
    _Atomic uint32_t charged;     /* fair: launches charged at that, be it 0, to the process itself; to its other clients: rg_duration_charged */
    _Atomic uint32_t kernel;      /* orion: 1 + place in the segment's kernels; 0: in no profile */
    _Atomic uint8_t doubt;        /* samples for which an estimate that came from the segment is doubted */
    _Atomic uint32_t shared;      /* 1 + index of its estimate in the segment; 0 none */
};
enum { RG_DURATIONS = 4096, RG_DURATION_PROBES = 8, RG_SAMPLE_FIRST = 4, RG_SAMPLE_EVERY = 256 };
/* A preemptible client is new for so many launches: some 80 steps of a training program, which may wait for the GPU seldom. */
enum { RG_SAMPLED_LAUNCHES = 65536 };
/* fair: the shortest sample is what counts, and beside clients that all have work most hold some of theirs. */
enum { RG_SAMPLE_FAIR = 16 };
extern rg_duration rg_durations[RG_DURATIONS];

/* rg_duration_key: of a kernel of this function and shape, or of a graph, in this process. */
static inline uint64_t rg_duration_key(uintptr_t function, rg_dims dims)
{
    return ((uint64_t)function * 0x9e3779b97f4a7c15u ^ rg_dims_hash(dims)) | 1;
}

/* rg_duration_add: slow half of rg_duration_of: enters a kernel that is new. */
RG_COLD rg_duration *rg_duration_add(uint64_t key);

/*
 * rg_duration_of: the entry of a kernel or graph. One probe where nothing collides. Looking
 * on where something does keeps kernels that share a place from evicting each other: 5 to 7 launches of a training step, and
 * up to 26, met a new entry each time without it (the recorded profiles, function addresses drawn at random).
 */
static RG_INLINE rg_duration *rg_duration_of(uint64_t key)
{
    for (uint32_t i = 0; i < RG_DURATION_PROBES; i++) {
        rg_duration *d = &rg_durations[((key >> 52) + i) % RG_DURATIONS];
        uint64_t found = atomic_load_explicit(&d->key, memory_order_relaxed);
        if (RG_LIKELY(found == key))
            return d;
        if (!found)
            break;
    }
    return rg_duration_add(key);
}

/*
 * rg_duration_first: what is to be known of a function or graph (`units`) at its first launch: does it communicate, and how long
 * has it taken before, in other clients of this program or earlier runs?
 */
RG_COLD void rg_duration_first(rg_duration *duration, const rg_track *track, enum rg_kind kind, uintptr_t units, rg_dims dims);

/* rg_duration_launched: it is launched, not by the gate: counts that, and finds out what is to be known of it at first; how often it was before. */
uint32_t rg_duration_launched(rg_duration *duration, const rg_track *track, enum rg_kind kind, uintptr_t units, rg_dims dims);

/* rg_durations_beat: tells how much of its time a best-effort process's kernels are long (`long_part`). Agent thread only, once a second. */
void rg_durations_beat(void);

/* rg_duration_reset: what is known under this key is of another kernel or graph, that had the same handle; `ns`: an estimate for
 * the new one, 0 if there is none. */
void rg_duration_reset(uint64_t key, uint32_t ns);

/* rg_durations_doubt: any but those of graphs may be of another kernel by now: that is looked at when it is launched next. */
void rg_durations_doubt(void);

/* rg_duration_elsewhere: what the segment knows of a kernel's duration on the track's device; 0: nothing. */
uint32_t rg_duration_elsewhere(const rg_track *track, const char *name, rg_dims dims);

/* rg_durations_attach: called once while the process becomes a client. */
void rg_durations_attach(void);

/*
 * rg_sample_ungated: rg_sample_begin for a launch that does not pass the gate, of a kernel or graph that has too few samples yet;
 * finished ones are taken in, as nobody polls there. Only while the client is new (RG_SAMPLED_LAUNCHES).
 */
RG_COLD int rg_sample_ungated(rg_track *track, enum rg_kind kind, uintptr_t units, rg_dims dims);
/* rg_sample_stopped: the same as often as at the gate, for a client whose streams stop; `seen`: rg_duration_launched. */
int rg_sample_stopped(rg_track *track, rg_duration *duration, uint32_t seen);
/* rg_sample_begin: records the first of two timing events; returns the sample, or -1 when none is free. */
RG_COLD int rg_sample_begin(rg_track *track, rg_duration *duration);
/* rg_sample_end: records the second one after the launch; `ok`: the launch went out. */
RG_COLD void rg_sample_end(int sample, rg_track *track, bool ok);
/* rg_samples_poll: takes in the samples that have finished. */
void rg_samples_poll(void);
/* rg_samples_forget: the context (or every context of device `d`) goes, and its events with it. */
void rg_samples_forget(CUcontext context, CUdevice d);

/* ---- channel.c: this process's queues to the GPU ---- */

enum { RG_CHANNELS = 64, RG_CHANNEL_GROUPS = 8 };

/* The compute channels of this process on one device, as of `generation`. */
typedef struct {
    bool simulated;
    unsigned ordinal;    /* simulated: the driver's number of the device */
    int fd;              /* the rest: handles of the driver's resource manager */
    uint32_t generation;
    uint32_t subdevice_client, subdevice;
    uint32_t groups, group_client[RG_CHANNEL_GROUPS], group[RG_CHANNEL_GROUPS];
    uint32_t channels, client[RG_CHANNELS], channel[RG_CHANNELS];
} rg_channels;

/* rg_channel_saw: this process has made this ioctl, successfully. */
void rg_channel_saw(int fd, unsigned long request, const void *argument);

/* rg_channel_off: no more of this in this process. */
void rg_channel_off(void);

/* rg_channel_generation: changes whenever channels come or go. */
uint32_t rg_channel_generation(void);

/* rg_channels_find: the channels on the GPU with this UUID (simulated: with this number). None: it has no context there at the moment.
 * Foreign: they are not this process's own to control (MPS), or not known. */
enum rg_found { RG_CHANNELS_NONE, RG_CHANNELS_FOREIGN, RG_CHANNELS_FOUND };
enum rg_found rg_channels_find(rg_channels *channels, const char uuid[16], CUdevice ordinal);

/* rg_channels_slice: how long these channels keep the GPU once others have work. This and the next two: 0, or -1 if refused. */
int rg_channels_slice(const rg_channels *channels, uint64_t slice_us);

/* rg_channels_suspend: off the GPU, in the middle of a kernel if need be; returns when they are. rg_channels_resume: back again;
 * harmless if they were. */
int rg_channels_suspend(const rg_channels *channels);
int rg_channels_resume(const rg_channels *channels);

/* ---- preempt.c ---- */

/* rg_preempt_beat: called by the agent now and then: time slices, and `rg.preemptible`. rg_preempt_stop: leaves the channels enabled.
 * rg_preempt_end: called by the agent when it ends: the slices are the driver's again, for a program that goes on without Rigel. */
void rg_preempt_beat(void);
void rg_preempt_stop(void);
void rg_preempt_end(void);

/* rg_preempt_wake: class or pause of a client here has changed: it is looked again whether to be off the GPU. rg_preempt_settle: waits,
 * 200 ms at most, until this process is on it. */
void rg_preempt_wake(void);
void rg_preempt_settle(void);

/* ---- stop.c: stops in this process's streams ---- */

/*
 * rg_stops_ready: whether this process's streams on a device can have stops; the agent asks, before any launch puts one in. Later: not yet, or
 * not at the moment.
 */
enum rg_stops { RG_STOPS_NONE, RG_STOPS_LATER, RG_STOPS_READY };
enum rg_stops rg_stops_ready(uint32_t device);

/* rg_stops_there: whether they can now. */
bool rg_stops_there(uint32_t device);

/* rg_stops_set: whether the streams stop. False: there are no stops to stop at. `tell`: the simulated GPU too, which takes its lock. */
bool rg_stops_set(uint32_t device, bool stopped, bool tell);

/* rg_stops_arm: whether high clients may stop them by themselves (rg_stop_best_effort), where they can. When not, they go on. */
void rg_stops_arm(uint32_t device, bool armed);

/* rg_stops_taken: they stop at present, whoever has said so. rg_stops_long: what no stop ends soon runs, of this process; where the GPU cannot
 * tell, it may, or did lately. */
bool rg_stops_taken(uint32_t device);
bool rg_stops_long(uint32_t device);

/* rg_stops_began: from now on launches have stops; what is queued has none, and nobody tells whether that is long. */
void rg_stops_began(uint32_t device);

/*
 * rg_stop_before: of a launch (kernel or graph) in a client whose streams stop: puts a stop in front of it if it is time for one, and has the
 * GPU tell when it begins if it is long. Returns what rg_stop_after is to end after the launch, or -1: nothing. That is a sample, as of
 * rg_sample_ungated (how long kernels take has to be known here), or RG_STOP_LONG besides, or both.
 */
enum { RG_STOP_NO_SAMPLE = 0xff, RG_STOP_LONG = 0x100 };
int rg_stop_before(rg_track *track, enum rg_kind kind, uintptr_t units, rg_dims dims);

/* rg_stop_after: after the launch, what is to be ended: that, or a sample alone. */
RG_COLD void rg_stop_after(int what, rg_track *track, bool ok);

/* rg_stops_new_page: a page for words that the GPU looks at (NULL: there is none), which stays the same beside a child of fork, that has no use for
 * it. rg_stops_register: in the current context, with which that goes; where the GPU finds it, in `at`. */
void *rg_stops_new_page(void);
CUresult rg_stops_register(void *page, CUdeviceptr *at);

/* rg_stops_context: the one context that has streams on the device; NULL: none, or several. */
CUcontext rg_stops_context(uint32_t device, bool *several);

/* rg_stops_forget_context: the context (or every context of device `d`) goes. */
void rg_stops_forget_context(CUcontext context, CUdevice d);

/* ---- stay.c: the GPU stays with a high client's process between requests, and comes over as one begins ---- */

/*
 * rg_stay_begin: the program is about to wait for all that it has launched, on this stream last: once that is done the GPU stays, for
 * `stay_us`, if requests often follow one another at once. If another one begins meanwhile (rg_stay_coming) it stays
 * until that has begun and is launched as a whole: rg_stay_launches is told of its first launch, before it, rg_stay_begin of its last.
 * rg_stay_ahead: one begins with this, on this stream: an input that takes long, or the first of several launches: the GPU comes over before that, and stays
 * likewise.
 * rg_stay_announced: one of this client's is coming, on one of these devices, as the program says: likewise, for RG_STAY_ANNOUNCED times `stay_us`, and
 * best-effort streams stop meanwhile. rg_stay_seen: one is seen coming, on this device: likewise, for `wait_us`. Whether anything was done for it.
 * rg_stay_follows: another one of this client's has come amid the one under way there, and begins within `after_us` of its end, as is seen: best-effort
 * streams do not go on between the two, until it is announced at that end.
 * rg_stay_all_launched: all of a request is queued; or its input is waited for by itself.
 * rg_stay_done: one of this client's is done, whoever found out.
 * rg_stay_ends: there is nothing to stay for.
 */
RG_COLD void rg_stay_begin(const rg_track *track);
RG_COLD void rg_stay_ahead(const rg_track *track, enum rg_kind kind, uint64_t units);
RG_COLD void rg_stay_announced(rg_member *m, uint32_t devices);
RG_COLD bool rg_stay_seen(rg_member *m, uint32_t device, uint32_t wait_us);
RG_COLD void rg_stay_follows(const rg_member *m, uint32_t device, uint32_t after_us);
RG_COLD void rg_stay_all_launched(uint32_t device);
RG_COLD void rg_stay_done(const rg_member *m, uint32_t device, uint64_t now_ns);
RG_COLD void rg_stay_coming(uint32_t device, uint64_t now_ns);
RG_COLD void rg_stay_launches(const rg_track *track);
RG_COLD void rg_stay_ends(void);

/* For requests that take longer to launch, mostly kernel by kernel, the GPU does not stay. */
#define RG_STAY_LAUNCH_NS 1000000u

/* For a request that is said to be coming it stays for so many times `stay_us`: where a host is busy, a server's own work before it takes 0.9 to 1.8 ms. */
enum { RG_STAY_ANNOUNCED = 6 };

/* rg_stay_allowed: bit per device: it may there, as was last found. */
uint32_t rg_stay_allowed(void);

/* rg_stay_beat: whether it may on the device, a high client's, if there is anybody beside; makes what it takes for that. Agent thread only. */
void rg_stay_beat(uint32_t device, bool allowed);

/* rg_stay_forget_context: the context (or every context of device `d`) goes. */
void rg_stay_forget_context(CUcontext context, CUdevice d);

/* ---- arrivals.c: requests are seen coming ---- */

/* rg_arrivals_told: the program says itself when requests are coming. */
void rg_arrivals_told(void);

/* rg_arrivals_beat: begins to look where that is of use, in two threads of its own. Agent thread only. rg_arrivals_stop: ends that. */
void rg_arrivals_beat(void);
void rg_arrivals_stop(void);

/* ---- agent.c ---- */

bool rg_agent_start(void);
void rg_agent_stop(void);

/* rg_agent_is_self: whether the calling thread is the agent. */
bool rg_agent_is_self(void);

/*
 * rg_agent_looks_often: whether the agent looks every quiet_us after a high client, not every 2 ms: where in the second before it was the
 * agent who found the client idle, RG_AGENT_OFTEN times for each time that the program itself did. A program that waits for its work has only
 * paused in the middle of a request when the agent finds it idle, as one does that loses its processor: were it looked at often then, one
 * whose launches are far apart just then would be taken for idle between any two (231 requests a second instead of 60, of ResNet-50 on an
 * H200's host whose processors others kept busy; looked at every 2 ms, its pauses were up to 1.2 a request). Called by the agent only.
 */
enum { RG_AGENT_OFTEN = 8 };
bool rg_agent_looks_often(rg_member *m, uint64_t now);

/*
 * rg_agent_lock: held by whoever uses a stream that is not its own thread's to use (the agent, the gate's flush), for a moment, and by
 * whoever begins a capture. rg_taking_away: how many calls that destroy a stream or a context are under way, which may wait for other
 * threads' work; nobody uses such a stream meanwhile. rg_agent_enter: whether it may be now, and then the lock is held.
 */
extern pthread_mutex_t rg_agent_lock;
extern _Atomic uint32_t rg_taking_away;

static inline bool rg_agent_enter(void)
{
    if (pthread_mutex_trylock(&rg_agent_lock) != 0)
        return false;
    if (!atomic_load(&rg_taking_away))
        return true;
    pthread_mutex_unlock(&rg_agent_lock);
    return false;
}

/* ---- memory.c: what is charged to this client, and given back ---- */

/* rg_memory_mark: a moment, to tell what was allocated before it from what came later. */
uint64_t rg_memory_mark(void);

/* rg_memory_forget_context: the context has been destroyed, and what was allocated in it before `mark` has gone with it. */
void rg_memory_forget_context(CUcontext context, uint64_t mark);

/* rg_memory_primary: the device's primary context; NULL if it is not active, or nothing is charged. */
CUcontext rg_memory_primary(CUdevice device);

/* rg_memory_tracked: allocations that are charged now. */
uint64_t rg_memory_tracked(void);

/* rg_memory_pools_kept: device memory that this process's memory pools keep though nobody uses it; rg_memory_pools_trim: lets them
 * give it back, and returns how much that was. */
uint64_t rg_memory_pools_kept(void);
uint64_t rg_memory_pools_trim(void);

/* rg_memory_beat: called by the agent now and then: says what the pools keep, and, in a best-effort client, gives it back if
 * somebody has asked (the header's `trim`). */
void rg_memory_beat(void);

/* ---- the state of the client ---- */

/* A best-effort client from which the GPU is taken away (preempt.c): its launches need not wait. While it is new, some are timed. Stoppable:
 * there are stops in its streams (stop.c); sliced: and its channels are its own, too. */
enum rg_preemptible { RG_NOT_PREEMPTIBLE = 0, RG_PREEMPTIBLE, RG_PREEMPTIBLE_NEW, RG_STOPPABLE_SLICED, RG_STOPPABLE };

typedef struct {
    /* What a launch reads, one cache line. */
    _Alignas(4096) _Atomic uint32_t mode; /* the first thing every hook reads: the modes of all its clients together */
    _Atomic uint32_t captures; /* streams being captured now */
    _Atomic uint32_t several;  /* some thread has entered a client of its own */
    _Atomic uint32_t stays;    /* bit per device: the GPU stays with this process until it launches again (stay.c) */
    _Atomic uint32_t stays_open; /* likewise: it has launched, and the GPU stays until that is all */
    rg_segment *segment;
    rg_client *slot;           /* the process's own */
    _Atomic uint32_t preemptible[RG_MAX_DEVICES]; /* enum rg_preemptible */
    _Atomic CUdevice ordinal[RG_MAX_DEVICES]; /* what this process calls a device of the segment, once it has a track there */
    int slot_index;
    rg_account *account;       /* of the process's memory */
    uint64_t program;          /* RIGEL_PROGRAM: whose kernels' durations this client shares */
    _Atomic bool set_priorities; /* policy other than none and fair */
    _Atomic bool steered;      /* some client has changed its class: streams that are new to us may have the former's priority */
    _Atomic uint32_t member_count;
    /* In the same page as what is above, with the tracks of the first streams. */
    _Alignas(64) _Atomic uint8_t index[RG_TRACK_INDEX]; /* hash of key -> 1 + position in tracks; 0 empty, 255 deleted */
    rg_track tracks[RG_MAX_TRACKS];
    rg_member members[RG_MAX_CLIENTS]; /* the first is the process */
    _Atomic uint32_t track_count;
    _Atomic uint32_t full;     /* a stream did not fit the table, and none has left it since */
    _Atomic uint32_t bypass;   /* enum rg_bypass */
} rg_client_state;
extern rg_client_state rg;

/* rg_stay_waits: before a call in which the driver waits for all of a context. */
static inline void rg_stay_waits(void)
{
    if (RG_UNLIKELY(atomic_load_explicit(&rg.stays, memory_order_relaxed) | atomic_load_explicit(&rg.stays_open, memory_order_relaxed)))
        rg_stay_ends();
}

/* rg_is_client: whether this process is a client, be it that its work goes past Rigel: for what has to be known for later all the same. */
static inline bool rg_is_client(void)
{
    /* Between the two another thread may begin or end a bypass: once the mode was bare, whether it was then says nothing. */
    return RG_LIKELY(atomic_load_explicit(&rg.mode, memory_order_relaxed) != RG_MODE_BARE) ||
           atomic_load_explicit(&rg.bypass, memory_order_relaxed) != RG_BYPASS_NONE;
}
#define RG_PROCESS (&rg.members[0])

/* rg_duration_charged: fair: how many launches of the kernel this client has been charged for at its price. */
extern _Atomic uint32_t rg_charged[RG_MAX_CLIENTS - 1][RG_DURATIONS]; /* by the other clients of the process, which most do not have */
static inline _Atomic uint32_t *rg_duration_charged(rg_duration *d, const rg_member *m)
{
    return RG_LIKELY(m == RG_PROCESS) ? &d->charged : &rg_charged[m - RG_PROCESS - 1][d - rg_durations];
}

/* Per-thread default stream: its address tells one thread's from another's. */
extern _Thread_local char rg_thread_mark __attribute__((tls_model("initial-exec")));

/* How many calls of NCCL's this thread is inside of (collective.c): what it launches there communicates, whatever its name. */
extern _Thread_local uint32_t rg_communicating __attribute__((tls_model("initial-exec")));

/* rg_track_key: what a stream is known by: its handle; NULL and the two special handles, which mean another stream in each
 * context, by context too (asking for it took 7 ns on an H200). */
uintptr_t rg_track_key_slow(CUstream stream);
static inline uintptr_t rg_track_key(CUstream stream)
{
    if (RG_LIKELY((uintptr_t)stream > 2))
        return (uintptr_t)stream;
    return rg_track_key_slow(stream);
}

static inline uint32_t rg_track_hash(uintptr_t key)
{
    return (uint32_t)((uint64_t)key * 0x9e3779b97f4a7c15u >> 54);
}

/* rg_track_find: the track with this key, or NULL. A few nanoseconds: one probe where nothing collides. */
static inline rg_track *rg_track_find(uintptr_t key)
{
    for (uint32_t i = rg_track_hash(key), n = 0; n < 16; i = (i + 1) % RG_TRACK_INDEX, n++) {
        uint8_t at = atomic_load_explicit(&rg.index[i], memory_order_acquire);
        if (at == 0)
            return NULL;
        if (at != 255 && atomic_load_explicit(&rg.tracks[at - 1].key, memory_order_relaxed) == key)
            return &rg.tracks[at - 1];
    }
    return NULL;
}

/* rg_track_of: the same of a stream, which is entered if it is new. The first probe is inline, and nothing else. */
static RG_INLINE rg_track *rg_track_of(CUstream stream)
{
    uintptr_t key = rg_track_key(stream);
    uint8_t place = (uint8_t)(atomic_load_explicit(&rg.index[rg_track_hash(key)], memory_order_acquire) - 1);
    if (RG_LIKELY(place < RG_MAX_TRACKS) &&
        RG_LIKELY(atomic_load_explicit(&rg.tracks[place].key, memory_order_relaxed) == key))
        return &rg.tracks[place];
    return rg_track_add(stream, key);
}

static inline rg_member *rg_track_member(const rg_track *t)
{
    return atomic_load_explicit(&t->member, memory_order_relaxed);
}

static inline uint32_t rg_track_device(const rg_track *t)
{
    return atomic_load_explicit(&t->device, memory_order_relaxed);
}

/* rg_gate_view: the numbers the policy decides on, for a launch that has not waited yet. */
static RG_INLINE rg_policy_view rg_gate_view(const rg_track *t)
{
    rg_settings *s = &rg.segment->settings;
    uint32_t device = rg_track_device(t);
    return (rg_policy_view){
        .policy = atomic_load_explicit(&s->shutdown, memory_order_relaxed)
                      ? RG_POLICY_NONE
                      : atomic_load_explicit(&s->policy, memory_order_relaxed),
        .best_effort = true,
        .high_busy = atomic_load_explicit(&rg.segment->devices[device].high_busy, memory_order_relaxed) != 0,
        .preemptible = atomic_load_explicit(&rg.preemptible[device], memory_order_relaxed) != 0,
        .inflight = atomic_load_explicit(&rg_track_member(t)->inflight[device], memory_order_relaxed),
        .inflight_limit = atomic_load_explicit(&s->inflight, memory_order_relaxed) * RG_POLICY_LAUNCH,
        .corun_limit = atomic_load_explicit(&s->corun, memory_order_relaxed) * RG_POLICY_LAUNCH,
        .hold = RG_UNLIKELY(atomic_load_explicit(&s->hold_until_ms, memory_order_relaxed)) &&
                rg_hold_left_ms(s, rg_now_ns()) != 0,
        .starvation_ns = 1,
    };
}

/* What rg_work_begin hands to rg_work_end. */
typedef struct {
    rg_track *track; /* NULL: nothing more to do */
    uint32_t weight;
    uint32_t batch; /* unfinished work of the stream from which on an event is recorded */
    int sample;
    uint32_t mode; /* several clients: that of the one whose work it is, as it was begun with */
} rg_work;

/*
 * rg_mark: the high half of launching: the track has work, and the device is busy (marked on the transition only).
 * The order pairs with rg_idle_check: the track is marked, then (a full barrier) `busy` is read; the checker clears `busy`,
 * then reads the tracks. One of the two sees the other.
 */
static inline bool rg_mark_begins(rg_member *m, rg_track *t)
{
    if (RG_UNLIKELY(atomic_load_explicit(&t->state, memory_order_relaxed) != RG_DIRTY)) {
        atomic_store_explicit(&t->state, RG_DIRTY, memory_order_seq_cst);
        if (RG_UNLIKELY(atomic_load_explicit(&m->period[rg_track_device(t)].draining, memory_order_seq_cst)))
            rg_drain_end(m, t->device);
    }
    return !atomic_load_explicit(&m->busy[rg_track_device(t)], memory_order_seq_cst);
}
static inline void rg_mark(rg_member *m, rg_track *t)
{
    if (RG_UNLIKELY(rg_mark_begins(m, t)))
        rg_busy_begin(m, t->device, 0);
}

/* rg_mark_work: the same by work that the program asks for: a busy period that begins with it is a request of its kind. */
static inline void rg_mark_work(rg_member *m, rg_track *t, enum rg_kind kind, uintptr_t units, rg_dims dims)
{
    if (RG_UNLIKELY(rg_mark_begins(m, t)))
        rg_busy_begin_with(m, t, kind, units, dims);
}

/* rg_work_pass: rg_work_begin for what the program did not ask for one by one: pieces of a graph, of which one is counted. */
static RG_INLINE rg_work rg_work_pass(rg_member *m, uint32_t mode, enum rg_kind kind, rg_track *t,
                                      uintptr_t units, rg_dims dims)
{
    rg_client *c = m->slot;
    rg_work work = {.track = NULL, .weight = RG_POLICY_LAUNCH, .sample = -1};
    if (RG_UNLIKELY(!t))
        return work;
    if (mode == RG_MODE_HIGH) {
        rg_mark_work(m, t, kind, units, dims);
        work.track = t;
        return work;
    }
    if (RG_UNLIKELY(mode & RG_MODE_PAUSED))
        rg_gate_paused(m, kind, units);
    if (RG_UNLIKELY(mode & RG_MODE_HIGH)) {
        rg_mark_work(m, t, kind, units, dims);
        work.track = t;
        work.weight = 0; /* what leaves early below only marks again, and counts for nothing */
        if (!(mode & RG_MODE_BEST_EFFORT)) {
            rg_gate_show(t, kind, units, dims);
            return work;
        }
    }
    uint32_t preemptible = atomic_load_explicit(&rg.preemptible[rg_track_device(t)], memory_order_relaxed);
    if (preemptible) {
        if (RG_UNLIKELY(preemptible >= RG_PREEMPTIBLE_NEW) && kind <= RG_GRAPH &&
            (work.sample = preemptible >= RG_STOPPABLE_SLICED ? rg_stop_before(t, kind, units, dims)
                                                              : rg_sample_ungated(t, kind, units, dims)) >= 0) {
            work.track = t;
            work.weight = 0;
        }
        return work;
    }
    rg_settings *s = &rg.segment->settings;
    if (kind > RG_GRAPH && units < atomic_load_explicit(&s->bulk_bytes, memory_order_relaxed))
        return work;
    rg_policy_view view = rg_gate_view(t);
    if (RG_UNLIKELY(view.policy == RG_POLICY_NONE))
        return work;
    rg_duration *d = NULL;
    uint32_t seen = 0;
    if (kind <= RG_GRAPH) {
        d = rg_duration_of(rg_duration_key(units, dims));
        seen = atomic_load_explicit(&d->seen, memory_order_relaxed);
        if (RG_UNLIKELY(seen == 0)) {
            rg_duration_first(d, t, kind, units, dims);
            if (view.policy == RG_POLICY_ORION && kind == RG_LAUNCH)
                rg_gate_profile(d, (CUfunction)units, dims);
        }
        atomic_store_explicit(&d->seen, seen + 1, memory_order_relaxed);
        if (RG_UNLIKELY(atomic_load_explicit(&d->communicates, memory_order_relaxed))) {
            atomic_fetch_add_explicit(&c->passed, 1, memory_order_relaxed);
            return work;
        }
    }
    enum rg_verdict v = RG_UNLIKELY(view.policy > RG_POLICY_SLO) ? rg_gate_decide(t, d) : rg_policy_decide_inline(&view);
    if (RG_UNLIKELY(v != RG_PASS))
        rg_gate_wait(t, v, d);
    if (!view.inflight_limit && !view.corun_limit && view.policy <= RG_POLICY_SLO)
        return work; /* nobody asks how much is in flight */
    work.weight = RG_POLICY_LAUNCH;
    work.batch = rg_policy_batch(&view);
    if (d) {
        uint32_t every = RG_UNLIKELY(view.policy == RG_POLICY_FAIR) ? RG_SAMPLE_FAIR : RG_SAMPLE_EVERY;
        if (RG_UNLIKELY(seen < RG_SAMPLE_FIRST || (seen & (every - 1)) == 0))
            work.sample = rg_sample_begin(t, d);
        work.weight = rg_policy_weight(atomic_load_explicit(&d->duration_ns, memory_order_relaxed),
                                       atomic_load_explicit(&s->unit_us, memory_order_relaxed) * 1000ull);
    }
    if (RG_UNLIKELY(view.policy > RG_POLICY_SLO))
        work.weight = rg_gate_charge(m, t, d, view.policy, work.weight);
    else
        atomic_fetch_add_explicit(&m->inflight[rg_track_device(t)], work.weight, memory_order_relaxed);
    work.track = t;
    return work;
}

/*
 * rg_work_begin: called before work is queued, in a client, outside captures.
 * High: counts and marks. Best-effort (under fair: everybody): one policy decision on a handful of loads; waits in gate.c if
 * it says so.
 */
static RG_INLINE rg_work rg_work_begin(rg_member *m, uint32_t mode, enum rg_kind kind, rg_track *t,
                                       uintptr_t units, rg_dims dims)
{
    rg_client *c = m->slot;
    if (kind == RG_LAUNCH && RG_UNLIKELY(!rg_this.counts))
        rg_launches_take();
    if (kind == RG_LAUNCH && m == RG_PROCESS && RG_LIKELY(rg_this.launches)) {
        uint64_t n = atomic_load_explicit(rg_this.launches, memory_order_relaxed);
        atomic_store_explicit(rg_this.launches, n + 1, memory_order_relaxed);
        return rg_work_pass(m, mode, kind, t, units, dims);
    }
    _Atomic uint64_t *counter = kind == RG_LAUNCH   ? &c->launches[0]
                                : kind == RG_GRAPH  ? &c->graph_launches
                                : kind == RG_MEMSET ? &c->memsets
                                                    : &c->copies;
    atomic_fetch_add_explicit(counter, 1, memory_order_relaxed);
    return rg_work_pass(m, mode, kind, t, units, dims);
}

/*
 * rg_work_depth: weight of the launches of this client on that device that are not known to be finished, with this one; 0 where the gate
 * does not count them, as of a high client, or one that can be taken off the GPU: what is left from when it did says nothing then.
 */
static RG_INLINE uint64_t rg_work_depth(rg_member *m, rg_work work)
{
    return work.batch ? atomic_load_explicit(&m->inflight[rg_track_device(work.track)], memory_order_relaxed) : 0;
}

/* rg_work_end: called after work was queued (`ok`) or refused by the driver. */
static RG_INLINE void rg_work_end(rg_member *m, uint32_t mode, enum rg_kind kind, rg_work work,
                                  bool ok)
{
    rg_track *t = work.track;
    if (mode != RG_MODE_HIGH && RG_UNLIKELY(rg_this.held))
        rg_gate_called();
    if (RG_UNLIKELY(!t))
        return;
    if (mode == RG_MODE_HIGH) {
        /* A call that took long (lazy loading) may have been overtaken by the agent, which saw the stream empty. */
        if (ok && kind != RG_COPYWAIT)
            rg_mark(m, t);
        return;
    }
    if (RG_UNLIKELY(mode & RG_MODE_HIGH) && ok && kind != RG_COPYWAIT)
        rg_mark(m, t);
    if (RG_UNLIKELY(work.sample >= 0))
        rg_stop_after(work.sample, t, ok);
    if (RG_UNLIKELY(!work.weight))
        return;
    /* Of a stream that has become another client's meanwhile what this one launched counts as done (rg_track_for). */
    if (RG_UNLIKELY(!ok) || RG_UNLIKELY(rg_track_member(t) != m)) {
        rg_retire(m, t->device, work.weight);
        return;
    }
    uint32_t unbatched = atomic_fetch_add_explicit(&t->unbatched, work.weight, memory_order_relaxed) + work.weight;
    /* Nobody else can record on a per-thread stream: its launches are covered one by one. */
    if (RG_UNLIKELY(unbatched >= work.batch || t->owner))
        rg_batch_record(t);
}

/*
 * The same in a process of several clients, for the one whose work it is (member.c). rg_work_member: that one, or NULL where the work is
 * nobody's. Elsewhere the process is its only client. Work ends as what it was begun as, whatever has become of its client meanwhile.
 */
rg_work rg_work_several_begin(rg_member *m, enum rg_kind kind, rg_track *t, uintptr_t units, rg_dims dims);
void rg_work_several_end(rg_member *m, enum rg_kind kind, rg_work work, bool ok);
rg_member *rg_work_member(CUstream stream);

/*
 * rg_ahead: asks for the cache lines that queueing work will touch, all at once. Between two launches a program uses enough memory that
 * most of ours is in no near cache and in no TLB; without this they are waited for one after the other, since every atomic addition waits
 * for what came before it (bun run bench:hotpath --cold). rg_launch_ahead: of a kernel or graph, which is known by more.
 */
static RG_INLINE void rg_ahead(uint32_t operation, void *const *real)
{
    RG_AHEAD_TO_WRITE(rg_this.row);
    RG_AHEAD_TO_WRITE((uintptr_t)rg_this.calls + offsetof(rg_own_calls, count) + operation * sizeof(uint64_t)); /* it may be NULL */
    RG_AHEAD_TO_WRITE(&rg.slot->launches); /* `records` is in the same line */
    RG_AHEAD(&rg.segment->settings);
    RG_AHEAD_TO_WRITE(RG_PROCESS);
    RG_AHEAD(real);
}
static RG_INLINE void rg_launch_ahead(uint32_t mode, uintptr_t units, rg_dims dims, void *const *real, uint32_t operation)
{
    rg_ahead(operation, real);
    RG_AHEAD(rg_name_entry_of(units));
    if (mode & RG_MODE_BEST_EFFORT) {
        RG_AHEAD_TO_WRITE(&rg_durations[(rg_duration_key(units, dims) >> 52) % RG_DURATIONS]);
        RG_AHEAD(&rg.segment->devices[0].high_busy);
    }
}

/* rg_launch_note: on what this thread works, and what it launches if that has a name. Returns the marks of its record. */
static RG_INLINE uint64_t rg_launch_note(rg_thread *row, const rg_track *t, enum rg_kind kind, uint32_t name, uint32_t operation)
{
    uint64_t n = atomic_load_explicit(&row->launches, memory_order_relaxed);
    atomic_store_explicit(&row->launches, n + 1, memory_order_relaxed);
    if (kind <= RG_GRAPH)
        atomic_store_explicit(&row->kernel, name, memory_order_relaxed);
    if (RG_UNLIKELY(!t))
        return 0;
    uint32_t serial = atomic_load_explicit(&t->serial, memory_order_relaxed);
    if (RG_UNLIKELY(atomic_load_explicit(&row->track, memory_order_relaxed) != serial)) {
        atomic_store_explicit(&row->device, atomic_load_explicit(&t->device, memory_order_relaxed) + 1, memory_order_relaxed);
        atomic_store_explicit(&row->stream, (uintptr_t)t->stream, memory_order_relaxed);
        atomic_store_explicit(&row->client, (uint32_t)rg_track_member(t)->slot_index + 1, memory_order_relaxed);
        atomic_store_explicit(&row->track, serial, memory_order_relaxed);
        rg_this.epoch = 0; /* what the row says of the stream is this one's now */
        rg_context_turned(operation, t);
    }
    return (uint64_t)(serial & 0xff) << 38;
}

/*
 * rg_again: notes a launch of a thread of a high client that has launched on the same stream before, with nothing changed since
 * (rg_is_again): then its stream is marked, its client busy, and it is known what is to be noted. Returns its place among the records.
 * Between two launches a program uses so much memory that what counts here is in how many cache lines code and data are: 9 of code and 7 of
 * data, of 20 and 14 of a launch that looks at everything. So its calls are counted later (rg_again_count), and of RG_TIMED launches one
 * reads the clock; the row says of them together what came before.
 * `epoch` is the process's before it. rg_again_ends: it has been called; true if nothing has changed meanwhile either, and the agent has not
 * looked at the clock. Else rg_again_late.
 */
enum { RG_TIMED = 4 };
static RG_INLINE bool rg_is_again(uint64_t epoch, CUstream stream)
{
    return RG_LIKELY(rg_this.epoch / RG_EPOCH == epoch / RG_EPOCH + 1) && RG_LIKELY(rg_this.stream == (uintptr_t)stream);
}

/* rg_again_timed: one of RG_TIMED, and the first after another operation or a beat of the agent's. */
void rg_again_timed(uint32_t operation);

static RG_INLINE uint64_t rg_again(uint64_t epoch, uint32_t operation, uintptr_t function, void *const *real)
{
    rg_thread *row = rg_this.row;
    RG_AHEAD_TO_WRITE(row);
    RG_AHEAD_TO_WRITE(rg_this.launches);
    RG_AHEAD(real);
    uint32_t name = rg_name_of(false, function);
    if (RG_UNLIKELY(atomic_load_explicit(&row->doing, memory_order_relaxed) != operation) || !rg_this.untimed ||
        RG_UNLIKELY(rg_this.epoch != epoch + RG_EPOCH)) {
        rg_this.epoch = epoch + RG_EPOCH;
        rg_again_timed(operation);
    } else {
        rg_this.untimed--;
    }
    uint64_t n = atomic_load_explicit(rg_this.launches, memory_order_relaxed);
    atomic_store_explicit(rg_this.launches, n + 1, memory_order_relaxed);
    n = atomic_load_explicit(&row->launches, memory_order_relaxed);
    atomic_store_explicit(&row->launches, n + 1, memory_order_relaxed);
    atomic_store_explicit(&row->kernel, name, memory_order_relaxed);
    atomic_store_explicit(&row->doing, operation | RG_DOING, memory_order_release);
    return rg_record_next(operation, RG_TRACE_launch, rg_this.who, name, atomic_load_explicit(&row->since_tick, memory_order_relaxed), 0);
}

static RG_INLINE bool rg_again_ends(uint32_t operation, uint64_t epoch)
{
    atomic_store_explicit(&rg_this.row->doing, operation, memory_order_relaxed);
    return RG_LIKELY(epoch == atomic_load_explicit(&rg_rec.epoch, memory_order_relaxed));
}
RG_COLD CUresult rg_again_late(uint32_t operation, CUresult result, CUstream stream, uint64_t epoch, uint64_t record);

/* rg_again_begin: from here on the thread's launches are not among its calls. */
static inline void rg_again_begin(uint32_t operation)
{
    uint64_t n = atomic_load_explicit(&rg_this.row->launches, memory_order_relaxed);
    atomic_store_explicit(&rg_this.calls->again, operation, memory_order_relaxed);
    atomic_store_explicit(&rg_this.calls->from, 1 + n, memory_order_release);
    rg_this.uncounted = true;
}

/*
 * rg_again_next: the thread's next launch on this stream may go by rg_again, as far as it depends on this one, begun in `epoch`. In a process
 * that uses several devices not on the NULL stream, whose meaning a call without a hook might change.
 */
static RG_INLINE void rg_again_next(uint64_t epoch, const rg_op *op, CUstream stream, const rg_track *t, uint64_t marks)
{
    uint32_t devices = atomic_load_explicit(&rg.slot->devices, memory_order_relaxed);
    bool may = t && op->on && !op->ranged && !(op->outer & RG_DOING) && rg_rec.processor && rg_this.launches &&
               ((uintptr_t)stream > 2 || !(devices & (devices - 1)));
    rg_this.epoch = may ? epoch + RG_EPOCH : 0;
    rg_this.untimed = RG_TIMED - 1;
    if (may)
        rg_again_begin(op->operation);
    rg_this.stream = (uintptr_t)stream;
    rg_this.who = (uint64_t)atomic_load_explicit(&op->row->tid, memory_order_relaxed) << 16 | marks;
}

#endif
