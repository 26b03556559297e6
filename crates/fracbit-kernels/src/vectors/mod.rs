//! What a decode step does beside its matrices: attention, norms, gates, rotary embedding, rounding
//! of activations.
//!
//! [`Vectors`] is a table of these operations for one instruction set. All microkernels give the
//! bits of the scalar reference: sums have a fixed number of interleaved partial sums, added in a
//! fixed order, or are of integers ([`attend`]), and where a multiplication is fused with an
//! addition (the exponentials of softmax and gates; where attention adds up its blocks, and all of
//! it in single precision) the reference says so. So a model's result does not depend on the
//! machine. What is not fused takes instructions that processors which fuse could save; it is a few
//! percent of a step.
//!
//! Most operations are written once, in [`plain`] and [`attend`], as loops that the compiler makes
//! vectors of; a backend compiles the same source for its instruction set. The integer sums of
//! attention have microkernels of their own.

pub mod attend;
pub mod bf16;
pub mod plain;

use crate::Isa;
pub use attend::{
    Ints, KEY_BLOCK, LEVELS, MOST, Next, Scores, UNIT, Unrounded, VALUE_MOST, WEIGHT_BLOCK, WEIGHT_MOST,
    Weigh, key_most,
};

/// Several queries against blocks of keys in single precision.
#[derive(Clone, Copy, Debug)]
pub struct FloatScores<'a> {
    /// (query, dim)
    pub queries: &'a [f32],
    /// Numbers of a query.
    pub dim: usize,
    /// (block, dim, [`KEY_BLOCK`] positions)
    pub keys: &'a [f32],
    /// Elements from the scores of a query to those of the next.
    pub stride: usize,
}

/// Weighted sums of values in single precision for several queries.
#[derive(Clone, Copy, Debug)]
pub struct FloatWeigh<'a> {
    /// (query, position), `stride` elements from a query to the next.
    pub weights: &'a [f32],
    /// Elements from the weights of a query to those of the next.
    pub stride: usize,
    /// (position, dim)
    pub values: &'a [f32],
    /// Numbers of a value.
    pub dim: usize,
}

/// Rows of dense weights against rows of inputs.
#[derive(Clone, Copy, Debug)]
pub struct Products<'a> {
    /// (rows, width), `weight_stride` elements from a row to the next.
    pub weights: &'a [f32],
    /// Elements from a row of weights to the next.
    pub weight_stride: usize,
    /// (tokens, width), `input_stride` elements from a token to the next.
    pub inputs: &'a [f32],
    /// Elements from the inputs of a token to those of the next.
    pub input_stride: usize,
    /// Rows of weights.
    pub rows: usize,
    /// Rows of inputs.
    pub tokens: usize,
    /// Columns, whole groups of [`plain::LANES`].
    pub width: usize,
}

/// What rounding of activations writes; see [`crate::Activations`].
#[derive(Debug)]
pub struct Rounded<'a, T> {
    /// Integers, as many as values and then zeros.
    pub ints: &'a mut [T],
    /// A scale per group of columns.
    pub scales: &'a mut [f32],
    /// A sum per tile of columns.
    pub sums: &'a mut [i32],
}

/// What a gate goes through before it meets its factor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Gate {
    /// `x sigmoid(x)`.
    #[default]
    Silu,
    /// GELU by a hyperbolic tangent (Hendrycks and Gimpel 2016, arXiv 1606.08415): `x (1 + tanh(z))
    /// / 2 = x sigmoid(2 z)` with `z = sqrt(2 / pi) (x + 0.044715 x^3)`.
    GeluTanh,
}

impl Gate {
    /// `2 z` of [`Gate::GeluTanh`].
    #[inline(always)]
    #[must_use]
    pub fn gelu_argument(x: f32) -> f32 {
        let [linear, cube] = Self::GELU;
        x * (linear + cube * (x * x))
    }

    /// The derivative of [`gelu_argument`](Self::gelu_argument).
    #[inline(always)]
    #[must_use]
    pub fn gelu_slope(x: f32) -> f32 {
        let [linear, cube] = Self::GELU;
        linear + 3.0 * cube * (x * x)
    }

    /// Factors of `x` and `x^3` in `2 z`: `sqrt(8 / pi)`, and 0.044715 of it.
    const GELU: [f32; 2] = [1.595_769_2, 0.071_354_814];
}

/// The operations for one instruction set.
#[derive(Clone, Copy, Debug)]
pub struct Vectors {
    isa: Isa,
    slots: Slots,
}

/// Logits of a block of [`Vectors::exp_sums`].
pub const LOGITS: usize = 64;

/// Input, weight, epsilon, output.
pub type NormFn = unsafe fn(&[f32], Option<&[f32]>, f32, &mut [f32]);

/// Microkernels. Their arguments have been checked by the methods of [`Vectors`] with the same
/// names.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "documented at the methods")]
pub struct Slots {
    pub scores: unsafe fn(&Scores<'_>, &mut [f32]),
    pub weigh: unsafe fn(&Weigh<'_>, &mut [f32]),
    pub float_scores: unsafe fn(&FloatScores<'_>, &mut [f32]),
    pub float_weigh: unsafe fn(&FloatWeigh<'_>, &mut [f32]),
    pub round: unsafe fn(&[f32], i32, &mut [i16]) -> f32,
    pub levels: unsafe fn(&mut [i16]) -> f32,
    pub round_weights: unsafe fn(&Unrounded<'_>, &mut [i16], &mut [f32]),
    pub products: unsafe fn(&Products<'_>, &mut [[f32; plain::LANES]]),
    pub softmax: unsafe fn(&mut [f32]) -> (f32, f32),
    pub rms_norm: NormFn,
    pub gate_mul: unsafe fn(Gate, &mut [f32], &[f32]),
    pub rotate: unsafe fn(&mut [f32], &[f32], &[f32]),
    pub walsh: unsafe fn(usize, &mut [f32], &[f32]),
    pub cap: unsafe fn(f32, &mut [f32]),
    pub exp_sums: unsafe fn(&[f32], f32, f64, &mut [f64]),
    pub add: unsafe fn(&[f32], &mut [f32]),
    pub narrow: unsafe fn(&[f32], Rounded<'_, i8>),
    pub narrow_pair: unsafe fn(&[f32], Rounded<'_, i8>),
    pub wide: unsafe fn(&[f32], Rounded<'_, i16>),
    pub bf16_tile: Option<bf16::TileFn>,
}

impl Default for Vectors {
    fn default() -> Self {
        Self::scalar()
    }
}

/// Whether `len` elements hold `count` rows of `width`, `stride` from a row to the next.
/// Microkernels rely on it: no overflow may hide a lack of room.
fn fits(len: usize, count: usize, stride: usize, width: usize) -> bool {
    let end = |last: usize| last.checked_mul(stride)?.checked_add(width);
    count.checked_sub(1).is_none_or(|last| end(last).is_some_and(|end| len >= end))
}

#[expect(
    unsafe_code,
    reason = "calls of microkernels with target features behind the contract of `Vectors::new`"
)]
impl Vectors {
    /// The reference.
    #[must_use]
    pub fn scalar() -> Self {
        let slots = Slots {
            scores: attend::scores,
            weigh: attend::weigh,
            float_scores: plain::float_scores,
            float_weigh: plain::float_weigh,
            round: attend::round,
            levels: attend::levels,
            round_weights: attend::round_weights,
            products: plain::products,
            softmax: plain::softmax,
            rms_norm: plain::rms_norm,
            gate_mul: plain::gate_mul,
            rotate: plain::rotate,
            walsh: plain::walsh,
            cap: plain::cap,
            exp_sums: plain::exp_sums,
            add: plain::add,
            narrow: plain::narrow,
            narrow_pair: plain::narrow_pair,
            wide: plain::wide,
            bf16_tile: None,
        };
        Self { isa: Isa::Scalar, slots }
    }

    /// The microkernels of `isa`.
    ///
    /// # Safety
    /// The processor has `isa`, and the microkernels are sound for arguments that satisfy the
    /// checks of the methods below.
    #[must_use]
    pub const unsafe fn new(isa: Isa, slots: Slots) -> Self {
        Self { isa, slots }
    }

    /// The instruction set.
    #[must_use]
    pub const fn isa(&self) -> Isa {
        self.isa
    }

    /// `out[q][j] = query_q · key_j` for all positions of the given blocks: the inner product of
    /// the integers, rounded to single precision, times the product of both scales.
    ///
    /// # Panics
    /// When a length does not fit.
    pub fn scores(&self, args: &Scores<'_>, out: &mut [f32]) {
        let Scores { queries, query_scales, dim, keys, key_scales, stride, next: _ } = *args;
        assert!(dim > 0 && dim.is_multiple_of(2), "scores: {dim} dimensions, in pairs");
        assert!(Some(queries.len()) == query_scales.len().checked_mul(dim), "scores: whole queries of {dim}");
        let (count, positions) = (query_scales.len(), key_scales.len());
        assert!(positions.is_multiple_of(KEY_BLOCK), "scores: whole blocks of keys");
        let rows = (positions / KEY_BLOCK).checked_mul(dim / 2);
        assert!(keys.rows(KEY_BLOCK) == rows, "scores: keys of {positions} positions");
        assert!(positions <= stride, "scores: {positions} positions in rows of {stride}");
        assert!(fits(out.len(), count, stride, positions), "scores: room for all");
        // SAFETY: `new` was promised soundness for arguments that passed these checks.
        unsafe { (self.slots.scores)(args, out) }
    }

    /// `out[q] += Σ_j weights[q][j] values[j]`, block by block: the sum of the integers, rounded to
    /// single precision, times the block's scale and added in one rounding; `out` is (query, dim).
    ///
    /// # Panics
    /// When a length does not fit.
    pub fn weigh(&self, args: &Weigh<'_>, out: &mut [f32]) {
        let Weigh { weights, scales, stride, values, dim, next: _ } = *args;
        assert!(dim > 0 && out.len().is_multiple_of(dim), "weigh: whole outputs of {dim}");
        assert!(values.rows(dim).is_some(), "weigh: pairs of values of {dim}");
        let (count, blocks) = (out.len() / dim, args.positions().div_ceil(WEIGHT_BLOCK));
        assert!(stride.is_multiple_of(WEIGHT_BLOCK), "weigh: rows of whole blocks");
        assert!(blocks <= stride / WEIGHT_BLOCK, "weigh: {blocks} blocks in rows of {stride}");
        assert!(fits(weights.len(), count, stride, blocks * WEIGHT_BLOCK), "weigh: weights of all");
        assert!(fits(scales.len(), count, stride / WEIGHT_BLOCK, blocks), "weigh: scales of all");
        // SAFETY: as in `scores`.
        unsafe { (self.slots.weigh)(args, out) }
    }

    /// As [`scores`](Self::scores), in single precision: even and odd dimensions are summed apart,
    /// each in order by fused multiplications and additions, and then added.
    ///
    /// # Panics
    /// When a length does not fit.
    pub fn float_scores(&self, args: &FloatScores<'_>, out: &mut [f32]) {
        let FloatScores { queries, dim, keys, stride } = *args;
        assert!(dim > 0 && queries.len().is_multiple_of(dim), "scores: whole queries of {dim}");
        let block = dim.saturating_mul(KEY_BLOCK);
        assert!(keys.len().is_multiple_of(block), "scores: whole blocks of keys");
        let (count, positions) = (queries.len() / dim, keys.len() / dim);
        assert!(positions <= stride, "scores: {positions} positions in rows of {stride}");
        assert!(fits(out.len(), count, stride, positions), "scores: room for all");
        // SAFETY: as in `scores`.
        unsafe { (self.slots.float_scores)(args, out) }
    }

    /// As [`weigh`](Self::weigh), in single precision, in the order of positions, each fused.
    ///
    /// # Panics
    /// When a length does not fit.
    pub fn float_weigh(&self, args: &FloatWeigh<'_>, out: &mut [f32]) {
        let FloatWeigh { weights, stride, values, dim } = *args;
        assert!(dim > 0 && out.len().is_multiple_of(dim), "weigh: whole outputs of {dim}");
        assert!(values.len().is_multiple_of(dim), "weigh: whole values of {dim}");
        let (count, positions) = (out.len() / dim, values.len() / dim);
        assert!(fits(weights.len(), count, stride, positions), "weigh: weights of all");
        // SAFETY: as in `scores`.
        unsafe { (self.slots.float_weigh)(args, out) }
    }

    /// Rounds a row to the nearest integers, the largest of which is `most` in magnitude; returns
    /// their scale, which is NaN where a number is infinite or NaN. Numbers that are all below
    /// 1e-30 become zero.
    ///
    /// # Panics
    /// When the lengths differ, or `most` is not from 1 to [`MOST`].
    #[must_use]
    pub fn round(&self, values: &[f32], most: i32, ints: &mut [i16]) -> f32 {
        assert_eq!(values.len(), ints.len(), "round: one integer per number");
        assert!((1..=MOST).contains(&most), "round: integers up to {most}");
        // SAFETY: as in `scores`.
        unsafe { (self.slots.round)(values, most, ints) }
    }

    /// Rounds a row to places in [`LEVELS`]; returns the scale of these, which is negative where
    /// the number largest in magnitude is, and otherwise as in [`round`](Self::round).
    ///
    /// # Panics
    /// When the lengths differ.
    #[must_use]
    pub fn round_to_levels(&self, values: &[f32], places: &mut [i16]) -> f32 {
        let scale = self.round(values, attend::FINE, places);
        // SAFETY: as in `scores`.
        scale * unsafe { (self.slots.levels)(places) }
    }

    /// Rounds weights, times the scales of their values, to integers and a scale for every block; 0
    /// in what stands before and behind them. The sum of the integers is that of the weights to
    /// some 10^-4, however small they are beside the largest one. As in [`round`](Self::round) the
    /// scale is NaN where a product is infinite or NaN, and products that are all below 1e-30
    /// become zero.
    ///
    /// # Panics
    /// When a length does not fit.
    pub fn round_weights(&self, args: &Unrounded<'_>, ints: &mut [i16], scales: &mut [f32]) {
        let Unrounded { weights, value_scales, skip } = *args;
        assert_eq!(weights.len(), value_scales.len(), "round_weights: one scale per weight");
        let room = Some(ints.len()) == scales.len().checked_mul(WEIGHT_BLOCK);
        assert!(room && skip.saturating_add(weights.len()) <= ints.len(), "round_weights: room for all");
        // SAFETY: as in `scores`.
        unsafe { (self.slots.round_weights)(args, ints, scales) }
    }

    /// Adds to the partial sums of every row and token, `sums[row · tokens + token]`, their
    /// products as [`plain::accumulate`] does: an inner product may be taken in pieces, and
    /// [`plain::finish`] then gives the bits of [`plain::dot`].
    ///
    /// # Panics
    /// When a length does not fit.
    pub fn products(&self, args: &Products<'_>, sums: &mut [[f32; plain::LANES]]) {
        let Products { weights, weight_stride, inputs, input_stride, rows, tokens, width } = *args;
        assert!(width.is_multiple_of(plain::LANES), "products: whole groups of {}", plain::LANES);
        assert!(width <= weight_stride && width <= input_stride, "products: rows side by side");
        assert!(fits(weights.len(), rows, weight_stride, width), "products: all rows of weights");
        assert!(fits(inputs.len(), tokens, input_stride, width), "products: the inputs of all tokens");
        assert_eq!(Some(sums.len()), rows.checked_mul(tokens), "products: sums of every row and token");
        // SAFETY: as in `scores`.
        unsafe { (self.slots.products)(args, sums) }
    }

    /// Whether this processor multiplies pairs of bf16 faster than numbers of f32.
    #[must_use]
    pub const fn has_bf16(&self) -> bool {
        self.slots.bf16_tile.is_some()
    }

    /// `out = rows · panel`; see [`bf16`].
    ///
    /// # Panics
    /// When a length does not fit.
    pub fn bf16_tile(&self, args: &bf16::Tile<'_>, out: &mut [[f32; bf16::COLS]; bf16::ROWS]) {
        assert!(args.panel.len().is_multiple_of(bf16::COLS), "bf16_tile: whole rows of the panel");
        let pairs = args.panel.len() / bf16::COLS;
        assert!(pairs <= args.stride, "bf16_tile: rows side by side");
        assert!(fits(args.rows.len(), bf16::ROWS, args.stride, pairs), "bf16_tile: all rows");
        match self.slots.bf16_tile {
            // SAFETY: as in `scores`.
            Some(tile) => unsafe { tile(args, out) },
            None => bf16::tile(args, out),
        }
    }

    /// `scores[j] = e^(scores[j] - m)` with m the largest; returns m and the sum. NaN stays NaN.
    #[must_use]
    pub fn softmax(&self, scores: &mut [f32]) -> (f32, f32) {
        // SAFETY: as in `scores`; any slice will do.
        unsafe { (self.slots.softmax)(scores) }
    }

    /// `out = x / sqrt(mean(x²) + eps) ∘ weight`, or without the weight.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn rms_norm(&self, x: &[f32], weight: Option<&[f32]>, eps: f32, out: &mut [f32]) {
        assert_eq!(x.len(), out.len(), "rms_norm: one output per input");
        assert!(weight.is_none_or(|w| w.len() == x.len()), "rms_norm: one weight per input");
        // SAFETY: as in `scores`.
        unsafe { (self.slots.rms_norm)(x, weight, eps, out) }
    }

    /// `gate = f(gate) · up` with the function of `kind`: SwiGLU or GeGLU (Shazeer 2020, arXiv
    /// 2002.05202).
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn gate_mul(&self, kind: Gate, gate: &mut [f32], up: &[f32]) {
        assert_eq!(gate.len(), up.len(), "gate_mul: one gate per input");
        // SAFETY: as in `scores`.
        unsafe { (self.slots.gate_mul)(kind, gate, up) }
    }

    /// Rotary embedding of one row of heads: in each, the pair (k, k + half) turns by the angle
    /// with `cos[k]`, `sin[k]`.
    ///
    /// # Panics
    /// When `cos` and `sin` differ in length or `heads` is not whole heads of twice that.
    pub fn rotate(&self, heads: &mut [f32], cos: &[f32], sin: &[f32]) {
        assert_eq!(cos.len(), sin.len(), "rotate: a sine for every cosine");
        assert!(!cos.is_empty() && heads.len().is_multiple_of(2 * cos.len()), "rotate: whole heads");
        // SAFETY: as in `scores`.
        unsafe { (self.slots.rotate)(heads, cos, sin) }
    }

    /// The Walsh-Hadamard transform of every `order` neighbours of `x`, unnormalised, after a
    /// factor for each entry: what
    /// [`Rotation::apply_rows_by`](fracbit_rotation::Rotation::apply_rows_by) asks for.
    ///
    /// # Panics
    /// When `order` is no power of two or does not divide the length, or when there are fewer
    /// factors than entries.
    pub fn walsh(&self, order: usize, x: &mut [f32], factors: &[f32]) {
        assert!(order.is_power_of_two() && x.len().is_multiple_of(order), "walsh: whole pieces of {order}");
        assert!(x.len() <= factors.len(), "walsh: a factor for each entry");
        // SAFETY: as in `scores`.
        unsafe { (self.slots.walsh)(order, x, factors) }
    }

    /// `x = cap tanh(x / cap)`, off by at most some 10^-7 of `cap`; NaN stays NaN.
    pub fn cap(&self, cap: f32, x: &mut [f32]) {
        // SAFETY: as in `scores`; any slice will do.
        unsafe { (self.slots.cap)(cap, x) }
    }

    /// The sum of `2^((x - top) rate)` over every [`LOGITS`] logits, of the last ones what is left,
    /// for a `top` that none is above. Each term is off by at most 3e-12 of it; those below
    /// 2^-1010, and those of NaN, count as 2^-1010.
    ///
    /// # Panics
    /// When there is not one sum for every block.
    pub fn exp_sums(&self, logits: &[f32], top: f32, rate: f64, sums: &mut [f64]) {
        assert_eq!(sums.len(), logits.len().div_ceil(LOGITS), "exp_sums: one sum per block");
        // SAFETY: as in `scores`.
        unsafe { (self.slots.exp_sums)(logits, top, rate, sums) }
    }

    /// `y += x`.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn add(&self, x: &[f32], y: &mut [f32]) {
        assert_eq!(x.len(), y.len(), "add: one addend each");
        // SAFETY: as in `scores`.
        unsafe { (self.slots.add)(x, y) }
    }

    /// Rounds the activations of a token to int8.
    pub(crate) fn narrow(&self, values: &[f32], to: Rounded<'_, i8>) {
        plain::check_rounded(values, &to, 1);
        // SAFETY: as in `scores`.
        unsafe { (self.slots.narrow)(values, to) }
    }

    /// As [`narrow`](Self::narrow), for a token of a pair: every eight integers are followed by
    /// room for eight of the other token, which stays as it is (and is missing behind the last
    /// eight).
    pub(crate) fn narrow_pair(&self, values: &[f32], to: Rounded<'_, i8>) {
        plain::check_rounded(values, &to, 2);
        // SAFETY: as in `scores`.
        unsafe { (self.slots.narrow_pair)(values, to) }
    }

    /// Rounds the activations of a token to int16.
    pub(crate) fn wide(&self, values: &[f32], to: Rounded<'_, i16>) {
        plain::check_rounded(values, &to, 1);
        // SAFETY: as in `scores`.
        unsafe { (self.slots.wide)(values, to) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "scores: room for all")]
    fn a_stride_that_overflows_is_no_room() {
        // Twice this stride is 0 in 64 bits.
        let args = Scores {
            queries: &[0; 6],
            query_scales: &[0.0; 3],
            dim: 2,
            keys: Ints::I16(&[0; 2 * KEY_BLOCK]),
            key_scales: &[0.0; KEY_BLOCK],
            stride: 1 << (usize::BITS - 1),
            next: None,
        };
        Vectors::scalar().scores(&args, &mut [0.0; KEY_BLOCK]);
    }

    #[test]
    #[should_panic(expected = "weigh: weights of all")]
    fn nor_is_one_of_weights() {
        let args = Weigh {
            weights: &[0; WEIGHT_BLOCK],
            scales: &[0.0; 3],
            stride: 1 << (usize::BITS - 1),
            values: Ints::I16(&[0; 2]),
            dim: 1,
            next: None,
        };
        Vectors::scalar().weigh(&args, &mut [0.0; 3]);
    }
}
