/**
 * hotpath.test.ts: a launch makes no system call of Rigel's, in either class, and costs the same however many clients there are.
 *
 * bench-hotpath launches 800,000 times against a driver whose launch does nothing; strace counts every system call of all
 * its threads, start-up and agent included. One per launch, or per hundred, would stand out.
 */

import { expect, setDefaultTimeout, test } from "bun:test";
import { readFileSync, readdirSync } from "node:fs";
import { join } from "node:path";
import { costOf } from "../src/bench-in-place.ts";
import { SIGNAL_STATUS } from "../src/interrupt.ts";
import { Native, make } from "../src/native.ts";
import { defaultSegmentFolder } from "../src/plan.ts";
import { generator } from "../src/random.ts";
import { Segment } from "../src/segment.ts";
import { Scratch, plainEnvironment, root } from "./rigel.ts";
import { until } from "./serving.ts";
import { z } from "zod";

setDefaultTimeout(300_000);

const LAUNCHES = 800_000;
const MOST_CALLS = LAUNCHES / 100;

const noStrace = Bun.which("strace") === null;
if (noStrace) console.warn("hotpath.test.ts is skipped: there is no strace (Debian's package strace)");

test.skipIf(noStrace).each([
  ["high", "bench-hotpath"],
  ["best-effort", "bench-hotpath"],
  // 800,000 calls of cuBLAS, with a handle that is used rightly.
  ["high", "bench-guard"],
])("%s: no system call on the path of %s", async (clientClass, bench) => {
  const native = await Native.load();
  await make(join(root, "native"), "bench");
  using scratch = new Scratch();
  const segment = Segment.create(native, join(scratch.path, "segment"));
  const counts = join(scratch.path, "strace");
  const program = join(root, "native", "build", bench);
  const variables = {
    LD_LIBRARY_PATH: join(root, "native", "build", "bench"),
    LD_PRELOAD: native.files.interposer,
    RIGEL_SEGMENT: segment.path,
    RIGEL_CLASS: clientClass,
    RIGEL_NAME: "bench",
  };
  const set = Object.entries(variables).flatMap(([name, value]) => ["-E", `${name}=${value}`]);
  await using child = Bun.spawn(["strace", "-c", "-o", counts, ...set, program], {
    env: plainEnvironment(),
    stdout: "pipe",
    stderr: "pipe",
  });
  const [stderr, status] = await Promise.all([child.stderr.text(), child.exited]);
  expect(status, stderr).toBe(0);
  const [slot] = segment.slots();
  expect(slot).toMatchObject({ name: "bench", launched: bench === "bench-hotpath" });
  const calls = Number(
    /^\s*100\.00\s+[\d.]+\s+\d+\s+(\d+)(?:\s+\d+)?\s+total$/m.exec(readFileSync(counts, "utf8"))?.[1],
  );
  expect(calls).toBeGreaterThan(10);
  expect(calls).toBeLessThan(MOST_CALLS);
});

/** `bun run bench:hotpath` with these flags, as its users run it. */
async function benchmark(...flags: string[]) {
  await using child = Bun.spawn([process.execPath, "run", "bench:hotpath", ...flags], {
    cwd: root,
    env: plainEnvironment(),
    stdout: "pipe",
    stderr: "pipe",
  });
  const [stdout, stderr, status] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
  return { stdout, stderr, status };
}

const ns = z.number().positive();

test("bun run bench:hotpath --json gives nanoseconds a launch, in each way", async () => {
  const { stdout, stderr, status } = await benchmark("--json", "--rounds", "1");
  expect(stdout, stderr).toStartWith("{");
  z.looseObject({ bare_ns: ns, disabled_ns: ns, bypassed_ns: ns, high_ns: ns, best_effort_ns: ns }).parse(
    JSON.parse(stdout),
  );
  expect(status).toBe(0);
});

test("bun run bench:hotpath --cold --json gives nanoseconds a call that finds the caches disturbed", async () => {
  const { stdout, stderr, status } = await benchmark("--cold", "--json", "--rounds", "1", "--calls", "20");
  expect(stdout, stderr).toStartWith("{");
  z.looseObject({
    cold: z.literal(true),
    bare_ns: ns,
    disabled_ns: ns,
    high_ns: ns,
    best_effort_ns: ns,
    high_recording_ns: ns,
    blas_repair_ns: ns,
    null_high_recording_ns: ns,
    sync_high_recording_ns: ns,
    event_high_recording_ns: ns,
    request_bare_ns: ns,
    request_high_recording_ns: ns,
  }).parse(JSON.parse(stdout));
  expect(status).toBe(0);
});

test("bun run bench:hotpath refuses to measure nothing", async () => {
  const { stderr, status } = await benchmark("--rounds", "0");
  expect(stderr).toContain("--rounds <count>' argument '0' is invalid");
  expect(status).toBe(2);
});

test("Ctrl-C in the middle of it leaves no segment", async () => {
  await using child = Bun.spawn([process.execPath, join(root, "src", "bench-hotpath.ts")], {
    env: plainEnvironment(),
    stdout: "ignore",
    stderr: "ignore",
  });
  const kept = (): string[] =>
    readdirSync(defaultSegmentFolder(process.env)).filter((name) => name.startsWith(`rigel-bench-${child.pid}-`));
  await until(() => kept().length === 2 || undefined);
  child.kill("SIGINT");
  expect(await child.exited).toBe(SIGNAL_STATUS.SIGINT);
  expect(kept()).toEqual([]);
});

test("bun run bench:in-place measures a launch among others of the same program", async () => {
  await using child = Bun.spawn([process.execPath, "run", "bench:in-place", "--requests", "300", "--json"], {
    cwd: root,
    env: plainEnvironment(),
    stdout: "pipe",
    stderr: "pipe",
  });
  const [stdout, stderr, status] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
  expect(status, stderr).toBe(0);
  const part = { past_ns: ns, adds_ns: z.number(), error_ns: ns };
  const { parts } = z
    .looseObject({
      requests: z.number().positive().max(300),
      request_us: z.number(),
      parts: z.array(z.looseObject({ part: z.string(), count: z.number().positive(), ...part })),
    })
    .parse(JSON.parse(stdout));
  expect(parts[0]).toMatchObject({ part: "launch", count: 229 });
  // It compiles all of the library in its way first.
}, 600_000);

test("what a call adds is told by its neighbours, whatever the processor's speed", () => {
  const random = generator(1);
  const request = (): string => {
    const speed = 1 + random();
    const launches = Array.from({ length: 20 }, (_, place) => {
      const past = random() < 0.5;
      // Each place has a time of its own; some launches meet something else.
      const time = (1000 + 100 * place) * speed * (1 + 0.02 * random()) + (past ? 0 : 50);
      const met = random() < 0.01 ? time + 20_000 : time;
      const after = 5000 * speed * (1 + 0.01 * random()) + (past ? 0 : 20);
      return `l${past ? "-" : ""}${met.toFixed(0)}:${after.toFixed(0)}`;
    });
    const past = random() < 0.5;
    return [...launches, `w${past ? "-" : ""}${(70_000 + 2000 * random() + (past ? 0 : 900)).toFixed(0)}:0`].join(" ");
  };
  const requests = Array.from({ length: 1000 }, request);
  const cost = costOf(`${["l1:2 l2:0 l3:0", ...requests, "l4:3 l-5:0"].join("\n")}\n`, 0);
  expect(cost?.requests).toBe(1000);
  const told = cost?.parts.map(({ part, count }) => `${count} ${part}`);
  expect(told).toEqual(["20 launch", "20 after a launch", "1 wait"]);
  const found = cost?.parts.map(({ adds_ns, error_ns }) => ({ adds_ns, error_ns })) ?? [];
  [50, 20, 900].forEach((added_ns, i) => {
    const { adds_ns = Number.NaN, error_ns = Number.NaN } = found[i] ?? {};
    expect(Math.abs(adds_ns - added_ns)).toBeLessThan(1.5 * error_ns); // three standard errors
    expect(error_ns).toBeLessThan(0.2 * added_ns);
  });
  expect(Math.abs((cost?.request_us ?? 0) - 2.3)).toBeLessThan(0.3);
  expect(costOf("", 0)).toBeNull();
  expect(costOf("l100:1 l200:0\nl-100:1 l200:0\n", 2)).toBeNull();
});

test("bun run bench:in-place says what is wrong with the program", async () => {
  for (const [program, message] of [
    ["rigel-no-such-program", "rigel-no-such-program: command not found"],
    ["false", "false ended with 1; nothing was measured"],
    ["true", "true has not served enough requests"],
  ] as const) {
    const command = [process.execPath, "run", "bench:in-place", "--device", "simulated", "--", program];
    const { exitCode, stderr } = Bun.spawnSync(command, { cwd: root, env: plainEnvironment() });
    expect(exitCode).toBe(2);
    expect(stderr.toString()).toContain(message);
  }
});

const noValgrind = Bun.which("valgrind") === null;
if (noValgrind)
  console.warn("hotpath.test.ts counts no instructions: there is no valgrind (Debian's package valgrind)");

const sharesSchema = z.object({
  shares: z.object({
    offset: z.int(),
    stride: z.int(),
    fields: z.object({ virtual_ns: z.object({ offset: z.int() }), idle_ns: z.object({ offset: z.int() }) }),
  }),
});

/** Rounds of 20,000 launches whose instructions are counted. */
const COUNTED_ROUNDS = 4;

/**
 * Instructions for each launch of a best-effort client beside `others`, all active and far ahead of it: those of the thread that
 * launches. The agent's are as many as the time that it all takes lets it do.
 */
async function instructions(policy: "priority" | "fair", others: number): Promise<number> {
  const native = await Native.load();
  using scratch = new Scratch();
  const segment = Segment.create(native, join(scratch.path, "segment"));
  segment.configure({ policy, quantum_us: 1_000_000 });
  const { shares } = sharesSchema.parse(JSON.parse(native.layout));
  const words = new BigUint64Array(Bun.mmap(segment.path, { shared: true }).buffer);
  for (let slot = 64 - others; slot < 64; slot++)
    for (const field of Object.values(shares.fields))
      words[(shares.offset + slot * shares.stride + field.offset) / 8] = 2n ** 62n;
  const program = join(root, "native", "build", "bench-hotpath");
  const valgrind = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", "--toggle-collect=main"];
  await using child = Bun.spawn([...valgrind, program, `${COUNTED_ROUNDS}`], {
    env: {
      ...plainEnvironment(),
      LD_LIBRARY_PATH: join(root, "native", "build", "bench"),
      LD_PRELOAD: native.files.interposer,
      RIGEL_SEGMENT: segment.path,
      RIGEL_CLASS: "best-effort",
      RIGEL_NAME: "bench",
    },
    stdout: "ignore",
    stderr: "pipe",
  });
  const [stderr, status] = await Promise.all([child.stderr.text(), child.exited]);
  expect(status, stderr).toBe(0);
  return Number(/Collected : (\d+)/.exec(stderr)?.[1]) / (COUNTED_ROUNDS * 20_000);
}

/** Reading one word of each of 31 clients would be some hundred instructions a launch. The agent's are counted too, and are more the longer it takes. */
test.skipIf(noValgrind).each(["priority", "fair"] as const)(
  "%s: 32 clients cost a launch what one does",
  async (policy) => {
    await make(join(root, "native"), "bench");
    const alone = await instructions(policy, 0);
    expect(alone).toBeGreaterThan(50);
    expect(Math.abs((await instructions(policy, 31)) - alone)).toBeLessThan(20);
  },
);
