/**
 * slo.ts: the control loop of policy `slo`: from what the high clients' requests take, it chooses how much best-effort work may
 * do beside them.
 *
 * Pure: `Controller` sees one observation per tick and answers with settings; slo-loop.ts feeds it from the segment. What it
 * knows:
 *   alone     durations of requests in windows in which best-effort work is held: 0.8 s at first, 1.2 s at a change of load, and
 *             1% of the time besides; 2% while few are known, and where that is too little to compare with, 6% until 2.4 s more
 *             are spent (slo-alone.ts, which also says what is within the target)
 *   rungs     a ladder of settings (slo-rungs.ts), from the one that is safest for the high clients to the one that gives best-effort
 *             most, and what was seen on each (slo-ladder.ts, which says where to go from one)
 *   turns     whether best-effort clients have the GPU one after the other (slo-turns.ts): where several share it, and give way at once, and
 *             requests miss the target all the same, or that is seen to give best-effort work more
 *   delayed   by how much the requests on a rung take longer than they would have alone (slo-delay.ts), where programs wait for
 *             their work; else their durations are compared with those alone
 * It stands on a rung whose requests are within the target, tries the next one for a second at most, goes on from there as long as
 * best-effort gets more and the target holds, with some room for the median, and steps back as soon as it does not. It begins with what `priority` does, or
 * stricter, so that a trial is all that can make things worse than `priority`, and a second or two on the way down from a rung that
 * no longer holds the target.
 */

import { ENOUGH, KNOWN, longMedian, RequestsAlone, STEADY, type Target, type Verdict } from "./slo-alone.ts";
import { FRESH_S, Waits } from "./slo-delay.ts";
import { type Observation, Pool } from "./slo-known.ts";
import { Ladder, STAY_S, TRIAL_S } from "./slo-ladder.ts";
import {
  firstRung,
  GATE_RUNGS,
  PREEMPT_RUNGS,
  type Rung,
  type Settings,
  SHORT_SLICE_US,
  SHORTEST,
  STOP_RUNGS,
} from "./slo-rungs.ts";
import { LeastShare } from "./slo-share.ts";
import { mostOnOne, Turns, TurnsGain } from "./slo-turns.ts";
import type { Histogram } from "./usage.ts";

export const TICK_S = 0.1;
/** A hold lasts so long unless it is renewed. */
export const HOLD_S = 2 * TICK_S;
/**
 * For how long best-effort may be held to learn what requests take alone: the first window; a part of the time until FIRST_HELD_S are
 * spent; a part of the time for good; and some more for each change of load, which count that often at most.
 */
const FIRST_WINDOW_S = 0.8;
const FIRST_SHARE = 0.06;
const FIRST_HELD_S = 2.4;
const HELD_SHARE = 0.02;
/** The same where what is known is enough to compare with. */
const COMPARABLE_SHARE = 0.01;
/** What that comes to and is not used is kept for so many windows: after a night without requests it would be a quarter of the time for twenty minutes. */
const UNUSED_WINDOWS = 2;
const RELEARN_HELD_S = 1.2;
const RELEARN_MOST = 10;
const WINDOW_S = 0.6;
/** A window is so many times as long as all but a tenth of the requests, but no longer than this. */
const WINDOW_REQUESTS = 2;
const WINDOW_MOST_S = 5;
/** From one window to the next. A program that still warms up in the first is known by the second. */
const BETWEEN_WINDOWS_S = 2;
/** Requests in the first window that are enough to end it. */
const FIRST_REQUESTS = 40;
/**
 * A program that warms up has requests of all lengths, tiny ones too. It is believed to be through when two samples in a row, of a
 * second or of so many requests, have medians within this factor; no longer than that is waited for.
 */
const STEADY_REQUESTS = 8;
const WARM_UP_MOST_S = 15;
/**
 * For so long what takes best-effort clients off the GPU may have gone. It is not there while another policy is in force, and their agents say that it is once
 * they look again: beside a client with a graph of 89 ms a step 0.2 to 0.3 s after `slo` was back, and all began anew from the first rung (H100s and H200s).
 */
const GONE_MOST_S = 1;
/** By this factor requests alone differ from those that the rungs are parts of: more than a host whose processors are shared explains. */
const OTHER_REQUESTS = 2.5;
/** Windows whose durations differ, so soon after, show that it was not: all is learned anew. */
const DOUBT_S = 20;
/** A window or a trial in which nobody looked for so long is over. */
const STALLED_MOST_S = 4;
/**
 * Where all may run, a few requests end a trial in which they take far longer than alone, and for so long there is no other, unless what is
 * known is forgotten as load or neighbours change (GPT-2 decoding beside ResNet-50's training on an H200: twice as long, of 20 requests in
 * the 2 s of a window). At first what was stopped runs all at once.
 */
const FAR_TRIAL_S = 0.2;
const BACK_OFF_FAR_S = 600;
/** Rungs that a trial may leave out, of those that hold launches, or twice as many that begin suspension later. */
const SKIPS_MOST = 2;
/** How long a trial takes at least where requests use next to nothing of what the target allows them (Ladder.isClear). */
const CLEAR_TRIAL_S = 0.6;
/**
 * Until so many are known more is learned. With 100 in place of 40 requests are as long, and best-effort work's harvest is 0.007 less (the
 * mean of 36 runs of `rigel simulate --policy slo+slices --duration 100`: ResNet-50's and BERT's requests beside ResNet-50's and
 * GPT-2's training, `--slow` 1, 1.8 and 2.5, three seeds each).
 */
const WELL_KNOWN = 40;
/** So many requests ago the host was as it is now. */
const SAME_HOST = 60;
/** Where requests are few, that many may never be known: after so long fewer have to do. */
const PATIENCE_S = 60;
/** For so long it stays where it is until a 99th percentile is known, for a target in milliseconds. */
const PATIENCE_P99_S = 10;
/** More requests alone than so many need not be known. */
const ENOUGH_ALONE = 240;
/** Nothing is to be learned from high clients that have had no request for so long. */
const HEARD_S = 10;
/** Requests that tell how fast the host is at the moment. */
const LATELY = 20;
/** By so much they have to be longer than they need the GPU to be no more those for whom that is at once. */
const LONGER = 1.15;
/** A change of the request rate by this factor is another load. */
const LOAD_CHANGE = 1.4;
/** So many requests that should have come meanwhile, and none did: there are none now. */
const SILENCE = 5;
/**
 * Where best-effort kernels are short it gives way late by stops, where this part of their time or more is in long ones by suspension. They are short
 * again with less than the first.
 */
const LONG_PART = [0.1, 0.15] as const;
/**
 * The driver holds up what suspends and resumes, as it does while programs start on some GPU of the host, where two such calls were slow (RG_POLICY_SLOW_CALL_NS) within
 * the first; for the second after that long kernels have stops as well, and only those that last for 1.5 ms and more are suspended besides. (One call in 60 is slow
 * then, else one in thousands: native/bench/suspend.cu.)
 */
const SLOW_CALLS_S = 30;
const HELD_UP_S = 120;

export interface Action {
  /** Undefined: leave the settings as they are. */
  settings: Settings | undefined;
  /** They are only being tried. */
  isTrial?: boolean;
  /** Hold best-effort work until the next tick. */
  hold: boolean;
  /** Best-effort clients whose turn it is not, and for how many ticks they wait at least, unless that is said again. */
  waits?: ReadonlyMap<string, number> | undefined;
}

/** One line of the record. */
export interface Second {
  t_s: number;
  /** For how long it stands: more where the loop was stopped meanwhile, and less after that. */
  over_s: number;
  rung: number;
  held_s: number;
  requests: number;
  p50_ms: number | null;
  p99_ms: number | null;
  best_effort_launches_per_s: number;
  /** As it ended best-effort clients had the GPU one after the other. */
  turns: boolean;
}

/** Why it left a rung. The last six are other circumstances, under which nothing of what was learned on rungs holds. */
export type Why =
  | "to try it"
  | "over the target"
  | "gives no more"
  | "not known to hold"
  | "stalled"
  | "ended"
  | "suspension held up, or no more"
  | "other best-effort clients"
  | "best-effort clients take turns"
  | "other ways to preempt"
  | "other high clients"
  | "another load"
  | "other requests";

/**
 * One change of the rung; `from` and `to` count from the safest of one of the three ladders (slo-rungs.ts). `worst`: how the requests of the rung that it
 * left fared, over alone, where that is known.
 */
export interface Move {
  t_s: number;
  ladder: "slices" | "stops" | "gate";
  /** "other ways to preempt": a rung of another ladder. */
  from: number;
  to: number;
  why: Why;
  worst: { percentile: number; ratio: number } | null;
}

const MOVES_KEPT = 1000;

/** What was found by some moment. */
interface Summary {
  target: Target;
  alone: { requests: number; p50_ms: number | null; p99_ms: number | null };
  now: { requests: number; p50_ms: number | null; p99_ms: number | null };
  /** How long they take over how long they would take alone, where that can be told from the requests themselves. */
  over_alone: { requests: number; p50: number; p99: number } | null;
  rung: number;
  settings: Settings | undefined;
  /** Best-effort clients have the GPU one after the other. */
  turns: boolean;
  changes: number;
  held_s: number;
  /** Whether they are within the target. */
  verdict: Verdict;
  unreachable: boolean;
  /** What the target would have to be: over alone, of the percentile that is worst off, or milliseconds. */
  reachable: number | null;
  percentile: number;
}

type State = "waiting" | "first window" | "window" | "run" | "trial";

export class Controller {
  readonly #target: Target;
  #ticks = 0;
  #state: State = "waiting";
  #since_s = 0;
  /** Since when that is so without a break: a hold that nobody renewed was over for a while. */
  #unbroken_s = 0;
  /** For how long nobody has looked since. */
  #stalled_s = 0;
  #held_s = 0;
  /** What the part of the time that may be held came to, less what was not used for long; and as of when. */
  #earned_s = 0;
  #earnedAt_s = 0;
  readonly #ladder: Ladder;
  #settings: Settings | undefined;
  /** How long to stay before the next trial. */
  #stay_s = STAY_S;
  /** Rungs that the next trial leaves out where next to nothing is delayed. */
  #skips = 0;
  readonly #alone: RequestsAlone;
  /** The last requests of all, and whether best-effort work is suspended as such requests begin. */
  readonly #lately = new Waits();
  #isAtOnce = false;
  #window_s = Number.NEGATIVE_INFINITY;
  #neighbours = "";
  #measured = "";
  /** Requests per second, slowly and quickly averaged. */
  #slow_per_s = 0;
  #fast_per_s = 0;
  /** What they are averages of. */
  #rated_s = 0;
  readonly #share = new LeastShare();
  /** Whose turn it is; whether best-effort clients take turns, or do not but could; and for whom it is not the turn, for how many ticks. */
  readonly #turns = new Turns();
  #takesTurns = false;
  /** What they get by turns; and whether those are only being tried. */
  readonly #gain = new TurnsGain();
  #triesTurns = false;
  #mayTakeTurns = false;
  #waits: ReadonlyMap<string, number> = new Map();
  /** The tick of the last change. */
  #settled = 0;
  /** When best-effort clients could be taken off the GPU last. */
  #preempted_s = Number.NEGATIVE_INFINITY;
  /** While waiting: requests of the sample that is under way, the median of the last one, and when the first request came. */
  readonly #sample = new Pool();
  #sampled_ms = Number.NaN;
  #sample_s = 0;
  #first_s = Number.NaN;
  /** When the last one ended. */
  #heard_s = Number.NEGATIVE_INFINITY;
  /** When there were none last, as it stood on a rung. */
  #silent_s = Number.NEGATIVE_INFINITY;
  /** Much of best-effort work is in long kernels, or that is not known. */
  #hasLong = true;
  /** When a call that suspends or resumes was slow last, and until when the driver is taken to hold them up. */
  #slow_s = Number.NEGATIVE_INFINITY;
  #heldUp_s = Number.NEGATIVE_INFINITY;
  /** What gives way late is suspended; else it has stops. */
  #suspends = true;
  /** Nothing is known alone of the requests that there are now, and the rungs are parts of what others took. */
  #areOthers = false;
  /** When it began to learn, and how often what requests take alone had to be learned anew since. */
  #began_s = 0;
  #relearned = 0;
  #changes = 0;
  #unreachable_s = 0;
  /** As of when the high clients, or those beside them, last became others, if anything was known then. */
  #found: Summary | undefined;
  #second: { requests: Histogram | undefined; launches: number; held_s: number; ticks: number; elapsed_s: number } = {
    requests: undefined,
    launches: 0,
    held_s: 0,
    ticks: 0,
    elapsed_s: 0,
  };
  readonly seconds: Second[] = [];
  /** The latest of them. */
  readonly moves: Move[] = [];

  constructor(target: Target) {
    this.#target = target;
    this.#alone = new RequestsAlone(target);
    this.#ladder = new Ladder(target, this.#alone);
    this.#reset("other ways to preempt");
  }

  /** The settings for the next tick, from what happened in the last one. */
  step(seen: Observation): Action {
    const held = this.#holds;
    if (seen.elapsed_s > HOLD_S) {
      this.#stall(seen, held);
      return this.#action();
    }
    this.#pass(1);
    if (held) this.#held_s += TICK_S;
    if (seen.requests.total > 0) this.#heard_s = this.t_s;
    this.#record(seen, held ? TICK_S : 0);
    this.#pace(seen);
    this.#notice(seen);
    this.#noticeKernels(seen);
    this.#giveTurns(seen, held);
    this.#noteGain(seen);
    const starved_s = this.#spread(seen);
    // Requests that ended just after a change began before it.
    if (this.#ticks - this.#settled > 1) {
      if (held) {
        // What is longer began before best-effort work was held.
        const alone_ms = 1000 * (this.t_s - this.#unbroken_s - TICK_S);
        const waits = (seen.waits ?? []).filter(({ worked_ms, waited_ms }) => worked_ms + waited_ms <= alone_ms);
        this.#alone.add(seen.requests.upTo(alone_ms * 1e6), waits, this.t_s);
      } else if (this.#state !== "waiting") this.#ladder.here.add(seen, this.t_s, this.#alone.left_s(seen), starved_s);
    }
    this.#alone.fade(TICK_S);
    this.#decide(seen);
    return this.#action();
  }

  #pass(ticks: number): void {
    this.#ticks += ticks;
    this.#ladder.t_s = this.t_s;
  }

  #action(): Action {
    return { settings: this.#inForce, isTrial: this.#state === "trial", hold: this.#holds, waits: this.#waits };
  }

  /**
   * What the user configured stays until there is something to decide on. In time slices long kernels are suspended where best-effort work gives
   * way late, unless the driver holds that up, and others stop (slo-rungs.ts). A long slice is for requests that best-effort work may run into: where
   * the host is so fast at the moment, or the GPU so busy with them, that it is suspended as they begin, a short one lets the GPU switch to them while
   * that takes its time; what stops is soon gone.
   */
  get #inForce(): Settings | undefined {
    if (this.#state === "waiting" || !this.#settings) return undefined;
    if (this.#ladder.rungs !== PREEMPT_RUNGS) return this.#settings;
    const settings = { ...this.#settings, share_period_us: Math.round(1e6 * this.#share.period_s) };
    if (this.#ladder.rung < SHORTEST || !this.#suspends) return settings;
    const { suspend, need_us, slice_us } = settings;
    const isShort = suspend && need_us > 0 && this.#isAtOnce;
    return { ...settings, stop_us: 0, slice_us: isShort ? Math.min(slice_us, SHORT_SLICE_US) : slice_us };
  }

  /** How long best-effort kernels are, and whether the driver holds up what suspends them, by which it suspends or stops those that give way late. */
  #noticeKernels({ longPart, slowCalls = 0 }: Observation): void {
    if (slowCalls > 1 || (slowCalls > 0 && this.t_s - this.#slow_s <= SLOW_CALLS_S))
      this.#heldUp_s = this.t_s + HELD_UP_S;
    if (slowCalls > 0) this.#slow_s = this.t_s;
    this.#hasLong = longPart === undefined || longPart > LONG_PART[this.#hasLong ? 0 : 1];
    // Whose streams have no stops tells of no kernels.
    const suspends = longPart === undefined || (this.#hasLong && this.t_s >= this.#heldUp_s);
    if (suspends === this.#suspends) return;
    this.#suspends = suspends;
    if (this.#ladder.rungs !== PREEMPT_RUNGS) return;
    if (this.#state === "trial") this.#retreat("suspension held up, or no more", true);
    this.#ladder.changeManner();
    this.unsettle();
  }

  /** Whether requests are no longer than they need the GPU; clearly so, for a slice is set by a call on the driver in each client. */
  #pace({ waits = [] }: Observation): void {
    this.#lately.add(waits, this.t_s);
    this.#lately.keep(LATELY);
    // A client that has none now tells nothing of the others.
    if (waits.length > 0) this.#lately.forget(this.t_s);
    const ratio = (1000 * longMedian(this.#lately.waits)) / (this.#settings?.need_us ?? 0);
    this.#isAtOnce = ratio < (this.#isAtOnce ? LONGER : 1);
  }

  /**
   * Nobody asked for longer than a hold lasts. What happened meanwhile counts on the rung that it stands on; amid a window or a trial it is recorded and no
   * more, as it is neither known to be alone nor beside best-effort work. Those go on, unless that is how it goes all the time.
   */
  #stall(seen: Observation, held: boolean): void {
    const ticks = Math.max(1, Math.round(seen.elapsed_s / TICK_S));
    const spent_s = this.t_s - this.#since_s;
    // As it was all the time, not as of a trial or a window that ends now.
    const stands = this.#state === "run";
    this.#pass(ticks);
    const held_s = held ? Math.min(HOLD_S, ticks * TICK_S) : 0;
    this.#held_s += held_s;
    if (seen.requests.total > 0) this.#heard_s = this.t_s;
    this.#record(seen, held_s, ticks);
    this.#alone.fade(ticks * TICK_S);
    this.#stalled_s += ticks * TICK_S;
    if (this.#state === "run") this.#ladder.here.fade(ticks * TICK_S);
    else if (this.#state === "trial" && this.#stalled_s > STALLED_MOST_S) this.#retreat("stalled", true);
    else if (held && this.#stalled_s > STALLED_MOST_S) this.#endWindow();
    else this.#since_s = round(this.t_s - spent_s);
    this.#unbroken_s = this.t_s;
    // On a rung that it stands on nothing has changed meanwhile.
    const isKnown = stands && this.#ticks - ticks > this.#settled;
    const starved_s = this.#spread(seen);
    if (isKnown) this.#ladder.here.add(seen, this.t_s, this.#alone.left_s(seen), starved_s);
    else this.#settled = this.#ticks - Number(stands);
    this.#notice(seen);
    this.#noticeKernels(seen);
    this.#giveTurns(seen, held, ticks);
    if (this.#triesTurns && this.#stalled_s > STALLED_MOST_S) this.#giveTurnsUp();
    const over = isKnown && this.#ladder.rung > 0 && this.#ladder.judge(this.#ladder.rung) === "over";
    if (over && !this.#ladder.isLesserEvil()) this.#stepBack("over the target");
  }

  #spread(seen: Observation): number {
    return this.#share.step({ ...seen, sharers: this.#ladder.sharers }, this.t_s, this.#ladder.rungs === PREEMPT_RUNGS);
  }

  /** Since the last time so many ticks have passed, of which none counts where best-effort work was held. */
  #giveTurns({ clients = [] }: Observation, held: boolean, ticks = 1): void {
    this.#waits = this.#takesTurns ? this.#turns.step(clients, held ? 0 : ticks) : new Map();
  }

  /** What best-effort clients get where they give way at once. */
  #noteGain(seen: Observation): void {
    if (this.#state !== "run" || this.#ladder.rung >= SHORTEST || this.#ticks - this.#settled <= 1) return;
    const left_s = this.#alone.left_s(seen);
    this.#gain.add(seen.clients ?? [], { seconds: seen.elapsed_s, left_s, inTurns: this.#takesTurns });
  }

  /** What happened before the next step was under other settings: it is left out, and so is what ends just after. */
  unsettle(): void {
    this.#settled = this.#ticks + 1;
    this.#unbroken_s = this.t_s;
  }

  /** What is to stay where nobody goes on with this: not what is just being tried. */
  leave(): Settings | undefined {
    if (this.#state === "trial") this.#retreat("ended", true);
    return this.#inForce;
  }

  /**
   * What is to be told at the end. Where the high clients, or those beside them, have gone since it is what was found before, until something
   * is known of the others.
   */
  found(): Summary {
    const now = this.summary();
    return isTold(now) || !this.#found ? now : { ...this.#found, changes: now.changes, held_s: now.held_s };
  }

  /** How well the target is met, and by which settings. Of a rung that is being tried too little is known: of the one before it. */
  summary(): Summary {
    const rung = this.#state === "trial" ? this.#ladder.home : this.#ladder.rung;
    const known = this.#ladder.at(rung);
    const { pool } = known;
    const delayed = this.#ladder.delay(rung);
    const worst = this.#alone.worst(known, delayed);
    const told = (from: Pool | RequestsAlone): { requests: number; p50_ms: number | null; p99_ms: number | null } => ({
      requests: Math.round(from.count),
      p50_ms: finite(from.quantile_ms(0.5)),
      p99_ms: finite(from.quantile_ms(0.99)),
    });
    return {
      target: this.#target,
      alone: told(this.#alone),
      now: told(pool),
      over_alone:
        delayed && delayed.requests >= ENOUGH
          ? { requests: delayed.requests, p50: round(delayed.p50), p99: round(delayed.p99) }
          : null,
      rung: this.#ladder.rung,
      settings: this.#inForce,
      turns: this.#takesTurns,
      changes: this.#changes,
      held_s: round(this.#held_s),
      verdict: this.#ladder.judge(rung),
      unreachable: this.unreachable,
      reachable: finite("p99_ms" in this.#target ? pool.quantile_ms(0.99) : worst.ratio),
      percentile: "p99_ms" in this.#target ? 99 : worst.percentile,
    };
  }

  get #holds(): boolean {
    return this.#state === "first window" || this.#state === "window";
  }

  /** Its time. Rounded, so that a window of two ticks is over after two. */
  get t_s(): number {
    return Math.round(this.#ticks * TICK_S * 1000) / 1000;
  }

  /** The lowest rung has missed the target for ten seconds. */
  get unreachable(): boolean {
    return this.#unreachable_s >= 10;
  }

  /** Requests should have come and did not: there are none now, and nothing can be learned. */
  get #isSilent(): boolean {
    return (this.t_s - this.#heard_s) * this.#slow_per_s > SILENCE;
  }

  /** Forgets what was learned on the rungs: it was learned under other circumstances. */
  #reset(why: Why): void {
    const rung = firstRung(this.#ladder.rungs);
    if (this.#triesTurns) this.#endTurns();
    this.#gain.clear(why === "other best-effort clients" || why === "other ways to preempt");
    this.#noteMove(rung, why);
    this.#ladder.forget();
    this.#ladder.request_ms = undefined;
    this.#ladder.home = rung;
    this.#skips = 1;
    this.#stay_s = TRIAL_S;
    this.#go(rung);
    this.#state = this.#state === "waiting" ? "waiting" : "run";
    this.#since_s = this.t_s;
    this.#unreachable_s = 0;
  }

  /** Before it leaves the rung. */
  #noteMove(to: number, why: Why): void {
    const { rung, rungs } = this.#ladder;
    if (this.#state === "waiting" || (rung === to && why !== "best-effort clients take turns")) return;
    const worst = this.#alone.worst(this.#ladder.here, this.#ladder.delay(rung));
    const isKnown = "p99_over_alone" in this.#target && Number.isFinite(worst.ratio);
    this.moves.push({
      t_s: this.t_s,
      ladder: rungs === GATE_RUNGS ? "gate" : rungs === STOP_RUNGS ? "stops" : "slices",
      from: rung,
      to,
      why,
      worst: isKnown ? { percentile: worst.percentile, ratio: round(worst.ratio) } : null,
    });
    if (this.moves.length > MOVES_KEPT) this.moves.shift();
  }

  #go(rung: number): void {
    if (rung !== this.#ladder.rung && this.#state !== "waiting") this.#changes++;
    // Durations alone, without what requests waited for, would speak against it where the host was slower then, or for it.
    const tells = this.#alone.hasWaits || "p99_ms" in this.#target;
    if (tells && this.#ladder.at(rung).isOld(this.t_s)) this.#ladder.at(rung).pool.clear();
    this.#ladder.rung = rung;
    this.#settled = this.#ticks;
    const to = this.#ladder.rungs[rung];
    if (!to) return;
    if (to.need > 0 && (this.#ladder.request_ms === undefined || "p99_ms" in this.#target))
      this.#ladder.request_ms = this.#ladder.length_ms() ?? this.#ladder.request_ms;
    const request_us = (this.#ladder.request_ms ?? 0) * 1000;
    this.#settings = {
      suspend: Number(to.suspend),
      // Where requests are not alike the clock has to tell.
      defer_us: to.need > 0 ? Math.round(Math.max(0, 1 - to.need) * request_us) : 0,
      defer_ppm: 0,
      need_us: Math.round(to.need * request_us),
      slice_us: to.slice_us,
      inflight: to.inflight,
      corun: to.corun,
      stop_us: to.stop_us,
      // Where there are slices it is what #inForce says.
      share_period_us: 0,
    };
  }

  #enter(state: State): void {
    this.#state = state;
    this.#since_s = this.#unbroken_s = this.t_s;
    this.#stalled_s = 0;
    this.#settled = this.#ticks;
  }

  /** Another load, other neighbours, other means: what was learned no longer holds. */
  #notice(seen: Observation): void {
    if (seen.preemption) this.#preempted_s = this.t_s;
    const isGone = !seen.preemption && this.#ladder.rungs !== GATE_RUNGS && seen.neighbours !== "";
    if (isGone && seen.neighbours === this.#neighbours && this.t_s - this.#preempted_s < GONE_MOST_S)
      return this.unsettle();
    const ladder = !seen.preemption ? GATE_RUNGS : seen.stops ? STOP_RUNGS : PREEMPT_RUNGS;
    const isOther = ladder !== this.#ladder.rungs || seen.neighbours !== this.#neighbours;
    if (isOther || seen.measured !== this.#measured) {
      const before = this.summary();
      if (isTold(before)) this.#found = before;
    }
    const { sharers = 1, clients = [] } = seen;
    const mayTakeTurns = mostOnOne(clients.map(({ devices }) => devices)) > 1 && ladder === PREEMPT_RUNGS;
    if (!mayTakeTurns || seen.measured !== this.#measured) this.#endTurns();
    this.#ladder.sharers = this.#takesTurns ? Math.max(...clients.map(({ processes }) => processes)) : sharers;
    this.#mayTakeTurns = mayTakeTurns && !this.#takesTurns;
    if (isOther) {
      this.#ladder.rungs = ladder;
      const why = seen.neighbours === this.#neighbours ? "other ways to preempt" : "other best-effort clients";
      this.#neighbours = seen.neighbours;
      this.#reset(why);
    }
    if (seen.measured !== this.#measured) {
      const first = this.#measured === "";
      this.#measured = seen.measured;
      if (!first) this.#forgetAlone();
    }
    const rate = (seen.came ?? seen.requests.total) / seen.elapsed_s;
    if (this.#state === "waiting") return;
    // A closed loop has another rate when its requests take longer: a trial's or a hold's own effect is no change of load.
    if (this.#state !== "run" || this.#triesTurns || this.#ticks - this.#settled <= 1 / TICK_S) return;
    // Silence is no change of load, nor is its end.
    if (this.#isSilent) return;
    // Averages over all there is, until that is more than they go back.
    this.#rated_s += TICK_S;
    this.#fast_per_s += (rate - this.#fast_per_s) * (TICK_S / Math.min(this.#rated_s, 1));
    this.#slow_per_s += (rate - this.#slow_per_s) * (TICK_S / Math.min(this.#rated_s, 8));
    const [low, high] = [Math.min(this.#fast_per_s, this.#slow_per_s), Math.max(this.#fast_per_s, this.#slow_per_s)];
    // Poisson arrivals vary by the square root of their number: that is no change of load.
    const noise = 4 * Math.sqrt(Math.max(high, 1));
    if (this.#rated_s > 2 && high > low * LOAD_CHANGE && high - low > noise) {
      this.#slow_per_s = this.#fast_per_s;
      this.#reset("another load");
      this.#alone.shrink();
      this.#relearned++;
    }
  }

  #endTurns(): void {
    this.#takesTurns = false;
    this.#triesTurns = false;
    this.#gain.endTrial();
    this.#turns.end();
  }

  /** For good, as long as there are several. */
  #takeTurns(): void {
    this.#takesTurns = true;
    this.#triesTurns = false;
    this.#reset("best-effort clients take turns");
  }

  /** They gave no more, or that could not be seen. */
  #giveTurnsUp(): void {
    this.#endTurns();
    this.#gain.endTrial(this.t_s);
    this.unsettle();
  }

  /** Where several best-effort clients give way at once turns are tried though requests do not need them. Whether the tick is a trial's. */
  #tryTurns({ clients = [] }: Observation): boolean {
    if (this.#triesTurns) {
      if (!this.#gain.isTried(clients.length)) return true;
      if (this.#gain.isMore) {
        this.#takeTurns();
      } else {
        this.#giveTurnsUp();
      }
      return true;
    }
    const may = this.#mayTakeTurns && this.#ladder.rung < SHORTEST && this.#gain.isToTry(this.t_s);
    if (!may || this.#ladder.judge(this.#ladder.rung) !== "within") return false;
    this.#takesTurns = true;
    this.#triesTurns = true;
    this.#stalled_s = 0;
    this.unsettle();
    return true;
  }

  #decide(seen: Observation): void {
    this.#doubt();
    this.#earn();
    const spent_s = round(this.t_s - this.#since_s);
    const relative = "p99_over_alone" in this.#target;
    switch (this.#state) {
      case "waiting":
        // Nobody is held for those that have gone.
        if (!this.#steady(seen) || this.#measured === "") return;
        this.#began_s = this.#earnedAt_s = this.t_s;
        this.#earned_s = 0;
        this.#enter(relative ? "first window" : "run");
        return;
      case "first window":
        if (this.#alone.count >= FIRST_REQUESTS || spent_s >= this.#windowLength_s(FIRST_WINDOW_S)) this.#endWindow();
        return;
      case "window":
        if (spent_s >= this.#windowLength_s(WINDOW_S)) this.#endWindow();
        return;
      case "trial":
        return this.#tryOut(spent_s);
      case "run":
        return this.#stand(spent_s, seen);
    }
  }

  /**
   * Requests that take less than what is known of them alone: that was a program that still warmed up, as it had just started or started anew.
   * Requests that wait no longer than alone and yet take twice as long: the host is slower now than it was in the last window, or
   * best-effort work slows what programs do before they wait. A window tells which; until then durations say nothing.
   */
  #doubt(): void {
    const known = this.#ladder.here;
    const delayed = this.#ladder.delay(this.#ladder.rung);
    if (!this.#holds && this.#alone.isTooShort(known, delayed)) return this.#relearn();
    const since = (this.t_s - this.#window_s) * this.#slow_per_s;
    if (!delayed || delayed.verdict === "over" || since <= SAME_HOST) return;
    this.#alone.isDoubted ||= this.#alone.isGrosslyLonger(known);
  }

  /** A tick of a trial: whether the rung is kept, or left for the one before. */
  #tryOut(spent_s: number): void {
    if (this.#ladder.leavesStops && spent_s >= FAR_TRIAL_S && this.#alone.isFarOver(this.#ladder.here)) {
      this.#retreat("over the target");
      this.#ladder.at(this.#ladder.rungs.length - 1).notBefore_s = this.t_s + BACK_OFF_FAR_S;
      return;
    }
    const verdict = this.#ladder.judge(this.#ladder.rung);
    // Where neither is within the target, the better of the two is kept.
    const lesser = verdict === "over" && this.#ladder.home === 0 && this.#ladder.isLesserEvil();
    if (verdict === "over" && !lesser) return this.#retreat("over the target");
    const isBetter = verdict === "within" && this.#ladder.judge(this.#ladder.home) === "over";
    const [here, home] = [this.#ladder.here, this.#ladder.at(this.#ladder.home)];
    // Slices alone that cross over have to be seen to give more: where they do not, whether they delay requests need not be known.
    const more =
      isBetter || (this.#ladder.crossesOver ? this.#ladder.getsLess(home, here) : !this.#ladder.getsLess(here, home));
    const clear = this.#ladder.isClear();
    if (spent_s < (verdict === "within" && more && clear ? CLEAR_TRIAL_S : TRIAL_S)) return;
    const holds = verdict === "within" && (this.#ladder.isSure || isBetter);
    if (lesser || (holds && more)) {
      this.#ladder.home = this.#ladder.rung;
      this.#ladder.here.isOver = false;
      this.#ladder.here.undecided = 0;
      this.#skips = clear ? Math.min(this.#skips + 1, SKIPS_MOST) : 0;
      this.#stay_s = 0;
      this.#enter("run");
    } else {
      const less = !more && (verdict === "within" || this.#ladder.crossesOver);
      const goesOn = "p99_ms" in this.#target || this.#ladder.tells(this.#ladder.rung);
      if (here.pool.count >= ENOUGH) here.undecided++;
      this.#retreat(less ? "gives no more" : "not known to hold", !holds && !less && goesOn, less);
    }
  }

  /** A tick on a rung that was chosen: whether it still holds, whether more has to be learned, and whether another is to be tried. */
  #stand(spent_s: number, seen: Observation): void {
    this.#ladder.here.fade(TICK_S);
    // Whoever comes back is not to find a trial.
    if (this.#isSilent) {
      this.#silent_s = this.t_s;
      if (this.#triesTurns && this.#gain.isTried(seen.clients?.length ?? 0)) this.#giveTurnsUp();
      return;
    }
    const over = this.#ladder.judge(this.#ladder.rung) === "over";
    if (over && this.#triesTurns) {
      // Whether that is because of them shows without.
      this.#ladder.here.clear();
      return this.#giveTurnsUp();
    }
    if (over && this.#mayTakeTurns && this.#ladder.rung < SHORTEST) return this.#takeTurns();
    if (this.#tryTurns(seen)) return;
    const stays = over && this.#ladder.isLesserEvil();
    const later = this.#ladder.isBetterLater;
    const falls = over && !stays && !later;
    if (this.#ladder.rung > 0 && (falls || this.#ladder.gainsNothing()))
      return this.#stepBack(falls ? "over the target" : "gives no more");
    // On another rung, until later ones have been tried, that says nothing.
    const isMissed = over && ("p99_ms" in this.#target || this.#neighbours !== "");
    if (!isMissed) this.#unreachable_s = 0;
    else if (this.#ladder.rung === 0 || stays) this.#unreachable_s += TICK_S;
    // Programs that wait are compared by that or not at all: what is beyond what is known of them has to be learned.
    const lacks = this.#alone.hasWaits && !this.#ladder.isComparable(this.#ladder.rung);
    const known = this.#knowsAlone;
    // Those that miss it even there may have become longer by themselves.
    const atBottom = over && (this.#ladder.rung === 0 || later);
    const few = lacks || atBottom || this.#alone.isDoubted || this.#alone.count < ENOUGH_ALONE;
    if (few && this.#mayHold(known)) {
      this.#alone.beginWindow();
      this.#stay_s = Math.max(0, this.#stay_s - spent_s);
      return this.#enter("window");
    }
    // Where suspension misses the target, slices may not.
    const other = over && this.#ladder.rung === 0 && this.#ladder.rungs === PREEMPT_RUNGS;
    const works = this.#ladder.here.seconds >= TICK_S && this.#ladder.here.launches_per_s > 0;
    const asked_s = Math.min(spent_s, this.t_s - this.#silent_s);
    if (!this.#ladder.hasP99 && asked_s < PATIENCE_P99_S) return;
    // Those that are within it by what little they may take alone need not be known better for that.
    const tells = !lacks || this.#ladder.tells(this.#ladder.rung);
    if ((!over || other || later) && known && tells && this.#trialsTell && spent_s >= this.#stay_s && works)
      this.#tryNext();
  }

  /**
   * Trials, of a second in three, show enough requests of a rung for a verdict before those are too old: else they would go on for ever. Where
   * durations are compared there is no such age.
   */
  get #trialsTell(): boolean {
    if (!this.#alone.hasWaits) return true;
    return this.#slow_per_s * FRESH_S * TRIAL_S >= 2 * ENOUGH * (TRIAL_S + STAY_S);
  }

  /** So much is known of requests alone that something may be tried. */
  get #knowsAlone(): boolean {
    if ("p99_ms" in this.#target || this.#alone.hasWaits) return true;
    return this.#alone.count >= (this.t_s - this.#began_s < PATIENCE_S ? KNOWN : ENOUGH);
  }

  get #heldShare(): number {
    const well = this.#ladder.isComparable(this.#ladder.rung) && this.#alone.waits >= WELL_KNOWN;
    return well ? COMPARABLE_SHARE : HELD_SHARE;
  }

  /** A part of the time that has passed may be held for. */
  #earn(): void {
    const earned_s = round(this.#earned_s + this.#heldShare * (this.t_s - this.#earnedAt_s));
    this.#earned_s = Math.min(earned_s, this.#held_s + UNUSED_WINDOWS * this.#windowLength_s(WINDOW_S));
    this.#earnedAt_s = this.t_s;
  }

  /** Best-effort may be held for a window now, and somebody is there to learn from. */
  #mayHold(known: boolean): boolean {
    if ("p99_ms" in this.#target || this.#measured === "" || this.t_s - this.#heard_s > HEARD_S) return false;
    const learning_s = this.t_s - this.#began_s;
    const enough = this.#ladder.isComparable(this.#ladder.rung);
    // Of the time until requests were well known no more is left then than their part of it; a change of load, or a start that was none, may cost more.
    const allowed_s =
      FIRST_WINDOW_S +
      Math.min(this.#earned_s, this.#heldShare * learning_s) +
      (enough ? 0 : Math.min(FIRST_HELD_S, FIRST_SHARE * learning_s)) +
      RELEARN_HELD_S * Math.min(this.#relearned, RELEARN_MOST);
    const since_s = this.t_s - this.#window_s;
    const length_s = this.#windowLength_s(WINDOW_S);
    return since_s >= (known ? BETWEEN_WINDOWS_S : 0) && round(this.#held_s + length_s) <= allowed_s;
  }

  /** A window has to last for longer than requests, or none of them is alone from its beginning to its end. */
  #windowLength_s(least_s: number): number {
    const most_ms = this.#ladder.here.pool.quantile_ms(0.9);
    const long_ms = Number.isFinite(most_ms) ? most_ms : this.#sampled_ms || 0;
    return Math.min(WINDOW_MOST_S, Math.max(least_s, HOLD_S + (WINDOW_REQUESTS * long_ms) / 1000));
  }

  /** Whether the high clients are through with warming up, so that their requests can be compared. */
  #steady({ requests }: Observation): boolean {
    if (requests.total === 0 && Number.isNaN(this.#first_s)) return false;
    if (Number.isNaN(this.#first_s)) this.#first_s = this.#sample_s = this.t_s;
    this.#sample.add(requests);
    if (this.t_s - this.#first_s >= WARM_UP_MOST_S) return true;
    if (this.t_s - this.#sample_s < 1 || this.#sample.count < STEADY_REQUESTS) return false;
    const median_ms = this.#sample.quantile_ms(0.5);
    const ratio = median_ms / this.#sampled_ms;
    this.#sampled_ms = median_ms;
    this.#sample_s = this.t_s;
    this.#sample.clear();
    return ratio < STEADY && ratio > 1 / STEADY;
  }

  /**
   * Windows that differ much show a program that was still warming up: those before are forgotten. Durations, in which the host is, too, say
   * that soon after the start alone.
   */
  #endWindow(): void {
    const isEarly = this.t_s - this.#began_s < DOUBT_S && this.#alone.windowTells;
    const differs = this.#alone.windowDiffers;
    const isOther = differs === "others" || (differs === "durations" && isEarly);
    if (isOther && (differs === "others" || !this.#alone.windowIsEnough)) {
      this.#alone.takeWindow(this.t_s);
      this.#forgetRungs();
    } else if (isOther || (this.#alone.isDoubted && this.#alone.windowTells)) {
      this.#forgetDurations();
    }
    this.#ladder.forgetTried();
    this.#window_s = this.t_s;
    this.#anchor(isOther || this.#areOthers ? STEADY : OTHER_REQUESTS);
    this.#areOthers = false;
    this.#enter("run");
  }

  /**
   * Requests are others than those that were known alone. It stays where it is, as the GPU needs as long for them as it did a moment ago, until a window
   * has told what they take.
   */
  #relearn(): void {
    if (this.#state === "trial") this.#retreat("other requests", true);
    this.#alone.clear();
    this.#forgetRungs();
    this.#areOthers = true;
  }

  /** What was seen on rungs was compared with other requests. */
  #forgetRungs(): void {
    this.#ladder.forget();
    this.#skips = 1;
    this.#relearned++;
  }

  /** Of other high clients nothing is known. */
  #forgetAlone(): void {
    this.#reset("other high clients");
    this.#alone.clear();
    this.#lately.clear();
    this.#share.clear();
    this.#relearned++;
  }

  /** The window's are what requests take now, alone; of those beside best-effort work it is not known any more whether that was long. */
  #forgetDurations(): void {
    this.#alone.takeDurations();
    this.#ladder.forgetDurations();
  }

  /**
   * Where the window's requests are longer or shorter by this factor, the rungs stand for parts of what they take now. It stays on the one
   * whose settings are closest, and nothing is known of any.
   */
  #anchor(factor: number): void {
    const now_ms = this.#alone.windowLength_ms;
    if (now_ms === undefined) return;
    const ratio = now_ms / (this.#ladder.request_ms ?? Number.NaN);
    if (!(ratio > factor || ratio < 1 / factor)) return;
    const here = this.#ladder.rungs[this.#ladder.rung];
    const apart = ({ need }: Rung): number => Math.abs(Math.log((need * ratio) / (here?.need ?? 0)));
    const alike = this.#ladder.rungs.filter(
      ({ suspend, corun, need }) => suspend && need > 0 && here && here.need > 0 && corun === here.corun,
    );
    const [closest] = alike.toSorted((a, b) => apart(a) - apart(b));
    const to = closest ? this.#ladder.rungs.indexOf(closest) : this.#ladder.rung;
    this.#noteMove(to, "other requests");
    this.#ladder.forget();
    this.#ladder.request_ms = now_ms;
    this.#go(to);
    this.#ladder.home = to;
  }

  /** Tries the next rung up that is not being left alone; where next to nothing is delayed so far, one further up. */
  #tryNext(): void {
    const next = this.#ladder.next(this.#skips);
    if (next === undefined) return;
    this.#noteMove(next, "to try it");
    this.#go(next);
    this.#enter("trial");
  }

  /** Off the rung that it stands on, which does not hold any more. */
  #stepBack(why: Why): void {
    this.#ladder.home = this.#ladder.below();
    this.#retreat(why);
  }

  /**
   * Back to where the target held, or may hold. A rung that failed is left alone for a while, and longer the next time; one of which a trial
   * showed too little is tried `again`, and what was seen of it counts. `less`: best-effort got less on it.
   */
  #retreat(why: Why, again = false, less = false): void {
    this.#noteMove(this.#ladder.home, why);
    this.#ladder.leave(this.#state === "trial", again, less);
    this.#skips = 0;
    this.#stay_s = again ? 0 : STAY_S;
    this.#go(this.#ladder.home);
    this.#enter("run");
  }

  /** Of the `ticks` that have just gone. */
  #record(seen: Observation, held_s: number, ticks = 1): void {
    const second = this.#second;
    second.requests = second.requests ? second.requests.combined(seen.requests, 1) : seen.requests;
    second.launches += seen.launches;
    second.held_s += held_s;
    second.ticks += ticks;
    second.elapsed_s += seen.elapsed_s;
    const each = Math.round(1 / TICK_S);
    if (Math.floor(this.#ticks / each) === Math.floor((this.#ticks - ticks) / each)) return;
    const over_s = round(second.ticks * TICK_S);
    if (this.seconds.length >= 3600) this.seconds.shift();
    this.seconds.push({
      t_s: Math.floor(this.#ticks / each),
      over_s,
      rung: this.#ladder.rung,
      held_s: round(second.held_s),
      requests: second.requests.total,
      p50_ms: finite(second.requests.quantile_ms(0.5)),
      p99_ms: finite(second.requests.quantile_ms(0.99)),
      // A tick that came late by less than a hold lasts counts as one, but as much more was launched in it.
      best_effort_launches_per_s: second.launches / second.elapsed_s,
      turns: this.#takesTurns,
    });
    this.#second = { requests: undefined, launches: 0, held_s: 0, ticks: 0, elapsed_s: 0 };
  }
}

/** Enough is known of requests to say how they fare. */
export function isTold({ verdict, over_alone }: Pick<Summary, "verdict" | "over_alone">): boolean {
  return verdict !== "unknown" || over_alone !== null;
}

function round(value: number): number {
  return Math.round(value * 1e6) / 1e6;
}

function finite(value: number | null): number | null {
  return value === null || !Number.isFinite(value) ? null : round(value);
}
