/**
 * launch-changes.ts: what others have changed of a launch while it ran, by `rigel set` or `rigel pause` or over HTTP: its policy and
 * settings, and its clients. The report says so, as its numbers are not those of the configuration alone.
 */

import type { Policy } from "./config.ts";
import { sizeText } from "./memory.ts";
import type { PlannedClient } from "./plan.ts";
import { inPolicy, targetOf } from "./policy.ts";
import type { Segment } from "./segment.ts";

/** Settings that Rigel changes by itself. */
const OWN: ReadonlySet<string> = new Set(["policy", "shutdown", "hold_until_ms"]);

export class Changes {
  readonly #segment: Segment;
  readonly #policy: Policy;
  readonly #clients: readonly PlannedClient[];
  readonly #settings: Readonly<Record<string, number>>;
  readonly #paused = new Set<string>();

  /** To be made once the segment has its settings. `policy`: as planned. */
  constructor(segment: Segment, policy: Policy, clients: readonly PlannedClient[]) {
    this.#segment = segment;
    this.#policy = policy;
    this.#clients = clients;
    this.#settings = segment.settings();
  }

  /** To be called again and again: a pause that is over leaves nothing behind. */
  look(): void {
    for (const name of [...this.#clients.map((client) => client.name), ...this.#entered()])
      if (!this.#paused.has(name) && (this.#segment.wanted(name)?.paused_until_ns ?? 0) > 0) this.#paused.add(name);
  }

  /** The names of clients that threads of theirs have entered. */
  #entered(): string[] {
    const own = new Set(this.#clients.map(({ name }) => name));
    const entered = this.#segment
      .slots()
      .filter(({ name, parent }) => parent !== null && own.has(name.split("/", 1)[0] ?? ""));
    return [...new Set(entered.map(({ name }) => name))];
  }

  /** The policy in force, as far as it differs from the plan. */
  policy(): Policy & { inflight: number } {
    const { target: _, ...rest } = this.#policy;
    const name = this.#segment.policy;
    const { target } = this.#segment;
    const isOther = JSON.stringify(target) !== JSON.stringify(targetOf(this.#policy));
    const aim = isOther ? target : this.#policy.target;
    const fields = this.#changed().map(([setting, value]) => inPolicy(setting, value));
    const changed = Object.fromEntries(fields);
    return { ...rest, ...changed, ...(aim && { target: aim }), name, inflight: this.#segment.inflight };
  }

  /** Settings that are others than planned, and what they are now. What slo has moved does not count. */
  #changed(): [string, number][] {
    const now = this.#segment.policy === "slo" ? this.#segment.kept() : this.#segment.settings();
    return Object.entries(now).filter(([setting, value]) => !OWN.has(setting) && value !== this.#settings[setting]);
  }

  /** One line for each thing that is not as planned any more. */
  notes(): string[] {
    this.look();
    const { name, target } = this.policy();
    const notes: string[] = [];
    if (name !== this.#policy.name)
      notes.push(`policy ${this.#policy.name} was planned and changed to ${name} meanwhile`);
    else if (name === "slo" && JSON.stringify(target) !== JSON.stringify(this.#policy.target))
      notes.push(`the target was changed to ${JSON.stringify(target)} meanwhile`);
    for (const [setting, value] of this.#changed()) {
      const [field, is] = inPolicy(setting, value);
      const [, was] = inPolicy(setting, this.#settings[setting] ?? 0);
      notes.push(`${field} was changed from ${was} to ${is} meanwhile`);
    }
    const memory = this.#segment.memory();
    for (const { name: client, class: kind, weight, memory_bytes = null } of this.#clients) {
      const asked = this.#segment.wanted(client);
      if (!asked) continue;
      const limit_bytes = memory.get(client)?.limit_bytes ?? null;
      if (asked.class !== undefined && asked.class !== kind)
        notes.push(`${client}: its class was changed from ${kind} to ${asked.class} meanwhile`);
      if (asked.weight !== undefined && asked.weight !== weight)
        notes.push(`${client}: its weight was changed from ${weight} to ${asked.weight} meanwhile`);
      if (limit_bytes !== memory_bytes)
        notes.push(
          `${client}: its memory limit was changed from ${limitText(memory_bytes)} to ${limitText(limit_bytes)} meanwhile`,
        );
      if (this.#paused.has(client)) notes.push(`${client}: was paused meanwhile`);
    }
    // What those were before is the program's to know.
    for (const client of this.#entered()) {
      const asked = this.#segment.wanted(client);
      if (asked?.class !== undefined) notes.push(`${client}: its class was changed to ${asked.class} meanwhile`);
      if (asked?.weight !== undefined) notes.push(`${client}: its weight was changed to ${asked.weight} meanwhile`);
      if (this.#paused.has(client)) notes.push(`${client}: was paused meanwhile`);
    }
    return notes;
  }
}

function limitText(bytes: number | null): string {
  return bytes === null ? "none" : sizeText(bytes);
}
