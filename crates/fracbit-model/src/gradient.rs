//! The gradient of the divergence from another model, for the scales of the rows of the matrices.
//!
//! A quantized matrix has a scale for each row, or for each group of a row. Multiplying all scales
//! of row r by exp(t_r) multiplies output r by exp(t_r), so that
//!
//! ```text
//! dL/dt_r = sum over tokens of dL/dy_r y_r,      y = diag(exp(t)) W x  (before the bias)
//! ```
//!
//! and no gradient of a whole matrix is ever formed: a backward pass costs one product per matrix,
//! as a forward pass does. For an embedding the sum goes over the occurrences of token r, plus,
//! where it is the head too, over all logits.
//!
//! Block inputs are kept on the way forward; on the way back each block is run again for what lies
//! inside it (Chen et al. 2016, arXiv 1604.06174). So memory is that of the hidden states at every
//! block and of the inside of one, and matrices are expanded to f32 one block at a time.
//!
//! The pass runs in f32 on the expanded weights, with both factors of a matrix product rounded to
//! bf16 where the processor has such products ([`fracbit_kernels::vectors::bf16`]): that the
//! runtime rounds activations to integers, and the cache, is left out.

mod attention;
mod mixture;
mod norms;

use std::collections::BTreeMap;
use std::ops::Range;

use fracbit_kernels::{Gate, Vectors, vectors::plain::exp, with_team};
use fracbit_rotation::Rotation;
use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, ArrayView2, Axis};
use rayon::prelude::*;

use crate::bf16;
use crate::gradient::mixture::{Matrices, Mixture};
use crate::gradient::norms::{norm, norm_back, read, read_back};
use crate::id::{LayerLinear, LinearId};
use crate::model::TASK;
use crate::rope::Rope;
use crate::rotations::HeadRotation;
use crate::{Error, Model};

/// A number for each row of some matrices: logarithms of factors, or derivatives with respect to
/// them.
pub type RowLogs = BTreeMap<LinearId, Vec<f32>>;

/// Gives the other model's logits of some rows, (rows, vocabulary); rows count through the tokens
/// of all sequences.
pub type Logits<'a> = dyn FnMut(Range<usize>, &mut Vec<f32>) -> Result<(), Error> + 'a;

/// Tokens that meet a matrix at once: it is packed anew for each such block.
const BLOCK: usize = 256;
/// Rows of logits held at a time.
const LOGIT_ROWS: usize = BLOCK;

/// The sum over all tokens of `sequences`, each run from an empty state, of KL(p‖q) in nats: p the
/// distribution of the next token by `baseline`, q that of `model` with every row of the matrices
/// in `logs` multiplied by the exponential of its number there.
///
/// `gradient` gets the derivatives with respect to `logs` added to what it holds. With `longrope`
/// frequencies the longest of the sequences says whether they are those of long texts.
///
/// # Errors
/// [`Error::Token`], [`Error::UnknownLinear`] or [`Error::Linear`] for numbers that fit no matrix,
/// and what `baseline` returns.
pub fn divergence(
    model: &Model,
    logs: &RowLogs,
    sequences: &[&[u32]],
    baseline: &mut Logits<'_>,
    gradient: Option<&mut RowLogs>,
) -> Result<f64, Error> {
    let walk = Walk::new(model, logs, sequences)?;
    let tokens: Vec<u32> = sequences.concat();
    let layers = model.config.num_hidden_layers();
    let mut inputs = vec![walk.embed(&tokens)?];
    for layer in 0..layers {
        let matrices = walk.matrices(layer)?;
        let out = walk.block(layer, &matrices, &inputs[layer])?.out();
        inputs.push(out);
    }
    let mut unused = RowLogs::new();
    let wanted = gradient.is_some();
    let gradient = gradient.unwrap_or(&mut unused);
    let mut count = |seen: &Seen<'_, '_>| seen.matrix.count(logs, seen.y, seen.dy, gradient);
    let last = inputs.pop().expect("the embedding at least");
    let vocab = model.config.vocab_size;
    let mut loss = |rows, logits: &[f32], d: &mut Vec<f32>| {
        baseline(rows, d)?;
        fracbit_base::ShapeError::check_len("divergence", "baseline logits", logits.len(), d.len())?;
        let rows = d.par_chunks_exact_mut(vocab).zip(logits.par_chunks_exact(vocab));
        let each: Vec<f64> = rows.map(|(p, q)| pull(p, q)).collect();
        Ok(each.iter().sum())
    };
    let parts = (0..tokens.len()).step_by(LOGIT_ROWS).map(|at| at..tokens.len().min(at + LOGIT_ROWS));
    let (sum, mut dx) = walk.head(&last, parts, &mut loss, &mut count)?;
    if wanted {
        for layer in (0..layers).rev() {
            let x = inputs.pop().expect("one for each block");
            let matrices = walk.matrices(layer)?;
            let inside = walk.block(layer, &matrices, &x)?;
            dx = walk.block_back(layer, &matrices, &x, &inside, &dx, &mut count);
        }
        if logs.contains_key(&LinearId::Embed) {
            // `inputs` is empty: rows of the embedding are made again.
            let (x, width) = (walk.embed(&tokens)?, walk.width());
            let sums = slot(gradient, LinearId::Embed, model.config.vocab_size);
            for ((&token, x), dx) in tokens.iter().zip(x.chunks_exact(width)).zip(dx.chunks_exact(width)) {
                sums[token as usize] += x.iter().zip(dx).map(|(x, d)| x * d).sum::<f32>();
            }
        }
    }
    Ok(sum)
}

/// Bytes that [`divergence`] takes for `tokens` tokens in sequences of at most `longest`, beside
/// model and baseline.
#[must_use]
pub fn memory(config: &fracbit_io::ModelConfig, tokens: usize, longest: usize) -> u64 {
    let (h, f) = (config.hidden_size, config.intermediate_size);
    let mlp = config.experts.map_or(8 * f, |of| of.active * (8 * f + 4 * h) + 3 * of.count);
    let inside = 10 * h + 6 * config.q_dim() + 5 * config.kv_dim() + mlp;
    let per_token = h * (config.num_hidden_layers() + 2) + inside;
    let block: usize = LayerLinear::ALL.map(|l| LinearId::Layer(0, l).shape(config).len()).iter().sum();
    let head = LinearId::Embed.shape(config).len() + 3 * LOGIT_ROWS * config.vocab_size;
    let scores =
        (3 + usize::from(config.score_cap.is_some())) * longest * longest * rayon::current_num_threads();
    4 * (tokens * per_token + block.max(head) + scores) as u64
}

/// Some rows, from the first on, their logits and the derivatives with respect to these: the loss
/// of those rows.
pub(crate) type Loss<'a> = dyn FnMut(Range<usize>, &[f32], &mut Vec<f32>) -> Result<f64, Error> + 'a;

/// What a backward pass sees of a matrix, or of one of its pieces: rows of what it reads and
/// writes, and the derivatives with respect to that.
pub(crate) struct Seen<'s, 'a> {
    pub(crate) matrix: &'s Piece<'s, 'a>,
    /// Of which tokens, in ascending order.
    pub(crate) tokens: &'s [usize],
    pub(crate) x: &'s [f32],
    pub(crate) y: &'s [f32],
    pub(crate) dy: &'s [f32],
}

/// A matrix in f32, its rows multiplied by their factors.
pub(crate) struct Dense<'a> {
    id: LinearId,
    vectors: Vectors,
    weights: Array2<f32>, // (rows, cols)
    bias: Option<&'a [f32]>,
}

/// All rows of a matrix, or those of one expert.
pub(crate) struct Piece<'s, 'a> {
    of: &'s Dense<'a>,
    pub(crate) rows: Range<usize>,
}

impl<'a> Dense<'a> {
    fn all(&self) -> Piece<'_, 'a> {
        self.piece(0, 1)
    }

    /// One of `count` pieces.
    fn piece(&self, index: usize, count: usize) -> Piece<'_, 'a> {
        let rows = self.weights.nrows() / count;
        Piece { of: self, rows: index * rows..(index + 1) * rows }
    }
}

impl Piece<'_, '_> {
    pub(crate) fn id(&self) -> LinearId {
        self.of.id
    }

    /// x W^T + b, (tokens, rows).
    fn forward(&self, x: &[f32]) -> Vec<f32> {
        let mut out = product(&self.of.vectors, x, self.values(), self.of.weights.ncols(), true);
        if let Some(bias) = self.of.bias {
            let bias = &bias[self.rows.clone()];
            out.par_chunks_exact_mut(bias.len())
                .for_each(|y| y.iter_mut().zip(bias).for_each(|(y, b)| *y += b));
        }
        out
    }

    /// dy W, (tokens, cols).
    fn back(&self, dy: &[f32]) -> Vec<f32> {
        product(&self.of.vectors, dy, self.values(), self.of.weights.ncols(), false)
    }

    /// The weights, row-major.
    fn values(&self) -> &[f32] {
        let cols = self.of.weights.ncols();
        let all = self.of.weights.as_slice().expect("rows of a new matrix");
        &all[self.rows.start * cols..self.rows.end * cols]
    }

    /// Adds sum over tokens of dy (y - b) to the derivatives of the rows' logarithms.
    fn count(&self, logs: &RowLogs, y: &[f32], dy: &[f32], gradient: &mut RowLogs) {
        if !logs.contains_key(&self.of.id) {
            return;
        }
        let rows = self.rows.len();
        let sums = &mut slot(gradient, self.of.id, self.of.weights.nrows())[self.rows.clone()];
        let none = vec![0.0; if self.of.bias.is_some() { 0 } else { rows }];
        let bias = self.of.bias.map_or(&none[..], |bias| &bias[self.rows.clone()]);
        for (y, dy) in y.chunks_exact(rows).zip(dy.chunks_exact(rows)) {
            for (((sum, y), dy), bias) in sums.iter_mut().zip(y).zip(dy).zip(bias) {
                *sum += (y - bias) * dy;
            }
        }
    }
}

/// The derivatives of one matrix.
fn slot(gradient: &mut RowLogs, id: LinearId, rows: usize) -> &mut [f32] {
    gradient.entry(id).or_insert_with(|| vec![0.0; rows])
}

/// `x` of (tokens, inner) times `values` of rows of `cols`, or their transpose.
pub(crate) fn product(
    vectors: &Vectors,
    x: &[f32],
    values: &[f32],
    cols: usize,
    transposed: bool,
) -> Vec<f32> {
    let weights = view(values, cols);
    let m = if transposed { weights.t() } else { weights };
    let (inner, n) = m.dim();
    let mut out = Array2::zeros((x.len() / inner, n));
    if vectors.has_bf16() {
        with_team(|team| {
            bf16::product(team, vectors, x, inner, out.view_mut(), |columns, _, panels| {
                if transposed {
                    panels.set_transposed(&values[columns.start * inner..columns.end * inner], inner);
                } else {
                    panels.set(values, n, columns);
                }
            });
        });
    } else {
        let parts: Vec<_> = out.axis_chunks_iter_mut(Axis(0), BLOCK).collect();
        parts
            .into_par_iter()
            .zip(x.par_chunks(BLOCK * inner))
            .for_each(|(mut out, x)| general_mat_mul(1.0, &view(x, inner), &m, 0.0, &mut out));
    }
    out.into_raw_vec_and_offset().0
}

/// (rows, width) of what lies row by row.
pub(crate) fn view(x: &[f32], width: usize) -> ArrayView2<'_, f32> {
    ArrayView2::from_shape((x.len() / width, width), x).expect("whole rows")
}

/// Turns rows in place.
pub(crate) fn rotate(rotation: Option<&Rotation>, rows: &mut [f32], back: bool) {
    if let Some(rotation) = rotation {
        rows.par_chunks_mut(8 * rotation.width()).for_each(|part| {
            if back { rotation.apply_rows_inverse(part) } else { rotation.apply_rows(part) }
        });
    }
}

/// `a += b`.
fn add(a: &mut [f32], b: &[f32]) {
    a.iter_mut().zip(b).for_each(|(a, b)| *a += b);
}

/// What lies inside a block, all (tokens, width).
pub(crate) struct Inside {
    /// What the matrices read: queries, keys and values; the output; gate and up; down.
    attention_in: Vec<f32>,
    attended: Vec<f32>,
    mlp_in: Vec<f32>,
    act: Vec<f32>,
    /// Queries and keys before and behind norm and rotary embedding.
    raw_q: Vec<f32>,
    raw_k: Vec<f32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    /// Outputs of the attention.
    o: Vec<f32>,
    /// The residual stream between attention and MLP.
    middle: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    down: Vec<f32>,
    /// Where there are experts; `act`, `gate` and `up` are then empty.
    mixture: Option<Mixture>,
    /// What becomes of that before it is added, where a norm follows.
    written: Option<Vec<f32>>,
}

impl Inside {
    /// The residual stream behind the block.
    pub(crate) fn out(self) -> Vec<f32> {
        let mut out = self.middle;
        add(&mut out, self.written.as_ref().unwrap_or(&self.down));
        out
    }
}

/// A model, its factors, and the places of the tokens.
pub(crate) struct Walk<'a> {
    model: &'a Model,
    logs: &'a RowLogs,
    /// Rows of each sequence.
    pub(crate) spans: Vec<Range<usize>>,
    /// Of all layers, or of those without a window and those with one.
    rope: Vec<RopeTables>,
}

/// (tokens, head_dim / 2)
struct RopeTables {
    cos: Vec<f32>,
    sin: Vec<f32>,
    /// Sines with the other sign.
    back: Vec<f32>,
}

impl<'a> Walk<'a> {
    pub(crate) fn new(model: &'a Model, logs: &'a RowLogs, sequences: &[&[u32]]) -> Result<Self, Error> {
        let config = &model.config;
        for (&id, values) in logs {
            let want = model.linear(id)?.shape().rows;
            fracbit_base::ShapeError::check_len("row factors", "logs", want, values.len())
                .map_err(|source| Error::Linear { id, source })?;
        }
        let (mut spans, mut rows) = (Vec::new(), 0);
        for sequence in sequences {
            if let Some(&token) = sequence.iter().find(|&&t| t as usize >= config.vocab_size) {
                return Err(Error::Token { token, vocab: config.vocab_size });
            }
            spans.push(rows..rows + sequence.len());
            rows += sequence.len();
        }
        let half = config.head_dim / 2;
        let longest = sequences.iter().map(|s| s.len()).max().unwrap_or(0);
        let rope = |rope: &Rope| {
            let (mut cos, mut sin) = (vec![0.0; rows * half], vec![0.0; rows * half]);
            for span in &spans {
                for row in span.clone() {
                    let at = row * half..(row + 1) * half;
                    rope.fill(row - span.start, longest, &mut cos[at.clone()], &mut sin[at]);
                }
            }
            let back = sin.iter().map(|s| -s).collect();
            RopeTables { cos, sin, back }
        };
        let rope = std::iter::once(&model.rope).chain(&model.local_rope).map(rope).collect();
        Ok(Self { model, logs, spans, rope })
    }

    pub(crate) fn vectors(&self) -> Vectors {
        self.model.vectors
    }

    pub(crate) fn config(&self) -> &fracbit_io::ModelConfig {
        &self.model.config
    }

    pub(crate) fn width(&self) -> usize {
        self.model.config.hidden_size
    }

    fn factor(&self, id: LinearId, row: usize) -> f32 {
        self.logs.get(&id).map_or(1.0, |logs| logs[row].exp())
    }

    pub(crate) fn dense(&self, id: LinearId) -> Result<Dense<'a>, Error> {
        let linear = self.model.linear(id)?;
        let shape = linear.shape();
        let bad = |source| Error::Linear { id, source };
        let mut weights = linear.to_dense().map_err(bad)?;
        if self.logs.contains_key(&id) {
            weights.par_chunks_exact_mut(shape.cols).enumerate().for_each(|(row, weights)| {
                let factor = self.factor(id, row);
                weights.iter_mut().for_each(|w| *w *= factor);
            });
        }
        let weights = Array2::from_shape_vec((shape.rows, shape.cols), weights).expect("a whole matrix");
        Ok(Dense { id, vectors: self.model.vectors, weights, bias: linear.bias() })
    }

    pub(crate) fn matrices(&self, layer: usize) -> Result<Vec<Dense<'a>>, Error> {
        LayerLinear::ALL.into_iter().map(|which| self.dense(LinearId::Layer(layer, which))).collect()
    }

    /// The residual stream before the first block.
    pub(crate) fn embed(&self, tokens: &[u32]) -> Result<Vec<f32>, Error> {
        let (width, embed) = (self.width(), self.model.linear(LinearId::Embed)?);
        let mut x = vec![0.0; tokens.len() * width];
        for (&token, x) in tokens.iter().zip(x.chunks_exact_mut(width)) {
            embed.row(token as usize, x).map_err(|source| Error::Linear { id: LinearId::Embed, source })?;
            let factor = self.factor(LinearId::Embed, token as usize);
            x.iter_mut().for_each(|x| *x *= factor);
        }
        rotate(self.model.rotations.embed_out.as_ref(), &mut x, true);
        self.model.rotations.divide(&mut x);
        Ok(x)
    }

    /// One block.
    pub(crate) fn block(&self, layer: usize, matrices: &[Dense<'a>], x: &[f32]) -> Result<Inside, Error> {
        let (model, width) = (self.model, self.width());
        let (norms, rotations) = (&model.layers[layer], &model.rotations.layers[layer]);
        let [q, k, v, o, gate, up, down] = matrices else { unreachable!("seven matrices of a block") };
        let mut attention_in = read(x, width, norms.attention_norm.as_deref(), model.eps);
        rotate(rotations.attention_in.as_ref(), &mut attention_in, false);
        let [raw_q, raw_k, v] = [q, k, v].map(|m| m.all().forward(&attention_in));
        let q = self.prepare(layer, &raw_q, norms.query_norm.as_deref());
        let k = self.prepare(layer, &raw_k, norms.key_norm.as_deref());
        let mut attended = self.attend(layer, &q, &k, &v);
        rotate(rotations.output_in.as_ref(), &mut attended, false);
        let o = o.all().forward(&attended);
        let mut middle = x.to_vec();
        add(&mut middle, self.written(layer, 0, &o).as_ref().unwrap_or(&o));
        let mut mlp_in = read(&middle, width, norms.mlp_norm.as_deref(), model.eps);
        rotate(rotations.mlp_in.as_ref(), &mut mlp_in, false);
        let (mut gate_out, mut up_out, mut act, mut mixture) = (Vec::new(), Vec::new(), Vec::new(), None);
        let down = if let Some(how) = model.config.experts {
            let (out, inside) = self.experts(layer, matrices).forward(how, &mlp_in, width)?;
            mixture = Some(inside);
            out
        } else {
            [gate_out, up_out] = [gate, up].map(|m| m.all().forward(&mlp_in));
            act = activate(model.gate, &gate_out, &up_out);
            rotate(rotations.down_in.as_ref(), &mut act, false);
            down.all().forward(&act)
        };
        let written = self.written(layer, 1, &down);
        Ok(Inside {
            attention_in,
            raw_q,
            raw_k,
            q,
            k,
            v,
            attended,
            o,
            middle,
            mlp_in,
            gate: gate_out,
            up: up_out,
            act,
            down,
            mixture,
            written,
        })
    }

    fn experts<'s>(&'s self, layer: usize, matrices: &'s [Dense<'a>]) -> Matrices<'s, 'a> {
        let [.., gate, up, down] = matrices else { unreachable!("seven matrices of a block") };
        Matrices {
            router: self.model.layers[layer].router.as_ref().expect("a layer of experts has a router"),
            mlp: [gate, up, down],
            down_in: self.model.rotations.layers[layer].down_in.as_ref(),
            kind: self.model.gate,
        }
    }

    /// What is added to the residual stream of what attention (0) or MLP (1) give, where a norm
    /// follows them.
    fn written(&self, layer: usize, which: usize, out: &[f32]) -> Option<Vec<f32>> {
        let gain = &self.model.layers[layer].out_norms.as_ref()?[which];
        let mut written = norm(out, self.width(), Some(gain), self.model.inner_eps);
        rotate(self.model.rotations.branch_out.as_ref(), &mut written, false);
        Some(written)
    }

    /// Derivatives of `out` from those of [`Walk::written`]'s result; `None` where these are the
    /// same.
    fn written_back(&self, layer: usize, which: usize, out: &[f32], d: &[f32]) -> Option<Vec<f32>> {
        let gain = &self.model.layers[layer].out_norms.as_ref()?[which];
        let mut d = d.to_vec();
        rotate(self.model.rotations.branch_out.as_ref(), &mut d, true);
        Some(norm_back(out, self.width(), Some(gain), self.model.inner_eps, &d))
    }

    /// The way back through a block: from derivatives of what leaves it to those of what enters it.
    pub(crate) fn block_back(
        &self,
        layer: usize,
        matrices: &[Dense<'a>],
        x: &[f32],
        inside: &Inside,
        dout: &[f32],
        see: &mut dyn FnMut(&Seen<'_, '_>),
    ) -> Vec<f32> {
        let (model, width) = (self.model, self.width());
        let (norms, rotations) = (&model.layers[layer], &model.rotations.layers[layer]);
        let [q, k, v, o, gate, up, down] = matrices else { unreachable!("seven matrices of a block") };
        let tokens: Vec<usize> = (0..x.len() / width).collect();
        let behind = self.written_back(layer, 1, &inside.down, dout);
        let ddown = behind.as_deref().unwrap_or(dout);
        let mut dn = if let Some(mixture) = &inside.mixture {
            self.experts(layer, matrices).back(mixture, width, ddown, see)
        } else {
            let [gate, up, down] = [gate, up, down].map(Dense::all);
            let mut see = |matrix, x: &[f32], y: &[f32], dy: &[f32]| {
                see(&Seen { matrix, tokens: &tokens, x, y, dy });
            };
            see(&down, &inside.act, &inside.down, ddown);
            let mut dgate = down.back(ddown);
            rotate(rotations.down_in.as_ref(), &mut dgate, true);
            let dup = activate_back(model.gate, &inside.gate, &inside.up, &mut dgate);
            see(&gate, &inside.mlp_in, &inside.gate, &dgate);
            see(&up, &inside.mlp_in, &inside.up, &dup);
            let mut dn = gate.back(&dgate);
            add(&mut dn, &up.back(&dup));
            dn
        };
        rotate(rotations.mlp_in.as_ref(), &mut dn, true);
        let mut dx = read_back(&inside.middle, width, norms.mlp_norm.as_deref(), model.eps, dn);
        add(&mut dx, dout);

        let [q, k, v, o] = [q, k, v, o].map(Dense::all);
        let mut see = |matrix, x: &[f32], y: &[f32], dy: &[f32]| {
            see(&Seen { matrix, tokens: &tokens, x, y, dy });
        };
        let behind = self.written_back(layer, 0, &inside.o, &dx);
        let dout = behind.as_ref().unwrap_or(&dx);
        see(&o, &inside.attended, &inside.o, dout);
        let mut attended = o.back(dout);
        rotate(rotations.output_in.as_ref(), &mut attended, true);
        let [dq, dk, dv] = self.attend_back(layer, inside, &attended);
        let dq = self.prepare_back(layer, &inside.raw_q, norms.query_norm.as_deref(), dq);
        let dk = self.prepare_back(layer, &inside.raw_k, norms.key_norm.as_deref(), dk);
        see(&q, &inside.attention_in, &inside.raw_q, &dq);
        see(&k, &inside.attention_in, &inside.raw_k, &dk);
        see(&v, &inside.attention_in, &inside.v, &dv);
        let mut dn = q.back(&dq);
        add(&mut dn, &k.back(&dk));
        add(&mut dn, &v.back(&dv));
        rotate(rotations.attention_in.as_ref(), &mut dn, true);
        add(&mut dx, &read_back(x, width, norms.attention_norm.as_deref(), model.eps, dn));
        dx
    }

    /// Norm, of each head or of all, and rotary embedding of heads.
    fn prepare(&self, layer: usize, x: &[f32], gain: Option<&[f32]>) -> Vec<f32> {
        let mut out = match gain {
            Some(own) => norm(x, own.len(), gain, self.model.inner_eps),
            None => x.to_vec(),
        };
        self.rotate(layer, &mut out, false);
        out
    }

    fn prepare_back(&self, layer: usize, x: &[f32], gain: Option<&[f32]>, mut d: Vec<f32>) -> Vec<f32> {
        self.rotate(layer, &mut d, true);
        match gain {
            Some(own) => norm_back(x, own.len(), gain, self.model.inner_eps, &d),
            None => d,
        }
    }

    fn rotate(&self, layer: usize, x: &mut [f32], back: bool) {
        let rope = &self.rope[usize::from(self.model.config.has_local_rope(layer))];
        let sin = if back { &rope.back } else { &rope.sin };
        let half = self.model.config.head_dim / 2;
        let tokens = sin.len() / half;
        if tokens > 0 && self.model.config.layers[layer].rope {
            let width = x.len() / tokens;
            x.par_chunks_exact_mut(width).enumerate().for_each(|(row, x)| {
                let at = row * half..(row + 1) * half;
                self.model.vectors.rotate(x, &rope.cos[at.clone()], &sin[at]);
            });
        }
    }

    /// The loss of what the head makes of the last residual stream, and its derivatives with
    /// respect to that stream. `loss` gets some rows and their logits, and returns their loss and
    /// its derivatives with respect to those.
    pub(crate) fn head(
        &self,
        x: &[f32],
        parts: impl Iterator<Item = Range<usize>>,
        loss: &mut Loss<'_>,
        see: &mut dyn FnMut(&Seen<'_, '_>),
    ) -> Result<(f64, Vec<f32>), Error> {
        let (model, width) = (self.model, self.width());
        let gain = model.final_norm.as_slice();
        let id = if model.config.tie_word_embeddings { LinearId::Embed } else { LinearId::Head };
        let head = self.dense(id)?;
        let head = head.all();
        // The gain goes before the rotation, or, in a tied folded model, between two.
        let (inner, between) = match &model.rotations.head {
            HeadRotation::Regain(rotation) => (None, Some(rotation)),
            HeadRotation::Plain | HeadRotation::Rotate(_) => (Some(gain), None),
        };
        let behind = match &model.rotations.head {
            HeadRotation::Plain => None,
            HeadRotation::Rotate(rotation) | HeadRotation::Regain(rotation) => Some(rotation),
        };
        let regain = |rows: &mut [f32]| {
            rows.par_chunks_exact_mut(width)
                .for_each(|row| row.iter_mut().zip(gain).for_each(|(n, g)| *n *= g));
        };
        let mut n = norm(x, width, inner, model.eps);
        if between.is_some() {
            rotate(between, &mut n, true);
            regain(&mut n);
        }
        rotate(behind, &mut n, false);

        let (mut sum, mut dn, mut d) = (0.0, Vec::with_capacity(n.len()), Vec::new());
        for rows in parts {
            let x = &n[rows.start * width..rows.end * width];
            let logits = head.forward(x);
            if let Some(cap) = model.logit_cap {
                let mut capped = logits.clone();
                capped.par_chunks_mut(TASK).for_each(|part| self.vectors().cap(cap, part));
                sum += loss(rows.clone(), &capped, &mut d)?;
                d.par_iter_mut().zip(&capped).for_each(|(d, &logit)| *d *= slope(cap, logit));
            } else {
                sum += loss(rows.clone(), &logits, &mut d)?;
            }
            let tokens: Vec<usize> = rows.collect();
            see(&Seen { matrix: &head, tokens: &tokens, x, y: &logits, dy: &d });
            dn.extend_from_slice(&head.back(&d));
        }
        rotate(behind, &mut dn, true);
        if between.is_some() {
            regain(&mut dn);
            rotate(between, &mut dn, false);
        }
        Ok((sum, norm_back(x, width, inner, model.eps, &dn)))
    }
}

/// The derivative of `cap tanh(x / cap)` where that is `capped`.
fn slope(cap: f32, capped: f32) -> f32 {
    1.0 - (capped / cap).powi(2)
}

/// What down reads: `f(gate) ∘ up`.
fn activate(kind: Gate, gate: &[f32], up: &[f32]) -> Vec<f32> {
    gate.par_iter().zip(up).map(|(&g, u)| g * sigmoid(argument(kind, g).0) * u).collect()
}

/// Derivatives with respect to the gate, in the place of those with respect to [`activate`]'s
/// result, and to up.
fn activate_back(kind: Gate, gate: &[f32], up: &[f32], d: &mut [f32]) -> Vec<f32> {
    let mut dup = d.to_vec();
    d.par_iter_mut().zip(&mut dup).zip(gate.par_iter().zip(up)).for_each(|((dg, du), (&g, &u))| {
        let (z, slope) = argument(kind, g);
        let s = sigmoid(z);
        *du *= g * s;
        *dg *= u * s * (1.0 + g * slope * (1.0 - s));
    });
    dup
}

/// What the sigmoid of a gate gets, and its derivative with respect to the gate.
fn argument(kind: Gate, gate: f32) -> (f32, f32) {
    match kind {
        Gate::Silu => (gate, 1.0),
        Gate::GeluTanh => (Gate::gelu_argument(gate), Gate::gelu_slope(gate)),
    }
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// KL(p‖q) of two rows of logits, in nats; `p` becomes q - p as probabilities, the derivatives with
/// respect to q's logits.
fn pull(p: &mut [f32], q: &[f32]) -> f64 {
    let normal = |row: &[f32]| {
        let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = row.chunks(64).map(|c| f64::from(c.iter().map(|&l| exp(l - top)).sum::<f32>())).sum();
        #[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is meant")]
        let log = sum.ln() as f32;
        top + log
    };
    let (zp, zq) = (normal(p), normal(q));
    let mut kl = 0.0f64;
    for (p, q) in p.chunks_mut(64).zip(q.chunks(64)) {
        let mut part = 0.0f32;
        for (p, q) in p.iter_mut().zip(q) {
            let (log_p, log_q) = (*p - zp, q - zq);
            let weight = exp(log_p);
            // A word that the baseline rules out counts nothing.
            part += if weight > 0.0 { weight * (log_p - log_q) } else { 0.0 };
            *p = exp(log_q) - weight;
        }
        kl += f64::from(part);
    }
    kl.max(0.0)
}
