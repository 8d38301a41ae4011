/** stats.test.ts: a running launch seen from another process: found, read twice, and gone when it has ended. */

import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { readFileSync, readdirSync } from "node:fs";
import { join } from "node:path";
import { Segments } from "../src/discover.ts";
import { Native } from "../src/native.ts";
import { Segment } from "../src/segment.ts";
import { type Stats, readingOf, statsOf, statsSchema } from "../src/stats.ts";
import { changes } from "../src/watcher.ts";
import { Scratch, TINY_PROFILE, start } from "./rigel.ts";
import { World } from "./world.ts";

let scratch: Scratch;
let native: Native;

beforeAll(async () => {
  scratch = new Scratch();
  scratch.file("tiny.csv", TINY_PROFILE);
  native = await Native.load();
});
afterAll(() => scratch[Symbol.dispose]());

/** Polls until a condition gives something. */
async function until<T>(condition: () => T | undefined): Promise<T> {
  for (;;) {
    const found = condition();
    if (found !== undefined) return found;
    await Bun.sleep(20);
  }
}

/** The events of what has changed between two looks: what, of which process, and how it ended. */
function said(before: Stats, now: Stats): string[] {
  return changes("2026-01-01T00:00:00.000Z", now, before).map(
    ({ event, data }) => `${event} ${"pid" in data ? data.pid : ""} ${"state" in data ? data.state : ""}`,
  );
}

describe("a segment seen from outside", () => {
  test("is found, shows clients, rates and devices as JSON, and is gone with its launch", async () => {
    const config = scratch.file("config.json", {
      device: "simulated",
      clients: [
        { name: "serve", class: "high", replay: { profile: "tiny.csv", rate_per_s: 50 } },
        { name: "train", class: "best-effort", replay: { profile: "tiny.csv" }, memory: "1GiB", weight: 2 },
      ],
    });
    const segments = new Segments(native, scratch.path);
    expect(segments.live()).toEqual([]);
    await using child = start(["launch", config, "--duration", "600", "--segment", scratch.path]);
    const ended = child.stderr.text();
    const segment = await until(() => segments.live()[0]);
    const first = await until(() => {
      const reading = readingOf(segment);
      // Who reports is measured by that from then on.
      const both = statsOf(reading).clients.filter(({ iterations }) => (iterations ?? 0) > 0);
      return both.length === 2 ? reading : undefined;
    });
    const second = await until(() => {
      const reading = readingOf(segment);
      const rates = statsOf(reading, first).clients.map((client) => client.rates?.requests.count ?? 0);
      return rates.every((count) => count >= 5) ? reading : undefined;
    });
    const stats = statsOf(second, first);
    expect(statsSchema.parse(JSON.parse(JSON.stringify(stats)))).toEqual(stats);
    expect(stats).toMatchObject({
      schema: 1,
      segment: { path: segment.path, creator_pid: child.pid, refused: 0, overwritten: 0, processes: 2 },
      policy: "slo",
      settings: { policy: 2, stale_ms: 1000 },
      devices: [{ index: 0, name: "NVIDIA H200 (simulated)", uuid: expect.stringMatching(/^GPU-[0-9a-f-]{36}$/) }],
    });
    const [serve, train] = ["serve", "train"].map((name) => stats.clients.find((client) => client.name === name));
    expect(serve).toMatchObject({ class: "high", state: "live", devices: [0], memory: { limit_bytes: null } });
    expect(train).toMatchObject({ class: "best-effort", state: "live", weight: 2, memory: { limit_bytes: 2 ** 30 } });
    for (const client of [serve, train]) {
      const { rates, processes } = client ?? {};
      expect(processes).toHaveLength(1);
      expect(processes?.[0]?.pid).not.toBe(child.pid);
      expect(rates?.requests.p50_ms ?? 0).toBeGreaterThan(0.1);
      expect(rates?.requests.p99_ms ?? 0).toBeGreaterThanOrEqual(rates?.requests.p50_ms ?? 0);
      // Of the interval alone: fewer than ever.
      expect(rates?.requests.count ?? 0).toBeLessThan(client?.requests.count ?? 0);
      const perSecond = (rates?.requests.count ?? 0) / (rates?.interval_s ?? 0);
      // The interval is told in whole microseconds.
      expect((rates?.requests_per_s ?? 0) / perSecond).toBeCloseTo(1, 3);
    }
    expect(statsOf(second).clients.every(({ rates }) => rates === null)).toBe(true);
    // How long each request waited for the GPU, in the order in which they came, and none of them twice.
    const slot = segment.slots().find(({ name }) => name === "serve");
    if (!slot) throw new Error("no slot");
    process.kill(slot.pid, "SIGSTOP");
    // Of its threads each stops when it next runs.
    const tasks = `/proc/${slot.pid}/task`;
    const stateOf = (task: string): string =>
      /\) (\w)/.exec(readFileSync(join(tasks, task, "stat"), "utf8"))?.[1] ?? "";
    await until(() => readdirSync(tasks).every((task) => stateOf(task) === "T") || undefined);
    const { waited, latest } = segment.waits(slot, 0n);
    expect(latest.length).toBe(Math.min(Number(waited), 255));
    for (const { worked_ms, waited_ms } of latest) expect([worked_ms >= 0, waited_ms > 0]).toEqual([true, true]);
    expect(latest.every(({ kind }) => kind !== undefined)).toBe(true);
    expect(latest.every(({ stayed }) => stayed !== undefined)).toBe(true);
    expect(segment.waits(slot).latest).toEqual([]);
    expect(segment.waits(slot, waited - 3n).latest.slice(0, 3)).toEqual(latest.slice(-3));
    process.kill(slot.pid, "SIGCONT");
    child.kill("SIGINT");
    await child.exited;
    expect(segments.live(), await ended).toEqual([]);
    expect(child.exitCode).toBe(130);
  });

  test("an exit is told also where the next process of the client has its slot by the next look", async () => {
    const config = scratch.file("again.json", {
      device: "simulated",
      clients: [{ name: "train", class: "best-effort", replay: { profile: "tiny.csv" } }],
    });
    const segments = new Segments(native, scratch.path);
    await using child = start(["launch", config, "--duration", "600", "--segment", scratch.path]);
    const ended = child.stderr.text();
    const before = await until(() => {
      const stats = segments.live().map((segment) => statsOf(readingOf(segment)))[0];
      return stats?.clients[0]?.processes[0] ? stats : undefined;
    });
    child.kill("SIGINT");
    await ended;
    const [client] = before.clients;
    const [process] = client?.processes ?? [];
    if (!client || !process) throw new Error("no process");
    const next = { ...process, pid: process.pid + 1, attached_ms: process.attached_ms + 500 };
    const now = { ...before, clients: [{ ...client, processes: [next] }] };
    expect(said(before, before)).toEqual([]);
    expect(said(before, now)).toEqual([`exit ${process.pid} gone`, `attach ${next.pid} `]);
    // Of one whose end was seen there is nothing more to say.
    const over = { ...before, clients: [{ ...client, processes: [{ ...process, state: "ended" as const }] }] };
    expect(said(before, over)).toEqual([`exit ${process.pid} ended`]);
    expect(said(over, now)).toEqual([`attach ${next.pid} `]);
    expect(said(before, { ...before, clients: [] })).toEqual([`exit ${process.pid} gone`]);
  });

  test("rates are of what was done, also where a process that has ended loses its slot to another client", async () => {
    await using world = new World(native);
    const profile = world.scratch.file("tiny.csv", TINY_PROFILE);
    for (let i = 0; i < 2; i++) world.run([native.files.replay, "--profile", profile], "train", "best-effort");
    const before = await until(() => {
      const reading = readingOf(world.segment);
      const processes = reading.totals.get("train")?.processes ?? [];
      return processes.filter(({ usage }) => usage.counters.launches > 0).length === 2 ? reading : undefined;
    });
    const total = before.totals.get("train");
    const [, other] = total?.processes ?? [];
    if (!total || !other) throw new Error("no two processes");
    // A second in which the other one has done nothing.
    const totals = new Map([["train", { ...total, usage: other.usage, processes: [other] }]]);
    const [client] = statsOf({ ...before, at_ns: before.at_ns + 1e9, totals }, before).clients;
    expect(client?.launches).toBe(other.usage.counters.launches);
    expect(client?.rates).toMatchObject({ interval_s: 1, launches_per_s: 0, requests_per_s: 0 });
    // What one does that was not there before is new.
    const [later] = statsOf({ ...before, at_ns: before.at_ns + 1e9 }, { ...before, totals }).clients;
    expect(later?.rates?.launches_per_s).toBe(total.usage.counters.launches - other.usage.counters.launches);
  });

  test("what the control loop shows is read back", () => {
    const segment = Segment.create(native, `${scratch.path}/shown`);
    segment.configure({ policy: "slo" });
    expect(segment.loop).toBeUndefined();
    const found = {
      rung: 3,
      changes: 7,
      unreachable: false,
      held_s: 1.4,
      alone: { requests: 48, p50_ms: 3.1, p99_ms: 4.5 },
      now: { requests: 60, p50_ms: 3.2, p99_ms: 4.75 },
      over_alone: { requests: 59, p50: 1.004, p99: 1.031 },
    };
    segment.showLoop(found);
    expect(segment.loop).toMatchObject(found);
    segment.showLoop({ ...found, over_alone: null });
    expect(segment.loop?.over_alone).toBeNull();
  });

  test("a segment that no process stands behind is not listed, nor is what is none", async () => {
    const uid = process.getuid?.() ?? 0;
    const path = `${scratch.path}/rigel-${uid}-1-0`;
    const maker = Bun.spawn(
      [
        process.execPath,
        "-e",
        `import { Native } from "${import.meta.dir}/../src/native.ts";
         process.exit((await Native.load()).createSegment("${path}") === 0 ? 0 : 1);`,
      ],
      { stderr: "inherit" },
    );
    expect(await maker.exited).toBe(0);
    scratch.file(`rigel-${uid}-2-0`, "no segment");
    expect(native.checkSegment(path)).toBeNull();
    expect(new Segments(native, scratch.path).live()).toEqual([]);
    expect(new Segments(native, `${scratch.path}/not-there`).live()).toEqual([]);
  });
});
