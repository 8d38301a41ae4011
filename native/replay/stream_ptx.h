/*
 * stream_ptx.h: a kernel that is bound by memory, as PTX that the driver compiles.
 *
 * rigel_stream(passes, block_ns, permille, from, mask): all threads together read memory from `from` on, in order, RG_STREAM_LOADS times 16
 * bytes each in every pass, and begin again after `mask` + 1 bytes, a power of two. `block_ns` and `permille` (of the memory's
 * bandwidth, with the GPU to itself) are for the simulated GPU, where nothing is read; a real GPU does not look at them.
 */
#ifndef RIGEL_STREAM_PTX_H
#define RIGEL_STREAM_PTX_H

#define RG_STREAM_KERNEL "rigel_stream"
#define RG_STREAM_LOADS 4

/* Target sm_52, PTX 6.0. Checked with ptxas 13.0 for sm_80, sm_89 and sm_90. */
#define RG_STREAM_LOAD(a, b, c, d)                                                                                     \
    "    and.b64 %at, %offset, %mask;\n"                                                                               \
    "    add.u64 %at, %at, %from;\n"                                                                                   \
    "    add.u64 %offset, %offset, %step;\n"                                                                           \
    "    ld.global.cs.v4.f32 {" a ", " b ", " c ", " d "}, [%at];\n"
static const char rg_stream_ptx[] =
    ".version 6.0\n"
    ".target sm_52\n"
    ".address_size 64\n"
    ".visible .entry rigel_stream(.param .u64 passes, .param .u64 block_ns, .param .u64 permille, .param .u64 from,\n"
    "    .param .u64 mask)\n"
    "{\n"
    "    .reg .pred %is;\n"
    "    .reg .u64 %left, %offset, %step, %mask, %from, %at;\n"
    "    .reg .u32 %block, %threads, %thread, %blocks, %all;\n"
    "    .reg .f32 %sum, %v<16>;\n"
    "    ld.param.u64 %left, [passes];\n"
    "    ld.param.u64 %from, [from];\n"
    "    ld.param.u64 %mask, [mask];\n"
    "    cvta.to.global.u64 %from, %from;\n"
    "    mov.u32 %block, %ctaid.x;\n"
    "    mov.u32 %threads, %ntid.x;\n"
    "    mov.u32 %thread, %tid.x;\n"
    "    mov.u32 %blocks, %nctaid.x;\n"
    "    mad.lo.u32 %thread, %block, %threads, %thread;\n"
    "    mul.lo.u32 %all, %blocks, %threads;\n"
    "    mul.wide.u32 %offset, %thread, 16;\n"
    "    mul.wide.u32 %step, %all, 16;\n"
    "    mov.f32 %sum, 0f00000000;\n"
    "    setp.eq.u64 %is, %left, 0;\n"
    "    @%is bra end;\n"
    "again:\n"
    RG_STREAM_LOAD("%v0", "%v1", "%v2", "%v3")
    RG_STREAM_LOAD("%v4", "%v5", "%v6", "%v7")
    RG_STREAM_LOAD("%v8", "%v9", "%v10", "%v11")
    RG_STREAM_LOAD("%v12", "%v13", "%v14", "%v15")
    "    add.f32 %v0, %v0, %v4;\n"
    "    add.f32 %v8, %v8, %v12;\n"
    "    add.f32 %v1, %v1, %v5;\n"
    "    add.f32 %v9, %v9, %v13;\n"
    "    add.f32 %v0, %v0, %v8;\n"
    "    add.f32 %v1, %v1, %v9;\n"
    "    add.f32 %v0, %v0, %v1;\n"
    "    add.f32 %sum, %sum, %v0;\n"
    "    sub.u64 %left, %left, 1;\n"
    "    setp.ne.u64 %is, %left, 0;\n"
    "    @%is bra again;\n"
    "    setp.neu.f32 %is, %sum, 0f3F800000;\n" /* never: what is read is zero. The compiler does not know. */
    "    @%is bra end;\n"
    "    st.global.f32 [%from], %sum;\n"
    "end:\n"
    "    ret;\n"
    "}\n";
#undef RG_STREAM_LOAD

#endif
