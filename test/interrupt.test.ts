/**
 * interrupt.test.ts: which signals count as requests of their own.
 */

import { afterEach, expect, setSystemTime, test } from "bun:test";
import { Interrupt } from "../src/interrupt.ts";
import type { ClientProcess } from "../src/process.ts";

afterEach(() => {
  setSystemTime();
});

/** What a client gets of signals to the launcher, so many milliseconds after the first. */
function killedBy(signals: readonly (readonly [number, "SIGINT" | "SIGTERM"])[]): number {
  using interrupt = new Interrupt();
  let killed = 0;
  const client: Pick<ClientProcess, "signal"> = {
    signal: (signal) => {
      if (signal === "SIGKILL") killed++;
    },
  };
  Object.assign(interrupt, { clients: [client] });
  const begun_ms = 1_700_000_000_000;
  for (const [at_ms, signal] of signals) {
    setSystemTime(new Date(begun_ms + at_ms));
    process.emit(signal);
  }
  expect(interrupt.signal).toBe(signals[0]?.[1]);
  return killed;
}

test("a second request kills the clients, but not the first once more, as `bun run` passes on what its whole group gets", () => {
  expect(killedBy([[0, "SIGINT"]])).toBe(0);
  expect(
    killedBy([
      [0, "SIGINT"],
      [0, "SIGINT"],
      [100, "SIGINT"],
    ]),
  ).toBe(0);
  expect(
    killedBy([
      [0, "SIGINT"],
      [200, "SIGINT"],
      [200, "SIGINT"],
    ]),
  ).toBe(1);
  expect(
    killedBy([
      [0, "SIGINT"],
      [10, "SIGTERM"],
    ]),
  ).toBe(1);
});
