/**
 * stats.ts: what a segment shows, as plain data: its devices, settings and clients, what each did, and how fast.
 *
 * `rigel top`, the HTTP interface, /metrics and the report of a launch are all made from this. The shape is public: fields may be
 * added, never renamed. Everything in it is JSON; units are in the names, and every `…_ms` that is a moment is on the clock of
 * `at_ms`, CLOCK_MONOTONIC.
 *
 *   const gpus = new GpuShares(native);        // without one, shares of the GPU are not known
 *   const before = readingOf(segment, gpus);   // counters and histograms, not for printing
 *   …a second later…
 *   const now = readingOf(segment, gpus);
 *   const stats = statsOf(now, before);        // a Stats; clients[].rates is what happened in between, null without `before`
 *
 * A Stats:
 *   schema, at (wall clock, ISO 8601), at_ms
 *   segment   { id, path, creator_pid, created_ms, capacity, processes, refused, overwritten }
 *   policy    name of the policy in force;  settings: every setting of the segment by its name in native/segment.h
 *   slo       what the control loop of policy slo aims at and has found; null where none is known
 *   devices   [{ index, uuid, name, high_busy }]
 *   clients   [{ name, class, state, paused, devices, processes, ... }], one for each name, in the order they attached:
 *             Measured (since it attached: launches, requests with p50/p95/p99, gate, preemption, guard), memory, gpu_share, rates
 *
 * Reads the segment, and through GpuShares what drivers tell, and never writes.
 */

import { z } from "zod";
import { POLICIES } from "./config.ts";
import { type GuardReport, guardSchema } from "./cublas-guard.ts";
import type { ClientShares, GpuShares } from "./gpu-share.ts";
import type { MemoryUse, Segment, SegmentDevice } from "./segment.ts";
import { type Snapshot, snapshotOf } from "./tally.ts";
import { GRAPH_WHOLE, type Histogram, type Usage, combine } from "./usage.ts";

const count = z.int();
const moment_ms = z.number();
const ms = z.number();

const requestsSchema = z.object({
  count,
  p50_ms: ms.nullable(),
  p95_ms: ms.nullable(),
  p99_ms: ms.nullable(),
  /** Who measured: the program itself (rigel_report_request), or Rigel by busy periods of the device; null without any. */
  source: z.enum(["program", "busy-period"]).nullable(),
});

/** What a client did in some time, from its counters. */
const measuredSchema = z.object({
  /** Seconds over which it was counted. */
  counted_s: z.number(),
  launches: count,
  /** Kernels and graphs. */
  launches_per_s: z.number(),
  graph_launches: count,
  copies: count,
  memsets: count,
  requests: requestsSchema,
  /** Iterations or requests that the program reported; null if it does not report. */
  iterations: count.nullable(),
  iterations_per_s: z.number().nullable(),
  gate: z.object({
    waits: count,
    wait_ms: ms,
    inflight_waits: count,
    inflight_wait_ms: ms,
    starved: count,
    /** Launches that the least share let out beside high clients that never rest. */
    shared: count,
    /** Kernels launched under policy orion that no profile knows. */
    unprofiled: count,
    /** CUDA graphs that the gate has cut, the pieces that went out, those that went out whole though they were long, and why
     * the last of them did. */
    graphs_cut: count,
    graph_pieces: count,
    graphs_whole: count,
    graph_whole_reason: z.enum(GRAPH_WHOLE).nullable(),
  }),
  /** GPU time that policy fair has charged: the sum of its kernels' durations; 0 under other policies. */
  charged_ms: ms,
  /** Time slices and suspensions by channel control, or stops (under MPS); off: neither is possible here, or not wanted. */
  preemption: z.object({
    state: z.enum(["unknown", "on", "off", "stops"]),
    suspensions: count,
    suspended_ms: ms,
    /** Calls for that which the driver held up for 2 ms or more, as it does while programs start on some GPU of the host. */
    slow_calls: count,
    /** Of a high client: requests after which the GPU was to stay with it for those that follow at once, in time slices. */
    stays: count,
    /** Requests for which it was to come over ahead of their input. */
    ahead: count,
    /** ... of those: that were seen coming, by what arrived at the program's sockets and pipes. */
    foreseen: count,
  }),
  /** What the cuBLAS guard counted and repaired. */
  guard: guardSchema,
});
export type Measured = z.infer<typeof measuredSchema>;

/** Device memory of all processes of a client; limit null: none. */
const memorySchema = z.object({
  limit_bytes: count.nullable(),
  used_bytes: count,
  peak_bytes: count,
  /** Allocations refused because of the limit. */
  denied: count,
});

/** One process of a client. */
const processSchema = z.object({
  slot: count,
  pid: count,
  /** ended: it said so; dead: it was killed. */
  state: z.enum(["live", "ended", "dead"]),
  attached_ms: moment_ms,
  first_launch_ms: moment_ms.nullable(),
  ended_ms: moment_ms.nullable(),
  /** Since the last sign of life; null once it has ended. More than settings.stale_ms: it is stopped, and holds nobody back. */
  heartbeat_age_ms: ms.nullable(),
});

/** What happened between two readings. */
const ratesSchema = z.object({
  interval_s: z.number(),
  launches_per_s: z.number(),
  requests_per_s: z.number(),
  /** Of the requests that ended in the interval. */
  requests: requestsSchema,
  iterations_per_s: z.number().nullable(),
  copies_per_s: z.number(),
  gate_waits_per_s: z.number(),
  /** Milliseconds waited at the gate per second, all threads together: above 1000 where several wait. */
  gate_wait_ms_per_s: ms,
  inflight_waits_per_s: z.number(),
  inflight_wait_ms_per_s: ms,
  suspensions_per_s: z.number(),
  suspended_ms_per_s: ms,
  charged_ms_per_s: ms,
  guard_repaired_per_s: z.number(),
});

const clientSchema = z
  .object({
    name: z.string(),
    class: z.enum(["high", "best-effort"]),
    /** live: a process of it runs; ended: all have ended by themselves; dead: the last one was killed. */
    state: z.enum(["live", "ended", "dead"]),
    /** Held back by `rigel pause`. */
    paused: z.boolean(),
    /** Indices in `devices`. */
    devices: z.array(count),
    attached_ms: moment_ms,
    first_launch_ms: moment_ms.nullable(),
    ended_ms: moment_ms.nullable(),
    processes: z.array(processSchema),
    /** Under policy fair. */
    weight: z.number(),
    /** Waits at the gate, one by one. */
    gate_waits: z.object({ p50_ms: ms.nullable(), p95_ms: ms.nullable(), p99_ms: ms.nullable() }),
    /** Kernels whose duration was known before they were launched, and launches that it timed itself. */
    durations: z.object({ seeded: count, samples: count }),
    memory: memorySchema,
    /**
     * Part of the time, lately (between the last two looks, about a second), for which its kernels ran on its GPU, 0 to 1; the
     * mean of its GPUs where it works on several. null: not known, or it does not run.
     */
    gpu_share: z.number().nullable(),
    rates: ratesSchema.nullable(),
  })
  .extend(measuredSchema.shape);

const latenciesSchema = z.object({ requests: count, p50_ms: ms.nullable(), p99_ms: ms.nullable() });

/** The control loop of policy slo, while one runs. */
const sloSchema = z.object({
  target: z.union([z.object({ p99_over_alone: z.number() }), z.object({ p99_ms: ms })]),
  /** The process that runs the loop. */
  holder_pid: count,
  /** What requests take alone, as learned in moments in which best-effort work was held. */
  alone: latenciesSchema,
  /** What they take with the settings in force. */
  now: latenciesSchema,
  /** How long the latest requests took over how long the same ones would have taken alone; null where that cannot be told. */
  over_alone: z.object({ requests: count, p50: z.number(), p99: z.number() }).nullable(),
  /** Place on the ladder of settings, from 0, the safest for the high clients. */
  rung: count,
  changes: count,
  /** Seconds for which best-effort work was held to learn `alone`. */
  held_s: z.number(),
  /** Even the strictest settings miss the target. */
  unreachable: z.boolean(),
});

/** A segment at one moment. */
export const statsSchema = z.object({
  schema: z.literal(1),
  at: z.iso.datetime(),
  at_ms: moment_ms,
  segment: z.object({
    /** The file's name: which of the user's segments it is. */
    id: z.string(),
    path: z.string(),
    creator_pid: count,
    created_ms: moment_ms,
    /** Processes that fit, and slots that were ever taken. */
    capacity: count,
    processes: count,
    /** Processes that found no free slot. */
    refused: count,
    /** Processes whose counts were cleared because a client of another name needed their slot. */
    overwritten: count,
  }),
  policy: z.enum(POLICIES),
  settings: z.record(z.string(), count),
  slo: sloSchema.nullable(),
  devices: z.array(z.object({ index: count, uuid: z.string(), name: z.string(), high_busy: z.boolean() })),
  clients: z.array(clientSchema),
});
export type Stats = z.infer<typeof statsSchema>;
export type ClientStats = Stats["clients"][number];
type Rates = z.infer<typeof ratesSchema>;

/** A segment at one moment, with its histograms: what a Stats is made from. */
export interface Reading {
  at_ns: number;
  at: Date;
  segment: Stats["segment"];
  policy: Stats["policy"];
  settings: Readonly<Record<string, number>>;
  slo: Stats["slo"];
  devices: SegmentDevice[];
  totals: Snapshot;
  memory: ReadonlyMap<string, MemoryUse>;
  /** Names of clients that are held back. */
  paused: ReadonlySet<string>;
  /** undefined: nobody has looked. */
  gpu_shares: ClientShares | undefined;
}

/** Reads everything: some 100 us per process of a client. */
export function readingOf(segment: Segment, gpus?: GpuShares): Reading {
  const totals = snapshotOf(segment);
  const devices = segment.devices();
  const { pid, created_ns } = segment.creator;
  const at_ns = segment.now_ns;
  return {
    at_ns,
    at: new Date(),
    segment: {
      id: segment.id,
      path: segment.path,
      creator_pid: pid,
      created_ms: milliseconds(created_ns),
      capacity: segment.capacity,
      processes: [...totals.values()].reduce((sum, { processes }) => sum + processes.length, 0),
      refused: segment.refused,
      overwritten: segment.overwritten,
    },
    policy: segment.policy,
    settings: segment.settings(),
    slo: segment.loop ?? null,
    devices,
    totals,
    memory: segment.memory(),
    paused: new Set([...totals.keys()].filter((name) => (segment.wanted(name)?.paused_until_ns ?? 0) > at_ns)),
    gpu_shares: gpus?.of(segment, totals, devices),
  };
}

/** A reading as data; with an earlier one of the same segment, also what happened in between. */
export function statsOf(now: Reading, before?: Reading): Stats {
  const clients = [...now.totals].map(([name, total]) => clientOf(name, total, now, before));
  return {
    schema: 1,
    at: now.at.toISOString(),
    at_ms: milliseconds(now.at_ns),
    segment: now.segment,
    policy: now.policy,
    settings: now.settings,
    slo: now.slo,
    devices: now.devices,
    clients: clients.toSorted((a, b) => a.attached_ms - b.attached_ms),
  };
}

type Total = Snapshot extends ReadonlyMap<string, infer Value> ? Value : never;

function clientOf(name: string, total: Total, now: Reading, before: Reading | undefined): ClientStats {
  const processes = total.processes.map((process) => ({
    slot: process.index,
    pid: process.pid,
    state: !process.finished ? ("live" as const) : process.clean ? ("ended" as const) : ("dead" as const),
    attached_ms: milliseconds(process.attached_ns),
    first_launch_ms: process.first_launch_ns > 0 ? milliseconds(process.first_launch_ns) : null,
    ended_ms: process.ended_ns === undefined ? null : milliseconds(process.ended_ns),
    heartbeat_age_ms: process.finished ? null : Math.max(0, milliseconds(now.at_ns - process.heartbeat_ns)),
  }));
  // One that has ended has no part in what is set for the client.
  const latest = total.processes.toSorted(
    (a, b) => Number(a.finished) - Number(b.finished) || b.attached_ns - a.attached_ns,
  )[0];
  const last = processes.toSorted((a, b) => (b.ended_ms ?? 0) - (a.ended_ms ?? 0))[0];
  const live = processes.some(({ state }) => state === "live");
  const launched = processes.flatMap(({ first_launch_ms }) => first_launch_ms ?? []);
  const attached_ms = Math.min(...processes.map((process) => process.attached_ms));
  const ended_ms = live ? null : (last?.ended_ms ?? null);
  const guard = { mode: total.guard_mode, events: total.guard_events };
  const counted_s = ((ended_ms ?? milliseconds(now.at_ns)) - Math.min(attached_ms, ...launched)) / 1000;
  const memory = now.memory.get(name);
  const earlier = before?.totals.get(name);
  return {
    name,
    class: latest?.class ?? "best-effort",
    state: live ? "live" : (last?.state ?? "ended"),
    paused: now.paused.has(name),
    devices: [...new Set(total.processes.flatMap(({ devices }) => devices))].toSorted((a, b) => a - b),
    attached_ms,
    first_launch_ms: launched.length > 0 ? Math.min(...launched) : null,
    ended_ms,
    processes,
    weight: latest?.weight ?? 1,
    ...measured(total.usage, Math.max(0, counted_s), guard),
    gate_waits: percentiles(total.usage.wait_ns),
    durations: { seeded: total.usage.counters.durations_seeded, samples: total.usage.counters.samples },
    memory: {
      limit_bytes: memory?.limit_bytes ?? null,
      used_bytes: memory?.used_bytes ?? 0,
      peak_bytes: memory?.peak_bytes ?? 0,
      denied: memory?.denied ?? 0,
    },
    gpu_share: now.gpu_shares?.get(name) ?? null,
    rates: before ? ratesOf(since(total, earlier), (now.at_ns - before.at_ns) / 1e9, guard) : null,
  };
}

/**
 * What a client's processes have added, slot by slot: those of one that has ended go when another client needs its slot, and are no less done.
 * Where that was taken back meanwhile its counts began anew.
 */
function since(now: Total, before: Total | undefined): Usage {
  const added = now.processes.map(({ index, usage }) => {
    const was = before?.processes.find((process) => process.index === index)?.usage;
    const more = was ? combine(usage, was, -1) : usage;
    const grew = more.request_ns.isCount && more.report_ns.isCount && Object.values(more.counters).every((n) => n >= 0);
    return grew ? more : usage;
  });
  return added.reduce((sum, one) => combine(sum, one, 1));
}

/** Per second, of what happened in `interval_s`. */
function ratesOf(between: Usage, interval_s: number, guard: Pick<GuardReport, "mode" | "events">): Rates {
  const did = measured(between, interval_s, guard);
  const perSecond = (amount: number): number => (interval_s > 0 ? round(amount / interval_s) : 0);
  return {
    interval_s: round(interval_s),
    launches_per_s: did.launches_per_s,
    requests_per_s: perSecond(did.requests.count),
    requests: did.requests,
    iterations_per_s: did.iterations_per_s,
    copies_per_s: perSecond(did.copies),
    gate_waits_per_s: perSecond(did.gate.waits),
    gate_wait_ms_per_s: perSecond(did.gate.wait_ms),
    inflight_waits_per_s: perSecond(did.gate.inflight_waits),
    inflight_wait_ms_per_s: perSecond(did.gate.inflight_wait_ms),
    suspensions_per_s: perSecond(did.preemption.suspensions),
    suspended_ms_per_s: perSecond(did.preemption.suspended_ms),
    charged_ms_per_s: perSecond(did.charged_ms),
    guard_repaired_per_s: perSecond(did.guard.repaired),
  };
}

/** What is made from a client's counters; `guard` is what is not counted. */
export function measured(usage: Usage, counted_s: number, guard: Pick<GuardReport, "mode" | "events">): Measured {
  const { counters } = usage;
  const perSecond = (amount: number): number => (counted_s > 0 ? round(amount / counted_s) : 0);
  const reports = counters.reports > 0;
  const histogram = reports ? usage.report_ns : usage.request_ns;
  return {
    counted_s: round(counted_s),
    launches: counters.launches,
    launches_per_s: perSecond(counters.launches + counters.graph_launches),
    graph_launches: counters.graph_launches,
    copies: counters.copies,
    memsets: counters.memsets,
    requests: {
      count: reports ? counters.reports : counters.requests,
      ...percentiles(histogram),
      source: reports ? "program" : counters.requests > 0 ? "busy-period" : null,
    },
    iterations: reports ? counters.reports : null,
    iterations_per_s: reports ? perSecond(counters.reports) : null,
    gate: {
      waits: counters.gate_waits,
      wait_ms: milliseconds(counters.gate_wait_ns),
      inflight_waits: counters.inflight_waits,
      inflight_wait_ms: milliseconds(counters.inflight_wait_ns),
      starved: counters.starved,
      shared: counters.shared,
      unprofiled: counters.unprofiled,
      graphs_cut: counters.graphs_cut,
      graph_pieces: counters.graph_pieces,
      graphs_whole: counters.graphs_whole,
      graph_whole_reason: counters.graphs_whole > 0 ? usage.graph_whole : null,
    },
    preemption: {
      state: usage.preemption,
      suspensions: counters.suspensions,
      suspended_ms: milliseconds(counters.suspended_ns),
      slow_calls: counters.slow_calls,
      stays: counters.stays,
      ahead: counters.ahead,
      foreseen: counters.foreseen,
    },
    charged_ms: milliseconds(counters.charged_ns),
    guard: {
      mode: guard.mode,
      null_handle: counters.guard_null_handle,
      wrong_context: counters.guard_wrong_context,
      no_context: counters.guard_no_context,
      in_use_elsewhere: counters.guard_in_use_elsewhere,
      foreign_stream: counters.guard_foreign_stream,
      create_failed: counters.guard_create_failed,
      create_retried: counters.guard_create_retried,
      repaired: counters.guard_repaired,
      events: guard.events,
    },
  };
}

function percentiles(histogram: Histogram): { p50_ms: number | null; p95_ms: number | null; p99_ms: number | null } {
  const at = (q: number): number | null => {
    const value = histogram.quantile_ms(q);
    return value === null ? null : round(value);
  };
  return { p50_ms: at(0.5), p95_ms: at(0.95), p99_ms: at(0.99) };
}

/** Six digits after the point: enough for nanoseconds in milliseconds, and no noise of binary fractions. */
export function round(value: number): number {
  return Math.round(value * 1e6) / 1e6;
}

function milliseconds(ns: number): number {
  return round(ns / 1e6);
}
