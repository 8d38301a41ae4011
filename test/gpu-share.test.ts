/**
 * gpu-share.test.ts: what part of a GPU's time each client has: on the simulated GPU as its own account says, and from a stand-in NVML
 * (native/test/fake-nvml.c) for the clients of a segment that is no longer known to be simulated.
 */

import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { existsSync, readFileSync, renameSync } from "node:fs";
import { join } from "node:path";
import { z } from "zod";
import { Segments } from "../src/discover.ts";
import { GpuShares, MeanShares } from "../src/gpu-share.ts";
import { readManifest } from "../src/join.ts";
import { Native, make } from "../src/native.ts";
import { living, parentOf } from "../src/proc.ts";
import type { Segment } from "../src/segment.ts";
import { statsSchema } from "../src/stats.ts";
import { snapshotOf } from "../src/tally.ts";
import { Scratch, TINY_PROFILE, plainEnvironment, reportOf, rigel, root, start } from "./rigel.ts";
import { until } from "./serving.ts";

const build = join(root, "native", "build");
const program = join(build, "hang-program");
const nvml = join(build, "nvml", "libnvidia-ml.so.1");
let native: Native;

beforeAll(async () => {
  native = await Native.load();
  for (const target of ["hang-program", "nvml/libnvidia-ml.so.1"]) await make(join(root, "native"), `build/${target}`);
}, 300_000);

/** A launch on the simulated GPU, under no policy, of commands that go on until they are ended; each has launched something. */
class Launched implements AsyncDisposable {
  readonly scratch = new Scratch();
  readonly child: ReturnType<typeof start>;
  readonly #log: Promise<string>;

  constructor(commands: Record<string, string>, mps = false) {
    const config = this.scratch.file("jobs.json", {
      device: "simulated",
      sharing: mps ? "mps" : "time-slice",
      policy: { name: "none" },
      hang_s: 0,
      clients: Object.entries(commands).map(([name, command]) => ({
        name,
        class: "best-effort",
        command: ["sh", "-c", command],
      })),
    });
    this.child = start(["launch", config, "--segment", this.scratch.path]);
    this.#log = this.child.stderr.text();
  }

  /** The segment, once so many processes have launched something. */
  async segment(processes: number): Promise<Segment> {
    const segments = new Segments(native, this.scratch.path);
    return await until(() => {
      const [segment] = segments.live();
      return segment && segment.slots().filter(({ launched }) => launched).length === processes ? segment : undefined;
    });
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.child.kill("SIGTERM");
    await Promise.all([this.child.exited, this.#log]);
    this.scratch[Symbol.dispose]();
  }
}

/** Shares over a time in which the simulated GPU has gone on for a while. */
async function sharesOf(segment: Segment, gpus: GpuShares): Promise<Record<string, number | null>> {
  await Bun.sleep(50);
  return Object.fromEntries(gpus.of(segment, snapshotOf(segment), segment.devices()));
}

describe("on the simulated GPU", () => {
  test("a kernel without end has all of it, who is idle nothing, and before the second look nothing is known", async () => {
    await using launched = new Launched({ spin: `exec ${program} spin`, idle: `exec ${program} idle` });
    const segment = await launched.segment(2);
    const gpus = new GpuShares(native, { interval_ms: 0 });
    expect(await sharesOf(segment, gpus)).toEqual({ spin: null, idle: null });
    // Until the idle one's only kernel is done.
    expect(
      await until(async () => {
        const shares = await sharesOf(segment, gpus);
        return shares["spin"] === 1 ? shares : undefined;
      }),
    ).toEqual({ spin: 1, idle: 0 });
  });

  test("processes of a client add up, and time slices to all there is, less what exchanging them takes", async () => {
    const both = `${program} spin & exec ${program} spin`;
    await using launched = new Launched({ two: both, one: `exec ${program} spin` });
    const segment = await launched.segment(3);
    const gpus = new GpuShares(native, { interval_ms: 0 });
    const { two, one } = await until(async () => {
      const shares = await sharesOf(segment, gpus);
      const [ofTwo, ofOne] = [shares["two"] ?? 0, shares["one"] ?? 0];
      return ofOne > 0.2 && ofTwo > ofOne ? { two: ofTwo, one: ofOne } : undefined;
    });
    // Slices of 2048 us and 1/10 of that at most for an exchange: a third each.
    expect(one).toBeLessThan(0.45);
    expect(two + one).toBeGreaterThan(0.8);
    expect(two + one).toBeLessThanOrEqual(1.000001);
  });

  test("a client has no more than its GPU where its processes run side by side", async () => {
    await using launched = new Launched({ two: `${program} spin & exec ${program} spin` }, true);
    const segment = await launched.segment(2);
    const gpus = new GpuShares(native, { interval_ms: 0 });
    await sharesOf(segment, gpus);
    expect(await until(async () => (await sharesOf(segment, gpus))["two"] ?? undefined)).toBe(1);
  });

  test("is not looked at more often than it is asked to", async () => {
    await using launched = new Launched({ spin: `exec ${program} spin` });
    const segment = await launched.segment(1);
    let clock_ms = 0;
    const gpus = new GpuShares(native, { clock_ms: () => clock_ms });
    expect(await sharesOf(segment, gpus)).toEqual({ spin: null });
    clock_ms = 800;
    expect(await sharesOf(segment, gpus)).toEqual({ spin: null });
    clock_ms = 1000;
    expect((await sharesOf(segment, gpus))["spin"]).toBeGreaterThan(0);
  });

  test("a best-effort client comes forward beside a program that is no client and never rests", async () => {
    using scratch = new Scratch();
    scratch.file("tiny.csv", TINY_PROFILE);
    const { files } = native;
    const replay = `${files.replay} --profile ${join(scratch.path, "tiny.csv")}`;
    const config = scratch.file("jobs.json", {
      device: "simulated",
      sharing: "time-slice",
      policy: { name: "priority" },
      // Its first work is alone on the GPU; the rest of it is not.
      clients: [
        {
          name: "train",
          class: "best-effort",
          command: [
            "sh",
            "-c",
            `${replay} --iterations 5; until [ -e go ]; do sleep 0.02; done; ${replay} --iterations 50`,
          ],
          cwd: scratch.path,
        },
      ],
    });
    await using child = start(["launch", config, "--json", "--segment", scratch.path]);
    const texts = Promise.all([child.stdout.text(), child.stderr.text()]);
    const segment = await until(() => {
      const [live] = new Segments(native, scratch.path).live();
      return live?.slots().some(({ launched, finished }) => launched && finished) ? live : undefined;
    });
    const simulation = readManifest(segment)?.simulation;
    await using stranger = Bun.spawn([program, "spin"], {
      env: {
        ...plainEnvironment(),
        LD_LIBRARY_PATH: files.simulator,
        RIGEL_SIM_STATE: simulation?.state,
        RIGEL_SIM_PRESET: simulation?.preset,
      },
      stdout: "ignore",
      stderr: "inherit",
    });
    await until(
      () =>
        native.simulatedBusy(simulation?.state ?? "")?.processes.some(({ pid }) => pid === stranger.pid) || undefined,
    );
    scratch.file("go", "");
    const [stdout, stderr] = await texts;
    expect(await child.exited, stderr).toBe(0);
    expect(reportOf({ stdout, stderr, status: 0 }).clients).toMatchObject([
      { attached: true, requests: { count: 55 }, exit_code: 0 },
    ]);
    expect(stranger.exitCode).toBeNull();
    stranger.kill("SIGKILL");
  });

  test("rigel top and the report of a launch tell it", async () => {
    using scratch = new Scratch();
    const config = scratch.file("jobs.json", {
      device: "simulated",
      policy: { name: "none" },
      // When counting begins the idle one's only kernel is long done.
      warmup_s: 1,
      duration_s: 600,
      clients: [
        { name: "spin", class: "best-effort", command: [program, "spin"] },
        { name: "idle", class: "best-effort", command: [program, "idle"] },
      ],
    });
    await using child = start(["launch", config, "--json", "--segment", scratch.path]);
    const said = child.stdout.text();
    const segments = new Segments(native, scratch.path);
    await until(
      () =>
        segments
          .live()[0]
          ?.slots()
          .filter(({ launched }) => launched).length === 2 || undefined,
    );
    await using top = start(["top", "--once", "--json", "--interval", "0.5", "--segment", scratch.path]);
    const shown = topSchema.parse(JSON.parse(await top.stdout.text()));
    expect(sharesIn(shown)).toEqual({ spin: 1, idle: 0 });
    // Any time that was counted will do.
    let log = "";
    for await (const chunk of child.stderr) {
      const counts = log.includes("counting for");
      log += new TextDecoder().decode(chunk);
      if (log.includes("counting for") && !counts) child.kill("SIGTERM");
    }
    const report = z
      .object({ clients: z.array(z.object({ name: z.string(), gpu_share: z.number().nullable() })) })
      .parse(JSON.parse(await said));
    expect(report.clients, log).toEqual([
      { name: "spin", gpu_share: 1 },
      { name: "idle", gpu_share: 0 },
    ]);
    const { stdout } = await rigel("launch", config, "--duration", "1", "--segment", scratch.path);
    expect(stdout).toMatch(/ gpu %\nspin .* 100\nidle .* 0\.0\n/);
  });
});

const looksSchema = z.object({ shares: z.record(z.string(), z.number().nullable()), own: z.array(z.number()) });
const topSchema = z.object({ segments: z.array(statsSchema) });

function sharesIn({ segments }: z.infer<typeof topSchema>): Record<string, number | null> {
  return Object.fromEntries(segments.flatMap(({ clients }) => clients.map((one) => [one.name, one.gpu_share])));
}

describe("from NVML", () => {
  let launched: Launched;
  let segment: Segment;
  /** Lines of the stand-in NVML. */
  let device: string;
  const unknown = { one: null, two: null };
  const sample = (pid: number, at_us: number, percent: number): string =>
    `sample ${device} ${pid} ${at_us} ${percent}\n`;
  /** Of the client `one`, of its child that is no client, of the two processes of `two`. */
  let one: number, child: number, two: number[];

  beforeAll(async () => {
    launched = new Launched({
      one: `sleep 600 & exec ${program} idle`,
      two: `${program} idle & exec ${program} idle`,
    });
    segment = await launched.segment(3);
    device = segment.devices()[0]?.uuid ?? "";
    const pids = (name: string): number[] => segment.slots().flatMap((slot) => (slot.name === name ? [slot.pid] : []));
    [one = 0] = pids("one");
    two = pids("two");
    child = await until(() => living().find(({ pid, name }) => name === "sleep" && parentOf(pid) === one)?.pid);
  });
  afterAll(async () => await launched[Symbol.asyncDispose]());

  /** What the clients have at each step, on which GPUs nobody else is, and what NVML was asked for: since when. */
  async function looks(
    steps: { at_ms: number; says: string }[],
    env: Record<string, string> = {},
    ...also: string[]
  ): Promise<{ shares: unknown[]; own: number[][]; asked: string[] }> {
    using scratch = new Scratch();
    const fake = join(scratch.path, "says");
    await using looking = Bun.spawn(
      [process.execPath, join(root, "test", "fixtures", "nvml-looks.ts"), segment.path, JSON.stringify(steps), ...also],
      {
        env: { ...plainEnvironment(), RIGEL_NVML: nvml, FAKE_NVML: fake, ...env },
        stdin: "ignore",
        stdout: "pipe",
        stderr: "pipe",
      },
    );
    const [text, log] = await Promise.all([looking.stdout.text(), looking.stderr.text()]);
    expect(await looking.exited, log).toBe(0);
    const asked = existsSync(`${fake}.asked`) ? readFileSync(`${fake}.asked`, "utf8") : "";
    const lines = text
      .trimEnd()
      .split("\n")
      .map((line) => looksSchema.parse(JSON.parse(line)));
    return {
      shares: lines.map(({ shares }) => shares),
      own: lines.map(({ own }) => own),
      asked: asked.split("\n").flatMap((line) => (line === "" ? [] : [line.replace(`${device} `, "")])),
    };
  }

  test("samples since the last look count, what is not named again is held, and then idle", async () => {
    const [first = 0, second = 0] = two;
    const there = `device ${device}\n`;
    const later = there + sample(one, 200, 43) + sample(first, 201, 20) + sample(second, 201, 31) + sample(1, 201, 7);
    const { shares, asked } = await looks([
      // What came before the first look may be long ago.
      { at_ms: 0, says: there + sample(one, 100, 30) },
      { at_ms: 500, says: later },
      // Another's process, and an entry of nonsense.
      { at_ms: 1000, says: later + sample(one, 202, 4294967295) },
      // Nothing new: code 6.
      { at_ms: 2000, says: later },
      { at_ms: 3000, says: later + sample(one, 300, 10) },
      // Code 3: not supported; and other GPUs' samples are none of this one's.
      { at_ms: 4000, says: `${there}error 3\n${sample(one, 400, 90)}` },
      { at_ms: 5000, says: there + sample(one, 500, 100).replace(device, "GPU-other") + sample(one, 501, 99) },
    ]);
    expect(shares).toEqual([
      { one: null, two: null },
      { one: null, two: null },
      { one: 0.43, two: 0.51 },
      { one: 0.43, two: 0.51 },
      { one: 0.1, two: 0 },
      { one: null, two: null },
      { one: 0.99, two: 0 },
    ]);
    // Nothing is asked twice, and nothing again where it was refused.
    expect(asked).toEqual(["0", "100", "201", "201", "300"]);
  });

  test("who is never named is not known, nor is a client one of whose processes is not", async () => {
    const [first = 0] = two;
    const says = `device ${device}\n${sample(first, 10, 50)}${sample(1, 11, 50)}`;
    const { shares } = await looks([
      { at_ms: 0, says },
      { at_ms: 1000, says: says + sample(first, 20, 50) },
      { at_ms: 9000, says },
    ]);
    expect(shares).toEqual([unknown, unknown, unknown]);
  });

  test("what a client has started counts for it, and several samples of a process as the last", async () => {
    const says = `device ${device}\n`;
    const { shares } = await looks([
      { at_ms: 0, says },
      {
        at_ms: 1000,
        says: says + sample(one, 10, 5) + sample(one, 30, 20) + sample(one, 20, 90) + sample(child, 30, 33),
      },
      { at_ms: 2000, says: says + sample(one, 40, 60) + sample(child, 40, 70) },
    ]);
    expect(shares).toEqual([
      { one: null, two: null },
      { one: 0.53, two: null },
      { one: 1, two: null },
    ]);
  });

  test("nobody else uses a GPU if what is named lately is clients', and a best-effort one gets something done", async () => {
    const says = `device ${device}\n`;
    const { own } = await looks([
      // Long ago, maybe.
      { at_ms: 0, says: says + sample(one, 10, 40) },
      { at_ms: 1000, says: says + sample(one, 20, 40) },
      { at_ms: 2000, says: says + sample(1, 30, 1) },
      // Idle now, as far as is known, and then for sure; but so is a client that gets nothing done beside it.
      { at_ms: 3000, says },
      { at_ms: 4000, says },
      { at_ms: 5000, says: says + sample(one, 45, 1) },
      // What a client has started is not governed.
      { at_ms: 6000, says: says + sample(one, 50, 40) + sample(child, 50, 30) },
      // The GPU does not answer.
      { at_ms: 7000, says: `${says}error 3\n` },
    ]);
    expect(own).toEqual([[], [0], [], [], [], [0], [], []]);
    // Who sees strangers alone, as in a container, knows of no client.
    const { own: without } = await looks([
      { at_ms: 0, says },
      { at_ms: 1000, says: says + sample(1, 20, 0) },
    ]);
    expect(without).toEqual([[], []]);
  });

  test("of several GPUs a client has the mean, and nothing is known where one of them does not tell", async () => {
    const [first = 0, second = 0] = two;
    const other = "GPU-other";
    const says = `device ${device}\ndevice ${other}\n`;
    const elsewhere = (pid: number, at_us: number, percent: number): string =>
      sample(pid, at_us, percent).replace(device, other);
    const steps = [
      { at_ms: 0, says },
      { at_ms: 1000, says: says + sample(one, 10, 40) + elsewhere(one, 11, 20) + sample(first, 10, 30) },
      { at_ms: 2000, says: says + elsewhere(first, 20, 5) + elsewhere(second, 20, 10) + sample(second, 20, 3) },
      { at_ms: 3000, says: `device ${device}\n${sample(one, 30, 50)}error 3\n` },
    ];
    const { shares, own } = await looks(steps, {}, other);
    expect(own).toEqual([[], [0, 1], [0, 1], []]);
    expect(shares).toEqual([unknown, { one: 0.3, two: null }, { one: 0.3, two: 0.24 }, unknown]);
  });

  test.each([
    ["which is not there", { RIGEL_NVML: "/no/such/library.so" }, (there: string) => there],
    ["which is something else", { RIGEL_NVML: join(build, "librigel.so") }, (there: string) => there],
    ["which cannot be initialised", {}, (there: string) => `init 9\n${there}`],
    ["which knows no such GPU", {}, () => "device GPU-other\n"],
  ])("a library %s leaves it unknown", async (_, env, saysOf) => {
    const says = (at_us: number): string => saysOf(`device ${device}\n`) + sample(one, at_us, 50);
    const { shares, own, asked } = await looks(
      [
        { at_ms: 0, says: says(1) },
        { at_ms: 1000, says: says(2) },
      ],
      env,
    );
    expect(shares).toEqual([unknown, unknown]);
    expect(own).toEqual([[], []]);
    expect(asked).toEqual([]);
  });

  test("rigel top shows it, and - where it is not known", async () => {
    const fake = launched.scratch.file("says", `device ${device}\n`);
    // Whole at every moment: a GPU that NVML once does not know is not asked for again.
    const says = (text: string): void => renameSync(launched.scratch.file("says.new", text), fake);
    // The segment has forgotten by now that its GPU is simulated.
    await using top = start(["top", "--interval", "1", "--json", "--segment", launched.scratch.path], {
      env: { RIGEL_NVML: nvml, FAKE_NVML: fake },
    });
    const reader = top.stdout.getReader();
    let text = "";
    let at_us = 0;
    const shares = await until(async () => {
      says(`device ${device}\n${sample(one, ++at_us, 37)}`);
      const { value } = await reader.read();
      text += new TextDecoder().decode(value);
      const line = text.split("\n").at(-2);
      const found = line === undefined ? {} : sharesIn(topSchema.parse(JSON.parse(line)));
      return found["one"] === 0.37 ? found : undefined;
    });
    expect(shares).toEqual({ one: 0.37, two: null });
    await using table = start(["top", "--once", "--interval", "0.1", "--segment", launched.scratch.path], {
      env: { RIGEL_NVML: nvml, FAKE_NVML: fake, COLUMNS: "80" },
    });
    expect(await table.stdout.text()).toMatch(/GPU%[\s\S]* one +best +\w+ +[\d.]+ +[\d.]+ +- +- +- /);
  });
});

test("a mean is over the time in which there was something to know", () => {
  const mean = new MeanShares();
  mean.add(new Map([["a", null]]), 10);
  mean.add(
    new Map([
      ["a", 0.5],
      ["b", 0],
    ]),
    1,
  );
  mean.add(new Map([["a", 0.2]]), 2);
  expect(mean.of("a")).toBe(0.3);
  expect(mean.of("b")).toBe(0);
  expect(mean.of("c")).toBeNull();
});
