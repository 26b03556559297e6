//! Queries and keys on their way to attention, and back.

use fracbit_io::ModelConfig;
use fracbit_kernels::Team;

use crate::attention::MAX_HEAD_DIM;
use crate::key_bias::KeyBias;
use crate::model::{PARALLEL_ROWS, Pass};
use crate::rotations;
use crate::state::State;

/// Room to rotate a head of any width: 32 floats for every entry of a factor that is no power of
/// two.
const ROTATION_SCRATCH: usize = 32 * MAX_HEAD_DIM;

impl Pass<'_> {
    /// Norm and RoPE of every head of `x`, (rows, heads · head_dim).
    pub(crate) fn prepare_heads(self, x: &mut [f32], norm: Option<&[f32]>, rope: Option<(&[f32], &[f32])>) {
        let (model, d, half) = (self.model, self.model.config.head_dim, self.model.config.head_dim / 2);
        if norm.is_none() && rope.is_none() {
            return;
        }
        self.each_row(x, |row, x| {
            if let Some(norm) = norm {
                let mut copy = [0.0; MAX_HEAD_DIM];
                for head in x.chunks_exact_mut(d) {
                    copy[..d].copy_from_slice(head);
                    model.vectors.rms_norm(&copy[..d], Some(norm), model.inner_eps, head);
                }
            }
            if let Some((cos, sin)) = rope {
                let span = row * half..(row + 1) * half;
                model.vectors.rotate(x, &cos[span.clone()], &sin[span]);
            }
        });
    }

    /// The rotation that a cache wants of every head of `x`, (rows, heads · head_dim).
    pub(crate) fn rotate_heads(self, states: &[State], x: &mut [f32]) {
        if states.iter().all(|state| state.head_rotation.is_none()) {
            return;
        }
        let model = self.model;
        self.each_row(x, |row, x| {
            if let Some(rotation) = &State::of_row(states, row).0.head_rotation {
                match rotation.scratch_len() {
                    0 => rotations::apply_rows(rotation, &model.vectors, x, &mut []),
                    len => rotations::apply_rows(
                        rotation,
                        &model.vectors,
                        x,
                        &mut [0.0; ROTATION_SCRATCH][..len],
                    ),
                }
            }
        });
    }

    /// (row, kv head, group, head_dim) to (kv head, row, group, head_dim), scaled by
    /// 1/sqrt(head_dim), and as [`RopeConfig::query_factor`](fracbit_io::RopeConfig::query_factor)
    /// says.
    pub(crate) fn group_queries(self, states: &[State], q: &[f32], grouped: &mut [f32]) {
        let (config, rows) = (&self.model.config, self.rows);
        let kv_heads = config.num_key_value_heads;
        let part = q.len() / rows / kv_heads;
        let team = if rows < PARALLEL_ROWS { &Team::alone() } else { self.team };
        team.chunks(grouped, rows * part, |head, grouped| {
            for (row, out) in grouped.chunks_exact_mut(part).enumerate() {
                let from = &q[(row * kv_heads + head) * part..][..part];
                let scale = query_scale(config, State::of_row(states, row).1);
                out.iter_mut().zip(from).for_each(|(o, q)| *o = q * scale);
            }
        });
    }

    /// Takes from keys that are not turned yet, (rows, kv_dim), the biases that `bias` keeps apart,
    /// where a state's cache has few bits.
    pub(crate) fn without_bias(self, states: &[State], bias: &KeyBias, keys: &mut [f32]) {
        self.each_row(keys, |row, keys| {
            let (state, position) = State::of_row(states, row);
            if bias.concerns(state.layout().kind) && position >= bias.first() {
                self.model.vectors.add(&bias.shift, keys);
            }
        });
    }

    /// What scores of those biases are made of: from turned queries, (row, kv head, group,
    /// head_dim), to (kv head, row, group, planes, 2).
    pub(crate) fn bias_factors(self, states: &[State], bias: &KeyBias, q: &[f32], factors: &mut [f32]) {
        let (config, rows, d) = (&self.model.config, self.rows, self.model.config.head_dim);
        let kv_heads = config.num_key_value_heads;
        let part = q.len() / rows / kv_heads;
        let (of_head, of_row) = (factors.len() / kv_heads, factors.len() / kv_heads / rows);
        let team = if rows < PARALLEL_ROWS { &Team::alone() } else { self.team };
        team.chunks(factors, of_head, |head, factors| {
            for (row, out) in factors.chunks_exact_mut(of_row).enumerate() {
                let scale = query_scale(config, State::of_row(states, row).1);
                let queries = q[(row * kv_heads + head) * part..][..part].chunks_exact(d);
                for (query, out) in queries.zip(out.chunks_exact_mut(2 * bias.most)) {
                    bias.factors(head, query, scale, out);
                }
            }
        });
    }

    /// The way back, without the scales.
    pub(crate) fn ungroup(self, grouped: &[f32], out: &mut [f32]) {
        let rows = self.rows;
        let part = out.len() / rows / self.model.config.num_key_value_heads;
        self.each_row(out, |row, out| {
            for (head, out) in out.chunks_exact_mut(part).enumerate() {
                out.copy_from_slice(&grouped[(head * rows + row) * part..][..part]);
            }
        });
    }
}

/// What scores of the query at a position are multiplied by.
#[expect(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "rounding to f32 is meant")]
fn query_scale(config: &ModelConfig, position: usize) -> f32 {
    config.rope.query_factor(position) as f32 * (1.0 / (config.head_dim as f32).sqrt())
}
