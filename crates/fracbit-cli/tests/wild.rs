//! Checkpoints and commands as they are met in the wild: incomplete downloads, other tools' models,
//! slips of the hand.
#![cfg(unix)]

mod common;

use common::{BAD_INPUT, FAILED, USAGE, copy, demo, edit_json, edit_shard, fracbit, names, stories, text};
use serde_json::{Value, json};
use std::{fs, os::unix::ffi::OsStrExt, path::Path, process::Stdio};

const LAST: &str = "model.layers.5.mlp.down_proj.weight";

/// The demo model with another header and other data.
fn reshaped(change: impl FnOnce(&mut Value, &mut Vec<u8>)) -> tempfile::TempDir {
    let place = copy(&demo());
    edit_shard(&place.path().join("model.safetensors"), change);
    place
}

/// The demo model with another value in a JSON file.
fn configured(file: &str, field: &str, value: Value) -> tempfile::TempDir {
    let place = copy(&demo());
    edit_json(&place.path().join(file), |document| document[field] = value);
    place
}

#[test]
fn weights_that_cannot_be_quantized_are_refused_before_any_work() {
    let nan = reshaped(|header, data| {
        let begin = header[LAST]["data_offsets"][0].as_u64().expect("an offset") as usize;
        data[begin + 2 * 515..][..2].copy_from_slice(&[0xc0, 0x7f]);
    });
    let integers = reshaped(|header, _| header[LAST]["dtype"] = "I16".into());
    for (model, rule) in [(&nan, "got NaN at row 1, column 3"), (&integers, "dtype should be F32, F16, BF16")]
    {
        let (model, place) = (text(model.path()), tempfile::tempdir().expect("a temporary directory"));
        let out = place.path().join("out");
        let (out, stories) = (text(&out), stories());
        fracbit(&["quantize", model, "-o", out, "--scheme", "nuq-2"]).failed(BAD_INPUT, &[LAST, rule]);
        fracbit(&["calibrate", model, "-o", out, "--text", text(&stories)]).failed(BAD_INPUT, &[LAST, rule]);
        assert!(names(place.path()).is_empty(), "nothing was begun");
    }
}

#[test]
fn a_budget_is_a_limit_and_need_not_be_spent() {
    let demo = demo();
    let spent = |budget: &str, size: &str| {
        let args =
            ["plan", text(&demo), "--palette", "nuq", "--sensitivity", "prior", "--json", budget, size];
        fracbit(&args).done().json()["bits_per_weight"].as_f64().expect("a number")
    };
    let most = spent("--bits", "16");
    assert!((8.0..8.2).contains(&most), "{most}");
    assert_eq!([spent("--size", "900MB"), spent("--bits", "8.5")], [most, most]);
    fracbit(&["plan", text(&demo), "--bits", "3", "--exclude", "*=tqc-*"])
        .failed(USAGE, &["`tqc-*`", "scheme"]);
}

#[test]
fn predictions_that_are_no_numbers_are_no_measure() {
    // Every value is a number, their products are not.
    let model = reshaped(|header, data| {
        for name in [LAST, "model.layers.0.mlp.down_proj.weight"] {
            let begin = header[name]["data_offsets"][0].as_u64().expect("an offset") as usize;
            data[begin..begin + 2 * 512 * 192].as_chunks_mut::<2>().0.fill([0x7f, 0x7f]);
        }
    });
    let (model, stories) = (text(model.path()), stories());
    fracbit(&["run", model, "-p", "x", "-n", "2"]).failed(BAD_INPUT, &["predictions", "NaN"]);
    fracbit(&["eval", model, "--text", text(&stories), "--json"]).failed(BAD_INPUT, &["predictions", "NaN"]);
}

#[test]
fn what_the_result_will_lack_is_said() {
    let model = reshaped(|header, data| {
        let (begin, end) = (data.len(), data.len() + 6);
        header["vision.tower"] = json!({ "dtype": "I16", "shape": [3], "data_offsets": [begin, end] });
        data.extend([0; 6]);
    });
    fs::remove_file(model.path().join("tokenizer.json")).expect("it was there");
    let out = model.path().join("out");
    let ran = fracbit(&["quantize", text(model.path()), "-o", text(&out), "--scheme", "nuq-2"]).done();
    for word in ["left out", "describes: vision.tower", "writes no text", "tokenizer.json"] {
        assert!(ran.err.contains(word), "`{word}` should be in:\n{}", ran.err);
    }
    fracbit(&["run", text(&out), "-p", "x"]).failed(BAD_INPUT, &["tokenizer.json", "save_pretrained"]);
}

#[test]
fn other_files_in_the_place_of_weights_are_recognized() {
    let place = copy(&demo());
    let model = text(place.path());
    for (held, words) in [
        ("<!DOCTYPE html><html>404</html>", ["model.safetensors", "holds text"]),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", ["model.safetensors", "git lfs pull"]),
    ] {
        fs::write(place.path().join("model.safetensors"), held).expect("a writable place");
        fracbit(&["inspect", model]).failed(BAD_INPUT, &words);
    }
}

/// `config.json` may say that weights are quantized when they are not, and nothing when they are.
#[test]
fn weights_tell_whether_another_program_quantized_them() {
    let run = |model: &Path| fracbit(&["run", text(model), "-p", "Once", "-n", "4", "--greedy"]);
    let want = run(&demo()).done().out;
    for (field, block) in [
        ("quantization_config", json!({ "quant_method": "bitsandbytes", "load_in_4bit": true })),
        ("quantization_config", json!({ "load_in_8bit": true })),
        ("quantization", json!({ "bits": 8, "group_size": 32 })),
    ] {
        let place = configured("config.json", field, block);
        let ran = run(place.path()).done();
        assert_eq!(ran.out, want);
        assert!(ran.err.contains("they are whole"), "{}", ran.err);
    }
    let packed = |name: &str, more: &str, dtype: &str| {
        reshaped(|header, data| {
            let begin = data.len();
            data.extend([0; 8]);
            let entries = header.as_object_mut().expect("an object");
            let stem = LAST.strip_suffix("weight").expect("a weight");
            if name == "weight" {
                entries[LAST]["dtype"] = dtype.into();
                entries[LAST]["shape"] = json!([192, 256]);
            } else {
                entries.insert(
                    format!("{stem}{name}"),
                    json!({ "dtype": dtype, "shape": [1], "data_offsets": [begin, begin + 4] }),
                );
            }
            let begin = if name == "weight" { begin } else { begin + 4 };
            entries.insert(format!("{stem}{more}"), json!({ "dtype": "F32", "shape": [(data.len() - begin) / 4], "data_offsets": [begin, data.len()] }));
        })
    };
    for (model, word) in [
        (packed("weight", "scales", "U32"), "MLX"),
        (packed("qweight", "g_idx", "U32"), "GPTQ"),
        (packed("qweight", "qzeros", "U32"), "GPTQ or AWQ"),
        (packed("weight.absmax", "weight.quant_map", "F32"), "bitsandbytes"),
        (packed("weight._data", "weight._scale", "F32"), "quanto"),
        (packed("q_weight", "q_scale", "I32"), "EXL2"),
        (packed("W_q", "meta", "I32"), "HQQ"),
    ] {
        run(model.path()).failed(BAD_INPUT, &["quantized already", word, "start from the original"]);
    }
    let told = packed("qweight", "qzeros", "U32");
    let path = told.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).expect("a file")).expect("JSON");
    config["quantization_config"] = json!({ "quant_method": "awq" });
    fs::write(&path, config.to_string()).expect("a writable place");
    run(told.path()).failed(BAD_INPUT, &["by awq, as config.json says", "qweight"]);
}

#[test]
fn what_is_not_followed_is_said() {
    let run = |model: &Path| fracbit(&["run", text(model), "-p", "Once", "-n", "4", "--greedy"]);
    let want = run(&demo()).done().out;
    let ends = configured("generation_config.json", "eos_token_id", json!([0, 99_999]));
    let deep = reshaped(|header, data| {
        let (begin, end) = (data.len(), data.len() + 2);
        header["model.layers.6.mlp.up_proj.weight"] =
            json!({ "dtype": "BF16", "shape": [1], "data_offsets": [begin, end] });
        header["other"] = json!({ "dtype": "F8_E5M2", "shape": [2], "data_offsets": [end, end + 2] });
        data.extend([0; 4]);
    });
    for (model, words) in [(ends, ["99999", "left out"]), (deep, ["num_hidden_layers", "up to 6"])] {
        let ran = run(model.path()).done();
        assert_eq!(ran.out, want);
        assert!(words.iter().all(|word| ran.err.contains(word)), "{}", ran.err);
    }
}

#[test]
fn nothing_that_is_read_or_of_another_kind_is_replaced() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let model = place.path().join("model");
    fs::rename(copy(&demo()).keep(), &model).expect("one file system");
    let before = names(&model);
    let (shown, stories) = (text(&model), stories());
    let around = format!("{shown}/../model/");
    for out in [shown, &around] {
        fracbit(&["quantize", shown, "-o", out, "--scheme", "nuq-2", "--force"])
            .failed(USAGE, &["should be apart from", "another name"]);
        fracbit(&["calibrate", shown, "-o", out, "--text", text(&stories), "--force"])
            .failed(USAGE, &["should be apart from"]);
        fracbit(&["tune", out, "--baseline", shown, "--text", text(&stories), "-o", out, "--force"])
            .failed(USAGE, &["should be apart from"]);
    }
    let other = copy(&demo());
    let other = text(other.path());
    fracbit(&["calibrate", shown, "-o", other, "--text", text(&stories), "--force"])
        .failed(FAILED, &["should hold calibration.json to be replaced"]);
    let config = model.join("config.json");
    fracbit(&["sensitivity", shown, "-o", text(&config), "--tokens", "16", "--levels", "1", "--force"])
        .failed(USAGE, &["config.json", "which is read"]);
    assert_eq!(names(&model), before);
    fracbit(&["run", shown, "-p", "x", "-n", "1"]).done();
}

#[test]
fn names_that_are_no_text() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let out = place.path().join(Path::new(std::ffi::OsStr::from_bytes(b"o\xffut ")));
    let quantize = |more: &[&str]| {
        let mut command = common::command(&["quantize", text(&demo()), "--scheme", "nuq-2", "-o"]);
        command.arg(&out).args(more).output().expect("the program starts")
    };
    let refused = quantize(&["--json"]);
    assert_eq!(refused.status.code(), Some(USAGE), "before any work, not after it");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("should be UTF-8"));
    assert!(quantize(&[]).status.success());
    let spaced = place.path().join("sp ace");
    let told = fracbit(&["synth", "--shape", "tiny", "-o", text(&spaced)]).done().out;
    assert!(told.contains(&format!("fracbit inspect '{}'", text(&spaced))), "{told}");
    let run = common::command(&["run", "-p", "x", "-n", "1"]).arg(&out).output().expect("the program starts");
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
}

#[test]
fn prompts_templates_and_contexts() {
    let demo = demo();
    let long = "word ".repeat(600);
    fracbit(&["run", text(&demo), "-p", &long]).failed(USAGE, &["context of 512 tokens"]);
    let args = ["run", text(&demo), "-f", "-"];
    let mut command = common::command(&args);
    command.stdin(fs::File::open(demo.join("model.safetensors")).map(Stdio::from).expect("a file"));
    common::finish(&args, &mut command).failed(BAD_INPUT, &["`standard input`", "UTF-8"]);

    // A text can be continued whatever the template is.
    let broken = configured("tokenizer_config.json", "chat_template", "{% for m in messages %}{{ m".into());
    let model = text(broken.path());
    fracbit(&["run", model, "-p", "Once", "-n", "2"]).done();
    for args in [&["chat", model][..], &["run", model, "--chat", "-p", "Hi"]] {
        fracbit(args).failed(BAD_INPUT, &["tokenizer_config.json", "chat template: syntax error"]);
    }
    let mut tokenizer: Value =
        serde_json::from_slice(&fs::read(demo.join("tokenizer.json")).expect("a file")).expect("JSON");
    let added = json!({ "id": 2048, "content": "<new>", "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true });
    tokenizer["added_tokens"].as_array_mut().expect("a list").push(added);
    fs::write(broken.path().join("tokenizer.json"), tokenizer.to_string()).expect("a writable place");
    fracbit(&["run", model, "-p", "a <new> b"])
        .failed(BAD_INPUT, &["token 2048", "tokenizer.json knows tokens"]);
    let template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}";
    let whole = configured("tokenizer_config.json", "chat_template", template.into());
    let model = text(whole.path());
    fracbit(&["run", model, "--chat", "-p", "Once", "-n", "2"]).done();
    fracbit(&["chat", model, "--ctx", "513"]).failed(USAGE, &["--ctx", "1 to 512"]);
}

/// What is written takes the place of files alone, with `--force`, and not of those of the model
/// that is read.
#[test]
fn no_device_link_or_file_of_the_model_is_replaced() {
    let model = copy(&demo());
    let (model, place) = (text(model.path()), tempfile::tempdir().expect("a temporary directory"));
    let at = |name: &str| text(&place.path().join(name)).to_owned();
    let (socket, link, dir) = (at("socket"), at("link"), at("dir"));
    let _socket = std::os::unix::net::UnixListener::bind(&socket).expect("a name that is free");
    std::os::unix::fs::symlink(at("nowhere"), &link).expect("a name that is free");
    fs::create_dir(&dir).expect("a name that is free");
    let part = |name: &str| format!("{model}/{name}");
    let held = |name: &str| fs::read(part(name)).expect("a file");
    let parts = ["model.safetensors", "config.json", "tokenizer.json"];
    let before = parts.map(held);
    let (stories, gguf) = (stories(), at("model.gguf"));
    let plan = ["plan", model, "--bits", "4", "--sensitivity", "prior"];
    let commands: [(&[&str], &str); 7] = [
        (&plan, "--save"),
        (&plan, "--html"),
        (&["export", model, "--type", "q8_0"], "-o"),
        (&["sensitivity", model], "-o"),
        (&["profile", model], "-o"),
        (&["schedule", "fit", model, "--prompts", text(&stories)], "-o"),
        (&["explore", "--scheme", "nuq-2", "--bytes", "1MB"], "--svg"),
    ];
    for (words, flag) in commands {
        let to = |out: &str, more: &[&str]| fracbit(&[words, &[flag, out][..], more].concat());
        for out in [&socket, &dir] {
            to(out, &["--force"]).failed(FAILED, &[out, "should be a file, it is something else"]);
            to(out, &[]).failed(FAILED, &[out, "should be a file"]);
        }
        if words[0] != "sensitivity" {
            to(&link, &[]).failed(FAILED, &[&link, "--force"]);
        }
        for name in parts.map(part).iter().filter(|_| words[0] != "explore") {
            to(name, &["--force"]).failed(USAGE, &[name, "which is read"]);
        }
    }
    assert!(parts.map(held) == before, "nothing was written");
    assert!(fs::symlink_metadata(&link).expect("a link").is_symlink());
    fracbit(&["export", model, "--type", "q8_0", "-o", &gguf]).done();
    fracbit(&["plan", &gguf, "--bits", "4", "--save", &gguf, "--force"]).failed(USAGE, &["which is read"]);
    // Other files beside the model may be replaced.
    for _ in 0..2 {
        let saved = part("plan.json");
        fracbit(&[&plan[..], &["--save", &saved, "--force"]].concat()).done();
    }
    let one = at("one");
    fracbit(&[&plan[..], &["--save", &one, "--html", &one]].concat()).failed(USAGE, &["two files"]);
    fs::write(&one, "no measurement").expect("a writable place");
    for more in [&[][..], &["--force"]] {
        let args = [&["sensitivity", model, "-o", &one][..], more].concat();
        fracbit(&args).failed(FAILED, &[&one, "hold a measurement", "another name"]);
    }
    assert_eq!(fs::read_to_string(&one).expect("a file"), "no measurement");
}
