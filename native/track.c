/*
 * track.c: which streams a client uses, which of them have unfinished work, and so whether a high client is busy.
 *
 * A high client's launch marks its stream's track dirty (client.h, rg_work_begin). What makes it clean again costs the
 * program nothing extra: its own waits and queries. They are matched by tokens: a wait puts a fresh token into the track
 * before it begins and, when it returns, makes the track clean only if the token is still there, i.e. nothing was launched
 * since. When the last track of a device is clean the busy period, a *request*, is over.
 * A launch marks its stream before and after the driver is called, so that work which a wait or the agent overtook while
 * the call was under way is seen all the same. Where nothing has changed since the thread's last launch (rg_changed) it is marked already.
 *
 * Must never: block on the GPU, or call the driver while a capture is active.
 */
#include "guard.h"
#include "record-client.h"

#include <string.h>
#include <time.h>

rg_client_state rg;
_Thread_local char rg_thread_mark;

static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t busy_lock = PTHREAD_MUTEX_INITIALIZER;

uint64_t rg_token(uint64_t kind)
{
    static _Atomic uint64_t last;
    return (atomic_fetch_add_explicit(&last, 1, memory_order_relaxed) + 1) << 2 | kind;
}

/* ---- the table ---- */

uintptr_t rg_track_key_slow(CUstream stream)
{
    CUcontext c = NULL;
    rg_real.cuCtxGetCurrent(&c);
    uintptr_t key = (uintptr_t)c;
    if (stream == CU_STREAM_PER_THREAD)
        key ^= (uintptr_t)&rg_thread_mark * 0x9e3779b97f4a7c15u;
    /* Threads of several clients use the NULL stream: each has a track of its own. */
    if (RG_UNLIKELY(atomic_load_explicit(&rg.several, memory_order_relaxed)))
        key ^= (uintptr_t)rg_member_index() * 0xd6e8feb86659fd93u;
    return key << 1 | 1; /* odd, as no stream handle is */
}

static void index_insert(uintptr_t key, uint32_t position)
{
    uint32_t i = rg_track_hash(key);
    for (uint32_t n = 0; n < 16; i = (i + 1) % RG_TRACK_INDEX, n++) {
        uint8_t at = atomic_load(&rg.index[i]);
        if (at == 0 || at == 255) {
            atomic_store_explicit(&rg.index[i], (uint8_t)(position + 1), memory_order_release);
            return;
        }
    }
    atomic_store(&rg.full, 1); /* sixteen neighbours taken: this stream is simply not tracked */
}

static void index_remove(uintptr_t key)
{
    uint32_t i = rg_track_hash(key);
    for (uint32_t n = 0; n < 16; i = (i + 1) % RG_TRACK_INDEX, n++) {
        uint8_t at = atomic_load(&rg.index[i]);
        if (at != 0 && at != 255 && atomic_load(&rg.tracks[at - 1].key) == key)
            atomic_store(&rg.index[i], 255);
    }
}

/* The segment's entry for the current context's device. -1 if it cannot be known. */
static int current_device(CUdevice *cu_device)
{
    CUuuid uuid;
    char name[RG_DEVICE_NAME_BYTES] = "";
    if (rg_real.cuCtxGetDevice(cu_device) != CUDA_SUCCESS)
        return -1;
    CUresult r = rg_real.cuDeviceGetUuid_v2 ? rg_real.cuDeviceGetUuid_v2(&uuid, *cu_device)
                                            : rg_real.cuDeviceGetUuid(&uuid, *cu_device);
    if (r != CUDA_SUCCESS)
        return -1;
    rg_real.cuDeviceGetName(name, sizeof name, *cu_device);
    return rg_segment_device(rg.segment, uuid.bytes, name);
}

/* The context a stream belongs to; for the three special streams the current one. */
static CUcontext context_of(CUstream stream)
{
    CUcontext c = NULL;
    if ((uintptr_t)stream > 2 && rg_real.cuStreamGetCtx && rg_real.cuStreamGetCtx(stream, &c) == CUDA_SUCCESS && c)
        return c;
    rg_real.cuCtxGetCurrent(&c);
    return c;
}

/* One capture fewer; never below none. */
static void uncount_capture(void)
{
    uint32_t n = atomic_load(&rg.captures);
    while (n && !atomic_compare_exchange_weak(&rg.captures, &n, n - 1))
        continue;
}

/*
 * The streams whose captures rg.captures counts, by rg_track_key, and whose they are: a stream whose capture begins while another goes on
 * has no track. And how many had no place here. Under the lock.
 */
enum { CAPTURED = 64 };
static struct {
    CUstream stream;
    const char *owner; /* the thread of a per-thread stream, whichever client it is in; else NULL */
    CUcontext context;
    CUdevice device; /* -1: not known */
} captured[CAPTURED];
static uint32_t captured_count, captured_more;

static void capture_over(uint32_t i)
{
    captured[i] = captured[--captured_count];
    uncount_capture();
}

/* Its capture has ended, if there was one: nobody can end it any more, or somebody has. `context`: of a per-thread stream. */
static bool capture_ends(CUstream stream, const char *owner, CUcontext context)
{
    for (uint32_t i = 0; i < captured_count; i++)
        if (captured[i].stream == stream && captured[i].owner == owner && (!owner || captured[i].context == context)) {
            capture_over(i);
            return true;
        }
    return false;
}

/* So have all in this context, or on this device (rg_track_forget_context). */
static void captures_end(CUcontext context, CUdevice d)
{
    for (uint32_t i = captured_count; i-- > 0;)
        if (context ? captured[i].context == context : d >= 0 && captured[i].device == d)
            capture_over(i);
}

/* Takes a track out of the table. Work still queued on it can no longer be asked for, and counts as done. */
static void drop(rg_track *t)
{
    index_remove(atomic_load(&t->key));
    rg_retire(rg_track_member(t), t->device, atomic_exchange(&t->unbatched, 0));
    atomic_store(&t->state, RG_CLEAN);
    atomic_store(&t->key, 0);
    atomic_store(&rg.full, 0);
    rg_changed();
}

/*
 * Tracks of per-thread streams. A thread that launches or waits at the gate holds a pointer to its track and no lock, so nobody
 * else takes the track out of the table while the thread is there. It goes with its thread; if it has unfinished work by
 * then, it stays for the agent, under a key that is no stream's. Launches that no event follows are then out of everybody's reach, and
 * count as done.
 */
enum { ORPHANED = 1 };
static const char orphan; /* whose it is then */
static pthread_key_t end_key;
static pthread_once_t end_key_once = PTHREAD_ONCE_INIT;
static bool end_key_made;

static void thread_ends(void *mark)
{
    if (!rg_is_client())
        return; /* a fork may have left the lock taken, and nobody reads the table any more */
    pthread_mutex_lock(&table_lock);
    for (uint32_t i = captured_count; i-- > 0;)
        if (captured[i].owner == mark)
            capture_over(i); /* its stream goes with it */
    for (uint32_t i = 0; i < RG_MAX_TRACKS; i++) {
        rg_track *t = &rg.tracks[i];
        if (!atomic_load(&t->key) || t->owner != mark)
            continue;
        if (atomic_load(&t->state) == RG_CLEAN) {
            drop(t);
        } else {
            index_remove(atomic_load(&t->key));
            t->owner = &orphan;
            atomic_store(&t->key, ORPHANED);
            rg_retire(rg_track_member(t), t->device, atomic_exchange(&t->unbatched, 0));
        }
    }
    pthread_mutex_unlock(&table_lock);
}

static void make_end_key(void)
{
    end_key_made = pthread_key_create(&end_key, thread_ends) == 0;
}

/* This thread's end will be noticed. */
static void note_end(void)
{
    pthread_once(&end_key_once, make_end_key);
    if (end_key_made)
        pthread_setspecific(end_key, &rg_thread_mark);
}

/* A free place in the table: else that of an ended thread, or of another client's or context's stream of this very thread. */
static rg_track *free_track(void)
{
    for (int pass = 0; pass < 2; pass++) {
        for (uint32_t i = 0; i < RG_MAX_TRACKS; i++) {
            rg_track *t = &rg.tracks[i];
            if (pass == 1 && (t->owner == &rg_thread_mark || t->owner == &orphan) && atomic_load(&t->state) == RG_CLEAN &&
                !atomic_load(&t->unbatched))
                drop(t);
            if (!atomic_load(&t->key))
                return t;
        }
    }
    return NULL;
}

/* This client uses this device; the process does, which is what its channels are of. */
static void note_use(rg_member *member, uint32_t device)
{
    rg_client *slots[2] = {rg.slot, member->slot};
    for (int i = 0; i < 2; i++) {
        uint64_t zero = 0;
        if (!(atomic_fetch_or(&slots[i]->devices, 1u << device) & 1u << device))
            rg_changed(); /* on one device NULL is known without asking (rg_again_next) */
        atomic_compare_exchange_strong(&slots[i]->first_launch_ns, &zero, rg_now_ns());
    }
}

/* Gives a stream that has a priority the one of this mode, on the same of the two levels (rg_stream_prioritise). */
static void restamp(CUstream stream, uint32_t mode)
{
    int least = 0, greatest = 0, now = 0;
    if (!rg_real.cuStreamGetPriority || !rg_real.cuCtxGetStreamPriorityRange ||
        rg_real.cuCtxGetStreamPriorityRange(&least, &greatest) != CUDA_SUCCESS ||
        rg_real.cuStreamGetPriority(stream, &now) != CUDA_SUCCESS)
        return;
    rg_stream_prioritise(stream, mode, now == least || now == greatest + 1 ? 0 : -1);
}

rg_track *rg_track_add(CUstream stream, uintptr_t key)
{
    rg_track *found = rg_track_find(key);
    if (found || atomic_load_explicit(&rg.full, memory_order_relaxed))
        return found;
    CUcontext context = context_of(stream);
    if (!context)
        return NULL; /* the driver will say so */
    CUcontext popped;
    bool pushed = rg_real.cuCtxPushCurrent_v2(context) == CUDA_SUCCESS;
    CUdevice cu_device = 0;
    int device = current_device(&cu_device);
    rg_member *member = atomic_load(&rg.several) ? rg_member_of(stream) : RG_PROCESS;
    if (!member)
        member = RG_PROCESS;
    if (stream == CU_STREAM_PER_THREAD)
        note_end();
    pthread_mutex_lock(&table_lock);
    rg_track *t = rg_track_find(key);
    bool added = !t && device >= 0 && (t = free_track()) != NULL;
    if (added) {
        atomic_store(&t->state, RG_CLEAN);
        atomic_store(&t->unbatched, 0);
        atomic_store(&t->since_stop_ns, 0);
        atomic_store(&t->device, (uint32_t)device);
        atomic_store(&t->serial, ((atomic_load(&t->serial) >> 8) + 1) << 8 | (uint32_t)(t - rg.tracks + 1));
        t->owner = stream == CU_STREAM_PER_THREAD ? &rg_thread_mark : NULL;
        t->stream = (uintptr_t)stream <= 1 ? CU_STREAM_LEGACY : stream;
        t->context = context;
        t->cu_device = cu_device;
        atomic_store(&t->member, member);
        atomic_store(&t->key, key);
        uint32_t position = (uint32_t)(t - rg.tracks);
        if (position >= atomic_load(&rg.track_count))
            atomic_store(&rg.track_count, position + 1);
        index_insert(key, position);
        atomic_store(&rg.ordinal[device], t->cu_device);
        note_use(member, (uint32_t)device);
        rg_context_seen(rg.slot, context, (uint32_t)device);
        rg_context_seen(member->slot, context, (uint32_t)device);
    } else if (!t && device >= 0) {
        atomic_store(&rg.full, 1);
    }
    pthread_mutex_unlock(&table_lock);
    /* Streams of the program's own were given their priority when they were made. */
    if (added && (uintptr_t)stream <= 2)
        rg_stream_prioritise(stream, atomic_load(&member->mode), 0);
    else if (added && atomic_load(&rg.steered))
        restamp(stream, atomic_load(&member->mode));
    if (pushed)
        rg_real.cuCtxPopCurrent_v2(&popped);
    return t;
}

rg_track *rg_track_for(CUstream stream, rg_member *member)
{
    rg_track *t = rg_track_of(stream);
    rg_member *before = t ? rg_track_member(t) : member;
    if (RG_LIKELY(before == member))
        return t;
    pthread_mutex_lock(&table_lock);
    uint32_t device = t->device;
    before = atomic_exchange(&t->member, member);
    rg_retire(before, device, atomic_exchange(&t->unbatched, 0));
    atomic_store(&t->state, RG_CLEAN);
    atomic_fetch_add(&t->serial, 1 << 8);
    note_use(member, device);
    pthread_mutex_unlock(&table_lock);
    rg_idle_check(before, device);
    if (!atomic_load(&rg.captures))
        rg_stream_prioritise(stream, atomic_load(&member->mode), 0);
    return t;
}

void rg_track_forget(CUstream stream)
{
    if ((uintptr_t)stream <= 2)
        return;
    rg_guard_forget_stream();
    pthread_mutex_lock(&table_lock);
    rg_track *t = rg_track_find((uintptr_t)stream);
    rg_member *member = NULL;
    uint32_t device = 0;
    if (t) {
        device = t->device;
        member = rg_track_member(t);
        drop(t);
    }
    capture_ends(stream, NULL, NULL);
    pthread_mutex_unlock(&table_lock);
    rg_member_unmade(stream);
    rg_context_unmade(stream);
    if (t)
        rg_idle_check(member, device);
}

/* rg_idle_check for every client, on the devices with a bit. */
static void idle_check_all(uint32_t devices)
{
    for (uint32_t i = 0; i < RG_MAX_DEVICES; i++)
        for (uint32_t k = 0; (devices & 1u << i) && k < atomic_load(&rg.member_count); k++)
            rg_idle_check(&rg.members[k], i);
}

void rg_track_forget_context(CUcontext context, CUdevice d)
{
    uint32_t devices = 0;
    pthread_mutex_lock(&table_lock);
    for (uint32_t i = 0; i < RG_MAX_TRACKS; i++) {
        rg_track *t = &rg.tracks[i];
        bool its = t->context && (context ? t->context == context : t->cu_device == d);
        /* Nothing tells the device of a context that the place is no longer used for. The caller keeps the agent off. */
        if (context ? t->agent_context == context : its || t->agent_context != t->context)
            t->agent_event = NULL;
        if (!its)
            continue;
        if (atomic_load(&t->key)) {
            devices |= 1u << t->device;
            drop(t);
        }
        t->context = NULL;
    }
    captures_end(context, d);
    pthread_mutex_unlock(&table_lock);
    rg_batch_forget(context, d);
    rg_samples_forget(context, d);
    rg_graph_forget_context(context, d);
    rg_stops_forget_context(context, d);
    rg_stay_forget_context(context, d);
    rg_record_forget_context(context, d);
    rg_guard_forget_context(context, d);
    rg_functions_forget(); /* its modules go with it */
    rg_member_unmade(NULL);
    rg_context_gone(context, d);
    idle_check_all(devices);
}

/* ---- captures ---- */

void rg_capture_began(CUstream stream)
{
    const rg_track *t = rg_track_find(rg_track_key(stream));
    /* Only what may be called during any capture: of a stream of another context than the current one the device is not known, then. */
    CUcontext context = t ? t->context : context_of(stream), current = NULL;
    CUdevice device = t ? t->cu_device : -1;
    rg_real.cuCtxGetCurrent(&current);
    if (!t && (current != context || rg_real.cuCtxGetDevice(&device) != CUDA_SUCCESS))
        device = -1;
    if (stream == CU_STREAM_PER_THREAD)
        note_end();
    pthread_mutex_lock(&table_lock);
    if (captured_count < CAPTURED) {
        captured[captured_count].stream = stream;
        captured[captured_count].owner = stream == CU_STREAM_PER_THREAD ? &rg_thread_mark : NULL;
        captured[captured_count].context = context;
        captured[captured_count++].device = device;
    } else {
        captured_more++;
    }
    pthread_mutex_unlock(&table_lock);
}

void rg_capture_ended(CUstream stream)
{
    const char *owner = stream == CU_STREAM_PER_THREAD ? &rg_thread_mark : NULL;
    CUcontext context = owner ? context_of(stream) : NULL;
    pthread_mutex_lock(&table_lock);
    /* Else it was not captured: an error of the program, and no capture of ours ends by it. */
    if (!capture_ends(stream, owner, context) && captured_more) {
        captured_more--;
        uncount_capture();
    }
    pthread_mutex_unlock(&table_lock);
}

/* ---- priorities ---- */

/*
 * Two levels for each class, so that a program that tells its streams apart still does: high clients get the highest
 * priority for streams they made important and the one below for the rest; best-effort clients the lowest and the one above.
 * Effective between processes under MPS, and within a process always. The NULL stream takes the attribute too (measured on
 * an H200: a kernel on it behind a low-priority backlog went from 705 us to 108 us).
 */
void rg_stream_prioritise(CUstream stream, uint32_t mode, int asked)
{
    int least = 0, greatest = 0;
    if (!atomic_load(&rg.set_priorities) || !rg_real.cuStreamSetAttribute || !rg_real.cuCtxGetStreamPriorityRange ||
        rg_real.cuCtxGetStreamPriorityRange(&least, &greatest) != CUDA_SUCCESS || least - greatest < 3)
        return;
    bool raised = asked < 0;
    CUlaunchAttributeValue value = {.pad = {0}};
    value.priority = mode & RG_MODE_HIGH ? greatest + !raised : least - raised;
    rg_real.cuStreamSetAttribute(stream, CU_LAUNCH_ATTRIBUTE_PRIORITY, &value);
}

/* ---- busy and idle ---- */

/* A request begins, or has ended. Its number tells one device's from another's, and its end from its beginning. */
static void record_request(const rg_member *m, uint32_t device, bool over)
{
    if (!atomic_load_explicit(rg_rec.on, memory_order_relaxed))
        return;
    uint64_t since = atomic_load(&m->period[device].busy_tick), number = atomic_load(&m->slot->requests) + 1;
    rg_record(RG_OP_request, RG_TRACE_request, 0, 0, (number & 0xffffffff) << 16 | over << 8 | device, since,
              over ? rg_tick() - since : 0);
}

/* rg_ahead for where a busy period begins, and for its end (`ends`): once a request, so that none of it is in a near cache. */
static void period_ahead(rg_member *m, uint32_t device, bool ends)
{
    rg_device *d = &rg.segment->devices[device];
    rg_client *c = m->slot;
    RG_AHEAD_TO_WRITE(&m->period[device]);
    RG_AHEAD_TO_WRITE(&busy_lock);
    RG_AHEAD_TO_WRITE(&d->high_busy);
    RG_AHEAD_TO_WRITE(&d->high_launching);
    RG_AHEAD(&rg.segment->stops[device].armed);
    RG_AHEAD_TO_WRITE(&c->requests);
    rg_share *share = rg_share_of(rg.segment, device, m->slot_index);
    RG_AHEAD_TO_WRITE(share); /* three cache lines, of which the others are for the end */
    if (!ends)
        return;
    RG_AHEAD_TO_WRITE(&share->course);
    RG_AHEAD(&share->seen);
    RG_AHEAD_TO_WRITE(&c->waited);
}

bool rg_busy_begin(rg_member *m, uint32_t device, uint64_t key)
{
    bool begins = false;
    period_ahead(m, device, false);
    pthread_mutex_lock(&busy_lock);
    /* Of the process too: its work goes past Rigel, or Rigel's part in it has ended, since this launch began. */
    if (!atomic_load(&m->busy[device]) && atomic_load(&m->mode) & RG_MODE_HIGH && atomic_load(&rg.mode) != RG_MODE_BARE) {
        uint64_t now = rg_clock_ns();
        if (RG_UNLIKELY(atomic_load_explicit(&rg.stays, memory_order_relaxed)))
            rg_stay_coming(device, now);
        atomic_store(&m->period[device].busy_since, now);
        atomic_store(&m->period[device].busy_tick, rg_tick());
        atomic_store(&m->period[device].inside_ns, 0);
        atomic_store(&m->period[device].stayed, RG_STAYED_NOT);
        rg_requests_begin(m, device, key, now);
        record_request(m, device, false);
        rg_device_busy(&rg.segment->devices[device], m->slot_index, now);
        rg_stop_best_effort(rg.segment, device);
        atomic_store(&m->period[device].draining, RG_LAUNCHING);
        /* In this order: who launches beside this thread and finds that the client is busy goes on at once. */
        rg_device_launching(&rg.segment->devices[device], m->slot_index, true);
        atomic_store(&m->busy[device], 1);
        begins = true;
    }
    pthread_mutex_unlock(&busy_lock);
    return begins;
}

void rg_busy_begin_with(rg_member *m, const rg_track *t, enum rg_kind kind, uintptr_t units, rg_dims dims)
{
    if (rg_busy_begin(m, t->device, rg_request_key(kind == RG_WITHIN ? RG_COPY : kind, units, dims)))
        rg_stay_ahead(t, kind, units);
}

/* Whether all work of the client there is done; or, `or_covered`, somebody waits for what is not. */
static bool all_clean(const rg_member *m, uint32_t device, bool or_covered)
{
    uint32_t n = atomic_load(&rg.track_count);
    for (uint32_t i = 0; i < n; i++) {
        uint64_t state = atomic_load(&rg.tracks[i].state);
        if ((or_covered ? state == RG_DIRTY : state != RG_CLEAN) && atomic_load(&rg.tracks[i].device) == device &&
            rg_track_member(&rg.tracks[i]) == m)
            return false;
    }
    return true;
}

/* Whether a thread waits for work of the client there. */
static bool waited_for(const rg_member *m, uint32_t device)
{
    uint32_t n = atomic_load(&rg.track_count);
    for (uint32_t i = 0; i < n; i++)
        if ((atomic_load(&rg.tracks[i].state) & 3) == RG_TOKEN_WAIT && atomic_load(&rg.tracks[i].device) == device &&
            rg_track_member(&rg.tracks[i]) == m)
            return true;
    return false;
}

static bool drain(rg_member *m)
{
    bool drains = false;
    for (uint32_t device = 0; device < RG_MAX_DEVICES; device++) {
        if (!atomic_load(&m->busy[device]))
            continue;
        if (atomic_load(&m->period[device].draining) == RG_DRAINING) {
            drains = true;
            continue;
        }
        pthread_mutex_lock(&busy_lock);
        uint32_t draining = atomic_load(&m->period[device].draining);
        if (atomic_load(&m->busy[device]) && draining) {
            /* Another thread was here before this one, or a copy; it may be something else that this one waits for. */
            if (draining == RG_DRAINED && waited_for(m, device)) {
                atomic_store(&m->period[device].drain_since, rg_clock_ns());
                atomic_store(&m->period[device].draining, draining = RG_DRAINING);
            }
            drains |= draining == RG_DRAINING;
        } else if (atomic_load(&m->busy[device])) {
            /* Pairs with rg_mark: `draining` first, then the tracks. */
            atomic_store(&m->period[device].draining, RG_DRAINING);
            if (all_clean(m, device, true)) {
                uint64_t now = rg_clock_ns();
                atomic_store(&m->period[device].drain_since, now);
                atomic_store(&m->period[device].launched_at, now);
                rg_device_launching(&rg.segment->devices[device], m->slot_index, false);
                rg_device_wake(&rg.segment->devices[device]);
                drains = true;
                rg_changed(); /* the token may be another thread's, which has yet to say so */
            } else {
                atomic_store(&m->period[device].draining, RG_LAUNCHING);
            }
        }
        pthread_mutex_unlock(&busy_lock);
    }
    return drains;
}

/* A busy period is over: how much of it the program worked, and how much of it, at the end, it only waited. */
static void note_wait(rg_member *m, uint32_t device, uint64_t now)
{
    if (atomic_load(&m->period[device].draining) != RG_DRAINING) { /* the agent found out, or the program asks instead of waiting */
        rg_requests_skip(m, device, now);
        return;
    }
    uint64_t began = atomic_load(&m->period[device].busy_since), drain = atomic_load(&m->period[device].drain_since);
    uint64_t worked = rg_since(began, drain);
    uint64_t inside = atomic_load(&m->period[device].inside_ns);
    inside = inside < worked ? inside : worked; /* threads side by side */
    uint64_t waited = (rg_since(drain, now) + inside) / RG_WAITED_NS;
    worked = (worked - inside) / RG_WAITED_NS;
    uint64_t entry = (uint64_t)atomic_load(&m->period[device].stayed) << 62 | (worked < RG_WAITED_WORKED ? worked : RG_WAITED_WORKED) << 32 |
                     (waited < RG_WAITED_WAITED ? waited : RG_WAITED_WAITED) << 4 | device;
    uint64_t n = atomic_load_explicit(&m->slot->waited, memory_order_relaxed);
    atomic_store_explicit(&m->slot->waited_ring[n % RG_WAITED], entry, memory_order_relaxed);
    atomic_store_explicit(&m->slot->began_ring[n % RG_WAITED], began, memory_order_relaxed);
    atomic_store_explicit(&m->slot->kind_ring[n % RG_WAITED], rg_requests_kind(m, device), memory_order_relaxed);
    atomic_store_explicit(&m->slot->waited, n + 1, memory_order_release);
    rg_requests_end(m, device, rg_policy_waited(worked, waited));
}

bool rg_drain(void)
{
    uint32_t n = atomic_load(&rg.member_count);
    bool drains = false;
    for (uint32_t i = 0; i < n; i++)
        drains |= drain(&rg.members[i]);
    return drains;
}

void rg_waited(const rg_track *t, uint64_t since_ns)
{
    if (t)
        atomic_fetch_add(&rg_track_member(t)->period[rg_track_device(t)].inside_ns, rg_since(since_ns, rg_clock_ns()));
}

void rg_drain_end(rg_member *m, uint32_t device)
{
    pthread_mutex_lock(&busy_lock);
    if (atomic_load(&m->period[device].draining) && atomic_load(&m->mode) & RG_MODE_HIGH) {
        /* In this order: who launches beside this thread and finds that it does not drain goes on at once. */
        rg_device_launching(&rg.segment->devices[device], m->slot_index, true);
        atomic_store(&m->period[device].draining, RG_LAUNCHING);
    }
    pthread_mutex_unlock(&busy_lock);
}

bool rg_idle_check(rg_member *m, uint32_t device)
{
    bool ended = false;
    if (!atomic_load(&m->busy[device]) || !all_clean(m, device, false))
        return false;
    pthread_mutex_lock(&busy_lock);
    if (atomic_load(&m->busy[device])) {
        /* Pairs with rg_mark: clear `busy` first, then read the tracks again. */
        atomic_store(&m->busy[device], 0);
        if (all_clean(m, device, false)) {
            uint64_t now = rg_clock_ns(), took = rg_since(atomic_load(&m->period[device].busy_since), now);
            ended = true;
            if (RG_UNLIKELY(atomic_load_explicit(&rg.stays, memory_order_relaxed) | atomic_load_explicit(&rg.stays_open, memory_order_relaxed)))
                rg_stay_done(m, device, now); /* the program may not have said that it waits */
            rg_hist_add(&m->slot->request_ns, took);
            note_wait(m, device, now);
            record_request(m, device, true);
            if (rg_recorded)
                rg_record_request(RG_REC_WAITED, now, took);
            atomic_fetch_add(&m->slot->requests, 1);
            atomic_store(&m->period[device].draining, RG_LAUNCHING);
            atomic_store(&rg_share_of(rg.segment, device, m->slot_index)->idle_ns, now);
            rg_device_idle(&rg.segment->devices[device], m->slot_index, now);
            rg_device_wake(&rg.segment->devices[device]);
        } else {
            atomic_store(&m->busy[device], 1);
        }
    }
    pthread_mutex_unlock(&busy_lock);
    return ended;
}

void rg_busy_assert(rg_member *m)
{
    pthread_mutex_lock(&busy_lock);
    for (int i = 0; i < RG_MAX_DEVICES; i++)
        if (atomic_load(&m->busy[i]) && atomic_load(&m->mode) & RG_MODE_HIGH) {
            rg_device_busy(&rg.segment->devices[i], m->slot_index, rg_now_ns());
            if (!atomic_load(&m->period[i].draining))
                rg_device_launching(&rg.segment->devices[i], m->slot_index, true);
        }
    pthread_mutex_unlock(&busy_lock);
}

void rg_busy_end(rg_member *m)
{
    pthread_mutex_lock(&busy_lock);
    for (uint32_t i = 0; i < RG_MAX_DEVICES; i++) {
        if (atomic_exchange(&m->busy[i], 0))
            record_request(m, i, true);
        atomic_store(&m->period[i].draining, RG_LAUNCHING);
    }
    rg_changed();
    rg_segment_clear_busy(rg.segment, m->slot_index);
    pthread_mutex_unlock(&busy_lock);
}

void rg_busy_suspect(rg_member *m)
{
    pthread_mutex_lock(&table_lock); /* no track is dropped meanwhile: what is marked is in the table */
    for (uint32_t i = 0; i < atomic_load(&rg.track_count); i++)
        if (atomic_load(&rg.tracks[i].key) && rg_track_member(&rg.tracks[i]) == m)
            rg_mark(m, &rg.tracks[i]);
    pthread_mutex_unlock(&table_lock);
}

void rg_tracks_clear(void)
{
    for (uint32_t i = 0; i < atomic_load(&rg.track_count); i++)
        atomic_store(&rg.tracks[i].state, RG_CLEAN);
    rg_changed();
}

bool rg_streams_restamp(rg_member *m)
{
    bool all = true;
    for (uint32_t i = 0; i < atomic_load(&rg.track_count); i++) {
        rg_track *t = &rg.tracks[i];
        CUcontext popped;
        if (!rg_agent_enter()) /* keeps the stream alive, and captures from beginning */
            return false;
        bool capturing = atomic_load(&rg.captures) != 0;
        all &= !capturing;
        /* A per-thread stream cannot be named from here. */
        if (!capturing && atomic_load(&t->key) && rg_track_member(t) == m && !t->owner &&
            rg_real.cuCtxPushCurrent_v2(t->context) == CUDA_SUCCESS) {
            restamp(t->stream, atomic_load(&m->mode));
            rg_real.cuCtxPopCurrent_v2(&popped);
        }
        pthread_mutex_unlock(&rg_agent_lock);
    }
    return all;
}

void rg_busy_leave(rg_member *m)
{
    /* A handler that ends the process may have interrupted the very thread that holds the lock, and never return to it. */
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec++;
    bool locked = pthread_mutex_timedlock(&busy_lock, &until) == 0;
    rg_segment_clear_busy(rg.segment, m->slot_index);
    if (locked)
        pthread_mutex_unlock(&busy_lock);
}

/* ---- waits ---- */

/* Puts a token into a track with unfinished work. An event does not take the place of a thread that waits. */
static uint64_t cover(rg_track *t, uint64_t token)
{
    uint64_t state = atomic_load(&t->state);
    if ((token & 3) == RG_TOKEN_WAIT && state != RG_CLEAN)
        period_ahead(rg_track_member(t), rg_track_device(t), true);
    while (state != RG_CLEAN && ((token & 3) == RG_TOKEN_WAIT || (state & 3) != RG_TOKEN_WAIT))
        if (atomic_compare_exchange_weak(&t->state, &state, token)) {
            rg_changed();
            return token;
        }
    return 0;
}

/* Takes a token back: its work is waited for by nobody any more, which ends a drain. */
static void uncover(rg_track *t, uint64_t token)
{
    uint32_t device = atomic_load(&t->device);
    rg_member *m = rg_track_member(t);
    if (atomic_compare_exchange_strong(&t->state, &token, RG_DIRTY) && atomic_load(&m->period[device].draining))
        rg_drain_end(m, device);
}

bool rg_track_finished(rg_track *t, uint64_t token)
{
    uint32_t device = atomic_load(&t->device);
    rg_member *m = rg_track_member(t);
    return atomic_compare_exchange_strong(&t->state, &token, RG_CLEAN) && rg_idle_check(m, device);
}

/*
 * Where there are several clients, the NULL stream has a track for each that uses it: whoever waits for the stream waits for all
 * of them. Of a per-thread stream the tracks of this thread.
 */
static bool names_many(CUstream stream)
{
    return RG_UNLIKELY(atomic_load_explicit(&rg.several, memory_order_relaxed)) && (uintptr_t)stream <= 2;
}

static bool same_stream(const rg_track *t, CUstream stream, CUcontext context)
{
    const char *owner = stream == CU_STREAM_PER_THREAD ? &rg_thread_mark : NULL;
    return atomic_load(&t->key) && t->context == context && t->owner == owner && (owner || t->stream == CU_STREAM_LEGACY);
}

uint64_t rg_wait_stream_begin(CUstream stream)
{
    if (names_many(stream)) {
        CUcontext context = NULL;
        rg_real.cuCtxGetCurrent(&context);
        uint64_t token = rg_token(RG_TOKEN_WAIT);
        uint32_t n = atomic_load(&rg.track_count);
        for (uint32_t i = 0; i < n; i++)
            if (same_stream(&rg.tracks[i], stream, context))
                cover(&rg.tracks[i], token);
        return token;
    }
    rg_track *t = rg_track_find(rg_track_key(stream));
    return t ? cover(t, rg_token(RG_TOKEN_WAIT)) : 0;
}

void rg_wait_stream_end(CUstream stream, uint64_t token, bool ok)
{
    if (token && names_many(stream)) {
        CUcontext context = NULL;
        rg_real.cuCtxGetCurrent(&context);
        rg_wait_context_end(context, token, ok);
        return;
    }
    rg_track *t = token ? rg_track_find(rg_track_key(stream)) : NULL;
    if (!t)
        return;
    if (ok)
        rg_track_finished(t, token);
    else
        uncover(t, token);
}

bool rg_wait_stream_leave(uint64_t token)
{
    uint64_t left = rg_token(RG_TOKEN_EVENT);
    uint32_t n = token ? atomic_load(&rg.track_count) : 0;
    bool was = false;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t mine = token;
        if (!atomic_compare_exchange_strong(&rg.tracks[i].state, &mine, left))
            continue;
        was = true;
        uint32_t device = rg_track_device(&rg.tracks[i]);
        rg_member *m = rg_track_member(&rg.tracks[i]);
        rg_period *period = &m->period[device];
        pthread_mutex_lock(&busy_lock);
        if (atomic_load(&period->draining) == RG_DRAINING && !waited_for(m, device)) {
            atomic_fetch_add(&period->inside_ns, rg_since(atomic_load(&period->drain_since), rg_clock_ns()));
            atomic_store(&period->draining, RG_DRAINED);
        }
        pthread_mutex_unlock(&busy_lock);
    }
    return was;
}

uint64_t rg_look_stream_begin(CUstream stream, bool *own)
{
    *own = true;
    rg_track *t = names_many(stream) ? NULL : rg_track_find(rg_track_key(stream));
    if (!t)
        return rg_wait_stream_begin(stream);
    uint64_t state = RG_DIRTY, token = rg_token(RG_TOKEN_WAIT);
    if (atomic_compare_exchange_strong(&t->state, &state, token)) {
        rg_changed();
        return token;
    }
    *own = false; /* a token of somebody's covers what there is as well, and stays where it is; he may have yet to say so */
    if (state != RG_CLEAN)
        rg_changed();
    return state == RG_CLEAN ? 0 : state;
}

uint64_t rg_wait_context_begin(CUcontext context)
{
    uint64_t token = rg_token(RG_TOKEN_WAIT);
    uint32_t n = atomic_load(&rg.track_count);
    for (uint32_t i = 0; i < n; i++)
        if (atomic_load(&rg.tracks[i].key) && rg.tracks[i].context == context)
            cover(&rg.tracks[i], token);
    return token;
}

void rg_wait_context_end(CUcontext context, uint64_t token, bool ok)
{
    uint32_t n = atomic_load(&rg.track_count), devices = 0;
    for (uint32_t i = 0; i < n; i++) {
        rg_track *t = &rg.tracks[i];
        uint64_t mine = token;
        if (!atomic_load(&t->key) || t->context != context)
            continue;
        if (!ok)
            uncover(t, mine);
        else if (atomic_compare_exchange_strong(&t->state, &mine, RG_CLEAN))
            devices |= 1u << t->device;
    }
    idle_check_all(devices);
}

/* ---- events ---- */

/*
 * The last record of each event that fits: a lossy table, for a lost entry only means that the agent finds out instead.
 * `busy` is a try-lock that nobody ever waits for.
 */
static struct {
    _Atomic uint32_t busy;
    CUevent event;
    rg_track *track;
    uint64_t token;
} event_table[256];

static uint32_t event_hash(CUevent e)
{
    return (uint32_t)((uint64_t)(uintptr_t)e * 0x9e3779b97f4a7c15u >> 56);
}

static bool event_try(uint32_t i)
{
    uint32_t free = 0;
    return atomic_compare_exchange_strong_explicit(&event_table[i].busy, &free, 1, memory_order_acquire,
                                                   memory_order_relaxed);
}

static void event_release(uint32_t i)
{
    atomic_store_explicit(&event_table[i].busy, 0, memory_order_release);
}

uint64_t rg_event_record_begin(CUstream stream)
{
    rg_track *t = rg_track_find(rg_track_key(stream));
    return t ? cover(t, rg_token(RG_TOKEN_EVENT)) : 0;
}

void rg_event_record_end(CUevent event, CUstream stream, uint64_t token, bool ok)
{
    rg_track *t = token ? rg_track_find(rg_track_key(stream)) : NULL;
    uint32_t i = event_hash(event);
    uint64_t mine = token;
    bool entered = ok && event_try(i);
    if (entered) {
        event_table[i].event = event;
        event_table[i].track = t;
        event_table[i].token = t ? token : 0;
        event_release(i);
    } else if (t) {
        uncover(t, mine); /* nobody will know when it is done */
    }
}

uint64_t rg_event_wait_begin(CUevent event, rg_track **track)
{
    uint32_t i = event_hash(event);
    uint64_t token = 0;
    if (!event_try(i))
        return 0;
    if (event_table[i].event == event && event_table[i].token) {
        *track = event_table[i].track;
        token = event_table[i].token;
    }
    event_release(i);
    return token;
}

uint64_t rg_event_block_begin(CUevent event, rg_track **track)
{
    uint64_t recorded = rg_event_wait_begin(event, track), token = rg_token(RG_TOKEN_WAIT);
    /* Fails where that is known by now, or waited for, or something came after it: then there is nothing to find out. */
    return recorded && atomic_compare_exchange_strong(&(*track)->state, &recorded, token) ? token : 0;
}

void rg_event_block_end(rg_track *track, uint64_t token, bool ok)
{
    if (token && ok)
        rg_track_finished(track, token);
    else if (token)
        uncover(track, token);
}

void rg_event_forget(CUevent event)
{
    uint32_t i = event_hash(event);
    if (!event_try(i))
        return;
    if (event_table[i].event == event)
        event_table[i].event = NULL;
    event_release(i);
}
