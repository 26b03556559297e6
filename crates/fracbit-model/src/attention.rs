//! Causal grouped-query attention over the cache, in f32.
//!
//! For each query q_i at position i, `sum_j softmax_j(q_i · k_j / sqrt(d)) v_j` over j <= i and, with a
//! sliding window w, i - j < w. The softmax runs online (Milakov and Gimelshein 2018, arXiv 1805.02867):
//! positions come in chunks of [`CHUNK`]; each keeps the largest score m so far, the sum l of exp(s - m) and
//! the weighted values, all rescaled when m grows. So no score matrix exists, and memory does not depend on
//! the context.
//!
//! Work is cut into tasks of up to [`QUERIES`] queries of one key/value head, whatever rows and query heads
//! they belong to. Converted keys and values of a chunk serve the whole task: in decoding all query heads of
//! the group, in prefill several rows. Each query's arithmetic does not depend on its task, so results do not
//! depend on the cut or on threads.
//!
//! Loses when a model has one key/value head and decodes: then there is one task, on one thread.

use rayon::prelude::*;

use crate::kv::KvLayer;
use crate::math::{axpy, dot, exp};

/// Widest head: sizes the buffers on the stack.
pub(crate) const MAX_HEAD_DIM: usize = 256;
const CHUNK: usize = 32;
const QUERIES: usize = 32;

/// What all tasks share.
#[derive(Clone, Copy)]
pub(crate) struct Attention<'a> {
    pub(crate) cache: &'a KvLayer,
    /// Query heads per key/value head.
    pub(crate) group: usize,
    /// Position of the first row.
    pub(crate) first: usize,
    pub(crate) window: Option<usize>,
}

impl Attention<'_> {
    /// Attends with `queries`, already scaled by 1/sqrt(d), both (kv head, row, query head of the group,
    /// head_dim).
    pub(crate) fn run(self, rows: usize, queries: &[f32], out: &mut [f32]) {
        let d = self.cache.head_dim;
        let per_head = rows * self.group * d;
        let task = |(kv_head, at): (usize, usize), out: &mut [f32]| {
            let from = kv_head * per_head + at * d;
            self.task(kv_head, at, &queries[from..from + out.len()], out);
        };
        out.par_chunks_mut(per_head).enumerate().for_each(|(kv_head, out)| {
            out.par_chunks_mut(QUERIES * d)
                .enumerate()
                .for_each(|(i, out)| task((kv_head, i * QUERIES), out));
        });
    }

    /// Positions that query `index` of a head sees.
    fn sees(self, index: usize) -> std::ops::Range<usize> {
        let end = self.first + index / self.group + 1;
        self.window.map_or(0, |w| end.saturating_sub(w))..end
    }

    /// Queries `at..` of one head.
    fn task(self, kv_head: usize, at: usize, queries: &[f32], out: &mut [f32]) {
        let d = self.cache.head_dim;
        let count = queries.len() / d;
        // Later queries see later positions: the first one's start and the last one's end bound all.
        let (start, end) = (self.sees(at).start, self.sees(at + count - 1).end);
        let mut key_buffer = [0.0; CHUNK * MAX_HEAD_DIM];
        let mut value_buffer = [0.0; CHUNK * MAX_HEAD_DIM];
        let mut largest = [f32::NEG_INFINITY; QUERIES];
        let mut sums = [0.0; QUERIES];
        out.fill(0.0);
        // Chunks begin at multiples of their size, so that a query meets the same chunks whatever the task's
        // start.
        let mut chunk = start / CHUNK * CHUNK;
        while chunk < end {
            let from = chunk.max(start);
            let to = (chunk + CHUNK).min(end);
            let place = self.cache.at(kv_head, from);
            let keys = self.cache.keys.read(place, (to - from) * d, &mut key_buffer);
            let values = self.cache.values.read(place, (to - from) * d, &mut value_buffer);
            for (i, (query, out)) in queries.chunks_exact(d).zip(out.chunks_exact_mut(d)).enumerate() {
                let sees = self.sees(at + i);
                let (lo, hi) = (sees.start.max(from), sees.end.min(to));
                if lo >= hi {
                    continue;
                }
                let span = (lo - from) * d..(hi - from) * d;
                let (keys, values) = (&keys[span.clone()], &values[span]);
                accumulate(query, keys, values, &mut largest[i], &mut sums[i], out);
            }
            chunk += CHUNK;
        }
        for (out, sum) in out.chunks_exact_mut(d).zip(&sums) {
            out.iter_mut().for_each(|o| *o /= sum);
        }
    }
}

/// One step of the online softmax: at most [`CHUNK`] positions for one query.
fn accumulate(
    query: &[f32],
    keys: &[f32],
    values: &[f32],
    largest: &mut f32,
    sum: &mut f32,
    out: &mut [f32],
) {
    let d = query.len();
    let mut scores = [0.0; CHUNK];
    let scores = &mut scores[..keys.len() / d];
    let mut top = *largest;
    for (score, key) in scores.iter_mut().zip(keys.chunks_exact(d)) {
        *score = dot(query, key);
        top = top.max(*score);
    }
    if top > *largest {
        // exp(-inf) is 0: the first chunk starts from nothing.
        let shrink = exp(*largest - top);
        *sum *= shrink;
        out.iter_mut().for_each(|o| *o *= shrink);
        *largest = top;
    }
    for score in scores.iter_mut() {
        *score = exp(*score - top);
    }
    for (score, value) in scores.iter().zip(values.chunks_exact(d)) {
        *sum += score;
        axpy(*score, value, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::KvType;

    fn noise(n: usize, salt: u32) -> Vec<f32> {
        let hash = |i: u32| (i.wrapping_mul(2_654_435_761) ^ salt).wrapping_mul(2_246_822_519) >> 8;
        (0..u32::try_from(n).unwrap()).map(|i| hash(i) as f32 / (1u32 << 22) as f32 - 2.0).collect()
    }

    /// The definition, in f64.
    fn oracle(q: &[f32], cache: &KvLayer, kv_head: usize, sees: std::ops::Range<usize>) -> Vec<f64> {
        let d = q.len();
        let (mut a, mut b) = (vec![0.0; d], vec![0.0; d]);
        let mut scores = Vec::new();
        for j in sees.clone() {
            let key = cache.keys.read(cache.at(kv_head, j), d, &mut a);
            scores.push(q.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>());
        }
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = scores.iter().map(|s| (s - top).exp()).sum();
        let mut out = vec![0.0; d];
        for (j, s) in sees.zip(&scores) {
            let value = cache.values.read(cache.at(kv_head, j), d, &mut b);
            for (o, v) in out.iter_mut().zip(value) {
                *o += (s - top).exp() / total * f64::from(*v);
            }
        }
        out
    }

    #[test]
    fn matches_the_definition_at_every_edge() {
        let (d, kv_heads, capacity) = (6, 2, 80);
        for kind in [KvType::F32, KvType::F16] {
            let mut cache = KvLayer::new(kind, kv_heads, d);
            cache.grow(capacity).unwrap();
            cache.keys.write(0, &noise(kv_heads * capacity * d, 1));
            cache.values.write(0, &noise(kv_heads * capacity * d, 2));
            for group in [1, 3, 40] {
                for (first, rows) in [(0, 1), (0, 33), (31, 1), (32, 1), (63, 2), (40, 40)] {
                    for window in [None, Some(1), Some(8), Some(33), Some(1000)] {
                        let queries = noise(kv_heads * rows * group * d, 3);
                        let mut out = vec![f32::NAN; queries.len()];
                        let attention = Attention { cache: &cache, group, first, window };
                        attention.run(rows, &queries, &mut out);
                        for (n, (q, o)) in queries.chunks(d).zip(out.chunks(d)).enumerate() {
                            let (kv_head, index) = (n / (rows * group), n % (rows * group));
                            let i = first + index / group;
                            let start = window.map_or(0, |w| (i + 1).saturating_sub(w));
                            let want = oracle(q, &cache, kv_head, start..i + 1);
                            for (o, w) in o.iter().zip(&want) {
                                let error = (f64::from(*o) - w).abs();
                                assert!(
                                    error < 2e-6,
                                    "{kind:?} group {group} first {first} rows {rows} {window:?}: {error:e}"
                                );
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn rows_do_not_depend_on_their_batch() {
        let (d, group, rows) = (8, 2, 70);
        let mut cache = KvLayer::new(KvType::F16, 1, d);
        cache.grow(rows).unwrap();
        cache.keys.write(0, &noise(rows * d, 1));
        cache.values.write(0, &noise(rows * d, 2));
        let queries = noise(rows * group * d, 3);
        for window in [None, Some(5)] {
            let mut whole = vec![0.0; queries.len()];
            Attention { cache: &cache, group, first: 0, window }.run(rows, &queries, &mut whole);
            for row in 0..rows {
                let span = row * group * d..(row + 1) * group * d;
                let mut one = vec![0.0; group * d];
                let attention = Attention { cache: &cache, group, first: row, window };
                attention.run(1, &queries[span.clone()], &mut one);
                assert_eq!(one, whole[span], "row {row}, window {window:?}");
            }
        }
    }
}
