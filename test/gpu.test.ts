/**
 * gpu.test.ts: what only a real GPU can show. Skipped, with the reason, where there is none.
 *
 * Every program is run bare and under Rigel, as it is, and must give the same result to the last bit.
 */

import { describe, expect, test } from "bun:test";
import { existsSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { living, startedWith } from "../src/proc.ts";
import { gpus, lacks } from "./gpus.ts";
import { Scratch, TINY_PROFILE, plainEnvironment, reportOf, rigel, root, start } from "./rigel.ts";

const [gpu] = gpus;
const cannot = lacks("gpu.test.ts", 1);

/** Python packages that a program needs. */
function missing(...packages: string[]): boolean {
  return cannot || lacks(`gpu.test.ts: ${packages.join(", ") || "MPS"}`, 1, ...packages);
}

const PROGRAM_LIMIT_ms = 280_000;

async function bare(command: string[]): Promise<string> {
  await using child = Bun.spawn(command, { cwd: root, env: plainEnvironment(), stdout: "pipe", stderr: "pipe" });
  const [stdout, stderr, status] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
  expect(status, stderr).toBe(0);
  return stdout;
}

/** Runs the command as a client; its output is what the launcher streams with the name in front. */
async function governed(scratch: Scratch, command: string[], clientClass: "high" | "best-effort") {
  const path = scratch.file("config.json", { clients: [{ name: "it", class: clientClass, command, cwd: root }] });
  const result = await rigel("launch", path, "--json");
  const lines = result.stderr.split("\n").flatMap((line) => (line.startsWith("it |") ? [line.slice(5)] : []));
  expect(result.status, result.stderr).toBe(0);
  const [client] = reportOf(result).clients;
  expect(client).toMatchObject({ attached: true, exit_code: 0 });
  expect(client?.launches).toBeGreaterThan(0);
  return lines.join("\n");
}

const workload = ["python3", join(root, "src", "python", "workload.py")];
const TRAIN_RESNET = ["--model", "resnet50", "--mode", "train", "--batch", "8", "--warmup", "3", "--requests", "20"];
const TRAIN_GPT2 = "--model gpt2 --mode train --batch 2 --seq 128 --warmup 3 --requests 10".split(" ");
const SERVE = "--mode infer --warmup 5 --requests 20".split(" ");

/**
 * So many requests of ResNet-50 from a CUDA graph, in time slices beside best-effort work for as long as they last, which give the bits that they give
 * without Rigel. What its client counted.
 */
async function servedBeside(requests: number, args: readonly string[]) {
  using scratch = new Scratch();
  scratch.file("tiny.csv", TINY_PROFILE);
  const [without, with_, over] = [join(scratch.path, "bare"), join(scratch.path, "rigel"), join(scratch.path, "over")];
  const graph = ["--model", "resnet50", "--batch", "4", "--graph", "--mode", "infer"];
  const serve = [...workload, ...graph, ...args, "--requests", String(requests), "--losses"];
  const mark = '"$@"; status=$?; touch "$0"; exit $status';
  const beside = '"$0" --profile "$1" & until [ -e "$2" ]; do sleep 0.2; done; kill $!; wait $!';
  const replay = [join(root, "native", "build", "rigel-replay"), join(scratch.path, "tiny.csv")];
  const path = scratch.file("config.json", {
    sharing: "time-slice",
    policy: { name: "priority" },
    clients: [
      { name: "serve", class: "high", command: ["sh", "-c", mark, over, ...serve, with_], cwd: root },
      { name: "train", class: "best-effort", command: ["sh", "-c", beside, ...replay, over], cwd: root },
    ],
  });
  await bare([...serve, without]);
  const result = await rigel("launch", path, "--json");
  expect(result.status, result.stderr).toBe(0);
  const served = reportOf(result).clients.find(({ name }) => name === "serve");
  expect(served).toMatchObject({ attached: true, exit_code: 0 });
  const expected = readFileSync(without, "utf8");
  expect(expected.trim().split("\n")).toHaveLength(requests);
  expect(readFileSync(with_, "utf8")).toBe(expected);
  return { counted: served?.preemption, stderr: result.stderr };
}

describe.skipIf(!gpu)("on a real GPU", () => {
  test('"auto" takes it, and a replay attaches and reports', async () => {
    using scratch = new Scratch();
    scratch.file("tiny.csv", TINY_PROFILE);
    const path = scratch.file("config.json", {
      clients: [{ name: "serve", class: "high", replay: { profile: "tiny.csv", iterations: 200 } }],
    });
    const result = await rigel("launch", path, "--json");
    const report = reportOf(result);
    expect(report.device).toMatchObject({ name: gpu?.name, uuid: gpu?.uuid, simulated: false });
    expect(report.clients).toMatchObject([{ attached: true, exit_code: 0, requests: { count: 200 } }]);
    expect(report.clients[0]?.requests.p50_ms).toBeGreaterThan(0.1);
    expect(result.status).toBe(0);
  });

  test("a replay of two profiles has requests of each", async () => {
    using scratch = new Scratch();
    const [kernel, wait] = TINY_PROFILE.trimEnd().split("\n").slice(2);
    scratch.file("one.csv", TINY_PROFILE);
    scratch.file("three.csv", TINY_PROFILE.replace(`${kernel}\n${wait}`, [kernel, kernel, kernel, wait].join("\n")));
    const launches = async (...profile: string[]): Promise<number> => {
      const path = scratch.file("config.json", {
        clients: [{ name: "serve", class: "high", replay: { profile, iterations: 400 } }],
      });
      const result = await rigel("launch", path, "--json");
      const [serve] = reportOf(result).clients;
      expect(serve, result.stderr).toMatchObject({ attached: true, exit_code: 0, requests: { count: 400 } });
      return serve?.launches ?? 0;
    };
    const one = await launches("one.csv");
    // By chance each request has one kernel or three: seven standard deviations off the mean. What a replay launches to begin with it always does.
    expect((await launches("one.csv", "three.csv")) - one).toBeWithin(260, 540);
  });

  const noMps = Bun.which("nvidia-cuda-mps-control") === null;
  if (gpu && noMps) console.warn("gpu.test.ts: there is no nvidia-cuda-mps-control, so MPS is not tested");
  // A container may lack the program, and a machine may have a daemon that is not ours to start beside.
  test.skipIf(missing() || noMps)(
    "under an MPS daemon of its own, of which nothing is left",
    async () => {
      using scratch = new Scratch();
      scratch.file("tiny.csv", TINY_PROFILE);
      const replay = { profile: "tiny.csv" };
      const path = scratch.file("config.json", {
        sharing: "mps",
        duration_s: 2,
        clients: [
          { name: "serve", class: "high", replay: { ...replay, rate_per_s: 100 } },
          { name: "train", class: "best-effort", replay, sm_percent: 50 },
        ],
      });
      await using child = start(["launch", path, "--json"], {
        env: { CUDA_MPS_PIPE_DIRECTORY: join(scratch.path, "no-daemon") },
      });
      const [stdout, stderr, status] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
      const { sharing, clients, notes } = reportOf({ stdout, stderr, status });
      expect(sharing).toEqual({ mode: "mps", daemon: "private", pipe_directory: expect.any(String) });
      // Both are still running when counting ends, so this is what the daemon says of them.
      expect(clients, notes.join("\n")).toMatchObject([
        { name: "serve", attached: true, mps: true },
        { name: "train", attached: true, mps: true },
      ]);
      const pipe = sharing.pipe_directory ?? "";
      expect(existsSync(pipe)).toBe(false);
      expect(living().filter(({ pid }) => startedWith(pid, [`CUDA_MPS_PIPE_DIRECTORY=${pipe}`]))).toEqual([]);
      expect(status, stderr).toBe(0);
    },
    PROGRAM_LIMIT_ms,
  );

  test.skipIf(missing() || noMps)(
    "a client of isolation process stays out of MPS",
    async () => {
      using scratch = new Scratch();
      scratch.file("tiny.csv", TINY_PROFILE);
      const replay = { profile: "tiny.csv" };
      const path = scratch.file("config.json", {
        sharing: "mps",
        duration_s: 2,
        clients: [
          { name: "serve", class: "high", replay: { ...replay, rate_per_s: 100 } },
          { name: "apart", class: "best-effort", replay, isolation: "process" },
        ],
      });
      const result = await rigel("launch", path, "--json");
      expect(reportOf(result).clients, result.stderr).toMatchObject([
        { name: "serve", attached: true, mps: true },
        { name: "apart", attached: true, mps: false, exit_code: expect.any(Number) },
      ]);
      expect(result.status, result.stderr).toBe(0);
    },
    PROGRAM_LIMIT_ms,
  );

  test.skipIf(missing("torch", "torchvision", "transformers") || noMps).each([
    ["ResNet-50 training", TRAIN_RESNET],
    ["GPT-2 training from one CUDA graph, in pieces,", [...TRAIN_GPT2, "--graph"]],
  ])(
    "under MPS %s stops between kernels beside a busy high client, and gives the same bits",
    async (_name, args) => {
      using scratch = new Scratch();
      scratch.file("tiny.csv", TINY_PROFILE);
      const [without, with_] = [join(scratch.path, "bare"), join(scratch.path, "rigel")];
      const train = [...workload, ...args, "--losses"];
      // Requests go on for as long as the training, however slow the host is.
      const over = join(scratch.path, "over");
      const serve = '"$0" --profile "$1" --rate 100 & until [ -e "$2" ]; do sleep 0.2; done; kill $!; wait $!';
      const replay = [join(root, "native", "build", "rigel-replay"), join(scratch.path, "tiny.csv"), over];
      const mark = '"$@"; status=$?; touch "$0"; exit $status';
      const path = scratch.file("config.json", {
        sharing: "mps",
        policy: { name: "priority" },
        clients: [
          { name: "serve", class: "high", command: ["sh", "-c", serve, ...replay], cwd: root },
          { name: "train", class: "best-effort", command: ["sh", "-c", mark, over, ...train, with_], cwd: root },
        ],
      });
      await bare([...train, without]);
      const result = await rigel("launch", path, "--json");
      expect(result.status, result.stderr).toBe(0);
      const trained = reportOf(result).clients.find(({ name }) => name === "train");
      expect(trained).toMatchObject({ attached: true, exit_code: 0, mps: true, preemption: { state: "stops" } });
      expect(trained?.preemption.suspensions).toBeGreaterThan(10);
      if (args.includes("--graph"))
        expect(trained?.gate.graph_pieces, JSON.stringify(trained?.gate)).toBeGreaterThan(10);
      const expected = readFileSync(without, "utf8");
      expect(expected.trim().split("\n").length).toBeGreaterThanOrEqual(10);
      expect(readFileSync(with_, "utf8")).toBe(expected);
    },
    PROGRAM_LIMIT_ms,
  );

  test.skipIf(missing("cupy") || noMps)(
    "under MPS programs that are killed, or reset their device, while their streams are stopped do nothing to a high client",
    async () => {
      using scratch = new Scratch();
      // 20 ms of each 33: so often is a best-effort client stopped.
      scratch.file("busy.csv", TINY_PROFILE.replace("200000", "20000000"));
      const victims = ["kill-1", "kill-2", "kill-3", "reset-1", "reset-2", "reset-3"].map((name) => ({
        name,
        class: "best-effort",
        command: ["python3", join(root, "test", "gpu", "deep_queues.py"), name.slice(0, -2)],
      }));
      const path = scratch.file("config.json", {
        sharing: "mps",
        policy: { name: "priority" },
        clients: [
          { name: "serve", class: "high", replay: { profile: "busy.csv", rate_per_s: 30, iterations: 900 } },
          ...victims,
        ],
      });
      const result = await rigel("launch", path, "--json");
      const { clients } = reportOf(result);
      const told = result.stderr + JSON.stringify(clients.map(({ name, requests }) => [name, requests]));
      expect(clients, told).toMatchObject([
        { name: "serve", exit_code: 0, mps: true, requests: { count: 900 } },
        ...["kill", "kill", "kill"].map(() => ({ exit_code: 137, preemption: { state: "stops" } })),
        ...["reset", "reset", "reset"].map(() => ({ exit_code: 0 })),
      ]);
      console.warn(`gpu.test.ts: beside programs that were killed: ${JSON.stringify(clients[0]?.requests)}`);
    },
    PROGRAM_LIMIT_ms,
  );

  describe.skipIf(missing("torch", "torchvision", "transformers"))("PyTorch", () => {
    test.concurrent.each([
      ["ResNet-50 training", TRAIN_RESNET, "best-effort"],
      ["GPT-2 training", TRAIN_GPT2, "best-effort"],
      ["GPT-2 training as high", TRAIN_GPT2, "high"],
      ["a captured CUDA graph", ["--model", "resnet50", "--batch", "4", "--graph", ...SERVE], "high"],
      [
        "a captured CUDA graph as best-effort",
        ["--model", "resnet50", "--batch", "4", "--graph", ...SERVE],
        "best-effort",
      ],
      ["torch.compile", ["--model", "mobilenetv2", "--batch", "4", "--compile", ...SERVE], "high"],
    ] as const)(
      "%s gives the same bits",
      async (_name, args, clientClass) => {
        using scratch = new Scratch();
        const [without, with_] = [join(scratch.path, "bare"), join(scratch.path, "rigel")];
        await Promise.all([
          bare([...workload, ...args, "--losses", without]),
          governed(scratch, [...workload, ...args, "--losses", with_], clientClass),
        ]);
        const expected = readFileSync(without, "utf8");
        expect(expected.trim().split("\n").length).toBeGreaterThanOrEqual(10);
        expect(readFileSync(with_, "utf8")).toBe(expected);
      },
      PROGRAM_LIMIT_ms,
    );
  });

  test.skipIf(missing("torch", "torchvision"))(
    "requests from a CUDA graph that follow one another keep the GPU in time slices, and give the same bits",
    async () => {
      const { counted, stderr } = await servedBeside(1500, ["--warmup", "5"]);
      expect(counted?.stays, stderr).toBeGreaterThan(100);
      expect(counted?.ahead, stderr).toBeGreaterThan(10);
    },
    PROGRAM_LIMIT_ms,
  );

  test.skipIf(missing("torch", "torchvision"))(
    "requests that come over a connection are seen coming, in a program that says nothing of them, and give the same bits",
    async () => {
      const { counted, stderr } = await servedBeside(800, ["--prepare", "--served", "--rate", "100"]);
      expect(counted?.foreseen, stderr).toBeGreaterThan(80);
    },
    PROGRAM_LIMIT_ms,
  );

  // Not at the same time as others: what else is on the GPU would be in the durations by which graphs are cut.
  test.skipIf(missing("torch", "transformers"))(
    "GPT-2 training from one CUDA graph, held at the gate beside a busy high client, goes out in pieces and gives the same bits",
    async () => {
      using scratch = new Scratch();
      scratch.file("tiny.csv", TINY_PROFILE);
      const [without, with_] = [join(scratch.path, "bare"), join(scratch.path, "rigel")];
      const train = [...workload, ...TRAIN_GPT2, "--graph", "--losses"];
      const path = scratch.file("config.json", {
        policy: { name: "priority", preempt: false },
        clients: [
          { name: "serve", class: "high", replay: { profile: "tiny.csv", rate_per_s: 100, iterations: 9000 } },
          { name: "train", class: "best-effort", command: [...train, with_], cwd: root },
        ],
      });
      await bare([...train, without]);
      const result = await rigel("launch", path, "--json");
      expect(result.status, result.stderr).toBe(0);
      const trained = reportOf(result).clients.find(({ name }) => name === "train");
      expect(trained).toMatchObject({ attached: true, exit_code: 0 });
      expect(trained?.gate.graph_pieces, JSON.stringify(trained?.gate)).toBeGreaterThan(10);
      const expected = readFileSync(without, "utf8");
      expect(expected.trim().split("\n").length).toBeGreaterThanOrEqual(10);
      expect(readFileSync(with_, "utf8")).toBe(expected);
    },
    PROGRAM_LIMIT_ms,
  );

  test.skipIf(missing("torch"))(
    "a PyTorch program at its memory limit sees that limit as the size of the GPU, and is refused more",
    async () => {
      using scratch = new Scratch();
      const script = `
import torch
limit = torch.cuda.mem_get_info()[1]
blocks = []
try:
    while True:
        blocks.append(torch.empty(64 << 20, dtype=torch.uint8, device="cuda"))
except torch.cuda.OutOfMemoryError:
    print("limit", limit, "had", torch.cuda.memory_reserved(), "free", torch.cuda.mem_get_info()[0], flush=True)
# Others have the rest of the GPU, and a program that has given its memory back may have it again.
del blocks
torch.cuda.empty_cache()
print("again", torch.empty(1 << 30, dtype=torch.uint8, device="cuda").numel())
`;
      const path = scratch.file("config.json", {
        clients: [
          { name: "it", class: "best-effort", memory: "2GiB", command: ["python3", scratch.file("take.py", script)] },
        ],
      });
      const result = await rigel("launch", path, "--json");
      const [, limit, had, free] = (/limit (\d+) had (\d+) free (\d+)/.exec(result.stderr) ?? []).map(Number);
      expect({ limit, status: result.status }, result.stderr).toEqual({ limit: 2 ** 31, status: 0 });
      expect(had).toBeLessThanOrEqual(2 ** 31);
      expect(had).toBeGreaterThan(2 ** 31 - 2 ** 27);
      expect((had ?? 0) + (free ?? 0)).toBe(2 ** 31);
      expect(result.stderr).toContain("again 1073741824");
      const [client] = reportOf(result).clients;
      expect(client?.memory).toMatchObject({ limit_bytes: 2 ** 31 });
      expect(client?.memory.denied).toBeGreaterThan(0);
      expect(client?.memory.peak_bytes).toBeGreaterThanOrEqual(had ?? 0);
      expect(client?.memory.peak_bytes).toBeLessThanOrEqual(2 ** 31);
    },
    PROGRAM_LIMIT_ms,
  );

  test.concurrent.skipIf(missing("cupy"))(
    "a CuPy program gives the same bits",
    async () => {
      using scratch = new Scratch();
      const command = ["python3", join(root, "test", "gpu", "cupy_client.py")];
      const [without, with_] = await Promise.all([bare(command), governed(scratch, command, "high")]);
      expect(with_.trim()).toBe(without.trim());
      expect(without).toContain("sha256");
    },
    PROGRAM_LIMIT_ms,
  );

  test.concurrent.skipIf(missing("jax"))(
    "a JAX program gives the same bits",
    async () => {
      using scratch = new Scratch();
      const command = ["python3", join(root, "test", "gpu", "jax_client.py")];
      const [without, with_] = await Promise.all([bare(command), governed(scratch, command, "best-effort")]);
      expect(with_.trim()).toBe(without.trim());
      expect(without).toContain('"platform": "gpu"');
    },
    PROGRAM_LIMIT_ms,
  );
});
