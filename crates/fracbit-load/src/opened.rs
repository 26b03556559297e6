//! From a model directory, quantized or not, to a model that runs.

use crate::{
    Error,
    directory::{EMBEDDING_DIVISORS, FINAL_FACTORS, QuantizationConfig},
    foreign,
    reader::{Books, Reader},
};
use fracbit_base::Bytes;
use fracbit_format::PackedMatrixData;
use fracbit_io::{Checkpoint, Dtype, ModelConfig, Tokenizer};
use fracbit_kernels::{Kernels, PackedMatrix};
use fracbit_model::{
    FloatId, Linear, LinearId, Model, ModelBuilder, OnlineRotations, RotationMode, WeightSource,
};
use fracbit_plan::storage::Storage;
use std::{path::Path, sync::Arc};

/// The best kernels of this machine, capped by `FRACBIT_ISA`.
///
/// # Errors
/// When `FRACBIT_ISA` names no instruction set.
pub fn kernels() -> Result<Kernels, Error> {
    let mut kernels = Kernels::scalar();
    #[cfg(target_arch = "x86_64")]
    fracbit_kernels_x86::install(&mut kernels)?;
    #[cfg(target_arch = "aarch64")]
    fracbit_kernels_neon::install(&mut kernels)?;
    Ok(kernels)
}

/// A directory opened and understood, nothing loaded yet.
#[derive(Debug)]
pub struct Opened {
    /// Its tensors.
    pub checkpoint: Arc<Checkpoint>,
    /// Its configuration.
    pub config: ModelConfig,
    /// How it is quantized, if it is.
    pub quantization: Option<QuantizationConfig>,
    /// What another program's quantization left: weights that it rounded, or no more than its block
    /// in the configuration.
    leftover: Option<String>,
}

impl QuantizationConfig {
    /// What the runtime rotates and divides.
    pub(crate) fn rotations(
        &self,
        config: &ModelConfig,
        reader: &Reader<'_>,
    ) -> Result<OnlineRotations, Error> {
        let mut rotations = OnlineRotations::new(config, self.rotation, self.seed)?;
        if self.final_factors {
            let factors = reader.f32s(FINAL_FACTORS, config.hidden_size)?;
            rotations = rotations.with_final_factors(config, Some(factors))?;
        }
        if !self.embedding_divisors {
            return Ok(rotations);
        }
        let divisors = reader.f32s(EMBEDDING_DIVISORS, config.hidden_size)?;
        if let Some(at) = divisors.iter().position(|&by| by <= 0.0) {
            let rule = format!("number {at} should be positive, got {}", divisors[at]);
            return Err(reader.bad(EMBEDDING_DIVISORS, rule));
        }
        if self.rotation != RotationMode::Online || !config.tie_word_embeddings {
            let rule = "should be there for a tied embedding rotated online alone".to_owned();
            return Err(reader.bad(EMBEDDING_DIVISORS, rule));
        }
        Ok(rotations.with_embedding_divisors(Some(divisors))?)
    }
}

impl Opened {
    /// Opens a directory or a GGUF file and reads its configuration.
    ///
    /// # Errors
    /// When the directory is no model directory or the file no model; the message names the file
    /// and the rule.
    pub fn new(dir: &Path) -> Result<Self, Error> {
        let config = ModelConfig::from_dir(dir)?;
        let quantization = QuantizationConfig::read(&config, dir)?;
        let checkpoint = foreign::decoded(&config, Checkpoint::open(dir)?)?;
        let leftover = foreign::check(&config, &checkpoint)?;
        let checkpoint = Arc::new(checkpoint.parted(&config)?);
        Ok(Self { checkpoint, config, quantization, leftover })
    }

    /// What the directory holds or says that is not followed, a sentence each; nothing in it
    /// matters to the model.
    #[must_use]
    pub fn notes(&self) -> Vec<String> {
        let mut notes = self.config.notes.clone();
        notes.extend_from_slice(self.checkpoint.notes());
        notes.extend(self.leftover.clone());
        let source = if self.quantization.is_none() { self.source(RotationMode::None, 0).ok() } else { None };
        let count = self.config.num_hidden_layers();
        let layer = |name: &str| name.strip_prefix("model.layers.")?.split('.').next()?.parse::<usize>().ok();
        // A bias of zeros is as good as none.
        let nothing = |name: &str| name.ends_with(".bias") && self.checkpoint.is_zero(name).unwrap_or(false);
        let mut unused = source.as_ref().map(WeightSource::unused).unwrap_or_default();
        unused.retain(|name| !nothing(name));
        let (beyond, others): (Vec<&str>, Vec<&str>) =
            unused.into_iter().partition(|name| layer(name).is_some_and(|layer| layer >= count));
        if let Some(last) = beyond.iter().filter_map(|name| layer(name)).max() {
            notes.push(format!(
                "left out: layers up to {last} are stored, config.json says `num_hidden_layers`: {count} (numbers from 0)"
            ));
        }
        if !others.is_empty() {
            let shown = others[..others.len().min(3)].join(", ");
            let more = others.len().saturating_sub(3);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            notes.push(format!(
                "left out, being no part of the model that config.json describes: {shown}{more}"
            ));
        }
        notes
    }

    /// The weights of an unquantized checkpoint, rotated. Where it has a manifest, all checksums
    /// are compared first.
    ///
    /// # Errors
    /// When the directory is quantized already, or a tensor is missing, damaged or has the wrong
    /// shape.
    pub fn source(&self, rotation: RotationMode, seed: u64) -> Result<WeightSource, Error> {
        if self.quantization.is_some() {
            let path = self.checkpoint.dir().to_path_buf();
            let rule = "the model is quantized already: start from the original checkpoint".to_owned();
            return Err(Error::QuantizationConfig { path, rule });
        }
        self.checkpoint.verify_shards()?;
        Ok(WeightSource::new(Arc::clone(&self.checkpoint), self.config.clone(), rotation, seed)?)
    }

    /// Parameters of the model.
    #[must_use]
    pub fn params(&self) -> u64 {
        let matrices = LinearId::all(&self.config).map(|id| {
            let shape = id.shape(&self.config);
            shape.len() + if id.has_bias(&self.config) { shape.rows } else { 0 }
        });
        let norms = FloatId::all(&self.config).map(|id| id.width(&self.config));
        matrices.chain(norms).map(|n| n as u64).sum()
    }

    /// Stored bits per parameter, everything counted.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a ratio")]
    pub fn bits_per_weight(&self) -> f64 {
        self.checkpoint.data_bytes() as f64 * 8.0 / self.params().max(1) as f64
    }

    /// Bytes of tensors.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        Bytes(self.checkpoint.data_bytes())
    }

    /// The tokenizer of the directory.
    ///
    /// # Errors
    /// When there is none or it is malformed.
    pub fn tokenizer(&self) -> Result<Tokenizer, Error> {
        Ok(Tokenizer::from_dir(self.checkpoint.path(), Some(&self.config))?)
    }

    /// Builds the model. With `verify`, the checksum of every tensor of a quantized directory is
    /// checked first.
    ///
    /// # Errors
    /// When a tensor is missing, damaged, or does not fit its scheme.
    pub fn model(&self, kernels: &Kernels, verify: bool) -> Result<Model, Error> {
        let Some(block) = &self.quantization else {
            return Ok(Model::from_source(&self.source(RotationMode::None, 0)?)?.with_kernels(kernels));
        };
        // Beside packing, which takes whatever bytes there are. A changed one is told rather than
        // what became of it.
        let check = || if verify { self.checkpoint.verify_tensors().map(drop) } else { Ok(()) };
        let (checked, model) = rayon::join(check, || self.quantized(block, kernels));
        // Packed matrices are copies in the kernels' own memory: without this the files would count
        // a second time.
        self.checkpoint.release();
        checked?;
        model
    }

    fn quantized(&self, block: &QuantizationConfig, kernels: &Kernels) -> Result<Model, Error> {
        let reader = Reader { checkpoint: &self.checkpoint, verify: false };
        let rotations = block.rotations(&self.config, &reader)?;
        let mut builder = ModelBuilder::new(self.config.clone(), rotations)?;
        let mut books = Books::new();
        let groups = block.fused(&self.config, self.checkpoint.dir())?;
        for id in LinearId::all(&self.config) {
            let bias = |id: LinearId| -> Result<_, Error> {
                let rows = id.shape(&self.config).rows;
                id.has_bias(&self.config).then(|| reader.f32s(&id.bias_name(), rows)).transpose()
            };
            let shape = id.shape(&self.config);
            let make = |data: &PackedMatrixData<'_>| PackedMatrix::new(kernels, &data.view());
            if let Some((bands, matrices)) = reader.banded(block, id, shape, &mut books, make)? {
                let linear = Linear::banded(matrices, bands.each(), bias(id)?);
                builder.set(id, linear.map_err(fracbit_model::Error::from)?)?;
                continue;
            }
            let module = block.storage(id, self.checkpoint.dir())?;
            match module.scheme {
                Storage::F16 => {
                    self.checkpoint.expect_shape(&id.weight_name(), &[shape.rows, shape.cols])?;
                    reader.tensor(&id.weight_name(), Dtype::F16)?;
                    let stored = Linear::stored(Arc::clone(&self.checkpoint), &id.weight_name(), bias(id)?)?;
                    builder.set(id, stored)?;
                }
                Storage::Packed(_) => {
                    let group = groups.iter().find(|group| group.contains(&id));
                    if group.is_some_and(|group| group[0] != id) {
                        continue; // came with the first of its group
                    }
                    let alone = [id];
                    let ids = group.map_or(&alone[..], Vec::as_slice);
                    let members = ids
                        .iter()
                        .map(|&id| reader.matrix((id, None), id.shape(&self.config), module, &mut books));
                    let members = members.collect::<Result<Vec<_>, Error>>()?;
                    let matrix = reader.stacked(ids, &members, kernels)?;
                    if ids.len() == 1 {
                        let linear = Linear::packed(matrix, bias(id)?).map_err(fracbit_model::Error::from)?;
                        builder.set(id, linear)?;
                        continue;
                    }
                    let members = ids.iter().map(|&id| Ok((id.shape(&self.config).rows, bias(id)?)));
                    let members = members.collect::<Result<Vec<_>, Error>>()?;
                    let linears = Linear::fused(matrix, members).map_err(fracbit_model::Error::from)?;
                    for (&id, linear) in ids.iter().zip(linears) {
                        builder.set(id, linear)?;
                    }
                }
            }
        }
        for id in FloatId::all(&self.config) {
            let width = id.width(&self.config);
            let folded = id.folded(&self.config, block.rotation);
            let gain = if folded { vec![1.0; width] } else { reader.f32s(&id.weight_name(), width)? };
            builder.set_floats(id, gain)?;
        }
        Ok(builder.build()?.with_kernels(kernels))
    }
}
