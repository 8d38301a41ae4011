/**
 * proc.test.ts: which processes live, as /proc tells it.
 */

import { expect, test } from "bun:test";
import { chmodSync } from "node:fs";
import { join } from "node:path";
import { environmentOf, living, startedAt_ticks, startedWith, stateOf } from "../src/proc.ts";
import { Scratch, root } from "./rigel.ts";

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

test("a process that becomes one program after the other has its environment at every look", async () => {
  using scratch = new Scratch();
  const program = scratch.file("again", '#!/bin/sh\nexec "$0"\n');
  chmodSync(program, 0o700);
  await using child = Bun.spawn([program], {
    // More than is read at once.
    env: { ...process.env, LONG: "x".repeat(100_000), PROC_TEST: "1" },
    stdio: ["ignore", "ignore", "inherit"],
  });
  // Looked at once each time, some in a thousand found none. It gives up after half a second, for which a busy machine may not let the
  // other go on.
  const found = Array.from({ length: 10_000 }, () => {
    const began_ms = performance.now();
    return startedWith(child.pid, ["PROC_TEST=1"]) || performance.now() - began_ms > 400;
  });
  expect(found.filter((one) => !one)).toEqual([]);
  expect(child.exitCode).toBeNull();
  child.kill("SIGKILL");
  await child.exited;
  expect(startedWith(child.pid, ["PROC_TEST=1"])).toBe(false);
});

test("a process that was started without any environment has none", async () => {
  await using child = Bun.spawn(["env", "-i", "sleep", "600"], { stdio: ["ignore", "ignore", "inherit"] });
  while (!living().some(({ pid, name }) => pid === child.pid && name === "sleep")) await Bun.sleep(10);
  expect(environmentOf(child.pid)).toEqual({});
  child.kill("SIGKILL");
});

test("the process of another user is looked at once, without waiting for what is never told", async () => {
  const script = `
    import { dlopen } from "bun:ffi";
    import { startedWith, stateOf } from ${JSON.stringify(join(root, "src", "proc.ts"))};
    // Nobody in particular, should this be root.
    dlopen("libc.so.6", { seteuid: { args: ["u32"], returns: "i32" } }).symbols.seteuid(65534);
    let slept = 0;
    Bun.sleepSync = () => slept++;
    console.log(JSON.stringify([stateOf(1) !== "", startedWith(1, ["PROC_TEST=1"]), slept]));
  `;
  await using child = Bun.spawn([process.execPath, "-e", script], { stdio: ["ignore", "pipe", "inherit"] });
  expect(await child.stdout.json()).toEqual([true, false, 0]);
});
