//! Shapes of models by name, to plan, synthesize and measure without a checkpoint.

use crate::Error;
use fracbit_io::ModelConfig;
use serde_json::{Map, Value, json};
use std::path::Path;

/// A shape by name.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Preset {
    /// The name.
    pub name: &'static str,
    architecture: &'static str,
    model_type: &'static str,
    hidden: usize,
    intermediate: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    vocab: usize,
    tied: bool,
    rope_theta: f64,
    /// How many there are and how many a token gets.
    experts: Option<[usize; 2]>,
}

const fn llama(name: &'static str, dims: [usize; 7], tied: bool) -> Preset {
    let [hidden, intermediate, layers, heads, kv_heads, head_dim, vocab] = dims;
    Preset {
        name,
        architecture: "LlamaForCausalLM",
        model_type: "llama",
        hidden,
        intermediate,
        layers,
        heads,
        kv_heads,
        head_dim,
        vocab,
        tied,
        rope_theta: 500_000.0,
        experts: None,
    }
}

/// The shapes there are: hidden, feed-forward, layers, heads, key-value heads, head width,
/// vocabulary, as published in the models' configurations.
pub const PRESETS: [Preset; 9] = [
    llama("tiny", [64, 192, 2, 4, 2, 16, 320], true),
    llama("smollm2-135m", [576, 1536, 30, 9, 3, 64, 49152], true),
    llama("llama-3.2-1b", [2048, 8192, 16, 32, 8, 64, 128_256], true),
    llama("llama-3.2-3b", [3072, 8192, 28, 24, 8, 128, 128_256], true),
    llama("llama-3-8b", [4096, 14336, 32, 32, 8, 128, 128_256], false),
    llama("llama-2-7b", [4096, 11008, 32, 32, 32, 128, 32000], false),
    Preset {
        architecture: "Qwen2ForCausalLM",
        model_type: "qwen2",
        ..llama("qwen2.5-0.5b", [896, 4864, 24, 14, 2, 64, 151_936], true)
    },
    Preset {
        architecture: "Qwen3ForCausalLM",
        model_type: "qwen3",
        ..llama("qwen3-0.6b", [1024, 3072, 28, 16, 8, 128, 151_936], true)
    },
    Preset {
        architecture: "Qwen3MoeForCausalLM",
        model_type: "qwen3_moe",
        experts: Some([128, 8]),
        ..llama("qwen3-30b-a3b", [2048, 768, 48, 32, 4, 128, 151_936], false)
    },
];

impl Preset {
    /// The preset of this name.
    ///
    /// # Errors
    /// Listing the names there are.
    pub fn named(name: &str) -> Result<Self, Error> {
        PRESETS.into_iter().find(|p| p.name == name).ok_or_else(|| Error::Option {
            option: "--shape",
            rule: format!("should be one of {}, got `{name}`", PRESETS.map(|p| p.name).join(", ")),
        })
    }

    /// This shape with another vocabulary or number of layers.
    ///
    /// # Errors
    /// For fewer than 258 tokens, or no layer.
    pub fn resized(mut self, vocab: Option<usize>, layers: Option<usize>) -> Result<Self, Error> {
        self.vocab = vocab.unwrap_or(self.vocab);
        self.layers = layers.unwrap_or(self.layers);
        if self.vocab < 258 {
            let rule =
                format!("should be at least 258 (256 bytes and two special tokens), got {}", self.vocab);
            return Err(Error::Option { option: "--vocab", rule });
        }
        if self.layers == 0 {
            return Err(Error::Option { option: "--layers", rule: "should be at least 1".to_owned() });
        }
        Ok(self)
    }

    /// Its configuration.
    ///
    /// # Errors
    /// None that a preset can cause.
    pub fn model_config(self) -> Result<ModelConfig, Error> {
        Ok(ModelConfig::parse(self.config_text().as_bytes(), Path::new("config.json"))?)
    }

    /// The text of its `config.json`.
    #[must_use]
    pub fn config_text(&self) -> String {
        format!("{:#}\n", Value::Object(self.config()))
    }

    fn config(&self) -> Map<String, Value> {
        let value = json!({
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tied,
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",
            "bos_token_id": 256,
            "eos_token_id": 257,
        });
        let Value::Object(mut map) = value else { return Map::new() };
        if let Some([count, active]) = self.experts {
            let more = [
                ("num_experts", count),
                ("num_experts_per_tok", active),
                ("moe_intermediate_size", self.intermediate),
            ];
            map.extend(more.map(|(field, size)| (field.to_owned(), size.into())));
            map.insert("norm_topk_prob".to_owned(), true.into());
        }
        map
    }
}
