//! Seed-OSS: biases by two flags.

use super::{Biases, Facts, GgufNames};

pub(super) const FACTS: Facts = Facts {
    class_name: "SeedOssForCausalLM",
    model_type: "seed_oss",
    models: "Seed-OSS",
    gguf: GgufNames { names: &["seed_oss"], norms: ["", "post_attention_layernorm", ""], ..GgufNames::USUAL },
    head_dim: Some(128),
    context: 524_288,
    biases: Biases::TwoFlags,
    mlp_bias: true,
    ..Facts::USUAL
};
