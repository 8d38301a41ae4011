/*
 * requests.c: what a high client's requests launch, and in what time, as who gives way late in a request has to know (rg_device_until_late).
 *
 * A program's requests may be of several kinds: a batch of another size goes to other kernels, in another number, or to as many that take
 * longer; and a step that a program waits for in the middle of a request is one of its own. A kind is known by what it begins with: a copy of about so
 * many bytes, a kernel and its grid, a graph; and by the copy before it, where that was waited for by itself, as one from pageable memory is.
 * (BERT on an H100: 273 kernels for one sequence of 128 tokens, 154 for two and more.)
 * What is known of the kind of the request under way, or the last one, is in the share, for all to see; of the others here. A kind
 * that is new begins with what is known of all requests together: one of many kinds that launch the same is known as well as ever.
 *
 * For how long a request needs the GPU (need_us) is one number for all, though a longer text needs it for longer. So it is more of it for kinds that wait for
 * the GPU at their end more often than others, and more often than in moments without best-effort work, and less for those that do not
 * (rg_policy_balance). Kinds that mostly wait keep the GPU busy, whatever they are given: they get more of it, and nobody else less for it. What launches
 * too little for need_us to matter, as a number that is read back, has no part in it.
 *
 * Called by track.c under its lock.
 */
#include "client.h"
#include "estimate.h"

#include <string.h>

enum { KINDS = 32 }; /* one of them for copies by themselves, if there are such */
enum { COPIES = 2, RESULT = 4, BITS = 7 }; /* in a key: it begins with a copy or memset; to the host */
enum { MOSTLY = RG_POLICY_ONE / 4 * 3 };
typedef struct {
    uint64_t usual_ns;
    uint32_t usual, votes;
    uint32_t need; /* rg_policy_balance */
    int32_t alike; /* rg_policy_alike */
    bool is_new;   /* none has ended */
    uint64_t course[RG_POLICY_COURSE];
} request_kind;

typedef struct {
    uint32_t now;  /* 1 + the kind that the share tells of; 0: of all, as it was found */
    uint32_t uses; /* how often another kind has begun */
    uint64_t keys[KINDS]; /* 0: none */
    uint32_t used[KINDS]; /* the smallest one's is longest ago */
    uint32_t waits[KINDS], alone[KINDS]; /* how many of a kind's requests waited for the GPU lately, and in holds, in RG_POLICY_ONE */
    uint32_t parts[KINDS]; /* its part of all requests, likewise */
    bool held;            /* the last one began in a hold */
    uint64_t begun, copy; /* what it began with; the same if it was nothing but a copy to the GPU, else 0 */
    request_kind all, kinds[KINDS];
} requests;

static requests table[RG_MAX_CLIENTS][RG_MAX_DEVICES];

static requests *requests_of(const rg_member *m, uint32_t device)
{
    return &table[m - rg.members][device];
}

static void read_share(const rg_share *share, request_kind *k)
{
    k->usual = atomic_load_explicit(&share->usual_launches, memory_order_relaxed);
    k->votes = atomic_load_explicit(&share->usual_votes, memory_order_relaxed);
    k->usual_ns = atomic_load_explicit(&share->usual_ns, memory_order_relaxed);
    for (int i = 0; i < RG_POLICY_COURSE; i++)
        k->course[i] = atomic_load_explicit(&share->course[i], memory_order_relaxed);
}

static void write_share(rg_share *share, const request_kind *k)
{
    atomic_store(&share->usual_votes, 0); /* who looks amid it takes them for unlike; or goes once by what it has read of the kind before */
    atomic_store(&share->usual_launches, k->usual);
    atomic_store_explicit(&share->usual_ns, k->usual_ns, memory_order_relaxed);
    atomic_store_explicit(&share->need_part, k->need, memory_order_relaxed);
    atomic_store_explicit(&share->alike, k->alike >= RG_POLICY_ALIKE, memory_order_relaxed);
    for (int i = 0; i < RG_POLICY_COURSE; i++)
        atomic_store_explicit(&share->course[i], k->course[i], memory_order_relaxed);
    atomic_store(&share->usual_votes, k->votes);
}

/* How many of a kind's requests wait, of those that do not without best-effort work. */
static uint32_t waits_of(const requests *r, uint32_t kind)
{
    uint64_t waits = r->waits[kind], alone = r->alone[kind];
    if (alone >= MOSTLY)
        return RG_POLICY_ONE;
    return waits > alone ? (uint32_t)((waits - alone) * RG_POLICY_ONE / (RG_POLICY_ONE - alone)) : 0;
}

/* The same of all, without those of kinds that mostly wait; `otherwise`: there are no others. */
static uint32_t waits_of_all(const requests *r, uint32_t otherwise)
{
    uint64_t waits = 0, parts = 0;
    for (uint32_t i = 0; i < KINDS; i++) {
        uint32_t part = r->waits[i] < MOSTLY && r->alone[i] < MOSTLY ? r->parts[i] : 0;
        waits += (uint64_t)waits_of(r, i) * part;
        parts += part;
    }
    return parts ? (uint32_t)(waits / parts) : otherwise;
}

/* The kind with this key, which is not 0; KINDS: there is none. */
static uint32_t find(const requests *r, uint64_t key)
{
    uint32_t i = 0;
    while (i < KINDS && r->keys[i] != key)
        i++;
    return i;
}

/* The kind with this key; the one that was used longest ago becomes it. */
static uint32_t kind_of(requests *r, uint64_t key)
{
    uint32_t found = find(r, key), oldest = 0;
    if (found < KINDS)
        return found;
    for (uint32_t i = 1; i < KINDS; i++)
        oldest = r->used[i] < r->used[oldest] ? i : oldest;
    request_kind *k = &r->kinds[oldest];
    r->keys[oldest] = key;
    *k = r->all;
    k->need = RG_POLICY_ONE;
    k->alike = 0;
    k->is_new = true;
    r->parts[oldest] = r->alone[oldest] = 0;
    r->waits[oldest] = waits_of_all(r, 0);
    /* No surer than it has to be. */
    k->votes = k->votes < 2 * k->usual ? k->votes : 2 * k->usual;
    return oldest;
}

/* A request begins that begins with this. */
static void turn_to(rg_share *share, requests *r, uint64_t key)
{
    if (r->now && r->keys[r->now - 1] == key)
        return;
    if (!r->now) {
        read_share(share, &r->all);
    } else if (r->keys[r->now - 1]) {
        read_share(share, &r->kinds[r->now - 1]);
        r->used[r->now - 1] = ++r->uses; /* until now */
    }
    r->now = 1 + kind_of(r, key);
    r->used[r->now - 1] = ++r->uses;
    write_share(share, &r->kinds[r->now - 1]);
}

/* Sizes an eighth apart at most are one: of as many lengths as there are texts there would be as many kinds. */
static uintptr_t about(uintptr_t bytes)
{
    uint32_t low = bytes >> 4 ? (uint32_t)(60 - __builtin_clzll(bytes)) : 0;
    return bytes >> low << low;
}

uint64_t rg_request_key(enum rg_kind kind, uintptr_t units, rg_dims dims)
{
    bool copies = kind > RG_GRAPH;
    uint64_t what = rg_hash_fold((uint64_t)kind + 1, copies ? about(units) : units);
    uint64_t bits = copies ? COPIES | (kind == RG_COPYWAIT ? RESULT : 0) : 0;
    return (rg_hash_fold(rg_hash_fold(what, dims.grid), dims.block) & ~(uint64_t)BITS) | bits | 1;
}

static bool in_hold(void)
{
    const rg_settings *settings = &rg.segment->settings;
    return atomic_load_explicit(&settings->hold_until_ms, memory_order_relaxed) && rg_hold_left_ms(settings, rg_now_ns());
}

void rg_requests_begin(rg_member *m, uint32_t device, uint64_t key, uint64_t now)
{
    rg_share *share = rg_share_of(rg.segment, device, m->slot_index);
    uint32_t usual = atomic_load_explicit(&share->usual_launches, memory_order_relaxed);
    uint64_t made = rg_progress(m->slot) - atomic_load(&share->began_launches), began = atomic_load(&share->began_ns);
    /* That by which it begins may be counted already, and a few between requests. */
    bool goes_on = began && made > 1 + usual / 8;
    requests *r = requests_of(m, device);
    /*
     * One whose end the agent has found may have been the copy of the input, and this is the rest of it; not where this is a copy, too, or what began with
     * a launch, as what nobody waits for after a request does, and another kind begins with this.
     */
    if (!began || (!goes_on && (key & COPIES || (!(r->begun & COPIES) && key && find(r, key) < KINDS)))) {
        /* What is right in front of a launch is its input. */
        uint64_t input = key & COPIES ? 0 : r->copy;
        r->begun = key;
        r->copy = 0;
        r->held = in_hold();
        if (key)
            turn_to(share, r, input ? (rg_hash_fold(key, input) & ~(uint64_t)BITS) | 1 : key);
    }
    atomic_store(&share->began_ns, goes_on ? began + rg_since(atomic_load(&m->period[device].paused_since), now) : now);
}

uint64_t rg_requests_kind(const rg_member *m, uint32_t device)
{
    const requests *r = requests_of(m, device);
    return r->now ? r->keys[r->now - 1] : 0;
}

static request_kind *kind_under_way(requests *r)
{
    return r->now ? &r->kinds[r->now - 1] : &r->all;
}

static void note_alike(rg_share *share, request_kind *kind, uint32_t usual, uint64_t made, enum rg_request is)
{
    kind->alike = rg_policy_alike(kind->alike, usual, made, is);
    atomic_store_explicit(&share->alike, kind->alike >= RG_POLICY_ALIKE, memory_order_relaxed);
}

void rg_requests_skip(rg_member *m, uint32_t device, uint64_t now)
{
    rg_share *share = rg_share_of(rg.segment, device, m->slot_index);
    uint32_t usual = atomic_load_explicit(&share->usual_launches, memory_order_relaxed);
    uint64_t progress = rg_progress(m->slot), made = progress - atomic_load(&share->began_launches);
    atomic_store(&m->period[device].paused_since, now);
    if (made < usual - usual / 8)
        return;
    requests *r = requests_of(m, device);
    if (made > usual)
        note_alike(share, kind_under_way(r), usual, made, RG_REQUEST_OTHER);
    atomic_store(&share->began_launches, progress);
    atomic_store(&share->began_ns, 0);
}

/* Of all requests together: what a new kind begins with. Called when the share knows of the request that has ended. */
static void note_all(requests *r, const rg_share *share, uint64_t made, uint64_t took_ns)
{
    request_kind *all = &r->all;
    if (rg_policy_usual(&all->usual, &all->votes, &all->usual_ns, made, took_ns) != RG_REQUEST_OTHER)
        for (int i = 0; i < RG_POLICY_COURSE; i++)
            all->course[i] = atomic_load_explicit(&share->course[i], memory_order_relaxed);
}

/* So many of the requests lately; `is`: the last one was. */
static uint32_t lately(uint32_t part, bool is)
{
    enum { KEPT = 8 };
    return part - part / KEPT + (is ? RG_POLICY_ONE / KEPT : 0);
}

/* The request that has ended, one of those that are alike, waited for the GPU or did not. It tells of need_us only where that is in force. */
static void balance(rg_share *share, requests *r, bool waited)
{
    enum { LATELY = 64 };
    uint32_t now = r->now - 1, *need = &r->kinds[now].need;
    bool held = in_hold();
    if (r->held && held)
        r->alone[now] = lately(r->alone[now], waited);
    if (r->held || held || !atomic_load_explicit(&rg.segment->settings.need_us, memory_order_relaxed))
        return;
    for (int i = 0; i < KINDS; i++)
        r->parts[i] -= r->parts[i] / LATELY;
    r->parts[now] += RG_POLICY_ONE / LATELY;
    r->waits[now] = lately(r->waits[now], waited);
    *need = rg_policy_balance(*need, waits_of(r, now), waits_of_all(r, waits_of(r, now)));
    atomic_store_explicit(&share->need_part, *need, memory_order_relaxed);
}

void rg_requests_end(rg_member *m, uint32_t device, bool waited)
{
    rg_share *share = rg_share_of(rg.segment, device, m->slot_index);
    uint64_t progress = rg_progress(m->slot), now = atomic_load(&m->period[device].launched_at);
    uint32_t usual = atomic_load_explicit(&share->usual_launches, memory_order_relaxed);
    uint32_t votes = atomic_load_explicit(&share->usual_votes, memory_order_relaxed);
    uint64_t usual_ns = atomic_load_explicit(&share->usual_ns, memory_order_relaxed);
    uint64_t made = progress - atomic_load(&share->began_launches), began = atomic_load(&share->began_ns), took_ns = began ? rg_since(began, now) : 0;
    requests *r = requests_of(m, device);
    request_kind *kind = kind_under_way(r);
    if (kind->is_new) {
        if (!made) { /* nothing but copies: it takes no place of its own */
            r->keys[r->now - 1] = 0;
            r->used[r->now - 1] = 0;
        } else if ((made > usual ? made - usual : usual - made) > usual / 8) {
            votes = 0; /* what is usual was no more than a guess, from all */
        }
        kind->is_new = false;
    }
    uint32_t until_now = usual;
    enum rg_request is = rg_policy_usual(&usual, &votes, &usual_ns, made, took_ns);
    if (is == RG_REQUEST_NEW)
        rg_share_forget_course(share);
    else if (is == RG_REQUEST_USUAL)
        rg_share_learn_course(share, began, took_ns);
    atomic_store(&share->began_launches, progress);
    atomic_store(&share->began_ns, 0);
    atomic_store_explicit(&share->usual_ns, usual_ns, memory_order_relaxed);
    atomic_store_explicit(&share->usual_launches, usual, memory_order_relaxed);
    atomic_store_explicit(&share->usual_votes, votes, memory_order_relaxed);
    if (made || is == RG_REQUEST_NEW)
        note_alike(share, kind, until_now, made, is);
    note_all(r, share, made, took_ns);
    r->copy = made || r->begun & RESULT ? 0 : r->begun;
    if (r->now && made && rg_policy_regular(usual, votes))
        balance(share, r, waited);
}

void rg_requests_forget(rg_member *m, uint32_t device)
{
    memset(requests_of(m, device), 0, sizeof(requests));
    rg_share_forget_requests(rg_share_of(rg.segment, device, m->slot_index), rg_progress(m->slot));
}
