/**
 * gpu-gpipe.test.ts: a GPipe-like program, four client threads in each rank, has under Rigel the losses that it has without it, to the
 * last bit: four threads that share one GPU, and, where there are four GPUs, four ranks on one each. Behind naive interception it
 * fails, or has other losses, and runs with the guard's repairs. Skipped, with the reason, without a GPU or PyTorch.
 */

import { beforeAll, describe, expect, test } from "bun:test";
import { existsSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { z } from "zod";
import { make } from "../src/native.ts";
import { gpus, lacks, native } from "./gpus.ts";
import { Scratch, plainEnvironment, rigel, root } from "./rigel.ts";

const ITERATIONS = 200;
const LIMIT_ms = 550_000;

const cannot = lacks("gpu-gpipe.test.ts", 1, "torch.distributed");
if (!cannot) lacks("gpu-gpipe.test.ts: four ranks", 4);

function program(ranks: number, losses: string, iterations = ITERATIONS): string[] {
  const script = [join(root, "test", "gpu", "gpipe.py"), "--losses", losses, "--iterations", String(iterations)];
  if (ranks === 1) return ["python3", ...script];
  return ["python3", "-m", "torch.distributed.run", "--standalone", `--nproc-per-node=${ranks}`, ...script];
}

function textsOf(ranks: number, path: string, suffix = ""): string[] {
  return Array.from({ length: ranks }, (_, rank) => readFileSync(`${path}.${rank}${suffix}`, "utf8").trim());
}

/** Python's float.hex, of numbers that are not tiny. */
function numbersOf(text: string): number[] {
  return text.split(/\s+/).map((word) => {
    const [, sign = "", whole = "", part = "", exponent] = /^(-?)0x([01])\.([0-9a-f]+)p([+-]\d+)$/.exec(word) ?? [];
    const value = (Number(whole) + Number.parseInt(part, 16) / 16 ** part.length) * 2 ** Number(exponent);
    return sign ? -value : value;
  });
}

const warnings = (text: string): string[] => text.split("\n").filter((line) => /warn|CUBLAS_STATUS/i.test(line));

const repairSchema = z.object({ clients: z.tuple([z.object({ guard: z.looseObject({ repaired: z.number() }) })]) });

const reportSchema = z.object({
  clients: z.array(
    z.object({
      name: z.string(),
      exit_code: z.number().nullable(),
      guard: z.object({
        null_handle: z.number(),
        wrong_context: z.number(),
        in_use_elsewhere: z.number(),
        create_failed: z.number(),
      }),
      threads: z.array(
        z.object({
          name: z.string(),
          class: z.string(),
          launches: z.number(),
          iterations: z.number().nullable(),
          devices: z.array(z.number()),
        }),
      ),
    }),
  ),
});

/** Without the number torchrun warns that it chooses one. */
const environment = { OMP_NUM_THREADS: "1" };

/** Without Rigel. */
async function bare(ranks: number, command: string[], env: Record<string, string> = {}) {
  await using child = Bun.spawn(command, {
    cwd: root,
    env: {
      ...plainEnvironment(),
      ...environment,
      PYTHONPATH: native.files.python,
      CUDA_VISIBLE_DEVICES: gpus
        .slice(0, ranks)
        .map(({ uuid }) => uuid)
        .join(","),
      ...env,
    },
    stdout: "pipe",
    stderr: "pipe",
  });
  const [stdout, stderr, status] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
  return { status, stderr: stdout + stderr };
}

/** The command as one client, on as many GPUs as it has ranks. */
function launch(scratch: Scratch, name: string, ranks: number, command: string[]) {
  const config = scratch.file(`${name}.json`, {
    policy: { name: "priority" },
    clients: [
      {
        name: "gpipe",
        class: "best-effort",
        command,
        cwd: root,
        env: environment,
        device: gpus.slice(0, ranks).map(({ index }) => index),
      },
    ],
  });
  return rigel("launch", config, "--json");
}

test.skipIf(cannot).each([1, 4].filter((ranks) => ranks <= Math.max(1, gpus.length)))(
  "GPipe with four client threads in each of %d ranks has the losses that it has without Rigel",
  async (ranks) => {
    using scratch = new Scratch();
    const [before, governed] = [join(scratch.path, "bare"), join(scratch.path, "governed")];
    const alone = await bare(ranks, program(ranks, before));
    expect(alone.status, alone.stderr).toBe(0);

    const result = await launch(scratch, "jobs", ranks, program(ranks, governed));
    expect(result.status, result.stderr).toBe(0);
    expect(warnings(result.stderr).length, result.stderr).toBeLessThanOrEqual(warnings(alone.stderr).length);

    const expected = textsOf(ranks, before);
    expect(expected.map((text) => text.split("\n").length)).toEqual(expected.map(() => 1 + ITERATIONS));
    expect(textsOf(ranks, governed)).toEqual(expected);
    // Nothing of Rigel's, its own threads included, has made a context on another rank's device.
    expect(textsOf(ranks, governed, ".devices")).toEqual(Array.from({ length: ranks }, (_, rank) => String(rank)));

    const [gpipe] = reportSchema.parse(JSON.parse(result.stdout)).clients;
    expect(gpipe).toMatchObject({
      exit_code: 0,
      guard: { null_handle: 0, wrong_context: 0, in_use_elsewhere: 0, create_failed: 0 },
    });
    const threads = (gpipe?.threads ?? []).toSorted((a, b) => a.name.localeCompare(b.name));
    expect(threads).toMatchObject(
      [0, 1, 2, 3].map((number) => ({
        name: `stage-${number}`,
        class: number % 2 ? "best-effort" : "high",
        iterations: ITERATIONS * ranks,
      })),
    );
    for (const { launches, devices } of threads) {
      expect(launches).toBeGreaterThan(ITERATIONS * ranks * 5);
      expect(devices).toHaveLength(ranks);
    }
  },
  LIMIT_ms,
);

/**
 * Of the interposers of native/test/naive-preload.c: on how many GPUs the program fails behind it, and how: cuBLAS says so, or what should
 * have been captured was not, and the losses are others. Undefined: that is left open, as cuBLAS 13 takes a handle that was made in no
 * context in any, and threads that share a handle fail where they meet. What takes a stream away cannot be repaired: only without it is
 * there anything to be seen of the stream that the program had set. Where handles of the guard's own stand in for a shared one, cuBLAS has
 * another workspace and may add up in another order: those losses agree to a few bits less.
 */
const CUBLAS_FAILS = /CUBLAS_STATUS_\w+|operation not permitted when stream is capturing|illegal memory access/;
const NAIVE: readonly [
  naive: string,
  ranks: number,
  how: RegExp | "other losses" | undefined,
  repaired: "to the last bit" | "closely" | undefined,
][] = [
  ["stream", 1, "other losses", undefined],
  ["create", 2, undefined, "to the last bit"],
  ["scheduler", 2, CUBLAS_FAILS, "to the last bit"],
  ["handle", 1, undefined, "closely"],
];
/** Relative; one bit of a float is 1.2e-7. */
const CLOSE = 1e-5;
const FEWER_ITERATIONS = 20;

describe.skipIf(cannot)("behind an interposer that handles", () => {
  const interposer = join(root, "native", "build", "naive-preload.so");
  const expected = new Map<number, string[]>();
  beforeAll(async () => {
    await make(join(root, "native"), "build/naive-preload.so");
    using scratch = new Scratch();
    for (const ranks of new Set(NAIVE.map(([, number]) => number)))
      if (ranks <= gpus.length) {
        const losses = join(scratch.path, `losses-${ranks}`);
        const { status, stderr } = await bare(ranks, program(ranks, losses, FEWER_ITERATIONS));
        expect(status, stderr).toBe(0);
        expected.set(ranks, textsOf(ranks, losses));
      }
  }, LIMIT_ms);

  for (const [naive, ranks, how, repaired] of NAIVE)
    test.skipIf(gpus.length < ranks)(
      `in the way "${naive}" GPipe ${how ? "fails" : "may fail"}${repaired ? `, and runs under Rigel, with its losses ${repaired}` : ""}`,
      async () => {
        using scratch = new Scratch();
        const [before, governed] = [join(scratch.path, "bare"), join(scratch.path, "governed")];
        const command = program(ranks, before, FEWER_ITERATIONS);
        const alone = await bare(ranks, command, { LD_PRELOAD: interposer, NAIVE: naive });
        const wrong = existsSync(`${before}.0`) && !Bun.deepEquals(textsOf(ranks, before), expected.get(ranks));
        const ended =
          alone.status !== 0 ? `ends with ${alone.status}` : `runs, with ${wrong ? "other" : "the same"} losses`;
        const message = alone.stderr.split("\n").find((line) => CUBLAS_FAILS.test(line));
        console.warn(`gpu-gpipe.test.ts: behind ${naive} it ${ended}; it says: ${message ?? "nothing of cuBLAS"}`);
        if (how === "other losses") expect(ended).toBe("runs, with other losses");
        else if (how) {
          expect(alone.status).not.toBe(0);
          expect(alone.stderr).toMatch(how);
        }
        if (!repaired) return;
        const shell = ["sh", "-c", `LD_PRELOAD="${interposer}:$LD_PRELOAD" NAIVE=${naive} exec "$@"`, "sh"];
        const result = await launch(scratch, naive, ranks, [...shell, ...program(ranks, governed, FEWER_ITERATIONS)]);
        expect(result.status, result.stderr).toBe(0);
        const [found, wanted] = [textsOf(ranks, governed), expected.get(ranks) ?? []];
        if (repaired === "to the last bit") expect(found).toEqual(wanted);
        else {
          const [mine, theirs] = [found.flatMap(numbersOf), wanted.flatMap(numbersOf)];
          expect(mine.length).toBe(theirs.length);
          expect(
            Math.max(...mine.map((loss, index) => Math.abs(loss / (theirs[index] ?? Number.NaN) - 1))),
          ).toBeLessThan(CLOSE);
        }
        const { clients } = repairSchema.parse(JSON.parse(result.stdout));
        expect(clients[0].guard.repaired).toBeGreaterThan(0);
      },
      LIMIT_ms,
    );
});
