/*
 * account.c: charges device memory to clients (account.h).
 *
 * Runs in the allocating thread of a client. Makes no CUDA call; system calls only where a lock is contended or a limit is
 * reached.
 */
#include "account.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/auxv.h>
#include <time.h>

enum { LOCK_SPINS = 200, LOCK_NAP_NS = 50000, LOCK_LIMIT_NS = 100000000 };

/* FNV-1a. */
static uint64_t hash(const char *bytes, size_t n)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < n; i++)
        h = (h ^ (unsigned char)bytes[i]) * 0x100000001b3u;
    return h | 1;
}

/* Made from the 16 random bytes that the kernel gives to a program when it starts it; hashed, for the C library makes its
 * stack guard of them. */
static uint64_t this_image(void)
{
    const char *random = (const char *)(uintptr_t)getauxval(AT_RANDOM);
    return random ? hash(random, 16) : 1;
}

/* Of an owner before an exec: it has ended, whatever has its pid. No process that lives was started just then and has it, too. */
static uint64_t ended(uint64_t owner)
{
    return owner ^ 1ull << 32;
}

/* The slots, other than this one, that the same process had before an exec. They are free for who comes next, as those of who has ended. */
static void end_former_image(rg_segment *seg, int slot)
{
    uint64_t me = atomic_load(&seg->clients[slot].owner), image = atomic_load(&seg->clients[slot].image);
    for (int i = 0; i < RG_MAX_CLIENTS; i++) {
        rg_client *c = &seg->clients[i];
        uint32_t live = RG_LIVE;
        if (i == slot || atomic_load(&c->owner) != me || atomic_load(&c->image) == image ||
            !atomic_compare_exchange_strong(&c->state, &live, RG_DEAD))
            continue;
        rg_segment_end_work(seg, i);
        for (int a = 0; a < RG_MAX_CLIENTS; a++) {
            uint64_t holder = me;
            atomic_compare_exchange_strong(&seg->accounts[a].lock, &holder, 0);
        }
        atomic_store(&c->owner, ended(me)); /* last: from now on others may take it */
    }
}

rg_account *rg_account_enter(rg_segment *seg, const char *name)
{
    char cut[RG_ACCOUNT_NAME_BYTES] = {0};
    snprintf(cut, sizeof cut, "%s", name);
    uint64_t key = hash(cut, strlen(cut));
    for (int i = 0; i < RG_MAX_CLIENTS; i++) {
        rg_account *a = &seg->accounts[i];
        uint64_t old = 0;
        if (!atomic_compare_exchange_strong(&a->key, &old, key) && old != key)
            continue;
        /* Everybody writes the same bytes, so it does not matter who does, or who dies doing it. */
        memcpy(a->name, cut, sizeof a->name);
        return a;
    }
    return NULL;
}

void rg_account_leave(rg_segment *seg, int slot)
{
    for (int i = 0; i < RG_MAX_CLIENTS; i++)
        atomic_fetch_and(&seg->accounts[i].slots, ~(1ull << slot));
}

uint32_t rg_account_class(rg_segment *seg, const char *name, uint32_t class)
{
    rg_account *a = rg_account_enter(seg, name);
    uint32_t wanted = a ? atomic_load(&a->wanted_class) : 0;
    return wanted == RG_CLASS_HIGH || wanted == RG_CLASS_BEST_EFFORT ? wanted : class;
}

rg_account *rg_account_join(rg_segment *seg, int slot, const char *name)
{
    atomic_store(&seg->clients[slot].image, this_image());
    end_former_image(seg, slot);
    rg_account_leave(seg, slot);
    rg_account *mine = rg_account_enter(seg, name);
    if (mine)
        atomic_fetch_or(&mine->slots, 1ull << slot);
    return mine;
}

bool rg_account_alone(rg_segment *seg, const rg_account *account, int slot)
{
    for (uint64_t left = atomic_load(&account->slots) & ~(1ull << slot); left; left &= left - 1) {
        rg_client *c = &seg->clients[__builtin_ctzll(left)];
        if (atomic_load(&c->state) == RG_LIVE && rg_client_alive(c))
            return false;
    }
    return true;
}

uint64_t rg_account_used(rg_segment *seg, rg_account *account)
{
    uint64_t sum = 0;
    for (uint64_t left = atomic_load(&account->slots); left; left &= left - 1) {
        rg_client *c = &seg->clients[__builtin_ctzll(left)];
        if (atomic_load(&c->state) == RG_LIVE)
            sum += atomic_load(&c->memory_bytes);
    }
    return sum;
}

void rg_account_note_peak(rg_segment *seg, rg_account *account)
{
    uint64_t used = rg_account_used(seg, account), peak = atomic_load(&account->peak_bytes);
    while (used > peak && !atomic_compare_exchange_weak(&account->peak_bytes, &peak, used))
        continue;
}

/* False after LOCK_LIMIT_NS: then the caller goes on without, at the risk of two processes passing the limit at once. */
static bool acquire(rg_account *account, uint64_t me)
{
    uint64_t since = 0;
    for (uint32_t tries = 0;; tries++) {
        uint64_t holder = 0;
        if (atomic_compare_exchange_strong(&account->lock, &holder, me))
            return true;
        if (tries < LOCK_SPINS) {
            if (tries % 16 == 15)
                sched_yield();
            continue;
        }
        uint64_t now = rg_now_ns();
        if (!since)
            since = now;
        if (now - since > LOCK_LIMIT_NS)
            return false;
        if (tries % 20 == 0 && !rg_owner_alive(holder) && atomic_compare_exchange_strong(&account->lock, &holder, me))
            return true;
        struct timespec nap = {0, LOCK_NAP_NS};
        nanosleep(&nap, NULL);
    }
}

static void release(rg_account *account, uint64_t me)
{
    atomic_compare_exchange_strong(&account->lock, &me, 0);
}

/* Whether a process of the client turned out to be dead, so that what it held is free. */
static bool reap_some(rg_segment *seg, rg_account *account, int slot)
{
    for (uint64_t left = atomic_load(&account->slots) & ~(1ull << slot); left; left &= left - 1) {
        rg_client *c = &seg->clients[__builtin_ctzll(left)];
        if (atomic_load(&c->state) == RG_LIVE && !rg_client_alive(c))
            return rg_segment_reap(seg) > 0;
    }
    return false;
}

bool rg_account_charge(rg_segment *seg, rg_account *account, int slot, uint64_t bytes)
{
    _Atomic uint64_t *held = &seg->clients[slot].memory_bytes;
    uint64_t me = atomic_load(&seg->clients[slot].owner);
    if (!bytes)
        return true;
    for (bool again = true;; again = false) {
        uint64_t limit = atomic_load(&account->limit_bytes);
        bool locked = limit && acquire(account, me);
        uint64_t used = limit ? rg_account_used(seg, account) : 0;
        bool fits = !limit || (used <= limit && bytes <= limit - used);
        if (fits)
            atomic_fetch_add(held, bytes);
        if (locked)
            release(account, me);
        if (fits)
            return true;
        if (again && reap_some(seg, account, slot))
            continue;
        atomic_fetch_add(&account->denied, 1);
        atomic_store(&account->denied_bytes, bytes);
        atomic_store(&account->denied_at_bytes, used);
        return false;
    }
}

void rg_account_add(rg_segment *seg, int slot, uint64_t bytes)
{
    atomic_fetch_add(&seg->clients[slot].memory_bytes, bytes);
}

void rg_account_return(rg_segment *seg, int slot, uint64_t bytes)
{
    atomic_fetch_sub(&seg->clients[slot].memory_bytes, bytes);
}
