/*
 * signals.c: who has sent the signals that the control process (Bun) handles: a terminal, which sends to all of its foreground, or a
 * process, which may have sent to this one alone.
 *
 * Handlers of Bun's run later, and are not told. These are put before what it has installed, and pass on to that.
 */
#include "client.h"
#include "rigel.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>

enum {
    SIGNALS = 32, /* as many as a terminal or `kill` has names for */
    KEPT = 16     /* of each that may wait for its handler */
};

static struct sigaction beneath[SIGNALS];
/* As rigel_signal_came gives them; 0: taken. */
static _Atomic uint64_t came[SIGNALS][KEPT];
static _Atomic uint32_t next[SIGNALS];
static uint32_t taken[SIGNALS];

static void on_signal(int signal, siginfo_t *info, void *context)
{
    int kept = errno;
    uint32_t at = atomic_fetch_add(&next[signal], 1) % KEPT;
    atomic_store(&came[signal][at], rigel_now_ns() << 1 | (info->si_code == SI_KERNEL));
    const struct sigaction *to = &beneath[signal];
    if (to->sa_flags & SA_SIGINFO)
        to->sa_sigaction(signal, info, context);
    else
        to->sa_handler(signal);
    errno = kept;
}

int rigel_signal_watch(int signal)
{
    struct sigaction act;
    if (signal <= 0 || signal >= SIGNALS)
        return -EINVAL;
    if (sigaction(signal, NULL, &act) != 0)
        return -errno;
    if (act.sa_flags & SA_SIGINFO && act.sa_sigaction == on_signal)
        return 0;
    if (!(act.sa_flags & SA_SIGINFO) && (act.sa_handler == SIG_DFL || act.sa_handler == SIG_IGN))
        return -EINVAL;
    beneath[signal] = act;
    act.sa_sigaction = on_signal;
    act.sa_flags |= SA_SIGINFO;
    return sigaction(signal, &act, NULL) == 0 ? 0 : -errno;
}

uint64_t rigel_signal_came(int signal)
{
    if (signal <= 0 || signal >= SIGNALS)
        return 0;
    uint64_t one = atomic_exchange(&came[signal][taken[signal] % KEPT], 0);
    taken[signal] += one != 0;
    return one;
}
