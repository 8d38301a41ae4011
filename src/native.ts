/**
 * native.ts: the boundary to the native half: finds librigel.so, the simulated GPU and rigel-replay, builds or unpacks
 * them when needed, and calls the control functions of the library.
 *
 * platform -> embedded or on disk -> build when missing or older than the sources -> locate -> symbols -> one class.
 * Nothing else in Rigel touches a pointer (but nvml.ts, of NVIDIA's own library) or knows where a native file lies. The library is
 * never closed: a call after close() is a crash.
 */

import { createHash, randomUUID } from "node:crypto";
import {
  accessSync,
  chmodSync,
  constants,
  existsSync,
  lstatSync,
  mkdirSync,
  readdirSync,
  renameSync,
  rmSync,
  statSync,
  utimesSync,
  writeFileSync,
} from "node:fs";
import { readFile, stat } from "node:fs/promises";
import { availableParallelism, tmpdir } from "node:os";
import { dirname, join, resolve } from "node:path";
import { dlopen } from "bun:ffi";
import { RigelError, reason } from "./errors.ts";
import { progress } from "./log.ts";
import { homeFolder, makeFolder } from "./path.ts";
import { ProgressBar } from "./progress-bar.ts";

/** Where the parts are. All paths are absolute and lie on disk, so that other processes can load them. */
export interface NativeFiles {
  /** librigel.so, for LD_PRELOAD. */
  interposer: string;
  /** The replay client. */
  replay: string;
  /** Runs a scenario in virtual time. */
  simulate: string;
  /** Folder of the stand-in libcuda.so.1, for LD_LIBRARY_PATH. */
  simulator: string;
  /** Folder of the profiles that come with Rigel. */
  profiles: string;
  /** The PyTorch program of `rigel bench`. */
  workload: string;
  /** Folder with the Python module `rigel` and nothing else, for PYTHONPATH. */
  python: string;
}

/** Of a grid or a block: x, y, z. */
export type Dimensions = readonly [number, number, number];

const SYMBOLS = {
  rigel_version: { args: [], returns: "cstring" },
  rigel_layout: { args: [], returns: "cstring" },
  rigel_segment_create: { args: ["cstring"], returns: "i32" },
  rigel_segment_check: { args: ["cstring"], returns: "cstring" },
  rigel_segment_hold: { args: ["cstring", "u32"], returns: "i32" },
  rigel_segment_live: { args: ["cstring"], returns: "i32" },
  rigel_discard: { args: ["cstring"], returns: "i32" },
  rigel_lock: { args: ["cstring", "u32", "i32"], returns: "i32" },
  rigel_unlock: { args: ["i32"], returns: "void" },
  rigel_now_ns: { args: [], returns: "u64" },
  rigel_now_tick: { args: [], returns: "u64" },
  rigel_signal_watch: { args: ["i32"], returns: "i32" },
  rigel_signal_came: { args: ["i32"], returns: "u64" },
  rigel_segment_reap: { args: ["cstring"], returns: "i32" },
  rigel_segment_profile: { args: ["cstring", "cstring", "u32"], returns: "cstring" },
  rigel_profile_latency: { args: ["cstring"], returns: "u64" },
  rigel_estimate_key: {
    args: ["u64", "cstring", "cstring", "u32", "u32", "u32", "u32", "u32", "u32"],
    returns: "u64",
  },
  rigel_estimate_enter: { args: ["cstring", "u64"], returns: "i32" },
  rigel_record_create: { args: ["cstring", "u32"], returns: "i32" },
  rigel_record_layout: { args: [], returns: "cstring" },
} as const;

type Symbols = ReturnType<typeof dlopen<typeof SYMBOLS>>["symbols"];

/** Of the simulated GPU (native/sim/sim-control.h). */
const SIMULATOR_SYMBOLS = {
  rigelSimBusy: { args: ["cstring", "buffer", "buffer_length", "buffer"], returns: "i32" },
  rigelSimStateBytes: { args: ["u32"], returns: "u64" },
} as const;

type SimulatorSymbols = ReturnType<typeof dlopen<typeof SIMULATOR_SYMBOLS>>["symbols"];

/** rigel_sim_busy: a UUID of 16 bytes, then two numbers of 64 bits. */
const SIM_BUSY_BYTES = 32;
/** 64 processes on each of 16 GPUs. */
const SIM_BUSY_MOST = 64 * 16;

/** For how long a process has kept a simulated GPU busy since it came. */
export interface SimulatedBusy {
  /** Of the GPU, as a segment has it: GPU-…. */
  uuid: string;
  pid: number;
  busy_ns: number;
}

/**
 * A UUID of 16 bytes as nvidia-smi writes it: GPU-…, or MIG-… of a part of a GPU, whose name says so ("NVIDIA H200 MIG 1g.18gb": NVIDIA's
 * MIG user guide). Programs see such a part by that name alone (CUDA_VISIBLE_DEVICES).
 */
export function uuidText(bytes: Uint8Array, name = ""): string {
  return `${name.includes(" MIG ") ? "MIG" : "GPU"}-${bytes.toHex().replace(/^(.{8})(.{4})(.{4})(.{4})/, "$1-$2-$3-$4-")}`;
}

/** The control library, loaded. */
export class Native {
  readonly files: NativeFiles;
  readonly #symbols: Symbols;
  #loadedSimulator: SimulatorSymbols | undefined;

  private constructor(files: NativeFiles, symbols: Symbols) {
    this.files = files;
    this.#symbols = symbols;
  }

  /** Finds, builds or unpacks the native parts and loads the library. */
  static async load(): Promise<Native> {
    if (process.platform !== "linux" || !["x64", "arm64"].includes(process.arch))
      throw new RigelError(
        "native",
        `Rigel runs on Linux, x86-64 or aarch64; this is ${process.platform} ${process.arch}`,
      );
    if (Bun.isStandaloneExecutable) return await unpack();
    return Native.open(await buildIfOlder(resolve(import.meta.dir, "..")));
  }

  /** Loads the library of `files`, or that of RIGEL_LIB, or throws what the loader said. */
  static open(files: NativeFiles): Native {
    const asked = overridden();
    if (asked) return new Native({ ...files, interposer: asked.interposer }, asked.symbols);
    return new Native(files, open(files.interposer));
  }

  get version(): string {
    return this.#symbols.rigel_version() ?? "unknown";
  }

  /** The description of the segment's layout, as JSON. */
  get layout(): string {
    return this.#symbols.rigel_layout() ?? "";
  }

  /** Makes a segment file with default settings. Returns 0 or -errno. */
  createSegment(path: string): number {
    return this.#symbols.rigel_segment_create(path);
  }

  /** Makes a recording with room for so many entries, a power of two or 0. Returns 0 or -errno. */
  createRecording(path: string, entries: number): number {
    return this.#symbols.rigel_record_create(path, entries);
  }

  /** The description of a recording's layout, as JSON. */
  get recordLayout(): string {
    return this.#symbols.rigel_record_layout() ?? "";
  }

  /** Why a segment cannot be used, or null if it can. */
  checkSegment(path: string): string | null {
    return this.#symbols.rigel_segment_check(path);
  }

  /** Enters a profile's kernels into a segment, for policy orion. Returns what is wrong, or null. */
  enterProfile(segment: string, profile: string, sms: number): string | null {
    return this.#symbols.rigel_segment_profile(segment, profile, sms);
  }

  /** How long requests or iterations of the profiled program take alone, in nanoseconds, on average over its profiles; 0 without any. */
  profilesLatency_ns(profiles: readonly string[]): number {
    const sum_ns = profiles.reduce((sum, profile) => sum + Number(this.#symbols.rigel_profile_latency(profile)), 0);
    return sum_ns / Math.max(1, profiles.length);
  }

  /** Holds best-effort work back for `ms`, at most 5 s, or ends that (0). */
  holdSegment(path: string, ms: number): void {
    this.#symbols.rigel_segment_hold(path, ms);
  }

  /** Whether the process that made a segment runs, or that of any client. False of what is no segment of this user's. */
  isLive(path: string): boolean {
    return this.#symbols.rigel_segment_live(path) === 1;
  }

  /** Gives the room of a segment or recording back that is about to be removed: as long as somebody has it mapped it would be taken. */
  discard(path: string): void {
    this.#symbols.rigel_discard(path);
  }

  /**
   * Takes a lock on a byte of a file, alone or with others; it ends with this process at the latest. What ends it before;
   * undefined if it cannot be had now.
   */
  lock(path: string, byte: number, shared = false): (() => void) | undefined {
    const lock = this.#symbols.rigel_lock(path, byte, Number(shared));
    return lock < 0 ? undefined : () => this.#symbols.rigel_unlock(lock);
  }

  /** The clock of all times in a segment, CLOCK_MONOTONIC, in nanoseconds. */
  get now_ns(): number {
    return Number(this.#symbols.rigel_now_ns());
  }

  /** The processor's counter now, which a segment's ticks are of where its header says so. */
  get now_tick(): bigint {
    return BigInt(this.#symbols.rigel_now_tick());
  }

  /** From now on it is known of a signal that this process handles who has sent it. False where that cannot be. */
  watchSignal(signal: number): boolean {
    return this.#symbols.rigel_signal_watch(signal) === 0;
  }

  /** When a signal came that is handled now, and whether from the kernel, as a terminal's; once for each. Undefined where that is not known. */
  signalCame(signal: number): { at_ns: number; fromKernel: boolean } | undefined {
    const came = BigInt(this.#symbols.rigel_signal_came(signal));
    return came === 0n ? undefined : { at_ns: Number(came >> 1n), fromKernel: (came & 1n) === 1n };
  }

  /** Clears what dead clients left in a segment. Returns how many, or -errno. */
  reapSegment(path: string): number {
    return this.#symbols.rigel_segment_reap(path);
  }

  /** What a segment knows a kernel's duration by, as 16 hexadecimal digits; a grid of zeros stands for every shape. */
  estimateKey(program: string, device: string, kernel: string, grid: Dimensions, block: Dimensions): string {
    const key = this.#symbols.rigel_estimate_key(BigInt(`0x${program}`), device, kernel, ...grid, ...block);
    return BigInt.asUintN(64, BigInt(key)).toString(16).padStart(16, "0");
  }

  get #simulator(): SimulatorSymbols {
    this.#loadedSimulator ??= dlopen(join(this.files.simulator, "libcuda.so.1"), SIMULATOR_SYMBOLS).symbols;
    return this.#loadedSimulator;
  }

  /** What the state file of a simulated GPU takes. */
  get simulatedBytes(): number {
    return Number(this.#simulator.rigelSimStateBytes(1));
  }

  /**
   * What the processes on the simulated GPUs of a state file have had of them, and the GPUs' present in nanoseconds. Undefined if
   * there is no such file, of this user and version.
   */
  simulatedBusy(state: string): { at_ns: number; processes: SimulatedBusy[] } | undefined {
    const bytes = new Uint8Array(SIM_BUSY_MOST * SIM_BUSY_BYTES);
    const at_ns = new BigUint64Array(1);
    const count = this.#simulator.rigelSimBusy(state, bytes, bytes, at_ns);
    if (count < 0) return undefined;
    const numbers = new BigUint64Array(bytes.buffer);
    const processes = Array.from({ length: Math.min(count, SIM_BUSY_MOST) }, (_, row) => ({
      uuid: uuidText(bytes.subarray(row * SIM_BUSY_BYTES, row * SIM_BUSY_BYTES + 16)),
      pid: Number(numbers[row * 4 + 2]),
      busy_ns: Number(numbers[row * 4 + 3]),
    }));
    return { at_ns: Number(at_ns[0]), processes };
  }

  /** Index of a key among a segment's estimates; below 0 when there is no room. */
  enterEstimate(path: string, key: string): number {
    return this.#symbols.rigel_estimate_enter(path, BigInt(`0x${key}`));
  }
}

/** What RIGEL_LIB names, loaded. */
function overridden(): { interposer: string; symbols: Symbols } | undefined {
  const path = process.env["RIGEL_LIB"];
  if (!path) return undefined;
  if (!existsSync(path))
    throw new RigelError("native", `RIGEL_LIB=${path}: no such file; name librigel.so or unset the variable`);
  const interposer = resolve(path);
  return { interposer, symbols: open(interposer, `RIGEL_LIB=${path}`) };
}

/** A library is there, and the loader refuses it. */
export class LoadError extends RigelError {
  readonly library: string;

  constructor(library: string, called: string, cause: unknown) {
    super("native", `${called} cannot be loaded: ${reason(cause)}`, { cause });
    this.library = library;
  }
}

/** `called`: what errors call it. */
function open(library: string, called = library): Symbols {
  try {
    return dlopen(library, SYMBOLS).symbols;
  } catch (thrown) {
    throw new LoadError(library, called, thrown);
  }
}

/** LD_PRELOAD is a list that spaces and colons separate; the loader has no way to quote them. */
export function checkPreloadable(library: string): void {
  if (/[\s:]/.test(library))
    throw new RigelError(
      "native",
      `${library}: LD_PRELOAD cannot name a path with a space or colon in it; move Rigel, or copy librigel.so elsewhere ` +
        "and name it with RIGEL_LIB",
    );
}

/* From a checkout: native/build, made by make. */

async function buildIfOlder(root: string): Promise<NativeFiles> {
  const native = join(root, "native");
  const build = join(native, "build");
  const files: NativeFiles = {
    interposer: join(build, "librigel.so"),
    replay: join(build, "rigel-replay"),
    simulate: join(build, "rigel-simulate"),
    simulator: join(build, "sim"),
    profiles: join(root, "profiles"),
    workload: join(root, "src", "python", "workload.py"),
    python: join(root, "src", "python", "importable"),
  };
  const stamp = join(build, ".made");
  const products = [files.interposer, files.replay, files.simulate, join(files.simulator, "libcuda.so.1")];
  if (!products.every(existsSync) || (await modified_ms(stamp)) < (await newestSource_ms(native))) {
    const begun = new Date();
    await make(native);
    // make leaves alone what did not have to change, so the products' own times do not say when it was last asked.
    writeFileSync(stamp, "");
    utimesSync(stamp, begun, begun);
  }
  return files;
}

/** When a file was last changed; 0 if it is not there. */
async function modified_ms(path: string): Promise<number> {
  return existsSync(path) ? (await stat(path)).mtimeMs : 0;
}

async function newestSource_ms(native: string): Promise<number> {
  const sources = readdirSync(native, { recursive: true, encoding: "utf8" }).filter(
    (path) => !/^(build[^/]*|test|bench)\//.test(path) && /(\.(c|h|def|S|ptx|map)|(^|\/)Makefile)$/.test(path),
  );
  return Math.max(...(await Promise.all(sources.map((path) => modified_ms(join(native, path))))));
}

/** Runs make in the native sources; without a target, what a launch needs. */
export async function make(native: string, target = "all"): Promise<void> {
  for (const tool of ["make", process.env["CC"] ?? "cc"])
    if (!Bun.which(tool.split(" ")[0] ?? tool))
      throw new RigelError(
        "native",
        `librigel.so has to be built and ${tool} is not there; install a C compiler and make ` +
          "(Debian, Ubuntu: apt-get install gcc make)",
      );
  try {
    mkdirSync(join(native, "build"), { recursive: true });
    accessSync(join(native, "build"), constants.W_OK);
  } catch (thrown) {
    const remedy = "have the owner of this checkout build it (make -C native), or copy it to a folder of yours";
    throw new RigelError("native", `librigel.so has to be built: ${reason(thrown)}; ${remedy}`, { cause: thrown });
  }
  const begun_ms = Date.now();
  // What make would compile, and how much of that is there since.
  const objects =
    Bun.spawnSync(["make", "-n", "-C", native, target])
      .stdout.toString()
      .match(/ -c -o \S+\.o /g) ?? [];
  const paths = objects.map((words) => join(native, words.trim().slice("-c -o ".length)));
  if (paths.length > 0) progress(`building the native library (make ${target}): files to compile: ${paths.length}`);
  const bar = new ProgressBar(
    "compiled",
    paths.length,
    () => paths.filter((path) => (statSync(path, { throwIfNoEntry: false })?.mtimeMs ?? 0) >= begun_ms).length,
  );
  const command = ["make", "-s", "-C", native, `-j${availableParallelism()}`, target];
  // Two launches at once in a fresh checkout must not write the same objects.
  const locked = Bun.which("flock") ? ["flock", join(native, "build", ".lock"), ...command] : command;
  const child = Bun.spawn(locked, { env: { ...process.env }, stdin: "ignore", stdout: "pipe", stderr: "pipe" });
  const [stdout, stderr, status] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
  bar.stop();
  if (status !== 0)
    throw new RigelError(
      "native",
      `building the native library failed (make said ${status}):\n${stdout}${stderr}`.trimEnd(),
    );
}

/* From the single binary: files embedded by build.ts, unpacked once for each content. */

const EMBEDDED = join(import.meta.dir, "embed");

async function unpack(): Promise<Native> {
  const parts = await Promise.all(
    listFiles(EMBEDDED).map(async (path) => ({ path, bytes: await readFile(join(EMBEDDED, path)) })),
  );
  const hash = createHash("sha256");
  for (const { path, bytes } of parts) hash.update(`${path}\0${bytes.length}\0`).update(bytes);
  const digest = hash.digest("hex");
  // What is wrong with that is so in every folder.
  overridden();
  const refusals: string[] = [];
  for (const base of cacheFolders()) {
    const folder = join(base, digest);
    try {
      checkPreloadable(join(folder, "librigel.so"));
      privateFolder(base);
      await unpackInto(folder, parts);
      // Loading the very file that will be preloaded is the test for a noexec folder, where LD_PRELOAD fails in silence.
      return Native.open({
        interposer: join(folder, "librigel.so"),
        replay: join(folder, "rigel-replay"),
        simulate: join(folder, "rigel-simulate"),
        simulator: join(folder, "sim"),
        profiles: join(folder, "profiles"),
        workload: join(folder, "workload.py"),
        python: join(folder, "python"),
      });
    } catch (thrown) {
      refusals.push(`  ${folder}: ${reason(thrown)}`);
    }
  }
  throw new RigelError(
    "native",
    "there is no folder to unpack the native library into from which it can be loaded; set XDG_CACHE_HOME to one that " +
      `is writable and not mounted noexec. Tried:\n${refusals.join("\n")}`,
  );
}

function listFiles(folder: string): string[] {
  const names: string[] = [];
  for (const entry of readdirSync(folder, { withFileTypes: true })) {
    if (entry.isDirectory()) names.push(...listFiles(join(folder, entry.name)).map((name) => join(entry.name, name)));
    else names.push(entry.name);
  }
  return names.toSorted();
}

/** Folders for what Rigel keeps, best first. */
export function cacheFolders(): string[] {
  const xdg = process.env["XDG_CACHE_HOME"];
  const home = homeFolder();
  const uid = process.getuid?.() ?? 0;
  const candidates = [
    xdg?.startsWith("/") ? join(xdg, "rigel") : undefined,
    home?.startsWith("/") ? join(home, ".cache", "rigel") : undefined,
    join(tmpdir(), `rigel-${uid}`),
  ];
  return candidates.filter((path) => path !== undefined);
}

/** Makes a folder that only this user can change, or throws: what others could replace must not be used. */
export function privateFolder(path: string): void {
  makeFolder(dirname(path));
  makeFolder(path, 0o700);
  const { uid, mode } = lstatSync(path);
  const isFolder = lstatSync(path).isDirectory();
  if (!isFolder || uid !== process.getuid?.() || (mode & 0o022) !== 0)
    throw new Error(`${path} is not a folder that belongs to this user alone; remove it or chmod it to 700`);
}

async function unpackInto(folder: string, parts: readonly { path: string; bytes: Buffer }[]): Promise<void> {
  if (await holds(folder, parts)) return;
  const fresh = `${folder}.${randomUUID()}`;
  try {
    for (const { path, bytes } of parts) {
      const target = join(fresh, path);
      makeFolder(dirname(target), 0o700);
      writeFileSync(target, bytes, { mode: 0o600 });
      chmodSync(target, /^rigel-[a-z]+$/.test(path) ? 0o700 : 0o600);
    }
    // What is there has been changed, or another rigel has put its own there since: only what was changed is replaced.
    if (existsSync(folder) && !(await holds(folder, parts))) renameSync(folder, `${fresh}.old`);
    renameSync(fresh, folder);
  } catch (thrown) {
    rmSync(fresh, { recursive: true, force: true });
    // Another rigel may have unpacked the same files in the meantime.
    if (!(await holds(folder, parts))) throw thrown;
  } finally {
    rmSync(`${fresh}.old`, { recursive: true, force: true });
  }
}

async function holds(folder: string, parts: readonly { path: string; bytes: Buffer }[]): Promise<boolean> {
  for (const { path, bytes } of parts) {
    const file = join(folder, path);
    if (!existsSync(file) || !(await readFile(file)).equals(bytes)) return false;
  }
  return true;
}
