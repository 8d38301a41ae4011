/**
 * profile.ts: reads kernel profiles. A bad row is named by file, line and field, before anything is started.
 *
 * Reads both formats that rigel-replay reads, by the same rules (native/replay/profile.c): Orion's
 * (`Name,Profile,Memory_footprint,SM_usage,Duration`) and Rigel's own (a first line `# rigel-profile 1; device=…`, then a
 * table). Rigel's has three widths: what a replay needs, with what an import or an analysis adds (FURTHER), and with what only
 * a recording has besides (RECORDED; then the first line says `rigel-profile 2`).
 * Streams: a profile is never held in memory as a whole.
 */

import { createReadStream } from "node:fs";
import { open, stat } from "node:fs/promises";
import { z } from "zod";
import {
  BOUNDS,
  type Bound,
  FAMILIES,
  type Family,
  OPERATION_KINDS,
  type OperationKind,
  familyOf,
} from "./classify.ts";
import { csvRecords } from "./csv.ts";
import { RigelError, reason } from "./errors.ts";
import { TOOL_NAMES, detect } from "./import-detect.ts";
import { forgetPlaces, readJson } from "./json.ts";
import { parse } from "./schema.ts";

/** What a profile holds: one iteration or request of a program. */
interface ProfileSummary {
  /** Rows that are kernels. */
  kernels: number;
  /** All rows. */
  operations: number;
}

/** One row: something that the GPU was asked to do, or a wait of the host. Columns of the same names hold it. */
export interface Operation {
  /** As the tool that recorded it demangled it. */
  name: string;
  kind: OperationKind;
  /** 0 to 31, numbered in the order in which they are first used. */
  stream: number;
  /** Blocks and threads by axis; all 0 for what is no kernel, and where the shape is not known. */
  grid: [number, number, number];
  block: [number, number, number];
  /** For each thread. */
  registers: number;
  /** For each block. */
  shared_bytes: number;
  /** Copied or set. */
  bytes: number;
  /** On the GPU. */
  duration_ns: number;
  /** What passed before it: on the host since the launch before, or on the idle GPU (the first line's `gaps` says which). */
  gap_ns: number;
  family: Family;
  bound: Bound;
  /** Why that bound. */
  bound_reason: string;
  /** Multiprocessors in use; 0: not known. */
  sms: number;
  /** Floating-point operations; 0: not known. */
  flops: number;
  /** To and from device memory; 0: not known. */
  dram_bytes: number;
  /** The request or iteration that it belongs to, counted from 0. */
  request: number;
  /** Launched as part of a CUDA graph: that graph's number; 0: on its own, or not known. */
  graph?: number;
  /** The matrix product that cuBLAS was asked for, m x n x k, so many of them. */
  gemm?: Gemm;
}

export interface Gemm {
  m: number;
  n: number;
  k: number;
  batch: number;
  /** Of its operands: "fp32", "bf16", ... */
  type: string;
}

/** A profile that is being read. */
export interface Profile {
  format: "rigel" | "orion";
  /** What the first line says, as `device=NVIDIA H200`. Empty for Orion's. */
  facts: ReadonlyMap<string, string>;
  operations: AsyncIterable<Operation>;
}

/** How long a kernel takes by a profile; grid and block all zero: whatever its shape. */
export type ProfileKernel = Pick<Operation, "name" | "grid" | "block" | "duration_ns"> & {
  /** How often it is launched. */
  launches: number;
};

/** Checks one field; returns what was expected when it does not fit. */
type FieldCheck = (value: string) => string | undefined;

const HOUR_ns = 3.6e12;

function wholeTo(most: number): FieldCheck {
  return (value) => (/^\d+$/.test(value) && Number(value) <= most ? undefined : `a whole number from 0 to ${most}`);
}

function numberTo(most: number): FieldCheck {
  return (value) => (/^\d+(\.\d*)?$/.test(value) && Number(value) <= most ? undefined : `a number from 0 to ${most}`);
}

function oneOf(...allowed: string[]): FieldCheck {
  return (value) => (allowed.includes(value) ? undefined : `one of ${allowed.join(", ")}`);
}

const LONGEST_NAME_bytes = 65_535;
const named: FieldCheck = (value) =>
  value.trim() === ""
    ? "a name"
    : Buffer.byteLength(value) > LONGEST_NAME_bytes
      ? `a name of at most ${LONGEST_NAME_bytes} bytes`
      : undefined;

/** Columns in their order. */
const ORION: [string, FieldCheck][] = [
  ["Name", named],
  ["Profile", oneOf("1", "0", "-1", "1.0", "0.0", "-1.0")],
  ["Memory_footprint", numberTo(2 ** 64)],
  ["SM_usage", numberTo(2 ** 31 - 1)],
  ["Duration", numberTo(HOUR_ns)],
];

const RIGEL: [string, FieldCheck][] = [
  ["name", named],
  ["kind", oneOf(...OPERATION_KINDS)],
  ["stream", wholeTo(31)],
  ["grid_x", wholeTo(2 ** 31 - 1)],
  ["grid_y", wholeTo(65_535)],
  ["grid_z", wholeTo(65_535)],
  ["block_x", wholeTo(1024)],
  ["block_y", wholeTo(1024)],
  ["block_z", wholeTo(64)],
  ["registers", wholeTo(255)],
  ["shared_bytes", wholeTo(2 ** 20)],
  ["bytes", wholeTo(2 ** 40)],
  ["duration_ns", wholeTo(HOUR_ns)],
  ["gap_ns", wholeTo(HOUR_ns)],
];

/** After RIGEL's, all or none of them. */
const FURTHER: [string, FieldCheck][] = [
  ["family", oneOf(...FAMILIES)],
  ["bound", oneOf(...BOUNDS)],
  ["bound_reason", () => undefined],
  ["sms", wholeTo(2 ** 31 - 1)],
  ["flops", wholeTo(Number.MAX_SAFE_INTEGER)],
  ["dram_bytes", wholeTo(Number.MAX_SAFE_INTEGER)],
  ["request", wholeTo(2 ** 31 - 1)],
];
const WIDE = [...RIGEL, ...FURTHER];

/** After FURTHER's, all or none of them. */
const RECORDED: [string, FieldCheck][] = [
  ["graph", wholeTo(2 ** 31 - 1)],
  ["gemm_m", wholeTo(Number.MAX_SAFE_INTEGER)],
  ["gemm_n", wholeTo(Number.MAX_SAFE_INTEGER)],
  ["gemm_k", wholeTo(Number.MAX_SAFE_INTEGER)],
  ["gemm_batch", wholeTo(Number.MAX_SAFE_INTEGER)],
  ["gemm_type", () => undefined],
];
const WIDEST = [...WIDE, ...RECORDED];

/** The header of what is written: of an import, and of a recording. */
export const COLUMN_NAMES: readonly string[] = WIDE.map(([name]) => name);
export const RECORDED_COLUMN_NAMES: readonly string[] = WIDEST.map(([name]) => name);

/** What a replay takes (native/replay/profile.h); more can be shown and compared. */
export const MOST_REPLAYED = 1_000_000;

const KIND = 1;
const GRID_X = 3;
const BLOCK_X = 6;
const BLOCK_Z = 8;
const BOUND_REASON = 16;
const SMS = 17;
const MOST_THREADS = 1024;
/** Characters of what csv-parse says: it quotes what it read, however long that is. */
const LONGEST_REASON = 200;

/** Reads a profile to its end. Throws a coded error at the first row that does not fit. */
export async function readProfile(path: string): Promise<ProfileSummary> {
  const { operations } = await openProfile(path);
  const summary: ProfileSummary = { kernels: 0, operations: 0 };
  for await (const { kind } of operations) {
    summary.operations++;
    if (kind === "kernel") summary.kernels++;
  }
  if (summary.operations > MOST_REPLAYED)
    throw new RigelError(
      "profile",
      `${path}: expected at most ${MOST_REPLAYED} operations, got ${summary.operations}; replay a part of it ` +
        "(rigel import --request)",
    );
  return summary;
}

/** Opens a profile; its rows are read and checked as `operations` is gone through, which throws at a bad one. */
export async function openProfile(path: string): Promise<Profile> {
  const head = await readHead(path);
  return { format: head.orion ? "orion" : "rigel", facts: head.facts, operations: readOperations(path, head) };
}

async function* readOperations(path: string, { skip_bytes, skip_lines, orion, text }: Head): AsyncGenerator<Operation> {
  const batches = csvRecords(createReadStream(path, { start: skip_bytes, highWaterMark: 1 << 18 }), {
    bom: true,
    skip_empty_lines: true,
    // Orion's files hold kernel names as the compiler writes them: unquoted, with commas and quotes in them.
    relax_quotes: orion,
  });
  let columns: [string, FieldCheck][] | undefined;
  let launches = 0;
  try {
    for await (const batch of batches)
      for (const { record, line } of batch) {
        const where = `${path}:${skip_lines + line}`;
        if (!columns) {
          columns = columnsOf(record, where, () => importable(path, text));
          continue;
        }
        if (columns !== ORION && record.length !== columns.length && record[0]?.startsWith("#")) continue;
        const fields = fieldsOf(record, columns, where);
        checkRow(fields, columns, where);
        const operation = columns === ORION ? orionOperation(fields) : rigelOperation(fields);
        if (operation.kind !== "sync") launches++;
        yield operation;
      }
  } catch (thrown) {
    if (thrown instanceof RigelError) throw thrown;
    throw new RigelError("profile", `${path}: ${csvReason(thrown, skip_lines)}`, { cause: thrown });
  }
  if (launches === 0)
    throw new RigelError("profile", `${path}: expected a header line and at least one operation that uses the GPU`);
}

function orionOperation([name = "", profile, , sms, duration]: string[]): Operation {
  return {
    name,
    kind: "kernel",
    stream: 0,
    grid: [0, 0, 0],
    block: [0, 0, 0],
    registers: 0,
    shared_bytes: 0,
    bytes: 0,
    duration_ns: Math.round(Number(duration)),
    gap_ns: 0,
    family: familyOf(name, "kernel"),
    bound: orionBound(profile),
    bound_reason: Number(profile) < 0 ? "not known to the file" : "stated by the file",
    sms: Math.max(1, Math.round(Number(sms))),
    flops: 0,
    dram_bytes: 0,
    request: 0,
  };
}

function orionBound(profile: string | undefined): Bound {
  return Number(profile) < 0 ? "unknown" : Number(profile) === 1 ? "compute" : "memory";
}

function rigelOperation(fields: string[]): Operation {
  const name = fields[0] ?? "";
  const kind = OPERATION_KINDS.find((one) => one === fields[KIND]) ?? "kernel";
  const number = (column: number): number => Number(fields[column] ?? 0);
  const wide = fields.length > RIGEL.length;
  const F = RIGEL.length;
  return {
    name,
    kind,
    stream: number(2),
    grid: [number(GRID_X), number(GRID_X + 1), number(GRID_X + 2)],
    block: [number(BLOCK_X), number(BLOCK_X + 1), number(BLOCK_Z)],
    registers: number(9),
    shared_bytes: number(10),
    bytes: number(11),
    duration_ns: number(12),
    gap_ns: number(13),
    family: FAMILIES.find((one) => one === fields[F]) ?? familyOf(name, kind),
    bound: BOUNDS.find((one) => one === fields[F + 1]) ?? "unknown",
    bound_reason: wide ? (fields[F + 2] ?? "") : "",
    sms: number(F + 3),
    flops: number(F + 4),
    dram_bytes: number(F + 5),
    request: number(F + 6),
    ...(fields.length > WIDE.length && {
      graph: number(WIDE.length),
      ...(number(WIDE.length + 1) > 0 && {
        gemm: {
          m: number(WIDE.length + 1),
          n: number(WIDE.length + 2),
          k: number(WIDE.length + 3),
          batch: number(WIDE.length + 4),
          type: fields[WIDE.length + 5] ?? "",
        },
      }),
    }),
  };
}

/** Rows without a shape stand for a kernel of any shape where the longest takes at most so many times the shortest. */
const ALIKE = 1.25;

/** What a profile says of each kernel: the median of its rows. */
interface ProfileDurations {
  kernels: ProfileKernel[];
  /** Names without shapes whose rows differ, so that a name alone does not say how long the kernel takes. */
  unclear: number;
}

/**
 * Reads how long each kernel of a profile takes, by name and shape. Orion's format has no shapes: there a name stands for
 * all shapes, if all its rows take about the same time, and is left out if they do not.
 */
export async function readDurations(path: string): Promise<ProfileDurations> {
  const taken = new Map<string, { kernel: Omit<ProfileKernel, "launches">; durations_ns: number[] }>();
  for await (const { name, kind, grid, block, duration_ns } of (await openProfile(path)).operations) {
    if (kind !== "kernel") continue;
    const key = JSON.stringify([name, grid, block]);
    const before = taken.get(key);
    if (before) before.durations_ns.push(duration_ns);
    else taken.set(key, { kernel: { name, grid, block, duration_ns }, durations_ns: [duration_ns] });
  }
  const durations: ProfileDurations = { kernels: [], unclear: 0 };
  for (const { kernel, durations_ns } of taken.values()) {
    const sorted = durations_ns.toSorted((a, b) => a - b);
    const median = Math.round(sorted[sorted.length >> 1] ?? 0);
    if (kernel.grid[0] === 0 && (sorted.at(-1) ?? 0) > ALIKE * (sorted[0] ?? 0)) durations.unclear++;
    else if (median > 0)
      durations.kernels.push({
        ...kernel,
        duration_ns: Math.min(median, 0xffff_ffff),
        launches: durations_ns.length,
      });
  }
  return durations;
}

/** Gaps between arrivals in seconds, by the rules of native/replay/arrivals.c, which counts in nanoseconds. */
const arrivalsSchema = z
  .array(z.number().min(0).max(3600))
  .min(1)
  .refine((gaps) => gaps.some((gap_s) => gap_s >= 0.5e-9), "expected at least one gap greater than 0");

/** Checks a file with the gaps between arrivals: a JSON list of seconds. Throws a coded error that names the entry and its line. */
export async function checkArrivals(path: string): Promise<void> {
  try {
    parse(arrivalsSchema, await readJson(path), path);
  } finally {
    forgetPlaces(path);
  }
}

interface Head {
  skip_bytes: number;
  skip_lines: number;
  orion: boolean;
  facts: ReadonlyMap<string, string>;
  /** The beginning of the file. */
  text: string;
}

/** Longer than any first line that Rigel writes. */
const HEAD_bytes = 65_536;

/** The line that says what the file is, is skipped by the table's reader: its fields are not those of the table. */
async function readHead(path: string): Promise<Head> {
  let head: Buffer;
  try {
    // One that nobody writes to would be waited for.
    if ((await stat(path)).isFIFO()) throw new Error("it is a pipe; save what comes out of it to a file");
    await using file = await open(path);
    const { bytesRead, buffer } = await file.read(Buffer.alloc(HEAD_bytes), 0, HEAD_bytes, 0);
    head = buffer.subarray(0, bytesRead);
  } catch (thrown) {
    throw new RigelError("profile", `${path}: cannot be read as a kernel profile (${reason(thrown)})`, {
      cause: thrown,
    });
  }
  const text = head.toString("latin1");
  const other = OTHERS.find(([magic]) => text.startsWith(magic));
  if (other) throw new RigelError("profile", `${path}: expected a kernel profile in UTF-8, got ${other[1]}`);
  const [line, version] = /^(?:\u00ef\u00bb\u00bf)?# rigel-profile +([^;\r\n]*)[^\n]*\n?/.exec(text) ?? ["", "1"];
  if (version?.trim() !== "1" && version?.trim() !== "2")
    throw new RigelError(
      "profile",
      `${path}:1: expected rigel-profile version 1 or 2, got ${version}; record the profile again with this version of Rigel`,
    );
  const pairs = head
    .toString("utf8", 0, line.length)
    .split(";")
    .slice(1)
    .map((pair): [string, string] => {
      const [key = "", ...value] = pair.split("=");
      return [key.trim(), value.join("=").trim()];
    });
  return {
    skip_bytes: line.length,
    skip_lines: line === "" ? 0 : 1,
    orion: line === "" && /^(\u00ef\u00bb\u00bf)?\s*"?Name\b/.test(text),
    facts: new Map(pairs.filter(([key]) => key !== "")),
    text,
  };
}

/** What a file may begin with that looks like a profile to people, in Latin-1. */
const OTHERS: [string, string][] = [
  ["\u00ff\u00fe", "UTF-16: save it as UTF-8"],
  ["\u00fe\u00ff", "UTF-16: save it as UTF-8"],
  ["\u001f\u008b", "a gzip file: unpack it first"],
];

/** What to do with a file of another tool's, which a profile can be made of; "" for any other. */
function importable(path: string, text: string): string {
  try {
    const { tool } = detect(path, text);
    return tool === "rigel"
      ? ""
      : `; this is ${TOOL_NAMES[tool]}, make a profile of it: rigel import ${tool} ${path} -o profile.csv`;
  } catch {
    return "";
  }
}

/** `hint`: what more there is to say of a header that is none. */
function columnsOf(header: string[], where: string, hint: () => string): [string, FieldCheck][] {
  const columns = header[0]?.trim() === "Name" ? ORION : widthOf(header.length);
  const names = columns.map(([name]) => name).join(",");
  const got = header.map((name) => name.trim()).join(",");
  if (got !== names)
    throw new RigelError("profile", `${where}: expected the header ${names}, got ${got.slice(0, 200)}${hint()}`);
  return columns;
}

function widthOf(columns: number): [string, FieldCheck][] {
  return columns > WIDE.length ? WIDEST : columns > RIGEL.length ? WIDE : RIGEL;
}

/** The fields of a row, one for each column. A name of Orion's that holds commas is put together again. */
function fieldsOf(record: string[], columns: [string, FieldCheck][], where: string): string[] {
  const extra = record.length - columns.length;
  if (extra < 0 || (extra > 0 && columns !== ORION))
    throw new RigelError("profile", `${where}: expected ${columns.length} fields, got ${record.length}`);
  const [name = "", ...rest] = [record.slice(0, extra + 1).join(","), ...record.slice(extra + 1)];
  if (columns === ORION) return [name.trim(), ...rest.map((field) => field.trim())];
  // Blanks at the ends of a quoted text are part of it.
  return [name, ...rest.map((field, index) => (index + 1 === BOUND_REASON ? field : field.trim()))];
}

function checkRow(fields: string[], columns: [string, FieldCheck][], where: string): void {
  const refuse = (column: number, expected: string): never => {
    throw new RigelError(
      "profile",
      `${where}: ${columns[column]?.[0]}: expected ${expected}, got ${JSON.stringify(fields[column] ?? "")}`,
    );
  };
  for (const [column, [, check]] of columns.entries()) {
    const expected = check(fields[column] ?? "");
    if (expected !== undefined) refuse(column, expected);
  }
  if (columns === ORION || fields[KIND] !== "kernel") return;
  const shape = fields.slice(GRID_X, BLOCK_Z + 1);
  if (columns.length >= WIDE.length && Number(fields[SMS]) > 0 && shape.every((size) => Number(size) === 0)) return;
  for (let column = GRID_X; column <= BLOCK_Z; column++)
    if (Number(fields[column]) === 0) refuse(column, "at least 1 for a kernel");
  const threads = fields.slice(BLOCK_X, BLOCK_Z + 1).reduce((product, size) => product * Number(size), 1);
  if (threads > MOST_THREADS)
    throw new RigelError(
      "profile",
      `${where}: block_x, block_y, block_z: expected at most ${MOST_THREADS} threads a block, got ${threads}`,
    );
}

/** csv-parse words its errors with line numbers of its own, counted from where the table starts, and with what it read. */
function csvReason(thrown: unknown, skip_lines: number): string {
  const text = reason(thrown).replace(/\bline (\d+)/, (_, line: string) => `line ${Number(line) + skip_lines}`);
  const printable = JSON.stringify(text.slice(0, LONGEST_REASON)).slice(1, -1).replaceAll('\\"', '"');
  return `${printable}${text.length > LONGEST_REASON ? "..." : ""}; expected a profile in CSV`;
}
