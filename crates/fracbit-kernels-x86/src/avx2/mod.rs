//! AVX2 microkernels, and the same ones with the dot products of AVX-VNNI.
//!
//! [`narrow`] and [`pairs`] have the microkernels of codebooks on the int8 grid, whose entries come
//! from [`lookup`](mod@lookup) ([`paired`] cuts the windows of most trellises for one token),
//! [`expand`] and [`strips`] the others: the int16 grid, the papers' trellis code, vector tables of
//! more than 256 pairs.
//!
//! Processors with AVX-512 but without VBMI, VBMI2 or VNNI (Skylake, Cascade Lake) run these
//! microkernels too: their byte shuffles and 8-bit products are no wider than these.

use fracbit_base::{Code, Family};
use fracbit_format::{Codebook, Grid, TILE_ROWS, trellis};
use fracbit_kernels::{Isa, Line, Microkernel, StripFn};
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

mod attend;
mod cuts;
mod dense;
mod expand;
pub(crate) mod halves;
mod lookup;
mod many;
mod narrow;
pub(crate) mod nested;
mod orders;
mod paired;
mod pairs;
mod products;
pub(crate) mod progressive;
mod psumbook;
mod scalar;
mod strips;
mod sums;
mod tables;

/// Proof that the processor has AVX2, F16C and FMA.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// The proof, if this processor has them.
    #[must_use]
    pub(crate) fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("f16c")
            && is_x86_feature_detected!("fma"))
        .then_some(Self(()))
    }
}

/// Sums of the tokens that there are, zero: room for the most that there may be would take longer
/// to make zero than a pair of tokens takes.
#[target_feature(enable = "avx2")]
fn zeros(room: &mut [MaybeUninit<[__m256; 2]>]) -> &mut [[__m256; 2]] {
    room.fill(MaybeUninit::new([_mm256_setzero_ps(); 2]));
    // SAFETY: all were written.
    unsafe { room.assume_init_mut() }
}

pub(crate) use attend::vectors;
pub(crate) use products::dot;
pub(crate) use psumbook::linear;

/// Proof that the processor has these and AVX-VNNI.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AvxVnni(());

impl AvxVnni {
    /// The proof, if this processor has them.
    #[must_use]
    pub(crate) fn detect() -> Option<Self> {
        (Avx2::detect().is_some() && is_x86_feature_detected!("avxvnni")).then_some(Self(()))
    }
}

/// The microkernel of `codebook`, if there is one.
pub(crate) fn microkernel(codebook: &Codebook) -> Option<Microkernel> {
    Avx2::detect()?;
    // SAFETY: the line above.
    unsafe { microkernel_of(codebook, Isa::Avx2) }
}

/// The same with AVX-VNNI.
pub(crate) fn vnni_microkernel(codebook: &Codebook) -> Option<Microkernel> {
    AvxVnni::detect()?;
    // SAFETY: the line above.
    unsafe { microkernel_of(codebook, Isa::AvxVnni) }
}

/// # Safety
/// The processor has the features of [`Avx2`], and of [`AvxVnni`] where `isa` says so.
unsafe fn microkernel_of(codebook: &Codebook, isa: Isa) -> Option<Microkernel> {
    let (table, [plain, vnni]) = tables::choose(codebook)?;
    let lanes = std::array::from_fn(|i| u8::try_from(i).expect("16 rows"));
    let run = if isa == Isa::AvxVnni { vnni } else { plain };
    // SAFETY: the instruction set is here by the caller's promise; `choose` built `table` for `run`
    // and this codebook; gathers of codes stay inside what `Args` promises, and indices are cut to
    // the sizes of the tables.
    Some(unsafe { Microkernel::new(isa, table, lanes, run) })
}
