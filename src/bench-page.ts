/**
 * bench-page.ts: a benchmark as one HTML page that loads nothing from elsewhere: plots as inline SVG, readable on a phone.
 *
 * Colours follow the reader's light or dark setting. Every plot has its numbers as text in the table below it.
 */

import {
  MPS_COST_TEXT,
  SOLO_HEADER,
  SOLO_TEXT,
  type Shown,
  circumstances,
  mpsCostText,
  soloCells,
  wayOf,
} from "./bench-report.ts";
import { overview } from "./bench-overview.ts";
import { ALONE, type Row, type Sample, type Spread, ascending, pairedRatios, quantile } from "./bench-stats.ts";
import { STYLE, WIDTH, at, bars, colour, decades, figure, grid, number, text } from "./plot.ts";

export function page(shown: Shown): string {
  const { of, rows, simulated, pairs, failures, notes } = shown;
  const { name: device } = of[0].device;
  const sections = pairs.flatMap(({ name, high, best }) => {
    const own = rows.filter((row) => row.pair === name);
    if (own.length === 0) return [];
    const compared = own.filter((row) => row.way !== ALONE);
    return [
      `<section><h2>${text(name)}</h2><p>${text(high)}, beside ${text(best.join(" and "))}.</p><div class="plots">`,
      bars("p99 latency over p99 alone (1 is no change; lower is better)", named(compared, "p99_ratio"), "log"),
      bars("Best-effort throughput over throughput alone (higher is better)", named(compared, "share"), "linear"),
      distribution(shown, name),
      `</div>${table(own)}</section>`,
    ];
  });
  const mark = simulated ? '<p class="mark">Simulated: a model of a GPU, no measurement of one.</p>' : "";
  return `<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Rigel benchmark: ${text(device)}</title><style>${STYLE}</style></head><body>
<h1>Sharing one GPU: ${text(device)}</h1>
${mark}<ul>${circumstances(of)
    .map((one) => `<li>${text(one)}</li>`)
    .join("")}</ul>
${overview(rows)}
${sections.join("\n")}
${soloTable(shown)}
${failures.length > 0 ? `<section><h2>Failed</h2>${failures.map(failure).join("")}</section>` : ""}
${notes.length > 0 ? `<section><h2>Notes</h2><ul>${notes.map((note) => `<li>${text(note)}</li>`).join("")}</ul></section>` : ""}
</body></html>
`;
}

function named(rows: readonly Row[], value: "p99_ratio" | "share"): { name: string; spread: Spread | null }[] {
  return rows.map((row) => ({ name: wayOf(row), spread: row[value] }));
}

/* ---- Distribution of latencies */

/** Of every way, the part of the requests (upwards) that took no longer than so many ms (to the right, logarithmic). */
function distribution({ measurements, rows }: Shown, pair: string): string {
  const ways = rows.filter((row) => row.pair === pair);
  const curves = ways.flatMap((row) => {
    const own = measurements.filter((one) => one.pair === pair && one.way === row.way && one.method === row.method);
    const sorted = latencies(own.flatMap(({ requests }) => requests));
    // Colours as in the bars, where `alone` is not among the ways.
    const index = ways.filter((one) => one.way !== ALONE).indexOf(row);
    const name = wayOf(row);
    if (sorted.length === 0) return [];
    if (index >= 0) return [{ name, sorted, colour: colour(index) }];
    // One for each way of starting programs: the second is broken, and the third more so.
    const dash = [undefined, "6 4", "2 3"][ways.filter((one) => one.way === ALONE).indexOf(row)];
    return [{ name, sorted, colour: "var(--ink)", ...(dash !== undefined && { dash }) }];
  });
  return curvesOf(curves);
}

interface Curve {
  name: string;
  /** Latencies in ms, ascending. */
  sorted: number[];
  colour: string;
  /** Of a broken line. */
  dash?: string;
}

function latencies(samples: readonly Sample[]): number[] {
  return ascending(samples.map(([, latency_ms]) => latency_ms));
}

function curvesOf(curves: readonly Curve[]): string {
  if (curves.length === 0) return "";
  const low = Math.max(0.01, Math.min(...curves.map(({ sorted }) => quantile(sorted, 0)))) * 0.9;
  const high = Math.max(low * 2, ...curves.map(({ sorted }) => quantile(sorted, 1))) * 1.05;
  const left = 46;
  const bottom = 280;
  const x = (ms: number): number =>
    left + (Math.log(Math.max(ms, low) / low) / Math.log(high / low)) * (WIDTH - left - 12);
  // The tail is what matters: upwards is -log10 of what is still to come, down to one in 1000.
  const y = (q: number): number => bottom - (Math.min(3, -Math.log10(Math.max(1e-9, 1 - q))) / 3) * (bottom - 12);
  const across = [0.5, 0.9, 0.95, 0.99, 0.999].map(
    (q) =>
      `<line class="grid" x1="${left}" x2="${WIDTH - 12}" y1="${at(y(q))}" y2="${at(y(q))}"/>` +
      `<text x="${left - 6}" y="${at(y(q) + 4)}" text-anchor="end">${number(q * 100)}%</text>`,
  );
  const upright = decades(low, high).map(
    (ms) =>
      `<line class="grid" x1="${at(x(ms))}" x2="${at(x(ms))}" y1="12" y2="${bottom}"/>` +
      `<text x="${at(x(ms))}" y="${bottom + 18}" text-anchor="middle">${number(ms)}</text>`,
  );
  const lines = curves.map(({ sorted, colour: stroke, dash }) => {
    const points = POINTS.filter((q) => q <= 1 - 1 / sorted.length).map(
      (q) => `${at(x(quantile(sorted, q)))},${at(y(q))}`,
    );
    return `<polyline fill="none" stroke="${stroke}" stroke-width="2"${broken(dash)} points="${points.join(" ")}"/>`;
  });
  const legend = curves.map(
    ({ name, colour: stroke, dash }, index) =>
      `<line x1="${left}" x2="${left + 14}" y1="${bottom + 40 + index * 20}" y2="${bottom + 40 + index * 20}" stroke="${stroke}" ` +
      `stroke-width="${dash === undefined ? 12 : 3}"${broken(dash)}/>` +
      `<text x="${left + 20}" y="${bottom + 45 + index * 20}">${text(name)}</text>`,
  );
  const axis = `<text x="${WIDTH - 12}" y="${bottom + 18}" text-anchor="end">ms</text>`;
  return figure(
    "Latencies: the part of the requests that took no longer (the upper part of the scale is stretched)",
    bottom + 44 + curves.length * 20,
    [...across, ...upright, axis, ...lines, ...legend],
  );
}

function broken(dash: string | undefined): string {
  return dash === undefined ? "" : ` stroke-dasharray="${dash}"`;
}

/** Where the curve is drawn: denser to the end. */
const POINTS = Array.from({ length: 151 }, (_, index) => 1 - 10 ** (-index / 50));

/* ---- Tables */

const HEADER =
  "way,p50 ms,p95 ms,p99 ms,p50 / alone,p95 / alone,p99 / alone,delayed p50,delayed p95,delayed p99,share,steps/s,ceiling,harvest".split(
    ",",
  );

function table(rows: readonly Row[]): string {
  const cells = rows.map((row) => [
    text(wayOf(row)),
    text(aloneOr(row.p50_ms, row.mps_cost?.p50)),
    text(aloneOr(row.p95_ms, row.mps_cost?.p95)),
    text(aloneOr(row.p99_ms, row.mps_cost?.p99)),
    ...[row.p50_ratio, row.p95_ratio, row.p99_ratio].map(extremes),
    ...[row.delayed?.p50, row.delayed?.p95, row.delayed?.p99].map((value) => value?.toFixed(2) ?? ""),
    extremes(row.share),
    row.steps_per_s.flatMap(({ per_s }) => (per_s ? [number(per_s.median)] : [])).join(", "),
    row.ceiling === null ? "" : row.ceiling.toFixed(2),
    row.harvest === null ? "" : row.harvest.toFixed(2),
  ]);
  const cost = rows.some(({ mps_cost }) => mps_cost) ? `<p>${text(MPS_COST_TEXT)}</p>` : "";
  return `${grid(HEADER, cells)}${cost}`;
}

function aloneOr(value: Spread | null, over?: number): string {
  return value ? `${number(value.median)}${mpsCostText(over)}` : "";
}

function soloTable({ solo, of: [document] }: Shown): string {
  if (solo.length === 0) return "";
  const { rate_per_s } = document.options;
  const rows = solo.map((one) => [text(one.program), ...soloCells(one)]);
  const plots = solo.map(({ program, samples, settle_s }) => {
    const counted = (of: readonly (readonly Sample[])[]): number[] =>
      latencies(of.flat().filter(([due_s]) => due_s >= settle_s));
    return [
      pairsOverTime(program, pairedRatios(samples, { rate_per_s, settle_s })),
      curvesOf([
        { name: `${program}, bare`, sorted: counted(samples.bare), colour: "var(--ink)" },
        { name: `${program}, under Rigel`, sorted: counted(samples.rigel), colour: colour(0) },
        ...(samples.past.flat().length > 0
          ? [{ name: `${program}, under Rigel, past it`, sorted: counted(samples.past), colour: colour(1) }]
          : []),
      ]),
    ].join("");
  });
  return (
    `<section><h2>What Rigel costs with nothing beside it</h2>${grid(SOLO_HEADER, rows)}<p>${text(SOLO_TEXT)}</p>` +
    `<div class="plots">${plots.join("")}</div></section>`
  );
}

/** A dot for each pair of neighbouring requests: seconds to the right, the ratio of their latencies upwards, logarithmic. */
function pairsOverTime(program: string, points: readonly (readonly [at_s: number, ratio: number])[]): string {
  const ratios = ascending(points.map(([, ratio]) => ratio));
  if (ratios.length === 0) return "";
  // What lies outside is drawn at the edge; it would leave the others no room.
  const low = Math.min(0.9, quantile(ratios, 0.01));
  const high = Math.max(1.1, quantile(ratios, 0.99));
  const [from_s, to_s] = [points[0]?.[0] ?? 0, points.at(-1)?.[0] ?? 0];
  const left = 46;
  const bottom = 180;
  const x = (at_s: number): number => left + ((at_s - from_s) / Math.max(1e-9, to_s - from_s)) * (WIDTH - left - 12);
  const y = (ratio: number): number =>
    bottom - (Math.log(Math.min(high, Math.max(low, ratio)) / low) / Math.log(high / low)) * (bottom - 12);
  const across = [low, 1, high].map(
    (ratio) =>
      `<line class="${ratio === 1 ? "one" : "grid"}" x1="${left}" x2="${WIDTH - 12}" y1="${at(y(ratio))}" y2="${at(y(ratio))}"/>` +
      `<text x="${left - 6}" y="${at(y(ratio) + 4)}" text-anchor="end">${number(ratio)}</text>`,
  );
  const ends = [
    `<text x="${left}" y="${bottom + 18}">${number(from_s)}</text>`,
    `<text x="${WIDTH - 12}" y="${bottom + 18}" text-anchor="end">${number(to_s)} s</text>`,
  ];
  const dots = points.map(([at_s, ratio]) => `M${at(x(at_s))} ${at(y(ratio))}h0`).join("");
  const drawn = `<path fill="none" stroke="${colour(0)}" stroke-width="3" stroke-opacity="0.5" stroke-linecap="round" d="${dots}"/>`;
  return figure(`${program}: each pair of neighbouring requests, under Rigel over bare`, bottom + 24, [
    ...across,
    ...ends,
    drawn,
  ]);
}

function extremes(value: Spread | null): string {
  if (value === null) return "";
  const between = value.rounds > 1 ? ` (${number(value.min)}-${number(value.max)})` : "";
  return `${number(value.median)}${between}`;
}

function failure({ title, problem, output }: Shown["failures"][number]): string {
  return `<h3>${text(title)}</h3><p>${text(problem)}</p><pre>${text(output.join("\n"))}</pre>`;
}
