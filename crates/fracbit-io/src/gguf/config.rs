//! Metadata to the `config.json` of the checkpoint that a GGUF file was made from.
//!
//! Only what the file says is written, and what llama.cpp itself takes for granted of an
//! architecture; the rest is left to the defaults of [`crate::ModelConfig`].

use serde_json::{Map, Value, json};

use super::Gguf;
use super::metadata::Metadata;
use super::names::{Family, families};
use crate::config::{Architecture, Biases, CAPS, Caps, LocalRope, ModelConfig, Pattern, Window, clip};
use crate::convert::to_f32_into;
use crate::error::Error;
use crate::pooling::{Pooling, PoolingMode};

/// Metadata key of the architecture.
pub(super) const ARCHITECTURE: &str = "general.architecture";

/// Texts of tokens that end an answer, whichever of them a vocabulary has as control tokens;
/// llama.cpp stops at the same.
const ENDS: [&str; 8] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "[EOT]",
];

/// Metadata of the architecture's own prefix.
struct Own<'a> {
    metadata: Metadata<'a>,
    prefix: &'static str,
}

impl Own<'_> {
    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.prefix)
    }

    fn size(&self, key: &str) -> Result<Option<u64>, Error> {
        self.metadata.of_all_layers(&self.key(key))
    }

    fn required(&self, key: &str) -> Result<u64, Error> {
        self.size(key)?.ok_or_else(|| self.metadata.missing(&self.key(key), "a whole number"))
    }

    fn number(&self, key: &str) -> Result<Option<f64>, Error> {
        self.metadata.number(&self.key(key))
    }

    fn bad(&self, key: &str, rule: impl Into<String>) -> Error {
        self.metadata.bad(&self.key(key), rule)
    }
}

impl Gguf {
    pub(super) fn family(&self) -> Result<Family, Error> {
        let m = self.metadata();
        let known = || {
            let list: Vec<_> = families().iter().map(|f| f.name).collect();
            format!("one of {}", list.join(", "))
        };
        let name = m.text(ARCHITECTURE)?.ok_or_else(|| m.missing(ARCHITECTURE, &known()))?;
        families()
            .into_iter()
            .find(|f| f.name == name)
            .ok_or_else(|| m.bad(ARCHITECTURE, format!("should be {}, got `{}`", known(), clip(name))))
    }

    /// The checked configuration.
    pub(crate) fn model_config(&self) -> Result<ModelConfig, Error> {
        let path = &self.parts[0].path;
        let mut config = ModelConfig::parse(self.config()?.to_string().as_bytes(), path)?;
        config.apply_generation_config(self.generation_config()?.to_string().as_bytes(), path)?;
        Ok(config)
    }

    fn has_tensor(&self, part: &str) -> bool {
        self.tensor(&format!("blk.0.{part}")).is_some()
    }

    /// The `config.json`.
    pub(super) fn config(&self) -> Result<Value, Error> {
        use Architecture::{Llama, Mixtral, Olmo2, Olmo3};
        let family = self.family()?;
        let own = Own { metadata: self.metadata(), prefix: family.name };
        let experts = own.size("expert_count")?.filter(|&n| n > 0);
        let window = own.size("attention.sliding_window")?.filter(|&n| n > 0);
        let arch = match family.arch {
            Llama if experts.is_some() => Mixtral,
            Olmo2 if window.is_some() => Olmo3,
            other => other,
        };
        let facts = arch.facts();
        if experts.is_some() && !arch.has_experts() {
            return Err(own.bad("expert_count", "should be 0: this architecture is known without experts"));
        }
        let (hidden, layers) = (own.required("embedding_length")?, own.required("block_count")?);
        let heads = own.required("attention.head_count")?;
        let head = match own.size("attention.key_length")? {
            Some(head) => head,
            None if heads > 0 && hidden % heads == 0 => hidden / heads,
            None => {
                let rule = format!("should divide {} ({hidden}), got {heads}", own.key("embedding_length"));
                return Err(own.bad("attention.head_count", rule));
            }
        };
        if let Some(value) = own.size("attention.value_length")?.filter(|&v| v != head) {
            return Err(
                own.bad("attention.value_length", format!("should be {head}, as of keys, got {value}"))
            );
        }
        let Some((_, embedding)) = self.tensor("token_embd.weight") else {
            let path = self.parts[0].path.clone();
            return Err(Error::MissingTensor {
                path,
                tensor: "token_embd.weight".into(),
                hint: String::new(),
            });
        };
        let mut c = Map::new();
        let mut set = |key: &str, value: Value| c.insert(key.to_owned(), value);
        set("architectures", json!([arch.class_name()]));
        set("model_type", json!(arch.model_type()));
        set("hidden_size", json!(hidden));
        set("intermediate_size", json!(own.size("feed_forward_length")?.unwrap_or(0)));
        set("num_hidden_layers", json!(layers));
        set("num_attention_heads", json!(heads));
        set("num_key_value_heads", json!(own.size("attention.head_count_kv")?.unwrap_or(heads)));
        set("head_dim", json!(head));
        set("vocab_size", json!(embedding.shape[0]));
        set("max_position_embeddings", json!(own.required("context_length")?));
        const EPS: &str = "attention.layer_norm_rms_epsilon";
        let eps = own.number(EPS)?.ok_or_else(|| own.metadata.missing(&own.key(EPS), "a number"))?;
        set("rms_norm_eps", json!(eps));
        set("rope_theta", json!(own.number("rope.freq_base")?.unwrap_or(1e4)));
        set("tie_word_embeddings", json!(self.tensor("output.weight").is_none()));
        for (key, value) in [("bos_token_id", self.bos()?), ("eos_token_id", self.eos()?)] {
            set(key, json!(value));
        }
        let bias = |part: &str| self.has_tensor(&format!("{part}.bias"));
        match facts.biases {
            Biases::Every => _ = set("use_bias", json!(bias("attn_q"))),
            biases => {
                set("attention_bias", json!(bias("attn_q")));
                set("mlp_bias", json!(bias("ffn_up")));
                if biases == Biases::TwoFlags {
                    set("attention_out_bias", json!(bias("attn_output")));
                }
            }
        }
        if let Some((n, fields)) = experts.zip(facts.experts) {
            set(fields.count, json!(n));
            set("num_experts_per_tok", json!(own.required("expert_used_count")?));
            set("norm_topk_prob", json!(facts.gguf.renormalized));
            if let Some(width) = own.size("expert_feed_forward_length")? {
                set(fields.width, json!(width));
            }
            if let Some(clip) = own.number("attention.clamp_kqv")?.filter(|&c| c != 0.0) {
                set("clip_qkv", json!(clip));
            }
        }
        if facts.multipliers {
            for (field, key) in [
                ("embedding_multiplier", "embedding_scale"),
                ("residual_multiplier", "residual_scale"),
                ("attention_multiplier", "attention.scale"),
                ("logits_scaling", "logit_scale"),
            ] {
                // 0 is what llama.cpp takes for "none".
                if let Some(factor) = own.number(key)?.filter(|&f| f != 0.0) {
                    set(field, json!(factor));
                }
            }
        }
        if facts.score_scalar.is_some() {
            let large = layers == facts.gguf.large as u64;
            let scalar = if large { hidden as f64 / heads as f64 } else { head as f64 };
            set("query_pre_attn_scalar", json!(scalar));
        }
        match facts.caps {
            Caps::Ignored => {}
            Caps::Fields(usual) => {
                for (key, usual) in CAPS.into_iter().zip(usual) {
                    set(key, json!(own.number(key)?.unwrap_or(usual)));
                }
            }
            Caps::Refused => {
                if own.number(CAPS[1])?.is_some_and(|cap| cap != 0.0) {
                    return Err(own.bad(CAPS[1], "should be absent"));
                }
            }
        }
        if facts.local_rope == Some(LocalRope::OwnBase) {
            let base = own.number("rope.freq_base_swa")?.unwrap_or(1e4);
            set("rope_local_base_freq", json!(base));
        }
        if matches!(facts.window, Window::Always(_) | Window::Field(_)) {
            set("sliding_window", json!(window));
        }
        if let (Some(_), Pattern::AllBut(_, usual)) = (window, facts.pattern) {
            const PATTERN: &str = "attention.sliding_window_pattern";
            let pattern: Vec<bool> = if own.metadata.is_list(&own.key(PATTERN)) {
                let list = own.metadata.numbers(&own.key(PATTERN))?.unwrap_or_default();
                list.iter().map(|&n| n != 0.0).collect()
            } else {
                let every = own.metadata.unsigned(&own.key(PATTERN))?.unwrap_or(usual as u64).max(1);
                (1..=layers).map(|i| i % every != 0).collect()
            };
            let kind = |&s: &bool| if s { "sliding_attention" } else { "full_attention" };
            set("layer_types", json!(pattern.iter().map(kind).collect::<Vec<_>>()));
        }
        let turning = own.size("rope.dimension_count")?.unwrap_or(head);
        if facts.turning.is_some() {
            set("partial_rotary_factor", json!(turning as f64 / head.max(1) as f64));
        } else if turning != head {
            let rule = format!("should be {head}, all channels of a head, got {turning}");
            return Err(own.bad("rope.dimension_count", rule));
        }
        if let Some(scaling) = self.scaling(&own, arch, turning)? {
            if let Some(original) =
                scaling.get("original_max_position_embeddings").filter(|_| facts.longrope.is_some())
            {
                set("original_max_position_embeddings", original.clone());
            }
            let field = if facts.growing { "rope_parameters" } else { "rope_scaling" };
            set(field, scaling);
        }
        Ok(Value::Object(c))
    }

    /// How rotary frequencies are stretched.
    fn scaling(&self, own: &Own<'_>, arch: Architecture, turning: u64) -> Result<Option<Value>, Error> {
        const TYPE: &str = "rope.scaling.type";
        let mut s = Map::new();
        let factor = own.number("rope.scaling.factor")?;
        let original = own.size("rope.scaling.original_context_length")?;
        let attention = own.number("rope.scaling.attn_factor")?;
        let kind = own.metadata.text(&own.key(TYPE))?;
        let longrope = self.factors("rope_factors_long.weight", turning)?;
        match kind.unwrap_or("none") {
            _ if longrope.is_some() => {
                s.insert("rope_type".into(), "longrope".into());
                s.insert("long_factor".into(), json!(longrope));
                let short = self.factors("rope_factors_short.weight", turning)?;
                s.insert("short_factor".into(), json!(short));
                s.insert("attention_factor".into(), json!(attention.unwrap_or(1.0)));
            }
            // As older files have it.
            "none" if factor.is_none_or(|f| f == 1.0 || f == 0.0) => {}
            "none" | "linear" => {
                s.insert("rope_type".into(), "linear".into());
                s.insert("factor".into(), json!(factor));
            }
            "yarn" => {
                s.insert("rope_type".into(), "yarn".into());
                s.insert("factor".into(), json!(factor));
                for (field, key) in [
                    ("beta_fast", "rope.scaling.yarn_beta_fast"),
                    ("beta_slow", "rope.scaling.yarn_beta_slow"),
                ] {
                    if let Some(n) = own.number(key)?.filter(|&n| n != 0.0) {
                        s.insert(field.into(), json!(n));
                    }
                }
                let growth = own.number("rope.scaling.yarn_log_multiplier")?.unwrap_or(0.0);
                let usual = yarn_gain(factor.unwrap_or(1.0), 1.0);
                let gain = usual / yarn_gain(factor.unwrap_or(1.0), growth);
                // llama.cpp multiplies the usual gain by it; some files have the gain itself.
                let gain = match attention {
                    Some(own) if growth == 0.0 && (own / usual - 1.0).abs() < 1e-4 => own,
                    other => gain * other.unwrap_or(1.0),
                };
                s.insert("attention_factor".into(), json!(gain));
            }
            other => {
                let rule = format!("should be `none`, `linear`, `yarn` or `longrope`, got `{}`", clip(other));
                return Err(own.bad(TYPE, rule));
            }
        }
        if let Some(original) = original.filter(|_| !s.is_empty()) {
            s.insert("original_max_position_embeddings".into(), json!(original));
        }
        if let Some(divisors) = self.factors("rope_freqs.weight", turning)? {
            if !s.is_empty() {
                return Err(own.bad(TYPE, "should be `none` beside the tensor `rope_freqs.weight`"));
            }
            let theta = own.number("rope.freq_base")?.unwrap_or(1e4);
            s = llama3(&divisors, theta).unwrap_or_else(|| {
                let m = json!({ "rope_type": "longrope", "long_factor": divisors, "short_factor": divisors, "attention_factor": 1.0 });
                m.as_object().cloned().unwrap_or_default()
            });
        }
        if arch.facts().growing {
            s.entry("rope_type").or_insert("default".into());
            s.insert("rope_theta".into(), json!(own.number("rope.freq_base")?.unwrap_or(1e4)));
            if let Some(beta) = own.number("attention.temperature_scale")?.filter(|&n| n != 0.0) {
                s.insert("llama_4_scaling_beta".into(), json!(beta));
            }
        }
        Ok((!s.is_empty()).then_some(Value::Object(s)))
    }

    /// The numbers of a tensor with one for each plane that turns.
    pub(super) fn factors(&self, name: &str, turning: u64) -> Result<Option<Vec<f64>>, Error> {
        let Some((part, info)) = self.tensor(name) else { return Ok(None) };
        if !info.dtype.is_float() || info.shape != [turning as usize / 2] {
            return Err(Error::Tensor {
                path: part.path.clone(),
                tensor: name.to_owned(),
                rule: format!("should be {} floats, got {:?} of {}", turning / 2, info.shape, info.dtype),
            });
        }
        let mut factors = vec![0.0; info.elements()];
        to_f32_into(info.dtype, &part.bytes[info.range.clone()], &mut factors);
        let decimal = |f: &f32| f.to_string().parse().unwrap_or(f64::NAN);
        Ok(Some(factors.iter().map(decimal).collect()))
    }

    fn bos(&self) -> Result<Option<u64>, Error> {
        self.metadata().unsigned("tokenizer.ggml.bos_token_id")
    }

    fn eos(&self) -> Result<Option<u64>, Error> {
        self.metadata().unsigned("tokenizer.ggml.eos_token_id")
    }

    /// How llama.cpp makes one vector of a text's hidden states, normalized; `None` where the file
    /// says nothing of it.
    pub(crate) fn pooling(&self) -> Result<Option<Pooling>, Error> {
        let (m, key) = (self.metadata(), format!("{}.pooling_type", self.family()?.name));
        let mode = match m.unsigned(&key)? {
            None | Some(0) => return Ok(None),
            Some(1) => PoolingMode::Mean,
            Some(2) => PoolingMode::Cls,
            Some(3) => PoolingMode::LastToken,
            Some(other) => {
                let rule = format!("should be 0 (none), 1 (mean), 2 (cls) or 3 (last), got {other}");
                return Err(m.bad(&key, rule));
            }
        };
        Ok(Some(Pooling { mode, normalize: true }))
    }

    /// The `generation_config.json`: the tokens that begin a text, and all that end one.
    pub(super) fn generation_config(&self) -> Result<Value, Error> {
        let m = self.metadata();
        let mut ends = Vec::new();
        for key in ["eos", "eot", "eom"] {
            ends.extend(m.unsigned(&format!("tokenizer.ggml.{key}_token_id"))?);
        }
        if self.has_tokenizer() {
            let (tokens, kinds) = (self.tokens()?, self.token_kinds()?);
            let control = |i: usize| kinds.get(i).is_some_and(|&k| k == super::vocab::CONTROL);
            let named = tokens.iter().enumerate().filter(|(i, t)| control(*i) && ENDS.contains(&&***t));
            ends.extend(named.map(|(i, _)| i as u64));
        }
        ends.sort_unstable();
        ends.dedup();
        let mut c = Map::new();
        if let Some(bos) = self.bos()? {
            c.insert("bos_token_id".to_owned(), json!(bos));
        }
        c.insert("eos_token_id".to_owned(), json!(ends));
        Ok(Value::Object(c))
    }
}

/// What YaRN multiplies queries and keys by (Peng et al. 2023, arXiv 2309.00071, section 3.4),
/// `times` as fast.
pub(super) fn yarn_gain(factor: f64, times: f64) -> f64 {
    1.0 + 0.1 * times * factor.max(1.0).ln()
}

/// The parameters of Llama 3's stretching that give these divisors, where those of a published
/// model do.
fn llama3(divisors: &[f64], theta: f64) -> Option<Map<String, Value>> {
    let factor = divisors.iter().copied().fold(1.0, f64::max);
    let planes = divisors.len();
    [8192.0, 4096.0, 16384.0, 32768.0].into_iter().find_map(|original: f64| {
        let (low, high) = (1.0, 4.0);
        let fits = divisors.iter().enumerate().all(|(i, &got)| {
            let wavelength = 2.0 * std::f64::consts::PI * theta.powf(i as f64 / planes as f64);
            let want = if wavelength < original / high {
                1.0
            } else if wavelength > original / low {
                factor
            } else {
                let smooth = (original / wavelength - low) / (high - low);
                1.0 / ((1.0 - smooth) / factor + smooth)
            };
            (got / want - 1.0).abs() < 1e-5
        });
        let m = json!({
            "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
            "original_max_position_embeddings": original as u64,
        });
        fits.then(|| m.as_object().cloned()).flatten()
    })
}
