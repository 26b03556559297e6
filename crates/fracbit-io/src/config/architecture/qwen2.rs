//! Qwen2: biases of queries, keys and values.

use super::{Biases, Facts, GgufNames, Pattern, Window};

pub(super) const FACTS: Facts = Facts {
    class_name: "Qwen2ForCausalLM",
    model_type: "qwen2",
    models: "Qwen2, Qwen2.5, language model of Qwen2.5-VL",
    inside: &["qwen2_vl_text", "qwen2_5_vl_text"],
    gguf: GgufNames { names: &["qwen2", "qwen2vl"], ..GgufNames::USUAL },
    biases: Biases::Inputs,
    window: Window::Flag(Some(4096)),
    pattern: Pattern::From(28),
    ..Facts::USUAL
};
