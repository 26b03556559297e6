//! Nested models on the command line.

mod common;

use common::{BAD_INPUT, FAILED, USAGE, demo, fracbit, stories, text};
use std::{fs, path::Path};

#[test]
fn one_file_of_several_precisions_from_quantize_to_chat() {
    let place = tempfile::tempdir().unwrap();
    let at = |name: &str| place.path().join(name).display().to_string();
    let (model, flat, prompts, schedule) = (at("nested"), at("flat"), at("prompts.txt"), at("s.json"));
    let make = |scheme: &str, out: &str| {
        fracbit(&[
            "quantize",
            text(&demo()),
            "-o",
            out,
            "--scheme",
            scheme,
            "--data-free",
            "--effort",
            "fast",
        ])
        .done();
    };
    make("nest-tcq-fast-2+2", &model);
    make("nuq-3", &flat);
    fs::write(&prompts, "Once upon a time\n\nThe dog\nLily and Tom\nA little girl found\n").unwrap();

    // A plan of nested codes is one model for each precision.
    let original = demo();
    let plan = ["plan", text(&original), "--bits", "4.5", "--palette", "nest", "--sensitivity", "prior"];
    let plan = fracbit(&[&plan[..], &["--code", "fast"]].concat()).done();
    let lines: Vec<&str> = plan.out.lines().filter(|line| line.starts_with("at ")).collect();
    assert!(lines.len() >= 2, "{}", plan.out);
    let loss = |line: &str| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap();
    assert!(lines.windows(2).all(|pair| loss(pair[0]) > loss(pair[1])), "{}", plan.out);
    assert!(plan.out.contains("nest-tcq-fast-"), "{}", plan.out);

    let write = |more: &[&str]| {
        let all = [&["run", &model, "-p", "Once upon a time", "-n", "60", "--json"], more].concat();
        fracbit(&all).done().json()
    };
    let plain = write(&[]);
    for draft in ["nested", "nested:2", "nested:2,4", "nested:2,auto"] {
        for sampling in [&[][..], &["--temp", "0.9", "--seed", "3"]] {
            let (want, got) = (write(sampling), write(&[&["--draft", draft], sampling].concat()));
            assert_eq!(want["text"], got["text"], "{draft} {sampling:?}");
        }
    }
    assert!(write(&["--draft", "nested:2,4"])["guessed_tokens"].as_u64().unwrap() > 0);
    assert_eq!(write(&["--precision", "4"])["text"], plain["text"]);
    assert!(plain.get("mean_bits").is_none());
    let falling = write(&["--precision", "prefill=4,decode=4..2@30"]);
    let bits = |bits: &str| write(&["--precision", bits])["mean_bits"].as_f64().unwrap();
    let (mean, two, four) = (falling["mean_bits"].as_f64().unwrap(), bits("2"), bits("4"));
    // 59 decode steps, 30 of them at four bits.
    assert!((mean - (30.0 * four + 29.0 * two) / 59.0).abs() < 1e-9, "{mean} of {two} and {four}");
    assert_ne!(write(&["--precision", "2"])["text"], plain["text"]);

    let fit = ["schedule", "fit", &model, "--prompts", &prompts, "--steps", "16", "--points", "4"];
    for (quality, tolerance) in [("kl", "0.01"), ("match", "0.2"), ("rouge-l", "0.2")] {
        let found = [&fit[..], &["--quality", quality, "--tolerance", tolerance, "--json"]].concat();
        let found = fracbit(&found).done().json();
        assert_eq!(found["quality"], quality);
        assert!(found["best"]["loss"].as_f64().unwrap() <= tolerance.parse().unwrap(), "{found}");
        let bits = |which: &str| found[which]["mean_bits"].as_f64().unwrap();
        assert!(bits("best") <= bits("pair") && bits("pair") <= 4.0, "{found}");
        assert_eq!(found["uniform"].as_array().unwrap().len(), 2);
        let best = found["uniform"][1]["loss"].as_f64().unwrap();
        assert!(best.abs() < 1e-6, "full precision loses nothing: {found}");
    }
    let said = fracbit(&[&fit[..], &["--tolerance", "0.5", "-o", &schedule]].concat()).done();
    assert!(said.out.contains("phase-aware") && said.out.contains("held out"), "{}", said.out);
    write(&["--precision", &schedule]);
    fracbit(&[&fit[..], &["-o", &schedule]].concat()).failed(FAILED, &["exists"]);

    // A scheduler that reads prompts: one of its schedules, the same each time.
    let scheduler = at("scheduler.json");
    let book = stories();
    let train = ["schedule", "train", &model, "--text", text(&book), "--samples", "12", "--steps", "12"];
    let train = [&train[..], &["--points", "3", "--quality", "match", "--tolerance", "0.2"]].concat();
    let found =
        fracbit(&[&train[..], &["--block", "0,1", "-o", &scheduler, "--json"]].concat()).done().json();
    assert_eq!(
        found["schedules"],
        json_schedules(&[&[[0.0, 2.0]], &[[0.0, 4.0], [6.0, 2.0]], &[[0.0, 4.0]]])
    );
    let labels: Vec<u64> = found["labels"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect();
    assert_eq!(labels.iter().sum::<u64>(), 12);
    let policies = found["policies"].as_array().unwrap();
    let names: Vec<&str> = policies.iter().map(|policy| policy["name"].as_str().unwrap()).collect();
    let known = ["uniform, 2 bits", "uniform, 4 bits", "static", "learned, block 0", "learned, block 1"];
    assert_eq!(names, [&known[..], &["random", "labels"]].concat());
    assert!(policies[1]["loss"].as_f64().unwrap().abs() < 1e-6 && policies[6]["within"] == 1.0, "{found}");
    let chosen = write(&["--precision", &scheduler]);
    assert_eq!(chosen["text"], write(&["--precision", &scheduler, "--draft", "nested:2,4"])["text"]);
    let among = ["prefill=4,decode=2", "prefill=4,decode=4..2@6", "4"];
    assert!(among.into_iter().any(|fixed| write(&["--precision", fixed])["text"] == chosen["text"]));
    let table = fracbit(&train).done().out;
    assert!(
        table.contains("as labelled") && table.contains("prompts want prefill=4,decode=4..2@6"),
        "{table}"
    );
    fracbit(&[&train[..], &["-o", &scheduler]].concat()).failed(FAILED, &["exists"]);
    for (more, word) in [
        (["--block", "99"], "should be at most 5"),
        (["--bits", "4,3"], "should be two of 2, 4"),
        (["--bits", "4"], "two numbers of bits"),
        (["--points", "1"], "at least 2"),
        (["--samples", "5"], "at least 6 prompts"),
    ] {
        let train = if ["--samples", "--points"].contains(&more[0]) {
            vec!["schedule", "train", &model, "--text", text(&book)]
        } else {
            train.clone()
        };
        fracbit(&[&train[..], &more].concat()).failed(USAGE, &[word]);
    }
    let written = fs::read_to_string(&scheduler).unwrap();
    fs::write(&scheduler, written.replace("\"head_dim\":", "\"head_dim\":1")).unwrap();
    fracbit(&["run", &model, "-p", "x", "--precision", &scheduler])
        .failed(BAD_INPUT, &["scheduler.json", "as many finite parameters"]);

    // What this model has not, or what is no schedule, is said.
    for option in [["--draft", "nested"], ["--precision", "2"]] {
        fracbit(&[&["run", &flat, "-p", "x", "-n", "1"], &option[..]].concat())
            .failed(USAGE, &[option[0], "one precision", "nest-"]);
    }
    for (option, value, word) in [
        ("--draft", "other", "nested:BITS"),
        ("--draft", "nested:2,8", "1 to 7"),
        ("--precision", "prefill=4,decode=2..4@9", "not rise"),
    ] {
        fracbit(&["run", &model, "-p", "x", option, value]).failed(USAGE, &[word]);
    }
    let missing = at("nothing.json");
    fracbit(&["run", &model, "-p", "x", "--precision", &missing]).failed(BAD_INPUT, &["nothing.json"]);
    fs::write(&missing, "{\"prefill\": 4}").expect("a writable place");
    fracbit(&["run", &model, "-p", "x", "--precision", &missing])
        .failed(BAD_INPUT, &["nothing.json", "decode"]);
    fracbit(&["schedule", "fit", &flat, "--prompts", &prompts]).failed(USAGE, &["one precision"]);
    let half = fracbit(&[
        "eval",
        &model,
        "--text",
        text(&stories()),
        "--ctx",
        "128",
        "--windows",
        "2",
        "--precision",
        "2",
        "--json",
    ]);
    assert!(half.done().json()["bits_per_weight"].as_f64().unwrap() < 3.0);
    assert!(Path::new(&schedule).exists());
}

fn json_schedules(all: &[&[[f64; 2]]]) -> serde_json::Value {
    let one = |steps: &&[[f64; 2]]| {
        let steps: Vec<_> = steps.iter().map(|[at, bits]| serde_json::json!([*at as u64, bits])).collect();
        serde_json::json!({"prefill": 4.0, "decode": steps})
    };
    all.iter().map(one).collect()
}

#[test]
fn a_machine_that_is_not_here_is_simulated() {
    let simulate = |more: &[&str]| fracbit(&[&["simulate", "npu"], more].concat());
    let falling = ["--schedule", "4", "--schedule", "prefill=4,decode=4..2@64", "--json"];
    let original = demo();
    for of in [["--shape", "llama-3-8b"], ["--model", text(&original)]] {
        let made = simulate(&[&of[..], &falling].concat()).done().json();
        let speed = |i: usize| made[i]["speedup"].as_f64().expect("a number");
        assert_eq!(speed(0), 1.0, "{made}");
        assert!(speed(1) > 1.0 && speed(2) > speed(1), "{made}");
    }
    let table = simulate(&["--shape", "llama-3-8b", "--schedule", "3"]).done().out;
    assert!(table.contains("prefill=3,decode=3"), "{table}");
    simulate(&["--schedule", "3"]).failed(USAGE, &["--model"]);
    simulate(&["--shape", "llama-3-8b", "--schedule", "x"]).failed(USAGE, &["prefill=4"]);
    let none = ["--shape", "llama-3-8b", "--schedule", "3", "--bandwidth", "0B"];
    simulate(&none).failed(USAGE, &["--bandwidth"]);
}
