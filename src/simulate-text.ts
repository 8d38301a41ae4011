/**
 * simulate-text.ts: a prediction for people: tables, and of a sweep a plot in letters.
 */

import { basename } from "node:path";
import { aligned } from "./report.ts";
import { changesText, digits, endText, settingsText, targetText } from "./show.ts";
import type { Point, PredictedClient, PredictedWay, Prediction } from "./simulate.ts";

export function predictionText(prediction: Prediction): string {
  const { points, sweep } = prediction;
  const [first] = points;
  if (!first) return "";
  const lines = [...heading(prediction, first), ""];
  if (sweep === null) lines.push(...wayTable(first));
  else lines.push(...sweepTable(sweep, points), ...sweepPlot(sweep, points));
  return [...lines, ...sloLines(points)].join("\n");
}

function heading({ preset, calibration, sweep, slow, host }: Prediction, { duration_s, ceiling }: Point): string[] {
  return [
    `simulated ${preset}, ${sweep === "duration" ? "" : `${duration_s} s of `}virtual time, with the values of ${calibration === null ? "the preset" : basename(calibration)}`,
    ...(slow === 1
      ? []
      : [`programs take ${slow} times as long between launches in every other spell of 2 s, on average`]),
    ...(host
      ? [
          `the high clients' host is as fast as in ${basename(host.file)}: ${host.requests} requests, which take their program ` +
            `${digits(host.work_p50_ms)} ms (p50)`,
        ]
      : []),
    ...(sweep === null
      ? [`ceiling ${ceiling.toFixed(2)}: the part of the GPU's time that the high clients leave`]
      : []),
  ];
}

const HEADER = ["way", "client", "p50 ms", "p95 ms", "p99 ms", "p50/alone", "p99/alone", "per s", "share", "harvest"];

function wayTable({ alone, ways }: Point): string[] {
  const rows = [
    ...alone.map((client) => clientRow("alone", client, null)),
    ...ways.flatMap(({ way, clients, harvest }) =>
      clients.map((client, index) =>
        clientRow(index === 0 ? way : "", client, lastBest(clients) === client ? harvest : null),
      ),
    ),
  ];
  return aligned(HEADER, rows, 2);
}

/** Harvest is of all best-effort clients: it stands once. */
function lastBest(clients: readonly PredictedClient[]): PredictedClient | undefined {
  return clients.findLast((client) => client.class === "best-effort");
}

function clientRow(way: string, client: PredictedClient, harvest: number | null): string[] {
  const { name, p50_ms, p95_ms, p99_ms, p50_over_alone, p99_over_alone, per_s, share } = client;
  return [
    way,
    name,
    ...[p50_ms, p95_ms, p99_ms].map(cell),
    ...[p50_over_alone, p99_over_alone].map(ratio),
    digits(per_s),
    ratio(share),
    ratio(harvest),
  ];
}

function cell(value: number | null): string {
  return value === null ? "" : digits(value);
}

function ratio(value: number | null): string {
  return value === null ? "" : value >= 100 ? value.toFixed(0) : value.toFixed(2);
}

/** The worst p99 over alone of the high clients. */
export function worst_p99(way: PredictedWay): number | null {
  return worstOf(way)?.p99_over_alone ?? null;
}

/** The high client whose p99 is the worst over alone; the first one where that is known of none. */
function worstOf({ clients }: PredictedWay): PredictedClient | undefined {
  const [first, ...others] = clients.filter((client) => client.class === "high");
  return others.reduce((worst, one) => ((one.p99_over_alone ?? 0) > (worst?.p99_over_alone ?? 0) ? one : worst), first);
}

/* ---- Sweeps */

function sweepTable(sweep: string, points: readonly Point[]): string[] {
  const header = [sweep, "way", "client", "p50 ms", "p99 ms", "p99/alone", "share", "ceiling", "harvest"];
  const rows = points.flatMap(({ value, ways, ceiling }) =>
    ways.map((way, index) => {
      const high = worstOf(way) ?? way.clients[0];
      return [
        index === 0 ? String(value) : "",
        way.way,
        high?.name ?? "",
        cell(high?.p50_ms ?? null),
        cell(high?.p99_ms ?? null),
        ratio(worst_p99(way)),
        ratio(way.share),
        index === 0 ? ratio(ceiling) : "",
        ratio(way.harvest),
      ];
    }),
  );
  return aligned(header, rows, 3);
}

const PLOT_ROWS = 12;
const PLOT_COLUMNS = 64;

/** p99 over alone, upwards, and share; each way a letter. */
function sweepPlot(sweep: string, points: readonly Point[]): string[] {
  const names = (points[0]?.ways ?? []).map(({ way }) => way);
  const legend = names.map((name, index) => `${letter(index)} ${name}`).join("   ");
  return [
    ...plot(`p99 over alone (logarithmic), by ${sweep}`, points, worst_p99, Math.log),
    ...plot(
      `best-effort throughput over alone, by ${sweep}`,
      points,
      ({ share }) => share,
      (x) => x,
    ),
    "",
    legend,
  ];
}

function letter(index: number): string {
  return String.fromCodePoint(97 + (index % 26));
}

function plot(
  title: string,
  points: readonly Point[],
  value: (way: PredictedWay) => number | null,
  scale: (x: number) => number,
): string[] {
  const all = points.flatMap(({ ways }) => ways.flatMap((way) => value(way) ?? []));
  if (all.length === 0) return [];
  const [low, high] = [Math.min(...all), Math.max(...all)];
  const grid = Array.from({ length: PLOT_ROWS }, () => Array.from({ length: PLOT_COLUMNS }, () => " "));
  const span = scale(high) - scale(low) || 1;
  for (const [column, { ways }] of points.entries())
    for (const [index, way] of ways.entries()) {
      const own = value(way);
      if (own === null) continue;
      const x = points.length > 1 ? Math.round((column / (points.length - 1)) * (PLOT_COLUMNS - 1)) : 0;
      const y = PLOT_ROWS - 1 - Math.round(((scale(own) - scale(low)) / span) * (PLOT_ROWS - 1));
      const row = grid[y];
      // Where two meet, the later one is not hidden for good: an asterisk says that there are several.
      if (row) row[x] = row[x] === " " || row[x] === letter(index) ? letter(index) : "*";
    }
  const label = (y: number): string => (y === 0 ? ratio(high) : y === PLOT_ROWS - 1 ? ratio(low) : "");
  const ends = [String(points[0]?.value ?? ""), String(points.at(-1)?.value ?? "")];
  return [
    "",
    title,
    ...grid.map((row, y) => `${label(y).padStart(8)} |${row.join("")}`.trimEnd()),
    `${" ".repeat(8)} +${"-".repeat(PLOT_COLUMNS)}`,
    `${" ".repeat(10)}${ends[0]}${(ends[1] ?? "").padStart(PLOT_COLUMNS - (ends[0] ?? "").length)}`,
  ];
}

function sloLines(points: readonly Point[]): string[] {
  if (points.length > 1) return [];
  return points.flatMap(({ ways }) =>
    ways.flatMap(({ way, slo }) => {
      if (!slo) return [];
      const told = [
        `target p99 ${targetText(slo.target)}, at the end ${settingsText(slo.settings)}, ${changesText(slo)}`,
        endText(slo),
      ];
      return ["", `${way}: ${told.filter(Boolean).join("; ")}`];
    }),
  );
}
