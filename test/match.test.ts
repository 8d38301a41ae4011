/**
 * match.test.ts: what clients launch against their profiles, and the scenarios of users who had counts by position (S13, S14, S17):
 * a GPT of 2,034 kernels of which 1,806 came. Nothing waits for the other 228; the report names them.
 */

import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { join } from "node:path";
import { z } from "zod";
import { matchLines, matchProfiles } from "../src/match.ts";
import { make } from "../src/native.ts";
import type { Kind } from "../src/recording.ts";
import { Scratch, plainEnvironment, rigel, root } from "./rigel.ts";

const build = join(root, "native", "build");
const HEADER =
  "name,kind,stream,grid_x,grid_y,grid_z,block_x,block_y,block_z,registers,shared_bytes,bytes,duration_ns,gap_ns\n";

const matchSchema = z.object({
  profiles: z.array(z.object({ profile: z.string(), kernels: z.number(), iterations: z.number() })),
  kernels: z.number(),
  iterations: z.number(),
  launches_expected: z.number(),
  launches_seen: z.number(),
  launches_missing: z.number(),
  launches_new: z.number(),
  differences: z.array(z.object({ status: z.string(), name: z.string(), expected: z.number(), seen: z.number() })),
});
const reportSchema = z.object({
  clients: z.array(z.object({ exit_code: z.number().nullable(), match: matchSchema.nullable() })),
  notes: z.array(z.string()),
});

/** How many kernels of each name one iteration of the GPT has. */
const GPT: [string, string, number][] = [
  ["ampere_sgemm_128x64_tn", "64,12,1,128,1,1", 997],
  ["vectorized_elementwise_kernel", "768,1,1,128,1,1", 386],
  ["dropout_elementwise_kernel", "384,1,1,256,1,1", 228],
  ["softmax_warp_forward", "192,1,1,128,1,1", 192],
  ["vectorized_layer_norm_kernel", "256,1,1,32,4,1", 231],
];
const LEFT_OUT = "dropout_elementwise_kernel";
const kernelsOf = (without?: string) => GPT.filter(([name]) => name !== without);

/** An iteration as Rigel's profile. */
function profileOf(kernels: typeof GPT): string {
  const rows = kernels.flatMap(([name, shape, count]) =>
    Array.from({ length: count }, () => `${name},kernel,0,${shape},32,0,0,1000,0\n`),
  );
  return `# rigel-profile 1; device=NVIDIA H200\n${HEADER}${rows.join("")}sync,sync,0,0,0,0,0,0,0,0,0,0,0,0\n`;
}

/** The same as nsys exports it. */
function nsysOf(kernels: typeof GPT): string {
  const header =
    "Start (ns),Duration (ns),CorrId,GrdX,GrdY,GrdZ,BlkX,BlkY,BlkZ,Reg/Trd,StcSMem (MB),DymSMem (MB),Bytes (MB)," +
    "Throughput (MB/s),SrcMemKd,DstMemKd,Device,Ctx,GreenCtx,Strm,Name";
  let at_ns = 1_000_000;
  const rows = kernels.flatMap(([name, shape, count]) =>
    Array.from({ length: count }, (_, index) => {
      at_ns += 2000;
      return `${at_ns},1000,${index + 1},${shape},32,0.000,0.000,,,,,NVIDIA H200 (0),1,,7,${name}`;
    }),
  );
  return `${[header, ...rows].join("\n")}\n`;
}

let scratch: Scratch;
beforeAll(async () => {
  await make(join(root, "native"), "build/record-program");
  scratch = new Scratch();
});
afterAll(() => scratch[Symbol.dispose]());

async function launched(config: object) {
  const result = await rigel("launch", scratch.file("launch.json", config), "--json", "--device", "simulated");
  expect(result.stdout, result.stderr).toStartWith("{");
  return { ...reportSchema.parse(JSON.parse(result.stdout)), status: result.status };
}

describe("a GPT of which 228 kernels did not come (scenario C)", () => {
  test("recorded with one command, compared with what was expected, and launched against it", async () => {
    const expected = scratch.file("expected.csv", profileOf(GPT));
    const there = scratch.file("there.csv", profileOf(kernelsOf(LEFT_OUT)));
    const replay = [join(build, "rigel-replay"), "--profile", there];
    const recorded = join(scratch.path, "recorded.csv");
    const flags = ["--device", "simulated", "--requests", "3", "-o", recorded];
    const result = await rigel("profile", ...flags, "--", ...replay);
    expect(result.status, result.stderr).toBe(0);
    const diff = await rigel("profile", "diff", "--json", "--exit-code", expected, recorded);
    expect(diff.status).toBe(1);
    expect(JSON.parse(diff.stdout)).toMatchObject({
      a: { kernels: 2034 },
      b: { kernels: 1806 },
      launches_missing: 228,
      launches_new: 0,
    });

    const { clients, status } = await launched({
      clients: [
        { name: "gpt", class: "high", command: [...replay, "--iterations", "10", "--warmup", "0"], profile: expected },
      ],
    });
    expect(status).toBe(0);
    expect(clients[0]?.match).toMatchObject({
      kernels: 2034,
      iterations: 10,
      launches_expected: 20_340,
      launches_seen: 18_060,
      launches_missing: 2280,
      launches_new: 0,
      differences: [{ status: "missing", name: LEFT_OUT, expected: 2280, seen: 0 }],
    });
  });

  test("imported from nsys as Orion's kernel file, launched by the configuration as it was written: ends by itself", async () => {
    const trace = scratch.file("gpt.csv", nsysOf(kernelsOf(LEFT_OUT)));
    const kernels = join(scratch.path, "gpt_kernel_info.csv");
    const imported = await rigel("import", "nsys", trace, "--format", "orion", "-o", kernels);
    expect(imported.status, imported.stderr).toBe(0);
    const { clients, notes, status } = await launched({
      clients: [
        {
          arch: "gpt",
          kernel_file: "gpt_kernel_info.csv",
          num_kernels: 2034,
          num_iters: 10,
          args: { model_name: "gpt", batchsize: 4, sequence_len: 512 },
        },
      ],
    });
    expect(status).toBe(0);
    expect(notes.join("\n")).toContain("the configuration states 2034 kernels");
    expect(notes.join("\n")).toContain("has 1806");
    expect(clients).toMatchObject([{ exit_code: 0, match: { kernels: 1806, launches_missing: 0, launches_new: 0 } }]);
  });
});

describe("the end of a replay (S14)", () => {
  test("comes when the GPU is done, however long that takes; past the idle time it says what it waits for", async () => {
    const slow = scratch.file(
      "slow.csv",
      `# rigel-profile 1; x=y\n${HEADER}slow,kernel,0,132,1,1,256,1,1,32,0,0,3000000000,0\n`,
    );
    await using child = Bun.spawn(
      [join(build, "rigel-replay"), "--profile", slow, "--iterations", "1", "--warmup", "0", "--idle-ms", "100"],
      {
        env: {
          ...plainEnvironment(),
          LD_LIBRARY_PATH: join(build, "sim"),
          RIGEL_SIM_STATE: join(scratch.path, "idle-sim"),
        },
        stdout: "pipe",
        stderr: "pipe",
      },
    );
    const [stdout, stderr, status] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
    expect(stderr).toContain("rigel-replay: waiting for the GPU to finish what was launched");
    expect(JSON.parse(stdout)).toMatchObject({ iterations: 1, launches: 1 });
    expect(status).toBe(0);
  });
});

describe("the idle time-out of a replay (S14)", () => {
  const stuck = `# rigel-profile 1; x=y\n${HEADER}quick,kernel,0,132,1,1,256,1,1,32,0,0,5000,0\nendless,kernel,0,132,1,1,256,1,1,32,0,0,3600000000000,0\n`;

  test("ends one that waits without end, as failed, and the launch with it", async () => {
    const replay = { profile: scratch.file("stuck.csv", stuck), iterations: 2, idle_timeout_s: 0.2 };
    const config = scratch.file("stuck.json", {
      policy: { name: "none" },
      clients: [{ name: "it", class: "best-effort", replay }],
    });
    const { stdout, stderr, status } = await rigel("launch", config, "--device", "simulated", "--json");
    expect(stderr).toContain("idle time-out: a wait for the GPU has not returned for 0.2 s");
    expect(JSON.parse(stdout)).toMatchObject({ clients: [{ name: "it", exit_code: 1 }] });
    expect(status).toBe(1);
  });

  test("leaves alone one that gets on; nothing is no time", async () => {
    const replay = { profile: scratch.file("gpt.csv", profileOf(GPT)), iterations: 3, idle_timeout_s: 60 };
    const { clients, status } = await launched({ clients: [{ name: "it", class: "best-effort", replay }] });
    expect(clients).toMatchObject([{ exit_code: 0 }]);
    expect(status).toBe(0);
    const bad = scratch.file("bad.json", {
      clients: [{ name: "it", class: "high", replay: { profile: "x.csv", idle_timeout_s: 0 } }],
    });
    const refused = await rigel("launch", bad);
    expect(refused.stderr).toContain("clients[0].replay.idle_timeout_s");
    expect(refused.status).toBe(2);
  });
});

describe("a replay of several profiles", () => {
  test("launches of each request what one of them says; how often each came is told by its own kernels", async () => {
    const short = scratch.file("short.csv", profileOf([...GPT.slice(3), ["short_kernel", "1,1,1,32,1,1", 2]]));
    const long = scratch.file("long.csv", profileOf([...GPT.slice(2), ["long_kernel", "1,1,1,32,1,1", 1]]));
    const config = {
      clients: [{ name: "gpt", class: "high", replay: { profile: [short, long], iterations: 20 } }],
    };
    const { clients, status } = await launched(config);
    expect(status).toBe(0);
    // By splitmix64 10 of the first 20 are of the first; the three to warm up are of each in turn.
    const { match } = clients[0] ?? {};
    expect(match).toMatchObject({ iterations: 23, launches_missing: 0, launches_new: 0, differences: [] });
    expect(match?.profiles).toEqual([
      { profile: short, kernels: 425, iterations: 12 },
      { profile: long, kernels: 652, iterations: 11 },
    ]);
    expect(match?.launches_seen).toBe(425 * 12 + 652 * 11);
  });
});

describe("a program with a profile", () => {
  test("kernels of CUDA graphs count as what they are; what no profile has is new", async () => {
    const profile = scratch.file(
      "program.csv",
      `# rigel-profile 1; x=y\n${HEADER}` +
        "softmax_warp_forward,kernel,0,66,1,1,128,1,1,32,2048,0,5000,0\n" +
        "layer_norm_kernel,kernel,0,300,1,1,256,1,1,32,0,0,5000,0\n" +
        "layer_norm_kernel,kernel,0,300,1,1,256,1,1,32,0,0,5000,0\n" +
        "never_launched_kernel,kernel,0,1,1,1,32,1,1,32,0,0,5000,0\n",
    );
    const config = {
      clients: [{ name: "it", class: "best-effort", command: [join(build, "record-program"), "20"], profile }],
    };
    const { clients } = await launched(config);
    expect(clients[0]?.match).toMatchObject({ kernels: 4, iterations: 20, launches_missing: 20, launches_new: 60 });
    const text = await rigel("launch", scratch.file("text.json", config), "--device", "simulated");
    expect(text.stdout).toContain(
      "match: it: 4 kernel launches an iteration by program.csv, 20 iterations: 20 launches missing, 60 new",
    );
    expect(text.stdout).toContain("missing   expected 20, seen 0: never_launched_kernel 1x1x1/32x1x1");
    expect(text.stdout).toContain("new       expected 0, seen 20: gelu_elementwise_kernel 40x2x1/128x1x1");
  });
});

const counted = (name: string, count: number, grid: [number, number, number] = [1, 1, 1]) => ({
  kind: {
    work: "kernel",
    name,
    grid,
    block: [32, 1, 1],
    registers: 8,
    shared_bytes: 0,
    sms: 1,
    bytes: 0,
  } satisfies Kind,
  count,
  node_count: 0,
});
const came = (...counts: [string, number][]) => counts.map(([name, count]) => counted(name, count));
const rows = (...names: string[]): string =>
  `# rigel-profile 1; x=y\n${HEADER}${names.map((name) => `${name},kernel,0,1,1,1,32,1,1,8,0,0,1000,0\n`).join("")}`;

describe("the comparison itself", () => {
  test("goes by most launches; a client that was stopped may be in the middle of an iteration", async () => {
    const profile = scratch.file("abc.csv", rows("a", "a", "b", "c"));
    const cut = [counted("a", 21), counted("b", 10), counted("c", 10)];
    expect(await matchProfiles([profile], cut, true)).toMatchObject({ iterations: 10, differences: [] });
    expect(await matchProfiles([profile], cut, false)).toMatchObject({
      launches_new: 1,
      differences: [{ status: "count", name: "a", expected: 20, seen: 21 }],
    });
    // By no more than an iteration has of them.
    const [most, more] = [22, 23].map((count) => [counted("a", count), ...cut.slice(1)]);
    expect(await matchProfiles([profile], most ?? [], true)).toMatchObject({ differences: [] });
    expect(await matchProfiles([profile], more ?? [], true)).toMatchObject({
      differences: [{ status: "count", name: "a", expected: 20, seen: 23 }],
    });
  });

  test("what came is an iteration at least, though it is less than half of one", async () => {
    const profile = scratch.file("third.csv", rows("a", "a", "a", "b"));
    expect(await matchProfiles([profile], came(["a", 1]), false)).toMatchObject({
      iterations: 1,
      launches_expected: 4,
      launches_missing: 3,
    });
  });

  test("a graph that is one row of the profile counts as that, and not by its kernels", async () => {
    const header = HEADER.trim() + ",family,bound,bound_reason,sms,flops,dram_bytes,request\n";
    const row = "graph of 3 kernels from a,kernel,0,0,0,0,0,0,0,8,0,0,1000,0,other,unknown,,8,0,0,0\n";
    const profile = scratch.file("graph.csv", `# rigel-profile 1; x=y\n${header}${row}`);
    const a = counted("a", 0);
    const graph = counted("graph of 3 kernels from a", 5, [0, 0, 0]);
    const counts = [
      { ...a, node_count: 15 },
      { ...graph, kind: { ...graph.kind, work: "graph", block: [0, 0, 0] } satisfies Kind },
    ];
    expect(await matchProfiles([profile], counts, false)).toMatchObject({
      iterations: 5,
      launches_seen: 5,
      differences: [],
    });
  });

  test("by name alone where the profile has no shapes", async () => {
    const header = "Name,Profile,Memory_footprint,SM_usage,Duration\n";
    const profile = scratch.file("orion.csv", `${header}sgemm,1,0,8,1000\nsgemm,1,0,8,1000\n`);
    const match = await matchProfiles(
      [profile],
      [counted("sgemm", 4, [9, 9, 1]), counted("sgemm", 6, [2, 1, 1])],
      false,
    );
    expect(match).toMatchObject({ iterations: 5, launches_seen: 10, differences: [] });
    expect(matchLines("it", match)).toEqual([
      "match: it: 2 kernel launches an iteration by orion.csv, 5 iterations: all came, and no others",
    ]);
  });

  test("by name alone where one of its rows has no shape", async () => {
    const header = HEADER.trim() + ",family,bound,bound_reason,sms,flops,dram_bytes,request\n";
    const kernel = "sgemm,kernel,0,9,9,1,128,1,1,32,0,0,1000,0,gemm,unknown,,8,0,0,0\n";
    const shapeless = "gemv,kernel,0,0,0,0,0,0,0,0,0,0,1000,0,gemm,unknown,,8,0,0,0\n";
    const profile = scratch.file("mixed.csv", `# rigel-profile 1; x=y\n${header}${kernel}${shapeless}`);
    const counts = [counted("sgemm", 5, [9, 9, 1]), counted("gemv", 5, [2, 1, 1])];
    expect(await matchProfiles([profile], counts, false)).toMatchObject({ iterations: 5, differences: [] });
  });

  test("by several profiles: what only some have, what all have, and what none has", async () => {
    const paths = [scratch.file("one.csv", rows("a", "b", "b")), scratch.file("two.csv", rows("a", "c", "d"))];
    const match = await matchProfiles(paths, came(["a", 12], ["b", 10], ["c", 7], ["d", 7]), false);
    expect(match).toMatchObject({ kernels: 3, iterations: 12, launches_expected: 36, differences: [] });
    expect(match.profiles.map(({ iterations }) => iterations)).toEqual([5, 7]);
    expect(matchLines("it", match)).toEqual([
      "match: it: 3 kernel launches an iteration by one.csv, 5 iterations; 3 by two.csv, 7: all came, and no others",
    ]);
    // One of them is never asked for: that is no difference. One that launches all the same does so too often.
    expect(await matchProfiles(paths, came(["a", 5], ["b", 10]), false)).toMatchObject({
      iterations: 5,
      differences: [],
    });
    expect(await matchProfiles(paths, came(["a", 13], ["b", 10], ["c", 7], ["x", 1]), false)).toMatchObject({
      differences: [
        { status: "missing", name: "d", expected: 7 },
        { status: "count", name: "a", expected: 12, seen: 13 },
        { status: "new", name: "x" },
      ],
    });
  });

  test("by profiles of which one has no kernels of its own, and by such as launch the same", async () => {
    const both = scratch.file("both.csv", rows("a", "b"));
    const once = scratch.file("once.csv", rows("a"));
    const twice = scratch.file("twice.csv", rows("a", "a"));
    // b says how often the first came, and what is left of a how often the other did.
    const first = await matchProfiles([both, once], came(["a", 9], ["b", 4]), false);
    expect(first.profiles.map(({ iterations }) => iterations)).toEqual([4, 5]);
    expect(first.counted).toBe(true);
    // Nothing tells how often each of the others came.
    const guessed = await matchProfiles([once, twice, both], came(["a", 11], ["b", 4]), false);
    expect(guessed).toMatchObject({ iterations: 8, counted: false, differences: [] });
    expect(guessed.profiles.map(({ iterations }) => iterations)).toEqual([2, 2, 4]);
  });

  test("of a client that launched nothing", async () => {
    const profile = scratch.file("none.csv", rows("a"));
    const match = await matchProfiles([profile], [], false);
    expect(match).toMatchObject({ iterations: 0, launches_seen: 0 });
    expect(matchLines("it", match)).toEqual(["match: it: 1 kernel launches an iteration by none.csv, and none came"]);
  });
});
