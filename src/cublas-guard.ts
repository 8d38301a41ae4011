/**
 * cublas-guard.ts: what the cuBLAS guard of the client library (native/guard.c) did for a client: its counts by cause and the
 * last events, as the report shows them.
 *
 * Plain values: nothing here reads the segment.
 */

import { z } from "zod";

/** In the order of `enum rg_guard_cause` in native/guard-inside.h, which starts at 1. */
export const CAUSES = [
  "null_handle",
  "wrong_context",
  "no_context",
  "in_use_elsewhere",
  "foreign_stream",
  "create_failed",
  "create_retried",
] as const;
export type Cause = (typeof CAUSES)[number];

const MODES = ["off", "warn", "repair"] as const;
/** What the guard may do; `null` if no process of the client has attached. */
export type GuardMode = (typeof MODES)[number] | null;

/** A call that the guard had to look at, and those like it: of the same cause, function, thread, device and context. */
export const eventSchema = z.object({
  cause: z.enum(CAUSES),
  /** The function of cuBLAS. */
  call: z.string(),
  /** Thread id of the operating system. */
  thread: z.int(),
  /** CUDA's number of the device in that process; null if it was not known. */
  device: z.int().nullable(),
  /** Handle of the context that was current, in hexadecimal; null without one. */
  context: z.string().nullable(),
  /** Which of the thread's guarded calls the last one was, from 1. */
  call_index: z.int(),
  times: z.int(),
});
export type GuardEvent = z.infer<typeof eventSchema>;

const count = z.int();
/** Calls by cause, and what was done about them. */
export const guardSchema = z.object({
  mode: z.enum(MODES).nullable(),
  null_handle: count,
  wrong_context: count,
  no_context: count,
  in_use_elsewhere: count,
  foreign_stream: count,
  create_failed: count,
  create_retried: count,
  /** Calls that ran in another way than the program asked. */
  repaired: count,
  /** Where they were, those that are alike as one; the last ones, in the order of when each came last. */
  events: z.array(eventSchema),
});
export type GuardReport = z.infer<typeof guardSchema>;

/** Events that a report shows at most. */
export const EVENTS = 16;

/** The mode behind the number in the segment. */
export function guardMode(number: number): GuardMode {
  return MODES[number - 1] ?? null;
}

/**
 * Decodes the ring of the segment (guard_ring in native/segment.h), oldest first. `words` are its words, `size` those of one
 * entry; entries that were being written are left out.
 */
export function guardEvents(words: readonly bigint[], size: number): GuardEvent[] {
  const found: { number: bigint; event: GuardEvent }[] = [];
  for (let at = 0; at + size <= words.length; at += size) {
    const [head = 0n, where = 0n, context = 0n, index = 0n, times = 0n, ...name] = words.slice(at, at + size);
    const cause = CAUSES[Number(head & 0xffn) - 1];
    if (cause === undefined) continue;
    found.push({
      number: head >> 8n,
      event: {
        cause,
        call: text(name),
        thread: Number(where & 0xffff_ffffn),
        device: where >> 32n === 0xffff_ffffn ? null : Number(where >> 32n),
        context: context === 0n ? null : `0x${context.toString(16)}`,
        call_index: Number(index),
        times: Number(times),
      },
    });
  }
  return found.toSorted((a, b) => (a.number < b.number ? -1 : 1)).map(({ event }) => event);
}

function text(words: readonly bigint[]): string {
  const bytes = new Uint8Array(new BigUint64Array(words).buffer);
  const end = bytes.indexOf(0);
  return new TextDecoder().decode(end < 0 ? bytes : bytes.subarray(0, end));
}

/** Where a call was, for people. */
export function eventText({ call, thread, device, context, times }: GuardEvent): string {
  const where = context === null ? "no context" : `context ${context}`;
  return `${call}, thread ${thread}, device ${device ?? "unknown"}, ${where}${times > 1 ? `, ${times} times` : ""}`;
}

/** What there is to tell people: a line of counts, and of each cause the last call. */
export function guardLines(name: string, guard: GuardReport): string[] {
  const found = CAUSES.filter((cause) => guard[cause] > 0);
  if (found.length === 0) return [];
  const counts = found.map((cause) => `${cause} ${guard[cause]}`).join(", ");
  const last = found.flatMap((cause) => guard.events.findLast((event) => event.cause === cause) ?? []);
  return [
    `guard: ${name}: ${counts} (${guard.repaired} repaired)`,
    ...last.map((event) => `guard: ${name}: last ${event.cause}: ${eventText(event)}`),
  ];
}
