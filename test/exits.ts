/**
 * exits.ts: runs the programs of test/exits, which end and fork in all ways, bare and under Rigel, and compares.
 *
 * Exit status, signal and output must be the bare program's. What the segment has counted must not be less than what the
 * driver had accepted when the program left, nor more than what it has asked for. Used on the simulated GPU
 * (exits.test.ts) and on a real one (gpu-exits.test.ts).
 */

import { mkdirSync, rmSync, writeFileSync } from "node:fs";
import { basename, join } from "node:path";
import { expect } from "bun:test";
import { Native } from "../src/native.ts";
import { Segment } from "../src/segment.ts";
import { Scratch, plainEnvironment, root } from "./rigel.ts";

export const native = await Native.load();
export const exitsFolder = join(root, "test", "exits");
const simulator = join(root, "native", "build", "sim");

/** A program of several ways to end. */
export interface Program {
  argv: string[];
  ways: string[];
}

/** How often each way is tried, in each class: RIGEL_EXITS, or else a few times. */
export const repeats = (few: number): number => Number(process.env["RIGEL_EXITS"] ?? few);

export function run(command: string[]): { status: number | null; output: string } {
  const { exitCode, stdout, stderr } = Bun.spawnSync(command, { env: plainEnvironment() });
  return { status: exitCode, output: `${stdout.toString()}${stderr.toString()}` };
}

function source(name: string): string {
  return join(exitsFolder, name);
}

function build(command: string[]): void {
  const { status, output } = run(command);
  expect(status, output).toBe(0);
}

/**
 * Compiles the programs into `folder`; a language that there is nothing for here has no ways, and says so. A driver is linked
 * by its name alone, so the simulated one does for any.
 */
export function compile(folder: string): { c: Program; cxx: Program; python: Program } {
  const driver = join(simulator, "libcuda.so.1");
  const flags = ["-O1", "-g", "-Wall", "-Wextra", "-Werror"];
  const [c = "", cxx = "", library = ""] = ["programs-c", "programs-cc", "libexits.so"].map((name) =>
    join(folder, name),
  );
  const none = { argv: [], ways: [] };
  build(["gcc", "-std=c11", ...flags, "-o", c, source("programs.c"), driver, "-lpthread", "-ldl"]);
  const hasCxx = Bun.which("g++") !== null;
  const hasPython = Bun.which("python3") !== null;
  if (!hasCxx) console.warn("exits: there is no g++, so no C++ program and no library is tested");
  if (!hasPython) console.warn("exits: there is no python3, so no Python program is tested");
  if (hasCxx) {
    const compiler = ["g++", "-std=c++17", ...flags];
    build([...compiler, "-fPIC", "-shared", "-o", library, source("library.cc"), driver, "-ldl"]);
    build([...compiler, "-o", cxx, source("programs.cc"), library, driver, "-Wl,-rpath,$ORIGIN", "-lpthread"]);
  }
  const python = hasPython ? programOf([pythonItself(), source("programs.py")]) : none;
  return {
    c: programOf([c]),
    cxx: hasCxx ? programOf([cxx]) : none,
    python: { ...python, ways: python.ways.filter((way) => hasCxx || !way.startsWith("library")) },
  };
}

/** What `python3` runs, be it started by a script that looks for it. */
function pythonItself(): string {
  const { status, output } = run(["python3", "-c", "import sys; print(sys.executable)"]);
  expect(status, output).toBe(0);
  return output.trim();
}

/** A program without arguments lists its ways. */
export function programOf(argv: string[]): Program {
  const { exitCode, stdout, stderr } = Bun.spawnSync(argv, {
    env: { ...plainEnvironment(), LD_LIBRARY_PATH: simulator },
  });
  expect(exitCode, stderr.toString()).toBe(0);
  return { argv, ways: stdout.toString().trim().split("\n") };
}

/**
 * Compiles the programs that use the CUDA runtime: shared and static, with the object that outlives main linked first and last;
 * and a library with a runtime of its own, which the Python programs of `library` open and close.
 */
export function compileCudart(folder: string, nvcc: string): { programs: Record<string, Program>; library: string } {
  const [object, main] = [source("cudart-object.cu"), source("cudart-programs.cu")];
  const programs: Record<string, Program> = {};
  // Where the shared runtime is, which need not be where the loader looks.
  const { output } = run([nvcc, "--dryrun", "-o", join(folder, "none"), object]);
  const paths = [...output.matchAll(/"-L([^"]+)(?<!stubs)"/g)].flatMap(([, path]) => ["-Xlinker", `-rpath=${path}`]);
  const options = ["-std=c++17", "-arch=native", "-O1"];
  const compiled = [object, main].map((file) => {
    const made = join(folder, `${basename(file)}.o`);
    build([nvcc, ...options, "-c", "-o", made, file]);
    return made;
  });
  for (const runtime of ["shared", "static"])
    for (const [order, files] of Object.entries({ first: compiled, last: compiled.toReversed() })) {
      const path = join(folder, `cudart-${runtime}-${order}`);
      build([nvcc, ...options, ...paths, "-cudart", runtime, "-o", path, ...files]);
      programs[`${runtime} runtime, object linked ${order}`] = programOf([path]);
    }
  const library = join(folder, "cudart-library");
  mkdirSync(library);
  build([
    nvcc,
    ...options,
    "-cudart",
    "static",
    "-shared",
    "-Xcompiler",
    "-fPIC",
    "-o",
    join(library, "libexits.so"),
    object,
  ]);
  return { programs, library };
}

/** Where programs run: on the simulated GPU, or on the real one that the environment shows. */
export type Where = "simulated" | "real";

/** How a process ended and what it printed. */
export interface End {
  status: number | null;
  signal: number | string | null;
  stdout: string;
  stderr: string;
}

/** What a run has to do with others: its scratch files, its segment and the simulated GPU. */
export class Stage implements Disposable {
  readonly #scratch = new Scratch();
  readonly #where: Where;
  readonly #state: string;
  readonly #counts: string;
  #segment: Segment | undefined;

  constructor(where: Where) {
    this.#where = where;
    this.#state = `/dev/shm/rigel-exits-${process.pid}-${Bun.randomUUIDv7()}`;
    this.#counts = join(this.#scratch.path, "counts");
    this.forget();
  }

  [Symbol.dispose](): void {
    this.#segment?.remove();
    rmSync(this.#state, { force: true });
    this.#scratch[Symbol.dispose]();
  }

  /** The segment, made when it is first asked for. */
  get segment(): Segment {
    if (!this.#segment) {
      this.#segment = Segment.create(native, `${this.#state}-segment`);
      this.#segment.configure({ policy: "priority" });
    }
    return this.#segment;
  }

  /** The environment of a program that counts in a file of its own; `as` undefined: bare. */
  environment(folder: string, as: "high" | "best-effort" | undefined, name = "it"): Record<string, string | undefined> {
    return {
      ...plainEnvironment(),
      ...(this.#where === "simulated"
        ? { LD_LIBRARY_PATH: simulator, RIGEL_SIM_STATE: this.#state }
        : { EXITS_LONG_S: "3" }),
      EXITS_COUNTS: this.#counts,
      EXITS_FOLDER: folder,
      PYTHONDONTWRITEBYTECODE: "1",
      ...(as && {
        LD_PRELOAD: native.files.interposer,
        RIGEL_SEGMENT: this.segment.path,
        RIGEL_CLASS: as,
        RIGEL_NAME: name,
      }),
    };
  }

  /** Counts from zero. */
  forget(): void {
    writeFileSync(this.#counts, new Uint8Array(16 + 64 * 16));
  }

  /** Runs a command to its end, with fresh counts. */
  async run(command: string[], env: Record<string, string | undefined>): Promise<End> {
    this.forget();
    await using child = Bun.spawn(command, { env, cwd: root, stdin: "ignore", stdout: "pipe", stderr: "pipe" });
    const [stdout, stderr] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
    return { status: child.exitCode, signal: child.signalCode, stdout, stderr };
  }

  /** What the program of the last run says that it has launched: at least, and at most. */
  async known(): Promise<{ least: number; most: number }> {
    const words = new BigUint64Array(await Bun.file(this.#counts).arrayBuffer());
    const pairs = [...words.subarray(2)].map(Number);
    const begun = pairs.filter((_, index) => index % 2 === 0).reduce((sum, n) => sum + n, 0);
    const accepted = pairs.filter((_, index) => index % 2 === 1).reduce((sum, n) => sum + n, 0);
    const left = Number(words[0]);
    return { least: left > 0 ? left - 1 : accepted, most: begun };
  }

  /** Launches that the segment has counted, of all processes of the name. */
  counted(name = "it"): number {
    return this.segment
      .slots()
      .filter((slot) => slot.name === name)
      .reduce((sum, slot) => sum + this.segment.read(slot).usage.counters.launches, 0);
  }
}

/** A program's status where it could not do what it is to end after: another one has all of the GPU's memory, say. */
const NOT_BEGUN = [97, 98, 99];

/** What is said of a run under Rigel that went wrong; undefined: nothing did. `asBare` tells whether the bare program ends so. */
async function compareOnce(
  where: Where,
  folder: string,
  command: string[],
  as: "high" | "best-effort",
  asBare: (end: End) => Promise<boolean>,
): Promise<string | undefined> {
  using stage = new Stage(where);
  const end = await stage.run(command, stage.environment(folder, as));
  const { least, most } = await stage.known();
  const counted = stage.counted();
  if (NOT_BEGUN.includes(end.status ?? 0)) return `${command.join(" ")} as ${as} did not begin: ${JSON.stringify(end)}`;
  const wrong: string[] = [];
  if (!(await asBare(end))) wrong.push(`ended with ${JSON.stringify(end)}, which it does not bare`);
  if (counted < least || counted > most)
    wrong.push(`launched at least ${least} and at most ${most}, of which ${counted} were counted`);
  if (most === 0 && !command.includes("without-launching")) wrong.push("launched nothing");
  stage.segment.reap();
  const live = stage.segment.slots().filter((slot) => !slot.finished).length;
  if (live > 0) wrong.push(`${live} slots are still live`);
  return wrong.length > 0 ? `${command.join(" ")} as ${as}: ${wrong.join("; ")}` : undefined;
}

/** How the same way ends bare. */
export async function bareEnd(where: Where, folder: string, command: string[]): Promise<End> {
  using stage = new Stage(where);
  const end = await stage.run(command, stage.environment(folder, undefined));
  expect(NOT_BEGUN, `bare, it did not begin: ${JSON.stringify(end)}`).not.toContain(end.status ?? 0);
  return end;
}

/** The different ends among these, as JSON. */
function distinct(ends: End[]): string {
  return [...new Set(ends.map((end) => JSON.stringify(end)))].join(", ");
}

/**
 * On a real GPU, so many more ends of the bare program are looked at, so many at a time, when one under Rigel is none of those seen. Threads
 * that launch while the CUDA runtime is taken down crash in it a few times in a hundred exits, where the host has much to do.
 */
const MORE_BARE = 120;
const BARE_AT_ONCE = 12;

/**
 * Whether `signals` of `runs` are more than chance leaves to those that `bare` of `bareRuns` tell of: by less than one in a thousand, were
 * all drawn from one urn (Fisher's exact test).
 */
export function isMoreOften(signals: number, runs: number, bare: number, bareRuns: number): boolean {
  const [all, of] = [signals + bare, runs + bareRuns];
  /** The chance of exactly so many among the runs, from that of one fewer. */
  const least = Math.max(0, all - bareRuns);
  let chance = 1;
  let [sum, above] = [0, 0];
  for (let n = least; n <= Math.min(all, runs); n++) {
    if (n > least) chance *= ((all - n + 1) * (runs - n + 1)) / (n * (of - runs - all + n));
    sum += chance;
    if (n >= signals) above += chance;
  }
  return above / sum < 0.001;
}

/**
 * Runs a way so many times in both classes, or, after the first time, until `enough` says so, and expects that nothing was wrong.
 * Returns how often it was run under Rigel. On the simulated GPU the bare program ends in one way; on a real one some do not.
 */
export async function compare(
  where: Where,
  folder: string,
  command: string[],
  times: number,
  enough: () => boolean = () => false,
): Promise<number> {
  const bare = [await bareEnd(where, folder, command)];
  let signals = 0;
  // As many however they end: a rate is told from them, too.
  const limit = where === "real" ? bare.length + MORE_BARE : bare.length;
  const asBare = async (end: End): Promise<boolean> => {
    if (end.signal !== null) signals++;
    const isKnown = (): boolean => bare.some((one) => Bun.deepEquals(one, end));
    if (!isKnown())
      while (bare.length < limit)
        bare.push(...(await Promise.all(Array.from({ length: BARE_AT_ONCE }, () => bareEnd(where, folder, command)))));
    return isKnown();
  };
  const wrong: string[] = [];
  let runs = 0;
  for (let time = 0; time < times && (time === 0 || !enough()); time++)
    for (const as of ["high", "best-effort"] as const) {
      const problem = await compareOnce(where, folder, command, as, asBare);
      if (problem !== undefined)
        wrong.push(`${time}: ${problem}; bare, ${bare.length} times, it ends with ${distinct(bare)}`);
      runs++;
    }
  const bareSignals = bare.filter(({ signal }) => signal !== null).length;
  const rates = `${signals} of ${runs} times with a signal under Rigel, ${bareSignals} of ${bare.length} bare`;
  if (isMoreOften(signals, runs, bareSignals, bare.length)) wrong.push(`ended ${rates}`);
  else if (bareSignals > 0 && bareSignals < bare.length)
    console.warn(`exits: ${command.map((word) => basename(word)).join(" ")} ended ${rates}`);
  expect(wrong).toEqual([]);
  return runs;
}
