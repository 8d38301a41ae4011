/**
 * doctor-checks.ts: what `rigel doctor` judges, one function a subject: from the texts, paths and numbers that it is given, to findings.
 *
 * Pure: none looks at the machine (doctor.ts does), so that tests can show each of them a machine that is not well.
 */

import { basename, dirname } from "node:path";
import { z } from "zod";
import { disabling } from "./attachment.ts";
import { type Device, type Environment, moduleVersion } from "./device.ts";
import type { findDaemon } from "./mps-daemon.ts";

/** One thing that was looked at. */
export interface Finding {
  /** What it is about: driver, devices, sharing, ... */
  check: string;
  status: "ok" | "warning" | "problem";
  /** What was found, in words. */
  found: string;
  /** What to do about it; null where nothing has to be done. */
  remedy: string | null;
}

/** One finding in one or two lines. */
export function findingLines({ check, status, found, remedy }: Finding): string[] {
  return [
    `${status.padEnd(7)}  ${check.padEnd(10)}  ${found}`,
    ...(remedy === null ? [] : [`${" ".repeat(21)}remedy: ${remedy}`]),
  ];
}

const fine = (check: string, found: string): Finding => ({ check, status: "ok", found, remedy: null });
const warning = (check: string, found: string, remedy: string): Finding => ({
  check,
  status: "warning",
  found,
  remedy,
});
const problem = (check: string, found: string, remedy: string): Finding => ({
  check,
  status: "problem",
  found,
  remedy,
});

/* ---- The driver and its devices */

/** What `rigel-replay --inspect` prints: native/replay/inspect.h. */
export const inspectionSchema = z.object({
  glibc: z.string(),
  library: z.string().nullable(),
  load_error: z.string().nullable(),
  /** 1000 times the major version and 10 times the minor one; 0: not known. */
  cuda_version: z.int(),
  init_error: z.int(),
  init_error_name: z.string().nullable(),
  simulated: z.boolean(),
  devices: z.array(z.object({ compute_mode: z.int() })),
});
export type Inspection = z.infer<typeof inspectionSchema>;

/** What to do about an error of cuInit: CUDA driver API, `CUresult`. */
const INIT_REMEDIES: Readonly<Record<number, string>> = {
  34: "the stub library that comes with the CUDA toolkit was loaded; take its folder (stubs) out of LD_LIBRARY_PATH",
  46: "the GPU is taken or unavailable: look for a program in exclusive mode, or reset the GPU",
  100: "check CUDA_VISIBLE_DEVICES, and in a container that it was started with its GPUs (docker run --gpus all)",
  802: "the system is not ready: on machines with NVSwitch the fabric manager has to run (nvidia-fabricmanager)",
  803: "libcuda and the kernel module are of different versions: reboot, or load the module that belongs to libcuda",
  804: "the compatibility package of CUDA does not support this GPU: take its folder (compat) out of LD_LIBRARY_PATH",
  999: "see `dmesg | grep NVRM`; the nvidia-uvm module has to be loaded (nvidia-modprobe -u)",
};

const CUDA_NAMES_SINCE = 12_030;

/** libcuda, and the kernel module it talks to. `version` is the text of /proc/driver/nvidia/version, where there is one. */
export function checkDriver(driver: Inspection, version: string | undefined): Finding[] {
  const kernel = moduleVersion(version);
  if (driver.simulated)
    return [
      warning(
        "driver",
        `the libcuda.so.1 that programs find is Rigel's simulated GPU, ${driver.library}`,
        "take its folder out of LD_LIBRARY_PATH; launches put it there themselves",
      ),
    ];
  if (driver.load_error !== null)
    return [
      kernel === undefined
        ? warning(
            "driver",
            `no NVIDIA driver: ${driver.load_error}; launches run on the simulated GPU`,
            "on a machine with a GPU install NVIDIA's driver",
          )
        : problem(
            "driver",
            `the kernel module ${kernel} is loaded, but not libcuda: ${driver.load_error}`,
            "install the driver's libraries of the same version; in a container use NVIDIA's container toolkit " +
              "(docker run --gpus all, NVIDIA_DRIVER_CAPABILITIES=compute,utility)",
          ),
    ];
  const file = driver.library ?? "libcuda.so.1";
  const own = /^libcuda\.so\.(\d+\.\d+(?:\.\d+)?)$/.exec(basename(file))?.[1];
  const cuda = `CUDA ${Math.floor(driver.cuda_version / 1000)}.${Math.floor((driver.cuda_version % 1000) / 10)}`;
  const found: Finding[] = [];
  if (own !== undefined && kernel !== undefined && own !== kernel && !dirname(file).split("/").includes("compat"))
    found.push(
      problem("driver", `libcuda is ${own} and the kernel module ${kernel} (${file})`, INIT_REMEDIES[803] ?? ""),
    );
  if (own === undefined && !/^libcuda\.so(\.1)?$/.test(basename(file)))
    found.push(
      warning(
        "driver",
        `another library stands in for libcuda.so.1: ${file}`,
        "it may hold or change launches as well; take its folder out of LD_LIBRARY_PATH to have Rigel alone",
      ),
    );
  if (driver.init_error !== 0)
    found.push(
      problem(
        "driver",
        `cuInit fails with ${driver.init_error_name ?? "an unknown error"} (${driver.init_error}), libcuda ${file}`,
        INIT_REMEDIES[driver.init_error] ?? "see `dmesg | grep NVRM` and NVIDIA's list of driver API errors",
      ),
    );
  else if (driver.cuda_version > 0 && driver.cuda_version < CUDA_NAMES_SINCE)
    found.push(
      warning(
        "driver",
        `${cuda}: kernels' names cannot be asked for before CUDA 12.3, so each process learns their durations alone, and the gate ` +
          "cuts no CUDA graph and holds NCCL's kernels in one",
        "update the driver where that matters",
      ),
    );
  const kernelText = kernel === undefined ? "the kernel module's version is not known" : `kernel module ${kernel}`;
  return found.length > 0 ? found : [fine("driver", `libcuda ${own ?? file}, ${cuda}, ${kernelText}`)];
}

/** A device node under /dev. */
export interface Node {
  path: string;
  exists: boolean;
  /** Can be opened for reading and writing. */
  usable: boolean;
}

/** The GPUs that programs see. `installed`: how many /proc/driver/nvidia/gpus lists; undefined without a driver. */
export function checkDevices(
  devices: readonly Device[],
  driver: Inspection,
  nodes: readonly Node[],
  installed: number | undefined,
  environment: Environment,
): Finding[] {
  const found: Finding[] = nodes.flatMap(({ path, exists, usable }) =>
    exists && !usable
      ? [
          problem(
            "devices",
            `${path} cannot be opened for reading and writing`,
            `give this user access (ls -l ${path}; often the group video), or in a container start it with its GPUs`,
          ),
        ]
      : [],
  );
  const hidden = environment["CUDA_VISIBLE_DEVICES"];
  for (const node of ["/dev/nvidiactl", "/dev/nvidia-uvm"])
    if (installed !== undefined && nodes.some(({ path, exists }) => path === node && !exists))
      found.push(
        problem(
          "devices",
          `${node} is missing, though the kernel module is loaded`,
          node.endsWith("uvm") ? "run nvidia-modprobe -u -c 0 as root" : "run nvidia-modprobe as root",
        ),
      );
  if (devices.length === 0 && (installed ?? 0) > 0)
    found.push(
      problem(
        "devices",
        `${installed} GPUs are installed and programs see none` +
          (hidden === undefined ? "" : ` (CUDA_VISIBLE_DEVICES=${hidden})`),
        hidden === undefined
          ? "see the finding about the driver; in a container start it with its GPUs"
          : "unset CUDA_VISIBLE_DEVICES, or name GPUs that are there",
      ),
    );
  if (devices.length === 0 && (installed ?? 0) === 0)
    found.push(fine("devices", "no GPU; launches run on the simulated one"));
  for (const { index, name, uuid, sms, memory_bytes } of devices) {
    const text = `${index}: ${name}, ${uuid}, ${sms} SMs, ${Math.round(memory_bytes / 2 ** 30)} GiB`;
    const mode = driver.devices[index]?.compute_mode ?? 0;
    if (mode === 2)
      found.push(
        problem("devices", `${text}: its compute mode is prohibited`, `nvidia-smi -i ${uuid} -c DEFAULT, as root`),
      );
    else if (mode === 1 || mode === 3)
      found.push(
        warning(
          "devices",
          `${text}: its compute mode is exclusive, so that only one process can use it without MPS`,
          `nvidia-smi -i ${uuid} -c DEFAULT, as root, or "sharing": "mps"`,
        ),
      );
    else found.push(fine("devices", text));
  }
  return found;
}

/** Whether an MPS control daemon stands where launches look for one. */
export function checkMps(daemon: Awaited<ReturnType<typeof findDaemon>>): Finding {
  switch (daemon.state) {
    case "none":
      return fine(
        "sharing",
        `no MPS daemon at ${daemon.folder}: "sharing": "auto" is time slices, or a daemon of the launch's own where best-effort kernels are short`,
      );
    case "running":
      return warning(
        "sharing",
        `an MPS daemon runs at ${daemon.folder}: "sharing": "auto" uses it (unless nobody does and kernels are known to be ` +
          "long), and under MPS best-effort clients can only be held at the gate, not taken off the GPU",
        '"sharing": "time-slice" keeps clients out of it',
      );
    case "unusable":
      return warning(
        "sharing",
        `${daemon.folder}: ${daemon.why}; clients that share in time slices do not use it`,
        daemon.isGone
          ? `rm -r ${daemon.folder}, which is left of a daemon that has ended, or set CUDA_MPS_PIPE_DIRECTORY to another folder`
          : "whoever started it should end it (echo quit | nvidia-cuda-mps-control), or set CUDA_MPS_PIPE_DIRECTORY",
      );
  }
}

/** Whether it can be told what clients use of the GPUs. `nvml`: why NVML cannot be asked, or which GPUs it answers for. */
export function checkShares(nvml: string | readonly { name: string; answers: boolean }[]): Finding {
  if (typeof nvml === "string")
    return warning(
      "shares",
      `what clients use of a GPU is not known: ${nvml}`,
      "install the driver's NVML (in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility), or name it with RIGEL_NVML",
    );
  const silent = nvml.filter(({ answers }) => !answers).map(({ name }) => name);
  return silent.length > 0
    ? warning(
        "shares",
        `NVML does not tell what processes use of ${silent.join(", ")}: clients' GPU shares are not known there`,
        "nothing else depends on it; MIG devices and some virtual GPUs do not tell",
      )
    : fine("shares", "NVML tells what processes use of the GPUs");
}

/** Whether best-effort clients can be taken off the GPU: only what a launch has seen says so. */
export function checkPreemption(
  nodes: readonly Node[],
  seen:
    { state: "unknown" | "on" | "off" | "stops"; suspensions: number; simulated: boolean; mps: boolean } | undefined,
): Finding {
  const control = nodes.find(({ path }) => path === "/dev/nvidiactl");
  const where = seen?.simulated ? "on the simulated GPU" : "on this GPU";
  if (seen?.state === "on")
    return fine(
      "preemption",
      `works ${where}: in the launch just made the best-effort client was taken off it ${seen.suspensions} times`,
    );
  if (seen?.state === "stops")
    return fine(
      "preemption",
      `by stops ${where}${seen.mps ? ", under MPS" : ""}: in the launch just made the best-effort client's streams stopped ${seen.suspensions} times`,
    );
  if (seen?.state === "off")
    return warning(
      "preemption",
      `did not work ${where} in the launch just made${seen.mps ? ", which was under MPS" : ""}: launches are held at the gate`,
      seen.mps
        ? '"sharing": "time-slice" keeps clients out of MPS'
        : "the gate still protects the high client; tried is driver 580 (docs/limits.md says more)",
    );
  const access =
    control === undefined || !control.exists
      ? "there is no /dev/nvidiactl here"
      : control.usable
        ? "/dev/nvidiactl can be opened, which it needs"
        : "/dev/nvidiactl cannot be opened, which it needs";
  return fine("preemption", `not known: no launch has shown it (${access})`);
}

/* ---- Folders and the library */

/** What is known of a folder. */
export interface Folder {
  path: string;
  exists: boolean;
  writable: boolean;
  /** Owned by this user and writable by nobody else. */
  private: boolean;
  free_bytes: number;
  total_bytes: number;
}

const mib = (bytes: number): string => `${(bytes / 2 ** 20).toFixed(bytes < 100 * 2 ** 20 ? 1 : 0)} MiB`;

/**
 * The folder of segments: `segment_bytes` is what one takes, as long as a launch lasts (a comparison has one at a time), `simulated_bytes`
 * what the simulated GPU takes beside it, 0 on a real one.
 */
export function checkSegmentFolder(folder: Folder, segment_bytes: number, simulated_bytes: number): Finding {
  const { path, free_bytes, total_bytes } = folder;
  if (!folder.exists || !folder.writable)
    return problem(
      "segments",
      `${path} ${folder.exists ? "cannot be written to" : "does not exist"}`,
      "name another folder with --segment DIR, best one in memory",
    );
  const launch_bytes = segment_bytes + simulated_bytes;
  const launch = simulated_bytes > 0 ? "a launch on the simulated GPU" : "a launch";
  const room = `${mib(free_bytes)} of ${mib(total_bytes)} are free in ${path}, and ${launch} takes ${mib(launch_bytes)}`;
  if (free_bytes < launch_bytes)
    return problem("segments", room, "free some, name another folder with --segment DIR, or docker run --shm-size=1g");
  if (free_bytes < 2 * launch_bytes)
    return warning("segments", room, "a second launch has no room; docker run --shm-size=1g, or --segment DIR");
  return fine("segments", room);
}

/** What kernels' durations and the unpacked library of the single file may take, and some more. */
const CACHE_bytes = 16 * 2 ** 20;

/** The folders where Rigel keeps what outlives a launch, best first. */
export function checkCache(folders: readonly Folder[]): Finding {
  const good = folders.find((folder) => folder.writable && (folder.private || !folder.exists));
  if (!good)
    return problem(
      "cache",
      `no folder can be used to keep things in: ${folders.map(({ path }) => path).join(", ")}`,
      "set XDG_CACHE_HOME to a folder that can be written to",
    );
  const bad = folders.slice(0, folders.indexOf(good));
  const shared = bad.some((one) => one.exists && !one.private);
  if (bad.length > 0)
    return warning(
      "cache",
      `${bad.map(({ path }) => path).join(" and ")} cannot be used: ${shared ? "others can change it, or own it" : "it cannot be written to, or made"}`,
      `${shared ? "chmod 700 it, or remove it" : "set XDG_CACHE_HOME to a folder that can be written to"}; until then what is compiled goes to ${good.path}, and what is learned is not kept`,
    );
  if (good.free_bytes < CACHE_bytes)
    return warning(
      "cache",
      `${mib(good.free_bytes)} are free in ${good.path}`,
      "free some, or set XDG_CACHE_HOME to a folder with room; until then what is measured may not be kept",
    );
  return fine("cache", `${good.path} (${mib(good.free_bytes)} free)`);
}

/** The mount that holds a path: where, and its options. `mountinfo` is the text of /proc/self/mountinfo. */
export function mountOf(path: string, mountinfo: string): { where: string; options: string[] } | undefined {
  let best: { where: string; options: string[] } | undefined;
  for (const line of mountinfo.split("\n")) {
    const [, , , , raw, options] = line.split(" ");
    if (raw === undefined || options === undefined) continue;
    // Spaces in it are written in octal.
    const where = raw.replaceAll(/\\([0-7]{3})/g, (_, digits: string) =>
      String.fromCharCode(Number.parseInt(digits, 8)),
    );
    const inside = where === "/" || path === where || path.startsWith(`${where}/`);
    // Of two mounts on the same place the later one is seen.
    if (inside && where.length >= (best?.where.length ?? 0)) best = { where, options: options.split(",") };
  }
  return best;
}

/**
 * The library that is preloaded. `failure` is what loading it here said, or null; `version` is the package's. Of one that cannot be
 * loaded the own version is null.
 */
export function checkLibrary(
  library: { path: string; version: string | null } | undefined,
  failure: string | null,
  version: string,
  mountinfo: string,
): Finding[] {
  const found: Finding[] = [];
  const mount = library && mountOf(library.path, mountinfo);
  if (library && mount?.options.includes("noexec"))
    found.push(
      problem(
        "library",
        `${library.path} lies on ${mount.where}, which is mounted noexec: no program can load it`,
        "move Rigel, or set XDG_CACHE_HOME (for the single file), to a folder on another mount",
      ),
    );
  if (library && /[\s:]/.test(library.path))
    found.push(
      problem(
        "library",
        `LD_PRELOAD cannot name ${library.path}: it has a space or colon`,
        "move Rigel, or set RIGEL_LIB to a copy",
      ),
    );
  if (library && library.version !== null && library.version !== version)
    found.push(
      problem(
        "library",
        `${library.path} is of version ${library.version}, the command line of ${version}`,
        "unset RIGEL_LIB, or build it anew (make -C native)",
      ),
    );
  if (found.length > 0) return found;
  if (!library || library.version === null)
    return [
      problem(
        "library",
        failure ?? "librigel.so is not there",
        "see the message; `make -C native` shows what a build says",
      ),
    ];
  return [fine("library", `${library.path}, version ${library.version}`)];
}

/* ---- Other preloaded libraries */

/**
 * Libraries that stand between programs and the driver, too, by the beginning of their names: HAMi-core, nvshare, KubeShare's
 * Gemini, Tencent's vcuda-controller, XSched, Orion; each project's own documentation names its file.
 */
const INTERPOSERS: readonly (readonly [start: string, whose: string])[] = [
  ["libvgpu", "HAMi"],
  ["libnvshare", "nvshare"],
  ["libgemhook", "KubeShare"],
  ["libcuda-control", "vcuda-controller"],
  ["libshimcuda", "XSched"],
  ["libinttemp", "Orion"],
];
const SANITIZERS = /^lib(clang_rt\.)?(asan|tsan|msan|ubsan|lsan)/;

/** What LD_PRELOAD and /etc/ld.so.preload bring into clients besides librigel.so. */
export function checkPreload(
  environment: Environment,
  preloadFile: string | undefined,
  exists: (path: string) => boolean,
): Finding[] {
  const named = [
    ...(environment["LD_PRELOAD"] ?? "").split(/[\s:]+/).map((path) => ({ path, from: "LD_PRELOAD" })),
    ...(preloadFile ?? "")
      .replaceAll(/#.*$/gm, "")
      .split(/[\s:]+/)
      .map((path) => ({ path, from: "/etc/ld.so.preload" })),
  ].filter(({ path }) => path !== "");
  const found = named.flatMap(({ path, from }): Finding[] => {
    const name = basename(path);
    const whose = INTERPOSERS.find(([start]) => name.startsWith(start))?.[1];
    const without = from === "LD_PRELOAD" ? "take it out of LD_PRELOAD" : "take its line out of /etc/ld.so.preload";
    if (whose !== undefined)
      return [
        problem(
          "preload",
          `${path} (${from}) is ${whose}'s: it stands in front of the same driver functions, and the two schedule against each other`,
          `${without}, or run these programs without Rigel`,
        ),
      ];
    if (SANITIZERS.test(name))
      return [
        warning(
          "preload",
          `${path} (${from}): a sanitizer wants to come first, and librigel.so does`,
          "ASAN_OPTIONS=verify_asan_link_order=0 lets AddressSanitizer come second; for a bare program set RIGEL_DISABLE=1",
        ),
      ];
    if (path.includes("/") && !exists(path))
      return [
        warning(
          "preload",
          `${path} (${from}) does not exist; the loader says so in every program and goes on`,
          without,
        ),
      ];
    return [];
  });
  const disabled = disabling(environment);
  if (disabled !== undefined)
    found.push(
      warning("preload", `RIGEL_DISABLE=${disabled} is set: no program becomes a client`, "unset RIGEL_DISABLE"),
    );
  if (found.length > 0) return found;
  const harmless = named.map(({ path }) => basename(path)).filter((name) => !name.startsWith("librigel"));
  return [
    fine(
      "preload",
      harmless.length > 0 ? `${harmless.join(", ")}: nothing known to conflict` : "nothing but librigel.so",
    ),
  ];
}

/* ---- Versions and limits */

/** Versions that matter for finding a fault. `cublas` are the files found in the usual places. */
export function checkVersions(glibc: string, cublas: readonly string[]): Finding[] {
  const majors = [...new Set(cublas.flatMap((path) => /libcublas\.so\.(\d+)/.exec(path)?.[1] ?? []))].toSorted();
  const unknown = majors.filter((major) => Number(major) < 11 || Number(major) > 13);
  return [
    fine("versions", `glibc ${glibc}`),
    unknown.length > 0
      ? warning(
          "versions",
          `cuBLAS ${unknown.join(", ")} was found (${cublas.join(", ")}); the guard of handles knows 11 to 13`,
          '"guard": "off" if a program with that version has trouble with cuBLAS',
        )
      : fine(
          "versions",
          majors.length > 0
            ? `cuBLAS ${majors.join(", ")} (${cublas.join(", ")})`
            : "no cuBLAS in the usual places; programs may bring their own",
        ),
  ];
}

/** A limit of the control group, and how much of it is used; null: none. */
export interface Limit {
  max: number | null;
  used: number;
}

/**
 * What the container, or whoever started this, allows. `self` is what /proc/self points to, `pid` the number of this process;
 * `namespace` what /proc/self/ns/pid points to.
 */
export function checkLimits(
  memory: Limit,
  pids: Limit,
  { self, pid, namespace }: { self: string | undefined; pid: number; namespace: string | undefined },
): Finding[] {
  const found: Finding[] = [];
  if (self !== String(pid))
    found.push(
      problem(
        "limits",
        `/proc is of another pid namespace (it calls this process ${self ?? "nothing"}, itself it is ${pid}): clients cannot be told to be alive`,
        "mount a /proc of this pid namespace, or start Rigel and its clients in the one that /proc shows",
      ),
    );
  const left_bytes = memory.max === null ? Number.POSITIVE_INFINITY : memory.max - memory.used;
  if (memory.max !== null && left_bytes < Math.max(memory.max / 10, 512 * 2 ** 20))
    found.push(
      warning(
        "limits",
        `of the ${mib(memory.max)} of memory that the control group allows, ${mib(memory.used)} are used; what is in /dev/shm counts`,
        "raise the limit (docker run --memory): who exceeds it is killed (SIGKILL, exit status 137)",
      ),
    );
  if (pids.max !== null && pids.max - pids.used < 256)
    found.push(
      warning(
        "limits",
        `of the ${pids.max} threads and processes that the control group allows, ${pids.used} are there`,
        "raise the limit (docker run --pids-limit): a program that cannot start a thread fails",
      ),
    );
  if (found.length > 0) return found;
  const INITIAL = "pid:[4026531836]"; // PROC_PID_INIT_INO of Linux
  return [
    fine(
      "limits",
      [
        memory.max === null ? "memory without limit" : `memory up to ${mib(memory.max)} (${mib(memory.used)} used)`,
        pids.max === null ? "threads without limit" : `${pids.max} threads (${pids.used} used)`,
        namespace === INITIAL ? "the machine's own pid namespace" : "a pid namespace of its own",
      ].join(", "),
    ),
  ];
}

/* ---- What earlier launches left, and what a launch does now */

/**
 * Files of launches of this user in `folder` behind which there is no process; `alive` tells of a file's name, and the pid in it. The
 * state of a simulated GPU is used for as long as a segment beside it whose clients are on it.
 */
export function checkLeftovers(
  folder: string,
  names: readonly string[],
  uid: number,
  alive: (name: string, pid: number | undefined) => boolean,
): Finding {
  const left = names.filter((name) => {
    const [, kind, owner, maker] = /^rigel-(sim-|record-)?(\d+)-([a-z0-9]+)(?:-\d+)*(?:-counts-\d+)?$/.exec(name) ?? [];
    if (Number(owner) !== uid || maker === undefined) return false;
    const pid = /^\d+$/.test(maker) ? Number(maker) : undefined;
    if (alive(name, pid)) return false;
    if (kind !== "sim-") return true;
    const segment = new RegExp(`^rigel-${uid}-${pid === undefined ? `${maker}simulated` : `${pid}-\\d+`}$`);
    return !names.some((other) => segment.test(other) && alive(other, pid));
  });
  if (left.length === 0) return fine("leftovers", `none in ${folder}`);
  const files = left.map((name) => `${folder}/${name}`);
  return warning(
    "leftovers",
    `${left.length} files of launches that have ended (or run in another container): ${files.join(" ")}`,
    `rm ${files.join(" ")}`,
  );
}

/** The folder of `rigel serve`, and its socket in it: `answers` tells whether somebody listens there. */
export function checkServer(
  folder: Folder,
  socket: { path: string; exists: boolean; private: boolean; answers: boolean },
): Finding {
  if (folder.exists && !folder.private)
    return problem(
      "server",
      `${folder.path} belongs to somebody else, or others may look into it: \`rigel serve\` does not use it`,
      `remove it, chmod 700 it, or set XDG_RUNTIME_DIR to a folder of your own`,
    );
  if (!socket.exists) return fine("server", `no \`rigel serve\` runs (${socket.path})`);
  if (!socket.private)
    return problem(
      "server",
      `${socket.path} can be opened by others, who could do all that you may`,
      `end the server, remove the file, and start the server again`,
    );
  return socket.answers
    ? fine("server", `\`rigel serve\` listens on ${socket.path}`)
    : warning(
        "server",
        `${socket.path} is left of a server that was killed`,
        `the next \`rigel serve\` replaces it; nothing else needs it`,
      );
}

/** The part of a launch's report that this reads. */
export const trialReportSchema = z.object({
  device: z.object({ name: z.string(), simulated: z.boolean() }),
  mps: z.boolean(),
  clients: z.array(
    z.object({
      name: z.string(),
      class: z.enum(["high", "best-effort"]),
      exit_code: z.int().nullable(),
      stopped: z.boolean(),
      attached: z.boolean(),
      attach_problem: z.string().nullable(),
      launches: z.int(),
      requests: z.object({ count: z.int(), p50_ms: z.number().nullable() }),
      preemption: z.object({ state: z.enum(["unknown", "on", "off", "stops"]), suspensions: z.int() }),
    }),
  ),
});
type TrialReport = z.infer<typeof trialReportSchema>;

/** What came of a short launch of two clients. */
export interface Trial {
  /** Undefined if it printed none. */
  report: TrialReport | undefined;
  status: number | null;
  /** Its last lines on standard error. */
  said: readonly string[];
}

/** Whether all was well but that the best-effort client had done nothing by the time that the high one had ended: on a busy machine it may not. */
export function isLate({ report }: Trial): boolean {
  const of = (kind: "high" | "best-effort") => report?.clients.find((client) => client.class === kind);
  const [high, best] = [of("high"), of("best-effort")];
  return high?.attached === true && high.exit_code === 0 && best?.stopped === true && best.launches === 0;
}

export function checkTrial({ report, status, said }: Trial): Finding {
  const last = said.length > 0 ? `: ${said.join(" / ")}` : "";
  if (!report)
    return problem(
      "launch",
      `a launch of two small programs ${status === null ? "did not end in time" : `ended with status ${status}`} without a report${last}`,
      "see what it said, and the other findings",
    );
  const bad = report.clients.flatMap(({ name, attached, attach_problem, exit_code, stopped, launches }) => {
    if (!attached) return [`${name} did not attach: ${attach_problem ?? "for an unknown reason"}`];
    if (!stopped && exit_code !== 0) return [`${name} ended with status ${exit_code ?? "unknown"}`];
    return launches === 0 ? [`${name} attached, but none of its launches was seen`] : [];
  });
  if (bad.length > 0)
    return problem("launch", `on ${report.device.name}: ${bad.join("; ")}${last}`, "see the other findings");
  const high = report.clients.find((client) => client.class === "high");
  return fine(
    "launch",
    `two small programs attached on ${report.device.name}, and ${high?.requests.count ?? 0} requests of the high one took ` +
      `${high?.requests.p50_ms?.toFixed(2) ?? "?"} ms at the median`,
  );
}
