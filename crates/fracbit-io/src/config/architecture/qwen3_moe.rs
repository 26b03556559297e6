//! Qwen3 with experts in every layer.

use super::{Biases, ExpertFields, Facts, GgufNames, Pattern, Window};
use crate::config::QkNorm;

pub(super) const FACTS: Facts = Facts {
    class_name: "Qwen3MoeForCausalLM",
    model_type: "qwen3_moe",
    models: "Qwen3-30B-A3B",
    gguf: GgufNames { names: &["qwen3moe"], ..GgufNames::USUAL },
    head_dim: Some(128),
    biases: Biases::Flag,
    experts: Some(ExpertFields { width: "moe_intermediate_size", count: "num_experts", renormalized: false }),
    window: Window::Flag(Some(4096)),
    pattern: Pattern::From(28),
    qk_norm: QkNorm::Heads,
    ..Facts::USUAL
};
