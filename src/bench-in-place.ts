/**
 * bench-in-place.ts: what Rigel adds to the calls of a high client inside a program as it is, in nanoseconds: a real one, with the caches as
 * the program leaves them, and the driver behind.
 *
 * A librigel.so built for it (make in-place; native/bench/in-place.h) lets one of each four launches, copies, memsets and waits, by chance,
 * go past Rigel, and times both kinds. They are neighbours in the same requests, so a few nanoseconds show behind launches of five
 * microseconds: +-5 ns in a minute.
 */

import { existsSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { join, resolve } from "node:path";
import { deviceSelector, standalone, whole } from "./arguments.ts";
import { median } from "./bench-stats.ts";
import { clientEnvironment } from "./client-environment.ts";
import { Devices, deviceEnvironment } from "./device.ts";
import type { DeviceSelector } from "./config.ts";
import { RigelError } from "./errors.ts";
import { SIGNAL_STATUS, onRequestToEnd } from "./interrupt.ts";
import { progress } from "./log.ts";
import { Native, make } from "./native.ts";
import { defaultSegmentFolder } from "./plan.ts";
import { Segment } from "./segment.ts";

/** What is told of: calls, and the program's own time from a launch to its next call. */
const PARTS = ["launch", "after a launch", "copy or memset", "wait"] as const;

export interface InPlacePart {
  part: (typeof PARTS)[number];
  /** How many of them a request has. */
  count: number;
  /** How long one takes past Rigel, the median. */
  past_ns: number;
  /** What one takes more through Rigel, and two standard errors of that. */
  adds_ns: number;
  error_ns: number;
}

export interface InPlace {
  /** Requests that count. */
  requests: number;
  /** Of these, what there is enough of. */
  parts: InPlacePart[];
  /** What a request takes more through Rigel by all of them, in microseconds, and two standard errors of that. */
  request_us: number;
  error_us: number;
}

/** Requests at the beginning: the program warms up. */
const WARMUP = 100;
/** What varies more than this from request to request (deviation over median) waits for something; it tells nothing. Of short waits all count. */
const STEADY = 0.25;
/** Further from the median than so many deviations something else has come between. */
const FAR = 6;
/** Longer waits past Rigel its agent looks after meanwhile (quiet_us), which is not to be compared with. */
const LONG_WAIT_NS = 200_000;
/** So many of each kind say something. */
const FEW = 20;

/** A call in a request: its kind, as in the file; and its nanoseconds, and those until the next one. */
interface Call {
  kind: string;
  past: boolean;
  ns: number;
  after_ns: number;
}

function callsOf(line: string): Call[] {
  return line.split(" ").map((text) => {
    const [, kind = "", ns, after_ns] = /^(\w)(-?\d+):(\d+)$/.exec(text) ?? [];
    return { kind, past: ns?.startsWith("-") ?? false, ns: Math.abs(Number(ns)), after_ns: Number(after_ns) };
  });
}

/** The cost of a call from what its library has written; null: too little. Pure. */
export function costOf(text: string, warmup = WARMUP): InPlace | null {
  const all = text
    .split("\n")
    .filter((line) => line !== "")
    .slice(warmup)
    .map((line) => callsOf(line));
  // Requests with the same calls as most have.
  const kinds = (calls: readonly Call[]): string => calls.map(({ kind }) => kind).join("");
  const usual = [...Map.groupBy(all, kinds)].reduce<[string, Call[][]]>(
    (a, b) => (b[1].length > a[1].length ? b : a),
    ["", []],
  );
  const requests = usual[1];
  const places = [...usual[0]].map((_, place) => place).slice(1); // the first one marks the client as busy, or not
  const kindAt = (place: number): string => usual[0][place] ?? "";
  const timesOf = (place: number, time: (call: Call) => number): { middle: number; deviation: number } => {
    const times = requests.flatMap((calls) => calls[place] ?? []).map(time);
    const middle = median(times);
    return { middle, deviation: median(times.map((one) => Math.abs(one - middle))) };
  };
  const own = (call: Call): number => call.ns;
  // How fast the processor is in each of the requests.
  const steady = places
    .filter((place) => kindAt(place) === "l")
    .map((place) => ({ place, ...timesOf(place, own) }))
    .filter(({ middle, deviation }) => deviation < STEADY * middle);
  if (steady.length === 0) return null;
  const levels = requests.map((calls) =>
    median(steady.map(({ place, middle }) => (calls[place]?.ns ?? middle) / middle)),
  );
  const told = PARTS.flatMap((part) => {
    const time = part === "after a launch" ? (call: Call) => call.after_ns : own;
    const letter = { launch: "l", "after a launch": "l", "copy or memset": "c", wait: "w" }[part];
    const those = places.filter((place) => kindAt(place) === letter);
    const kept = those
      .map((place) => ({ place, ...timesOf(place, time) }))
      .filter(({ middle, deviation }) => (part === "wait" ? middle < LONG_WAIT_NS : deviation < STEADY * middle));
    const past: number[] = [];
    const offs = requests.map((calls, i) => {
      const sums = { past: new Sum(), through: new Sum() };
      for (const { place, middle, deviation } of kept) {
        const call = calls[place];
        // What a wait takes is the GPU's.
        const off = call ? time(call) - middle * (part === "wait" ? 1 : (levels[i] ?? 1)) : Number.NaN;
        if (!call || time(call) === 0 || Math.abs(off) > FAR * deviation) continue;
        sums[call.past ? "past" : "through"].add(off);
        if (call.past) past.push(time(call));
      }
      return sums;
    });
    // Launches are compared within a request: its level is theirs. Of others there are few in each.
    const difference = letter === "l" ? ofPairs(offs) : ofAll(offs);
    if (!difference) return [];
    return {
      part,
      count: those.length + Number(kindAt(0) === letter),
      past_ns: median(past),
      ...difference,
    };
  });
  if (told.length === 0) return null;
  return {
    requests: requests.length,
    parts: told,
    request_us: told.reduce((sum, { count, adds_ns }) => sum + count * adds_ns, 0) / 1000,
    error_us: Math.hypot(...told.map(({ count, error_ns }) => count * error_ns)) / 1000,
  };
}

/** How far calls of one request were off what their places usually take. */
interface Offs {
  past: Sum;
  through: Sum;
}

function ofPairs(offs: readonly Offs[]): Pick<InPlacePart, "adds_ns" | "error_ns"> | undefined {
  const differences = new Sum();
  for (const { past, through } of offs)
    if (Math.min(past.count, through.count) > 0) differences.add(through.mean - past.mean);
  if (differences.count < FEW) return undefined;
  return { adds_ns: differences.mean, error_ns: 2 * Math.sqrt(differences.variance / differences.count) };
}

function ofAll(offs: readonly Offs[]): Pick<InPlacePart, "adds_ns" | "error_ns"> | undefined {
  const [past, through] = [new Sum(), new Sum()];
  for (const of of offs) {
    past.include(of.past);
    through.include(of.through);
  }
  if (Math.min(past.count, through.count) < FEW) return undefined;
  return {
    adds_ns: through.mean - past.mean,
    error_ns: 2 * Math.sqrt(past.variance / past.count + through.variance / through.count),
  };
}

/** Mean and variance of what is added. */
class Sum {
  count = 0;
  #sum = 0;
  #squares = 0;
  add(value: number): void {
    this.count++;
    this.#sum += value;
    this.#squares += value * value;
  }
  include(more: Sum): void {
    this.count += more.count;
    this.#sum += more.#sum;
    this.#squares += more.#squares;
  }
  get mean(): number {
    return this.#sum / this.count;
  }
  get variance(): number {
    return Math.max(0, this.#squares / this.count - this.mean ** 2);
  }
}

async function run(command: string[], flags: { requests: number; device: DeviceSelector; json?: true }): Promise<void> {
  const native = await Native.load();
  const sources = resolve(import.meta.dir, "..", "native");
  await make(sources, "in-place");
  const folder = mkdtempSync(join(defaultSegmentFolder(process.env), "rigel-in-place-"));
  try {
    const simulation = { state: join(folder, "gpu"), preset: "h200", mps: false } as const;
    const device = await new Devices(native.files, simulation).choose(flags.device, "--device");
    const segment = Segment.create(native, join(folder, "segment"));
    segment.configure({ policy: "priority" });
    const written = join(folder, "calls");
    const replay = ["--profile", join(native.files.profiles, "h200-resnet50-infer-bs4.csv"), "--rate", "60"];
    const program =
      command.length > 0
        ? command
        : [native.files.replay, ...replay, "--arrivals", "uniform", "--iterations", `${flags.requests}`];
    const environment = clientEnvironment(
      { name: "in-place", class: "high", weight: 1, program: "in-place", threads: false, memory_bytes: undefined },
      {
        given: { ...process.env, RIGEL_IN_PLACE: written },
        files: { ...native.files, interposer: join(sources, "build-in-place", "librigel.so") },
        segment: segment.path,
        policy: "priority",
        guard: undefined,
        nvtx: undefined,
        device: deviceEnvironment([device], native.files, simulation, process.env),
      },
    );
    progress(`${device.name}: ${program.join(" ")}`);
    const [name = ""] = program;
    if (!Bun.which(name)) throw new RigelError("command", `${name}: command not found`);
    const child = Bun.spawn(program, { env: environment, stdin: "ignore", stdout: "ignore", stderr: "inherit" });
    let asked: number | undefined;
    const off = onRequestToEnd((signal) => {
      asked = SIGNAL_STATUS[signal];
      child.kill(signal);
    });
    const status = await child.exited;
    off();
    if (asked !== undefined) {
      process.exitCode = asked;
      progress("stopped; nothing was measured");
      return;
    }
    const cost = existsSync(written) ? costOf(readFileSync(written, "utf8")) : null;
    if (status !== 0) throw new RigelError("command", `${name} ended with ${status}; nothing was measured`);
    if (!cost)
      throw new RigelError(
        "command",
        `${name} has not served enough requests with the same calls each: ${WARMUP} to warm up and a few hundred`,
      );
    process.stdout.write(
      flags.json
        ? `${JSON.stringify({ device: device.name, simulated: device.simulated, program, ...cost })}\n`
        : `${cost.parts
            .map(
              ({ part, count, past_ns, adds_ns, error_ns }) =>
                `${part.padEnd(15)} ${signed(adds_ns)} ns (+-${error_ns.toFixed(0)}) more than past Rigel, ${past_ns.toFixed(0)} ns; ` +
                `${count} a request`,
            )
            .join(
              "\n",
            )}\nin all ${signed(cost.request_us, 1)} us (+-${cost.error_us.toFixed(1)}) a request, of ${cost.requests}\n`,
    );
  } finally {
    rmSync(folder, { recursive: true, force: true });
  }
}

function signed(value: number, digits = 0): string {
  return `${value < 0 ? "" : "+"}${value.toFixed(digits)}`;
}

if (import.meta.main) {
  const program = standalone("bench:in-place")
    .description("what Rigel adds to the calls of a high client, in a program as it is, in nanoseconds")
    .argument("[command...]", "a program that serves requests and ends by itself (default: a replay of ResNet-50)")
    .passThroughOptions()
    .option("--requests <count>", "how many the replay serves, 60 a second", whole(1, 1_000_000), 1800)
    .option("--device <device>", "auto, simulated, a device index, or a UUID", deviceSelector, "auto")
    .option("--json", "print as JSON")
    .addHelpText(
      "after",
      `
Examples:
  bun run bench:in-place
  bun run bench:in-place -- python3 src/python/workload.py --model resnet50 --mode infer --batch 4 --rate 60 --arrivals uniform --duration 60`,
    )
    .parse();
  try {
    await run(program.args, program.opts());
  } catch (thrown) {
    if (!(thrown instanceof RigelError)) throw thrown;
    for (const line of thrown.message.split("\n")) progress(line);
    process.exitCode = thrown.exitStatus;
  }
}
