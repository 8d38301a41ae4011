/** progress-bar.ts: how far a long read is, on a terminal's standard error; nothing anywhere else. */

const EVERY_ms = 200;
const WIDTH = 30;

/** Shows the share of bytes that are read until it is stopped, which removes it. */
export class ProgressBar {
  readonly #timer: ReturnType<typeof setInterval> | undefined;
  #shown = false;

  constructor(label: string, size: number, done: () => number) {
    if (!process.stderr.isTTY || size === 0) return;
    this.#timer = setInterval(() => {
      const share = Math.min(1, done() / size);
      const bar = "#".repeat(Math.round(share * WIDTH)).padEnd(WIDTH, ".");
      process.stderr.write(`\r[${bar}] ${String(Math.floor(share * 100)).padStart(3)}% ${label.slice(-40)}\u001b[K`);
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
