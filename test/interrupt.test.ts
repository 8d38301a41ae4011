/**
 * interrupt.test.ts: which signals count as requests of their own.
 */

import { afterEach, expect, setSystemTime, test } from "bun:test";
import { readdirSync } from "node:fs";
import { Interrupt } from "../src/interrupt.ts";
import type { ClientProcess } from "../src/process.ts";
import { commandLine } from "../src/self.ts";
import { Place } from "./serving.ts";

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

test("Ctrl-C while GPUs are looked for is no failure to find them", async () => {
  using place = new Place();
  const config = place.file("short.json", place.pair({ duration_s: 0.1 }));
  // As soon as the simulated GPU is there that is looked for, if it is seen.
  const job = `import os, pty, sys
folder, rigel = sys.argv[1], sys.argv[2:]
for time in range(10):
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp(rigel[0], rigel)
    while not os.listdir(folder) and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        pass
    os.write(terminal, b"\\x03")
    while True:
        try:
            os.write(1, os.read(terminal, 1000))
        except OSError:
            break
    os.waitpid(pid, 0)`;
  const argv = ["python3", "-c", job, place.segments, ...commandLine(), "launch", config, "--dry-run"];
  const options = { cwd: place.path, env: place.env, stderr: "inherit" } as const;
  await using child = Bun.spawn([...argv, "--segment", place.segments], { ...options, stdout: "pipe" });
  expect(await child.stdout.text()).not.toContain("looking for GPUs failed");
  expect(await child.exited).toBe(0);
  expect(readdirSync(place.segments)).toEqual([]);
});
