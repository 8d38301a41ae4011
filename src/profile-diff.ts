/**
 * profile-diff.ts: `rigel profile diff`: which kernels one profile has that another does not have, or has more often, or
 * slower.
 *
 * Kernels are matched by name and shape, never by position, so that one kernel more at the beginning is one difference.
 */

import type { Family, OperationKind } from "./classify.ts";
import { comparableName, isGraph, shortName } from "./kernel-name.ts";
import { type Operation, openProfile } from "./profile.ts";

interface Side {
  count: number;
  /** Mean duration; null where there is none. */
  mean_ns: number | null;
}

type Status = "missing" | "new" | "count" | "slower" | "faster";

export interface Difference {
  /** missing: in A alone; new: in B alone; count: in both, not as often; slower, faster: B's mean against A's. */
  status: Status;
  name: string;
  kind: OperationKind;
  family: Family;
  grid: number[];
  block: number[];
  a: Side;
  b: Side;
}

interface Total {
  path: string;
  operations: number;
  kernels: number;
  requests: number;
  time_ns: number;
}

/** The document of `--json`. Fields are public: they may be added, never renamed. */
export interface ProfileDifference {
  schema: 1;
  a: Total;
  b: Total;
  /** Counts are for each request rather than for the whole file. */
  per_request: boolean;
  /** Launches of A without a counterpart in B, and the other way round. */
  launches_missing: number;
  launches_new: number;
  same: number;
  differences: Difference[];
  notes: string[];
}

interface Group {
  name: string;
  kind: OperationKind;
  family: Family;
  grid: number[];
  block: number[];
  count: number;
  time_ns: number;
}

interface Read {
  total: Total;
  tool: string;
  groups: Map<string, Group>;
  /** Some kernels have no shape (Orion's files). */
  shapeless: boolean;
}

/** Compares what B has against what A has. `threshold`: the relative change of a mean duration from which on it is told. */
export async function diffProfiles(
  a_path: string,
  b_path: string,
  options: { threshold: number; perRequest: boolean },
): Promise<ProfileDifference> {
  const a = await read(a_path);
  const b = await read(b_path);
  const notes: string[] = [];
  if (a.shapeless || b.shapeless) notes.push("one of them has no shapes: kernels are matched by name alone");
  const apart = a.tool !== b.tool;
  const kernelsAlone = apart && (a.tool === "orion" || b.tool === "orion");
  if (kernelsAlone) notes.push("Orion's form has kernels alone: copies and memsets are not compared");
  else if (apart) notes.push("recorded by different tools: copies are matched by direction alone");
  if (a.total.requests !== b.total.requests && !options.perRequest)
    notes.push(`${a.total.requests} against ${b.total.requests} requests; --per-request compares counts for each`);
  const [left, right] = [a, b].map(({ groups }) => regrouped(groups, a.shapeless || b.shapeless, apart));
  const per = (total: Total): number => (options.perRequest ? Math.max(1, total.requests) : 1);
  const result: ProfileDifference = {
    schema: 1,
    a: a.total,
    b: b.total,
    per_request: options.perRequest,
    launches_missing: 0,
    launches_new: 0,
    same: 0,
    differences: [],
    notes,
  };
  for (const key of new Set([...(left?.keys() ?? []), ...(right?.keys() ?? [])])) {
    const one = left?.get(key);
    const other = right?.get(key);
    const group = one ?? other;
    if (!group || (kernelsAlone && group.kind !== "kernel")) continue;
    const sides = { a: side(one, per(a.total)), b: side(other, per(b.total)) };
    const more = sides.b.count - sides.a.count;
    if (more < 0) result.launches_missing -= more;
    else result.launches_new += more;
    const status = statusOf(sides.a, sides.b, options.threshold);
    if (status === undefined) {
      result.same++;
      continue;
    }
    const { name, kind, family, grid, block } = group;
    result.differences.push({ status, name, kind, family, grid, block, ...sides });
  }
  result.differences.sort((x, y) => ORDER.indexOf(x.status) - ORDER.indexOf(y.status) || weight(y) - weight(x));
  return result;
}

const ORDER: Status[] = ["missing", "new", "count", "slower", "faster"];

/** Time that the difference is about. */
function weight({ a, b }: Difference): number {
  return Math.abs(a.count * (a.mean_ns ?? 0) - b.count * (b.mean_ns ?? 0));
}

async function read(path: string): Promise<Read> {
  const { operations, facts, format } = await openProfile(path);
  const groups = new Map<string, Group>();
  const total: Total = { path, operations: 0, kernels: 0, requests: 0, time_ns: 0 };
  const requests = new Set<number>();
  let shapeless = false;
  for await (const operation of operations) {
    const { name, kind, family, grid, block, duration_ns } = operation;
    if (kind === "sync") continue;
    total.operations++;
    total.time_ns += duration_ns;
    requests.add(operation.request);
    if (kind === "kernel") total.kernels++;
    if (kind === "kernel" && grid[0] === 0 && !isGraph(name)) shapeless = true;
    const key = keyOf(operation);
    const group = groups.get(key) ?? { name, kind, family, grid, block, count: 0, time_ns: 0 };
    groups.set(key, group);
    group.count++;
    group.time_ns += duration_ns;
  }
  total.requests = requests.size;
  return { total, tool: format === "orion" ? "orion" : (facts.get("tool") ?? "torch"), groups, shapeless };
}

const SEPARATOR = "\n";

function keyOf({ name, kind, grid, block, bytes }: Operation): string {
  if (kind !== "kernel") return [kind, bytes].join(SEPARATOR);
  return [kind, comparableName(name), grid.join("x"), block.join("x")].join(SEPARATOR);
}

/** Groups with shapes, or sizes of copies, left out of the key. */
function regrouped(groups: Map<string, Group>, byName: boolean, byDirection: boolean): Map<string, Group> {
  const merged = new Map<string, Group>();
  for (const [key, group] of groups) {
    const parts = key.split(SEPARATOR);
    const kept = group.kind === "kernel" ? (byName ? 2 : parts.length) : byDirection ? 1 : parts.length;
    const short = parts.slice(0, kept).join(SEPARATOR);
    const known = merged.get(short);
    if (known) {
      known.count += group.count;
      known.time_ns += group.time_ns;
    } else {
      merged.set(short, { ...group });
    }
  }
  return merged;
}

function side(group: Group | undefined, per: number): Side {
  return group ? { count: group.count / per, mean_ns: group.time_ns / group.count } : { count: 0, mean_ns: null };
}

function statusOf(a: Side, b: Side, threshold: number): Status | undefined {
  if (b.count === 0) return "missing";
  if (a.count === 0) return "new";
  if (a.count !== b.count) return "count";
  const change = ((b.mean_ns ?? 0) - (a.mean_ns ?? 0)) / Math.max(1, a.mean_ns ?? 0);
  if (change > threshold) return "slower";
  return change < -threshold ? "faster" : undefined;
}

/** As many are listed of each status; the document has all. */
const MOST_LISTED = 10;

const HEADINGS: Record<Status, string> = {
  missing: "expected and missing",
  new: "new",
  count: "of another count",
  slower: "slower",
  faster: "faster",
};

/** For a terminal of 80 columns. */
export function diffText(difference: ProfileDifference): string {
  const { a, b, launches_missing, launches_new, same, differences, notes, per_request } = difference;
  const lines = [
    `A ${totalText(a)}`,
    `B ${totalText(b)}`,
    `${number(launches_missing)} launches of A are missing in B, ${number(launches_new)} of B are new` +
      `${per_request ? " (for each request)" : ""}`,
    `${same} of ${same + differences.length} kinds of launch (name and shape) are the same`,
    ...notes.map((note) => `note: ${note}`),
  ];
  for (const status of ORDER) {
    const of = differences.filter((one) => one.status === status);
    if (of.length === 0) continue;
    lines.push("", `${HEADINGS[status]}: ${of.length}`);
    lines.push(`${"A".padStart(7)}${"B".padStart(7)}${"A us".padStart(10)}${"B us".padStart(10)}  kernel`);
    for (const one of of.slice(0, MOST_LISTED))
      lines.push(
        `${number(one.a.count).padStart(7)}${number(one.b.count).padStart(7)}${us(one.a).padStart(10)}` +
          `${us(one.b).padStart(10)}  ${label(one)}`,
      );
    if (of.length > MOST_LISTED) lines.push(`${" ".repeat(36)}and ${of.length - MOST_LISTED} more; --json lists all`);
  }
  return lines.join("\n");
}

function totalText({ path, operations, kernels, requests, time_ns }: Total): string {
  const counts = `${operations} operations, ${kernels} kernels, ${requests} request${requests === 1 ? "" : "s"}`;
  return `${path}: ${counts}, ${(time_ns / 1e6).toFixed(3)} ms`;
}

function label({ name, kind, grid, block }: Difference): string {
  const shape = kind === "kernel" && grid[0] !== 0 ? ` ${grid.join("x")}/${block.join("x")}` : "";
  const room = Math.max(12, 44 - shape.length);
  const short = shortName(name).replaceAll(/[\u0000-\u001f\u007f-\u009f]/g, "?");
  return `${short.length > room ? `${short.slice(0, room - 3)}...` : short}${shape}`;
}

function us({ mean_ns }: Side): string {
  return mean_ns === null ? "-" : (mean_ns / 1000).toFixed(1);
}

function number(count: number): string {
  return Number.isInteger(count) ? String(count) : count.toFixed(1);
}
