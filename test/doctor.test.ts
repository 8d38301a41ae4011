/** doctor.test.ts: what `rigel doctor` says of this machine, and what its checks say of machines that are not well. */

import { describe, expect, test } from "bun:test";
import { mkdirSync, readdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { z } from "zod";
import type { Device } from "../src/device.ts";
import {
  type Finding,
  type Folder,
  type Inspection,
  checkCache,
  checkDevices,
  checkDriver,
  checkLeftovers,
  checkLibrary,
  checkLimits,
  checkMps,
  checkPreemption,
  checkPreload,
  checkSegmentFolder,
  checkServer,
  checkShares,
  checkTrial,
  isLate,
  checkVersions,
  mountOf,
} from "../src/doctor-checks.ts";
import { Native } from "../src/native.ts";
import { commandLine } from "../src/self.ts";
import { Scratch, type Result, plainEnvironment, rigel, start } from "./rigel.ts";
import { until } from "./serving.ts";

/** Whether a mount can be made that nobody else sees. */
const canMount = Bun.spawnSync(["sh", "-c", "unshare -m mount -t tmpfs tmpfs /mnt"], { stderr: "ignore" }).success;

const documentSchema = z.object({
  schema: z.literal(1),
  ok: z.boolean(),
  findings: z.array(
    z.object({
      check: z.string(),
      status: z.enum(["ok", "warning", "problem"]),
      found: z.string().min(1),
      remedy: z.string().min(1).nullable(),
    }),
  ),
});

function documentOf(result: Result): z.infer<typeof documentSchema> {
  expect(result.stdout, result.stderr).toStartWith("{");
  return documentSchema.parse(JSON.parse(result.stdout));
}

async function doctor(args: string[], env: Record<string, string | undefined>): Promise<Result> {
  await using child = start(["doctor", ...args], { env });
  const [stdout, stderr, status] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
  return { status, stdout, stderr };
}

/** What a check has found. */
function foundBy({ findings }: { findings: Finding[] }, check: string): string {
  return findings.find((finding) => finding.check === check)?.found ?? "";
}

describe("the command", () => {
  test("finds this machine usable and shows it with a launch", async () => {
    // On a busy machine the best-effort program may come too late to be taken off the GPU for any of the requests.
    const result = await until(async () => {
      const one = await rigel("doctor", "--device", "simulated", "--json");
      return /taken off it [1-9]\d* times/.test(foundBy(documentOf(one), "preemption")) ? one : undefined;
    });
    const { ok, findings } = documentOf(result);
    // A second's worth, or more where the best-effort program came too late for those.
    expect(foundBy({ findings }, "launch")).toMatch(/ (60|240|960) requests /);
    expect(findings.find(({ check }) => check === "launch")?.status).toBe("ok");
    expect(findings.filter(({ status }) => status !== "ok").every(({ remedy }) => remedy !== null)).toBe(true);
    expect(ok).toBe(true);
    expect(result.status).toBe(0);
  });

  test("names what is wrong and its remedy, and exits with 1", async () => {
    using scratch = new Scratch();
    const result = await doctor(["--no-launch", "--segment", join(scratch.path, "missing")], {
      LD_PRELOAD: "/opt/libnvshare.so",
    });
    expect(result.stdout).toMatch(/^problem {2}segments {4}.*missing does not exist\n {21}remedy: /m);
    expect(result.stdout).toMatch(/^problem {2}preload {5}.*nvshare's/m);
    expect(result.stdout).toMatch(/^ok +preemption +not known: no launch has shown it/m);
    expect(result.stdout).toMatch(/\d+ ok, \d+ warnings?, 2 problems\n$/);
    expect(result.status).toBe(1);
  });

  // Where even root, to whom access() grants all, can make nothing.
  test("tries where its cache would be", async () => {
    const { stdout } = await doctor(["--no-launch"], { XDG_CACHE_HOME: "/proc/1/net" });
    expect(stdout).toMatch(
      /^warning {2}cache {7}\/proc\/1\/net\/rigel cannot be used: it cannot be written to, or made$/m,
    );
  });

  // What nothing can be in is not there, and is told about as that.
  test.each(["HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "TMPDIR"])("where %s is no folder", async (variable) => {
    const { status, stdout } = await doctor(["--no-launch"], { [variable]: "/dev/null" });
    expect(stdout).toMatch(/\d+ ok, \d+ warnings?, \d+ problems?\n$/);
    expect(status).toBeLessThan(2);
  });

  test("says why there is no library", async () => {
    const result = await doctor(["--json"], { RIGEL_LIB: "/nonexistent/librigel.so" });
    expect(documentOf(result)).toMatchObject({
      ok: false,
      findings: [{ check: "library", status: "problem", found: expect.stringContaining("/nonexistent/librigel.so") }],
    });
    expect(result.status).toBe(1);
  });

  test.skipIf(!canMount)("names a mount from which no library can be loaded (needs root)", async () => {
    using scratch = new Scratch();
    const library = join(scratch.path, "librigel.so");
    const script = 'mount -t tmpfs -o noexec tmpfs "$0" && cp "$1" "$0/librigel.so" && shift && exec "$@"';
    const { interposer } = (await Native.load()).files;
    const command = [...commandLine(), "doctor", "--json", "--no-launch"];
    await using child = Bun.spawn(["unshare", "-m", "sh", "-c", script, scratch.path, interposer, ...command], {
      env: { ...plainEnvironment(), RIGEL_LIB: library },
      stdin: "ignore",
      stdout: "pipe",
      stderr: "inherit",
    });
    expect(JSON.parse(await child.stdout.text())).toMatchObject({
      ok: false,
      findings: [
        {
          check: "library",
          status: "problem",
          found: `${library} lies on ${scratch.path}, which is mounted noexec: no program can load it`,
          remedy: expect.stringContaining("another mount"),
        },
      ],
    });
    expect(await child.exited).toBe(1);
  });

  test("says so when a launch does not work", async () => {
    const result = await doctor(["--json", "--device", "simulated"], { RIGEL_DISABLE: "1" });
    const { findings } = documentOf(result);
    expect(findings.find(({ check }) => check === "launch")).toMatchObject({
      status: "problem",
      found: expect.stringContaining("high did not attach: RIGEL_DISABLE=1 is set in its environment"),
    });
    expect(result.status).toBe(1);
  });

  test("SIGTERM amid its launch ends that too and leaves nothing behind", async () => {
    using scratch = new Scratch();
    const segments = join(scratch.path, "segments");
    mkdirSync(segments);
    await using child = start(["doctor", "--device", "simulated", "--segment", segments], {
      env: { TMPDIR: scratch.path },
    });
    while (child.exitCode === null && readdirSync(segments).length === 0) await Bun.sleep(1);
    child.kill("SIGTERM");
    expect(await child.exited).toBe(143);
    expect(readdirSync(scratch.path)).toEqual(["segments"]);
    while (readdirSync(segments).length > 0) await Bun.sleep(10);
  });

  test("is attached to the report of a launch whose client fails", async () => {
    using scratch = new Scratch();
    const config = scratch.file("jobs.json", {
      device: "simulated",
      clients: [
        { name: "a", class: "high", command: ["sh", "-c", "exit 3"], env: { LD_PRELOAD: "/usr/local/libvgpu.so" } },
      ],
    });
    const json = await rigel("launch", config, "--json");
    expect(JSON.parse(json.stdout)).toMatchObject({
      findings: expect.arrayContaining([expect.objectContaining({ check: "preload", status: "problem" })]),
    });
    const table = await rigel("launch", config);
    expect(table.stdout).toMatch(
      /^rigel doctor finds:\n(.*\n)*problem {2}preload {5}\/usr\/local\/libvgpu\.so \(LD_PRELOAD\)/m,
    );
    expect(table.status).toBe(3);
  });
});

/* ---- Machines that are not well */

const well: Inspection = {
  glibc: "2.36",
  library: "/usr/lib/x86_64-linux-gnu/libcuda.so.580.65.06",
  load_error: null,
  cuda_version: 13_000,
  init_error: 0,
  init_error_name: null,
  simulated: false,
  devices: [{ compute_mode: 0 }],
};
const MODULE = `NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder)
GCC version:  gcc version 12.2.0
`;
const h200: Device = {
  index: 0,
  name: "NVIDIA H200",
  uuid: "GPU-1",
  simulated: false,
  sms: 132,
  memory_bytes: 150_000_000_000,
  exclusive: false,
};
const ready = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0"].map((path) => ({
  path,
  exists: true,
  usable: true,
}));

/** The only finding. */
function only(findings: readonly Finding[]): Finding | undefined {
  expect(findings).toHaveLength(1);
  return findings[0];
}

describe("the driver", () => {
  test("that is well", () => {
    expect(only(checkDriver(well, MODULE))).toEqual({
      check: "driver",
      status: "ok",
      found: "libcuda 580.65.06, CUDA 13.0, kernel module 580.65.06",
      remedy: null,
    });
  });

  test.each<[string, Partial<Inspection>, string | undefined, Finding["status"], string]>([
    [
      "of two versions",
      { library: "/usr/lib/libcuda.so.570.1.2" },
      MODULE,
      "problem",
      "570.1.2 and the kernel module 580",
    ],
    ["that is missing in a container", { library: null, load_error: "no such file" }, MODULE, "problem", "not libcuda"],
    ["that is missing", { library: null, load_error: "no such file" }, undefined, "warning", "simulated GPU"],
    ["that another library replaces", { library: "/x/libshimcuda.so" }, MODULE, "warning", "stands in for libcuda"],
    [
      "that sees no device",
      { init_error: 100, init_error_name: "CUDA_ERROR_NO_DEVICE" },
      MODULE,
      "problem",
      "NO_DEVICE",
    ],
    ["that is a stub", { init_error: 34 }, undefined, "problem", "(34)"],
    ["that is simulated", { simulated: true }, undefined, "warning", "simulated GPU"],
    ["that is old", { cuda_version: 12_020 }, MODULE, "warning", "CUDA 12.2"],
  ])("%s", (_, changed, version, status, found) => {
    expect(only(checkDriver({ ...well, ...changed }, version))).toMatchObject({
      check: "driver",
      status,
      found: expect.stringContaining(found),
      remedy: expect.any(String),
    });
  });

  test("of CUDA's compatibility package may differ from the kernel module", () => {
    const compat = { ...well, library: "/usr/local/cuda/compat/libcuda.so.590.1.1" };
    expect(only(checkDriver(compat, MODULE))).toMatchObject({ status: "ok" });
  });
});

describe("devices", () => {
  test("that are well", () => {
    expect(only(checkDevices([h200], well, ready, 1, {}))).toMatchObject({
      status: "ok",
      found: "0: NVIDIA H200, GPU-1, 132 SMs, 140 GiB",
    });
  });

  test("whose nodes cannot be opened, or are missing", () => {
    const nodes = [
      { path: "/dev/nvidiactl", exists: true, usable: false },
      { path: "/dev/nvidia-uvm", exists: false, usable: false },
    ];
    expect(checkDevices([h200], well, nodes, 1, {}).map(({ status, found }) => [status, found])).toEqual([
      ["problem", "/dev/nvidiactl cannot be opened for reading and writing"],
      ["problem", "/dev/nvidia-uvm is missing, though the kernel module is loaded"],
      ["ok", expect.any(String)],
    ]);
  });

  test("that are hidden, or none", () => {
    const hidden = checkDevices([], well, ready, 8, { CUDA_VISIBLE_DEVICES: "GPU-x" });
    expect(only(hidden)?.found).toBe("8 GPUs are installed and programs see none (CUDA_VISIBLE_DEVICES=GPU-x)");
    expect(only(checkDevices([], well, [], undefined, {}))).toMatchObject({ status: "ok" });
  });

  test.each([
    [2, "problem", "prohibited"],
    [3, "warning", "exclusive"],
  ])("in compute mode %d", (compute_mode, status, found) => {
    const finding = only(checkDevices([h200], { ...well, devices: [{ compute_mode }] }, ready, 1, {}));
    expect(finding).toMatchObject({ status, found: expect.stringContaining(found) });
  });
});

test("MPS daemons", () => {
  const folder = "/tmp/nvidia-mps";
  expect(checkMps({ state: "none", folder })).toMatchObject({ status: "ok" });
  expect(checkMps({ state: "running", folder })).toMatchObject({ status: "warning" });
  expect(checkMps({ state: "unusable", folder, why: "it is somebody else's", isGone: false })).toMatchObject({
    status: "warning",
    found: expect.stringContaining("somebody else's"),
    remedy: expect.stringContaining("whoever started it should end it"),
  });
  expect(checkMps({ state: "unusable", folder, why: "nobody answers", isGone: true })).toMatchObject({
    status: "warning",
    remedy: expect.stringMatching(/^rm -r \/tmp\/nvidia-mps, .* or set CUDA_MPS_PIPE_DIRECTORY/),
  });
});

test("GPU shares are known where NVML is there and tells of every GPU", () => {
  expect(checkShares([{ name: "NVIDIA H200", answers: true }])).toMatchObject({ status: "ok" });
  const partly = [
    { name: "NVIDIA H200", answers: true },
    { name: "MIG 1g.18gb", answers: false },
  ];
  expect(checkShares(partly)).toMatchObject({
    status: "warning",
    found: expect.stringMatching(/use of MIG 1g\.18gb:/),
  });
  expect(checkShares("libnvidia-ml.so.1 cannot be loaded")).toMatchObject({
    status: "warning",
    found: expect.stringContaining("cannot be loaded"),
    remedy: expect.stringContaining("RIGEL_NVML"),
  });
});

test("preemption is what a launch has seen, never a guess", () => {
  const seen = { state: "on" as const, suspensions: 7, simulated: false, mps: false };
  expect(checkPreemption(ready, undefined)).toMatchObject({ found: expect.stringContaining("not known") });
  expect(checkPreemption([], { ...seen, state: "unknown" })).toMatchObject({
    found: expect.stringContaining("there is no /dev/nvidiactl"),
  });
  expect(checkPreemption(ready, seen)).toMatchObject({ status: "ok", found: expect.stringContaining("7 times") });
  expect(checkPreemption(ready, { ...seen, state: "off", mps: true })).toMatchObject({
    status: "warning",
    found: expect.stringContaining("under MPS"),
  });
});

describe("folders", () => {
  const folder: Folder = {
    path: "/dev/shm",
    exists: true,
    writable: true,
    private: true,
    free_bytes: 64 * 2 ** 20,
    total_bytes: 64 * 2 ** 20,
  };
  const segment = 5 * 2 ** 20;

  test.each<[string, Partial<Folder>, Finding["status"], string]>([
    ["has room", {}, "ok", "64.0 MiB of 64.0 MiB are free in /dev/shm, and a launch takes 5.0 MiB"],
    ["is nearly full", { free_bytes: 6 * 2 ** 20 }, "warning", "6.0 MiB"],
    ["is full", { free_bytes: 0 }, "problem", "0.0 MiB"],
    ["cannot be written to", { writable: false }, "problem", "cannot be written to"],
    ["is missing", { exists: false }, "problem", "does not exist"],
  ])("a segment folder that %s", (_, changed, status, found) => {
    expect(checkSegmentFolder({ ...folder, ...changed }, segment, 0)).toMatchObject({
      status,
      found: expect.stringContaining(found),
    });
  });

  test("what the simulated GPU takes counts", () => {
    const status = (free_bytes: number): Finding["status"] =>
      checkSegmentFolder({ ...folder, free_bytes }, segment, 4 * 2 ** 20).status;
    expect([status(8 * 2 ** 20), status(17 * 2 ** 20), status(18 * 2 ** 20)]).toEqual(["problem", "warning", "ok"]);
    expect(checkSegmentFolder(folder, segment, 4 * 2 ** 20).found).toContain(
      "a launch on the simulated GPU takes 9.0 MiB",
    );
  });

  test("caches: the first usable one; what others could change is not", () => {
    const open = { ...folder, path: "/a", private: false };
    const next = { ...folder, path: "/b" };
    expect(checkCache([folder, next])).toMatchObject({ status: "ok" });
    expect(checkCache([open, next])).toMatchObject({
      status: "warning",
      found: "/a cannot be used: others can change it, or own it",
      remedy: expect.stringContaining("goes to /b"),
    });
    expect(checkCache([open])).toMatchObject({ status: "problem" });
    expect(checkCache([{ ...next, exists: false, writable: false }])).toMatchObject({ status: "problem" });
    const unmade = { ...folder, path: "/a", exists: false, private: false, writable: false };
    expect(checkCache([unmade, next])).toMatchObject({
      status: "warning",
      found: "/a cannot be used: it cannot be written to, or made",
      remedy:
        "set XDG_CACHE_HOME to a folder that can be written to; until then what is compiled goes to /b, and what is learned is not kept",
    });
    expect(checkCache([{ ...folder, free_bytes: 15 * 2 ** 20 }])).toMatchObject({
      status: "warning",
      found: "15.0 MiB are free in /dev/shm",
    });
  });
});

describe("the library", () => {
  const mounts = `22 1 254:0 / / rw,relatime - ext4 /dev/sda rw
30 22 0:25 / /home/my\\040data rw,noexec,relatime - ext4 /dev/sdb rw
31 22 0:26 / /home rw,relatime - tmpfs tmpfs rw
`;

  test("lies on the innermost mount", () => {
    expect(mountOf("/home/my data/x.so", mounts)).toMatchObject({ where: "/home/my data" });
    expect(mountOf("/home/other/x.so", mounts)).toMatchObject({ where: "/home" });
    expect(mountOf("/homes/x.so", mounts)).toMatchObject({ where: "/" });
  });

  test.each([
    ["/usr/lib/librigel.so", "0.1.0", ["ok"]],
    ["/home/my data/librigel.so", "0.1.0", ["problem", "problem"]],
    ["/usr/lib/librigel.so", "0.0.9", ["problem"]],
  ])("%s of version %s", (path, version, statuses) => {
    expect(checkLibrary({ path, version }, null, "0.1.0", mounts).map(({ status }) => status)).toEqual(
      statuses.map((status) => expect.stringMatching(status)),
    );
  });
});

const isThere = (path: string): boolean => !path.startsWith("/gone");

describe("preloaded libraries", () => {
  test.each<[string, string | undefined, string | undefined, Finding["status"], string]>([
    ["HAMi's", undefined, "# comment\n/usr/local/vgpu/libvgpu.so\n", "problem", "/etc/ld.so.preload"],
    ["Orion's", "/root/orion/libinttemp.so", undefined, "problem", "Orion's"],
    ["a sanitizer", "/usr/lib/libasan.so.8", undefined, "warning", "sanitizer"],
    ["a missing one", "/gone/lib.so", undefined, "warning", "does not exist"],
    ["jemalloc", "/usr/lib/libjemalloc.so.2", undefined, "ok", "libjemalloc.so.2: nothing known to conflict"],
    ["none", undefined, undefined, "ok", "nothing but librigel.so"],
  ])("%s", (_, LD_PRELOAD, file, status, found) => {
    expect(only(checkPreload({ LD_PRELOAD }, file, isThere))).toMatchObject({
      status,
      found: expect.stringContaining(found),
    });
  });
});

test("versions of cuBLAS", () => {
  expect(checkVersions("2.36", ["/a/libcublas.so.12", "/b/libcublas.so.13"])[1]).toMatchObject({
    status: "ok",
    found: expect.stringContaining("cuBLAS 12, 13"),
  });
  expect(checkVersions("2.36", ["/a/libcublas.so.10"])[1]).toMatchObject({ status: "warning" });
});

test("limits of a container", () => {
  const none = { max: null, used: 0 };
  const here = { self: "7", pid: 7, namespace: "pid:[4026531836]" };
  expect(only(checkLimits(none, none, here))).toMatchObject({
    status: "ok",
    found: "memory without limit, threads without limit, the machine's own pid namespace",
  });
  expect(only(checkLimits({ max: 2 ** 30, used: 2 ** 29 + 1 }, none, here))?.found).toContain("1024 MiB of memory");
  expect(only(checkLimits(none, { max: 300, used: 100 }, here))?.status).toBe("warning");
  expect(only(checkLimits(none, none, { ...here, self: "4711" }))?.status).toBe("problem");
});

test("files of launches that are gone, of this user alone", () => {
  const names = [
    "rigel-0-1-0",
    "rigel-0-2-0",
    "rigel-sim-0-2",
    "rigel-5-2-0",
    "rigel-0-shared",
    "rigel-notes",
    "other",
  ];
  const found = checkLeftovers("/dev/shm", names, 0, (name, pid) => pid === 1 || name === "rigel-0-shared");
  expect(found).toMatchObject({ status: "warning", remedy: "rm /dev/shm/rigel-0-2-0 /dev/shm/rigel-sim-0-2" });
  expect(checkLeftovers("/dev/shm", ["rigel-0-1-0"], 0, () => true).status).toBe("ok");
});

test("the state of a simulated GPU is left once no segment beside it is live", () => {
  const machine = ["rigel-0-runsimulated", "rigel-sim-0-run"];
  // Others go on with that of a launch that has ended.
  const launch = ["rigel-0-2-0", "rigel-0-22-0", "rigel-sim-0-2"];
  const cases: [names: string[], live: string[], left: string[]][] = [
    [machine, ["rigel-0-runsimulated"], []],
    [machine, [], machine],
    [[...machine, "rigel-0-run0badbeef"], ["rigel-0-run0badbeef"], machine],
    [launch, ["rigel-0-2-0", "rigel-0-22-0"], []],
    [launch, ["rigel-0-22-0"], ["rigel-0-2-0", "rigel-sim-0-2"]],
  ];
  for (const [names, live, left] of cases) {
    const { remedy } = checkLeftovers("/d", names, 0, (name) => live.includes(name));
    expect(remedy).toBe(left.length === 0 ? null : `rm ${left.map((name) => `/d/${name}`).join(" ")}`);
  }
});

test("the server's folder and socket", () => {
  const folder = {
    path: "/run/rigel",
    exists: true,
    writable: true,
    private: true,
    free_bytes: 1,
    total_bytes: 1,
  };
  const socket = { path: "/run/rigel/serve.sock", exists: true, private: true, answers: true };
  const status = (one: Partial<Folder>, other: Partial<typeof socket>): Finding["status"] =>
    checkServer({ ...folder, ...one }, { ...socket, ...other }).status;
  expect([
    status({}, {}),
    status({}, { exists: false }),
    status({ exists: false, private: false }, { exists: false }),
    status({}, { answers: false }),
    status({ private: false }, {}),
    status({}, { private: false }),
  ]).toEqual(["ok", "ok", "ok", "warning", "problem", "problem"]);
});

test("leftovers are found in a real folder", async () => {
  using scratch = new Scratch();
  // Above the largest number that Linux gives a process.
  const maker = `${process.getuid?.() ?? 0}-4194305`;
  const names = [`rigel-${maker}-0`, `rigel-${maker}-0-counts-1`, `rigel-record-${maker}`];
  const files = names.map((name) => join(scratch.path, name));
  for (const file of files) writeFileSync(file, "");
  const result = await rigel("doctor", "--no-launch", "--segment", scratch.path);
  for (const file of files) expect(result.stdout).toMatch(new RegExp(`remedy: rm.* ${file}( |$)`, "m"));
  expect(result.status).toBe(0);
});

describe("the trial launch", () => {
  const client = {
    name: "high",
    class: "high" as const,
    exit_code: 0,
    stopped: false,
    attached: true,
    attach_problem: null,
    launches: 10,
    requests: { count: 60, p50_ms: 2.3 },
    preemption: { state: "on" as const, suspensions: 0 },
  };
  const report = { device: { name: "H200", simulated: false }, mps: false, clients: [client] };

  test.each([
    ["worked", report, "ok", "60 requests of the high one took 2.30 ms"],
    ["printed nothing", undefined, "problem", "ended with status 1 without a report: it said this"],
    [
      "had a client that did not attach",
      { ...report, clients: [{ ...client, attached: false, attach_problem: "no cuInit" }] },
      "problem",
      "high did not attach: no cuInit",
    ],
    ["had a client that failed", { ...report, clients: [{ ...client, exit_code: 7 }] }, "problem", "status 7"],
    ["saw no launches", { ...report, clients: [{ ...client, launches: 0 }] }, "problem", "none of its launches"],
  ])("%s", (_, trial, status, found) => {
    expect(checkTrial({ report: trial, status: 1, said: ["it said this"] })).toMatchObject({
      status,
      found: expect.stringContaining(found),
    });
  });

  test("is made again with more requests where the best-effort client came too late alone", () => {
    const best = { ...client, name: "best-effort", class: "best-effort" as const, stopped: true, exit_code: 143 };
    const late = { ...best, attached: false, launches: 0 };
    const is = (...clients: ((typeof report.clients)[number] | typeof best)[]): boolean =>
      isLate({ report: { ...report, clients }, status: 0, said: [] });
    expect([is(client, late), is(client, { ...late, attached: true })]).toEqual([true, true]);
    expect([is(client, best), is({ ...client, attached: false }, late), is({ ...client, exit_code: 7 }, late)]).toEqual(
      [false, false, false],
    );
    expect([is(client, { ...late, stopped: false }), is(client)]).toEqual([false, false]);
    expect(isLate({ report: undefined, status: null, said: [] })).toBe(false);
  });
});
