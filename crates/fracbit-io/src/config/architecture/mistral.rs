//! Mistral: Llama with a window on all layers. A null window is none, one that is left out 4096.

use super::{Facts, GgufNames, Window};

pub(super) const FACTS: Facts = Facts {
    class_name: "MistralForCausalLM",
    model_type: "mistral",
    models: "Mistral, Mistral Small 3.1 and 3.2",
    unnamed_inside: Some("mistral3"),
    gguf: GgufNames { names: &["llama"], paired: true, ..GgufNames::USUAL },
    window: Window::Field(Some(4096)),
    ..Facts::USUAL
};
