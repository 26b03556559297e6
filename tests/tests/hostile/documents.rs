//! Plans, sensitivities and texts with something wrong in them.

use crate::refused_with;
use fracbit::{EvalOptions, Opened, Plan, Protocol, Quiet, Sensitivities, Target, evaluate, sensitivity};
use fracbit_base::Bytes;
use fracbit_model::RotationMode;
use fracbit_tests::{Source, demo_model, reference};
use serde_json::{Value, json};
use std::{fs, path::Path};

fn source() -> Source {
    Source::open(&reference("llama2").dir, RotationMode::Fold, 0).expect("a good checkpoint")
}

/// Changes to a plan, and words that the error must contain.
type Case = (&'static str, fn(&mut Value), &'static [&'static str]);

fn layers(plan: &mut Value) -> &mut Vec<Value> {
    plan["layers"].as_array_mut().expect("a list")
}

const PLANS: &[Case] = &[
    (
        "a layer missing",
        |p| drop(layers(p).remove(2)),
        &["model.layers.0.self_attn.k_proj", "should appear once"],
    ),
    (
        "a layer twice",
        |p| {
            let twice = layers(p)[2].clone();
            layers(p).push(twice);
        },
        &["model.layers.0.self_attn.k_proj", "should appear once"],
    ),
    (
        "a layer of another model",
        |p| {
            let mut other = layers(p)[2].clone();
            other["name"] = json!("model.layers.9.self_attn.k_proj");
            layers(p).push(other);
        },
        &["model.layers.9.self_attn.k_proj", "not in the model"],
    ),
    (
        "a layer of another shape",
        |p| layers(p)[2]["rows"] = json!(99),
        &["model.layers.0.self_attn.k_proj", "99"],
    ),
    ("a scheme that does not exist", |p| layers(p)[0]["scheme"] = json!("vq-9"), &["plan.json", "vq", "9"]),
    ("a scheme that is no name", |p| layers(p)[0]["scheme"] = json!("best"), &["plan.json", "best"]),
    (
        "a field missing",
        |p| drop(layers(p)[0].as_object_mut().and_then(|o| o.remove("cols"))),
        &["plan.json", "cols"],
    ),
    (
        "a plan of the future",
        |p| p["plan_version"] = json!(4),
        &["plan.json", "plan_version should be 1 to 3, got 4"],
    ),
    ("a group of 24", |p| layers(p)[2]["group"] = json!(24), &["plan.json", "k_proj", "group", "24"]),
    (
        "one group for all",
        |p| p["group"] = json!(0),
        &["plan.json", "group should stand at each of `layers`"],
    ),
    ("version 1 without a group", |p| p["plan_version"] = json!(1), &["plan.json", "group"]),
    ("a rotation nobody knows", |p| p["rotation"] = json!("twirl"), &["plan.json", "twirl"]),
    ("a plan of another checkpoint", |p| p["source_hash"] = json!("00"), &["hash"]),
    (
        "a group of mixed schemes",
        |p| {
            layers(p)[1]["scheme"] = json!("tcq-2");
            p["fused"] = json!([["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"]]);
        },
        &["should have one scheme", "q_proj` has tcq-2", "k_proj` has nuq-3"],
    ),
    (
        "a group of two blocks",
        |p| p["fused"] = json!([["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"]]),
        &["do not read the same input"],
    ),
    (
        "a layer in two groups",
        |p| {
            p["fused"] = json!([
                ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"],
                ["model.layers.0.self_attn.v_proj", "model.layers.0.self_attn.k_proj"]
            ]);
        },
        &["k_proj` is in a group already"],
    ),
    ("no layers", |p| layers(p).clear(), &["should appear once"]),
    ("no list of layers", |p| p["layers"] = json!({}), &["plan.json"]),
];

#[test]
fn plans_that_do_not_fit_are_refused() {
    let source = source();
    let good = source.uniform("nuq-3").expect("no budget to miss");
    for (what, change, words) in PLANS {
        let mut plan = serde_json::to_value(&good).expect("plain data");
        change(&mut plan);
        let parsed = Plan::parse(&plan.to_string(), "plan.json").map_err(fracbit::Error::from);
        let outcome = parsed.and_then(|plan| {
            let place = tempfile::tempdir().expect("a temporary directory");
            let outcome = source.quantize(&plan, &place.path().join("out"), false);
            assert_eq!(crate::names(place.path()), [""; 0], "{what}: nothing is written");
            outcome
        });
        refused_with(what, outcome, words);
    }
    for text in ["", "{", "[]", "null", "{}", "\u{0}"] {
        refused_with("no plan", Plan::parse(text, "plan.json"), &["plan.json"]);
    }
    let other = Source::open(&reference("qwen3").dir, RotationMode::Fold, 0).expect("a good checkpoint");
    let mut plan = good.clone();
    refused_with("another model's plan", plan.fit_to(&other.inventory), &["hash", &good.source_hash]);
}

#[test]
fn budgets_that_cannot_be_are_refused() {
    let source = source();
    for (what, target) in [
        ("no bits", Target::Bits(0.0)),
        ("negative bits", Target::Bits(-3.0)),
        ("bits that are no number", Target::Bits(f64::NAN)),
        ("no bytes", Target::Size(Bytes(0))),
        ("a bit", Target::Bits(1.0)),
    ] {
        refused_with(what, source.plan(&source.options(target)), &["out of reach", "bits per weight"]);
    }
    let mut kept = source.options(Target::Bits(2.0));
    kept.keep_head = true;
    refused_with("a head that takes it all", source.plan(&kept), &["out of reach"]);
}

#[test]
fn sensitivities_that_do_not_fit_are_refused() {
    let source = source();
    let good = Sensitivities::prior(&source.inventory, RotationMode::Fold);
    let mut missing = good.clone();
    missing.layers.remove("lm_head");
    let mut negative = good.clone();
    negative.layers.get_mut("lm_head").expect("a head").a = -1.0;
    let mut wild = good.clone();
    wild.layers.get_mut("lm_head").expect("a head").a = f64::INFINITY;
    let options = source.options(Target::Bits(4.0));
    for (what, a, words) in [
        ("a layer missing", &missing, &["lm_head", "should be there"][..]),
        ("a negative coefficient", &negative, &["lm_head", "-1"]),
        ("an infinite coefficient", &wild, &["lm_head", "finite"]),
    ] {
        refused_with(what, fracbit::plan(&source.inventory, a, &options), words);
    }
    let mut other = good;
    other.source_hash = "abc".to_owned();
    refused_with("of another checkpoint", other.require_source("def"), &["abc", "def"]);

    let place = tempfile::tempdir().expect("a temporary directory");
    let path = place.path().join("a.json");
    for text in ["", "[]", "{\"protocol\": 3}"] {
        fs::write(&path, text).expect("a writable place");
        refused_with("no document", Sensitivities::read(&path), &["a.json"]);
    }
    refused_with("no file", Sensitivities::read(&place.path().join("b.json")), &["b.json"]);
    let protocol = Protocol { tokens: 0, ..Protocol::QUICK };
    let outcome = sensitivity::measure(&source.weights, "", protocol, None, &Quiet, &mut |_| Ok(()));
    refused_with("nothing to measure", outcome, &["at least 1"]);
}

#[test]
fn texts_without_anything_to_predict_are_refused() {
    let model = Opened::new(&demo_model()).expect("the embedded model is good");
    let options = EvalOptions { ctx: Some(64), bos: Some(false), ..EvalOptions::default() };
    let eval =
        |text: &str, options: &EvalOptions| evaluate(&model, None, text, Path::new("a.txt"), options, &Quiet);
    refused_with("nothing", eval("", &options), &["a.txt", "two tokens"]);
    refused_with("one token", eval("a", &options), &["a.txt", "two tokens"]);
    let separated = EvalOptions { separator: Some("|".to_owned()), ..options.clone() };
    refused_with("separators only", eval("||  |\n|", &separated), &["a.txt", "two tokens"]);
    for ctx in [0, 513, usize::MAX] {
        let options = EvalOptions { ctx: Some(ctx), ..options.clone() };
        refused_with(
            &format!("a context of {ctx}"),
            eval("Once upon a time", &options),
            &["--ctx", "1 to 512"],
        );
    }
    let with_bos = EvalOptions { bos: Some(true), ..options.clone() };
    let found = eval("a", &with_bos).expect("BOS predicts the one token");
    assert_eq!(found.tokens, 1);
    assert!(
        eval("\u{0}\u{feff} e\u{301} \u{1f600}", &options)
            .expect("any text is text")
            .nats_per_token
            .is_finite()
    );

    let other = Opened::new(&reference("llama2").dir).expect("a good checkpoint");
    let outcome = evaluate(&model, Some(&other), "Once upon a time", Path::new("a.txt"), &options, &Quiet);
    refused_with("a baseline with another tokenizer", outcome, &["a.txt", "same tokenizer"]);
}
