//! What options say they do: sizes, temperatures, control tokens in messages.
#![cfg(unix)]

mod common;

use common::{OUT_OF_REACH, command, copy, demo, fracbit, names, text};
use serde_json::{Value, json};
use std::{
    fs,
    io::Write,
    path::Path,
    process::{Output, Stdio},
};

fn bytes_in(dir: &Path) -> u64 {
    names(dir).iter().map(|name| fs::metadata(dir.join(name)).expect("a file").len()).sum()
}

/// `--size` is the whole directory's, and next to all of it is used.
#[test]
fn a_size_is_that_of_the_directory() {
    let demo = demo();
    let place = tempfile::tempdir().expect("a temporary directory");
    let out = place.path().join("out");
    // The tokenizer is a tenth of it.
    for size in [1_500_000, 2_200_000] {
        let given = size.to_string() + "B";
        let args = ["quantize", text(&demo), "-o", text(&out), "--size", &given, "--palette", "nuq"];
        let rest = ["--data-free", "--sensitivity", "prior", "--force"];
        let ran = fracbit(&[&args[..], &rest].concat()).done();
        assert!(ran.err.contains("for the directory"), "{}", ran.err);
        let taken = bytes_in(&out);
        assert!(taken <= size, "{taken} of {size}");
        assert!(taken > size - 300_000, "{taken} of {size}");
    }
    let tokenizer = fs::metadata(demo.join("tokenizer.json")).expect("a file").len();
    let given = (tokenizer + 10_000).to_string() + "B";
    fracbit(&["plan", text(&demo), "--size", &given]).failed(OUT_OF_REACH, &["out of reach", "directory"]);
}

/// 16 bits are no limit, also where norms take more than 16.
#[test]
fn sixteen_bits_are_in_reach() {
    let demo = demo();
    let args = ["plan", text(&demo), "--bits", "16", "--exclude", "*", "--rotation", "online"];
    let plan = fracbit(&[&args[..], &["--sensitivity", "prior", "--json"]].concat()).done().json();
    let layers = plan["layers"].as_array().expect("a list");
    assert!(layers.iter().all(|layer| layer["bits"] == 16.0), "{plan}");
    assert!(plan["bits_per_weight"].as_f64().expect("a number") > 16.0);
}

#[test]
fn temperatures_have_two_names() {
    let demo = demo();
    let with = |name: &str| {
        let args = ["run", text(&demo), "-p", "Once upon a time", "-n", "12", "--seed", "3", "--json"];
        fracbit(&[&args[..], &[name, "1.5"]].concat()).done().json()["text"].clone()
    };
    assert_eq!(with("--temp"), with("--temperature"));
}

const END: &str = "<|endoftext|>";

/// The demo model with a chat template that writes its control token.
fn chatting() -> tempfile::TempDir {
    let place = copy(&demo());
    let path = place.path().join("tokenizer_config.json");
    let mut settings: Value = serde_json::from_slice(&fs::read(&path).expect("a file")).expect("JSON");
    let template =
        "{% for m in messages %}{{ bos_token }}{{ m.role }}: {{ m.content }}{% endfor %}{{ bos_token }}";
    settings["chat_template"] = template.into();
    fs::write(&path, json!(settings).to_string()).expect("a writable place");
    place
}

/// A control token in a prompt is text, unless `--allow-special`.
#[test]
fn prompts_make_control_tokens_where_they_may() {
    let model = chatting();
    let tokens = |prompt: &str, more: &[&str]| {
        let args = ["run", text(model.path()), "--chat", "-n", "1", "--json", "-p", prompt];
        let ran = fracbit(&[&args[..], more].concat()).done().json();
        ran["prompt_tokens"].as_u64().expect("a count")
    };
    let plain = tokens("Hi", &[]);
    assert_eq!(tokens("Hi", &["--allow-special"]), plain);
    let spelled = format!("Hi{END}");
    assert_eq!(tokens(&spelled, &["--allow-special"]), plain + 1);
    assert!(tokens(&spelled, &[]) > plain + 1, "as text it has several");
    // Without a template a prompt is the user's own.
    let args = ["run", text(model.path()), "-n", "1", "--json", "-p", &spelled];
    let own = fracbit(&args).done().json()["prompt_tokens"].as_u64().expect("a count");
    assert!(own < plain, "{own} and {plain}");
}

/// The same in `chat`, by what it says of its speed.
#[test]
fn chats_make_control_tokens_where_they_may() {
    let model = chatting();
    let prefill = |said: &str, more: &[&str]| {
        let args = ["chat", text(model.path()), "-n", "1", "--greedy"];
        let mut command = command(&[&args[..], more].concat());
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        writeln!(child.stdin.take().expect("piped"), "{said}").expect("it reads");
        let Output { status, stderr, .. } = child.wait_with_output().expect("it ends");
        let notes = String::from_utf8(stderr).expect("UTF-8");
        assert!(status.success(), "{notes}");
        let (_, rest) = notes.split_once("prefill ").unwrap_or_else(|| panic!("a speed: {notes}"));
        rest.split(' ').next().and_then(|n| n.parse::<u64>().ok()).unwrap_or_else(|| panic!("{notes}"))
    };
    let plain = prefill("Hi", &[]);
    let spelled = format!("Hi{END}");
    assert_eq!(prefill(&spelled, &["--allow-special"]), plain + 1);
    assert!(prefill(&spelled, &[]) > plain + 1);
}
