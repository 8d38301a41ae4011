/**
 * doctor.ts: `rigel doctor`: looks at the machine, has doctor-checks.ts judge what was found, and makes a short launch as the proof.
 *
 * Reads, tries folders by one in them that is gone at once, and starts nothing but programs of Rigel's own. A launch in which a client
 * fails soon or did not attach adds what is not well (`diagnose`) to its report, without the trial.
 */

import {
  accessSync,
  constants,
  existsSync,
  mkdtempSync,
  readFileSync,
  readdirSync,
  readlinkSync,
  rmdirSync,
  statfsSync,
} from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import type { Command } from "commander";
import packageJson from "../package.json" with { type: "json" };
import type { DeviceSelector } from "./config.ts";
import { type Device, Devices, type Environment } from "./device.ts";
import {
  type Finding,
  type Folder,
  type Inspection,
  type Limit,
  type Node,
  type Trial,
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
  findingLines,
  inspectionSchema,
  trialReportSchema,
} from "./doctor-checks.ts";
import { reason } from "./errors.ts";
import { onEnd } from "./interrupt.ts";
import { isAwaited } from "./join.ts";
import { progress } from "./log.ts";
import { findDaemon } from "./mps-daemon.ts";
import { LoadError, Native, cacheFolders } from "./native.ts";
import { entryAt } from "./path.ts";
import { Nvml } from "./nvml.ts";
import { defaultSegmentFolder, simulationState } from "./plan.ts";
import { segmentBytes } from "./segment.ts";
import { commandLine } from "./self.ts";
import { answers, runtimePath } from "./serve-access.ts";

const MOUNTS = "/proc/self/mountinfo";
const INSPECT_ms = 60_000;
/** A launch that waits for a GPU of a large host takes seconds; one that hangs is a finding. */
const TRIAL_ms = 120_000;
const TRIAL_LINES = 4;

const EXAMPLES = `
Examples:
  rigel doctor                                is everything here as Rigel needs it?
  rigel doctor --device 1                     make the trial launch on GPU 1
  rigel doctor --json | jq '.findings[] | select(.status != "ok")'`;

interface Flags {
  json?: true;
  launch: boolean;
  device?: DeviceSelector;
  segment?: string;
}

/** Adds `rigel doctor`. `deviceSelector` reads what --device gives. */
export function addDoctor(program: Command, deviceSelector: (text: string) => DeviceSelector): void {
  program
    .command("doctor")
    .description(
      "check the driver, GPUs, folders and limits, and that a short launch works; exit status 1 on a problem",
    )
    .option("--json", "print as JSON")
    .option("--no-launch", "leave the short launch of two small programs out")
    .option("--device <device>", "where to make it: auto, simulated, a device index, or a UUID", deviceSelector)
    .option("--segment <folder>", "folder for the shared-memory file (default: /dev/shm)")
    .addHelpText("after", EXAMPLES)
    .action(run);
}

async function run(flags: Flags): Promise<void> {
  const findings = await everything(flags);
  const ok = findings.every(({ status }) => status !== "problem");
  process.stdout.write(
    `${flags.json ? JSON.stringify({ schema: 1, version: packageJson.version, ok, findings }, null, 2) : findingsText(findings)}\n`,
  );
  process.exitCode = ok ? 0 : 1;
}

async function everything(flags: Flags): Promise<Finding[]> {
  let native: Native;
  try {
    native = await Native.load();
  } catch (thrown) {
    // Without the library there is nothing to look at the driver with.
    const refused = thrown instanceof LoadError ? { path: thrown.library, version: null } : undefined;
    return checkLibrary(refused, reason(thrown), packageJson.version, read(MOUNTS) ?? "");
  }
  const segmentFolder = flags.segment ?? defaultSegmentFolder(process.env);
  const { device = "auto" } = flags;
  const findings = await diagnose(native, { segmentFolder, environment: process.env, simulated: false, device });
  if (!flags.launch) return [...findings, checkPreemption(nodes(), undefined)];
  const trial = await tryLaunch(native, device, segmentFolder);
  const best = trial.report?.clients.find((client) => client.class === "best-effort");
  const seen = trial.report &&
    best && { ...best.preemption, simulated: trial.report.device.simulated, mps: trial.report.mps };
  return [...findings, checkPreemption(nodes(), seen), checkTrial(trial)];
}

/** What is looked at. */
interface World {
  segmentFolder: string;
  /** Of the clients. */
  environment: Environment;
  /** The clients are on the simulated GPU: the driver does not matter. */
  simulated: boolean;
  /** What a launch is to be on. */
  device: DeviceSelector;
}

/** Everything that can be found without a launch. */
export async function diagnose(native: Native, world: World): Promise<Finding[]> {
  const { environment, segmentFolder, simulated, device } = world;
  const inspected = await inspect(native);
  const leftovers = [...new Set([segmentFolder, defaultSegmentFolder(process.env)])].map((folder) =>
    checkLeftovers(
      folder,
      names(folder),
      process.getuid?.() ?? 0,
      // Of a launch that ends at this moment the file goes first, and then the process.
      (name, pid) =>
        (pid !== undefined && existsSync(`/proc/${pid}`)) ||
        native.isLive(join(folder, name)) ||
        isAwaited(join(folder, name)) ||
        !existsSync(join(folder, name)),
    ),
  );
  return [
    ...(simulated ? [] : await driverFindings(native, inspected, environment)),
    ...checkLibrary(
      { path: native.files.interposer, version: native.version },
      null,
      packageJson.version,
      read(MOUNTS) ?? "",
    ),
    ...checkPreload(environment, read("/etc/ld.so.preload"), existsSync),
    ...checkVersions(inspected.glibc, cublasLibraries(environment)),
    checkSegmentFolder(
      folderOf(segmentFolder),
      segmentBytes(native),
      device === "simulated" || inspected.simulated || inspected.devices.length === 0 ? native.simulatedBytes : 0,
    ),
    checkCache(cacheFolders().map(triedFolder)),
    ...checkLimits(limit("memory"), limit("pids"), {
      self: link("/proc/self"),
      pid: process.pid,
      namespace: link("/proc/self/ns/pid"),
    }),
    ...leftovers,
    await serverFinding(environment),
  ];
}

async function serverFinding(environment: Environment): Promise<Finding> {
  const folder = folderOf(runtimePath(environment));
  const path = join(folder.path, "serve.sock");
  const entry = entryAt(path);
  return checkServer(
    // Its own rule is stricter than that of other folders: nobody else may even look.
    { ...folder, private: folder.private && ((entryAt(folder.path)?.mode ?? 0) & 0o077) === 0 },
    {
      path,
      exists: entry !== undefined,
      private: entry !== undefined && entry.uid === process.getuid?.() && (entry.mode & 0o077) === 0,
      answers: entry !== undefined && (await answers(path)),
    },
  );
}

async function driverFindings(native: Native, inspected: Inspection, environment: Environment): Promise<Finding[]> {
  const module = read("/proc/driver/nvidia/version");
  const state = simulationState(tmpdir());
  const devices = await new Devices(native.files, { state, preset: "h200", mps: false })
    .real()
    .catch((thrown: unknown) => reason(thrown));
  const installed = module === undefined ? undefined : names("/proc/driver/nvidia/gpus").length;
  const seen = typeof devices === "string" ? [] : devices;
  const failed: Finding[] =
    typeof devices === "string"
      ? [{ check: "devices", status: "problem", found: devices, remedy: "see the findings about the driver" }]
      : [];
  const uuids = seen.map(({ uuid }) => uuid);
  return [
    ...checkDriver(inspected, module),
    ...failed,
    ...checkDevices(seen, inspected, nodes(), installed, environment),
    ...(seen.length > 0 ? [checkMps(await findDaemon(environment, uuids)), sharesFinding(seen)] : []),
  ];
}

function sharesFinding(devices: readonly Device[]): Finding {
  const nvml = Nvml.load();
  if (typeof nvml === "string") return checkShares(nvml);
  return checkShares(devices.map(({ name, uuid }) => ({ name, answers: nvml.samples(uuid, 0n) !== undefined })));
}

/** Asks the driver in a process of its own: it may end the process, or hang. */
async function inspect(native: Native): Promise<Inspection> {
  const child = Bun.spawn([native.files.replay, "--inspect"], {
    env: { ...process.env, RIGEL_SEGMENT: undefined, LD_PRELOAD: undefined },
    stdin: "ignore",
    stdout: "pipe",
    stderr: "pipe",
    timeout: INSPECT_ms,
    killSignal: "SIGKILL",
  });
  const [stdout, stderr] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
  try {
    return inspectionSchema.parse(JSON.parse(stdout));
  } catch {
    const ended =
      child.signalCode === null ? `ended with status ${child.exitCode}` : `was ended by ${child.signalCode}`;
    return {
      glibc: "of an unknown version",
      library: null,
      load_error: `a program that loads it and calls cuInit ${ended} (${stderr.trim()})`,
      cuda_version: 0,
      init_error: 0,
      init_error_name: null,
      simulated: false,
      devices: [],
    };
  }
}

/** Launches two replays for about a second: the very thing that users want to work. */
async function tryLaunch(native: Native, device: DeviceSelector, segmentFolder: string): Promise<Trial> {
  progress("making a short launch of two small programs");
  // Of the high program a second's worth of requests; more where the other one came too late to do anything beside those.
  for (const requests of [60, 240]) {
    const trial = await tryOnce(native, device, segmentFolder, requests);
    if (!isLate(trial)) return trial;
  }
  return await tryOnce(native, device, segmentFolder, 960);
}

async function tryOnce(
  native: Native,
  device: DeviceSelector,
  segmentFolder: string,
  requests: number,
): Promise<Trial> {
  const profile = (name: string): string => join(native.files.profiles, name);
  const config = JSON.stringify({
    device,
    policy: { name: "priority" },
    clients: [
      {
        name: "high",
        class: "high",
        replay: {
          profile: profile("h200-resnet50-infer-bs4.csv"),
          rate_per_s: 60,
          arrivals: "uniform",
          iterations: requests,
        },
      },
      {
        name: "best-effort",
        class: "best-effort",
        replay: { profile: profile("h200-resnet50-train-bs64.csv") },
      },
    ],
  });
  let kill: (() => void) | undefined;
  using _ = onEnd(() => kill?.());
  const child = Bun.spawn([...commandLine(), "launch", "-", "--json", "--segment", segmentFolder], {
    env: { ...process.env, NO_COLOR: "1" },
    stdin: Buffer.from(config),
    stdout: "pipe",
    stderr: "pipe",
    timeout: TRIAL_ms,
  });
  kill = () => child.kill();
  const [stdout, stderr, status] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
  const report = trialReportSchema.safeParse(parsed(stdout));
  return {
    report: report.success ? report.data : undefined,
    status: child.signalCode === null ? status : null,
    said: stderr.trimEnd().split("\n").slice(-TRIAL_LINES),
  };
}

function parsed(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

/* ---- Looking */

function read(path: string): string | undefined {
  try {
    return readFileSync(path, "utf8");
  } catch {
    return undefined;
  }
}

function link(path: string): string | undefined {
  try {
    return readlinkSync(path);
  } catch {
    return undefined;
  }
}

function names(folder: string): string[] {
  try {
    return readdirSync(folder).toSorted();
  } catch {
    return [];
  }
}

function can(path: string, mode: number): boolean {
  try {
    accessSync(path, mode);
    return true;
  } catch {
    return false;
  }
}

/** The driver's nodes: those there are, and those that must be. */
function nodes(): Node[] {
  const there = names("/dev").filter((name) => /^nvidia(\d+|ctl|-uvm|-uvm-tools)$/.test(name));
  return [...new Set(["nvidiactl", "nvidia-uvm", ...there])].map((name) => {
    const path = `/dev/${name}`;
    return { path, exists: existsSync(path), usable: can(path, constants.R_OK | constants.W_OK) };
  });
}

function folderOf(path: string): Folder {
  // Of one that is not there, the folder that it would be made in decides.
  const base = existing(path);
  const found = entryAt(path);
  const { bavail, blocks, bsize } = statfsSync(base);
  return {
    path,
    exists: found !== undefined,
    writable: can(base, constants.W_OK | constants.X_OK) && (found ?? entryAt(base))?.isDirectory() === true,
    private:
      found !== undefined && found.isDirectory() && found.uid === process.getuid?.() && (found.mode & 0o022) === 0,
    free_bytes: bavail * bsize,
    total_bytes: blocks * bsize,
  };
}

/** The folder itself, or the one that it would be made in. */
function existing(path: string): string {
  let base = path;
  while (!existsSync(base) && dirname(base) !== base) base = dirname(base);
  return base;
}

/** Not on the word of access(), which does not know of all that may be in the way. */
function triedFolder(path: string): Folder {
  const folder = folderOf(path);
  if (!folder.writable) return folder;
  try {
    rmdirSync(mkdtempSync(join(existing(path), "rigel-doctor-")));
    return folder;
  } catch {
    return { ...folder, writable: false };
  }
}

/** cuBLAS where the toolkit, the distribution and Python packages put it. */
function cublasLibraries(environment: Environment): string[] {
  const machine = process.arch === "arm64" ? "aarch64-linux-gnu" : "x86_64-linux-gnu";
  const path = (environment["LD_LIBRARY_PATH"] ?? "").split(":").filter((folder) => folder !== "");
  const prefixes = [environment["VIRTUAL_ENV"], environment["CONDA_PREFIX"], "/usr/local", "/usr", "/opt/conda"];
  const python = prefixes.flatMap((prefix) =>
    prefix === undefined
      ? []
      : names(join(prefix, "lib"))
          .filter((name) => name.startsWith("python3"))
          .flatMap((name) => ["site-packages", "dist-packages"].map((packages) => join(prefix, "lib", name, packages)))
          .flatMap((packages) => names(join(packages, "nvidia")).map((part) => join(packages, "nvidia", part, "lib"))),
  );
  const cuda = names("/usr/local")
    .filter((name) => name.startsWith("cuda"))
    .map((name) => join("/usr/local", name, "lib64"));
  const folders = [...path, ...cuda, `/usr/lib/${machine}`, "/usr/lib64", ...python];
  return [...new Set(folders)].flatMap((folder) =>
    names(folder)
      .filter((name) => /^libcublas\.so\.\d+$/.test(name))
      .map((name) => join(folder, name)),
  );
}

const CGROUPS = "/sys/fs/cgroup";

/** The tightest limit among the control groups that this process is in; of cgroup v2, or of v1's controller. */
function limit(controller: "memory" | "pids"): Limit {
  const lines = (read("/proc/self/cgroup") ?? "").split("\n").map((line) => line.split(":"));
  const v1 = lines.find(([, names_]) => names_?.split(",").includes(controller));
  const v2 = lines.find(([number]) => number === "0");
  const [maxFile, usedFile] =
    controller === "memory" && v1
      ? ["memory.limit_in_bytes", "memory.usage_in_bytes"]
      : [`${controller}.max`, `${controller}.current`];
  const root = v1 ? join(CGROUPS, controller) : CGROUPS;
  let tightest: Limit = { max: null, used: 0 };
  // In a container what is mounted may be its own group, whatever the path says: the root is looked at in any case.
  for (let path = (v1 ?? v2)?.[2] ?? "/"; ; path = dirname(path)) {
    const max = Number.parseInt(read(join(root, path, maxFile)) ?? "", 10);
    const used = Number.parseInt(read(join(root, path, usedFile)) ?? "", 10);
    // Without a limit v2 says "max", and v1 a number beyond any memory.
    const limited = Number.isFinite(max) && max < 2 ** 60 && Number.isFinite(used);
    if (limited && (tightest.max === null || max - used < tightest.max - tightest.used)) tightest = { max, used };
    if (path === "/" || path === ".") return tightest;
  }
}

/* ---- Saying it */

/** Findings as people read them, and how many there are of each kind. */
function findingsText(findings: readonly Finding[]): string {
  const count = (status: Finding["status"]): number => findings.filter((one) => one.status === status).length;
  return [
    ...findings.flatMap(findingLines),
    "",
    `${count("ok")} ok, ${count("warning")} ${count("warning") === 1 ? "warning" : "warnings"}, ` +
      `${count("problem")} ${count("problem") === 1 ? "problem" : "problems"}`,
  ].join("\n");
}
