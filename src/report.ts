/**
 * report.ts: what a launch found: the JSON document for machines and the table for people, made from the same object.
 *
 * Fields of the document are public: they may be added, never renamed. Schema 1.
 */

import { printable } from "./log.ts";
import { guardLines } from "./cublas-guard.ts";
import type { Device } from "./device.ts";
import type { Policy } from "./config.ts";
import { type Finding, findingLines } from "./doctor-checks.ts";
import { sizeText } from "./memory.ts";
import { type Match, matchLines } from "./match.ts";
import type { MemoryUse } from "./segment.ts";
import type { Sharing } from "./mps.ts";
import { changesText, digits, endText, settingsText, shareText, targetText, throughput } from "./show.ts";
import type { SloReport } from "./slo-loop.ts";
import { type Measured, round } from "./stats.ts";

export type Mode = "alone" | "ungoverned" | "governed";

/** How one client did in one phase. */
export interface ClientReport extends Measured {
  name: string;
  class: "high" | "best-effort";
  /** As a shell gives it: 128 + n for signal n; null if it was never started. */
  exit_code: number | null;
  /** Rigel ended it, so its exit code says nothing. */
  stopped: boolean;
  attached: boolean;
  /** Why not, if it did not attach. */
  attach_problem: string | null;
  device: Pick<Device, "name" | "uuid" | "simulated">;
  /** It was under MPS (or the simulated GPU's model of it), as far as is known, rather than in time slices. */
  mps: boolean;
  /** Since it started: kernels whose duration was known before it launched them, and launches that it timed itself. */
  durations: { seeded: number; samples: number };
  /** Device memory: the limit (null: none), what was in use when counting ended, the most ever, allocations refused. */
  memory: { limit_bytes: number | null; used_bytes: number; peak_bytes: number; denied: number };
  /**
   * Part of the time for which its kernels ran on its GPU (the mean of several) while it was counted, 0 to 1, as looked at about once
   * a second; null if that is not known, as of a client that ended before.
   */
  gpu_share: number | null;
  /** Its kernels against the profile it was given; null without one, or if it has not attached. */
  match: Match | null;
  /** Against the same client alone, in a comparison. */
  versus_alone?: Versus;
  /** Clients that threads of its processes have entered; what they did is not in the counts of this one. */
  threads?: ThreadClient[];
}

/** A client that threads have entered (rigel_client_enter), summed over the processes in which they have. */
export interface ThreadClient extends Measured {
  name: string;
  class: "high" | "best-effort";
  processes: number;
  /** Indices in the segment's devices. */
  devices: number[];
}

interface Versus {
  /** Latency over latency alone; 1 is no change. */
  p50: number | null;
  p99: number | null;
  /** Throughput over throughput alone; 1 is no change. */
  share: number | null;
  /** What the throughput is counted in. */
  share_of: "iterations" | "launches";
}

/** What the control loop found, and whether requests missed its target at the end; null: too little is known of them. */
interface SloOutcome extends SloReport {
  missed: boolean | null;
}

export interface Report {
  schema: 1;
  device: Pick<Device, "name" | "uuid" | "simulated">;
  /** In force at the end. */
  policy: Policy & { inflight: number };
  sharing: Sharing;
  /** As sharing.mode says. */
  mps: boolean;
  duration_s: number;
  /** What the control loop of policy slo found and did in the last phase, also where that was left; null if it never ran. */
  slo: SloOutcome | null;
  clients: ClientReport[];
  compare: { mode: Mode; clients: ClientReport[] }[];
  notes: string[];
  /** What `rigel doctor` finds not to be well; looked for only if a client has not attached, or failed at once. */
  findings: Finding[];
}

/** The part about device memory; `limit_bytes` is what was configured, for a client that has not attached. */
export function memoryReport(use: MemoryUse | undefined, limit_bytes: number | undefined): ClientReport["memory"] {
  if (!use) return { limit_bytes: limit_bytes ?? null, used_bytes: 0, peak_bytes: 0, denied: 0 };
  return {
    limit_bytes: use.limit_bytes,
    used_bytes: use.used_bytes,
    peak_bytes: use.peak_bytes,
    denied: use.denied,
  };
}

/** Adds to each client of the later phases how it did against itself alone. */
export function compared(phases: readonly { mode: Mode; clients: ClientReport[] }[]): Report["compare"] {
  const alone = new Map(
    phases.flatMap(({ mode, clients }) => (mode === "alone" ? clients.map((client) => [client.name, client]) : [])),
  );
  return phases.map(({ mode, clients }) => ({
    mode,
    clients: clients.map((client) => {
      const base = alone.get(client.name);
      return mode === "alone" || !base ? client : { ...client, versus_alone: versus(client, base) };
    }),
  }));
}

function versus(client: ClientReport, alone: ClientReport): Versus {
  const both = client.iterations_per_s !== null && alone.iterations_per_s !== null;
  return {
    p50: ratio(client.requests.p50_ms, alone.requests.p50_ms),
    p99: ratio(client.requests.p99_ms, alone.requests.p99_ms),
    share: both
      ? ratio(client.iterations_per_s, alone.iterations_per_s)
      : ratio(client.launches_per_s, alone.launches_per_s),
    share_of: both ? "iterations" : "launches",
  };
}

function ratio(value: number | null, base: number | null): number | null {
  return value === null || base === null || base <= 0 ? null : round(value / base);
}

/** The report as people read it. */
export function table(report: Report): string {
  const { device, policy } = report;
  const how =
    policy.name === "none" ? "none" : `${policy.name}, ${policy.inflight || "any number of"} launches in flight`;
  const head = `${device.name} | policy: ${how} | ${shared(report.sharing)} | ${report.duration_s.toFixed(1)} s`;
  const parts = [head, ""];
  parts.push(...clientTable(report.clients));
  if (report.clients.some(({ memory }) => memory.limit_bytes !== null)) parts.push("", ...memoryTable(report.clients));
  if (report.compare.length > 0) parts.push("", ...compareTable(report.compare));
  if (report.slo) parts.push("", ...sloLines(report.slo));
  const matches = report.clients.flatMap(({ name, match }) => (match ? matchLines(name, match) : []));
  if (matches.length > 0) parts.push("", ...matches);
  const guarded = report.clients.flatMap(({ name, guard }) => guardLines(name, guard));
  if (guarded.length > 0) parts.push("", ...guarded);
  parts.push(...graphLines(report.clients));
  const notes = allNotes(report);
  if (notes.length > 0) parts.push("", ...notes.map((note) => `note: ${note}`));
  if (report.findings.length > 0) parts.push("", "rigel doctor finds:", ...report.findings.flatMap(findingLines));
  return parts.join("\n");
}

/** What is to be said of a launch for people: its notes, and what follows from the rest of its report. */
export function allNotes(report: Report): string[] {
  return [
    ...report.notes,
    ...notUnderMps(report),
    ...heldUp(report.clients),
    ...report.clients.flatMap(({ name, attach_problem: problem }) =>
      problem ? [`${name}: not attached: ${problem}`] : [],
    ),
  ];
}

/** Who runs otherwise than the launch does. Alone is whoever can be, so that what MPS itself costs is in the ratios. */
function notUnderMps({ mps, compare, clients }: Report): string[] {
  if (!mps) return [];
  const alone = compare.filter(({ mode }) => mode === "alone").flatMap((phase) => phase.clients);
  const others = compare.at(-1)?.mode === "alone" ? [] : clients.filter((client) => !client.mps);
  return [
    ...(alone.some((client) => !client.mps) ? ["alone: not under MPS, but for clients that have an sm_percent"] : []),
    ...others.map(({ name }) => `${name}: not under MPS`),
  ];
}

/** So many slow calls are told of, and so large a part of all: one in thousands is slow without any reason that could be told. */
const SLOW_CALLS = 10;
const SLOW_PART = 0.002;

/** Whose suspensions the driver held up, by which requests may have been late. */
export function heldUp(clients: readonly Pick<ClientReport, "name" | "preemption">[]): string[] {
  return clients
    .filter(
      ({ preemption: { slow_calls, suspensions } }) => slow_calls >= Math.max(SLOW_CALLS, SLOW_PART * suspensions),
    )
    .map(
      ({ name, preemption }) =>
        `${name}: ${preemption.slow_calls} calls of the driver to suspend or resume it took 2 ms or more, as they do while programs start on ` +
        "some GPU of the host; requests may have waited for them",
    );
}

/** How clients are on the GPU together, in a few words. */
export function shared({ mode, daemon, pipe_directory }: Sharing): string {
  if (mode === "time-slice") return "time slices";
  if (daemon === null) return "MPS";
  return daemon === "private" ? "MPS, own daemon" : `MPS, daemon of ${pipe_directory}`;
}

function clientTable(clients: readonly ClientReport[]): string[] {
  const rows = clients.flatMap((client) => [
    [
      client.name,
      client.class,
      client.stopped ? "stopped" : client.exit_code === null ? "not started" : `exit ${client.exit_code}`,
      client.attached ? "yes" : "NO",
      ...countCells(client),
      shareText(client.gpu_share),
    ],
    ...(client.threads ?? []).map((own) => [`  ${own.name}`, own.class, "", "", ...countCells(own), ""]),
  ]);
  return aligned(
    [
      "client",
      "class",
      "end",
      "attached",
      "launches",
      "requests",
      "p50 ms",
      "p95 ms",
      "p99 ms",
      "iter/s",
      "gate waits",
      "wait ms",
      "gpu %",
    ],
    rows,
    4,
  );
}

/** What the gate did about CUDA graphs, of the clients that had long ones there. */
function graphLines(clients: readonly ClientReport[]): string[] {
  const lines = clients.flatMap(({ name, gate }) => {
    const { graphs_cut: cut, graph_pieces: pieces, graphs_whole: whole, graph_whole_reason: reason } = gate;
    if (pieces === 0 && whole === 0) return [];
    const out = whole > 0 ? `; ${whole} whole${reason ? `, the last since ${reason}` : ""}` : "";
    return [`graphs: ${name}: ${pieces} pieces launched, ${cut} graphs cut${out}`];
  });
  return lines.length > 0 ? ["", ...lines] : [];
}

function countCells(client: Measured): string[] {
  return [
    String(client.launches + client.graph_launches),
    String(client.requests.count),
    digits(client.requests.p50_ms),
    digits(client.requests.p95_ms),
    digits(client.requests.p99_ms),
    digits(client.iterations_per_s),
    String(client.gate.waits),
    digits(client.gate.wait_ms),
  ];
}

function memoryTable(clients: readonly ClientReport[]): string[] {
  const rows = clients.map(({ name, memory }) => [
    name,
    memory.limit_bytes === null ? "none" : sizeText(memory.limit_bytes),
    sizeText(memory.used_bytes),
    sizeText(memory.peak_bytes),
    String(memory.denied),
  ]);
  return aligned(["device memory", "limit", "in use", "peak", "refused"], rows, 1);
}

function compareTable(compare: Report["compare"]): string[] {
  const modes = compare.map(({ mode }) => mode);
  const names = [...new Set(compare.flatMap(({ clients }) => clients.map(({ name }) => name)))];
  const rows: string[][] = [];
  for (const name of names) {
    const found = compare.map(({ clients }) => clients.find((client) => client.name === name));
    const row = (what: string, cell: (client: ClientReport) => string): void => {
      rows.push([name, what, ...found.map((client) => (client ? cell(client) : "-"))]);
    };
    if (found.some((client) => client?.class === "high")) {
      row("p50 ms", (client) => withRatio(client.requests.p50_ms, client.versus_alone?.p50));
      row("p99 ms", (client) => withRatio(client.requests.p99_ms, client.versus_alone?.p99));
    } else {
      const { unit, of } = throughput(found);
      row(unit, (client) => withRatio(of(client), client.versus_alone?.share));
    }
  }
  return aligned(["compared", "", ...modes], rows, 2);
}

function latencies({ requests, p50_ms, p99_ms }: SloReport["now"]): string {
  return `p50 ${digits(p50_ms)} ms, p99 ${digits(p99_ms)} ms (${requests} requests)`;
}

/** What the control loop aimed at, and where it stands. */
function sloLines(slo: SloOutcome): string[] {
  const { target, alone, now, over_alone, settings, held_s } = slo;
  const end = endText(slo);
  return [
    `slo: target p99 ${targetText(target)}${end && `, ${end}`}`,
    ...(alone.requests > 0
      ? [`     alone: ${latencies(alone)}, best-effort held for ${held_s.toFixed(1)} s to learn it`]
      : []),
    ...(over_alone
      ? [
          `     delayed: p50 x${over_alone.p50.toFixed(2)}, p99 x${over_alone.p99.toFixed(2)} of what the same requests would take ` +
            `alone (the last ${over_alone.requests})`,
        ]
      : []),
    `     at the end: ${latencies(now)} with ${settingsText(settings)}${slo.turns ? ", best-effort clients in turns of 1 s" : ""}`,
    `     ${changesText(slo)}`,
  ];
}

function withRatio(value: number | null, versusAlone: number | null | undefined): string {
  if (versusAlone === undefined || versusAlone === null) return digits(value);
  return `${digits(value)} (x${versusAlone.toFixed(2)})`;
}

/** Columns of equal width, printable; the first `left` ones begin at the left, the others end at the right. */
export function aligned(header: string[], rows: string[][], left: number): string[] {
  const widths = header.map((title, column) => Math.max(title.length, ...rows.map((row) => row[column]?.length ?? 0)));
  return [header, ...rows].map((row) =>
    printable(
      row
        .map((cell, column) => (column < left ? cell.padEnd(widths[column] ?? 0) : cell.padStart(widths[column] ?? 0)))
        .join("  ")
        .trimEnd(),
    ),
  );
}
