//! The server as its clients meet it: bytes over a socket, a real model behind.

mod client;
mod device;
mod embeddings;
mod fields;
mod gbnf;
mod limits;
mod reload;
mod soak;
mod structured;
mod tls;

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::OnceLock;
use std::thread;

use fracbit_base::Rate;
use fracbit_engine::Draft;
use fracbit_io::{Bos, EncodeOptions, Message, PrefixSpace};
use fracbit_model::{Model, Precision, RotationMode, SampleConfig};
use fracbit_schedule::{Schedule, Scheduler};
use fracbit_server::Options;
use fracbit_tests::{demo_model, uniform_demo};
use serde_json::{Value, json};

use client::{
    CHAT, COMPLETIONS, TEMPLATE, ask, complete, connect, loaded, metric, model, options, prompts, receive,
    serve, serve_loaded, tokenizer, write, write_by,
};

#[test]
fn texts_are_those_of_the_library_whatever_else_is_served() {
    let serving = serve(options(), tokenizer(None));
    let address = serving.address;
    let ask_for = |(i, prompt): (usize, &String)| json!({ "model": "demo", "prompt": prompt, "max_tokens": 40, "seed": i, "temperature": 0.7, "top_p": 0.9 });
    let prompts = prompts();
    // All at once: more than there are places for.
    let together: Vec<String> = thread::scope(|scope| {
        let threads: Vec<_> = prompts
            .iter()
            .enumerate()
            .map(|asked| scope.spawn(move || complete(address, &ask_for(asked))))
            .collect();
        threads.into_iter().map(|t| t.join().expect("an answer")).collect()
    });
    for (i, (prompt, text)) in prompts.iter().zip(&together).enumerate() {
        let tokens = tokenizer(None).encode(prompt, EncodeOptions::default()).expect("a text");
        let sampling =
            SampleConfig { temperature: 0.7, top_p: 0.9, seed: i as u64, ..SampleConfig::default() };
        assert_eq!(*text, write(&tokens, sampling, 40), "{prompt}");
        assert_eq!(*text, complete(address, &ask_for((i, prompt))), "alone: {prompt}");
    }
    assert!(together.concat().len() > 400, "{together:?}");
    // What repeats itself is guessed ahead, and is the same text.
    let song = "the dog and the cat and the dog and the cat and the dog and the";
    let body = json!({ "prompt": song, "max_tokens": 48, "temperature": 0 });
    let answer = ask(address, COMPLETIONS, "", &body).json();
    let tokens = tokenizer(None).encode(song, EncodeOptions::default()).expect("a text");
    assert_eq!(answer["choices"][0]["text"], write(&tokens, SampleConfig::default(), 48));
    let guessed = answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"].as_u64();
    assert!(guessed.is_some_and(|n| n > 0), "{answer}");
    // What was guessed in vain is told as well.
    let vain = &answer["usage"]["completion_tokens_details"]["rejected_prediction_tokens"];
    let [all, right] =
        ["guesses", "accepted_guesses"].map(|name| metric(serving.address, &format!("fracbit_{name}_total")));
    assert!(vain.as_f64().is_some_and(|vain| vain <= all - right), "{vain}, {right} of {all}");
    // Without a seed no two are alike.
    let two: Vec<String> = (0..2)
        .map(|_| complete(address, &json!({ "prompt": "Once upon a time", "max_tokens": 40 })))
        .collect();
    assert_ne!(two[0], two[1]);
}

/// The demo model at 4 bits, of which 2 can be read alone.
fn nested() -> &'static Model {
    static NESTED: OnceLock<Model> = OnceLock::new();
    NESTED.get_or_init(|| {
        uniform_demo(
            &Path::new(env!("CARGO_TARGET_TMPDIR")).join("server-nest"),
            "nest-tcq-fast-2+2",
            RotationMode::Online,
        )
    })
}

#[test]
fn precision_falls_text_by_text_and_drafts_change_nothing() {
    let draft = Draft { precision: Some(Precision::at_most(Rate::quarter_bits(8))), length: Some(3) };
    for (schedule, draft) in [
        (None, Some(draft)),
        (Some("prefill=4,decode=4..2@13"), None),
        (Some("prefill=2,decode=4..2@20"), Some(draft)),
    ] {
        let scheduler: Option<Scheduler> =
            schedule.map(|text| text.parse::<Schedule>().expect("a schedule").into());
        let options = Options { scheduler: scheduler.clone(), draft, ..options() };
        let serving = serve_loaded(loaded(nested().clone(), tokenizer(None)), options);
        let address = serving.address;
        let body = |i: usize, prompt: &str| json!({ "prompt": prompt, "max_tokens": 40, "seed": i, "temperature": 0.7 });
        let want = |i: usize, prompt: &str| {
            let tokens = tokenizer(None).encode(prompt, EncodeOptions::default()).expect("a text");
            // Where a request does not say, the server's own.
            let sampling =
                SampleConfig { temperature: 0.7, top_p: 0.95, seed: i as u64, ..SampleConfig::default() };
            write_by(nested(), scheduler.clone(), &tokens, sampling, 40)
        };
        // Texts at different places of their schedules, in one step together.
        let prompts = prompts();
        thread::scope(|scope| {
            for (i, prompt) in prompts.iter().enumerate() {
                scope.spawn(move || {
                    assert_eq!(complete(address, &body(i, prompt)), want(i, prompt), "{prompt}")
                });
            }
        });
        // One alone, and one that goes on from it: nothing that was written with fewer bits is
        // taken for what a prompt leaves.
        let answer = ask(address, COMPLETIONS, "", &body(0, &prompts[0])).json();
        let text = answer["choices"][0]["text"].as_str().expect("a text").to_owned();
        assert_eq!(text, want(0, &prompts[0]));
        let guessed = answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"].as_u64();
        assert!(draft.is_none() || guessed.is_some_and(|n| n > 0), "{answer}");
        let longer = format!("{}{text} And then", prompts[0]);
        assert_eq!(complete(address, &body(9, &longer)), want(9, &longer));
    }
}

#[test]
fn streams_say_the_same_and_count() {
    let serving = serve(options(), tokenizer(None));
    let body = json!({ "prompt": "Once upon a time", "max_tokens": 30, "temperature": 0 });
    let whole = ask(serving.address, COMPLETIONS, "", &body).json();
    let choice = &whole["choices"][0];
    assert_eq!((&whole["object"], &choice["finish_reason"]), (&json!("text_completion"), &json!("length")));
    assert_eq!(whole["usage"]["completion_tokens"], 30);
    let counted = |n: &str| whole["usage"][n].as_u64().expect("a count");
    assert_eq!(counted("total_tokens"), counted("prompt_tokens") + 30);
    let mut body = body;
    body["stream"] = true.into();
    body["stream_options"] = json!({ "include_usage": true });
    let answer = ask(serving.address, COMPLETIONS, "", &body);
    assert!(answer.head.contains("content-type: text/event-stream"), "{}", answer.head);
    let events = answer.events();
    let (last, pieces) = events.split_last().expect("events");
    let text: String = pieces.iter().filter_map(|e| e["choices"][0]["text"].as_str()).collect();
    assert_eq!(text, choice["text"].as_str().expect("a text"));
    assert_eq!(pieces.last().expect("a piece")["choices"][0]["finish_reason"], "length");
    assert_eq!((&last["choices"], &last["usage"]["completion_tokens"]), (&json!([]), &json!(30)));
    // Nearly every token is an event of its own: nothing waits.
    assert!(pieces.len() > 20, "{}", pieces.len());
}

#[test]
fn conversations_go_on_where_they_were() {
    let serving = serve(options(), tokenizer(Some(TEMPLATE)));
    let other = serve(options(), tokenizer(Some(TEMPLATE)));
    let mut messages = vec![json!({ "role": "user", "content": "Tell me of a dog and a ball." })];
    for turn in 0..3 {
        // The likeliest tokens of a text are nearly always those that its text is cut into when it
        // comes back.
        let body = json!({ "messages": messages, "max_tokens": 24, "temperature": 0 });
        let answer = ask(serving.address, CHAT, "", &body).json();
        let usage = &answer["usage"];
        let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count");
        let prompt = usage["prompt_tokens"].as_u64().expect("a count");
        assert!(cached < prompt && (turn == 0 || 2 * cached > prompt), "{turn}: {usage}");
        let message = answer["choices"][0]["message"].clone();
        assert_eq!(message["role"], "assistant");
        // The same of a server that has never heard the beginning.
        if turn == 2 {
            let fresh = ask(other.address, CHAT, "", &body).json();
            assert_eq!(fresh["choices"][0]["message"], message);
            assert_eq!(fresh["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
            // And of a stream.
            let mut body = body;
            body["stream"] = true.into();
            let events = ask(other.address, CHAT, "", &body).events();
            assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
            assert_eq!(events[0]["object"], "chat.completion.chunk");
            let said: String =
                events.iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).collect();
            assert_eq!(said, message["content"].as_str().expect("a text"));
        }
        messages.push(message);
        messages.push(json!({ "role": "user", "content": "And then?" }));
    }
    // The template's variables.
    let tokens = |text: &str| {
        let options = EncodeOptions { bos: Bos::Never, prefix_space: PrefixSpace::Keep };
        tokenizer(None).encode(text, options).expect("a text")
    };
    let body = json!({
        "messages": [{ "role": "user", "content": "a" }], "max_tokens": 9, "temperature": 0,
        "chat_template_kwargs": { "name": "dog" },
    });
    let answer = ask(serving.address, CHAT, "", &body).json();
    let want = write(&tokens(&"|user|a|dog|".replace('|', "<|endoftext|>")), SampleConfig::default(), 9);
    assert_eq!(answer["choices"][0]["message"]["content"], want);
}

/// An answer that was begun goes on, and what templates know of effort gets to them.
#[test]
fn answers_go_on_from_their_beginning() {
    let template = format!("{{{{ reasoning_effort | default('') }}}}{TEMPLATE}");
    let [plain, thinking] = [TEMPLATE, &template].map(|t| serve(options(), tokenizer(Some(t))));
    let options = EncodeOptions { bos: Bos::Never, prefix_space: PrefixSpace::Keep };
    let tokens =
        |text: &str| tokenizer(None).encode(&text.replace('|', "<|endoftext|>"), options).expect("a text");
    let said = json!([
        { "role": "user", "content": "a" }, { "role": "assistant", "content": "Once upon a" },
    ]);
    for (serving, more, want) in [
        (&plain, json!({ "continue_final_message": true }), "|user|a|assistant|Once upon a"),
        (&plain, json!({ "add_generation_prompt": false }), "|user|a|assistant|Once upon a"),
        (&plain, json!({}), "|user|a|assistant|Once upon a|assistant|"),
        (&thinking, json!({ "reasoning_effort": "low" }), "low|user|a|assistant|Once upon a|assistant|"),
    ] {
        let mut body = json!({ "messages": said, "max_tokens": 9, "temperature": 0 });
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        let answer = ask(serving.address, CHAT, "", &body).json();
        let text = write(&tokens(want), SampleConfig::default(), 9);
        assert_eq!(answer["choices"][0]["message"]["content"], text, "{body}");
        body.as_object_mut()
            .expect("an object")
            .retain(|field, _| field != "max_tokens" && field != "temperature");
        let counted = ask(serving.address, "POST /tokenize", "", &body).json();
        assert_eq!(counted["tokens"], json!(tokens(want)), "{body}");
    }
    let body = json!({ "messages": said, "reasoning_effort": "low" });
    let refused = ask(plain.address, CHAT, "", &body);
    assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("reasoning_effort")));
}

/// What a request spells never becomes a control token, wherever it stands in it.
#[test]
fn requests_make_no_control_tokens() {
    const END: &str = "<|endoftext|>";
    let chat = tokenizer(Some(TEMPLATE));
    let end = chat.token_id(END).expect("the demo's own");
    let [guarded, allowed] = [false, true].map(|allow_special| {
        let options = Options { allow_special, ..options() };
        serve(options, tokenizer(Some(TEMPLATE)))
    });
    let spelled = format!("a {END}b<|endof{END}text|>");
    let (user, name) = (|text: &str| json!({ "role": "user", "content": text }), json!({ "name": spelled }));
    let cases = [
        (json!([user(&spelled)]), json!({})),
        (json!([user("a"), { "role": "assistant", "content": spelled }, user("b")]), json!({})),
        (json!([{ "role": "system", "content": spelled }, user("b")]), json!({})),
        (json!([{ "role": spelled, "content": "a" }]), json!({})),
        (json!([user("a")]), name),
    ];
    for (messages, variables) in cases {
        let body = json!({ "messages": messages, "max_tokens": 6, "temperature": 0, "chat_template_kwargs": variables });
        let sent: Vec<Message> = serde_json::from_value(messages.clone()).expect("messages");
        let extra: BTreeMap<String, Value> = serde_json::from_value(variables).expect("variables");
        // Two of the template's own around each role and name.
        let own = 2 * sent.len() + 2;
        for (serving, allow) in [(&guarded, false), (&allowed, true)] {
            let tokens = chat.conversation(&sent, &extra, allow).expect("a prompt").expect("a template");
            let ends = tokens.iter().filter(|&&token| token == end).count();
            assert_eq!(ends, own + if allow { 2 } else { 0 }, "{messages}");
            let answer = ask(serving.address, CHAT, "", &body).json();
            assert_eq!(answer["usage"]["prompt_tokens"], tokens.len(), "{messages}");
            let said = &answer["choices"][0]["message"]["content"];
            assert_eq!(*said, write(&tokens, SampleConfig::default(), 6), "{messages}");
        }
    }
}

/// Tokens that the tokenizer knows and the embedding does not are refused, whoever writes them.
#[test]
fn tokens_beyond_the_embedding_are_the_requests_fault() {
    let mut images = tokenizer(None);
    let path = demo_model().join("tokenizer_config.json");
    let mut settings: Value = serde_json::from_slice(&fs::read(&path).expect("a file")).expect("JSON");
    settings["additional_special_tokens"] = json!(["<image>"]);
    let template = format!("{TEMPLATE}{{% if images %}}<image>{{% endif %}}");
    images
        .apply_settings(settings.to_string().as_bytes(), &path, Some(template.as_bytes()))
        .expect("good settings");
    let beyond = images.token_id("<image>").expect("it was added");
    assert_eq!(beyond as usize, model().config().vocab_size);
    let serving = serve(options(), images);
    let messages = json!([{ "role": "user", "content": "What is <image>?" }]);
    let cases = [
        (COMPLETIONS, json!({ "prompt": "See <image> here", "max_tokens": 2 })),
        (COMPLETIONS, json!({ "prompt": [1, beyond], "max_tokens": 2 })),
        (CHAT, json!({ "messages": messages, "max_tokens": 2, "chat_template_kwargs": { "images": true } })),
    ];
    for (line, body) in cases {
        let answer = ask(serving.address, line, "", &body);
        assert_eq!(answer.status, 400, "{body}: {answer:?}");
        let message = answer.json()["error"]["message"].as_str().expect("a message").to_owned();
        assert!(message.contains(&beyond.to_string()), "{body}: {message}");
    }
    // Said by somebody it is a text like any other.
    assert_eq!(ask(serving.address, CHAT, "", &json!({ "messages": messages, "max_tokens": 2 })).status, 200);
}

#[test]
fn stop_texts_end_a_text_and_are_not_said() {
    let serving = serve(options(), tokenizer(None));
    let body = json!({ "prompt": "Once upon a time", "max_tokens": 60, "temperature": 0 });
    let all = complete(serving.address, &body);
    // Neither begins nor ends with a token, as likely as not.
    let stop = &all[all.len() / 2 - 3..all.len() / 2 + 4];
    let at = all.find(stop).expect("a part of it");
    for stream in [false, true] {
        let mut body = body.clone();
        body["stop"] = json!(["never there", stop]);
        body["stream"] = stream.into();
        let answer = ask(serving.address, COMPLETIONS, "", &body);
        let said: String = if stream {
            answer.events().iter().filter_map(|e| e["choices"][0]["text"].as_str()).collect()
        } else {
            assert_eq!(answer.json()["choices"][0]["finish_reason"], "stop");
            answer.json()["choices"][0]["text"].as_str().expect("a text").to_owned()
        };
        assert_eq!(said, all[..at], "stream: {stream}");
    }
}

#[test]
fn requests_that_cannot_be_served_are_told_why() {
    let serving = serve(options(), tokenizer(None));
    let long = "word ".repeat(500);
    let cases = [
        ("GET /nowhere", "", json!(null), 404, "/v1"),
        ("GET /v1/nothing", "", json!(null), 404, "/v1/nothing"),
        ("GET /v1/completions", "", json!(null), 405, "method"),
        ("GET /v1/models/other", "", json!(null), 404, "`demo`"),
        ("GET /v1/models", "Host: evil.example\r\n", json!(null), 403, "localhost"),
        (COMPLETIONS, "Content-Type: text/plain\r\n", json!({ "prompt": "a" }), 415, "application/json"),
        (COMPLETIONS, "", json!([1]), 400, "JSON object"),
        (COMPLETIONS, "", json!({ "prompt": "a", "best": 1 }), 400, "`best`"),
        (COMPLETIONS, "", json!({ "prompt": "a", "temperature": -1 }), 400, "temperature"),
        (COMPLETIONS, "", json!({ "prompt": "a", "model": "gpt-9" }), 404, "`demo`"),
        (COMPLETIONS, "", json!({ "prompt": [1, 99_999] }), 400, "99999"),
        (COMPLETIONS, "", json!({ "prompt": [] }), 400, "at least one token"),
        (COMPLETIONS, "", json!({ "prompt": long }), 400, "384"),
        (CHAT, "", json!({ "messages": [{ "role": "user", "content": "a" }] }), 400, "no chat template"),
    ];
    for (line, head, body, status, word) in cases {
        let answer = ask(serving.address, line, head, &body);
        assert_eq!(answer.status, status, "{line} {body}: {answer:?}");
        let message = answer.json()["error"]["message"].as_str().expect("a message").to_owned();
        assert!(message.contains(word), "{line} {body}: {message}");
    }
    // Too large, and arbitrary bytes.
    let large = format!(r#"{{"prompt": "{}"}}"#, "a".repeat(5 << 20));
    let mut stream = connect(serving.address);
    let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n";
    write!(stream, "{head}Content-Length: {}\r\n\r\n", large.len()).expect("a listener that reads");
    // The server may close before it has read all.
    let _ = stream.write_all(large.as_bytes());
    assert_eq!(receive(stream).status, 413);
    for bytes in [
        &b"\0\xff\xfe\r\n\r\n"[..],
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    ] {
        let mut stream = connect(serving.address);
        stream.write_all(bytes).expect("a listener that reads");
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).expect("closed in time");
        assert!(rest.is_empty() || rest.starts_with(b"HTTP/1.1 400"), "{}", String::from_utf8_lossy(&rest));
    }
    let models = ask(serving.address, "GET /v1/models", "", &json!(null)).json();
    assert_eq!(
        (&models["data"][0]["id"], &models["data"][0]["context_length"]),
        (&json!("demo"), &json!(384))
    );
    assert_eq!(ask(serving.address, "GET /v1/models/demo", "", &json!(null)).status, 200);
    assert!(!complete(serving.address, &json!({ "prompt": "a", "max_tokens": 3, "seed": 1 })).is_empty());
}

#[test]
fn keys_are_wanted_where_there_is_one() {
    let serving =
        serve(Options { keys: vec!["secret".to_owned(), "second".to_owned()], ..options() }, tokenizer(None));
    let body = json!({ "prompt": "a", "max_tokens": 1 });
    for (head, status) in [
        ("", 401),
        ("Authorization: Bearer wrong\r\n", 401),
        ("Authorization: Bearer secret\r\n", 200),
        ("Authorization: bearer second\r\n", 200),
        ("X-Api-Key: second\r\n", 200),
        ("X-Api-Key: wrong\r\n", 401),
        ("Host: my.example\r\nAuthorization: Bearer secret\r\n", 200),
    ] {
        let answer = ask(serving.address, COMPLETIONS, head, &body);
        assert_eq!(answer.status, status, "{head}");
        assert!(status == 200 || answer.head.contains("www-authenticate: bearer"), "{}", answer.head);
        assert_eq!(ask(serving.address, "GET /v1/models", head, &json!(null)).status, status, "{head}");
    }
    assert_eq!(ask(serving.address, "GET /health", "", &json!(null)).status, 200);
    // Anthropic's clients get errors of their form, whatever is wrong.
    for line in ["POST /v1/messages", "POST /v1/messages/count_tokens"] {
        for (head, kind) in [("", "authentication_error"), ("X-Api-Key: second\r\n", "invalid_request_error")]
        {
            let answer = ask(serving.address, line, head, &json!({})).json();
            assert_eq!(
                (&answer["type"], &answer["error"]["type"]),
                (&json!("error"), &json!(kind)),
                "{line}"
            );
        }
    }
}
