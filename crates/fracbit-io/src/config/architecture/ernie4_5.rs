//! ERNIE 4.5, dense: one flag for all biases, neighbouring channels turn.

use super::{Biases, Facts, GgufNames};

pub(super) const FACTS: Facts = Facts {
    class_name: "Ernie4_5ForCausalLM",
    model_type: "ernie4_5",
    models: "ERNIE 4.5, dense",
    gguf: GgufNames { names: &["ernie4_5", "ernie4.5"], ..GgufNames::USUAL },
    head_dim: Some(128),
    context: 131_072,
    eps: 1e-5,
    tied: true,
    biases: Biases::Every,
    theta: 5e5,
    interleaved_rope: true,
    ..Facts::USUAL
};
