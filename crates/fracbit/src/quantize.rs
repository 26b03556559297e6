//! From a checkpoint and a plan to a model directory.
//!
//! One matrix at a time: read, rotate, scale, round, pack, write. Peak memory is about three copies in f32 of the
//! largest matrix, whatever the size of the model. The directory gets its final name only when everything in it is
//! on disk. Same checkpoint, plan and seed give the same bytes at any thread count.

use crate::{
    Error, Progress,
    directory::{self, QuantizationConfig, codebook_names, packed_names},
    plan::{Inventory, Plan, Storage},
};
use fracbit_base::{Bytes, Shape};
use fracbit_io::{Dtype, MAX_SHARD, OutputDir, Overwrite, ShardWriter, TensorSpec};
use fracbit_model::{LinearId, WeightSource};
use half::f16;
use serde::Serialize;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Files of the source that go along unchanged when present.
const COPIED: [&str; 8] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
];

/// How to write the directory.
#[derive(Clone, Debug)]
pub struct QuantizeOptions {
    /// Replace an existing directory.
    pub force: bool,
    /// The command line, for the provenance.
    pub command: String,
    /// Where the source is, for the provenance.
    pub source: String,
    /// Content hash of the source, for the provenance.
    pub source_hash: String,
}

/// What one matrix became.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayerReport {
    /// Module name.
    pub name: String,
    /// Scheme.
    pub scheme: Storage,
    /// Measured `|W - W'|^2 / |W|^2`.
    pub relative_error: f64,
    /// Sensitivity times measured error.
    pub loss: f64,
}

/// What was written.
#[derive(Clone, Debug, Serialize)]
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
}

impl MemoryEstimate {
    /// For a plan on this many threads.
    #[must_use]
    pub fn new(plan: &Plan, threads: usize) -> Self {
        let largest = plan.layers.iter().map(|l| Shape::new(l.rows, l.cols).len() as u64).max().unwrap_or(0);
        let packed = plan.layers.iter().map(|l| l.bytes).max().unwrap_or(0);
        // A row of tiles in f32 (regularized and decoded) and the trellis tables of one search.
        let widest = plan.layers.iter().map(|l| l.cols as u64).max().unwrap_or(0);
        let search = threads as u64 * (2 * 16 * 4 * widest + (6 << 20));
        Self { matrix: Bytes(2 * 4 * largest), packed: Bytes(packed), search: Bytes(search) }
    }

    /// Everything together.
    #[must_use]
    pub fn total(&self) -> Bytes {
        self.matrix + self.packed + self.search
    }
}

/// Quantizes `source` by `plan` into `out`.
///
/// # Errors
/// When the plan does not fit the model, a tensor cannot be read or quantized (the message names it), or the directory
/// cannot be written. Nothing appears under the name `out` in that case.
pub fn quantize(
    source: &WeightSource,
    inventory: &Inventory,
    plan: &Plan,
    out: &Path,
    options: &QuantizeOptions,
    progress: &dyn Progress,
) -> Result<QuantizeReport, Error> {
    let mut plan = plan.clone();
    plan.fit_to(inventory)?;
    let overwrite = if options.force { Overwrite::Yes } else { Overwrite::No };
    let mut dir = OutputDir::create(out, overwrite)?;
    dir.check_space(plan.bytes + (16 << 20))?;

    let specs = tensor_specs(source, &plan)?;
    let metadata = [("format".to_owned(), "pt".to_owned())].into();
    let mut writer = ShardWriter::new(&mut dir, specs, MAX_SHARD, &metadata)?;
    for scheme in plan.codebooks() {
        let book = fracbit_quant::codebook(scheme).ok_or(Error::NoErrorEntry { scheme })?;
        let [entries, step] = codebook_names(scheme);
        writer.write(&entries, &book.entries().iter().flat_map(|e| e.to_le_bytes()).collect::<Vec<_>>())?;
        writer.write(&step, &book.step().to_le_bytes())?;
    }
    for id in directory::stored_norms(source.config(), plan.rotation) {
        writer.write(&id.weight_name(), &f32_bytes(&source.norm(id)?))?;
    }
    let weights: u64 = inventory.matrices.iter().map(|m| m.shape.len() as u64).sum();
    progress.stage("quantizing", weights);
    let mut layers = Vec::with_capacity(plan.layers.len());
    for (matrix, layer) in inventory.matrices.iter().zip(&plan.layers) {
        if let Some(bias) = source.bias(matrix.id)? {
            writer.write(&matrix.id.bias_name(), &f32_bytes(&bias))?;
        }
        let relative_error = write_matrix(source, matrix.id, layer.scheme, &plan, &mut writer, progress)?;
        layers.push(LayerReport {
            name: layer.name.clone(),
            scheme: layer.scheme,
            relative_error,
            loss: layer.sensitivity * relative_error,
        });
    }
    writer.finish()?;

    let mut config = source.config().raw.clone();
    let block = serde_json::to_value(QuantizationConfig::new(&plan)).expect("plain data serializes");
    config.insert("quantization_config".to_owned(), block);
    dir.write_file("config.json", pretty(&Value::Object(config)).as_bytes())?;
    dir.write_file(directory::PLAN_FILE, pretty(&json!(plan)).as_bytes())?;
    for name in COPIED {
        let path = source.checkpoint().dir().join(name);
        if path.is_file() {
            dir.copy_file(&path)?;
        }
    }
    let predicted_loss = layers.iter().map(|l| l.loss).sum();
    let report = QuantizeReport {
        path: out.to_path_buf(),
        bytes: plan.bytes,
        bits_per_weight: plan.bits_per_weight,
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
    }))?;
    dir.commit()?;
    Ok(report)
}

/// Every tensor in the order in which it is written.
fn tensor_specs(source: &WeightSource, plan: &Plan) -> Result<Vec<TensorSpec>, Error> {
    let config = source.config();
    let spec = |name: String, dtype, shape: &[usize]| TensorSpec { name, dtype, shape: shape.to_vec() };
    let mut specs = Vec::new();
    for scheme in plan.codebooks() {
        let book = fracbit_quant::codebook(scheme).ok_or(Error::NoErrorEntry { scheme })?;
        let [entries, step] = codebook_names(scheme);
        specs.push(spec(entries, Dtype::I16, &[book.entries().len()]));
        specs.push(spec(step, Dtype::F32, &[1]));
    }
    for id in directory::stored_norms(config, plan.rotation) {
        specs.push(spec(id.weight_name(), Dtype::F32, &[id.width(config)]));
    }
    for (id, layer) in LinearId::all(config).zip(&plan.layers) {
        let shape = Shape::new(layer.rows, layer.cols);
        if id.has_bias(config) {
            specs.push(spec(id.bias_name(), Dtype::F32, &[shape.rows]));
        }
        match layer.scheme {
            Storage::F16 => specs.push(spec(id.weight_name(), Dtype::F16, &[shape.rows, shape.cols])),
            Storage::Packed(scheme) => {
                let [codes, scales, gain] = packed_names(id);
                let groups = shape.cols.div_ceil(plan.grouping().columns(shape.cols));
                specs.push(spec(codes, Dtype::U8, &[fracbit_format::Layout::new(scheme, shape).len()]));
                specs.push(spec(scales, Dtype::F16, &[shape.rows, groups]));
                specs.push(spec(gain, Dtype::F32, &[1]));
            }
        }
    }
    Ok(specs)
}

/// Stores one matrix and returns its relative squared error.
fn write_matrix(
    source: &WeightSource,
    id: LinearId,
    storage: Storage,
    plan: &Plan,
    writer: &mut ShardWriter<'_>,
    progress: &dyn Progress,
) -> Result<f64, Error> {
    let matrix = source.linear(id)?;
    match storage {
        Storage::F16 => {
            let rounded: Vec<f16> = matrix.data.iter().map(|&w| f16::from_f32(w)).collect();
            if let Some(at) = rounded.iter().position(|w| !w.is_finite()) {
                let rule = format!(
                    "weight {} is beyond half precision: quantize this matrix instead",
                    matrix.data[at]
                );
                return Err(Error::Packed {
                    path: source.checkpoint().dir().to_path_buf(),
                    tensor: id.weight_name(),
                    rule,
                });
            }
            let square = |x: f32| f64::from(x).powi(2);
            let error: f64 = matrix.data.iter().zip(&rounded).map(|(&w, r)| square(w - r.to_f32())).sum();
            let energy: f64 = matrix.data.iter().map(|&w| square(w)).sum();
            writer.write(&id.weight_name(), &f16_bytes(&rounded))?;
            progress.advance(matrix.data.len() as u64);
            Ok(if energy > 0.0 { error / energy } else { 0.0 })
        }
        Storage::Packed(scheme) => {
            let advance = |weights: usize| progress.advance(weights as u64);
            let packed =
                fracbit_quant::quantize(&matrix.data, matrix.shape, scheme, plan.grouping(), &advance)
                    .map_err(|source| Error::Tensor {
                        tensor: id.weight_name(),
                        shape: matrix.shape,
                        scheme,
                        source,
                    })?;
            let [codes, scales, gain] = packed_names(id);
            writer.write(&codes, &packed.codes)?;
            writer.write(&scales, &f16_bytes(&packed.scales))?;
            writer.write(&gain, &packed.gain.to_le_bytes())?;
            Ok(packed.relative_error)
        }
    }
}

fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn f16_bytes(values: &[f16]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
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
         | bytes of tensors | {} ({}) |\n| rotation | {:?}, seed {} |\n| sensitivities | {} |\n\
         | predicted rise of the loss | {:.4} nats per token |\n| made by | fracbit {}: `{}` |\n\n",
        options.source,
        options.source_hash,
        report.bits_per_weight,
        report.bytes,
        Bytes(report.bytes),
        plan.rotation,
        plan.seed,
        plan.objective,
        report.predicted_loss,
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
