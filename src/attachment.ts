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
}

/** Why a client has not attached; undefined if it has. */
export function problemOf(
  { attached, exit, env, seen, startedAt_ms }: Attaching,
  segment: Segment,
): string | undefined {
  if (attached) return undefined;
  if (env["RIGEL_DISABLE"] === "1") return "RIGEL_DISABLE=1 is set in its environment";
  const notLoaded =
    "librigel.so is not loaded in it: it is statically linked or setuid, or something cleared LD_PRELOAD";
  const unloaded = seen !== undefined && seen.processes > 0 && seen.mapped === 0;
  // Counts the whole segment's processes, so whatever is known of this client comes first.
  const full =
    segment.refused > 0
      ? `the segment is full: it has room for ${segment.capacity} processes; start fewer at a time`
      : undefined;
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
