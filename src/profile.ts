/**
 * profile.ts: checks a kernel profile before anything is started, so that a bad row is named by file, line and field.
 *
 * Reads both formats that rigel-replay reads, by the same rules (native/replay/profile.c): Orion's
 * (`Name,Profile,Memory_footprint,SM_usage,Duration`) and Rigel's own (a first line `# rigel-profile 1; device=…`, then a
 * table). Streams: a profile is never held in memory as a whole.
 */

import { createReadStream } from "node:fs";
import { open } from "node:fs/promises";
import { parse as csv } from "csv-parse";
import { z } from "zod";
import { RigelError, reason } from "./errors.ts";
import { readJson } from "./json.ts";
import type { Dimensions } from "./native.ts";
import { parse } from "./schema.ts";

/** What a profile holds: one iteration or request of a program. */
interface ProfileSummary {
  /** Rows that are kernels. */
  kernels: number;
  /** All rows. */
  operations: number;
}

/** How long a kernel takes by a profile. */
export interface ProfileKernel {
  name: string;
  /** All zero: whatever its shape. */
  grid: Dimensions;
  block: Dimensions;
  duration_ns: number;
}

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

const named: FieldCheck = (value) => (value === "" ? "a name" : undefined);

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
  ["kind", oneOf("kernel", "memset", "copy_h2d", "copy_d2h", "copy_d2d", "sync")],
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

const KIND = 1;
const GRID_X = 3;
const BLOCK_X = 6;
const BLOCK_Z = 8;
const MOST_THREADS = 1024;

const rowSchema = z.object({ record: z.array(z.string()), info: z.object({ lines: z.number() }) });

/**
 * Reads a profile to its end. Throws a coded error at the first row that does not fit. `each` is told of every kernel's row.
 */
export async function readProfile(path: string, each?: (kernel: ProfileKernel) => void): Promise<ProfileSummary> {
  const { skip_bytes, skip_lines } = await readHead(path);
  const rows = createReadStream(path, { start: skip_bytes }).pipe(
    // Orion's files hold kernel names as the compiler writes them: unquoted, with commas and quotes in them.
    csv({ bom: true, info: true, skip_empty_lines: true, relax_column_count: true, relax_quotes: true }),
  );
  let columns: [string, FieldCheck][] | undefined;
  const summary: ProfileSummary = { kernels: 0, operations: 0 };
  let launches = 0;
  try {
    for await (const row of rows) {
      const { record, info } = rowSchema.parse(row);
      const where = `${path}:${skip_lines + info.lines}`;
      if (!columns) {
        columns = columnsOf(record, where);
        continue;
      }
      const fields = fieldsOf(record, columns, where);
      checkRow(fields, columns, where);
      summary.operations++;
      const kind = columns === ORION ? "kernel" : fields[KIND];
      if (kind === "kernel") {
        summary.kernels++;
        each?.(columns === ORION ? kernelOfOrion(fields) : kernelOfRigel(fields));
      }
      if (kind !== "sync") launches++;
    }
  } catch (thrown) {
    if (thrown instanceof RigelError) throw thrown;
    throw new RigelError("profile", `${path}: ${csvReason(thrown, skip_lines)}`, { cause: thrown });
  }
  if (launches === 0)
    throw new RigelError("profile", `${path}: expected a header line and at least one operation that uses the GPU`);
  return summary;
}

const NO_SHAPE: Dimensions = [0, 0, 0];
const ORION_DURATION = 4;
const RIGEL_DURATION = 12;

function kernelOfOrion(fields: readonly string[]): ProfileKernel {
  return { name: fields[0] ?? "", grid: NO_SHAPE, block: NO_SHAPE, duration_ns: Number(fields[ORION_DURATION]) };
}

function kernelOfRigel(fields: readonly string[]): ProfileKernel {
  const three = (first: number): Dimensions => [
    Number(fields[first]),
    Number(fields[first + 1]),
    Number(fields[first + 2]),
  ];
  return {
    name: fields[0] ?? "",
    grid: three(GRID_X),
    block: three(BLOCK_X),
    duration_ns: Number(fields[RIGEL_DURATION]),
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
  const taken = new Map<string, { kernel: ProfileKernel; durations_ns: number[] }>();
  await readProfile(path, (kernel) => {
    const key = JSON.stringify([kernel.name, kernel.grid, kernel.block]);
    const before = taken.get(key);
    if (before) before.durations_ns.push(kernel.duration_ns);
    else taken.set(key, { kernel, durations_ns: [kernel.duration_ns] });
  });
  const durations: ProfileDurations = { kernels: [], unclear: 0 };
  for (const { kernel, durations_ns } of taken.values()) {
    const sorted = durations_ns.toSorted((a, b) => a - b);
    const median = Math.round(sorted[sorted.length >> 1] ?? 0);
    if (kernel.grid[0] === 0 && (sorted.at(-1) ?? 0) > ALIKE * (sorted[0] ?? 0)) durations.unclear++;
    else if (median > 0) durations.kernels.push({ ...kernel, duration_ns: Math.min(median, 0xffff_ffff) });
  }
  return durations;
}

/** Gaps between arrivals in seconds, by the rules of native/replay/arrivals.c, which counts in nanoseconds. */
const arrivalsSchema = z
  .array(z.number().min(0).max(3600))
  .min(1)
  .refine((gaps) => gaps.some((gap_s) => gap_s >= 0.5e-9), "expected at least one gap greater than 0");

/** Checks a file with the gaps between arrivals: a JSON list of seconds. */
export async function checkArrivals(path: string): Promise<void> {
  parse(arrivalsSchema, await readJson(path), path);
}

/** The line that says what the file is, is skipped here: its fields are not those of the table. */
async function readHead(path: string): Promise<{ skip_bytes: number; skip_lines: number }> {
  let head: string;
  try {
    await using file = await open(path);
    const { bytesRead, buffer } = await file.read(Buffer.alloc(4096), 0, 4096, 0);
    head = buffer.toString("latin1", 0, bytesRead);
  } catch (thrown) {
    throw new RigelError("profile", `${path}: cannot be read as a kernel profile (${reason(thrown)})`, {
      cause: thrown,
    });
  }
  const [line, version] = /^(?:\u00ef\u00bb\u00bf)?# rigel-profile +([^;\r\n]*)[^\n]*\n?/.exec(head) ?? ["", "1"];
  if (version?.trim() !== "1")
    throw new RigelError(
      "profile",
      `${path}:1: expected rigel-profile version 1, got ${version}; record the profile again with this version of Rigel`,
    );
  return { skip_bytes: line.length, skip_lines: line === "" ? 0 : 1 };
}

function columnsOf(header: string[], where: string): [string, FieldCheck][] {
  const columns = header[0]?.trim() === "Name" ? ORION : RIGEL;
  const names = columns.map(([name]) => name).join(",");
  const got = header.map((name) => name.trim()).join(",");
  if (got !== names)
    throw new RigelError("profile", `${where}: expected the header ${names}, got ${got.slice(0, 200)}`);
  return columns;
}

/** The fields of a row, one for each column. A name of Orion's that holds commas is put together again. */
function fieldsOf(record: string[], columns: [string, FieldCheck][], where: string): string[] {
  const extra = record.length - columns.length;
  if (extra < 0 || (extra > 0 && columns !== ORION))
    throw new RigelError("profile", `${where}: expected ${columns.length} fields, got ${record.length}`);
  return [record.slice(0, extra + 1).join(","), ...record.slice(extra + 1)].map((field) => field.trim());
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
  if (columns !== RIGEL || fields[KIND] !== "kernel") return;
  for (let column = GRID_X; column <= BLOCK_Z; column++)
    if (Number(fields[column]) === 0) refuse(column, "at least 1 for a kernel");
  const threads = fields.slice(BLOCK_X, BLOCK_Z + 1).reduce((product, size) => product * Number(size), 1);
  if (threads > MOST_THREADS)
    throw new RigelError(
      "profile",
      `${where}: block_x, block_y, block_z: expected at most ${MOST_THREADS} threads a block, got ${threads}`,
    );
}

/** csv-parse words its errors with line numbers of its own, counted from where the table starts. */
function csvReason(thrown: unknown, skip_lines: number): string {
  return reason(thrown).replace(/\bline (\d+)/, (_, line: string) => `line ${Number(line) + skip_lines}`);
}
