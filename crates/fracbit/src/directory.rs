//! Tensor names and the configuration block of a quantized model directory (`docs/formats.md`).

use crate::{
    Error, bands, fusion,
    plan::{Inventory, Matrix, Plan, Storage},
};
use fracbit_base::{Code, Scheme};
use fracbit_format::{Element, Grouping, PlaneName, SchemeSpec, TILE_COLS};
use fracbit_io::{Checkpoint, Dtype, ModelConfig};
use fracbit_model::{FloatId, LinearId, RotationMode, WeightSource};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::{collections::BTreeMap, path::Path};

/// `quant_method` of our directories.
pub const QUANT_METHOD: &str = "fracbit";
/// Version of the file format that this program writes. It reads versions 1 and 2 as well, which
/// have no factors of a tied embedding and say once for all matrices how columns are grouped; in
/// version 1 the trellis code `fast` had another hash, so that models with such matrices are
/// refused.
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
}

/// How one matrix is stored.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Module {
    /// A scheme name or `f16`.
    pub scheme: Storage,
    /// Input columns per scale; 0, or absent: one scale per row.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub group: usize,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
pub(crate) fn is_zero(n: &usize) -> bool {
    *n == 0
}

impl Module {
    /// Which weights share a scale.
    #[must_use]
    pub const fn grouping(self) -> Grouping {
        Grouping::from_number(self.group)
    }

    /// The rule that the module breaks.
    pub(crate) fn broken(self) -> Option<String> {
        if !self.group.is_multiple_of(TILE_COLS) {
            return Some(format!("group should be 0 or a multiple of {TILE_COLS}, got {}", self.group));
        }
        let why = match self.scheme {
            Storage::F16 => "f16 has no scales".to_owned(),
            Storage::Packed(scheme) if SchemeSpec::of(scheme).second_level.is_some() => {
                format!("{scheme} has a scale for each row")
            }
            Storage::Packed(_) => return None,
        };
        (self.group > 0).then(|| format!("group should be absent, for {why}, got {}", self.group))
    }

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
            bits_per_weight: plan.bits_per_weight,
            modules: plan.layers.iter().map(|l| (l.name.clone(), l.module())).collect(),
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
    pub fn bands(&self, id: LinearId, dir: &Path) -> Result<Option<[Module; bands::COUNT]>, Error> {
        if !self.modules.contains_key(&band_name(id, 0)) {
            return Ok(None);
        }
        let module = |band: usize| {
            let module = self.module(&band_name(id, band), dir)?;
            if module.scheme == Storage::F16 {
                let rule = format!("`{}` should have a scheme, got f16", band_name(id, band));
                return Err(Error::QuantizationConfig { path: dir.to_path_buf(), rule });
            }
            Ok(module)
        };
        let mut modules = [module(0)?; bands::COUNT];
        for (band, slot) in modules.iter_mut().enumerate() {
            *slot = module(band)?;
        }
        Ok(Some(modules))
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

/// Before version 3 of a document one number said for all its matrices how columns are grouped:
/// moves it to each of `entries`, a map or a list, that has a scheme.
///
/// # Errors
/// The rule that is broken where the number is missing, or stands where the version has none.
pub(crate) fn spread_group(document: &mut Value, entries: &str, of_each: bool) -> Result<(), String> {
    let Some(fields) = document.as_object_mut() else { return Ok(()) }; // refused where it is parsed
    let group = fields.remove("group");
    if of_each {
        let rule = |group| format!("group should stand at each of `{entries}`, got {group} for all of them");
        return group.map_or(Ok(()), |group| Err(rule(group)));
    }
    let group = group.ok_or("missing field `group`")?;
    let spread = |entry: &mut Value| -> Result<(), String> {
        let Some(entry) = entry.as_object_mut() else { return Ok(()) };
        if entry.contains_key("group") {
            return Err(format!("group should stand once in this version, got one in `{entries}` as well"));
        }
        if entry.get("scheme").is_some_and(|scheme| scheme != "f16") {
            entry.insert("group".to_owned(), group.clone());
        }
        Ok(())
    };
    match fields.get_mut(entries) {
        Some(Value::Object(all)) => all.values_mut().try_for_each(spread),
        Some(Value::Array(all)) => all.iter_mut().try_for_each(spread),
        _ => Ok(()),
    }
}

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
