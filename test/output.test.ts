/** output.test.ts: files that results are written to are none that are read, and none twice. */

import { describe, expect, test } from "bun:test";
import { existsSync, mkdirSync, readFileSync, symlinkSync } from "node:fs";
import { open } from "node:fs/promises";
import { join } from "node:path";
import { checkApart } from "../src/output.ts";
import { Scratch, TINY_PROFILE, start } from "./rigel.ts";

const CONFIG = JSON.stringify({
  policy: { name: "none" },
  clients: [{ name: "it", class: "high", replay: { profile: "tiny.csv", iterations: 1 } }],
});
/** One that reads a second file. */
const WITH_GAPS = CONFIG.replace('"iterations":1', '"iterations":1,"arrivals":"gaps.json"');
const GAPS = "[0.01]";

describe.concurrent("a file that is read, or written by another option, is not written:", () => {
  test.each([
    ["profile show tiny.csv --html tiny.csv", "--html: expected another file than what is read, got tiny.csv"],
    ["simulate config.json --html link.json", "--html: expected another file than what is read, got link.json"],
    ["simulate --import-bench config.json -o config.json", "--output: expected another file than what is read"],
    ["launch config.json --html config.json", "--html: expected another file than what is read, got config.json"],
    ["launch config.json --trace link.json", "--trace: expected another file than what is read, got link.json"],
    ["launch config.json --status config.json", "--status: expected another file than what is read, got config.json"],
    ["launch config.json --html tiny.csv", "--html: expected another file than what is read, got tiny.csv"],
    [
      "launch config.json --trace linked/gaps.json",
      "--trace: expected another file than what is read, got linked/gaps",
    ],
    ["launch config.json --status tiny.csv", "--status: expected another file than what is read, got tiny.csv"],
    ["launch config.json --status tiny.csv --dry-run", "--status: expected another file than what is read"],
    ["simulate config.json --html tiny.csv", "--html: expected another file than what is read, got tiny.csv"],
    ["launch config.json --html new --trace ./new", "--trace: expected another file than that of --html, got ./new"],
    ["launch config.json --html new --trace linked/new", "--trace: expected another file than that of --html"],
    ["launch config.json --trace -", "--trace: expected a file, got - (./- is one of that name)"],
    ["launch config.json --html ", '--html: expected a file, got ""'],
    ["launch config.json --trace ", '--trace: expected a file, got ""'],
    ["simulate config.json --html ", '--html: expected a file, got ""'],
    ["bench --dry-run --json new --html new", "--html: expected another file than that of --json, got new"],
  ])("rigel %s", async (line, error) => {
    using scratch = new Scratch();
    scratch.file("tiny.csv", TINY_PROFILE);
    scratch.file("config.json", WITH_GAPS);
    scratch.file("gaps.json", GAPS);
    symlinkSync("config.json", join(scratch.path, "link.json"));
    symlinkSync(".", join(scratch.path, "linked"));
    await using child = start(line.split(" "), { cwd: scratch.path });
    const [stdout, stderr, status] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
    expect({ status, stdout }, stderr).toEqual({ status: 2, stdout: "" });
    expect(stderr).toContain(`rigel: ${error}`);
    for (const [name, text] of Object.entries({
      "config.json": WITH_GAPS,
      "tiny.csv": TINY_PROFILE,
      "gaps.json": GAPS,
    }))
      expect(readFileSync(join(scratch.path, name), "utf8")).toBe(text);
    expect(existsSync(join(scratch.path, "new"))).toBe(false);
  });
});

describe.concurrent("what cannot be, as a part of it is no folder, is said before anything runs:", () => {
  test.each([
    ["launch config.json --trace config.json/x", "--trace: config.json/x: cannot be written (ENOTDIR: not a directory"],
    ["launch config.json --html config.json/x", "--html: config.json/x: cannot be written (ENOTDIR: not a directory"],
    ["launch config.json --status new/", "--status: new/: cannot be written (ENOENT: no such file or directory"],
    ["launch config.json --html new/", "--html: new/: cannot be written (ENOENT: no such file or directory"],
    ["launch config.json --segment config.json", "no segment file can be created in "],
    ["launch config.json --segment ", 'no segment file can be created in "" (ENOENT'],
    ["launch config.json --base new", "--base: expected a folder that exists, got new"],
    ["ps --segment ", '--segment: expected a folder that exists, got ""'],
    ["hangs --segment ", '--segment: expected a segment file, or the folder of those, got ""'],
    ["launch config.json --segment config.json --dry-run", "no segment file can be created in "],
    ["launch cwd.json", "cwd.json:1:57: clients[0].cwd: expected a folder that exists, got "],
    ["ps --segment config.json/x", "--segment: expected a folder that exists, got config.json/x"],
    ["hangs --segment config.json/x", "--segment: expected a segment file, or the folder of those, got config.json/x"],
  ])("rigel %s", async (line, error) => {
    using scratch = new Scratch();
    scratch.file("tiny.csv", TINY_PROFILE);
    scratch.file("config.json", CONFIG);
    scratch.file("cwd.json", '{"clients":[{"name":"a","class":"high","command":["ls"],"cwd":"config.json/x"}]}');
    await using child = start(line.split(" "), { cwd: scratch.path });
    const [stdout, stderr] = await Promise.all([child.stdout.text(), child.stderr.text()]);
    expect(stdout).toBe("");
    expect(stderr).toStartWith(`rigel: ${error}`);
    expect(stderr.trimEnd().split("\n")).toHaveLength(1);
    expect(stderr).not.toContain(".part-");
    expect(await child.exited).toBeWithin(1, 3);
  });
});

test("a status that cannot be left is a failure", async () => {
  using scratch = new Scratch();
  scratch.file("tiny.csv", TINY_PROFILE);
  scratch.file("config.json", CONFIG);
  const ended = async (file: string): Promise<number> => {
    await using child = start(["launch", "config.json", "--status", file], { cwd: scratch.path });
    await Promise.all([child.stdout.text(), child.stderr.text()]);
    return await child.exited;
  };
  expect([await ended("status"), await ended("/dev/full")]).toEqual([0, 1]);
  expect(readFileSync(join(scratch.path, "status"), "utf8")).toBe("0\n");
});

test("a status is left by a launch that is asked to end before it has its clients, too", async () => {
  using scratch = new Scratch();
  const config = join(scratch.path, "config");
  const status = join(scratch.path, "status");
  expect(Bun.spawnSync(["mkfifo", config]).success).toBe(true);
  await using child = start(["launch", config, "--status", status]);
  // Settles when it is opened to be read, by when it is known where the status is to be left.
  await using _ = await open(config, "w");
  child.kill("SIGTERM");
  expect(await child.exited).toBe(143);
  expect(readFileSync(status, "utf8")).toBe("143\n");
});

test("devices, and files of one name in two folders, may be written", async () => {
  using scratch = new Scratch();
  for (const folder of ["a", "b"]) mkdirSync(join(scratch.path, folder));
  const both = ["a", "b"].map((folder) => ({ option: `--${folder}`, file: join(scratch.path, folder, "x") }));
  await checkApart(
    [...both, { option: "--c", file: "/dev/null" }, { option: "--d", file: "/dev/null" }],
    ["-", undefined],
  );
  expect(async () => await checkApart([...both, ...both])).toThrow("--a: expected another file than that of --a");
});
