/**
 * slo-rungs.ts: the settings that policy `slo` chooses from: a ladder of rungs where best-effort work can be taken off the GPU, and one
 * where it is held at the gate, each from the rung that is safest for the high clients to the one that gives best-effort most.
 */

/**
 * Settings of the segment that a rung stands for, and how often best-effort work has its least share. A rung says all, so that nothing of the other ladder
 * stays.
 */
export type Settings = Readonly<
  Record<
    | "suspend"
    | "defer_us"
    | "defer_ppm"
    | "need_us"
    | "slice_us"
    | "inflight"
    | "corun"
    | "stop_us"
    | "share_period_us",
    number
  >
>;

/**
 * What a rung moves. `need` is for how long a request is taken to need the GPU, in parts of what requests take alone: best-effort work
 * gives way when the rest of its launches takes no longer; 0: at once. The GPU needs as long in a slow moment of the host as in a fast one,
 * in which it is a larger part of the request: of 3,500 requests of BERT alone on an H200's hosts (p10 4.4 ms, p50 6.7, p90 8.9; GPU 3.2)
 * half of the launches leave the GPU too little time in each that takes less than 7.4.
 */
export interface Rung {
  suspend: boolean;
  need: number;
  slice_us: number;
  inflight: number;
  corun: number;
  /** Work between two stops of a best-effort stream, 0: none; never more than is configured (Segment.move), so never any where that is 0. */
  stop_us: number;
}

/** The shortest slices; time goes into switching with shorter ones. */
export const SHORT_SLICE_US = 50;

/** As `priority` has it, unless something else is configured. */
const STOP_US = 250;

const suspended = (need: number, slice_us: number): Rung => ({
  suspend: true,
  need,
  slice_us,
  inflight: 8,
  corun: 0,
  stop_us: STOP_US,
});
const sliced = (slice_us: number): Rung => ({ ...suspended(0, slice_us), suspend: false });
const gated = (inflight: number, need = 0): Rung => ({ ...suspended(need, SHORT_SLICE_US), inflight });

/**
 * More than 1 is for hosts that were fast when the length of requests was measured. A tenth apart: in steps of a fifth the demo's harvest
 * is 0.91 instead of 0.92, with a p50 as alone and a p99 of 1.00 to 1.03 of it (`rigel simulate --policy slo+slices --duration 100 --seed
 * 1`, and 2 and 3).
 */
const NEEDS = [
  1.6, 1.45, 1.3, 1.2, 1.1, 1, 0.92, 0.84, 0.77, 0.7, 0.64, 0.58, 0.53, 0.48, 0.43, 0.38, 0.34, 0.3, 0.26, 0.23, 0.2,
  0.17,
];

/**
 * Best-effort work off the GPU as soon as a request begins. The first ones have more stops, each of which costs the GPU some 3 us, for
 * requests that best-effort work delays by what runs when they begin.
 */
const AT_ONCE: readonly Rung[] = [60, 120, STOP_US].map((stop_us) => ({ ...suspended(0, SHORT_SLICE_US), stop_us }));

/**
 * Where best-effort clients can be taken off the GPU (native/preempt.c). Short slices cost switches, long ones latency. Slices alone
 * and suspension are no steps of one scale: requests that leave the GPU idle between launches are better off with a late
 * suspension, those that keep it busy with one at once, or slices where the target leaves room (measured: docs/experiments.md). Until
 * it is suspended, a long slice lets best-effort work run on where a short one would let the GPU switch to the request's first kernels, and back, time and again
 * (the demo, `rigel simulate --duration 60` in slices, policy `priority`: requests as long as alone and a share of 0.868 with `defer_us`
 * 500 and `slice_us` 4000, 0.860 with 1000 and 1000, and `stop_us` 0). Where best-effort kernels are short, work that gives way late does so by stops: a
 * suspension takes 0.44 ms, and up to 100 while programs start on some GPU of the host. Where they are long (LONG_PART in slo.ts) nothing but a suspension
 * ends one in such a slice, and there are no stops on these rungs, unless the driver is seen to hold calls up (docs/experiments.md, "Giving way late").
 */
export const PREEMPT_RUNGS: readonly Rung[] = [
  ...AT_ONCE,
  sliced(SHORT_SLICE_US),
  ...NEEDS.map((need) => suspended(need, 16_000)),
  ...[200, 500, 2000].map((slice_us) => sliced(slice_us)),
];

/**
 * Where their streams stop between two kernels instead (native/stop.c), under MPS: there are no slices, and the last rung lets all run. Kernels
 * as short as MobileNetV2's delay nothing (ResNet-50's requests by 1% at most without any limit, with a share of 0.97; an H200's slow host).
 */
export const STOP_RUNGS: readonly Rung[] = [
  ...AT_ONCE,
  ...NEEDS.map((need) => suspended(need, SHORT_SLICE_US)),
  sliced(SHORT_SLICE_US),
];

/** Of PREEMPT_RUNGS the one with the shortest slices alone. */
export const SHORTEST = AT_ONCE.length;

/**
 * Where they are held at the gate: under MPS, or a driver that refuses. What is in flight when a request begins delays its start; what
 * may still be launched while it begins delays it for longer, and all that runs beside it all of it. Requests that leave the GPU idle
 * for part of their time catch up with the first two. The last ones are next to no limit: beside kernels as short as MobileNetV2's
 * ResNet-50's requests were delayed by 1% at most without any gate, with a share of 0.97; a limit of 32 gave 0.80 (an H200's slow host).
 */
export const GATE_RUNGS: readonly Rung[] = [
  ...[2, 4, 6, 8, 11, 16].map((inflight) => gated(inflight)),
  ...[0.9, 0.7, 0.53, 0.4, 0.22].map((need) => gated(16, need)),
  ...[1, 4, 16].map((corun): Rung => ({ ...gated(16, 0.22), corun })),
  ...[32, 64, 256].map((inflight): Rung => ({ ...gated(inflight, 0.22), corun: inflight })),
];

/** The rung to begin on, as strict as `priority` or stricter; those below are for requests that miss the target there. */
export function firstRung(ladder: readonly Rung[]): number {
  if (ladder === GATE_RUNGS) return 1;
  return AT_ONCE.length - 1;
}
