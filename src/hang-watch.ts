/**
 * hang-watch.ts: looks every few seconds whether a client hangs, and keeps the evidence when one does.
 *
 * Runs in the launcher (`hang_s`), in `rigel run` for its own client (`--hang`), and in `rigel hangs --watch`. A look reads what the
 * clients write anyway, in some 100 us a process; they do not notice. It never ends a program.
 */

import { printable } from "./log.ts";
import { bundleFolder, writeBundle } from "./hang-bundle.ts";
import { type Found, type Hangs, type Moment, hangsOf, keyOf, momentOf } from "./hangs.ts";
import { reason } from "./errors.ts";
import type { Segment } from "./segment.ts";

const LONGEST_LOOK_ms = 5000;
const SHORTEST_LOOK_ms = 200;

interface WatchOptions {
  segment: Segment;
  threshold_s: number;
  /** Only this client is told about; left out: all. */
  client?: string | undefined;
  /** Where bundles go; left out: bundleFolder(). */
  folder?: string | undefined;
  /** What is to be told, line by line. */
  say: (line: string) => void;
  /** Is given the result of every look. */
  looked?: ((hangs: Hangs) => void) | undefined;
}

/** How often is looked for what waits for so long. */
export function lookEvery_ms(threshold_s: number): number {
  return Math.min(LONGEST_LOOK_ms, Math.max(SHORTEST_LOOK_ms, (threshold_s * 1000) / 4));
}

/** One line for people. */
export function lineOf({ name, pid, rank, why }: Found): string {
  return printable(`${name} (${pid}${rank === null ? "" : `, rank ${rank}`}) ${why}`);
}

export class HangWatch implements AsyncDisposable {
  readonly #options: WatchOptions;
  readonly #timer: ReturnType<typeof setInterval>;
  #before: Moment | undefined;
  /** Those who were told about and still hang. */
  #told = new Set<string>();
  #writing: Promise<void> = Promise.resolve();
  /** For the report: what hung, with where the evidence is. */
  readonly notes: string[] = [];

  constructor(options: WatchOptions) {
    this.#options = options;
    this.#timer = setInterval(() => this.look(), lookEvery_ms(options.threshold_s));
  }

  /** Looks once; returns what is found, undefined at the first look. */
  look(): Hangs | undefined {
    const { segment, threshold_s, client, say } = this.#options;
    const now = momentOf(segment, threshold_s);
    const before = this.#before;
    this.#before = now;
    if (!before) return undefined;
    const hangs = hangsOf(before, now, threshold_s);
    this.#options.looked?.(hangs);
    const hung = hangs.processes.filter((found) => found.hung && (client === undefined || found.name === client));
    const fresh = hung.filter((found) => !this.#told.has(keyOf(found)));
    this.#told = new Set(hung.map(keyOf));
    if (fresh.length === 0) return hangs;
    for (const found of fresh) say(lineOf(found));
    this.notes.push(...fresh.map((found) => `hang: ${lineOf(found)}`));
    this.#writing = this.#writing.then(() => this.#keep(hangs));
    return hangs;
  }

  async #keep(hangs: Hangs): Promise<void> {
    const { segment, folder, say } = this.#options;
    try {
      const path = await writeBundle(segment, hangs, folder ?? bundleFolder());
      say(`what shows it is in ${path}`);
      this.notes.push(`hang: what shows it is in ${path}`);
    } catch (thrown) {
      say(`what shows it cannot be kept: ${reason(thrown)}`);
      this.notes.push(`hang: what shows it cannot be kept: ${reason(thrown)}`);
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    clearInterval(this.#timer);
    await this.#writing;
  }
}
