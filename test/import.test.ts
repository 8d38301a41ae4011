/**
 * import.test.ts: what other tools recorded becomes a profile, or an error that says what is wrong and where.
 *
 * The files in test/fixtures are written after the formats of the tools' versions that their names say.
 */

import { describe, expect, test } from "bun:test";
import { chmodSync, lstatSync, mkdirSync, readFileSync, readdirSync, symlinkSync, writeFileSync } from "node:fs";
import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { gzipSync } from "node:zlib";
import { FAMILIES, BOUNDS, OPERATION_KINDS } from "../src/classify.ts";
import { RigelError, reason } from "../src/errors.ts";
import { type ImportOptions, type ImportSummary, importProfiles } from "../src/import.ts";
import { TOOLS } from "../src/import-detect.ts";
import { type Operation, openProfile } from "../src/profile.ts";
import { WholeFile } from "../src/output.ts";
import { RIGEL_HEADER, factsLine, rigelRow } from "../src/profile-write.ts";
import { commandLine } from "../src/self.ts";
import { Scratch, plainEnvironment, replayRefuses, rigel, root, start } from "./rigel.ts";
import { until } from "./serving.ts";

/** What a command goes behind so that a file's mode holds for it: root may read all, unless it gives that up. */
const deniable = process.getuid?.() === 0 ? ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", "--"] : [];
const mayBeDenied =
  deniable.length === 0 || (Bun.which("setpriv") !== null && Bun.spawnSync([...deniable, "true"]).exitCode === 0);

const fixture = (name: string): string => join(root, "test", "fixtures", name);

const DEFAULTS = { format: "rigel", skipBad: false, metrics: [] } satisfies Partial<ImportOptions>;

interface Imported {
  summary: ImportSummary;
  rows: Operation[];
  facts: ReadonlyMap<string, string>;
}

async function imported(file: string, options: Partial<ImportOptions> = {}): Promise<Imported> {
  using scratch = new Scratch();
  const out = join(scratch.path, "out.csv");
  const summary = await importProfiles({ ...DEFAULTS, files: [file], out, ...options });
  return { summary, ...(await rowsOf(out)) };
}

async function rowsOf(path: string): Promise<{ rows: Operation[]; facts: ReadonlyMap<string, string> }> {
  const { operations, facts } = await openProfile(path);
  return { rows: await Array.fromAsync(operations), facts };
}

/** The message with which an import is refused. */
async function refusal(content: string | Uint8Array, options: Partial<ImportOptions> = {}): Promise<string> {
  using scratch = new Scratch();
  const path = join(scratch.path, "in.csv");
  writeFileSync(path, content);
  try {
    await imported(path, options);
    return "imported";
  } catch (thrown) {
    expect(thrown).toBeInstanceOf(RigelError);
    return reason(thrown).replaceAll(path, "in.csv");
  }
}

/** As one line: what is asked of most rows. */
function brief({ kind, stream, grid, block, registers, shared_bytes, bytes, duration_ns, gap_ns }: Operation): string {
  const shape = `${grid.join("x")}/${block.join("x")}`;
  return `${kind} s${stream} ${shape} r${registers} m${shared_bytes} b${bytes} d${duration_ns} g${gap_ns}`;
}

const NSYS = readFileSync(fixture("nsys-2025-cuda_gpu_trace.csv"), "utf8");
const NSYS_HEADER =
  "Start (ns),Duration (ns),CorrId,GrdX,GrdY,GrdZ,BlkX,BlkY,BlkZ,Reg/Trd,StcSMem (MB),DymSMem (MB),Bytes (MB)," +
  "Throughput (MB/s),SrcMemKd,DstMemKd,Device,Ctx,Strm,Name\n";
const nsysRow = (start_ns: number, name = "k", duration = "100"): string =>
  `${start_ns},${duration},1,8,1,1,128,1,1,32,0.000,0.000,,,,,NVIDIA L4 (0),1,7,${name}\n`;

describe.concurrent("nsys", () => {
  test("of 2021.1: seconds, and sizes without a unit", async () => {
    const { rows, facts } = await imported(fixture("nsys-2021.1-gputrace.csv"));
    expect(rows.map(brief)).toEqual([
      "copy_h2d s0 0x0x0/0x0x0 r0 m0 b602112 d2240 g0",
      "kernel s0 16x4x1/256x1x1 r122 m32768 b0 d12351 g7760",
      "memset s0 0x0x0/0x0x0 r0 m0 b4096 d1600 g7649",
      "kernel s1 64x1x1/512x1x1 r32 m0 b0 d4096 g400",
    ]);
    expect([facts.get("device"), facts.get("gaps")]).toEqual(["Tesla V100-SXM2-16GB", "idle GPU"]);
  });

  test("of 2022.4: megabytes, a line before the header, a copy between host buffers", async () => {
    const { rows, summary } = await imported(fixture("nsys-2022.4-cuda_gpu_trace.csv"));
    expect(rows.map(brief)).toEqual([
      "copy_h2d s0 0x0x0/0x0x0 r0 m0 b602000 d2208 g0",
      "kernel s0 32x8x1/128x1x1 r234 m98000 b0 d9824 g11104",
      "kernel s0 512x1x1/128x1x1 r40 m0 b0 d5152 g1650",
    ]);
    expect(summary.files[0]).toMatchObject({
      tool: "nsys",
      rows: 4,
      operations: 3,
      dropped: { "copies between buffers of the host": 1 },
      notes: ["sizes are as exact as nsys printed them, in MB"],
    });
  });

  test("of 2025: GreenCtx, two devices, and another table behind", async () => {
    const first = await imported(fixture("nsys-2025-cuda_gpu_trace.csv"));
    expect(first.rows.map(({ family }) => family)).toEqual(["memcpy", "gemm", "attention", "memcpy"]);
    expect(first.summary.files[0]?.dropped).toEqual({
      "text after the table": 3,
      "on another device than NVIDIA H200 (0)": 1,
    });
    expect(first.summary.notes).toEqual([
      "several devices: kept NVIDIA H200 (0), left out NVIDIA H200 (1); --device chooses",
    ]);
    const second = await imported(fixture("nsys-2025-cuda_gpu_trace.csv"), { device: "1" });
    expect(second.rows.map(({ family }) => family)).toEqual(["communication"]);
  });

  test("with requests where nothing ran for a while, one of which can be kept", async () => {
    const gap = { request_gap_ns: 1e6 };
    const { rows } = await imported(fixture("nsys-2025-cuda_gpu_trace.csv"), gap);
    expect(rows.map(({ request }) => request)).toEqual([0, 0, 0, 1]);
    const one = await imported(fixture("nsys-2025-cuda_gpu_trace.csv"), { ...gap, request: 1 });
    expect(one.rows.map(({ kind, request }) => [kind, request])).toEqual([["copy_d2h", 0]]);
    expect(one.summary.files[0]?.dropped["of another request"]).toBe(3);
  });

  test("with bounds from ncu for kernels of the same name and shape", async () => {
    using scratch = new Scratch();
    const row = nsysRow(0, '"void gemm<float, 4>(float const*, float*)"').replace("8,1,1,128,1,1", "64,8,1,256,1,1");
    const file = scratch.file("nsys.csv", NSYS_HEADER + row + nsysRow(500));
    const { rows, summary } = await imported(file, { metrics: [fixture("ncu-2024-details.csv")] });
    expect(rows.map(({ bound, bound_reason }) => [bound, bound_reason])).toEqual([
      ["compute", "SMs 88.4% and memory 31.1% of peak"],
      ["unknown", "no metrics, FLOPs or bytes"],
    ]);
    expect(summary.notes).toEqual(["1 of 2 kernels have metrics of ncu"]);
  });

  test("a bad row of the metrics is left out as any other, if asked, and named", async () => {
    using scratch = new Scratch();
    const [header = "", units = "", first = "", ...more] = readFileSync(fixture("ncu-2023-raw.csv"), "utf8").split(
      "\n",
    );
    const bad = first.replace(/"[^"]*"$/, '"x"');
    const metrics = scratch.file("ncu.csv", [header, units, bad, ...more].join("\n"));
    const file = scratch.file("nsys.csv", NSYS_HEADER + nsysRow(0));
    const { summary } = await imported(file, { metrics: [metrics], skipBad: true });
    expect(summary.notes).toEqual([
      expect.stringMatching(/^left out of the metrics: .*ncu\.csv:3: .*: expected a number, got "x"$/),
      "0 of 1 kernels have metrics of ncu",
    ]);
    expect(async () => await imported(file, { metrics: [metrics] })).toThrow(
      "1 bad row, nothing written; --skip-bad leaves them out",
    );
  });
});

describe.concurrent("ncu", () => {
  test("details page: one kernel from many rows, units of every version, rules, other text before", async () => {
    const { rows, summary } = await imported(fixture("ncu-2024-details.csv"));
    expect(rows.map(brief)).toEqual([
      "kernel s0 64x8x1/256x1x1 r128 m49150 b0 d12350 g0",
      "kernel s0 1024x1x1/128x1x1 r16 m1024 b0 d3200 g0",
      "kernel s0 1x1x1/32x1x1 r16 m0 b0 d1216 g0",
    ]);
    expect(rows.map(({ bound }) => bound)).toEqual(["compute", "memory", "unknown"]);
    // 400 GB/s for 12.35 us.
    expect(rows[0]?.dram_bytes).toBe(4_940_000);
    expect(summary.files[0]?.notes).toEqual([
      "FLOPs are not measured, or in part, for some kernels",
      "bytes of device memory are not measured for every kernel",
      "static_shared is not measured for every kernel: taken as not known",
    ]);
  });

  test("details page of nv-nsight-cu-cli: shapes as products, metrics by their first names", async () => {
    const { rows } = await imported(fixture("nv-nsight-cu-cli-2019-details.csv"));
    expect(rows.map(brief)).toEqual(["kernel s0 506x1x1/192x1x1 r24 m0 b0 d10752 g0"]);
    expect(rows[0]).toMatchObject({ bound: "memory", bound_reason: "SMs 22.2% and memory 64.6% of peak" });
  });

  test("raw page: a row of units, thousands, n/a, FLOPs and bytes", async () => {
    const { rows, facts } = await imported(fixture("ncu-2023-raw.csv"));
    expect(facts.get("device")).toBe("NVIDIA H200");
    expect(rows.map(brief)).toEqual([
      "kernel s0 4096x1x1/256x1x1 r16 m0 b0 d5630 g0",
      "kernel s0 264x1x1/128x1x1 r40 m2050 b0 d410200 g0",
    ]);
    expect(rows.map(({ flops, dram_bytes, bound, bound_reason }) => [flops, dram_bytes, bound, bound_reason])).toEqual([
      [
        2_097_152,
        12_584_300,
        "memory",
        "SMs 12.5% and memory 45% of peak, both under 60%; 0.167 FLOP/B, H200 SXM fp32 turns at 12.2 (measured)",
      ],
      [400_040_000_000, 1_500_000, "compute", "266693 FLOP/B, H200 SXM fp32 turns at 12.2 (measured)"],
    ]);
  });
});

/** A kernel and its launch: on which device, when launched (us), how long it takes, and what it is called. */
function launched(device: number, at: number, dur: number, name: string): object[] {
  const shape = { stream: 7, grid: [8, 4, 1], block: [128, 1, 1], "registers per thread": 64, "shared memory": 0 };
  return [
    {
      ph: "X",
      cat: "cuda_runtime",
      name: "cudaLaunchKernel",
      ts: at,
      dur: 5,
      pid: 1,
      tid: 1,
      args: { correlation: at },
    },
    {
      ph: "X",
      cat: "kernel",
      name,
      ts: at + 10,
      dur,
      pid: device,
      tid: 7,
      args: { correlation: at, device, ...shape },
    },
  ];
}
function traceOf(events: object[]): string {
  return JSON.stringify({ deviceProperties: [0, 1].map((id) => ({ id, name: "NVIDIA H200" })), traceEvents: events });
}

describe.concurrent("torch", () => {
  test("of 2.x: in the order of launches, with the host's gaps, waits, steps and work of matrix products", async () => {
    const { rows, facts, summary } = await imported(fixture("torch-2.trace"));
    expect(rows.map(brief)).toEqual([
      "kernel s0 132x1x1/384x1x1 r168 m213128 b0 d15500 g0",
      "kernel s0 128x1x1/128x1x1 r20 m0 b0 d3456 g25000",
      "copy_d2h s0 0x0x0/0x0x0 r0 m0 b4096 d2016 g54750",
      "sync s0 0x0x0/0x0x0 r0 m0 b0 d0 g1000",
    ]);
    expect(rows.map(({ request }) => request)).toEqual([0, 0, 1, 1]);
    expect([facts.get("device"), facts.get("gaps")]).toEqual(["NVIDIA H200", "host"]);
    // aten::addmm of 8192x1024 by 1024x1024 in bfloat16.
    expect(rows[0]).toMatchObject({ family: "gemm", flops: 2 * 8192 * 1024 * 1024, bound: "compute", sms: 132 });
    expect(rows[0]?.dram_bytes).toBe(2 * (8192 * 1024 + 1024 * 1024 + 8192 * 1024));
    expect(summary.requests).toBe(2);
  });

  test("of 1.8: a bare list, capitals, a bare inf, times since 1970, no calls of the host", async () => {
    const { rows, summary } = await imported(fixture("torch-1.8.trace"));
    expect(rows.map(brief)).toEqual([
      "memset s0 0x0x0/0x0x0 r0 m0 b256 d2000 g0",
      "kernel s0 99x1x1/128x1x1 r122 m12544 b0 d14000 g8000",
    ]);
    expect(summary.files[0]?.notes).toEqual(["no calls of the host in this trace: gaps are idle time of the GPU"]);
  });

  test("gzipped, on one line, with a name that holds brackets and quotes, and an unknown category", async () => {
    using scratch = new Scratch();
    const path = join(scratch.path, "t.json.gz");
    const document: { traceEvents: object[] } = JSON.parse(readFileSync(fixture("torch-2.trace"), "utf8"));
    const args = { device: 0, stream: 7, grid: [1, 1, 1], block: [32, 1, 1], "registers per thread": 9 };
    document.traceEvents.push(
      { ph: "X", cat: "kernel", name: 'odd }]"\\', ts: 9000, dur: 1, args: { ...args, "shared memory": 0 } },
      { ph: "X", cat: "new_thing", name: "x", ts: 1, dur: 1 },
    );
    writeFileSync(path, gzipSync(JSON.stringify(document)));
    const { rows, summary } = await imported(path);
    expect(rows.at(-1)?.name).toBe('odd }]"\\');
    expect(summary.files[0]?.dropped['events of the unknown category "new_thing"']).toBe(1);
    expect(summary.files[0]?.notes).toContain("1 operations without their launch call stand where the GPU began them");
  });

  test("of several devices of one name one is kept, by its index too, with the host's time for the others", async () => {
    using scratch = new Scratch();
    const events = [...launched(0, 1, 100, "a"), ...launched(1, 50_001, 100, "b"), ...launched(0, 100_001, 100, "c")];
    const path = scratch.file("two.json", traceOf(events));
    const { rows, summary } = await imported(path);
    expect(rows.map(({ name, gap_ns }) => [name, gap_ns])).toEqual([
      ["a", 0],
      ["c", 99_990_000],
    ]);
    expect(summary.files[0]?.dropped["on another device than NVIDIA H200 (0)"]).toBe(1);
    expect((await imported(path, { device: "1" })).rows.map(({ name }) => name)).toEqual(["b"]);
    expect((await imported(fixture("torch-2.trace"), { device: "0" })).rows.length).toBeGreaterThan(1);
  });

  test("a new request begins where the GPU had nothing to do, and not with a wait", async () => {
    using scratch = new Scratch();
    const wait = {
      ph: "X",
      cat: "cuda_runtime",
      name: "cudaDeviceSynchronize",
      pid: 1,
      tid: 1,
      args: { correlation: 9 },
    };
    const events = [
      ...launched(0, 1, 100_000, "a"),
      { ...wait, ts: 50_000, dur: 50_020 },
      ...launched(0, 150_001, 10, "b"),
    ];
    const { rows } = await imported(scratch.file("gap.json", traceOf(events)), { request_gap_ns: 20e6 });
    expect(rows.map(({ name, request }) => [name, request])).toEqual([
      ["a", 0],
      ["cudaDeviceSynchronize", 0],
      ["b", 1],
    ]);
  });

  test("where steps are marked, that no pauses are gone by is said", async () => {
    const { summary } = await imported(fixture("torch-2.trace"), { request_gap_ns: 1 });
    expect(summary.requests).toBe(2);
    expect(summary.notes).toContain("requests are as the file marks them: --request-gap has no effect there");
    expect((await imported(fixture("torch-2.trace"))).summary.notes.join("\n")).not.toContain("--request-gap");
  });

  test("a copy between buffers of the host is left out, as of nsys", async () => {
    using scratch = new Scratch();
    const args = { device: 0, stream: 7, correlation: 50, bytes: 64 };
    const copy = { ph: "X", cat: "gpu_memcpy", name: "Memcpy HtoH (Pageable -> Pinned)", ts: 50, dur: 1, args };
    const events = [...launched(0, 1, 10, "a"), copy, ...launched(0, 101, 10, "b")];
    const { rows, summary } = await imported(scratch.file("host.json", traceOf(events)));
    expect(rows.map(({ name }) => name)).toEqual(["a", "b"]);
    expect(summary.files[0]?.dropped["copies between buffers of the host"]).toBe(1);
  });

  test("cut short is refused, and read as far as it goes if asked", async () => {
    const text = readFileSync(fixture("torch-2.trace"), "utf8");
    const cut = text.slice(0, text.indexOf('"registers per thread": 168'));
    expect(await refusal(cut)).toMatch(
      /^in\.csv:\d+: the file ends in the middle\n1 bad row, nothing written; --skip-bad/,
    );
    using scratch = new Scratch();
    const { rows, summary } = await imported(scratch.file("t.json", cut), { skipBad: true });
    expect(rows.map(({ kind }) => kind)).toEqual(["kernel", "copy_d2h", "sync"]);
    expect(summary.files[0]?.bad_rows).toBe(1);
  });
});

test("bad rows that were all that there was are named where they are left out, too", async () => {
  const rows = NSYS_HEADER + nsysRow(0, "k", "x") + nsysRow(200, "k", "");
  expect(await refusal(rows, { skipBad: true })).toBe(
    'in.csv:2: Duration: expected a number, got "x"\nin.csv:3: Duration: expected a number, got ""\n' +
      "in.csv: nothing that the GPU did in its 2 rows, of which 2 are bad",
  );
});

test("several files become one profile, each with requests of its own", async () => {
  const files = [fixture("torch-2.trace"), fixture("torch-2.trace"), fixture("nsys-2025-cuda_gpu_trace.csv")];
  const { rows, summary } = await imported("", { files });
  expect(rows.map(({ request }) => request)).toEqual([0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 4, 4]);
  expect(summary.files.map(({ operations }) => operations)).toEqual([4, 4, 4]);
  expect(summary.notes).toEqual(["several devices: kept NVIDIA H200 (0), left out NVIDIA H200 (1); --device chooses"]);
});

test("orion: shapes unknown, bounds as stated, and out again as it was", async () => {
  const { rows } = await imported(fixture("orion-resnet50.csv"));
  expect(rows.map(({ grid, sms, bound, duration_ns }) => [grid[0], sms, bound, duration_ns])).toEqual([
    [0, 6272, "memory", 446208],
    [0, 3136, "unknown", 184192],
    [0, 80, "compute", 12352],
  ]);
  const { stdout, status } = await rigel("import", "orion", fixture("orion-resnet50.csv"), "--format", "orion");
  expect(stdout).toBe(
    "Name,Profile,Memory_footprint,SM_usage,Duration\nConv,0,0,6272,446208\n" +
      '"void at::native::(anonymous namespace)::max_pool_forward_nchw<float, float>(int, float const*)",-1,0,3136,184192\n' +
      "volta_sgemm_128x64_tn,1,0,80,12352\n",
  );
  expect(status).toBe(0);
});

function keptByOrion({ name, bound, sms, duration_ns }: Operation) {
  return [name, bound, sms, duration_ns];
}

test("a recording of Rigel's in Orion's form: its kernels, what bounds them and their SMs; the rest is left out with a word", async () => {
  const recording = join(root, "profiles", "h200-bert-train-bs8x128.csv");
  const { rows, summary } = await imported(recording, { format: "orion" });
  const own = (await rowsOf(recording)).rows.filter(({ kind }) => kind === "kernel");
  expect(own.map(({ bound }) => bound)).toContain("compute");
  expect(rows.map(keptByOrion)).toEqual(own.map(keptByOrion));
  expect(summary.files[0]).toMatchObject({
    tool: "rigel",
    rows: 850,
    operations: 718,
    dropped: { "copies, memsets and waits, as Orion's form has kernels alone": 132 },
  });
});

const changedRow = (from: string, to: string, name?: string): string => nsysRow(1, name).replace(from, to);

/** What is said of the rows of a file, without where they are. */
async function badRows(content: string): Promise<string[]> {
  const lines = (await refusal(content)).split("\n").slice(0, -1);
  return lines.map((line) => line.replace(/^in\.csv:\d+: /, ""));
}

describe.concurrent("a file that is not what it should be", () => {
  test.each<[string, string | Uint8Array, string]>([
    ["an empty file", "", "in.csv: the file is empty; export it again"],
    ["blanks alone", " \n\n", "in.csv: there is nothing but blanks in the file; export it again"],
    ["a header alone", NSYS_HEADER, "in.csv: nothing that the GPU did in its 0 rows; record with CUDA tracing on"],
    [
      "a zero byte",
      `${NSYS_HEADER}1\0`,
      "in.csv:2: expected text, got a zero byte; if it is UTF-16, save it with a byte order mark or as UTF-8",
    ],
    ["a profile of Rigel's", "# rigel-profile 1\n", "in.csv: this is already a profile of Rigel's; use it as it is"],
    ["other JSON", '{"clients": []}', 'in.csv: this is JSON, but no trace of torch.profiler: expected "traceEvents"'],
    [
      "nsys's database",
      "SQLite format 3\0",
      "in.csv: this is nsys's SQLite database; run: nsys stats --report cuda_gpu_trace --format csv FILE.nsys-rep",
    ],
    [
      "nsys's summary",
      "Time (%),Total Time (ns),Instances,Avg (ns),Name\n50,1,1,1,k\n",
      "in.csv: this is a summary of nsys, which has no single kernels; run: nsys stats --report cuda_gpu_trace --format csv FILE.nsys-rep",
    ],
    [
      "nsys's API trace",
      "Start (ns),Duration (ns),Name,Result,CorrID,Pid,Tid,T-Pri,Thread Name\n",
      "in.csv: this is the API trace of nsys, which has no kernels; run: nsys stats --report cuda_gpu_trace --format csv FILE.nsys-rep",
    ],
    [
      "nvprof's trace",
      '"Start","Duration","Grid X","Grid Y","Name"\n',
      "in.csv: this is a trace of nvprof; record with nsys instead, then run: nsys stats --report cuda_gpu_trace --format csv FILE.nsys-rep",
    ],
    [
      "a missing column",
      NSYS_HEADER.replace("GrdY,", ""),
      "in.csv:1: header: expected the columns of nsys's cuda_gpu_trace, GrdY missing",
    ],
    [
      "an unknown unit",
      NSYS_HEADER.replace("Duration (ns)", "Duration (fortnights)"),
      'in.csv:1: header: Duration: expected a unit of time (ns, us, ms, s), got "fortnights"',
    ],
    [
      "bad rows",
      `hello\n${NSYS_HEADER}${nsysRow(0)}${nsysRow(1, "k", "soon")}${nsysRow(2).replace("128,1,1", "1024,2,1")}${nsysRow(3).slice(0, 30)}`,
      'in.csv:4: Duration: expected a number, got "soon"\n' +
        "in.csv:5: BlkX, BlkY, BlkZ: expected at most 1024 threads, got 1024x2x1\n" +
        "in.csv:6: expected 20 fields as in the header, got 11\n" +
        "3 bad rows, nothing written; --skip-bad leaves them out",
    ],
    [
      "a decimal comma",
      `${NSYS_HEADER}${nsysRow(0, "k", '"12,5"')}`,
      "in.csv:2: Duration: 12,5 has a decimal comma; export it again with LC_ALL=C\n1 bad row, nothing written; --skip-bad leaves them out",
    ],
    [
      "a quote that never ends",
      `${NSYS_HEADER}${nsysRow(0)}${nsysRow(1, `"${"x".repeat(2 << 20)}`)}`,
      "in.csv: no valid CSV from there on: Max Record Size: record exceed the maximum number of tolerated bytes of 1048576 at line 3",
    ],
    [
      "times of which no gap can be told",
      `${NSYS_HEADER}${nsysRow(0)}${nsysRow(0).replace("0", "1e400")}`,
      "in.csv:3: Start: expected a time of at most 64 bits, got Infinity ns\n1 bad row, nothing written; --skip-bad leaves them out",
    ],
    [
      "a time that no tool can have measured",
      `${NSYS_HEADER}${nsysRow(0)}${nsysRow(0).replace("0", "1e23")}`,
      "in.csv:3: Start: expected a time of at most 64 bits, got 1e+23 ns\n1 bad row, nothing written; --skip-bad leaves them out",
    ],
    [
      "times of torch.profiler of which no gap can be told",
      JSON.stringify({
        traceEvents: [
          {
            ph: "X",
            cat: "kernel",
            name: "k",
            ts: 1e306,
            dur: 5,
            args: {
              device: 0,
              stream: 7,
              grid: [1, 1, 1],
              block: [32, 1, 1],
              "registers per thread": 3,
              "shared memory": 0,
            },
          },
          { ph: "X", cat: "cuda_runtime", name: "cudaLaunchKernel", ts: 1e307, dur: 5, args: { correlation: 2 } },
        ],
      }),
      'in.csv:1: "ts": expected microseconds, got 1e+307\n1 bad row, nothing written; --skip-bad leaves them out',
    ],
    [
      "a gigantic field",
      `${NSYS_HEADER}${nsysRow(0, "x".repeat(70_000))}`,
      "in.csv:2: Name: expected at most 65535 bytes, got 70000\n1 bad row, nothing written; --skip-bad leaves them out",
    ],
    [
      "something else",
      "a,b\n1,2\n",
      "in.csv: no known header line in it; expected a CSV of nsys (cuda_gpu_trace) or ncu, a trace of torch.profiler (JSON), or a kernel file of Orion's",
    ],
    [
      "gzip cut short",
      gzipSync(NSYS).subarray(0, 300),
      "in.csv: damaged or cut short gzip file (unexpected end of file)",
    ],
    [
      "text in Latin-1",
      Buffer.from(`${NSYS_HEADER}${nsysRow(0, "caf\u00e9")}`, "latin1"),
      "in.csv: at or after line 1: expected text in UTF-8",
    ],
  ])("%s", async (_, content, message) => {
    expect((await refusal(content)).slice(0, message.length)).toBe(message);
  });

  test("a column is called what it is called there", async () => {
    const rows = [
      changedRow(",8,1,1,", ",8,0,1,"),
      changedRow(",8,1,1,", ",8,x,1,"),
      changedRow("128,1,1,", "2048,1,1,"),
      changedRow(",32,0.000", ",256,0.000"),
      changedRow("0.000,0.000", "0.000,9.0"),
      changedRow("", "", "[CUDA memcpy X]"),
      changedRow("", "", " "),
    ];
    expect(await badRows(NSYS_HEADER.replace("GrdY", "grdY") + rows.join(""))).toEqual([
      "grdY: expected a whole number from 1 to 65535 for y, got 0",
      'grdY: expected a number, got "x"',
      "BlkX: expected a whole number from 1 to 1024 for x, got 2048",
      "Reg/Trd: expected a whole number from 0 to 255, got 256",
      "StcSMem, DymSMem: expected a whole number from 0 to 1048576, got 9000000",
      'Name: expected a copy or memset of nsys, got "[CUDA memcpy X]"',
      "Name: expected a name, got none",
    ]);
    const [header = "", units = "", first = ""] = readFileSync(fixture("ncu-2023-raw.csv"), "utf8").split("\n");
    const kernels = [
      first.replace('"(256, 1, 1)"', '"(256, 0, 1)"'),
      first.replace('"4,096"', '"0"'),
      first.replace('"16"', '"300"'),
      first.replace('"5.63"', '"5e12"'),
    ];
    expect(await badRows([header, units, ...kernels].join("\n"))).toEqual([
      "Block Size: expected a whole number from 1 to 1024 for y, got 0",
      "launch__grid_dim_x: expected a whole number from 1 to 2147483647 for x, got 0",
      "launch__registers_per_thread: expected a whole number from 0 to 255, got 300",
      "gpu__time_duration.sum: expected a whole number from 0 to 3600000000000, got 5000000000000000",
    ]);
    const args = { device: 0, stream: 7, grid: [1, 1, 1], block: [32, 1, 1], "registers per thread": 9 };
    const kernel = { ph: "X", cat: "kernel", name: "k", ts: 1, dur: 1, args: { ...args, "shared memory": 0 } };
    const events = [{ grid: [1, 0, 1] }, { block: [1024, 2, 1] }, { "registers per thread": 300 }].map((more) =>
      JSON.stringify({ ...kernel, args: { ...kernel.args, ...more } }),
    );
    expect(await badRows(`{"traceEvents": [\n${events.join(",\n")}]}`)).toEqual([
      '"grid": expected a whole number from 1 to 65535 for y, got 0',
      '"block": expected at most 1024 threads, got 1024x2x1',
      '"registers per thread": expected a whole number from 0 to 255, got 300',
    ]);
    const orion = readFileSync(fixture("orion-resnet50.csv"), "utf8").split("\n").slice(0, 1);
    expect(await badRows([...orion, "k,1,0,1,5e12", ",1,0,1,5"].join("\n"))).toEqual([
      "Duration: expected a whole number from 0 to 3600000000000, got 5000000000000",
      "Name: expected a name, got none",
    ]);
  });

  test("a report that its tool has to export first", async () => {
    using scratch = new Scratch();
    expect(async () => await imported(scratch.file("a.ncu-rep", "x"))).toThrow("run: ncu --import FILE.ncu-rep");
    expect(async () => await imported(scratch.file("a.nsys-rep", "x"))).toThrow("run: nsys stats --report");
  });

  test("of another tool is named", async () => {
    expect(await refusal(NSYS, { tool: "ncu" })).toBe(
      "in.csv: this is not a CSV page of ncu but a GPU trace of nsys (cuda_gpu_trace, gputrace); use rigel import nsys",
    );
    expect(await refusal("# rigel-profile 1\n", { tool: "nsys" })).toContain("already a profile of Rigel's");
  });

  test("a folder, and nothing", async () => {
    expect(async () => await imported(root)).toThrow("is a folder; name the exported file in it");
    expect(async () => await imported(join(root, "no-such-file"))).toThrow("cannot be read (ENOENT");
  });

  if (!mayBeDenied) console.warn("import.test.ts: root may read every file: no permission is not tested");
  test.skipIf(!mayBeDenied)("no permission", async () => {
    using scratch = new Scratch();
    const path = scratch.file("in.csv", NSYS);
    chmodSync(path, 0);
    for (const [args, message] of [
      [["import", path], `rigel: ${path}: cannot be read (EACCES`],
      [["profile", "show", path], `rigel: ${path}: cannot be read as a kernel profile (EACCES`],
    ] satisfies [string[], string][]) {
      await using child = Bun.spawn([...deniable, ...commandLine(), ...args], {
        env: plainEnvironment(),
        stdout: "pipe",
        stderr: "pipe",
      });
      expect(await child.stderr.text()).toStartWith(message);
      expect(await child.stdout.text()).toBe("");
      expect(await child.exited).toBe(2);
    }
  });
});

/** Semicolons between fields, and a comma in numbers with a fraction; kernel names keep theirs. */
function spreadsheet(text: string): string {
  const lines = text.split("\n").slice(3, 9);
  return lines
    .map((line) => {
      const [table = "", name = ""] = line.split(/,(?=")/);
      const fields = table
        .replaceAll(/(?<=,\d+)\.(?=\d{3},)/g, ":")
        .replaceAll(",", ";")
        .replaceAll(":", ",");
      return name === "" ? fields : `${fields};${name}`;
    })
    .join("\n");
}

describe.concurrent("the same text", () => {
  test.each<[string, string | Uint8Array]>([
    ["in UTF-16, little endian", Buffer.from(`\ufeff${NSYS}`, "utf16le")],
    ["in UTF-16, big endian", Buffer.from(`\ufeff${NSYS}`, "utf16le").swap16()],
    ["with a byte order mark and CRLF", `\ufeff${NSYS.replaceAll("\n", "\r\n")}`],
    ["gzipped", gzipSync(NSYS)],
    ["without the last line's end", NSYS.slice(0, NSYS.indexOf("\n\nProcessing"))],
    ["as a spreadsheet saves it where the comma is decimal", spreadsheet(NSYS)],
  ])("%s gives the same rows", async (_, content) => {
    using scratch = new Scratch();
    const path = join(scratch.path, "in");
    writeFileSync(path, content);
    const { rows } = await imported(path);
    expect(rows).toEqual((await imported(fixture("nsys-2025-cuda_gpu_trace.csv"))).rows);
  });
});

describe("the command line", () => {
  test("writes the profile to a file and a summary as JSON", async () => {
    using scratch = new Scratch();
    const out = join(scratch.path, "out.csv");
    const { status, stdout } = await rigel("import", fixture("torch-2.trace"), "-o", out, "--json");
    expect(JSON.parse(stdout)).toMatchObject({ schema: 1, out, operations: 4, kernels: 2, device: "NVIDIA H200" });
    expect((await rowsOf(out)).rows.length).toBe(4);
    expect(readdirSync(scratch.path)).toEqual(["out.csv"]);
    expect(status).toBe(0);
  });

  test("leaves nothing behind where a row is bad, and the file that was there as it was", async () => {
    using scratch = new Scratch();
    const out = scratch.file("out.csv", "before");
    const bad = scratch.file("bad.csv", NSYS_HEADER + nsysRow(0) + nsysRow(1, "k", "soon"));
    const { status, stdout, stderr } = await rigel("import", "nsys", bad, "-o", out);
    expect({ stdout, stderr }).toEqual({
      stdout: "",
      stderr:
        `rigel: ${bad}:3: Duration: expected a number, got "soon"\n` +
        "rigel: 1 bad row, nothing written; --skip-bad leaves them out\n",
    });
    expect(readFileSync(out, "utf8")).toBe("before");
    expect(readdirSync(scratch.path).toSorted()).toEqual(["bad.csv", "out.csv"]);
    expect(status).toBe(2);
  });

  test("says where it cannot write, and what is missing", async () => {
    using scratch = new Scratch();
    mkdirSync(join(scratch.path, "folder"));
    const folder = await rigel("import", fixture("torch-2.trace"), "-o", join(scratch.path, "folder"));
    expect(folder.stderr).toContain(`${join(scratch.path, "folder")}: cannot be written (`);
    const none = await rigel("import", "nsys");
    expect(none.stderr).toBe("rigel: rigel import nsys: expected the files to import; see rigel import --help\n");
    expect([folder.status, none.status]).toEqual([2, 2]);
  });

  test("does not take the place of what it reads", async () => {
    using scratch = new Scratch();
    const own = scratch.file("own.csv", NSYS_HEADER + nsysRow(0));
    const link = join(scratch.path, "link.csv");
    symlinkSync(own, link);
    const { status, stderr } = await rigel("import", own, "-o", link);
    expect(stderr).toBe(`rigel: --output: expected another file than what is read, got ${link}\n`);
    expect(readFileSync(own, "utf8")).toBe(NSYS_HEADER + nsysRow(0));
    expect(status).toBe(2);
  });

  test("writes to where a link leads: a file, or a device, which stays one", async () => {
    using scratch = new Scratch();
    const own = scratch.file("own.csv", NSYS_HEADER + nsysRow(0));
    const link = (name: string, to: string): string => {
      symlinkSync(to, join(scratch.path, name));
      return join(scratch.path, name);
    };
    const file = link("file", scratch.file("out.csv", "before"));
    const [written, nowhere, full] = await Promise.all([
      rigel("import", own, "-o", file),
      rigel("import", own, "-o", link("null", "/dev/null")),
      rigel("import", own, "-o", link("full", "/dev/full")),
    ]);
    expect((await rowsOf(join(scratch.path, "out.csv"))).rows.length).toBe(1);
    expect(full.stderr).toContain(`${join(scratch.path, "full")}: cannot be written (ENOSPC`);
    for (const name of ["file", "null", "full"])
      expect(lstatSync(join(scratch.path, name)).isSymbolicLink()).toBe(true);
    expect([written.status, nowhere.status, full.status]).toEqual([0, 0, 1]);
  });

  test("writes into a pipe", async () => {
    using scratch = new Scratch();
    const pipe = join(scratch.path, "pipe");
    expect(Bun.spawnSync(["mkfifo", pipe]).success).toBe(true);
    await using reader = Bun.spawn(["cat", pipe], { stdout: "pipe" });
    const own = scratch.file("own.csv", NSYS_HEADER + nsysRow(0));
    const { status, stderr } = await rigel("import", own, "-o", pipe);
    expect(status, stderr).toBe(0);
    expect(await reader.stdout.text()).toContain(RIGEL_HEADER);
  });

  test.each([[["-o", "out.csv"]], [[]]])("SIGTERM amid an import to %j leaves nothing behind", async (to) => {
    using scratch = new Scratch();
    const rows = Array.from({ length: 100_000 }, (_, row) => nsysRow(row * 10_000));
    scratch.file("in.csv", NSYS_HEADER + rows.join(""));
    const names = (): string[] => readdirSync(scratch.path).filter((name) => name !== "in.csv");
    await using child = start(["import", "in.csv", ...to], { cwd: scratch.path, env: { TMPDIR: scratch.path } });
    while (child.exitCode === null && names().length === 0) await Bun.sleep(1);
    child.kill("SIGTERM");
    // Unless it was done by then.
    expect([143, 0]).toContain(await child.exited);
    expect(names().filter((name) => name !== "out.csv")).toEqual([]);
  });

  test("every tool is in the help, with examples", async () => {
    const { stdout } = await rigel("import", "--help");
    for (const word of [...TOOLS, "Examples:", "--json"]) expect(stdout).toContain(word);
  });
});

/** Numbers from 0 to 1 that are the same in every run (mulberry32). */
function seeded(seed: number): () => number {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

/** Operations with the oddest names and largest numbers that a profile may hold. */
function anyOperation(random: () => number): Operation {
  const upTo = (most: number): number => Math.floor(random() * (most + 1));
  const one = <Value>(of: readonly Value[]): Value => of[upTo(of.length - 1)] ?? of[0] ?? expect.unreachable();
  const kind = one(OPERATION_KINDS);
  const letters = ["a", " ", ",", '"', "\n", "\r", "#", ";", "<", "\u00e9", "\u{1f680}", "\t", "::", "="];
  const text = (): string => Array.from({ length: upTo(12) }, () => one(letters)).join("");
  const shaped = kind === "kernel" && random() < 0.8;
  const size = (most: number): number => (shaped ? 1 + upTo(most - 1) : 0);
  const large = (): number => upTo(one([1, 1000, 2 ** 40]));
  return {
    name: `${text()}k${text()}`,
    kind,
    stream: upTo(31),
    grid: [size(2 ** 31 - 1), size(65_535), size(65_535)],
    block: [size(32), size(8), size(4)],
    registers: upTo(255),
    shared_bytes: upTo(2 ** 20),
    bytes: large(),
    duration_ns: upTo(3.6e12),
    gap_ns: upTo(3.6e12),
    family: one(FAMILIES),
    bound: one(BOUNDS),
    bound_reason: text(),
    sms: kind === "kernel" && !shaped ? 1 + upTo(200) : upTo(200),
    flops: upTo(Number.MAX_SAFE_INTEGER),
    dram_bytes: large(),
    request: upTo(1000),
  };
}

test("what is written is read back exactly, and the replay client reads it too", async () => {
  using scratch = new Scratch();
  const random = seeded(20);
  for (let round = 0; round < 40; round++) {
    const operations = Array.from({ length: 50 }, () => anyOperation(random));
    const path = join(scratch.path, `${round}.csv`);
    const file = new WholeFile(path);
    const facts = new Map([
      ["device", "NVIDIA H200"],
      ["odd", "a;b\nc=d"],
    ]);
    await file.write(factsLine(facts) + RIGEL_HEADER + operations.map(rigelRow).join(""));
    await file.finish();
    const read = await rowsOf(path);
    expect(read.rows).toEqual(operations);
    expect([read.facts.get("device"), read.facts.get("odd")]).toEqual(["NVIDIA H200", "a b c=d"]);
    if (round < 5) expect(await replayRefuses(scratch, path)).toBeUndefined();
  }
});

/** What a change of one byte may change besides the row it is in. */
function comparable(rows: Operation[], sameDevice: boolean): string[] {
  return rows.map(({ stream: _stream, gap_ns: _gap, request: _request, bound, bound_reason, sms, ...rest }) =>
    JSON.stringify(sameDevice ? { ...rest, bound, bound_reason, sms } : rest),
  );
}

function left(rows: string[], others: string[]): string[] {
  const rest = [...others];
  return rows.filter((row) => {
    const at = rest.indexOf(row);
    if (at >= 0) rest.splice(at, 1);
    return at < 0;
  });
}

function notesOf({ notes, files }: ImportSummary): string {
  return JSON.stringify([notes, files.map((file) => file.notes)]);
}

function droppedOf({ files }: ImportSummary): number {
  return files.reduce((sum, { dropped }) => Object.values(dropped).reduce((total, count) => total + count, sum), 0);
}

/**
 * No format has a check sum, so a digit or a letter that is still a digit or a letter cannot be noticed: the row has another
 * value or name. What must not happen is that rows or columns go missing without a word, that a change of one row changes
 * others, or that anything but a coded error that names the file is thrown.
 *
 * So each flip either is refused, or changes at most one row (its neighbours' gaps, which are differences of times, and the
 * numbers of streams and requests apart), or has its effect counted in `dropped` or told in `notes`.
 */
describe("one flipped bit in each byte", () => {
  const FILES: [string, number][] = [
    ["nsys-2025-cuda_gpu_trace.csv", 1],
    ["nsys-2021.1-gputrace.csv", 1],
    ["orion-resnet50.csv", 1],
    ["ncu-2023-raw.csv", 2],
    ["ncu-2024-details.csv", 5],
    ["nv-nsight-cu-cli-2019-details.csv", 3],
    ["torch-2.trace", 3],
    ["torch-1.8.trace", 1],
  ];
  test.each(FILES)("of %s, every %d bytes", async (name, every) => {
    using scratch = new Scratch();
    const path = join(scratch.path, "in");
    const out = join(scratch.path, "out.csv");
    const bytes = readFileSync(fixture(name));
    const whole = await imported(fixture(name));
    const random = seeded(7);
    const wrong: string[] = [];
    const outcomes = { refused: 0, same: 0, changed: 0, told: 0 };
    for (let at = 0; at < bytes.length; at += every) {
      const flipped = Buffer.from(bytes);
      flipped[at] = (flipped[at] ?? 0) ^ (1 << Math.floor(random() * 8));
      writeFileSync(path, flipped);
      const where = `byte ${at}: ${JSON.stringify(flipped.subarray(at - 8, at + 8).toString("latin1"))}`;
      try {
        const summary = await importProfiles({ ...DEFAULTS, files: [path], out });
        const { rows } = await rowsOf(out);
        const sameDevice = summary.device === whole.summary.device;
        const before = comparable(whole.rows, sameDevice);
        const after = comparable(rows, sameDevice);
        const [gone, come] = [left(before, after).length, left(after, before).length];
        const dropped = droppedOf(summary) - droppedOf(whole.summary);
        const told =
          notesOf(summary) !== notesOf(whole.summary) || (come <= 1 && gone > come && dropped >= gone - come);
        if (gone === 0 && come === 0) outcomes.same++;
        else if (gone === 1 && come === 1) outcomes.changed++;
        else if (told) outcomes.told++;
        else wrong.push(`${where}: ${gone} rows gone, ${come} come`);
      } catch (thrown) {
        if (thrown instanceof RigelError && thrown.message.includes(path)) outcomes.refused++;
        else wrong.push(`${where}: ${reason(thrown)}`);
      }
    }
    expect({ name, wrong }).toEqual({ name, wrong: [] });
    // Each way out is taken: a test in which all is refused would show nothing.
    expect(outcomes.refused * outcomes.same * outcomes.changed).toBeGreaterThan(0);
  });
});

/** Runs `rigel` and reads the most memory that it had; the operating system's own count includes that of its parent. */
async function measured(...args: string[]): Promise<{ stdout: string; status: number; peak_bytes: number }> {
  await using child = start(args);
  let peak_bytes = 0;
  const ended = Promise.all([child.stdout.text(), child.exited]);
  while (child.exitCode === null) {
    const text = await readFile(`/proc/${child.pid}/status`, "utf8").catch(() => "");
    const kilobytes = /^VmHWM:\s+(\d+) kB/m.exec(text)?.[1];
    peak_bytes = Math.max(peak_bytes, Number(kilobytes ?? 0) * 1024);
    await Promise.race([ended, Bun.sleep(20)]);
  }
  const [stdout, status] = await ended;
  return { stdout, status, peak_bytes };
}

/** Three commands that each read and write 200,000 rows, for which a machine under load takes minutes. */
const LIMIT_ms = 600_000;

test(
  "memory does not grow with the file: 200,000 rows in under 200 MB",
  async () => {
    // A million rows by hand: 118 to 147 MB, 15 to 22 s on two cores.
    using scratch = new Scratch();
    const path = join(scratch.path, "big.csv");
    const file = new WholeFile(path);
    const ROWS = 200_000;
    await file.write(NSYS_HEADER);
    for (let row = 0; row < ROWS; row++) {
      const name = `"void at::native::vectorized_elementwise_kernel<4, Functor<${row % 97}>>(int, ${"T, ".repeat(30)}int)"`;
      await file.write(nsysRow(row * 1000, name));
    }
    await file.finish();
    const out = join(scratch.path, "out.csv");
    for (const command of [
      ["import", "nsys", path, "-o", out, "--json"],
      ["profile", "show", out, "--json"],
    ]) {
      const { stdout, status, peak_bytes } = await measured(...command);
      expect(JSON.parse(stdout)).toMatchObject({ operations: ROWS, kernels: ROWS });
      expect(peak_bytes).toBeGreaterThan(20e6);
      expect(peak_bytes).toBeLessThan(200e6);
      expect(status).toBe(0);
    }

    // In a terminal it shows how far it is and how fast, and says at the end how fast it was.
    let seen = "";
    const decoder = new TextDecoder();
    await using child = Bun.spawn([...commandLine(), "import", path, "-o", out], {
      env: { ...plainEnvironment(), TERM: "xterm-256color" },
      terminal: { cols: 120, rows: 24, data: (_, bytes) => (seen += decoder.decode(bytes, { stream: true })) },
    });
    expect(await child.exited).toBe(0);
    // The last of what it has written may come after its end.
    await until(() => seen.includes(" taken") || undefined);
    child.terminal?.close();
    const text = Bun.stripANSI(seen);
    expect(text).toMatch(/\r\[#*\.*\] +\d+% \d+ rows\/s \S+/);
    expect(text).toMatch(
      /big\.csv: a GPU trace of nsys \(.*\): 200000 rows read in \d+\.\d s \(\d+ rows\/s\), 200000 taken/,
    );
  },
  LIMIT_ms,
);
