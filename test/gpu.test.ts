/**
 * gpu.test.ts: what only a real GPU can show. Skipped, with the reason, where there is none.
 */

import { describe, expect, test } from "bun:test";
import { Devices } from "../src/device.ts";
import { Native } from "../src/native.ts";
import { Scratch, TINY_PROFILE, reportOf, rigel } from "./rigel.ts";

const { files } = await Native.load();
const [gpu] = await new Devices(files, { state: "/dev/shm/rigel-unused", preset: "h200", mps: false }).real();
if (!gpu) console.warn("gpu.test.ts is skipped: rigel-replay --probe finds no GPU (no libcuda.so.1, or no device)");

describe.skipIf(!gpu)("on a real GPU", () => {
  test('"auto" takes it, and a replay attaches and reports', async () => {
    using scratch = new Scratch();
    scratch.file("tiny.csv", TINY_PROFILE);
    const path = scratch.file("config.json", {
      clients: [{ name: "serve", class: "high", replay: { profile: "tiny.csv", iterations: 200 } }],
    });
    const result = await rigel("launch", path, "--json");
    const report = reportOf(result);
    expect(report.device).toMatchObject({ name: gpu?.name, uuid: gpu?.uuid, simulated: false });
    expect(report.clients).toMatchObject([{ attached: true, exit_code: 0, requests: { count: 200 } }]);
    expect(report.clients[0]?.requests.p50_ms).toBeGreaterThan(0.1);
    expect(result.status).toBe(0);
  });
});
