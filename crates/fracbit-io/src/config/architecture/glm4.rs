//! GLM-4 since April 2025: `glm` with norms behind attention and MLP, under names of its own.

use super::{Biases, Facts, GgufNames, Layout};

pub(super) const FACTS: Facts = Facts {
    class_name: "Glm4ForCausalLM",
    model_type: "glm4",
    models: "GLM-4 0414",
    gguf: GgufNames {
        names: &["glm4"],
        fused: true,
        norms: ["post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"],
        ..GgufNames::USUAL
    },
    layout: Layout::FusedGate,
    head_dim: Some(128),
    context: 131_072,
    eps: 1.5625e-7,
    biases: Biases::InputsFlag,
    turning: Some(0.5),
    interleaved_rope: true,
    post_norms: true,
    ..Facts::USUAL
};
