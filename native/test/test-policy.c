/*
 * test-policy.c: every row of the decision table of policy.h, worked out by hand.
 */
#include "policy.h"
#include "testing.h"

#include <string.h>

enum { LAUNCH = RG_POLICY_LAUNCH };

/* A best-effort launch with room in flight and no high client about: passes. Each check below changes what it says. */
static const rg_policy_view base = {
    .policy = RG_POLICY_PRIORITY, .best_effort = true, .inflight_limit = 8 * LAUNCH, .starvation_ns = 1000};

#define DECIDE(...) \
    ({ \
        rg_policy_view v_ = base; \
        __VA_ARGS__; \
        rg_policy_decide(&v_); \
    })

/* slo decides as priority does, whatever the inputs. */
static void slo_is_priority(void)
{
    for (uint32_t bits = 0; bits < 1u << 10; bits++) {
        rg_policy_view v = base;
        v.best_effort = bits & 1;
        v.high_busy = bits & 2;
        v.preemptible = bits & 4;
        v.hold = bits & 8;
        v.inflight = (bits & 16 ? 8 : 1) * LAUNCH;
        v.inflight_limit = (bits & 32 ? 8 : 0) * LAUNCH;
        v.corun_limit = (bits & 64 ? 2 : 0) * LAUNCH;
        v.credit = bits & 128 ? 1 : 0;
        v.waited_ns = bits & 256 ? 1000 : 999;
        v.allowance_ns = bits & 512 ? 1 : 0;
        enum rg_verdict priority = rg_policy_decide(&v);
        uint32_t batch = rg_policy_batch(&v);
        v.policy = RG_POLICY_SLO;
        CHECK_EQUAL(rg_policy_decide(&v), priority);
        CHECK_EQUAL(rg_policy_batch(&v), batch);
    }
}

static void held_and_preemptible(void)
{
    /* Work that can be taken off the GPU does not wait, for a high client nor for its own launches. */
    CHECK_EQUAL(DECIDE(v_.high_busy = true, v_.preemptible = true), RG_PASS);
    CHECK_EQUAL(DECIDE(v_.inflight = 8 * LAUNCH, v_.preemptible = true), RG_PASS);
    /* Held is held: idle GPU or not, beyond the starvation bound, with any credit. High clients are not. */
    CHECK_EQUAL(DECIDE(v_.hold = true), RG_WAIT_HIGH);
    CHECK_EQUAL(DECIDE(v_.hold = true, v_.waited_ns = 1000000, v_.credit = 5, v_.allowance_ns = 5), RG_WAIT_HIGH);
    CHECK_EQUAL(DECIDE(v_.hold = true, v_.preemptible = true), RG_PASS);
    CHECK_EQUAL(DECIDE(v_.hold = true, v_.best_effort = false), RG_PASS);
    CHECK_EQUAL(DECIDE(v_.hold = true, v_.policy = RG_POLICY_NONE), RG_PASS);
    CHECK_EQUAL(DECIDE(v_.hold = true, v_.policy = RG_POLICY_ORION), RG_WAIT_HIGH);
    CHECK_EQUAL(DECIDE(v_.policy = 99, v_.high_busy = true), RG_PASS);
    CHECK(rg_policy_waits(RG_WAIT_HIGH) && rg_policy_waits(RG_WAIT_INFLIGHT) && rg_policy_waits(RG_WAIT_TURN));
    CHECK(!rg_policy_waits(RG_PASS) && !rg_policy_waits(RG_PASS_STARVED) && !rg_policy_waits(RG_PASS_SHARE));
}

/* With a starvation bound of 100 ms, so long into a spell and since it last had its share (0: never); `period_ms`: share_period_us. */
static uint64_t due_in(uint64_t spell_ns, uint64_t given_ns, int64_t credit_ns, bool runs, uint32_t period_ms, uint32_t ppm)
{
    const uint64_t now = 3600000000000u;
    rg_policy_had had = {.credit_ns = credit_ns, .given_ns = given_ns ? now - given_ns : 0};
    rg_policy_due_view view = {
        .spell_ns = now - spell_ns,
        .starvation_ns = 100000000,
        .period_ns = rg_policy_share_period(100000, period_ms * 1000),
        .min_share_ppm = ppm,
    };
    return rg_policy_due_in(&had, &view, runs, now);
}

/* Likewise, of how long that is its share. */
static uint64_t away(uint64_t given_ns, uint32_t period_ms)
{
    const uint64_t now = 3600000000000u;
    rg_policy_had had = {.given_ns = given_ns ? now - given_ns : 0};
    rg_policy_due_view view = {.starvation_ns = 100000000, .period_ns = rg_policy_share_period(100000, period_ms * 1000)};
    return rg_policy_away(&had, &view, now);
}

/* 5% with a bound of 100 ms: 5 ms at 100, 200, ... ms of unbroken work. */
static void least_share(void)
{
    enum { MS = 1000000, PPM = 50000 };
#define LEFT(busy_ns, paid_ns) rg_policy_allowance(busy_ns, paid_ns, 100ull * MS, PPM)
#define PAID(busy_ns, paid_ns, cost_ns) rg_policy_pay(busy_ns, paid_ns, 100ull * MS, PPM, cost_ns)
    CHECK_EQUAL(LEFT(0, 0), 0);
    CHECK_EQUAL(LEFT(100 * MS - 1, 0), 0);
    CHECK_EQUAL(LEFT(100 * MS, 0), 5 * MS);
    CHECK_EQUAL(LEFT(199 * MS, 3 * MS), 2 * MS);
    CHECK_EQUAL(LEFT(199 * MS, 5 * MS), 0);
    CHECK_EQUAL(LEFT(200 * MS, 5 * MS), 5 * MS);
    /* Overdrawn by a kernel of 12 ms: nothing at 200, 3 of the third 5 at 300. */
    CHECK_EQUAL(PAID(100 * MS, 0, 12 * MS), 12 * MS);
    CHECK_EQUAL(LEFT(200 * MS, 12 * MS), 0);
    CHECK_EQUAL(LEFT(300 * MS, 12 * MS), 3 * MS);
    /* Nothing is saved up: after a second without best-effort work there are 5 ms, and they can be spent once. */
    CHECK_EQUAL(LEFT(1000ull * MS, 0), 5 * MS);
    CHECK_EQUAL(PAID(1000ull * MS, 0, 1 * MS), 46 * MS);
    CHECK_EQUAL(LEFT(1000ull * MS, 46 * MS), 4 * MS);
    CHECK_EQUAL(LEFT(1099ull * MS, 50 * MS), 0);
    /* No share: never. A bound beyond a second: first at that bound, then every second. A month does not overflow. */
    CHECK_EQUAL(rg_policy_allowance(3600000ull * MS, 0, 100ull * MS, 0), 0);
    CHECK_EQUAL(rg_policy_allowance(4999ull * MS, 0, 5000ull * MS, PPM), 0);
    CHECK_EQUAL(rg_policy_allowance(5000ull * MS, 0, 5000ull * MS, PPM), 50 * MS);
    CHECK_EQUAL(rg_policy_allowance(6000ull * MS, 50 * MS, 5000ull * MS, PPM), 50 * MS);
    CHECK_EQUAL(rg_policy_allowance(30 * 86400000ull * MS, 30 * 86400000ull * MS / 2 - 50 * MS, 100ull * MS, 500000), 50 * MS);
    CHECK_EQUAL(rg_policy_allowance(1000ull * MS, 0, 0, PPM), 0);
    CHECK_EQUAL(rg_policy_allowance(100500000, 0, 100500000, PPM), 5025000); /* half a millisecond's share, too */
    /* What was had beyond the share, up to that of a second, allows as much to be done without; a month does not overflow. */
    CHECK_EQUAL(rg_policy_credit(0, 20ull * MS, 5ull * MS, 100ull * MS, 50000), 4 * MS);
    CHECK_EQUAL(rg_policy_credit(4 * MS, 100ull * MS, 0, 100ull * MS, 50000), -1 * MS);
    CHECK_EQUAL(rg_policy_credit(4 * MS, 100ull * MS, 100ull * MS, 100ull * MS, 50000), 50 * MS);
    CHECK_EQUAL(rg_policy_credit(4 * MS, 100ull * MS, 100ull * MS, 100ull * MS, 0), 10 * MS);
    CHECK_EQUAL(rg_policy_credit(4 * MS, 30 * 86400000ull * MS, 0, 100ull * MS, UINT32_MAX), -500 * MS);
    for (uint32_t ppm = 9000; ppm < 600000; ppm += 7001) /* when it is due nothing is left of it */
        for (int64_t credit = 1; credit < 50 * MS; credit = credit * 3 + 1)
            CHECK(rg_policy_credit(credit, due_in(300ull * MS, 0, credit, false, 0, ppm), 0, 100ull * MS, ppm) <= 0);
    /* At the bound, or when the credit is used up; while it runs that is at the bound or not at all. */
    CHECK_EQUAL(due_in(30ull * MS, 0, 0, false, 0, 50000), 70ull * MS);
    CHECK_EQUAL(due_in(300ull * MS, 0, -5 * MS, false, 0, 50000), 0);
    CHECK_EQUAL(due_in(300ull * MS, 0, 5 * MS, false, 0, 50000), 100ull * MS);
    CHECK_EQUAL(due_in(30ull * MS, 0, 1 * MS, false, 0, 50000), 70ull * MS);
    CHECK_EQUAL(due_in(99ull * MS, 0, -5 * MS, true, 0, 50000), 1ull * MS);
    CHECK_EQUAL(due_in(10ull * MS, 0, -5 * MS, true, 0, 50000), UINT64_MAX); /* it has run by then */
    CHECK_EQUAL(due_in(300ull * MS, 0, 0, true, 0, 50000), UINT64_MAX);
    /* When it had its due last counts for both, and a longer period for that alone: a spell need not have lasted for one. */
    CHECK_EQUAL(due_in(300ull * MS, 30ull * MS, 0, false, 0, 50000), 70ull * MS);
    CHECK_EQUAL(due_in(30ull * MS, 120ull * MS, 0, false, 0, 50000), 70ull * MS);
    CHECK_EQUAL(due_in(300ull * MS, 120ull * MS, 0, false, 500, 50000), 380ull * MS);
    CHECK_EQUAL(due_in(120ull * MS, 450ull * MS, 0, false, 500, 50000), 50ull * MS);
    CHECK_EQUAL(due_in(30ull * MS, 450ull * MS, 0, false, 500, 50000), 70ull * MS);
    CHECK_EQUAL(due_in(300ull * MS, 600ull * MS, 5 * MS, false, 500, 50000), 100ull * MS);
    CHECK_EQUAL(due_in(300ull * MS, 499ull * MS, -5 * MS, true, 500, 50000), 1ull * MS);
    CHECK_EQUAL(due_in(300ull * MS, 300ull * MS, -5 * MS, true, 500, 50000), UINT64_MAX);
    CHECK_EQUAL(due_in(30ull * MS, 0, 0, false, 500, 50000), 70ull * MS); /* it never had any */
    CHECK_EQUAL(rg_policy_share_period(100000, 500000), 500ull * MS);
    CHECK_EQUAL(away(0, 500), 100ull * MS); /* it never had any */
    CHECK_EQUAL(away(300ull * MS, 500), 300ull * MS);
    CHECK_EQUAL(away(3600ull * MS, 500), 500ull * MS);
    CHECK_EQUAL(away(3600ull * MS, 0), 100ull * MS);
    CHECK_EQUAL(away(30ull * MS, 500), 100ull * MS);
    CHECK_EQUAL(rg_policy_share_period(UINT32_MAX, 500000), UINT32_MAX * 1000ull);
    /* Of 100 ms it is off for 50, and for 30 more, since high clients are idle then only. In short slices it has had their break of 40. */
    rg_policy_had had = {.looked_ns = 1000ull * MS, .spell_then_ns = 900ull * MS, .idle_then_ns = 960ull * MS};
    rg_policy_due_view view = {.spell_ns = 900ull * MS, .idle_ns = 960ull * MS, .starvation_ns = 100ull * MS, .min_share_ppm = 50000};
    rg_policy_off(&had, view.idle_ns, 1000ull * MS);
    rg_policy_on(&had, true, 1050ull * MS);
    view.idle_ns = 1080ull * MS;
    rg_policy_count(&had, &view, 1100ull * MS);
    CHECK_EQUAL(had.credit_ns, 15 * MS);
    had.credit_ns = 0;
    view.short_slices = true;
    view.spell_ns = 1120ull * MS;
    view.idle_ns = 1130ull * MS; /* of its first request: before that it was 1080 */
    rg_policy_count(&had, &view, 1140ull * MS);
    CHECK_EQUAL(had.credit_ns, 38 * MS);
    had.given_ns = 1150ull * MS;
    rg_policy_count(&had, &view, 1170ull * MS);
    CHECK_EQUAL(had.credit_ns, 37 * MS);
    /* Off for 50 ms, back for 50 in which it waits, and off again for 50: what it waits for is over then, and counts no further. */
    had = (rg_policy_had){.looked_ns = 900ull * MS};
    view = (rg_policy_due_view){.starvation_ns = 100ull * MS, .min_share_ppm = 50000};
    rg_policy_off(&had, 0, 950ull * MS);
    rg_policy_on(&had, true, 1000ull * MS);
    rg_policy_off(&had, 0, 1050ull * MS);
    rg_policy_count(&had, &view, 1100ull * MS);
    CHECK_EQUAL(had.credit_ns, 40 * MS);
    /* Of a break during which it had its due it is what came after that. */
    had = (rg_policy_had){.looked_ns = 900ull * MS, .given_ns = 1000ull * MS, .spell_then_ns = 900ull * MS, .idle_then_ns = 960ull * MS};
    view.short_slices = true;
    view.spell_ns = 1020ull * MS;
    view.idle_ns = 1030ull * MS;
    rg_policy_count(&had, &view, 1100ull * MS);
    CHECK_EQUAL(had.credit_ns, 15 * MS);
    /* Off the GPU for 100 ms: 5% of 110 ms and what is due, and with nothing said a hundredth; never more than half. */
    CHECK_EQUAL(rg_policy_due(100ull * MS, 10ull * MS, 50000), 110000ull * 50000 / 950000 * 1000);
    CHECK_EQUAL(rg_policy_due(100ull * MS, 10ull * MS, 500000), 110ull * MS);
    CHECK_EQUAL(rg_policy_due(99ull * MS, 0, 0), 1ull * MS);
    CHECK_EQUAL(rg_policy_due(99ull * MS, 0, UINT32_MAX), 99ull * MS);
    CHECK_EQUAL(rg_policy_due(UINT32_MAX * 1000ull, 0, 500000), UINT32_MAX * 1000ull);
    /* Half of 100 ms / 9 is a twentieth of that and the 100. */
    CHECK_EQUAL(rg_policy_due_beside(100ull * MS, 50000), 100000ull / 9 * 1000);
    CHECK_EQUAL(rg_policy_due_beside(98ull * MS, 0), 2ull * MS);
    CHECK_EQUAL(rg_policy_due_beside(100ull * MS, 500000), 400ull * MS);
    CHECK_EQUAL(rg_policy_due_beside(UINT32_MAX * 1000ull, UINT32_MAX), UINT32_MAX * 4000ull);
    /* It lets out what would wait for a high client, not what waits for its own launches. */
    CHECK_EQUAL(DECIDE(v_.high_busy = true, v_.allowance_ns = 1), RG_PASS_SHARE);
    CHECK_EQUAL(DECIDE(v_.high_busy = true, v_.allowance_ns = 1, v_.inflight = 8 * LAUNCH), RG_WAIT_INFLIGHT);
    CHECK_EQUAL(DECIDE(v_.allowance_ns = 1), RG_PASS);
}

/* Whether best-effort work that comes back now would have a slice in the middle of what a high client waits for. */
static void who_waits_for_longer_than_a_slice(void)
{
    enum { MS = 1000000 };
    CHECK_EQUAL(rg_policy_outlasts(3ull * MS, 4ull * MS, 10ull * MS), false);
    CHECK_EQUAL(rg_policy_outlasts(3ull * MS, 6ull * MS, 10ull * MS), true); /* an eighth is left for what is not known that well */
    CHECK_EQUAL(rg_policy_outlasts(13ull * MS, 4ull * MS, 10ull * MS), false);
    CHECK_EQUAL(rg_policy_outlasts(19ull * MS, 4ull * MS, 10ull * MS), true);
    CHECK_EQUAL(rg_policy_outlasts(0, 20ull * MS, 10ull * MS), true);
    CHECK_EQUAL(rg_policy_outlasts(9ull * MS, 0, 10ull * MS), false); /* not known */
    CHECK_EQUAL(rg_policy_outlasts(3ull * MS, 6ull * MS, 0), false);
}

/* Requests that launch all at once have twice the time of the last ones before more is done for them. */
static void brief_requests(void)
{
    enum { US = 1000 };
    CHECK_EQUAL(rg_policy_brief(0, 150 * US), 300 * US);
    CHECK_EQUAL(rg_policy_brief(299 * US, 150 * US), 1 * US);
    CHECK_EQUAL(rg_policy_brief(300 * US, 150 * US), 0);
    CHECK_EQUAL(rg_policy_brief(5000 * US, 150 * US), 0);
    CHECK_EQUAL(rg_policy_brief(0, RG_POLICY_BRIEF_NS), 2 * RG_POLICY_BRIEF_NS);
    CHECK_EQUAL(rg_policy_brief(0, RG_POLICY_BRIEF_NS + 1), 0);
    CHECK_EQUAL(rg_policy_brief(0, UINT64_MAX), 0); /* none is known */
}

/* How fast a request launches: its own pace, and at first that of the ones before. */
static void pace_of_a_request(void)
{
    CHECK_EQUAL(rg_policy_pace(0, 200, 5000, 0), 0);
    CHECK_EQUAL(rg_policy_pace(50, 200, 5000, 0), 100);
    /* 25 launches of 40 each, of those before. */
    CHECK_EQUAL(rg_policy_pace(0, 200, 0, 8000), 40);
    CHECK_EQUAL(rg_policy_pace(25, 200, 3000, 8000), 80);
    CHECK_EQUAL(rg_policy_pace(175, 200, 7000, 8000), 40);
    CHECK_EQUAL(rg_policy_pace(0, 0, 5000, 8000), 0);
    /* One that has stood still: no more than 4 times 40. */
    CHECK_EQUAL(rg_policy_pace(100, 200, 1000000, 8000), 160);
    CHECK_EQUAL(rg_policy_pace(100, 200, 1000000, 0), 10000);
    CHECK_EQUAL(rg_policy_pace(1, 16, UINT64_MAX / 2, 0), UINT64_MAX / 2);
}

/* What requests launch is learned from those that have most of the launches; a program that changes is followed. */
static void requests_that_are_alike(void)
{
    uint32_t usual = 0, votes = 0;
    uint64_t usual_ns = 0;
#define AFTER(made) \
    (rg_policy_usual(&usual, &votes, &usual_ns, made, (uint64_t)(made) < 1000 ? (made) * 10ull : 0), rg_policy_regular(usual, votes))
    CHECK(!AFTER(0));
    CHECK(!AFTER(200));
    CHECK(AFTER(200));
    /* Nearly as many are as many; a few launches between requests are none of that kind, and too few to count. */
    CHECK_EQUAL(usual_ns, 2000);
    CHECK(AFTER(210));
    CHECK_EQUAL(usual, 210);
    CHECK_EQUAL(usual_ns, 2025);
    for (int i = 0; i < 20; i++)
        AFTER(3);
    CHECK_EQUAL(usual_ns, 2025);
    CHECK(AFTER(210));
    CHECK_EQUAL(usual, 210);
    for (int i = 0; i < 100; i++)
        AFTER(210);
    CHECK_EQUAL(votes, 8 * 210);
    /* Others, from now on: not known for a while, then known. */
    int n = 0;
    for (; usual == 210 && n < 100; n++)
        AFTER(500);
    CHECK_EQUAL(n, 4); /* 1680 votes less 3 times 500 */
    CHECK(!rg_policy_regular(usual, votes));
    CHECK(AFTER(500));
    /* Of long requests it is known for not much longer that they were so long than of short ones. */
    for (int i = 0; i < 8; i++)
        AFTER(100000);
    for (n = 0; usual == 100000 && n < 1000; n++)
        AFTER(200);
    CHECK_EQUAL(n, 128);
    CHECK(AFTER(200));
    /* Each of another length: nothing is known. Few launches, as of a program that replays graphs, tell nothing. */
    usual = votes = 0;
    for (uint64_t made = 100; made < 100000; made *= 2)
        CHECK(!AFTER(made));
    usual = votes = 0;
    for (int i = 0; i < 20; i++)
        CHECK(!AFTER(15));
    /* Which of them a request was. */
    usual = votes = 0;
    CHECK_EQUAL(rg_policy_usual(&usual, &votes, &usual_ns, 200, 10), RG_REQUEST_NEW);
    CHECK_EQUAL(rg_policy_usual(&usual, &votes, &usual_ns, 210, 10), RG_REQUEST_USUAL);
    CHECK_EQUAL(rg_policy_usual(&usual, &votes, &usual_ns, 3, 10), RG_REQUEST_OTHER);
    CHECK_EQUAL(usual_ns, 10);
    CHECK_EQUAL(rg_policy_usual(&usual, &votes, &usual_ns, 500, 77), RG_REQUEST_NEW);
    CHECK_EQUAL(usual_ns, 77);
    /* An eighth is as many still. */
    CHECK_EQUAL(rg_policy_usual(&usual, &votes, &usual_ns, 438, 10), RG_REQUEST_USUAL);
    CHECK_EQUAL(rg_policy_usual(&usual, &votes, &usual_ns, 493, 10), RG_REQUEST_OTHER);
    /* More than any program launches between two waits overflows nothing. */
    for (int i = 0; i < 20; i++)
        AFTER(UINT64_MAX);
    CHECK(rg_policy_regular(usual, votes) && votes / 8 == usual);
    /* A part of the launches: of 200 half, for how long that takes at 10 each, and where nothing tells. */
#define PART(made, ppm) rg_policy_until_late(made, 200, (made) * 10, 0, ppm, 0)
    CHECK_EQUAL(PART(0, 1), UINT64_MAX);
    CHECK_EQUAL(PART(60, 500000), 410);
    CHECK_EQUAL(PART(99, 500000), 20);
    CHECK_EQUAL(PART(100, 500000), 0);
    CHECK_EQUAL(PART(199, 1000000), 20);
    CHECK_EQUAL(PART(201, 1000000), 0);
    /* The rest of them takes no longer than 500; with a part, whichever comes first. */
#define REST(made, ppm) rg_policy_until_late(made, 200, (made) * 10, 0, ppm, 500)
    CHECK_EQUAL(REST(100, 0), 500);
    CHECK_EQUAL(REST(149, 0), 10);
    CHECK_EQUAL(REST(150, 0), 0);
    CHECK_EQUAL(REST(200, 0), 0);
    CHECK_EQUAL(REST(100, 550000), 110);
    CHECK_EQUAL(REST(110, 550000), 0);
    CHECK_EQUAL(REST(100, 900000), 500);
    CHECK_EQUAL(rg_policy_until_late(200, 200, 0, 0, 0, 500), 0); /* all of them, though it is not known how fast they come */
}

/* Requests that have launched exactly as many lately are taken to launch no more, for long not if one did all the same. */
static void requests_that_launch_no_more(void)
{
    int32_t alike = 0;
    for (int i = 1; i <= 10; i++) {
        alike = rg_policy_alike(alike, 200, 200, RG_REQUEST_USUAL);
        CHECK_EQUAL(alike, i < RG_POLICY_ALIKE ? i : RG_POLICY_ALIKE);
    }
    /* What launches far less tells nothing. One launch less is another number; one more was in the way. */
    CHECK_EQUAL(rg_policy_alike(alike, 200, 3, RG_REQUEST_OTHER), RG_POLICY_ALIKE);
    CHECK_EQUAL(rg_policy_alike(alike, 200, 199, RG_REQUEST_USUAL), 0);
    CHECK_EQUAL(rg_policy_alike(alike, 200, 3, RG_REQUEST_NEW), 0);
    CHECK_EQUAL(rg_policy_alike(alike, 200, 201, RG_REQUEST_USUAL), RG_POLICY_ALIKE - 64);
    alike = rg_policy_alike(alike, 200, 500, RG_REQUEST_OTHER);
    CHECK_EQUAL(alike, RG_POLICY_ALIKE - 64);
    for (int i = 0; i < 63; i++)
        alike = rg_policy_alike(alike, 200, 200, RG_REQUEST_USUAL);
    CHECK_EQUAL(alike, RG_POLICY_ALIKE - 1);
    CHECK_EQUAL(rg_policy_alike(alike, 200, 201, RG_REQUEST_USUAL), 0); /* nobody had come back for it */
    CHECK_EQUAL(rg_policy_alike(-5, 200, 201, RG_REQUEST_USUAL), -5);
    CHECK_EQUAL(rg_policy_alike(5, 200, 500, RG_REQUEST_OTHER), 0);
    CHECK_EQUAL(rg_policy_alike(-5, 200, 3, RG_REQUEST_NEW), -5);
}

/* What a client has had that is taken off the GPU: what it was not off, from when that was looked at first, each moment once. */
static void what_it_has_had(void)
{
    enum { MS = 1000000 };
    const uint64_t at = 3600000ull * MS;
    rg_policy_had had = {0};
    rg_policy_due_view v = {.starvation_ns = 100 * MS, .period_ns = 100 * MS, .min_share_ppm = 50000};
#define HAD(ms) (rg_policy_count(&had, &v, at + (ms) * MS), had.credit_ns)
    CHECK_EQUAL(HAD(0), 0);
    CHECK_EQUAL(HAD(20), 19 * MS);
    rg_policy_off(&had, v.idle_ns, at + 20 * MS);
    CHECK_EQUAL(HAD(120), 14 * MS);
    CHECK_EQUAL(HAD(220), 9 * MS);
    /* Back while high clients wait, whose work is in front of its own: off still, until they are idle. */
    rg_policy_on(&had, true, at + 220 * MS);
    CHECK_EQUAL(HAD(320), 4 * MS);
    v.idle_ns = at + 400 * MS;
    CHECK_EQUAL(HAD(420), 19 * MS);
    CHECK_EQUAL(HAD(440), 38 * MS);
    /* Off before they are. */
    rg_policy_off(&had, v.idle_ns, at + 440 * MS);
    rg_policy_on(&had, true, at + 460 * MS);
    rg_policy_off(&had, v.idle_ns, at + 480 * MS);
    CHECK_EQUAL(HAD(540), 33 * MS);
    rg_policy_on(&had, false, at + 540 * MS);
    CHECK_EQUAL(HAD(550), 42 * MS + MS / 2);
    /* What was before it had its due does not count. */
    had.given_ns = at + 640 * MS;
    had.credit_ns = 0;
    CHECK_EQUAL(HAD(660), 19 * MS);
}

/* In short slices that is high clients' breaks: from when they were idle to the spell that began then, each once. */
static void what_it_has_had_in_short_slices(void)
{
    enum { MS = 1000000 };
    const uint64_t at = 3600000ull * MS;
    rg_policy_had had = {0};
    rg_policy_due_view v = {.short_slices = true, .starvation_ns = 100 * MS, .period_ns = 100 * MS, .min_share_ppm = 50000};
    v.idle_ns = at - 70 * MS;
    v.spell_ns = at - 20 * MS;
    CHECK_EQUAL(HAD(0), 0);
    CHECK_EQUAL(HAD(20), -1 * MS);
    v.idle_ns = at + 50 * MS;
    CHECK_EQUAL(HAD(60), -3 * MS);
    v.spell_ns = at + 80 * MS;
    CHECK_EQUAL(HAD(100), 25 * MS);
    CHECK_EQUAL(HAD(120), 24 * MS);
    /* The first request of a spell is over already: from when they had been idle before. */
    v.idle_ns = at + 140 * MS;
    CHECK_EQUAL(HAD(160), 22 * MS);
    v.spell_ns = at + 150 * MS;
    v.idle_ns = at + 170 * MS;
    CHECK_EQUAL(HAD(180), 31 * MS);
    /* A break before its due is none; nor is a spell one that it was let into. */
    had.given_ns = at + 200 * MS;
    v.spell_ns = at + 190 * MS;
    CHECK_EQUAL(HAD(220), 30 * MS);
    v.idle_ns = at + 195 * MS;
    v.spell_ns = at + 210 * MS;
    CHECK_EQUAL(HAD(240), 39 * MS);
}

/* Requests launch more in one part than in another: that is learned from what was seen of them. */
static void course_of_requests(void)
{
    int64_t more[RG_POLICY_COURSE] = {0};
    for (uint64_t made = 0; made < 220; made++)
        CHECK_EQUAL(rg_policy_course(more, made, 200), made);
    more[3] = RG_POLICY_ONE / 16; /* 9/16 of the time for half of the launches */
    CHECK_EQUAL(rg_policy_course(more, 75, 200), 75);
    CHECK_EQUAL(rg_policy_course(more, 100, 200), 113);
    CHECK_EQUAL(rg_policy_course(more, 125, 200), 125);
    CHECK_EQUAL(rg_policy_course(more, 112, 200), 118); /* about half way to there */
    CHECK_EQUAL(rg_policy_course(more, 200, 200), 200);
    CHECK_EQUAL(rg_policy_course(more, 300, 200), 300);
    CHECK_EQUAL(rg_policy_course(more, 5, 0), 5);
    CHECK_EQUAL(rg_policy_course(more, 0, 0), 0);
    /* A third of the time for a quarter of the launches. */
    more[3] = 0;
    for (int i = 0; i < 200; i++)
        rg_policy_learn_course(more, RG_POLICY_ONE / 4, 1000000, 3000000);
    CHECK_EQUAL(more[1] / 100, RG_POLICY_ONE / 12 / 100);
    for (int i = 0; i < RG_POLICY_COURSE; i++)
        CHECK(i == 1 || !more[i]);
    /* What is seen between two of those parts counts for both, at the ends for one; by how near it is. */
    memset(more, 0, sizeof more);
    rg_policy_learn_course(more, RG_POLICY_ONE / 32 * 5, RG_POLICY_ONE / 32 * 7, RG_POLICY_ONE);
    CHECK_EQUAL(more[0], RG_POLICY_ONE / 16 / 16 * 3 / 4);
    CHECK_EQUAL(more[1], RG_POLICY_ONE / 16 / 16 / 4);
    memset(more, 0, sizeof more);
    for (int i = 0; i < 2000; i++) {
        rg_policy_learn_course(more, RG_POLICY_ONE / 16 * 5, RG_POLICY_ONE / 16 * 4, RG_POLICY_ONE);
        rg_policy_learn_course(more, RG_POLICY_ONE / 16, RG_POLICY_ONE / 32, RG_POLICY_ONE);
        rg_policy_learn_course(more, RG_POLICY_ONE / 16 * 15, RG_POLICY_ONE / 32 * 29, RG_POLICY_ONE);
    }
    CHECK_EQUAL(rg_policy_course(more, 5000, 16000) / 50, 4000 / 50);
    CHECK_EQUAL(rg_policy_course(more, 1000, 16000) / 50, 500 / 50);
    CHECK_EQUAL(rg_policy_course(more, 15000, 16000) / 50, 14500 / 50);
    /* And what is known to be far off, in a part in which all is seen, moves those around it. */
    memset(more, 0, sizeof more);
    for (int i = 0; i < 4000; i++)
        rg_policy_learn_course(more, RG_POLICY_ONE / 8 * 3, 80, 100);
    CHECK_EQUAL((rg_policy_course(more, 6000, 16000) + 50) / 100, 12800 / 100);
    CHECK(more[3] > 0 && more[4] > 0);
    memset(more, 0, sizeof more);
    for (int i = 0; i < 4000; i++)
        rg_policy_learn_course(more, RG_POLICY_ONE / 64, 50, 1000);
    CHECK(rg_policy_course(more, 1000, 64000) > 3000 && rg_policy_course(more, 1000, 64000) <= 3200);
    /* One request that is all over, or has not begun, when an eighth is launched: it counts for no more than if it were an eighth off. */
    for (int over = 0; over < 2; over++) {
        memset(more, 0, sizeof more);
        rg_policy_learn_course(more, RG_POLICY_ONE / 8 * (over ? 1 : 7), over ? 1000 : 0, 1000);
        CHECK_EQUAL(more[over ? 0 : 6], (over ? 1 : -1) * (RG_POLICY_ONE / 8 / 16));
    }
    /* Whatever is seen, more launches are never less of a request. */
    uint64_t random = 7;
    for (int i = 0; i < 20000; i++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        bool most = i / 1000 % 2; /* all of the time for the first launch, or none for all but the last */
        rg_policy_learn_course(more, random >> 48, most ? 1000 : 0, 1000);
        uint64_t before = 0;
        for (uint64_t made = 0; made <= 400; made += 7) {
            uint64_t come = rg_policy_course(more, made, 400);
            CHECK(come >= before && come <= 400);
            before = come;
        }
    }
    /* Nothing is learned from what cannot be. */
    int64_t kept[RG_POLICY_COURSE];
    memcpy(kept, more, sizeof more);
    rg_policy_learn_course(more, RG_POLICY_ONE / 2, 5, 0);
    rg_policy_learn_course(more, RG_POLICY_ONE / 2, 6, 5);
    rg_policy_learn_course(more, RG_POLICY_ONE, 5, 10);
    rg_policy_learn_course(more, RG_POLICY_ONE / 2, 5, UINT64_MAX);
    CHECK(!memcmp(kept, more, sizeof more));
}

/* Kinds of requests that wait more often than others are given the GPU for longer, and the others for less. */
static void balance_of_kinds(void)
{
    enum { ONE = RG_POLICY_ONE };
    CHECK(!rg_policy_waited(3200, 100) && rg_policy_waited(3200, 101) && !rg_policy_waited(0, 0));
    CHECK_EQUAL(rg_policy_balance(0, 0, 0), ONE);
    CHECK_EQUAL(rg_policy_balance(ONE, ONE / 3, ONE / 3), ONE);
    CHECK_EQUAL(rg_policy_balance(ONE, ONE, 0), ONE + ONE / 32);
    CHECK_EQUAL(rg_policy_balance(ONE, 0, ONE), ONE - ONE / 32);
    CHECK_EQUAL(rg_policy_balance(ONE, ONE / 2, ONE / 4), ONE + ONE / 128);
    CHECK_EQUAL(rg_policy_balance(2 * ONE, ONE, 0), 2 * ONE);
    CHECK_EQUAL(rg_policy_balance(ONE / 2, 0, ONE), ONE / 2);
    /* As many of each: back to all of it, in time. */
    CHECK_EQUAL(rg_policy_balance(ONE + 512, 0, 0), ONE + 511);
    CHECK_EQUAL(rg_policy_balance(ONE - 512, 0, 0), ONE - 511);
}

static void fair(void)
{
#define FAIR(...) DECIDE(v_.policy = RG_POLICY_FAIR, v_.quantum_ns = 500, __VA_ARGS__)
    CHECK_EQUAL(FAIR(v_.lead_ns = 500), RG_PASS);
    CHECK_EQUAL(FAIR(v_.lead_ns = 501), RG_WAIT_TURN);
    /* Classes, busy high clients, hold and preemption mean nothing here. */
    CHECK_EQUAL(FAIR(v_.lead_ns = 501, v_.best_effort = false), RG_WAIT_TURN);
    CHECK_EQUAL(FAIR(v_.lead_ns = 501, v_.preemptible = true), RG_WAIT_TURN);
    CHECK_EQUAL(FAIR(v_.high_busy = true), RG_PASS);
    CHECK_EQUAL(FAIR(v_.hold = true), RG_PASS);
    CHECK_EQUAL(FAIR(v_.inflight = 8 * LAUNCH, v_.lead_ns = 501), RG_WAIT_INFLIGHT);
    CHECK_EQUAL(FAIR(v_.lead_ns = 501, v_.waited_ns = 1000), RG_PASS_STARVED);
    CHECK_EQUAL(FAIR(v_.inflight = 8 * LAUNCH, v_.waited_ns = 1000), RG_PASS_STARVED);
    CHECK_EQUAL(FAIR(v_.lead_ns = 501, v_.credit = 8), RG_WAIT_TURN);
    rg_policy_view v = base;
    v.policy = RG_POLICY_FAIR;
    v.high_busy = true; /* its own bit, under fair */
    CHECK_EQUAL(rg_policy_batch(&v), 4 * LAUNCH);
    /* Virtual time: the charge over the weight, to 0.01% between the smallest and the largest weight. */
    CHECK_EQUAL(rg_policy_virtual(1000000, rg_policy_inverse(1000)), 1000000);
    CHECK_EQUAL(rg_policy_virtual(1000000, rg_policy_inverse(2000)), 500000);
    CHECK_EQUAL(rg_policy_virtual(1000000, rg_policy_inverse(4000)), 250000);
    CHECK_EQUAL(rg_policy_virtual(1000000, rg_policy_inverse(10)), 100000000);
    CHECK_EQUAL(rg_policy_virtual(UINT32_MAX, rg_policy_inverse(10)), 100ull * UINT32_MAX);
    uint64_t least = rg_policy_virtual(1000000000, rg_policy_inverse(100000));
    CHECK(least > 9999000 && least <= 10000000);
    CHECK_EQUAL(rg_policy_inverse(0), rg_policy_inverse(1000));
}

static void orion(void)
{
    /* A kernel of 40 SMs bound by memory beside one bound by compute, with 80 SMs allowed and room for 1000 ns. */
#define ORION(...) \
    DECIDE(v_.policy = RG_POLICY_ORION, v_.high_busy = true, v_.profiled = true, v_.sms = 40, v_.bound = RG_BOUND_MEMORY, \
           v_.high_bound = RG_BOUND_COMPUTE, v_.sms_limit = 80, v_.outstanding_limit_ns = 1000, __VA_ARGS__)
    CHECK_EQUAL(ORION(v_.credit = 0), RG_PASS);
    CHECK_EQUAL(ORION(v_.sms = 79), RG_PASS);
    CHECK_EQUAL(ORION(v_.sms = 80), RG_WAIT_HIGH);
    CHECK_EQUAL(ORION(v_.bound = RG_BOUND_COMPUTE), RG_WAIT_HIGH);
    CHECK_EQUAL(ORION(v_.bound = RG_BOUND_COMPUTE, v_.high_bound = RG_BOUND_MEMORY), RG_PASS);
    CHECK_EQUAL(ORION(v_.bound = RG_BOUND_UNKNOWN), RG_PASS);
    CHECK_EQUAL(ORION(v_.high_bound = RG_BOUND_UNKNOWN), RG_PASS);
    CHECK_EQUAL(ORION(v_.profiled = false), RG_WAIT_HIGH);
    /* No high work: any kernel, but for what is outstanding. */
    CHECK_EQUAL(ORION(v_.high_busy = false, v_.sms = 132, v_.bound = RG_BOUND_COMPUTE), RG_PASS);
    CHECK_EQUAL(ORION(v_.high_busy = false, v_.profiled = false), RG_PASS);
    CHECK_EQUAL(ORION(v_.outstanding_ns = 999), RG_PASS);
    CHECK_EQUAL(ORION(v_.outstanding_ns = 1000), RG_WAIT_INFLIGHT);
    CHECK_EQUAL(ORION(v_.outstanding_ns = 1000, v_.high_busy = false), RG_WAIT_INFLIGHT);
    CHECK_EQUAL(ORION(v_.outstanding_ns = 1000, v_.outstanding_limit_ns = 0), RG_PASS);
    /* Who never waits, and the bound. */
    CHECK_EQUAL(ORION(v_.sms = 80, v_.best_effort = false), RG_PASS);
    CHECK_EQUAL(ORION(v_.sms = 80, v_.waited_ns = 1000), RG_PASS_STARVED);
    CHECK_EQUAL(ORION(v_.sms = 80, v_.credit = 1), RG_PASS_STARVED);
    CHECK_EQUAL(ORION(v_.outstanding_ns = 1000, v_.waited_ns = 1000), RG_PASS_STARVED);
    CHECK_EQUAL(ORION(v_.sms = 80, v_.allowance_ns = 1000), RG_WAIT_HIGH);
}

/* Two of the last 64 pauses between requests: whichever they were. */
static void requests_that_follow(void)
{
    CHECK(!rg_policy_follows(0));
    CHECK(!rg_policy_follows(1));
    CHECK(!rg_policy_follows(1ull << 63));
    CHECK(rg_policy_follows(1ull << 63 | 1));
    CHECK(rg_policy_follows(3));
    CHECK(rg_policy_follows(UINT64_MAX));
}

/* Best-effort processes have slices that together are as long as that of one alone, but none shorter than the driver's. */
static void slices_beside_one_another(void)
{
    CHECK_EQUAL(rg_policy_peers_slice_us(0, 1, 2048), 2048);
    CHECK_EQUAL(rg_policy_peers_slice_us(50, 1, 2048), 2048);
    CHECK_EQUAL(rg_policy_peers_slice_us(4000, 1, 2048), 2048);
    CHECK_EQUAL(rg_policy_peers_slice_us(16000, 1, 2048), 8000);
    CHECK_EQUAL(rg_policy_peers_slice_us(16000, 3, 2048), 4000);
    CHECK_EQUAL(rg_policy_peers_slice_us(16000, 7, 2048), 2048);
}

/* Whether requests are foreseen that begin so long after something has arrived, 400 us before which the GPU comes, for 1 ms; and how much later it does. */
static bool foreseen(const uint32_t *us, uint32_t n, uint32_t *after_us)
{
    uint32_t wait_us = 0;
    *after_us = 12345;
    return rg_policy_foresees(us, n, 400, 1000, after_us, &wait_us);
}

/* Sooner where processors are late, of which two waits of 64 are no sign, or an old one. */
static void how_soon_it_comes(void)
{
    CHECK_EQUAL(rg_policy_ahead_us(0), 200);
    CHECK_EQUAL(rg_policy_ahead_us(1ull << 63 | 1), 200);
    CHECK_EQUAL(rg_policy_ahead_us(1ull << 63 | 3), 400);
    CHECK_EQUAL(rg_policy_ahead_us((1ull << 63 | 3) << 1), 200);
    CHECK_EQUAL(rg_policy_ahead_us(UINT64_MAX), 400);
}

/* For how long it waits then, of 1500 us; 0: nothing is foreseen. */
static uint32_t waits_for(const uint32_t *us, uint32_t n)
{
    uint32_t after_us, wait_us = 0;
    return rg_policy_foresees(us, n, 400, 1500, &after_us, &wait_us) ? wait_us : 0;
}

/* As requests of a server whose processors are late now and then: sixteen, so many of which take so long, the others 0.9 ms. */
static void how_long_it_waits(void)
{
    enum { N = RG_POLICY_ARRIVALS };
    uint32_t us[N];
    struct {
        uint32_t late, late_us, waits_us;
    } cases[] = {
        {0, 0, 1500},    /* as long as it may */
        {3, 1999, 1500}, /* from 500 on */
        {3, 2000, 1501}, /* (13 * 400 + 3 * 1500) / 16 */
        {1, 3499, 3000}, {1, 3500, 1500}, {1, RG_POLICY_NEVER, 1500},
        {4, 3000, 2501}, /* (12 * 400 + 4 * 2500) / 16 = 925 */
        {5, 2500, 2001}, /* (11 * 400 + 5 * 2000) / 16 = 900 */
        {5, 2820, 2321}, /* 1000, just */
        {5, 2824, 0},    /* more than two thirds of 1500 on average; and eleven of sixteen alone are in time otherwise */
        {4, 3499, 1500}, /* so, for those twelve alone */
    };
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (uint32_t k = 0; k < N; k++)
            us[k * 5 % N] = k < cases[i].late ? cases[i].late_us : 900;
        CHECK_EQUAL(waits_for(us, N), cases[i].waits_us);
    }
    /* One that nothing came of is waited for as long: (14 * 400 + 1500 + 1500) / 16; of the two others the later one is too late. */
    for (uint32_t k = 0; k < N; k++)
        us[k] = 900;
    us[4] = 2100;
    us[9] = RG_POLICY_NEVER;
    CHECK_EQUAL(waits_for(us, N), 1601);
    us[7] = 3600;
    CHECK_EQUAL(waits_for(us, N), 1601);
    /* Half as many that are known will do. */
    us[7] = us[9] = 900;
    CHECK_EQUAL(waits_for(us, N / 2 - 1), 0);
    CHECK_EQUAL(waits_for(us, N / 2), 1601);
}

static void what_is_foreseen(void)
{
    enum { N = RG_POLICY_ARRIVALS };
    uint32_t us[N], after;
    for (int i = 0; i < N; i++)
        us[i] = 2000;
    CHECK(!foreseen(us, 0, &after));
    CHECK(!foreseen(us, 7, &after)); /* not known yet */
    CHECK_EQUAL(after, 12345);
    CHECK(foreseen(us, 8, &after));
    CHECK_EQUAL(after, 1600);
    CHECK(foreseen(us, N, &after));
    CHECK_EQUAL(after, 1600);
    /* In any order; one of sixteen that comes sooner does not count for when. */
    for (int i = 0; i < N; i++)
        us[i] = 2000 + (i * 7) % N * 10;
    CHECK(foreseen(us, N, &after));
    CHECK_EQUAL(after, 1610);
    us[3] = 5;
    CHECK(foreseen(us, N, &after));
    CHECK(after >= 1600 && after <= 1610);
    us[3] = 2000;
    /* At once, where it would have to be sooner. */
    for (int i = 0; i < N; i++)
        us[i] = 100 + i * 40;
    CHECK(foreseen(us, N, &after));
    CHECK_EQUAL(after, 0);
    /* Three of four within the time, from then on. */
    for (int i = 0; i < N; i++)
        us[i] = i < 4 ? 10000 : 1000;
    CHECK(foreseen(us, N, &after));
    CHECK_EQUAL(after, 600);
    us[9] = 10000;
    CHECK(!foreseen(us, N, &after));
    us[9] = RG_POLICY_NEVER;
    CHECK(!foreseen(us, N, &after));
    us[9] = 1599;
    CHECK(foreseen(us, N, &after));
    us[9] = 2600; /* twice as long, at most: how_long_it_waits */
    CHECK(!foreseen(us, N, &after));
    /* And with nothing that ever came of it. */
    for (int i = 0; i < N; i++)
        us[i] = RG_POLICY_NEVER;
    CHECK(!foreseen(us, N, &after));
    us[0] = us[1] = 500;
    CHECK(!foreseen(us, N, &after));
    /* For no time nothing comes. */
    for (int i = 0; i < N; i++)
        us[i] = 2000;
    uint32_t wait_us;
    CHECK(!rg_policy_foresees(us, N, 400, 0, &after, &wait_us));
}

int main(void)
{
    slo_is_priority();
    held_and_preemptible();
    least_share();
    who_waits_for_longer_than_a_slice();
    slices_beside_one_another();
    brief_requests();
    pace_of_a_request();
    what_it_has_had();
    what_it_has_had_in_short_slices();
    course_of_requests();
    balance_of_kinds();
    requests_that_are_alike();
    requests_that_launch_no_more();
    requests_that_follow();
    what_is_foreseen();
    how_soon_it_comes();
    how_long_it_waits();
    fair();
    orion();
    CHECK_EQUAL(DECIDE(), RG_PASS);
    CHECK_EQUAL(DECIDE(v_.high_busy = true), RG_WAIT_HIGH);
    CHECK_EQUAL(DECIDE(v_.inflight = 7 * LAUNCH), RG_PASS);
    CHECK_EQUAL(DECIDE(v_.inflight = 8 * LAUNCH), RG_WAIT_INFLIGHT);
    CHECK_EQUAL(DECIDE(v_.inflight = 800 * LAUNCH, v_.inflight_limit = 0), RG_PASS);
    /* The in-flight limit comes first: a launch that waits for both is told of its own work. */
    CHECK_EQUAL(DECIDE(v_.inflight = 8 * LAUNCH, v_.high_busy = true), RG_WAIT_INFLIGHT);
    /* Who never waits. */
    CHECK_EQUAL(DECIDE(v_.high_busy = true, v_.inflight = 8 * LAUNCH, v_.policy = RG_POLICY_NONE), RG_PASS);
    CHECK_EQUAL(DECIDE(v_.high_busy = true, v_.inflight = 8 * LAUNCH, v_.best_effort = false), RG_PASS);
    /* The bound: at exactly starvation_ns, for either kind of wait; the credit lets the rest of a batch out, not more. */
    CHECK_EQUAL(DECIDE(v_.high_busy = true, v_.waited_ns = 999), RG_WAIT_HIGH);
    CHECK_EQUAL(DECIDE(v_.high_busy = true, v_.waited_ns = 1000), RG_PASS_STARVED);
    CHECK_EQUAL(DECIDE(v_.inflight = 8 * LAUNCH, v_.waited_ns = 1000), RG_PASS_STARVED);
    CHECK_EQUAL(DECIDE(v_.high_busy = true, v_.credit = 1), RG_PASS_STARVED);
    CHECK_EQUAL(DECIDE(v_.high_busy = true, v_.credit = 1, v_.inflight = 8 * LAUNCH), RG_WAIT_INFLIGHT);
    /* Running beside a busy high client, if allowed, has a limit of its own. */
    CHECK_EQUAL(DECIDE(v_.high_busy = true, v_.corun_limit = 2 * LAUNCH, v_.inflight = 1 * LAUNCH), RG_PASS);
    CHECK_EQUAL(DECIDE(v_.high_busy = true, v_.corun_limit = 2 * LAUNCH, v_.inflight = 2 * LAUNCH), RG_WAIT_HIGH);

    /* A hold: whether or not anybody is busy, however long. Who is taken off the GPU for it need not wait here. */
    CHECK_EQUAL(DECIDE(v_.hold = true), RG_WAIT_HIGH);
    CHECK_EQUAL(DECIDE(v_.hold = true, v_.waited_ns = 1000000000), RG_WAIT_HIGH);
    CHECK_EQUAL(DECIDE(v_.hold = true, v_.preemptible = true), RG_PASS);
    CHECK_EQUAL(DECIDE(v_.hold = true, v_.best_effort = false), RG_PASS);
    CHECK_EQUAL(DECIDE(v_.hold = true, v_.policy = RG_POLICY_NONE), RG_PASS);

    /* Batches: half the limit, one by one for small limits and beside a busy high client. */
    rg_policy_view v = base;
    CHECK_EQUAL(rg_policy_batch(&v), 4 * LAUNCH);
    v.inflight_limit = 3 * LAUNCH;
    CHECK_EQUAL(rg_policy_batch(&v), 1);
    v.inflight_limit = 64 * LAUNCH;
    CHECK_EQUAL(rg_policy_batch(&v), 32 * LAUNCH);
    v.high_busy = true;
    CHECK_EQUAL(rg_policy_batch(&v), 1);

    /* Weights: the duration in units, never nothing; one launch where it is not known or nobody asks. */
    CHECK_EQUAL(rg_policy_weight(0, 50000), LAUNCH);
    CHECK_EQUAL(rg_policy_weight(25000, 0), LAUNCH);
    CHECK_EQUAL(rg_policy_weight(50000, 50000), LAUNCH);
    CHECK_EQUAL(rg_policy_weight(25000, 50000), LAUNCH / 2);
    CHECK_EQUAL(rg_policy_weight(6000000, 50000), 120 * LAUNCH);
    CHECK_EQUAL(rg_policy_weight(1, 50000), LAUNCH / 32);
    CHECK_EQUAL(rg_policy_weight(3600000000000, 50000), LAUNCH << 16);
    return 0;
}
