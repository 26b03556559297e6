//! Scales of a quantized model trained for the divergence from the original.
//!
//! Codes stay as they are; the scales of row r of a matrix are multiplied by exp(t_r), so that the
//! model neither grows nor slows. The t_r of all packed matrices, embedding and head among them,
//! follow the gradient of the KL divergence on a text ([`fracbit_model::gradient`]) by Adam (Kingma
//! and Ba 2015, arXiv 1412.6980) at a rate that falls to zero as half a cosine. What rounding in
//! sequence does for each matrix alone this does for all together.
//!
//! The last sequences of the text are held out. Their divergence is taken after each pass over the
//! others, and the best scales win, the original ones among them: a model that does not gain by it
//! is left as it is.

use crate::{
    QuantizeOptions, QuantizeReport, quantize_in,
    sensitivity::{SEQUENCE, Text},
    smoothing,
};
use fracbit_base::Bytes;
use fracbit_format::PlaneName;
use fracbit_io::{
    MAX_SHARD, Manifest, OutputDir, Overwrite, Resumable, ShardWriter, TensorSpec, checkpoint::INDEX, keep,
    manifest::MANIFEST,
};
use fracbit_load::{Error, Opened, Progress, directory::plane_name, kernels, reader::Reader, require_memory};
use fracbit_model::{
    KvType, LinearId, Model, State, StateOptions,
    gradient::{self, RowLogs, divergence},
};
use fracbit_plan::{Plan, plan::Inventory};
use half::f16;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::{
    collections::BTreeMap,
    fs,
    ops::Range,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// Passes over the text, unless another number is asked for.
pub const PASSES: usize = 2;
/// Least tokens of a step.
const BATCH: usize = 1024;
/// One in so many sequences is held out.
const HELD: usize = 16;
/// Rate of the first step over the root of the divergence at the start: errors of scales count
/// beside those of codes, whose square the divergence grows with.
const RATE: f64 = 0.015;
/// Decays of the means of the gradient and of its square.
const DECAYS: [f64; 2] = [0.9, 0.98];
/// How often the state is kept.
const EVERY: Duration = Duration::from_secs(20);
/// The model card, which gets a line.
const CARD: &str = "README.md";

/// How to tune.
#[derive(Clone, Debug)]
pub struct TuneOptions {
    /// Passes over the text.
    pub passes: usize,
    /// Most memory to use beside the memory-mapped checkpoints.
    pub max_memory: Option<Bytes>,
}

impl Default for TuneOptions {
    fn default() -> Self {
        Self { passes: PASSES, max_memory: None }
    }
}

/// What tuning did.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TuneReport {
    /// The finished directory.
    pub path: PathBuf,
    /// Tokens trained on.
    pub tokens: usize,
    /// Tokens held out.
    pub held_tokens: usize,
    /// Their divergence from the original before, nats per token.
    pub before: f64,
    /// And with the scales that were written.
    pub after: f64,
}

/// Peak memory beside the memory-mapped checkpoints for a text of `tokens` tokens: a quantized
/// model of `model` bytes, the original's hidden states, and what a step takes.
#[must_use]
pub fn memory(config: &fracbit_io::ModelConfig, model: Bytes, tokens: usize) -> Bytes {
    let rows: usize = LinearId::all(config).map(|id| id.shape(config).rows).sum();
    let states = 4 * (tokens * config.hidden_size + 6 * rows) as u64;
    Bytes(model.0 + states + gradient::memory(config, BATCH + SEQUENCE, SEQUENCE))
}

/// Tunes `model` for `text` and writes it into `dir`, all other tensors and files as they are. A
/// resumable directory keeps the state every 20 seconds, and one that is continued goes on from
/// there, to the same bytes.
///
/// # Errors
/// When `model` is not quantized or not from `original`, the text is too short to hold some of it
/// out, the memory does not suffice, or the directory cannot be written.
pub fn tune_in(
    mut dir: OutputDir,
    model: &Opened,
    original: &Opened,
    text: &Text,
    options: &TuneOptions,
    progress: &dyn Progress,
) -> Result<TuneReport, Error> {
    let manifest = manifest_of(model, original)?;
    let needed = memory(&model.config, model.bytes(), text.sequences.tokens());
    require_memory("tuning", needed, options.max_memory)?;
    let sequences: Vec<&[u32]> = text.sequences.iter().collect();
    let (train, held) = sequences.split_at(sequences.len() - sequences.len().div_ceil(HELD));
    if train.is_empty() {
        let rule = format!(
            "should hold at least two sequences to tune on, one of them to see what it wins; {} has {} tokens",
            text.origin,
            text.sequences.tokens()
        );
        return Err(Error::Option { option: "--text", rule });
    }
    let kernels = kernels()?;
    let built = model.model(&kernels, true)?;
    let original = original.model(&kernels, true)?;
    let count = |of: &[&[u32]]| of.iter().map(|s| s.len()).sum::<usize>();
    // Stages of their own: a token of training takes several times as long, and a forecast counts
    // on equal ones.
    progress.stage("running the original", count(&sequences) as u64);
    let teacher = Teacher::new(&original, &sequences, progress)?;
    progress.stage("tuning scales", (options.passes * count(train)) as u64);

    let kept = dir.scratch("tuning.json");
    let mut run = Run { model: &built, teacher, train, held, passes: options.passes, progress };
    let state = run.train(&kept, &mut || dir.keep())?;
    let report = TuneReport {
        path: dir.final_path().to_owned(),
        tokens: count(train),
        held_tokens: count(held),
        before: state.held[0],
        after: state.least(),
    };
    write(&mut dir, model, &state.best(), &manifest, &report, text)?;
    dir.commit()?;
    Ok(report)
}

/// Quantizes by `plan` as [`quantize_in`] does, then tunes on the text of its calibration. Where
/// that is too short to hold some of it out, nothing is tuned.
///
/// # Errors
/// As for [`quantize_in`], which needs a calibration here, and for [`tune_in`].
pub fn quantize_and_tune(
    mut dir: OutputDir,
    original: &Opened,
    inventory: &Inventory,
    plan: &Plan,
    options: &QuantizeOptions,
    progress: &dyn Progress,
) -> Result<(QuantizeReport, Option<TuneReport>), Error> {
    let calibration = options.calibration.as_deref();
    let source =
        smoothing::planned_source(original, plan.rotation, plan.seed, plan.smoothing, calibration, progress)?;
    let text = calibration.map(|c| Text::of(c, usize::MAX, original.config.bos_token_id)).transpose()?;
    let Some(text) = text.filter(|text| text.sequences.len() >= 2) else {
        let report = quantize_in(dir, &source, inventory, plan, options, progress)?;
        return Ok((report, None));
    };
    let tuning = TuneOptions { max_memory: options.max_memory, ..TuneOptions::default() };
    let needed = memory(&original.config, Bytes(plan.bytes), text.sequences.tokens());
    require_memory("tuning", needed, tuning.max_memory)?;
    let [rounded, kept] = [ROUNDED, REPORT].map(|name| dir.scratch(name));
    let mut report: QuantizeReport = match read_report(&kept) {
        Some(report) => report,
        None => match OutputDir::resumable(&rounded, Overwrite::Yes, ROUNDED, true)? {
            Resumable::New(inner) | Resumable::Continued(inner) => {
                dir.keep();
                let report = quantize_in(inner, &source, inventory, plan, options, progress)?;
                let written = keep(&kept, json!(report).to_string().as_bytes());
                written.map_err(|source| fracbit_io::Error::Io {
                    op: "writing",
                    path: kept.clone(),
                    source,
                })?;
                report
            }
            // Killed between two steps: once more, since the report is lost.
            Resumable::Finished(_) => {
                let inner = OutputDir::create(&rounded, Overwrite::Yes)?;
                quantize_in(inner, &source, inventory, plan, options, progress)?
            }
        },
    };
    report.path = dir.final_path().to_owned();
    let tuned = tune_in(dir, &Opened::new(&rounded)?, original, &text, &tuning, progress)?;
    Ok((report, Some(tuned)))
}

/// Names within the scratch directory: the rounded model, and the report on it.
const ROUNDED: &str = "rounded";
const REPORT: &str = "rounded.json";

/// The report of a finished rounding.
fn read_report(kept: &Path) -> Option<QuantizeReport> {
    serde_json::from_slice(&fracbit_io::kept(kept)?).ok()
}

/// The manifest of a model that was quantized from `original`.
fn manifest_of(model: &Opened, original: &Opened) -> Result<Manifest, Error> {
    let path = model.checkpoint.dir().to_path_buf();
    if model.quantization.is_none() {
        let rule = "the model is not quantized: there are no scales to tune".to_owned();
        return Err(Error::QuantizationConfig { path, rule });
    }
    let manifest = Manifest::read(&path)?;
    let (origin, other) = (manifest.provenance["source_hash"].as_str(), original.checkpoint.content_hash());
    match origin {
        Some(origin) if origin != other => {
            let shown = original.checkpoint.dir().display();
            let rule = format!("was made from a checkpoint with hash {origin}, {shown} has {other}");
            Err(Error::QuantizationConfig { path, rule })
        }
        _ => Ok(manifest),
    }
}

/// The original's predictions: hidden states in memory, logits when they are asked for.
struct Teacher<'a> {
    model: &'a Model,
    state: State,
    width: usize,
    hidden: Vec<f32>,
}

impl<'a> Teacher<'a> {
    fn new(model: &'a Model, sequences: &[&[u32]], progress: &dyn Progress) -> Result<Self, Error> {
        let longest = sequences.iter().map(|s| s.len()).max();
        let mut state = model.state(&StateOptions {
            context: longest,
            kv: KvType::F32,
            bf16: true,
            ..StateOptions::default()
        });
        let (mut hidden, mut rows) = (Vec::new(), Vec::new());
        for sequence in sequences {
            state.reset();
            model.forward(&mut state, sequence, &mut rows)?;
            hidden.extend_from_slice(&rows);
            progress.advance(sequence.len() as u64);
        }
        Ok(Self { model, state, width: model.config().hidden_size, hidden })
    }
}

/// Training, as far as it has got.
#[derive(Clone, Debug, Default, PartialEq)]
struct Tuning {
    /// Steps done.
    step: usize,
    logs: RowLogs,
    /// Running means of the gradient and of its square.
    means: [RowLogs; 2],
    /// Divergence of what is held out: before, and after every pass.
    held: Vec<f64>,
    /// The factors that gave the least of them; `None`: no factors.
    best: Option<RowLogs>,
}

impl Tuning {
    fn best(&self) -> RowLogs {
        self.best.clone().unwrap_or_default()
    }

    /// The least divergence of what is held out.
    fn least(&self) -> f64 {
        self.held.iter().copied().fold(f64::INFINITY, f64::min)
    }

    /// Takes the divergence of what is held out.
    fn judge(&mut self, divergence: f64) {
        if !self.held.is_empty() && divergence < self.least() {
            self.best = Some(self.logs.clone());
        }
        self.held.push(divergence);
    }

    /// One step of Adam; `gradient` is that of a mean.
    #[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is meant")]
    fn advance(&mut self, gradient: &RowLogs, rate: f64) {
        self.step += 1;
        let steps = i32::try_from(self.step).unwrap_or(i32::MAX);
        let [first, second] = &mut self.means;
        let [unbias, unbias_square] = DECAYS.map(|decay| 1.0 - decay.powi(steps));
        for (id, logs) in &mut self.logs {
            let zeros = || vec![0.0; logs.len()];
            let means = first.entry(*id).or_insert_with(zeros);
            let squares = second.entry(*id).or_insert_with(zeros);
            for (((log, mean), square), &g) in logs.iter_mut().zip(means).zip(squares).zip(&gradient[id]) {
                let g = f64::from(g);
                let m = DECAYS[0] * f64::from(*mean) + (1.0 - DECAYS[0]) * g;
                let s = DECAYS[1] * f64::from(*square) + (1.0 - DECAYS[1]) * g * g;
                (*mean, *square) = (m as f32, s as f32);
                let step = rate * (m / unbias) / ((s / unbias_square).sqrt() + 1e-8);
                *log = (f64::from(*log) - step) as f32;
            }
        }
    }
}

/// [`Tuning`] in a file: numbers by their bits, so that a continued run goes on exactly.
#[derive(Serialize, Deserialize)]
struct Kept {
    step: usize,
    logs: BTreeMap<String, [Vec<u32>; 3]>,
    held: Vec<u64>,
    best: Option<BTreeMap<String, Vec<u32>>>,
}

impl Tuning {
    fn save(&self, path: &Path) {
        let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        let all =
            |id: &LinearId, logs: &[f32]| [bits(logs), bits(&self.means[0][id]), bits(&self.means[1][id])];
        let kept = Kept {
            step: self.step,
            logs: self.logs.iter().map(|(id, logs)| (id.to_string(), all(id, logs))).collect(),
            held: self.held.iter().map(|v| v.to_bits()).collect(),
            best: self.best.as_ref().map(|b| b.iter().map(|(id, v)| (id.to_string(), bits(v))).collect()),
        };
        // Only time is lost where it cannot be kept.
        let _ = keep(path, json!(kept).to_string().as_bytes());
    }

    /// What [`Tuning::save`] kept for the rows of `fresh`; `None` when there is nothing that fits.
    fn read(path: &Path, fresh: &Self) -> Option<Self> {
        let kept: Kept = serde_json::from_slice(&fracbit_io::kept(path)?).ok()?;
        let floats = |v: &[u32]| v.iter().map(|&b| f32::from_bits(b)).collect::<Vec<_>>();
        let part = |at: usize| -> Option<RowLogs> {
            kept.logs.iter().map(|(id, parts)| Some((id.parse().ok()?, floats(&parts[at])))).collect()
        };
        let (logs, means) = (part(0)?, [part(1)?, part(2)?]);
        let best = match &kept.best {
            None => None,
            Some(best) => Some(
                best.iter()
                    .map(|(id, v)| Some((id.parse().ok()?, floats(v))))
                    .collect::<Option<RowLogs>>()?,
            ),
        };
        let shape =
            |logs: &RowLogs| logs.iter().map(|(id, v)| (*id, v.len())).collect::<Vec<(LinearId, usize)>>();
        let fits = |logs: &RowLogs| shape(logs) == shape(&fresh.logs);
        let held: Vec<f64> = kept.held.iter().map(|&b| f64::from_bits(b)).collect();
        let whole = fits(&logs) && means.iter().all(fits) && best.iter().all(fits) && !held.is_empty();
        whole.then_some(Self { step: kept.step, logs, means, held, best })
    }
}

/// What training needs.
struct Run<'a> {
    model: &'a Model,
    teacher: Teacher<'a>,
    train: &'a [&'a [u32]],
    held: &'a [&'a [u32]],
    passes: usize,
    progress: &'a dyn Progress,
}

impl Run<'_> {
    /// The batches of a pass: sequences in order.
    fn batches(&self) -> Vec<Range<usize>> {
        let (mut out, mut first, mut tokens) = (Vec::new(), 0, 0);
        for (i, sequence) in self.train.iter().enumerate() {
            tokens += sequence.len();
            if tokens >= BATCH || i + 1 == self.train.len() {
                out.push(first..i + 1);
                (first, tokens) = (i + 1, 0);
            }
        }
        out
    }

    /// Mean divergence of some sequences, the `first`-th of the text and those behind it.
    fn divergence(
        &mut self,
        logs: &RowLogs,
        first: usize,
        sequences: &[&[u32]],
        gradient: Option<&mut RowLogs>,
    ) -> Result<f64, Error> {
        let before = self.train.iter().chain(self.held).take(first).map(|s| s.len()).sum::<usize>();
        let Teacher { model, state, width, hidden } = &mut self.teacher;
        let mut give = |rows: Range<usize>, out: &mut Vec<f32>| {
            let hidden = &hidden[(before + rows.start) * *width..(before + rows.end) * *width];
            model.logits(state, hidden, out)
        };
        let sum = divergence(self.model, logs, sequences, &mut give, gradient)?;
        #[expect(clippy::cast_precision_loss, reason = "a mean")]
        let tokens = sequences.iter().map(|s| s.len()).sum::<usize>() as f64;
        Ok(sum / tokens)
    }

    /// Divergence of what is held out.
    fn judge(&mut self, state: &mut Tuning) -> Result<(), Error> {
        let (mut sum, mut tokens) = (0.0, 0.0);
        let held = self.held;
        for (i, sequence) in held.iter().enumerate() {
            let mean = self.divergence(&state.logs, self.train.len() + i, &[*sequence], None)?;
            #[expect(clippy::cast_precision_loss, reason = "a mean")]
            let weight = sequence.len() as f64;
            (sum, tokens) = (sum + mean * weight, tokens + weight);
        }
        state.judge(sum / tokens);
        Ok(())
    }

    fn train(&mut self, kept: &Path, keep: &mut dyn FnMut()) -> Result<Tuning, Error> {
        let mut fresh = Tuning::default();
        for id in LinearId::all(self.model.config()) {
            let linear = self.model.linear(id)?;
            if linear.is_quantized() {
                fresh.logs.insert(id, vec![0.0; linear.shape().rows]);
            }
        }
        let batches = self.batches();
        let mut state = match Tuning::read(kept, &fresh) {
            Some(state) => state,
            None => {
                self.judge(&mut fresh)?;
                fresh
            }
        };
        let steps = self.passes * batches.len();
        let train = self.train;
        let tokens = |batch: &Range<usize>| train[batch.clone()].iter().map(|s| s.len()).sum::<usize>();
        let done: usize = (0..state.step).map(|step| tokens(&batches[step % batches.len()])).sum();
        self.progress.advance(done as u64);
        let mut saved = Instant::now();
        while state.step < steps && !state.logs.is_empty() {
            let batch = batches[state.step % batches.len()].clone();
            #[expect(clippy::cast_precision_loss, reason = "counts of steps and tokens")]
            let (part, count) = (state.step as f64 / steps as f64, tokens(&batch) as f32);
            let rate = RATE * state.held[0].sqrt() * 0.5 * (1.0 + (std::f64::consts::PI * part).cos());
            let mut gradient = RowLogs::new();
            self.divergence(&state.logs, batch.start, &train[batch.clone()], Some(&mut gradient))?;
            gradient.values_mut().flatten().for_each(|g| *g /= count);
            state.advance(&gradient, rate);
            if state.step % batches.len() == 0 {
                self.judge(&mut state)?;
            }
            if saved.elapsed() > EVERY {
                state.save(kept);
                keep();
                saved = Instant::now();
            }
            self.progress.advance(tokens(&batch) as u64);
        }
        Ok(state)
    }
}

/// Writes the directory: tensors in their order, scales of rows times their factors.
fn write(
    dir: &mut OutputDir,
    model: &Opened,
    logs: &RowLogs,
    manifest: &Manifest,
    report: &TuneReport,
    text: &Text,
) -> Result<(), Error> {
    let checkpoint = &model.checkpoint;
    let reader = Reader { checkpoint, verify: false };
    // The factors of the rows of every tensor of scales.
    let mut scales: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    for (&id, logs) in logs {
        let banded =
            model.quantization.as_ref().map(|block| block.bands(id, checkpoint.dir())).transpose()?;
        let name = |band| plane_name(id, band, PlaneName::Scales);
        match banded.flatten() {
            None => drop(scales.insert(name(None), logs.clone())),
            Some(modules) => {
                let bands = reader.bands(id, logs.len(), modules.len())?;
                for band in 0..modules.len() {
                    scales.insert(name(Some(band)), bands.rows(band).map(|row| logs[row]).collect());
                }
            }
        }
    }
    let specs = checkpoint.iter().map(|(name, info)| TensorSpec {
        name: name.to_owned(),
        dtype: info.dtype,
        shape: info.shape.clone(),
    });
    let metadata = [("format".to_owned(), "pt".to_owned())].into();
    let specs: Vec<TensorSpec> = specs.collect();
    let names: Vec<String> = specs.iter().map(|s| s.name.clone()).collect();
    let mut writer = ShardWriter::new(dir, specs, MAX_SHARD, &metadata)?;
    writer.resume()?;
    let tensors = |name: &str| name.ends_with(".safetensors") || name == INDEX;
    let others = manifest.files.iter().filter(|(name, _)| !tensors(name)).map(|(_, file)| file.bytes);
    let list = fs::metadata(checkpoint.dir().join(MANIFEST)).map_or(0, |list| list.len());
    // What is added to the card and to the list takes less than another list.
    writer.check_space(others.sum::<u64>() + 2 * list)?;
    for name in &names {
        let bytes = checkpoint.tensor(name)?.bytes;
        match scales.get(name) {
            None => writer.write(name, bytes)?,
            Some(logs) => writer.write(name, &scaled(&reader, name, bytes, logs)?)?,
        }
    }
    writer.finish()?;
    for name in manifest.files.keys().filter(|name| !tensors(name) && *name != CARD) {
        dir.copy_file(&checkpoint.dir().join(name))?;
    }
    let card = fs::read_to_string(checkpoint.dir().join(CARD)).unwrap_or_default();
    let tuned = format!(
        "\nThe scales of rows were tuned on {} tokens, {}: divergence from the original {:.4} nats per token, {:.4} before, on the {} \
         that were held out.\n",
        report.tokens, text.origin, report.after, report.before, report.held_tokens
    );
    dir.write_file(CARD, (card + &tuned).as_bytes())?;
    let mut provenance = manifest.provenance.as_object().cloned().unwrap_or_default();
    let tuned = json!({
        "tool": format!("fracbit {}", env!("CARGO_PKG_VERSION")), "text": text.origin, "tokens": report.tokens,
        "held_tokens": report.held_tokens, "before": report.before, "after": report.after,
    });
    provenance.insert("tuned".to_owned(), tuned);
    dir.write_manifest(provenance.into())?;
    Ok(())
}

/// Scales in f16, (planes, rows, groups), times the exponentials of `logs`.
fn scaled(reader: &Reader<'_>, name: &str, bytes: &[u8], logs: &[f32]) -> Result<Vec<u8>, Error> {
    let scales = bytes.as_chunks::<2>().0;
    let groups = reader.checkpoint.info(name)?.shape.last().copied().unwrap_or(1).max(1);
    let mut out = Vec::with_capacity(bytes.len());
    for (row, log) in scales.chunks(groups).zip(logs.iter().cycle()) {
        for &scale in row {
            let new = f16::from_f32(f16::from_le_bytes(scale).to_f32() * log.exp());
            if !new.is_finite() {
                return Err(reader.bad(name, format!("a scale times {} is beyond half precision", log.exp())));
            }
            out.extend_from_slice(&new.to_le_bytes());
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logs(values: &[f32]) -> RowLogs {
        RowLogs::from([(LinearId::Embed, values.to_vec())])
    }

    /// The gradient of (t_i - i)^2 / 2 and the like: three steps of it.
    fn some_steps(mut state: Tuning, steps: usize) -> Tuning {
        for _ in 0..steps {
            let pull = state.logs[&LinearId::Embed].iter().enumerate().map(|(i, t)| t - i as f32).collect();
            state.advance(&RowLogs::from([(LinearId::Embed, pull)]), 0.01);
        }
        state
    }

    #[test]
    fn steps_go_down_and_continue_to_the_same_bits() {
        let place = tempfile::tempdir().unwrap();
        let kept = place.path().join("state");
        let fresh = Tuning { logs: logs(&[0.5, 0.0, -0.25]), ..Tuning::default() };
        assert_eq!(Tuning::read(&kept, &fresh), None, "there is none");
        let mut half = some_steps(fresh.clone(), 3);
        half.judge(0.7);
        half.judge(0.6);
        half.judge(0.65);
        assert_eq!((half.least(), half.best()), (0.6, half.logs.clone()));
        half.save(&kept);
        let read = Tuning::read(&kept, &fresh).unwrap();
        assert_eq!(read, half);
        assert_eq!(some_steps(read, 4), some_steps(half, 4));
        let end = some_steps(fresh.clone(), 400);
        for (i, t) in end.logs[&LinearId::Embed].iter().enumerate() {
            assert!((t - i as f32).abs() < 0.05, "{end:?}");
        }
        // Another model's, or a damaged one.
        let other = Tuning { logs: logs(&[0.0; 4]), ..Tuning::default() };
        assert_eq!(Tuning::read(&kept, &other), None);
        let whole = fs::read(&kept).unwrap();
        for cut in [0, 1, whole.len() / 2, whole.len() - 1] {
            fs::write(&kept, &whole[..cut]).unwrap();
            assert_eq!(Tuning::read(&kept, &fresh), None);
        }
        for bit in 0..8 * whole.len() {
            let mut damaged = whole.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            fs::write(&kept, damaged).unwrap();
            assert_eq!(Tuning::read(&kept, &fresh), None, "bit {bit}");
        }
    }

    #[test]
    fn nothing_is_taken_that_does_not_win() {
        let mut state = Tuning { logs: logs(&[1.0]), ..Tuning::default() };
        state.judge(0.5);
        state.judge(0.5);
        state.judge(f64::NAN);
        assert_eq!((state.least(), state.best()), (0.5, RowLogs::new()));
    }
}
