/*
 * scenario.h: what would happen if these programs shared a GPU, in virtual time.
 *
 * Replayed clients (profile.h), the model of a GPU (model.h) and the gate's decisions (policy.h) without processes,
 * threads or clocks. Integers only and one order for what happens at one instant, so the same input gives the same
 * numbers on every machine, to the last one. It must never read a clock or decide anything that policy.h decides.
 *
 * What it takes from the real gate (gate.c): a high client is busy from its first launch until its wait finds its work
 * finished; launches of a best-effort client are counted until a batch of them is found finished, which is only looked
 * at while it waits for that; it spins, then sleeps; the starvation bound lets one batch out. Under fair every client is
 * busy in that way, charged and held back, whatever its class; under orion a profile's rows say what a kernel needs.
 *
 * What a high client's requests launch is learned, kind by kind, by requests.c itself (scenario-requests.c).
 *
 * Where processes are taken off the GPU instead (RG_SCENARIO_PREEMPT), nothing is gated unless `gate` says so, and an agent that
 * stands for a thread in each best-effort process watches the high clients, and calls on the driver one after the other, to the
 * end. Where there are two of a class, they keep the driver's slices, or best-effort ones have a part of longer ones (rg_policy_peers_slice_us).
 * Policy slo's control loop is the caller's: see rg_scenario_tick.
 */
#ifndef RIGEL_SCENARIO_H
#define RIGEL_SCENARIO_H

#include "../histogram.h"
#include "../policy.h"
#include "../replay/arrivals.h"
#include "../replay/profiles.h"
#include "model.h"

enum { RG_SCENARIO_MAX_CLIENTS = 32 };
/* A spell in which a program's processor is its own, or is shared with somebody else's, on average: an H200's host goes from one to the
 * other within seconds (docs/measurements.md). */
#define RG_SCENARIO_SPELL_NS 2000000000u

/*
 * From then on a request of the program takes it so long, on a real host, from its first launch until it waits for all it has launched: its gaps are a
 * tenth of its profile's at least, and a thousand times those at most.
 */
typedef struct {
    uint64_t at_ns, work_ns;
} rg_scenario_moment;
enum { RG_SCENARIO_MOST_MOMENTS = 1000000 };

typedef struct {
    const rg_profile *profiles;     /* each request is of one of them: rg_profiles_draw */
    uint32_t profile_count;
    uint64_t draw_seed;
    bool best_effort;
    bool open_loop;                 /* requests fall due by `arrivals`; else one follows the other */
    bool reports;                   /* ticks count its requests from their due times, else its busy periods */
    enum rg_arrivals_kind arrivals;
    uint64_t mean_gap_ns, seed;     /* uniform and Poisson */
    const rg_arrivals *list;        /* a list, as read */
    const rg_scenario_moment *moments; /* by which its pace goes, in their order, over and over, from one on that the seed tells; the last is as long as its work */
    uint32_t moment_count;             /* 0: its profile's */
    uint64_t iterations; /* end after so many; 0: no limit */
    uint32_t weight;     /* fair: in thousandths; 0: RG_POLICY_WEIGHT_ONE */
} rg_scenario_client;

typedef enum {
    RG_SCENARIO_ALONE,      /* each client by itself, without Rigel */
    RG_SCENARIO_UNGOVERNED, /* together, without Rigel */
    RG_SCENARIO_GOVERNED,   /* together, with the policy and stream priorities */
    RG_SCENARIO_PREEMPT,    /* together, with slices of their own, or suspended; where the GPU has no time slices, with stops (native/stop.c) */
} rg_scenario_mode;

/* A busy period of a high client: of which kind (rg_requests_kind), when it began, how long it worked, and how long it then waited for all its work. */
typedef struct {
    uint32_t client;
    uint64_t kind, began_ns, worked_ns, waited_ns;
} rg_scenario_wait;
enum { RG_SCENARIO_WAITS = 256 }; /* of a tick; what is more is left out */

/*
 * What a control loop sees at a tick, and what it answers. `requests` counts durations of high clients' requests since the last tick
 * by the buckets of histogram.h, `launches` those of best-effort clients, `launched` the same of each client, `starved` how often
 * these were let go on although high clients made no break, all launches for the least share counted once. `turns`: a bit for each best-effort client that
 * is off the GPU until the next tick, as it is another one's turn (src/slo-turns.ts).
 */
typedef struct {
    uint64_t now_ns, launches, starved, launched[RG_SCENARIO_MAX_CLIENTS], turns;
    uint64_t *requests;
    rg_scenario_wait *waits; /* the same requests taken apart */
    uint32_t wait_count;
    uint32_t suspend, defer_us, defer_ppm, need_us, slice_us, inflight, corun, stop_us, share_period_us; /* settings: as they are; to be changed */
    bool hold;   /* best-effort work is held back until the next tick */
    bool shared; /* some launches were for the least share */
} rg_scenario_tick;

typedef struct {
    rg_model_params gpu; /* a preset, `shared` set for MPS */
    uint64_t duration_ns;
    uint32_t policy; /* enum rg_policy, and the settings of the same names in the segment */
    uint32_t inflight, unit_us, corun, starvation_us, spin_us, bulk_bytes;
    uint32_t min_share_ppm, share_period_us, quantum_us; /* likewise */
    uint32_t sms_limit, outstanding_us;                  /* likewise */
    uint32_t defer_us, defer_ppm, need_us; /* likewise: best-effort work goes on for so long, or so far, into a high client's */
    uint32_t slow_ppm;  /* by how much longer programs take between launches, every other time on average (RG_SCENARIO_SPELL_NS) */
    uint64_t launch_ns; /* what a launch call takes the program */
    uint64_t record_ns; /* what recording the gate's event takes */
    uint64_t wake_ns;   /* from waking a sleeping thread to its running */

    /* Policy slo: every so often the loop that moves the settings is asked, until the duration is over; 0: never. A result
     * other than 0 ends the scenario. */
    uint64_t tick_ns;
    int (*on_tick)(void *user, rg_scenario_tick *tick);
    /* Told how far it is, at the first instant after every so much time; no instant of its own, so that nothing depends on it. */
    uint64_t progress_ns;
    void (*on_progress)(void *user, uint64_t now_ns);
    void *user;

    /* RG_SCENARIO_PREEMPT */
    uint32_t be_slice_us, high_slice_us; /* 0: the GPU's */
    bool gate;                           /* the policy and stream priorities too */
    bool suspend;                        /* best-effort processes while a high client is busy */
    bool drain;                          /* busy ends for that as soon as it waits for all that it has launched */
    uint32_t suspend_delay_us;           /* a high client has been busy for so long when the call begins */
    uint32_t resume_delay_us;            /* they have all been idle for so long when the call begins */
    uint64_t suspend_ns, resume_ns;      /* from the beginning of a call to its effect; a suspension then takes the
                                            GPU's preempt_ns, and no other call begins before; of stops both are 0 */
    uint32_t stop_us; /* work between two stops in a best-effort stream, as in the segment; 0: there are none, which is not for MPS */
    uint64_t stop_ns; /* what the call for one takes the program */
    uint64_t stop_gpu_ns; /* and by how much longer the kernel behind it takes */
} rg_scenario_options;

typedef struct {
    uint64_t iterations; /* finished by the end of the duration (requests: that fell due in it) */
    uint64_t launches;
    uint64_t finished; /* operations (what a profile's rows launch) that were finished by the end of the duration */
    uint64_t charged_ns;             /* governed: durations of the kernels that passed the gate */
    uint64_t requests;               /* iterations that were waited for: those have latencies */
    uint64_t p50_ns, p95_ns, p99_ns; /* from the due time; nearest rank; 0 without requests */
    uint64_t gate_waits, gate_wait_ns, inflight_waits, inflight_wait_ns, starved, shared, suspensions;
} rg_scenario_result;

/*
 * rg_scenario_defaults: the H200 preset under time slices, 10 s, the segment's default settings, and the costs measured
 * on an H200: 2600 ns a launch, 170 ns an event record, 50 us to wake a thread; for RG_SCENARIO_PREEMPT slices of 50 us
 * and 20 ms, no gate, suspension and `drain` as soon as a thread that watches has woken, 280 us to suspend and 230 us
 * to resume, and of stops 1.2 us for the program and 3 us for the GPU.
 */
rg_scenario_options rg_scenario_defaults(void);

/*
 * rg_scenario_run: runs `count` clients and fills one result each. Returns 0, or -1 with one line in `error` (out of
 * memory, a kernel that no SM can hold, too many clients, RG_SCENARIO_PREEMPT under MPS without stops).
 */
int rg_scenario_run(const rg_scenario_options *options, rg_scenario_mode mode, const rg_scenario_client *clients,
                    uint32_t count, rg_scenario_result *results, char *error, size_t error_bytes);

#endif
