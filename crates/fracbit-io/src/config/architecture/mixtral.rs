//! Mixtral: Mistral with experts in every layer.

use super::{ExpertFields, Facts, GgufNames, Layout, Window};

pub(super) const FACTS: Facts = Facts {
    class_name: "MixtralForCausalLM",
    model_type: "mixtral",
    models: "Mixtral",
    gguf: GgufNames { names: &["llama"], paired: true, ..GgufNames::USUAL },
    layout: Layout::SparseMoe,
    context: 131_072,
    eps: 1e-5,
    experts: Some(ExpertFields {
        width: "intermediate_size",
        count: "num_local_experts",
        renormalized: true,
    }),
    theta: 1e6,
    window: Window::Field(None),
    ..Facts::USUAL
};
