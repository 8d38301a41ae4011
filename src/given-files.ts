/**
 * given-files.ts: the open files, besides the first three, that this process was started with, as a shell does for `<(command)`.
 *
 * cli.ts imports this before all else: Bun opens standard output and error once more for who writes to them, and what Rigel opens is
 * nobody else's.
 */

import { readdirSync, readlinkSync } from "node:fs";

/** What each leads to. What Bun opens as it starts is no file. */
const given: ReadonlyMap<number, string> = new Map(
  readdirSync("/proc/self/fd")
    .map(Number)
    .flatMap((file) => {
      const to = file > 2 ? leadsTo(file) : undefined;
      return to === undefined || to.startsWith("anon_inode:") ? [] : [[file, to] as const];
    }),
);

/** Their numbers, as far as they are open still. */
export function givenFiles(): number[] {
  return [...given].filter(([file, to]) => leadsTo(file) === to).map(([file]) => file);
}

function leadsTo(file: number): string | undefined {
  try {
    return readlinkSync(`/proc/self/fd/${file}`);
  } catch {
    return undefined;
  }
}
