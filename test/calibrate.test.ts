/**
 * calibrate.test.ts: the simulated GPU's constants come back out of `rigel calibrate`, which knows none of them, and `rigel simulate` takes
 * what was measured of a real one. All of it in the simulated GPU's virtual time.
 */

import { afterAll, describe, expect, test } from "bun:test";
import {
  chmodSync,
  existsSync,
  lstatSync,
  mkdirSync,
  readFileSync,
  readdirSync,
  symlinkSync,
  writeFileSync,
} from "node:fs";
import { join } from "node:path";
import { z } from "zod";
import { CONSTANTS, devicePath } from "../src/calibrate.ts";
import { SIGNAL_STATUS } from "../src/interrupt.ts";
import { stateOf } from "../src/proc.ts";
import { Scratch, plainEnvironment, rigel, root, start } from "./rigel.ts";
import { until } from "./serving.ts";

const scratch = new Scratch();
afterAll(() => scratch[Symbol.dispose]());

const build = join(root, "native", "build");
const roundSchema = z.object({
  values: z.record(z.string(), z.number().nullable()),
  pairs: z.array(z.object({ sms: z.string(), first_slower: z.number(), second_slower: z.number() })),
});

/** A preset's fields, as presets.def has them. */
function presetOf(name: string): (key: string) => number {
  const text = readFileSync(join(root, "native", "sim", "presets.def"), "utf8");
  const body = text.split(`RG_PRESET(${name},`)[1]?.split("RG_PRESET(")[0] ?? "";
  return (key) => {
    const value = new RegExp(`\\.${key} = ([0-9* ]+)[,)]`).exec(body)?.[1];
    if (value === undefined) throw new Error(`${name}: no ${key}`);
    return value.split("*").reduce((product, factor) => product * Number(factor), 1);
  };
}

async function measured(environment: Record<string, string>) {
  await using child = Bun.spawn([join(build, "rigel-replay"), "--calibrate"], {
    env: {
      ...plainEnvironment(),
      LD_LIBRARY_PATH: join(build, "sim"),
      RIGEL_SIM_STATE: join(scratch.path, `sim-${Object.values(environment).join("-")}`),
      RIGEL_SIM_CLOCK: "virtual",
      ...environment,
    },
    stdout: "pipe",
    stderr: "inherit",
  });
  const [stdout, status] = await Promise.all([child.stdout.text(), child.exited]);
  expect(status).toBe(0);
  return roundSchema.parse(JSON.parse(stdout.trimEnd().split("\n").at(-1) ?? ""));
}

describe("the simulated GPU", () => {
  test.each(["h200", "a100", "l4"])("%s: its constants come back out within 1%", async (preset) => {
    const of = presetOf(preset);
    const { values } = await measured({ RIGEL_SIM_PRESET: preset });
    for (const [key, { used }] of Object.entries(CONSTANTS)) {
      if (!used) continue;
      // What is measured of a slice is what is left of it once a context has its state back.
      const is = of(key) - (key === "slice_ns" ? of("restore_ns") : 0);
      expect(Math.abs((values[key] ?? 0) / is - 1), `${key}: ${values[key]} of ${is}`).toBeLessThan(0.01);
    }
  });

  test("measures the same every time", async () => {
    expect(await measured({ RIGEL_SIM_PRESET: "h200", RIGEL_SIM_DEVICES: "2" })).toEqual(
      await measured({ RIGEL_SIM_PRESET: "h200", RIGEL_SIM_DEVICES: "2" }),
    );
  });

  test("kernels on different multiprocessors do not slow one another, unless both are bound by memory", async () => {
    const { pairs } = await measured({ RIGEL_SIM_PRESET: "h200" });
    const apart = pairs.filter(({ sms }) => sms === "apart").map((pair) => pair.first_slower.toFixed(2));
    expect(apart).toEqual(["1.00", "1.00", "1.60"]);
  });

  test("has no time slices where contexts share it, and says so", async () => {
    const { values } = await measured({ RIGEL_SIM_PRESET: "h200", RIGEL_SIM_MPS: "1" });
    expect([values["slice_ns"], values["switch_ns"], values["idle_ns"]]).toEqual([null, null, null]);
    expect(values["chain_ns"]).toBeGreaterThan(0);
  });
});

const documentSchema = z.object({
  device: z.string(),
  simulated: z.boolean(),
  constants: z.record(z.string(), z.looseObject({ value: z.number().nullable(), unit: z.string(), how: z.string() })),
});

/** The exit status of one round, and what it said. */
async function round(args: string[], env: Record<string, string> = {}): Promise<[number, string]> {
  await using child = start(["calibrate", "--device", "simulated", "--rounds", "1", ...args], { env });
  const [said, status] = await Promise.all([child.stderr.text(), child.exited]);
  return [status, said];
}

describe("the command", () => {
  test("writes a file by the device's name, prints a table or JSON, and says what simulate takes", async () => {
    const env = { XDG_CACHE_HOME: join(scratch.path, "cache") };
    await using child = start(["calibrate", "--device", "simulated", "--rounds", "2", "--json"], { env });
    const [stdout, stderr, status] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
    const document = documentSchema.parse(JSON.parse(stdout));
    const path = devicePath(document.device, join(scratch.path, "cache", "rigel", "devices"));
    expect(path).toEndWith("nvidia-h200-simulated.json");
    expect(documentSchema.parse(await Bun.file(path).json())).toEqual(document);
    expect(stderr).toContain("takes what was measured of real GPUs");
    expect(status).toBe(0);

    const out = join(scratch.path, "own.json");
    const table = await rigel("calibrate", "--device", "simulated", "--rounds", "1", "-o", out);
    expect(table.stdout).toMatch(/^chain_ns +900 +900 +900 +ns +yes$/m);
    expect(existsSync(out)).toBe(true);
    expect(table.stdout).toContain("NVIDIA H200 (simulated), 1 round\n");
    expect((await rigel("calibrate", "--help")).stdout).toContain("rigel calibrate --device 1 --json");
  });

  test("says before it measures that its result has no place", async () => {
    const file = scratch.file("file", "");
    const link = join(scratch.path, "full");
    symlinkSync("/dev/full", link);
    const [dash, dashSaid] = await round(["-o", "-"]);
    expect(dashSaid).toBe("rigel: --output: expected a file, got - (./- is one of that name)\n");
    expect(dash).toBe(2);
    const [cache, folder, full] = await Promise.all([
      round([], { XDG_CACHE_HOME: file }),
      round(["-o", join(file, "own.json")]),
      round(["-o", link]),
    ]);
    expect(cache[1]).toStartWith(`rigel: ${file}/rigel/devices: cannot be made (`);
    expect(cache[1]).toEndWith("); -o names a file elsewhere\n");
    expect(folder[1]).toStartWith(`rigel: ${file}/own.json: cannot be written (`);
    expect(full[1]).toContain(`rigel: ${link}: cannot be written (ENOSPC`);
    expect(lstatSync(link).isSymbolicLink()).toBe(true);
    expect([cache[0], folder[0], full[0]]).toEqual([1, 2, 1]);
  });

  test.each(["SIGINT", "SIGHUP"] as const)("%s ends it and leaves nothing behind", async (signal) => {
    const out = join(scratch.path, "stopped.json");
    await using child = start(["calibrate", "--device", "simulated", "--rounds", "1000", "-o", out]);
    let said = "";
    for await (const chunk of child.stderr) {
      const before = said;
      said += new TextDecoder().decode(chunk);
      if (said.includes("rounds") && !before.includes("rounds")) child.kill(signal);
    }
    expect(await child.exited).toBe(SIGNAL_STATUS[signal]);
    expect(said).toContain("stopped; nothing was written");
    expect(existsSync(out)).toBe(false);
  });
});

test.each(["SIGINT", "SIGTERM", "SIGHUP"] as const)(
  "%s while the simulated GPU is looked for leaves no file of it",
  async (signal) => {
    using own = new Scratch();
    const state = join(own.path, "state");
    const probe = own.file("probe", `#!/bin/sh\necho $$ > "$RIGEL_SIM_STATE"\nexec sleep 600\n`);
    chmodSync(probe, 0o700);
    const script = `
    import { Devices } from ${JSON.stringify(join(root, "src", "device.ts"))};
    const files = { replay: ${JSON.stringify(probe)}, simulator: "/nowhere" };
    await new Devices(files, { state: ${JSON.stringify(state)}, preset: "h200", mps: false }).simulated();
  `;
    await using child = Bun.spawn([process.execPath, "-e", script], { stdout: "inherit", stderr: "inherit" });
    // A file of its own beside the one that programs would have.
    const made = `${state}-0`;
    const pid = await until(() => (existsSync(made) && readFileSync(made, "utf8").trim()) || undefined);
    child.kill(signal);
    expect(await child.exited).toBe(SIGNAL_STATUS[signal]);
    expect(readdirSync(own.path)).toEqual(["probe"]);
    await until(() => (stateOf(Number(pid)).match(/^[ZX]?$/) ? true : undefined));
  },
);

const calibrated = (constants: object, more: object = {}): object => ({
  schema: 1,
  device: "NVIDIA H200",
  simulated: false,
  sms: 132,
  measured: "2026-01-01T00:00:00.000Z",
  rounds: 1,
  constants,
  pairs: [],
  ...more,
});
const number = (value: number | null, unit: string) => ({
  value,
  least: value,
  most: value,
  unit,
  how: "",
  used: true,
});

describe("rigel simulate", () => {
  const devices = join(scratch.path, "mine", "rigel", "devices");
  const jobs = scratch.file("jobs.json", {
    clients: ["a", "b"].map((name) => ({ name, class: "best-effort", replay: { profile: "k.csv" } })),
  });
  scratch.file(
    "k.csv",
    "# rigel-profile 1; device=NVIDIA H200\n" +
      "name,kind,stream,grid_x,grid_y,grid_z,block_x,block_y,block_z,registers,shared_bytes,bytes,duration_ns,gap_ns\n" +
      "k,kernel,0,132,1,1,1024,1,1,64,0,0,1000000,1000\n",
  );
  async function simulated(own: object) {
    mkdirSync(devices, { recursive: true });
    writeFileSync(join(devices, "nvidia-h200.json"), JSON.stringify(own));
    const env = { XDG_CACHE_HOME: join(scratch.path, "mine") };
    await using child = start(["simulate", jobs, "--policy", "time-slicing", "--duration", "5"], { env });
    const [stdout, stderr, status] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
    return { stdout, stderr, status };
  }

  test("takes the user's own numbers of that GPU, and nothing from where there are none", async () => {
    // Slices of 1 ms, of which 50 us are to get state back, and as long to exchange: 0.95 of 3.9 ms are each client's.
    const own = calibrated({ slice_ns: number(1e6, "ns"), switch_ns: number(1e6, "ns"), chain_ns: number(null, "ns") });
    const { stdout, status } = await simulated(own);
    expect(stdout).toContain("with the values of nvidia-h200.json");
    expect(stdout).toMatch(/^time slicing +a .* 0\.24/m);
    expect(status).toBe(0);
  });

  test("leaves alone what was measured of the simulated GPU, and names a file that is broken", async () => {
    const of = calibrated({ slice_ns: number(1, "ns") }, { simulated: true });
    expect((await simulated(of)).stdout).not.toContain("nvidia-h200.json");
    const nothing = await simulated(calibrated({ slice_ns: number(0, "ns") }));
    expect(nothing.stderr).toContain(
      "nvidia-h200.json:1:138: constants.slice_ns.value: expected a number above 0, got 0",
    );
    for (const key of ["chain_ns", "sm_contention"]) {
      const large = await simulated(calibrated({ [key]: number(1e30, "") }));
      expect(large.stderr).toMatch(
        new RegExp(
          `^rigel: .*nvidia-h200\\.json:1:\\d+: constants\\.${key}\\.value: expected a number up to 4294967295, got 1e\\+30\n$`,
        ),
      );
      expect(large.status).toBe(2);
    }
    // Exchanging contexts may cost nothing: then half of the GPU's time is each client's.
    const free = await simulated(calibrated({ slice_ns: number(1e6, "ns"), switch_ns: number(0, "ns") }));
    expect(free.stdout).toMatch(/^time slicing +a .* 0\.50/m);
    const { stderr, status } = await simulated(calibrated({ slice_ns: { value: "long" } }));
    expect(stderr).toMatch(/nvidia-h200\.json:1:\d+: constants\.slice_ns\.value: expected a number/);
    expect(status).toBe(2);
  });
});
