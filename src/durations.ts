/**
 * durations.ts: what is known of how long kernels take, and for how much of high clients' requests these wait for the GPU, kept from one
 * launch to the next.
 *
 * One file for each device name and driver under `$XDG_CACHE_HOME/rigel/durations/` (`~/.cache` without it): JSON lines, the
 * first one says what the file is. Rows go into the segment before its clients start, and come back out when they have
 * ended. A row belongs to a program: it is only used for clients that run the same command in the same folder. What is known of requests
 * decides how programs had better share the GPU (sharing-advice.ts).
 *
 * Nothing here may fail a launch: a file that cannot be used is told about in one line, and the kernels are learned again.
 */

import { createHash, randomUUID } from "node:crypto";
import {
  chmodSync,
  existsSync,
  lstatSync,
  readFileSync,
  readdirSync,
  renameSync,
  rmSync,
  writeFileSync,
} from "node:fs";
import { join } from "node:path";
import { z } from "zod";
import type { ClientConfig } from "./config.ts";
import { type Device, moduleVersion } from "./device.ts";
import { RigelError, reason } from "./errors.ts";
import { printable, progress } from "./log.ts";
import { type Native, cacheFolders, privateFolder } from "./native.ts";
import type { ProfileKernel } from "./profile.ts";
import type { Segment } from "./segment.ts";
import { ENOUGH, FAR_OVER, longMedian } from "./slo-alone.ts";

const FORMAT = 1;
/** Rows that a file keeps, the most recently used ones: some hundred programs. */
const MOST_ROWS = 20_000;
/** Programs of whose requests a file keeps what is known. */
const MOST_PROGRAMS = 1000;
/** Rows that go into one segment, which has room for twice as many: the rest is for what is new. */
const MOST_SEEDS = 4096;
const MOST_BYTES = 64 * 2 ** 20;

const number64 = z.string().regex(/^[0-9a-f]{16}$/, "expected 16 hexadecimal digits");
const dimension = z.int().min(0).max(0xffff_ffff);
const dimensions = z.tuple([dimension, dimension, dimension]);

const headSchema = z.object({ rigel_durations: z.literal(FORMAT), device: z.string(), driver: z.string() });

const rowSchema = z.strictObject({
  /** What the segment knows the kernel by (native/estimate.h). */
  key: number64,
  program: number64,
  /** The command of that program, for people. */
  command: z.string().max(256),
  /** Of the kernel, as the driver has it, cut to what fits the segment. */
  name: z.string().max(256),
  grid: dimensions,
  block: dimensions,
  duration_ns: z.int().min(1).max(0xffff_ffff),
  /** Timed launches that are in it. */
  samples: z.int().min(1).max(0xffff_ffff),
  used: z.iso.datetime(),
});

type Row = z.infer<typeof rowSchema>;

const requestsSchema = z.strictObject({
  program: number64,
  command: z.string().max(256),
  /** What a request takes: half of the time of all is in longer ones. */
  length_ms: z.number().positive(),
  /** The part of all their time for which the program waited for the GPU. */
  waited_part: z.number().min(0).max(1),
  /** In how many that was seen. */
  requests: z.int().min(ENOUGH),
  used: z.iso.datetime(),
});

/** What is known of a program's requests. */
export type KnownRequests = z.infer<typeof requestsSchema>;

interface CacheFile {
  path: string;
  device: string;
  driver: string;
  rows: Map<string, Row>;
  /** By program. */
  requests: Map<string, KnownRequests>;
  /** Why some or all of it is not used. */
  problem: string | undefined;
  /** It cannot be looked at, or is not ours to replace: it is left as it is. */
  untouchable: boolean;
}

/** A client as far as its kernels' durations are concerned. */
interface Program {
  name: string;
  class: ClientConfig["class"];
  /** Of the program: 16 hexadecimal digits. */
  program: string;
  argv: readonly string[];
  device: Device;
}

/** Where the files are. */
export function durationsFolder(): string {
  return join(cacheFolders()[0] ?? "/tmp", "durations");
}

/**
 * What tells one program from another: what is run, where, and on how much of the GPU. A replay launches the same kernels at
 * any rate and from any folder.
 */
export function programOf({ command, replay, cwd, sm_percent }: ClientConfig): string {
  const what = replay ? ["rigel-replay", ...replay.profile] : [cwd ?? process.cwd(), ...(command ?? [])];
  return createHash("sha256")
    .update(JSON.stringify([sm_percent ?? 100, ...what]))
    .digest("hex")
    .slice(0, 16);
}

/** The durations of one launch, over all its phases. */
export class Durations {
  readonly #native: Native;
  readonly #folder: string;
  readonly #files = new Map<string, CacheFile>();
  readonly #seeds: ReadonlyMap<string, readonly ProfileKernel[]>;
  /** What has come out of segments: what was read alone is not written again, as it may have been cleared meanwhile. */
  readonly #learned = new Set<Row | KnownRequests>();

  /** Reads what earlier launches have left for these clients' devices. `seeds`: of profiles, by client name. */
  constructor(
    native: Native,
    folder: string,
    clients: readonly Program[],
    seeds: ReadonlyMap<string, readonly ProfileKernel[]>,
  ) {
    this.#native = native;
    this.#folder = folder;
    this.#seeds = seeds;
    for (const { device } of clients) {
      if (this.#files.has(device.name)) continue;
      const driver = driverOf(device, native);
      const file = readCache(join(folder, fileName(device.name, driver)), { device: device.name, driver });
      if (file.problem !== undefined) progress(`known kernel durations: ${file.problem}`);
      this.#files.set(device.name, file);
    }
  }

  /** Puts what is known of these clients' kernels into a segment that they have not started on. */
  seed(segment: Segment, clients: readonly Program[]): void {
    try {
      for (const [device, { rows, path }] of this.#files) {
        const programs = new Set(clients.filter((one) => one.device.name === device).map(({ program }) => program));
        const wanted = mostRecent([...rows.values()].filter(({ program }) => programs.has(program))).slice(
          0,
          MOST_SEEDS,
        );
        const room = wanted.filter((row) => segment.enterEstimate({ ...row, byName: false }));
        if (room.length > 0) progress(`durations of ${room.length} kernels are known from earlier launches (${path})`);
      }
      for (const { name, program, device } of clients)
        for (const kernel of this.#seeds.get(name) ?? []) {
          const key = this.#native.estimateKey(program, device.name, kernel.name, kernel.grid, kernel.block);
          segment.enterEstimate({ ...kernel, key, program, samples: 0, byName: true });
        }
    } catch (thrown) {
      progress(`known kernel durations are not used: ${reason(thrown)}`);
    }
  }

  /** Takes over what the clients of a segment have learned. */
  collect(segment: Segment, clients: readonly Program[]): void {
    const used = new Date().toISOString();
    const commands = new Map(clients.map(({ program, argv }) => [program, argv.join(" ").slice(0, 256)]));
    for (const estimate of segment.estimates()) {
      const file = estimate.device === undefined ? undefined : this.#files.get(estimate.device);
      const command = commands.get(estimate.program);
      if (!file || command === undefined || !estimate.used || estimate.samples === 0) continue;
      const { key, program, name, grid, block, duration_ns, samples } = estimate;
      const row = rowSchema.safeParse({ key, program, command, name, grid, block, duration_ns, samples, used });
      if (!row.success) continue;
      file.rows.set(key, row.data);
      this.#learned.add(row.data);
    }
  }

  /**
   * Takes over what high clients' requests wait for; to be called while these are protected still. Nothing of those that wait for others:
   * where best-effort work is not held back for them, or by far less than usual, or where several high clients are on a GPU.
   */
  collectRequests(segment: Segment, clients: readonly Program[]): void {
    const used = new Date().toISOString();
    const slots = segment.slots();
    const beside = slots.some((slot) => slot.class !== "high" && slot.launched);
    if (beside && !protects(segment)) return;
    const high = new Set(slots.filter((slot) => slot.class === "high" && slot.launched).map(({ name }) => name));
    if (high.size > 1) return;
    for (const { name, class: kind, program, argv, device } of clients) {
      const file = this.#files.get(device.name);
      if (kind !== "high" || !file) continue;
      const all = slots.flatMap((slot) => (slot.name === name ? segment.waits(slot, 0n).latest : []));
      // A program's first requests are of another kind than its later ones.
      const waits = all.slice(all.length >> 1);
      const waited_ms = waits.reduce((sum, wait) => sum + wait.waited_ms, 0);
      const row = requestsSchema.safeParse({
        program,
        command: argv.join(" ").slice(0, 256),
        length_ms: longMedian(waits),
        waited_part: waited_ms / waits.reduce((sum, wait) => sum + wait.worked_ms, waited_ms),
        requests: waits.length,
        used,
      });
      if (!row.success) continue;
      file.requests.set(program, row.data);
      this.#learned.add(row.data);
    }
  }

  /** Writes everything down for the next launch. */
  save(): void {
    for (const { path, device, driver, untouchable, ...all } of this.#files.values()) {
      const rows = [...all.rows.values()].filter((row) => this.#learned.has(row));
      const requests = [...all.requests.values()].filter((row) => this.#learned.has(row));
      if (untouchable || rows.length + requests.length === 0) continue;
      try {
        privateFolder(join(this.#folder, ".."));
        privateFolder(this.#folder);
        // Another launch may have saved meanwhile: of each kernel the later row stays.
        const merged = readCache(path, { device, driver });
        for (const row of rows) if (isLater(row, merged.rows.get(row.key))) merged.rows.set(row.key, row);
        for (const row of requests)
          if (isLater(row, merged.requests.get(row.program))) merged.requests.set(row.program, row);
        const kept = [
          ...mostRecent([...merged.rows.values()]).slice(0, MOST_ROWS),
          ...latest([...merged.requests.values()]).slice(0, MOST_PROGRAMS),
        ];
        const lines = [{ rigel_durations: FORMAT, device, driver }, ...kept].map((row) => JSON.stringify(row));
        replaceFile(path, `${lines.join("\n")}\n`);
      } catch (thrown) {
        progress(`kernel durations are not kept for the next launch: ${reason(thrown)}`);
      }
    }
  }
}

/** What was used at a time that is yet to come was so by a clock that was wrong. */
function isLater({ used }: { used: string }, kept: { used: string } | undefined): boolean {
  return kept === undefined || used >= kept.used || kept.used > new Date().toISOString();
}

/** Best-effort work delays requests by so little that what they wait for is their own. */
function protects({ policy, target }: Segment): boolean {
  return policy === "priority" || (policy === "slo" && "p99_over_alone" in target && target.p99_over_alone <= FAR_OVER);
}

/** What is known of a kernel's duration, and of how many timed launches. */
export type KnownKernel = Pick<Row, "duration_ns" | "samples">;

/** What is kept of a device's programs. */
export interface Kept {
  /** By program. */
  kernels: ReadonlyMap<string, KnownKernel[]>;
  requests: ReadonlyMap<string, KnownRequests>;
}

/** Nothing where it cannot be read, which is said when a launch reads it. */
export function keptOn(device: Device, folder: string, native: Native): Kept {
  const driver = driverOf(device, native);
  const { rows, requests } = readCache(join(folder, fileName(device.name, driver)), { device: device.name, driver });
  return { kernels: Map.groupBy(rows.values(), ({ program }) => program), requests };
}

/** What is kept, for `rigel durations --json`. */
export function keptDurations(folder: string) {
  const files = fileNames(folder).map((name) => readCache(join(folder, name)));
  return {
    schema: 1,
    folder,
    files: files.map(({ path, device, driver, rows, requests, problem }) => ({
      path,
      device,
      driver,
      problem: problem ?? null,
      kernels: mostRecent([...rows.values()]),
      requests: latest([...requests.values()]),
    })),
  };
}

/** The same as people read it. */
export function durationsText({ folder, files }: ReturnType<typeof keptDurations>): string {
  if (files.length === 0)
    return `no kernel durations are kept in ${folder} yet; a launch with best-effort clients learns some`;
  return files
    .flatMap(({ path, device, driver, problem, kernels, requests }) => [
      `${device || "unknown device"}, driver ${driver || "unknown"}: ${kernels.length} kernels (${path})`,
      ...(problem === null ? [] : [`  note: ${problem}`]),
      ...Map.groupBy(kernels, ({ program }) => program)
        .values()
        .flatMap((rows) => [
          `  ${printable(rows[0]?.command ?? "")}`,
          `  ${"us".padStart(12)} ${"samples".padStart(8)}  ${"last used".padEnd(19)}  kernel`,
          ...rows.map(
            ({ name, grid, block, duration_ns, samples, used }) =>
              `  ${(duration_ns / 1000).toFixed(1).padStart(12)} ${String(samples).padStart(8)}  ` +
              `${used.slice(0, 19).replace("T", " ")}  ${printable(name)}${shapeText(grid, block)}`,
          ),
        ]),
      ...requests.map(
        ({ command, length_ms, waited_part }) =>
          `  requests of ${length_ms.toPrecision(3)} ms wait for the GPU for ${Math.round(100 * waited_part)}% of that: ${printable(command)}`,
      ),
    ])
    .join("\n");
}

function shapeText(grid: Row["grid"], block: Row["block"]): string {
  return grid[0] === 0 ? "" : ` <<<(${grid.join(", ")}), (${block.join(", ")})>>>`;
}

/** Removes every file in the folder; their paths, and of those that stay why. Files of others cannot be there: the folder is this user's alone. */
export function clearDurations(folder: string): { removed: string[]; problems: string[] } {
  const removed: string[] = [];
  const problems: string[] = [];
  // With what a launch that was killed while it wrote has left beside them.
  for (const name of fileNames(folder, /\.jsonl(\.|$)/)) {
    const path = join(folder, name);
    try {
      rmSync(path, { force: true });
      removed.push(path);
    } catch (thrown) {
      problems.push(`${path} cannot be removed (${reason(thrown)}); remove it`);
    }
  }
  return { removed, problems };
}

function fileNames(folder: string, pattern = /\.jsonl$/): string[] {
  if (!existsSync(folder)) return [];
  try {
    return readdirSync(folder)
      .filter((name) => pattern.test(name))
      .toSorted();
  } catch (thrown) {
    throw new RigelError("cache", `${folder} cannot be read (${reason(thrown)}); make it a folder of this user's`, {
      cause: thrown,
    });
  }
}

/** Reads one file. Whatever is wrong with it is in `problem`; without `expected` it may be of any device. */
function readCache(path: string, expected?: { device: string; driver: string }): CacheFile {
  const file: CacheFile = {
    path,
    device: expected?.device ?? "",
    driver: expected?.driver ?? "",
    rows: new Map(),
    requests: new Map(),
    problem: undefined,
    untouchable: false,
  };
  let text: string;
  try {
    const found = lstatSync(path, { throwIfNoEntry: false });
    if (!found) return file;
    if (!found.isFile() || found.uid !== process.getuid?.() || (found.mode & 0o022) !== 0) {
      file.untouchable = true;
      file.problem = `${path} is not a file of this user alone, and is left as it is; remove it`;
      return file;
    }
    if (found.size > MOST_BYTES) {
      file.problem = `${path} has ${found.size} bytes, expected at most ${MOST_BYTES}; the file is not used`;
      return file;
    }
    text = readFileSync(path, "utf8");
  } catch (thrown) {
    file.untouchable = true;
    file.problem = `${path} cannot be read: ${reason(thrown)}`;
    return file;
  }
  const lines = text.split("\n");
  const head = headSchema.safeParse(parsed(lines[0] ?? ""));
  if (!head.success) {
    file.problem = `${path}:1: expected {"rigel_durations":${FORMAT},"device":"...","driver":"..."}; the file is not used`;
    return file;
  }
  if (expected && (head.data.device !== expected.device || head.data.driver !== expected.driver)) {
    file.problem =
      `${path}:1: expected durations of ${expected.device}, driver ${expected.driver}, ` +
      `got ${head.data.device}, driver ${head.data.driver}; the file is not used`;
    return file;
  }
  file.device = head.data.device;
  file.driver = head.data.driver;
  const bad: number[] = [];
  for (const [index, line] of lines.entries()) {
    if (index === 0 || line === "") continue;
    const what = parsed(line);
    const row = rowSchema.safeParse(what);
    const requests = row.success ? undefined : requestsSchema.safeParse(what);
    if (row.success) file.rows.set(row.data.key, row.data);
    else if (requests?.success) file.requests.set(requests.data.program, requests.data);
    else bad.push(index + 1);
  }
  const [first] = bad;
  if (first !== undefined)
    file.problem = `${path}:${first}: neither a kernel's duration nor a program's requests; ${bad.length} such lines are not used`;
  return file;
}

function parsed(line: string): unknown {
  try {
    return JSON.parse(line);
  } catch {
    return undefined;
  }
}

function mostRecent(rows: readonly Row[]): Row[] {
  return rows.toSorted((a, b) => (a.used === b.used ? b.samples - a.samples : a.used < b.used ? 1 : -1));
}

function latest(requests: readonly KnownRequests[]): KnownRequests[] {
  return requests.toSorted((a, b) => (a.used === b.used ? 0 : a.used < b.used ? 1 : -1));
}

/** Nobody ever sees half a file: it is written beside and then takes the other's name. */
function replaceFile(path: string, text: string): void {
  const fresh = `${path}.${randomUUID()}`;
  try {
    writeFileSync(fresh, text, { mode: 0o600, flag: "wx" });
    // The umask may have taken it from this user, too.
    chmodSync(fresh, 0o600);
    renameSync(fresh, path);
  } catch (thrown) {
    rmSync(fresh, { force: true });
    throw thrown;
  }
}

function fileName(device: string, driver: string): string {
  const plain = `${device} ${driver}`.replaceAll(/[^\w.]+/g, "-").slice(0, 150);
  return `${plain}.v${FORMAT}.jsonl`;
}

/** The version of what decides, besides the device, how long a kernel takes. */
function driverOf(device: Device, native: Native): string {
  if (device.simulated) return `rigel ${native.version}`;
  try {
    return moduleVersion(readFileSync("/proc/driver/nvidia/version", "utf8")) ?? "unknown";
  } catch {
    return "unknown";
  }
}
