//! Causal grouped-query attention over the cache.
//!
//! For each query q_i at position i, `sum_j softmax_j(q_i · k_j / sqrt(d)) v_j` over j <= i and,
//! with a sliding window w, i - j < w. Positions come in chunks of [`CHUNK`]. Each chunk gives a
//! query its largest score m, the sum l of exp(s - m) and the values weighted by exp(s - m); two
//! such results merge into one of both (Milakov and Gimelshein 2018, arXiv 1805.02867; over chunks:
//! Dao et al. 2023, "Flash-Decoding"). So no score matrix exists, and prefill's memory does not
//! depend on the context.
//!
//! Inner products are of integers (see [`fracbit_kernels::vectors::attend`]): a query is rounded as
//! keys are, and the weights exp(s - m), times the scales of their values, block by block. So they
//! are exact, whatever does them.
//!
//! Prefill cuts the work into tasks of up to [`QUERIES`] queries of one key/value head, which go
//! through the chunks together: a chunk of keys and values comes from memory once for all of them.
//! Decoding has few queries, so there each chunk is a task of its own: threads share heads and the
//! sequence. Either way the queries of a group share every vector of keys and values that is
//! loaded, chunks and blocks begin at multiples of their size, and chunks are merged in order: a
//! query's result depends neither on its batch nor on the cut or the threads.

use std::{cell::RefCell, ops::Range};

use fracbit_kernels::vectors::{FloatScores, FloatWeigh, Scores, Unrounded, Vectors, Weigh, key_most};
use fracbit_kernels::{Team, vectors::plain::exp};

use crate::key_bias::{self, BiasScores};
use crate::kv::{CachedRows, KvType, PAGE};
use crate::state::State;

/// Widest head: sizes the buffers on the stack.
pub(crate) const MAX_HEAD_DIM: usize = 256;
/// Positions of a chunk: keys and values of a head of 64 in 16 bits are then 128 KiB, part of a
/// second-level cache.
pub(crate) const CHUNK: usize = 512;
/// Queries of a task.
pub(crate) const QUERIES: usize = 32;
/// Rows up to which chunks are tasks of their own.
const FEW: usize = 8;

/// Work space of a thread.
#[repr(align(64))]
struct Work {
    /// (query, position of a chunk)
    scores: [f32; QUERIES * CHUNK],
    /// What is left of them on a page as integers, (query, position), and a scale for every query.
    weights: [i16; QUERIES * PAGE],
    weight_scales: [f32; QUERIES],
    /// (query, head_dim), and a scale each
    queries: [i16; QUERIES * MAX_HEAD_DIM],
    query_scales: [f32; QUERIES],
    /// Of a chunk.
    stats: [Stat; QUERIES],
    /// (query, head_dim), of a chunk.
    values: [f32; QUERIES * MAX_HEAD_DIM],
    bias: key_bias::Work,
}

thread_local! {
    // Constant, so that no first use allocates.
    static WORK: RefCell<Work> = const {
        RefCell::new(Work {
            scores: [0.0; QUERIES * CHUNK],
            weights: [0; QUERIES * PAGE],
            weight_scales: [0.0; QUERIES],
            queries: [0; QUERIES * MAX_HEAD_DIM],
            query_scales: [0.0; QUERIES],
            stats: [[0.0; 2]; QUERIES],
            values: [0.0; QUERIES * MAX_HEAD_DIM],
            bias: key_bias::Work::NEW,
        })
    };
}

/// Queries of one row, and the positions of a chunk that they see.
struct Row {
    queries: Range<usize>,
    part: Range<usize>,
    /// Nothing before is seen.
    begins: bool,
}

/// Calls for every row that sees any.
type EachRow<'a> = dyn Fn(&mut dyn FnMut(Row)) + 'a;

/// What all tasks share.
#[derive(Clone, Copy)]
pub(crate) struct Attention<'a> {
    /// The sequences with their rows; each holds the positions before these.
    pub(crate) states: &'a [State],
    pub(crate) layer: usize,
    /// Query heads per key/value head.
    pub(crate) group: usize,
    pub(crate) window: Option<usize>,
    /// See [`fracbit_io::ModelConfig::score_cap`].
    pub(crate) cap: Option<f32>,
    /// What scores get for biases that caches of few bits do not hold.
    pub(crate) bias: Option<BiasScores<'a>>,
    pub(crate) vectors: &'a Vectors,
}

/// Floats of [`Attention::run`]'s work space.
pub(crate) fn work_len(rows: usize, heads: usize, head_dim: usize, capacity: usize) -> usize {
    if rows > FEW { 0 } else { rows * heads * (capacity.div_ceil(CHUNK) + 1) * record(head_dim) }
}

/// Numbers of a query's result from a chunk: its [`Stat`] and the weighted values.
const fn record(head_dim: usize) -> usize {
    2 + head_dim
}

/// Largest score, and the sum of the exponentials of all relative to it.
type Stat = [f32; 2];

impl<'a> Attention<'a> {
    fn dim(self) -> usize {
        self.states[0].layout().head_dim
    }

    /// Attends with `queries`, already scaled by 1/sqrt(d), both (kv head, row, query head of the
    /// group, head_dim); `work` has [`work_len`].
    pub(crate) fn run(
        self,
        team: &Team<'_>,
        rows: usize,
        queries: &[f32],
        out: &mut [f32],
        work: &mut [f32],
    ) {
        let d = self.dim();
        let per_head = rows * self.group * d;
        let chunks = |row: usize| {
            let (_, sees) = self.row(row);
            sees.start / CHUNK..sees.end.div_ceil(CHUNK)
        };
        let most = if rows > FEW { 1 } else { (0..rows).map(|row| chunks(row).len()).max().unwrap_or(1) };
        if team.threads() == 1 || most == 1 {
            team.blocks(out, per_head, QUERIES * d, |kv_head, at, out| {
                let queries = &queries[kv_head * per_head + at..][..out.len()];
                self.task(rows, kv_head, at / d, queries, out);
            });
            return;
        }
        // (kv head, row, chunk): the records of a group, first their statistics.
        let len = self.group * record(d);
        let pairs = queries.len() / (self.group * d);
        let work = &mut work[..pairs * most * len];
        team.chunks(work, len, |task, records| {
            let (pair, nth) = (task / most, task % most);
            let (kv_head, row) = (pair / rows, pair % rows);
            let (state, sees) = self.row(row);
            let Some(part) = chunks(row).nth(nth).map(|chunk| part(chunk, &sees)) else { return };
            let queries = &queries[pair * self.group * d..][..self.group * d];
            let (stats, values) = records.split_at_mut(2 * self.group);
            let (stats, _) = stats.as_chunks_mut();
            let each = QUERIES * d;
            WORK.with_borrow_mut(|work| {
                for (nth, ((queries, stats), values)) in queries
                    .chunks(each)
                    .zip(stats.chunks_mut(QUERIES))
                    .zip(values.chunks_mut(each))
                    .enumerate()
                {
                    let first = pair * self.group + nth * QUERIES;
                    let row = |f: &mut dyn FnMut(Row)| {
                        f(Row { queries: 0..stats.len(), part: part.clone(), begins: true });
                    };
                    self.chunk((state, kv_head), part.clone(), (first, queries), &row, work);
                    stats.copy_from_slice(&work.stats[..stats.len()]);
                    values.copy_from_slice(&work.values[..values.len()]);
                }
            });
        });
        let work = &*work;
        team.chunks(out, self.group * d, |pair, out| {
            for (q, out) in out.chunks_exact_mut(d).enumerate() {
                let mut total = [f32::NEG_INFINITY, 0.0];
                for (nth, records) in
                    work[pair * most * len..].chunks(len).enumerate().take(chunks(pair % rows).len())
                {
                    let (stats, values) = records.split_at(2 * self.group);
                    let (stat, values) = (stats.as_chunks().0[q], &values[q * d..][..d]);
                    if nth == 0 {
                        total = stat;
                        out.copy_from_slice(values);
                    } else {
                        merge(&mut total, out, stat, values);
                    }
                }
                out.iter_mut().for_each(|o| *o /= total[1]);
            }
        });
    }

    /// The state of a row and the positions that it sees.
    fn row(self, row: usize) -> (&'a State, Range<usize>) {
        let (state, position) = State::of_row(self.states, row);
        let end = position + 1;
        (state, self.window.map_or(0, |w| end.saturating_sub(w))..end)
    }

    /// Queries `at..` of one head, through all chunks.
    fn task(self, rows: usize, kv_head: usize, at: usize, queries: &[f32], out: &mut [f32]) {
        let d = self.dim();
        let row_of = |i: usize| (at + i) / self.group;
        let number = kv_head * rows * self.group + at;
        let mut first = 0;
        while first * d < out.len() {
            // Queries of one sequence.
            let (state, sees) = self.row(row_of(first));
            let end = (state.rows().end * self.group - at).min(out.len() / d);
            let sees = sees.start..self.row(row_of(end - 1)).1.end;
            let mut totals = [[f32::NEG_INFINITY, 0.0]; QUERIES];
            WORK.with_borrow_mut(|work| {
                for chunk in sees.start / CHUNK..sees.end.div_ceil(CHUNK) {
                    let rows = |f: &mut dyn FnMut(Row)| {
                        let mut i = first;
                        while i < end {
                            let of_row = i..end.min((row_of(i) + 1) * self.group - at);
                            let sees = self.row(row_of(i)).1;
                            let part = part(chunk, &sees);
                            i = of_row.end;
                            if !part.is_empty() {
                                let queries = of_row.start - first..of_row.end - first;
                                f(Row { queries, begins: part.start == sees.start, part });
                            }
                        }
                    };
                    let span = part(chunk, &sees);
                    let queries = (number + first, &queries[first * d..end * d]);
                    self.chunk((state, kv_head), span, queries, &rows, work);
                    let out = &mut out[first * d..end * d];
                    rows(&mut |Row { queries, begins, .. }| {
                        for q in queries {
                            let (stat, new) = (work.stats[q], &work.values[q * d..][..d]);
                            let (total, out) = (&mut totals[q], &mut out[q * d..][..d]);
                            if begins {
                                *total = stat;
                                out.copy_from_slice(new);
                            } else {
                                merge(total, out, stat, new);
                            }
                        }
                    });
                }
            });
            for (total, out) in totals.iter().zip(out[first * d..end * d].chunks_exact_mut(d)) {
                out.iter_mut().for_each(|o| *o /= total[1]);
            }
            first = end;
        }
    }

    /// What queries of some rows get from some positions of one chunk, to `work`; `number` is the
    /// place of the first one among those of all heads.
    fn chunk(
        self,
        (state, kv_head): (&State, usize),
        span: Range<usize>,
        (number, queries): (usize, &[f32]),
        rows: &EachRow<'_>,
        work: &mut Work,
    ) {
        let Work { scores, weights, weight_scales, queries: ints, query_scales, stats, values, bias } = work;
        let d = self.dim();
        let count = queries.len() / d;
        // Blocks begin at multiples of their size, as chunks do: who else looks at them does not
        // matter.
        let from = span.start / PAGE * PAGE;
        // The pages, with the place of each in the chunk.
        let pages =
            || (from..span.end).step_by(PAGE).map(|at| (at / PAGE, at - from, PAGE.min(span.end - at)));
        let (ints, query_scales) = (&mut ints[..queries.len()], &mut query_scales[..count]);
        if state.layout().kind != KvType::F32 {
            for ((query, ints), scale) in
                queries.chunks_exact(d).zip(ints.chunks_exact_mut(d)).zip(&mut *query_scales)
            {
                *scale = self.vectors.round(query, key_most(d), ints);
            }
        }
        // Neighbouring pages of a head are far from each other in memory.
        let keys = |(page, _, here)| state.keys(self.layer, kv_head, page, here);
        let cached = |(page, _, here)| state.values(self.layer, kv_head, page, here);
        let mut coming = pages().skip(1).map(keys).chain(pages().take(1).map(cached));
        for (page, at, here) in pages() {
            let (stride, scores) = (CHUNK, &mut scores[at..]);
            let next = coming.next().and_then(CachedRows::next);
            match keys((page, at, here)) {
                CachedRows::Ints { ints: keys, scales: key_scales } => {
                    let args = Scores { queries: ints, query_scales, dim: d, keys, key_scales, stride, next };
                    self.vectors.scores(&args, scores);
                }
                CachedRows::F32(keys) => {
                    self.vectors.float_scores(&FloatScores { queries, dim: d, keys, stride }, scores);
                }
            }
        }
        if let Some(of) = self.bias.filter(|of| of.bias.concerns(state.layout().kind)) {
            let queries = (kv_head, number..number + count);
            of.add(self.vectors, &state.angles, queries, from..span.end, bias, scores);
        }
        rows(&mut |Row { queries, part, .. }| {
            for q in queries {
                let scores = &mut scores[q * CHUNK + part.start - from..][..part.len()];
                if let Some(cap) = self.cap {
                    self.vectors.cap(cap, scores);
                }
                let (top, sum) = self.vectors.softmax(scores);
                stats[q] = [top, sum];
            }
        });
        let values = &mut values[..count * d];
        values.fill(0.0);
        // What a query sees, counted from `from`: nothing unless said.
        let mut parts = [const { 0..0 }; QUERIES];
        rows(&mut |Row { queries, part, .. }| {
            parts[queries].fill(part.start - from..part.end - from);
        });
        let mut coming = pages().skip(1).map(cached);
        for (page, at, here) in pages() {
            let next = coming.next().and_then(CachedRows::next);
            // Of what a query sees, what is on this page.
            let on_page = |part: &Range<usize>| {
                part.start.clamp(at, at + here) - at..part.end.clamp(at, at + here) - at
            };
            match cached((page, at, here)) {
                CachedRows::Ints { ints: cached, scales } => {
                    for (q, part) in parts[..count].iter().enumerate() {
                        let part = on_page(part);
                        let unrounded = Unrounded {
                            weights: &scores[q * CHUNK + at..][part.clone()],
                            value_scales: &scales[part.clone()],
                            skip: part.start,
                        };
                        let weights = &mut weights[q * PAGE..][..PAGE];
                        self.vectors.round_weights(&unrounded, weights, &mut weight_scales[q..=q]);
                    }
                    let (weights, scales) = (&weights[..count * PAGE], &weight_scales[..count]);
                    let args = Weigh { weights, scales, stride: PAGE, values: cached, dim: d, next };
                    self.vectors.weigh(&args, values);
                }
                CachedRows::F32(cached) => rows(&mut |Row { queries, .. }| {
                    let part = on_page(&parts[queries.start]);
                    let weigh = FloatWeigh {
                        weights: &scores[queries.start * CHUNK + at + part.start..],
                        stride: CHUNK,
                        values: &cached[part.start * d..part.end * d],
                        dim: d,
                    };
                    self.vectors.float_weigh(&weigh, &mut values[queries.start * d..queries.end * d]);
                }),
            }
        }
    }
}

/// The positions of a chunk that a query sees.
fn part(chunk: usize, sees: &Range<usize>) -> Range<usize> {
    (chunk * CHUNK).max(sees.start)..((chunk + 1) * CHUNK).min(sees.end)
}

/// Adds the result of later positions to that of earlier ones.
fn merge(total: &mut Stat, out: &mut [f32], stat: Stat, new: &[f32]) {
    let top = if stat[0] > total[0] { stat[0] } else { total[0] };
    let (a, b) = (exp(total[0] - top), exp(stat[0] - top));
    *total = [top, total[1] * a + stat[1] * b];
    out.iter_mut().zip(new).for_each(|(o, n)| *o = *o * a + n * b);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key_bias::{HeadBias, KeyBias};
    use crate::pages::KvPool;
    use crate::rope::Rope;
    use crate::state::StateOptions;
    use fracbit_io::ModelConfig;

    fn noise(n: usize, salt: u32) -> Vec<f32> {
        let hash = |i: u32| (i.wrapping_mul(2_654_435_761) ^ salt).wrapping_mul(2_246_822_519) >> 8;
        (0..u32::try_from(n).unwrap()).map(|i| hash(i) as f32 / (1u32 << 22) as f32 - 2.0).collect()
    }

    /// A state of one layer that holds `len` positions of noise and room for `more`.
    fn state(kind: KvType, kv_heads: usize, d: usize, len: usize, more: usize) -> State {
        let json = format!(
            r#"{{"model_type": "llama", "hidden_size": {0}, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": {kv_heads}, "head_dim": {d}, "vocab_size": 10, "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": true}}"#,
            kv_heads * d
        );
        let config = ModelConfig::parse(json.as_bytes(), "config.json".as_ref()).unwrap();
        let pool = KvPool::new(&config, kind, usize::MAX);
        let mut state = State::new(&config, &StateOptions { kv: kind, ..StateOptions::default() }, pool);
        state.reserve(len + more).unwrap();
        let all = (len + more) * kv_heads * d;
        state.write(0, (&Vectors::scalar(), &Team::alone()), &noise(all, 1), &noise(all, 2));
        state.list_mut().advance(len);
        State::deal_rows(std::slice::from_mut(&mut state), &[more]);
        state
    }

    /// Leaves this thread's work space as full of errors as it can be.
    fn poison() {
        WORK.with_borrow_mut(|work| {
            work.scores.fill(f32::NAN);
            work.weights.fill(8191);
            work.weight_scales.fill(f32::NAN);
            work.values.fill(f32::NAN);
            work.bias.poison();
        });
    }

    /// The definition, in f64.
    fn oracle(q: &[f32], state: &State, kv_head: usize, sees: Range<usize>) -> Vec<f64> {
        oracle_with(q, state, kv_head, sees, |_| 0.0)
    }

    /// The same, with something added to the score of every position.
    fn oracle_with(
        q: &[f32],
        state: &State,
        kv_head: usize,
        sees: Range<usize>,
        more: impl Fn(usize) -> f64,
    ) -> Vec<f64> {
        let d = q.len();
        let key = |j: usize, i: usize| f64::from(state.key(kv_head, j, i));
        let score = |j| q.iter().enumerate().map(|(i, q)| f64::from(*q) * key(j, i)).sum::<f64>() + more(j);
        let scores: Vec<f64> = sees.clone().map(score).collect();
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = scores.iter().map(|s| (s - top).exp()).sum();
        let mut out = vec![0.0; d];
        for (j, s) in sees.zip(&scores) {
            for (i, o) in out.iter_mut().enumerate() {
                *o += (s - top).exp() / total * f64::from(state.value(kv_head, j, i));
            }
        }
        out
    }

    #[test]
    fn matches_the_definition_at_every_edge() {
        let (d, kv_heads) = (6, 2);
        let vectors = Vectors::scalar();
        for kind in [KvType::F32, KvType::I16, KvType::I8, KvType::I6, KvType::I4] {
            for (first, rows) in [(0, 1), (0, 33), (31, 1), (40, 40), (511, 2), (1030, 1), (1500, 9)] {
                let states = [state(kind, kv_heads, d, first, rows)];
                for group in [1, 3, 40] {
                    if rows * group > 200 && first > 100 {
                        continue;
                    }
                    for window in [None, Some(1), Some(8), Some(33), Some(1000)] {
                        let queries = noise(kv_heads * rows * group * d, 3);
                        let mut out = vec![f32::NAN; queries.len()];
                        let attention = Attention {
                            states: &states,
                            layer: 0,
                            group,
                            window,
                            cap: None,
                            bias: None,
                            vectors: &vectors,
                        };
                        poison();
                        attention.run(&Team::alone(), rows, &queries, &mut out, &mut []);
                        for (n, (q, o)) in queries.chunks(d).zip(out.chunks(d)).enumerate() {
                            let (kv_head, index) = (n / (rows * group), n % (rows * group));
                            let i = first + index / group;
                            let start = window.map_or(0, |w| (i + 1).saturating_sub(w));
                            let want = oracle(q, &states[0], kv_head, start..i + 1);
                            for (o, w) in o.iter().zip(&want) {
                                let error = (f64::from(*o) - w).abs();
                                // Queries and weights of 13 bits.
                                let most = if kind == KvType::F32 { 4e-6 } else { 1e-3 };
                                assert!(
                                    error < most,
                                    "{kind:?} group {group} first {first} rows {rows} {window:?}: {error:e}"
                                );
                            }
                        }
                    }
                }
            }
        }
    }

    /// A rotary embedding that lengthens keys.
    fn rope(d: usize) -> Rope {
        let json = format!(
            r#"{{"model_type": "llama", "hidden_size": {d}, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 1, "head_dim": {d}, "vocab_size": 10, "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": true,
            "rope_scaling": {{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}}}}"#
        );
        Rope::new(&ModelConfig::parse(json.as_bytes(), "config.json".as_ref()).unwrap().rope)
    }

    /// Its angles, as far as the state has room.
    fn set_angles(state: &mut State, table: usize) {
        let (planes, room) = (state.layout().head_dim / 2, state.room());
        state.angles[table].want(planes);
        state.angles[table].reach(room, &rope(2 * planes), 4096).unwrap();
    }

    /// A choice of planes for every head.
    fn bias(d: usize, planes: &[Vec<usize>]) -> KeyBias {
        let head =
            |planes: &Vec<usize>| HeadBias { planes: planes.clone(), bias: vec![[1.0; 2]; planes.len()] };
        KeyBias {
            shift: vec![0.0; planes.len() * d],
            heads: planes.iter().map(head).collect(),
            most: planes.iter().map(Vec::len).max().unwrap(),
            mean: false,
        }
    }

    #[test]
    fn scores_get_their_biases_at_every_edge() {
        // Planes that meet the queries in several groups, one of them whole.
        let (d, kv_heads, table) = (40, 2, 1);
        let (vectors, rope) = (Vectors::scalar(), rope(d));
        let cases = [(0, 1, 3), (0, 33, 1), (31, 1, 40), (511, 2, 3), (1030, 9, 2)];
        let each = cases.into_iter().flat_map(|case| [false, true].map(|mean| (case, mean)));
        for ((first, rows, group), mean) in each {
            let planes = [(0..20).collect(), vec![0, 2, 3, 5, 7, 11, 13, 17]];
            let bias = KeyBias { mean, ..bias(d, &planes) };
            let kind = if mean { KvType::I4 } else { KvType::I8 };
            let mut states = [state(kind, kv_heads, d, first, rows)];
            set_angles(&mut states[0], table);
            for window in [None, Some(8), Some(600)] {
                let queries: Vec<f32> =
                    noise(kv_heads * rows * group * d, 3).iter().map(|q| q / 8.0).collect();
                let factors = noise(kv_heads * rows * group * 2 * bias.most, 9);
                let of = BiasScores { bias: &bias, factors: &factors, table };
                let states = &states;
                let attention = Attention {
                    states,
                    layer: 0,
                    group,
                    window,
                    cap: None,
                    bias: Some(of),
                    vectors: &vectors,
                };
                let mut out = vec![f32::NAN; queries.len()];
                poison();
                attention.run(&Team::alone(), rows, &queries, &mut out, &mut []);
                for (n, (q, o)) in queries.chunks(d).zip(out.chunks(d)).enumerate() {
                    let (kv_head, index) = (n / (rows * group), n % (rows * group));
                    let i = first + index / group;
                    let start = window.map_or(0, |w| (i + 1).saturating_sub(w));
                    let more = |j: usize| {
                        if j < bias.first() {
                            return 0.0;
                        }
                        let (mut cos, mut sin) = (vec![0.0; d / 2], vec![0.0; d / 2]);
                        rope.fill(j, 4096, &mut cos, &mut sin);
                        let of_plane = |(p, &plane): (usize, &usize)| {
                            let [a, b] = [0, 1].map(|i| f64::from(factors[2 * (n * bias.most + p) + i]));
                            a * f64::from(cos[plane]) + b * f64::from(sin[plane])
                        };
                        bias.heads[kv_head].planes.iter().enumerate().map(of_plane).sum()
                    };
                    let want = oracle_with(q, &states[0], kv_head, start..i + 1, more);
                    for (o, w) in o.iter().zip(&want) {
                        let error = (f64::from(*o) - w).abs();
                        assert!(error < 2e-3, "first {first} rows {rows} {window:?} query {n}: {error:e}");
                    }
                }
            }
        }
    }

    #[test]
    fn rows_do_not_depend_on_batch_threads_or_sequences() {
        let (d, kv_heads, group, rows) = (8, 2, 3, 70);
        let bias = bias(d, &[vec![0, 1, 3], vec![2]]);
        let vectors = Vectors::scalar();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        let cases = [(0, None), (0, Some(5)), (1000, None), (1000, Some(600))];
        for ((first, window), kind) in
            cases.into_iter().flat_map(|case| [KvType::I16, KvType::I6, KvType::I4].map(|kind| (case, kind)))
        {
            let state = |len, more| {
                let mut state = state(kind, kv_heads, d, len, more);
                set_angles(&mut state, 0);
                state
            };
            let whole_state = [state(first, rows)];
            let per_head = rows * group * d;
            let queries = noise(kv_heads * per_head, 3);
            let with = |states: &[State], rows: usize, queries: &[f32], threads: bool| {
                // Of every query its first numbers.
                let factors: Vec<f32> = queries.chunks(d).flat_map(|q| q[..6].to_vec()).collect();
                let of = Some(BiasScores { bias: &bias, factors: &factors, table: 0 });
                let mut out = vec![0.0; queries.len()];
                let mut work = vec![f32::NAN; work_len(rows, kv_heads * group, d, first + 70)];
                let attention =
                    Attention { states, layer: 0, group, window, cap: None, bias: of, vectors: &vectors };
                if threads {
                    let run = |team: &Team<'_>| attention.run(team, rows, queries, &mut out, &mut work);
                    pool.install(|| fracbit_kernels::with_team(run));
                } else {
                    attention.run(&Team::alone(), rows, queries, &mut out, &mut work);
                }
                out
            };
            let whole = with(&whole_state, rows, &queries, false);
            assert_eq!(whole, with(&whole_state, rows, &queries, true), "threads");
            let pick = |all: &[f32], row: usize| -> Vec<f32> {
                let of = |head: usize| &all[head * per_head + row * group * d..][..group * d];
                (0..kv_heads).flat_map(|head| of(head).to_vec()).collect()
            };
            for row in [0, 1, 33, 69] {
                let states = [state(first + row, rows - row)];
                for threads in [false, true] {
                    let one = with(&states, 1, &pick(&queries, row), threads);
                    assert_eq!(one, pick(&whole, row), "row {row}, window {window:?}, {threads}");
                }
            }
            // Several sequences side by side, of different lengths, few rows and many.
            let sides: [&[(usize, usize)]; 3] =
                [&[(2, 1), (40, 1)], &[(0, 3), (2, 1), (40, 2)], &[(2, 1), (7, 33), (40, 1), (40, 30)]];
            for side in sides {
                let mut states: Vec<State> =
                    side.iter().map(|&(row, _)| state(first + row, rows - row)).collect();
                let counts: Vec<usize> = side.iter().map(|&(_, count)| count).collect();
                State::deal_rows(&mut states, &counts);
                let join = |all: &[f32]| -> Vec<f32> {
                    let of = |head: usize, (row, count): (usize, usize)| {
                        all[head * per_head + row * group * d..][..count * group * d].to_vec()
                    };
                    (0..kv_heads).flat_map(|head| side.iter().flat_map(move |&at| of(head, at))).collect()
                };
                for threads in [false, true] {
                    let together = with(&states, counts.iter().sum(), &join(&queries), threads);
                    assert_eq!(together, join(&whole), "{side:?}, {threads}");
                }
            }
        }
    }
}
