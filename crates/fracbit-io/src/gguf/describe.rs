//! What the GGUF file of a checkpoint says: metadata, and which tensors it holds.

use std::path::Path;

use serde_json::Value;

use super::config::yarn_gain;
use super::container::ALIGNMENT_KEY;
use super::names::{names_of, written};
use super::{Gguf, tokens};
use crate::checkpoint::{EMBED, HEAD};
use crate::config::{CAPS, Caps, LayerConfig, Layout, LocalRope, ModelConfig, Pattern, QkNorm, RopeScaling};
use crate::error::Error;
use crate::tokenizer::Tokenizer;

/// `general.quantization_version`: of the block types.
const QUANTIZATION_VERSION: usize = 2;

/// Metadata, and small tensors that come from the configuration.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Description {
    /// Key, and type and value as they are written.
    pub(super) entries: Vec<(String, Vec<u8>)>,
    /// Names and numbers of tensors.
    pub factors: Vec<(String, Vec<f32>)>,
    /// Added tokens that the embedding has no rows for.
    pub left_out: Vec<String>,
}

/// A tensor of the file.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorOut {
    /// Its name.
    pub name: String,
    /// The tensors of the checkpoint ([`crate::Checkpoint::parted`]) that lie in it, one above the
    /// other.
    pub sources: Vec<String>,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Rows of a head where row `half * size / 2 + k` of each goes to `2 k + half`; 0: rows stay.
    pub paired_head: usize,
    /// What is added to every number.
    pub shift: f32,
}

impl TensorOut {
    /// The row of the sources that is row `row` of the tensor.
    #[must_use]
    pub fn source_row(&self, row: usize) -> usize {
        if self.paired_head == 0 {
            return row;
        }
        let (at, half) = (row % self.paired_head, self.paired_head / 2);
        row - at + at % 2 * half + at / 2
    }
}

/// The tensors of a model's file but for those of [`Description::factors`].
#[must_use]
pub fn tensors(config: &ModelConfig) -> Vec<TensorOut> {
    let (names, layout) = (names_of(config.arch), config.arch.facts().layout);
    let (hidden, inner, q, kv) =
        (config.hidden_size, config.intermediate_size, config.q_dim(), config.kv_dim());
    let mut out = Vec::new();
    let mut add = |name: String, sources: Vec<String>, shape: &[usize], head: usize| {
        let norm = name.ends_with("norm.weight");
        let shift = if norm && config.gain_offset != 0.0 { 1.0 } else { 0.0 };
        out.push(TensorOut { name, sources, shape: shape.to_vec(), paired_head: head, shift });
    };
    add("token_embd.weight".into(), vec![EMBED.into()], &[config.vocab_size, hidden], 0);
    for i in 0..config.num_hidden_layers() {
        let ours = |part: &str| format!("model.layers.{i}.{part}");
        let mut weight = |name: &str, sources: &[&str], shape: &[usize], bias: bool, head: usize| {
            let named = |end: &str| sources.iter().map(|s| format!("{}.{end}", ours(s))).collect::<Vec<_>>();
            add(format!("blk.{i}.{name}.weight"), named("weight"), shape, head);
            if bias {
                add(format!("blk.{i}.{name}.bias"), named("bias"), &shape[..1], head);
            }
        };
        let mut norm = |name: &str, source: &str, width: usize| weight(name, &[source], &[width], false, 0);
        let (heads, heads_kv) = match config.qk_norm {
            QkNorm::Whole => (q, kv),
            _ => (config.head_dim, config.head_dim),
        };
        if config.pre_norms {
            norm("attn_norm", "input_layernorm", hidden);
        }
        if config.qk_norm != QkNorm::Absent {
            norm("attn_q_norm", "self_attn.q_norm", heads);
            norm("attn_k_norm", "self_attn.k_norm", heads_kv);
        }
        if config.post_norms {
            norm("post_attention_norm", "post_attention_layernorm", hidden);
            norm("post_ffw_norm", "post_feedforward_layernorm", hidden);
            if config.pre_norms {
                norm("ffn_norm", "pre_feedforward_layernorm", hidden);
            }
        } else {
            let name = if names.norms[0].is_empty() { "post_attention_norm" } else { "ffn_norm" };
            norm(name, "post_attention_layernorm", hidden);
        }
        let head = if names.paired { config.head_dim } else { 0 };
        let qkv = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"];
        if layout == Layout::FusedInputs {
            weight("attn_qkv", &qkv, &[q + 2 * kv, hidden], config.qkv_bias, 0);
        } else {
            for ((name, source), (rows, head)) in
                ["attn_q", "attn_k", "attn_v"].into_iter().zip(qkv).zip([(q, head), (kv, head), (kv, 0)])
            {
                weight(name, &[source], &[rows, hidden], config.qkv_bias, head);
            }
        }
        weight("attn_output", &["self_attn.o_proj"], &[hidden, q], config.o_bias, 0);
        let (gate, up, down) = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj");
        if let Some(experts) = config.experts {
            weight("ffn_gate_inp", &["mlp.gate"], &[experts.count, hidden], false, 0);
            for (name, own, rows, cols) in [
                ("ffn_gate_exps", "gate_proj", inner, hidden),
                ("ffn_up_exps", "up_proj", inner, hidden),
                ("ffn_down_exps", "down_proj", hidden, inner),
            ] {
                let sources: Vec<_> = (0..experts.count).map(|e| format!("mlp.experts.{e}.{own}")).collect();
                let sources: Vec<_> = sources.iter().map(String::as_str).collect();
                weight(name, &sources, &[experts.count, rows, cols], false, 0);
            }
        } else {
            if names.fused {
                weight("ffn_up", &[gate, up], &[2 * inner, hidden], false, 0);
            } else {
                weight("ffn_gate", &[gate], &[inner, hidden], config.mlp_bias, 0);
                weight("ffn_up", &[up], &[inner, hidden], config.mlp_bias, 0);
            }
            weight("ffn_down", &[down], &[hidden, inner], config.mlp_bias, 0);
        }
    }
    add("output_norm.weight".into(), vec!["model.norm.weight".into()], &[hidden], 0);
    if !config.tie_word_embeddings {
        add("output.weight".into(), vec![HEAD.into()], &[config.vocab_size, hidden], 0);
    }
    out
}

impl Description {
    /// Sets the type that most tensors have, as llama.cpp counts them.
    pub fn set_file_type(&mut self, file_type: usize) {
        self.u32("general.file_type", file_type);
        self.u32("general.quantization_version", QUANTIZATION_VERSION);
    }
}

impl Gguf {
    /// Metadata and small tensors of this file, for another one of the same model.
    ///
    /// # Errors
    /// [`Error::Tensor`] for a tensor of the configuration that is not as it should be.
    pub fn description(&self) -> Result<Description, Error> {
        let m = self.metadata();
        let own = |key: &str| {
            !key.starts_with("split.")
                && !matches!(key, ALIGNMENT_KEY | "general.file_type" | "general.quantization_version")
        };
        let raw = |(key, entry): (&String, &super::container::Entry)| {
            (key.clone(), m.bytes[entry.raw.clone()].to_vec())
        };
        let entries = m.entries.iter().filter(|(key, _)| own(key)).map(raw).collect();
        let mut factors = Vec::new();
        for name in ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"] {
            let planes = self.tensor(name).map_or(0, |(_, info)| info.elements());
            if let Some(numbers) = self.factors(name, 2 * planes as u64)? {
                factors.push((name.to_owned(), numbers.iter().map(|&n| n as f32).collect()));
            }
        }
        Ok(Description { entries, factors, left_out: Vec::new() })
    }
}

/// Metadata and small tensors of a checkpoint's file. `path` and `name` are those of the model.
///
/// # Errors
/// [`Error::Config`] for what the architecture of llama.cpp has no place for, [`Error::Tokenizer`]
/// for a tokenizer that none of its vocabularies is.
pub fn describe(
    config: &ModelConfig,
    tokenizer: Option<&Tokenizer>,
    path: &Path,
    name: &str,
) -> Result<Description, Error> {
    let bad =
        |field: &str, rule: String| Error::Config { path: path.to_owned(), field: field.to_owned(), rule };
    let (facts, prefix, layers) = (config.arch.facts(), written(config.arch), config.num_hidden_layers());
    let key = |key: &str| format!("{prefix}.{key}");
    let raw = |field: &str| config.raw.get(field).and_then(Value::as_f64);
    let mut d = Description::default();
    d.text("general.architecture", prefix);
    d.text("general.type", "model");
    d.text("general.name", name);
    for (own, n) in [
        ("vocab_size", config.vocab_size),
        ("context_length", config.max_position_embeddings),
        ("embedding_length", config.hidden_size),
        ("block_count", layers),
        ("feed_forward_length", config.intermediate_size),
        ("attention.head_count", config.num_attention_heads),
        ("attention.head_count_kv", config.num_key_value_heads),
        ("attention.key_length", config.head_dim),
        ("attention.value_length", config.head_dim),
        ("rope.dimension_count", config.rope.dim),
    ] {
        d.u32(&key(own), n);
    }
    d.f32(&key("attention.layer_norm_rms_epsilon"), config.inner_norm_eps);
    d.f32(&key("rope.freq_base"), config.rope.theta);
    if let Some(experts) = config.experts {
        d.u32(&key("expert_count"), experts.count);
        d.u32(&key("expert_used_count"), experts.active);
        d.u32(&key("expert_feed_forward_length"), config.intermediate_size);
        let usual = facts.gguf.renormalized;
        if experts.renormalized != usual {
            return Err(bad(
                "norm_topk_prob",
                format!("should be {usual}, as llama.cpp computes this architecture"),
            ));
        }
    }
    if facts.multipliers {
        for (own, field) in [
            ("embedding_scale", "embedding_multiplier"),
            ("residual_scale", "residual_multiplier"),
            ("attention.scale", "attention_multiplier"),
            ("logit_scale", "logits_scaling"),
        ] {
            d.f32(&key(own), raw(field).unwrap_or(1.0));
        }
    }
    if let Some(usual) = facts.score_scalar {
        let taken = if layers == facts.gguf.large {
            config.hidden_size as f64 / config.num_attention_heads as f64
        } else {
            config.head_dim as f64
        };
        let own = raw("query_pre_attn_scalar").unwrap_or(usual);
        if own != taken {
            let rule =
                format!("should be {taken}, as llama.cpp takes for granted of such a model, got {own}");
            return Err(bad("query_pre_attn_scalar", rule));
        }
    }
    if let (Some(scores), Some(logits)) = (config.score_cap, config.logit_cap) {
        d.f32(&key(CAPS[0]), scores);
        d.f32(&key(CAPS[1]), logits);
    } else if matches!(facts.caps, Caps::Fields(_)) {
        return Err(bad(CAPS[0], format!("should be numbers, as llama.cpp takes for granted of `{prefix}`")));
    }
    let fourth = |(i, layer): (usize, &LayerConfig)| layer.rope == ((i + 1) % 4 == 0);
    if facts.some_turn && config.layers.iter().enumerate().any(fourth) {
        let rule = "should leave out every fourth layer, as llama.cpp does".to_owned();
        return Err(bad("no_rope_layers", rule));
    }
    let windows: Vec<bool> = config.layers.iter().map(|l| l.sliding_window.is_some()).collect();
    if let Some(window) = config.layers.iter().find_map(|l| l.sliding_window) {
        let known = facts.gguf.windows;
        if !known && window < config.max_position_embeddings {
            let rule = format!("should be null: `{prefix}` of llama.cpp has no windows, got {window}");
            return Err(bad("sliding_window", rule));
        }
        if known {
            d.u32(&key("attention.sliding_window"), window);
        }
        if known && matches!(facts.pattern, Pattern::AllBut(..)) {
            d.bools(&key("attention.sliding_window_pattern"), &windows);
        }
    }
    if let Some(local) = config.local_rope.as_ref().filter(|l| l.theta != 1e4)
        && facts.local_rope == Some(LocalRope::OwnBase)
    {
        d.f32(&key("rope.freq_base_swa"), local.theta);
    }
    let scaled = |d: &mut Description, kind: &str, factor: f64, original: Option<usize>| {
        d.text(&key("rope.scaling.type"), kind);
        d.f32(&key("rope.scaling.factor"), factor);
        if let Some(original) = original {
            d.u32(&key("rope.scaling.original_context_length"), original);
        }
    };
    match &config.rope.scaling {
        RopeScaling::None => {}
        RopeScaling::Linear { factor } => scaled(&mut d, "linear", *factor, None),
        RopeScaling::Llama3 { .. } => {
            d.factors.push(("rope_freqs.weight".to_owned(), llama3(config)));
        }
        RopeScaling::Yarn { factor, beta_fast, beta_slow, original_max_position_embeddings, truncate } => {
            if !truncate {
                return Err(bad("rope_parameters.truncate", "should be true, as in llama.cpp".to_owned()));
            }
            scaled(&mut d, "yarn", *factor, Some(*original_max_position_embeddings));
            d.f32(&key("rope.scaling.yarn_beta_fast"), *beta_fast);
            d.f32(&key("rope.scaling.yarn_beta_slow"), *beta_slow);
            // Of Granite it has the factor of the scores in it, which goes by itself.
            let granite =
                (raw("attention_multiplier").unwrap_or(0.0) * (config.head_dim as f64).sqrt()).sqrt();
            let gain = config.rope.gain / if granite > 0.0 { granite } else { 1.0 };
            d.f32(&key("rope.scaling.attn_factor"), gain / yarn_gain(*factor, 1.0));
        }
        RopeScaling::LongRope { short, long, original_max_position_embeddings } => {
            let single = |list: &[f64]| list.iter().map(|&n| n as f32).collect::<Vec<_>>();
            if facts.longrope.is_some() {
                d.u32(&key("rope.scaling.original_context_length"), *original_max_position_embeddings);
                d.f32(&key("rope.scaling.attn_factor"), config.rope.gain);
                d.factors.push(("rope_factors_long.weight".to_owned(), single(long)));
                d.factors.push(("rope_factors_short.weight".to_owned(), single(short)));
            } else if short == long && config.rope.gain == 1.0 {
                d.factors.push(("rope_freqs.weight".to_owned(), single(long)));
            } else {
                return Err(bad("rope_scaling", format!("`longrope` is unknown to `{prefix}` of llama.cpp")));
            }
        }
    }
    if let Some(growth) = config.rope.growth {
        d.f32(&key("attention.temperature_scale"), growth.beta);
    }
    if let Some(tokenizer) = tokenizer {
        tokens::describe(&mut d, tokenizer, config, path)?;
    }
    Ok(d)
}

/// What each plane's frequency is divided by.
fn llama3(config: &ModelConfig) -> Vec<f32> {
    let RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } =
        config.rope.scaling
    else {
        return Vec::new();
    };
    let (planes, original) = (config.rope.dim / 2, original_max_position_embeddings as f64);
    let divisor = |i: usize| {
        let wavelength = 2.0 * std::f64::consts::PI * config.rope.theta.powf(i as f64 / planes as f64);
        if wavelength < original / high_freq_factor {
            1.0
        } else if wavelength > original / low_freq_factor {
            factor
        } else {
            let smooth = (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
            1.0 / ((1.0 - smooth) / factor + smooth)
        }
    };
    (0..planes).map(|i| divisor(i) as f32).collect()
}
