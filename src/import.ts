/**
 * import.ts: `rigel import`: makes a profile of Rigel's from what other tools recorded.
 *
 * Reads once, from beginning to end, and writes as it reads. A bad row is named by file and line; unless it was asked to skip
 * them, nothing is written where there is one. What is left out is counted in the summary with the reason.
 */

import { createReadStream, mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { basename, join } from "node:path";
import { type Bound, boundOf, familyOf } from "./classify.ts";
import { RigelError, reason } from "./errors.ts";
import { type Detected, TOOL_NAMES, type Tool, detect } from "./import-detect.ts";
import { readNcu } from "./import-ncu.ts";
import { readNsys } from "./import-nsys.ts";
import { readOrion } from "./import-orion.ts";
import { readRigel } from "./import-rigel.ts";
import { FileReport, type Recorded } from "./import-row.ts";
import { type Source, openSource } from "./import-source.ts";
import { readTorch } from "./import-torch.ts";
import { onEnd } from "./interrupt.ts";
import { comparableName } from "./kernel-name.ts";
import { WholeFile, checkApart } from "./output.ts";
import { smsUsed } from "./peaks.ts";
import { MOST_REPLAYED, type Operation } from "./profile.ts";
import { ORION_HEADER, RIGEL_HEADER, factsLine, orionRow, rigelRow } from "./profile-write.ts";
import { ProgressBar, perSecond } from "./progress-bar.ts";

export interface ImportOptions {
  /** The tool that the user named; without, it is detected. */
  tool?: Tool;
  files: string[];
  /** Where the profile goes; without, it goes to `print`. */
  out?: string;
  format: "rigel" | "orion";
  /** Leave bad rows out rather than refuse the file. */
  skipBad: boolean;
  /** Of several devices in one recording, the one to keep: its name or index. */
  device?: string;
  /** A new request begins where nothing ran for so long. */
  request_gap_ns?: number;
  /** Keep this request alone, counted from 0. */
  request?: number;
  /** Pages of ncu from which kernels of the same name and shape take their metrics. */
  metrics: string[];
  /** Takes the profile if it goes to no file. Nothing is called if the summary alone is wanted. */
  print?: (chunk: Uint8Array) => Promise<void>;
}

/** The account of an import. Fields are public: they may be added, never renamed. */
export interface ImportSummary {
  schema: 1;
  out: string | null;
  device: string | null;
  operations: number;
  kernels: number;
  requests: number;
  duration_ns: number;
  families: Record<string, number>;
  bounds: Record<Bound, number>;
  files: {
    path: string;
    tool: Tool;
    rows: number;
    /** From opening it to its last row. */
    seconds: number;
    operations: number;
    dropped: Record<string, number>;
    bad_rows: number;
    bad: string[];
    notes: string[];
  }[];
  notes: string[];
}

/** Imports files, one after the other, into one profile. Throws a coded error that names each bad row. */
export async function importProfiles(options: ImportOptions): Promise<ImportSummary> {
  await checkApart([{ option: "--output", file: options.out }], [...options.files, ...options.metrics]);
  const { metrics, bad } = await readMetrics(options.metrics, options.skipBad);
  using scratch = options.out === undefined ? new Scratch() : undefined;
  const target = options.out ?? join(scratch?.path ?? "", "profile.csv");
  await using file = new WholeFile(target);
  await file.check();
  const assembler = new Assembler(options, metrics, bad, file);
  const reports: FileReport[] = [];
  for (const path of options.files) {
    const began_ms = performance.now();
    const { report, batches, bar } = await openImport(path, options.tool, options.format);
    reports.push(report);
    assembler.nextFile();
    try {
      for await (const batch of batches) for (const recorded of batch) await assembler.add(recorded, report);
      report.spent_ms = performance.now() - began_ms;
    } finally {
      bar.stop();
    }
  }
  refuseBad(reports, options.skipBad);
  const summary = assembler.summary(reports);
  await file.finish();
  if (scratch !== undefined && options.print)
    for await (const chunk of createReadStream(target)) await options.print(chunk);
  return summary;
}

/** A folder for the profile until it is printed. */
class Scratch implements Disposable {
  path = "";
  // Before it is made: nothing may come between.
  readonly #end = onEnd(() => {
    if (this.path !== "") rmSync(this.path, { recursive: true, force: true });
  });

  constructor() {
    try {
      this.path = mkdtempSync(join(tmpdir(), "rigel-import-"));
    } catch (thrown) {
      this[Symbol.dispose]();
      throw new RigelError("machine", `${tmpdir()}: no folder can be made in it (${reason(thrown)}); -o names a file`, {
        cause: thrown,
      });
    }
  }

  [Symbol.dispose](): void {
    this.#end[Symbol.dispose]();
  }
}

async function openImport(
  path: string,
  tool: Tool | undefined,
  format: ImportOptions["format"],
): Promise<{ report: FileReport; batches: AsyncIterable<Recorded[]>; bar: ProgressBar }> {
  const source = await openSource(path);
  const detected = detect(path, source.head);
  if (detected.tool === "rigel" && format === "rigel")
    throw new RigelError(
      "profile",
      `${path}: this is already a profile of Rigel's; use it as it is, or have it in Orion's form (--format orion)`,
    );
  if (tool !== undefined && tool !== detected.tool)
    throw new RigelError(
      "profile",
      `${path}: this is not ${TOOL_NAMES[tool]} but ${TOOL_NAMES[detected.tool]}; use rigel import ${detected.tool}`,
    );
  const report = new FileReport(path, detected.tool);
  // A profile is read by its own reader, which does not say how far it is.
  const size_bytes = detected.tool === "rigel" ? 0 : source.size_bytes;
  const bar = new ProgressBar(path, size_bytes, source.read_bytes, { rows: () => report.rows });
  return { report, batches: reader(source, detected, report), bar };
}

function reader(source: Source, detected: Detected, report: FileReport): AsyncIterable<Recorded[]> {
  switch (detected.tool) {
    case "nsys":
      return readNsys(source, detected.table, report);
    case "ncu":
      return readNcu(source, detected.page, detected.table, report);
    case "orion":
      return readOrion(source, detected.table, report);
    case "torch":
      return readTorch(source, report);
    case "rigel":
      return readRigel(source.path, report);
  }
}

function refuseBad(reports: FileReport[], skip: boolean): void {
  const bad = reports.reduce((sum, { bad_rows }) => sum + bad_rows, 0);
  if (bad === 0 || skip) return;
  throw new RigelError(
    "profile",
    [...badRows(reports), `${bad} bad ${bad === 1 ? "row" : "rows"}, nothing written; --skip-bad leaves them out`].join(
      "\n",
    ),
  );
}

/** A line for each bad row, as far as they are named. */
function badRows(reports: FileReport[]): string[] {
  const bad = reports.reduce((sum, { bad_rows }) => sum + bad_rows, 0);
  const named = reports.flatMap((report) => report.bad);
  return [...named, ...(bad > named.length ? [`and ${bad - named.length} more`] : [])];
}

type Metrics = Pick<Recorded, "compute_percent" | "memory_percent" | "flops" | "dram_bytes">;

/** By name and shape; of several measurements of one kernel, the last. */
async function readMetrics(
  paths: string[],
  skipBad: boolean,
): Promise<{ metrics: Map<string, Metrics>; bad: string[] }> {
  const found = new Map<string, Metrics>();
  const reports: FileReport[] = [];
  for (const path of paths) {
    const { report, batches, bar } = await openImport(path, "ncu", "rigel");
    reports.push(report);
    try {
      for await (const batch of batches)
        for (const { name, grid, block, compute_percent, memory_percent, flops, dram_bytes } of batch)
          found.set(shapeKey(name, grid, block), {
            ...(compute_percent !== undefined && { compute_percent }),
            ...(memory_percent !== undefined && { memory_percent }),
            ...(flops !== undefined && { flops }),
            ...(dram_bytes !== undefined && { dram_bytes }),
          });
    } finally {
      bar.stop();
    }
  }
  refuseBad(reports, skipBad);
  return { metrics: found, bad: badRows(reports) };
}

/** What makes two kernels the same one in two recordings. */
export function shapeKey(name: string, grid: readonly number[], block: readonly number[]): string {
  return `${comparableName(name)} ${grid.join("x")} ${block.join("x")}`;
}

/** A profile has 32 streams (native/replay/profile.h). */
const MOST_STREAMS = 32;

/** Makes operations of what was recorded, in order, and writes them. */
class Assembler {
  readonly #options: ImportOptions;
  readonly #metrics: ReadonlyMap<string, Metrics>;
  readonly #file: WholeFile;
  readonly #streams = new Map<string, number>();
  /** All that were seen, as the tools wrote them. */
  readonly #devices = new Set<string>();
  /** Those that were kept, by name. */
  readonly #kept = new Set<string>();
  readonly #families: Record<string, number> = {};
  readonly #bounds: Record<Bound, number> = { compute: 0, memory: 0, unknown: 0 };
  readonly #requests = new Set<number>();
  readonly #notes = new Set<string>();
  /** The device that is kept, as the tool wrote it. */
  #device: string | undefined;
  #operations = 0;
  #kernels = 0;
  #duration_ns = 0;
  #measured = 0;
  /** On the clock of the file that is being read. */
  #busyUntil_ns: number | undefined;
  /** The host's time before operations on other devices since the last that was kept. */
  #elsewhere_ns = 0;
  #request = -1;
  /** An operation of the file that is being read has been seen. */
  #begun = false;
  #firstRequest = 0;

  /** `bad`: rows that are left out of the metrics. */
  constructor(options: ImportOptions, metrics: ReadonlyMap<string, Metrics>, bad: readonly string[], file: WholeFile) {
    this.#options = options;
    this.#metrics = metrics;
    this.#file = file;
    for (const row of bad) this.#notes.add(`left out of the metrics: ${row}`);
  }

  /** What follows is of another file: its clock and its requests begin anew. */
  nextFile(): void {
    this.#device = undefined;
    this.#busyUntil_ns = undefined;
    this.#elsewhere_ns = 0;
    this.#begun = false;
    this.#firstRequest = this.#request + 1;
    this.#request = this.#firstRequest;
  }

  async add(recorded: Recorded, report: FileReport): Promise<void> {
    const { kind, device } = recorded;
    if (kind !== "sync" && !this.#keeps(device)) {
      this.#elsewhere_ns += recorded.gap_ns ?? 0;
      report.drop(`on another device than ${this.#options.device ?? this.#device}`);
      return;
    }
    if (kind === "sync" && this.#operations === 0) {
      report.drop("waits before the first operation");
      return;
    }
    const { gap_ns, idle_ns } = this.#gap(recorded);
    if (recorded.request !== undefined) {
      this.#request = this.#firstRequest + recorded.request;
      if (this.#options.request_gap_ns !== undefined)
        this.#notes.add("requests are as the file marks them: --request-gap has no effect there");
    } else if (kind !== "sync" && idle_ns >= (this.#options.request_gap_ns ?? Infinity) && this.#begun) this.#request++;
    this.#begun = true;
    if (this.#options.request !== undefined && this.#request !== this.#options.request) {
      this.#requests.add(this.#request);
      report.drop("of another request");
      return;
    }
    if (this.#options.format === "orion" && kind !== "kernel") {
      report.drop("copies, memsets and waits, as Orion's form has kernels alone");
      return;
    }
    const operation = this.#operation(recorded, gap_ns);
    if (this.#operations === 0) await this.#begin(recorded, report);
    this.#operations++;
    report.operations++;
    this.#requests.add(this.#request);
    if (kind === "kernel") {
      this.#kernels++;
      this.#bounds[operation.bound]++;
    }
    if (kind !== "sync") this.#families[operation.family] = (this.#families[operation.family] ?? 0) + 1;
    this.#duration_ns += operation.duration_ns;
    await this.#file.write(this.#options.format === "orion" ? orionRow(operation) : rigelRow(operation));
  }

  #keeps(device: string): boolean {
    this.#devices.add(device);
    const { device: wanted } = this.#options;
    if (wanted !== undefined && this.#device === undefined) {
      const index = /\((\d+)\)$|^device (\d+)$/.exec(device);
      if (device === wanted || deviceName(device) === wanted || (index?.[1] ?? index?.[2]) === wanted)
        this.#device = device;
      if (this.#device === undefined) return false;
    }
    this.#device ??= device;
    if (device === this.#device) this.#kept.add(deviceName(device));
    else if (wanted === undefined)
      this.#notes.add(`several devices: kept ${this.#device}, left out ${device}; --device chooses`);
    return device === this.#device;
  }

  /** The host's time before it, or where that is not known the GPU's; and for how long the GPU had nothing to do. */
  #gap({ gap_ns, start_ns, duration_ns }: Recorded): { gap_ns: number; idle_ns: number } {
    const idle = start_ns === undefined || this.#busyUntil_ns === undefined ? 0 : start_ns - this.#busyUntil_ns;
    if (idle < 0 && start_ns !== undefined) this.#notes.add("some operations overlap others; their gaps are 0");
    if (start_ns !== undefined) this.#busyUntil_ns = Math.max(this.#busyUntil_ns ?? 0, start_ns + duration_ns);
    const gap = Math.round(Math.max(0, gap_ns === undefined ? idle : gap_ns + this.#elsewhere_ns));
    this.#elsewhere_ns = 0;
    if (gap > LONGEST_GAP_ns) this.#notes.add("gaps of more than an hour are written as an hour");
    return { gap_ns: Math.min(gap, LONGEST_GAP_ns), idle_ns: start_ns === undefined ? gap : Math.max(0, idle) };
  }

  #operation(recorded: Recorded, gap_ns: number): Operation {
    const { name, kind, grid, block, registers, shared_bytes, bytes, duration_ns, stated } = recorded;
    const metrics = kind === "kernel" ? this.#metrics.get(shapeKey(name, grid, block)) : undefined;
    if (metrics) this.#measured++;
    const device = deviceName(recorded.device);
    const { compute_percent, memory_percent } = metrics ?? recorded;
    // 0: not measured.
    const flops = metrics?.flops || recorded.flops || 0;
    const dram_bytes = metrics?.dram_bytes || recorded.dram_bytes || 0;
    const { bound, reason: bound_reason } = boundOf({
      name,
      kind,
      device,
      flops,
      dram_bytes,
      ...(compute_percent !== undefined && { compute_percent }),
      ...(memory_percent !== undefined && { memory_percent }),
      ...(stated !== undefined && { stated }),
    });
    return {
      name,
      kind,
      stream: this.#stream(recorded),
      grid,
      block,
      registers,
      shared_bytes,
      bytes,
      duration_ns,
      gap_ns,
      family: familyOf(name, kind),
      bound,
      bound_reason,
      sms: recorded.sms ?? (kind === "kernel" ? smsUsed(device, recorded) : 0),
      flops,
      dram_bytes,
      request: this.#options.request === undefined ? this.#request : 0,
    };
  }

  #stream({ kind, stream }: Recorded): number {
    if (kind === "sync") return 0;
    const known = this.#streams.get(stream);
    if (known !== undefined) return known;
    if (this.#streams.size >= MOST_STREAMS)
      this.#notes.add(`more than ${MOST_STREAMS} streams: those after them are written as the last`);
    const number = Math.min(this.#streams.size, MOST_STREAMS - 1);
    this.#streams.set(stream, number);
    return number;
  }

  async #begin(first: Recorded, report: FileReport): Promise<void> {
    if (this.#options.format === "orion") {
      await this.#file.write(ORION_HEADER);
      return;
    }
    const device = deviceName(first.device);
    const gaps = first.gap_ns !== undefined ? "host" : first.start_ns !== undefined ? "idle GPU" : "none";
    const facts = new Map([
      ...(device === "" ? [] : [["device", device] satisfies [string, string]]),
      ["tool", report.tool],
      ["file", basename(report.path)],
      ["gaps", gaps],
    ]);
    await this.#file.write(factsLine(facts) + RIGEL_HEADER);
  }

  summary(reports: FileReport[]): ImportSummary {
    const { out, request } = this.#options;
    if (this.#operations === 0) throw this.#nothing(reports);
    const names = [...this.#kept].filter((name) => name !== "");
    if (names.length > 1) this.#notes.add(`recorded on different GPUs: ${names.join(", ")}`);
    if (this.#metrics.size > 0) this.#notes.add(`${this.#measured} of ${this.#kernels} kernels have metrics of ncu`);
    if (this.#operations > MOST_REPLAYED)
      this.#notes.add(`more than ${MOST_REPLAYED} operations: too long to be replayed as one request; see --request`);
    return {
      schema: 1,
      out: out ?? null,
      device: names[0] ?? null,
      operations: this.#operations,
      kernels: this.#kernels,
      requests: request === undefined ? this.#requests.size : 1,
      duration_ns: this.#duration_ns,
      families: this.#families,
      bounds: this.#bounds,
      files: reports.map(({ path, tool, rows, spent_ms, operations, dropped, bad_rows, bad, notes }) => ({
        path,
        tool,
        rows,
        seconds: Math.round(spent_ms) / 1000,
        operations,
        dropped: Object.fromEntries(dropped),
        bad_rows,
        bad,
        notes: [...notes],
      })),
      notes: [...this.#notes],
    };
  }

  #nothing(reports: FileReport[]): RigelError {
    const { device, request, files } = this.#options;
    const seen = [...this.#devices];
    const rows = reports.reduce((sum, report) => sum + report.rows, 0);
    const bad = reports.reduce((sum, { bad_rows }) => sum + bad_rows, 0);
    const what =
      device !== undefined && this.#kept.size === 0 && seen.length > 0
        ? `no device ${device} in it; there are ${seen.join(", ")}`
        : request !== undefined && this.#requests.size > 0
          ? `no request ${request} in it; there are ${this.#requests.size}, counted from 0`
          : this.#begun
            ? `no kernels in its ${rows} rows, and Orion's form has nothing else`
            : bad > 0
              ? `nothing that the GPU did in its ${rows} rows, of which ${bad} are bad`
              : `nothing that the GPU did in its ${rows} rows; record with CUDA tracing on`;
    return new RigelError("profile", [...badRows(reports), `${files.join(", ")}: ${what}`].join("\n"));
  }
}

const LONGEST_GAP_ns = 3.6e12;

/** Without the index that nsys puts behind it; "" where only the index is known. */
function deviceName(device: string): string {
  return device.replace(/ \(\d+\)$|^device \d+$/, "");
}

/** "12 gemm, 3 softmax", the most first. */
function counts(of: Record<string, number>): string {
  return Object.entries(of)
    .filter(([, count]) => count > 0)
    .toSorted(([, a], [, b]) => b - a)
    .map(([name, count]) => `${count} ${name}`)
    .join(", ");
}

/** The summary for people. */
export function importText(summary: ImportSummary): string {
  const { out, device, operations, kernels, requests, duration_ns, families, bounds, files, notes } = summary;
  const lines = [
    `${operations} operations, ${kernels} of them kernels, ${requests} ${requests === 1 ? "request" : "requests"}, ` +
      `${(duration_ns / 1e6).toFixed(3)} ms on ${device ?? "a GPU that the file does not name"}`,
    `by kind: ${counts(families)}`,
    ...(kernels > 0 ? [`kernels bound by: ${counts(bounds)}`] : []),
  ];
  for (const { path, tool, rows, seconds, operations: taken, dropped, bad, bad_rows, notes: own } of files) {
    const rate = `in ${seconds.toFixed(1)} s (${perSecond(rows, seconds * 1000)})`;
    lines.push(`${path}: ${TOOL_NAMES[tool]}: ${rows} rows read ${rate}, ${taken} taken`);
    for (const [why, count] of Object.entries(dropped)) lines.push(`  left out ${count}: ${why}`);
    if (bad_rows > 0) lines.push(`  left out ${bad_rows}: bad rows`, ...bad.map((line) => `    ${line}`));
    lines.push(...own.map((note) => `  note: ${note}`));
  }
  lines.push(...notes.map((note) => `note: ${note}`));
  if (out !== null) lines.push(`written to ${out}`);
  return lines.join("\n");
}
