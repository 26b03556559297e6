//! The zoo (`examples/zoo.rs`) on a small folder: what works, and what does not.
#![cfg(unix)]

#[path = "../examples/zoo.rs"]
#[allow(dead_code, reason = "the example's own main")]
mod zoo;

use std::{fs, path::Path};

#[test]
fn every_checkpoint_of_a_folder_has_its_row() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let (program, demo) = (Path::new(env!("CARGO_BIN_EXE_fracbit")), Path::new(env!("CARGO_MANIFEST_DIR")));
    let (text, demo) = (demo.join("demo-model/stories.txt"), demo.join("demo-model"));
    let none = zoo::table(program, place.path(), &text).expect_err("an empty folder");
    assert!(none.contains("should hold checkpoints"), "{none}");

    // Two blocks of the demo model.
    let nested = place.path().join("a/demo");
    fs::create_dir_all(&nested).expect("a writable place");
    for entry in fs::read_dir(&demo).expect("the embedded model") {
        let entry = entry.expect("the embedded model");
        fs::copy(entry.path(), nested.join(entry.file_name())).expect("a writable place");
    }
    let config = nested.join("config.json");
    let mut settings: serde_json::Value =
        serde_json::from_slice(&fs::read(&config).expect("a file")).expect("JSON");
    settings["num_hidden_layers"] = 2.into();
    fs::write(&config, settings.to_string()).expect("a writable place");
    let unknown = place.path().join("b");
    fs::create_dir(&unknown).expect("a writable place");
    fs::write(unknown.join("config.json"), r#"{ "architectures": ["Mamba|ForCausalLM"] }"#)
        .expect("a writable place");
    fs::write(place.path().join("c.gguf"), "GGUF").expect("a writable place");

    let (table, whole) = zoo::table(program, place.path(), &text).expect("a table");
    assert!(!whole);
    let rows: Vec<Vec<&str>> =
        table.lines().map(|line| line.trim_matches('|').split(" | ").map(str::trim).collect()).collect();
    assert_eq!(rows.len(), 5, "{table}");
    assert!(rows.iter().all(|row| row.len() == rows[0].len()), "{table}");
    let [_, architecture, parameters, inspect, four, two, perplexities, kl, run, serve, _] = rows[2][..]
    else {
        panic!("columns: {table}")
    };
    assert_eq!((rows[2][0], architecture, inspect), ("`a/demo`", "LlamaForCausalLM", "ok"));
    assert!(parameters.ends_with(" M") && four.starts_with("ok (") && two.starts_with("ok ("), "{table}");
    let numbers = |cell: &str| cell.split(", ").map(|n| n.parse().expect(cell)).collect::<Vec<f64>>();
    assert!(numbers(perplexities).len() == 3 && numbers(perplexities).iter().all(|&p| p > 1.0), "{table}");
    assert!(matches!(numbers(kl)[..], [four, two] if 0.0 < four && four < two), "{table}");
    assert_eq!((run, serve), ("16 tokens", "8 tokens"));
    assert!(
        rows[3][3].contains("`architectures` should be one of") && rows[3][4].contains("should be"),
        "{table}"
    );
    assert_eq!((rows[3][8], rows[3][9]), ("-", "-"));
    assert!(rows[4][0] == "`c.gguf`" && rows[4][3].contains("c.gguf"), "{table}");
}
