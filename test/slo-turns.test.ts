/**
 * slo-turns.test.ts: who has the GPU where best-effort clients take turns.
 */

import { describe, expect, test } from "bun:test";
import { mostOnOne, type Sharer, Turns, TurnsGain } from "../src/slo-turns.ts";

/** Whose turn it is at each tick: those that do not wait, of clients that launch unless `isIdle` says so. */
function turnsOf(
  ticks: number,
  devices: Readonly<Record<string, number>>,
  {
    isIdle = (_name: string, _tick: number): boolean => false,
    isHeld = (_tick: number): boolean => false,
    isThere = (_name: string, _tick: number): boolean => true,
  } = {},
): string[] {
  const turns = new Turns();
  let waiting: ReadonlyMap<string, number> = new Map();
  return Array.from({ length: ticks }, (_, tick) => {
    const there = Object.entries(devices).filter(([name]) => isThere(name, tick));
    const sharers = there.map(([name, on]): Sharer => {
      const stands = waiting.has(name) || isHeld(tick) || isIdle(name, tick);
      return { name, devices: on, launches: stands ? 0 : 50, processes: 1 };
    });
    waiting = turns.step(sharers, isHeld(tick) ? 0 : 1);
    return there.flatMap(([name]) => (waiting.has(name) ? [] : [name])).join("+");
  });
}

const launching = (launches: Readonly<Record<string, number>>): Sharer[] =>
  Object.entries(launches).map(([name, some]) => ({ name, devices: 1, launches: some, processes: 1 }));

/** How long each was, one after the other. */
function runs(of: readonly string[]): [string, number][] {
  const found: [string, number][] = [];
  for (const one of of) {
    const last = found.at(-1);
    if (last?.[0] === one) last[1]++;
    else found.push([one, 1]);
  }
  return found;
}

/** What part of a minute each has its GPUs, in hundredths; those that are idle launch something at first. */
function parts(devices: Readonly<Record<string, number>>, isIdle = (_name: string): boolean => false): unknown {
  const turns = turnsOf(600, devices, { isIdle: (name, tick) => tick > 0 && isIdle(name) });
  const having = (name: string): number => turns.filter((one) => one.split("+").includes(name)).length / 600;
  return Object.fromEntries(Object.keys(devices).map((name) => [name, Math.round(100 * having(name))]));
}

/** c comes, and a goes. */
const comesOrGoes = (name: string, tick: number): boolean =>
  name === "c" ? tick >= 5 : name === "a" ? tick < 24 : true;

describe("best-effort clients in turns", () => {
  test("each has the GPU for a second", () => {
    expect(runs(turnsOf(50, { a: 1, b: 1 }))).toEqual([
      ["a", 10],
      ["b", 10],
      ["a", 10],
      ["b", 10],
      ["a", 10],
    ]);
    expect(runs(turnsOf(40, { a: 1, b: 1, c: 1 })).map(([name]) => name)).toEqual(["a", "b", "c", "a"]);
    expect(runs(turnsOf(40, { a: 1 }))).toEqual([["a", 40]]);
  });

  test("one that launches nothing waits for nobody, and nobody for it", () => {
    // Until it launches again, and then it is the last.
    const turns = runs(turnsOf(100, { a: 1, b: 1, c: 1 }, { isIdle: (name, tick) => name === "b" && tick < 45 }));
    expect(turns.slice(0, 5)).toEqual([
      ["a+b", 10],
      ["b+c", 10],
      ["a+b", 10],
      ["b+c", 10],
      ["a+b", 5],
    ]);
    expect(turns.slice(5)).toEqual([
      ["a", 5],
      ["c", 10],
      ["b", 10],
      ["a", 10],
      ["c", 10],
      ["b", 10],
    ]);
  });

  test("a turn in which nothing is launched any more is over soon", () => {
    const turns = runs(turnsOf(60, { a: 1, b: 1 }, { isIdle: (name, tick) => name === "a" && tick % 20 > 4 }));
    // Its next turn comes sooner as well.
    expect(turns.slice(0, 2)).toEqual([
      ["a", 7],
      ["b", 10],
    ]);
    // As with one that has ended, once a turn was without a launch.
    const ended = runs(turnsOf(60, { a: 1, b: 1 }, { isIdle: (name, tick) => name === "a" && tick > 4 }));
    expect(ended.at(-1)?.[0]).toBe("a+b");
  });

  test("while all are held no turn goes by", () => {
    expect(runs(turnsOf(40, { a: 1, b: 1 }, { isHeld: (tick) => tick >= 5 && tick < 15 }))).toEqual([
      ["a", 20],
      ["b", 10],
      ["a", 10],
    ]);
  });

  test("who comes is the last, and who goes leaves its turn to the next", () => {
    const turns = runs(turnsOf(60, { a: 1, b: 1, c: 1 }, { isThere: comesOrGoes }));
    expect(turns.map(([name]) => name)).toEqual(["a", "b", "c", "b", "c", "b"]);
    const second = runs(turnsOf(30, { a: 1, b: 1, c: 1 }, { isThere: (name, tick) => name !== "b" || tick < 14 }));
    expect(second).toEqual([
      ["a", 10],
      ["b", 4],
      ["c", 10],
      ["a", 6],
    ]);
  });

  test("on different GPUs they have them at the same time", () => {
    // b is on both, as the ranks of one client are.
    expect(runs(turnsOf(40, { a: 0b01, b: 0b11, c: 0b10 })).map(([name]) => name)).toEqual(["a+c", "b", "a+c", "b"]);
    expect(runs(turnsOf(40, { a: 0b01, b: 0b10 }))).toEqual([["a+b", 40]]);
  });

  test("on several GPUs each has as much of its own as the others there, in whichever order they have come", () => {
    expect(parts({ a: 0b01, b: 0b01, c: 0b10, d: 0b10 })).toEqual({ a: 50, b: 50, c: 50, d: 50 });
    expect(parts({ a: 0b01, b: 0b01, c: 0b10, d: 0b10, e: 0b10 })).toEqual({ a: 50, b: 50, c: 33, d: 33, e: 33 });
    expect(parts({ a: 0b01, b: 0b11, c: 0b10, d: 0b10 })).toEqual({ a: 67, b: 33, c: 33, d: 33 });
    // Nor does one wait for another that launches nothing, though that never comes first.
    const idle = parts({ a: 0b01, b: 0b01, c: 0b10, d: 0b10 }, (name) => name === "c");
    expect(idle).toMatchObject({ a: 50, b: 50, d: 98 });
  });

  test("how many are on one GPU", () => {
    expect([mostOnOne([0b1, 0b11, 0b10, 0b110]), mostOnOne([])]).toEqual([3, 0]);
  });

  test("whoever waits is told for how long, and no shorter than until it is told again", () => {
    const turns = new Turns();
    const sharers = ["a", "b", "c"].map((name) => ({ name, devices: 1, launches: 1, processes: 1 }));
    const told = Array.from({ length: 10 }, () => Object.fromEntries(turns.step(sharers)));
    expect(told[0]).toEqual({ b: 10, c: 11 });
    expect(told[9]).toEqual({ b: 1, c: 2 });
    expect(Object.fromEntries(turns.step(sharers))).toEqual({ c: 10, a: 11 });
    turns.end();
    expect(turns.step([]).size).toBe(0);
  });
});

/** Six seconds beside each other, of which requests leave half, then four in turns, of which they leave so much. */
function gain(beside: Record<string, number>, inTurns: Record<string, number>, left_s = 2): TurnsGain {
  const found = new TurnsGain();
  found.add(launching(beside), { seconds: 6, left_s: 3, inTurns: false });
  found.add(launching(inTurns), { seconds: 4, left_s, inTurns: true });
  return found;
}

describe("what turns give", () => {
  test("is by launches of each, the mean of all", () => {
    // 50 and 500 a second beside each other.
    expect(gain({ a: 300, b: 3000 }, { a: 209, b: 2090 }).isMore).toBe(true);
    expect(gain({ a: 300, b: 3000 }, { a: 209, b: 2060 }).isMore).toBe(false);
    expect(gain({ a: 300, b: 3000 }, { a: 400, b: 100 }).isMore).toBe(false);
    expect(gain({ a: 300, b: 3000 }, { a: 400, b: 170 }).isMore).toBe(true);
  });

  test("is more where it is in as much time, and in as much as requests leave", () => {
    // Fewer requests, by a tenth of the time, and more, and as much more and less of what those leave.
    expect(gain({ a: 300, b: 300 }, { a: 220, b: 220 }, 2.2).isMore).toBe(false);
    expect(gain({ a: 300, b: 300 }, { a: 200, b: 200 }, 1.8).isMore).toBe(false);
    expect(gain({ a: 300, b: 300 }, { a: 240, b: 240 }, 2.2).isMore).toBe(true);
    expect(gain({ a: 300, b: 300 }, { a: 210, b: 210 }, 1.8).isMore).toBe(true);
  });

  test("is told once each has had two turns", () => {
    const found = gain({ a: 300, b: 300 }, {});
    expect([found.isTried(2), found.isTried(3)]).toEqual([true, false]);
    found.endTrial();
    expect([found.isTried(2), found.isToTry(0)]).toEqual([false, true]);
  });

  test("is asked again a minute after turns that gave no more, then after two, up to 16, unless clients are others", () => {
    const found = gain({ a: 300, b: 300 }, {});
    const again = (from_s: number): number => {
      found.endTrial(from_s);
      let t_s = from_s;
      while (!found.isToTry(t_s)) t_s++;
      return t_s - from_s;
    };
    expect(Array.from({ length: 6 }, (_, n) => again(1000 * n))).toEqual([60, 120, 240, 480, 960, 960]);
    found.endTrial(7000);
    found.clear(true);
    found.add(launching({ a: 300, b: 300 }), { seconds: 6, left_s: 3, inTurns: false });
    expect(found.isToTry(7000)).toBe(true);
    expect(again(7000)).toBe(60);
  });

  test("is asked of two at least that launch enough, after six seconds", () => {
    expect(gain({ a: 300, b: 300 }, {}).isToTry(0)).toBe(true);
    expect(gain({ a: 300, b: 49 }, {}).isToTry(0)).toBe(false);
    const found = new TurnsGain();
    found.add(launching({ a: 300, b: 300 }), { seconds: 5.9, left_s: 3, inTurns: false });
    expect(found.isToTry(0)).toBe(false);
    // One that launches next to nothing does not count.
    expect(gain({ a: 300, b: 3000, c: 1 }, { a: 209, b: 2090, c: 0 }).isMore).toBe(true);
    found.add(launching({ a: 0, b: 0 }), { seconds: 0.1, left_s: 0.1, inTurns: false });
    expect(found.isToTry(0)).toBe(true);
    found.clear();
    expect(found.isToTry(0)).toBe(false);
  });

  test("is of the last seconds beside each other: what is older counts half", () => {
    const found = new TurnsGain();
    for (const a of [3000, 3000, 1000]) found.add(launching({ a, b: 1000 }), { seconds: 6, left_s: 3, inTurns: false });
    // 7000 and 3000 in 18 seconds; all of them halved.
    for (const [more, is] of [
      [1.03, false],
      [1.05, true],
    ] as const) {
      found.endTrial();
      found.add(launching({ a: (more * 7000 * 4) / 18, b: (more * 3000 * 4) / 18 }), {
        seconds: 4,
        left_s: 2,
        inTurns: true,
      });
      expect(found.isMore).toBe(is);
    }
    // The next six count twice as much as each of those.
    found.add(launching({ a: 0, b: 0 }), { seconds: 9, left_s: 4.5, inTurns: false });
    found.endTrial();
    found.add(launching({ a: (0.55 * 7000 * 4) / 18, b: (0.55 * 3000 * 4) / 18 }), {
      seconds: 4,
      left_s: 2,
      inTurns: true,
    });
    expect(found.isMore).toBe(true);
  });
});
