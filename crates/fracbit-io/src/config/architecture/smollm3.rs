//! SmolLM3: some layers do not turn. The name `no_rope_layers` misleads: 1 means that the layer
//! does. Without the list every fourth layer (`no_rope_layer_interval`) does not.

use super::{Biases, Facts, GgufNames, Pattern, Window};

pub(super) const FACTS: Facts = Facts {
    class_name: "SmolLM3ForCausalLM",
    model_type: "smollm3",
    models: "SmolLM3",
    gguf: GgufNames { names: &["smollm3"], paired: true, ..GgufNames::USUAL },
    tied: true,
    biases: Biases::Flag,
    mlp_bias: true,
    theta: 2e6,
    window: Window::Flag(None),
    pattern: Pattern::Unturned,
    some_turn: true,
    ..Facts::USUAL
};
