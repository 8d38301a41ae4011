/**
 * bench-run.ts: runs programs of a benchmark together from a common start time, bare or under Rigel, and reads what they
 * measured.
 *
 * Every program gets its arrivals as a file and leaves its samples in one, so that nothing depends on its output; that is
 * kept only to be shown when it fails. What runs under Rigel goes through the launcher, as a user's programs do.
 */

import { mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { z } from "zod";
import type { Program } from "./bench-matrix.ts";
import { gapsOf } from "./bench-stats.ts";
import { type Policy, readConfig } from "./config.ts";
import { type Device, type Simulation, deviceEnvironment } from "./device.ts";
import { reason } from "./errors.ts";
import { Guard } from "./guard.ts";
import type { Interrupt } from "./interrupt.ts";
import { launch } from "./launch.ts";
import type { Native } from "./native.ts";
import { plan } from "./plan.ts";
import { ClientProcess } from "./process.ts";
import type { ClientReport } from "./report.ts";
import type { Segment } from "./segment.ts";

/** What a program writes to its log: src/python/workload.py and rigel-replay alike. */
export const logSchema = z.object({
  /** Seconds after the start at which it was ready; 0 if it was in time. */
  late_s: z.number(),
  versions: z.record(z.string(), z.string()).optional(),
  requests: z.array(z.tuple([z.number(), z.number()])).default([]),
  /** With --alternate: which of the requests went past Rigel. */
  past: z.array(z.boolean()).default([]),
  ends_s: z.array(z.number()).default([]),
  gpu_ms: z.number().optional(),
});
export type Log = z.infer<typeof logSchema>;

/** One program to run. */
export interface Run {
  /** Of its own among those that run together. */
  name: string;
  program: Program;
  /** When its requests fall due; none for a program that asks for none. */
  due_s?: readonly number[];
  /** Seconds of pause and work in turn, of a program that asks for no requests; without, it works throughout. */
  spells_s?: readonly number[];
  duration_s: number;
  /** Arguments besides. */
  more?: readonly string[];
  env?: Record<string, string>;
  /** The only processor that it runs on. */
  processor?: number | undefined;
}

/** When all programs of a run begin to measure: so long after they are started, or at a time of Date.now(). */
type Start = { lead_s: number } | { at_ms: number };

export interface Ran {
  /** By the names of the runs. */
  logs: Map<string, Log>;
  /** What Rigel counted, where it was there. */
  clients: ClientReport[];
}

/** A program failed, or was not measured as asked. */
export class RunFailed extends Error {
  readonly output: readonly string[];

  constructor(message: string, output: readonly string[]) {
    super(message);
    this.output = output;
  }
}

/** The user wants it to end. */
export class Interrupted extends Error {
  /** What the programs had measured by then, if all of them had begun. */
  readonly ran: Ran | undefined;
  /** When they wanted it, by Date.now(). */
  readonly at_ms: number;

  constructor({ at_ms }: Pick<Interrupt, "at_ms">, ran?: Ran) {
    super("interrupted");
    this.at_ms = at_ms;
    this.ran = ran;
  }
}

/** What runs may be told besides. */
interface Manner {
  /** Under MPS: on the simulated GPU, which has no daemon; on a real one the environment of each program names it. */
  mps?: boolean;
}

interface Place {
  native: Native;
  device: Device;
  simulation: Simulation;
  /** Folder for files of this benchmark. */
  scratch: string;
  /** Folder for the segment. */
  segmentFolder: string;
  interrupt: Interrupt;
}

/** Lines of output that are kept of each program. */
const KEPT_LINES = 12;
/** What programs may take longer than they were told before they are ended. */
const PATIENCE_s = 90;
const START = "@start";

export class Runner {
  readonly #place: Place;
  #count = 0;
  readonly #taken = new Set<number>();

  constructor(place: Place) {
    this.#place = place;
  }

  /** Runs programs without Rigel. */
  async bare(runs: readonly Run[], start: Start, { mps = false }: Manner = {}): Promise<Ran> {
    const { native, device, interrupt } = this.#place;
    const simulation = { ...this.#place.simulation, mps };
    const start_s = startOf(start);
    using place = this.#take();
    const mark = `RIGEL_BENCH_RUN=${process.pid}-${++this.#count}`;
    const output = new Output(runs);
    using guard = new Guard(mark, device.simulated ? [simulation.state] : []);
    const children: ClientProcess[] = [];
    const problems: string[] = [];
    try {
      for (const run of runs) {
        const own = `RIGEL_BENCH_NAME=${run.name}`;
        const given = { ...process.env, ...run.env, RIGEL_SEGMENT: undefined };
        const child = new ClientProcess(
          {
            name: run.name,
            where: `rigel bench: ${run.program.name}`,
            argv: this.#argv(run, place.folder).map((part) => (part === START ? start_s.toFixed(6) : part)),
            env: {
              ...given,
              ...deviceEnvironment([device], native.files, simulation, given),
              ...Object.fromEntries([mark, own].map((entry) => entry.split("="))),
            },
            marks: [mark, own],
            cwd: process.cwd(),
            hideOutput: false,
          },
          (line) => output.keep(run.name, line),
        );
        guard.watch(child.pid);
        children.push(child);
      }
      interrupt.clients = [...interrupt.clients, ...children];
      const limit_s = start_s - Date.now() / 1000 + Math.max(...runs.map((run) => run.duration_s)) + PATIENCE_s;
      const failed = Promise.withResolvers<void>();
      for (const child of children)
        void child.ended.then(() => {
          if (child.exit?.status !== 0) failed.resolve();
        });
      const ended = Promise.all(children.map((child) => child.ended));
      const timer = setTimeout(() => {
        problems.push(`did not end within ${limit_s.toFixed(0)} s`);
        failed.resolve();
      }, limit_s * 1000);
      await Promise.race([ended, failed.promise, interrupt.raised]);
      clearTimeout(timer);
      for (const { name, exit } of children) if (exit && exit.status !== 0) problems.push(`${name} ${exit.text}`);
    } finally {
      await Promise.all(children.map((child) => child.stop(interrupt.signal ?? "SIGTERM")));
      for (const child of children) guard.forget(child.pid);
      interrupt.clients = interrupt.clients.filter((client) => !children.includes(client));
      rmSync(simulation.state, { force: true });
    }
    if (problems.length > 0) throw new RunFailed(problems.join("; "), output.lines());
    if (interrupt.signal) throw new Interrupted(interrupt, this.#soFar(runs, place.folder, []));
    return { logs: this.#logs(runs, place.folder, output), clients: [] };
  }

  /** Runs programs under Rigel. `started` gets the segment as soon as they run. */
  async governed(
    runs: readonly Run[],
    start: Start,
    policy: Policy,
    options: Manner & { started?: (segment: Segment, start_ms: number, over: AbortSignal) => void } = {},
  ): Promise<Ran> {
    const { native, device, simulation, segmentFolder, interrupt } = this.#place;
    using place = this.#take();
    const file = join(place.folder, "config.json");
    const clients = runs.map((run) => ({
      name: run.name,
      class: run.program.class,
      command: this.#argv(run, place.folder),
      env: run.env ?? {},
      // It decides by what is known of each kernel; a program that was never recorded fails, and the error says so.
      ...(policy.name === "orion" &&
        run.program.profile !== undefined && { profile: join(native.files.profiles, run.program.profile) }),
    }));
    writeFileSync(
      file,
      JSON.stringify({
        policy,
        clients,
        device: device.simulated ? "simulated" : device.uuid,
        // On a real GPU the environment of each client names the benchmark's own daemon.
        sharing: !options.mps ? "time-slice" : device.simulated ? "mps" : "auto",
        simulated: { preset: simulation.preset },
      }),
    );
    const planned = await plan(await readConfig(file), native, simulation.state);
    // Only now, as finding the device takes seconds on some hosts.
    const start_s = startOf(start);
    for (const client of planned.clients)
      client.argv = client.argv.map((part) => (part === START ? start_s.toFixed(6) : part));
    const output = new Output(runs);
    const limit_s = start_s - Date.now() / 1000 + Math.max(...runs.map((run) => run.duration_s)) + PATIENCE_s;
    let tooLong = false;
    const timer = setTimeout(() => {
      tooLong = true;
    }, limit_s * 1000);
    const over = new AbortController();
    try {
      const { report, exitStatus } = await launch(planned, native, {
        segmentFolder,
        start_timeout_s: limit_s,
        interrupt,
        show: (name, line) => output.keep(name, line),
        started: (segment) => options.started?.(segment, start_s * 1000, over.signal),
        ownLoop: options.started !== undefined,
        over: () => tooLong,
        // Programs with such arguments are of this benchmark alone: they are not to take the places of the user's.
        durations: join(this.#place.scratch, "durations"),
      });
      const failed = report.clients.find((client) => client.exit_code !== 0 && !client.stopped);
      if (interrupt.signal && !failed)
        throw new Interrupted(interrupt, this.#soFar(runs, place.folder, report.clients));
      if (tooLong) throw new RunFailed(`did not end within ${limit_s.toFixed(0)} s`, output.lines());
      if (exitStatus !== 0 || failed)
        throw new RunFailed(
          `${failed?.name ?? "a program"} ended with status ${failed?.exit_code ?? exitStatus}`,
          output.lines(),
        );
      const apart = report.clients.find((client) => !client.attached);
      // What it measured would be called what it is not.
      const elsewhere = report.clients.find((client) => client.mps !== (options.mps ?? false));
      if (elsewhere)
        throw new RunFailed(`${elsewhere.name} ran ${elsewhere.mps ? "under" : "without"} MPS`, output.lines());
      if (apart) throw new RunFailed(`${apart.name} was not under Rigel: ${apart.attach_problem}`, output.lines());
      return { logs: this.#logs(runs, place.folder, output), clients: report.clients };
    } finally {
      over.abort();
      clearTimeout(timer);
    }
  }

  /**
   * A folder for the files of programs that are started together, of which there are several at once. Those after them have it again: a
   * program is known by its arguments, by which what was learned of its kernels is found.
   */
  #take(): Disposable & { folder: string } {
    let index = 0;
    while (this.#taken.has(index)) index++;
    this.#taken.add(index);
    const folder = join(this.#place.scratch, String(index));
    rmSync(folder, { recursive: true, force: true });
    mkdirSync(folder);
    return { folder, [Symbol.dispose]: () => void this.#taken.delete(index) };
  }

  #argv(run: Run, folder: string): string[] {
    const pinned = run.processor === undefined ? [] : ["taskset", "-c", String(run.processor)];
    return [...pinned, ...this.#program(run, folder)];
  }

  #program({ name, program, due_s, spells_s, duration_s, more = [] }: Run, folder: string): string[] {
    const { native, device } = this.#place;
    const common = ["--start-at", START, "--log", join(folder, `${name}.log`)];
    if (spells_s) {
      const spells = join(folder, `${name}.windows`);
      writeFileSync(spells, JSON.stringify(spells_s));
      common.push("--windows", spells);
    }
    if (due_s) {
      const gaps = join(folder, `${name}.gaps`);
      // One that is too late to be served, so that the list is never empty and never begun again.
      writeFileSync(gaps, JSON.stringify(gapsOf([...due_s, duration_s + 1])));
      common.push("--arrivals", gaps);
    }
    const length = String(duration_s);
    if (device.simulated)
      return [
        native.files.replay,
        "--profile",
        join(native.files.profiles, program.profile ?? ""),
        "--duration-s",
        length,
        ...common,
        ...more,
      ];
    return ["python3", native.files.workload, ...program.args, "--duration", length, ...common, ...more];
  }

  #soFar(runs: readonly Run[], folder: string, clients: ClientReport[]): Ran | undefined {
    try {
      return { logs: this.#logs(runs, folder, new Output(runs)), clients };
    } catch (thrown) {
      if (thrown instanceof RunFailed) return undefined;
      throw thrown;
    }
  }

  #logs(runs: readonly Run[], folder: string, output: Output): Map<string, Log> {
    return new Map(
      runs.map(({ name }) => {
        const path = join(folder, `${name}.log`);
        try {
          return [name, logSchema.parse(JSON.parse(readFileSync(path, "utf8")))];
        } catch (thrown) {
          throw new RunFailed(`${name} left no measurements (${reason(thrown)})`, output.lines());
        }
      }),
    );
  }
}

function startOf(start: Start): number {
  return "at_ms" in start ? start.at_ms / 1000 : Date.now() / 1000 + start.lead_s;
}

/** The last lines that each program printed. */
class Output {
  readonly #lines: Map<string, string[]>;

  constructor(runs: readonly Run[]) {
    this.#lines = new Map(runs.map(({ name }) => [name, []]));
  }

  keep(name: string, line: string): void {
    const lines = this.#lines.get(name);
    lines?.push(line);
    if (lines && lines.length > KEPT_LINES) lines.shift();
  }

  lines(): string[] {
    return [...this.#lines].flatMap(([name, lines]) => lines.map((line) => `${name} | ${line}`));
  }
}
