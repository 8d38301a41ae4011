/**
 * short-kernels.ts: whether best-effort programs are known to launch short kernels only, so that `"sharing": "auto"` may start an MPS
 * daemon for them, or long ones, so that it may leave a daemon that runs alone.
 *
 * Under MPS programs run side by side and best-effort work stops between kernels, but one that runs cannot be interrupted: a
 * request that comes shares the GPU with it until it ends. In time slices best-effort work is taken off the GPU in the middle of
 * kernels, but nothing runs in the gaps that a request leaves. So short kernels are better off under MPS and long ones in time
 * slices. Where the line is was found in simulation (`rigel simulate --policy slo+mps slo+slices`, ResNet-50 and BERT inference
 * at 60 requests/s, `--duration 60`): beside GPT-2 training, a fifth of whose time is in three kernels of 6 ms, p95 is 1.45 and 1.13
 * times alone under MPS, 1.01 and 1.06 in slices. MobileNetV2 training, a fifth of whose time is in kernels of 1.2 ms, gets shares of
 * 0.93 and 0.82 under MPS, 0.84 and 0.76 in slices. In between, with each of GPT-2's three rows in the profile replaced by several
 * shorter ones: at 2 ms its shares are 0.86 and 0.78 under MPS, at p99s of 1.08 and 1.03, against 0.85 and 0.76 at 1.00 and 1.05; at 1 ms
 * 0.88 and 0.78 at 1.07 and 1.03.
 */

import type { Device } from "./device.ts";
import { type KnownKernel, keptKernels } from "./durations.ts";
import type { Native } from "./native.ts";

const LONG_ns = 1_500_000;
/** What is timed beside other work can be too long: a daemon that somebody has started is left alone for kernels of so long only. */
const SURELY_LONG_ns = 2 * LONG_ns;
/** Long kernels may have this part of the GPU time. */
const LONG_PART = 0.05;
/** Fewer timed launches may all be of a program's beginning: at least as many are timed in a few steps of any training program. */
const ENOUGH_SAMPLES = 64;

/** A best-effort program. */
export interface BestEffort {
  /** What tells programs apart (programOf in durations.ts). */
  program: string;
  device: Device;
  /** What its profile says. */
  profile: readonly { duration_ns: number; launches: number }[] | undefined;
}

/** What is known of the kernels of best-effort programs. */
export interface Lengths {
  /** All are short; false: those of one program at least are long for sure. */
  short: boolean;
  /** How long the longest one is. */
  longest_ns: number;
}

/** Undefined where neither can be told, as of one program nothing is known. `folder`: of the kept durations. */
export function lengthsOf(programs: readonly BestEffort[], folder: string, native: Native): Lengths | undefined {
  const files = new Map(programs.map(({ device }) => [device.name, device]));
  const ofDevices = new Map([...files].map(([name, device]) => [name, keptKernels(folder, device, native)]));
  const known = programs.map(({ program, device, profile }) => {
    const kept = ofDevices.get(device.name)?.get(program) ?? [];
    const timed = kept.reduce((sum, { samples }) => sum + samples, 0);
    return timed >= ENOUGH_SAMPLES ? kept : (profile ?? []).map((kernel) => ({ ...kernel, samples: kernel.launches }));
  });
  const short = known.length > 0 && known.every(areShort);
  if (!short && !known.some((kernels) => longPart(kernels, SURELY_LONG_ns) > LONG_PART)) return undefined;
  return { short, longest_ns: Math.max(...known.flat().map(({ duration_ns }) => duration_ns)) };
}

/**
 * Of one program. Samples stand for launches, as at the gate one in so many is timed. In time slices it is the first few of each kernel:
 * those that are launched seldom count for more than their time then, which the long ones mostly are.
 */
export function areShort(kernels: readonly KnownKernel[]): boolean {
  return kernels.length > 0 && longPart(kernels, LONG_ns) <= LONG_PART;
}

/** The part of the GPU time in kernels of so long; 0 of none. */
function longPart(kernels: readonly KnownKernel[], long_ns: number): number {
  const long = kernels.filter(({ duration_ns }) => duration_ns >= long_ns);
  return long.length > 0 ? time_ns(long) / time_ns(kernels) : 0;
}

function time_ns(of: readonly KnownKernel[]): number {
  return of.reduce((sum, { duration_ns, samples }) => sum + duration_ns * samples, 0);
}
