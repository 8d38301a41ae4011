/**
 * gpus.ts: the real GPUs of this machine, and whether what needs them can be tested here; if not, why it is skipped.
 */

import { closeSync, openSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { Devices } from "../src/device.ts";
import { Native } from "../src/native.ts";

export const native = await Native.load();

/** None on a machine with the simulated GPU alone. */
export const gpus = await new Devices(native.files, {
  state: "/dev/shm/rigel-unused",
  preset: "h200",
  mps: false,
}).real();

/** To import torch takes seconds. */
const FIND = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)";

/** Whether so many GPUs, or one of these Python packages, are not to be had; what is skipped for that is then named. */
export function lacks(what: string, count: number, ...packages: string[]): boolean {
  const reason = reasonOf(count, packages);
  if (reason !== undefined) console.warn(`${what} is skipped: ${reason}`);
  return reason !== undefined;
}

/**
 * Until the end of this scope nobody fills a GPU's memory, or, `filling` it, nobody needs every GPU: test files run beside one another. Waits for those
 * that are at it.
 */
export async function memoryOfAll({ filling = false } = {}): Promise<Disposable> {
  const path = join(tmpdir(), `rigel-test-gpus-${process.getuid?.() ?? 0}`);
  closeSync(openSync(path, "a", 0o600));
  for (;;) {
    const release = native.lock(path, 0, !filling);
    if (release) return { [Symbol.dispose]: release };
    await Bun.sleep(100);
  }
}

function reasonOf(count: number, packages: readonly string[]): string | undefined {
  if (gpus.length === 0) return "rigel-replay --probe finds no GPU (no libcuda.so.1, or no device)";
  if (gpus.length < count) return `it needs ${count} GPUs, there ${gpus.length === 1 ? "is" : "are"} ${gpus.length}`;
  const absent = packages.filter((name) => Bun.spawnSync(["python3", "-c", FIND, name]).exitCode !== 0);
  return absent.length > 0 ? `there is no Python package ${absent.join(", ")}` : undefined;
}
