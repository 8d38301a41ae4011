/**
 * mig.test.ts: which GPUs a client is told to see; a part of a GPU (MIG) is found by its own UUID, which reports name.
 *
 * The GPU is the simulated one under a driver that gives it the name of such a part and, to the launcher, does not say that it is
 * simulated, so that it is taken for a real one. What a real driver does with parts of a GPU has not been seen.
 */

import { afterAll, beforeAll, expect, test } from "bun:test";
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { Native } from "../src/native.ts";
import { Scratch, TINY_PROFILE, reportOf, start } from "./rigel.ts";

const NAME = "NVIDIA H200 MIG 1g.18gb";
const { files } = await Native.load();
/** Launches of other tests may run meanwhile, and are shown too. */
const NOBODY_ELSES = "mig-test-endless";
let scratch: Scratch;

beforeAll(() => {
  scratch = new Scratch();
  scratch.file("tiny.csv", TINY_PROFILE);
  for (const folder of ["driver", "client"]) mkdirSync(join(scratch.path, folder));
  const driver = readFileSync(join(files.simulator, "libcuda.so.1"), "latin1");
  expect(driver).toContain("NVIDIA H200 (simulated)");
  // Other texts of the same lengths.
  const renamed = driver.replaceAll("NVIDIA H200 (simulated)", NAME);
  const unmarked = renamed.replaceAll("rigel_sim_marker", "rigel_sim_marked");
  writeFileSync(join(scratch.path, "driver", "libcuda.so.1"), unmarked, "latin1");
  writeFileSync(join(scratch.path, "client", "libcuda.so.1"), renamed, "latin1");
});
afterAll(() => scratch[Symbol.dispose]());

/** `name`: of the high client, and of the file. */
function launch(device: string | number, replay: object, name = "serve") {
  const env = { LD_LIBRARY_PATH: join(scratch.path, "client") };
  const path = scratch.file(`${name}.json`, {
    device,
    sharing: "time-slice",
    clients: [
      { name, class: "high", replay: { profile: "tiny.csv", ...replay }, env },
      { name: "say", class: "best-effort", command: ["sh", "-c", 'echo "sees $CUDA_VISIBLE_DEVICES"'] },
    ],
  });
  return start(["launch", path, "--json"], { env: environment() });
}

function environment(): Record<string, string> {
  return {
    LD_LIBRARY_PATH: join(scratch.path, "driver"),
    RIGEL_SIM_STATE: join(scratch.path, "gpu"),
    CUDA_MPS_PIPE_DIRECTORY: join(scratch.path, "no-daemon"),
    XDG_RUNTIME_DIR: scratch.path,
  };
}

async function launched(device: string | number) {
  await using child = launch(device, { iterations: 20 });
  const [stdout, stderr, status] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
  return { stdout, stderr, status };
}

test("its clients see that part and no other, and the report names it", async () => {
  const first = await launched(0);
  const { device, clients } = reportOf(first);
  expect([device.name, device.simulated]).toEqual([NAME, false]);
  expect(device.uuid).toMatch(/^MIG-[0-9a-f-]{36}$/);
  expect(first.stderr).toContain(`say   | sees ${device.uuid}`);
  expect(clients[0]).toMatchObject({ attached: true, requests: { count: 20 } });
  expect(reportOf(await launched(device.uuid)).device.uuid).toBe(device.uuid);
  const whole = await launched(device.uuid.replace("MIG", "GPU"));
  expect(whole.stderr).toContain(`there is 0 (${NAME}, ${device.uuid})`);
  expect(whole.status).toBe(1);
});

const A = { name: "a", class: "best-effort", command: ["sh", "-c", 'echo "sees $CUDA_VISIBLE_DEVICES"'] };

const visible = (text: string): object => ({ env: { CUDA_VISIBLE_DEVICES: text } });

/** What such a client sees where there are three, and the launch is on the second; by their numbers. */
async function placed(client: object) {
  const path = scratch.file("placed.json", { device: 1, sharing: "time-slice", clients: [{ ...A, ...client }] });
  const env = { ...environment(), RIGEL_SIM_DEVICES: "3", RIGEL_SIM_STATE: join(scratch.path, "gpus") };
  await using child = start(["launch", path, "--json"], { env });
  const [stderr, status] = await Promise.all([child.stderr.text(), child.exited]);
  const uuids = /sees (\S+)/.exec(stderr)?.[1]?.split(",");
  return { uuids, stderr, status };
}

test("a client sees the GPUs that its device, or CUDA_VISIBLE_DEVICES in its env, names, in that order", async () => {
  const all = (await placed({ device: "all" })).uuids ?? [];
  expect(new Set(all).size).toBe(3);
  const [, , last = ""] = all;
  for (const [client, expected] of [
    [{}, [1]],
    [{ device: 2 }, [2]],
    [{ device: [2, 0] }, [2, 0]],
    [visible("0"), [0]],
    [visible("2, 0"), [2, 0]],
    [visible(last), [2]],
  ] as const) {
    const { uuids, stderr, status } = await placed(client);
    expect(
      uuids?.map((uuid) => all.indexOf(uuid)),
      stderr,
    ).toEqual([...expected]);
    expect(status).toBe(0);
  }
  const both = await placed({ device: 2, ...visible("0") });
  expect(both.uuids).toEqual([last]);
  expect(both.stderr).toContain("a: CUDA_VISIBLE_DEVICES in its env has no effect, as its device says what it sees");
  // Programs would see none, silently.
  for (const [client, said] of [
    [{ device: [2, last] }, `clients[0].device: GPU 2 (${last}) is there twice`],
    [visible("0,0"), "clients[0].env.CUDA_VISIBLE_DEVICES: GPU 0"],
    [visible("7"), "clients[0].env.CUDA_VISIBLE_DEVICES: there is no GPU 7 here"],
    [
      visible("-1"),
      'clients[0].env.CUDA_VISIBLE_DEVICES: expected device indices or UUIDs with commas between them, got "-1"',
    ],
  ] as const) {
    const { stderr, status } = await placed(client);
    expect(stderr).toContain(said);
    expect(status).toBe(1);
  }
});

test("a client that runs is shown with it", async () => {
  await using child = launch(0, { rate_per_s: 100 }, NOBODY_ELSES);
  let seen: string[] = [];
  while (seen.length === 0) {
    await using contexts = start(["contexts", NOBODY_ELSES, "--json"], { env: environment() });
    const text = await contexts.stdout.text();
    seen = [...text.matchAll(/"uuid": "([A-Z]+)-/g)].map(([, kind]) => kind ?? "");
    expect(child.exitCode).toBeNull();
  }
  expect(new Set(seen)).toEqual(new Set(["MIG"]));
  child.kill("SIGINT");
  await child.exited;
});
