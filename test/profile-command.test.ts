/** profile-command.test.ts: what `rigel profile show` and `rigel profile diff` say of profiles. */

import { describe, expect, test } from "bun:test";
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { reason } from "../src/errors.ts";
import { readProfile } from "../src/profile.ts";
import { Scratch, replayRefuses, rigel, root } from "./rigel.ts";

const GPT2 = join(root, "profiles", "h200-gpt2-train-bs8x512.csv");
const NARROW =
  "name,kind,stream,grid_x,grid_y,grid_z,block_x,block_y,block_z,registers,shared_bytes,bytes,duration_ns,gap_ns";
const HEADER = `${NARROW},family,bound,bound_reason,sms,flops,dram_bytes,request\n`;

/** A kernel's row. */
function kernel(name: string, duration_ns: number, further = "gemm,compute,measured,132,0,0,0", grid = 8): string {
  return `${name},kernel,0,${grid},1,1,128,1,1,32,0,0,${duration_ns},500,${further}\n`;
}

const MIXED =
  `# rigel-profile 1; device=NVIDIA H200; gaps=host\n${HEADER}` +
  kernel("sgemm", 6_000_000) +
  kernel("sgemm", 2_000_000, 'gemm,memory,"12.5 FLOP/B, H200 SXM fp32 turns at 14",132,0,0,0') +
  kernel("<script>alert(1)</script>", 1_000_000, "other,unknown,no metrics,0,0,0,1") +
  "in,copy_h2d,1,0,0,0,0,0,0,0,0,4096,1000000,0,memcpy,memory,moves bytes only,0,0,0,1\n" +
  "wait,sync,0,0,0,0,0,0,0,0,0,0,0,0,other,unknown,a wait,0,0,0,1\n";

describe.concurrent("rigel profile show", () => {
  test("time by kind with bars, and the longest kernels, in 80 columns without colour", async () => {
    using scratch = new Scratch();
    const path = scratch.file("p.csv", MIXED);
    const { stdout, status } = await rigel("profile", "show", path);
    expect(stdout.replace(path, "p.csv")).toBe(
      `p.csv: NVIDIA H200
5 operations: 3 kernels, 1 copies, 0 memsets, 1 waits
2 requests, 2 streams, 10.000 ms on the GPU, 0.002 ms of gaps (host)

kind             count     time ms   share  bound
gemm                 2       8.000   80.0%  compute 75%   ################
other                1       1.000   10.0%  unknown 100%  ##
memcpy               1       1.000   10.0%  memory 100%   ##

  time ms  share  count   mean us  kind          kernel
    8.000  80.0%      2    4000.0  gemm          sgemm
    1.000  10.0%      1    1000.0  other         <script>alert(1)</script>

why (kernels):
       1  compute: measured
       1  memory: n FLOP/B, H200 SXM fp32 turns at n
       1  unknown: no metrics
`,
    );
    expect(status).toBe(0);
  });

  test("no line of a real profile is longer than 80 columns", async () => {
    const { stdout } = await rigel("profile", "show", "profiles/h200-gpt2-train-bs8x512.csv");
    expect(stdout.split("\n").filter((line) => line.length > 80)).toEqual([]);
    expect(stdout).toContain("NVIDIA H200");
  });

  test("as JSON: the sums of the file, whatever the number of kernels listed", async () => {
    const { stdout } = await rigel("profile", "show", GPT2, "--json", "--top", "3");
    const rows = readFileSync(GPT2, "utf8").trimEnd().split("\n").slice(2);
    const time_ns = rows.reduce((sum, row) => sum + Number(row.split(",").at(-2)), 0);
    const view: { families: { time_ns: number; count: number }[]; longest: object[] } = JSON.parse(stdout);
    expect(view).toMatchObject({ schema: 1, operations: rows.length, time_ns, requests: 1 });
    expect(view.families.reduce((sum, family) => sum + family.time_ns, 0)).toBe(time_ns);
    const waits = rows.filter((row) => row.includes(",sync,")).length;
    expect(view.families.reduce((sum, family) => sum + family.count, 0)).toBe(rows.length - waits);
    expect(view.longest.length).toBe(3);
  });

  test("as a page that needs nothing else, and in which names are text", async () => {
    using scratch = new Scratch();
    const page = join(scratch.path, "p.html");
    const { status } = await rigel("profile", "show", scratch.file("p.csv", MIXED), "--html", page);
    const html = readFileSync(page, "utf8");
    expect(html).toStartWith("<!doctype html>");
    expect(html.match(/<rect /g)?.length).toBe(4);
    expect(html).toContain("&lt;script&gt;alert(1)&lt;/script&gt;");
    expect(html).not.toMatch(/<script|https?:|src=|@import|url\(/);
    expect(status).toBe(0);
  });

  test("of a bad file names file, line and field", async () => {
    using scratch = new Scratch();
    const path = scratch.file("p.csv", MIXED.replace("gemm,memory", "gemmm,memory"));
    expect(await rigel("profile", "show", path)).toMatchObject({
      status: 2,
      stdout: "",
      stderr: expect.stringContaining(`${path}:4: family: expected one of gemm, convolution,`),
    });
  });
});

/** Kernels in an order of their own, one row each. */
function captured(names: string[]): string {
  return `# rigel-profile 1; device=NVIDIA H200\n${HEADER}${names.map((name) => kernel(name, 1000)).join("")}`;
}

function repeated(name: string, count: number): string[] {
  return Array.from({ length: count }, () => name);
}

function rowOfRequest(index: number): string {
  return kernel("k", 1000, `gemm,unknown,,0,0,0,${index}`);
}

describe.concurrent("rigel profile diff", () => {
  test("2,034 kernels expected, 1,806 captured: says which 228 are missing, whatever their order", async () => {
    using scratch = new Scratch();
    const rest = [...repeated("elementwise_kernel", 614), ...repeated("softmax_warp_forward", 192)];
    const expected = [...repeated("sgemm", 997), ...rest, ...repeated("late", 3), ...repeated("copy_kernel", 228)];
    const there = [...repeated("late", 3), ...rest.toReversed(), ...repeated("sgemm", 997)];
    const a = scratch.file("a.csv", captured(expected));
    const b = scratch.file("b.csv", captured(there));
    const { stdout, status } = await rigel("profile", "diff", a, b, "--json", "--exit-code");
    expect(JSON.parse(stdout)).toMatchObject({
      a: { kernels: 2034 },
      b: { kernels: 1806 },
      launches_missing: 228,
      launches_new: 0,
      same: 4,
      differences: [
        { status: "missing", name: "copy_kernel", a: { count: 228, mean_ns: 1000 }, b: { count: 0, mean_ns: null } },
      ],
    });
    expect(status).toBe(1);
    const other = await rigel("profile", "diff", b, a);
    expect(other.stdout).toContain("0 launches of A are missing in B, 228 of B are new\n");
    expect(other.status).toBe(0);
  });

  test("a graph, which has no grid, does not make shapes of the others go unseen", async () => {
    using scratch = new Scratch();
    const [a = "", b = ""] = [10, 999].map((grid) =>
      scratch.file(
        `${grid}.csv`,
        `# rigel-profile 1; device=NVIDIA H200\n${HEADER}` +
          "graph of 5 kernels: k,kernel,0,0,0,0,0,0,0,0,0,0,1000,500,other,unknown,,132,0,0,0\n" +
          kernel("k1", 5000, undefined, grid),
      ),
    );
    const { stdout, status } = await rigel("profile", "diff", a, b, "--json", "--exit-code");
    expect(JSON.parse(stdout)).toMatchObject({ launches_missing: 1, launches_new: 1, same: 1 });
    expect(status).toBe(1);
  });

  test("tells other counts, other shapes, other durations, and nothing where there is nothing", async () => {
    using scratch = new Scratch();
    const head = `# rigel-profile 1; x=y\n${HEADER}`;
    const a = scratch.file(
      "a.csv",
      head + kernel("more", 1000) + kernel("shape", 1000) + kernel("slow", 1000) + kernel("same", 1000),
    );
    const b = scratch.file(
      "b.csv",
      head +
        kernel("more", 1000) +
        kernel("same", 1050) +
        kernel("slow", 1500) +
        kernel("shape", 1000, "gemm,unknown,,0,0,0,0", 9) +
        kernel("more", 1000),
    );
    const { stdout } = await rigel("profile", "diff", a, b);
    expect(stdout.replaceAll(`${scratch.path}/`, "")).toBe(
      `A a.csv: 4 operations, 4 kernels, 1 request, 0.004 ms
B b.csv: 5 operations, 5 kernels, 1 request, 0.006 ms
1 launches of A are missing in B, 2 of B are new
1 of 5 kinds of launch (name and shape) are the same

expected and missing: 1
      A      B      A us      B us  kernel
      1      0       1.0         -  shape 8x1x1/128x1x1

new: 1
      A      B      A us      B us  kernel
      0      1         -       1.0  shape 9x1x1/128x1x1

of another count: 1
      A      B      A us      B us  kernel
      1      2       1.0       1.0  more 8x1x1/128x1x1

slower: 1
      A      B      A us      B us  kernel
      1      1       1.0       1.5  slow 8x1x1/128x1x1
`,
    );
    const same = await rigel("profile", "diff", a, a, "--exit-code", "--threshold", "1");
    expect(same.stdout).toContain("4 of 4 kinds of launch (name and shape) are the same\n");
    expect(same.status).toBe(0);
  });

  test("of ten requests against one compares each, if asked", async () => {
    using scratch = new Scratch();
    const head = `# rigel-profile 1; x=y\n${HEADER}`;
    const a = scratch.file("a.csv", head + Array.from({ length: 10 }, (_, index) => rowOfRequest(index)).join(""));
    const b = scratch.file("b.csv", head + rowOfRequest(0));
    const plain = await rigel("profile", "diff", a, b, "--json");
    expect(JSON.parse(plain.stdout)).toMatchObject({
      launches_missing: 9,
      notes: ["10 against 1 requests; --per-request compares counts for each"],
    });
    const each = await rigel("profile", "diff", a, b, "--per-request", "--json");
    expect(JSON.parse(each.stdout)).toMatchObject({ launches_missing: 0, same: 1, notes: [], differences: [] });
  });

  test("against Orion's, which has no shapes, goes by name", async () => {
    using scratch = new Scratch();
    const a = scratch.file("a.csv", captured(["sgemm", "sgemm", "relu"]));
    const b = scratch.file("b.csv", "Name,Profile,Memory_footprint,SM_usage,Duration\nsgemm,1,0,8,1000\n");
    const { stdout } = await rigel("profile", "diff", a, b, "--json");
    expect(JSON.parse(stdout)).toMatchObject({
      differences: [
        { status: "missing", name: "relu" },
        { status: "count", name: "sgemm", a: { count: 2 }, b: { count: 1 } },
      ],
    });
  });

  test("against Orion's form of the same kernels nothing is missing: it has no copies", async () => {
    using scratch = new Scratch();
    const copy = "c,copy_h2d,0,0,0,0,0,0,0,0,0,64,100,0,memcpy,unknown,,0,0,0,0\n";
    const a = scratch.file("a.csv", `# rigel-profile 1; x=y\n${HEADER}${kernel("sgemm", 1000)}${copy}`);
    const b = join(scratch.path, "b.csv");
    expect((await rigel("import", a, "--format", "orion", "-o", b)).status).toBe(0);
    for (const pair of [
      [a, b],
      [b, a],
    ]) {
      const { stdout, status } = await rigel("profile", "diff", ...pair, "--json", "--exit-code");
      expect(JSON.parse(stdout)).toMatchObject({
        launches_missing: 0,
        launches_new: 0,
        same: 1,
        differences: [],
        notes: [
          "one of them has no shapes: kernels are matched by name alone",
          "Orion's form has kernels alone: copies and memsets are not compared",
        ],
      });
      expect(status).toBe(0);
    }
  });
});

test("what one reader takes of a profile with a flipped bit, the replay client takes too", async () => {
  using scratch = new Scratch();
  const path = join(scratch.path, "p.csv");
  const bytes = Buffer.from(MIXED.replace("sgemm", '"a, ""b"""'));
  const disagreed: string[] = [];
  let taken = 0;
  let refused = 0;
  for (let at = 0; at < bytes.length; at += 3) {
    const flipped = Buffer.from(bytes);
    flipped[at] = (flipped[at] ?? 0) ^ (1 << (at % 7));
    writeFileSync(path, flipped);
    try {
      await readProfile(path);
      taken++;
    } catch (thrown) {
      expect(reason(thrown)).toContain(path);
      refused++;
      continue;
    }
    const refusal = await replayRefuses(scratch, path);
    if (refusal !== undefined)
      disagreed.push(`${at}: ${flipped.subarray(Math.max(0, at - 9), at + 9).toString("latin1")}: ${refusal}`);
  }
  expect(disagreed).toEqual([]);
  expect(Math.min(taken, refused)).toBeGreaterThan(20);
});
