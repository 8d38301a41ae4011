/**
 * record.test.ts: `rigel profile -- command` on the simulated GPU: what a program asked of the GPU comes out as a profile that can
 * be shown, compared and replayed.
 *
 * How often and with what shape something is launched is exact. Times by events hold host delays, so on a busy machine they
 * are only bounded below.
 */

import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { existsSync, readFileSync, readdirSync } from "node:fs";
import { join } from "node:path";
import { z } from "zod";
import { SIGNAL_STATUS } from "../src/interrupt.ts";
import { Native, make } from "../src/native.ts";
import { openProfile } from "../src/profile.ts";
import { repetition, requestsBy, rhythmOf, settled } from "../src/record-rhythm.ts";
import { type GpuRecord, type Launch, type Moment, matched, rowsOf } from "../src/record-rows.ts";
import { type Kind, SOURCE } from "../src/recording.ts";
import { Scratch, TINY_PROFILE, reportOf, rigel, root, start } from "./rigel.ts";
import { until } from "./serving.ts";

const build = join(root, "native", "build");
const replay = join(build, "rigel-replay");
const program = join(build, "record-program");
const shipped = (name: string): string => join(root, "profiles", `${name}.csv`);

const summarySchema = z.object({
  schema: z.literal(1),
  mechanism: z.enum(["cupti", "events"]).nullable(),
  why: z.string().nullable(),
  requests_by: z.enum(["reports", "waits", "repetition"]).nullable(),
  requests: z.number(),
  alike: z.number(),
  operations: z.number(),
  kernels: z.number(),
  gpu_ms: z.number(),
  dropped: z.object({ launches: z.number(), requests: z.number(), seconds: z.number(), why: z.string() }),
  overhead: z.object({ without_ms: z.number(), with_ms: z.number(), ratio: z.number() }).nullable(),
  notes: z.array(z.string()),
});
const differenceSchema = z.object({
  a: z.object({ kernels: z.number(), time_ns: z.number() }),
  b: z.object({ kernels: z.number(), time_ns: z.number() }),
  launches_missing: z.number(),
  launches_new: z.number(),
});

let scratch: Scratch;
let native: Native;
beforeAll(async () => {
  native = await Native.load();
  for (const target of ["record-program", "cupti/libcupti.so.13"]) await make(join(root, "native"), `build/${target}`);
  scratch = new Scratch();
});
afterAll(() => scratch[Symbol.dispose]());

/** Records a command on the simulated GPU; the summary and where the profile is. `env`: of rigel. */
async function recordedIn(env: Record<string, string>, name: string, command: string[], ...flags: string[]) {
  const out = join(scratch.path, `${name}.csv`);
  const args = ["profile", "--json", "--device", "simulated", "-o", out, ...flags, "--", ...command];
  await using child = start(args, { env });
  const [stdout, stderr, status] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
  expect(status, stderr).toBe(0);
  return { out, summary: summarySchema.parse(JSON.parse(stdout)), stderr };
}

async function recorded(name: string, command: string[], ...flags: string[]) {
  return await recordedIn({}, name, command, ...flags);
}

async function difference(a: string, b: string, ...flags: string[]) {
  const { stdout, stderr } = await rigel("profile", "diff", "--json", ...flags, a, b);
  expect(stdout, stderr).toStartWith("{");
  return differenceSchema.parse(JSON.parse(stdout));
}

const layoutSchema = z.object({ header: z.object({ fields: z.object({ timed: z.object({ offset: z.int() }) }) }) });

/** Launches of which the only recording in a folder has the time. */
function timedIn(folder: string): bigint {
  const { offset } = layoutSchema.parse(JSON.parse(native.recordLayout)).header.fields.timed;
  const name = readdirSync(folder).find((file) => file.startsWith("rigel-record-")) ?? "";
  return readFileSync(join(folder, name)).readBigUInt64LE(offset);
}

async function rowsIn(path: string) {
  return await Array.fromAsync((await openProfile(path)).operations);
}

describe("rigel profile -- command, times by events", () => {
  test("the replay of a shipped profile gives that profile back, which replays again", async () => {
    const original = shipped("h200-bert-infer-bs2x128");
    const { out, summary } = await recorded("bert", [replay, "--profile", original]);
    expect(summary).toMatchObject({
      mechanism: "events",
      requests_by: "reports",
      requests: 20,
      kernels: 154,
    });
    // Of some ten thousand launches, where other programs have the processors some may find nothing left to be timed with.
    const untimed = /^\d+ launches (were not timed: |have the time of others of their kind$)/;
    expect(summary.notes.filter((note) => !untimed.test(note))).toEqual([]);
    expect(summary.why).toContain("RIGEL_CUPTI");
    expect(summary.dropped.requests).toBeGreaterThanOrEqual(10);
    expect(summary.overhead?.ratio).toBeGreaterThan(0);
    const diff = await difference(original, out);
    expect(diff).toMatchObject({ launches_missing: 0, launches_new: 0 });
    // No kernel is shorter than the simulated GPU was told.
    const rows = await rowsIn(out);
    const asked = await rowsIn(original);
    expect(rows.map(({ kind }) => kind)).toEqual(asked.map(({ kind }) => kind));
    for (const [index, row] of rows.entries())
      if (row.kind === "kernel") {
        expect(row.duration_ns).toBeGreaterThan((asked[index]?.duration_ns ?? 0) * 0.97 - 10);
        expect(row).toMatchObject({ name: asked[index]?.name, registers: asked[index]?.registers });
        expect(row.sms).toBeGreaterThan(0);
      }
    expect(readFileSync(out, "utf8")).toMatch(
      /^# rigel-profile 2; device=NVIDIA H200 \(simulated\); tool=rigel; times=timing events/,
    );

    const shown = await rigel("profile", "show", out);
    expect(shown.stdout).toContain("154 kernels");
    const config = scratch.file("again.json", {
      device: "simulated",
      clients: [{ name: "again", class: "high", replay: { profile: out, iterations: 5 } }],
    });
    const again = await rigel("launch", config, "--json");
    expect(reportOf(again).clients[0]).toMatchObject({ exit_code: 0, iterations: 5 });
  });

  test("a training loop that runs ahead: every iteration, with --all", async () => {
    const original = shipped("h200-gpt2-train-bs8x512");
    const flags = ["--requests", "3", "--all"];
    const { out, summary } = await recorded("gpt2", [replay, "--profile", original], ...flags);
    expect(summary.requests).toBe(3);
    const rows = await rowsIn(out);
    expect(new Set(rows.map(({ request }) => request))).toEqual(new Set([0, 1, 2]));
    const diff = await difference(original, out, "--per-request");
    expect(diff).toMatchObject({ launches_missing: 0, launches_new: 0 });
    expect(summary.kernels).toBe(3 * diff.a.kernels);
  });

  test("Ctrl-C writes what there is", async () => {
    const out = join(scratch.path, "interrupted.csv");
    const profile = scratch.file("tiny.csv", TINY_PROFILE);
    using folder = new Scratch();
    const args = [
      "profile",
      "--device",
      "simulated",
      "--requests",
      "900000",
      "--segment",
      folder.path,
      "-o",
      out,
      "--",
      replay,
      "--profile",
      profile,
    ];
    await using child = start(args);
    let said = "";
    const decoder = new TextDecoder();
    for await (const chunk of child.stderr) {
      const records = said.includes("recording 900000 requests");
      said += decoder.decode(chunk, { stream: true });
      if (records || !said.includes("recording 900000 requests")) continue;
      // Some requests have to be recorded by then.
      await until(() => (timedIn(folder.path) > 20n ? true : undefined));
      child.kill("SIGINT");
    }
    expect(await child.exited, said).toBe(130);
    const rows = await rowsIn(out);
    expect(rows).toMatchObject([{ kind: "kernel", grid: [132, 1, 1], block: [256, 1, 1] }, { kind: "sync" }]);
    expect(rows[0]?.duration_ns).toBeGreaterThan(190_000);
  });

  test("Ctrl-C before anything is recorded writes nothing, and is no fault of the program's", async () => {
    const out = join(scratch.path, "early.csv");
    const command = ["sh", "-c", "echo begun >&2; exec sleep 600"];
    await using child = start(["profile", "--device", "simulated", "-o", out, "--json", "--", ...command]);
    let said = "";
    const decoder = new TextDecoder();
    for await (const chunk of child.stderr) {
      const before = said;
      said += decoder.decode(chunk, { stream: true });
      if (said.includes("begun") && !before.includes("begun")) child.kill("SIGINT");
    }
    expect(await child.exited, said).toBe(130);
    expect(said).toContain("interrupted before a whole request was recorded; nothing is written");
    expect(said).not.toContain("let it run longer");
    expect(await child.stdout.text()).toBe("");
    expect(existsSync(out)).toBe(false);
  });

  test("a signal before the program is started leaves nothing behind", async () => {
    using folder = new Scratch();
    const args = ["profile", "--device", "simulated", "--segment", folder.path, "-o", join(folder.path, "p.csv")];
    for (const signal of ["SIGINT", "SIGTERM"] as const) {
      await using child = start([...args, "--", "sleep", "600"]);
      while (!readdirSync(folder.path).some((name) => name.startsWith("rigel-record-"))) {
        expect(child.exitCode).toBeNull();
        await new Promise(setImmediate);
      }
      child.kill(signal);
      expect(await child.exited).toBe(SIGNAL_STATUS[signal]);
      expect(readdirSync(folder.path)).toEqual([]);
    }
  });

  test("a file that cannot be written is told before the program is started", async () => {
    const marker = join(scratch.path, "started");
    for (const out of [join(scratch.path, "nowhere", "p.csv"), scratch.path]) {
      const refused = await rigel("profile", "--device", "simulated", "-o", out, "--", "touch", marker);
      expect(refused).toMatchObject({ status: 2, stdout: "" });
      expect(refused.stderr).toContain(`${out}: cannot be written`);
    }
    const dash = await rigel("profile", "--device", "simulated", "-o", "-", "--", "touch", marker);
    expect(dash).toMatchObject({ status: 2, stdout: "" });
    expect(dash.stderr).toContain("--output: expected a file, got - (./- is one of that name)");
    expect(existsSync(marker)).toBe(false);
  });

  test("a program that ends in its warm-up: what to do; --from-start records all of it", async () => {
    const profile = scratch.file("short.csv", TINY_PROFILE);
    const command = [replay, "--profile", profile, "--iterations", "4", "--warmup", "0"];
    const out = join(scratch.path, "none.csv");
    const refused = await rigel("profile", "--device", "simulated", "-o", out, "--", ...command);
    expect(refused.status).toBe(2);
    expect(refused.stderr).toContain("the program ended during its warm-up");
    expect(refused.stderr).toContain("--from-start");
    expect(existsSync(out)).toBe(false);
    const { summary, out: whole } = await recorded("whole", command, "--from-start", "--all");
    expect(summary.requests).toBe(4);
    expect((await rowsIn(whole)).filter(({ kind }) => kind === "kernel")).toHaveLength(4);
    const { summary: few, out: begin } = await recorded("begin", command, "--from-start", "--all", "--requests", "3");
    expect(few.requests).toBe(3);
    expect((await rowsIn(begin)).filter(({ kind }) => kind === "kernel")).toHaveLength(3);
  });

  test("says what is missing", async () => {
    const none = await rigel("profile");
    expect(none).toMatchObject({ status: 2, stdout: "" });
    expect(none.stderr).toContain("expected show, diff, or -- and the command to record");
    const both = await rigel("profile", "--requests", "5", "--duration", "1", "--", "/bin/true");
    expect(both).toMatchObject({ status: 2, stdout: "" });
    expect(both.stderr).toContain("expected either --requests or --duration, got both");
    const absent = await rigel("profile", "--device", "simulated", "--", "/nowhere/program");
    expect(absent).toMatchObject({ status: 2, stdout: "" });
    expect(absent.stderr).toContain("rigel profile: the command: expected a program that can be executed");
    const device = await rigel("profile", "--device", "99", "--", "/bin/true");
    expect(device.stderr).toContain("rigel profile: --device: there is no GPU 99 here");
    const idle = await rigel("profile", "--device", "simulated", "--", "/bin/true");
    expect(idle).toMatchObject({ status: 2, stdout: "" });
    expect(idle.stderr).toContain("without having initialised CUDA");
    expect(idle.stderr).not.toContain("let it run longer");
    const left = readdirSync("/dev/shm").filter((name) => name.startsWith("rigel-record-"));
    // Others may be recording at this moment, but nothing of what has ended stays.
    const ended = left.filter((name) => !existsSync(`/proc/${name.split("-").at(-1)}`));
    expect(ended.filter((name) => existsSync(join("/dev/shm", name)))).toEqual([]);
  });
});

/** What an iteration of record-program asks for: name, kind, grid, block, shared memory or bytes. */
const ITERATION = [
  "memcpy HtoD copy_h2d 0,0,0 0,0,0 4096",
  "softmax_warp_forward kernel 66,1,1 128,1,1 2048",
  "softmax_warp_forward kernel 132,1,1 128,1,1 2048",
  "rigel_spin kernel 1,1,1 128,1,1 0",
  "memset memset 0,0,0 0,0,0 8192",
  "layer_norm_kernel kernel 300,1,1 256,1,1 0",
  "gelu_elementwise_kernel kernel 40,2,1 128,1,1 0",
  "layer_norm_kernel kernel 300,1,1 256,1,1 0",
  "memcpy DtoH copy_d2h 0,0,0 0,0,0 1024",
];
const GEMM = { m: 64, n: 32, k: 16, batch: 1, type: "fp32" };

async function operations(path: string) {
  const rows = await rowsIn(path);
  return rows.map((row) => ({
    ...row,
    text: [row.name, row.kind, row.grid, row.block, row.kind === "kernel" ? row.shared_bytes : row.bytes].join(" "),
  }));
}

describe("rigel profile -- command, times from a stand-in of CUPTI", () => {
  const CUPTI = { RIGEL_CUPTI: join(build, "cupti", "libcupti.so.13") };

  test("each kernel of a graph by itself, matrix products with their shape, durations as the simulated GPU has them", async () => {
    const { out, summary } = await recordedIn(CUPTI, "program", [program, "1000000"]);
    expect(summary).toMatchObject({ mechanism: "cupti", why: null, requests: 20, notes: [] });
    const rows = await operations(out);
    // The stand-in cuBLAS multiplies on the host, with copies of its own after its kernel.
    const own = rows.filter(({ text }) => ITERATION.includes(text));
    // Where the machine is busy, a request may be seen to end while the program has not gone on launching it.
    const texts = own.map(({ text }) => text);
    if (summary.requests_by === "waits") expect(texts).toEqual(ITERATION);
    else expect(texts.toSorted()).toEqual(ITERATION.toSorted());
    expect(rows.map(({ kind }) => kind)).toContain("sync");
    expect(rows.filter(({ graph }) => graph)).toHaveLength(3);
    expect(new Set(rows.map(({ graph }) => graph)).size).toBe(2);
    expect(rows.filter(({ gemm }) => gemm)).toMatchObject([
      { name: "rigel_spin", gemm: GEMM, flops: 2 * 64 * 32 * 16 },
    ]);
    // 132 SMs hold 8 blocks of 256 threads each: 300 blocks fill 38.
    expect(own.find(({ name }) => name === "layer_norm_kernel")?.sms).toBe(38);
    for (const { name, kind, duration_ns } of own)
      if (kind === "kernel" && name !== "rigel_spin") {
        expect(duration_ns).toBeGreaterThan(4900);
        expect(duration_ns).toBeLessThan(7000);
      }
  });

  // CUPTI is found and asked while the program is inside cuInit, which it may call itself.
  test("from the start, where the tool initialises the driver as well", async () => {
    const profile = scratch.file("tiny.csv", TINY_PROFILE);
    const command = [replay, "--profile", profile, "--iterations", "4", "--warmup", "0"];
    const { summary } = await recordedIn(CUPTI, "start", command, "--from-start", "--all");
    expect(summary).toMatchObject({ mechanism: "cupti", requests: 4 });
  });

  test("a loop that never waits is cut where the host pauses", async () => {
    const { out, summary } = await recordedIn(CUPTI, "ahead", [program, "1000000", "ahead"], "--requests", "5");
    expect(summary).toMatchObject({ mechanism: "cupti", requests_by: "repetition" });
    const rows = await operations(out);
    expect(
      rows
        .map(({ text }) => text)
        .filter((text) => ITERATION.includes(text))
        .toSorted(),
    ).toEqual(ITERATION.toSorted());
    expect(rows.every(({ kind }) => kind !== "sync")).toBe(true);
  });

  test("a replay keeps the recorded names; GPU time within the launch overhead of the simulated GPU", async () => {
    const original = shipped("h200-bert-infer-bs2x128");
    const { out } = await recordedIn(CUPTI, "bert-cupti", [replay, "--profile", original]);
    const diff = await difference(original, out);
    expect(diff).toMatchObject({ launches_missing: 0, launches_new: 0 });
    // It takes 0.9 us to start a kernel there, and once more where the GPU was idle.
    expect(diff.b.time_ns - diff.a.time_ns).toBeLessThan(diff.a.kernels * 2000);
    expect(diff.b.time_ns).toBeGreaterThan(diff.a.time_ns * 0.97);
  });

  test("somebody else uses it, or it is not wanted: events, and why", async () => {
    const busy = await recordedIn({ ...CUPTI, RIGEL_SIM_CUPTI_BUSY: "1" }, "busy", [program, "1000000"]);
    expect(busy.summary).toMatchObject({ mechanism: "events" });
    expect(busy.summary.why).toContain("somebody else uses CUPTI");
    const rows = await operations(busy.out);
    expect(rows.map(({ name }) => name)).toContain("graph of 3 kernels from layer_norm_kernel");
    const unwanted = await recordedIn(CUPTI, "unwanted", [program, "1000000"], "--times", "events");
    expect(unwanted.summary).toMatchObject({ mechanism: "events" });
    const traced = await recordedIn({ ...CUPTI, CUDA_INJECTION64_PATH: "/tool.so" }, "traced", [program, "1000000"]);
    expect(traced.summary.why).toContain("CUDA_INJECTION64_PATH");
  });
});

const kernel = (name: string): Kind => ({
  work: "kernel",
  name,
  grid: [1, 1, 1],
  block: [32, 1, 1],
  registers: 8,
  shared_bytes: 0,
  sms: 1,
  bytes: 0,
});

const loop = (iteration: number[], times: number): number[] => Array.from({ length: times }, () => iteration).flat();
const end = (source: number, position: number) => ({ source, position, at_ns: position, latency_ns: 1 });
const launchOf = (number: number, name: string): Launch => ({
  number,
  token: name.charCodeAt(0),
  kind: kernel(name),
  ran: kernel(name),
  begin_ns: number * 1000,
  end_ns: number * 1000 + 100,
  stream: 1,
  gemm: 0,
  timed: true,
});
const recordOf = (correlation: number, name: string, graph = 0): GpuRecord => ({
  correlation,
  kind: kernel(name),
  start_ns: correlation * 1000 + 500,
  end_ns: correlation * 1000 + 900,
  stream: 7,
  graph,
});

describe("the rhythm of a program", () => {
  test("is the longest stretch at its end that repeats, not a layer within it", () => {
    const iteration = [1, 2, 2, 2, 2, 2, 2, 3, 4, 4, 4, 4, 5];
    expect(repetition([9, 8, 7, ...loop(iteration, 4)])).toEqual({ period: 13, length: 52 });
    expect(repetition([...loop(iteration, 3), 1, 2, 2])).toEqual({ period: 13, length: 42 });
    expect(repetition([1, 2, 3, 4, 5, 6])).toBeUndefined();
    expect(repetition([])).toBeUndefined();
  });

  test("is what the program reports, else its waits if requests are alike, else what repeats", () => {
    const tokens = loop([1, 2], 20);
    const every = (source: number, by: number) => Array.from({ length: 40 / by }, (_, i) => end(source, by * (i + 1)));
    expect(rhythmOf(tokens, every(SOURCE.reported, 4))).toEqual({ by: "reports", period: 0 });
    expect(rhythmOf(tokens, every(SOURCE.waited, 2))).toEqual({ by: "waits", period: 0 });
    expect(rhythmOf(tokens, [])).toEqual({ by: "repetition", period: 2 });
    expect(rhythmOf([1, 2, 3], [])).toBeUndefined();
    expect(requestsBy(tokens, [end(1, 2), end(1, 2), end(1, 6)])).toHaveLength(2);
  });

  test("has settled when the last requests take as long as those before them", () => {
    expect(settled([9, 9, 9, 9, 9, 3, 3, 3, 3, 3])).toBe(false);
    expect(settled([9, 9, 3, 3, 3, 3, 3, 3, 3.1, 3, 3, 3])).toBe(true);
    expect(settled([3, 3])).toBe(false);
  });
});

describe("times put to launches", () => {
  test("go by order and shape; records without a call and calls without a record do not shift the others", () => {
    const launches = [..."abcdef"].map((name, index) => launchOf(index + 1, name));
    const gpu = ["x", "a", "b", "d", "y", "e", "f"].map((name, index) => recordOf(index + 1, name));
    const { found, unseen } = matched(launches, gpu);
    expect([...found].map(([number, records]) => [number, records[0]?.kind.name])).toEqual([
      [1, "a"],
      [2, "b"],
      [4, "d"],
      [5, "e"],
      [6, "f"],
    ]);
    // "y", and not "x": CUPTI is on a moment before launches are said to be timed.
    expect(unseen).toBe(1);
    expect(matched(launches.slice(0, 3), [recordOf(1, "x"), recordOf(2, "y")])).toEqual({
      found: new Map(),
      unseen: 2,
    });
  });

  test("a graph's kernels come in the order in which the GPU ran them, under the graph's number", () => {
    const ofGraph: Kind = { ...kernel("graph of 2"), work: "graph" };
    const graph: Launch = { ...launchOf(2, "g"), kind: ofGraph, ran: ofGraph };
    const launches = [launchOf(1, "a"), graph, launchOf(3, "b")];
    const second = { ...recordOf(2, "late", 5), start_ns: 2700, end_ns: 2800 };
    const gpu = [recordOf(1, "a"), second, recordOf(2, "early", 5), recordOf(3, "b")];
    const moments = [
      { what: "end", end: { source: SOURCE.reported, position: 0, at_ns: 900, latency_ns: 1 } } as const,
      ...launches.map((launch) => ({ what: "launch", launch }) as const),
      { what: "end", end: { source: SOURCE.reported, position: 3, at_ns: 9000, latency_ns: 8000 } } as const,
    ];
    const none = { times: new Map(), gemms: new Map(), kinds: [], whole: false, event_ns: 0, device: "GPU", sms: 132 };
    const rows = rowsOf({ ...none, moments, gpu, cupti: true }, { by: "reports", period: 0 });
    expect(rows.requests[0]?.rows.map(({ name, graph: number }) => [name, number])).toEqual([
      ["a", 0],
      ["early", 5],
      ["late", 5],
      ["b", 0],
    ]);
    expect(rows).toMatchObject({ unseen: 0, requests: [{ estimated: 0, left_out: 0 }] });
  });

  test("an iteration with several waits ends with the longest, though the host pauses longer after the next input", () => {
    // As GPT-2 is served: an input, a wait for how long it is, the layers, a wait for the output. The program is slow after the input.
    const gaps_ns: Record<string, number> = { i: 20_000, m: 90_000, a: 30_000, o: 5000 };
    const moments: Moment[] = [];
    let now_ns = 0;
    let number = 0;
    for (const name of "imao".repeat(6)) {
      now_ns += gaps_ns[name] ?? 0;
      moments.push({
        what: "launch",
        launch: { ...launchOf(++number, name), begin_ns: now_ns, end_ns: now_ns + 100 },
      });
      now_ns += 100;
      const wait_ns = { m: 10_000, o: 50_000 }[name];
      if (wait_ns === undefined) continue;
      moments.push({ what: "wait", all: true, begin_ns: now_ns, end_ns: now_ns + wait_ns });
      now_ns += wait_ns;
    }
    const none = { gemms: new Map(), kinds: [], whole: false, event_ns: 0, device: "GPU", sms: 132 };
    const times = new Map(Array.from({ length: number }, (_, index) => [index + 1, 500]));
    const { requests } = rowsOf({ ...none, moments, times, gpu: [], cupti: false }, { by: "repetition", period: 4 });
    expect(requests).toHaveLength(5);
    for (const { rows } of requests)
      expect(rows.map(({ name, kind }) => (kind === "sync" ? "wait" : name))).toEqual([
        "i",
        "m",
        "wait",
        "a",
        "o",
        "wait",
      ]);
  });
});
