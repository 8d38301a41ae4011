/**
 * control.ts: changes what runs, while it runs: the policy of a segment, and a client's class, limits and pauses.
 *
 * The command line and the HTTP interface both change things through here. What is asked is written into the segment; clients take it
 * up within a tenth of a second (native/steer.c). Checked first, so that either all of a change is made or none.
 */

import { z } from "zod";
import { POLICIES, type Policy, policySchema } from "./config.ts";
import { RigelError } from "./errors.ts";
import { quoted } from "./log.ts";
import { limit_bytes, memoryProblem, memoryText, noRoom, sizeText } from "./memory.ts";
import type { Native } from "./native.ts";
import { noEffectNow, noWeight, policySettings, readBy, targetOf } from "./policy.ts";
import { fields, parse } from "./schema.ts";
import type { Segment, Slot } from "./segment.ts";

const MEMORY = 'expected a size such as "40GiB" or "512MiB", a number of bytes, or "none"';

function problemOf(memory: string): string | undefined {
  return memory === "none" ? undefined : memoryProblem(memory, MEMORY);
}

/** What can be changed of a client. */
export const clientChangeSchema = fields({
  class: z.enum(["high", "best-effort"]).optional(),
  /** As in a configuration, in bytes or with a unit; `"none"` or null: no limit. */
  memory: z.union([z.int().positive(), memoryText(problemOf), z.null()], { error: () => MEMORY }).optional(),
  weight: z.number().min(0.01).max(100).optional(),
});
type ClientChange = z.infer<typeof clientChangeSchema>;

/** What can be changed of a policy: any of its fields; those left out stay as they are. */
export const policyChangeSchema = policySchema
  .partial()
  .extend({ name: z.enum(POLICIES).optional(), preempt: z.boolean().optional() });
type PolicyChange = z.infer<typeof policyChangeSchema>;

/** The longest pause that ends by itself, in seconds: 31 years. */
export const LONGEST_PAUSE_s = 1e9;

/** What was done, for people and for programs. */
export interface Changed {
  segment: string;
  client?: string;
  text: string;
  /** What has no effect, or not at once. */
  notes: string[];
}

/** A client of a segment. */
export interface Target {
  segment: Segment;
  name: string;
  /** Its processes that live. */
  slots: Slot[];
}

/** Checks a change of a client. `where` is what errors begin with. */
export function clientChange(value: unknown, where: string): ClientChange {
  const change = parse(clientChangeSchema, value, where);
  if (Object.keys(change).length === 0) throw new RigelError("config", `${where}: expected class, memory or weight`);
  return change;
}

/** Checks a change of a policy. */
export function policyChange(value: unknown, where: string): PolicyChange {
  const change = parse(policyChangeSchema, value, where);
  if (Object.keys(change).length === 0) throw new RigelError("config", `${where}: expected a field of policy`);
  const fixed = Object.keys(change).filter((field) => readBy(field)?.every((name) => name === "orion"));
  if (fixed.length > 0)
    throw new RigelError(
      "config",
      fixed
        .map((field) => `${where}: ${field}: expected a field that can be changed; orion reads it when a launch starts`)
        .join("\n"),
    );
  return change;
}

/** The live client that a name, or `segment:name`, means. */
export function findClient(id: string, segments: readonly Segment[]): Target {
  const all = segments.flatMap((segment) =>
    [...new Set(segment.slots().map(({ name }) => name))].map((name) => ({
      segment,
      name,
      slots: segment.slots().filter((slot) => slot.name === name && !slot.finished),
    })),
  );
  const exact = all.filter(({ segment, name }) => `${segment.id}:${name}` === id);
  const named = exact.length > 0 ? exact : all.filter(({ name, slots }) => name === id && slots.length > 0);
  const [first, ...more] = named;
  if (!first)
    throw new RigelError(
      "no_client",
      `there is no client ${JSON.stringify(id)} at work; \`rigel ps\` shows those there are`,
    );
  if (more.length > 0)
    throw new RigelError(
      "ambiguous",
      `several clients are named ${JSON.stringify(id)}: ${named.map(({ segment, name }) => `${segment.id}:${name}`).join(", ")}`,
    );
  return first;
}

/**
 * Changes a client, from its next work on. `pause_s`: also holds its best-effort work back for so long, up to LONGEST_PAUSE_s; infinite: until it is resumed;
 * 0 ends that.
 */
export function changeClient({ segment, name, slots }: Target, change: ClientChange, pause_s?: number): Changed {
  const { class: kind, weight, memory } = change;
  const inBytes = memory === undefined ? undefined : bytesOf(memory);
  const [process = name, thread] = name.split("/", 2);
  if (memory !== undefined && thread !== undefined)
    throw new RigelError(
      "command",
      `${name} is of threads, whose memory is their process's; \`rigel set ${quoted(process)} memory=…\` limits that`,
    );
  const asked = segment.wanted(name);
  // Clients take up what was asked a moment later.
  const isHigh = (kind ?? asked?.class ?? slots.find((slot) => slot.class === "high")?.class) === "high";
  if (isHigh && pause_s !== undefined && pause_s > 0)
    throw new RigelError(
      "command",
      `${name} is of class high, which is never held back; \`rigel set ${quoted(name)} class=best-effort\` first`,
    );
  if (kind === "high" && pause_s === undefined && (asked?.paused_until_ns ?? 0) > segment.now_ns)
    throw new RigelError("command", `${name} is paused; \`rigel resume ${quoted(name)}\` first`);
  const until =
    pause_s === undefined || pause_s === 0 || !Number.isFinite(pause_s) ? pause_s : segment.now_ns + pause_s * 1e9;
  if (!segment.want(name, { class: kind, weight, memory_bytes: inBytes, paused_until_ns: until }))
    throw new RigelError(
      "command",
      `${name} has no room for settings: more clients have been there than the segment keeps`,
    );
  const what = [
    ...(kind === undefined ? [] : [`class ${kind}`]),
    ...(inBytes === undefined ? [] : [inBytes === null ? "no memory limit" : `memory at most ${sizeText(inBytes)}`]),
    ...(weight === undefined ? [] : [`weight ${weight}`]),
    ...(pause_s === undefined ? [] : [pauseText(pause_s)]),
  ];
  const text = `${name} (${slots.length} ${slots.length === 1 ? "process" : "processes"}): ${what.join(", ")}`;
  const unweighed = weight === undefined ? undefined : noWeight(segment.policy);
  const used_bytes = segment.memory().get(name)?.used_bytes ?? 0;
  const notes = [
    ...(unweighed === undefined ? [] : [`${name}: ${unweighed}`]),
    ...(typeof inBytes === "number" && used_bytes > inBytes
      ? [`${name}: has ${sizeText(used_bytes)} already, which it keeps; it gets no more until it is below the limit`]
      : []),
    ...(typeof inBytes === "number" ? noRoom(name, inBytes) : []),
  ];
  return { segment: segment.id, client: name, text, notes };
}

function pauseText(seconds: number): string {
  if (seconds === 0) return "goes on";
  return `is paused ${Number.isFinite(seconds) ? `for ${seconds} s` : "until it is resumed"}`;
}

/** A share of a device is not known here: devices of a segment do not say how much memory they have. */
function bytesOf(memory: NonNullable<ClientChange["memory"]> | null): number | null {
  if (memory === null || memory === "none") return null;
  if (typeof memory === "string" && memory.endsWith("%"))
    throw new RigelError(
      "config",
      `memory: ${MEMORY}, got ${memory}: a share is one of a device, and is taken at the start of a program`,
    );
  return limit_bytes(memory, 0);
}

/** Holds a client's best-effort work back for `seconds`, infinite: until it is resumed; 0 ends that. */
export function pauseClient(target: Target, seconds: number): Changed {
  return { ...changeClient(target, {}, seconds), text: `${target.name} ${pauseText(seconds)}` };
}

/** Changes the policy of segments: of all, or, where one of them cannot have it, of none. */
export function changePolicy(segments: readonly Segment[], change: PolicyChange, native: Native): Changed[] {
  for (const segment of segments) checkPolicy(segment, change);
  return segments.map((segment) => changePolicyOf(segment, change, native));
}

function checkPolicy(segment: Segment, change: PolicyChange): void {
  if (change.name === "orion" && segment.policy !== "orion")
    throw new RigelError(
      "config",
      "policy.name: expected a policy other than orion, which needs every client's profile before it starts; launch with it",
    );
  if ((change.name ?? segment.policy) !== "fair" || (change.name === undefined && change.inflight === undefined))
    return;
  // What slo has moved is put back.
  const { inflight } = segment.policy === "slo" ? segment.kept() : segment.settings();
  if ((change.inflight ?? inflight) === 0)
    throw new RigelError(
      "config",
      `policy.inflight: expected a limit of at least 1 under policy fair, got 0${change.inflight === undefined ? ", which is in force; set another with it" : ""}`,
    );
}

function changePolicyOf(segment: Segment, change: PolicyChange, native: Native): Changed {
  const { name = segment.policy, preempt, ...rest } = change;
  const policy: Policy = { ...rest, name, preempt: preempt ?? segment.settings()["preempt"] === 1 };
  // What orion goes by follows from profiles, which are read at the start of a launch.
  const { policy: _, ...settings } = {
    ...policySettings({ ...policy, name: name === "orion" ? "none" : name }, [], native),
    policy: name,
  };
  if (segment.policy === "slo" && name !== "slo") {
    // The loop stops at that, so that it moves nothing any more. One that has looked at the policy just before puts back what is kept.
    segment.rekeep(settings);
    segment.configure({ policy: name });
    segment.putBack();
  }
  segment.configure({ ...settings, policy: name });
  segment.rekeep(settings);
  if (change.target) segment.target = targetOf(policy);
  const what = Object.entries(change).map(
    ([field, value]) => `${field} ${typeof value === "object" ? JSON.stringify(value) : String(value)}`,
  );
  const notes = Object.keys(change).flatMap((field) => noEffectNow(field, name) ?? []);
  return { segment: segment.id, text: `${segment.id}: ${what.join(", ")}`, notes };
}
