//! Trained models beside the repository: the numbers that a correct runtime gives on real text,
//! through the facade.
//!
//! Protocols and expected values are those of `tests/reference/README.md`, computed by the float64
//! implementation there.
#![expect(clippy::print_stderr, reason = "measured numbers")]

use fracbit::{
    EvalOptions, Opened, Quiet,
    evaluate::{score, windows},
};
use fracbit_model::{KvType, Model, StateOptions};
use fracbit_tests::shared;
use std::{fs, path::PathBuf};

fn model(opened: &Opened) -> Model {
    opened.model(&fracbit::kernels().expect("FRACBIT_ISA is good"), true).expect("a good checkpoint")
}

#[test]
fn demo_model_reaches_its_published_likelihood() {
    let (Some(dir), Some(text)) = (shared("models/demo"), shared("text/tinystories-eval.txt")) else {
        return;
    };
    let opened = Opened::new(&dir).expect("a good checkpoint");
    let text_of = fs::read_to_string(&text).expect("a readable text");
    let model = model(&opened);
    for (kv, tolerance) in [(KvType::F32, 0.0005), (KvType::I16, 0.003)] {
        let options =
            EvalOptions { ctx: Some(256), windows: Some(24), bos: Some(false), kv, ..EvalOptions::default() };
        let windows = windows(&opened, &text_of, &text, &options).expect("a long text");
        assert!(windows.iter().all(|w| w.len() == 257), "256 predictions each");
        let state = StateOptions { kv, ..StateOptions::default() };
        let found = score(&model, None, &windows, state, opened.bits_per_weight(), &Quiet).expect("it runs");
        eprintln!("demo, {kv:?} cache: {:.4} nats/token over {}", found.nats_per_token, found.tokens);
        assert_eq!(found.tokens, 24 * 256);
        assert!((found.nats_per_token - 2.8883).abs() <= tolerance, "{kv:?}: {}", found.nats_per_token);
    }
    // The committed copy is the same model.
    let copy = Opened::new(&fracbit_tests::demo_model()).expect("the embedded model is good");
    assert_eq!(copy.checkpoint.content_hash(), opened.checkpoint.content_hash());
}

/// Windows of the first `count` stories, one each, at most 512 tokens with BOS.
fn story_windows(opened: &Opened, stories: &[&str], count: usize, drop_prefix_space: bool) -> Vec<Vec<u32>> {
    let options =
        EvalOptions { ctx: Some(511), bos: Some(true), drop_prefix_space, ..EvalOptions::default() };
    let separated = EvalOptions { separator: Some("<|endoftext|>".to_owned()), ..options.clone() };
    let origin = PathBuf::from("tinystories-train.txt");
    let each: Vec<Vec<Vec<u32>>> = stories[..count]
        .iter()
        .map(|story| windows(opened, story, &origin, &options).expect("a story"))
        .collect();
    // One text with separators is the same windows in a row.
    let joined =
        windows(opened, &stories[..count].join("\n<|endoftext|>\n"), &origin, &separated).expect("stories");
    assert_eq!(joined, each.concat());
    // Of a story beyond the context the beginning counts.
    each.into_iter().map(|mut windows| windows.swap_remove(0)).collect()
}

#[test]
fn tinystories_656k_reaches_the_reference_s_likelihood() {
    let (Some(dir), Some(text)) = (shared("models/TinyStories-656K"), shared("text/tinystories-train.txt"))
    else {
        return;
    };
    let opened = Opened::new(&dir).expect("a good checkpoint");
    let text = fs::read_to_string(text).expect("a readable text");
    let stories: Vec<&str> = text.split("<|endoftext|>").map(str::trim).filter(|s| !s.is_empty()).collect();
    let model = model(&opened);
    // Stories, without the stray U+2581 token, predictions, nats per token.
    let table = [
        (50, true, 7417, 2.6701),
        (64, true, 10_491, 2.8057),
        (100, true, 18_024, 3.0523),
        (64, false, 10_491 + 64, 2.9221),
    ];
    for (count, drop, predictions, nats) in table {
        let windows = story_windows(&opened, &stories, count, drop);
        let state = StateOptions { kv: KvType::F32, ..StateOptions::default() };
        let found = score(&model, None, &windows, state, 32.0, &Quiet).expect("it runs");
        eprintln!(
            "TinyStories-656K, {count} stories, dropped {drop}: {:.4} over {}",
            found.nats_per_token, found.tokens
        );
        assert!(
            (found.nats_per_token - nats).abs() <= 1e-3,
            "{count} {drop}: {}, reference {nats}",
            found.nats_per_token
        );
        if drop {
            assert_eq!(found.tokens, predictions);
        }
    }
    assert!(windows_start_with_bos(&opened));
}

fn windows_start_with_bos(opened: &Opened) -> bool {
    // The tokenizer says `add_bos_token`, so that BOS is the default too.
    let origin = PathBuf::from("text");
    let windows = windows(opened, "Once upon a time", &origin, &EvalOptions::default()).expect("a text");
    windows[0][0] == 1
}
