//! AVX2 bodies.
//!
//! A 256-bit vector holds 8 rows of a strip in its 32-bit lanes, as AVX-512 holds 16, but there is no byte shuffle
//! across lanes and no unaligned cut. So a stretch of each row comes to its lane by a gather of the codes, shifts cut
//! 16-bit windows (two columns or pairs to a lane), and tables of more than 16 entries are a tree of `pshufb` and
//! blends. Tables too large for that are gathered.
//!
//! `vpmaddubsw` saturates at 16 bits and wants one operand unsigned: it gets `|x|` and `w` with the sign of `x`, and
//! `2 * 127 * 127 = 32258` fits.

use fracbit_base::{Code, Family};
use fracbit_format::{Codebook, Grid, TILE_ROWS, trellis};
use fracbit_kernels::{Body, Isa, Line, StripFn};
use std::arch::x86_64::*;

mod expand;
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

/// The body of `codebook`, if there is one.
pub(crate) fn body(codebook: &Codebook) -> Option<Body> {
    let proof = Avx2::detect()?;
    let (table, run) = tables::choose(codebook, proof)?;
    let lanes = std::array::from_fn(|i| u8::try_from(i).expect("16 rows"));
    // SAFETY: `proof` shows the instruction set; `choose` built `table` for `run` and this codebook; gathers of codes
    // stay inside what `Args` promises, and indices are cut to the sizes of the tables.
    Some(unsafe { Body::new(Isa::Avx2, table, lanes, run) })
}
