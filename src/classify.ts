/**
 * classify.ts: what a kernel does, from its name, and what it is bound by, from what is known of it. Pure.
 *
 * The rules are written after the names that cuBLAS, cuDNN, CUTLASS, PyTorch, Triton's inductor kernels, flash-attention
 * and NCCL give their kernels. A name says what a kernel does but not what limits it, so a bound is never guessed from
 * a name: it comes from measured metrics, else from a roofline, else it is unknown, and the reason says which.
 */

import { qualifiedName } from "./kernel-name.ts";
import { type Precision, peaksOf, ridgeOf } from "./peaks.ts";

/** What a row of a profile is to the GPU; the words of the profile's `kind` column. */
export const OPERATION_KINDS = ["kernel", "memset", "copy_h2d", "copy_d2h", "copy_d2d", "sync"] as const;
export type OperationKind = (typeof OPERATION_KINDS)[number];

/**
 * What the work is. "elementwise" is each result from few elements, copies, casts, gathers and layout changes included;
 * "reduction" includes the last step of a split GEMM; "other" is what no rule knows, sorts, scans and pooling among it.
 */
export const FAMILIES = [
  "gemm",
  "convolution",
  "attention",
  "elementwise",
  "reduction",
  "normalisation",
  "softmax",
  "memcpy",
  "memset",
  "communication",
  "other",
] as const;
export type Family = (typeof FAMILIES)[number];

export const BOUNDS = ["compute", "memory", "unknown"] as const;
export type Bound = (typeof BOUNDS)[number];

/** Kernels whose own name says nothing: what they run is among their template arguments. */
const WRAPPERS =
  /\b(cutlass\w*::(Kernel2?|device_kernel)|init_device_workspace_kernel|multi_tensor_apply_kernel|kernel|Kernel)$/;

/** In this order: the first that fits decides. */
const RULES: [RegExp, Family][] = [
  // Inductor names a kernel by its shape first: a pointwise kernel stays one whatever is fused into it.
  [/^triton_(poi|for)_/, "elementwise"],
  [
    /nccl(Dev)?Kernel|^nccl|msccl|nvshmem|cross_device_reduce|all_?reduce|all_?gather|reduce_?scatter|send_?recv/i,
    "communication",
  ],
  [/all_?to_?all|deep_ep|(one|two)_?shot|multimem_/i, "communication"],
  [/reshape_and_cache|concat_and_cache/i, "elementwise"],
  [/flash(?!infer)|fmha|attention|attn|sdpa|(prefill|decode)with(paged|ragged)|paged_kv|_(gqa|mqa|mla)_/i, "attention"],
  [/softmax/i, "softmax"],
  [
    /(layer|batch|group|rms|instance)_?norm|\bbn_(fw|bw)|_bn_|norm_(fwd|bwd)|normaliz|norm_(kernel|transform)/i,
    "normalisation",
  ],
  [/GammaBeta|RowwiseMoments|ComputeInternalGradients|ComputeFusedParams|cuComputeGradInput/, "normalisation"],
  [/^triton_(red|per)_/, "reduction"],
  [/splitK_?reduce|ReduceSplitK|LpNorm|\b(dot|reduce_1Block|asum|nrm2|iamax)_kernel/i, "reduction"],
  [/(nchw|nhwc)To|nchwAddPadding/i, "elementwise"],
  [
    /implicit_?gemm|implicit_?convolve|conv(?!ert)|[fd]prop|[dw]grad|winograd|scudnn|hcudnn|im2col|col2im/i,
    "convolution",
  ],
  [/cudnn::(cnn|gemm)|cudnn::\w+::gemm|fft2d_(r2c|c2r)|depthwise/i, "convolution"],
  [/gemm|gemv|nvjet|matmul|marlin|_[bm]mm_|^bmm_|triton_(mm|bmm|tem)|tensorop|xmma|_[hi]mma_|wgmma/i, "gemm"],
  [/no_reduce/i, "elementwise"],
  [/reduce|reduction|argm(ax|in)|sum_and_scatter|compute_grad_weight/i, "reduction"],
  [
    /elementwise|pointwise|dropout|CatArrayBatchedCopy|multi_tensor_apply|copy|fill|_where_|index(Select|Func|_)/i,
    "elementwise",
  ],
  [
    /gelu|silu|relu|sigmoid|tanh|swiglu|act_and_mul|bias_?(add|act)|activation|gather|scatter|transpose|permute/i,
    "elementwise",
  ],
  [
    /rotary|\brope|_rope|op_?tensor|scal_kernel|arange|triu|tril|adam|sgd|\bcast|_cast|axpy|kernelPointwiseApply|quantiz/i,
    "elementwise",
  ],
];

/** What a row does. A copy or memset is known by its kind, a kernel by its name. */
export function familyOf(name: string, kind: OperationKind): Family {
  if (kind === "memset") return "memset";
  if (kind === "copy_h2d" || kind === "copy_d2h" || kind === "copy_d2d") return "memcpy";
  if (kind === "sync") return "other";
  const own = qualifiedName(name);
  const subject = WRAPPERS.test(own) ? name : own;
  return RULES.find(([pattern]) => pattern.test(subject))?.[1] ?? "other";
}

/** The arithmetic a kernel's name says it uses; fp32 where it says nothing, which no tensor core runs. */
export function precisionOf(name: string): Precision {
  if (/e4m3|e5m2|fp8|float8|nvjet_q/i.test(name)) return "fp8";
  if (/bf16|bfloat16|fp16|f16|half|hmma|[hs]16816|[hs]884gemm|h1688|hgemm|nvjet_[ht]/i.test(name)) return "fp16";
  if (/tf32|tfloat32|s1688/i.test(name)) return "tf32";
  if (/dgemm|f64|d884|double/i.test(name)) return "fp64";
  if (/imma|i8816|i16832|int8|_s8_/i.test(name)) return "int8";
  return "fp32";
}

/** What is known of a kernel's use of the GPU. 0 or missing: not known. */
export interface Evidence {
  name: string;
  kind: OperationKind;
  /** As CUDA names it; "" if not known. */
  device: string;
  /** Floating-point operations. */
  flops: number;
  /** Bytes to and from device memory. */
  dram_bytes: number;
  /** Measured by Nsight Compute: use of the SMs and of the memory system, percent of their peaks. */
  compute_percent?: number;
  memory_percent?: number;
  /** Said by the file it is from, as Orion's do. */
  stated?: Bound;
}

/** Nsight Compute's own mark: a kernel under it in both is bound by neither, but by latency. */
const BUSY_percent = 60;

/** What limits a kernel, and why that is thought. */
export function boundOf(evidence: Evidence): { bound: Bound; reason: string } {
  const { kind, device, flops, dram_bytes, compute_percent, memory_percent, stated } = evidence;
  if (kind === "sync") return { bound: "unknown", reason: "a wait" };
  if (kind !== "kernel") return { bound: "memory", reason: "moves bytes only" };
  let idle = "";
  if (compute_percent !== undefined && memory_percent !== undefined) {
    const measured = `SMs ${shown(compute_percent)}% and memory ${shown(memory_percent)}% of peak`;
    if (Math.max(compute_percent, memory_percent) >= BUSY_percent)
      return { bound: compute_percent >= memory_percent ? "compute" : "memory", reason: measured };
    idle = `${measured}, both under ${BUSY_percent}%; `;
  }
  if (stated !== undefined && stated !== "unknown") return { bound: stated, reason: "stated by the file" };
  if (flops === 0 || dram_bytes === 0)
    return { bound: "unknown", reason: idle === "" ? missing(evidence) : `${idle}latency` };
  const peaks = peaksOf(device);
  if (!peaks) return { bound: "unknown", reason: `${idle}no peaks known for ${device || "the device"}` };
  const precision = precisionOf(evidence.name);
  const ridge = ridgeOf(peaks, precision);
  if (!ridge) return { bound: "unknown", reason: `${idle}no ${precision} peak known for ${peaks.name}` };
  const intensity = flops / dram_bytes;
  const { flop_per_byte, measured } = ridge;
  return {
    bound: intensity >= flop_per_byte ? "compute" : "memory",
    reason:
      `${idle}${shown(intensity)} FLOP/B, ${peaks.name} ${precision} turns at ${shown(flop_per_byte)} ` +
      (measured ? "(measured)" : "(data sheet)"),
  };
}

function missing({ flops, dram_bytes }: Evidence): string {
  if (flops === 0 && dram_bytes === 0) return "no metrics, FLOPs or bytes";
  return flops === 0 ? "no metrics or FLOPs" : "no metrics or bytes";
}

function shown(value: number): string {
  return value >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(3)));
}
