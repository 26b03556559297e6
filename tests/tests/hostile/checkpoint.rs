//! A checkpoint with something wrong in it, given to `quantize` and `eval`.

use crate::{copy, names, refused_with};
use fracbit::{Error, Opened};
use fracbit_kernels::cases::Random;
use fracbit_model::{Model, RotationMode};
use fracbit_tests::{Parts, Source, Stored, load, logits, reference, relative, root};
use half::f16;
use serde_json::json;
use std::{fs, path::Path};

/// Opens and quantizes; nothing may be left in `place` but what was there.
fn quantize(dir: &Path, place: &Path, scheme: &str) -> Result<(), Error> {
    let source = Source::open(dir, RotationMode::Fold, 0)?;
    let plan = source.uniform(scheme)?;
    source.quantize(&plan, &place.join("out"), false).map(drop)
}

/// Runs it as it is.
fn run(dir: &Path) -> Result<Model, Error> {
    load(dir)
}

#[test]
fn weights_that_are_no_numbers_are_named_by_row_and_column() {
    // F16, so that the loader's conversion is on the way; `what`, tensor, element, value, words.
    let table: [(&str, &str, usize, f32, &[&str]); 7] = [
        (
            "NaN in a matrix",
            "model.layers.1.mlp.up_proj.weight",
            3 * 64 + 5,
            f32::NAN,
            &["row 3, column 5", "NaN"],
        ),
        (
            "infinity in a matrix",
            "model.layers.0.self_attn.k_proj.weight",
            64 * 31,
            f32::INFINITY,
            &["row 31, column 0", "inf"],
        ),
        (
            "infinity in the last place",
            "model.layers.1.mlp.down_proj.weight",
            64 * 160 - 1,
            f32::NEG_INFINITY,
            &["row 63, column 159"],
        ),
        ("NaN in the embedding", "model.embed_tokens.weight", 64 * 17, f32::NAN, &["row 17, column 0"]),
        ("NaN in the head", "lm_head.weight", 9, f32::NAN, &["row 0, column 9"]),
        ("NaN in a norm", "model.layers.0.input_layernorm.weight", 4, f32::NAN, &["finite"]),
        ("infinity in the last norm", "model.norm.weight", 0, f32::INFINITY, &["finite"]),
    ];
    for (what, tensor, at, value, words) in table {
        let mut parts = Parts::read(&reference("llama2").dir);
        parts.tensor(tensor).bytes[2 * at..2 * at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
        let place = tempfile::tempdir().expect("a temporary directory");
        let dir = place.path().join("model");
        parts.write(&dir);
        let words = [words, &[tensor, "model.safetensors"]].concat();
        refused_with(what, quantize(&dir, place.path(), "nuq-4"), &words);
        assert_eq!(names(place.path()), ["model"], "{what}: no output, whole or partial");
        refused_with(what, run(&dir), &words);
    }
}

#[test]
fn zero_rows_and_zero_matrices_work() {
    let mut parts = Parts::read(&reference("llama2").dir);
    parts.tensor("model.layers.0.mlp.gate_proj.weight").bytes[2 * 64 * 16..2 * 64 * 40].fill(0);
    parts.tensor("model.embed_tokens.weight").bytes[..2 * 64].fill(0);
    parts.tensor("model.layers.1.self_attn.o_proj.weight").bytes.fill(0);
    parts.tensor("model.layers.1.mlp.down_proj.weight").bytes.fill(0);
    let place = tempfile::tempdir().expect("a temporary directory");
    let dir = place.path().join("model");
    parts.write(&dir);
    for rotation in [RotationMode::Fold, RotationMode::Online, RotationMode::None] {
        for name in ["nuq-6", "half-tcq-2.25"] {
            let source = Source::open(&dir, rotation, 0).expect("zeros are numbers");
            let out = place.path().join(format!("{rotation:?}-{name}"));
            let report = source
                .quantize(&source.uniform(name).expect("no budget to miss"), &out, false)
                .expect("zeros are weights");
            let zero = report.layers.iter().find(|l| l.name.ends_with("1.mlp.down_proj")).expect("a layer");
            assert!(zero.relative_error.abs() < 1e-12, "{rotation:?} {name}: {zero:?}");
            let tokens: Vec<u32> = (0..20).collect();
            let want = logits(&run(&dir).expect("it runs"), &tokens);
            let got = logits(&load(&out).expect("it runs"), &tokens);
            assert!(got.iter().all(|l| l.is_finite()), "{rotation:?} {name}");
            if name == "nuq-6" {
                assert!(relative(&got, &want) < 0.15, "{rotation:?}: {}", relative(&got, &want));
            }
        }
    }
}

/// A checkpoint with no even width where an odd one will do.
fn odd_model(dir: &Path) {
    let (hidden, inner, heads, kv, head, vocab) = (38usize, 97usize, 3usize, 1usize, 10usize, 67usize);
    let mut random = Random::new(7);
    let mut tensor = |name: &str, shape: &[usize], deviation: f32, mean: f32| {
        let count: usize = shape.iter().product();
        // A sum of 4 uniform numbers, variance 1/3.
        let mut number = || (0..4).map(|_| random.unit()).sum::<f32>() - 2.0;
        let bytes = (0..count).flat_map(|_| (mean + deviation * 1.73 * number()).to_le_bytes()).collect();
        Stored { name: name.to_owned(), dtype: "F32".to_owned(), shape: shape.to_vec(), bytes }
    };
    let mut tensors = vec![
        tensor("model.embed_tokens.weight", &[vocab, hidden], 1.0, 0.0),
        tensor("lm_head.weight", &[vocab, hidden], 0.2, 0.0),
        tensor("model.norm.weight", &[hidden], 0.1, 1.0),
    ];
    for layer in 0..2 {
        for (name, shape) in [
            ("self_attn.q_proj", [heads * head, hidden]),
            ("self_attn.k_proj", [kv * head, hidden]),
            ("self_attn.v_proj", [kv * head, hidden]),
            ("self_attn.o_proj", [hidden, heads * head]),
            ("mlp.gate_proj", [inner, hidden]),
            ("mlp.up_proj", [inner, hidden]),
            ("mlp.down_proj", [hidden, inner]),
        ] {
            tensors.push(tensor(&format!("model.layers.{layer}.{name}.weight"), &shape, 0.15, 0.0));
        }
        for name in ["input_layernorm", "post_attention_layernorm"] {
            tensors.push(tensor(&format!("model.layers.{layer}.{name}.weight"), &[hidden], 0.1, 1.0));
        }
    }
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": head,
        "vocab_size": vocab, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": false,
        "bos_token_id": 0, "eos_token_id": 1,
    });
    // A tokenizer must be there, and no more.
    let files = Parts::read(&reference("llama1").dir).files;
    Parts { config, files, tensors }.write(dir);
}

#[test]
fn odd_widths_work_in_every_rotation() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let dir = place.path().join("model");
    odd_model(&dir);
    let tokens: Vec<u32> = (0..24).map(|i| i * 5 % 67).collect();
    let want = {
        let opened = Opened::new(&dir).expect("a good checkpoint");
        logits(
            &opened.model(&fracbit::kernels().expect("FRACBIT_ISA is good"), true).expect("it runs"),
            &tokens,
        )
    };
    for rotation in [RotationMode::Fold, RotationMode::Online, RotationMode::None] {
        for (name, bound) in [("nuq-8", 0.06), ("tcq-4", 0.4), ("vq-4.5", 0.4), ("half-tcq-3.75", 0.5)] {
            let source = Source::open(&dir, rotation, 0).expect("a good checkpoint");
            let out = place.path().join(format!("{rotation:?}-{name}"));
            source
                .quantize(&source.uniform(name).expect("no budget to miss"), &out, false)
                .expect("odd widths are widths");
            let opened = Opened::new(&out).expect("a directory we wrote");
            let model =
                opened.model(&fracbit::kernels().expect("FRACBIT_ISA is good"), true).expect("it runs");
            let error = relative(&logits(&model, &tokens), &want);
            assert!(error < bound, "{rotation:?} {name}: {error}");
        }
    }
}

/// Changes to a checkpoint, and words that the error must contain.
type Case = (&'static str, fn(&mut Parts), &'static [&'static str]);

const CASES: &[Case] = &[
    (
        "a matrix missing",
        |p| drop(p.remove("model.layers.1.mlp.gate_proj.weight")),
        &["model.layers.1.mlp.gate_proj.weight", "should exist"],
    ),
    (
        "a norm missing",
        |p| drop(p.remove("model.layers.0.post_attention_layernorm.weight")),
        &["0.post_attention_layernorm.weight", "should exist"],
    ),
    (
        "the embedding missing",
        |p| drop(p.remove("model.embed_tokens.weight")),
        &["model.embed_tokens.weight", "should exist"],
    ),
    ("the head missing", |p| drop(p.remove("lm_head.weight")), &["lm_head.weight", "tie_word_embeddings"]),
    (
        "a matrix on its side",
        |p| p.tensor("model.layers.0.mlp.up_proj.weight").shape.reverse(),
        &["up_proj.weight", "[160, 64]", "[64, 160]"],
    ),
    (
        "a matrix of three dimensions",
        |p| p.tensor("model.layers.0.mlp.up_proj.weight").shape = vec![2, 80, 64],
        &["up_proj.weight", "[2, 80, 64]"],
    ),
    (
        "a norm of another width",
        |p| {
            let t = p.tensor("model.norm.weight");
            t.shape = vec![32];
            t.bytes.truncate(64);
        },
        &["model.norm.weight", "[64]", "[32]"],
    ),
    (
        "integers for weights",
        |p| "I16".clone_into(&mut p.tensor("model.layers.0.mlp.up_proj.weight").dtype),
        &["up_proj.weight", "I16"],
    ),
    (
        "a type of other tools",
        |p| "F8_E4M3".clone_into(&mut p.tensor("lm_head.weight").dtype),
        &["model.safetensors", "lm_head.weight", "F8_E4M3"],
    ),
    (
        "a bias that the configuration lacks",
        |p| {
            p.tensors.push(Stored {
                name: "model.layers.0.self_attn.q_proj.bias".to_owned(),
                dtype: "F16".to_owned(),
                shape: vec![64],
                bytes: [0, 0x3c].repeat(64),
            });
        },
        &["q_proj.bias"],
    ),
    (
        "a bias that the checkpoint lacks",
        |p| p.config["attention_bias"] = json!(true),
        &["q_proj.bias", "should exist"],
    ),
    (
        "more blocks than stored",
        |p| p.config["num_hidden_layers"] = json!(5),
        &["model.layers.2", "should exist"],
    ),
    ("no blocks", |p| p.config["num_hidden_layers"] = json!(0), &["config.json", "num_hidden_layers"]),
    (
        "heads that do not divide",
        |p| p.config["num_key_value_heads"] = json!(3),
        &["config.json", "num_key_value_heads"],
    ),
    (
        "an architecture that is not known",
        |p| {
            p.config["architectures"] = json!(["MambaForCausalLM"]);
            p.config["model_type"] = json!("mamba");
        },
        &["config.json", "MambaForCausalLM"],
    ),
    (
        "a width beyond all bounds",
        |p| p.config["hidden_size"] = json!(1u64 << 40),
        &["config.json", "hidden_size"],
    ),
];

#[test]
fn checkpoints_that_do_not_fit_their_configuration_are_refused() {
    for (what, change, words) in CASES {
        let mut parts = Parts::read(&reference("llama2").dir);
        change(&mut parts);
        let place = tempfile::tempdir().expect("a temporary directory");
        let dir = place.path().join("model");
        parts.write(&dir);
        refused_with(what, quantize(&dir, place.path(), "nuq-2"), words);
        assert_eq!(names(place.path()), ["model"], "{what}: no output, whole or partial");
        refused_with(what, run(&dir), words);
        let _ = fracbit::inspect(&dir);
    }
}

#[test]
fn missing_and_damaged_shards_are_named() {
    let sharded = reference("llama3").dir;
    let shards: Vec<String> = names(&sharded).into_iter().filter(|n| n.ends_with(".safetensors")).collect();
    assert_eq!(shards.len(), 3);
    for shard in &shards {
        let place = copy(&sharded);
        let path = place.path().join(shard);
        let bytes = fs::read(&path).expect("a shard");
        for length in [0, 7, 100, bytes.len() / 2, bytes.len() - 1] {
            fs::write(&path, &bytes[..length]).expect("a writable place");
            refused_with(
                &format!("{shard} of {length} bytes"),
                quantize(place.path(), place.path(), "nuq-2"),
                &[shard],
            );
        }
        fs::remove_file(&path).expect("it was there");
        refused_with(
            &format!("without {shard}"),
            quantize(place.path(), place.path(), "nuq-2"),
            &[shard, "should exist"],
        );
        assert!(!place.path().join("out").exists());
    }
    for (name, words) in [
        ("model.safetensors.index.json", &["index"][..]),
        ("config.json", &["config.json"]),
        ("tokenizer.json", &["tokenizer.json"]),
    ] {
        let place = copy(&sharded);
        fs::remove_file(place.path().join(name)).expect("it was there");
        refused_with(&format!("without {name}"), run(place.path()), words);
    }
}

#[test]
fn what_is_no_model_says_so() {
    for (path, word) in [
        (root().join("docs"), "config.json"),
        (root().join("Cargo.toml"), "config.json"),
        (root().join("no such directory"), "no such directory"),
    ] {
        refused_with(&path.display().to_string(), Opened::new(&path), &[word]);
        refused_with(&path.display().to_string(), fracbit::inspect(&path), &[word]);
    }
}
