/**
 * exits.test.ts: programs that end and fork in all ways do under Rigel what they do without it, on the simulated GPU.
 *
 * Each way is tried a few times; RIGEL_EXITS=1000 tries each a thousand times.
 */

import { join } from "node:path";
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { make } from "../src/native.ts";
import { Scratch, root } from "./rigel.ts";
import { type Program, Stage, bareEnd, compare, compile, isMoreOften, repeats } from "./exits.ts";

const scratch = new Scratch();
afterAll(() => scratch[Symbol.dispose]());
const programs = compile(scratch.path);

/** Each run is a process of milliseconds; a hang ends with the program's own alarm, after two minutes. */
const LIMIT_ms = 125_000 + repeats(2) * 5000;

/** Not ways to end: programs that others need. */
const HELPERS = new Set(["busy", "wait-for-turn"]);

function waysOf({ argv, ways }: Program): [string, string[]][] {
  return ways.filter((way) => !HELPERS.has(way)).map((way) => [way, [...argv, way]]);
}

describe.concurrent.each([
  ["C", programs.c, 2],
  ["C++", programs.cxx, 2],
  ["Python", programs.python, 1], // each takes a tenth of a second to start
] as const)("%s", (_language, program, few) => {
  test.each(waysOf(program))(
    "%s",
    async (_way, command) => {
      await compare("simulated", scratch.path, command, repeats(few));
    },
    LIMIT_ms,
  );
});

test("crashes that the bare program has too are told from more of them", () => {
  expect(isMoreOften(0, 30, 0, 1)).toBe(false);
  expect(isMoreOften(30, 30, 1, 1)).toBe(false);
  expect(isMoreOften(2, 30, 3, 121)).toBe(false);
  // Of six among 151 all, or at least five, are among the 30 with a chance of 0.00004, and 0.0012.
  expect(isMoreOften(6, 30, 0, 121)).toBe(true);
  expect(isMoreOften(5, 30, 1, 121)).toBe(false);
  expect(isMoreOften(15, 30, 2, 121)).toBe(true);
});

describe("what the ways above are there for", () => {
  test.skipIf(programs.cxx.argv.length === 0)("an object that outlives the driver is refused, bare (S9)", async () => {
    const end = await bareEnd("simulated", scratch.path, [...programs.cxx.argv, "static-object"]);
    expect(end).toEqual({ status: 5, signal: null, stdout: "global 4 4 4\nglobal 4 4 4\n", stderr: "" });
  });

  const folder = join(root, "native");
  beforeAll(() => make(folder, "build/naive-preload.so"), 300_000);
  // CUDA_ERROR_DEINITIALIZED of the driver that has ended; CUDA_ERROR_NOT_INITIALIZED in a forked child.
  test.each([
    ["return", 4],
    ["exit-in-thread", 4],
    ["handler-from-after-cuda", 4],
    ["fork-exit", 3],
  ])(
    "an interposer that clears up when it is unloaded changes how a program ends (S10, S12): %s",
    async (way, error) => {
      using stage = new Stage("simulated");
      const end = await stage.run([...programs.c.argv, way], {
        ...stage.environment(scratch.path, undefined),
        LD_PRELOAD: join(folder, "build", "naive-preload.so"),
        NAIVE: "destructor",
      });
      expect(end.stderr).toContain(`scheduler: cuCtxSynchronize returned ${error}\n`);
      expect(end.signal).toBe("SIGABRT");
    },
  );
});

/** What keeps a best-effort client waiting here; nothing but what is tested lets it go on. */
const FOREVER = { starvation_us: 3_600_000_000, stale_ms: 3_600_000, min_share_ppm: 0 };
const HELD = [
  ["at the gate", { ...FOREVER, preempt: 0 }],
  ["off the GPU", { ...FOREVER, preempt: 1 }],
] as const;

/** A high client that keeps the GPU busy until a line tells it how to leave. */
async function busy(stage: Stage) {
  const env = stage.environment(scratch.path, "high", "busy");
  const child = Bun.spawn([...programs.c.argv, "busy"], { env, stdin: "pipe", stdout: "pipe", stderr: "inherit" });
  await begun(child.stdout);
  return child;
}

/** The program has printed its first line. */
async function begun(stream: ReadableStream<Uint8Array>): Promise<void> {
  const reader = stream.getReader();
  await reader.read();
  reader.releaseLock();
}

describe.concurrent.each(HELD)("a best-effort client that waits %s ends as it would alone", (_how, settings) => {
  test.each([
    "exit-while-launching",
    "immediate-exit-while-launching",
    "quick-exit-while-launching",
    "abort-while-launching",
    "sigterm",
    "sigkill",
    "sigterm-handler-exits",
    "shutdown-while-launching",
  ])(
    "%s",
    async (way) => {
      const command = [...programs.c.argv, way];
      const bare = await bareEnd("simulated", scratch.path, command);
      for (let time = 0; time < repeats(1); time++) {
        using stage = new Stage("simulated");
        stage.segment.apply(settings);
        await using neighbour = await busy(stage);
        const end = await stage.run(command, { ...stage.environment(scratch.path, "best-effort"), EXITS_HELD: "1" });
        expect(end).toEqual(bare);
        const { least, most } = await stage.known();
        expect(stage.counted()).toBeGreaterThanOrEqual(least);
        expect(stage.counted()).toBeLessThanOrEqual(most);
        expect(neighbour.exitCode).toBeNull();
        neighbour.kill("SIGKILL");
      }
    },
    LIMIT_ms,
  );
});

describe.concurrent.each(HELD)(
  "a best-effort client that waits %s goes on when a busy high client leaves",
  (_how, settings) => {
    test.each([
      ["exit", 7, null],
      ["quick_exit", 7, null],
      ["shutdown", null, null],
      ["abort", null, "SIGABRT"],
      ["kill", null, "SIGKILL"],
    ])(
      "%s",
      async (how, status, signal) => {
        for (let time = 0; time < repeats(1); time++) {
          using stage = new Stage("simulated");
          stage.segment.apply(settings);
          await using high = await busy(stage);
          stage.forget();
          await using waiting = Bun.spawn([...programs.c.argv, "wait-for-turn"], {
            env: stage.environment(scratch.path, "best-effort"),
            stdout: "pipe",
            stderr: "inherit",
          });
          await begun(waiting.stdout);
          high.stdin.write(`${how}\n`);
          await high.stdin.flush();
          expect(await waiting.exited).toBe(5);
          if (how === "shutdown") {
            expect(high.exitCode).toBeNull();
            high.kill("SIGKILL");
          } else {
            await high.exited;
            expect<unknown>({ status: high.exitCode, signal: high.signalCode }).toEqual({ status, signal });
          }
          expect(stage.counted("busy")).toBe(1);
          expect(stage.counted()).toBe(40);
        }
      },
      LIMIT_ms,
    );
  },
);
