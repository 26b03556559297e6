//! Bits of nested scalar codes joined to tiles of whole codes, in the *fields* order of [`pack`]:
//! codes of 8 bits are, of each 64 bytes of those of 4 bits, first the low halves, then the high
//! ones.
//!
//! [`pack`]: crate::pack

use fracbit_kernels::{BitPlanes, NestedMicrokernel};
use std::arch::aarch64::*;

/// Bytes of one bit of a tile.
const BIT: usize = 32;
const LANES: usize = 16;

/// What joins bits.
pub(crate) fn microkernel() -> NestedMicrokernel {
    // SAFETY: NEON is part of the architecture; `run` is safe code.
    unsafe { NestedMicrokernel::new(run) }
}

fn run(planes: &BitPlanes<'_>, out: &mut [u8]) {
    let each = if planes.wide() { 8 * BIT } else { 4 * BIT };
    for (tile, out) in planes.tiles().zip(out.chunks_exact_mut(each)) {
        // Every operation is within bytes: halves of vectors are alike.
        for first in [0, LANES] {
            let of = |bit: usize| load(tile.more[bit - 2], first);
            let low = pair_quarters([load(tile.pairs, first), load(tile.pairs, BIT + first)]);
            let low = with_bit::<3>(with_bit::<2>(low, of(2)), of(3));
            if !planes.wide() {
                low.into_iter().zip(0..).for_each(|(low, j): (_, usize)| store(low, out, j * BIT + first));
                continue;
            }
            let high = with_bit::<1>(with_bit::<0>([zero(); 4], of(4)), of(5));
            let high = with_bit::<3>(with_bit::<2>(high, of(6)), of(7));
            for (j, (low, high)) in low.into_iter().zip(high).enumerate() {
                // SAFETY: NEON is part of the architecture.
                let [a, b] = unsafe { [vsliq_n_u8::<4>(low, high), vsriq_n_u8::<4>(high, low)] };
                let at = j / 2 * 4 * BIT + j % 2 * BIT + first;
                store(a, out, at);
                store(b, out, at + 2 * BIT);
            }
        }
    }
}

/// The two lowest bits of the quarters of a tile.
fn pair_quarters([a, b]: [uint8x16_t; 2]) -> [uint8x16_t; 4] {
    // SAFETY: NEON is part of the architecture.
    unsafe {
        let mask = vdupq_n_u8(0x33);
        let upper = |v| vandq_u8(vshrq_n_u8::<2>(v), mask);
        [vandq_u8(a, mask), upper(a), vandq_u8(b, mask), upper(b)]
    }
}

/// The quarters with one more bit at place `TO` of the halves of their bytes.
fn with_bit<const TO: usize>(quarters: [uint8x16_t; 4], bits: uint8x16_t) -> [uint8x16_t; 4] {
    // SAFETY: NEON is part of the architecture.
    unsafe {
        let mask = vdupq_n_u8(0x11 << TO);
        let mut out = quarters;
        for (j, out) in out.iter_mut().enumerate() {
            #[expect(clippy::cast_possible_truncation, reason = "-3 to 3")]
            let moved = vshlq_u8(bits, vdupq_n_s8(TO as i8 - j as i8));
            *out = vorrq_u8(*out, vandq_u8(moved, mask));
        }
        out
    }
}

fn zero() -> uint8x16_t {
    // SAFETY: NEON is part of the architecture.
    unsafe { vdupq_n_u8(0) }
}

fn load(bytes: &[u8], first: usize) -> uint8x16_t {
    let bytes: &[u8; LANES] = bytes[first..].first_chunk().expect("a tile");
    // SAFETY: 16 bytes.
    unsafe { vld1q_u8(bytes.as_ptr()) }
}

fn store(v: uint8x16_t, bytes: &mut [u8], first: usize) {
    let bytes: &mut [u8; LANES] = bytes[first..].first_chunk_mut().expect("a tile");
    // SAFETY: 16 bytes.
    unsafe { vst1q_u8(bytes.as_mut_ptr(), v) }
}
