/**
 * slo-share.test.ts: how often best-effort work has its least share, by the requests of several clients, those that come by themselves, and what a piece
 * says of how starved it was.
 */

import { expect, test } from "bun:test";
import type { Wait } from "../src/slo-delay.ts";
import { LeastShare } from "../src/slo-share.ts";
import { TICK_S } from "../src/slo.ts";
import { histogramOf, random } from "./histograms.ts";

const IDLE = { launches: 0, neighbours: "1", measured: "7", preemption: true };

/** Requests of `took_ms` that arrive by a Poisson process, one served after the other; 0 per second: each at once after the one before. */
function server(client: number, took_ms: number, per_s: number, seed: number) {
  const noise = random(seed);
  let free_ms = 0;
  let due_ms = 0;
  return (until_ms: number): Wait[] => {
    const waits: Wait[] = [];
    for (;;) {
      const began_ms = per_s === 0 ? free_ms + 0.1 : Math.max(free_ms, due_ms);
      if (began_ms >= until_ms) return waits;
      waits.push({ client, began_ms, worked_ms: 0.8 * took_ms, waited_ms: 0.2 * took_ms });
      free_ms = began_ms + took_ms;
      if (per_s > 0) due_ms += (-1000 * Math.log(1 - noise())) / per_s;
    }
  };
}

const seen = (waits: Wait[]) => ({
  ...IDLE,
  elapsed_s: TICK_S,
  waits,
  requests: histogramOf(waits.map(({ worked_ms, waited_ms }) => worked_ms + waited_ms)),
});

/** The periods after so many seconds, each tick's. */
function periods(seconds: number, from_s: number, ...servers: ReturnType<typeof server>[]): number[] {
  const share = new LeastShare();
  const all: number[] = [];
  for (let tick = 1; tick <= seconds / TICK_S; tick++) {
    const waits = servers.flatMap((serve) => serve(1000 * tick * TICK_S));
    share.step(seen(waits), tick * TICK_S, true);
    if (tick * TICK_S > from_s) all.push(share.period_s);
  }
  return all;
}

test("the client with the fewest requests counts", () => {
  expect(new Set(periods(10, 3, server(0, 1, 0, 1), server(1, 2, 0, 1)))).toEqual(new Set([1]));
  expect(new Set(periods(10, 3, server(0, 1, 0, 1), server(1, 0.7, 0, 1)))).toEqual(new Set([0.6]));
  expect(new Set(periods(10, 0, server(0, 1, 0, 1), server(1, 20, 0, 1)))).toEqual(new Set([0]));
});

/** The period beside so many best-effort clients. */
function periodBeside(sharers: number): number {
  const share = new LeastShare();
  const serve = server(0, 1, 0, 1);
  for (let tick = 1; tick < 50; tick++) share.step({ ...seen(serve(100 * tick)), sharers }, tick * TICK_S, true);
  return share.period_s;
}

test("each best-effort client on the GPU delays as many", () => {
  expect([0, 1, 2, 8].map(periodBeside)).toEqual([0.6, 0.6, 1, 0]);
});

test("where it is in force somewhat fewer requests are enough", () => {
  expect(new Set(periods(20, 3, server(0, 7, 0, 1)))).toEqual(new Set([0]));
  const [fast, slow] = [server(0, 1, 0, 1), server(0, 7, 0, 1)];
  const slower = (until_ms: number): Wait[] => {
    const waits = slow(until_ms);
    return until_ms <= 5000 ? fast(until_ms) : waits;
  };
  expect(new Set(periods(30, 25, slower))).toEqual(new Set([1]));
});

test("a client that has gone does not", () => {
  const slow = server(1, 20, 0, 1);
  const gone = (until_ms: number): Wait[] => (until_ms < 5000 ? slow(until_ms) : []);
  const all = periods(20, 0, server(0, 1, 0, 1), gone);
  expect(new Set(all.slice(0, 140))).toEqual(new Set([0]));
  expect(new Set(all.slice(160))).toEqual(new Set([0.6]));
});

test.each([1, 2, 3, 4])(
  "requests that come by themselves, at 0.9 of what can be served, are no such: seed %d",
  (seed) => {
    const all = periods(60, 5, server(0, 4, 225, seed));
    expect(all.filter((period_s) => period_s > 0).length).toBeLessThan(0.02 * all.length);
  },
);

/** Requests of 2 ms, of which from then on one in 66 begins 2 ms after the one before. */
const strayingFrom = (begins_ms: number) => {
  let free_ms = 0;
  let served = 0;
  return (until_ms: number): Wait[] => {
    const waits: Wait[] = [];
    while (free_ms < until_ms) {
      waits.push({ client: 0, began_ms: free_ms, worked_ms: 1, waited_ms: 1 });
      free_ms += 2 + (free_ms > begins_ms && ++served % 66 === 0 ? 2 : 0.1);
    }
    return waits;
  };
};

test("copies before and after one are no requests", () => {
  const copies = server(0, 12, 0, 1);
  const waits = (until_ms: number): Wait[] =>
    copies(until_ms).flatMap((of) => [
      { ...of, worked_ms: 0.01, waited_ms: 0.2 },
      { ...of, began_ms: (of.began_ms ?? 0) + 0.3, worked_ms: 11, waited_ms: 0.4 },
      { ...of, began_ms: (of.began_ms ?? 0) + 11.8, worked_ms: 0.01, waited_ms: 0.2 },
    ]);
  expect(new Set(periods(10, 0, waits))).toEqual(new Set([0]));
});

test("a program that reports its latencies has as many requests as it reports", () => {
  const share = new LeastShare();
  const serve = server(0, 2, 0, 1);
  for (let tick = 1; tick < 80; tick++) {
    const requests = histogramOf([64]);
    share.step({ ...seen(serve(100 * tick)), requests }, tick * TICK_S, true);
    expect(share.period_s).toBe(0);
  }
});

test("pauses as long as a tick are seen", () => {
  const serve = server(0, 1.5, 0, 1);
  let shift_ms = 0;
  const paused = (until_ms: number): Wait[] => {
    if (until_ms % 200 === 0) {
      shift_ms += 100;
      return [];
    }
    return serve(until_ms - shift_ms).map((of) => ({ ...of, began_ms: (of.began_ms ?? 0) + shift_ms }));
  };
  const share = new LeastShare();
  const all: number[] = [];
  for (let tick = 1; tick < 100; tick++) {
    share.step(seen(paused(100 * tick)), tick * TICK_S, true);
    all.push(share.period_s);
  }
  expect(all.slice(40).filter((period_s) => period_s > 0)).toEqual([]);
});

test("where it is in force a few more requests may begin late", () => {
  expect(new Set(periods(30, 3, strayingFrom(0)))).toEqual(new Set([0]));
  expect(new Set(periods(30, 3, strayingFrom(5000)))).toEqual(new Set([1]));
});

test("where it is not kept off the GPU in slices there is none", () => {
  const share = new LeastShare();
  const serve = server(0, 1, 0, 1);
  const step = (tick: number, isOff: boolean): number => {
    share.step(seen(serve(100 * tick)), tick * TICK_S, isOff);
    return share.period_s;
  };
  for (let tick = 1; tick < 50; tick++) step(tick, true);
  expect(step(50, true)).toBe(0.6);
  expect(step(51, false)).toBe(0);
});

test("a piece stands for a period where there was one before, else for the starvation bound", () => {
  const share = new LeastShare();
  const serve = server(0, 2, 0, 1);
  const step = (tick: number, starved: number): number =>
    share.step({ ...seen(serve(100 * tick)), starved }, tick * TICK_S, true);
  for (let tick = 1; tick < 50; tick++) expect(step(tick, 0)).toBe(0);
  expect(share.period_s).toBe(1);
  expect(step(50, 1)).toBe(0.1);
  for (let tick = 51; tick < 61; tick++) step(tick, 0);
  expect(step(61, 1)).toBe(1);
  for (let tick = 62; tick < 81; tick++) step(tick, 0);
  expect(step(81, 1)).toBe(0.1);
});

test("until enough is known there is none", () => {
  expect(new Set(periods(1.9, 0, server(0, 1, 0, 1)))).toEqual(new Set([0]));
});
