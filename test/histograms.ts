/** histograms.ts: made-up durations for tests. */

import { Histogram } from "../src/usage.ts";

/** The shape of native/histogram.h. */
const SHAPE = { buckets: 1 + (24 << 6), sub_bits: 6, min_shift: 10 };

/** Durations as the segment has them. */
export function histogramOf(durations_ms: readonly number[]): Histogram {
  const counts = new Float64Array(SHAPE.buckets);
  for (const ms of durations_ms) {
    const ns = ms * 1e6;
    const octave = Math.floor(Math.log2(ns));
    const sub = Math.floor(ns / 2 ** (octave - SHAPE.sub_bits)) % 64;
    const bucket = 1 + ((octave - SHAPE.min_shift) << SHAPE.sub_bits) + sub;
    counts[bucket] = (counts[bucket] ?? 0) + 1;
  }
  return new Histogram(counts, SHAPE);
}

/** A reproducible stream of numbers in [0, 1). */
export function random(seed: number): () => number {
  let state = seed;
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}
