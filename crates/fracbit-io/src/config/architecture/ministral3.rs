//! Ministral 3: Mistral whose queries grow with their position.

use super::{Facts, GgufNames, Window};

pub(super) const FACTS: Facts = Facts {
    class_name: "Ministral3ForCausalLM",
    model_type: "ministral3",
    models: "Ministral 3",
    gguf: GgufNames { names: &["mistral3"], paired: true, ..GgufNames::USUAL },
    head_dim: Some(128),
    context: 262_144,
    eps: 1e-5,
    theta: 1e6,
    growing: true,
    window: Window::Field(None),
    ..Facts::USUAL
};
