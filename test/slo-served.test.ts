/**
 * slo-served.test.ts: the controller of policy `slo` beside a program that serves requests one after the other, or at once, each of
 * which takes longer while others run: programs that start anew, have few requests, or long ones, and a loop that is seldom run.
 */

import { describe, expect, test } from "bun:test";
import { endText, isMissed, missedText } from "../src/show.ts";
import type { Wait } from "../src/slo-delay.ts";
import { type Action, Controller, TICK_S } from "../src/slo.ts";
import { histogramOf, random } from "./histograms.ts";

interface Program {
  /** Requests a second, at random. */
  per_s: number;
  /** What one takes alone, of which the program works itself, if that is seen. */
  takes_ms: number;
  works_ms?: number;
  /** All that have come are under way at once. */
  isConcurrent?: boolean;
  /** By how much longer they take as the program warms up. */
  warm?: (t_s: number) => number;
  process?: (t_s: number) => string;
  /** By how much longer beside best-effort work under these settings. */
  slow: (settings: Action["settings"]) => number;
}

const STEP_ms = 1;

/** Runs a controller for so many seconds, or until it does that; by tick whether requests were slowed by a tenth or more. */
function serve(seconds: number, program: Program, seed: number, until = (_action: Action): boolean => false) {
  const { per_s, takes_ms, works_ms, isConcurrent = false, warm, process, slow } = program;
  const controller = new Controller({ p99_over_alone: 1.05 });
  const next = random(seed);
  const gap_ms = (): number => (-Math.log(1 - next()) / per_s) * 1000;
  let action: Action = { settings: undefined, hold: false };
  let live: { began_ms: number; left_ms: number }[] = [];
  let comes_ms = gap_ms();
  const ticks: { t_s: number; isSlow: boolean }[] = [];
  for (let tick = 0; tick < seconds / TICK_S; tick++) {
    const t_s = tick * TICK_S;
    const beside = action.hold ? 1 : slow(action.settings);
    const durations: number[] = [];
    const waits: Wait[] = [];
    for (let t_ms = t_s * 1000; t_ms < (t_s + TICK_S) * 1000; t_ms += STEP_ms) {
      for (; comes_ms <= t_ms; comes_ms += gap_ms())
        live.push({ began_ms: t_ms, left_ms: takes_ms * (1 + 0.1 * (next() - 0.5)) * (warm?.(t_s) ?? 1) });
      for (const request of isConcurrent ? live : live.slice(0, 1)) {
        request.left_ms -= STEP_ms / beside;
        if (request.left_ms > 0) continue;
        const took_ms = t_ms + STEP_ms - request.began_ms;
        durations.push(took_ms);
        const worked_ms = Math.min(works_ms ?? 0, took_ms);
        waits.push({ client: 0, began_ms: request.began_ms, worked_ms, waited_ms: took_ms - worked_ms });
        const after = live[1];
        if (!isConcurrent && after) after.began_ms = t_ms + STEP_ms;
      }
      live = live.filter(({ left_ms }) => left_ms > 0);
    }
    const inflight = action.settings?.inflight ?? 8;
    action = controller.step({
      elapsed_s: TICK_S,
      requests: histogramOf(durations),
      ...(works_ms !== undefined && { waits }),
      came: durations.length,
      launches: action.hold ? 0 : 100 * (1 + 0.01 * inflight),
      neighbours: "1",
      measured: process?.(t_s) ?? "7 busy",
      preemption: false,
    });
    ticks.push({ t_s, isSlow: beside > 1.1 });
    if (until(action)) break;
  }
  return { controller, ticks };
}

/** More than so many launches in flight delay requests. */
const delayedAbove =
  (most: number, factor: number): Program["slow"] =>
  (settings) =>
    (settings?.inflight ?? most) > most || (settings?.corun ?? 0) > 0 ? factor : 1.01;

function slowFrom(ticks: ReturnType<typeof serve>["ticks"], from_s: number, to_s: number): number {
  return ticks.filter(({ t_s, isSlow }) => t_s >= from_s && t_s < to_s && isSlow).length * TICK_S;
}

describe("a program that warms up, as it starts anew, is not what others are compared with", () => {
  const program: Program = { per_s: 40, takes_ms: 8, works_ms: 2, slow: delayedAbove(8, 1.4) };

  const restarted = (factor: number, seconds: number): Program => ({
    ...program,
    warm: (t_s) => (t_s >= 100 && t_s < 100 + seconds ? factor : 1),
    process: (t_s) => (t_s < 98 ? "7 busy" : t_s < 100 ? "" : "9 busy"),
  });

  test.each([7, 8, 9])("with seed %d", (seed) => {
    expect(slowFrom(serve(200, restarted(3, 4), seed).ticks, 106, 200)).toBeLessThan(8);
  });

  test.each([7, 8, 9])("though by little and for long: with seed %d", (seed) => {
    expect(slowFrom(serve(240, restarted(1.5, 6), seed).ticks, 150, 240)).toBeLessThan(8);
  });
});

/** A tick in which nothing comes, while these clients are there. */
function step(controller: Controller, measured: string, neighbours: string): Action {
  return controller.step({
    elapsed_s: TICK_S,
    requests: histogramOf([]),
    waits: [],
    came: 0,
    launches: 0,
    neighbours,
    measured,
    preemption: false,
  });
}

describe("what was found", () => {
  const program: Program = { per_s: 40, takes_ms: 8, works_ms: 2, slow: delayedAbove(8, 1.4) };
  test.each([
    ["the high client has ended", ["", "1"]],
    ["the best-effort one has ended, and then the high one", ["7 busy", ""]],
    ["one high client of two has ended, and then the other", ["8 busy", "1"]],
  ] as const)("is told at the end where %s", (_why, [measured, neighbours]) => {
    const { controller } = serve(60, program, 7);
    const { alone, now, over_alone, verdict } = controller.found();
    expect([alone.requests > 0, now.requests > 0, over_alone !== null]).toEqual([true, true, true]);
    for (let tick = 0; tick < 3; tick++) step(controller, measured, neighbours);
    // Nobody is held for those that have gone, and of them nothing is shown as being so now.
    for (let tick = 0; tick < 600; tick++) expect(step(controller, "", "").hold).toBe(false);
    expect(controller.found()).toMatchObject({ alone, now, over_alone, verdict });
    expect(controller.summary()).toMatchObject({ alone: { requests: 0 }, now: { requests: 0 }, verdict: "unknown" });
  });

  test("is told of the rung that it stands on, while it tries another", () => {
    const trial = serve(60, program, 7, ({ isTrial }) => isTrial === true);
    expect(trial.ticks.length).toBeLessThan(600);
    expect(isMissed(trial.controller.summary())).toBe(false);
    expect(trial.controller.summary().now.requests).toBeGreaterThan(0);
  });

  test("is a miss where it is known to be one", () => {
    const { controller } = serve(11, { ...program, slow: () => 1.3 }, 7);
    const found = controller.found();
    const { over_alone } = found;
    expect(found).toMatchObject({ verdict: "over", unreachable: false });
    expect(isMissed(found)).toBe(true);
    expect(missedText(found)).toMatch(/^missed: p\d+ was 1\.\d+ of alone at the end$/);
    const unknown = { ...found, verdict: "unknown", over_alone: null } as const;
    expect(isMissed({ ...unknown, unreachable: true })).toBe(true);
    expect(isMissed({ ...unknown, verdict: "within" })).toBe(false);
    expect(isMissed({ ...unknown, over_alone, reachable: 1.05 })).toBe(false);
    expect(isMissed(unknown)).toBeNull();
  });

  test("is neither a miss nor met where some requests are far over the target, too few to be sure", () => {
    const { controller } = serve(60, program, 7);
    const found = { ...controller.found(), verdict: "unknown", percentile: 95, reachable: 3.919 } as const;
    expect(isMissed(found)).toBeNull();
    expect(missedText(found)).toBe("");
    expect(endText(found)).toBe("p95 was 3.92 of alone, of too few requests to tell");
    expect(endText({ ...found, over_alone: null })).toBe("too few requests to tell");
    expect(endText({ ...found, reachable: 1.09 })).toBe("");
  });

  test("no window is held for a program that ended while it warmed up", () => {
    const { controller } = serve(0.5, program, 7);
    for (let tick = 0; tick < 300; tick++) expect(step(controller, "", "1").hold).toBe(false);
  });
});

test("few requests: what cannot be known in time is not tried for ever", () => {
  const { ticks } = serve(2700, { per_s: 1, takes_ms: 32, works_ms: 2, slow: delayedAbove(4, 2) }, 5);
  expect(slowFrom(ticks, 60, 2700)).toBeLessThan(20);
});

describe("long requests are compared with those that were alone from their beginning to their end", () => {
  const program = { per_s: 20, isConcurrent: true, slow: (): number => 1.3 };

  test("a window is long enough for them", () => {
    const { alone, unreachable } = serve(300, { ...program, takes_ms: 1000 }, 3).controller.summary();
    expect(alone.p50_ms).toBeGreaterThan(900);
    expect(alone.p50_ms).toBeLessThan(1070);
    expect(unreachable).toBe(true);
  });

  test("best-effort work that went on while the loop was stopped amid a window was beside those that began meanwhile", () => {
    const controller = new Controller({ p99_over_alone: 1.05 });
    const pass = (durations: number[], elapsed_s = TICK_S): Action =>
      controller.step({
        elapsed_s,
        requests: histogramOf(durations),
        waits: durations.map((ms) => ({ client: 0, worked_ms: 1, waited_ms: ms - 1 })),
        launches: 10,
        neighbours: "1",
        measured: "7 busy",
        preemption: true,
      });
    for (let ticks = 0; !pass([400]).hold; ticks++) expect(ticks).toBeLessThan(100);
    for (let ticks = 0; ticks < 5; ticks++) expect(pass([]).hold).toBe(true);
    // The hold has ended by itself 0.2 s after the last tick.
    expect(pass([], 0.8).hold).toBe(true);
    expect(pass([]).hold).toBe(true);
    // Of these only the second began after the loop had gone on.
    pass([450, 90]);
    expect(controller.summary().alone).toMatchObject({ requests: 1 });
    expect(controller.summary().alone.p50_ms).toBeLessThan(100);
  });

  test("where none can be, nothing is tried", () => {
    const long = { ...program, takes_ms: 6000, slow: delayedAbove(4, 1.3) };
    const { controller, ticks } = serve(300, long, 3);
    expect(slowFrom(ticks, 30, 300)).toBe(0);
    expect(controller.summary().alone.requests).toBe(0);
  });
});

test("a loop that is always late holds nobody for ever, and tries nothing for ever", () => {
  const controller = new Controller({ p99_over_alone: 1.05 });
  let action: Action = { settings: undefined, hold: false };
  const tickAfter = (elapsed_s: number): void => {
    action = controller.step({
      elapsed_s,
      requests: histogramOf([3, 3.1, 3.2, 3.3, 3.4, 3.5]),
      launches: action.hold ? 0 : 10,
      neighbours: "1",
      measured: "7 reports",
      preemption: true,
    });
  };
  const late = (isUnderWay: () => boolean): number =>
    Array.from({ length: 400 }, () => tickAfter(0.25)).filter(isUnderWay).length;
  for (let tick = 0; tick < 3000 && !(action.hold && controller.t_s > 30); tick++) tickAfter(TICK_S);
  expect(action.hold).toBe(true);
  expect(late(() => action.hold)).toBeLessThan(40);
  const rung = (): number => controller.summary().rung;
  let before = rung();
  for (let tick = 0; tick < 3000 && !(rung() > before && !action.hold); tick++) {
    before = rung();
    tickAfter(TICK_S);
  }
  const tried = rung();
  expect(tried).toBeGreaterThan(before);
  expect(late(() => rung() === tried)).toBeLessThan(40);
});

test("what ends just after a trial that was given up, as the loop was late, says nothing of the rung gone back to", () => {
  const controller = new Controller({ p99_over_alone: 1.05 });
  const pass = (elapsed_s: number): Action =>
    controller.step({
      elapsed_s,
      requests: histogramOf([3, 3.1, 3.2, 3.3, 3.4, 3.5]),
      launches: 10,
      neighbours: "1",
      measured: "7 reports",
      preemption: true,
    });
  for (let ticks = 0; !pass(TICK_S).isTrial; ticks++) expect(ticks).toBeLessThan(1000);
  for (let ticks = 0; pass(0.25).isTrial; ticks++) expect(ticks).toBeLessThan(40);
  const { now } = controller.summary();
  expect(now.requests).toBeGreaterThan(0);
  pass(TICK_S);
  // Of that rung, though it may try another by now.
  expect(controller.summary().now.requests).toBeLessThanOrEqual(now.requests);
});

/** Of the programs below, who begin on 4. */
const isTried = ({ settings }: Action): boolean => (settings?.inflight ?? 0) > 4;

test("what is just being tried does not stay where nobody goes on", () => {
  const program = { per_s: 60, takes_ms: 4, works_ms: 1, slow: delayedAbove(4, 1.4) };
  const { controller } = serve(60, program, 7, isTried);
  expect(controller.summary().settings?.inflight).toBeGreaterThan(4);
  expect(controller.leave()?.inflight).toBe(4);
});

test("after half an hour without requests best-effort work is held for no larger part of the time than before", () => {
  const controller = new Controller({ p99_over_alone: 1.05 });
  const next = random(5);
  let hold = false;
  /** For how long it is held beside so many requests a second. */
  const held_s = (seconds: number, rate_per_s: number): number => {
    const before_s = controller.summary().held_s;
    for (let tick = 0; tick < seconds / TICK_S; tick++) {
      const waits: Wait[] = [];
      for (let at = -Math.log(1 - next()); at < rate_per_s * TICK_S; at -= Math.log(1 - next()))
        waits.push({ client: 0, worked_ms: 0.3 + 0.02 * next(), waited_ms: (4 + 0.05 * next()) * (hold ? 1 : 1.1) });
      ({ hold } = controller.step({
        elapsed_s: TICK_S,
        requests: histogramOf(waits.map(({ worked_ms, waited_ms }) => worked_ms + waited_ms)),
        waits,
        launches: hold ? 0 : 700,
        neighbours: "1",
        measured: "7 busy",
        preemption: true,
      }));
    }
    return controller.summary().held_s - before_s;
  };
  held_s(60, 30);
  expect(held_s(1800, 0)).toBeLessThan(2);
  // Two windows at once, and 2% at most.
  expect(held_s(120, 5)).toBeLessThan(2 * 0.6 + 0.02 * 120 + 0.6);
});
