/**
 * gpu-ddp.test.ts: data-parallel training on two GPUs beside a best-effort client on each gives the losses that it gives alone, to the
 * last bit, and does not lock up. Skipped, with the reason, below two GPUs or without PyTorch.
 *
 * torchrun is one high client that sees both GPUs, and so are the ranks that it starts; on each GPU a best-effort client keeps
 * the rest of it busy (test/gpu/busy.py). NCCL's kernels are never held back, and both classes are at work all the time.
 */

import { expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { gpus, lacks, memoryOfAll } from "./gpus.ts";
import { Scratch, plainEnvironment, reportOf, rigel, root } from "./rigel.ts";

const RANKS = 2;
const ITERATIONS = 1000;
const LIMIT_ms = 400_000;

const cannot = lacks("gpu-ddp.test.ts", RANKS, "torch.distributed");

function python(name: string, ...args: string[]): string[] {
  return ["python3", join(root, "test", "gpu", name), ...args];
}

function training(losses: string): string[] {
  const [interpreter = "", ...program] = python("ddp.py", "--losses", losses, "--iterations", String(ITERATIONS));
  return [interpreter, "-m", "torch.distributed.run", "--standalone", `--nproc-per-node=${RANKS}`, ...program];
}

function lossesOf(path: string): string[][] {
  return Array.from({ length: RANKS }, (_, rank) => readFileSync(`${path}.${rank}`, "utf8").trim().split("\n"));
}

test.skipIf(cannot)(
  "DistributedDataParallel beside best-effort work has the losses that it has alone",
  async () => {
    using _ = await memoryOfAll();
    using scratch = new Scratch();
    const [alone, governed] = [join(scratch.path, "alone"), join(scratch.path, "governed")];
    const env = {
      ...plainEnvironment(),
      CUDA_VISIBLE_DEVICES: gpus
        .slice(0, RANKS)
        .map(({ uuid }) => uuid)
        .join(","),
    };
    await using child = Bun.spawn(training(alone), { cwd: root, env, stdout: "pipe", stderr: "pipe" });
    const [stdout, stderr, status] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
    expect(status, stdout + stderr).toBe(0);

    const ranks = [...Array(RANKS).keys()];
    const config = scratch.file("jobs.json", {
      clients: [
        { name: "ddp", class: "high", command: training(governed), cwd: root, device: ranks },
        ...ranks.map((device) => ({
          name: `busy-${device}`,
          class: "best-effort",
          command: python("busy.py"),
          cwd: root,
          device,
        })),
      ],
    });
    const result = await rigel("launch", config, "--json");
    expect(result.status, result.stderr).toBe(0);
    const { clients } = reportOf(result);
    expect(clients).toMatchObject([
      { name: "ddp", attached: true, exit_code: 0 },
      ...ranks.map((device) => ({ name: `busy-${device}`, attached: true })),
    ]);
    for (const { launches } of clients) expect(launches).toBeGreaterThan(100);

    const expected = lossesOf(alone);
    expect(expected.map((losses) => losses.length)).toEqual(ranks.map(() => ITERATIONS));
    expect(expected[0]).not.toEqual(expected[1]);
    expect(lossesOf(governed)).toEqual(expected);
  },
  LIMIT_ms,
);
