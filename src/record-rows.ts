/**
 * record-rows.ts: from what was recorded to a profile: times put to launches, launches to requests, requests to rows. Pure.
 */

import { boundOf, familyOf } from "./classify.ts";
import type { Gemm, Operation } from "./profile.ts";
import { type End, type Rhythm, median, repetition } from "./record-rhythm.ts";
import { type Kind, SOURCE } from "./recording.ts";

/** A call that asked the GPU for something. */
export interface Launch {
  number: number;
  token: number;
  kind: Kind;
  /** What the GPU runs, where that stands for `kind`; else the same. */
  ran: Kind;
  begin_ns: number;
  end_ns: number;
  stream: number;
  gemm: number;
  /** A time was to be taken of it. */
  timed: boolean;
}

/** A record of CUPTI's. */
export interface GpuRecord {
  correlation: number;
  kind: Kind;
  start_ns: number;
  end_ns: number;
  stream: number;
  graph: number;
}

/** What happened, in order. */
export type Moment =
  | { what: "launch"; launch: Launch }
  | { what: "wait"; all: boolean; begin_ns: number; end_ns: number }
  | { what: "end"; end: End };

/** Everything that was recorded while launches were timed. */
export interface Recorded {
  moments: Moment[];
  /** By launch number, as the events have it. */
  times: ReadonlyMap<number, number>;
  /** Time between two events with nothing between them. */
  event_ns: number;
  gpu: readonly GpuRecord[];
  cupti: boolean;
  gemms: ReadonlyMap<number, Gemm>;
  /** Also those that only graphs launch. */
  kinds: readonly Kind[];
  /** Nothing was launched before it. */
  whole: boolean;
  device: string;
  /** SMs of the device. */
  sms: number;
}

/** One request or iteration. */
export interface Request {
  rows: Operation[];
  /** From its due time or its first launch to its end; of an iteration in a loop, to the next one's begin. */
  latency_ns: number;
  /** Launches whose time is not known and was taken from others of their kind. */
  estimated: number;
  /** Launches without a time and without others of their kind that have one, or of which the GPU has no record: not in `rows`. */
  left_out: number;
}

export interface Rows {
  requests: Request[];
  /** What the GPU did that no call of the program's was seen for. */
  unseen: number;
}

/** The GPU may be seen to begin earlier than the call, by the error of bringing its clock to the host's. */
const CLOCK_ERROR_ns = 1e6;
/** How far launches and records may be apart before what lies between is given up. */
const REACH = 256;

function alikeToken(kind: Kind): string {
  if (kind.work === "kernel") return `${kind.name}\n${kind.grid.join("x")}/${kind.block.join("x")}`;
  return kind.work === "memset" ? `set ${kind.bytes}` : `copy ${kind.bytes}`;
}

/** What CUPTI saw of one call. */
interface Call {
  records: GpuRecord[];
  token: string;
  start_ns: number;
}

function callsOf(gpu: readonly GpuRecord[]): Call[] {
  const byCorrelation = new Map<number, GpuRecord[]>();
  for (const record of gpu) {
    const known = byCorrelation.get(record.correlation);
    if (known) known.push(record);
    else byCorrelation.set(record.correlation, [record]);
  }
  return [...byCorrelation]
    .toSorted(([a], [b]) => a - b)
    .flatMap(([, unsorted]) => {
      const records = unsorted.toSorted((a, b) => a.start_ns - b.start_ns);
      const [first] = records;
      if (!first) return [];
      return [{ records, token: first.graph > 0 ? "graph" : alikeToken(first.kind), start_ns: first.start_ns }];
    });
}

/**
 * Puts CUPTI's records to launches. Correlation ids grow from call to call, as launch numbers do, so both are in the same order;
 * where they differ, whichever skips fewer is skipped. CUPTI is on a moment before launches are said to be timed: records from
 * before the first that fits belong to that moment and are not `unseen`, unless none fits.
 */
export function matched(launches: readonly Launch[], gpu: readonly GpuRecord[]) {
  const calls = callsOf(gpu);
  const found = new Map<number, GpuRecord[]>();
  const fits = (launch: Launch | undefined, call: Call | undefined): boolean =>
    launch !== undefined &&
    call !== undefined &&
    (launch.ran.work === "graph" ? "graph" : alikeToken(launch.ran)) === call.token &&
    call.start_ns >= launch.begin_ns - CLOCK_ERROR_ns;
  let unseen = 0;
  for (let l = 0, c = 0; l < launches.length && c < calls.length;) {
    const launch = launches[l];
    const call = calls[c];
    if (launch && call && fits(launch, call)) {
      found.set(launch.number, call.records);
      l++;
      c++;
      continue;
    }
    const [launchesSkipped, callsSkipped] = nextFit(l, c);
    if (found.size > 0) for (const { records } of calls.slice(c, c + callsSkipped)) unseen += records.length;
    l += launchesSkipped;
    c += callsSkipped;
  }
  return { found, unseen: found.size > 0 ? unseen : gpu.length };

  function nextFit(l: number, c: number): [number, number] {
    for (let skipped = 1; skipped <= REACH; skipped++)
      for (let ofCalls = 0; ofCalls <= skipped; ofCalls++) {
        const [dl, dc] = [skipped - ofCalls, ofCalls];
        const next = l + dl + 1 < launches.length && c + dc + 1 < calls.length;
        if (
          fits(launches[l + dl], calls[c + dc]) &&
          (!next || fits(launches[l + dl + 1], calls[c + dc + 1]) || skipped === 1)
        )
          return [dl, dc];
      }
    return [1, 1];
  }
}

const KIND_NAMES = {
  copy_h2d: "memcpy HtoD",
  copy_d2h: "memcpy DtoH",
  copy_d2d: "memcpy DtoD",
  memset: "memset",
} as const;

const OPERAND_bytes: Record<string, number> = { fp64: 8, fp32: 4, fp16: 2, bf16: 2, int8: 1, fp8: 1, c32: 8, c64: 16 };

/** Rows of the whole recording, cut into requests by its rhythm. The last one may be cut short, and is left out. */
export function rowsOf(recorded: Recorded, rhythm: Rhythm): Rows {
  const launches = recorded.moments.flatMap((moment) =>
    moment.what === "launch" && moment.launch.timed ? [moment.launch] : [],
  );
  const { found, unseen } = recorded.cupti ? matched(launches, recorded.gpu) : { found: new Map(), unseen: 0 };
  const writer = new RowWriter(recorded, found);
  const cuts = cutsOf(recorded.moments, rhythm, recorded.whole);
  const rows: Rows = { requests: [], unseen };
  for (const { from, to, latency_ns, due_ns } of cuts) {
    const [estimated, leftOut] = [writer.estimated, writer.leftOut];
    const request = {
      rows: writer.rows(from, to, rows.requests.length, due_ns),
      latency_ns,
      estimated: writer.estimated - estimated,
      left_out: writer.leftOut - leftOut,
    };
    if (request.rows.some(({ kind }) => kind !== "sync")) rows.requests.push(request);
  }
  return rows;
}

interface Cut {
  from: number;
  to: number;
  latency_ns: number;
  /** From when on its first launch's gap counts; undefined: from the end of what was before it. */
  due_ns: number | undefined;
}

function cutsOf(moments: readonly Moment[], { by, period }: Rhythm, whole: boolean): Cut[] {
  if (by === "repetition") return iterations(moments, period);
  const cuts: Cut[] = [];
  let from = whole ? 0 : undefined;
  for (const [index, moment] of moments.entries()) {
    if (moment.what !== "end" || (moment.end.source === SOURCE.reported) !== (by === "reports")) continue;
    const { at_ns, latency_ns } = moment.end;
    // What the first one launched before the recording began is not known.
    // The wait that ended it comes right after it.
    const next = moments[index + 1];
    const to = index + (by === "waits" && next?.what === "wait" && next.all ? 2 : 1);
    if (from !== undefined)
      cuts.push({ from, to, latency_ns, due_ns: by === "reports" ? at_ns - latency_ns : undefined });
    from = to;
  }
  return cuts;
}

/**
 * Cuts a loop where the host pauses longest: of the places where it waits for all that it has launched, if in most iterations it
 * does so anywhere, for a request ends with a wait, and what is copied to the GPU after that belongs to the next one.
 */
function iterations(moments: readonly Moment[], expected: number): Cut[] {
  const launches: { index: number; launch: Launch; waited: boolean }[] = [];
  let waited = false;
  for (const [index, moment] of moments.entries()) {
    if (moment.what === "wait") waited ||= moment.all;
    if (moment.what === "end") waited ||= moment.end.source === SOURCE.waited;
    if (moment.what !== "launch") continue;
    launches.push({ index, launch: moment.launch, waited });
    waited = false;
  }
  const repeated = repetition(launches.map(({ launch }) => launch.token)) ?? {
    period: expected,
    length: launches.length,
  };
  const { period } = repeated;
  const first = launches.length - repeated.length;
  const places = Array.from({ length: period }, (): { pauses: number[]; waits: number } => ({ pauses: [], waits: 0 }));
  for (let at = Math.max(1, first); at < launches.length; at++) {
    const place = places[(at - first) % period];
    const [before, after] = [launches[at - 1], launches[at]];
    if (!place || !before || !after) continue;
    place.pauses.push(after.launch.begin_ns - before.launch.end_ns);
    place.waits += Number(after.waited);
  }
  const ending = places.map(({ pauses, waits }) => 2 * waits > pauses.length);
  const anyEnds = ending.includes(true);
  const lengths = places.map(({ pauses }, at) => (ending[at] === anyEnds ? median(pauses) : -1));
  const cut = lengths.reduce(
    (best, length, at) => (length > (lengths[best] ?? 0) ? at : best),
    ending.indexOf(anyEnds),
  );
  const cuts: Cut[] = [];
  for (let at = first + cut; at + period < launches.length; at += period) {
    const [begin, end] = [launches[at], launches[at + period]];
    if (begin && end)
      cuts.push({
        from: begin.index,
        to: end.index,
        latency_ns: end.launch.begin_ns - begin.launch.begin_ns,
        due_ns: undefined,
      });
  }
  return cuts;
}

class RowWriter {
  estimated = 0;
  leftOut = 0;
  readonly #recorded: Recorded;
  readonly #found: ReadonlyMap<number, GpuRecord[]>;
  readonly #streams = new Map<number, number>();
  /** Times of others of the same kind, for launches without one. */
  readonly #typical_ns = new Map<number, number>();
  readonly #sms = new Map<string, number>();
  readonly #gemmLaunches = new Map<number, Launch[]>();

  constructor(recorded: Recorded, found: ReadonlyMap<number, GpuRecord[]>) {
    this.#recorded = recorded;
    this.#found = found;
    const times = new Map<number, number[]>();
    for (const kind of recorded.kinds) if (kind.sms > 0) this.#sms.set(alikeToken(kind), kind.sms);
    for (const moment of recorded.moments) {
      if (moment.what !== "launch") continue;
      const { launch } = moment;
      const { number, token, gemm } = launch;
      if (gemm > 0) this.#gemmLaunches.set(gemm, [...(this.#gemmLaunches.get(gemm) ?? []), launch]);
      const time = recorded.times.get(number);
      if (time === undefined) continue;
      const known = times.get(token);
      if (known) known.push(time);
      else times.set(token, [time]);
    }
    for (const [token, of] of times) this.#typical_ns.set(token, median(of));
  }

  rows(from: number, to: number, request: number, due_ns: number | undefined): Operation[] {
    const { moments } = this.#recorded;
    const rows: Operation[] = [];
    let before_ns = due_ns ?? endOf(moments, from);
    for (const [index, moment] of moments.slice(from, to).entries()) {
      const last = rows.at(-1);
      if (moment.what === "launch") {
        const { launch } = moment;
        const gap_ns = Math.max(0, Math.round(launch.begin_ns - (before_ns ?? launch.begin_ns)));
        rows.push(...this.#launched(launch, request, gap_ns));
        before_ns = Math.max(before_ns ?? 0, launch.end_ns);
      } else if (moment.what === "wait") {
        if (moment.all && last && last.kind !== "sync")
          rows.push(sync(request, Math.max(0, moment.begin_ns - (before_ns ?? moment.begin_ns))));
        before_ns = Math.max(before_ns ?? 0, moment.end_ns);
      } else if (moment.end.source === SOURCE.waited) {
        // By a query, after which there is no wait to be seen; of a wait, its entry comes next.
        const next = moments[from + index + 1];
        if (next?.what !== "wait" && last && last.kind !== "sync") rows.push(sync(request, 0));
        before_ns = Math.max(before_ns ?? 0, moment.end.at_ns);
      }
    }
    return rows;
  }

  #launched(launch: Launch, request: number, gap_ns: number): Operation[] {
    const { kind, number, stream, token } = launch;
    if (this.#recorded.cupti) {
      const records = this.#found.get(number);
      if (!records) this.leftOut++;
      return (records ?? []).map((record, index) =>
        this.#row(launch.ran === kind ? record.kind : kind, launch, {
          request,
          gap_ns: index === 0 ? gap_ns : 0,
          stream: this.#stream(stream),
          duration_ns: record.end_ns - record.start_ns,
          graph: record.graph,
        }),
      );
    }
    const time = this.#recorded.times.get(number);
    const duration_ns = time ?? this.#typical_ns.get(token);
    if (duration_ns === undefined) {
      this.leftOut++;
      return [];
    }
    if (time === undefined) this.estimated++;
    return [
      this.#row(kind, launch, {
        request,
        gap_ns,
        stream: this.#stream(stream),
        duration_ns: duration_ns - this.#recorded.event_ns,
        graph: kind.work === "graph" ? token + 1 : 0,
      }),
    ];
  }

  #row(
    kind: Kind,
    launch: Launch,
    { duration_ns, ...known }: Pick<Operation, "request" | "gap_ns" | "stream" | "duration_ns"> & { graph: number },
  ): Operation {
    const { grid, block, registers, shared_bytes, bytes } = kind;
    const { device, gemms } = this.#recorded;
    const isGraph = kind.work === "graph";
    const work = kind.work === "graph" ? "kernel" : kind.work;
    const name = work === "kernel" ? kind.name || "unknown kernel" : KIND_NAMES[work];
    const gemm = this.#isProduct(kind, launch) ? gemms.get(launch.gemm) : undefined;
    const flops = gemm ? 2 * gemm.m * gemm.n * gemm.k * gemm.batch : 0;
    const dram_bytes = gemm
      ? (OPERAND_bytes[gemm.type] ?? 0) * gemm.batch * (gemm.m * gemm.k + gemm.k * gemm.n + gemm.m * gemm.n)
      : bytes;
    const evidence = { name, kind: work, device, flops, dram_bytes } as const;
    const { bound, reason } = boundOf(evidence);
    return {
      name,
      kind: work,
      grid,
      block,
      registers,
      shared_bytes,
      bytes,
      family: familyOf(name, work),
      bound,
      bound_reason: isGraph ? "a graph as a whole" : reason,
      sms: work === "kernel" ? kind.sms || this.#sms.get(alikeToken(kind)) || (isGraph ? this.#recorded.sms : 0) : 0,
      flops: Math.min(flops, Number.MAX_SAFE_INTEGER),
      dram_bytes: Math.min(dram_bytes, Number.MAX_SAFE_INTEGER),
      duration_ns: Math.max(0, Math.round(duration_ns)),
      ...known,
      ...(gemm && { gemm }),
    };
  }

  /** Of the kernels of one cuBLAS call, the one that multiplies; the others add up or set to zero. */
  #isProduct(kind: Kind, { gemm, number }: Launch): boolean {
    if (gemm === 0 || kind.work !== "kernel") return false;
    const kernels = (this.#gemmLaunches.get(gemm) ?? []).filter((one) => one.kind.work === "kernel");
    const product = kernels.find((one) => familyOf(one.kind.name, "kernel") === "gemm") ?? kernels[0];
    return product?.number === number;
  }

  #stream(key: number): number {
    const known = this.#streams.get(key) ?? this.#streams.size % 32;
    this.#streams.set(key, known);
    return known;
  }
}

/** When the last thing before a moment ended. */
function endOf(moments: readonly Moment[], from: number): number | undefined {
  const before = moments[from - 1];
  if (!before) return undefined;
  return before.what === "launch" ? before.launch.end_ns : before.what === "wait" ? before.end_ns : before.end.at_ns;
}

function sync(request: number, gap_ns: number): Operation {
  return {
    name: "wait",
    kind: "sync",
    stream: 0,
    grid: [0, 0, 0],
    block: [0, 0, 0],
    registers: 0,
    shared_bytes: 0,
    bytes: 0,
    duration_ns: 0,
    gap_ns: Math.round(gap_ns),
    family: "other",
    bound: "unknown",
    bound_reason: "a wait",
    sms: 0,
    flops: 0,
    dram_bytes: 0,
    request,
  };
}

/**
 * One request that stands for all: of those that launched what most did, the median of each duration and gap. The gap before the
 * first launch is the least: the others hold time in which no request was there. So is each duration by `events`: on an idle
 * GPU they hold what passed between the event before and the launch, and never less than the kernel took.
 */
export function typical(requests: readonly Request[], events: boolean): { rows: Operation[]; alike: number } {
  const alike = largest(requests, launched);
  const most = largest(alike, asked);
  const rows = (most[0]?.rows ?? []).map((row, index) => ({
    ...row,
    request: 0,
    duration_ns: (events ? least : median)(most.map((one) => one.rows[index]?.duration_ns ?? 0)),
    gap_ns:
      index === 0
        ? least(most.map((one) => one.rows[0]?.gap_ns ?? 0))
        : median(most.map((one) => one.rows[index]?.gap_ns ?? 0)),
  }));
  return { rows, alike: alike.length };
}

function largest(requests: readonly Request[], what: (request: Request) => string): Request[] {
  const [most = []] = [...Map.groupBy(requests, what).values()].toSorted((a, b) => b.length - a.length);
  return most;
}

function asked({ rows }: Request): string {
  return rows.map(({ name, kind, grid, block, bytes }) => [name, kind, grid, block, bytes].join("|")).join("\n");
}

/** Whether a wait was for all there was depends on how far the GPU had come. */
function launched({ rows, ...request }: Request): string {
  return asked({ ...request, rows: rows.filter(({ kind }) => kind !== "sync") });
}

function least(values: readonly number[]): number {
  return values.reduce((smallest, value) => Math.min(smallest, value), values[0] ?? 0);
}
