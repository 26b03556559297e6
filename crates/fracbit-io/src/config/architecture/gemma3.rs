//! Gemma 3, text only: Gemma 2 with norms of queries and keys in place of the caps, and another
//! base of the layers with a window.

use super::{Caps, Facts, GgufNames, LocalRope, Pattern, Window};
use crate::config::{Activation, QkNorm};

pub(super) const FACTS: Facts = Facts {
    class_name: "Gemma3ForCausalLM",
    model_type: "gemma3_text",
    models: "Gemma 3",
    unnamed_inside: Some("gemma3"),
    gguf: GgufNames {
        names: &["gemma3"],
        norms: ["pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"],
        windows: true,
        large: 62,
        ..GgufNames::USUAL
    },
    activation: Activation::GeluTanh,
    heads: Some([8, 4]),
    head_dim: Some(256),
    vocab_size: Some(262_208),
    context: 131_072,
    tied: true,
    without: &["attention_bias", "use_bidirectional_attention"],
    theta: 1e6,
    local_rope: Some(LocalRope::OwnBase),
    window: Window::Always(4096),
    pattern: Pattern::AllBut(&["sliding_window_pattern", "_sliding_window_pattern"], 6),
    qk_norm: QkNorm::Heads,
    post_norms: true,
    gain_offset: 1.0,
    scaled_embedding: true,
    score_scalar: Some(256.0),
    caps: Caps::Refused,
    ..Facts::USUAL
};
