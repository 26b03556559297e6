//! Tokenizers without `tokenizer.json`: small ones in every form, whose texts transformers and
//! SentencePiece have encoded (`golden/other_tokenizers.py`).

use std::path::{Path, PathBuf};

use fracbit_io::{Bos, EncodeOptions, PrefixSpace, Tokenizer};

fn dir(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/tokenizers").join(name)
}

const NEVER: EncodeOptions = EncodeOptions { bos: Bos::Never, prefix_space: PrefixSpace::Keep };
const ALL: [&str; 9] = [
    "spm-llama",
    "spm-first",
    "spm-spaces",
    "spm-gemma",
    "spm-unigram",
    "tiktoken",
    "tekken",
    "gpt2",
    "qwen2",
];

#[test]
fn texts_are_encoded_as_by_their_own_programs() {
    let mut wrong = Vec::new();
    for name in ALL {
        let t = Tokenizer::from_dir(dir(name), None).unwrap_or_else(|e| panic!("{name}: {e}"));
        let cases: Vec<(String, Vec<u32>)> =
            serde_json::from_slice(&std::fs::read(dir(name).join("cases.json")).unwrap()).unwrap();
        assert!(cases.len() >= 40, "{name}");
        for (text, want) in cases {
            let got = t.encode(&text, NEVER).unwrap();
            if got != want {
                wrong.push(format!("{name} {text:?}\n  want {want:?}\n  got  {got:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn texts_come_back() {
    for name in ["spm-llama", "spm-gemma", "tiktoken", "tekken", "gpt2", "qwen2"] {
        let t = Tokenizer::from_dir(dir(name), None).unwrap();
        for text in ["the cat sat on the mat", "na\u{ef}ve 12\n\n  x \u{1F980}", "a<b>[c]"] {
            let ids = t.encode(text, NEVER).unwrap();
            assert_eq!(t.decode(&ids, true).unwrap(), text, "{name}");
        }
    }
    let t = Tokenizer::from_dir(dir("spm-llama"), None).unwrap();
    assert_eq!((t.bos_token(), t.eos_ids()), (Some("<s>"), &[2][..]));
    assert_eq!(t.encode("a", EncodeOptions::default()).unwrap()[0], 1, "add_bos_token");
    assert_eq!(Tokenizer::from_dir(dir("tekken"), None).unwrap().token_id("[INST]"), Some(3));
    assert_eq!(Tokenizer::from_dir(dir("qwen2"), None).unwrap().eos_ids(), [401]);
    assert_eq!(Tokenizer::from_dir(dir("tiktoken"), None).unwrap().eos_ids(), [403]);
}

/// Whatever the bytes are, there is an answer.
#[test]
fn damaged_files_are_refused_or_read() {
    for (name, file) in [
        ("spm-llama", "tokenizer.model"),
        ("spm-unigram", "tokenizer.model"),
        ("tiktoken", "tokenizer.model"),
        ("tekken", "tekken.json"),
        ("gpt2", "vocab.json"),
        ("gpt2", "merges.txt"),
    ] {
        let place = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(dir(name)).unwrap() {
            let path = entry.unwrap().path();
            std::fs::copy(&path, place.path().join(path.file_name().unwrap())).unwrap();
        }
        let good = std::fs::read(dir(name).join(file)).unwrap();
        let path = place.path().join(file);
        let mut seed = 1_u64;
        let mut random = |below: usize| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) as usize % below
        };
        for round in 0..60 {
            let mut bytes = good.clone();
            match round % 3 {
                0 => bytes.truncate(random(good.len())),
                1 => (0..4).for_each(|_| bytes[random(good.len())] = random(256) as u8),
                _ => {
                    let (at, len) = (random(good.len()), random(40));
                    bytes.drain(at..(at + len).min(good.len()));
                }
            }
            std::fs::write(&path, &bytes).unwrap();
            if let Ok(t) = Tokenizer::from_dir(place.path(), None) {
                let _ = t.encode("the cat \u{e9}", NEVER);
            } else if let Err(e) = Tokenizer::from_dir(place.path(), None) {
                let name = e.to_string();
                assert!(name.contains(&place.path().display().to_string()), "{name}");
            }
        }
    }
}

#[test]
fn what_cannot_be_read_says_why() {
    let place = tempfile::tempdir().unwrap();
    let e = Tokenizer::from_dir(place.path(), None).unwrap_err().to_string();
    assert!(e.contains("tokenizer.json"), "{e}");
    std::fs::write(place.path().join("vocab.json"), r#"{"a": 0}"#).unwrap();
    std::fs::write(place.path().join("merges.txt"), "").unwrap();
    let e = Tokenizer::from_dir(place.path(), None).unwrap_err().to_string();
    assert!(e.contains("vocab.json") && e.contains("tokenizer_class"), "{e}");
    std::fs::write(place.path().join("tokenizer.model"), b"\x0a\xff\xff\xff\xff\x0f").unwrap();
    let e = Tokenizer::from_dir(place.path(), None).unwrap_err().to_string();
    assert!(e.contains("tokenizer.model") && e.contains("SentencePiece"), "{e}");
}
