/**
 * record-rhythm.ts: where one request or iteration of a program ends and the next begins, and whether the program is past its
 * warm-up, from what it launched and when it waited. Pure.
 *
 * Three signs, in this order: the program says so (rigel_report_request); it waits for all it has launched; or, for loops that
 * never wait, what it launches repeats. A sign counts once requests by it launch the same thing again and again.
 */

import { SOURCE } from "./recording.ts";

/** A request has ended after so many launches. */
export interface End {
  source: number;
  position: number;
  at_ns: number;
  latency_ns: number;
}

export interface Rhythm {
  by: "reports" | "waits" | "repetition";
  /** By repetition: launches of one iteration. */
  period: number;
}

/** As many requests are compared. */
const COMPARED = 10;
/** As often has a loop to have repeated itself. */
const REPEATS = 3;

/** What repeats counts before requests of which only most are alike, if it is so much of all that was launched. */
const MOSTLY = 0.9;

/** The longest end of a sequence that repeats itself at least three times, and after how many. */
export function repetition(tokens: ArrayLike<number>): { period: number; length: number } | undefined {
  const n = tokens.length;
  const at = (index: number): number => tokens[n - 1 - index] ?? 0;
  // Of the reversed sequence: the longest proper prefix of each prefix that is also its end (Knuth, Morris, Pratt).
  const border = new Int32Array(n + 1);
  for (let length = 1, matched = 0; length < n; length++) {
    while (matched > 0 && at(matched) !== at(length)) matched = border[matched] ?? 0;
    if (at(matched) === at(length)) matched++;
    border[length + 1] = matched;
  }
  for (let length = n; length >= REPEATS; length--) {
    const period = length - (border[length] ?? 0);
    if (period * REPEATS <= length) return { period, length };
  }
  return undefined;
}

/** What each request launched, folded into a number, with the request's end; empty ones are left out. */
export function requestsBy(
  tokens: ArrayLike<number>,
  ends: readonly End[],
): { end: End; hash: number; from: number }[] {
  const requests: { end: End; hash: number; from: number }[] = [];
  let from = 0;
  for (const end of ends) {
    if (end.position <= from) continue;
    let hash = 17;
    for (let index = from; index < end.position; index++) hash = (Math.imul(hash, 31) + (tokens[index] ?? 0)) | 0;
    requests.push({ end, hash, from });
    from = end.position;
  }
  return requests;
}

/** What part of the last ten launched what most of them did; 0 while there are fewer than `least`. */
function alike(requests: readonly { hash: number }[], least: number): number {
  if (requests.length < least) return 0;
  const counts = new Map<number, number>();
  for (const { hash } of requests.slice(-COMPARED)) counts.set(hash, (counts.get(hash) ?? 0) + 1);
  return Math.max(...counts.values()) / Math.min(COMPARED, requests.length);
}

/** The rhythm of what was launched so far; undefined where it has none yet. `least`: requests that a sign takes. */
export function rhythmOf(tokens: ArrayLike<number>, ends: readonly End[], least = COMPARED): Rhythm | undefined {
  const reported = requestsBy(
    tokens,
    ends.filter(({ source }) => source === SOURCE.reported),
  );
  if (alike(reported, least) === 1) return { by: "reports", period: 0 };
  const waited = requestsBy(
    tokens,
    ends.filter(({ source }) => source !== SOURCE.reported),
  );
  if (reported.length === 0 && alike(waited, least) === 1) return { by: "waits", period: 0 };
  // A program that runs ahead reports an iteration in the middle of another.
  const repeated = repetition(tokens);
  if (repeated && repeated.length >= MOSTLY * tokens.length) return { by: "repetition", period: repeated.period };
  if (alike(reported, least) >= 0.5) return { by: "reports", period: 0 };
  if (repeated) return { by: "repetition", period: repeated.period };
  return alike(waited, least) >= 0.5 ? { by: "waits", period: 0 } : undefined;
}

/** The middle one, or 0 of none. */
export function median(values: readonly number[]): number {
  return values.toSorted((a, b) => a - b)[values.length >> 1] ?? 0;
}

/** Requests that are compared for drift: so many against the so many before them. */
export const DRIFT_OF = 5;
const DRIFT = 0.1;
/** Latencies of an open loop never settle: after so many that launch the same, they do not count. */
const DRIFT_AT_MOST = 60;

/** Whether request durations no longer move in one direction: the last ones take about what those before them did. */
export function settled(latencies_ns: readonly number[]): boolean {
  if (latencies_ns.length >= DRIFT_AT_MOST) return true;
  if (latencies_ns.length < 2 * DRIFT_OF) return false;
  const last = median(latencies_ns.slice(-DRIFT_OF));
  const before = median(latencies_ns.slice(-2 * DRIFT_OF, -DRIFT_OF));
  return Math.abs(last - before) <= DRIFT * before;
}
