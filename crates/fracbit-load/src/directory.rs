//! Tensor names and the configuration block of a quantized model directory (`docs/formats.md`).

use crate::Error;
use fracbit_base::Scheme;
use fracbit_format::{Element, PlaneName};
use fracbit_io::{Dtype, ModelConfig};
use fracbit_model::{LinearId, RotationMode, WeightSource};
use fracbit_plan::{
    Plan,
    bands::{self, band_name},
    fusion,
    inventory::stores_final_factors,
    storage::{Module, Storage, spread_group},
};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, path::Path};

/// `quant_method` of our directories.
pub const QUANT_METHOD: &str = "fracbit";
/// Version of the file format that this program writes. It reads earlier ones as well: up to 3 only
/// embedding and head are in bands, both in the same; 1 and 2 have no factors of a tied embedding
/// and say once for all matrices how columns are grouped; in version 1 the trellis code `fast` had
/// another hash, so that models with such matrices are refused.
pub const FORMAT_VERSION: u32 = 4;
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
    /// Stored bits per parameter, everything counted.
    pub bits_per_weight: f64,
    /// Scheme of every matrix, by module name.
    pub modules: BTreeMap<String, Module>,
    /// Matrices that a runtime should hold as one and multiply in one call; each is stored on its
    /// own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fused: Vec<Vec<String>>,
    /// Whether embedding rows, turned back, are divided by [`EMBEDDING_DIVISORS`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub embedding_divisors: bool,
    /// Whether [`FINAL_FACTORS`] are there, without which hidden states of a head of its own are
    /// not those of the checkpoint; logits do without.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub final_factors: bool,
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
            bits_per_weight: plan.bits_per_weight,
            modules: plan.layers.iter().map(|l| (l.name.clone(), l.module())).collect(),
            fused: plan.fused.clone(),
            embedding_divisors: source.rotations().embedding_divisors().is_some(),
            final_factors: has_final_factors(source),
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
        let got = field("format_version");
        let Some(version) = got.as_u64().filter(|v| (1..=u64::from(FORMAT_VERSION)).contains(v)) else {
            return Err(bad(format!(
                "format_version should be 1 to {FORMAT_VERSION}, got {got}: a newer fracbit may read it"
            )));
        };
        let mut block = block.clone();
        spread_group(&mut block, "modules", version >= 3).map_err(bad)?;
        let parsed: Self = serde_json::from_value(block).map_err(|e| bad(e.to_string()))?;
        if parsed.format_version == 1
            && let Some((name, scheme)) = parsed.modules.iter().find_map(|(n, m)| Some((n, m.rehashed()?)))
        {
            return Err(bad(format!(
                "format_version should be {FORMAT_VERSION} for `{name}` in {scheme}, got 1, in which it means other weights: \
                 quantize the original model again"
            )));
        }
        if let Some((name, rule)) = parsed.modules.iter().find_map(|(n, m)| Some((n, m.broken()?))) {
            return Err(bad(format!("`{name}`: {rule}")));
        }
        Ok(Some(parsed))
    }

    /// How the matrix `id` is stored, where it is not in bands of rows.
    ///
    /// # Errors
    /// When `modules` does not name it.
    pub fn storage(&self, id: LinearId, dir: &Path) -> Result<Module, Error> {
        self.module(&id.to_string(), dir)
    }

    /// How the bands of rows of `id` are stored; `None` where it is stored as a whole.
    ///
    /// # Errors
    /// When `modules` names only some of its bands, or one is not quantized.
    pub fn bands(&self, id: LinearId, dir: &Path) -> Result<Option<Vec<Module>>, Error> {
        let named = |band: &usize| self.modules.contains_key(&band_name(id, *band));
        let Some(last) = (0..bands::MOST).rfind(named) else { return Ok(None) };
        let module = |band: usize| {
            let module = self.module(&band_name(id, band), dir)?;
            if module.scheme == Storage::F16 {
                let rule = format!("`{}` should have a scheme, got f16", band_name(id, band));
                return Err(Error::QuantizationConfig { path: dir.to_path_buf(), rule });
            }
            Ok(module)
        };
        (0..=last).map(module).collect::<Result<_, _>>().map(Some)
    }

    fn module(&self, name: &str, dir: &Path) -> Result<Module, Error> {
        self.modules.get(name).copied().ok_or_else(|| Error::QuantizationConfig {
            path: dir.to_path_buf(),
            rule: format!("modules should name `{name}`"),
        })
    }

    /// The groups of fused matrices, checked.
    ///
    /// # Errors
    /// Naming the group and the rule that it breaks.
    pub fn fused(&self, config: &ModelConfig, dir: &Path) -> Result<Vec<Vec<LinearId>>, Error> {
        let stored = |id: LinearId| {
            let module = id.exists(config).then(|| self.modules.get(&id.to_string()))??;
            Some((module.scheme, module.grouping(), id.shape(config)))
        };
        fusion::check(&self.fused, stored)
            .map_err(|rule| Error::QuantizationConfig { path: dir.to_path_buf(), rule })
    }
}

const _: () = assert!(bands::MOST <= fracbit_kernels::BANDS, "what is planned can be run");

/// Tensor name of a plane of a packed matrix, or of a band of its rows.
#[must_use]
pub fn plane_name(id: LinearId, band: Option<usize>, plane: PlaneName) -> String {
    let band = band.map(|band| format!(".band{band}")).unwrap_or_default();
    format!("{}{band}.{}", id.weight_name(), plane.suffix())
}

/// Type of the elements of a plane in a file.
#[must_use]
pub const fn dtype(element: Element) -> Dtype {
    match element {
        Element::U8 => Dtype::U8,
        Element::F16 => Dtype::F16,
        Element::F32 => Dtype::F32,
    }
}

/// Tensor that says which band each row of a matrix is in.
#[must_use]
pub fn bands_name(id: LinearId) -> String {
    format!("{}.bands", id.weight_name())
}

/// The same up to format version 3, for embedding and head together.
pub const BANDS: &str = "fracbit.bands";

/// Tensor of what the rows of a tied embedding are divided by, once they are turned back.
pub const EMBEDDING_DIVISORS: &str = "fracbit.embedding_divisors";

/// Tensor of what final hidden states, turned back, are multiplied by to be those of the
/// checkpoint.
pub const FINAL_FACTORS: &str = "fracbit.final_factors";

/// Whether a directory of these weights holds [`FINAL_FACTORS`].
#[must_use]
pub fn has_final_factors(source: &WeightSource) -> bool {
    stores_final_factors(source.config(), source.rotations().mode())
}

/// Tensor names of a codebook: entries, step.
#[must_use]
pub fn codebook_names(scheme: Scheme) -> [String; 2] {
    [format!("fracbit.codebook.{scheme}.entries"), format!("fracbit.codebook.{scheme}.step")]
}
