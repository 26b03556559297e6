//! Files as people have them, by the commands that they would give: properties of public bug
//! reports of other programs, with contents of our own. Tokens and templates of such files are in
//! `fracbit-io/tests/cases.rs`.
#![cfg(unix)]

mod common;

use common::{BAD_INPUT, Serving, copy, demo, edit_json, edit_shard, fracbit, stories, text};
use serde_json::{Map, Value, json};
use std::{
    fs,
    path::{Path, PathBuf},
};
use tempfile::TempDir;

/// What the small model loses on its text, as transformers has it in single precision.
const NATS: f64 = 6.904_215;
/// With YaRN in place of its own frequencies.
const STRETCHED: f64 = 6.722_378;

fn case(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/cases").join(name)
}

fn shard(place: &TempDir, number: usize) -> PathBuf {
    place.path().join(format!("model-{number:05}-of-00003.safetensors"))
}

/// The small model with another file.
fn changed(file: &str, change: impl FnOnce(&mut Value)) -> TempDir {
    let place = copy(&case("model"));
    edit_json(&place.path().join(file), change);
    place
}

/// Its loss, and that these words were said.
fn evaluated(place: &TempDir, words: &[&str]) -> f64 {
    let file = place.path().join("text.txt");
    let ran = fracbit(&["eval", text(place.path()), "--text", text(&file), "--json"]).done();
    let said = ran.err.lines().any(|line| line.starts_with("note: "));
    assert_eq!(said, !words.is_empty(), "{}", ran.err);
    words.iter().for_each(|word| assert!(ran.err.contains(word), "`{word}` should be in:\n{}", ran.err));
    ran.json()["nats_per_token"].as_f64().expect("a number")
}

fn close(got: f64, want: f64) {
    assert!((got - want).abs() < 1e-5, "{got} {want}");
}

#[test]
fn stretching_counts_by_either_name() {
    let yarn = json!({ "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64 });
    let plain = json!({ "rope_type": "default", "rope_theta": 500_000.0 });
    let with = |parameters: &Value, scaling: &Value| {
        changed("config.json", |config| {
            config.as_object_mut().expect("an object").remove("rope_theta");
            config["rope_parameters"] = parameters.clone();
            config["rope_scaling"] = scaling.clone();
        })
    };
    close(evaluated(&with(&plain, &yarn), &[]), STRETCHED);
    let mut whole = yarn.clone();
    whole["rope_theta"] = 500_000.0.into();
    close(evaluated(&with(&whole, &Value::Null), &[]), STRETCHED);
    let linear = json!({ "rope_type": "linear", "factor": 4.0, "rope_theta": 500_000.0 });
    let place = with(&linear, &yarn);
    let file = place.path().join("text.txt");
    fracbit(&["eval", text(place.path()), "--text", text(&file)])
        .failed(BAD_INPUT, &["config.json", "rope_parameters.rope_type", "rope_scaling"]);
}

#[test]
fn what_python_writes_into_json_is_read() {
    let place = copy(&case("model"));
    let config = place.path().join("config.json");
    let held = fs::read_to_string(&config).expect("a file");
    fs::write(&config, format!("\u{feff}{{ \"limits\": [0.0, Infinity, NaN], {}", &held[1..]))
        .expect("a writable place");
    close(evaluated(&place, &[]), NATS);
}

#[test]
fn what_was_once_quantized_is_read_as_it_is() {
    let place = changed("config.json", |config| {
        config["quantization_config"] = json!({ "quant_method": "bitsandbytes", "load_in_4bit": true,
            "_load_in_4bit": true, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16" });
    });
    close(evaluated(&place, &["config.json", "bitsandbytes", "they are whole"]), NATS);
}

/// What MLX makes, without a word in `config.json` that other programs know.
#[test]
fn what_is_quantized_says_so_itself() {
    for (field, block) in
        [("quantization", json!({ "bits": 8, "group_size": 32 })), ("unrelated", Value::Null)]
    {
        let place = changed("config.json", |config| config[field] = block);
        for number in 1..=3 {
            edit_shard(&shard(&place, number), |header, data| {
                let all = header.as_object_mut().expect("an object");
                let mut scales = Map::new();
                for (name, entry) in all.iter_mut().filter(|(name, _)| name.ends_with("proj.weight")) {
                    entry["dtype"] = "U32".into();
                    entry["shape"][1] = (entry["shape"][1].as_u64().expect("a number") / 2).into();
                    let begin = data.len();
                    data.extend([0; 4]);
                    let of = name.strip_suffix("weight").expect("a weight");
                    let entry =
                        json!({ "dtype": "F16", "shape": [1, 2], "data_offsets": [begin, begin + 4] });
                    scales.insert(format!("{of}scales"), entry);
                }
                all.append(&mut scales);
            });
        }
        let file = place.path().join("text.txt");
        fracbit(&["eval", text(place.path()), "--text", text(&file)])
            .failed(BAD_INPUT, &["quantized already", "MLX", "start from the original"]);
    }
}

#[test]
fn an_index_may_list_more_and_less_than_there_is() {
    let place = changed("model.safetensors.index.json", |index| {
        index["weight_map"]["model.layers.0.self_attn.rotary_emb.inv_freq"] =
            "model-00002-of-00003.safetensors".into();
    });
    close(evaluated(&place, &["model.safetensors.index.json", "inv_freq"]), NATS);
    let place = changed("model.safetensors.index.json", |index| {
        index["weight_map"].as_object_mut().expect("an object").remove("model.norm.weight");
    });
    close(evaluated(&place, &["model.norm.weight"]), NATS);
}

#[test]
fn tensors_that_no_layer_needs_are_left_alone() {
    let place = copy(&case("model"));
    let more =
        [("score", "F8_E5M2", 4), ("position_ids", "I64", 8), ("empty", "F32", 0), ("mask", "BOOL", 3)];
    edit_shard(&shard(&place, 1), |header, data| {
        for (name, dtype, bytes) in more {
            let (begin, size) = (data.len(), if dtype == "I64" { 8 } else { 1 });
            data.resize(begin + bytes, 0);
            header[name] =
                json!({ "dtype": dtype, "shape": [bytes / size], "data_offsets": [begin, begin + bytes] });
        }
    });
    edit_json(&place.path().join("model.safetensors.index.json"), |index| {
        for (name, ..) in more {
            index["weight_map"][name] = "model-00001-of-00003.safetensors".into();
        }
    });
    close(evaluated(&place, &["left out", "position_ids"]), NATS);
}

#[test]
fn names_need_no_prefix() {
    let place = copy(&case("model"));
    let renamed = |all: &mut Value| {
        let all = all.as_object_mut().expect("an object");
        *all = std::mem::take(all)
            .into_iter()
            .map(|(name, value)| (name.strip_prefix("model.").unwrap_or(&name).to_owned(), value))
            .collect();
    };
    (1..=3).for_each(|number| edit_shard(&shard(&place, number), |header, _| renamed(header)));
    edit_json(&place.path().join("model.safetensors.index.json"), |index| renamed(&mut index["weight_map"]));
    close(evaluated(&place, &[]), NATS);
}

/// The text is one special token, which no file calls the end.
#[test]
fn a_stop_text_may_be_a_special_token() {
    let serving = Serving::start(&["serve", text(&case("stop-text")), "--port", "0"]);
    let asked = |field: &str, value: Value| {
        let mut body = json!({ "prompt": "hi", "max_tokens": 12, "temperature": 0 });
        body[field] = value;
        let choice = serving.post("/v1/completions", &body)["choices"][0].clone();
        (choice["text"].clone(), choice["finish_reason"].clone())
    };
    let stopped = (json!("helo"), json!("stop"));
    assert_eq!(asked("stop", json!(["<|im_end|>"])), stopped);
    assert_eq!(asked("stop_token_ids", json!([2])), stopped);
    let shown = asked("skip_special_tokens", json!(false));
    assert!(shown.0.as_str().is_some_and(|text| text.starts_with("helo<|im_end|>")), "{shown:?}");
    assert_eq!(shown.1, "length");
}

/// Keys with a large constant, as Qwen2's biases give them, where rotation leaves it: attention is
/// the same, and a cache of few bits should lose no more by it.
#[test]
fn small_caches_bear_large_biases_of_keys() {
    let place = copy(&demo());
    edit_json(&place.path().join("config.json"), |config| {
        let fields = config.as_object_mut().expect("an object");
        fields.retain(|name, _| !["attention_bias", "mlp_bias"].contains(&name.as_str()));
        config["architectures"] = json!(["Qwen2ForCausalLM"]);
        config["model_type"] = "qwen2".into();
        config["rope_scaling"] = json!({ "rope_type": "llama3", "factor": 1e6, "low_freq_factor": 1.0,
            "high_freq_factor": 1.0001, "original_max_position_embeddings": 512 });
    });
    let plain = copy(place.path());
    let biased = |place: &TempDir, first: f32, last: f32| {
        edit_shard(&place.path().join("model.safetensors"), |header, data| {
            for layer in 0..6 {
                let size = [first, 0.0, 0.0, 0.0, 0.0, last][layer];
                let mut head = [0.0; 32];
                (head[15], head[31]) = (size, -size);
                for (name, bias) in [("q", vec![0.0; 192]), ("k", head.repeat(2)), ("v", vec![0.0; 64])] {
                    let begin = data.len();
                    data.extend(bias.iter().flat_map(|b: &f32| b.to_le_bytes()));
                    header[format!("model.layers.{layer}.self_attn.{name}_proj.bias")] =
                        json!({ "dtype": "F32", "shape": [bias.len()], "data_offsets": [begin, data.len()] });
                }
            }
        });
    };
    biased(&plain, 0.0, 0.0);
    biased(&place, 302.0, 460.0);
    let file = stories();
    let nats = |place: &TempDir, bits: &str| {
        let args =
            ["eval", text(place.path()), "--text", text(&file), "--ctx", "256", "--windows", "3", "--json"];
        let ran = fracbit(&[&args[..], &["--kv", bits]].concat()).done();
        ran.json()["nats_per_token"].as_f64().expect("a number")
    };
    let whole = nats(&plain, "16");
    for (bits, most) in [("16", 0.002), ("8", 0.004), ("4", 0.02)] {
        let got = nats(&place, bits);
        assert!((got - whole).abs() < most, "{bits} bits: {got}, of {whole}");
    }
}
