//! AVX2 bodies.
//!
//! [`narrow`] has the bodies of codebooks on the int8 grid, [`expand`] and [`strips`] those that gather from tables in
//! memory: the int16 grid, the papers' trellis code, vector tables of more than 256 pairs.
//!
//! Processors with AVX-512 but without VBMI, VBMI2 or VNNI (Skylake, Cascade Lake) run these bodies too: their byte shuffles
//! and 8-bit products are no wider than these.

use fracbit_base::{Code, Family};
use fracbit_format::{Codebook, Grid, TILE_ROWS, trellis};
use fracbit_kernels::{Body, Isa, Line, StripFn};
use std::arch::x86_64::*;

mod attend;
mod dense;
mod expand;
mod narrow;
mod products;
mod strips;
mod tables;

/// Proof that the processor has AVX2 and F16C.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// The proof, if this processor has them.
    #[must_use]
    pub(crate) fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c")).then_some(Self(()))
    }
}

pub(crate) use attend::vectors;

/// The body of `codebook`, if there is one.
pub(crate) fn body(codebook: &Codebook) -> Option<Body> {
    let proof = Avx2::detect()?;
    let (table, run) = tables::choose(codebook, proof)?;
    let lanes = std::array::from_fn(|i| u8::try_from(i).expect("16 rows"));
    // SAFETY: `proof` shows the instruction set; `choose` built `table` for `run` and this codebook; gathers of codes
    // stay inside what `Args` promises, and indices are cut to the sizes of the tables.
    Some(unsafe { Body::new(Isa::Avx2, table, lanes, run) })
}
