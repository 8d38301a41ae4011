/** progress-bar.ts: how far a long read is, on a terminal's standard error; nothing anywhere else. */

const EVERY_ms = 200;
const WIDTH = 30;

/** Shows the share of what there is that is done until it is stopped, which removes it. `rows`, if they are counted: with so many a second. */
export class ProgressBar {
  readonly #timer: ReturnType<typeof setInterval> | undefined;
  #shown = false;

  constructor(label: string, size: number, done: () => number, rows?: () => number) {
    if (!process.stderr.isTTY || size === 0) return;
    const began_ms = performance.now();
    this.#timer = setInterval(() => {
      const share = Math.min(1, done() / size);
      const bar = "#".repeat(Math.round(share * WIDTH)).padEnd(WIDTH, ".");
      const rate = rows ? `${perSecond(rows(), performance.now() - began_ms)} ` : "";
      const percent = String(Math.floor(share * 100)).padStart(3);
      process.stderr.write(`\r[${bar}] ${percent}% ${rate}${label.slice(-40)}\u001b[K`);
      this.#shown = true;
    }, EVERY_ms);
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
