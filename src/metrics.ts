/**
 * metrics.ts: what segments show as Prometheus reads it (text format 0.0.4): base units, totals that only grow, cumulative buckets.
 *
 * Labels are the segment's number, the client and its class; a client is one time series however many processes it has had, and those of
 * launches one after the other are the same.
 */

import { HUNG, type Hangs } from "./hangs.ts";
import { type Reading, type Stats, statsOf } from "./stats.ts";
import type { Histogram } from "./usage.ts";

export const METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8";

/** Upper bounds of the buckets, in seconds. */
const BOUNDS_s = [
  0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10,
];

type Client = Stats["clients"][number];

/** One number per client. */
const PER_CLIENT: readonly [string, "counter" | "gauge", string, (client: Client) => number | null][] = [
  ["rigel_client_up", "gauge", "1 while a process of the client runs.", ({ state }) => Number(state === "live")],
  ["rigel_client_paused", "gauge", "1 while the client is held back.", ({ paused }) => Number(paused)],
  ["rigel_launches_total", "counter", "Kernels launched.", ({ launches }) => launches],
  ["rigel_graph_launches_total", "counter", "CUDA graphs launched.", ({ graph_launches }) => graph_launches],
  ["rigel_copies_total", "counter", "Copies queued.", ({ copies }) => copies],
  ["rigel_inflight_waits_total", "counter", "Waits for work in flight.", ({ gate }) => gate.inflight_waits],
  ["rigel_suspensions_total", "counter", "Times taken off the GPU.", ({ preemption }) => preemption.suspensions],
  ["rigel_suspended_seconds_total", "counter", "Time off the GPU.", ({ preemption }) => preemption.suspended_ms / 1000],
  [
    "rigel_slow_suspension_calls_total",
    "counter",
    "Calls to suspend or resume that the driver held up for 2 ms or more.",
    ({ preemption }) => preemption.slow_calls,
  ],
  [
    "rigel_stays_total",
    "counter",
    "Requests after which the GPU was to stay with the client for a moment.",
    ({ preemption }) => preemption.stays,
  ],
  [
    "rigel_ahead_total",
    "counter",
    "Requests for which the GPU was to come over ahead of their input.",
    ({ preemption }) => preemption.ahead,
  ],
  [
    "rigel_foreseen_total",
    "counter",
    "Requests for which the GPU was to come over as something arrived at the program's sockets or pipes.",
    ({ preemption }) => preemption.foreseen,
  ],
  ["rigel_charged_seconds_total", "counter", "GPU time charged by policy fair.", ({ charged_ms }) => charged_ms / 1000],
  ["rigel_guard_repaired_total", "counter", "cuBLAS calls repaired.", ({ guard }) => guard.repaired],
  ["rigel_memory_used_bytes", "gauge", "Device memory in use.", ({ memory }) => memory.used_bytes],
  [
    "rigel_memory_limit_bytes",
    "gauge",
    "Limit of device memory, where there is one.",
    ({ memory }) => memory.limit_bytes,
  ],
  [
    "rigel_gpu_share_ratio",
    "gauge",
    "Part of the last second or so for which kernels of the client ran on its GPU, where that is known.",
    ({ gpu_share }) => gpu_share,
  ],
  ["rigel_memory_denied_total", "counter", "Allocations refused at the limit.", ({ memory }) => memory.denied],
];

/**
 * Numbers segments for their label: in the id of one is its launcher's pid, so that each launch would be new time series. The first is
 * 0; who has one keeps it, and the next segment gets the smallest that nobody has.
 */
export class SegmentNumbers {
  #numbers: ReadonlyMap<string, number> = new Map();

  /** By id, of those that are live. */
  of(live: readonly Pick<Stats["segment"], "id" | "created_ms">[]): ReadonlyMap<string, number> {
    const numbers = new Map<string, number>();
    for (const { id } of live) {
      const number = this.#numbers.get(id);
      if (number !== undefined) numbers.set(id, number);
    }
    const taken = new Set(numbers.values());
    let free = 0;
    for (const { id } of live.toSorted((a, b) => a.created_ms - b.created_ms)) {
      if (numbers.has(id)) continue;
      while (taken.has(free)) free++;
      numbers.set(id, free++);
    }
    return (this.#numbers = numbers);
  }
}

/** The text of /metrics; `hangs` is of the same segments, and `numbers` are theirs. */
export function metricsOf(
  readings: readonly Reading[],
  hangs: readonly Hangs[],
  numbers: ReadonlyMap<string, number>,
): string {
  const shown = readings.map((reading) => ({ reading, stats: statsOf(reading) }));
  const lines: string[] = [];
  const segmentOf = ({ segment }: Stats): string => `segment="${numbers.get(segment.id) ?? ""}"`;
  const labelsOf = (stats: Stats, { name, class: kind }: Client): string =>
    `${segmentOf(stats)},client="${escaped(name)}",class="${kind}"`;
  const about = (name: string, type: string, help: string): void => {
    lines.push(`# HELP ${name} ${help}`, `# TYPE ${name} ${type}`);
  };
  about("rigel_segments", "gauge", "Segments that are live.");
  lines.push(`rigel_segments ${readings.length}`);
  for (const [name, type, help, value] of PER_CLIENT) {
    about(name, type, help);
    for (const { stats } of shown)
      for (const client of stats.clients) {
        const number = value(client);
        if (number !== null) lines.push(`${name}{${labelsOf(stats, client)}} ${number}`);
      }
  }
  about(
    "rigel_slo_delay_ratio",
    "summary",
    "What requests of high clients take over what the same ones would take alone.",
  );
  for (const { stats } of shown) {
    const over = stats.slo?.over_alone;
    const labels = segmentOf(stats);
    for (const [quantile, value] of over
      ? ([
          ["0.5", over.p50],
          ["0.99", over.p99],
        ] as const)
      : [])
      lines.push(`rigel_slo_delay_ratio{${labels},quantile="${quantile}"} ${value}`);
  }
  // All reasons always, so that none vanishes while it is 1. Whether a thread client hangs is its process's matter.
  about("rigel_client_hung", "gauge", "1 while a process of the client hangs for this reason.");
  for (const { stats } of shown) {
    const found = hangs.find(({ segment }) => segment === stats.segment.path)?.processes ?? [];
    for (const client of stats.clients) {
      const own = found.filter(({ name }) => name === client.name);
      for (const reason of own.length > 0 ? HUNG : [])
        lines.push(
          `rigel_client_hung{${labelsOf(stats, client)},reason="${reason}"} ${Number(own.some(({ verdict, hung }) => hung && verdict === reason))}`,
        );
    }
  }
  for (const [name, help, find] of HISTOGRAMS) {
    about(name, "histogram", help);
    for (const { reading, stats } of shown)
      for (const client of stats.clients)
        lines.push(...bucketsOf(name, labelsOf(stats, client), find(client.name, reading)));
  }
  return `${lines.join("\n")}\n`;
}

const HISTOGRAMS: [string, string, (name: string, reading: Reading) => Histogram | undefined][] = [
  ["rigel_request_duration_seconds", "Requests: as the program reports them, else busy periods.", requestsOf],
  ["rigel_gate_wait_duration_seconds", "Waits at the gate.", (name, { totals }) => totals.get(name)?.usage.wait_ns],
];

function requestsOf(name: string, { totals }: Reading): Histogram | undefined {
  const usage = totals.get(name)?.usage;
  return usage && usage.counters.reports > 0 ? usage.report_ns : usage?.request_ns;
}

function bucketsOf(name: string, labels: string, histogram: Histogram | undefined): string[] {
  if (!histogram) return [];
  return [
    ...BOUNDS_s.map((bound) => `${name}_bucket{${labels},le="${bound}"} ${histogram.below(bound * 1e9)}`),
    `${name}_bucket{${labels},le="+Inf"} ${histogram.total}`,
    `${name}_sum{${labels}} ${histogram.sum_ns / 1e9}`,
    `${name}_count{${labels}} ${histogram.total}`,
  ];
}

function escaped(text: string): string {
  return text.replaceAll("\\", "\\\\").replaceAll('"', '\\"').replaceAll("\n", "\\n");
}
