/**
 * plot.ts: what pages and pictures of results are drawn with: plots as SVG, tables, and their style. Loads nothing from elsewhere.
 *
 * Colours follow the reader's light or dark setting.
 */

import type { Spread } from "./bench-stats.ts";

/** Distinguishable without red and green (Okabe and Ito's palette, without yellow). */
const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#7f7f7f", "#8c564b", "#17becf"];
/** In units of which a phone's screen has nearly as many pixels: text keeps its size there. */
export const WIDTH = 400;
/** A label, and the bar under it. */
const BAR = 36;

export const STYLE = `
:root { color-scheme: light dark; --ink: #1a1a1a; --faint: #8884; --paper: #fff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --paper: #161616; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto; padding: 1rem; max-width: 60rem; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; } h3 { font-size: 1rem; margin-bottom: 0; }
svg { width: 100%; max-width: 40rem; height: auto; display: block; } svg text { fill: var(--ink); font: 13px system-ui, sans-serif; }
.axis { stroke: var(--ink); } .grid { stroke: var(--faint); } .one { stroke: var(--ink); stroke-dasharray: 4 3; }
svg .over { stroke: var(--paper); stroke-width: 3px; paint-order: stroke; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 0.85rem; }
th, td { padding: 0.25rem 0.6rem; text-align: right; border-bottom: 1px solid var(--faint); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.mark { border: 2px solid; padding: 0.4rem 0.8rem; font-weight: 600; }
pre { overflow-x: auto; font-size: 0.8rem; } .plots { display: grid; gap: 1rem; }`;

/** For HTML's text and attributes. */
export function text(raw: string): string {
  return raw.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;").replaceAll('"', "&quot;");
}

export function colour(index: number): string {
  return COLOURS[index % COLOURS.length] ?? "#888";
}

/** One bar a way, with a line from the least to the greatest round, and a broken line at 1. */
export function bars(
  title: string,
  of: readonly { name: string; spread: Spread | null }[],
  scale: "linear" | "log",
): string {
  const shown = of.flatMap(({ name, spread }, index) =>
    spread && (spread.median > 0 || scale === "linear") ? [{ name, spread, colour: colour(index) }] : [],
  );
  if (shown.length === 0) return "";
  const greatest = Math.max(1.1, ...shown.map(({ spread }) => spread.max));
  const least = Math.min(0.9, ...shown.map(({ spread }) => spread.min));
  // Of a share, 0 is where bars begin; a ratio of latencies is the further from 1 the worse, in either direction.
  const logarithmic = scale === "log" && greatest > 4;
  const low = scale === "linear" ? 0 : logarithmic ? Math.min(0.5, least) : 0;
  const place = (x: number): number => {
    const part = logarithmic ? Math.log(x / low) / Math.log(greatest / low) : (x - low) / (greatest - low);
    return 8 + Math.max(0, part) * (WIDTH - 60);
  };
  const height = shown.length * BAR + 34;
  const marks = logarithmic ? decades(low, greatest) : steps(greatest);
  const behind = marks.map(
    (mark) =>
      `<line class="grid" x1="${at(place(mark))}" x2="${at(place(mark))}" y1="4" y2="${height - 26}"/>` +
      `<text x="${at(place(mark))}" y="${height - 10}" text-anchor="middle">${number(mark)}</text>`,
  );
  const drawn = shown.map(({ name, spread, colour: fill }, index) => {
    const y = 8 + index * BAR;
    const x = place(low);
    return (
      `<text x="${at(x)}" y="${y + 8}">${text(name)}</text>` +
      `<rect fill-opacity="0.8" x="${at(x)}" y="${y + 12}" width="${at(Math.max(1, place(spread.median) - x))}" height="14" fill="${fill}"/>` +
      `<line class="axis" x1="${at(place(spread.min))}" x2="${at(place(spread.max))}" y1="${y + 19}" y2="${y + 19}"/>` +
      `<text x="${at(place(spread.max) + 4)}" y="${y + 23}">${number(spread.median)}</text>`
    );
  });
  const one = `<line class="one" x1="${at(place(1))}" x2="${at(place(1))}" y1="0" y2="${height - 26}"/>`;
  return figure(title, height, [...behind, one, ...drawn]);
}

export function decades(low: number, high: number): number[] {
  const marks: number[] = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
    for (const digit of high / low > 100 ? [1] : [1, 2, 5]) marks.push(digit * 10 ** power);
  return marks.filter((mark) => mark >= low && mark <= high);
}

export function steps(high: number): number[] {
  const step = [0.25, 0.5, 1, 2, 5, 10].find((one) => high / one <= 6) ?? high / 5;
  return Array.from({ length: Math.floor(high / step) + 1 }, (_, index) => index * step);
}

export function grid(header: string[], rows: string[][]): string {
  const body = rows.map((cells) => line("td", cells)).join("");
  return `<div class="scroll"><table><thead>${line("th", header)}</thead><tbody>${body}</tbody></table></div>`;
}

function line(tag: string, cells: string[]): string {
  return `<tr>${cells.map((cell) => `<${tag}>${cell}</${tag}>`).join("")}</tr>`;
}

export function figure(title: string, height: number, parts: string[]): string {
  return (
    `<figure style="margin:0"><h3>${text(title)}</h3>` +
    `<svg viewBox="0 0 ${WIDTH} ${height}" role="img" aria-label="${text(title)}">${parts.join("")}</svg></figure>`
  );
}

/** A coordinate. */
export function at(x: number): string {
  return x.toFixed(1);
}

/** Three significant digits. */
export function number(x: number): string {
  return x >= 100 ? x.toFixed(0) : String(Number(x.toPrecision(3)));
}
