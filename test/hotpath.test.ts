/**
 * hotpath.test.ts: a launch makes no system call of Rigel's, in either class.
 *
 * bench-hotpath launches 800,000 times against a driver whose launch does nothing; strace counts every system call of all
 * its threads, start-up and agent included. One per launch, or per hundred, would stand out.
 */

import { expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { Native } from "../src/native.ts";
import { Segment } from "../src/segment.ts";
import { Scratch, plainEnvironment, root } from "./rigel.ts";

const LAUNCHES = 800_000;
const MOST_CALLS = LAUNCHES / 100;

const noStrace = Bun.which("strace") === null;
if (noStrace) console.warn("hotpath.test.ts is skipped: there is no strace (Debian's package strace)");

test.skipIf(noStrace).each([
  ["high", "bench-hotpath"],
  ["best-effort", "bench-hotpath"],
  // 800,000 calls of cuBLAS, with a handle that is used rightly.
  ["high", "bench-guard"],
])("%s: no system call on the path of %s", async (clientClass, bench) => {
  const native = await Native.load();
  const built = Bun.spawnSync(["make", "-s", "-C", join(root, "native"), "bench"], { env: plainEnvironment() });
  expect(built.exitCode, built.stderr.toString()).toBe(0);
  using scratch = new Scratch();
  const segment = Segment.create(native, join(scratch.path, "segment"));
  const counts = join(scratch.path, "strace");
  const program = join(root, "native", "build", bench);
  const variables = {
    LD_LIBRARY_PATH: join(root, "native", "build", "bench"),
    LD_PRELOAD: native.files.library,
    RIGEL_SEGMENT: segment.path,
    RIGEL_CLASS: clientClass,
    RIGEL_NAME: "bench",
  };
  const set = Object.entries(variables).flatMap(([name, value]) => ["-E", `${name}=${value}`]);
  await using child = Bun.spawn(["strace", "-f", "-c", "-o", counts, ...set, program], {
    env: plainEnvironment(),
    stdout: "pipe",
    stderr: "pipe",
  });
  const [stderr, status] = await Promise.all([child.stderr.text(), child.exited]);
  expect(status, stderr).toBe(0);
  const [slot] = segment.slots();
  expect(slot).toMatchObject({ name: "bench", launched: bench === "bench-hotpath" });
  const calls = Number(/^\s*100\.00\s+[\d.]+\s+\d+\s+(\d+)/m.exec(readFileSync(counts, "utf8"))?.[1]);
  expect(calls).toBeGreaterThan(10);
  expect(calls).toBeLessThan(MOST_CALLS);
});
