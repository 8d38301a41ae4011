/**
 * recording.ts: a recording (native/record.h) as seen from TypeScript: made, drained, its kinds and counts read.
 *
 * Offsets come from the library. All reads are Atomics.load, as in segment.ts. Writes `level`, `wanted` and `taken` alone.
 */

import { rmSync } from "node:fs";
import { getSystemErrorName } from "node:util";
import { z } from "zod";
import { RigelError } from "./errors.ts";
import type { Native } from "./native.ts";
import type { OperationKind } from "./classify.ts";

const fieldSchema = z.object({ offset: z.int().nonnegative(), type: z.string(), count: z.int().positive() });
const fieldsSchema = z.record(z.string(), fieldSchema);
const layoutSchema = z.object({
  version: z.literal(1),
  size: z.int().positive(),
  words: z.literal(8),
  names: z.object({ offset: z.int(), bytes: z.int() }),
  entries: z.object({ offset: z.int() }),
  header: z.object({ offset: z.literal(0), fields: fieldsSchema }),
  kinds: z.object({ offset: z.int(), stride: z.int().positive(), count: z.int().positive(), fields: fieldsSchema }),
});

/** enum rg_record_level. */
export const LEVEL = { count: 0, quiet: 1, log: 2, timed: 3 } as const;
/** enum rg_record_mechanism. */
export const MECHANISMS = ["auto", "events", "cupti"] as const;
export type Mechanism = (typeof MECHANISMS)[number];
/** enum rg_record_type. */
export const ENTRY = { launch: 1, time: 2, gpu: 3, request: 4, wait: 5, gemm: 6 } as const;
/** enum rg_record_source. */
export const SOURCE = { reported: 1, waited: 2, idle: 3 } as const;

/** enum rg_record_work. */
const WORKS = ["kernel", "graph", "copy_h2d", "copy_d2h", "copy_d2d", "memset"] as const;

/** What was launched any number of times: one kernel of one shape, one graph, copies or memsets of one size. */
export interface Kind {
  work: Exclude<OperationKind, "sync"> | "graph";
  name: string;
  grid: [number, number, number];
  block: [number, number, number];
  registers: number;
  shared_bytes: number;
  /** 0: not known. */
  sms: number;
  bytes: number;
}

/** One entry of the ring; what the words mean is by its type (native/record.h). */
export interface Entry {
  type: number;
  flag: number;
  kind: number;
  thread: number;
  /** Words 2 to 7. */
  words: [number, number, number, number, number, number];
}

/** Entries of a ring that is drained every few milliseconds: 8 MiB. */
const RING = 1 << 17;

export class Recording {
  readonly path: string;
  readonly #layout: z.infer<typeof layoutSchema>;
  readonly #bytes: Uint8Array<ArrayBuffer>;
  readonly #words: Uint32Array<ArrayBuffer>;
  readonly #kinds = new Map<number, Kind>();
  readonly #native: Native;
  readonly #capacity: number;
  #taken = 0;

  /** Makes the file. `entries`: launches are told one by one, not only counted. */
  static create(native: Native, path: string, entries: boolean): Recording {
    const capacity = entries ? RING : 0;
    const result = native.createRecording(path, capacity);
    if (result < 0)
      throw new RigelError(
        "segment",
        `the recording ${path} cannot be created (${getSystemErrorName(result)}); ` +
          "choose a folder that exists and can be written to with --segment DIR",
      );
    return new Recording(native, path, capacity);
  }

  private constructor(native: Native, path: string, capacity: number) {
    this.#native = native;
    this.path = path;
    this.#capacity = capacity;
    this.#layout = layoutSchema.parse(JSON.parse(native.recordLayout));
    this.#bytes = Bun.mmap(path, { shared: true });
    this.#words = new Uint32Array(this.#bytes.buffer, this.#bytes.byteOffset, this.#bytes.byteLength >> 2);
  }

  /** A number of the header. */
  read(field: string): number {
    const { offset, type } = this.#field(this.#layout.header.fields, field);
    return type === "u64" ? this.#long(offset >> 2) : Atomics.load(this.#words, offset >> 2);
  }

  text(field: "device" | "why"): string {
    const { offset, count } = this.#field(this.#layout.header.fields, field);
    return this.#text(offset, count);
  }

  set level(level: number) {
    this.#put("level", level);
  }

  set wanted(mechanism: Mechanism) {
    this.#put("wanted", MECHANISMS.indexOf(mechanism));
  }

  /** Takes what has come since, in its order. `final`: nobody writes any more, so that what is half written is left out. */
  drain(take: (entry: Entry) => void, final = false): void {
    const first = this.#layout.entries.offset >> 2;
    const begun = this.read("begun");
    const taken = this.#field(this.#layout.header.fields, "taken").offset >> 2;
    while (this.#taken < begun) {
      const at = first + (this.#taken % this.#capacity) * 16;
      if (Atomics.load(this.#words, at) === (this.#taken + 1) >>> 0) take(this.#entry(at));
      else if (!final) break;
      this.#taken++;
    }
    // Low half last would let a writer see the ring emptier than it is; nobody takes 2^32 entries between two looks.
    Atomics.store(this.#words, taken + 1, Math.floor(this.#taken / 2 ** 32));
    Atomics.store(this.#words, taken, this.#taken >>> 0);
  }

  kind(index: number): Kind {
    const known = this.#kinds.get(index);
    if (known) return known;
    const { offset, stride, fields } = this.#layout.kinds;
    const base = offset + index * stride;
    const word = (name: string): number => Atomics.load(this.#words, (base + this.#field(fields, name).offset) >> 2);
    const kind: Kind = {
      work: WORKS[word("work")] ?? "kernel",
      name: this.#text(this.#layout.names.offset + word("name_at"), word("name_bytes") + 1),
      grid: [word("grid_x"), word("grid_y"), word("grid_z")],
      block: [word("block_x"), word("block_y"), word("block_z")],
      registers: word("registers"),
      shared_bytes: word("shared_bytes"),
      sms: word("sms"),
      bytes: this.#long((base + this.#field(fields, "bytes").offset) >> 2),
    };
    if (word("state") === 1) this.#kinds.set(index, kind);
    return kind;
  }

  /** All kinds with how often each was launched, on its own and as part of graphs. */
  counts(): { kind: Kind; count: number; node_count: number }[] {
    const { offset, stride, count, fields } = this.#layout.kinds;
    const found: { kind: Kind; count: number; node_count: number }[] = [];
    for (let index = 0; index < count; index++) {
      const base = offset + index * stride;
      if (Atomics.load(this.#words, (base + this.#field(fields, "state").offset) >> 2) !== 1) continue;
      const long = (name: string): number => this.#long((base + this.#field(fields, name).offset) >> 2);
      found.push({ kind: this.kind(index), count: long("count"), node_count: long("node_count") });
    }
    return found;
  }

  /** To be called once nobody writes it any more, and all has been read. */
  remove(): void {
    this.#native.discard(this.path);
    rmSync(this.path, { force: true });
  }

  #entry(at: number): Entry {
    const low = Atomics.load(this.#words, at + 2);
    const high = Atomics.load(this.#words, at + 3);
    return {
      type: low & 0xff,
      flag: (low >>> 8) & 0xff,
      kind: low >>> 16,
      thread: high >>> 16,
      words: [
        this.#long(at + 4),
        this.#long(at + 6),
        this.#long(at + 8),
        this.#long(at + 10),
        this.#long(at + 12),
        this.#long(at + 14),
      ],
    };
  }

  /** A number of 64 bits, exact up to 2^53. */
  #long(word: number): number {
    return Atomics.load(this.#words, word) + Atomics.load(this.#words, word + 1) * 2 ** 32;
  }

  #text(offset: number, most: number): string {
    const bytes = this.#bytes.slice(offset, offset + most);
    const end = bytes.indexOf(0);
    return new TextDecoder().decode(end < 0 ? bytes : bytes.subarray(0, end));
  }

  #field(fields: z.infer<typeof fieldsSchema>, name: string): z.infer<typeof fieldSchema> {
    const field = fields[name];
    if (!field)
      throw new RigelError("native", `librigel.so has no ${name} in its recordings: it is of another version`);
    return field;
  }

  #put(name: string, value: number): void {
    Atomics.store(this.#words, this.#field(this.#layout.header.fields, name).offset >> 2, value);
  }
}
