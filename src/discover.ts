/**
 * discover.ts: which segments of this user are live on this machine, whoever made them.
 *
 * Every launch makes its own segment, `rigel-<uid>-<pid>-<phase>`, in one folder (`defaultSegmentFolder`); so does whatever else makes one.
 * A file that no process stands behind is left of something that was killed, and is not listed; neither is one of another user
 * or version. Only reads.
 */

import { readdirSync, statSync } from "node:fs";
import { join } from "node:path";
import type { Native } from "./native.ts";
import { Segment } from "./segment.ts";

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
      const inode = statSync(path, { throwIfNoEntry: false })?.ino;
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
