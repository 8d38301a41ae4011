/**
 * calibration.ts: measured values of a GPU in place of its preset's, as `rigel calibrate` writes them and `rigel simulate` reads them.
 *
 * Files lie in profiles/ as calibration-PRESET.json, or where --calibration says.
 */

import { existsSync } from "node:fs";
import { basename, join } from "node:path";
import { z } from "zod";
import type { Config } from "./config.ts";
import { readJson } from "./json.ts";
import { fields, parse } from "./schema.ts";
import type { Gpu } from "./simulate-ways.ts";

const time_ns = z.int().min(0).max(1e12);

/** What replaces the preset's values; a field that is absent could not be measured. */
const valuesSchema = fields({
  /** What a launch call takes the program, and recording an event. */
  host_launch_ns: time_ns.optional(),
  record_ns: time_ns.optional(),
  /** From the end of one kernel to the start of the next in its stream. */
  chain_ns: time_ns.optional(),
  /** Time slice that the driver gives a process, and what an exchange of processes costs. */
  slice_ns: time_ns.min(1).optional(),
  switch_ns: time_ns.optional(),
  /** From the call to its effect; the preset's preempt_ns comes on top of a suspension. */
  suspend_ns: time_ns.optional(),
  resume_ns: time_ns.optional(),
  memory_bytes_per_us: z.int().positive().max(1e9).optional(),
  /** Thousandths: native/sim/model.h, rule 6. */
  sm_contention: z.int().min(0).max(4000).optional(),
  mixed_contention: z.int().min(0).max(1000).optional(),
});

export type CalibrationValues = z.infer<typeof valuesSchema>;

export const calibrationSchema = fields({
  schema: z.literal(1),
  device: z.string(),
  driver: z.string().nullable(),
  /** ISO 8601. */
  measured: z.string(),
  simulated: z.boolean(),
  values: valuesSchema,
  /** What the values come from, in the units of the names. */
  raw: z.record(z.string(), z.number()),
});

export interface Calibration extends z.infer<typeof calibrationSchema> {
  /** The file's name, for people. */
  source: string;
}

/** Keys of rigel-simulate's description. */
const KEYS: Readonly<Record<keyof CalibrationValues, string>> = {
  host_launch_ns: "launch_ns",
  record_ns: "record_ns",
  chain_ns: "gpu.chain_ns",
  slice_ns: "gpu.slice_ns",
  switch_ns: "gpu.switch_ns",
  suspend_ns: "suspend_ns",
  resume_ns: "resume_ns",
  memory_bytes_per_us: "gpu.memory_bytes_per_us",
  sm_contention: "gpu.sm_contention",
  mixed_contention: "gpu.mixed_contention",
};

/** The file that --calibration names; else the one that comes with Rigel for the preset; undefined where there is none. */
export async function readCalibration(
  named: string | undefined,
  preset: Config["simulated"]["preset"],
  profiles: string,
): Promise<Calibration | undefined> {
  const path = named ?? join(profiles, `calibration-${preset}.json`);
  if (named === undefined && !existsSync(path)) return undefined;
  const read = parse(calibrationSchema, await readJson(path), path);
  return { ...read, source: basename(path) };
}

export function gpuOf(preset: Config["simulated"]["preset"], calibration: Calibration | undefined): Gpu {
  const settings: Record<string, number> = {};
  for (const key of valuesSchema.keyof().options) {
    const value = calibration?.values[key];
    if (value !== undefined) settings[KEYS[key]] = value;
  }
  return { preset, settings };
}
