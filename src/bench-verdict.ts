/**
 * bench-verdict.ts: how soon `slo` would say of requests that a benchmark measured that they miss a target, and how often: what a way's
 * requests are like is known from all of them together, and what the loop makes of the few that it has at a time from this.
 *
 * Of what `rigel bench --live --json FILE` wrote: the way's requests follow one another from a window drawn by chance on, judged twelve by
 * twelve beside some requests alone, of windows drawn by chance too, as slo-delay.ts judges them on a rung.
 */

import { z } from "zod";
import { between, standalone, whole } from "./arguments.ts";
import { waitSchema } from "./bench-report.ts";
import { reason } from "./errors.ts";
import { generator } from "./random.ts";
import { readJson, withPlaces } from "./json.ts";
import { parse } from "./schema.ts";
import { ENOUGH } from "./slo-alone.ts";
import { Alone, type Wait, Waits, delay } from "./slo-delay.ts";

const fileSchema = z.object({
  measurements: z.array(
    z.object({
      pair: z.string(),
      method: z.string(),
      way: z.string(),
      waits: z.array(waitSchema).optional(),
    }),
  ),
});

/** Requests of a window alone, and from one look to the next. */
const WINDOW = 36;
const STEP = 12;

interface Verdicts {
  pair: string;
  way: string;
  /** Of all requests together, what they took over what they would have taken alone. */
  delayed: { requests: number; p50: number; p95: number; p99: number };
  /** The part of the draws in which they were found to be over the target within so many requests. */
  over: { within: number; part: number }[];
}

const options = standalone("bench:verdict")
  .description("how soon slo would say that requests miss a target, of what rigel bench --live --json FILE measured")
  .argument("<file>", "of rigel bench --live --json")
  .option("--target <ratio>", "p99 over alone", between(1, 100), 1.05)
  .option("--alone <requests>", "how many requests alone are known", whole(ENOUGH, 10_000), 100)
  .option("--draws <count>", "how often it is drawn where to begin", whole(1, 10_000), 60)
  .option("--json", "print as JSON")
  .addHelpText(
    "after",
    "\nExamples:\n  bun run bench:verdict bench.json\n  bun run bench:verdict bench.json --target 1.1 --json",
  )
  .parse();
const {
  target,
  alone: known,
  draws,
  json,
} = options.opts<{
  target: number;
  alone: number;
  draws: number;
  json?: true;
}>();
const WITHIN = [60, 120, 240, 480, 960];

function verdictsOf(pair: string, way: string, alone: readonly Wait[][], there: readonly Wait[][]): Verdicts {
  const random = generator(1);
  const firsts = Array.from({ length: draws }, () => {
    const some: Wait[] = [];
    while (some.length < known) {
      const window = alone[Math.floor(random() * alone.length)] ?? [];
      const at = Math.floor(random() * Math.max(1, window.length - WINDOW));
      some.push(...window.slice(at, at + WINDOW));
    }
    const says = new Alone(some);
    const at = Math.floor(random() * there.length);
    const list = [...there.slice(at), ...there.slice(0, at)].flat();
    const waits = new Waits();
    for (let count = STEP; count <= list.length; count += STEP) {
      waits.add(list.slice(count - STEP, count), 0);
      if (delay(waits.waits, says, target, ENOUGH).verdict === "over") return count;
    }
    return Number.POSITIVE_INFINITY;
  });
  const { requests, p50, p95, p99 } = delay(there.flat(), new Alone(alone.flat()), target, ENOUGH);
  const over = WITHIN.map((within) => ({ within, part: firsts.filter((count) => count <= within).length / draws }));
  return { pair, way, delayed: { requests, p50, p95, p99 }, over };
}

async function main(path: string): Promise<void> {
  let file: z.infer<typeof fileSchema>;
  try {
    file = parse(fileSchema, await readJson(path), path);
  } catch (thrown) {
    const lines = withPlaces(reason(thrown)).split("\n");
    return options.error(lines.map((line) => `bench:verdict: ${line}`).join("\n"));
  }
  const groups = Map.groupBy(file.measurements, ({ pair, method }) => `${pair}\n${method}`);
  const all = [...groups.values()].flatMap((group) => {
    const ways = Map.groupBy(group, ({ way }) => way);
    const waits = (way: string): Wait[][] =>
      (ways.get(way) ?? []).flatMap((one) => (one.waits && one.waits.length > 0 ? [one.waits] : []));
    const alone = waits("alone");
    if (alone.length === 0) return [];
    return [...ways.keys()].flatMap((way) => {
      const there = waits(way);
      return there.length > 0 ? [verdictsOf(group[0]?.pair ?? "", way, alone, there)] : [];
    });
  });
  if (all.length === 0)
    return options.error(
      `bench:verdict: ${path}: expected requests alone and beside others in windows of one start: rigel bench --live`,
    );
  process.stdout.write(`${json ? JSON.stringify(all, null, 2) : table(all).join("\n")}\n`);
}

function table(all: readonly Verdicts[]): string[] {
  const head = `found over ${target} within so many requests, of ${draws} draws: ${WITHIN.join(", ")}`;
  return [
    head,
    ...all.map(({ pair, way, delayed, over }) => {
      const { requests, p50, p95, p99 } = delayed;
      const parts = over.map(({ part }) => part.toFixed(2)).join(" ");
      return `${pair}, ${way}: ${parts}; delayed ${p50.toFixed(2)}, ${p95.toFixed(2)}, ${p99.toFixed(2)} (${requests} requests)`;
    }),
  ];
}

await main(options.args[0] ?? "");
