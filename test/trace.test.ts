/**
 * trace.test.ts: `rigel trace` and `launch --trace`, on the simulated GPU: the format, the counts, live, ended and killed clients.
 */

import { expect, setDefaultTimeout, test } from "bun:test";
import { existsSync, mkdirSync, readFileSync, readdirSync } from "node:fs";
import { join } from "node:path";
import { z } from "zod";
import { Native, make } from "../src/native.ts";
import { type Operation, isLatest, spread } from "../src/records.ts";
import { Scratch, TINY_PROFILE, after, cramped, reportOf, rigel, root, start } from "./rigel.ts";
import { Place, until } from "./serving.ts";
import { World } from "./world.ts";

setDefaultTimeout(300_000);

/*
 * The published format: "Trace Event Format" by the Chromium authors. Every event has ph, pid, tid; all but metadata a ts; X a
 * dur; b and e an id and a category; C numbers as arguments; s and f, of a flow, an id, and a span that they lie in.
 */
const common = { pid: z.int(), tid: z.int(), name: z.string().min(1) };
const moment = z.number().nonnegative();
const eventSchema = z.discriminatedUnion("ph", [
  z.strictObject({
    ph: z.literal("M"),
    ...common,
    name: z.enum(["process_name", "process_sort_index", "thread_name"]),
    args: z.union([z.strictObject({ name: z.string().min(1) }), z.strictObject({ sort_index: z.int() })]),
  }),
  z.strictObject({
    ph: z.literal("X"),
    ...common,
    ts: moment,
    dur: moment,
    cat: z.string().min(1),
    args: z.looseObject({ call: z.string(), continued: z.boolean().optional(), unfinished: z.boolean().optional() }),
  }),
  z.strictObject({ ph: z.literal("C"), ...common, ts: moment, args: z.record(z.string(), z.number()) }),
  z.strictObject({
    ph: z.enum(["b", "e"]),
    ...common,
    ts: moment,
    cat: z.string().min(1),
    id: z.string().min(1),
    args: z.looseObject({}).optional(),
  }),
  z.strictObject({
    ph: z.enum(["s", "f"]),
    ...common,
    ts: moment,
    cat: z.string().min(1),
    id: z.string().min(1),
    bp: z.literal("e").optional(),
  }),
]);
type Event = z.infer<typeof eventSchema>;
const traceSchema = z.strictObject({
  traceEvents: z.array(eventSchema),
  displayTimeUnit: z.enum(["ms", "ns"]),
  otherData: z.record(z.string(), z.string()),
});

const ns = (us: number): number => Math.round(us * 1000);

/** Reads a trace and checks all that the format asks for. */
function validTrace(path: string): Event[] {
  const { traceEvents } = traceSchema.parse(JSON.parse(readFileSync(path, "utf8")));
  const spans = Map.groupBy(
    traceEvents.filter((event) => event.ph === "X"),
    ({ pid, tid }) => `${pid} ${tid}`,
  );
  for (const own of spans.values()) {
    // Of one thread, each lies in the one before it or begins when that has ended. To the nanosecond.
    const open: number[] = [];
    for (const { ts, dur } of own.toSorted((a, b) => a.ts - b.ts || b.dur - a.dur)) {
      while (open.length > 0 && (open.at(-1) ?? 0) <= ns(ts)) open.pop();
      const end = ns(ts) + ns(dur);
      if (open.length > 0) expect(end).toBeLessThanOrEqual(open.at(-1) ?? 0);
      if (dur > 0) open.push(end);
    }
  }
  // What begins ends, once, and not before it began; and no two have the same name for it.
  const begun = new Map<string, number>();
  const ids = traceEvents.flatMap((event) => (event.ph === "b" ? [event.id] : []));
  expect(new Set(ids).size).toBe(ids.length);
  for (const event of traceEvents) {
    if (event.ph === "b") {
      expect(begun.has(event.id)).toBe(false);
      begun.set(event.id, event.ts);
    } else if (event.ph === "e") {
      expect(event.ts).toBeGreaterThanOrEqual(begun.get(event.id) ?? Number.POSITIVE_INFINITY);
      begun.delete(event.id);
    }
  }
  expect([...begun]).toEqual([]);
  // A flow has a begin and an end, in this order, each within a span of its thread.
  const flows = Map.groupBy(
    traceEvents.flatMap((event) => (event.ph === "s" || event.ph === "f" ? [event] : [])),
    ({ id }) => id,
  );
  for (const [id, flow] of flows) {
    expect(flow.map(({ ph }) => ph)).toEqual(["s", "f"]);
    expect(flow[0]?.ts, id).toBeLessThanOrEqual(flow[1]?.ts ?? -1);
    for (const { pid, tid, ts } of flow)
      expect((spans.get(`${pid} ${tid}`) ?? []).some((at) => at.ts <= ts && ns(ts) < ns(at.ts) + ns(at.dur))).toBe(
        true,
      );
  }
  // Every process and thread that does something has a name.
  const named = new Set(
    traceEvents.flatMap(({ ph, name, pid, tid }) => (ph === "M" && name.endsWith("name") ? `${pid} ${tid}` : [])),
  );
  for (const { pid, tid } of traceEvents) expect(named).toContain(`${pid} ${tid}`);
  return traceEvents;
}

function spansOf(events: readonly Event[], pid: number, category: string): (Event & { ph: "X" })[] {
  return events.flatMap((event) => (event.ph === "X" && event.pid === pid && event.cat === category ? [event] : []));
}

function span(ts: number, dur: number): object {
  return { ph: "X", cat: "sync", name: "x", pid: 1, tid: 1, ts, dur, args: { call: "x" } };
}

test("a validator that finds spans that cross, and requests that do not end", () => {
  using scratch = new Scratch();
  const of = (...traceEvents: object[]): string =>
    scratch.file("bad.json", { traceEvents, displayTimeUnit: "ms", otherData: {} });
  const name = { ph: "M", name: "thread_name", pid: 1, tid: 1, args: { name: "main" } };
  expect(() => validTrace(of(name, span(0, 5), span(1, 2), span(5, 1)))).not.toThrow();
  expect(() => validTrace(of(name, span(0, 5), span(3, 4)))).toThrow();
  expect(() => validTrace(of(span(0, 5)))).toThrow();
  const begin = { ph: "b", cat: "request", name: "r", id: "1", pid: 1, tid: 1, ts: 1 };
  expect(() => validTrace(of(name, begin))).toThrow();
  expect(() => validTrace(of(name, begin, { ...begin, ph: "e", ts: 0 }))).toThrow();
  const whole = [begin, { ...begin, ph: "e", ts: 2 }];
  expect(() => validTrace(of(name, ...whole))).not.toThrow();
  expect(() => validTrace(of(name, ...whole, ...whole))).toThrow();
  const flow = { cat: "wait", name: "f", id: "1", pid: 1, tid: 1 };
  const [from, to] = [
    { ph: "s", ts: 0, ...flow },
    { ph: "f", bp: "e", ts: 5, ...flow },
  ];
  expect(() => validTrace(of(name, span(0, 1), span(5, 1), from, to))).not.toThrow();
  expect(() => validTrace(of(name, span(0, 1), span(5, 1), from))).toThrow();
  expect(() => validTrace(of(name, span(0, 1), span(5, 1), to, from))).toThrow();
  expect(() => validTrace(of(name, span(0, 1), from, to))).toThrow();
});

const summarySchema = z.object({
  schema: z.literal(1),
  path: z.string(),
  clients: z.array(
    z.object({ name: z.string(), pid: z.int(), segment: z.string(), events: z.int(), recorded: z.int() }),
  ),
  events: z.int(),
});

/** Replays that are clients. */
class Replays extends World {
  start(name: string, kind: "high" | "best-effort", ...args: string[]): Bun.Subprocess {
    const profile = this.scratch.file("tiny.csv", TINY_PROFILE);
    return this.run([this.native.files.replay, "--profile", profile, ...args], name, kind);
  }

  async until(condition: () => boolean): Promise<void> {
    await until(() => condition() || undefined);
  }

  async trace(...args: string[]): Promise<{ events: Event[]; summary: z.infer<typeof summarySchema> }> {
    const path = join(this.scratch.path, "trace.json");
    const result = await rigel("trace", ...args, "--segment", this.segment.path, "-o", path, "--json");
    expect(result.status, result.stderr).toBe(0);
    return { events: validTrace(path), summary: summarySchema.parse(JSON.parse(result.stdout)) };
  }
}

test("what a trace shows is what was counted", async () => {
  await using world = new Replays(await Native.load());
  const high = world.start("serve", "high", "--iterations", "100");
  const low = world.start("train", "best-effort", "--iterations", "300");
  await Promise.all([high.exited, low.exited]);
  const { events, summary } = await world.trace();
  for (const slot of world.segment.slots()) {
    const { counters } = world.segment.read(slot).usage;
    const count = (kind: string): number => spansOf(events, slot.pid, kind).length;
    const begun = (call: string): number =>
      spansOf(events, slot.pid, "gate").filter(({ args }) => args.call === call && !args.continued).length;
    expect({
      launches: count("launch"),
      copies: count("copy"),
      memsets: count("memset"),
      suspensions: spansOf(events, slot.pid, "suspension").filter(({ args }) => !args.continued).length,
      requests: events.filter(({ ph, pid }) => ph === "e" && pid === slot.pid).length,
      inflight_waits: begun("wait_inflight"),
    }).toEqual({
      launches: counters.launches,
      copies: counters.copies,
      memsets: counters.memsets,
      suspensions: counters.suspensions,
      requests: counters.requests,
      inflight_waits: counters.inflight_waits,
    });
    // Each request is waited for once, and an arrow leads there from its last launch; on a busy machine the agent may end one sooner.
    const { own } = world.segment.ended(slot);
    expect(own).toBeGreaterThan(slot.name === "serve" ? 50 : -1);
    const arrows = events.filter(({ ph, pid }) => ph === "f" && pid === slot.pid);
    expect(arrows.length).toBeLessThanOrEqual(count("sync") + count("copy"));
    expect(arrows.length).toBeGreaterThanOrEqual(own);
    // What is queued goes up by each launch, and to nothing at the end of a wait for all of it.
    const queued = depths(events, slot.pid, "not waited for");
    expect(queued.filter((depth, index) => depth > (queued[index - 1] ?? 0))).toHaveLength(counters.launches);
    expect(queued.every((depth, index) => depth === 0 || depth === (queued[index - 1] ?? 0) + 1)).toBe(true);
    expect(queued.filter((depth) => depth === 0).length).toBeGreaterThanOrEqual(own);
    expect(queued.at(-1)).toBe(0);
    // And a few with which a replay finds out how fast the device is.
    expect(counters.launches).toBeGreaterThanOrEqual(slot.name === "serve" ? 100 : 300);
    // Each wait has a piece at least. How long they are is no more than what is counted, but for how exactly the clock of the thread, the
    // processor's counter, is known; between two pieces of a wait a thread may lose its processor.
    const pieces = spansOf(events, slot.pid, "gate");
    const waited_us = pieces.reduce((sum, { dur }) => sum + dur, 0);
    expect(pieces.length).toBeGreaterThanOrEqual(counters.inflight_waits + counters.gate_waits);
    expect(waited_us).toBeLessThanOrEqual(((counters.gate_wait_ns + counters.inflight_wait_ns) / 1000) * 1.1 + 1);
    if (pieces.length > 0) expect(waited_us).toBeGreaterThan(0);
    // The profile has a wait in each iteration.
    expect(count("sync")).toBeGreaterThanOrEqual(slot.name === "serve" ? 100 : 300);
    expect(spansOf(events, slot.pid, "launch")[0]?.name).toBe("rigel_spin");
  }
  expect(summary.events).toBe(events.length);
  expect(summary.clients.map(({ name }) => name).toSorted()).toEqual(["serve", "train"]);
});

test("what was recorded a lap ago in a place that is taken again is left out", () => {
  // A ring of 8, of which 11 places have been taken: of places 0 to 2 the second lap is due, of the others the first.
  expect([0, 1, 2, 3, 7].filter((place) => isLatest(1n, place, 8, 11))).toEqual([3, 7]);
  // Or what has been recorded since those were counted.
  expect([0, 1, 2, 3, 7].filter((place) => isLatest(2n, place, 8, 11))).toEqual([0, 1, 2, 3, 7]);
  expect([0, 1, 2, 3, 7].filter((place) => isLatest(3n, place, 8, 11))).toEqual([0, 1, 2]);
  expect(isLatest(1n, 0, 8, 0)).toBe(true);
  expect(isLatest(2n, 0, 8, 0)).toBe(false);
  // The number of a lap goes from 4095 to 1.
  expect([4094n, 4095n, 1n, 2n].filter((lap) => isLatest(lap, 0, 8, 8 * 4094 + 1))).toEqual([4095n, 1n]);
  expect([4094n, 4095n, 1n, 2n].filter((lap) => isLatest(lap, 0, 8, 8 * 4095 + 1))).toEqual([1n, 2n]);
});

function launchAt(tid: number, at_ns: number): Operation {
  return {
    kind: "launch",
    operation: "cuLaunchKernel",
    tid,
    at_ns,
    duration_ns: null,
    stream: 0,
    failed: false,
    continued: false,
    kernel: "gemm",
    inflight: 0,
    argument: 0,
  };
}

/** Whose operations come when, of [thread, time] in order. */
function spreadTimes(...given: [tid: number, at_ns: number][]): [tid: number, at_ns: number][] {
  return spread(given.map(([tid, at_ns]) => launchAt(tid, at_ns))).map(({ tid, at_ns }) => [tid, at_ns]);
}

test("launches of a thread that share a reading of the clock are spread until what came next", () => {
  // Each thread's for itself; the first keeps its time, and so do those that nothing came after.
  expect(spreadTimes([1, 0], [1, 0], [2, 100], [1, 0], [1, 0], [2, 300], [1, 4000], [1, 4000])).toEqual([
    [1, 0],
    [2, 100],
    [2, 300],
    [1, 1000],
    [1, 2000],
    [1, 3000],
    [1, 4000],
    [1, 4000],
  ]);
  // A launch takes microseconds, whatever the program does after it.
  expect(spreadTimes([1, 0], [1, 0], [1, 1e9])).toEqual([
    [1, 0],
    [1, 20_000],
    [1, 1e9],
  ]);
  expect(spread([])).toEqual([]);
  // A request has its beginning's time at its end as well, and a wait its own.
  const request = { ...launchAt(0, 5), kind: "request" as const };
  expect(
    spread([request, request, launchAt(1, 7), { ...launchAt(1, 7), kind: "sync" }]).map(({ at_ns }) => at_ns),
  ).toEqual([5, 5, 7, 7]);
});

test("what the gate counts as in flight is there while it counts, and not after", async () => {
  await using world = new Replays(await Native.load());
  // Nobody is taken off the GPU, so that the gate counts.
  world.segment.configure({ policy: "priority", preempt: false });
  world.start("train", "best-effort");
  const train = (): number => world.segment.slots()[0]?.pid ?? 0;
  const recorded = (): bigint => world.segment.table("clients").long(0, "records");
  await world.until(() => recorded() > 500n);
  const gated = depths((await world.trace()).events, train(), "in flight");
  expect(Math.max(...gated)).toBeGreaterThan(0);
  // A high client is not counted, whatever was when it became one.
  world.segment.want("train", { class: "high" });
  await world.until(() => world.segment.slots()[0]?.class === "high");
  const from = recorded();
  await world.until(() => recorded() > from + 5000n);
  expect(depths((await world.trace()).events, train(), "in flight")).toEqual([]);
});

test("a live client, one of several, and what it did last", async () => {
  await using world = new Replays(await Native.load());
  world.start("serve", "high");
  const child = world.start("train", "best-effort");
  const recorded = (): bigint[] => [0, 1].map((slot) => world.segment.table("clients").long(slot, "records"));
  await world.until(() => recorded().every((count) => count > 500n));
  const { events, summary } = await world.trace("train");
  const [train] = summary.clients;
  expect(summary.clients).toHaveLength(1);
  expect(train?.name).toBe("train");
  expect(train?.recorded).toBeGreaterThan(500);
  expect(new Set(events.map(({ pid }) => pid))).toEqual(new Set([train?.pid ?? 0]));
  expect(spansOf(events, train?.pid ?? 0, "launch").length).toBeGreaterThan(10);
  // Of one that is dead, up to the last that it did. What has not ended before the last 20 ms is there whole.
  child.kill("SIGKILL");
  await child.exited;
  world.segment.reap();
  const whole = ends((await world.trace(String(train?.pid))).events);
  const short = ends((await world.trace(String(train?.pid), "--last", "20ms")).events);
  const from_us = Math.max(...whole) - 20_000;
  expect(whole.filter((end) => end < from_us - 1).length).toBeGreaterThan(0);
  expect(short.length).toBeGreaterThan(0);
  expect(short.filter((end) => end < from_us - 1)).toEqual([]);
});

test("a client that was killed: what it was in is there, and stays", async () => {
  await using world = new Replays(await Native.load());
  const child = world.start("train", "best-effort");
  await world.until(() => world.segment.table("clients").long(0, "records") > 1000n);
  child.kill("SIGKILL");
  await child.exited;
  world.segment.reap();
  const { events, summary } = await world.trace("train");
  const again = await world.trace("train");
  expect(again.events.map(without)).toEqual(events.map(without));
  expect(spansOf(events, summary.clients[0]?.pid ?? 0, "launch").length).toBeGreaterThan(100);
});

test("nothing is recorded where it is switched off, which takes effect at once", async () => {
  await using world = new Replays(await Native.load());
  world.segment.apply({ trace: 0 });
  world.start("train", "best-effort");
  const launches = (): number => world.segment.read(world.segment.slots()[0] ?? never()).usage.counters.launches;
  await world.until(() => world.segment.slots().length === 1 && launches() > 100);
  expect(world.segment.table("clients").long(0, "records")).toBe(0n);
  world.segment.apply({ trace: 1 });
  await world.until(() => world.segment.table("clients").long(0, "records") > 100n);
});

/** When calls have ended and counters changed. */
function ends(events: readonly Event[]): number[] {
  return events.flatMap((event) => (event.ph === "X" ? [event.ts + event.dur] : event.ph === "C" ? [event.ts] : []));
}

/** Values of a counter, in the order of time. */
function depths(events: readonly Event[], pid: number, name: string): number[] {
  return events
    .flatMap((event) => (event.ph === "C" && event.pid === pid && event.name === name ? [event] : []))
    .toSorted((a, b) => a.ts - b.ts)
    .flatMap(({ args }) => args["launches"] ?? []);
}

function without({ ph, name, tid }: Event): unknown[] {
  return [ph, name, tid];
}

function never(): never {
  throw new Error("no slot");
}

test("launch --trace writes it at the end", async () => {
  using scratch = new Scratch();
  const profile = scratch.file("tiny.csv", TINY_PROFILE);
  const config = scratch.file("jobs.json", {
    device: "simulated",
    clients: [{ name: "a", class: "high", replay: { profile, iterations: 20 } }],
  });
  const path = join(scratch.path, "trace.json");
  const result = await rigel("launch", config, "--trace", path, "--json");
  expect(result.status, result.stderr).toBe(0);
  const launches = validTrace(path).filter((event) => event.ph === "X" && event.cat === "launch");
  expect(launches.length).toBeGreaterThanOrEqual(20);
});

test("a launch without recorder has nothing to trace, and says so before anything starts if a trace is asked for", async () => {
  using place = new Place();
  const config = place.file("jobs.json", place.pair({ recorder: false }));
  const asked = await place.rigel("launch", config, "--trace", join(place.path, "t.json"));
  expect(asked).toMatchObject({ status: 2, stdout: "" });
  expect(asked.stderr).toContain("--trace: expected a configuration whose recorder is on");
  await using launch = place.start(["launch", config, "--segment", place.segments, "--duration", "600"]);
  const at = ["--segment", place.segments];
  const clientsSchema = z.array(z.object({ name: z.string(), launches: z.int() }));
  await until(async () => {
    const { segments } = JSON.parse((await place.rigel("ps", "--json", ...at)).stdout);
    const clients = clientsSchema.parse(segments[0]?.clients ?? []);
    return clients.length === 2 && clients.every(({ launches }) => launches > 100) ? true : undefined;
  });
  const traced = await place.rigel("trace", "-o", join(place.path, "t.json"), "--json", ...at);
  const { clients } = summarySchema.parse(JSON.parse(traced.stdout));
  expect(clients.map(({ recorded }) => recorded)).toEqual([0, 0]);
  launch.kill("SIGINT");
  await launch.exited;
});

test("launch --trace says before anything starts that it cannot be written, and fails where it cannot any more", async () => {
  using scratch = new Scratch();
  const gone = join(scratch.path, "gone");
  mkdirSync(gone);
  const config = scratch.file("jobs.json", {
    device: "simulated",
    clients: [{ name: "a", class: "high", command: ["rm", "-r", gone] }],
  });
  const nowhere = await rigel("launch", config, "--trace", join(scratch.path, "nowhere", "t.json"), "--json");
  expect(nowhere).toMatchObject({ status: 2, stdout: "" });
  expect(nowhere.stderr).toMatch(/--trace: .*t\.json: cannot be written \(ENOENT/);
  expect(existsSync(gone)).toBe(true);
  const lost = await rigel("launch", config, "--trace", join(gone, "t.json"), "--json");
  expect(existsSync(gone)).toBe(false);
  expect(lost.status, lost.stderr).toBe(1);
  expect(JSON.parse(lost.stdout).notes).toContainEqual(expect.stringContaining("no trace was written: "));
});

test("clients of one process keep their requests apart, and are drawn with it", async () => {
  await make(join(root, "native"), "check-build");
  using scratch = new Scratch();
  const command = [join(root, "native", "build", "gpipe-program"), "right", "1", join(scratch.path, "losses")];
  const gpipe = { name: "gpipe", class: "best-effort", threads: true, device: "all", command };
  const config = scratch.file("jobs.json", { device: "simulated", simulated: { devices: 2 }, clients: [gpipe] });
  const path = join(scratch.path, "trace.json");
  const result = await rigel("launch", config, "--trace", path, "--json");
  expect(result.status, result.stderr).toBe(0);
  const events = validTrace(path);
  // Two of the four clients are high ones, and each counts its requests from 1.
  const numbers = events.flatMap((event) => (event.ph === "b" ? [event.args?.["request"]] : []));
  expect(numbers.filter((number) => number === 1)).toHaveLength(2);
  const names = events.flatMap((event) =>
    event.ph === "M" && event.name === "process_name" && "name" in event.args ? [event.args.name] : [],
  );
  expect(new Set(names)).toEqual(new Set([`gpipe (${events[0]?.pid})`]));
});

test("that cannot be written whole leaves the one before", async () => {
  await using world = new Replays(await Native.load());
  await world.start("train", "best-effort", "--iterations", "100").exited;
  const path = world.scratch.file("trace.json", "before");
  const files = readdirSync(world.scratch.path);
  const broken = await cramped("trace", "--segment", world.segment.path, "-o", path);
  expect(broken.stderr).toContain(`${path}: cannot be written (EFBIG`);
  expect(broken.status).toBe(1);
  expect(readFileSync(path, "utf8")).toBe("before");
  expect(readdirSync(world.scratch.path)).toEqual(files);
  const full = await rigel("trace", "--segment", world.segment.path, "-o", "/dev/full");
  expect(full.stderr).toContain("/dev/full: cannot be written (ENOSPC");
  expect(full.status).toBe(1);
  const { status } = await rigel("trace", "--segment", world.segment.path, "-o", path);
  expect(status).toBe(0);
  validTrace(path);
});

test("goes to standard output alone where that is asked for", async () => {
  await using world = new Replays(await Native.load());
  const child = world.start("train", "best-effort", "--iterations", "3");
  await child.exited;
  const printed = await rigel("trace", "--segment", world.segment.path, "-o", "-");
  expect(printed.status, printed.stderr).toBe(0);
  const path = join(world.scratch.path, "trace.json");
  await rigel("trace", "--segment", world.segment.path, "-o", path);
  expect(JSON.parse(printed.stdout).traceEvents).toHaveLength(
    JSON.parse(readFileSync(path, "utf8")).traceEvents.length,
  );
  const both = await rigel("trace", "--segment", world.segment.path, "-o", "-", "--json");
  expect(both).toMatchObject({ status: 2, stdout: "" });
});

test("on standard output that nobody reads to its end it says so, and not how much that was", async () => {
  await using world = new Replays(await Native.load());
  const child = world.start("train", "best-effort", "--iterations", "200");
  await child.exited;
  await using unread = start(["trace", "--segment", world.segment.path, "-o", "-"]);
  await unread.stdout.cancel(); // long before it writes
  expect(await unread.stderr.text()).toBe(
    "rigel: standard output: closed by whoever read it, before the end of the trace\n",
  );
  expect(await unread.exited).toBe(0);
  // Of a file without room for it nobody has gone.
  const noRoom = await after("exec > /dev/full", root, ["trace", "--segment", world.segment.path, "-o", "-"]);
  expect(noRoom).toMatchObject({
    status: 1,
    stderr: "rigel: standard output cannot be written (ENOSPC: no space left on device, write)\n",
  });
});

test("errors say what there is", async () => {
  await using world = new Replays(await Native.load());
  const path = join(world.scratch.path, "trace.json");
  const nothing = await rigel("trace", "--segment", world.segment.path, "-o", path);
  expect(nothing).toMatchObject({ status: 2, stdout: "" });
  expect(nothing.stderr).toContain("nothing runs under Rigel");
  const child = world.start("train", "best-effort", "--iterations", "1");
  await child.exited;
  const other = await rigel("trace", "serve", "--segment", world.segment.path, "-o", path);
  expect(other).toMatchObject({ status: 2 });
  expect(other.stderr).toContain("no client serve runs under Rigel; there are train");
  const unwritable = await rigel("trace", "--segment", world.segment.path, "-o", join(path, "no", "such"));
  expect(unwritable).toMatchObject({ status: 2 });
  expect(unwritable.stderr).toContain("cannot be written");
  const time = await rigel("trace", "--last", "never");
  expect(time).toMatchObject({ status: 2 });
  expect(existsSync(path)).toBe(false);
});

/** Ranges begun and ended, by name, as native/test/nvtx-tool.c counts them; undefined: it was not loaded. */
async function ranges(nvtx: boolean | undefined, tool?: string) {
  await make(join(root, "native"), "check-build");
  using scratch = new Scratch();
  scratch.file("tiny.csv", TINY_PROFILE);
  const counts = join(scratch.path, "counts");
  const env = {
    NVTX_INJECTION64_PATH: tool ?? join(root, "native", "build", "nvtx-tool.so"),
    NVTX_TOOL_COUNTS: counts,
  };
  const replay = { profile: "tiny.csv", iterations: 50 };
  const client = { name: "train", class: "best-effort", replay, env };
  const config = scratch.file("jobs.json", { device: "simulated", nvtx, clients: [client] });
  const result = await rigel("launch", config, "--json");
  expect(result.status, result.stderr).toBe(0);
  const [{ launches } = { launches: 0 }] = reportOf(result).clients;
  const lines = existsSync(counts) ? readFileSync(counts, "utf8").trim().split("\n") : undefined;
  const found = lines?.map((line) => {
    const [name = "", begun = "", ended = ""] = line.split(" ");
    return [name, { begun: Number(begun), ended: Number(ended) }] as const;
  });
  return { launches, stderr: result.stderr, found: found && new Map(found) };
}

test("NVTX ranges stand round every operation where a tool listens and the user wants them, and nowhere else", async () => {
  const { launches, found } = await ranges(true);
  expect(launches).toBeGreaterThanOrEqual(50);
  expect(found?.get("cuLaunchKernel")).toEqual({ begun: launches, ended: launches });
  for (const { begun, ended } of found?.values() ?? []) expect(ended).toBe(begun);
  expect(found?.get("cuStreamSynchronize")?.begun).toBeGreaterThanOrEqual(50);
  expect(found?.has("none")).toBe(false);
  expect((await ranges(undefined)).found).toBeUndefined();
});

test("NVTX ranges are left out, with the reason, where what listens is no tool", async () => {
  const { launches, found, stderr } = await ranges(true, join(root, "native", "build", "second-preload.so"));
  expect(launches).toBeGreaterThanOrEqual(50);
  expect(found).toBeUndefined();
  expect(stderr).toContain("is no tool for NVTX; running without NVTX ranges");
});
