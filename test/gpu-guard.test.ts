/**
 * gpu-guard.test.ts: programs that break with cuBLAS, or behind an interposer of the kind that broke them, run under Rigel: on the
 * real cuBLAS. Skipped, with the reason, where there is no GPU; some need two.
 *
 * What cuBLAS does where its rules are broken is not written down: where a program may get away with it, that is told and not
 * held against anybody. Under Rigel it has to run in any case. The programs are those of test/gpu/cublas_failures.py;
 * native/test/test-cublas-scenarios.c has the same on a stand-in that is strict.
 */

import { beforeAll, describe, expect, test } from "bun:test";
import { join } from "node:path";
import { z } from "zod";
import { make } from "../src/native.ts";
import { gpus, lacks, memoryOfAll } from "./gpus.ts";
import { Scratch, plainEnvironment, rigel, root } from "./rigel.ts";

const cannot = lacks("gpu-guard.test.ts", 1);
if (!cannot) lacks("gpu-guard.test.ts: what needs two GPUs", 2);

const build = join(root, "native", "build");
const program = join(root, "test", "gpu", "cublas_failures.py");
const LIMIT_ms = 300_000;

beforeAll(async () => {
  if (!cannot) await make(join(root, "native"), "build/naive-preload.so");
}, LIMIT_ms);

interface End {
  status: number | null;
  said: string;
}

async function bare(command: string[], env: Record<string, string> = {}): Promise<End> {
  await using child = Bun.spawn(command, {
    cwd: root,
    env: { ...plainEnvironment(), ...env },
    stdout: "pipe",
    stderr: "pipe",
  });
  const [stdout, stderr] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
  return { status: child.exitCode, said: stdout + stderr };
}

const reportSchema = z.object({
  clients: z.tuple([
    z.object({
      exit_code: z.number().nullable(),
      attached: z.boolean(),
      launches: z.number(),
      guard: z.looseObject({ mode: z.string(), repaired: z.number(), create_failed: z.number() }),
    }),
  ]),
});

/** Runs the command as a client that sees these GPUs. */
async function governed(command: string[], device = gpus) {
  using scratch = new Scratch();
  const config = scratch.file("jobs.json", {
    guard: "repair",
    clients: [
      {
        name: "it",
        class: "high",
        command,
        cwd: root,
        device: device.map(({ index }) => index),
      },
    ],
  });
  const { stdout, stderr } = await rigel("launch", config, "--json");
  expect(stdout, stderr).toStartWith("{");
  const [client] = reportSchema.parse(JSON.parse(stdout)).clients;
  expect(client.attached, stderr).toBe(true);
  return { ...client, said: stderr };
}

/** What is expected without Rigel's help: it runs, it fails, or cuBLAS decides. */
type Alone = "runs" | "fails" | "either";
const SCENARIOS: [name: string, gpus: number, alone: Alone, naive: string | undefined, behindNaive: Alone][] = [
  ["s1", 1, "runs", "stream", "fails"],
  ["s2", 2, "fails", undefined, "either"],
  ["s3", 2, "runs", "scheduler", "either"],
  ["s5a", 2, "either", undefined, "either"],
  ["s5b", 1, "either", undefined, "either"],
];

function expectAlone(name: string, how: string, end: End, alone: Alone): void {
  expect(end.status, end.said).not.toBe(77);
  if (alone !== "either") expect(end.status === 0 ? "runs" : "fails", end.said).toBe(alone);
  else console.warn(`gpu-guard.test.ts: ${name} ${how} ${end.status === 0 ? "runs" : `fails: ${end.said.trim()}`}`);
}

describe.skipIf(cannot)("cuBLAS", () => {
  for (const [name, needs, alone, naive, behindNaive] of SCENARIOS)
    test.skipIf(gpus.length < needs)(
      `${name} runs under Rigel, whatever it does without`,
      async () => {
        const command = ["python3", program, name];
        expectAlone(name, "as it is", await bare(command), alone);
        if (naive !== undefined) {
          const env = { LD_PRELOAD: join(build, "naive-preload.so"), NAIVE: naive };
          expectAlone(name, "behind the naive interposer", await bare(command, env), behindNaive);
        }
        const client = await governed(command);
        expect(client.exit_code, client.said).toBe(0);
        expect(client.launches).toBeGreaterThan(0);
      },
      LIMIT_ms,
    );

  test(
    "s4: where no memory is left a failure says so, and what is in use",
    async () => {
      using _ = await memoryOfAll({ filling: true });
      const command = ["python3", program, "s4"];
      // On a GPU that other tests have the least use for: it is filled.
      const device = gpus.slice(-1);
      const alone = await bare(command, { CUDA_VISIBLE_DEVICES: device.map(({ uuid }) => uuid).join(",") });
      expect(alone.status, alone.said).toBe(1);
      expect(alone.said).toContain("cublasCreate");
      const client = await governed(command, device);
      expect(client.exit_code, client.said).toBe(1);
      expect(client.said).toMatch(/rigel: cublasCreate failed with status \d+.* on device 0: \d+ of \d+ MiB free/);
      expect(client.guard.create_failed).toBeGreaterThan(0);
    },
    LIMIT_ms,
  );

  const noCupy = cannot || lacks("gpu-guard.test.ts: CuPy", 1, "cupy");
  test.skipIf(noCupy)(
    "CuPy multiplies on other threads and devices with the same bits, and nothing is repaired",
    async () => {
      const command = ["python3", join(root, "test", "gpu", "cupy_threads.py")];
      const alone = await bare(command);
      expect(alone.status, alone.said).toBe(0);
      const digest = /"sha256": "\w{64}"/.exec(alone.said)?.[0];
      expect(digest).toBeDefined();
      const client = await governed(command);
      expect(client.said).toContain(digest ?? "");
      expect(client).toMatchObject({ exit_code: 0, guard: { mode: "repair", repaired: 0, create_failed: 0 } });
    },
    LIMIT_ms,
  );
});
