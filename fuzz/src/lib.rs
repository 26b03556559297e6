//! Targets for a fuzzer, each with a function that reads bytes and input to begin with.

mod bodies;

use bodies::TARGETS;

/// Names of the targets.
pub fn names() -> impl Iterator<Item = &'static str> {
    TARGETS.iter().map(|target| target.name)
}

fn target(name: &str) -> &'static bodies::Target {
    TARGETS.iter().find(|target| target.name == name).unwrap_or_else(|| panic!("no target `{name}`"))
}

/// Has a target read bytes.
pub fn run(name: &str, bytes: &[u8]) {
    (target(name).body)(bytes);
}

/// What the search of a target begins with.
pub fn seeds(name: &str) -> Vec<Vec<u8>> {
    (target(name).seeds)()
}

/// Damage of some kind to good input, the same for the same number.
pub fn mutated(seed: &[u8], number: u64) -> Vec<u8> {
    bodies::mutated(seed, number)
}
