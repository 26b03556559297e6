//! `config.json` and `generation_config.json`: what the model is.
//!
//! Fields and defaults follow the configuration classes of Hugging Face transformers (4.5x and 5),
//! per architecture:
//!
//! | `model_type` | biases | QK norm | sliding window | rotary |
//! | --- | --- | --- | --- | --- |
//! | `llama` (Llama 1/2/3, SmolLM2) | `attention_bias` on q, k, v, o; `mlp_bias` | no | no | all layers |
//! | `mistral` | none | no | `sliding_window` on all layers; null: none; left out: 4096 | all layers |
//! | `ministral3` (Ministral 3) | none | no | `sliding_window` on all layers | all layers; queries grow with their position |
//! | `qwen2` | q, k, v always | no | with `use_sliding_window`, layers from `max_window_layers` on, or `layer_types` | all layers |
//! | `qwen3` | `attention_bias` on q, k, v, o | yes | as `qwen2` | all layers |
//! | `smollm3` | `attention_bias`, `mlp_bias` | no | with `use_sliding_window`, NoPE layers, or `layer_types` | where `no_rope_layers[i]` is 1 |
//! | `phi3` (Phi-3, Phi-3.5, Phi-4, Phi-4-mini) | none | no | `sliding_window` on all layers | all layers; `partial_rotary_factor`, `longrope` |
//! | `granite` (Granite 3) | `attention_bias` on q, k, v, o; `mlp_bias` | no | no | all layers |
//! | `seed_oss` | `attention_bias` on q, k, v, true where left out; `attention_out_bias`; `mlp_bias` | no | no | all layers |
//! | `ernie4_5` (ERNIE 4.5, dense) | `use_bias` on all | no | no | all layers, neighbouring channels |
//! | `glm`, `glm4` (GLM-4) | `attention_bias` on q, k, v, true where left out | no | no | all layers, neighbouring channels; `partial_rotary_factor`, 0.5 where left out |
//! | `exaone4` | none | yes | where `sliding_window` is not null by `layer_types`, or all but every `sliding_window_pattern`-th layer | all layers; where some have a window, those |
//! | `gemma2` | none | no | by `layer_types`, or every other layer from the first on | all layers |
//! | `gemma3_text` (Gemma 3, text only) | none | yes | by `layer_types`, or all but every `sliding_window_pattern`-th layer | all layers; those with a window by `rope_local_base_freq` |
//! | `qwen3_moe` (Qwen3-30B-A3B) | `attention_bias` on q, k, v, o | yes | as `qwen2` | all layers |
//! | `mixtral` | none | no | `sliding_window` on all layers | all layers |
//! | `granitemoe` (Granite 3 A400M, A800M) | `attention_bias` on q, k, v, o | no | no | all layers |
//! | `olmoe` | `attention_bias` on q, k, v, o | over all heads | no | all layers |
//! | `olmo2`, `olmo3` | `attention_bias` on q, k, v, o | over all heads | `olmo3`: by `layer_types`, or all but every fourth layer | all layers; those with a window without scaling |
//!
//! `phi3` stores q, k, v and gate, up as one tensor each ([`crate::Checkpoint::parted`]). The four
//! factors of `granite` leave the graph as it is: in units of `embedding_multiplier` the residual
//! stream begins as the embedding itself, what is written to it is multiplied by
//! `residual_multiplier / embedding_multiplier` (in the weights), and norms, which do not see such
//! units, by their ε alone, which is divided by `embedding_multiplier^2`; `logits_scaling` divides
//! the final gain, `attention_multiplier` is in [`RopeConfig::gain`]. A `granitemoehybrid` (Granite
//! 4) whose layers all have attention, and no experts, is read as `granite`; its gate and up are
//! one tensor as well.
//!
//! `olmo2`, `olmo3` and `exaone4` normalize what attention and MLP write to the residual stream *in
//! place* of what they read ([`ModelConfig::pre_norms`]). Where frequencies of `olmo3` are
//! stretched, those of layers without a window are, as in training, transformers 4.57 and vLLM
//! (transformers 5 stretched all of them by mistake until 5.13, which writes a set of
//! `rope_parameters` for each type of layers).
//!
//! `qwen3_moe`, `mixtral`, `granitemoe` and `olmoe` have experts in place of the MLP in every layer
//! ([`Experts`]). They are stored under three names, of which [`crate::Checkpoint::parted`] makes
//! one; `granitemoe` has the factors of `granite`.
//!
//! `gemma2` and `gemma3_text` normalize what attention and MLP write to the residual stream as well
//! ([`ModelConfig::post_norms`]), their gains are stored less 1 ([`ModelConfig::gain_offset`]), and
//! the embedding is multiplied by the root of its width: the same units, so that the gains of those
//! norms are divided by it (not rounded to bf16, as transformers does where weights are of that
//! type). `query_pre_attn_scalar` is in [`RopeConfig::gain`]. `gemma2` caps scores and logits
//! ([`ModelConfig::score_cap`]; Gemma Team 2024, arXiv 2408.00118, section 2). Of models of text
//! and images or sounds (`gemma3`, `mistral3`, `qwen2_vl`, `qwen2_5_vl`, `qwen3_vl`, `internvl`,
//! `llava`, `idefics3`, ...) the language model is taken alone where it is one of these:
//! `text_config`, and the tensors without the prefix `language_model.` or `text_model.`. Where all
//! is text, the three positions of a token in `mrope` are one, and it turns as others do.
//!
//! `glm4` has norms behind attention and MLP as well, under names of its own
//! ([`crate::Checkpoint::parted`]), and both have gate and up in one tensor.
//!
//! The name `no_rope_layers` misleads: 1 means the layer *does* rotate. Without the list every
//! fourth layer (`no_rope_layer_interval`) does not.
//!
//! Unknown fields are kept and ignored; a field that is used must have the right type and a sane
//! value. Rules that would change the numbers without our knowing (`dynamic` rope scaling, another
//! activation, partial rotary elsewhere) are refused by name. We deviate in one default: a missing
//! `num_key_value_heads` means as many as heads for every architecture but Gemma 3 (transformers
//! has fixed numbers for some more); the shape check of `k_proj` catches a wrong guess.

mod architecture;
mod beside;
mod hybrid;
mod rope;

use std::path::{Path, PathBuf};

pub use architecture::Architecture;
pub use rope::{QueryGrowth, RopeConfig, RopeScaling};
use serde_json::{Map, Value};

use crate::error::{Error, read_limited, read_optional};
use crate::gguf::{Gguf, is_gguf};
use crate::json;

/// File name of the model configuration.
pub const CONFIG: &str = "config.json";
/// File name of the generation configuration.
pub const GENERATION_CONFIG: &str = "generation_config.json";
const MAX_CONFIG: u64 = 16 << 20;
/// Upper limit of widths and of the vocabulary; far above any model, low enough that products of
/// two fit in 64 bits.
const MAX_SIZE: u64 = 1 << 24;
const MAX_LAYERS: u64 = 1 << 14;
const MAX_EXPERTS: u64 = 1 << 12;

/// The MLPs of a mixture: a router gives every token some of them. With r the softmax over all
/// experts of `Router n`, the MLP's output is the sum of those of the experts with the largest r,
/// each times its r (Shazeer et al. 2017, arXiv 1701.06538).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Experts {
    /// How many there are.
    pub count: usize,
    /// How many a token gets.
    pub active: usize,
    /// Their r are divided by their sum: the softmax is over these alone.
    pub renormalized: bool,
}

/// Norms of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// None.
    Absent,
    /// Of each head, all with the same gain.
    Heads,
    /// Of all heads together, before they are parted.
    Whole,
}

/// What the gate of an MLP goes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `x sigmoid(x)`.
    Silu,
    /// GELU by a hyperbolic tangent, `x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2` (Hendrycks
    /// and Gimpel 2016, arXiv 1606.08415).
    GeluTanh,
}

/// What differs from layer to layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerConfig {
    /// Queries and keys are rotated.
    pub rope: bool,
    /// Each position sees this many positions, itself included; `None`: all before it.
    pub sliding_window: Option<usize>,
}

/// A checked model configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Architecture.
    pub arch: Architecture,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside the MLP, or inside one expert.
    pub intermediate_size: usize,
    /// The experts in place of an MLP.
    pub experts: Option<Experts>,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key and value heads; divides the query heads.
    pub num_key_value_heads: usize,
    /// Width of a head, even; heads · head_dim need not be the hidden size.
    pub head_dim: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Context length.
    pub max_position_embeddings: usize,
    /// ε of the RMS norms of the residual stream, in units of the embedding.
    pub rms_norm_eps: f64,
    /// ε of all others: of queries and keys, and of [`post_norms`](Self::post_norms).
    pub inner_norm_eps: f64,
    /// Rotary position embedding.
    pub rope: RopeConfig,
    /// That of layers with a sliding window, where it is another one.
    pub local_rope: Option<RopeConfig>,
    /// Rotary embedding turns neighbouring channels as they are stored, (2k, 2k + 1) in place of
    /// (k, k + half); a source of weights puts the rows of q and k in the other order.
    pub neighbours_turn: bool,
    /// What the gate goes through.
    pub activation: Activation,
    /// What attention and MLP read of the residual stream is normalized before.
    pub pre_norms: bool,
    /// What attention and MLP write to the residual stream is normalized before.
    pub post_norms: bool,
    /// What stored norm gains lack; a source of weights adds it.
    pub gain_offset: f64,
    /// Factor of what attention and MLP write to the residual stream; a source of weights
    /// multiplies o and down by it, or the gains of [`post_norms`](Self::post_norms).
    pub residual_factor: f64,
    /// Factor of the logits; a source of weights multiplies the final norm's gain by it.
    pub logit_factor: f64,
    /// Scores s of attention, scaled, become `c tanh(s / c)`.
    pub score_cap: Option<f64>,
    /// Logits l become `c tanh(l / c)`.
    pub logit_cap: Option<f64>,
    /// Embedding and head are one matrix.
    pub tie_word_embeddings: bool,
    /// q, k and v projections have biases.
    pub qkv_bias: bool,
    /// The attention's output projection has a bias.
    pub o_bias: bool,
    /// gate, up and down projections have biases.
    pub mlp_bias: bool,
    /// How queries and keys are RMS-normalized.
    pub qk_norm: QkNorm,
    /// One entry per layer.
    pub layers: Vec<LayerConfig>,
    /// Token that begins a text.
    pub bos_token_id: Option<u32>,
    /// Tokens that end one; those of `generation_config.json` where it names any.
    pub eos_token_ids: Vec<u32>,
    /// What the files say that is not followed, a sentence each.
    pub notes: Vec<String>,
    /// `quantization_config`, as it stands in the file.
    pub quantization_config: Option<Value>,
    /// The whole document, every field preserved in its order; of a model of text and images its
    /// `text_config`, made whole.
    pub raw: Map<String, Value>,
}

impl ModelConfig {
    /// Reads `config.json` and, when present, `generation_config.json` of a directory, or the same
    /// from the metadata of a GGUF file.
    ///
    /// # Errors
    /// [`Error::Config`] naming file and field, [`Error::Json`], [`Error::Io`].
    pub fn from_dir(dir: impl AsRef<Path>) -> Result<Self, Error> {
        let dir = dir.as_ref();
        if is_gguf(dir) {
            return Gguf::open(dir)?.model_config();
        }
        let path = dir.join(CONFIG);
        let mut config = Self::parse(&read_limited(&path, MAX_CONFIG)?, &path)?;
        let path = dir.join(GENERATION_CONFIG);
        if let Some(bytes) = read_optional(&path, MAX_CONFIG)? {
            config.apply_generation_config(&bytes, &path)?;
        }
        Ok(config)
    }

    /// Reads the text of a `config.json`; `path` is for messages.
    ///
    /// # Errors
    /// As for [`ModelConfig::from_dir`].
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Self, Error> {
        Fields::parse(bytes, path)?.text_alone()?.dense_granite()?.into_config()
    }

    /// Takes `bos_token_id` and `eos_token_id` from the text of a `generation_config.json`.
    ///
    /// # Errors
    /// As for [`ModelConfig::from_dir`].
    pub fn apply_generation_config(&mut self, bytes: &[u8], path: &Path) -> Result<(), Error> {
        let f = Fields::parse(bytes, path)?;
        if let Some(bos) = f.token_ids("bos_token_id", self.vocab_size, &mut self.notes)?.first() {
            self.bos_token_id = Some(*bos);
        }
        let eos = f.token_ids("eos_token_id", self.vocab_size, &mut self.notes)?;
        if !eos.is_empty() {
            self.eos_token_ids = eos;
        }
        Ok(())
    }

    /// Number of layers.
    #[must_use]
    pub fn num_hidden_layers(&self) -> usize {
        self.layers.len()
    }

    /// Whether a layer turns by [`local_rope`](Self::local_rope) where it turns.
    ///
    /// # Panics
    /// When there is no such layer.
    #[must_use]
    pub fn turns_locally(&self, layer: usize) -> bool {
        self.local_rope.is_some() && self.layers[layer].sliding_window.is_some()
    }

    /// Rows of the query projection.
    #[must_use]
    pub fn q_dim(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Rows of the key and of the value projection.
    #[must_use]
    pub fn kv_dim(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }
}

/// A JSON object with the path it came from, read field by field.
struct Fields {
    path: PathBuf,
    /// Prefix of field names in messages, such as `rope_scaling.`.
    prefix: &'static str,
    map: Map<String, Value>,
}

impl Fields {
    fn parse(bytes: &[u8], path: &Path) -> Result<Self, Error> {
        Ok(Self { path: path.to_owned(), prefix: "", map: json::object(bytes, path)? })
    }

    fn bad(&self, field: &str, rule: impl Into<String>) -> Error {
        Error::Config { path: self.path.clone(), field: format!("{}{field}", self.prefix), rule: rule.into() }
    }

    /// The value, null counting as absent.
    fn get(&self, field: &str) -> Option<&Value> {
        self.map.get(field).filter(|v| !v.is_null())
    }

    fn size(&self, field: &str, max: u64, default: Option<usize>) -> Result<usize, Error> {
        let Some(v) = self.get(field) else {
            return default.ok_or_else(|| {
                self.bad(field, format!("should be a whole number in 1..={max}, is missing"))
            });
        };
        v.as_u64().filter(|n| (1..=max).contains(n)).and_then(|n| usize::try_from(n).ok()).ok_or_else(|| {
            self.bad(field, format!("should be a whole number in 1..={max}, got {}", short(v)))
        })
    }

    fn number(&self, field: &str, default: Option<f64>) -> Result<f64, Error> {
        let Some(v) = self.get(field) else {
            return default.ok_or_else(|| self.bad(field, "should be a positive number, is missing"));
        };
        v.as_f64()
            .filter(|n| n.is_finite() && *n > 0.0)
            .ok_or_else(|| self.bad(field, format!("should be a positive number, got {}", short(v))))
    }

    fn flag(&self, field: &str, default: bool) -> Result<bool, Error> {
        match self.get(field) {
            None => Ok(default),
            Some(Value::Bool(b)) => Ok(*b),
            Some(v) => Err(self.bad(field, format!("should be true or false, got {}", short(v)))),
        }
    }

    fn text(&self, field: &str) -> Result<Option<&str>, Error> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s)),
            Some(v) => Err(self.bad(field, format!("should be a string, got {}", short(v)))),
        }
    }

    /// One token id, a list of them or nothing. One that the vocabulary does not have can come out
    /// of no text: it is left out, with a note.
    fn token_ids(&self, field: &str, vocab: usize, notes: &mut Vec<String>) -> Result<Vec<u32>, Error> {
        let list = match self.get(field) {
            None => &[][..],
            Some(Value::Array(list)) => list,
            Some(v) => std::slice::from_ref(v),
        };
        let mut ids = Vec::new();
        for v in list {
            if !v.is_u64() && !v.is_i64() {
                return Err(self.bad(field, format!("should be a token id below {vocab}, got {}", short(v))));
            }
            match v.as_u64().filter(|&n| n < vocab as u64).and_then(|n| u32::try_from(n).ok()) {
                Some(id) => ids.push(id),
                None => notes.push(format!(
                    "`{}`: `{}{field}` names token {v}, which a vocabulary of {vocab} does not have: left out",
                    self.path.display(),
                    self.prefix
                )),
            }
        }
        Ok(ids)
    }

    /// A nested object.
    fn object(&self, field: &str, prefix: &'static str) -> Result<Option<Self>, Error> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Self { path: self.path.clone(), prefix, map: map.clone() })),
            Some(v) => Err(self.bad(field, format!("should be an object, got {}", short(v)))),
        }
    }

    fn architecture(&self) -> Result<Architecture, Error> {
        let known = Architecture::known;
        let class = match self.get("architectures") {
            None => None,
            Some(Value::Array(list)) => match list.as_slice() {
                [Value::String(s)] => Some(s.as_str()),
                _ => return Err(self.bad("architectures", "should be a list of one name")),
            },
            Some(v) => {
                return Err(
                    self.bad("architectures", format!("should be a list of one name, got {}", short(v)))
                );
            }
        };
        let by_class = class.map(|c| Architecture::ALL.into_iter().find(|a| a.class_name() == c).ok_or(c));
        let model_type = self.text("model_type")?;
        let by_type = model_type.map(|t| Architecture::of(t).ok_or(t));
        match (by_class, by_type) {
            (Some(Err(c)), _) => {
                Err(self.bad("architectures", format!("should be one of {}, got `{}`", known(), clip(c))))
            }
            (_, Some(Err(t))) => {
                Err(self.bad("model_type", format!("should be one of {}, got `{}`", known(), clip(t))))
            }
            (Some(Ok(a)), Some(Ok(b))) if a != b => Err(self.bad(
                "model_type",
                format!("should agree with architectures (`{}`), got `{}`", a.class_name(), b.model_type()),
            )),
            (Some(Ok(a)), _) | (None, Some(Ok(a))) => Ok(a),
            (None, None) => Err(self.bad(
                "architectures",
                format!("or `model_type` should be one of {}, both are missing", known()),
            )),
        }
    }

    /// Which layers have a window, by `layer_types` or by the architecture's own rule.
    fn layers(&self, arch: Architecture) -> Result<Vec<LayerConfig>, Error> {
        let n = self.size("num_hidden_layers", MAX_LAYERS, None)?;
        let rope = if arch == Architecture::SmolLm3 { self.smollm3_rope(n)? } else { vec![true; n] };
        let window = match arch {
            Architecture::Llama
            | Architecture::Granite
            | Architecture::GraniteMoe
            | Architecture::Olmoe
            | Architecture::Olmo2
            | Architecture::SeedOss
            | Architecture::Ernie45
            | Architecture::Glm
            | Architecture::Glm4 => None,
            Architecture::Exaone4 if !self.map.contains_key("sliding_window") => Some(4096),
            Architecture::Exaone4 => self.window()?,
            Architecture::Phi3 | Architecture::Mixtral | Architecture::Ministral3 => self.window()?,
            Architecture::Gemma2 | Architecture::Gemma3 | Architecture::Olmo3 => {
                Some(self.size("sliding_window", 1 << 32, Some(4096))?)
            }
            Architecture::Mistral if !self.map.contains_key("sliding_window") => Some(4096),
            Architecture::Mistral => self.window()?,
            _ if self.flag("use_sliding_window", false)? => match self.window()? {
                // transformers' default of the Qwen classes; SmolLM3 has none.
                None if arch != Architecture::SmolLm3 && !self.map.contains_key("sliding_window") => {
                    Some(4096)
                }
                w => w,
            },
            _ => None,
        };
        use Architecture::{Exaone4, Gemma2, Gemma3, Olmo3, Qwen2, Qwen3, Qwen3Moe, SmolLm3};
        let uniform = !matches!(arch, Qwen2 | Qwen3 | Qwen3Moe | SmolLm3 | Gemma2 | Gemma3 | Olmo3 | Exaone4);
        let sliding: Vec<bool> = match self.layer_types(n)? {
            Some(types) if uniform => {
                if types.iter().any(|&s| s != window.is_some()) {
                    return Err(self.bad(
                        "layer_types",
                        format!("should be the same for all layers of `{}`", arch.model_type()),
                    ));
                }
                types
            }
            Some(types) => types,
            None => match arch {
                _ if uniform => vec![true; n],
                Gemma3 => {
                    let pattern = ["sliding_window_pattern", "_sliding_window_pattern"];
                    let field = pattern.into_iter().find(|f| self.get(f).is_some()).unwrap_or(pattern[0]);
                    let every = self.size(field, MAX_LAYERS, Some(6))?;
                    (1..=n).map(|i| i % every != 0).collect()
                }
                Gemma2 => (1..=n).map(|i| i % 2 != 0).collect(),
                Exaone4 if window.is_none() => vec![false; n],
                // Files that say it by letters ("LLLG") list the layers, too.
                Exaone4 => {
                    let every = self.size("sliding_window_pattern", MAX_LAYERS, Some(4))?;
                    (1..=n).map(|i| i % every != 0).collect()
                }
                Olmo3 => (1..=n).map(|i| i % 4 != 0).collect(),
                Qwen2 | Qwen3 | Qwen3Moe => {
                    let from = match self.get("max_window_layers") {
                        None => 28,
                        Some(v) => v.as_u64().ok_or_else(|| {
                            self.bad(
                                "max_window_layers",
                                format!("should be a whole number, got {}", short(v)),
                            )
                        })?,
                    };
                    (0..n as u64).map(|i| i >= from).collect()
                }
                _ => rope.iter().map(|r| !r).collect(),
            },
        };
        Ok(rope
            .into_iter()
            .zip(sliding)
            .map(|(rope, s)| LayerConfig {
                rope: rope && (arch != Exaone4 || s || window.is_none()),
                sliding_window: window.filter(|_| s),
            })
            .collect())
    }

    fn window(&self) -> Result<Option<usize>, Error> {
        self.get("sliding_window").map(|_| self.size("sliding_window", 1 << 32, None)).transpose()
    }

    /// `layer_types` as "is sliding" per layer.
    fn layer_types(&self, n: usize) -> Result<Option<Vec<bool>>, Error> {
        let Some(v) = self.get("layer_types") else { return Ok(None) };
        let rule = || {
            self.bad(
                "layer_types",
                format!("should be {n} names, each `full_attention` or `sliding_attention`"),
            )
        };
        let list = v.as_array().filter(|l| l.len() == n).ok_or_else(rule)?;
        let one = |v: &Value| match v.as_str() {
            Some("full_attention") => Ok(false),
            Some("sliding_attention") => Ok(true),
            _ => Err(rule()),
        };
        list.iter().map(one).collect::<Result<_, _>>().map(Some)
    }

    fn smollm3_rope(&self, n: usize) -> Result<Vec<bool>, Error> {
        let Some(v) = self.get("no_rope_layers") else {
            let every = self.size("no_rope_layer_interval", MAX_LAYERS, Some(4))?;
            return Ok((1..=n).map(|i| i % every != 0).collect());
        };
        let rule =
            || self.bad("no_rope_layers", format!("should be {n} numbers, each 1 (rotary) or 0 (none)"));
        let list = v.as_array().filter(|l| l.len() == n).ok_or_else(rule)?;
        let one = |v: &Value| match (v.as_u64(), v.as_bool()) {
            (Some(1), _) | (_, Some(true)) => Ok(true),
            (Some(0), _) | (_, Some(false)) => Ok(false),
            _ => Err(rule()),
        };
        list.iter().map(one).collect()
    }

    /// Refuses what Gemma's configurations have fields for and no published model of these types
    /// uses.
    fn plain_gemma(&self, arch: Architecture) -> Result<(), Error> {
        let capped = ["attn_logit_softcapping", "final_logit_softcapping"];
        for field in capped.into_iter().filter(|_| arch == Architecture::Gemma3) {
            if self.get(field).is_some() {
                return Err(self.bad(field, "should be null: capped logits are known of `gemma2` only"));
            }
        }
        for field in ["attention_bias", "use_bidirectional_attention"] {
            if self.flag(field, false)? {
                let rule = format!("should be false: not supported for `{}`", arch.model_type());
                return Err(self.bad(field, rule));
            }
        }
        Ok(())
    }

    /// What the magnitude of scores or logits stays below; null is no cap.
    fn cap(&self, arch: Architecture, field: &str, default: f64) -> Result<Option<f64>, Error> {
        let null = self.map.get(field).is_some_and(Value::is_null);
        (arch == Architecture::Gemma2 && !null).then(|| self.moderate(field, Some(default))).transpose()
    }

    /// The experts, and the width of each.
    fn experts(&self, arch: Architecture, hidden_size: usize) -> Result<(Experts, usize), Error> {
        use Architecture::{GraniteMoe, Mixtral, Olmoe, Qwen3Moe};
        let (width, count) = match arch {
            Qwen3Moe => ("moe_intermediate_size", "num_experts"),
            Olmoe => ("intermediate_size", "num_experts"),
            _ => ("intermediate_size", "num_local_experts"),
        };
        let intermediate_size = self.size(width, MAX_SIZE, None)?;
        // An expert is a range of rows of a packed matrix, which has strips of 16.
        for (field, size) in [(width, intermediate_size), ("hidden_size", hidden_size)] {
            if !size.is_multiple_of(16) {
                let rule = format!("should be a multiple of 16 in a model with experts, got {size}");
                return Err(self.bad(field, rule));
            }
        }
        let n = self.size(count, MAX_EXPERTS, None)?;
        if (n * intermediate_size.max(hidden_size)) as u64 > MAX_SIZE {
            let rule = format!("times the width of an expert should be at most {MAX_SIZE}, got {n}");
            return Err(self.bad(count, rule));
        }
        let active = self.size("num_experts_per_tok", n as u64, None)?;
        if arch == Qwen3Moe {
            if self.size("decoder_sparse_step", MAX_LAYERS, Some(1))? != 1 {
                return Err(self.bad("decoder_sparse_step", "should be 1: every layer has experts"));
            }
            if self.get("mlp_only_layers").is_some_and(|v| v.as_array().is_none_or(|l| !l.is_empty())) {
                return Err(self.bad("mlp_only_layers", "should be an empty list: every layer has experts"));
            }
        }
        if arch == Olmoe && self.get("clip_qkv").is_some() {
            return Err(
                self.bad("clip_qkv", "should be null: clipped queries, keys and values are not supported")
            );
        }
        let renormalized = matches!(arch, Mixtral | GraniteMoe) || self.flag("norm_topk_prob", false)?;
        Ok((Experts { count: n, active, renormalized }, intermediate_size))
    }

    fn into_config(self) -> Result<ModelConfig, Error> {
        use Architecture::{
            Ernie45, Exaone4, Gemma2, Gemma3, Glm4, Granite, GraniteMoe, Llama, Ministral3, Mixtral, Olmo2,
            Olmo3, Olmoe, Phi3, Qwen2, Qwen3, Qwen3Moe, SeedOss, SmolLm3,
        };
        let arch = self.architecture()?;
        let (activation, names) = match arch {
            Gemma2 | Gemma3 => (Activation::GeluTanh, ["gelu_pytorch_tanh", "gelu_new"]),
            _ => (Activation::Silu, ["silu", "swish"]),
        };
        for field in ["hidden_act", "hidden_activation"] {
            if let Some(act) = self.text(field)?
                && !names.contains(&act)
            {
                return Err(self.bad(field, format!("should be `{}`, got `{}`", names[0], clip(act))));
            }
        }
        if arch.is_gemma() {
            self.plain_gemma(arch)?;
        }
        let hidden_size = self.size("hidden_size", MAX_SIZE, None)?;
        // What the files of `gemma3` leave out.
        let usual = |size: usize| arch.is_gemma().then_some(size);
        let heads = self.size("num_attention_heads", MAX_SIZE, usual(8))?;
        let kv = self.size("num_key_value_heads", MAX_SIZE, usual(4).or(Some(heads)))?;
        if heads % kv != 0 {
            let rule = format!("should divide num_attention_heads ({heads}), got {kv}");
            return Err(self.bad("num_key_value_heads", rule));
        }
        let default_head_dim = match arch {
            _ if self.map.contains_key("head_dim") => None,
            Qwen3 | Qwen3Moe | SeedOss | Ernie45 | Ministral3 => Some(128),
            _ if arch.is_glm() => Some(128),
            Gemma2 | Gemma3 => Some(256),
            _ => None,
        };
        let head_dim = match (self.get("head_dim"), default_head_dim) {
            (Some(_), _) => self.size("head_dim", MAX_SIZE, None)?,
            (None, Some(d)) => d,
            (None, None) if hidden_size % heads == 0 => hidden_size / heads,
            (None, None) => {
                let rule =
                    format!("should divide hidden_size ({hidden_size}) as there is no head_dim, got {heads}");
                return Err(self.bad("num_attention_heads", rule));
            }
        };
        if head_dim % 2 != 0 {
            return Err(self.bad("head_dim", format!("should be even (rotary turns pairs), got {head_dim}")));
        }
        if heads.checked_mul(head_dim).is_none_or(|n| n as u64 > MAX_SIZE) {
            return Err(
                self.bad("head_dim", format!("times num_attention_heads should be at most {MAX_SIZE}"))
            );
        }
        let vocab_size =
            self.size("vocab_size", MAX_SIZE, usual(if arch == Gemma2 { 256_000 } else { 262_208 }))?;
        let context = match arch {
            Phi3 | Olmoe => 4096,
            Gemma2 => 8192,
            SeedOss => 524_288,
            Ministral3 => 262_144,
            Mixtral | Gemma3 | Ernie45 => 131_072,
            _ if arch.is_glm() => 131_072,
            _ => 2048,
        };
        let mut max_position_embeddings = self.size("max_position_embeddings", 1 << 32, Some(context))?;
        let mut rope = self.rope(arch, head_dim, &mut max_position_embeddings)?;
        let factor = |field| match arch {
            Granite | GraniteMoe => self.moderate(field, Some(1.0)),
            _ => Ok(1.0),
        };
        let mut local_rope = match arch {
            Gemma3 | Olmo3 => Some(self.local_rope(arch, &rope, &mut max_position_embeddings)?),
            _ => None,
        };
        #[expect(clippy::cast_precision_loss, reason = "widths are small")]
        let (root, width) = ((head_dim as f64).sqrt(), hidden_size as f64);
        let embedding = if arch.is_gemma() { width.sqrt() } else { factor("embedding_multiplier")? };
        // In place of 1 / sqrt(head_dim).
        let scores = match arch {
            Granite | GraniteMoe => Some(factor("attention_multiplier")?),
            Gemma2 | Gemma3 => Some(1.0 / self.moderate("query_pre_attn_scalar", Some(256.0))?.sqrt()),
            _ => None,
        };
        if let Some(scores) = scores {
            let gain = (scores * root).sqrt();
            [Some(&mut rope), local_rope.as_mut()].into_iter().flatten().for_each(|rope| rope.gain *= gain);
        }
        let usual_eps = match arch {
            Phi3 | Mixtral | Olmoe | Olmo2 | Olmo3 | Exaone4 | Ernie45 | Ministral3 => 1e-5,
            _ if arch.is_glm() => 1.5625e-7,
            _ => 1e-6,
        };
        let eps = self.number("rms_norm_eps", Some(usual_eps))?;
        if eps > 1.0 {
            return Err(self.bad("rms_norm_eps", format!("should be at most 1, got {eps:e}")));
        }
        let attention_bias = self.flag("attention_bias", arch == SeedOss || arch.is_glm())?;
        let every_bias = arch == Ernie45 && self.flag("use_bias", false)?;
        let bias_flag_used =
            matches!(arch, Llama | Qwen3 | SmolLm3 | Granite | Qwen3Moe | GraniteMoe | Olmoe | Olmo2 | Olmo3);
        let (experts, intermediate_size) = if arch.has_experts() {
            let (experts, width) = self.experts(arch, hidden_size)?;
            (Some(experts), width)
        } else {
            (None, self.size("intermediate_size", MAX_SIZE, None)?)
        };
        let mut notes = Vec::new();
        Ok(ModelConfig {
            arch,
            hidden_size,
            intermediate_size,
            experts,
            num_attention_heads: heads,
            num_key_value_heads: kv,
            head_dim,
            vocab_size,
            max_position_embeddings,
            rms_norm_eps: eps / embedding.powi(2),
            inner_norm_eps: eps,
            rope,
            local_rope,
            activation,
            pre_norms: !matches!(arch, Olmo2 | Olmo3 | Exaone4),
            post_norms: arch.is_gemma() || matches!(arch, Olmo2 | Olmo3 | Exaone4 | Glm4),
            gain_offset: if arch.is_gemma() { 1.0 } else { 0.0 },
            residual_factor: factor("residual_multiplier")? / embedding,
            logit_factor: 1.0 / factor("logits_scaling")?,
            score_cap: self.cap(arch, "attn_logit_softcapping", 50.0)?,
            logit_cap: self.cap(arch, "final_logit_softcapping", 30.0)?,
            tie_word_embeddings: self
                .flag("tie_word_embeddings", matches!(arch, SmolLm3 | Ernie45) || arch.is_gemma())?,
            qkv_bias: match arch {
                Qwen2 => true,
                Ernie45 => every_bias,
                _ => (bias_flag_used || arch == SeedOss || arch.is_glm()) && attention_bias,
            },
            o_bias: match arch {
                SeedOss => self.flag("attention_out_bias", false)?,
                Ernie45 => every_bias,
                _ => bias_flag_used && attention_bias,
            },
            mlp_bias: every_bias
                || matches!(arch, Llama | SmolLm3 | Granite | SeedOss) && self.flag("mlp_bias", false)?,
            qk_norm: match arch {
                Qwen3 | Qwen3Moe | Gemma3 | Exaone4 => QkNorm::Heads,
                Olmoe | Olmo2 | Olmo3 => QkNorm::Whole,
                _ => QkNorm::Absent,
            },
            neighbours_turn: arch == Ernie45 || arch.is_glm(),
            layers: self.layers(arch)?,
            bos_token_id: self.token_ids("bos_token_id", vocab_size, &mut notes)?.first().copied(),
            eos_token_ids: self.token_ids("eos_token_id", vocab_size, &mut notes)?,
            notes,
            quantization_config: self.get("quantization_config").cloned(),
            raw: self.map,
        })
    }
}

/// A value as text, cut to what a message can carry.
fn short(v: &Value) -> String {
    match v {
        Value::Object(map) if map.contains_key(json::FLOAT) => clip(&map[json::FLOAT].to_string()),
        Value::Object(_) => "an object".to_owned(),
        Value::Array(_) => "a list".to_owned(),
        leaf => clip(&leaf.to_string()),
    }
}

/// At most 60 characters of `s`, control characters escaped.
pub(crate) fn clip(s: &str) -> String {
    let mut out: String = s.chars().take(60).flat_map(char::escape_debug).collect();
    if s.chars().nth(60).is_some() {
        out.push('…');
    }
    out
}
