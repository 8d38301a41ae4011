/**
 * simulate-run.ts: scenarios in virtual time: each one a process of rigel-simulate (native/sim/simulate.c), as many at once as there
 * are processors, none twice.
 *
 * Policy slo's loop is the Controller of slo.ts itself, asked at every tenth of a virtual second. Nothing here reads a clock, so the
 * same scenario gives the same numbers.
 */

import { availableParallelism } from "node:os";
import { z } from "zod";
import type { ScenarioGpu } from "./calibrate.ts";
import { RigelError } from "./errors.ts";
import type { Moment } from "./simulate-host.ts";
import type { Target } from "./slo-alone.ts";
import { Controller, TICK_S } from "./slo.ts";
import { Histogram } from "./usage.ts";

/** A program of a scenario: its recorded profiles, and when it is asked. */
export interface ScenarioClient {
  name: string;
  class: "high" | "best-effort";
  /** Absolute paths; each request is of one of them. */
  profiles: readonly string[];
  /** Which that is (rg_profiles_draw of native/replay/profiles.h). */
  drawSeed: number;
  /** An open loop by a rate, or by a file of gaps; neither: one iteration follows the other. */
  rate: { kind: "uniform" | "poisson"; per_s: number; seed: number } | undefined;
  arrivals: string | undefined;
  /** Ends after so many. */
  iterations: number | undefined;
  /** `fair`: its part of GPU time. */
  weight: number;
  /** Tells Rigel its latencies, as a replay does; of others Rigel sees the busy periods. */
  reports: boolean;
  /** How fast its host is; undefined: as its profile's was. */
  moments?: readonly Moment[];
}

/** As rg_scenario_mode in native/sim/scenario.h. */
export type ScenarioMode = "alone" | "ungoverned" | "governed" | "preempt";

export interface Scenario {
  gpu: ScenarioGpu;
  mode: ScenarioMode;
  duration_s: number;
  /** Keys of rigel-simulate's description that are numbers. */
  settings: Readonly<Record<string, number>>;
  clients: readonly ScenarioClient[];
  /** Policy slo: what it aims at. */
  target?: Target;
}

const numbersSchema = z.object({
  /** GPU time of one iteration alone; of several profiles this and the next are means. */
  gpu_ns: z.number(),
  launches_per_iteration: z.number(),
  /** Operations that were finished by the end of the duration. */
  finished: z.number(),
  launches: z.number(),
  requests: z.number(),
  p50_ns: z.number(),
  p95_ns: z.number(),
  p99_ns: z.number(),
  charged_ns: z.number(),
  gate_waits: z.number(),
  gate_wait_ns: z.number(),
  inflight_wait_ns: z.number(),
  starved: z.number(),
  shared: z.number(),
  suspensions: z.number(),
});

/** What one client had. */
export type ClientNumbers = z.infer<typeof numbersSchema>;

const outcomeSchema = z.object({ clients: z.array(numbersSchema) });
const tickSchema = z.object({
  launches: z.number(),
  /** By client. */
  launched: z.array(z.number()),
  starved: z.number(),
  requests: z.array(z.tuple([z.int(), z.number()])),
  /** Client, kind (0: not known), when it began, and for how many nanoseconds it worked and then waited. */
  waits: z.array(z.tuple([z.int(), z.int(), z.number(), z.number(), z.number()])),
});
const progressSchema = z.object({ now_ns: z.number() });
/** The first line: the buckets of histograms, and the part of best-effort work that is in long kernels. */
const shapeSchema = z.object({ buckets: z.int(), sub_bits: z.int(), min_shift: z.int(), long_part: z.number() });

export interface Outcome {
  clients: ClientNumbers[];
  /** Policy slo: what the loop came to. */
  slo: (ReturnType<Controller["summary"]> & Pick<Controller, "moves">) | undefined;
}

export class Simulator implements Disposable {
  readonly #program: string;
  readonly #known = new Map<string, Promise<Outcome>>();
  readonly #waiting: (() => void)[] = [];
  readonly #children = new Set<{ kill(): void }>();
  #free = availableParallelism();
  #ended = false;
  /** How many scenarios were asked for. */
  asked = 0;
  #done = 0;
  /** Of those that run the part that is done. */
  readonly #parts = new Set<{ done: number }>();

  constructor(program: string) {
    this.#program = program;
  }

  /** How many have been done, and how far those are that run. */
  get done(): number {
    return [...this.#parts].reduce((sum, { done }) => sum + done, this.#done);
  }

  /** Ends what still runs. */
  [Symbol.dispose](): void {
    this.#ended = true;
    for (const child of this.#children) child.kill();
  }

  /** Runs a scenario, unless the same one was run before. */
  run(scenario: Scenario): Promise<Outcome> {
    const text = description(scenario);
    const key = `${text}${JSON.stringify(scenario.target ?? null)}`;
    let outcome = this.#known.get(key);
    if (!outcome) {
      this.asked++;
      outcome = this.#start(scenario, text);
      this.#known.set(key, outcome);
    }
    return outcome;
  }

  async #start(scenario: Scenario, text: string): Promise<Outcome> {
    if (this.#free === 0) await new Promise<void>((resolve) => this.#waiting.push(resolve));
    else this.#free--;
    const part = { done: 0 };
    this.#parts.add(part);
    try {
      if (this.#ended) throw new RigelError("command", "the simulation was ended");
      return await this.#play(scenario, text, part);
    } finally {
      this.#parts.delete(part);
      this.#done++;
      const next = this.#waiting.shift();
      if (next) next();
      else this.#free++;
    }
  }

  async #play(
    { mode, target, settings, duration_s, clients }: Scenario,
    text: string,
    part: { done: number },
  ): Promise<Outcome> {
    await using child = Bun.spawn([this.#program], {
      env: { ...process.env },
      stdin: "pipe",
      stdout: "pipe",
      stderr: "pipe",
    });
    this.#children.add(child);
    const problem = child.stderr.text();
    const controller = target ? new Controller(target) : undefined;
    let shape: z.infer<typeof shapeSchema> | undefined;
    let outcome: z.infer<typeof outcomeSchema> | undefined;
    try {
      void send(child.stdin, text);
      for await (const line of linesOf(child.stdout)) {
        const value: unknown = JSON.parse(line);
        const progress = progressSchema.safeParse(value);
        if (progress.success) {
          // Requests that fell due are served after the duration.
          part.done = Math.min(1, progress.data.now_ns / 1e9 / duration_s);
          continue;
        }
        const tick = tickSchema.safeParse(value);
        if (!controller || !(tick.success || shape === undefined)) outcome = outcomeSchema.parse(value);
        else if (!shape) shape = shapeSchema.parse(value);
        else if (tick.success) {
          void send(child.stdin, answer(controller, tick.data, shape, mode === "preempt", settings, clients));
        }
      }
    } finally {
      this.#children.delete(child);
    }
    const status = await child.exited;
    if (status !== 0 || !outcome) {
      const said = (await problem).trim();
      throw new RigelError(status === 2 ? "profile" : "native", said || `${this.#program} ended with ${status}`);
    }
    return { clients: outcome.clients, slo: controller && { ...controller.summary(), moves: controller.moves } };
  }
}

async function send(stdin: Bun.FileSink, text: string): Promise<void> {
  try {
    await Promise.all([stdin.write(text), stdin.flush()]);
  } catch {
    // It has ended before it read this: how it ended tells more.
  }
}

/** Feeds the loop one tick; the line that goes back. */
function answer(
  controller: Controller,
  { launches, launched, starved, requests, waits }: z.infer<typeof tickSchema>,
  shape: z.infer<typeof shapeSchema>,
  preemption: boolean,
  configured: Readonly<Record<string, number>>,
  clients: readonly ScenarioClient[],
): string {
  const counts = new Float64Array(shape.buckets);
  for (const [bucket, count] of requests) counts[bucket] = count;
  const sharers = clients.flatMap(({ name, class: kind }, index) =>
    kind === "best-effort" ? [{ name, index, devices: 1, launches: launched[index] ?? 0, processes: 1 }] : [],
  );
  const stops = preemption && configured["gpu.shared"] === 1;
  const action = controller.step({
    elapsed_s: TICK_S,
    requests: new Histogram(counts, shape),
    waits: waits.map(([client, kind, began_ns, worked_ns, waited_ns]) => ({
      client,
      kind: kind || undefined,
      began_ms: began_ns / 1e6,
      worked_ms: worked_ns / 1e6,
      waited_ms: waited_ns / 1e6,
    })),
    launches,
    starved,
    ...(configured["starvation_us"] !== undefined && { starvation_s: configured["starvation_us"] / 1e6 }),
    ...(configured["min_share_ppm"] !== undefined && { min_share: configured["min_share_ppm"] / 1e6 }),
    sharers: sharers.length,
    ...(preemption && !stops && { clients: sharers }),
    neighbours: "best-effort",
    measured: "high",
    preemption,
    stops,
    longPart: configured["stop_us"] === 0 ? undefined : shape.long_part,
  });
  const { settings, hold, waits: waiting } = action;
  const turns = sharers.reduce((sum, { name, index }) => sum + (waiting?.has(name) ? 2 ** index : 0), 0);
  if (!settings) return `keep ${Number(hold)} ${turns}\n`;
  const { suspend, defer_us, defer_ppm, need_us, slice_us, inflight, corun, share_period_us } = settings;
  const stop_us = Math.min(settings.stop_us, configured["stop_us"] ?? settings.stop_us);
  const answered = [suspend, defer_us, defer_ppm, need_us, slice_us, inflight, corun, stop_us, share_period_us];
  return `${[...answered, Number(hold), turns].join(" ")}\n`;
}

/** What rigel-simulate reads. */
function description({ gpu, mode, duration_s, settings, clients, target }: Scenario): string {
  const lines = [
    `preset ${gpu.preset}`,
    ...Object.entries(gpu.constants).map(([key, value]) => `gpu.${key} ${value}`),
    `mode ${mode}`,
    `duration_ns ${Math.round(duration_s * 1e9)}`,
    ...Object.entries(settings).map(([key, value]) => `${key} ${value}`),
    ...(target ? [`tick_ns ${Math.round(TICK_S * 1e9)}`] : []),
    ...clients.flatMap(
      ({ class: kind, profiles, drawSeed, rate, arrivals, iterations, weight, reports, moments = [] }) => [
        "client",
        `class ${kind}`,
        ...profiles.map((profile) => `profile ${profile}`),
        `draw_seed ${drawSeed}`,
        ...(rate ? [`rate ${rate.kind} ${Math.max(1, Math.round(1e9 / rate.per_s))} ${rate.seed}`] : []),
        ...(arrivals === undefined ? [] : [`arrivals ${arrivals}`]),
        ...(iterations === undefined ? [] : [`iterations ${iterations}`]),
        `weight ${Math.round(weight * 1000)}`,
        `reports ${Number(reports)}`,
        ...moments.map(({ at_ms, work_ms }) => `moment ${Math.round(at_ms * 1e6)} ${Math.round(work_ms * 1e6)}`),
      ],
    ),
    "run",
  ];
  return `${lines.join("\n")}\n`;
}

async function* linesOf(stream: ReadableStream<Uint8Array>): AsyncGenerator<string> {
  const decoder = new TextDecoder();
  let rest = "";
  for await (const chunk of stream) {
    const lines = (rest + decoder.decode(chunk, { stream: true })).split("\n");
    rest = lines.pop() ?? "";
    yield* lines;
  }
}
