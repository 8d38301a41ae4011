/**
 * proc.test.ts: which processes live, as /proc tells it.
 */

import { expect, test } from "bun:test";
import { living, startedAt_ticks, stateOf } from "../src/proc.ts";

const lives = (pid: number): boolean => living().some((one) => one.pid === pid);

test("a process whose main thread has ended lives while it has others", async () => {
  const script =
    "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(60,)).start(); ctypes.CDLL(None).pthread_exit(None)";
  const child = Bun.spawn(["python3", "-c", script], { stdin: "ignore", stdout: "ignore" });
  while (stateOf(child.pid) !== "Z") await Bun.sleep(10);
  expect(lives(child.pid)).toBe(true);
  expect(startedAt_ticks(child.pid)).toMatch(/^\d+$/);
  child.kill("SIGKILL");
  await child.exited;
  expect(lives(child.pid)).toBe(false);
  expect(startedAt_ticks(child.pid)).toBeUndefined();
  expect(stateOf(child.pid)).toBe("");
});
