/**
 * bench-in-place.ts: what Rigel adds to a launch of a high client inside a program as it is, in nanoseconds: a real one, with the caches as
 * the program leaves them, and the driver behind.
 *
 * A librigel.so built for it (make in-place; native/bench/in-place.h) lets one of each two launches, by chance, go past Rigel, and times
 * both kinds. They are neighbours in the same requests, so a few nanoseconds show behind launches of ten microseconds: +-4 ns in a minute.
 */

import { existsSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { join, resolve } from "node:path";
import { Command } from "commander";
import { deviceSelector, whole } from "./arguments.ts";
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

export interface InPlace {
  /** Requests that count. */
  requests: number;
  /** Launches in each. */
  launches: number;
  /** A launch past Rigel, the median. */
  launch_ns: number;
  /** What a launch through Rigel takes more, and two standard errors of that. */
  adds_ns: number;
  error_ns: number;
}

/** Requests at the beginning: the program warms up. */
const WARMUP = 100;
/** Launches that vary more than this from request to request (deviation over median) wait for something; they tell nothing. */
const STEADY = 0.25;
/** Further from the median than so many deviations something else has come between. */
const FAR = 6;

/** The cost of a launch from what its library has written; null: too little. Pure. */
export function costOf(text: string, warmup = WARMUP): InPlace | null {
  const all = text
    .split("\n")
    .filter((line) => line !== "")
    .map((line) => line.split(" ").map(Number))
    .slice(warmup);
  const launches = median(all.map(({ length }) => length));
  const requests = all.filter(({ length }) => length === launches);
  const at = (position: number): number[] => requests.map((times) => Math.abs(times[position] ?? Number.NaN));
  const places = Array.from({ length: Number.isFinite(launches) ? Math.floor(launches) : 0 }, (_, position) => {
    const middle = median(at(position));
    return { position, middle, deviation: median(at(position).map((time) => Math.abs(time - middle))) };
  })
    .slice(1) // the first one marks the client as busy, or not
    .filter(({ middle, deviation }) => deviation < STEADY * middle);
  const past: number[] = [];
  const differences = requests.flatMap((times) => {
    // How fast the processor is just now.
    const level = median(places.map(({ position, middle }) => Math.abs(times[position] ?? Number.NaN) / middle));
    const kinds = { past: { sum: 0, count: 0 }, through: { sum: 0, count: 0 } };
    for (const { position, middle, deviation } of places) {
      const time = times[position] ?? Number.NaN;
      const off = Math.abs(time) - middle * level;
      if (Math.abs(off) > FAR * deviation) continue;
      const kind = time < 0 ? kinds.past : kinds.through;
      kind.sum += off;
      kind.count++;
      if (time < 0) past.push(-time);
    }
    return kinds.past.count > 0 && kinds.through.count > 0
      ? kinds.through.sum / kinds.through.count - kinds.past.sum / kinds.past.count
      : [];
  });
  if (differences.length < 2) return null;
  const mean = differences.reduce((sum, one) => sum + one, 0) / differences.length;
  const variance = differences.reduce((sum, one) => sum + (one - mean) ** 2, 0) / (differences.length - 1);
  return {
    requests: differences.length,
    launches,
    launch_ns: median(past),
    adds_ns: mean,
    error_ns: 2 * Math.sqrt(variance / differences.length),
  };
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
    const written = join(folder, "launches");
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
        `${name} has not served enough requests with as many launches each: ${WARMUP} to warm up and a few hundred`,
      );
    process.stdout.write(
      flags.json
        ? `${JSON.stringify({ device: device.name, simulated: device.simulated, program, ...cost })}\n`
        : `a launch through Rigel takes ${cost.adds_ns.toFixed(0)} ns more (+-${cost.error_ns.toFixed(0)}) than one past it, ` +
            `${cost.launch_ns.toFixed(0)} ns; ${cost.requests} requests of ${cost.launches} launches\n`,
    );
  } finally {
    rmSync(folder, { recursive: true, force: true });
  }
}

if (import.meta.main) {
  const program = new Command("bench:in-place")
    .description("what Rigel adds to a launch of a high client, in a program as it is, in nanoseconds")
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
