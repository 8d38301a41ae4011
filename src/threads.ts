/**
 * threads.ts: what each thread of a client does and waits in, as its segment shows it (native/trace.h), as plain data.
 *
 * A row is written by its thread without any lock, so that it holds at whatever instant it is looked at, also of a process
 * that was killed: what it shows then is what the thread did last.
 */

import { readFileSync } from "node:fs";
import { shortName } from "./kernel-name.ts";
import type { Segment, Slot } from "./segment.ts";

/** RG_DOING in native/segment.h. */
const DOING = 0x8000_0000;

/** Of the segment's `threads`: native/segment.h has as many rows for each slot. */
const rowsOf = (segment: Segment): number => segment.table("threads").count / segment.capacity;

/** One thread that has called the driver. Handles are the process's own, in hexadecimal; null where there is none. */
export interface Thread {
  tid: number;
  name: string;
  /** Slot of the client whose work it launched last. */
  client: number | null;
  /** Index of the device it last launched on. */
  device: number | null;
  /** Requests in which it launched on another device than in the one before. */
  moves: number;
  context: string | null;
  stream: string | null;
  /** Operations begun: those that queue work (kernels, graphs, copies, memsets), and the others. */
  launches: number;
  calls: number;
  /** The last operation that it has finished. */
  last: { operation: string; at_ns: number } | null;
  /** What it launched last. */
  kernel: string | null;
  /** The call that it is in now. */
  waiting: { operation: string; since_ns: number; object: string | null } | null;
}

/** The clock of a segment's ticks. What is to be compared has to be converted by one and the same. */
export interface Clock {
  /** When it was made. */
  now: { tick: bigint; ns: number };
  /** Nanoseconds of CLOCK_MONOTONIC. */
  at_ns: (tick: bigint) => number;
}

/** Goes by what both clocks said when the segment was made and say now: a microsecond off where it is younger than a second. */
export function clockOf(segment: Segment): Clock {
  const header = segment.table("header");
  const now = segment.now;
  if (header.word(0, "tick_source") === 0) return { now, at_ns: (tick) => Number(tick) };
  const ticks = Number(now.tick - header.long(0, "created_tick"));
  const ns = now.ns - Number(header.long(0, "created_ns"));
  const rate = ticks > 0 ? ns / ticks : 1;
  return { now, at_ns: (tick) => Math.round(now.ns - Number(now.tick - tick) * rate) };
}

/** The threads of one process that have a row, in the order of their first operation as far as rows were free. */
export function threadsOf(segment: Segment, slot: Slot, { at_ns }: Clock = clockOf(segment)): Thread[] {
  const table = segment.table("threads");
  const { operations } = segment.vocabulary;
  const names = segment.table("names");
  const each = rowsOf(segment);
  const handle = (row: number, field: string): string | null => hexadecimal(table.long(row, field));
  const name = (number: number): string => operations[number] ?? `operation ${number}`;
  return Array.from({ length: each }, (_, index) => slot.index * each + index).flatMap((row) => {
    const tid = table.word(row, "tid");
    if (tid === 0) return [];
    // The time is stored before what it is the time of: read the other way round.
    const doing = table.word(row, "doing");
    const since_ns = at_ns(table.long(row, "since_tick"));
    const before = table.word(row, "before");
    const kernel = table.word(row, "kernel");
    const device = table.word(row, "device");
    const client = table.word(row, "client");
    const isIn = (doing & DOING) !== 0;
    const operation = name(doing & ~DOING);
    return {
      tid,
      name: (slot.finished ? "" : commOf(slot.pid, tid)) || table.text(row, "name"),
      client: client === 0 ? null : client - 1,
      device: device === 0 ? null : device - 1,
      moves: table.word(row, "moves"),
      context: handle(row, "context"),
      stream: handle(row, "stream"),
      launches: Number(table.long(row, "launches")),
      calls: Number(table.long(row, "calls")),
      last: !isIn
        ? doing === 0
          ? null
          : { operation, at_ns: since_ns }
        : before === 0
          ? null
          : { operation: name(before), at_ns: at_ns(table.long(row, "before_tick")) },
      kernel: kernel === 0 ? null : shortName(names.text(kernel - 1, "name")),
      waiting: isIn ? { operation, since_ns, object: handle(row, "object") } : null,
    };
  });
}

/** Threads of a process that found no row: what they do is not known. */
export function threadsLost(segment: Segment, slot: Slot): number {
  return Number(segment.table("clients").long(slot.index, "threads_lost"));
}

/** A communicator of NCCL that a process takes part in. */
export interface Communicator {
  /** The same for all its ranks. */
  key: string;
  rank: number;
  size: number;
  /** Collectives begun, sends and receives begun. */
  entered: number;
  peers: number;
  /** The last one; null: none yet. */
  operation: string | null;
  elements: number;
  /** When that began, or the communicator was made. */
  at_ns: number;
}

/** The communicators of one process. */
export function communicatorsOf(segment: Segment, slot: Slot, { at_ns }: Clock = clockOf(segment)): Communicator[] {
  const table = segment.table("communicators");
  const { operations } = segment.vocabulary;
  const each = table.count / segment.capacity;
  return Array.from({ length: each }, (_, index) => slot.index * each + index).flatMap((row) => {
    const key = table.long(row, "key");
    const operation = table.word(row, "operation");
    if (key === 0n) return [];
    return {
      key: key.toString(16).padStart(16, "0"),
      rank: table.word(row, "rank"),
      size: table.word(row, "size"),
      entered: Number(table.long(row, "entered")),
      peers: Number(table.long(row, "peers")),
      operation: operation === 0 ? null : (operations[operation] ?? null),
      elements: Number(table.long(row, "elements")),
      at_ns: at_ns(table.long(row, "at_tick")),
    };
  });
}

/** The process's RANK, as torchrun and others set it; null if it has none. */
export function rankOf(segment: Segment, slot: Slot): number | null {
  const rank = segment.table("clients").word(slot.index, "rank");
  return rank === 0 ? null : rank - 1;
}

function hexadecimal(value: bigint): string | null {
  return value === 0n ? null : `0x${value.toString(16)}`;
}

/** A thread is often named after it has begun. */
function commOf(pid: number, tid: number): string {
  try {
    return readFileSync(`/proc/${pid}/task/${tid}/comm`, "utf8").trim();
  } catch {
    return "";
  }
}
