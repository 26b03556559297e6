//! Directories of earlier versions of the file format, written by programs of their time: they load
//! to the same bits.

use fracbit::{EvalOptions, Opened, Plan, Quiet, evaluate};
use fracbit_base::Scheme;
use fracbit_model::RotationMode;
use fracbit_tests::{Parts, Source, load, logits, parts::dense_model, reference, relative, root};
use serde_json::{Value, json};
use std::{fs, path::PathBuf};

/// Directory, and nats per token of `text.txt` as the program of that version found them, to the
/// last digit.
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
        block["format_version"] = json!(4);
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
        assert_eq!((old["plan_version"].as_u64(), plan.plan_version), (Some(1), 3), "{name}");
        for layer in &plan.layers {
            let packed = layer.scheme.to_string().parse::<Scheme>().is_ok();
            let group = if packed { old["group"].clone() } else { json!(0) };
            assert_eq!(json!(layer.group), group, "{name}, {}", layer.name);
        }
        let again = Plan::parse(&serde_json::to_string(&plan).expect("plain data"), name);
        assert_eq!(again.expect("a plan of today"), plan, "{name}");
    }
}

/// Scales for rows and for groups of several widths side by side, in one plan file and one
/// directory.
#[test]
fn a_plan_mixes_rows_and_groups() {
    const MIX: [(&str, usize); 8] = [
        ("tcq-3", 0),
        ("int-4", 16),
        ("nuq-4", 32),
        ("gnuq-3", 48),
        ("int-8", 128),
        ("half-tcq-3.25", 64),
        ("qoq-g128", 0),
        ("qoq-channel", 0),
    ];
    let place = tempfile::tempdir().expect("a temporary directory");
    let source = Source::open(&reference("llama1").dir, RotationMode::Fold, 0).expect("a good checkpoint");
    let uniform = source.uniform("tcq-3").expect("no budget to miss");
    let mut document = serde_json::to_value(&uniform).expect("plain data");
    let layers = document["layers"].as_array_mut().expect("a list");
    for (layer, (scheme, group)) in layers.iter_mut().zip(MIX.iter().cycle()) {
        (layer["scheme"], layer["group"]) = (json!(scheme), json!(group));
    }
    let mut plan = Plan::parse(&document.to_string(), "mixed").expect("an edited plan");
    plan.fit_to(&source.inventory).expect("a plan of this model");
    let out = place.path().join("mixed");
    let report = source.quantize(&plan, &out, false).expect("a plan that fits");
    assert_eq!(report.bytes, plan.bytes, "planned to the byte");

    let stored = fs::read_to_string(out.join("plan.json")).expect("the plan is written");
    let stored = Plan::parse(&stored, "stored").expect("a plan of today");
    let parts = Parts::read(&out);
    let modules = &parts.config["quantization_config"]["modules"];
    for (layer, (scheme, group)) in stored.layers.iter().zip(MIX.iter().cycle()) {
        assert_eq!((layer.scheme.to_string().as_str(), layer.group), (*scheme, *group), "{}", layer.name);
        assert_eq!(modules[&layer.name]["group"].as_u64().unwrap_or(0), *group as u64, "{}", layer.name);
        let scales = parts.tensors.iter().find(|t| t.name == format!("{}.weight.scales", layer.name));
        let groups = if *group == 0 { 1 } else { layer.cols.div_ceil(*group) };
        assert_eq!(scales.expect("scales").shape, [layer.rows, groups], "{}", layer.name);
    }
    // A reader of the format alone, with dense arithmetic, against the packed runtime.
    let tokens: Vec<u32> = (0..40).map(|i| i * 37 % 101).collect();
    let (want, got) = (logits(&dense_model(&out), &tokens), logits(&load(&out).expect("it runs"), &tokens));
    let off = relative(&got, &want);
    assert!(off > 1e-6 && off < 0.03, "logits differ by {off}");

    // Fused matrices have one grouping.
    let names = [0, 1].map(|n| format!("model.layers.1.self_attn.{}_proj", ["q", "k"][n]));
    for layer in plan.layers.iter_mut().filter(|l| names.contains(&l.name)) {
        layer.scheme = "int-4".parse().expect("a scheme");
        layer.group = if layer.name == names[0] { 32 } else { 16 };
    }
    plan.fused = vec![names.to_vec()];
    let refused = plan.fit_to(&source.inventory).expect_err("two groupings").to_string();
    assert!(refused.contains("group 32") && refused.contains("has 16"), "{refused}");
}
