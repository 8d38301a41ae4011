/**
 * bench-stats.ts: the numbers of a benchmark: arrival times, windows of a schedule, percentiles, throughput, ratios.
 *
 * Pure: no clock, no file, no process. Seconds are since the start that all programs of a run share.
 */

import { generator } from "./random.ts";
import { Alone, type Delay, delay, type Stayed, type Wait } from "./slo-delay.ts";

/** When a request fell due, in seconds, and its latency from then, in milliseconds. */
export type Sample = readonly [due_s: number, latency_ms: number];

export interface Latency {
  count: number;
  p50_ms: number;
  p95_ms: number;
  p99_ms: number;
  mean_ms: number;
  max_ms: number;
}

/** Nearest rank: the smallest value that at least the fraction `q` does not exceed. `sorted` ascends and is not empty. */
export function quantile(sorted: readonly number[], q: number): number {
  const rank = Math.max(1, Math.ceil(q * sorted.length - 1e-9));
  return sorted[rank - 1] ?? Number.NaN;
}

/** What latencies come to; undefined without any. */
export function latencyOf(samples: readonly Sample[]): Latency | undefined {
  if (samples.length === 0) return undefined;
  const sorted = ascending(samples.map(([, latency_ms]) => latency_ms));
  return {
    count: sorted.length,
    p50_ms: quantile(sorted, 0.5),
    p95_ms: quantile(sorted, 0.95),
    p99_ms: quantile(sorted, 0.99),
    mean_ms: mean(sorted),
    max_ms: quantile(sorted, 1),
  };
}

export function ascending(values: readonly number[]): number[] {
  // Typed arrays sort numbers several times faster, and a bootstrap sorts thousands of times.
  return [...Float64Array.from(values).toSorted()];
}

/** The middle one, or the mean of the two in the middle; NaN without any. */
export function median(values: readonly number[]): number {
  const sorted = ascending(values);
  const middle = sorted.length >> 1;
  const upper = sorted[middle] ?? Number.NaN;
  return sorted.length % 2 === 1 ? upper : ((sorted[middle - 1] ?? Number.NaN) + upper) / 2;
}

/** Middle and extremes of one number per round. */
export interface Spread {
  median: number;
  min: number;
  max: number;
  /** How many. */
  rounds: number;
}

export function spread(values: readonly number[]): Spread | null {
  const finite = values.filter(Number.isFinite);
  if (finite.length === 0) return null;
  return { median: median(finite), min: Math.min(...finite), max: Math.max(...finite), rounds: finite.length };
}

function mean(values: readonly number[]): number {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

/** How much y grows with x, by least squares; null where that cannot be said. */
export function slopeOf(points: readonly (readonly [x: number, y: number])[]): number | null {
  const mean_x = mean(points.map(([x]) => x));
  const mean_y = mean(points.map(([, y]) => y));
  const spread_x = points.reduce((sum, [x]) => sum + (x - mean_x) ** 2, 0);
  if (!(spread_x > 0)) return null;
  return points.reduce((sum, [x, y]) => sum + (x - mean_x) * (y - mean_y), 0) / spread_x;
}

/** Steps done between two moments, of a program whose steps ended at `ends_s`; parts of a step count as such. */
export function stepsBetween(ends_s: readonly number[], from_s: number, to_s: number, began_s = 0): number {
  return stepsUntil(ends_s, to_s, began_s) - stepsUntil(ends_s, from_s, began_s);
}

/** Up to the last end known; what was under way then is not counted. A program that paused until `began_s` began no step before. */
function stepsUntil(ends_s: readonly number[], at_s: number, began_s: number): number {
  let before_s = 0;
  for (const [done, end_s] of ends_s.entries()) {
    if (began_s < end_s) before_s = Math.max(before_s, began_s);
    if (at_s < end_s) return done + Math.max(0, at_s - before_s) / (end_s - before_s);
    before_s = end_s;
  }
  return ends_s.length;
}

/** What one program wrote down: when it was ready, after the start, its requests, and when its steps ended. */
interface Log {
  late_s: number;
  requests: readonly Sample[];
  ends_s: readonly number[];
}

/**
 * What programs measured beside each other, in so many seconds: from when the last of them was ready. Until then nobody is beside all that
 * he is to be measured beside.
 */
export function together(
  high: Log | undefined,
  best: readonly (Log & { program: string })[],
  duration_s: number,
): Pick<Measurement, "requests" | "requests_s" | "best"> {
  const from_s = Math.max(0, ...[...(high ? [high] : []), ...best].map(({ late_s }) => late_s));
  return {
    requests: (high?.requests ?? []).filter(([due_s]) => due_s >= from_s),
    requests_s: high ? Math.max(0, duration_s - from_s) : 0,
    best: best.map(({ program, ends_s }) => ({ program, ...counted(ends_s, from_s, duration_s) })),
  };
}

/** Steps between two moments, as far as they are known; of a program that ended none it is known that it did none. */
export function counted(
  ends_s: readonly number[],
  from_s: number,
  to_s: number,
  began_s = 0,
): { steps: number; seconds: number } {
  // Of a program that was ready after the end, `from_s` is behind `to_s`.
  const until_s = Math.max(from_s, Math.min(to_s, ends_s.findLast((end_s) => end_s > from_s) ?? to_s));
  return { steps: stepsBetween(ends_s, from_s, until_s, began_s), seconds: until_s - from_s };
}

/* ---- Arrivals */

/** "closed": Poisson arrivals of one user, who waits for the answer: what falls due meanwhile is left out (--closed of the programs). */
export const ARRIVALS = ["poisson", "bursty", "uniform", "closed"] as const;
export type Arrivals = (typeof ARRIVALS)[number];

/** Requests of one burst follow each other this closely. */
const BURST_GAP_s = 0.002;
/** A burst holds from 1 to so many requests, each number as likely as the other. */
const BURST_MOST = 8;

/** Times from `from_s` to `to_s` at which requests fall due; the seed decides everything. */
export function arrivalTimes(kind: Arrivals, rate_per_s: number, seed: number, from_s: number, to_s: number): number[] {
  const random = generator(seed);
  const exponential = (mean_s: number): number => -Math.log(1 - random()) * mean_s;
  const due_s: number[] = [];
  let at_s = from_s;
  for (;;) {
    if (kind === "bursty") {
      at_s += exponential((BURST_MOST + 1) / 2 / rate_per_s);
      const size = 1 + Math.floor(random() * BURST_MOST);
      for (let i = 0; i < size; i++) due_s.push(at_s + i * BURST_GAP_s);
    } else {
      at_s += kind === "uniform" ? 1 / rate_per_s : exponential(1 / rate_per_s);
      due_s.push(at_s);
    }
    if (at_s >= to_s) return ascending(due_s).filter((due) => due < to_s);
  }
}

/** What its programs are told of it besides when requests fall due. */
export function moreOf(kind: Arrivals): string[] {
  return kind === "closed" ? ["--closed"] : [];
}

/** As a program reads them: from the start to the first, then from each to the next. */
export function gapsOf(due_s: readonly number[]): number[] {
  return due_s.map((due, index) => due - (due_s[index - 1] ?? 0));
}

/* ---- Windows */

/** A spell. What falls into its first part, while programs settle, is not counted. */
interface Spell {
  from_s: number;
  /** Counting begins. */
  counted_s: number;
  to_s: number;
}

/** A spell in which programs run in one way. */
export interface Window<Way = string> extends Spell {
  way: Way;
  round: number;
  /** Which time the ways are gone through, from 0. */
  turn: number;
}

/**
 * The ways in turn, `cycles` times a round, every second time in reverse, so that what drifts hits all alike; those that do not vary (`once`) once a
 * round. `settle_s`: what is not counted of a window, by the way and that before; `gap_s`: for how long nothing is done between a window and one of
 * another way.
 */
export function schedule<Way>(
  ways: readonly Way[],
  lengths: {
    rounds: number;
    cycles: number;
    window_s: number;
    once?: (way: Way) => boolean;
    settle_s: (way: Way, after: Way | undefined) => number;
    gap_s?: (way: Way, after: Way) => number;
  },
): Window<Way>[] {
  const { rounds, cycles, window_s, once = () => false, settle_s, gap_s = () => 0 } = lengths;
  const windows: Window<Way>[] = [];
  for (let turn = 0; turn < rounds * cycles; turn++)
    for (const way of turn % 2 === 0 ? ways : ways.toReversed()) {
      const round = Math.floor(turn / cycles);
      // In one round in a turn in order, in the next in one in reverse.
      if (turn % cycles !== (cycles % 2 === 0 ? round % 2 : 0) && once(way)) continue;
      const last = windows.at(-1);
      const from_s = last ? last.to_s + (last.way === way ? 0 : gap_s(way, last.way)) : 0;
      const counted_s = from_s + settle_s(way, last?.way);
      windows.push({ way, round, turn, from_s, counted_s, to_s: counted_s + window_s });
    }
  return windows;
}

/** The samples that belong to a window; `guard_s` before its end are left out, as the next window shows in them. */
export function within(samples: readonly Sample[], { counted_s, to_s }: Spell, guard_s: number): Sample[] {
  return samples.filter(([due_s]) => due_s >= counted_s && due_s < to_s - guard_s);
}

/**
 * Whether requests of an earlier window were still under way half way through the time that this one has to settle: a way that lets requests
 * queue up would show in the one after it. `samples` are of all windows.
 */
export function beginsQueued(samples: readonly Sample[], { from_s, counted_s }: Spell): boolean {
  return samples.some(([due_s, ms]) => due_s < from_s && due_s + ms / 1000 > (from_s + counted_s) / 2);
}

/**
 * Whether a step of a program that pauses throughout a window was under way when counting began. `spells`: when it works; its steps
 * ended at `ends_s`.
 */
export function outlasts(
  ends_s: readonly number[],
  spells: readonly Pick<Spell, "from_s" | "to_s">[],
  { counted_s, to_s }: Spell,
): boolean {
  const next_s = spells.find((spell) => spell.to_s > counted_s)?.from_s ?? Number.POSITIVE_INFINITY;
  return next_s >= to_s && ends_s.some((end_s) => end_s > counted_s && end_s < next_s);
}

/* ---- The matrix */

/** How often a best-effort program was taken off the GPU, by its channels or stops, for how long in all, and how often it got its `min_share`. */
export interface Off {
  suspensions: number;
  suspended_ms: number;
  starved: number;
}

/** What one way of running a pair gave in one round. */
export interface Measurement {
  pair: string;
  way: string;
  /** What it may be compared with: programs started in the same manner. */
  method: string;
  round: number;
  /** Latencies of the high program; empty where it did not run. */
  requests: Sample[];
  /** Seconds in which requests could fall due. */
  requests_s: number;
  /** Where ways take turns, when it was so, and when the way was really in force. */
  window?: { from_s: number; counted_s: number; to_s: number; switched_s: number };
  /** For each best-effort program that ran; where ways are switched, also how often, and for how long, it was taken off the GPU. */
  best: ({ program: string; steps: number; seconds: number } & Partial<Off>)[];
  /** The high program's requests taken apart, where Rigel was there to do so. */
  waits?: Wait[];
}

/**
 * Requests that began at once after the last one, and so are those that a queue delays most, beside those that found the GPU with another program.
 * Milliseconds from their first call to their end, of all rounds.
 */
export interface Following {
  /** Begun within AT_ONCE_ms of the end of the last one. */
  requests: number;
  p50_ms: number | null;
  p90_ms: number | null;
  /** So many of them took LATE_ms more than the median of such requests alone; null where fewer than SOME of those are known. */
  late: number | null;
  /** Begun APART_ms after the end of the last one, or later; `late` as above, by AMID_ms. */
  apart: {
    requests: number;
    p50_ms: number | null;
    p90_ms: number | null;
    p99_ms: number | null;
    late: number | null;
  };
}

/** Requests by what had the GPU there for them. */
export type ByStay = Partial<Record<Stayed, { requests: number; p50_ms: number; p99_ms: number }>>;

/** One row of the result: ratios are within a round, against `alone` of the same method; spread is over the rounds. */
export interface Row {
  pair: string;
  way: string;
  method: string;
  p50_ms: Spread | null;
  p95_ms: Spread | null;
  p99_ms: Spread | null;
  p50_ratio: Spread | null;
  p95_ratio: Spread | null;
  p99_ratio: Spread | null;
  /**
   * How long the requests of all rounds took over how long the same requests would have taken alone (slo-delay.ts): what the host
   * does is in both. Null where that cannot be told.
   */
  delayed: Pick<Delay, "requests" | "p50" | "p95" | "p99"> | null;
  /** Its requests that began at once after the last one, and the others. Null where Rigel was not there to see them. */
  following: Following | null;
  stayed: ByStay | null;
  /** Best-effort steps a second; with several programs, of each. */
  steps_per_s: { program: string; per_s: Spread | null }[];
  /** Best-effort throughput over throughput alone; with several programs, their sum. */
  share: Spread | null;
  /** 1 minus the part of the time that the high program alone keeps the GPU busy. */
  ceiling: number | null;
  /** Share over the ceiling of the requests that fell due beside it: the median of the rounds, as no two have the same requests. */
  harvest: number | null;
  /**
   * Of requests alone under MPS: over those alone without it, of another start of the programs; the best-effort ones are there and pause
   * in both. That is what MPS costs, which is in none of the ratios to them. Null in other rows, and where the other was not measured.
   */
  mps_cost: { p50: number; p95: number; p99: number } | null;
}

export const ALONE = "alone";
/** How programs were started whose ways take turns: in time slices, or to be compared with those that were; and under MPS. */
export const LIVE = "live";
export const LIVE_MPS = "live, MPS";

/** GPU time of one request of each high program, in ms, by pair. */
export type GpuTimes = ReadonlyMap<string, number>;

/** The rows of all that was measured, in the order in which pairs and ways first appear. */
export function rowsOf(measurements: readonly Measurement[], gpu_ms: GpuTimes): Row[] {
  const groups = Map.groupBy(measurements, ({ pair, method, way }) => JSON.stringify([pair, method, way]));
  const rows = [...groups.values()].flatMap((group): Row[] => {
    const [first] = group;
    if (!first) return [];
    const { pair, way, method } = first;
    const bases = measurements.filter((one) => one.pair === pair && one.method === method && one.way === ALONE);
    const rounds = [...new Set(group.map(({ round }) => round))];
    const each = rounds.map((round) => ({
      here: roundOf(group, round),
      base: roundOf(bases, round),
    }));
    const latency = (key: "p50_ms" | "p95_ms" | "p99_ms"): Spread | null =>
      spread(each.map(({ here }) => here.latency?.[key] ?? Number.NaN));
    const ratio = (key: "p50_ms" | "p95_ms" | "p99_ms"): Spread | null =>
      way === ALONE
        ? null
        : spread(
            each.map(({ here, base }) => (here.latency?.[key] ?? Number.NaN) / (base.latency?.[key] ?? Number.NaN)),
          );
    const programs = [...new Set(group.flatMap(({ best }) => best.map(({ program }) => program)))];
    const share =
      way === ALONE || programs.length === 0 ? null : spread(each.map(({ here, base }) => shareOf(here, base)));
    const ceiling = ceilingOf(bases, gpu_ms.get(pair));
    const harvests = each.map(({ here, base }) => {
      const own = ceilingOf(here.measurements, gpu_ms.get(pair));
      return own ? shareOf(here, base) / own : Number.NaN;
    });
    return [
      {
        pair,
        way,
        method,
        p50_ms: latency("p50_ms"),
        p95_ms: latency("p95_ms"),
        p99_ms: latency("p99_ms"),
        p50_ratio: ratio("p50_ms"),
        p95_ratio: ratio("p95_ms"),
        p99_ratio: ratio("p99_ms"),
        delayed: way === ALONE ? null : delayedOf(group, bases),
        following: followingOf(group, bases),
        stayed: byStay(group),
        steps_per_s: programs.map((program) => ({
          program,
          per_s: spread(each.map(({ here }) => here.per_s.get(program) ?? Number.NaN)),
        })),
        share,
        ceiling,
        harvest: share ? (spread(harvests)?.median ?? null) : null,
        mps_cost: null,
      },
    ];
  });
  return withMpsCost(rows);
}

/** The rows with what MPS costs, from the medians of the rounds. */
function withMpsCost(rows: readonly Row[]): Row[] {
  return rows.map((under) => {
    if (under.way !== ALONE || under.method !== LIVE_MPS) return under;
    const without = rows.find(({ pair, way, method }) => pair === under.pair && way === ALONE && method === LIVE);
    const over = (key: "p50_ms" | "p95_ms" | "p99_ms"): number =>
      (under[key]?.median ?? Number.NaN) / (without?.[key]?.median ?? Number.NaN);
    const cost = { p50: over("p50_ms"), p95: over("p95_ms"), p99: over("p99_ms") };
    return { ...under, mps_cost: Object.values(cost).every(Number.isFinite) ? cost : null };
  });
}

function delayedOf(group: readonly Measurement[], alone: readonly Measurement[]): Row["delayed"] {
  const waits = (of: readonly Measurement[]): Wait[] => of.flatMap((one) => one.waits ?? []);
  const { requests, p50, p95, p99 } = delay(waits(group), new Alone(waits(alone)), Number.POSITIVE_INFINITY, 1);
  return requests > 0 ? { requests, p50, p95, p99 } : null;
}

/** As Following has it. A queue takes nine in ten requests up within 100 us of the last one (docs/experiments.md); an exchange of processes takes 0.14 ms. */
const AT_ONCE_ms = 0.25;
const APART_ms = 0.5;
const LATE_ms = 0.1;
/** More than one exchange: the GPU was lost amid the request, and came back. */
const AMID_ms = 0.3;
const SOME = 5;

function followingOf(group: readonly Measurement[], alone: readonly Measurement[]): Following | null {
  const { atOnce, apart } = tookBy(group);
  if (atOnce.length + apart.length === 0) return null;
  const base = tookBy(alone);
  return {
    requests: atOnce.length,
    p50_ms: quantileOrNull(atOnce, 0.5),
    p90_ms: quantileOrNull(atOnce, 0.9),
    late: lateOf(atOnce, base.atOnce, LATE_ms),
    apart: {
      requests: apart.length,
      p50_ms: quantileOrNull(apart, 0.5),
      p90_ms: quantileOrNull(apart, 0.9),
      p99_ms: quantileOrNull(apart, 0.99),
      late: lateOf(apart, base.apart, AMID_ms),
    },
  };
}

/** Milliseconds from their first call to their end, of all rounds; null where that is not known of any. */
function byStay(group: readonly Measurement[]): ByStay | null {
  const known = group.flatMap(({ waits }) => waits ?? []).filter(({ stayed }) => stayed !== undefined);
  if (known.length === 0) return null;
  return Object.fromEntries(
    [...Map.groupBy(known, ({ stayed }) => stayed)].map(([stayed, waits]) => {
      const took_ms = ascending(waits.map(({ worked_ms, waited_ms }) => worked_ms + waited_ms));
      return [stayed, { requests: waits.length, p50_ms: quantile(took_ms, 0.5), p99_ms: quantile(took_ms, 0.99) }];
    }),
  );
}

function quantileOrNull(sorted: readonly number[], q: number): number | null {
  return sorted.length > 0 ? quantile(sorted, q) : null;
}

/** How many took by so much longer than the median of those alone; null where too few of these are known. */
function lateOf(took: readonly number[], alone: readonly number[], by_ms: number): number | null {
  if (alone.length < SOME) return null;
  const limit_ms = quantile(alone, 0.5) + by_ms;
  return took.filter((took_ms) => took_ms > limit_ms).length;
}

/** How long requests took, by how they began; ascending. The first one of a window has none before it. */
function tookBy(measurements: readonly Measurement[]): { atOnce: number[]; apart: number[] } {
  const atOnce: number[] = [];
  const apart: number[] = [];
  for (const { waits } of measurements) {
    let end_ms: number | undefined;
    for (const { began_ms, worked_ms, waited_ms } of (waits ?? []).toSorted(
      (a, b) => (a.began_ms ?? 0) - (b.began_ms ?? 0),
    )) {
      if (began_ms === undefined) continue;
      const took_ms = worked_ms + waited_ms;
      const pause_ms = end_ms === undefined ? Number.NaN : began_ms - end_ms;
      if (pause_ms < AT_ONCE_ms) atOnce.push(took_ms);
      if (pause_ms >= APART_ms) apart.push(took_ms);
      end_ms = began_ms + took_ms;
    }
  }
  return { atOnce: atOnce.toSorted((a, b) => a - b), apart: apart.toSorted((a, b) => a - b) };
}

/** Requests alone, of one pair and method, and how many of them were late. */
export interface LateAlone {
  pair: string;
  requests: number;
  late: number;
}

/** More than the GPU's own ups and downs. */
export const HOST_ms = 0.3;
/** Of 59 pairs that were measured on H200s, the six of a host known to be late had 0.0058 to 0.0305; of the others one had 0.0139, the rest up to 0.0046. */
const LATE_PART = 0.005;

/**
 * Where the host was late: pairs whose requests alone are mostly the GPU's, by the part that they waited for it, and of which more than LATE_PART
 * took HOST_ms longer than the median from their first call on, and SOME or more. What delays these is neither sharing nor the GPU.
 */
export function lateAlone(measurements: readonly Measurement[]): LateAlone[] {
  const alone = measurements.filter(({ way }) => way === ALONE);
  return [...Map.groupBy(alone, ({ pair, method }) => JSON.stringify([pair, method])).values()].flatMap((group) => {
    const waits = group.flatMap((one) => one.waits ?? []);
    const took_ms = ascending(waits.map(({ worked_ms, waited_ms }) => worked_ms + waited_ms));
    const parts = ascending(waits.map(({ worked_ms, waited_ms }) => waited_ms / (worked_ms + waited_ms)));
    const [first] = group;
    const late = lateOf(took_ms, took_ms, HOST_ms) ?? 0;
    return first && late >= SOME && late > LATE_PART * took_ms.length && quantile(parts, 0.5) >= 0.5
      ? [{ pair: first.pair, requests: took_ms.length, late }]
      : [];
  });
}

interface Round {
  measurements: readonly Measurement[];
  latency: Latency | undefined;
  per_s: Map<string, number>;
}

/** Everything of one round pooled. */
function roundOf(measurements: readonly Measurement[], round: number): Round {
  const own = measurements.filter((one) => one.round === round);
  const per_s = new Map<string, number>();
  const steps = own.flatMap(({ best }) => best);
  for (const [program, parts] of Map.groupBy(steps, (one) => one.program)) {
    const seconds = parts.reduce((sum, part) => sum + part.seconds, 0);
    if (seconds > 0) per_s.set(program, parts.reduce((sum, part) => sum + part.steps, 0) / seconds);
  }
  return { measurements: own, latency: latencyOf(own.flatMap(({ requests }) => requests)), per_s };
}

function shareOf(here: Round, base: Round): number {
  let sum = 0;
  for (const [program, per_s] of here.per_s) sum += per_s / (base.per_s.get(program) ?? Number.NaN);
  return here.per_s.size > 0 ? sum : Number.NaN;
}

/** From the requests that the high program really got. */
function ceilingOf(measurements: readonly Measurement[], gpu_ms: number | undefined): number | null {
  const seconds = measurements.reduce((sum, { requests_s }) => sum + requests_s, 0);
  if (gpu_ms === undefined || seconds <= 0) return null;
  const count = measurements.reduce((sum, { requests }) => sum + requests.length, 0);
  return Math.max(0, 1 - ((count / seconds) * gpu_ms) / 1000);
}

/* ---- What Rigel costs with nothing beside it */

/** The two ways in which a program serves alone. */
const KINDS = ["bare", "rigel"] as const;
export type Kind = (typeof KINDS)[number];

/** Something of each copy of the program, bare and under Rigel. */
export type Copies<Of> = Record<Kind, Of[]>;

/**
 * When requests fall due until `to_s`, evenly spaced: each pair of neighbours goes to one copy, bare and under Rigel. The copies take
 * turns by pairs, and each is the first of its pair every second time: drift and order are alike for both.
 */
export function soloTurns(rate_per_s: number, copies: number, to_s: number): Copies<number[]> {
  const due_s: Copies<number[]> = { bare: emptyLists(copies), rigel: emptyLists(copies) };
  for (let pair = 0; pair < Math.floor((to_s * rate_per_s) / 2); pair++) {
    const copy = pair % copies;
    const bareFirst = (copy + Math.floor(pair / copies)) % 2 === 0;
    for (const [place, kind] of (bareFirst ? KINDS : KINDS.toReversed()).entries())
      // In the middle of its place, so that rounding leads to no other.
      due_s[kind][copy]?.push((2 * pair + place + 0.5) / rate_per_s);
  }
  return due_s;
}

function emptyLists(count: number): number[][] {
  return Array.from({ length: count }, () => []);
}

/** How the requests of soloTurns were spaced, and from when on they count. */
interface Spacing {
  rate_per_s: number;
  settle_s: number;
}

/** Two neighbouring requests, one bare and one under Rigel; one is not there if it was not served. */
interface SoloPair {
  due_s: number;
  ms: Partial<Record<Kind, number>>;
}

/** The pairs of each copy that fell due from `settle_s` on. */
function soloPairs(samples: Copies<readonly Sample[]>, { rate_per_s, settle_s }: Spacing): SoloPair[][] {
  return Array.from({ length: Math.max(samples.bare.length, samples.rigel.length) }, (_, copy) => {
    const pairs = new Map<number, SoloPair>();
    for (const kind of KINDS)
      for (const [due_s, ms] of samples[kind][copy] ?? []) {
        const index = Math.floor((due_s * rate_per_s) / 2);
        const pair = pairs.get(index) ?? { due_s: (2 * index) / rate_per_s, ms: {} };
        pair.ms[kind] = ms;
        pairs.set(index, pair);
      }
    return [...pairs.values()].filter(({ due_s }) => due_s >= settle_s);
  });
}

/** Latency under Rigel over latency bare; none where a request was not served. */
function ratioOf({ ms: { bare, rigel } }: SoloPair): number[] {
  return bare === undefined || rigel === undefined ? [] : [rigel / bare];
}

/** When each complete pair fell due, and its ratio. */
export function pairedRatios(
  samples: Copies<readonly Sample[]>,
  spacing: Spacing,
): (readonly [due_s: number, ratio: number])[] {
  return soloPairs(samples, spacing)
    .flat()
    .flatMap((pair) => ratioOf(pair).map((ratio) => [pair.due_s, ratio] as const))
    .toSorted(([a], [b]) => a - b);
}

/** Where 95% of the bootstrap's draws lie. */
export type Interval = readonly [low: number, high: number];

export interface Solo {
  program: string;
  /** p50 under Rigel over p50 bare, of all requests pooled. */
  ratio: number;
  interval: Interval;
  /** The same of p99. */
  p99_ratio: number;
  p99_interval: Interval;
  /** The median of what single pairs of neighbouring requests give; null if none is complete. */
  paired: number | null;
  paired_interval: Interval | null;
  /** Pairs of which both requests were served. */
  pairs: number;
  /** p50 in milliseconds of each copy: how much one start of the program differs from another. */
  copies: Copies<number>;
  bare: Latency;
  rigel: Latency;
  /** What the requests that copies under Rigel sent past it tell; null without such. */
  within: Within | null;
}

/**
 * Requests through Rigel against those past it, of one and the same process, of which one of each two goes past it by chance. Starts of
 * a program do not come into it.
 */
export interface Within {
  /**
   * The median of the ratios of pairs: drifts and levels that last longer than a pair cancel, outliers do not matter. In the ratio of
   * the medians of each copy they do not cancel.
   */
  p50: number;
  p50_interval: Interval;
  /** The median of the differences of pairs. */
  added_us: number;
  added_us_interval: Interval;
  /** Of the latencies of all copies, each over the p50 past Rigel of its copy. */
  p99: number;
  p99_interval: Interval;
  pairs: number;
  /** p50 in milliseconds of each copy. */
  copies: { through: number[]; past: number[] };
}

/** Of the bootstrap. */
const DRAWS = 1000;

/**
 * `samples` are those of each copy, as soloTurns has them fall due, but for those in `past`, which copies under Rigel sent past it; what
 * falls due before `settle_s` is not counted.
 */
export function soloOf(
  program: string,
  samples: Copies<readonly Sample[]>,
  spacing: Spacing,
  seed: number,
  past: readonly (readonly Sample[])[] = [],
): Solo | undefined {
  const copies = soloPairs(samples, spacing).filter((pairs) => pairs.length > 0);
  const all = copies.flat();
  const [bare, rigel] = KINDS.map((kind) => latencyOf(samplesOf(all, kind)));
  if (!bare || !rigel) return undefined;
  const random = generator(seed);
  // Starts differ, and so do the requests of one.
  const draws = Array.from({ length: DRAWS }, () =>
    soloRatios(drawn(copies, random).flatMap((pairs) => drawn(pairs, random))),
  );
  const interval = (key: keyof SoloRatios): Interval => intervalOf(draws.map((draw) => draw[key]));
  const p50s = (kind: Kind): number[] => copies.flatMap((pairs) => latencyOf(samplesOf(pairs, kind))?.p50_ms ?? []);
  const { p50, p99, paired } = soloRatios(all);
  const pairs = all.flatMap(ratioOf).length;
  return {
    program,
    ratio: p50,
    interval: interval("p50"),
    p99_ratio: p99,
    p99_interval: interval("p99"),
    paired: pairs > 0 ? paired : null,
    paired_interval: pairs > 0 ? interval("paired") : null,
    pairs,
    copies: { bare: p50s("bare"), rigel: p50s("rigel") },
    bare,
    rigel,
    within: withinOf(samples.rigel, past, spacing.settle_s, seed),
  };
}

function intervalOf(values: readonly number[]): Interval {
  const sorted = ascending(values.filter(Number.isFinite));
  return [quantile(sorted, 0.025), quantile(sorted, 0.975)];
}

/** Latencies of two requests that one process served one after the other, one each way. */
interface WithinPair {
  through: number;
  past: number;
}

/** The pairs of one copy of which both requests fell due from `settle_s` on. Who begins each is told from the requests themselves. */
function withinPairs(through: readonly Sample[], past: readonly Sample[], settle_s: number): WithinPair[] {
  const all = [
    ...through.map(([due_s, ms]) => ({ due_s, ms, isPast: false })),
    ...past.map(([due_s, ms]) => ({ due_s, ms, isPast: true })),
  ].toSorted((a, b) => a.due_s - b.due_s);
  const pairs: WithinPair[] = [];
  for (let at = 0; at + 1 < all.length; at++) {
    const [one, other] = [all[at], all[at + 1]];
    if (!one || !other || one.isPast === other.isPast) continue;
    if (one.due_s >= settle_s)
      pairs.push(one.isPast ? { through: other.ms, past: one.ms } : { through: one.ms, past: other.ms });
    at++;
  }
  return pairs;
}

function withinOf(
  through: readonly (readonly Sample[])[],
  past: readonly (readonly Sample[])[],
  settle_s: number,
  seed: number,
): Within | null {
  const copies = through
    .map((samples, copy) => withinPairs(samples, past[copy] ?? [], settle_s))
    .filter((pairs) => pairs.length > 0);
  if (copies.length === 0) return null;
  const random = generator(seed);
  const draws = Array.from({ length: DRAWS }, () =>
    withinRatios(drawn(copies, random).map((pairs) => drawn(pairs, random))),
  );
  const interval = (key: keyof WithinRatios): Interval => intervalOf(draws.map((draw) => draw[key]));
  const { p50, p99, added_us } = withinRatios(copies);
  return {
    p50,
    p50_interval: interval("p50"),
    added_us,
    added_us_interval: interval("added_us"),
    p99,
    p99_interval: interval("p99"),
    pairs: copies.flat().length,
    copies: {
      through: copies.map((pairs) => p50Of(pairs, "through")),
      past: copies.map((pairs) => p50Of(pairs, "past")),
    },
  };
}

function p50Of(pairs: readonly WithinPair[], way: keyof WithinPair): number {
  return quantile(ascending(pairs.map((pair) => pair[way])), 0.5);
}

interface WithinRatios {
  p50: number;
  added_us: number;
  p99: number;
}

function withinRatios(copies: readonly (readonly WithinPair[])[]): WithinRatios {
  const all = copies.flat();
  const p99 = (way: keyof WithinPair): number =>
    quantile(
      ascending(
        copies.flatMap((pairs) => {
          const usual_ms = p50Of(pairs, "past");
          return pairs.map((pair) => pair[way] / usual_ms);
        }),
      ),
      0.99,
    );
  return {
    p50: median(all.map(({ through, past }) => through / past)),
    added_us: median(all.map(({ through, past }) => 1000 * (through - past))),
    p99: p99("through") / p99("past"),
  };
}

function samplesOf(pairs: readonly SoloPair[], kind: Kind): Sample[] {
  return pairs.flatMap(({ due_s, ms }): Sample[] => (ms[kind] === undefined ? [] : [[due_s, ms[kind]]]));
}

interface SoloRatios {
  p50: number;
  p99: number;
  paired: number;
}

/** NaN where there is nothing to compare. */
function soloRatios(pairs: readonly SoloPair[]): SoloRatios {
  const [bare = [], rigel = []] = KINDS.map((kind) => ascending(pairs.flatMap(({ ms }) => ms[kind] ?? [])));
  const over = (q: number): number => quantile(rigel, q) / quantile(bare, q);
  return { p50: over(0.5), p99: over(0.99), paired: median(pairs.flatMap(ratioOf)) };
}

/** As many as there are, with replacement. */
function drawn<Of>(from: readonly Of[], random: () => number): Of[] {
  return from.map((one) => from[Math.floor(random() * from.length)] ?? one);
}
