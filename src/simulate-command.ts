/** simulate-command.ts: the command line of `rigel simulate`. */

import { join } from "node:path";
import { type Command, InvalidArgumentError } from "commander";
import { readCalibration } from "./calibration.ts";
import { readConfig } from "./config.ts";
import { progress } from "./log.ts";
import { Native } from "./native.ts";
import { ProgressBar } from "./progress-bar.ts";
import { predictionPage } from "./simulate-page.ts";
import type { Simulator } from "./simulate-run.ts";
import { sweepOf } from "./simulate-sweep.ts";
import { predictionText } from "./simulate-text.ts";
import { predict } from "./simulate.ts";

const EXAMPLES = `
Ways (--policy): time-slicing and mps are the GPU without Rigel; none, priority, slo, fair and orion are Rigel's policies, with
-gate without preemption (priority-gate, slo-gate), with +mps or +slices under MPS or in time slices, whatever the
configuration says (priority+mps).

A command is replayed by its profile (clients[].profile, made by rigel import), at clients[].rate_per_s requests a second, or
one iteration after the other.

Examples:
  rigel simulate jobs.json                              every way that fits the clients
  rigel simulate jobs.json --policy priority time-slicing --duration 20
  rigel simulate jobs.json --sweep rate=20:200:20 --html rates.html
  rigel simulate jobs.json --sweep inflight=1,2,4,8,16,32 --policy priority+mps
  rigel simulate jobs.json --seed 7 --json | jq '.points[0].ways[].harvest'`;

interface Flags {
  policy?: string[];
  sweep?: string;
  seed?: number;
  duration?: number;
  calibration?: string;
  json?: true;
  html?: string;
}

/** Adds `rigel simulate`. */
export function addSimulateCommand(program: Command): void {
  program
    .command("simulate")
    .description("predict in virtual time what the clients of a configuration would get together, without a GPU")
    .argument("[config]", "configuration file, Rigel's or Orion's (default: the demo)")
    .option("--policy <names...>", "ways of sharing to compare (default: all that fit)")
    .option(
      "--sweep <values>",
      "KEY=FROM:TO:STEP or KEY=A,B,C: rate, NAME.rate, duration, seed, inflight, slice_us, ...",
    )
    .option("--seed <number>", "of the Poisson arrivals of all clients", wholeNumber)
    .option("--duration <seconds>", "of virtual time (default: the configuration's, or 60)", positiveNumber)
    .option("--calibration <file>", "values of a GPU, by rigel calibrate (default: what comes with Rigel)")
    .option("--json", "print the prediction as JSON")
    .option("--html <file>", "write a page with plots")
    .addHelpText("after", EXAMPLES)
    .action(runSimulate);
}

async function runSimulate(file: string | undefined, flags: Flags): Promise<void> {
  const native = await Native.load();
  const config = await readConfig(file ?? join(native.files.profiles, "demo.json"));
  const calibration = await readCalibration(flags.calibration, config.simulated.preset, native.files.profiles);
  const begun = performance.now();
  const { prediction, count } = await shown(async (watch) =>
    predict(
      config,
      {
        ways: flags.policy,
        sweep: flags.sweep === undefined ? undefined : sweepOf(flags.sweep),
        seed: flags.seed,
        duration_s: flags.duration,
        calibration,
      },
      native,
      watch,
    ),
  );
  for (const note of prediction.notes) progress(`note: ${note}`);
  progress(`${count} scenarios in ${((performance.now() - begun) / 1000).toFixed(1)} s`);
  if (flags.html !== undefined) {
    await Bun.write(flags.html, predictionPage(prediction, config.file, []));
    progress(`${flags.html} written`);
  }
  process.stdout.write(`${flags.json ? JSON.stringify(prediction, null, 2) : predictionText(prediction)}\n`);
}

/** With a bar of how many scenarios are done. */
async function shown<Result>(
  work: (watch: (simulator: Simulator) => void) => Promise<Result>,
): Promise<{ prediction: Result; count: number }> {
  let bar: ProgressBar | undefined;
  let watched: Simulator | undefined;
  try {
    const prediction = await work((simulator) => {
      watched = simulator;
      bar = new ProgressBar("scenarios", simulator.asked, () => simulator.done);
    });
    return { prediction, count: watched?.asked ?? 0 };
  } finally {
    bar?.stop();
  }
}

function positiveNumber(text: string): number {
  const value = Number(text);
  if (text.trim() === "" || !Number.isFinite(value) || value <= 0)
    throw new InvalidArgumentError("Expected a number above 0.");
  return value;
}

function wholeNumber(text: string): number {
  const value = Number(text);
  if (text.trim() === "" || !Number.isSafeInteger(value) || value < 0)
    throw new InvalidArgumentError("Expected a whole number.");
  return value;
}
