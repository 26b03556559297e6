//! The server as its clients meet it: bytes over a socket, a real model behind.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use fracbit_base::Rate;
use fracbit_io::{Bos, EncodeOptions, Message, ModelConfig, PrefixSpace, Tokenizer};
use fracbit_model::{
    Draft, GenerateOptions, Generation, KvType, Model, Precision, RotationMode, SampleConfig, Sampler,
    StateOptions,
};
use fracbit_schedule::{Schedule, Scheduler};
use fracbit_server::{Options, Server};
use fracbit_tests::{demo_model, stories, uniform_demo};
use serde_json::{Value, json};
use tokio::sync::oneshot;

/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(60);
/// A template such as chat models have: special tokens stand around what is said.
const TEMPLATE: &str = "{% for m in messages %}{{ bos_token }}{{ m.role }}{{ bos_token }}{{ m.content }}{% endfor %}\
    {% if add_generation_prompt %}{{ bos_token }}{{ name | default('assistant') }}{{ bos_token }}{% endif %}";

/// The demo model in a scalar scheme, which takes a second. Made once.
fn model() -> &'static Model {
    static MODEL: OnceLock<Model> = OnceLock::new();
    MODEL.get_or_init(|| {
        uniform_demo(
            &Path::new(env!("CARGO_TARGET_TMPDIR")).join("server-nuq-4"),
            "nuq-4",
            RotationMode::Fold,
        )
    })
}

fn tokenizer(template: Option<&str>) -> Tokenizer {
    let config = ModelConfig::from_dir(demo_model()).expect("the embedded model");
    let mut tokenizer = Tokenizer::from_dir(demo_model(), Some(&config)).expect("the embedded model");
    if let Some(template) = template {
        let path = demo_model().join("tokenizer_config.json");
        let settings = fs::read(&path).expect("the embedded model");
        tokenizer.apply_settings(&settings, &path, Some(template.as_bytes())).expect("a good template");
    }
    tokenizer
}

fn options() -> Options {
    Options {
        id: "demo".to_owned(),
        slots: 4,
        queue: 64,
        context: 384,
        kv: KvType::I16,
        pages: None,
        sampling: SampleConfig { temperature: 0.8, top_p: 0.95, ..SampleConfig::default() },
        key: None,
        end_tokens: Vec::new(),
        allow_special: false,
        scheduler: None,
        draft: None,
    }
}

/// A server that ends with this value.
struct Serving {
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<thread::JoinHandle<Result<(), fracbit_server::Error>>>,
}

fn serve(options: Options, tokenizer: Tokenizer) -> Serving {
    serve_model(model(), options, tokenizer)
}

fn serve_model(model: &'static Model, options: Options, tokenizer: Tokenizer) -> Serving {
    let server = Server::bind(([127, 0, 0, 1], 0).into()).expect("a free port");
    let address = server.address().expect("a bound socket");
    let (stop, stopped) = oneshot::channel();
    let thread = thread::spawn(move || {
        let stop = async { _ = stopped.await };
        server.run(model, tokenizer, options, stop)
    });
    Serving { address, stop: Some(stop), thread: Some(thread) }
}

impl Serving {
    fn end(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            thread.join().expect("no panic").expect("an orderly end");
        }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        if !thread::panicking() {
            self.end();
        }
    }
}

/// An answer.
#[derive(Debug)]
struct Answer {
    status: u16,
    head: String,
    body: String,
}

impl Answer {
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    /// The events of a stream, which ends as it should.
    fn events(&self) -> Vec<Value> {
        let mut events: Vec<&str> =
            self.body.split("\n\n").filter(|e| !e.is_empty() && !e.starts_with(':')).collect();
        assert_eq!(events.pop(), Some("data: [DONE]"), "{self:?}");
        let read = |e: &str| serde_json::from_str(e.strip_prefix("data: ").expect("an event")).expect("JSON");
        events.into_iter().map(read).collect()
    }
}

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).expect("a listener");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    stream
}

/// Sends a request, with `head` beside what every request has.
fn send(address: SocketAddr, line: &str, head: &str, body: &str) -> TcpStream {
    let mut stream = connect(address);
    let host = if head.contains("Host:") { String::new() } else { format!("Host: {address}\r\n") };
    let kind = if body.is_empty() || head.contains("Content-Type:") {
        ""
    } else {
        "Content-Type: application/json\r\n"
    };
    let length = body.len();
    write!(
        stream,
        "{line} HTTP/1.1\r\n{host}{kind}{head}Content-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )
    .expect("a listener that reads");
    stream
}

/// The beginning of an answer: its status and all of its head.
fn receive_head(reader: &mut impl BufRead) -> (u16, String) {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        assert!(reader.read_line(&mut head).expect("an answer in time") > 0, "a whole head: {head}");
    }
    let head = head.to_ascii_lowercase();
    (head.split(' ').nth(1).and_then(|s| s.parse().ok()).expect("a status"), head)
}

fn receive(stream: TcpStream) -> Answer {
    let mut reader = BufReader::new(stream);
    let (status, head) = receive_head(&mut reader);
    let mut body = Vec::new();
    if head.contains("transfer-encoding: chunked") {
        loop {
            let mut size = String::new();
            reader.read_line(&mut size).expect("a chunk in time");
            let size = usize::from_str_radix(size.trim(), 16).expect("a size");
            let mut chunk = vec![0; size + 2];
            reader.read_exact(&mut chunk).expect("a chunk");
            body.extend_from_slice(&chunk[..size]);
            if size == 0 {
                break;
            }
        }
    } else {
        reader.read_to_end(&mut body).expect("a body in time");
    }
    Answer { status, head, body: String::from_utf8(body).expect("UTF-8") }
}

fn ask(address: SocketAddr, line: &str, head: &str, body: &Value) -> Answer {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    receive(send(address, line, head, &body))
}

const COMPLETIONS: &str = "POST /v1/completions";
const CHAT: &str = "POST /v1/chat/completions";

/// The text of a completion.
fn complete(address: SocketAddr, body: &Value) -> String {
    let answer = ask(address, COMPLETIONS, "", body);
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()["choices"][0]["text"].as_str().expect("a text").to_owned()
}

/// What the library writes.
fn write(tokens: &[u32], sampling: SampleConfig, most: usize) -> String {
    write_by(model(), None, tokens, sampling, most)
}

fn write_by(
    model: &Model,
    scheduler: Option<Scheduler>,
    tokens: &[u32],
    sampling: SampleConfig,
    most: usize,
) -> String {
    let mut state = model.state(&StateOptions { context: Some(384), ..StateOptions::default() });
    let mut sampler = Sampler::new(sampling).expect("good settings");
    let tokenizer = tokenizer(None);
    let end_tokens = tokenizer.eos_ids().to_vec();
    let options =
        GenerateOptions { max_tokens: Some(most), end_tokens, scheduler, ..GenerateOptions::default() };
    let written: Vec<u32> = Generation::new(model, &mut state, &mut sampler, tokens, options)
        .expect("a prompt")
        .map(|token| token.expect("a good model"))
        .collect();
    tokenizer.decode(&written, true).expect("tokens of the model")
}

/// Beginnings of the held-out stories.
fn prompts() -> Vec<String> {
    let (text, _) = stories();
    let words: Vec<&str> = text.split_whitespace().collect();
    (0..8).map(|i| words[i * 80..i * 80 + 10 + 30 * (i % 4)].join(" ")).collect()
}

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
    let draft = Draft { precision: Precision::at_most(Rate::quarter_bits(8)), length: Some(3) };
    for (schedule, draft) in [
        (None, Some(draft)),
        (Some("prefill=4,decode=4..2@13"), None),
        (Some("prefill=2,decode=4..2@20"), Some(draft)),
    ] {
        let scheduler: Option<Scheduler> =
            schedule.map(|text| text.parse::<Schedule>().expect("a schedule").into());
        let options = Options { scheduler: scheduler.clone(), draft, ..options() };
        let serving = serve_model(nested(), options, tokenizer(None));
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
        ("GET /", "", json!(null), 404, "/v1"),
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
    let serving = serve(Options { key: Some("secret".to_owned()), ..options() }, tokenizer(None));
    let body = json!({ "prompt": "a", "max_tokens": 1 });
    for (head, status) in [
        ("", 401),
        ("Authorization: Bearer wrong\r\n", 401),
        ("Authorization: Bearer secret\r\n", 200),
        ("Host: my.example\r\nAuthorization: Bearer secret\r\n", 200),
    ] {
        let answer = ask(serving.address, COMPLETIONS, head, &body);
        assert_eq!(answer.status, status, "{head}");
        assert!(status == 200 || answer.head.contains("www-authenticate: bearer"), "{}", answer.head);
        assert_eq!(ask(serving.address, "GET /v1/models", head, &json!(null)).status, status, "{head}");
    }
    assert_eq!(ask(serving.address, "GET /health", "", &json!(null)).status, 200);
}

#[test]
fn who_goes_away_leaves_the_place_to_others_and_who_comes_too_late_is_told() {
    // No token ends a text, and the context is not filled in a minute.
    let path = demo_model().join("tokenizer.json");
    let endless =
        Tokenizer::parse(&fs::read(&path).expect("the embedded model"), &path).expect("a tokenizer");
    let serving = serve(Options { slots: 1, queue: 1, context: 1 << 20, ..options() }, endless);
    let address = serving.address;
    // A text, and two requests behind it: one waits, whichever the server hears first, and the
    // other is turned away.
    let endless = json!({ "prompt": "Once", "max_tokens": 1 << 20, "stream": true }).to_string();
    let begin = || BufReader::new(send(address, COMPLETIONS, "", &endless));
    let mut first = begin();
    let mut line = String::new();
    while !line.starts_with("data: ") {
        line.clear();
        assert!(first.read_line(&mut line).expect("a first piece in time") > 0);
    }
    let mut behind = [begin(), begin()];
    let mut answers = behind.each_mut().map(receive_head);
    answers.sort_by_key(|(status, _)| *status);
    let [(200, _), (503, refused)] = &answers else { panic!("{answers:?}") };
    assert!(refused.contains("retry-after:"), "{refused}");
    drop((first, behind));
    let start = Instant::now();
    while ask(address, COMPLETIONS, "", &json!({ "prompt": "a", "max_tokens": 1 })).status != 200 {
        assert!(start.elapsed() < PATIENCE, "the place is never free");
    }
}

#[test]
fn who_says_nothing_is_not_waited_for() {
    let serving = serve(options(), tokenizer(None));
    let mut slow = connect(serving.address);
    slow.write_all(b"POST /v1/completions HTTP/1.1\r\nHost: loc").expect("a listener that reads");
    let start = Instant::now();
    let mut rest = Vec::new();
    slow.read_to_end(&mut rest).expect("closed by the server");
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
}

#[test]
fn texts_end_before_the_server_does() {
    let mut serving = serve(options(), tokenizer(None));
    let body =
        json!({ "prompt": "Once upon a time", "max_tokens": 120, "stream": true, "seed": 5 }).to_string();
    let stream = send(serving.address, COMPLETIONS, "", &body);
    let mut first = [0; 1];
    stream.peek(&mut first).expect("an answer that begins");
    serving.end();
    receive(stream).events();
    assert!(TcpStream::connect(serving.address).is_err(), "nobody listens");
}
