/**
 * simulate-page.ts: a prediction as one HTML page that loads nothing from elsewhere, in the manner of bench-page.ts.
 */

import { STYLE, WIDTH, at, bars, colour, decades, figure, grid, number, steps, text } from "./plot.ts";
import { worst_p99 } from "./simulate-text.ts";
import type { Point, PredictedWay, Prediction } from "./simulate.ts";

export function predictionPage(prediction: Prediction, title: string, said: readonly string[]): string {
  const { points, sweep, notes } = prediction;
  const [first] = points;
  const plots = sweep === null ? (first ? wayPlots(first) : []) : sweepPlots(sweep, points);
  const tables = points.map(
    (point) => `${sweep === null ? "" : `<h3>${text(sweep)} ${point.value}</h3>`}${table(point)}`,
  );
  return `<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Rigel: ${text(title)}, predicted</title><style>${STYLE}</style></head><body>
<h1>${text(title)}, predicted</h1>
<p class="mark">Simulated: a model of a GPU, no measurement of one.</p>
<ul>${[...said, ...notes].map((one) => `<li>${text(one)}</li>`).join("")}</ul>
<div class="plots">${plots.join("")}</div>
${tables.join("\n")}
</body></html>
`;
}

function single(value: number | null) {
  return value === null ? null : { median: value, min: value, max: value, rounds: 1 };
}

function wayPlots({ ways }: Point): string[] {
  const named = (value: (way: PredictedWay) => number | null) =>
    ways.map((way) => ({ name: way.way, spread: single(value(way)) }));
  return [
    bars("p99 latency over p99 alone (1 is no change; lower is better)", named(worst_p99), "log"),
    bars(
      "Best-effort throughput over throughput alone (higher is better)",
      named(({ share }) => share),
      "linear",
    ),
  ];
}

function sweepPlots(sweep: string, points: readonly Point[]): string[] {
  return [
    lines(`p99 latency over p99 alone, by ${sweep}`, points, worst_p99, true),
    lines(`Best-effort throughput over throughput alone, by ${sweep}`, points, ({ share }) => share, false),
  ];
}

const LEFT = 46;
const BOTTOM = 260;

/** One line a way. */
function lines(
  title: string,
  points: readonly Point[],
  value: (way: PredictedWay) => number | null,
  logarithmic: boolean,
): string {
  const names = (points[0]?.ways ?? []).map(({ way }) => way);
  const series = names.map((_, index) =>
    points.flatMap(({ value: x, ways }) => {
      const way = ways[index];
      const y = way ? value(way) : null;
      return y === null || (logarithmic && y <= 0) || x === null ? [] : [{ x, y }];
    }),
  );
  const all = series.flat();
  if (all.length === 0) return "";
  const [from, to] = [Math.min(...all.map(({ x }) => x)), Math.max(...all.map(({ x }) => x))];
  const high = Math.max(1.1, ...all.map(({ y }) => y));
  const low = logarithmic ? Math.min(0.9, ...all.map(({ y }) => y)) : 0;
  const across = (x: number): number => LEFT + ((x - from) / (to - from || 1)) * (WIDTH - LEFT - 16);
  const up = (y: number): number => {
    const part = logarithmic ? Math.log(y / low) / Math.log(high / low) : (y - low) / (high - low);
    return BOTTOM - part * (BOTTOM - 12);
  };
  const marks = (logarithmic ? decades(low, high) : steps(high)).map(
    (mark) =>
      `<line class="grid" x1="${LEFT}" x2="${WIDTH - 16}" y1="${at(up(mark))}" y2="${at(up(mark))}"/>` +
      `<text x="${LEFT - 6}" y="${at(up(mark) + 4)}" text-anchor="end">${number(mark)}</text>`,
  );
  const ends = [from, to].map(
    (x) => `<text x="${at(across(x))}" y="${BOTTOM + 18}" text-anchor="middle">${number(x)}</text>`,
  );
  const drawn = series.map((own, index) => {
    const dots = own.map(
      ({ x, y }) => `<circle cx="${at(across(x))}" cy="${at(up(y))}" r="3" fill="${colour(index)}"/>`,
    );
    const path = own.map(({ x, y }) => `${at(across(x))},${at(up(y))}`).join(" ");
    return `<polyline fill="none" stroke="${colour(index)}" stroke-width="2" points="${path}"/>${dots.join("")}`;
  });
  const legend = names.map(
    (name, index) =>
      `<rect x="${LEFT}" y="${BOTTOM + 34 + index * 20}" width="14" height="12" fill="${colour(index)}"/>` +
      `<text x="${LEFT + 20}" y="${BOTTOM + 45 + index * 20}">${text(name)}</text>`,
  );
  return figure(title, BOTTOM + 44 + names.length * 20, [...marks, ...ends, ...drawn, ...legend]);
}

const HEADER = "way,client,p50 ms,p95 ms,p99 ms,p50 / alone,p99 / alone,per s,share,harvest".split(",");

function table({ alone, ways }: Point): string {
  const all = [{ way: "alone", clients: alone, harvest: null }, ...ways];
  const rows = all.flatMap(({ way, clients, harvest }) =>
    clients.map((one) => [
      text(way),
      text(one.name),
      ...[one.p50_ms, one.p95_ms, one.p99_ms, one.p50_over_alone, one.p99_over_alone].map(shown),
      number(one.per_s),
      shown(one.share),
      one.class === "best-effort" ? shown(harvest) : "",
    ]),
  );
  return grid(HEADER, rows);
}

function shown(value: number | null): string {
  return value === null ? "" : number(value);
}
