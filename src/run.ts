/**
 * run.ts: `rigel run`: starts one command as a client of what already runs on a GPU, from any shell.
 *
 * The command has the terminal, standard input and output and other open files of its own, as if it had been started without Rigel;
 * signals are passed on, and its exit status is that of `rigel run`. It joins the segment that is live on the device, or makes that of
 * the machine (join.ts), and helps to look after it while it runs (slo-loop.ts).
 */

import { constants } from "node:os";
import { basename } from "node:path";
import { problemOf } from "./attachment.ts";
import { clientEnvironment } from "./client-environment.ts";
import { type Config, configOf } from "./config.ts";
import { Segments } from "./discover.ts";
import { Durations, durationsFolder } from "./durations.ts";
import { RigelError, namingOptions } from "./errors.ts";
import { HangWatch } from "./hang-watch.ts";
import { type Joined, joinOrMake, joinedEnvironment } from "./join.ts";
import { progress, quoted } from "./log.ts";
import { sizeText } from "./memory.ts";
import { RUN_MARK } from "./mps-daemon.ts";
import type { Native } from "./native.ts";
import { type PlannedClient, plan, simulationState } from "./plan.ts";
import { noWeight } from "./policy.ts";
import { environmentOf, hasMapped, ignored, living, startedWith } from "./proc.ts";
import { describe, whyNotStarted } from "./process.ts";
import { LoopKeeper } from "./slo-loop.ts";

type Preset = Config["simulated"]["preset"];

export interface RunOptions {
  class: "high" | "best-effort";
  name?: string | undefined;
  memory?: string | undefined;
  weight?: number | undefined;
  device?: Config["device"] | undefined;
  /** Of the simulated GPU; undefined: what it is already, or an H200. */
  preset: Preset | undefined;
  /** What of the command waits for longer hangs; false: nobody looks. */
  hang: number | false;
  /** Folder of the segments. */
  folder: string;
  /** Say on standard error what is joined, and when the command has attached. */
  verbose: boolean;
  /** Open files that the command is to have besides the first three, under their numbers. */
  files: readonly number[];
}

const LOOK_ms = 200;
/** Passed on. What a terminal sends reaches the command by itself, once that is there. */
const SIGNALS = ["SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGQUIT"] as const;
/** Which a terminal sends to all of its foreground; SIGHUP it sends to who leads its session alone. */
const FROM_TERMINAL: ReadonlySet<string> = new Set(["SIGINT", "SIGQUIT"]);
/** Programs are asked for something else by these: a checkpoint, new log files. */
const NO_END: ReadonlySet<string> = new Set(["SIGUSR1", "SIGUSR2"]);

/** Runs a command to its end; its exit status. */
export async function run(command: readonly string[], native: Native, options: RunOptions): Promise<number> {
  const { folder } = options;
  const name = options.name ?? `${basename(command[0] ?? "")}-${process.pid}`.replaceAll(/[^\w.:@+-]/g, "_").slice(-63);
  const scratch = simulationState(folder);
  const planOn = async (gpu: Preset) => {
    const { clients, notes } = await namingOptions(
      OPTIONS,
      async () => await plan(configured(command, name, options, gpu), native, scratch),
    );
    const [client] = clients;
    if (!client) throw new Error("a plan without its client");
    return { client, notes };
  };
  const preset = options.preset ?? "h200";
  const first = await planOn(preset);
  const signals = new Signals();
  // Before there is a segment, or the command: a signal that came in between would end this process and leave them behind.
  using _ = onSignals(native, (signal, ofTerminal_ns) => signals.take(signal, ofTerminal_ns));
  const joined = await joinOrMake(native, new Segments(native, folder), folder, first.client.device, preset);
  try {
    // The simulated GPU that is there may be another one.
    const there = joined.manifest.simulation.preset;
    const { client, notes } = first.client.device.simulated && there !== preset ? await planOn(there) : first;
    for (const note of notes) if (!note.includes("weight has no effect")) progress(`note: ${note}`);
    return await runIn(joined, client, native, options, signals);
  } finally {
    joined.leave();
  }
}

type Signal = (typeof SIGNALS)[number];

/** What is done with a signal. `ofTerminal_ns`: when it came, if a terminal has sent it to the command, too. */
type Take = (signal: Signal, ofTerminal_ns: number | undefined) => void;

/** Signals on their way to the command: those that come before it is there wait for it. */
class Signals {
  #pass: Take | undefined;
  readonly #early: Parameters<Take>[] = [];

  take(...taken: Parameters<Take>): void {
    if (this.#pass) this.#pass(...taken);
    else this.#early.push(taken);
  }

  /** The command is there: what came before, and what comes from now on is passed on. */
  begin(pass: Take): void {
    this.#pass = pass;
    for (const taken of this.#early) pass(...taken);
  }
}

/** What the user gave for fields of its configuration. */
const OPTIONS = {
  "clients[0].command[0]": "the command",
  "clients[0].command": "the command",
  "clients[0].name": "--name",
  "clients[0].class": "--class",
  "clients[0].memory": "--memory",
  "clients[0].weight": "--weight",
  device: "--device",
};

/** The options as a configuration of one client. */
function configured(command: readonly string[], name: string, options: RunOptions, preset: Preset): Config {
  return configOf(
    {
      device: options.device ?? "auto",
      simulated: { preset },
      clients: [
        {
          name,
          class: options.class,
          command: [...command],
          ...(options.memory !== undefined && { memory: sizeOf(options.memory) }),
          ...(options.weight !== undefined && { weight: options.weight }),
        },
      ],
    },
    "rigel run",
    process.cwd(),
  );
}

/** What of the options does not hold: who was there before has settled it, or nobody reads it. And that it is paused: it does nothing. */
function unlikeAsked(
  { segment, manifest }: Joined,
  { name, memory_bytes, device }: PlannedClient,
  options: RunOptions,
): string[] {
  const asked = segment.wanted(name);
  const stays = [
    ...(asked?.class !== undefined && asked.class !== options.class ? [`class ${asked.class}`] : []),
    ...(options.weight !== undefined && asked?.weight !== undefined && asked.weight !== options.weight
      ? [`weight ${asked.weight}`]
      : []),
    ...(memory_bytes !== undefined && asked?.memory_bytes !== undefined && asked.memory_bytes !== memory_bytes
      ? [asked.memory_bytes === null ? "no memory limit" : `a memory limit of ${sizeText(asked.memory_bytes)}`]
      : []),
  ];
  const unweighed = options.weight === undefined ? undefined : noWeight(segment.policy);
  const isPaused = (asked?.class ?? options.class) !== "high" && (asked?.paused_until_ns ?? 0) > segment.now_ns;
  const otherGpu = device.simulated && options.preset !== undefined && options.preset !== manifest.simulation.preset;
  return [
    ...(otherGpu ? [`--preset ${options.preset} has no effect: ${device.name} is there already`] : []),
    ...(stays.length > 0 ? [`${name}: keeps what was set for it while it ran: ${stays.join(", ")}`] : []),
    ...(isPaused ? [`${name}: is paused, as it was before; \`rigel resume ${quoted(name)}\` lets it go on`] : []),
    ...(unweighed === undefined ? [] : [`${name}: ${unweighed}`]),
  ];
}

/** A number of bytes, or what memorySchema takes as text. */
function sizeOf(memory: string): string | number {
  return /^\d+$/.test(memory) ? Number(memory) : memory;
}

async function runIn(
  joined: Joined,
  client: PlannedClient,
  native: Native,
  options: RunOptions,
  signals: Signals,
): Promise<number> {
  const { segment } = joined;
  const { name } = client;
  // Of those that were killed just now it may not be known yet.
  segment.reap();
  const others = segment.slots().filter((slot) => slot.name === name && !slot.finished);
  if (others.some((slot) => slot.class !== client.class))
    throw new RigelError(
      "config",
      `rigel run: --name: expected another name, or --class ${others[0]?.class}: a client ${name} of that class runs already`,
    );
  for (const note of unlikeAsked(joined, client, options)) progress(`note: ${note}`);
  const durations = new Durations(native, durationsFolder(), [client], new Map());
  if (joined.made) durations.seed(segment, [client]);
  if (options.verbose)
    progress(`${name}: ${client.device.name}, ${joined.made ? "new" : "joins"} ${basename(segment.path)}`);
  // No other process has these together.
  const marks = [`RIGEL_SEGMENT=${segment.path}`, `${RUN_MARK}=${process.pid}`];
  const given = { ...process.env };
  const env = {
    ...clientEnvironment(client, {
      given,
      files: native.files,
      segment: segment.path,
      policy: segment.policy,
      guard: undefined,
      nvtx: undefined,
      device: joinedEnvironment(joined, client.device, native, given),
    }),
    [RUN_MARK]: String(process.pid),
  };
  using keeper = new LoopKeeper(segment, native, joined.made);
  const startedAt_ms = performance.now();
  const child = start(client, env, options.files);
  const there_ns = native.now_ns;
  signals.begin((signal, ofTerminal_ns) => {
    // Held back, it could not end: who asks it to end does not want that.
    if (!NO_END.has(signal)) segment.want(name, { paused_until_ns: 0 });
    // Of the terminal's Ctrl-C it has its own, unless that came before it was there to get it.
    if (ofTerminal_ns === undefined || ofTerminal_ns < there_ns) child.kill(signal);
  });
  let attached = false;
  let seen: { processes: number; mapped: number } | undefined;
  // Also the command's own where that does not show the marks: it has cleared its environment, or runs as another user.
  const processes = (ended = false) =>
    living().filter(({ pid }) => pid !== process.pid && ((pid === child.pid && !ended) || startedWith(pid, marks)));
  /** `ended`: the command has, so that a process of it may be one that cannot be asked any more. */
  const look = (ended = false): void => {
    if (attached) return;
    // Other commands may have the same name.
    const slots = segment.slots().filter((one) => one.name === name && !others.some(({ pid }) => pid === one.pid));
    const slot = slots.find(({ pid }) => pid === child.pid || startedWith(pid, marks));
    if (slot || (ended && slots.some(({ pid }) => environmentOf(pid)[RUN_MARK] === undefined))) {
      attached = true;
      if (options.verbose) progress(`${name}: attached${slot ? ` (process ${slot.pid})` : ""}`);
      return;
    }
    const own = processes(ended);
    if (own.length > 0)
      seen = { processes: own.length, mapped: own.filter(({ pid }) => hasMapped(pid, native.files.interposer)).length };
  };
  const timer = setInterval(() => look(), LOOK_ms);
  try {
    // A launch looks after those who join it as well, but may end before them.
    await using _ =
      options.hang === false
        ? undefined
        : new HangWatch({ segment, threshold_s: options.hang, client: name, say: (line) => progress(`hang: ${line}`) });
    await child.exited;
  } finally {
    clearInterval(timer);
  }
  const exit = { ...describe(child.exitCode, child.signalCode), at_ms: performance.now() };
  look(true);
  const problem = problemOf({ attached, env, seen, exit, startedAt_ms }, segment);
  if (problem !== undefined)
    progress(
      processes(true).length > 0
        ? `${name}: is no client of Rigel so far: ${problem}; what it has started runs on`
        : `${name}: was no client of Rigel: ${problem}`,
    );
  keeper.end();
  segment.reap();
  durations.collectRequests(segment, [client]);
  durations.collect(segment, [client]);
  durations.save();
  return exit.status;
}

/** Until it is disposed of, signals that this process does not ignore do that instead. */
function onSignals(native: Native, act: Take): Disposable {
  const handlers = SIGNALS.filter((signal) => !ignored(constants.signals[signal])).map((signal) => {
    const number = constants.signals[signal];
    const handler = (): void => {
      const came = native.signalCame(number);
      act(signal, came?.fromKernel && FROM_TERMINAL.has(signal) ? came.at_ns : undefined);
    };
    process.on(signal, handler);
    native.watchSignal(number);
    return { signal, handler };
  });
  return {
    [Symbol.dispose]() {
      for (const { signal, handler } of handlers) process.off(signal, handler);
    },
  };
}

function start({ argv, cwd }: PlannedClient, env: Record<string, string | undefined>, files: readonly number[]) {
  // null: it stays closed.
  const more = Array.from({ length: Math.max(2, ...files) - 2 }, (_, at) => (files.includes(at + 3) ? at + 3 : null));
  try {
    return Bun.spawn(ignoring(argv, cwd, env), { cwd, env, stdio: ["inherit", "inherit", "inherit", ...more] });
  } catch (thrown) {
    throw new RigelError("command", `rigel run: ${argv[0]} cannot be started (${whyNotStarted(thrown)})`, {
      cause: thrown,
    });
  }
}

/**
 * A command that ignores what this process was started to ignore, as by nohup: Bun.spawn gives its child the defaults. One that cannot be found is
 * left as it is, so that the error is its own.
 */
function ignoring(argv: readonly string[], cwd: string, env: Record<string, string | undefined>): string[] {
  const kept = SIGNALS.filter((signal) => ignored(constants.signals[signal])).map((signal) => signal.slice(3));
  const found = kept.length > 0 ? Bun.which(argv[0] ?? "", { PATH: env["PATH"] ?? "", cwd }) : null;
  if (found === null) return [...argv];
  // A shell passes on what it could have as a variable, and no more: not the functions that bash has exported.
  const odd = Object.entries(env).filter(([name]) => !/^[A-Za-z_]\w*$/.test(name));
  const more = odd.flatMap(([name, value]) => (value === undefined ? [] : [`${name}=${value}`]));
  const through = more.length > 0 && !argv[0]?.includes("=") ? ["env", ...more] : [];
  return ["/bin/sh", "-c", `trap '' ${kept.join(" ")}; exec "$@"`, "sh", ...through, ...argv];
}
