/**
 * colocate.ts: the README's table for real GPUs: real PyTorch programs alone, beside each other, and under Rigel.
 *
 *   bun test/gpu/colocate.ts [--pairs resnet,bert] [--rounds 2] [--duration 8] [--lead 13] [--json FILE]
 *
 * One round runs every way once; rounds alternate, and what is shown are medians over the rounds of ratios within a round.
 * Both programs of a way warm up and then measure from a common start time. MPS is a daemon of this script's own, in a folder
 * of its own, stopped at the end. Needs a GPU, PyTorch, torchvision and transformers.
 */

import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { Command } from "commander";
import { z } from "zod";

const root = resolve(import.meta.dir, "..", "..");

const PAIRS: Record<string, { title: string; high: string; best: string }> = {
  resnet: {
    title: "ResNet-50 bs4 + ResNet-50 training bs64",
    high: "--model resnet50 --mode infer --batch 4 --rate 60",
    best: "--model resnet50 --mode train --batch 64",
  },
  bert: {
    title: "BERT-base bs2x128 + GPT-2 training 8x512",
    high: "--model bert --mode infer --batch 2 --seq 128 --rate 60",
    best: "--model gpt2 --mode train --batch 8 --seq 512",
  },
};

interface Setting {
  high: boolean;
  best: boolean;
  mps: boolean;
  rigel: boolean;
}

/** Each way of running: which programs, with MPS or not, under Rigel or not. */
const WAYS: Record<string, Setting> = {
  "high alone": { high: true, best: false, mps: false, rigel: false },
  "high alone, Rigel": { high: true, best: false, mps: false, rigel: true },
  "best-effort alone": { high: false, best: true, mps: false, rigel: false },
  "time slicing": { high: true, best: true, mps: false, rigel: false },
  MPS: { high: true, best: true, mps: true, rigel: false },
  "Rigel, time slicing": { high: true, best: true, mps: false, rigel: true },
  "Rigel, MPS": { high: true, best: true, mps: true, rigel: true },
};
const ways = Object.keys(WAYS);

const inferSchema = z.object({
  role: z.literal("infer"),
  count: z.number(),
  p50_ms: z.number(),
  p99_ms: z.number(),
  late: z.boolean(),
});
const trainSchema = z.object({ role: z.literal("train"), iterations_per_s: z.number(), late: z.boolean() });
const lineSchema = z.discriminatedUnion("role", [inferSchema, trainSchema]);
interface Measured {
  high?: z.infer<typeof inferSchema>;
  best?: z.infer<typeof trainSchema>;
}

const program = new Command("colocate")
  .option("--pairs <names>", "pairs, separated by commas", Object.keys(PAIRS).join(","))
  .option("--ways <names>", "ways, separated by semicolons", ways.join(";"))
  .option("--rounds <count>", "rounds", Number, 2)
  .option("--duration <seconds>", "seconds measured", Number, 8)
  .option("--lead <seconds>", "seconds for the programs to start and warm up", Number, 13)
  .option("--policy <json>", 'policy of the ways under Rigel, e.g. {"unit_us": 50}', "{}")
  .option("--json <file>", "write everything measured to this file")
  .parse();
const options = z
  .object({
    pairs: z.string(),
    ways: z.string(),
    rounds: z.number().int().positive(),
    duration: z.number().positive(),
    lead: z.number().positive(),
    policy: z.string(),
    json: z.string().optional(),
  })
  .parse(program.opts());

const scratch = mkdtempSync(join(tmpdir(), "rigel-colocate-"));
const mpsFolder = join(scratch, "mps");
const noMpsFolder = join(scratch, "no-mps");
for (const folder of [mpsFolder, noMpsFolder]) mkdirSync(folder);
const mpsEnvironment = { CUDA_MPS_PIPE_DIRECTORY: mpsFolder, CUDA_MPS_LOG_DIRECTORY: mpsFolder };

function control(line: string): void {
  Bun.spawnSync(["nvidia-cuda-mps-control"], { env: { ...process.env, ...mpsEnvironment }, stdin: Buffer.from(line) });
}

function settingOf(way: string): Setting {
  const setting = WAYS[way];
  if (!setting) throw new Error(`--ways: no way "${way}"; there are: ${ways.join("; ")}`);
  return setting;
}

async function runWay(pair: { high: string; best: string }, way: string): Promise<Measured> {
  const { high, best, mps, rigel } = settingOf(way);
  const startAt = (Date.now() / 1000 + options.lead).toFixed(3);
  const common = ["--start-at", startAt, "--duration", String(options.duration)];
  const env = { ...process.env, ...(mps ? mpsEnvironment : { CUDA_MPS_PIPE_DIRECTORY: noMpsFolder }) };
  const commands = [
    ...(high ? [{ name: "high", class: "high", command: workload(pair.high, common) }] : []),
    ...(best ? [{ name: "best", class: "best-effort", command: workload(pair.best, common) }] : []),
  ];
  let text: string;
  if (rigel) {
    const config = join(scratch, "config.json");
    writeFileSync(config, JSON.stringify({ policy: JSON.parse(options.policy), clients: commands }));
    const child = Bun.spawn([...rigelCommand(), "launch", config, "--json"], { env, stdout: "pipe", stderr: "pipe" });
    const [, stderr] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
    text = stderr;
  } else {
    const children = commands.map(({ command }) => Bun.spawn(command, { env, stdout: "pipe", stderr: "inherit" }));
    text = (await Promise.all(children.map((child) => child.stdout.text()))).join("\n");
  }
  const measured: Measured = {};
  for (const found of text.matchAll(/\{"role":.*\}/g)) {
    const line = lineSchema.parse(JSON.parse(found[0]));
    if (line.role === "infer") measured.high = line;
    else measured.best = line;
  }
  if (high !== (measured.high !== undefined) || best !== (measured.best !== undefined))
    throw new Error(`${way}: a program printed no result:\n${text}`);
  return measured;
}

/** RIGEL_BINARY names a built single binary to be used instead of the sources. */
function rigelCommand(): string[] {
  const binary = process.env["RIGEL_BINARY"];
  return binary ? [binary] : [process.execPath, join(root, "src", "cli.ts")];
}

function workload(args: string, common: string[]): string[] {
  return ["python3", join(root, "test", "gpu", "workload.py"), ...args.split(" "), ...common];
}

function median(values: number[]): number {
  const sorted = values.toSorted((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? (sorted[middle] ?? Number.NaN) : ((sorted[middle - 1] ?? 0) + (sorted[middle] ?? 0)) / 2;
}

const all: { pair: string; round: number; way: string; measured: Measured }[] = [];
const chosen = options.ways.split(";");
chosen.forEach(settingOf);
Bun.spawnSync(["nvidia-cuda-mps-control", "-d"], { env: { ...process.env, ...mpsEnvironment } });
try {
  for (let round = 0; round < options.rounds; round++)
    for (const name of options.pairs.split(",")) {
      const pair = PAIRS[name];
      if (!pair) throw new Error(`--pairs: no pair "${name}"; there are ${Object.keys(PAIRS).join(", ")}`);
      for (const way of chosen) {
        const measured = await runWay(pair, way);
        all.push({ pair: name, round, way, measured });
        const { high, best } = measured;
        const late = high?.late || best?.late ? " LATE: raise --lead" : "";
        process.stderr.write(
          `round ${round + 1} ${name}, ${way}: ${high ? `p50 ${high.p50_ms} p99 ${high.p99_ms} ms` : ""} ` +
            `${best ? `${best.iterations_per_s} it/s` : ""}${late}\n`,
        );
        if (options.json) writeFileSync(options.json, JSON.stringify(all));
      }
    }
} finally {
  control("quit\n");
  rmSync(scratch, { recursive: true, force: true });
}

const rows = ["| pair | how | p50 / alone | p99 / alone | share |", "|---|---|---|---|---|"];
for (const name of options.pairs.split(",")) {
  const of = (way: string, round: number): Measured | undefined =>
    all.find((one) => one.pair === name && one.way === way && one.round === round)?.measured;
  for (const way of chosen.filter((one) => settingOf(one).high && one !== "high alone")) {
    const ratios: Record<"p50" | "p99" | "share", number[]> = { p50: [], p99: [], share: [] };
    for (let round = 0; round < options.rounds; round++) {
      const [alone, bestAlone, here] = [of("high alone", round), of("best-effort alone", round), of(way, round)];
      if (alone?.high && here?.high) {
        ratios.p50.push(here.high.p50_ms / alone.high.p50_ms);
        ratios.p99.push(here.high.p99_ms / alone.high.p99_ms);
      }
      if (bestAlone?.best && here?.best)
        ratios.share.push(here.best.iterations_per_s / bestAlone.best.iterations_per_s);
    }
    const shown = [ratios.p50, ratios.p99, ratios.share]
      .map((r) => (r.length > 0 ? median(r).toFixed(2) : ""))
      .join(" | ");
    rows.push(`| ${PAIRS[name]?.title} | ${way} | ${shown} |`);
  }
}
process.stdout.write(`${rows.join("\n")}\n`);
