/**
 * profile-write.ts: writes profiles: Rigel's own format, and Orion's five columns for its users.
 *
 * What is written is read back exactly by profile.ts and by native/replay/profile.c.
 */

import { COLUMN_NAMES, type Operation, RECORDED_COLUMN_NAMES } from "./profile.ts";

/** Units of the columns that do not have theirs in their names. */
const UNITS = "flops FLOP, sms SMs, registers per thread, shared_bytes per block";

/** The first line of Rigel's format. Facts are for people and for later commands; they hold no `;` and no line end. */
export function factsLine(facts: ReadonlyMap<string, string>, version: 1 | 2 = 1): string {
  const pairs = [...facts, ["units", UNITS]].map(([key = "", value = ""]) => `${plain(key)}=${plain(value)}`);
  return `# rigel-profile ${version}; ${pairs.join("; ")}\n`;
}

const LONGEST_FACT_characters = 200;

function plain(text: string): string {
  return text
    .replaceAll(/[;\r\n\0]+/g, " ")
    .trim()
    .slice(0, LONGEST_FACT_characters);
}

export const RIGEL_HEADER = `${COLUMN_NAMES.join(",")}\n`;
export const RECORDED_HEADER = `${RECORDED_COLUMN_NAMES.join(",")}\n`;

/** A row of Rigel's format. */
export function rigelRow(operation: Operation): string {
  const { name, kind, stream, grid, block, registers, shared_bytes, bytes, duration_ns, gap_ns } = operation;
  const { family, bound, bound_reason, sms, flops, dram_bytes, request } = operation;
  return (
    `${quoted(name)},${kind},${stream},${grid.join(",")},${block.join(",")},${registers},${shared_bytes},${bytes},` +
    `${duration_ns},${gap_ns},${family},${bound},${quoted(bound_reason)},${sms},${flops},${dram_bytes},${request}\n`
  );
}

/** A row of a recording, version 2. */
export function recordedRow(operation: Operation): string {
  const { graph = 0, gemm } = operation;
  const { m, n, k, batch, type } = gemm ?? { m: 0, n: 0, k: 0, batch: 0, type: "" };
  return `${rigelRow(operation).trimEnd()},${graph},${m},${n},${k},${batch},${quoted(type)}\n`;
}

export const ORION_HEADER = "Name,Profile,Memory_footprint,SM_usage,Duration\n";

/** A row of Orion's format, which has kernels alone; "" for anything else. SM_usage is at least 1 there. */
export function orionRow({ name, kind, bound, sms, grid, duration_ns }: Operation): string {
  if (kind !== "kernel") return "";
  const profile = bound === "compute" ? 1 : bound === "memory" ? 0 : -1;
  const blocks = grid.reduce((product, size) => product * size, 1);
  return `${quoted(name)},${profile},0,${Math.max(1, sms || Math.min(blocks, 2 ** 31 - 1))},${duration_ns}\n`;
}

/** As CSV needs it. `#` starts a comment in Rigel's format, and unquoted blanks at the ends are dropped. */
function quoted(text: string): string {
  return /[",\r\n]|^[#\s]|\s$/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
