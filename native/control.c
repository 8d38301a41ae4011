/*
 * control.c: what the control process (Bun) calls in librigel.so: versions, the layout, making and repairing segments.
 *
 * Holds no state but the text of the layout. Never used by clients.
 */
#include "rigel.h"
#include "segment.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#ifndef RIGEL_VERSION
#error "the Makefile defines RIGEL_VERSION from package.json"
#endif

static char layout_text[8192];

static void build_layout(void)
{
    size_t at = 0;
#define RG_PUT(...) at += (size_t)snprintf(layout_text + at, sizeof layout_text - at, __VA_ARGS__)
#define RG_FIELD(kind, name, n) \
    RG_PUT("%s\"%s\":{\"offset\":%zu,\"type\":\"%s\",\"count\":%d}", comma, #name, offsetof(RG_STRUCT, name), #kind, n); \
    comma = ",";
#define RG_SECTION(name, fields, start, count) \
    comma = ""; \
    RG_PUT(",\"%s\":{\"offset\":%zu,\"stride\":%zu,\"count\":%d,\"fields\":{", name, start, sizeof(RG_STRUCT), count); \
    fields(RG_FIELD) RG_PUT("}}")
    const char *comma;
    RG_PUT("{\"version\":%d,\"size\":%zu,\"histogram\":{\"buckets\":%d,\"sub_bits\":%d,\"min_shift\":%d}", RG_SEGMENT_VERSION,
           sizeof(rg_segment), RG_HIST_BUCKETS, RG_HIST_SUB_BITS, RG_HIST_MIN_SHIFT);
#define RG_STRUCT rg_header
    RG_SECTION("header", RG_HEADER_FIELDS, offsetof(rg_segment, header), 1);
#undef RG_STRUCT
#define RG_STRUCT rg_settings
    RG_SECTION("settings", RG_SETTINGS_FIELDS, offsetof(rg_segment, settings), 1);
#undef RG_STRUCT
#define RG_STRUCT rg_device
    RG_SECTION("devices", RG_DEVICE_FIELDS, offsetof(rg_segment, devices), RG_MAX_DEVICES);
#undef RG_STRUCT
#define RG_STRUCT rg_client
    RG_SECTION("clients", RG_CLIENT_FIELDS, offsetof(rg_segment, clients), RG_MAX_CLIENTS);
#undef RG_STRUCT
#define RG_STRUCT rg_account
    RG_SECTION("accounts", RG_ACCOUNT_FIELDS, offsetof(rg_segment, accounts), RG_MAX_CLIENTS);
#undef RG_STRUCT
    RG_PUT("}");
}

const char *rigel_version(void)
{
    return RIGEL_VERSION;
}

const char *rigel_layout(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, build_layout);
    return layout_text;
}

int rigel_segment_create(const char *path)
{
    return rg_segment_create(path);
}

const char *rigel_segment_check(const char *path)
{
    static _Thread_local char why[512];
    rg_segment *seg = rg_segment_open(path, why, sizeof why);
    if (!seg)
        return why;
    munmap(seg, sizeof *seg);
    return NULL;
}

int rigel_segment_reap(const char *path)
{
    char why[512];
    rg_segment *seg = rg_segment_open(path, why, sizeof why);
    if (!seg)
        return -1;
    int n = rg_segment_reap(seg);
    munmap(seg, sizeof *seg);
    return n;
}
