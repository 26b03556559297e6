//! How much the divergence from a model rises when one of its matrices gets noise, from one
//! backward pass.
//!
//! For small changes d of the weights, KL(p‖q) is `d^T F d / 2` with the Fisher information F, the
//! mean of `g g^T` for gradients g of log p of tokens that the model itself draws (Martens 2020,
//! arXiv 1412.1193, section 9). White noise with standard deviation s_r c_j in row r and column j
//! meets its diagonal:
//!
//! ```text
//! E KL = sum over r, j of s_r^2 c_j^2 E[g_rj^2] / 2,      g = sum over tokens of dy x^T
//! ```
//!
//! Positions draw independently, so one draw for each gives g for all of them at once. The square
//! of a row of g is `sum over t, u of dy_tr dy_ur (x_t . x_u)`: no gradient of a matrix is formed,
//! and all matrices together cost about three runs of the text. A tied matrix is head and embedding
//! at once; its g is the sum of both.

use std::collections::BTreeMap;
use std::ops::Range;

use fracbit_base::Shape;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use rayon::prelude::*;

use crate::gradient::{RowLogs, Seen, Walk, product, rotate};
use crate::id::LinearId;
use crate::{Error, Model};

/// Factors of the columns of some matrices; the others have ones.
pub type Columns = BTreeMap<LinearId, Vec<f32>>;

/// The mean over what the model draws of `sum over j of c_j^2 g_rj^2` for every row r of every
/// matrix, summed over all tokens of `sequences`, each run from an empty state; estimated from one
/// draw of each token, with `seed`. Half of it, times the square of a row's deviation, is the rise
/// of the divergence in nats.
///
/// # Errors
/// [`Error::Token`] for numbers that fit no embedding.
///
/// # Panics
/// When there is not one factor for each column.
pub fn squares(
    model: &Model,
    sequences: &[&[u32]],
    seed: u64,
    columns: &Columns,
) -> Result<BTreeMap<LinearId, Vec<f64>>, Error> {
    let nothing = RowLogs::new();
    let walk = Walk::new(model, &nothing, sequences)?;
    let tokens = sequences.concat();
    let layers = model.config.num_hidden_layers();
    let mut inputs = vec![walk.embed(&tokens)?];
    for layer in 0..layers {
        let matrices = walk.matrices(layer)?;
        inputs.push(walk.block(layer, &matrices, &inputs[layer])?.out());
    }
    let mut squares = Squares { walk: &walk, tokens: &tokens, columns, sums: BTreeMap::new(), tied: None };
    let vocab = model.config.vocab_size;
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut draw = |_: Range<usize>, logits: &[f32], d: &mut Vec<f32>| {
        d.clear();
        d.extend_from_slice(logits);
        let draws: Vec<u64> = (0..d.len() / vocab).map(|_| rng.next_u64()).collect();
        d.par_chunks_exact_mut(vocab).zip(draws).for_each(|(row, draw)| score(row, draw));
        Ok(0.0)
    };
    let last = inputs.pop().expect("the embedding at least");
    let (_, mut dx) =
        walk.head(&last, walk.spans.iter().cloned(), &mut draw, &mut |seen| squares.see(seen))?;
    for layer in (0..layers).rev() {
        let x = inputs.pop().expect("one for each block");
        let matrices = walk.matrices(layer)?;
        let inside = walk.block(layer, &matrices, &x)?;
        dx = walk.block_back(layer, &matrices, &x, &inside, &dx, &mut |seen| squares.see(seen));
    }
    rotate(model.rotations.embed_out.as_ref(), &mut dx, false);
    squares.embedding(&dx);
    Ok(squares.sums)
}

/// Logits become the probabilities less the one of a drawn token: derivatives of -log p of that
/// token.
fn score(row: &mut [f32], draw: u64) {
    let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0f64;
    for v in &mut *row {
        *v = (*v - top).exp();
        sum += f64::from(*v);
    }
    #[expect(clippy::cast_precision_loss, reason = "53 random bits are exact")]
    let mut left = (draw >> 11) as f64 * 2f64.powi(-53) * sum;
    let mut drawn = None;
    #[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is meant")]
    for (i, v) in row.iter_mut().enumerate() {
        left -= f64::from(*v);
        if left < 0.0 && drawn.is_none() {
            drawn = Some(i);
        }
        *v = (f64::from(*v) / sum) as f32;
    }
    // Rounding may leave a rest at the end; NaN has no token, and stays.
    if let Some(v) = drawn.or(row.len().checked_sub(1)).and_then(|i| row.get_mut(i)) {
        *v -= 1.0;
    }
}

/// Weighted squares of gradients, as they come.
struct Squares<'a> {
    walk: &'a Walk<'a>,
    tokens: &'a [u32],
    columns: &'a Columns,
    sums: BTreeMap<LinearId, Vec<f64>>, // (rows)
    /// What the embedding of a tied model needs of the head.
    tied: Option<Tied>,
}

/// The head's part of a tied matrix.
#[derive(Default)]
struct Tied {
    /// Inputs of the head, (tokens, width).
    x: Vec<f32>,
    /// For each sequence the derivatives of its rows with respect to the logits of its own tokens,
    /// (tokens, tokens).
    own: Vec<f32>,
}

/// `x` with every row multiplied element by element.
fn scaled(x: &[f32], by: Option<&Vec<f32>>) -> Vec<f32> {
    let mut x = x.to_vec();
    if let Some(by) = by {
        x.par_chunks_exact_mut(by.len()).for_each(|row| row.iter_mut().zip(by).for_each(|(x, by)| *x *= by));
    }
    x
}

impl Squares<'_> {
    /// Inner products of the rows of `a` with those of `b`.
    fn gram(&self, a: &[f32], b: &[f32], width: usize) -> Vec<f32> {
        product(&self.walk.vectors(), a, b, width, true)
    }

    fn see(&mut self, seen: &Seen<'_, '_>) {
        let (id, d) = (seen.matrix.id(), seen.dy);
        let (Shape { rows: all, cols }, rows) = (id.shape(self.walk.config()), seen.matrix.rows.len());
        let x = scaled(seen.x, self.columns.get(&id));
        let mut whole = self.sums.remove(&id).unwrap_or_else(|| vec![0.0; all]);
        let sums = &mut whole[seen.matrix.rows.clone()];
        for span in &self.walk.spans {
            let [start, end] = [span.start, span.end].map(|at| seen.tokens.partition_point(|&t| t < at));
            if start == end {
                continue;
            }
            let of = |width| start * width..end * width;
            let (d, x) = (&d[of(rows)], &x[of(cols)]);
            let met = product(&self.walk.vectors(), &self.gram(x, x, cols), d, rows, false);
            for (d, met) in d.chunks_exact(rows).zip(met.chunks_exact(rows)) {
                sums.iter_mut().zip(d.iter().zip(met)).for_each(|(sum, (d, met))| *sum += f64::from(d * met));
            }
            if id == LinearId::Embed {
                let tied = self.tied.get_or_insert_default();
                let own = d.chunks_exact(rows);
                tied.own.extend(own.flat_map(|d| self.tokens[span.clone()].iter().map(|&t| d[t as usize])));
            }
        }
        if let (LinearId::Embed, Some(tied)) = (id, &mut self.tied) {
            tied.x.extend_from_slice(&x);
        }
        self.sums.insert(id, whole);
    }

    /// The embedding, from the derivatives with respect to what it gives: its rows are those of the
    /// tokens.
    fn embedding(&mut self, dx: &[f32]) {
        let (id, width) = (LinearId::Embed, self.walk.width());
        let dx = scaled(dx, self.columns.get(&id));
        let mut sums = self.sums.remove(&id).unwrap_or_else(|| vec![0.0; id.shape(self.walk.config()).rows]);
        let mut at = 0;
        for span in &self.walk.spans {
            let (tokens, dx) = (&self.tokens[span.clone()], &dx[span.start * width..span.end * width]);
            let own = self.gram(dx, dx, width);
            for (&t, own) in tokens.iter().zip(own.chunks_exact(tokens.len())) {
                let same = tokens.iter().zip(own).filter(|(u, _)| **u == t);
                sums[t as usize] += same.map(|(_, &v)| f64::from(v)).sum::<f64>();
            }
            if let Some(tied) = &self.tied {
                let met = self.gram(&tied.x[span.start * width..span.end * width], dx, width);
                let d = &tied.own[at..at + met.len()];
                at += met.len();
                for (d, met) in d.chunks_exact(tokens.len()).zip(met.chunks_exact(tokens.len())) {
                    let each = tokens.iter().zip(d.iter().zip(met));
                    each.for_each(|(&t, (d, met))| sums[t as usize] += 2.0 * f64::from(d * met));
                }
            }
        }
        self.sums.insert(id, sums);
    }
}
