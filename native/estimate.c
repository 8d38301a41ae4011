/*
 * estimate.c: see estimate.h. Used by clients and by the control process; allocates nothing and calls nobody.
 */
#include "estimate.h"

#include <string.h>

/* How far from its place a key may be: a table three quarters full still takes nearly all of them. */
enum { REACH = 32 };

uint64_t rg_hash_fold(uint64_t hash, uint64_t word)
{
    hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
    return hash ^ hash >> 32;
}

static uint64_t text_hash(const char *text, size_t most)
{
    uint64_t hash = 0xcbf29ce484222325u; /* FNV-1a */
    for (size_t i = 0; i < most && text[i]; i++)
        hash = (hash ^ (unsigned char)text[i]) * 0x100000001b3u;
    return hash | 1;
}

uint64_t rg_text_hash(const char *text)
{
    return text_hash(text, SIZE_MAX);
}

uint64_t rg_estimate_key(uint64_t program, const char *device, uint64_t kernel_hash, rg_dims dims)
{
    uint64_t key = rg_hash_fold(rg_hash_fold(kernel_hash, program), text_hash(device, RG_DEVICE_NAME_BYTES - 1));
    return rg_hash_fold(rg_hash_fold(key, dims.grid), dims.block) | 1;
}

static rg_estimate *place(rg_segment *seg, uint64_t key, uint32_t i)
{
    return &seg->estimates[((key >> 40) + i) % RG_MAX_ESTIMATES];
}

int rg_estimate_find(rg_segment *seg, uint64_t key)
{
    for (uint32_t i = 0; i < REACH; i++) {
        rg_estimate *e = place(seg, key, i);
        uint64_t found = atomic_load(&e->key);
        if (found == key)
            return (int)(e - seg->estimates);
        if (!found)
            break;
    }
    return -1;
}

int rg_estimate_enter(rg_segment *seg, uint64_t key)
{
    for (uint32_t i = 0; i < REACH; i++) {
        rg_estimate *e = place(seg, key, i);
        uint64_t found = 0;
        /* Places are taken in order and never given back, so two who enter the same key meet at the same place. */
        if (atomic_compare_exchange_strong(&e->key, &found, key) || found == key)
            return (int)(e - seg->estimates);
    }
    return -1;
}

void rg_estimate_describe(rg_segment *seg, int at, const rg_estimate_facts *facts)
{
    rg_estimate *e = &seg->estimates[at];
    uint32_t none = 0;
    /* Where it was launched is known to clients only, what it is perhaps from an earlier run. */
    if (facts->device)
        atomic_compare_exchange_strong(&e->device, &none, facts->device);
    if (atomic_load(&e->state))
        return;
    atomic_store(&e->program, facts->program);
    atomic_store(&e->grid_x, (uint32_t)facts->dims.grid);
    atomic_store(&e->grid_y, (uint32_t)(facts->dims.grid >> 32) & 0xffff);
    atomic_store(&e->grid_z, (uint32_t)(facts->dims.grid >> 48));
    atomic_store(&e->block_x, (uint32_t)facts->dims.block & 0xffff);
    atomic_store(&e->block_y, (uint32_t)(facts->dims.block >> 16) & 0xffff);
    atomic_store(&e->block_z, (uint32_t)(facts->dims.block >> 32));
    /* Several may write here at once: the same bytes, one by one; the last one stays zero. */
    for (size_t i = 0; i + 1 < sizeof e->name && facts->name[i]; i++)
        __atomic_store_n(&e->name[i], facts->name[i], __ATOMIC_RELAXED);
    atomic_store(&e->state, 1);
}

void rg_estimate_sample(rg_segment *seg, int at, uint32_t sample_ns)
{
    rg_estimate *e = &seg->estimates[at];
    uint32_t samples = atomic_load(&e->samples), old = atomic_load(&e->duration_ns);
    while (!atomic_compare_exchange_weak(&e->duration_ns, &old,
                                         rg_estimate_next(old, sample_ns, samples < RG_ESTIMATE_DOUBT)))
        continue;
    /* Last: who is killed before has changed the estimate, and only one sample fewer is known to be in it. Never wraps. */
    while (samples != UINT32_MAX && !atomic_compare_exchange_weak(&e->samples, &samples, samples + 1))
        continue;
}
