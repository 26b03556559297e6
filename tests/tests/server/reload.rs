//! Models that take each other's place while texts are written.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::{Duration, Instant};

use fracbit::Opened;
use fracbit_model::{Linear, LinearId, Model, SampleConfig};
use fracbit_server::Loaded;
use fracbit_tests::reference;
use serde_json::{Value, json};
use tokio::sync::mpsc::unbounded_channel;

use crate::client::{
    COMPLETIONS, PATIENCE, ask, complete, loaded, metric, options, receive, send, serve_again, serve_loaded,
    until,
};

const DONE: &str = "fracbit_reloads_total{outcome=\"done\"}";
const FAILED: &str = "fracbit_reloads_total{outcome=\"failed\"}";

/// A reference model, and what is there as long as it is.
fn model(name: &str) -> (Loaded<Model>, Weak<Linear>) {
    let opened = Opened::new(&reference(name).dir).expect("a reference checkpoint");
    let kernels = fracbit::kernels().expect("FRACBIT_ISA is good");
    let mut model = opened.model(&kernels, true).expect("a good checkpoint");
    let stored = Linear::stored(Arc::clone(&opened.checkpoint), "model.embed_tokens.weight", None);
    let embedding = Arc::new(stored.expect("a good checkpoint"));
    let alive = Arc::downgrade(&embedding);
    model.replace(LinearId::Embed, embedding).expect("the same matrix");
    let first = loaded(model, opened.tokenizer().expect("its tokenizer"));
    (Loaded { context: 1 << 14, ..first }, alive)
}

fn body(most: usize) -> Value {
    json!({ "prompt": [5, 9, 7, 30, 11, 8], "max_tokens": most, "seed": 1, "ignore_eos": true })
}

/// The text of a model that is served alone.
fn alone(name: &str, most: usize) -> String {
    let serving = serve_loaded(model(name).0, options());
    complete(serving.address, &body(most))
}

fn streamed(address: SocketAddr, most: usize) -> thread::JoinHandle<String> {
    let mut body = body(most);
    body["stream"] = true.into();
    let stream = send(address, COMPLETIONS, "", &body.to_string());
    let mut lines = BufReader::new(stream);
    let mut all = String::new();
    while !all.contains("data: ") {
        assert!(lines.read_line(&mut all).expect("a first piece in time") > 0, "{all}");
    }
    thread::spawn(move || {
        while lines.read_line(&mut all).expect("a whole stream") > 0 {}
        all
    })
}

#[test]
fn a_model_takes_the_place_of_another_under_running_texts() {
    let [few, many] = [30, 3000];
    let (first, alive) = model("smollm2");
    let [one, other] = ["smollm2", "qwen3"].map(|name| alone(name, few));
    let long = alone("smollm2", many);
    assert_ne!(one, other);
    // What it says changes no text as long as nobody asks for XTC.
    let other_sampling = SampleConfig { xtc_threshold: 0.25, ..model("smollm2").0.sampling };
    let models = Mutex::new(VecDeque::from([
        Err("config.json is broken".to_owned()),
        Ok(model("qwen3").0),
        // What no engine can be made of.
        Ok(Loaded { pages: Some(1), ..model("smollm2").0 }),
        Ok(Loaded { sampling: other_sampling, ..model("smollm2").0 }),
    ]));
    let load = move || models.lock().expect("no panic").pop_front().expect("four are asked for");
    let (ask_again, reloads) = unbounded_channel();
    let serving = serve_again(first, options(), load, reloads);
    let address = serving.address;
    let running = streamed(address, many);
    let check = |want: &str, done: f64, failed: f64| {
        ask_again.send(()).expect("a server");
        until(address, DONE, done);
        until(address, FAILED, failed);
        // The same prompt: nothing that another model kept of it is used.
        for _ in 0..2 {
            assert_eq!(complete(address, &body(few)), want);
        }
        assert_eq!(ask(address, "GET /health", "", &Value::Null).status, 200);
        let models = ask(address, "GET /v1/models", "", &Value::Null).json();
        assert_eq!(
            (&models["data"][0]["id"], models["data"].as_array().map(Vec::len)),
            (&json!("demo"), Some(1))
        );
    };
    check(&one, 0.0, 1.0);
    check(&other, 1.0, 1.0);
    check(&other, 1.0, 2.0);
    let said = running.join().expect("a stream");
    assert!(said.contains("[DONE]"), "{said}");
    let pieces = said.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|line| *line != "[DONE]");
    let text: String = pieces
        .filter(|line| line.starts_with('{'))
        .filter_map(|line| {
            let event: Value = serde_json::from_str(line).expect("JSON");
            event["choices"][0]["text"].as_str().map(str::to_owned)
        })
        .collect();
    assert_eq!(text, long, "begun on the first model, and ended there");
    // Nobody needs it any more.
    let start = Instant::now();
    while alive.strong_count() > 0 {
        assert!(start.elapsed() < PATIENCE, "the first model is never freed");
        thread::sleep(Duration::from_millis(5));
    }
    let threshold = || {
        let props = ask(address, "GET /props", "", &Value::Null).json();
        props["default_generation_settings"]["params"]["xtc_threshold"].clone()
    };
    assert_eq!(threshold(), 0.1);
    check(&one, 2.0, 2.0);
    assert_eq!(threshold(), 0.25, "that of the model");
    until(address, "fracbit_texts_running", 0.0);
    let held = metric(address, "fracbit_cache_pages{state=\"held\"}");
    assert!(held < 64.0, "pages of one model alone are counted: {held}");
}

/// Requests that come all the time, through several models: each gets what one of them writes.
#[test]
fn no_request_is_lost_between_two_models() {
    let texts = ["smollm2", "qwen3"].map(|name| alone(name, 12));
    let turns = ["qwen3", "smollm2", "qwen3", "smollm2", "qwen3"];
    let models = Mutex::new(turns.map(|name| Ok(model(name).0)).into_iter().collect::<VecDeque<_>>());
    let load = move || models.lock().expect("no panic").pop_front().expect("five are asked for");
    let (ask_again, reloads) = unbounded_channel();
    let serving = serve_again(model("smollm2").0, options(), load, reloads);
    let address = serving.address;
    thread::scope(|scope| {
        for _ in 0..3 {
            let texts = &texts;
            scope.spawn(move || {
                while metric(address, DONE) < turns.len() as f64 {
                    let answer = receive(send(address, COMPLETIONS, "", &body(12).to_string()));
                    assert_eq!(answer.status, 200, "{answer:?}");
                    let text = answer.json()["choices"][0]["text"].as_str().expect("a text").to_owned();
                    assert!(texts.contains(&text), "{text}");
                }
            });
        }
        for done in 1..=turns.len() {
            ask_again.send(()).expect("a server");
            until(address, DONE, done as f64);
        }
    });
    assert_eq!(complete(address, &body(12)), texts[1]);
    assert_eq!(metric(address, "fracbit_texts_total{outcome=\"given_up\"}"), 0.0);
}
