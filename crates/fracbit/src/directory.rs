//! Tensor names and the configuration block of a quantized model directory (`docs/formats.md`).

use crate::{
    Error, bands, fusion,
    plan::{Inventory, Matrix, Plan, Storage},
};
use fracbit_base::{Code, Scheme};
use fracbit_io::{Checkpoint, ModelConfig};
use fracbit_model::{FloatId, LinearId, RotationMode, WeightSource};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, path::Path};

/// `quant_method` of our directories.
pub const QUANT_METHOD: &str = "fracbit";
/// Version of the file format that this program writes. It reads version 2 as well, which has no factors of a tied embedding, and
/// version 1, which differs from that in the hash of the trellis code `fast`: models with such matrices are refused.
pub const FORMAT_VERSION: u32 = 3;
/// File that holds the plan.
pub const PLAN_FILE: &str = "plan.json";

/// The block `quantization_config` of `config.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct QuantizationConfig {
    /// Always [`QUANT_METHOD`].
    pub quant_method: String,
    /// See [`FORMAT_VERSION`].
    pub format_version: u32,
    /// Rotation of the weights.
    pub rotation: RotationMode,
    /// Seed of the rotations.
    pub seed: u64,
    /// Input columns per scale; 0: one scale per row.
    pub group: usize,
    /// Stored bits per parameter, everything counted.
    pub bits_per_weight: f64,
    /// Scheme of every matrix, by module name.
    pub modules: BTreeMap<String, Module>,
    /// Matrices that a runtime should hold as one and multiply in one call; each is stored on its own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fused: Vec<Vec<String>>,
    /// Whether embedding rows, turned back, are divided by [`EMBEDDING_DIVISORS`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub embedding_divisors: bool,
}

/// How one matrix is stored.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Module {
    /// A scheme name or `f16`.
    pub scheme: Storage,
}

impl Module {
    /// The scheme, where version 1 of the format meant other weights by it.
    fn rehashed(self) -> Option<Scheme> {
        let Storage::Packed(scheme) = self.scheme else { return None };
        (scheme.code() == Some(Code::Fast)).then_some(scheme)
    }
}

impl QuantizationConfig {
    /// The block for a plan and the weights that it was carried out with.
    #[must_use]
    pub fn new(plan: &Plan, source: &WeightSource) -> Self {
        Self {
            quant_method: QUANT_METHOD.to_owned(),
            format_version: FORMAT_VERSION,
            rotation: plan.rotation,
            seed: plan.seed,
            group: plan.group,
            bits_per_weight: plan.bits_per_weight,
            modules: plan.layers.iter().map(|l| (l.name.clone(), Module { scheme: l.scheme })).collect(),
            fused: plan.fused.clone(),
            embedding_divisors: source.sites().embedding_divisors().is_some(),
        }
    }

    /// Reads the block of a model's configuration; `None` when there is none, or another program's.
    ///
    /// # Errors
    /// When the block is of another version, or malformed.
    pub fn read(config: &ModelConfig, dir: &Path) -> Result<Option<Self>, Error> {
        let bad = |rule: String| Error::QuantizationConfig { path: dir.to_path_buf(), rule };
        let Some(block) = &config.quantization_config else { return Ok(None) };
        let field = |name: &str| block.get(name).cloned().unwrap_or_default();
        // Whether another program quantized the weights, they tell themselves.
        if field("quant_method") != QUANT_METHOD {
            return Ok(None);
        }
        let version = field("format_version");
        if !version.as_u64().is_some_and(|v| (1..=u64::from(FORMAT_VERSION)).contains(&v)) {
            return Err(bad(format!(
                "format_version should be 1 to {FORMAT_VERSION}, got {version}: a newer fracbit may read it"
            )));
        }
        let parsed: Self = serde_json::from_value(block.clone()).map_err(|e| bad(e.to_string()))?;
        if parsed.format_version == 1
            && let Some((name, scheme)) = parsed.modules.iter().find_map(|(n, m)| Some((n, m.rehashed()?)))
        {
            return Err(bad(format!(
                "format_version should be {FORMAT_VERSION} for `{name}` in {scheme}, got 1, in which it means other weights: \
                 quantize the original model again"
            )));
        }
        if !parsed.group.is_multiple_of(16) {
            return Err(bad(format!("group should be 0 or a multiple of 16, got {}", parsed.group)));
        }
        Ok(Some(parsed))
    }

    /// How the matrix `id` is stored, where it is not in bands of rows.
    ///
    /// # Errors
    /// When `modules` does not name it.
    pub fn storage(&self, id: LinearId, dir: &Path) -> Result<Storage, Error> {
        self.module(&id.to_string(), dir)
    }

    /// The schemes of the bands of rows of `id`; `None` where it is stored as a whole.
    ///
    /// # Errors
    /// When `modules` names only some of its bands, or one is not quantized.
    pub fn bands(&self, id: LinearId, dir: &Path) -> Result<Option<[Scheme; bands::COUNT]>, Error> {
        if !self.modules.contains_key(&band_name(id, 0)) {
            return Ok(None);
        }
        let scheme = |band: usize| match self.module(&band_name(id, band), dir)? {
            Storage::Packed(scheme) => Ok(scheme),
            Storage::F16 => Err(Error::QuantizationConfig {
                path: dir.to_path_buf(),
                rule: format!("`{}` should have a scheme, got f16", band_name(id, band)),
            }),
        };
        let mut schemes = [scheme(0)?; bands::COUNT];
        for (band, slot) in schemes.iter_mut().enumerate() {
            *slot = scheme(band)?;
        }
        Ok(Some(schemes))
    }

    fn module(&self, name: &str, dir: &Path) -> Result<Storage, Error> {
        let module = self.modules.get(name).ok_or_else(|| Error::QuantizationConfig {
            path: dir.to_path_buf(),
            rule: format!("modules should name `{name}`"),
        })?;
        Ok(module.scheme)
    }

    /// The groups of fused matrices, checked.
    ///
    /// # Errors
    /// Naming the group and the rule that it breaks.
    pub fn fused(&self, config: &ModelConfig, dir: &Path) -> Result<Vec<Vec<LinearId>>, Error> {
        let stored = |id: LinearId| {
            let module = id.exists(config).then(|| self.modules.get(&id.to_string()))??;
            Some((module.scheme, id.shape(config)))
        };
        fusion::check(&self.fused, stored)
            .map_err(|rule| Error::QuantizationConfig { path: dir.to_path_buf(), rule })
    }
}

/// Tensor names of a packed matrix, or of a band of its rows: codes, scales, gain.
#[must_use]
pub fn packed_names(id: LinearId, band: Option<usize>) -> [String; 3] {
    let weight = id.weight_name();
    let band = band.map(|band| format!(".band{band}")).unwrap_or_default();
    ["codes", "scales", "gain"].map(|part| format!("{weight}{band}.{part}"))
}

/// Tensor that says which band of rows of embedding and head each token is in.
pub const BANDS: &str = "fracbit.bands";

/// Tensor of what the rows of a tied embedding are divided by, once they are turned back.
pub const EMBEDDING_DIVISORS: &str = "fracbit.embedding_divisors";

/// The name of a band of rows of a matrix.
#[must_use]
pub fn band_name(id: LinearId, band: usize) -> String {
    format!("{id}.band{band}")
}

/// The matrix of a name, and the band if it is that of one.
#[must_use]
pub fn parse_name(name: &str) -> Option<(LinearId, Option<usize>)> {
    match name.rsplit_once(".band") {
        None => Some((name.parse().ok()?, None)),
        Some((id, band)) => {
            let (id, band): (LinearId, _) = (id.parse().ok()?, band.parse().ok()?);
            let fits = band < bands::COUNT && !id.is_layer();
            fits.then_some((id, Some(band)))
        }
    }
}

/// Tensor names of a codebook: entries, step.
#[must_use]
pub fn codebook_names(scheme: Scheme) -> [String; 2] {
    [format!("fracbit.codebook.{scheme}.entries"), format!("fracbit.codebook.{scheme}.step")]
}

/// The norms that a directory stores; the others were folded into their readers and are all ones.
pub fn stored_floats(
    config: &ModelConfig,
    rotation: RotationMode,
) -> impl Iterator<Item = FloatId> + use<'_> {
    FloatId::all(config).filter(move |id| !id.folded(config, rotation))
}

/// What a checkpoint consists of. Reads no weights.
#[must_use]
pub fn inventory(checkpoint: &Checkpoint, config: &ModelConfig, rotation: RotationMode) -> Inventory {
    inventory_of(config, rotation, fingerprint(checkpoint, config))
}

/// What a model of this configuration consists of; `source_hash` says which one.
#[must_use]
pub fn inventory_of(config: &ModelConfig, rotation: RotationMode, source_hash: String) -> Inventory {
    let matrices = Matrix::all(config);
    let biases: usize = matrices.iter().filter(|m| m.id.has_bias(config)).map(|m| m.shape.rows).sum();
    let norms = |ids: &mut dyn Iterator<Item = FloatId>| ids.map(|id| id.width(config)).sum::<usize>();
    let all_norms = norms(&mut FloatId::all(config));
    let kept_norms = norms(&mut stored_floats(config, rotation));
    Inventory {
        source_hash,
        matrices,
        other_params: (biases + all_norms) as u64,
        stored_other: (biases + kept_norms) as u64,
        tied: config.tie_word_embeddings,
        bands: None,
    }
}

/// A hash of the configuration and the tensor table: what a plan depends on, and cheap to compute.
fn fingerprint(checkpoint: &Checkpoint, config: &ModelConfig) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(serde_json::to_string(&config.raw).unwrap_or_default().as_bytes());
    for (name, info) in checkpoint.iter() {
        hasher.update(format!("\n{name} {} {:?}", info.dtype.name(), info.shape).as_bytes());
    }
    hasher.finalize().to_hex().to_string()
}
