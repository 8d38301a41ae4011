/**
 * bench-jobs.ts: the runs that make up a benchmark, and what each adds to the result.
 *
 * Three methods. _Anew_ starts the programs for every way of every round. _Live_ starts a pair once under Rigel and
 * switches the ways in turn, so that what differs between two starts of a program drops out. _Solo_ lets bare and governed
 * copies of one program take turns request by request on a GPU that is otherwise idle; of the requests that a governed copy gets, every
 * second one goes past Rigel.
 */

import { readFileSync } from "node:fs";
import { join } from "node:path";
import type { Pair, Program, Way } from "./bench-matrix.ts";
import { isLive } from "./bench-matrix.ts";
import { Interrupted, type Ran, type Run, RunFailed, type Runner } from "./bench-run.ts";
import {
  ALONE,
  LIVE,
  LIVE_MPS,
  type Arrivals,
  type Copies,
  type Kind,
  type Measurement,
  type Off,
  type Sample,
  type Solo,
  type Window,
  arrivalTimes,
  beginsQueued,
  counted,
  schedule,
  soloOf,
  soloTurns,
  together,
  within,
} from "./bench-stats.ts";
import { type Policy, policySchema } from "./config.ts";
import { progress } from "./log.ts";
import type { Native } from "./native.ts";
import { policySettings, targetOf } from "./policy.ts";
import { settingsText } from "./show.ts";
import type { ClientReport } from "./report.ts";
import type { Wait } from "./slo-delay.ts";
import { SloLoop, type SloReport } from "./slo-loop.ts";
import type { Segment } from "./segment.ts";

export interface Timing {
  rounds: number;
  /** Seconds measured for each way and round; where a program serves alone, in all. */
  duration_s: number;
  /** Seconds for programs to start and warm up. Raised when they needed more. */
  lead_s: number;
  /** Seconds counted of a window, where ways are switched. */
  window_s: number;
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
  /** For the line of progress. */
  said: string;
  late_s: number;
  versions: Record<string, string>;
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
  runner: Runner;
  native: Native;
  simulated: boolean;
  load: Load;
  /** What a program's environment needs to share the device by MPS, or not to. */
  environment(mps: boolean): Record<string, string>;
}

/** Seconds that starting and ending takes besides. */
const AROUND_s = 2;
/** After a switch: until what was queued before has drained, and clients have changed their time slices (250 ms at most). */
const SETTLE_s = 0.6;
/** Requests that fall due this shortly before a switch are not counted. */
const GUARD_s = 0.05;
/** Requests of a program alone are not counted in the first seconds: clocks rise, caches fill. */
const SOLO_SETTLE_s = 2;
/** What policy `slo` has to find its settings before anything is counted. */
const LEARN_s = 20;
/** One start serves many windows, so it is given more time than one that serves a single way. */
const LIVE_LEAD_s = 3;

const HIGH = "high";
const PRIORITY = policySchema.parse({ name: "priority" });
const NONE = policySchema.parse({ name: "none" });

function found(ran: Ran, more: Omit<Found, "late_s" | "versions">): Found {
  const logs = [...ran.logs.values()];
  return {
    ...more,
    late_s: Math.max(0, ...logs.map((log) => log.late_s)),
    versions: Object.assign({}, ...logs.map((log) => log.versions ?? {})),
  };
}

function milliseconds(requests: readonly Sample[]): string {
  const sorted = requests.map(([, latency_ms]) => latency_ms).toSorted((a, b) => a - b);
  const at = (q: number): string =>
    (sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))] ?? Number.NaN).toFixed(2);
  return sorted.length > 0 ? `p50 ${at(0.5)} p99 ${at(0.99)} ms` : "no request";
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
    const env = {
      ...bed.environment(way.mps),
      // To MPS, 0 is normal and 1 below normal.
      ...(way.clientPriority && { CUDA_MPS_CLIENT_PRIORITY: isHigh ? "0" : "1" }),
    };
    if (!isHigh) return { name: program.name, program, duration_s, env };
    // The same requests in every way of a round.
    const due_s = arrivalTimes(arrivals, rate_per_s, seed + round, 0, duration_s);
    return { name: HIGH, program, due_s, duration_s, env };
  });
  const ran = way.policy
    ? await bed.runner.governed(runs, { lead_s }, way.policy, { mps: way.mps })
    : await bed.runner.bare(runs, { lead_s }, way.mps);
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
    ...best.map(({ steps, seconds }) => `${(steps / seconds).toFixed(2)} steps/s`),
  ].join(", ");
}

/* ---- Programs switched while they run */

/** The name of the windows in which one best-effort program has the GPU. */
const soleWay = (program: Program): string => `${program.name} alone`;
/** For how long the others are paused at most: longer than any window. */
const SOLE_MOST_s = 10;
/** The round of windows that are not counted. */
const LEARNING = -1;

/** All rounds of the ways of a pair that can be switched, with MPS or without it. */
export function liveJob(bed: Bed, pair: Pair, ways: readonly Way[], mps: boolean): Job | undefined {
  const switched = ways.filter((way) => isLive(way) && (way.mps === mps || way.name === ALONE));
  if (switched.length < 2) return undefined;
  const windowsOf = ({ rounds, duration_s, window_s }: Timing): Window[] => {
    const learning = switched
      .filter(({ policy }) => policy?.name === "slo")
      .map(({ name: way }, index): Window => {
        const to_s = (index + 1) * LEARN_s;
        return { way, round: LEARNING, from_s: to_s - LEARN_s, counted_s: to_s, to_s };
      });
    const begin_s = learning.length * LEARN_s;
    const governed = switched.map(({ name }) => name).filter((name) => name !== ALONE);
    const rest = schedule([ALONE, ...pair.best.map(soleWay), ...governed], {
      rounds,
      cycles: Math.max(1, Math.round(duration_s / window_s)),
      window_s: Math.min(window_s, duration_s),
      settle_s: SETTLE_s,
    }).map(({ from_s, counted_s, to_s, ...which }) => ({
      ...which,
      from_s: begin_s + from_s,
      counted_s: begin_s + counted_s,
      to_s: begin_s + to_s,
    }));
    return [...learning, ...rest];
  };
  const method = mps ? LIVE_MPS : LIVE;
  return {
    pair: pair.name,
    title: `${pair.name}, ${method}: ${switched.map(({ name }) => name).join("; ")}`,
    seconds: (timing) => timing.lead_s + LIVE_LEAD_s + (windowsOf(timing).at(-1)?.to_s ?? 0) + AROUND_s,
    run: async (timing) => await runLive(bed, pair, switched, mps, method, timing, windowsOf(timing)),
  };
}

async function runLive(
  bed: Bed,
  pair: Pair,
  ways: readonly Way[],
  mps: boolean,
  method: string,
  { lead_s }: Timing,
  windows: readonly Window[],
): Promise<Found> {
  const { rate_per_s, arrivals, seed } = bed.load;
  const learning = windows.filter(({ round }) => round === LEARNING).length;
  const ways_per_turn = new Set(windows.map(({ way }) => way)).size;
  const end_s = windows.at(-1)?.to_s ?? 0;
  const sole = (way: string): Program | undefined => pair.best.find((program) => soleWay(program) === way);
  const due_s = windows.flatMap(({ way, from_s, to_s }, index) => {
    if (sole(way)) return [];
    // The same requests in every window of a turn.
    const turn = Math.floor((index - learning) / ways_per_turn);
    return arrivalTimes(arrivals, rate_per_s, seed + turn, 0, to_s - from_s).map((due) => from_s + due);
  });
  const env = bed.environment(mps);
  const runs: Run[] = [
    { name: HIGH, program: pair.high, due_s, duration_s: end_s, env },
    ...pair.best.map((program) => ({ name: program.name, program, duration_s: end_s, env })),
  ];
  const switches: Switch[] = [];
  const loops = new Map<string, SloLoop>();
  let driver: Promise<void> | undefined;
  const { ran, complete } = await untilStopped(
    bed.runner.governed(runs, { lead_s: lead_s + LIVE_LEAD_s }, PRIORITY, {
      mps,
      started: (segment, start_ms, over) => {
        const programs = new Map(runs.map(({ name, program }) => [name, program.class]));
        driver = drive(segment, { ways, windows, start_ms, programs, sole, switches, loops, native: bed.native }, over);
        // Waited for below, once the programs have ended.
        driver.catch(() => {});
      },
    }),
  );
  await driver;
  // When it was stopped, the last window was under way.
  const ended = complete ? windows : windows.slice(0, Math.max(0, switches.length - 1));
  const high = ran.logs.get(HIGH)?.requests ?? [];
  let queued = 0;
  const measurements = ended.flatMap((window, index): Measurement[] => {
    const { way, round, from_s, counted_s, to_s } = window;
    if (round === LEARNING) return [];
    const switched_s = switches[index]?.at_s ?? Number.POSITIVE_INFINITY;
    // Switched late, it is not the way that it is called.
    if (switched_s > from_s + SETTLE_s / 4) return [];
    if (windows[index - 1]?.way !== way && beginsQueued(high, window)) {
      queued++;
      return [];
    }
    const base = { pair: pair.name, method, round, window: { from_s, counted_s, to_s, switched_s } };
    const only = sole(way);
    const best = (only ? [only] : pair.best).map(({ name }) => {
      const ends_s = ran.logs.get(name)?.ends_s ?? [];
      return { program: name, ...counted(ends_s, counted_s, to_s), ...switches[index]?.off.get(name) };
    });
    if (only) return [{ ...base, way: ALONE, requests: [], requests_s: 0, best }];
    const requests = within(high, window, GUARD_s);
    const requests_s = to_s - GUARD_s - counted_s;
    const { waits = [] } = switches[index] ?? {};
    return [{ ...base, way, requests, requests_s, best: way === ALONE ? [] : best, waits }];
  });
  if (measurements.length === 0 && complete)
    throw new RunFailed("no window was switched in time, and without requests of an earlier one queued up", []);
  const late = Math.max(0, ended.length - learning - measurements.length - queued);
  const note = [
    [
      `${measurements.length} windows`,
      ...(late > 0 ? [`${late} switched too late and left out`] : []),
      ...(queued > 0 ? [`${queued} begun with requests of the way before queued up, and left out`] : []),
    ].join(", "),
    ...[...loops].map(([name, loop]) => `${name} ended with ${settled(loop.report())}`),
  ].join("; ");
  const reports = [...loops].map(([way, loop]) => ({ pair: pair.name, way, method, ...loop.report() }));
  return found(ran, { measurements, loops: reports, said: note });
}

/** What a control loop found. */
function settled({ settings, over_alone, changes, held_s }: SloReport): string {
  const delayed = over_alone ? `, delayed x${over_alone.p50.toFixed(2)} x${over_alone.p99.toFixed(2)}` : "";
  return `${settingsText(settings ?? {})}${delayed}, ${changes} changes, held ${held_s.toFixed(1)} s`;
}

/** What programs measured, also if the user has stopped them. */
async function untilStopped(running: Promise<Ran>): Promise<{ ran: Ran; complete: boolean }> {
  try {
    return { ran: await running, complete: true };
  } catch (thrown) {
    if (!(thrown instanceof Interrupted) || !thrown.ran) throw thrown;
    return { ran: thrown.ran, complete: false };
  }
}

interface Switch {
  at_s: number;
  /** Of the high program's requests in the window. */
  waits: Wait[];
  /** How often, and for how long, each best-effort program was taken off the GPU in it. */
  off: ReadonlyMap<string, Off>;
}

/** How often what the segment keeps of requests is collected. */
const COLLECT_s = 0.25;

/** The latest requests of high clients, taken apart, after as many as are given by slot; and how many there have been. */
function waitsOf(segment: Segment, since: ReadonlyMap<number, bigint>): { waits: Wait[]; counts: Map<number, bigint> } {
  const counts = new Map<number, bigint>();
  const waits = segment.slots().flatMap((slot): Wait[] => {
    if (slot.class !== "high") return [];
    const { waited, latest } = segment.waits(slot, since.get(slot.index));
    counts.set(slot.index, waited);
    return latest;
  });
  return { waits, counts };
}

/** How often, and for how long, each best-effort program was taken off the GPU, by name: more than at an earlier look, or in all. */
function offOf(segment: Segment, since: ReadonlyMap<string, Off>): Map<string, Off> {
  const off = new Map<string, Off>();
  for (const slot of segment.slots()) {
    if (slot.class === "high") continue;
    const { suspensions, suspended_ns, starved } = segment.read(slot).usage.counters;
    const so = off.get(slot.name) ?? {
      suspensions: -(since.get(slot.name)?.suspensions ?? 0),
      suspended_ms: -(since.get(slot.name)?.suspended_ms ?? 0),
      starved: -(since.get(slot.name)?.starved ?? 0),
    };
    off.set(slot.name, {
      suspensions: so.suspensions + suspensions,
      suspended_ms: so.suspended_ms + suspended_ns / 1e6,
      starved: so.starved + starved,
    });
  }
  return off;
}

/** Puts the settings of each window into force at its beginning. */
async function drive(
  segment: Segment,
  {
    ways,
    windows,
    start_ms,
    programs,
    sole,
    switches,
    loops,
    native,
  }: {
    ways: readonly Way[];
    windows: readonly Window[];
    start_ms: number;
    programs: ReadonlyMap<string, Program["class"]>;
    /** Which best-effort program has the GPU in the windows of a way, if one does. */
    sole: (way: string) => Program | undefined;
    switches: Switch[];
    /** The control loops of ways with policy slo; each runs in the windows of its way alone. */
    loops: Map<string, SloLoop>;
    native: Native;
  },
  over: AbortSignal,
): Promise<void> {
  // The end of the launch opens all gates, and that must not be undone.
  const { shutdown: _, ...defaults } = segment.settings();
  const set = (policy: Policy): void => {
    // What slo was just trying is not to be put back by the clients later.
    segment.putBack();
    segment.apply(defaults);
    segment.configure({ ...policySettings(policy, [], native), policy: policy.name });
  };
  // Streams get their priorities by the policy in force when a program attaches; warming up must not be held back.
  while (!over.aborted && Date.now() < start_ms - 1000 && segment.slots().length < programs.size) await Bun.sleep(20);
  if (!over.aborted) set(NONE);
  /** False: it is over before. */
  const until = async (at_s: number): Promise<boolean> => {
    for (;;) {
      const left_ms = start_ms + at_s * 1000 - Date.now();
      if (over.aborted || left_ms <= 0) return !over.aborted;
      await Bun.sleep(Math.min(left_ms, 100));
    }
  };
  try {
    for (const [index, { way, round, from_s, counted_s, to_s }] of windows.entries()) {
      if (!(await until(from_s))) return;
      for (const loop of loops.values()) loop.pause();
      const only = sole(way)?.name;
      for (const [name, kind] of programs) {
        const paused = only !== undefined && kind !== "high" && name !== only;
        if (kind !== "high") segment.want(name, { paused_until_ns: paused ? segment.now_ns + SOLE_MOST_s * 1e9 : 0 });
      }
      const policy = ways.find((one) => one.name === way)?.policy;
      if (way === ALONE) {
        set(PRIORITY);
        segment.hold(5000);
      } else set(policy ?? NONE);
      if (way !== ALONE && policy?.name === "slo") {
        const known = loops.get(way);
        const loop = known ?? new SloLoop(segment, targetOf(policy));
        loops.set(way, loop);
        loop.resume();
      }
      const made: Switch = { at_s: (Date.now() - start_ms) / 1000, waits: [], off: new Map() };
      switches.push(made);
      if (round !== windows[index - 1]?.round) {
        const left_s = (windows.at(-1)?.to_s ?? 0) - from_s;
        if (round === LEARNING) progress(`${way} has ${LEARN_s} s to find its settings`);
        else
          progress(
            `round ${round + 1} of ${(windows.at(-1)?.round ?? 0) + 1}; ${left_s.toFixed(0)} s of this run left`,
          );
      }
      if (!(await until(counted_s))) return;
      // The segment has the last few hundred alone.
      let { counts } = waitsOf(segment, new Map());
      const before = offOf(segment, new Map());
      for (let at_s = counted_s; at_s < to_s;) {
        at_s = Math.min(to_s, at_s + COLLECT_s);
        if (!(await until(at_s))) return;
        const latest = waitsOf(segment, counts);
        made.waits.push(...latest.waits);
        ({ counts } = latest);
      }
      made.off = offOf(segment, before);
    }
  } finally {
    for (const loop of loops.values()) loop.pause();
  }
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
        bed.runner.bare(runsOf("bare"), start),
        bed.runner.governed(runsOf("rigel"), start, policy),
      );
      const ran: Ran = { logs: new Map([...bare.logs, ...rigel.logs]), clients: rigel.clients };
      const served = (kind: Kind, isPast: boolean): Sample[][] =>
        due_s[kind].map((_, copy) => {
          const { requests = [], past = [] } = ran.logs.get(`${kind}${copy + 1}`) ?? {};
          return requests.filter((_sample, index) => (past[index] ?? false) === isPast);
        });
      const samples = { bare: served("bare", false), rigel: served("rigel", false), past: served("rigel", true) };
      const solo = soloOf(program.name, samples, { rate_per_s, settle_s: SOLO_SETTLE_s }, seed, samples.past);
      if (!solo) throw new RunFailed("no request was served in time", []);
      const [low, high] = solo.interval;
      const { within: own } = solo;
      const [least, most] = own?.p50_interval ?? [];
      return found(ran, {
        solo: { ...solo, settle_s: SOLO_SETTLE_s, samples },
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

/** Both results, or once both have ended, the first failure. */
async function both<A, B>(a: Promise<A>, b: Promise<B>): Promise<[A, B]> {
  await Promise.allSettled([a, b]);
  return await Promise.all([a, b]);
}
