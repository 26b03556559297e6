//! Calibration: the second moments `H = E[x x^T]` of what every linear layer reads, on a text.
//!
//! The hidden states of the whole text go through the model block by block; they wait in a scratch
//! file, so that memory holds one block, one sequence and the moments of one block whatever the
//! length of the text. Queries, keys and values share their input, and so do gate and up: four
//! matrices of moments per block, and those of the head's input. They are stored in the basis of
//! the checkpoint and turned when they are used ([`Calibration::moments`]), so that one calibration
//! serves every rotation.
//!
//! Every finished block is recorded: a run that was killed continues with the next one and ends
//! with the same bytes.

pub(crate) mod collect;
mod stream;
pub(crate) mod written;

pub use stream::Sequences;
pub(crate) use stream::{Stream, Writer};

use crate::deal::{CollectJob, Dealt, Job, Part};
use collect::{Collected, Collector};
use fracbit_base::Bytes;
use fracbit_format::TILE_COLS;
use fracbit_io::{Checkpoint, Dtype, MAX_SHARD, OutputDir, Overwrite, Resumable, ShardWriter, TensorSpec};
use fracbit_load::{
    Error, EvalOptions, Opened, Progress, evaluate::windows_of_tokens, kernels, require_memory,
};
use fracbit_model::{Block, BlockInput, LinearId, Model, Place, RotationMode, WeightSource};
use fracbit_plan::{
    bands::{self, Bands},
    sensitivities::Sensitivities,
};
use fracbit_quant::{Hessian, Moments, moments};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::{
    collections::BTreeMap,
    mem,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Version of the calibration document.
pub const CALIBRATION_VERSION: u32 = 1;
/// The document within a calibration directory.
pub const CALIBRATION_FILE: &str = "calibration.json";
/// Damping of the moments of a tied embedding, a share of their mean diagonal: chosen on
/// TinyStories-656K (`docs/lab/2026-11-calibration.md`).
const TIED_DAMPING: f64 = 6.0;
/// Fewest tokens that are worth counting for bands of rows.
const FEW_FOR_BANDS: usize = 2048;
/// Text to calibrate on where none is given: fairy tales, descriptions, dialogue, several languages
/// and code.
pub const GENERAL: &str = include_str!("general.txt");
/// Tensor of the calibration text's tokens, all sequences in a row.
const TOKENS: &str = "tokens";
/// Tensor of the lengths of the sequences.
const LENGTHS: &str = "lengths";

/// What to calibrate on.
#[derive(Clone, Debug)]
pub struct CalibrateOptions {
    /// Tokens at most.
    pub tokens: usize,
    /// Tokens of a sequence; `None`: 2048, or the model's context when that is shorter.
    pub length: Option<usize>,
    /// BOS, separator and prefix space of a text.
    pub text: EvalOptions,
    /// Seed of the text that the model writes when none is given.
    pub seed: u64,
    /// Most memory to use beside the memory-mapped checkpoint.
    pub max_memory: Option<Bytes>,
    /// Replace an existing directory.
    pub force: bool,
    /// Continue an interrupted run.
    pub resume: bool,
    /// Who collects the moments, if not this process.
    pub dealt: Option<Arc<dyn Dealt>>,
}

/// Sequences to calibrate on, unless another number of tokens is asked for.
const SEQUENCES: usize = 128;
/// Tokens of a sequence, unless another is asked for or the model's context is shorter.
const LENGTH: usize = 2048;
/// Tokens to calibrate on at most when a text is given: 128 sequences of 2048.
pub const TOKENS_OF_TEXT: usize = SEQUENCES * LENGTH;

/// Tokens that the model writes when no text is given: 128 sequences, of 2048 tokens where the
/// context allows.
#[must_use]
pub fn tokens_written(length: usize) -> usize {
    SEQUENCES * length
}

/// Tokens of a sequence, unless another number is asked for: 2048, or the model's context when that
/// is shorter.
#[must_use]
pub fn length(config: &fracbit_io::ModelConfig) -> usize {
    LENGTH.min(config.max_position_embeddings)
}

impl CalibrateOptions {
    /// The usual ones, for this many tokens.
    #[must_use]
    pub fn new(tokens: usize) -> Self {
        Self {
            tokens,
            length: None,
            text: EvalOptions::default(),
            seed: 0,
            max_memory: None,
            force: false,
            resume: false,
            dealt: None,
        }
    }
}

/// What is known of one input.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct InputReport {
    /// Channels.
    pub channels: usize,
    /// Channels that were zero at every token.
    pub dead: usize,
    /// Mean square of a channel.
    pub mean_square: f64,
    /// Rank of the moments at most: tokens, or live channels. Below `channels` they are singular.
    pub rank: usize,
}

/// The document `calibration.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CalibrationInfo {
    /// [`CALIBRATION_VERSION`].
    pub calibration_version: u32,
    /// Content hash of the checkpoint.
    pub source_hash: String,
    /// Where the text came from, in words.
    pub text: String,
    /// Tokens.
    pub tokens: usize,
    /// Sequences they make up.
    pub sequences: usize,
    /// Every input by name.
    pub inputs: BTreeMap<String, InputReport>,
}

/// Name of the means of an attention's input.
fn means_name(block: usize) -> String {
    format!("model.layers.{block}.self_attn.means")
}

/// Name of the moments of a block's input.
fn input_name(block: usize, input: BlockInput) -> String {
    let input = match input {
        BlockInput::Attention => "self_attn",
        BlockInput::Output => "self_attn.o_proj",
        BlockInput::Mlp => "mlp",
        BlockInput::Down => "mlp.down_proj",
    };
    format!("model.layers.{block}.{input}.moments")
}

/// The inputs of a block that have moments. Down of experts reads what each expert makes of the few
/// tokens that it gets: moments of all together say nothing of one, and those of each would take as
/// much room as the model. Sequential quantization collects the latter as it goes.
fn inputs(config: &fracbit_io::ModelConfig) -> impl Iterator<Item = BlockInput> + use<> {
    let experts = config.experts.is_some();
    BlockInput::ALL.into_iter().filter(move |&input| !(experts && input == BlockInput::Down))
}

/// Name of the moments of the head's input.
const HEAD_INPUT: &str = "lm_head.moments";

/// Peak memory beside the memory-mapped checkpoint and the scratch file: the moments of a block,
/// twice where there are several shards, and a shard's on its way from a worker; one sequence on
/// its way through it, and the moments on their way to the disk; or the caches of the sequences
/// that the model writes before, if it does.
#[must_use]
pub fn memory(config: &fracbit_io::ModelConfig, options: &CalibrateOptions, written: bool) -> Bytes {
    let length = options.length.unwrap_or(self::length(config));
    let (h, q, f) = (config.hidden_size, config.q_dim(), config.intermediate_size);
    let moments = Moments::memory(h) * 2 + Moments::memory(q) + Moments::memory(f);
    let several = if options.tokens > collect::SHARD { moments } else { 0 };
    let sent = if options.dealt.is_some() { moments / 2 } else { 0 };
    let moments = moments + several + sent;
    let widest = h.max(q).max(f) as u64;
    let sequence =
        4 * (length as u64 * (h as u64 + 2 * config.kv_dim() as u64) + 256 * (4 * h + 2 * q + 2 * f) as u64);
    let writing = if written { written::memory(config, length) } else { 0 };
    Bytes((moments + 2 * widest * (widest + 1) + sequence).max(writing))
}

/// Collects the moments of a model's inputs into the directory `out`. `text` is the text and its
/// name; without it the model writes one.
///
/// # Errors
/// When the model cannot be run, the text holds no two tokens, the memory or the disk does not
/// suffice, or the directory cannot be written; what was finished by then is kept for `resume`.
pub fn calibrate(
    opened: &Opened,
    text: Option<(&str, &Path)>,
    out: &Path,
    options: &CalibrateOptions,
    progress: &dyn Progress,
) -> Result<CalibrationInfo, Error> {
    let source = opened.source(RotationMode::None, 0)?;
    let limit = opened.config.max_position_embeddings;
    let length = options.length.unwrap_or(self::length(&opened.config));
    if length < 2 || length > limit {
        let rule = format!("should be 2 to {limit} for this model, got {length}");
        return Err(Error::Option { option: "--ctx", rule });
    }
    if options.tokens < 2 {
        let rule = format!("should be at least 2, got {}", options.tokens);
        return Err(Error::Option { option: "--tokens", rule });
    }
    let needed = memory(&opened.config, options, text.is_none());
    require_memory("calibration of this model", needed, options.max_memory)?;
    let source_hash = opened.checkpoint.content_hash();
    let origin = match text {
        Some((text, path)) => text_origin(text, path),
        None => format!("written by the model, seed {}", options.seed),
    };
    let key = json!({
        "calibrate": env!("CARGO_PKG_VERSION"), "source": source_hash, "text": origin, "tokens": options.tokens,
        "length": length, "bos": options.text.bos, "separator": options.text.separator,
        "drop_prefix_space": options.text.drop_prefix_space,
    })
    .to_string();
    let overwrite = if options.force { Overwrite::Holding(CALIBRATION_FILE) } else { Overwrite::No };
    let mut dir = match OutputDir::resumable(out, overwrite, &key, options.resume)? {
        Resumable::New(dir) => dir,
        Resumable::Continued(dir) => dir,
        Resumable::Finished(path) => return Ok(Calibration::open(&path)?.info),
    };
    let written = dir.scratch(TOKENS);
    let sequences = match text {
        Some((text, path)) => text_sequences(opened, text, path, options.tokens, length, &options.text)?,
        None => match Sequences::read(&written) {
            Some(kept) => kept,
            None => {
                let model = Model::from_source(&source)?.with_kernels(&kernels()?);
                progress.stage("writing a text to calibrate on", options.tokens as u64);
                let made = written::write(&model, options.tokens, length, options.seed, progress)?;
                made.save(&written)?;
                dir.keep();
                made
            }
        },
    };

    let specs = tensor_specs(&opened.config, &sequences);
    let metadata = [("format".to_owned(), "fracbit-calibration".to_owned())].into();
    let hidden = sequences.tokens() as u64 * opened.config.hidden_size as u64 * 4;
    let root = dir.scratch("");
    let mut writer = ShardWriter::new(&mut dir, specs, MAX_SHARD, &metadata)?;
    let steps = writer.resume()?;
    let mut inputs: BTreeMap<String, InputReport> = BTreeMap::new();
    for step in &steps {
        let found: BTreeMap<String, InputReport> = serde_json::from_value(step.clone())
            .map_err(|e| Error::Calibration { path: out.to_owned(), rule: format!("journal: {e}") })?;
        inputs.extend(found);
    }
    writer.check_space(if options.dealt.is_none() { 2 * hidden } else { 0 })?;
    if steps.is_empty() {
        writer.write(TOKENS, &u32_bytes(&sequences.all()))?;
        writer.write(LENGTHS, &u32_bytes(&sequences.lengths()))?;
    }
    let blocks = opened.config.num_hidden_layers();
    let shards = collect::shards(&sequences);
    let mut collecting = match &options.dealt {
        Some(dealt) => {
            let job = Job::collecting(
                &source,
                CollectJob {
                    source_hash: source_hash.clone(),
                    tokens: sequences.all(),
                    lengths: sequences.lengths(),
                    instructions: collect::instructions()?,
                    shards: shards.len(),
                },
            )?;
            dealt.begin(&job, steps.len() * shards.len(), (blocks + 1) * shards.len())?;
            Collects::There(dealt.as_ref())
        }
        None => Collects::Here(hidden_before(&source, &sequences, &root, steps.len(), progress)?),
    };
    progress.stage("calibrating", (blocks * sequences.tokens()) as u64);
    progress.advance((steps.len().min(blocks) * sequences.tokens()) as u64);
    for index in steps.len()..=blocks {
        let Collected { moments, sums } =
            collecting.collect(&source, index, (&sequences, &shards), progress)?;
        let mut step = BTreeMap::new();
        let names = if index < blocks {
            self::inputs(&opened.config).map(|input| input_name(index, input)).collect()
        } else {
            vec![HEAD_INPUT.to_owned()]
        };
        for (name, moments) in names.into_iter().zip(moments) {
            step.insert(name.clone(), store(&mut writer, &name, &moments)?);
        }
        if index < blocks {
            #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "means in f32")]
            let means = sums.iter().map(|sum| (sum / sequences.tokens().max(1) as f64) as f32);
            writer.write(&means_name(index), &means.flat_map(f32::to_le_bytes).collect::<Vec<u8>>())?;
        }
        writer.checkpoint(json!(step))?;
        collecting.advance()?;
        inputs.append(&mut step);
    }
    writer.finish()?;
    let info = CalibrationInfo {
        calibration_version: CALIBRATION_VERSION,
        source_hash,
        text: origin,
        tokens: sequences.tokens(),
        sequences: sequences.len(),
        inputs,
    };
    let document = serde_json::to_string_pretty(&info).expect("plain data serializes") + "\n";
    dir.write_file(CALIBRATION_FILE, document.as_bytes())?;
    dir.write_manifest(json!({ "tool": format!("fracbit {}", env!("CARGO_PKG_VERSION")) }))?;
    dir.commit()?;
    Ok(info)
}

/// A text in words: the name of its file, and its hash.
#[must_use]
pub fn text_origin(text: &str, path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    format!("{name} (blake3 {})", blake3::hash(text.as_bytes()).to_hex())
}

/// Sequences of `length` tokens of a text, `tokens` in all at most.
pub(crate) fn text_sequences(
    opened: &Opened,
    text: &str,
    path: &Path,
    tokens: usize,
    length: usize,
    options: &EvalOptions,
) -> Result<Sequences, Error> {
    // A window for evaluation is one token longer than its context.
    let options = EvalOptions { ctx: Some(length - 1), ..options.clone() };
    let windows = windows_of_tokens(opened, text, path, &options, tokens)?;
    let mut left = tokens;
    let mut kept = Vec::new();
    for mut window in windows {
        window.truncate(left);
        left -= window.len();
        if window.is_empty() {
            break;
        }
        kept.push(window);
    }
    Ok(Sequences::new(kept))
}

fn tensor_specs(config: &fracbit_io::ModelConfig, sequences: &Sequences) -> Vec<TensorSpec> {
    let spec = |name: String, dtype, len| TensorSpec { name, dtype, shape: vec![len] };
    let triangle = |name, n: usize| spec(name, Dtype::F32, n * (n + 1) / 2);
    let mut specs = vec![
        spec(TOKENS.to_owned(), Dtype::U32, sequences.tokens()),
        spec(LENGTHS.to_owned(), Dtype::U32, sequences.len()),
    ];
    for block in 0..config.num_hidden_layers() {
        for input in inputs(config) {
            let n = LinearId::Layer(block, input.reader()).shape(config).cols;
            specs.push(triangle(input_name(block, input), n));
        }
        specs.push(spec(means_name(block), Dtype::F32, config.hidden_size));
    }
    specs.push(triangle(HEAD_INPUT.to_owned(), config.hidden_size));
    specs
}

/// Who runs the text through the blocks.
enum Collects<'a> {
    /// This process, the hidden states being in its files.
    Here(Stream<'a>),
    /// Others, shard by shard.
    There(&'a dyn Dealt),
}

impl Collects<'_> {
    /// Everything that is collected of block `index`, or of the head's input behind the last.
    fn collect(
        &mut self,
        source: &WeightSource,
        index: usize,
        (sequences, shards): (&Sequences, &[Range<usize>]),
        progress: &dyn Progress,
    ) -> Result<Collected, Error> {
        let config = source.config();
        let last = index == config.num_hidden_layers();
        let ends = |done| shards.iter().any(|shard| shard.end == done);
        let mut all = None;
        match self {
            Self::Here(stream) if last => {
                let (mut next, mut done) = (Collected::new(config, index), 0);
                stream.each(|x| {
                    next.add_head(source, x)?;
                    done += 1;
                    if !ends(done) {
                        return Ok(());
                    }
                    Collected::join(&mut all, mem::replace(&mut next, Collected::new(config, index)))
                })?;
            }
            Self::Here(stream) => {
                let collector = Collector::new(source, index)?;
                stream.through(&collector.block, progress, |done| {
                    if ends(done) { Collected::join(&mut all, collector.take()) } else { Ok(()) }
                })?;
            }
            Self::There(dealt) => {
                for (at, shard) in shards.iter().enumerate() {
                    let at = index * shards.len() + at;
                    let part = Part::from_bytes(&dealt.take(at)?, at)?;
                    Collected::join(&mut all, Collected::of_part(part, config, index)?)?;
                    if !last {
                        let own = sequences.iter().skip(shard.start).take(shard.len());
                        progress.advance(own.map(|s| s.len() as u64).sum());
                    }
                }
            }
        }
        Ok(all.expect("a text has two tokens at least"))
    }

    fn advance(&mut self) -> Result<(), Error> {
        match self {
            Self::Here(stream) => stream.advance(),
            Self::There(_) => Ok(()),
        }
    }
}

/// The hidden states before block `at`: those that an interrupted run left, or made anew where it
/// had left them to others.
fn hidden_before<'a>(
    source: &WeightSource,
    sequences: &'a Sequences,
    root: &Path,
    at: usize,
    progress: &dyn Progress,
) -> Result<Stream<'a>, Error> {
    let blocks = source.config().num_hidden_layers();
    let kept = Stream::new(source, sequences, root, "hidden", at);
    if at > blocks || kept.is_kept() {
        return Ok(kept);
    }
    let mut stream = Stream::new(source, sequences, root, "hidden", 0);
    stream.begin(|tokens| Ok(source.embedding(tokens)?))?;
    if at > 0 {
        progress.stage("running the blocks that are done", (at * sequences.tokens()) as u64);
    }
    let kernels = kernels()?;
    for index in 0..at {
        let block = Block::from_source(source, index, |_| None)?.with_kernels(&kernels);
        stream.through(&block, progress, |_| Ok(()))?;
        stream.advance()?;
    }
    Ok(stream)
}

/// Writes the moments of an input, and says what is known of them.
fn store(writer: &mut ShardWriter<'_>, name: &str, moments: &Moments) -> Result<InputReport, Error> {
    let triangle = moments.triangle();
    let diagonal = || {
        (1..)
            .scan(0, |at, row| {
                *at += row;
                Some(*at - 1)
            })
            .map_while(|at| triangle.get(at))
    };
    let channels = diagonal().count();
    let dead = diagonal().filter(|&&d| d == 0.0).count();
    #[expect(clippy::cast_precision_loss, reason = "a mean")]
    let mean_square = diagonal().map(|&d| f64::from(d)).sum::<f64>() / channels.max(1) as f64;
    let rank = (channels - dead).min(usize::try_from(moments.rows()).unwrap_or(usize::MAX));
    let bytes: Vec<u8> = triangle.iter().flat_map(|v| v.to_le_bytes()).collect();
    writer.write(name, &bytes)?;
    Ok(InputReport { channels, dead, mean_square, rank })
}

fn u32_bytes(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// A calibration directory, opened.
#[derive(Debug)]
pub struct Calibration {
    /// Its document.
    pub info: CalibrationInfo,
    path: PathBuf,
    checkpoint: Checkpoint,
}

impl Calibration {
    /// Bands for a matrix of `rows` tokens, by how often they stand in the text behind its first
    /// `skip` tokens; `None` where there are too few of them, or of rows.
    ///
    /// # Errors
    /// When the tokens cannot be read.
    pub fn bands(&self, skip: usize, rows: usize) -> Result<Option<Bands>, Error> {
        let sequences = self.sequences()?;
        let mut counts = vec![0u32; rows];
        for &token in sequences.iter().flatten().skip(skip) {
            if let Some(count) = counts.get_mut(token as usize) {
                *count += 1;
            }
        }
        let tokens: usize = counts.iter().map(|&count| count as usize).sum();
        Ok(if tokens < FEW_FOR_BANDS { None } else { Bands::of(&counts) })
    }

    /// Opens a directory that [`calibrate`] wrote.
    ///
    /// # Errors
    /// When it is none, damaged, or of another version.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let bad = |rule: String| Error::Calibration { path: path.to_owned(), rule };
        let file = path.join(CALIBRATION_FILE);
        let text = std::fs::read_to_string(&file).map_err(|e| {
            bad(format!("should be a directory of `fracbit calibrate`: {CALIBRATION_FILE}: {e}"))
        })?;
        // Before the document is understood: damage is told as damage.
        let checkpoint = Checkpoint::open(path)?;
        let info: CalibrationInfo =
            serde_json::from_str(&text).map_err(|e| bad(format!("{CALIBRATION_FILE}: {e}")))?;
        if info.calibration_version != CALIBRATION_VERSION {
            let got = info.calibration_version;
            return Err(bad(format!("calibration_version should be {CALIBRATION_VERSION}, got {got}")));
        }
        Ok(Self { info, path: path.to_owned(), checkpoint })
    }

    /// Refuses the calibration of another checkpoint.
    ///
    /// # Errors
    /// When the hashes differ.
    pub fn require_source(&self, content_hash: &str) -> Result<(), Error> {
        if self.info.source_hash == content_hash {
            return Ok(());
        }
        let rule = format!(
            "should be of this checkpoint, whose hash is {content_hash}; it is of one with hash {}",
            self.info.source_hash
        );
        Err(Error::Calibration { path: self.path.clone(), rule })
    }

    /// The directory.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// What the calibration is, for keys and provenance: the hash over its files.
    #[must_use]
    pub fn digest(&self) -> &str {
        self.checkpoint.manifest().map_or("", |m| &m.blake3)
    }

    /// Mean squares of the channels of an input, in the basis of the checkpoint.
    ///
    /// # Errors
    /// When the moments are not there, damaged, or of another shape.
    pub fn mean_squares(&self, config: &fracbit_io::ModelConfig, place: Place) -> Result<Vec<f64>, Error> {
        let (name, id) = match place {
            Place::Block(block, input) => (input_name(block, input), LinearId::Layer(block, input.reader())),
            Place::Head => (HEAD_INPUT.to_owned(), LinearId::Head),
            Place::Keys(_) => {
                let rule = "keys have no moments of their own".to_owned();
                return Err(Error::Calibration { path: self.path.clone(), rule });
            }
        };
        let n = id.shape(config).cols;
        self.checkpoint.expect_shape(&name, &[n * (n + 1) / 2])?;
        self.checkpoint.verify_tensor(&name)?;
        let triangle = self.checkpoint.to_f32(&name)?;
        Ok((1..=n).map(|row| f64::from(triangle[row * (row + 1) / 2 - 1])).collect())
    }

    /// Means of the channels of an attention's input, in the basis of the checkpoint; `None` in a
    /// calibration of an older program.
    ///
    /// # Errors
    /// When they are damaged, or of another shape.
    pub fn means(&self, config: &fracbit_io::ModelConfig, block: usize) -> Result<Option<Vec<f32>>, Error> {
        let name = means_name(block);
        if !self.checkpoint.contains(&name) {
            return Ok(None);
        }
        self.checkpoint.expect_shape(&name, &[config.hidden_size])?;
        self.checkpoint.verify_tensor(&name)?;
        Ok(Some(self.checkpoint.to_f32(&name)?))
    }

    /// Moments of what a matrix reads, in the basis of `source`. `None` for an embedding that is
    /// not also the head, which reads nothing, and for the down projections of experts.
    ///
    /// # Errors
    /// When the moments are not there, damaged, or of another shape.
    pub fn moments(&self, source: &WeightSource, id: LinearId) -> Result<Option<Hessian>, Error> {
        let name = match id {
            LinearId::Embed if !source.config().tie_word_embeddings => return Ok(None),
            LinearId::Embed | LinearId::Head => HEAD_INPUT.to_owned(),
            LinearId::Layer(block, linear) => {
                let input = BlockInput::of(linear);
                if !inputs(source.config()).any(|has| has == input) {
                    return Ok(None);
                }
                input_name(block, input)
            }
        };
        let n = id.shape(source.config()).cols;
        self.checkpoint.expect_shape(&name, &[n * (n + 1) / 2])?;
        self.checkpoint.verify_tensor(&name)?;
        let triangle = self.checkpoint.to_f32(&name)?;
        let mut square = moments::square(n, &triangle).map_err(fracbit_model::Error::from)?;
        source.rotate_moments(id, &mut square)?;
        let moments = hessian(id, n, square, self.info.tokens as u64)?;
        // The head's half of a tied embedding; the other half is read a row at a time, where every
        // error counts alike.
        let tied = id == LinearId::Embed;
        Ok(Some(if tied { moments.with_damping(TIED_DAMPING) } else { moments }))
    }

    /// Sensitivities for a plan that is rounded with this calibration: every coefficient times what
    /// feedback leaves of the error of its matrix in trellis codes. What was measured with this
    /// calibration knows better and stays as it is.
    ///
    /// # Errors
    /// As for [`Calibration::moments`].
    pub fn sensitivities(
        &self,
        measured: &Sensitivities,
        source: &WeightSource,
        progress: &dyn Progress,
    ) -> Result<Sensitivities, Error> {
        let mut adjusted = measured.clone();
        if !self.digest().is_empty() && measured.protocol.contains(self.digest()) {
            return Ok(adjusted);
        }
        let ids: Vec<LinearId> = LinearId::all(source.config()).collect();
        progress.stage("factoring input moments", ids.len() as u64);
        let mut last: Option<(LinearId, f64)> = None;
        for id in ids {
            let reader = first_reader(id);
            let left = match last {
                Some((of, left)) if of == reader => left,
                _ => match self.moments(source, id)? {
                    Some(h) => h
                        .left(TILE_COLS)
                        .map_err(|source| Error::Moments { matrix: id.to_string(), source })?,
                    None => 1.0,
                },
            };
            last = Some((reader, left));
            for (name, fit) in &mut adjusted.layers {
                if bands::parse_name(name).is_some_and(|(of, _)| of == id) {
                    fit.a *= left;
                }
            }
            progress.advance(1);
        }
        adjusted.protocol.push_str(", times what feedback leaves of the error");
        Ok(adjusted)
    }

    /// The tokens that were calibrated on.
    ///
    /// # Errors
    /// When they are not there or damaged.
    pub fn sequences(&self) -> Result<Sequences, Error> {
        let read = |name: &str| -> Result<Vec<u32>, Error> {
            let view = self.checkpoint.tensor(name)?;
            self.checkpoint.verify_tensor(name)?;
            if view.dtype != Dtype::U32 {
                let rule = format!("`{name}` should be of dtype U32, got {}", view.dtype);
                return Err(Error::Calibration { path: self.path.clone(), rule });
            }
            Ok(view.bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect())
        };
        Sequences::cut(&read(TOKENS)?, &read(LENGTHS)?).ok_or_else(|| {
            let rule = "the lengths of the sequences should add up to the tokens".to_owned();
            Error::Calibration { path: self.path.clone(), rule }
        })
    }
}

/// The first of the matrices that share the input of `id`.
pub(crate) fn first_reader(id: LinearId) -> LinearId {
    match id {
        LinearId::Layer(block, linear) => LinearId::Layer(block, BlockInput::of(linear).reader()),
        LinearId::Embed | LinearId::Head => id,
    }
}

/// The moments of a matrix's input, means of so many rows, ready for feedback.
pub(crate) fn hessian(id: LinearId, n: usize, square: Vec<f32>, rows: u64) -> Result<Hessian, Error> {
    let moments =
        Hessian::new(n, square).map_err(|source| Error::Moments { matrix: id.to_string(), source })?;
    Ok(moments.of_rows(rows))
}
