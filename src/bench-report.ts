/**
 * bench-report.ts: what a benchmark found: the JSON document, and the Markdown table made from it.
 *
 * Fields of the document are public: they may be added, never renamed. Schema 2; in schema 1 `solo` was of windows, not of single
 * requests.
 */

import { z } from "zod";
import type { Failure, Found, Load, Timing } from "./bench-jobs.ts";
import { ALONE, HOST_ms, type Interval, type Row, type Solo, type Spread, lateAlone, rowsOf } from "./bench-stats.ts";
import type { Policy } from "./config.ts";
import type { Device } from "./device.ts";
import { RigelError } from "./errors.ts";

/** `measurements[].waits[]` of the document, for who reads it: a Wait of slo-delay.ts. */
export const waitSchema = z.object({
  client: z.number(),
  kind: z.number().optional(),
  began_ms: z.number(),
  worked_ms: z.number().nonnegative(),
  waited_ms: z.number().nonnegative(),
});

/** Refuses a document, `file`, of the simulated GPU where what a GPU did is asked for. */
export function requireMeasured(file: string, simulated: boolean): void {
  if (simulated)
    throw new RigelError("config", `${file}: expected measurements of a GPU, got a benchmark of the simulated one`);
}

/** What is collected while a benchmark runs. */
export interface BenchResult {
  /** When, as ISO 8601. */
  started: string;
  device: Device;
  /** Version of the NVIDIA driver; null on the simulated GPU or where nvidia-smi is not there. */
  driver: string | null;
  versions: Record<string, string>;
  host: { processor: string; processors: number; kernel: string };
  options: Timing & Load & { live: boolean; solo: boolean };
  /** By the name that the ways carry. */
  policies: Record<string, Policy>;
  pairs: { name: string; high: string; best: string[] }[];
  /** How many runs there were to be, and how many there were. */
  runs: number;
  done: number;
  gpu_times: (NonNullable<Found["gpu_time"]> & { pairs: string[] })[];
  measurements: NonNullable<Found["measurements"]>;
  solo: NonNullable<Found["solo"]>[];
  loops: NonNullable<Found["loops"]>;
  failures: Failure[];
  notes: string[];
}

export interface BenchDocument extends BenchResult {
  schema: 2;
  simulated: boolean;
  rows: Row[];
}

export function documentOf(result: BenchResult): BenchDocument {
  const gpu_ms = new Map(result.gpu_times.flatMap(({ pairs, gpu_ms: ms }) => pairs.map((pair) => [pair, ms] as const)));
  const rows = rowsOf(result.measurements, gpu_ms);
  const notes = [...result.notes, ...queueNotes(rows, result.options), ...hostNotes(result.measurements)];
  return { schema: 2, simulated: result.device.simulated, rows, ...result, notes };
}

/** Of an open loop: where half of the requests or more take longer than the mean time between two, as rigel simulate tells it. */
function queueNotes(rows: readonly Row[], { rate_per_s, arrivals }: Load): string[] {
  if (arrivals !== "poisson" && arrivals !== "uniform") return [];
  const late = rows.filter(({ p50_ms }) => (p50_ms?.median ?? 0) > 1000 / rate_per_s);
  if (late.length === 0) return [];
  return [
    "requests queue up, taking longer than the time between them, so that how late they are depends on the duration: " +
      late.map((row) => `${row.pair}, ${wayOf(row)}`).join("; "),
  ];
}

/** Where processors were late: then p99 over alone is chance, and more requests come unforeseen (docs/experiments.md, processors that are late). */
function hostNotes(measurements: BenchResult["measurements"]): string[] {
  const late = lateAlone(measurements);
  if (late.length === 0) return [];
  return [
    `the host was late: with nothing beside them, requests whose time is the GPU's took ${HOST_ms} ms longer than half of them do, ` +
      "so that p99 over alone is the host's as well; measure on another one, or when it is quiet: " +
      late.map(({ pair, late: some, requests }) => `${pair}, ${some} of ${requests}`).join("; "),
  ];
}

/** Where and how the numbers of one document came about. */
export type Circumstances = Pick<
  BenchDocument,
  "started" | "device" | "simulated" | "driver" | "versions" | "host" | "gpu_times" | "runs" | "done"
> & {
  options: Pick<BenchResult["options"], "rate_per_s" | "seed" | "rounds" | "duration_s" | "solo"> & {
    arrivals: string;
  };
};

/** What a table and a page are made of: of one document, or of several, whose pairs are not the same. */
export type Shown = Pick<BenchDocument, "simulated" | "pairs" | "rows" | "solo" | "failures" | "notes"> & {
  of: readonly [Circumstances, ...Circumstances[]];
  measurements: readonly Pick<BenchDocument["measurements"][number], "pair" | "way" | "method" | "requests">[];
};

export function shownOf(document: BenchDocument): Shown {
  return { ...document, of: [document] };
}

/** The JSON document of several: where each came about, and their rows; not the requests that these are made of. */
export function togetherOf({ of, simulated, pairs, rows, failures, notes }: Shown): object {
  const documents = of.map((one) => {
    const { started, device, driver, versions, host, options, gpu_times, runs, done } = one;
    return { started, device, driver, versions, host, options, gpu_times, runs, done };
  });
  return { schema: 2, simulated, documents, pairs, rows, failures, notes };
}

/** A line each; what several documents say alike is said once. */
export function circumstances(of: readonly Circumstances[]): string[] {
  const started = of.map((one) => one.started).toSorted();
  const [first = "", last = ""] = [started[0], started.at(-1)];
  const [done, runs] = (["done", "runs"] as const).map((key) => of.reduce((sum, one) => sum + one[key], 0));
  const lines = [
    of.map(
      ({ device, simulated, driver }) =>
        `${device.name}${simulated ? ": a model, no measurement of a GPU" : ""}${driver ? `, driver ${driver}` : ""}`,
    ),
    [versionsOf(of)],
    of.map(({ host }) => `${host.processors} x ${host.processor}, Linux ${host.kernel}`),
    of.map(({ options: { rate_per_s, arrivals, seed, rounds, duration_s, solo } }) => {
      const measured = solo
        ? `${duration_s} s in all`
        : `${rounds} ${rounds === 1 ? "round" : "rounds"} of ${duration_s} s a way`;
      return `${arrivals} arrivals at ${rate_per_s}/s, seed ${seed}, ${measured}`;
    }),
    [`begun ${first === last ? first : `from ${first} to ${last}`}`],
    ceilings(of.flatMap(({ gpu_times }) => gpu_times)),
    done === runs ? [] : [`ended after ${done} of ${runs} runs`],
  ];
  return lines.flatMap((alike) => [...new Set(alike)]);
}

/** Of each program all that it had. */
function versionsOf(of: readonly Circumstances[]): string {
  const all = Map.groupBy(
    of.flatMap(({ versions }) => Object.entries(versions)),
    ([name]) => name,
  );
  return [...all]
    .map(([name, found]) => `${name} ${[...new Set(found.map(([, version]) => version))].join(" or ")}`)
    .join(", ");
}

function ceilings(times: Circumstances["gpu_times"]): string[] {
  return [...Map.groupBy(times, ({ program, source }) => JSON.stringify([program, source])).values()].map((alike) => {
    const ms = alike.map(({ gpu_ms }) => gpu_ms).toSorted((a, b) => a - b);
    const [least, most] = [ms[0], ms.at(-1)].map((one) => one?.toFixed(3));
    const said = least === most ? least : `${least} to ${most}`;
    return `ceiling for ${alike[0]?.program}: ${said} ms of the GPU a request (${alike[0]?.source})`;
  });
}

export function markdown({ of, rows, solo, failures, notes }: Shown): string {
  const parts: string[][] = [circumstances(of).map((line) => `- ${line}`)];
  if (rows.length > 0)
    parts.push(
      table(
        [
          "pair",
          "way",
          "p50 / alone",
          "p95 / alone",
          "p99 / alone",
          "delayed p50, p95, p99",
          "share",
          "ceiling",
          "harvest",
        ],
        rows.map((row) => [
          row.pair,
          wayOf(row),
          ...(row.way === ALONE
            ? [
                aloneText(row.p50_ms, row.mps_cost?.p50),
                aloneText(row.p95_ms, row.mps_cost?.p95),
                aloneText(row.p99_ms, row.mps_cost?.p99),
              ]
            : [row.p50_ratio, row.p95_ratio, row.p99_ratio].map(ratio)),
          row.delayed
            ? [row.delayed.p50, row.delayed.p95, row.delayed.p99].map((one) => one.toFixed(2)).join(", ")
            : "",
          row.way === ALONE ? throughput(row) : ratio(row.share),
          row.ceiling === null ? "" : row.ceiling.toFixed(2),
          row.harvest === null ? "" : row.harvest.toFixed(2),
        ]),
      ),
      [
        "Medians over the rounds, with the extremes in brackets. Rows `alone` show what the others are compared with. delayed: " +
          "the requests of all rounds over what the same requests would have taken alone, from how long each had to wait for the " +
          "GPU; the host's own ups and downs are in both. share: " +
          "best-effort throughput over its throughput alone. ceiling: 1 minus the part of the time for which the high " +
          "program alone keeps the GPU busy. harvest: share over the ceiling of the same requests, round by round." +
          (rows.some(({ mps_cost }) => mps_cost) ? ` ${MPS_COST_TEXT}` : ""),
      ],
    );
  if (solo.length > 0)
    parts.push(
      table(
        SOLO_HEADER,
        solo.map((one) => [one.program, ...soloCells(one)]),
      ),
      [SOLO_TEXT],
    );
  if (failures.length > 0) parts.push(failures.map(({ title, problem }) => `- failed: ${title}: ${problem}`));
  if (notes.length > 0) parts.push(notes.map((note) => `- note: ${note}`));
  return parts.map((lines) => lines.join("\n")).join("\n\n");
}

/** Of a table of programs alone; what soloCells gives comes after the first. */
export const SOLO_HEADER = [
  "program alone",
  "p50 bare",
  "p50 under Rigel",
  "p50 ratio",
  "paired",
  "p99 ratio",
  "within p50 ratio",
  "adds us",
  "within p99 ratio",
  "requests bare",
  "under Rigel",
  "p50 of copies bare",
  "under Rigel",
  "pairs within",
];

export const SOLO_TEXT =
  "Requests alternate one by one between bare copies and copies under Rigel. Ratios are under Rigel over bare, of all requests " +
  "pooled; paired: the median of the ratios of neighbouring requests. Of each two requests that a copy under Rigel gets, one goes past " +
  "it, by chance the first or the second; that one counts in the columns within alone, which compare the two of one process: the median of " +
  "the ratios of pairs, and of their differences in us; p99 of all latencies, each over the p50 past Rigel of its copy. In brackets: 95% of " +
  "a bootstrap that draws copies, then pairs of each. p50s are in ms.";

export function soloCells(solo: Solo): string[] {
  return [
    solo.bare.p50_ms.toFixed(3),
    solo.rigel.p50_ms.toFixed(3),
    withInterval(solo.ratio, solo.interval),
    withInterval(solo.paired, solo.paired_interval),
    withInterval(solo.p99_ratio, solo.p99_interval),
    withInterval(solo.within?.p50, solo.within?.p50_interval),
    withInterval(solo.within?.added_us, solo.within?.added_us_interval, 0),
    withInterval(solo.within?.p99, solo.within?.p99_interval),
    String(solo.bare.count),
    String(solo.rigel.count),
    ...[solo.copies.bare, solo.copies.rigel].map((p50s) => p50s.map((ms) => ms.toFixed(2)).join(", ")),
    String(solo.within?.pairs ?? 0),
  ];
}

function withInterval(value: number | null = null, interval: Interval | null = null, digits = 3): string {
  if (value === null || interval === null) return "";
  return `${value.toFixed(digits)} (${interval.map((end) => end.toFixed(digits)).join(" to ")})`;
}

/** With how the programs were started, where that is not anew. */
export function wayOf({ way, method }: { way: string; method: string }): string {
  if (method === "anew") return way;
  // That it is with MPS, most ways say themselves.
  return `${way} (${way.endsWith("MPS") ? "live" : method})`;
}

export const MPS_COST_TEXT =
  "Behind alone under MPS: over alone without it, the best-effort programs being there and pausing in both; that is what MPS costs, and in " +
  "none of the ratios to it.";

/** Behind what requests take alone under MPS. */
export function mpsCostText(over?: number): string {
  return over === undefined ? "" : ` (x${over.toFixed(2)})`;
}

function aloneText(value: Spread | null, over?: number): string {
  return value ? `${value.median.toFixed(2)} ms${mpsCostText(over)}` : "";
}

function throughput({ steps_per_s }: Row): string {
  return steps_per_s.flatMap(({ per_s }) => (per_s ? [`${per_s.median.toFixed(2)}/s`] : [])).join(", ");
}

function ratio(value: Spread | null): string {
  if (value === null) return "";
  const extremes = value.rounds > 1 ? ` (${value.min.toFixed(2)}-${value.max.toFixed(2)})` : "";
  return `${value.median.toFixed(2)}${extremes}`;
}

/** On one line, and not taken for the end of its cell: a policy may be called anything. */
function cellText(cell: string): string {
  return cell.replaceAll(/\s+/g, " ").replaceAll(/[|<\\]/g, String.raw`\$&`);
}

function table(header: string[], rows: string[][]): string[] {
  const lines = [header, header.map(() => "---"), ...rows];
  return lines.map((cells) => `| ${cells.map(cellText).join(" | ")} |`);
}
