/**
 * bench-hotpath.ts: what Rigel adds to one launch, in nanoseconds, on this machine.
 *
 * native/bench/hotpath.c launches against a stand-in whose launch does nothing, and prints nanoseconds a launch.
 * It is run in turn in four ways, many rounds, so that a change of clock speed hits all four alike; medians are shown.
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
const segment = Segment.create(native, join(defaultSegmentFolder(process.env), `rigel-bench-${process.pid}`));
try {
  segment.configure({ policy: "priority" });
  const client = { LD_PRELOAD: native.files.library, RIGEL_SEGMENT: segment.path, RIGEL_NAME: "bench" };
  const ways: Record<string, Record<string, string>> = {
    bare_ns: {},
    disabled_ns: { ...client, RIGEL_CLASS: "high", RIGEL_DISABLE: "1" },
    high_ns: { ...client, RIGEL_CLASS: "high" },
    best_effort_ns: { ...client, RIGEL_CLASS: "best-effort" },
  };
  const taken: Record<string, number[]> = {};
  for (let round = 0; round < rounds; round++)
    for (const [way, environment] of Object.entries(ways)) (taken[way] ??= []).push(await launch_ns(environment));
  const medians = Object.fromEntries(Object.entries(taken).map(([way, values]) => [way, median(values)]));
  const lines = Object.entries(medians).map(([way, ns]) => `${way.padEnd(15)} ${ns.toFixed(1)}`);
  process.stdout.write(`${json ? JSON.stringify(medians) : lines.join("\n")}\n`);
} finally {
  segment.remove();
}

async function launch_ns(environment: Record<string, string>): Promise<number> {
  const child = Bun.spawn([join(build, "bench-hotpath")], {
    env: { ...process.env, LD_LIBRARY_PATH: join(build, "bench"), ...environment },
    stdout: "pipe",
    stderr: "inherit",
  });
  const [text, status] = await Promise.all([child.stdout.text(), child.exited]);
  if (status !== 0) throw new Error(`bench-hotpath ended with status ${status}`);
  return Number(text);
}

function median(values: number[]): number {
  return values.toSorted((a, b) => a - b)[values.length >> 1] ?? Number.NaN;
}
