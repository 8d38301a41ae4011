/**
 * tally.ts: what each client has done, added up over its processes.
 *
 * A process that takes the slot of a finished one of the same client counts on in it, so the slots hold everything.
 */

import { EVENTS, type GuardEvent, type GuardMode } from "./cublas-guard.ts";
import type { Segment, Slot, SlotUsage } from "./segment.ts";
import { type Usage, combine, nothing } from "./usage.ts";

/** What one client has done up to one moment. */
interface Total {
  usage: Usage;
  /** Its first launch; infinite until then. */
  first_ns: number;
  /** When the last of its processes ended; undefined while one lives that has launched something. */
  last_ns: number | undefined;
  guard_mode: GuardMode;
  /** The last ones of all its processes. */
  guard_events: GuardEvent[];
  /** Its processes that have a slot. */
  processes: (Slot & SlotUsage)[];
}

/** By client name. */
export type Snapshot = ReadonlyMap<string, Total>;

/** Everything that was counted up to now. */
export function snapshotOf(segment: Segment): Snapshot {
  const totals = new Map<string, Total>();
  for (const slot of segment.slots()) {
    const read = segment.read(slot);
    const { usage, first_launch_ns, ended_ns, guard_mode, guard_events } = read;
    const launched = first_launch_ns > 0;
    const total = totals.get(slot.name) ?? {
      usage: nothing(segment.histogram),
      first_ns: Number.POSITIVE_INFINITY,
      last_ns: 0,
      guard_mode: null,
      guard_events: [],
      processes: [],
    };
    const lives = total.last_ns === undefined || (launched && ended_ns === undefined);
    totals.set(slot.name, {
      usage: combine(total.usage, usage, 1),
      first_ns: launched ? Math.min(total.first_ns, first_launch_ns) : total.first_ns,
      last_ns: lives ? undefined : Math.max(total.last_ns ?? 0, launched ? (ended_ns ?? 0) : 0),
      guard_mode: guard_mode ?? total.guard_mode,
      guard_events: [...total.guard_events, ...guard_events].slice(-EVENTS),
      processes: [...total.processes, { ...slot, ...read }],
    });
  }
  return totals;
}

/** What a client did between two snapshots; `from` undefined is since its beginning. */
export function usageOf(segment: Segment, name: string, from: Snapshot | undefined, to: Snapshot): Usage {
  const after = to.get(name)?.usage ?? nothing(segment.histogram);
  const before = from?.get(name)?.usage;
  return before ? combine(after, before, -1) : after;
}

/** The guard's mode and last events up to a snapshot. */
export function guardOf(name: string, snapshot: Snapshot): { mode: GuardMode; events: GuardEvent[] } {
  const { guard_mode, guard_events } = snapshot.get(name) ?? {};
  return { mode: guard_mode ?? null, events: guard_events ?? [] };
}

/** Seconds from a client's first launch until the last process that launched something ended; undefined while one lives. */
export function lifetime_s(name: string, snapshot: Snapshot): number | undefined {
  const { first_ns, last_ns } = snapshot.get(name) ?? {};
  if (first_ns === undefined || last_ns === undefined || last_ns <= first_ns) return undefined;
  return (last_ns - first_ns) / 1e9;
}
