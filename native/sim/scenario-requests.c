/*
 * scenario-requests.c: what high clients' requests launch, kind by kind, in a scenario. It is requests.c itself that tells kinds
 * apart and learns of them, linked in as it is: here is what it looks at, a segment and the members of a process, with a slot for each
 * client, and in place of segment.c and the clock what those functions do in virtual time.
 *
 * A client with one profile has requests of one kind, also where it waits in the middle of them. What begins a request is what the program
 * would begin it with: a replay's kernels are all one function (spin_ptx.h), told apart by their shapes alone.
 */
#include "../client.h"
#include "../estimate.h"
#include "scenario-inside.h"

#include <string.h>

rg_client_state rg;
static rg_segment segment;
static uint64_t progress[RG_SCENARIO_MAX_CLIENTS]; /* kernels that each has launched */
static const scenario *running;

/* To requests.c 0 is no time. */
static uint64_t now_of(uint64_t ns)
{
    return ns + 1;
}

/* ---- In place of segment.c */

uint64_t rg_now_ns(void)
{
    return now_of(running->now);
}

uint32_t rg_hold_left_ms(const rg_settings *settings, uint64_t now_ns)
{
    (void)now_ns;
    return atomic_load(&settings->hold_until_ms);
}

uint64_t rg_progress(const rg_client *client)
{
    return progress[client - segment.clients];
}

void rg_share_learn_course(rg_share *share, uint64_t began_ns, uint64_t took_ns)
{
    const player *p = &running->players[share - segment.shares];
    int64_t course[RG_POLICY_COURSE];
    (void)began_ns;
    if (!p->seen_ns)
        return;
    for (int i = 0; i < RG_POLICY_COURSE; i++)
        course[i] = (int64_t)atomic_load(&share->course[i]);
    rg_policy_learn_course(course, p->seen_part, p->seen_ns, took_ns);
    for (int i = 0; i < RG_POLICY_COURSE; i++)
        atomic_store(&share->course[i], (uint64_t)course[i]);
}

void rg_share_forget_course(rg_share *share)
{
    for (int i = 0; i < RG_POLICY_COURSE; i++)
        atomic_store(&share->course[i], 0);
}

void rg_share_forget_requests(rg_share *share, uint64_t launches)
{
    memset(share, 0, sizeof *share);
    atomic_store(&share->began_launches, launches);
}

/* ---- A client's requests */

static rg_member *member_of(scenario *s, const player *p)
{
    rg_settings *settings = &segment.settings;
    running = s;
    atomic_store(&settings->hold_until_ms, s->hold);
    atomic_store(&settings->need_us, s->o->need_us);
    return &rg.members[p - s->players];
}

void rg_scenario_forget_requests(scenario *s)
{
    rg.segment = &segment;
    for (uint32_t i = 0; i < s->count; i++) {
        rg_member *m = &rg.members[i];
        progress[i] = 0;
        m->slot_index = (int)i;
        m->slot = &segment.clients[i];
        s->players[i].share = rg_share_of(&segment, 0, m->slot_index);
        rg_requests_forget(m, 0);
    }
}

/* What the present operation is for whoever tells kinds apart by it (rg_busy_begin_with). */
static uint64_t key_of(const player *p)
{
    const rg_profile_op *op = &p->profile->ops[p->op];
    const rg_shape *shape = &p->shapes[p->op];
    if (p->of->profile_count == 1)
        return 0;
    if (op->kind == RG_PROFILE_COPY_D2H)
        return rg_request_key(RG_COPYWAIT, op->bytes, RG_DIMS_NONE);
    if (op->kind != RG_PROFILE_KERNEL)
        return rg_request_key(op->kind == RG_PROFILE_MEMSET ? RG_MEMSET : RG_COPY, op->bytes, RG_DIMS_NONE);
    if (p->of->reports)
        return rg_request_key(RG_LAUNCH, 1, rg_dims_of(shape->blocks, 1, 1, shape->block[0], shape->block[1], shape->block[2]));
    return rg_request_key(RG_LAUNCH, rg_text_hash(op->name),
                          rg_dims_of(op->grid[0], op->grid[1], op->grid[2], op->block[0], op->block[1], op->block[2]));
}

void rg_scenario_request_begins(scenario *s, player *p)
{
    rg_requests_begin(member_of(s, p), 0, key_of(p), now_of(s->now));
}

void rg_scenario_request_launches(const scenario *s, const player *p)
{
    progress[p - s->players]++;
}

void rg_scenario_request_ends(scenario *s, player *p)
{
    rg_member *m = member_of(s, p);
    atomic_store(&m->period[0].launched_at, now_of(p->wait_ns));
    /* As note_wait in track.c. */
    rg_requests_end(m, 0, rg_policy_waited((p->wait_ns - p->busy_ns) / RG_WAITED_NS, (s->now - p->wait_ns) / RG_WAITED_NS));
}

uint64_t rg_scenario_kind(scenario *s, const player *p)
{
    return rg_requests_kind(member_of(s, p), 0);
}

uint32_t rg_scenario_usual(const player *p)
{
    uint32_t usual = atomic_load(&p->share->usual_launches);
    return rg_policy_regular(usual, atomic_load(&p->share->usual_votes)) ? usual : 0;
}
