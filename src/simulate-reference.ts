/**
 * simulate-reference.ts: measured pairs against what the model predicts of them: how far a prediction is to be trusted.
 *
 * profiles/reference-h200.json holds what was measured. With it are kept the median errors that `rigel simulate --reference --keep`
 * writes and every prediction cites; test/simulate.test.ts computes them anew. Benchmarks become such a file by --import-bench.
 */

import { existsSync } from "node:fs";
import { dirname, join } from "node:path";
import { z } from "zod";
import { requireMeasured } from "./bench-report.ts";
import { ALONE, median } from "./bench-stats.ts";
import { gpuOf } from "./calibrate.ts";
import { allPairs } from "./bench-matrix.ts";
import { policySchema } from "./config.ts";
import { RigelError } from "./errors.ts";
import { inputName, readJson } from "./json.ts";
import type { Native } from "./native.ts";
import { aligned } from "./report.ts";
import { fields, parse } from "./schema.ts";
import { type ScenarioClient, Simulator } from "./simulate-run.ts";
import { queuesUp } from "./simulate.ts";
import { aloneOf, scenarioOf, wayFor } from "./simulate-ways.ts";

const clientSchema = fields({
  program: z.string(),
  class: z.enum(["high", "best-effort"]),
  /** Beside the file; null: none was recorded, so that it cannot be simulated. */
  profile: z.string().nullable(),
});

const rowSchema = fields({
  pair: z.string(),
  clients: z.array(clientSchema).min(2),
  way: z.string(),
  /** null: without Rigel. */
  policy: policySchema.nullable(),
  mps: z.boolean(),
  p50_over_alone: z.number().positive().nullable(),
  p99_over_alone: z.number().positive(),
  share: z.number().positive(),
  source: z.string(),
});

const errorsSchema = fields({
  /** Median of |predicted / measured - 1|. */
  p99_over_alone: z.number(),
  share: z.number(),
  rows: z.int(),
});

const referenceSchema = fields({
  schema: z.literal(1),
  device: z.string(),
  preset: z.enum(["h200", "a100", "l4"]),
  /** Requests of the high program, Poisson. */
  rate_per_s: z.number().positive(),
  rows: z.array(rowSchema),
  /** Of the last `--keep`. */
  median_error: errorsSchema.optional(),
});

type Reference = z.infer<typeof referenceSchema>;
type Row = Reference["rows"][number];

export interface Comparison {
  row: Row;
  /** Undefined: a program has no profile. */
  predicted: { p50_over_alone: number; p99_over_alone: number; share: number; queues_up: boolean } | undefined;
}

const DURATION_s = 60;
const SEED = 1;

export function referencePath(profiles: string): string {
  return join(profiles, "reference-h200.json");
}

export async function readReference(path: string): Promise<Reference> {
  return parse(referenceSchema, await readJson(path), path);
}

/** Simulates every row that has profiles; one at least has to. */
export async function compareAll(
  reference: Reference,
  path: string,
  native: Native,
  watch: (simulator: Simulator) => void,
): Promise<Comparison[]> {
  using simulator = new Simulator(native.files.simulate);
  // The one that comes with Rigel, so that what is kept in the file is the same for everybody.
  const gpu = await gpuOf(reference.preset, native.files.profiles, null);
  const all = reference.rows.map(async (row, at): Promise<Comparison> => {
    const clients = clientsOf(row, reference, `${path}: rows[${at}]`, dirname(path));
    if (!clients) return { row, predicted: undefined };
    const policy = row.policy ?? undefined;
    const way = wayFor(row.way, policy, row.mps, { file: path, clients: [] });
    const [together, ...alone] = await Promise.all([
      simulator.run(scenarioOf(way, clients, DURATION_s, gpu, native)),
      ...clients.map((client) => simulator.run(aloneOf(client, DURATION_s, gpu))),
    ]);
    const base = alone.flatMap((outcome) => outcome.clients);
    const [high, first] = [together.clients[0], base[0]];
    if (!high || !first) throw new Error(`${row.pair}: the scenario says nothing of it`);
    let share = 0;
    for (const [index, one] of together.clients.entries())
      if (index > 0) share += one.finished / (base[index]?.finished ?? 1);
    return {
      row,
      predicted: {
        p50_over_alone: high.p50_ns / first.p50_ns,
        p99_over_alone: high.p99_ns / first.p99_ns,
        share,
        queues_up: clients[0] !== undefined && queuesUp(clients[0], high.p50_ns),
      },
    };
  });
  watch(simulator);
  const comparisons = await Promise.all(all);
  if (comparisons.every(({ predicted }) => predicted === undefined))
    throw new RigelError(
      "config",
      `${path}: rows: expected one or more whose programs all have a profile, without which there is nothing to compare with`,
    );
  return comparisons;
}

/** The high program first; undefined where one has no profile. `where`: what errors call the row; profiles are relative to `base`. */
function clientsOf(row: Row, { rate_per_s }: Reference, where: string, base: string): ScenarioClient[] | undefined {
  const clients: ScenarioClient[] = [];
  for (const [index, { program, class: kind, profile }] of row.clients.entries()) {
    if (profile === null) return undefined;
    const at = join(base, profile);
    if (!existsSync(at))
      throw new RigelError(
        "profile",
        `${where}.clients[${index}].profile: expected a kernel profile that exists, got ${at}`,
      );
    clients.push({
      name: program,
      class: kind,
      profiles: [at],
      drawSeed: SEED,
      rate: kind === "high" ? { kind: "poisson", per_s: rate_per_s, seed: SEED } : undefined,
      arrivals: undefined,
      iterations: undefined,
      weight: 1,
      reports: true,
    });
  }
  return clients.toSorted((a, b) => Number(a.class === "best-effort") - Number(b.class === "best-effort"));
}

const off = (predicted: number, measured: number): number => Math.abs(predicted / measured - 1);

export function medianErrors(comparisons: readonly Comparison[]): z.infer<typeof errorsSchema> {
  const known = comparisons.flatMap(({ row, predicted }) => (predicted ? [{ row, predicted }] : []));
  const of = (key: "p99_over_alone" | "share"): number =>
    Number(median(known.map(({ row, predicted }) => off(predicted[key], row[key]))).toFixed(4));
  return { p99_over_alone: of("p99_over_alone"), share: of("share"), rows: known.length };
}

export function referenceText(comparisons: readonly Comparison[], preset: Reference["preset"]): string {
  const header = ["pair", "way", "p99/alone", "predicted", "error", "share", "predicted", "error", "source"];
  const rows = comparisons.map(({ row, predicted }) => [
    row.pair,
    row.way,
    ...(["p99_over_alone", "share"] as const).flatMap((key) => [
      row[key].toFixed(2),
      predicted ? predicted[key].toFixed(2) : "-",
      predicted ? percent(off(predicted[key], row[key]), 0) : "-",
    ]),
    !predicted
      ? `${row.source}; no profile, not simulated`
      : predicted.queues_up
        ? `${row.source}; requests queue up: p99 depends on for how long`
        : row.source,
  ]);
  const lines = aligned(header, rows, 2);
  return [...lines, "", errorsText(medianErrors(comparisons), preset)].join("\n");
}

export function errorsText(
  { p99_over_alone, share, rows }: z.infer<typeof errorsSchema>,
  preset: Reference["preset"],
): string {
  return (
    `median error on ${rows} measurements of an ${preset.toUpperCase()}: p99 over alone ${percent(p99_over_alone, 1)}, share ${percent(share, 1)} ` +
    "(each: rigel simulate --reference)"
  );
}

function percent(x: number, digits: number): string {
  return `${(x * 100).toFixed(digits)}%`;
}

/* ---- From rigel bench --json */

const spreadSchema = z.object({ median: z.number(), rounds: z.number() }).nullable();
const benchSchema = z.object({
  // They differ in what is not read here.
  schema: z.literal([1, 2]),
  simulated: z.boolean(),
  started: z.string(),
  device: z.object({ name: z.string() }),
  options: z.object({ rate_per_s: z.number().positive(), arrivals: z.string() }),
  policies: z.record(z.string(), policySchema),
  rows: z.array(
    z.object({
      pair: z.string(),
      way: z.string(),
      method: z.string(),
      p50_ratio: spreadSchema,
      p99_ratio: spreadSchema,
      share: spreadSchema,
    }),
  ),
});

/** A benchmark's rows as measurements to compare with. `notes` says what was left out and why. */
export async function referenceFromBench(path: string, notes: string[]): Promise<Reference> {
  const file = inputName(path);
  const bench = parse(benchSchema, await readJson(path), file);
  requireMeasured(file, bench.simulated);
  if (bench.options.arrivals !== "poisson")
    throw new RigelError("config", `${file}: options.arrivals: expected poisson, got ${bench.options.arrivals}`);
  // As a word: an L40S is no L4.
  const words = bench.device.name.toLowerCase().split(/[^a-z0-9]+/);
  const preset = (["h200", "a100", "l4"] as const).find((name) => words.includes(name));
  if (preset === undefined)
    throw new RigelError(
      "config",
      `${file}: device.name: expected an H200, A100 or L4, which can be simulated, got ${bench.device.name}`,
    );
  const pairs = new Map(allPairs(false).map((pair) => [pair.name, pair]));
  const rows = bench.rows.flatMap((row): Row[] => {
    if (row.way === ALONE || row.way.startsWith("alone")) return [];
    const pair = pairs.get(row.pair);
    const name = /^rigel (.+?)(, MPS)?$/.exec(row.way)?.[1];
    const policy = name === undefined ? null : bench.policies[name];
    const isTold = (row.p99_ratio?.median ?? 0) > 0 && (row.share?.median ?? 0) > 0;
    if (
      !pair ||
      policy === undefined ||
      !isTold ||
      !row.p99_ratio ||
      !row.share ||
      row.way === "MPS, client priority"
    ) {
      notes.push(`${row.pair}, ${row.way}: left out, as it cannot be simulated or has no ratio`);
      return [];
    }
    return [
      {
        pair: row.pair,
        clients: [pair.high, ...pair.best].map((one) => ({
          program: one.name,
          class: one.class,
          profile: one.profile ?? null,
        })),
        way: row.way,
        policy,
        mps: row.way.endsWith("MPS"),
        p50_over_alone: row.p50_ratio?.median ?? null,
        p99_over_alone: row.p99_ratio.median,
        share: row.share.median,
        source: `bench of ${bench.started}, ${row.method}, ${row.p99_ratio.rounds} rounds`,
      },
    ];
  });
  if (rows.length === 0) throw new RigelError("config", `${file}: no row of it can be compared with`);
  return { schema: 1, device: bench.device.name, preset, rate_per_s: bench.options.rate_per_s, rows };
}
