/**
 * gpu-share.ts: for what part of the time kernels of each client ran on its GPUs, under any policy, without asking the clients.
 *
 * On a real GPU from NVML (nvml.ts), on a simulated one from the simulator's own account (rigelSimBusy). Whoever looks on makes a
 * GpuShares and asks it about as often as it draws; a share is of the time between two looks. Everything that cannot be told is
 * null, never 0: before the second look, without NVML, of clients that threads have entered (their process has it), and of a process
 * that NVML has never named, as where MPS's server is named in place of its clients.
 */

import { existsSync } from "node:fs";
import { readManifest } from "./join.ts";
import type { Native } from "./native.ts";
import { Nvml } from "./nvml.ts";
import { parentOf } from "./proc.ts";
import type { Segment, SegmentDevice } from "./segment.ts";
import { round } from "./stats.ts";
import type { Snapshot } from "./tally.ts";

/** Shares by client name, 0 to 1; null: not known. */
export type ClientShares = ReadonlyMap<string, number | null>;

/** What processes use of one GPU, by pid; null: not known yet. */
type Busy = ReadonlyMap<number, number | null>;

/** NVML is not asked more often. */
const NVML_SPACING_ms = 900;
/** What NVML has not named again for so long is idle: twice its longest sampling period. */
const HOLD_ms = 2000;
/** Timers come early and late: a look is due after this part of the interval. */
const DUE = 0.9;
/** How far up a process's ancestors are looked for. */
const GENERATIONS = 64;

/** What a GpuShares is made of, besides what it finds by itself. */
interface Options {
  /** How often it will be asked: looks are not closer. */
  interval_ms?: number;
  /** A clock, in milliseconds. */
  clock_ms?: () => number;
}

export class GpuShares {
  readonly #native: Native;
  readonly #interval_ms: number;
  readonly #clock_ms: () => number;
  /** A server sees many launches come and go. */
  readonly #sources = new WeakMap<Segment, SimulatedGpus | RealGpus>();
  #real: RealGpus | undefined;

  constructor(native: Native, { interval_ms = 1000, clock_ms = () => performance.now() }: Options = {}) {
    this.#native = native;
    this.#interval_ms = interval_ms;
    this.#clock_ms = clock_ms;
  }

  /** The shares of a segment's clients, of which `totals` and `devices` were just read. Looks again if that is due. */
  of(segment: Segment, totals: Snapshot, devices: readonly SegmentDevice[]): ClientShares {
    const source = this.#sourceOf(segment);
    const busy = new Map(devices.map(({ index, uuid }) => [index, source.busy(uuid)]));
    return sharesOf(totals, busy);
  }

  /**
   * The indices of those devices that were lately used by a best-effort client of the segment, and by nobody who is no client: what a client has
   * started, and is none itself, is somebody else. Looked at as by `of`. That a best-effort client comes forward has to be seen: who gets
   * nothing done beside another one is as idle as that.
   */
  ownOnly(segment: Segment, devices: readonly SegmentDevice[]): number[] {
    const source = this.#sourceOf(segment);
    const own = segment.slots().filter(({ parent, finished }) => parent === null && !finished);
    const owners = new Map(own.map((slot) => [slot.pid, slot.class]));
    return devices.flatMap(({ index, uuid }) => {
      const processes = [...(source.busy(uuid) ?? [])];
      const known = processes.some(([pid, share]) => owners.get(pid) === "best-effort" && (share ?? 0) > 0);
      return known && processes.every(([pid, share]) => share === 0 || (share !== null && owners.has(pid)))
        ? [index]
        : [];
    });
  }

  #sourceOf(segment: Segment): SimulatedGpus | RealGpus {
    const known = this.#sources.get(segment);
    if (known) return known;
    const manifest = readManifest(segment);
    const source = manifest?.devices.some(({ simulated }) => simulated)
      ? new SimulatedGpus(this.#native, manifest.simulation.state, this.#interval_ms, this.#clock_ms)
      : (this.#real ??= new RealGpus(this.#interval_ms, this.#clock_ms));
    // Without one its maker may not have come to write it yet.
    if (manifest) this.#sources.set(segment, source);
    return source;
  }
}

/** The mean share of each client over the time in which it was known. */
export class MeanShares {
  #sums = new Map<string, { share_s: number; s: number }>();

  /** What clients had during the last so many seconds. */
  add(shares: ClientShares, lasted_s: number): void {
    for (const [name, share] of shares) {
      if (share === null) continue;
      const { share_s, s } = this.#sums.get(name) ?? { share_s: 0, s: 0 };
      this.#sums.set(name, { share_s: share_s + share * lasted_s, s: s + lasted_s });
    }
  }

  /** null: it was never known. */
  of(name: string): number | null {
    const { share_s, s } = this.#sums.get(name) ?? { share_s: 0, s: 0 };
    return s > 0 ? round(share_s / s) : null;
  }
}

/** Adds up the processes of each client: those that have attached, and what they have started that has not. `busy` is by device. */
function sharesOf(totals: Snapshot, busy: ReadonlyMap<number, Busy | undefined>): ClientShares {
  const owners = new Map<number, string>();
  /** What clients that threads have entered work on is their process's. */
  const ofThreads = new Map<number, number[]>();
  for (const [name, { processes }] of totals)
    for (const { pid, parent, finished, devices } of processes)
      if (parent !== null) ofThreads.set(parent, [...(ofThreads.get(parent) ?? []), ...devices]);
      else if (!finished) owners.set(pid, name);
  const strangers = new Map<string, Map<number, number>>();
  for (const [device, processes] of busy)
    for (const [pid, share] of processes ?? []) {
      const owner = share && !owners.has(pid) ? ancestorIn(owners, pid) : undefined;
      if (owner === undefined) continue;
      const own = strangers.get(owner) ?? new Map<number, number>();
      strangers.set(owner, own.set(device, (own.get(device) ?? 0) + (share ?? 0)));
    }
  return new Map(
    [...totals].map(([name, { processes }]) => {
      const live = processes
        .filter(({ parent, finished }) => parent === null && !finished)
        .map(({ pid, index, devices }) => ({ pid, devices: [...devices, ...(ofThreads.get(index) ?? [])] }));
      const devices = [...new Set(live.flatMap((process) => process.devices))];
      const shares = devices.map((device) => {
        const on = live.filter((process) => process.devices.includes(device));
        const parts = on.map(({ pid }) => busy.get(device)?.get(pid) ?? null);
        const sum = parts.reduce((all, part) => (all === null || part === null ? null : all + part), 0);
        // Side by side, under MPS, processes may add up to more.
        return sum === null ? null : Math.min(1, sum + (strangers.get(name)?.get(device) ?? 0));
      });
      const sum = shares.reduce((all, share) => (all === null || share === null ? null : all + share), 0);
      return [name, sum === null || shares.length === 0 ? null : round(sum / shares.length)];
    }),
  );
}

function ancestorIn(owners: ReadonlyMap<number, string>, pid: number): string | undefined {
  for (let one = parentOf(pid), up = 0; one > 1 && up < GENERATIONS; one = parentOf(one), up++) {
    const owner = owners.get(one);
    if (owner !== undefined) return owner;
  }
  return undefined;
}

/** The simulated GPUs of one state file: exact, from counters that only grow. */
class SimulatedGpus {
  readonly #native: Native;
  readonly #state: string;
  readonly #interval_ms: number;
  readonly #clock_ms: () => number;
  #looked_ms = Number.NEGATIVE_INFINITY;
  /** The counters of the last look, by UUID and pid, and when that was. */
  #last: { at_ns: number; busy_ns: Map<string, number> } | undefined;
  #busy = new Map<string, Map<number, number>>();

  constructor(native: Native, state: string, interval_ms: number, clock_ms: () => number) {
    this.#native = native;
    this.#state = state;
    this.#interval_ms = interval_ms;
    this.#clock_ms = clock_ms;
  }

  busy(uuid: string): Busy | undefined {
    const now_ms = this.#clock_ms();
    if (now_ms - this.#looked_ms >= this.#interval_ms * DUE) {
      this.#looked_ms = now_ms;
      this.#look();
    }
    return this.#busy.get(uuid);
  }

  #look(): void {
    const last = this.#last;
    const now = this.#native.simulatedBusy(this.#state);
    this.#busy = new Map();
    this.#last = now && { at_ns: now.at_ns, busy_ns: new Map() };
    for (const { uuid, pid, busy_ns } of now?.processes ?? []) {
      const key = `${uuid} ${pid}`;
      this.#last?.busy_ns.set(key, busy_ns);
      const passed_ns = now && last ? now.at_ns - last.at_ns : 0;
      if (passed_ns <= 0) continue;
      const before_ns = last?.busy_ns.get(key) ?? 0;
      const own = this.#busy.get(uuid) ?? new Map<number, number>();
      // Less than before: another process of the same number.
      this.#busy.set(uuid, own.set(pid, (busy_ns - (busy_ns < before_ns ? 0 : before_ns)) / passed_ns));
    }
  }
}

interface RealGpu {
  looked_ms: number;
  /** On the driver's clock: nothing before it is asked for again. Undefined before the first look. */
  since_us: bigint | undefined;
  /** NVML tells of this GPU. */
  answers: boolean;
  /** Processes that it has named. What it has named at the first look may be long ago: null. */
  processes: Map<number, { share: number | null; at_ms: number }>;
}

/** The GPUs that NVML knows. It names only processes that have used a GPU since it was last asked. */
class RealGpus {
  readonly #nvml = Nvml.load();
  readonly #spacing_ms: number;
  readonly #clock_ms: () => number;
  readonly #gpus = new Map<string, RealGpu>();

  constructor(interval_ms: number, clock_ms: () => number) {
    this.#spacing_ms = Math.max(interval_ms * DUE, NVML_SPACING_ms);
    this.#clock_ms = clock_ms;
  }

  busy(uuid: string): Busy | undefined {
    const nvml = this.#nvml;
    if (typeof nvml === "string") return undefined;
    const now_ms = this.#clock_ms();
    const gpu = this.#gpus.get(uuid) ?? {
      looked_ms: Number.NEGATIVE_INFINITY,
      since_us: undefined,
      answers: false,
      processes: new Map(),
    };
    this.#gpus.set(uuid, gpu);
    if (now_ms - gpu.looked_ms >= this.#spacing_ms) look(nvml, uuid, gpu, now_ms);
    return gpu.answers ? new Map([...gpu.processes].map(([pid, { share }]) => [pid, share])) : undefined;
  }
}

function look(nvml: Nvml, uuid: string, gpu: RealGpu, now_ms: number): void {
  const isFirst = gpu.since_us === undefined;
  const samples = nvml.samples(uuid, gpu.since_us ?? 0n);
  gpu.looked_ms = now_ms;
  gpu.answers = samples !== undefined;
  if (!samples) return;
  gpu.since_us = samples.reduce((latest, { at_us }) => (at_us > latest ? at_us : latest), gpu.since_us ?? 0n);
  for (const { pid, busy } of samples) gpu.processes.set(pid, { share: isFirst ? null : busy, at_ms: now_ms });
  for (const [pid, { at_ms }] of gpu.processes)
    if (now_ms - at_ms >= HOLD_ms) {
      if (existsSync(`/proc/${pid}`)) gpu.processes.set(pid, { share: 0, at_ms });
      else gpu.processes.delete(pid);
    }
}
