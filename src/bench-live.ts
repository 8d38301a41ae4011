/**
 * bench-live.ts: a pair whose programs are started once and measured in every way in turn, in windows of seconds, so that what
 * differs between two starts of a program, and what drifts, drops out of what is compared.
 *
 * Ways that are settings of Rigel are switched while the same programs go on. A way that decides how programs start (plain MPS, its
 * client priority, a policy that a client takes over as it attaches) has programs of its own, a _crew_, that are there all the time and
 * do nothing outside their windows: requests come in windows alone, and best-effort programs pause by themselves (`--windows`).
 */

import { isSwitchable } from "./bench-matrix.ts";
import type { Pair, Program, Way } from "./bench-matrix.ts";
import {
  AROUND_s,
  type Bed,
  type Failure,
  type Found,
  HIGH,
  type Job,
  type Timing,
  environmentOf,
  failureOf,
  found,
  interruptedText,
} from "./bench-jobs.ts";
import { Interrupted, type Log, type Ran, type Run, RunFailed } from "./bench-run.ts";
import {
  ALONE,
  LIVE,
  LIVE_MPS,
  type Measurement,
  type Off,
  type Window,
  arrivalTimes,
  beginsQueued,
  counted,
  gapsOf,
  moreOf,
  outlasts,
  schedule,
  within,
} from "./bench-stats.ts";
import { type Policy, policySchema } from "./config.ts";
import { RigelError } from "./errors.ts";
import { progress } from "./log.ts";
import { policySettings, targetOf } from "./policy.ts";
import { changesText, settingsText } from "./show.ts";
import type { Wait } from "./slo-delay.ts";
import { SloLoop, type SloReport } from "./slo-loop.ts";
import type { Segment } from "./segment.ts";

/**
 * After a switch: until what was queued before has drained, and clients have changed their time slices (250 ms at most), and take what they
 * had launched without stops to be over (a second after they have begun with those, LATELY_NS in native/stop.c: requests from one CUDA graph were
 * delayed by 0.2 ms more until then, on an H100).
 */
const SETTLE_s = 1.2;
/** A way that was switched into later than this is not counted. */
const LATE_s = 0.15;
/**
 * After a crew's window, before another crew's: its steps under way end first. Beside another's work they would take seconds, as its slices
 * are short (an H100: those of `slo` beside plain MPS).
 */
const DRAIN_s = 1;
/** After plain MPS, where nothing keeps requests from queueing up for seconds: until those have been served. */
const QUEUE_s = 2.5;
/**
 * After another crew, to Rigel's clients strangers, beside whom time slices are longer than they are set to be: until those have not been
 * seen for long enough, and a best-effort client has (gpu-share.ts). Without requests, with best-effort work.
 */
const STRANGERS_s = 3;
/** What programs go on after the last window, so that what happened in it is read while they are there. */
const TAIL_s = 0.5;
/** Requests that fall due this shortly before a switch are not counted. */
const GUARD_s = 0.05;
/** One start serves many windows, so each crew is given more time than programs that serve a single way. */
const CREW_LEAD_s = 3;
/** The round of windows that are not counted. */
const LEARNING = -1;

const PRIORITY = policySchema.parse({ name: "priority" });
const NONE = policySchema.parse({ name: "none" });

/** Programs of a pair that are started together, for one way or for several. */
interface Crew {
  /** What its ways are compared with. */
  method: string;
  /** All are under MPS, or none is: what `alone` is, too, where it is beside ways under MPS. */
  mps: boolean;
  ways: readonly [Way, ...Way[]];
  /** Its ways are switched, `alone` among them; else it has one. */
  switched: boolean;
}

/** As people are told of it. */
function nameOf({ ways, method }: Crew): string {
  return ways.map(({ name }) => (name === ALONE && method === LIVE_MPS ? `${name} under MPS` : name)).join("; ");
}

/** What happens in a window: a crew is at work in one of its ways. */
interface Turn {
  crew: Crew;
  way: string;
  /** In a window of `alone` for this best-effort program, which has the GPU; without requests. */
  only?: Program;
}

/** The crews that these ways take. */
function crewsOf(ways: readonly Way[]): Crew[] {
  const alone = ways.find(({ name }) => name === ALONE);
  const others = ways.filter(({ together }) => together);
  if (!alone || others.length === 0) return [];
  const switched = (mps: boolean): Way[] => others.filter((way) => isSwitchable(way) && way.mps === mps);
  const underMps = [alone, ...switched(true)] as const;
  return [
    { method: LIVE, mps: false, ways: [alone, ...switched(false)], switched: true },
    // What Rigel does under MPS is over alone under MPS; MPS without it is over alone without.
    ...(others.some(({ policy, mps }) => policy && mps)
      ? [{ method: LIVE_MPS, mps: true, ways: underMps, switched: true }]
      : []),
    ...others
      .filter((way) => !isSwitchable(way))
      .map((way): Crew => ({
        method: way.policy && way.mps ? LIVE_MPS : LIVE,
        mps: way.mps,
        ways: [way],
        switched: false,
      })),
  ];
}

/** All rounds of the ways of a pair that take turns. One job; on the simulated GPU, which is under MPS or is not, one for each. */
export function liveJobs(bed: Bed, pair: Pair, ways: readonly Way[]): Job[] {
  const crews = crewsOf(ways);
  const parts = bed.simulated ? [false, true].map((mps) => crews.filter((crew) => crew.mps === mps)) : [crews];
  return parts.filter((part) => part.length > 0).map((part) => liveJob(bed, pair, part));
}

function liveJob(bed: Bed, pair: Pair, crews: readonly Crew[]): Job {
  const lead_s = (timing: Timing): number => timing.lead_s + CREW_LEAD_s * crews.length;
  return {
    pair: pair.name,
    title: titleOf(pair, crews),
    seconds: (timing) => lead_s(timing) + (windowsOf(pair, crews, timing).at(-1)?.to_s ?? 0) + AROUND_s,
    run: async (timing) => await runLive(bed, pair, crews, lead_s(timing), windowsOf(pair, crews, timing)),
  };
}

function titleOf(pair: Pair, crews: readonly Crew[]): string {
  return `${pair.name}, live: ${crews.map(nameOf).join("; ")}`;
}

function windowsOf(
  pair: Pair,
  crews: readonly Crew[],
  { rounds, duration_s, window_s, learn_s }: Timing,
): Window<Turn>[] {
  const turns = crews.flatMap((crew) =>
    crew.ways.flatMap(({ name: way }): Turn[] => [
      { crew, way },
      ...(way === ALONE ? pair.best.map((only) => ({ crew, way, only })) : []),
    ]),
  );
  const learning = turns
    .filter(({ crew, way }) => crew.switched && policyOf(crew, way)?.name === "slo")
    .map((turn, index): Window<Turn> => {
      const to_s = (index + 1) * learn_s;
      return { way: turn, round: LEARNING, turn: -1, from_s: to_s - learn_s, counted_s: to_s, to_s };
    });
  const learned = learning.at(-1)?.way;
  const isOther = ({ crew }: Turn, after = learned): boolean => after !== undefined && after.crew !== crew;
  const [first] = turns;
  // Windows divide the duration, so that a way and round has as many seconds as are told of it.
  const cycles = Math.max(1, Math.round(duration_s / window_s));
  const begin_s = learning.length * learn_s + (first && isOther(first) ? DRAIN_s : 0);
  const rest = schedule(turns, {
    rounds,
    cycles,
    window_s: duration_s / cycles,
    // Steps a second of trainings alone differ by 0.4% from window to window (standard deviation, an H200).
    once: ({ only }) => only !== undefined,
    settle_s: (way, after) => SETTLE_s + (isOther(way, after) && heedsStrangers(way.crew) ? STRANGERS_s : 0),
    gap_s: (way, after) => (isBare(after.crew) ? QUEUE_s : way.crew === after.crew ? 0 : DRAIN_s),
  }).map((window) => ({
    ...window,
    from_s: begin_s + window.from_s,
    counted_s: begin_s + window.counted_s,
    to_s: begin_s + window.to_s,
  }));
  return [...learning, ...rest];
}

/** A crew whose programs share the GPU without Rigel. */
function isBare({ switched, ways: [{ policy }] }: Crew): boolean {
  return !switched && !policy;
}

/** A crew with time slices of Rigel's. */
function heedsStrangers({ switched, mps }: Crew): boolean {
  return switched && !mps;
}

function policyOf({ ways }: Crew, name: string): Policy | undefined {
  return ways.find((way) => way.name === name)?.policy;
}

/** What became of a crew. */
interface Worked {
  logs: Map<string, Log>;
  /** By the windows in which its way was put into force, and what Rigel counted in them. */
  switches: Map<Window<Turn>, Switch>;
  /** By way: each runs in the windows of its own alone. */
  loops: Map<string, SloLoop>;
}

/** Programs of a crew that are started by one launch, or without Rigel. */
interface Part {
  crew: Crew;
  worked: Worked;
  runs: Run[];
  /** That of the launch; undefined without Rigel. */
  policy: Policy | undefined;
}

/**
 * A crew is one launch. But where it shares the GPU without Rigel, its high program is a launch of its own with policy none, which leaves
 * everything as it is and tells how long requests wait, as in `time slicing`.
 */
function partsOf(crew: Crew, worked: Worked, runs: Run[]): Part[] {
  if (!isBare(crew)) return [{ crew, worked, runs, policy: crew.ways[0].policy ?? PRIORITY }];
  return [
    { crew, worked, runs: runs.filter(({ name }) => name === HIGH), policy: NONE },
    { crew, worked, runs: runs.filter(({ name }) => name !== HIGH), policy: undefined },
  ];
}

async function runLive(
  bed: Bed,
  pair: Pair,
  crews: readonly Crew[],
  lead_s: number,
  windows: readonly Window<Turn>[],
): Promise<Found> {
  const start_ms = Date.now() + lead_s * 1000;
  const clock = clockFrom(lead_s);
  const due_s = dueTimes(bed, windows);
  const end_s = windows.at(-1)?.to_s ?? 0;
  const over = new AbortController();
  const announced = announce(windows, clock, over.signal);
  const done = new Map<Crew, Worked>(
    crews.map((crew) => [crew, { logs: new Map(), switches: new Map(), loops: new Map() }]),
  );
  const parts = [...done].flatMap(([crew, worked]) => {
    const runs = [pair.high, ...pair.best].map((program): Run => {
      const env = environmentOf(bed, { ...crew.ways[0], mps: crew.mps }, program);
      const common = { program, duration_s: end_s + TAIL_s, env };
      if (program !== pair.high)
        return { ...common, name: program.name, spells_s: pausesOf(spellsOf(windows, crew, program)) };
      const own_s = windows.flatMap((window, index) => (window.way.crew === crew ? (due_s[index] ?? []) : []));
      return { ...common, name: HIGH, due_s: own_s, more: moreOf(bed.load.arrivals) };
    });
    return partsOf(crew, worked, runs);
  });
  const failures: Failure[] = [];
  const interruptions: Interrupted[] = [];
  const fail = ({ crew, runs }: Part, failure: Omit<Failure, "title">): void => {
    // A crew without Rigel has two parts, which may both fail.
    const title = isBare(crew)
      ? `${titleOf(pair, [crew])} (${runs.map(({ name }) => name).join(", ")})`
      : titleOf(pair, [crew]);
    failures.push({ title, ...failure });
    if (crews.length > 1) progress(`${title}: ${failure.problem}; the others go on`);
  };
  const ended = await Promise.allSettled(
    parts.map(async (part) => {
      const { worked } = part;
      try {
        const ran = await work(bed, part, windows, { start_ms, clock });
        for (const [name, log] of ran.logs) worked.logs.set(name, log);
      } catch (thrown) {
        if (thrown instanceof Interrupted) {
          interruptions.push(thrown);
          for (const [name, log] of thrown.ran?.logs ?? []) worked.logs.set(name, log);
        } else if (thrown instanceof RunFailed || thrown instanceof RigelError) fail(part, failureOf(thrown));
        else throw thrown;
      }
    }),
  );
  over.abort();
  await announced;
  for (const one of ended) if (one.status === "rejected") throw one.reason;
  // What the others of a crew measured without one that failed is not what it is called.
  const whole = new Map([...done].filter(([, { logs }]) => logs.size === 1 + pair.best.length));
  const [interrupted] = interruptions;
  if (interrupted && whole.size === 0 && failures.length === 0) throw interrupted;
  const stopped_s = interrupted ? (interrupted.at_ms - start_ms) / 1000 : Number.POSITIVE_INFINITY;
  const { measurements, left } = measure(pair, windows, stopped_s, done, whole);
  const loops = [...whole].flatMap(([crew, worked]) =>
    [...worked.loops].map(([way, loop]) => ({
      pair: pair.name,
      way,
      method: crew.method,
      ...loop.report(),
    })),
  );
  const without = leftText(left);
  const said = [
    [`${measurements.length} windows`, without ?? []].flat().join(", "),
    ...loops.map((loop) => `${loop.way} ended with ${settled(loop)}`),
  ].join("; ");
  const logs = [...whole].flatMap(([crew, worked]) =>
    [...worked.logs].map(([name, log]): [string, Log] => [`${nameOf(crew)}: ${name}`, log]),
  );
  const notes = [
    ...(stopped_s < end_s ? [interruptedText(stopped_s, end_s)] : []),
    ...(without === undefined ? [] : [`windows: ${without}`]),
  ];
  const all = found({ logs: new Map(logs), clients: [] }, { measurements, loops, failures, notes, said });
  // What programs that are ready a little late lose is of the time in which nothing is counted.
  const [first] = windows;
  const spare_s = first?.round === LEARNING ? (first.to_s - first.from_s) / 2 : 0;
  if (all.late_s > spare_s) return all;
  if (measurements.length === 0 && !interrupted && failures.length === 0)
    throw new RunFailed(`nothing was measured: ${without ?? "there was no window"}`, []);
  if (all.late_s === 0) return all;
  const late = `programs were ready ${all.late_s.toFixed(1)} s into the time to find settings, raise --lead`;
  return { ...all, late_s: 0, short_s: all.late_s, notes: [...notes, late], said: `${said}; ${late}` };
}

/** When requests fall due in each window: the same before and after counting begins in every window of a turn through the ways. */
function dueTimes(bed: Bed, windows: readonly Window<Turn>[]): number[][] {
  const { rate_per_s, arrivals, seed } = bed.load;
  return windows.map(({ way: { only }, round, turn, from_s, counted_s, to_s }) => {
    if (only) return [];
    const begin_s = round === LEARNING ? from_s : counted_s - SETTLE_s;
    return arrivalTimes(arrivals, rate_per_s, seed + turn, 0, to_s - begin_s).map((due) => begin_s + due);
  });
}

/** When a best-effort program of a crew works. */
function spellsOf(windows: readonly Window<Turn>[], crew: Crew, program: Program): { from_s: number; to_s: number }[] {
  const spells: { from_s: number; to_s: number }[] = [];
  for (const { way: turn, from_s, to_s } of windows) {
    if (turn.crew !== crew || (turn.way === ALONE && turn.only !== program)) continue;
    const last = spells.at(-1);
    if (last?.to_s === from_s) last.to_s = to_s;
    else spells.push({ from_s, to_s });
  }
  return spells;
}

/** As a program reads them: seconds of pause and work in turn. */
function pausesOf(spells: ReturnType<typeof spellsOf>): number[] {
  return gapsOf(spells.flatMap(({ from_s, to_s }) => [from_s, to_s]));
}

/** Runs a part to its end. */
async function work(
  bed: Bed,
  part: Part,
  windows: readonly Window<Turn>[],
  { start_ms, clock }: { start_ms: number; clock: Clock },
): Promise<Ran> {
  const { crew, runs, policy } = part;
  const { mps } = crew;
  const start = { at_ms: start_ms };
  if (!policy) return await bed.runner.bare(runs, start, { mps });
  let driver: Promise<void> | undefined;
  const started = (segment: Segment, _start_ms: number, ended: AbortSignal): void => {
    driver = drive(bed, part, segment, windows, clock, ended);
    // Waited for below, once the programs have ended.
    driver.catch(() => {});
  };
  try {
    return await bed.runner.governed(runs, start, policy, { mps, started });
  } finally {
    await driver;
  }
}

/** Why windows were left out, and how many. */
type Left = Map<string, number>;

function leftText(left: Left): string | undefined {
  return left.size > 0 ? [...left].map(([why, count]) => `${count} left out: ${why}`).join(", ") : undefined;
}

/** What the programs of whole crews measured in the windows that were over by then; what others of `crews` did may show in those. */
function measure(
  pair: Pair,
  windows: readonly Window<Turn>[],
  stopped_s: number,
  crews: ReadonlyMap<Crew, Worked>,
  whole: ReadonlyMap<Crew, Worked>,
): { measurements: Measurement[]; left: Left } {
  const ready_s = Math.max(
    0,
    ...[...crews.values()].flatMap(({ logs }) => [...logs.values()].map((log) => log.late_s)),
  );
  const requests = [...crews.values()].flatMap(({ logs }) => logs.get(HIGH)?.requests ?? []);
  const trainings = [...crews].flatMap(([crew, { logs }]) =>
    pair.best.map((program) => ({
      crew,
      program,
      spells: spellsOf(windows, crew, program),
      ends_s: logs.get(program.name)?.ends_s ?? [],
    })),
  );
  const left: Left = new Map();
  const leave = (why: string): [] => {
    left.set(why, (left.get(why) ?? 0) + 1);
    return [];
  };
  const measurements = windows.flatMap((window, index): Measurement[] => {
    const { way: turn, round, from_s, counted_s, to_s } = window;
    const { crew, way, only } = turn;
    const worked = whole.get(crew);
    if (!worked || round === LEARNING || to_s > stopped_s) return [];
    const { logs, switches } = worked;
    const made = switches.get(window);
    const switched_s = crew.switched ? (made?.at_s ?? Number.POSITIVE_INFINITY) : from_s;
    if (from_s < ready_s) return leave("begun before all programs were ready");
    // It is not the way that it is called.
    if (switched_s > from_s + LATE_s) return leave("switched too late");
    if (windows[index - 1]?.way !== turn && beginsQueued(requests, window))
      return leave("begun with requests of the way before queued up");
    if (trainings.some(({ spells, ends_s }) => outlasts(ends_s, spells, window)))
      return leave("begun with a step of the way before under way");
    const base = { pair: pair.name, method: crew.method, round, window: { from_s, counted_s, to_s, switched_s } };
    const best = trainings
      .filter((training) => training.crew === crew && (!only || training.program === only))
      .map(({ program: { name }, spells, ends_s }) => {
        const began_s = spells.find((spell) => spell.to_s >= to_s)?.from_s;
        return { program: name, ...counted(ends_s, counted_s, to_s, began_s), ...made?.off.get(name) };
      });
    if (only) return [{ ...base, way, requests: [], requests_s: 0, best }];
    const served = within(logs.get(HIGH)?.requests ?? [], window, GUARD_s);
    const requests_s = to_s - GUARD_s - counted_s;
    const waits = made ? { waits: made.waits } : {};
    return [{ ...base, way, requests: served, requests_s, best: way === ALONE ? [] : best, ...waits }];
  });
  return { measurements, left };
}

/** What a control loop found. */
function settled(report: SloReport): string {
  const { settings, over_alone, held_s } = report;
  const delayed = over_alone ? `, delayed x${over_alone.p50.toFixed(2)} x${over_alone.p99.toFixed(2)}` : "";
  return `${settingsText(settings)}${delayed}, ${changesText(report)}, held ${held_s.toFixed(1)} s`;
}

/** Seconds since the start. */
type Clock = () => number;

/** Of a start in so many seconds, by a clock that nobody sets: programs keep to such a one from their start on, too. */
function clockFrom(lead_s: number): Clock {
  const start_ms = performance.now() + lead_s * 1000;
  return () => (performance.now() - start_ms) / 1000;
}

/** False: it is over before. */
async function until(at_s: number, clock: Clock, over: AbortSignal): Promise<boolean> {
  for (;;) {
    const left_ms = (at_s - clock()) * 1000;
    if (over.aborted || left_ms <= 0) return !over.aborted;
    await Bun.sleep(Math.min(left_ms, 100));
  }
}

/** Says where the run is. */
async function announce(windows: readonly Window<Turn>[], clock: Clock, over: AbortSignal): Promise<void> {
  const end_s = windows.at(-1)?.to_s ?? 0;
  for (const [index, { way, round, from_s, to_s }] of windows.entries()) {
    if (round !== LEARNING && round === windows[index - 1]?.round) continue;
    if (!(await until(from_s, clock, over))) return;
    if (round === LEARNING) progress(`${way.way} has ${(to_s - from_s).toFixed(0)} s to find its settings`);
    else
      progress(
        `round ${round + 1} of ${(windows.at(-1)?.round ?? 0) + 1}; ${(end_s - from_s).toFixed(0)} s of this run left`,
      );
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

/** The latest requests of the high program, taken apart, after as many as are given by slot; and how many there have been. */
function waitsOf(segment: Segment, since: ReadonlyMap<number, bigint>): { waits: Wait[]; counts: Map<number, bigint> } {
  const counts = new Map<number, bigint>();
  const waits = segment.slots().flatMap((slot): Wait[] => {
    if (slot.class !== "high") return [];
    const { waited, latest } = segment.waits(slot, since.get(slot.index));
    counts.set(slot.index, waited);
    // There is one, which has another slot in another launch.
    return latest.map((wait) => ({ ...wait, client: 0 }));
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

/** Puts the settings of each window of a crew into force at its beginning, and keeps what Rigel counts in it. */
async function drive(
  bed: Bed,
  { crew, runs, worked: { switches, loops } }: Part,
  segment: Segment,
  windows: readonly Window<Turn>[],
  clock: Clock,
  over: AbortSignal,
): Promise<void> {
  // The end of the launch opens all gates, and that must not be undone.
  const { shutdown: _, ...defaults } = segment.settings();
  const set = (policy: Policy): void => {
    if (!crew.switched) return;
    // What slo was just trying is not to be put back by the clients later.
    segment.putBack();
    segment.apply(defaults);
    segment.configure({ ...policySettings(policy, [], bed.native), policy: policy.name });
  };
  // Streams get their priorities by the policy in force when a program attaches; warming up must not be held back.
  while (!over.aborted && clock() < -1 && segment.slots().length < runs.length) await Bun.sleep(20);
  if (!over.aborted) set(NONE);
  const at = async (at_s: number): Promise<boolean> => await until(at_s, clock, over);
  for (const window of windows) {
    const { way: turn, from_s, counted_s, to_s } = window;
    if (turn.crew !== crew) continue;
    if (!(await at(from_s))) return;
    const policy = policyOf(crew, turn.way);
    set(policy ?? NONE);
    const loop = policy?.name === "slo" ? (loops.get(turn.way) ?? new SloLoop(segment, targetOf(policy))) : undefined;
    if (loop) {
      loops.set(turn.way, loop);
      loop.resume();
    }
    try {
      const made: Switch = { at_s: clock(), waits: [], off: new Map() };
      switches.set(window, made);
      if (!(await at(counted_s))) return;
      // The segment has the last few hundred alone.
      let { counts } = waitsOf(segment, new Map());
      const before = offOf(segment, new Map());
      for (let at_s = counted_s; at_s < to_s;) {
        at_s = Math.min(to_s, at_s + COLLECT_s);
        if (!(await at(at_s))) return;
        const latest = waitsOf(segment, counts);
        made.waits.push(...latest.waits);
        ({ counts } = latest);
      }
      made.off = offOf(segment, before);
    } finally {
      loop?.pause();
    }
  }
}
