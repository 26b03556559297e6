//! The contract of a kernel: how one matrix meets activations.

use crate::{Activations, Isa, Team, args::ONE_TOKEN_STRIPS};
use fracbit_base::{Rate, Shape};
use std::{fmt, ops::Range};

/// How much of a nested matrix a product reads; other matrices have one precision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Precision(Option<Rate>);

impl Precision {
    /// All planes.
    pub const FULL: Self = Self(None);

    /// The planes that together have at most `rate` bits, and always the base.
    #[must_use]
    pub const fn at_most(rate: Rate) -> Self {
        Self(Some(rate))
    }

    /// The bound; `None` for all planes.
    #[must_use]
    pub const fn rate(self) -> Option<Rate> {
        self.0
    }
}

/// What a kernel prepares for.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    /// Activations, (batch, cols).
    pub values: &'a [f32],
    /// What will be read of the matrix.
    pub precision: Precision,
    /// Most tokens that will meet the same rows.
    pub together: usize,
    /// Most tokens of a call of [`LinearKernel::rows`].
    pub most: usize,
}

/// Where a kernel puts what it makes of the activations.
#[derive(Debug)]
pub struct Prepared<'a>(pub(crate) &'a mut Activations);

impl Prepared<'_> {
    /// Room for `len` numbers of the kernel's own, zeros, behind those that are there: see
    /// [`Call::prepared`].
    pub fn numbers(&mut self, len: usize) -> &mut [f32] {
        let Activations { block_scales, block_starts, .. } = &mut *self.0;
        let start = block_scales.len();
        block_scales.resize(start + len, 0.0);
        // Kernels of integer forms find scales and starts at the same places.
        block_starts.resize(start + len, 0);
        &mut block_scales[start..]
    }
}

/// Some rows of a matrix and some tokens: what one call of a kernel multiplies. Only the dispatcher
/// makes one, for activations that were prepared.
#[derive(Clone, Debug)]
pub struct Call<'a> {
    /// The activations, as [`LinearKernel::prepare`] left them.
    pub(crate) x: &'a Activations,
    /// Where what this kernel prepared begins.
    pub(crate) factors: usize,
    /// Strips of 16 rows.
    pub strips: Range<usize>,
    /// Tokens of the batch.
    pub tokens: Range<usize>,
    /// Numbers of the result from a token to the next.
    pub stride: usize,
    /// What is read of the matrix.
    pub precision: Precision,
    /// As in [`Input`].
    pub together: usize,
    /// No other token meets these rows.
    pub alone: bool,
}

impl Call<'_> {
    /// What was prepared: first the kernel's own [numbers](Prepared::numbers), then those of
    /// others.
    #[must_use]
    pub fn prepared(&self) -> &[f32] {
        &self.x.block_scales[self.factors..]
    }
}

/// A matrix made ready to be multiplied: its own way from activations to results.
///
/// A product asks one thread for [`prepare`](Self::prepare), then deals rows to threads, which call
/// [`rows`](Self::rows). What a token's result is must depend on that token and the matrix alone:
/// not on its neighbours, on the cut into calls, or on the number of threads.
pub trait LinearKernel: fmt::Debug + Send + Sync {
    /// Outputs by inputs, without padding.
    fn shape(&self) -> Shape;

    /// The least capable instruction set that it uses.
    fn isa(&self) -> Isa;

    /// Whether products of so many tokens read partial sums of a Psumbook in place of weights.
    fn reads_psumbook(&self, tokens: usize) -> bool {
        let _ = tokens;
        false
    }

    /// Bytes of memory that it holds.
    fn bytes(&self) -> usize;

    /// Bytes that a product of this precision reads of the matrix.
    fn bytes_at(&self, precision: Precision) -> usize;

    /// Weights of row `r` at a precision, `out` one row long.
    ///
    /// # Panics
    /// When there is no such row, or `out` has another length.
    fn row(&self, r: usize, precision: Precision, out: &mut [f32]);

    /// Whether activations are rounded to int8, so that what this loses can be multiplied as well.
    fn rounds_to_int8(&self, precision: Precision) -> bool;

    /// Most tokens of a [`Group`](crate::Group).
    fn group_tokens(&self, precision: Precision) -> usize;

    /// Most tokens that a call should have where `together` meet the same rows.
    fn call_tokens(&self, precision: Precision, together: usize) -> usize;

    /// Most strips that a call should have where fewer tokens meet the same rows than come in
    /// panels; threads that would go without get shorter ones.
    fn call_strips(&self, _precision: Precision, _together: usize) -> usize {
        ONE_TOKEN_STRIPS
    }

    /// Makes of the activations what its rows want, once for all of them: integer forms, which
    /// matrices with one input share, and numbers of its own.
    fn prepare(&self, input: &Input<'_>, to: &mut Prepared<'_>, team: &Team<'_>);

    /// Adds products to `out`: that of a token and row `16 s + i` of strip `call.strips.start + s`
    /// at `token * call.stride + 16 s + i`, tokens counted from the first of the call. Padded rows
    /// may get anything.
    fn rows(&self, call: &Call<'_>, out: &mut [f32]);
}
