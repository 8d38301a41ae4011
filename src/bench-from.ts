/**
 * bench-from.ts: what `rigel bench --json` wrote before, of several runs of it put together: `rigel bench --from`.
 *
 * As a host with several GPUs measures pairs on each, or one run after the other does. Rows are as they were measured; nothing is pooled, so that no
 * pair may be in two files.
 */

import { z } from "zod";
import type { Shown } from "./bench-report.ts";
import type { Row } from "./bench-stats.ts";
import { deviceSchema } from "./device.ts";
import { RigelError } from "./errors.ts";
import { inputName, readJson } from "./json.ts";
import { parse } from "./schema.ts";

const spreadSchema = z
  .object({ median: z.number(), min: z.number(), max: z.number(), rounds: z.int().positive() })
  .nullable();
const delayedSchema = z.object({ requests: z.int(), p50: z.number(), p95: z.number(), p99: z.number() }).nullable();

const followingSchema = z
  .object({
    requests: z.int(),
    p50_ms: z.number().nullable(),
    p90_ms: z.number().nullable(),
    late: z.int().nullable(),
    apart: z.object({
      requests: z.int(),
      p50_ms: z.number().nullable(),
      p90_ms: z.number().nullable(),
      p99_ms: z.number().nullable(),
      late: z.int().nullable(),
    }),
  })
  .nullable();

const stayedSchema = z
  .partialRecord(
    z.enum(["not", "ahead", "announced", "behind"]),
    z.object({ requests: z.int(), p50_ms: z.number(), p99_ms: z.number() }),
  )
  .nullable();

/** What came later is not in all files. */
const rowSchema = z.object({
  pair: z.string(),
  way: z.string(),
  method: z.string(),
  p50_ms: spreadSchema,
  p95_ms: spreadSchema,
  p99_ms: spreadSchema,
  p50_ratio: spreadSchema,
  p95_ratio: spreadSchema,
  p99_ratio: spreadSchema,
  delayed: delayedSchema.default(null),
  following: followingSchema.default(null),
  stayed: stayedSchema.default(null),
  steps_per_s: z.array(z.object({ program: z.string(), per_s: spreadSchema })),
  share: spreadSchema,
  ceiling: z.number().nullable(),
  harvest: z.number().nullable(),
  mps_cost: z.object({ p50: z.number(), p95: z.number(), p99: z.number() }).nullable().default(null),
}) satisfies z.ZodType<Row>;

const benchSchema = z.object({
  schema: z.literal(2),
  started: z.string(),
  simulated: z.boolean(),
  device: deviceSchema,
  driver: z.string().nullable(),
  versions: z.record(z.string(), z.string()),
  host: z.object({ processor: z.string(), processors: z.int(), kernel: z.string() }),
  options: z.object({
    rate_per_s: z.number(),
    arrivals: z.string(),
    seed: z.int(),
    rounds: z.int(),
    duration_s: z.number(),
    solo: z.boolean().default(false),
  }),
  pairs: z.array(z.object({ name: z.string(), high: z.string(), best: z.array(z.string()) })),
  runs: z.int(),
  done: z.int(),
  gpu_times: z.array(
    z.object({ program: z.string(), gpu_ms: z.number(), source: z.string(), pairs: z.array(z.string()) }),
  ),
  rows: z.array(rowSchema),
  measurements: z.array(
    z.object({
      pair: z.string(),
      way: z.string(),
      method: z.string(),
      requests: z.array(z.tuple([z.number(), z.number()])),
    }),
  ),
  failures: z.array(z.object({ title: z.string(), problem: z.string(), output: z.array(z.string()) })),
  notes: z.array(z.string()),
});

type Document = z.infer<typeof benchSchema>;

/** Reads them. Throws where one is none, is of another GPU than the first, has no pair, or has one that another has. */
export async function readDocuments(paths: readonly [string, ...string[]]): Promise<Shown> {
  const [path, ...others] = paths;
  const first = await readDocument(path);
  const all: [Document, ...Document[]] = [first];
  const whose = new Map(pairsOf(first).map((pair) => [pair, path]));
  for (const other of others) {
    const document = await readDocument(other);
    const refuse = (field: string, expected: string): never => {
      throw new RigelError("config", `${inputName(other)}: ${field}: expected ${expected}`);
    };
    const { name } = document.device;
    if (name !== first.device.name)
      refuse("device.name", `${first.device.name}, as in ${inputName(path)}, got ${name}`);
    for (const pair of pairsOf(document)) {
      const there = whose.get(pair);
      if (there !== undefined)
        refuse("rows", `pairs that are in no other file, got ${pair}, which is in ${inputName(there)} too`);
      whose.set(pair, other);
    }
    all.push(document);
  }
  const measured = new Set(whose.keys());
  const pairs = all.flatMap((document) => document.pairs).filter(({ name }) => measured.delete(name));
  // Those of one high program follow one another.
  const grouped = [...Map.groupBy(pairs, ({ high }) => high).values()].flat();
  const rows = Map.groupBy(
    all.flatMap((document) => document.rows),
    ({ pair }) => pair,
  );
  return {
    of: all,
    simulated: first.simulated,
    pairs: grouped,
    rows: grouped.flatMap(({ name }) => rows.get(name) ?? []),
    measurements: all.flatMap(({ measurements }) => measurements),
    solo: [],
    failures: all.flatMap(({ failures }) => failures),
    notes: [...new Set(all.flatMap(({ notes }) => notes))],
  };
}

async function readDocument(path: string): Promise<Document> {
  const file = inputName(path);
  const document = parse(benchSchema, await readJson(path), file);
  if (document.rows.length === 0)
    throw new RigelError(
      "config",
      `${file}: rows: expected measurements of pairs, as rigel bench --json FILE writes them, got ` +
        (document.options.solo ? "those of programs alone (--solo)" : "none"),
    );
  return document;
}

function pairsOf({ rows }: Document): string[] {
  return [...new Set(rows.map(({ pair }) => pair))];
}
