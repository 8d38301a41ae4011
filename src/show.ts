/**
 * show.ts: how numbers and the state of a client are put into words, the same in tables, in `rigel top` and in the dashboard.
 *
 * Imports what is pure alone, so that it also runs in a browser.
 */

import { inPolicy } from "./policy.ts";
import { FAR_OVER, type Target } from "./slo-alone.ts";
import type { Settings } from "./slo-rungs.ts";
import { type Controller, isTold, type Move, type Second } from "./slo.ts";
import type { ClientStats, Measured, Stats } from "./stats.ts";

/** Three significant digits or more, never an exponent. */
export function digits(value: number | null): string {
  if (value === null) return "-";
  const size = Math.abs(value);
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3);
}

/** A number per second: whole where it is large. */
export function rateText(per_s: number | null | undefined): string {
  return per_s === null || per_s === undefined ? "-" : per_s.toFixed(per_s >= 100 ? 0 : 1);
}

/** A part of the time in percent, from milliseconds per second. */
export function percentText(ms_per_s: number | null | undefined): string {
  if (ms_per_s === null || ms_per_s === undefined) return "-";
  const percent = ms_per_s / 10;
  // Four characters, but for threads that wait side by side.
  return percent.toFixed(percent >= 99.95 ? 0 : 1);
}

/** A part of the whole in percent, from 0 to 1. */
export function shareText(share: number | null): string {
  return percentText(share === null ? null : share * 1000);
}

/** Since when, in at most two units. */
export function durationText(total_s: number): string {
  const seconds = Math.max(0, Math.round(total_s));
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}

/** Waits for others' work and for its own in-flight limit; several threads can wait at once. */
export function wait_ms_per_s({ rates }: ClientStats): number | null {
  return rates ? rates.gate_wait_ms_per_s + rates.inflight_wait_ms_per_s : null;
}

/** All processes of a client have given no sign of life for a while. */
export function isStopped(
  { processes }: Pick<ClientStats, "processes">,
  { settings }: Pick<Stats, "settings">,
): boolean {
  const stale_ms = settings["stale_ms"];
  const ages = processes.flatMap(({ heartbeat_age_ms }) => heartbeat_age_ms ?? []);
  return stale_ms !== undefined && ages.length > 0 && ages.every((age_ms) => age_ms > stale_ms);
}

/** What the throughput of a client is compared in, phase by phase: iterations if it reports those in all of them. */
export function throughput(phases: readonly (Pick<Measured, "iterations_per_s" | "launches_per_s"> | undefined)[]) {
  const inLaunches = phases.some((client) => client?.iterations_per_s === null);
  return {
    unit: inLaunches ? "launches/s" : "iter/s",
    of: (client: Pick<Measured, "iterations_per_s" | "launches_per_s">): number | null =>
      inLaunches ? client.launches_per_s : client.iterations_per_s,
  };
}

/** What a client of this segment is doing, in one word. */
export function stateOf(client: ClientStats, { settings }: Pick<Stats, "settings">): string {
  if (client.state === "dead") return "killed";
  if (client.state === "ended") return "ended";
  if (client.paused) return "paused";
  if (isStopped(client, { settings })) return "stopped";
  if (client.first_launch_ms === null) return "starting";
  if (client.rates === null) return "new";
  return client.rates.launches_per_s > 0 || client.rates.requests_per_s > 0 ? "running" : "idle";
}

/** The high clients' target in milliseconds, where one is known. */
export function target_ms({ slo }: Pick<Stats, "slo">): number | undefined {
  if (!slo) return undefined;
  if ("p99_ms" in slo.target) return slo.target.p99_ms;
  return slo.alone.p99_ms === null ? undefined : slo.target.p99_over_alone * slo.alone.p99_ms;
}

/** What was asked of the high clients' p99. */
export function targetText(target: Target): string {
  return "p99_ms" in target ? `${target.p99_ms} ms` : `${target.p99_over_alone} of alone`;
}

/** What slo moves, in the words of a policy; undefined: it has moved nothing. */
export function settingsText(settings: Partial<Settings> | undefined): string {
  if (!settings) return "the settings as they were";
  const told = Object.entries(settings).flatMap(([name, value]) => {
    if (name === "share_period_us" && value === 0) return [];
    return inPolicy(name, value).join(" ");
  });
  return told.join(", ");
}

/** When best-effort clients took turns, second by second; empty: they did not. */
export function turnsText(seconds: readonly Pick<Second, "t_s" | "over_s" | "turns">[]): string {
  const spans: { from_s: number; to_s: number }[] = [];
  let before = false;
  for (const { t_s, over_s, turns } of seconds) {
    const last = spans.at(-1);
    if (turns && before && last) last.to_s = t_s;
    else if (turns) spans.push({ from_s: Math.max(0, t_s - over_s), to_s: t_s });
    before = turns;
  }
  return spans.map(({ from_s, to_s }) => `${Math.round(from_s)} to ${Math.round(to_s)} s`).join(", ");
}

/** How often the loop has changed its settings, and why, the most frequent first. */
export function changesText({ changes, moves }: { changes: number; moves: readonly Pick<Move, "why">[] }): string {
  const counts = [...Map.groupBy(moves, ({ why }) => why)].map(([why, of]) => [why, of.length] as const);
  const told = counts.toSorted((a, b) => b[1] - a[1]).map(([why, times]) => `${why} ${times}`);
  return `${changes} changes${told.length > 0 ? ` (${told.join(", ")})` : ""}`;
}

type Found = Pick<
  ReturnType<Controller["summary"]>,
  "target" | "unreachable" | "reachable" | "percentile" | "now" | "verdict" | "over_alone"
>;

/** Whether requests were seen not to be within the target at the end. Null: too little is known of them. */
export function isMissed(
  found: Pick<Found, "unreachable" | "verdict" | "over_alone" | "target" | "reachable">,
): boolean | null {
  const { unreachable, verdict, target, reachable } = found;
  if (unreachable || verdict === "over") return true;
  // Some are far over the target, though too few are known to say so; what is less than that is as often chance.
  const isBeyond = "p99_over_alone" in target && (reachable ?? 0) > Math.max(FAR_OVER, target.p99_over_alone);
  return !isTold(found) || (verdict === "unknown" && isBeyond) ? null : false;
}

/** What there is to say of a target at the end: that it was missed, or that nobody knows; empty where it was met. */
export function endText(found: Found): string {
  if (isMissed(found) !== null) return missedText(found);
  const { over_alone, percentile, reachable } = found;
  return `${over_alone ? `p${percentile} was ${digits(reachable)} of alone, of ` : ""}too few requests to tell`;
}

/** That a target is not reached, and what is; empty where it is. */
export function missedText(found: Found): string {
  const { target, unreachable, reachable, percentile, now } = found;
  if (!isMissed(found)) return "";
  if (!unreachable && "p99_ms" in target) return `missed: p99 was ${digits(now.p99_ms)} ms at the end`;
  if (!unreachable) return `missed: p${percentile} was ${digits(reachable)} of alone at the end`;
  const reached = reachable === null ? "" : `, where p${percentile} is ${reachable.toFixed(2)}`;
  const unit = reachable === null ? "" : "p99_ms" in target ? " ms" : " of alone";
  return `not reached even by the strictest settings${reached}${unit}`;
}
