/**
 * nvml.ts: NVIDIA's management library, for one question: which processes have used a GPU lately, and for how much of the time.
 *
 * nvmlDeviceGetProcessUtilization (NVML API Reference Guide). The library comes with the driver and is loaded when it is first needed;
 * where it is absent, or the GPU does not answer (MIG, some virtual GPUs), that is not known, and no error. What it asks of the
 * driver takes a moment, so this is for processes that look on, about once a second, never for clients.
 */

import { existsSync } from "node:fs";
import { resolve } from "node:path";
import { dlopen } from "bun:ffi";
import { reason } from "./errors.ts";

const LIBRARY = "libnvidia-ml.so.1";
/** nvmlReturn_t, as far as it is told apart. */
const SUCCESS = 0;
const NOT_FOUND = 6;
const INSUFFICIENT_SIZE = 7;

/** nvmlProcessUtilizationSample_t: pid, padding, timeStamp (64 bits), smUtil, memUtil, encUtil, decUtil. */
const SAMPLE_BYTES = 32;
/** Processes come and go between the question how many there are and the next. */
const TRIES = 3;

const SYMBOLS = {
  nvmlInit_v2: { args: [], returns: "i32" },
  nvmlDeviceGetHandleByUUID: { args: ["cstring", "buffer"], returns: "i32" },
  nvmlDeviceGetProcessUtilization: { args: ["u64", "ptr", "buffer", "u64"], returns: "i32" },
} as const;

type Symbols = ReturnType<typeof dlopen<typeof SYMBOLS>>["symbols"];

/** What a process has used of a GPU. */
export interface UtilizationSample {
  pid: number;
  /** On the driver's clock, in microseconds. */
  at_us: bigint;
  /** Part of the driver's last sampling period, a sixth of a second to a second, in which a kernel of it ran: 0 to 1. */
  busy: number;
}

/** NVML, loaded. It is never closed: a call after close() is a crash. */
export class Nvml {
  readonly #symbols: Symbols;
  /** By UUID; undefined: there is no such GPU. */
  readonly #devices = new Map<string, bigint | undefined>();

  private constructor(symbols: Symbols) {
    this.#symbols = symbols;
  }

  /** Loads and initialises the library: RIGEL_NVML names another file than the driver's. Why not, in words, if that cannot be. */
  static load(): Nvml | string {
    const given = process.env["RIGEL_NVML"];
    const path = given ? resolve(given) : LIBRARY;
    // Where the loader finds none, Bun takes one of the working directory, which may be anybody's.
    if (!given && existsSync(LIBRARY)) return `${LIBRARY} is not loaded from the working directory`;
    try {
      const { symbols } = dlopen(path, SYMBOLS);
      const code = symbols.nvmlInit_v2();
      return code === SUCCESS ? new Nvml(symbols) : `${path}: nvmlInit_v2 returned ${code}`;
    } catch (thrown) {
      return `${path} cannot be loaded: ${reason(thrown)}`;
    }
  }

  /**
   * Processes that have used the GPU (`uuid` as nvidia-smi writes it) since a moment on the driver's clock (0: as long as it
   * remembers), with their latest sample. A process without a sample since then is left out. Undefined if it cannot be told.
   */
  samples(uuid: string, since_us: bigint): UtilizationSample[] | undefined {
    const device = this.#device(uuid);
    if (device === undefined) return undefined;
    const count = new Uint32Array(1);
    for (let tries = 0, buffer: Uint8Array | null = null; tries < TRIES; tries++) {
      const code = this.#symbols.nvmlDeviceGetProcessUtilization(device, buffer, count, since_us);
      if (code === NOT_FOUND || (code === SUCCESS && buffer === null)) return [];
      if (code === SUCCESS && buffer !== null) return samplesIn(buffer, count[0] ?? 0, since_us);
      if (code !== INSUFFICIENT_SIZE) return undefined;
      buffer = new Uint8Array(SAMPLE_BYTES * Math.max(1, count[0] ?? 0));
    }
    return undefined;
  }

  #device(uuid: string): bigint | undefined {
    if (!this.#devices.has(uuid)) {
      const handle = new BigUint64Array(1);
      const code = this.#symbols.nvmlDeviceGetHandleByUUID(uuid, handle);
      this.#devices.set(uuid, code === SUCCESS ? handle[0] : undefined);
    }
    return this.#devices.get(uuid);
  }
}

/** The latest of each process. Drivers have been seen to fill entries with nonsense (github.com/Syllo/nvtop/issues/110). */
function samplesIn(buffer: Uint8Array, count: number, since_us: bigint): UtilizationSample[] {
  const view = new DataView(buffer.buffer);
  const latest = new Map<number, UtilizationSample>();
  for (let at = 0; at + SAMPLE_BYTES <= Math.min(buffer.length, count * SAMPLE_BYTES); at += SAMPLE_BYTES) {
    const pid = view.getUint32(at, true);
    const at_us = view.getBigUint64(at + 8, true);
    const percent = view.getUint32(at + 16, true);
    if (pid === 0 || percent > 100 || at_us <= since_us) continue;
    if (at_us > (latest.get(pid)?.at_us ?? 0n)) latest.set(pid, { pid, at_us, busy: percent / 100 });
  }
  return [...latest.values()];
}
