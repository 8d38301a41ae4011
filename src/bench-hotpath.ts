/**
 * bench-hotpath.ts: what Rigel adds to one launch, and to one call of cuBLAS, in nanoseconds, on this machine.
 *
 * native/bench/hotpath.c launches against a stand-in whose launch does nothing, and prints nanoseconds a launch;
 * native/bench/guard.c does the same with a multiplication (`blas_`). Each is run in turn in its ways, many rounds, so that
 * a change of clock speed hits all alike; medians are shown. `_recording`: with the flight recorder on (setting `trace`).
 */

import { join, resolve } from "node:path";
import { Command } from "commander";
import { Native, make } from "./native.ts";
import { defaultSegmentFolder } from "./plan.ts";
import { Segment } from "./segment.ts";

const program = new Command("bench:hotpath")
  .option("--json", "print as JSON")
  .option("--rounds <count>", "rounds", Number, 21)
  .parse();
const { json, rounds } = program.opts<{ json?: true; rounds: number }>();

const native = await Native.load();
const sources = resolve(import.meta.dir, "..", "native");
const build = join(sources, "build");
await make(sources, "bench");
const segments = [false, true].map((trace) => {
  const name = `rigel-bench-${process.pid}-${trace ? "recording" : "plain"}`;
  const segment = Segment.create(native, join(defaultSegmentFolder(process.env), name));
  segment.configure({ policy: "priority", trace });
  return segment;
});
const [segment, recording] = segments;
if (!segment || !recording) throw new Error("no segments");
try {
  const client = { LD_PRELOAD: native.files.interposer, RIGEL_SEGMENT: segment.path, RIGEL_NAME: "bench" };
  const high = { ...client, RIGEL_CLASS: "high" };
  const ways: Record<string, [bench: string, environment: Record<string, string>]> = {
    bare_ns: ["bench-hotpath", {}],
    disabled_ns: ["bench-hotpath", { ...high, RIGEL_DISABLE: "1" }],
    high_ns: ["bench-hotpath", high],
    best_effort_ns: ["bench-hotpath", { ...client, RIGEL_CLASS: "best-effort" }],
    high_recording_ns: ["bench-hotpath", { ...high, RIGEL_SEGMENT: recording.path }],
    best_effort_recording_ns: [
      "bench-hotpath",
      { ...client, RIGEL_CLASS: "best-effort", RIGEL_SEGMENT: recording.path },
    ],
    blas_bare_ns: ["bench-guard", {}],
    blas_off_ns: ["bench-guard", { ...high, RIGEL_GUARD: "off" }],
    blas_repair_ns: ["bench-guard", { ...high, RIGEL_GUARD: "repair" }],
  };
  const taken: Record<string, number[]> = {};
  for (let round = 0; round < rounds; round++)
    for (const [way, [bench, environment]] of Object.entries(ways))
      (taken[way] ??= []).push(await call_ns(bench, environment));
  const medians = Object.fromEntries(Object.entries(taken).map(([way, values]) => [way, median(values)]));
  const lines = Object.entries(medians).map(([way, ns]) => `${way.padEnd(25)} ${ns.toFixed(1)}`);
  process.stdout.write(`${json ? JSON.stringify(medians) : lines.join("\n")}\n`);
} finally {
  for (const one of segments) one.remove();
}

async function call_ns(bench: string, environment: Record<string, string>): Promise<number> {
  const child = Bun.spawn([join(build, bench)], {
    env: { ...process.env, LD_LIBRARY_PATH: join(build, "bench"), ...environment },
    stdout: "pipe",
    stderr: "inherit",
  });
  const [text, status] = await Promise.all([child.stdout.text(), child.exited]);
  if (status !== 0) throw new Error(`${bench} ended with status ${status}`);
  return Number(text);
}

function median(values: number[]): number {
  return values.toSorted((a, b) => a - b)[values.length >> 1] ?? Number.NaN;
}
