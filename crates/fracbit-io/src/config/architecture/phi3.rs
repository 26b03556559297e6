//! Phi-3 to Phi-4: fused tensors, heads that turn in part, frequencies with factors of their own.

use super::{Facts, GgufNames, Layout, Window};

pub(super) const FACTS: Facts = Facts {
    class_name: "Phi3ForCausalLM",
    model_type: "phi3",
    models: "Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
    gguf: GgufNames { names: &["phi3"], fused: true, windows: true, ..GgufNames::USUAL },
    layout: Layout::FusedInputs,
    context: 4096,
    eps: 1e-5,
    turning: Some(1.0),
    longrope: Some(4096),
    window: Window::Field(None),
    ..Facts::USUAL
};
