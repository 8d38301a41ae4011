/**
 * profile-show.ts: `rigel profile show`: what a profile's time goes to: by kind of work, and its longest kernels.
 *
 * Streams: of each kernel's name one sum is kept, whatever the number of rows.
 */

import { BOUNDS, type Bound, type Family, boundOf } from "./classify.ts";
import { shortName } from "./kernel-name.ts";
import { type Operation, openProfile } from "./profile.ts";

interface FamilySum {
  family: Family;
  count: number;
  time_ns: number;
  /** Of the time of all operations. */
  share: number;
  /** Time by what its kernels are bound by. */
  bound_ns: Record<Bound, number>;
}

interface KernelSum {
  name: string;
  family: Family;
  count: number;
  time_ns: number;
  share: number;
  mean_ns: number;
  longest_ns: number;
}

/** The document of `--json`. Fields are public: they may be added, never renamed. */
export interface ProfileView {
  schema: 1;
  path: string;
  facts: Record<string, string>;
  operations: number;
  kernels: number;
  copies: number;
  memsets: number;
  waits: number;
  requests: number;
  streams: number;
  /** Sum of the operations' durations. */
  time_ns: number;
  gap_ns: number;
  bound_ns: Record<Bound, number>;
  /** Why kernels are thought to be bound by what they are bound by, or why that is not known, with how many. */
  bound_reasons: { reason: string; count: number }[];
  families: FamilySum[];
  longest: KernelSum[];
}

const MOST_REASONS = 10;
/** Those that stand for themselves: not of "H200", "fp32". */
const NUMBERS = /(?<![\w.])\d+(\.\d+)?%?/g;

/** Sums a profile up. `most`: how many of the kernels that take longest in total. */
export async function viewProfile(path: string, most: number): Promise<ProfileView> {
  const { facts, operations, format } = await openProfile(path);
  const families = new Map<Family, FamilySum>();
  const kernels = new Map<string, KernelSum>();
  const reasons = new Map<string, number>();
  const streams = new Set<number>();
  const requests = new Set<number>();
  const view: ProfileView = {
    schema: 1,
    path,
    facts: { ...(format === "orion" && { format: "Orion's" }), ...Object.fromEntries(facts) },
    operations: 0,
    kernels: 0,
    copies: 0,
    memsets: 0,
    waits: 0,
    requests: 0,
    streams: 0,
    time_ns: 0,
    gap_ns: 0,
    bound_ns: noTime(),
    bound_reasons: [],
    families: [],
    longest: [],
  };
  for await (const operation of operations) {
    const { kind, family, duration_ns, name } = operation;
    view.operations++;
    view.gap_ns += operation.gap_ns;
    requests.add(operation.request);
    if (kind === "sync") {
      view.waits++;
      continue;
    }
    view.time_ns += duration_ns;
    streams.add(operation.stream);
    const { bound, reason } = known(operation, facts.get("device") ?? "");
    view.bound_ns[bound] += duration_ns;
    const sum = families.get(family) ?? { family, count: 0, time_ns: 0, share: 0, bound_ns: noTime() };
    families.set(family, sum);
    sum.count++;
    sum.time_ns += duration_ns;
    sum.bound_ns[bound] += duration_ns;
    if (kind === "memset") view.memsets++;
    else if (kind !== "kernel") view.copies++;
    if (kind !== "kernel") continue;
    view.kernels++;
    const general = `${bound}: ${reason.replaceAll(NUMBERS, "n")}`;
    reasons.set(general, (reasons.get(general) ?? 0) + 1);
    const one = kernels.get(name) ?? { name, family, count: 0, time_ns: 0, share: 0, mean_ns: 0, longest_ns: 0 };
    kernels.set(name, one);
    one.count++;
    one.time_ns += duration_ns;
    one.longest_ns = Math.max(one.longest_ns, duration_ns);
  }
  const share = (time_ns: number): number => (view.time_ns > 0 ? time_ns / view.time_ns : 0);
  view.requests = requests.size;
  view.streams = streams.size;
  view.bound_reasons = [...reasons]
    .toSorted(([, a], [, b]) => b - a)
    .slice(0, MOST_REASONS)
    .map(([reason, count]) => ({ reason, count }));
  view.families = [...families.values()].toSorted((a, b) => b.time_ns - a.time_ns);
  for (const sum of view.families) sum.share = share(sum.time_ns);
  view.longest = [...kernels.values()].toSorted((a, b) => b.time_ns - a.time_ns).slice(0, most);
  for (const sum of view.longest) {
    sum.share = share(sum.time_ns);
    sum.mean_ns = sum.time_ns / sum.count;
  }
  return view;
}

function noTime(): Record<Bound, number> {
  return { compute: 0, memory: 0, unknown: 0 };
}

/** As the file says, or as its other columns tell where it says nothing. */
function known(operation: Operation, device: string): { bound: Bound; reason: string } {
  const { bound, bound_reason: reason } = operation;
  return bound !== "unknown" || reason !== "" ? { bound, reason } : boundOf({ ...operation, device });
}

const BAR_width = 20;

/** For a terminal of 80 columns. `coloured`: bars in colour, which say nothing that the text does not. */
export function viewText(view: ProfileView, coloured: boolean): string {
  const { path, facts, operations, kernels, copies, memsets, waits, requests, streams, time_ns, gap_ns } = view;
  const lines = [
    `${path}: ${facts["device"] ?? facts["format"] ?? "a GPU that the file does not name"}`,
    `${operations} operations: ${kernels} kernels, ${copies} copies, ${memsets} memsets, ${waits} waits`,
    `${counted(requests, "request")}, ${counted(streams, "stream")}, ${ms(time_ns)} ms on the GPU, ` +
      `${ms(gap_ns)} ms of gaps${facts["gaps"] === undefined ? "" : ` (${facts["gaps"]})`}`,
    "",
    `${"kind".padEnd(14)}${"count".padStart(8)}${"time ms".padStart(12)}${"share".padStart(8)}  bound`,
  ];
  for (const { family, count, time_ns: time, share, bound_ns } of view.families) {
    const bar = "#".repeat(Math.round(share * BAR_width));
    lines.push(
      `${family.padEnd(14)}${String(count).padStart(8)}${ms(time).padStart(12)}${percent(share).padStart(8)}  ` +
        `${mainBound(bound_ns).padEnd(14)}${coloured ? `\u001b[36m${bar}\u001b[0m` : bar}`.trimEnd(),
    );
  }
  if (view.longest.length > 0)
    lines.push(
      "",
      `${"time ms".padStart(9)}${"share".padStart(7)}${"count".padStart(7)}${"mean us".padStart(10)}  ${"kind".padEnd(14)}kernel`,
    );
  for (const { name, family, count, time_ns: time, share, mean_ns } of view.longest)
    lines.push(
      `${ms(time).padStart(9)}${percent(share).padStart(7)}${String(count).padStart(7)}` +
        `${(mean_ns / 1000).toFixed(1).padStart(10)}  ${family.padEnd(14)}${clipped(shortName(name), 31)}`,
    );
  if (view.bound_reasons.length > 0) lines.push("", "why (kernels):");
  for (const { reason, count } of view.bound_reasons)
    lines.push(`${String(count).padStart(8)}  ${clipped(reason, 70)}`);
  return lines.join("\n");
}

function counted(count: number, what: string): string {
  return `${count} ${what}${count === 1 ? "" : "s"}`;
}

function ms(time_ns: number): string {
  return (time_ns / 1e6).toFixed(3);
}

function percent(share: number): string {
  return `${(share * 100).toFixed(1)}%`;
}

/** What most of the time is bound by, and how much of it. */
export function mainBound(bound_ns: Record<Bound, number>): string {
  const total = BOUNDS.reduce((sum, bound) => sum + bound_ns[bound], 0);
  const most = BOUNDS.toSorted((a, b) => bound_ns[b] - bound_ns[a])[0] ?? "unknown";
  const share = total > 0 ? Math.round((bound_ns[most] / total) * 100) : 100;
  return `${most} ${share}%`;
}

function clipped(text: string, width: number): string {
  const plain = text.replaceAll(/[\u0000-\u001f\u007f-\u009f]/g, "?");
  return plain.length > width ? `${plain.slice(0, width - 3)}...` : plain;
}
