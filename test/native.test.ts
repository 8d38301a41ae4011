/**
 * native.test.ts: builds the native test programs and runs them one by one.
 *
 * Each is a program of its own in native/test: status 0 is passed, 77 cannot run here (its last line says why), anything
 * else failed, with the reason on standard error.
 */

import { expect, test } from "bun:test";
import { readdirSync } from "node:fs";
import { join } from "node:path";
import { make } from "../src/native.ts";
import { Scratch, plainEnvironment, root } from "./rigel.ts";

const native = join(root, "native");
const BUILD_LIMIT_ms = 300_000;
const PROGRAM_LIMIT_ms = 120_000;
const CANNOT_RUN = 77;

const programs = readdirSync(join(native, "test"))
  .filter((name) => /^test-.*\.c$/.test(name))
  .map((name) => name.replace(/\.c$/, ""));

test("what cannot be built for want of a folder says who can", async () => {
  using scratch = new Scratch();
  scratch.file("build", "");
  await expect(make(scratch.path)).rejects.toThrow(
    /^librigel\.so has to be built: .*; have the owner of this checkout build it/,
  );
});

test("the native test programs build", async () => await make(native, "check-build"), BUILD_LIMIT_ms);

test.each(programs)(
  "native %s",
  async (program) => {
    await using child = Bun.spawn([join(native, "build", program)], {
      cwd: native,
      env: plainEnvironment(),
      stdin: "ignore",
      stdout: "pipe",
      stderr: "pipe",
    });
    const [stdout, stderr, status] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
    const output = stdout + stderr;
    if (status === CANNOT_RUN) {
      // .ci/run counts these lines.
      console.warn(`native ${program} cannot run here: ${output.trimEnd().split("\n").at(-1)}`);
      return;
    }
    expect(status, output).toBe(0);
  },
  PROGRAM_LIMIT_ms,
);
