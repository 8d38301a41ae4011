/**
 * segment.ts: the shared-memory segment as seen from TypeScript: settings to write, clients and histograms to read.
 *
 * Offsets come from the library (rigel_layout), never from a copy here. All reads are Atomics.load: the JIT hoists plain
 * reads out of loops. The mapping is kept as long as the object: reading after munmap is a crash. Read-only towards
 * everything but the settings, which have the control plane as their only writer.
 */

import { rmSync } from "node:fs";
import { getSystemErrorName } from "node:util";
import { z } from "zod";
import { RigelError } from "./errors.ts";
import type { Native } from "./native.ts";

const fieldSchema = z.object({
  offset: z.int().nonnegative(),
  type: z.enum(["u32", "u64", "i32", "char", "hist"]),
  count: z.int().positive(),
});
const recordSchema = z.object({ offset: z.int().nonnegative(), fields: z.record(z.string(), fieldSchema) });
const tableSchema = recordSchema.extend({ stride: z.int().positive(), count: z.int().positive() });
const layoutSchema = z.object({
  version: z.literal(1),
  size: z.int().positive(),
  histogram: z.object({ buckets: z.int().positive(), sub_bits: z.int(), min_shift: z.int() }),
  header: recordSchema,
  settings: recordSchema,
  devices: tableSchema,
  clients: tableSchema,
});

type Layout = z.infer<typeof layoutSchema>;

const POLICY_NUMBER = { none: 0, priority: 1 } as const;
const CLIENT_FREE = 0;
const CLIENT_CLAIMING = 1;
const CLIENT_LIVE = 2;

/** What is added up over the processes of one client, and over time. */
interface Counters {
  launches: number;
  graph_launches: number;
  copies: number;
  memsets: number;
  passed: number;
  gate_waits: number;
  gate_wait_ns: number;
  inflight_waits: number;
  inflight_wait_ns: number;
  starved: number;
  requests: number;
  reports: number;
}

/** Counts of durations, by the buckets of native/histogram.h. */
export class Histogram {
  readonly #counts: Float64Array;
  readonly #shape: Layout["histogram"];

  constructor(counts: Float64Array, shape: Layout["histogram"]) {
    this.#counts = counts;
    this.#shape = shape;
  }

  get total(): number {
    return this.#counts.reduce((sum, count) => sum + count, 0);
  }

  /** This plus `sign` times `other`. */
  combined(other: Histogram, sign: 1 | -1): Histogram {
    return new Histogram(
      this.#counts.map((count, bucket) => count + sign * (other.#counts[bucket] ?? 0)),
      this.#shape,
    );
  }

  /** The duration below which the fraction `q` lies, in ms, interpolated within its bucket; null without any counts. */
  quantile_ms(q: number): number | null {
    const total = this.total;
    if (total <= 0) return null;
    const rank = Math.max(q * total, Number.MIN_VALUE);
    let below = 0;
    for (const [bucket, count] of this.#counts.entries()) {
      if (count > 0 && below + count >= rank) {
        const lower = this.#lower_ns(bucket);
        const width = this.#lower_ns(bucket + 1) - lower;
        return (lower + (width * (rank - below)) / count) / 1e6;
      }
      below += count;
    }
    return null;
  }

  /** As rg_hist_lower_ns in native/histogram.h. */
  #lower_ns(bucket: number): number {
    if (bucket === 0) return 0;
    const per_octave = 2 ** this.#shape.sub_bits;
    const octave = this.#shape.min_shift + Math.floor((bucket - 1) / per_octave);
    return (per_octave + ((bucket - 1) % per_octave)) * 2 ** (octave - this.#shape.sub_bits);
  }
}

/** What one client (all its processes) has done. */
export interface Usage {
  counters: Counters;
  request_ns: Histogram;
  report_ns: Histogram;
}

/** One slot: one process of a client. */
export interface Slot {
  /** Differs whenever the slot changes hands. */
  key: string;
  name: string;
  pid: number;
  live: boolean;
  launched: boolean;
}

interface SlotUsage {
  name: string;
  usage: Usage;
  first_launch_ns: number;
  /** 0 unless the process has left by itself. */
  exited_ns: number;
}

/** Usage of each slot at one moment. */
export type Snapshot = ReadonlyMap<string, SlotUsage>;

/** What can be set. Left out: what the library has as default. */
export interface Settings {
  policy: keyof typeof POLICY_NUMBER;
  inflight?: number | undefined;
  unit_us?: number | undefined;
  starvation_us?: number | undefined;
  stale_ms?: number | undefined;
}

export class Segment {
  readonly path: string;
  readonly #native: Native;
  readonly #layout: Layout;
  readonly #bytes: Uint8Array<ArrayBuffer>;
  readonly #words: Uint32Array<ArrayBuffer>;
  readonly #longs: BigUint64Array<ArrayBuffer>;

  /** Makes a segment file for this launch alone. Throws with the folder and the remedy if that cannot be. */
  static create(native: Native, path: string): Segment {
    const result = native.createSegment(path);
    if (result < 0)
      throw new RigelError(
        "segment",
        `the segment file ${path} cannot be created (${getSystemErrorName(result)}); ` +
          "choose a folder that exists and can be written to with --segment DIR",
      );
    try {
      const refused = native.checkSegment(path);
      if (refused !== null) throw new RigelError("segment", `the segment file ${path} cannot be used: ${refused}`);
      return new Segment(native, path);
    } catch (thrown) {
      rmSync(path, { force: true });
      throw thrown;
    }
  }

  private constructor(native: Native, path: string) {
    this.path = path;
    this.#native = native;
    this.#layout = layoutSchema.parse(JSON.parse(native.layout));
    this.#bytes = Bun.mmap(path, { shared: true });
    this.#words = new Uint32Array(this.#bytes.buffer, this.#bytes.byteOffset, this.#layout.size >> 2);
    this.#longs = new BigUint64Array(this.#bytes.buffer, this.#bytes.byteOffset, this.#layout.size >> 3);
  }

  configure(settings: Settings): void {
    this.#set("policy", POLICY_NUMBER[settings.policy]);
    for (const name of ["inflight", "unit_us", "starvation_us", "stale_ms"] as const) {
      const value = settings[name];
      if (value !== undefined) this.#set(name, value);
    }
  }

  /** The in-flight limit in force. */
  get inflight(): number {
    return this.#word(this.#layout.settings, "inflight", 0);
  }

  /** Opens every gate for good, so that clients that are told to stop can. */
  openGates(): void {
    this.#set("shutdown", 1);
  }

  /** Clears what dead clients left. */
  reap(): void {
    this.#native.reapSegment(this.path);
  }

  /** Processes that found no free slot. */
  get refused(): number {
    return this.#word(this.#layout.header, "refused", 0);
  }

  /** How many processes fit. */
  get capacity(): number {
    return this.#layout.clients.count;
  }

  /** Every slot that was ever taken, cheaply: for polling. */
  slots(): Slot[] {
    return this.#taken().map(({ base, key }) => ({
      key,
      name: this.#text(base, "name"),
      pid: this.#word(this.#layout.clients, "pid", base),
      live: this.#word(this.#layout.clients, "state", base) === CLIENT_LIVE,
      launched: this.#long(base, "first_launch_ns") > 0,
    }));
  }

  /** Everything that was counted up to now. */
  snapshot(): Snapshot {
    return new Map(
      this.#taken().map(({ base, key }) => {
        const usage = {
          counters: counters((name) => this.#long(base, name)),
          request_ns: this.#histogram(base, "request_ns"),
          report_ns: this.#histogram(base, "report_ns"),
        };
        return [
          key,
          {
            name: this.#text(base, "name"),
            usage,
            first_launch_ns: this.#long(base, "first_launch_ns"),
            exited_ns: this.#long(base, "exited_ns"),
          },
        ];
      }),
    );
  }

  /** Usage of a client between two snapshots; `from` undefined is since its beginning. */
  usage(name: string, from: Snapshot | undefined, to: Snapshot): Usage {
    let sum = this.#nothing();
    for (const [key, slot] of to) {
      if (slot.name !== name) continue;
      sum = combine(sum, slot.usage, 1);
      const before = from?.get(key);
      if (before) sum = combine(sum, before.usage, -1);
    }
    return sum;
  }

  /** Seconds from a client's first launch until its last process left; undefined unless all have left by themselves. */
  lifetime_s(name: string, snapshot: Snapshot): number | undefined {
    const launched = [...snapshot.values()].filter((slot) => slot.name === name && slot.first_launch_ns > 0);
    if (launched.length === 0 || launched.some(({ exited_ns }) => exited_ns === 0)) return undefined;
    const first_ns = Math.min(...launched.map(({ first_launch_ns }) => first_launch_ns));
    return (Math.max(...launched.map(({ exited_ns }) => exited_ns)) - first_ns) / 1e9;
  }

  /** Removes the file. Clients that still have it mapped go on using their mapping. */
  remove(): void {
    rmSync(this.path, { force: true });
  }

  #nothing(): Usage {
    const none = new Histogram(new Float64Array(this.#layout.histogram.buckets), this.#layout.histogram);
    return { counters: counters(() => 0), request_ns: none, report_ns: none };
  }

  #taken(): { base: number; key: string }[] {
    const { stride, count } = this.#layout.clients;
    const taken = [];
    for (let slot = 0; slot < count; slot++) {
      const base = slot * stride;
      const state = this.#word(this.#layout.clients, "state", base);
      if (state === CLIENT_FREE || state === CLIENT_CLAIMING) continue;
      taken.push({ base, key: `${slot}:${this.#long(base, "attached_ns")}` });
    }
    return taken;
  }

  #histogram(base: number, name: string): Histogram {
    const first = (this.#layout.clients.offset + base + this.#field(this.#layout.clients, name).offset) >> 3;
    const counts = new Float64Array(this.#layout.histogram.buckets);
    for (let bucket = 0; bucket < counts.length; bucket++)
      counts[bucket] = Number(Atomics.load(this.#longs, first + bucket));
    return new Histogram(counts, this.#layout.histogram);
  }

  #field(record: Layout["header"], name: string): z.infer<typeof fieldSchema> {
    const field = record.fields[name];
    if (!field)
      throw new RigelError(
        "native",
        `librigel.so has no ${name} in its segment: it belongs to another version of Rigel`,
      );
    return field;
  }

  #word(record: Layout["header"], name: string, base: number): number {
    return Atomics.load(this.#words, (record.offset + base + this.#field(record, name).offset) >> 2);
  }

  #long(base: number, name: string): number {
    const clients = this.#layout.clients;
    return Number(Atomics.load(this.#longs, (clients.offset + base + this.#field(clients, name).offset) >> 3));
  }

  #text(base: number, name: string): string {
    const { offset, count } = this.#field(this.#layout.clients, name);
    const start = this.#layout.clients.offset + base + offset;
    const bytes = this.#bytes.slice(start, start + count);
    const end = bytes.indexOf(0);
    return new TextDecoder().decode(end < 0 ? bytes : bytes.subarray(0, end));
  }

  #set(name: string, value: number): void {
    const { settings } = this.#layout;
    Atomics.store(this.#words, (settings.offset + this.#field(settings, name).offset) >> 2, value);
  }
}

function counters(value: (name: keyof Counters) => number): Counters {
  return {
    launches: value("launches"),
    graph_launches: value("graph_launches"),
    copies: value("copies"),
    memsets: value("memsets"),
    passed: value("passed"),
    gate_waits: value("gate_waits"),
    gate_wait_ns: value("gate_wait_ns"),
    inflight_waits: value("inflight_waits"),
    inflight_wait_ns: value("inflight_wait_ns"),
    starved: value("starved"),
    requests: value("requests"),
    reports: value("reports"),
  };
}

function combine(a: Usage, b: Usage, sign: 1 | -1): Usage {
  return {
    counters: counters((name) => a.counters[name] + sign * b.counters[name]),
    request_ns: a.request_ns.combined(b.request_ns, sign),
    report_ns: a.report_ns.combined(b.report_ns, sign),
  };
}
