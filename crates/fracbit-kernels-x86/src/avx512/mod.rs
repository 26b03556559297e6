//! AVX-512 microkernels: the codebook lives in registers.
//!
//! # From codes to products
//! 1. [`spread`]: bytes of the tile to lanes, so that each 64-bit lane holds a stretch of one tile
//!    row.
//! 2. `vpmultishiftqb` cuts indices (or 16-bit trellis states, which two or three word operations
//!    hash) out of the lanes.
//! 3. `vpermb` / `vpermi2b` look bytes up in tables of 64 / 128 entries that stay in registers.
//! 4. `vpdpbusd` multiplies by eight broadcast activations: a 64-bit lane is a row, its bytes are
//!    neighbouring columns. The rows 0..8 and 8..16 of a strip are summed side by side, and the two
//!    halves of each lane at the end of a block. So do up to six tokens, most schemes' eight, with
//!    two accumulators each. For more the lanes are first regrouped, 16 rows of four columns to a
//!    vector, so that a token takes one.
//!
//! Many tokens meet a block of expanded tiles: as panels in registers ([`panel`]) or, where there
//! is AMX, in tile registers ([`tiles`], up to eight [`even_odd`]), there with signed weights
//! ([`Expand::signed`](expand::Expand::signed)).
//!
//! `vpdpbusd` wants its first operand unsigned: tables hold `w + 128`, and a block's sums get
//! `-128 Σ x` ([`Args::block_starts`](fracbit_kernels::Args::block_starts)). The negative of an
//! entry `w + 128` is `256 - (w + 128)`: plain negation of the byte. No sum saturates: `vpdpbusd`
//! adds four products of at most 255 x 127 to 32 bits without saturation, and a block's sum stays
//! below 2^31 by the ranges at `BLOCK_TILES`. Codebooks on the int16 grid go the same way with
//! `vpdpwssd` and pairs of columns, with the ranges at `WIDE_BLOCK_TILES`.

use fracbit_base::{Code, Family};
use fracbit_format::{Codebook, Grid, TILE_ROWS, trellis};
use fracbit_kernels::{Interleave, Isa, Line, Microkernel, StripFn};
use std::arch::x86_64::*;

mod attend;
mod bf16;
mod bits;
mod dense;
mod even_odd;
mod expand;
mod groups;
pub(crate) mod halves;
mod nibbles;
mod panel;
pub(crate) mod progressive;
pub(crate) mod progressive_tiles;
pub(crate) mod psumbook;
mod spread;
mod strips;
mod tables;
mod tiles;

/// Proof that the processor has AVX-512 F, BW, VL, VNNI, VBMI and VBMI2.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512(());

impl Avx512 {
    /// The proof, if this processor has them all.
    #[must_use]
    pub(crate) fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni")
            && is_x86_feature_detected!("avx512vbmi")
            && is_x86_feature_detected!("avx512vbmi2"))
        .then_some(Self(()))
    }
}

pub(crate) use {
    attend::vectors,
    tiles::{Amx, peak as tile_peak},
};

/// The order of rows in the 32-bit lanes of a regrouped vector.
const LANES: [u8; TILE_ROWS] = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15];

/// The microkernel of `codebook`, if there is one.
pub(crate) fn microkernel(codebook: &Codebook) -> Option<Microkernel> {
    let proof = Avx512::detect()?;
    let (table, run) = tables::choose(codebook, proof)?;
    // SAFETY: `proof` shows the instruction set; `choose` built `table` for `run` and this
    // codebook, and the microkernels read codes only through `Spread::spread`, inside what `Args`
    // promises; indices are cut to the tables' sizes.
    Some(unsafe { Microkernel::new(Isa::Avx512, table, LANES, run) }.with_panels(&[Interleave::Eights]))
}

/// The microkernel of `codebook` that takes several tokens to AMX, if there is one: for the int8
/// grid where one scale counts for a row.
pub(crate) fn amx_microkernel(codebook: &Codebook) -> Option<Microkernel> {
    Amx::detect()?;
    let group_wise = matches!(codebook.scheme().family(), Family::Gnuq | Family::Int);
    if group_wise || codebook.grid() != Grid::I8 {
        return None;
    }
    let (table, run) = tables::choose(codebook, Avx512::detect()?)?;
    // SAFETY: as in `microkernel`, and `Amx` shows the tile registers.
    Some(
        unsafe { Microkernel::new(Isa::Amx, table, LANES, run) }
            .with_panels(&[Interleave::EvenOdd, Interleave::Rows]),
    )
}

/// The microkernel that reads a nested code of `codebook`'s bits by these.
pub(crate) fn by_bits(codebook: &Codebook) -> Option<Microkernel> {
    by_bits_on(Isa::Avx512, codebook, &[Interleave::Eights])
}

/// As [`by_bits`], with several tokens to AMX.
pub(crate) fn amx_by_bits(codebook: &Codebook) -> Option<Microkernel> {
    Amx::detect()?;
    by_bits_on(Isa::Amx, codebook, &[Interleave::EvenOdd, Interleave::Rows])
}

fn by_bits_on(isa: Isa, codebook: &Codebook, panels: &'static [Interleave]) -> Option<Microkernel> {
    let (table, run) = tables::by_bits(codebook, Avx512::detect()?)?;
    // SAFETY: as in `microkernel` and `amx_microkernel`; pieces are read as `Args` promises them.
    let microkernel = unsafe { Microkernel::new(isa, table, LANES, run) };
    Some(microkernel.with_packing(bits::PACKING).with_panels(panels))
}

/// A line of constants.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
fn line(line: &Line) -> __m512i {
    // SAFETY: a line is 64 bytes.
    unsafe { _mm512_load_si512(line.0.as_ptr().cast()) }
}

/// # Safety
/// 64 bytes are readable at `at`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
unsafe fn load(at: *const u8) -> __m512i {
    // SAFETY: promised by the caller.
    unsafe { _mm512_loadu_si512(at.cast()) }
}
