/**
 * slo-loop.ts: runs the controller of slo.ts on a segment: reads what the clients did, writes the settings, holds best-effort.
 *
 * If the loop ends, however it ends, the last settings stay; a hold ends by itself (rigel_segment_hold). One process at a time runs
 * it for a segment.
 */

import { constants } from "node:os";
import { GpuShares } from "./gpu-share.ts";
import type { Native } from "./native.ts";
import type { Segment, Slot } from "./segment.ts";
import type { Wait } from "./slo-delay.ts";
import type { Observation } from "./slo-known.ts";
import type { Target } from "./slo-alone.ts";
import { mostOnOne, type Sharer } from "./slo-turns.ts";
import { type Action, Controller, HOLD_S, type Move, TICK_S, type Second } from "./slo.ts";
import { progress } from "./log.ts";
import { ignored } from "./proc.ts";
import { missedText, targetText } from "./show.ts";
import { type Histogram, nothing } from "./usage.ts";

const HOLD_ms = HOLD_S * 1000;

/** What a slot had counted by the last tick. */
interface Before {
  pid: number;
  class: Slot["class"];
  /** Latencies that the processes before this one reported, which has its counts from where those were. */
  reports: number;
  /** `durations` are such. */
  isReported: boolean;
  durations: Histogram | undefined;
  /** Requests that the program has ended itself. */
  own: number | undefined;
  waited: bigint | undefined;
  launches: number;
  starved: number;
  shared: number;
  slowCalls: number;
}

/** A client's first process has begun to launch, or its last one has ended. Seconds as in Second. */
export interface Mark {
  t_s: number;
  client: string;
  what: "joins" | "leaves";
}

export interface SloReport extends ReturnType<Controller["summary"]> {
  /** One line a second. */
  seconds: Second[];
  /** Each change of the rung, and why, the last thousand. */
  moves: Move[];
  /** Who came and went meanwhile, the last MARKS_KEPT of them. */
  marks: Mark[];
}

const MARKS_KEPT = 200;
/** A program of which Rigel's agent has ended more than so many requests for each of its own does not end them (RG_AGENT_OFTEN). */
const PAUSES_MOST = 8;
/** How often somebody else's place is asked for, what is found shown, in ticks. */
const TRY_TICKS = 10;
/** How often it is looked for programs that are no clients, and for how long clients know that there are none, should nobody look again. */
const LOOK_s = 1;
const OWN_ns = 3e9;
const SHOW_TICKS = 5;
/** How old a segment is before anybody but its maker asks for the loop. */
const PATIENCE_ns = 2e9;

/** Those of this process that have not ended. */
const keepers = new Set<LoopKeeper>();

/**
 * Ctrl-Z: a process that is stopped keeps its locks, and nobody else could run the loop. It takes it again when it goes on, if nobody has it: at once where the
 * kernel stops nobody, as nobody could let it go on.
 */
function stop(): void {
  for (const keeper of keepers) keeper.yield();
  process.off("SIGTSTP", stop);
  process.kill(process.pid, "SIGTSTP");
  if (keepers.size > 0) process.on("SIGTSTP", stop);
}

/**
 * Runs the control loop of a segment as long as its policy is slo, and tells its clients while no other program is on their GPUs, if no other
 * process does: whoever looks after a segment (a
 * launch, `rigel run`, `rigel serve`) has one, and when the process whose turn it is ends, however that comes, another takes over. What
 * its predecessor had learned it learns anew; the target is in the segment.
 */
export class LoopKeeper implements Disposable {
  readonly #segment: Segment;
  readonly #timer: ReturnType<typeof setInterval>;
  readonly #isMaker: boolean;
  readonly #keepsOff: boolean;
  #release: (() => void) | undefined;
  #loop: SloLoop | undefined;
  /** What the one before it found. */
  #last: SloReport | undefined;
  #ticks = 0;
  readonly #gpus: GpuShares;

  /**
   * Starts at once. `isMaker`: this process has made the segment, and comes first. `keepsOff`: nobody is to run the loop for now, as
   * this process does so itself by times.
   */
  constructor(segment: Segment, native: Native, isMaker: boolean, keepsOff = false) {
    this.#gpus = new GpuShares(native, { interval_ms: LOOK_s * 1000 });
    this.#keepsOff = keepsOff;
    this.#segment = segment;
    this.#isMaker = isMaker;
    if (keepers.size === 0 && !ignored(constants.signals.SIGTSTP)) process.on("SIGTSTP", stop);
    keepers.add(this);
    this.#tick();
    this.#timer = setInterval(() => this.#tick(), TICK_S * 1000);
  }

  [Symbol.dispose](): void {
    this.end();
  }

  /** Ends the loop, if it ran here; what it found, also where its policy has been left since. */
  end(): SloReport | undefined {
    clearInterval(this.#timer);
    keepers.delete(this);
    if (keepers.size === 0) process.off("SIGTSTP", stop);
    this.yield();
    return this.#last;
  }

  /** Leaves it to others, for now. */
  yield(): void {
    this.#drop();
    this.#release?.();
    this.#release = undefined;
  }

  #tick(): void {
    const tick = this.#ticks++;
    if (tick % TRY_TICKS === 0) {
      const age_ns = this.#segment.now_ns - this.#segment.creator.created_ns;
      if (this.#isMaker || age_ns > PATIENCE_ns) this.#release ??= this.#segment.lock("loop");
      // A launch that was killed as it ended its clients has left them open.
      if (this.#release && !this.#segment.makerLives) this.#segment.closeGates();
    }
    if (!this.#release) return;
    if (tick % Math.round(LOOK_s / TICK_S) === 0) {
      // Of a process that was killed together with its `rigel run` nobody else says so.
      this.#segment.reap();
      this.#lookForStrangers();
    }
    if (this.#keepsOff) return;
    if (this.#segment.policy !== "slo") {
      this.#drop();
      return;
    }
    const { target } = this.#segment;
    if (this.#loop && JSON.stringify(this.#loop.target) !== JSON.stringify(target)) this.#drop();
    if (this.#loop) this.#loop.tick();
    else {
      // What a loop before this one has come to was for what that knew, and another target.
      this.#segment.putBack();
      this.#loop = new SloLoop(this.#segment, target);
    }
  }

  /** Slices are as short as they are set to be only on GPUs that have no programs but clients (rg_preempt_beat). */
  #lookForStrangers(): void {
    const segment = this.#segment;
    const devices = segment.devices();
    // Before there is one NVML is not loaded.
    if (devices.length === 0) return;
    try {
      const own = this.#gpus.ownOnly(segment, devices);
      for (const { index } of devices) segment.ownUntil(index, own.includes(index) ? segment.now_ns + OWN_ns : 0);
    } catch {
      // Not known, then: slices are longer.
    }
  }

  #drop(): void {
    if (!this.#loop) return;
    this.#loop.leave();
    this.#last = this.#loop.report(true);
    this.#loop = undefined;
  }
}

/** Of the client that its process is. Pure. */
function processName({ name }: Slot): string {
  return name.split("/", 1)[0] ?? name;
}

/** The control loop alone, for who knows that nobody else runs one (LoopKeeper sees to that). */
export class SloLoop {
  readonly target: Target;
  readonly #segment: Segment;
  readonly #controller: Controller;
  readonly #seen = new Map<number, Before>();
  #timer: ReturnType<typeof setInterval> | undefined;
  #told = false;
  #held = false;
  #looked_ns = 0;
  /** Clients with a process that has launched and not ended, as of the latest look, and of the marks. */
  #atWork: ReadonlySet<string> = new Set();
  #marked: ReadonlySet<string> | undefined;
  readonly #marks: Mark[] = [];
  /** Of each best-effort client at work the name of its process; and the accounts that have been told to wait for their turn. */
  readonly #processOf = new Map<string, string>();
  #waiting: ReadonlySet<string> = new Set();
  /** What it did last. */
  #last: Action = { settings: undefined, hold: false };
  #ticks = 0;

  /** Does nothing until `tick` or `resume`. */
  constructor(segment: Segment, target: Target, controller = new Controller(target)) {
    this.target = target;
    this.#segment = segment;
    this.#controller = controller;
    this.#observe();
    this.#mark();
  }

  /** What it finds at this moment; `atEnd`: what is to be told of all of it. */
  report(atEnd = false): SloReport {
    const { seconds, moves } = this.#controller;
    return { ...(atEnd ? this.#controller.found() : this.#controller.summary()), seconds, moves, marks: this.#marks };
  }

  /** Leaves the settings alone, and holds nobody any more; what happens until `resume` is not counted. */
  pause(): void {
    clearInterval(this.#timer);
    this.#timer = undefined;
    if (this.#held) this.#segment.hold(0);
    this.#held = false;
    this.#giveTurns(undefined);
    this.#last = { ...this.#last, waits: undefined };
    this.#segment.showLoop(undefined);
  }

  /** Ends, where nobody may go on with it: what it has come to stays, but not what it was just trying. */
  leave(): void {
    this.pause();
    const settings = this.#controller.leave();
    if (settings && this.#segment.policy === "slo") this.#segment.move(settings);
  }

  /** Goes on by itself where it was, with what it had learned. */
  resume(): void {
    this.#observe();
    this.#mark();
    this.#controller.unsettle();
    this.#segment.showLoop(this.report());
    this.#act();
    this.#timer ??= setInterval(() => this.tick(), TICK_S * 1000);
  }

  #act(): void {
    const { settings, isTrial, waits } = this.#last;
    this.#giveTurns(this.#segment.policy === "slo" ? waits : undefined);
    const hold = this.#last.hold && this.#segment.policy === "slo";
    if (settings) this.#segment.move(settings, isTrial);
    if (hold || this.#held) this.#segment.hold(hold ? HOLD_ms : 0);
    this.#held = hold;
  }

  /** Whoever waits for its turn is told so at each tick; whoever does no more, once. */
  #giveTurns(waits: Action["waits"]): void {
    const told = this.#waiting;
    const ticks = [...this.#processOf].map(([name, process]) => ({ name, more: waits?.get(process) ?? 0 }));
    this.#waiting = new Set(ticks.flatMap(({ name, more }) => (more > 0 ? [name] : [])));
    for (const { name, more } of ticks)
      if (more > 0 || told.has(name))
        this.#segment.turn(name, more > 0 ? this.#segment.now_ns + more * TICK_S * 1e9 : 0);
  }

  /** To be called every TICK_S, unless `resume` was. `elapsed_s`: since it was called last, where that is not to be measured. */
  tick(elapsed_s?: number): void {
    this.#last = this.#controller.step(this.#observe(elapsed_s));
    this.#mark();
    // Before it acts: clients put back what is tried by a loop that is not seen to run (native/steer.c).
    if (this.#ticks++ % SHOW_TICKS === 0) this.#segment.showLoop(this.report());
    this.#act();
    if (this.#controller.unreachable && !this.#told) {
      this.#told = true;
      const summary = this.#controller.summary();
      progress(`the target of p99 ${targetText(summary.target)} is ${missedText(summary)}`);
    }
  }

  /** What happened since the last call. */
  #observe(given_s?: number): Observation {
    const now_ns = this.#segment.now_ns;
    const elapsed_s = given_s ?? (now_ns - this.#looked_ns) / 1e9;
    this.#looked_ns = now_ns;
    let requests: Histogram | undefined;
    let came = 0;
    let launches = 0;
    let starved = 0;
    let slowCalls = 0;
    let preemption = true;
    let stops = false;
    const longParts: (number | undefined)[] = [];
    const { stop_us: stopsMost, starvation_us = 0, min_share_ppm = 0 } = this.#segment.kept();
    const neighbours: number[] = [];
    const processes = new Map<number, number>();
    const clients = new Map<string, Sharer>();
    this.#processOf.clear();
    const high = { devices: 0, names: new Set<string>() };
    const best: { slot: Slot; work: ReturnType<Segment["work"]>; launched: number }[] = [];
    const measured: string[] = [];
    const waits: Wait[] = [];
    const atWork = new Set<string>();
    for (const slot of this.#segment.slots()) {
      const kind = slot.class;
      const before = this.#before(slot);
      if (!slot.finished && slot.launched) atWork.add(slot.name);
      const work = this.#segment.work(slot);
      // Of high ones, too: who becomes best-effort goes on counting where it was.
      const launched = Math.max(0, work.launches - before.launches);
      before.launches = work.launches;
      // What it was at before, which is none of high clients' requests, counts in the same place.
      const isNew = before.class !== kind;
      before.class = kind;
      if (kind === "high") {
        if (!slot.finished) {
          high.devices |= work.devices;
          high.names.add(processName(slot));
        }
        const reports = this.#segment.reports(slot) > before.reports;
        if (!slot.finished && slot.launched) measured.push(`${slot.pid} ${reports ? "reports" : "busy"}`);
        const durations = this.#segment.durations(slot, reports);
        const isOther = isNew || reports !== before.isReported;
        const since = isOther ? durations : before.durations;
        const more = since ? durations.combined(since, -1) : durations;
        before.durations = durations;
        before.isReported = reports;
        const { waited, latest } = this.#segment.waits(slot, isNew ? undefined : before.waited);
        before.waited = waited;
        for (const wait of latest) waits.push(wait);
        // Of a program that ends its requests itself the others are pauses in the middle of one.
        const { own, byAgent } = this.#segment.ended(slot);
        const pauses = !reports && byAgent <= PAUSES_MOST * own;
        came += pauses ? Math.max(0, own - ((isNew ? undefined : before.own) ?? own)) : more.isCount ? more.total : 0;
        before.own = own;
        // A program that begins to report its own latencies, or becomes a high client, changes what is counted: that tick is left out.
        if (more.isCount) requests = requests ? requests.combined(more, 1) : more;
      } else {
        // What the least share lets out is one lump after the other.
        starved += Math.max(0, work.starved - before.starved) + Number(work.shared > before.shared);
        before.starved = work.starved;
        before.shared = work.shared;
        slowCalls += Math.max(0, work.slowCalls - before.slowCalls);
        before.slowCalls = work.slowCalls;
        best.push({ slot, work, launched });
      }
    }
    for (const { slot, work, launched } of best) {
      // On other GPUs it is beside nobody, as far as high clients have said on which they are.
      if (high.devices !== 0 && (work.devices & high.devices) === 0) continue;
      // Of those that have ended, too: who comes after one goes on counting where it was.
      launches += launched;
      if (!slot.launched || slot.finished) continue;
      neighbours.push(slot.pid);
      processes.set(slot.pid, (processes.get(slot.pid) ?? 0) | work.devices);
      // Clients that threads of a process have entered have the GPU as it has.
      const name = processName(slot);
      const client = clients.get(name) ?? { name, devices: 0, launches: 0, processes: 0 };
      client.devices |= work.devices;
      client.launches += launched;
      client.processes += Number(slot.parent === null);
      clients.set(name, client);
      this.#processOf.set(slot.name, name);
      preemption &&= work.preemption === "on" || work.preemption === "stops";
      stops ||= work.preemption === "stops";
      // Where stops are none by configuration what was known of launches with some says nothing.
      longParts.push(stopsMost === 0 ? undefined : work.longPart);
    }
    this.#atWork = atWork;
    return {
      elapsed_s,
      requests: requests ?? nothing(this.#segment.histogram).request_ns,
      waits,
      came,
      launches,
      starved,
      starvation_s: starvation_us / 1e6,
      min_share: min_share_ppm / 1e6,
      sharers: mostOnOne([...processes.values()].map((devices) => devices & high.devices)),
      // What has a high client is not taken off the GPU.
      clients: [...clients.values()]
        .map((client) => ({ ...client, devices: client.devices & high.devices }))
        .filter(({ name, devices }) => devices !== 0 && !high.names.has(name)),
      slowCalls,
      neighbours: neighbours.toSorted((a, b) => a - b).join(" "),
      measured: measured.toSorted().join(", "),
      preemption: preemption && neighbours.length > 0,
      stops,
      longPart: longParts.reduce(
        (most, part) => (most === undefined || part === undefined ? undefined : Math.max(most, part)),
        0,
      ),
    };
  }

  /** Those at work at the first look have not come meanwhile. */
  #mark(): void {
    const atWork = this.#atWork;
    const was = this.#marked ?? atWork;
    this.#marked = atWork;
    const { t_s } = this.#controller;
    for (const client of atWork.difference(was)) this.#marks.push({ t_s, client, what: "joins" });
    for (const client of was.difference(atWork)) this.#marks.push({ t_s, client, what: "leaves" });
    if (this.#marks.length > MARKS_KEPT) this.#marks.splice(0, this.#marks.length - MARKS_KEPT);
  }

  #before(slot: Slot): Before {
    let known = this.#seen.get(slot.index);
    if (!known || known.pid !== slot.pid) {
      known = {
        pid: slot.pid,
        class: known?.class ?? slot.class,
        // Of the first one that is seen in a slot it is not known whether another one reported them.
        reports: known ? this.#segment.reports(slot) : 0,
        isReported: known?.isReported ?? this.#segment.reports(slot) > 0,
        durations: known?.durations,
        own: known?.own,
        waited: known?.waited,
        launches: known?.launches ?? 0,
        starved: known?.starved ?? 0,
        shared: known?.shared ?? 0,
        slowCalls: known?.slowCalls ?? 0,
      };
      this.#seen.set(slot.index, known);
    }
    return known;
  }
}
