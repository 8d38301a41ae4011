/** profile.test.ts: a bad row of a kernel profile is named by file, line and field before anything is started. */

import { describe, expect, test } from "bun:test";
import { writeFileSync } from "node:fs";
import { join } from "node:path";
import { gzipSync } from "node:zlib";
import { reason } from "../src/errors.ts";
import { openProfile, readProfile } from "../src/profile.ts";
import { commandLine } from "../src/self.ts";
import { Scratch, TINY_PROFILE, plainEnvironment, replayRefuses, rigel, root } from "./rigel.ts";

const ORION = "Name,Profile,Memory_footprint,SM_usage,Duration\n";

async function outcome(content: string | Uint8Array): Promise<unknown> {
  using scratch = new Scratch();
  const path = join(scratch.path, "p.csv");
  writeFileSync(path, content);
  try {
    return await readProfile(path);
  } catch (thrown) {
    return reason(thrown).replaceAll(path, "p.csv");
  }
}

/** The tiny profile with one more row, on line 5. */
function row(kind: string, grid_x: string, block: string, duration: string): string {
  return `${TINY_PROFILE}k,${kind},7,${grid_x},1,1,${block},16,0,0,${duration},0\n`;
}

describe.concurrent("a profile", () => {
  test("of Rigel's own, with names that hold quotes, commas and line ends", async () => {
    const odd = '"lambda()#1, ""x""\nsecond line",kernel,7,1,1,1,32,1,1,16,0,0,1500,0\n';
    expect(await outcome(TINY_PROFILE + odd)).toEqual({ kernels: 2, operations: 3 });
  });

  test("of Orion's, with spaces, a byte order mark, and names as the compiler writes them", async () => {
    const raw = 'void gemm<float, 4, "x">(int, char),0,12.5,80,1000\n';
    expect(await outcome(`\ufeff${ORION}sgemm, 1, 0, 80, 1000\n${raw}relu,-1.0,0,2,500.25\r\n`)).toEqual({
      kernels: 3,
      operations: 3,
    });
  });

  test.each<[string, string | Uint8Array, string]>([
    [
      "a text where a number belongs",
      row("kernel", "1", "32,1,1", "fast"),
      'p.csv:5: duration_ns: expected a whole number from 0 to 3600000000000, got "fast"',
    ],
    [
      "a negative number",
      `${ORION}a,1,0,80,1\nb,1,0,80,-1\n`,
      'p.csv:3: Duration: expected a number from 0 to 3600000000000, got "-1"',
    ],
    [
      "an unknown kind",
      row("kernle", "1", "32,1,1", "1"),
      'p.csv:5: kind: expected one of kernel, memset, copy_h2d, copy_d2h, copy_d2d, sync, got "kernle"',
    ],
    [
      "half a block",
      row("kernel", "1.5", "32,1,1", "1"),
      'p.csv:5: grid_x: expected a whole number from 0 to 2147483647, got "1.5"',
    ],
    [
      "a kernel without blocks",
      row("kernel", "0", "32,1,1", "1"),
      'p.csv:5: grid_x: expected at least 1 for a kernel, got "0"',
    ],
    [
      "a block that is too large",
      row("kernel", "1", "1024,2,1", "1"),
      "p.csv:5: block_x, block_y, block_z: expected at most 1024 threads a block, got 2048",
    ],
    [
      "an unknown profile class",
      `${ORION}a,2,0,80,1\n`,
      'p.csv:2: Profile: expected one of 1, 0, -1, 1.0, 0.0, -1.0, got "2"',
    ],
    ["an empty field", `${ORION}a,1,0,,1\n`, 'p.csv:2: SM_usage: expected a number from 0 to 2147483647, got ""'],
    ["too few fields", `${TINY_PROFILE}k,kernel,7\n`, "p.csv:5: expected 14 fields, got 3"],
    ["no name", `${ORION},1,0,80,1\n`, 'p.csv:2: Name: expected a name, got ""'],
    [
      "a missing column",
      "Name,Profile,Duration\na,1,5\n",
      "p.csv:1: expected the header Name,Profile,Memory_footprint,SM_usage,Duration, got Name,Profile,Duration",
    ],
    [
      "the table of another tool",
      "Start (ns),Duration (ns),CorrId,GrdX,GrdY,GrdZ,BlkX,BlkY,BlkZ,Strm,Name\n1,2,3,1,1,1,32,1,1,7,k\n",
      "p.csv:1: expected the header name,kind,stream,grid_x,grid_y,grid_z,block_x,block_y,block_z,registers,shared_bytes," +
        "bytes,duration_ns,gap_ns, got Start (ns),Duration (ns),CorrId,GrdX,GrdY,GrdZ,BlkX,BlkY,BlkZ,Strm,Name; this is a " +
        "GPU trace of nsys (cuda_gpu_trace, gputrace), make a profile of it: rigel import nsys p.csv -o profile.csv",
    ],
    [
      "UTF-16",
      Buffer.from(`\ufeff${TINY_PROFILE}`, "utf16le"),
      "p.csv: expected a kernel profile in UTF-8, got UTF-16: save it as UTF-8",
    ],
    ["gzip", gzipSync(TINY_PROFILE), "p.csv: expected a kernel profile in UTF-8, got a gzip file: unpack it first"],
    ["no rows", ORION, "p.csv: expected a header line and at least one operation that uses the GPU"],
    ["nothing", "", "p.csv: expected a header line and at least one operation that uses the GPU"],
    [
      "a later version",
      "# rigel-profile 3; x=y\nname\n",
      "p.csv:1: expected rigel-profile version 1 or 2, got 3; record the profile again with this version of Rigel",
    ],
  ])("with %s is refused, and by the replay client too", async (_, content, expected) => {
    expect(await outcome(content)).toBe(expected);
    using scratch = new Scratch();
    const path = join(scratch.path, "p.csv");
    writeFileSync(path, content);
    expect(await replayRefuses(scratch, path)).toContain(path);
  });

  test("that is a folder is refused", async () => {
    expect(async () => await readProfile("/tmp")).toThrow("/tmp: cannot be read as a kernel profile");
  });
});

test("that is a pipe is refused, whether somebody writes to it or not", async () => {
  using scratch = new Scratch();
  const path = join(scratch.path, "p.csv");
  expect(Bun.spawnSync(["mkfifo", path]).success).toBe(true);
  const said = "cannot be read as a kernel profile (it is a pipe; save what comes out of it to a file)";
  const script = 'cat "$0" | "$@"';
  const show = [...commandLine(), "profile", "show", "/dev/stdin"];
  await using child = Bun.spawn(["sh", "-c", script, scratch.file("tiny.csv", TINY_PROFILE), ...show], {
    env: plainEnvironment(),
    stdin: "ignore",
    stdout: "pipe",
    stderr: "pipe",
  });
  const [stdout, stderr, status] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
  expect({ status, stdout, stderr }).toEqual({ status: 2, stdout: "", stderr: `rigel: /dev/stdin: ${said}\n` });
  expect(async () => await readProfile(path)).toThrow(`${path}: ${said}`);
});

test("the command line names file, line and field, and starts nothing", async () => {
  using scratch = new Scratch();
  const profile = scratch.file("bad.csv", `${ORION}a,1,0,80,1000\nb,1,0,80,soon\n`);
  const config = scratch.file("config.json", {
    clients: [{ name: "a", class: "high", replay: { profile: "bad.csv", iterations: 1 } }],
  });
  expect(await rigel("launch", config, "--device", "simulated")).toEqual({
    status: 2,
    stdout: "",
    stderr: `rigel: ${config}:1:50: clients[0].replay.profile: ${profile}:3: Duration: expected a number from 0 to 3600000000000, got "soon"\n`,
  });
});

describe("the profiles that come with Rigel", () => {
  test.each(
    ["resnet50-infer-bs4", "mobilenetv2-infer-bs4", "bert-infer-bs2x128", "gpt2-infer-bs1x128"].concat([
      "resnet50-train-bs64",
      "mobilenetv2-train-bs64",
      "bert-train-bs8x128",
      "gpt2-train-bs8x512",
    ]),
  )("%s says of which GPU it is and how it was made", async (name) => {
    const path = join(root, "profiles", `h200-${name}.csv`);
    const { facts } = await openProfile(path);
    const [model = "", mode = ""] = name.split("-");
    expect(facts.get("device")).toBe("NVIDIA H200");
    // By rigel profile, or by profiles/record.py.
    const how = facts.get("command") ?? `--model ${facts.get("model")} --mode ${facts.get("mode")}`;
    expect(how).toContain(`--model ${model} --mode ${mode}`);
    expect(Number(facts.get("iteration_ms"))).toBeGreaterThan(0);
    expect((await readProfile(path)).kernels).toBeGreaterThan(100);
  });
});
