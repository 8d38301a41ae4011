/**
 * hangs.test.ts: who hangs and because of whom: decided by hand-worked looks, and seen in programs that hang on the simulated GPU.
 */

import { expect, setDefaultTimeout, setSystemTime, test } from "bun:test";
import { existsSync, mkdirSync, readFileSync, readdirSync, symlinkSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { z } from "zod";
import { writeBundle } from "../src/hang-bundle.ts";
import { type Found, type Moment, type Observed, hangsOf } from "../src/hangs.ts";
import { Native, make } from "../src/native.ts";
import { stateOf } from "../src/proc.ts";
import { type Operation, ranOf, unfinishedOf } from "../src/records.ts";
import type { Communicator, Thread } from "../src/threads.ts";
import { Scratch, rigel, root, start } from "./rigel.ts";
import { commandLine } from "../src/self.ts";
import { Place, spinning, until } from "./serving.ts";
import { World } from "./world.ts";

setDefaultTimeout(300_000);

/* ---- decided ---- */

const SECOND = 1e9;
/** The second look is at 100 s, the first one a second before; what waits for 10 s hangs. */
const NOW = 100 * SECOND;

function thread(tid: number, more: Partial<Thread> = {}): Thread {
  return {
    tid,
    name: "python",
    client: null,
    moves: 0,
    device: 0,
    context: "0x1",
    stream: "0x2",
    launches: 5,
    calls: 5,
    last: { operation: "cuMemcpyHtoDAsync_v2", at_ns: NOW - 20 * SECOND },
    kernel: "gemm",
    waiting: null,
    ...more,
  };
}

/** A thread that waits since so many seconds. */
function waits(tid: number, operation: string, seconds: number): Thread {
  return thread(tid, { waiting: { operation, since_ns: NOW - seconds * SECOND, object: "0x2" } });
}

function client(pid: number, more: Partial<Observed> = {}): Observed {
  return {
    name: "train",
    pid,
    slot: pid,
    class: "best-effort",
    state: "live",
    stopped: false,
    beat_ns: NOW,
    rank: null,
    issued: 100,
    gate_wait_ns: 0,
    suspended_ns: 0,
    paused: false,
    paused_s: null,
    busy: false,
    threads: [thread(pid)],
    communicators: [],
    unfinished: null,
    ran_ns: null,
    threads_lost: 0,
    communicators_lost: 0,
    ...more,
  };
}

function communicator(rank: number, entered: number, more: Partial<Communicator> = {}): Communicator {
  return {
    key: "a",
    rank,
    size: 2,
    entered,
    peers: 0,
    operation: "ncclAllReduce",
    elements: 10,
    at_ns: NOW - 15 * SECOND,
    ...more,
  };
}

function moment(processes: Observed[], at_ns: number): Moment {
  return { segment: "s", at_ns, processes };
}

function decide(now: Observed[], before: Observed[] = now): Found[] {
  return hangsOf(moment(before, NOW - SECOND), moment(now, NOW), 10).processes;
}

function verdicts(found: Found[]): string[] {
  return found.map(({ verdict, hung }) => (hung ? `${verdict}!` : verdict));
}

test("work goes on, or nothing is done, or is waited for a short time", () => {
  const before = client(1, { issued: 90 });
  expect(verdicts(decide([client(1)], [before]))).toEqual(["working"]);
  expect(verdicts(decide([client(1)]))).toEqual(["idle"]);
  expect(verdicts(decide([client(1, { threads: [waits(1, "cuStreamSynchronize", 9.9)] })]))).toEqual(["working"]);
  expect(verdicts(decide([client(1, { threads: [] })]))).toEqual(["idle"]);
});

test("a wait for work that does not finish, with the oldest launch", () => {
  const unfinished = {
    launches: 3,
    oldest: { kernel: "spin", at_ns: NOW - 30 * SECOND },
    newest: { kernel: "copy", at_ns: NOW - 29 * SECOND },
    at_least: false,
  };
  const [found] = decide([client(1, { threads: [thread(2), waits(1, "cuCtxSynchronize", 28)], unfinished })]);
  expect(found).toMatchObject({
    verdict: "synchronise",
    hung: true,
    seconds: 28,
    thread: { tid: 1, call: "cuCtxSynchronize", seconds: 28 },
    unfinished: { launches: 3, oldest: "spin", oldest_seconds_ago: 30, newest: "copy", at_least: false },
  });
  expect(found?.why).toContain("the oldest launch not known to be finished is spin, 30.0 s ago");
});

test("a call that ought to return at once", () => {
  const [found] = decide([client(1, { threads: [waits(1, "cuLaunchKernel", 11)] })]);
  expect(found).toMatchObject({ verdict: "call", hung: true, why: "cuLaunchKernel does not return" });
});

test("a copy to memory that is not pinned waits, also an asynchronous one", () => {
  const [found] = decide([client(1, { threads: [waits(1, "cuMemcpyDtoHAsync_v2", 11)] })]);
  expect(found).toMatchObject({ verdict: "synchronise", hung: true });
});

test("what was done last is what a thread did that queues work, not one that looks after events", () => {
  const watchdog = thread(2, { launches: 0, last: { operation: "cuEventDestroy_v2", at_ns: NOW - SECOND } });
  const [found] = decide([client(1, { threads: [watchdog, thread(1)] })]);
  expect(found?.thread).toMatchObject({ tid: 1, last: { operation: "cuMemcpyHtoDAsync_v2" } });
});

test("the rank that has not come is named, with what it did last", () => {
  const found = decide([
    client(10, { rank: 0, threads: [waits(10, "cuStreamSynchronize", 15)], communicators: [communicator(0, 4)] }),
    client(11, { rank: 1, communicators: [communicator(1, 3)] }),
  ]);
  expect(verdicts(found)).toEqual(["collective!", "behind!"]);
  expect(found[0]).toMatchObject({
    seconds: 15,
    collective: {
      operation: "ncclAllReduce",
      number: 4,
      ranks: 2,
      missing: [{ rank: 1, pid: 11, entered: 3, operation: "ncclAllReduce" }],
      different: [],
    },
  });
  expect(found[1]).toMatchObject({
    seconds: 15,
    thread: { last: { operation: "cuMemcpyHtoDAsync_v2", seconds_ago: 20 } },
  });
  expect(found[1]?.why).toContain("rank 0 waits for it in ncclAllReduce 4");
  expect(found[1]?.why).toContain("it last did cuMemcpyHtoDAsync_v2 20.0 s ago");
});

test("a rank that is dead, stopped or never made the communicator is behind", () => {
  const patient = client(10, {
    rank: 0,
    threads: [waits(10, "cuStreamSynchronize", 15)],
    communicators: [communicator(0, 4)],
  });
  const behind = client(11, { rank: 1, communicators: [communicator(1, 3)] });
  expect(verdicts(decide([patient, { ...behind, state: "dead" }]))).toEqual(["collective!", "behind!"]);
  expect(verdicts(decide([patient, { ...behind, stopped: true, beat_ns: NOW - 15 * SECOND }]))).toEqual([
    "collective!",
    "stopped!",
  ]);
  const making = { ...patient, threads: [waits(10, "ncclCommInitRankConfig", 15)] };
  const alone = decide([
    { ...making, communicators: [communicator(0, 0, { operation: null })] },
    client(11, { rank: 1 }),
  ]);
  expect(verdicts(alone)).toEqual(["collective!", "behind!"]);
  expect(alone[0]?.why).toContain("rank 1 has not come to ncclCommInitRankConfig");
  // Nobody says that it is rank 1.
  const nobody = decide([{ ...making, communicators: [communicator(0, 0, { operation: null })] }]);
  expect(nobody[0]?.collective?.missing).toEqual([{ rank: 1, pid: null, entered: null, operation: null }]);
  // Two say so.
  const [two, ...both] = decide([
    { ...making, communicators: [communicator(0, 0, { operation: null })] },
    ...[11, 12].map((pid) => client(pid, { rank: 1 })),
  ]);
  expect(two?.collective?.missing).toEqual([{ rank: 1, pid: null, entered: null, operation: null }]);
  expect(verdicts(both)).toEqual(["idle", "idle"]);
});

test("who is stopped itself waits for nobody, and of those who wait the first is told", () => {
  const patient = (rank: number): Observed =>
    client(10 + rank, {
      rank,
      threads: [waits(10 + rank, "cuStreamSynchronize", 15)],
      communicators: [communicator(rank, 4, { size: 3 })],
    });
  const last = client(12, { rank: 2, communicators: [communicator(2, 3, { size: 3 })] });
  const stopped = { stopped: true, beat_ns: NOW - 15 * SECOND };
  expect(decide([patient(0), patient(1), last])[2]?.why).toContain("rank 0 waits for it");
  expect(decide([{ ...patient(0), ...stopped }, patient(1), last])[2]?.why).toContain("rank 1 waits for it");
  const all = decide([{ ...patient(0), ...stopped }, { ...patient(1), ...stopped }, last]);
  expect(verdicts(all)).toEqual(["stopped!", "stopped!", "idle"]);
});

test("of several communicators the one entered last tells", () => {
  const [found] = decide([
    client(10, {
      rank: 0,
      threads: [waits(10, "cuStreamSynchronize", 15)],
      communicators: [
        communicator(0, 4, { at_ns: NOW - 30 * SECOND }),
        communicator(0, 2, { key: "b", at_ns: NOW - 15 * SECOND }),
      ],
    }),
    client(11, { rank: 1, communicators: [communicator(1, 3), communicator(1, 1, { key: "b" })] }),
  ]);
  expect(found?.collective).toMatchObject({ number: 2, missing: [{ rank: 1, entered: 1 }] });
});

test("ranks that are in different collectives of the same number", () => {
  const found = decide([
    client(10, { rank: 0, threads: [waits(10, "cuStreamSynchronize", 15)], communicators: [communicator(0, 4)] }),
    client(11, {
      rank: 1,
      threads: [waits(11, "cuStreamSynchronize", 15)],
      communicators: [communicator(1, 4, { operation: "ncclBroadcast" })],
    }),
  ]);
  expect(verdicts(found)).toEqual(["collective!", "collective!"]);
  expect(found[0]?.why).toContain("for rank 1 that is another one, ncclBroadcast: one was left out");
  const [sizes] = decide(
    [0, 1].map((rank) =>
      client(10 + rank, {
        rank,
        threads: [waits(10 + rank, "cuStreamSynchronize", 15)],
        communicators: [communicator(rank, 4, { elements: 1000 + rank })],
      }),
    ),
  );
  expect(sizes).toMatchObject({ verdict: "collective", collective: { missing: [], different: [{ rank: 1 }] } });
});

test("ranks that are equally far wait for the GPU, not for each other", () => {
  const both = [10, 11].map((pid, rank) =>
    client(pid, { rank, threads: [waits(pid, "cuStreamSynchronize", 15)], communicators: [communicator(rank, 4)] }),
  );
  expect(verdicts(decide(both))).toEqual(["synchronise!", "synchronise!"]);
});

test("who is held back does not hang", () => {
  const serve = client(9, { name: "serve", class: "high", busy: true, issued: 200 });
  const before = { ...serve, issued: 100 };
  const gate = client(1, { threads: [waits(1, "wait_high", 60)] });
  const short = client(2, { gate_wait_ns: 0.9 * SECOND });
  const off = client(3, { threads: [waits(3, "cuStreamSynchronize", 60), waits(4, "suspended", 2)] });
  const found = decide([serve, gate, short, off], [before, gate, { ...short, gate_wait_ns: 0 }, off]);
  expect(verdicts(found)).toEqual(["working", "gate", "gate", "suspended"]);
  expect(found[1]?.why).toBe("is held at Rigel's gate while serve is busy: no hang");
  // Under fair a high client may wait, too: not for itself.
  const turn = { ...serve, issued: 200, threads: [waits(9, "wait_turn", 60)] };
  expect(decide([turn])[0]?.why).toBe("is held at Rigel's gate: no hang");
  const [paused] = decide([client(1, { paused: true, threads: [waits(1, "paused", 60)] })]);
  expect(paused).toMatchObject({ verdict: "gate", hung: false, why: "is paused until `rigel resume train`: no hang" });
  // Names may have spaces, of which a shell would make several.
  const [named] = decide([client(1, { name: "my job", paused: true, threads: [waits(1, "paused", 60)] })]);
  expect(named?.why).toBe("is paused until `rigel resume 'my job'`: no hang");
  const [forNow] = decide([client(1, { paused: true, paused_s: 12, threads: [waits(1, "paused", 60)] })]);
  expect(forNow?.why).toBe("is paused for another 12.0 s: no hang");
  // What it could not use the GPU for does not count, and being off it between times is no excuse for the rest.
  const between = { threads: [waits(3, "cuStreamSynchronize", 60), waits(4, "suspended", 0.01)], suspended_ns: SECOND };
  const [short_s, long_s] = [9.9, 10].map((ran_s) => client(3, { ...between, ran_ns: ran_s * SECOND }));
  if (!short_s || !long_s) throw new Error("no processes");
  expect(verdicts(decide([short_s], [{ ...short_s, suspended_ns: 0 }]))).toEqual(["suspended"]);
  expect(decide([short_s])[0]?.why).toBe(
    "is kept off the GPU by Rigel, and could use it for 9.9 s since it waits: no hang",
  );
  expect(verdicts(decide([long_s], [{ ...long_s, suspended_ns: 0 }]))).toEqual(["synchronise!"]);
  // Its own launches that do not finish are another matter.
  const own = client(1, { threads: [waits(1, "wait_inflight", 60)] });
  expect(verdicts(decide([own]))).toEqual(["synchronise!"]);
});

test("stopped, ended and dead", () => {
  const found = decide([
    client(1, { stopped: true, beat_ns: NOW - 10 * SECOND }),
    client(2, { state: "ended" }),
    client(3, { state: "dead" }),
    // Not yet longer than the limit.
    client(4, { stopped: true, beat_ns: NOW - 9.9 * SECOND }),
  ]);
  expect(verdicts(found)).toEqual(["stopped!", "ended", "dead", "stopped"]);
  expect(found.map(({ seconds }) => seconds)).toEqual([10, 0, 0, 9.9]);
});

function at(kind: Operation["kind"], stream: number | null, at_ns: number, kernel: string | null = null): Operation {
  return {
    kind,
    operation: kind,
    tid: 1,
    at_ns,
    duration_ns: kind === "sync" ? 1 : null,
    stream,
    failed: false,
    continued: false,
    kernel,
    inflight: 0,
    argument: kind === "sync" && stream !== null ? 0x100 + stream : 0,
  };
}

function waiting(object: string | null): Thread[] {
  return [thread(1, { waiting: { operation: "cuStreamSynchronize", since_ns: 50, object } })];
}

test("for how long of a wait a process could use the GPU", () => {
  const off = (at_ns: number, duration_ns: number): Operation => ({ ...at("suspension", null, at_ns), duration_ns });
  const waiter = waiting(null);
  expect(ranOf([], [thread(1)], 100)).toBeNull();
  expect(ranOf([at("launch", 1, 40)], waiter, 100)).toBe(50);
  // Of the first only what lies in the wait, which began at 50.
  const records = [at("launch", 1, 40), off(45, 10), off(70, 20)];
  expect(ranOf(records, waiter, 100)).toBe(25);
  // One that has not ended, as of the thread that sees to it.
  const preempt = thread(2, { waiting: { operation: "suspended", since_ns: 95, object: null } });
  expect(ranOf(records, [...waiter, preempt], 100)).toBe(20);
  expect(ranOf(records, [preempt], 100)).toBeNull();
  // The records go back to 75 alone: for four fifths of that.
  expect(ranOf([off(75, 5)], waiter, 100)).toBe(40);
});

test("what is unfinished: since the last wait that covered it", () => {
  const operations = [
    at("launch", 1, 1, "first"),
    at("sync", 1, 2),
    at("launch", 1, 3, "second"),
    at("launch", 2, 4, "third"),
    at("launch", 1, 5, "fourth"),
  ];
  expect(unfinishedOf(operations, waiting("0x101"))).toEqual({
    launches: 2,
    oldest: { kernel: "second", at_ns: 3 },
    newest: { kernel: "fourth", at_ns: 5 },
    at_least: false,
  });
  // Of a stream that is not known, or of everything, all streams count.
  expect(unfinishedOf(operations, waiting(null))?.launches).toBe(3);
  expect(unfinishedOf([...operations, at("sync", null, 6)], waiting(null))).toBeNull();
  // A wait for a stream that has had no work says nothing of the others.
  const elsewhere = { ...at("sync", null, 6), operation: "cuStreamSynchronize" };
  expect(unfinishedOf([...operations, elsewhere], waiting(null))?.launches).toBe(3);
  // What the driver refused is not on the GPU.
  const refused = { ...at("launch", 1, 6, "refused"), failed: true };
  expect(unfinishedOf([...operations, refused], waiting(null))?.newest.kernel).toBe("fourth");
  expect(unfinishedOf(operations.slice(2), waiting("0x999"))?.at_least).toBe(true);
});

/* ---- seen ---- */

const foundSchema = z.looseObject({
  name: z.string(),
  pid: z.int(),
  rank: z.int().nullable(),
  verdict: z.string(),
  hung: z.boolean(),
  why: z.string(),
  communicators_lost: z.int(),
  threads_lost: z.int(),
  thread: z.looseObject({ call: z.string().nullable() }).nullable(),
});
const documentSchema = z.object({
  schema: z.literal(1),
  hung: z.int(),
  segments: z.array(z.looseObject({ processes: z.array(foundSchema) })),
});

/** The verdict on each program, or those that it may be. */
type Expected = Record<string, string | string[]>;

/** Programs that hang. */
class Ward extends World {
  start(name: string, kind: "high" | "best-effort", args: string[], env: Record<string, string> = {}): Bun.Subprocess {
    return this.run([join(root, "native", "build", "hang-program"), ...args], name, kind, env);
  }

  ranks(what: string, size: number, env: Record<string, string> = {}, ...more: string[]): void {
    const meeting = join(this.scratch.path, "meeting");
    for (let rank = 0; rank < size; rank++)
      this.start("train", "best-effort", [what, String(rank), String(size), meeting, ...more], {
        RANK: String(rank),
        WORLD_SIZE: String(size),
        ...env,
      });
  }

  /** Runs `rigel hangs` until it finds what is expected of it; the test's time limit bounds this. */
  async until(expected: Expected, ...args: string[]): Promise<z.infer<typeof foundSchema>[]> {
    return await this.untilFound(expected, () => true, ...args);
  }

  /** The same until that is so of what it finds: ranks that only start late stand aside for one another, too. */
  async untilFound(
    expected: Expected,
    fits: (found: z.infer<typeof foundSchema>[]) => boolean,
    ...args: string[]
  ): Promise<z.infer<typeof foundSchema>[]> {
    for (;;) {
      const found = await this.#look(expected, args);
      if (found && fits(found)) return found;
    }
  }

  /** Stops a program, and looks until that is found: where it holds nothing of the simulated GPU's, for which the others would wait. */
  async stop(child: Bun.Subprocess, expected: Expected): Promise<void> {
    for (;;) {
      child.kill("SIGSTOP");
      for (let look = 0; look < 15; look++) if (await this.#look(expected)) return;
      child.kill("SIGCONT");
      await Bun.sleep(50);
    }
  }

  /** What `rigel hangs` finds, if it is what is expected. */
  async #look(expected: Expected, args: string[] = []): Promise<z.infer<typeof foundSchema>[] | undefined> {
    const result = await rigel("hangs", "--json", "--threshold", "1s", "--segment", this.segment.path, ...args);
    expect(result.stdout, result.stderr).toStartWith("{");
    const { hung, segments } = documentSchema.parse(JSON.parse(result.stdout));
    const found = segments.flatMap(({ processes }) => processes);
    expect(result.status).toBe(hung > 0 ? 1 : 0);
    const got = new Map(found.map(({ name, rank, verdict }) => [`${name} ${rank ?? ""}`.trim(), verdict]));
    const wanted = Object.entries(expected);
    const fits =
      got.size === wanted.length && wanted.every(([name, one]) => [one].flat().includes(got.get(name) ?? ""));
    return fits ? found : undefined;
  }
}

async function ward(): Promise<Ward> {
  const native = await Native.load();
  await make(join(root, "native"), "check-build");
  return new Ward(native);
}

test("a rank that sleeps before a collective, and what is kept of it", async () => {
  await using here = await ward();
  here.ranks("late", 3);
  const bundles = join(here.scratch.path, "bundles");
  const found = await here.untilFound(
    { "train 0": "collective", "train 1": "behind", "train 2": "collective" },
    (all) => all.find(({ rank }) => rank === 1)?.why?.includes("ncclAllReduce 4") === true,
  );
  const late = found.find(({ rank }) => rank === 1);
  expect(late?.why).toMatch(
    /^rank [02] waits for it in ncclAllReduce 4, which it has not entered; it last did cuStreamSynchronize/,
  );
  expect(found.find(({ rank }) => rank === 0)?.why).toContain(
    "rank 1 has not entered ncclAllReduce 4 of a communicator of 3 ranks",
  );
  const text = await rigel("hangs", "--threshold", "1s", "--segment", here.segment.path, "--bundle", bundles);
  expect(text.status).toBe(1);
  expect(text.stdout).toMatch(/^train +\d+ +1 +behind +\d+ hang-program +- +- +cuStreamSynchronize [\d.]+ s ago$/m);
  // Of those kept there the oldest go, and nobody's own files.
  const old = Array.from({ length: 25 }, (_, index) => `hang-2020-01-01T00-00-${10 + index}-000Z-1`);
  for (const made of old) mkdirSync(join(bundles, made));
  const own = Array.from({ length: 25 }, (_, index) => `hang-of-${index}.txt`);
  for (const file of own) writeFileSync(join(bundles, file), "mine");
  // One that cannot be kept does not keep back what was found.
  const nowhere = join(bundles, own[0] ?? "", "x");
  const more = ["--threshold", "1s", "--segment", here.segment.path, "--bundle"];
  const unkept = await rigel("hangs", ...more, nowhere);
  expect(unkept).toMatchObject({ status: 1, stdout: expect.stringContaining("HANGS: train") });
  expect(unkept.stderr).toContain("what shows it cannot be kept: ENOTDIR");
  const watched = await rigel("hangs", "--watch", ...more, nowhere);
  expect(watched).toMatchObject({
    status: 1,
    stdout: "",
    stderr: expect.stringContaining("--bundle: expected a folder"),
  });
  await rigel("hangs", ...more, bundles);
  const left = readdirSync(bundles).toSorted();
  expect(left.filter((file) => file.startsWith("hang-of-"))).toEqual(own.toSorted());
  expect(left.filter((file) => !file.startsWith("hang-of-"))).toHaveLength(20);
  const name = left.findLast((file) => /^hang-\d/.test(file)) ?? "";
  const kept = readdirSync(join(bundles, name));
  expect(kept).toEqual(expect.arrayContaining(["hangs.json", "stacks.txt", "trace.json"]));
  expect(readFileSync(join(bundles, name, "stacks.txt"), "utf8")).toContain("hang-program: S (sleeping)");
  expect(JSON.parse(readFileSync(join(bundles, name, "trace.json"), "utf8"))).toHaveProperty("traceEvents");
});

const noPySpy = Bun.which("py-spy") === null;
if (noPySpy) console.warn("hangs.test.ts looks at no Python stacks: there is no py-spy (pip install py-spy)");

test.skipIf(noPySpy)("of a Python program, where in it each thread is", async () => {
  await using here = await ward();
  const program = join(root, "test", "fixtures", "threads.py");
  const child = here.run(["python3", program, "stuck"], "train", "best-effort", {
    PYTHONPATH: here.native.files.python,
  });
  const bundles = join(here.scratch.path, "bundles");
  await here.until({ train: "synchronise" }, "--bundle", bundles);
  const [bundle = ""] = readdirSync(bundles);
  const stacks = readFileSync(join(bundles, bundle, `python-${child.pid}.txt`), "utf8");
  expect(stacks).toMatch(/wait \(.*threads\.py:\d+\)\n\s+train_step \(.*threads\.py:\d+\)\n\s+stuck \(/);
});

test("a rank that leaves a collective out; the others wait on the GPU", async () => {
  await using here = await ward();
  here.ranks("skip", 2, { RIGEL_SIM_NCCL: "gpu" });
  await here.untilFound(
    { "train 0": "collective", "train 1": "behind" },
    (found) => found.find(({ rank }) => rank === 0)?.thread?.call === "cuStreamSynchronize",
  );
});

test("a rank that never makes the communicator, NCCL being looked up by dlsym", async () => {
  await using here = await ward();
  here.ranks("absent", 2, {}, "dlsym");
  await here.until({ "train 0": "collective", "train 1": "behind" });
});

test("ranks that are well, also on a communicator that was split off", async () => {
  await using here = await ward();
  here.ranks("fine", 2, {}, "dlsym");
  const table = here.segment.table("communicators");
  const entered = (row: number): bigint => table.long(row, "entered");
  await until(() => ([0, 1, 16, 17].every((row) => entered(row) >= 20n) ? true : undefined));
  const keys = [0, 1, 16, 17].map((row) => table.long(row, "key"));
  expect([keys[0], keys[1]]).toEqual([keys[2], keys[3]]);
  expect(keys[0]).not.toBe(keys[1]);
  await here.until({ "train 0": "working", "train 1": "working" });
});

test("communicators that cannot be followed are told, as nobody is missed there", async () => {
  await using here = await ward();
  here.ranks("lost", 2);
  const lost = (slot: number): bigint => here.segment.table("clients").long(slot, "communicators_lost");
  await until(() => ([0, 1].every((slot) => lost(slot) > 0n) ? true : undefined));
  const found = await here.until({ "train 0": "working", "train 1": "working" });
  expect(found.map(({ communicators_lost, threads_lost }) => [communicators_lost, threads_lost])).toEqual([
    [1, 0],
    [1, 0],
  ]);
  const { stdout } = await rigel("hangs", "--segment", here.segment.path);
  for (const { pid, rank } of found)
    expect(stdout).toContain(`train (${pid}, rank ${rank}): 1 communicator of it cannot be followed`);
});

test("a kernel that does not end, a stopped program, one that is idle", async () => {
  await using here = await ward();
  here.start("spin", "best-effort", ["spin"]);
  const found = await here.until({ spin: "synchronise" });
  expect(found[0]?.why).toContain("the oldest launch not known to be finished is long_rigel_spin");
  expect(found[0]?.why).toContain("the last of 3 is short_rigel_spin");
  const stopped = here.start("stopped", "best-effort", ["idle"]);
  await here.until({ spin: "synchronise", stopped: "idle" });
  await here.stop(stopped, { spin: "synchronise", stopped: "stopped" });
  stopped.kill("SIGCONT");
  stopped.kill("SIGKILL");
  // Killed while it holds the simulated GPU's lock, it takes what is in flight with it, the kernel without an end too (driver-state.c).
  await here.until({ spin: ["synchronise", "idle"], stopped: "dead" });
});

test("a program whose main thread has ended is alive while it has others", async () => {
  await using here = await ward();
  const child = here.start("train", "best-effort", ["thread"]);
  while (stateOf(child.pid) !== "Z") await Bun.sleep(10);
  const hangs = await rigel("hangs", "--json", "--segment", here.segment.path);
  expect(hangs.stdout, hangs.stderr).toContain('"verdict": "idle"');
  child.kill("SIGKILL");
  await here.until({ train: "dead" });
});

test.each([
  ["gate", 0],
  ["suspended", 1],
])("a best-effort client that is held back (%s) does not hang", async (verdict, preempt) => {
  await using here = await ward();
  here.segment.apply({ preempt, starvation_us: 4_000_000_000, min_share_ppm: 0 });
  // Busy for an hour with kernels, and waiting for none: a high client that waits for all it has launched makes room.
  here.start("serve", "high", ["busy"]);
  here.start("train", "best-effort", ["loop"]);
  await here.until({ serve: "working", train: verdict });
});

/** What the report of a launch says of a hang, told to end once it has said so. `env`: of the launch. */
async function hangNotes(env: Record<string, string>): Promise<string[]> {
  using scratch = new Scratch();
  await make(join(root, "native"), "check-build");
  const program = join(root, "native", "build", "hang-program");
  const config = scratch.file("jobs.json", {
    device: "simulated",
    hang_s: 1,
    clients: [{ name: "train", class: "best-effort", command: [program, "spin"] }],
  });
  await using child = start(["launch", config, "--json"], { env });
  const stdout = child.stdout.text();
  let said = "";
  for await (const chunk of child.stderr) {
    const told = said.includes("hang: train");
    said += new TextDecoder().decode(chunk);
    if (said.includes("hang: train") && !told) child.kill("SIGTERM");
  }
  expect(await child.exited, said).toBe(143);
  const { notes } = z.object({ notes: z.array(z.string()) }).parse(JSON.parse(await stdout));
  const hang = notes.filter((note) => note.startsWith("hang: "));
  expect(hang[0]).toMatch(/^hang: train \(\d+\) waits in cuStreamSynchronize for work that does not finish/);
  return hang;
}

test("a launch tells of a hang and keeps what shows it, before it ends the clients", async () => {
  const [, kept] = await hangNotes({});
  const folder = /is in (\/.*)$/.exec(kept ?? "")?.[1] ?? "";
  expect(existsSync(join(folder, "trace.json"))).toBe(true);
});

test("the report of a launch says that what shows a hang was not kept", async () => {
  const [, kept] = await hangNotes({ XDG_CACHE_HOME: "/dev/null" });
  expect(kept).toStartWith("hang: what shows it cannot be kept: ENOTDIR");
});

test("`rigel run` tells of a hang of its own client alone, and keeps what shows it", async () => {
  using place = new Place();
  await make(join(root, "native"), "check-build");
  const command = ["--", join(root, "native", "build", "hang-program"), "spin"];
  const spin = (name: string, ...more: string[]) =>
    start(
      [
        ..."run --class best-effort --device simulated --segment".split(" "),
        place.segments,
        "--name",
        name,
        ...more,
        ...command,
      ],
      {
        cwd: place.path,
        env: { ...place.env, XDG_CACHE_HOME: place.path },
      },
    );
  // Ends the command as well, which would go on without it.
  await using ends = new AsyncDisposableStack();
  const ended = (child: ReturnType<typeof spin>) =>
    ends.adopt(child, async () => {
      child.kill("SIGTERM");
      await child.exited;
    });
  ended(spin("other", "--no-hang"));
  const hung = async () => (await rigel("hangs", "--threshold", "1s", "--segment", place.segments)).status === 1;
  await until(async () => (await hung()) || undefined);
  const child = ended(spin("train", "--hang", "1s"));
  let said = "";
  for await (const chunk of child.stderr) {
    said += new TextDecoder().decode(chunk);
    if (said.includes("what shows it is in ")) break;
  }
  expect(said).toMatch(/^rigel: hang: train \(\d+\) waits in cuStreamSynchronize for work that does not finish/m);
  expect(said).not.toContain("hang: other");
  const bundles = join(place.path, "rigel", "hangs");
  const [bundle = ""] = readdirSync(bundles);
  expect(existsSync(join(bundles, bundle, "trace.json"))).toBe(true);
});

test("what is kept of two launches at the same moment is in a folder each", async () => {
  await using one = await ward();
  await using other = await ward();
  using place = new Scratch();
  for (const here of [one, other]) {
    here.start("train", "best-effort", ["idle"]);
    while (here.segment.slots().length === 0) await Bun.sleep(10);
  }
  setSystemTime(new Date("2026-01-01T00:00:00.000Z"));
  try {
    const folders = await Promise.all(
      [one, other].map(async ({ segment }) => {
        const look = { segment: segment.path, at_ns: NOW, processes: [] };
        return await writeBundle(segment, hangsOf(look, look, 10), place.path);
      }),
    );
    const kept = folders.map((folder) =>
      z.object({ segment: z.string() }).parse(JSON.parse(readFileSync(join(folder, "hangs.json"), "utf8"))),
    );
    expect(kept.map(({ segment }) => segment)).toEqual([one.segment.path, other.segment.path]);
  } finally {
    setSystemTime();
  }
});

test("errors say what there is", async () => {
  using scratch = new Scratch();
  const nothing = await rigel("hangs", "--segment", scratch.path);
  expect(nothing).toMatchObject({ status: 0, stderr: "" });
  expect(nothing.stdout).toMatch(/^nothing runs under Rigel.*\n$/);
  const empty = await rigel("hangs", "--json", "--segment", scratch.path);
  expect(empty.status).toBe(0);
  expect(JSON.parse(empty.stdout)).toEqual({ schema: 1, hung: 0, segments: [] });
  const missing = await rigel("hangs", "--segment", join(scratch.path, "missing"));
  expect(missing).toMatchObject({ status: 2, stdout: "" });
  expect(missing.stderr).toContain("--segment: expected a segment file, or the folder of those, got ");
  expect(await rigel("hangs", "--threshold", "-1")).toMatchObject({ status: 2 });
});

test("--watch goes on when a terminal hangs up that nohup has made it ignore", async () => {
  using place = new Place();
  const shell = [
    "sh",
    "-c",
    'trap "" HUP; exec "$@"',
    "sh",
    ...commandLine(),
    "hangs",
    "--watch",
    "--segment",
    place.segments,
  ];
  await using watch = Bun.spawn(shell, { cwd: root, env: place.env, stdout: "ignore", stderr: "pipe" });
  expect(new TextDecoder().decode((await watch.stderr.getReader().read()).value)).toContain("watching 0 launches");
  watch.kill("SIGHUP");
  watch.kill("SIGTERM");
  expect(await watch.exited).toBe(143);
});

test("--watch fails where there is no room for what it finds, and not where nobody reads it", async () => {
  using place = new Place();
  const config = place.file("pair.json", place.pair());
  await using launch = place.start(["launch", config, "--segment", place.segments]);
  const watch = [...commandLine(), "hangs", "--watch", "--json", "--threshold", "500ms", "--segment", place.segments];
  const ended = async (into: string): Promise<number> => {
    const shell = ["bash", "-c", `set -o pipefail; "$0" "$@" ${into}`, ...watch];
    await using child = Bun.spawn(shell, { cwd: root, env: place.env, stdout: "ignore", stderr: "ignore" });
    return await child.exited;
  };
  expect(await Promise.all(["> /dev/full", "| true"].map(ended))).toEqual([1, 0]);
  launch.kill("SIGINT");
  expect(await launch.exited).toBe(130);
});

test("--watch sees launches that come later, and ends when nobody reads it any more or by a signal", async () => {
  using place = new Place();
  const options = ["hangs", "--watch", "--threshold", "500ms", "--segment", place.segments, "--bundle", place.path];
  await using silent = place.start(options);
  const reader = silent.stderr.getReader();
  expect(new TextDecoder().decode((await reader.read()).value)).toContain("watching 0 launches");
  const config = place.file("spin.json", await spinning());
  await using launch = place.start(["launch", config, "--duration", "600", "--segment", place.segments]);
  // The shell ends when both have ended, as soon as one line has been read.
  const shell = ["sh", "-c", '"$@" | sed -n "/\\"hung\\":1/{p;q;}"', "sh", ...commandLine(), ...options, "--json"];
  await using watch = Bun.spawn(shell, { cwd: root, env: place.env, stdout: "pipe", stderr: "ignore" });
  const line: unknown = JSON.parse(await watch.stdout.text());
  expect(line).toMatchObject({ schema: 1, hung: 1, processes: [{ name: "train", verdict: "synchronise" }] });
  await watch.exited;
  let said = "";
  while (!said.includes("waits in cuStreamSynchronize")) said += new TextDecoder().decode((await reader.read()).value);
  silent.kill("SIGHUP");
  expect(await silent.exited).toBe(129);
  launch.kill("SIGTERM");
  await launch.exited;
});

test("the name of a thread moves no cursor, in what rigel hangs and rigel contexts show", async () => {
  using place = new Place();
  const { files } = await Native.load();
  // A thread has the name of the program that it runs.
  const program = join(place.path, "\u001b[2J\u001b]0;x");
  symlinkSync(files.replay, program);
  const clients = [{ name: "train", class: "best-effort", command: [program, "--profile", "tiny.csv"] }];
  const config = place.file("jobs.json", { device: "simulated", clients });
  await using launch = place.start(["launch", config, "--segment", place.segments]);
  for (const command of ["hangs", "contexts"]) {
    const { stdout } = await until(async () => {
      const found = await place.rigel(command, "--segment", place.segments);
      return found.stdout.includes("[2J") ? found : undefined;
    });
    expect(stdout).toContain(" ?[2J?]0;x");
    expect(stdout).not.toContain("\u001b");
  }
  launch.kill("SIGINT");
  expect(await launch.exited).toBe(130);
});
