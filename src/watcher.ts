/**
 * watcher.ts: all live segments of a user, read once a second: the latest Stats of each, with rates, and what changed.
 *
 * One reading serves everybody who looks on, however many they are. Events, as /v1/events sends them (`event:` and, as JSON, `data:`):
 *   stats    { at, segments: Stats[], hangs: [{ segment, threshold_s, hung }] }  once a second, and to who begins to look on
 *   segment  { at, segment, state: "live" | "gone" }        a segment has appeared, or its last process has gone
 *   attach   { at, segment, client, class, pid }            a process has become a client
 *   exit     { at, segment, client, class, pid, state }     it has ended, is dead, or is gone, and nothing tells which
 *   hang     { at, segment, client, class, pid, rank, verdict, why }  it hangs (hangs.ts says what that is)
 *   slo      { at, segment, slo }                           the control loop has another target, holder or rung, gave up or recovered, or ended (null)
 * `segment` is Stats.segment.id, `at` the wall clock. Reads only, but that it runs the control loop of a segment where nobody else does.
 */

import { type ProcessContexts, contextsOf } from "./contexts.ts";
import { SegmentNumbers, metricsOf } from "./metrics.ts";
import type { Segments } from "./discover.ts";
import type { GpuShares } from "./gpu-share.ts";
import type { Native } from "./native.ts";
import { type Found, type Hangs, type Moment, hangsOf, keyOf, momentOf } from "./hangs.ts";
import type { Segment } from "./segment.ts";
import { LoopKeeper } from "./slo-loop.ts";
import { type Reading, type Stats, readingOf, statsOf } from "./stats.ts";

const INTERVAL_ms = 1000;
/** Rates over less than this say little. */
const SHORTEST_ms = 200;
/** One look at the segments serves all who ask within so long, so that many who ask cost clients no more of the processor than one. */
const FRESH_ms = 100;

/** A process that hangs: what of Found a list of them needs. */
export type Hung = Pick<Found, "name" | "class" | "pid" | "rank" | "verdict" | "seconds" | "why">;
/** Those of one segment; `segment` is Stats.segment.id. */
export interface SegmentHangs {
  segment: string;
  threshold_s: number;
  hung: Hung[];
}

export type Event =
  | { event: "stats"; data: { at: string; segments: Stats[]; hangs: SegmentHangs[] } }
  | { event: "segment"; data: { at: string; segment: string; state: "live" | "gone" } }
  | { event: "attach"; data: { at: string; segment: string; client: string; class: string; pid: number } }
  | { event: "exit"; data: { at: string; segment: string; client: string; class: string; pid: number; state: string } }
  | {
      event: "hang";
      data: { at: string; segment: string; client: string } & Pick<Hung, "class" | "pid" | "rank" | "verdict" | "why">;
    }
  | { event: "slo"; data: { at: string; segment: string; slo: Stats["slo"] } };

/** One look at all segments; what follows from it is worked out when it is first asked for. */
interface Look {
  at_ms: number;
  segments: readonly Segment[];
  readings?: Reading[];
  stats?: Stats[];
  hangs?: Hangs[];
  contexts?: ProcessContexts[];
  metrics?: string;
}

interface Seen {
  segment: Segment;
  /** The last one of the second, and the one before it. */
  reading: Reading;
  before: Reading | undefined;
  stats: Stats;
  /** Who does what, at this look and the one before it, and what follows from both. */
  moment: Moment;
  momentBefore: Moment | undefined;
  hangs: Hangs;
  /** Runs the control loop of its policy where nobody else does. */
  keeper: LoopKeeper;
}

export class Watcher implements Disposable {
  readonly #segments: Segments;
  readonly #hang_s: number;
  readonly #gpus: GpuShares;
  readonly #native: Native;
  readonly #listeners = new Set<(events: readonly Event[]) => void>();
  readonly #numbers = new SegmentNumbers();
  #seen = new Map<string, Seen>();
  #timer: ReturnType<typeof setInterval> | undefined;
  #look: Look | undefined;

  /** What waits for longer than `hang_s` hangs. */
  constructor(segments: Segments, hang_s: number, gpus: GpuShares, native: Native) {
    this.#native = native;
    this.#segments = segments;
    this.#hang_s = hang_s;
    this.#gpus = gpus;
  }

  /** Begins to read, at once and then every second. */
  start(): void {
    this.#tick();
    this.#timer = setInterval(() => this.#tick(), INTERVAL_ms);
  }

  [Symbol.dispose](): void {
    clearInterval(this.#timer);
    this.#listeners.clear();
    for (const { keeper } of this.#seen.values()) keeper.end();
  }

  /** Every segment as it is now; rates are over the last second or so. */
  now(): Stats[] {
    const look = this.#looked();
    look.readings ??= look.segments.map((segment) => readingOf(segment, this.#gpus));
    return (look.stats ??= look.readings.map((reading, index) => {
      const segment = look.segments[index];
      const seen = segment && this.#seen.get(segment.path);
      const known = seen?.segment === segment ? [seen?.reading, seen?.before] : [];
      return statsOf(
        reading,
        known.find((one) => one !== undefined && (reading.at_ns - one.at_ns) / 1e6 >= SHORTEST_ms),
      );
    }));
  }

  /** What Prometheus reads. */
  metrics(): string {
    const look = this.#looked();
    look.readings ??= look.segments.map((segment) => readingOf(segment, this.#gpus));
    look.hangs ??= this.#hangsIn(look.segments, this.#hang_s);
    const numbers = this.#numbers.of(look.readings.map(({ segment }) => segment));
    return (look.metrics ??= metricsOf(look.readings, look.hangs, numbers));
  }

  /** Contexts, threads and calls of every process. */
  contexts(): ProcessContexts[] {
    const look = this.#looked();
    return (look.contexts ??= look.segments.flatMap(contextsOf));
  }

  /** Something was changed: who asks next is to see it. */
  changed(): void {
    this.#look = undefined;
  }

  /** Who hangs in every segment, as of now. */
  hangs(threshold_s?: number): Hangs[] {
    const look = this.#looked();
    if (threshold_s !== undefined) return this.#hangsIn(look.segments, threshold_s);
    return (look.hangs ??= this.#hangsIn(look.segments, this.#hang_s));
  }

  #looked(): Look {
    const at_ms = performance.now();
    if (!this.#look || at_ms - this.#look.at_ms >= FRESH_ms) this.#look = { at_ms, segments: this.#segments.live() };
    return this.#look;
  }

  #hangsIn(segments: readonly Segment[], threshold_s: number): Hangs[] {
    return segments.map((segment) => {
      const seen = this.#seen.get(segment.path);
      const moment = momentOf(segment, threshold_s);
      const known = seen?.segment === segment ? [seen.moment, seen.momentBefore] : [];
      const before = known.find((one) => one !== undefined && (moment.at_ns - one.at_ns) / 1e6 >= SHORTEST_ms);
      return hangsOf(before ?? nothing(moment), moment, threshold_s);
    });
  }

  /** The segments themselves. */
  live(): Segment[] {
    return this.#segments.live();
  }

  /** Calls back with what happened in each second, and at once with what is there. Returns what ends that. */
  subscribe(listener: (events: readonly Event[]) => void): () => void {
    this.#listeners.add(listener);
    listener([this.#snapshot()]);
    return () => this.#listeners.delete(listener);
  }

  get subscribers(): number {
    return this.#listeners.size;
  }

  #snapshot(): Event {
    const segments = [...this.#seen.values()].map(({ stats }) => stats);
    const hangs = [...this.#seen.values()].map((seen) => hungOf(seen.stats.segment.id, seen.hangs));
    return { event: "stats", data: { at: new Date().toISOString(), segments, hangs } };
  }

  #tick(): void {
    const events: Event[] = [];
    const seen = new Map<string, Seen>();
    const at = new Date().toISOString();
    for (const segment of this.#segments.live()) {
      const last = this.#seen.get(segment.path);
      const known = last?.segment === segment ? last : undefined;
      const reading = readingOf(segment, this.#gpus);
      const stats = statsOf(reading, known?.reading);
      if (last && !known) events.push(...gone(at, last.stats));
      if (!known) events.push({ event: "segment", data: { at, segment: stats.segment.id, state: "live" } });
      events.push(...changes(at, stats, known?.stats));
      const moment = momentOf(segment, this.#hang_s);
      const hangs = hangsOf(known?.moment ?? nothing(moment), moment, this.#hang_s);
      events.push(...hangsBegun(at, stats.segment.id, hangs, known?.hangs));
      const keeper = known?.keeper ?? new LoopKeeper(segment, this.#native, false);
      seen.set(segment.path, {
        segment,
        reading,
        before: known?.reading,
        stats,
        moment,
        momentBefore: known?.moment,
        hangs,
        keeper,
      });
    }
    for (const [path, { segment, stats, keeper }] of this.#seen) {
      const still = seen.get(path);
      if (still?.segment !== segment) keeper.end();
      if (!still) events.push(...gone(at, stats));
    }
    this.#seen = seen;
    events.push(this.#snapshot());
    for (const listener of this.#listeners) listener(events);
  }
}

/** What is known before the first look. */
function nothing(moment: Moment): Moment {
  return { ...moment, processes: [] };
}

function hungOf(segment: string, { threshold_s, processes }: Hangs): SegmentHangs {
  const hung = processes
    .filter((found) => found.hung)
    .map(({ name, class: kind, pid, rank, verdict, seconds, why }) => ({
      name,
      class: kind,
      pid,
      rank,
      verdict,
      seconds,
      why,
    }));
  return { segment, threshold_s, hung };
}

function hangsBegun(at: string, segment: string, now: Hangs, before: Hangs | undefined): Event[] {
  const told = new Set(before?.processes.filter(({ hung }) => hung).map(keyOf));
  return now.processes
    .filter((found) => found.hung && !told.has(keyOf(found)))
    .map(({ name: client, class: kind, pid, rank, verdict, why }) => ({
      event: "hang",
      data: { at, segment, client, class: kind, pid, rank, verdict, why },
    }));
}

function gone(at: string, { segment, clients }: Stats): Event[] {
  return [
    ...clients.flatMap((client) =>
      client.processes.flatMap(({ pid, state }): Event[] =>
        state === "live"
          ? [
              {
                event: "exit",
                data: { at, segment: segment.id, client: client.name, class: client.class, pid, state: "gone" },
              },
            ]
          : [],
      ),
    ),
    { event: "segment", data: { at, segment: segment.id, state: "gone" } },
  ];
}

/** What has happened to the processes and the control loop of a segment since it was looked at before. */
export function changes(at: string, now: Stats, before: Stats | undefined): Event[] {
  const events: Event[] = [];
  const segment = now.segment.id;
  const earlier = new Map(
    before?.clients.flatMap((client) => client.processes.map((process) => [processKey(process), process.state])),
  );
  const still = new Set(now.clients.flatMap(({ processes }) => processes.map(processKey)));
  // The next process may have its slot by now, and nothing tells how it ended.
  for (const { name: client, class: kind, processes } of before?.clients ?? [])
    for (const process of processes)
      if (process.state === "live" && !still.has(processKey(process)))
        events.push({ event: "exit", data: { at, segment, client, class: kind, pid: process.pid, state: "gone" } });
  for (const { name: client, class: kind, processes } of now.clients)
    for (const process of processes) {
      const { pid, state } = process;
      const was = earlier.get(processKey(process));
      if (was === undefined) events.push({ event: "attach", data: { at, segment, client, class: kind, pid } });
      // Who came and went within the second, but not who was gone when watching began.
      if (state !== "live" && (was === undefined ? before !== undefined : was === "live"))
        events.push({ event: "exit", data: { at, segment, client, class: kind, pid, state } });
    }
  if (sloKey(now.slo) !== sloKey(before?.slo ?? null))
    events.push({ event: "slo", data: { at, segment, slo: now.slo } });
  return events;
}

/** Tells a process from the one that has its slot, or its number, next. */
function processKey({ slot, pid, attached_ms }: Stats["clients"][number]["processes"][number]): string {
  return `${slot} ${pid} ${attached_ms}`;
}

/** What makes it another state, not only other numbers. */
function sloKey(slo: Stats["slo"]): string {
  return slo === null ? "" : JSON.stringify([slo.target, slo.holder_pid, slo.rung, slo.unreachable]);
}
