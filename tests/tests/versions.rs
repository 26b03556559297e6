//! Directories of earlier versions of the file format, written by programs of their time: they load to the same bits.

use fracbit::{EvalOptions, Opened, Plan, Quiet, evaluate};
use fracbit_base::Scheme;
use fracbit_tests::{Parts, load, logits, root};
use serde_json::{Value, json};
use std::{fs, path::PathBuf};

/// Directory, and nats per token of `text.txt` as the program of that version found them, to the last digit.
const GOLDEN: [(&str, f64); 3] =
    [("v1", 6.781367058780271), ("v2", 6.694709478200997), ("v2-groups", 6.503879721965505)];

fn golden(name: &str) -> PathBuf {
    root().join("tests/golden/versions").join(name)
}

#[test]
fn earlier_versions_give_the_same_numbers() {
    let text = golden("text.txt");
    let words = fs::read_to_string(&text).expect("the text is committed");
    for (name, nats) in GOLDEN {
        let opened = Opened::new(&golden(name)).expect("a directory of an earlier version");
        let result = evaluate(&opened, None, &words, &text, &EvalOptions::default(), &Quiet);
        assert_eq!(result.expect("it runs").nats_per_token, nats, "{name}");
    }
}

/// The same directory as this version writes it: one group for all, said at each matrix.
#[test]
fn a_directory_of_today_holds_the_same_model() {
    let tokens: Vec<u32> = (0..40).map(|i| i * 37 % 101).collect();
    for (name, _) in GOLDEN {
        let mut parts = Parts::read(&golden(name));
        let block = &mut parts.config["quantization_config"];
        block["format_version"] = json!(3);
        let group = block.as_object_mut().and_then(|block| block.remove("group")).expect("one for all");
        for module in block["modules"].as_object_mut().expect("a map").values_mut() {
            if module["scheme"] != "f16" {
                module["group"] = group.clone();
            }
        }
        let place = tempfile::tempdir().expect("a temporary directory");
        parts.write(place.path());
        let run = |dir| logits(&load(dir).expect("it runs"), &tokens);
        assert!(run(&golden(name)) == run(place.path()), "{name}");
    }
}

#[test]
fn plans_of_version_1_are_read() {
    for (name, _) in GOLDEN {
        let text = fs::read_to_string(golden(name).join("plan.json")).expect("the plan is committed");
        let old: Value = serde_json::from_str(&text).expect("JSON");
        let plan = Plan::parse(&text, name).expect("a plan of version 1");
        assert_eq!((old["plan_version"].as_u64(), plan.plan_version), (Some(1), 2), "{name}");
        for layer in &plan.layers {
            let packed = layer.scheme.to_string().parse::<Scheme>().is_ok();
            let group = if packed { old["group"].clone() } else { json!(0) };
            assert_eq!(json!(layer.group), group, "{name}, {}", layer.name);
        }
        let again = Plan::parse(&serde_json::to_string(&plan).expect("plain data"), name);
        assert_eq!(again.expect("a plan of today"), plan, "{name}");
    }
}
