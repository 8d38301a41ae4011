/**
 * orion.ts: reads a launch configuration of the Orion scheduler as it is and turns it into Rigel's.
 *
 * Orion's clients are replays of kernel files; its convention is that the last client is the high-priority one. What
 * Orion needs and Rigel does not (kernel counts, a second kernel file) is accepted and explained in a note, never waited
 * for: matching by count is what made Orion's clients hang. Unknown fields are accepted: Orion's users add their own.
 */

import { existsSync } from "node:fs";
import { resolve } from "node:path";
import { z } from "zod";
import type { FieldNames } from "./config.ts";
import { MOST_CLIENTS, parse, rate, text } from "./schema.ts";

/** As config.ts has it. */
const LONGEST_NAME = 63;

const RATE = `expected 0 or a number from 0.000001 to ${rate.maxValue}`;

// The limits are those of Rigel's own format: beyond them it would be a field that is not in the file which is named.
const orionClientSchema = z.looseObject({
  arch: z.string().min(1),
  kernel_file: text.min(1),
  num_kernels: z.int().nonnegative().optional(),
  num_iters: z.int().positive().optional(),
  additional_kernel_file: z.string().nullish(),
  additional_num_kernels: z.int().nullish(),
  args: z
    .looseObject({
      model_name: z.string().optional(),
      rps: z.union([z.literal(0), rate], { error: () => RATE }).optional(),
      uniform: z.boolean().optional(),
      input_file: text.optional(),
    })
    .default({}),
});

/** Recognised by `clients[].arch`, which no client of Rigel's has. */
export function isOrion(json: unknown): boolean {
  const list = z.union([z.object({ clients: z.array(z.unknown()) }), z.array(z.unknown())]).safeParse(json);
  if (!list.success) return false;
  const clients = Array.isArray(list.data) ? list.data : list.data.clients;
  return clients.some((client) => z.object({ arch: z.unknown() }).safeParse(client).success);
}

/** The same launch as a configuration of Rigel's, not yet checked by its schema. Without `base` paths stay as they are. */
export function readOrion(
  json: unknown,
  file: string,
  base: string | undefined,
): { config: object; notes: string[]; statedKernels: Map<string, number>; fieldNames: FieldNames[] } {
  // Orion's own files are the bare list; users also wrap it in an object. Checked one by one, so that an error names a
  // field rather than "neither shape fits".
  const list = z.array(orionClientSchema).min(1).max(MOST_CLIENTS);
  const clients = Array.isArray(json)
    ? parse(list, json, file)
    : parse(z.looseObject({ clients: list }), json, file).clients;
  const notes: string[] = [];
  const statedKernels = new Map<string, number>();
  const beside = Array.isArray(json)
    ? []
    : Object.keys(z.looseObject({}).parse(json)).filter((key) => key !== "clients");
  if (beside.length > 0)
    notes.push(
      `${beside.join(", ")}: not used, as a configuration of Orion's has clients alone; use the options of the command ` +
        "line, or a configuration of Rigel's",
    );
  const names = new Set<string>();
  const fieldNames: FieldNames[] = [];
  const converted = [];
  for (const [index, client] of clients.entries()) {
    const name = nameOf(client.arch, names);
    if (name !== client.arch && !name.startsWith(`${client.arch}-`))
      notes.push(`${name}: stands for arch ${JSON.stringify(client.arch)}, which cannot be a client's name`);
    const field = `${Array.isArray(json) ? "" : "clients"}[${index}]`;
    fieldNames.push({
      client: field,
      profile: `${field}.kernel_file`,
      arrivals: `${field}.args.input_file`,
      iterations: `${field}.num_iters`,
    });
    const { rps, uniform, input_file: inputFile } = client.args;
    if (client.num_kernels !== undefined) statedKernels.set(name, client.num_kernels);
    if (client.additional_kernel_file)
      notes.push(
        `${name}: additional_kernel_file is not used: Orion needs it to follow a program kernel by kernel, ` +
          "Rigel replays kernel_file alone",
      );
    const arrivals = inputFile ? locate(inputFile, base) : undefined;
    if (arrivals !== undefined && rps) notes.push(`${name}: args.rps is not used, as input_file gives the arrivals`);
    converted.push({
      name,
      class: index === clients.length - 1 ? "high" : "best-effort",
      replay: {
        profile: locate(client.kernel_file, base),
        ...(client.num_iters !== undefined && { iterations: client.num_iters }),
        ...(arrivals !== undefined
          ? { arrivals }
          : rps && { rate_per_s: rps, arrivals: uniform ? "uniform" : "poisson" }),
      },
    });
  }
  return { config: { clients: converted }, notes, statedKernels, fieldNames };
}

/** A name that a client may have and none in `taken` has; enters it there. */
function nameOf(arch: string, taken: Set<string>): string {
  const valid = arch
    .replaceAll(/[^\w.:@+ -]/g, "-")
    .replace(/^ /, "-")
    .slice(0, LONGEST_NAME);
  let name = valid;
  for (let count = 2; taken.has(name); count++) name = `${valid.slice(0, LONGEST_NAME - `-${count}`.length)}-${count}`;
  taken.add(name);
  return name;
}

/** Orion's paths are relative to where it is started, which may or may not be the folder of the configuration. */
function locate(path: string, base: string | undefined): string {
  if (base === undefined) return path;
  const beside = resolve(base, path);
  return !existsSync(beside) && existsSync(path) ? resolve(path) : beside;
}
