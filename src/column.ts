/**
 * column.ts: a growing list of numbers outside of the JavaScript heap, in chunks, so that growing never copies.
 *
 * A million numbers cost what their bytes are; an array of numbers costs more than twice that while it grows.
 */

const CHUNK = 1 << 16;

type Kind = "u32" | "f64";

export class Column {
  readonly #kind: Kind;
  readonly #chunks: (Uint32Array | Float64Array)[] = [];
  #length = 0;

  /** `u32` holds whole numbers from 0 to 2^32 - 1, `f64` any number. */
  constructor(kind: Kind) {
    this.#kind = kind;
  }

  get length(): number {
    return this.#length;
  }

  push(value: number): void {
    if (this.#length % CHUNK === 0)
      this.#chunks.push(this.#kind === "u32" ? new Uint32Array(CHUNK) : new Float64Array(CHUNK));
    const chunk = this.#chunks[this.#length >>> 16];
    if (chunk) chunk[this.#length % CHUNK] = value;
    this.#length++;
  }

  /** The value there; 0 beyond the ends. */
  at(index: number): number {
    return index >= 0 && index < this.#length ? (this.#chunks[index >>> 16]?.[index % CHUNK] ?? 0) : 0;
  }
}
