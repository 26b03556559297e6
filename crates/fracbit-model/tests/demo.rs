//! The trained models beside the repository, where they are: numbers that a correct decoder gives on real
//! text.

#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test's helpers fail by panicking and report on stderr"
)]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use fracbit_io::{Bos, Checkpoint, EncodeOptions, ModelConfig, PrefixSpace, Tokenizer};
use fracbit_model::{EvalOptions, KvType, Model, RotationMode, StateOptions, WeightSource, eval};

/// A model's directory and a text; `None`, said aloud, where they are absent.
fn shared(model: &str, text: &str) -> Option<(PathBuf, String)> {
    let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared"));
    let (dir, text) = (root.join("models").join(model), root.join("text").join(text));
    if !dir.is_dir() || !text.is_file() {
        eprintln!("SKIPPED: {} or {} is absent", dir.display(), text.display());
        return None;
    }
    Some((dir, std::fs::read_to_string(text).unwrap()))
}

fn load(dir: &Path, mode: RotationMode) -> (Model, Tokenizer) {
    let config = ModelConfig::from_dir(dir).unwrap();
    let tokenizer = Tokenizer::from_dir(dir, Some(&config)).unwrap();
    let source = WeightSource::new(Arc::new(Checkpoint::open(dir).unwrap()), config, mode, 3).unwrap();
    (Model::from_source(&source).unwrap(), tokenizer)
}

#[test]
fn demo_model_reaches_its_published_likelihood() {
    let Some((dir, text)) = shared("demo", "tinystories-eval.txt") else { return };
    for (mode, kv) in [(RotationMode::None, KvType::F32), (RotationMode::Fold, KvType::I16)] {
        let (model, tokenizer) = load(&dir, mode);
        let options = EncodeOptions { bos: Bos::Never, ..EncodeOptions::default() };
        let tokens = tokenizer.encode(&text, options).unwrap();
        // 256 predictions each: the last target is the next window's first token.
        let windows: Vec<&[u32]> = (0..24).map(|i| &tokens[256 * i..=256 * (i + 1)]).collect();
        let state = StateOptions { kv, ..StateOptions::default() };
        let nll =
            eval::nll(&model, &windows, &EvalOptions { state, ..EvalOptions::default() }, |_| {}).unwrap();
        eprintln!("demo, {mode:?}, {kv:?}: {:.5} nats/token", nll.nats_per_token());
        assert_eq!(nll.tokens, 24 * 256);
        // Published as 2.888.
        assert!((nll.nats_per_token() - 2.8883).abs() < 0.001, "{mode:?}: {}", nll.nats_per_token());
    }
}

#[test]
fn tinystories_656k_agrees_with_float64() {
    let Some((dir, text)) = shared("TinyStories-656K", "tinystories-train.txt") else { return };
    let (model, tokenizer) = load(&dir, RotationMode::None);
    let stories: Vec<String> =
        text.split("<|endoftext|>").take(12).map(|s| s.trim().replace("\n\n", "\n")).collect();
    // Trained on BOS, then the story without the leading U+2581 that its tokenizer file asks for. Both values
    // by the plain float64 implementation in tests/reference, with a tokenizer written for that comparison.
    for (prefix_space, want) in [(PrefixSpace::Drop, 2.722_79), (PrefixSpace::Keep, 2.845_50)] {
        let options = EncodeOptions { bos: Bos::Always, prefix_space };
        let windows: Vec<_> = stories.iter().map(|s| tokenizer.encode(s, options).unwrap()).collect();
        let nll = eval::nll(&model, &windows, &EvalOptions::default(), |_| {}).unwrap();
        eprintln!("TinyStories-656K, {prefix_space:?}: {:.5} nats/token", nll.nats_per_token());
        assert!((nll.nats_per_token() - want).abs() < 5e-4, "{prefix_space:?}: {}", nll.nats_per_token());
    }
}
