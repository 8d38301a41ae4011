/** classify.test.ts: what kernels do, by their real names, and what they are bound by. */

import { describe, expect, test } from "bun:test";
import { Glob } from "bun";
import { join } from "node:path";
import { type Family, boundOf, familyOf, precisionOf } from "../src/classify.ts";
import { comparableName, qualifiedName, shortName } from "../src/kernel-name.ts";
import { peaksOf, smsUsed } from "../src/peaks.ts";
import { openProfile } from "../src/profile.ts";
import { root } from "./rigel.ts";

/** What the kernels of the shipped profiles do, by the beginning of their short names. */
const RECORDED: Record<string, Family> = {
  sm80_xmma_gemm: "gemm",
  sm90_xmma_gemm: "gemm",
  cutlass_80_simt_sgemm: "gemm",
  cutlass_80_tensorop_s1688gemm: "gemm",
  gemmSN_TN_kernel: "gemm",
  sgemm_largek_lds64: "gemm",
  "cutlass__5x_cudnn::Kernel": "convolution",
  sm80_xmma_fprop: "convolution",
  sm90_xmma_fprop: "convolution",
  sm90_xmma_dgrad: "convolution",
  sm90_xmma_wgrad: "convolution",
  sm80_xmma_wgrad: "convolution",
  conv_depthwise2d: "convolution",
  wgrad_alg0_engine: "convolution",
  init_device_workspace_kernel: "convolution",
  reduce_wgrad_nchw_helper: "convolution",
  fmha_cutlass: "attention",
  elementwise_kernel: "elementwise",
  CatArrayBatchedCopy: "elementwise",
  fused_dropout_kernel_vec: "elementwise",
  _scatter_gather_elementwise_kernel: "elementwise",
  vectorized_elementwise_kernel: "elementwise",
  vectorized_gather_kernel: "elementwise",
  nchwToNhwcKernel: "elementwise",
  nhwcToNchwKernel: "elementwise",
  scal_kernel: "elementwise",
  nll_loss_backward_reduce: "reduction",
  nll_loss_forward_reduce: "reduction",
  splitKreduce_kernel: "reduction",
  "cutlass__5x_cudnn::reduction": "reduction",
  sum_and_scatter: "reduction",
  compute_grad_weight: "reduction",
  GammaBetaBackwardCUDAKernelTemplate: "normalisation",
  layer_norm_grad_input_kernel: "normalisation",
  vectorized_layer_norm_kernel: "normalisation",
  bn_bw_1C11: "normalisation",
  bn_fw_inf_1C11: "normalisation",
  bn_fw_tr_1C11: "normalisation",
  softmax_warp: "softmax",
  cunn_SoftMax: "softmax",
  "Memcpy ": "memcpy",
  "memcpy ": "memcpy",
  Memset: "memset",
  memset: "memset",
  wait: "other",
  sync: "other",
  compute_num_of_partial_segments: "other",
  embedding_backward_feature_kernel: "other",
  krn_partial: "other",
  max_pool: "other",
  tensor_kernel_scan_innermost_dim: "other",
  DeviceRadixSort: "other",
  DeviceCompactInitKernel: "other",
  DeviceScan: "other",
  DeviceUniqueByKeySweepKernel: "other",
  globalKernel: "other",
};

/** PyTorch's generic kernels are shown with what they run: the words after it say which of them it is. */
const GENERIC: [RegExp, Family][] = [
  [/ in (\w+_)?elementwise_kernel$/, "elementwise"],
  [/ in multi_tensor_apply_kernel$/, "elementwise"],
  [/ in reduce_kernel$/, "reduction"],
];

test("every kernel of the shipped profiles is of the kind that a person would say", async () => {
  const wrong: string[] = [];
  const used = new Set<string>();
  let names = 0;
  for (const file of new Glob("*.csv").scanSync(join(root, "profiles"))) {
    for await (const { name, kind } of (await openProfile(join(root, "profiles", file))).operations) {
      const short = shortName(name);
      const begin = Object.keys(RECORDED).find((start) => short.startsWith(start));
      const generic = GENERIC.find(([pattern]) => pattern.test(short));
      const expected = begin === undefined ? generic?.[1] : RECORDED[begin];
      if (begin !== undefined) used.add(begin);
      const family = familyOf(name, kind);
      if (expected !== family) wrong.push(`${short}: expected ${expected}, got ${family}`);
      names++;
    }
  }
  expect({ wrong: [...new Set(wrong)], unused: Object.keys(RECORDED).filter((name) => !used.has(name)) }).toEqual({
    wrong: [],
    unused: [],
  });
  expect(names).toBe(3904);
});

test.each<[Family, string]>([
  ["gemm", "ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_64x3_tn"],
  ["gemm", "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_nn"],
  ["gemm", "volta_sgemm_128x64_tn"],
  ["gemm", "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNN"],
  ["gemm", "void gemv2T_kernel_val<int, int, __half, __half, __half, float, 128, 16, 4, 4, false, false>(int)"],
  ["gemm", "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, __nv_bfloat16, __nv_bfloat16>(int)"],
  ["gemm", "void cutlass::Kernel<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(T1::Params)"],
  [
    "gemm",
    "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>>>(T1::Params)",
  ],
  ["gemm", "triton_tem_fused_addmm_relu_1"],
  ["gemm", "triton_mm_0"],
  ["gemm", "void marlin::Marlin<__half, 256, 1, 8, 8>(int4 const*)"],
  ["convolution", "void implicit_convolve_sgemm<float, float, 1024, 5, 5, 3, 3, 3, 1, false, false, true>(int, int)"],
  [
    "convolution",
    "void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>(cudnn::winograd_nonfused::Params)",
  ],
  ["convolution", "ampere_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1"],
  ["convolution", "void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<3, float, int>(int)"],
  ["convolution", "cutlass__5x_cudnn::Kernel<cutlass_tensorop_s1688fprop_optimized_tf32_128x128_16x4>(Params)"],
  ["convolution", "void at::native::im2col_kernel<float>(long, float const*)"],
  ["attention", "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>(Flash_fwd_params)"],
  [
    "attention",
    "void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<(int)64>>(Flash_bwd_params)",
  ],
  ["attention", "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<int>>>(T1::Params)"],
  ["attention", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x64x128_4x1x1"],
  ["attention", "void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits<int>>(int)"],
  ["attention", "void vllm::paged_attention_v1_kernel<__half, __half, 128, 16, 128>(int)"],
  ["attention", "triton_tem_fused_flex_attention_0"],
  ["elementwise", "triton_poi_fused_add_native_batch_norm_relu_3"],
  ["elementwise", "triton_for_fused_0"],
  ["elementwise", "void vllm::act_and_mul_kernel<c10::BFloat16>(c10::BFloat16*)"],
  ["elementwise", "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel>(long)"],
  ["elementwise", "void vllm::reshape_and_cache_flash_kernel<__half, __half>(int)"],
  ["elementwise", "void at::native::distribution_elementwise_grid_stride_kernel<float, 4>(long)"],
  ["reduction", "triton_red_fused_mean_2"],
  ["reduction", "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>(int)"],
  ["reduction", "void dot_kernel<float, 128, 0, cublasDotParams<cublasGemvTensor<float const>>>(int)"],
  ["reduction", "void cub::DeviceReduceKernel<cub::DeviceReducePolicy<float>>(float*)"],
  ["normalisation", "triton_per_fused_native_layer_norm_0"],
  ["normalisation", "void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<float>(long, float)"],
  ["normalisation", "void at::native::batch_norm_transform_input_kernel<float, float, float, true, int>(int)"],
  ["normalisation", "void flashinfer::norm::FusedAddRMSNormKernel<8u, __half>(__half*)"],
  ["softmax", "triton_red_fused__softmax_1"],
  ["softmax", "void <unnamed>::softmax_warp_forward<c10::Half, c10::Half, float, (int)9, (bool)0>(T2 *)"],
  ["communication", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"],
  ["communication", "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)"],
  ["communication", "void vllm::cross_device_reduce_1stage<__half, 8>(vllm::RankData*)"],
  ["other", "void at::native::(anonymous namespace)::max_pool_backward_nchw<float, float>(int)"],
  ["other", "spin(int)"],
])("%s: %s", (family, name) => {
  expect(familyOf(name, "kernel")).toBe(family);
});

test("a copy or memset is known by its kind, whatever it is called", () => {
  expect([familyOf("gemm", "copy_d2h"), familyOf("[CUDA memset]", "memset"), familyOf("gemm", "sync")]).toEqual([
    "memcpy",
    "memset",
    "other",
  ]);
});

describe("what a kernel is bound by", () => {
  const kernel = { name: "sgemm", kind: "kernel", device: "NVIDIA H200", flops: 0, dram_bytes: 0 } as const;

  test("comes from measured metrics where one is at its peak", () => {
    expect(boundOf({ ...kernel, compute_percent: 88.42, memory_percent: 31.1 })).toEqual({
      bound: "compute",
      reason: "SMs 88.4% and memory 31.1% of peak",
    });
    expect(boundOf({ ...kernel, compute_percent: 99.97, memory_percent: 20 }).reason).toBe(
      "SMs 100% and memory 20% of peak",
    );
    expect(boundOf({ ...kernel, compute_percent: 14, memory_percent: 60 }).bound).toBe("memory");
    expect(boundOf({ ...kernel, compute_percent: 59.9, memory_percent: 59.9 }).bound).toBe("unknown");
  });

  test("comes from the roofline of the arithmetic that its name says it uses", () => {
    // 53.3 and 720.7 TFLOP/s and 4.363 TB/s were measured and meet at 12.2 and 165 FLOP/B; 1979 TOP/s
    // in int8 and 4.8 TB/s are the data sheet's and meet at 412.
    const work = { flops: 100e9, dram_bytes: 1e9 };
    expect(boundOf({ ...kernel, ...work })).toEqual({
      bound: "compute",
      reason: "100 FLOP/B, H200 SXM fp32 turns at 12.2 (measured)",
    });
    expect(boundOf({ ...kernel, ...work, name: "ampere_fp16_s16816gemm_fp16_128x128" })).toEqual({
      bound: "memory",
      reason: "100 FLOP/B, H200 SXM fp16 turns at 165 (measured)",
    });
    expect(boundOf({ ...kernel, ...work, name: "sm80_xmma_gemm_i8816_int8" })).toEqual({
      bound: "memory",
      reason: "100 FLOP/B, H200 SXM int8 turns at 412 (data sheet)",
    });
  });

  test("is unknown, with the reason, where nothing is known", () => {
    expect([
      boundOf(kernel),
      boundOf({ ...kernel, flops: 1 }),
      boundOf({ ...kernel, flops: 1, dram_bytes: 1, device: "Tesla V100-SXM2-16GB" }),
      boundOf({ ...kernel, flops: 1, dram_bytes: 1, device: "NVIDIA L4", name: "dgemm" }),
      boundOf({ ...kernel, kind: "sync" }),
    ]).toEqual([
      { bound: "unknown", reason: "no metrics, FLOPs or bytes" },
      { bound: "unknown", reason: "no metrics or bytes" },
      { bound: "unknown", reason: "no peaks known for Tesla V100-SXM2-16GB" },
      { bound: "unknown", reason: "no fp64 peak known for L4" },
      { bound: "unknown", reason: "a wait" },
    ]);
  });

  test("is the memory for copies, and what a file states for its kernels", () => {
    expect(boundOf({ ...kernel, kind: "copy_h2d" }).bound).toBe("memory");
    expect(boundOf({ ...kernel, stated: "compute" })).toEqual({ bound: "compute", reason: "stated by the file" });
  });
});

test.each([
  ["NVIDIA H200", "H200 SXM"],
  ["NVIDIA H200 NVL", undefined],
  ["NVIDIA H200 MIG 1g.18gb", undefined],
  ["NVIDIA A100-SXM4-80GB", "A100 SXM 80 GB"],
  ["NVIDIA A100 80GB PCIe", "A100 PCIe 80 GB"],
  ["NVIDIA A100-SXM4-40GB", "A100 40 GB"],
  ["NVIDIA L4", "L4"],
  ["NVIDIA L40S", undefined],
])("the peaks of %s", (device, name) => {
  expect(peaksOf(device)?.name).toBe(name);
});

test("SMs in use are the blocks over those that an SM holds, at most all", () => {
  const shape = { grid: [264, 1, 1], block: [256, 1, 1], registers: 32, shared_bytes: 0 };
  expect([
    smsUsed("NVIDIA H200", shape),
    smsUsed("NVIDIA H200", { ...shape, registers: 255 }),
    smsUsed("NVIDIA H200", { ...shape, shared_bytes: 200 * 1024 }),
    smsUsed("NVIDIA H200", { ...shape, grid: [4, 1, 1] }),
    smsUsed("some other GPU", shape),
  ]).toEqual([33, 132, 132, 1, 0]);
});

test("names by which tools print the same kernel compare as the same", () => {
  const kineto =
    "void at::native::(anonymous namespace)::softmax_warp_forward<c10::Half, c10::Half, float, 9, false, true>(c10::Half*, c10::Half const*, int)";
  const nsys =
    "void at::native::<unnamed>::softmax_warp_forward<c10::Half, c10::Half, float, (int)9, (bool)0, (bool)1>(T2 *, const T1 *, int)";
  expect(comparableName(nsys)).toBe(comparableName(kineto));
  expect(comparableName(nsys)).not.toBe(comparableName(nsys.replace("(int)9", "(int)10")));
  expect(qualifiedName(nsys)).toBe("at::native::softmax_warp_forward");
  expect(shortName("_ZN17cutlass__5x_cudnn6KernelINS_4conv6kernel23ImplicitGemm")).toBe("cutlass__5x_cudnn::Kernel");
});

test("the arithmetic is read from the name", () => {
  expect(
    [
      "sm90_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x128x32",
      "sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x32",
      "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize128x128x8_ffma",
      "cutlass_80_tensorop_s1688gemm_128x128_16x4_nt_align4",
      "turing_h1688gemm_128x128_ldg8_tn",
      "sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize64x128x128",
      "cutlass_80_tensorop_d884gemm_64x64_16x3_nn_align1",
      "cutlass_80_simt_sgemm_128x256_8x4_nt_align1",
    ].map(precisionOf),
  ).toEqual(["tf32", "fp16", "fp32", "tf32", "fp16", "fp8", "fp64", "fp32"]);
});
