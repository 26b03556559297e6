//! Chat templates against Jinja2: what it makes of some hundred constructs is committed
//! (`golden/templates.json`, by `golden/templates.py`), and made anew where Python and Jinja2 are
//! installed.

use std::path::PathBuf;
use std::process::Command;

use fracbit_io::{ChatTemplate, RenderOptions};
use serde_json::Value;

fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// Every construct gives the same text, or an error in both.
#[test]
fn constructs_are_those_of_jinja2() {
    let document: Value =
        serde_json::from_slice(&std::fs::read(golden("templates.json")).expect("it is committed")).unwrap();
    let mut options = RenderOptions { now: document["now"].as_u64(), ..RenderOptions::default() };
    let mut variables = document["context"].as_object().expect("an object").clone();
    options.add_generation_prompt = variables.remove("add_generation_prompt") == Some(true.into());
    let messages: Vec<fracbit_io::Message> =
        serde_json::from_value(variables.remove("messages").expect("a list")).unwrap();
    options.extra = variables.into_iter().collect();
    let cases = document["cases"].as_array().expect("a list");
    assert!(cases.len() > 600);
    let mut wrong = Vec::new();
    for case in cases {
        let source = case["template"].as_str().expect("a text");
        let got = ChatTemplate::new(source).and_then(|t| t.render(&messages, &options));
        let same = match (&got, case["text"].as_str()) {
            (Ok(got), Some(want)) => got == want,
            (Err(_), None) => true,
            _ => false,
        };
        if !same {
            let want = if case["text"].is_null() { &case["error"] } else { &case["text"] };
            wrong.push(format!("{source}\n  Jinja2: {want}\n  got:    {got:?}"));
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

#[test]
#[expect(clippy::print_stderr, reason = "a skipped test must be visible")]
fn the_committed_results_are_those_of_the_installed_jinja2() {
    let out = tempfile::NamedTempFile::new().unwrap();
    let ran = Command::new("python3").arg(golden("templates.py")).arg(out.path()).output();
    let skipped = match &ran {
        Ok(ran) if ran.status.success() => None,
        Ok(ran) => Some(String::from_utf8_lossy(&ran.stderr).lines().last().unwrap_or_default().to_owned()),
        Err(e) => Some(e.to_string()),
    };
    if let Some(why) = skipped {
        eprintln!("SKIPPED: no comparison with the installed Jinja2: {why}");
        return;
    }
    let read = |path: &std::path::Path| std::fs::read_to_string(path).unwrap();
    assert!(read(out.path()) == read(&golden("templates.json")), "run tests/golden/templates.py");
}
