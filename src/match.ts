/**
 * match.ts: what a client launched against the profile it was given: kernels that were expected and did not come, or that no
 * profile has, by name and shape, never by position. Nothing waits for a count: this is looked at when all is over.
 */

import { comparableName, shortName } from "./kernel-name.ts";
import { openProfile } from "./profile.ts";
import type { Kind } from "./recording.ts";

/** How often a kernel came, of all that the client launched. */
export interface MatchDifference {
  /** missing: never came; new: in no row of the profile; count: came, but not as often as the others would have it. */
  status: "missing" | "new" | "count";
  name: string;
  /** All zero where the profile has no shapes. */
  grid: [number, number, number];
  block: [number, number, number];
  expected: number;
  seen: number;
}

/** A client's launches against its profile. Fields are public: they may be added, never renamed. */
export interface Match {
  profile: string;
  /** Kernel launches of one iteration by the profile. */
  kernels: number;
  /** How many iterations what was launched makes, by most of its kernels. */
  iterations: number;
  /** In all iterations. */
  launches_expected: number;
  launches_seen: number;
  /** Expected ones that did not come, and others that did. */
  launches_missing: number;
  launches_new: number;
  /** The most launches first. */
  differences: MatchDifference[];
}

interface Expected {
  name: string;
  grid: [number, number, number];
  block: [number, number, number];
  per_iteration: number;
  seen: number;
}

type Counted = { kind: Kind; count: number; node_count: number };

const SHAPELESS = [0, 0, 0] as const;

function keyOf(name: string, grid: readonly number[], block: readonly number[]): string {
  return [comparableName(name), grid.join("x"), block.join("x")].join("\n");
}

/** Compares. `cutShort`: the client was stopped, perhaps in the middle of an iteration. */
export async function matchProfile(path: string, counted: readonly Counted[], cutShort: boolean): Promise<Match> {
  const expected = new Map<string, Expected>();
  const requests = new Set<number>();
  let shapeless = false;
  let graphs = false;
  for await (const { name, kind, grid, block, request } of (await openProfile(path)).operations) {
    requests.add(request);
    if (kind !== "kernel") continue;
    const isGraph = grid[0] === 0 && /^graph of \d+ kernels/.test(name);
    graphs ||= isGraph;
    shapeless ||= grid[0] === 0 && !isGraph;
    const key = keyOf(name, grid, block);
    const known = expected.get(key);
    if (known) known.per_iteration++;
    else expected.set(key, { name, grid, block, per_iteration: 1, seen: 0 });
  }
  for (const one of expected.values()) one.per_iteration /= Math.max(1, requests.size);
  const added = new Map<string, Expected>();
  let launches_seen = 0;
  for (const { kind, count, node_count } of counted) {
    const { work, name } = kind;
    // A graph is one row of a profile, or its kernels are.
    const seen = work === "graph" ? (graphs ? count : 0) : work === "kernel" ? count + (graphs ? 0 : node_count) : 0;
    if (seen === 0) continue;
    launches_seen += seen;
    const [grid, block] = shapeless ? [[...SHAPELESS], [...SHAPELESS]] : [kind.grid, kind.block];
    const key = keyOf(name, grid ?? SHAPELESS, block ?? SHAPELESS);
    const known = expected.get(key) ?? added.get(key);
    if (known) known.seen += seen;
    else added.set(key, { name, grid: kind.grid, block: kind.block, per_iteration: 0, seen });
  }
  const iterations = iterationsOf([...expected.values()]);
  const kernels = [...expected.values()].reduce((sum, { per_iteration }) => sum + per_iteration, 0);
  const differences = [...expected.values(), ...added.values()]
    .flatMap((one) => differenceOf(one, iterations, cutShort) ?? [])
    .toSorted((a, b) => Math.abs(b.expected - b.seen) - Math.abs(a.expected - a.seen));
  const sum = (of: (one: MatchDifference) => number): number =>
    differences.reduce((total, one) => total + Math.max(0, of(one)), 0);
  return {
    profile: path,
    kernels: Math.round(kernels * 1000) / 1000,
    iterations,
    launches_expected: Math.round(kernels * iterations),
    launches_seen,
    launches_missing: sum(({ expected: wanted, seen }) => wanted - seen),
    launches_new: sum(({ expected: wanted, seen }) => seen - wanted),
    differences,
  };
}

/** As most launches have it: the middle of how often each kernel came against once an iteration. */
function iterationsOf(expected: readonly Expected[]): number {
  const came = expected
    .filter(({ seen }) => seen > 0)
    .map(({ seen, per_iteration }) => ({ times: seen / per_iteration, weight: per_iteration }))
    .toSorted((a, b) => a.times - b.times);
  const half = came.reduce((sum, { weight }) => sum + weight, 0) / 2;
  let below = 0;
  for (const { times, weight } of came) {
    below += weight;
    if (below >= half) return Math.max(1, Math.round(times));
  }
  return 0;
}

function differenceOf(one: Expected, iterations: number, cutShort: boolean): MatchDifference | undefined {
  const { name, grid, block, per_iteration, seen } = one;
  const expected = Math.round(per_iteration * Math.max(1, iterations));
  if (per_iteration === 0) return { status: "new", name, grid, block, expected: 0, seen };
  if (seen === 0) return { status: "missing", name, grid, block, expected, seen };
  const allowed = cutShort ? per_iteration : 0.5;
  return Math.abs(seen - expected) > allowed ? { status: "count", name, grid, block, expected, seen } : undefined;
}

const MOST_LISTED = 5;

/** A few lines, the worst first. */
export function matchLines(client: string, match: Match): string[] {
  const { profile, kernels, iterations, launches_missing, launches_new, differences } = match;
  const of = `${kernels} kernel launches an iteration by ${profile.split("/").at(-1)}`;
  if (match.launches_seen === 0) return [`match: ${client}: ${of}, and none came`];
  if (differences.length === 0) return [`match: ${client}: ${of}, ${iterations} iterations: all came, and no others`];
  const lines = [
    `match: ${client}: ${of}, ${iterations} iterations: ${launches_missing} launches missing, ${launches_new} new`,
    ...differences.slice(0, MOST_LISTED).map(({ status, name, grid, block, expected, seen }) => {
      const shape = grid[0] === 0 ? "" : ` ${grid.join("x")}/${block.join("x")}`;
      const how = { missing: "missing", new: "new", count: seen < expected ? "too few" : "too many" }[status];
      return `       ${how.padEnd(9)} expected ${expected}, seen ${seen}: ${shortName(name).slice(0, 48)}${shape}`;
    }),
  ];
  if (differences.length > MOST_LISTED)
    lines.push(`       and ${differences.length - MOST_LISTED} more kinds of kernel; --json lists all`);
  return lines;
}
