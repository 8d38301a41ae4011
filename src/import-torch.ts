/**
 * import-torch.ts: traces of torch.profiler (Kineto's Chrome trace JSON, 1.8 and later), as it is or gzipped.
 *
 * Events stand in no order of time, so what the GPU did is kept until the end, some 70 bytes for each operation (names and
 * shapes once each), and then put in the order in which the host launched it. Where the host's calls were traced, gaps are the
 * host's time between them; else they are idle time of the GPU.
 */

import { type OperationKind, familyOf } from "./classify.ts";
import { Column } from "./column.ts";
import { FieldError } from "./import-number.ts";
import { tracePieces } from "./import-json.ts";
import { type Called, type FileReport, type Recorded, UNCALLED } from "./import-row.ts";
import type { Source } from "./import-source.ts";

/** Categories of Kineto, lower case (1.8 had them capitalised), that are no GPU work. */
const OTHER_CATEGORIES = new Set(
  (
    "cpu_op operator user_annotation gpu_user_annotation external_correlation cuda_sync cuda_event python_function " +
    "overhead trace ac2g async_gpu async_cpu fwdbwd cpu_instant_event gpu_pm_counter collective_comm mtia_runtime glow_runtime " +
    "async communication instant forward_backward"
  ).split(" "),
);
const HOST = new Set(["cuda_runtime", "cuda_driver", "runtime"]);
const LAUNCHES = /launch|memcpy|memset/i;
const WAITS = /^cu(da)?(Device|Ctx|Stream|Event)Synchronize/;
/** One letter each, by the trace event format. */
const PHASES = /^[XBEbensftiICPNODMVvRcp()]$/;

/** Bytes of an element, by how Kineto names the type. */
const ELEMENT_bytes: Record<string, number> = {
  float: 4,
  double: 8,
  "c10::half": 2,
  "c10::bfloat16": 2,
  half: 2,
  bfloat16: 2,
  "c10::float8_e4m3fn": 1,
  "c10::float8_e5m2": 1,
};

interface Shape {
  name: string;
  kind: OperationKind;
  grid: [number, number, number];
  block: [number, number, number];
  registers: number;
  shared_bytes: number;
  bytes: number;
  device: string;
  stream: string;
}

/** A table of values, each once. */
class Interned<Value> {
  readonly values: Value[] = [];
  readonly #indices = new Map<string, number>();

  indexOf(key: string, value: Value): number {
    const known = this.#indices.get(key);
    if (known !== undefined) return known;
    this.#indices.set(key, this.values.length);
    return this.values.push(value) - 1;
  }
}

/** No id: they are counted from 0 or 1. */
const NONE = 2 ** 32 - 1;

class Operations {
  readonly shapes = new Interned<Shape>();
  readonly shape = new Column("u32");
  readonly start_ns = new Column("f64");
  readonly duration_ns = new Column("f64");
  readonly correlation = new Column("u32");
  readonly external = new Column("u32");
}

class Calls {
  readonly correlation = new Column("u32");
  readonly start_ns = new Column("f64");
  readonly end_ns = new Column("f64");
}

interface Wait {
  name: string;
  start_ns: number;
  end_ns: number;
}

export async function* readTorch(source: Source, report: FileReport): AsyncGenerator<Recorded[]> {
  const operations = new Operations();
  const calls = new Calls();
  const waits: Wait[] = [];
  const steps: { start_ns: number; end_ns: number }[] = [];
  const work = new Map<number, { flops: number; bytes: number }>();
  const devices = new Map<string, string>();
  let base_us: number | undefined;
  const begin = (value: Record<string, unknown>): number => {
    base_us ??= typeof value["ts"] === "number" ? Math.floor(value["ts"]) : 0;
    return nanoseconds(value, "ts", base_us);
  };

  let pieces_read = 0;
  for await (const pieces of tracePieces(source.path, source.text)) {
    // Left alone, the heap grows with the machine's memory rather than with what is kept.
    pieces_read += pieces.length;
    if (pieces_read >= COLLECT_EVERY) {
      pieces_read = 0;
      Bun.gc(true);
    }
    for (const { key, text, line, broken } of pieces) {
      if (broken !== undefined) {
        report.rows++;
        report.refuse(line, broken);
        continue;
      }
      const value = parsed(text);
      if (key !== undefined) {
        if (key === "deviceProperties") nameDevices(value, devices);
        continue;
      }
      const one = report.take(line, CALLED, () => {
        if (!isRecord(value)) throw new FieldError("expected an event (a JSON object), got something else");
        return event(value);
      });
      if (one && isRecord(value)) keep(value, one);
    }
  }

  function event(value: Record<string, unknown>): Recorded | undefined {
    const phase = value["ph"];
    if (typeof phase !== "string" || !PHASES.test(phase)) throw new FieldError('"ph": expected the kind of an event');
    const category = typeof value["cat"] === "string" ? value["cat"].toLowerCase() : undefined;
    const name = typeof value["name"] === "string" ? value["name"] : "";
    if (category === "kernel" || /^(gpu_)?mem(cpy|set)$/.test(category ?? "")) {
      if (phase !== "X") throw new FieldError(`"ph": expected "X" for what the GPU did, got "${phase}"`);
      if (category !== "kernel" && /HtoH/.test(name)) return report.drop("copies between buffers of the host");
      return gpuWork(value, name, category ?? "", begin(value));
    }
    if (category === undefined) {
      if (phase === "X" && "dur" in value) return report.drop("events without a category");
      return report.drop("metadata");
    }
    if (HOST.has(category)) {
      // A wait becomes an operation, later.
      if (hostCall(value, name) === "wait") return undefined;
    } else if (!OTHER_CATEGORIES.has(category)) return report.drop(`events of the unknown category "${category}"`);
    else if (phase === "X") annotation(value, name, category);
    return report.drop("events of the host, annotations and metadata");
  }

  function hostCall(value: Record<string, unknown>, name: string): "wait" | "call" {
    const start_ns = begin(value);
    const end_ns = start_ns + nanoseconds(value, "dur");
    if (WAITS.test(name)) {
      waits.push({ name, start_ns, end_ns });
      return "wait";
    }
    const correlation = idOf(args(value)["correlation"]);
    if (correlation === NONE || !LAUNCHES.test(name)) return "call";
    calls.correlation.push(correlation);
    calls.start_ns.push(start_ns);
    calls.end_ns.push(end_ns);
    return "call";
  }

  function annotation(value: Record<string, unknown>, name: string, category: string): void {
    if (name.startsWith("ProfilerStep#") && category !== "gpu_user_annotation") {
      const start_ns = begin(value);
      steps.push({ start_ns, end_ns: start_ns + nanoseconds(value, "dur") });
    }
    const external = externalId(value);
    const product = matrixProduct(name, args(value));
    if (external !== NONE && product) work.set(external, product);
  }

  function keep(value: Record<string, unknown>, one: Recorded): void {
    const { name, kind, grid, block, registers, shared_bytes, bytes, device, stream } = one;
    const shape: Shape = { name, kind, grid, block, registers, shared_bytes, bytes, device, stream };
    operations.shape.push(operations.shapes.indexOf(JSON.stringify(shape), shape));
    operations.start_ns.push(one.start_ns ?? 0);
    operations.duration_ns.push(one.duration_ns);
    operations.correlation.push(idOf(args(value)["correlation"]));
    operations.external.push(externalId(value));
  }

  yield* inOrder(operations, calls, waits, steps, work, devices, report);
}

const CALLED: Called = {
  ...UNCALLED,
  name: '"name"',
  duration: '"dur"',
  grid: ['"grid"', '"grid"', '"grid"'],
  block: ['"block"', '"block"', '"block"'],
  registers: '"registers per thread"',
  shared: '"shared memory"',
  bytes: '"bytes"',
};

/** Events between two collections of garbage: some 10 MB of it. */
const COLLECT_EVERY = 20_000;

/** Batches of so many rows. */
const BATCH = 1024;
const BATCHES_PER_COLLECTION = 20;

function* inOrder(
  operations: Operations,
  calls: Calls,
  waits: Wait[],
  steps: { start_ns: number; end_ns: number }[],
  work: ReadonlyMap<number, { flops: number; bytes: number }>,
  devices: ReadonlyMap<string, string>,
  report: FileReport,
): Generator<Recorded[]> {
  const callOf = matched(operations.correlation, calls.correlation);
  const count = operations.start_ns.length;
  const uncalled = callOf.filter((call) => call < 0).length;
  const traced = calls.start_ns.length > 0;
  if (traced && uncalled > 0)
    report.notes.add(`${uncalled} operations without their launch call stand where the GPU began them`);
  if (!traced) for (const _ of waits) report.drop("waits of the host without launches");
  if (!traced && count > 0) report.notes.add("no calls of the host in this trace: gaps are idle time of the GPU");
  const launched_ns = (index: number): number => {
    const call = callOf[index] ?? -1;
    return call >= 0 ? calls.start_ns.at(call) : operations.start_ns.at(index);
  };
  const gemms = new Map<number, number>();
  for (let index = 0; index < count; index++) {
    const shape = operations.shapes.values[operations.shape.at(index)];
    const external = operations.external.at(index);
    if (shape && work.has(external) && familyOf(shape.name, shape.kind) === "gemm")
      gemms.set(external, (gemms.get(external) ?? 0) + 1);
  }
  // Waits come after the operations in `order`, as indices from `count` on.
  const order = Uint32Array.from({ length: count + (traced ? waits.length : 0) }, (_, index) => index);
  const key = (index: number): number => (index < count ? launched_ns(index) : (waits[index - count]?.start_ns ?? 0));
  sortUnlessSorted(order, (a, b) => key(a) - key(b) || operations.start_ns.at(a) - operations.start_ns.at(b));
  steps.sort((a, b) => a.start_ns - b.start_ns);

  let batch: Recorded[] = [];
  let batches = 0;
  let previous_ns = Number.NaN;
  let lastCall = -1;
  let step = 0;
  let outside = 0;
  for (const index of order) {
    const now_ns = key(index);
    while (step + 1 < steps.length && now_ns >= (steps[step + 1]?.start_ns ?? Infinity)) step++;
    const inside = steps.length > 0 && now_ns >= (steps[0]?.start_ns ?? 0) && now_ns < (steps.at(-1)?.end_ns ?? 0);
    if (steps.length > 0 && !inside) outside++;
    const wait = waits[index - count];
    const call = callOf[index] ?? -1;
    const end_ns = wait ? wait.end_ns : call >= 0 ? calls.end_ns.at(call) : now_ns;
    const sameCall = call >= 0 && call === lastCall;
    const gap_ns = sameCall || Number.isNaN(previous_ns) ? 0 : Math.max(0, Math.round(now_ns - previous_ns));
    previous_ns = Number.isNaN(previous_ns) ? end_ns : Math.max(previous_ns, end_ns);
    lastCall = call;
    const common = { ...(traced && { gap_ns }), ...(steps.length > 0 && { request: step }) };
    if (wait) {
      batch.push({ ...WAIT, name: wait.name, ...common });
      continue;
    }
    const shape = operations.shapes.values[operations.shape.at(index)];
    if (!shape) continue;
    const external = operations.external.at(index);
    const product =
      gemms.get(external) === 1 && familyOf(shape.name, shape.kind) === "gemm" ? work.get(external) : undefined;
    batch.push({
      ...shape,
      device: devices.has(shape.device) ? `${devices.get(shape.device)} (${shape.device})` : `device ${shape.device}`,
      start_ns: operations.start_ns.at(index),
      duration_ns: operations.duration_ns.at(index),
      ...(product && { flops: product.flops, dram_bytes: product.bytes }),
      ...common,
    });
    if (batch.length < BATCH) continue;
    yield batch;
    batch = [];
    if (++batches % BATCHES_PER_COLLECTION === 0) Bun.gc(true);
  }
  if (outside > 0)
    report.notes.add(`${outside} operations outside of ProfilerStep belong to the first or last request`);
  yield batch;
}

const WAIT: Recorded = {
  name: "sync",
  kind: "sync",
  device: "",
  stream: "",
  grid: [0, 0, 0],
  block: [0, 0, 0],
  registers: 0,
  shared_bytes: 0,
  bytes: 0,
  duration_ns: 0,
};

/** Traces mostly are in order, and sorting takes several times the memory of what is sorted. */
function sortUnlessSorted(indices: Uint32Array, compare: (a: number, b: number) => number): void {
  if (indices.some((index, at) => at > 0 && compare(indices[at - 1] ?? 0, index) > 0)) indices.sort(compare);
}

/** For each of `wanted`, the index of its like in `among`, or -1. Both may be long and in any order. */
function matched(wanted: Column, among: Column): Int32Array {
  const byValue = Uint32Array.from({ length: among.length }, (_, index) => index);
  sortUnlessSorted(byValue, (a, b) => among.at(a) - among.at(b));
  return Int32Array.from({ length: wanted.length }, (_, index) => {
    const value = wanted.at(index);
    let low = 0;
    let high = byValue.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (among.at(byValue[middle] ?? 0) < value) low = middle + 1;
      else high = middle;
    }
    const found = byValue[low];
    return found !== undefined && value !== NONE && among.at(found) === value ? found : -1;
  });
}

function gpuWork(value: Record<string, unknown>, name: string, category: string, start_ns: number): Recorded {
  const of = args(value);
  const number = (key: string): number => {
    const got = of[key];
    if (typeof got !== "number") throw new FieldError(`"${key}": expected a number, got ${shown(got)}`);
    return got;
  };
  const common = {
    name,
    device: String(number("device")),
    stream: String(number("stream")),
    start_ns,
    duration_ns: Math.round(nanoseconds(value, "dur")),
  };
  const none = { grid: zeros(), block: zeros(), registers: 0, shared_bytes: 0 };
  if (category.endsWith("memset")) return { ...common, ...none, kind: "memset", bytes: number("bytes") };
  if (category.endsWith("memcpy")) return { ...common, ...none, kind: copyKind(name), bytes: number("bytes") };
  return {
    ...common,
    kind: "kernel",
    grid: triple(of["grid"], "grid"),
    block: triple(of["block"], "block"),
    registers: number("registers per thread"),
    shared_bytes: number("shared memory"),
    bytes: 0,
  };
}

function zeros(): [number, number, number] {
  return [0, 0, 0];
}

function copyKind(name: string): OperationKind {
  if (/HtoD|HtoA/.test(name)) return "copy_h2d";
  if (/DtoH|AtoH/.test(name)) return "copy_d2h";
  if (/DtoD|PtoP|AtoA|AtoD|DtoA/.test(name)) return "copy_d2d";
  throw new FieldError(`"name": expected a copy's direction (HtoD, DtoH, DtoD), got ${shown(name)}`);
}

function triple(value: unknown, key: string): [number, number, number] {
  if (Array.isArray(value)) {
    const [x, y, z]: unknown[] = value;
    if (typeof x === "number" && typeof y === "number" && typeof z === "number") return [x, y, z];
  }
  throw new FieldError(`"${key}": expected three numbers, got ${shown(value)}`);
}

/** Times are in microseconds, since 1970 in some versions: too many for a double to hold their nanoseconds. */
function nanoseconds(value: Record<string, unknown>, key: string, base_us = 0): number {
  const us = typeof value[key] === "string" ? Number(value[key]) : value[key];
  const ns = typeof us === "number" ? (us - base_us) * 1000 : Number.NaN;
  if (typeof us !== "number" || !Number.isFinite(ns) || us < 0)
    throw new FieldError(`"${key}": expected microseconds, got ${shown(value[key])}`);
  return ns;
}

function args(value: Record<string, unknown>): Record<string, unknown> {
  return isRecord(value["args"]) ? value["args"] : {};
}

function externalId(value: Record<string, unknown>): number {
  const id = idOf(args(value)["External id"] ?? args(value)["external id"]);
  return id === 0 ? NONE : id;
}

function idOf(value: unknown): number {
  return typeof value === "number" && Number.isInteger(value) && value >= 0 && value < NONE ? value : NONE;
}

/** FLOPs of a matrix product, and the bytes that it moves at least (each operand once), from its recorded shapes. */
function matrixProduct(name: string, of: Record<string, unknown>): { flops: number; bytes: number } | undefined {
  const skip = /^aten::(mm|bmm)$/.test(name) ? 0 : /^aten::(addmm|baddbmm)$/.test(name) ? 1 : -1;
  const dims = of["Input Dims"] ?? of["Input dims"];
  const types = of["Input type"];
  if (skip < 0 || !Array.isArray(dims) || !Array.isArray(types)) return undefined;
  const [left, right] = [sizes(dims[skip]), sizes(dims[skip + 1])];
  const element = ELEMENT_bytes[String(types[skip]).toLowerCase()];
  const [batch, m, k] = left?.length === 2 ? [1, ...left] : (left ?? []);
  const n = right?.at(-1);
  if (element === undefined || batch === undefined || m === undefined || k === undefined || n === undefined)
    return undefined;
  return { flops: 2 * batch * m * k * n, bytes: element * batch * (m * k + k * n + m * n) };
}

function sizes(value: unknown): number[] | undefined {
  if (!Array.isArray(value) || value.length < 2) return undefined;
  const numbers = value.map(Number);
  return numbers.every((size) => Number.isSafeInteger(size) && size >= 0) ? numbers : undefined;
}

function nameDevices(value: unknown, names: Map<string, string>): void {
  if (!Array.isArray(value)) return;
  for (const device of value)
    if (isRecord(device) && typeof device["name"] === "string") names.set(String(device["id"]), device["name"]);
}

/** Kineto writes inf and nan as they are, which JSON does not know; nothing that is used here can be either. */
function parsed(text: string): unknown {
  for (const candidate of [text, text.replaceAll(/([:[,]\s*)-?(?:nan|inf|infinity)(?=\s*[,\]}])/gi, "$1null")]) {
    try {
      return JSON.parse(candidate);
    } catch {
      // The next, or none.
    }
  }
  return undefined;
}

function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function shown(value: unknown): string {
  return (JSON.stringify(value) ?? "nothing").slice(0, 60);
}
