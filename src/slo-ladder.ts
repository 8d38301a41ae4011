/**
 * slo-ladder.ts: what policy `slo` knows of each rung of its ladder, and by that which of them are worth standing on, trying, or leaving
 * alone.
 *
 * slo.ts moves on it. Pure.
 */

import { ENOUGH, FAR_OVER, mostlyWait, type RequestsAlone, type Target, type Verdict } from "./slo-alone.ts";
import { type Delay, FRESH_S } from "./slo-delay.ts";
import { BACK_OFF_S, Known } from "./slo-known.ts";
import { firstRung, GATE_RUNGS, PREEMPT_RUNGS, type Rung, SHORTEST, STOP_RUNGS } from "./slo-rungs.ts";

/**
 * Longest trial of a rung, shortest stay after one that failed, and how long that rung is left alone: so many times as long as its
 * trials took, doubled each time.
 */
export const TRIAL_S = 1;
export const STAY_S = 2;
const BACK_OFF_TIMES = 8;
/** The same for slices alone that were tried from a suspension and gave no more (crossesOver), and for letting all run where streams stop. */
const BACK_OFF_OVER_S = 30;
const BACK_OFF_MAX_S = 120;
/**
 * Both are left alone for the longest at once where half of the requests take at least so many times what the target allows for more: chance does not have
 * that within it (beside an H200's four kinds of training, ResNet-50's over a connection took 1.16 to 1.19 of alone at 50 us, and each trial of 0.5 s
 * delays 30 of them: twice in the first 35 s that alone is 2% of all, more than a 99th percentile leaves out).
 */
const FAR_TIMES = 2;
/** Where a late suspension gives less than slices alone, one for a part of its `need` is still to be tried. */
const MUCH_LATER = 0.6;
/** Where best-effort work is starved a suspension for this part of the `need` is tried next; where it gives way at once, for this part of a request. */
const LATER = 0.6;
/** The same where requests leave less than this part of the time to best-effort work that gives way at once. */
const CROWDED = 0.5;
/** Since a rung might be tried again, and did not fail: then it is left alone for no longer than at first. */
const FORGIVEN_S = 60;
/**
 * A rung of which trials show neither that it holds nor that it fails is tried more and more rarely, until this is between two of them; but so often
 * that enough requests are known of it that are not too old.
 */
const UNDECIDED_MOST_S = 16;
/** For so long it is known that the first rung is the worse of two that miss the target; then that is looked at again. */
const EVIL_MOST_S = 180;
/** Requests that keep the GPU busy and use more than this part are worth what slices alone give only where that is seen to be more. */
const ROOM = 0.5;
/** Best-effort work differs by so much, over the square root of the requests meanwhile, because requests come at random. */
const LESS = 0.4;
/** And by so many times the standard deviation of a tick's launches: they come step by step, and at the ends a step counts or does not. */
const BURSTS = 2;
/** Requests that use less than this part of what the target allows them are far from it, as so many of them tell. */
const CLEAR = 0.25;
const CLEAR_REQUESTS = 45;
/**
 * For a rung to be stayed on the median of its requests has to use no more than this part of what the target allows, or than on the rung to go back to: a
 * rung at the limit is tried until chance has it within, and what delays all of them is worse than what delays some.
 */
const SURE = 0.8;
/** What processes have that share the GPU in slices alone (DRIVER_SLICE_US in native/preempt.c). */
const DRIVERS_SLICE_ms = 2.048;

export class Ladder {
  readonly #target: Target;
  readonly #alone: RequestsAlone;
  /** From the one that is safest for the high clients. */
  rungs: readonly Rung[] = GATE_RUNGS;
  /** The one in force, and the one to go back to if a trial fails. */
  rung = 0;
  home = 0;
  /**
   * What `need` is a part of (length_ms, when a rung first needed it): that a host becomes slower does not move the rungs. For a target
   * in milliseconds, which has no windows that tell when requests have become others, it follows them.
   */
  request_ms: number | undefined;
  /** Now. */
  t_s = 0;
  /** Best-effort processes on one GPU. */
  sharers = 1;
  #known: (Known | undefined)[] = [];
  /** Of late rungs, in the other of two manners to give way: by suspension, and by stops. */
  #others: (Known | undefined)[] = [];
  #wereBound = false;

  constructor(target: Target, alone: RequestsAlone) {
    this.#target = target;
    this.#alone = alone;
  }

  at(rung: number): Known {
    return (this.#known[rung] ??= new Known());
  }

  get here(): Known {
    return this.at(this.rung);
  }

  /** What was learned on the rungs was learned under other circumstances. */
  forget(): void {
    this.#known = [];
    this.#others = [];
    this.#wereBound = false;
  }

  /** On late rungs best-effort work gives way in the other manner from now on. */
  changeManner(): void {
    for (const [rung, { need }] of this.rungs.entries()) {
      if (need === 0) continue;
      const other = this.#others[rung];
      this.#others[rung] = this.#known[rung];
      this.#known[rung] = other;
    }
  }

  /** More is known of requests alone: what was too late by less may not be. */
  forgetTried(): void {
    for (const known of this.#known) if (known) known.tried = undefined;
  }

  forgetDurations(): void {
    for (const known of [...this.#known, ...this.#others]) known?.pool.clear();
  }

  /* ---- How its requests fare */

  /** What requests take alone, or where none of those are known, on the rung to go back to. Undefined: nothing is known. */
  length_ms(): number | undefined {
    return [this.#alone.length_ms, this.at(this.home).pool.quantile_ms(0.5)].find(Number.isFinite);
  }

  /** Enough is known of requests alone for most of those on a rung to be compared. */
  isComparable(rung: number): boolean {
    return this.#alone.isComparable(this.at(rung), this.delay(rung));
  }

  /** Enough is known for that, or for most of them to be within the target anyway. */
  tells(rung: number): boolean {
    return this.isComparable(rung) || this.#alone.areSurelyWithin(this.at(rung), this.delay(rung));
  }

  /** By how much the requests of a rung are delayed; undefined where that cannot be told. */
  delay(rung: number): Delay | undefined {
    return this.#alone.delay(this.at(rung), this.t_s);
  }

  /** Whether the requests of a rung are within the target. */
  judge(rung: number): Verdict {
    const known = this.at(rung);
    return this.#alone.verdict(known, this.delay(rung), known.isOld(this.t_s) ? undefined : this.#toldBelow(rung));
  }

  /** A target in milliseconds has a 99th percentile to go by: of this rung, or of one below it. */
  get hasP99(): boolean {
    return "p99_over_alone" in this.#target || this.here.tellsP99 || !!this.#toldBelow(this.rung);
  }

  /** The highest rung of the same kind below this one whose 99th percentile is known, not of long ago, and within a target in milliseconds. */
  #toldBelow(rung: number): Known | undefined {
    if (!("p99_ms" in this.#target)) return undefined;
    const { p99_ms } = this.#target;
    return this.#known.findLast(
      (known, at) =>
        known &&
        at < rung &&
        this.rungs[at]?.suspend === this.rungs[rung]?.suspend &&
        known.tellsP99 &&
        known.pool.quantile_ms(0.99) <= p99_ms &&
        !known.isOld(this.t_s),
    );
  }

  /* ---- Where to go */

  /**
   * The highest rung below this one that is known to be within the target; else, of those that hold launches or are no more than where it
   * begins, the highest that is not known to miss it; else the first. There best-effort work gets a tenth less than with a late suspension or longer slices: so from these to
   * a rung of the same kind before any other, if only to one that is not known to miss the target, half way down or with the next slices.
   */
  below(): number {
    const below = Array.from({ length: Math.max(0, this.rung - 1) }, (_, n) => this.rung - 1 - n).filter(
      (rung) => this.t_s >= this.at(rung).notBefore_s,
    );
    const within = below.find((rung) => this.judge(rung) === "within");
    const isUnknown = (rung: number): boolean => this.judge(rung) === "unknown";
    if (this.rungs === GATE_RUNGS) return within ?? below.find(isUnknown) ?? 0;
    const kindOf = (rung: number): "late" | "slices" | undefined => {
      const { need = 0, suspend = true } = this.rungs[rung] ?? {};
      return need > 0 ? "late" : suspend || rung <= SHORTEST ? undefined : "slices";
    };
    const kind = kindOf(this.rung);
    const alike = kind ? below.filter((rung) => kindOf(rung) === kind) : [];
    const isOld = (rung: number): boolean => this.at(rung).isOld(this.t_s);
    const half = kind === "late" ? (this.rung + this.rungs.findIndex(({ need }) => need > 0)) >> 1 : this.rung;
    return (
      alike.find((rung) => !isOld(rung) && this.judge(rung) === "within") ??
      alike.find((rung) => rung <= half && (isOld(rung) || isUnknown(rung))) ??
      within ??
      below.find((rung) => rung <= firstRung(this.rungs) && isUnknown(rung)) ??
      0
    );
  }

  /** The shortest slices were seen to delay requests by too much, and those on the rung to go back to are suspended. */
  get #blocksSlices(): boolean {
    return this.rungs === PREEMPT_RUNGS && this.rungs[this.home]?.suspend === true && this.at(SHORTEST).isOver;
  }

  /**
   * It stood on a suspension, or on shorter slices, and is on slices alone, which give little more, or nothing, and delay requests by more. Where those leave the GPU idle
   * between launches that is so of a late suspension (an H200: 17,400 launches a second beside ResNet-50, 19,700 with suspension); where they keep it
   * busy of one at once, or of shorter slices, unless the target leaves them room for it; of few requests neither is known in one trial. (GPT-2 decoding beside
   * GPT-2's training on H200s: with slices of 50 us alone 1.02 of alone at p50, of 200 us 1.04, of 500 us 1.08, and no more launches a second.)
   */
  get crossesOver(): boolean {
    const [home, here] = [this.rungs[this.home], this.rungs[this.rung]];
    if (this.rungs !== PREEMPT_RUNGS || !home || here?.suspend !== false) return false;
    if (!home.suspend && here.slice_us <= home.slice_us) return false;
    const isKnown = this.delay(this.rung) !== undefined;
    return home.need > 0 || (this.#areBound() && isKnown && !this.#usesLess(ROOM));
  }

  /** The rung's requests are known to be delayed by less than this part of what the target allows. */
  #usesLess(part: number): boolean {
    const delayed = this.delay(this.rung);
    if (!delayed || !("p99_over_alone" in this.#target)) return false;
    return Math.max(delayed.p50, delayed.p90, delayed.p95) < 1 + part * (this.#target.p99_over_alone - 1);
  }

  /** The rung's requests, of which one trial shows few, are not just within the target. */
  get isSure(): boolean {
    const [delayed, home] = [this.delay(this.rung), this.delay(this.home)];
    if (!delayed || !("p99_over_alone" in this.#target)) return true;
    const known = home && home.requests >= ENOUGH ? home.p50 : 1;
    return delayed.p50 <= Math.max(1 + SURE * (this.#target.p99_over_alone - 1), known);
  }

  /** The rung's requests are delayed by several times what the target allows. */
  get #missesByFar(): boolean {
    const delayed = this.delay(this.rung);
    if (!delayed || !("p99_over_alone" in this.#target)) return false;
    return delayed.p50 >= 1 + FAR_TIMES * (this.#target.p99_over_alone - 1);
  }

  /** It stood where streams stop and is where all run. */
  get leavesStops(): boolean {
    return this.rungs === STOP_RUNGS && !this.rungs[this.rung]?.suspend && this.rungs[this.home]?.suspend === true;
  }

  /** Requests keep the GPU busy. Where none are known alone: those that best-effort work made way for at once, when that was last told. */
  #areBound(): boolean {
    if ("p99_over_alone" in this.#target) return this.#alone.areBound;
    const first = firstRung(this.rungs);
    const told = this.#known.find((known, rung) => known && rung <= first && known.waits.count >= ENOUGH);
    if (told) this.#wereBound = mostlyWait(told.waits.waits);
    return this.#wereBound;
  }

  /**
   * The shortest slices, where requests leave the GPU idle between launches and a late suspension may be tried: that gives best-effort work more. Longer
   * slices, where the shortest delay requests already; to let all run under MPS, where it cannot be told well what delays requests, since
   * that alone can make some wait for seconds (GPT-2 decoding beside ResNet-50's training on an H200: p95 twice that alone for each trial of
   * a second), or where requests keep the GPU busy; a late suspension where they do, which lets a long slice run into each, or work go on
   * to a later stop, for next to nothing; and any where suspension at once is too late; and one that comes at once to nearly all requests, if that is so
   * with the next one too.
   */
  #isHopeless(rung: number): boolean {
    if (this.rungs === GATE_RUNGS) return false;
    if (this.rungs === PREEMPT_RUNGS && rung === SHORTEST && !this.#waitsForAll)
      return (
        this.#mayBeBetterLate && (this.at(SHORTEST + 1).undecided > 0 || this.t_s >= this.at(SHORTEST + 1).notBefore_s)
      );
    const { suspend, need = 0, slice_us = 0 } = this.rungs[rung] ?? {};
    if (!suspend && this.#waitsForAll) return true;
    if (!suspend)
      return this.rungs === STOP_RUNGS
        ? "p99_over_alone" in this.#target && (!this.isComparable(this.rung) || this.#isBound())
        : this.#blocksSlices || this.#waitsFor(slice_us);
    if (need > 0 && this.#areBound()) return true;
    if (this.home === 0 && this.judge(0) === "over" && !(need > 0 && this.#mayBeBetterLate)) return true;
    const next_ms = (this.rungs[rung + 1]?.need ?? 0) * (this.request_ms ?? this.length_ms() ?? Number.NaN);
    return rung > firstRung(this.rungs) && next_ms > this.#alone.quantile_ms(0.9);
  }

  /** Requests that keep the GPU busy wait for the end of a slice, the slowest for all of one so much longer than here: too long for the target. */
  #waitsFor(slice_us: number): boolean {
    const delayed = this.delay(this.rung);
    const here = this.rungs[this.rung];
    if (!delayed || !here || here.suspend || !this.#areBound() || !("p99_over_alone" in this.#target)) return false;
    const longer = (slice_us - here.slice_us) / 1000 / (this.#alone.length_ms ?? Number.NaN);
    return delayed.p95 + longer > this.#target.p99_over_alone;
  }

  /**
   * In slices alone several best-effort processes have the driver's, whatever a rung says, and a request waits for one of each: BERT's as one graph, of 3.5 ms,
   * took 8.1 beside ResNet-50's and MobileNetV2's training (an H200, in a trial of 0.3 s). That is more than the target leaves room for.
   */
  get #waitsForAll(): boolean {
    if (this.sharers < 2 || this.rungs !== PREEMPT_RUNGS) return false;
    const wait_ms = this.sharers * DRIVERS_SLICE_ms;
    const length_ms = this.length_ms() ?? Number.NaN;
    const target = this.#target;
    const most_ms = "p99_ms" in target ? target.p99_ms : target.p99_over_alone * length_ms;
    return !(length_ms + wait_ms <= most_ms);
  }

  /**
   * Requests that leave the GPU idle between launches: where best-effort work stops at once it is back in each of these gaps until a stop is
   * reached, for a short slice, and delays the next kernel; where its slices are long until it is suspended there are no such switches. (`rigel simulate
   * --policy slo+slices --slow 1.8 --duration 100 --seed 1`: ResNet-50's beside its training are over the target with stops at first, and where that put off
   * late suspension for a minute, too, the harvest was 0.87 instead of 0.90.)
   */
  get #mayBeBetterLate(): boolean {
    return this.rungs === PREEMPT_RUNGS && this.#alone.hasWaits && !this.#areBound();
  }

  /**
   * Requests that mostly wait for the GPU are slowed by all that runs beside them, and the target leaves no room for that: letting all run is not even
   * tried (on an H200, under MPS with nothing held back: BERT as one CUDA graph beside ResNet-50's training 3.6 times as long, ResNet-50 as one 2.4 times,
   * GPT-2 decoding 2.9 times, where the trial's quarter of a second had requests queue up to 120 ms).
   */
  #isBound(): boolean {
    return "p99_over_alone" in this.#target && this.#target.p99_over_alone <= FAR_OVER && this.#areBound();
  }

  /** The rung's requests are far from the target, and so many that a trial shows as much of another rung. */
  isClear(): boolean {
    if (this.rungs !== GATE_RUNGS && this.rungs[this.rung]?.need === 0) return false;
    const delayed = this.delay(this.rung);
    const { pool, seconds } = this.here;
    if (pool.count * TRIAL_S < ENOUGH * seconds) return false;
    return (delayed?.requests ?? 0) >= CLEAR_REQUESTS && this.#usesLess(CLEAR);
  }

  /** Best-effort gets less here than on the rung to go back to, as seen over some time on both. */
  gainsNothing(): boolean {
    const here = this.here;
    if (here.seconds < STAY_S) return false;
    const rung = this.below();
    const below = this.at(rung);
    return below.seconds >= STAY_S && this.judge(rung) !== "over" && this.getsLess(here, below);
  }

  /** By the time that requests left, too: they come in bursts, and what they take of best-effort is not the same on all rungs. */
  getsLess(here: Known, there: Known): boolean {
    const few = Math.max(1, Math.min(here.pool.count, there.pool.count));
    const least = 1 - LESS / Math.sqrt(few) - BURSTS * Math.max(here.burst, there.burst);
    return (
      here.launches_per_s < there.launches_per_s * least && here.launches_per_left_s < there.launches_per_left_s * least
    );
  }

  /** Of the two ways to preempt, the second, where the loop is now, has the shorter requests. */
  isLesserEvil(): boolean {
    if (this.rung !== SHORTEST || this.rungs !== PREEMPT_RUNGS) return false;
    if (this.at(0).age_s(this.t_s) > EVIL_MOST_S) return false;
    const [first, second] = [this.delay(0), this.delay(SHORTEST)];
    if (first && second && Math.min(first.requests, second.requests) >= ENOUGH)
      return second.p50 < first.p50 && second.p90 < first.p90;
    const [one, other] = [this.at(0).pool, this.at(SHORTEST).pool];
    const isShorter = (q: number): boolean => other.quantile_ms(q) < one.quantile_ms(q);
    return Math.min(one.count, other.count) >= ENOUGH && isShorter(0.5) && isShorter(0.9);
  }

  /**
   * Best-effort work is starved here, and may not be where it gives way later, which is still to be tried. What delays requests here is what it gets all
   * the same, and on stricter rungs it gets no less (docs/measurements.md, "Requests back to back").
   */
  get isBetterLater(): boolean {
    if (!this.here.isStarved) return false;
    const isFine = (rung: number): boolean => !this.at(rung).isOld(this.t_s) && this.judge(rung) === "within";
    if (this.rungs.keys().some((rung) => rung < this.rung && isFine(rung))) return false;
    return this.#later(this.#above()) !== undefined;
  }

  /** Those less strict than the one to go back to that are neither left alone nor hopeless. */
  #above(): number[] {
    return this.rungs
      .keys()
      .filter((rung) => rung > this.home && this.t_s >= this.at(rung).notBefore_s && !this.#isHopeless(rung))
      .toArray();
  }

  /** Best-effort work gives way at once to requests that take most of the time: what little less strict rungs would add is little. */
  get #isCrowded(): boolean {
    return this.rungs !== GATE_RUNGS && this.rungs[this.rung]?.need === 0 && this.here.leftPart < CROWDED;
  }

  /** By so much that best-effort work may run while it is starved on the other one. */
  #isLater(rung: number, than: number): boolean {
    const [{ need = 0 } = {}, { need: other = 0 } = {}] = [this.rungs[rung], this.rungs[than]];
    return need > 0 && need <= LATER * (other || 1);
  }

  /**
   * Of these the late suspension to try where best-effort work is starved, or next to it: by much later than where that was last seen, or half way to where
   * it was seen to be too late.
   */
  #later(above: readonly number[]): number | undefined {
    const tried = (as: NonNullable<Known["tried"]>): number[] =>
      this.rungs.flatMap(({ need }, rung) => {
        const known = this.#known[rung];
        const isLate = need > 0 && rung > this.home;
        return isLate && known && known.tried === as && !known.isOld(this.t_s) ? [rung] : [];
      });
    const low = Math.max(this.rung, ...tried("starved"));
    const high = Math.min(...tried("too late").filter((rung) => rung > low));
    if (!Number.isFinite(high)) return above.find((rung) => this.#isLater(rung, low));
    const first = this.rungs.findIndex(({ need }) => need > 0);
    const middle = (Math.max(low, first - 1) + high) >> 1;
    return middle > low && above.includes(middle) ? middle : undefined;
  }

  /** The next rung up that is not being left alone; where next to nothing is delayed so far, one further up, by so many times. */
  next(times: number): number | undefined {
    const above = this.#above();
    const later = this.here.isStarved || this.#isCrowded ? this.#later(above) : undefined;
    if (later !== undefined) return later;
    // Rungs of late suspension are half as far apart.
    const skips = this.rungs === GATE_RUNGS ? times : 2 * times;
    const further = above[this.isClear() ? skips : 0] ?? above[0];
    // What is known of one way to preempt says nothing of the other.
    const isOther = this.rungs[further ?? 0]?.suspend !== this.rungs[this.rung]?.suspend;
    const rung = isOther ? above[0] : further;
    // With nothing else to be tried, whether the shortest slices delay requests still.
    const mayBe = this.#blocksSlices && !this.#waitsForAll;
    const again = mayBe && this.t_s >= this.at(SHORTEST).notBefore_s ? SHORTEST : undefined;
    return rung ?? again;
  }

  /**
   * The one in force failed (in a trial), and is left alone for a while, and longer the next time; `again`: a trial has shown too little of it, or that it is
   * just within the target, so that what was seen of it counts when it is tried again: soon, and each time later (undecided). `less`: best-effort got less on it.
   */
  leave(isTrial: boolean, again: boolean, less: boolean): void {
    const failed = this.here;
    const over = this.judge(this.rung) === "over";
    failed.isOver = over;
    // Where it is starved, too, that may be why they miss it.
    if (failed.isStarved) failed.tried = "starved";
    else if (over) failed.tried = "too late";
    // Where requests are few it takes several trials to see that a rung fails, and nothing above it is tried until that is known.
    const few = failed.pool.count < ENOUGH;
    // It has held, or could have been tried, for so long: what it failed for before has passed.
    if (this.t_s - failed.notBefore_s > FORGIVEN_S) {
      failed.backOff_s = BACK_OFF_S;
      failed.undecided = Math.min(failed.undecided, 1);
    }
    if (isTrial) failed.backOff_s = Math.max(failed.backOff_s, BACK_OFF_TIMES * failed.seconds);
    const rarely = this.crossesOver || this.leavesStops;
    if (rarely)
      failed.backOff_s = Math.max(failed.backOff_s, over && this.#missesByFar ? BACK_OFF_MAX_S : BACK_OFF_OVER_S);
    if (!again) failed.undecided = 0;
    const per_s = failed.seconds > 0 ? failed.pool.count / failed.seconds : 0;
    const fresh_s = (FRESH_S * per_s) / (2 * ENOUGH) - TRIAL_S;
    const later_s = Math.min(
      STAY_S * 2 ** Math.max(0, failed.undecided - 1),
      UNDECIDED_MOST_S,
      Math.max(STAY_S, fresh_s),
    );
    const again_s = rarely && failed.undecided > 0 ? BACK_OFF_OVER_S : later_s;
    failed.notBefore_s = this.t_s + (again ? again_s : failed.backOff_s);
    // What lies above and is in nothing less gives best-effort still more, and is no better to try while this is not known to hold; but slices
    // say nothing of suspension, nor that of them.
    // Where late suspension gives less than slices alone, still later suspension is not worth a trial at once.
    const { suspend, need = 0, inflight = 0, corun = 0 } = this.rungs[this.rung] ?? {};
    const other = less && this.rungs[this.home]?.suspend !== suspend;
    const unknown = few || again || this.judge(this.rung) === "unknown";
    const { isStarved } = failed;
    for (const [rung, is] of this.rungs.entries()) {
      if (rung <= this.rung || !(over || unknown || other) || is.suspend !== suspend) continue;
      if (over && need === 0 && is.need > 0 && this.#mayBeBetterLate) continue;
      if (isStarved && is.need > 0) continue;
      if (!over && !unknown && is.need < MUCH_LATER * need) continue;
      if (is.inflight < inflight || is.corun < corun) continue;
      this.at(rung).notBefore_s = Math.max(this.at(rung).notBefore_s, failed.notBefore_s);
    }
    if (!again) {
      failed.backOff_s = Math.min(failed.backOff_s * 2, BACK_OFF_MAX_S);
      failed.clear();
    }
  }
}
