/**
 * bench.test.ts: `rigel bench`: its numbers worked out by hand, and tiny benchmarks of the simulated GPU from end to end.
 *
 * What is measured is never compared with anything: the machine may be slow. Programs that are not ready in time are run
 * again by the command itself, so a short lead costs time, not the result; and where that is not enough the whole benchmark is.
 */

import { describe, expect, spyOn, test } from "bun:test";
import { existsSync, readFileSync, readdirSync } from "node:fs";
import { join } from "node:path";
import { z } from "zod";
import { type Bed, type Found, type Job, anewJobs, gpuTimeJob, inTime, soloJob } from "../src/bench-jobs.ts";
import { liveJobs } from "../src/bench-live.ts";
import {
  allPairs,
  allWays,
  choosePairs,
  choosePolicies,
  chooseWays,
  isLive,
  isSwitchable,
} from "../src/bench-matrix.ts";
import { usualTiming, usualWays } from "../src/bench.ts";
import { overviewPicture } from "../src/bench-overview.ts";
import { page as htmlOf } from "../src/bench-page.ts";
import { type BenchDocument, documentOf, markdown, shownOf } from "../src/bench-report.ts";
import { Interrupted, type Log, type Ran, type Run, RunFailed } from "../src/bench-run.ts";
import {
  ARRIVALS,
  type Arrivals,
  type Copies,
  type Measurement,
  type Sample,
  type Solo,
  arrivalTimes,
  beginsQueued,
  counted as countedSteps,
  gapsOf,
  latencyOf,
  median,
  moreOf,
  outlasts,
  quantile,
  rowsOf,
  pairedRatios,
  schedule,
  soloOf,
  soloTurns,
  spread,
  stepsBetween,
  together,
  within as withinWindow,
} from "../src/bench-stats.ts";
import { policySchema } from "../src/config.ts";
import { Native } from "../src/native.ts";
import { allowedProcessors } from "../src/proc.ts";
import { generator } from "../src/random.ts";
import { Segment } from "../src/segment.ts";
import type { Stayed, Wait } from "../src/slo-delay.ts";
import { Scratch, rigel, root, start } from "./rigel.ts";
import { until } from "./serving.ts";

/** Ten requests of one latency. */
function ten(latency_ms: number): Sample[] {
  return Array.from({ length: 10 }, (_, index) => [index, latency_ms]);
}

/** Fifty requests that all had to wait for so long. */
function waits(waited_ms: number): Wait[] {
  return Array.from({ length: 50 }, (_, i) => ({ client: 0, worked_ms: 2 + i / 100, waited_ms }));
}

/** What MPS itself is said to cost at p50, by how the programs were started. */
function costOf(...measurements: Measurement[]): [string, number | null][] {
  return rowsOf(measurements, new Map()).map(({ method, mps_cost }) => [method, mps_cost?.p50 ?? null]);
}

/** What a benchmark of one pair wrote. */
function documentFor(pair: string, measurements: readonly Measurement[]): BenchDocument {
  const [high = "", ...best] = pair.split("+");
  return documentOf({
    started: "2026-01-01T00:00:00.000Z",
    device: { index: 0, name: "GPU", uuid: "GPU-1", simulated: false, sms: 1, memory_bytes: 1, exclusive: false },
    driver: null,
    versions: {},
    host: { processor: "p", processors: 1, kernel: "k" },
    options: {
      rounds: 1,
      duration_s: 1,
      lead_s: 1,
      window_s: 1,
      learn_s: 20,
      copies: 1,
      rate_per_s: 1,
      arrivals: "poisson",
      seed: 1,
      live: true,
      solo: false,
    },
    policies: {},
    pairs: [{ name: pair, high, best }],
    runs: 1,
    done: 1,
    gpu_times: [],
    measurements: measurements.map((measurement) => ({ ...measurement, pair })),
    solo: [],
    loops: [],
    failures: [],
    notes: [],
  });
}

/** As Markdown and as a page. */
function shown(...measurements: Measurement[]): string[] {
  const made = shownOf(documentFor("p", measurements));
  return [markdown(made), htmlOf(made)];
}

function one(way: string, round: number, latency_ms: number | undefined, steps?: number): Measurement {
  return {
    pair: "p",
    way,
    method: "anew",
    round,
    requests: latency_ms === undefined ? [] : ten(latency_ms),
    requests_s: latency_ms === undefined ? 0 : 1,
    best: steps === undefined ? [] : [{ program: "b", steps, seconds: 10 }],
  };
}

/** Latencies of pairs of neighbours, at one request a second; undefined: not served. */
function alternating(copies: (readonly [bare: number | undefined, rigel: number | undefined])[][]): Copies<Sample[]> {
  const turns = soloTurns(1, copies.length, 2 * copies.flat().length);
  const served = (kind: "bare" | "rigel", place: 0 | 1): Sample[][] =>
    copies.map((pairs, copy) =>
      pairs.flatMap((pair, index): Sample[] => {
        const due_s = turns[kind][copy]?.[index];
        const ms = pair[place];
        return due_s === undefined || ms === undefined ? [] : [[due_s, ms]];
      }),
    );
  return { bare: served("bare", 0), rigel: served("rigel", 1) };
}

function times(count: number, bare: number, governed: number): [number, number][] {
  return Array.from({ length: count }, () => [bare, governed]);
}

/** Latencies of pairs that copies under Rigel serve: one request through it, one past it, either first in turn. */
function within(copies: (readonly [through: number, past: number])[][]): Record<"through" | "past", Sample[][]> {
  const served = (isPast: boolean): Sample[][] =>
    copies.map((pairs) =>
      pairs.map((pair, index): Sample => {
        const isSecond = isPast === (index % 2 === 0);
        return [4 * index + (isSecond ? 2 : 0), pair[isPast ? 1 : 0]];
      }),
    );
  return { through: served(false), past: served(true) };
}

/** What the pairs tell, beside bare copies that tell nothing. */
function withinOf(copies: (readonly [through: number, past: number])[][], settle_s = 0, seed = 1): Solo["within"] {
  const { through, past } = within(copies);
  const solo = soloOf(
    "p",
    { bare: [[[1e6, 1]]], rigel: [...through, [[1e6, 1]]] },
    { ...EVENLY, settle_s },
    seed,
    past,
  );
  return solo?.within ?? null;
}

const EVENLY = { rate_per_s: 1, settle_s: 0 };

/** Requests in a row, each with the pause before it; the first of a window has none. */
function inARow(...list: [pause_ms: number, took_ms: number][]): Wait[] {
  let end_ms = 1000;
  return list.map(([pause_ms, took_ms]) => {
    const began_ms = end_ms + pause_ms;
    end_ms = began_ms + took_ms;
    return { client: 0, began_ms, worked_ms: 0.25, waited_ms: took_ms - 0.25 };
  });
}

/** Requests that took so long. */
function by(stayed: Stayed, ...took_ms: number[]): Wait[] {
  return took_ms.map((ms) => ({ client: 0, worked_ms: 0, waited_ms: ms, stayed }));
}

/** Where the legend of a picture has the names of ways, and about where each ends. */
function legendOf(policy: string): { x: number; y: number; end: number }[] {
  const ways = ["time slicing", "MPS, client priority", `rigel ${policy}`, `rigel ${policy}, MPS`, "MPS"];
  const { rows } = documentFor(
    "a+b",
    ["alone", ...ways].map((way) => one(way, 0, 5, 50)),
  );
  const picture = overviewPicture(rows, "");
  return ways.map((way) => {
    const [, x, y] = new RegExp(`<text x="([\\d.]+)" y="([\\d.]+)">${way}<`).exec(picture) ?? [];
    return { x: Number(x), y: Number(y), end: Number(x) + 7 * way.length };
  });
}

describe("statistics", () => {
  test("percentiles are nearest rank", () => {
    const hundred = Array.from({ length: 100 }, (_, index) => index + 1);
    expect([0.5, 0.95, 0.99, 1].map((q) => quantile(hundred, q))).toEqual([50, 95, 99, 100]);
    expect(quantile(hundred, 0.07)).toBe(7); // 0.07 * 100 is a little more than 7
    expect(quantile([7], 0.5)).toBe(7);
    expect(quantile([1, 2, 3], 0.5)).toBe(2);
    expect(latencyOf([])).toBeUndefined();
    const samples: Sample[] = [[0, 4], [1, 2], [2, 9]]; // prettier-ignore
    expect(latencyOf(samples)).toEqual({ count: 3, p50_ms: 4, p95_ms: 9, p99_ms: 9, mean_ms: 5, max_ms: 9 });
  });

  test("a way that leaves best-effort programs nothing has a bar like the others", () => {
    const [, html = ""] = shown(one("alone", 0, 5, 50), one("rigel x", 0, 5, 0), one("rigel y", 0, 5, 25));
    const shares = html.slice(html.indexOf("<h3>Best-effort throughput"), html.indexOf("<h3>Latencies"));
    expect([...shares.matchAll(/rigel [xy]/g)].map(([way]) => way)).toEqual(["rigel x", "rigel y"]);
    expect(shares).not.toContain("NaN");
  });

  test("requests alone of programs that were started in several ways have curves that can be told apart", () => {
    const methods = ["anew", "live", "live, MPS"].map((method) => ({ ...one("alone", 0, 5, 50), method }));
    const [, html = ""] = shown(...methods);
    const drawn = (element: string): string[] =>
      [...html.matchAll(new RegExp(`<${element} [^>]*stroke="var\\(--ink\\)"[^>]*>`, "g"))].map(
        ([tag]) => /stroke-dasharray="([^"]+)"/.exec(tag)?.[1] ?? "whole",
      );
    expect(drawn("polyline")).toEqual(["whole", "6 4", "2 3"]);
    expect(drawn("line")).toEqual(["whole", "6 4", "2 3"]);
  });

  test("of several pairs all are in one plot, whose ways have the colours of their bars; of one there is none", () => {
    const of = (pair: string, ms: number) =>
      documentFor(pair, [one("alone", 0, 5, 50), one("MPS", 0, ms, 50), one("rigel slo", 0, 5.05, 45)]);
    const documents = [of("a+<b>", 50), of("c+d", 10)];
    const made = { ...shownOf(of("a+<b>", 50)), rows: documents.flatMap(({ rows }) => rows) };
    const plots = htmlOf(made).split("<section>")[1] ?? "";
    expect(plots).toStartWith("<h2>All pairs</h2>");
    expect([...plots.matchAll(/>(a\+&lt;b&gt;|c\+d)<\/text>/g)]).toHaveLength(4);
    // Of p99 a dot for each way and pair, and then the legend's.
    const colours = [...(plots.split("</figure>")[0] ?? "").matchAll(/<circle [^>]*fill="([^"]+)"/g)].map(
      ([, fill]) => fill,
    );
    const [mps, slo] = ["#0072b2", "#e69f00"];
    expect(colours).toEqual([mps, slo, mps, slo, mps, slo]);
    expect(shown(one("alone", 0, 5, 50), one("MPS", 0, 5, 50))[1]).not.toContain("All pairs");
    // What leaves best-effort programs nothing has its dot as well.
    const { rows } = documentFor("a+b", [one("alone", 0, 5, 50), one("rigel slo", 0, 5, 0)]);
    const none = overviewPicture(
      rows.map((row) => ({ ...row, harvest: row.share?.median ?? null })),
      "",
    );
    expect([...none.matchAll(/<circle /g)]).toHaveLength(3);
    const picture = overviewPicture(made.rows, "A & B");
    expect(isWellFormed(picture)).toBe(true);
    expect(picture).not.toMatch(/NaN|undefined/);
  });

  test("names in the picture's legend have room, short ones four abreast", () => {
    expect(new Set(legendOf("slo").map(({ y }) => y)).size).toBe(2);
    for (const policy of ["slo", "without-arrivals", "x".repeat(40), "x".repeat(70)])
      for (const line of Map.groupBy(legendOf(policy), ({ y }) => y).values())
        for (const [index, { end }] of line.entries()) expect(end, policy).toBeLessThan(line[index + 1]?.x ?? 800);
  });

  test("a policy's name stays in its cell of the table", () => {
    const [table = "", html = ""] = shown(one("alone", 0, 5, 50), one("rigel a|b\\<i>\n", 0, 5, 50));
    expect(table).toContain("| p | rigel a\\|b\\\\\\<i>  | 1.00 |");
    expect(html).toContain("rigel a|b\\&lt;i&gt;");
  });

  test("requests that queue up are told, as rigel simulate tells them", () => {
    // One a second.
    for (const text of shown(one("alone", 0, 999, 50), one("MPS", 0, 1001, 50), one("rigel slo", 0, 1000, 50))) {
      const [told, ...more] = text.match(/requests queue up, [^\n<]*/g) ?? [];
      expect(told).toMatch(/, so that how late they are depends on the duration: p, MPS$/);
      expect(more).toEqual([]);
    }
    expect(shown(one("alone", 0, 999, 50)).join("\n")).not.toContain("queue up");
  });

  test("a host that is late is told by the requests alone, where their time is the GPU's", () => {
    const of = (way: string, waited_ms: number, worked_ms: number, late: number, all = 500): Measurement => ({
      ...one(way, 0, 5),
      waits: [
        ...Array.from({ length: all - late }, () => ({ client: 0, worked_ms, waited_ms })),
        ...Array.from({ length: late }, () => ({ client: 0, worked_ms: worked_ms + 0.4, waited_ms })),
      ],
    });
    for (const text of shown(of("alone", 1.1, 0.1, 5)))
      expect(text).toMatch(/the host was late: .*measure on another one.*: p, 5 of 500\b/);
    const quiet = [
      of("alone", 1.1, 0.1, 4),
      of("alone", 1.1, 0.1, 10, 2000),
      // Most of the request is the host's, as of those without a CUDA graph.
      of("alone", 0.5, 4, 50),
      of("alone", 0, 0, 0),
    ];
    for (const alone of quiet) expect(shown(alone, of("rigel slo", 1.1, 0.1, 50)).join("\n")).not.toContain("was late");
    expect(shown(one("alone", 0, 5)).join("\n")).not.toContain("was late");
  });

  test("median and spread", () => {
    expect(median([3, 1, 2])).toBe(2);
    expect(median([4, 1, 2, 3])).toBe(2.5);
    expect(spread([2, Number.NaN, 1])).toEqual({ median: 1.5, min: 1, max: 2, rounds: 2 });
    expect(spread([Number.NaN])).toBeNull();
  });

  test("steps between two moments count in part", () => {
    const ends_s = [1, 2, 4];
    expect(stepsBetween(ends_s, 0, 4)).toBe(3);
    expect(stepsBetween(ends_s, 0.5, 1.5)).toBe(1);
    expect(stepsBetween(ends_s, 3, 4)).toBe(0.5);
    // What was under way at the last end known is not guessed.
    expect(stepsBetween(ends_s, 4, 100)).toBe(0);
    expect(stepsBetween([], 0, 1)).toBe(0);
    expect(countedSteps([1, 2], 5, 10)).toEqual({ steps: 0, seconds: 5 });
  });

  test("the first step after a pause began when the pause was over", () => {
    // Steps of 1 s, and a pause from 2 to 10.
    const ends_s = [1, 2, 11, 12, 13];
    expect(stepsBetween(ends_s, 10.5, 12.5, 10)).toBe(2);
    expect(countedSteps(ends_s, 10.5, 12.5, 10)).toEqual({ steps: 2, seconds: 2 });
  });

  test("a step lasts into a window in which its program pauses", () => {
    const window = { from_s: 10, counted_s: 11, to_s: 13 };
    const spells = [
      { from_s: 5, to_s: 10 },
      { from_s: 13, to_s: 20 },
    ];
    expect(outlasts([9, 10.9, 14], spells, window)).toBe(false);
    expect(outlasts([9, 11.1, 14], spells, window)).toBe(true);
    expect(outlasts([9, 14], spells.slice(0, 1), window)).toBe(true);
    expect(outlasts([9, 12], [{ from_s: 5, to_s: 13 }], window)).toBe(false);
  });

  test.each(["poisson", "bursty", "uniform"] as const)(
    "%s arrivals: in order, in the window, by seed, at the rate",
    (kind) => {
      const due_s = arrivalTimes(kind, 60, 5, 10, 110);
      expect(due_s).toEqual(due_s.toSorted((a, b) => a - b));
      expect(due_s.every((due) => due >= 10 && due < 110)).toBe(true);
      expect(arrivalTimes(kind, 60, 5, 10, 110)).toEqual(due_s);
      // 6000 are expected; the standard deviation of bursts is about 190.
      expect(Math.abs(due_s.length - 6000)).toBeLessThan(800);
      if (kind !== "uniform") expect(arrivalTimes(kind, 60, 6, 10, 110)).not.toEqual(due_s);
    },
  );

  test("closed arrivals are Poisson's, and the program leaves out what falls due meanwhile", () => {
    const due_s = arrivalTimes("closed", 60, 5, 10, 110);
    expect(due_s.length).toBeGreaterThan(5000);
    expect(due_s).toEqual(arrivalTimes("poisson", 60, 5, 10, 110));
    expect(ARRIVALS.map((kind) => [kind, moreOf(kind)])).toEqual([
      ["poisson", []],
      ["bursty", []],
      ["uniform", []],
      ["closed", ["--closed"]],
    ]);
  });

  test("programs are measured from when the last of them is ready", () => {
    const requests = [0.5, 1.5, 2.5, 3.5].map((due_s): Sample => [due_s, 3 + due_s]);
    const high = { late_s: 0, requests, ends_s: [] };
    const best = { program: "b", late_s: 2, requests: [], ends_s: [1, 2, 2.25, 2.5, 2.75, 3, 3.25] };
    expect(together(high, [best], 4)).toEqual({
      requests: [
        [2.5, 5.5],
        [3.5, 6.5],
      ],
      requests_s: 2,
      best: [{ program: "b", steps: 5, seconds: 1.25 }],
    });
    expect(together(undefined, [{ ...best, late_s: 0, ends_s: [] }], 4)).toEqual({
      requests: [],
      requests_s: 0,
      best: [{ program: "b", steps: 0, seconds: 4 }],
    });
    // One that is ready after the end leaves no time to measure in.
    expect(together(high, [{ ...best, late_s: 5, ends_s: [5.5] }], 4)).toEqual({
      requests: [],
      requests_s: 0,
      best: [{ program: "b", steps: 0, seconds: 0 }],
    });
  });

  test("gaps add up to the arrivals", () => {
    expect(gapsOf([0.5, 1.25, 1.25])).toEqual([0.5, 0.75, 0]);
    expect(gapsOf([])).toEqual([]);
  });

  test("a schedule takes every way once a cycle, every second cycle in reverse", () => {
    const windows = schedule(["a", "b"], { rounds: 2, cycles: 1, window_s: 2, settle_s: () => 0.5 });
    expect(windows.map(({ way, round }) => `${way}${round}`)).toEqual(["a0", "b0", "b1", "a1"]);
    expect(windows[1]).toEqual({ way: "b", round: 0, turn: 0, from_s: 2.5, counted_s: 3, to_s: 5 });
    expect(windows.at(-1)?.to_s).toBe(10);
  });

  // In order in the first round, in reverse in the second.
  test.each([
    [3, "a0 b0 c0 c0 c0 c1 b1 a1 c1 c1"],
    [2, "a0 b0 c0 c0 c1 c1 b1 a1"],
  ])("what does not vary has one window a round, of %d turns", (cycles, told) => {
    const windows = schedule(["a", "b", "c"], {
      rounds: 2,
      cycles,
      window_s: 1,
      once: (way) => way !== "c",
      settle_s: () => 0,
    });
    expect(windows.map(({ way, round }) => `${way}${round}`).join(" ")).toBe(told);
  });

  test("between a window and one of another way there may be a gap", () => {
    const windows = schedule(["a", "b", "c"], {
      rounds: 2,
      cycles: 1,
      window_s: 1,
      settle_s: (way, after) => (way === "a" && after === "b" ? 4.5 : 0.5),
      gap_s: (_, after) => (after === "b" ? 3 : 0),
    });
    expect(windows.map(({ way, from_s }) => `${way} ${from_s}`)).toEqual([
      "a 0",
      "b 1.5",
      "c 6",
      "c 7.5",
      "b 9",
      "a 13.5",
    ]);
    expect(windows.at(-1)?.counted_s).toBe(18);
  });

  test("a window holds what falls due while it is counted", () => {
    const window = { way: "a", round: 0, turn: 0, from_s: 0, counted_s: 1, to_s: 3 };
    const samples: Sample[] = [0.9, 1, 2.8, 2.95, 3].map((due_s) => [due_s, 1]);
    expect(withinWindow(samples, window, 0.1).map(([due_s]) => due_s)).toEqual([1, 2.8]);
  });

  test("a window begins queued if a request of an earlier one was under way half way through the time to settle", () => {
    const window = { way: "a", round: 0, turn: 0, from_s: 10, counted_s: 10.6, to_s: 12.6 };
    const due = (due_s: number, ms: number): boolean =>
      beginsQueued(
        [
          [1, 2],
          [due_s, ms],
          [11, 2],
        ],
        window,
      );
    expect(due(9.9, 390)).toBe(false);
    expect(due(9.9, 410)).toBe(true);
    expect(due(5, 6000)).toBe(true);
    expect(due(10, 2000)).toBe(false); // it is the window's own
  });

  test("ratios are taken within a round", () => {
    const measurements = [
      one("alone", 0, 2),
      one("alone", 0, undefined, 100),
      one("x", 0, 3, 80),
      one("alone", 1, 4),
      one("alone", 1, undefined, 200),
      one("x", 1, 10, 100),
    ];
    const [alone, x] = rowsOf(measurements, new Map([["p", 20]]));
    expect(alone).toMatchObject({ way: "alone", p99_ms: { median: 3 }, p99_ratio: null, share: null });
    // 10 requests a second of 20 ms each: the GPU is left to others for 0.8 of the time.
    expect(x).toMatchObject({
      p50_ratio: { median: 2, min: 1.5, max: 2.5, rounds: 2 },
      share: { median: 0.65, min: 0.5, max: 0.8, rounds: 2 },
      steps_per_s: [{ program: "b", per_s: { median: 9 } }],
      ceiling: 0.8,
    });
    expect(x?.harvest).toBeCloseTo(0.65 / 0.8);
  });

  test("harvest is what a way gives of what its own requests leave, round by round", () => {
    const measurements = [0, 1, 2].flatMap((round): Measurement[] => [
      one("alone", round, 2),
      one("alone", round, undefined, 100),
      // Fewer requests, for which best-effort work gets more.
      { ...one("x", round, 3, [80, 95, 90][round]), requests: ten(3).slice(0, [10, 0, 5][round]) },
    ]);
    const [, x] = rowsOf(measurements, new Map([["p", 20]]));
    expect(x).toMatchObject({ ceiling: 0.8, share: { median: 0.9 } });
    expect(x?.harvest).toBeCloseTo(0.8 / 0.8);
  });

  test("what has nothing to be compared with has no ratio", () => {
    const [row] = rowsOf([one("x", 0, 3, 80)], new Map());
    expect(row).toMatchObject({ p50_ms: { median: 3 }, p50_ratio: null, share: null, ceiling: null, harvest: null });
  });

  test("programs started in different manners are not compared", () => {
    const live = { ...one("x", 0, 3, 80), method: "live" };
    expect(rowsOf([one("alone", 0, 2), live], new Map())[1]).toMatchObject({ way: "x", p50_ratio: null });
  });

  test("what MPS itself costs is what requests alone take under it over what they take without, of the same pair", () => {
    const under = (round: number, ms: number) => ({ ...one("alone", round, ms), method: "live, MPS" });
    const live = (round: number, ms: number) => ({ ...one("alone", round, ms), method: "live" });
    expect(costOf(live(0, 2), live(1, 4), under(0, 3), under(1, 6))).toEqual([
      ["live", null],
      ["live, MPS", 1.5],
    ]);
    // Of programs that were started anew none is there beside them.
    expect(costOf(one("alone", 0, 2), under(0, 3)).at(-1)).toEqual(["live, MPS", null]);
    expect(costOf({ ...live(0, 2), pair: "q" }, under(0, 3)).at(-1)).toEqual(["live, MPS", null]);
    expect(costOf(under(0, 3))).toEqual([["live, MPS", null]]);
    for (const text of shown(live(0, 2), under(0, 3))) {
      expect(text).toMatch(/3(\.00 ms)? \(x1\.50\)/);
      expect(text).toContain("that is what MPS costs");
    }
    for (const text of shown(live(0, 2))) expect(text).not.toMatch(/x1\.|MPS costs/);
  });

  test("what requests are delayed by is told from their own waits, where those are known", () => {
    const [alone, x, y] = rowsOf(
      [{ ...one("alone", 0, 2), waits: waits(0.1) }, { ...one("x", 0, 3, 80), waits: waits(0.35) }, one("y", 0, 3, 80)],
      new Map(),
    );
    expect(alone?.delayed).toBeNull();
    expect(x?.delayed?.requests).toBe(50);
    expect(x?.delayed?.p50).toBeCloseTo(1.107, 2); // 2.25 + 0.35 over 2.25 + 0.1
    expect(y?.delayed).toBeNull();
  });

  test("requests that follow one another at once are told apart, and how many of them are late", () => {
    const first: [number, number] = [100, 9];
    const followed = Array.from({ length: 5 }, (): [number, number] => [0.1, 2]);
    const beside = inARow(first, [0.2, 2.05], [0.4, 7], [0.1, 2.15], [5, 3], [0.5, 4], [0.24, 2.5]).toReversed();
    const [alone, x, y] = rowsOf(
      [
        { ...one("alone", 0, 2), waits: inARow(first, ...followed, [2, 2.5]) },
        { ...one("x", 0, 3, 80), waits: beside.slice(0, 4) },
        { ...one("x", 1, 3, 80), waits: beside.slice(4) },
        one("y", 0, 3, 80),
      ],
      new Map(),
    );
    expect(alone?.following).toMatchObject({ requests: 5, late: 0, apart: { requests: 1 } });
    expect(alone?.following?.p50_ms).toBeCloseTo(2);
    // Of two windows: [0.1, 2.15], the first of its window, has none before it.
    expect(x?.following).toMatchObject({ requests: 2, late: 1, apart: { requests: 2 } });
    expect(x?.following?.p90_ms).toBeCloseTo(2.5);
    expect(x?.following?.apart.p90_ms).toBeCloseTo(4);
    expect(y?.following).toBeNull();
    const [, few] = rowsOf(
      [
        { ...one("alone", 0, 2), waits: inARow(first, ...followed.slice(1)) },
        { ...one("x", 0, 3, 80), waits: inARow(first, [1, 2]) },
      ],
      new Map(),
    );
    expect(few?.following).toMatchObject({ requests: 0, p50_ms: null, late: null, apart: { requests: 1, late: null } });
    const [, lost] = rowsOf(
      [
        { ...one("alone", 0, 2), waits: inARow(first, [1, 2], [1, 2], [1, 2], [1, 2], [1, 2]) },
        { ...one("x", 0, 3, 80), waits: inARow(first, [1, 2.25], [1, 2.35], [0.5, 2.1], [0.1, 9], [1, 3]) },
      ],
      new Map(),
    );
    expect(lost?.following?.apart).toMatchObject({ requests: 4, p99_ms: 3, late: 2 });
  });

  test("requests are told apart by what had the GPU there for them", () => {
    const [x, y] = rowsOf(
      [
        { ...one("x", 0, 3, 80), waits: [...by("announced", 1, 2), ...by("not", 4), ...by("behind", 1)] },
        { ...one("x", 1, 3, 80), waits: by("announced", 3, 4) },
        { ...one("y", 0, 3, 80), waits: waits(0.1) },
      ],
      new Map(),
    );
    expect(x?.stayed).toEqual({
      announced: { requests: 4, p50_ms: 2, p99_ms: 4 },
      not: { requests: 1, p50_ms: 4, p99_ms: 4 },
      behind: { requests: 1, p50_ms: 1, p99_ms: 1 },
    });
    // Of files from before that was told, nothing is known.
    expect(y?.stayed).toBeNull();
  });

  test("two best-effort programs share by the sum of their parts", () => {
    const both = [
      { program: "a", steps: 40, seconds: 10 },
      { program: "b", steps: 3, seconds: 10 },
    ];
    const measurements = [
      one("alone", 0, 2),
      { ...one("alone", 0, undefined), best: [{ program: "a", steps: 100, seconds: 10 }] },
      { ...one("alone", 0, undefined), best: [{ program: "b", steps: 10, seconds: 10 }] },
      { ...one("x", 0, 2), best: both },
    ];
    expect(rowsOf(measurements, new Map()).at(-1)?.share?.median).toBeCloseTo(0.7);
  });

  test("solo: neighbours go to one copy, bare and under Rigel, in either order as often", () => {
    // 16 places of 0.1 s: pairs go to copies 1, 2, 1, 2 and so on.
    const turns = soloTurns(10, 2, 1.6);
    const first = (kind: "bare" | "rigel", copy: number): number[] =>
      (turns[kind][copy] ?? []).map((due_s) => Math.floor(due_s * 10));
    expect([first("bare", 0), first("rigel", 0)]).toEqual([[0, 5, 8, 13], [1, 4, 9, 12]]); // prettier-ignore
    expect([first("bare", 1), first("rigel", 1)]).toEqual([[3, 6, 11, 14], [2, 7, 10, 15]]); // prettier-ignore
    expect(turns.bare[0]?.[0]).toBeCloseTo(0.05);
    // A pair that would not be complete is left out.
    expect(soloTurns(10, 1, 0.59)).toEqual({ bare: [[0.05, 0.35]], rigel: [[0.15, 0.25]] });
  });

  test("solo: ratios of all requests, and of neighbours", () => {
    const samples = alternating([
      [[2, 3], [4, 4], [2, undefined]], // prettier-ignore
      [[10, 11], [undefined, 8], [4, 6]], // prettier-ignore
    ]);
    expect(soloOf("p", samples, EVENLY, 1)).toMatchObject({
      program: "p",
      // Bare 2, 2, 4, 4, 10; under Rigel 3, 4, 6, 8, 11.
      ratio: 6 / 4,
      p99_ratio: 11 / 10,
      // 1.5, 1, 1.1 and 1.5.
      paired: 1.3,
      pairs: 4,
      copies: { bare: [2, 4], rigel: [3, 8] },
      bare: { count: 5 },
      rigel: { count: 5 },
    });
    // Pairs fall due at 0, 2, 4 and so on, and go to the copies in turn.
    const ratios = [[0, 1.5], [2, 1.1], [4, 1], [10, 1.5]] as const; // prettier-ignore
    expect(pairedRatios(samples, EVENLY)).toEqual([...ratios]);
    expect(pairedRatios(samples, { ...EVENLY, settle_s: 3 })).toEqual(ratios.slice(2));
    // From 3 s on: bare 2, 4, 4; under Rigel 4, 6, 8.
    expect(soloOf("p", samples, { ...EVENLY, settle_s: 3 }, 1)).toMatchObject({ ratio: 6 / 4, paired: 1.25, pairs: 2 });
    expect(soloOf("p", samples, { ...EVENLY, settle_s: 12 }, 1)).toBeUndefined();
    expect(soloOf("p", { bare: [[]], rigel: samples.rigel }, EVENLY, 1)).toBeUndefined();
    expect(soloOf("p", alternating([[[2, undefined], [undefined, 3]]]), EVENLY, 1)) // prettier-ignore
      .toMatchObject({ ratio: 1.5, paired: null, paired_interval: null, pairs: 0 });
  });

  test("solo: a request that fell due a little off its place keeps its neighbour", () => {
    const off: Copies<Sample[]> = { bare: [[[0.51, 2], [3.49, 2]]], rigel: [[[1.49, 3], [2.51, 5]]] }; // prettier-ignore
    expect(pairedRatios(off, EVENLY).map(([, ratio]) => ratio)).toEqual([1.5, 2.5]);
  });

  test("solo: intervals draw copies, and pairs of each, with neither copy nor pair torn apart", () => {
    const constant = soloOf("p", alternating([times(9, 2, 3), times(9, 2, 3)]), EVENLY, 1);
    expect(constant).toMatchObject({ interval: [1.5, 1.5], p99_interval: [1.5, 1.5], paired_interval: [1.5, 1.5] });
    // Of two copies 4 draws are possible: 3 / 2, 4 / 4, and twice both, which is 3 / 2 too; torn apart, 4 / 2 and 3 / 4 were there.
    const copies = soloOf("p", alternating([[[2, 3]], [[4, 4]]]), EVENLY, 1);
    expect(copies).toMatchObject({ interval: [1, 1.5], p99_interval: [1, 1.5], paired_interval: [1, 1.5] });
    // The same of pairs of one copy.
    expect(soloOf("p", alternating([[[2, 3], [4, 4]]]), EVENLY, 1)).toMatchObject({ interval: [1, 1.5] }); // prettier-ignore
    // One copy of three is slower: two or three times it is drawn in 7 of 27, while half of all pairs are its own in one of 3000.
    const slower = alternating([times(30, 1, 1), times(30, 1, 1), times(30, 1, 2)]);
    expect(soloOf("p", slower, EVENLY, 1)).toMatchObject({ ratio: 1, interval: [1, 2], paired_interval: [1, 2] });
  });

  test("solo: the seed decides the intervals, and nothing else", () => {
    const random = arrivalTimes("poisson", 1, 3, 0, 80);
    const samples = alternating([
      Array.from({ length: 30 }, (_, pair) => [1 + ((random[pair] ?? 0) % 1), 1 + ((random[pair + 30] ?? 0) % 1)]),
    ]);
    const [one1, again, other] = [1, 1, 2].map((seed) => soloOf("p", samples, EVENLY, seed));
    expect(again).toEqual(one1);
    expect(other?.ratio).toBe(one1?.ratio ?? Number.NaN);
    expect(other?.paired_interval).not.toEqual(one1?.paired_interval);
    const [low, high] = one1?.paired_interval ?? [Number.NaN, Number.NaN];
    expect(low).toBeLessThan(one1?.paired ?? Number.NaN);
    expect(high).toBeGreaterThan(one1?.paired ?? Number.NaN);
  });
});

describe("solo, within a process", () => {
  const copies = [
    [[4, 2], [3, 3], [6, 4]], // prettier-ignore
    [[11, 10], [22, 20]], // prettier-ignore
  ] as const;

  test("pairs of one process: ratios, differences, and the tail over what is usual for each copy", () => {
    expect(withinOf(copies.map((pairs) => [...pairs]))).toMatchObject({
      // 2, 1, 1.5, 1.1 and 1.1.
      p50: 1.1,
      // 2, 0, 2, 1 and 2 ms.
      added_us: 2000,
      // p50s past Rigel are 3 and 10; the longest over those: through 22 / 10, past 20 / 10.
      p99: 1.1,
      pairs: 5,
      copies: { through: [4, 11], past: [3, 10] },
    });
  });

  test("how much slower one start of the program is makes no difference", () => {
    const pairs = copies[0].map((pair) => [...pair] as const);
    const slow = pairs.map(([through, past]) => [3 * through, 3 * past] as const);
    const [one2, both] = [withinOf([pairs]), withinOf([pairs, slow])];
    expect([both?.p50, both?.p99]).toEqual([one2?.p50, one2?.p99]);
  });

  test("what falls due while programs settle does not count, nor does what has no partner", () => {
    expect(
      withinOf(
        copies.map((pairs) => [...pairs]),
        4,
      ),
    ).toMatchObject({ pairs: 3, p50: 1.1 });
    expect(
      withinOf(
        copies.map((pairs) => [...pairs]),
        100,
      ),
    ).toBeNull();
    const { through } = within([[[4, 2]]]);
    expect(soloOf("p", { bare: through, rigel: through }, EVENLY, 1)?.within).toBeNull();
    expect(soloOf("p", { bare: through, rigel: through }, EVENLY, 1, [[]])?.within).toBeNull();
    // The last of the three is left over.
    const past: Sample[][] = [[[2, 2]]];
    const two: Sample[][] = [[[1, 3], [3, 5]]]; // prettier-ignore
    expect(soloOf("p", { bare: two, rigel: two }, EVENLY, 1, past)?.within).toMatchObject({ pairs: 1, p50: 1.5 });
  });

  test("intervals draw copies, and pairs of each, with neither copy nor pair torn apart", () => {
    const constant = withinOf([times(9, 3, 2), times(9, 6, 4)]);
    expect(constant).toMatchObject({ p50_interval: [1.5, 1.5], p99_interval: [1.5, 1.5], p50: 1.5 });
    // One copy of three costs more: two or three times it is drawn in 7 of 27.
    const dearer = withinOf([times(30, 1, 1), times(30, 1, 1), times(30, 2, 1)]);
    expect(dearer).toMatchObject({ p50: 1, p50_interval: [1, 2], added_us: 0, added_us_interval: [0, 1000] });
    // Pairs of one copy: torn apart, 6 / 1 and 2 / 3 were there.
    expect(withinOf([[[2, 1], [6, 3]]])).toMatchObject({ p50: 2, p50_interval: [2, 2] }); // prettier-ignore
  });

  test("a cost is found under what hosts do to latencies: levels that last, outliers, starts that differ", () => {
    const random = generator(3);
    const noisy = Array.from({ length: 4 }, (_, copy) => {
      let level = 1;
      return Array.from({ length: 225 }, (): [number, number] => {
        if (random() < 0.05) level = random() < 0.5 ? 1 : 1.1;
        const one2 = (): number => (4 + copy / 4) * level * (1 + 0.02 * random()) * (random() < 0.1 ? 1.5 : 1);
        return [one2() * 1.01, one2()];
      });
    });
    const found = withinOf(noisy);
    expect(Math.abs((found?.p50 ?? 0) - 1.01)).toBeLessThan(0.003);
    const [low = 0, high = 0] = found?.p50_interval ?? [];
    expect([low < 1.01, high > 1.01, high - low < 0.008]).toEqual([true, true, true]);
    expect(withinOf(noisy)).toEqual(found);
    expect(withinOf(noisy, 0, 2)?.p50_interval).not.toEqual(found?.p50_interval ?? []);
  });
});

/** The pairs that `--pairs` names. */
function named(text: string, simulated: boolean): string[] {
  return choosePairs(text, simulated).map(({ name }) => name);
}

test("live: ways are switched by the clock that programs keep to, though the machine's is set meanwhile", async () => {
  using scratch = new Scratch();
  const native = await Native.load();
  const segment = Segment.create(native, join(scratch.path, "segment"));
  const [pair] = choosePairs(PAIR, true);
  if (!pair) throw new Error("there is such a pair");
  const seen: [at_s: number, policy: string][] = [];
  const ahead_ms = 5000;
  const bed: Bed = {
    runner: {
      bare: async () => ({ logs: new Map(), clients: [] }),
      governed: async (runs, begin, _policy, { started } = {}) => {
        const starts_ms = "at_ms" in begin ? begin.at_ms - Date.now() : 0;
        const from_ms = performance.now() + starts_ms;
        const over = new AbortController();
        started?.(segment, from_ms, over.signal);
        const at_s = (): number => (performance.now() - from_ms) / 1000;
        await Bun.sleep(starts_ms + 300);
        const now = Date.now;
        using set = spyOn(Date, "now").mockImplementation(() => now() + ahead_ms);
        for (; seen.at(-1)?.[1] !== "priority" && at_s() < 60; await Bun.sleep(20)) seen.push([at_s(), segment.policy]);
        over.abort();
        set.mockRestore();
        return { logs: new Map(runs.map((run) => [run.name, logOf(run)])), clients: [] };
      },
    },
    native,
    simulated: true,
    load: { rate_per_s: 50, arrivals: "uniform", seed: 1 },
    environment: () => ({}),
  };
  const all = allWays(choosePolicies("priority", []), { mps: false, clientPriority: false });
  const [job] = liveJobs(bed, pair, chooseWays("rigel priority", all));
  await job?.run({ rounds: 1, duration_s: 0.2, lead_s: 0, window_s: 0.2, learn_s: 1, copies: 1 });
  // Alone, of each program, before it, each for 1.4 s.
  const [from_s] = seen.find(([, policy]) => policy === "priority") ?? [];
  expect(from_s).toBeGreaterThan(2.7);
  segment.remove();
});

describe("pairs, policies and ways", () => {
  test("all pairs: every high program with every best-effort one, and two triples", () => {
    const pairs = named("all", false);
    expect(pairs).toHaveLength(77);
    expect(new Set(pairs).size).toBe(77);
    for (const high of ["resnet50", "resnet50-served"]) expect(pairs).toContain(`${high}+resnet50-train+gpt2-train`);
    expect(named("all", true)).toHaveLength(7);
  });

  test("by default a GPU's ten minutes hold a pair of each kind of requests and a triple, beside every rival", async () => {
    const there = allWays(choosePolicies(undefined, [], []), { mps: true, clientPriority: true });
    const ways = usualWays(there, false);
    expect(ways.map(({ name }) => name)).toEqual(["alone", "time slicing", "MPS", "MPS, client priority", "rigel slo"]);
    const timing = { ...usualTiming({ simulated: false, solo: false, live: true }), copies: 4 };
    const nothing = { logs: new Map(), clients: [] };
    const bed: Bed = {
      runner: { bare: async () => nothing, governed: async () => nothing },
      native: await Native.load(),
      simulated: false,
      load: { rate_per_s: 60, arrivals: "poisson", seed: 1 },
      environment: () => ({}),
    };
    const pairs = allPairs(false).slice(0, 4);
    expect(pairs.map(({ name }) => name)).toEqual([
      "resnet50-served+resnet50-train",
      "bert-served+gpt2-train",
      "gpt2-decode+gpt2-train-graph",
      "resnet50-served+resnet50-train+gpt2-train",
    ]);
    const gpuTimes = [...new Set(pairs.map(({ high }) => high))].map((high) => gpuTimeJob(bed, "", high));
    const jobs = [...gpuTimes, ...pairs.flatMap((pair) => liveJobs(bed, pair, ways))];
    expect(jobs.reduce((sum, job) => sum + job.seconds(timing), 0)).toBeLessThanOrEqual(600);
  });

  test("a high program's name alone stands for its pairs, of those that can run", () => {
    expect(named("bert-served+bert-train+gpt2-train, bert-served,bert-served+bert-train", false)).toEqual([
      "bert-served+bert-train+gpt2-train",
      "bert-served+resnet50-train",
      "bert-served+bert-train",
      "bert-served+gpt2-train",
      "bert-served+mobilenet-train",
      "bert-served+gpt2-train-graph",
    ]);
    expect(named("bert", true)).toEqual(["bert+resnet50-train", "bert+gpt2-train", "bert+mobilenet-train"]);
    expect(() => named("bert-served", true)).toThrow("no profile of bert-served was recorded");
  });

  test("a pair that is named twice runs once", () => {
    const twice = named("resnet50+resnet50-train, bert+bert-train,resnet50+resnet50-train", false);
    expect(twice).toEqual(["resnet50+resnet50-train", "bert+bert-train"]);
  });

  test("ways: one for each policy, with MPS and without, where there is MPS", () => {
    const policies = choosePolicies("none,gentle", ['gentle={"name":"priority","inflight":2}']);
    expect(policies.get("gentle")).toMatchObject({ name: "priority", inflight: 2 });
    const names = allWays(policies, { mps: true, clientPriority: true }).map(({ name }) => name);
    expect(names).toEqual([
      "alone",
      "time slicing",
      "MPS",
      "MPS, client priority",
      "alone, Rigel",
      "rigel none",
      "rigel none, MPS",
      "rigel gentle",
      "rigel gentle, MPS",
    ]);
    const without = allWays(policies, { mps: false, clientPriority: false });
    expect(without.some((way) => way.mps)).toBe(false);
    expect(chooseWays("rigel gentle", without).map(({ name }) => name)).toEqual(["alone", "rigel gentle"]);
    // What a client takes over when it starts cannot be switched.
    const fair = allWays(choosePolicies("fair", []), { mps: false, clientPriority: false });
    expect(fair.filter(isSwitchable).map(({ name }) => name)).toEqual(["alone", "time slicing"]);
    expect(fair.filter(isLive).map(({ name }) => name)).toEqual(["alone", "time slicing", "rigel fair"]);
    const all = allWays(policies, { mps: true, clientPriority: true });
    expect(all.filter((way) => !isSwitchable(way)).map(({ name }) => name)).toEqual([
      "MPS",
      "MPS, client priority",
      "alone, Rigel",
    ]);
  });
});

interface Started {
  policy: string | undefined;
  mps: boolean;
  runs: readonly Run[];
}

/** What a program writes down whose requests take 2 ms, and whose steps end every 0.1 s while it works. */
function logOf(run: Run): Log {
  const ends_s = spellsOf(run).flatMap(([from_s, to_s]) =>
    Array.from({ length: Math.round((to_s - from_s) / 0.1) }, (_, index) => from_s + (index + 1) * 0.1),
  );
  return { late_s: 0, requests: (run.due_s ?? []).map((due_s): [number, number] => [due_s, 2]), past: [], ends_s };
}

/** What a run is started with and finds, without starting anything: every program is over at once. `log`: what it writes down, or throws. */
async function startedBy(
  ways: readonly string[],
  simulated: boolean,
  log: (run: Run, started: Started) => Log = logOf,
  arrivals: Arrivals = "uniform",
  duration_s = 1,
) {
  const started: Started[] = [];
  const ran = (policy: string | undefined, mps: boolean, runs: readonly Run[]) => {
    const these = { policy, mps, runs };
    started.push(these);
    return { logs: new Map(runs.map((run) => [run.name, log(run, these)])), clients: [] };
  };
  const bed: Bed = {
    runner: {
      bare: async (runs, _, { mps = false } = {}) => ran(undefined, mps, runs),
      governed: async (runs, _, { name }, { mps = false } = {}) => ran(name, mps, runs),
    },
    native: await Native.load(),
    simulated,
    load: { rate_per_s: 50, arrivals, seed: 1 },
    environment: (mps) => ({ DAEMON: String(mps) }),
  };
  const [pair] = choosePairs("resnet50+resnet50-train+gpt2-train", simulated);
  if (!pair) throw new Error("there is such a pair");
  const all = allWays(choosePolicies("slo,orion", []), { mps: true, clientPriority: true });
  const jobs = liveJobs(bed, pair, chooseWays(ways.join(";"), all));
  const timing = { rounds: 1, duration_s, lead_s: 0, window_s: 1, learn_s: 20, copies: 1 };
  const found: Found[] = [];
  // Nobody switches ways here, so that nothing is measured but of those that need no switch; where there is none, the run says so.
  for (const job of jobs)
    try {
      found.push(await job.run(timing));
    } catch (thrown) {
      expect(thrown).toBeInstanceOf(RunFailed);
    }
  return {
    titles: jobs.map(({ title }) => title),
    started,
    measurements: found.flatMap(({ measurements }) => measurements ?? []),
    failures: found.flatMap(({ failures }) => failures ?? []),
    notes: found.flatMap(({ notes }) => notes ?? []),
    said: found.map(({ said }) => said).join("\n"),
    late_s: Math.max(0, ...found.map(({ late_s }) => late_s)),
  };
}

/** When a program works, from and to. */
function spellsOf({ spells_s = [] }: Run): [number, number][] {
  let at_s = 0;
  return spells_s.flatMap((seconds, index): [number, number][] => {
    at_s += seconds;
    return index % 2 ? [[at_s - seconds, at_s]] : [];
  });
}

/** A step of MPS's programs ends so long after their window; the next one begins 2.5 s after that, and counts 1.2 s later. */
async function withStep(more_s: number, fails = false) {
  return await startedBy(["MPS", "MPS, client priority"], false, (run, { policy }) => {
    const log = logOf(run);
    const [[, to_s] = [0, 0]] = spellsOf(run);
    const isMps = !policy && !run.env?.["CUDA_MPS_CLIENT_PRIORITY"];
    if (fails && policy === "none" && !run.env?.["CUDA_MPS_CLIENT_PRIORITY"]) throw new RunFailed("killed", []);
    return { ...log, ends_s: [...log.ends_s, ...(isMps && run.name === "gpt2-train" ? [to_s + more_s] : [])] };
  });
}

/** A run that finds these in turn; what is made of it, with the leads that it was given. Whoever waits for it ends it in the second start. */
async function inTimeOf(finds: readonly (Partial<Found> | Error)[], isInterrupted = false) {
  const leads: number[] = [];
  const job: Job = {
    pair: "a+b",
    title: "a+b",
    seconds: () => 1,
    run: async ({ lead_s }) => {
      const next = finds[leads.length];
      leads.push(lead_s);
      if (next instanceof Error) throw next;
      return { said: String(leads.length), late_s: 0, versions: {}, ...next };
    },
  };
  const timing = { rounds: 1, duration_s: 1, lead_s: 10, window_s: 1, learn_s: 20, copies: 1 };
  const { said, failures = [] } = await inTime(job, timing, () => isInterrupted && leads.length > 1);
  return { said, leads, lead_s: timing.lead_s, failed: failures.map(({ problem }) => problem) };
}

/** What copies of a program alone write down: of those under Rigel every second request goes past it. */
function inTurn(runs: readonly Run[]): Map<string, Log> {
  return new Map(
    runs.map(({ name, due_s = [], more = [] }): [string, Log] => [
      name,
      {
        late_s: 0,
        requests: due_s.map((due) => [due, 2]),
        past: due_s.map((_, index) => more.length > 0 && index % 2 === 1),
        ends_s: [],
      },
    ]),
  );
}

/** A program alone for so many seconds, by what its copies write down, or throw. */
async function soloOfRuns(duration_s: number, ran: (logs: Map<string, Log>) => Ran, rate_per_s = 100): Promise<Found> {
  const [pair] = choosePairs(PAIR, true);
  if (!pair) throw new Error("there is such a pair");
  const bed: Bed = {
    runner: { bare: async (runs) => ran(inTurn(runs)), governed: async (runs) => ran(inTurn(runs)) },
    native: await Native.load(),
    simulated: true,
    load: { rate_per_s, arrivals: "uniform", seed: 1 },
    environment: () => ({}),
  };
  const job = soloJob(bed, PAIR, pair.high, policySchema.parse({ name: "priority" }));
  return await job.run({ rounds: 1, duration_s, lead_s: 0, window_s: 1, learn_s: 20, copies: 1 });
}

/** Of a program alone for 10 s, whose copies serve until then. */
async function soloUntil(end_s: number): Promise<Partial<Found>> {
  const { solo } = await soloOfRuns(10, (logs) => {
    for (const log of logs.values()) log.requests = log.requests.filter(([due_s]) => due_s < end_s);
    return { logs, clients: [] };
  });
  return solo ? { solo } : {};
}

describe("a program alone that Ctrl-C ends", () => {
  test("counts as far as it came, which is told", async () => {
    const whole = await soloOfRuns(10, (logs) => ({ logs, clients: [] }));
    expect(whole.notes).toBeUndefined();
    const { solo, notes } = await soloOfRuns(10, (logs) => {
      for (const log of logs.values()) log.requests = log.requests.filter(([due_s]) => due_s < 5);
      throw new Interrupted({ at_ms: Date.now() }, { logs, clients: [] });
    });
    expect(solo?.bare.count).toBe(150);
    expect(notes).toEqual([expect.stringMatching(/^interrupted after \d+ of 12 s$/)]);
  });

  test("before anything counts is as if it had not begun", () => {
    expect(async () => {
      await soloOfRuns(10, () => {
        throw new Interrupted({ at_ms: Date.now() });
      });
    }).toThrow(Interrupted);
    expect(async () => {
      await soloOfRuns(10, (logs) => {
        for (const log of logs.values()) log.requests = log.requests.filter(([due_s]) => due_s < 1);
        throw new Interrupted({ at_ms: Date.now() }, { logs, clients: [] });
      });
    }).toThrow(Interrupted);
  });
});

test("a program alone that gets too few requests to tell anything is told how many it got", () => {
  // Of the two that a copy under Rigel gets, the one that counts goes past it.
  expect(async () => await soloOfRuns(1, (logs) => ({ logs, clients: [] }), 3)).toThrow(
    "expected requests bare and through Rigel after the first 2 s, got 1 and 0; a higher --rate or --duration",
  );
});

test("the line of progress has the percentiles of the report", async () => {
  const [pair] = choosePairs(PAIR, true);
  const [alone] = allWays(choosePolicies(undefined, []), { mps: false, clientPriority: false });
  if (!pair || !alone) throw new Error("there are such");
  for (const count of [1, 2, 10, 100, 101]) {
    const requests = Array.from({ length: count }, (_, index): [number, number] => [index / 1000, index + 1]);
    const logs = (runs: readonly Run[]) =>
      new Map(runs.map(({ name }): [string, Log] => [name, { late_s: 0, requests, past: [], ends_s: [] }]));
    const bed: Bed = {
      runner: {
        bare: async (runs) => ({ logs: logs(runs), clients: [] }),
        governed: async (runs) => ({ logs: logs(runs), clients: [] }),
      },
      native: await Native.load(),
      simulated: true,
      load: { rate_per_s: 50, arrivals: "uniform", seed: 1 },
      environment: () => ({}),
    };
    const [high] = anewJobs(bed, pair, alone, 0);
    const found = await high?.run({ rounds: 1, duration_s: 1, lead_s: 0, window_s: 1, learn_s: 20, copies: 1 });
    const latency = latencyOf(requests);
    expect(found?.said).toBe(`p50 ${latency?.p50_ms.toFixed(2)} p99 ${latency?.p99_ms.toFixed(2)} ms`);
  }
});

test("of a program that was ready after the end the line of progress has no steps a second", async () => {
  const [pair] = choosePairs(PAIR, true);
  const [alone] = allWays(choosePolicies(undefined, []), { mps: false, clientPriority: false });
  if (!pair || !alone) throw new Error("there are such");
  const late = { late_s: 5, requests: [], past: [], ends_s: [5.5] };
  const ran = async (runs: readonly Run[]): Promise<Ran> => ({
    logs: new Map(runs.map(({ name }) => [name, late])),
    clients: [],
  });
  const bed: Bed = {
    runner: { bare: ran, governed: ran },
    native: await Native.load(),
    simulated: true,
    load: { rate_per_s: 50, arrivals: "uniform", seed: 1 },
    environment: () => ({}),
  };
  const [, best] = anewJobs(bed, pair, alone, 0);
  const found = await best?.run({ rounds: 1, duration_s: 1, lead_s: 0, window_s: 1, learn_s: 20, copies: 1 });
  expect(found?.said).toBe("no steps");
});

describe("programs that are not ready in time", () => {
  const ready = { pair: "a+b", way: "MPS", method: "live", round: 0, requests: [], requests_s: 0, best: [] };

  test("are started once more, with a longer lead, which is kept", async () => {
    expect(await inTimeOf([{ late_s: 3 }, {}])).toEqual({ said: "2", leads: [10, 15], lead_s: 15, failed: [] });
    expect(await inTimeOf([{ late_s: 3 }, { late_s: 1 }])).toEqual({
      said: "2",
      leads: [10, 15],
      lead_s: 18,
      failed: [],
    });
    expect(await inTimeOf([{}])).toEqual({ said: "1", leads: [10], lead_s: 10, failed: [] });
  });

  test("have a longer lead from then on where nothing is to be measured again", async () => {
    expect(await inTimeOf([{ short_s: 1.5 }])).toEqual({ said: "1", leads: [10], lead_s: 13.5, failed: [] });
  });

  test("count as they were where the second start is cut short, unless that has measured more", async () => {
    const first = { late_s: 3, measurements: [ready, ready] };
    expect((await inTimeOf([first, { measurements: [ready] }], true)).said).toBe("1");
    expect((await inTimeOf([first, { measurements: [ready, ready] }], true)).said).toBe("2");
    expect((await inTimeOf([first, { measurements: [ready] }])).said).toBe("2");
    expect((await inTimeOf([first, new Interrupted({ at_ms: 0 })], true)).said).toBe("1");
    const failures = [{ title: "a+b", problem: "b was killed", output: [] }];
    expect(await inTimeOf([first, { failures }], true)).toMatchObject({ said: "1", failed: ["b was killed"] });
  });

  test("alone count as they were where the second start is cut short, unless that has served more", async () => {
    const [little, more, all] = await Promise.all([4, 8, 12].map(soloUntil));
    if (!little || !more || !all) throw new Error("there are three");
    expect((await inTimeOf([{ ...all, late_s: 3 }, little], true)).said).toBe("1");
    expect((await inTimeOf([{ ...little, late_s: 3 }, more], true)).said).toBe("2");
    expect((await inTimeOf([{ ...more, late_s: 3 }, little])).said).toBe("2");
  });

  test("count as they were where the second start fails, which is told", async () => {
    for (const isInterrupted of [false, true])
      expect(await inTimeOf([{ late_s: 3 }, new RunFailed("b was killed", [])], isInterrupted)).toMatchObject({
        said: "1",
        failed: ["b was killed"],
      });
  });
});

describe("ways that take turns", () => {
  const WAYS = ["time slicing", "MPS", "MPS, client priority", "rigel slo", "rigel slo, MPS", "rigel orion, MPS"];

  test("each is started where it belongs: with MPS or without, with its policy, or without Rigel", async () => {
    const { titles, started } = await startedBy(WAYS, false);
    expect(titles).toHaveLength(1);
    const told = started.map(({ policy = "without Rigel", mps, runs }) => [
      policy,
      mps,
      runs.map(({ name }) => name).join(", "),
      [...new Set(runs.map(({ env }) => Object.entries(env ?? {}).join(" ")))].join("; "),
    ]);
    const mps = "DAEMON,true";
    expect(told).toEqual([
      ["priority", false, "high, resnet50-train, gpt2-train", "DAEMON,false"],
      ["priority", true, "high, resnet50-train, gpt2-train", mps],
      ["none", true, "high", mps],
      ["without Rigel", true, "resnet50-train, gpt2-train", mps],
      ["none", true, "high", `${mps} CUDA_MPS_CLIENT_PRIORITY,0`],
      ["without Rigel", true, "resnet50-train, gpt2-train", `${mps} CUDA_MPS_CLIENT_PRIORITY,1`],
      ["orion", true, "high, resnet50-train, gpt2-train", mps],
    ]);
  });

  test("no two are at work at the same time, and nobody but who is meant in a window", async () => {
    const { started } = await startedBy(WAYS, false);
    const best = started.flatMap(({ runs }) => runs.filter(({ name }) => name === "gpt2-train").map(spellsOf));
    const all = best.flat().toSorted(([a], [b]) => a - b);
    expect(all.length).toBeGreaterThan(5);
    for (const [index, [from_s]] of all.entries()) expect(from_s).toBeGreaterThanOrEqual(all[index - 1]?.[1] ?? 0);
    // Learning, a window alone for itself, and one for each of its two ways, which follow one another.
    expect(best[0]?.map(([from_s, to_s]) => Number((to_s - from_s).toFixed(3)))).toEqual([20, 6.6]);
    // Each stays until all windows are over.
    const durations_s = new Set(started.flatMap(({ runs }) => runs.map(({ duration_s }) => duration_s)));
    expect(durations_s.size).toBe(1);
    for (const duration_s of durations_s) expect(duration_s).toBeGreaterThan(all.at(-1)?.[1] ?? 0);
    // Requests come in windows of their crew alone: those of one way, or while its best-effort programs pause.
    const mps = started.findIndex(({ policy }) => policy === "none");
    const due_s = started[mps]?.runs[0]?.due_s ?? [];
    expect(due_s.length).toBeGreaterThan(70);
    const [[from_s, to_s] = [0, 0]] = started[mps + 1]?.runs.flatMap(spellsOf) ?? [];
    expect(due_s.every((due) => due >= from_s && due < to_s + 1e-6)).toBe(true);
  });

  test("each way has the same requests as the others in each of a round's windows, and programs alone have one window", async () => {
    const { started } = await startedBy(["rigel slo"], false, logOf, "poisson", 3);
    const [high, ...best] = started.flatMap(({ runs }) => runs);
    // After 20 s to find settings, of 2.2 s each: alone, each best-effort program for itself, slo; slo, alone; alone, slo.
    const alone_s = [0, 5, 6].map((n) => 20 + 2.2 * n);
    const slo_s = [3, 4, 7].map((n) => 20 + 2.2 * n);
    const requests = (from_s: number): number[] =>
      (high?.due_s ?? []).filter((due) => due >= from_s && due < from_s + 2.2).map((due) => due - from_s);
    for (const [turn, from_s] of alone_s.entries()) {
      expect(requests(from_s).length).toBeGreaterThan(60);
      const others = requests(slo_s[turn] ?? 0);
      expect(others.map((at, index) => Math.abs(at - (requests(from_s)[index] ?? 0)) < 1e-6)).not.toContain(false);
      expect(others).toHaveLength(requests(from_s).length);
    }
    expect(requests(alone_s[0] ?? 0)[0]).not.toBeCloseTo(requests(alone_s[1] ?? 0)[0] ?? 0, 6);
    expect(best.map((run) => spellsOf(run).map(([from_s, to_s]) => Number((to_s - from_s).toFixed(3))))).toEqual([
      [20, 2.2, 4.4, 2.2],
      [20, 6.6, 2.2],
    ]);
  });

  test("the windows of a way and round together are as long as what is to be measured of it", async () => {
    for (const duration_s of [0.6, 1.4, 1.6, 2.5, 3]) {
      const { measurements } = await startedBy(["MPS"], false, logOf, "uniform", duration_s);
      const counted_s = measurements.map(({ window }) => (window ? window.to_s - window.counted_s : Number.NaN));
      expect(counted_s.length).toBe(Math.max(1, Math.round(duration_s)));
      expect(counted_s.reduce((sum, seconds) => sum + seconds, 0)).toBeCloseTo(duration_s, 6);
    }
  });

  test("what Rigel does under MPS is over alone under MPS, what MPS does without it over alone without", async () => {
    const { titles, measurements } = await startedBy(["MPS", "rigel orion, MPS"], false);
    expect(titles).toEqual([expect.stringContaining(": alone; alone under MPS; MPS; rigel orion, MPS")]);
    expect(measurements.map(({ way, method }) => `${way}: ${method}`)).toEqual([
      "MPS: live",
      "rigel orion, MPS: live, MPS",
    ]);
    // 1 s of 50 requests a second, but for the last 50 ms, and of steps of 0.1 s.
    for (const { requests, best } of measurements) {
      expect(requests.length).toBeWithin(46, 49);
      expect(best.map(({ steps, seconds }) => steps / seconds)).toEqual([expect.closeTo(10, 3), expect.closeTo(10, 3)]);
    }
  });

  test("ways of which a program fails are told, and the others measured", async () => {
    const { measurements, failures } = await startedBy(["MPS", "MPS, client priority"], false, (run, { policy }) => {
      if (!policy && run.name === "gpt2-train" && run.env?.["CUDA_MPS_CLIENT_PRIORITY"])
        throw new RunFailed("gpt2-train was killed", ["gpt2-train | Killed"]);
      return logOf(run);
    });
    expect(measurements.map(({ way }) => way)).toEqual(["MPS"]);
    expect(failures).toEqual([
      {
        title: "resnet50+resnet50-train+gpt2-train, live: MPS, client priority (resnet50-train, gpt2-train)",
        problem: "gpt2-train was killed",
        output: ["gpt2-train | Killed"],
      },
    ]);
  });

  test("of programs that are started without Rigel it is said which of them failed", async () => {
    const { failures } = await startedBy(["MPS"], false, (run, { mps }) => {
      if (mps) throw new RunFailed(`${run.name} was killed`, []);
      return logOf(run);
    });
    expect(failures.map(({ title, problem }) => `${title.split(", live: ")[1]}: ${problem}`).toSorted()).toEqual([
      "MPS (high): high was killed",
      "MPS (resnet50-train, gpt2-train): resnet50-train was killed",
    ]);
  });

  test("windows into which others' steps last are left out", async () => {
    const early = await withStep(3);
    expect(early.measurements.map(({ way }) => way)).toEqual(["MPS", "MPS, client priority"]);
    const late = await withStep(4);
    expect(late.measurements.map(({ way }) => way)).toEqual(["MPS"]);
    expect(late.said).toContain("1 left out: begun with a step of the way before under way");
    expect(late.notes).toEqual([
      expect.stringMatching(/^windows: .*\b1 left out: begun with a step of the way before under way$/),
    ]);
    // Whatever became of those whose step it was.
    expect((await withStep(4, true)).measurements).toEqual([]);
    expect((await withStep(3, true)).measurements).toHaveLength(1);
  });

  test("programs that are late are started again, but those that are so while a way finds its settings", async () => {
    const told = [];
    for (const [way, ready_s] of [
      ["rigel slo", 1.5],
      ["rigel slo", 15],
      ["time slicing", 1.5],
      ["time slicing", 1000],
    ] as const) {
      const { late_s, said, notes } = await startedBy(["MPS", way], false, (run) => ({
        ...logOf(run),
        late_s: ready_s,
      }));
      const text = "programs were ready 1.5 s into the time to find settings";
      told.push([late_s, said.includes(text) && notes.some((note) => note.startsWith(text))]);
    }
    expect(told).toEqual([
      [0, true],
      [15, false],
      [1.5, false],
      [1000, false],
    ]);
  });

  test("the program with requests alone is told that they are of one user, who asks again", async () => {
    for (const [arrivals, more] of [
      ["closed", ["--closed"]],
      ["poisson", []],
    ] as const) {
      const { started } = await startedBy(["time slicing", "rigel slo"], false, logOf, arrivals);
      const runs = started.flatMap((all) => all.runs);
      expect(runs.length).toBeGreaterThan(2);
      for (const { due_s, more: own = [] } of runs) expect(own).toEqual(due_s ? [...more] : []);
      expect(runs.some(({ due_s }) => due_s)).toBe(true);
    }
  });

  test("the simulated GPU is under MPS or is not: one after the other", async () => {
    const { titles, started } = await startedBy(["time slicing", "MPS", "rigel slo, MPS"], true);
    const name = "resnet50+resnet50-train+gpt2-train, live: alone";
    expect(titles).toEqual([`${name}; time slicing`, `${name} under MPS; rigel slo, MPS; MPS`]);
    expect(started.map(({ mps }) => mps)).toEqual([false, true, true, true]);
  });
});

const python = Bun.which("python3");
if (python === null) console.warn("bench.test.ts: without python3 the arguments of workload.py are not checked");

async function verdict(path: string, ...args: string[]) {
  await using child = Bun.spawn([process.execPath, "run", "bench:verdict", path, ...args], {
    cwd: root,
    stdout: "pipe",
    stderr: "pipe",
  });
  const [stdout, stderr] = await Promise.all([child.stdout.text(), child.stderr.text()]);
  return { stdout, stderr, status: await child.exited };
}

describe("rigel bench --from", () => {
  const alone = [one("alone", 0, 5, 50), one("rigel slo", 0, 5, 45)];

  test("puts what several runs wrote together, the pairs of a high program next to each other", async () => {
    using scratch = new Scratch();
    const files = ["a+x", "b+x", "a+y"].map((pair, index) => {
      const made = documentFor(pair, alone);
      return scratch.file(`${index}.json`, {
        ...made,
        started: `2026-01-0${index + 1}T00:00:00.000Z`,
        versions: { torch: `2.${index >> 1}` },
        gpu_times: [{ program: "a", gpu_ms: 1 + index, source: "s", pairs: [pair] }],
      });
    });
    const [html = "", svg = ""] = ["all.html", "all.svg"].map((name) => join(scratch.path, name));
    const { stdout, stderr, status } = await rigel("bench", "--from", ...files, "--html", html, "--svg", svg);
    expect({ stderr, status }).toEqual({ stderr: `rigel: wrote ${html}\nrigel: wrote ${svg}\n`, status: 0 });
    expect(stdout.split("\n").slice(0, 7)).toEqual([
      "- GPU",
      "- torch 2.0 or 2.1",
      "- 1 x p, Linux k",
      "- poisson arrivals at 1/s, seed 1, 1 round of 1 s a way",
      "- begun from 2026-01-01T00:00:00.000Z to 2026-01-03T00:00:00.000Z",
      "- ceiling for a: 1.000 to 3.000 ms of the GPU a request (s)",
      "",
    ]);
    const pairs = [...stdout.matchAll(/^\| ([ab]\+[xy]) \| rigel slo/gm)].map(([, pair]) => pair);
    expect(pairs).toEqual(["a+x", "a+y", "b+x"]);
    const page = readFileSync(html, "utf8");
    expect([...page.matchAll(/<section><h2>([^<]+)/g)].map(([, title]) => title)).toEqual(["All pairs", ...pairs]);
    expect(isWellFormed(readFileSync(svg, "utf8"))).toBe(true);
    const json = await rigel("bench", "--from", ...files, "--json", "-");
    const { documents, rows } = z
      .object({ documents: z.array(z.object({ started: z.string() })), rows: z.array(z.unknown()) })
      .parse(JSON.parse(json.stdout));
    expect(documents).toHaveLength(3);
    expect(rows).toEqual(["a+x", "a+y", "b+x"].flatMap((pair) => documentFor(pair, alone).rows));
  });

  test("says what does not belong together, or is no such file, and where", async () => {
    using scratch = new Scratch();
    const first = scratch.file("first.json", documentFor("a+x", alone));
    const { device } = documentFor("a+x", alone);
    for (const [args, message] of [
      [
        [first, scratch.file("same.json", documentFor("a+x", alone))],
        "same.json:1:1: rows: expected pairs that are in no other file, got a+x, which is in FIRST too",
      ],
      [
        [first, scratch.file("gpu.json", { ...documentFor("a+y", alone), device: { ...device, name: "Other" } })],
        "gpu.json:1:1: device.name: expected GPU, as in FIRST, got Other",
      ],
      [
        [scratch.file("none.json", documentFor("a+x", []))],
        "none.json:1:1: rows: expected measurements of pairs, as rigel bench --json FILE writes them, got none",
      ],
      [
        [scratch.file("odd.json", { ...documentFor("a+x", alone), rows: [{ pair: 1 }] })],
        "rows[0].pair: expected text, got 1",
      ],
      [[first, "--rounds", "3"], "rigel bench: expected no --rounds with --from, which measures nothing"],
      [[first, "--dry-run"], "rigel bench: expected no --dry-run with --from, which measures nothing"],
      [[first, "--json", first], "--json: expected another file than what is read"],
    ] as const) {
      const { stdout, stderr, status } = await rigel("bench", "--from", ...args);
      expect(stderr.replaceAll(/:1:\d+: /g, ":1:1: ")).toContain(message.replaceAll("FIRST", first));
      expect([stdout, status === 0]).toEqual(["", false]);
    }
  });
});

test("bun run bench:verdict tells how soon requests are found to miss a target", async () => {
  using scratch = new Scratch();
  const random = generator(3);
  const windows = (way: string, more_ms: number): object[] =>
    Array.from({ length: 12 }, (_, n) => ({
      pair: "a+b",
      method: "live",
      way,
      waits: Array.from({ length: 100 }, (__, i) => ({
        client: 0,
        began_ms: n * 2000 + i * 20,
        worked_ms: 4 + 2 * random(),
        waited_ms: 0.05 + more_ms,
      })),
    }));
  const measurements = [...windows("alone", 0), ...windows("same", 0), ...windows("more", 0.6)];
  const file = scratch.file("bench.json", { measurements });
  const told = z
    .array(z.object({ way: z.string(), over: z.array(z.object({ part: z.number() })) }))
    .parse(JSON.parse((await verdict(file, "--draws", "10", "--json")).stdout));
  expect(told.map(({ way, over }) => [way, over.at(-1)?.part])).toEqual([
    ["alone", 0],
    ["same", 0],
    ["more", 1],
  ]);
  expect((await verdict(file, "--draws", "10")).stdout).toMatch(/\na\+b, more: .* 1\.00; delayed 1\.1\d, /);
  for (const [path, expected] of [
    [join(scratch.path, "none.json"), "no such file"],
    [scratch.file("bad.json", "{"), "bad.json:1:2: not valid JSON: "],
    [scratch.file("other.json", {}), "other.json: measurements: expected a list, but it is missing"],
    [
      scratch.file("odd.json", { measurements: [{ pair: "a+b", method: "live", way: 1 }] }),
      "odd.json:1:48: measurements[0].way: expected text, got 1",
    ],
    [
      scratch.file("few.json", { measurements: [] }),
      "expected requests alone and beside others in windows of one start",
    ],
  ] as const) {
    const { stderr, status } = await verdict(path);
    expect(stderr).toContain(expected);
    expect(status).not.toBe(0);
  }
});

test.skipIf(python === null)("workload.py takes the arguments of every program", async () => {
  const pairs = choosePairs("all", false);
  const high = new Set(pairs.map((pair) => pair.high));
  const programs = [...high, ...new Set(pairs.flatMap(({ best }) => best))];
  expect(programs).toHaveLength(20);
  const folder = join(root, "src", "python");
  // Nothing of what it needs on a GPU host is imported before the arguments have been read.
  const script = `import sys; sys.dont_write_bytecode = True; sys.path.insert(0, sys.argv[1])
import workload; workload.arguments(sys.argv[2:])`;
  for (const program of programs) {
    const { name, args } = program;
    const solo = high.has(program) ? ["--alternate", "1"] : [];
    await using child = Bun.spawn(
      [python ?? "", "-c", script, folder, ...args, "--rate", "60", "--log", "x", "--start-at", "1", ...solo],
      {
        stdout: "pipe",
        stderr: "pipe",
      },
    );
    const [stderr, status] = await Promise.all([child.stderr.text(), child.exited]);
    expect({ name, stderr, status }).toEqual({ name, stderr: "", status: 0 });
  }
});

test.skipIf(python === null)("workload.py sees that bits are to be compared, however that is written", async () => {
  const script = `import os, sys; sys.dont_write_bytecode = True; sys.path.insert(0, sys.argv.pop(1))
import workload; print(workload.arguments().losses, os.environ.get("CUBLAS_WORKSPACE_CONFIG"))`;
  const run = async (...args: string[]) => {
    const argv = [join(root, "src", "python"), "--model", "bert", "--mode", "train", "--batch", "1", ...args];
    await using child = Bun.spawn([python ?? "", "-c", script, ...argv], { stdout: "pipe", stderr: "pipe" });
    return `${await child.stdout.text()}${(await child.stderr.text()).trimEnd().split("\n").at(-1)}`;
  };
  expect(await run("--losses", "x")).toBe("x :4096:8\n");
  expect(await run("--losses=x")).toBe("x :4096:8\n");
  expect(await run()).toBe("None None\n");
  expect(await run("--loss", "x")).toEndWith("error: unrecognized arguments: --loss x");
});

test.skipIf(python === null)(
  "workload.py: requests of several sizes and lengths come equally often, by chance",
  async () => {
    const script = `import sys; sys.dont_write_bytecode = True; sys.path.insert(0, sys.argv[1])
import itertools, json, workload
args = workload.arguments(sys.argv[2:])
print(json.dumps([args.kinds, args.batch, args.seq, list(itertools.islice(workload.by_chance(args.kinds, 1), 4 * len(args.kinds)))]))`;
    const run = async (...args: string[]) => {
      await using child = Bun.spawn([python ?? "", "-c", script, join(root, "src", "python"), ...args], {
        stdout: "pipe",
        stderr: "pipe",
      });
      return await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
    };
    const serving = ["--mode", "infer", "--model", "bert"];
    const [stdout] = await run(...serving, "--batch", "1,4", "--seq", "32,64,128");
    const [kinds, batch, seq, drawn] = z
      .tuple([z.array(z.unknown()), z.number(), z.number(), z.array(z.unknown())])
      .parse(JSON.parse(stdout));
    expect(kinds).toEqual([1, 4].flatMap((size) => [32, 64, 128].map((length) => [size, length])));
    expect([batch, seq]).toEqual([4, 128]);
    const counted = Map.groupBy(drawn, (kind) => JSON.stringify(kind));
    expect([...counted.values()].map(({ length }) => length)).toEqual(kinds.map(() => 4));
    expect(drawn.slice(0, 6)).not.toEqual(drawn.slice(6, 12));
    for (const [args, message] of [
      [[...serving, "--batch", "1,x"], "--batch: expected whole numbers of at least 1, joined by commas, got 1,x"],
      [
        [...serving, "--batch", "1", "--seq", "0"],
        "--seq: expected whole numbers of at least 1, joined by commas, got 0",
      ],
      [["--mode", "infer", "--model", "gpt2", "--batch", "1", "--stream"], "--stream is for --decode"],
      [["--mode", "train", "--model", "bert", "--batch", "1,2"], "are for --mode infer without --decode"],
      [[...serving, "--batch", "1", "--prepare"], "--prepare is for --mode infer of images"],
      [
        ["--mode", "train", "--model", "resnet50", "--batch", "1", "--prepare"],
        "--prepare is for --mode infer of images",
      ],
      [
        ["--mode", "train", "--model", "bert", "--batch", "1", "--announce"],
        "--announce is for --mode infer without --decode",
      ],
      [[...serving, "--batch", "1", "--served"], "--served needs --rate"],
      ...[
        [...serving, "--batch", "1", "--closed"],
        ["--mode", "infer", "--model", "gpt2", "--batch", "1", "--decode", "2"],
        ["--mode", "train", "--model", "bert", "--batch", "1"],
      ].map(
        (other) =>
          [
            [...other, "--rate", "1", "--served"],
            "--served is for --mode infer without --decode and --closed",
          ] as const,
      ),
    ] as const) {
      const [, stderr, status] = await run(...args);
      expect(stderr).toContain(message);
      expect(status).toBe(2);
    }
  },
);

/** Of requests that began to be served at those. */
const dueIn = (log: readonly (readonly [due_s: number, begun_s: number])[]): number[] => log.map(([due_s]) => due_s);

/** workload.py by a clock that sleeping, `on` and looking at it move on. */
const WITH_CLOCK = `import json, sys, types
sys.dont_write_bytecode = True
sys.path.insert(0, sys.argv[1])
import workload
now = 0.0
def on(seconds):
    global now
    now += seconds
workload.time = types.SimpleNamespace(perf_counter=lambda: on(1e-5) or now, sleep=on)
`;

test.skipIf(python === null)(
  "workload.py --windows: steps begin in windows alone, and the program stays until the end",
  async () => {
    const folder = join(root, "src", "python");
    using scratch = new Scratch();
    const windows = scratch.file("windows.json", [0.2, 0.3, 0.5, 0.2]);
    const script = `${WITH_CLOCK}begun = []
class Work:
    def step(self):
        begun.append(round(now, 3))
        on(0.04)
class Event:
    record = synchronize = lambda self: None
torch = types.SimpleNamespace(cuda=types.SimpleNamespace(synchronize=lambda: None, Event=Event))
args = workload.arguments(sys.argv[2:])
report = workload.train(torch, Work(), args, workload.Stop())
print(json.dumps([begun, now, report["iterations"]]))`;
    const argv = "--mode train --model gpt2 --batch 1 --warmup 0 --duration 2 --windows".split(" ");
    await using child = Bun.spawn([python ?? "", "-c", script, folder, ...argv, windows], { stdout: "pipe" });
    const [begun, ended_s, iterations] = z
      .tuple([z.array(z.number()), z.number(), z.number()])
      .parse(JSON.parse(await child.stdout.text()));
    const first = begun.filter((at_s) => at_s < 0.5);
    expect([first[0], first.length]).toEqual([0.2, 8]);
    const second = begun.filter((at_s) => at_s >= 0.5);
    expect([second[0], second.length]).toEqual([1, 5]);
    expect(ended_s).toBeGreaterThanOrEqual(2);
    expect(iterations).toBe(13);
    await using refused = Bun.spawn(
      [python ?? "", "-c", script, folder, ..."--mode infer --model bert --batch 1 --windows".split(" "), windows],
      { stderr: "pipe" },
    );
    expect(await refused.stderr.text()).toContain("--windows is for --mode train");
  },
);

test.skipIf(python === null)("workload.py --closed: what falls due while a request is served is left out", async () => {
  using scratch = new Scratch();
  // Requests of 0.4 s: of those due at 1.25 and 1.625 the ones before are still served.
  const gaps = scratch.file("gaps.json", [0.5, 0.5, 0.25, 0.25, 0.125, 0.5, 1]);
  const script = `${WITH_CLOCK}args = workload.arguments(sys.argv[2:])
log = []
for due in workload.due_times(args, 0.0):
    if due > 2.5:
        break
    workload.time.sleep(max(0.0, due - now))
    log.append([round(due, 3), round(now, 3)])
    on(0.4)
print(json.dumps(log))`;
  const run = async (...args: string[]) => {
    const argv = ["--mode", "infer", "--model", "bert", "--batch", "1", ...args];
    await using child = Bun.spawn([python ?? "", "-c", script, join(root, "src", "python"), ...argv], {
      stdout: "pipe",
    });
    return z.array(z.tuple([z.number(), z.number()])).parse(JSON.parse(await child.stdout.text()));
  };
  const listed = ["--arrivals", gaps];
  expect(dueIn(await run(...listed))).toEqual([0.5, 1, 1.25, 1.5, 1.625, 2.125]);
  expect(dueIn(await run(...listed, "--closed"))).toEqual([0.5, 1, 1.5, 2.125]);
  for (const arrivals of ["poisson", "uniform"]) {
    const [open, closed] = await Promise.all(
      [[], ["--closed"]].map((more) => run("--rate", "8", "--arrivals", arrivals, ...more)),
    );
    if (!open || !closed) throw new Error("nothing was run");
    // Of the same moments, each one that is served is served as it falls due.
    expect(dueIn(open)).toEqual(expect.arrayContaining(dueIn(closed)));
    expect(closed.length).toBeLessThan(open.length);
    for (const [due_s, begun_s] of closed) expect(begun_s).toBeCloseTo(due_s, 2);
    expect(open.at(-1)?.[1]).toBeGreaterThan(3);
  }
});

test.skipIf(python === null)(
  "workload.py --duration: a program that serves stays until the end, whenever its last request is due",
  async () => {
    using scratch = new Scratch();
    const gaps = scratch.file("gaps.json", [0.2, 0.3, 5]);
    const script = `${WITH_CLOCK}args = workload.arguments(sys.argv[2:])
report = workload.serve(types.SimpleNamespace(request=lambda: on(0.04)), args, workload.Stop())
print(json.dumps([report["count"], now]))`;
    const argv = "--mode infer --model bert --batch 1 --warmup 0 --duration 2 --arrivals".split(" ");
    const folder = join(root, "src", "python");
    await using child = Bun.spawn([python ?? "", "-c", script, folder, ...argv, gaps], { stdout: "pipe" });
    const [requests, ended_s] = z.tuple([z.number(), z.number()]).parse(JSON.parse(await child.stdout.text()));
    expect(requests).toBe(2);
    expect(ended_s).toBeGreaterThanOrEqual(2);
  },
);

describe.skipIf(python === null)("workload.py --served", () => {
  /** Requests whose input is 300,000 bytes, which comes in several pieces, or 100 of another kind; each takes the bytes that have come. */
  const script = `import json, os, signal, sys, types
sys.dont_write_bytecode = True
sys.path.insert(0, sys.argv[1])
import workload
args = workload.arguments(sys.argv[2:])
stop = workload.Stop()
clients = workload.Clients(args, stop)
inputs, seen = [bytearray(b"x" * 300000), bytearray(b"x" * 100)][:len(args.kinds)], []
def request():
    kind = next(work.turn)
    seen.append(kind if all((bytes(to) == bytes(len(to))) == (k == kind) for k, to in enumerate(inputs)) else -1)
    inputs[kind][:] = b"x" * len(inputs[kind])
    if after is not None and len(seen) == after:
        os.kill(os.getpid(), signal.SIGTERM)
`;
  const end = `
work = types.SimpleNamespace(request=request, inputs=lambda: [memoryview(to) for to in inputs])
report = workload.serve(work, args, stop, clients)
clients.connection.close()
print(json.dumps([report["count"], seen, os.wait()[1]]))`;
  /** Which process sends them. */
  const keptPids = `import os
pids, fork = [], os.fork
os.fork = lambda: pids.append(fork()) or pids[-1]
`;
  const run = async (after: number | null, ...args: string[]) => {
    const argv = "--mode infer --model bert --warmup 0 --served".split(" ");
    const folder = join(root, "src", "python");
    await using child = Bun.spawn(
      [python ?? "", "-c", `${script}after = ${after ?? "None"}${end}`, folder, ...argv, ...args],
      { stdout: "pipe", stderr: "pipe" },
    );
    const [stdout, stderr] = await Promise.all([child.stdout.text(), child.stderr.text()]);
    expect(stderr).toBe("");
    const [count, kinds, status] = z.tuple([z.number(), z.array(z.number()), z.number()]).parse(JSON.parse(stdout));
    return { count, kinds, status };
  };

  test("requests of another process come whole, as they fall due, until the end", async () => {
    using scratch = new Scratch();
    const gaps = scratch.file("gaps.json", [0.01, 0.02, 0, 0.02, 100]);
    expect(await run(null, "--batch", "1", "--arrivals", gaps, "--duration", "0.2")).toEqual({
      count: 4,
      kinds: [0, 0, 0, 0],
      status: 0,
    });
  });

  test("of several kinds each comes to where its own is to be, each equally often", async () => {
    const { count, kinds } = await run(null, "--batch", "1,2", "--rate", "1000", "--requests", "20");
    expect(count).toBe(20);
    for (const kind of [0, 1]) expect(kinds.filter((other) => other === kind).length, `${kind}`).toBe(10);
    expect(kinds.slice(0, 10)).not.toEqual(kinds.slice(10));
  });

  test("as many as are asked for, or none", async () => {
    expect(await run(null, "--batch", "1", "--rate", "1000", "--requests", "5")).toMatchObject({
      count: 5,
      kinds: [0, 0, 0, 0, 0],
    });
    expect(await run(null, "--batch", "1", "--rate", "1000", "--requests", "0")).toMatchObject({ count: 0, kinds: [] });
  });

  test("ends at SIGTERM, amid them or with none to come", async () => {
    expect(await run(3, "--batch", "1", "--rate", "1000")).toMatchObject({ count: 3, kinds: [0, 0, 0] });
    using scratch = new Scratch();
    const gaps = scratch.file("gaps.json", [0, 3600]);
    expect(await run(1, "--batch", "1", "--arrivals", gaps)).toMatchObject({ count: 1, kinds: [0] });
  });

  test("a SIGTERM that comes to the process that sends them first ends both as one", async () => {
    const ending = `${script}after, serve_one = None, request
def request():
    serve_one()
    if len(seen) == 3:
        os.kill(pids[0], signal.SIGTERM)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
`;
    const argv = "--mode infer --model bert --batch 1 --warmup 0 --served --rate 1000".split(" ");
    await using child = Bun.spawn(
      [python ?? "", "-c", `${keptPids}${ending}${end}`, join(root, "src", "python"), ...argv],
      { stdout: "pipe", stderr: "pipe" },
    );
    const [stdout, stderr] = await Promise.all([child.stdout.text(), child.stderr.text()]);
    expect(stderr).toBe("");
    expect(stdout).toMatch(/^\[\d+, \[0, 0, 0\b/);
    expect(await child.exited).toBe(0);
  });

  test("where the process that sends them is killed, what came until then is not all there was to come", async () => {
    const killing = `${script}after, serve_one = None, request
def request():
    serve_one()
    if len(seen) == 3:
        os.kill(pids[0], signal.SIGKILL)
`;
    const argv = "--mode infer --model bert --batch 1 --warmup 0 --served --rate 1000".split(" ");
    await using child = Bun.spawn(
      [python ?? "", "-c", `${keptPids}${killing}${end}`, join(root, "src", "python"), ...argv],
      {
        stdout: "pipe",
        stderr: "pipe",
      },
    );
    const [stdout, stderr] = await Promise.all([child.stdout.text(), child.stderr.text()]);
    expect({ stdout, stderr }).toEqual({
      stdout: "",
      stderr: "workload: --served: the process that sends the requests ended before the last of them\n",
    });
    expect(await child.exited).toBe(1);
  });

  test("the process that sends them ends if the one that takes them was killed before it had its connection", async () => {
    const killed = `import os, signal, socket, sys
sys.dont_write_bytecode = True
sys.path.insert(0, sys.argv[1])
import workload
socket.socket.accept = lambda _: os.kill(os.getpid(), signal.SIGKILL)
workload.Clients(workload.arguments(sys.argv[2:]), workload.Stop())`;
    const argv = "--mode infer --model bert --batch 1 --rate 1 --served".split(" ");
    await using child = Bun.spawn([python ?? "", "-c", killed, join(root, "src", "python"), ...argv], {
      stdout: "pipe",
    });
    expect(await child.stdout.text()).toBe(""); // once both have ended
    expect(await child.exited).not.toBe(0);
  });
});

describe.skipIf(python === null)("workload.py at its end", () => {
  const folder = join(root, "src", "python");
  /** All of it, without PyTorch: 3 requests of 40 ms, or steps. */
  const script = `${WITH_CLOCK}Event = lambda: types.SimpleNamespace(record=lambda: None, synchronize=lambda: on(0.04))
cuda = types.SimpleNamespace(is_available=lambda: True, synchronize=lambda: None, Event=Event)
cudnn = types.SimpleNamespace(version=lambda: 1)
version, backends = types.SimpleNamespace(cuda="0"), types.SimpleNamespace(cudnn=cudnn)
sys.modules["torch"] = types.SimpleNamespace(cuda=cuda, __version__="0", version=version, backends=backends)
array = types.SimpleNamespace(tobytes=lambda: b"1")
output = types.SimpleNamespace(item=lambda: 1.0, contiguous=lambda: types.SimpleNamespace(numpy=lambda: array))
workload.make = lambda torch, args: types.SimpleNamespace(request=lambda: on(0.04) or output, step=lambda: output)
sys.argv = [*"workload.py --model gpt2 --batch 1 --warmup 0".split(), *sys.argv[2:]]
`;
  const run = (argv: string, first = "") =>
    Bun.spawn([python ?? "", "-c", `${script}${first}sys.exit(workload.main())`, folder, ...argv.split(" ")], {
      stdout: "pipe",
      stderr: "pipe",
    });
  const no = "cannot be written (No space left on device)";

  test.each([["infer"], ["train"]])("tells what a full disk has no room for, and the rest: %s", async (mode) => {
    await using child = run(`--mode ${mode} --requests 3 --losses /dev/full --log /dev/full`);
    const [stdout, stderr] = await Promise.all([child.stdout.text(), child.stderr.text()]);
    expect(stderr).toBe(`workload: --losses /dev/full: ${no}\nworkload: --log /dev/full: ${no}\n`);
    expect(JSON.parse(stdout)).toMatchObject({ role: mode, [mode === "infer" ? "count" : "iterations"]: 3 });
    expect(await child.exited).toBe(1);
  });

  test("tells its result on standard error where standard output has no room", async () => {
    await using child = run("--mode infer --requests 3", "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1)\n");
    const [said, line = "", ...more] = (await child.stderr.text()).split("\n");
    expect(said).toBe(`workload: standard output ${no}; it was to be:`);
    expect(JSON.parse(line)).toMatchObject({ role: "infer", count: 3, p50_ms: 40.02 });
    expect(more).toEqual([""]);
    expect(await child.exited).toBe(1);
  });

  test.each([
    ["--gpu-time", { role: "gpu-time", gpu_ms: null }],
    ["--requests 3", { role: "infer", count: 0, p50_ms: null }],
  ])("says what it was to measure where it was ended before: %s", async (more, report) => {
    const first = "import os, signal\nworkload.make = lambda torch, args: os.kill(os.getpid(), signal.SIGTERM)\n";
    await using child = run(`--mode infer ${more}`, first);
    expect(JSON.parse(await child.stdout.text())).toMatchObject(report);
    expect(await child.exited).toBe(0);
  });
});

describe.skipIf(python === null)("workload.py refuses", () => {
  test.each([
    ["--rate", "nan", "argument --rate: expected a number of at least 0, got nan"],
    ["--duration", "nan", "argument --duration: expected a number of at least 0, got nan"],
    ["--duration", "-1", "argument --duration: expected a number of at least 0, got -1"],
    ["--start-at", "inf", "argument --start-at: expected a number of at least 0, got inf"],
    ["--requests", "-1", "argument --requests: expected a whole number of at least 0, got -1"],
    ["--requests", "1.5", "argument --requests: expected a whole number of at least 0, got 1.5"],
    ["--ahead", "-1", "argument --ahead: expected a whole number of at least 0, got -1"],
    ["--log", "/nowhere/log", "--log /nowhere/log: cannot be written (No such file or directory)"],
    ["--losses", "/", "--losses /: cannot be written (Is a directory)"],
  ])("%s %s", async (option, value, expected) => {
    const argv = [join(root, "src", "python", "workload.py"), "--model", "bert", "--mode", "infer", "--batch", "1"];
    await using child = Bun.spawn([python ?? "", ...argv, option, value], { stderr: "pipe" });
    expect(await child.stderr.text()).toContain(`error: ${expected}\n`);
    expect(await child.exited).toBe(2);
  });

  test("lists within lists without end", async () => {
    using scratch = new Scratch();
    const gaps = scratch.file("gaps.json", "[".repeat(100_000));
    const argv = [join(root, "src", "python", "workload.py"), "--model", "bert", "--mode", "infer", "--batch", "1"];
    await using child = Bun.spawn([python ?? "", ...argv, "--arrivals", gaps], { stderr: "pipe" });
    expect((await child.stderr.text()).slice(-1000)).toContain(
      `error: --arrivals ${gaps}: expected poisson, uniform, or `,
    );
    expect(await child.exited).toBe(2);
  });

  test("nothing of which it only looks whether it can be written", async () => {
    using scratch = new Scratch();
    const [log, losses] = [scratch.file("log", "before"), join(scratch.path, "losses")];
    const script = `import sys; sys.dont_write_bytecode = True; sys.path.insert(0, sys.argv[1])
import workload; workload.arguments(sys.argv[2:])`;
    const argv = [join(root, "src", "python"), "--model", "bert", "--mode", "infer", "--batch", "1"];
    await using child = Bun.spawn([python ?? "", "-c", script, ...argv, "--log", log, "--losses", losses]);
    expect(await child.exited).toBe(0);
    expect(await Bun.file(log).text()).toBe("before");
    expect(await Bun.file(losses).exists()).toBe(false);
  });
});

describe.skipIf(python === null)("workload.py says where in a file of arrivals or windows what is wrong is:", () => {
  test.each([
    ["[0.5,\n\t1, true]", ":2:5: [2]: expected a number of seconds of at least 0, got true"],
    ['[ "0.5" ]', ':1:3: [0]: expected a number of seconds of at least 0, got "0.5"'],
    ["[1,-1]", ":1:4: [1]: expected a number of seconds of at least 0, got -1"],
    ["[1 ,\r\n[2, 3],1]", ":2:1: [1]: expected a number of seconds of at least 0, got [2, 3]"],
    ["[1e999]", ":1:2: [0]: expected a number of seconds of at least 0, got Infinity"],
    ["[1,\n2", ":2:2: not valid JSON: "],
    ['{"a": 1}', ': expected a list of seconds, got {"a": 1}'],
  ])("%j", async (text, expected) => {
    using scratch = new Scratch();
    const gaps = scratch.file("gaps.json", text);
    for (const [option, mode] of [
      ["--arrivals", "infer"],
      ["--windows", "train"],
    ]) {
      const argv = [join(root, "src", "python", "workload.py"), "--model", "bert", "--mode", `${mode}`, "--batch", "1"];
      await using child = Bun.spawn([python ?? "", ...argv, `${option}`, gaps], { stderr: "pipe" });
      expect(await child.stderr.text()).toContain(`error: ${option} ${gaps}${expected}`);
      expect(await child.exited).toBe(2);
    }
  });
});

const spreadSchema = z.object({ median: z.number(), min: z.number(), max: z.number(), rounds: z.number() });
const intervalSchema = z.tuple([z.number(), z.number()]);
const samplesSchema = z.array(z.tuple([z.number(), z.number()]));
const documentSchema = z.object({
  schema: z.literal(2),
  simulated: z.boolean(),
  device: z.object({ name: z.string(), uuid: z.string() }),
  driver: z.string().nullable(),
  versions: z.record(z.string(), z.string()),
  options: z.object({ seed: z.number(), rate_per_s: z.number(), arrivals: z.string(), duration_s: z.number() }),
  runs: z.number(),
  done: z.number(),
  notes: z.array(z.string()),
  rows: z.array(
    z.object({
      pair: z.string(),
      way: z.string(),
      method: z.string(),
      p50_ms: spreadSchema.nullable(),
      p99_ratio: spreadSchema.nullable(),
      delayed: z.object({ requests: z.number(), p50: z.number(), p95: z.number(), p99: z.number() }).nullable(),
      share: spreadSchema.nullable(),
      ceiling: z.number().nullable(),
    }),
  ),
  measurements: z.array(
    z.object({
      way: z.string(),
      best: z.array(z.object({ program: z.string(), steps: z.number(), seconds: z.number() })),
      requests: samplesSchema,
      rigel: z
        .array(
          z.object({
            name: z.string(),
            attached: z.boolean(),
            gate: z.object({ waits: z.number() }),
            durations: z.object({ seeded: z.number() }),
          }),
        )
        .optional(),
    }),
  ),
  solo: z.array(
    z.object({
      program: z.string(),
      ratio: z.number(),
      interval: intervalSchema,
      p99_ratio: z.number(),
      p99_interval: intervalSchema,
      paired: z.number(),
      paired_interval: intervalSchema,
      pairs: z.number(),
      copies: z.object({ bare: z.array(z.number()), rigel: z.array(z.number()) }),
      bare: z.object({ count: z.number() }),
      rigel: z.object({ count: z.number() }),
      within: z.object({
        p50: z.number(),
        p50_interval: intervalSchema,
        added_us: z.number(),
        added_us_interval: intervalSchema,
        p99: z.number(),
        p99_interval: intervalSchema,
        pairs: z.number(),
        copies: z.object({ through: z.array(z.number()), past: z.array(z.number()) }),
      }),
      settle_s: z.number(),
      samples: z.object({
        bare: z.array(samplesSchema),
        rigel: z.array(samplesSchema),
        past: z.array(samplesSchema),
      }),
    }),
  ),
  loops: z.array(
    z.object({
      pair: z.string(),
      way: z.string(),
      method: z.string(),
      target: z.object({ p99_over_alone: z.number() }),
      settings: z.object({ suspend: z.number(), slice_us: z.number(), inflight: z.number() }),
      changes: z.number(),
      held_s: z.number(),
      over_alone: z.object({ requests: z.number(), p50: z.number(), p99: z.number() }).nullable(),
      seconds: z.array(z.object({ t_s: z.number(), rung: z.number(), requests: z.number() })),
    }),
  ),
  failures: z.array(z.object({ title: z.string(), problem: z.string(), output: z.array(z.string()) })),
});

function documentAt(path: string): z.infer<typeof documentSchema> {
  return documentSchema.parse(JSON.parse(readFileSync(path, "utf8")));
}

const PAIR = "resnet50+resnet50-train";
const SIMULATED = ["bench", "--device", "simulated", "--pairs", PAIR];
/** Ways that are switched for longer than a test waits. */
const TURNS = [
  ...SIMULATED,
  "--live",
  "--ways",
  "time slicing",
  ..."--rounds 500 --duration 1 --window 1 --lead 2".split(" "),
];
const TINY = [...SIMULATED, "--rounds", "1", "--duration", "1", "--lead", "2"];
const LIMIT_ms = 600_000;

/** Whether every element that is opened is closed, in order; void elements have no end. */
function isWellFormed(html: string): boolean {
  const open: string[] = [];
  for (const [, slash, name = "", rest = ""] of html.matchAll(/<(\/?)([a-z][a-z0-9]*)((?:"[^"]*"|[^">])*)>/g)) {
    if (["meta", "br"].includes(name) || rest.endsWith("/")) continue;
    if (slash === "") open.push(name);
    else if (open.pop() !== name) return false;
  }
  return open.length === 0;
}

/** Runs a benchmark until its document is whole: a slow machine leaves windows out, and ways without any. */
async function wholly(
  args: readonly string[],
  isWhole: (document: z.infer<typeof documentSchema>) => boolean,
): Promise<{ result: Awaited<ReturnType<typeof rigel>>; document: z.infer<typeof documentSchema> }> {
  using scratch = new Scratch();
  const json = join(scratch.path, "whole.json");
  return await until(async () => {
    const result = await rigel(...args, "--json", json);
    expect(result.status, result.stderr).toBe(0);
    const document = documentAt(json);
    expect(document.failures).toEqual([]);
    return isWhole(document) ? { result, document } : undefined;
  });
}

/** Steps a second of a program in all windows of a way. */
function rate(measurements: z.infer<typeof documentSchema>["measurements"], way: string, name: string): number {
  const best = measurements.flatMap((measured) => (measured.way === way ? measured.best : []));
  const mine = best.filter(({ program }) => program === name);
  const sum = (key: "steps" | "seconds"): number => mine.reduce((all, part) => all + part[key], 0);
  return sum("steps") / sum("seconds");
}

describe("rigel bench on the simulated GPU measures", () => {
  test(
    "with --arrivals closed requests that fall due one after the other",
    async () => {
      // Of 2 ms at least: more than can be served.
      const args = [...TINY, "--ways", "time slicing", "--rate", "1000", "--arrivals", "closed"];
      const { document } = await wholly(args, ({ measurements }) =>
        measurements.some(({ requests }) => requests.length > 2),
      );
      expect(document.options.arrivals).toBe("closed");
      for (const { requests } of document.measurements)
        for (const [index, [due_s, latency_ms]] of requests.entries()) {
          const [next_s] = requests[index + 1] ?? [];
          if (next_s !== undefined) expect(next_s).toBeGreaterThan(due_s + latency_ms / 1000 - 1e-5);
        }
    },
    LIMIT_ms,
  );

  test(
    "a pair started anew for two ways: JSON, Markdown and a page",
    async () => {
      using scratch = new Scratch();
      const [md, html] = ["b.md", "b.html"].map((name) => join(scratch.path, name));
      if (!md || !html) throw new Error("two names");
      const files = ["--markdown", md, "--html", html];
      const { result, document } = await wholly(
        [...TINY, "--ways", "time slicing;rigel priority", ...files],
        ({ rows }) => rows.every(({ way, p50_ms, share }) => p50_ms && (way === "alone" || (share?.median ?? 0) > 0)),
      );
      expect(document).toMatchObject({
        simulated: true,
        driver: null,
        options: { seed: 1, rate_per_s: 60 },
      });
      expect(document.done).toBe(document.runs);
      expect(document.rows.map(({ way, method }) => `${way} ${method}`)).toEqual([
        "alone anew",
        "time slicing anew",
        "rigel priority anew",
      ]);
      for (const { way, p50_ms, p99_ratio, share, ceiling } of document.rows) {
        expect(p50_ms?.median, way).toBeGreaterThan(0);
        expect(ceiling, way).toBeLessThan(1);
        if (way === "alone") continue;
        expect(p99_ratio?.median, way).toBeGreaterThan(0);
        expect(share?.rounds, way).toBe(1);
      }
      const governed = document.measurements.find(({ way }) => way === "rigel priority");
      expect(governed?.rigel).toMatchObject([{ attached: true }, { attached: true }]);
      // The table of the file is that of standard output, and says what the numbers are.
      expect(readFileSync(md, "utf8")).toBe(result.stdout);
      expect(result.stdout).toContain("(simulated)");
      const lines = result.stdout.split("\n").filter((line) => line.startsWith("|"));
      expect(lines).toHaveLength(2 + document.rows.length);
      expect(new Set(lines.map((line) => line.split("|").length)).size).toBe(1);
      const page = readFileSync(html, "utf8");
      expect(isWellFormed(page.replace("<!doctype html>", "").replace(/<style>[^<]*<\/style>/, ""))).toBe(true);
      expect(page).toContain("Simulated");
      expect(page.match(/<svg /g)).toHaveLength(3);
      expect(page).not.toMatch(/NaN|undefined|https?:|src=|@import|url\(/);
      expect(page).toContain('name="viewport"');
      expect(result.stderr).toMatch(/\[1\/\d\].*left/);
      expect(result.stderr).toContain(`wrote ${html}`);
    },
    LIMIT_ms,
  );

  test(
    "a program started again for another round, of whose kernels is known what was learned before",
    async () => {
      const args = [...SIMULATED, "--rounds", "2", "--duration", "1", "--lead", "2", "--ways", "rigel priority"];
      const { document } = await wholly(args, ({ rows }) => rows.length === 2);
      const governed = document.measurements.filter(({ way }) => way === "rigel priority");
      const seeded = governed.map(({ rigel: clients = [] }) => clients.at(-1)?.durations.seeded);
      expect(seeded).toHaveLength(2);
      expect(seeded[0]).toBe(0);
      expect(seeded[1]).toBeGreaterThan(0);
    },
    LIMIT_ms,
  );

  test(
    "a pair whose ways are switched while it runs",
    async () => {
      const policies = ["--policies", "shared,slo", "--policy-json", 'shared={"name":"priority","min_share":0.1}'];
      const ways = ["--live", "--window", "1", "--ways", "time slicing;MPS;rigel shared;rigel slo"];
      // Twice, as a window that is switched late on a busy machine is left out.
      const { document } = await wholly(
        [...TINY, "--rounds", "2", ...policies, ...ways],
        ({ rows, loops }) =>
          rows.length === 5 &&
          rows.every(({ way, delayed }) => way === "alone" || delayed) &&
          (loops[0]?.seconds.length ?? 0) > 0,
      );
      const { rows, loops } = document;
      expect(rows.map(({ way, method }) => `${way} ${method}`)).toEqual([
        "alone live",
        "time slicing live",
        "rigel shared live",
        "rigel slo live",
        "MPS live",
      ]);
      expect(rows.map(({ delayed }) => (delayed?.requests ?? 0) > 0)).toEqual([false, true, true, true, true]);
      // What the control loop did, a line for each second in which it ran.
      expect(loops).toMatchObject([{ pair: PAIR, way: "rigel slo", method: "live", target: { p99_over_alone: 1.05 } }]);
      const seconds = loops[0]?.seconds.map(({ t_s }) => t_s) ?? [];
      expect(seconds).toEqual(seconds.toSorted((a, b) => a - b));
    },
    LIMIT_ms,
  );

  test(
    "several best-effort programs at once, of which each has windows for itself",
    async () => {
      const pair = "resnet50+resnet50-train+gpt2-train";
      const window = ["--rounds", "2", "--duration", "1", "--window", "1", "--lead", "3"];
      const ways = ["--live", "--ways", "alone;time slicing"];
      const names = ["resnet50-train", "gpt2-train"];
      // Nobody shares the GPU in the windows alone: both are faster there than together, where the machine lets all of them run.
      const { document } = await wholly(
        ["bench", "--device", "simulated", "--pairs", pair, ...window, ...ways],
        ({ measurements }) =>
          names.every((name) => rate(measurements, "alone", name) > 1.2 * rate(measurements, "time slicing", name)),
      );
      expect(document.rows.map(({ way, method }) => `${way} ${method}`)).toEqual(["alone live", "time slicing live"]);
      const ran = (way: string): string[][] =>
        document.measurements
          .filter((measured) => measured.way === way && measured.best.length > 0)
          .map(({ best }) => best.map(({ program }) => program));
      for (const single of ran("alone")) expect([["resnet50-train"], ["gpt2-train"]]).toContainEqual(single);
      for (const all of ran("time slicing")) expect(all).toEqual(names);
    },
    LIMIT_ms,
  );

  test(
    "a program alone, requests bare and under Rigel in turn",
    async () => {
      using scratch = new Scratch();
      const html = join(scratch.path, "b.html");
      // Where two processors next to each other may be used.
      const processors = allowedProcessors();
      const first = processors.find((processor) => processors.includes(processor + 1));
      const pinned = first !== undefined && Bun.which("taskset") ? ["--pin", String(first)] : [];
      const args = [
        ...SIMULATED,
        "--solo",
        "--duration",
        "1",
        "--lead",
        "4",
        "--copies",
        "2",
        "--rate",
        "50",
        ...pinned,
      ];
      const { result, document } = await wholly([...args, "--html", html], ({ solo: [only] }) => {
        const { bare, rigel: through, past } = only?.samples ?? { bare: [], rigel: [], past: [] };
        const isServed = [...bare, ...through, ...past].every((served) => served.length > 0);
        return isServed && (only?.pairs ?? 0) > 0 && (only?.within.pairs ?? 0) > 0;
      });
      const { solo, rows, options, loops } = document;
      expect({ rows, loops }).toEqual({ rows: [], loops: [] });
      expect(options).toMatchObject({ arrivals: "uniform", duration_s: 1 });
      const [found] = solo;
      if (!found || solo.length !== 1) throw new Error("one program");
      const { bare, rigel: governed, samples, settle_s, pairs, copies } = found;
      expect(found.program).toBe("resnet50");
      for (const [ratio, interval] of [
        [found.ratio, found.interval],
        [found.p99_ratio, found.p99_interval],
        [found.paired, found.paired_interval],
        [found.within.p50, found.within.p50_interval],
        [found.within.p99, found.within.p99_interval],
      ] as const) {
        expect(ratio).toBeGreaterThan(0);
        expect(interval[0]).toBeLessThanOrEqual(interval[1]);
      }
      // Every copy serves when it is its turn, and all of that counts but what falls due while programs settle.
      const due = soloTurns(50, 2, settle_s + 1);
      for (const kind of ["bare", "rigel", "past"] as const)
        for (const [copy, served] of samples[kind].entries()) {
          expect(served.length, `${kind} ${copy}`).toBeGreaterThan(0);
          for (const [due_s] of served)
            expect(
              due[kind === "past" ? "rigel" : kind][copy]?.some((planned) => Math.abs(planned - due_s) < 1e-3),
              `${kind} ${due_s}`,
            ).toBe(true);
        }
      // Of each two requests one goes past Rigel, and none is both.
      for (const [copy, through] of samples.rigel.entries()) {
        const past = samples.past[copy] ?? [];
        const all = [...through.map(([due_s]) => [due_s, 0]), ...past.map(([due_s]) => [due_s, 1])].toSorted(
          ([a = 0], [b = 0]) => a - b,
        );
        const ways = all.map(([, way]) => way);
        for (let at = 0; at + 1 < ways.length; at += 2) expect(ways.slice(at, at + 2).toSorted()).toEqual([0, 1]);
        expect(new Set(all.map(([due_s]) => due_s)).size).toBe(all.length);
      }
      expect(found.within.pairs).toBeGreaterThan(0);
      expect(found.within.pairs).toBeLessThanOrEqual(governed.count);
      expect([found.within.copies.through.length, found.within.copies.past.length]).toEqual([2, 2]);
      expect(result.stderr).toMatch(/; within a process x\d\.\d{3} \(.* to .*\), -?\d+ us a request/);
      const counted = (kind: "bare" | "rigel"): number =>
        samples[kind].flat().filter(([due_s]) => due_s >= settle_s).length;
      expect([bare.count, governed.count]).toEqual([counted("bare"), counted("rigel")]);
      expect(pairs).toBeGreaterThan(0);
      expect(pairs).toBeLessThanOrEqual(Math.min(bare.count, governed.count));
      expect(Math.max(bare.count, governed.count)).toBeLessThanOrEqual(25);
      expect([copies.bare.length, copies.rigel.length]).toEqual([2, 2]);
      expect(result.stdout).toContain("| resnet50 |");
      const lines = result.stdout.split("\n").filter((line) => line.startsWith("|"));
      expect(new Set(lines.map((line) => line.split("|").length)).size).toBe(1);
      const page = readFileSync(html, "utf8");
      expect(isWellFormed(page.replace("<!doctype html>", "").replace(/<style>[^<]*<\/style>/, ""))).toBe(true);
      expect(page.match(/<svg /g)).toHaveLength(2);
      expect(page).toContain("under Rigel, past it");
      expect(page).not.toMatch(/NaN|undefined/);
    },
    LIMIT_ms,
  );
});

describe.concurrent("rigel bench on the simulated GPU", () => {
  test(
    "leaves nothing among the durations of the user's programs",
    async () => {
      using home = new Scratch();
      await using child = start([...TINY, "--ways", "rigel priority"], { env: { XDG_CACHE_HOME: home.path } });
      const [stdout, stderr, status] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
      expect(status, stderr).toBe(0);
      expect(stdout).toContain("rigel priority");
      expect(readdirSync(home.path, { recursive: true }).filter((name) => String(name).includes("durations"))).toEqual(
        [],
      );
    },
    LIMIT_ms,
  );

  test(
    "files that cannot be written cost neither the table nor the other files",
    async () => {
      using scratch = new Scratch();
      const md = join(scratch.path, "b.md");
      const files = ["--json", "/dev/full", "--html", "/dev/full", "--markdown", md];
      const { stdout, stderr, status } = await rigel(...TINY, "--ways", "time slicing", ...files);
      expect(stdout).toContain("time slicing");
      const lines = stderr.split("\n");
      expect(lines.filter((line) => line.includes("--json: /dev/full: cannot be written (ENOSPC"))).toEqual([
        expect.stringContaining("; it is tried again after each run"),
        expect.not.stringContaining("again"),
      ]);
      expect(lines.filter((line) => line.startsWith("rigel: ["))).toHaveLength(4);
      expect(stderr).toContain("--html: /dev/full: cannot be written (ENOSPC");
      expect(readFileSync(md, "utf8")).toBe(stdout);
      expect(readdirSync(scratch.path)).toEqual(["b.md"]);
      expect(status).toBe(1);
    },
    LIMIT_ms,
  );

  test(
    "Ctrl-C ends the programs, and what was measured so far is written",
    async () => {
      using scratch = new Scratch();
      const json = join(scratch.path, "b.json");
      const args = [...SIMULATED, "--rounds", "500", "--duration", "1", "--lead", "1", "--json", json];
      // The GPU time, and the high program alone.
      await interrupted(args, scratch, "[2/");
      const { done, runs, rows, failures } = documentAt(json);
      expect(done).toBeGreaterThanOrEqual(2);
      expect(done).toBeLessThan(runs);
      expect(rows[0]).toMatchObject({ way: "alone", p99_ratio: null });
      expect(failures).toEqual([]);
      // Neither a folder of its own nor a program that uses it is left.
      expect(readdirSync(scratch.path)).toEqual(["b.json"]);
      await gone(scratch.path);
    },
    LIMIT_ms,
  );

  test(
    "Ctrl-C while ways are switched keeps the windows that are over",
    async () => {
      using scratch = new Scratch();
      const json = join(scratch.path, "b.json");
      await interrupted([...TURNS, "--json", json], scratch, "round 3 of 500");
      const { failures, measurements, notes } = documentAt(json);
      expect(failures).toEqual([]);
      // All of its runs were begun: that it has not what it was to have is told.
      expect(notes).toContainEqual(
        expect.stringMatching(/^resnet50\+resnet50-train, live: .*: interrupted after \d+ of \d+ s$/),
      );
      // Three windows a round; of those that were switched late, as on a busy machine all may be, it is told.
      if (measurements.length === 0) expect(notes.join("\n")).toMatch(/^windows: \d+ left out: /m);
      expect(measurements.length).toBeLessThan(3 * 500);
      await gone(scratch.path);
    },
    LIMIT_ms,
  );

  test(
    "Ctrl-C does not hide what failed before it",
    async () => {
      using scratch = new Scratch();
      const json = join(scratch.path, "b.json");
      const stderr = await interrupted([...TURNS, "--json", json], scratch, "round 2 of 500", async () => {
        // Its parent has heard of it once nothing of it is left.
        const pids = processesWith(scratch.path, "resnet50-train.log");
        for (const pid of pids) process.kill(pid, "SIGKILL");
        await until(() => (pids.some((pid) => existsSync(`/proc/${pid}`)) ? undefined : true));
      });
      const { failures } = documentAt(json);
      expect(failures).toMatchObject([{ problem: "resnet50-train ended with status 137" }]);
      expect(stderr).toContain("FAILED: resnet50-train ended with status 137");
      await gone(scratch.path);
    },
    LIMIT_ms,
  );

  test(
    "a run that fails is told with its programs' last words, the rest goes on, and the status says so",
    async () => {
      using scratch = new Scratch();
      const json = join(scratch.path, "b.json");
      // Only what is to run under Rigel cares, and then does not.
      const args = [...TINY, "--ways", "rigel priority;alone, Rigel;time slicing", "--json", json];
      await using child = start(args, { env: { RIGEL_DISABLE: "1" } });
      const [stdout, stderr, status] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
      const { failures, rows, done, runs } = documentAt(json);
      expect(failures).toMatchObject([
        {
          title: `${PAIR}, round 1, alone, Rigel: resnet50`,
          problem: expect.stringContaining("high was not under Rigel"),
        },
        { title: `${PAIR}, round 1, rigel priority`, problem: expect.stringContaining("RIGEL_DISABLE=1") },
      ]);
      expect(failures[1]?.output.filter((line) => line.startsWith("resnet50-train | {"))).toHaveLength(1);
      expect(rows.map(({ way }) => way)).toEqual(["alone", "time slicing"]);
      expect(stdout).toContain(`- failed: ${PAIR}, round 1, rigel priority: high was not under Rigel`);
      expect(stderr).toContain("FAILED: high was not under Rigel");
      expect(done).toBe(runs);
      expect(status).toBe(1);
    },
    LIMIT_ms,
  );
});

/** Standard error of a benchmark that Ctrl-C ends once it has said so much, after what is to be done first. */
async function interrupted(
  args: readonly string[],
  scratch: Scratch,
  text: string,
  first: () => Promise<void> = async () => {},
): Promise<string> {
  await using child = start([...args], { env: { TMPDIR: scratch.path } });
  let stderr = "";
  let sent = false;
  for await (const chunk of child.stderr) {
    stderr += new TextDecoder().decode(chunk);
    if (sent || !stderr.includes(text)) continue;
    sent = true;
    await first();
    child.kill("SIGINT");
  }
  expect(await child.exited, stderr).toBe(130);
  return stderr;
}

/** Nobody's command line mentions a path any more: what watched over programs ends a moment after the command. */
async function gone(path: string): Promise<void> {
  await until(() => (processesWith(path).length === 0 ? true : undefined));
}

/** Processes whose command lines mention all of these. */
function processesWith(...parts: string[]): number[] {
  return readdirSync("/proc")
    .filter((entry) => /^\d+$/.test(entry))
    .filter((entry) => {
      try {
        const command = readFileSync(`/proc/${entry}/cmdline`, "utf8");
        return parts.every((part) => command.includes(part));
      } catch {
        return false;
      }
    })
    .map(Number);
}

describe.concurrent("rigel bench refuses", () => {
  test.each([
    [["--pairs", "resnet50+nothing"], "expected a best-effort program, one of resnet50-train, bert-train"],
    [
      ["--pairs", "resnet50-train+resnet50"],
      'expected a high program, one of resnet50, bert, resnet50-graph, resnet50-bytes, resnet50-announced, resnet50-served, bert-graph, bert-served, resnet50-mixed, bert-mixed, bert-texts, bert-mixed-graph, bert-mixed-served, gpt2-decode, gpt2-stream, got "resnet50-train"',
    ],
    [["--pairs", "resnet50-train"], "--pairs: resnet50-train: expected a high program, one of resnet50, bert"],
    [["--pairs", "gpt2-decode+resnet50-train"], "no profile of gpt2-decode was recorded"],
    [["--ways", "magic"], 'there is no way "magic" here; there are: alone; time slicing; MPS; alone, Rigel; rigel slo'],
    [["--ways", "MPS, client priority"], "there is no way"],
    [["--html", "/nowhere/b.html"], "--html: /nowhere/b.html: cannot be written (ENOENT"],
    [["--live", "--solo"], "expected either --live or --solo"],
    [["--anew", "--solo"], "expected either --anew or --solo"],
    [["--anew", "--live"], "expected either --live or --anew"],
    [["--solo", "--rounds", "3"], "expected no --rounds with --solo: --duration says how long it measures"],
    [["--solo", "--svg", "x"], "expected no --svg with --solo: it is a picture of pairs"],
    [["--pin", "0"], "expected --pin with --solo only"],
    [["--copies", "2"], "expected --copies with --solo only"],
    [["--solo", "--pin", "99999"], "expected 1 processors from there on, one for each copy of a kind; there are"],
    [["--anew", "--window", "2"], "expected --window where ways take turns (--live)"],
    [["--learn", "2"], "expected --learn where ways take turns (--live)"],
    [["--solo", "--policies", "fair"], "expected no --policies with --solo: each program has the GPU to itself"],
    [["--solo", "--ways", "MPS"], "expected no --ways with --solo"],
    [["--solo", "--window", "2"], "expected no --window with --solo: requests alternate one by one"],
    [["--solo", "--learn", "2"], "expected no --learn with --solo: each program has the GPU to itself"],
    [["--solo", "--arrivals", "poisson"], "expected no --arrivals poisson with --solo: its requests are evenly spaced"],
    [["--rounds", "0"], "Expected a whole number from 1 to 1000"],
    [["--rounds", "1.5"], "Expected a whole number"],
    [["--window", "0"], "Expected a number from 0.001 to 600"],
    [["--arrivals", "never"], "Allowed choices are poisson, bursty, uniform"],
    [["--policies", "magic"], '--policies: name: expected one of "none", "priority"'],
    [["--policy-json", "x"], "--policy-json: expected NAME={...}"],
    [["--policy-json", "x={}}"], "--policy-json: x: JSON Parse error"],
    [
      ["--policy-json", 'x={"name":"none"}', "--policy-json", 'x, MPS={"name":"none"}'],
      '--policy-json: expected a name without commas and semicolons, which separate --policies and --ways, got "x, MPS"',
    ],
    [["--policies", "none", "--policy-json", 'x={"name":"none"}'], '"x" is not among --policies'],
    [
      ["--policy-json", 'x={"name":"none","inflight":-1}'],
      "--policy-json: x: inflight: expected a number of at least 0",
    ],
    [
      ["--policy-json", 'x={"name":"none"}', "--policy-json", 'x={"name":"slo"}'],
      "--policy-json: expected each policy once, got x again",
    ],
  ])("%j", async (args, message) => {
    const { status, stdout, stderr } = await rigel("bench", "--device", "simulated", ...args);
    expect(stderr).toContain(message);
    expect(stdout).toBe("");
    expect(status).toBe(2);
  });

  test("and leaves no empty file behind", async () => {
    using scratch = new Scratch();
    const files = ["json", "html", "markdown"].flatMap((option) => [`--${option}`, join(scratch.path, option)]);
    const { status } = await rigel("bench", "--device", "simulated", "--ways", "magic", ...files);
    expect(readdirSync(scratch.path)).toEqual([]);
    expect(status).toBe(2);
  });

  test("nothing that --live is asked for alone: where no ways take turns, programs are started anew for each", async () => {
    for (const ways of ["alone", "alone, Rigel"]) {
      const { stdout, status } = await rigel(...SIMULATED, "--live", "--ways", ways, "--dry-run");
      expect(stdout).toContain(`${PAIR}, round 1, alone: resnet50 (`);
      expect(stdout).toContain(`${PAIR}, round 1, alone: resnet50-train (`);
      expect(stdout.includes(`${PAIR}, round 1, alone, Rigel: resnet50 (`)).toBe(ways !== "alone");
      expect(status).toBe(0);
    }
  });

  test("--learn: how long policy slo has in each of its ways before anything is counted", async () => {
    const dry = [...SIMULATED, "--live", "--policies", "slo", "--ways", "alone;rigel slo", "--dry-run", "--json", "-"];
    const seconds = async (...more: string[]): Promise<number> =>
      z.object({ seconds: z.number() }).parse(JSON.parse((await rigel(...dry, ...more)).stdout)).seconds;
    expect((await seconds()) - (await seconds("--learn", "8"))).toBe(12);
    expect((await seconds("--learn", "20.5")) - (await seconds())).toBe(0.5);
  });

  test("--help has examples and says what the names mean; --dry-run runs nothing", async () => {
    const help = await rigel("bench", "--help");
    expect(help.stdout).toContain("rigel bench --anew --pairs bert+gpt2-train");
    expect(help.stdout).toContain("Ways: alone; time slicing; MPS");
    // What the simulated GPU runs.
    const there = allPairs(true).map(({ high, best }) => [high, ...best].map(({ name }) => name));
    const [, highs = "", lacking = ""] =
      /a profile was recorded of: (.*), and all best-effort ones but (.*)\.$/s.exec(
        help.stdout.replaceAll(/\s+/g, " ").split(" Ways:")[0] ?? "",
      ) ?? [];
    expect(highs.split(", ")).toEqual([...new Set(there.map(([high = ""]) => high))].toSorted().toReversed());
    const all = allPairs(false).flatMap(({ best }) => best.map(({ name }) => name));
    expect(new Set([...there.flatMap(([, ...best]) => best), ...lacking.split(" and ")])).toEqual(new Set(all));
    expect(help.stdout.replaceAll(/\s+/g, " ")).toContain("closed: one user, who asks again; ");
    expect(help.status).toBe(0);
    const dry = await rigel("bench", "--device", "simulated", "--dry-run");
    expect(dry.stdout).toContain(`${PAIR}, round 1, time slicing`);
    expect(dry.stderr).not.toContain("attached");
    expect(dry.status).toBe(0);
    const json = await rigel("bench", "--device", "simulated", "--dry-run", "--json", "-", "--pairs", PAIR);
    expect(JSON.parse(json.stdout)).toMatchObject({
      schema: 1,
      dry_run: true,
      seconds: 63,
      notes: [expect.stringContaining("simulated")],
      device: { simulated: true },
      runs: expect.arrayContaining([{ title: `${PAIR}, round 1, time slicing`, seconds: expect.any(Number) }]),
    });
    const nowhere = await rigel("bench", "--device", "simulated", "--dry-run", "--html", "/nowhere/x.html");
    expect(nowhere).toMatchObject({
      status: 2,
      stdout: "",
      stderr: expect.stringContaining("--html: /nowhere/x.html"),
    });
    // 3 s to start, 2 to settle, 4 measured and 2 around them.
    const solo = await rigel(
      "bench",
      "--device",
      "simulated",
      "--solo",
      "--arrivals",
      "uniform",
      "--pairs",
      PAIR,
      "--dry-run",
    );
    expect(solo.stdout).toBe("resnet50 alone, bare and under Rigel in turn (11 s)\n");
    expect(solo.stderr).toContain("1 runs, about 11 s");
    const longer = await rigel(
      "bench",
      "--device",
      "simulated",
      "--solo",
      "--duration",
      "60",
      "--pairs",
      PAIR,
      "--dry-run",
    );
    expect(longer.stdout).toContain("(67 s)");
  });
});
