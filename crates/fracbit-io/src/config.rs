//! `config.json` and `generation_config.json`: what the model is.
//!
//! Fields and defaults follow the configuration classes of Hugging Face transformers (4.5x and 5).
//! What is particular to an architecture stands in its module in `config/architecture`: names,
//! defaults, rules, and why. Here is what they have in common.
//!
//! Of models of text and images or sounds (`gemma3`, `mistral3`, `qwen2_vl`, `qwen2_5_vl`,
//! `qwen3_vl`, `internvl`, `llava`, `idefics3`, ...) the language model is taken alone where it is
//! one of these: `text_config`, and the tensors without the prefix `language_model.` or
//! `text_model.`. Where all is text, the three positions of a token in `mrope` are one, and it
//! turns as others do.
//!
//! Mixtures have experts in place of the MLP in every layer ([`Experts`]); they are stored under
//! three names, of which [`crate::Checkpoint::parted`] makes one.
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
pub(crate) use architecture::{
    Biases, Caps, ExpertFields, Facts, GgufNames, Layout, LocalRope, Pattern, Window,
};
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
/// Bounds of the magnitude of scores and logits.
pub(crate) const CAPS: [&str; 2] = ["attn_logit_softcapping", "final_logit_softcapping"];

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
    pub interleaved_rope: bool,
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
    pub fn has_local_rope(&self, layer: usize) -> bool {
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
        let facts = arch.facts();
        let n = self.size("num_hidden_layers", MAX_LAYERS, None)?;
        let rope = if facts.some_turn { self.turning_layers(n)? } else { vec![true; n] };
        let left_out = !self.map.contains_key("sliding_window");
        let window = match facts.window {
            Window::None => None,
            Window::Always(usual) => Some(self.size("sliding_window", 1 << 32, Some(usual))?),
            Window::Flag(_) if !self.flag("use_sliding_window", false)? => None,
            Window::Flag(usual) | Window::Field(usual) if left_out => usual,
            Window::Flag(_) | Window::Field(_) => self.window()?,
        };
        let sliding: Vec<bool> = match (self.layer_types(n)?, facts.pattern) {
            (Some(types), Pattern::All) if types.iter().any(|&s| s != window.is_some()) => {
                return Err(self.bad(
                    "layer_types",
                    format!("should be the same for all layers of `{}`", facts.model_type),
                ));
            }
            (Some(types), _) => types,
            (None, Pattern::All) => vec![true; n],
            (None, Pattern::AllBut(..)) if window.is_none() => vec![false; n],
            (None, Pattern::AllBut(fields, usual)) => {
                let field = fields.iter().find(|f| self.get(f).is_some());
                let every = field.map_or(Ok(usual), |field| self.size(field, MAX_LAYERS, None))?;
                (1..=n).map(|i| i % every != 0).collect()
            }
            (None, Pattern::From(usual)) => {
                let from = match self.get("max_window_layers") {
                    None => usual,
                    Some(v) => v.as_u64().ok_or_else(|| {
                        self.bad("max_window_layers", format!("should be a whole number, got {}", short(v)))
                    })?,
                };
                (0..n as u64).map(|i| i >= from).collect()
            }
            (None, Pattern::Unturned) => rope.iter().map(|turns| !turns).collect(),
        };
        let turns = |sliding: bool| !facts.only_local_turn || sliding || window.is_none();
        let layer = |(rope, sliding)| LayerConfig {
            rope: rope && turns(sliding),
            sliding_window: window.filter(|_| sliding),
        };
        Ok(rope.into_iter().zip(sliding).map(layer).collect())
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

    /// `no_rope_layers`: 1 where a layer does turn.
    fn turning_layers(&self, n: usize) -> Result<Vec<bool>, Error> {
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

    /// Refuses what the configurations of an architecture have fields for and no published model
    /// of it uses.
    fn without(&self, facts: &Facts) -> Result<(), Error> {
        for field in CAPS.into_iter().filter(|_| facts.caps == Caps::Refused) {
            if self.get(field).is_some() {
                let known = Architecture::those(|facts| matches!(facts.caps, Caps::Fields(_)));
                return Err(
                    self.bad(field, format!("should be null: capped logits are known of {known} only"))
                );
            }
        }
        for field in facts.without {
            if self.flag(field, false)? {
                let rule = format!("should be false: not supported for `{}`", facts.model_type);
                return Err(self.bad(field, rule));
            }
        }
        Ok(())
    }

    /// What the magnitude of scores and logits stays below; null is no cap.
    fn caps(&self, facts: &Facts) -> Result<[Option<f64>; 2], Error> {
        let Caps::Fields(usual) = facts.caps else { return Ok([None; 2]) };
        let cap = |i: usize| {
            let null = self.map.get(CAPS[i]).is_some_and(Value::is_null);
            (!null).then(|| self.moderate(CAPS[i], Some(usual[i]))).transpose()
        };
        Ok([cap(0)?, cap(1)?])
    }

    /// The experts, and the width of each.
    fn experts(&self, fields: ExpertFields, hidden_size: usize) -> Result<(Experts, usize), Error> {
        let ExpertFields { width, count, renormalized } = fields;
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
        if self.size("decoder_sparse_step", MAX_LAYERS, Some(1))? != 1 {
            return Err(self.bad("decoder_sparse_step", "should be 1: every layer has experts"));
        }
        if self.get("mlp_only_layers").is_some_and(|v| v.as_array().is_none_or(|l| !l.is_empty())) {
            return Err(self.bad("mlp_only_layers", "should be an empty list: every layer has experts"));
        }
        if self.get("clip_qkv").is_some() {
            return Err(
                self.bad("clip_qkv", "should be null: clipped queries, keys and values are not supported")
            );
        }
        let renormalized = renormalized || self.flag("norm_topk_prob", false)?;
        Ok((Experts { count: n, active, renormalized }, intermediate_size))
    }

    fn into_config(self) -> Result<ModelConfig, Error> {
        let arch = self.architecture()?;
        let facts = arch.facts();
        let names = match facts.activation {
            Activation::GeluTanh => ["gelu_pytorch_tanh", "gelu_new"],
            Activation::Silu => ["silu", "swish"],
        };
        for field in ["hidden_act", "hidden_activation"] {
            if let Some(act) = self.text(field)?
                && !names.contains(&act)
            {
                return Err(self.bad(field, format!("should be `{}`, got `{}`", names[0], clip(act))));
            }
        }
        self.without(facts)?;
        let hidden_size = self.size("hidden_size", MAX_SIZE, None)?;
        let heads = self.size("num_attention_heads", MAX_SIZE, facts.heads.map(|[heads, _]| heads))?;
        let usual = facts.heads.map_or(heads, |[_, kv]| kv);
        let kv = self.size("num_key_value_heads", MAX_SIZE, Some(usual))?;
        if heads % kv != 0 {
            let rule = format!("should divide num_attention_heads ({heads}), got {kv}");
            return Err(self.bad("num_key_value_heads", rule));
        }
        // Null is not left out: transformers then divides.
        let default_head_dim = facts.head_dim.filter(|_| !self.map.contains_key("head_dim"));
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
        let vocab_size = self.size("vocab_size", MAX_SIZE, facts.vocab_size)?;
        let mut max_position_embeddings =
            self.size("max_position_embeddings", 1 << 32, Some(facts.context))?;
        let mut rope = self.rope(arch, head_dim, &mut max_position_embeddings)?;
        let factor = |field| if facts.multipliers { self.moderate(field, Some(1.0)) } else { Ok(1.0) };
        let mut local_rope = match facts.local_rope {
            Some(kind) => Some(self.local_rope(arch, kind, &rope, &mut max_position_embeddings)?),
            None => None,
        };
        #[expect(clippy::cast_precision_loss, reason = "widths are small")]
        let (root, width) = ((head_dim as f64).sqrt(), hidden_size as f64);
        let embedding = if facts.scaled_embedding { width.sqrt() } else { factor("embedding_multiplier")? };
        // In place of 1 / sqrt(head_dim).
        let scores = match facts.score_scalar {
            Some(usual) => Some(1.0 / self.moderate("query_pre_attn_scalar", Some(usual))?.sqrt()),
            None if facts.multipliers => Some(factor("attention_multiplier")?),
            None => None,
        };
        if let Some(scores) = scores {
            let gain = (scores * root).sqrt();
            [Some(&mut rope), local_rope.as_mut()].into_iter().flatten().for_each(|rope| rope.gain *= gain);
        }
        let eps = self.number("rms_norm_eps", Some(facts.eps))?;
        if eps > 1.0 {
            return Err(self.bad("rms_norm_eps", format!("should be at most 1, got {eps:e}")));
        }
        let by_itself = matches!(facts.biases, Biases::InputsFlag | Biases::TwoFlags);
        let attention_bias = self.flag("attention_bias", by_itself)?;
        let [qkv_bias, o_bias, every_bias] = match facts.biases {
            Biases::None => [false; 3],
            Biases::Inputs => [true, false, false],
            Biases::Flag => [attention_bias, attention_bias, false],
            Biases::InputsFlag => [attention_bias, false, false],
            Biases::TwoFlags => [attention_bias, self.flag("attention_out_bias", false)?, false],
            Biases::Every => [self.flag("use_bias", false)?; 3],
        };
        let (experts, intermediate_size) = match facts.experts {
            Some(fields) => {
                let (experts, width) = self.experts(fields, hidden_size)?;
                (Some(experts), width)
            }
            None => (None, self.size("intermediate_size", MAX_SIZE, None)?),
        };
        let [score_cap, logit_cap] = self.caps(facts)?;
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
            activation: facts.activation,
            pre_norms: facts.pre_norms,
            post_norms: facts.post_norms,
            gain_offset: facts.gain_offset,
            residual_factor: factor("residual_multiplier")? / embedding,
            logit_factor: 1.0 / factor("logits_scaling")?,
            score_cap,
            logit_cap,
            tie_word_embeddings: self.flag("tie_word_embeddings", facts.tied)?,
            qkv_bias,
            o_bias,
            mlp_bias: every_bias || facts.mlp_bias && self.flag("mlp_bias", false)?,
            qk_norm: facts.qk_norm,
            interleaved_rope: facts.interleaved_rope,
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
