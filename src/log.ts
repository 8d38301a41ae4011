/**
 * log.ts: what people see while something runs: lines on standard error, in colour where a terminal is there for it.
 *
 * Never writes to standard output: that belongs to the report.
 */

const COLOURS = ["36", "33", "35", "32", "34", "31"];
const coloured = (process.stderr.isTTY ?? false) && !process.env["NO_COLOR"];

function paint(text: string, colour: string): string {
  return coloured ? `\u001b[${colour}m${text}\u001b[0m` : text;
}

/** What may wait in memory for who reads standard error: a terminal that was stopped, `| less`. */
const BACKLOG_characters = 1 << 23;
/** Settles when that has been taken, or nobody reads any more; undefined where nothing waits. */
let taken: Promise<void> | undefined;
let waiting_characters = 0;

function say(text: string): void {
  if (process.stderr.write(text)) return;
  waiting_characters += text.length;
  if (taken) return;
  const { promise, resolve } = Promise.withResolvers<void>();
  const { stderr } = process;
  const over = (): void => {
    for (const event of ["drain", "error", "close"]) stderr.off(event, over);
    taken = undefined;
    waiting_characters = 0;
    resolve();
  };
  for (const event of ["drain", "error", "close"]) stderr.on(event, over);
  taken = promise;
}

/** Whoever has more than a few lines to say waits for this between them. */
export async function heard(): Promise<void> {
  if (waiting_characters > BACKLOG_characters) await taken;
}

/** Without what a terminal would obey. */
export function printable(text: string): string {
  return text.replaceAll(/[\u0000-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, "?");
}

/** As a shell needs it; what a terminal would obey as bash does. */
export function quoted(text: string): string {
  if (printable(text) !== text) return `$'${[...text].map(escaped).join("")}'`;
  return /^[\w./:=@%+,-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

function escaped(char: string): string {
  if (/['\\]/.test(char)) return `\\${char}`;
  return printable(char) === char ? char : `\\u${char.charCodeAt(0).toString(16).padStart(4, "0")}`;
}

/** A line of progress, or several: printable, whatever the files say that it tells of. */
export function progress(text: string): void {
  say(`${paint("rigel:", "1")} ${text.split("\n").map(printable).join("\n")}\n`);
}

/** A function that writes lines with a client's name in front, names aligned to `width`. */
export function prefixed(name: string, index: number, width: number): (line: string) => void {
  const prefix = paint(`${name.padEnd(width)} |`, COLOURS[index % COLOURS.length] ?? "0");
  return (line) => say(`${prefix} ${line}\n`);
}
