//! What requests may ask for, against what the model says when it is asked directly.

use std::collections::BTreeMap;
use std::thread;

use fracbit_io::EncodeOptions;
use fracbit_model::{Adjustments, GenerateOptions, Generation, SampleConfig, Sampler, StateOptions};
use fracbit_server::Options;
use serde_json::{Value, json};

use crate::client::{
    CHAT, COMPLETIONS, Serving, TEMPLATE, ask, complete, endless, metric, model, options, prompts, serve,
    tokenizer, write,
};

fn encode(text: &str) -> Vec<u32> {
    tokenizer(None).encode(text, EncodeOptions::default()).expect("a text")
}

/// Logarithms of the probabilities of all tokens behind each token of a text, by definition.
fn evaluate(tokens: &[u32]) -> Vec<Vec<f64>> {
    let mut state = model().state(&StateOptions { context: Some(384), ..StateOptions::default() });
    let (mut hidden, mut logits) = (Vec::new(), Vec::new());
    model().forward(&mut state, tokens, &mut hidden).expect("a good model");
    model().logits(&mut state, &hidden, &mut logits).expect("a good model");
    let row = |row: &[f32]| {
        let sum = row.iter().map(|&logit| f64::from(logit).exp()).sum::<f64>().ln();
        row.iter().map(|&logit| f64::from(logit) - sum).collect()
    };
    logits.chunks(model().config().vocab_size).map(row).collect()
}

/// The tokens that the library writes.
fn written(prompt: &[u32], sampler: Sampler, most: usize, end_tokens: Vec<u32>) -> Vec<u32> {
    let mut state = model().state(&StateOptions { context: Some(384), ..StateOptions::default() });
    let options = GenerateOptions { max_tokens: Some(most), end_tokens, ..GenerateOptions::default() };
    let mut sampler = sampler;
    Generation::new(model(), &mut state, &mut sampler, prompt, options)
        .expect("a prompt")
        .map(|token| token.expect("a good model"))
        .collect()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().expect("a list").iter().map(|n| n.as_f64().expect("a number")).collect()
}

fn answered(serving: &Serving, body: &Value) -> Value {
    let answer = ask(serving.address, COMPLETIONS, "", body);
    assert_eq!(answer.status, 200, "{body}: {answer:?}");
    answer.json()
}

/// What the evaluation harness of EleutherAI sends for the likelihood of a continuation.
#[test]
fn probabilities_of_prompts_are_those_of_the_model() {
    let serving = serve(options(), tokenizer(None));
    let tokens = encode(&prompts()[3]);
    assert!(tokens.len() > 100, "more than some rows");
    let rows = evaluate(&tokens);
    // The second time all of it is in the cache.
    for (most, n) in [(1, 1), (0, 1), (1, 2)] {
        let body = json!({
            "model": "demo", "prompt": [tokens], "temperature": 0, "max_tokens": most, "logprobs": 2,
            "seed": 1234, "echo": true, "n": n,
        });
        let answer = answered(&serving, &body);
        for choice in answer["choices"].as_array().expect("choices") {
            let found = &choice["logprobs"];
            let logprobs = found["token_logprobs"].as_array().expect("a list");
            assert_eq!(logprobs.len(), tokens.len() + most);
            assert!(logprobs[0].is_null() && found["top_logprobs"][0].is_null());
            for (i, row) in rows.iter().enumerate().take(tokens.len() + most - 1) {
                let best = (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b])).expect("a vocabulary");
                let token = tokens.get(i + 1).map_or(best, |&token| token as usize);
                let said = logprobs[i + 1].as_f64().expect("a number");
                assert!((said - row[token]).abs() < 1e-9, "token {i}: {said} {}", row[token]);
                let top = found["top_logprobs"][i + 1].as_object().expect("an object");
                let values: Vec<f64> = top.values().map(|p| p.as_f64().expect("a number")).collect();
                // The harness takes a token for the likeliest where this is equal.
                assert_eq!(values.iter().copied().fold(f64::NEG_INFINITY, f64::max) == said, token == best);
                assert!((values[0] - row[best]).abs() < 1e-9 && (2..=3).contains(&top.len()), "{top:?}");
            }
            let text = choice["text"].as_str().expect("a text");
            let spelled: Vec<&str> = found["tokens"]
                .as_array()
                .expect("a list")
                .iter()
                .map(|t| t.as_str().expect("a text"))
                .collect();
            assert_eq!(spelled.concat(), text);
            let mut offset = 0;
            for (token, at) in spelled.iter().zip(numbers(&found["text_offset"])) {
                assert_eq!(offset as f64, at);
                offset += token.chars().count();
            }
            assert!(text.starts_with(&prompts()[3]), "{text}");
            assert_eq!(choice["finish_reason"], "length");
        }
        let usage = &answer["usage"];
        assert_eq!(
            (&usage["prompt_tokens"], &usage["completion_tokens"]),
            (&json!(tokens.len()), &json!(most * n))
        );
    }
}

#[test]
fn probabilities_of_what_is_written_are_those_of_the_model_whatever_picks() {
    let serving = serve(options(), tokenizer(Some(TEMPLATE)));
    // Repeats itself, so that some is guessed ahead.
    let prompt = encode("the dog and the cat and the dog and the cat and the dog and the");
    let config = SampleConfig { temperature: 0.3, top_k: 9, seed: 6, ..SampleConfig::default() };
    let rules = Adjustments { prompt: prompt.len(), presence_penalty: 0.2, ..Adjustments::default() };
    let tokens = written(&prompt, Sampler::new(config).expect("good").adjusted(rules), 40, Vec::new());
    let rows = evaluate(&[&prompt[..], &tokens].concat());
    let mut body = json!({
        "prompt": prompt, "max_tokens": 40, "logprobs": 0, "temperature": 0.3, "top_k": 9, "top_p": 1, "seed": 6,
        "presence_penalty": 0.2, "ignore_eos": true,
    });
    let whole = answered(&serving, &body);
    let logprobs = &whole["choices"][0]["logprobs"];
    let said = numbers(&logprobs["token_logprobs"]);
    assert_eq!(said.len(), tokens.len());
    for (i, (said, token)) in said.iter().zip(&tokens).enumerate() {
        let want = rows[prompt.len() - 1 + i][*token as usize];
        assert!((said - want).abs() < 1e-9, "token {i}: {said} {want}");
    }
    assert!(logprobs["top_logprobs"].as_array().expect("a list").iter().all(Value::is_null));
    let guessed = whole["usage"]["completion_tokens_details"]["accepted_prediction_tokens"].as_u64();
    assert!(guessed.is_some_and(|n| n > 0), "{whole}");
    // A stream says the same, piece by piece.
    body["stream"] = true.into();
    let events = ask(serving.address, COMPLETIONS, "", &body).events();
    let pieces: Vec<f64> = events
        .iter()
        .filter_map(|e| e["choices"][0]["logprobs"]["token_logprobs"].as_array())
        .flat_map(|all| all.iter().map(|p| p.as_f64().expect("a number")))
        .collect();
    assert_eq!(pieces, said);
    // And a chat, in its own form.
    let messages = json!([{ "role": "user", "content": "a" }]);
    let body = json!({
        "messages": messages, "max_tokens": 8, "temperature": 0, "logprobs": true, "top_logprobs": 2, "ignore_eos": true,
    });
    let answer = ask(serving.address, CHAT, "", &body).json();
    let choice = &answer["choices"][0];
    let content = choice["logprobs"]["content"].as_array().expect("a list");
    assert_eq!(content.len(), 8);
    for entry in content {
        assert_eq!(
            (&entry["logprob"], &entry["token"]),
            (&entry["top_logprobs"][0]["logprob"], &entry["top_logprobs"][0]["token"])
        );
        let bytes: Vec<u8> = serde_json::from_value(entry["bytes"].clone()).expect("bytes");
        assert_eq!(String::from_utf8(bytes).ok().as_deref(), entry["token"].as_str());
        assert_eq!(entry["top_logprobs"].as_array().map(Vec::len), Some(2));
    }
    let spelled: String = content.iter().filter_map(|entry| entry["token"].as_str()).collect();
    assert_eq!(choice["message"]["content"], spelled);
}

#[test]
fn several_texts_of_a_request_are_those_of_several_requests() {
    let serving = serve(options(), tokenizer(Some(TEMPLATE)));
    let all = prompts();
    let mut body = json!({ "prompt": all[..3], "n": 2, "max_tokens": 12, "seed": 40, "temperature": 0.9 });
    let answer = answered(&serving, &body);
    let choices = answer["choices"].as_array().expect("choices");
    let mut want = Vec::new();
    for prompt in &all[..3] {
        for seed in [40, 41] {
            let one = json!({ "prompt": prompt, "max_tokens": 12, "seed": seed, "temperature": 0.9 });
            want.push(complete(serving.address, &one));
        }
    }
    for (i, (choice, want)) in choices.iter().zip(&want).enumerate() {
        assert_eq!((&choice["index"], &choice["text"]), (&json!(i), &json!(want)));
    }
    let prompt_tokens: usize = all[..3].iter().map(|prompt| encode(prompt).len()).sum();
    assert_eq!((choices.len(), &answer["usage"]["prompt_tokens"]), (6, &json!(prompt_tokens)));
    // Of several texts the likeliest ones are told, the best first, by the means of their tokens.
    for echo in [false, true] {
        let mut tried = json!({ "prompt": all[0], "n": 4, "max_tokens": 12, "seed": 40, "temperature": 0.9, "logprobs": 0, "echo": echo });
        let every = answered(&serving, &tried);
        let mean = |choice: &Value| {
            let scores = choice["logprobs"]["token_logprobs"].as_array().expect("a list");
            let of_text = &scores[if echo { encode(&all[0]).len() } else { 0 }..];
            of_text.iter().filter_map(Value::as_f64).sum::<f64>() / of_text.len() as f64
        };
        let mut want: Vec<&Value> = every["choices"].as_array().expect("choices").iter().collect();
        want.sort_by(|a, b| mean(b).total_cmp(&mean(a)));
        tried["best_of"] = 4.into();
        tried["n"] = 2.into();
        for logprobs in [json!(0), Value::Null] {
            tried["logprobs"] = logprobs.clone();
            let best = answered(&serving, &tried);
            let told = best["choices"].as_array().expect("choices");
            let count = |answer: &Value| answer["usage"]["completion_tokens"].clone();
            assert_eq!((told.len(), count(&best)), (2, count(&every)), "{best}");
            for (i, (choice, want)) in told.iter().zip(&want).enumerate() {
                assert_eq!((&choice["index"], &choice["text"]), (&json!(i), &want["text"]));
                let told = if logprobs.is_null() { &logprobs } else { &want["logprobs"] };
                assert_eq!(&choice["logprobs"], told);
            }
        }
    }
    body["stream"] = true.into();
    body["echo"] = true.into();
    body["stream_options"] = json!({ "include_usage": true });
    let events = ask(serving.address, COMPLETIONS, "", &body).events();
    let mut texts = vec![String::new(); 6];
    let mut finished = 0;
    for choice in events.iter().filter_map(|event| event["choices"].get(0)) {
        texts[choice["index"].as_u64().expect("a number") as usize] +=
            choice["text"].as_str().expect("a text");
        finished += usize::from(!choice["finish_reason"].is_null());
    }
    let echoed: Vec<String> =
        want.iter().enumerate().map(|(i, text)| format!("{}{text}", all[i / 2])).collect();
    assert_eq!((texts, finished), (echoed, 6));
    let chat =
        json!({ "messages": [{ "role": "user", "content": "a" }], "n": 2, "max_tokens": 5, "stream": true });
    let events = ask(serving.address, CHAT, "", &chat).events();
    let roles = events.iter().filter(|e| e["choices"][0]["delta"]["role"] == "assistant").count();
    assert_eq!(roles, 2);
}

#[test]
fn logits_are_changed_as_asked_alone_and_together() {
    let serving = serve(options(), endless());
    let prompt = encode("the dog and the cat and the dog and the cat and the dog and the");
    let the = encode(" the")[0];
    let cases = [
        json!({ "presence_penalty": 1.5 }),
        json!({ "frequency_penalty": 0.4, "temperature": 0 }),
        json!({ "frequency_penalty": -0.3 }),
        json!({ "logit_bias": { the.to_string(): -100, "70": 2.5 } }),
        json!({ "logit_bias": { "70": 100 }, "repeat_penalty": 1.2 }),
        json!({ "typical_p": 0.4 }),
        json!({ "xtc_probability": 0.7, "xtc_threshold": 0.05 }),
        json!({ "mirostat": 2, "mirostat_tau": 3, "mirostat_eta": 0.3, "top_p": 0.95 }),
        json!({ "dry_multiplier": 3, "dry_allowed_length": 1, "dry_sequence_breakers": [" the"] }),
    ];
    let number = |case: &Value, field: &str, or: f32| case[field].as_f64().map_or(or, |n| n as f32);
    let want = |i: usize, case: &Value| {
        let config = SampleConfig {
            temperature: number(case, "temperature", 0.8),
            top_p: 0.95,
            repetition_penalty: number(case, "repeat_penalty", 1.0),
            typical_p: number(case, "typical_p", 1.0),
            xtc_probability: number(case, "xtc_probability", 0.0),
            xtc_threshold: number(case, "xtc_threshold", 0.1),
            mirostat_tau: number(case, "mirostat_tau", 0.0),
            mirostat_eta: number(case, "mirostat_eta", 0.1),
            dry_multiplier: number(case, "dry_multiplier", 0.0),
            dry_allowed_length: 1,
            seed: i as u64,
            ..SampleConfig::default()
        };
        let bias: BTreeMap<u32, f32> = serde_json::from_value(case["logit_bias"].clone()).unwrap_or_default();
        let rules = Adjustments {
            prompt: prompt.len(),
            presence_penalty: number(case, "presence_penalty", 0.0),
            frequency_penalty: number(case, "frequency_penalty", 0.0),
            bias,
            breakers: if i == 8 { tokenizer(None).tokens_with(&[" the"]) } else { Vec::new() },
            ..Adjustments::default()
        };
        let sampler = Sampler::new(config).expect("good settings").adjusted(rules);
        tokenizer(None).decode(&written(&prompt, sampler, 40, Vec::new()), true).expect("tokens")
    };
    let asked = |i: usize, case: &Value| {
        let mut body = case.clone();
        body["prompt"] = json!(prompt);
        body["max_tokens"] = 40.into();
        body["seed"] = i.into();
        complete(serving.address, &body)
    };
    for (i, case) in cases.iter().enumerate() {
        let want = want(i, case);
        assert_eq!(asked(i, case), want, "alone: {case}");
        assert_ne!(want, asked(i, &json!({})), "{case} changes something");
    }
    assert!(!want(3, &cases[3]).contains(" the "), "what is barred is not said");
    thread::scope(|scope| {
        for (i, case) in cases.iter().enumerate() {
            scope.spawn(move || assert_eq!(asked(i, case), want(i, case), "together: {case}"));
        }
    });
}

#[test]
fn texts_end_as_late_as_asked() {
    let serving = serve(options(), tokenizer(None));
    let end = tokenizer(None).eos_ids()[0];
    // The end is all that it would say.
    let mut body = json!({ "prompt": "Once", "max_tokens": 9, "temperature": 0, "logit_bias": { end.to_string(): 100 } });
    let ended = |body: &Value| {
        let answer = answered(&serving, body);
        let finish = answer["choices"][0]["finish_reason"].as_str().expect("a reason").to_owned();
        (finish, answer["usage"]["completion_tokens"].as_u64().expect("a count"))
    };
    assert_eq!(ended(&body), ("stop".to_owned(), 1));
    body["min_tokens"] = 5.into();
    assert_eq!(ended(&body), ("stop".to_owned(), 6));
    body["ignore_eos"] = true.into();
    assert_eq!(ended(&body), ("length".to_owned(), 9));
    body["stop_token_ids"] = json!([end]);
    assert_eq!(ended(&body), ("stop".to_owned(), 6));
    // Stop texts count from there on as well; the end token has its probability, too.
    let plain = json!({ "prompt": "Once upon a time", "max_tokens": 20, "temperature": 0, "logprobs": 0 });
    let text = complete(serving.address, &plain);
    let stop = &text[..2];
    let again = text[2..].find(stop);
    let mut late = plain.clone();
    late["stop"] = stop.into();
    assert_eq!(complete(serving.address, &late), "");
    late["min_tokens"] = 2.into();
    let said = complete(serving.address, &late);
    assert!(said.len() > 2 && text.starts_with(&said), "{said} {again:?}");
    body =
        json!({ "prompt": "Once", "temperature": 0, "logprobs": 1, "logit_bias": { end.to_string(): 100 } });
    let logprobs = &answered(&serving, &body)["choices"][0]["logprobs"];
    assert_eq!(numbers(&logprobs["token_logprobs"]).len(), 1);
    // What is written by a stop text is scored up to it.
    let mut cut = plain;
    cut["stop"] = text[text.len() / 2..text.len() / 2 + 3].into();
    let choice = &answered(&serving, &cut)["choices"][0];
    let scored: String =
        choice["logprobs"]["tokens"].as_array().expect("a list").iter().filter_map(Value::as_str).collect();
    let said = choice["text"].as_str().expect("a text");
    assert!(scored.starts_with(said) && scored.len() < text.len(), "{said} {scored}");
}

#[test]
fn what_is_beside_the_api_answers() {
    let options = Options { aliases: vec!["other/name".to_owned()], ..options() };
    let serving = serve(options, tokenizer(Some(TEMPLATE)));
    let address = serving.address;
    let tokens = encode("Once upon a time");
    let asked =
        ask(address, "POST /tokenize", "", &json!({ "prompt": "Once upon a time", "model": "demo" })).json();
    assert_eq!(asked, json!({ "tokens": tokens, "count": tokens.len(), "max_model_len": 384 }));
    let back = ask(address, "POST /detokenize", "", &json!({ "tokens": tokens })).json();
    assert_eq!(back, json!({ "prompt": "Once upon a time", "content": "Once upon a time" }));
    // llama.cpp's server calls it so.
    let content = json!({ "content": "Once upon a time", "add_special": true });
    assert_eq!(ask(address, "POST /tokenize", "", &content).json()["tokens"], json!(tokens));
    let plain = json!({ "prompt": "Once", "add_special_tokens": false });
    assert_eq!(ask(address, "POST /tokenize", "", &plain).json()["tokens"], json!(encode("Once")));
    let info = ask(address, "GET /tokenizer_info", "", &Value::Null).json();
    assert_eq!((&info["eos_token"], &info["chat_template"]), (&json!("<|endoftext|>"), &json!(TEMPLATE)));
    let chat = json!({ "messages": [{ "role": "user", "content": "a" }] });
    let chat = ask(address, "POST /tokenize", "", &chat).json();
    assert!(chat["count"].as_u64().is_some_and(|count| count > 4), "{chat}");
    // Developers are systems to a template that does not know them.
    let knows = serve(crate::client::options(), tokenizer(Some(&format!("{TEMPLATE}{{# developer #}}"))));
    let said_by = |address, role: &str| {
        let body = json!({ "messages": [{ "role": role, "content": "a" }] });
        ask(address, "POST /tokenize", "", &body).json()["tokens"].clone()
    };
    assert_eq!(said_by(address, "developer"), said_by(address, "system"));
    assert_ne!(said_by(knows.address, "developer"), said_by(knows.address, "system"));
    for (line, body, field) in [
        ("POST /tokenize", json!({}), "prompt"),
        ("POST /tokenize", json!({ "prompt": "a", "add": 1 }), "add"),
        ("POST /tokenize", json!({ "prompt": "word ".repeat(900) }), "prompt"),
        ("POST /tokenize", json!({ "content": "word ".repeat(900) }), "content"),
        ("POST /tokenize", json!({ "content": "a", "with_pieces": true }), "with_pieces"),
        ("POST /tokenize", json!({ "content": "a", "prompt": "a" }), "prompt"),
        ("POST /detokenize", json!({ "tokens": [99_999] }), "tokens"),
        ("POST /detokenize", json!({ "tokens": "a" }), "tokens"),
        (COMPLETIONS, json!({ "prompt": "a", "logit_bias": { "99999": 1 } }), "logit_bias"),
        (COMPLETIONS, json!({ "prompt": "a", "stop_token_ids": [99_999] }), "stop_token_ids"),
    ] {
        let answer = ask(address, line, "", &body);
        assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!(field)), "{body}");
    }
    assert!(ask(address, "GET /version", "", &Value::Null).json()["version"].is_string());
    // The model has two names, and answers by the one that it is called.
    let models = ask(address, "GET /v1/models", "", &Value::Null).json();
    let ids: Vec<&str> =
        models["data"].as_array().expect("a list").iter().filter_map(|m| m["id"].as_str()).collect();
    assert_eq!(ids, ["demo", "other/name"]);
    assert_eq!(ask(address, "GET /v1/models/other/name", "", &Value::Null).json()["id"], "other/name");
    let none = ask(address, "GET /v1/models/%ff", "", &Value::Null);
    assert_eq!((none.status, &none.json()["error"]["param"]), (404, &json!("model")));
    let body = json!({ "model": "other/name", "prompt": tokens, "max_tokens": 5, "temperature": 0 });
    let answer = ask(address, COMPLETIONS, "Content-Type: Application/JSON; charset=utf-8\r\n", &body).json();
    assert_eq!(answer["model"], "other/name");
    assert_eq!(answer["choices"][0]["text"], write(&tokens, SampleConfig::default(), 5));
    ask(address, COMPLETIONS, "", &body);
    for (name, want) in [
        ("fracbit_texts_total{outcome=\"length\"}", 2.0),
        ("fracbit_prompt_tokens_total", 2.0 * tokens.len() as f64),
        ("fracbit_cached_tokens_total", tokens.len() as f64 - 1.0),
        ("fracbit_generated_tokens_total", 10.0),
        ("fracbit_time_to_first_token_seconds_count", 2.0),
        ("fracbit_inter_token_seconds_count", 8.0),
        ("fracbit_requests_total{status=\"400\"}", 10.0),
    ] {
        assert_eq!(metric(address, name), want, "{name}");
    }
    assert!(metric(address, "fracbit_cache_pages{state=\"held\"}") > 0.0);
}
