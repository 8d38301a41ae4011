/**
 * tally.ts: what each client has done, added up over its processes.
 *
 * A process that takes the slot of a finished one of the same client counts on in it, so the slots hold everything.
 */

import type { Segment } from "./segment.ts";
import { type Usage, combine, nothing } from "./usage.ts";

/** What one client has done up to one moment. */
interface Total {
  usage: Usage;
  /** Its first launch; infinite until then. */
  first_ns: number;
  /** When the last of its processes ended; undefined while one lives that has launched something. */
  last_ns: number | undefined;
}

/** By client name. */
export type Snapshot = ReadonlyMap<string, Total>;

/** Everything that was counted up to now. */
export function snapshotOf(segment: Segment): Snapshot {
  const totals = new Map<string, Total>();
  for (const slot of segment.slots()) {
    const { usage, first_launch_ns, ended_ns } = segment.read(slot);
    const launched = first_launch_ns > 0;
    const total = totals.get(slot.name) ?? {
      usage: nothing(segment.histogram),
      first_ns: Number.POSITIVE_INFINITY,
      last_ns: 0,
    };
    const lives = total.last_ns === undefined || (launched && ended_ns === undefined);
    totals.set(slot.name, {
      usage: combine(total.usage, usage, 1),
      first_ns: launched ? Math.min(total.first_ns, first_launch_ns) : total.first_ns,
      last_ns: lives ? undefined : Math.max(total.last_ns ?? 0, launched ? (ended_ns ?? 0) : 0),
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

/** Seconds from a client's first launch until the last process that launched something ended; undefined while one lives. */
export function lifetime_s(name: string, snapshot: Snapshot): number | undefined {
  const { first_ns, last_ns } = snapshot.get(name) ?? {};
  if (first_ns === undefined || last_ns === undefined || last_ns <= first_ns) return undefined;
  return (last_ns - first_ns) / 1e9;
}
