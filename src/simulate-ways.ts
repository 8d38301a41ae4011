/**
 * simulate-ways.ts: the ways of sharing a GPU that `rigel simulate` compares, and what each is in a scenario.
 *
 * A way is named on the command line by a policy, or by how the GPU does without one. Its settings are the policy's, as a launch would
 * write them into the segment (policy.ts).
 */

import type { ScenarioGpu } from "./calibrate.ts";
import { type Config, POLICIES, type Policy, policySchema } from "./config.ts";
import { RigelError } from "./errors.ts";
import type { Native } from "./native.ts";
import { DUR_THRESHOLD, targetOf } from "./policy.ts";
import type { Scenario, ScenarioClient, ScenarioMode } from "./simulate-run.ts";

export interface Way {
  /** On the command line. */
  key: string;
  /** As rigel bench calls it. */
  name: string;
  mode: ScenarioMode;
  mps: boolean;
  policy: Policy | undefined;
}

/** Without preemption, as where the driver refuses it. */
const GATE = "-gate";
/** Whatever the configuration says of how processes share the GPU. */
const MPS = "+mps";
const SLICES = "+slices";

const WAY_HELP =
  "time-slicing, mps, none, priority, slo, fair or orion; with -gate without preemption (priority, slo); with +mps or +slices " +
  "under MPS or in time slices, whatever the configuration says";

/** The ways that `--policy` names, or all that the clients allow. */
export function waysOf(keys: readonly string[] | undefined, config: Config): Way[] {
  const high = config.clients.filter((client) => client.class === "high").length;
  const slo = high > 0 ? ["slo"] : [];
  const orion = high === 1 ? ["orion"] : [];
  const sliced = ["priority", ...slo, "fair", ...orion].map((name) => `${name}${SLICES}`);
  const side = ["priority", ...slo].map((name) => `${name}${MPS}`);
  const all = ["time-slicing", ...sliced.slice(0, 1), "priority-gate", ...sliced.slice(1), "mps", ...side];
  const ways = new Map((keys ?? all).flatMap((key) => key.split(",")).map((key) => [key, wayOf(key, config)]));
  return [...ways.values()];
}

/** Processes run side by side where the configuration says so and no way says otherwise. */
function configuredMps({ sharing, simulated }: Config): boolean {
  return sharing === "mps" || (sharing === "auto" && simulated.mps);
}

function wayOf(key: string, config: Config): Way {
  if (key === "time-slicing" || key === "mps") return wayFor(key, undefined, key === "mps", config);
  const mps = key.endsWith(MPS);
  const rest = key.replace(/\+(mps|slices)$/, "");
  const gate = rest.endsWith(GATE);
  const name = POLICIES.find((policy) => policy === (gate ? rest.slice(0, -GATE.length) : rest));
  if (name === undefined || (gate && ((rest !== key && !mps) || !["priority", "slo"].includes(name))))
    throw new RigelError("config", `--policy: expected ${WAY_HELP}; got "${key}"`);
  // What a policy does not read has no effect on it.
  const policy = policySchema.parse({ ...config.policy, name, ...(gate && { preempt: false }) });
  const way = wayFor(key, policy, mps || (rest === key && !gate && configuredMps(config)), config);
  if (name === "slo" && config.clients.every((client) => client.class !== "high"))
    throw new RigelError("config", `${config.file}: clients: expected one of class high under policy slo, got none`);
  return way;
}

/** A policy, or none, under MPS or in time slices. */
export function wayFor(
  key: string,
  policy: Policy | undefined,
  mps: boolean,
  { file, clients }: Pick<Config, "file" | "clients">,
): Way {
  const name = policy?.name;
  if (name === "orion") {
    const high = clients.filter((client) => client.class === "high").length;
    if (high !== 1)
      throw new RigelError(
        "config",
        `${file}: clients: expected one client of class high under policy orion, whose rules are for one, got ${high}`,
      );
  }
  const stops = policy?.stop_us !== 0;
  const preempts = (!mps || stops) && policy?.preempt === true && (name === "priority" || name === "slo");
  const bare = mps ? "MPS" : "time slicing";
  const governed = `rigel ${key.replace(/\+(mps|slices)$/, "").replace(GATE, ", gate only")}${mps ? ", MPS" : ""}`;
  return {
    key,
    name: policy ? governed : bare,
    mode: policy === undefined || name === "none" ? "ungoverned" : preempts ? "preempt" : "governed",
    mps,
    policy,
  };
}

/** The scenario of a way. `sms`: how many the GPU has, for orion. */
export function scenarioOf(
  way: Way,
  clients: readonly ScenarioClient[],
  duration_s: number,
  gpu: ScenarioGpu,
  native: Native,
): Scenario {
  const { policy, mode, mps } = way;
  return {
    gpu,
    mode,
    duration_s,
    clients,
    settings: {
      "gpu.shared": Number(mps),
      ...(policy && settingsOf(policy, clients, native)),
    },
    ...(policy?.name === "slo" && { target: targetOf(policy) }),
  };
}

/** A client by itself, without Rigel. */
export function aloneOf(client: ScenarioClient, duration_s: number, gpu: ScenarioGpu): Scenario {
  return { gpu, mode: "alone", duration_s, clients: [client], settings: {} };
}

/** As policySettings for the segment; the same names but for two. */
function settingsOf(policy: Policy, clients: readonly ScenarioClient[], native: Native): Record<string, number> {
  const { name, inflight, corun, unit_us, starvation_us, suspend, defer_us, defer_part, need_us, slice_us, stop_us } =
    policy;
  const { high_slice_us, min_share, share_period_us, quantum_us, sm_threshold, dur_threshold } = policy;
  const high = clients.find((client) => client.class === "high");
  const latency_ns = name === "orion" && high ? native.profilesLatency_ns(high.profiles) : 0;
  const settings = {
    policy: POLICIES.indexOf(name),
    inflight,
    corun,
    unit_us,
    starvation_us,
    suspend: suspend === undefined ? undefined : Number(suspend),
    defer_us,
    defer_ppm: defer_part === undefined ? undefined : Math.round(defer_part * 1e6),
    need_us,
    be_slice_us: slice_us,
    high_slice_us,
    stop_us,
    min_share_ppm: min_share === undefined ? undefined : Math.round(min_share * 1e6),
    share_period_us,
    quantum_us,
    sms_limit: sm_threshold,
    outstanding_us:
      latency_ns > 0 ? Math.max(1, Math.round((latency_ns / 1000) * (dur_threshold ?? DUR_THRESHOLD))) : undefined,
  };
  return Object.fromEntries(
    Object.entries(settings).flatMap(([key, value]) => (value === undefined ? [] : [[key, value]])),
  );
}
