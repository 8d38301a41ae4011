/**
 * simulate.ts: what would happen if the clients of a configuration ran together, in every way of sharing a GPU, in virtual time.
 *
 * Nothing is run but rigel-simulate: no GPU is looked for and no client started. The document that --json prints is public: fields may be
 * added, never renamed.
 */

import { type ScenarioGpu, gpuOf } from "./calibrate.ts";
import { median } from "./bench-stats.ts";
import { type Config, defaultSeed, profileFields } from "./config.ts";
import { RigelError } from "./errors.ts";
import type { Native } from "./native.ts";
import { inField } from "./plan.ts";
import { checkArrivals, readProfile } from "./profile.ts";
import { type ClientNumbers, type Outcome, type Scenario, type ScenarioClient, Simulator } from "./simulate-run.ts";
import { readHost } from "./simulate-host.ts";
import { type Sweep, sweptTo } from "./simulate-sweep.ts";
import { type Way, aloneOf, scenarioOf, waysOf } from "./simulate-ways.ts";

export interface SimulateOptions {
  /** Names of ways; undefined: all. */
  ways: readonly string[] | undefined;
  sweep: Sweep | undefined;
  seed: number | undefined;
  duration_s: number | undefined;
  /** Of half the time: by what programs take longer between launches. */
  slow?: number | undefined;
  /** A file of measurements that tells how fast the high clients' host is instead. */
  host?: string | undefined;
}

/** What one client is predicted to have. */
export interface PredictedClient {
  name: string;
  class: "high" | "best-effort";
  /** Of requests, from when they fall due; null where it has none. */
  requests: number;
  p50_ms: number | null;
  p95_ms: number | null;
  p99_ms: number | null;
  /** Requests or iterations. */
  per_s: number;
  p50_over_alone: number | null;
  p95_over_alone: number | null;
  p99_over_alone: number | null;
  /** Throughput over throughput alone; null in an open loop. */
  share: number | null;
  gate_wait_ms: number;
  suspensions: number;
}

export interface PredictedWay {
  way: string;
  /** On the command line. */
  policy: string;
  mps: boolean;
  preemption: boolean;
  clients: PredictedClient[];
  /** Shares of the best-effort clients, added up; of them, over the ceiling. */
  share: number | null;
  harvest: number | null;
  slo?: NonNullable<Outcome["slo"]>;
}

/** One value of the sweep, or the only one. */
export interface Point {
  value: number | null;
  duration_s: number;
  /** 1 minus the part of the time for which the high clients alone keep the GPU busy. */
  ceiling: number;
  alone: PredictedClient[];
  ways: PredictedWay[];
}

export interface Prediction {
  schema: 1;
  simulated: true;
  preset: string;
  /** The file of what was measured of such a GPU; null: the values of the preset. */
  calibration: string | null;
  sweep: string | null;
  /** By what programs take longer between launches, every other spell; 1: never. */
  slow: number;
  /** The file that tells how fast the high clients' host is, and what a request takes the program there (p50); null: it is their profiles'. */
  host: { file: string; requests: number; work_p50_ms: number } | null;
  points: Point[];
  notes: string[];
}

const DURATION_s = 60;
/** RG_SCENARIO_MAX_CLIENTS of native/sim/scenario.h. */
const MOST_CLIENTS = 32;

/** Runs everything; `watch` is told of the simulator before that. */
export async function predict(
  config: Config,
  options: SimulateOptions,
  native: Native,
  watch: (simulator: Simulator) => void,
): Promise<Prediction> {
  if (config.clients.length > MOST_CLIENTS)
    throw new RigelError(
      "config",
      `${config.file}: clients: expected at most ${MOST_CLIENTS} to simulate, got ${config.clients.length}`,
    );
  const notes = [...config.notes];
  await checkProfiles(config, notes);
  const values = options.sweep?.values ?? [null];
  const { preset } = config.simulated;
  const gpu = await gpuOf(preset, native.files.profiles);
  const moments = options.host === undefined ? undefined : await readHost(options.host);
  using simulator = new Simulator(native.files.simulate);
  const points = values.map((value) => {
    const own = options.sweep && value !== null ? sweptTo(config, options.sweep, value) : config;
    const duration_s =
      (options.sweep?.key === "duration" ? own.duration_s : options.duration_s) ?? own.duration_s ?? DURATION_s;
    const seed = options.sweep?.key === "seed" && value !== null ? value : options.seed;
    const clients = own.clients.map((client, index) => ({
      ...clientOf(client, index, seed),
      ...(moments && client.class === "high" && { moments }),
    }));
    return { value, duration_s, clients, ways: waysOf(options.ways, own) };
  });
  const running = points.map(
    async ({ value, duration_s, clients, ways }) =>
      await predictPoint(value, duration_s, clients, ways, gpu, native, simulator, notes, options.slow),
  );
  watch(simulator);
  return {
    schema: 1,
    simulated: true,
    preset,
    calibration: gpu.calibration,
    sweep: options.sweep?.key ?? null,
    slow: options.slow ?? 1,
    host:
      options.host !== undefined && moments
        ? { file: options.host, requests: moments.length, work_p50_ms: median(moments.map(({ work_ms }) => work_ms)) }
        : null,
    points: await Promise.all(running),
    notes,
  };
}

async function predictPoint(
  value: number | null,
  duration_s: number,
  clients: readonly ScenarioClient[],
  ways: readonly Way[],
  gpu: ScenarioGpu,
  native: Native,
  simulator: Simulator,
  notes: string[],
  slow = 1,
): Promise<Point> {
  const onHost = (scenario: Scenario): Scenario => ({
    ...scenario,
    settings: { ...scenario.settings, ...(slow !== 1 && { slow_ppm: Math.round((slow - 1) * 1e6) }) },
  });
  // At once: of promises that are waited for one after the other, the second may fail with nobody there to hear it.
  const [apart, together] = await Promise.all([
    Promise.all(clients.map((client) => simulator.run(onHost(aloneOf(client, duration_s, gpu))))),
    Promise.all(
      ways.map(async (way) => ({
        way,
        outcome: await simulator.run(onHost(scenarioOf(way, clients, duration_s, gpu, native))),
      })),
    ),
  ]);
  const late = new Set<string>();
  for (const { way, outcome } of together)
    for (const [index, client] of clients.entries())
      if (queuesUp(client, outcome.clients[index]?.p50_ns ?? 0)) late.add(`${client.name} under ${way.name}`);
  if (late.size > 0)
    notes.push(
      `${value === null ? "" : `at ${value}: `}requests queue up, taking longer than the time between them, so that how late they are ` +
        `depends on the duration: ${[...late].join(", ")}`,
    );
  const base = apart.flatMap((outcome) => outcome.clients);
  const alone = clients.map((client, index) => clientNumbers(client, base[index], undefined, duration_s));
  const ceiling = ceilingOf(clients, base, duration_s);
  const short = clients.filter((client, index) => isShort(client, alone[index], duration_s)).map(({ name }) => name);
  if (short.length > 0)
    notes.push(
      `${value === null ? "" : `at ${value}: `}${short.join(", ")}: ran out of iterations within ${duration_s} s, so that what it gets of ` +
        "the GPU is not told; leave iterations out, or set a shorter --duration",
    );
  return {
    value,
    duration_s,
    ceiling,
    alone,
    ways: together.map(({ way, outcome }) => {
      const predicted = clients.map((client, index) =>
        clientNumbers(client, outcome.clients[index], alone[index], duration_s),
      );
      const shares = predicted.flatMap((one) => (one.class === "best-effort" && one.share !== null ? [one.share] : []));
      const share = shares.length > 0 ? shares.reduce((sum, one) => sum + one, 0) : null;
      return {
        way: way.name,
        policy: way.key,
        mps: way.mps,
        preemption: way.mode === "preempt",
        clients: predicted,
        share,
        harvest: share !== null && ceiling > 0 ? share / ceiling : null,
        ...(outcome.slo && { slo: outcome.slo }),
      };
    }),
  };
}

/**
 * Whether half of a client's requests or more take longer than the mean time between two: they queue up, and how late they are in the end
 * depends on how long that has gone on, here and on a GPU.
 */
export function queuesUp({ rate }: ScenarioClient, p50_ns: number): boolean {
  return rate !== undefined && p50_ns > 1e9 / rate.per_s;
}

/** 1 minus what the high clients alone keep the GPU busy for: their kernels and copies, times what they had a second. */
function ceilingOf(clients: readonly ScenarioClient[], alone: readonly ClientNumbers[], duration_s: number): number {
  let busy = 0;
  for (const [index, client] of clients.entries()) {
    const own = alone[index];
    if (client.class === "high" && own) busy += (own.finished / own.launches_per_iteration) * (own.gpu_ns / 1e9);
  }
  return Math.max(0, 1 - busy / duration_s);
}

/** It is through with all that it was to do before the time is over, alone: how much it had in that time tells of nothing but its iterations. */
function isShort({ iterations }: ScenarioClient, alone: PredictedClient | undefined, duration_s: number): boolean {
  return iterations !== undefined && alone !== undefined && alone.per_s * duration_s > iterations * 0.999;
}

function clientNumbers(
  client: ScenarioClient,
  numbers: ClientNumbers | undefined,
  alone: PredictedClient | undefined,
  duration_s: number,
): PredictedClient {
  const { name, class: kind, rate, arrivals } = client;
  if (!numbers) throw new Error(`${name}: the scenario says nothing of it`);
  const { requests, finished, launches_per_iteration } = numbers;
  const ms = (ns: number): number | null => (requests > 0 ? ns / 1e6 : null);
  const latencies = { p50_ms: ms(numbers.p50_ns), p95_ms: ms(numbers.p95_ns), p99_ms: ms(numbers.p99_ns) };
  const open = rate !== undefined || arrivals !== undefined;
  // Parts of an iteration count: one of GPT-2's lasts longer than some whole scenarios.
  const per_s = launches_per_iteration > 0 ? finished / launches_per_iteration / duration_s : 0;
  return {
    name,
    class: kind,
    requests,
    ...latencies,
    per_s,
    p50_over_alone: over(latencies.p50_ms, alone?.p50_ms),
    p95_over_alone: over(latencies.p95_ms, alone?.p95_ms),
    p99_over_alone: over(latencies.p99_ms, alone?.p99_ms),
    share: open || !alone || alone.per_s === 0 || isShort(client, alone, duration_s) ? null : per_s / alone.per_s,
    gate_wait_ms: (numbers.gate_wait_ns + numbers.inflight_wait_ns) / 1e6,
    suspensions: numbers.suspensions,
  };
}

function over(own: number | null, base: number | null | undefined): number | null {
  return own !== null && base ? own / base : null;
}

/* ---- Clients */

function clientOf(client: Config["clients"][number], index: number, seed: number | undefined): ScenarioClient {
  const { name, class: kind, replay, rate_per_s, weight } = client;
  const per_s = replay ? replay.rate_per_s : rate_per_s;
  const uniform = replay?.arrivals === "uniform";
  // Each has its own arrivals: a seed for all is as many seeds. Past the last one that is exact come the first.
  const ownSeed =
    seed === undefined
      ? (replay?.seed ?? defaultSeed(index))
      : Number(BigInt.asUintN(53, BigInt(seed) + BigInt(index)));
  return {
    name,
    class: kind,
    profiles: replay?.profile ?? client.profile ?? [],
    drawSeed: ownSeed,
    rate:
      per_s === undefined
        ? undefined
        : {
            kind: uniform ? "uniform" : "poisson",
            per_s,
            seed: ownSeed,
          },
    arrivals: per_s === undefined ? replay?.arrivals : undefined,
    iterations: replay?.iterations,
    weight: weight ?? 1,
    reports: replay !== undefined,
  };
}

/** Everything that is missing or wrong, at once; what has no effect becomes a note. */
async function checkProfiles({ file, clients, fieldNames, policy }: Config, notes: string[]): Promise<void> {
  const problems: RigelError[] = [];
  for (const field of ["stay_us", "arrivals"] as const)
    if (policy[field] !== undefined) notes.push(`policy.${field} is not simulated`);
  for (const [index, client] of clients.entries()) {
    const names = fieldNames[index];
    const where = `${file}: ${names?.client}`;
    const profiles = client.replay?.profile ?? client.profile;
    try {
      if (profiles === undefined)
        throw new RigelError(
          "config",
          `${where}.profile: expected a kernel profile of this command, which a simulation replays, but it is missing; ` +
            "record one with `rigel profile -o FILE -- COMMAND`, or with nsys, ncu or torch.profiler and `rigel import`, and name it " +
            "here; with rate_per_s, if it serves requests",
        );
      for (const [field, path] of profileFields(
        client.replay ? `${file}: ${names?.profile}` : `${where}.profile`,
        profiles,
      ))
        await inField(field, readProfile(path));
      const arrivals = client.replay?.arrivals;
      if (arrivals !== undefined && arrivals !== "uniform" && arrivals !== "poisson")
        await inField(`${file}: ${names?.arrivals}`, checkArrivals(arrivals));
    } catch (thrown) {
      if (!(thrown instanceof RigelError)) throw thrown;
      problems.push(thrown);
    }
    for (const field of ["memory", "sm_percent", "device"] as const)
      if (client[field] !== undefined) notes.push(`${client.name}: ${field} is not simulated`);
    if (client.replay?.idle_timeout_s !== undefined) notes.push(`${client.name}: idle_timeout_s is not simulated`);
    if (client.isolation === "process") notes.push(`${client.name}: isolation is not simulated`);
  }
  const [first] = problems;
  if (first) throw new RigelError(first.code, problems.map(({ message }) => message).join("\n"), { cause: first });
}
