/*
 * steer.c: what is asked of the clients of this process while they run: another class, another weight, a pause, another policy.
 *
 * Asked is in the client's account, by name, so that it holds for every process of the client; the policy is in the settings. The agent
 * looks ten times a second and does the rest here, off the launch path, which only reads the mode of its client.
 *
 * A trial of policy slo's control loop (src/slo.ts) has an end, too, if that process is killed meanwhile.
 *
 * A pause, also while it is another client's turn, has an end in any case: the time that was said, or being resumed; else the segment's
 * shutdown, the end of this process's part in Rigel (its exit handlers, rigel_shutdown), or that the segment's file is gone, so that nobody
 * could resume it any more. All but the last of these are seen without the agent as well (rg_member_is_paused).
 *
 * Not changed: CUDA_MPS_CLIENT_PRIORITY, which the driver reads once, and the priority of streams that only their own thread can
 * name (per-thread default streams).
 */
#include "client.h"

#include <limits.h>
#include <stdio.h>
#include <sys/stat.h>

static struct {
    char path[PATH_MAX];
    struct stat file;
    uint64_t looked_ns;
    bool gone;
} segment;

void rg_steer_attach(const char *path)
{
    snprintf(segment.path, sizeof segment.path, "%s", path);
    segment.gone = stat(segment.path, &segment.file) != 0;
}

/* Nobody can ask anything of us any more. Looked at once a second. */
static bool unreachable(uint64_t now_ns)
{
    if (!segment.gone && now_ns - segment.looked_ns >= 1000000000u) {
        struct stat there;
        segment.looked_ns = now_ns;
        segment.gone = stat(segment.path, &there) != 0 || there.st_ino != segment.file.st_ino ||
                       there.st_dev != segment.file.st_dev;
    }
    return segment.gone;
}

static bool paused(const rg_account *account, uint64_t now_ns)
{
    return rg_account_until(account) > now_ns && !atomic_load(&rg.segment->settings.shutdown) &&
           !unreachable(now_ns);
}

/* What the control loop of policy slo was just trying is not what stays where it has died: back to what there was before it. */
static void end_trial(uint64_t now_ns)
{
    const uint64_t GONE_NS = 3000000000u; /* it says twice a second that it runs */
    rg_control *c = &rg.segment->control;
    rg_settings *s = &rg.segment->settings;
    if (!atomic_load(&c->trying) || rg_since(atomic_load(&c->beat_ns), now_ns) < GONE_NS || !atomic_exchange(&c->trying, 0) ||
        !atomic_load(&c->kept))
        return;
#define PUT_BACK(name) atomic_store(&s->name, atomic_load(&c->kept_##name))
    PUT_BACK(suspend);
    PUT_BACK(defer_us);
    PUT_BACK(defer_ppm);
    PUT_BACK(need_us);
    PUT_BACK(slice_us);
    PUT_BACK(inflight);
    PUT_BACK(corun);
    PUT_BACK(stop_us);
    PUT_BACK(share_period_us);
#undef PUT_BACK
}

void rg_steer_beat(uint64_t now_ns)
{
    end_trial(now_ns);
    uint32_t policy = atomic_load(&rg.segment->settings.policy);
    bool priorities = policy != RG_POLICY_NONE && policy != RG_POLICY_FAIR;
    bool began = priorities && !atomic_load(&rg.set_priorities);
    atomic_store(&rg.set_priorities, priorities);
    for (uint32_t i = 0; i < atomic_load(&rg.member_count); i++) {
        rg_member *m = &rg.members[i];
        if (atomic_load(&m->mode) == RG_MODE_BARE || !m->account)
            continue;
        uint32_t class = atomic_load(&m->account->wanted_class), weight = atomic_load(&m->account->wanted_weight);
        if (class != RG_CLASS_HIGH && class != RG_CLASS_BEST_EFFORT)
            class = atomic_load(&m->slot->class);
        rg_member_become(m, class, paused(m->account, now_ns));
        if (weight && weight != atomic_load(&m->slot->weight)) {
            atomic_store(&m->slot->weight, weight);
            atomic_store(&m->inverse_weight, rg_policy_inverse(weight));
        }
        m->restamp |= began;
        if (m->restamp)
            m->restamp = !rg_streams_restamp(m);
    }
}
