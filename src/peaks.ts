/**
 * peaks.ts: what GPUs can do at most, as measured and from NVIDIA's public data sheets, for the roofline of classify.ts.
 *
 * Measured is what matrix products reach (test/gpu/peaks.py, or the fastest of a recording) and what reading device memory does (rigel calibrate).
 * Dense rates: where a data sheet gives a tensor-core rate "with sparsity", half of it stands here. A GPU that is not
 * listed has no peaks, and nothing is guessed for it.
 */

/** What the arithmetic of a kernel is done in; tensor cores have a rate for each. */
export type Precision = "fp64" | "fp32" | "tf32" | "fp16" | "fp8" | "int8";

export interface Peaks {
  /** As people say it. */
  name: string;
  /** Floating-point (or integer) operations per second; fp16 stands for bf16 too. Missing: the GPU has no such units. */
  flops_per_s: Partial<Record<Precision, number>>;
  /** Bytes per second to and from device memory. */
  bytes_per_s: number;
  /** What was reached; the precisions that were measured. */
  measured?: Pick<Peaks, "flops_per_s" | "bytes_per_s">;
  /** What one multiprocessor holds at once, and how many there are (CUDA programming guide, compute capabilities). */
  sms: number;
  threads_per_sm: number;
  blocks_per_sm: number;
  shared_bytes_per_sm: number;
  /** Where the numbers are from. */
  source: string;
}

const TERA = 1e12;

const KIB = 1024;
const HOPPER = { sms: 132, threads_per_sm: 2048, blocks_per_sm: 32, shared_bytes_per_sm: 228 * KIB };
const AMPERE = { sms: 108, threads_per_sm: 2048, blocks_per_sm: 32, shared_bytes_per_sm: 164 * KIB };
const ADA_L4 = { sms: 58, threads_per_sm: 1536, blocks_per_sm: 24, shared_bytes_per_sm: 100 * KIB };

const H200: Peaks["flops_per_s"] = {
  fp64: 34 * TERA,
  fp32: 67 * TERA,
  tf32: 494.5 * TERA,
  fp16: 989.5 * TERA,
  fp8: 1979 * TERA,
  int8: 1979 * TERA,
};

/**
 * Products of test/gpu/peaks.py; in fp32 (51.0 there) the longest one of profiles/h200-gpt2-train-bs8x512.csv's program, 768 x 4096 x
 * 50257, as rigel profile recorded it (5.93 ms); and read_bytes_per_us of profiles/device-h200.json. Not int8: PyTorch's product
 * reached 0.80 PFLOP/s, less than in fp8 on the same units.
 */
const H200_MEASURED: Peaks["measured"] = {
  flops_per_s: { fp64: 62 * TERA, fp32: 53.3 * TERA, tf32: 344.3 * TERA, fp16: 720.7 * TERA, fp8: 1347 * TERA },
  bytes_per_s: 4.363 * TERA,
};

const A100: Peaks["flops_per_s"] = {
  fp64: 9.7 * TERA,
  fp32: 19.5 * TERA,
  tf32: 156 * TERA,
  fp16: 312 * TERA,
  int8: 624 * TERA,
};

const A100_SOURCE = "NVIDIA A100 Tensor Core GPU data sheet, 2021";

/** In this order: the first whose pattern fits the device's name, as CUDA gives it. */
const TABLE: [RegExp, Peaks][] = [
  [
    // The NVL variant has lower rates.
    /\bH200\b(?!.*NVL)/,
    {
      name: "H200 SXM",
      flops_per_s: H200,
      bytes_per_s: 4.8 * TERA,
      measured: H200_MEASURED,
      ...HOPPER,
      source: "NVIDIA H200 Tensor Core GPU data sheet, 2024",
    },
  ],
  [
    /\bA100\b.*SXM.*80GB/,
    { name: "A100 SXM 80 GB", flops_per_s: A100, bytes_per_s: 2.039 * TERA, ...AMPERE, source: A100_SOURCE },
  ],
  [
    /\bA100\b.*80GB/,
    { name: "A100 PCIe 80 GB", flops_per_s: A100, bytes_per_s: 1.935 * TERA, ...AMPERE, source: A100_SOURCE },
  ],
  [
    /\bA100\b/,
    {
      name: "A100 40 GB",
      flops_per_s: A100,
      bytes_per_s: 1.555 * TERA,
      ...AMPERE,
      source: "NVIDIA A100 Tensor Core GPU data sheet, 2020",
    },
  ],
  [
    /\bL4\b/,
    {
      name: "L4",
      flops_per_s: { fp32: 30.3 * TERA, tf32: 60 * TERA, fp16: 121 * TERA, fp8: 242.5 * TERA, int8: 242.5 * TERA },
      bytes_per_s: 0.3 * TERA,
      ...ADA_L4,
      source: "NVIDIA L4 Tensor Core GPU data sheet, 2023",
    },
  ],
];

/**
 * Floating-point operations for each byte at which arithmetic and memory take as long; nothing where the GPU has no such units. Both rates are
 * measured, or both are the data sheet's: what is reached is less of either, by about as much.
 */
export function ridgeOf(peaks: Peaks, precision: Precision): { flop_per_byte: number; measured: boolean } | undefined {
  const reached = peaks.measured?.flops_per_s[precision];
  if (peaks.measured && reached !== undefined)
    return { flop_per_byte: reached / peaks.measured.bytes_per_s, measured: true };
  const rate = peaks.flops_per_s[precision];
  return rate === undefined ? undefined : { flop_per_byte: rate / peaks.bytes_per_s, measured: false };
}

/** The peaks of a device by the name that CUDA gives it, or nothing. A part of a GPU (MIG) has parts of them, each another one. */
export function peaksOf(device: string): Peaks | undefined {
  if (/\bMIG\b/.test(device)) return undefined;
  return TABLE.find(([pattern]) => pattern.test(device))?.[1];
}

const REGISTERS_PER_SM = 65_536;
const WARP = 32;

/**
 * Multiprocessors that a kernel keeps busy at once: its blocks over those that one holds, at most all there are. 0 where
 * the device or the shape is not known. Resources only: what the hardware rounds up to is left out.
 */
export function smsUsed(
  device: string,
  shape: { grid: readonly number[]; block: readonly number[]; registers: number; shared_bytes: number },
): number {
  const limits = peaksOf(device);
  const blocks = shape.grid.reduce((product, size) => product * size, 1);
  const threads = shape.block.reduce((product, size) => product * size, 1);
  if (!limits || blocks === 0 || threads === 0) return 0;
  const warps = Math.ceil(threads / WARP) * WARP;
  const held = Math.min(
    limits.blocks_per_sm,
    Math.floor(limits.threads_per_sm / warps),
    shape.registers > 0 ? Math.floor(REGISTERS_PER_SM / (warps * shape.registers)) : Infinity,
    shape.shared_bytes > 0 ? Math.floor(limits.shared_bytes_per_sm / shape.shared_bytes) : Infinity,
  );
  return Math.min(limits.sms, Math.ceil(blocks / Math.max(1, held)));
}
