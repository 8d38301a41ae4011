/**
 * config.ts: what a launch is: the schema of Rigel's configuration, and reading it from a file.
 *
 * Types come from the schema. Every error names the file, the path of the field and what was expected. Orion's format is
 * turned into Rigel's by orion.ts. Nothing here looks at the machine: profiles, commands and devices are checked by who
 * uses them.
 */

import { dirname, isAbsolute, resolve } from "node:path";
import { z } from "zod";
import { RigelError } from "./errors.ts";
import { inputName, readJson } from "./json.ts";
import { memorySchema } from "./memory.ts";
import { isOrion, readOrion } from "./orion.ts";
import { MOST_CLIENTS, fields, parse, rate, text } from "./schema.ts";

/** A month. */
export const LONGEST_DURATION_s = 30 * 86_400;

const positive = z.number().positive();

const DEVICE = 'expected "auto", "simulated", a device index, or a UUID such as "GPU-…"';
const deviceSchema = z.union(
  [z.int().nonnegative(), z.string().regex(/^(auto|simulated|(GPU|MIG)-[\w/-]+)$/, DEVICE)],
  {
    error: () => DEVICE,
  },
);

const gpuSchema = z.union([z.int().nonnegative(), z.string().regex(/^(GPU|MIG)-[\w/-]+$/)], {
  error: () => 'expected a device index or a UUID such as "GPU-…"',
});
const clientDeviceSchema = z.union([deviceSchema, z.literal("all"), z.array(gpuSchema).min(1).max(16)], {
  error: (issue) =>
    Array.isArray(issue.input)
      ? "expected a list of device indices or UUIDs, 1 to 16 of them"
      : `${DEVICE}, "all", or a list of them`,
});

/** The policies of native/policy.h. */
export const POLICIES = ["none", "priority", "slo", "fair", "orion"] as const;

const targetSchema = fields({
  p99_over_alone: z.number().min(1).max(100).optional(),
  p99_ms: z.number().positive().max(3_600_000).optional(),
}).check((context) => {
  const { p99_over_alone, p99_ms } = context.value;
  if ((p99_over_alone === undefined) === (p99_ms === undefined))
    context.issues.push({
      code: "custom",
      input: context.value,
      message: `expected either "p99_over_alone" or "p99_ms", got ${p99_ms === undefined ? "neither" : "both"}`,
    });
});

export const policySchema = fields({
  /**
   * `none` only measures; `priority` holds best-effort launches while a high client has work; `slo` does, too, with its
   * settings moved by a control loop; `fair` shares GPU time by weights, whatever the classes; `orion` follows Orion's rules.
   */
  name: z.enum(POLICIES).default("slo"),
  /** Launches that a best-effort client may have unfinished at once; 0 is no limit. */
  inflight: z.int().min(0).max(4096).optional(),
  /** The same while a high client is busy, where they are held at the gate; 0, unless set: none may begin then. */
  corun: z.int().min(0).max(4096).optional(),
  /** A launch whose duration has been learned counts for that over this many microseconds; 0: each counts for one. */
  unit_us: z.int().min(0).max(1_000_000).optional(),
  /** Longest wait of a best-effort launch while high-priority work goes on. */
  starvation_us: z.int().min(1).max(600_000_000).optional(),
  /** A client whose heartbeat is older than this no longer holds others back. */
  stale_ms: z.int().min(500).max(600_000).optional(),
  /** Take best-effort clients off the GPU by their channels where the driver allows it; false: hold their launches only. */
  preempt: z.boolean().default(true),
  /** Keep them off it for as long as a high client is busy; false: short time slices only. */
  suspend: z.boolean().optional(),
  /** ... but only once it has been launching for so long: its work may queue up on the GPU meanwhile. */
  defer_us: z.int().min(0).max(100_000).optional(),
  /** ... in place of that, where the high client's requests are alike: once a request has made this part of its launches. */
  defer_part: z.number().min(0).max(1).optional(),
  /** ... or, at the pace at which it launches, the rest of them takes no longer than this: what the GPU needs for the request. */
  need_us: z.int().min(0).max(1_000_000).optional(),
  /** Time slice of a best-effort client's channels, and of a high client's. */
  slice_us: z.int().min(1).max(1_000_000).optional(),
  high_slice_us: z.int().min(1).max(1_000_000).optional(),
  /** After so much work a best-effort client's stream stops while high ones have some; 0: there are no stops. */
  stop_us: z.int().min(0).max(1_000_000).optional(),
  /** For so long the GPU stays with a high client's process after a request, where others often follow at once; 0: not. */
  stay_us: z.int().min(0).max(10_000).optional(),
  /** ... and comes over for requests that it sees coming, by what arrives at their program's sockets and pipes; false: not. */
  arrivals: z.boolean().optional(),
  /** `slo`: what the high clients' p99 may be, over what it is alone, or in milliseconds. */
  target: targetSchema.optional(),
  /** `priority`, `slo`: the part of the GPU's time that best-effort work gets though high clients never rest. */
  min_share: z.number().min(0).max(0.5).optional(),
  /** ... in one piece each time so much has passed, where they are taken off it, if that is longer than `starvation_us`. */
  share_period_us: z.int().min(0).max(10_000_000).optional(),
  /** `fair`: the most GPU time by which a client of weight 1 may be ahead of the others. */
  quantum_us: z.int().min(100).max(10_000_000).optional(),
  /** `orion`: best-effort kernels that need as many SMs, or more, wait; without it, all that the device has. */
  sm_threshold: z.int().positive().max(100_000).optional(),
  /** `orion`: unfinished best-effort work, as a part of a high request's latency alone. */
  dur_threshold: z.number().positive().max(1000).optional(),
});

/** RG_PROFILES_MOST of native/replay/profiles.h. */
const MOST_PROFILES = 16;

/** One or several; read as a list in any case. */
const profilesSchema = z
  .union([text.min(1), z.array(text.min(1)).min(1).max(MOST_PROFILES)], {
    error: () => `expected a path, or a list of 1 to ${MOST_PROFILES} paths`,
  })
  .transform((one): readonly string[] => (typeof one === "string" ? [one] : one));

const replaySchema = fields({
  /** Kernel profile, Orion's or Rigel's own; relative to the configuration file. Of several each request is of one, by chance. */
  profile: profilesSchema,
  /** Requests per second in an open loop; without it, one iteration follows the other. */
  rate_per_s: rate.optional(),
  /** How requests arrive: by the rate, or a JSON file with a list of gaps in seconds. */
  arrivals: text.min(1).optional(),
  /** Stop after so many; without it the client runs until the launch ends. */
  iterations: z.int().positive().optional(),
  /** Seed of Poisson arrivals, and of which profile a request is; without it, defaultSeed. */
  seed: z.int().nonnegative().optional(),
  /** End it, as failed, once one launch or wait of it has not returned for so long, a pause included; without it nothing does. */
  idle_timeout_s: positive.min(0.001).max(86_400).optional(),
});

/** Names are kept in 64 bytes of the segment, with their terminating zero. */
const nameSchema = z
  .string()
  .regex(/^[\w.:@+-][\w.:@+ -]*$/, "expected letters, digits, spaces and . _ : @ + - only")
  .max(63);

const clientSchema = fields({
  name: nameSchema,
  class: z.enum(["high", "best-effort"]),
  command: z.array(text).min(1).optional(),
  replay: replaySchema.optional(),
  /** `fair`: this client's part of GPU time against the others'. */
  weight: z.number().min(0.01).max(100).optional(),
  /** Only threads that have entered a client of their own (rigel_client_enter) are one: all else passes through untouched. */
  threads: z.boolean().optional(),
  env: z.record(z.string().regex(/^[^=\0]+$/, 'expected a name without "=" and NUL characters'), text).optional(),
  cwd: text.min(1).optional(),
  /** One, or those of a program that uses several: torchrun's ranks number them in this order. */
  device: clientDeviceSchema.optional(),
  /**
   * Kernel profile of this program, Orion's or Rigel's own, relative to the configuration file: how long its kernels take before
   * any was timed, and, of a command under `orion`, what they need. Several: of its kinds of requests.
   */
  profile: profilesSchema.optional(),
  /** Of a command with a profile: requests per second, in an open loop, that `rigel simulate` takes it to get. */
  rate_per_s: rate.optional(),
  /** The most device memory that all processes of the client may have allocated at once, whatever the policy. */
  memory: memorySchema.optional(),
  /** `process`: never under MPS, so that its faults, and those of others, stay where they are. */
  isolation: z.enum(["shared", "process"]).default("shared"),
  /** Share of the multiprocessors that it may use under MPS: CUDA_MPS_ACTIVE_THREAD_PERCENTAGE. */
  sm_percent: z.int().min(1).max(100).optional(),
}).check((context) => {
  const { command, replay, isolation, sm_percent, rate_per_s } = context.value;
  if (rate_per_s !== undefined && replay !== undefined)
    context.issues.push({
      code: "custom",
      input: rate_per_s,
      path: ["rate_per_s"],
      message: "expected no rate here: a replay has its own, replay.rate_per_s",
    });
  if (sm_percent !== undefined && isolation === "process")
    context.issues.push({
      code: "custom",
      input: sm_percent,
      path: ["sm_percent"],
      message: 'expected no share, as isolation is "process": only MPS can limit one',
    });
  if ((command === undefined) === (replay === undefined))
    context.issues.push({
      code: "custom",
      input: context.value,
      message: `expected either "command" or "replay", got ${command === undefined ? "neither" : "both"}`,
    });
  if (replay?.arrivals !== undefined) {
    const byRate = replay.arrivals === "uniform" || replay.arrivals === "poisson";
    if (byRate !== (replay.rate_per_s !== undefined))
      context.issues.push({
        code: "custom",
        input: replay.arrivals,
        path: ["replay", "rate_per_s"],
        message: byRate
          ? `expected a rate, as arrivals is "${replay.arrivals}"`
          : "expected no rate, as arrivals is a file with the gaps themselves",
      });
  }
});

export const configSchema = fields({
  policy: policySchema.default({ name: "slo", preempt: true }),
  duration_s: positive.max(LONGEST_DURATION_s).optional(),
  /** Seconds after every client has begun that are not counted. */
  warmup_s: z.number().nonnegative().max(86_400).default(0),
  /**
   * A client that waits for so long for work that does not finish, or for another rank, hangs: that is told, and what shows it
   * kept. 0: nobody looks. A minute is longer than what programs wait for in good health, and looking costs clients nothing.
   */
  hang_s: z.number().nonnegative().max(86_400).default(60),
  /** Whether clients keep their last operations, for traces, and for what a hang is behind. */
  recorder: z.boolean().default(true),
  /** Run each client alone, then together ungoverned, then governed. */
  compare: z.boolean().default(false),
  device: deviceSchema.default("auto"),
  /** How the clients are on a GPU together: mps.ts says what each of these means. */
  sharing: z.enum(["auto", "time-slice", "mps"]).default("auto"),
  simulated: fields({
    preset: z.enum(["h200", "a100", "l4"]).default("h200"),
    /** How many GPUs there are; a client sees all of them, as ranks that torchrun starts expect. */
    devices: z.int().min(1).max(16).optional(),
    /** Kernels of several processes run side by side, as under MPS, rather than in time slices; for sharing "auto". */
    mps: z.boolean().default(false),
  }).default({ preset: "h200", mps: false }),
  /** What the cuBLAS guard does: nothing, count and say so, or also repair; without it `repair`, or what RIGEL_GUARD says. */
  guard: z.enum(["off", "warn", "repair"]).optional(),
  /** Put NVTX ranges round what clients call, for a tool that listens; without it what RIGEL_NVTX says. */
  nvtx: z.boolean().optional(),
  clients: z.array(clientSchema).min(1).max(MOST_CLIENTS),
}).check((context) => {
  const seen = new Set<string>();
  for (const [index, client] of context.value.clients.entries()) {
    if (seen.has(client.name))
      context.issues.push({
        code: "custom",
        input: client.name,
        path: ["clients", index, "name"],
        message: "expected a name that no other client has",
      });
    seen.add(client.name);
  }
});

type RawConfig = z.infer<typeof configSchema>;
export type ClientConfig = RawConfig["clients"][number];
export type ReplayConfig = z.infer<typeof replaySchema>;
export type DeviceSelector = z.infer<typeof deviceSchema>;
export type ClientDevice = z.infer<typeof clientDeviceSchema>;
export type Policy = z.infer<typeof policySchema>;

/** What the fields of one client are called in the file that it came from. */
export interface FieldNames {
  client: string;
  profile: string;
  arrivals: string;
  iterations: string;
}

/** The seed of a replay that is given none: its own, as two with the same one would have all requests at the same time. */
export function defaultSeed(index: number): number {
  return 1 + index;
}

/** What errors call each of a client's profiles: the field itself where there is one, else its place in the list; and its path. */
export function profileFields(field: string, profiles: readonly string[]): [string, string][] {
  return profiles.map((path, index) => [profiles.length > 1 ? `${field}[${index}]` : field, path]);
}

/** The files that its clients are read from: none of them is to be written. */
export function filesRead({ clients }: Pick<RawConfig, "clients">): string[] {
  return clients.flatMap(({ profile, replay }) => [...(profile ?? []), ...(replay?.profile ?? []), ...gapsOf(replay)]);
}

/** The file with the gaps between a replay's requests, if it has one. */
function gapsOf(replay: RawConfig["clients"][number]["replay"]): string[] {
  const arrivals = replay?.arrivals;
  return arrivals === undefined || arrivals === "uniform" || arrivals === "poisson" ? [] : [arrivals];
}

/** A configuration as read: file names in it are absolute. */
export interface Config extends RawConfig {
  /** The file it came from, as the user named it; errors start with it. */
  file: string;
  /** Things a user should know that are no errors, such as fields of Orion's that have no effect. */
  notes: string[];
  /** Kernel counts that Orion's configuration states, by client name: compared with the profile, never waited for. */
  statedKernels: ReadonlyMap<string, number>;
  /** For each client. */
  fieldNames: FieldNames[];
}

/** Reads and checks a configuration file, Rigel's own or Orion's. Paths in it are relative to `base`, else to its folder. */
export async function readConfig(file: string, base = dirname(resolve(file))): Promise<Config> {
  return configOf(await readJson(file, { once: true }), inputName(file), base);
}

/** Checks a configuration. `file` is what errors call it; paths in it are relative to `base`, and errors without one. */
export function configOf(json: unknown, file: string, base: string | undefined): Config {
  const orion = isOrion(json) ? readOrion(json, file, base) : undefined;
  const raw = parse(configSchema, orion ? orion.config : json, file);
  const names = raw.clients.map((_, index) => orion?.fieldNames[index] ?? fieldNames(index));
  if (base === undefined) refuseRelative(raw, names, file);
  return {
    ...raw,
    file,
    notes: orion?.notes ?? [],
    statedKernels: orion?.statedKernels ?? new Map(),
    fieldNames: names,
    clients: raw.clients.map((client) => ({
      ...client,
      ...(client.cwd !== undefined && { cwd: resolve(base ?? "/", client.cwd) }),
      ...(client.profile !== undefined && { profile: client.profile.map((path) => resolve(base ?? "/", path)) }),
      ...(client.replay && { replay: absolutePaths(client.replay, base ?? "/") }),
    })),
  };
}

/** Throws where a path of a file or folder would be relative to nothing. */
function refuseRelative({ clients }: RawConfig, names: readonly FieldNames[], file: string): void {
  const lines = clients.flatMap(({ cwd, profile, command, replay }, index) => {
    const { client, profile: replayed, arrivals } = names[index] ?? fieldNames(index);
    const program = command?.[0]?.includes("/") && cwd === undefined ? command[0] : undefined;
    const paths: [string, string | undefined][] = [
      [`${client}.cwd`, cwd],
      ...profileFields(`${client}.profile`, profile ?? []),
      [`${client}.command[0]`, program],
      ...profileFields(replayed, replay?.profile ?? []),
      [arrivals, gapsOf(replay)[0]],
    ];
    return paths
      .filter(([, path]) => path !== undefined && !isAbsolute(path))
      .map(([field, path]) => `${file}: ${field}: expected an absolute path, as no "cwd" is given, got ${path}`);
  });
  if (lines.length > 0) throw new RigelError("config", lines.join("\n"));
}

function fieldNames(index: number): FieldNames {
  const client = `clients[${index}]`;
  const replay = `${client}.replay`;
  return {
    client,
    profile: `${replay}.profile`,
    arrivals: `${replay}.arrivals`,
    iterations: `${replay}.iterations`,
  };
}

function absolutePaths(replay: ReplayConfig, base: string): ReplayConfig {
  const arrivals = replay.arrivals;
  return {
    ...replay,
    profile: replay.profile.map((path) => resolve(base, path)),
    ...(arrivals !== undefined && {
      arrivals: arrivals === "uniform" || arrivals === "poisson" ? arrivals : resolve(base, arrivals),
    }),
  };
}
