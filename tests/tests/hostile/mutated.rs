//! What a fuzzer would try, a little of it on every change: mutations of good input to all that
//! reads files and requests of others. `fuzz/README.md` says how to try more.

#[path = "../../../fuzz/src/bodies.rs"]
mod bodies;

/// Mutations of all seeds of a target; packed models have their own test (`quantized`), and models
/// and GGUF files take longest.
fn rounds(name: &str) -> u64 {
    match name {
        "model" => 20,
        "gguf" | "header" => 100,
        _ => 400,
    }
}

#[test]
fn mutated_input_is_refused_or_read() {
    for target in &bodies::TARGETS {
        let seeds = (target.seeds)();
        seeds.iter().for_each(|seed| (target.body)(seed));
        for (number, seed) in (0..rounds(target.name)).zip(seeds.iter().cycle()) {
            let bytes = bodies::mutated(seed, number);
            let outcome = std::panic::catch_unwind(|| (target.body)(&bytes));
            assert!(outcome.is_ok(), "{}, mutation {number}: the panic stands above", target.name);
        }
    }
}
