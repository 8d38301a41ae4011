/**
 * bench-jobs.ts: the runs that make up a benchmark, and what each adds to the result.
 *
 * Three methods. _Anew_ starts the programs for every way of every round. _Live_ (bench-live.ts) starts them once. _Solo_ lets bare and
 * governed copies of one program take turns request by request on a GPU that is otherwise idle; of the requests that a governed copy
 * gets, every second one goes past Rigel.
 */

import { readFileSync } from "node:fs";
import { join } from "node:path";
import type { Pair, Program, Way } from "./bench-matrix.ts";
import { Interrupted, type Ran, type Run, RunFailed, type Runner } from "./bench-run.ts";
import {
  type Arrivals,
  type Copies,
  type Kind,
  type Measurement,
  type Sample,
  type Solo,
  arrivalTimes,
  latencyOf,
  moreOf,
  soloOf,
  soloTurns,
  together,
} from "./bench-stats.ts";
import type { Policy } from "./config.ts";
import { RigelError } from "./errors.ts";
import { progress } from "./log.ts";
import type { Native } from "./native.ts";
import type { ClientReport } from "./report.ts";
import type { SloReport } from "./slo-loop.ts";

export interface Timing {
  rounds: number;
  /** Seconds measured for each way and round; where a program serves alone, in all. */
  duration_s: number;
  /** Seconds for programs to start and warm up. Raised when they needed more. */
  lead_s: number;
  /** Seconds counted of a window, where ways take turns; or nearly, as windows divide `duration_s`. */
  window_s: number;
  /** Seconds that policy `slo` has to find its settings before anything is counted, where ways take turns. */
  learn_s: number;
  /** Of each kind of program, where one serves alone. */
  copies: number;
  /** With solo: of each kind the first copy runs on this processor only, the next on the next. */
  pin?: number | undefined;
}

export interface Load {
  rate_per_s: number;
  arrivals: Arrivals;
  seed: number;
}

/** What one run adds; everything of it goes into the JSON document. */
export interface Found {
  measurements?: (Measurement & { rigel?: ClientReport[] })[];
  gpu_time?: { program: string; gpu_ms: number; source: string };
  /** Of each copy all requests, also those that fell due before `settle_s` and are not counted. */
  solo?: Solo & { settle_s: number; samples: Copies<Sample[]> & { past: Sample[][] } };
  /** What the control loop of each way with policy slo did: settings, and a line for each second in which it ran. */
  loops?: (Pick<Measurement, "pair" | "way" | "method"> & SloReport)[];
  /** Of programs that ran in turn with those that did not fail. */
  failures?: Failure[];
  /** What whoever reads the results is to know of how they were measured. */
  notes?: string[];
  /** For the line of progress. */
  said: string;
  late_s: number;
  /** What --lead was short of though nothing has to be measured again. */
  short_s?: number;
  versions: Record<string, string>;
}

/** What failed, why, and the last words of its programs. */
export interface Failure {
  title: string;
  problem: string;
  output: string[];
}

export function failureOf(thrown: RunFailed | RigelError): Omit<Failure, "title"> {
  return { problem: thrown.message, output: thrown instanceof RunFailed ? [...thrown.output] : [] };
}

/** One run of programs. */
export interface Job {
  pair: string;
  title: string;
  /** About how long it takes. */
  seconds(timing: Timing): number;
  run(timing: Timing): Promise<Found>;
}

export interface Bed {
  runner: Pick<Runner, "bare" | "governed">;
  native: Native;
  simulated: boolean;
  load: Load;
  /** What a program's environment needs to share the device by MPS, or not to. */
  environment(mps: boolean): Record<string, string>;
}

/** A retry of programs that were late waits so much longer than they needed. */
const LEAD_MARGIN_s = 2;
/** Seconds that starting and ending takes besides. */
export const AROUND_s = 2;
/** Requests of a program alone are not counted in the first seconds: clocks rise, caches fill. */
const SOLO_SETTLE_s = 2;

/** What the high program of a pair is called. */
export const HIGH = "high";

export function found(ran: Ran, more: Omit<Found, "late_s" | "versions">): Found {
  const logs = [...ran.logs.values()];
  return {
    ...more,
    late_s: Math.max(0, ...logs.map((log) => log.late_s)),
    versions: Object.assign({}, ...logs.map((log) => log.versions ?? {})),
  };
}

/**
 * Once more with a longer lead if programs were not ready in time; that lead is kept. Where the second start fails, or is cut short before it has measured as much, it is the
 * first that counts, with what failed.
 */
export async function inTime(job: Job, timing: Timing, isInterrupted: () => boolean): Promise<Found> {
  const raise = ({ late_s, short_s = 0 }: Found): void => {
    if (late_s > 0 || short_s > 0) timing.lead_s += Math.max(late_s, short_s) + LEAD_MARGIN_s;
  };
  const first = await job.run(timing);
  raise(first);
  if (first.late_s <= 0 || isInterrupted()) return first;
  progress(`${job.title}: late by ${first.late_s.toFixed(1)} s; once more with --lead ${timing.lead_s.toFixed(1)}`);
  const firstWith = (failures: readonly Failure[]): Found => ({
    ...first,
    failures: [...(first.failures ?? []), ...failures],
  });
  try {
    const second = await job.run(timing);
    raise(second);
    // Of a program alone there is one result, of few requests or of all.
    const measured = ({ measurements = [], solo }: Found): number =>
      measurements.length + (solo ? solo.bare.count + solo.rigel.count : 0);
    return isInterrupted() && measured(second) < measured(first) ? firstWith(second.failures ?? []) : second;
  } catch (thrown) {
    if (thrown instanceof Interrupted) return first;
    if (!(thrown instanceof RunFailed) && !(thrown instanceof RigelError)) throw thrown;
    return firstWith([{ title: job.title, ...failureOf(thrown) }]);
  }
}

/** By the same percentiles as the report. */
function milliseconds(requests: readonly Sample[]): string {
  const latency = latencyOf(requests);
  return latency ? `p50 ${latency.p50_ms.toFixed(2)} p99 ${latency.p99_ms.toFixed(2)} ms` : "no request";
}

/* ---- GPU time of a request */

/** How long one request of a program keeps the GPU busy: what the ceiling of the others follows from. */
export function gpuTimeJob(bed: Bed, pair: string, program: Program): Job {
  return {
    pair,
    title: `GPU time of ${program.name}`,
    seconds: () => (bed.simulated ? 0 : 12),
    async run() {
      if (bed.simulated) {
        const header =
          readFileSync(join(bed.native.files.profiles, program.profile ?? ""), "utf8").split("\n", 1)[0] ?? "";
        const gpu_ms = Number(/gpu_busy_ms=([\d.]+)/.exec(header)?.[1]);
        if (!(gpu_ms > 0)) throw new RunFailed(`${program.profile} does not state gpu_busy_ms`, []);
        const gpu_time = { program: program.name, gpu_ms, source: "the recorded profile" };
        return { gpu_time, said: `${gpu_ms.toFixed(2)} ms`, late_s: 0, versions: {} };
      }
      const run: Run = { name: HIGH, program, duration_s: 0, more: ["--gpu-time"], env: bed.environment(false) };
      const ran = await bed.runner.bare([run], { lead_s: 0 });
      const gpu_ms = ran.logs.get(HIGH)?.gpu_ms ?? Number.NaN;
      const source = "torch.profiler: kernels and copies of 20 requests, alone";
      return {
        ...found(ran, { said: `${gpu_ms.toFixed(3)} ms` }),
        gpu_time: { program: program.name, gpu_ms, source },
      };
    },
  };
}

/* ---- Programs started anew */

/** One way of one pair in one round. `alone` is a run for each program. */
export function anewJobs(bed: Bed, pair: Pair, way: Way, round: number): Job[] {
  const parts: Program[][] = way.together
    ? [[pair.high, ...pair.best]]
    : [[pair.high], ...(way.policy ? [] : pair.best.map((program) => [program]))];
  return parts.map((programs) => ({
    pair: pair.name,
    title: `${pair.name}, round ${round + 1}, ${way.name}${way.together ? "" : `: ${programs[0]?.name}`}`,
    seconds: ({ lead_s, duration_s }) => lead_s + duration_s + AROUND_s,
    run: async (timing) => await runAnew(bed, pair, way, round, programs, timing),
  }));
}

/** What a program's environment needs for a way. */
export function environmentOf(
  bed: Bed,
  { mps, clientPriority }: Pick<Way, "mps" | "clientPriority">,
  { class: kind }: Program,
): Record<string, string> {
  // To MPS, 0 is normal and 1 below normal.
  return { ...bed.environment(mps), ...(clientPriority && { CUDA_MPS_CLIENT_PRIORITY: kind === "high" ? "0" : "1" }) };
}

async function runAnew(
  bed: Bed,
  pair: Pair,
  way: Way,
  round: number,
  programs: readonly Program[],
  { lead_s, duration_s }: Timing,
): Promise<Found> {
  const { rate_per_s, arrivals, seed } = bed.load;
  const runs = programs.map((program): Run => {
    const isHigh = program.class === "high";
    const env = environmentOf(bed, way, program);
    if (!isHigh) return { name: program.name, program, duration_s, env };
    // The same requests in every way of a round.
    const due_s = arrivalTimes(arrivals, rate_per_s, seed + round, 0, duration_s);
    return { name: HIGH, program, due_s, duration_s, env, more: moreOf(arrivals) };
  });
  const ran = way.policy
    ? await bed.runner.governed(runs, { lead_s }, way.policy, { mps: way.mps })
    : await bed.runner.bare(runs, { lead_s }, { mps: way.mps });
  const best = programs.flatMap(({ name }) => {
    const log = ran.logs.get(name);
    return log ? [{ program: name, ...log }] : [];
  });
  const measurement = {
    pair: pair.name,
    way: way.name,
    method: "anew",
    round,
    ...together(ran.logs.get(HIGH), best, duration_s),
    ...(ran.clients.length > 0 && { rigel: ran.clients }),
  };
  return found(ran, { measurements: [measurement], said: said(measurement) });
}

function said({ requests, requests_s, best }: Measurement): string {
  return [
    ...(requests_s > 0 ? [milliseconds(requests)] : []),
    ...best.map(({ steps, seconds }) => (seconds > 0 ? `${(steps / seconds).toFixed(2)} steps/s` : "no steps")),
  ].join(", ");
}

/* ---- One program, bare and under Rigel */

/**
 * What Rigel costs a program that has the GPU to itself. Two starts of the same program differ by several percent, whatever they
 * run under, so there are several copies of each kind; hosts drift by more within a second, so they take turns request by request. What
 * differs between starts is told apart from what Rigel costs by requests that governed copies send past it.
 */
export function soloJob(bed: Bed, pair: string, program: Program, policy: Policy): Job {
  return {
    pair,
    title: `${program.name} alone, bare and under Rigel in turn`,
    seconds: (timing) => timing.lead_s + SOLO_SETTLE_s + timing.duration_s + AROUND_s,
    run: async (timing) => {
      const { rate_per_s, seed } = bed.load;
      const end_s = SOLO_SETTLE_s + timing.duration_s;
      const due_s = soloTurns(rate_per_s, timing.copies, end_s);
      const runsOf = (kind: Kind): Run[] =>
        due_s[kind].map((due, copy) => ({
          name: `${kind}${copy + 1}`,
          program,
          duration_s: end_s,
          env: bed.environment(false),
          due_s: due,
          processor: timing.pin === undefined ? undefined : timing.pin + copy,
          // Each copy in an order of its own.
          more: kind === "rigel" ? ["--alternate", String((seed + copy) % 2 ** 32)] : [],
        }));
      const start = { at_ms: Date.now() + (timing.lead_s + AROUND_s) * 1000 };
      const [bare, rigel] = await both(
        soFar(bed.runner.bare(runsOf("bare"), start)),
        soFar(bed.runner.governed(runsOf("rigel"), start, policy)),
      );
      const interrupted = bare.interrupted ?? rigel.interrupted;
      const ran: Ran = { logs: new Map([...bare.ran.logs, ...rigel.ran.logs]), clients: rigel.ran.clients };
      const served = (kind: Kind, isPast: boolean): Sample[][] =>
        due_s[kind].map((_, copy) => {
          const { requests = [], past = [] } = ran.logs.get(`${kind}${copy + 1}`) ?? {};
          return requests.filter((_sample, index) => (past[index] ?? false) === isPast);
        });
      const samples = { bare: served("bare", false), rigel: served("rigel", false), past: served("rigel", true) };
      const solo = soloOf(program.name, samples, { rate_per_s, settle_s: SOLO_SETTLE_s }, seed, samples.past);
      if (!solo && interrupted) throw interrupted;
      if (!solo) {
        const counted = (of: Sample[][]): number => of.flat().filter(([due]) => due >= SOLO_SETTLE_s).length;
        throw new RunFailed(
          `expected requests bare and through Rigel after the first ${SOLO_SETTLE_s} s, got ${counted(samples.bare)} and ` +
            `${counted(samples.rigel)}; a higher --rate or --duration asks for more`,
          [],
        );
      }
      const [low, high] = solo.interval;
      const { within: own } = solo;
      const [least, most] = own?.p50_interval ?? [];
      return found(ran, {
        solo: { ...solo, settle_s: SOLO_SETTLE_s, samples },
        ...(interrupted && { notes: [interruptedText((interrupted.at_ms - start.at_ms) / 1000, end_s)] }),
        said:
          `p50 ${solo.bare.p50_ms.toFixed(3)} ms bare, ${solo.rigel.p50_ms.toFixed(3)} ms under Rigel, ` +
          `x${solo.ratio.toFixed(3)} (${low.toFixed(3)} to ${high.toFixed(3)})` +
          (own
            ? `; within a process x${own.p50.toFixed(3)} (${least?.toFixed(3)} to ${most?.toFixed(3)}), ` +
              `${own.added_us.toFixed(0)} us a request`
            : ""),
      });
    },
  };
}

/** What programs had measured when the user wanted the end counts, if all of them had begun. */
async function soFar(running: Promise<Ran>): Promise<{ ran: Ran; interrupted?: Interrupted }> {
  try {
    return { ran: await running };
  } catch (thrown) {
    if (thrown instanceof Interrupted && thrown.ran) return { ran: thrown.ran, interrupted: thrown };
    throw thrown;
  }
}

/** For whoever reads what a run measured that the user ended after so much of it. */
export function interruptedText(after_s: number, of_s: number): string {
  return `interrupted after ${Math.max(0, after_s).toFixed(0)} of ${of_s.toFixed(0)} s`;
}

/** Both results, or once both have ended, the first failure. */
async function both<A, B>(a: Promise<A>, b: Promise<B>): Promise<[A, B]> {
  await Promise.allSettled([a, b]);
  return await Promise.all([a, b]);
}
