/*
 * spin_ptx.h: the kernel that stands in for every kernel of a profile, as PTX that the driver compiles.
 *
 * rigel_spin(iterations, block_ns): each thread runs a dependent chain of `iterations` times 8 multiply-adds. It is
 * work and not a wait on a clock, so time in which the block is preempted does not count. `block_ns` is for the
 * simulated GPU, which takes it as the block's duration; a real GPU does not read it.
 *
 * The result goes to local memory with a volatile store, so that no compiler may drop the chain. No shared memory is
 * declared: its dynamic size is what limits how many blocks an SM holds (shape.h).
 */
#ifndef RIGEL_SPIN_PTX_H
#define RIGEL_SPIN_PTX_H

#define RG_SPIN_KERNEL "rigel_spin"

/* Target sm_52, PTX 6.0: the driver compiles it for its GPU. Checked with ptxas 13.0 for sm_80, sm_89 and sm_90. */
static const char rg_spin_ptx[] =
    ".version 6.0\n"
    ".target sm_52\n"
    ".address_size 64\n"
    ".visible .entry rigel_spin(.param .u64 iterations, .param .u64 block_ns)\n"
    "{\n"
    "    .local .align 4 .f32 result;\n"
    "    .reg .pred %more;\n"
    "    .reg .u64 %left, %sink;\n"
    "    .reg .u32 %thread;\n"
    "    .reg .f32 %x;\n"
    "    ld.param.u64 %left, [iterations];\n"
    "    mov.u32 %thread, %tid.x;\n"
    "    cvt.rn.f32.u32 %x, %thread;\n"
    "    setp.eq.u64 %more, %left, 0;\n"
    "    @%more bra end;\n"
    "again:\n"
    "    fma.rn.f32 %x, %x, 0f3F7FF972, 0f3A83126F;\n" /* x * 0.9999 + 0.001: tends to 10, never denormal */
    "    fma.rn.f32 %x, %x, 0f3F7FF972, 0f3A83126F;\n"
    "    fma.rn.f32 %x, %x, 0f3F7FF972, 0f3A83126F;\n"
    "    fma.rn.f32 %x, %x, 0f3F7FF972, 0f3A83126F;\n"
    "    fma.rn.f32 %x, %x, 0f3F7FF972, 0f3A83126F;\n"
    "    fma.rn.f32 %x, %x, 0f3F7FF972, 0f3A83126F;\n"
    "    fma.rn.f32 %x, %x, 0f3F7FF972, 0f3A83126F;\n"
    "    fma.rn.f32 %x, %x, 0f3F7FF972, 0f3A83126F;\n"
    "    sub.u64 %left, %left, 1;\n"
    "    setp.ne.u64 %more, %left, 0;\n"
    "    @%more bra again;\n"
    "end:\n"
    "    mov.u64 %sink, result;\n"
    "    cvta.local.u64 %sink, %sink;\n" /* PTX has volatile stores for generic addresses only, not for local ones */
    "    st.volatile.f32 [%sink], %x;\n"
    "    ret;\n"
    "}\n";

#endif
