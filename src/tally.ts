/**
 * tally.ts: what each client has done in all its processes, also in those whose slot of the segment has been taken over.
 *
 * The segment keeps what a finished process counted only until another one needs its slot. So finished slots are read
 * as soon as polling sees them. A process that came and went, or was replaced, between two polls is counted as missing.
 */

import type { Segment, Slot, SlotUsage } from "./segment.ts";
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

/** The last that is known of the process in a slot. */
interface Seen {
  slot: Slot;
  /** Undefined until it was read. */
  read: SlotUsage | undefined;
}

export class Tally {
  readonly #segment: Segment;
  readonly #seen = new Map<number, Seen>();
  readonly #replaced = new Map<string, Total>();
  #missing = 0;

  constructor(segment: Segment) {
    this.#segment = segment;
  }

  /** Processes of which what they did at the end, or all they did, is not known. */
  get missing(): number {
    return this.#missing;
  }

  /** Every slot that was ever taken, none being free: from now on what finished ones counted may be lost any moment. */
  get full(): boolean {
    return this.#seen.size === this.#segment.capacity;
  }

  /** To be called often. Returns the slots as they are. */
  poll(): Slot[] {
    const slots = this.#segment.slots();
    for (const slot of slots) this.#see(slot, slot.finished);
    return slots;
  }

  /** Everything that was counted up to now. */
  snapshot(): Snapshot {
    for (const slot of this.#segment.slots()) this.#see(slot, true);
    const totals = new Map(this.#replaced);
    for (const { slot, read } of this.#seen.values()) if (read) this.#add(totals, slot.name, read);
    return totals;
  }

  /** What a client did between two snapshots; `from` undefined is since its beginning. */
  usage(name: string, from: Snapshot | undefined, to: Snapshot): Usage {
    const none = nothing(this.#segment.histogram);
    const after = to.get(name)?.usage ?? none;
    const before = from?.get(name)?.usage;
    return before ? combine(after, before, -1) : after;
  }

  #see(slot: Slot, read: boolean): void {
    const last = this.#seen.get(slot.index);
    const same = last?.slot.key === slot.key;
    if (last && !same) {
      if (!last.slot.finished || !last.read) this.#missing++;
      if (last.read) this.#add(this.#replaced, last.slot.name, { ...last.read, ended_ns: last.read.ended_ns ?? 0 });
    }
    const known = same ? last.read : undefined;
    const final = same && last.slot.finished && known;
    this.#seen.set(slot.index, { slot, read: final || !read ? known : (this.#segment.read(slot) ?? known) });
  }

  #add(totals: Map<string, Total>, name: string, { usage, first_launch_ns, ended_ns }: SlotUsage): void {
    const total = totals.get(name) ?? {
      usage: nothing(this.#segment.histogram),
      first_ns: Number.POSITIVE_INFINITY,
      last_ns: 0,
    };
    const launched = first_launch_ns > 0;
    const lives = total.last_ns === undefined || (launched && ended_ns === undefined);
    totals.set(name, {
      usage: combine(total.usage, usage, 1),
      first_ns: launched ? Math.min(total.first_ns, first_launch_ns) : total.first_ns,
      last_ns: lives ? undefined : Math.max(total.last_ns ?? 0, launched ? (ended_ns ?? 0) : 0),
    });
  }
}

/** Seconds from a client's first launch until the last process that launched something ended; undefined while one lives. */
export function lifetime_s(name: string, snapshot: Snapshot): number | undefined {
  const { first_ns, last_ns } = snapshot.get(name) ?? {};
  if (first_ns === undefined || last_ns === undefined || last_ns <= first_ns) return undefined;
  return (last_ns - first_ns) / 1e9;
}
