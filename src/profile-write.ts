/**
 * profile-write.ts: writes profiles: Rigel's own format, and Orion's five columns for its users.
 *
 * What is written is read back exactly by profile.ts and by native/replay/profile.c. A file appears whole or not at all.
 */

import { rmSync } from "node:fs";
import { type FileHandle, access, constants, open, realpath, rename, stat } from "node:fs/promises";
import { RigelError, reason } from "./errors.ts";
import { onEnd } from "./interrupt.ts";
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

const FLUSH_characters = 1 << 18;

/**
 * A text file that is written piece by piece under another name and gets its own when it is complete. A device or a pipe is written as
 * it is: to give its name to a file would be the end of it.
 */
export class WholeFile {
  readonly #path: string;
  #handle: FileHandle | undefined;
  /** The file that becomes `to`, and what removes it until then. */
  #part: { path: string; to: string; end: Disposable } | undefined;
  #pending = "";

  constructor(path: string) {
    this.#path = path;
  }

  /** Throws if it cannot be written: to be called before minutes are spent on what goes into it. */
  async check(): Promise<void> {
    try {
      const place = await this.#place();
      if (place === undefined) return await access(this.#path, constants.W_OK);
      using _ = onEnd(() => rmSync(place.path, { force: true }));
      await (await open(place.path, "w")).close();
    } catch (thrown) {
      throw this.#error(thrown);
    }
  }

  /** Where links lead, and what is written first beside it; undefined of what is no file. */
  async #place(): Promise<{ path: string; to: string } | undefined> {
    const found = await stat(this.#path).catch(() => undefined);
    if (found?.isDirectory()) throw new Error("EISDIR: it is a folder");
    if (found && !found.isFile()) return undefined;
    const to = found ? await realpath(this.#path) : this.#path;
    return { path: `${to}.part-${process.pid}`, to };
  }

  /** Appends. Resolves at once unless much has gathered. */
  async write(text: string): Promise<void> {
    this.#pending += text;
    if (this.#pending.length >= FLUSH_characters) await this.#flush();
  }

  async #flush(): Promise<void> {
    const text = this.#pending;
    this.#pending = "";
    try {
      this.#handle ??= await this.#open();
      await this.#handle.appendFile(text);
    } catch (thrown) {
      throw this.#error(thrown);
    }
  }

  async #open(): Promise<FileHandle> {
    const place = await this.#place();
    if (place) this.#part = { ...place, end: onEnd(() => rmSync(place.path, { force: true })) };
    return await open(place?.path ?? this.#path, "w");
  }

  /** Ends the file and gives it its name. */
  async finish(): Promise<void> {
    await this.#flush();
    try {
      await this.#close();
      if (this.#part) await rename(this.#part.path, this.#part.to);
    } catch (thrown) {
      throw this.#error(thrown);
    }
  }

  /** Leaves nothing behind, unless it was finished. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.#close();
    this.#part?.end[Symbol.dispose]();
    this.#part = undefined;
  }

  async #close(): Promise<void> {
    const handle = this.#handle;
    this.#handle = undefined;
    await handle?.close();
  }

  #error(thrown: unknown): RigelError {
    return new RigelError("command", `${this.#path}: cannot be written (${reason(thrown)})`, { cause: thrown });
  }
}
