/**
 * top.ts: `rigel top`: all live launches of this user, measured once an interval, drawn in a terminal or written line by line.
 *
 * top-view.ts says what is shown, terminal.ts how a terminal is taken over. Only reads segments, but for `p`.
 */

import { type Command } from "commander";
import { between } from "./arguments.ts";
import { findClient, pauseClient } from "./control.ts";
import { Segments, segmentFolder } from "./discover.ts";
import { RigelError } from "./errors.ts";
import { GpuShares } from "./gpu-share.ts";
import { SIGNAL_STATUS } from "./interrupt.ts";
import { Native } from "./native.ts";
import type { Segment } from "./segment.ts";
import { type Reading, type Stats, readingOf, statsOf } from "./stats.ts";
import { Terminal, canDraw, hasColour } from "./terminal.ts";
import { SORTS, type View, keyOf, render, rowsOf } from "./top-view.ts";

const EXAMPLES = `
Examples:
  rigel top                                   what every client does, once a second; h explains the rest
  rigel top --once                            one table, of one second
  rigel top --interval 5 >> log.txt           a table every 5 seconds
  rigel top --json | jq -c '.segments[].clients[] | [.name, .gpu_share, .rates.requests.p99_ms]'`;

/** Columns of a table that goes to a file, unless COLUMNS says otherwise. */
const FILE_WIDTH = 160;

interface Flags {
  once?: true;
  json?: true;
  interval: number;
  segment?: string;
}

/** Adds `rigel top`. */
export function addTop(program: Command): void {
  program
    .command("top")
    .description("show live what the clients of all launches of this user do")
    .option("--once", "print one table and exit")
    .option("--interval <seconds>", "over how long to measure, 0.1 to 3600", between(0.1, 3600), 1)
    .option("--json", "print one JSON document per interval, one a line")
    .option("--segment <folder>", "folder of the shared-memory files (default: /dev/shm)")
    .addHelpText("after", EXAMPLES)
    .action(run);
}

async function run(flags: Flags): Promise<void> {
  const native = await Native.load();
  const folder = segmentFolder(flags.segment);
  const gpus = new GpuShares(native, { interval_ms: flags.interval * 1000 });
  const source = new Source(new Segments(native, folder), gpus);
  const view: View = {
    segments: [],
    folder,
    interval_s: flags.interval,
    sort: "attached",
    selected: undefined,
    help: false,
    notice: "",
  };
  if (!flags.once && !flags.json && canDraw()) await live(source, view);
  else await write(source, view, flags);
}

/** The segments, read again and again. */
class Source {
  readonly #segments: Segments;
  readonly #gpus: GpuShares;
  #before = new Map<Segment, Reading>();

  constructor(segments: Segments, gpus: GpuShares) {
    this.#segments = segments;
    this.#gpus = gpus;
  }

  /** The segments themselves. */
  live(): Segment[] {
    return this.#segments.live();
  }

  /** What happened since the last call; of a segment that is new, nothing yet. */
  next(): Stats[] {
    const readings = new Map(this.#segments.live().map((segment) => [segment, readingOf(segment, this.#gpus)]));
    const stats = [...readings].map(([segment, reading]) => statsOf(reading, this.#before.get(segment)));
    this.#before = readings;
    return stats;
  }
}

/** One table, or document, after the other on standard output, until somebody ends it or nobody reads it. */
async function write(source: Source, view: View, flags: Flags): Promise<void> {
  const closed = Promise.withResolvers<void>();
  process.stdout.on("error", () => closed.resolve());
  source.next();
  for (let first = true; ; first = false) {
    if (await isSettledWithin(flags.interval * 1000, closed.promise)) return;
    const segments = source.next();
    if (flags.json) {
      const at = new Date().toISOString();
      process.stdout.write(`${JSON.stringify({ schema: 1, at, interval_s: flags.interval, segments })}\n`);
    } else {
      const asked = Number(process.env["COLUMNS"]);
      const width = asked > 0 ? asked : process.stdout.columns || FILE_WIDTH;
      const screen = { width, height: Number.POSITIVE_INFINITY, colour: hasColour(), keys: false };
      process.stdout.write(`${first ? "" : "\n"}${render({ ...view, segments }, screen).join("\n")}\n`);
    }
    if (flags.once) return;
  }
}

/** The picture in a terminal, until a key or a signal ends it. */
async function live(source: Source, start: View): Promise<void> {
  let view = start;
  const over = Promise.withResolvers<number>();
  const draw = (): void => {
    const { width, height } = terminal;
    terminal.draw(render(view, { width, height, colour: hasColour(), keys: process.stdin.isTTY }));
  };
  const press = (key: string): void => {
    if (key === "q" || key === "interrupt") over.resolve(0);
    view = key === "p" ? { ...view, notice: pauseOrResume(source, view) } : pressed(view, key);
    draw();
  };
  const signals = Object.entries({ ...SIGNAL_STATUS, SIGINT: 0, SIGQUIT: 131 }).map(([signal, status]) => {
    const handler = (): void => over.resolve(status);
    process.on(signal, handler);
    return [signal, handler] as const;
  });
  process.stdout.on("error", () => over.resolve(0));
  using terminal = new Terminal(press, draw);
  view = { ...view, segments: source.next(), notice: "measuring" };
  draw();
  let noticed = view.notice;
  const timer = setInterval(() => {
    // What a key has said stays for a whole interval.
    view = { ...view, segments: source.next(), notice: view.notice === noticed ? "" : view.notice };
    noticed = view.notice;
    draw();
  }, view.interval_s * 1000);
  process.exitCode = await over.promise;
  clearInterval(timer);
  for (const [signal, handler] of signals) process.off(signal, handler);
}

/** Holds the marked client back until the key is pressed again; what came of it, in words. */
function pauseOrResume(source: Source, view: View): string {
  const row = rowsOf(view).find((one) => keyOf(one) === view.selected);
  if (!row) return "mark a client first, with up and down";
  try {
    const found = findClient(`${row.stats.segment.id}:${row.client.name}`, source.live());
    return pauseClient(found, row.client.paused ? 0 : Number.POSITIVE_INFINITY).text;
  } catch (thrown) {
    if (!(thrown instanceof RigelError)) throw thrown;
    return thrown.message;
  }
}

/** What a key does to the picture. */
export function pressed(view: View, key: string): View {
  switch (key) {
    case "s":
      return { ...view, sort: SORTS[(SORTS.indexOf(view.sort) + 1) % SORTS.length] ?? "attached", notice: "" };
    case "h":
    case "?":
      return { ...view, help: !view.help };
    case "down":
      return { ...view, selected: neighbour(view, 1) };
    case "up":
      return { ...view, selected: neighbour(view, -1) };
    default:
      return view;
  }
}

/** The row below the marked one (1) or above it (-1), as far as there is one; at first the one at that end. */
function neighbour(view: View, step: 1 | -1): string | undefined {
  const keys = rowsOf(view).map(keyOf);
  const at = view.selected === undefined ? -1 : keys.indexOf(view.selected);
  if (at < 0) return step > 0 ? keys[0] : keys.at(-1);
  return keys[Math.min(keys.length - 1, Math.max(0, at + step))];
}

/** Waits; true if the promise has settled meanwhile. */
async function isSettledWithin(limit_ms: number, promise: Promise<void>): Promise<boolean> {
  const elapsed = Promise.withResolvers<boolean>();
  const timer = setTimeout(() => elapsed.resolve(false), limit_ms);
  const settled = await Promise.race([promise.then(() => true), elapsed.promise]);
  clearTimeout(timer);
  return settled;
}
