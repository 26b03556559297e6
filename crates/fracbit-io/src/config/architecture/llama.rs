//! Llama 1 to 3, and the many models of its shape.

use super::{Biases, Facts, GgufNames};

pub(super) const FACTS: Facts = Facts {
    class_name: "LlamaForCausalLM",
    model_type: "llama",
    models: "Llama 1 to 3.x, SmolLM2, language models of many others",
    gguf: GgufNames { names: &["llama"], paired: true, ..GgufNames::USUAL },
    biases: Biases::Flag,
    mlp_bias: true,
    ..Facts::USUAL
};
