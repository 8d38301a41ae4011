/**
 * bench-hotpath.ts: what Rigel adds to one launch, and to one call of cuBLAS, in nanoseconds, on this machine.
 *
 * native/bench/hotpath.c launches against a stand-in whose launch does nothing, and prints nanoseconds a launch;
 * native/bench/guard.c does the same with a multiplication (`blas_`). Each is run in turn in its ways, many rounds, so that
 * a change of clock speed hits all alike; medians are shown. `bypassed`: past Rigel (rigel_bypass_begin); `_recording`: with the flight
 * recorder on (setting `trace`).
 *
 * With --cold each call is timed by itself and finds the processor's caches disturbed, as it does in a program that does something
 * between two launches (native/bench/cold.h). The two clock readings are in every figure: what Rigel adds is the difference to bare.
 * Measured too: a launch on the NULL stream (`null_`), as PyTorch's are; behind a launch, a wait for the stream (`sync_`) and an
 * event recorded on it (`event_`); and a launch among those of a request (`request_`), which finds the near caches disturbed, and all of
 * them only what the request has not used yet.
 */

import { join, resolve } from "node:path";
import { standalone, whole } from "./arguments.ts";
import { onEnd } from "./interrupt.ts";
import { Native, make } from "./native.ts";
import { defaultSegmentFolder } from "./plan.ts";
import { Segment } from "./segment.ts";

const program = standalone("bench:hotpath")
  .option("--json", "print as JSON")
  .description("what Rigel adds to one launch, in nanoseconds")
  .option("--cold", "each call finds the caches disturbed, as between two launches of a real program")
  .option("--calls <count>", "with --cold: calls a round; and a tenth as many requests", whole(1, 1_000_000), 400)
  .option("--rounds <count>", "rounds (default: 21; with --cold 5)", whole(1, 10_000))
  .addHelpText(
    "after",
    `
Examples:
  bun run bench:hotpath                    each call finds the caches as the one before left them
  bun run bench:hotpath --cold --json      as after a program's own work`,
  )
  .parse();
const options = program.opts<{ json?: true; cold?: true; calls: number; rounds?: number }>();
const { json, cold, calls } = options;
const rounds = options.rounds ?? (cold ? 5 : 21);

const native = await Native.load();
const sources = resolve(import.meta.dir, "..", "native");
const build = join(sources, "build");
await make(sources, "bench");
const segments: Segment[] = [];
// Before there is anything to remove.
const removal = onEnd(() => segments.forEach((one) => one.remove()));
for (const trace of [false, true]) {
  const name = `rigel-bench-${process.pid}-${trace ? "recording" : "plain"}`;
  const made = Segment.create(native, join(defaultSegmentFolder(process.env), name));
  segments.push(made);
  made.configure({ policy: "priority", trace });
}
const [segment, recording] = segments;
if (!segment || !recording) throw new Error("no segments");
try {
  const client = { LD_PRELOAD: native.files.interposer, RIGEL_SEGMENT: segment.path, RIGEL_NAME: "bench" };
  const high = { ...client, RIGEL_CLASS: "high" };
  const bestEffort = { ...client, RIGEL_CLASS: "best-effort" };
  const stops = { BENCH_SETTLE_MS: "400", LD_LIBRARY_PATH: join(build, "bench", "stops") };
  const launch = ["bench-hotpath", ...(cold ? ["cold", `${calls}`] : [])];
  const blas = ["bench-guard", ...(cold ? ["cold", `${calls}`] : [])];
  const ways: Record<string, [bench: string[], environment: Record<string, string>]> = {
    bare_ns: [launch, {}],
    disabled_ns: [launch, { ...high, RIGEL_DISABLE: "1" }],
    bypassed_ns: [launch, { ...high, BENCH_BYPASS: "1" }],
    high_ns: [launch, high],
    best_effort_ns: [launch, bestEffort],
    high_recording_ns: [launch, { ...high, RIGEL_SEGMENT: recording.path }],
    best_effort_recording_ns: [launch, { ...bestEffort, RIGEL_SEGMENT: recording.path }],
    // Under MPS, a stop in front of every third launch.
    ...(!cold && { best_effort_stops_ns: [launch, { ...bestEffort, ...stops }] }),
    blas_bare_ns: [blas, {}],
    blas_off_ns: [blas, { ...high, RIGEL_GUARD: "off" }],
    blas_repair_ns: [blas, { ...high, RIGEL_GUARD: "repair" }],
  };
  for (const call of cold ? ["null", "sync", "event"] : []) {
    ways[`${call}_bare_ns`] = [[...launch, call], {}];
    ways[`${call}_high_recording_ns`] = [[...launch, call], { ...high, RIGEL_SEGMENT: recording.path }];
    ways[`${call}_best_effort_recording_ns`] = [[...launch, call], { ...bestEffort, RIGEL_SEGMENT: recording.path }];
  }
  if (cold) {
    const request = ["bench-hotpath", "cold", `${Math.ceil(calls / 10)}`, "request"];
    ways["request_bare_ns"] = [request, {}];
    ways["request_bypassed_ns"] = [request, { ...high, BENCH_BYPASS: "1" }];
    ways["request_high_ns"] = [request, high];
    ways["request_high_recording_ns"] = [request, { ...high, RIGEL_SEGMENT: recording.path }];
    ways["request_best_effort_recording_ns"] = [request, { ...bestEffort, RIGEL_SEGMENT: recording.path }];
  }
  const taken: Record<string, number[]> = {};
  for (let round = 0; round < rounds; round++)
    for (const [way, [bench, environment]] of Object.entries(ways))
      (taken[way] ??= []).push(await call_ns(bench, environment));
  const medians = Object.fromEntries(Object.entries(taken).map(([way, values]) => [way, median(values)]));
  const lines = Object.entries(medians).map(([way, ns]) => `${way.padEnd(32)} ${ns.toFixed(1)}`);
  process.stdout.write(`${json ? JSON.stringify(cold ? { cold, ...medians } : medians) : lines.join("\n")}\n`);
} finally {
  removal[Symbol.dispose]();
}

async function call_ns(bench: string[], environment: Record<string, string>): Promise<number> {
  const [name = "", ...parameters] = bench;
  const child = Bun.spawn([join(build, name), ...parameters], {
    env: { ...process.env, LD_LIBRARY_PATH: join(build, "bench"), ...environment },
    stdout: "pipe",
    stderr: "inherit",
  });
  const [text, status] = await Promise.all([child.stdout.text(), child.exited]);
  if (status !== 0) throw new Error(`${name} ended with status ${status}`);
  return Number(text);
}

function median(values: number[]): number {
  return values.toSorted((a, b) => a - b)[values.length >> 1] ?? Number.NaN;
}
