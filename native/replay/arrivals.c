/* arrivals.c: see arrivals.h. */
#include "arrivals.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define MAX_LIST_BYTES (64u << 20)
#define MAX_GAP_S 3600.0

/* splitmix64 and xoshiro256**: Blackman and Vigna, "Scrambled Linear Pseudorandom Number Generators", 2021. */
uint64_t rg_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

static uint64_t rotated(uint64_t x, int k)
{
    return (x << k) | (x >> (64 - k));
}

static uint64_t xoshiro256(uint64_t s[4])
{
    uint64_t result = rotated(s[1] * 5, 7) * 9, t = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = rotated(s[3], 45);
    return result;
}

/*
 * -ln(x / 2^64) in units of 2^-32, for x > 0. The logarithm to base 2 by squaring: each squaring of the mantissa
 * yields one bit. libm's log differs between machines in its last bit; this does not.
 */
static uint64_t minus_ln_q32(uint64_t x)
{
    int shift = __builtin_clzll(x);
    uint64_t mantissa = x << shift; /* in [1, 2), one is 2^63 */
    uint64_t fraction = 0;          /* log2(mantissa) in units of 2^-32 */
    for (int bit = 31; bit >= 0; bit--) {
        unsigned __int128 square = (unsigned __int128)mantissa * mantissa; /* one is 2^126 */
        if (square >> 127) {
            fraction |= 1ull << bit;
            mantissa = (uint64_t)(square >> 64);
        } else {
            mantissa = (uint64_t)(square >> 63);
        }
    }
    uint64_t minus_log2 = ((uint64_t)(shift + 1) << 32) - fraction;
    return (uint64_t)(((unsigned __int128)minus_log2 * 0xb17217f7d1cf79abull) >> 64); /* times ln 2 */
}

void rg_arrivals_init(rg_arrivals *a, enum rg_arrivals_kind kind, uint64_t mean_gap_ns, uint64_t seed)
{
    memset(a, 0, sizeof(*a));
    a->kind = kind;
    a->mean_gap_ns = mean_gap_ns ? mean_gap_ns : 1;
    for (int i = 0; i < 4; i++)
        a->random[i] = rg_random(&seed);
}

uint64_t rg_arrivals_next_gap_ns(rg_arrivals *a)
{
    if (a->kind == RG_ARRIVALS_UNIFORM)
        return a->mean_gap_ns;
    if (a->kind == RG_ARRIVALS_POISSON) {
        uint64_t x = xoshiro256(a->random);
        return (uint64_t)(((unsigned __int128)a->mean_gap_ns * minus_ln_q32(x ? x : 1)) >> 32);
    }
    uint64_t gap_ns = a->gaps_ns[a->gap_at];
    a->gap_at = (a->gap_at + 1) % a->gap_count;
    return gap_ns;
}

void rg_arrivals_free(rg_arrivals *a)
{
    free(a->gaps_ns);
    memset(a, 0, sizeof(*a));
}

/* ---- The list of gaps */

typedef struct {
    const char *path, *start, *at, *end;
    char *error;
    size_t error_bytes;
} reader;

static int fail(const reader *r, const char *expected)
{
    size_t line = 1, column = 1;
    for (const char *p = r->start; p < r->at; p++) {
        column = *p == '\n' ? 1 : column + 1;
        line += *p == '\n';
    }
    char got[24] = "the end of the file";
    if (r->at < r->end) {
        size_t n = 0;
        got[n++] = '"';
        for (const char *p = r->at; p < r->end && n < 17 && *p != '\n'; p++)
            got[n++] = (*p >= 32 && *p < 127) ? *p : '?';
        got[n++] = '"';
        got[n] = '\0';
    }
    snprintf(r->error, r->error_bytes, "%s:%zu:%zu: expected %s, got %s", r->path, line, column, expected, got);
    return -1;
}

static void skip_space(reader *r)
{
    while (r->at < r->end && (*r->at == ' ' || *r->at == '\t' || *r->at == '\n' || *r->at == '\r'))
        r->at++;
}

static bool digits(const char **at, const char *end)
{
    const char *start = *at;
    while (*at < end && **at >= '0' && **at <= '9')
        (*at)++;
    return *at > start;
}

/* One JSON number as nanoseconds. */
static int read_gap(reader *r, uint64_t *gap_ns)
{
    static const char expected[] = "a number of seconds from 0 to 3600";
    const char *at = r->at;
    bool valid = digits(&at, r->end) && !(*r->at == '0' && at - r->at > 1);
    if (valid && at < r->end && *at == '.') {
        at++;
        valid = digits(&at, r->end);
    }
    if (valid && at < r->end && (*at == 'e' || *at == 'E')) {
        at++;
        at += at < r->end && (*at == '+' || *at == '-');
        valid = digits(&at, r->end);
    }
    char number[64];
    size_t bytes = (size_t)(at - r->at);
    if (!valid || bytes >= sizeof(number))
        return fail(r, expected);
    memcpy(number, r->at, bytes);
    number[bytes] = '\0';
    double seconds = strtod(number, NULL);
    if (!(seconds >= 0 && seconds <= MAX_GAP_S))
        return fail(r, expected);
    *gap_ns = (uint64_t)(seconds * 1e9 + 0.5);
    r->at = at;
    return 0;
}

static int parse(reader *r, rg_arrivals *out)
{
    size_t capacity = 0;
    uint64_t total_ns = 0;
    skip_space(r);
    if (r->at >= r->end || *r->at != '[')
        return fail(r, "'[': a list of gaps in seconds");
    do {
        r->at++;
        skip_space(r);
        if (out->gap_count == capacity) {
            capacity = capacity ? capacity * 2 : 256;
            uint64_t *gaps = realloc(out->gaps_ns, capacity * sizeof(*gaps));
            if (!gaps) {
                snprintf(r->error, r->error_bytes, "%s: out of memory for %zu gaps", r->path, capacity);
                return -1;
            }
            out->gaps_ns = gaps;
        }
        if (read_gap(r, &out->gaps_ns[out->gap_count]) < 0)
            return -1;
        total_ns |= out->gaps_ns[out->gap_count++];
        skip_space(r);
    } while (r->at < r->end && *r->at == ',');
    if (r->at >= r->end || *r->at != ']')
        return fail(r, "',' or ']'");
    r->at++;
    skip_space(r);
    if (r->at < r->end)
        return fail(r, "nothing after the list");
    if (total_ns == 0) {
        snprintf(r->error, r->error_bytes, "%s: expected at least one gap greater than 0", r->path);
        return -1;
    }
    return 0;
}

int rg_arrivals_parse(const char *path, const char *text, size_t bytes, rg_arrivals *out, char *error,
                      size_t error_bytes)
{
    reader r = {path, text, text, text + bytes, error, error_bytes};
    memset(out, 0, sizeof(*out));
    out->kind = RG_ARRIVALS_LIST;
    int result = parse(&r, out);
    if (result < 0)
        rg_arrivals_free(out);
    return result;
}

int rg_arrivals_read(const char *path, rg_arrivals *out, char *error, size_t error_bytes)
{
    memset(out, 0, sizeof(*out));
    struct stat info;
    FILE *file = NULL;
    if (stat(path, &info) < 0 || (S_ISREG(info.st_mode) && !(file = fopen(path, "rbe")))) {
        snprintf(error, error_bytes, "%s: cannot read the list of arrivals: %s", path, strerror(errno));
        return -1;
    }
    if (!file || info.st_size > MAX_LIST_BYTES) {
        snprintf(error, error_bytes, "%s: cannot read the list of arrivals: %s", path,
                 file ? "longer than 64 MiB" : "not a regular file");
        if (file)
            fclose(file);
        return -1;
    }
    char *text = malloc((size_t)info.st_size + 1);
    int result = -1;
    if (!text)
        snprintf(error, error_bytes, "%s: out of memory", path);
    else
        result = rg_arrivals_parse(path, text, fread(text, 1, (size_t)info.st_size, file), out, error, error_bytes);
    fclose(file);
    free(text);
    return result;
}
