//! Published chat templates and tokenizers against the programs that they were made for. They are
//! not part of the repository: `cargo xtask published` takes some out of public packages into
//! `target/published` and compares; `FRACBIT_PUBLISHED` names another folder, with templates
//! (`*.jinja`) in its `templates` and a directory for each tokenizer in its `tokenizers`.

use std::path::{Path, PathBuf};
use std::process::Command;

use fracbit_io::{Bos, ChatTemplate, EncodeOptions, Message, PrefixSpace, RenderOptions, Tokenizer};
use serde_json::Value;

/// What a script of `golden` says about a folder; `None`, and a word about it, where there is none
/// or no Python has the modules that the script needs.
#[expect(clippy::print_stderr, reason = "a skipped test must be visible")]
fn published(folder: &str, script: &str, modules: &str) -> Option<Value> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = here.join("../..");
    #[expect(clippy::disallowed_methods, reason = "names files of a check that most machines cannot do")]
    let named = std::env::var("FRACBIT_PUBLISHED").map(PathBuf::from);
    let place = named.unwrap_or_else(|_| root.join("target/published")).join(folder);
    if !place.is_dir() {
        eprintln!("SKIPPED: {} is not there (`cargo xtask published` fetches some)", place.display());
        return None;
    }
    let has = |python: &PathBuf| {
        let imported = Command::new(python).args(["-c", &format!("import {modules}")]).output();
        imported.is_ok_and(|out| out.status.success())
    };
    let Some(python) = [root.join(".venv/bin/python"), "python3".into()].into_iter().find(has) else {
        eprintln!("SKIPPED: no Python has {modules} (`cargo xtask published` installs them)");
        return None;
    };
    let out = tempfile::NamedTempFile::new().expect("a temporary file");
    let ran = Command::new(python)
        .arg(here.join("tests/golden").join(script))
        .args([place.as_path(), out.path()])
        .output()
        .expect("a Python that starts");
    assert!(ran.status.success(), "{script}: {}", String::from_utf8_lossy(&ran.stderr));
    Some(serde_json::from_slice(&std::fs::read(out.path()).expect("what the script wrote")).expect("JSON"))
}

/// Every conversation gives the same prompt in every template, or an error in both.
#[test]
#[expect(clippy::print_stderr, reason = "what was compared")]
fn templates_render_as_in_jinja2() {
    let Some(document) = published("templates", "published_templates.py", "jinja2") else { return };
    let cases = document["cases"].as_array().expect("a list");
    let (mut wrong, mut refused) = (Vec::new(), 0);
    for case in cases {
        let file = case["file"].as_str().expect("a path");
        let source =
            case["head"].as_str().expect("a text").to_owned() + &std::fs::read_to_string(file).unwrap();
        let mut options = RenderOptions { now: document["now"].as_u64(), ..RenderOptions::default() };
        let mut variables = case["variables"].as_object().expect("an object").clone();
        options.add_generation_prompt = variables.remove("add_generation_prompt") == Some(true.into());
        // Messages with more than texts get in by another name.
        let messages: Vec<Message> = serde_json::from_value(case["messages"].clone()).unwrap_or_default();
        variables.insert("conversation".to_owned(), case["messages"].clone());
        for name in ["bos_token", "eos_token", "unk_token", "pad_token"] {
            let token = variables.remove(name).expect("it is given");
            options.special_tokens.insert(name.to_owned(), token.as_str().expect("a text").to_owned());
        }
        options.extra = variables.into_iter().collect();
        let got = ChatTemplate::new(&source).and_then(|t| t.render(&messages, &options));
        let same = match (&got, case["text"].as_str()) {
            (Ok(got), Some(want)) => got == want,
            (Err(_), None) => {
                refused += 1;
                true
            }
            _ => false,
        };
        if !same {
            let want = if case["text"].is_null() { &case["error"] } else { &case["text"] };
            let file = Path::new(file).file_name().unwrap_or_default().display();
            wrong.push(format!("{file}: {}\n  Jinja2: {want}\n  got:    {got:?}", case["name"]));
        }
    }
    eprintln!("{} prompts compared, {refused} of them refused by both", cases.len());
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

/// Every text gives the same tokens in every tokenizer.
#[test]
#[expect(clippy::print_stderr, reason = "what was compared")]
fn tokenizers_encode_as_their_own_programs() {
    let modules = "tokenizers, sentencepiece, mistral_common";
    let Some(document) = published("tokenizers", "published_tokenizers.py", modules) else { return };
    let mut wrong = Vec::new();
    for case in document.as_array().expect("a list") {
        let place = PathBuf::from(case["place"].as_str().expect("a path"));
        let name = place.file_name().unwrap_or_default().display();
        let t = match Tokenizer::from_dir(&place, None) {
            Ok(t) => t,
            Err(e) => {
                // No other tokens than it should have.
                eprintln!("{name}: refused: {e}");
                continue;
            }
        };
        let texts: Vec<(String, Vec<u32>)> = serde_json::from_value(case["texts"].clone()).unwrap();
        eprintln!("{name} ({}): {} texts", case["program"], texts.len());
        let plainly = EncodeOptions { bos: Bos::Never, prefix_space: PrefixSpace::Keep };
        let mut differ = texts.iter().filter_map(|(text, want)| {
            let got = t.encode(text, plainly);
            let same = got.as_ref().is_ok_and(|got| got == want);
            (!same).then(|| format!("{name} {text:?}\n  want {want:?}\n  got  {got:?}"))
        });
        wrong.extend(differ.by_ref().take(3));
        let more = differ.count();
        if more > 0 {
            wrong.push(format!("{name}: and {more} more"));
        }
    }
    assert!(wrong.is_empty(), "{}:\n{}", wrong.len(), wrong.join("\n"));
}
