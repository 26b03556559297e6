//! `/v1/embeddings`: vectors of texts.

use std::fs;
use std::thread;

use fracbit::Opened;
use fracbit_io::{EncodeOptions, Pooling, PoolingMode};
use fracbit_model::{KvType, Model, RotationMode, StateOptions};
use fracbit_server::{Loaded, Options};
use fracbit_tests::{Source, load, reference, references, relative};
use serde_json::{Value, json};

use crate::client::{
    COMPLETIONS, ask, complete, loaded, metric, model, options, prompts, send, serve, serve_loaded,
    tokenizer, until,
};

const EMBEDDINGS: &str = "POST /v1/embeddings";

/// Vectors of an answer.
fn vectors(answer: &Value) -> Vec<Vec<f32>> {
    let data = answer["data"].as_array().unwrap_or_else(|| panic!("vectors: {answer}"));
    let vector = |(i, one): (usize, &Value)| {
        assert_eq!((&one["index"], &one["object"]), (&json!(i), &json!("embedding")));
        serde_json::from_value(one["embedding"].clone()).expect("numbers")
    };
    data.iter().enumerate().map(vector).collect()
}

/// What the library makes of tokens.
fn made(model: &Model, kv: KvType, pooling: Pooling, tokens: &[u32]) -> Vec<f32> {
    let mut state = model.state(&StateOptions { context: Some(tokens.len()), kv, ..StateOptions::default() });
    let mut rows = Vec::new();
    model.forward(&mut state, tokens, &mut rows).expect("tokens of the model");
    model.leave(&mut rows).expect("a model that gives them");
    let mut pool = pooling.summary();
    pool.push(&rows, model.config().hidden_size);
    pool.vector()
}

/// Against float64, through the socket: nothing is quantized.
#[test]
fn vectors_are_means_of_the_checkpoints_hidden_states() {
    for reference in references().into_iter().filter(|r| ["smollm2", "llama3", "gemma3"].contains(&&*r.name))
    {
        let opened = Opened::new(&reference.dir).expect("a reference checkpoint");
        let kernels = fracbit::kernels().expect("FRACBIT_ISA is good");
        let model = opened.model(&kernels, true).expect("a good checkpoint");
        let pooling = Ok(Pooling { normalize: false, ..Pooling::default() });
        let options = Options { kv: KvType::F32, ..options() };
        let first = loaded(model, opened.tokenizer().expect("its tokenizer"));
        let serving = serve_loaded(Loaded { context: 64, pooling, ..first }, options);
        let body = json!({ "input": reference.tokens });
        let answer = ask(serving.address, EMBEDDINGS, "", &body).json();
        assert_eq!(answer["usage"]["prompt_tokens"], reference.tokens.len(), "{answer}");
        let raw = fs::read(reference.dir.join("hidden.f32")).expect("committed");
        let rows: Vec<f64> =
            raw.as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect();
        let width = opened.config.hidden_size;
        let count = reference.tokens.len() as f64;
        let mean = |j: usize| rows.iter().skip(j).step_by(width).sum::<f64>() / count;
        let want: Vec<f32> = (0..width).map(|j| mean(j) as f32).collect();
        let error = relative(&vectors(&answer)[0], &want);
        assert!(error < 2e-5, "{}: {error}", reference.name);
    }
}

/// A quantized directory brings what it takes: the gain that its head has, and the pooling.
#[test]
fn quantized_directories_pool_as_their_checkpoints_do() {
    let reference = reference("llama3");
    let place = tempfile::tempdir().expect("a temporary directory");
    let original = place.path().join("original");
    fs::create_dir_all(original.join("1_Pooling")).expect("a writable place");
    for entry in fs::read_dir(&reference.dir).expect("a readable directory").map(|e| e.expect("an entry")) {
        fs::copy(entry.path(), original.join(entry.file_name())).expect("a writable place");
    }
    let modules = r#"[{"type": "sentence_transformers.models.Transformer", "path": ""},
        {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]"#;
    fs::write(original.join("modules.json"), modules).expect("a writable place");
    let config = original.join("1_Pooling/config.json");
    fs::write(&config, r#"{"pooling_mode_lasttoken": true}"#).expect("a writable place");
    let raw = fs::read(reference.dir.join("hidden.f32")).expect("committed");
    let want: Vec<f32> = raw.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    for mode in RotationMode::ALL {
        let source = Source::open(&original, mode, 3).expect("a good checkpoint");
        let plan = source.uniform("nuq-6").or_else(|_| source.uniform("int-8")).expect("a wide scheme");
        let out = place.path().join(mode.name());
        source.quantize(&plan, &out, false).expect("a good plan");
        let model = load(&out).expect("just written");
        let width = model.config().hidden_size;
        let pooling = Pooling::read(&out, width).expect("just written").expect("carried along");
        assert_eq!(pooling, Pooling { mode: PoolingMode::LastToken, normalize: false });
        let found = made(&model, KvType::F32, pooling, &reference.tokens);
        let error = relative(&found, &want[want.len() - width..]);
        assert!(error < 0.1, "{mode}: {error}");
        // As an earlier version wrote it: the gain is in the head, and nobody knows it.
        let path = out.join("config.json");
        let mut config: Value =
            serde_json::from_slice(&fs::read(&path).expect("just written")).expect("JSON");
        let block = config["quantization_config"].as_object_mut().expect("its block");
        assert_eq!(block.remove("final_factors").is_some(), mode != RotationMode::None, "{mode}");
        fs::write(&path, config.to_string()).expect("a writable place");
        fs::remove_file(out.join("manifest.json")).expect("just written");
        let opened = Opened::new(&out).expect("a good directory");
        let model = opened.model(&fracbit::kernels().expect("FRACBIT_ISA is good"), false);
        let refused = model.expect("a good directory").leave(&mut vec![1.0; width]);
        assert_eq!(refused.is_ok(), mode == RotationMode::None, "{mode}: {refused:?}");
    }
    // What is not done is said before the work.
    fs::write(&config, r#"{"pooling_mode_weightedmean_tokens": true}"#).expect("a writable place");
    let source = Source::open(&original, RotationMode::Online, 3).expect("a good checkpoint");
    let plan = source.uniform("int-8").expect("a wide scheme");
    let refused = source.quantize(&plan, &place.path().join("refused"), false).expect_err("another mode");
    assert!(refused.to_string().contains("weightedmean"), "{refused}");
}

#[test]
fn vectors_are_those_of_the_library_whatever_else_is_served() {
    let serving = serve(options(), tokenizer(None));
    let address = serving.address;
    let texts = prompts();
    let tokens = |text: &String| tokenizer(None).encode(text, EncodeOptions::default()).expect("a text");
    let want: Vec<Vec<f32>> =
        texts.iter().map(|text| made(model(), KvType::I16, Pooling::default(), &tokens(text))).collect();
    // Their beginnings are kept, and all of a text counts nevertheless.
    complete(address, &json!({ "prompt": texts[0], "max_tokens": 3, "seed": 1 }));
    let counted: usize = texts.iter().map(|text| tokens(text).len()).sum();
    thread::scope(|scope| {
        for turn in 0..3 {
            let (texts, want) = (&texts, &want);
            scope.spawn(move || {
                let body = json!({ "model": "demo", "input": texts });
                let answer = ask(address, EMBEDDINGS, "", &body).json();
                assert_eq!((&answer["object"], &answer["model"]), (&json!("list"), &json!("demo")));
                assert_eq!(answer["usage"], json!({ "prompt_tokens": counted, "total_tokens": counted }));
                assert_eq!(vectors(&answer), *want, "{turn}");
                complete(address, &json!({ "prompt": texts[turn], "max_tokens": 9, "seed": 1 }));
            });
        }
    });
    let norm: f32 = want[0].iter().map(|x| x * x).sum();
    assert!((norm - 1.0).abs() < 1e-5, "{norm}");
    // The same as tokens, and as bytes.
    let answer = ask(address, EMBEDDINGS, "", &json!({ "input": tokens(&texts[1]) })).json();
    assert_eq!(vectors(&answer)[0], want[1]);
    let lists = [tokens(&texts[1]), tokens(&texts[2])];
    let answer = ask(address, EMBEDDINGS, "", &json!({ "input": lists })).json();
    assert_eq!(vectors(&answer), want[1..3]);
    let body = json!({ "input": texts[1], "encoding_format": "base64" });
    let answer = ask(address, EMBEDDINGS, "", &body).json();
    let bytes = answer["data"][0]["embedding"].as_str().expect("base64");
    assert_eq!(bytes.len(), (4 * want[1].len()).div_ceil(3) * 4);
    until(address, "fracbit_texts_running", 0.0);
}

#[test]
fn what_has_no_vector_is_refused() {
    let serving = serve(options(), tokenizer(None));
    let long = "word ".repeat(500);
    for (body, status, word) in [
        (json!({ "input": [] }), 400, "at least one"),
        (json!({ "input": "" }), 400, "at least one token"),
        (json!({ "input": ["a", ""] }), 400, "(text 1)"),
        (json!({ "input": long }), 400, "384"),
        (json!({ "input": [1, 99_999] }), 400, "99999"),
        (json!({ "input": "a", "dimensions": 8 }), 400, "`dimensions`"),
        (json!({ "input": "a", "model": "other" }), 404, "`demo`"),
        (json!({ "input": vec!["a"; 3000] }), 400, "texts"),
    ] {
        let answer = ask(serving.address, EMBEDDINGS, "", &body);
        let said = answer.json()["error"]["message"].as_str().unwrap_or_default().to_owned();
        assert!(answer.status == status && said.contains(word), "{body}: {answer:?}");
    }
    let pooling = Err("`Dense` is not done".to_owned());
    let first = loaded(model().clone(), tokenizer(None));
    let other = serve_loaded(Loaded { pooling, ..first }, options());
    let answer = ask(other.address, EMBEDDINGS, "", &json!({ "input": "a" }));
    assert!(answer.status == 501 && answer.body.contains("`Dense`"), "{answer:?}");
    assert_eq!(ask(other.address, COMPLETIONS, "", &json!({ "prompt": "a", "max_tokens": 1 })).status, 200);
}

#[test]
fn who_goes_away_takes_the_texts_along() {
    let words = "the dog and the cat ".repeat(60);
    let serving = serve(Options { slots: 1, ..options() }, tokenizer(None));
    let address = serving.address;
    let body = json!({ "input": vec![words.as_str(); 100] }).to_string();
    let asked = send(address, EMBEDDINGS, "", &body);
    until(address, "fracbit_texts_running", 1.0);
    drop(asked);
    until(address, "fracbit_texts_waiting", 0.0);
    until(address, "fracbit_texts_running", 0.0);
    assert!(metric(address, "fracbit_texts_total{outcome=\"disconnected\"}") > 0.0);
}
