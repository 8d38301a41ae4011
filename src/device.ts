/**
 * device.ts: which GPU a client gets, real or simulated, and the environment that makes it see no other.
 *
 * Devices are found by running `rigel-replay --probe` in a process of its own: initialising CUDA here would leave a
 * context in the launcher. Never changes a device's settings.
 */

import { z } from "zod";
import type { ClientDevice, Config, DeviceSelector } from "./config.ts";
import { RigelError } from "./errors.ts";
import { removeIfPossible } from "./path.ts";
import { onEnd } from "./interrupt.ts";
import type { NativeFiles } from "./native.ts";

export const deviceSchema = z.object({
  index: z.int(),
  name: z.string(),
  uuid: z.string(),
  simulated: z.boolean(),
  /** Streaming multiprocessors. */
  sms: z.int().positive(),
  memory_bytes: z.int().nonnegative(),
  /** One process at a time may have contexts on it: its compute mode. Under MPS that is the daemon's server. */
  exclusive: z.boolean(),
});

/** One GPU. */
export type Device = z.infer<typeof deviceSchema>;

export type Environment = Record<string, string | undefined>;

/** How the simulated GPU of one phase is set up. */
export interface Simulation {
  /** File with the state of the simulated GPU, private to the phase. */
  state: string;
  preset: Config["simulated"]["preset"];
  /** What its UUID comes from, if that is not the file. */
  name?: string | undefined;
  /** Kernels of several processes side by side (as under MPS) rather than in time slices. */
  mps: boolean;
  /** How many GPUs there are; undefined: one, or what the environment says. */
  devices?: number | undefined;
}

const PROBE_TIMEOUT_ms = 60_000;

/** Devices asked for once and remembered: the first probe of a host with many GPUs takes seconds. */
export class Devices {
  readonly #files: NativeFiles;
  readonly #simulation: Simulation;
  #real: Promise<Device[]> | undefined;
  #simulated: Promise<Device> | undefined;

  constructor(files: NativeFiles, simulation: Simulation) {
    this.#files = files;
    this.#simulation = simulation;
  }

  /** The device that a selector of the configuration means. `where` is the field, for the error. */
  async choose(selector: DeviceSelector, where: string): Promise<Device> {
    if (selector === "simulated") return await this.simulated();
    const real = await this.real();
    if (selector === "auto") return real[0] ?? (await this.simulated());
    const found =
      typeof selector === "number"
        ? real.find((device) => device.index === selector)
        : real.find((device) => device.uuid.toLowerCase().startsWith(selector.toLowerCase()));
    if (found) return found;
    const there = real.map((device) => `${device.index} (${device.name}, ${device.uuid})`).join(", ");
    throw new RigelError(
      "device",
      `${where}: there is no GPU ${selector} here; ` +
        (there
          ? `there is ${there}`
          : 'no GPU was found; "simulated" needs none, and has its clients see all devices of "simulated.devices"'),
    );
  }

  /**
   * The devices that a client is to see, in the order in which it numbers them; "all": those that the launcher sees, or the simulated
   * ones where `launch`, which the launch is on, is simulated.
   */
  async chooseSome(selector: ClientDevice, launch: Device, where: string): Promise<[Device, ...Device[]]> {
    if (selector === "all" && launch.simulated) return [launch];
    if (selector !== "all" && !Array.isArray(selector)) return [await this.choose(selector, where)];
    const some =
      selector === "all" ? await this.real() : await Promise.all(selector.map((one) => this.choose(one, where)));
    const twice = some.find(({ uuid }, index) => some.findIndex((other) => other.uuid === uuid) !== index);
    // Programs would see no GPU at all.
    if (twice) throw new RigelError("device", `${where}: GPU ${twice.index} (${twice.uuid}) is there twice`);
    const [first, ...rest] = some;
    return first ? [first, ...rest] : [await this.simulated()];
  }

  /** The GPUs that CUDA programs started from here would see. */
  real(): Promise<Device[]> {
    this.#real ??= probe(this.#files, process.env).then(({ devices }) => devices.filter((device) => !device.simulated));
    return this.#real;
  }

  simulated(): Promise<Device> {
    this.#simulated ??= this.#probeSimulated();
    return this.#simulated;
  }

  async #probeSimulated(): Promise<Device> {
    // In a file of its own, as programs may be at work in the other one: those of a benchmark are started by several launches.
    const simulation = { ...this.#simulation, state: `${this.#simulation.state}-0`, name: this.#simulation.state };
    const environment = { ...process.env, ...simulatedEnvironment(this.#files, simulation, process.env) };
    const { devices, said } = await probe(this.#files, environment, simulation.state);
    const device = devices.find((candidate) => candidate.simulated);
    if (device) return device;
    throw new RigelError("device", `the simulated GPU in ${this.#files.simulator} does not answer: ${said}`);
  }
}

/** What a CUDA program started in this environment would see, and what the probe said besides. `state`: a file that it makes. */
async function probe(
  files: NativeFiles,
  environment: Environment,
  state?: string,
): Promise<{ devices: Device[]; said: string }> {
  let kill: (() => void) | undefined;
  // Before it is started: it may have made its file by the time that Bun.spawn returns.
  using _ = onEnd(() => {
    kill?.();
    if (state !== undefined) removeIfPossible(state);
  });
  const child = Bun.spawn([files.replay, "--probe"], {
    // Not a client of anything, whatever the caller's environment says.
    env: { ...environment, RIGEL_SEGMENT: undefined, LD_PRELOAD: undefined },
    // Out of reach of the terminal's Ctrl-C, which would be taken for its failure.
    detached: true,
    stdin: "ignore",
    stdout: "pipe",
    stderr: "pipe",
    timeout: PROBE_TIMEOUT_ms,
    killSignal: "SIGKILL",
  });
  kill = () => child.kill("SIGKILL");
  const [stdout, stderr, status] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
  if (child.signalCode !== null || status !== 0)
    throw new RigelError(
      "device",
      `looking for GPUs failed (rigel-replay --probe ended with ${child.signalCode ?? status}): ${stderr.trim()}`,
    );
  return { devices: z.array(deviceSchema).parse(JSON.parse(stdout)), said: stderr.trim() };
}

/** The version of the driver's kernel module, from the text of /proc/driver/nvidia/version. */
export function moduleVersion(text: string | undefined): string | undefined {
  // "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 ..."
  return /^NVRM version:.*?\s(\d+\.[\d.]+)\s/m.exec(text ?? "")?.[1];
}

/** What CUDA_VISIBLE_DEVICES asks for, as a client's `device` does. `where` is the variable, for the error. */
export function visibleDevices(text: string, where: string): (number | string)[] {
  return text.split(",").map((one) => {
    const name = one.trim();
    if (/^\d+$/.test(name)) return Number(name);
    if (/^(GPU|MIG)-[\w/-]+$/.test(name)) return name;
    throw new RigelError(
      "device",
      `${where}: expected device indices or UUIDs with commas between them, got "${text}"`,
    );
  });
}

/** What a client's environment needs to see these devices and nothing else. `given` is the environment it has so far. */
export function deviceEnvironment(
  devices: readonly [Device, ...Device[]],
  files: NativeFiles,
  simulation: Simulation,
  given: Environment,
): Record<string, string> {
  return devices[0].simulated
    ? simulatedEnvironment(files, simulation, given)
    : { CUDA_VISIBLE_DEVICES: devices.map(({ uuid }) => uuid).join(",") };
}

function simulatedEnvironment(files: NativeFiles, simulation: Simulation, given: Environment): Record<string, string> {
  const path = given["LD_LIBRARY_PATH"];
  return {
    LD_LIBRARY_PATH: path ? `${files.simulator}:${path}` : files.simulator,
    RIGEL_SIM_STATE: simulation.state,
    RIGEL_SIM_NAME: simulation.name ?? simulation.state,
    RIGEL_SIM_PRESET: simulation.preset,
    RIGEL_SIM_MPS: simulation.mps ? "1" : "0",
    ...(simulation.devices !== undefined && { RIGEL_SIM_DEVICES: String(simulation.devices) }),
  };
}
