/** calibrate-command.ts: the command line of `rigel calibrate`. */

import { rmSync } from "node:fs";
import { resolve } from "node:path";
import { type Command } from "commander";
import { whole } from "./arguments.ts";
import { type Calibration, devicePath, makeDevicesFolder, measure } from "./calibrate.ts";
import type { DeviceSelector } from "./config.ts";
import { Devices, deviceEnvironment } from "./device.ts";
import { SIGNAL_STATUS, onRequestToEnd } from "./interrupt.ts";
import { progress } from "./log.ts";
import { Native } from "./native.ts";
import { WholeFile, checkApart } from "./output.ts";
import { simulationFolder, simulationState } from "./plan.ts";
import { ProgressBar } from "./progress-bar.ts";
import { aligned } from "./report.ts";
import { digits } from "./show.ts";

const EXAMPLES = `
What rigel simulate needs to know of a GPU is measured with kernels that Rigel brings: bandwidths, how long one kernel waits for the one
before, time slices and what exchanging them costs, and how far kernels slow one another side by side. Nothing else should use the
GPU meanwhile. Without a GPU the simulated one is measured, in virtual time.

Examples:
  rigel calibrate                          the first GPU; rigel simulate takes the result from then on
  rigel calibrate --device 1 --json        another one, and what was measured as JSON
  rigel calibrate -o device-h200.json      into a file of your own, which nothing reads by itself

How each number is measured is in the JSON, which is also what the file holds; native/replay/calibrate.c does it.`;

interface Flags {
  device: DeviceSelector;
  rounds: number;
  output?: string;
  json?: true;
}

/** Adds `rigel calibrate`. `device` reads what --device gives. */
export function addCalibrateCommand(program: Command, device: (text: string) => DeviceSelector): void {
  program
    .command("calibrate")
    .description("measure what rigel simulate needs to know of a GPU, once per device (about a minute)")
    .option("--device <device>", "auto, simulated, a device index, or a UUID", device, "auto")
    .option("--rounds <count>", "how often; the medians are kept", whole(1, 1000), 5)
    .option("-o, --output <file>", "where it goes (default: the cache folder, by the device's name)")
    .option("--json", "print as JSON")
    .addHelpText("after", EXAMPLES)
    .action(runCalibrate);
}

async function runCalibrate(flags: Flags): Promise<void> {
  await checkApart([{ option: "--output", file: flags.output }]);
  const native = await Native.load();
  if (flags.output === undefined) makeDevicesFolder();
  else await new WholeFile(flags.output).check();
  const state = simulationState(simulationFolder(native, process.env));
  const simulation = { state, preset: "h200", mps: false } as const;
  const device = await new Devices(native.files, simulation).choose(flags.device, "--device");
  const stop = new AbortController();
  let status: number | undefined;
  const off = onRequestToEnd((signal) => {
    status = SIGNAL_STATUS[signal];
    stop.abort();
  });
  progress(`${device.name}: ${flags.rounds} ${flags.rounds === 1 ? "round" : "rounds"}`);
  let done = 0;
  const bar = new ProgressBar("measured", 1, () => done);
  try {
    const calibration = await measure(
      native.files,
      {
        ...deviceEnvironment([device], native.files, simulation, process.env),
        ...(device.simulated && { RIGEL_SIM_CLOCK: "virtual" }),
      },
      flags.rounds,
      stop.signal,
      (_, part) => {
        done = part;
      },
    );
    const path = flags.output === undefined ? devicePath(calibration.device) : resolve(flags.output);
    await using written = new WholeFile(path);
    await written.write(`${JSON.stringify(calibration, null, 2)}\n`);
    await written.finish();
    bar.stop();
    progress(`${path} written`);
    if (device.simulated)
      progress("note: rigel simulate takes what was measured of real GPUs; these are the preset's own numbers");
    process.stdout.write(`${flags.json ? JSON.stringify(calibration, null, 2) : calibrationText(calibration)}\n`);
  } catch (thrown) {
    if (!stop.signal.aborted) throw thrown;
    bar.stop();
    progress("stopped; nothing was written");
  } finally {
    bar.stop();
    if (device.simulated) rmSync(state, { force: true });
    off();
    if (status !== undefined) process.exitCode = status;
  }
}

function calibrationText({ device, rounds, constants, pairs }: Calibration): string {
  const rows = Object.entries(constants).map(([key, { value, least, most, unit, used }]) => [
    key,
    shown(value),
    shown(least),
    shown(most),
    unit,
    used ? "yes" : "no",
  ]);
  const beside = pairs.map(({ first, second, sms, first_slower, second_slower }) => [
    first,
    second,
    sms,
    shown(first_slower),
    shown(second_slower),
  ]);
  return [
    `${device}, ${rounds === 1 ? "1 round" : `medians of ${rounds} rounds`}`,
    "",
    ...aligned(["constant", "value", "least", "most", "unit", "simulated"], rows, 1),
    "",
    ...aligned(["kernel", "beside", "SMs", "takes longer", "the other"], beside, 3),
  ].join("\n");
}

function shown(value: number | null): string {
  return value === null ? "-" : digits(value);
}
