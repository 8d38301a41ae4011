/**
 * segment.ts: the shared-memory segment as seen from TypeScript: settings to write, clients and histograms to read.
 *
 * Offsets come from the library (rigel_layout), never from a copy here. All reads are Atomics.load: the JIT hoists plain
 * reads out of loops. The mapping is kept as long as the object: reading after munmap is a crash. Writes the
 * settings and the control record, which have the control plane as their only writer, what is asked of accounts, and estimates; all else is
 * only read.
 */

import { existsSync, rmSync } from "node:fs";
import { basename } from "node:path";
import { getSystemErrorName } from "node:util";
import { z } from "zod";
import { POLICIES } from "./config.ts";
import { type GuardEvent, type GuardMode, guardEvents, guardMode } from "./cublas-guard.ts";
import { RigelError } from "./errors.ts";
import { type Dimensions, type Native, uuidText } from "./native.ts";
import { entryAt } from "./path.ts";
import { startedAt_ticks } from "./proc.ts";
import type { Stayed, Wait } from "./slo-delay.ts";
import { DEFAULT_TARGET, type Target } from "./slo-alone.ts";
import { GRAPH_WHOLE, Histogram, type HistogramShape, type Usage, counters } from "./usage.ts";

/** RG_SEGMENT_VERSION of native/segment.h. */
const VERSION = 31;

const fieldSchema = z.object({
  offset: z.int().nonnegative(),
  type: z.enum(["u32", "u64", "words", "i32", "char", "hist"]),
  count: z.int().positive(),
});
const recordSchema = z.object({ offset: z.int().nonnegative(), fields: z.record(z.string(), fieldSchema) });
const tableSchema = recordSchema.extend({ stride: z.int().positive(), count: z.int().positive() });
const layoutSchema = z.object({
  version: z.literal(VERSION),
  size: z.int().positive(),
  histogram: z.object({ buckets: z.int().positive(), sub_bits: z.int(), min_shift: z.int() }),
  header: recordSchema,
  settings: recordSchema,
  devices: tableSchema,
  clients: tableSchema,
  estimates: tableSchema,
  accounts: tableSchema,
  control: recordSchema,
  threads: tableSchema,
  names: tableSchema,
  traces: tableSchema,
  communicators: tableSchema,
  calls: tableSchema,
  shares: tableSchema,
  operations: z.array(z.string()),
  kinds: z.array(z.string()),
});

type Layout = z.infer<typeof layoutSchema>;

type Policy = (typeof POLICIES)[number];
const POLICY_NUMBER: Readonly<Record<Policy, number>> = { none: 0, priority: 1, slo: 2, fair: 3, orion: 4 };
const CLASS_HIGH = 1;
const CLASS_BEST_EFFORT = 2;
/** target_kind of native/segment.h. */
const TARGET_OVER_ALONE = 1;
const TARGET_MS = 2;
/** A control loop that has not looked for so long is gone, or stopped. */
const LOOP_STALE_ns = 3e9;
/** RIGEL_LOCK_LOOP and RIGEL_LOCK_MEMBER of native/rigel.h. */
const LOCK_LOOP = 0;
const LOCK_MEMBER = 1;
/** paused_until_ns of who is paused until resumed. */
const FOREVER = 0xffff_ffff_ffff_ffffn;
/** `state` of a device whose UUID and name are there. */
const DEVICE_KNOWN = 2;
const PREEMPTION = ["unknown", "on", "off", "stops"] as const;
/** RG_GUARD_EVENT_WORDS in native/segment.h. */
const GUARD_EVENT_WORDS = 12;
/** Settings that policy slo moves and others have too. */
const KEPT = [
  "suspend",
  "defer_us",
  "defer_ppm",
  "need_us",
  "slice_us",
  "inflight",
  "corun",
  "stop_us",
  "share_period_us",
] as const;
/** enum rg_stayed of native/segment.h. */
const STAYED: readonly Stayed[] = ["not", "ahead", "announced", "behind"];
/** RG_WAITED_NS in native/segment.h. */
const WAITED_NS = 16;
const CLIENT_FREE = 0;
const CLIENT_CLAIMING = 1;
const CLIENT_LIVE = 2;
const CLIENT_EXITED = 3;

/** One slot: one process of a client. */
export interface Slot {
  index: number;
  /** Of a client that threads of a process have entered: that process's name, a slash, and its own. */
  name: string;
  /** Slot of the process whose threads have entered it; null: it is a process. */
  parent: number | null;
  pid: number;
  launched: boolean;
  /** The process has ended: what it counted is final. */
  finished: boolean;
  /** It said that it ended, rather than being found dead. */
  clean: boolean;
  class: ClientClass;
}

/** What one process has done, and when. */
export interface SlotUsage {
  usage: Usage;
  /** Indices of the devices that it has work on. */
  devices: number[];
  /** Under `fair`. */
  weight: number;
  /** Time slice of its channels as Rigel has set it; 0: it has not. */
  slice_us: number;
  attached_ns: number;
  /** Last sign of life. */
  heartbeat_ns: number;
  /** 0 until then. */
  first_launch_ns: number;
  /** When it ended, or was last seen to live if it was killed; undefined while it lives. */
  ended_ns: number | undefined;
  guard_mode: GuardMode;
  guard_events: GuardEvent[];
}

export type ClientClass = "high" | "best-effort";

/** A GPU that clients of the segment have work on. */
export interface SegmentDevice {
  index: number;
  /** As the driver and nvidia-smi write it: GPU-…. */
  uuid: string;
  name: string;
  /** High clients have work on it at this moment. */
  high_busy: boolean;
}

/** How long a kernel takes, as a segment has it. */
interface Estimate {
  /** 16 hexadecimal digits, as is `program`. */
  key: string;
  program: string;
  name: string;
  /** All zero for work without a shape: graphs. */
  grid: Dimensions;
  block: Dimensions;
  duration_ns: number;
  /** Timed launches in it; 0: it came from a profile. */
  samples: number;
  /** A client of this segment has launched it. */
  used: boolean;
  /** Name of the device that it was launched on. */
  device: string | undefined;
}

/** Device memory of one client, all its processes together. */
export interface MemoryUse {
  /** null: none. */
  limit_bytes: number | null;
  used_bytes: number;
  peak_bytes: number;
  /** Allocations that were refused because of the limit. */
  denied: number;
  /** Of the last of them: what it asked for, and what was in use. */
  last_denied: { bytes: number; used_bytes: number };
}

/** What can be asked of a client while it runs; undefined leaves it as it is. */
export interface Wanted {
  class?: ClientClass | undefined;
  weight?: number | undefined;
  /** null: none. */
  memory_bytes?: number | null | undefined;
  /** Its best-effort work is held back until then, CLOCK_MONOTONIC; infinite: until it is resumed; 0: not. */
  paused_until_ns?: number | undefined;
}

/** The control loop of policy slo as a segment shows it. */
export interface LoopState {
  target: Target;
  /** The process that runs it. */
  holder_pid: number;
  rung: number;
  changes: number;
  unreachable: boolean;
  held_s: number;
  alone: Latencies;
  now: Latencies;
  /** How long requests take over how long they would take alone; null where that cannot be told. */
  over_alone: { requests: number; p50: number; p99: number } | null;
}

interface Latencies {
  requests: number;
  p50_ms: number | null;
  p99_ms: number | null;
}

/** What can be set. Left out: what the library has as default. */
interface Settings {
  policy: Policy;
  inflight?: number | undefined;
  corun?: number | undefined;
  unit_us?: number | undefined;
  starvation_us?: number | undefined;
  stale_ms?: number | undefined;
  preempt?: boolean | undefined;
  suspend?: boolean | undefined;
  defer_us?: number | undefined;
  defer_ppm?: number | undefined;
  need_us?: number | undefined;
  slice_us?: number | undefined;
  high_slice_us?: number | undefined;
  stop_us?: number | undefined;
  min_share_ppm?: number | undefined;
  share_period_us?: number | undefined;
  quantum_us?: number | undefined;
  sms_limit?: number | undefined;
  trace?: boolean | undefined;
  outstanding_us?: number | undefined;
  stay_us?: number | undefined;
  arrivals?: boolean | undefined;
}

/** One of the segment's tables, row by row, for the module that knows what is in it. */
export interface Table {
  /** Rows. */
  readonly count: number;
  word(row: number, field: string): number;
  long(row: number, field: string): bigint;
  text(row: number, field: string): string;
  /** All words of a field that has several. */
  words(row: number, field: string): BigUint64Array;
}

/** The layout that a library has; throws if that is another version's (RIGEL_LIB). */
function layoutOf(native: Pick<Native, "layout">): Layout {
  const layout = layoutSchema.safeParse(JSON.parse(native.layout));
  if (layout.success) return layout.data;
  throw new RigelError(
    "native",
    `librigel.so belongs to another version of Rigel, its segments are not of version ${VERSION} (${layout.error.issues[0]?.message}); ` +
      "unset RIGEL_LIB, or build it anew (make -C native)",
    { cause: layout.error },
  );
}

/** What a segment file takes. */
export function segmentBytes(native: Pick<Native, "layout">): number {
  return layoutOf(native).size;
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
    const made = Segment.createUnlessThere(native, path);
    if (made) return made;
    throw new RigelError(
      "segment",
      `the segment file ${path} cannot be created: another process has made one; try again`,
    );
  }

  /** The same; undefined where one is there that can be used, or was at that moment. */
  static createUnlessThere(native: Native, path: string): Segment | undefined {
    const result = native.createSegment(path);
    if (result < 0 && getSystemErrorName(result) === "EEXIST") {
      const why = native.checkSegment(path);
      if (why === null || !entryAt(path)) return undefined;
      throw new RigelError(
        "segment",
        `no segment can be made where something is that cannot be used: ${why}; ` +
          "remove that once nothing uses it, or choose another folder with --segment DIR",
      );
    }
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

  /** Opens a segment that another process has made. Throws with the reason if this user's library cannot use it. */
  static open(native: Native, path: string): Segment {
    const refused = native.checkSegment(path);
    if (refused !== null) throw new RigelError("segment", refused);
    return new Segment(native, path);
  }

  private constructor(native: Native, path: string) {
    this.path = path;
    this.#native = native;
    this.#layout = layoutOf(native);
    this.#bytes = Bun.mmap(path, { shared: true });
    this.#words = new Uint32Array(this.#bytes.buffer, this.#bytes.byteOffset, this.#layout.size >> 2);
    this.#longs = new BigUint64Array(this.#bytes.buffer, this.#bytes.byteOffset, this.#layout.size >> 3);
  }

  configure(settings: Settings): void {
    const { policy, ...numbers } = settings;
    this.#set("policy", POLICY_NUMBER[policy]);
    for (const [name, value] of Object.entries(numbers)) if (value !== undefined) this.#set(name, Number(value));
  }

  /** Changes single settings while clients run. */
  apply(settings: Readonly<Record<string, number>>): void {
    for (const [name, value] of Object.entries(settings)) this.#set(name, value);
  }

  /** All settings as they are now; `apply` puts them back. */
  settings(): Readonly<Record<string, number>> {
    const { settings } = this.#layout;
    return Object.fromEntries(Object.keys(settings.fields).map((name) => [name, this.#word(settings, name, 0)]));
  }

  /** The policy in force. */
  get policy(): Policy {
    const number = this.#word(this.#layout.settings, "policy", 0);
    return POLICIES.find((name) => POLICY_NUMBER[name] === number) ?? "none";
  }

  /** The file's name: which of the user's segments it is. */
  get id(): string {
    return basename(this.path);
  }

  /** What policy slo aims at. */
  get target(): Target {
    const value = this.#word(this.#layout.control, "target", 0) / 1000;
    switch (this.#word(this.#layout.control, "target_kind", 0)) {
      case TARGET_OVER_ALONE:
        return { p99_over_alone: value };
      case TARGET_MS:
        return { p99_ms: value };
      default:
        return DEFAULT_TARGET;
    }
  }

  set target(target: Target) {
    const { control } = this.#layout;
    const inMs = "p99_ms" in target;
    this.#put(control, "target", 0, Math.max(1, Math.round((inMs ? target.p99_ms : target.p99_over_alone) * 1000)));
    this.#put(control, "target_kind", 0, inMs ? TARGET_MS : TARGET_OVER_ALONE);
  }

  /** What the control loop shows of itself; undefined where none runs, what the last one found being of then. */
  get loop(): LoopState | undefined {
    const { control } = this.#layout;
    const word = (name: string): number => this.#word(control, name, 0);
    const holder_pid = word("holder_pid");
    const isStale = this.now_ns - Number(this.#long64(control, "beat_ns", 0)) >= LOOP_STALE_ns;
    if (holder_pid === 0 || isStale || this.policy !== "slo") return undefined;
    const ms = (name: string): number | null => Number(this.#long64(control, name, 0)) / 1e6 || null;
    const latencies = (of: "alone" | "now"): Latencies => ({
      requests: word(`${of}_requests`),
      p50_ms: ms(`${of}_p50_ns`),
      p99_ms: ms(`${of}_p99_ns`),
    });
    return {
      target: this.target,
      holder_pid,
      rung: word("rung"),
      changes: word("changes"),
      unreachable: word("unreachable") !== 0,
      held_s: Number(this.#long64(control, "held_ms", 0)) / 1000,
      alone: latencies("alone"),
      now: latencies("now"),
      over_alone: word("over_requests")
        ? { requests: word("over_requests"), p50: word("over_p50") / 1000, p99: word("over_p99") / 1000 }
        : null,
    };
  }

  /**
   * Changes settings for policy slo, which are put back where another policy has taken over meanwhile: whoever has changed it may
   * have put them back before they were written here. Stops are as far apart as they were at most: with 0 there are none. Whether it is
   * still slo. `isTrial`: where this process dies the clients put back what there was before.
   */
  move(settings: Readonly<Record<string, number>>, isTrial = false): boolean {
    // Nobody who reads settings of another policy is to find these for a moment.
    if (this.policy !== "slo") {
      this.putBack();
      return false;
    }
    this.keep();
    const { control } = this.#layout;
    if (isTrial) this.#put(control, "trying", 0, 1);
    const most = this.kept()["stop_us"] ?? 0;
    this.apply({ ...settings, stop_us: Math.min(settings["stop_us"] ?? most, most) });
    if (!isTrial) this.#put(control, "trying", 0, 0);
    if (this.policy === "slo") return true;
    this.#putBack();
    return false;
  }

  /** Keeps the settings that the control loop moves as they are now, unless it has moved some already. */
  keep(): void {
    const { control } = this.#layout;
    if (this.#word(control, "kept", 0)) return;
    const now = this.settings();
    for (const name of KEPT) this.#put(control, `kept_${name}`, 0, now[name] ?? 0);
    this.#put(control, "kept", 0, 1);
  }

  /** Settings as they are where slo has not moved them. */
  kept(): Readonly<Record<string, number>> {
    const { control } = this.#layout;
    if (!this.#word(control, "kept", 0)) return this.settings();
    return { ...this.settings(), ...this.#keptNow() };
  }

  /** Puts them back, where another policy takes over. */
  putBack(): void {
    if (this.#word(this.#layout.control, "kept", 0)) this.#putBack();
  }

  #putBack(): void {
    this.apply(this.#keptNow());
    this.#put(this.#layout.control, "trying", 0, 0);
    this.#put(this.#layout.control, "kept", 0, 0);
  }

  #keptNow(): Readonly<Record<string, number>> {
    return Object.fromEntries(KEPT.map((name) => [name, this.#word(this.#layout.control, `kept_${name}`, 0)]));
  }

  /** Somebody sets some of them: that is what is put back, also by a loop that is about to find that its policy has gone. */
  rekeep(settings: Readonly<Record<string, unknown>>): void {
    const { control } = this.#layout;
    for (const name of KEPT)
      if (settings[name] !== undefined) this.#put(control, `kept_${name}`, 0, Number(settings[name]));
  }

  /** Shows what the control loop, which this process runs, has found; undefined: it has ended. */
  showLoop(state: Omit<LoopState, "target" | "holder_pid"> | undefined): void {
    const { control } = this.#layout;
    const put = (name: string, value: number): void => this.#put(control, name, 0, value);
    const putLong = (name: string, value: number): void => this.#putLong(control, name, 0, BigInt(Math.round(value)));
    if (!state) {
      put("holder_pid", 0);
      return;
    }
    put("rung", state.rung);
    put("changes", state.changes);
    put("unreachable", Number(state.unreachable));
    putLong("held_ms", state.held_s * 1000);
    put("over_requests", state.over_alone?.requests ?? 0);
    for (const at of ["p50", "p99"] as const) put(`over_${at}`, Math.round((state.over_alone?.[at] ?? 0) * 1000));
    for (const of of ["alone", "now"] as const) {
      put(`${of}_requests`, state[of].requests);
      putLong(`${of}_p50_ns`, (state[of].p50_ms ?? 0) * 1e6);
      putLong(`${of}_p99_ns`, (state[of].p99_ms ?? 0) * 1e6);
    }
    put("holder_pid", process.pid);
    putLong("beat_ns", this.now_ns);
  }

  /** What its maker says to who joins it, as JSON; empty if nothing. */
  get manifest(): string {
    return this.#text(this.#layout.control, 0, "manifest");
  }

  /** To be written before any client starts. */
  set manifest(text: string) {
    const { control } = this.#layout;
    const { offset, count } = this.#field(control, "manifest");
    const bytes = new TextEncoder().encode(text);
    if (bytes.length >= count)
      throw new RigelError(
        "segment",
        `what is to be said of ${this.path} takes ${bytes.length} bytes, there are ${count}`,
      );
    this.#bytes.set(bytes, control.offset + offset);
  }

  /** Takes the right to run its control loop, or joins it; what gives that back, undefined if it cannot be had. */
  lock(what: "loop" | "member"): (() => void) | undefined {
    return this.#native.lock(this.path, what === "loop" ? LOCK_LOOP : LOCK_MEMBER, what === "member");
  }

  /** Since a process of it has shown life, or it was made. */
  get quiet_ms(): number {
    const seen_ns = this.slots().map((slot) => this.read(slot).heartbeat_ns);
    return (this.now_ns - Math.max(this.creator.created_ns, ...seen_ns)) / 1e6;
  }

  /**
   * Removes the file unless somebody else has joined. Whether it is gone. `discard`: nobody needs what is in it any more, so that it takes no
   * room either, though this process, or one that looks on, has it mapped.
   */
  removeIfAlone({ discard = false }: { discard?: boolean } = {}): boolean {
    if (!existsSync(this.path)) return true;
    const release = this.#native.lock(this.path, LOCK_MEMBER);
    if (!release) return false;
    if (discard) {
      this.reap();
      if (this.slots().every(({ finished }) => finished)) this.#native.discard(this.path);
    }
    this.remove();
    release();
    return true;
  }

  /** The same, unless a client lives. */
  removeIfLeft(): boolean {
    return this.slots().every(({ finished }) => finished) && this.removeIfAlone({ discard: true });
  }

  /** What is asked of a client. */
  wanted(name: string): (Omit<Wanted, "paused_until_ns"> & { paused_until_ns: number }) | undefined {
    const base = this.#account(name);
    if (base === undefined) return undefined;
    const { accounts } = this.#layout;
    const kind = this.#word(accounts, "wanted_class", base);
    const weight = this.#word(accounts, "wanted_weight", base);
    const until = this.#long64(accounts, "paused_until_ns", base);
    return {
      // What it was started as stands in its slots.
      ...(kind !== 0 && { class: kind === CLASS_HIGH ? "high" : "best-effort" }),
      ...(weight !== 0 && { weight: weight / 1000 }),
      ...(this.#word(accounts, "wanted_limit", base) !== 0 && {
        memory_bytes: Number(this.#long64(accounts, "limit_bytes", base)) || null,
      }),
      paused_until_ns: until === FOREVER ? Number.POSITIVE_INFINITY : Number(until),
    };
  }

  /** Asks something of a client, for all its processes, those that come later too. False if no process of it ever attached. */
  want(name: string, { class: kind, weight, memory_bytes, paused_until_ns }: Wanted): boolean {
    const base = this.#account(name);
    if (base === undefined) return false;
    const { accounts } = this.#layout;
    if (kind !== undefined) this.#put(accounts, "wanted_class", base, kind === "high" ? CLASS_HIGH : CLASS_BEST_EFFORT);
    if (weight !== undefined) this.#put(accounts, "wanted_weight", base, Math.round(weight * 1000));
    if (memory_bytes !== undefined) {
      // First, so that a process that attaches meanwhile does not set its own.
      this.#put(accounts, "wanted_limit", base, 1);
      this.#putLong(accounts, "limit_bytes", base, BigInt(memory_bytes ?? 0));
    }
    if (paused_until_ns !== undefined)
      this.#putLong(
        accounts,
        "paused_until_ns",
        base,
        Number.isFinite(paused_until_ns) ? BigInt(Math.round(paused_until_ns)) : FOREVER,
      );
    return true;
  }

  /** It is another best-effort client's turn until then (`now_ns`; 0: its own): the same for a client of this name, if there was one. */
  turn(name: string, until_ns: number): void {
    const base = this.#account(name);
    if (base !== undefined) this.#putLong(this.#layout.accounts, "turn_until_ns", base, BigInt(Math.round(until_ns)));
  }

  /** Gates work again after openGates. */
  closeGates(): void {
    this.#set("shutdown", 0);
  }

  /** The process that made it, and when (CLOCK_MONOTONIC). */
  get creator(): { pid: number; created_ns: number } {
    const { header } = this.#layout;
    return { pid: this.#word(header, "creator_pid", 0), created_ns: Number(this.#long64(header, "created_ns", 0)) };
  }

  /** Now, on the clock of all times in it. */
  get now_ns(): number {
    return this.#native.now_ns;
  }

  /** Whether the process that made it runs, and has not disowned it. */
  get makerLives(): boolean {
    const owner = this.#long64(this.#layout.header, "creator", 0);
    const started_ticks = startedAt_ticks(this.creator.pid);
    // When it began may not have been seen; else it tells it from a later process of its number (owner_word in native/segment.c).
    const known = owner >> 32n;
    return (
      owner !== 0n &&
      started_ticks !== undefined &&
      (known === 0n || known === BigInt.asUintN(32, BigInt(started_ticks)))
    );
  }

  /** The process that made it has done with it: who leaves it last removes it, though that process may live on. */
  disown(): void {
    this.#putLong(this.#layout.header, "creator", 0, 0n);
  }

  /** The GPUs that its clients have had work on. */
  devices(): SegmentDevice[] {
    const table = this.#layout.devices;
    const found: SegmentDevice[] = [];
    for (let index = 0; index < table.count; index++) {
      const base = index * table.stride;
      if (this.#word(table, "state", base) !== DEVICE_KNOWN) continue;
      const name = this.#text(table, base, "name");
      found.push({
        index,
        uuid: this.#uuid(base, name),
        name,
        high_busy: this.#long64(table, "high_busy", base) !== 0n,
      });
    }
    return found;
  }

  /** The in-flight limit in force. */
  get inflight(): number {
    return this.#word(this.#layout.settings, "inflight", 0);
  }

  /** Holds best-effort work back for `ms`, at most 5 s, or ends that (0). Not under policy `none`. */
  hold(ms: number): void {
    this.#native.holdSegment(this.path, ms);
  }

  /** Tells clients that until then (`now_ns`) nobody but them is known to use a device (SegmentDevice.index). */
  ownUntil(device: number, until_ns: number): void {
    const { devices } = this.#layout;
    this.#putLong(devices, "own_until_ns", device * devices.stride, BigInt(Math.round(until_ns)));
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

  /** Processes whose counts were cleared because a client of another name needed their slot. */
  get overwritten(): number {
    return this.#word(this.#layout.header, "overwritten", 0);
  }

  /** How many processes fit. */
  get capacity(): number {
    return this.#layout.clients.count;
  }

  /** The buckets of all histograms. */
  get histogram(): HistogramShape {
    return this.#layout.histogram;
  }

  /** Every slot that was ever taken, cheaply: for polling. */
  slots(): Slot[] {
    const { stride, count } = this.#layout.clients;
    const taken: Slot[] = [];
    for (let index = 0; index < count; index++) {
      const base = index * stride;
      const state = this.#word(this.#layout.clients, "state", base);
      if (state === CLIENT_FREE || state === CLIENT_CLAIMING) continue;
      const parent = this.#word(this.#layout.clients, "parent", base);
      taken.push({
        index,
        name: this.#name(base),
        parent: parent === 0 ? null : parent - 1,
        pid: this.#word(this.#layout.clients, "pid", base),
        launched: this.#long(base, "first_launch_ns") > 0,
        finished: state !== CLIENT_LIVE,
        clean: state === CLIENT_EXITED,
        class: this.#word(this.#layout.clients, "class", base) === CLASS_HIGH ? "high" : "best-effort",
      });
    }
    return taken;
  }

  /** No client of a launch has a slash in its name. */
  #name(base: number): string {
    const own = this.#text(this.#layout.clients, base, "name");
    const parent = this.#word(this.#layout.clients, "parent", base);
    if (parent === 0) return own;
    return `${this.#text(this.#layout.clients, (parent - 1) * this.#layout.clients.stride, "name")}/${own}`;
  }

  /** Everything that was counted in a slot. */
  read({ index, finished }: Slot): SlotUsage {
    const base = index * this.#layout.clients.stride;
    const first_launch_ns = this.#long(base, "first_launch_ns");
    const heartbeat_ns = this.#long(base, "heartbeat_ns");
    const ended_ns = this.#long(base, "exited_ns") || heartbeat_ns;
    const word = (name: string): number => this.#word(this.#layout.clients, name, base);
    const onDevices = word("devices") | word("past_devices");
    const usage = {
      counters: counters((name) => (name === "launches" ? this.#kernels(base) : this.#long(base, name))),
      preemption: PREEMPTION[word("preemption")] ?? "unknown",
      graph_whole: GRAPH_WHOLE[word("graph_whole") - 1] ?? null,
      request_ns: this.#histogram(base, "request_ns"),
      report_ns: this.#histogram(base, "report_ns"),
      wait_ns: this.#histogram(base, "wait_ns"),
    };
    return {
      usage,
      devices: Array.from({ length: this.#layout.devices.count }, (_, device) => device).filter(
        (device) => ((onDevices >>> device) & 1) === 1,
      ),
      weight: word("weight") / 1000,
      slice_us: word("slice_us"),
      attached_ns: this.#long(base, "attached_ns"),
      heartbeat_ns,
      first_launch_ns,
      ended_ns: finished ? Math.max(ended_ns, first_launch_ns) : undefined,
      guard_mode: guardMode(word("guard_mode")),
      guard_events: guardEvents(this.#ring(base, "guard_ring"), GUARD_EVENT_WORDS),
    };
  }

  /** What the clients know of their kernels' durations. */
  estimates(): Estimate[] {
    const table = this.#layout.estimates;
    const found: Estimate[] = [];
    for (let index = 0; index < table.count; index++) {
      const base = index * table.stride;
      const word = (name: string): number => this.#word(table, name, base);
      // Without the description nobody could tell whose kernel it is: whoever entered it was killed at that moment.
      if (word("state") === 0) continue;
      const device = word("device");
      found.push({
        key: this.#hex(table, "key", base),
        program: this.#hex(table, "program", base),
        name: this.#text(table, base, "name"),
        grid: [word("grid_x"), word("grid_y"), word("grid_z")],
        block: [word("block_x"), word("block_y"), word("block_z")],
        duration_ns: word("duration_ns"),
        samples: word("samples"),
        used: word("used") !== 0,
        device:
          device === 0
            ? undefined
            : this.#text(this.#layout.devices, (device - 1) * this.#layout.devices.stride, "name"),
      });
    }
    return found;
  }

  /**
   * Enters a duration that is known before any client runs. What is there already stays. `byName`: the name may be
   * written in another way than the driver does. False if there is no room.
   */
  enterEstimate(known: Omit<Estimate, "used" | "device"> & { byName: boolean }): boolean {
    const index = this.#native.enterEstimate(this.path, known.key);
    if (index < 0) return false;
    const table = this.#layout.estimates;
    const base = index * table.stride;
    if (this.#word(table, "duration_ns", base) !== 0) return true;
    const put = (name: string, value: number): void => this.#put(table, name, base, value);
    const at = (table.offset + base + this.#field(table, "program").offset) >> 3;
    Atomics.store(this.#longs, at, BigInt(`0x${known.program}`));
    for (const [axis, name] of ["x", "y", "z"].entries()) {
      put(`grid_${name}`, known.grid[axis] ?? 0);
      put(`block_${name}`, known.block[axis] ?? 0);
    }
    const { offset, count } = this.#field(table, "name");
    this.#bytes.set(new TextEncoder().encode(known.name).subarray(0, count - 1), table.offset + base + offset);
    put("samples", known.samples);
    put("duration_ns", known.duration_ns);
    put("state", 1);
    const { header } = this.#layout;
    if (known.byName) this.#put(header, "name_seeds", 0, this.#word(header, "name_seeds", 0) + 1);
    return true;
  }

  /** Device memory by client name. */
  memory(): Map<string, MemoryUse> {
    const { clients, accounts } = this.#layout;
    const found = new Map<string, MemoryUse>();
    for (let index = 0; index < accounts.count; index++) {
      const base = index * accounts.stride;
      const word = (name: string): number => Number(this.#long64(accounts, name, base));
      if (word("key") === 0) continue;
      const slots = this.#long64(accounts, "slots", base);
      let used_bytes = 0;
      for (let slot = 0; slot < clients.count; slot++)
        if ((slots >> BigInt(slot)) & 1n && this.#word(clients, "state", slot * clients.stride) === CLIENT_LIVE)
          used_bytes += this.#long(slot * clients.stride, "memory_bytes");
      found.set(this.#text(accounts, base, "name"), {
        limit_bytes: word("limit_bytes") || null,
        used_bytes,
        peak_bytes: word("peak_bytes"),
        denied: word("denied"),
        last_denied: { bytes: word("denied_bytes"), used_bytes: word("denied_at_bytes") },
      });
    }
    return found;
  }

  /** How many latencies the program has reported itself, with those of the processes before it in its slot. */
  reports({ index }: Slot): number {
    return this.#long(index * this.#layout.clients.stride, "reports");
  }

  /** Busy periods so far that the program itself has ended, by a wait or a look; and those at whose end Rigel's agent found it idle. */
  ended({ index }: Slot): { own: number; byAgent: number } {
    const base = index * this.#layout.clients.stride;
    const byAgent = this.#long(base, "agent_idle");
    return { own: this.#long(base, "requests") - byAgent, byAgent };
  }

  /** Durations of requests so far, cheaply, for the control loop: those that the program `reports`, or busy periods. */
  durations({ index }: Slot, reports: boolean): Histogram {
    return this.#histogram(index * this.#layout.clients.stride, reports ? "report_ns" : "request_ns");
  }

  /**
   * The latest busy periods of a slot at whose end the program waited for its work, after the first `since` of them (undefined:
   * none), and how many there have been.
   */
  waits({ index }: Slot, since?: bigint): { waited: bigint; latest: Wait[] } {
    const { clients, devices } = this.#layout;
    const base = index * clients.stride;
    const waited = this.#long64(clients, "waited", base);
    const { offset, count } = this.#field(clients, "waited_ring");
    const began = this.#field(clients, "began_ring");
    const kinds = this.#field(clients, "kind_ring");
    const unit_ms = WAITED_NS / 1e6;
    const latest: Wait[] = [];
    const oldest = waited - BigInt(count) + 1n; // the one before may be being written over
    for (let n = since === undefined || since > waited ? waited : since > oldest ? since : oldest; n < waited; n++) {
      if (n < 0n) continue;
      const at = (ring: number): number => ((clients.offset + base + ring) >> 3) + Number(n % BigInt(count));
      const entry = Atomics.load(this.#longs, at(offset));
      latest.push({
        client: index * devices.count + Number(entry & 15n),
        // As much of the key as a number holds. 0: it is not known.
        kind: Number(Atomics.load(this.#longs, at(kinds.offset)) >> 12n) || undefined,
        began_ms: Number(Atomics.load(this.#longs, at(began.offset))) / 1e6,
        worked_ms: Number((entry >> 32n) & 0x3fffffffn) * unit_ms,
        waited_ms: Number((entry >> 4n) & 0xfffffffn) * unit_ms,
        stayed: STAYED[Number(entry >> 62n)],
      });
    }
    return { waited, latest };
  }

  /**
   * What was launched in a slot so far, how often only as it had waited too long, how many launches for the least share, a bit for each device that it has
   * work on, whether its process can be taken off the GPU, how many calls for that were slow, and the part of its GPU time that is in long kernels, lately;
   * undefined: not known.
   */
  work({ index }: Slot): {
    launches: number;
    starved: number;
    shared: number;
    devices: number;
    preemption: "unknown" | "on" | "off" | "stops";
    longPart: number | undefined;
    slowCalls: number;
  } {
    const base = index * this.#layout.clients.stride;
    const long = this.#word(this.#layout.clients, "long_part", base);
    return {
      longPart: long > 0 ? (long - 1) / 1000 : undefined,
      slowCalls: this.#long(base, "slow_calls"),
      starved: this.#long(base, "starved"),
      shared: this.#long(base, "shared"),
      devices: this.#word(this.#layout.clients, "devices", base),
      launches: this.#kernels(base) + this.#long(base, "graph_launches"),
      preemption: PREEMPTION[this.#word(this.#layout.clients, "preemption", base)] ?? "unknown",
    };
  }

  /** A table by its name in native/segment.h. */
  table(name: "header" | "clients" | "threads" | "names" | "traces" | "communicators" | "calls" | "shares"): Table {
    const record = this.#layout[name];
    const { stride, count } = "stride" in record ? record : { stride: 0, count: 1 };
    return {
      count,
      word: (row, field) => this.#word(record, field, row * stride),
      long: (row, field) => this.#long64(record, field, row * stride),
      text: (row, field) => this.#text(record, row * stride, field),
      words: (row, field) => {
        const { offset, count: length } = this.#field(record, field);
        const first = (record.offset + row * stride + offset) >> 3;
        return BigUint64Array.from({ length }, (_, index) => Atomics.load(this.#longs, first + index));
      },
    };
  }

  /** Bit per slot: that high client has unfinished work on some device. */
  get highBusy(): bigint {
    const { devices } = this.#layout;
    let busy = 0n;
    for (let index = 0; index < devices.count; index++)
      busy |= this.#long64(devices, "high_busy", index * devices.stride);
    return busy;
  }

  /** What the numbers of operations and kinds mean in `threads` and `traces`. */
  get vocabulary(): { operations: readonly string[]; kinds: readonly string[] } {
    return this.#layout;
  }

  /** The clock of ticks (native/trace.h) and CLOCK_MONOTONIC, read at the same time: the closest of some looks. */
  get now(): { tick: bigint; ns: number } {
    if (this.#word(this.#layout.header, "tick_source", 0) === 0) {
      const ns = this.now_ns;
      return { tick: BigInt(ns), ns };
    }
    let best = { tick: 0n, ns: 0, apart: 1n << 62n };
    for (let look = 0; look < 10; look++) {
      const before = this.#native.now_tick;
      const ns = this.now_ns;
      const apart = this.#native.now_tick - before;
      if (apart < best.apart) best = { tick: before + apart / 2n, ns, apart };
    }
    return best;
  }

  /** Removes the file. Clients that still have it mapped go on using their mapping. */
  remove(): void {
    rmSync(this.path, { force: true });
  }

  #ring(base: number, name: string): bigint[] {
    const { offset, count } = this.#field(this.#layout.clients, name);
    const first = (this.#layout.clients.offset + base + offset) >> 3;
    return Array.from({ length: count }, (_, index) => Atomics.load(this.#longs, first + index));
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
    return Number(this.#long64(this.#layout.clients, name, base));
  }

  /** Kernels launched: several threads count for themselves. */
  #kernels(base: number): number {
    const { clients } = this.#layout;
    const { offset, count } = this.#field(clients, "launches");
    const at = (clients.offset + base + offset) >> 3;
    let sum = 0n;
    for (let i = 0; i < count; i++) sum += Atomics.load(this.#longs, at + i);
    return Number(sum);
  }

  /** A number of 64 bits, as hexadecimal digits. */
  #hex(record: Layout["header"], name: string, base: number): string {
    const at = (record.offset + base + this.#field(record, name).offset) >> 3;
    return Atomics.load(this.#longs, at).toString(16).padStart(16, "0");
  }

  #long64(record: Layout["header"], name: string, base: number): bigint {
    return Atomics.load(this.#longs, (record.offset + base + this.#field(record, name).offset) >> 3);
  }

  /** Of a device, as nvidia-smi writes it. */
  #uuid(base: number, name: string): string {
    const { offset, count } = this.#field(this.#layout.devices, "uuid");
    const start = this.#layout.devices.offset + base + offset;
    return uuidText(this.#bytes.slice(start, start + count), name);
  }

  #text(record: Layout["header"], base: number, name: string): string {
    const { offset, count } = this.#field(record, name);
    const start = record.offset + base + offset;
    const bytes = this.#bytes.slice(start, start + count);
    const end = bytes.indexOf(0);
    return new TextDecoder().decode(end < 0 ? bytes : bytes.subarray(0, end));
  }

  #set(name: string, value: number): void {
    this.#put(this.#layout.settings, name, 0, value);
  }

  /** Where the account of a client is in its table. */
  #account(name: string): number | undefined {
    const { accounts } = this.#layout;
    for (let base = 0; base < accounts.count * accounts.stride; base += accounts.stride)
      if (this.#long64(accounts, "key", base) !== 0n && this.#text(accounts, base, "name") === name) return base;
    return undefined;
  }

  #putLong(record: Layout["header"], name: string, base: number, value: bigint): void {
    Atomics.store(this.#longs, (record.offset + base + this.#field(record, name).offset) >> 3, value);
  }

  #put(record: Layout["header"], name: string, base: number, value: number): void {
    Atomics.store(this.#words, (record.offset + base + this.#field(record, name).offset) >> 2, value);
  }
}
