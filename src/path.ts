/**
 * path.ts: what lies at a path that somebody has given.
 *
 * What cannot be looked at is not there: nothing has that name, a part of it is no folder, or nobody may look.
 */

import { lstatSync, rmSync, statSync, type Stats } from "node:fs";

/** What it leads to. */
export function statAt(path: string): Stats | undefined {
  return found(() => statSync(path));
}

/** The same of a link itself. */
export function entryAt(path: string): Stats | undefined {
  return found(() => lstatSync(path));
}

export function isFolder(path: string): boolean {
  return statAt(path)?.isDirectory() ?? false;
}

/** Removes a file if there is one that can be: for who cleans up, and has another error to tell. */
export function removeIfPossible(path: string): void {
  found(() => rmSync(path, { force: true }));
}

function found<T>(look: () => T): T | undefined {
  try {
    return look();
  } catch {
    return undefined;
  }
}
