//! Attention of whole sequences, and the way back through it.

use std::ops::Range;

use fracbit_kernels::vectors::plain::exp;
use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, ArrayView2, s};
use rayon::prelude::*;

use crate::gradient::{Inside, Walk, slope, view};

impl Walk<'_> {
    /// `f(rows, key/value head)` for every sequence and key/value head.
    fn heads<T: Send>(&self, f: impl Fn(Range<usize>, usize) -> T + Sync) -> Vec<(Range<usize>, usize, T)> {
        let heads = self.model.config.num_key_value_heads;
        let tasks: Vec<_> =
            self.spans.iter().flat_map(|span| (0..heads).map(move |head| (span.clone(), head))).collect();
        tasks.into_par_iter().map(|(rows, head)| (rows.clone(), head, f(rows, head))).collect()
    }

    /// Attention of every query over its own sequence, (tokens, query heads · head_dim).
    pub(super) fn attend(&self, layer: usize, q: &[f32], k: &[f32], v: &[f32]) -> Vec<f32> {
        let config = &self.model.config;
        let (d, group) = (config.head_dim, config.num_attention_heads / config.num_key_value_heads);
        let (q, k, v) = (view(q, config.q_dim()), view(k, config.kv_dim()), view(v, config.kv_dim()));
        let done = self.heads(|rows, head| {
            let mine = head * d..(head + 1) * d;
            let (keys, values) = (k.slice(s![rows.clone(), mine.clone()]), v.slice(s![rows.clone(), mine]));
            let mut out = Array2::zeros((rows.len(), group * d));
            for i in 0..group {
                let at = (head * group + i) * d;
                let (p, _) = self.weights(layer, q.slice(s![rows.clone(), at..at + d]), keys);
                general_mat_mul(1.0, &p, &values, 0.0, &mut out.slice_mut(s![.., i * d..(i + 1) * d]));
            }
            out
        });
        let mut out = Array2::zeros(q.dim());
        for (rows, head, part) in done {
            out.slice_mut(s![rows, head * group * d..(head + 1) * group * d]).assign(&part);
        }
        out.into_raw_vec_and_offset().0
    }

    /// Derivatives of queries, keys and values from those of [`Walk::attend`]'s result.
    pub(super) fn attend_back(&self, layer: usize, inside: &Inside, dout: &[f32]) -> [Vec<f32>; 3] {
        let config = &self.model.config;
        let (d, group) = (config.head_dim, config.num_attention_heads / config.num_key_value_heads);
        let (q_dim, kv_dim) = (config.q_dim(), config.kv_dim());
        let (q, dout) = (view(&inside.q, q_dim), view(dout, q_dim));
        let (k, v) = (view(&inside.k, kv_dim), view(&inside.v, kv_dim));
        let scale = self.scale();
        let done = self.heads(|rows, head| {
            let mine = head * d..(head + 1) * d;
            let (keys, values) = (k.slice(s![rows.clone(), mine.clone()]), v.slice(s![rows.clone(), mine]));
            let n = rows.len();
            let mut dq = Array2::zeros((n, group * d));
            let (mut dk, mut dv) = (Array2::zeros((n, d)), Array2::zeros((n, d)));
            let mut ds = Array2::zeros((n, n));
            for i in 0..group {
                let at = (head * group + i) * d;
                let (q, dout) =
                    (q.slice(s![rows.clone(), at..at + d]), dout.slice(s![rows.clone(), at..at + d]));
                let (p, slopes) = self.weights(layer, q, keys);
                general_mat_mul(1.0, &p.t(), &dout, 1.0, &mut dv);
                general_mat_mul(1.0, &dout, &values.t(), 0.0, &mut ds);
                for (mut ds, p) in ds.outer_iter_mut().zip(p.outer_iter()) {
                    let mean: f32 = ds.iter().zip(&p).map(|(s, p)| s * p).sum();
                    ds.iter_mut().zip(&p).for_each(|(s, p)| *s = scale * p * (*s - mean));
                }
                if let Some(slopes) = slopes {
                    ds *= &slopes;
                }
                self.grow(&mut ds);
                general_mat_mul(1.0, &ds, &keys, 0.0, &mut dq.slice_mut(s![.., i * d..(i + 1) * d]));
                general_mat_mul(1.0, &ds.t(), &q, 1.0, &mut dk);
            }
            (dq, dk, dv)
        });
        let tokens = q.nrows();
        let [mut dq, mut dk, mut dv] = [q_dim, kv_dim, kv_dim].map(|width| Array2::zeros((tokens, width)));
        for (rows, head, (q, k, v)) in done {
            let mine = head * d..(head + 1) * d;
            dq.slice_mut(s![rows.clone(), head * group * d..(head + 1) * group * d]).assign(&q);
            dk.slice_mut(s![rows.clone(), mine.clone()]).assign(&k);
            dv.slice_mut(s![rows, mine]).assign(&v);
        }
        [dq, dk, dv].map(|m| m.into_raw_vec_and_offset().0)
    }

    #[expect(clippy::cast_precision_loss, reason = "head widths are small")]
    fn scale(&self) -> f32 {
        1.0 / (self.model.config.head_dim as f32).sqrt()
    }

    /// Multiplies what belongs to each query of a sequence as the query is
    /// ([`fracbit_io::RopeConfig::query_factor`]).
    fn grow(&self, of_queries: &mut Array2<f32>) {
        let rope = &self.model.config.rope;
        if rope.growth.is_some() {
            for (position, mut row) in of_queries.outer_iter_mut().enumerate() {
                #[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is meant")]
                {
                    row *= rope.query_factor(position) as f32;
                }
            }
        }
    }

    /// What each query of a sequence gives to each key: a softmax over the positions that it sees,
    /// 0 elsewhere. And where scores are capped the derivatives of that, by scores as they were.
    fn weights(
        &self,
        layer: usize,
        q: ArrayView2<'_, f32>,
        k: ArrayView2<'_, f32>,
    ) -> (Array2<f32>, Option<Array2<f32>>) {
        let window = self.model.config.layers[layer].sliding_window.unwrap_or(usize::MAX);
        let n = q.nrows();
        let mut p = Array2::zeros((n, n));
        general_mat_mul(self.scale(), &q, &k.t(), 0.0, &mut p);
        self.grow(&mut p);
        let slopes = self.model.score_cap.map(|cap| {
            self.vectors().cap(cap, p.as_slice_mut().expect("a new matrix"));
            p.mapv(|score| slope(cap, score))
        });
        for (i, mut row) in p.outer_iter_mut().enumerate() {
            let row = row.as_slice_mut().expect("rows of a new matrix");
            let (before, seen) = row[..=i].split_at_mut((i + 1).saturating_sub(window));
            let top = seen.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            seen.iter_mut().for_each(|s| *s = exp(*s - top));
            let sum: f32 = seen.iter().sum();
            seen.iter_mut().for_each(|s| *s /= sum);
            before.fill(0.0);
            row[i + 1..].fill(0.0);
        }
        (p, slopes)
    }
}
