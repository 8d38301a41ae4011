/*
 * guard-report.c: what the guard tells: counts and the last events in the segment, and lines on standard error (guard.c).
 */
#include "guard-inside.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

static _Atomic(const char *) failed_call;
static _Atomic CUresult failed_code;

void rg_guard_driver_failed(const char *call, CUresult code)
{
    atomic_store_explicit(&failed_call, call, memory_order_relaxed);
    atomic_store_explicit(&failed_code, code, memory_order_relaxed);
}

static const char *const cause_text[] = {
    "",
    "was called with a NULL handle",
    "was called with a handle of another context than the current one",
    "was called on a thread without a current context",
    "was called with a handle that another thread was using",
    "was to run on a stream of another context",
    "could not make a handle",
    "could make a handle only at the second attempt",
};

/* The number of an entry of the ring: of the last call that it stands for. */
static uint64_t number_of(const _Atomic uint64_t *entry)
{
    return atomic_load_explicit(&entry[0], memory_order_relaxed) >> 8;
}

/* Where an event goes: the entry of those of the same cause, thread, device, context and call; else the one
 * that was written longest ago. */
static _Atomic uint64_t *place_of(_Atomic uint64_t *ring, uint64_t cause, const uint64_t *words, bool *again)
{
    _Atomic uint64_t *oldest = ring;
    for (int i = 0; i < RG_GUARD_EVENTS; i++) {
        _Atomic uint64_t *entry = &ring[i * RG_GUARD_EVENT_WORDS];
        *again = (atomic_load_explicit(&entry[0], memory_order_relaxed) & 0xff) == cause;
        for (int k = 1; *again && k < RG_GUARD_EVENT_WORDS; k++)
            *again = k == 3 || k == 4 || atomic_load_explicit(&entry[k], memory_order_relaxed) == words[k];
        if (*again)
            return entry;
        if (number_of(entry) < number_of(oldest))
            oldest = entry;
    }
    return oldest;
}

/* Counts, and enters the event in the ring of the segment: what it was last of all, so that a torn entry is seen as such. A program that
 * does the same wrong thing in every iteration has one entry for that, with how often, and leaves room for what else it did. */
void rg_guard_note(enum rg_guard_cause cause, enum rg_blas call, CUcontext context, int device)
{
    static pthread_mutex_t ring_lock = PTHREAD_MUTEX_INITIALIZER;
    rg_client *c = rg.slot;
    _Atomic uint64_t *counter[] = {NULL,
                                   &c->guard_null_handle,
                                   &c->guard_wrong_context,
                                   &c->guard_no_context,
                                   &c->guard_in_use_elsewhere,
                                   &c->guard_foreign_stream,
                                   &c->guard_create_failed,
                                   &c->guard_create_retried};
    uint64_t words[RG_GUARD_EVENT_WORDS] = {0, (uint64_t)(uint32_t)device << 32 | (uint32_t)gettid(), (uintptr_t)context, rg_guard_calls, 1};
    strncpy((char *)&words[5], rg_cublas.names[call], sizeof words - 5 * sizeof *words - 1);
    atomic_fetch_add_explicit(counter[cause], 1, memory_order_relaxed);
    pthread_mutex_lock(&ring_lock);
    uint64_t number = atomic_fetch_add_explicit(&c->guard_events, 1, memory_order_relaxed) + 1;
    bool again;
    _Atomic uint64_t *entry = place_of(c->guard_ring, cause, words, &again);
    words[4] = again ? atomic_load_explicit(&entry[4], memory_order_relaxed) + 1 : 1;
    atomic_store_explicit(&entry[0], 0, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    for (int i = 1; i < RG_GUARD_EVENT_WORDS; i++)
        atomic_store_explicit(&entry[i], words[i], memory_order_relaxed);
    atomic_store_explicit(&entry[0], number << 8 | cause, memory_order_release);
    pthread_mutex_unlock(&ring_lock);
    static _Atomic bool said;
    if (atomic_load(&rg_guard_mode) == GUARD_WARN && !atomic_exchange(&said, true))
        rg_say("rigel: %s %s (thread %d, device %d); passed on as it is, as RIGEL_GUARD is \"warn\" (repair: \"repair\"); more of "
            "the kind are counted only",
            rg_cublas.names[call], cause_text[cause], (int)gettid(), device);
}

void rg_guard_repaired(void)
{
    atomic_fetch_add_explicit(&rg.slot->guard_repaired, 1, memory_order_relaxed);
}

void rg_guard_count_handles(int by)
{
    atomic_fetch_add_explicit(&rg.slot->guard_handles, (uint64_t)by, memory_order_relaxed);
}

/* Who has what of the GPUs: ", train 300 MiB (handles: 5)" for each client, who has most first, as far as they find room. */
static void list_use(char *text, size_t size)
{
    size_t at = (size_t)snprintf(text, size, "this process %llu MiB (handles: %llu)",
                                 (unsigned long long)atomic_load(&rg.slot->memory_bytes) >> 20,
                                 (unsigned long long)atomic_load(&rg.slot->guard_handles));
    uint64_t left = 0, bytes[RG_MAX_CLIENTS];
    for (int i = 0; i < RG_MAX_CLIENTS; i++) {
        rg_client *c = &rg.segment->clients[i];
        bytes[i] = atomic_load(&c->memory_bytes);
        if (atomic_load(&c->state) == RG_LIVE && (atomic_load(&c->guard_handles) || bytes[i] >> 20) && c != rg.slot)
            left |= 1ull << i;
    }
    while (left && at < size - RG_NAME_BYTES - 96) {
        int most = __builtin_ctzll(left);
        for (int i = most; i < RG_MAX_CLIENTS; i++)
            if (left >> i & 1 && bytes[i] > bytes[most])
                most = i;
        rg_client *c = &rg.segment->clients[most];
        at += (size_t)snprintf(text + at, size - at, ", %.*s %llu MiB (handles: %llu)", RG_NAME_BYTES - 1, c->name,
                               (unsigned long long)(bytes[most] >> 20), (unsigned long long)atomic_load(&c->guard_handles));
        left &= ~(1ull << most);
    }
    uint64_t others = 0;
    for (int i = 0; i < RG_MAX_CLIENTS; i++)
        others += left >> i & 1 ? bytes[i] : 0;
    if (left)
        snprintf(text + at, size - at, ", %d more %llu MiB", __builtin_popcountll(left), (unsigned long long)(others >> 20));
}
_Static_assert(RG_MAX_CLIENTS <= 64, "a bit for each");

/* What was tried, as the second half of a sentence. */
static void describe_relief(char *text, size_t size, const rg_relief *relief)
{
    uint64_t bytes = relief->own_bytes + relief->others_bytes;
    if (relief->handles || bytes)
        snprintf(text, size, "tried again after %zu idle handles and %llu MiB of memory pools (%llu of best-effort clients) were given back",
                 relief->handles, (unsigned long long)(bytes >> 20), (unsigned long long)(relief->others_bytes >> 20));
    else
        snprintf(text, size, "not tried again, as no memory pool, here or in a best-effort client, %s",
                 relief->others ? "gave anything back" : "keeps anything that could be given back");
}

void rg_guard_explain(cublasStatus_t status, int device, const rg_relief *relief)
{
    static _Atomic uint64_t last_ns;
    uint64_t now = rg_now_ns(), last = atomic_load(&last_ns);
    if ((last && now - last < 10000000000u) || !atomic_compare_exchange_strong(&last_ns, &last, now))
        return;
    char memory[96] = "free memory unknown", limit[96] = "", use[384], tried[192] = "not tried again", driver[96] = "none seen";
    size_t free_bytes = 0, total = 0;
    if (rg_real.cuMemGetInfo_v2 && rg_real.cuMemGetInfo_v2(&free_bytes, &total) == CUDA_SUCCESS)
        snprintf(memory, sizeof memory, "%zu of %zu MiB free", free_bytes >> 20, total >> 20);
    uint64_t cap = atomic_load(&rg.account->limit_bytes);
    if (cap)
        snprintf(limit, sizeof limit, "; this client %s its limit of %llu MiB (%llu in use)",
                 relief && relief->capped ? "has reached" : "is below", (unsigned long long)(cap >> 20),
                 (unsigned long long)(rg_account_used(rg.segment, rg.account) >> 20));
    list_use(use, sizeof use);
    if (relief)
        describe_relief(tried, sizeof tried, relief);
    const char *call = atomic_load(&failed_call);
    if (call)
        snprintf(driver, sizeof driver, "%s returned %d", call, atomic_load(&failed_code));
    rg_say("rigel: cublasCreate failed with status %d%s on device %d: %s%s; in use by clients, of it about 64 MiB for "
           "each handle: %s; %s; last failing driver call: %s; %s, or make one handle per thread and device and keep it",
           status,
           status == CUBLAS_STATUS_ALLOC_FAILED      ? " (out of memory)"
           : status == CUBLAS_STATUS_NOT_INITIALIZED ? " (CUDA could not be initialised)"
                                                     : "",
           device, memory, limit, use, tried, driver,
           relief && relief->capped ? "raise the client's memory" : "free memory there");
}
