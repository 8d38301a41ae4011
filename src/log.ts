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

/** One line of progress. */
export function progress(line: string): void {
  process.stderr.write(`${paint("rigel:", "1")} ${line}\n`);
}

/** A function that writes lines with a client's name in front, names aligned to `width`. */
export function prefixed(name: string, index: number, width: number): (line: string) => void {
  const prefix = paint(`${name.padEnd(width)} |`, COLOURS[index % COLOURS.length] ?? "0");
  return (line) => process.stderr.write(`${prefix} ${line}\n`);
}
