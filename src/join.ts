/**
 * join.ts: how a program gets into a segment that is there already: which one is meant, what its maker says of it, and the segment
 * of the machine, which `rigel run` makes where nothing runs.
 *
 * The segment of the machine is `rigel-<uid>-run<first 8 digits of the GPU's UUID>` (`runsimulated` for the simulated GPU) in the
 * folder of the segments. Whoever uses it has joined it (a lock that ends with the process); who leaves it last removes it.
 * What was left by processes that were killed, and to what a command has left running, is removed by who finds it, and by any launch or
 * `rigel run` there.
 */

import { readdirSync, rmSync, statSync, type Stats } from "node:fs";
import { basename, join } from "node:path";
import { z } from "zod";
import { type Policy, policySchema } from "./config.ts";
import { type Device, type Environment, type Simulation, deviceEnvironment } from "./device.ts";
import type { Segments } from "./discover.ts";
import { RigelError } from "./errors.ts";
import type { Mps } from "./mps.ts";
import { RUN_MARK } from "./mps-daemon.ts";
import type { Native } from "./native.ts";
import type { Phase, Plan } from "./plan.ts";
import { policySettings, targetOf } from "./policy.ts";
import { removeIfPossible, statAt } from "./path.ts";
import { environmentOf, living, startedAt_ticks, startedWith } from "./proc.ts";
import { Segment } from "./segment.ts";

/** What the maker of a segment says of it. */
const manifestSchema = z.object({
  kind: z.enum(["launch", "machine"]),
  /** GPUs that its clients are on. */
  devices: z.array(z.object({ uuid: z.string(), simulated: z.boolean() })),
  /** The simulated GPU that they share. */
  simulation: z.object({
    state: z.string(),
    preset: z.enum(["h200", "a100", "l4"]),
    mps: z.boolean(),
    devices: z.int().optional(),
  }),
  /** What a client needs besides to share a real GPU as they do: of MPS. */
  environment: z.record(z.string(), z.string()),
});
export type Manifest = z.infer<typeof manifestSchema>;

/** Of a launch. */
export function manifestOf({ simulation }: Plan, { clients }: Phase, mps: Mps): string {
  const shared = clients.find((client) => !client.device.simulated && !client.hidden);
  return written({
    kind: "launch",
    devices: [
      ...new Map(
        clients.flatMap(({ devices }) => devices.map(({ uuid, simulated }) => [uuid, { uuid, simulated }] as const)),
      ).values(),
    ],
    simulation,
    environment: shared ? mps.environment({ ...shared, sm_percent: undefined }, {}) : {},
  });
}

function written(manifest: Manifest): string {
  return JSON.stringify(manifest);
}

/** What the maker of a segment has said; undefined of one that takes nobody in. */
export function readManifest(segment: Segment): Manifest | undefined {
  try {
    return manifestSchema.parse(JSON.parse(segment.manifest));
  } catch {
    return undefined;
  }
}

/** A segment that this process has joined. */
export interface Joined {
  segment: Segment;
  manifest: Manifest;
  /** This process has made it. */
  made: boolean;
  /** To be called once its clients have ended. */
  leave: () => void;
}

const TRIES = 100;
const TRY_ms = 20;

/** Joins what is live on a device: the machine's own segment, else the latest launch; or makes the machine's. */
export async function joinOrMake(
  native: Native,
  segments: Segments,
  folder: string,
  device: Device,
  preset: Simulation["preset"],
): Promise<Joined> {
  removeLeft(native, folder);
  // Somebody else may be making, or removing, the same one at this moment.
  for (let tries = 0; tries < TRIES; tries++) {
    const joined = tryJoin(segments, device) ?? tryMake(native, folder, device, preset);
    if (joined) return joined;
    await Bun.sleep(TRY_ms);
  }
  throw new RigelError(
    "segment",
    `the segment of ${device.name} in ${folder} could neither be joined nor be made; try again`,
  );
}

function tryJoin(segments: Segments, device: Device): Joined | undefined {
  const found = segments
    .live()
    .flatMap((segment) => {
      const manifest = readManifest(segment);
      const on = manifest?.devices.some(({ uuid, simulated }) => (device.simulated ? simulated : uuid === device.uuid));
      return manifest && on ? [{ segment, manifest }] : [];
    })
    .toSorted(
      (a, b) =>
        Number(b.manifest.kind === "machine") - Number(a.manifest.kind === "machine") ||
        b.segment.creator.created_ns - a.segment.creator.created_ns,
    );
  for (const { segment, manifest } of found) {
    const release = segment.lock("member");
    if (release) return { segment, manifest, made: false, leave: () => leave(segment, manifest, release) };
  }
  return undefined;
}

/** Of the simulated GPU of the machine. */
function machineState(folder: string, uid: number): string {
  return join(folder, `rigel-sim-${uid}-run`);
}

function tryMake(native: Native, folder: string, device: Device, preset: Simulation["preset"]): Joined | undefined {
  const uid = process.getuid?.() ?? 0;
  const which = device.simulated ? "simulated" : device.uuid.replace(/^\w+-/, "").slice(0, 8).toLowerCase();
  const path = join(folder, `rigel-${uid}-run${which}`);
  const manifest: Manifest = {
    kind: "machine",
    devices: [{ uuid: device.uuid, simulated: device.simulated }],
    simulation: { state: machineState(folder, uid), preset, mps: false },
    environment: {},
  };
  // What killed processes have left; of another version, it cannot be asked whether it is still used.
  if (native.checkSegment(path) === null && !native.isLive(path)) {
    const stale = Segment.open(native, path);
    stale.reap();
    if (stale.removeIfLeft()) removeState(manifest);
  }
  const segment = Segment.createUnlessThere(native, path);
  if (!segment) return undefined;
  const policy: Policy = policySchema.parse({});
  segment.configure({ ...policySettings(policy, [], native), policy: policy.name });
  segment.target = targetOf(policy);
  segment.manifest = written(manifest);
  const release = segment.lock("member");
  if (!release) return undefined;
  return { segment, manifest, made: true, leave: () => leave(segment, manifest, release) };
}

function leave(segment: Segment, manifest: Manifest, release: () => void): void {
  segment.reap();
  release();
  // A launch that others have joined may end before they do: then they have what it has left.
  if (manifest.kind === "launch" && segment.makerLives) return;
  // What a command has left running may become a client yet.
  if (isAwaited(segment.path)) return;
  if (segment.removeIfLeft()) removeState(manifest);
}

/** Of the simulated GPU, with the segment of its clients: a launch's is its own, the machine's belongs to the segment of that GPU alone. */
function removeState({ kind, devices, simulation }: Manifest): void {
  if (kind === "launch" || devices.some(({ simulated }) => simulated)) rmSync(simulation.state, { force: true });
}

/** Of another container's processes, which cannot be seen, heartbeats are: four a second. */
const QUIET_ms = 10_000;

/**
 * Removes what processes that were killed have left of segments of the machine in a folder, whichever GPU's, and of launches. It stays where a process lives that
 * has made, joined or used one or was started to, where one has shown life in the last 10 s, and where it is another user's or version's. And the
 * simulated GPUs of those that were killed while they looked for GPUs.
 */
export function removeLeft(native: Native, folder: string): void {
  const uid = process.getuid?.() ?? 0;
  const probed = new RegExp(`^rigel-sim-${uid}-(\\d+)(?:-\\d+)?-0$`);
  for (const name of filesIn(folder)) {
    const maker = probed.exec(name)?.[1];
    if (maker !== undefined && startedAt_ticks(Number(maker)) === undefined) removeIfPossible(join(folder, name));
  }
  const mine = new RegExp(`^rigel-${uid}-(run[a-z0-9]+|\\d+-\\d+)$`);
  for (const name of filesIn(folder).filter((file) => mine.test(file))) {
    const path = join(folder, name);
    const segment = deadSegment(native, path);
    if (!segment || segment.quiet_ms < QUIET_ms || isAwaited(path)) continue;
    segment.reap();
    const manifest = readManifest(segment);
    if (!segment.removeIfLeft()) continue;
    if (name.endsWith("runsimulated")) rmSync(machineState(folder, uid), { force: true });
    else if (manifest?.kind === "launch") removeState(manifest);
  }
}

function filesIn(folder: string): string[] {
  try {
    return readdirSync(folder);
  } catch {
    return [];
  }
}

/** It may go while it is looked at. */
function deadSegment(native: Native, path: string): Segment | undefined {
  try {
    return native.isLive(path) ? undefined : Segment.open(native, path);
  } catch {
    return undefined;
  }
}

/** Whether a process lives, besides this one, that was started to be a client of this file's: it may not be one yet. */
export function isAwaited(path: string): boolean {
  const file = statAt(path);
  return living().some(({ pid }) => {
    if (pid === process.pid) return false;
    const named = environmentOf(pid)["RIGEL_SEGMENT"];
    return named?.endsWith(`/${basename(path)}`) === true && !isAnother(`/proc/${pid}/root${named}`, file);
  });
}

/** A process may know the file by another path, as in a container, and in another folder one of this name is another. */
function isAnother(path: string, file: Stats | undefined): boolean {
  try {
    const { dev, ino } = statSync(path);
    return file !== undefined && (dev !== file.dev || ino !== file.ino);
  } catch (thrown) {
    return thrown instanceof Error && "code" in thrown && thrown.code === "ENOENT"; // else nobody may look
  }
}

/** Whether a process lives that a `rigel run`, which may have ended, has started in a launch's segment; the launch's own have `mark`. */
export function hasGuests({ path }: Segment, mark: string): boolean {
  return living().some(
    ({ pid }) =>
      startedWith(pid, [`RIGEL_SEGMENT=${path}`]) &&
      environmentOf(pid)[RUN_MARK] !== undefined &&
      !startedWith(pid, [mark]),
  );
}

/** What a client of a segment needs to see the device that its clients are on. */
export function joinedEnvironment(
  { manifest }: Joined,
  device: Device,
  native: Native,
  given: Environment,
): Environment {
  return {
    ...deviceEnvironment([device], native.files, manifest.simulation, given),
    ...(!device.simulated && manifest.environment),
  };
}
