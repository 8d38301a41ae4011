/** output.ts: files that results are written to. One appears whole or not at all, and what was there stays until then. */

import { accessSync, constants, existsSync } from "node:fs";
import { type FileHandle, access, open, realpath, rename, stat } from "node:fs/promises";
import { basename, dirname, join, resolve } from "node:path";
import { RigelError, reason } from "./errors.ts";
import { onEnd } from "./interrupt.ts";
import { removeIfPossible } from "./path.ts";

/** Whether files can be made in it. */
export function checkFolder(option: string, folder: string): void {
  try {
    accessSync(`${folder}/`, constants.W_OK | constants.X_OK);
  } catch (thrown) {
    throw new RigelError(
      "machine",
      `${option}: expected a folder that can be written to, got ${folder} (${reason(thrown)})`,
      {
        cause: thrown,
      },
    );
  }
}

/** The same of a folder that may still have to be made, with those that it is in. */
export function checkNewFolder(option: string, folder: string): void {
  let made = resolve(folder);
  while (!existsSync(made) && dirname(made) !== made) made = dirname(made);
  checkFolder(option, made);
}

/** Before minutes are spent on what could not be written down. */
export async function checkOutput(option: string, file: string): Promise<void> {
  await new WholeFile(file, { option }).check();
}

/** A file that an option names, or one that is read: what errors call it, and where it is. */
interface Named {
  option: string;
  file: string | undefined;
}

/**
 * Throws where a file that is to be written is one that is read, or one that another option has written; devices and pipes may be. `-`, which means
 * standard output elsewhere, is no file.
 */
export async function checkApart(written: readonly Named[], read: readonly (string | undefined)[] = []): Promise<void> {
  const taken = new Map<string, string>();
  for (const file of read) {
    const place = await placeOf(file);
    if (place !== undefined) taken.set(place, "what is read");
  }
  for (const { option, file } of written) {
    if (file === "-") throw new RigelError("command", `${option}: expected a file, got - (./- is one of that name)`);
    // As of a variable of the shell that is not set: nothing but its last step would fail.
    if (file === "") throw new RigelError("command", `${option}: expected a file, got ""`);
    const place = await placeOf(file);
    if (place === undefined) continue;
    const other = taken.get(place);
    if (other !== undefined)
      throw new RigelError("command", `${option}: expected another file than ${other}, got ${file}`);
    taken.set(place, `that of ${option}`);
  }
}

/** Where links to a file lead, or where it would be; undefined of what is no file. */
async function placeOf(file: string | undefined): Promise<string | undefined> {
  if (file === undefined || file === "-") return undefined;
  const found = await stat(file).catch(() => undefined);
  if (found && !found.isFile()) return undefined;
  const folder = await realpath(dirname(resolve(file))).catch(() => dirname(resolve(file)));
  return found ? await realpath(file) : join(folder, basename(file));
}

/** Writes it, or says which option's file could not be written, and why. */
export async function writeOutput(option: string, file: string, text: string): Promise<void> {
  await using written = new WholeFile(file, { option });
  await written.write(text);
  await written.finish();
}

const MACHINE_FAULTS = new Set(["ENOSPC", "EDQUOT", "EFBIG", "EIO", "EROFS"]);

/** Whether another file to write would not help. */
function isMachineAtFault(thrown: unknown): boolean {
  return thrown instanceof Error && "code" in thrown && MACHINE_FAULTS.has(String(thrown.code));
}

/** What the name of a file ends in that is not complete. */
export const PART = `.part-${process.pid}`;

/** Why a file cannot be written, by its own name: nobody asked for the one that it is written to first. */
export function whyNot(thrown: unknown): string {
  return reason(thrown).replaceAll(PART, "");
}

const FLUSH_characters = 1 << 18;

/**
 * A text file that is written piece by piece under another name and gets its own when it is complete. A device or a pipe is written as
 * it is: to give its name to a file would be the end of it. One that is replaced passes its permissions on.
 */
export class WholeFile {
  readonly #path: string;
  readonly #mode: number;
  /** What it is called in errors. */
  readonly #called: string;
  #handle: FileHandle | undefined;
  /** The file that becomes `to`, and what removes it until then. */
  #part: { path: string; to: string; end: Disposable } | undefined;
  #pending = "";

  /** `option` is the one that names it, for errors. */
  constructor(path: string, { option, mode = 0o666 }: { option?: string; mode?: number } = {}) {
    this.#path = path;
    this.#mode = mode;
    this.#called = option === undefined ? path : `${option}: ${path}`;
  }

  /** Throws if it cannot be written: to be called before minutes are spent on what goes into it. */
  async check(): Promise<void> {
    try {
      const place = await this.#place();
      if (place === undefined) return;
      using _ = onEnd(() => removeIfPossible(place.path));
      await (await open(place.path, "w", place.mode)).close();
    } catch (thrown) {
      throw this.#error(thrown);
    }
  }

  /** Where links lead, and what is written first beside it; undefined of what is no file. */
  async #place(): Promise<{ path: string; to: string; mode: number } | undefined> {
    const found = await stat(this.#path).catch(() => undefined);
    if (found?.isDirectory()) throw new Error("EISDIR: it is a folder");
    if (found) await access(this.#path, constants.W_OK);
    if (found && !found.isFile()) return undefined;
    const to = found ? await realpath(this.#path) : this.#path;
    return { path: to + PART, to, mode: found ? found.mode & 0o777 : this.#mode };
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
    if (place) this.#part = { ...place, end: onEnd(() => removeIfPossible(place.path)) };
    return await open(place?.path ?? this.#path, "w", place?.mode);
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
    const code = isMachineAtFault(thrown) ? "machine" : "command";
    return new RigelError(code, `${this.#called}: cannot be written (${whyNot(thrown)})`, { cause: thrown });
  }
}
