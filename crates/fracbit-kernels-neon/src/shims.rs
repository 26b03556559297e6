//! Instructions whose intrinsics are not stable, as assembly: the only file that spells them.
//!
//! `.arch_extension` lets the assembler take them in functions without the target feature; that the processor has them is
//! for the caller to know (a body that uses them is installed only where they were detected).

use std::arch::{aarch64::*, asm};

/// Lane `i` of `sum` plus the four products of bytes `4 i..4 i + 4` of `w` with bytes `4 LANE..4 LANE + 4` of `x`.
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

/// No instruction. What is computed from `later` after this call waits, as far as the compiler knows, for the sums: it keeps
/// the pieces of a tile apart, of which it would otherwise start all at once and run out of registers.
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
