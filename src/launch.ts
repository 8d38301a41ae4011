/**
 * launch.ts: runs the phases of a plan: starts the clients under the library, sees them attach, counts, stops them.
 *
 * A launch ends when `duration_s` is over, or when every high client has ended and so has every best-effort replay with
 * a number of iterations; without high clients when all have ended. Whatever happens, no client outlives a launch and no
 * file of it stays behind, unless `rigel run` has joined its segment (guard.ts sees to that when the launcher itself is killed).
 * Only a process that has left both its client's group and its environment cannot be told from others, and one of another user
 * cannot be ended.
 */

import { rmSync } from "node:fs";
import { basename, join } from "node:path";
import { type Attaching, problemOf } from "./attachment.ts";
import { clientEnvironment } from "./client-environment.ts";
import { deviceEnvironment, type Environment } from "./device.ts";
import { diagnose } from "./doctor.ts";
import type { Finding } from "./doctor-checks.ts";
import { RigelError, reason } from "./errors.ts";
import { Durations, durationsFolder } from "./durations.ts";
import { type ClientShares, GpuShares, MeanShares } from "./gpu-share.ts";
import { Guard } from "./guard.ts";
import { HangWatch } from "./hang-watch.ts";
import { Interrupt, SIGNAL_STATUS } from "./interrupt.ts";
import { hasGuests, manifestOf, removeLeft } from "./join.ts";
import { prefixed, progress } from "./log.ts";
import { sizeText } from "./memory.ts";
import { type Match, matchProfiles } from "./match.ts";
import { Mps, type Sharing, sharedFault } from "./mps.ts";
import { RUN_MARK } from "./mps-daemon.ts";
import type { Native } from "./native.ts";
import { type Phase, type Plan, type PlannedClient, sharingNotes } from "./plan.ts";
import { policySettings, targetOf } from "./policy.ts";
import { living, startedWith } from "./proc.ts";
import { ClientProcess } from "./process.ts";
import { Recording } from "./recording.ts";
import { type ClientReport, type Mode, type Report, compared, memoryReport } from "./report.ts";
import { type MemoryUse, Segment } from "./segment.ts";
import { Changes } from "./launch-changes.ts";
import { LoopKeeper, type SloReport } from "./slo-loop.ts";
import { isMissed } from "./show.ts";
import { measured } from "./stats.ts";
import { writeTrace } from "./trace.ts";
import { type Snapshot, guardOf, lifetime_s, snapshotOf, usageOf } from "./tally.ts";

interface LaunchOptions {
  /** Folder for the segment. */
  segmentFolder: string;
  /** How long to wait for every client's first work before counting begins without it. */
  start_timeout_s: number;
  /** Whoever handles signals over several launches; without it a launch does so itself. */
  interrupt?: Interrupt;
  /** Takes the lines that clients print; without it they go to standard error. */
  show?: (name: string, line: string) => void;
  /** Where what the clients did last is written at the end of every phase: the last one's stays. */
  trace?: string | undefined;
  /** The clients of a phase have been started: the settings of its segment may be changed from now on. */
  started?: (segment: Segment) => void;
  /** Whoever is called back by `started` runs the control loop of policy slo, if any. */
  ownLoop?: boolean;
  /** To be removed, too, when the launcher is killed. */
  files?: readonly string[];
  /** Folder in which what clients learn of their kernels is kept; without it the user's. */
  durations?: string;
  /** Asked again and again: whether the launch is to end, as if its duration were over. */
  over?: () => boolean;
}

interface Outcome {
  report: Report;
  exitStatus: number;
}

const POLL_ms = 20;
/** A client that fails within this has hardly begun. */
const AT_ONCE_ms = 10_000;
/** After how long a client that has not attached is told about. */
const UNATTACHED_ms = 5000;
/** How often it is asked what clients have of the GPU. */
const SHARES_ms = 1000;
/** How often a client that has not attached is looked at from outside, and dead clients are cleared away. */
const LOOK_ms = 500;

/** The launch's sharing. Where Rigel chose to start a daemon unasked and that fails, clients share in time slices. */
async function openMps({ config, sharing, clients, notes }: Plan, interrupt: Interrupt): Promise<Mps> {
  const where = `${config.file}: sharing`;
  try {
    return await Mps.open(sharing, clients, where, interrupt);
  } catch (thrown) {
    if (config.sharing !== "auto" || sharing.daemon !== "private") throw thrown;
    notes.push(`time slices instead, as the MPS daemon did not start (${reason(thrown)})`);
    return await Mps.open({ mode: "time-slice", daemon: null, pipe_directory: null }, [], where, interrupt);
  }
}

function withoutMps(plan: Plan, sharing: Sharing): Plan {
  const clients = plan.clients.map((client) => ({ ...client, mps: false }));
  const here = new Map(clients.map((client) => [client.name, client]));
  const phases = plan.phases.map((phase) => ({
    ...phase,
    clients: phase.clients.map((client) => here.get(client.name) ?? client),
  }));
  return {
    ...plan,
    sharing,
    clients,
    phases,
    notes: [...new Set([...plan.notes, ...sharingNotes(clients, plan.config)])],
  };
}

/** Runs all phases in turn. A phase in which a client fails is the last one. */
export async function launch(plan: Plan, native: Native, options: LaunchOptions): Promise<Outcome> {
  if (!options.interrupt) {
    using interrupt = new Interrupt();
    return await launch(plan, native, { ...options, interrupt });
  }
  const { interrupt } = options;
  removeLeft(native, options.segmentFolder);
  await using mps = await openMps(plan, interrupt);
  if (mps.sharing.mode !== plan.sharing.mode) plan = withoutMps(plan, mps.sharing);
  const durations = new Durations(native, options.durations ?? durationsFolder(), plan.clients, plan.seeds);
  const done: PhaseResult[] = [];
  const notes = [...plan.notes];
  for (const [index, phase] of plan.phases.entries()) {
    if (plan.phases.length > 1) progress(`phase ${index + 1} of ${plan.phases.length}: ${title(phase)}`);
    const result = await runPhase(plan, phase, native, options, interrupt, mps, durations);
    done.push(result);
    notes.push(...result.notes);
    if (result.clients.length === 0) notes.push("the launch was asked to end before its clients were started");
    if (interrupt.signal || result.failed) {
      if (index + 1 < plan.phases.length)
        notes.push("the launch ended before its last phase; what is missing was not run");
      break;
    }
  }
  durations.save();
  const last = done.at(-1);
  if (!last) throw new Error("a plan without phases");
  if (last.failed) notes.push(`${last.failed.name} ${last.failed.text} in phase: ${title(last.phase)}`);
  const compare = plan.config.compare ? compared(merged(done)) : [];
  const { device } = plan;
  return {
    report: {
      schema: 1,
      device: { name: device.name, uuid: device.uuid, simulated: device.simulated },
      policy: last.policy,
      sharing: mps.sharing,
      mps: mps.sharing.mode === "mps",
      duration_s: Math.round(last.duration_s * 1000) / 1000,
      slo: last.slo && { ...last.slo, missed: isMissed(last.slo) },
      clients: compare.at(-1)?.clients ?? last.clients,
      compare,
      notes,
      findings: interrupt.signal ? [] : await findingsOn(plan, last, native, options.segmentFolder),
    },
    exitStatus: interrupt.signal ? SIGNAL_STATUS[interrupt.signal] : (last.failed?.status ?? (last.untraced ? 1 : 0)),
  };
}

/** What may be the reason where a client has not attached, or failed at once. */
async function findingsOn(plan: Plan, last: PhaseResult, native: Native, folder: string): Promise<Finding[]> {
  const bad = plan.clients.find(
    ({ name }) =>
      (last.failed?.name === name && last.failed.after_ms < AT_ONCE_ms) ||
      last.clients.some((client) => client.name === name && client.attach_problem !== null),
  );
  if (!bad) return [];
  const environment = { ...process.env, ...bad.env };
  const { simulated, uuid } = bad.device;
  const findings = await diagnose(native, {
    segmentFolder: folder,
    environment,
    simulated,
    device: simulated ? "simulated" : uuid,
  });
  return findings.filter(({ status }) => status !== "ok");
}

function title(phase: Phase): string {
  const names = phase.clients.map(({ name }) => name).join(" + ");
  return `${names} ${phase.mode === "alone" ? "alone" : `together, ${phase.mode}`}`;
}

/** One entry per mode: each client's own phase alone becomes part of one. */
function merged(done: readonly PhaseResult[]): { mode: Mode; clients: ClientReport[] }[] {
  const byMode = new Map<Mode, ClientReport[]>();
  for (const { phase, clients } of done) byMode.set(phase.mode, [...(byMode.get(phase.mode) ?? []), ...clients]);
  return [...byMode].map(([mode, clients]) => ({ mode, clients }));
}

interface PhaseResult {
  phase: Phase;
  clients: ClientReport[];
  /** In force at its end. */
  policy: Report["policy"];
  duration_s: number;
  /** What the control loop of policy slo did. */
  slo: SloReport | null;
  notes: string[];
  /** A trace was asked for and could not be written. */
  untraced: boolean;
  /** The first client that failed. */
  failed: { name: string; status: number; text: string; after_ms: number } | undefined;
}

/** How many this process has run, or is running: each has a segment of its own. */
let phasesRun = 0;

/** Each has a simulated GPU of its own, which goes with its segment: who has joined one may be at work as the next begins. */
function inPhase(plan: Plan, number: number): Plan {
  const { state } = plan.simulation;
  return number === 0
    ? plan
    : { ...plan, simulation: { ...plan.simulation, state: `${state}-${number}`, name: state } };
}

async function runPhase(
  planned: Plan,
  phase: Phase,
  native: Native,
  options: LaunchOptions,
  interrupt: Interrupt,
  mps: Mps,
  durations: Durations,
): Promise<PhaseResult> {
  const number = phasesRun++;
  const plan = inPhase(planned, number);
  const file = `rigel-${process.getuid?.() ?? 0}-${process.pid}-${number}`;
  const segment = Segment.create(native, join(options.segmentFolder, file));
  // No other process has this in its environment.
  const mark = `RIGEL_LAUNCH=${basename(segment.path)}`;
  const leave = segment.lock("member");
  const counts = countsOf(phase.clients, segment.path);
  const recordings = new Map<string, Recording>();
  using guard = new Guard(mark, [...counts.values(), ...(options.files ?? [])], {
    guest: RUN_MARK,
    shared: { mark: `RIGEL_SEGMENT=${segment.path}`, files: [segment.path, plan.simulation.state] },
  });
  const running: Running[] = [];
  const cleanUp = (): void => {
    try {
      for (const { child } of running) child.signal("SIGKILL");
      killMarked(mark);
    } finally {
      leave?.();
      for (const recording of recordings.values()) recording.remove();
      // Whoever has joined goes on with it, and removes it.
      segment.disown();
      // Of several phases each would take its room until the last has ended.
      const discard = options.started === undefined;
      if (!hasGuests(segment, mark) && segment.removeIfAlone({ discard }))
        rmSync(plan.simulation.state, { force: true });
      else segment.closeGates();
    }
  };
  process.on("exit", cleanUp);
  try {
    for (const [name, path] of counts) recordings.set(name, Recording.create(native, path, false));
    const { policy } = plan.config;
    const settings = policySettings(policy, phase.clients, native);
    segment.configure({ ...settings, policy: phase.policy, trace: plan.config.recorder });
    if (phase.policy === "orion") enterProfiles(segment, phase.clients, native);
    durations.seed(segment, phase.clients);
    segment.target = targetOf(policy);
    segment.manifest = manifestOf(plan, phase, mps);
    const changes = new Changes(segment, { ...policy, name: phase.policy }, phase.clients);
    using keeper = new LoopKeeper(segment, native, true, options.ownLoop);
    const width = Math.max(...plan.clients.map((client) => client.name.length));
    // Whoever has asked for the end while MPS was being started does not want them any more.
    for (const client of interrupt.signal ? [] : phase.clients) {
      const index = plan.clients.findIndex(({ name }) => name === client.name);
      const own = options.show;
      const show = own ? (line: string) => own(client.name, line) : prefixed(client.name, index, width);
      const recording = recordings.get(client.name)?.path;
      const env = {
        ...environmentOf(plan, phase, client, native, segment, mps),
        ...(recording !== undefined && { RIGEL_RECORD: recording }),
      };
      const { name, argv, cwd, isReplay } = client;
      const where = `${plan.config.file}: ${plan.config.fieldNames[index]?.client}${isReplay ? "" : ".command[0]"}`;
      const marks = [mark, `RIGEL_NAME=${name}`];
      const child = new ClientProcess({ name, where, argv, env, marks, cwd, hideOutput: isReplay }, show);
      guard.watch(child.pid);
      running.push({
        client,
        env,
        child,
        attached: false,
        launched_ms: undefined,
        seen: undefined,
        told: false,
        endTold: false,
      });
    }
    interrupt.clients = [...interrupt.clients, ...running.map(({ child }) => child)];
    options.started?.(segment);
    await using hangs =
      plan.config.hang_s === 0
        ? undefined
        : new HangWatch({ segment, threshold_s: plan.config.hang_s, say: (line) => progress(`hang: ${line}`) });
    const counted = await count(plan, running, segment, native, options, interrupt, changes, guard);
    // What shows a hang is kept before anybody is ended.
    await hangs?.[Symbol.asyncDispose]();
    const slo = keeper.end() ?? null;
    const policyAtEnd = changes.policy();
    // Whoever runs the loop changes policies by itself.
    const changed = options.ownLoop ? [] : changes.notes();
    const elsewhere = await missedMps(running, segment, mps);
    durations.collectRequests(segment, phase.clients);
    segment.openGates();
    await Promise.all(running.map(({ child }) => child.stop(interrupt.signal)));
    durations.collect(segment, phase.clients);
    const untraced = options.trace === undefined ? undefined : await traced(segment, options.trace);
    const failures = running
      .flatMap(({ client, attached, child: { name, exit, stopped, startedAt_ms } }) =>
        exit && exit.status !== 0 && !stopped
          ? [{ name, ...exit, client, attached, after_ms: exit.at_ms - startedAt_ms }]
          : [],
      )
      .toSorted((a, b) => a.at_ms - b.at_ms);
    const duration_s = (counted.to_ms - counted.from_ms) / 1000;
    const matches = await matchesOf(running, recordings);
    return {
      phase,
      policy: policyAtEnd,
      duration_s,
      slo,
      notes: [
        ...changed,
        ...notesOf(running, segment, duration_s, interrupt.signal ? undefined : plan.config.duration_s),
        ...notesOnMemory(running, counted),
        ...(hangs?.notes ?? []),
        ...notesOnContexts(segment),
        ...mpsNotes(failures, elsewhere, mps),
        ...(untraced === undefined ? [] : [`no trace was written: ${untraced}`]),
      ],
      untraced: untraced !== undefined,
      clients: running.map((one) => ({
        ...reportOf(one, counted, segment, elsewhere),
        match: matches.get(one.client.name) ?? null,
      })),
      failed: failures[0],
    };
  } finally {
    try {
      await Promise.all(running.map(({ child }) => child.stop("SIGKILL")));
      for (const { child } of running) guard.forget(child.pid);
    } finally {
      interrupt.clients = interrupt.clients.filter((client) => !running.some(({ child }) => child === client));
      process.off("exit", cleanUp);
      cleanUp();
    }
  }
}

/** A trace that cannot be written is no reason to lose the report; why, if so. */
async function traced(segment: Segment, path: string): Promise<string | undefined> {
  try {
    const { events } = await writeTrace([segment], path);
    progress(`${path}: ${events} events; open it at https://ui.perfetto.dev`);
    return undefined;
  } catch (thrown) {
    if (!(thrown instanceof RigelError)) throw thrown;
    progress(thrown.message);
    return thrown.message;
  }
}

/** What policy orion knows of the clients' kernels. A replay says of each launch itself what it needs. */
function enterProfiles(segment: Segment, clients: readonly PlannedClient[], native: Native): void {
  for (const { name, profiles, device } of clients.filter(({ isReplay }) => !isReplay))
    for (const profile of profiles) {
      const refused = native.enterProfile(segment.path, profile, device.sms);
      if (refused !== null) throw new RigelError("profile", `${name}: ${refused}`);
    }
}

/** Ends what a client has started under another name and out of its group. */
function killMarked(mark: string): void {
  for (const { pid } of living().filter((one) => startedWith(one.pid, [mark])))
    try {
      process.kill(pid, "SIGKILL");
    } catch {
      // It has just ended, or belongs to somebody else by now.
    }
}

/** What a reader of the numbers should know about how they came about. */
function notesOf(running: readonly Running[], segment: Segment, took_s: number, asked_s: number | undefined): string[] {
  const notes = running.flatMap(({ client: { name }, child: { leftBehind } }) => {
    if (leftBehind.length === 0) return [];
    const left = leftBehind.slice(0, 5).map((one) => `${one.name} ${one.pid}`);
    if (leftBehind.length > left.length) left.push(`${leftBehind.length - left.length} more`);
    return [
      `${name}: its command ended but not what it had started (${left.join(", ")}), which was ended with the launch; ` +
        "let the command wait for its work",
    ];
  });
  if (asked_s !== undefined && took_s < asked_s)
    notes.push(`counting took ${took_s.toFixed(1)} s of ${asked_s} s, as the clients that decide had ended`);
  if (segment.overwritten > 0)
    notes.push(
      `${segment.overwritten} processes are missing from the counts: the segment has room for ${segment.capacity}, and ` +
        "other clients needed their places",
    );
  return notes;
}

/** Threads whose device changed, and handles used in a wrong context: once for each client. */
function notesOnContexts(segment: Segment): string[] {
  const clients = segment.table("clients");
  const sum = new Map<string, { moves: number; misuses: number }>();
  for (const { index, name } of segment.slots()) {
    const { moves, misuses } = sum.get(name) ?? { moves: 0, misuses: 0 };
    sum.set(name, {
      moves: moves + Number(clients.long(index, "moves")),
      misuses: misuses + Number(clients.long(index, "misuses")),
    });
  }
  return [...sum].flatMap(([name, { moves, misuses }]) => [
    ...(moves > 0
      ? [`${name}: in ${moves} requests a thread launched on another device than in its request before`]
      : []),
    ...(misuses > 0
      ? [
          `${name}: ${misuses} calls with a handle in a context that it does not belong to; rigel contexts shows them while it runs`,
        ]
      : []),
  ]);
}

/** Who was refused memory because of its limit; one that would have let the last allocation through was set later. */
function notesOnMemory(running: readonly Running[], { memory }: Counted): string[] {
  return running.flatMap(({ client: { name } }) => {
    const { limit_bytes = null, denied = 0, last_denied } = memory.get(name) ?? {};
    if (denied === 0 || last_denied === undefined) return [];
    const { bytes, used_bytes } = last_denied;
    const limit =
      limit_bytes === null || used_bytes + bytes <= limit_bytes
        ? "the memory limit that it had then"
        : `its memory limit of ${sizeText(limit_bytes)}`;
    return [
      `${name}: ${denied} ${denied === 1 ? "allocation was" : "allocations were"} refused at ${limit}; ` +
        `the last one asked for ${sizeText(bytes)} with ${sizeText(used_bytes)} in use`,
    ];
  });
}

/** Clients that run, were meant to run under the launch's own MPS daemon, and are no clients of it. */
async function missedMps(running: readonly Running[], segment: Segment, mps: Mps): Promise<ReadonlySet<string>> {
  const meant = running.filter(({ client, child, attached }) => {
    const own = client.env["CUDA_MPS_PIPE_DIRECTORY"] !== undefined;
    return client.mps && !client.device.simulated && !own && attached && !child.exit;
  });
  const listed = meant.length > 0 ? await mps.processes() : undefined;
  if (!listed) return new Set();
  const live = segment.slots().filter(({ finished }) => !finished);
  return new Set(
    meant.flatMap(({ client: { name } }) => {
      const pids = live.filter((slot) => slot.name === name).map(({ pid }) => pid);
      return pids.length > 0 && !pids.some((pid) => listed.has(pid)) ? [name] : [];
    }),
  );
}

/** What MPS has to do with how the clients ended, with what it has logged itself. */
function mpsNotes(
  failures: readonly { name: string; text: string; at_ms: number; client: PlannedClient; attached: boolean }[],
  elsewhere: ReadonlySet<string>,
  mps: Mps,
): string[] {
  // Who has not initialised CUDA has nothing to do with it, and the simulated GPU has no faults that others could share.
  const under = failures.filter(
    ({ name, client, attached }) => client.mps && attached && !client.device.simulated && !elsewhere.has(name),
  );
  const shared = sharedFault(under.map((failure) => ({ ...failure, gpu: failure.client.device.uuid })));
  return [
    ...[...elsewhere].map((name) => `${name}: was to run under MPS, but the daemon does not have it among its clients`),
    ...(shared === undefined ? [] : [shared]),
    ...(under.length > 0 ? mps.evidence() : []),
  ];
}

/** A client of a phase that is under way. */
interface Running {
  client: PlannedClient;
  env: Environment;
  child: ClientProcess;
  attached: boolean;
  /** When its first work was seen. */
  launched_ms: number | undefined;
  /** What was seen of it from outside, while it has not attached. */
  seen: { processes: number; mapped: number } | undefined;
  /** Whoever watches has been told that it has not attached. */
  told: boolean;
  /** And how it ended. */
  endTold: boolean;
  /** If it has not attached: what was known of it when counting ended. */
  unattached?: Attaching;
}

interface Counted {
  from_ms: number;
  to_ms: number;
  /** What had been counted before `from_ms`; undefined counts from the start. */
  before: Snapshot | undefined;
  after: Snapshot;
  /** At the end, by client name. */
  memory: ReadonlyMap<string, MemoryUse>;
  /** Of the GPU, since `from_ms`. */
  shares: MeanShares;
}

/** Waits for the clients to begin, then for the end of the launch. Returns with the clients still running. */
async function count(
  plan: Plan,
  running: Running[],
  segment: Segment,
  native: Native,
  options: LaunchOptions,
  interrupt: Interrupt,
  changes: Changes,
  guard: Guard,
): Promise<Counted> {
  const { duration_s, warmup_s } = plan.config;
  const started_ms = performance.now();
  let begun_ms: number | undefined;
  let looked_ms = started_ms;
  let window: Pick<Counted, "from_ms" | "before"> | undefined;
  const shares = new MeanShares();
  const gpus = new GpuShares(native, { interval_ms: 0 });
  const share = (): ClientShares => gpus.of(segment, snapshotOf(segment), segment.devices());
  // What it takes to load NVML is spent while the clients load, too.
  share();
  let shared_ms = Number.POSITIVE_INFINITY;
  const sleep = new Sleep([interrupt.raised, ...running.map(({ child }) => child.ended)]);
  for (;;) {
    const now_ms = performance.now();
    observe(running, segment, now_ms);
    for (const { child } of running) if (child.hasScattered()) guard.forget(child.pid);
    tellEnds(running);
    if (now_ms - looked_ms >= LOOK_ms) {
      looked_ms = now_ms;
      segment.reap();
      changes.look();
      look(running, native);
      tell(running, segment, now_ms);
    }
    if (interrupt.signal || isOver(running) || options.over?.()) break;
    if (begun_ms === undefined) {
      const late = running.filter(({ launched_ms, child }) => launched_ms === undefined && !child.exit);
      const timedOut = now_ms - started_ms >= options.start_timeout_s * 1000;
      if (late.length === 0 || timedOut) {
        begun_ms = now_ms;
        look(late, native);
        for (const one of late)
          progress(
            `${one.client.name}: no work in ${options.start_timeout_s} s (${problemOf(attaching(one), segment) ?? "attached, but idle"}); ` +
              "counting begins without it",
          );
      }
    }
    if (begun_ms !== undefined && !window && now_ms - begun_ms >= warmup_s * 1000) {
      window = { from_ms: now_ms, before: duration_s !== undefined || warmup_s > 0 ? snapshotOf(segment) : undefined };
      progress(duration_s === undefined ? "counting until the clients end" : `counting for ${duration_s} s`);
      share();
      shared_ms = now_ms;
    }
    if (now_ms - shared_ms >= SHARES_ms) {
      shares.add(share(), (now_ms - shared_ms) / 1000);
      shared_ms = now_ms;
    }
    const left_ms =
      window && duration_s !== undefined ? window.from_ms + duration_s * 1000 - now_ms : Number.POSITIVE_INFINITY;
    if (left_ms <= 0) break;
    await sleep.within(Math.min(POLL_ms, left_ms));
  }
  const to_ms = performance.now();
  if (window) shares.add(share(), (to_ms - shared_ms) / 1000);
  // Who was killed has not said that it ended.
  segment.reap();
  const after = snapshotOf(segment);
  const memory = segment.memory();
  observe(running, segment, to_ms);
  for (const one of running) {
    if (!one.child.exit) look([one], native);
    if (!one.attached) one.unattached = attaching(one);
  }
  return { from_ms: window?.from_ms ?? started_ms, to_ms, before: window?.before, after, memory, shares };
}

/** Takes over from the segment who has attached and who has launched work. */
function observe(running: Running[], segment: Segment, now_ms: number): void {
  const slots = segment.slots();
  for (const one of running) {
    if (one.launched_ms !== undefined) continue;
    const own = slots.filter((slot) => slot.name === one.client.name);
    const [first] = own;
    if (first && !one.attached) {
      one.attached = true;
      progress(`${one.client.name}: attached (process ${first.pid})`);
    }
    if (own.some((slot) => slot.launched)) one.launched_ms = now_ms;
  }
}

function look(running: Running[], native: Native): void {
  for (const one of running)
    // Right after the start, what is mapped may still be the launcher's own image.
    if (!one.attached && !one.child.exit && performance.now() - one.child.startedAt_ms >= LOOK_ms)
      one.seen = one.child.inspect(native.files.interposer);
}

/** Says once of each client that is late to attach what is known about it. */
function tell(running: Running[], segment: Segment, now_ms: number): void {
  for (const one of running) {
    if (one.told || one.attached || one.child.exit || now_ms - one.child.startedAt_ms < UNATTACHED_ms) continue;
    one.told = true;
    progress(`${one.client.name}: has not attached yet: ${problemOf(attaching(one), segment)}`);
  }
}

/** Says once of each client that has ended by itself how it did: others may go on for long. */
function tellEnds(running: Running[]): void {
  for (const one of running) {
    if (one.endTold || !one.child.exit) continue;
    one.endTold = true;
    progress(`${one.client.name}: ${one.child.exit.text}`);
  }
}

function attaching({ attached, env, seen, child: { exit, startedAt_ms, bare } }: Running): Attaching {
  return { attached, env, seen, exit, startedAt_ms, bare };
}

function isOver(running: readonly Running[]): boolean {
  const going = running.filter(({ child }) => !child.exit);
  if (going.length === 0) return true;
  const hadHigh = running.some(({ client }) => client.class === "high");
  return hadHigh && going.every(({ client }) => client.class === "best-effort" && !client.isBounded);
}

/** Clients with a profile count what they launch, to be compared with it: in which files. */
function countsOf(clients: readonly PlannedClient[], segment: string): Map<string, string> {
  return new Map(
    clients.flatMap(({ name, profiles, env }, index) =>
      profiles.length > 0 && env["RIGEL_RECORD"] === undefined ? [[name, `${segment}-counts-${index}`] as const] : [],
    ),
  );
}

async function matchesOf(
  running: readonly Running[],
  recordings: ReadonlyMap<string, Recording>,
): Promise<Map<string, Match>> {
  const matches = new Map<string, Match>();
  for (const { client, child, attached } of running) {
    const recording = recordings.get(client.name);
    if (attached && recording && client.profiles.length > 0)
      matches.set(client.name, await matchProfiles(client.profiles, recording.counts(), child.stopped));
  }
  return matches;
}

function reportOf(
  { client, child, attached, launched_ms, unattached }: Running,
  counted: Counted,
  segment: Segment,
  elsewhere: ReadonlySet<string>,
): Omit<ClientReport, "match"> {
  const { from_ms, to_ms, before, after } = counted;
  const end_ms = child.exit && !child.stopped ? child.exit.at_ms : to_ms;
  // A client that had ended before counting began is shown with all it did, rather than with nothing.
  const whole = before === undefined || end_ms <= from_ms;
  const begin_ms = whole ? (launched_ms ?? child.startedAt_ms) : from_ms;
  const counted_s = (whole ? lifetime_s(client.name, after) : undefined) ?? (end_ms - begin_ms) / 1000;
  const { name, uuid, simulated } = client.device;
  const { durations_seeded: seeded, samples } = usageOf(segment, client.name, undefined, after).counters;
  return {
    name: client.name,
    class: client.class,
    exit_code: child.exit?.status ?? null,
    stopped: child.stopped,
    attached,
    // What it has said may have been read only now.
    attach_problem: unattached ? (problemOf({ ...unattached, bare: child.bare }, segment) ?? null) : null,
    device: { name, uuid, simulated },
    durations: { seeded, samples },
    mps: client.mps && !elsewhere.has(client.name),
    ...measured(
      usageOf(segment, client.name, whole ? undefined : before, after),
      Math.max(0, counted_s),
      guardOf(client.name, after),
    ),
    memory: memoryReport(counted.memory.get(client.name), client.memory_bytes),
    gpu_share: counted.shares.of(client.name),
    ...threadClients(client.name, whole ? undefined : before, after, Math.max(0, counted_s), segment),
  };
}

/** The clients that threads of this one's processes have entered; nothing if there are none. */
function threadClients(
  name: string,
  before: Snapshot | undefined,
  after: Snapshot,
  counted_s: number,
  segment: Segment,
): Pick<ClientReport, "threads"> {
  const names = [...after.keys()].filter((one) => one.startsWith(`${name}/`));
  if (names.length === 0) return {};
  return {
    threads: names.map((one) => {
      const processes = after.get(one)?.processes ?? [];
      return {
        name: one.slice(name.length + 1),
        class: processes[0]?.class ?? "best-effort",
        processes: processes.length,
        devices: [...new Set(processes.flatMap(({ devices }) => devices))].toSorted((a, b) => a - b),
        ...measured(usageOf(segment, one, before, after), counted_s, guardOf(one, after)),
      };
    }),
  };
}

/** What one client of the launch gets to see. */
function environmentOf(
  plan: Plan,
  phase: Phase,
  client: PlannedClient,
  native: Native,
  segment: Segment,
  mps: Mps,
): Environment {
  const given: Environment = { ...process.env, ...client.env };
  return {
    ...clientEnvironment(client, {
      given,
      files: native.files,
      segment: segment.path,
      policy: phase.policy,
      // One client's own setting comes before that of the launch, and that before what is in the environment.
      guard: client.env["RIGEL_GUARD"] ?? plan.config.guard,
      nvtx: client.env["RIGEL_NVTX"] === undefined ? plan.config.nvtx : undefined,
      device: {
        ...deviceEnvironment(client.devices, native.files, plan.simulation, given),
        ...mps.environment(client, client.env),
      },
    }),
    RIGEL_LAUNCH: basename(segment.path),
  };
}

/** Sleeps that end sooner when something happens. Each of those is waited for once: a promise keeps all who have asked it until it settles. */
class Sleep {
  #wake: (() => void) | undefined;

  constructor(sooner: readonly Promise<void>[]) {
    for (const one of sooner) void one.then(() => this.#wake?.());
  }

  async within(limit_ms: number): Promise<void> {
    const { promise, resolve } = Promise.withResolvers<void>();
    this.#wake = resolve;
    const timer = setTimeout(resolve, limit_ms);
    await promise;
    clearTimeout(timer);
  }
}
