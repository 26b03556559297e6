//! Mixtures of experts: in place of one MLP many, of which a router gives each token some (Shazeer
//! et al. 2017, arXiv 1701.06538).
//!
//! ```text
//! r = softmax(Router n);  x += sum over the k experts e with the largest r of r_e Down_e(f(Gate_e n) ∘ Up_e n)
//! ```
//!
//! where r may be divided by the sum of the chosen ones. The matrices of all experts lie one above
//! the other in one [`Linear`]: they share a scheme, and an expert is a range of rows. Tokens are
//! put in the order of their experts, one copy for each: a *pair*. Experts of few tokens are
//! multiplied in one loop of the team, so that a decode step does not wait for the threads k times.
//!
//! A token's result is the sum over its experts in their order: it does not depend on the other
//! tokens.

use fracbit_base::{Shape, ShapeError};
use fracbit_io::Experts;
use fracbit_kernels::vectors::plain::exp;
use fracbit_kernels::{
    Gate, Group, Numbers, Precision, RowsOf, Team, Vectors, matmul_gated_with, matmul_groups_with,
    matmul_rows_with,
};

use crate::Error;
use crate::block::BlockInput;
use crate::id::LayerLinear;
use crate::linear::{FEW, Linear, LinearScratch, Read, Routed};
use crate::model::{Pass, TASK};
use crate::rotations;
use crate::state::Scratch;

/// An expert of a token.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Choice {
    /// Which.
    pub expert: u32,
    /// What its output is multiplied by.
    pub weight: f32,
    /// Place among the pairs of all tokens.
    pair: u32,
}

/// Buffers of [`Pass::experts`].
#[derive(Debug, Default)]
pub(crate) struct Work {
    logits: Vec<f32>,     // (rows, experts)
    choices: Vec<Choice>, // (rows, active), experts ascending in a row
    places: Vec<u32>,     // (experts): tokens, then where those that are still to come begin
    rows: Vec<u32>,       // (pairs)
    groups: Vec<Group>,
    input: Numbers<f32>,  // (pairs, hidden)
    output: Numbers<f32>, // (pairs, hidden)
    /// Place of the first row in its sequence: observers run one at a time.
    pub(crate) first: usize,
}

impl Work {
    /// Room for `rows` rows of `width`.
    pub(crate) fn ensure(&mut self, experts: Experts, rows: usize, width: usize) {
        let pairs = rows * experts.active;
        self.logits.resize(self.logits.len().max(rows * experts.count), 0.0);
        self.choices.resize(self.choices.len().max(pairs), Choice::default());
        self.rows.resize(self.rows.len().max(pairs), 0);
        self.places.resize(experts.count, 0);
        self.groups.reserve(experts.count.min(pairs));
        for buffer in [&mut self.input, &mut self.output] {
            if buffer.len() < pairs * width {
                buffer.renew(pairs * width);
            }
        }
    }

    /// Puts the pairs of `tokens` tokens in the order of their experts: those of at most `few`
    /// tokens first.
    fn group(&mut self, experts: Experts, tokens: usize, few: usize) {
        let choices = &mut self.choices[..tokens * experts.active];
        self.places.fill(0);
        choices.iter().for_each(|choice| self.places[choice.expert as usize] += 1);
        self.groups.clear();
        let mut end = 0;
        for many in [false, true] {
            for (piece, place) in self.places.iter().enumerate() {
                let count = *place as usize;
                if count > 0 && (count > few) == many {
                    self.groups.push(Group { piece, tokens: end..end + count });
                    end += count;
                }
            }
        }
        #[expect(clippy::cast_possible_truncation, reason = "a pass has fewer pairs")]
        for group in &self.groups {
            self.places[group.piece] = group.tokens.start as u32;
        }
        for (i, choice) in choices.iter_mut().enumerate() {
            let place = &mut self.places[choice.expert as usize];
            choice.pair = *place;
            #[expect(clippy::cast_possible_truncation, reason = "a pass has fewer rows")]
            {
                self.rows[*place as usize] = (i / experts.active) as u32;
            }
            *place += 1;
        }
    }

    /// The tokens of all pairs.
    fn routed(&self, pairs: usize) -> Vec<Routed> {
        let mut routed = vec![Routed::default(); pairs];
        for choice in &self.choices[..pairs] {
            let pair = choice.pair as usize;
            routed[pair] = Routed { place: self.first + self.rows[pair] as usize, share: choice.weight };
        }
        routed
    }
}

/// The experts of a token by the logits of its router: as many of the largest as `choices` has
/// places, of equal ones the first, in ascending order.
pub fn choose(logits: &[f32], renormalized: bool, choices: &mut [Choice]) {
    // NaN is chosen last, and makes all weights NaN.
    let order = |l: f32| if l.is_nan() { f32::NEG_INFINITY } else { l };
    let mut found = 0;
    for (expert, &logit) in (0..).zip(logits) {
        let at = choices[..found].partition_point(|c| order(c.weight) >= order(logit));
        if at == choices.len() {
            continue;
        }
        found = choices.len().min(found + 1);
        choices[at..found].rotate_right(1);
        choices[at] = Choice { expert, weight: logit, pair: 0 };
    }
    let top = choices.first().map_or(0.0, |c| c.weight);
    let mut sum: f32 = logits.iter().map(|l| exp(l - top)).sum();
    choices.sort_unstable_by_key(|c| c.expert);
    choices.iter_mut().for_each(|c| c.weight = exp(c.weight - top));
    if renormalized {
        sum = choices.iter().map(|c| c.weight).sum();
    }
    choices.iter_mut().for_each(|c| c.weight /= sum);
}

/// What a router says of every row of `n`, into `logits`. The bits of a row do not depend on the
/// others.
pub(crate) fn route(
    router: &Linear,
    team: &Team<'_>,
    n: &[f32],
    scratch: &mut LinearScratch,
    logits: &mut [f32],
) -> Result<(), Error> {
    let shape = router.shape();
    let parts = n.chunks(FEW * shape.cols).zip(logits.chunks_mut(FEW * shape.rows));
    for (n, logits) in parts {
        router.apply_with(team, n, scratch, logits)?;
    }
    Ok(())
}

impl Linear {
    /// As [`Linear::apply_with`] for one layer and [`Linear::apply_gated`] for two, of `count`
    /// pieces one above the other, each for its own tokens: `out` is (tokens, rows of a piece).
    /// Layers have no biases. Groups are all tokens in their order; those of at most
    /// [`Linear::group_tokens`] should come first.
    pub(crate) fn apply_groups<const N: usize>(
        team: &Team<'_>,
        (vectors, kind): (&Vectors, Gate),
        (layers, count): ([&Self; N], usize),
        groups: &[Group],
        x: &[f32],
        scratch: &mut LinearScratch,
        [out, other]: [&mut [f32]; 2],
    ) -> Result<(), ShapeError> {
        const OP: &str = "layers of experts";
        let Shape { rows, cols } = layers[0].shape();
        let rows = rows / count;
        let tokens = groups.last().map_or(0, |group| group.tokens.end);
        ShapeError::check_len(OP, "x", tokens * cols, x.len())?;
        ShapeError::check_len(OP, "out", tokens * rows, out.len())?;
        let packed = layers.map(|layer| layer.packed_piece(count, scratch.precision));
        if packed.iter().all(Option::is_some) {
            let first = packed.map(|rows| rows.expect("all are"));
            return Self::packed_groups(team, kind, &first, groups, x, scratch, out);
        }
        // Each by itself: one may be in full precision and the other not.
        for (layer, out) in layers.iter().zip([&mut *out, &mut *other]) {
            match layer.packed_piece(count, scratch.precision) {
                Some(first) => Self::packed_groups(team, kind, &[first], groups, x, scratch, out)?,
                None if layer.is_quantized() => {
                    let want = "of whole strips of 16 rows for each expert";
                    return Err(ShapeError::new(OP, "packed weights", want, layer.shape()));
                }
                None => {
                    for Group { piece, tokens } in groups {
                        let x = &x[tokens.start * cols..tokens.end * cols];
                        let out = &mut out[tokens.start * rows..tokens.end * rows];
                        layer.dense_product(team, scratch, piece * rows..(piece + 1) * rows, x, out);
                    }
                }
            }
        }
        if N > 1 {
            team.chunks(out, TASK, |i, out| vectors.gate_mul(kind, out, &other[i * TASK..][..out.len()]));
        }
        Ok(())
    }

    /// [`Linear::apply_groups`] of packed rows: those of few tokens in one loop of the team.
    fn packed_groups(
        team: &Team<'_>,
        kind: Gate,
        first: &[RowsOf<'_>],
        groups: &[Group],
        x: &[f32],
        scratch: &mut LinearScratch,
        out: &mut [f32],
    ) -> Result<(), ShapeError> {
        let Shape { cols, .. } = first[0].matrix().shape();
        let most = first.iter().map(RowsOf::group_tokens).min().unwrap_or(0);
        let few = groups.iter().take_while(|group| group.tokens.len() <= most).count();
        let (few, many) = groups.split_at(few);
        if let Some(end) = few.last().map(|group| group.tokens.end) {
            let (x, out) = (&x[..end * cols], &mut out[..end * first[0].rows()]);
            scratch.new_input();
            scratch.quantize(x, cols)?;
            matmul_groups_with(team, (first, kind), few, x, &mut scratch.activations, out)?;
        }
        for Group { piece, tokens } in many {
            let x = &x[tokens.start * cols..tokens.end * cols];
            let out = &mut out[tokens.start * first[0].rows()..tokens.end * first[0].rows()];
            scratch.new_input();
            scratch.quantize(x, cols)?;
            let none = || ShapeError::new("layers of experts", "expert", "one of the layer's", piece);
            match first {
                [gate, up] => {
                    let both = [gate.piece(*piece).ok_or_else(none)?, up.piece(*piece).ok_or_else(none)?];
                    matmul_gated_with(team, kind, both, x, &mut scratch.activations, out)?;
                }
                [one, ..] => {
                    let rows = one.piece(*piece).ok_or_else(none)?;
                    matmul_rows_with(team, rows, x, &mut scratch.activations, out)?;
                }
                [] => {}
            }
        }
        Ok(())
    }

    /// Most tokens of a group that is multiplied together with others.
    pub(crate) fn group_tokens(&self, count: usize) -> usize {
        self.packed_piece(count, Precision::FULL).map_or(0, |rows| rows.group_tokens())
    }
}

impl Pass<'_> {
    /// x += the outputs of every token's experts; `s.n` is the normalized residual stream.
    pub(crate) fn experts(
        self,
        experts: Experts,
        index: usize,
        s: &mut Scratch,
        until: Option<BlockInput>,
    ) -> Result<(), Error> {
        let Self { model, team, rows } = self;
        let (layer, down_in) = (&model.layers[index], &model.rotations.layers[index].down_in);
        let (width, inner, active) =
            (model.config.hidden_size, model.config.intermediate_size, experts.active);
        let router = layer.router.as_ref().expect("a layer of experts has a router");
        let [gate, up, down] =
            [LayerLinear::Gate, LayerLinear::Up, LayerLinear::Down].map(|l| layer.linear(l));
        let (work, pairs, n) = (&mut s.experts, rows * active, &mut s.n[..rows * width]);

        let logits = &mut work.logits[..rows * experts.count];
        route(router, team, n, &mut s.linear, logits)?;
        let choices = &mut work.choices[..pairs];
        for (logits, choices) in logits.chunks_exact(experts.count).zip(choices.chunks_exact_mut(active)) {
            choose(logits, experts.renormalized, choices);
        }
        let few = [gate, up, down].map(|l| l.group_tokens(experts.count)).into_iter().min().unwrap_or(0);
        work.group(experts, rows, few);

        let input = &mut work.input[..pairs * width];
        let row_of = &work.rows;
        team.chunks(input, width, |pair, to| {
            to.copy_from_slice(&n[row_of[pair] as usize * width..][..width]);
        });
        let (acts, other) = (&mut s.gate[..pairs * inner], &mut s.up[..pairs * inner]);
        let how = (&model.vectors, model.gate);
        let both = ([gate, up], experts.count);
        Linear::apply_groups(team, how, both, &work.groups, input, &mut s.linear, [&mut *acts, other])?;
        if let Some(rotation) = down_in {
            rotations::apply(rotation, &model.vectors, team, acts, &mut s.rotation);
        }
        if down.is_observed() {
            let routed = work.routed(rows * active);
            for Group { piece, tokens } in &work.groups {
                let x = &acts[tokens.start * inner..tokens.end * inner];
                down.observe_read(team, Read { x, piece: *piece, routed: &routed[tokens.clone()] });
            }
        }
        if until == Some(BlockInput::Down) {
            return Ok(());
        }
        let output = &mut work.output[..pairs * width];
        let down = ([down], experts.count);
        Linear::apply_groups(team, how, down, &work.groups, acts, &mut s.linear, [&mut *output, &mut []])?;
        let choices = &work.choices;
        self.each_row(n, |row, out| {
            out.fill(0.0);
            for choice in &choices[row * active..][..active] {
                let from = &output[choice.pair as usize * width..][..width];
                out.iter_mut().zip(from).for_each(|(out, y)| *out += choice.weight * y);
            }
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(logits: &[f32], active: usize, renormalized: bool) -> Vec<(u32, f32)> {
        let mut choices = vec![Choice::default(); active];
        choose(logits, renormalized, &mut choices);
        choices.iter().map(|c| (c.expert, c.weight)).collect()
    }

    #[test]
    fn the_largest_are_chosen() {
        let logits = [0.5f32, 2.0, -1.0, 2.5, 2.0];
        let e = |i: usize| f64::from(logits[i]).exp();
        let near = |got: f32, want: f64| assert!((f64::from(got) - want).abs() < 1e-6, "{got} {want}");
        let all: f64 = (0..5).map(e).sum();
        // Of equal ones the first; in the order of experts.
        let got = chosen(&logits, 2, false);
        assert_eq!(got.iter().map(|c| c.0).collect::<Vec<_>>(), [1, 3]);
        near(got[0].1, e(1) / all);
        near(got[1].1, e(3) / all);
        let got = chosen(&logits, 2, true);
        near(got[0].1, e(1) / (e(1) + e(3)));
        near(got[0].1 + got[1].1, 1.0);
        for renormalized in [false, true] {
            let got = chosen(&logits, 5, renormalized);
            assert_eq!(got.iter().map(|c| c.0).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
            (0..5).for_each(|i| near(got[i].1, e(i) / all));
        }
    }

    #[test]
    fn absurd_logits_still_choose_different_experts() {
        for logits in [[f32::NAN; 4], [f32::INFINITY; 4], [f32::NEG_INFINITY; 4], [f32::MAX; 4]] {
            let got = chosen(&logits, 3, true);
            assert_eq!(got.iter().map(|c| c.0).collect::<Vec<_>>(), [0, 1, 2], "{logits:?}");
        }
        let got = chosen(&[f32::NAN, 1.0, f32::NAN, 0.0], 3, true);
        assert_eq!(got.iter().map(|c| c.0).collect::<Vec<_>>(), [0, 1, 3]);
        assert!(got.iter().any(|c| c.1.is_nan()));
    }

    #[test]
    fn pairs_lie_expert_by_expert_with_small_groups_first() {
        let experts = Experts { count: 5, active: 2, renormalized: true };
        let mut work = Work::default();
        work.ensure(experts, 4, 8);
        let of = [[0, 3], [0, 4], [0, 3], [0, 1]];
        for (choices, of) in work.choices.chunks_exact_mut(2).zip(of) {
            choices.iter_mut().zip(of).for_each(|(choice, expert)| choice.expert = expert);
        }
        work.group(experts, 4, 2);
        let group = |piece, tokens| Group { piece, tokens };
        assert_eq!(work.groups, [group(1, 0..1), group(3, 1..3), group(4, 3..4), group(0, 4..8)]);
        for (i, choice) in work.choices.iter().enumerate() {
            let group = work.groups.iter().find(|g| g.tokens.contains(&(choice.pair as usize))).unwrap();
            assert_eq!(group.piece, choice.expert as usize);
            assert_eq!(work.rows[choice.pair as usize] as usize, i / 2);
        }
        let mut pairs: Vec<u32> = work.choices.iter().map(|c| c.pair).collect();
        pairs.sort_unstable();
        assert_eq!(pairs, (0..8).collect::<Vec<_>>());
    }
}
