/**
 * trace.ts: writes what the flight recorders of a segment hold as a trace that Perfetto opens.
 *
 * The format is Chrome's "Trace Event Format" (JSON object form): a process for each process of a client, a track for each
 * thread. Calls and waits are complete events (X), requests asynchronous ones (b, e), what is queued a counter (C), names metadata (M);
 * a flow (s, f) leads from the launch that a wait is for to the wait. A launch that returned at once has no duration that was
 * measured, and is drawn with a nanosecond. What a thread is still in when the trace is
 * written ends there and says so (args.unfinished).
 * Written one client's process after the other and in pieces: what is kept is one ring, however many clients there are.
 */

import { once } from "node:events";
import { RigelError } from "./errors.ts";
import { WholeFile } from "./output.ts";
import { type Operation, recordsMade, recordsOf, waitsForWork } from "./records.ts";
import type { Segment, Slot } from "./segment.ts";
import { type Clock, type Thread, clockOf, threadsOf } from "./threads.ts";

export interface TraceOptions {
  /** Only these clients' processes: a client's name, also that of one that threads have entered, or a process number. Without it all. */
  client?: string | undefined;
  /** Only what ended within so many seconds of the last thing that happened. */
  last_s?: number | undefined;
}

/** What a trace holds: events of each process, and how many records it ever made, or a few more; a ring keeps the last 4096 of them. */
interface TraceSummary {
  schema: 1;
  path: string;
  clients: { name: string; pid: number; segment: string; events: number; recorded: number }[];
  events: number;
}

type Event = Record<string, unknown>;

/** One process, with the clock of its segment. */
interface Chosen {
  segment: Segment;
  slot: Slot;
  clock: Clock;
}

const PIECE = 64 * 1024;

/** The text of a trace of these segments, in pieces. Throws at once if there is no such client. */
export function tracePieces(segments: readonly Segment[], options: TraceOptions = {}): Generator<string> {
  return piecesOf(chosenOf(segments, options), options, []);
}

/** Writes a trace of these segments to `path`. Throws if there is no such client, or the file cannot be written. */
export async function writeTrace(
  segments: readonly Segment[],
  path: string,
  options: TraceOptions = {},
): Promise<TraceSummary> {
  const clients: TraceSummary["clients"] = [];
  const pieces = piecesOf(chosenOf(segments, options), options, clients);
  await using file = new WholeFile(path, { mode: 0o600 });
  for (const piece of pieces) await file.write(piece);
  await file.finish();
  return { schema: 1, path, clients, events: clients.reduce((sum, { events }) => sum + events, 0) };
}

/** The same on standard output; undefined: whoever read it has gone before its end, or there is no room for it. */
export async function printTrace(
  segments: readonly Segment[],
  options: TraceOptions = {},
): Promise<TraceSummary | undefined> {
  const clients: TraceSummary["clients"] = [];
  let closed = false;
  const { promise, resolve: close } = Promise.withResolvers<void>();
  process.stdout.on("error", () => {
    closed = true;
    close();
  });
  for (const piece of piecesOf(chosenOf(segments, options), options, clients)) {
    if (closed) break;
    if (!process.stdout.write(piece))
      await Promise.race([once(process.stdout, "drain").catch(() => undefined), promise]);
  }
  if (closed) return undefined;
  return { schema: 1, path: "-", clients, events: clients.reduce((sum, { events }) => sum + events, 0) };
}

function chosenOf(segments: readonly Segment[], { client }: TraceOptions): Chosen[] {
  const all = segments.flatMap((segment) => {
    const clock = clockOf(segment);
    return segment.slots().map((slot) => ({ segment, slot, clock }));
  });
  const meant = all.filter(({ slot: { name, pid } }) => [undefined, name, String(pid)].includes(client));
  // Clients that threads have entered are drawn with their process, which has the record.
  const chosen = all.filter(({ segment, slot }) =>
    meant.some((one) => one.segment === segment && (one.slot.parent ?? one.slot.index) === slot.index),
  );
  if (chosen.length === 0) {
    const names = [...new Set(all.map(({ slot }) => slot.name))];
    throw new RigelError(
      "no_client",
      names.length === 0
        ? "nothing runs under Rigel; start clients with `rigel launch` first"
        : `no client ${client} runs under Rigel; there are ${names.join(", ")}`,
    );
  }
  return chosen;
}

/** Adds to `clients` what was written of each. */
function* piecesOf(
  chosen: readonly Chosen[],
  { last_s }: TraceOptions,
  clients: TraceSummary["clients"],
): Generator<string> {
  const after_ns = last_s === undefined ? 0 : latest(chosen) - last_s * 1e9;
  let text = `{"displayTimeUnit":"ms","otherData":{"producer":"rigel"},"traceEvents":[`;
  let first = true;
  for (const one of chosen) {
    let events = 0;
    for (const event of eventsOf(one, after_ns)) {
      text += `${first ? "" : ","}\n${JSON.stringify(event)}`;
      first = false;
      events++;
      if (text.length > PIECE) {
        yield text;
        text = "";
      }
    }
    const { segment, slot } = one;
    const { name, pid } = slot;
    clients.push({ name, pid, segment: segment.path, events, recorded: recordsMade(segment, slot) });
  }
  yield `${text}\n]}\n`;
}

/** When the last thing of these processes happened: of dead ones that is a while ago. */
function latest(chosen: readonly Chosen[]): number {
  const live = chosen.find(({ slot }) => !slot.finished);
  if (live) return live.clock.now.ns;
  const ends = chosen.flatMap(({ segment, slot, clock }) => recordsOf(segment, slot, clock).map(endOf));
  return ends.reduce((last, end) => Math.max(last, end), 0);
}

function endOf({ at_ns, duration_ns }: Operation): number {
  return at_ns + (duration_ns ?? 0);
}

/** Microseconds, to the nanosecond. */
function us(ns: number): number {
  return Math.round(ns) / 1000;
}

function* eventsOf(chosen: Chosen, after_ns: number): Generator<Event> {
  const { segment, slot, clock } = chosen;
  const { pid } = slot;
  const all = recordsOf(segment, slot, clock);
  const operations = all.filter((one) => endOf(one) >= after_ns);
  const threads = threadsOf(segment, slot, clock);
  yield { ph: "M", name: "process_name", pid, tid: 0, args: { name: `${slot.name} (${pid})` } };
  yield { ph: "M", name: "process_sort_index", pid, tid: 0, args: { sort_index: slot.index } };
  const named = new Map(threads.map(({ tid, name }) => [tid, name]));
  for (const tid of new Set([...operations.map((one) => one.tid), ...named.keys()]))
    if (tid !== 0) yield { ph: "M", name: "thread_name", pid, tid, args: { name: named.get(tid) || `thread ${tid}` } };
  const ends = new Set(operations.flatMap((one) => (one.kind === "request" && isOver(one) ? requestId(one, pid) : [])));
  for (const operation of operations) {
    if (operation.kind === "request") yield* requestEvents(operation, slot, ends);
    else yield* callEvents(operation, pid);
  }
  yield* depthEvents(all, pid, after_ns);
  yield* flowEvents(operations, pid);
  const until_ns = latest([chosen]);
  for (const thread of threads) yield* waitEvents(thread, pid, until_ns);
}

const isOver = ({ argument }: Operation): boolean => Math.floor(argument / 256) % 256 === 1;

/** Each client that threads have entered counts its own; they are told apart by when they began, which the end of one says too. */
function requestId({ argument, at_ns }: Operation, pid: number): string {
  return `${pid}-${argument % 256}-${Math.floor(argument / 65_536)}-${Math.round(at_ns)}`;
}

/** A request is written whole at its end; at its beginning, only if the end is not there. */
function* requestEvents(operation: Operation, { pid, finished }: Slot, ends: ReadonlySet<string>): Generator<Event> {
  const id = requestId(operation, pid);
  const number = Math.floor(operation.argument / 65_536);
  const common = { cat: "request", name: "request", id, pid, tid: 0 };
  const args = { request: number, device: operation.argument % 256 };
  if (isOver(operation)) {
    yield { ph: "b", ts: us(operation.at_ns), ...common, args };
    yield { ph: "e", ts: us(endOf(operation)), ...common };
  } else if (!ends.has(id)) {
    yield { ph: "b", ts: us(operation.at_ns), ...common, args: { ...args, unfinished: true } };
    yield { ph: "e", ts: us(operation.at_ns), ...common, args: { unfinished: true, ended: finished } };
  }
}

function* callEvents(operation: Operation, pid: number): Generator<Event> {
  const { kind, tid, at_ns, duration_ns, kernel, stream, failed, continued, argument } = operation;
  const sized = kind === "copy" || kind === "memset" || kind === "alloc" || kind === "free";
  const waited = kind === "sync" || kind === "event_sync";
  yield {
    ph: "X",
    cat: kind,
    name: kernel ?? operation.operation,
    ts: us(at_ns),
    // Not nothing, or no flow could begin in it.
    dur: us(duration_ns ?? 1),
    pid,
    tid,
    args: {
      call: operation.operation,
      ...(stream !== null && { stream }),
      ...(sized && { bytes: argument }),
      ...(waited && argument > 0 && { object: `0x${argument.toString(16)}` }),
      ...(duration_ns === null && { measured: false }),
      ...(failed && { failed }),
      ...(continued && { continued }),
    },
  };
}

/**
 * How long the queues are: launches that no wait has covered yet, and, where the gate counts it, the weight of what is not known to be
 * finished. Of the first, what was launched before the oldest record is not known.
 */
function* depthEvents(operations: readonly Operation[], pid: number, after_ns: number): Generator<Event> {
  const launched = new Map<number | null, number>();
  const covered = new Map<number | null, number>();
  const depth = (): number =>
    [...launched].reduce((sum, [stream, count]) => sum + count - Math.min(count, covered.get(stream) ?? 0), 0);
  const steps = operations.flatMap((operation): { at_ns: number; act: () => number | undefined }[] => {
    const { kind, stream, at_ns, failed } = operation;
    if ((kind === "launch" || kind === "graph") && !failed)
      return [
        {
          at_ns,
          act: () => {
            launched.set(stream, (launched.get(stream) ?? 0) + 1);
            return operation.inflight;
          },
        },
      ];
    if (!waitsForWork(operation)) return [];
    // What is launched while it waits is not covered.
    let then: [number | null, number][] = [];
    return [
      {
        at_ns,
        act: () => {
          then = [...launched].filter(([key]) => stream === null || key === stream);
          return undefined;
        },
      },
      {
        at_ns: endOf(operation),
        act: () => {
          for (const [key, count] of then) covered.set(key, Math.max(covered.get(key) ?? 0, count));
          return undefined;
        },
      },
    ];
  });
  let shown = { depth: 0, inflight: 0 };
  for (const { at_ns, act } of steps.toSorted((a, b) => a.at_ns - b.at_ns)) {
    const now = { inflight: act() ?? shown.inflight, depth: depth() };
    const event = (name: string, launches: number): Event => ({
      ph: "C",
      name,
      pid,
      tid: 0,
      ts: us(at_ns),
      args: { launches },
    });
    if (at_ns >= after_ns && now.depth !== shown.depth) yield event("not waited for", now.depth);
    if (at_ns >= after_ns && now.inflight !== shown.inflight) yield event("in flight", now.inflight);
    shown = now;
  }
}

/** From the newest launch before a wait, on the stream that is waited for where that is known, to the wait. */
function* flowEvents(operations: readonly Operation[], pid: number): Generator<Event> {
  const newest = new Map<number | null, Operation>();
  let flows = 0;
  for (const operation of operations) {
    const { kind, stream, tid, at_ns } = operation;
    if (kind === "launch" || kind === "graph") for (const key of [stream, null]) newest.set(key, operation);
    if (!waitsForWork(operation)) continue;
    const launch = newest.get(stream);
    // Who waits again waits for nothing new.
    newest.delete(stream);
    if (!launch) continue;
    const common = { cat: "wait", name: "waited for", id: `${pid}-${flows++}`, pid };
    yield { ph: "s", ts: us(launch.at_ns), tid: launch.tid, ...common };
    yield { ph: "f", bp: "e", ts: us(at_ns), tid, ...common };
  }
}

/** What a thread is in: not recorded yet, as it has not returned. */
function* waitEvents({ tid, waiting }: Thread, pid: number, until_ns: number): Generator<Event> {
  if (!waiting || waiting.since_ns >= until_ns) return;
  yield {
    ph: "X",
    cat: "unfinished",
    name: waiting.operation,
    ts: us(waiting.since_ns),
    dur: us(until_ns - waiting.since_ns),
    pid,
    tid,
    args: { call: waiting.operation, unfinished: true, ...(waiting.object !== null && { object: waiting.object }) },
  };
}
