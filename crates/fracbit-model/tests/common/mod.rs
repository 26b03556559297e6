//! The repository's reference checkpoints: tiny random models of every architecture with logits
//! computed in float64 by `tests/reference/reference.py`.

#![allow(dead_code, reason = "each test binary uses some of these")]

use std::path::PathBuf;
use std::sync::Arc;

use fracbit_io::{Checkpoint, ModelConfig};
use fracbit_model::{KvType, Model, RotationMode, State, StateOptions, WeightSource};

pub(crate) const NAMES: [&str; 28] = [
    "llama1",
    "llama2",
    "llama3",
    "llama-bias",
    "llama-tied",
    "mistral",
    "ministral3",
    "qwen2",
    "qwen3",
    "qwen3-fp8",
    "smollm2",
    "smollm3",
    "phi3",
    "phi4-mini",
    "granite",
    "granite4",
    "gemma2",
    "gemma3",
    "qwen3-moe",
    "mixtral",
    "granite-moe",
    "olmoe",
    "olmo2",
    "olmo3",
    "exaone4",
    "seed-oss",
    "ernie45",
    "glm4",
];

pub(crate) struct Reference {
    pub(crate) name: &'static str,
    pub(crate) dir: PathBuf,
    pub(crate) tokens: Vec<u32>,
    pub(crate) logits: Vec<f32>, // (tokens, vocabulary)
    pub(crate) nats_per_token: f64,
    pub(crate) greedy: Vec<u32>,
}

/// All reference checkpoints; `None`, said aloud, in a copy of this crate without the repository
/// around it.
pub(crate) fn references() -> Option<Vec<Reference>> {
    let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/reference/models"));
    if !root.is_dir() {
        eprintln!("SKIPPED: {} is absent", root.display());
        return None;
    }
    let read = |name| {
        let dir = root.join(name);
        let text = std::fs::read(dir.join("reference.json")).unwrap();
        let json: serde_json::Value = serde_json::from_slice(&text).unwrap();
        let tokens = |key: &str| -> Vec<u32> {
            json[key]
                .as_array()
                .unwrap()
                .iter()
                .map(|t| u32::try_from(t.as_u64().unwrap()).unwrap())
                .collect()
        };
        let raw = std::fs::read(dir.join("logits.f32")).unwrap();
        let logits = raw.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        let nats_per_token = json["nats_per_token"].as_f64().unwrap();
        Reference { name, tokens: tokens("tokens"), greedy: tokens("greedy"), logits, nats_per_token, dir }
    };
    Some(NAMES.into_iter().map(read).collect())
}

impl Reference {
    pub(crate) fn source(&self, mode: RotationMode, seed: u64) -> WeightSource {
        let config = ModelConfig::from_dir(&self.dir).unwrap();
        let checkpoint = Arc::new(Checkpoint::open(&self.dir).unwrap().parted(&config).unwrap());
        WeightSource::new(checkpoint, config, mode, seed).unwrap()
    }

    pub(crate) fn model(&self, mode: RotationMode) -> Model {
        Model::from_source(&self.source(mode, 42)).unwrap()
    }

    /// The same weights with all experts active: which ones a token gets may otherwise change with
    /// any change of the weights, and with it the logits by a step.
    pub(crate) fn smooth(&self, mode: RotationMode, seed: u64) -> WeightSource {
        let source = self.source(mode, seed);
        let mut config = source.config().clone();
        if let Some(experts) = &mut config.experts {
            experts.active = experts.count;
        }
        WeightSource::new(Arc::clone(source.checkpoint()), config, mode, seed).unwrap()
    }
}

pub(crate) const F32: StateOptions = StateOptions {
    context: Some(64),
    kv: KvType::F32,
    chunk: 128,
    bf16: false,
    precision: fracbit_model::Precision::FULL,
};

/// Logits of all tokens in one forward call.
pub(crate) fn logits(model: &Model, state: &mut State, tokens: &[u32]) -> Vec<f32> {
    let (mut hidden, mut logits) = (Vec::new(), Vec::new());
    model.forward(state, tokens, &mut hidden).unwrap();
    model.logits(state, &hidden, &mut logits).unwrap();
    logits
}

pub(crate) fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len(), "rows of logits");
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// ‖a − b‖ / ‖b‖.
pub(crate) fn relative(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len(), "rows of logits");
    let square = |it: &mut dyn Iterator<Item = f64>| it.map(|v| v * v).sum::<f64>();
    let error = square(&mut a.iter().zip(b).map(|(a, b)| f64::from(a - b)));
    (error / square(&mut b.iter().map(|b| f64::from(*b)))).sqrt()
}
