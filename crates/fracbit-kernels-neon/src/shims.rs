//! Instructions whose intrinsics are not stable, as assembly: the only file that spells them.
//!
//! `.arch_extension` lets the assembler take them in functions without the target feature; that the
//! processor has them is for the caller to know (a microkernel that uses them is installed only
//! where they were detected).

use std::arch::{aarch64::*, asm};

/// Lane `i` of `sum` plus the four products of bytes `4 i..4 i + 4` of `w` with bytes `4 LANE..4
/// LANE + 4` of `x`.
///
/// # Safety
/// The processor has `dotprod`.
#[inline(always)]
pub(crate) unsafe fn sdot<const LANE: i32>(mut sum: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
    // SAFETY: promised by the caller; registers only.
    unsafe {
        asm!(
            ".arch_extension dotprod",
            "sdot {sum:v}.4s, {w:v}.16b, {x:v}.4b[{lane}]",
            sum = inlateout(vreg) sum, w = in(vreg) w, x = in(vreg) x, lane = const LANE,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}

/// `sum` (2 x 2, row-major) plus the product of `w` (2 x 8) with the transpose of `x` (2 x 8).
///
/// # Safety
/// The processor has `i8mm`.
#[inline(always)]
pub(crate) unsafe fn smmla(mut sum: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
    // SAFETY: promised by the caller; registers only.
    unsafe {
        asm!(
            ".arch_extension i8mm",
            "smmla {sum:v}.4s, {w:v}.16b, {x:v}.16b",
            sum = inlateout(vreg) sum, w = in(vreg) w, x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}

/// Eight half-precision numbers (as bits) to single precision; part of every NEON.
#[inline(always)]
pub(crate) fn widen(halves: uint16x8_t) -> [float32x4_t; 2] {
    let (low, high): (float32x4_t, float32x4_t);
    // SAFETY: registers only.
    unsafe {
        asm!(
            "fcvtl {low:v}.4s, {x:v}.4h",
            low = lateout(vreg) low, x = in(vreg) halves,
            options(pure, nomem, nostack, preserves_flags)
        );
        asm!(
            "fcvtl2 {high:v}.4s, {x:v}.8h",
            high = lateout(vreg) high, x = in(vreg) halves,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    [low, high]
}

/// No instruction. What is computed from `later` after this call waits, as far as the compiler
/// knows, for the sums: it keeps the pieces of a tile apart, of which it would otherwise start all
/// at once and run out of registers.
#[inline(always)]
pub(crate) fn order(sums: [&mut int32x4_t; 2], later: &mut uint16x8_t) {
    let [a, b] = sums;
    let (mut first, mut second, mut third) = (*a, *b, *later);
    // SAFETY: no instruction.
    unsafe {
        asm!(
            "/* {first:v} {second:v} {third:v} */",
            first = inlateout(vreg) first, second = inlateout(vreg) second, third = inlateout(vreg) third,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    (*a, *b, *later) = (first, second, third);
}

/// As [`order`], for what is loaded from `later`.
#[inline(always)]
pub(crate) fn order_loads(sum: &mut int32x4_t, later: &mut *const u8) {
    let (mut first, mut second) = (*sum, *later);
    // SAFETY: no instruction.
    unsafe {
        asm!(
            "/* {first:v} {second:x} */",
            first = inlateout(vreg) first, second = inlateout(reg) second,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    (*sum, *later) = (first, second);
}

/// Bytes of an SVE vector.
///
/// # Safety
/// The processor has `sve`.
pub(crate) unsafe fn sve_bytes() -> u64 {
    let bytes: u64;
    // SAFETY: promised by the caller; registers only.
    unsafe {
        asm!(
            ".arch_extension sve", "cntb {bytes:x}",
            bytes = lateout(reg) bytes, options(pure, nomem, nostack, preserves_flags)
        );
    }
    bytes
}

/// Blocks of two tiles with a scale of their own; see [`twos`].
pub(crate) struct Twos {
    /// Weights of eight rows: `(tile, 256 bytes)`, of which the first 128 are `(pair of rows, octet
    /// of columns, 16)`.
    pub(crate) w: *const i8,
    /// Activations of three pairs of tokens, `each` bytes apart: `(octet of columns, 16)`.
    pub(crate) x: *const i8,
    pub(crate) each: usize,
    /// Weight scales, `(block, 8)`, of which the first four belong to the pairs of rows.
    pub(crate) scales: *const float32x4_t,
    /// Activation scales of the six tokens, `step` from a block to the next.
    pub(crate) block_scales: *const f32,
    pub(crate) step: usize,
    /// Blocks, at least one.
    pub(crate) count: usize,
}

/// Adds the blocks' products to `totals`, `(pair of tokens, pair of rows)`.
///
/// The whole loop is assembly because it takes all 32 registers: twelve totals, twelve sums, six
/// vectors of activations and two of weights; compilers spill some. Of its 129 instructions 48 are
/// products, 48 scale them.
///
/// # Safety
/// The processor has `i8mm`; `count` blocks of everything are readable.
pub(crate) unsafe fn twos(totals: &mut [[float32x4_t; 4]; 3], a: Twos) {
    macro_rules! text {
        // One pair of rows: its weights, and six products.
        (row $load:literal $a:literal $b:literal $c:literal) => {
            concat!(
                "ldp q30, q31, ", $load, "\n",
                "smmla v", $a, ".4s, v30.16b, v24.16b\n",
                "smmla v", $b, ".4s, v30.16b, v26.16b\n",
                "smmla v", $c, ".4s, v30.16b, v28.16b\n",
                "smmla v", $a, ".4s, v31.16b, v25.16b\n",
                "smmla v", $b, ".4s, v31.16b, v27.16b\n",
                "smmla v", $c, ".4s, v31.16b, v29.16b"
            )
        };
        // Two octets of columns.
        (tile) => {
            concat!(
                "ldp q24, q25, [{x0}], #32\n",
                "ldp q26, q27, [{x1}], #32\n",
                "ldp q28, q29, [{x2}], #32\n",
                text!(row "[{w}], #256" 12 16 20), "\n",
                text!(row "[{w}, #-224]" 13 17 21), "\n",
                text!(row "[{w}, #-192]" 14 18 22), "\n",
                text!(row "[{w}, #-160]" 15 19 23)
            )
        };
        (clear $($sum:literal)*) => { concat!($("movi v", $sum, ".4s, #0\n"),*) };
        // Sums of a pair of tokens, whose scale is in `$scale`, to totals.
        (fold $scale:literal $($sum:literal $row:literal $total:literal)*) => {
            concat!(
                $("scvtf v", $sum, ".4s, v", $sum, ".4s\n",)*
                $("fmul v", $sum, ".4s, v", $sum, ".4s, v", $scale, ".4s\n",)*
                $("fmul v", $sum, ".4s, v", $sum, ".4s, v", $row, ".4s\n",)*
                $("fadd v", $total, ".4s, v", $total, ".4s, v", $sum, ".4s\n",)*
            )
        };
    }
    let [[a0, a1, a2, a3], [b0, b1, b2, b3], [c0, c1, c2, c3]] = totals;
    let Twos { w, x, each, scales, block_scales, step, count } = a;
    // SAFETY: promised by the caller; every register that changes is named.
    unsafe {
        asm!(
            ".arch_extension i8mm",
            "2:",
            text!(clear 12 13 14 15 16 17 18 19 20 21 22 23),
            text!(tile),
            text!(tile),
            "ldp q24, q25, [{s}], #32",
            "ldp q26, q27, [{s}], #96",
            "ld1r {{v28.2d}}, [{b}], #8",
            "ld1r {{v29.2d}}, [{b}], #8",
            "ld1r {{v30.2d}}, [{b}], {step}",
            text!(fold 28 12 24 0 13 25 1 14 26 2 15 27 3),
            text!(fold 29 16 24 4 17 25 5 18 26 6 19 27 7),
            text!(fold 30 20 24 8 21 25 9 22 26 10 23 27 11),
            "subs {n}, {n}, #1",
            "b.ne 2b",
            w = inout(reg) w => _, s = inout(reg) scales => _, b = inout(reg) block_scales => _,
            x0 = inout(reg) x => _, x1 = inout(reg) x.wrapping_add(each) => _,
            x2 = inout(reg) x.wrapping_add(2 * each) => _,
            step = in(reg) (4 * step).wrapping_sub(16), n = inout(reg) count => _,
            inout("v0") *a0, inout("v1") *a1, inout("v2") *a2, inout("v3") *a3,
            inout("v4") *b0, inout("v5") *b1, inout("v6") *b2, inout("v7") *b3,
            inout("v8") *c0, inout("v9") *c1, inout("v10") *c2, inout("v11") *c3,
            out("v12") _, out("v13") _, out("v14") _, out("v15") _, out("v16") _, out("v17") _,
            out("v18") _, out("v19") _, out("v20") _, out("v21") _, out("v22") _, out("v23") _,
            out("v24") _, out("v25") _, out("v26") _, out("v27") _, out("v28") _, out("v29") _,
            out("v30") _, out("v31") _,
            options(nostack, readonly)
        );
    }
}

/// One token's blocks of two tiles with a scale of their own; see [`books_of_two_bits`].
pub(crate) struct Blocks {
    pub(crate) code: *const u8,
    /// Activations, 32 a block.
    pub(crate) x: *const i8,
    /// Weight scales, sixteen a block.
    pub(crate) scales: *const half::f16,
    /// One a block.
    pub(crate) block_scales: *const f32,
    /// Blocks, at least one.
    pub(crate) count: usize,
}

/// Adds the products of group-wise codebooks of 2 bits (see `groups::Books2`) to `totals`; `mask`
/// cuts the number of a codebook out of a scale.
///
/// Assembly because compilers run out of registers (tables and the order of codebook numbers take
/// twelve) and spill: 128 instructions instead of 144.
///
/// # Safety
/// The processor has `dotprod`; `count` blocks of everything are readable.
pub(crate) unsafe fn books_of_two_bits(
    low: uint8x16x4_t,
    high: uint8x16x4_t,
    mask: u8,
    totals: &mut [float32x4_t; 4],
    a: Blocks,
) {
    macro_rules! tile {
        // Four groups of four rows.
        ($x:literal) => {
            concat!(
                "ldp q27, q28, [{c}], #32\n", tile!($x 27 21 12), tile!($x 28 22 13),
                "ldp q27, q28, [{c}], #32\n", tile!($x 27 23 14), tile!($x 28 24 15),
            )
        };
        // One group: codebook numbers above both nibbles.
        ($x:literal $code:literal $books:literal $sum:literal) => {
            concat!(
                "ushr v29.16b, v", $code, ".16b, #4\n",
                "sli v", $code, ".16b, v", $books, ".16b, #4\n",
                "sli v29.16b, v", $books, ".16b, #4\n",
                tile!($x $code $sum 0 1), tile!($x 29 $sum 2 3),
            )
        };
        // Two quads of columns, from a table each.
        ($x:literal $index:literal $sum:literal $first:literal $second:literal) => {
            concat!(
                "tbl v30.16b, {{v0.16b, v1.16b, v2.16b, v3.16b}}, v", $index, ".16b\n",
                "tbl v31.16b, {{v4.16b, v5.16b, v6.16b, v7.16b}}, v", $index, ".16b\n",
                "sdot v", $sum, ".4s, v30.16b, v", $x, ".4b[", $first, "]\n",
                "sdot v", $sum, ".4s, v31.16b, v", $x, ".4b[", $second, "]\n",
            )
        };
    }
    // Number `4 g + i / 4` to byte `i`.
    let spread = |g: u8| -> uint8x16_t {
        let places: [u8; 16] = std::array::from_fn(|i| 4 * g + (i / 4) as u8);
        // SAFETY: sixteen bytes.
        unsafe { vld1q_u8(places.as_ptr()) }
    };
    let [a0, a1, a2, a3] = totals;
    let Blocks { code, x, scales, block_scales, count } = a;
    // SAFETY: promised by the caller; every register that changes is named.
    unsafe {
        asm!(
            ".arch_extension dotprod",
            "2:",
            "ldp q27, q28, [{s}]",
            "uzp1 v29.16b, v27.16b, v28.16b",
            "and v29.16b, v29.16b, v20.16b",
            "tbl v21.16b, {{v29.16b}}, v16.16b",
            "tbl v22.16b, {{v29.16b}}, v17.16b",
            "tbl v23.16b, {{v29.16b}}, v18.16b",
            "tbl v24.16b, {{v29.16b}}, v19.16b",
            "ldp q25, q26, [{x}], #32",
            "movi v12.4s, #0", "movi v13.4s, #0", "movi v14.4s, #0", "movi v15.4s, #0",
            tile!(25),
            tile!(26),
            "ldp q27, q28, [{s}], #32",
            "ld1r {{v29.4s}}, [{b}], #4",
            "fcvtl v21.4s, v27.4h", "fcvtl2 v22.4s, v27.8h", "fcvtl v23.4s, v28.4h", "fcvtl2 v24.4s, v28.8h",
            "scvtf v12.4s, v12.4s", "scvtf v13.4s, v13.4s", "scvtf v14.4s, v14.4s", "scvtf v15.4s, v15.4s",
            "fmul v12.4s, v12.4s, v29.4s", "fmul v13.4s, v13.4s, v29.4s",
            "fmul v14.4s, v14.4s, v29.4s", "fmul v15.4s, v15.4s, v29.4s",
            "fmul v12.4s, v12.4s, v21.4s", "fmul v13.4s, v13.4s, v22.4s",
            "fmul v14.4s, v14.4s, v23.4s", "fmul v15.4s, v15.4s, v24.4s",
            "fadd v8.4s, v8.4s, v12.4s", "fadd v9.4s, v9.4s, v13.4s",
            "fadd v10.4s, v10.4s, v14.4s", "fadd v11.4s, v11.4s, v15.4s",
            "subs {n}, {n}, #1",
            "b.ne 2b",
            c = inout(reg) code => _, x = inout(reg) x => _, s = inout(reg) scales => _,
            b = inout(reg) block_scales => _, n = inout(reg) count => _,
            in("v0") low.0, in("v1") low.1, in("v2") low.2, in("v3") low.3,
            in("v4") high.0, in("v5") high.1, in("v6") high.2, in("v7") high.3,
            inout("v8") *a0, inout("v9") *a1, inout("v10") *a2, inout("v11") *a3,
            out("v12") _, out("v13") _, out("v14") _, out("v15") _,
            in("v16") spread(0), in("v17") spread(1), in("v18") spread(2), in("v19") spread(3),
            in("v20") vdupq_n_u8(mask),
            out("v21") _, out("v22") _, out("v23") _, out("v24") _, out("v25") _, out("v26") _,
            out("v27") _, out("v28") _, out("v29") _, out("v30") _, out("v31") _,
            options(nostack, readonly)
        );
    }
}
