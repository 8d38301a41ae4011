/*
 * policy.c: the parts of policy.h that the default policy's open gate does not need. Pure, as it says there.
 */
#include "policy.h"

/*
 * fair: the in-flight limit first, as everywhere, for it is what leaves the order to us: what is queued in the driver runs in
 * the driver's order. No credit: one launch a starvation period, should the slowest client hang with work unfinished.
 */
static enum rg_verdict decide_fair(const rg_policy_view *v)
{
    bool starved = v->waited_ns >= v->starvation_ns;
    if (v->inflight_limit && v->inflight >= v->inflight_limit)
        return starved ? RG_PASS_STARVED : RG_WAIT_INFLIGHT;
    if (v->lead_ns <= v->quantum_ns)
        return RG_PASS;
    return starved ? RG_PASS_STARVED : RG_WAIT_TURN;
}

/*
 * orion: a reimplementation of the rules published as "Orion: Interference-aware, Fine-grained GPU Sharing for ML
 * Applications" (Strati, Ma, Klimovic, EuroSys 2024, section 5) and in its code (github.com/eth-easl/orion,
 * src/scheduler/scheduler_eval.cpp, busy_wait_profile):
 *
 *   1. High kernels are launched at once (they never come here).
 *   2. A best-effort kernel may go when no high work is outstanding, or when it needs fewer SMs than SM_THRESHOLD and its
 *      profile differs from that of the high kernel launched last. Unknown profiles differ from all, as in that code.
 *   3. Whichever of the two it was, once the best-effort kernels that were launched and have not finished add up to
 *      DUR_THRESHOLD (2.5% of a high request's latency alone) no more are launched until some have.
 *
 * Not Orion's: a kernel that no profile knows waits for the high client's idle moments, where Orion's programs hang or read
 * the wrong row; launches have the starvation bound that every wait in Rigel has. Of Orion's, SM_THRESHOLD's search for
 * high clients that train is left out.
 */
static enum rg_verdict decide_orion(const rg_policy_view *v)
{
    bool starved = v->waited_ns >= v->starvation_ns;
    if (v->outstanding_limit_ns && v->outstanding_ns >= v->outstanding_limit_ns)
        return starved ? RG_PASS_STARVED : RG_WAIT_INFLIGHT;
    bool differs = v->bound == RG_BOUND_UNKNOWN || v->high_bound == RG_BOUND_UNKNOWN || v->bound != v->high_bound;
    if (!v->high_busy || (v->profiled && v->sms < v->sms_limit && differs))
        return RG_PASS;
    return v->credit || starved ? RG_PASS_STARVED : RG_WAIT_HIGH;
}

enum rg_verdict rg_policy_decide(const rg_policy_view *v)
{
    if (v->policy <= RG_POLICY_SLO)
        return rg_policy_decide_inline(v);
    if (v->policy == RG_POLICY_FAIR)
        return decide_fair(v);
    if (v->policy != RG_POLICY_ORION || !v->best_effort)
        return RG_PASS; /* a number that this version does not know: stand in nobody's way */
    return v->hold ? RG_WAIT_HIGH : decide_orion(v);
}

#define SHARE_PERIOD_NS 1000000000u

/* Millionths of a time. In two steps: a week in nanoseconds, times a million, has no room in 64 bits. */
static uint64_t millionths(uint64_t ns, uint32_t ppm)
{
    return ns / 1000000 * ppm + ns % 1000000 * ppm / 1000000;
}

/* What comes in at once, at the starvation bound and then again and again. */
static uint64_t lump(uint64_t starvation_ns, uint32_t ppm)
{
    return millionths(starvation_ns < SHARE_PERIOD_NS ? starvation_ns : SHARE_PERIOD_NS, ppm);
}

static uint64_t earned(uint64_t busy_ns, uint64_t starvation_ns, uint32_t ppm)
{
    uint64_t period = starvation_ns < SHARE_PERIOD_NS ? starvation_ns : SHARE_PERIOD_NS;
    if (busy_ns < starvation_ns || !period)
        return 0;
    return ((busy_ns - starvation_ns) / period + 1) * lump(starvation_ns, ppm);
}

uint64_t rg_policy_allowance(uint64_t busy_ns, uint64_t paid_ns, uint64_t starvation_ns, uint32_t ppm)
{
    uint64_t in = earned(busy_ns, starvation_ns, ppm), most = lump(starvation_ns, ppm);
    uint64_t left = in > paid_ns ? in - paid_ns : 0;
    return left < most ? left : most;
}

uint64_t rg_policy_pay(uint64_t busy_ns, uint64_t paid_ns, uint64_t starvation_ns, uint32_t ppm, uint64_t cost_ns)
{
    uint64_t in = earned(busy_ns, starvation_ns, ppm), most = lump(starvation_ns, ppm);
    uint64_t lost = in > most ? in - most : 0;
    return (paid_ns > lost ? paid_ns : lost) + cost_ns;
}

/* Nobody is off for ever, and nobody who is high has less than half. */
static uint32_t least_share(uint32_t ppm)
{
    enum { LEAST_PPM = 10000, MOST_PPM = 500000 };
    return ppm < LEAST_PPM ? LEAST_PPM : ppm > MOST_PPM ? MOST_PPM : ppm;
}

int64_t rg_policy_credit(int64_t credit_ns, uint64_t passed_ns, uint64_t ran_ns, uint64_t starvation_ns, uint32_t ppm)
{
    enum { BOUNDS = 10 };
    const uint64_t LONG_NS = 1ull << 40; /* a quarter of an hour: nobody looked */
    uint64_t passed = passed_ns < LONG_NS ? passed_ns : LONG_NS, ran = ran_ns < LONG_NS ? ran_ns : LONG_NS;
    ppm = least_share(ppm);
    int64_t most = (int64_t)(starvation_ns / 1000000 * BOUNDS * ppm), credit = credit_ns + (int64_t)ran - (int64_t)(passed * ppm / 1000000);
    return credit > most ? most : credit < -most ? -most : credit;
}

static void count_waits(rg_policy_had *had, uint64_t idle_ns, uint64_t now_ns)
{
    if (!had->back_ns)
        return;
    bool over = idle_ns > had->back_ns;
    had->off_sum_ns += (over ? idle_ns : now_ns) - had->back_ns;
    had->back_ns = over ? 0 : now_ns;
}

void rg_policy_off(rg_policy_had *had, uint64_t idle_ns, uint64_t now_ns)
{
    count_waits(had, idle_ns, now_ns);
    had->back_ns = 0;
    had->off = true;
    had->off_since_ns = now_ns;
}

void rg_policy_on(rg_policy_had *had, bool high_busy, uint64_t now_ns)
{
    had->off_sum_ns += had->off ? now_ns - had->off_since_ns : 0;
    had->off = false;
    had->back_ns = high_busy ? now_ns : 0;
}

void rg_policy_count(rg_policy_had *had, const rg_policy_due_view *v, uint64_t now_ns)
{
    count_waits(had, v->idle_ns, now_ns);
    uint64_t off_ns = had->off_sum_ns + (had->off ? now_ns - had->off_since_ns : 0);
    uint64_t from = had->looked_ns > had->given_ns ? had->looked_ns : had->given_ns, passed_ns = from && now_ns > from ? now_ns - from : 0;
    uint64_t was_off_ns = off_ns - had->off_then_ns, ran_ns = passed_ns > was_off_ns ? passed_ns - was_off_ns : 0;
    if (v->short_slices) {
        /* The spell's first request may be over already. */
        uint64_t since = v->idle_ns < v->spell_ns ? v->idle_ns : had->idle_then_ns;
        since = since > had->given_ns ? since : had->given_ns;
        bool began = v->spell_ns != had->spell_then_ns && had->spell_then_ns;
        ran_ns = began && since < v->spell_ns ? v->spell_ns - since : 0;
    }
    had->credit_ns = rg_policy_credit(had->credit_ns, passed_ns, ran_ns, v->starvation_ns, v->min_share_ppm);
    had->looked_ns = now_ns;
    had->off_then_ns = off_ns;
    had->spell_then_ns = v->spell_ns;
    had->idle_then_ns = v->idle_ns;
}

/* What is left of that long since then. */
static uint64_t left_of(uint64_t ns, uint64_t since_ns, uint64_t now_ns)
{
    uint64_t passed_ns = now_ns > since_ns ? now_ns - since_ns : 0;
    return ns > passed_ns ? ns - passed_ns : 0;
}

uint64_t rg_policy_due_in(const rg_policy_had *had, const rg_policy_due_view *v, bool runs, uint64_t now_ns)
{
    uint64_t bound_ns = left_of(v->starvation_ns, v->spell_ns > had->given_ns ? v->spell_ns : had->given_ns, now_ns);
    uint64_t period_ns = had->given_ns ? left_of(v->period_ns, had->given_ns, now_ns) : 0;
    uint64_t left_ns = bound_ns > period_ns ? bound_ns : period_ns;
    if (runs)
        return rg_policy_credit(had->credit_ns, left_ns, left_ns, v->starvation_ns, v->min_share_ppm) < 0 ? left_ns : UINT64_MAX;
    uint64_t ppm = least_share(v->min_share_ppm);
    uint64_t used_up_ns = had->credit_ns > 0 ? ((uint64_t)had->credit_ns * 1000000 + ppm - 1) / ppm : 0;
    return used_up_ns > left_ns ? used_up_ns : left_ns;
}

uint64_t rg_policy_away(const rg_policy_had *had, const rg_policy_due_view *v, uint64_t now_ns)
{
    uint64_t since_ns = had->given_ns && now_ns > had->given_ns ? now_ns - had->given_ns : 0;
    uint64_t away_ns = since_ns > v->starvation_ns ? since_ns : v->starvation_ns;
    return away_ns < v->period_ns ? away_ns : v->period_ns;
}

uint64_t rg_policy_due(uint64_t away_ns, uint64_t high_slice_ns, uint32_t ppm)
{
    ppm = least_share(ppm);
    return (away_ns + high_slice_ns) / 1000 * ppm / (1000000 - ppm) * 1000;
}

uint64_t rg_policy_due_beside(uint64_t away_ns, uint32_t ppm)
{
    enum { LEAST_PPM = 10000, MOST_PPM = 400000 };
    ppm = ppm < LEAST_PPM ? LEAST_PPM : ppm > MOST_PPM ? MOST_PPM : ppm;
    return away_ns / 1000 * (2 * ppm) / (1000000 - 2 * ppm) * 1000;
}

enum rg_request rg_policy_usual(uint32_t *usual, uint32_t *votes, uint64_t *usual_ns, uint64_t made64, uint64_t took_ns)
{
    enum { MOST = UINT32_MAX / 8, KEPT = 8 };
    uint32_t made = made64 < MOST ? (uint32_t)made64 : MOST;
    uint32_t off = made > *usual ? made - *usual : *usual - made;
    uint32_t against = made > *usual / 16 ? made : *usual / 16;
    if (off <= *usual / 8) {
        uint32_t most = *usual * KEPT;
        *votes = *votes < most && most - *votes > made ? *votes + made : most;
        *usual = made ? made : *usual;
        *usual_ns = *usual_ns ? *usual_ns - *usual_ns / 4 + took_ns / 4 : took_ns;
        return RG_REQUEST_USUAL;
    }
    if (*votes > against) {
        *votes -= against;
        return RG_REQUEST_OTHER;
    }
    *usual = *votes = made;
    *usual_ns = took_ns;
    return RG_REQUEST_NEW;
}

int32_t rg_policy_alike(int32_t alike, uint32_t usual, uint64_t made, enum rg_request is)
{
    enum { AFTER_MISTAKE = RG_POLICY_ALIKE - 64 };
    if (made == usual)
        return alike < RG_POLICY_ALIKE ? alike + 1 : RG_POLICY_ALIKE;
    if (made > usual && alike == RG_POLICY_ALIKE)
        return AFTER_MISTAKE;
    return is == RG_REQUEST_OTHER && made < usual ? alike : alike < 0 ? alike : 0;
}

uint64_t rg_policy_pace(uint64_t made, uint32_t usual, uint64_t spent_ns, uint64_t usual_ns)
{
    uint64_t before = usual_ns && usual ? usual / 8 : 0;
    uint64_t before_ns = before ? usual_ns / usual * before : 0;
    uint64_t pace_ns = made + before ? (spent_ns + before_ns) / (made + before) : 0, most_ns = before ? usual_ns / usual * 4 : 0;
    return most_ns && pace_ns > most_ns ? most_ns : pace_ns;
}

/* How much more of the time is over at so many eighths of the launches; at none and at all there is no difference. */
static int64_t more_at(const int64_t more[RG_POLICY_COURSE], int64_t knot)
{
    return knot > 0 && knot <= RG_POLICY_COURSE ? more[knot - 1] : 0;
}

enum { PARTS = RG_POLICY_COURSE + 1, PART_ONE = RG_POLICY_ONE / PARTS };

static int64_t course_at(const int64_t more[RG_POLICY_COURSE], int64_t part)
{
    int64_t knot = part / PART_ONE, beyond = part % PART_ONE;
    return part + (more_at(more, knot) * (PART_ONE - beyond) + more_at(more, knot + 1) * beyond) / PART_ONE;
}

/* So much; those around it, of which nothing may have been seen, follow as far as they have to. */
static void set_course(int64_t more[RG_POLICY_COURSE], int64_t knot, int64_t is)
{
    const int64_t STEP = PART_ONE - PART_ONE / 8; /* an eighth of the launches takes a 64th of the time at least */
    int64_t least = -knot * STEP, most = (PARTS - knot) * STEP;
    more[knot - 1] = is < least ? least : is > most ? most : is;
    for (int64_t k = knot + 1; k <= RG_POLICY_COURSE && more[k - 1] < more[k - 2] - STEP; k++)
        more[k - 1] = more[k - 2] - STEP;
    for (int64_t k = knot - 1; k >= 1 && more[k - 1] > more[k] + STEP; k--)
        more[k - 1] = more[k] + STEP;
}

uint64_t rg_policy_course(const int64_t more[RG_POLICY_COURSE], uint64_t made, uint32_t usual)
{
    if (made >= usual)
        return made;
    return ((uint64_t)course_at(more, (int64_t)(made * RG_POLICY_ONE / usual)) * usual + RG_POLICY_ONE / 2) / RG_POLICY_ONE;
}

void rg_policy_learn_course(int64_t more[RG_POLICY_COURSE], uint32_t part, uint64_t spent_ns, uint64_t took_ns)
{
    enum { KEPT = 16 };
    const uint64_t LONGEST_NS = 1ull << 40;
    if (!took_ns || took_ns > LONGEST_NS || spent_ns > took_ns || part >= RG_POLICY_ONE)
        return;
    int64_t off = (int64_t)(spent_ns * RG_POLICY_ONE / took_ns) - course_at(more, part), beyond = part % PART_ONE;
    off = off > PART_ONE ? PART_ONE : off < -PART_ONE ? -PART_ONE : off; /* one that stood still afterwards, or before, says little of others */
    for (int64_t next = 0; next < 2; next++) {
        int64_t knot = part / PART_ONE + next, weight = next ? beyond : PART_ONE - beyond;
        if (knot >= 1 && knot <= RG_POLICY_COURSE)
            set_course(more, knot, more[knot - 1] + off * weight / PART_ONE / KEPT);
    }
}

uint64_t rg_policy_until_late(uint64_t made, uint32_t usual, uint64_t spent_ns, uint64_t usual_ns, uint32_t ppm, uint64_t need_ns)
{
    const uint64_t LONGEST_NS = 1ull << 34; /* times a number of launches it is no more than 64 bits */
    uint64_t pace_ns = rg_policy_pace(made, usual, spent_ns < LONGEST_NS ? spent_ns : LONGEST_NS, usual_ns), left_ns = UINT64_MAX;
    if ((ppm && made * 1000000 >= (uint64_t)usual * ppm) || (need_ns && made >= usual))
        return 0;
    if (!pace_ns)
        return UINT64_MAX;
    if (ppm)
        left_ns = ((uint64_t)usual * ppm / 1000000 + 1 - made) * pace_ns;
    if (need_ns) {
        uint64_t rest_ns = (usual - made) * pace_ns;
        if (rest_ns <= need_ns)
            return 0;
        left_ns = rest_ns - need_ns < left_ns ? rest_ns - need_ns : left_ns;
    }
    return left_ns;
}

uint32_t rg_policy_balance(uint32_t part, uint32_t own, uint32_t all)
{
    enum { STEPS = 32, BACK = 512, LEAST = RG_POLICY_ONE / 2, MOST = RG_POLICY_ONE * 2 };
    int64_t now = part ? part : RG_POLICY_ONE, off = ((int64_t)own - all) * now / RG_POLICY_ONE;
    now += off / STEPS + (RG_POLICY_ONE - now) / BACK;
    return (uint32_t)(now < LEAST ? LEAST : now > MOST ? MOST : now);
}

bool rg_policy_outlasts(uint64_t kept_ns, uint64_t wait_ns, uint64_t slice_ns)
{
    return wait_ns && slice_ns && kept_ns % slice_ns + wait_ns > slice_ns - slice_ns / 8;
}

uint64_t rg_policy_brief(uint64_t launched_ns, uint64_t worked_ns)
{
    return worked_ns <= RG_POLICY_BRIEF_NS && launched_ns < 2 * worked_ns ? 2 * worked_ns - launched_ns : 0;
}

uint32_t rg_policy_ahead_us(uint64_t late_waits)
{
    enum { COMES_US = 200, LATE_US = 200, LATE = 3 };
    return COMES_US + (__builtin_popcountll(late_waits) >= LATE ? LATE_US : 0);
}

/* How many of these, in order, have begun from then on and within `wait_us`; and for how long it has waited for all of them. */
static uint32_t begun_within(const uint32_t *sorted, uint32_t n, uint32_t after_us, uint64_t wait_us, uint64_t *waited_us)
{
    uint32_t hits = 0;
    *waited_us = 0;
    for (uint32_t i = 0; i < n; i++) {
        bool in_time = sorted[i] >= after_us && sorted[i] - after_us < wait_us && sorted[i] != RG_POLICY_NEVER;
        hits += in_time;
        *waited_us += in_time ? sorted[i] - after_us : sorted[i] < after_us ? 0 : wait_us;
    }
    return hits;
}

bool rg_policy_foresees(const uint32_t us[RG_POLICY_ARRIVALS], uint32_t n, uint32_t ahead_us, uint32_t stay_us, uint32_t *after_us, uint32_t *wait_us)
{
    uint32_t sorted[RG_POLICY_ARRIVALS];
    uint64_t waited_us;
    if (n < RG_POLICY_ARRIVALS / 2)
        return false;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t k = i;
        for (; k && sorted[k - 1] > us[i]; k--)
            sorted[k] = sorted[k - 1];
        sorted[k] = us[i];
    }
    *after_us = sorted[n / 16] > ahead_us ? sorted[n / 16] - ahead_us : 0;
    for (uint32_t latest = n; latest-- > 0;) {
        uint64_t longer_us = (uint64_t)sorted[latest] - *after_us + 1;
        if (sorted[latest] == RG_POLICY_NEVER || longer_us > 2ull * stay_us)
            continue;
        if (longer_us <= stay_us)
            break;
        if (begun_within(sorted, n, *after_us, longer_us, &waited_us) * 4 >= n * 3 && waited_us * 3 <= 2ull * stay_us * n) {
            *wait_us = (uint32_t)longer_us;
            return true;
        }
    }
    *wait_us = stay_us;
    return begun_within(sorted, n, *after_us, stay_us, &waited_us) * 4 >= n * 3;
}

uint64_t rg_policy_inverse(uint32_t weight)
{
    return ((uint64_t)RG_POLICY_WEIGHT_ONE << 22) / (weight ? weight : RG_POLICY_WEIGHT_ONE);
}
