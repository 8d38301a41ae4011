/**
 * attachment.ts: why a program that was started under Rigel is no client of its segment, in words.
 */

import type { Segment } from "./segment.ts";

/** A program that was started as a client, as far as that has been seen. */
export interface Attaching {
  attached: boolean;
  env: Record<string, string | undefined>;
  /** What was seen of its processes from outside, while it has not attached. */
  seen: { processes: number; mapped: number } | undefined;
  /** Set once it has ended. */
  exit: { status: number; text: string; at_ms: number } | undefined;
  startedAt_ms: number;
  /** What the library in it said about running without Rigel, where its output has been read. */
  bare?: string | undefined;
}

/** RIGEL_DISABLE, where it keeps a program from being a client: the library takes all but nothing and 0 for yes. */
export function disabling({ RIGEL_DISABLE: value }: Attaching["env"]): string | undefined {
  return value === "" || value === "0" ? undefined : value;
}

/** Of a line of a program's output, what the library says where it lets the program run without Rigel. */
export function bareReason(line: string): string | undefined {
  return /^rigel: (.*; running without Rigel\b.*)$/.exec(line)?.[1];
}

/** Why a client has not attached; undefined if it has. */
export function problemOf(
  { attached, exit, env, seen, startedAt_ms, bare }: Attaching,
  segment: Segment,
): string | undefined {
  if (attached) return undefined;
  const disabled = disabling(env);
  if (disabled !== undefined) return `RIGEL_DISABLE=${disabled} is set in its environment`;
  const notLoaded =
    "librigel.so is not loaded in it: it is statically linked or setuid, or something cleared LD_PRELOAD";
  const unloaded = seen !== undefined && seen.processes > 0 && seen.mapped === 0;
  // Counts the whole segment's processes, so whatever is known of this client comes first.
  const full =
    segment.refused > 0
      ? `the segment is full: it has room for ${segment.capacity} processes; start fewer at a time`
      : undefined;
  if (bare !== undefined && full === undefined) return bare;
  if (exit) {
    if (full !== undefined && !unloaded && exit.status === 0) return full;
    const after_s = ((exit.at_ms - startedAt_ms) / 1000).toFixed(1);
    return `it ${exit.text} after ${after_s} s without having initialised CUDA${unloaded ? `; ${notLoaded}` : ""}`;
  }
  if (unloaded) return notLoaded;
  if (full !== undefined) return full;
  return seen
    ? "librigel.so is loaded in it, but it has not initialised CUDA (cuInit)"
    : "it was ended before it had initialised CUDA (cuInit)";
}
