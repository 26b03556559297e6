//! Qwen3: norms of queries and keys in place of the biases of Qwen2.

use super::{Biases, Facts, GgufNames, Pattern, Window};
use crate::config::QkNorm;

pub(super) const FACTS: Facts = Facts {
    class_name: "Qwen3ForCausalLM",
    model_type: "qwen3",
    models: "Qwen3, language model of Qwen3-VL",
    inside: &["qwen3_vl_text"],
    gguf: GgufNames { names: &["qwen3", "qwen3vl"], ..GgufNames::USUAL },
    head_dim: Some(128),
    biases: Biases::Flag,
    window: Window::Flag(Some(4096)),
    pattern: Pattern::From(28),
    qk_norm: QkNorm::Heads,
    ..Facts::USUAL
};
