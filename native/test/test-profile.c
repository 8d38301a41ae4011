/*
 * test-profile.c: reads profiles of both formats, good and bad, through rg_profile_parse and rg_profile_read.
 *
 * Bad rows must be refused with the exact file, line, field and expectation; random bytes must never crash the reader
 * (run it built with -fsanitize=address,undefined for that to mean something).
 */
#include "../replay/profile.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int failures;

#define CHECK(condition, ...)                                        \
    do {                                                             \
        if (!(condition)) {                                          \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
            fprintf(stderr, __VA_ARGS__);                            \
            fputc('\n', stderr);                                     \
            failures++;                                              \
        }                                                            \
    } while (0)

#define MAGIC "# rigel-profile 1; device=NVIDIA H200; mode=infer\n"
#define HEADER                                                                                                  \
    "name,kind,stream,grid_x,grid_y,grid_z,block_x,block_y,block_z,registers,shared_bytes,bytes,duration_ns,gap_ns\n"
#define FURTHER                                                                                                 \
    "name,kind,stream,grid_x,grid_y,grid_z,block_x,block_y,block_z,registers,shared_bytes,bytes,duration_ns,gap_ns," \
    "family,bound,bound_reason,sms,flops,dram_bytes,request\n"
#define ORION "Name,Profile,Memory_footprint,SM_usage,Duration\n"
#define ROW "k,kernel,0,1,1,1,32,1,1,16,0,0,100,0\n"

static char error[RG_PROFILE_ERROR_BYTES];

static int parse(const char *text, rg_profile *out)
{
    error[0] = '\0';
    return rg_profile_parse("f.csv", text, strlen(text), out, error, sizeof(error));
}

static void test_rigel_format(void)
{
    rg_profile p;
    int rc = parse("\xef\xbb\xbf" MAGIC HEADER
                   "Memcpy HtoD (Pinned -> Device),copy_h2d,0,0,0,0,0,0,0,0,0,2408448,20123,4000\r\n"
                   "\"void k<int, \"\"x\"\">(0)\",kernel,1,1,2,3,32,4,2,33,1024,0,10671,5000\r\n"
                   "# a comment\n\n   \n"
                   "set, memset ,0,0,0,0,0,0,0,0,0, 64 ,7,1\n"
                   "\"two\nlines\",copy_d2d,0,0,0,0,0,0,0,0,0,1,1,1\n"
                   "out,copy_d2h,0,0,0,0,0,0,0,0,0,16000,2000,4000\n"
                   "sync,sync,0,0,0,0,0,0,0,0,0,0,0,1000",
                   &p);
    CHECK(rc == 0, "%s", error);
    if (rc)
        return;
    CHECK(!p.orion && p.waits && p.op_count == 6 && p.launches == 5 && p.streams == 2, "%u %u %u", p.op_count,
          p.launches, p.streams);
    CHECK(strcmp(p.facts, "device=NVIDIA H200; mode=infer") == 0, "%s", p.facts);
    const rg_profile_op *k = &p.ops[1];
    CHECK(strcmp(k->name, "void k<int, \"x\">(0)") == 0, "%s", k->name);
    CHECK(k->kind == RG_PROFILE_KERNEL && k->stream == 1 && rg_profile_blocks(k) == 6, "%d", (int)k->kind);
    CHECK(k->block[0] == 32 && k->block[1] == 4 && k->block[2] == 2 && k->registers == 33 && k->shared_bytes == 1024,
          "%u", k->registers);
    CHECK(k->duration_ns == 10671 && k->gap_ns == 5000 && k->bytes == 0, "%llu", (unsigned long long)k->duration_ns);
    CHECK(p.ops[0].kind == RG_PROFILE_COPY_H2D && p.ops[0].bytes == 2408448, "copy_h2d");
    CHECK(p.ops[2].kind == RG_PROFILE_MEMSET && p.ops[2].bytes == 64, "memset, spaces around numbers");
    CHECK(p.ops[3].kind == RG_PROFILE_COPY_D2D && strcmp(p.ops[3].name, "two\nlines") == 0, "%s", p.ops[3].name);
    CHECK(p.ops[4].kind == RG_PROFILE_COPY_D2H && p.ops[5].kind == RG_PROFILE_SYNC, "last rows");
    rg_profile_free(&p);
    rg_profile_free(&p);

    CHECK(parse(HEADER ROW, &p) == 0 && !p.waits && p.facts[0] == '\0', "without the first line: %s", error);
    rg_profile_free(&p);
}

static void test_further_columns(void)
{
    rg_profile p;
    int rc = parse(MAGIC FURTHER "k,kernel,0,4,1,1,32,1,1,16,0,0,100,0,gemm,compute,\"95% of peak, ncu\",9,7,8,0\n"
                                 "o,kernel,0,0,0,0,0,0,0,0,0,0,100,0,other,memory,,17,0,0,1\n"
                                 "c,copy_h2d,1,0,0,0,0,0,0,0,0,64,7,1,memcpy,unknown,,0,0,0,1\n",
                   &p);
    CHECK(rc == 0, "%s", error);
    if (rc)
        return;
    CHECK(p.op_count == 3 && p.ops[0].bound == 1 && p.ops[0].sms == 0 && p.ops[0].grid[0] == 4, "%u", p.ops[0].sms);
    CHECK(p.ops[1].bound == 0 && p.ops[1].sms == 17 && p.ops[1].duration_ns == 100, "%u", p.ops[1].sms);
    CHECK(p.ops[2].bound == -1 && p.ops[2].stream == 1 && p.ops[2].bytes == 64, "%d", p.ops[2].bound);
    rg_profile_free(&p);
}

static void test_orion_format(void)
{
    rg_profile p;
    int rc = parse(ORION "Conv,0,0,6272,446208\n"
                         "void at::(anonymous namespace)::max_pool,1,0,3136.0,184192.5\n"
                         "void cask<a<b, c>>(T1, bool),-1,0,1,6464\r\n"
                         "\"quoted, name\",-1,1,0,7\n",
                   &p);
    CHECK(rc == 0, "%s", error);
    if (rc)
        return;
    CHECK(p.orion && !p.waits && p.op_count == 4 && p.launches == 4 && p.streams == 1, "%u", p.op_count);
    CHECK(p.ops[0].sms == 6272 && p.ops[0].bound == 0 && p.ops[0].duration_ns == 446208, "%u", p.ops[0].sms);
    CHECK(p.ops[1].sms == 3136 && p.ops[1].bound == 1 && p.ops[1].duration_ns == 184193, "%llu",
          (unsigned long long)p.ops[1].duration_ns);
    CHECK(strcmp(p.ops[2].name, "void cask<a<b, c>>(T1, bool)") == 0, "%s", p.ops[2].name);
    CHECK(p.ops[2].bound == -1 && p.ops[2].sms == 1 && p.ops[2].duration_ns == 6464, "%d", p.ops[2].bound);
    CHECK(strcmp(p.ops[3].name, "quoted, name") == 0 && p.ops[3].sms == 1, "%s", p.ops[3].name);
    rg_profile_free(&p);
}

static const struct {
    const char *text, *expected;
} bad[] = {
    {"", "f.csv:1: expected a header line \"name,kind,stream,...\" (Rigel's) or "
         "\"Name,Profile,Memory_footprint,SM_usage,Duration\" (Orion's), got an empty file"},
    {"\n \n", "f.csv:3: expected a header line \"name,kind,stream,...\" (Rigel's) or "
              "\"Name,Profile,Memory_footprint,SM_usage,Duration\" (Orion's), got an empty file"},
    {"{\"clients\": []}\n", "f.csv:1: expected a header line \"name,kind,stream,...\" (Rigel's) or "
                            "\"Name,Profile,Memory_footprint,SM_usage,Duration\" (Orion's), got \"{\"clients\": []}\""},
    {"# rigel-profile 3; x=y\n" HEADER ROW, "f.csv:1: field 'version': expected 1 or 2, got \"3\""},
    {MAGIC ORION "Conv,0,0,1,1\n", "f.csv:2: expected a header line \"name,kind,stream,...\" (Rigel's) or "
                                   "\"Name,Profile,Memory_footprint,SM_usage,Duration\" (Orion's), got "
                                   "\"Name,Profile,Memory_footprint,SM_usage,D...\""},
    {"name,stream,kind\n", "f.csv:1: header: expected column 2 to be 'kind', got \"stream\""},
    {"name,kind\n", "f.csv:1: header: expected 14 columns, got 2"},
    {"Name,Profile,Memory_footprint,SM_usage,Time\n",
     "f.csv:1: header: expected column 5 to be 'Duration', got \"Time\""},
    {"Name,Profile,Memory_footprint,SM_usage,Duration,More\n", "f.csv:1: header: expected 5 columns, got 6"},
    {MAGIC HEADER, "f.csv:3: expected at least one operation that uses the GPU"},
    {HEADER "sync,sync,0,0,0,0,0,0,0,0,0,0,0,0\n", "f.csv:3: expected at least one operation that uses the GPU"},
    {HEADER "k,kernel,0,1,1,1,32,1,1,16,0,0,100\n", "f.csv:2: expected 14 fields, got 13"},
    {HEADER ROW "k,kernel,0,1,1,1,32,1,1,16,0,0,100,0,9\n", "f.csv:3: expected 14 fields, got 15"},
    {HEADER ",kernel,0,1,1,1,32,1,1,16,0,0,100,0\n", "f.csv:2: field 'name': expected a name, got \"\""},
    {HEADER "k,kernal,0,1,1,1,32,1,1,16,0,0,100,0\n",
     "f.csv:2: field 'kind': expected kernel, memset, copy_h2d, copy_d2h, copy_d2d or sync, got \"kernal\""},
    {HEADER "k,kernel,32,1,1,1,32,1,1,16,0,0,100,0\n",
     "f.csv:2: field 'stream': expected an integer from 0 to 31, got \"32\""},
    {HEADER "k,kernel,-1,1,1,1,32,1,1,16,0,0,100,0\n",
     "f.csv:2: field 'stream': expected an integer from 0 to 31, got \"-1\""},
    {HEADER "k,kernel,0,0,1,1,32,1,1,16,0,0,100,0\n",
     "f.csv:2: field 'grid_x': expected at least 1 for a kernel, got \"0\""},
    {HEADER "k,kernel,0,1,65536,1,32,1,1,16,0,0,100,0\n",
     "f.csv:2: field 'grid_y': expected an integer from 0 to 65535, got \"65536\""},
    {HEADER "k,kernel,0,1,1,1,1024,2,1,16,0,0,100,0\n",
     "f.csv:2: fields 'block_x', 'block_y', 'block_z': expected at most 1024 threads a block, got 2048"},
    {HEADER "k,kernel,0,1,1,1,32,1,1,many,0,0,100,0\n",
     "f.csv:2: field 'registers': expected an integer from 0 to 255, got \"many\""},
    {HEADER "k,kernel,0,1,1,1,32,1,1,16,1e3,0,100,0\n",
     "f.csv:2: field 'shared_bytes': expected an integer from 0 to 1048576, got \"1e3\""},
    {HEADER "k,copy_h2d,0,0,0,0,0,0,0,0,0,99999999999999999999,100,0\n",
     "f.csv:2: field 'bytes': expected an integer from 0 to 1099511627776, got \"99999999999999999999\""},
    {HEADER ROW "\n# c\nk,kernel,0,1,1,1,32,1,1,16,0,0,1.5,0\n",
     "f.csv:5: field 'duration_ns': expected an integer from 0 to 3600000000000, got \"1.5\""},
    {HEADER "k,kernel,0,1,1,1,32,1,1,16,0,0,,0\n",
     "f.csv:2: field 'duration_ns': expected an integer from 0 to 3600000000000, got \"\""},
    {HEADER "k,kernel,0,1,1,1,32,1,1,16,0,0,100,3600000000001\n",
     "f.csv:2: field 'gap_ns': expected an integer from 0 to 3600000000000, got \"3600000000001\""},
    {HEADER "k,kernel,0,1,1,1,32,1,1,16,0,0,100,\x01\xff\n",
     "f.csv:2: field 'gap_ns': expected an integer from 0 to 3600000000000, got \"??\""},
    {FURTHER "k,kernel,0,1,1,1,32,1,1,16,0,0,100,0,gemm,fast,,0,0,0,0\n",
     "f.csv:2: field 'bound': expected compute, memory or unknown, got \"fast\""},
    {FURTHER "k,kernel,0,1,1,1,32,1,1,16,0,0,100,0,gemm,compute,,0,0,0,x\n",
     "f.csv:2: field 'request': expected an integer from 0 to 2147483647, got \"x\""},
    {FURTHER "k,kernel,0,0,0,0,0,0,0,0,0,0,100,0,gemm,compute,,0,0,0,0\n",
     "f.csv:2: field 'grid_x': expected at least 1 for a kernel, got \"0\""},
    {FURTHER ROW, "f.csv:2: expected 21 fields, got 14"},
    {"name,kind,stream,grid_x,grid_y,grid_z,block_x,block_y,block_z,registers,shared_bytes,bytes,duration_ns,gap_ns,"
     "family\n",
     "f.csv:1: header: expected 21 columns, got 15"},
    {HEADER "\"two\nlines\",kernel,0,1,1,1,32,1,1,16,0,0,100,0\nk,x,0,1,1,1,32,1,1,16,0,0,100,0\n",
     "f.csv:4: field 'kind': expected kernel, memset, copy_h2d, copy_d2h, copy_d2d or sync, got \"x\""},
    {HEADER "\"k,kernel,0,1,1,1,32,1,1,16,0,0,100,0\n",
     "f.csv:2: a quoted field does not end: expected '\"' before the end of the file"},
    {HEADER "\"k\"x,kernel,0,1,1,1,32,1,1,16,0,0,100,0\n",
     "f.csv:2: expected ',' or the end of the line after a quoted field, got \"x\""},
    {ORION "Conv,0,0,1\n", "f.csv:2: expected 5 fields, got 4"},
    {ORION "Conv,2,0,1,100\n", "f.csv:2: field 'Profile': expected 1 (compute), 0 (memory) or -1 (unknown), got \"2\""},
    {ORION "Conv,0,x,1,100\n",
     "f.csv:2: field 'Memory_footprint': expected a number from 0 to 18446744073709551615, got \"x\""},
    {ORION "Conv,0,0,-3,100\n", "f.csv:2: field 'SM_usage': expected a number from 0 to 2147483647, got \"-3\""},
    {ORION "Conv,0,0,1,\n", "f.csv:2: field 'Duration': expected a number from 0 to 3600000000000, got \"\""},
    {ORION "Conv,0,0,1,nan\n", "f.csv:2: field 'Duration': expected a number from 0 to 3600000000000, got \"nan\""},
    {ORION ",0,0,1,5\n", "f.csv:2: field 'Name': expected a name, got \"\""},
};

static void test_bad_text(void)
{
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        rg_profile p;
        int rc = parse(bad[i].text, &p);
        CHECK(rc == -1, "case %zu was read", i);
        CHECK(strcmp(error, bad[i].expected) == 0, "case %zu:\n  got      %s\n  expected %s", i, error,
              bad[i].expected);
        CHECK(p.ops == NULL && p.text == NULL, "case %zu: a failed read leaves nothing to free", i);
        rg_profile_free(&p);
    }
    rg_profile p;
    static const char zero[] = HEADER "k\0,kernel";
    CHECK(rg_profile_parse("f.csv", zero, sizeof(zero) - 1, &p, error, sizeof(error)) == -1 &&
              strcmp(error, "f.csv:2: expected text, got a zero byte") == 0,
          "%s", error);
    char tiny[8];
    CHECK(rg_profile_parse("f.csv", "x", 1, &p, tiny, sizeof(tiny)) == -1 && strlen(tiny) == 7, "short error buffer");
}

static void test_limits(void)
{
    /* A name of the largest length is read, one byte more is not. */
    size_t bytes = RG_PROFILE_MAX_NAME_BYTES + 1;
    char *text = malloc(strlen(HEADER) + strlen(ROW) + bytes + 1);
    for (int over = 0; over < 2; over++) {
        char *at = stpcpy(text, HEADER);
        memset(at, 'n', bytes - 1 + (size_t)over);
        stpcpy(at + bytes - 1 + over, ROW + 1);
        rg_profile p;
        int rc = parse(text, &p);
        CHECK(rc == -over, "a name of %zu bytes: %d %s", bytes - 1 + (size_t)over, rc, error);
        rg_profile_free(&p);
    }
    CHECK(strcmp(error, "f.csv:2: field 'name': expected at most 65535 bytes, got 65536") == 0, "%s", error);
    free(text);

    size_t row = strlen(ORION "k,0,0,1,1\n") - strlen(ORION);
    char *many = malloc(strlen(ORION) + row * (RG_PROFILE_MAX_OPS + 1) + 1);
    char *at = stpcpy(many, ORION);
    for (uint32_t i = 0; i < RG_PROFILE_MAX_OPS + 1; i++)
        at = stpcpy(at, "k,0,0,1,1\n");
    rg_profile p;
    CHECK(parse(many, &p) == -1 && strcmp(error, "f.csv:1000002: expected at most 1000000 operations") == 0, "%s",
          error);
    at[-(ptrdiff_t)row] = '\0';
    CHECK(parse(many, &p) == 0 && p.op_count == RG_PROFILE_MAX_OPS, "%s", error);
    rg_profile_free(&p);
    free(many);
}

static void test_files(void)
{
    char folder[] = "/tmp/rigel-test-profile-XXXXXX";
    if (!mkdtemp(folder)) {
        perror("mkdtemp");
        failures++;
        return;
    }
    char path[128], expected[256];
    rg_profile p;
    snprintf(path, sizeof(path), "%s/p.csv", folder);
    snprintf(expected, sizeof(expected), "%s: cannot read the profile: No such file or directory", path);
    CHECK(rg_profile_read(path, &p, error, sizeof(error)) == -1 && strcmp(error, expected) == 0, "%s", error);
    rg_profile_free(&p);
    FILE *file = fopen(path, "w");
    fputs(MAGIC HEADER ROW, file);
    fclose(file);
    CHECK(rg_profile_read(path, &p, error, sizeof(error)) == 0 && p.op_count == 1, "%s", error);
    rg_profile_free(&p);
    unlink(path);
    mkfifo(path, 0600);
    CHECK(rg_profile_read(path, &p, error, sizeof(error)) == -1 && strstr(error, "not a regular file"), "%s", error);
    unlink(path);
    CHECK(rg_profile_read(folder, &p, error, sizeof(error)) == -1 && strstr(error, "not a regular file"), "%s", error);
    rmdir(folder);
}

/* splitmix64: the same bytes on every run. */
static uint64_t next_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

static void test_flipped_bytes(void)
{
    static const char *const seeds[] = {
        MAGIC HEADER "\"void k<int, \"\"x\"\">(0)\",kernel,1,1,2,3,32,4,2,33,1024,0,10671,5000\r\n" ROW
                     "sync,sync,0,0,0,0,0,0,0,0,0,0,0,1000",
        ORION "Conv,0,0,6272,446208\n\"q, n\",-1,1,0,7\nvoid cask<a<b, c>>(T1, bool),-1,0,1,6464\n",
    };
    static const char interesting[] = ",\"\n\r#-.019 \t\xef\0k";
    uint64_t state = 2024, read = 0;
    for (int round = 0; round < 60000; round++) {
        const char *seed = seeds[round % 2];
        size_t bytes = strlen(seed);
        char *text = malloc(bytes ? bytes : 1); /* exact, so that a read past the end is seen */
        memcpy(text, seed, bytes);
        for (uint64_t flips = 1 + next_random(&state) % 6; flips > 0; flips--) {
            uint64_t random = next_random(&state);
            char *at = &text[random % bytes];
            *at = (random >> 32) & 1 ? interesting[(random >> 33) % sizeof(interesting)] : (char)(random >> 40);
        }
        if (next_random(&state) % 4 == 0)
            bytes = next_random(&state) % (bytes + 1);
        rg_profile p;
        error[0] = '\0';
        int rc = rg_profile_parse("f.csv", text, bytes, &p, error, sizeof(error));
        CHECK(rc == 0 || (rc == -1 && strncmp(error, "f.csv:", 6) == 0), "round %d: %d %s", round, rc, error);
        if (rc == 0) {
            CHECK(p.op_count > 0 && p.launches > 0 && p.streams <= RG_PROFILE_MAX_STREAMS, "round %d", round);
            read++;
        }
        rg_profile_free(&p);
        free(text);
    }
    CHECK(read > 1000, "only %llu mutated texts were still readable", (unsigned long long)read);
}

int main(void)
{
    test_rigel_format();
    test_further_columns();
    test_orion_format();
    test_bad_text();
    test_limits();
    test_files();
    test_flipped_bytes();
    return failures ? 1 : 0;
}
