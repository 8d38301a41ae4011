/**
 * slo-known.ts: what policy `slo` keeps of what it has seen: durations that fade, and of each rung its requests, their delay, and what
 * best-effort work got on it.
 *
 * Pure.
 */

import { type Delay, type Wait, Waits } from "./slo-delay.ts";
import type { Sharer } from "./slo-turns.ts";
import type { Histogram } from "./usage.ts";

/** Old requests count half after this; those of a rung that was not in force for so long say little. */
const HALF_LIFE_S = 20;
const OLD_S = 30;
/** Requests that tell a 99th percentile. */
const TELL_P99 = 200;
/** For how long a rung that failed is left alone the first time. */
export const BACK_OFF_S = 4;

/** Best-effort work is starved where it waits for its least share for this part of the time, of so long at least: what is rarer is a burst of requests. */
const STARVED_PART = 0.1;
const STARVED_S = 1;

/** What happened since the last tick. */
export interface Observation {
  /** For how long that is. */
  elapsed_s: number;
  /** Durations of the requests that ended, of all high clients. */
  requests: Histogram;
  /** The same taken apart, of those clients that wait for their work. */
  waits?: readonly Wait[];
  /**
   * How many of them came, if not as many as ended: a program that loses its processor in the middle of a request is idle for a while, and
   * Rigel's agent takes that for the request's end.
   */
  came?: number;
  /** Launches of best-effort clients. */
  launches: number;
  /** How often they were let go on although high clients made no break: for as long as the starvation bound, or for the least share. */
  starved?: number;
  /** The starvation bound, and the part of the GPU's time that is theirs in any case; what a new segment has, if they are not given. */
  starvation_s?: number;
  min_share?: number;
  /** How many of their processes are at work on one GPU that high clients use, at most; 1, if it is not given. */
  sharers?: number;
  /** Those clients that share a GPU with high ones; not given: they cannot take turns. */
  clients?: readonly Sharer[];
  /** Which best-effort clients are there; another set is another neighbourhood. */
  neighbours: string;
  /** Which high clients are there, and by what they are measured: others have other durations alone. */
  measured: string;
  /** All of them can be taken off the GPU. */
  preemption: boolean;
  /** By stops in their streams, some of them, and not by their channels: there are no time slices then. */
  stops?: boolean;
  /** The part of best-effort clients' GPU time that is in kernels of RG_POLICY_STOP_NS or more, the largest of any; undefined: not known. */
  longPart?: number | undefined;
  /** Calls that took them off the GPU, or let them back, and were held up (RG_POLICY_SLOW_CALL_NS), since the last. */
  slowCalls?: number;
}

/** Durations that fade. */
export class Pool {
  #histogram: Histogram | undefined;

  add(more: Histogram): void {
    this.#histogram = this.#histogram ? this.#histogram.combined(more, 1) : more;
  }
  fade(seconds: number): void {
    this.#histogram = this.#histogram?.scaled(0.5 ** (seconds / HALF_LIFE_S));
  }
  clear(): void {
    this.#histogram = undefined;
  }
  take(other: Pool): void {
    this.#histogram = other.#histogram;
  }
  /** Counts for no more than so many. */
  shrink(most: number): void {
    if (this.count > most) this.#histogram = this.#histogram?.scaled(most / this.count);
  }
  get count(): number {
    return this.#histogram?.total ?? 0;
  }
  quantile_ms(q: number): number {
    return this.#histogram?.quantile_ms(q) ?? Number.NaN;
  }
}

/** What is known of one rung. */
export class Known {
  readonly pool = new Pool();
  readonly waits = new Waits();
  /** By how much its requests are delayed, as of then. */
  delay: { t_s: number; is: Delay | undefined } | undefined;
  /** Best-effort launches in so many seconds, and what requests alone would have left of those. */
  #launches = 0;
  #starved_s = 0;
  #seconds = 0;
  #left_s = 0;
  /** Ticks, and the squares of the launches in each. */
  #ticks = 0;
  #squares = 0;
  /** Not to be tried before; how long it is left alone next time. */
  notBefore_s = 0;
  backOff_s = BACK_OFF_S;
  /** So many trials in a row, of enough requests, have shown neither that it holds nor that it fails. */
  undecided = 0;
  /** Its last trial showed that it misses the target. */
  isOver = false;
  /** It was tried because best-effort work is starved where it gives way earlier, and that went on, or requests missed the target for another reason. */
  tried: "starved" | "too late" | undefined;
  /** When it was last in force. */
  #seen_s = Number.NEGATIVE_INFINITY;

  /** One tick on it, of which requests alone would have left so much; for how long best-effort work was starved before it was let go on. */
  add({ elapsed_s, requests, waits, launches }: Observation, t_s: number, left_s: number, starved_s = 0): void {
    this.#seen_s = t_s;
    this.pool.add(requests);
    this.waits.add(waits ?? [], t_s);
    this.#launches += launches;
    this.#starved_s += starved_s;
    this.#seconds += elapsed_s;
    this.#left_s += left_s;
    this.#ticks++;
    this.#squares += launches ** 2;
  }
  fade(seconds: number): void {
    this.pool.fade(seconds);
    const kept = 0.5 ** (seconds / HALF_LIFE_S);
    this.#launches *= kept;
    this.#starved_s *= kept;
    this.#seconds *= kept;
    this.#left_s *= kept;
    this.#ticks *= kept;
    this.#squares *= kept;
  }
  clear(): void {
    this.pool.clear();
    this.waits.clear();
    this.delay = undefined;
    this.#launches = this.#starved_s = this.#seconds = this.#left_s = this.#ticks = this.#squares = 0;
  }
  /** What it was like then is no longer known: the host may have been slower or faster. */
  isOld(t_s: number): boolean {
    return this.age_s(t_s) > OLD_S;
  }
  /** For how long it has not been seen; infinite: never. */
  age_s(t_s: number): number {
    return t_s - this.#seen_s;
  }
  /** So many requests are known of it that their 99th percentile is. */
  get tellsP99(): boolean {
    return this.pool.count >= TELL_P99;
  }
  get seconds(): number {
    return this.#seconds;
  }
  get launches_per_s(): number {
    return this.#seconds > 0 ? this.#launches / this.#seconds : 0;
  }
  /** High clients make so few breaks that best-effort work has no more on it than what the starvation bound lets it have, time and again. */
  get isStarved(): boolean {
    return this.#starved_s > STARVED_PART * Math.max(STARVED_S, this.#seconds);
  }
  /** The standard deviation of a tick's launches, as a part of all. */
  get burst(): number {
    const variance = this.#squares / this.#ticks - (this.#launches / this.#ticks) ** 2;
    return this.#launches > 0 ? Math.sqrt(Math.max(0, variance)) / this.#launches : 0;
  }
  /** The part of the time that requests alone would have left. */
  get leftPart(): number {
    return this.#seconds > 0 ? this.#left_s / this.#seconds : 1;
  }
  /** What best-effort gets of the time that it could have: a second with more requests is no worse a rung. */
  get launches_per_left_s(): number {
    return this.#left_s > 0 ? this.#launches / this.#left_s : 0;
  }
}
