/* profiles.c: see profiles.h. */
#include "profiles.h"

#include "arrivals.h"

#include <stdio.h>

int rg_profiles_add(rg_profiles *all, const char *path, char *error, size_t error_bytes)
{
    if (all->count == RG_PROFILES_MOST) {
        snprintf(error, error_bytes, "%s: expected at most %u profiles of a client", path, RG_PROFILES_MOST);
        return -1;
    }
    int result = rg_profile_read(path, &all->of[all->count], error, error_bytes);
    all->count += result == 0;
    return result;
}

void rg_profiles_free(rg_profiles *all)
{
    for (; all->count; all->count--)
        rg_profile_free(&all->of[all->count - 1]);
}

bool rg_profiles_wait(const rg_profile *of, uint32_t count)
{
    bool waits = false;
    for (uint32_t i = 0; i < count; i++)
        waits |= of[i].waits;
    return waits;
}

uint32_t rg_profiles_draw(uint64_t seed, uint64_t iteration, uint32_t count)
{
    /* The number at this place of the sequence (splitmix64) that begins with the first one of the seed's own. */
    uint64_t state = rg_random(&seed) + iteration * 0x9e3779b97f4a7c15ull;
    return (uint32_t)((unsigned __int128)rg_random(&state) * count >> 64);
}
