/*
 * fake-nvml.c: a stand-in libnvidia-ml.so.1 that says what a file tells it to, for tests of what reads processes' utilization.
 *
 * The file is named by FAKE_NVML and read again at every call. Its lines:
 *   init CODE                          what nvmlInit_v2 returns; without it 0
 *   device UUID                        there is such a GPU
 *   error CODE                         what nvmlDeviceGetProcessUtilization returns, whatever there is
 *   sample UUID PID TIMESTAMP_US SM    a sample
 * Every utilization that is asked for appends `UUID SINCE` to FILE.asked. Codes, structure and how sizes are asked for as in NVIDIA's
 * NVML API Reference Guide, and as seen with driver 580: processes without new samples are left out.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, MOST = 16 };

typedef struct {
    unsigned pid;
    unsigned long long timestamp;
    unsigned sm, memory, encoder, decoder;
} sample;

#define API __attribute__((visibility("default")))
API int nvmlInit_v2(void);
API int nvmlDeviceGetHandleByUUID(const char *uuid, void **device);
API int nvmlDeviceGetProcessUtilization(void *device, sample *out, unsigned *count, unsigned long long since);

static char devices[MOST][96];

/* What `found` makes of each line; stops at the first that it takes. */
static int each_line(int (*found)(const char *line, void *with), void *with)
{
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[256];
    int taken = 0;
    while (file && !taken && fgets(line, sizeof line, file)) taken = found(line, with);
    if (file) fclose(file);
    return taken;
}

static int code_line(const char *line, void *with)
{
    struct {
        const char *format;
        int code;
    } *c = with;
    return sscanf(line, c->format, &c->code) == 1;
}

static int code_of(const char *format)
{
    struct {
        const char *format;
        int code;
    } c = {format, SUCCESS};
    return each_line(code_line, &c) ? c.code : SUCCESS;
}

static int device_line(const char *line, void *with)
{
    char uuid[96];
    return sscanf(line, "device %95s", uuid) == 1 && !strcmp(uuid, with);
}

typedef struct {
    const char *uuid;
    unsigned long long since;
    unsigned count;
    sample samples[MOST];
} samples;

static int sample_line(const char *line, void *with)
{
    samples *s = with;
    char uuid[96];
    sample one = {0};
    if (sscanf(line, "sample %95s %u %llu %u", uuid, &one.pid, &one.timestamp, &one.sm) == 4 && !strcmp(uuid, s->uuid) &&
        one.timestamp > s->since && s->count < MOST)
        s->samples[s->count++] = one;
    return 0;
}

int nvmlInit_v2(void) { return code_of("init %d"); }

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device)
{
    if (!uuid || !device) return INVALID_ARGUMENT;
    if (!each_line(device_line, (void *)(uintptr_t)uuid)) return NOT_FOUND;
    for (int i = 0; i < MOST; i++) {
        if (devices[i][0] && strcmp(devices[i], uuid)) continue;
        strncpy(devices[i], uuid, sizeof devices[i] - 1);
        *device = devices[i];
        return SUCCESS;
    }
    return NOT_FOUND;
}

int nvmlDeviceGetProcessUtilization(void *device, sample *out, unsigned *count, unsigned long long since)
{
    samples s = {.uuid = device, .since = since};
    char path[512];
    if (!device || !count || (*count && !out)) return INVALID_ARGUMENT;
    if (out) {
        snprintf(path, sizeof path, "%s.asked", getenv("FAKE_NVML"));
        FILE *asked = fopen(path, "a");
        if (asked) fprintf(asked, "%s %llu\n", s.uuid, since), fclose(asked);
    }
    int error = code_of("error %d");
    if (error) return error;
    each_line(sample_line, &s);
    if (!out || *count < s.count) {
        *count = out ? s.count : MOST; /* room for all that it may keep, as the real one says */
        return INSUFFICIENT_SIZE;
    }
    if (!s.count) return NOT_FOUND;
    memcpy(out, s.samples, s.count * sizeof *out);
    *count = s.count;
    return SUCCESS;
}
