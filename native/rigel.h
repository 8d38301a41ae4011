/*
 * rigel.h: the public C interface of librigel.so.
 *
 * Two users: programs that want to tell Rigel something (the first part; they find the functions by
 * dlsym(RTLD_DEFAULT, ...), so that they also run without Rigel), and the control process, which loads the library and
 * works on a segment (the second part). No function here ends the process or prints.
 */
#ifndef RIGEL_H
#define RIGEL_H

#include <stdint.h>

#pragma GCC visibility push(default)

/* ---- for programs under Rigel ---- */

/*
 * rigel_report_request: tells that one request (or training iteration) has finished after `latency_ns` nanoseconds, as the
 * program itself measures it, e.g. from the time the request was due. Shown instead of the busy periods that Rigel sees.
 * Any thread, any time; does nothing in a program that is no client.
 */
void rigel_report_request(uint64_t latency_ns);

/*
 * rigel_client_enter: from here on the calling thread is the client `name` of class "high" or "best-effort" (NULL: the class that
 * the process was launched with), with counts, requests and in-flight limit of its own, until rigel_client_leave or the thread
 * ends. Threads that enter the same name are the same client; a thread that enters a second one is back in the first when it
 * leaves. A stream belongs to the client whose thread launches on it first, and work on it counts for that client
 * whichever thread launches it. 0; or a negative errno, and then the thread stays what it was and must not leave: ENODEV (this process runs
 * without Rigel), EINVAL (no name, one of more than 63 bytes or with control characters, or another class), EEXIST (the client is of the
 * other class), ENOSPC (all slots are taken), EOVERFLOW (16 entered), EAGAIN (the program has no key for thread data left). May be called
 * before cuInit. rigel_client_leave does nothing in a thread that has entered none.
 */
int rigel_client_enter(const char *name, const char *class_name);
void rigel_client_leave(void);

/*
 * rigel_client_stream: a stream (CUstream, cudaStream_t) belongs to the calling thread's client, whoever it belonged to. 0, ENODEV (the
 * thread has entered no client) or EINVAL (the NULL stream and the per-thread one cannot be anybody's), negative.
 */
int rigel_client_stream(void *stream);

/*
 * rigel_request_begin, rigel_request_end: a request begins, has ended, in the calling thread; the time between is reported as by
 * rigel_report_request for the thread's client. An end without a beginning does nothing. Within a request a thread may enter
 * another client and have requests of that; within one of the same client another takes its place.
 */
void rigel_request_begin(void);
void rigel_request_end(void);

/*
 * rigel_request_coming: a request has come in that the thread's client, a high one, launches within a millisecond (it is decoding what it got,
 * say); best some 0.15 ms before the launch. Best-effort work begins to make way, and the GPU to come over, which takes 0.14 ms, as if the request had
 * begun; but for no longer than six times the setting stay_us (1.5 ms) from when it is there, and where that has passed before the launch twice in a row,
 * more and more rarely. For requests that launch all they have at once, as CUDA graphs do, and keep the GPU busy, in time slices, where best-effort
 * streams stop (docs/how-it-works.md); else it does nothing. Takes some 10 us. Reports nothing, and needs no end. Not from a signal handler.
 */
void rigel_request_coming(void);

/*
 * rigel_describe_launch: under policy orion, what the calling thread's next kernel launch needs, for programs that know it
 * better than a profile by kernel names does: the SMs it fills, what it is bound by (1: compute, 0: memory, -1: not known), and
 * how long it takes. Does nothing under other policies.
 */
void rigel_describe_launch(uint32_t sms, int bound, uint64_t duration_ns);

/*
 * rigel_stand_for: the calling thread's next kernel launch stands for this kernel: it is counted and recorded under its name and
 * shape rather than its own. `shape`: grid x, y, z, block x, y, z, registers, shared memory in bytes, SMs that it fills (0: not
 * known). Name and shape must stay where and as they are for as long as the process lives. Does nothing where nothing is recorded.
 */
void rigel_stand_for(const char *name, const uint32_t *shape);

/*
 * rigel_bypass_begin, rigel_bypass_end: from here on what this process asks of the GPU goes to the driver as if Rigel were not there;
 * through Rigel again. To measure what Rigel costs within one process: past it, a launch takes the way that it takes in a process that is
 * no client. Holds for all threads and clients of the process, until as many ends as there were beginnings, by whichever threads. Any
 * thread, any time; a call under way in another thread ends as it began.
 *
 * Meanwhile work is not counted, recorded or reported, and is no request, nor is anything repaired that the cuBLAS guard would repair. A
 * request under way ends when it begins, and is not counted; work that is unfinished when it ends holds nobody back. Memory is accounted
 * and limited as ever, and what is made, set and destroyed (streams, events, contexts, captures, graphs, handles of cuBLAS and NCCL) is
 * followed; priorities of streams and time slices stay what they are.
 *
 * 0; or a negative errno, and then nothing has changed and it must not be ended: ENODEV (no client, or not yet: before cuInit), EPERM
 * (the process has a best-effort client, or the policy is one that holds high clients back: fair, orion), EBUSY (the process is
 * being recorded). It ends by itself if a client becomes best-effort, or the policy one of those: work goes through Rigel
 * from then on, and the ends that are due do nothing. An end without a beginning does nothing.
 */
int rigel_bypass_begin(void);
void rigel_bypass_end(void);

/*
 * rigel_shutdown: ends Rigel's part in this process: every hook passes straight through from here on, counters are final,
 * nothing of this client holds others back. Optional (it happens at exit by itself), may be called twice and from any thread.
 */
void rigel_shutdown(void);

/* ---- for the control process ---- */

/* rigel_version: the library's version, e.g. "0.1.0". Static storage. */
const char *rigel_version(void);

/*
 * rigel_layout: the segment's layout as JSON:
 *   {"version":n,"size":bytes,"histogram":{"buckets":n,"sub_bits":6,"min_shift":8},
 *    "header":{"offset":0,"stride":..,"count":1,"fields":{"magic":{"offset":0,"type":"u64","count":1},...}},
 *    "settings":{...},"devices":{...},"clients":{...},"estimates":{...},"accounts":{...},"threads":{...},"names":{...},
 *    "traces":{...},"control":{...},"operations":["none","cuLaunchKernel",...],"kinds":["none","launch",...]}
 * Offsets of sections are from the start of the file, of fields from the start of their element. Static storage.
 */
const char *rigel_layout(void);

/* rigel_now_tick: the processor's counter, which a segment's ticks are of where its header says so (tick_source 1). */
uint64_t rigel_now_tick(void);

/* rigel_segment_create: makes a segment with default settings, mode 0600; the file must not exist. 0 or -errno. */
int rigel_segment_create(const char *path);

/* rigel_segment_check: NULL if clients could use the segment, else the reason, one line. Storage of the calling thread. */
const char *rigel_segment_check(const char *path);

/* rigel_segment_hold: holds best-effort work back for `ms`, at most 5000, or ends that (0). 0, or -1 if the segment is unusable. */
int rigel_segment_hold(const char *path, uint32_t ms);

/*
 * rigel_discard: gives the room of a segment or recording back that nobody needs any more, though processes have it mapped: what they read
 * there is 0 from then on. 0, or negative errno, as where the file system cannot do that.
 */
int rigel_discard(const char *path);

/* rigel_segment_live: 1 if the process that made the segment runs, or that of any client, or somebody has joined it; 0 if not; -1 if it is unusable. */
int rigel_segment_live(const char *path);

/*
 * rigel_lock: takes a lock of this user's on a byte of a file (an open file description lock), alone or, `shared`, with others,
 * until rigel_unlock or the end of the process, however that comes; programs that it starts do not inherit it. What to hand to
 * rigel_unlock, or -EAGAIN if another holds it, -ESTALE if the file was removed at that moment, or another -errno.
 * Of a segment: who runs the control loop of policy slo; who has joined it (shared), or removes it (alone).
 */
enum { RIGEL_LOCK_LOOP = 0, RIGEL_LOCK_MEMBER = 1 };
int rigel_lock(const char *path, uint32_t byte, int shared);
void rigel_unlock(int lock);

/* rigel_now_ns: the clock of all times in a segment, CLOCK_MONOTONIC. */
uint64_t rigel_now_ns(void);

/*
 * rigel_signal_watch: from now on rigel_signal_came tells of this signal, for which a handler is there, which is called as ever. 0 or
 * -errno. rigel_signal_came: of each that came, one after the other: when, in nanoseconds (rigel_now_ns), times 2, plus 1 where the
 * kernel has sent it, as for a terminal; 0 where that is not known. For one thread.
 */
int rigel_signal_watch(int signal);
uint64_t rigel_signal_came(int signal);

/* rigel_segment_reap: clears what dead clients left behind. Number of slots reaped, or -1 if the segment is unusable. */
int rigel_segment_reap(const char *path);

/*
 * rigel_segment_profile: enters the kernels of a profile (Orion's format or Rigel's, native/replay/profile.h) into a segment,
 * for policy orion, before any client starts. `sms` is how many SMs the device has: a kernel fills no more. NULL, or what
 * is wrong, one line. Storage of the calling thread.
 */
const char *rigel_segment_profile(const char *segment, const char *profile, uint32_t sms);

/*
 * rigel_profile_latency: nanoseconds of one request or iteration of the profiled program alone: what the profile itself says
 * (iteration_ms), else the longer of its GPU time and its time on the host. 0 if the file cannot be read.
 */
uint64_t rigel_profile_latency(const char *profile);

/*
 * rigel_estimate_key: what the segment knows a kernel's duration by: the program (RIGEL_PROGRAM of its clients), the name of the
 * device, the kernel's name, grid and block. A grid of 0 stands for every shape of that kernel.
 */
uint64_t rigel_estimate_key(uint64_t program, const char *device, const char *kernel, uint32_t grid_x, uint32_t grid_y,
                            uint32_t grid_z, uint32_t block_x, uint32_t block_y, uint32_t block_z);

/* rigel_estimate_enter: index of the key among the segment's estimates, entered if new; -1: no room, or no such segment. */
int rigel_estimate_enter(const char *path, uint64_t key);

/*
 * rigel_record_create: makes a recording (native/record.h) of so many entries, a power of two, or 0 for one that only counts.
 * Mode 0600; the file must not exist. 0 or -errno.
 */
int rigel_record_create(const char *path, uint32_t capacity);

/* rigel_record_layout: a recording's layout as JSON, in the manner of rigel_layout. Static storage. */
const char *rigel_record_layout(void);

#pragma GCC visibility pop
#endif
