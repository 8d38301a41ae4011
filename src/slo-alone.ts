/**
 * slo-alone.ts: what policy `slo` knows of the high clients' requests alone, from windows in which best-effort work is held, and how it
 * judges requests beside best-effort work by that.
 *
 * By what they waited for where programs wait for their work (slo-delay.ts), and by how long they took, in which the host is, too, where
 * that is all that is known. Pure.
 */

import { Alone, type Delay, delay, type Wait, Waits } from "./slo-delay.ts";
import { type Known, type Observation, Pool } from "./slo-known.ts";
import type { Histogram } from "./usage.ts";

/** What the user asks for: the high clients' p99 at most so many times what it is alone, or so many milliseconds. */
export type Target = { p99_over_alone: number } | { p99_ms: number };

/** Without any: the high client's p99 at most 5% over alone. */
export const DEFAULT_TARGET: Target = { p99_over_alone: 1.05 };

export type Verdict = "within" | "over" | "unknown";

/** Requests that a verdict needs. */
export const ENOUGH = 20;
/** What tells of few requests by how much they are longer than others, and by how many standard deviations it may be off. */
const QUARTILES = [0.25, 0.5, 0.75] as const;
const CHANCE = 0.6;
/** Requests alone that are enough to try something. */
export const KNOWN = 60;
/** The same where it is known what part of them is waiting. Then durations are only looked at for what is out of all proportion. */
const KNOWN_WAITS = 30;
/** The part of the requests on a rung for which it has to be known, or more is learned. */
const COMPARABLE = 0.7;
const GROSS = 2;
const GROSS_QUANTILE = 0.9;
/** A window of so many requests, or two samples, whose medians differ by this factor show a program that warms up. */
const DOUBT_REQUESTS = 12;
export const STEADY = 1.35;
/** What is compared with alone, and by how many standard deviations each side may be off: more where durations are far apart. */
const QUANTILES = [
  [0.5, 0.6],
  [0.75, 0.8],
  [0.9, 1.2],
  [0.95, 1.5],
  [0.99, 2],
] as const;
/** Requests alone fade so many times more slowly than those beside others: a window says when they have changed. */
const KEEPS = 15;
/** Requests that wait for the GPU for more than this part of their time are slowed by all that runs beside them. */
const BOUND = 0.5;
/** So few requests show that they take so many times as long as alone, or that most take longer than a target in milliseconds. */
const FEW = 5;
export const FAR_OVER = 1.5;
/** What requests leave of the time is at least this part of it. */
const LEAST_LEFT = 0.1;

export class RequestsAlone {
  readonly #target: Target;
  readonly #durations = new Pool();
  readonly #waits = new Waits();
  /** What the waits say, until there are more. */
  #says: Alone | undefined;
  /** Of the window that is under way, or was last. */
  readonly #window = { durations: new Pool(), waits: new Waits() };
  /** What the waits said before it. */
  #saidBefore: Alone | undefined;
  /** Durations may be of another moment of the host. */
  isDoubted = false;

  constructor(target: Target) {
    this.#target = target;
  }

  /* ---- What is known of them */

  /** Of a window. */
  add(requests: Histogram, waits: readonly Wait[], t_s: number): void {
    for (const { durations, waits: all } of [{ durations: this.#durations, waits: this.#waits }, this.#window]) {
      durations.add(requests);
      all.add(waits, t_s);
    }
    this.#says = undefined;
  }

  fade(seconds: number): void {
    this.#durations.fade(seconds / KEEPS);
  }

  beginWindow(): void {
    this.#window.durations.clear();
    this.#window.waits.clear();
    this.#saidBefore = this.#say();
  }

  /** Still says more than nothing; windows to come soon outweigh it. */
  shrink(): void {
    this.#durations.shrink(KNOWN);
    this.#waits.keep(KNOWN);
    this.#says = undefined;
  }

  clear(): void {
    this.#durations.clear();
    this.#waits.clear();
    this.#says = undefined;
  }

  /** The window's durations are what they are now. */
  takeDurations(): void {
    this.isDoubted = false;
    this.#durations.take(this.#window.durations);
  }

  /** So are the window's requests in all. */
  takeWindow(t_s: number): void {
    this.takeDurations();
    this.#waits.clear();
    this.#waits.add(this.#window.waits.waits, t_s);
    this.#says = undefined;
  }

  get count(): number {
    return this.#durations.count;
  }

  quantile_ms(q: number): number {
    return this.#durations.quantile_ms(q);
  }

  /** Of how many it is known what part of them is waiting. */
  get waits(): number {
    return this.#waits.count;
  }

  /** That is so of enough of them to compare others with. */
  get hasWaits(): boolean {
    return this.#waits.count >= KNOWN_WAITS;
  }

  /**
   * What they take. Half of their time is in longer ones: what a program waits for between its requests, a copy or a number, is no request.
   * Undefined: that is not known.
   */
  get length_ms(): number | undefined {
    const waits = this.#waits.count >= ENOUGH ? this.#waits.waits : [];
    return [longMedian(waits), this.#durations.quantile_ms(0.5)].find(Number.isFinite);
  }

  /** The same of those in the last window; undefined of too few. */
  get windowLength_ms(): number | undefined {
    const { durations, waits } = this.#window;
    const isWaits = this.#waits.count >= ENOUGH;
    if ((isWaits ? waits.count : durations.count) < DOUBT_REQUESTS) return undefined;
    return isWaits ? longMedian(waits.waits) : durations.quantile_ms(0.5);
  }

  /** The window has requests enough to say that they have changed. */
  get windowTells(): boolean {
    return this.#window.durations.count >= DOUBT_REQUESTS;
  }

  /**
   * Whether the last window's requests are others than those before, as of a program that still warmed up: "durations" where only
   * those say so, in which the host is; "others" where what was expected of requests with as much work says so.
   */
  get windowDiffers(): "durations" | "others" | undefined {
    const { durations, waits } = this.#window;
    const pairs = waits.waits.flatMap((wait) => this.#saidBefore?.pair(wait) ?? []);
    const ratios = pairs.map(({ took_ms, alone_ms }) => took_ms / alone_ms).toSorted((a, b) => a - b);
    // Of those with other work nothing was expected: with them no others are compared, but their durations are.
    const isTold = ratios.length >= DOUBT_REQUESTS;
    const ratio = isTold
      ? (ratios[ratios.length >> 1] ?? 1)
      : durations.quantile_ms(0.5) / this.#durations.quantile_ms(0.5);
    if (!(ratio > STEADY || ratio < 1 / STEADY)) return undefined;
    return isTold ? "others" : "durations";
  }

  /** The last window has waits of enough requests to go on with those of it alone. */
  get windowIsEnough(): boolean {
    return Math.min(this.#window.durations.count, this.#window.waits.count) >= ENOUGH;
  }

  /** They keep the GPU busy. */
  get areBound(): boolean {
    return mostlyWait(this.#waits.waits);
  }

  /**
   * What requests would have left of a tick, had they been alone: what is longer because of best-effort work is no load. Where it is not known
   * when they begin and end, all of it.
   */
  left_s({ elapsed_s, waits = [] }: Observation): number {
    const busy_ms = waits.map((wait) => this.#say().pair(wait)?.alone_ms ?? wait.worked_ms + wait.waited_ms);
    const busy_s = busy_ms.reduce((sum, ms) => sum + ms / 1000, 0);
    // Those of several clients may be at the same time.
    return Math.max(LEAST_LEFT * elapsed_s, elapsed_s - busy_s);
  }

  #say(): Alone {
    return (this.#says ??= new Alone(this.#waits.waits));
  }

  /* ---- How others compare with them */

  /** So many are most of the requests of a rung. */
  #isOfMost({ waits: { count } }: Known, compared: number | undefined): boolean {
    return count < ENOUGH || (compared ?? 0) >= COMPARABLE * count;
  }

  /** By how much the requests of a rung are delayed, as of then; undefined where that cannot be told. */
  delay(known: Known, t_s: number): Delay | undefined {
    if (!("p99_over_alone" in this.#target)) return undefined;
    if (known.delay?.t_s !== t_s) {
      known.waits.forget(t_s);
      const enough = Math.min(known.waits.count, this.#waits.count) >= ENOUGH;
      known.delay = {
        t_s,
        is: enough ? delay(known.waits.waits, this.#say(), this.#target.p99_over_alone, ENOUGH) : undefined,
      };
    }
    return known.delay.is;
  }

  /** Enough is known of requests alone for most of those on a rung, of which so many are compared, to be compared well. */
  isComparable(known: Known, delayed: Delay | undefined): boolean {
    return this.hasWaits && this.#isOfMost(known, delayed?.wellKnown);
  }

  /** Most of those on a rung are within the target, though of some it is known only how little they may have taken alone (Alone.pair). */
  areSurelyWithin(known: Known, delayed: Delay | undefined): boolean {
    return delayed?.verdict === "within" && this.#isOfMost(known, delayed.requests);
  }

  /**
   * Whether the requests of a rung are within the target. A 99th percentile of thirty requests says nothing, so lower quantiles
   * are compared as well: what slows all requests shows in the median soon, what slows one in ten in the 90th percentile, and
   * what is rarer when there are enough of them. "Over" is said when the quantiles differ by more than chance allows: each pool's
   * own order statistics say how far its quantile may be off (z times the standard deviation of a binomial rank).
   *
   * Of a target in milliseconds there is nothing to compare with but a rung whose 99th percentile is known and within it, `other`: that of fewer
   * requests is taken to be longer by as much as a quartile is (the middle of three: with two kinds of requests a median may be of either). (`rigel simulate
   * jobs.json --policy slo+slices --duration 60 --seed 41`, and 42 and 43, ResNet-50's and BERT's requests beside ResNet-50's and GPT-2's training: with
   * `p99_ms` 1.1 and 1.3 times p99 alone it came to 1.10 and 1.28, with a harvest of 0.947; to 1.22 and 1.38, with 0.952, where the few requests of a
   * trial were to tell, and the next one was begun at once.)
   */
  verdict({ pool, tellsP99 }: Known, delayed: Delay | undefined, other?: Known): Verdict {
    if ("p99_ms" in this.#target) {
      const { p99_ms } = this.#target;
      // Chance does not have most of them beyond what one in a hundred may take.
      const mostAreLong = pool.count >= FEW && pool.quantile_ms(0.5) > p99_ms;
      if (pool.count < ENOUGH) return mostAreLong ? "over" : "unknown";
      if (pool.quantile_ms(tellsP99 ? 0.99 : 1 - 2 / pool.count) > p99_ms) return "over";
      if (tellsP99 || !other) return "within";
      const [, longer = 1] = QUARTILES.map(
        (quartile) => pool.quantile_ms(off(quartile, -CHANCE, pool.count)) / other.pool.quantile_ms(quartile),
      ).toSorted((a, b) => a - b);
      return longer * other.pool.quantile_ms(0.99) > p99_ms ? "over" : "within";
    }
    if (delayed) return !this.isDoubted && this.#isLonger(pool, GROSS) ? "over" : delayed.verdict;
    if (Math.min(pool.count, this.count) < ENOUGH) return "unknown";
    return this.#isLonger(pool, 1) ? "over" : "within";
  }

  /** They take out of all proportion to what they wait for. */
  isGrosslyLonger({ pool }: Known): boolean {
    return this.#isLonger(pool, GROSS);
  }

  /** Nothing is faster beside others than alone. Of durations that may be the host. */
  isTooShort({ pool }: Known, delayed: Delay | undefined): boolean {
    if (delayed) return delayed.requests >= ENOUGH && delayed.p50 < 1 / STEADY;
    return Math.min(pool.count, this.count) >= KNOWN && pool.quantile_ms(0.5) * GROSS < this.quantile_ms(0.5);
  }

  /** A few requests are enough to see that they are delayed by far more than the target allows. */
  isFarOver({ waits }: Known): boolean {
    if (!("p99_over_alone" in this.#target) || this.#waits.count < ENOUGH) return false;
    const delayed = delay(waits.waits, this.#say(), this.#target.p99_over_alone, FEW);
    return delayed.requests >= FEW && delayed.p50 > Math.max(FAR_OVER, this.#target.p99_over_alone);
  }

  /** The ratio that is furthest off: of durations, where no more is known of them, the largest of what there are requests enough for. */
  worst({ pool }: Known, delayed: Delay | undefined): Delay["worst"] {
    if (delayed && delayed.requests >= ENOUGH) return delayed.worst;
    const few = Math.min(pool.count, this.count);
    return QUANTILES.filter(([q]) => isEnough(few, q))
      .map(([q]) => ({ percentile: Math.round(100 * q), ratio: pool.quantile_ms(q) / this.quantile_ms(q) }))
      .reduce((a, b) => (b.ratio > a.ratio ? b : a), { percentile: 99, ratio: Number.NEGATIVE_INFINITY });
  }

  /** They take longer than alone, by so many times what the target allows; rare ones count where nothing else is known of them. */
  #isLonger(pool: Pool, times: number): boolean {
    const few = Math.min(pool.count, this.count);
    if ("p99_ms" in this.#target || few < ENOUGH) return false;
    const limit = this.#target.p99_over_alone * times;
    return QUANTILES.some(
      ([q, z]) =>
        isEnough(few, q) &&
        (times === 1 || q <= GROSS_QUANTILE) &&
        pool.quantile_ms(off(q, -z, pool.count)) > limit * this.quantile_ms(off(q, z, this.count)),
    );
  }
}

/** More than half of the time of these is in those that mostly wait for the GPU: what a program reads back by itself is a short one. */
export function mostlyWait(waits: readonly Wait[]): boolean {
  const bound = waits.filter(({ worked_ms, waited_ms }) => waited_ms > BOUND * (worked_ms + waited_ms));
  return 2 * time_ms(bound) > time_ms(waits);
}

function time_ms(waits: readonly Wait[]): number {
  return waits.reduce((sum, { worked_ms, waited_ms }) => sum + worked_ms + waited_ms, 0);
}

/** The duration of the one in which half of the time of all is over, from the shortest on; NaN: there are none. */
export function longMedian(waits: readonly Wait[]): number {
  const lengths = waits.map(({ worked_ms, waited_ms }) => worked_ms + waited_ms).toSorted((a, b) => a - b);
  let left = lengths.reduce((sum, ms) => sum + ms, 0) / 2;
  return lengths.find((ms) => (left -= ms) <= 0) ?? Number.NaN;
}

/** So many requests say something of a quantile. */
function isEnough(few: number, q: number): boolean {
  return few * (1 - q) >= 3;
}

/** A quantile's rank, moved by so many standard deviations of the rank that it has in a sample of so many. */
function off(q: number, times: number, count: number): number {
  return Math.min(1, Math.max(0, q + times * Math.sqrt((q * (1 - q)) / count)));
}
