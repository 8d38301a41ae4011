/**
 * slo.test.ts: the controller of policy `slo` against made-up GPUs: what it settles on, how soon, and what it costs; and what is seen of
 * a real program's requests.
 */

import { describe, expect, test } from "bun:test";
import { Native } from "../src/native.ts";
import type { Observation } from "../src/slo-known.ts";
import { Ladder } from "../src/slo-ladder.ts";
import type { Settings } from "../src/slo-rungs.ts";
import { RequestsAlone, type Target, type Verdict } from "../src/slo-alone.ts";
import { type Action, Controller, TICK_S } from "../src/slo.ts";
import type { Wait } from "../src/slo-delay.ts";
import { histogramOf, random } from "./histograms.ts";
import { TINY_PROFILE } from "./rigel.ts";
import { World as Programs } from "./world.ts";

interface World {
  rate_per_s: number;
  neighbours: string;
  preemption: boolean;
  stops?: boolean;
  longPart?: number;
  slowCalls?: number;
  /** So many requests more end in a tick because the program paused in the middle of one; `came` says that they are none, or is not there. */
  pauses?: number;
  isSaid?: boolean;
  /** Latency over latency alone, and best-effort launches per second, under given settings. */
  effect: (action: Action) => { slowdown: number; launches_per_s: number };
}

/** Runs a controller for so many seconds against a world that may change; what it did, by tick. */
function run(target: Target, seconds: number, world: (t_s: number) => World, warm = (_t_s: number): number => 1) {
  const controller = new Controller(target);
  const next = random(7);
  let action: Action = { settings: undefined, hold: false };
  const ticks: (Action & { slowdown: number; t_s: number })[] = [];
  for (let tick = 0; tick < seconds / TICK_S; tick++) {
    const { rate_per_s, effect, pauses = 0, isSaid = true, ...rest } = world(tick * TICK_S);
    const { slowdown: beside, launches_per_s } = action.hold ? { slowdown: 1, launches_per_s: 0 } : effect(action);
    const slowdown = beside * warm(tick * TICK_S);
    let count = 0;
    // Poisson, by counting exponential gaps.
    for (let at = -Math.log(1 - next()); at < rate_per_s * TICK_S; at -= Math.log(1 - next())) count++;
    const durations = Array.from({ length: count }, () => 3 * slowdown * (1 + 0.15 * next() + (next() < 0.05 ? 1 : 0)));
    const seen: Observation = {
      elapsed_s: TICK_S,
      requests: histogramOf([...durations, ...Array.from({ length: pauses }, () => 0.3)]),
      ...(isSaid && { came: count }),
      launches: launches_per_s * TICK_S,
      measured: "7 reports",
      ...rest,
    };
    action = controller.step(seen);
    ticks.push({ ...action, slowdown, t_s: tick * TICK_S });
  }
  return { ticks, controller };
}

/**
 * Settings by tick beside 55 requests of 4 ms a second, `burst` of them in the first second of late suspension. Best-effort gets the time
 * that they leave, under late suspension a twentieth more, in slices a tenth less.
 */
function waitedFor(
  seconds: number,
  burst: number,
  target: Target = { p99_over_alone: 1.05 },
  waiting_ms = 0.3,
): Action["settings"][] {
  const controller = new Controller(target);
  const next = random(7);
  let action: Action = { settings: undefined, hold: false };
  const settings: Action["settings"][] = [];
  let late = 0;
  for (let tick = 0; tick < seconds / TICK_S; tick++) {
    const { suspend = 1, defer_us = 0 } = action.settings ?? {};
    if (defer_us > 0) late++;
    const per_tick = TICK_S * (defer_us > 0 && late * TICK_S <= 1 ? burst : 55);
    const waits: Wait[] = [];
    for (let at = -Math.log(1 - next()); at < per_tick; at -= Math.log(1 - next()))
      waits.push({ client: 0, worked_ms: (3.8 - waiting_ms) * (1 + 0.1 * next()), waited_ms: waiting_ms });
    const took_ms = waits.map(({ worked_ms, waited_ms }) => worked_ms + waited_ms);
    const left_s = TICK_S - took_ms.reduce((sum, ms) => sum + ms / 1000, 0);
    action = controller.step({
      elapsed_s: TICK_S,
      requests: histogramOf(took_ms),
      waits,
      launches: action.hold ? 0 : 8000 * left_s * (defer_us > 0 ? 1.05 : suspend ? 1 : 0.9),
      neighbours: "1",
      measured: "7 busy",
      preemption: true,
    });
    settings.push(action.settings);
  }
  return settings;
}

/**
 * Settings by tick beside 60 requests of 6.5 ms a second that keep the GPU busy, delayed by 0.1 ms where best-effort work is suspended or has slices of 50 us, by
 * 0.26 in longer ones, in which it gets so many times as much.
 */
function keptBusy(seconds: number, more: number): Action["settings"][] {
  const controller = new Controller({ p99_over_alone: 1.05 });
  const next = random(11);
  let action: Action = { settings: undefined, hold: false };
  return Array.from({ length: seconds / TICK_S }, () => {
    const { suspend = 1, slice_us = 50 } = action.settings ?? {};
    const isLonger = suspend === 0 && slice_us > 50;
    const delay_ms = action.hold ? 0 : isLonger ? 0.26 : 0.1;
    const waits: Wait[] = [];
    for (let at = -Math.log(1 - next()); at < 60 * TICK_S; at -= Math.log(1 - next()))
      waits.push({ client: 0, worked_ms: 0.2 * (1 + 0.1 * next()), waited_ms: 6.3 + delay_ms });
    action = controller.step({
      elapsed_s: TICK_S,
      requests: histogramOf(waits.map(({ worked_ms, waited_ms }) => worked_ms + waited_ms)),
      waits,
      launches: action.hold ? 0 : 500 * (isLonger ? more : 1),
      neighbours: "1",
      measured: "7 busy",
      preemption: true,
    });
    return action.settings;
  });
}

/**
 * Settings by tick beside 55 requests of 4 ms a second, which are delayed where best-effort work gives way later than at once: in the first three seconds another
 * program has one of 61 ms a tick, and then `stays` or is gone.
 */
function afterLonger(seconds: number, stays: boolean): Action["settings"][] {
  const controller = new Controller({ p99_over_alone: 1.05 });
  const next = random(7);
  let action: Action = { settings: undefined, hold: false };
  return Array.from({ length: seconds / TICK_S }, (_, tick) => {
    const { suspend = 1, need_us = 0 } = action.settings ?? {};
    const isLonger = tick * TICK_S < 3;
    const waits: Wait[] = isLonger ? [{ client: 0, worked_ms: 60, waited_ms: 1 }] : [];
    const delay_ms = !action.hold && (!suspend || (need_us > 0 && need_us < 4200)) ? 0.5 : 0;
    for (let at = -Math.log(1 - next()); at < 55 * TICK_S; at -= Math.log(1 - next()))
      waits.push({ client: 16, worked_ms: 3.5 * (1 + 0.1 * next()), waited_ms: 0.3 + delay_ms });
    action = controller.step({
      elapsed_s: TICK_S,
      requests: histogramOf(waits.map(({ worked_ms, waited_ms }) => worked_ms + waited_ms)),
      waits,
      launches: action.hold ? 0 : 800,
      neighbours: "1",
      measured: isLonger || stays ? "7 busy, 8 busy" : "8 busy",
      preemption: true,
    });
    return action.settings;
  });
}

/** Best-effort work gives way late in a request. */
function isLate(is: Action["settings"]): boolean {
  return is?.suspend === 1 && is.need_us > 0;
}

/** So many numbers, all but one in `each` the same. */
function numbers(count: number, most: number, each: number, other: number): number[] {
  return Array.from({ length: count }, (_, i) => ((i + 1) % each ? most : other));
}

/** How the requests of the second rung are judged, of which so few are known, beside those of the first; in milliseconds. */
function judged(p99_ms: number, few: readonly number[], many: readonly number[] = []): Verdict {
  const target = { p99_ms };
  const ladder = new Ladder(target, new RequestsAlone(target));
  ladder.t_s = 1;
  const seen = { elapsed_s: 1, launches: 1, neighbours: "1", measured: "7 reports", preemption: true };
  for (const [rung, durations] of [many, few].entries())
    if (durations.length > 0) ladder.at(rung).add({ ...seen, requests: histogramOf(durations) }, 1, 1);
  return ladder.judge(1);
}

/** A request that best-effort work slows the more, the longer its slices are; 2 ms gives it most. */
function sliced(slowdowns: Record<number, number>, suspended = 0.99): World["effect"] {
  return ({ settings }) =>
    settings?.suspend === 0
      ? { slowdown: slowdowns[settings.slice_us] ?? 2, launches_per_s: 1000 + settings.slice_us / 10 }
      : { slowdown: suspended + (settings && settings.defer_us > 0 ? 0.2 : 0), launches_per_s: 900 };
}

const hostBound = sliced({ 50: 1.3, 200: 1.35, 500: 1.4, 2000: 1.5 });
const gpuBound = sliced({ 50: 1.01, 200: 1.02, 500: 1.12, 2000: 1.9 });
const world =
  (effect: World["effect"], more: Partial<World> = {}) =>
  (): World => ({
    rate_per_s: 60,
    neighbours: "1",
    preemption: true,
    effect,
    ...more,
  });

/** For how long a rung is stood on before the first trial, with so many requests a second and a target in milliseconds. */
function firstTrial_s(rate_per_s: number): number {
  const { ticks } = run({ p99_ms: 8 }, 30, world(gpuBound, { rate_per_s }));
  const begun = ticks.findIndex(({ settings }) => settings !== undefined);
  return TICK_S * (ticks.findIndex(({ isTrial }) => isTrial) - begun);
}

/** A second neighbour is there between 30 and 60 s. */
const visited = (t_s: number): World => ({
  rate_per_s: 60,
  preemption: true,
  ...(t_s >= 30 && t_s < 60 ? { neighbours: "1 2", effect: hostBound } : { neighbours: "1", effect: gpuBound }),
});

/** Three times the requests between 30 and 60 s. */
const loaded = (t_s: number): World => ({ ...world(gpuBound)(), rate_per_s: t_s >= 30 && t_s < 60 ? 180 : 60 });

/** What the first rung is where clients can be suspended. */
const SAFEST: Settings = {
  suspend: 1,
  defer_us: 0,
  defer_ppm: 0,
  need_us: 0,
  slice_us: 50,
  inflight: 8,
  corun: 0,
  stop_us: 250,
  share_period_us: 0,
};
/** As later rungs in time slices have it where kernels are long, or that is not known: without stops. */
const LATE: Settings = { ...SAFEST, stop_us: 0 };

const lateIsFine: World["effect"] = ({ settings }) => {
  if (!settings || settings.suspend === 0) return { slowdown: 1.2, launches_per_s: 1000 };
  return { slowdown: settings.defer_us > 1500 ? 1.3 : 1.01, launches_per_s: 900 + settings.defer_us / 20 };
};

const laterIsMore: World["effect"] = ({ settings }) => ({ slowdown: 1, launches_per_s: isLate(settings) ? 1100 : 900 });

const meetsWithLess: World["effect"] = ({ settings }) =>
  settings?.suspend === 0
    ? { slowdown: settings.slice_us > 50 ? 1.5 : 1.01, launches_per_s: 800 }
    : { slowdown: 1.3, launches_per_s: 1000 };

/** Stops, by `stop_us`, of settings of that kind that were in force between two moments. */
function stopsIn(ticks: readonly (Action & { t_s: number })[], from_s: number, to_s: number): number[] {
  const late = ticks.filter(({ settings, t_s }) => isLate(settings) && t_s > from_s && t_s < to_s);
  return [...new Set(late.map(({ settings }) => settings?.stop_us ?? -1))];
}

const harmlessUnlessFree: World["effect"] = ({ settings }) => ({
  slowdown: settings?.suspend === 0 ? 3 : 1.01,
  launches_per_s: 1000 + (settings?.defer_us ?? 0) / 10,
});

/** Requests that keep the GPU busy: each is delayed by what runs as it begins, until the next stop. */
const delayedByStops: World["effect"] = ({ settings }) => ({
  slowdown: !settings ? 1 : settings.suspend === 0 || settings.defer_us > 0 ? 1.5 : 1 + settings.stop_us / 2500,
  launches_per_s: 1000 + (settings?.stop_us ?? 0) / 10,
});

const strict: World["effect"] = ({ settings }) => ({
  slowdown: settings && settings.inflight > 2 ? 1.3 : 1.01,
  launches_per_s: 1000 + 5 * (settings?.inflight ?? 0),
});

/** A program that warms up for three seconds: tiny pieces of work, then requests that take long. */
const warm = (t_s: number): number => (t_s < 1 ? 0.004 : t_s < 2 ? 60 : t_s < 3 ? 1.8 : 1);

/** Kernels so short that none delays a request; and those of which many do. */
const undisturbed: World["effect"] = ({ settings }) => ({
  slowdown: 1,
  launches_per_s: 1000 + 5 * (settings?.inflight ?? 0),
});
const disturbedByMany: World["effect"] = (action) => ({
  ...undisturbed(action),
  slowdown: (action.settings?.corun ?? 0) > 32 ? 1.4 : 1,
});

/** Settings by tick from 40 s on, in the first five of which the program pauses 15 times a tick. */
const pausing = (isSaid: boolean): (Action["settings"] | undefined)[] =>
  run({ p99_over_alone: 1.05 }, 50, (t_s) => ({
    rate_per_s: 60,
    neighbours: "1",
    preemption: false,
    effect: undisturbed,
    pauses: t_s > 40 && t_s < 45 ? 15 : 0,
    isSaid,
  }))
    .ticks.slice(400)
    .map(({ settings }) => settings);

const underMps: World["effect"] = ({ settings }) => ({
  slowdown: settings && settings.inflight > 8 ? 1.2 : 1.01,
  launches_per_s: 1000 + 5 * (settings?.inflight ?? 0),
});

describe("the controller", () => {
  test("stays on the safest settings where anything else misses the target", () => {
    const { ticks, controller } = run({ p99_over_alone: 1.05 }, 60, world(hostBound));
    // Or on those by which requests need the GPU for all of their time, where best-effort work gives way as soon.
    const { need_us = 0, slice_us, ...settings } = controller.summary().settings ?? {};
    expect({ ...settings, need_us: 0, slice_us: 50 }).toEqual(LATE);
    expect(need_us === 0 ? slice_us === 50 : need_us > 3200).toBe(true);
    // Trials cost little: a second at a time, and ever more seldom.
    expect(ticks.filter(({ slowdown }) => slowdown > 1.05).length).toBeLessThan(0.12 * ticks.length);
    let streak = 0;
    for (const { slowdown } of ticks) {
      streak = slowdown > 1.05 ? streak + 1 : 0;
      expect(streak * TICK_S).toBeLessThanOrEqual(1.2);
    }
  });

  test("tries no longer slices where the shortest delay requests", () => {
    for (const [effect, some] of [
      [hostBound, false],
      [gpuBound, true],
    ] as const) {
      const { ticks } = run({ p99_over_alone: 1.05 }, 60, world(effect));
      const longer = ticks.filter(({ settings }) => settings?.suspend === 0 && settings.slice_us > 50);
      expect(longer.length > 0).toBe(some);
    }
  });

  test("stays on no longer slices that delay requests which keep the GPU busy, unless they are seen to give more", () => {
    const longer = [1, 1.5].map(
      (more) => keptBusy(120, more).filter((is) => is?.suspend === 0 && is.slice_us > 50).length * TICK_S,
    );
    expect(longer[0]).toBeLessThan(20);
    expect(longer[1]).toBeGreaterThan(60);
  });

  test("has streams stop more often where that is what it takes, and no more often than it takes", () => {
    for (const stops of [true, false]) {
      const { ticks, controller } = run({ p99_over_alone: 1.05 }, 120, world(delayedByStops, { stops }));
      expect(controller.summary()).toMatchObject({ settings: { suspend: 1, stop_us: 120 }, unreachable: false });
      expect(ticks.filter(({ settings }) => settings?.stop_us === 120).length).toBeGreaterThan(0.8 * ticks.length);
      const free = run({ p99_over_alone: 1.2 }, 60, world(delayedByStops, { stops })).ticks;
      expect(free.filter(({ settings }) => settings && settings.stop_us > 0 && settings.stop_us < 250)).toEqual([]);
    }
  });

  test("moves to what gives best-effort most within the target, in 40 s at 60 requests a second", () => {
    const { ticks, controller } = run({ p99_over_alone: 1.05 }, 60, world(gpuBound));
    expect(controller.summary().settings).toEqual({ ...LATE, suspend: 0, slice_us: 200 });
    const there = ticks.findIndex(({ settings }) => settings?.suspend === 0 && settings.slice_us === 200);
    expect(there * TICK_S).toBeLessThan(40);
  });

  test("a looser target takes the longer slices", () => {
    const { controller } = run({ p99_over_alone: 1.2 }, 90, world(gpuBound));
    expect(controller.summary().settings).toEqual({ ...LATE, suspend: 0, slice_us: 500 });
  });

  test("a target in milliseconds needs no window in which best-effort is held", () => {
    const { ticks, controller } = run({ p99_ms: 8 }, 40, world(gpuBound));
    expect(ticks.some(({ hold }) => hold)).toBe(false);
    expect(controller.summary().settings).toEqual({ ...LATE, suspend: 0, slice_us: 500 });
  });

  test("holds best-effort for at most 3 s and a fiftieth of the time", () => {
    const { ticks } = run({ p99_over_alone: 1.05 }, 120, world(gpuBound));
    const held_s = ticks.filter(({ hold }) => hold).length * TICK_S;
    expect(held_s).toBeGreaterThan(0);
    expect(held_s).toBeLessThanOrEqual(3 + 0.02 * 120 + 0.01);
  });

  test("steps back when a neighbour comes that slows requests, and returns when it has gone", () => {
    const { ticks, controller } = run({ p99_over_alone: 1.05 }, 100, visited);
    const at = (from_s: number, to_s: number) => ticks.filter(({ t_s }) => t_s >= from_s && t_s < to_s);
    // At once, since another neighbour is known without any request.
    expect(at(30.3, 31).every(({ slowdown }) => slowdown <= 1)).toBe(true);
    expect(at(45, 60).filter(({ slowdown }) => slowdown > 1.05).length).toBeLessThan(20);
    expect(controller.summary().settings).toEqual({ ...LATE, suspend: 0, slice_us: 200 });
  });

  test("a change of load makes it learn again what requests take alone", () => {
    const { ticks } = run({ p99_over_alone: 1.05 }, 90, loaded);
    const held = ticks.filter(({ hold, t_s }) => hold && t_s > 30 && t_s < 40);
    expect(held.length).toBeGreaterThan(0);
    // What it does is safe meanwhile.
    expect(ticks.filter(({ slowdown, t_s }) => slowdown > 1.05 && t_s > 30).length).toBeLessThan(60);
  });

  test("tells of each change why", () => {
    const target = { p99_over_alone: 1.05 };
    const { moves } = run(target, 80, visited).controller;
    for (const [before, after] of moves.slice(1).map((move, i) => [moves[i], move] as const))
      expect(before?.to).toBe(after.from);
    const at = (t_s: number) => moves.filter((move) => move.t_s >= t_s && move.t_s < t_s + 0.3).map(({ why }) => why);
    expect(at(30)).toContain("other best-effort clients");
    expect(at(60)).toContain("other best-effort clients");
    // Slices that delay by a third and more are tried and left, and by how much is told.
    const failed = moves.filter(
      ({ t_s, from, why }) => t_s > 31 && t_s < 60 && from === 3 && why === "over the target",
    );
    expect(failed.length).toBeGreaterThan(0);
    for (const { worst } of failed) expect(worst?.ratio).toBeGreaterThan(1.2);
    const whys = run(target, 60, loaded).controller.moves.map(({ why }) => why);
    expect(whys).toContain("another load");
    // Milliseconds are not over anything.
    for (const { worst } of run({ p99_ms: 8 }, 40, visited).controller.moves) expect(worst).toBeNull();
  });

  test("says when a target cannot be reached, and what can", () => {
    const { controller } = run({ p99_over_alone: 1.05 }, 60, world(sliced({}, 1.4)));
    expect(controller.unreachable).toBe(true);
    expect(controller.summary().reachable).toBeGreaterThan(1.2);
  });

  test("says so of a target in milliseconds with nobody beside the requests, too, and not of one over alone", () => {
    const alone = world(() => ({ slowdown: 1, launches_per_s: 0 }), { neighbours: "" });
    expect(run({ p99_ms: 1 }, 40, alone).controller.unreachable).toBe(true);
    expect(run({ p99_over_alone: 1.05 }, 40, alone).controller.unreachable).toBe(false);
  });

  test("says so of requests that are few, most of which take longer than a target in milliseconds", () => {
    const seldom = world(gpuBound, { rate_per_s: 0.5 });
    const { unreachable, reachable, verdict } = run({ p99_ms: 1 }, 120, seldom).controller.summary();
    expect({ unreachable, verdict }).toEqual({ unreachable: true, verdict: "over" });
    expect(reachable).toBeGreaterThan(2.9);
    // Of five of which two take longer nothing is known.
    const few = [1, 1, 1, 3, 3];
    expect(judged(2, few)).toBe("unknown");
    expect(judged(2, [...few, 3, 3])).toBe("over");
    expect(judged(2, [3, 3, 3, 3])).toBe("unknown");
    expect(run({ p99_ms: 8 }, 120, seldom).controller.summary().verdict).toBe("unknown");
  });

  test("where suspension misses the target, short slices are tried, and kept if they are better", () => {
    const better = run({ p99_over_alone: 1.05 }, 80, world(sliced({ 50: 1.03, 200: 1.2, 500: 1.4, 2000: 2 }, 1.1)));
    expect(better.controller.summary().settings).toEqual({ ...LATE, suspend: 0 });
    const bothOver = run({ p99_over_alone: 1.05 }, 80, world(sliced({ 50: 1.15, 200: 1.3, 500: 1.4, 2000: 2 }, 1.3)));
    expect(bothOver.controller.summary().settings).toEqual({ ...LATE, suspend: 0 });
    const worse = run({ p99_over_alone: 1.05 }, 80, world(sliced({ 50: 1.5, 200: 1.6, 500: 1.7, 2000: 2 }, 1.3)));
    expect(worse.controller.summary().settings).toEqual({ ...SAFEST, stop_us: 60 });
  });

  test("in time slices short kernels that give way late stop, where long ones are suspended, from one moment to the next", () => {
    let longPart: number | undefined;
    // Once it is known it changes where the part is clearly another.
    const parts = [undefined, 0.02, 0.12, 0.3, 0.12];
    const { ticks } = run({ p99_over_alone: 1.05 }, 100, (t_s) => {
      longPart = parts[Math.floor(t_s / 20)];
      return { ...world(laterIsMore)(), ...(longPart !== undefined && { longPart }) };
    });
    const stopsFrom = (from_s: number): number[] => stopsIn(ticks, from_s + TICK_S / 2, from_s + 20 - TICK_S / 2);
    expect([0, 20, 40, 60, 80].map(stopsFrom)).toEqual([[0], [250], [250], [0], [0]]);
    // It does not begin anew for that.
    expect(ticks.filter(({ settings, t_s }) => isLate(settings) && t_s > 20).length).toBeGreaterThan(700);
  });

  test("what takes best-effort clients off the GPU may be gone for half a second and nothing is begun anew, but not for long", () => {
    const [short, long] = [30.5, 40].map((to_s) => {
      const preemption = (t_s: number): boolean => t_s < 30 || t_s >= to_s;
      const { ticks, controller } = run({ p99_over_alone: 1.05 }, 60, (t_s) =>
        world(laterIsMore, { preemption: preemption(t_s) })(),
      );
      const late = ticks.filter(({ t_s, settings }) => t_s > 29 && t_s < 35 && isLate(settings)).length;
      return { late, moves: controller.moves.filter(({ why }) => why === "other ways to preempt") };
    });
    expect(short?.moves).toEqual([]);
    expect(short?.late).toBeGreaterThan(0.8 * (6 / TICK_S));
    expect(long?.moves.map(({ ladder }) => ladder)).toEqual(["gate", "slices"]);
    expect(long?.moves[0]?.t_s).toBeWithin(30.9, 31.3);
    expect(long?.moves[1]?.t_s).toBeWithin(39.9, 40.3);
  });

  test("where the driver holds up what suspends, long kernels stop, too, for as long as that was seen lately", () => {
    // One call is slow and none after it; two at once; two within half a minute.
    const slow = [
      [12, 1],
      [50, 2],
      [200, 1],
      [220, 1],
    ] as const;
    const { ticks } = run({ p99_over_alone: 1.05 }, 400, (t_s) => ({
      ...world(laterIsMore)(),
      longPart: 0.5,
      slowCalls: slow.find(([at_s]) => Math.abs(at_s - t_s) < TICK_S / 2)?.[1] ?? 0,
    }));
    expect(stopsIn(ticks, 0, 49.5)).toEqual([0]);
    expect(stopsIn(ticks, 50.5, 169.5)).toEqual([250]);
    expect(stopsIn(ticks, 170.5, 219.5)).toEqual([0]);
    expect(stopsIn(ticks, 220.5, 339.5)).toEqual([250]);
    expect(stopsIn(ticks, 340.5, 400)).toEqual([0]);
  });

  test("what requests took while suspensions were held up says nothing of stops", () => {
    let suspended = 0;
    const { ticks } = run({ p99_over_alone: 1.05 }, 40, () => {
      const before = suspended;
      return {
        ...world((action) => {
          const suspends = isLate(action.settings) && action.settings?.stop_us === 0;
          suspended += Number(suspends);
          return { slowdown: suspends ? 1.4 : 1, launches_per_s: laterIsMore(action).launches_per_s };
        })(),
        longPart: 0.5,
        // Two of the first are slow.
        slowCalls: before > 0 && before <= 2 ? 1 : 0,
      };
    });
    const late = ticks.filter(({ settings }) => isLate(settings));
    expect(late.filter(({ settings }) => settings?.stop_us === 0).length).toBeWithin(2, 8);
    expect(late.filter(({ settings }) => settings?.stop_us === 250).length).toBeGreaterThan(200);
  });

  test("calls that are slow in a trial of slices do not keep it there", () => {
    // Slices give less than a late suspension, and delay nobody.
    let slow = 0;
    const { ticks } = run({ p99_over_alone: 1.05 }, 120, (t_s) => ({
      ...world((action) => {
        const slices = action.settings?.suspend === 0;
        if (slices && action.isTrial && t_s > 30 && slow === 0) slow = 2;
        return { slowdown: 1, launches_per_s: slices ? 700 : laterIsMore(action).launches_per_s };
      })(),
      longPart: 0.5,
      get slowCalls() {
        const now = slow;
        slow = slow > 0 ? -1 : slow;
        return Math.max(0, now);
      },
    }));
    expect(slow).toBe(-1);
    const after = ticks.filter(({ t_s }) => t_s > 60);
    expect(after.filter(({ settings }) => settings?.suspend === 0).length).toBeLessThan(0.1 * after.length);
    expect(stopsIn(ticks, 60, 120)).toEqual([250]);
  });

  test("where stops are none, or no help, calls that are slow change nothing", () => {
    const { ticks } = run({ p99_over_alone: 1.05 }, 60, (t_s) => ({
      ...world(laterIsMore)(),
      slowCalls: t_s > 20 ? 1 : 0,
    }));
    expect(stopsIn(ticks, 0, 60)).toEqual([0]);
  });

  test("a rung within the target is better than one that misses it, though best-effort gets less", () => {
    const { controller } = run({ p99_over_alone: 1.05 }, 80, world(meetsWithLess));
    expect(controller.summary().settings).toMatchObject({ suspend: 0, slice_us: 50 });
    expect(controller.unreachable).toBe(false);
  });

  test("requests that leave the GPU idle get it later, as far as that costs them nothing", () => {
    const { ticks, controller } = run({ p99_over_alone: 1.05 }, 90, world(lateIsFine));
    const { suspend, defer_us = 0, defer_ppm, need_us = 0, slice_us } = controller.summary().settings ?? {};
    expect({ suspend, defer_ppm, slice_us }).toEqual({ suspend: 1, defer_ppm: 0, slice_us: 16_000 });
    // 0.58 of a request of 3.3 ms, and what is left: with the next rung it would be more than 1.5 ms.
    expect(Math.abs(need_us - 1914)).toBeLessThan(80);
    expect(Math.abs(defer_us / need_us - 42 / 58)).toBeLessThan(0.01);
    expect(ticks.findIndex(({ settings }) => (settings?.defer_us ?? 0) > 1100) * TICK_S).toBeLessThan(21);
  });

  test.each([true, false])(
    "slices are short for requests that it gives way to at once, whatever others took before: %p",
    (stays) => {
      const late = afterLonger(80, stays)
        .slice(600)
        .filter((is) => isLate(is) && (is?.need_us ?? 0) > 4200);
      expect([...new Set(late.map((is) => is?.slice_us))]).toEqual([50]);
    },
  );

  test("a burst of requests in the second of a trial does not make it a bad rung", () => {
    const settings = waitedFor(12, 110);
    const first = settings.findIndex((is) => (is?.defer_us ?? 0) > 0);
    expect(first * TICK_S).toBeWithin(1, 10);
    expect(settings.slice(first).filter((is) => is?.suspend === 1 && is.defer_us === 0)).toEqual([]);
  });

  test("for a target in milliseconds, too, a late suspension knows how late", () => {
    let slow = 1;
    const effect: World["effect"] = ({ settings }) => {
      const { suspend = 1, defer_us = 0 } = settings ?? {};
      if (suspend === 0) return { slowdown: 2, launches_per_s: 800 };
      return { slowdown: defer_us > 1500 ? 1.6 : defer_us > 0 ? slow : 1, launches_per_s: 900 + defer_us / 20 };
    };
    const { ticks } = run({ p99_ms: 8 }, 150, (t_s) => {
      slow = t_s < 70 ? 1 : 3;
      return world(effect)();
    });
    expect(ticks.slice(0, 700).at(-1)?.settings?.defer_us).toBeWithin(1000, 1500);
    expect(ticks.filter(({ settings }) => settings?.slice_us === 16_000 && settings.need_us === 0)).toEqual([]);
  });

  test("requests that keep the GPU busy are spared it, by what they wait for where nothing is known of them alone", () => {
    expect(waitedFor(20, 55, { p99_ms: 8 }).some(isLate)).toBe(true);
    expect(waitedFor(20, 55, { p99_ms: 8 }, 3.3).some(isLate)).toBe(false);
  });

  test("of a target in milliseconds nothing is tried before 200 requests are known, or ten seconds are over", () => {
    expect(firstTrial_s(60)).toBeWithin(3, 5);
    expect(firstTrial_s(10)).toBeWithin(10, 11);
  });

  test("of a target in milliseconds few requests tell by how much they are longer than others", () => {
    expect(judged(10, numbers(60, 4.2, 61, 0), numbers(400, 4, 50, 9))).toBe("within");
    expect(judged(10, numbers(60, 4.8, 61, 0), numbers(400, 4, 50, 9))).toBe("over");
    expect(judged(10, numbers(60, 4.8, 61, 0))).toBe("within");
    // Others that miss it say nothing, and of two kinds of requests the median may be of either.
    expect(judged(10, numbers(60, 4.8, 61, 0), numbers(400, 4, 50, 11))).toBe("within");
    expect(judged(25, [...numbers(14, 20, 61, 0), ...numbers(46, 2, 2, 20)], numbers(400, 2, 2, 20))).toBe("within");
  });

  test("slices alone, which give less than late suspension, are tried twice in a minute at most", () => {
    const settings = waitedFor(90, 55);
    const late = settings.findIndex((is) => (is?.defer_us ?? 0) > 0);
    const slices = settings.slice(late).map((is) => is?.suspend === 0);
    const trials = slices.filter((is, at) => is && !slices[at - 1]);
    expect(trials.length).toBeWithin(1, 4);
    expect(slices.filter(Boolean).length * TICK_S).toBeLessThan(4);
  });

  test("under MPS it moves the launches in flight, within fifteen seconds", () => {
    const { ticks, controller } = run({ p99_over_alone: 1.05 }, 60, world(underMps, { preemption: false }));
    expect(controller.summary().settings).toEqual(SAFEST);
    expect(ticks.findIndex(({ settings }) => settings?.inflight === 8) * TICK_S).toBeLessThan(15);
  });

  test("under MPS short kernels that delay nothing end with next to no limit, within half a minute", () => {
    const free = run({ p99_over_alone: 1.05 }, 60, world(undisturbed, { preemption: false }));
    expect(free.controller.summary().settings).toMatchObject({ inflight: 256, corun: 256 });
    expect(free.ticks.findIndex(({ settings }) => settings?.corun === 256) * TICK_S).toBeLessThan(30);
    // What delays them there is tried for a moment now and then.
    const partly = run({ p99_over_alone: 1.05 }, 60, world(disturbedByMany, { preemption: false }));
    expect(partly.controller.summary().settings).toMatchObject({ inflight: 32, corun: 32 });
    expect(partly.ticks.filter(({ slowdown }) => slowdown > 1.1).length * TICK_S).toBeLessThan(5);
  });

  test("where streams stop and nothing tells what delays requests, all of them run never", () => {
    const { ticks, controller } = run({ p99_over_alone: 1.05 }, 60, world(harmlessUnlessFree, { stops: true }));
    expect(ticks.every(({ settings }) => settings?.suspend !== 0)).toBeTrue();
    expect(controller.summary().settings).toMatchObject({ suspend: 1 });
    expect(controller.summary().settings?.defer_us).toBeGreaterThan(2000);
  });

  test("a program that loses its processor in the middle of requests has no other load", () => {
    expect(pausing(true).every((settings) => settings?.inflight === 256)).toBeTrue();
    expect(pausing(false).every((settings) => settings?.inflight === 256)).toBeFalse();
  });

  test("under MPS it goes below where it began if requests miss the target there", () => {
    const { ticks, controller } = run({ p99_over_alone: 1.05 }, 60, world(strict, { preemption: false }));
    expect(controller.summary()).toMatchObject({ rung: 0, settings: { inflight: 2 } });
    // What runs beside requests would come on top of what is in flight.
    expect(ticks.filter(({ settings }) => (settings?.corun ?? 0) > 0)).toEqual([]);
  });

  test("what it learned from a program that was still warming up is forgotten", () => {
    const { controller } = run({ p99_over_alone: 1.05 }, 100, world(gpuBound), warm);
    expect(controller.summary().alone.p50_ms).toBeLessThan(3.5);
    expect(controller.summary().settings?.slice_us).toBe(200);
  });

  test("the last hour is kept by the second", () => {
    const controller = new Controller({ p99_ms: 8 });
    const seen = { elapsed_s: TICK_S, requests: histogramOf([]), launches: 1, neighbours: "1", measured: "7 reports" };
    for (let tick = 0; tick < 3700 / TICK_S; tick++) controller.step({ ...seen, preemption: true });
    expect(controller.seconds).toHaveLength(3600);
    expect([controller.seconds[0]?.t_s, controller.seconds.at(-1)?.t_s]).toEqual([101, 3700]);
  });

  test("few requests decide nothing", () => {
    const { controller } = run({ p99_over_alone: 1.05 }, 20, world(gpuBound, { rate_per_s: 0.3 }));
    expect(controller.summary()).toMatchObject({ rung: 2, unreachable: false });
  });

  test("a tick that took longer is recorded over its time, and nothing is learned from it", () => {
    const controller = new Controller({ p99_over_alone: 1.05 });
    const step = (elapsed_s: number, durations: number[], launches: number): Action =>
      controller.step({
        elapsed_s,
        requests: histogramOf(durations),
        launches,
        neighbours: "1",
        measured: "7 reports",
        preemption: true,
      });
    const usual = Array.from({ length: 6 }, (_, index) => 3 + index / 10);
    let ticks = 0;
    for (; !step(TICK_S, usual, 10).hold; ticks++) expect(ticks).toBeLessThan(100);
    const { t_s } = controller;
    step(TICK_S, usual, 0);
    step(TICK_S, usual, 0);
    const before = controller.summary();
    expect(before.alone.requests).toBeGreaterThan(0);
    // For three seconds nobody renewed the hold, and best-effort work went on.
    const { hold } = step(
      3,
      Array.from({ length: 180 }, () => 30),
      3000,
    );
    expect(hold).toBe(true);
    expect(controller.t_s).toBeCloseTo(t_s + 0.2 + 3, 6);
    const after = controller.summary();
    expect(after.alone.requests).toBeLessThanOrEqual(before.alone.requests);
    expect(after.alone.p99_ms).toBeLessThan(4);
    expect(after.now).toEqual(before.now);
    expect(after.held_s - before.held_s).toBeCloseTo(0.2, 6);
    // The window goes on, without what ended just after.
    expect(step(TICK_S, usual, 0).hold).toBe(true);
    expect(controller.summary().alone.requests).toBe(after.alone.requests);
    const last = controller.seconds.at(-1);
    expect(last?.t_s).toBe(Math.floor(t_s + 3.2));
    expect(last?.over_s).toBeGreaterThan(3);
    expect(last?.best_effort_launches_per_s).toBeLessThanOrEqual(1000);
    expect((last?.requests ?? 0) / (last?.over_s ?? 1)).toBeLessThan(61);
    expect(controller.seconds.reduce((sum, { over_s }) => sum + over_s, 0)).toBeLessThanOrEqual(controller.t_s);
  });

  test("launches a second are those of the time that ticks took, though all came somewhat late", () => {
    const controller = new Controller({ p99_over_alone: 1.05 });
    for (const elapsed_s of Array.from({ length: 20 }, (_, tick) => (tick % 2 ? 0.19 : 0.13)))
      controller.step({
        elapsed_s,
        requests: histogramOf([]),
        launches: 1000 * elapsed_s,
        neighbours: "1",
        measured: "",
        preemption: true,
      });
    const told = controller.seconds.map((second) => second.best_effort_launches_per_s);
    expect(told.map(Math.round)).toEqual([1000, 1000]);
  });

  test("requests of a program that warms up say nothing of the settings that it begins with", () => {
    const { controller } = run({ p99_ms: 10 }, 8, world(gpuBound), (t_s) => (t_s < 1 ? 80 : t_s < 2 ? 20 : 1));
    const { now } = controller.summary();
    expect(now.requests).toBeGreaterThan(50);
    expect(now.p99_ms).toBeLessThan(10);
  });

  test("says nothing of settings that were never in force", () => {
    const { controller } = run({ p99_over_alone: 1.05 }, 5, world(underMps, { preemption: false, rate_per_s: 0 }));
    expect(controller.summary()).toMatchObject({ settings: undefined, changes: 0 });
  });
});

test("of a program's requests it is seen when they began and how long they lasted", async () => {
  await using programs = new Programs(await Native.load());
  const { segment, native } = programs;
  const before_ms = segment.now_ns / 1e6;
  const profile = programs.scratch.file("tiny.csv", TINY_PROFILE);
  const child = programs.run(
    [native.files.replay, "--profile", profile, "--rate", "200", "--iterations", "50"],
    "serve",
    "high",
  );
  expect(await child.exited).toBe(0);
  const [slot] = segment.slots();
  const { latest } = slot ? segment.waits(slot, 0n) : { latest: [] };
  expect(latest.length).toBeGreaterThan(30);
  // It waits for each of them; where it lost its processor meanwhile the agent has ended one, too.
  const { own, byAgent } = slot ? segment.ended(slot) : { own: 0, byAgent: 0 };
  expect(own).toBeWithin(latest.length, 60); // and for what the replay does first
  expect(byAgent).toBeLessThan(8 * own);
  let free_ms = before_ms;
  for (const { began_ms = 0, worked_ms, waited_ms } of latest) {
    expect(began_ms).toBeGreaterThan(free_ms - 0.001);
    free_ms = began_ms + worked_ms + waited_ms;
  }
  expect(free_ms).toBeLessThan(segment.now_ns / 1e6);
});

test("of a best-effort program it is seen how much of its time is in long kernels", async () => {
  await using programs = new Programs(await Native.load());
  const { segment, native } = programs;
  // One kernel in ten takes 2 ms in place of 0.2, which is half of the time.
  const [head = "", names = "", row = "", ...rest] = TINY_PROFILE.split("\n");
  const rows = Array.from({ length: 10 }, (_, i) =>
    i ? row : row.replace(",200000,", ",2000000,").replace(",132,", ",131,"),
  );
  const profile = programs.scratch.file("long.csv", [head, names, ...rows, ...rest].join("\n"));
  programs.run([native.files.replay, "--profile", profile], "train", "best-effort");
  for (;;) {
    const [slot] = segment.slots();
    const part = slot && segment.work(slot).longPart;
    if (part !== undefined) {
      expect(part).toBeWithin(0.3, 0.7);
      break;
    }
    await Bun.sleep(50);
  }
});
