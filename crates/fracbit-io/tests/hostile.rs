//! Bad input: each case builds the file, and says which file, tensor and rule the error must name.

mod common;

use std::fs;
use std::path::Path;

use common::{CONFIG, f32_bytes, file, shared_model, skipped, write_model};
use fracbit_io::{
    Checkpoint, Error, Header, HeaderError as H, Manifest, ModelConfig, Overwrite, Tokenizer, verify,
};
use proptest::prelude::*;

fn entry(name: &str, rest: &str) -> String {
    format!("{{\"{name}\":{{{rest}}}}}")
}

#[test]
fn headers() {
    type Check = fn(&H) -> bool;
    let ok = "\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]";
    let one = |rest: &str, data: usize| file(&entry("w", rest), &vec![0; data]);
    let two = |b: &str, data: usize| {
        file(&format!("{{\"a\":{{{ok}}},\"b\":{{\"dtype\":\"F32\",\"shape\":[1],{b}}}}}"), &vec![0; data])
    };
    let cases: Vec<(&str, Vec<u8>, Check)> = vec![
        ("empty file", vec![], |e| matches!(e, H::TooShort { got: 0 })),
        ("seven bytes", vec![0; 7], |e| matches!(e, H::TooShort { got: 7 })),
        ("header of 2^64-1", vec![0xff; 8], |e| matches!(e, H::HeaderTooLarge { .. })),
        ("header of 100 000 001", 100_000_001_u64.to_le_bytes().to_vec(), |e| {
            matches!(e, H::HeaderTooLarge { .. })
        }),
        ("header beyond file", 5_u64.to_le_bytes().to_vec(), |e| {
            matches!(e, H::HeaderBeyondFile { header: 5, file: 8 })
        }),
        ("not UTF-8", [&2_u64.to_le_bytes()[..], b"{\xff"].concat(), |e| matches!(e, H::NotUtf8 { at: 1 })),
        ("not JSON", file("{x", b""), |e| matches!(e, H::NotJson { .. })),
        ("empty header", file("", b""), |e| matches!(e, H::NotJson { .. })),
        ("a list", file("[]", b""), |e| matches!(e, H::NotJson { .. })),
        ("text after the object", file("{}x", b""), |e| matches!(e, H::NotJson { .. })),
        ("depth", file(&"[".repeat(1_000_000), b""), |e| matches!(e, H::NotJson { .. })),
        ("depth in a tensor", file(&entry("w", &format!("\"x\":{}", "[".repeat(1_000_000))), b""), |e| {
            matches!(e, H::BadEntry { .. })
        }),
        (
            "duplicate tensor",
            file(&format!("{{\"w\":{{{ok}}},\"w\":{{{ok}}}}}"), &[0; 4]),
            |e| matches!(e, H::DuplicateKey { key } if key == "w"),
        ),
        (
            "duplicate by escape",
            file(&format!("{{\"w\":{{{ok}}},\"\\u0077\":{{{ok}}}}}"), &[0; 4]),
            |e| matches!(e, H::DuplicateKey { key } if key == "w"),
        ),
        ("duplicate metadata", file("{\"__metadata__\":{},\"__metadata__\":{}}", b""), |e| {
            matches!(e, H::DuplicateKey { .. })
        }),
        ("duplicate in metadata", file("{\"__metadata__\":{\"a\":\"1\",\"a\":\"2\"}}", b""), |e| {
            matches!(e, H::BadMetadata { .. })
        }),
        ("metadata of numbers", file("{\"__metadata__\":{\"a\":1}}", b""), |e| {
            matches!(e, H::BadMetadata { .. })
        }),
        (
            "duplicate field",
            one("\"dtype\":\"F32\",\"dtype\":\"F16\",\"shape\":[1],\"data_offsets\":[0,4]", 4),
            |e| matches!(e, H::BadEntry { tensor, .. } if tensor == "w"),
        ),
        (
            "no dtype",
            one("\"shape\":[1],\"data_offsets\":[0,4]", 4),
            |e| matches!(e, H::BadEntry { detail, .. } if detail.contains("dtype")),
        ),
        ("three offsets", one("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,8]", 4), |e| {
            matches!(e, H::BadEntry { .. })
        }),
        (
            "unknown dtype",
            one("\"dtype\":\"F8_E9M9\",\"shape\":[4],\"data_offsets\":[0,4]", 4),
            |e| matches!(e, H::UnknownDtype { dtype, .. } if dtype == "F8_E9M9"),
        ),
        ("half a byte", one("\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,2]", 2), |e| {
            matches!(e, H::BadShape { .. })
        }),
        (
            "wrong size of an unread type",
            one("\"dtype\":\"F6_E2M3\",\"shape\":[4],\"data_offsets\":[0,4]", 4),
            |e| matches!(e, H::SizeMismatch { want: 3, got: 4, .. }),
        ),
        ("negative dimension", one("\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]", 4), |e| {
            matches!(e, H::BadShape { .. })
        }),
        ("fractional dimension", one("\"dtype\":\"F32\",\"shape\":[1.5],\"data_offsets\":[0,4]", 4), |e| {
            matches!(e, H::BadShape { .. })
        }),
        (
            "dimension of 2^64",
            one("\"dtype\":\"F32\",\"shape\":[18446744073709551616],\"data_offsets\":[0,4]", 4),
            |e| matches!(e, H::BadShape { .. }),
        ),
        (
            "product of 2^64",
            one("\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]", 0),
            |e| matches!(e, H::BadShape { .. }),
        ),
        (
            "overflow behind a zero",
            one("\"dtype\":\"F32\",\"shape\":[0,4294967296,4294967296],\"data_offsets\":[0,0]", 0),
            |e| matches!(e, H::BadShape { .. }),
        ),
        (
            "a million dimensions",
            one(
                &format!("\"dtype\":\"F32\",\"shape\":[{}1],\"data_offsets\":[0,4]", "1,".repeat(1_000_000)),
                4,
            ),
            |e| matches!(e, H::BadShape { .. }),
        ),
        ("negative offset", one("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[-4,0]", 4), |e| {
            matches!(e, H::BadOffsets { .. })
        }),
        ("reversed offsets", one("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]", 4), |e| {
            matches!(e, H::BadOffsets { .. })
        }),
        ("beyond the file", one("\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]", 4), |e| {
            matches!(e, H::BeyondFile { end: 8, data: 4, .. })
        }),
        (
            "far beyond the file",
            one(
                "\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[18446744073709551608,18446744073709551612]",
                4,
            ),
            |e| matches!(e, H::BeyondFile { .. }),
        ),
        ("wrong size", one("\"dtype\":\"F16\",\"shape\":[1],\"data_offsets\":[0,4]", 4), |e| {
            matches!(e, H::SizeMismatch { want: 2, got: 4, .. })
        }),
        ("trailing bytes", one(ok, 5), |e| matches!(e, H::TrailingBytes { extra: 1 })),
        ("data without tensors", file("{}", b"x"), |e| matches!(e, H::TrailingBytes { extra: 1 })),
        (
            "gap",
            two("\"data_offsets\":[8,12]", 12),
            |e| matches!(e, H::Gap { tensor, want: 4, got: 8 } if tensor == "b"),
        ),
        (
            "overlap",
            two("\"data_offsets\":[2,6]", 6),
            |e| matches!(e, H::Overlap { tensor, want: 4, got: 2 } if tensor == "b"),
        ),
        ("the same place twice", two("\"data_offsets\":[0,4]", 4), |e| matches!(e, H::Overlap { .. })),
        ("gap at the start", one("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]", 8), |e| {
            matches!(e, H::Gap { want: 0, got: 4, .. })
        }),
    ];
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    for (what, bytes, check) in cases {
        let e = Header::parse(&bytes).expect_err(what);
        assert!(check(&e), "{what}: {e:?}");
        fs::write(&path, &bytes).unwrap();
        let e = Checkpoint::open(dir.path()).expect_err(what).to_string();
        assert!(e.contains("model.safetensors"), "{what}: the message should name the file: {e}");
        assert!(!verify(dir.path()).unwrap().is_ok(), "{what}");
    }
}

/// Directories: `(what, files, words the message must contain)`.
#[test]
fn directories() {
    let good = file(&entry("w", "\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]"), &[0; 4]);
    let index = |map: &str| format!("{{\"metadata\":{{}},\"weight_map\":{{{map}}}}}").into_bytes();
    type Files<'a> = Vec<(&'a str, Vec<u8>)>;
    const I: &str = "model.safetensors.index.json";
    let cases: Vec<(&str, Files<'_>, &[&str])> = vec![
        ("nothing", vec![], &["model.safetensors", I]),
        ("pickle only", vec![("pytorch_model.bin", vec![0])], &["safetensors", "pickle"]),
        (
            "shards without index",
            vec![("model-00001-of-00002.safetensors", good.clone())],
            &["model-00001", "index"],
        ),
        (
            "missing shard",
            vec![(I, index("\"w\":\"a.safetensors\""))],
            &["a.safetensors", "should exist", "`w`"],
        ),
        (
            "tensor in another shard",
            vec![
                (I, index("\"w\":\"a.safetensors\",\"v\":\"b.safetensors\"")),
                ("a.safetensors", file("{}", b"")),
                (
                    "b.safetensors",
                    file(
                        &format!(
                            "{{\"v\":{0},\"w\":{0}}}",
                            "{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}"
                        ),
                        b"",
                    ),
                ),
            ],
            &["`w`", "a.safetensors", "is in `b.safetensors`"],
        ),
        (
            "tensor in two shards",
            vec![
                (I, index("\"w\":\"a.safetensors\",\"v\":\"b.safetensors\"")),
                ("a.safetensors", good.clone()),
                ("b.safetensors", good.clone()),
            ],
            &["`w`", "one shard", "a.safetensors", "b.safetensors"],
        ),
        ("parent directory", vec![(I, index("\"w\":\"../a.safetensors\""))], &["`w`", "../a.safetensors"]),
        ("absolute path", vec![(I, index("\"w\":\"/etc/a.safetensors\""))], &["same directory"]),
        ("backslash", vec![(I, index("\"w\":\"..\\\\a.safetensors\""))], &["same directory"]),
        ("NUL", vec![(I, index("\"w\":\"a\\u0000.safetensors\""))], &["same directory"]),
        ("other kind", vec![(I, index("\"w\":\"config.json\""))], &[".safetensors"]),
        ("empty map", vec![(I, index(""))], &["at least one"]),
        (
            "duplicate in the map",
            vec![(I, index("\"w\":\"a.safetensors\",\"w\":\"b.safetensors\""))],
            &["twice"],
        ),
        ("not JSON", vec![(I, b"{".to_vec())], &["weight_map"]),
        ("no map", vec![(I, b"{}".to_vec())], &["weight_map"]),
        ("wrong types", vec![(I, b"{\"weight_map\":[1]}".to_vec())], &["weight_map"]),
        (
            "truncated shard",
            vec![(I, index("\"w\":\"a.safetensors\"")), ("a.safetensors", good[..good.len() - 1].to_vec())],
            &["a.safetensors", "`w`", "3 data bytes"],
        ),
    ];
    for (what, files, words) in cases {
        let dir = tempfile::tempdir().unwrap();
        for (name, bytes) in files {
            fs::write(dir.path().join(name), bytes).unwrap();
        }
        let e = Checkpoint::open(dir.path()).expect_err(what).to_string();
        for w in words {
            assert!(e.contains(w), "{what}: `{w}` should be in: {e}");
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 2626168\n";
    for name in ["model.safetensors", "config.json", "tokenizer.json"] {
        fs::write(dir.path().join(name), pointer).unwrap();
    }
    let of_weights = Checkpoint::open(dir.path()).unwrap_err();
    let of_config = ModelConfig::from_dir(dir.path()).unwrap_err();
    let of_tokenizer = Tokenizer::from_dir(dir.path(), None).unwrap_err();
    for e in [of_weights, of_config, of_tokenizer] {
        assert!(matches!(e, Error::LfsPointer { .. }), "{e}");
    }
    let e = Checkpoint::open("/nonexistent/model").unwrap_err().to_string();
    assert!(e.contains("/nonexistent/model"), "{e}");
}

/// Opening a named pipe waits for a writer; what is no file is refused before it is opened.
#[cfg(unix)]
#[test]
fn named_pipes_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["model.safetensors", "config.json", "tokenizer.json"] {
        let made = std::process::Command::new("mkfifo").arg(dir.path().join(name)).status().unwrap();
        assert!(made.success());
    }
    let of_weights = Checkpoint::open(dir.path()).unwrap_err();
    let of_config = ModelConfig::from_dir(dir.path()).unwrap_err();
    let of_tokenizer = Tokenizer::from_dir(dir.path(), None).unwrap_err();
    for e in [of_weights, of_config, of_tokenizer] {
        assert!(matches!(e, Error::NotAFile { .. }), "{e}");
    }
}

#[test]
fn values() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.safetensors");
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for (dtype, size) in [("F32", 4), ("BF16", 2), ("F16", 2), ("F64", 8)] {
            let mut v = vec![1.0_f32; 12];
            (v[7], v[10]) = (bad, bad);
            let data: Vec<u8> = match dtype {
                "F32" => f32_bytes(&v),
                "F64" => v.iter().flat_map(|&x| f64::from(x).to_le_bytes()).collect(),
                "BF16" => v.iter().flat_map(|&x| half::bf16::from_f32(x).to_le_bytes()).collect(),
                _ => v.iter().flat_map(|&x| half::f16::from_f32(x).to_le_bytes()).collect(),
            };
            let h = entry(
                "w",
                &format!("\"dtype\":\"{dtype}\",\"shape\":[3,4],\"data_offsets\":[0,{}]", 12 * size),
            );
            fs::write(&path, file(&h, &data)).unwrap();
            let c = Checkpoint::open(&path).unwrap();
            let mut row = [0.0; 4];
            c.rows_f32_into("w", 0..1, &mut row).unwrap();
            assert_eq!(row, [1.0; 4]);
            let mut rows = [0.0; 8];
            for e in [c.to_f32("w").unwrap_err(), c.rows_f32_into("w", 1..3, &mut rows).unwrap_err()] {
                assert!(matches!(e, Error::NonFinite { row: 1, col: 3, .. }), "{e}");
                let text = e.to_string();
                assert!(
                    text.contains("m.safetensors")
                        && text.contains("`w`")
                        && text.contains("row 1, column 3"),
                    "{text}"
                );
            }
            assert!(c.rows_f32_into("w", 0..4, &mut [0.0; 16]).unwrap_err().to_string().contains("0..3"));
            assert!(c.rows_f32_into("w", 0..1, &mut [0.0; 3]).unwrap_err().to_string().contains("1 x 4"));
            assert!(c.to_f32("v").unwrap_err().to_string().contains("`v` should exist"));
            let e = c.expect_shape("w", &[4, 3]).unwrap_err().to_string();
            assert!(e.contains("[4, 3]") && e.contains("[3, 4]"), "{e}");
        }
    }
    fs::write(&path, file(&entry("w", "\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[0,4]"), &[0; 4]))
        .unwrap();
    let c = Checkpoint::open(&path).unwrap();
    assert!(c.to_f32("w").unwrap_err().to_string().contains("I32"));
    assert!(c.expect_weights("w", &[1]).unwrap_err().to_string().contains("I32"));
    assert!(c.expect_weights("w", &[2]).unwrap_err().to_string().contains("[2] by config.json, got [1]"));
}

/// Every single-bit flip of every file is found by `verify`; those of metadata already by opening,
/// those of tensor data by `verify_tensor` before first use.
#[test]
fn every_bit_flip_is_found() {
    for max_shard in [u64::MAX, 100] {
        let tmp = tempfile::tempdir().unwrap();
        let dir = write_model(&tmp.path().join("m"), max_shard, Overwrite::No);
        assert!(verify(&dir).unwrap().is_ok());
        for entry in fs::read_dir(&dir).unwrap() {
            let path = entry.unwrap().path();
            let good = fs::read(&path).unwrap();
            let data_from = if path.extension().is_some_and(|e| e == "safetensors") {
                Header::parse(&good).unwrap().data_start
            } else {
                usize::MAX
            };
            let is_manifest = path.ends_with("manifest.json");
            // Steps coprime to 8 reach every place within a byte and most bytes, in seconds;
            // `manifest`'s own test flips every bit of one.
            for bit in (0..good.len() * 8).step_by(if is_manifest { 61 } else { 13 }) {
                let mut bytes = good.clone();
                bytes[bit / 8] ^= 1 << (bit % 8);
                fs::write(&path, &bytes).unwrap();
                let report = verify(&dir).unwrap();
                let name = path.file_name().unwrap().to_str().unwrap();
                assert!(
                    report.problems.iter().any(|p| p.file == name),
                    "bit {bit} of {name} went unseen:\n{report}"
                );
                match Checkpoint::open(&dir) {
                    Err(_) => assert!(bit / 8 < data_from, "data are not read when opening"),
                    Ok(c) => {
                        assert!(bit / 8 >= data_from, "bit {bit} of {name} went unseen when opening");
                        assert!(
                            c.names().any(|n| c.verify_tensor(n).is_err()),
                            "bit {bit} of {name} went unseen at use"
                        );
                    }
                }
            }
            fs::write(&path, &good).unwrap();
        }
        assert!(verify(&dir).unwrap().is_ok());
    }
}

/// Every shorter and some longer versions of every file are found, by `verify` and by opening.
#[test]
fn every_truncation_is_found() {
    let tmp = tempfile::tempdir().unwrap();
    let dir = write_model(&tmp.path().join("m"), 100, Overwrite::No);
    for entry in fs::read_dir(&dir).unwrap() {
        let path = entry.unwrap().path();
        let good = fs::read(&path).unwrap();
        let longer = (1..=9).map(|n| [good.as_slice(), &vec![b' '; n]].concat());
        for bytes in (0..good.len()).map(|n| good[..n].to_vec()).chain(longer) {
            fs::write(&path, &bytes).unwrap();
            assert!(!verify(&dir).unwrap().is_ok(), "{} at {} bytes", path.display(), bytes.len());
            let e = Checkpoint::open(&dir).expect_err("a changed length is metadata").to_string();
            assert!(e.contains(path.file_name().unwrap().to_str().unwrap()), "{e}");
        }
        fs::remove_file(&path).unwrap();
        // Without its manifest a directory is a plain model and cannot miss it.
        if !path.ends_with("manifest.json") {
            let report = verify(&dir).unwrap().to_string();
            assert!(report.contains("missing") && Checkpoint::open(&dir).is_err(), "{report}");
        }
        fs::write(&path, &good).unwrap();
    }
    fs::write(dir.join("stray.txt"), "x").unwrap();
    assert!(verify(&dir).unwrap().to_string().contains("stray.txt: should not exist"));
}

#[test]
fn swapped_shards_are_found() {
    let tmp = tempfile::tempdir().unwrap();
    let dir = write_model(&tmp.path().join("m"), 100, Overwrite::No);
    let mut shards: Vec<_> = fs::read_dir(&dir)
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.extension().is_some_and(|e| e == "safetensors"))
        .collect();
    shards.sort();
    assert!(shards.len() >= 2);
    fs::rename(&shards[0], dir.join("x")).unwrap();
    fs::rename(&shards[1], &shards[0]).unwrap();
    fs::rename(dir.join("x"), &shards[1]).unwrap();
    assert!(Checkpoint::open(&dir).is_err() && !verify(&dir).unwrap().is_ok());
}

/// A plain model directory: structure only, and it says so.
#[test]
fn plain_directories_are_checked_for_structure() {
    let tmp = tempfile::tempdir().unwrap();
    let dir = write_model(&tmp.path().join("m"), 100, Overwrite::No);
    fs::remove_file(dir.join("manifest.json")).unwrap();
    let report = verify(&dir).unwrap();
    assert!(report.is_ok() && !report.checksums && report.to_string().contains("structure only"), "{report}");
    fs::remove_file(dir.join("model-00001-of-00002.safetensors")).unwrap();
    assert!(verify(&dir).unwrap().to_string().contains("model-00001-of-00002.safetensors"));
}

#[test]
fn truncated_real_model() {
    let Some(dir) = shared_model("demo") else { return skipped("demo") };
    let good = fs::read(dir.join("model.safetensors")).unwrap();
    for n in (0..7000).step_by(13).chain([good.len() - 1, good.len() / 2]) {
        assert!(Header::parse(&good[..n]).is_err(), "{n}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn no_parser_panics(bytes in prop::collection::vec(any::<u8>(), 0..300), text in "[ -~]{0,200}") {
        let path = Path::new("x.json");
        for b in [bytes.as_slice(), text.as_bytes()] {
            let _ = Header::parse(b);
            let _ = ModelConfig::parse(b, path);
            let _ = Manifest::parse(b, path);
            let _ = Tokenizer::parse(b, path);
        }
        let _ = fracbit_io::ChatTemplate::new(&text);
    }

    /// One value of a good configuration replaced by another JSON value.
    #[test]
    fn no_config_panics(field in 0_usize..12, value in prop::sample::select(vec!["0", "-1", "1", "2", "3", "18446744073709551615", "1e300", "1e-300", "0.5", "null", "true", "\"x\"", "[]", "[1]", "{}",
        "{\"rope_type\":\"linear\"}", "{\"type\":\"longrope\",\"short_factor\":[1],\"long_factor\":[1e300]}", "{\"type\":\"yarn\",\"factor\":1e300}", "{\"type\":\"yarn\",\"factor\":1e-300,\"original_max_position_embeddings\":1}"])) {
        let fields = ["hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "num_hidden_layers", "rope_scaling", "rms_norm_eps", "eos_token_id", "partial_rotary_factor", "embedding_multiplier", "attention_multiplier", "query_pre_attn_scalar", "sliding_window_pattern", "rope_local_base_freq"];
        let mut v: serde_json::Value = serde_json::from_str(CONFIG).unwrap();
        v[fields[field]] = serde_json::from_str(value).unwrap();
        for arch in ["llama", "mistral", "ministral3", "qwen2", "qwen3", "smollm3", "phi3", "granite", "gemma2", "gemma3_text", "olmo2", "olmo3", "exaone4", "seed_oss", "ernie4_5", "glm", "glm4"] {
            v["model_type"] = arch.into();
            v.as_object_mut().unwrap().remove("architectures");
            if let Ok(c) = ModelConfig::parse(v.to_string().as_bytes(), Path::new("config.json")) {
                prop_assert!(c.head_dim > 0 && c.head_dim % 2 == 0 && c.num_attention_heads % c.num_key_value_heads == 0);
                prop_assert!(c.q_dim() > 0 && c.kv_dim() > 0 && !c.layers.is_empty() && c.rms_norm_eps.is_finite());
                prop_assert!(c.rope.dim % 2 == 0 && (2..=c.head_dim).contains(&c.rope.dim) && c.rope.gain.is_finite());
                prop_assert!(c.residual_factor.is_normal() && c.logit_factor.is_normal());
            }
        }
    }
}
