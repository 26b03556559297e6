//! GLM-4 before April 2025: half of the channels of a head turn, gate and up are one tensor.

use super::{Biases, Facts, GgufNames, Layout};

pub(super) const FACTS: Facts = Facts {
    class_name: "GlmForCausalLM",
    model_type: "glm",
    models: "GLM-4 before April 2025",
    gguf: GgufNames { names: &["chatglm"], fused: true, ..GgufNames::USUAL },
    layout: Layout::FusedGate,
    head_dim: Some(128),
    context: 131_072,
    eps: 1.5625e-7,
    biases: Biases::InputsFlag,
    turning: Some(0.5),
    interleaved_rope: true,
    ..Facts::USUAL
};
