/**
 * bench-overview.ts: all pairs of a benchmark at a glance: for each a line with a dot for each way, of p99 over alone and of harvest.
 *
 * Two plots one below the other on a page, or side by side as a picture of its own (SVG), which looks the same on light and dark pages.
 */

import { wayOf } from "./bench-report.ts";
import { ALONE, type Row, type Spread, spread } from "./bench-stats.ts";
import { WIDTH, at, colour, decades, figure, number, steps, text } from "./plot.ts";

const PAIR = 34;
const RADIUS = 5;
const MARGIN = 16;
const TOP = 8;
/** Below the dots, for what the marks of the axis say. */
const AXIS = 28;
const LEGEND = 20;

const P99 = "p99 latency over alone (1 is no change; lower is better)";
const HARVEST = "Harvest (1 is all that the high program leaves)";
/** So many at most beside each other in a picture's legend, whose letters are about as wide as that, with their dot and what is between two. */
const ABREAST = 4;
const LETTER = 7;
const AROUND = 24;

/** For a page; nothing where there are no two pairs to look at together. */
export function overview(rows: readonly Row[]): string {
  const { pairs, ways, p99, harvest } = linesOf(rows);
  if (pairs.length < 2) return "";
  const height = TOP + pairs.length * PAIR + AXIS;
  const figures = [p99, harvest].map((drawn, index) =>
    figure([P99, HARVEST][index] ?? "", height + ways.length * LEGEND, [
      ...drawn(true),
      ...legend(ways, MARGIN, height + 12),
    ]),
  );
  return `<section><h2>All pairs</h2><div class="plots">${figures.join("")}</div></section>`;
}

/** A picture of its own. */
export function overviewPicture(rows: readonly Row[], title: string): string {
  const { pairs, ways, p99, harvest } = linesOf(rows);
  const width = 2 * WIDTH;
  const widest = AROUND + LETTER * Math.max(0, ...ways.map(({ length }) => length));
  const abreast = Math.max(1, Math.min(ABREAST, ways.length, Math.floor((width - MARGIN) / widest)));
  const titles = 18 + Math.ceil(ways.length / abreast) * LEGEND + 8;
  const top = titles + 10;
  const height = top + TOP + pairs.length * PAIR + AXIS;
  const parts = [
    `<rect width="${width}" height="${height}" rx="6" fill="#fff"/>`,
    ...ways.map((way, index) => {
      const x = MARGIN + (index % abreast) * ((width - MARGIN) / abreast);
      return legend([way], x, 18 + Math.floor(index / abreast) * LEGEND, index).join("");
    }),
    ...[P99, HARVEST].map((said, index) => `<text x="${MARGIN + index * WIDTH}" y="${titles}">${text(said)}</text>`),
    `<g transform="translate(0 ${top})">${p99(true).join("")}</g>`,
    `<g transform="translate(${WIDTH} ${top})">${harvest(false).join("")}</g>`,
  ];
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" role="img">
<title>${text(title)}</title><style>${PICTURE_STYLE}</style>
${parts.join("\n")}
</svg>
`;
}

const PICTURE_STYLE =
  "text { fill: #1a1a1a; font: 13px system-ui, sans-serif; } .axis { stroke: #1a1a1a; } .grid { stroke: #8884; } " +
  ".one { stroke: #1a1a1a; stroke-dasharray: 4 3; } .over { stroke: #fff; stroke-width: 3px; paint-order: stroke; }";

interface Dot {
  way: number;
  spread: Spread;
}

/** What is drawn: the two plots, with or without the pairs' names. */
function linesOf(rows: readonly Row[]) {
  const compared = rows.filter(({ way }) => way !== ALONE);
  const pairs = [...new Set(compared.map(({ pair }) => pair))];
  // How its programs were started is said where that tells two apart.
  const plain = new Set(compared.map(({ way }) => way)).size === new Set(compared.map(wayOf)).size;
  const nameOf = (row: Row): string => (plain ? row.way : wayOf(row));
  const ways = [...new Set(compared.map(nameOf))];
  const drawn = (value: (row: Row) => Spread | null, scale: "log" | "linear") => {
    const dots = pairs.map((pair) =>
      compared.flatMap((row): Dot[] => {
        const found = row.pair === pair ? value(row) : null;
        // A logarithmic scale has no place for nothing.
        return found && (scale === "linear" || found.min > 0)
          ? [{ way: ways.indexOf(nameOf(row)), spread: found }]
          : [];
      }),
    );
    return (named: boolean) => plot(named ? pairs : [], dots, scale);
  };
  return {
    pairs,
    ways,
    p99: drawn((row) => row.p99_ratio, "log"),
    // Of the median round alone: which it was says no extremes.
    harvest: drawn(({ harvest }) => (harvest === null ? null : spread([harvest])), "linear"),
  };
}

function plot(names: readonly string[], lines: readonly Dot[][], scale: "log" | "linear"): string[] {
  const all = lines.flat().flatMap((dot) => [dot.spread.min, dot.spread.max]);
  const high = Math.max(1.2, ...all) * 1.05;
  const low = scale === "linear" ? 0 : Math.min(0.9, ...all) / 1.05;
  const place = (x: number): number => {
    const part = scale === "log" ? Math.log(x / low) / Math.log(high / low) : (x - low) / (high - low);
    return MARGIN + part * (WIDTH - 2 * MARGIN);
  };
  const bottom = TOP + lines.length * PAIR;
  const marks = scale === "log" ? decades(low, high) : steps(high);
  return [
    ...marks.flatMap((mark) => [
      `<line class="grid" x1="${at(place(mark))}" x2="${at(place(mark))}" y1="${TOP}" y2="${bottom}"/>`,
      `<text x="${at(place(mark))}" y="${bottom + 18}" text-anchor="middle">${number(mark)}</text>`,
    ]),
    `<line class="one" x1="${at(place(1))}" x2="${at(place(1))}" y1="${TOP}" y2="${bottom}"/>`,
    ...names.map(
      (name, index) => `<text class="over" x="${MARGIN}" y="${TOP + index * PAIR + 13}">${text(name)}</text>`,
    ),
    ...lines.flatMap((dots, index) => {
      const y = TOP + index * PAIR + 23;
      return dots.flatMap(({ way, spread: { median, min, max } }) => [
        `<line x1="${at(place(min))}" x2="${at(place(max))}" y1="${y}" y2="${y}" stroke="${colour(way)}" stroke-width="2"/>`,
        `<circle cx="${at(place(median))}" cy="${y}" r="${RADIUS}" fill="${colour(way)}" fill-opacity="0.85"/>`,
      ]);
    }),
  ];
}

/** One below the other; `first`: which way the first of them is. */
function legend(ways: readonly string[], x: number, y: number, first = 0): string[] {
  return ways.flatMap((way, index) => [
    `<circle cx="${at(x + RADIUS)}" cy="${at(y + index * LEGEND)}" r="${RADIUS}" fill="${colour(first + index)}"/>`,
    `<text x="${at(x + 16)}" y="${at(y + 4 + index * LEGEND)}">${text(way)}</text>`,
  ]);
}
