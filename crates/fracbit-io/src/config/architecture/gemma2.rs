//! Gemma 2: norms before and behind attention and MLP, gains stored less 1, an embedding times the
//! root of its width (not rounded to bf16, as transformers does where weights are of that type),
//! and caps of scores and logits (Gemma Team 2024, arXiv 2408.00118, section 2).

use super::{Caps, Facts, GgufNames, Pattern, Window};
use crate::config::Activation;

pub(super) const FACTS: Facts = Facts {
    class_name: "Gemma2ForCausalLM",
    model_type: "gemma2",
    models: "Gemma 2",
    gguf: GgufNames {
        names: &["gemma2"],
        norms: ["pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"],
        windows: true,
        large: 46,
        ..GgufNames::USUAL
    },
    activation: Activation::GeluTanh,
    heads: Some([8, 4]),
    head_dim: Some(256),
    vocab_size: Some(256_000),
    context: 8192,
    tied: true,
    without: &["attention_bias", "use_bidirectional_attention"],
    window: Window::Always(4096),
    pattern: Pattern::AllBut(&[], 2),
    post_norms: true,
    gain_offset: 1.0,
    scaled_embedding: true,
    score_scalar: Some(256.0),
    caps: Caps::Fields([50.0, 30.0]),
    ..Facts::USUAL
};
