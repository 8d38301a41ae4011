/**
 * calibrate.ts: what was measured of a GPU for the simulator: the file it is kept in, and measuring it by `rigel-replay --calibrate`.
 *
 * A simulation takes the constants of the user's own file where there is one of that GPU, else of the one that comes with Rigel, else the
 * preset's (native/sim/presets.def). What a file leaves null is the preset's, too.
 */

import { existsSync, readdirSync } from "node:fs";
import { dirname, join } from "node:path";
import { z } from "zod";
import { median } from "./bench-stats.ts";
import { RigelError, reason } from "./errors.ts";
import { readJson } from "./json.ts";
import { type NativeFiles, cacheFolders, privateFolder } from "./native.ts";
import { fields, parse } from "./schema.ts";

/** What each number is and how native/replay/calibrate.c comes by it; `used`: the simulator takes it (rg_model_params, model.h). */
export const CONSTANTS = {
  memory_bytes_per_us: {
    unit: "bytes/us",
    used: true,
    how: "copies within the device, each byte read and written: by the difference between copies of 1 GiB and of half as much",
  },
  h2d_bytes_per_us: {
    unit: "bytes/us",
    used: true,
    how: "copies from pinned host memory: by the difference between copies of 128 MiB and of half as much",
  },
  d2h_bytes_per_us: { unit: "bytes/us", used: true, how: "copies to pinned host memory, likewise" },
  chain_ns: {
    unit: "ns",
    used: true,
    how: "from one kernel's end to the next one's beginning: what 250 more empty kernels in a stream take, each without 1000 ns of its own",
  },
  slice_ns: {
    unit: "ns",
    used: true,
    how: "two contexts that always have work: from one absence of a context to its next, without the absence",
  },
  switch_ns: { unit: "ns", used: true, how: "half of what an absence is longer than the other context's slice" },
  idle_ns: {
    unit: "ns",
    used: true,
    how:
      "how long a context may have nothing to do until half of its kernels find that another context has the GPU, without chain_ns; where the " +
      "shortest gap that can be made (two events, or a copy of 4 KiB, between two streams) is too long already, half of that",
  },
  sm_contention: {
    unit: "thousandths",
    used: true,
    how:
      "two kernels bound by arithmetic on the same multiprocessors: how much longer they take together (harmonic mean) than alone, over " +
      "what they ask for beyond the whole GPU",
  },
  mixed_contention: {
    unit: "thousandths",
    used: true,
    how: "the same of a kernel bound by arithmetic and one bound by memory, as a part of sm_contention",
  },
  read_bytes_per_us: { unit: "bytes/us", used: false, how: "a kernel that reads memory on all multiprocessors" },
  half_read_bytes_per_us: { unit: "bytes/us", used: false, how: "the same on half of them, 512 threads on each" },
  eighth_read_bytes_per_us: {
    unit: "bytes/us",
    used: false,
    how: "the same on an eighth of them, 1024 threads on each",
  },
  launch_call_ns: {
    unit: "ns",
    used: false,
    how: "an empty kernel's launch on an idle stream: how long the call takes",
  },
  round_trip_ns: { unit: "ns", used: false, how: "from such a launch until a wait for it returns" },
} as const;

type Key = keyof typeof CONSTANTS;
const KEYS = Object.keys(CONSTANTS).filter((key): key is Key => key in CONSTANTS);

const constantSchema = fields({
  /** Median of the rounds; null: it could not be measured. */
  value: z.number().nonnegative().nullable(),
  least: z.number().nonnegative().nullable(),
  most: z.number().nonnegative().nullable(),
  unit: z.string(),
  how: z.string(),
  /** The simulator takes it. */
  used: z.boolean(),
});

const pairSchema = fields({
  first: z.enum(["compute", "memory"]),
  second: z.enum(["compute", "memory"]),
  /** On the same multiprocessors; the first on some of them, which the second has all; or each on half of them. */
  sms: z.enum(["same", "some", "apart"]),
  /** Time beside the other over time alone. */
  first_slower: z.number().positive().nullable(),
  second_slower: z.number().positive().nullable(),
});

const calibrationSchema = fields({
  schema: z.literal(1),
  device: z.string().min(1),
  simulated: z.boolean(),
  sms: z.int().positive(),
  /** ISO 8601. */
  measured: z.string(),
  rounds: z.int().positive(),
  constants: z.record(z.string(), constantSchema),
  pairs: z.array(pairSchema),
});

export type Calibration = z.infer<typeof calibrationSchema>;

/* ---- Files */

/** Where the user's own are. */
export function devicesFolder(): string {
  return join(cacheFolders()[0] ?? "/tmp", "devices");
}

/** Where the one of a device goes. */
export function devicePath(device: string, folder = devicesFolder()): string {
  return join(
    folder,
    `${
      device
        .toLowerCase()
        .match(/[a-z0-9]+/g)
        ?.join("-") ?? "device"
    }.json`,
  );
}

export async function readCalibration(path: string): Promise<Calibration> {
  return parse(calibrationSchema, await readJson(path, { once: true }), path);
}

/** Makes the folder of the user's own, before a minute is spent on what goes into it. */
export function makeDevicesFolder(): void {
  const folder = devicesFolder();
  try {
    privateFolder(dirname(folder));
    privateFolder(folder);
  } catch (thrown) {
    throw new RigelError("cache", `${folder}: cannot be made (${reason(thrown)}); -o names a file elsewhere`, {
      cause: thrown,
    });
  }
}

/** The GPU that a scenario has: a preset of the simulator, and what was measured of such a GPU. */
export interface ScenarioGpu {
  preset: string;
  /** Fields of rg_model_params. */
  constants: Readonly<Record<string, number>>;
  /** The file that they come from; null: the preset's alone. */
  calibration: string | null;
}

/** Of any of them: what the simulator's smallest fields hold, 4 s of nanoseconds. */
const MOST = 2 ** 32 - 1;

/** The calibration of a preset's GPU: the user's own in `own`, else the one that comes with Rigel. */
export async function gpuOf(
  preset: string,
  profiles: string,
  own: string | null = devicesFolder(),
): Promise<ScenarioGpu> {
  const shipped = join(profiles, `device-${preset}.json`);
  const path = (await ownPath(preset, own)) ?? (existsSync(shipped) ? shipped : undefined);
  if (path === undefined) return { preset, constants: {}, calibration: null };
  const { constants } = await readCalibration(path);
  const taken = KEYS.flatMap((key): [string, number][] => {
    const value = constants[key]?.value ?? null;
    if (!CONSTANTS[key].used || value === null) return [];
    const whole = Math.round(value);
    if (whole === 0 && (key === "slice_ns" || key.endsWith("_per_us")))
      throw new RigelError("config", `${path}: constants.${key}.value: expected a number above 0, got ${value}`);
    if (whole > MOST)
      throw new RigelError("config", `${path}: constants.${key}.value: expected a number up to ${MOST}, got ${value}`);
    return [[key, whole]];
  });
  return { preset, constants: Object.fromEntries(taken), calibration: path };
}

/** A file of a real GPU of that kind; the simulated one's numbers are the preset's already. */
async function ownPath(preset: string, folder: string | null): Promise<string | undefined> {
  if (folder === null || !existsSync(folder)) return undefined;
  for (const name of readdirSync(folder).toSorted()) {
    if (!name.endsWith(".json") || !name.slice(0, -".json".length).split("-").includes(preset)) continue;
    const path = join(folder, name);
    const { simulated } = await readCalibration(path);
    if (!simulated) return path;
  }
  return undefined;
}

/* ---- Measuring */

const stepSchema = z.object({ step: z.string(), at: z.int(), of: z.int() });
const roundSchema = z.object({
  device: z.object({ name: z.string(), sms: z.int(), simulated: z.boolean() }),
  values: z.record(z.string(), z.number().nullable()),
  pairs: z.array(pairSchema),
});

type Round = z.infer<typeof roundSchema>;

/** Runs `rigel-replay --calibrate` so many times. `tell` hears what is measured, and how much of it all is done, 0 to 1. */
export async function measure(
  files: NativeFiles,
  environment: Record<string, string>,
  rounds: number,
  signal: AbortSignal,
  tell: (what: string, done: number) => void,
): Promise<Calibration> {
  const all: Round[] = [];
  for (let round = 0; round < rounds; round++)
    all.push(await runOnce(files, environment, signal, (what, part) => tell(what, (round + part) / rounds)));
  const [first] = all;
  if (!first) throw new Error("no rounds");
  return {
    schema: 1,
    device: first.device.name,
    simulated: first.device.simulated,
    sms: first.device.sms,
    measured: new Date().toISOString(),
    rounds,
    constants: Object.fromEntries(KEYS.map((key) => [key, constantOf(key, all)])),
    pairs: first.pairs.map((pair, index) => ({
      ...pair,
      first_slower: medianOf(all.map(({ pairs }) => pairs[index]?.first_slower)),
      second_slower: medianOf(all.map(({ pairs }) => pairs[index]?.second_slower)),
    })),
  };
}

function constantOf(key: Key, all: readonly Round[]): Calibration["constants"][string] {
  const values = known(all.map((round) => round.values[key]));
  const { unit, how, used } = CONSTANTS[key];
  const has = values.length > 0;
  return {
    value: medianOf(values),
    least: has ? round4(Math.min(...values)) : null,
    most: has ? round4(Math.max(...values)) : null,
    unit,
    how,
    used,
  };
}

function known(values: readonly (number | null | undefined)[]): number[] {
  return values.filter((value) => value !== null && value !== undefined);
}

function medianOf(values: readonly (number | null | undefined)[]): number | null {
  const some = known(values);
  return some.length > 0 ? round4(median(some)) : null;
}

function round4(value: number): number {
  return Number(value.toFixed(4));
}

async function runOnce(
  files: NativeFiles,
  environment: Record<string, string>,
  signal: AbortSignal,
  tell: (what: string, part: number) => void,
): Promise<Round> {
  await using child = Bun.spawn([files.replay, "--calibrate"], {
    // No client of anything, whatever the caller's environment says.
    env: { ...process.env, ...environment, RIGEL_SEGMENT: undefined, LD_PRELOAD: undefined },
    stdin: "ignore",
    stdout: "pipe",
    stderr: "pipe",
    signal,
    killSignal: "SIGKILL",
  });
  const problem = child.stderr.text();
  const decoder = new TextDecoder();
  let rest = "";
  let result: Round | undefined;
  for await (const chunk of child.stdout) {
    const lines = (rest + decoder.decode(chunk, { stream: true })).split("\n");
    rest = lines.pop() ?? "";
    for (const line of lines) {
      const value: unknown = JSON.parse(line);
      const step = stepSchema.safeParse(value);
      if (step.success) tell(step.data.step, step.data.at / step.data.of);
      else result = roundSchema.parse(value);
    }
  }
  const status = await child.exited;
  signal.throwIfAborted();
  if (status !== 0 || !result)
    throw new RigelError(
      "device",
      `the device could not be calibrated (rigel-replay --calibrate ended with ${child.signalCode ?? status}): ${(await problem).trim()}`,
    );
  return result;
}
