//! What a fuzzer would try, a little of it on every change: mutations of good input to all that
//! reads files and requests of others. `fuzz/README.md` says how to try more.

#[path = "../../../fuzz/src/bodies.rs"]
mod bodies;

/// Mutations of all seeds of a target; packed models have their own test (`quantized`), and models
/// and GGUF files take longest. `FRACBIT_MUTATIONS=N` tries N times as many.
#[expect(clippy::disallowed_methods, reason = "how long somebody is willing to wait")]
fn rounds(name: &str) -> u64 {
    let times = std::env::var("FRACBIT_MUTATIONS").map_or(1, |n| n.parse().expect("a whole number"));
    let few = match name {
        "model" => 20,
        "gguf" | "header" => 100,
        _ => 400,
    };
    few * times
}

#[test]
#[expect(clippy::print_stdout, reason = "how much was tried")]
fn mutated_input_is_refused_or_read() {
    for target in &bodies::TARGETS {
        let (seeds, start) = ((target.seeds)(), std::time::Instant::now());
        seeds.iter().for_each(|seed| (target.body)(seed));
        for (number, seed) in (0..rounds(target.name)).zip(seeds.iter().cycle()) {
            let bytes = bodies::mutated(seed, number);
            let outcome = std::panic::catch_unwind(|| (target.body)(&bytes));
            assert!(outcome.is_ok(), "{}, mutation {number}: the panic stands above", target.name);
        }
        let (name, took) = (target.name, start.elapsed());
        println!("{name}: {} mutations of {} seeds in {took:.1?}", rounds(name), seeds.len());
    }
}
