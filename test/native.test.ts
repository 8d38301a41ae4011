/**
 * native.test.ts: builds the native test programs and runs them one by one.
 *
 * Each is a program of its own in native/test: status 0 is passed, 77 cannot run here (its last line says why), anything
 * else failed, with the reason on standard error.
 */

import { expect, test } from "bun:test";
import { mkdirSync, readdirSync, statSync, symlinkSync, utimesSync } from "node:fs";
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

test(
  "the library is built by who needs it, where it is missing or older than its sources",
  async () => {
    using checkout = new Scratch();
    const copy = join(checkout.path, "native");
    const build = join(copy, "build");
    const sources = readdirSync(native).filter((name) => !name.startsWith("build"));
    const compiled = ["obj", "sim", "rigel-replay", "rigel-simulate"].map((name) => join("build", name));
    mkdirSync(build, { recursive: true });
    // With times: what has been compiled need not be again.
    for (const [from, names, to] of [
      [root, ["package.json", "src", "profiles"], checkout.path],
      [native, sources, copy],
      [native, compiled, build],
    ] as const)
      expect(Bun.spawnSync(["cp", "-a", ...names, to], { cwd: from }).success).toBe(true);
    symlinkSync(join(root, "node_modules"), join(checkout.path, "node_modules"));
    const library = join(build, "librigel.so");
    const info = async () => {
      await using child = Bun.spawn([process.execPath, join(checkout.path, "src", "cli.ts"), "info"], {
        env: plainEnvironment(),
        stdin: "ignore",
        stdout: "pipe",
        stderr: "pipe",
      });
      const [stdout, stderr, status] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
      expect({ status, stderr }).toMatchObject({ status: 0 });
      expect(stdout).toContain(`library   ${library} (`);
      return { stderr, made: statSync(library).ino };
    };
    const { made } = await info();
    expect(await info()).toEqual({ stderr: "", made });
    const now = new Date();
    utimesSync(join(copy, "layout.c"), now, now);
    const again = await info();
    expect(again.stderr).toContain("building the native library (make all): files to compile: 1");
    expect(again.made).not.toBe(made);
  },
  BUILD_LIMIT_ms,
);

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
