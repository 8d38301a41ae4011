/**
 * native.test.ts: builds the native test programs and runs them one by one.
 *
 * Each is a program of its own in native/test: status 0 is passed, 77 cannot run here (its last line says why), anything
 * else failed, with the reason on standard error.
 */

import { expect, test } from "bun:test";
import { readdirSync } from "node:fs";
import { availableParallelism } from "node:os";
import { join } from "node:path";
import { plainEnvironment, root } from "./rigel.ts";

const native = join(root, "native");
const BUILD_LIMIT_ms = 300_000;
const PROGRAM_LIMIT_ms = 120_000;
const CANNOT_RUN = 77;

const programs = readdirSync(join(native, "test"))
  .filter((name) => /^test-.*\.c$/.test(name))
  .map((name) => name.replace(/\.c$/, ""));

async function run(command: string[]): Promise<{ status: number; output: string }> {
  await using child = Bun.spawn(command, {
    cwd: native,
    env: plainEnvironment(),
    stdin: "ignore",
    stdout: "pipe",
    stderr: "pipe",
  });
  const [stdout, stderr, status] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
  return { status, output: stdout + stderr };
}

test(
  "the native test programs build",
  async () => {
    const { status, output } = await run(["make", "-s", `-j${availableParallelism()}`, "check-build"]);
    expect(status, output).toBe(0);
  },
  BUILD_LIMIT_ms,
);

test.each(programs)(
  "native %s",
  async (program) => {
    const { status, output } = await run([join(native, "build", program)]);
    if (status === CANNOT_RUN) {
      // .ci/run counts these lines.
      console.warn(`native ${program} cannot run here: ${output.trimEnd().split("\n").at(-1)}`);
      return;
    }
    expect(status, output).toBe(0);
  },
  PROGRAM_LIMIT_ms,
);
