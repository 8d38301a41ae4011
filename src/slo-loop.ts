/**
 * slo-loop.ts: runs the controller of slo.ts on a segment: reads what the clients did, writes the settings, holds best-effort.
 *
 * If the loop ends, however it ends, the last settings stay; a hold ends by itself (rigel_segment_hold).
 */

import type { Segment, Slot } from "./segment.ts";
import { Controller, TICK_S, type Observation, type Second, type Target } from "./slo.ts";
import { progress } from "./log.ts";
import { type Histogram, nothing } from "./usage.ts";

/** A hold lasts two ticks unless it is renewed. */
const HOLD_ms = 2 * TICK_S * 1000;

export interface SloReport extends ReturnType<Controller["summary"]> {
  /** One line a second. */
  seconds: Second[];
}

export class SloLoop implements Disposable {
  readonly #segment: Segment;
  readonly #classes: ReadonlyMap<string, "high" | "best-effort">;
  readonly #controller: Controller;
  readonly #seen = new Map<number, { pid: number; durations: Histogram | undefined; launches: number }>();
  #timer: ReturnType<typeof setInterval> | undefined;
  #told = false;
  #held = false;

  /** Starts at once. `classes`: by client name. */
  constructor(segment: Segment, target: Target, classes: ReadonlyMap<string, "high" | "best-effort">) {
    this.#segment = segment;
    this.#classes = classes;
    this.#controller = new Controller(target);
    this.resume();
  }

  /** Leaves the settings alone; what happens until `resume` is not counted. */
  pause(): void {
    clearInterval(this.#timer);
    this.#timer = undefined;
    if (this.#held) this.#segment.hold(0);
    this.#held = false;
  }

  /** Goes on where it was, with what it had learned. */
  resume(): void {
    this.#observe();
    this.#timer ??= setInterval(() => this.#tick(), TICK_S * 1000);
  }

  [Symbol.dispose](): void {
    clearInterval(this.#timer);
  }

  /** Ends the loop; what it found. */
  end(): SloReport {
    clearInterval(this.#timer);
    return { ...this.#controller.summary(), seconds: this.#controller.seconds };
  }

  #tick(): void {
    const { settings, hold } = this.#controller.step(this.#observe());
    if (settings) this.#segment.apply(settings);
    if (hold || this.#held) this.#segment.hold(hold ? HOLD_ms : 0);
    this.#held = hold;
    if (this.#controller.unreachable && !this.#told) {
      this.#told = true;
      const { reachable, target } = this.#controller.summary();
      const asked = "p99_ms" in target ? `${target.p99_ms} ms` : `${target.p99_over_alone} of alone`;
      const got =
        reachable === null ? "" : `; ${reachable.toFixed(2)}${"p99_ms" in target ? " ms" : ""} is what is reached`;
      progress(`the target of p99 ${asked} is not reached even by the strictest settings${got}`);
    }
  }

  /** What happened since the last call. */
  #observe(): Observation {
    let requests: Histogram | undefined;
    let launches = 0;
    let preemption = true;
    const neighbours: number[] = [];
    const measured: string[] = [];
    for (const slot of this.#segment.slots()) {
      const kind = slot.parent === null ? this.#classes.get(slot.name) : this.#segment.classOf(slot);
      const before = this.#before(slot);
      if (kind === "high") {
        if (!slot.finished && slot.launched)
          measured.push(`${slot.pid} ${this.#segment.reports(slot) ? "reports" : "busy"}`);
        const durations = this.#segment.durations(slot);
        const more = before.durations ? durations.combined(before.durations, -1) : durations;
        before.durations = durations;
        // A program that begins to report its own latencies changes what is counted: that tick is left out.
        if (more.isCount) requests = requests ? requests.combined(more, 1) : more;
      } else if (kind === "best-effort" && !slot.finished) {
        const work = this.#segment.work(slot);
        launches += Math.max(0, work.launches - before.launches);
        before.launches = work.launches;
        if (slot.launched) {
          neighbours.push(slot.pid);
          preemption &&= work.preemption === "on";
        }
      }
    }
    return {
      requests: requests ?? nothing(this.#segment.histogram).request_ns,
      launches,
      neighbours: neighbours.toSorted((a, b) => a - b).join(" "),
      measured: measured.toSorted().join(", "),
      preemption: preemption && neighbours.length > 0,
    };
  }

  #before(slot: Slot): { pid: number; durations: Histogram | undefined; launches: number } {
    let known = this.#seen.get(slot.index);
    if (!known || known.pid !== slot.pid) {
      known = { pid: slot.pid, durations: known?.durations, launches: known?.launches ?? 0 };
      this.#seen.set(slot.index, known);
    }
    return known;
  }
}
