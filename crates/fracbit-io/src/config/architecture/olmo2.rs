//! OLMo 2: what attention and MLP write is normalized in place of what they read.

use super::{Biases, Facts, GgufNames};
use crate::config::QkNorm;

pub(super) const FACTS: Facts = Facts {
    class_name: "Olmo2ForCausalLM",
    model_type: "olmo2",
    models: "OLMo 2",
    gguf: GgufNames {
        names: &["olmo2"],
        norms: ["", "post_attention_layernorm", "post_feedforward_layernorm"],
        ..GgufNames::USUAL
    },
    eps: 1e-5,
    biases: Biases::Flag,
    qk_norm: QkNorm::Whole,
    pre_norms: false,
    post_norms: true,
    ..Facts::USUAL
};
