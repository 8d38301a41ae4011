/**
 * usage.ts: what one client has done: counters and histograms of durations, added up over its processes and over time.
 *
 * Plain values: nothing here reads the segment or changes after it has been made.
 */

/** Why the gate does not cut a graph, by enum rg_whole in native/segment.h less 1. */
export const GRAPH_WHOLE = [
  "it has fewer than 8 nodes",
  "it has nodes that are not cut (memory, conditions, host functions, events), or is launched from the GPU",
  "the program changed it after it was instantiated",
  "it was launched on several streams or in another context",
  "nearly all of it is one node",
  "enough graphs are kept in pieces already",
  "the driver refused, or does not tell its kernels' names",
] as const;
export type GraphWhole = (typeof GRAPH_WHOLE)[number];

/** What is added up over the processes of one client, and over time. */
interface Counters {
  launches: number;
  graph_launches: number;
  copies: number;
  memsets: number;
  passed: number;
  gate_waits: number;
  gate_wait_ns: number;
  inflight_waits: number;
  inflight_wait_ns: number;
  starved: number;
  suspensions: number;
  suspended_ns: number;
  slow_calls: number;
  stays: number;
  ahead: number;
  foreseen: number;
  shared: number;
  charged_ns: number;
  unprofiled: number;
  requests: number;
  reports: number;
  durations_seeded: number;
  samples: number;
  graphs_cut: number;
  graph_pieces: number;
  graphs_whole: number;
  guard_null_handle: number;
  guard_wrong_context: number;
  guard_no_context: number;
  guard_in_use_elsewhere: number;
  guard_foreign_stream: number;
  guard_create_failed: number;
  guard_create_retried: number;
  guard_repaired: number;
}

/** Which durations the buckets stand for: native/histogram.h. */
export interface HistogramShape {
  buckets: number;
  sub_bits: number;
  min_shift: number;
}

/** Counts of durations, by the buckets of native/histogram.h. */
export class Histogram {
  readonly #counts: Float64Array;
  readonly #shape: HistogramShape;
  #total: number | undefined;

  constructor(counts: Float64Array, shape: HistogramShape) {
    this.#counts = counts;
    this.#shape = shape;
  }

  get total(): number {
    if (this.#total === undefined) {
      let sum = 0;
      for (let bucket = 0; bucket < this.#counts.length; bucket++) sum += this.#counts[bucket] ?? 0;
      this.#total = sum;
    }
    return this.#total;
  }

  /** False of the difference between two histograms of different things. */
  get isCount(): boolean {
    return this.#counts.every((count) => count >= 0);
  }

  /** This plus `sign` times `other`. */
  combined(other: Histogram, sign: 1 | -1): Histogram {
    const counts = this.#counts.slice();
    for (let bucket = 0; bucket < counts.length; bucket++)
      counts[bucket] = (counts[bucket] ?? 0) + sign * (other.#counts[bucket] ?? 0);
    return new Histogram(counts, this.#shape);
  }

  /** Every count times `factor`. */
  scaled(factor: number): Histogram {
    return new Histogram(
      this.#counts.map((count) => count * factor),
      this.#shape,
    );
  }

  /** How many durations end below `ns`, to the width of a bucket. */
  below(ns: number): number {
    let sum = 0;
    for (let bucket = 0; bucket < this.#counts.length && this.#lower_ns(bucket + 1) <= ns; bucket++)
      sum += this.#counts[bucket] ?? 0;
    return sum;
  }

  /** Those alone that end below `ns`, to the width of a bucket. */
  upTo(ns: number): Histogram {
    return new Histogram(
      this.#counts.map((count, bucket) => (this.#lower_ns(bucket + 1) <= ns ? count : 0)),
      this.#shape,
    );
  }

  /** Their sum, each taken from the middle of its bucket. */
  get sum_ns(): number {
    return this.#counts.reduce(
      (sum, count, bucket) => sum + (count * (this.#lower_ns(bucket) + this.#lower_ns(bucket + 1))) / 2,
      0,
    );
  }

  /** The duration below which the fraction `q` lies, in ms, interpolated within its bucket; null without any counts. */
  quantile_ms(q: number): number | null {
    const total = this.total;
    if (total <= 0) return null;
    const rank = Math.max(q * total, Number.MIN_VALUE);
    let below = 0;
    for (let bucket = 0; bucket < this.#counts.length; bucket++) {
      const count = this.#counts[bucket] ?? 0;
      if (count > 0 && below + count >= rank) {
        const lower = this.#lower_ns(bucket);
        const width = this.#lower_ns(bucket + 1) - lower;
        return (lower + (width * (rank - below)) / count) / 1e6;
      }
      below += count;
    }
    return null;
  }

  /** As rg_hist_lower_ns in native/histogram.h. */
  #lower_ns(bucket: number): number {
    if (bucket === 0) return 0;
    const per_octave = 2 ** this.#shape.sub_bits;
    const octave = this.#shape.min_shift + Math.floor((bucket - 1) / per_octave);
    return (per_octave + ((bucket - 1) % per_octave)) * 2 ** (octave - this.#shape.sub_bits);
  }
}

/** What one client (all its processes) has done. */
export interface Usage {
  counters: Counters;
  /** Whether it can be taken off the GPU by its channels, by its process that last knew. */
  preemption: "unknown" | "on" | "off" | "stops";
  /** Why a graph went out whole though it was too long, the last time in the process that last had one. */
  graph_whole: GraphWhole | null;
  request_ns: Histogram;
  report_ns: Histogram;
  /** Waits at the gate. */
  wait_ns: Histogram;
}

/** What has done nothing. */
export function nothing(shape: HistogramShape): Usage {
  const none = new Histogram(new Float64Array(shape.buckets), shape);
  return {
    counters: counters(() => 0),
    preemption: "unknown",
    graph_whole: null,
    request_ns: none,
    report_ns: none,
    wait_ns: none,
  };
}

/** Every counter by its name. */
export function counters(value: (name: keyof Counters) => number): Counters {
  return {
    launches: value("launches"),
    graph_launches: value("graph_launches"),
    copies: value("copies"),
    memsets: value("memsets"),
    passed: value("passed"),
    gate_waits: value("gate_waits"),
    gate_wait_ns: value("gate_wait_ns"),
    inflight_waits: value("inflight_waits"),
    inflight_wait_ns: value("inflight_wait_ns"),
    starved: value("starved"),
    suspensions: value("suspensions"),
    suspended_ns: value("suspended_ns"),
    slow_calls: value("slow_calls"),
    stays: value("stays"),
    ahead: value("ahead"),
    foreseen: value("foreseen"),
    shared: value("shared"),
    charged_ns: value("charged_ns"),
    unprofiled: value("unprofiled"),
    requests: value("requests"),
    reports: value("reports"),
    durations_seeded: value("durations_seeded"),
    samples: value("samples"),
    graphs_cut: value("graphs_cut"),
    graph_pieces: value("graph_pieces"),
    graphs_whole: value("graphs_whole"),
    guard_null_handle: value("guard_null_handle"),
    guard_wrong_context: value("guard_wrong_context"),
    guard_no_context: value("guard_no_context"),
    guard_in_use_elsewhere: value("guard_in_use_elsewhere"),
    guard_foreign_stream: value("guard_foreign_stream"),
    guard_create_failed: value("guard_create_failed"),
    guard_create_retried: value("guard_create_retried"),
    guard_repaired: value("guard_repaired"),
  };
}

/** `a` plus `sign` times `b`. */
export function combine(a: Usage, b: Usage, sign: 1 | -1): Usage {
  return {
    counters: counters((name) => a.counters[name] + sign * b.counters[name]),
    preemption: sign > 0 && b.preemption !== "unknown" ? b.preemption : a.preemption,
    graph_whole: sign > 0 ? (b.graph_whole ?? a.graph_whole) : a.graph_whole,
    request_ns: a.request_ns.combined(b.request_ns, sign),
    report_ns: a.report_ns.combined(b.report_ns, sign),
    wait_ns: a.wait_ns.combined(b.wait_ns, sign),
  };
}
