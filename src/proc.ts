/**
 * proc.ts: what /proc says about processes: which there are, what started them, what they have mapped, where this one may run.
 *
 * Only reads. A process that is gone, or that belongs to somebody else, has nothing to show and is no error.
 */

import { readdirSync, readFileSync } from "node:fs";

export interface Living {
  pid: number;
  /** As the kernel knows it: at most 15 bytes. */
  name: string;
  group: number;
  session: number;
}

/** Every process but the kernel's own, and those that have ended and only wait to be collected. */
export function living(): Living[] {
  return readdirSync("/proc")
    .filter((entry) => /^\d+$/.test(entry))
    .flatMap((entry) => {
      const { name, fields } = statOf(Number(entry));
      if (name === undefined || hasEnded(fields) || (flagsOf(fields) & OF_KERNEL) !== 0) return [];
      return [{ pid: Number(entry), name, group: Number(fields[2]), session: Number(fields[3]) }];
    });
}

/** The command of a process, which may hold anything, and the fields that follow: the state first, field 3 of proc(5). */
function statOf(pid: number): { name: string | undefined; fields: string[] } {
  const [, name, rest = ""] = /\((.*)\) (.*)$/s.exec(read(`/proc/${pid}/stat`)) ?? [];
  return { name, fields: rest.split(" ") };
}

/** A main thread that has ended is a zombie, too; the process lives while it has others (field 20). */
function hasEnded([state = "", ...more]: readonly string[]): boolean {
  return /[Xx]/.test(state) || (state === "Z" && Number(more[16]) <= 1);
}

/** PF_EXITING and PF_KTHREAD of linux/sched.h. */
const EXITING = 0x4;
const OF_KERNEL = 0x200000;

/** Field 9. */
function flagsOf(fields: readonly string[]): number {
  return Number(fields[6]);
}

/** The state of a process as one letter (proc(5)): T is stopped by a signal, t by a debugger; empty if it is gone. */
export function stateOf(pid: number): string {
  return statOf(pid).fields[0] ?? "";
}

/**
 * When a process was started, in ticks since the machine was (proc(5), field 22), which tells it from a later one of its number;
 * undefined if it has ended.
 */
export function startedAt_ticks(pid: number): string | undefined {
  const { name, fields } = statOf(pid);
  return name === undefined || hasEnded(fields) ? undefined : fields[19];
}

/** The process that a process was started by, or that has taken its place; 0 if there is none, or it is gone. */
export function parentOf(pid: number): number {
  return Number(statOf(pid).fields[1] ?? 0);
}

/** Tells one start of the machine from another. */
export function bootId(): string {
  return read("/proc/sys/kernel/random/boot_id").trim();
}

/** Whether a process was started with all of these (`NAME=value`) in its environment. */
export function startedWith(pid: number, entries: readonly string[]): boolean {
  const environment = environ(pid).split("\0");
  return entries.every((entry) => environment.includes(entry));
}

/** How often, a millisecond apart, a process is looked at that becomes another program: it takes a tenth of one, more on a busy machine. */
const BECOMING_TRIES = 500;

/**
 * Its environment as the kernel gives it; empty if it cannot be read. While it becomes another program (execve) it seems to have none,
 * or only the beginning of it.
 */
function environ(pid: number): string {
  let text = "";
  let before = "";
  for (let tries = 0; tries < BECOMING_TRIES; tries++) {
    const bytes = tryReadBytes(`/proc/${pid}/environ`);
    text = bytes?.toString() ?? "";
    const { name, fields } = statOf(pid);
    if (name === undefined || hasEnded(fields) || (flagsOf(fields) & (EXITING | OF_KERNEL)) !== 0) break;
    // Fields 50 and 51: where it begins and ends, elsewhere in each program; 26: its code, which the kernel enters last.
    const [begin, end, code] = [Number(fields[47]), Number(fields[48]), Number(fields[23])];
    // Another user's: 1 is what the kernel says to who may not look.
    if (bytes === undefined && code === 1) break;
    const seen = `${bytes?.length ?? "unreadable"} ${begin} ${end}`;
    if (code !== 0 && (seen === before || bytes?.length === end - begin)) break;
    before = seen;
    Bun.sleepSync(1);
  }
  return text;
}

/** The environment that a process was started with; empty if it cannot be read. */
export function environmentOf(pid: number): Record<string, string> {
  const entries = environ(pid)
    .split("\0")
    .filter((entry) => entry.includes("="));
  return Object.fromEntries(
    entries.map((entry) => [entry.slice(0, entry.indexOf("=")), entry.slice(entry.indexOf("=") + 1)]),
  );
}

/** The command line that a process was started with, its arguments separated by spaces; empty if it is gone. */
export function commandOf(pid: number): string {
  return read(`/proc/${pid}/cmdline`).replaceAll("\0", " ").trim();
}

/** Whether a process has this file mapped, also if it has been replaced since. */
export function hasMapped(pid: number, path: string): boolean {
  return new RegExp(` ${RegExp.escape(path)}( \\(deleted\\))?$`, "m").test(read(`/proc/${pid}/maps`));
}

/** Memory of a process that is in RAM, in bytes (VmRSS of proc(5)); undefined if it is gone. */
export function resident_bytes(pid: number): number | undefined {
  const kilobytes = /^VmRSS:\s*(\d+) kB$/m.exec(read(`/proc/${pid}/status`))?.[1];
  return kilobytes === undefined ? undefined : Number(kilobytes) * 1024;
}

/** The processors that this process may run on, in their order: proc_pid_status(5). */
export function allowedProcessors(): number[] {
  const [, list = ""] = /^Cpus_allowed_list:\s*(\S+)$/m.exec(read("/proc/self/status")) ?? [];
  return list.split(",").flatMap((range) => {
    const [first = 0, last = first] = range.split("-").map(Number);
    return Array.from({ length: last - first + 1 }, (_, index) => first + index);
  });
}

/** Whether this process was started with a signal ignored, as by nohup. */
export function ignored(signal: number): boolean {
  const mask = /^SigIgn:\s*([0-9a-f]+)$/m.exec(read("/proc/self/status"))?.[1];
  return mask !== undefined && ((BigInt(`0x${mask}`) >> BigInt(signal - 1)) & 1n) === 1n;
}

function read(path: string): string {
  return tryReadBytes(path)?.toString() ?? "";
}

function tryReadBytes(path: string): Buffer | undefined {
  try {
    return readFileSync(path);
  } catch {
    return undefined;
  }
}
