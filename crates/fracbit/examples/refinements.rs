//! What each part of rounding with moments of the inputs gains, with real codes: `refinements MODEL
//! SCHEME [EFFORT] [ROW ...]`, rows by their beginnings (default: all).
//!
//! Needs the models and texts of `../shared` beside the workspace. The model, one with a tied
//! embedding, is quantized in memory once a row, every matrix in the scheme, and measured as in the
//! example `calibrated`. The first row and "sequential" do what `quantize` does and give its
//! models; the others change one thing.
#![expect(clippy::print_stdout, reason = "an example")]
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "counts of tokens, and gains in f32"
)]

mod stories;

use fracbit::{Calibration, Effort, Opened, Quiet, evaluate, kernels};
use fracbit_base::Scheme;
use fracbit_format::{TILE, TILE_COLS, TILE_ROWS};
use fracbit_kernels::{PackedMatrix, Team};
use fracbit_model::{
    Block, BlockInput, FloatId, KvType, LayerLinear, Linear, LinearId, Model, ModelBuilder, Read,
    RotationMode, State, StateOptions, WeightSource,
};
use fracbit_quant::{
    CrossMoments, Grouping, Hessian, Moments, Quantized, Rounders, Rounding, hessian::add_product, moments,
    quantize_with,
};
use half::f16;
use std::{
    fs,
    path::Path,
    sync::{Arc, Mutex},
    time::Instant,
};
use stories::EVAL;

type Any<T> = Result<T, Box<dyn std::error::Error>>;

/// Turns of the fit of gains and scales.
const TURNS: usize = 3;

/// What targets are corrected for: the error of what a layer reads, and for those that write to it
/// the residual stream's.
#[derive(Clone, Copy, PartialEq, PartialOrd)]
enum Correct {
    Nothing,
    Inputs,
    InputsAndStream,
}

/// A way to round a model.
#[derive(Clone)]
struct Recipe {
    name: &'static str,
    /// Round for the inputs that the quantized layers leave; otherwise for the original ones.
    sequential: bool,
    correct: Correct,
    /// A share of the mean diagonal.
    damping: f64,
    /// Fit the scales of rows after rounding.
    rows: bool,
    /// Fit a gain for each column of an input too, by turns. Layers then run in f32.
    columns: bool,
    /// Times that tiles are rounded once more, one column of tiles after the other with all others
    /// as they are.
    again: usize,
}

fn recipes() -> Vec<Recipe> {
    let once = Recipe {
        name: "at once",
        sequential: false,
        correct: Correct::Nothing,
        damping: 0.01,
        rows: true,
        columns: false,
        again: 0,
    };
    let after =
        Recipe { name: "sequential", sequential: true, correct: Correct::InputsAndStream, ..once.clone() };
    vec![
        once.clone(),
        Recipe { name: "at once, no fit of rows", rows: false, ..once.clone() },
        Recipe { name: "at once, damping .03", damping: 0.03, ..once.clone() },
        Recipe { name: "at once, damping .1", damping: 0.1, ..once.clone() },
        Recipe { name: "at once, gains of columns", columns: true, ..once.clone() },
        Recipe { name: "at once, tiles again", again: 2, ..once },
        after.clone(),
        Recipe { name: "sequential, nothing corrected", correct: Correct::Nothing, ..after.clone() },
        Recipe { name: "sequential, inputs corrected", correct: Correct::Inputs, ..after.clone() },
        Recipe { name: "sequential, no fit of rows", rows: false, ..after.clone() },
        Recipe { name: "sequential, damping .03", damping: 0.03, ..after.clone() },
        Recipe { name: "sequential, damping .1", damping: 0.1, ..after.clone() },
        Recipe { name: "sequential, gains of columns", columns: true, ..after.clone() },
        Recipe { name: "sequential, tiles again", again: 2, ..after },
    ]
}

fn main() -> Any<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [dir, scheme, rest @ ..] = &args[..] else {
        return Err("usage: refinements MODEL SCHEME [EFFORT] [ROW ...]".into());
    };
    let scheme: Scheme = scheme.parse()?;
    let effort = rest.iter().find_map(|a| a.parse().ok()).unwrap_or(Effort::Exact);
    let rounders = Rounders::new(effort);
    let rows: Vec<&String> = rest.iter().filter(|a| a.parse::<Effort>().is_err()).collect();
    let opened = Opened::new(Path::new(dir))?;
    let scratch = tempfile::tempdir()?;
    let calibration = stories::calibration(&opened, dir, &scratch.path().join("stats"))?;
    let (text, options) = (fs::read_to_string(EVAL)?, stories::evaluating(dir));
    let windows = evaluate::windows(&opened, &text, Path::new(EVAL), &options)?;
    let base = opened.model(&kernels()?, false)?;
    let source = opened.source(RotationMode::Fold, 0)?;
    println!("| {dir} {scheme} | KL divergence | perplexity | seconds |\n| --- | --- | --- | --- |");
    for recipe in recipes() {
        if !(rows.is_empty() || rows.iter().any(|r| recipe.name.starts_with(r.as_str()))) {
            continue;
        }
        let start = Instant::now();
        let mut run = Run {
            source: &source,
            calibration: &calibration,
            scheme,
            rounders: &rounders,
            recipe: &recipe,
            fits: vec![],
        };
        let model = run.model()?;
        let seconds = start.elapsed().as_secs_f64();
        let e = evaluate::score(&model, Some(&base), &windows, StateOptions::default(), 0.0, &Quiet)?;
        let (kl, perplexity) = (e.kl.unwrap_or_default(), e.perplexity);
        println!("| {} | {kl:.5} | {perplexity:.3} | {seconds:.1} |", recipe.name);
        if !run.fits.is_empty() {
            let most = run.fits.iter().copied().fold(0.0, f64::max);
            let mean = run.fits.iter().sum::<f64>() / run.fits.len() as f64;
            println!("proxy loss won: {:.1} % on average, {:.1} % at most", 100.0 * mean, 100.0 * most);
        }
    }
    Ok(())
}

/// A model being rounded.
struct Run<'a> {
    source: &'a WeightSource,
    calibration: &'a Calibration,
    scheme: Scheme,
    rounders: &'a Rounders,
    recipe: &'a Recipe,
    /// The share of the proxy loss that each refinement won.
    fits: Vec<f64>,
}

impl Run<'_> {
    /// The quantized model.
    fn model(&mut self) -> Any<Model> {
        let (source, config) = (self.source, self.source.config());
        let mut builder = ModelBuilder::new(config.clone(), source.rotations().clone())?;
        for id in FloatId::all(config) {
            builder.set_floats(id, source.floats(id)?)?;
        }
        let moments = self.calibration.moments(source, LinearId::Embed)?.ok_or("a tied embedding")?;
        let target = source.linear(LinearId::Embed)?.data;
        let embed = self.round(LinearId::Embed, &target, &moments)?;
        let embed = Arc::new(self.linear(LinearId::Embed, &embed, None)?);
        builder.set(LinearId::Embed, Arc::clone(&embed))?;

        let width = config.hidden_size;
        let (mut exact, mut quantized) = (Vec::new(), Vec::new());
        for tokens in self.calibration.sequences()?.iter() {
            exact.push(source.embedding(tokens)?);
            let mut rows = vec![0.0; tokens.len() * width];
            for (&token, row) in tokens.iter().zip(rows.chunks_exact_mut(width)) {
                embed.row(token as usize, row)?;
            }
            source.embedded(&mut rows);
            quantized.push(rows);
        }
        for index in 0..config.num_hidden_layers() {
            for (which, linear) in self.block(index, &mut exact, &mut quantized)? {
                builder.set(LinearId::Layer(index, which), linear)?;
            }
        }
        Ok(builder.build()?.with_kernels(&kernels()?))
    }

    /// Quantizes a block, input after input, and takes the hidden states through it.
    fn block(
        &mut self,
        index: usize,
        exact: &mut [Vec<f32>],
        quantized: &mut [Vec<f32>],
    ) -> Any<Vec<(LayerLinear, Linear)>> {
        let (source, recipe) = (self.source, self.recipe);
        let config = source.config();
        let original = Observed::new(source, index)?;
        let mut rounded = Observed::new(source, index)?;
        let mut out = Vec::new();
        // What the original block's layers read, and what leaves it.
        let mut readings = Vec::with_capacity(exact.len());
        let entering = exact.to_vec();
        for x in &mut *exact {
            readings.push(original.run(x)?);
        }
        for input in BlockInput::ALL {
            let first = LinearId::Layer(index, input.reader());
            let n = first.shape(config).cols;
            let mut inputs = Moments::new(n);
            let mut lost = CrossMoments::new(n, n);
            let mut stream = CrossMoments::new(config.hidden_size, n);
            let loses = recipe.correct > Correct::Nothing && input != BlockInput::Down
                || recipe.correct == Correct::Inputs;
            let strays = recipe.correct == Correct::InputsAndStream
                && matches!(input, BlockInput::Output | BlockInput::Down);
            for (i, readings) in readings.iter().enumerate() {
                let before = &readings[input as usize];
                if !recipe.sequential {
                    inputs.add(before)?;
                    continue;
                }
                let mut y = quantized[i].clone();
                let after = std::mem::take(&mut rounded.run(&mut y)?[input as usize]);
                inputs.add(&after)?;
                if loses {
                    lost.add(&difference(before, &after), &after)?;
                }
                if strays && input == BlockInput::Down {
                    stream.add(&difference(&exact[i], &y), &after)?;
                } else if strays {
                    stream.add(&difference(&entering[i], &quantized[i]), &after)?;
                }
            }
            // As in `quantize`.
            let trust = inputs.rows() as f32 / (inputs.rows() as f32 + 10.0 * n as f32);
            let h = Hessian::new(n, moments::square(n, &inputs.triangle())?)?.with_damping(recipe.damping);
            let (lost, stream) = (lost.means(), stream.means());
            let members: Vec<LayerLinear> =
                LayerLinear::ALL.into_iter().filter(|&w| BlockInput::of(w) == input).collect();
            let mut packed = Vec::new();
            for &which in &members {
                let id = LinearId::Layer(index, which);
                let mut target = source.linear(id)?.data;
                if recipe.sequential && recipe.correct > Correct::Nothing {
                    let writes = matches!(which, LayerLinear::O | LayerLinear::Down);
                    let mut cross = if writes && recipe.correct == Correct::InputsAndStream {
                        stream.clone()
                    } else {
                        vec![0.0; target.len()]
                    };
                    if loses {
                        add_product(&target, &lost, n, &mut cross);
                    }
                    let shift = h.solve(&cross)?;
                    target.iter_mut().zip(shift).for_each(|(w, s)| *w += trust * s);
                }
                let codes = self.round(id, &target, &h)?;
                packed.push(Rounded { which, target, codes });
            }
            let gains = recipe.columns.then(|| self.fit(&mut packed, &h));
            for Rounded { which, codes, .. } in packed {
                let id = LinearId::Layer(index, which);
                rounded.block.replace(which, self.linear(id, &codes, gains.as_deref())?)?;
                out.push((which, self.linear(id, &codes, gains.as_deref())?));
            }
        }
        for y in quantized {
            rounded.run(y)?;
        }
        Ok(out)
    }

    /// A matrix in the scheme.
    fn round(&mut self, id: LinearId, target: &[f32], h: &Hessian) -> Any<Quantized> {
        let shape = id.shape(self.source.config());
        let rounding = Rounding { moments: std::slice::from_ref(h), ..Rounding::new(self.rounders) };
        let mut packed = quantize_with(target, shape, self.scheme, Grouping::Row, rounding, &|_| ())?;
        // A tied embedding is damped for its other reader, which the loss here does not know.
        if self.recipe.again > 0 && id != LinearId::Embed {
            self.again(&mut packed, target, h)?;
        }
        if !self.recipe.rows {
            let gain = packed.data.gain();
            for (scale, row) in packed.data.scales_mut().iter_mut().zip(target.chunks(shape.cols)) {
                let square: f64 = row.iter().map(|&w| f64::from(w).powi(2)).sum::<f64>() / shape.cols as f64;
                *scale = f16::from_f32((square.sqrt() / f64::from(gain)) as f32);
            }
        }
        Ok(packed)
    }

    /// Rounds tiles anew for the least loss while all others keep their codes, and keeps what is
    /// better.
    fn again(&mut self, packed: &mut Quantized, target: &[f32], h: &Hessian) -> Any<()> {
        let n = h.len();
        let rounder = self.rounders.get(self.scheme).ok_or("a scheme with a rounder of its own")?;
        let across = n.div_ceil(TILE_COLS);
        let rows = packed.data.shape().rows;
        let size = packed.data.codes().len() / (rows.div_ceil(TILE_ROWS) * across);
        let before = h.loss(&difference(target, &packed.view().dequantize()));
        for column in (0..self.recipe.again).flat_map(|_| (0..across).rev()) {
            let (first, last) = (column * TILE_COLS, n.min((column + 1) * TILE_COLS));
            let width = last - first;
            let rounded = packed.view().dequantize();
            let error = difference(target, &rounded);
            let own: Vec<f32> =
                (first..last).flat_map(|i| h.entries()[i * n..][first..last].to_vec()).collect();
            // E H in this column: what a change of its weights costs or wins at first.
            let slope: Vec<f32> = error
                .chunks(n)
                .flat_map(|e| (first..last).map(|i| dot(e, &h.entries()[i * n..][..n]) as f32))
                .collect();
            let own = Hessian::new(width, own)?;
            let best = own.solve(&slope)?;
            for down in 0..rows.div_ceil(TILE_ROWS) {
                let mut tile = [[0.0; TILE]];
                let rows = down * TILE_ROWS..rows.min((down + 1) * TILE_ROWS);
                for r in rows.clone() {
                    let scale = packed.data.scales()[r].to_f32() * packed.data.gain();
                    for c in 0..width {
                        let value = rounded[r * n + first + c] + best[r * width + c];
                        tile[0][(r - rows.start) * TILE_COLS + c] =
                            if scale > 0.0 { value / scale } else { 0.0 };
                    }
                }
                let at = (down * across + column) * size;
                let old = packed.data.codes()[at..at + size].to_vec();
                rounder.encode(&tile, &mut packed.data.codes_mut()[at..at + size]);
                let now = packed.view().dequantize();
                let change: Vec<f32> = rows
                    .clone()
                    .flat_map(|r| difference(&rounded[r * n..][first..last], &now[r * n..][first..last]))
                    .collect();
                let slope = &slope[rows.start * width..rows.end * width];
                if 2.0 * dot(slope, &change) + own.loss(&change) >= 0.0 {
                    packed.data.codes_mut()[at..at + size].copy_from_slice(&old);
                }
            }
        }
        self.fits.push(1.0 - h.loss(&difference(target, &packed.view().dequantize())) / before);
        Ok(())
    }

    /// The layer of a matrix, in f32 where its columns have gains.
    fn linear(&self, id: LinearId, codes: &Quantized, gains: Option<&[f32]>) -> Any<Linear> {
        let bias = self.source.bias(id)?;
        Ok(match gains {
            None => Linear::packed(PackedMatrix::new(&kernels()?, &codes.view()), bias)?,
            Some(gains) => {
                let mut weights = codes.view().dequantize();
                for row in weights.chunks_mut(gains.len()) {
                    row.iter_mut().zip(gains).for_each(|(w, g)| *w *= g);
                }
                Linear::dense(codes.data.shape(), weights, bias)?
            }
        })
    }

    /// Gains g of the columns and scales of the rows of least `tr((W - Q diag g) H (W - Q diag
    /// g)^T)` over all matrices of an input, by turns. For g the normal equations are `(Q^T Q o H)
    /// g = diag(Q^T W H)`, summed over the matrices.
    fn fit(&mut self, all: &mut [Rounded], h: &Hessian) -> Vec<f32> {
        let n = h.len();
        let mut gains = vec![1.0f32; n];
        let loss = |all: &[Rounded], gains: &[f32]| -> f64 {
            all.iter()
                .map(|m| h.loss(&difference(&m.target, &times(&m.codes.view().dequantize(), gains))))
                .sum()
        };
        let image = |x: &[f32]| {
            let mut out = vec![0.0; x.len()];
            add_product(x, h.entries(), n, &mut out);
            out
        };
        let before = loss(all, &gains);
        let damping =
            self.recipe.damping * (0..n).map(|i| f64::from(h.entries()[i * n + i])).sum::<f64>() / n as f64;
        for _ in 0..TURNS {
            let (mut a, mut b) = (vec![0.0f64; n * n], vec![0.0f64; n]);
            for Rounded { target, codes, .. } in &*all {
                let weights = codes.view().dequantize();
                for (w, t) in weights.chunks(n).zip(image(target).chunks(n)) {
                    for i in 0..n {
                        let wi = f64::from(w[i]);
                        // The damping pulls towards gains of 1.
                        b[i] += wi * (f64::from(t[i]) + damping * wi);
                        a[i * n + i] += damping * wi * wi;
                        let row = &h.entries()[i * n..][..n];
                        let terms = w.iter().zip(row).map(|(&wj, &h)| wi * f64::from(wj) * f64::from(h));
                        a[i * n..][..n].iter_mut().zip(terms).for_each(|(a, term)| *a += term);
                    }
                }
            }
            gains = solve(&mut a, b);
            let moved = |by: f32| loss(all, &[&[by * gains[0]], &gains[1..]].concat());
            debug_assert!(loss(all, &gains) <= 1.0001 * moved(0.9).min(moved(1.1)), "gains of least loss");
            for Rounded { target, codes, .. } in &mut *all {
                let weights = times(&codes.view().dequantize(), &gains);
                let images = image(&weights);
                let rows = target.chunks(n).zip(weights.chunks(n)).zip(images.chunks(n));
                for (scale, ((target, weights), image)) in codes.data.scales_mut().iter_mut().zip(rows) {
                    let best = dot(target, image) / dot(weights, image);
                    *scale = f16::from_f32((f64::from(scale.to_f32()) * best) as f32);
                }
            }
        }
        self.fits.push(1.0 - loss(all, &gains) / before);
        gains
    }
}

/// A matrix and its codes.
struct Rounded {
    which: LayerLinear,
    target: Vec<f32>, // (rows, cols)
    codes: Quantized,
}

fn times(rows: &[f32], gains: &[f32]) -> Vec<f32> {
    rows.chunks(gains.len()).flat_map(|row| row.iter().zip(gains).map(|(w, g)| w * g)).collect()
}

/// Solution of symmetric positive definite equations, by elimination.
fn solve(a: &mut [f64], mut b: Vec<f64>) -> Vec<f32> {
    let n = b.len();
    for j in 0..n {
        for i in j + 1..n {
            let factor = a[i * n + j] / a[j * n + j];
            (j..n).for_each(|k| a[i * n + k] -= factor * a[j * n + k]);
            b[i] -= factor * b[j];
        }
    }
    for j in (0..n).rev() {
        let rest: f64 = (j + 1..n).map(|k| a[j * n + k] * b[k]).sum();
        b[j] = (b[j] - rest) / a[j * n + j];
    }
    b.into_iter().map(|g| g as f32).collect()
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

fn difference(a: &[f32], b: &[f32]) -> Vec<f32> {
    a.iter().zip(b).map(|(a, b)| a - b).collect()
}

/// A block whose inputs are seen.
struct Observed {
    block: Block,
    state: Mutex<State>,
    seen: Arc<Mutex<[Vec<f32>; 4]>>,
}

impl Observed {
    fn new(source: &WeightSource, index: usize) -> Any<Self> {
        let seen: Arc<Mutex<[Vec<f32>; 4]>> = Arc::default();
        let block = Block::from_source(source, index, |input| {
            let seen = Arc::clone(&seen);
            Some(Arc::new(move |_: &Team<'_>, Read { x, .. }: Read<'_>| {
                seen.lock().expect("one thread")[input as usize].extend_from_slice(x);
            }))
        })?;
        let options = StateOptions { context: Some(257), kv: KvType::F32, ..StateOptions::default() };
        let state = Mutex::new(block.state(&options));
        Ok(Self { block, state, seen })
    }

    /// Runs a sequence through the block in place, and returns the rows of its inputs.
    fn run(&self, x: &mut [f32]) -> Any<[Vec<f32>; 4]> {
        *self.seen.lock().expect("one thread") = Default::default();
        let mut state = self.state.lock().expect("one thread");
        state.reset();
        self.block.forward(&mut state, x)?;
        Ok(std::mem::take(&mut *self.seen.lock().expect("one thread")))
    }
}
