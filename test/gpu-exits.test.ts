/**
 * gpu-exits.test.ts: programs that end and fork in all ways do under Rigel what they do without it, on a real GPU, with the CUDA
 * runtime as a shared and as a static library too. Skipped, with the reason, where there is no GPU, or no nvcc for the latter.
 *
 * Each way is run 30 times in all, half of them in each class, as far as two minutes go, and twice at least; how many it were is
 * printed at the end. RIGEL_EXITS=30 (or another number) runs that many, however long it takes. Where a program by itself does not end
 * the same each time, how it ends under Rigel must be one of the ways that it has bare.
 */

import { afterAll, describe, expect, test } from "bun:test";
import { gpus, lacks } from "./gpus.ts";
import { Scratch } from "./rigel.ts";
import { type Program, compare, compile, compileCudart, repeats } from "./exits.ts";

const [gpu] = gpus;
lacks("gpu-exits.test.ts", 1);
const nvcc = gpu ? (Bun.which("nvcc") ?? Bun.which("/usr/local/cuda/bin/nvcc")) : null;
if (gpu && nvcc === null)
  console.warn("gpu-exits.test.ts: there is no nvcc, so no program of the CUDA runtime is tested");

const scratch = new Scratch();
const BUDGET_ms = process.env["RIGEL_EXITS"] === undefined ? 120_000 : Infinity;
const LIMIT_ms = 600_000;
const begun_ms = performance.now();
let runs = 0;
let ways = 0;
afterAll(() => {
  scratch[Symbol.dispose]();
  if (gpu)
    console.warn(`gpu-exits.test.ts: ${runs} exits of ${ways} ways in ${(performance.now() - begun_ms) / 1000} s`);
});

/** Need others, or a GPU of their own. */
const HELPERS = new Set(["busy", "wait-for-turn"]);
/** Do not end, bare or under Rigel: threads of the real driver (cuda-EvtHandlr) go on after the program's last one. */
const ENDLESS = new Set(["main-ends-before-its-threads"]);
if (gpu)
  console.warn(
    `gpu-exits.test.ts leaves out ${[...ENDLESS].join(", ")}: a real driver's threads keep such a process alive`,
  );

function waysOf({ argv, ways: all }: Program): [string, string[]][] {
  return all.filter((way) => !HELPERS.has(way) && !ENDLESS.has(way)).map((way) => [way, [...argv, way]]);
}

function enough(): boolean {
  return performance.now() - begun_ms > BUDGET_ms;
}

async function compareHere(folder: string, command: string[]): Promise<void> {
  // Others end meanwhile: read only after the wait, or their exits are lost.
  const made = await compare("real", folder, command, Math.ceil(repeats(30) / 2), enough);
  runs += made;
  ways++;
}

if (gpu) {
  const { c, cxx, python } = compile(scratch.path);
  describe.concurrent.each([
    ["C", c],
    ["C++", cxx],
    ["Python", python],
  ] as const)("%s", (_language, program) => {
    test.each(waysOf(program))("%s", (_way, command) => compareHere(scratch.path, command), LIMIT_ms);
  });
  if (nvcc !== null) {
    const { programs, library } = compileCudart(scratch.path, nvcc);
    describe.concurrent.each(Object.entries(programs))("%s", (_name, program) => {
      test.each(waysOf(program))("%s", (_way, command) => compareHere(scratch.path, command), LIMIT_ms);
    });
    describe.concurrent("a library with a runtime of its own", () => {
      test.each(waysOf(python).filter(([way]) => way.startsWith("library")))(
        "%s",
        (_way, command) => compareHere(library, command),
        LIMIT_ms,
      );
    });
  }
}

test.skipIf(!gpu)("there is a GPU", () => {
  expect(gpu?.simulated).toBe(false);
});
