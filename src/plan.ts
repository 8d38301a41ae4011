/**
 * plan.ts: turns a configuration into what will be run: every client's command, device and the phases, all checked.
 *
 * Everything that can be found wrong without starting a client is found here, and all of it is reported at once. Starts
 * nothing but the device probe.
 */

import { accessSync, constants, statSync, statfsSync } from "node:fs";
import { join, resolve } from "node:path";
import {
  type ClientConfig,
  type Config,
  type FieldNames,
  type ReplayConfig,
  defaultSeed,
  profileFields,
} from "./config.ts";
import { type Device, Devices, type Environment, type Simulation, visibleDevices } from "./device.ts";
import { durationsFolder, keptOn, programOf } from "./durations.ts";
import { RigelError } from "./errors.ts";
import { folderProblem } from "./path.ts";
import { limit_bytes, notesOnLimits } from "./memory.ts";
import { type Advice, type Decision, type Sharing, decide } from "./mps.ts";
import { findDaemon } from "./mps-daemon.ts";
import { type Native, checkPreloadable } from "./native.ts";
import { checkPolicy } from "./policy.ts";
import { type ProfileKernel, checkArrivals, readDurations, readProfile } from "./profile.ts";
import type { Mode } from "./report.ts";
import { adviceFor } from "./sharing-advice.ts";

export interface PlannedClient {
  name: string;
  class: "high" | "best-effort";
  argv: string[];
  cwd: string;
  /** What the configuration adds to the environment. */
  env: Record<string, string>;
  /** The first of those that it sees. */
  device: Device;
  devices: readonly [Device, ...Device[]];
  /** Only threads that enter a client are one. */
  threads: boolean;
  /** Tells its program from others, whose kernels' durations are not its own: 16 hexadecimal digits. */
  program: string;
  /** The most device memory it may have; undefined: no limit. */
  memory_bytes: number | undefined;
  /** Is to share its GPU with others side by side, under MPS. */
  mps: boolean;
  /** Must not find an MPS daemon, though there may be one. */
  hidden: boolean;
  sm_percent: number | undefined;
  isReplay: boolean;
  /** Is known to end by itself. */
  isBounded: boolean;
  /** Its part of GPU time under `fair`; 1 unless the configuration says otherwise. */
  weight: number;
  /** Kernel profiles: of a replay, what it launches. None, one, or as many as its requests are of kinds. */
  profiles: readonly string[];
}

export interface Phase {
  mode: Mode;
  policy: Config["policy"]["name"];
  clients: PlannedClient[];
}

export interface Plan {
  config: Config;
  /** The device of the launch; clients may name others. */
  device: Device;
  sharing: Sharing;
  simulation: Simulation;
  clients: PlannedClient[];
  phases: Phase[];
  /** Kernel durations from profiles, by client name. */
  seeds: ReadonlyMap<string, readonly ProfileKernel[]>;
  notes: string[];
}

/** Checks everything and plans the phases. `state` is the file that the simulated GPU may use. */
export async function plan(config: Config, native: Native, state: string): Promise<Plan> {
  const { file } = config;
  const simulation: Simulation = {
    state,
    preset: config.simulated.preset,
    mps: config.sharing === "auto" ? config.simulated.mps : config.sharing === "mps",
    devices: config.simulated.devices,
  };
  const notes = [...config.notes];
  checkPreloadable(native.files.interposer);
  const seeds = new Map<string, readonly ProfileKernel[]>();
  await checkClients(config, notes, seeds);
  const devices = new Devices(native.files, simulation);
  const device = await devices.choose(config.device, `${file}: device`);
  const on: Placed[] = [];
  for (const [index, client] of config.clients.entries()) {
    const visible = client.env?.["CUDA_VISIBLE_DEVICES"];
    const where = `${file}: clients[${index}].${client.device === undefined ? "env.CUDA_VISIBLE_DEVICES" : "device"}`;
    if (client.device !== undefined && visible !== undefined)
      notes.push(`${client.name}: CUDA_VISIBLE_DEVICES in its env has no effect, as its device says what it sees`);
    const own =
      client.device ?? (visible === undefined || device.simulated ? undefined : visibleDevices(visible, where));
    const its = own === undefined ? ([device] as const) : await devices.chooseSome(own, device, where);
    on.push({ client, device: its[0], its });
  }
  const decision = await sharingOf(config, on, simulation, (shared) => adviceOf(shared, config, seeds, native));
  notes.push(...decision.notes);
  const clients: PlannedClient[] = [];
  for (const [index, { client, device: first, its }] of on.entries())
    clients.push({
      name: client.name,
      class: client.class,
      argv: client.replay ? replayCommand(native.files.replay, client.replay, index) : (client.command ?? []),
      cwd: client.cwd ?? process.cwd(),
      program: programOf(client),
      env: client.env ?? {},
      device: first,
      devices: its,
      threads: client.threads ?? false,
      memory_bytes: client.memory === undefined ? undefined : limit_bytes(client.memory, first.memory_bytes),
      ...(await shareOf(client, first, decision, config, simulation)),
      isReplay: client.replay !== undefined,
      isBounded: client.replay?.iterations !== undefined,
      weight: client.weight ?? 1,
      profiles: client.replay?.profile ?? client.profile ?? [],
    });
  notes.push(...sharingNotes(clients, config), ...notesOnLimits(clients));
  const { mode, daemon, pipe_directory } = decision;
  return {
    config,
    device,
    sharing: { mode, daemon, pipe_directory },
    simulation,
    clients,
    phases: phasesOf(config, clients, daemon),
    seeds,
    notes,
  };
}

/** A client and its devices, of which the first is the one that it is on where it has no choice. */
interface Placed {
  client: ClientConfig;
  device: Device;
  its: readonly [Device, ...Device[]];
}

/** A launch on the simulated GPU alone has nothing to do with what runs on this machine. */
async function sharingOf(
  config: Config,
  on: readonly Placed[],
  simulation: Simulation,
  advise: (shared: readonly Placed[]) => Advice | undefined,
): Promise<Decision> {
  const without = { daemon: null, pipe_directory: null, hides: false, notes: [] };
  if (on.every(({ device }) => device.simulated)) return { ...without, mode: simulation.mps ? "mps" : "time-slice" };
  const shared = on.filter(({ client, device }) => !device.simulated && client.isolation === "shared");
  if (shared.length === 0) return { ...without, mode: "time-slice" };
  const gpus = [...new Map(shared.map(({ device }) => [device.uuid, device])).values()];
  return await decide(config.sharing, gpus, process.env, `${config.file}: sharing`, () => advise(shared));
}

/**
 * How clients should share their GPU by what is known of them, and why; undefined where nobody is to be protected from best-effort work, or
 * too little is known.
 */
function adviceOf(
  all: readonly Placed[],
  { policy }: Config,
  seeds: Plan["seeds"],
  native: Native,
): Advice | undefined {
  if (!["priority", "slo"].includes(policy.name)) return undefined;
  // Whoever names a daemon means that one, whatever is advised.
  const shared = all.filter(({ client }) => client.env?.["CUDA_MPS_PIPE_DIRECTORY"] === undefined);
  const of = (kind: ClientConfig["class"]): Placed[] => shared.filter(({ client }) => client.class === kind);
  const uuids = new Set(of("high").flatMap(({ its }) => its.map(({ uuid }) => uuid)));
  const best = of("best-effort").filter(({ its }) => its.some(({ uuid }) => uuids.has(uuid)));
  const programs = (placed: readonly Placed[]) =>
    placed.map(({ client, device }) => ({
      name: client.name,
      program: programOf(client),
      device,
      profile: seeds.get(client.name),
    }));
  return adviceFor(programs(of("high")), programs(best), (device) => keptOn(device, durationsFolder(), native));
}

/** How one client takes part in it. Who names a daemon in a client's own environment means that one. */
async function shareOf(
  { env, isolation, sm_percent }: ClientConfig,
  device: Device,
  { mode, hides }: Decision,
  { sharing }: Config,
  simulation: Simulation,
): Promise<Pick<PlannedClient, "mps" | "hidden" | "sm_percent">> {
  if (device.simulated) return { mps: simulation.mps, hidden: false, sm_percent };
  const own = env?.["CUDA_MPS_PIPE_DIRECTORY"];
  const hidden = isolation === "process" || (hides && (own === undefined || sharing === "time-slice"));
  const mps =
    own === undefined
      ? mode === "mps"
      : (await findDaemon({ ...process.env, ...env }, [device.uuid])).state === "running";
  return { mps: mps && !hidden, hidden, sm_percent };
}

/** What of the configuration has no effect as the clients share their GPU. */
export function sharingNotes(clients: readonly PlannedClient[], config: Config): string[] {
  const notes = clients.flatMap(({ name, mps, sm_percent, device }, index) => [
    ...(sm_percent !== undefined && !mps
      ? [`${name}: sm_percent has no effect, as it is not under MPS; "sharing": "mps" starts a daemon`]
      : []),
    ...(device.simulated && (sm_percent !== undefined || config.clients[index]?.isolation === "process")
      ? [`${name}: the simulated GPU has neither sm_percent nor isolation; only a real one does`]
      : []),
  ]);
  if (config.sharing === "time-slice" && config.simulated.mps && clients.some(({ device }) => device.simulated))
    notes.push('simulated.mps has no effect, as sharing is "time-slice"');
  return notes;
}

function phasesOf(config: Config, clients: PlannedClient[], daemon: Sharing["daemon"]): Phase[] {
  const policy = config.policy.name;
  if (!config.compare) return [{ mode: policy === "none" ? "ungoverned" : "governed", policy, clients }];
  return [
    ...clients.map((client): Phase => ({ mode: "alone", policy: "none", clients: [aloneOf(client, daemon)] })),
    { mode: "ungoverned", policy: "none", clients },
    { mode: "governed", policy, clients },
  ];
}

/**
 * A client as it is with nothing beside it: out of MPS, which makes some programs longer by itself, where only the launch brings that. Where
 * a client may use a part of the GPU only, it is MPS that sees to it.
 */
function aloneOf(client: PlannedClient, daemon: Sharing["daemon"]): PlannedClient {
  const own = client.env["CUDA_MPS_PIPE_DIRECTORY"] !== undefined;
  // Where one process alone may use the GPU that is the daemon's server.
  const { simulated, exclusive } = client.device;
  const stays = daemon !== "private" || !client.mps || own || client.sm_percent !== undefined || simulated || exclusive;
  return stays ? client : { ...client, mps: false, hidden: true };
}

async function checkClients(
  config: Config,
  notes: string[],
  seeds: Map<string, readonly ProfileKernel[]>,
): Promise<void> {
  const problems: RigelError[] = [];
  const { file } = config;
  if (config.compare && config.policy.name === "none")
    problems.push(
      new RigelError("config", `${file}: policy.name: expected a policy other than "none" to compare with`),
    );
  problems.push(...checkPolicy(config, notes));
  for (const [index, client] of config.clients.entries()) {
    const names = config.fieldNames[index];
    if (!names) throw new Error(`client ${index} without field names`);
    const where = `${file}: ${names.client}`;
    const { command, profile, replay } = client;
    await noted(problems, () => {
      checkFolder(client, where);
      // Without the folder nothing can be said of what is in it.
      if (command) checkCommand(client, command, where);
    });
    if (profile !== undefined) seeds.set(client.name, await kernelsOf(client.name, profile, where, notes, problems));
    if (client.sm_percent !== undefined && config.sharing === "time-slice")
      problems.push(
        new RigelError(
          "config",
          `${where}.sm_percent: expected no share, as sharing is "time-slice": only MPS can limit one`,
        ),
      );
    if (replay) await checkReplay(client.name, replay, config, names, notes, problems);
    else if (config.compare && config.duration_s === undefined)
      notes.push(`${client.name}: alone it runs until it ends by itself; set duration_s (--duration) if it never does`);
  }
  const [first] = problems;
  if (first) throw new RigelError(first.code, problems.map(({ message }) => message).join("\n"), { cause: first });
}

/** What it gives, or undefined where it throws what is wrong with the configuration, which is noted down: there may be more. */
async function noted<T>(problems: RigelError[], check: () => T | Promise<T>): Promise<T | undefined> {
  try {
    return await check();
  } catch (thrown) {
    if (!(thrown instanceof RigelError)) throw thrown;
    problems.push(thrown);
    return undefined;
  }
}

function checkFolder(client: ClientConfig, where: string): void {
  const problem = client.cwd === undefined ? undefined : folderProblem(client.cwd);
  if (problem) throw new RigelError("config", `${where}.cwd: ${problem}, got ${client.cwd}`);
}

function checkCommand(client: ClientConfig, command: string[], where: string): void {
  const program = command[0] ?? "";
  const cwd = client.cwd ?? process.cwd();
  if (program.includes("/")) {
    if (!isExecutable(resolve(cwd, program)))
      throw new RigelError(
        "command",
        `${where}.command[0]: expected a program that can be executed, got ${program} (looked for in ${cwd})`,
      );
    return;
  }
  const path = client.env?.["PATH"] ?? process.env["PATH"] ?? "";
  if (program === "" || Bun.which(program, { PATH: path, cwd }) === null)
    throw new RigelError("command", `${where}.command[0]: expected a program on PATH, ${program || '""'} is not found`);
}

function isExecutable(path: string): boolean {
  try {
    accessSync(path, constants.X_OK);
    return statSync(path).isFile();
  } catch {
    return false;
  }
}

async function checkReplay(
  name: string,
  { profile, arrivals, iterations }: ReplayConfig,
  config: Config,
  names: FieldNames,
  notes: string[],
  problems: RigelError[],
): Promise<void> {
  const { file } = config;
  if (config.compare && config.duration_s === undefined && iterations === undefined)
    problems.push(
      new RigelError(
        "config",
        `${file}: ${names.iterations}: expected a number, or duration_s: alone, this client would never end`,
      ),
    );
  if (arrivals !== undefined && arrivals !== "uniform" && arrivals !== "poisson")
    await noted(problems, async () => await inField(`${file}: ${names.arrivals}`, checkArrivals(arrivals)));
  const stated = config.statedKernels.get(name);
  for (const [field, path] of profileFields(names.profile, profile)) {
    const read = await noted(problems, async () => await inField(`${file}: ${field}`, readProfile(path)));
    if (!read) continue;
    const { kernels } = read;
    if (stated !== undefined && stated !== kernels)
      notes.push(
        `${name}: the configuration states ${stated} kernels, ${path} has ${kernels}; ` +
          "what the file has is replayed, nothing waits for a count",
      );
  }
}

/** The kernels of a client's profiles, those of the first one first. */
async function kernelsOf(
  name: string,
  profiles: readonly string[],
  where: string,
  notes: string[],
  problems: RigelError[],
): Promise<ProfileKernel[]> {
  const all: ProfileKernel[] = [];
  for (const [field, path] of profileFields(`${where}.profile`, profiles)) {
    const read = await noted(problems, async () => await inField(field, readDurations(path)));
    if (!read) continue;
    const { kernels, unclear } = read;
    if (unclear > 0)
      notes.push(
        `${name}: ${path} has no shapes; ${kernels.length} of its ${kernels.length + unclear} kernel names are used, of which ` +
          "all rows take about the same time; the others are learned",
      );
    all.push(...kernels);
  }
  return all;
}

/** Puts the field that names a file before what is wrong with the file. */
export async function inField<T>(field: string, check: Promise<T>): Promise<T> {
  try {
    return await check;
  } catch (thrown) {
    if (!(thrown instanceof RigelError)) throw thrown;
    const lines = thrown.message.split("\n").map((line) => `${field}: ${line}`);
    throw new RigelError(thrown.code, lines.join("\n"), { cause: thrown });
  }
}

function replayCommand(program: string, replay: ReplayConfig, index: number): string[] {
  return [
    program,
    ...replay.profile.flatMap((path) => option("--profile", path)),
    ...option("--rate", replay.rate_per_s),
    ...option("--arrivals", replay.arrivals),
    ...option("--iterations", replay.iterations),
    ...option("--seed", replay.seed ?? defaultSeed(index)),
    ...option("--idle-timeout-s", replay.idle_timeout_s),
  ];
}

function option(flag: string, value: string | number | undefined): string[] {
  return value === undefined ? [] : [flag, String(value)];
}

/** The file of a simulated GPU of this process's own. */
export function simulationState(folder: string): string {
  return join(folder, `rigel-sim-${process.getuid?.() ?? 0}-${process.pid}`);
}

/** Where that goes of a command that makes no segment: as segments, or where temporary files do if there is no room for it. */
export function simulationFolder({ simulatedBytes }: Native, environment: Environment): string {
  const [folder, temporary] = [defaultSegmentFolder(environment), temporaryFolder(environment)];
  if (folder === temporary) return folder;
  const { bavail, bsize } = statfsSync(folder);
  return bavail * bsize < simulatedBytes ? temporary : folder;
}

/** Where the files of one launch go: shared memory where there is some that can be written to. */
export function defaultSegmentFolder(environment: Environment): string {
  try {
    accessSync("/dev/shm", constants.W_OK);
    return "/dev/shm";
  } catch {
    return temporaryFolder(environment);
  }
}

function temporaryFolder(environment: Environment): string {
  return resolve(environment["TMPDIR"] || "/tmp");
}
