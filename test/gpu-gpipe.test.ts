/**
 * gpu-gpipe.test.ts: a GPipe-like program, four client threads in each rank, has under Rigel the losses that it has without it, to the
 * last bit: four threads that share one GPU, and, where there are four GPUs, four ranks on one each. Skipped, with the reason, without
 * a GPU or PyTorch.
 */

import { expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { z } from "zod";
import { gpus, lacks, native } from "./gpus.ts";
import { Scratch, plainEnvironment, rigel, root } from "./rigel.ts";

const ITERATIONS = 200;
const LIMIT_ms = 550_000;

const cannot = lacks("gpu-gpipe.test.ts", 1, "torch.distributed");
if (!cannot) lacks("gpu-gpipe.test.ts: four ranks", 4);

function program(ranks: number, losses: string): string[] {
  const script = [join(root, "test", "gpu", "gpipe.py"), "--losses", losses, "--iterations", String(ITERATIONS)];
  if (ranks === 1) return ["python3", ...script];
  return ["python3", "-m", "torch.distributed.run", "--standalone", `--nproc-per-node=${ranks}`, ...script];
}

function textsOf(ranks: number, path: string, suffix = ""): string[] {
  return Array.from({ length: ranks }, (_, rank) => readFileSync(`${path}.${rank}${suffix}`, "utf8").trim());
}

const warnings = (text: string): string[] => text.split("\n").filter((line) => /warn|CUBLAS_STATUS/i.test(line));

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

test.skipIf(cannot).each([1, 4].filter((ranks) => ranks <= Math.max(1, gpus.length)))(
  "GPipe with four client threads in each of %d ranks has the losses that it has without Rigel",
  async (ranks) => {
    using scratch = new Scratch();
    const [bare, governed] = [join(scratch.path, "bare"), join(scratch.path, "governed")];
    // Without the number torchrun warns that it chooses one.
    const environment = { OMP_NUM_THREADS: "1" };
    const visible = gpus.slice(0, ranks);
    await using child = Bun.spawn(program(ranks, bare), {
      cwd: root,
      env: {
        ...plainEnvironment(),
        ...environment,
        PYTHONPATH: native.files.python,
        CUDA_VISIBLE_DEVICES: visible.map(({ uuid }) => uuid).join(","),
      },
      stdout: "pipe",
      stderr: "pipe",
    });
    const [stdout, stderr, status] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
    expect(status, stdout + stderr).toBe(0);

    const config = scratch.file("jobs.json", {
      policy: { name: "priority" },
      clients: [
        {
          name: "gpipe",
          class: "best-effort",
          command: program(ranks, governed),
          cwd: root,
          env: environment,
          device: visible.map(({ index }) => index),
        },
      ],
    });
    const result = await rigel("launch", config, "--json");
    expect(result.status, result.stderr).toBe(0);
    expect(warnings(result.stderr).length, result.stderr).toBeLessThanOrEqual(warnings(stderr).length);

    const expected = textsOf(ranks, bare);
    expect(expected.map((text) => text.split("\n").length)).toEqual(expected.map(() => ITERATIONS));
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
