/**
 * slo-delay.ts: by how much other work has delayed requests, told from the requests themselves.
 *
 * What a request takes varies with the host far more than with what runs beside it: on one H200 host the median of the same
 * requests alone went from 3.4 to 6.9 ms within a minute. A request is therefore taken apart: the time in which its program worked
 * (until it waited for all it had launched) and the time for which it then waited. Other work on the GPU shows in the second. What
 * it would have taken alone is known from requests alone that had about as much work before their wait, of the same kind where enough of that
 * are known, and so each request gives both, how long it took and how long it would have taken. Of the two the same quantiles are compared: the host is in
 * both.
 *
 * Users count from when a request came. Where requests come at random and one waits for the one before, what delays that one delays
 * both: of 6 ms at 75 a second, each delayed by a tenth, one in a hundred takes a fifth longer. So both times are those from a request's
 * coming to its end, as far as its beginning at once behind another shows that it waited.
 *
 * Pure.
 */

import { generator } from "./random.ts";

/** A busy period of a client (waited_ring in native/segment.h). */
export interface Wait {
  /** Whose, and on which device: what is compared with each other. */
  readonly client: number;
  /** What it is known by among the client's requests: a batch of another size is of another (requests.c); undefined: by nothing. */
  readonly kind?: number | undefined;
  /** When it began, by the machine's clock; undefined: not known, and nothing is said of requests that waited for the one before. */
  readonly began_ms?: number;
  readonly worked_ms: number;
  readonly waited_ms: number;
  /** What had the GPU there for it (native/segment.h); undefined: not known. */
  readonly stayed?: Stayed | undefined;
}

/** Nothing; kernels in front of it; that it was announced, or seen coming; the request before it (native/stay.c). */
export type Stayed = "not" | "ahead" | "announced" | "behind";

/** How long one took, from when it came, and what that would have been alone. */
interface Pair {
  readonly took_ms: number;
  readonly alone_ms: number;
  /** Of how many busy periods. */
  readonly parts: number;
}

/** Quantiles that are compared. */
const QUANTILES = [0.5, 0.75, 0.9, 0.95, 0.99] as const;
/** Requests above a quantile without which it says nothing. */
const ABOVE = 2;
/** Requests alone whose median wait is expected of one like them. */
const NEAREST = 11;
/** So few do, if they are alike: durations next to each other by so much, in parts of the shortest. */
const FEW = 3;
const ALIKE = 0.05;
/** For how much less or more work than any of them had, in parts of what that one took, something is said. */
const BEYOND = 0.03;
/** So many requests alone, next to each other by work, have one slope. */
const PART = 8;
/** Requests that are kept, the latest, and for how long beside other work. */
const MOST = 240;
export const FRESH_S = 30;
/**
 * Times the requests are drawn anew from themselves (the bootstrap: Efron 1979), and the part of them that has to agree that a quantile
 * is over; all of them, where requests are fewer than this. There are five quantiles and a verdict every tick, and hosts that are fast for a
 * second: requests of an H200 that were delayed by 2 to 6% were found over 5% within 16 s in 62 of 100 cases by 9 of 10 draws, and in 23 by
 * these; requests that were delayed by 7 to 21%, within 4 s in 82 to 95, and in 75 to 95 (bun run bench:verdict).
 */
const DRAWS = 40;
const AGREE = 0.95;
const UNANIMOUS = 120;
/** Once the last quantile is known, those between the median and it may be off by so many times what the target allows. */
const BETWEEN = 1.3;

/** The latest requests of each client: a slow one is not to be lost among those of a fast one. */
export class Waits {
  #list: { wait: Wait; t_s: number }[] = [];

  add(waits: readonly Wait[], t_s: number): void {
    for (const wait of waits) this.#list.push({ wait, t_s });
    this.keep(MOST);
  }
  /** Forgets what is older than that. */
  forget(t_s: number): void {
    this.#list = this.#list.filter((entry) => t_s - entry.t_s <= FRESH_S);
  }
  /** So many of each client. */
  keep(most: number): void {
    if (this.#list.length <= most) return;
    const seen = new Map<number, number>();
    const list = this.#list.toReversed().filter(({ wait: { client } }) => {
      const n = (seen.get(client) ?? 0) + 1;
      seen.set(client, n);
      return n <= most;
    });
    if (list.length < this.#list.length) this.#list = list.toReversed();
  }
  clear(): void {
    this.#list = [];
  }
  get count(): number {
    return this.#list.length;
  }
  get waits(): Wait[] {
    return this.#list.map(({ wait }) => wait);
  }
}

/** Requests of one client, or of one kind of its, alone, by their work; and how much longer those took that had more of it, in parts of the list. */
interface Known {
  readonly list: readonly Wait[];
  readonly slopes: readonly number[];
  /** So many tell what one more would take. */
  readonly enough: number;
  /** Those with most work wait next to nothing. */
  readonly little: boolean;
}

/** Requests alone, ready to be compared with. */
export class Alone {
  readonly #clients = new Map<number, Known>();
  /** By client, then by kind, of those that have several. */
  readonly #kinds = new Map<number, Map<number, Known>>();
  /** Requests of which enough others of the same client are known. */
  readonly count: number;
  /** What the ratios of `delay` are where nothing delays: of all of them, then of draws. */
  readonly ratios: readonly number[][];

  constructor(waits: readonly Wait[]) {
    for (const [client, of] of Map.groupBy(waits, (wait) => wait.client)) {
      this.#clients.set(client, knownOf(of));
      const kinds = Map.groupBy(of, (wait) => wait.kind);
      if (kinds.size < 2) continue;
      const known = [...kinds].flatMap(([kind, some]) => (kind === undefined ? [] : [[kind, knownOf(some)] as const]));
      this.#kinds.set(client, new Map(known));
    }
    // Each against the others, so that chance has the same part in these pairs as in those beside other work.
    const pairs = new Sample(fromArrival(waits, (wait) => this.pair(wait, { except: wait })));
    this.count = pairs.count;
    this.ratios = pairs.ratios();
  }

  /**
   * A request beside what it would have been alone, by those of its kind, or where they do not tell by all of its client's; nothing where too little
   * is known of those, or nothing of requests with as much work. `orLess`: of one with less work than any of those, at least so much, if it is the same request on a host that is
   * faster: neither its program nor what it then waits for gains by more than the launches do.
   */
  pair(wait: Wait, how: { except?: Wait; orLess?: boolean } = {}): Pair | undefined {
    const ofKind = wait.kind === undefined ? undefined : this.#kinds.get(wait.client)?.get(wait.kind);
    return this.#pairOf(ofKind, wait, how) ?? this.#pairOf(this.#clients.get(wait.client), wait, how);
  }

  #pairOf(
    known: Known | undefined,
    wait: Wait,
    { except, orLess = false }: { except?: Wait; orLess?: boolean },
  ): Pair | undefined {
    const { list, slopes, enough, little } = known ?? { list: [], slopes: [], enough: 0, little: false };
    const [least, most] = [list[0], list.at(-1)];
    if (!least || !most || list.length <= enough) return undefined;
    const isLess = wait.worked_ms < least.worked_ms - BEYOND * duration_ms(least);
    if (isLess && !orLess) return undefined;
    // With still more work nothing waits longer: where that was next to nothing already, it is no more now.
    if (!little && wait.worked_ms > most.worked_ms + BEYOND * duration_ms(most)) return undefined;
    // The ones next to it by work: from where it would stand, outwards.
    let high = lowerBound(list, wait.worked_ms);
    let low = high - 1;
    const slope = slopes[Math.min(slopes.length - 1, Math.floor(high / PART))] ?? 1;
    const near: number[] = [];
    while (near.length < NEAREST) {
      const [below, above] = [list[low], list[high]];
      const takesBelow =
        below && (!above || wait.worked_ms - below.worked_ms <= above.worked_ms - wait.worked_ms) ? below : undefined;
      const next = takesBelow ?? above;
      if (!next) break;
      if (takesBelow) low--;
      else high++;
      if (next === except) continue;
      const scaled_ms = (duration_ms(next) * wait.worked_ms) / next.worked_ms;
      near.push(isLess ? scaled_ms : duration_ms(next) + slope * (wait.worked_ms - next.worked_ms));
    }
    return { took_ms: duration_ms(wait), alone_ms: median(near), parts: 1 };
  }
}

function knownOf(waits: readonly Wait[]): Known {
  const list = waits.toSorted((a, b) => a.worked_ms - b.worked_ms);
  const parts = Array.from({ length: Math.ceil(list.length / PART) }, (_, i) => i * PART);
  const slopes = parts.map((at) => slopeAround(list, at + PART / 2));
  const last_ms = median(list.slice(-NEAREST).map(({ waited_ms }) => waited_ms));
  const durations = list.map(duration_ms);
  const isAlike = Math.max(...durations) <= (1 + ALIKE) * Math.min(...durations);
  const enough = isAlike ? FEW : NEAREST;
  return { list, slopes, enough, little: last_ms <= BEYOND * (list.at(-1)?.worked_ms ?? 0) };
}

/** What began so soon after the one before, in parts of that one, had been waiting for it. */
const AT_ONCE = 0.1;
/** Of programs that wait several times in a request, or serve one after the other, all are followed at once; this is between. */
const CHAINED_MOST = 0.75;
/** So often it is drawn when they came, until it fits. */
const TRIES = 20;

/** One request: a busy period, with the short ones just before and after it. */
export interface Request {
  readonly began_ms: number | undefined;
  readonly took_ms: number;
  /** Of how many busy periods. */
  readonly parts: number;
  readonly pair: Pair | undefined;
}

/** For how long a program paused between two requests. */
export function pause_ms(before: Request, after: Request): number {
  return (after.began_ms ?? Number.NaN) - (before.began_ms ?? Number.NaN) - before.took_ms;
}

/**
 * Requests of one client, in their order. A busy period that is short against its neighbour, and next to it, is a part of the same
 * request: programs copy input, or read a result, and wait for that by itself. What delays it little is much for it alone.
 */
export function requestsOf(waits: readonly Wait[], pairOf: (wait: Wait) => Pair | undefined): Request[] {
  const list: Request[] = [];
  for (const wait of waits) {
    const next = { began_ms: wait.began_ms, took_ms: duration_ms(wait), parts: 1, pair: pairOf(wait) };
    const before = list.at(-1);
    if (before && isPart(before, next)) list[list.length - 1] = joined(before, next);
    else list.push(next);
  }
  return list;
}

/** By what they take alone: what delays a short one does not make it a request. */
function isPart(before: Request, after: Request): boolean {
  const alone_ms = [before, after].map(({ pair, took_ms }) => pair?.alone_ms ?? took_ms);
  const longer_ms = Math.max(...alone_ms);
  return Math.min(...alone_ms) < AT_ONCE * longer_ms && Math.abs(pause_ms(before, after)) <= AT_ONCE * longer_ms;
}

function joined(before: Request, after: Request): Request {
  const between_ms = pause_ms(before, after);
  return {
    began_ms: before.began_ms,
    took_ms: before.took_ms + between_ms + after.took_ms,
    parts: before.parts + after.parts,
    pair: before.pair &&
      after.pair && {
        took_ms: before.pair.took_ms + between_ms + after.pair.took_ms,
        alone_ms: before.pair.alone_ms + between_ms + after.pair.alone_ms,
        parts: before.parts + after.parts,
      },
  };
}

/** Requests of one client, in their order, cut where one did not wait for the one before. */
function chains(of: readonly Request[]): Request[][] {
  const list: Request[][] = [];
  for (const [i, request] of of.entries()) {
    const before = of[i - 1];
    const waited = before !== undefined && Math.abs(pause_ms(before, request)) <= AT_ONCE * before.took_ms;
    if (waited) list.at(-1)?.push(request);
    else list.push([request]);
  }
  const long = list.filter(({ length }) => length > 1).length;
  return long > CHAINED_MOST * list.length ? of.map((request) => [request]) : list;
}

/** When the requests of a chain began and when they came, in milliseconds from its beginning: at random, but each before it began. */
function timesOf(chain: readonly Request[]): { began_ms: number; came_ms: number }[] {
  const first_ms = chain[0]?.began_ms ?? 0;
  const began = chain.map((request) => (request.began_ms ?? first_ms) - first_ms);
  const last_ms = began.at(-1) ?? 0;
  // The same at every look.
  const random = generator(Math.round(first_ms * 1e3));
  let came = began;
  for (let n = 0; n < TRIES; n++) {
    const drawn = [0, ...began.slice(1).map(() => random() * last_ms)].toSorted((a, b) => a - b);
    if (drawn.some((at_ms, i) => at_ms > (began[i] ?? 0))) continue;
    came = drawn;
    break;
  }
  return began.map((began_ms, i) => ({ began_ms, came_ms: came[i] ?? began_ms }));
}

/** Pairs of how long requests took from when they came, and how long alone, where the one before would have been done sooner. */
function fromArrival(waits: readonly Wait[], pairOf: (wait: Wait) => Pair | undefined): Pair[] {
  const pairs: Pair[] = [];
  const all = [...Map.groupBy(waits, (wait) => wait.client).values()].flatMap((of) => chains(requestsOf(of, pairOf)));
  for (const chain of all) {
    const times = timesOf(chain);
    // When the one before would have been done.
    let free_ms = 0;
    for (const [i, request] of chain.entries()) {
      const { began_ms, came_ms } = times[i] ?? { began_ms: 0, came_ms: 0 };
      const before = chain[i - 1];
      const { pair } = request;
      if (pair) {
        free_ms = Math.max(came_ms, free_ms) + (before ? Math.max(0, pause_ms(before, request)) : 0) + pair.alone_ms;
        pairs.push({ took_ms: began_ms + pair.took_ms - came_ms, alone_ms: free_ms - came_ms, parts: pair.parts });
      } else free_ms = began_ms + request.took_ms;
    }
  }
  return pairs;
}

function duration_ms({ worked_ms, waited_ms }: Wait): number {
  return worked_ms + waited_ms;
}

/**
 * How much longer requests take with one millisecond more of work, around a place in the list: all of it where the program is
 * what takes long, nothing where the GPU is. The median of the slopes between any two (Sen 1968), which strays little.
 */
function slopeAround(list: readonly Wait[], at: number): number {
  const some = list.slice(Math.max(0, at - NEAREST), at + NEAREST);
  const slopes: number[] = [];
  some.forEach((a, i) => {
    for (const b of some.slice(i + 1))
      if (b.worked_ms > a.worked_ms) slopes.push((duration_ms(b) - duration_ms(a)) / (b.worked_ms - a.worked_ms));
  });
  return slopes.length > 0 ? Math.min(1, Math.max(0, median(slopes))) : 1;
}

/** The upper one of two. */
function median(values: readonly number[]): number {
  return values.toSorted((a, b) => a - b)[values.length >> 1] ?? Number.NaN;
}

function lowerBound(list: readonly Wait[], worked_ms: number): number {
  let [low, high] = [0, list.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((list[middle]?.worked_ms ?? 0) < worked_ms) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Pairs from which quantiles of both sides can be had, of all of them or of a draw. */
class Sample {
  readonly count: number;
  /** Of so many busy periods. */
  readonly parts: number;
  readonly #took: Sorted;
  readonly #alone: Sorted;
  readonly #times: Uint16Array;

  constructor(pairs: readonly Pair[]) {
    this.count = pairs.length;
    this.parts = pairs.reduce((sum, { parts }) => sum + parts, 0);
    this.#took = sorted(pairs.map(({ took_ms }) => took_ms));
    this.#alone = sorted(pairs.map(({ alone_ms }) => alone_ms));
    this.#times = new Uint16Array(this.count);
  }

  /** By how much what they took is longer than alone, at each of the quantiles; first of all of them, then of `DRAWS` draws. */
  ratios(): number[][] {
    const random = generator(this.count);
    const times = this.#times.fill(1);
    const all = [this.#ratio()];
    for (let draw = 0; draw < DRAWS; draw++) {
      times.fill(0);
      for (let n = 0; n < this.count; n++) {
        const at = Math.floor(random() * this.count);
        times[at] = (times[at] ?? 0) + 1;
      }
      all.push(this.#ratio());
    }
    return all;
  }

  #ratio(): number[] {
    const [took, alone] = [this.#quantiles(this.#took), this.#quantiles(this.#alone)];
    return QUANTILES.map((_, i) => (took[i] ?? Number.NaN) / (alone[i] ?? Number.NaN));
  }

  #quantiles({ values, places }: Sorted): number[] {
    const found: number[] = [];
    let seen = 0;
    for (let i = 0; i < this.count && found.length < QUANTILES.length; i++) {
      seen += this.#times[places[i] ?? 0] ?? 0;
      while (found.length < QUANTILES.length && seen >= (QUANTILES[found.length] ?? 1) * this.count)
        found.push(values[i] ?? Number.NaN);
    }
    return found;
  }
}

/** Values in their order, and where each of them was before. */
interface Sorted {
  values: Float64Array;
  places: Uint32Array;
}

function sorted(values: readonly number[]): Sorted {
  const places = Uint32Array.from(values.keys()).toSorted((a, b) => (values[a] ?? 0) - (values[b] ?? 0));
  return { values: Float64Array.from(places, (at) => values[at] ?? 0), places };
}

export interface Delay {
  /** Busy periods that were compared, and of how many of them it is known well what they took alone. */
  requests: number;
  wellKnown: number;
  /** At these percentiles. */
  p50: number;
  p90: number;
  p95: number;
  p99: number;
  /** The most, of the percentiles that so many requests say something of. */
  worst: { percentile: number; ratio: number };
  /** Whether that is more than `limit`, as far as it can be known. */
  verdict: "within" | "over" | "unknown";
}

/**
 * By how much requests are delayed, in times of what they take alone; of less than `enough` that can be compared the verdict is "unknown".
 * Beside other work the expected durations have less spread than real ones: the same ratio of the requests alone, each against
 * the others, is what no delay looks like.
 *
 * A host is fast for some seconds and slow for the next, and requests alone are known of short moments: of requests with less work than any of
 * those a bound is known (Alone.pair). Where all are within the limit by that, they are; else those alone are compared of which more is known.
 */
export function delay(waits: readonly Wait[], alone: Alone, limit: number, enough: number): Delay {
  const known = judged(waits, alone, limit, enough, false);
  if (known.requests >= waits.length || known.verdict === "over") return known;
  const most = judged(waits, alone, limit, enough, true);
  const tells = most.requests > known.requests && most.verdict === "within";
  return tells ? { ...most, wellKnown: known.requests } : known;
}

function judged(waits: readonly Wait[], alone: Alone, limit: number, enough: number, orLess: boolean): Delay {
  const here = new Sample(fromArrival(waits, (wait) => alone.pair(wait, { orLess })));
  // Of all first, then of the draws.
  const [told = [], ...draws] = here
    .ratios()
    .map((ratios, n) => ratios.map((ratio, i) => ratio / (alone.ratios[n]?.[i] ?? 1)));
  const ratios = told.slice(0, QUANTILES.filter((q) => here.count * (1 - q) >= ABOVE).length);
  const between = ratios.length < QUANTILES.length ? limit : 1 + BETWEEN * (limit - 1);
  const limits = QUANTILES.map((_, i) => (i === 0 || i === QUANTILES.length - 1 ? limit : between));
  const over = ratios.map((_, i) => draws.filter((draw) => (draw[i] ?? 0) > (limits[i] ?? limit)).length);
  let verdict: Delay["verdict"] = "unknown";
  if (Math.min(here.count, alone.count) >= enough) {
    if (over.some((count) => count >= (here.count < UNANIMOUS ? 1 : AGREE) * DRAWS)) verdict = "over";
    else if (ratios.every((ratio, i) => ratio <= (limits[i] ?? limit))) verdict = "within";
  }
  // The one that is furthest off what it may be.
  const furthest = ratios.map((ratio, i) => ratio / (limits[i] ?? limit));
  const place = furthest.indexOf(Math.max(...furthest));
  const worst = { percentile: Math.round(100 * (QUANTILES[place] ?? 1)), ratio: ratios[place] ?? Number.NaN };
  const at = (q: (typeof QUANTILES)[number]): number => told[QUANTILES.indexOf(q)] ?? Number.NaN;
  return {
    requests: here.parts,
    wellKnown: here.parts,
    p50: at(0.5),
    p90: at(0.9),
    p95: at(0.95),
    p99: at(0.99),
    worst,
    verdict,
  };
}
