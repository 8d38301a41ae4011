/**
 * simulate-sweep.ts: `--sweep`: one value of a configuration, from one end to another.
 *
 * Pure. `rate=20:200:20` is 20, 40, ... 200; `inflight=1,2,4,8` says each. What is swept is a rate of requests, the duration, the seed,
 * or a number of the policy.
 */

import { type Config, LONGEST_DURATION_s, policySchema } from "./config.ts";
import { RigelError } from "./errors.ts";
import { parse, rate } from "./schema.ts";

export interface Sweep {
  key: string;
  values: number[];
}

const MOST = 1000;

/** Numbers of the policy that a scenario has. */
const OF_POLICY = [
  "inflight",
  "corun",
  "unit_us",
  "starvation_us",
  "slice_us",
  "high_slice_us",
  "stop_us",
  "defer_us",
  "defer_part",
  "need_us",
  "min_share",
  "share_period_us",
  "quantum_us",
  "sm_threshold",
  "dur_threshold",
] as const;

/** Reads `KEY=FROM:TO:STEP` or `KEY=A,B,C`. */
export function sweepOf(text: string): Sweep {
  const [, key, list] = /^([^=]+)=(.+)$/.exec(text) ?? [];
  if (key === undefined || list === undefined) throw wrong(text, "KEY=FROM:TO:STEP or KEY=A,B,C");
  const range = list.split(":");
  if (range.length === 1)
    return {
      key,
      values: checked(
        list.split(",").map((one) => number(one, text)),
        text,
      ),
    };
  const [from, to, step] = range.map((one) => number(one, text));
  if (from === undefined || to === undefined || step === undefined || range.length !== 3)
    throw wrong(text, "FROM:TO:STEP, such as rate=20:200:20");
  if (step === 0 || (to - from) / step < 0) throw wrong(text, "a step that leads from the first value to the last");
  // A step of 0.1 is none in binary: the last value counts if it is missed by no more than that.
  const count = Math.floor((to - from) / step + 1e-9) + 1;
  if (count > MOST) throw wrong(text, `at most ${MOST} values, got ${count}`);
  return { key, values: Array.from({ length: count }, (_, index) => withoutNoise(from + index * step)) };
}

/** Whole numbers have none; a seed may have more digits than are left of others. */
function withoutNoise(value: number): number {
  return Number.isSafeInteger(value) ? value : Number(value.toPrecision(12));
}

function checked(values: number[], text: string): number[] {
  if (values.length > MOST) throw wrong(text, `at most ${MOST} values, got ${values.length}`);
  return values;
}

function number(text: string, whole: string): number {
  const value = Number(text);
  if (text.trim() === "" || !Number.isFinite(value)) throw wrong(whole, `numbers, got "${text}"`);
  return value;
}

function wrong(text: string, expected: string): RigelError {
  return new RigelError("config", `--sweep ${text}: expected ${expected}`);
}

/** The configuration with one value of the sweep in it. */
export function sweptTo(config: Config, { key, values }: Sweep, value: number): Config {
  const where = `--sweep ${key}=${value}`;
  const policyKey = OF_POLICY.find((name) => name === key);
  if (policyKey !== undefined)
    return { ...config, policy: parse(policySchema, { ...config.policy, [policyKey]: value }, where) };
  if (key === "duration") {
    if (!(value > 0 && value <= LONGEST_DURATION_s))
      throw new RigelError("config", `${where}: expected a duration above 0, up to ${LONGEST_DURATION_s}`);
    return { ...config, duration_s: value };
  }
  if (key === "seed") {
    if (!Number.isSafeInteger(value) || value < 0)
      throw new RigelError("config", `${where}: expected a whole number from 0 to ${Number.MAX_SAFE_INTEGER}`);
    return config;
  }
  return withRate(config, key, value, where, values.length);
}

function withRate(config: Config, key: string, value: number, where: string, count: number): Config {
  const named = /^(.+)\.rate$/.exec(key)?.[1];
  const names = config.clients.map(({ name }) => name);
  if (key !== "rate" && (named === undefined || !names.includes(named)))
    throw new RigelError(
      "config",
      `--sweep ${key}: expected one of rate, duration, seed, ${OF_POLICY.join(", ")}` +
        `${names.map((name) => `, ${name}.rate`).join("")}`,
    );
  if (!(value > 0)) throw new RigelError("config", `${where}: expected a rate above 0`);
  parse(rate, value, where);
  const meant = (client: Config["clients"][number]): boolean =>
    named === undefined
      ? client.class === "high" && (client.rate_per_s ?? client.replay?.rate_per_s) !== undefined
      : client.name === named;
  if (count > 0 && !config.clients.some(meant))
    throw new RigelError(
      "config",
      `${config.file}: --sweep rate: no client of class high has a rate; give one replay.rate_per_s, or name it: NAME.rate`,
    );
  return {
    ...config,
    clients: config.clients.map((client) => {
      if (!meant(client)) return client;
      if (!client.replay) return { ...client, rate_per_s: value };
      const { arrivals, ...replay } = client.replay;
      const kind = arrivals === "uniform" ? { arrivals } : {};
      return { ...client, replay: { ...replay, ...kind, rate_per_s: value } };
    }),
  };
}
