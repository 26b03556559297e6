//! The Llama-3.1-8B instance of Q-Palette, read from `tests/data`.

#![allow(dead_code, reason = "each test program uses a part")]
#![allow(clippy::unwrap_used, reason = "committed test data: a panic is the right answer to a broken file")]

use std::collections::HashMap;

use fracbit_alloc::{Budget, Choice, FusionProblem, Group, Layer, LayerTerm, Problem, Stored, fusion};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

const COEFFS: &str = include_str!("../data/qpalette_err_coeffs_llama31_8b.csv");
const ERRORS: &str = include_str!("../data/qpalette_quant_err.csv");
const LATENCY: &str = include_str!("../data/qpalette_latency_4090_bs1_us.csv");

/// (letter of the latency table, outputs, inputs), in the column order of the coefficients.
pub(crate) const SHAPES: [(char, u64, u64); 7] = [
    ('q', 4096, 4096),
    ('k', 1024, 4096),
    ('v', 1024, 4096),
    ('o', 4096, 4096),
    ('g', 14336, 4096),
    ('u', 14336, 4096),
    ('d', 4096, 14336),
];

#[derive(Clone, Debug)]
pub(crate) struct Code {
    pub(crate) key: String,
    pub(crate) family: &'static str,
    /// Payload bits per weight, in quarters.
    pub(crate) quarters: u64,
    pub(crate) err: f64,
}

/// The table of distortions.
pub(crate) fn codes() -> Vec<Code> {
    ERRORS
        .lines()
        .skip(1)
        .map(|line| {
            let (key, err) = line.split_once(',').unwrap();
            let parts: Vec<&str> = key.split('_').collect();
            let n = |i: usize| parts[i].parse::<u64>().unwrap();
            let (family, quarters) = match (parts[0], parts[1]) {
                ("tcq", _) => ("tcq", 2 * n(1)),
                ("tcomb", _) => ("half", n(1) + n(2)),
                ("ldlq", "1") => ("nuq", 4 * n(2)),
                ("ldlq", "2") => ("vq", 2 * n(2)),
                _ => panic!("unknown code {key}"),
            };
            Code { key: key.to_owned(), family, quarters, err: err.parse().unwrap() }
        })
        .collect()
}

/// Codes of some families within a range of quarter bits, optionally integer rates only.
pub(crate) fn palette(
    families: &[&str],
    quarters: std::ops::RangeInclusive<u64>,
    integer: bool,
) -> Vec<Code> {
    let keep = |c: &Code| {
        families.contains(&c.family)
            && quarters.contains(&c.quarters)
            && (!integer || c.quarters.is_multiple_of(4))
    };
    codes().into_iter().filter(keep).collect()
}

/// Sensitivities and sizes, block by block in the order of [`SHAPES`].
pub(crate) fn terms() -> Vec<LayerTerm> {
    let mut out = Vec::new();
    for line in COEFFS.lines().skip(1) {
        for (a, (_, rows, cols)) in line.split(',').skip(1).zip(SHAPES) {
            out.push(LayerTerm { params: rows * cols, a: a.parse().unwrap() });
        }
    }
    out
}

fn name(index: usize) -> String {
    format!("{}{}", SHAPES[index % 7].0, index / 7)
}

/// Memory-constrained problem, costs in quarter bits of payload, at `bits` per weight on average.
pub(crate) fn memory_problem(palette: &[Code], bits: f64) -> Problem {
    let terms = terms();
    let total: u64 = terms.iter().map(|t| t.params).sum();
    let layers = terms
        .iter()
        .enumerate()
        .map(|(i, t)| Layer {
            name: name(i),
            choices: palette.iter().map(|c| Choice::new(t.params * c.quarters, t.a * c.err)).collect(),
        })
        .collect();
    Problem::new(layers, vec![Budget::new("quarter bits", (total as f64 * bits * 4.0) as u64)]).unwrap()
}

/// The same with the byte accounting of the source: tables of each code and one sign vector per
/// rotation counted.
pub(crate) fn memory_problem_bytes(palette: &[Code], bits: f64) -> Problem {
    let terms = terms();
    let total: u64 = terms.iter().map(|t| t.params).sum();
    let layers = terms
        .iter()
        .enumerate()
        .map(|(i, t)| {
            let (letter, _, inputs) = SHAPES[i % 7];
            let signs = if "qoud".contains(letter) { inputs / 8 } else { 0 };
            let table = |c: &Code| match c.family {
                "nuq" => (1u64 << (c.quarters / 4)) * 2,
                "vq" => (1u64 << (c.quarters / 2)) * 4,
                _ if c.quarters > 18 => 2048 * 4,
                _ if c.quarters > 16 => 1024 * 4,
                _ => 512 * 4,
            };
            let cost = |c: &Code| t.params * c.quarters / 32 + table(c) + signs;
            let choices = palette.iter().map(|c| Choice::new(cost(c), t.a * c.err)).collect();
            Layer { name: name(i), choices }
        })
        .collect();
    Problem::new(layers, vec![Budget::new("bytes", (total as f64 * bits / 8.0) as u64)]).unwrap()
}

pub(crate) fn stored(palette: &[Code], choice: &[usize]) -> Vec<Stored> {
    choice.iter().map(|&j| Stored { bits: palette[j].quarters as f64 / 4.0, err: palette[j].err }).collect()
}

/// 224 layers × 40 choices with noisy costs and losses: no common divisor, few ties.
pub(crate) fn noisy_problem(seed: u64, bits: f64) -> Problem {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let terms = terms();
    let layers = terms
        .iter()
        .enumerate()
        .map(|(i, t)| {
            let choice = |j: usize, rng: &mut ChaCha8Rng| {
                let rate = 1.0 + j as f64 / 8.0 + rng.random_range(0.0..0.1);
                let noise = rng.random_range(1.0..1.3);
                Choice::new((t.params as f64 * rate / 8.0) as u64, t.a * noise * (-2.0 * rate).exp2())
            };
            Layer { name: name(i), choices: (0..40).map(|j| choice(j, &mut rng)).collect() }
        })
        .collect();
    let params: u64 = terms.iter().map(|t| t.params).sum();
    Problem::new(layers, vec![Budget::new("bytes", (params as f64 * bits / 8.0) as u64)]).unwrap()
}

/// 224 equal layers whose 40 choices lie on one line (bytes saved = loss): the hardest kind for a
/// knapsack solver, because every allocation costs the same per unit and nothing can be ruled out.
pub(crate) fn degenerate_problem(seed: u64) -> Problem {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let choice = |rng: &mut ChaCha8Rng| {
        let cost = rng.random_range(1_000_000u64..9_000_000);
        Choice::new(cost, 10.0 - cost as f64 * 1e-6)
    };
    let layers =
        (0..224).map(|i| Layer { name: name(i), choices: (0..40).map(|_| choice(&mut rng)).collect() });
    Problem::new(layers.collect(), vec![Budget::new("bytes", 1_000_000_007)]).unwrap()
}

/// Nanoseconds left for kernels at a decoding speed.
pub(crate) fn kernel_budget(tokens_per_second: f64) -> u64 {
    ((1e6 / tokens_per_second - constant()) * 1e3) as u64
}

fn latencies() -> HashMap<String, f64> {
    let pair = |line: &str| line.split_once(',').map(|(k, v)| (k.to_owned(), v.parse().unwrap())).unwrap();
    LATENCY.lines().skip(1).map(pair).collect()
}

fn constant() -> f64 {
    latencies()["constant"]
}

/// Fusion-aware latency problem of the first `blocks` blocks: the cheaper kernel of each code,
/// costs in nanoseconds. With `memory`, a second budget in quarter bits of payload.
pub(crate) fn fusion_problem(
    blocks: usize,
    codes: &[Code],
    tokens_per_second: f64,
    memory: Option<f64>,
) -> FusionProblem {
    let latency = latencies();
    let all = terms();
    let terms = &all[..7 * blocks];
    let share = blocks as f64 / 32.0;
    let mut groups = Vec::new();
    for block in 0..blocks {
        let at = |letters: &str| -> Vec<usize> {
            letters.chars().map(|c| 7 * block + SHAPES.iter().position(|s| s.0 == c).unwrap()).collect()
        };
        for members in [at("qkv"), at("ug"), at("o"), at("d")].iter().flat_map(|m| fusion::subsets(m)) {
            let letters: String = members.iter().map(|m| SHAPES[m % 7].0).collect();
            // The table calls the pair `ug`, our column order has gate first.
            let letters = if letters == "gu" || letters == "ug" { "ug".to_owned() } else { letters };
            let choices: Vec<Choice> = codes
                .iter()
                .filter_map(|c| {
                    let time = |flag: &str| latency.get(&format!("{letters}_{}_{flag}", c.key)).copied();
                    let time = [time("True"), time("False")].into_iter().flatten().reduce(f64::min)?;
                    let mut cost = vec![(time * 1e3).round() as u64];
                    if memory.is_some() {
                        cost.push(members.iter().map(|&m| terms[m].params * c.quarters).sum());
                    }
                    Some(Choice { cost, loss: members.iter().map(|&m| terms[m].a * c.err).sum() })
                })
                .collect();
            groups.push(Group { members, choices });
        }
    }
    let mut budgets =
        vec![Budget::new("nanoseconds", (kernel_budget(tokens_per_second) as f64 * share) as u64)];
    if let Some(bits) = memory {
        let params: u64 = terms.iter().map(|t| t.params).sum();
        budgets.push(Budget::new("quarter bits", (params as f64 * bits * 4.0) as u64));
    }
    FusionProblem::new((0..terms.len()).map(name).collect(), groups, budgets).unwrap()
}
