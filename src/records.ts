/**
 * records.ts: the flight recorder of a client: its last operations, as its segment has them (native/trace.h), as plain data.
 *
 * The ring is read while the client writes it. A record that is being written, was left half-written by a kill, or was
 * overtaken, has words of different laps and is left out; what is returned was done, or, of what does not wait, begun.
 */

import { shortName } from "./kernel-name.ts";
import type { Segment, Slot } from "./segment.ts";
import { type Clock, type Thread, clockOf } from "./threads.ts";

/** RG_TRACE_KINDS in native/trace.h, without `none`. */
export const KINDS = [
  "launch",
  "graph",
  "copy",
  "memset",
  "sync",
  "event_sync",
  "gate",
  "suspension",
  "request",
  "alloc",
  "free",
  "collective",
  "call",
] as const;
export type Kind = (typeof KINDS)[number];

/** One operation of a client. */
export interface Operation {
  kind: Kind;
  /** The function that was called, or what Rigel did: a name of native/trace.h. */
  operation: string;
  /** 0: not a thread's own doing, a request. */
  tid: number;
  /** CLOCK_MONOTONIC. */
  at_ns: number;
  /** null: it returned at once, and its time was not measured. */
  duration_ns: number | null;
  /** Number of the stream among the client's; null where there is none, or too many. */
  stream: number | null;
  failed: boolean;
  /** A further piece of a wait that is counted as one. */
  continued: boolean;
  /** launch, graph: the name, short; null if the driver does not tell. */
  kernel: string | null;
  /** launch, graph: weight of the client's unfinished launches, in launches; only counted where the gate limits it. */
  inflight: number;
  /** As recorded: bytes of a copy, allocation; handle of what was waited for; see native/trace.h. */
  argument: number;
}

/** What the thread that takes a client off the GPU is in meanwhile: a name of native/trace.h. */
const SUSPENDED = "suspended";
const WORD_BITS = 52n;
const WORD = (1n << WORD_BITS) - 1n;
/** RG_RECORD_LAPS. */
const LAPS = 4095n;
const LAUNCH_WEIGHT = 1024;

/**
 * Whether a record of this lap is what was last recorded at this place of a ring of `size`, of which so many places have been taken in
 * all. Where a thread has taken the place and not come to it, it is one of the lap before; where somebody has come there since `taken`
 * was read, of the next. Pure.
 */
export function isLatest(lap: bigint, place: number, size: number, taken: number): boolean {
  const due = taken > place ? (BigInt(Math.floor((taken - 1 - place) / size)) % LAPS) + 1n : 0n;
  return lap === due || lap === (due % LAPS) + 1n;
}

/** The last operations of one process, in the order in which they began; `after_ns` leaves out what ended before. */
export function recordsOf(
  segment: Segment,
  slot: Slot,
  { now, at_ns }: Clock = clockOf(segment),
  after_ns = 0,
): Operation[] {
  const taken = recordsMade(segment, slot);
  const words = segment.table("traces").words(slot.index, "records");
  const names = segment.table("names");
  const { operations, kinds } = segment.vocabulary;
  const known = new Map<number, string>();
  const nameOf = (index: number): string | null => {
    if (index === 0) return null;
    const name = known.get(index) ?? shortName(names.text(index - 1, "name"));
    known.set(index, name);
    return name;
  };
  /** What is above the recorded bits is that of now, or one less. */
  const whole = (tick: bigint): bigint => {
    const same = (now.tick & ~WORD) | tick;
    return same > now.tick + (1n << 40n) ? same - (1n << WORD_BITS) : same;
  };
  const found: { operation: Operation; age: number }[] = [];
  const size = words.length / 4;
  for (let first = 0; first < words.length; first += 4) {
    const [time = 0n, what = 0n, argument = 0n, ticks = 0n] = words.subarray(first, first + 4);
    const lap = time >> WORD_BITS;
    if (lap === 0n || what >> WORD_BITS !== lap || argument >> WORD_BITS !== lap || ticks >> WORD_BITS !== lap)
      continue;
    if (!isLatest(lap, first / 4, size, taken)) continue;
    const marks = Number(what & WORD);
    const at = (shift: number, bits: number): number => Math.floor(marks / 2 ** shift) % 2 ** bits;
    const kind = KINDS.find((name) => name === kinds[at(10, 6)]);
    if (!kind) continue;
    const begin = whole(time & WORD);
    const end = begin + (ticks & WORD);
    const begin_ns = at_ns(begin);
    const end_ns = at_ns(end);
    if (end_ns < after_ns) continue;
    const value = Number(argument & WORD);
    const named = kind === "launch" || kind === "graph";
    const operation = {
      kind,
      operation: operations[at(0, 10)] ?? `operation ${at(0, 10)}`,
      tid: at(16, 22),
      at_ns: begin_ns,
      duration_ns: end === begin ? null : end_ns - begin_ns,
      stream: at(38, 8) === 0 ? null : at(38, 8) - 1,
      failed: at(46, 1) === 1,
      continued: at(47, 1) === 1,
      kernel: named ? nameOf(value % 65_536) : null,
      inflight: named ? Math.floor(value / 65_536) / LAUNCH_WEIGHT : 0,
      argument: value,
    };
    found.push({ operation, age: (((taken - 1 - first / 4) % size) + size) % size });
  }
  found.sort((a, b) => a.operation.at_ns - b.operation.at_ns || b.age - a.age);
  return spread(found.map(({ operation }) => operation));
}

/** What a program takes for a launch at most, mostly. */
const LAUNCH_NS = 20_000;

/**
 * Some launches of a thread that follow one another have the time of the first of them (RG_TIMED in native/client.h): puts them between
 * it and what came next. In the order of their times, as is the answer. Pure.
 */
export function spread(operations: readonly Operation[]): Operation[] {
  const alike = new Map<number, Operation[]>();
  const moved: Operation[] = [];
  const settle = (group: readonly Operation[], until_ns: number): void => {
    const step_ns = Math.min((until_ns - (group[0]?.at_ns ?? 0)) / group.length, LAUNCH_NS);
    for (const [i, operation] of group.entries())
      moved.push(i === 0 ? operation : { ...operation, at_ns: operation.at_ns + Math.floor(i * step_ns) });
  };
  for (const operation of operations) {
    const { tid, at_ns, kind } = operation;
    const group = alike.get(tid) ?? [];
    const launches = kind === "launch";
    if (group.length > 0 && !(launches && group[0]?.at_ns === at_ns)) settle(group.splice(0), at_ns);
    (launches ? group : moved).push(operation);
    alike.set(tid, group);
  }
  for (const group of alike.values()) settle(group, group[0]?.at_ns ?? 0); // nothing came next
  return moved.toSorted((a, b) => a.at_ns - b.at_ns);
}

/** Whether its stream (of null, every one) had nothing left to do when it returned. One of which nothing is known, as it had no work, says nothing of others. */
export function waitsForWork({ kind, operation, stream, duration_ns, failed }: Operation): boolean {
  if (stream === null && (kind === "copy" || operation.startsWith("cuStreamSynchronize"))) return false;
  return (kind === "sync" || (kind === "copy" && duration_ns !== null)) && !failed;
}

/** Launches of a process that are not known to be finished. */
export interface Unfinished {
  launches: number;
  oldest: { kernel: string; at_ns: number };
  newest: { kernel: string; at_ns: number };
  /** Older ones may have left the ring. */
  at_least: boolean;
}

/**
 * What a process waits behind: its launches since it last knew that their stream was done, by a wait for the stream, or for
 * everything, that had returned. Where it is known which stream a thread waits for, only that one counts. Streams that the
 * program tells apart by events alone are not known to be done, so the oldest is a bound: nothing before it is unfinished. Pure.
 */
export function unfinishedOf(operations: readonly Operation[], threads: readonly Thread[]): Unfinished | null {
  const done = new Map<number | null, number>();
  const streamOf = new Map<string, number>();
  for (const operation of operations) {
    const { kind, stream, at_ns, argument } = operation;
    if (!waitsForWork(operation)) continue;
    done.set(stream, at_ns);
    if (kind === "sync" && stream !== null) streamOf.set(`0x${argument.toString(16)}`, stream);
  }
  const waiting = threads
    .flatMap((thread) => (thread.waiting ? { ...thread.waiting } : []))
    .toSorted((a, b) => a.since_ns - b.since_ns)[0];
  const only = waiting === undefined || waiting.object === null ? undefined : streamOf.get(waiting.object);
  const everything = done.get(null) ?? 0;
  const launches = operations.filter(
    ({ kind, stream, at_ns, failed }) =>
      (kind === "launch" || kind === "graph") &&
      !failed &&
      (only === undefined || stream === only) &&
      at_ns > Math.max(everything, done.get(stream) ?? 0),
  );
  const [oldest] = launches;
  const newest = launches.at(-1);
  if (!oldest || !newest) return null;
  const named = ({ kernel, operation, at_ns }: Operation): { kernel: string; at_ns: number } => ({
    kernel: kernel ?? operation,
    at_ns,
  });
  return {
    launches: launches.length,
    oldest: named(oldest),
    newest: named(newest),
    at_least: oldest === operations[0],
  };
}

/**
 * For how long of the longest wait of its threads a process could use the GPU: without the time for which it was taken off it. Where
 * the records do not go back to the wait's beginning, at the rate since then; null: no thread waits. Pure.
 */
export function ranOf(operations: readonly Operation[], threads: readonly Thread[], now_ns: number): number | null {
  const since = (of: (operation: string) => boolean): number[] =>
    threads.flatMap(({ waiting }) => (waiting && of(waiting.operation) ? waiting.since_ns : []));
  const waits = since((operation) => operation !== SUSPENDED);
  if (waits.length === 0) return null;
  const begin_ns = Math.min(...waits);
  const from_ns = Math.max(begin_ns, operations[0]?.at_ns ?? 0);
  const off = [
    ...operations.flatMap(({ kind, at_ns, duration_ns }) =>
      kind === "suspension" ? [{ at_ns, until_ns: at_ns + (duration_ns ?? 0) }] : [],
    ),
    ...since((operation) => operation === SUSPENDED).map((at_ns) => ({ at_ns, until_ns: now_ns })),
  ].map(({ at_ns, until_ns }) => Math.max(0, Math.min(until_ns, now_ns) - Math.max(at_ns, from_ns)));
  const seen_ns = now_ns - from_ns;
  if (seen_ns <= 0) return now_ns - begin_ns;
  return (now_ns - begin_ns) * Math.max(0, 1 - off.reduce((sum, one) => sum + one, 0) / seen_ns);
}

/** Records that one process ever made, and places that its threads have taken for more: more than are kept, mostly. */
export function recordsMade(segment: Segment, slot: Slot): number {
  return Number(segment.table("clients").long(slot.index, "records"));
}
