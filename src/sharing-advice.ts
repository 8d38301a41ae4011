/**
 * sharing-advice.ts: what `"sharing": "auto"` had better be, from what earlier launches or profiles tell of the programs: MPS, for which it
 * may start a daemon, or time slices, for which it may leave a daemon that serves nobody.
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
 *
 * MPS itself makes each kernel some half a microsecond longer, whoever else is there. Of a program that works for longer than the GPU does
 * nobody sees that; requests that keep the GPU busy take 5 to 12% longer, 8 to 16% beside best-effort programs that are held back, and leave no
 * gaps for others to use. In time slices each of them is delayed by a switch of 0.1 to 0.15 ms instead: of requests of 1.4 ms as much (p50 1.09 over alone, p99
 * 1.05, where MPS had 1.10 and 1.26), of longer ones less (both measured on an H200: docs/measurements.md).
 */

import type { Device } from "./device.ts";
import type { Kept, KnownKernel, KnownRequests } from "./durations.ts";
import type { Advice } from "./mps.ts";

const LONG_ns = 1_500_000;
/** What is timed beside other work can be too long: a daemon that somebody has started is left alone for kernels of so long only. */
const SURELY_LONG_ns = 2 * LONG_ns;
/** Long kernels may have this part of the GPU time. */
const LONG_PART = 0.05;
/** Fewer timed launches may all be of a program's beginning: at least as many are timed in a few steps of any training program. */
const ENOUGH_SAMPLES = 64;

/** Requests that wait for more than this part of their time, and take so long, are better off in time slices. */
const BOUND_PART = 0.5;
const BOUND_ms = 1;

/** A program as far as this is concerned. */
export interface Sharer {
  /** The client's. */
  name: string;
  /** What tells programs apart (programOf in durations.ts). */
  program: string;
  device: Device;
  /** What its profile says. */
  profile: readonly { duration_ns: number; launches: number }[] | undefined;
}

/** Undefined where too little is known. `kept`: what earlier launches have left of programs on a device. */
export function adviceFor(
  high: readonly Sharer[],
  best: readonly Sharer[],
  kept: (device: Device) => Kept,
): Advice | undefined {
  if (best.length === 0) return undefined;
  const files = new Map([...high, ...best].map(({ device }) => [device.name, device]));
  const on = new Map([...files].map(([name, device]) => [name, kept(device)]));
  const known = best.map(({ program, device, profile }) => {
    const rows = on.get(device.name)?.kernels.get(program) ?? [];
    const timed = rows.reduce((sum, { samples }) => sum + samples, 0);
    return timed >= ENOUGH_SAMPLES ? rows : (profile ?? []).map((kernel) => ({ ...kernel, samples: kernel.launches }));
  });
  const longest_ms = Math.max(...known.flat().map(({ duration_ns }) => duration_ns)) / 1e6;
  const longest = `the longest takes ${longest_ms.toPrecision(2)} ms`;
  if (known.some((kernels) => longPart(kernels, SURELY_LONG_ns) > LONG_PART))
    return {
      mode: "time-slice",
      why: `best-effort kernels are known to be long (${longest}), and can be interrupted there`,
    };
  for (const { name, program, device } of high) {
    const requests = on.get(device.name)?.requests.get(program);
    if (requests && areBound(requests))
      return {
        mode: "time-slice",
        why:
          `${name} is known to wait for the GPU for ${Math.round(100 * requests.waited_part)}% of its requests of ` +
          `${requests.length_ms.toPrecision(2)} ms, which MPS itself makes longer`,
      };
  }
  return known.every(areShort)
    ? { mode: "mps", why: `best-effort kernels are known to be short (${longest})` }
    : undefined;
}

/** Requests keep the GPU busy, and for so long that MPS costs them more than time slices do. */
export function areBound({ length_ms, waited_part }: Pick<KnownRequests, "length_ms" | "waited_part">): boolean {
  return waited_part > BOUND_PART && length_ms >= BOUND_ms;
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
