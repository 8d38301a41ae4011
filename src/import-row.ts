/**
 * import-row.ts: what an importer hands on for each thing the GPU did, and the account it keeps of a file.
 *
 * Nothing is lost without a word: a row becomes an operation, or is dropped for a reason that is counted, or is bad and
 * named by line.
 */

import type { Bound, OperationKind } from "./classify.ts";
import { FieldError, wholeNumber } from "./import-number.ts";
import type { Tool } from "./import-detect.ts";

/** One operation as a tool recorded it, in the units of profile.ts. */
export interface Recorded {
  name: string;
  kind: OperationKind;
  /** The tool's own name for the device and the stream. */
  device: string;
  stream: string;
  grid: [number, number, number];
  block: [number, number, number];
  registers: number;
  shared_bytes: number;
  bytes: number;
  duration_ns: number;
  /** On the tool's own clock; missing where it has none. */
  start_ns?: number;
  /** Host time before the launch; missing where only the GPU was recorded. */
  gap_ns?: number;
  /** Counted from 0; missing where the tool marks no requests. */
  request?: number;
  sms?: number;
  flops?: number;
  dram_bytes?: number;
  compute_percent?: number;
  memory_percent?: number;
  stated?: Bound;
}

/** What the file calls what is checked here; of a shape each axis, which may be a column for all. */
export interface Called {
  name: string;
  start: string;
  duration: string;
  grid: readonly [string, string, string];
  block: readonly [string, string, string];
  registers: string;
  shared: string;
  bytes: string;
  sms: string;
  flops: string;
  dram: string;
}

/** The same of what a tool's files have no column of. */
export const UNCALLED: Called = {
  name: "name",
  start: "start",
  duration: "duration",
  grid: ["grid x", "grid y", "grid z"],
  block: ["block x", "block y", "block z"],
  registers: "registers",
  shared: "shared memory",
  bytes: "bytes",
  sms: "SMs",
  flops: "FLOPs",
  dram: "bytes of device memory",
};

const HOUR_ns = 3.6e12;
/** Tools keep times in 64 bits: what is larger was damaged, and would make an hour's gap of it. */
const LATEST_ns = 2 ** 63;
const LONGEST_NAME_bytes = 65_535;
const GRID_most = [2 ** 31 - 1, 65_535, 65_535];
const BLOCK_most = [1024, 1024, 64];
const THREADS_most = 1024;

/** Checks that a profile can hold it, by the limits of profile.ts. Throws a FieldError. */
function check(recorded: Recorded, called: Called): void {
  const { name, kind, grid, block, sms } = recorded;
  if (name.trim() === "") throw new FieldError(`${called.name}: expected a name, got none`);
  if (Buffer.byteLength(name) > LONGEST_NAME_bytes)
    throw new FieldError(
      `${called.name}: expected at most ${LONGEST_NAME_bytes} bytes, got ${Buffer.byteLength(name)}`,
    );
  const { start_ns = 0 } = recorded;
  if (!(Math.abs(start_ns) < LATEST_ns))
    throw new FieldError(`${called.start}: expected a time of at most 64 bits, got ${start_ns} ns`);
  wholeNumber(called.duration, recorded.duration_ns, HOUR_ns);
  wholeNumber(called.registers, recorded.registers, 255);
  wholeNumber(called.shared, recorded.shared_bytes, 2 ** 20);
  wholeNumber(called.bytes, recorded.bytes, 2 ** 40);
  wholeNumber(called.sms, sms ?? 0, 2 ** 31 - 1);
  wholeNumber(called.flops, recorded.flops ?? 0, Number.MAX_SAFE_INTEGER);
  wholeNumber(called.dram, recorded.dram_bytes ?? 0, Number.MAX_SAFE_INTEGER);
  if (kind !== "kernel" || (sms !== undefined && sms > 0 && grid.every((size) => size === 0))) return;
  for (const [axis, size] of grid.entries()) inShape(called.grid, axis, size, GRID_most[axis] ?? 0);
  for (const [axis, size] of block.entries()) inShape(called.block, axis, size, BLOCK_most[axis] ?? 0);
  const threads = block[0] * block[1] * block[2];
  if (threads > THREADS_most)
    throw new FieldError(
      `${[...new Set(called.block)].join(", ")}: expected at most ${THREADS_most} threads, got ${block.join("x")}`,
    );
}

function inShape(called: Called["grid"], axis: number, size: number, most: number): void {
  if (!Number.isInteger(size) || size < 1 || size > most)
    throw new FieldError(`${called[axis]}: expected a whole number from 1 to ${most} for ${"xyz"[axis]}, got ${size}`);
}

/** As many bad rows are named; all are counted. */
const MOST_NAMED = 20;

/** What became of one file. */
export class FileReport {
  readonly path: string;
  readonly tool: Tool;
  /** Rows (or events) read. */
  rows = 0;
  /** From opening the file to its last row. */
  spent_ms = 0;
  operations = 0;
  readonly dropped = new Map<string, number>();
  readonly bad: string[] = [];
  bad_rows = 0;
  readonly notes = new Set<string>();

  constructor(path: string, tool: Tool) {
    this.path = path;
    this.tool = tool;
  }

  /** Left out on purpose. */
  drop(reason: string): undefined {
    this.dropped.set(reason, (this.dropped.get(reason) ?? 0) + 1);
    return undefined;
  }

  /** Does not fit. */
  refuse(line: number, message: string): void {
    this.bad_rows++;
    if (this.bad.length < MOST_NAMED) this.bad.push(`${this.path}:${line}: ${message}`);
  }

  /** What `make` makes of a row, checked; nothing where it drops the row, or the row is bad. */
  take(line: number, called: Called, make: () => Recorded | undefined): Recorded | undefined {
    this.rows++;
    try {
      const recorded = make();
      if (recorded) check(recorded, called);
      return recorded;
    } catch (thrown) {
      if (!(thrown instanceof FieldError)) throw thrown;
      this.refuse(line, thrown.message);
      return undefined;
    }
  }
}
