//! Quantizing in the order of the data, each layer for what the layers before it became.
//!
//! Two streams of hidden states go through the blocks: x of the original model and x' of the one quantized so far. A layer W that
//! reads x' instead of x starts from a target that makes up for the difference, in closed form: with `H' = E[x' x'^T]` the
//! weights closest to `W x` are `W + W E[(x - x') x'^T] H'^-1`. (GPTAQ, Li et al. 2025, and Qronos, Zhang et al. 2025, correct targets
//! so, column by column within the feedback; here the whole matrix is corrected before it is rounded.) The layers that write
//! into the residual stream, O and Down, make up for the stream's error too: Down for all that their block's output is off, O
//! for its input's. `H'` is damped as for feedback, and the correction
//! is shrunk by the number of inputs that it was fitted to: few of them would teach it their noise.
//!
//! What a block cannot be given: a tied embedding comes first and has nothing to make up for; an untied head is rounded for x'
//! and not corrected.
//!
//! Cost: the calibration text runs through every block three times, and six times through parts of it.

use crate::{
    Error,
    calibrate::{Calibration, Stream, Writer, hessian},
    kernels,
    plan::PlannedLayer,
    quantize::{LayerReport, Matrices},
};
use fracbit_kernels::{Crew, Kernels, Vectors, with_crew};
use fracbit_model::{
    Block, BlockInput, LayerLinear, Linear, LinearId, State, WeightSource, block::head_input,
};
use fracbit_quant::{CrossMoments, Moments, hessian::add_product, moments};
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
    let (source, kernels) = (matrices.source, kernels()?);
    let sequences = calibration.sequences()?;
    let done = layers.len();
    let embedding = todo.iter().filter(|(id, _)| *id == LinearId::Embed).count();
    let at = done.saturating_sub(embedding) / LayerLinear::ALL.len();
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
                matrices.moments = Some((LinearId::Head, hessian(LinearId::Head, n, full)?));
                matrices.write_parts(unit)?.0
            }
            (LinearId::Embed, _) => {
                // The head comes last, so a tied embedding takes the original model's moments.
                matrices.calibrated(calibration, LinearId::Embed)?;
                let (reports, parts) = matrices.write_parts(unit)?;
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
        let source = matrices.source;
        let exact = Observed::new(source, index)?;
        let mut quantized = Observed::new(source, index)?;
        let mut reports = Vec::with_capacity(unit.len());
        // The order of the inputs is that of the matrices.
        for input in BlockInput::ALL {
            let first = LinearId::Layer(index, input.reader());
            matrices.moments = None;
            let (inputs, cross) = self.collect(source, &exact, &quantized, input, &kernels.vectors())?;
            let n = first.shape(source.config()).cols;
            let full = moments::square(n, &inputs.triangle()).map_err(fracbit_model::Error::from)?;
            let trust = trust(inputs.rows(), n);
            drop(inputs);
            let inputs = hessian(first, n, full)?;
            let mut shifts = Vec::new();
            for (id, layer) in unit {
                if let LinearId::Layer(_, which) = *id
                    && BlockInput::of(which) == input
                {
                    let shift = inputs.solve(&cross.of(source, *id)?);
                    let mut shift =
                        shift.map_err(|source| Error::Moments { matrix: first.to_string(), source })?;
                    shift.iter_mut().for_each(|s| *s *= trust);
                    shifts.push((*id, which, layer, shift));
                }
            }
            matrices.moments = Some((first, inputs));
            for (id, which, layer, shift) in shifts {
                let (report, stored) = matrices.write(id, layer, Some(&shift))?;
                quantized.block.replace(which, matrices.linear(id, stored, kernels)?)?;
                reports.push(report);
            }
        }
        self.quantized.through(&quantized.block, &crate::Quiet)?;
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
    ) -> Result<(Moments, Cross), Error> {
        let config = source.config();
        let n = LinearId::Layer(0, input.reader()).shape(config).cols;
        let mut inputs = Moments::new(n);
        let mut lost = (input != BlockInput::Down).then(|| CrossMoments::new(n, n));
        let mut stream = matches!(input, BlockInput::Output | BlockInput::Down)
            .then(|| CrossMoments::new(config.hidden_size, n));
        let (mut state, mut other) = (self.exact.state(&exact.block), self.quantized.state(&quantized.block));
        // The original block is as it will stay, so its last run is the one to keep.
        let mut behind = if input == BlockInput::Down { Some(self.exact.behind()?) } else { None };
        self.exact.beside(&self.quantized, |x, y| {
            let entering = difference(x, y);
            let before = exact.run(&mut state, x, input)?;
            let after = quantized.run(&mut other, y, input)?;
            behind.as_mut().map_or(Ok(()), |out| out.write(x))?;
            let off = if input == BlockInput::Down { difference(x, y) } else { entering };
            let add = |crew: &Crew<'_>| {
                inputs.add_on(crew, vectors, &after)?;
                let lose =
                    |m: &mut CrossMoments| m.add_on(crew, vectors, &difference(&before, &after), &after);
                lost.as_mut().map_or(Ok(()), lose)?;
                stream.as_mut().map_or(Ok(()), |m| m.add_on(crew, vectors, &off, &after))
            };
            Ok(with_crew(add).map_err(fracbit_model::Error::from)?)
        })?;
        behind.map_or(Ok(()), Writer::finish)?;
        let means = |m: Option<CrossMoments>| m.map(|m| m.means());
        Ok((inputs, Cross { lost: means(lost), stream: means(stream) }))
    }
}

/// Inputs per channel at which half of a correction is believed: chosen on calibration text (`docs/quality.md`).
const DOUBT: f32 = 10.0;

/// The share of a correction fitted to `rows` inputs of `n` channels that is applied. Each row of weights is a regression on n channels,
/// whose noise falls with the inputs per channel.
#[expect(clippy::cast_precision_loss, reason = "a share")]
fn trust(rows: u64, n: usize) -> f32 {
    rows as f32 / (rows as f32 + DOUBT * n as f32)
}

fn difference(a: &[f32], b: &[f32]) -> Vec<f32> {
    a.iter().zip(b).map(|(a, b)| a - b).collect()
}

/// What the readers x' of an input have to make up for.
struct Cross {
    /// `E[(x - x') x'^T]`, (n, n).
    lost: Option<Vec<f32>>,
    /// `E[r x'^T]`, (hidden, n), for the error r of the residual stream.
    stream: Option<Vec<f32>>,
}

impl Cross {
    /// `E[e x'^T]` for the error e that a layer's output should take away, (rows, n).
    fn of(&self, source: &WeightSource, id: LinearId) -> Result<Vec<f32>, Error> {
        let shape = id.shape(source.config());
        let mut out = self.stream.clone().unwrap_or_else(|| vec![0.0; shape.len()]);
        if let Some(lost) = &self.lost {
            let weights = source.linear(id)?.data;
            add_product(&weights, lost, shape.cols, &mut out);
        }
        Ok(out)
    }
}

/// A block whose inputs are seen.
struct Observed {
    block: Block,
    seen: Arc<Mutex<[Vec<f32>; 4]>>, // by the order of BlockInput::ALL; rows of the last sequence
}

impl Observed {
    fn new(source: &WeightSource, index: usize) -> Result<Self, Error> {
        let seen: Arc<Mutex<[Vec<f32>; 4]>> = Arc::default();
        let block = Block::from_source(source, index, |input| {
            let seen = Arc::clone(&seen);
            Some(Arc::new(move |_: &Crew<'_>, _: usize, x: &[f32]| {
                let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
                seen[input as usize].extend_from_slice(x);
            }))
        })?
        .with_kernels(&kernels()?);
        Ok(Self { block, seen })
    }

    /// Runs a sequence through the block in place, as far as to an input, and returns that input's rows; for the last one through the
    /// whole block.
    fn run(&self, state: &mut State, x: &mut [f32], input: BlockInput) -> Result<Vec<f32>, Error> {
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
