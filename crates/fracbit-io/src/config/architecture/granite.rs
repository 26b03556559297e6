//! Granite 3: four factors, which leave the graph as it is. In units of `embedding_multiplier` the
//! residual stream begins as the embedding itself, what is written to it is multiplied by
//! `residual_multiplier / embedding_multiplier` (in the weights), and norms, which do not see such
//! units, by their ε alone, which is divided by `embedding_multiplier^2`; `logits_scaling` divides
//! the final gain, `attention_multiplier` is in `RopeConfig::gain`. A `granitemoehybrid` (Granite
//! 4) whose layers all have attention, and no experts, is read as this; its gate and up are one
//! tensor.

use super::{Biases, Facts, GgufNames, Layout};

pub(super) const FACTS: Facts = Facts {
    class_name: "GraniteForCausalLM",
    model_type: "granite",
    models: "Granite 3; Granite 4 without state-space layers (`granitemoehybrid`)",
    gguf: GgufNames { names: &["granite"], paired: true, ..GgufNames::USUAL },
    layout: Layout::SharedMlp,
    biases: Biases::Flag,
    mlp_bias: true,
    multipliers: true,
    ..Facts::USUAL
};
