/** simulate.test.ts: what `rigel simulate` predicts, worked out by hand where that can be done; its errors; its sweeps. */

import { describe, expect, test } from "bun:test";
import { chmodSync, readFileSync, readdirSync } from "node:fs";
import { join } from "node:path";
import { z } from "zod";
import { gpuOf } from "../src/calibrate.ts";
import { readConfig } from "../src/config.ts";
import { reason } from "../src/errors.ts";
import { Native } from "../src/native.ts";
import { predict } from "../src/simulate.ts";
import { Simulator } from "../src/simulate-run.ts";
import { predictionPage } from "../src/simulate-page.ts";
import { sweepOf } from "../src/simulate-sweep.ts";
import { Scratch, cramped, plainEnvironment, rigel, root, withoutPlaces } from "./rigel.ts";
import { until } from "./serving.ts";

const HEADER =
  "name,kind,stream,grid_x,grid_y,grid_z,block_x,block_y,block_z,registers,shared_bytes,bytes,duration_ns,gap_ns\n";
/** A request: one kernel that fills the GPU for 200 us, then a wait for it. */
const SERVE = `# rigel-profile 1; device=NVIDIA H200\n${HEADER}k,kernel,0,132,1,1,1024,1,1,64,0,0,200000,1000\nwait,sync,0,0,0,0,0,0,0,0,0,0,0,1000\n`;
/** A step that runs ahead: one kernel of 1 ms that fills the GPU. */
const TRAIN = `# rigel-profile 1; device=NVIDIA H200\n${HEADER}k,kernel,0,132,1,1,1024,1,1,64,0,0,1000000,1000\n`;

const clientSchema = z.object({
  name: z.string(),
  requests: z.number(),
  p50_ms: z.number().nullable(),
  p99_ms: z.number().nullable(),
  per_s: z.number(),
  p95_over_alone: z.number().nullable(),
  p99_over_alone: z.number().nullable(),
  share: z.number().nullable(),
  suspensions: z.number(),
});
const predictionSchema = z.object({
  schema: z.literal(1),
  simulated: z.literal(true),
  notes: z.array(z.string()),
  points: z.array(
    z.object({
      value: z.number().nullable(),
      ceiling: z.number(),
      alone: z.array(clientSchema),
      ways: z.array(
        z.object({
          way: z.string(),
          mps: z.boolean(),
          preemption: z.boolean(),
          share: z.number().nullable(),
          harvest: z.number().nullable(),
          clients: z.array(clientSchema),
          slo: z.object({ unreachable: z.boolean(), held_s: z.number() }).optional(),
        }),
      ),
    }),
  ),
});

interface Job {
  clients?: object[];
  policy?: object;
}

/** A folder with the two profiles and a configuration of a server at 100 requests/s, evenly, beside training. */
function jobs(scratch: Scratch, { clients, ...more }: Job = {}): string {
  scratch.file("serve.csv", SERVE);
  scratch.file("train.csv", TRAIN);
  const pair = [
    { name: "serve", class: "high", replay: { profile: "serve.csv", rate_per_s: 100, arrivals: "uniform" } },
    { name: "train", class: "best-effort", replay: { profile: "train.csv" } },
  ];
  return scratch.file("jobs.json", { duration_s: 2, clients: clients ?? pair, ...more });
}

async function predicted(...args: string[]) {
  const { stdout, stderr, status } = await rigel("simulate", ...args, "--json");
  expect(status, stderr).toBe(0);
  return predictionSchema.parse(JSON.parse(stdout));
}

/** Busy periods of that work. */
function work(worked_ms: number, n: number) {
  return Array.from({ length: n }, (_, i) => ({ client: 0, began_ms: 1000 + 10 * i, worked_ms, waited_ms: 0.2 }));
}

describe.concurrent("rigel simulate", () => {
  test("a schedule worked out by hand: alone, and in time slices", async () => {
    using scratch = new Scratch();
    const { points } = await predicted(jobs(scratch), "--policy", "time-slicing", "mps");
    const [point] = points;
    // 1 us of the host, 2 us to the GPU, 200 us; the 200th would fall due at the end.
    expect(point?.alone[0]).toMatchObject({ requests: 199, p50_ms: 0.203, p99_ms: 0.203 });
    // Of a GPU that is busy for 199 x 200 us in 2 s.
    expect(point?.ceiling).toBeCloseTo(1 - (199 * 200) / 2_000_000, 6);
    // Kernels of 1 ms and 0.6 us between them.
    expect(point?.alone[1]?.per_s).toBeCloseTo(999, 0);
    const [sliced, mps] = point?.ways ?? [];
    // A slice of 2065 us begins at every multiple while nobody else wants the GPU; a switch takes 209 us (profiles/device-h200.json).
    expect(sliced?.clients[0]?.p50_ms).toBeGreaterThan(0.203 + 0.209);
    expect(sliced?.clients[0]?.p99_ms).toBeLessThanOrEqual(0.203 + 0.21 + 2.065);
    // Under MPS it waits for no more than the kernel that runs, and has the GPU next.
    expect(mps?.clients[0]?.p99_ms).toBeLessThanOrEqual(0.203 + 1);
    expect(mps?.mps).toBe(true);
    for (const way of [sliced, mps]) {
      expect(way?.share).toBeLessThanOrEqual(1);
      expect(way?.harvest).toBeCloseTo((way?.share ?? 0) / (point?.ceiling ?? 1), 9);
    }
  });

  test("the least rate that a configuration may have", async () => {
    using scratch = new Scratch();
    const clients = [
      { name: "serve", class: "high", replay: { profile: "serve.csv", rate_per_s: 1e-6 } },
      { name: "train", class: "best-effort", replay: { profile: "train.csv" } },
    ];
    const { points } = await predicted(jobs(scratch, { clients }), "--policy", "mps");
    expect(points[0]?.alone[0]).toMatchObject({ requests: 0, p50_ms: null });
    expect(points[0]?.ways[0]?.share).toBe(1);
  });

  test("each client has arrivals of its own, by the last seed, too", async () => {
    using scratch = new Scratch();
    const clients = ["a", "b", "c"].map((name) => ({
      name,
      class: "high",
      replay: { profile: "serve.csv", rate_per_s: 100 },
    }));
    const last = String(Number.MAX_SAFE_INTEGER);
    for (const seed of [[], ["--seed", last]]) {
      const { points } = await predicted(jobs(scratch, { clients }), "--policy", "mps", ...seed);
      expect(new Set(points[0]?.alone.map(({ requests, p99_ms }) => `${requests} ${p99_ms}`)).size).toBe(3);
    }
  });

  test("what is asked for and not simulated is said", async () => {
    using scratch = new Scratch();
    const { notes } = await predicted(jobs(scratch, { policy: { name: "priority", stay_us: 100, arrivals: false } }));
    expect(notes).toContain("policy.stay_us is not simulated");
    expect(notes).toContain("policy.arrivals is not simulated");
    expect((await predicted(jobs(scratch))).notes.join()).not.toContain("not simulated");
  });

  test("of who is through before the time is over no share is told", async () => {
    using scratch = new Scratch();
    const serve = { name: "serve", class: "high", replay: { profile: "serve.csv", rate_per_s: 100 } };
    const run = async (iterations: number) => {
      const train = { name: "train", class: "best-effort", replay: { profile: "train.csv", iterations } };
      const { points, notes } = await predicted(jobs(scratch, { clients: [serve, train] }), "--policy", "priority");
      return { point: points[0], notes };
    };
    const { point, notes } = await run(500);
    // All of them count, also those that were launched and not over as the last was.
    expect(point?.alone[1]?.per_s).toBeCloseTo(250, 6);
    expect(point?.ways[0]).toMatchObject({ share: null, harvest: null });
    expect(notes.join()).toContain("train: ran out of iterations within 2 s");
    expect((await run(1_000_000)).point?.ways[0]?.share).toBeLessThanOrEqual(1);
  });

  test("requests of two kinds, each by chance, the same in every run; a list of one is one", async () => {
    using scratch = new Scratch();
    scratch.file("long.csv", SERVE.replace(",200000,", ",400000,"));
    const served = (profile: string | string[]) =>
      jobs(scratch, {
        clients: [{ name: "serve", class: "high", replay: { profile, rate_per_s: 100, arrivals: "uniform" } }],
      });
    const both = served(["long.csv", "serve.csv"]);
    // By splitmix64 94 of the 199 are of the first kind with seed 1, and 102 with seed 7.
    for (const [seed, p50_ms] of [
      ["1", 0.203],
      ["7", 0.403],
    ] as const) {
      const { points } = await predicted(both, "--policy", "time-slicing", "--seed", seed);
      expect(points[0]?.alone[0]).toMatchObject({ requests: 199, p50_ms, p99_ms: 0.403 });
      // By the mean of both.
      expect(points[0]?.ceiling).toBeCloseTo(1 - (199 * 300) / 2_000_000, 6);
    }
    const one = await rigel("simulate", served("serve.csv"), "--json");
    const list = await rigel("simulate", served(["serve.csv"]), "--json");
    expect({ ...list, stderr: "" }).toEqual({ ...one, stderr: "" });
  });

  test("preemption: suspended while a request is there, and what the switches cost without", async () => {
    using scratch = new Scratch();
    const { points } = await predicted(jobs(scratch), "--policy", "priority", "priority-gate");
    const [preempted, gated] = points[0]?.ways ?? [];
    expect([preempted?.preemption, gated?.preemption]).toEqual([true, false]);
    // A slice of 50 us and a switch, however long the kernels beside it are.
    expect(preempted?.clients[0]?.p99_ms).toBeLessThanOrEqual(0.203 + 0.05 + 0.21);
    expect(gated?.clients[0]?.p99_ms).toBeGreaterThan(preempted?.clients[0]?.p99_ms ?? 0);
  });

  test("where streams stop best-effort work has its least share beside a high client that never rests, roughly", async () => {
    using scratch = new Scratch();
    const path = scratch.file("jobs.json", {
      simulated: { preset: "h200" },
      clients: [
        { name: "high", class: "high", replay: { profile: join(root, "profiles", "h200-resnet50-train-bs64.csv") } },
        {
          name: "train",
          class: "best-effort",
          replay: { profile: join(root, "profiles", "h200-bert-train-bs8x128.csv") },
        },
      ],
    });
    const { points } = await predicted(
      path,
      "--policy",
      "priority+mps",
      "--duration",
      "10",
      "--sweep",
      "min_share=0.05,0.3",
    );
    const [small, large] = points.map(({ ways }) => ways[0]?.share ?? 0);
    expect(small).toBeWithin(0.03, 0.08);
    expect(large).toBeWithin(0.2, 0.4);
  });

  test("stops, under MPS: what is in flight at the gate is not in front of a request, unless stop_us is 0", async () => {
    using scratch = new Scratch();
    const args = ["--policy", "priority+mps", "slo+mps", "--sweep", "stop_us=0,100,2000000"];
    const { stderr, status } = await rigel("simulate", jobs(scratch), ...args);
    expect(stderr).toContain("--sweep stop_us=2000000: stop_us: ");
    expect(status).toBe(2);
    const { points } = await predicted(jobs(scratch), ...args.slice(0, -1), "stop_us=0,100,5000");
    const [gated, stopped, rarely] = points.map(({ ways }) => ways[0]);
    expect(points.map(({ ways }) => ways.map(({ preemption }) => preemption))).toEqual([
      [false, false],
      [true, true],
      [true, true],
    ]);
    expect([gated, stopped, rarely].map((way) => (way?.clients[1]?.suspensions ?? 0) > 0)).toEqual([false, true, true]);
    // A stop in front of each kernel of 1 ms: a request waits for no more than the one that runs.
    expect(stopped?.clients[0]?.p99_ms).toBeLessThanOrEqual(0.203 + 1);
    expect(stopped?.share).toBeGreaterThan(0.9);
  });

  test("on a slow host programs take longer between launches, for some of the time, and the GPU as long as ever", async () => {
    using scratch = new Scratch();
    const latencies = async (...args: string[]) => {
      const { points } = await predicted(jobs(scratch), "--policy", "mps", "--duration", "40", ...args);
      return points.map(({ alone: [serve] }) => [serve?.p50_ms, serve?.p99_ms, serve?.requests]);
    };
    // 1 us of the host is 10 of a slow one, for half of 40 s more or less.
    const [one, ...others] = await latencies("--slow", "10", "--sweep", "seed=1:4:1");
    expect(one?.[2]).toBe(3999);
    const p50 = new Set([one, ...others].map((point) => point?.[0]));
    expect(p50).toEqual(new Set([0.203, 0.212]));
    expect(new Set(others.map((point) => point[1]))).toEqual(new Set([0.212]));
    expect(await latencies("--slow", "1")).toEqual([[0.203, 0.203, 3999]]);
  });

  test("a host is as fast as the one on which requests alone were measured, for high clients", async () => {
    using scratch = new Scratch();
    // A short wait is no request.
    const pair = "resnet50+resnet50-train";
    const short = { client: 0, began_ms: 5, worked_ms: 0.001, waited_ms: 0 };
    const measured = {
      schema: 2,
      simulated: false,
      measurements: [
        { pair, way: "alone", waits: [short, ...work(0.5, 80)] },
        { pair, way: "rigel slo", waits: work(9, 80) },
        { pair, way: "alone" },
        { pair: "resnet50+bert-train", way: "alone", waits: work(1, 20) },
      ],
    };
    const gaps =
      "k,kernel,0,1,1,1,32,1,1,16,0,0,2000,1000\nk,kernel,0,1,1,1,32,1,1,16,0,0,2000,100000\nsync,sync,0,0,0,0,0,0,0,0,0,0,0,0";
    scratch.file("work.csv", `${SERVE.split("\n").slice(0, 2).join("\n")}\n${gaps}\n`);
    const clients = [
      { name: "serve", class: "high", replay: { profile: "work.csv", rate_per_s: 100, arrivals: "uniform" } },
      { name: "train", class: "best-effort", replay: { profile: "work.csv" } },
    ];
    const file = jobs(scratch, { clients });
    const alone = async (...args: string[]) => (await predicted(file, "--policy", "mps", ...args)).points[0]?.alone;
    const own = await alone();
    const [serve, train] = (await alone("--host", scratch.file("bench.json", measured))) ?? [];
    // Of a work of 0.105 ms 0.1 is a gap; of 0.5 and 1 ms the rest.
    expect(own?.[0]?.p50_ms).toBeCloseTo(0.109, 2);
    expect(serve?.p50_ms).toBeCloseTo(0.5, 1);
    expect(serve?.p99_ms).toBeCloseTo(1, 1);
    expect(train?.per_s).toBe(own?.[1]?.per_s ?? 0);
    const { stdout } = await rigel("simulate", file, "--policy", "mps", "--host", join(scratch.path, "bench.json"));
    expect(stdout).toContain("host is as fast as in bench.json: 100 requests, which take their program 0.500 ms (p50)");
  });

  test.each([
    [{ simulated: true, measurements: [] }, "expected measurements of a GPU"],
    [{ simulated: false, measurements: [] }, "measurements: expected 100 requests alone or more"],
    [{ simulated: false }, "measurements: "],
    [
      {
        simulated: false,
        measurements: ["resnet50+resnet50-train", "bert+gpt2-train"].map((pair) => ({ pair, way: "alone", waits: [] })),
      },
      "measurements: expected one high program, whose requests are compared, got resnet50 and bert",
    ],
  ])("--host %j is refused", async (measured, expected) => {
    using scratch = new Scratch();
    const host = scratch.file("bench.json", { schema: 2, ...measured });
    const { stderr, status } = await rigel("simulate", jobs(scratch), "--host", host);
    expect(withoutPlaces(stderr)).toContain(`${host}: ${expected}`);
    expect(status).toBe(2);
  });

  test("a field of what --host, --reference and --import-bench read is told by line and column", async () => {
    using scratch = new Scratch();
    const told = async (...args: string[]): Promise<string[]> => {
      const { stderr, status } = await rigel("simulate", ...args);
      expect(status, stderr).toBe(2);
      return stderr.trimEnd().replaceAll(`${scratch.path}/`, "").split("\n");
    };
    const host = scratch.file(
      "host.json",
      '{ "schema": 2, "simulated": false,\n "measurements": [{ "pair": 1,\n  "way": "" }] }',
    );
    expect(await told(jobs(scratch), "--host", host)).toEqual([
      "rigel: host.json:2:21: measurements[0].pair: expected text, got 1",
    ]);
    const none = scratch.file("none.json", '{ "schema": 2, "simulated": false,\n "measurements": [] }');
    expect(await told(jobs(scratch), "--host", none)).toEqual([
      expect.stringContaining("rigel: none.json:2:2: measurements: expected 100 requests alone or more"),
    ]);
    const clients = [
      { program: "resnet50", class: "high", profile: "gone.csv" },
      { program: "resnet50-train", class: "best-effort", profile: null },
    ];
    const ratios = { p50_over_alone: null, p99_over_alone: 1.5, share: 0.9, source: "" };
    const row = { pair: "a+b", clients, way: "MPS", policy: null, mps: true, ...ratios };
    const reference = { schema: 1, device: "H200", preset: "h200", rate_per_s: 60, rows: [row] };
    const gone = scratch.file("gone.json", JSON.stringify(reference, null, 1));
    expect(await told("--reference", gone)).toEqual([
      "rigel: gone.json:13:6: rows[0].clients[0].profile: expected a kernel profile that exists, got gone.csv",
    ]);
    const rate = scratch.file("rate.json", JSON.stringify({ ...reference, rate_per_s: 0 }, null, 1));
    expect(await told("--reference", rate)).toEqual([
      "rigel: rate.json:5:2: rate_per_s: expected a number above 0, got 0",
    ]);
    const unknown = { ...row, clients: clients.map((client) => ({ ...client, profile: null })) };
    const text = JSON.stringify({ ...reference, rows: [unknown] }, null, 1);
    const incomparable = scratch.file("unknown.json", text);
    expect(await told("--reference", incomparable, "--keep")).toEqual([
      expect.stringMatching(/^rigel: unknown\.json:6:2: rows: expected one or more whose programs all have a profile/),
    ]);
    expect(readFileSync(incomparable, "utf8")).toBe(text);
    const uniform = { ...bench(false), options: { rate_per_s: 80, arrivals: "uniform" } };
    const evenly = scratch.file("uniform.json", JSON.stringify(uniform, null, 1));
    expect(await told("--import-bench", evenly)).toEqual([
      "rigel: uniform.json:10:3: options.arrivals: expected poisson, got uniform",
    ]);
    const unnamed = scratch.file("unnamed.json", JSON.stringify({ ...uniform, device: {} }, null, 1));
    expect(await told("--import-bench", unnamed)).toEqual([
      "rigel: unnamed.json:5:2: device.name: expected text, but it is missing",
    ]);
  });

  test("the same seed gives the same bytes, another seed other numbers", async () => {
    using scratch = new Scratch();
    const clients = [
      { name: "serve", class: "high", replay: { profile: "serve.csv", rate_per_s: 300 } },
      { name: "train", class: "best-effort", replay: { profile: "train.csv" } },
    ];
    const file = jobs(scratch, { clients });
    const run = async (seed: string) =>
      (await rigel("simulate", file, "--policy", "slo", "mps", "fair", "--seed", seed, "--json")).stdout;
    const [one, again, other] = await Promise.all([run("7"), run("7"), run("8")]);
    expect(one).toStartWith("{");
    expect(again).toBe(one ?? "");
    expect(other).not.toBe(one ?? "");
  });

  test("more requests: never a shorter p99 alone, a higher ceiling or share; shares never exceed the GPU", async () => {
    using scratch = new Scratch();
    const clients = [
      { name: "serve", class: "high", replay: { profile: "serve.csv", rate_per_s: 100 } },
      { name: "train", class: "best-effort", replay: { profile: "train.csv" } },
    ];
    const { points } = await predicted(
      jobs(scratch, { clients }),
      ..."--policy time-slicing priority --sweep rate=400:4400:400 --duration 1".split(" "),
    );
    expect(points.map(({ value }) => value)).toEqual([400, 800, 1200, 1600, 2000, 2400, 2800, 3200, 3600, 4000, 4400]);
    for (const way of [0, 1])
      for (const [index, point] of points.entries()) {
        const before = points[index - 1];
        const [own, last] = [point.ways[way], before?.ways[way]];
        // What both had of the GPU; a request has it for 200 us.
        expect((own?.share ?? 0) + (own?.clients[0]?.per_s ?? 0) * 200e-6).toBeLessThanOrEqual(1.001);
        if (!before) continue;
        expect(point.ceiling).toBeLessThan(before.ceiling);
        // The same arrivals, closer together.
        expect(point.alone[0]?.p99_ms ?? 0).toBeGreaterThanOrEqual(before.alone[0]?.p99_ms ?? 0);
        expect(own?.share ?? 0).toBeLessThanOrEqual((last?.share ?? 0) + 0.01);
      }
  });

  test("nobody of class high: fair shares follow the weights, and nothing is compared with a ceiling below 1", async () => {
    using scratch = new Scratch();
    const replay = { profile: "train.csv" };
    const clients = [
      { name: "three", class: "best-effort", weight: 3, replay },
      { name: "one", class: "best-effort", weight: 1, replay },
    ];
    const { points } = await predicted(jobs(scratch, { clients, policy: { name: "fair" } }), "--policy", "fair");
    const [point] = points;
    expect(point?.ceiling).toBe(1);
    const [three, one] = point?.ways[0]?.clients ?? [];
    expect((three?.share ?? 0) / (one?.share ?? 1)).toBeCloseTo(3, 0);
    expect(point?.ways[0]?.share ?? 0).toBeLessThanOrEqual(1.001);
    expect(point?.ways[0]?.share ?? 0).toBeGreaterThan(0.8);
  });

  test("slo says of a target that cannot be reached that it is not", async () => {
    using scratch = new Scratch();
    const clients = [
      { name: "serve", class: "high", replay: { profile: "serve.csv", rate_per_s: 100 } },
      { name: "train", class: "best-effort", replay: { profile: "train.csv" } },
    ];
    const file = jobs(scratch, { clients, policy: { name: "slo", target: { p99_ms: 0.1 } } });
    const { points } = await predicted(file, "--policy", "slo", "--duration", "24");
    expect(points[0]?.ways[0]?.slo?.unreachable).toBe(true);
    const { stdout } = await rigel("simulate", file, "--policy", "slo", "--duration", "24");
    expect(stdout).toContain("target p99 0.1 ms");
    // As they stand in a policy.
    expect(stdout).toMatch(/at the end suspend (true|false), defer_us \d+, defer_part [\d.]+, need_us/);
    expect(stdout).toMatch(/not reached even by the strictest settings, where p99 is \d+\.\d\d ms/);
  });

  test("slo says where it has moved no settings", async () => {
    const { stdout } = await rigel("simulate", "--duration", "1");
    const ends = [...stdout.matchAll(/^rigel slo.*: target p99 .*, at the end (.*), 0 changes; (.*)$/gm)];
    const end = ["the settings as they were", "too few requests to tell"];
    expect(ends.map(([, ...told]) => told)).toEqual([end, end]);
  });

  test("slo gives way late to requests that follow each other, beside which best-effort work is starved", async () => {
    using scratch = new Scratch();
    const profile = join(root, "profiles", "h200-resnet50-");
    const path = scratch.file("jobs.json", {
      clients: [
        { name: "serve", class: "high", replay: { profile: `${profile}infer-bs4.csv` } },
        { name: "train", class: "best-effort", replay: { profile: `${profile}train-bs64.csv` } },
      ],
    });
    // Where best-effort work gives way at once, or by little later, the harvest is 0.17 and p95 1.7 of alone.
    const { points } = await predicted(path, "--policy", "slo+slices", "--duration", "30", "--slow", "2");
    const [way] = points[0]?.ways ?? [];
    expect(way?.harvest).toBeGreaterThan(0.28);
    expect(way?.clients[0]?.p95_over_alone).toBeLessThan(1.1);
  });

  test("a command is replayed by its profile, at its rate", async () => {
    using scratch = new Scratch();
    const command = ["no-such-program"];
    const clients = [
      { name: "serve", class: "high", command, profile: "serve.csv", rate_per_s: 100 },
      { name: "train", class: "best-effort", command, profile: "train.csv" },
    ];
    const { points } = await predicted(jobs(scratch, { clients }), "--policy", "time-slicing");
    expect(points[0]?.alone[0]).toMatchObject({ p50_ms: 0.203 });
    expect(points[0]?.alone[1]?.share).toBeNull();
  });

  test("a sweep: a table, a plot in letters, and a page that loads nothing", async () => {
    using scratch = new Scratch();
    const html = join(scratch.path, "page.html");
    const file = jobs(scratch);
    const args = ["--policy", "priority+mps", "time-slicing", "--sweep", "stop_us=100:1000:100", "--duration", "0.5"];
    const { stdout, stderr, status } = await rigel("simulate", file, ...args, "--html", html);
    expect(stdout).toMatch(/^stop_us +way +client/m);
    for (let stop_us = 100; stop_us <= 1000; stop_us += 100)
      expect(stdout).toMatch(new RegExp(`^${stop_us} +rigel priority, MPS +serve`, "m"));
    expect(stdout).toContain("a rigel priority, MPS   b time slicing");
    // Time slices do not depend on it: simulated once.
    expect(stderr).toMatch(/13 scenarios in/);
    const page = readFileSync(html, "utf8");
    expect(page.match(/<polyline/g)).toHaveLength(4);
    expect(page).not.toMatch(/https?:|<script/);
    expect(status).toBe(0);
  });

  test("a row of a sweep is of one high client: the one whose p99 is the worst over alone", async () => {
    using scratch = new Scratch();
    // Of what is long by itself little is waiting.
    scratch.file("long.csv", SERVE.replace(",200000,", ",9000000,"));
    const clients = [
      { name: "long", class: "high", replay: { profile: "long.csv", rate_per_s: 50 } },
      { name: "short", class: "high", replay: { profile: "serve.csv", rate_per_s: 50 } },
      { name: "train", class: "best-effort", replay: { profile: "train.csv" } },
    ];
    const file = jobs(scratch, { clients });
    const args = ["--policy", "time-slicing", "--sweep", "seed=1,2"];
    const { points } = await predicted(file, ...args);
    const { stdout } = await rigel("simulate", file, ...args);
    expect(points).toHaveLength(2);
    for (const { value, ways } of points) {
      const worst = ways[0]?.clients.find(({ name }) => name === "short");
      const ratios = ways[0]?.clients.map((client) => client.p99_over_alone ?? 0) ?? [];
      expect(worst?.p99_over_alone).toBe(Math.max(...ratios));
      const row = stdout.split("\n").find((line) => line.startsWith(`${value} `));
      const [, , , client, p50_ms, p99_ms, over_alone] = row?.split(/ +/) ?? [];
      expect(client).toBe("short");
      expect(Number(p50_ms)).toBeCloseTo(worst?.p50_ms ?? 0, 0);
      expect(Number(p99_ms)).toBeCloseTo(worst?.p99_ms ?? 0, 0);
      expect(Number(over_alone)).toBeCloseTo(worst?.p99_over_alone ?? 0, 0);
    }
  });

  test("a page that cannot be written whole leaves the one before, and is the machine's fault", async () => {
    using scratch = new Scratch();
    const page = scratch.file("page.html", "before");
    const args = ["simulate", jobs(scratch), "--policy", "priority", "--duration", "1", "--html", page];
    const files = readdirSync(scratch.path);
    const broken = await cramped(...args);
    expect(broken.stderr).toContain(`--html: ${page}: cannot be written (EFBIG`);
    expect(broken.status).toBe(1);
    expect(readFileSync(page, "utf8")).toBe("before");
    expect(readdirSync(scratch.path)).toEqual(files);
    expect((await rigel(...args)).status).toBe(0);
    expect(readFileSync(page, "utf8")).toContain("</html>");
  });

  test("what is wrong is named by file and field, all at once", async () => {
    using scratch = new Scratch();
    scratch.file("bad.csv", `${SERVE}x,kernel,0,0,1,1,1,1,1,1,0,0,5,5\n`);
    const clients = [
      { name: "serve", class: "high", command: ["python"] },
      { name: "train", class: "best-effort", replay: { profile: "bad.csv" } },
      { name: "gone", class: "best-effort", command: ["python"], profile: "gone.csv" },
      { name: "some", class: "best-effort", command: ["python"], profile: ["train.csv", "gone.csv"] },
    ];
    const file = jobs(scratch, { clients });
    const { stderr: told, stdout, status } = await rigel("simulate", file);
    const stderr = withoutPlaces(told);
    expect(stderr).toContain(`${file}: clients[0].profile: expected a kernel profile of this command`);
    expect(stderr).toContain("rigel import");
    expect(stderr).toContain(
      `${file}: clients[1].replay.profile: ${join(scratch.path, "bad.csv")}:5: grid_x: expected`,
    );
    expect(stderr).toContain(`${file}: clients[2].profile: ${join(scratch.path, "gone.csv")}`);
    expect(stderr).toContain(`${file}: clients[3].profile[1]: ${join(scratch.path, "gone.csv")}`);
    expect(stdout).toBe("");
    expect(status).toBe(2);
  });

  test.each([
    [["-o", "/dev/null"], "-o: expected --import-bench with it"],
    [["--keep"], "--keep: expected --reference with it"],
    [["--slow", "0.5"], "Expected a number from 1 to 10."],
    [["--slow", "2", "--host", "bench.json"], "expected --slow or --host"],
    [["--host", "/nowhere.json"], "/nowhere.json"],
    [["--slow", "2", "--reference"], "--slow: expected a configuration or the demo with it"],
    [["--reference"], "expected no configuration with --reference, got "],
    [["--import-bench", "bench.json"], "expected no configuration with --import-bench, got "],
    [["--import-bench", "bench.json", "--reference"], "expected --reference or --import-bench, got both"],
    [["--html", "/nowhere/page.html"], "--html: /nowhere/page.html: cannot be written"],
    [["--policy", "best"], "--policy: expected time-slicing, mps, none, priority, slo, fair or orion"],
    [["--policy", "fair-gate"], "--policy: expected"],
    [["--sweep", "seed=1,2", "--seed", "3"], "expected --seed or --sweep seed, got both"],
    [["--sweep", "duration=1,2", "--duration", "3"], "expected --duration or --sweep duration, got both"],
    [["--sweep", "rat=1:2:1"], "--sweep rat: expected one of rate, duration, seed, inflight"],
    [["--sweep", "rate=1:2"], "--sweep rate=1:2: expected FROM:TO:STEP"],
    [["--sweep", "inflight=0.5,1"], "--sweep inflight=0.5: inflight: expected a whole number"],
    [["--sweep", "train.rate=0,1"], "--sweep train.rate=0: expected a rate above 0"],
    [["--sweep", "rate=1e-300"], "--sweep rate=1e-300: expected a number of at least 0.000001"],
    [["--sweep", "serve.rate=1,2e6"], "--sweep serve.rate=2000000: expected a number of at most 1000000"],
    [["--sweep", "duration=1,1e30"], "--sweep duration=1e+30: expected a duration above 0, up to 2592000"],
    [["--sweep", "seed=1e300"], "--sweep seed=1e+300: expected a whole number from 0 to 9007199254740991"],
  ])("%p is refused", async (args, expected) => {
    using scratch = new Scratch();
    const { stderr, status } = await rigel("simulate", jobs(scratch), ...args);
    expect(stderr).toContain(expected);
    expect(status).toBe(2);
  });

  test("policies that need a high client say so", async () => {
    using scratch = new Scratch();
    const clients = [{ name: "train", class: "best-effort", replay: { profile: "train.csv" } }];
    const file = jobs(scratch, { clients });
    for (const policy of ["slo", "orion"]) {
      const { stderr, status } = await rigel("simulate", file, "--policy", policy);
      expect(withoutPlaces(stderr)).toContain(`${file}: clients: expected one`);
      expect(stderr).toContain(`under policy ${policy}`);
      expect(status).toBe(2);
    }
    const { stderr } = await rigel("simulate", file, "--sweep", "rate=1,2");
    expect(stderr).toContain("no client of class high has a rate");
    // Without naming a policy, only what fits is compared.
    const { points } = await predicted(file, "--duration", "0.1");
    expect(points[0]?.ways.map(({ way }) => way)).not.toContain("rigel slo");
  });
});

const referenceSchema = z.object({
  device: z.string(),
  rate_per_s: z.number(),
  rows: z.array(
    z.object({
      way: z.string(),
      mps: z.boolean(),
      policy: z.object({ name: z.string() }).nullable(),
      p99_over_alone: z.number(),
    }),
  ),
  median_error: z.object({ p99_over_alone: z.number(), share: z.number(), rows: z.number() }).optional(),
});

function spread(median: number) {
  return { median, min: median, max: median, rounds: 3 };
}

/** What `rigel bench --json` writes, as far as it is read. */
function bench(simulated: boolean, schema = 2) {
  const row = { pair: "resnet50+resnet50-train", method: "live", p50_ratio: spread(1.6), share: spread(0.9) };
  return {
    schema,
    simulated,
    started: "2026-01-02T03:04:05Z",
    device: { name: "NVIDIA H200" },
    options: { rate_per_s: 80, arrivals: "poisson" },
    policies: { priority: { name: "priority" } },
    rows: [
      { ...row, way: "alone", p99_ratio: null },
      { ...row, way: "time slicing", p99_ratio: spread(1.75) },
      { ...row, way: "rigel priority, MPS", p99_ratio: spread(1.25) },
      { ...row, way: "MPS, client priority", p99_ratio: spread(1.5) },
    ],
  };
}

test("requests that queue up are told: how late they are depends on the duration", async () => {
  using scratch = new Scratch();
  const args = ["--policy", "time-slicing", "--duration", "2", "--sweep", "rate=100,6000"];
  const { stderr, status } = await rigel("simulate", jobs(scratch), ...args);
  expect(
    stderr.match(/note: at \d+: requests queue up.*: .*/g)?.map((line) => line.replace(/ queue up.*:/, "")),
  ).toEqual(["note: at 6000: requests serve under time slicing"]);
  expect(status).toBe(0);
});

describe.concurrent("measurements to compare with", () => {
  test("the median errors that are kept are those that the model has now, within a tenth", async () => {
    const kept = referenceSchema.parse(await Bun.file(join(root, "profiles", "reference-h200.json")).json());
    const { stdout, stderr, status } = await rigel("simulate", "--reference", "--json");
    expect(status, stderr).toBe(0);
    const now = z.object({ median_error: z.unknown() }).parse(JSON.parse(stdout)).median_error;
    // Another model has other errors: rigel simulate --reference --keep.
    expect(kept.median_error).toEqual(referenceSchema.shape.median_error.parse(now));
    expect(kept.median_error?.p99_over_alone).toBeLessThanOrEqual(0.1);
    expect(kept.median_error?.share).toBeLessThanOrEqual(0.1);
    expect(kept.median_error?.rows).toBeGreaterThanOrEqual(25);
  });

  test.each([1, 2])("a benchmark of schema %d becomes such a file, and is compared with", async (schema) => {
    using scratch = new Scratch();
    const out = join(scratch.path, "reference.json");
    for (const name of ["h200-resnet50-infer-bs4.csv", "h200-resnet50-train-bs64.csv"])
      scratch.file(name, readFileSync(join(root, "profiles", name), "utf8"));
    const made = await rigel("simulate", "--import-bench", scratch.file("bench.json", bench(false, schema)), "-o", out);
    expect(made.stderr).toContain("MPS, client priority: left out");
    expect(made.status).toBe(0);
    const { rate_per_s, rows } = referenceSchema.parse(await Bun.file(out).json());
    expect(rate_per_s).toBe(80);
    expect(rows.map(({ way, mps, policy, p99_over_alone }) => [way, mps, policy?.name, p99_over_alone])).toEqual([
      ["time slicing", false, undefined, 1.75],
      ["rigel priority, MPS", true, "priority", 1.25],
    ]);
    const { stdout, status } = await rigel("simulate", "--reference", out, "--keep");
    expect(stdout).toMatch(/^resnet50\+resnet50-train +rigel priority, MPS +1\.25 +1\.\d\d +\d+%/m);
    expect(referenceSchema.parse(await Bun.file(out).json()).median_error?.rows).toBe(2);
    expect(status).toBe(0);
  });

  test("the median errors are of the GPU that the file names", async () => {
    using scratch = new Scratch();
    scratch.file("serve.csv", SERVE);
    scratch.file("train.csv", TRAIN);
    const clients = [
      { program: "serve", class: "high", profile: "serve.csv" },
      { program: "train", class: "best-effort", profile: "train.csv" },
    ];
    const ratios = { p50_over_alone: null, p99_over_alone: 1.5, share: 0.9, source: "" };
    const row = { pair: "serve+train", clients, way: "MPS", policy: null, mps: true, ...ratios };
    const reference = { schema: 1, device: "NVIDIA A100-SXM4-80GB", preset: "a100", rate_per_s: 60, rows: [row] };
    const { stdout } = await rigel("simulate", "--reference", scratch.file("reference.json", reference));
    expect(stdout).toContain("median error on 1 measurements of an A100: p99 over alone ");
  });

  test.each([
    ["NVIDIA H200 NVL", "h200"],
    ["NVIDIA A100-SXM4-80GB", "a100"],
    ["NVIDIA L4", "l4"],
    ["NVIDIA L40S", undefined],
    ["NVIDIA RTX A1000", undefined],
  ])("a benchmark of an %s", async (name, preset) => {
    using scratch = new Scratch();
    const file = scratch.file("bench.json", { ...bench(false), device: { name } });
    const { stdout, stderr, status } = await rigel("simulate", "--import-bench", file);
    if (preset === undefined)
      expect(withoutPlaces(stderr)).toContain(
        `${file}: device.name: expected an H200, A100 or L4, which can be simulated, got ${name}`,
      );
    else expect(JSON.parse(stdout)).toMatchObject({ device: name, preset });
    expect(status).toBe(preset === undefined ? 2 : 0);
  });

  test("a benchmark of the simulated GPU measures nothing", async () => {
    using scratch = new Scratch();
    const file = scratch.file("bench.json", bench(true));
    const { stderr, status } = await rigel("simulate", "--import-bench", file);
    expect(stderr).toContain(`${file}: expected measurements of a GPU`);
    expect(status).toBe(2);
  });
});

test("of a long scenario it is known how far it is", async () => {
  using scratch = new Scratch();
  const config = await readConfig(jobs(scratch));
  const options = { ways: ["slo"], sweep: undefined, seed: undefined, duration_s: 60, slow: undefined };
  const native = await Native.load();
  // Looked at now and then, for which a busy machine may give no time.
  await until(async () => {
    let simulator: Simulator | undefined;
    const seen = new Set<number>();
    const timer = setInterval(() => seen.add(simulator?.done ?? 0), 1);
    await predict(config, options, native, (one) => void (simulator = one));
    clearInterval(timer);
    const parts = [...seen];
    expect(parts.every((done, index) => done >= (parts[index - 1] ?? 0) - 1e-9)).toBe(true);
    expect(simulator?.done).toBe(simulator?.asked ?? 0);
    return parts.filter((done) => !Number.isInteger(done)).length > 3 || undefined;
  });
});

test("a way that leaves best-effort clients nothing at some value has its dot there", () => {
  const points = [0.5, 0, 0.25].map((share, value) => {
    const way = { way: "rigel x", policy: "x", mps: false, preemption: true, clients: [], share, harvest: null };
    return { value, duration_s: 1, ceiling: 1, alone: [], ways: [way] };
  });
  const common = { schema: 1, simulated: true, preset: "h200", calibration: null, slow: 1, host: null } as const;
  const page = predictionPage({ ...common, sweep: "rate", points, notes: [] }, "jobs.json", []);
  expect(page.match(/<circle/g)).toHaveLength(3);
});

test("a simulator that fails is an error of the prediction", async () => {
  using scratch = new Scratch();
  const config = await readConfig(jobs(scratch));
  const options = { ways: ["mps"], sweep: undefined, seed: undefined, duration_s: 1, slow: undefined };
  const simulate = scratch.file("failing", '#!/bin/sh\nwhile read line && [ "$line" != run ]; do :; done\nexit 1\n');
  chmodSync(simulate, 0o700);
  const failing = Native.open({ ...(await Native.load()).files, simulate });
  await expect(predict(config, options, failing, () => undefined)).rejects.toThrow(`${simulate} ended with 1`);
});

test("so is one that ends before it has read what it is to do", async () => {
  using scratch = new Scratch();
  const native = await Native.load();
  const ending = scratch.file("ending", "#!/bin/sh\necho out of memory >&2\nexit 1\n");
  chmodSync(ending, 0o700);
  const gpu = await gpuOf("h200", native.files.profiles);
  const settings = { iterations: undefined, weight: 1, reports: true, rate: undefined, arrivals: undefined };
  // More than a pipe holds.
  const profiles = Array.from({ length: 20_000 }, () => scratch.path);
  const clients = [{ name: "serve", class: "high", profiles, drawSeed: 1, ...settings } as const];
  using simulator = new Simulator(ending);
  const running = simulator.run({ gpu, mode: "alone", duration_s: 1, settings: {}, clients });
  await expect(running).rejects.toThrow("out of memory");
});

test("without a terminal there is a line of it now and then", async () => {
  const script = `import { ProgressBar } from "${root}/src/progress-bar.ts";
    const bar = new ProgressBar("scenarios", 4, () => 1.7, { line_ms: 5 });
    new ProgressBar("rows", 4, () => 1.7);
    await Bun.sleep(100);
    bar.stop();`;
  await using child = Bun.spawn([process.execPath, "-e", script], {
    env: { ...plainEnvironment(), BUN_BE_BUN: "1" },
    stderr: "pipe",
  });
  const lines = (await child.stderr.text()).trimEnd().split("\n");
  expect(new Set(lines)).toEqual(new Set(["rigel: scenarios: 42%"]));
});

describe("rigel-simulate", () => {
  const program = join(root, "native", "build", "rigel-simulate");

  test.each([
    ["", 'the description ends without "run"'],
    ["preset h300\n", 'preset: expected h200, a100 or l4, got "h300"'],
    ["inflight -1\n", "inflight: expected a whole number from 0 to 4294967295"],
    ["inflate 1\n", 'unknown key "inflate"'],
    ["client\nrun\n", "client 0 has no profile"],
    ["client\nrate poisson 5\n", "rate: expected a kind, a mean gap in ns and a seed"],
    ["client\nmoment 5\n", 'moment: expected two times in ns, got "5"'],
    ["client\nmoment 0 0\n", "moment: expected work, and each later than the one before"],
    ["client\nmoment 5 1\nmoment 5 1\n", "moment: expected work, and each later than the one before"],
    ["client\nmoment 0 -1\n", "moment: expected a whole number from 0 to 3600000000000"],
    ["run", "has no end"],
  ])("refuses %p", (text, expected) => {
    const { stderr, exitCode } = Bun.spawnSync([program], { stdin: Buffer.from(text) });
    expect(stderr.toString()).toContain(expected);
    expect(exitCode).toBe(2);
  });
});

describe("--sweep", () => {
  test.each([
    ["rate=20:200:20", [20, 40, 60, 80, 100, 120, 140, 160, 180, 200]],
    ["rate=10:0:-5", [10, 5, 0]],
    ["min_share=0:0.3:0.1", [0, 0.1, 0.2, 0.3]],
    ["inflight=1,2,4", [1, 2, 4]],
    ["a.rate=5:5:1", [5]],
    ["rate=1:2.5:1", [1, 2]],
    ["seed=9007199254740989:9007199254740991:2", [9007199254740989, 9007199254740991]],
  ])("%s", (text, values) => {
    expect(sweepOf(text).values).toEqual(values);
  });

  test.each([
    "rate",
    "rate=",
    "=1",
    "rate=1:2",
    "rate=1:2:3:4",
    "rate=a,b",
    "rate=1,,2",
    "rate=1:5:0",
    "rate=1:5:-1",
    "rate=0:1:1e-9",
  ])("%s is refused", (text) => {
    let said = "";
    try {
      sweepOf(text);
    } catch (thrown) {
      said = reason(thrown);
    }
    expect(said).toStartWith(`--sweep ${text}: expected `);
  });
});
