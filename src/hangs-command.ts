/**
 * hangs-command.ts: `rigel hangs`: prints what every thread waits in, who hangs, and because of whom.
 */

import { resolve } from "node:path";
import type { Command } from "commander";
import { liveSegments } from "./discover.ts";
import { reason } from "./errors.ts";
import { writeBundle } from "./hang-bundle.ts";
import { HangWatch, lookEvery_ms } from "./hang-watch.ts";
import { type Found, type Hangs, allHangs, hangsOf, momentOf, seconds as secondsText } from "./hangs.ts";
import { SIGNAL_STATUS, onRequestToEnd } from "./interrupt.ts";
import { printable, progress } from "./log.ts";
import { Native } from "./native.ts";
import { checkNewFolder } from "./output.ts";
import { aligned } from "./report.ts";
import type { Segment } from "./segment.ts";
import { seconds } from "./trace-command.ts";

interface HangsFlags {
  json?: true;
  threshold: number;
  watch?: true;
  bundle?: string;
  segment?: string;
}

const EXAMPLES = `
Examples:
  rigel hangs                         every thread of every client: what it is in, and since when
  rigel hangs --threshold 30s --json  who has waited for half a minute, as JSON
  rigel hangs --bundle .              and keep what shows it in a folder here
  rigel hangs --watch                 tell of every new hang and keep what shows it, until Ctrl-C, also of launches to come

A client that Rigel holds back, at the gate or off the GPU, does not hang. Without --watch the exit
status is 1 if something hangs.`;

/** Between the two looks that are compared. */
const APART_ms = 1000;

/** Adds `rigel hangs`. */
export function addHangs(program: Command): void {
  program
    .command("hangs")
    .description("show what every thread of every client waits in, who hangs, and because of whom")
    .option("--json", "print as JSON, with --watch one line a look")
    .option("--threshold <time>", "what waits for longer hangs: 10s, 500ms", seconds, 10)
    .option("--watch", "go on looking, and keep what shows a hang when there is one")
    .option("--bundle <folder>", "keep what shows a hang in a new folder in this one")
    .option("--segment <path>", "a segment file, or the folder of those (default: /dev/shm)")
    .addHelpText("after", EXAMPLES)
    .action(runHangs);
}

async function runHangs(flags: HangsFlags): Promise<void> {
  const live = liveSegments(await Native.load(), flags.segment);
  if (flags.watch) {
    if (flags.bundle !== undefined) checkNewFolder("--bundle", flags.bundle);
    await watch(live, flags);
    return;
  }
  const segments = live();
  if (segments.length === 0) {
    process.stdout.write(
      flags.json
        ? `${JSON.stringify(allHangs([]), null, 2)}\n`
        : "nothing runs under Rigel; `rigel launch` starts clients\n",
    );
    return;
  }
  const before = segments.map((segment) => momentOf(segment, flags.threshold));
  await Bun.sleep(APART_ms);
  const all: Hangs[] = [];
  for (const [index, segment] of segments.entries()) {
    const earlier = before[index];
    if (!earlier) continue;
    const hangs = hangsOf(earlier, momentOf(segment, flags.threshold), flags.threshold);
    all.push(hangs);
    if (hangs.hung > 0 && flags.bundle !== undefined)
      try {
        progress(`what shows it is in ${await writeBundle(segment, hangs, resolve(flags.bundle))}`);
      } catch (thrown) {
        // What was found is still to be printed.
        progress(`what shows it cannot be kept: ${reason(thrown)}; name another folder with --bundle`);
      }
  }
  const document = allHangs(all);
  process.stdout.write(flags.json ? `${JSON.stringify(document, null, 2)}\n` : text(all));
  if (document.hung > 0) process.exitCode = 1;
}

/** Looks until a signal comes, or nobody reads what is found. */
async function watch(live: () => Segment[], flags: HangsFlags): Promise<void> {
  const over = Promise.withResolvers<void>();
  const off = onRequestToEnd((signal) => {
    process.exitCode = SIGNAL_STATUS[signal];
    over.resolve();
  });
  // Where there is no room for it that has its own status.
  process.stdout.on("error", () => over.resolve());
  let watches = new Map<Segment, HangWatch>();
  let gone: Promise<unknown> = Promise.resolve();
  const list = (): void => {
    const left = watches;
    watches = new Map(live().map((segment) => [segment, left.get(segment) ?? watchOf(segment, flags)]));
    for (const [segment, one] of left)
      if (!watches.has(segment)) gone = Promise.all([gone, one[Symbol.asyncDispose]()]);
  };
  list();
  const timer = setInterval(list, lookEvery_ms(flags.threshold));
  progress(`watching ${watches.size} ${watches.size === 1 ? "launch" : "launches"}, and those to come; Ctrl-C ends it`);
  await over.promise;
  clearInterval(timer);
  await Promise.all([gone, ...watches.values().map((one) => one[Symbol.asyncDispose]())]);
  off();
}

function watchOf(segment: Segment, flags: HangsFlags): HangWatch {
  return new HangWatch({
    segment,
    threshold_s: flags.threshold,
    folder: flags.bundle === undefined ? undefined : resolve(flags.bundle),
    say: progress,
    looked: flags.json ? (hangs) => process.stdout.write(`${JSON.stringify(hangs)}\n`) : undefined,
  });
}

/** A table of all processes, then of their threads, then what there is to say of those that hang or are held back. */
function text(all: readonly Hangs[]): string {
  const found = all
    .flatMap(({ processes }) => processes)
    .toSorted((a, b) => a.name.localeCompare(b.name) || (a.rank ?? 0) - (b.rank ?? 0));
  const rows = found.flatMap((one) => rowsOf(one));
  const table = aligned(["client", "pid", "rank", "state", "thread", "call", "for", "last operation"], rows, 8);
  const said = found.filter(({ verdict }) => verdict !== "working" && verdict !== "ended").map((one) => sentence(one));
  const unseen = found.flatMap(unseenOf);
  const below = [...said, ...unseen].map(printable);
  return `${[...table, ...(below.length > 0 ? ["", ...below] : [])].join("\n")}\n`;
}

/** What is not known of a process that is there, and why. */
function unseenOf(one: Found): string[] {
  if (one.verdict === "dead" || one.verdict === "ended") return [];
  const { threads_lost: threads, communicators_lost: communicators } = one;
  return [
    ...(threads > 0
      ? [`${whoIs(one)}: what ${many(threads, "more thread")} of it do is not known, for want of room`]
      : []),
    ...(communicators > 0
      ? [
          `${whoIs(one)}: ${many(communicators, "communicator")} of it cannot be followed (split off without blocking, or for want of ` +
            "room): who is missing in a collective of those is not told",
        ]
      : []),
  ];
}

function many(count: number, what: string): string {
  return `${count} ${what}${count === 1 ? "" : "s"}`;
}

function whoIs({ name, pid, rank }: Found): string {
  return `${name} (${pid}${rank === null ? "" : `, rank ${rank}`})`;
}

function sentence(one: Found): string {
  const bound = one.unfinished?.at_least ? " (older ones may have left the record)" : "";
  return `${one.hung ? "HANGS: " : ""}${whoIs(one)} ${one.why}${bound}`;
}

/** One row for each thread: the one that shows what is going on first. */
function rowsOf({ name, pid, rank, verdict, thread, threads }: Found): string[][] {
  const ordered = threads.toSorted((a, b) => Number(b.tid === thread?.tid) - Number(a.tid === thread?.tid));
  const first = [name, String(pid), rank === null ? "-" : String(rank), verdict];
  if (ordered.length === 0) return [[...first, "-", "-", "-", "-"]];
  return ordered.map((one, index) => [
    ...(index === 0 ? first : ["", "", "", ""]),
    `${one.tid} ${one.name}`,
    one.call ?? "-",
    one.call === null ? "-" : secondsText(one.seconds),
    one.last === null ? "-" : lastText(one.last),
  ]);
}

function lastText({ operation, seconds_ago, kernel }: NonNullable<Found["threads"][number]["last"]>): string {
  const launched = /Launch/.test(operation) && kernel !== null ? ` ${kernel}` : "";
  return `${operation}${launched} ${secondsText(seconds_ago)} ago`;
}
