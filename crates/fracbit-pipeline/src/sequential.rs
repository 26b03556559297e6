//! Quantizing in the order of the data, each layer for what the layers before it became.
//!
//! Two streams of hidden states go through the blocks: x of the original model and x' of the one
//! quantized so far. A layer W that reads x' instead of x starts from a target that makes up for
//! the difference, in closed form: with `H' = E[x' x'^T]` the weights closest to `W x` are `W + W
//! E[(x - x') x'^T] H'^-1`. (GPTAQ, Li et al. 2025, and Qronos, Zhang et al. 2025, correct targets
//! so, column by column within the feedback; here the whole matrix is corrected before it is
//! rounded.) The layers that write into the residual stream, O and Down, make up for the stream's
//! error too: Down for all that their block's output is off, O for its input's; not where a norm
//! stands between (Gemma, OLMo 2), which would change the size of what they add. `H'` is damped as
//! for feedback, and the correction is shrunk by the number of inputs that it was fitted to: few of
//! them would teach it their noise.
//!
//! Experts: gates and ups, which read what all tokens read, are as any others. Of the downs each
//! has moments and a correction of its own, from the tokens that its router gives it: with the
//! share r that its output is multiplied by, the inputs are `r x'`. What several experts of a token
//! could make up for each makes up for alone, as if the inputs of different experts were
//! uncorrelated.
//!
//! What a block cannot be given: a tied embedding comes first and has nothing to make up for; an
//! untied head is rounded for x' and not corrected; nor are downs of experts whose moments would
//! take more than 4 GiB.
//!
//! Cost: the calibration text runs through every block three times, and six times through parts of
//! it.

use crate::{
    calibrate::{Calibration, Stream, Writer, hessian},
    matrices::{LayerReport, Matrices},
};
use fracbit_base::{Shape, ShapeError};
use fracbit_kernels::{Kernels, Team, Vectors, with_team};
use fracbit_load::{Error, kernels};
use fracbit_model::{
    Block, BlockInput, Linear, LinearId, Read, Routed, State, WeightSource, block::head_input,
};
use fracbit_plan::plan::PlannedLayer;
use fracbit_quant::{CrossMoments, Hessian, Moments, QuantError, hessian::add_product, moments};
use serde_json::json;
use std::{
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

/// Quantizes the matrices of `todo` that are not in `layers` yet. A finished block is a step.
pub(crate) fn quantize(
    matrices: &mut Matrices<'_>,
    calibration: &Calibration,
    todo: &[(LinearId, PlannedLayer)],
    scratch: &Path,
    layers: &mut Vec<LayerReport>,
) -> Result<(), Error> {
    let (source, kernels) = (matrices.rounds.source, kernels()?);
    let sequences = calibration.sequences()?;
    let done = layers.len();
    let block = |(id, _): &(LinearId, PlannedLayer)| match *id {
        LinearId::Layer(index, _) => Some(index),
        _ => None,
    };
    let at = todo[..done].iter().filter_map(block).max().map_or(0, |last| last + 1);
    let mut streams = Streams {
        exact: Stream::new(source, &sequences, scratch, "exact", at),
        quantized: Stream::new(source, &sequences, scratch, "hidden", at),
    };
    // Before and after a block, of both models.
    matrices.writer.check_space(4 * streams.exact.bytes())?;
    for unit in todo[done..].chunk_by(|a, b| {
        a.0 == b.0 || matches!((a.0, b.0), (LinearId::Layer(i, _), LinearId::Layer(j, _)) if i == j)
    }) {
        let mut step = match unit[0] {
            (LinearId::Layer(index, _), _) => streams.block(matrices, index, unit, &kernels)?,
            (LinearId::Head, _) => {
                let n = source.config().hidden_size;
                let mut inputs = Moments::new(n);
                streams.quantized.each(|x| {
                    head_input(source, x)?;
                    Ok(inputs.add(x).map_err(fracbit_model::Error::from)?)
                })?;
                let mut full = moments::square(n, &inputs.triangle()).map_err(fracbit_model::Error::from)?;
                source.rotate_moments(LinearId::Head, &mut full)?;
                matrices.rounds.moments =
                    Some((LinearId::Head, vec![hessian(LinearId::Head, n, full, inputs.rows())?]));
                matrices.write_parts(unit, None)?.0
            }
            (LinearId::Embed, _) => {
                // The head comes last, so a tied embedding takes the original model's moments.
                matrices.rounds.calibrated(calibration, LinearId::Embed)?;
                let (reports, parts) = matrices.write_parts(unit, None)?;
                streams.begin(source, &matrices.joined(LinearId::Embed, parts, &kernels)?)?;
                reports
            }
        };
        matrices.writer.checkpoint(json!(step))?;
        if unit[0].0.is_layer() {
            streams.exact.advance()?;
            streams.quantized.advance()?;
        }
        layers.append(&mut step);
    }
    Ok(())
}

/// The hidden states before a block, of the original model and of the quantized one.
struct Streams<'a> {
    exact: Stream<'a>,
    quantized: Stream<'a>,
}

impl Streams<'_> {
    fn begin(&self, source: &WeightSource, embedding: &Linear) -> Result<(), Error> {
        self.exact.begin(|tokens| Ok(source.embedding(tokens)?))?;
        self.quantized.begin(|tokens| {
            let width = source.config().hidden_size;
            let mut rows = vec![0.0; tokens.len() * width];
            for (&token, row) in tokens.iter().zip(rows.chunks_exact_mut(width)) {
                embedding.row(token as usize, row).map_err(fracbit_model::Error::from)?;
            }
            source.embedded(&mut rows);
            Ok(rows)
        })
    }

    /// Quantizes a block, input after input, and leaves the hidden states behind it.
    fn block(
        &mut self,
        matrices: &mut Matrices<'_>,
        index: usize,
        unit: &[(LinearId, PlannedLayer)],
        kernels: &Kernels,
    ) -> Result<Vec<LayerReport>, Error> {
        let source = matrices.rounds.source;
        let exact = Observed::new(source, index)?;
        let mut quantized = Observed::new(source, index)?;
        let mut reports = Vec::with_capacity(unit.len());
        // The order of the inputs is that of the matrices.
        for input in BlockInput::ALL {
            let first = LinearId::Layer(index, input.reader());
            matrices.rounds.moments = None;
            let Collected { inputs, lost, streams } =
                self.collect(source, &exact, &quantized, input, &kernels.vectors())?;
            let n = first.shape(source.config()).cols;
            let mut moments = Vec::with_capacity(inputs.len());
            let mut trusts = Vec::with_capacity(inputs.len());
            for inputs in inputs {
                let full = moments::square(n, &inputs.triangle()).map_err(fracbit_model::Error::from)?;
                trusts.push(trust(inputs.rows(), n));
                moments.push(hessian(first, n, full, inputs.rows())?);
            }
            let unsolved = |source| Error::Moments { matrix: first.to_string(), source };
            let cross = Cross::new(&moments, &trusts, lost, streams).map_err(unsolved)?;
            matrices.rounds.moments = Some((first, moments));
            for parts in unit.chunk_by(|a, b| a.0 == b.0) {
                let id = parts[0].0;
                let LinearId::Layer(_, which) = id else { continue };
                if BlockInput::of(which) == input {
                    let shift = cross.shift(source, id)?;
                    let (mut made, stored) = matrices.write_parts(parts, shift.as_deref())?;
                    quantized.block.replace(which, matrices.joined(id, stored, kernels)?)?;
                    reports.append(&mut made);
                }
            }
        }
        self.quantized.through(&quantized.block, &fracbit_load::Quiet, |_| Ok(()))?;
        Ok(reports)
    }

    /// Moments of an input of the block as it is now, and what its readers have to make up for.
    fn collect(
        &self,
        source: &WeightSource,
        exact: &Observed,
        quantized: &Observed,
        input: BlockInput,
        vectors: &Vectors,
    ) -> Result<Collected, Error> {
        let config = source.config();
        let reader = LinearId::Layer(0, input.reader());
        let Shape { rows: hidden, cols: n } = reader.piece_shape(config);
        let pieces = if input == BlockInput::Down { reader.pieces(config) } else { 1 };
        let held = if pieces == 1 || experts_memory(pieces, Shape::new(hidden, n)) > 0 { pieces } else { 0 };
        // Behind a norm of its own a layer does not write into the stream: what it would add for
        // the stream's error is divided by the size of its output and multiplied by the norm's
        // gain. It makes up for its input alone.
        let writes = matches!(input, BlockInput::Output | BlockInput::Down);
        let makes_up = writes && !config.post_norms;
        let own = input != BlockInput::Down || (config.post_norms && pieces == 1);
        let mut all = Collected {
            inputs: (0..held).map(|_| Moments::new(n)).collect(),
            lost: own.then(|| CrossMoments::new(n, n)),
            streams: (0..held).filter(|_| makes_up).map(|_| CrossMoments::new(hidden, n)).collect(),
        };
        let (mut state, mut other) = (self.exact.state(&exact.block), self.quantized.state(&quantized.block));
        // The original block is as it will stay, so its last run is the one to keep.
        let mut behind = if input == BlockInput::Down { Some(self.exact.behind()?) } else { None };
        self.exact.beside(&self.quantized, |x, y| {
            let entering = difference(x, y);
            let before = exact.run(&mut state, x, input)?;
            let after = quantized.run(&mut other, y, input)?;
            behind.as_mut().map_or(Ok(()), |out| out.write(x))?;
            let off = if input == BlockInput::Down { difference(x, y) } else { entering };
            let add = |team: &Team<'_>| {
                if pieces > 1 {
                    return after.of_experts(n).try_for_each(|(piece, routed, x)| match held {
                        0 => Ok(()),
                        _ => all.add_expert(team, vectors, piece, routed, x, &off),
                    });
                }
                all.inputs[0].add_on(team, vectors, &after.rows)?;
                let lose = |m: &mut CrossMoments| {
                    m.add_on(team, vectors, &difference(&before.rows, &after.rows), &after.rows)
                };
                all.lost.as_mut().map_or(Ok(()), lose)?;
                all.streams.first_mut().map_or(Ok(()), |m| m.add_on(team, vectors, &off, &after.rows))
            };
            Ok(with_team(add).map_err(fracbit_model::Error::from)?)
        })?;
        behind.map_or(Ok(()), Writer::finish)?;
        Ok(all)
    }
}

/// An input of a block, collected.
struct Collected {
    /// Moments of x': one set, or one for each expert.
    inputs: Vec<Moments>,
    /// Of x - x' with x'.
    lost: Option<CrossMoments>,
    /// Of the error of the residual stream with x', for each of `inputs`.
    streams: Vec<CrossMoments>,
}

impl Collected {
    /// Rows that down of an expert reads, beside the errors `off` of all tokens of the sequence.
    fn add_expert(
        &mut self,
        team: &Team<'_>,
        vectors: &Vectors,
        piece: usize,
        routed: &[Routed],
        x: &[f32],
        off: &[f32],
    ) -> Result<(), ShapeError> {
        let (n, mut scaled) = (x.len() / routed.len().max(1), x.to_vec());
        for (row, Routed { share, .. }) in scaled.chunks_exact_mut(n).zip(routed) {
            row.iter_mut().for_each(|x| *x *= share);
        }
        self.inputs[piece].add_on(team, vectors, &scaled)?;
        let Some(stream) = self.streams.get_mut(piece) else { return Ok(()) };
        let width = stream.outputs();
        let errors = routed.iter().flat_map(|r| &off[r.place * width..(r.place + 1) * width]);
        let errors: Vec<f32> = errors.copied().collect();
        stream.add_on(team, vectors, &errors, &scaled)
    }
}

/// Bytes that the moments of a matrix's experts may take; beyond, they are rounded without.
const EXPERTS_ROOM: u64 = 4 << 30;

/// Bytes of what is collected for the `pieces` downs of experts, each of `shape`; 0 where it would
/// be too much, and nothing is.
pub(crate) fn experts_memory(pieces: usize, shape: Shape) -> u64 {
    let bytes = (pieces as u64).saturating_mul(Moments::memory(shape.cols) + 8 * shape.len() as u64);
    if bytes > EXPERTS_ROOM { 0 } else { bytes }
}

/// Inputs per channel at which half of a correction is believed: chosen on calibration text
/// (`docs/lab/2026-11-calibration.md`).
const DOUBT: f32 = 10.0;

/// The share of a correction fitted to `rows` inputs of `n` channels that is applied. Each row of
/// weights is a regression on n channels, whose noise falls with the inputs per channel.
#[expect(clippy::cast_precision_loss, reason = "a share")]
fn trust(rows: u64, n: usize) -> f32 {
    rows as f32 / (rows as f32 + DOUBT * n as f32)
}

fn difference(a: &[f32], b: &[f32]) -> Vec<f32> {
    a.iter().zip(b).map(|(a, b)| a - b).collect()
}

/// What is added to the readers x' of an input, so that they make up for errors.
struct Cross {
    /// What a row of weights is multiplied with for its correction, `E[(x - x') x'^T] H'^-1`: (n,
    /// n).
    lost: Option<Vec<f32>>,
    /// `E[r x'^T] H'^-1`, (hidden, n), for the error r of the residual stream; of the downs of
    /// experts one below the other.
    stream: Option<Vec<f32>>,
}

impl Cross {
    /// From the moments H' of all readers, or of each expert, and the share of each correction that
    /// is applied.
    fn new(
        moments: &[Hessian],
        trusts: &[f32],
        lost: Option<CrossMoments>,
        streams: Vec<CrossMoments>,
    ) -> Result<Self, QuantError> {
        let solved = |at: usize, cross: CrossMoments| -> Result<Vec<f32>, QuantError> {
            let mut solved = moments[at].solve(&cross.means())?;
            solved.iter_mut().for_each(|s| *s *= trusts[at]);
            Ok(solved)
        };
        let lost = lost.map(|cross| solved(0, cross)).transpose()?;
        let mut stream = Vec::new();
        for (at, cross) in streams.into_iter().enumerate() {
            stream.append(&mut solved(at, cross)?);
        }
        Ok(Self { lost, stream: (!stream.is_empty()).then_some(stream) })
    }

    /// What is added to the weights of a matrix, if anything.
    fn shift(&self, source: &WeightSource, id: LinearId) -> Result<Option<Vec<f32>>, Error> {
        let Some(lost) = &self.lost else { return Ok(self.stream.clone()) };
        let shape = id.shape(source.config());
        let mut out = self.stream.clone().unwrap_or_else(|| vec![0.0; shape.len()]);
        add_product(&source.linear(id)?.data, lost, shape.cols, &mut out);
        Ok(Some(out))
    }
}

/// Rows that the readers of an input saw.
#[derive(Default)]
struct Seen {
    rows: Vec<f32>,
    /// Of the downs of experts: which of them and for which tokens, in the order of the rows.
    routed: Vec<(usize, Vec<Routed>)>,
}

impl Seen {
    /// Each expert's rows of n, and whose they are.
    fn of_experts(&self, n: usize) -> impl Iterator<Item = (usize, &[Routed], &[f32])> {
        let mut rest = &self.rows[..];
        self.routed.iter().map(move |(piece, routed)| {
            let (rows, behind) = rest.split_at(routed.len() * n);
            rest = behind;
            (*piece, routed.as_slice(), rows)
        })
    }
}

/// A block whose inputs are seen.
struct Observed {
    block: Block,
    seen: Arc<Mutex<[Seen; 4]>>, // by the order of BlockInput::ALL; of the last sequence
}

impl Observed {
    fn new(source: &WeightSource, index: usize) -> Result<Self, Error> {
        let seen: Arc<Mutex<[Seen; 4]>> = Arc::default();
        let block = Block::from_source(source, index, |input| {
            let seen = Arc::clone(&seen);
            Some(Arc::new(move |_: &Team<'_>, Read { x, piece, routed }: Read<'_>| {
                let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
                let seen = &mut seen[input as usize];
                seen.rows.extend_from_slice(x);
                if !routed.is_empty() {
                    seen.routed.push((piece, routed.to_vec()));
                }
            }))
        })?
        .with_kernels(&kernels()?);
        Ok(Self { block, seen })
    }

    /// Runs a sequence through the block in place, as far as to an input, and returns that input's
    /// rows; for the last one through the whole block.
    fn run(&self, state: &mut State, x: &mut [f32], input: BlockInput) -> Result<Seen, Error> {
        let lock = || self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        *lock() = Default::default();
        state.reset();
        match input {
            BlockInput::Down => self.block.forward(state, x)?,
            input => self.block.forward_to(state, x, input)?,
        }
        Ok(std::mem::take(&mut lock()[input as usize]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_of_experts_are_collected_where_they_fit() {
        let mib = |pieces, shape| experts_memory(pieces, shape) >> 20;
        // Qwen3-30B-A3B, OLMoE, and Mixtral 8x7B.
        assert_eq!(mib(128, Shape::new(2048, 768)), 2112);
        assert_eq!(mib(64, Shape::new(2048, 1024)), 1536);
        assert_eq!(mib(8, Shape::new(4096, 14336)), 0);
    }
}
