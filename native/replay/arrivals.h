/*
 * arrivals.h: when requests fall due: evenly, as a Poisson process, or by a list of gaps from a file.
 *
 * Integers only, so that a seed gives the same nanoseconds on every machine: the virtual-time scenario is compared
 * to the last one. It must never read a clock.
 */
#ifndef RIGEL_ARRIVALS_H
#define RIGEL_ARRIVALS_H

#include <stddef.h>
#include <stdint.h>

enum rg_arrivals_kind { RG_ARRIVALS_UNIFORM, RG_ARRIVALS_POISSON, RG_ARRIVALS_LIST };

typedef struct {
    enum rg_arrivals_kind kind;
    uint64_t mean_gap_ns; /* uniform and Poisson */
    uint64_t random[4];   /* xoshiro256** */
    uint64_t *gaps_ns;    /* list: repeated from its start when it ends */
    size_t gap_count, gap_at;
} rg_arrivals;

/* rg_random: the next number of the sequence that the first state, any, decides (splitmix64). */
uint64_t rg_random(uint64_t *state);

/* rg_arrivals_init: uniform or Poisson with this mean gap (at least 1 ns). The seed decides everything. */
void rg_arrivals_init(rg_arrivals *a, enum rg_arrivals_kind kind, uint64_t mean_gap_ns, uint64_t seed);

/*
 * rg_arrivals_read: a JSON list of gaps in seconds, as Orion's args.input_file. Returns 0, or -1 and says in `error`:
 * "file:line:column: expected a number of seconds from 0 to 3600, got "x"".
 */
int rg_arrivals_read(const char *path, rg_arrivals *out, char *error, size_t error_bytes);

/* rg_arrivals_parse: the same for text in memory; `path` is what errors name. */
int rg_arrivals_parse(const char *path, const char *text, size_t bytes, rg_arrivals *out, char *error,
                      size_t error_bytes);

/* rg_arrivals_next_gap_ns: from the due time before (or the start) to the next. */
uint64_t rg_arrivals_next_gap_ns(rg_arrivals *a);

void rg_arrivals_free(rg_arrivals *a);

#endif
