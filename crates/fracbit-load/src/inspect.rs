//! What is inside a model directory.

use crate::{Error, Opened, reader::Reader};
use fracbit_base::Bytes;
use fracbit_model::{LinearId, RotationMode};
use fracbit_plan::bands::band_name;
use serde::Serialize;
use std::{collections::BTreeMap, fmt, path::Path};

/// The contents of a model directory: the document of `fracbit inspect --json`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Inspection {
    /// The directory.
    pub path: String,
    /// Architecture class name.
    pub architecture: String,
    /// Parameters.
    pub params: u64,
    /// Bytes of tensors.
    pub bytes: u64,
    /// Stored bits per parameter, everything counted.
    pub bits_per_weight: f64,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside the MLP.
    pub intermediate_size: usize,
    /// Decoder blocks.
    pub layers: usize,
    /// Query heads, key-value heads, width of a head.
    pub heads: [usize; 3],
    /// Vocabulary.
    pub vocab_size: usize,
    /// Context length.
    pub context: usize,
    /// Head and embedding are one matrix.
    pub tied: bool,
    /// How the weights are rotated, when quantized.
    pub rotation: Option<RotationMode>,
    /// Matrices and weights per storage (scheme name or dtype).
    pub storage: BTreeMap<String, StorageCount>,
    /// Storage of every matrix.
    pub matrices: BTreeMap<String, String>,
    /// Groups of matrices that run as one.
    pub fused: Vec<Vec<String>>,
    /// What the directory holds or says that is not followed ([`Opened::notes`]).
    pub notes: Vec<String>,
    /// The manifest's provenance, when there is one.
    pub provenance: Option<serde_json::Value>,
}

/// How much is stored in one way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StorageCount {
    /// Matrices.
    pub matrices: usize,
    /// Weights in them.
    pub weights: u64,
}

/// Looks into a directory without reading weights.
///
/// # Errors
/// When it is no model directory.
pub fn inspect(dir: &Path) -> Result<Inspection, Error> {
    let opened = Opened::new(dir)?;
    let config = &opened.config;
    let names =
        opened.quantization.is_none().then(|| opened.checkpoint.embedding_names(config)).transpose()?;
    let mut storage: BTreeMap<String, StorageCount> = BTreeMap::new();
    let mut matrices = BTreeMap::new();
    let mut note = |name: String, kind: String, weights: usize| {
        let count = storage.entry(kind.clone()).or_default();
        count.matrices += 1;
        count.weights += weights as u64;
        matrices.insert(name, kind);
    };
    for id in LinearId::all(config) {
        let shape = id.shape(config);
        if let Some(block) = &opened.quantization
            && let Some(modules) = block.bands(id, dir)?
        {
            let reader = Reader { checkpoint: &opened.checkpoint, verify: false };
            let bands = reader.bands(id, shape.rows, modules.len())?;
            for (band, module) in modules.into_iter().enumerate() {
                let weights = bands.rows(band).count() * shape.cols;
                note(band_name(id, band), module.scheme.to_string(), weights);
            }
            continue;
        }
        let kind = match (&opened.quantization, &names) {
            (Some(block), _) => block.storage(id, dir)?.scheme.to_string(),
            (None, Some(names)) => {
                opened.checkpoint.info(&id.stored_names(config, *names)[0])?.dtype.name().to_ascii_lowercase()
            }
            (None, None) => unreachable!("names are read for every unquantized model"),
        };
        note(id.to_string(), kind, shape.len());
    }
    Ok(Inspection {
        path: dir.display().to_string(),
        architecture: config.arch.class_name().to_owned(),
        params: opened.params(),
        bytes: opened.bytes().0,
        bits_per_weight: opened.bits_per_weight(),
        hidden_size: config.hidden_size,
        intermediate_size: config.intermediate_size,
        layers: config.num_hidden_layers(),
        heads: [config.num_attention_heads, config.num_key_value_heads, config.head_dim],
        vocab_size: config.vocab_size,
        context: config.max_position_embeddings,
        tied: config.tie_word_embeddings,
        rotation: opened.quantization.as_ref().map(|q| q.rotation),
        storage,
        matrices,
        fused: opened.quantization.as_ref().map(|q| q.fused.clone()).unwrap_or_default(),
        notes: opened.notes(),
        provenance: opened.checkpoint.manifest().map(|m| m.provenance.clone()),
    })
}

impl fmt::Display for Inspection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [heads, kv, width] = self.heads;
        writeln!(f, "{}", self.path)?;
        writeln!(
            f,
            "  architecture     {}{}",
            self.architecture,
            if self.tied { ", tied head" } else { "" }
        )?;
        writeln!(f, "  parameters       {}", self.params)?;
        writeln!(
            f,
            "  tensors          {} ({:.3} bits per weight)",
            Bytes(self.bytes),
            self.bits_per_weight
        )?;
        writeln!(f, "  blocks           {}", self.layers)?;
        writeln!(f, "  width            {}, feed-forward {}", self.hidden_size, self.intermediate_size)?;
        writeln!(f, "  heads            {heads} query, {kv} key-value, {width} wide")?;
        writeln!(f, "  vocabulary       {}", self.vocab_size)?;
        writeln!(f, "  context          {}", self.context)?;
        if let Some(rotation) = self.rotation {
            writeln!(f, "  rotation         {}", format!("{rotation:?}").to_ascii_lowercase())?;
        }
        for (kind, count) in &self.storage {
            writeln!(f, "  {kind:<16} {} matrices, {} weights", count.matrices, count.weights)?;
        }
        if !self.fused.is_empty() {
            let members: usize = self.fused.iter().map(Vec::len).sum();
            writeln!(f, "  fused            {members} matrices in {} groups", self.fused.len())?;
        }
        Ok(())
    }
}
