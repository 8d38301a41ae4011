/**
 * memory.ts: limits of device memory: as a configuration writes them, in bytes, in words, and what several mean together.
 *
 * The limit itself is kept by the library in each client (native/memory.c). Looks at no machine.
 */

import { z } from "zod";

const MEMORY = 'expected a size such as "40GiB" or "512MiB", a share of the device such as "30%", or a number of bytes';

const SIZE = /^(?!0+(\.0+)?[^\d.])(\d+(\.\d{1,6})? ?(KiB|MiB|GiB|TiB)|(100|\d{1,2}(\.\d{1,6})?) ?%)$/;
const UNITS = { KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40 } as const;

/** What is wrong with a size or a share; undefined: nothing. `form`: what is said where it is neither. */
export function memoryProblem(memory: string, form = MEMORY): string | undefined {
  if (!SIZE.test(memory)) return form;
  return limit_bytes(memory, 0) > Number.MAX_SAFE_INTEGER ? "expected less than 8192TiB" : undefined;
}

/** Text in which a function finds no problem. */
export function memoryText(problemOf: (text: string) => string | undefined) {
  return z.string().check(({ value, issues }) => {
    const message = problemOf(value);
    // Without `continue` a union would say no more than that it is none of these.
    if (message !== undefined)
      issues.push({ code: "invalid_format", format: "memory", input: value, message, continue: true });
  });
}

/** Above zero: a client without any memory cannot be meant. Whole bytes that a number can hold exactly. */
export const memorySchema = z.union([z.int().positive(), memoryText(memoryProblem)], { error: () => MEMORY });

/** A limit in bytes, on a device with `total_bytes`. */
export function limit_bytes(memory: z.infer<typeof memorySchema>, total_bytes: number): number {
  if (typeof memory === "number") return memory;
  const value = Number.parseFloat(memory);
  const unit = (["KiB", "MiB", "GiB", "TiB"] as const).find((name) => memory.endsWith(name));
  return Math.max(1, Math.floor(unit ? value * UNITS[unit] : (value / 100) * total_bytes));
}

/** Three digits or more, with the largest unit that leaves something in front of the point: 1.00 MiB, not 1024 KiB, also where that is rounded. */
export function sizeText(bytes: number): string {
  for (const name of ["TiB", "GiB", "MiB", "KiB"] as const) {
    const value = bytes / UNITS[name];
    if (value >= 1 - 0.5 / 1024) return `${value.toFixed(value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2)} ${name}`;
  }
  return `${bytes} B`;
}

/**
 * Below this a limit is told about. cuBLAS alone takes up to 32 MiB for its workspace on recent GPUs (CUBLAS_WORKSPACE_CONFIG
 * in its documentation), PyTorch asks for blocks of 2 and 20 MiB.
 */
const SMALL_bytes = 64 * 2 ** 20;

/** That a limit is less than programs can work with; empty where it is not. */
export function noRoom(name: string, memory_bytes: number): string[] {
  if (memory_bytes >= SMALL_bytes) return [];
  return [
    `${name}: a memory limit of ${sizeText(memory_bytes)} leaves CUDA libraries no room to work; most programs need ` +
      `${sizeText(SMALL_bytes)} or more (what a context takes for itself does not count)`,
  ];
}

interface Limited {
  name: string;
  devices: readonly { name: string; uuid: string; memory_bytes: number }[];
  memory_bytes?: number | undefined;
}

/** What a user should know of the limits before anything starts. A limit is one of all that its client has, on whichever of its devices. */
export function notesOnLimits(clients: readonly Limited[]): string[] {
  const notes: string[] = [];
  const byDevice = new Map<string, { total_bytes: number; names: string[]; sum_bytes: number; device: string }>();
  for (const { name, devices, memory_bytes } of clients) {
    if (memory_bytes === undefined) continue;
    const all_bytes = devices.reduce((sum_bytes, device) => sum_bytes + device.memory_bytes, 0);
    notes.push(...noRoom(name, memory_bytes));
    if (memory_bytes > all_bytes)
      notes.push(
        `${name}: its memory limit of ${sizeText(memory_bytes)} has no effect: ` +
          `${devices.length === 1 ? `${devices[0]?.name} has` : "its GPUs have"} ${sizeText(all_bytes)} in all`,
      );
    for (const device of devices) {
      const known = byDevice.get(device.uuid);
      byDevice.set(device.uuid, {
        total_bytes: device.memory_bytes,
        device: device.name,
        names: [...(known?.names ?? []), name],
        sum_bytes: (known?.sum_bytes ?? 0) + Math.min(memory_bytes, device.memory_bytes),
      });
    }
  }
  for (const { total_bytes, names, sum_bytes, device } of byDevice.values())
    if (names.length > 1 && sum_bytes > total_bytes)
      notes.push(
        `the memory limits of ${names.slice(0, -1).join(", ")} and ${names.at(-1)} add up to ${sizeText(sum_bytes)}, ` +
          `${device} has ${sizeText(total_bytes)}: one can still leave another without memory`,
      );
  return notes;
}
