/**
 * match.ts: what a client launched against the profiles it was given: kernels that were expected and did not come, or that no
 * profile has, by name and shape, never by position. Nothing waits for a count: this is looked at when all is over.
 */

import { comparableName, isGraph, shortName } from "./kernel-name.ts";
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

/** A client's launches against its profile, or profiles. Fields are public: they may be added, never renamed. */
export interface Match {
  /** Several: one after the other, with commas. */
  profile: string;
  /** Kernel launches of one iteration by each profile, and how many of its iterations came. */
  profiles: { profile: string; kernels: number; iterations: number }[];
  /** Kernel launches of one iteration by the profile; of several on average. */
  kernels: number;
  /** It is told of each profile how many of its iterations came; else no counts are compared of those of which it is not. */
  counted: boolean;
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
  /** By profile. */
  per_iteration: number[];
  seen: number;
}

type Counted = { kind: Kind; count: number; node_count: number };

const SHAPELESS = [0, 0, 0] as const;

function keyOf(name: string, grid: readonly number[], block: readonly number[]): string {
  return [comparableName(name), grid.join("x"), block.join("x")].join("\n");
}

/**
 * Compares. `cutShort`: the client was stopped, perhaps in the middle of an iteration. Of several profiles each has iterations of its own,
 * as many as the kernels make that no other profile has; what others have, too, is to come as often as all of them together launch it.
 */
export async function matchProfiles(
  paths: readonly string[],
  counted: readonly Counted[],
  cutShort: boolean,
): Promise<Match> {
  let expected = new Map<string, Expected>();
  let shapeless = false;
  let graphs = false;
  for (const [index, path] of paths.entries()) {
    const requests = new Set<number>();
    for await (const { name, kind, grid, block, request } of (await openProfile(path)).operations) {
      requests.add(request);
      if (kind !== "kernel") continue;
      const isWhole = grid[0] === 0 && isGraph(name);
      graphs ||= isWhole;
      shapeless ||= grid[0] === 0 && !isWhole;
      const one = entryOf(expected, { name, grid, block }, paths.length);
      one.per_iteration[index] = (one.per_iteration[index] ?? 0) + 1;
    }
    for (const { per_iteration } of expected.values())
      per_iteration[index] = (per_iteration[index] ?? 0) / Math.max(1, requests.size);
  }
  if (shapeless) expected = byName(expected, paths.length);
  const added = new Map<string, Expected>();
  let launches_seen = 0;
  for (const { kind, count, node_count } of counted) {
    const { work, name, grid, block } = kind;
    // A graph is one row of a profile, or its kernels are.
    const seen = work === "graph" ? (graphs ? count : 0) : work === "kernel" ? count + (graphs ? 0 : node_count) : 0;
    if (seen === 0) continue;
    launches_seen += seen;
    const key = shapeless ? keyOf(name, SHAPELESS, SHAPELESS) : keyOf(name, grid, block);
    const known = expected.get(key) ?? added.get(key);
    if (known) known.seen += seen;
    else added.set(key, { name, grid, block, per_iteration: paths.map(() => 0), seen });
  }
  const { iterations, guessed } = iterationsOf([...expected.values()], paths.length);
  const kernels = paths.map((_, index) =>
    [...expected.values()].reduce((sum, { per_iteration }) => sum + (per_iteration[index] ?? 0), 0),
  );
  const all = iterations.reduce((sum, one) => sum + one, 0);
  // Where none came at all: once each.
  const wantedOf = all > 0 ? iterations : paths.map(() => 1);
  const differences = [...expected.values(), ...added.values()]
    .flatMap((one) => differenceOf(one, wantedOf, cutShort, guessed) ?? [])
    .toSorted((a, b) => Math.abs(b.expected - b.seen) - Math.abs(a.expected - a.seen));
  const sum = (of: (one: MatchDifference) => number): number =>
    differences.reduce((total, one) => total + Math.max(0, of(one)), 0);
  return {
    profile: paths.join(", "),
    profiles: paths.map((profile, index) => ({
      profile,
      kernels: rounded(kernels[index] ?? 0),
      iterations: iterations[index] ?? 0,
    })),
    counted: guessed.size === 0,
    kernels: rounded(dot(kernels, wantedOf) / (all || paths.length)),
    iterations: all,
    launches_expected: Math.round(dot(kernels, iterations)),
    launches_seen,
    launches_missing: sum(({ expected: wanted, seen }) => wanted - seen),
    launches_new: sum(({ expected: wanted, seen }) => seen - wanted),
    differences,
  };
}

function rounded(value: number): number {
  return Math.round(value * 1000) / 1000;
}

function dot(a: readonly number[], b: readonly number[]): number {
  return a.reduce((sum, one, index) => sum + one * (b[index] ?? 0), 0);
}

function entryOf(
  all: Map<string, Expected>,
  { name, grid, block }: Pick<Expected, "name" | "grid" | "block">,
  profiles: number,
): Expected {
  const key = keyOf(name, grid, block);
  const known = all.get(key);
  if (known) return known;
  const one = { name, grid, block, per_iteration: Array.from({ length: profiles }, () => 0), seen: 0 };
  all.set(key, one);
  return one;
}

/** Where one row has no shape, or one of several profiles, those of the others do not count either. */
function byName(all: ReadonlyMap<string, Expected>, profiles: number): Map<string, Expected> {
  const merged = new Map<string, Expected>();
  for (const { name, per_iteration } of all.values()) {
    const one = entryOf(merged, { name, grid: [...SHAPELESS], block: [...SHAPELESS] }, profiles);
    one.per_iteration = one.per_iteration.map((count, index) => count + (per_iteration[index] ?? 0));
  }
  return merged;
}

/**
 * How many iterations of each profile what came makes, as most launches have it: the middle of how often each kernel came against once an
 * iteration. First of the profiles with kernels that no other has, then, by what those leave, of those with kernels that no other of the rest has.
 * What no kernel tells apart is taken to have come equally often: those profiles are `guessed`.
 */
function iterationsOf(
  expected: readonly Expected[],
  profiles: number,
): { iterations: number[]; guessed: ReadonlySet<number> } {
  const iterations = Array.from({ length: profiles }, () => 0);
  const rest = new Set(iterations.keys());
  while (rest.size > 0) {
    const found = [...rest].flatMap((profile) => {
      const own = expected.filter(({ per_iteration }) =>
        per_iteration.every((count, index) => (index === profile ? count > 0 : count === 0 || !rest.has(index))),
      );
      return own.length > 0 ? [{ profile, times: timesOf(own, [profile], iterations) }] : [];
    });
    if (found.length === 0) break;
    for (const { profile, times } of found) {
      iterations[profile] = times;
      rest.delete(profile);
    }
  }
  const together = timesOf(
    expected.filter(({ per_iteration }) => per_iteration.some((count, index) => count > 0 && rest.has(index))),
    [...rest],
    iterations,
  );
  for (const profile of rest) iterations[profile] = together;
  return { iterations, guessed: rest };
}

/** How often each of these profiles came, if they came equally often and the others as often as is known. */
function timesOf(kernels: readonly Expected[], profiles: readonly number[], iterations: readonly number[]): number {
  const came = kernels
    .filter(({ seen }) => seen > 0)
    .map(({ seen, per_iteration }) => {
      const weight = profiles.reduce((sum, profile) => sum + (per_iteration[profile] ?? 0), 0);
      return { times: (seen - dot(per_iteration, iterations)) / weight, weight };
    })
    .toSorted((a, b) => a.times - b.times);
  const half = came.reduce((sum, { weight }) => sum + weight, 0) / 2;
  let below = 0;
  for (const { times, weight } of came) {
    below += weight;
    if (below >= half) return Math.max(iterations.length === 1 ? 1 : 0, Math.round(times));
  }
  return 0;
}

function differenceOf(
  one: Expected,
  iterations: readonly number[],
  cutShort: boolean,
  guessed: ReadonlySet<number>,
): MatchDifference | undefined {
  const { name, grid, block, per_iteration, seen } = one;
  const wanted = dot(per_iteration, iterations);
  const expected = Math.round(wanted);
  const most = Math.max(...per_iteration);
  if (most === 0) return { status: "new", name, grid, block, expected: 0, seen };
  // None of those that launch it may have been drawn.
  if (seen === 0) return wanted > 0 ? { status: "missing", name, grid, block, expected, seen } : undefined;
  if (per_iteration.some((count, index) => count > 0 && guessed.has(index))) return undefined;
  const allowed = cutShort ? most : 0.5;
  return Math.abs(seen - expected) > allowed ? { status: "count", name, grid, block, expected, seen } : undefined;
}

const MOST_LISTED = 5;

/** A few lines, the worst first. */
export function matchLines(client: string, match: Match): string[] {
  const { profiles, launches_missing, launches_new, differences } = match;
  const of = profiles
    .map(({ profile, kernels, iterations }, index) => {
      const what = `${kernels}${index === 0 ? " kernel launches an iteration" : ""} by ${profile.split("/").at(-1)}`;
      return match.launches_seen === 0 ? what : `${what}, ${iterations}${index === 0 ? " iterations" : ""}`;
    })
    .join("; ");
  if (match.launches_seen === 0) return [`match: ${client}: ${of}, and none came`];
  if (differences.length === 0)
    return [
      `match: ${client}: ${of}: ${match.counted ? "all came, and no others" : "all kinds came, and no others; how often is not told apart"}`,
    ];
  const lines = [
    `match: ${client}: ${of}: ${launches_missing} launches missing, ${launches_new} new`,
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
