/*
 * scenario-inside.h: what scenario.c (clients, launches, the loop), scenario-gate.c (who is held back), scenario-agent.c
 * (who is taken off the GPU) and scenario-requests.c (what requests launch) share. Nobody else includes it.
 */
#ifndef RIGEL_SCENARIO_INSIDE_H
#define RIGEL_SCENARIO_INSIDE_H

#include "../replay/shape.h"
#include "../segment.h"
#include "scenario.h"

#define NEVER UINT64_MAX
#define AHEAD 16u         /* as rigel-replay: iterations a program that never waits may be ahead */
#define BATCHES 64u       /* as gate.c */
#define NAP_NS 30000u     /* as gate.c: between two looks at what is in flight */
#define SLEEP_NS 2000000u /* as gate.c: longest sleep on a busy device */

enum state {
    NEXT,  /* decides whether another iteration begins */
    DUE,   /* waits for a request to fall due */
    OP,    /* waits for the host gap before an operation */
    GATE,  /* held back by the policy */
    QUEUE, /* the stream holds as many operations as it can */
    SYNC,  /* waits for its work */
    DONE,
};

typedef struct {
    uint32_t stream, weight;
    uint64_t ticket, outstanding_ns;
} batch;

typedef struct {
    const rg_scenario_client *of;
    const rg_profile *profile; /* of the iteration under way; before the first, any */
    rg_shape *shapes;          /* by operation of that */
    rg_shape *all_shapes[RG_PROFILES_MOST]; /* of each profile */
    uint32_t stream_count; /* of the profile that has the most */
    bool waited_for;       /* every iteration */
    rg_arrivals arrivals;
    uint32_t context, streams[RG_PROFILE_MAX_STREAMS];
    bool governed; /* passes the gate */
    bool marks;    /* its busy periods count: high under a policy, everybody under fair */

    enum state state;
    uint64_t at; /* acts at this time, whatever else happens; NEVER: only when a condition is met */
    uint32_t op;
    uint64_t begun; /* iterations */
    uint64_t due_ns;
    uint64_t last_ticket; /* of the context */
    bool busy;            /* from first launch to idle */
    bool launching;       /* high: from first launch to the wait for all of it */
    uint64_t busy_ns, idle_ns; /* when that began and was over */
    uint64_t wait_ns;          /* when it began to wait for all of it */
    uint64_t waited_ns[4], worked_ns[4]; /* for how long it waited, and launched before, the last times */
    uint32_t waits;
    uint64_t made;             /* high: kernels launched since it last waited for all of them */
    rg_share *share;           /* high: what such a request usually launches (scenario-requests.c) */
    uint32_t seen_part; /* of the one under way: of its launches, in what time, and whether it was late, as it was looked at (see in segment.c) */
    uint64_t seen_ns;
    bool seen_late;
    rg_arrivals spells;        /* of its processor's pace */
    uint64_t spell_until;
    bool slow;
    uint64_t own_gaps_ns, own_launch_ns; /* of an iteration, behind its first launch */
    uint32_t moment;                     /* of its host, the present one, until then, and what its gaps are times a million */
    uint64_t moment_until, pace_ppm;
    uint64_t virtual_ns, inverse; /* fair */
    uint64_t outstanding_ns;      /* orion */

    struct {
        uint32_t stream;
        uint64_t ticket;
    } ahead[AHEAD];
    uint32_t ahead_first, ahead_count;

    uint32_t inflight, credit, unbatched[RG_PROFILE_MAX_STREAMS];
    uint64_t unbatched_ns[RG_PROFILE_MAX_STREAMS];
    uint64_t stream_ticket[RG_PROFILE_MAX_STREAMS];
    uint64_t since_stop_ns[RG_PROFILE_MAX_STREAMS]; /* work launched since the last stop */
    uint64_t stops_at; /* 1 + the launch for which that was last looked at */
    bool behind_stop;  /* and has one in front of it */
    batch batches[BATCHES];
    uint32_t batch_count;
    enum rg_verdict verdict;
    uint64_t since, spin_until, looked, spent_ns[2]; /* spent: for high clients, for its own launches */

    uint64_t *latencies;
    size_t latency_count, latency_capacity;
    rg_scenario_result *result;
} player;

/* Best-effort processes on the GPU; on their way off it and back; given their due at the starvation bound. */
enum agent_state { RUNNING, SUSPENDING, LEAVING, SUSPENDED, RESUMING, GIVING, GIVEN };

typedef struct {
    rg_scenario_options *o;
    rg_scenario_mode mode;
    rg_model *model;
    player *players;
    uint32_t count;
    uint64_t now;
    struct {
        enum agent_state state;
        uint64_t at;    /* acts then; NEVER: when the high clients change */
        bool wanted;    /* best-effort work is to be off the GPU, as it last looked, and since when that is so */
        uint64_t since;
        uint64_t late_ns; /* high clients have come so far that it is to act; may be in the future */
        rg_policy_had had; /* what best-effort work has had */
        uint64_t cut_after;  /* 1 + when the high clients had been idle before a long slice was last cut short */
        uint32_t short_gaps;   /* bit per idle time of the high clients: it was short; the last one is the lowest */
        uint64_t short_pauses; /* likewise, very short */
        bool lingers, follows; /* an idle time of those is waited for before it is believed: for LINGER_NS, for RG_POLICY_FOLLOWS_NS */
        uint64_t given_until_ns;
        uint64_t off_ns; /* when it last began to suspend */
        bool stays;      /* until the high clients are idle, though they only wait */
        uint64_t all_ns; /* since when the request under way has launched all; 0: it has not */
        bool early;      /* it is back though that one is not waited for */
        bool between;    /* it comes back into one that leaves the GPU to it for a while */
        bool disabled;     /* channels are off, of all of them */
        bool channels_off; /* streams that stop are suspended, too, this time */
        bool may_suspend_too; /* and if not, may be yet, as what is under way launches for longer than it seemed to */
    } agent; /* of the best-effort processes: they all do the same at the same time */
    bool hold; /* best-effort work is held back altogether */
    uint64_t turns; /* a bit for each best-effort client that waits for its turn */
    bool long_requests; /* that outlast the high clients' slice */
    uint64_t next_tick_ns, next_progress_ns;
    rg_scenario_tick tick;
    uint64_t virtual_ns;                /* fair: the slowest active client's, as last looked up */
    uint64_t spell_ns, idle_ns, paid_ns; /* least share: high clients busy since; idle since; paid out */
    uint32_t high_bound;                /* orion: of the last high kernel */
    char *error;
    size_t error_bytes;
    bool failed;
} scenario;


void rg_scenario_fail(scenario *s, const char *what);

/* Best-effort streams stop between kernels. */
static inline bool rg_scenario_stops(const scenario *s)
{
    return s->mode == RG_SCENARIO_PREEMPT && s->o->stop_us;
}

/* And nothing else takes a process off the GPU, or has this time. */
static inline bool rg_scenario_by_stops(const scenario *s)
{
    return rg_scenario_stops(s) && !s->agent.channels_off;
}

/* ---- scenario-gate.c */

bool rg_scenario_high_busy(const scenario *s);
rg_policy_view rg_scenario_view_of(const scenario *s, const player *p);
/* When high clients whose work began at `since` have come so far that best-effort work is to give way (rg_device_until_late); NEVER: not yet. */
uint64_t rg_scenario_late_at(const scenario *s, uint64_t since);
/* Until then it may go on. */
void rg_scenario_put_off(const scenario *s, rg_policy_view *v);
uint32_t rg_scenario_bound_of(const rg_profile_op *op);
/* What the present operation costs the GPU, as far as the policies count it: copies and memsets use no SMs. */
uint64_t rg_scenario_cost_of(const player *p);
/* As rg_device.virtual_ns: raised to the slowest active client's; the one that asks is active. */
void rg_scenario_look_up_virtual(scenario *s, const player *asking);
uint64_t rg_scenario_lead(const scenario *s, const player *p);
/* An event behind what was launched into the stream since the last one. */
void rg_scenario_record_batch(player *p, uint32_t stream);
/* Whether a batch is finished; with `take`, those that are leave the flight. */
bool rg_scenario_batch_done(scenario *s, player *p, bool take);
/* orion: finds out what is finished of others who launch nothing, as their agents do (rg_gate_look). */
void rg_scenario_settle(scenario *s, const player *asking);
void rg_scenario_enter_gate(scenario *s, player *p, enum rg_verdict verdict);
void rg_scenario_leave_gate(player *p);
/* One turn of the loop in rg_gate_wait. True when the launch may go. */
bool rg_scenario_look_again(scenario *s, player *p);
/* Held back and spinning: it sees at once when the others have caught up, or its own launches finish. */
bool rg_scenario_sees_turn(scenario *s, player *p);
bool rg_scenario_watches_batches(const scenario *s, const player *p);
/* A client's first work of a busy period; and its work is finished: those that wait for it go on. */
void rg_scenario_become_busy(scenario *s, player *p);
void rg_scenario_become_idle(scenario *s, player *p);
/* Nothing holds best-effort work back any more: those at the gate look again, sleepers once they are awake. */
void rg_scenario_wake_gate(scenario *s);

/* ---- scenario-requests.c */

/* Nothing is known of anybody's requests. Scenarios are run one after the other. */
void rg_scenario_forget_requests(scenario *s);
/* A high client's request begins, by the present operation; it has launched one more kernel; and is over. */
void rg_scenario_request_begins(scenario *s, player *p);
void rg_scenario_request_launches(const scenario *s, const player *p);
void rg_scenario_request_ends(scenario *s, player *p);
/* What such requests usually launch, 0 if they are not alike. */
uint32_t rg_scenario_usual(const player *p);
/* Of which kind the one that is under way is, or was the last (rg_requests_kind). */
uint64_t rg_scenario_kind(scenario *s, const player *p);

/* ---- scenario-agent.c */

/* Lets the agent act at this instant. False when it has nothing to do now. */
bool rg_scenario_agent_act(scenario *s);
/* It is others' turn, of clients by their bits. */
void rg_scenario_give_turns(scenario *s, uint64_t turns);
/* The settings have changed: time slices follow. */
void rg_scenario_set_slices(scenario *s);

#endif
