//! GGUF files in the place of checkpoints.
#![cfg(unix)]

mod common;

use common::{BAD_INPUT, Serving, copy, demo, fracbit, names, stories, text};
use serde_json::json;
use std::fs;

#[test]
fn every_command_reads_what_export_writes() {
    let place = copy(&demo());
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}";
    fs::write(place.path().join("chat_template.jinja"), template).expect("a writable place");
    let (model, stories) = (text(place.path()), stories());
    let file = place.path().join("model.gguf");
    let file = text(&file);
    fracbit(&["export", model, "-o", file, "--type", "f16"]).done();

    let shown = fracbit(&["inspect", file, "--json"]).done().json();
    let original = fracbit(&["inspect", model, "--json"]).done().json();
    for field in ["architecture", "params", "hidden_size", "layers", "heads", "vocab_size", "context", "tied"]
    {
        assert_eq!(shown[field], original[field], "{field}");
    }
    let nats = |model: &str| {
        let args = ["eval", model, "--text", text(&stories), "--windows", "1", "--json"];
        fracbit(&args).done().json()["nats_per_token"].as_f64().expect("a number")
    };
    // Half precision holds all of bf16 that is not tiny.
    let whole = nats(model);
    assert!((nats(file) - whole).abs() < 1e-4, "{whole}");
    let said = |model: &str, more: &[&str]| {
        fracbit(&[&["run", model, "-p", "Once upon a time", "-n", "12", "--greedy"], more].concat())
            .done()
            .out
    };
    for more in [&[][..], &["--chat"]] {
        assert_eq!(said(file, more), said(model, more));
    }
    let serving = Serving::start(&["serve", file, "--port", "0"]);
    let body = json!({ "messages": [{ "role": "user", "content": "Once upon a time" }], "max_tokens": 12,
        "temperature": 0 });
    let answer = serving.post("/v1/chat/completions", &body);
    let content = answer["choices"][0]["message"]["content"].as_str().expect("a text");
    assert_eq!(content.trim(), said(model, &["--chat"]).trim());

    let out = place.path().join("out");
    fracbit(&["quantize", file, "-o", text(&out), "--scheme", "nuq-8", "--data-free"]).done();
    assert!(names(&out).iter().any(|name| name == "tokenizer.json"), "{:?}", names(&out));
    assert!((nats(text(&out)) - whole).abs() < 0.01);
}

#[test]
fn what_is_wrong_with_a_file_is_said_in_one_line() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let file = place.path().join("model.gguf");
    fracbit(&["export", text(&demo()), "-o", text(&file), "--type", "q8_0"]).done();
    let whole = fs::read(&file).expect("it was written");
    let damaged = |bytes: Vec<u8>, words: &[&str]| {
        fs::write(&file, bytes).expect("a writable place");
        for command in
            [&["inspect", text(&file)][..], &["run", text(&file), "-p", "x"], &["serve", text(&file)]]
        {
            fracbit(command).failed(BAD_INPUT, &[&["model.gguf"], words].concat());
        }
    };
    damaged(whole[..whole.len() / 2].to_vec(), &["should lie in the file"]);
    damaged(whole[..100].to_vec(), &[]);
    damaged(b"GGUF".to_vec(), &["the version needs 4 bytes"]);
    let renamed = |from: &[u8], to: &[u8]| {
        let at = whole.windows(from.len()).position(|part| part == from).expect("it is there");
        [&whole[..at], to, &whole[at + from.len()..]].concat()
    };
    let architecture = b"\x05\0\0\0\0\0\0\0llama";
    damaged(
        renamed(architecture, b"\x05\0\0\0\0\0\0\0mamba"),
        &["general.architecture", "llama", "got `mamba`"],
    );
    damaged(renamed(b"token_embd.weight", b"token_embx.weight"), &["`token_embd.weight` should exist"]);
}
