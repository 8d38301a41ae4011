/** control.test.ts: what changes running clients and policies does to a segment, without any client. */

import { afterAll, beforeAll, expect, spyOn, test } from "bun:test";
import { closeSync, openSync, readFileSync, writeSync } from "node:fs";
import { join } from "node:path";
import { z } from "zod";
import { changePolicy, policyChange } from "../src/control.ts";
import { metricsOf } from "../src/metrics.ts";
import { Native } from "../src/native.ts";
import { Segment } from "../src/segment.ts";
import { Controller, TICK_S } from "../src/slo.ts";
import { LoopKeeper, SloLoop } from "../src/slo-loop.ts";
import type { Settings } from "../src/slo-rungs.ts";
import { readingOf, statsOf } from "../src/stats.ts";
import { render } from "../src/top-view.ts";
import { Scratch } from "./rigel.ts";
import { until } from "./serving.ts";

let native: Native;
let scratch: Scratch;
beforeAll(async () => {
  native = await Native.load();
  scratch = new Scratch();
});
afterAll(() => scratch[Symbol.dispose]());

let segments = 0;
function underSlo(): Segment {
  const segment = Segment.create(native, join(scratch.path, `segment-${segments++}`));
  segment.configure({ policy: "slo" });
  return segment;
}

/** Sets fields of a client's slot, of more than 32 bits the lower ones; of a histogram those of its first bucket. */
function put(segment: Segment, values: Readonly<Record<string, number>>, slot = 0): void {
  const { clients } = z
    .object({
      clients: z.object({
        offset: z.int(),
        stride: z.int(),
        fields: z.record(z.string(), z.object({ offset: z.int() })),
      }),
    })
    .parse(JSON.parse(native.layout));
  const file = openSync(segment.path, "r+");
  for (const [name, value] of Object.entries(values)) {
    const field = clients.fields[name];
    if (!field) throw new Error(`there is no field ${name}`);
    writeSync(file, Uint32Array.of(value), 0, 4, clients.offset + slot * clients.stride + field.offset);
  }
  closeSync(file);
}

const HIGH = 1;
const BEST_EFFORT = 2;

const change = (segment: Segment, policy: object) => changePolicy([segment], policyChange(policy, "test"), native);

const MOVED: Settings = {
  suspend: 0,
  defer_us: 700,
  defer_ppm: 300_000,
  need_us: 1600,
  slice_us: 200,
  inflight: 2,
  corun: 3,
  stop_us: 60,
  share_period_us: 400_000,
};

test("a policy that takes over while slo is about to move settings gets them back", () => {
  for (const asked of [{ name: "priority" }, { name: "priority", inflight: 5 }])
    for (const again of [false, true]) {
      const segment = underSlo();
      const before = segment.settings();
      if (again) segment.move(MOVED);
      const apply = segment.apply.bind(segment);
      // Between the loop's look at the policy and what it writes.
      segment.apply = (settings) => {
        segment.apply = apply;
        change(segment, asked);
        apply(settings);
      };
      expect(segment.move(MOVED)).toBe(false);
      expect(segment.settings()).toEqual({ ...before, policy: 1, ...given(asked) });
      // Under slo again the loop begins anew from what is there now.
      change(segment, { name: "slo" });
      expect(segment.move(MOVED)).toBe(true);
      expect(segment.settings()).toMatchObject({ ...MOVED });
      change(segment, { name: "priority" });
      expect(segment.settings()).toMatchObject({ ...moved(before), ...given(asked) });
      segment.remove();
    }
});

/** What slo moves, as it was. */
function moved(settings: Readonly<Record<string, number>>): Record<string, number | undefined> {
  return Object.fromEntries(Object.keys(MOVED).map((name) => [name, settings[name]]));
}

function given({ inflight }: { inflight?: number }): { inflight?: number } {
  return inflight === undefined ? {} : { inflight };
}

test("slo has no fewer stops than are configured, and none where there are to be none", () => {
  for (const [configured, wanted, expected] of [
    [250, 60, 60],
    [40, 60, 40],
    [0, 60, 0],
  ] as const) {
    const segment = underSlo();
    segment.apply({ stop_us: configured });
    // Also once it has moved them.
    for (let n = 0; n < 2; n++) {
      segment.move({ ...MOVED, stop_us: wanted });
      expect(segment.settings()).toMatchObject({ stop_us: expected });
    }
    change(segment, { name: "priority" });
    expect(segment.settings()).toMatchObject({ stop_us: configured });
    segment.remove();
  }
});

test("a loop that takes over, or has another target, begins with what is configured", () => {
  const segment = underSlo();
  const { inflight } = segment.settings();
  segment.move({ ...MOVED, inflight: 256 });
  using keeper = new LoopKeeper(segment, native, true);
  expect(segment.settings()["inflight"]).toBe(inflight);
  keeper.end();
  segment.remove();
});

test("a loop that nobody keeps says by itself that it runs: clients would put back what it tries", () => {
  const segment = underSlo();
  const loop = new SloLoop(segment, { p99_over_alone: 1.05 });
  expect(segment.loop).toBeUndefined();
  for (const goesOn of [() => loop.tick(TICK_S), () => loop.resume()]) {
    goesOn();
    expect(segment.loop?.holder_pid).toBe(process.pid);
    loop.pause();
    expect(segment.loop).toBeUndefined();
  }
  segment.remove();
});

/** As a loop shows it that has measured something. */
const SHOWN = {
  rung: 3,
  changes: 7,
  unreachable: false,
  held_s: 1.4,
  alone: { requests: 48, p50_ms: 3.1, p99_ms: 4.5 },
  now: { requests: 60, p50_ms: 3.2, p99_ms: 4.75 },
  over_alone: { requests: 59, p50: 1.004, p99: 1.031 },
};

/** What `rigel top` and /metrics tell of delays and targets. */
function toldOf(segment: Segment): string[] {
  const reading = readingOf(segment);
  const view = { folder: "", interval_s: 1, sort: "name", selected: undefined, help: false, notice: "" } as const;
  const lines = render(
    { ...view, segments: [statsOf(reading)] },
    { width: 200, height: 50, colour: false, keys: false },
  );
  const metrics = metricsOf([reading], [], new Map([[segment.id, 0]]));
  return [...lines, ...metrics.split("\n")].flatMap((line) => line.match(/p99 target|delayed|^rigel_slo_delay/g) ?? []);
}

test("neither target nor delay is told where another policy is in force or the loop has ended", () => {
  const segment = underSlo();
  expect(toldOf(segment)).toEqual([]);
  const told = ["p99 target", "delayed", "rigel_slo_delay", "rigel_slo_delay"];
  segment.showLoop(SHOWN);
  expect(toldOf(segment)).toEqual(told);
  // Also before the loop has seen it.
  change(segment, { name: "none" });
  expect(toldOf(segment)).toEqual([]);
  expect(statsOf(readingOf(segment)).slo).toBeNull();
  change(segment, { name: "slo" });
  expect(toldOf(segment)).toEqual(told);
  segment.showLoop(undefined);
  expect(toldOf(segment)).toEqual([]);
  segment.remove();
});

test("neither target nor delay is told once the process with the loop was killed", async () => {
  const segment = underSlo();
  await using holder = Bun.spawn(
    [
      process.execPath,
      "-e",
      `import { Native } from "${import.meta.dir}/../src/native.ts";
       import { Segment } from "${import.meta.dir}/../src/segment.ts";
       const segment = Segment.open(await Native.load(), "${segment.path}");
       setInterval(() => segment.showLoop(${JSON.stringify(SHOWN)}), 100);`,
    ],
    { stderr: "inherit" },
  );
  await until(() => (segment.loop?.holder_pid === holder.pid ? true : undefined));
  expect(toldOf(segment)).not.toEqual([]);
  holder.kill("SIGKILL");
  await holder.exited;
  await until(() => (segment.loop === undefined ? true : undefined));
  expect(toldOf(segment)).toEqual([]);
  segment.remove();
});

test("a loop is told how often best-effort work was starved, and of launches for the least share that there were some", () => {
  const segment = underSlo();
  put(segment, { state: 2 });
  const loop = new SloLoop(segment, { p99_over_alone: 1.05 });
  using step = spyOn(Controller.prototype, "step");
  const seen = (starved: number, shared: number): number | undefined => {
    put(segment, { starved, shared });
    loop.tick(TICK_S);
    return step.mock.lastCall?.[0].starved;
  };
  expect([seen(3, 0), seen(5, 0), seen(5, 40), seen(6, 90), seen(6, 90)]).toEqual([3, 2, 1, 2, 0]);
  loop.pause();
  segment.remove();
});

test("a slot that has become another client's, which has had fewer requests, is told of as that and no less", () => {
  const segment = underSlo();
  put(segment, { state: 2, class: HIGH, pid: 1, requests: 8000 });
  const loop = new SloLoop(segment, { p99_over_alone: 1.05 });
  using step = spyOn(Controller.prototype, "step");
  const came = (requests: number, pid: number): number | undefined => {
    put(segment, { requests, pid });
    loop.tick(TICK_S);
    return step.mock.lastCall?.[0].came;
  };
  expect([came(8006, 1), came(5, 2), came(7, 2)]).toEqual([6, 0, 2]);
  loop.pause();
  segment.remove();
});

test("what a client launched before it became best-effort is none of what best-effort clients launched", () => {
  const segment = underSlo();
  put(segment, { state: 2, class: HIGH });
  const loop = new SloLoop(segment, { p99_over_alone: 1.05 });
  using step = spyOn(Controller.prototype, "step");
  const seen = (kind: "high" | "best-effort", launches: number): number | undefined => {
    put(segment, { class: kind === "high" ? HIGH : BEST_EFFORT, graph_launches: launches });
    loop.tick(TICK_S);
    return step.mock.lastCall?.[0].launches;
  };
  const told = [
    seen("high", 8000),
    seen("high", 9000),
    seen("best-effort", 9005),
    seen("best-effort", 9012),
    seen("high", 9500),
    seen("best-effort", 9510),
  ];
  expect(told).toEqual([0, 0, 5, 7, 0, 10]);
  loop.pause();
  segment.remove();
});

/** What a loop is told at each tick of the requests of one client, whose slot is written to before that. */
function toldOfSlot(ticks: readonly Readonly<Record<string, number>>[]): { requests: number; measured: string }[] {
  const segment = underSlo();
  put(segment, { state: 2, first_launch_ns: 1, ...ticks[0] });
  const loop = new SloLoop(segment, { p99_over_alone: 1.05 });
  using step = spyOn(Controller.prototype, "step");
  const told = ticks.slice(1).flatMap((values) => {
    put(segment, values);
    loop.tick(TICK_S);
    const [seen] = step.mock.lastCall ?? [];
    return seen ? [{ requests: seen.requests.total, measured: seen.measured }] : [];
  });
  loop.pause();
  segment.remove();
  return told;
}

test("busy periods of a client before it became a high one are none of high clients' requests", () => {
  const told = toldOfSlot([
    { class: BEST_EFFORT, request_ns: 500 },
    { request_ns: 600 },
    { class: HIGH, request_ns: 610 },
    { request_ns: 617 },
    { class: BEST_EFFORT, request_ns: 900 },
    { class: HIGH, request_ns: 1000 },
    { request_ns: 1003 },
  ]);
  expect(told.map(({ requests }) => requests)).toEqual([0, 0, 7, 0, 0, 3]);
});

test("a client's next process is measured by its latencies where it reports some, whatever the one before it did", () => {
  const told = toldOfSlot([
    { class: HIGH, pid: 7, request_ns: 50 },
    { reports: 4, report_ns: 4, request_ns: 60 },
    { reports: 9, report_ns: 9, request_ns: 75 },
    { pid: 8, request_ns: 78 },
    { request_ns: 80 },
    { reports: 10, report_ns: 10, request_ns: 83 },
    { reports: 12, report_ns: 12, request_ns: 86 },
  ]);
  expect(told).toEqual([
    { requests: 0, measured: "7 reports" },
    { requests: 5, measured: "7 reports" },
    { requests: 0, measured: "8 busy" },
    { requests: 2, measured: "8 busy" },
    { requests: 0, measured: "8 reports" },
    { requests: 2, measured: "8 reports" },
  ]);
});

test("best-effort clients on GPUs without a high client are none beside it", () => {
  const segment = underSlo();
  const [on, off] = [1, 2];
  put(segment, { state: 2, first_launch_ns: 1, pid: 7, class: HIGH, devices: 0b01 }, 0);
  put(segment, { state: 2, first_launch_ns: 1, pid: 8, class: BEST_EFFORT, devices: 0b01, preemption: on }, 1);
  put(segment, { state: 2, first_launch_ns: 1, pid: 9, class: BEST_EFFORT, devices: 0b10, preemption: off }, 2);
  const loop = new SloLoop(segment, { p99_over_alone: 1.05 });
  using step = spyOn(Controller.prototype, "step");
  const seen = () => {
    loop.tick(TICK_S);
    const { launches, neighbours, preemption } = step.mock.lastCall?.[0] ?? {};
    return { launches, neighbours, preemption };
  };
  put(segment, { graph_launches: 20 }, 1);
  put(segment, { graph_launches: 300 }, 2);
  expect(seen()).toEqual({ launches: 20, neighbours: "8", preemption: true });
  // Once the high client has work there, too, it is.
  put(segment, { devices: 0b11 }, 0);
  put(segment, { graph_launches: 305 }, 2);
  expect(seen()).toEqual({ launches: 5, neighbours: "8 9", preemption: false });
  loop.pause();
  segment.remove();
});

test("settings that are only being tried are marked, for clients whose loop dies", () => {
  const segment = underSlo();
  const { control } = z
    .object({ control: z.object({ offset: z.int(), fields: z.object({ trying: z.object({ offset: z.int() }) }) }) })
    .parse(JSON.parse(native.layout));
  const at = control.offset + control.fields.trying.offset;
  const isMarked = (): boolean => readFileSync(segment.path).readUInt32LE(at) === 1;
  for (const isTrial of [true, false, true]) {
    segment.move(MOVED, isTrial);
    expect(isMarked()).toBe(isTrial);
  }
  segment.putBack();
  expect(isMarked()).toBe(false);
  segment.remove();
});

test("a limit of 0 launches is refused under fair where it would be in force, and stops no other change", () => {
  const segment = underSlo();
  segment.apply({ inflight: 0 });
  segment.move(MOVED);
  expect(() => change(segment, { name: "fair" })).toThrow("got 0, which is in force; set another with it");
  expect(segment.policy).toBe("slo");
  change(segment, { name: "fair", inflight: 4 });
  expect(segment.settings()).toMatchObject({ policy: 3, inflight: 4 });
  // However it came to be.
  segment.apply({ inflight: 0 });
  change(segment, { quantum_us: 500 });
  expect(() => change(segment, { inflight: 0 })).toThrow("policy.inflight: expected a limit of at least 1");
  segment.remove();
});

test("fields that nothing reads are refused, and what has no effect is said", () => {
  const segment = underSlo();
  expect(() => policyChange({ sm_threshold: 10 }, "rigel set")).toThrow("rigel set: sm_threshold: expected a field");
  expect(() => policyChange({ inflight: 1, dur_threshold: 0.5 }, "policy")).toThrow("policy: dur_threshold: expected");
  expect(change(segment, { min_share: 0.1 })[0]?.notes).toEqual([]);
  expect(change(segment, { name: "fair", min_share: 0.1, target: { p99_ms: 5 }, quantum_us: 500 })[0]?.notes).toEqual([
    "policy.target: has no effect under policy fair, only under slo",
    "policy.min_share: has no effect under policy fair, only under priority and slo",
  ]);
  expect(change(segment, { preempt: true, slice_us: 100 })[0]?.notes).toEqual([
    "policy.preempt: has no effect under policy fair, only under priority and slo",
    "policy.slice_us: has no effect under policy fair, only under priority and slo",
  ]);
  segment.remove();
});

test("a change under policy orion leaves alone what follows from profiles", () => {
  const segment = underSlo();
  segment.configure({ policy: "orion", outstanding_us: 1234, sms_limit: 99 });
  change(segment, { inflight: 3 });
  expect(segment.settings()).toMatchObject({ policy: 4, inflight: 3, outstanding_us: 1234, sms_limit: 99 });
  segment.remove();
});
