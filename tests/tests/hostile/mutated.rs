//! What a fuzzer would try, a little of it on every change: mutations of good input to all that
//! reads files and requests of others. `fuzz/README.md` says how to try more.

#[path = "../../../fuzz/src/bodies.rs"]
#[expect(unreachable_pub, reason = "the fuzzer's programs reach it")]
mod bodies;

use bodies::Target;

const TARGETS: [Target; 9] = [
    bodies::HEADER,
    bodies::GGUF,
    bodies::CONFIG,
    bodies::TOKENIZER,
    bodies::TEMPLATE,
    bodies::PLAN,
    bodies::PROFILE,
    bodies::MODEL,
    bodies::REQUEST,
];

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
    for target in &TARGETS {
        let (seeds, start) = ((target.seeds)(), std::time::Instant::now());
        seeds.iter().for_each(|seed| (target.body)(seed));
        for (number, seed) in (0..rounds(target.name)).zip(seeds.iter().cycle()) {
            let bytes = mutated(seed, number);
            let outcome = std::panic::catch_unwind(|| (target.body)(&bytes));
            assert!(outcome.is_ok(), "{}, mutation {number}: the panic stands above", target.name);
        }
        let (name, took) = (target.name, start.elapsed());
        println!("{name}: {} mutations of {} seeds in {took:.1?}", rounds(name), seeds.len());
    }
}

/// Damage of every kind to good input, the same for the same number.
fn mutated(seed: &[u8], number: u64) -> Vec<u8> {
    /// What parsers are surprised by, in documents and in binary files.
    const WORDS: [&[u8]; 14] = [
        b"0",
        b"-1",
        b"1e999",
        b"18446744073709551615",
        b"null",
        b"\"",
        b"{",
        b"[",
        b"]}",
        b",",
        b"\\ud800",
        b"\0\0\0\0",
        b"\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"{%",
    ];
    let mut state = number;
    // SplitMix64.
    let mut pick = |n: usize| {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((z ^ (z >> 31)) % n.max(1) as u64).unwrap_or(0)
    };
    let mut out = seed.to_vec();
    for _ in 0..=pick(3) {
        // Beginnings are full of rules: aim there half of the time.
        let end = if pick(2) == 0 { out.len().min(4096) } else { out.len() };
        let at = pick(end);
        match pick(7) {
            0 if !out.is_empty() => out[at] ^= 1 << pick(8),
            1 if !out.is_empty() => drop(out.remove(at)),
            2 => out.truncate(at),
            3 => drop(out.splice(at..at, WORDS[pick(WORDS.len())].iter().copied())),
            4 => {
                // A number, or a word, gives way to another one.
                let word = |b: &u8| b.is_ascii_alphanumeric() || *b == b'.';
                let length = out[at..].iter().take_while(|b| word(b)).count();
                drop(out.splice(at..at + length, WORDS[pick(WORDS.len())].iter().copied()));
            }
            5 => {
                let piece = out[at..end.min(at + 1 + pick(64))].to_vec();
                drop(out.splice(at..at, piece));
            }
            _ => {
                let to = end.min(at + 1 + pick(16));
                drop(out.drain(at..to));
            }
        }
    }
    out
}
