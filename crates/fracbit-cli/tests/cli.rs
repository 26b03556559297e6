//! The binary as a user meets it: the way from a checkpoint to text, the documents it prints, and
//! how it fails.
#![cfg(unix)]
#![expect(clippy::print_stderr, reason = "a test that does not run has to say so")]

mod common;

use common::{
    BAD_INPUT, DONE, FAILED, OUT_OF_REACH, Ran, USAGE, command, copy, demo, finish, fracbit, keys, names,
    stories, text,
};
use fracbit::{CompressOptions, Effort, Quiet, Rounders, Target};
use serde_json::Value;
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::OnceLock,
    time::{Duration, Instant},
};

/// A tiny checkpoint of the repository; `None`, said aloud, in a copy of this crate without the
/// repository around it.
fn tiny(name: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/models").join(name);
    if path.is_dir() {
        return Some(path);
    }
    eprintln!("SKIPPED: {} is absent", path.display());
    None
}

/// The demo model at 4.5 bits in scalar schemes, which takes a second. Made once.
fn small() -> &'static Path {
    static SMALL: OnceLock<PathBuf> = OnceLock::new();
    SMALL.get_or_init(|| {
        let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fracbit-cli-small");
        let (demo, shown) = (demo(), text(&out).to_owned());
        let args = [
            "quantize",
            text(&demo),
            "-o",
            &shown,
            "--bits",
            "4.5",
            "--palette",
            "nuq",
            "--sensitivity",
            "prior",
            "--data-free",
            "--force",
        ];
        let ran = fracbit(&args).done();
        assert!(ran.out.contains("bits per weight") && ran.out.contains("fracbit run"), "{}", ran.out);
        out
    })
}

#[test]
fn from_a_checkpoint_to_text() {
    let (demo, stories) = (demo(), stories());
    let small = text(small());
    let shown = fracbit(&["inspect", small]).done().out;
    for word in
        ["LlamaForCausalLM", "2755008", "bits per weight", "rotation         fold", "nuq-", "source_hash"]
    {
        assert!(shown.contains(word), "`{word}` should be in:\n{shown}");
    }
    let inspected = fracbit(&["inspect", small, "--json"]).done().json();
    let bits = inspected["bits_per_weight"].as_f64().expect("a number");
    assert!(bits <= 4.5 && bits > 4.4, "{bits}");
    assert_eq!(inspected["matrices"].as_object().map(serde_json::Map::len), Some(43));

    let verified = fracbit(&["verify", small]).done().out;
    assert!(verified.contains("checksums: ok"), "{verified}");
    let verified = fracbit(&["verify", small, "--json"]).done().json();
    assert_eq!(
        (&verified["ok"], &verified["checksums"], &verified["problems"]),
        (&true.into(), &true.into(), &Value::Array(vec![]))
    );

    let eval = ["eval", small, "--text", text(&stories), "--ctx", "128", "--json"];
    let alone = fracbit(&eval).done().json();
    assert_eq!(keys(&alone), ["nats_per_token", "perplexity", "tokens", "bits_per_weight"]);
    let beside = fracbit(&[&eval[..], &["--baseline", text(&demo)]].concat()).done().json();
    assert_eq!(
        keys(&beside),
        ["nats_per_token", "perplexity", "tokens", "bits_per_weight", "kl", "top1_agreement"]
    );
    assert_eq!(alone["nats_per_token"], beside["nats_per_token"]);
    let number = |key: &str| beside[key].as_f64().expect("a number");
    assert!((number("perplexity").ln() - number("nats_per_token")).abs() < 1e-9, "{beside}");
    assert!(number("kl") > 0.0 && number("kl") < 0.1, "{beside}");
    assert!((0.7..1.0).contains(&number("top1_agreement")), "{beside}");
    assert!((number("bits_per_weight") - bits).abs() < 1e-9, "{beside}");
    let table = fracbit(&eval[..eval.len() - 1]).done().out;
    assert!(table.contains("perplexity") && table.contains("tokens scored"), "{table}");
    // The fewer bits the cache has, the farther from the original, whose own cache has 16.
    let mut last = 0.0;
    for (kv, most) in [("8", 0.001), ("6", 0.02), ("4", 0.1)] {
        let with = fracbit(&[&eval[..], &["--baseline", text(&demo), "--kv", kv]].concat()).done().json();
        let rise = with["kl"].as_f64().expect("a number") - number("kl");
        assert!(rise.abs() < most && (kv == "8" || rise > last), "--kv {kv}: {rise}");
        last = rise;
    }

    let run = ["run", small, "-p", "Once upon a time", "-n", "24", "--greedy"];
    let told = fracbit(&run).done();
    assert!(told.out.split_whitespace().count() > 8, "some words: {}", told.out);
    assert!(told.err.contains("tok/s"), "the speed goes to standard error: {}", told.err);
    let document = fracbit(&[&run[..], &["--json"]].concat()).done().json();
    assert_eq!(
        keys(&document),
        [
            "text",
            "tokens",
            "prompt_tokens",
            "stop",
            "prefill_tokens_per_second",
            "decode_tokens_per_second",
            "guessed_tokens"
        ]
    );
    assert_eq!(document["text"].as_str().map(str::trim_end), Some(told.out.trim_end()), "the same text");
    assert!(document["tokens"].as_u64().is_some_and(|n| n <= 24), "{document}");
}

#[test]
fn instruction_sets_and_threads_do_not_change_the_text() {
    let small = text(small());
    let args = ["run", small, "-p", "One day, a little fox", "-n", "40", "--greedy"];
    let told = |isa: Option<&str>, threads: &str, kv: &str| {
        let args = [&args[..], &["--threads", threads, "--kv", kv]].concat();
        let mut command = command(&args);
        command.envs(isa.map(|isa| ("FRACBIT_ISA", isa)));
        finish(&args, &mut command).done().out
    };
    for kv in ["16", "8", "4"] {
        let best = told(None, "2", kv);
        assert!(best.len() > 40, "a text: {best}");
        for isa in ["", "scalar", "avx2", "avxvnni", "avx512", "amx"] {
            // A set that this machine lacks is a cap that does nothing, like none.
            assert_eq!(told(Some(isa), "2", kv), best, "FRACBIT_ISA={isa} --kv {kv}");
        }
        assert_eq!(told(None, "1", kv), best, "one thread, --kv {kv}");
    }
    let mut wrong = command(&args);
    let ran = finish(&args, wrong.env("FRACBIT_ISA", "sse9"));
    assert_ne!(ran.code, DONE);
    ran.failed_with(&["FRACBIT_ISA", "scalar", "avx2", "sse9"]);
}

impl Ran {
    fn failed_with(self, words: &[&str]) {
        let code = self.code;
        self.failed(code, words);
    }
}

#[test]
fn sampling_follows_the_seed() {
    let small = text(small());
    let told = |seed: &str| {
        fracbit(&["run", small, "-p", "The dog", "-n", "16", "--temp", "1.2", "--top-p", "1", "--seed", seed])
            .done()
            .out
    };
    let (a, b) = (told("1"), told("2"));
    assert_eq!(a, told("1"));
    assert_ne!(a, b);
}

#[test]
fn documents_have_the_documented_fields() {
    let demo = demo();
    let plan = fracbit(&["plan", text(&demo), "--bits", "3.25", "--json"]).done().json();
    for key in ["bits_per_weight", "bytes", "predicted_loss", "layers"] {
        assert!(plan.get(key).is_some(), "plan --json has `{key}`: {:?}", keys(&plan));
    }
    assert!(
        plan["bits_per_weight"].as_f64().is_some_and(|b| b <= 3.25 && b > 3.2),
        "{}",
        plan["bits_per_weight"]
    );
    let layers = plan["layers"].as_array().expect("a list");
    let whole = |l: &Value| l["name"].as_str().and_then(|n| n.split(".band").next()).map(str::to_owned);
    assert_eq!(layers.iter().map(whole).collect::<BTreeSet<_>>().len(), 43);
    assert!(layers.len() > 43, "some in bands of rows");
    for layer in layers {
        assert!(
            layer["name"].is_string() && layer["scheme"].is_string() && layer["bits"].is_f64(),
            "{layer}"
        );
    }
    let table = fracbit(&["plan", text(&demo), "--bits", "3.25"]).done().out;
    assert!(table.contains("proven bound") && table.contains("model.layers.5.mlp.down_proj"), "{table}");

    let list = fracbit(&[
        "distortion",
        "--scheme",
        "nuq-3",
        "--scheme",
        "tcq-fast-2",
        "--weights",
        "16384",
        "--json",
    ])
    .done()
    .json();
    let list = list.as_array().expect("a list");
    assert_eq!(list.len(), 2);
    for entry in list {
        assert_eq!(keys(entry), ["scheme", "code", "bits", "nmse", "bound", "published"]);
        let number = |key: &str| entry[key].as_f64().expect("a number");
        assert!(number("nmse") > number("bound") && number("nmse") < 3.0 * number("bound"), "{entry}");
    }
    assert_eq!(
        (&list[0]["scheme"], &list[0]["code"], &list[0]["bits"]),
        (&"nuq".into(), &Value::Null, &3.0.into())
    );
    assert_eq!(
        (&list[1]["scheme"], &list[1]["code"], &list[1]["bits"]),
        (&"tcq".into(), &"fast".into(), &2.0.into())
    );
}

#[test]
fn plans_are_saved_edited_and_applied() {
    let demo = demo();
    let place = tempfile::tempdir().expect("a temporary directory");
    let (plan, out) = (place.path().join("plan.json"), place.path().join("out"));
    let printed = fracbit(&[
        "plan",
        text(&demo),
        "--size",
        "1.6MB",
        "--palette",
        "vq",
        "--save",
        text(&plan),
        "--json",
    ])
    .done()
    .json();
    let mut saved: Value = serde_json::from_slice(&fs::read(&plan).expect("it was saved")).expect("JSON");
    assert_eq!(saved, printed);
    saved["layers"][1]["scheme"] = "nuq-8".into();
    let name = saved["layers"][1]["name"].as_str().expect("a name").to_owned();
    fs::write(&plan, saved.to_string()).expect("a writable place");
    fracbit(&["plan", text(&demo), "--bits", "4", "--save", text(&plan)])
        .failed(FAILED, &["plan.json", "--force"]);
    let dry = fracbit(&["quantize", text(&demo), "--plan", text(&plan), "--dry-run", "--json"]).done().json();
    assert_eq!(keys(&dry), ["plan", "memory"]);
    assert_eq!(names(place.path()), ["plan.json"], "a dry run writes nothing");
    let report =
        fracbit(&["quantize", text(&demo), "-o", text(&out), "--plan", text(&plan), "--data-free", "--json"])
            .done()
            .json();
    assert_eq!(report["bytes"], dry["plan"]["bytes"]);
    let inspected = fracbit(&["inspect", text(&out), "--json"]).done().json();
    assert_eq!(inspected["matrices"][&name], "nuq-8");
    assert_eq!(inspected["bytes"], report["bytes"]);
    if let Some(other) = tiny("llama2") {
        let refused = ["quantize", text(&other), "-o", text(&out), "--plan", text(&plan), "--force"];
        fracbit(&refused).failed(BAD_INPUT, &["hash", "hint: "]);
    }
}

#[test]
fn defaults_measure_plan_and_quantize() {
    // Nothing but a budget: the built-in text, the quick measurement, the trellis palette. On a
    // tiny model, in seconds.
    let Some(model) = tiny("qwen3") else { return };
    let place = tempfile::tempdir().expect("a temporary directory");
    let run = |name: &str, threads: &str| {
        let out = place.path().join(name);
        fracbit(&["quantize", text(&model), "-o", text(&out), "--bits", "4", "--threads", threads]).done();
        names(&out)
            .into_iter()
            .map(|n| (n.clone(), fs::read(out.join(n)).expect("a readable file")))
            .collect::<Vec<_>>()
    };
    let (one, two) = (run("one", "1"), run("two", "2"));
    for ((name, a), (_, b)) in one.iter().zip(&two) {
        assert!(a == b, "{name} differs between one thread and two");
    }
    let inspected = fracbit(&["inspect", text(&place.path().join("one")), "--json"]).done().json();
    assert!(inspected["bits_per_weight"].as_f64().is_some_and(|b| b <= 4.0), "{inspected}");
    assert!(
        inspected["storage"].as_object().is_some_and(|s| s.keys().any(|k| k.contains("tcq"))),
        "{inspected}"
    );
    fracbit(&["run", text(&place.path().join("two")), "-p", "abc", "-n", "4"]).done();
}

#[test]
fn sensitivities_are_measured_resumed_and_bound_to_their_model() {
    let (Some(model), Some(other)) = (tiny("llama2"), tiny("llama1")) else { return };
    let place = tempfile::tempdir().expect("a temporary directory");
    let (a, plan) = (place.path().join("a.json"), place.path().join("plan.json"));
    let measure = ["sensitivity", text(&model), "-o", text(&a), "--tokens", "32", "--levels", "2"];
    let whole = fracbit(&[&measure[..], &["--json"]].concat()).done().json();
    assert_eq!(keys(&whole)[..5], ["protocol", "source_hash", "rotation", "smoothing", "tokens"]);
    // What a run that was stopped leaves: the first few matrices.
    let mut part = whole.clone();
    let layers = part["layers"].as_object_mut().expect("a map");
    let kept: Vec<String> = layers.keys().take(5).cloned().collect();
    layers.retain(|name, _| kept.contains(name));
    fs::write(&a, part.to_string()).expect("a writable place");
    let resumed = fracbit(&[&measure[..], &["--json"]].concat()).done();
    assert!(resumed.err.contains("holds 5 matrices"), "{}", resumed.err);
    assert_eq!(resumed.json(), whole, "the same numbers, to the bit");
    let another = ["sensitivity", text(&model), "-o", text(&a), "--tokens", "16", "--levels", "2"];
    fracbit(&another).failed(FAILED, &["a.json", "--force"]);
    fracbit(&["plan", text(&model), "--bits", "4", "--sensitivity", text(&a), "--save", text(&plan)]).done();
    fracbit(&["plan", text(&other), "--bits", "4", "--sensitivity", text(&a)])
        .failed(BAD_INPUT, &["hash", "hint: "]);
}

#[test]
fn objectives_are_three_and_a_plan_says_which() {
    let Some(model) = tiny("llama2") else { return };
    let (model, stories) = (text(&model), stories());
    let place = tempfile::tempdir().expect("a temporary directory");
    let path = |name: &str| place.path().join(name).to_str().expect("a path in UTF-8").to_owned();
    let (free, linear, actual) = (path("free.json"), path("linear.json"), path("actual.json"));
    let measure = |out: &str, extra: &[&str]| {
        let common = ["sensitivity", model, "-o", out, "--tokens", "48", "--json"];
        fracbit(&[&common[..], extra].concat()).done().json()
    };
    let on_text = ["--text", text(&stories)];
    measure(&free, &["--levels", "1"]);
    measure(&linear, &[&on_text[..], &["--levels", "1"]].concat());
    let table = measure(&actual, &[&on_text[..], &["--actual", "nuq-4", "--palette", "nuq"]].concat());
    let whole = table["joint"].as_array().expect("whole models of one scheme");
    assert_eq!(whole.len(), 6, "of seven schemes");
    assert!(whole[0]["sum"].as_f64() > whole[5]["sum"].as_f64(), "from 2 bits to 8: {whole:?}");

    let plan = |objective: &str, file: &str| {
        let budget = ["plan", model, "--bits", "6", "--palette", "nuq", "--json"];
        fracbit(&[&budget[..], &["--objective", objective, "--sensitivity", file]].concat())
    };
    for (kind, file) in [("data-free", &free), ("linear", &linear), ("actual", &actual)] {
        let made = plan(kind, file).done().json();
        assert_eq!(made["objective_kind"], kind);
        assert!(made["forecast"]["kl"].as_f64().is_some_and(|kl| kl > 0.0), "{kind}: {}", made["forecast"]);
    }
    plan("linear", &free).failed(BAD_INPUT, &["free.json", "data-free, not linear", "hint: ", "--text FILE"]);
    plan("actual", &linear).failed(BAD_INPUT, &["linear, not actual", "--actual"]);
    plan("error", &actual).failed(BAD_INPUT, &["actual, not data-free"]);
    plan("actual", "quick")
        .failed(USAGE, &["--objective actual needs a table", "--sensitivity FILE", "hint: "]);
    let quick = fracbit(&["plan", model, "--bits", "6", "--objective", "data-free", "--json"]).done().json();
    assert_eq!(quick["objective_kind"], "data-free");
}

#[test]
fn synthetic_checkpoints_are_checkpoints() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let (synth, out) = (place.path().join("synth"), place.path().join("out"));
    fracbit(&["synth", "--shape", "tiny", "-o", text(&synth), "--seed", "3"]).done();
    fracbit(&["verify", text(&synth)]).done();
    fracbit(&["quantize", text(&synth), "-o", text(&out), "--scheme", "vq-3", "--data-free"]).done();
    let told = fracbit(&["run", text(&out), "-p", "abc", "-n", "5", "--json"]).done().json();
    assert_eq!(told["prompt_tokens"], 3, "a token per byte");
}

#[test]
fn a_conversation_through_a_pipe() {
    let Some(model) = tiny("llama3") else { return };
    let args = ["chat", text(&model), "--greedy", "-n", "4"];
    let mut command = command(&args);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the program starts");
    {
        use std::io::Write;
        let mut stdin = child.stdin.take().expect("a pipe");
        stdin.write_all(b"abc\n/reset\nabc\n/exit\n").expect("it reads");
    }
    let ran = child.wait_with_output().expect("it ends");
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    // Two answers to the same question, the second after forgetting the first.
    let out = String::from_utf8_lossy(&ran.stdout).into_owned();
    assert!(!out.trim().is_empty(), "some answer");
    fracbit(&["chat", text(&demo())]).failed(BAD_INPUT, &["no chat template", "fracbit run"]);
}

#[test]
fn what_is_no_model_is_bad_input() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let (absent, file) = (place.path().join("absent"), place.path().join("file"));
    fs::write(&file, b"x").expect("a writable place");
    let out = place.path().join("out");
    let (out, stories) = (text(&out), stories());
    for path in [&absent, &file, &place.path().to_path_buf()] {
        let path = text(path);
        for args in [
            &["inspect", path][..],
            &["verify", path],
            &["plan", path, "--bits", "3"],
            &["quantize", path, "-o", out, "--bits", "3"],
            &["sensitivity", path, "-o", out],
            &["eval", path, "--text", text(&stories)],
            &["run", path, "-p", "x"],
            &["chat", path],
        ] {
            fracbit(args).failed(BAD_INPUT, &[path]);
        }
    }
    fracbit(&["run", "meta-llama/Llama-3.2-1B", "-p", "x"]).failed(BAD_INPUT, &["hf download"]);
    assert_eq!(names(place.path()), ["file"]);
}

#[test]
fn damage_is_named_and_has_its_code() {
    let place = copy(small());
    let (dir, shard) = (text(place.path()), place.path().join("model.safetensors"));
    let bytes = fs::read(&shard).expect("a shard");
    let run = ["run", dir, "-p", "x"];

    fs::write(&shard, &bytes[..bytes.len() / 2]).expect("a writable place");
    fracbit(&run).failed(BAD_INPUT, &["model.safetensors"]);
    let verified = fracbit(&["verify", dir]);
    assert_eq!(verified.code, FAILED, "{}", verified.err);
    assert!(verified.out.contains("model.safetensors"), "{}", verified.out);

    let mut flipped = bytes.clone();
    let last = flipped.len() - 2;
    flipped[last] ^= 4;
    fs::write(&shard, &flipped).expect("a writable place");
    fracbit(&run).failed(BAD_INPUT, &["model.safetensors", "tensor `", "blake3", "fracbit verify"]);
    let report = fracbit(&["verify", dir, "--json"]);
    assert_eq!(report.code, FAILED);
    let problems = report.json()["problems"].as_array().expect("a list").clone();
    assert!(
        problems.iter().any(|p| p["file"] == "model.safetensors" && p["tensor"].is_string()),
        "{problems:?}"
    );

    fs::write(&shard, &bytes).expect("a writable place");
    fracbit(&["verify", dir]).done();
    fs::remove_file(place.path().join("tokenizer.json")).expect("it was there");
    fracbit(&run).failed(BAD_INPUT, &["tokenizer.json"]);
}

#[test]
fn a_model_that_learned_loses_two_fifths_less() {
    let (demo, stories) = (demo(), stories());
    let place = tempfile::tempdir().expect("a temporary directory");
    let kl = |name: &str, how: &[&str]| {
        let out = place.path().join(name);
        let quantize = ["quantize", text(&demo), "-o", text(&out), "--bits", "2.7", "--palette", "vq"];
        fracbit(&[&quantize[..], how].concat()).done();
        let inspected = fracbit(&["inspect", text(&out), "--json"]).done().json();
        assert!(inspected["bits_per_weight"].as_f64().is_some_and(|b| b <= 2.7), "{inspected}");
        let eval =
            ["eval", text(&out), "--text", text(&stories), "--bos", "--baseline", text(&demo), "--json"];
        fracbit(&eval).done().json()["kl"].as_f64().expect("a divergence")
    };
    let free = kl("free", &["--data-free"]);
    let learned = kl("learned", &["--learn", "--tokens", "2048"]);
    assert!(learned < 0.6 * free, "{learned} after learning, {free} before");
    // What happens when nothing is said but how long it may take: the built-in text, of which some
    // is read.
    let short = kl("short", &["--time", "1s"]);
    assert!(learned < short && short < free, "{short} in a short time, {free} without text");
    assert_eq!(names(place.path()), ["free", "learned", "short"], "nothing is left beside them");
}

#[test]
fn experts_make_up_for_what_was_rounded_before_them() {
    let (Some(model), stories) = (tiny("mixtral"), stories()) else { return };
    let place = tempfile::tempdir().expect("a temporary directory");
    let path = |name: &str| text(&place.path().join(name)).to_owned();
    let (model, moments, stories) = (text(&model), path("moments"), text(&stories));
    fracbit(&["calibrate", model, "-o", &moments, "--tokens", "8192", "--ctx", "256"]).done();
    let divergence = |name: &str, more: &[&str]| {
        let out = path(name);
        let round = ["quantize", model, "-o", &out, "--scheme", "tcq-2", "--calibration", &moments];
        fracbit(&[&round[..], more].concat()).done();
        let measure =
            ["eval", &out, "--text", stories, "--ctx", "256", "--windows", "8", "--baseline", model];
        fracbit(&[&measure[..], &["--json"]].concat()).done().json()["kl"].as_f64().expect("a number")
    };
    let (once, after) = (divergence("once", &[]), divergence("after", &["--sequential"]));
    assert!(after < 0.9 * once, "{after} against {once} nats per token");
}

#[test]
fn budgets_names_and_options_have_their_codes() {
    let (demo, stories) = (demo(), stories());
    let (model, small) = (text(&demo), text(small()));
    let place = tempfile::tempdir().expect("a temporary directory");
    let out = place.path().join("out");
    let out = text(&out);
    for args in [
        &["quantize", model, "-o", out, "--bits", "0.3", "--sensitivity", "prior"][..],
        &["quantize", model, "-o", out, "--size", "10kB", "--sensitivity", "prior"],
        &["plan", model, "--bits", "1.2", "--palette", "nuq"],
        &["plan", model, "--bits", "2", "--keep-head"],
    ] {
        fracbit(args).failed(OUT_OF_REACH, &["out of reach", "bits per weight"]);
    }
    fracbit(&["quantize", small, "-o", out, "--bits", "3"]).failed(BAD_INPUT, &["quantized already"]);
    fracbit(&["quantize", model, "-o", small, "--scheme", "nuq-2"])
        .failed(FAILED, &["should not exist", "--force"]);
    fracbit(&["quantize", model, "-o", "/proc/nothing/out", "--scheme", "nuq-2"])
        .failed(FAILED, &["/proc/nothing"]);
    fracbit(&["quantize", model, "-o", out, "--scheme", "tcq-9"]).failed(USAGE, &["tcq comes at"]);
    fracbit(&["quantize", model, "-o", out]).failed(USAGE, &["--bits"]);
    for time in [["--latency", "20ms"], ["--tokens-per-second", "50"]] {
        fracbit(&["quantize", model, "-o", out, time[0], time[1]])
            .failed(USAGE, &["--profile FILE is missing", "hint: ", "fracbit profile MODEL -o machine.json"]);
    }
    for command in [
        &["quantize", model, "-o", out, "--scheme", "nuq-2"][..],
        &["quantize", model, "-o", out, "--bits", "3"],
        &["quantize", model, "-o", out, "--bits", "3", "--learn"],
        &["calibrate", model, "-o", out],
    ] {
        let capped = [command, &["--max-memory", "1MB"]].concat();
        fracbit(&capped).failed(USAGE, &["--max-memory", "allowed are 1.00 MB"]);
    }
    for (more, words) in [
        (["--data-free", "--tokens=9"], ["--data-free", "--tokens"]),
        (["--time=5m", "--data-free"], ["--time", "--data-free"]),
        (["--time=5", "--seed=1"], ["--time", "90s, 5m or 2h"]),
        (["--text=no-such-file", "--seed=1"], ["no-such-file", "no-such-file"]),
    ] {
        let ran = fracbit(&[&["quantize", model, "-o", out, "--bits", "3"], &more[..]].concat());
        let code = if more[0].starts_with("--text") { BAD_INPUT } else { USAGE };
        ran.failed(code, &words);
    }
    let own = ["quantize", model, "-o", out, "--bits", "3", "--learn", "--separator", "x"];
    fracbit(&own).failed(USAGE, &["--separator", "--text FILE is missing"]);
    fracbit(&["quantize", model, "-o", out, "--bits", "3", "--learn=no-such-file"])
        .failed(BAD_INPUT, &["no-such-file"]);
    let empty = ["quantize", model, "-o", out, "--bits", "3", "--learn=/dev/null"];
    fracbit(&empty).failed(BAD_INPUT, &["/dev/null", "two tokens"]);
    fracbit(&["quantize", model, "-o", out, "--bits", "0.3", "--learn"])
        .failed(OUT_OF_REACH, &["out of reach"]);
    fracbit(&["quantise"]).failed(USAGE, &["quantise"]);
    fracbit(&["eval", small, "--text", "no-such-file"]).failed(BAD_INPUT, &["no-such-file"]);
    fracbit(&["eval", small, "--text", "/dev/null"]).failed(BAD_INPUT, &["/dev/null", "two tokens"]);
    fracbit(&["eval", small, "--text", text(&stories), "--ctx", "513"]).failed(USAGE, &["--ctx", "1 to 512"]);
    fracbit(&["run", small, "-p", "x", "--top-p", "7"]).failed(USAGE, &["--top-p"]);
    assert!(names(place.path()).is_empty(), "nothing was written");
}

/// Every command that takes a GPU says what is missing: the driver here, or with a plain build the
/// kernels.
#[test]
fn a_gpu_that_is_not_there_is_named() {
    let model = text(small());
    let (words, code): (&[&str], i32) = if cfg!(feature = "cuda") {
        if Path::new("/dev/nvidia0").exists() {
            eprintln!("skipped: a GPU is here");
            return;
        }
        (&["cuda: "], FAILED)
    } else {
        (&["without GPU support", "cargo xtask kernels"], USAGE)
    };
    let out = tempfile::tempdir().unwrap();
    let to = out.path().join("out");
    let gpu = ["--device", "cuda"];
    for args in [
        ["run", model, "-p", "Once"].as_slice(),
        &["run", model, "-p", "Once", "--kv", "4"],
        &["quantize", model, "-o", text(&to), "--bits", "3"],
        &["bench", "kernels", "--scheme", "nuq-2"],
        &["bench", "model", "--shape", "tiny"],
        &["bench", "model", "--shape", "tiny", "--f16"],
    ] {
        fracbit(&[args, &gpu].concat()).failed(code, words);
    }
    assert!(!to.exists(), "nothing half-written");
    let pruned = ["quantize", model, "-o", text(&to), "--bits", "3", "--effort", "fast"];
    fracbit(&[&pruned, &gpu[..]].concat()).failed(USAGE, &["--effort", "exact"]);
    fracbit(&["bench", "model", "--shape", "tiny", "--f16"]).failed(USAGE, &["--f16", "--device cuda"]);
}

#[test]
fn a_disk_that_fills_up_is_explained_and_the_run_continued() {
    // A limit of the file size is a disk that ends in the middle of the shard, for any user.
    let demo = demo();
    let place = tempfile::tempdir().expect("a temporary directory");
    let out = place.path().join("out");
    let script = "ulimit -f 200; trap '' XFSZ; exec \"$@\"";
    let args = ["quantize", text(&demo), "-o", text(&out), "--scheme", "nuq-4", "--data-free"];
    let mut shell = Command::new("sh");
    shell.args(["-c", script, "sh", env!("CARGO_BIN_EXE_fracbit")]).args(args);
    finish(&args, &mut shell).failed(FAILED, &["model.safetensors", "needed", "free"]);
    assert!(!out.exists(), "nothing under the final name");
    // What was finished waits; without --resume a run says so and starts over, with it the bytes
    // are those of one run.
    let left = names(place.path());
    assert!(left.len() == 1 && left[0].starts_with("out.partial-"), "{left:?}");
    let ran = fracbit(&[&args[..], &["--resume"]].concat()).done();
    assert!(ran.err.contains("continuing"), "{}", ran.err);
    let whole = place.path().join("whole");
    fracbit(&["quantize", text(&demo), "-o", text(&whole), "--scheme", "nuq-4", "--data-free"]).done();
    for name in names(&whole) {
        assert!(fs::read(whole.join(&name)).unwrap() == fs::read(out.join(&name)).unwrap(), "{name}");
    }
    assert_eq!(names(place.path()).len(), 2, "nothing partial is left");
}

#[test]
fn a_run_that_is_killed_leaves_no_model() {
    let demo = demo();
    let place = tempfile::tempdir().expect("a temporary directory");
    let out = place.path().join("out");
    let args = [
        "quantize",
        text(&demo),
        "-o",
        text(&out),
        "--scheme",
        "tcq-5",
        "--effort",
        "exact",
        "--threads",
        "1",
        "--data-free",
    ];
    let mut child =
        command(&args).stderr(Stdio::null()).stdout(Stdio::null()).spawn().expect("the program starts");
    // The partial directory holds a shard as soon as the first tensors are written; the rest takes
    // many seconds.
    let shard_begun = || {
        let partial = names(place.path()).into_iter().find(|n| n.starts_with("out.partial-"));
        partial.is_some_and(|n| place.path().join(n).join("data/model.safetensors").exists())
    };
    let start = Instant::now();
    while !shard_begun() && start.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(child.try_wait().expect("a child").is_none(), "it is still at work");
    child.kill().expect("it was running");
    child.wait().expect("it ends");
    assert!(!out.exists(), "the final name appears with the finished directory");
    let ran =
        fracbit(&["quantize", text(&demo), "-o", text(&out), "--scheme", "nuq-2", "--data-free"]).done();
    assert!(ran.err.contains("out.partial-") && ran.err.contains("--resume"), "{}", ran.err);
    fracbit(&["verify", text(&out)]).done();
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let args = ["run", text(small()), "-p", "Once", "-n", "64", "-q"];
    let mut child =
        command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
    drop(child.stdout.take());
    let ran = child.wait_with_output().expect("it ends");
    assert!(ran.status.success(), "{:?}: {}", ran.status, String::from_utf8_lossy(&ran.stderr));
    assert_eq!(String::from_utf8_lossy(&ran.stderr), "");
}

#[test]
fn the_quick_demo_tells_the_whole_story() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let home = place.path().join("kept");
    let out = fracbit(&["demo", "--quick", "--keep", text(&home)]).done().out;
    for line in ["original", "4 bits", "3 bits", "2 bits", "The 3-bit model, same prompt"] {
        assert!(out.contains(line), "{line}:\n{out}");
    }
    let made = fracbit(&["inspect", text(&home.join("3bit"))]).done().out;
    assert!(made.contains("fracbit demo --quick (3 bits)") && !made.contains("tcq"), "{made}");
}

#[test]
fn quiet_is_quiet_and_help_has_examples() {
    let ran = fracbit(&["inspect", text(small()), "-q"]).done();
    assert_eq!(ran.err, "");
    for name in [
        "quantize",
        "plan",
        "sensitivity",
        "calibrate",
        "eval",
        "run",
        "chat",
        "inspect",
        "verify",
        "distortion",
        "synth",
        "demo",
    ] {
        let help = fracbit(&[name, "--help"]).done().out;
        assert!(help.contains("Example") && help.contains(&format!("fracbit {name}")), "{name}:\n{help}");
    }
    let version = fracbit(&["--version"]).done().out;
    assert_eq!(version.trim(), concat!("fracbit ", env!("CARGO_PKG_VERSION")));
}

#[test]
fn a_machine_is_measured_and_plans_keep_to_it() {
    let demo = demo();
    let (model, place) = (text(&demo), tempfile::tempdir().expect("a temporary directory"));
    let path = |name: &str| place.path().join(name).to_str().expect("a path in UTF-8").to_owned();
    let (machine, plan, page) = (path("machine.json"), path("plan.json"), path("report.html"));
    let measure = ["profile", model, "-o", &machine, "--threads", "1", "--rounds", "1"];
    let schemes = ["--scheme", "nuq-2", "--scheme", "nuq-4", "--scheme", "nuq-8", "--json"];
    let profile = fracbit(&[&measure[..], &schemes[..]].concat()).done().json();
    assert_eq!(profile["threads"], 1);
    assert!(profile["kernels"].as_array().expect("a list").len() > 10, "{profile}");
    fracbit(&measure).failed(FAILED, &["machine.json", "--force"]);

    let with = |extra: &[&str]| {
        let common = ["plan", model, "--profile", &machine, "--threads", "1", "--sensitivity", "prior"];
        fracbit(&[&common[..], extra].concat())
    };
    let free = with(&["--scheme", "nuq-4", "--json"]).done().json();
    let step = free["speed"]["step_us"].as_f64().expect("a prediction");
    // Between the speeds of 4 and of 2 bits or beyond, whatever this machine makes of them.
    let limit = format!("{}us", 1.02 * step);
    let report = ["--save", &plan, "--html", &page, "--explain", "--json", "--palette", "nuq"];
    let made =
        with(&[&["--latency", &limit, "--pin", "layers.0.*=nuq-4"][..], &report].concat()).done().json();
    assert!(made["speed"]["step_us"].as_f64().expect("a prediction") <= 1.03 * step, "{made}");
    for key in ["explanation", "sizes", "times", "times_unfused", "uniform", "limits"] {
        assert!(made.get(key).is_some(), "{key}");
    }
    let pinned = |l: &&Value| l["name"].as_str().is_some_and(|n| n.starts_with("model.layers.0."));
    let layers = made["layers"].as_array().expect("a list");
    assert!(layers.iter().filter(pinned).all(|l| l["scheme"] == "nuq-4"), "{made}");
    let html = fs::read_to_string(&page).expect("a page was written");
    assert!(html.starts_with("<!doctype html>") && html.contains("ms per decode step"));

    with(&["--latency", "1us"]).failed(OUT_OF_REACH, &["out of reach", "the layer that binds is `model."]);
    // A head at 16 bits was measured, too: the step takes longer than with all of it packed.
    let kept = with(&["--scheme", "nuq-4", "--keep-head", "--json"]).done().json();
    assert!(kept["speed"]["step_us"].as_f64().expect("a prediction") > step, "{kept}");
    let more = fracbit(&[
        "plan",
        model,
        "--bits",
        "4",
        "--sensitivity",
        "prior",
        "--profile",
        &machine,
        "--threads",
        "2",
    ]);
    more.failed(BAD_INPUT, &["machine.json", "number of threads (1)", "measure again"]);

    // By hand: a good edit, and bad ones.
    let edit = |change: &dyn Fn(&mut Value)| {
        let mut document: Value =
            serde_json::from_str(&fs::read_to_string(&plan).expect("saved")).expect("a plan");
        change(&mut document);
        fs::write(path("edited.json"), document.to_string()).expect("a writable place");
        fracbit(&["plan", model, "--plan", &path("edited.json"), "--profile", &machine, "--threads", "1"])
    };
    edit(&|_| ()).done();
    let up = |p: &mut Value, scheme: &str| p["layers"][12]["scheme"] = scheme.into();
    edit(&|p| {
        p["fused"] = serde_json::json!([]);
        up(p, "nuq-8");
    })
    .done();
    edit(&|p| {
        p["fused"] = serde_json::json!([]);
        up(p, "nuq-3");
    })
    .failed(BAD_INPUT, &["nuq-3 has no measured kernel on this machine"]);
    edit(&|p| p["layers"][12]["name"] = "model.layers.99.mlp.up_proj".into())
        .failed(BAD_INPUT, &["edited.json: layer `model.layers.99.mlp.up_proj` is not in the model"]);
    edit(&|p| p["layers"][12]["shceme"] = "nuq-8".into()).failed(BAD_INPUT, &["unknown field `shceme`"]);
    fracbit(&["bench", "targets", "--shape", "tiny", "--profile", &machine, "--threads", "1"])
        .failed(BAD_INPUT, &["measure this one"]);
}

#[test]
fn the_library_writes_what_the_command_writes() {
    let (demo, place) = (demo(), tempfile::tempdir().expect("a temporary directory"));
    let [by_command, by_library] = ["command", "library"].map(|name| place.path().join(name));
    let args = ["quantize", text(&demo), "-o", text(&by_command), "--bits", "3", "--tokens", "1024"];
    fracbit(&[&args[..], &["--effort", "fast"]].concat()).done();
    let options = CompressOptions {
        tokens: 1024,
        rounders: Rounders::new(Effort::Fast),
        ..CompressOptions::new(Target::Bits(3.0))
    };
    fracbit::compress(&demo, &by_library, &options, &Quiet).expect("the library works");
    assert_eq!(names(&by_command), names(&by_library));
    let read = |dir: &Path, name: &str| fs::read(dir.join(name)).expect("it was written");
    for name in ["model.safetensors", "config.json", "tokenizer.json"] {
        assert!(read(&by_command, name) == read(&by_library, name), "{name}");
    }
    let own = CompressOptions { force: true, ..options };
    let original = copy(&demo);
    let refused = fracbit::compress(original.path(), original.path(), &own, &Quiet).expect_err("it is read");
    assert!(refused.to_string().contains("should be apart from"), "{refused}");
    assert_eq!(names(original.path()), names(&demo));
}
