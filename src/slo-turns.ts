/**
 * slo-turns.ts: whose turn it is where policy `slo` lets best-effort clients have the GPU one after the other.
 *
 * Several processes that share the GPU in time slices have the driver's, 2 ms, as shorter ones would be spent switching (native/preempt.c), and each of
 * them has a kernel on the GPU that its last slice has interrupted: a request waits for what runs, and for that as well. One that has the GPU to itself
 * for a second has neither: beside ResNet-50's and GPT-2's training GPT-2's decoding took 1.08 and 1.06 of alone (p50, p95) and left the two 0.53 of what they
 * have alone, in turns 1.02, 1.02 and 0.60 (an H200; docs/measurements.md, "Several best-effort programs").
 * A client that launches nothing waits for nobody and nobody for it: else the GPU would be idle for its turn. What it has launched may run on all the same, for
 * longer than turns are waited for where launches are half a second of work and more apart: such a client shares the GPU with the others most of the time.
 * Clients that leave the GPU idle for much of their time lose by turns what they get beside each other. So where requests do not need turns those are tried,
 * and kept where clients get more by them (TurnsGain).
 *
 * Pure.
 */

/** A best-effort client at a tick. */
export interface Sharer {
  name: string;
  /** A bit for each GPU that it has work on. */
  devices: number;
  /** Since the last tick, by all of its processes. */
  launches: number;
  /** How many those are. */
  processes: number;
}

/** Ticks in a second. */
const TICKS_PER_S = 10;
/** How long a turn is, in ticks: what changes at its end, the driver is called for in each client, which delays a request under way by up to 0.5 ms. */
const TURN_TICKS = 10;
/** It ends sooner where nothing was launched for so long. */
const QUIET_TICKS = 3;

/** Of sets of devices, a bit each, how many have the same one, at most. */
export function mostOnOne(sets: readonly number[]): number {
  const counts = Array.from({ length: 32 }, (_, device) => sets.filter((set) => (set >>> device) & 1).length);
  return Math.max(...counts);
}

/**
 * What clients have to have launched for turns to be tried, and for how long: less tells nothing, as a step or two more or fewer are launched in such a time by
 * chance.
 */
const LEAST_LAUNCHES = 50;
const BEFORE_S = 6;
/** How often each has its turn in a trial, and by how much more they have to get for turns to stay. */
const TRIED_TURNS = 2;
const MORE = 1.04;
/** Turns that gave no more are not tried again for so long, and twice as long each time. */
const BACK_OFF_S = 60;
const BACK_OFF_MOST_S = 960;

/** What clients got, of the time that requests leave. */
class Got {
  #launches = new Map<string, number>();
  #seconds = 0;
  #left_s = 0;

  add(sharers: readonly Sharer[], seconds: number, left_s: number): void {
    for (const { name, launches } of sharers) this.#launches.set(name, (this.#launches.get(name) ?? 0) + launches);
    this.#seconds += seconds;
    this.#left_s += left_s;
  }
  /** What is older counts half. */
  halve(): void {
    for (const [name, launches] of this.#launches) this.#launches.set(name, launches / 2);
    this.#seconds /= 2;
    this.#left_s /= 2;
  }
  get seconds(): number {
    return this.#seconds;
  }
  /** Those that launched so much. */
  names(least: number): string[] {
    return [...this.#launches].flatMap(([name, launches]) => (launches >= least ? [name] : []));
  }
  /** What one launched a second, and a second of what requests leave. */
  rates(name: string): [number, number] {
    const launches = this.#launches.get(name) ?? 0;
    return [launches / this.#seconds, launches / this.#left_s];
  }
}

/** Whether clients get more in turns than beside each other, which is tried while requests do not need them. */
export class TurnsGain {
  #beside = new Got();
  #inTurns = new Got();
  #notBefore_s = 0;
  #backOff_s = BACK_OFF_S;

  /** Nothing is known of what they get; `areOthers`: nor have turns of these clients been tried. */
  clear(areOthers = false): void {
    this.#beside = new Got();
    this.#inTurns = new Got();
    if (!areOthers) return;
    this.#notBefore_s = 0;
    this.#backOff_s = BACK_OFF_S;
  }

  /** What they launched in so many seconds, in turns or beside each other, of which requests alone would have left so much. */
  add(
    sharers: readonly Sharer[],
    { seconds, left_s, inTurns }: { seconds: number; left_s: number; inTurns: boolean },
  ): void {
    (inTurns ? this.#inTurns : this.#beside).add(sharers, seconds, left_s);
    if (this.#beside.seconds > 2 * BEFORE_S) this.#beside.halve();
  }

  /** Enough is known of two and more beside each other for turns to be tried, and those did not fail lately. */
  isToTry(t_s: number): boolean {
    return (
      t_s >= this.#notBefore_s && this.#beside.seconds >= BEFORE_S && this.#beside.names(LEAST_LAUNCHES).length > 1
    );
  }

  /** Each has had its turns. */
  isTried(sharers: number): boolean {
    return this.#inTurns.seconds >= (TRIED_TURNS * sharers * TURN_TICKS) / TICKS_PER_S;
  }

  /**
   * They got more in turns, over what each had without, the mean of all: in as much time, and in as much as requests left, which come at random and take more
   * from work that keeps the GPU busy than from other.
   */
  get isMore(): boolean {
    const names = this.#beside.names(LEAST_LAUNCHES);
    const ratios = names.map((name) => {
      const beside = this.#beside.rates(name);
      return this.#inTurns.rates(name).map((rate, index) => rate / (beside[index] ?? 0));
    });
    return [0, 1].every((index) => ratios.reduce((sum, of) => sum + (of[index] ?? 0), 0) >= MORE * names.length);
  }

  /** A trial is over; what clients get beside each other is still known. `t_s`: it failed then. */
  endTrial(t_s?: number): void {
    this.#inTurns = new Got();
    if (t_s === undefined) return;
    this.#notBefore_s = t_s + this.#backOff_s;
    this.#backOff_s = Math.min(2 * this.#backOff_s, BACK_OFF_MOST_S);
  }
}

export class Turns {
  /** Who takes part: launched something in its last turn, or since. In the order of their turns: the first one has its own now. */
  #order: string[] = [];
  #ticks = 0;
  #quiet = 0;
  /** Those that have the GPU in this turn: for how many ticks, and who has launched something. */
  readonly #had = new Map<string, number>();
  readonly #launched = new Set<string>();

  /** Nobody takes part any more. */
  end(): void {
    this.#order = [];
    this.#begin();
  }

  /**
   * Who waits, and for how many ticks at least, unless it is said again. `passed`: ticks since the last step; 0 where nobody could launch meanwhile, so that
   * the turn lasts as much longer.
   */
  step(sharers: readonly Sharer[], passed = 1): ReadonlyMap<string, number> {
    const there = new Map(sharers.map((sharer) => [sharer.name, sharer]));
    const [first] = this.#order;
    this.#order = this.#order.filter((name) => there.has(name));
    for (const { name, launches } of sharers) if (launches > 0 && !this.#order.includes(name)) this.#order.push(name);
    // Who has gone leaves its turn to the next.
    if (this.#order[0] !== first) this.#begin();
    else if (passed > 0) this.#pass(there, passed);
    return this.#waiting(there);
  }

  /** Ticks of a turn. At its end all that had the GPU come after those that waited: in turns of one on another GPU they have had theirs, too. */
  #pass(there: ReadonlyMap<string, Sharer>, ticks: number): void {
    const having = havingOf(this.#order, there);
    for (const name of having) {
      this.#had.set(name, (this.#had.get(name) ?? 0) + ticks);
      if ((there.get(name)?.launches ?? 0) > 0) this.#launched.add(name);
    }
    this.#ticks += ticks;
    this.#quiet = (there.get(this.#order[0] ?? "")?.launches ?? 0) > 0 ? 0 : this.#quiet + ticks;
    if (this.#ticks < TURN_TICKS && this.#quiet < QUIET_TICKS) return;
    const takesPart = (name: string): boolean => this.#launched.has(name) || (this.#had.get(name) ?? 0) < QUIET_TICKS;
    this.#order = [
      ...this.#order.filter((name) => !having.has(name)),
      ...this.#order.filter((name) => having.has(name) && takesPart(name)),
    ];
    this.#begin();
  }

  #begin(): void {
    this.#ticks = 0;
    this.#quiet = 0;
    this.#had.clear();
    this.#launched.clear();
  }

  #waiting(there: ReadonlyMap<string, Sharer>): Map<string, number> {
    const having = havingOf(this.#order, there);
    const waiting = this.#order.filter((name) => !having.has(name));
    const next = havingOf([...waiting, ...having], there);
    const left = TURN_TICKS - this.#ticks;
    // Who comes next begins by itself; others are told again before that.
    return new Map(waiting.map((name) => [name, next.has(name) ? left : left + 1]));
  }
}

/** Those that have the GPU in a turn: the first one, and then whoever is on other GPUs than those before. */
function havingOf(order: readonly string[], there: ReadonlyMap<string, Sharer>): Set<string> {
  const having = new Set<string>();
  let taken = 0;
  for (const name of order) {
    const devices = there.get(name)?.devices ?? 0;
    if ((taken & devices) !== 0) continue;
    taken |= devices;
    having.add(name);
  }
  return having;
}
