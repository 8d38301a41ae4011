/*
 * segment.h: the shared-memory file that is the only boundary between clients (librigel.so) and the control plane (Bun).
 *
 * One owner of the layout: the tables below. The C structures, the offsets asserted here and the description that
 * TypeScript reads (rigel_layout) are all made from them.
 *
 * Rules:
 *  1. Fixed size, fixed offsets, no pointers. A change of any row raises RG_SEGMENT_VERSION.
 *  2. Each field says who writes it: [control] Rigel's command line; [client] the client that owns the slot; [any] every
 *     client, by atomic operations only.
 *  3. Every field is valid whatever instant its writer is killed at: one word each, no multi-word invariants. What a dead
 *     client leaves (its bits in high_busy, its slot) is found by pid, start time and heartbeat and is cleared by others.
 *  4. Times are CLOCK_MONOTONIC nanoseconds, which all processes of a machine share.
 */
#ifndef RIGEL_SEGMENT_H
#define RIGEL_SEGMENT_H

#include "histogram.h"
#include "policy.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define RG_SEGMENT_MAGIC 0x31304c4547495221ull /* "!RIGEL01" in memory */
enum {
    RG_SEGMENT_VERSION = 31,
    RG_MAX_CLIENTS = 64,
    RG_MAX_DEVICES = 16,
    RG_NAME_BYTES = 64,
    RG_ACCOUNT_NAME_BYTES = 2 * RG_NAME_BYTES,
    RG_DEVICE_NAME_BYTES = 96,
    RG_MAX_KERNELS = 2048,
};
enum { RG_MAX_ESTIMATES = 8192, RG_KERNEL_NAME_BYTES = 196 };
enum { RG_MANIFEST_BYTES = 2048 };
enum { RG_GUARD_EVENTS = 16, RG_GUARD_EVENT_WORDS = 12 };
enum { RG_LAUNCH_COUNTS = 4 };
enum { RG_MAX_CONTEXTS = 8, RG_MISUSES = 8, RG_MISUSE_WORDS = 8, RG_MAX_OPERATIONS = 512 };
#define RG_CONTEXT_GONE 1u          /* in place of a context: what belonged to one is no more */
#define RG_CONTEXT_ENDED (1u << 31) /* beside a device: the context is no more */
/* Threads of one client that call the driver: PyTorch has 10 to 60. Records: 128 KiB a client. */
enum { RG_MAX_THREADS = 64, RG_THREAD_NAME_BYTES = 16, RG_MAX_NAMES = 4096, RG_NAME_TEXT_BYTES = 248, RG_TRACE_RECORDS = 4096 };
enum { RG_MAX_COMMUNICATORS = 16 };
enum { RG_WAITED = 256, RG_WAITED_NS = 16, RG_WAITED_WORKED = 0x3fffffff, RG_WAITED_WAITED = 0xfffffff };
/* What had the GPU there as a request's first launch went out, or come over in front of it (stay.c): nothing; kernels in front of it; that it was announced, or
 * seen coming; the request before it. */
enum rg_stayed { RG_STAYED_NOT = 0, RG_STAYED_AHEAD = 1, RG_STAYED_ANNOUNCED = 2, RG_STAYED_BEHIND = 3 };
enum rg_ticks { RG_TICKS_NS = 0, RG_TICKS_PROCESSOR = 1 };

enum rg_class { RG_CLASS_NONE = 0, RG_CLASS_HIGH = 1, RG_CLASS_BEST_EFFORT = 2 };
/* Why a best-effort graph that is longer than a piece should be went out whole at the gate (graph.c). */
enum rg_whole {
    RG_WHOLE_NONE = 0,
    RG_WHOLE_FEW = 1,     /* it has few nodes */
    RG_WHOLE_KIND = 2,    /* a node of a kind that is not cut, or it is launched from the GPU */
    RG_WHOLE_CHANGED = 3, /* the program has changed it since it was instantiated */
    RG_WHOLE_STREAMS = 4, /* it was launched on another stream, or in another context, than before */
    RG_WHOLE_ONE = 5,     /* nearly all of it is one node */
    RG_WHOLE_ROOM = 6,    /* enough graphs and pieces are kept already */
    RG_WHOLE_DRIVER = 7,  /* the driver refused, or lacks what it takes */
};
enum rg_preemption { RG_PREEMPTION_UNKNOWN = 0, RG_PREEMPTION_ON = 1, RG_PREEMPTION_OFF = 2, RG_PREEMPTION_STOPS = 3 };
enum rg_client_state { RG_FREE = 0, RG_CLAIMING = 1, RG_LIVE = 2, RG_EXITED = 3, RG_DEAD = 4 };

/* F(kind, name, count): kind is u32, u64 (atomic words), words (several of u64), char (bytes) or hist (histogram). */

#define RG_HEADER_FIELDS(F) \
    F(u64, magic, 1)       /* [control] RG_SEGMENT_MAGIC, stored last by the creator */ \
    F(u32, version, 1)     /* [control] RG_SEGMENT_VERSION */ \
    F(u32, size_bytes, 1)  /* [control] sizeof(rg_segment) */ \
    F(u32, creator_pid, 1) /* [control] */ \
    F(u32, refused, 1)     /* [any] processes that found no free slot */ \
    F(u32, overwritten, 1) /* [any] processes whose counts were cleared because a client of another name needed the slot */ \
    F(u32, trim, 1)        /* [any] raised by who gets no device memory: best-effort clients give back what their pools keep */ \
    F(u64, created_ns, 1)  /* [control] */ \
    F(u32, name_seeds, 1)  /* [control] estimates that came from a profile, where kernels may be written in another way */ \
    F(u32, unshared, 1)    /* [any] kernels that found no room among the estimates: learned by one process alone */ \
    F(u32, tick_source, 1) /* [control] enum rg_ticks: what a tick is (trace.h) */ \
    F(u32, names_lost, 1)  /* [any] kernels that found no room among the names */ \
    F(u64, created_tick, 1) /* [control] at created_ns */ \
    F(u64, creator, 1)     /* [control] owner word of the process that made it (rg_client.owner) */

/* First what every launch reads: one cache line. */
#define RG_SETTINGS_FIELDS(F) \
    F(u32, policy, 1)        /* [control] enum rg_policy */ \
    F(u32, inflight, 1)      /* [control] launches a best-effort client may have unfinished at once on a device; 0: no limit */ \
    F(u32, unit_us, 1)       /* [control] a launch counts in flight for its learned duration over this; 0: for one */ \
    F(u32, corun, 1)         /* [control] as `inflight`, while a high client is busy; 0: best-effort launches wait */ \
    F(u32, trace, 1)         /* [control] 1: clients record their operations (trace.h) */ \
    F(u32, bulk_bytes, 1)    /* [control] copies and memsets smaller than this pass the gate */ \
    F(u32, shutdown, 1)      /* [control] 1: every gate is open, whatever else is said */ \
    F(u32, hold_until_ms, 1) /* [control] best-effort work is held back until then: CLOCK_MONOTONIC in ms, modulo 2^32; 0: not */ \
    F(u32, starvation_us, 1) /* [control] longest wait of a best-effort launch while high-priority work goes on */ \
    F(u32, stale_ms, 1)      /* [control] a heartbeat older than this is a dead or stopped client */ \
    F(u32, spin_us, 1)       /* [control] how long the gate spins before it sleeps */ \
    F(u32, quiet_us, 1)      /* [control] spell without launches after which the agent asks the GPU whether it is idle */ \
    F(u32, preempt, 1)       /* [control] 1: where the driver allows it, best-effort clients are taken off the GPU by their channels */ \
    F(u32, suspend, 1)       /* [control] 1: and kept off it while a high client is busy; 0: short time slices only */ \
    F(u32, defer_us, 1)      /* [control] and only once it has been launching for so long: until then its work may queue up on the GPU */ \
    F(u32, defer_ppm, 1)     /* [control] in place of that, of clients whose requests are alike: once a request has made this part of \
                                its launches, in millionths (rg_device_until_late); 0, and the next: `defer_us` is what counts */ \
    F(u32, need_us, 1)       /* [control] likewise: once the rest of its launches takes no longer than this, at its pace so far */ \
    F(u32, slice_us, 1)      /* [control] time slice of a best-effort client, where it is the only one at work (rg_preempt_beat has more) */ \
    F(u32, high_slice_us, 1) /* [control] likewise of a high client */ \
    F(u32, stop_us, 1)       /* [control] after so much work a best-effort stream stops if high clients have some (stop.c); 0: there are no \
                                stops: its channels alone keep it off, and where they are not its own (MPS) its launches are held */ \
    F(u32, min_share_ppm, 1) /* [control] millionths of GPU time for best-effort work though high clients never rest */ \
    F(u32, share_period_us, 1) /* [control] and, off the GPU for them, it has that in one piece each time so much has passed; \
                                  where it is less than starvation_us, that */ \
    F(u32, quantum_us, 1)    /* [control] fair: the most GPU time by which a client of weight 1 may be ahead of another */ \
    F(u32, sms_limit, 1)     /* [control] orion: SM_THRESHOLD */ \
    F(u32, outstanding_us, 1) /* [control] orion: DUR_THRESHOLD; 0: no limit */ \
    F(u32, stay_us, 1)       /* [control] for how long the GPU stays with a high client's process after a request (stay.c); 0: not */ \
    F(u32, arrivals, 1)      /* [control] 1: and it comes over for requests that are seen coming, at a high client's sockets and pipes (arrivals.c) */

#define RG_DEVICE_FIELDS(F) \
    F(u64, key, 1)       /* [any] taken by compare-and-swap: hash of the UUID; 0: free */ \
    F(u64, high_busy, 1) /* [any] bit per client slot: that high client (under fair: any) has work on this device */ \
    F(u32, wake, 1)      /* [any] futex: raised whenever a high client becomes idle */ \
    F(u32, waiters, 1)   /* [any] threads asleep on `wake`; too high at worst, which costs a system call */ \
    F(u32, state, 1)     /* [any] 1 while uuid and name are written, 2 once they are there */ \
    F(char, uuid, 16)    /* [any] cuDeviceGetUuid, raw bytes */ \
    F(char, name, RG_DEVICE_NAME_BYTES) /* [any] */ \
    F(u32, busy_wake, 1)    /* [any] futex: raised when a high client begins to launch and somebody waits for that */ \
    F(u32, busy_waiters, 1) /* [any] threads asleep on `busy_wake`, as `waiters` */ \
    F(u64, high_launching, 1) /* [any] bit per client slot: of those in high_busy, who may launch more: not waiting for all it has */ \
    F(u64, spell_ns, 1)   /* [any] since when high clients have been busy without a break; 0: never yet */ \
    F(u64, idle_ns, 1)    /* [any] when high_busy last became 0 */ \
    F(u64, coming_until_ns, 1) /* [client] until then a request is waited for that a high client has said is coming; 0: none is */ \
    F(u64, paid_ns, 1)    /* [any] GPU time that the least share has let out in this spell */ \
    F(u64, virtual_ns, 1) /* [any] fair: virtual time of the slowest active client, as last looked up; only grows */ \
    F(u64, outstanding_ns, 1) /* [any] orion: GPU time of best-effort kernels not known to be finished */ \
    F(u64, own_until_ns, 1) /* [control] until then nobody is known to use it who is no client of this segment; 0: that is not known */ \
    F(u32, high_bound, 1) /* [client] orion: enum rg_bound of the kernel that a high client launched last */

/* What a client has had of a device. */
#define RG_SHARE_FIELDS(F) \
    F(u64, virtual_ns, 1) /* [client] fair: its virtual time */ \
    F(u64, idle_ns, 1)    /* [client] when it last became idle, or will have stopped waiting at the gate; 0: never yet */ \
    F(u64, outstanding_ns, 1) /* [client; any, once it is dead] orion: its part of the device's outstanding_ns */ \
    F(u32, preemption, 1) /* [client] enum rg_preemption: of its channels there */ \
    F(u32, slice_us, 1)   /* [client] their time slice as set by Rigel; 0: never set */ \
    F(u64, began_launches, 1) /* [client] high: what it had launched when its last request ended */ \
    F(u32, usual_launches, 1) /* [client] high: what a request of it launches, as far as they are alike (rg_policy_usual) */ \
    F(u32, usual_votes, 1)    /* [client] how sure that is */ \
    F(u64, began_ns, 1)       /* [client] high: when the request under way began, later by what it paused; 0: none is */ \
    F(u64, usual_ns, 1)       /* [client] high: for how long such requests launch (rg_policy_usual) */ \
    F(words, course, RG_POLICY_COURSE) /* [client] high: their course (rg_policy_course), in two's complement */ \
    F(u32, need_part, 1)      /* [client] high: the part of need_us that such requests need (rg_policy_balance); 0: all of it */ \
    F(u32, alike, 1)          /* [client] high: such requests launch no more than usual_launches (rg_policy_alike) */ \
    F(u64, seen, 1)           /* [any] high: how far the request under way was when it was last looked at (segment.c) */

/*
 * What profiles say of kernels, for policy orion: a table with open addressing, written before any client starts. By name, whoever
 * launches it; never learned, other than how long a kernel takes, which stands among the estimates alone.
 */
#define RG_KERNEL_FIELDS(F) \
    F(u64, key, 1)   /* [control] rg_kernel_key; 0: free */ \
    F(u32, sms, 1)   /* [control] SMs it fills */ \
    F(u32, bound, 1) /* [control] enum rg_bound */

#define RG_CLIENT_FIELDS(F) \
    F(u32, state, 1)           /* [any] enum rg_client_state */ \
    F(u32, pid, 1)             /* [client] */ \
    F(u64, owner, 1)           /* [any] taken by compare-and-swap: pid in the low half, start time of that process in the \
                                  high half (low 32 bits of /proc/pid/stat field 22), so that a reused pid is not it */ \
    F(u32, class, 1)           /* [client] enum rg_class */ \
    F(u32, devices, 1)         /* [client] bit per device index it has a context on */ \
    F(char, name, RG_NAME_BYTES) /* [client] RIGEL_NAME, cut to fit, NUL-terminated */ \
    F(u64, attached_ns, 1)     /* [client] */ \
    F(u64, first_launch_ns, 1) /* [client] 0 until then */ \
    F(u64, exited_ns, 1)       /* [client] clean exit; 0 if it never came */ \
    F(u64, heartbeat_ns, 1)    /* [client] agent thread, every 100 ms */ \
    F(u64, passed, 1)          /* [client] work let through ungated: stream capture, communication kernels */ \
    F(words, launches, RG_LAUNCH_COUNTS) /* [client] kernels: the sum of these, and with the next three the issue counter of the gate. \
                                  The first is raised by any thread, each other by the one that has taken it, which needs no atomic \
                                  addition. A cache line, of all that every launch counts, is from here */ \
    F(u64, graph_launches, 1)  /* [client] */ \
    F(u64, copies, 1)          /* [client] */ \
    F(u64, memsets, 1)         /* [client] */ \
    F(u64, records, 1)         /* [client] to here: places for records that its process ever took in `traces`: a few more than it made */ \
    F(u64, gate_waits, 1)      /* [client] waits because a high client was busy, or because it was another's turn */ \
    F(u64, gate_wait_ns, 1)    /* [client] */ \
    F(u64, inflight_waits, 1)  /* [client] waits because the in-flight limit was reached */ \
    F(u64, inflight_wait_ns, 1) /* [client] */ \
    F(u64, starved, 1)         /* [client] waits ended by the starvation bound */ \
    F(u64, stale_cleared, 1)   /* [client] busy bits of dead or stopped clients that this one cleared */ \
    F(u64, requests, 1)        /* [client] busy periods finished */ \
    F(u64, agent_idle, 1)      /* [client] of those, ended by the agent rather than by the program's own wait */ \
    F(u64, reports, 1)         /* [client] rigel_report_request calls */ \
    F(hist, request_ns, 1)     /* [client] length of busy periods */ \
    F(hist, wait_ns, 1)        /* [client] gate waits */ \
    F(hist, report_ns, 1)      /* [client] latencies the program itself reported */ \
    F(u32, preemption, 1)      /* [client] enum rg_preemption */ \
    F(u32, slice_us, 1)        /* [client] time slice of its channels as set by Rigel; 0: never set */ \
    F(u64, suspensions, 1)     /* [client] times its channels were taken off the GPU, or its streams stopped, for a high client */ \
    F(u64, suspended_ns, 1)    /* [client] */ \
    F(u32, weight, 1)          /* [client] fair: in thousandths */ \
    F(u32, long_part, 1)       /* [client] 1 + the thousandths of its process's GPU time in kernels and graphs of RG_POLICY_STOP_NS or more, \
                                  lately, as long as its launches have stops; 0: not known */ \
    F(u64, slow_calls, 1)      /* [client] calls that took its channels off the GPU, or let them back, of RG_POLICY_SLOW_CALL_NS or more */ \
    F(u64, stays, 1)           /* [client] high: requests after which the GPU was to stay with its process (stay.c) */ \
    F(u64, ahead, 1)           /* [client] high: requests for which it was to come over ahead of their input */ \
    F(u64, foreseen, 1)        /* [client] high: requests that it was to come over for as something arrived (arrivals.c) */ \
    F(u64, shared, 1)          /* [client] launches that the least share let out */ \
    F(u64, charged_ns, 1)      /* [client] fair: GPU time of the kernels launched */ \
    F(u64, unprofiled, 1)      /* [client] orion: kernels launched that are in no profile */ \
    F(u64, durations_seeded, 1) /* [client] kernels whose duration was known before this client had launched them */ \
    F(u64, samples, 1)         /* [client] launches that it timed */ \
    F(u64, graphs_cut, 1)      /* [client] executable graphs that the gate has cut into pieces (graph.c) */ \
    F(u64, graph_pieces, 1)    /* [client] pieces launched */ \
    F(u64, graphs_whole, 1)    /* [client] executable graphs that were too long and went out whole */ \
    F(u32, graph_whole, 1)     /* [client] enum rg_whole: why the last of them did */ \
    F(u32, guard_mode, 1)      /* [client] 1: off, 2: warn, 3: repair (guard.c, as all that follows) */ \
    F(u32, guard_major, 1)     /* [client] major version of the cuBLAS that it has; 0: none that made a handle */ \
    F(u64, guard_null_handle, 1) /* [client] calls with a NULL handle */ \
    F(u64, guard_wrong_context, 1) /* [client] calls with a handle of another context than the current one */ \
    F(u64, guard_no_context, 1) /* [client] calls on a thread without a current context */ \
    F(u64, guard_in_use_elsewhere, 1) /* [client] calls with a handle that another thread was using */ \
    F(u64, guard_foreign_stream, 1) /* [client] repairs whose handle was set to a stream of another context */ \
    F(u64, guard_create_failed, 1) /* [client] handles that could not be made */ \
    F(u64, guard_create_retried, 1) /* [client] handles that could be made at the second attempt */ \
    F(u64, guard_repaired, 1)  /* [client] calls that ran in another way than the program asked */ \
    F(u64, guard_handles, 1)   /* [client] cuBLAS handles alive, the guard's own included */ \
    F(u64, guard_events, 1)    /* [client] calls that the guard has counted, by all causes */ \
    F(words, guard_ring, RG_GUARD_EVENTS * RG_GUARD_EVENT_WORDS) /* [client] the last ones, those that are alike as one: number of \
                                  the last << 8 | cause in the order above, from 1 (0: being written); device << 32 | thread id; \
                                  context; number of the last call among those of its thread; how many; 56 bytes of name */ \
    F(u64, paused_ns, 1)       /* [client] that launches have waited because it is paused, or it is another's turn */ \
    F(u64, memory_bytes, 1)    /* [client] device memory allocated or being allocated; counts while the slot is live */ \
    F(u32, parent, 1)          /* [client] 1 + slot of the process, for a client that threads of it have entered; else 0 */ \
    F(words, contexts, RG_MAX_CONTEXTS * 2) /* [client] that it has worked in: handle, 1 + index of the device | RG_CONTEXT_ENDED */ \
    F(u64, misuses, 1)         /* [client] calls with a handle in a context that it does not belong to (context.c) */ \
    F(words, misuse_ring, RG_MISUSES * RG_MISUSE_WORDS) /* [client] the last ones: number (0: being written); operation << 32 | \
                                  thread id; result << 32 | slot; current context; the handle's (0: not known, 1: destroyed); \
                                  handle; when; 0 */ \
    F(u64, moves, 1)           /* [client] requests in which a thread launched on another device than in its last one */ \
    F(u64, image, 1)           /* [client] drawn when its program was started: an exec keeps pid and start time, not this */ \
    F(u64, contexts_full, 1)   /* [client] 1: it has worked in more contexts than there is room for in `contexts` */ \
    F(u64, threads_lost, 1)    /* [client] threads that found no room in its part of `threads` */ \
    F(u64, communicators_lost, 1) /* [client] the same of `communicators`; and split off without blocking */ \
    F(u32, rank, 1)            /* [client] 1 + RANK of its environment (torchrun and others set it); 0: none */ \
    F(u32, ranks, 1)           /* [client] WORLD_SIZE; 0: none */ \
    F(u64, pool_kept_bytes, 1) /* [client] device memory that its memory pools keep though nobody uses it, as of its last heartbeat */ \
    F(u64, pool_returned_bytes, 1) /* [client] what they have given back because somebody asked */ \
    F(u32, trimmed, 1)         /* [client] the last value of the header's `trim` that it has answered */ \
    F(u32, past_devices, 1)    /* [client] as `devices`, of the processes that had this slot before, whose counts it goes on with */ \
    F(u64, waited, 1)          /* [client] busy periods at whose end the program waited for all of its work */ \
    F(words, waited_ring, RG_WAITED) /* [client] the last ones: enum rg_stayed << 62 | how long it worked (30 bits) << 32 | how long it waited \
                                  (28 bits) << 4 | index of the device; times in RG_WAITED_NS, at most what fits (slo-delay.ts) */ \
    F(words, began_ring, RG_WAITED) /* [client] when each of those began: CLOCK_MONOTONIC, nanoseconds */ \
    F(words, kind_ring, RG_WAITED) /* [client] of which kind each was, for who tells the kinds of a process apart; 0: not known (requests.c) */

/*
 * How long kernels take (estimate.h), shared by the clients of the same program. A key is never changed once it is there, so an
 * index means the same kernel for as long as the segment lives. What else is in an entry is the same whoever writes it,
 * but for the estimate itself.
 */
#define RG_ESTIMATE_FIELDS(F) \
    F(u64, key, 1)         /* [any] taken by compare-and-swap: rg_estimate_key; 0: free */ \
    F(u64, program, 1)     /* [any] whose kernel it is */ \
    F(u32, duration_ns, 1) /* [any] 0: not known yet */ \
    F(u32, samples, 1)     /* [any] timed launches in it; 0 with a duration: it came from a profile */ \
    F(u32, state, 1)       /* [any] 1 once program, device, shape and name are there */ \
    F(u32, used, 1)        /* [any] 1: a client of this segment has launched it */ \
    F(u32, device, 1)      /* [any] 1 + index of the device it was first launched on; 0: not launched here */ \
    F(u32, grid_x, 1)      /* [any] 0: no shape of its own, a graph */ \
    F(u32, grid_y, 1)      /* [any] */ \
    F(u32, grid_z, 1)      /* [any] */ \
    F(u32, block_x, 1)     /* [any] */ \
    F(u32, block_y, 1)     /* [any] */ \
    F(u32, block_z, 1)     /* [any] */ \
    F(char, name, RG_KERNEL_NAME_BYTES) /* [any] for people: cut to fit, NUL-terminated */

/*
 * What is known of one client, all processes of one name, and asked of it. The device memory that is in use is the sum of
 * `memory_bytes` over its live slots. What is asked stays for as long as the segment, also for processes that come later.
 */
#define RG_ACCOUNT_FIELDS(F) \
    F(u64, key, 1)            /* [any] taken by compare-and-swap: hash of the name; 0: free. Never given back */ \
    F(u64, slots, 1)          /* [any] bit per client slot whose process belongs to it */ \
    F(u64, limit_bytes, 1)    /* [client, control] RIGEL_MEMORY, until another was asked for while it ran; 0: no limit */ \
    F(u64, lock, 1)           /* [any] owner word of the process that is comparing with the limit; 0: none */ \
    F(u64, peak_bytes, 1)     /* [any] the most that was in use at once */ \
    F(u64, denied, 1)         /* [any] allocations refused because of the limit */ \
    F(u64, denied_bytes, 1)   /* [any] what the last of them asked for */ \
    F(u64, denied_at_bytes, 1) /* [any] what was in use then */ \
    F(u32, wanted_class, 1)   /* [control] enum rg_class it is to be of; 0: what it was started as */ \
    F(u32, wanted_weight, 1)  /* [control] likewise, in thousandths */ \
    F(u32, wanted_limit, 1)   /* [control] 1: `limit_bytes` is what was asked for, whatever RIGEL_MEMORY of later processes says */ \
    F(u64, paused_until_ns, 1) /* [control] its best-effort work is held back until then; UINT64_MAX: until resumed; 0: not */ \
    F(u64, turn_until_ns, 1)  /* [control] likewise, since until then it is another best-effort client's turn (src/slo-turns.ts) */ \
    F(char, name, RG_ACCOUNT_NAME_BYTES) /* [any] of a client that threads have entered PROCESS/THREAD; cut to fit, NUL-terminated */

/*
 * A thread of a client (trace.h), RG_MAX_THREADS rows for each slot. Written by that thread alone, without any barrier but that
 * `doing` is stored after its time; freed when the thread ends, left as it is when the process is killed.
 */
#define RG_THREAD_FIELDS(F) \
    F(u32, tid, 1)         /* [client] taken by compare-and-swap; 0: free */ \
    F(u32, doing, 1)       /* [client] number of the operation it is in | RG_DOING; without that, of the last one; 0: none yet */ \
    F(u64, since_tick, 1)  /* [client] when that began */ \
    F(u32, kernel, 1)      /* [client] 1 + index in `names` of what it launched last; 0: not known */ \
    F(u32, track, 1)       /* [client] serial of the track that it launched on last; its low byte, less 1, is the track */ \
    F(u64, launches, 1)    /* [client] operations that queued work: kernels, graphs, copies, memsets */ \
    F(u64, context, 1)     /* [client] current context, as last set or launched in: the driver's handle */ \
    F(u64, stream, 1)      /* [client] it last launched on: the driver's handle */ \
    F(u32, device, 1)      /* [client] 1 + index of the device it last launched on; 0: none yet */ \
    F(u32, before, 1)      /* [client] the operation before it, or around it; of up to four launches in a row before the first; 0: none */ \
    F(u64, before_tick, 1) /* [client] when that began */ \
    F(u64, object, 1)      /* [client] what it waits for or waited for last: handle of a stream, event, context; 0: none */ \
    F(u64, calls, 1)       /* [client] operations that did not queue work: waits, allocations */ \
    F(u32, client, 1)      /* [client] 1 + slot of the client whose work it launched last; 0: none yet */ \
    F(u32, moves, 1)       /* [client] requests in which it launched on another device than in the one before */ \
    F(char, name, RG_THREAD_NAME_BYTES) /* [client] at its first operation */
#define RG_DOING 0x80000000u

/* How often a client's threads have called what; those of a living process up to 100 ms ago. */
#define RG_CALLS_FIELDS(F) F(words, count, RG_MAX_OPERATIONS) /* [client] by number of the operation (trace.h) */

/* Names of kernels and graphs: a table with open addressing. */
#define RG_NAME_FIELDS(F) \
    F(u64, key, 1) /* [any] taken by compare-and-swap: rg_text_hash; 0: free. Never given back */ \
    F(char, name, RG_NAME_TEXT_BYTES) /* [any] as the driver has it, cut to fit, NUL-terminated */

/*
 * A communicator of NCCL that a client takes part in (collective.c), RG_MAX_COMMUNICATORS rows for each slot. `key` is the same for all
 * its ranks; who has entered fewer collectives than others is behind them.
 */
#define RG_COMMUNICATOR_FIELDS(F) \
    F(u64, key, 1)       /* [client] taken by compare-and-swap: hash of the unique id; 0: free */ \
    F(u64, handle, 1)    /* [client] ncclComm_t; 0: being made */ \
    F(u32, rank, 1)      /* [client] */ \
    F(u32, size, 1)      /* [client] how many ranks */ \
    F(u64, entered, 1)   /* [client] collectives begun */ \
    F(u64, peers, 1)     /* [client] sends and receives begun */ \
    F(u64, splits, 1)    /* [client] communicators made from it */ \
    F(u64, elements, 1)  /* [client] of the last one */ \
    F(u64, at_tick, 1)   /* [client] when the last one began, or the communicator was made */ \
    F(u32, operation, 1) /* [client] the last one; 0: none yet */

/*
 * Where best-effort streams stop (stop.c): a page for each device, which the GPU looks at, with a word for each client's slot of enum rg_stop.
 * Whoever owns the slot writes what he wants; a high client that begins to launch only takes RG_STOP_ARMED to RG_STOP_STOPPED, by
 * compare-and-swap, so that who has left that state is stopped by nobody else.
 */
enum rg_stop { RG_STOP_STOPPED = 0, RG_STOP_ARMED = 1, RG_STOP_FREE = 2 };
#define RG_STOP_FIELDS(F) \
    F(words, word, RG_MAX_CLIENTS) /* [client, any] of which the GPU looks at the low half */ \
    F(u64, armed, 1)               /* [client; any, once it is dead] bit per client slot: its word may be RG_STOP_ARMED */

/* The last operations of a client: trace.h says what is in a record. */
#define RG_TRACE_FIELDS(F) \
    F(words, records, RG_TRACE_RECORDS * 4) /* [client] */

/* The control loop of policy slo, for those who look on, and for whoever goes on with it. Times of requests in ns. */
#define RG_CONTROL_FIELDS(F) \
    F(u32, target_kind, 1)    /* [control] 0: the default target; 1: p99 over alone; 2: p99 in ms */ \
    F(u32, target, 1)         /* [control] that, in thousandths */ \
    F(u32, holder_pid, 1)     /* [control] process that runs the loop; 0: none */ \
    F(u32, rung, 1)           /* [control] place on the ladder of settings */ \
    F(u32, changes, 1)        /* [control] */ \
    F(u32, unreachable, 1)    /* [control] 1: the strictest settings miss the target */ \
    F(u64, beat_ns, 1)        /* [control] when the loop last looked; 0: it never ran */ \
    F(u64, held_ms, 1)        /* [control] for how long it has held best-effort work */ \
    F(u32, alone_requests, 1) /* [control] what requests take alone: how many are known */ \
    F(u32, now_requests, 1)   /* [control] and with the settings in force */ \
    F(u64, alone_p50_ns, 1)   /* [control] 0: not known, as the next three */ \
    F(u64, alone_p99_ns, 1)   /* [control] */ \
    F(u64, now_p50_ns, 1)     /* [control] */ \
    F(u64, now_p99_ns, 1)     /* [control] */ \
    F(u32, over_requests, 1)  /* [control] requests of which it is known what they would have taken alone; 0: none, so neither the next */ \
    F(u32, over_p50, 1)       /* [control] what they took over that, in thousandths */ \
    F(u32, over_p99, 1)       /* [control] */ \
    F(u32, kept, 1)           /* [control] 1: the loop has moved settings, and the next nine are what they were before */ \
    F(u32, kept_suspend, 1)   /* [control] */ \
    F(u32, kept_defer_us, 1)  /* [control] */ \
    F(u32, kept_defer_ppm, 1) /* [control] */ \
    F(u32, kept_need_us, 1)   /* [control] */ \
    F(u32, kept_slice_us, 1)  /* [control] */ \
    F(u32, kept_inflight, 1)  /* [control] */ \
    F(u32, kept_corun, 1)     /* [control] */ \
    F(u32, kept_stop_us, 1)   /* [control] */ \
    F(u32, kept_share_period_us, 1) /* [control] */ \
    F(u32, trying, 1)         /* [any] 1: the settings are only being tried; where nobody runs the loop any more a client puts those back */ \
    F(char, manifest, RG_MANIFEST_BYTES) /* [control] JSON for who joins (src/join.ts); written before any client starts */

#define RG_TYPE_u32(name, n) _Atomic uint32_t name
#define RG_TYPE_u64(name, n) _Atomic uint64_t name
#define RG_TYPE_words(name, n) _Atomic uint64_t name[n]
#define RG_TYPE_char(name, n) char name[n]
#define RG_TYPE_hist(name, n) rg_histogram name
#define RG_MEMBER(kind, name, n) RG_TYPE_##kind(name, n);

typedef struct {
    RG_HEADER_FIELDS(RG_MEMBER)
} rg_header;
typedef struct {
    RG_SETTINGS_FIELDS(RG_MEMBER)
} rg_settings;
/* What a new segment has, and what a scenario in virtual time is run with (sim/scenario.h). */
#define RG_SETTINGS_DEFAULT \
    ((rg_settings){ \
        .policy = RG_POLICY_PRIORITY, \
        .inflight = 8, \
        .unit_us = 100, \
        .starvation_us = 100000, \
        .stale_ms = 1000, \
        .spin_us = 20, \
        .quiet_us = 250, \
        .bulk_bytes = 65536, \
        .preempt = 1, \
        .suspend = 1, \
        .slice_us = 50, \
        .high_slice_us = 20000, \
        .stop_us = 250, \
        .stay_us = 250, \
        .arrivals = 1, \
        .min_share_ppm = 50000, \
        .quantum_us = 2000, /* a time slice */ \
        .trace = 1, \
    })
typedef struct {
    _Alignas(64) RG_DEVICE_FIELDS(RG_MEMBER)
} rg_device;
typedef struct {
    _Alignas(64) RG_CLIENT_FIELDS(RG_MEMBER)
} rg_client;
typedef struct {
    _Alignas(64) RG_SHARE_FIELDS(RG_MEMBER)
} rg_share;
typedef struct {
    RG_KERNEL_FIELDS(RG_MEMBER)
} rg_kernel;
typedef struct {
    _Alignas(64) RG_ESTIMATE_FIELDS(RG_MEMBER)
} rg_estimate;
typedef struct {
    _Alignas(64) RG_ACCOUNT_FIELDS(RG_MEMBER)
} rg_account;
typedef struct {
    _Alignas(64) RG_CONTROL_FIELDS(RG_MEMBER)
} rg_control;
typedef struct {
    _Alignas(64) RG_THREAD_FIELDS(RG_MEMBER)
} rg_thread;
typedef struct {
    _Alignas(64) RG_CALLS_FIELDS(RG_MEMBER)
} rg_calls;
typedef struct {
    RG_NAME_FIELDS(RG_MEMBER)
} rg_name;
typedef struct {
    RG_COMMUNICATOR_FIELDS(RG_MEMBER)
} rg_communicator;
typedef struct {
    _Alignas(64) RG_TRACE_FIELDS(RG_MEMBER)
} rg_trace;
typedef struct {
    _Alignas(4096) RG_STOP_FIELDS(RG_MEMBER)
} rg_stop_page;
/* S(member, type, fields, [how many]): what the file holds, in order. */
#define RG_SECTIONS(S) \
    S(header, rg_header, RG_HEADER_FIELDS, ) \
    S(settings, rg_settings, RG_SETTINGS_FIELDS, ) \
    S(devices, rg_device, RG_DEVICE_FIELDS, [RG_MAX_DEVICES]) \
    S(clients, rg_client, RG_CLIENT_FIELDS, [RG_MAX_CLIENTS]) \
    S(shares, rg_share, RG_SHARE_FIELDS, [RG_MAX_DEVICES * RG_MAX_CLIENTS]) /* of a device one after the other: rg_share_of */ \
    S(kernels, rg_kernel, RG_KERNEL_FIELDS, [RG_MAX_KERNELS]) \
    S(estimates, rg_estimate, RG_ESTIMATE_FIELDS, [RG_MAX_ESTIMATES]) \
    S(accounts, rg_account, RG_ACCOUNT_FIELDS, [RG_MAX_CLIENTS]) \
    S(threads, rg_thread, RG_THREAD_FIELDS, [RG_MAX_CLIENTS * RG_MAX_THREADS]) /* of a client one after the other, */ \
    S(names, rg_name, RG_NAME_FIELDS, [RG_MAX_NAMES]) \
    S(traces, rg_trace, RG_TRACE_FIELDS, [RG_MAX_CLIENTS]) \
    S(communicators, rg_communicator, RG_COMMUNICATOR_FIELDS, [RG_MAX_CLIENTS * RG_MAX_COMMUNICATORS]) /* and these */ \
    S(control, rg_control, RG_CONTROL_FIELDS, ) \
    S(calls, rg_calls, RG_CALLS_FIELDS, [RG_MAX_CLIENTS]) \
    S(stops, rg_stop_page, RG_STOP_FIELDS, [RG_MAX_DEVICES])

#define RG_SECTION(member, type, fields, many) _Alignas(64) _Alignas(type) type member many;
typedef struct {
    RG_SECTIONS(RG_SECTION)
} rg_segment;
#undef RG_SECTION

/* The layout of version 31. A failing line means: raise RG_SEGMENT_VERSION, then correct the number. */
_Static_assert(offsetof(rg_segment, settings) == 128, "segment layout");
_Static_assert(offsetof(rg_segment, devices) == 256, "segment layout");
_Static_assert(sizeof(rg_device) == 256, "segment layout");
_Static_assert(offsetof(rg_segment, clients) == 4352, "segment layout");
_Static_assert(offsetof(rg_client, launches) == 128, "segment layout");
_Static_assert(offsetof(rg_client, request_ns) == 264, "segment layout");
_Static_assert(sizeof(rg_client) == 58112, "segment layout");
_Static_assert(offsetof(rg_segment, shares) == 3723520, "segment layout");
_Static_assert(offsetof(rg_segment, kernels) == 3920128, "segment layout");
_Static_assert(sizeof(rg_segment) == 16433152, "segment layout");
_Static_assert(sizeof(rg_estimate) == 256, "segment layout");
_Static_assert(offsetof(rg_segment, estimates) == 3952896, "segment layout");
_Static_assert(sizeof(rg_account) == 256, "segment layout");
_Static_assert(offsetof(rg_segment, accounts) == 6050048, "segment layout");
_Static_assert(sizeof(rg_thread) == 128, "segment layout");
_Static_assert(offsetof(rg_segment, threads) == 6066432, "segment layout");
_Static_assert(offsetof(rg_segment, names) == 6590720, "segment layout");
_Static_assert(offsetof(rg_segment, traces) == 7639296, "segment layout");
_Static_assert(offsetof(rg_segment, communicators) == 16027904, "segment layout");
_Static_assert(offsetof(rg_segment, stops) == 16367616, "segment layout");
_Static_assert(RG_MAX_CLIENTS <= 64, "high_busy is one 64-bit word");

/*
 * rg_segment_create: makes a segment file with default settings.
 * The file must not exist. Mode 0600. Returns 0, or -errno with nothing left behind.
 */
int rg_segment_create(const char *path);

/*
 * rg_segment_open: maps an existing segment for reading and writing.
 * Refuses (NULL, and the reason in `why`, one line without newline) a file that is missing, owned by somebody else,
 * open to others, of another size or version. The mapping is never unmapped.
 */
rg_segment *rg_segment_open(const char *path, char *why, size_t why_bytes);

/*
 * rg_segment_claim: takes a slot for this process: one of a client of the same name and class whose process is gone, and counts
 * on in it; else one that was never used; else one of another client whose process is gone, cleared. Slot index, or -1
 * when all are live.
 */
int rg_segment_claim(rg_segment *seg, const char *name, uint32_t class, uint64_t now_ns);

/* rg_segment_device: index of the device with this UUID, entered if new. -1 when the table is full. */
int rg_segment_device(rg_segment *seg, const char uuid[16], const char *name);

/*
 * rg_device_busy, rg_device_idle: a client's work on the device begins, or has ended; a break between high clients' work
 * (RG_POLICY_BREAK_NS) begins a new spell. The spell is there before the bit: whoever sees the bit sees how long it has been so.
 */
void rg_device_busy(rg_device *dev, int slot, uint64_t now_ns);
void rg_device_idle(rg_device *dev, int slot, uint64_t now_ns);

/*
 * rg_segment_hold: holds all best-effort work back for `ms` (at most RG_HOLD_LIMIT_MS: whoever wants more says so again, and who dies
 * holds nobody), or, if 0, ends that. rg_hold_left_ms: how much of it is left.
 */
enum { RG_HOLD_LIMIT_MS = 5000 };
void rg_segment_hold(rg_segment *seg, uint32_t ms);
uint32_t rg_hold_left_ms(const rg_settings *settings, uint64_t now_ns);

/* rg_gives_way_at_once: best-effort work gives way from a request's first launch on; none of what puts that off is in force. */
static inline bool rg_gives_way_at_once(const rg_settings *s)
{
    return !atomic_load_explicit(&s->defer_us, memory_order_relaxed) && !atomic_load_explicit(&s->defer_ppm, memory_order_relaxed) &&
           !atomic_load_explicit(&s->need_us, memory_order_relaxed);
}

/* rg_waited_times, rg_waited_stayed: what an entry of a client's `waited_ring` says: for how long a request launched, and waited; enum rg_stayed. */
static inline void rg_waited_times(uint64_t entry, uint64_t *worked_ns, uint64_t *wait_ns)
{
    *worked_ns = (entry >> 32 & RG_WAITED_WORKED) * RG_WAITED_NS;
    *wait_ns = (entry >> 4 & RG_WAITED_WAITED) * RG_WAITED_NS;
}
static inline uint32_t rg_waited_stayed(uint64_t entry)
{
    return (uint32_t)(entry >> 62);
}

/*
 * rg_stop_best_effort: a high client has work on a device: best-effort streams there stop (armed ones), unless what is in force lets their work
 * queue up for now. No system call: whoever owns them is told by rg_device_launching, and looks whether that is to be.
 */
void rg_stop_best_effort(rg_segment *seg, uint32_t device);

/* rg_stop_arm: whether others may stop at the word of a slot; from then on if its owner has stopped. Not: it is RG_STOP_FREE, and stays so. */
void rg_stop_arm(rg_segment *seg, uint32_t device, int slot, bool armed);

/* rg_device_launching: a high client may launch more, or waits for all it has. Tells those who keep off the device for it; a system
 * call only if there is one. */
void rg_device_launching(rg_device *dev, int slot, bool on);

/*
 * rg_device_coming: a high client has said that a request is coming, which is waited for until then: best-effort streams stop (rg_stop_best_effort), and
 * who owns them is told, by a system call if somebody waits for that. rg_device_came: it has, unless another one is waited for by now, for longer.
 */
void rg_device_coming(rg_segment *seg, uint32_t device, uint64_t until_ns);
void rg_device_came(rg_segment *seg, uint32_t device, uint64_t until_ns);

/* rg_progress: what a client has launched, kernels and graphs, of whatever device. */
uint64_t rg_progress(const rg_client *client);

/*
 * rg_device_until_late: for how long the high clients with work on the device still leave it to best-effort work; 0: one of them has come so far
 * into its request that it is to give way (settings defer_us, defer_ppm and need_us), UINT64_MAX: nothing tells. `busy_ns`: for how long they have
 * had some; when to look again, in `look_ns`. Where the requests of a client are alike, how far one has come is told by its launches, not by the clock: on
 * a host whose processors are shared the same request takes 4 ms now and 10 ms then, and it is near its end when most of it is launched, however
 * long that took. What the GPU needs for it is the same then as now, so what counts best is how long the rest of its launches will take
 * (need_us): a part of the launches that is right in a slow moment comes too late in a fast one. What it sees is left for the client to learn
 * from (rg_share_learn_course).
 */
uint64_t rg_device_until_late(rg_segment *seg, uint32_t device, uint64_t now_ns, uint64_t busy_ns, uint64_t *look_ns);

/* rg_share_learn_course: the request that began then, of which somebody may have seen how far it was, has launched for so long. */
void rg_share_learn_course(rg_share *share, uint64_t began_ns, uint64_t took_ns);

/* rg_share_forget_course: the client's requests are others now. */
void rg_share_forget_course(rg_share *share);

/* rg_share_forget_requests: nothing is known of what the client's requests launch; the next one is what follows on so many `launches`. */
void rg_share_forget_requests(rg_share *share, uint64_t launches);

/* rg_share_of: what a client has had of a device. */
static inline rg_share *rg_share_of(rg_segment *seg, uint32_t device, int slot)
{
    return &seg->shares[device * RG_MAX_CLIENTS + (uint32_t)slot];
}

/* rg_share_settle: so much of the client's outstanding kernels is finished (orion), never more than there is. */
void rg_share_settle(rg_segment *seg, uint32_t device, int slot, uint64_t ns);

/* rg_kernel_key: what a profiled kernel is known by: its name, and grid and block (rg_dims_hash); 0 where a profile has none. */
uint64_t rg_kernel_key(const char *name, uint64_t shape);

/* rg_kernel_find: the kernel with this key; NULL if no profile has it. */
rg_kernel *rg_kernel_find(rg_segment *seg, uint64_t key);

/* rg_kernel_put: enters a kernel. One that is there already keeps the larger number of SMs, and a bound if both agree. False if the
 * table is full: it is kept a quarter empty, so that looking for what it does not have is short. */
bool rg_kernel_put(rg_segment *seg, uint64_t key, uint32_t sms, uint32_t bound);

/* rg_segment_end_work: what client `slot` had under way is none any more, as its program is gone. */
void rg_segment_end_work(rg_segment *seg, int slot);

/* rg_segment_reap: clears busy bits and slots of clients whose process is gone. Number of slots reaped. */
int rg_segment_reap(rg_segment *seg);

/* rg_thread_clear: everything in a row but whose it is and what it is called. */
void rg_thread_clear(rg_thread *row);

/* rg_launches: how many kernels a client has launched. */
uint64_t rg_launches(const rg_client *client);

/* rg_client_alive: whether the process that owns the slot still runs (a zombie does not). */
int rg_client_alive(const rg_client *client);

/* rg_owner_alive: the same for an owner word (rg_client.owner, rg_account.lock). */
int rg_owner_alive(uint64_t owner);

/* rg_segment_live: whether the process that made the segment runs, or that of any client. */
bool rg_segment_live(const rg_segment *seg);

/* rg_segment_clear_busy: takes client `slot` out of every device's high_busy (and high_launching) and wakes whoever waits. */
void rg_segment_clear_busy(rg_segment *seg, int slot);

/* rg_device_wake: wakes every thread that sleeps on the device's gate; a system call only if there is one. */
void rg_device_wake(rg_device *dev);

/* rg_now_ns: CLOCK_MONOTONIC in nanoseconds (no system call: vDSO). */
uint64_t rg_now_ns(void);

#endif
