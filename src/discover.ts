/**
 * discover.ts: which segments of this user are live on this machine, whoever made them.
 *
 * Every launch makes its own segment, `rigel-<uid>-<pid>-<phase>`, in one folder (`defaultSegmentFolder`); so does whatever else makes one.
 * A file that no process stands behind is left of something that was killed, and is not listed; neither is one of another user
 * or version. Only reads.
 */

import { accessSync, constants, existsSync, readdirSync } from "node:fs";
import { join, resolve } from "node:path";
import { RigelError, reason } from "./errors.ts";
import type { Native } from "./native.ts";
import { isFolder, statAt } from "./path.ts";
import { defaultSegmentFolder } from "./plan.ts";
import { Segment } from "./segment.ts";

/** The folder of segments that `--segment` names; without it, where they are. Throws if there is none. */
export function segmentFolder(given: string | undefined): string {
  if (given !== undefined && !isFolder(given))
    throw new RigelError("command", `--segment: expected a folder that exists, got ${given || '""'}`);
  return resolve(given ?? defaultSegmentFolder(process.env));
}

/** The same for who makes a segment there. */
export function writableSegmentFolder(given: string | undefined): string {
  // resolve() takes no name for the current folder.
  const folder = given === "" ? given : resolve(given ?? defaultSegmentFolder(process.env));
  try {
    readdirSync(folder);
    accessSync(folder, constants.W_OK);
  } catch (thrown) {
    throw new RigelError(
      "segment",
      `no segment file can be created in ${folder || '""'} (${reason(thrown)}); ` +
        "choose a folder that exists and can be written to with --segment DIR",
      { cause: thrown },
    );
  }
  return folder;
}

/** What is live, whenever it is called: the segment that `--segment` names, or those of a folder. Throws if it is neither. */
export function liveSegments(native: Native, given: string | undefined): () => Segment[] {
  if (given !== undefined) {
    const place = resolve(given);
    const found = statAt(given);
    if (!found)
      throw new RigelError(
        "command",
        `--segment: expected a segment file, or the folder of those, got ${given || '""'}`,
      );
    if (!found.isDirectory()) {
      const segment = Segment.open(native, place);
      return () => (existsSync(place) ? [segment] : []);
    }
  }
  const segments = new Segments(native, segmentFolder(given));
  return () => segments.live();
}

/** The segments of one folder, each opened once for as long as it is there. */
export class Segments {
  readonly #native: Native;
  readonly #folder: string;
  /** By file name and inode: a new file of the same name is another segment. */
  #open = new Map<string, Segment>();

  /** `folder`: as defaultSegmentFolder gives it, or what `--segment` names. */
  constructor(native: Native, folder: string) {
    this.#native = native;
    this.#folder = folder;
  }

  /** Those that are live now, by name. Each `Segment` is the same object for as long as it is listed. */
  live(): Segment[] {
    const found = new Map<string, Segment>();
    for (const name of this.#names()) {
      const path = join(this.#folder, name);
      const inode = statAt(path)?.ino;
      if (inode === undefined || !this.#native.isLive(path)) continue;
      const key = `${name} ${inode}`;
      const segment = this.#open.get(key) ?? this.#tryOpen(path);
      if (segment) found.set(key, segment);
    }
    this.#open = found;
    return [...found.values()];
  }

  #names(): string[] {
    const mine = new RegExp(`^rigel-${process.getuid?.() ?? 0}-[a-z0-9]+(-\\d+)*$`);
    try {
      return readdirSync(this.#folder)
        .filter((name) => mine.test(name))
        .toSorted();
    } catch {
      return [];
    }
  }

  /** It may have gone since it was listed. */
  #tryOpen(path: string): Segment | undefined {
    try {
      return Segment.open(this.#native, path);
    } catch {
      return undefined;
    }
  }
}
