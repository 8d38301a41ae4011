/**
 * terminal.ts: a terminal taken over for a while: its other screen, single keys, its size; and given back as it was found.
 *
 * Whatever ends the process gives it back: a key, a signal, an error, a normal end. Ctrl-Z gives it back until the process goes on.
 */

const ENTER = "\u001b[?1049h\u001b[?25l\u001b[?7l";
const LEAVE = "\u001b[?7h\u001b[?25h\u001b[?1049l";
const KEYS: Readonly<Record<string, string>> = {
  "\u001b[A": "up",
  "\u001bOA": "up",
  "\u001b[B": "down",
  "\u001bOB": "down",
  "\u0003": "interrupt",
  "\u001a": "suspend",
  "\u000c": "redraw",
};
/** A key as the terminal sends it: an escape sequence, or one character. */
// The longer forms come first; an escape alone is the Esc key.
const ONE_KEY = /\u001b\[[0-9;]*[A-Za-z~]|\u001bO[A-Z]|[\s\S]/gu;

/** Whether a picture can be drawn in place on standard output. */
export function canDraw(): boolean {
  return process.stdout.isTTY && (process.env["TERM"] ?? "dumb") !== "dumb";
}

/** Whether colours are wanted there. */
export function hasColour(): boolean {
  return canDraw() && !process.env["NO_COLOR"];
}

/** The keys in what was read from a terminal. */
export function keysIn(text: string): string[] {
  return (text.match(ONE_KEY) ?? []).map((key) => KEYS[key] ?? key);
}

export class Terminal implements Disposable {
  readonly #undo: (() => void)[] = [];
  #taken = false;

  /** Takes the terminal. `key`: a key was pressed; `resized`: it has another size, or has to be drawn anew. */
  constructor(key: (name: string) => void, resized: () => void) {
    const { stdin, stdout } = process;
    const onData = (data: Buffer): void => {
      for (const name of keysIn(data.toString("utf8"))) {
        if (name === "suspend") this.#suspend();
        else if (name === "redraw") resized();
        else key(name);
      }
    };
    const leave = (): void => this.#leave();
    const back = (): void => {
      this.#enter();
      resized();
    };
    stdout.on("resize", resized);
    process.on("exit", leave);
    process.on("SIGCONT", back);
    if (stdin.isTTY) stdin.on("data", onData);
    this.#undo.push(
      () => stdout.off("resize", resized),
      () => process.off("exit", leave),
      () => process.off("SIGCONT", back),
      () => {
        stdin.off("data", onData);
        stdin.pause();
      },
    );
    this.#enter();
  }

  get width(): number {
    return process.stdout.columns || 80;
  }

  get height(): number {
    return process.stdout.rows || 24;
  }

  /** Shows these lines, one below the other, and nothing else. */
  draw(lines: readonly string[]): void {
    if (!this.#taken) return;
    // Cleared before it is written: after the last column the cursor is still in it, and would clear what is there.
    const cleared = lines.map((line, index) => `${index === lines.length - 1 ? "\u001b[J" : "\u001b[K"}${line}`);
    process.stdout.write(`\u001b[H${cleared.join("\r\n")}`);
  }

  [Symbol.dispose](): void {
    for (const undo of this.#undo.splice(0)) undo();
    this.#leave();
  }

  #enter(): void {
    if (this.#taken) return;
    this.#taken = true;
    if (process.stdin.isTTY) {
      process.stdin.setRawMode(true);
      process.stdin.resume();
    }
    process.stdout.write(ENTER);
  }

  #leave(): void {
    if (!this.#taken) return;
    this.#taken = false;
    process.stdout.write(LEAVE);
    if (process.stdin.isTTY) process.stdin.setRawMode(false);
  }

  #suspend(): void {
    this.#leave();
    process.kill(process.pid, "SIGTSTP");
  }
}
