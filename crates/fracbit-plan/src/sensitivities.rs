//! The document of sensitivities: what the loss rises by for the error of each matrix, and where
//! that is known from.

use crate::{
    Error,
    bands::{self, Bands, BandsOf, band_name},
    forecast::{self, Forecast, JointPoint},
    inventory::Inventory,
    storage::Storage,
};
use fracbit_base::Scheme;
use fracbit_model::{LayerLinear, LinearId, RotationMode, WeightSource};
use fracbit_quant::sensitivity::Fit;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::{collections::BTreeMap, fmt, path::Path};

/// Sensitivities of every matrix of a model, and where they come from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sensitivities {
    /// How they were obtained, in words.
    pub protocol: String,
    /// Content hash of the checkpoint; empty for the prior.
    pub source_hash: String,
    /// Rotation under which they were measured.
    pub rotation: RotationMode,
    /// Whether there were factors between inputs and weights.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub smoothing: bool,
    /// Tokens measured on.
    pub tokens: usize,
    /// By module name.
    pub layers: BTreeMap<String, Fit>,
    /// Measured rise of the loss by module and scheme, where that was done: it
    /// takes the place of `a` times the scheme's error.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub actual: BTreeMap<String, BTreeMap<String, f64>>,
    /// All matrices at once, with noise or each quantized: what forecasts are fitted to.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub joint: Vec<JointPoint>,
    /// Bands of rows into which a plan may cut matrices; `layers` then has each of them beside the
    /// whole.
    #[serde(default, skip_serializing_if = "BandsOf::is_empty")]
    pub bands: BandsOf,
}

/// How the loss of a matrix in a scheme is estimated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Objective {
    /// `a` times the scheme's error, with `a` from text that the model wrote or from a prior.
    #[default]
    DataFree,
    /// `a` times the scheme's error, with `a` from a given text.
    Linear,
    /// Measured for every scheme, one matrix replaced at a time.
    Actual,
}

impl Objective {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::DataFree, Self::Linear, Self::Actual];

    /// The name on the command line and in files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::DataFree => "data-free",
            Self::Linear => "linear",
            Self::Actual => "actual",
        }
    }
}

impl fmt::Display for Objective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Median coefficient of a kind of matrix in Llama-3.1-8B as published with Q-Palette.
pub const fn usual(linear: LayerLinear) -> f64 {
    match linear {
        LayerLinear::Q => 0.010,
        LayerLinear::K => 0.006,
        LayerLinear::V => 0.028,
        LayerLinear::O => 0.021,
        LayerLinear::Gate => 0.025,
        LayerLinear::Up => 0.036,
        LayerLinear::Down => 0.049,
    }
}

impl Sensitivities {
    /// A guess that needs no weights: the median coefficient of each kind of matrix in Llama-3.1-8B
    /// as published with Q-Palette. Embedding and head, which the papers leave alone, get values
    /// that we chose, not measured ones. They may be far off: the tied embedding of this project's
    /// demo model measures 3.1, about 140 times the median of its other matrices.
    #[must_use]
    pub fn prior(inventory: &Inventory, rotation: RotationMode) -> Self {
        let guess = |id| match id {
            LinearId::Embed if inventory.tied => 0.5,
            LinearId::Embed => 0.05,
            LinearId::Head => 0.25,
            LinearId::Layer(_, linear) => usual(linear),
        };
        Self {
            protocol: "prior by kind of matrix (nothing was measured on this model)".to_owned(),
            source_hash: String::new(),
            rotation,
            smoothing: false,
            tokens: 0,
            layers: inventory
                .matrices
                .iter()
                .map(|m| (m.name.clone(), Fit { a: guess(m.id), residual: 0.0 }))
                .collect(),
            actual: BTreeMap::new(),
            joint: Vec::new(),
            bands: BandsOf::new(),
        }
    }

    /// Gives every band of the rows of `id` its part of the coefficient of the whole, by what was
    /// measured for each.
    pub fn share_out(&mut self, id: LinearId, bands: &Bands, losses: &[f64]) -> Result<(), Error> {
        let whole = self.of(&id.to_string())?;
        let shares = bands.shares(losses);
        for (band, share) in shares.into_iter().enumerate() {
            self.layers.insert(band_name(id, band), Fit { a: whole * share, residual: 0.0 });
        }
        self.bands.insert(id.to_string(), bands.clone());
        Ok(())
    }

    /// The coefficient of a matrix.
    ///
    /// # Errors
    /// When the document does not hold it or holds no finite, non-negative number.
    pub fn of(&self, name: &str) -> Result<f64, Error> {
        let bad = |rule: String| Error::Sensitivity { origin: self.protocol.clone(), rule };
        let fit = self.layers.get(name).ok_or_else(|| bad(format!("layer `{name}` should be there")))?;
        if fit.a.is_finite() && fit.a >= 0.0 {
            Ok(fit.a)
        } else {
            Err(bad(format!("`a` of `{name}` should be finite and not negative, got {}", fit.a)))
        }
    }

    /// How this document estimates losses.
    #[must_use]
    pub fn objective(&self) -> Objective {
        if !self.actual.is_empty() {
            Objective::Actual
        } else if self.protocol.starts_with("linear") {
            Objective::Linear
        } else {
            Objective::DataFree
        }
    }

    /// Refuses a document that estimates losses in another way than the one asked for; `origin`
    /// names it.
    ///
    /// # Errors
    /// With both ways.
    pub fn require_objective(&self, origin: &str, wanted: Objective) -> Result<(), Error> {
        let have = self.objective();
        if have == wanted {
            return Ok(());
        }
        let rule = format!("it holds losses of kind {have}, not {wanted}: {}", self.protocol);
        Err(Error::Sensitivity { origin: origin.to_owned(), rule })
    }

    /// The forecast for a sum of losses; `None` where nothing was measured on the whole model.
    #[must_use]
    pub fn forecast(&self, predicted: f64) -> Option<Forecast> {
        forecast::forecast(&self.joint, predicted)
    }

    /// Predicted loss of a matrix stored so: what was measured for the scheme, as the rise over the
    /// best scheme measured for this matrix, or else the coefficient times the scheme's error on
    /// Gaussian weights.
    ///
    /// # Errors
    /// As for [`Sensitivities::of`]; also when no error or no finite loss is known for the scheme.
    pub fn loss(&self, name: &str, storage: Storage) -> Result<f64, Error> {
        let Some(measured) = self.actual.get(name) else {
            return Ok(self.of(name)? * storage.error()?);
        };
        if storage == Storage::F16 {
            return Ok(0.0);
        }
        let bad = |rule: String| Error::Sensitivity { origin: self.protocol.clone(), rule };
        let scheme = storage.to_string();
        let best = measured.values().copied().fold(f64::INFINITY, f64::min);
        match measured.get(&scheme) {
            Some(&loss) if loss.is_finite() && best.is_finite() => Ok(loss - best),
            Some(loss) => Err(bad(format!("the loss of `{name}` in {scheme} should be finite, got {loss}"))),
            None => Err(bad(format!(
                "`{name}` should have been measured in {scheme}: measure the palette that is planned with"
            ))),
        }
    }

    /// Whether every matrix's loss is known for a scheme: always, where losses are coefficients
    /// times errors.
    pub fn covers(&self, scheme: Scheme) -> bool {
        let name = scheme.to_string();
        self.actual.values().all(|losses| losses.contains_key(&name))
    }

    /// Reads a document written by `fracbit sensitivity`.
    ///
    /// # Errors
    /// When the file cannot be read or is no such document.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let bad = |rule: String| Error::Sensitivity { origin: path.display().to_string(), rule };
        let text = std::fs::read(path).map_err(|e| bad(e.to_string()))?;
        Self::parse(&text).map_err(|e| bad(e.to_string()))
    }

    fn parse(text: &[u8]) -> serde_json::Result<Self> {
        let mut document: Value = serde_json::from_slice(text)?;
        let names = document.get("layers").and_then(Value::as_object).cloned().unwrap_or_default();
        bands::spread(&mut document, names.keys().map(String::as_str));
        serde_json::from_value(document)
    }

    /// Writes the document. `path` always holds either the old or the new one, whole.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn save(&self, path: &Path) -> std::io::Result<()> {
        let text = serde_json::to_string_pretty(self)? + "\n";
        fracbit_io::write_atomic(path, text.as_bytes())
    }

    /// Keeps the document for a run that continues this one, see [`fracbit_io::keep`].
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn keep(&self, path: &Path) -> std::io::Result<()> {
        fracbit_io::keep(path, &serde_json::to_vec(self)?)
    }

    /// What [`Sensitivities::keep`] kept; `None` when there is nothing whole.
    #[must_use]
    pub fn kept(path: &Path) -> Option<Self> {
        Self::parse(&fracbit_io::kept(path)?).ok()
    }

    /// A measurement that begins, with what an interrupted one of the same kind has.
    pub fn begun(
        protocol: String,
        content_hash: &str,
        source: &WeightSource,
        tokens: usize,
        done: Option<Self>,
    ) -> Self {
        let (mut layers, mut actual, mut bands) = Default::default();
        let rotation = source.rotations().mode();
        let smoothing = !source.smoothing().is_empty();
        if let Some(done) = done.filter(|d| d.continues(&protocol, content_hash, rotation, smoothing)) {
            (layers, actual, bands) = (done.layers, done.actual, done.bands);
        }
        Self {
            protocol,
            source_hash: content_hash.to_owned(),
            rotation,
            smoothing,
            tokens,
            layers,
            actual,
            joint: Vec::new(),
            bands,
        }
    }

    /// Whether a measurement of this kind may take over what this document holds already.
    #[must_use]
    pub fn continues(
        &self,
        protocol: &str,
        content_hash: &str,
        rotation: RotationMode,
        smoothing: bool,
    ) -> bool {
        (self.protocol == protocol && self.source_hash == content_hash)
            && (self.rotation, self.smoothing) == (rotation, smoothing)
    }

    /// Refuses sensitivities of another checkpoint.
    ///
    /// # Errors
    /// When the hashes differ (the prior fits every model).
    pub fn require_source(&self, content_hash: &str) -> Result<(), Error> {
        if self.source_hash.is_empty() || self.source_hash == content_hash {
            return Ok(());
        }
        let rule = format!(
            "they were measured on a checkpoint with hash {}, this one has {content_hash}",
            self.source_hash
        );
        Err(Error::Sensitivity { origin: self.protocol.clone(), rule })
    }
}
