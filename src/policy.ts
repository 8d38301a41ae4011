/**
 * policy.ts: what the policies ask of a configuration, and the settings that a policy becomes.
 *
 * What can be said of one field alone is in config.ts; here is what depends on the policy, which the command line may name.
 */

import type { Config, Policy } from "./config.ts";
import { RigelError } from "./errors.ts";
import type { Native } from "./native.ts";
import type { PlannedClient } from "./plan.ts";
import { DEFAULT_TARGET, type Target } from "./slo-alone.ts";

/** The policies under which best-effort work makes way for high clients. */
const BY_CLASS: Policy["name"][] = ["priority", "slo"];

/** Those under which the gate limits what best-effort work is in flight. */
const LIMITING: Policy["name"][] = [...BY_CLASS, "fair"];

/** Those under which best-effort work waits at the gate at all. */
const GATING: Policy["name"][] = [...LIMITING, "orion"];

/** Fields of `policy` that only some policies read. */
const READ_BY = {
  inflight: GATING, // under orion as many go out at once that have waited for too long
  unit_us: LIMITING,
  starvation_us: GATING,
  preempt: BY_CLASS,
  suspend: BY_CLASS,
  defer_us: BY_CLASS,
  defer_part: BY_CLASS,
  need_us: BY_CLASS,
  slice_us: BY_CLASS,
  high_slice_us: BY_CLASS,
  stop_us: BY_CLASS,
  stay_us: BY_CLASS,
  arrivals: BY_CLASS,
  min_share: BY_CLASS,
  share_period_us: BY_CLASS,
  corun: BY_CLASS,
  quantum_us: ["fair"],
  sm_threshold: ["orion"],
  dur_threshold: ["orion"],
  target: ["slo"],
} as const satisfies Partial<Record<keyof Policy, Policy["name"][]>>;

/** Fields of `policy` that slo moves by itself. */
const MOVED_BY_SLO = [
  "inflight",
  "corun",
  "suspend",
  "defer_us",
  "defer_part",
  "need_us",
  "slice_us",
  "share_period_us",
] as const satisfies (keyof Policy)[];

const LIST = new Intl.ListFormat("en-GB");

/** The policies that read a field of `policy`; undefined: all may. */
export function readBy(field: string): readonly Policy["name"][] | undefined {
  return Object.entries(READ_BY).find(([name]) => name === field)?.[1];
}

/** What is to be said of a field of `policy` that this policy does not read. */
export function noEffect(field: string, policy: Policy["name"]): string | undefined {
  const policies = readBy(field);
  return policies === undefined || policies.includes(policy)
    ? undefined
    : `policy.${field}: has no effect under policy ${policy}, only under ${LIST.format(policies)}`;
}

/** What is to be said of a field of `policy` that is changed while this policy is in force. */
export function noEffectNow(field: string, policy: Policy["name"]): string | undefined {
  return policy === "slo" && MOVED_BY_SLO.some((moved) => moved === field)
    ? `policy.${field}: policy slo moves it itself; what was set is what another policy will have`
    : noEffect(field, policy);
}

/** What is to be said of a client's weight under this policy. */
export function noWeight(policy: Policy["name"]): string | undefined {
  return policy === "fair" ? undefined : `weight has no effect under policy ${policy}, only under fair`;
}

/** Orion's own: "2.5% of the high-priority request latency" (EuroSys 2024). */
export const DUR_THRESHOLD = 0.025;

/** What policy slo aims at. */
export function targetOf({ target }: Policy): Target {
  if (target?.p99_ms !== undefined) return { p99_ms: target.p99_ms };
  return target?.p99_over_alone === undefined ? DEFAULT_TARGET : { p99_over_alone: target.p99_over_alone };
}

/** What is wrong with a configuration under its policy. What has no effect becomes a note. */
export function checkPolicy(config: Config, notes: string[]): RigelError[] {
  const { file, policy, clients } = config;
  const problems: string[] = [];
  // `true` is also what is there where nothing was given.
  const given = new Map<string, unknown>(Object.entries({ ...policy, preempt: policy.preempt ? undefined : false }));
  const fieldsGiven = Object.keys(READ_BY).filter((field) => given.get(field) !== undefined);
  notes.push(...fieldsGiven.flatMap((field) => noEffect(field, policy.name) ?? []));
  const unweighed = noWeight(policy.name);
  if (unweighed !== undefined)
    for (const { name } of clients.filter(({ weight }) => weight !== undefined)) notes.push(`${name}: ${unweighed}`);
  if (policy.name === "slo") {
    const moved = MOVED_BY_SLO.filter((field) => policy[field] !== undefined);
    for (const field of moved)
      notes.push(
        `policy.${field}: in force only until policy slo has seen steady requests, which then uses settings of its own`,
      );
  }
  if (policy.name === "fair" && policy.inflight === 0)
    problems.push(
      "policy.inflight: expected a limit of at least 1 under policy fair, got 0: without one the driver's queue decides " +
        "who is next",
    );
  if (policy.name === "orion") {
    const high = clients.filter((client) => client.class === "high").length;
    if (high !== 1)
      problems.push(
        `clients: expected one client of class high under policy orion, whose rules are for one, got ${high}`,
      );
    for (const [index, client] of clients.entries())
      if (client.replay === undefined && client.profile === undefined)
        problems.push(
          `${config.fieldNames[index]?.client}.profile: expected a kernel profile under policy orion, which decides by ` +
            "what each kernel needs, but it is missing; name the program's profile, or choose another policy",
        );
  }
  return problems.map((problem) => new RigelError("config", `${file}: ${problem}`));
}

/** What a policy's fields are as settings of the segment. Left out: what the library has as default. */
export function policySettings(policy: Policy, clients: readonly PlannedClient[], native: Native) {
  const { name, target: _, min_share, defer_part, sm_threshold: __, dur_threshold: ___, ...settings } = policy;
  return {
    ...settings,
    ...(min_share !== undefined && { min_share_ppm: Math.round(min_share * 1e6) }),
    ...(defer_part !== undefined && { defer_ppm: Math.round(defer_part * 1e6) }),
    ...(name === "orion" && orionSettings(policy, clients, native)),
  };
}

/** What a setting of a segment is called in a policy, and what it is there. */
export function inPolicy(setting: string, value: number): [string, number | boolean] {
  if (setting === "suspend" || setting === "preempt") return [setting, value !== 0];
  if (setting === "defer_ppm") return ["defer_part", value / 1e6];
  return setting === "min_share_ppm" ? ["min_share", value / 1e6] : [setting, value];
}

/** A limit of 0 microseconds would be no limit at all. */
function orionSettings(policy: Policy, clients: readonly PlannedClient[], native: Native) {
  const high = clients.find((client) => client.class === "high");
  const latency_ns = native.profilesLatency_ns(high?.profiles ?? []);
  return {
    sms_limit: policy.sm_threshold ?? high?.device.sms,
    outstanding_us: Math.max(1, Math.round((latency_ns / 1000) * (policy.dur_threshold ?? DUR_THRESHOLD))),
  };
}
