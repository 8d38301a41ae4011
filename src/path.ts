/**
 * path.ts: what lies at a path that somebody has given, and folders made there.
 *
 * What cannot be looked at is not there: nothing has that name, a part of it is no folder, or nobody may look.
 */

import {
  accessSync,
  chmodSync,
  constants,
  existsSync,
  lstatSync,
  mkdirSync,
  rmSync,
  statSync,
  type Stats,
} from "node:fs";
import { homedir } from "node:os";
import { dirname } from "node:path";

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

/** What was to be expected of a folder that a program is to be started in; undefined: it can be. */
export function folderProblem(path: string): string | undefined {
  if (!isFolder(path)) return "expected a folder that exists";
  return found(() => accessSync(path, constants.X_OK) ?? true) ? undefined : "expected a folder that you may enter";
}

/** Makes a folder that is not there, and those that it is in. Whatever the umask takes, this user can use them. */
export function makeFolder(path: string, mode = 0o777 & ~process.umask()): void {
  if (existsSync(path)) return;
  makeFolder(dirname(path));
  // Another rigel may have made it by now.
  if (mkdirSync(path, { mode, recursive: true }) !== undefined) chmodSync(path, mode | 0o700);
}

/** With an empty environment from the user database; undefined: that has none, as where containers run under any number. */
export function homeFolder(environment: Record<string, string | undefined> = process.env): string | undefined {
  return environment["HOME"] || found(homedir);
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
