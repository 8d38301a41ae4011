/*
 * profiles.h: the kernel profiles of one client, as many as its requests are of kinds, and which of them a request is of.
 *
 * rigel-replay and the virtual-time scenario draw by the same function, so that both have the same requests in the same order. It must
 * never touch a GPU, print, or end the program.
 */
#ifndef RIGEL_PROFILES_H
#define RIGEL_PROFILES_H

#include "profile.h"

#define RG_PROFILES_MOST 16u

typedef struct {
    rg_profile of[RG_PROFILES_MOST]; /* the first `count` */
    uint32_t count;
} rg_profiles;

/* rg_profiles_add: reads one more. Returns 0, or -1 and says what is wrong as rg_profile_read does; then those before are still there. */
int rg_profiles_add(rg_profiles *all, const char *path, char *error, size_t error_bytes);

/* rg_profiles_free: releases them all. Harmless on zeroed ones. */
void rg_profiles_free(rg_profiles *all);

/* rg_profiles_wait: whether every request is waited for, as it is where one of the profiles ends with a wait. */
bool rg_profiles_wait(const rg_profile *of, uint32_t count);

/*
 * rg_profiles_draw: which of `count` profiles an iteration (the first is 0) is of: each as often as another, by the seed of the
 * client's arrivals and the iteration's number alone. The numbers of arrivals.h that the same seed gives are others.
 */
uint32_t rg_profiles_draw(uint64_t seed, uint64_t iteration, uint32_t count);

#endif
