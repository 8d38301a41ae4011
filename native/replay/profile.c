/*
 * profile.c: the reader behind profile.h. One pass over the text, one copy of it for the names.
 *
 * Input is whatever a user points at, so every byte is untrusted: all reads are bounded by the end of the text.
 */
#include "profile.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* Rigel's columns in their order, with the largest value of the numeric ones. */
#define COLUMNS(X)                     \
    X(name, 0)                         \
    X(kind, 0)                         \
    X(stream, RG_PROFILE_MAX_STREAMS - 1) \
    X(grid_x, 2147483647ull)           \
    X(grid_y, 65535)                   \
    X(grid_z, 65535)                   \
    X(block_x, 1024)                   \
    X(block_y, 1024)                   \
    X(block_z, 64)                     \
    X(registers, 255)                  \
    X(shared_bytes, 1048576)           \
    X(bytes, 1099511627776ull)         \
    X(duration_ns, RG_PROFILE_MAX_NS)  \
    X(gap_ns, RG_PROFILE_MAX_NS)

/* What an imported or analysed profile has besides: all of these or none. A replay needs bound and sms alone. */
#define FURTHER_COLUMNS(X)            \
    X(family, 0)                      \
    X(bound, 0)                       \
    X(bound_reason, 0)                \
    X(sms, 2147483647ull)             \
    X(flops, 9007199254740991ull)     \
    X(dram_bytes, 9007199254740991ull) \
    X(request, 2147483647ull)

/* What a recording of Rigel's has after those (version 2). A replay needs none of it. */
#define RECORDED_COLUMNS(X)             \
    X(graph, 2147483647ull)             \
    X(gemm_m, 9007199254740991ull)      \
    X(gemm_n, 9007199254740991ull)      \
    X(gemm_k, 9007199254740991ull)      \
    X(gemm_batch, 9007199254740991ull)  \
    X(gemm_type, 0)

#define COLUMN_ID(name, max) COL_##name,
#define COLUMN_NAME(name, max) #name,
#define COLUMN_MAX(name, max) max,
enum { COLUMNS(COLUMN_ID) COLUMN_COUNT };
enum { COL_last = COLUMN_COUNT - 1, FURTHER_COLUMNS(COLUMN_ID) WIDE_COLUMN_COUNT };
enum { COL_last_wide = WIDE_COLUMN_COUNT - 1, RECORDED_COLUMNS(COLUMN_ID) ALL_COLUMN_COUNT };
static const char *const column_names[ALL_COLUMN_COUNT] = {
    COLUMNS(COLUMN_NAME) FURTHER_COLUMNS(COLUMN_NAME) RECORDED_COLUMNS(COLUMN_NAME)};
static const uint64_t column_max[ALL_COLUMN_COUNT] = {
    COLUMNS(COLUMN_MAX) FURTHER_COLUMNS(COLUMN_MAX) RECORDED_COLUMNS(COLUMN_MAX)};

enum { ORION_NAME, ORION_PROFILE, ORION_MEMORY, ORION_SMS, ORION_DURATION, ORION_COUNT };
static const char *const orion_names[ORION_COUNT] = {"Name", "Profile", "Memory_footprint", "SM_usage", "Duration"};

static const char *const kind_names[] = {"kernel", "memset", "copy_h2d", "copy_d2h", "copy_d2d", "sync"};

#define MAGIC "# rigel-profile "
#define MAX_FIELDS 64 /* more are counted, not kept: the error names their number */

typedef struct {
    const char *start;
    size_t bytes;
    bool quoted;
} field;

typedef struct {
    const char *path;
    const char *at, *end;
    uint64_t line;     /* of the row being read, 1-based */
    uint64_t next_line;
    char *storage;     /* unescaped quoted fields and terminated names; as large as the text and one byte a field */
    size_t stored;
    field fields[MAX_FIELDS];
    size_t field_count;
    size_t columns; /* of Rigel's table, as its header says: with the further ones or without */
    const char *row_start; /* the row's raw text: Orion's names may hold unquoted commas */
    const char *row_end;
    char *error;
    size_t error_bytes;
} reader;

/* Writes "path:line: message" and returns -1. */
__attribute__((format(printf, 2, 3))) static int fail(reader *r, const char *format, ...)
{
    if (r->error_bytes == 0)
        return -1;
    int used = r->line ? snprintf(r->error, r->error_bytes, "%s:%llu: ", r->path, (unsigned long long)r->line)
                       : snprintf(r->error, r->error_bytes, "%s: ", r->path);
    if (used < 0 || (size_t)used >= r->error_bytes)
        return -1;
    va_list args;
    va_start(args, format);
    vsnprintf(r->error + used, r->error_bytes - (size_t)used, format, args);
    va_end(args);
    return -1;
}

/* What stood there, for an error: at most 40 bytes, nothing unprintable. */
static const char *shown(const char *start, size_t bytes, char buffer[48])
{
    size_t n = bytes < 40 ? bytes : 40;
    for (size_t i = 0; i < n; i++)
        buffer[i] = (start[i] >= 32 && start[i] < 127) ? start[i] : '?';
    memcpy(buffer + n, bytes > 40 ? "..." : "", bytes > 40 ? 4 : 1);
    return buffer;
}

static int fail_field(reader *r, const char *name, const char *expected, const field *got)
{
    char text[48];
    return fail(r, "field '%s': expected %s, got \"%s\"", name, expected, shown(got->start, got->bytes, text));
}

static bool at_line_end(const reader *r)
{
    return r->at < r->end && (*r->at == '\n' || *r->at == '\r');
}

/* Steps over "\n", "\r\n" or a lone "\r". */
static void skip_line_end(reader *r)
{
    if (r->at < r->end && *r->at == '\r')
        r->at++;
    if (r->at < r->end && *r->at == '\n')
        r->at++;
    r->next_line++;
}

/* A quoted field: the text between the quotes, with "" for one quote. It may span lines. */
static int read_quoted(reader *r, field *out)
{
    char *start = r->storage + r->stored;
    r->at++;
    for (;;) {
        if (r->at >= r->end)
            return fail(r, "a quoted field does not end: expected '\"' before the end of the file");
        char c = *r->at++;
        if (c == '"') {
            if (r->at >= r->end || *r->at != '"')
                break;
            r->at++;
        } else if (c == '\n') {
            r->next_line++;
        }
        r->storage[r->stored++] = c;
    }
    *out = (field){start, (size_t)(r->storage + r->stored - start), true};
    if (r->at < r->end && *r->at != ',' && !at_line_end(r)) {
        char text[48];
        return fail(r, "expected ',' or the end of the line after a quoted field, got \"%s\"", shown(r->at, 1, text));
    }
    return 0;
}

/* One row into r->fields. Returns 1, 0 at the end of the text, or -1. Empty lines and comments are stepped over. */
static int read_row(reader *r)
{
    for (;;) {
        r->line = r->next_line;
        if (r->at >= r->end)
            return 0;
        if (*r->at == '#') {
            while (r->at < r->end && !at_line_end(r))
                r->at++;
        }
        const char *blank = r->at;
        while (blank < r->end && (*blank == ' ' || *blank == '\t'))
            blank++;
        if (blank < r->end && *blank != '\n' && *blank != '\r')
            break;
        r->at = blank;
        skip_line_end(r);
    }
    r->field_count = 0;
    r->row_start = r->at;
    for (;;) {
        field f;
        if (r->at < r->end && *r->at == '"') {
            if (read_quoted(r, &f) < 0)
                return -1;
        } else {
            const char *start = r->at;
            while (r->at < r->end && *r->at != ',' && !at_line_end(r))
                r->at++;
            f = (field){start, (size_t)(r->at - start), false};
        }
        if (r->field_count < MAX_FIELDS)
            r->fields[r->field_count] = f;
        r->field_count++;
        if (r->at >= r->end || *r->at != ',')
            break;
        r->at++;
    }
    r->row_end = r->at;
    skip_line_end(r);
    return 1;
}

static field trimmed(field f)
{
    while (f.bytes && (*f.start == ' ' || *f.start == '\t')) {
        f.start++;
        f.bytes--;
    }
    while (f.bytes && (f.start[f.bytes - 1] == ' ' || f.start[f.bytes - 1] == '\t'))
        f.bytes--;
    return f;
}

static bool equals(field f, const char *text)
{
    return f.bytes == strlen(text) && memcmp(f.start, text, f.bytes) == 0;
}

/* An unsigned decimal integer up to `max`; with `decimal`, a fraction is allowed and rounded. */
static bool parse_number(field f, uint64_t max, bool decimal, uint64_t *out)
{
    f = trimmed(f);
    uint64_t value = 0;
    size_t i = 0;
    for (; i < f.bytes && f.start[i] >= '0' && f.start[i] <= '9'; i++) {
        uint64_t digit = (uint64_t)(f.start[i] - '0');
        if (value > (UINT64_MAX - digit) / 10)
            return false;
        value = value * 10 + digit;
    }
    if (i == 0)
        return false;
    if (decimal && i < f.bytes && f.start[i] == '.') {
        i++;
        bool up = i < f.bytes && f.start[i] >= '5' && f.start[i] <= '9';
        while (i < f.bytes && f.start[i] >= '0' && f.start[i] <= '9')
            i++;
        value += up && value < UINT64_MAX;
    }
    if (i != f.bytes || value > max)
        return false;
    *out = value;
    return true;
}

static int read_number(reader *r, const char *name, field f, uint64_t max, bool decimal, uint64_t *out)
{
    if (parse_number(f, max, decimal, out))
        return 0;
    char expected[64];
    snprintf(expected, sizeof(expected), "%s from 0 to %llu", decimal ? "a number" : "an integer",
             (unsigned long long)max);
    return fail_field(r, name, expected, &f);
}

/* A terminated copy of a field. */
static int keep_name(reader *r, const char *column, field f, const char **out)
{
    f = f.quoted ? f : trimmed(f);
    if (f.bytes == 0)
        return fail_field(r, column, "a name", &f);
    if (f.bytes > RG_PROFILE_MAX_NAME_BYTES)
        return fail(r, "field '%s': expected at most %u bytes, got %zu", column, RG_PROFILE_MAX_NAME_BYTES, f.bytes);
    char *kept = r->storage + r->stored;
    memcpy(kept, f.start, f.bytes);
    kept[f.bytes] = '\0';
    r->stored += f.bytes + 1;
    *out = kept;
    return 0;
}

static int read_kind(reader *r, field f, enum rg_profile_kind *out)
{
    f = trimmed(f);
    for (size_t i = 0; i < sizeof(kind_names) / sizeof(kind_names[0]); i++) {
        if (equals(f, kind_names[i])) {
            *out = (enum rg_profile_kind)i;
            return 0;
        }
    }
    return fail_field(r, "kind", "kernel, memset, copy_h2d, copy_d2h, copy_d2d or sync", &f);
}

static int read_bound(reader *r, field f, int32_t *out)
{
    f = trimmed(f);
    if (equals(f, "compute"))
        *out = 1;
    else if (equals(f, "memory"))
        *out = 0;
    else if (equals(f, "unknown"))
        *out = -1;
    else
        return fail_field(r, "bound", "compute, memory or unknown", &f);
    return 0;
}

/* Kernels of imported files may have no recorded shape: then grid and block are 0 and sms says what they need. */
static bool shape_unknown(const uint64_t value[ALL_COLUMN_COUNT])
{
    uint64_t any = 0;
    for (int i = COL_grid_x; i <= COL_block_z; i++)
        any |= value[i];
    return any == 0 && value[COL_sms] > 0;
}

static int read_rigel_row(reader *r, rg_profile_op *op)
{
    if (r->field_count != r->columns)
        return fail(r, "expected %zu fields, got %zu", r->columns, r->field_count);
    uint64_t value[ALL_COLUMN_COUNT] = {0};
    if (keep_name(r, "name", r->fields[COL_name], &op->name) < 0 || read_kind(r, r->fields[COL_kind], &op->kind) < 0)
        return -1;
    for (int i = COL_stream; i < COLUMN_COUNT; i++)
        if (read_number(r, column_names[i], r->fields[i], column_max[i], false, &value[i]) < 0)
            return -1;
    op->bound = -1;
    if (r->columns > COLUMN_COUNT) {
        if (read_bound(r, r->fields[COL_bound], &op->bound) < 0)
            return -1;
        for (size_t i = COL_sms; i < r->columns; i++)
            if (i != COL_gemm_type &&
                read_number(r, column_names[i], r->fields[i], column_max[i], false, &value[i]) < 0)
                return -1;
    }
    if (op->kind == RG_PROFILE_KERNEL && shape_unknown(value)) {
        op->sms = (uint32_t)value[COL_sms];
    } else if (op->kind == RG_PROFILE_KERNEL) {
        for (int i = COL_grid_x; i <= COL_block_z; i++)
            if (value[i] == 0)
                return fail_field(r, column_names[i], "at least 1 for a kernel", &r->fields[i]);
        uint64_t threads = value[COL_block_x] * value[COL_block_y] * value[COL_block_z];
        if (threads > 1024)
            return fail(r, "fields 'block_x', 'block_y', 'block_z': expected at most 1024 threads a block, got %llu",
                        (unsigned long long)threads);
    }
    op->stream = (uint32_t)value[COL_stream];
    for (int i = 0; i < 3; i++) {
        op->grid[i] = (uint32_t)value[COL_grid_x + i];
        op->block[i] = (uint32_t)value[COL_block_x + i];
    }
    op->registers = (uint32_t)value[COL_registers];
    op->shared_bytes = (uint32_t)value[COL_shared_bytes];
    op->bytes = value[COL_bytes];
    op->dram_bytes = value[COL_dram_bytes];
    op->duration_ns = value[COL_duration_ns];
    op->gap_ns = value[COL_gap_ns];
    return 0;
}

/*
 * Orion's files hold kernel names as the compiler writes them, commas included and unquoted, so the last four fields
 * are the numbers and all before them is the name (eth-easl/orion, h100/resnet50_train_bs32).
 */
static int read_orion_row(reader *r, rg_profile_op *op)
{
    if (r->field_count < ORION_COUNT)
        return fail(r, "expected %d fields, got %zu", ORION_COUNT, r->field_count);
    if (r->field_count > MAX_FIELDS)
        return fail(r, "expected at most %d fields, got %zu", MAX_FIELDS, r->field_count);
    field name = r->fields[0];
    const field *numbers = &r->fields[r->field_count - (ORION_COUNT - 1)] - 1; /* indexed from ORION_PROFILE */
    if (r->field_count > ORION_COUNT) {
        /* Four commas from the end of the row: none of the numbers is quoted, or they would not parse below. */
        const char *end = r->row_end;
        for (int commas = 0; commas < ORION_COUNT - 1 && end > r->row_start;)
            commas += *--end == ',';
        name = (field){r->row_start, (size_t)(end - r->row_start), false};
    }
    if (keep_name(r, "Name", name, &op->name) < 0)
        return -1;
    field profile = trimmed(numbers[ORION_PROFILE]);
    if (equals(profile, "-1") || equals(profile, "-1.0"))
        op->bound = -1;
    else if (equals(profile, "0") || equals(profile, "0.0"))
        op->bound = 0;
    else if (equals(profile, "1") || equals(profile, "1.0"))
        op->bound = 1;
    else
        return fail_field(r, "Profile", "1 (compute), 0 (memory) or -1 (unknown)", &profile);
    uint64_t memory, sms, duration_ns;
    if (read_number(r, "Memory_footprint", numbers[ORION_MEMORY], UINT64_MAX, true, &memory) < 0 ||
        read_number(r, "SM_usage", numbers[ORION_SMS], INT32_MAX, true, &sms) < 0 ||
        read_number(r, "Duration", numbers[ORION_DURATION], RG_PROFILE_MAX_NS, true, &duration_ns) < 0)
        return -1;
    op->kind = RG_PROFILE_KERNEL;
    op->sms = sms ? (uint32_t)sms : 1;
    op->duration_ns = duration_ns;
    return 0;
}

/* The column names of one of the formats, exactly. */
static int read_header(reader *r, bool rigel, bool *orion)
{
    int got = read_row(r);
    if (got < 0)
        return -1;
    static const char formats[] = "\"name,kind,stream,...\" (Rigel's) or "
                                  "\"Name,Profile,Memory_footprint,SM_usage,Duration\" (Orion's)";
    if (got == 0)
        return fail(r, "expected a header line %s, got an empty file", formats);
    *orion = !rigel && equals(trimmed(r->fields[0]), orion_names[0]);
    if (!*orion && !equals(trimmed(r->fields[0]), column_names[0])) {
        char text[48];
        return fail(r, "expected a header line %s, got \"%s\"", formats,
                    shown(r->row_start, (size_t)(r->row_end - r->row_start), text));
    }
    const char *const *names = *orion ? orion_names : column_names;
    size_t count = *orion ? ORION_COUNT : r->field_count > WIDE_COLUMN_COUNT ? ALL_COLUMN_COUNT
                   : r->field_count > COLUMN_COUNT    ? WIDE_COLUMN_COUNT
                                                      : COLUMN_COUNT;
    r->columns = count;
    for (size_t i = 0; i < count && i < r->field_count; i++) {
        field f = trimmed(r->fields[i]);
        if (!equals(f, names[i])) {
            char text[48];
            return fail(r, "header: expected column %zu to be '%s', got \"%s\"", i + 1, names[i],
                        shown(f.start, f.bytes, text));
        }
    }
    if (r->field_count != count)
        return fail(r, "header: expected %zu columns, got %zu", count, r->field_count);
    return 0;
}

/* "# rigel-profile 1; key=value": the version, and the rest kept as it is. Returns 1 if the line is there. */
static int read_magic(reader *r, rg_profile *out)
{
    size_t magic = strlen(MAGIC);
    if ((size_t)(r->end - r->at) < magic || memcmp(r->at, MAGIC, magic) != 0)
        return 0;
    const char *start = r->at + magic, *end = start;
    while (end < r->end && *end != '\n' && *end != '\r')
        end++;
    const char *rest = start;
    while (rest < end && *rest != ';')
        rest++;
    r->line = 1;
    field version = trimmed((field){start, (size_t)(rest - start), false});
    if (!equals(version, "1") && !equals(version, "2"))
        return fail_field(r, "version", "1 or 2", &version);
    rest += rest < end;
    field facts = trimmed((field){rest, (size_t)(end - rest), false});
    out->facts = r->storage + r->stored;
    memcpy(out->facts, facts.start, facts.bytes);
    out->facts[facts.bytes] = '\0';
    r->stored += facts.bytes + 1;
    r->at = end;
    skip_line_end(r);
    return 1;
}

static int append(reader *r, rg_profile *out, uint32_t *capacity, const rg_profile_op *op)
{
    if (out->op_count == RG_PROFILE_MAX_OPS)
        return fail(r, "expected at most %u operations", RG_PROFILE_MAX_OPS);
    if (out->op_count == *capacity) {
        uint32_t wanted = *capacity ? *capacity * 2 : 256;
        rg_profile_op *ops = realloc(out->ops, wanted * sizeof(*ops));
        if (!ops)
            return fail(r, "out of memory for %u operations", wanted);
        out->ops = ops;
        *capacity = wanted;
    }
    out->ops[out->op_count++] = *op;
    out->launches += op->kind != RG_PROFILE_SYNC;
    if (op->stream >= out->streams)
        out->streams = op->stream + 1;
    return 0;
}

static int parse(reader *r, rg_profile *out)
{
    const char *nul = memchr(r->at, '\0', (size_t)(r->end - r->at));
    if (nul) {
        r->line = 1;
        for (const char *p = r->at; p < nul; p++)
            r->line += *p == '\n';
        return fail(r, "expected text, got a zero byte");
    }
    if (r->end - r->at >= 3 && memcmp(r->at, "\xef\xbb\xbf", 3) == 0)
        r->at += 3; /* byte order mark: spreadsheets write it */
    int rigel = read_magic(r, out);
    if (rigel < 0)
        return -1;
    if (!rigel) {
        out->facts = r->storage + r->stored;
        out->facts[0] = '\0';
        r->stored++;
    }
    if (read_header(r, rigel, &out->orion) < 0)
        return -1;
    uint32_t capacity = 0;
    int got;
    while ((got = read_row(r)) > 0) {
        rg_profile_op op = {0};
        int row = out->orion ? read_orion_row(r, &op) : read_rigel_row(r, &op);
        if (row < 0 || append(r, out, &capacity, &op) < 0)
            return -1;
    }
    if (got < 0)
        return -1;
    if (out->launches == 0)
        return fail(r, "expected at least one operation that uses the GPU");
    out->waits = out->ops[out->op_count - 1].kind == RG_PROFILE_SYNC;
    return 0;
}

int rg_profile_parse(const char *path, const char *text, size_t bytes, rg_profile *out, char *error,
                     size_t error_bytes)
{
    memset(out, 0, sizeof(*out));
    reader *r = calloc(1, sizeof(*r));
    if (!r) {
        snprintf(error, error_bytes, "%s: out of memory", path);
        return -1;
    }
    r->path = path;
    r->error = error;
    r->error_bytes = error_bytes;
    r->at = text;
    r->end = text + bytes;
    r->next_line = 1;
    int result;
    if (bytes > RG_PROFILE_MAX_BYTES) {
        result = fail(r, "expected at most %u bytes, got %zu", RG_PROFILE_MAX_BYTES, bytes);
    } else {
        /* A field is stored at most twice (unescaped, then kept), with one end each; a field takes a byte of text. */
        r->storage = malloc(3 * bytes + 16);
        out->text = r->storage;
        result = r->storage ? parse(r, out) : fail(r, "out of memory for %zu bytes", 3 * bytes);
    }
    free(r);
    if (result < 0)
        rg_profile_free(out);
    return result;
}

int rg_profile_read(const char *path, rg_profile *out, char *error, size_t error_bytes)
{
    memset(out, 0, sizeof(*out));
    struct stat info;
    FILE *file = NULL;
    /* Looked at before it is opened: opening a pipe would wait for its writer. */
    if (stat(path, &info) < 0 || (S_ISREG(info.st_mode) && !(file = fopen(path, "rbe")))) {
        snprintf(error, error_bytes, "%s: cannot read the profile: %s", path, strerror(errno));
        return -1;
    }
    if (!file) {
        snprintf(error, error_bytes, "%s: cannot read the profile: not a regular file", path);
        return -1;
    }
    if (info.st_size > (off_t)RG_PROFILE_MAX_BYTES) {
        snprintf(error, error_bytes, "%s: expected at most %u bytes, got %lld", path, RG_PROFILE_MAX_BYTES,
                 (long long)info.st_size);
        fclose(file);
        return -1;
    }
    size_t size = (size_t)info.st_size;
    char *text = malloc(size + 1);
    if (!text) {
        snprintf(error, error_bytes, "%s: out of memory for %zu bytes", path, size);
        fclose(file);
        return -1;
    }
    size_t got = fread(text, 1, size, file);
    int result = -1;
    if (ferror(file))
        snprintf(error, error_bytes, "%s: cannot read the profile: %s", path, strerror(errno));
    else
        result = rg_profile_parse(path, text, got, out, error, error_bytes);
    fclose(file);
    free(text);
    return result;
}

void rg_profile_free(rg_profile *profile)
{
    free(profile->ops);
    free(profile->text);
    memset(profile, 0, sizeof(*profile));
}

uint64_t rg_profile_blocks(const rg_profile_op *op)
{
    return (uint64_t)op->grid[0] * op->grid[1] * op->grid[2];
}
