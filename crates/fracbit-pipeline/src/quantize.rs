//! From a checkpoint and a plan to a model directory.
//!
//! One matrix at a time: read, rotate, scale, round, pack, write. Peak memory is about three copies
//! in f32 of the largest matrix, and with a calibration four of its input moments, whatever the
//! size of the model. The directory gets its final name only when everything in it is on disk. Same
//! checkpoint, plan, calibration and seed give the same bytes at any thread count, and whether or
//! not the run was interrupted.

use crate::{
    calibrate::Calibration,
    deal::{Dealt, Job, Part},
    groups,
    matrices::{LayerReport, Matrices, Rounds, f32_bytes},
    sequential,
};
use fracbit_base::{Bytes, Scheme, Shape};
use fracbit_format::{Codebook, SchemeSpec};
use fracbit_io::{
    Dtype, Gguf, MAX_SHARD, ModelConfig, OutputDir, Overwrite, Pooling, ShardWriter, TensorSpec, gguf,
    pooling::POOLING,
};
use fracbit_load::{
    Error, Opened, Progress,
    directory::{self, EMBEDDING_DIVISORS, FINAL_FACTORS, QuantizationConfig, codebook_names, plane_name},
    require_memory,
};
use fracbit_model::{LayerLinear, LinearId, WeightSource};
use fracbit_plan::{
    Error as PlanError,
    bands::Bands,
    inventory,
    plan::{self, Inventory, Plan, PlannedLayer, Storage},
};
use fracbit_quant::Rounders;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::Arc,
};

/// Bytes of trained codebooks where nothing is said.
const USUAL_CODEBOOK_BYTES: usize = 16;

/// Files of the source that go along unchanged when present: all that its texts are read and
/// written by.
fn beside_weights(dir: &Path) -> Vec<PathBuf> {
    let names = [fracbit_io::config::GENERATION_CONFIG].into_iter().chain(fracbit_io::tokenizer::FILES);
    let mut files: Vec<PathBuf> = names.map(|name| dir.join(name)).filter(|path| path.is_file()).collect();
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut ranks: Vec<PathBuf> =
        entries.filter(|p| p.extension().is_some_and(|e| e == "tiktoken")).collect();
    ranks.sort();
    files.append(&mut ranks);
    files
}

/// Most bytes that a quantized directory holds beside its tensors: the files that go along as they
/// are, exactly, and what is written about the weights (header, plan, configuration, card,
/// checksums), which takes 1.7 kB for each matrix of SmolLM2, more where schemes are nested, and is
/// reckoned at more than twice that.
///
/// # Errors
/// When a GGUF file does not hold the documents of a directory.
pub fn beside_tensors(source: &Opened) -> Result<u64, Error> {
    beside(source.checkpoint.path(), &source.config)
}

/// The same of a checkpoint at this path.
fn beside(from: &Path, config: &ModelConfig) -> Result<u64, Error> {
    const FOR_EACH: u64 = 4 << 10;
    const FOR_ALL: u64 = 64 << 10;
    let length = |path: &Path| std::fs::metadata(path).map_or(0, |m| m.len());
    let copied = if gguf::is_gguf(from) {
        Gguf::open(from)?.documents()?.iter().map(|(_, text)| text.len() as u64).sum()
    } else {
        beside_weights(from).iter().map(|path| length(path)).sum::<u64>()
            + length(&from.join(fracbit_io::config::CONFIG))
    };
    let matrices = LinearId::all(config).count() as u64;
    Ok(copied + FOR_EACH * matrices + FOR_ALL)
}

/// How to write the directory.
#[derive(Clone, Debug, Default)]
pub struct QuantizeOptions {
    /// Replace an existing directory.
    pub force: bool,
    /// The command line, for the provenance.
    pub command: String,
    /// Where the source is, for the provenance.
    pub source: String,
    /// Content hash of the source, for the provenance.
    pub source_hash: String,
    /// Moments of the layers' inputs: round for least error of their outputs.
    pub calibration: Option<Arc<Calibration>>,
    /// Run the calibration's text through the layers that are quantized already, round each for the
    /// inputs that it will get, and let it make up for their error.
    pub sequential: bool,
    /// Most memory to use beside the memory-mapped checkpoint.
    pub max_memory: Option<Bytes>,
    /// What searches for codes, and how thoroughly.
    pub rounders: Rounders,
    /// Bytes of the codebooks of a group-wise scheme, which are trained on the model: 16 (when
    /// nothing is said), 32 or 64.
    pub codebook_bytes: Option<usize>,
    /// Codebooks of group-wise schemes to use as they are; those of other schemes are trained.
    pub codebooks: Vec<Codebook>,
    /// Who rounds the matrices, if not this process.
    pub dealt: Option<Arc<dyn Dealt>>,
}

/// What was written.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct QuantizeReport {
    /// The finished directory.
    pub path: PathBuf,
    /// Bytes of tensors.
    pub bytes: u64,
    /// Stored bits per parameter.
    pub bits_per_weight: f64,
    /// Loss predicted from the measured errors.
    pub predicted_loss: f64,
    /// Every matrix.
    pub layers: Vec<LayerReport>,
}

/// Peak memory of a quantization, itemized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryEstimate {
    /// The largest matrix in f32, its rotated copy's scratch, and its decoded copy.
    pub matrix: Bytes,
    /// Its codes and scales.
    pub packed: Bytes,
    /// Working memory of the searches, all threads.
    pub search: Bytes,
    /// The largest input moments, and their factor while it is made; one after another, also those
    /// of two blocks in f32, of what they differ by and of the corrections.
    pub moments: Bytes,
}

impl MemoryEstimate {
    /// For a plan of a model on this many threads by such rounders, with or without a calibration,
    /// and with its layers quantized one after another or each alone.
    #[must_use]
    pub fn new(
        plan: &Plan,
        inventory: &Inventory,
        threads: usize,
        rounders: &Rounders,
        calibrated: bool,
        sequential: bool,
    ) -> Self {
        let mut whole = BTreeMap::new(); // a band is cut from its whole matrix
        for layer in &plan.layers {
            *whole.entry(layer.id()).or_insert(0) += (layer.rows * layer.cols) as u64;
        }
        let largest = whole.into_values().max().unwrap_or(0);
        let packed = plan.layers.iter().map(|l| l.bytes).max().unwrap_or(0);
        let widest = plan.layers.iter().map(|l| l.cols).max().unwrap_or(0);
        // The trellis tables of a search for every thread, beside the rows that are rounded.
        let memory = |l: &PlannedLayer| {
            let shape = Shape::new(l.rows, l.cols);
            fracbit_quant::working_memory(shape, l.grouping(), calibrated, threads).0
        };
        let mut search = plan.layers.iter().map(memory).max().unwrap_or(0) + threads as u64 * (6 << 20);
        if calibrated && rounders.are_provided() {
            search += 4 * largest; // all its rows go together, and so do their errors
        }
        let widest = widest as u64;
        // f32 moments and factor, and f64 while factoring.
        let mut moments = if calibrated { 16 * widest * widest } else { 0 };
        if sequential {
            let blocks = inventory.matrices.iter().filter(|m| m.id.is_layer());
            let count = blocks.clone().map(|m| m.id).collect::<BTreeSet<_>>().len() as u64;
            let weights: u64 = blocks.map(|m| m.shape.len() as u64).sum();
            let block = weights * LayerLinear::ALL.len() as u64 / count.max(1);
            moments += 2 * 4 * block + 8 * widest * widest + 3 * 4 * largest;
            let down = |m: &&plan::Matrix| matches!(m.id, LinearId::Layer(_, LayerLinear::Down));
            let experts = inventory.matrices.iter().filter(|m| m.pieces > 1).filter(down);
            let of = |m: &plan::Matrix| {
                let one = Shape::new(m.shape.rows / m.pieces, m.shape.cols);
                sequential::experts_memory(m.pieces, one)
            };
            moments += experts.map(of).max().unwrap_or(0);
        }
        // What the planes of a nested matrix leave is kept beside it, and they are joined at the
        // end.
        let nested = |l: &PlannedLayer| matches!(l.scheme, Storage::Packed(scheme) if scheme.nested());
        let more = u64::from(plan.layers.iter().any(nested));
        Self {
            matrix: Bytes((2 + more) * 4 * largest),
            packed: Bytes((1 + more) * packed),
            search: Bytes(search),
            moments: Bytes(moments),
        }
    }

    /// Everything together.
    #[must_use]
    pub fn total(&self) -> Bytes {
        self.matrix + self.packed + self.search + self.moments
    }
}

/// Quantizes `source` by `plan` into `out`.
///
/// # Errors
/// When the plan does not fit the model, a tensor cannot be read or quantized (the message names
/// it), or the directory cannot be written. Nothing appears under the name `out` in that case.
pub fn quantize(
    source: &WeightSource,
    inventory: &Inventory,
    plan: &Plan,
    out: &Path,
    options: &QuantizeOptions,
    progress: &dyn Progress,
) -> Result<QuantizeReport, Error> {
    let overwrite = if options.force { Overwrite::Yes } else { Overwrite::No };
    quantize_in(OutputDir::create(out, overwrite)?, source, inventory, plan, options, progress)
}

/// [`quantize`] into a directory that was begun already. A resumable one records every finished
/// matrix (with [`QuantizeOptions::sequential`] every finished block), and one that is continued
/// goes on behind the last of them.
///
/// # Errors
/// As for [`quantize`]; also when the directory was begun with another plan.
pub fn quantize_in(
    mut dir: OutputDir,
    source: &WeightSource,
    inventory: &Inventory,
    plan: &Plan,
    options: &QuantizeOptions,
    progress: &dyn Progress,
) -> Result<QuantizeReport, Error> {
    let out = dir.final_path().to_owned();
    let mut plan = plan.clone();
    plan.fit_to(inventory)?;
    let of =
        |rotation, seed, smoothing| (rotation, seed, if smoothing { "smoothed" } else { "not smoothed" });
    let want = of(plan.rotation, plan.seed, plan.smoothing);
    let got = of(source.rotations().mode(), source.rotations().seed(), !source.smoothing().is_empty());
    if want != got {
        let rule = format!(
            "it is for weights rotated {} with seed {}, {}, got {}, {}, {}",
            want.0, want.1, want.2, got.0, got.1, got.2
        );
        return Err(PlanError::Plan { origin: out.display().to_string(), rule }.into());
    }
    if options.sequential && options.calibration.is_none() {
        let rule = "needs a calibration, for its text".to_owned();
        return Err(Error::Option { option: "--sequential", rule });
    }
    if options.dealt.is_some() && (options.sequential || !options.codebooks.is_empty()) {
        let rule =
            "deals matrices that are rounded for themselves: layer by layer each waits for those before it";
        return Err(Error::Option { option: "--ray", rule: rule.to_owned() });
    }
    if let Some(calibration) = &options.calibration {
        calibration.require_source(&options.source_hash)?;
    }
    // What is not done of it is said before hours of work.
    let pooling = Pooling::read(source.checkpoint().path(), source.config().hidden_size)?;
    let inventory = &*inventory.with_bands(&plan.bands)?;
    let estimate = MemoryEstimate::new(
        &plan,
        inventory,
        rayon::current_num_threads(),
        &options.rounders,
        options.calibration.is_some(),
        options.sequential,
    );
    require_memory("quantizing by this plan", estimate.total(), options.max_memory)?;

    let scratch = dir.scratch("");
    // A resumed run trains them again, to the same tables.
    let trained = group_codebooks(source, &plan, options, progress)?;
    let specs = tensor_specs(source, &plan, &trained)?;
    let metadata = [("format".to_owned(), "pt".to_owned())].into();
    let mut writer = ShardWriter::new(&mut dir, specs, MAX_SHARD, &metadata)?;
    let steps = writer.resume()?;
    let begun = json!({ "plan": blake3::hash(json!(plan).to_string().as_bytes()).to_hex().to_string() });
    if steps.first().is_some_and(|step| *step != begun) {
        let rule =
            "the interrupted run had another plan: delete what it left, or give it the same".to_owned();
        return Err(PlanError::Plan { origin: out.display().to_string(), rule }.into());
    }
    writer.check_space(beside(source.checkpoint().path(), source.config())?)?;
    if steps.is_empty() {
        writer.checkpoint(begun)?;
    }
    let mut layers: Vec<LayerReport> = Vec::with_capacity(plan.layers.len());
    for step in steps.iter().skip(1) {
        let done: Vec<LayerReport> = serde_json::from_value(step.clone()).map_err(|e| PlanError::Plan {
            origin: scratch.display().to_string(),
            rule: format!("journal: {e}"),
        })?;
        layers.extend(done);
    }
    if layers.is_empty() {
        for scheme in plan.codebooks() {
            let book = stored_codebook(&trained, scheme)?;
            let [entries, step] = codebook_names(scheme);
            let bytes: Vec<u8> = book.entries().iter().flat_map(|e| e.to_le_bytes()).collect();
            writer.write(&entries, &bytes)?;
            writer.write(&step, &book.step().to_le_bytes())?;
        }
        for id in inventory::stored_floats(source.config(), plan.rotation) {
            writer.write(&id.weight_name(), &f32_bytes(&source.floats(id)?))?;
        }
        for (id, bands) in in_bands(&plan) {
            writer.write(&directory::bands_name(id), &bands.to_bytes())?;
        }
        if let Some(divisors) = source.rotations().embedding_divisors() {
            writer.write(EMBEDDING_DIVISORS, &f32_bytes(divisors))?;
        }
        if let Some(factors) = source.final_factors()? {
            writer.write(FINAL_FACTORS, &f32_bytes(&factors))?;
        }
    }
    let weights =
        |count: usize| inventory.matrices[..count].iter().map(|m| m.shape.len() as u64).sum::<u64>();
    progress.stage("quantizing", weights(inventory.matrices.len()));
    progress.advance(weights(layers.len()));
    let rounds = Rounds {
        source,
        plan: &plan,
        progress,
        rounders: &options.rounders,
        codebooks: &trained,
        moments: None,
    };
    let mut matrices = Matrices { rounds, writer };
    let todo: Vec<(LinearId, PlannedLayer)> =
        inventory.matrices.iter().map(|m| m.id).zip(plan.layers.iter().cloned()).collect();
    match (&options.calibration, &options.dealt) {
        (calibration, Some(dealt)) => {
            let (first, effort) = (layers.len(), options.rounders.effort());
            let bytes = options.codebook_bytes.unwrap_or(USUAL_CODEBOOK_BYTES);
            let calibration = calibration.as_ref().map(|c| (c.path(), c.digest()));
            let job = Job::rounding(source, &plan, calibration, effort, bytes)?;
            dealt.begin(&job, first, todo.len())?;
            for (index, (id, layer)) in todo.iter().enumerate().skip(first) {
                let part = Part::take(&**dealt, (source, *id), index)?;
                for (name, bytes) in &part.tensors {
                    matrices.writer.write(name, bytes)?;
                }
                let report = LayerReport::new(layer, part.relative_error);
                matrices.writer.checkpoint(json!([report]))?;
                layers.push(report);
                progress.advance((layer.rows * layer.cols) as u64);
            }
        }
        (Some(calibration), None) if options.sequential => {
            sequential::quantize(&mut matrices, calibration, &todo, &scratch, &mut layers)?;
        }
        (calibration, None) => {
            for (id, layer) in &todo[layers.len()..] {
                if let Some(calibration) = calibration {
                    matrices.rounds.calibrated(calibration, *id)?;
                }
                let (report, _) = matrices.write(*id, layer, None)?;
                matrices.writer.checkpoint(json!([report]))?;
                layers.push(report);
            }
        }
    }
    matrices.writer.finish()?;

    let mut config = source.config().raw.clone();
    let block = serde_json::to_value(QuantizationConfig::new(&plan, source)).expect("plain data serializes");
    config.insert("quantization_config".to_owned(), block);
    // Another program's, of weights that were whole.
    config.shift_remove("quantization");
    dir.write_file("config.json", pretty(&Value::Object(config)).as_bytes())?;
    dir.write_file(directory::PLAN_FILE, pretty(&json!(plan)).as_bytes())?;
    let from = source.checkpoint().path();
    if gguf::is_gguf(from) {
        for (name, text) in Gguf::open(from)?.documents()? {
            if name != fracbit_io::config::CONFIG {
                dir.write_file(name, text.as_bytes())?;
            }
        }
    } else {
        for path in beside_weights(from) {
            dir.copy_file(&path)?;
        }
        if let Some(pooling) = pooling {
            dir.write_file(POOLING, pretty(&json!(pooling)).as_bytes())?;
        }
    }
    let predicted_loss = layers.iter().map(|l| l.loss).sum();
    // The plan counts built-in codebooks.
    let planned =
        |scheme: &Scheme| fracbit_quant::codebook(*scheme).map_or(0, |b| 2 * b.entries().len() as u64);
    let bytes = trained
        .iter()
        .fold(plan.bytes, |bytes, (scheme, book)| bytes + 2 * book.entries().len() as u64 - planned(scheme));
    let report = QuantizeReport {
        path: out,
        bytes,
        #[expect(clippy::cast_precision_loss, reason = "a ratio")]
        bits_per_weight: plan.bits_per_weight * (bytes as f64 / plan.bytes as f64),
        predicted_loss,
        layers,
    };
    dir.write_file("README.md", model_card(&plan, &report, options).as_bytes())?;
    dir.write_manifest(json!({
        "tool": format!("fracbit {}", env!("CARGO_PKG_VERSION")),
        "command": options.command,
        "source": options.source,
        "source_hash": options.source_hash,
        "seed": plan.seed,
        "calibration": options.calibration.as_ref().map(|c| json!({ "text": c.info.text, "tokens": c.info.tokens, "digest": c.digest() })),
        "sequential": options.sequential,
        "effort": options.rounders.effort().name(),
    }))?;
    dir.commit()?;
    Ok(report)
}

/// Tables of group-wise schemes: those given, and for the rest those trained on the model.
fn group_codebooks(
    source: &WeightSource,
    plan: &Plan,
    options: &QuantizeOptions,
    progress: &dyn Progress,
) -> Result<BTreeMap<Scheme, Codebook>, Error> {
    let given: BTreeMap<Scheme, Codebook> =
        options.codebooks.iter().map(|b| (b.scheme(), b.clone())).collect();
    let calibration = options.calibration.as_deref();
    let bytes = options.codebook_bytes.unwrap_or(USUAL_CODEBOOK_BYTES);
    let mut all = groups::train(source, plan, &given, calibration, bytes, progress)?;
    all.extend(given);
    Ok(all)
}

fn stored_codebook(codebooks: &BTreeMap<Scheme, Codebook>, scheme: Scheme) -> Result<&Codebook, Error> {
    codebooks
        .get(&scheme)
        .or_else(|| fracbit_quant::codebook(scheme))
        .ok_or(PlanError::NoErrorEntry { scheme }.into())
}

/// The matrices of a plan that are in bands of rows.
fn in_bands(plan: &Plan) -> impl Iterator<Item = (LinearId, &Bands)> {
    plan.bands.iter().filter_map(|(name, bands)| Some((name.parse().ok()?, bands)))
}

/// Every tensor in the order in which it is written.
fn tensor_specs(
    source: &WeightSource,
    plan: &Plan,
    codebooks: &BTreeMap<Scheme, Codebook>,
) -> Result<Vec<TensorSpec>, Error> {
    let config = source.config();
    let spec = |name: String, dtype, shape: &[usize]| TensorSpec { name, dtype, shape: shape.to_vec() };
    let mut specs = Vec::new();
    for scheme in plan.codebooks() {
        let book = stored_codebook(codebooks, scheme)?;
        let [entries, step] = codebook_names(scheme);
        specs.push(spec(entries, Dtype::I16, &[book.entries().len()]));
        specs.push(spec(step, Dtype::F32, &[1]));
    }
    for id in inventory::stored_floats(config, plan.rotation) {
        specs.push(spec(id.weight_name(), Dtype::F32, &id.dimensions(config)));
    }
    for (id, bands) in in_bands(plan) {
        specs.push(spec(directory::bands_name(id), Dtype::U8, &[Bands::bytes(bands.each().len())]));
    }
    if let Some(divisors) = source.rotations().embedding_divisors() {
        specs.push(spec(EMBEDDING_DIVISORS.to_owned(), Dtype::F32, &[divisors.len()]));
    }
    if directory::has_final_factors(source) {
        specs.push(spec(FINAL_FACTORS.to_owned(), Dtype::F32, &[config.hidden_size]));
    }
    for (id, layer) in plan.layers.iter().filter_map(|layer| Some((layer.id()?, layer))) {
        let shape = Shape::new(layer.rows, layer.cols);
        if id.has_bias(config) && layer.band().is_none_or(|band| band == 0) {
            specs.push(spec(id.bias_name(), Dtype::F32, &[id.shape(config).rows]));
        }
        match layer.scheme {
            Storage::F16 => specs.push(spec(id.weight_name(), Dtype::F16, &[shape.rows, shape.cols])),
            Storage::Packed(scheme) => {
                for plane in SchemeSpec::of(scheme).planes {
                    let name = plane_name(id, layer.band(), plane.name);
                    let dims = plane.dims(scheme, shape, layer.grouping());
                    specs.push(spec(name, directory::dtype(plane.element), &dims));
                }
            }
        }
    }
    Ok(specs)
}

fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}

/// The README of the new directory.
fn model_card(plan: &Plan, report: &QuantizeReport, options: &QuantizeOptions) -> String {
    use std::fmt::Write as _;
    let mut card = String::from(
        "---\nlibrary_name: fracbit\ntags:\n- quantized\n- fracbit\n---\n\n# Quantized model\n\n",
    );
    let _ = write!(
        card,
        "| | |\n| --- | --- |\n| source | `{}` |\n| source hash (blake3) | `{}` |\n| bits per weight, everything counted | {:.3} |\n\
         | bytes of tensors | {} ({}) |\n| rotation | {}, seed {} |\n| sensitivities | {} |\n\
         | predicted rise of the loss | {:.4} nats per token |\n| calibrated on | {} |\n| made by | fracbit {}: `{}` |\n\n",
        options.source,
        options.source_hash,
        report.bits_per_weight,
        report.bytes,
        Bytes(report.bytes),
        plan.rotation,
        plan.seed,
        plan.objective,
        report.predicted_loss,
        options.calibration.as_ref().map_or_else(
            || "nothing".to_owned(),
            |c| format!(
                "{} tokens, {}{}",
                c.info.tokens,
                c.info.text,
                if options.sequential { ", sequentially" } else { "" }
            ),
        ),
        env!("CARGO_PKG_VERSION"),
        options.command,
    );
    card.push_str(
        "Measure it: `fracbit eval DIR --text FILE --baseline SOURCE`. Run it: `fracbit run DIR -p \"...\"`.\n\n\
         | matrix | scheme | relative squared error |\n| --- | --- | --- |\n",
    );
    for layer in &report.layers {
        let _ = writeln!(card, "| `{}` | {} | {:.5} |", layer.name, layer.scheme, layer.relative_error);
    }
    card
}

#[cfg(test)]
mod tests {
    use super::*;
    use fracbit_model::RotationMode;
    use fracbit_plan::{PlanOptions, Preset, Sensitivities, Target};

    #[test]
    fn scales_that_moments_couple_take_memory() {
        let config = Preset::named("llama-3-8b").unwrap().model_config().unwrap();
        let inventory = |rotation| Inventory::of_config(&config, rotation, String::new());
        let plan = |rotation| {
            let inventory = inventory(rotation);
            let sensitivities = Sensitivities::prior(&inventory, rotation);
            let options = PlanOptions { rotation, ..PlanOptions::new(Target::Bits(4.0)) };
            fracbit_plan::plan(&inventory, &sensitivities, &options).unwrap()
        };
        let [here, elsewhere] = [Rounders::default(), Rounders::provided(Box::new(|_| None))];
        let search_by = |rounders, rotation, calibrated| {
            MemoryEstimate::new(&plan(rotation), &inventory(rotation), 2, rounders, calibrated, false)
                .search
                .0
        };
        let search = |rotation, calibrated| search_by(&here, rotation, calibrated);
        // One scale for 64 of 14336 columns: every pair of them, for 256 rows on two threads.
        assert!(search(RotationMode::None, true) > 2 * 256 * 8 * 224 * 224);
        assert!(search(RotationMode::None, true) > search(RotationMode::Fold, true) + 50_000_000);
        assert_eq!(search(RotationMode::None, false), search(RotationMode::Fold, false));
        // A device rounds all rows of a matrix together, the head's too.
        let errors = |calibrated| {
            search_by(&elsewhere, RotationMode::Fold, calibrated) - search(RotationMode::Fold, calibrated)
        };
        assert_eq!((errors(true), errors(false)), (4 * 128_256 * 4096, 0));
    }
}
