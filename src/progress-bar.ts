/** progress-bar.ts: how far something long is, on a terminal's standard error; anywhere else nothing, or a line now and then. */

import { progress } from "./log.ts";

const EVERY_ms = 200;
const WIDTH = 30;

interface More {
  /** If they are counted: with so many a second. */
  rows?: () => number;
  /** How often there is a line where there is no terminal. */
  line_ms?: number;
}

/** Shows the share of what there is that is done until it is stopped, which removes it. */
export class ProgressBar {
  readonly #timer: ReturnType<typeof setInterval> | undefined;
  #shown = false;

  constructor(label: string, size: number, done: () => number, { rows, line_ms }: More = {}) {
    const isTerminal = process.stderr.isTTY;
    if ((!isTerminal && line_ms === undefined) || size === 0) return;
    const began_ms = performance.now();
    const show = (): void => {
      const share = Math.min(1, done() / size);
      if (!isTerminal) return progress(`${label}: ${Math.floor(share * 100)}%`);
      const bar = "#".repeat(Math.round(share * WIDTH)).padEnd(WIDTH, ".");
      const rate = rows ? `${perSecond(rows(), performance.now() - began_ms)} ` : "";
      const percent = String(Math.floor(share * 100)).padStart(3);
      process.stderr.write(`\r[${bar}] ${percent}% ${rate}${label.slice(-40)}\u001b[K`);
      this.#shown = true;
    };
    this.#timer = setInterval(show, isTerminal ? EVERY_ms : line_ms);
    this.#timer.unref();
  }

  stop(): void {
    clearInterval(this.#timer);
    if (this.#shown) process.stderr.write("\r\u001b[K");
    this.#shown = false;
  }
}

/** "44600 rows/s". */
export function perSecond(rows: number, spent_ms: number): string {
  return `${Math.round((rows / Math.max(1, spent_ms)) * 1000)} rows/s`;
}
