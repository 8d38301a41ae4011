/*
 * hooks.c: the functions that stand in front of the driver's, made from hooks.def.
 *
 * Each calls the driver's own function exactly once, in the caller's thread, with the caller's arguments, and returns its
 * result unchanged (cuGetProcAddress: with hooked pointers replaced), but for a graph that goes out in pieces (graph.c) and under a memory
 * limit (memory.c). In a process that is no client (any more) that is all.
 */
#include "guard.h"
#include "record-client.h"
#include "rigel.h"

#ifdef RG_IN_PLACE
#include "bench/in-place.h"
#else
#define RG_MEASURED(symbol, kind, args) \
    { \
        return symbol##_hook args; \
    }
#endif

/* The mode for this call: bare also while any stream is captured, when nothing may be added to what the program does. */
static inline uint32_t mode_now(void)
{
    uint32_t mode = atomic_load_explicit(&rg.mode, memory_order_relaxed);
    return RG_UNLIKELY(atomic_load_explicit(&rg.captures, memory_order_relaxed)) ? RG_MODE_BARE : mode;
}

/* The same for work, which is counted as let through. */
static inline uint32_t mode_for_work(void)
{
    uint32_t mode = mode_now();
    if (RG_UNLIKELY(mode == RG_MODE_BARE) && atomic_load_explicit(&rg.mode, memory_order_relaxed) != RG_MODE_BARE)
        atomic_fetch_add_explicit(&rg.slot->passed, 1, memory_order_relaxed);
    return mode;
}

/* The mode where the process is its only client, else bare. */
static inline uint32_t mode_if_alone(void)
{
    return RG_UNLIKELY(atomic_load_explicit(&rg.several, memory_order_relaxed)) ? RG_MODE_BARE : mode_now();
}

static inline bool is_high(void)
{
    return mode_now() & RG_MODE_HIGH;
}

/* Whether calls pass through Rigel. What has to be known for later is followed also while they do not: rg_is_client. */
static inline bool is_client(void)
{
    return atomic_load_explicit(&rg.mode, memory_order_relaxed) != RG_MODE_BARE;
}

/* A graph goes out whole: something is captured, or the process's work goes past Rigel, or it is no client (any more). */
static inline void graph_passes(uintptr_t exec, CUstream stream)
{
    if (rg_is_client())
        rg_graph_passes((CUgraphExec)exec, stream);
}

/* The marks of a record about this stream. */
static inline uint64_t marks_of(CUstream stream, CUresult result)
{
    const rg_track *t = rg_track_find(rg_track_key(stream));
    return (t ? (uint64_t)(t - rg.tracks + 1) << 38 : 0) | (result != CUDA_SUCCESS ? RG_RECORD_FAILED : 0);
}

/* Bytes of a batch of copies. */
static inline size_t rg_sum(const size_t *sizes, size_t n)
{
    size_t sum = 0;
    for (size_t i = 0; sizes && i < n; i++)
        sum += sizes[i];
    return sum;
}

static inline size_t rg_sum_boxes(const CUDA_MEMCPY3D_BATCH_OP *boxes, size_t n)
{
    size_t sum = 0;
    for (size_t i = 0; boxes && i < n; i++)
        sum += boxes[i].width * boxes[i].height * boxes[i].depth;
    return sum;
}

/* Bytes to be decompressed to; or from, where that is not said. */
static inline size_t rg_sum_parts(const CUmemDecompressParams *parts, size_t n)
{
    size_t sum = 0;
    for (size_t i = 0; parts && i < n; i++)
        sum += parts[i].dstNumBytes ? parts[i].dstNumBytes : parts[i].srcNumBytes;
    return sum;
}

/* Where device memory is: CUDA's number of the device; -1 of other memory. */
static int device_of(CUdeviceptr p)
{
    int type = 0, device = -1;
    return rg_real.cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, p) == CUDA_SUCCESS && type == CU_MEMORYTYPE_DEVICE &&
                   rg_real.cuPointerGetAttribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, p) == CUDA_SUCCESS
               ? device
               : -1;
}

/* Whether a copy goes from one device to another, of those that are large enough for the gate to stand in front of them. */
static bool rg_between(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
    if (bytes < atomic_load_explicit(&rg.segment->settings.bulk_bytes, memory_order_relaxed) || !rg_real.cuPointerGetAttribute)
        return false;
    int target = device_of(to), source = device_of(from);
    return target >= 0 && source >= 0 && target != source;
}

/* Whether any copy of a batch does. */
static bool rg_any_between(const CUdeviceptr *to, const CUdeviceptr *from, const size_t *sizes, size_t n)
{
    size_t bytes = rg_sum(sizes, n);
    for (size_t i = 0; to && from && i < n; i++)
        if (rg_between(to[i], from[i], bytes))
            return true;
    return false;
}

static bool rg_any_box_between(const CUDA_MEMCPY3D_BATCH_OP *boxes, size_t n)
{
    size_t bytes = rg_sum_boxes(boxes, n);
    for (size_t i = 0; boxes && i < n; i++)
        if (boxes[i].dst.type == CU_MEMCPY_OPERAND_TYPE_POINTER && boxes[i].src.type == CU_MEMCPY_OPERAND_TYPE_POINTER &&
            rg_between(boxes[i].dst.op.ptr.ptr, boxes[i].src.op.ptr.ptr, bytes))
            return true;
    return false;
}

/* Whether an end of a box is given by a pointer that may be one to device memory. */
static inline bool rg_is_pointer(int memory_type)
{
    return memory_type == CU_MEMORYTYPE_DEVICE || memory_type == CU_MEMORYTYPE_UNIFIED;
}

/* Whether a box may come from host memory, to the device's. */
static inline bool is_input(int from, int to)
{
    return (from == CU_MEMORYTYPE_HOST || from == CU_MEMORYTYPE_UNIFIED) && to != CU_MEMORYTYPE_HOST;
}

/* The kind of a record for the table's KIND. */
#define RG_TRACED_LAUNCH RG_TRACE_launch
#define RG_TRACED_GRAPH RG_TRACE_graph

/* The table's SHAPE: grid and block, or 0 for work that has none. */
#define RG_DIMS(SHAPE) _Generic((SHAPE), rg_dims: (SHAPE), int: RG_DIMS_NONE)

/* The table's SHARED, where a row has one. */
#define RG_SHARED(...) RG_SHARED_(__VA_ARGS__ __VA_OPT__(, ) 0, 0)
#define RG_SHARED_(first, ...) (first)

/* A list in parentheses, without them. */
#define RG_LIST(...) __VA_ARGS__

/* A thread that goes on (rg_again) looks at the clock, and at its places for records: it is in another operation, as of now. */
static RG_INLINE void again_clock(rg_thread *row)
{
    uint32_t before = atomic_load_explicit(&row->doing, memory_order_relaxed) & ~RG_DOING;
    atomic_store_explicit(&row->before, before, memory_order_relaxed);
    atomic_store_explicit(&row->before_tick, atomic_load_explicit(&row->since_tick, memory_order_relaxed), memory_order_relaxed);
    atomic_store_explicit(&row->since_tick, rg_processor_tick(), memory_order_relaxed);
    rg_record_catch_up();
}

void rg_again_timed(uint32_t operation)
{
    rg_thread *row = rg_this.row;
    uint32_t before = atomic_load_explicit(&row->doing, memory_order_relaxed) & ~RG_DOING;
    if (rg_this.uncounted && before != operation)
        rg_again_count();
    if (!rg_this.uncounted)
        rg_again_begin(operation);
    again_clock(row);
    rg_this.untimed = RG_TIMED - 1;
}

/*
 * A launch: of a high client's thread that goes on with its stream, which is most of its launches and next to nothing (rg_again); else made
 * up to three times, of a process that is one high client, or one best-effort one, which is known then and leaves little of it, and all
 * else (SYMBOL_as with what is so now). That is 8 ns of 19 (bun run bench:hotpath). Launches of a process that is no client, or whose work
 * goes past Rigel, leave at once: who measures by rigel_bypass_begin does not see what is left.
 */
#define RG_LAUNCHES(symbol, KIND, params, args, STREAM, UNITS, SHAPE, ...) \
    static RG_INLINE CUresult symbol##_as(uint64_t epoch_, uint32_t mode, bool several_, RG_LIST params) \
    { \
        if (mode == RG_MODE_BARE) { \
            if (RG_##KIND == RG_GRAPH) \
                graph_passes((uintptr_t)(UNITS), STREAM); \
            return RG_CALL(symbol, args); \
        } \
        rg_launch_ahead(mode, (uintptr_t)(UNITS), RG_DIMS(SHAPE), &rg_real.hooked[RG_HOOK_##symbol], RG_OP_##symbol); \
        bool recorded_ = mode & RG_MODE_RECORDED; \
        mode &= ~(uint32_t)RG_MODE_RECORDED; \
        CUstream stream_ = STREAM; \
        uintptr_t units_ = (uintptr_t)(UNITS); \
        rg_member *member_ = several_ ? rg_work_member(stream_) : RG_PROCESS; \
        if (several_ && !member_) { \
            if (RG_##KIND == RG_GRAPH) \
                graph_passes(units_, stream_); \
            return RG_CALL(symbol, args); \
        } \
        rg_track *track_ = several_ ? rg_track_for(stream_, member_) : rg_track_of(stream_); \
        CUresult cut_; \
        if (RG_##KIND == RG_GRAPH && \
            rg_graph_launch(member_, recorded_ ? RG_MODE_BARE : several_ ? atomic_load(&member_->mode) : mode, \
                            (CUgraphExec)units_, stream_, track_, &cut_)) { \
            if (RG_UNLIKELY(cut_ != CUDA_SUCCESS)) { \
                rg_guard_driver_failed(#symbol, cut_); \
                rg_context_refused(RG_OP_##symbol, cut_, stream_, NULL); \
            } \
            return cut_; \
        } \
        rg_work work_ = several_ ? rg_work_several_begin(member_, RG_##KIND, track_, units_, RG_DIMS(SHAPE)) \
                                 : rg_work_begin(RG_PROCESS, mode, RG_##KIND, track_, units_, RG_DIMS(SHAPE)); \
        uint32_t name_ = rg_name_of(RG_##KIND == RG_GRAPH, units_); \
        rg_op op_ = rg_op_begin(RG_OP_##symbol, false); \
        uint64_t marks_ = rg_launch_note(op_.row, track_, RG_##KIND, name_, RG_OP_##symbol); \
        rg_record_what what_; \
        if (RG_UNLIKELY(recorded_)) { \
            what_ = (rg_record_what){RG_##KIND, stream_, units_, RG_DIMS(SHAPE), RG_SHARED(__VA_ARGS__), #symbol}; \
            rg_record_begin(&what_); \
        } \
        uint64_t noted_ = rg_op_note(&op_, RG_TRACED_##KIND, marks_, name_ | rg_work_depth(member_, work_) << 16); \
        if (RG_##KIND == RG_LAUNCH && mode == RG_MODE_HIGH && !several_ && !recorded_) \
            rg_again_next(epoch_, &op_, stream_, track_, marks_); \
        if (mode != RG_MODE_BEST_EFFORT && RG_UNLIKELY(atomic_load_explicit(&rg.stays, memory_order_relaxed))) \
            rg_stay_launches(track_); \
        CUresult result_ = RG_CALL(symbol, args); \
        if (RG_UNLIKELY(recorded_)) \
            rg_record_end(&what_, result_ == CUDA_SUCCESS); \
        rg_op_done(&op_, noted_, result_ != CUDA_SUCCESS); \
        if (several_) \
            rg_work_several_end(member_, RG_##KIND, work_, result_ == CUDA_SUCCESS); \
        else \
            rg_work_end(RG_PROCESS, mode, RG_##KIND, work_, result_ == CUDA_SUCCESS); \
        if (RG_UNLIKELY(result_ != CUDA_SUCCESS)) { \
            rg_guard_driver_failed(#symbol, result_); \
            rg_context_refused(RG_OP_##symbol, result_, stream_, NULL); \
        } \
        return result_; \
    } \
    static __attribute__((noinline)) CUresult symbol##_else params \
    { \
        uint64_t epoch = atomic_load(&rg_rec.epoch); \
        uint32_t mode = mode_for_work(); \
        return symbol##_as(epoch, mode, RG_UNLIKELY(atomic_load_explicit(&rg.several, memory_order_relaxed)), RG_LIST args); \
    } \
    static RG_INLINE CUresult symbol##_hook params \
    { \
        uint64_t epoch = atomic_load_explicit(&rg_rec.epoch, memory_order_acquire); \
        if (RG_##KIND == RG_LAUNCH && rg_is_again(epoch, STREAM)) { \
            uint64_t noted_ = rg_again(epoch, RG_OP_##symbol, (uintptr_t)(UNITS), &rg_real.hooked[RG_HOOK_##symbol]); \
            CUresult result_ = RG_CALL(symbol, args); \
            bool ends_ = rg_again_ends(RG_OP_##symbol, epoch); \
            if (RG_UNLIKELY(!ends_ || result_ != CUDA_SUCCESS)) \
                return rg_again_late(RG_OP_##symbol, result_, STREAM, epoch, noted_); \
            return result_; \
        } \
        uint32_t mode = mode_if_alone(); \
        if (RG_LIKELY(mode == RG_MODE_HIGH)) \
            return symbol##_as(epoch, RG_MODE_HIGH, false, RG_LIST args); \
        if (RG_LIKELY(mode == RG_MODE_BEST_EFFORT)) \
            return symbol##_as(epoch, RG_MODE_BEST_EFFORT, false, RG_LIST args); \
        if (RG_##KIND == RG_LAUNCH && !is_client()) \
            return RG_CALL(symbol, args); \
        return symbol##_else args; \
    } \
    CUresult symbol params RG_MEASURED(symbol, RG_##KIND, args)

/*
 * A copy or memset. A program makes a few in a request, of several kinds: each with code of its own, that would come from far caches
 * every time. So all of them share these two, round the driver's function.
 */
typedef struct {
    enum rg_kind kind;
    uint32_t mode;      /* of the call; without RG_MODE_RECORDED */
    bool several, recorded;
    bool within;        /* a copy that does not come from host memory */
    bool may_wait;      /* a high client's copy: with pageable memory it may wait for the GPU */
    const void *to;     /* COPYBACK: where to; one that waits (COPYWAIT by then) may not have waited until it is done */
    CUstream stream;
    rg_member *member;
    rg_track *track;
    rg_work work;
    rg_op op;
    uint64_t bytes, marks, noted, token, since;
    rg_record_what what;
} bulk;

/*
 * Whether a copy to host memory, whatever it is called, waits for what is before it in its stream, and for itself: where the driver
 * does not know the memory it "might be synchronous" (CUDA Driver API, "API synchronization behavior"), and on an H200 is. That is how
 * PyTorch programs wait for results that they want on the host (Tensor.cpu): the call to synchronise that follows finds all done.
 * Of memory that it does not know cuPointerGetAttributes says so, and cuPointerGetAttribute that the call was wrong.
 */
static bool waits_for(const void *host)
{
    int asked = CU_POINTER_ATTRIBUTE_MEMORY_TYPE, type = CU_MEMORYTYPE_HOST;
    void *answer = &type;
    return host && rg_real.cuPointerGetAttributes &&
           rg_real.cuPointerGetAttributes(1, &asked, &answer, (CUdeviceptr)(uintptr_t)host) == CUDA_SUCCESS && type == 0;
}

/* `gated`: the bytes that decide whether the gate stands in front of it. False: it goes past Rigel. */
static __attribute__((noinline)) bool bulk_begin(bulk *b, uint32_t operation, uintptr_t gated)
{
    rg_ahead(operation, &rg_real.hooked[operation - 1]);
    b->several = RG_UNLIKELY(atomic_load_explicit(&rg.several, memory_order_relaxed));
    b->recorded = b->mode & RG_MODE_RECORDED;
    b->mode &= ~(uint32_t)RG_MODE_RECORDED;
    bool back = b->mode & RG_MODE_HIGH && waits_for(b->to);
    b->member = b->several ? rg_work_member(b->stream) : RG_PROCESS;
    if (!b->member)
        return false;
    b->track = b->several ? rg_track_for(b->stream, b->member) : rg_track_of(b->stream);
    enum rg_kind kind = b->to ? RG_COPYWAIT : b->within ? RG_WITHIN : b->kind; /* for who begins a request by it */
    b->work = b->several ? rg_work_several_begin(b->member, kind, b->track, gated, RG_DIMS_NONE)
                         : rg_work_begin(RG_PROCESS, b->mode, kind, b->track, gated, RG_DIMS_NONE);
    if (back && (!b->several || b->work.mode & RG_MODE_HIGH))
        b->kind = RG_COPYWAIT;
    bool high = b->mode & RG_MODE_HIGH, waits = b->kind == RG_COPYWAIT;
    b->token = waits && high ? rg_wait_stream_begin(b->stream) : 0;
    bool drains = b->token && rg_drain();
    b->may_wait = high && b->kind != RG_MEMSET && !drains;
    if (drains)
        rg_stay_begin(b->track);
    b->op = rg_op_begin(operation, waits);
    b->marks = rg_launch_note(b->op.row, b->track, b->kind, 0, operation);
    if (RG_UNLIKELY(b->recorded)) {
        b->what = (rg_record_what){b->kind, b->stream, b->bytes, RG_DIMS_NONE, 0, rg_op_names[operation]};
        rg_record_begin(&b->what);
    }
    b->noted = waits ? 0 : rg_op_note(&b->op, b->kind == RG_MEMSET ? RG_TRACE_memset : RG_TRACE_copy, b->marks, b->bytes);
    b->since = b->may_wait ? rg_clock_ns() : 0;
    return true;
}

static __attribute__((noinline)) void bulk_end(bulk *b, CUresult result)
{
    bool ok = result == CUDA_SUCCESS;
    if (b->may_wait)
        rg_waited(b->track, b->since);
    if (RG_UNLIKELY(b->recorded))
        rg_record_end(&b->what, ok);
    if (b->kind == RG_COPYWAIT) {
        rg_op_end(&b->op, RG_TRACE_copy, b->marks | (ok ? 0 : RG_RECORD_FAILED), b->bytes);
        if (b->to && ok) {
            if (!rg_wait_stream_leave(b->token))
                b->kind = RG_COPY; /* nobody looks after it now: to be marked anew */
        } else if (b->mode & RG_MODE_HIGH) {
            rg_wait_stream_end(b->stream, b->token, ok);
        }
    } else {
        rg_op_done(&b->op, b->noted, !ok);
    }
    if (b->several)
        rg_work_several_end(b->member, b->kind, b->work, ok);
    else
        rg_work_end(RG_PROCESS, b->mode, b->kind, b->work, ok);
    if (RG_UNLIKELY(!ok)) {
        rg_guard_driver_failed(rg_op_names[b->op.operation], result);
        rg_context_refused(b->op.operation, result, b->stream, NULL);
    }
}

/* A memset of a high client's thread that goes on with its stream, as rg_again does for launches: libraries clear memory between them. */
static __attribute__((noinline)) uint64_t memset_again(uint32_t operation, uint64_t bytes)
{
    rg_thread *row = rg_this.row;
    if (rg_this.uncounted)
        rg_again_count();
    rg_call_count(operation);
    atomic_fetch_add_explicit(&rg.slot->memsets, 1, memory_order_relaxed);
    uint64_t n = atomic_load_explicit(&row->launches, memory_order_relaxed);
    atomic_store_explicit(&row->launches, n + 1, memory_order_relaxed);
    again_clock(row);
    rg_this.untimed = 0; /* the next launch has a time of its own */
    atomic_store_explicit(&row->doing, operation | RG_DOING, memory_order_release);
    return rg_record_next(operation, RG_TRACE_memset, rg_this.who, bytes, atomic_load_explicit(&row->since_tick, memory_order_relaxed), 0);
}

#define RG_COPYBACK RG_COPY
#define RG_COPYWITHIN RG_COPY
#define RG_COPYBOX RG_COPY
#define RG_WITHIN_COPY false
#define RG_WITHIN_COPYWITHIN true
#define RG_WITHIN_COPYBOX (c && !is_input(c->srcMemoryType, c->dstMemoryType))
#define RG_WITHIN_COPYWAIT false
#define RG_WITHIN_COPYBACK false
#define RG_WITHIN_MEMSET false
#define RG_TO_COPY NULL
#define RG_TO_COPYWITHIN NULL
#define RG_TO_COPYBOX NULL
#define RG_TO_COPYWAIT NULL
#define RG_TO_MEMSET NULL
#define RG_TO_COPYBACK h

#define RG_BULK(symbol, KIND, params, args, STREAM, UNITS, SHAPE, ...) \
    static RG_INLINE CUresult symbol##_hook params \
    { \
        uint64_t epoch_ = atomic_load_explicit(&rg_rec.epoch, memory_order_acquire); \
        if (RG_##KIND == RG_MEMSET && rg_is_again(epoch_, STREAM)) { \
            uint64_t noted_ = memset_again(RG_OP_##symbol, (uintptr_t)(UNITS)); \
            CUresult r_ = RG_CALL(symbol, args); \
            bool ends_ = rg_again_ends(RG_OP_##symbol, epoch_); \
            return RG_LIKELY(ends_ && r_ == CUDA_SUCCESS) ? r_ : rg_again_late(RG_OP_##symbol, r_, STREAM, epoch_, noted_); \
        } \
        bulk b_; \
        b_.mode = mode_for_work(); \
        if (b_.mode == RG_MODE_BARE) \
            return RG_CALL(symbol, args); \
        b_.kind = RG_##KIND; \
        b_.stream = STREAM; \
        b_.bytes = (uintptr_t)(UNITS); \
        b_.to = RG_TO_##KIND; \
        b_.within = RG_WITHIN_##KIND; \
        bool high_ = (b_.mode & ~(uint32_t)RG_MODE_RECORDED) == RG_MODE_HIGH; \
        bool past_ = RG_##KIND == RG_COPY && !high_ && RG_SHARED(__VA_ARGS__); /* to another device */ \
        if (RG_UNLIKELY(!bulk_begin(&b_, RG_OP_##symbol, past_ ? 0 : b_.bytes))) \
            return RG_CALL(symbol, args); \
        CUresult result_ = RG_CALL(symbol, args); \
        bulk_end(&b_, result_); \
        return result_; \
    } \
    CUresult symbol params RG_MEASURED(symbol, RG_##KIND, args)

#define RG_WORK_LAUNCH RG_LAUNCHES
#define RG_WORK_GRAPH RG_LAUNCHES
#define RG_WORK_COPY RG_BULK
#define RG_WORK_COPYWITHIN RG_BULK
#define RG_WORK_COPYBOX RG_BULK
#define RG_WORK_COPYWAIT RG_BULK
#define RG_WORK_COPYBACK RG_BULK
#define RG_WORK_MEMSET RG_BULK
#define RG_WORK(symbol, KIND, ...) RG_WORK_##KIND(symbol, KIND, __VA_ARGS__)
#define RG_SPECIAL(symbol, params, args)
#include "hooks.def"
#undef RG_WORK
#undef RG_SPECIAL

CUresult rg_again_late(uint32_t operation, CUresult result, CUstream stream, uint64_t epoch, uint64_t record)
{
    bool ok = result == CUDA_SUCCESS;
    uint64_t now = atomic_load(&rg_rec.epoch);
    bool late = (uint32_t)now != (uint32_t)epoch; /* a beat came meanwhile; it began a few launches after the time that it shares with them */
    if (!ok || late)
        rg_op_amend(record, late ? atomic_load_explicit(&rg_this.row->since_tick, memory_order_relaxed) : 0, !ok);
    rg_track *t = ok && now / RG_EPOCH != epoch / RG_EPOCH ? rg_track_find(rg_track_key(stream)) : NULL;
    if (t)
        rg_mark(rg_track_member(t), t);
    if (!ok) {
        rg_guard_driver_failed(rg_op_names[operation], result);
        rg_context_refused(operation, result, stream, NULL);
    }
    return result;
}

CUresult cuInit(unsigned flags)
{
    CUresult r = RG_CALL(cuInit, (flags));
    if (r == CUDA_SUCCESS)
        rg_client_attach();
    return r;
}

/*
 * Taking contexts, streams and events away. The agent may be using them: it holds rg_agent_lock while it does, and does not begin to
 * while a call removes some. The lock is not held for that call, which may wait for what another thread does next.
 */
#define RG_TAKE_AWAY(symbol, params, args, BEFORE, AFTER) \
    CUresult symbol params \
    { \
        if (!rg_is_client()) \
            return RG_CALL(symbol, args); \
        pthread_mutex_lock(&rg_agent_lock); \
        atomic_fetch_add(&rg_taking_away, 1); \
        pthread_mutex_unlock(&rg_agent_lock); \
        BEFORE; \
        rg_op op_ = rg_op_begin(RG_OP_##symbol, true); \
        CUresult result_ = RG_CALL(symbol, args); \
        rg_op_end(&op_, RG_TRACE_call, result_ ? RG_RECORD_FAILED : 0, 0); \
        AFTER; \
        atomic_fetch_sub(&rg_taking_away, 1); \
        return result_; \
    }

static CUcontext current_context(void)
{
    CUcontext current = NULL;
    rg_real.cuCtxGetCurrent(&current);
    return current;
}

static CUcontext context_of_green(CUgreenCtx green)
{
    CUcontext c = NULL;
    return RG_CALL(cuCtxFromGreenCtx, (&c, green)) == CUDA_SUCCESS ? c : NULL;
}

static bool primary_gone(CUdevice d)
{
    unsigned flags;
    int active = 1;
    return rg_real.cuDevicePrimaryCtxGetState && rg_real.cuDevicePrimaryCtxGetState(d, &flags, &active) == CUDA_SUCCESS &&
           !active;
}

/* How often the program has retained each primary context. */
static _Atomic uint32_t retained[RG_MAX_DEVICES];

CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d)
{
    CUresult r = RG_CALL(cuDevicePrimaryCtxRetain, (c, d));
    if (r == CUDA_SUCCESS && (uint32_t)d < RG_MAX_DEVICES)
        atomic_fetch_add(&retained[d], 1);
    return r;
}

static bool is_last_release(CUdevice d)
{
    return (uint32_t)d >= RG_MAX_DEVICES || atomic_load(&retained[d]) <= 1;
}

static void released(CUdevice d)
{
    uint32_t n = (uint32_t)d < RG_MAX_DEVICES ? atomic_load(&retained[d]) : 0;
    while (n && !atomic_compare_exchange_weak(&retained[d], &n, n - 1))
        continue;
}

/* A device's primary context goes with the last of its releases: which that is they find out one after the other. */
static pthread_mutex_t primary_locks[RG_MAX_DEVICES] = {[0 ... RG_MAX_DEVICES - 1] = PTHREAD_MUTEX_INITIALIZER};

static void primary_enter(CUdevice d)
{
    if ((uint32_t)d < RG_MAX_DEVICES)
        pthread_mutex_lock(&primary_locks[d]);
}

static void primary_leave(CUdevice d)
{
    if ((uint32_t)d < RG_MAX_DEVICES)
        pthread_mutex_unlock(&primary_locks[d]);
}

#define RG_IF_GONE(action) \
    if (result_ == CUDA_SUCCESS && primary_gone(d)) \
    action
/* What is allocated in a context goes with it. */
#define RG_NOTE_MEMORY(context) \
    CUcontext gone_ = context; \
    uint64_t mark_ = rg_memory_mark()
#define RG_FORGET_MEMORY rg_memory_forget_context(gone_, mark_)
/*
 * What goes with a context and may be in use at any moment goes before the driver is asked to end it: events of Rigel's; and stops, as it
 * would wait for streams that nothing lets go on any more.
 */
static void forget_early(CUcontext context, CUdevice d)
{
    rg_batch_forget(context, d);
    rg_samples_forget(context, d);
    rg_stops_forget_context(context, d);
    rg_stay_forget_context(context, d);
    rg_functions_forget();
}

#define RG_IF_DONE(action) \
    if (result_ == CUDA_SUCCESS) \
    action
/* If it is the current one, the one below is, then. */
#define RG_CONTEXT_ENDS \
    { \
        RG_FORGET_MEMORY; \
        rg_thread_context((uintptr_t)current_context()); \
    }
RG_TAKE_AWAY(cuCtxDestroy, (CUcontext c), (c), rg_track_forget_context(c, -1); RG_NOTE_MEMORY(c),
             RG_IF_DONE(RG_CONTEXT_ENDS))
RG_TAKE_AWAY(cuCtxDestroy_v2, (CUcontext c), (c), rg_track_forget_context(c, -1); RG_NOTE_MEMORY(c),
             RG_IF_DONE(RG_CONTEXT_ENDS))
/* It ends the context, which is the current one, unless that was attached (cuCtxAttach): whether it has is seen by what is current then. */
RG_TAKE_AWAY(cuCtxDetach, (CUcontext c), (c), forget_early(c, -1); RG_NOTE_MEMORY(c),
             if (result_ == CUDA_SUCCESS && current_context() != c) { rg_track_forget_context(c, -1); RG_CONTEXT_ENDS; })
/* Memory is its device's primary context's. */
RG_TAKE_AWAY(cuGreenCtxDestroy, (CUgreenCtx green), (green), CUcontext c = context_of_green(green);
             if (c) rg_track_forget_context(c, -1), )
RG_TAKE_AWAY(cuDevicePrimaryCtxRelease, (CUdevice d), (d), primary_enter(d);
             if (is_last_release(d)) forget_early(NULL, d); RG_NOTE_MEMORY(rg_memory_primary(d)), RG_IF_DONE(released(d));
             RG_IF_GONE({ rg_track_forget_context(NULL, d); RG_FORGET_MEMORY; }) primary_leave(d))
RG_TAKE_AWAY(cuDevicePrimaryCtxRelease_v2, (CUdevice d), (d), primary_enter(d);
             if (is_last_release(d)) forget_early(NULL, d); RG_NOTE_MEMORY(rg_memory_primary(d)), RG_IF_DONE(released(d));
             RG_IF_GONE({ rg_track_forget_context(NULL, d); RG_FORGET_MEMORY; }) primary_leave(d))
RG_TAKE_AWAY(cuDevicePrimaryCtxReset, (CUdevice d), (d), primary_enter(d);
             rg_track_forget_context(NULL, d); RG_NOTE_MEMORY(rg_memory_primary(d)), RG_IF_DONE(RG_FORGET_MEMORY);
             primary_leave(d))
RG_TAKE_AWAY(cuDevicePrimaryCtxReset_v2, (CUdevice d), (d), primary_enter(d);
             rg_track_forget_context(NULL, d); RG_NOTE_MEMORY(rg_memory_primary(d)), RG_IF_DONE(RG_FORGET_MEMORY);
             primary_leave(d))
RG_TAKE_AWAY(cuStreamDestroy, (CUstream s), (s), rg_track_forget(s), )
RG_TAKE_AWAY(cuStreamDestroy_v2, (CUstream s), (s), rg_track_forget(s), )

/* What was known of their kernels goes before another thread can be given the same handles for others. */
#define RG_UNLOAD(symbol, params, args) \
    CUresult symbol params \
    { \
        if (rg_is_client()) \
            rg_functions_forget(); \
        rg_stay_waits(); \
        return RG_CALL(symbol, args); \
    }
RG_UNLOAD(cuModuleUnload, (CUmodule module), (module))
RG_UNLOAD(cuLibraryUnload, (CUlibrary library), (library))

/* What is made is remembered, unless something is captured. */
static inline bool follows(void)
{
    return rg_is_client() && !atomic_load_explicit(&rg.captures, memory_order_relaxed);
}

/* Counts a call that is no operation of its own in the records. */
static inline void called(uint32_t operation)
{
    if (RG_UNLIKELY(!rg_this.row))
        rg_thread_enter();
    rg_call_count(operation);
}

/* Counts it, and looks why it failed, if for a handle. */
static inline CUresult looked(uint32_t operation, CUresult r, const void *handle, const void *other)
{
    called(operation);
    if (RG_UNLIKELY(r != CUDA_SUCCESS))
        rg_context_refused(operation, r, handle, other);
    return r;
}

/* Which device the program is on: the guard binds it on threads that have none. */
static void selected(CUcontext c)
{
    rg_guard_selected(c);
    if (rg_is_client())
        rg_thread_context((uintptr_t)c);
}

CUresult cuCtxSetCurrent(CUcontext c)
{
    CUresult r = RG_CALL(cuCtxSetCurrent, (c));
    if (r == CUDA_SUCCESS)
        selected(c);
    return r;
}

CUresult cuCtxPushCurrent_v2(CUcontext c)
{
    CUresult r = RG_CALL(cuCtxPushCurrent_v2, (c));
    if (r == CUDA_SUCCESS)
        selected(c);
    return r;
}

CUresult cuCtxPopCurrent_v2(CUcontext *c)
{
    CUresult r = RG_CALL(cuCtxPopCurrent_v2, (c));
    if (r == CUDA_SUCCESS && rg_is_client())
        rg_thread_context((uintptr_t)current_context());
    return r;
}

/* A new context is the current one. */
#define RG_CREATE_CONTEXT(symbol, params, args) \
    CUresult symbol params \
    { \
        CUresult r = RG_CALL(symbol, args); \
        if (r == CUDA_SUCCESS) \
            selected(*c); \
        return r; \
    }
RG_CREATE_CONTEXT(cuCtxCreate_v2, (CUcontext *c, unsigned flags, CUdevice d), (c, flags, d))
RG_CREATE_CONTEXT(cuCtxCreate_v3, (CUcontext *c, void *affinity, int n, unsigned flags, CUdevice d), (c, affinity, n, flags, d))
RG_CREATE_CONTEXT(cuCtxCreate_v4, (CUcontext *c, void *params, unsigned flags, CUdevice d), (c, params, flags, d))

CUresult cuCtxFromGreenCtx(CUcontext *c, CUgreenCtx green)
{
    CUresult r = RG_CALL(cuCtxFromGreenCtx, (c, green));
    if (r == CUDA_SUCCESS && c)
        rg_guard_green(*c);
    return r;
}

CUresult cuEventCreate(CUevent *e, unsigned flags)
{
    CUresult r = RG_CALL(cuEventCreate, (e, flags));
    if (!rg_is_client())
        return r;
    called(RG_OP_cuEventCreate);
    if (r == CUDA_SUCCESS && follows())
        rg_context_made(*e);
    return r;
}

/* What is known of its last record is true no more; also while something is captured, or work goes past Rigel. */
static inline void unrecorded(CUevent e)
{
    if (rg_is_client() && rg_member_class() == RG_CLASS_HIGH)
        rg_event_forget(e);
}

static void forget_event(CUevent e)
{
    if (rg_is_client())
        rg_context_unmade(e);
    unrecorded(e);
}

CUresult cuEventDestroy(CUevent e)
{
    forget_event(e);
    return RG_CALL(cuEventDestroy, (e));
}

CUresult cuEventDestroy_v2(CUevent e)
{
    forget_event(e);
    return RG_CALL(cuEventDestroy_v2, (e));
}

static void stream_given(CUstream s, int asked)
{
    rg_member_made(s);
    rg_member *m = rg_member_mine();
    uint32_t mode = atomic_load(m ? &m->mode : &RG_PROCESS->mode);
    if (mode != RG_MODE_BARE)
        rg_stream_prioritise(s, mode, asked);
}

static void stream_made(CUstream s, int asked)
{
    rg_context_made(s);
    stream_given(s, asked);
}

CUresult cuStreamCreate(CUstream *s, unsigned flags)
{
    CUresult r = RG_CALL(cuStreamCreate, (s, flags));
    if (r == CUDA_SUCCESS && follows())
        stream_made(*s, 0);
    return r;
}

CUresult cuStreamCreateWithPriority(CUstream *s, unsigned flags, int priority)
{
    CUresult r = RG_CALL(cuStreamCreateWithPriority, (s, flags, priority));
    if (r == CUDA_SUCCESS && follows())
        stream_made(*s, priority);
    return r;
}

/* Not a stream of the current context. */
CUresult cuGreenCtxStreamCreate(CUstream *s, CUgreenCtx green, unsigned flags, int priority)
{
    CUresult r = RG_CALL(cuGreenCtxStreamCreate, (s, green, flags, priority));
    if (r == CUDA_SUCCESS && follows())
        stream_given(*s, priority);
    return r;
}

/*
 * Capture. From before the first capture begins until the last has ended, Rigel adds no call of its own. The stream is
 * entered first, so that what is captured on it carries its priority.
 */
#define RG_BEGIN_CAPTURE(symbol, params, args, stream) \
    CUresult symbol params \
    { \
        if (!rg_is_client()) \
            return RG_CALL(symbol, args); \
        pthread_mutex_lock(&rg_agent_lock); \
        if (!atomic_load(&rg.captures)) \
            rg_track_of(stream); \
        atomic_fetch_add(&rg.captures, 1); \
        rg_changed(); \
        pthread_mutex_unlock(&rg_agent_lock); \
        CUresult result_ = RG_CALL(symbol, args); \
        if (result_ == CUDA_SUCCESS) \
            rg_capture_began(stream); \
        else \
            atomic_fetch_sub(&rg.captures, 1); \
        return result_; \
    }
RG_BEGIN_CAPTURE(cuStreamBeginCapture, (CUstream s), (s), s)
RG_BEGIN_CAPTURE(cuStreamBeginCapture_ptsz, (CUstream s), (s), RG_PTDS(s))
RG_BEGIN_CAPTURE(cuStreamBeginCapture_v2, (CUstream s, int mode), (s, mode), s)
RG_BEGIN_CAPTURE(cuStreamBeginCapture_v2_ptsz, (CUstream s, int mode), (s, mode), RG_PTDS(s))
RG_BEGIN_CAPTURE(cuStreamBeginCaptureToGraph, RG_TOGRAPH, (s, g, d, e, n, mode), s)
RG_BEGIN_CAPTURE(cuStreamBeginCaptureToGraph_ptsz, RG_TOGRAPH, (s, g, d, e, n, mode), RG_PTDS(s))
RG_BEGIN_CAPTURE(cuStreamBeginRecaptureToGraph, RG_RECAPTURE, (s, mode, g, callback, data), s)
RG_BEGIN_CAPTURE(cuStreamBeginRecaptureToGraph_ptsz, RG_RECAPTURE, (s, mode, g, callback, data), RG_PTDS(s))

#define RG_END_CAPTURE(symbol, stream) \
    CUresult symbol(CUstream s, CUgraph *g) \
    { \
        CUresult r = RG_CALL(symbol, (s, g)); \
        /* Only the stream whose capture was begun ends one, whether it was still valid or not; from the wrong thread it goes \
         * on, and where there is none nothing ends. */ \
        if (rg_is_client() && r != CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD && r != CUDA_ERROR_ILLEGAL_STATE && atomic_load(&rg.captures)) \
            rg_capture_ended(stream); \
        return r; \
    }
RG_END_CAPTURE(cuStreamEndCapture, s)
RG_END_CAPTURE(cuStreamEndCapture_ptsz, RG_PTDS(s))

/* Waiting, and looking whether the GPU has finished: what the program learns, Rigel learns. */
#define RG_WAIT_STREAM(symbol, stream) \
    static RG_INLINE CUresult symbol##_hook(CUstream s) \
    { \
        if (!is_client()) \
            return RG_CALL(symbol, (s)); \
        bool high = is_high(); \
        uint64_t token = high ? rg_wait_stream_begin(stream) : 0; \
        bool drains = high && rg_drain(); \
        uint64_t since = high && !drains ? rg_clock_ns() : 0; \
        if (drains && token) /* else it is something else that is waited for */ \
            rg_stay_begin(rg_track_find(rg_track_key(stream))); \
        rg_op op = rg_wait_op(RG_OP_##symbol, (uintptr_t)(stream)); \
        uint64_t began = rg_recorded ? rg_record_wait_begin() : 0; \
        CUresult r = RG_CALL(symbol, (s)); \
        if (since) \
            rg_waited(rg_track_find(rg_track_key(stream)), since); \
        rg_op_end(&op, RG_TRACE_sync, marks_of(stream, r), (uintptr_t)(stream)); \
        if (r != CUDA_SUCCESS) \
            rg_context_refused(RG_OP_##symbol, r, stream, NULL); \
        if (high) \
            rg_wait_stream_end(stream, token, r == CUDA_SUCCESS); \
        if (RG_UNLIKELY(began)) \
            rg_record_wait_end(began); \
        return r; \
    } \
    CUresult symbol(CUstream s) RG_MEASURED(symbol, RG_WAIT, (s))
RG_WAIT_STREAM(cuStreamSynchronize, s)
RG_WAIT_STREAM(cuStreamSynchronize_ptsz, RG_PTDS(s))

#define RG_LOOK_AT_STREAM(symbol, stream) \
    CUresult symbol(CUstream s) \
    { \
        if (!is_client()) \
            return RG_CALL(symbol, (s)); \
        if (!is_high()) \
            return looked(RG_OP_##symbol, RG_CALL(symbol, (s)), stream, NULL); \
        bool own; \
        uint64_t token = rg_look_stream_begin(stream, &own); \
        CUresult r = looked(RG_OP_##symbol, RG_CALL(symbol, (s)), stream, NULL); \
        if (own || r == CUDA_SUCCESS) \
            rg_wait_stream_end(stream, token, r == CUDA_SUCCESS); \
        return r; \
    }
RG_LOOK_AT_STREAM(cuStreamQuery, s)
RG_LOOK_AT_STREAM(cuStreamQuery_ptsz, RG_PTDS(s))

#define RG_WAIT_CONTEXT(symbol, params, args, context) \
    static RG_INLINE CUresult symbol##_hook params \
    { \
        if (!is_client()) \
            return RG_CALL(symbol, args); \
        CUcontext waited = context; \
        bool high = is_high(); \
        uint64_t token = high ? rg_wait_context_begin(waited) : 0; \
        if (high) \
            rg_drain(); \
        rg_stay_waits(); \
        rg_op op = rg_wait_op(RG_OP_##symbol, (uintptr_t)waited); \
        uint64_t began = rg_recorded ? rg_record_wait_begin() : 0; \
        CUresult r = RG_CALL(symbol, args); \
        rg_op_end(&op, RG_TRACE_sync, r ? RG_RECORD_FAILED : 0, (uintptr_t)waited); \
        if (high) \
            rg_wait_context_end(waited, token, r == CUDA_SUCCESS); \
        if (RG_UNLIKELY(began)) \
            rg_record_wait_end(began); \
        return r; \
    } \
    CUresult symbol params RG_MEASURED(symbol, RG_WAIT, args)
RG_WAIT_CONTEXT(cuCtxSynchronize, (void), (), current_context())
RG_WAIT_CONTEXT(cuCtxSynchronize_v2, (CUcontext c), (c), c)

#define RG_RECORD(symbol, params, args, stream) \
    CUresult symbol params \
    { \
        if (!is_high()) { \
            unrecorded(e); \
            CUresult r_ = RG_CALL(symbol, args); \
            return is_client() ? looked(RG_OP_##symbol, r_, e, stream) : r_; \
        } \
        uint64_t token = rg_event_record_begin(stream); \
        CUresult r = looked(RG_OP_##symbol, RG_CALL(symbol, args), e, stream); \
        rg_event_record_end(e, stream, token, r == CUDA_SUCCESS); \
        return r; \
    }
RG_RECORD(cuEventRecord, (CUevent e, CUstream s), (e, s), s)
RG_RECORD(cuEventRecord_ptsz, (CUevent e, CUstream s), (e, s), RG_PTDS(s))
RG_RECORD(cuEventRecordWithFlags, (CUevent e, CUstream s, unsigned flags), (e, s, flags), s)
RG_RECORD(cuEventRecordWithFlags_ptsz, (CUevent e, CUstream s, unsigned flags), (e, s, flags), RG_PTDS(s))

/* What a thread of a high client learns by an event. */
static CUresult learn(CUresult r, rg_track *track, uint64_t token)
{
    if (r == CUDA_SUCCESS && track)
        rg_track_finished(track, token);
    return r;
}

CUresult cuEventSynchronize(CUevent e)
{
    if (!is_client())
        return RG_CALL(cuEventSynchronize, (e));
    bool high = is_high();
    rg_track *track = NULL;
    uint64_t token = high ? rg_event_block_begin(e, &track) : 0;
    bool drains = high && rg_drain();
    uint64_t since = high && !drains ? rg_clock_ns() : 0;
    if (drains && token) /* else the stream may be gone: the event is not */
        rg_stay_begin(track);
    rg_op op = rg_wait_op(RG_OP_cuEventSynchronize, (uintptr_t)e);
    uint64_t began = rg_recorded ? rg_record_wait_begin() : 0;
    CUresult r = RG_CALL(cuEventSynchronize, (e));
    if (since)
        rg_waited(track, since);
    uint64_t marks = (track ? (uint64_t)(track - rg.tracks + 1) << 38 : 0) | (r ? RG_RECORD_FAILED : 0);
    rg_op_end(&op, RG_TRACE_event_sync, marks, (uintptr_t)e);
    if (r != CUDA_SUCCESS)
        rg_context_refused(RG_OP_cuEventSynchronize, r, e, NULL);
    rg_event_block_end(track, token, r == CUDA_SUCCESS);
    if (RG_UNLIKELY(began))
        rg_record_wait_end(began);
    return r;
}

CUresult cuEventQuery(CUevent e)
{
    if (!is_client())
        return RG_CALL(cuEventQuery, (e));
    if (!is_high())
        return looked(RG_OP_cuEventQuery, RG_CALL(cuEventQuery, (e)), e, NULL);
    rg_track *track = NULL;
    uint64_t token = rg_event_wait_begin(e, &track);
    return learn(looked(RG_OP_cuEventQuery, RG_CALL(cuEventQuery, (e)), e, NULL), track, token);
}

#define RG_LOOK_AT_EVENT(symbol, params, args, other) \
    CUresult symbol params \
    { \
        if (!is_client()) \
            return RG_CALL(symbol, args); \
        return looked(RG_OP_##symbol, RG_CALL(symbol, args), e, other); \
    }
RG_LOOK_AT_EVENT(cuStreamWaitEvent, (CUstream s, CUevent e, unsigned flags), (s, e, flags), s)
RG_LOOK_AT_EVENT(cuStreamWaitEvent_ptsz, (CUstream s, CUevent e, unsigned flags), (s, e, flags), RG_PTDS(s))
RG_LOOK_AT_EVENT(cuEventElapsedTime, (float *ms, CUevent e, CUevent end), (ms, e, end), end)
RG_LOOK_AT_EVENT(cuEventElapsedTime_v2, (float *ms, CUevent e, CUevent end), (ms, e, end), end)

/* Executable graphs. What they are is noted of a high client's too: it may become a best-effort one. */
#define RG_INSTANTIATE(symbol, params, args, FLAGS) \
    CUresult symbol params \
    { \
        CUresult r = RG_CALL(symbol, args); \
        if (r != CUDA_SUCCESS || !rg_is_client()) \
            return r; \
        rg_graph_note(*x, g, FLAGS); \
        if (rg_recorded) \
            rg_record_graph(*x, g); \
        rg_name_forget((uintptr_t)*x); \
        return r; \
    }
#define RG_FLAGS_OF(params) (((CUDA_GRAPH_INSTANTIATE_PARAMS *)(params))->flags)
RG_INSTANTIATE(cuGraphInstantiate, RG_INSTANTIATE5, (x, g, bad, log, n), 0)
RG_INSTANTIATE(cuGraphInstantiate_v2, RG_INSTANTIATE5, (x, g, bad, log, n), 0)
RG_INSTANTIATE(cuGraphInstantiateWithFlags, (CUgraphExec *x, CUgraph g, unsigned long long flags), (x, g, flags), flags)
RG_INSTANTIATE(cuGraphInstantiateWithParams, (CUgraphExec *x, CUgraph g, void *params), (x, g, params), RG_FLAGS_OF(params))
RG_INSTANTIATE(cuGraphInstantiateWithParams_ptsz, (CUgraphExec *x, CUgraph g, void *params), (x, g, params),
               RG_FLAGS_OF(params))

CUresult cuGraphExecDestroy(CUgraphExec x)
{
    if (rg_is_client())
        rg_graph_forget(x);
    return RG_CALL(cuGraphExecDestroy, (x));
}

/* Whether a call that failed has changed anything is not asked: the graph goes out whole from then on either way. GRAPH, FUNCTION: what a call that
 * did not fail has put into it; or NULL. */
#define RG_CHANGE(symbol, params, args, GRAPH, FUNCTION) \
    CUresult symbol params \
    { \
        CUresult r = RG_CALL(symbol, args); \
        if (rg_is_client()) \
            rg_graph_changed(x, r == CUDA_SUCCESS ? GRAPH : NULL, r == CUDA_SUCCESS ? FUNCTION : NULL); \
        return r; \
    }
#define RG_NODE(params) ((const CUgraphNodeParams *)(params))
RG_CHANGE(cuGraphExecUpdate, (CUgraphExec x, CUgraph g, CUgraphNode *bad, int *result), (x, g, bad, result), g, NULL)
RG_CHANGE(cuGraphExecUpdate_v2, (CUgraphExec x, CUgraph g, void *result), (x, g, result), g, NULL)
RG_CHANGE(cuGraphExecKernelNodeSetParams, RG_NODE_PARAMS, (x, n, params), NULL, *(const CUfunction *)params)
RG_CHANGE(cuGraphExecKernelNodeSetParams_v2, RG_NODE_PARAMS, (x, n, params), NULL, rg_node_function(params))
RG_CHANGE(cuGraphExecMemcpyNodeSetParams, RG_NODE_PARAMS_CTX, (x, n, params, c), NULL, NULL)
RG_CHANGE(cuGraphExecMemsetNodeSetParams, RG_NODE_PARAMS_CTX, (x, n, params, c), NULL, NULL)
RG_CHANGE(cuGraphExecHostNodeSetParams, RG_NODE_PARAMS, (x, n, params), NULL, NULL)
RG_CHANGE(cuGraphExecChildGraphNodeSetParams, (CUgraphExec x, CUgraphNode n, CUgraph g), (x, n, g), g, NULL)
RG_CHANGE(cuGraphExecEventRecordNodeSetEvent, (CUgraphExec x, CUgraphNode n, CUevent e), (x, n, e), NULL, NULL)
RG_CHANGE(cuGraphExecEventWaitNodeSetEvent, (CUgraphExec x, CUgraphNode n, CUevent e), (x, n, e), NULL, NULL)
RG_CHANGE(cuGraphExecExternalSemaphoresSignalNodeSetParams, RG_NODE_PARAMS, (x, n, params), NULL, NULL)
RG_CHANGE(cuGraphExecExternalSemaphoresWaitNodeSetParams, RG_NODE_PARAMS, (x, n, params), NULL, NULL)
RG_CHANGE(cuGraphExecBatchMemOpNodeSetParams, RG_NODE_PARAMS, (x, n, params), NULL, NULL)
RG_CHANGE(cuGraphExecNodeSetParams, (CUgraphExec x, CUgraphNode n, void *params), (x, n, params),
          RG_NODE(params)->type == CU_GRAPH_NODE_TYPE_GRAPH ? RG_NODE(params)->graph : NULL,
          RG_NODE(params)->type == CU_GRAPH_NODE_TYPE_KERNEL ? rg_node_function(&RG_NODE(params)->kernel) : NULL)
RG_CHANGE(cuGraphNodeSetEnabled, (CUgraphExec x, CUgraphNode n, unsigned enabled), (x, n, enabled), NULL, NULL)

/* Look-ups. The driver decides which function it is; if that is a hooked one, its hook goes out instead. */
CUresult cuGetProcAddress(const char *name, void **fn, int version, uint64_t flags)
{
    CUresult r = RG_CALL(cuGetProcAddress, (name, fn, version, flags));
    void *hook = r == CUDA_SUCCESS && fn ? rg_replace(*fn) : NULL;
    if (hook)
        *fn = hook;
    return r;
}

CUresult cuGetProcAddress_v2(const char *name, void **fn, int version, uint64_t flags, int *status)
{
    CUresult r = RG_CALL(cuGetProcAddress_v2, (name, fn, version, flags, status));
    void *hook = r == CUDA_SUCCESS && fn ? rg_replace(*fn) : NULL;
    if (hook)
        *fn = hook;
    return r;
}
