//! Granite 3 with experts in every layer, and the same factors.

use super::{Biases, ExpertFields, Facts, GgufNames, Layout};

pub(super) const FACTS: Facts = Facts {
    class_name: "GraniteMoeForCausalLM",
    model_type: "granitemoe",
    models: "Granite 3 A400M and A800M",
    gguf: GgufNames { names: &["granitemoe"], paired: true, ..GgufNames::USUAL },
    layout: Layout::FusedExperts,
    biases: Biases::Flag,
    experts: Some(ExpertFields {
        width: "intermediate_size",
        count: "num_local_experts",
        renormalized: true,
    }),
    multipliers: true,
    ..Facts::USUAL
};
