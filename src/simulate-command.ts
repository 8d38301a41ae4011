/** simulate-command.ts: the command line of `rigel simulate`. */

import { join } from "node:path";
import { type Command } from "commander";
import { between, upTo, whole } from "./arguments.ts";
import { LONGEST_DURATION_s, filesRead, readConfig } from "./config.ts";
import { RigelError } from "./errors.ts";
import { progress } from "./log.ts";
import { Native } from "./native.ts";
import { checkApart, checkOutput, writeOutput } from "./output.ts";
import { ProgressBar } from "./progress-bar.ts";
import { predictionPage } from "./simulate-page.ts";
import type { Simulator } from "./simulate-run.ts";
import {
  compareAll,
  errorsText,
  medianErrors,
  readReference,
  referenceFromBench,
  referencePath,
  referenceText,
} from "./simulate-reference.ts";
import { sweepOf } from "./simulate-sweep.ts";
import { predictionText } from "./simulate-text.ts";
import { predict } from "./simulate.ts";

const EXAMPLES = `
Ways (--policy): time-slicing and mps are the GPU without Rigel; none, priority, slo, fair and orion are Rigel's policies, with
-gate without preemption (priority-gate, slo-gate), with +mps or +slices under MPS or in time slices, whatever the
configuration says (priority+mps).

A command is replayed by its profile (clients[].profile, made by rigel profile or rigel import), at clients[].rate_per_s requests a second, or
one iteration after the other. Of a list of profiles each request is one, by chance.

Examples:
  rigel simulate jobs.json                              every way that fits the clients
  rigel simulate jobs.json --policy priority time-slicing --duration 20
  rigel simulate jobs.json --sweep rate=20:200:20 --html rates.html
  rigel simulate jobs.json --sweep stop_us=0,50,100,250,500,1000 --policy priority+mps
  rigel simulate jobs.json --host bench.json            on a host as fast as the one that rigel bench --live --json saw
  rigel simulate --reference                            how far predictions are off, pair by pair
  rigel simulate --import-bench bench.json -o profiles/reference-h200.json
  rigel simulate jobs.json --seed 7 --json | jq '.points[0].ways[].harvest'`;

const LINE_ms = 10_000;

interface Flags {
  policy?: string[];
  sweep?: string;
  seed?: number;
  duration?: number;
  slow?: number;
  host?: string;
  reference?: string | true;
  keep?: true;
  importBench?: string;
  output?: string;
  json?: true;
  html?: string;
}

/** Adds `rigel simulate`. */
export function addSimulateCommand(program: Command): void {
  program
    .command("simulate")
    .description("predict in virtual time what the clients of a configuration would get together, without a GPU")
    .argument("[config]", "configuration file, Rigel's or Orion's; - is standard input (default: the demo)")
    .option("--policy <names...>", "ways of sharing to compare (default: all that fit)")
    .option(
      "--sweep <values>",
      "KEY=FROM:TO:STEP or KEY=A,B,C: rate, NAME.rate, duration, seed, inflight, slice_us, ...",
    )
    .option("--seed <number>", "of the Poisson arrivals of all clients", whole(0, Number.MAX_SAFE_INTEGER))
    .option("--duration <seconds>", "of virtual time (default: the configuration's, or 60)", upTo(LONGEST_DURATION_s))
    .option(
      "--slow <factor>",
      "of a host whose processors are shared: by what programs take longer between launches in spells of 2 s, on average, every other one",
      between(1, 10),
    )
    .option(
      "--host <file>",
      "how fast the high clients' host is from moment to moment, instead: of requests alone that rigel bench --live --json measured",
    )
    .option("--reference [file]", "compare predictions with measurements (default: those that come with Rigel)")
    .option("--keep", "with --reference: write the median errors into the file, for every prediction to cite")
    .option(
      "--import-bench <file>",
      "make such a file (-o) of what rigel bench --json measured; profiles lie beside it",
    )
    .option("-o, --output <file>", "where --import-bench writes (default: standard output)")
    .option("--json", "print as JSON")
    .option("--html <file>", "write a page with plots")
    .addHelpText("after", EXAMPLES)
    .action(runSimulate);
}

/** An option that is read with another one alone. */
function alone(option: string, other: string): RigelError {
  return new RigelError(
    "command",
    `rigel simulate: ${option}: expected ${other} with it, without which it says nothing`,
  );
}

async function runSimulate(file: string | undefined, flags: Flags): Promise<void> {
  if (flags.output !== undefined && flags.importBench === undefined) throw alone("-o", "--import-bench");
  if (flags.keep && flags.reference === undefined) throw alone("--keep", "--reference");
  if (flags.reference !== undefined || flags.importBench !== undefined)
    for (const option of ["slow", "host", "policy", "sweep", "seed", "duration", "html"] as const)
      if (flags[option] !== undefined) throw alone(`--${option}`, "a configuration or the demo");
  for (const option of ["seed", "duration"] as const)
    if (flags[option] !== undefined && flags.sweep?.startsWith(`${option}=`))
      throw new RigelError("command", `rigel simulate: expected --${option} or --sweep ${option}, got both`);
  if (flags.reference !== undefined && flags.importBench !== undefined)
    throw new RigelError("command", "rigel simulate: expected --reference or --import-bench, got both");
  if (file !== undefined && (flags.reference !== undefined || flags.importBench !== undefined))
    throw new RigelError(
      "command",
      `rigel simulate: expected no configuration with ${flags.reference === undefined ? "--import-bench" : "--reference"}, got ${file}`,
    );
  if (flags.slow !== undefined && flags.host !== undefined)
    throw new RigelError("command", "rigel simulate: expected --slow or --host: both say how fast the host is");
  if (flags.importBench !== undefined) return await importBench(flags.importBench, flags.output);
  const native = await Native.load();
  if (flags.reference !== undefined) return await runReference(flags, native);
  await checkApart([{ option: "--html", file: flags.html }], [file, flags.host]);
  if (flags.html !== undefined) await checkOutput("--html", flags.html);
  await runPrediction(file, flags, native);
}

async function runPrediction(file: string | undefined, flags: Flags, native: Native): Promise<void> {
  const config = await readConfig(file ?? join(native.files.profiles, "demo.json"));
  await checkApart([{ option: "--html", file: flags.html }], filesRead(config));
  const begun = performance.now();
  const { prediction, count } = await shown(async (watch) =>
    predict(
      config,
      {
        ways: flags.policy,
        sweep: flags.sweep === undefined ? undefined : sweepOf(flags.sweep),
        seed: flags.seed,
        duration_s: flags.duration,
        slow: flags.slow,
        host: flags.host,
      },
      native,
      watch,
    ),
  );
  for (const note of prediction.notes) progress(`note: ${note}`);
  progress(`${count} scenarios in ${((performance.now() - begun) / 1000).toFixed(1)} s`);
  const path = referencePath(native.files.profiles);
  const { median_error: reference, preset } = await readReference(path);
  const said = reference ? [errorsText(reference, preset)] : [];
  if (flags.html !== undefined) {
    await writeOutput("--html", flags.html, predictionPage(prediction, config.file, said));
    progress(`${flags.html} written`);
  }
  const document = { ...prediction, median_error: reference ?? null };
  const shownAs = flags.json ? JSON.stringify(document, null, 2) : [predictionText(prediction), "", ...said].join("\n");
  process.stdout.write(`${shownAs}\n`);
}

async function runReference(flags: Flags, native: Native): Promise<void> {
  const path = typeof flags.reference === "string" ? flags.reference : referencePath(native.files.profiles);
  const reference = await readReference(path);
  if (flags.keep) await checkOutput("--keep", path);
  const { prediction: comparisons } = await shown(async (watch) => await compareAll(reference, path, native, watch));
  const median_error = medianErrors(comparisons);
  if (flags.keep) {
    await writeOutput("--keep", path, `${JSON.stringify({ ...reference, median_error }, null, 2)}\n`);
    progress(`${path}: median errors written`);
  }
  const document = { schema: 1, device: reference.device, median_error, rows: comparisons };
  process.stdout.write(
    `${flags.json ? JSON.stringify(document, null, 2) : referenceText(comparisons, reference.preset)}\n`,
  );
}

async function importBench(file: string, output: string | undefined): Promise<void> {
  await checkApart([{ option: "--output", file: output }], [file]);
  if (output !== undefined) await checkOutput("--output", output);
  const notes: string[] = [];
  const text = `${JSON.stringify(await referenceFromBench(file, notes), null, 2)}\n`;
  for (const note of notes) progress(`note: ${note}`);
  if (output === undefined) process.stdout.write(text);
  else {
    await writeOutput("--output", output, text);
    progress(`${output} written; rigel simulate --reference ${output} --keep compares`);
  }
}

/** With a bar of how many scenarios are done, or a line of that now and then. */
async function shown<Result>(
  work: (watch: (simulator: Simulator) => void) => Promise<Result>,
): Promise<{ prediction: Result; count: number }> {
  let bar: ProgressBar | undefined;
  let watched: Simulator | undefined;
  try {
    const prediction = await work((simulator) => {
      watched = simulator;
      bar = new ProgressBar("scenarios", simulator.asked, () => simulator.done, { line_ms: LINE_ms });
    });
    return { prediction, count: watched?.asked ?? 0 };
  } finally {
    bar?.stop();
  }
}
