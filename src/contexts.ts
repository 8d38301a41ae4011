/**
 * contexts.ts: `rigel contexts`: where each client's threads work: contexts, devices, what they called how often, and handles that
 * were used in a context that they do not belong to, those of cuBLAS by what its guard saw. As data for --json and GET /v1/contexts, and as text.
 *
 * Reads segments and nothing else. native/context.c and native/trace.h say how what it shows is kept.
 */

import { basename } from "node:path";
import type { Command } from "commander";
import { z } from "zod";
import { printable } from "./log.ts";
import { CAUSES, eventSchema, eventText } from "./cublas-guard.ts";
import { liveSegments } from "./discover.ts";
import { RigelError } from "./errors.ts";
import { Native } from "./native.ts";
import type { Segment, Slot } from "./segment.ts";
import { threadsLost, threadsOf } from "./threads.ts";

/** RG_CONTEXT_ENDED, RG_CONTEXT_GONE, RG_MISUSES and RG_MISUSE_WORDS in native/segment.h. */
const ENDED = 0x8000_0000n;
const GONE = 1n;
const MISUSE_WORDS = 8;
const PREEMPTION = ["unknown", "on", "off", "stops"] as const;

const count = z.int();
/** Handles are the process's own, in hexadecimal. */
const handle = z.string();

const callsSchema = z.record(z.string(), count);

const placeSchema = z.object({
  /** Index in the segment, name and UUID. */
  index: count,
  name: z.string(),
  uuid: z.string(),
  /** Whether the client can be taken off it by its channels, and their time slice as set by Rigel; null: never set. */
  preemption: z.enum(PREEMPTION),
  slice_us: count.nullable(),
});

const threadSchema = z.object({
  tid: count,
  name: z.string(),
  /** The client whose work it launched last; null: none yet. */
  client: z.string().nullable(),
  /** Index of the device that it launched on last. */
  device: count.nullable(),
  /** Current context, as last set or launched in. */
  context: handle.nullable(),
  stream: handle.nullable(),
  launches: count,
  calls: count,
  /** The call that it is in, or was in last. */
  operation: z.string().nullable(),
  /** Requests in which it launched on another device than in the one before. */
  moves: count,
});

const misuseSchema = z.object({
  number: count,
  call: z.string(),
  tid: count,
  /** What the driver said; 0: it let the call through. */
  result: count,
  handle: handle.nullable(),
  /** Context that was current (of an event: that of the stream). */
  context: handle.nullable(),
  /** Context that the handle belongs to; "destroyed": it, or that, is no more; null: not known. */
  belongs_to: handle.nullable(),
  client: z.string().nullable(),
  /** CLOCK_MONOTONIC. */
  at_ms: z.number(),
});

export const processContextsSchema = z.object({
  segment: z.string(),
  client: z.string(),
  class: z.enum(["high", "best-effort"]),
  pid: count,
  live: z.boolean(),
  devices: z.array(placeSchema),
  contexts: z.array(z.object({ context: handle, device: count, ended: z.boolean() })),
  /** There were more than these, for which there is no room. */
  contexts_full: z.boolean(),
  threads: z.array(threadSchema),
  /** Threads that are not among these, for want of room. */
  threads_lost: count,
  /** Calls with a handle in a context that it does not belong to: how many, and the last eight. */
  misuses: z.object({ count, last: z.array(misuseSchema) }),
  /** Its cuBLAS handles: how many are alive (null: it has ended, or never had the guard), calls by what was wrong, and the last of them. */
  cublas: z.object({
    handles: count.nullable(),
    calls: z.partialRecord(z.enum(CAUSES), count),
    repaired: count,
    last: z.array(eventSchema),
  }),
  moves: count,
  /** How often what was called; of a living process up to a moment ago. */
  calls: callsSchema,
  /** Clients that its threads have entered. */
  thread_clients: z.array(
    z.object({
      name: z.string(),
      class: z.enum(["high", "best-effort"]),
      devices: z.array(count),
      moves: count,
      calls: callsSchema,
    }),
  ),
});
export type ProcessContexts = z.infer<typeof processContextsSchema>;

/** Every process in a segment. */
export function contextsOf(segment: Segment): ProcessContexts[] {
  const slots = segment.slots();
  const names = new Map(slots.map(({ index, name }) => [index, name]));
  return slots
    .filter(({ parent }) => parent === null)
    .map((slot) => {
      const clients = segment.table("clients");
      const { devices, usage, guard_mode, guard_events } = segment.read(slot);
      return {
        segment: basename(segment.path),
        client: slot.name,
        class: slot.class,
        pid: slot.pid,
        live: !slot.finished,
        devices: devices.map((device) => placeOf(segment, slot, device)),
        contexts: contextWords(clients.words(slot.index, "contexts")),
        contexts_full: clients.long(slot.index, "contexts_full") > 0,
        threads: threadRows(segment, slot, names),
        threads_lost: threadsLost(segment, slot),
        misuses: {
          count: Number(clients.long(slot.index, "misuses")),
          last: misusesOf(segment, clients.words(slot.index, "misuse_ring"), names),
        },
        cublas: {
          handles: guard_mode === null || slot.finished ? null : Number(clients.long(slot.index, "guard_handles")),
          calls: Object.fromEntries(
            CAUSES.map((cause) => [cause, usage.counters[`guard_${cause}`]] as const).filter(([, times]) => times > 0),
          ),
          repaired: usage.counters.guard_repaired,
          last: guard_events,
        },
        moves: Number(clients.long(slot.index, "moves")),
        calls: callsOf(segment, slot.index),
        thread_clients: slots
          .filter(({ parent }) => parent === slot.index)
          .map((own) => ({
            name: own.name.slice(slot.name.length + 1),
            class: own.class,
            devices: segment.read(own).devices,
            moves: Number(clients.long(own.index, "moves")),
            calls: callsOf(segment, own.index),
          })),
      };
    });
}

function placeOf(segment: Segment, slot: Slot, device: number): z.infer<typeof placeSchema> {
  const shares = segment.table("shares");
  const row = device * segment.capacity + slot.index;
  const found = segment.devices().find(({ index }) => index === device);
  return {
    index: device,
    name: found?.name ?? "",
    uuid: found?.uuid ?? "",
    preemption: PREEMPTION[shares.word(row, "preemption")] ?? "unknown",
    slice_us: shares.word(row, "slice_us") || null,
  };
}

function contextWords(words: BigUint64Array): ProcessContexts["contexts"] {
  const found: ProcessContexts["contexts"] = [];
  for (let at = 0; at + 1 < words.length; at += 2) {
    const [context = 0n, device = 0n] = words.subarray(at, at + 2);
    if (context === 0n || device === 0n) continue;
    found.push({ context: hex(context), device: Number(device & ~ENDED) - 1, ended: (device & ENDED) !== 0n });
  }
  return found;
}

function threadRows(segment: Segment, slot: Slot, names: ReadonlyMap<number, string>): ProcessContexts["threads"] {
  return threadsOf(segment, slot).map((thread) => ({
    tid: thread.tid,
    name: thread.name,
    client: thread.client === null ? null : (names.get(thread.client) ?? null),
    device: thread.device,
    context: thread.context,
    stream: thread.stream,
    launches: thread.launches,
    calls: thread.calls,
    operation: thread.waiting?.operation ?? thread.last?.operation ?? null,
    moves: thread.moves,
  }));
}

const low = (word: bigint): number => Number(word & 0xffff_ffffn);
const high = (word: bigint): number => Number(word >> 32n);

function misusesOf(
  segment: Segment,
  ring: BigUint64Array,
  names: ReadonlyMap<number, string>,
): ProcessContexts["misuses"]["last"] {
  const { operations } = segment.vocabulary;
  return Array.from({ length: ring.length / MISUSE_WORDS }, (_, index) => index * MISUSE_WORDS)
    .flatMap((at) => {
      const [number = 0n, call = 0n, said = 0n, context = 0n, owner = 0n, used = 0n, when = 0n] = ring.subarray(
        at,
        at + 7,
      );
      if (number === 0n) return [];
      return {
        number: Number(number),
        call: operations[high(call)] ?? `operation ${high(call)}`,
        tid: low(call),
        result: high(said),
        handle: used === 0n ? null : hex(used),
        context: context === 0n ? null : context === GONE ? "destroyed" : hex(context),
        belongs_to: owner === 0n ? null : owner === GONE ? "destroyed" : hex(owner),
        client: names.get(low(said)) ?? null,
        at_ms: Number(when) / 1e6,
      };
    })
    .toSorted((a, b) => a.number - b.number);
}

/** What was called at all, most often first. */
function callsOf(segment: Segment, slot: number): Record<string, number> {
  const { operations } = segment.vocabulary;
  const counted = [...segment.table("calls").words(slot, "count")]
    .map((times, operation) => [operations[operation] ?? `operation ${operation}`, Number(times)] as const)
    .filter(([, times]) => times > 0);
  return Object.fromEntries(counted.toSorted(([, a], [, b]) => b - a));
}

function hex(value: bigint): string {
  return `0x${value.toString(16)}`;
}

/* ---- the command ---- */

const EXAMPLES = `
Examples:
  rigel contexts                      contexts, threads and calls of every client of this user's launches
  rigel contexts train                one client
  rigel contexts train/stage-0        the process that has this client of a thread's, which may be named alone: stage-0
  rigel contexts --json | jq '.processes[] | [.client, .misuses.count]'

A handle in a wrong context is a stream or event that the driver refused because it is of another context or destroyed, or a stream of
another context than the current one that it let through. cuBLAS handles that were used wrongly are told apart from these.`;

/** Adds `rigel contexts`. */
export function addContexts(program: Command): void {
  program
    .command("contexts")
    .description("show on which device and in which context each thread works, and handles used in a wrong one")
    .argument("[client]", "a client's name, also that of a thread's, or a process number (default: all)")
    .option("--segment <path>", "a segment file, or the folder of those (default: /dev/shm)")
    .option("--json", "print one JSON document")
    .addHelpText("after", EXAMPLES)
    .action(runContexts);
}

async function runContexts(client: string | undefined, flags: { segment?: string; json?: true }): Promise<void> {
  const all = liveSegments(await Native.load(), flags.segment)().flatMap(contextsOf);
  const processes = all.filter((one) => client === undefined || isOf(one, client));
  if (processes.length === 0 && client !== undefined)
    throw new RigelError(
      "command",
      `there is no client or process ${client}; there is ${[...new Set(all.flatMap(namesOf))].join(", ") || "none"}`,
    );
  const text = flags.json ? JSON.stringify({ schema: 1, processes }, null, 2) : processes.map(textOf).join("\n\n");
  process.stdout.write(`${text || "no client runs"}\n`);
}

/** Names of its clients: its own, and those that its threads have entered. */
function namesOf({ client, thread_clients }: ProcessContexts): string[] {
  return [client, ...thread_clients.map(({ name }) => `${client}/${name}`)];
}

function isOf(one: ProcessContexts, asked: string): boolean {
  return (
    String(one.pid) === asked || namesOf(one).includes(asked) || one.thread_clients.some(({ name }) => name === asked)
  );
}

function textOf(one: ProcessContexts): string {
  const lines = [`${one.client}: process ${one.pid}, ${one.class}, ${one.live ? "live" : "ended"}`];
  for (const { index, name, uuid, preemption, slice_us } of one.devices)
    lines.push(
      `  device ${index}  ${name} (${uuid})  preemption ${preemption}${slice_us === null ? "" : `, slices of ${slice_us} us`}`,
    );
  for (const { context, device, ended } of one.contexts)
    lines.push(`  context ${context} on device ${device}${ended ? ", destroyed" : ""}`);
  if (one.contexts_full) lines.push("  more contexts, which are not shown for want of room");
  for (const thread of one.threads)
    lines.push(
      `  thread ${thread.tid} ${thread.name}: device ${thread.device ?? "-"}, context ${thread.context ?? "-"}, ` +
        `${thread.client ?? "no client yet"}, ${thread.launches} launches, ${thread.operation ?? "nothing called yet"}` +
        (thread.moves > 0 ? `, changed its device between requests ${thread.moves} times` : ""),
    );
  if (one.threads_lost > 0) lines.push(`  threads that are not shown, for want of room: ${one.threads_lost}`);
  lines.push(`  calls: ${callsText(one.calls)}`);
  for (const own of one.thread_clients)
    lines.push(
      `  client ${own.name}: ${own.class}, devices ${own.devices.join(" ") || "-"}, calls: ${callsText(own.calls)}`,
    );
  lines.push(`  handles used in a wrong context: ${one.misuses.count}`);
  for (const wrong of one.misuses.last)
    lines.push(
      `    ${wrong.call} in thread ${wrong.tid} with ${wrong.handle ?? "no handle"} of ${wrong.belongs_to ?? "an unknown context"} ` +
        `while ${wrong.context ?? "no context"} was current: ${wrong.result === 0 ? "let through" : `error ${wrong.result}`}`,
    );
  if (one.cublas.handles !== null || one.cublas.last.length > 0)
    lines.push(
      `  cuBLAS: ${one.cublas.handles ?? "no"} handles, ${callsText(one.cublas.calls)} wrong, ${one.cublas.repaired} repaired`,
    );
  for (const event of one.cublas.last) lines.push(`    ${event.cause}: ${eventText(event)}`);
  return lines.map(printable).join("\n");
}

function callsText(calls: Record<string, number>): string {
  const entries = Object.entries(calls);
  return entries.length === 0 ? "none" : entries.map(([name, times]) => `${name} ${times}`).join(", ");
}
