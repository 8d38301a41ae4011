/*
 * nvtx-tool.c: a tool for NVTX, as NVTX_INJECTION64_PATH names one: counts the ranges of each name, and writes them at the end to the file
 * that NVTX_TOOL_COUNTS names: lines of a name, ranges begun, ranges ended. A range that ends where none is open counts as "none".
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CALLBACKS = 1, CORE = 1, PUSH_A = 9, POP = 11, NAMES = 64, DEPTH = 16 };

typedef void (*function)(void);
struct callbacks {
    size_t size;
    int (*table_of)(int module, function ***table, unsigned *size);
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    char name[64];
    unsigned long begun, ended;
} counts[NAMES];
static _Thread_local int open[DEPTH], depth;

static int index_of(const char *name)
{
    int i = 0;
    while (i < NAMES - 1 && counts[i].name[0] && strcmp(counts[i].name, name) != 0)
        i++;
    snprintf(counts[i].name, sizeof counts[i].name, "%s", name);
    return i;
}

static int push(const char *name)
{
    pthread_mutex_lock(&lock);
    int i = index_of(name);
    counts[i].begun++;
    pthread_mutex_unlock(&lock);
    if (depth < DEPTH)
        open[depth] = i;
    return depth++;
}

static int pop(void)
{
    pthread_mutex_lock(&lock);
    counts[depth > 0 && depth <= DEPTH ? open[depth - 1] : index_of("none")].ended++;
    pthread_mutex_unlock(&lock);
    return --depth;
}

static void write_counts(void)
{
    const char *path = getenv("NVTX_TOOL_COUNTS");
    FILE *file = path ? fopen(path, "w") : NULL;
    if (!file)
        return;
    for (int i = 0; i < NAMES && counts[i].name[0]; i++)
        fprintf(file, "%s %lu %lu\n", counts[i].name, counts[i].begun, counts[i].ended);
    fclose(file);
}

__attribute__((visibility("default"))) int InitializeInjectionNvtx2(const void *(*export_table)(uint32_t));
int InitializeInjectionNvtx2(const void *(*export_table)(uint32_t))
{
    const struct callbacks *callbacks = export_table(CALLBACKS);
    function **table;
    unsigned size;
    if (!callbacks || callbacks->size < sizeof *callbacks || !callbacks->table_of(CORE, &table, &size) || size <= POP)
        return 0;
    *table[PUSH_A] = (function)(void *)push;
    *table[POP] = (function)(void *)pop;
    atexit(write_counts);
    return 1;
}
