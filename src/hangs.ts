/**
 * hangs.ts: who hangs, in what, and because of whom: decided from what every thread of every client waits in.
 *
 * `momentOf` looks at a segment, `hangsOf` decides from two looks a moment apart; the latter is pure. Being held back is no
 * hang: a best-effort client at the gate, or off the GPU, is named as that. A rank that waits for others is named with the rank that has not come.
 */

import { z } from "zod";
import { quoted } from "./log.ts";
import { startedAt_ticks, stateOf } from "./proc.ts";
import { ranOf, recordsOf, unfinishedOf, type Unfinished } from "./records.ts";
import type { Segment, Slot } from "./segment.ts";
import { type Communicator, type Thread, clockOf, communicatorsOf, rankOf, threadsLost, threadsOf } from "./threads.ts";

/** One process of a client, at one moment. */
export interface Observed {
  name: string;
  pid: number;
  slot: number;
  class: "high" | "best-effort";
  state: "live" | "ended" | "dead";
  /** It was stopped by a signal, or its heartbeat has ceased. */
  stopped: boolean;
  /** Its last sign of life. */
  beat_ns: number;
  /** RANK of its environment. */
  rank: number | null;
  /** What it has queued for the GPU. */
  issued: number;
  gate_wait_ns: number;
  suspended_ns: number;
  /** By `rigel pause`. */
  paused: boolean;
  /** For how long still; null: until it is resumed, or it is not paused. */
  paused_s: number | null;
  /** A high client that has unfinished work. */
  busy: boolean;
  threads: readonly Thread[];
  communicators: readonly Communicator[];
  /** What it launched and is not known to be finished. Looked for only where a thread has waited for long. */
  unfinished: Unfinished | null;
  /** For how long of its longest wait it could use the GPU; null: not known, or nobody has waited for long. */
  ran_ns: number | null;
  /** Communicators that are not followed: no room, or split off without blocking. */
  communicators_lost: number;
  /** Threads of which it is not known what they do, for want of room. */
  threads_lost: number;
}

export interface Moment {
  segment: string;
  at_ns: number;
  processes: readonly Observed[];
}

/**
 * working     something was launched, or is waited for not longer than the threshold
 * idle        no thread is in a call, and nothing was launched
 * gate        held at the gate, because high clients are busy, it is another's turn, or it is paused
 * suspended   taken off the GPU while high clients are busy
 * collective  waits for ranks that have not entered a collective, or entered another one
 * behind      a rank that others wait for so
 * synchronise waits for work that does not finish
 * call        a call of the driver or of NCCL does not return
 * stopped     by a signal, or its heartbeat has ceased: a hang once that lasts longer than the threshold
 * ended, dead
 */
const VERDICTS = [
  "working",
  "idle",
  "gate",
  "suspended",
  "collective",
  "behind",
  "synchronise",
  "call",
  "stopped",
  "ended",
  "dead",
] as const;
type Verdict = (typeof VERDICTS)[number];

/** The verdicts that can be a hang. */
export const HUNG = ["collective", "behind", "synchronise", "call", "stopped"] as const satisfies readonly Verdict[];
const hungVerdicts: ReadonlySet<Verdict> = new Set(HUNG);

const threadStateSchema = z.object({
  tid: z.int(),
  name: z.string(),
  /** The call that it is in, and for how long. */
  call: z.string().nullable(),
  seconds: z.number(),
  /** The last one that it finished, and how long ago that began. */
  last: z.object({ operation: z.string(), seconds_ago: z.number(), kernel: z.string().nullable() }).nullable(),
});
type ThreadState = z.infer<typeof threadStateSchema>;

/** A rank that others wait for, or that did something else. */
const otherRankSchema = z.object({
  rank: z.int(),
  pid: z.int().nullable(),
  /** Collectives of this communicator that it has entered; null: it never made it. */
  entered: z.int().nullable(),
  operation: z.string().nullable(),
});
type OtherRank = z.infer<typeof otherRankSchema>;

/** What is found of one process. */
const foundSchema = z.object({
  name: z.string(),
  pid: z.int(),
  class: z.enum(["high", "best-effort"]),
  rank: z.int().nullable(),
  verdict: z.enum(VERDICTS),
  hung: z.boolean(),
  /** How long it has been so, as far as known. */
  seconds: z.number(),
  /** In one sentence. */
  why: z.string(),
  /** The thread that shows it: the one that has waited longest, or did something last. */
  thread: threadStateSchema.nullable(),
  threads: z.array(threadStateSchema),
  /** What is not seen of it: threads for which there was no room, and communicators whose collectives are not counted. */
  threads_lost: z.int(),
  communicators_lost: z.int(),
  collective: z
    .object({
      operation: z.string(),
      number: z.int(),
      ranks: z.int(),
      missing: z.array(otherRankSchema),
      different: z.array(otherRankSchema),
    })
    .nullable(),
  unfinished: z
    .object({
      launches: z.int(),
      oldest: z.string(),
      oldest_seconds_ago: z.number(),
      newest: z.string(),
      at_least: z.boolean(),
    })
    .nullable(),
});
export type Found = z.infer<typeof foundSchema>;

/** What is found in one segment. */
const hangsSchema = z.object({
  schema: z.literal(1),
  segment: z.string(),
  at_ms: z.number(),
  threshold_s: z.number(),
  hung: z.int(),
  processes: z.array(foundSchema),
});
export type Hangs = z.infer<typeof hangsSchema>;

/** What `rigel hangs --json` prints and /v1/hangs answers: all segments. */
export const allHangsSchema = z.object({ schema: z.literal(1), hung: z.int(), segments: z.array(hangsSchema) });

/** See allHangsSchema. */
export function allHangs(segments: Hangs[]): z.infer<typeof allHangsSchema> {
  return { schema: 1, hung: segments.reduce((sum, { hung }) => sum + hung, 0), segments };
}

const AT_THE_GATE = new Set(["wait_high", "wait_turn"]);
const HELD = 0.5;

/** The same as long as it is one hang: what is told once. */
export function keyOf({ pid, verdict }: Found): string {
  return `${pid} ${verdict}`;
}

/* ---- looking ---- */

/** A look at a segment: some 100 us per process. `threshold_s` as for hangsOf. */
export function momentOf(segment: Segment, threshold_s: number): Moment {
  const clock = clockOf(segment);
  const at_ns = clock.now.ns;
  const clients = segment.table("clients");
  const stale_ms = segment.settings()["stale_ms"] ?? 1000;
  const busy = segment.highBusy;
  const processes = segment
    .slots()
    .filter(({ parent }) => parent === null)
    .map((slot): Observed => {
      const number = (field: string): number => Number(clients.long(slot.index, field));
      const threads = threadsOf(segment, slot, clock);
      const long = threads.some(({ waiting }) => waiting && at_ns - waiting.since_ns >= (threshold_s * 1e9) / 2);
      const beat_ns = number("heartbeat_ns");
      const records = long ? recordsOf(segment, slot, clock) : [];
      return {
        name: slot.name,
        pid: slot.pid,
        slot: slot.index,
        class: clients.word(slot.index, "class") === 1 ? "high" : "best-effort",
        state: slotState(segment, slot),
        stopped: !slot.finished && (at_ns - beat_ns > 2 * stale_ms * 1e6 || stateOf(slot.pid) === "T"),
        beat_ns,
        rank: rankOf(segment, slot),
        issued: segment.work(slot).launches + number("copies") + number("memsets"),
        gate_wait_ns: number("gate_wait_ns"),
        suspended_ns: number("suspended_ns"),
        ...pauseOf(segment.wanted(slot.name)?.paused_until_ns ?? 0, at_ns),
        busy: ((busy >> BigInt(slot.index)) & 1n) === 1n,
        threads,
        communicators: communicatorsOf(segment, slot, clock),
        unfinished: long ? unfinishedOf(records, threads) : null,
        // Without a recorder nothing tells when it was off the GPU.
        ran_ns: records.length > 0 && segment.settings()["trace"] !== 0 ? ranOf(records, threads, at_ns) : null,
        communicators_lost: number("communicators_lost"),
        threads_lost: threadsLost(segment, slot),
      };
    });
  return { segment: segment.path, at_ns, processes };
}

function slotState(segment: Segment, slot: Slot): Observed["state"] {
  // It may not have been cleared away yet.
  if (!slot.finished) return startedAt_ticks(slot.pid) === undefined ? "dead" : "live";
  return segment.table("clients").long(slot.index, "exited_ns") > 0n ? "ended" : "dead";
}

/* ---- deciding ---- */

/** What is found, from two looks at the same segment; `threshold_s` is how long a wait may last before it counts. */
export function hangsOf(before: Moment, now: Moment, threshold_s: number): Hangs {
  const limit_ns = threshold_s * 1e9;
  const awaited = awaitedRanks(now, limit_ns);
  const processes = now.processes.map((process) => {
    const earlier = before.processes.find(({ pid, slot }) => pid === process.pid && slot === process.slot);
    return found(process, earlier, { before, now, limit_ns, awaited });
  });
  return {
    schema: 1,
    segment: now.segment,
    at_ms: now.at_ns / 1e6,
    threshold_s,
    hung: processes.filter(({ hung }) => hung).length,
    processes,
  };
}

interface Context {
  before: Moment;
  now: Moment;
  limit_ns: number;
  /** By process number: the collective for which others have waited for it. */
  awaited: ReadonlyMap<number, { waiting: Observed; collective: NonNullable<Found["collective"]>; since_ns: number }>;
}

function longest(process: Observed): Thread | undefined {
  return process.threads
    .filter(({ waiting }) => waiting && waiting.operation !== "suspended")
    .toSorted((a, b) => (a.waiting?.since_ns ?? 0) - (b.waiting?.since_ns ?? 0))[0];
}

function hasHung(process: Observed, now: Moment, limit_ns: number): Thread | undefined {
  const thread = longest(process);
  return thread?.waiting && now.at_ns - thread.waiting.since_ns >= limit_ns ? thread : undefined;
}

function awaitedRanks(now: Moment, limit_ns: number): Context["awaited"] {
  const awaited = new Map<
    number,
    { waiting: Observed; collective: NonNullable<Found["collective"]>; since_ns: number }
  >();
  for (const waiting of now.processes) {
    const thread = waiting.state === "live" && !waiting.stopped ? hasHung(waiting, now, limit_ns) : undefined;
    const collective = thread ? collectiveOf(waiting, now) : null;
    if (!thread?.waiting || !collective) continue;
    for (const { pid } of collective.missing)
      if (pid !== null && !awaited.has(pid))
        awaited.set(pid, { waiting, collective, since_ns: thread.waiting.since_ns });
  }
  return awaited;
}

/** The latest collective of a process that another rank has not entered, or that is another one for it. */
function collectiveOf(process: Observed, now: Moment): Found["collective"] {
  for (const own of process.communicators.toSorted((a, b) => b.at_ns - a.at_ns)) {
    const ranks = now.processes.flatMap((other) =>
      other.communicators.filter(({ key }) => key === own.key).map((communicator) => ({ other, communicator })),
    );
    const missing: OtherRank[] = [];
    const different: OtherRank[] = [];
    for (let rank = 0; rank < own.size; rank++) {
      const there = ranks.find(({ communicator }) => communicator.rank === rank);
      const entered = there?.communicator.entered ?? null;
      const operation = there?.communicator.operation ?? null;
      const label = {
        rank: there?.other.rank ?? rank,
        pid: there?.other.pid ?? pidOfRank(now, rank, process),
        entered,
        operation,
      };
      if (entered === null || entered < own.entered) missing.push(label);
      else if (
        entered === own.entered &&
        own.entered > 0 &&
        there &&
        (operation !== own.operation || there.communicator.elements !== own.elements)
      )
        different.push(label);
    }
    if (missing.length > 0 || different.length > 0)
      return {
        operation: own.operation ?? "ncclCommInitRank",
        number: own.entered,
        ranks: own.size,
        missing,
        different,
      };
  }
  return null;
}

/** Of a rank that has not made the communicator: the process that says it is this rank, if the communicator is of all ranks. */
function pidOfRank(now: Moment, rank: number, asking: Observed): number | null {
  const same = now.processes.filter((one) => one.name === asking.name && one.rank === rank && one.pid !== asking.pid);
  return same.length === 1 ? (same[0]?.pid ?? null) : null;
}

function found(process: Observed, earlier: Observed | undefined, context: Context): Found {
  const { now, limit_ns } = context;
  const threads = process.threads.map((thread) => stateOfThread(thread, now.at_ns));
  const base = {
    name: process.name,
    pid: process.pid,
    class: process.class,
    rank: process.rank,
    threads,
    threads_lost: process.threads_lost,
    communicators_lost: process.communicators_lost,
    thread: null,
    collective: null,
    unfinished: null,
    seconds: 0,
  };
  const as = (verdict: Verdict, why: string, more: Partial<Found> = {}): Found => ({
    ...base,
    verdict,
    hung: hungVerdicts.has(verdict),
    why,
    ...more,
  });
  // Threads that only look after events, as PyTorch's watchdog does, tell nothing of what the program does.
  const recent = process.threads.toSorted(
    (a, b) => Number(b.launches > 0) - Number(a.launches > 0) || lastOf(b) - lastOf(a),
  )[0];
  const recentState = recent ? stateOfThread(recent, now.at_ns) : null;
  const did = recentState?.last
    ? `${recentState.last.operation} ${seconds(recentState.last.seconds_ago)} ago`
    : "nothing that is known";
  const awaited = context.awaited.get(process.pid);
  if (awaited && process.state !== "live") {
    return as(
      "behind",
      `is ${process.state === "dead" ? "dead" : "at its end"}; ${waitsFor(awaited)}, which it has not entered; it last did ${did}`,
      { thread: recentState, seconds: age(now, awaited.since_ns), collective: awaited.collective },
    );
  }
  if (process.state === "dead") return as("dead", `was killed; it last did ${did}`, { thread: recentState });
  if (process.state === "ended") return as("ended", "has ended by itself", { thread: recentState });
  if (process.stopped) {
    const why = `is stopped, by a signal or a debugger; it last did ${did}`;
    // Its heartbeat ceased when it was stopped.
    const since_s = age(now, process.beat_ns);
    return as("stopped", why, { thread: recentState, seconds: since_s, hung: since_s * 1e9 >= limit_ns });
  }
  const stuck = hasHung(process, now, limit_ns);
  if (awaited) {
    const waiting = longest(process)?.waiting;
    const doing = waiting
      ? `it is in ${waiting.operation} for ${seconds(age(now, waiting.since_ns))}`
      : "it is in no call of the driver: in the program's own code";
    return as("behind", `${waitsFor(awaited)}, which it has not entered; it last did ${did}; ${doing}`, {
      thread: waiting ? stateOfThread(longest(process) ?? process.threads[0] ?? never(), now.at_ns) : recentState,
      seconds: age(now, awaited.since_ns),
      collective: awaited.collective,
    });
  }
  const held = heldBack(process, earlier, context, stuck !== undefined);
  if (stuck?.waiting) {
    const thread = stateOfThread(stuck, now.at_ns);
    const more = { thread, seconds: thread.seconds };
    const { operation } = stuck.waiting;
    if (held) return as(held.verdict, held.why, more);
    const collective = collectiveOf(process, now);
    if (collective) {
      const named = isMade(operation) ? operation : `${collective.operation} ${collective.number}`;
      return as(
        "collective",
        `waits in ${operation}: ${absence(collective)} ${isMade(operation) ? "come to" : "entered"} ${named} of a communicator of ` +
          `${collective.ranks} ranks${differences(collective)}`,
        { ...more, collective },
      );
    }
    const unfinished = behindWhat(process.unfinished, now);
    const last = unfinished
      ? `; the oldest launch not known to be finished is ${unfinished.oldest}, ${seconds(unfinished.oldest_seconds_ago)} ago` +
        (unfinished.launches > 1 ? `, the last of ${unfinished.launches} is ${unfinished.newest}` : "")
      : "";
    if (isWait(operation))
      return as("synchronise", `waits in ${operation} for work that does not finish${last}`, { ...more, unfinished });
    return as("call", `${operation} does not return${last}`, { ...more, unfinished });
  }
  if (held) return as(held.verdict, held.why, { thread: recentState });
  const waiting = longest(process);
  const active = earlier === undefined || process.issued !== earlier.issued || calls(process) !== calls(earlier);
  if (waiting || active) {
    const thread = waiting ? stateOfThread(waiting, now.at_ns) : recentState;
    return as("working", active ? "is at work" : `is in ${thread?.call} since a moment ago`, { thread });
  }
  return as("idle", `is in no call of the driver: in the program's own code; it last did ${did}`, {
    thread: recentState,
    seconds: recentState?.last?.seconds_ago ?? 0,
  });
}

function never(): never {
  throw new Error("a thread that waits, in no list");
}

function pauseOf(until_ns: number, at_ns: number): Pick<Observed, "paused" | "paused_s"> {
  const left_s = (until_ns - at_ns) / 1e9;
  return { paused: left_s > 0, paused_s: left_s > 0 && Number.isFinite(left_s) ? left_s : null };
}

function pauseText({ name, paused_s }: Observed): string {
  return paused_s === null ? `until \`rigel resume ${quoted(name)}\`` : `for another ${seconds(paused_s)}`;
}

/** Held back by Rigel, at the moment or for most of the time between the two looks. */
function heldBack(
  process: Observed,
  earlier: Observed | undefined,
  { before, now, limit_ns }: Context,
  isStuck: boolean,
): { verdict: "gate" | "suspended"; why: string } | undefined {
  const interval_ns = Math.max(1, now.at_ns - before.at_ns);
  const part = (field: "gate_wait_ns" | "suspended_ns"): number =>
    earlier ? (process[field] - earlier[field]) / interval_ns : 0;
  const is = (operations: ReadonlySet<string>): boolean =>
    process.threads.some(({ waiting }) => waiting && operations.has(waiting.operation));
  const by = now.processes.filter(({ busy, pid }) => busy && pid !== process.pid).map(({ name }) => name);
  const whom = by.length > 0 ? ` while ${[...new Set(by)].join(", ")} ${by.length > 1 ? "are" : "is"} busy` : "";
  if (process.paused) return { verdict: "gate", why: `is paused ${pauseText(process)}: no hang` };
  // Who waits although it could use the GPU for so long is not held back by being taken off it between times.
  const ran_ns = isStuck ? process.ran_ns : null;
  if (ran_ns !== null && ran_ns < limit_ns)
    return {
      verdict: "suspended",
      why: `is kept off the GPU by Rigel${whom}, and could use it for ${seconds(ran_ns / 1e9)} since it waits: no hang`,
    };
  if (ran_ns === null && (is(new Set(["suspended"])) || part("suspended_ns") > HELD))
    return { verdict: "suspended", why: `is kept off the GPU by Rigel${whom}: no hang` };
  if (is(AT_THE_GATE) || part("gate_wait_ns") > HELD)
    return { verdict: "gate", why: `is held at Rigel's gate${whom}: no hang` };
  return undefined;
}

function behindWhat(unfinished: Unfinished | null, now: Moment): Found["unfinished"] {
  if (!unfinished) return null;
  return {
    launches: unfinished.launches,
    oldest: unfinished.oldest.kernel,
    oldest_seconds_ago: age(now, unfinished.oldest.at_ns),
    newest: unfinished.newest.kernel,
    at_least: unfinished.at_least,
  };
}

function calls(process: Observed): number {
  return process.threads.reduce((sum, thread) => sum + thread.launches + thread.calls, 0);
}

function lastOf(thread: Thread): number {
  return thread.waiting?.since_ns ?? thread.last?.at_ns ?? 0;
}

function isMade(operation: string): boolean {
  return operation.startsWith("ncclCommInit");
}

/** Calls that are there to wait, as a copy to memory that is not pinned is, also an asynchronous one; the others ought to return. */
function isWait(operation: string): boolean {
  return /Synchronize|^wait_inflight$|^cuMemcpy.*(DtoH|AtoH)(Async)?(_v2)?(_ptds|_ptsz)?$/.test(operation);
}

function waitsFor({
  waiting,
  collective,
}: {
  waiting: Observed;
  collective: NonNullable<Found["collective"]>;
}): string {
  const who = waiting.rank === null ? `${waiting.name} (${waiting.pid})` : `rank ${waiting.rank}`;
  return `${who} waits for it in ${collective.operation}${collective.number > 0 ? ` ${collective.number}` : ""}`;
}

function absence({ missing }: NonNullable<Found["collective"]>): string {
  if (missing.length === 0) return "all ranks have";
  const ranks = missing.map(({ rank }) => rank).join(", ");
  return missing.length === 1 ? `rank ${ranks} has not` : `ranks ${ranks} have not`;
}

function differences({ different }: NonNullable<Found["collective"]>): string {
  return different
    .map(({ rank, operation }) => `; for rank ${rank} that is another one, ${operation}: one was left out`)
    .join("");
}

function age(now: Moment, since_ns: number): number {
  return Math.max(0, Math.round((now.at_ns - since_ns) / 1e6) / 1000);
}

function stateOfThread(thread: Thread, at_ns: number): ThreadState {
  const ago = (since_ns: number): number => Math.max(0, Math.round((at_ns - since_ns) / 1e6) / 1000);
  return {
    tid: thread.tid,
    name: thread.name,
    call: thread.waiting?.operation ?? null,
    seconds: thread.waiting ? ago(thread.waiting.since_ns) : 0,
    last: thread.last
      ? { operation: thread.last.operation, seconds_ago: ago(thread.last.at_ns), kernel: thread.kernel }
      : null,
  };
}

/** A time for people. */
export function seconds(value: number): string {
  return value >= 100 ? `${Math.round(value)} s` : `${value.toFixed(1)} s`;
}
