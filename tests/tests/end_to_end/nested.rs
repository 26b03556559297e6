//! One copy of the weights, several precisions, and guesses from its first planes.

use crate::{Made, beside_the_original, demo};
use fracbit::{
    Effort, Quiet, Target,
    schedule::{FitOptions, compare, fit},
};
use fracbit_base::Rate;
use fracbit_engine::Draft;
use fracbit_model::{
    GenerateOptions, Generation, Model, Precision, RotationMode, SampleConfig, Sampler, StateOptions,
};
use fracbit_schedule::{Phase, Scheduler};
use fracbit_tests::{drafted, load, logits_with, scheme};
use std::{fs, path::Path, sync::OnceLock};

fn uniform(name: &str) -> Made {
    let source = demo(RotationMode::Online);
    let plan = source.plan(&source.options(Target::Uniform(scheme(name)))).expect("no budget to miss");
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("end-to-end");
    fs::create_dir_all(&dir).expect("cargo's temporary directory");
    let dir = dir.join(format!("nested-{name}"));
    let report = source.quantize_at(Effort::Fast, &plan, &dir, true).expect("a good plan");
    Made { dir, plan, report }
}

/// Made once: it takes a while.
fn nested() -> &'static Made {
    static MADE: OnceLock<Made> = OnceLock::new();
    MADE.get_or_init(|| uniform("nest-tcq-fast-2+2"))
}

/// Its base as a model of its own.
fn two_bits() -> &'static Made {
    static MADE: OnceLock<Made> = OnceLock::new();
    MADE.get_or_init(|| uniform("tcq-fast-2"))
}

fn bits(bits: u32) -> Precision {
    Precision::at_most(Rate::quarter_bits(4 * bits))
}

fn tokens() -> Vec<u32> {
    (0..150).map(|i| (i * 7919 + 13) % 2048).collect()
}

fn prompt() -> Vec<u32> {
    (0..30).map(|i| (i % 13 * 7919 + 13) % 2048).collect()
}

/// The tokens of a text, one at a time.
fn write(model: &Model, sampling: SampleConfig, options: &GenerateOptions) -> Vec<u32> {
    let mut state = model.state(&StateOptions::default());
    let mut sampler = Sampler::new(sampling).expect("a good configuration");
    let generation = Generation::new(model, &mut state, &mut sampler, &prompt(), options.clone());
    generation.expect("a prompt that fits").map(|token| token.expect("a step")).collect()
}

#[test]
fn a_nested_model_is_one_model_for_each_precision() {
    let [model, two] = [nested(), two_bits()].map(|made| load(&made.dir).expect("written"));
    let rates: Vec<f64> = model.precisions().into_iter().map(Rate::bits).collect();
    assert_eq!(rates, [2.0, 4.0]);
    let at = |precision| StateOptions { precision, ..StateOptions::default() };
    // At two bits it is the model of two bits, logit for logit, in one pass and token by token.
    for chunk in [1, 256] {
        let options = |precision| StateOptions { chunk, ..at(precision) };
        let want = logits_with(&two, &StateOptions { chunk, ..StateOptions::default() }, &tokens());
        assert_eq!(logits_with(&model, &options(bits(2)), &tokens()), want, "chunks of {chunk}");
        assert_eq!(logits_with(&model, &options(bits(3)), &tokens()), want, "three bits are two here");
    }
    let full = logits_with(&model, &at(Precision::FULL), &tokens());
    assert_eq!(logits_with(&model, &at(bits(4)), &tokens()), full);
    // Four bits are near four bits of a code of their own.
    let four = beside_the_original(&uniform("tcq-fast-4").dir).kl.expect("beside the original");
    let found = beside_the_original(&nested().dir).kl.expect("beside the original");
    eprintln!("KL of 2+2 bits {found:.4}, of 4 bits {four:.4}");
    assert!(found < 1.25 * four, "{found} beside {four}");
    assert!(model.bits_at(bits(2)) < 0.6 * model.bits_at(Precision::FULL));
}

#[test]
fn scalar_codes_are_one_model_for_each_precision() {
    let made = uniform("nest-nuq-2..4");
    let model = load(&made.dir).expect("written");
    let rates: Vec<f64> = model.precisions().into_iter().map(Rate::bits).collect();
    assert_eq!(rates, [2.0, 3.0, 4.0]);
    let mut losses = Vec::new();
    let want = logits_with(&model, &StateOptions::default(), &tokens());
    for (few, name) in [(2, "nest-nuq-2..2"), (3, "nest-nuq-2..3"), (4, "nest-nuq-2..4")] {
        let alone = load(&uniform(name).dir).expect("written");
        let options = StateOptions { precision: bits(few), ..StateOptions::default() };
        let found = logits_with(&model, &options, &tokens());
        assert_eq!(found, logits_with(&alone, &StateOptions::default(), &tokens()), "{name}");
        // Token by token as in one pass.
        let one = StateOptions { chunk: 1, ..options };
        assert_eq!(found, logits_with(&model, &one, &tokens()), "{name}");
        losses.push(found.iter().zip(&want).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>());
    }
    assert!(losses.is_sorted_by(|coarse, fine| coarse > fine), "{losses:?}");
    // Four bits are near four bits of a code of their own.
    let [found, four] = [&made.dir, &uniform("nuq-4").dir]
        .map(|dir| beside_the_original(dir).kl.expect("beside the original"));
    eprintln!("KL of 2..4 bits {found:.4}, of 4 bits {four:.4}");
    assert!(found < 1.4 * four, "{found} beside {four}");
    let [two, four] = [bits(2), Precision::FULL].map(|precision| model.bits_at(precision));
    assert!(two < 0.6 * four, "{two} of {four} bits");
}

#[test]
fn switching_between_two_tokens_is_exact() {
    let model = load(&nested().dir).expect("written");
    let tokens = tokens();
    let mut state = model.state(&StateOptions::default());
    let (mut hidden, mut whole, mut parts) = (Vec::new(), Vec::new(), Vec::new());
    // Pieces at turns of precision, token by token and as runs, leave the same cache and the same
    // rows.
    let pieces = [(0..40, 4), (40..41, 2), (41..90, 2), (90..100, 4), (100..150, 2)];
    for (piece, precision) in pieces.clone() {
        state.set_precision(bits(precision));
        model.forward(&mut state, &tokens[piece], &mut hidden).expect("tokens that fit");
        whole.extend_from_slice(&hidden);
    }
    state.reset();
    for (piece, precision) in pieces {
        for i in piece {
            state.set_precision(bits(precision));
            model.forward(&mut state, &tokens[i..=i], &mut hidden).expect("tokens that fit");
            parts.extend_from_slice(&hidden);
        }
    }
    assert_eq!(whole, parts);
    // Sequences of several precisions in one step are what they are alone.
    let mut together: Vec<_> = [2, 4, 4, 2, 2]
        .map(|b| model.state(&StateOptions { precision: bits(b), ..StateOptions::default() }))
        .into();
    let mut alone: Vec<_> = [2, 4, 4, 2, 2]
        .map(|b| model.state(&StateOptions { precision: bits(b), ..StateOptions::default() }))
        .into();
    let mut rest = &tokens[..];
    for counts in [[1; 5], [1, 40, 1, 1, 7], [3, 1, 1, 20, 1], [1; 5], [33, 2, 9, 1, 1]] {
        let (step, others) = rest.split_at(counts.iter().sum());
        rest = others;
        model.forward_batch(&mut together, step, &counts, &mut hidden).expect("tokens that fit");
        let (mut rows, mut logits) = (Vec::new(), Vec::new());
        let mut first = 0;
        for (state, count) in alone.iter_mut().zip(counts) {
            let (mut one, mut part) = (Vec::new(), Vec::new());
            model.forward(state, &step[first..first + count], &mut one).expect("tokens that fit");
            model.logits(state, &one, &mut part).expect("rows of this model");
            rows.extend(one);
            logits.extend(part);
            first += count;
        }
        assert!(rows == hidden, "{counts:?}");
        let (width, vocab, mut found) = (hidden.len() / first, logits.len() / first, Vec::new());
        // All of them, and those that end and begin in the midst of a sequence.
        for rows in [0..first, 1..first - 1, 2..4, first - 1..first] {
            let hidden = &hidden[rows.start * width..rows.end * width];
            model.logits_batch(&mut together, rows.clone(), hidden, &mut found).expect("rows of this step");
            assert!(found == logits[rows.start * vocab..rows.end * vocab], "{counts:?} {rows:?}");
        }
        let refused = model.logits_batch(&mut together, 1..first + 1, &hidden, &mut found);
        assert!(refused.is_err(), "{counts:?}");
    }
}

#[test]
fn guesses_of_its_first_planes_change_no_token() {
    let model = load(&nested().dir).expect("written");
    let greedy = SampleConfig::default();
    let drawn = SampleConfig { temperature: 0.8, repetition_penalty: 1.1, seed: 5, ..greedy };
    let schedules = [None, Some("prefill=4,decode=4..2@50"), Some("prefill=2,decode=4..3@70..2@90")];
    for (sampling, schedule) in [greedy, drawn].into_iter().flat_map(|s| schedules.map(|to| (s, to))) {
        let parse = |text: &str| text.parse::<fracbit_schedule::Schedule>().expect("a schedule");
        let scheduler = schedule.map(|text| parse(text).into());
        let scheduler: Option<Scheduler> = scheduler;
        let plain = GenerateOptions { max_tokens: Some(100), scheduler, ..GenerateOptions::default() };
        let want = write(&model, sampling, &plain);
        let two = Some(bits(2));
        let drafts = [(two, Some(1)), (two, Some(4)), (None, Some(7)), (two, None), (None, None)];
        for (precision, length) in drafts {
            let draft = Some(Draft { precision, length });
            let (got, guessed) = drafted(&model, sampling, &prompt(), 100, plain.scheduler.clone(), draft);
            eprintln!("{length:?}: {guessed} of {} tokens guessed", got.len());
            assert_eq!(got, want, "{length:?}");
            assert!(guessed > 0 || length.is_none(), "coarse weights are right often enough: {guessed}");
        }
    }
    // A schedule of one precision is that precision.
    let at = |precision| GenerateOptions {
        max_tokens: Some(60),
        scheduler: Some(fracbit_schedule::Schedule::uniform(precision).into()),
        ..GenerateOptions::default()
    };
    let two = load(&two_bits().dir).expect("written");
    let plain = GenerateOptions { max_tokens: Some(60), ..GenerateOptions::default() };
    assert_eq!(write(&model, greedy, &at(Rate::quarter_bits(8))), write(&two, greedy, &plain));
}

#[test]
fn policies_are_judged_as_schedules_are() {
    let model = load(&nested().dir).expect("written");
    let prompts = [prompt()];
    let [low, high] = [8, 16].map(Rate::quarter_bits);
    let alternating = |phase| match phase {
        Phase::Decode(step) if step % 2 > 0 => low,
        _ => high,
    };
    let policies: [(&str, &dyn Fn(Phase) -> Rate); 3] =
        [("high", &|_| high), ("low", &|_| low), ("alternating", &alternating)];
    let found = compare(&model, &prompts, 33, &policies, &Quiet).expect("prompts that fit");
    let bits: Vec<f64> = found.iter().map(|one| one.mean_bits).collect();
    assert_eq!(bits, [4.0, 2.0, 3.0]);
    let [full, two, between] = &found[..] else { panic!("three policies") };
    assert_eq!([full.kl, full.alike, full.rouge_l], [0.0, 1.0, 1.0]);
    assert!(0.0 < between.kl && between.kl < two.kl, "{found:?}");
    assert!(found.iter().all(|one| one.tokens_per_second > 0.0));
    // What a schedule can say is what `fit` says of it.
    let fitted = fit(&model, &prompts, &FitOptions { steps: 33, ..FitOptions::default() }, &Quiet);
    assert_eq!(fitted.expect("a nested model").uniform[0].loss, two.kl);
    compare(&model, &[], 33, &policies, &Quiet).expect_err("nothing to compare on");
}
