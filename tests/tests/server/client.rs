//! A client, and what the library writes.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use fracbit_io::{ModelConfig, Pooling, Tokenizer};
use fracbit_model::{
    GenerateOptions, Generation, KvType, Model, RotationMode, Runtime, SampleConfig, Sampler, StateOptions,
};
use fracbit_schedule::Scheduler;
use fracbit_server::{Loaded, Options, Server};
use fracbit_tests::{demo_model, stories, uniform_demo};
use serde_json::Value;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::oneshot;

/// Longer than anything here takes.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// A template such as chat models have: special tokens stand around what is said.
pub(crate) const TEMPLATE: &str = "{% for m in messages %}{{ bos_token }}{{ m.role }}{{ bos_token }}{{ m.content }}{% endfor %}\
    {% if add_generation_prompt %}{{ bos_token }}{{ name | default('assistant') }}{{ bos_token }}{% endif %}";

/// The demo model in a scalar scheme, which takes a second. Made once.
pub(crate) fn model() -> &'static Model {
    static MODEL: OnceLock<Model> = OnceLock::new();
    MODEL.get_or_init(|| {
        uniform_demo(
            &Path::new(env!("CARGO_TARGET_TMPDIR")).join("server-nuq-4"),
            "nuq-4",
            RotationMode::Fold,
        )
    })
}

pub(crate) fn tokenizer(template: Option<&str>) -> Tokenizer {
    let config = ModelConfig::from_dir(demo_model()).expect("the embedded model");
    let mut tokenizer = Tokenizer::from_dir(demo_model(), Some(&config)).expect("the embedded model");
    if let Some(template) = template {
        let path = demo_model().join("tokenizer_config.json");
        let settings = fs::read(&path).expect("the embedded model");
        tokenizer.apply_settings(&settings, &path, Some(template.as_bytes())).expect("a good template");
    }
    tokenizer
}

pub(crate) fn options() -> Options {
    Options {
        id: "demo".to_owned(),
        hosts: Vec::new(),
        origins: Vec::new(),
        log_requests: false,
        tls: None,
        aliases: Vec::new(),
        slots: 4,
        queue: 64,
        kv: KvType::I16,
        keys: Vec::new(),
        peer_connections: 256,
        grace: Duration::from_secs(10),
        allow_special: false,
        scheduler: None,
        draft: None,
    }
}

/// A server that ends with this value.
pub(crate) struct Serving {
    pub(crate) address: SocketAddr,
    pub(crate) stop: Option<oneshot::Sender<()>>,
    thread: Option<thread::JoinHandle<Result<(), fracbit_server::Error>>>,
}

/// A model for short texts.
pub(crate) fn loaded<R>(model: R, tokenizer: Tokenizer) -> Loaded<R> {
    let pooling = Ok(Pooling::default());
    let sampling = SampleConfig { temperature: 0.8, top_p: 0.95, ..SampleConfig::default() };
    Loaded { model, tokenizer, context: 384, pages: None, end_tokens: Vec::new(), pooling, sampling }
}

pub(crate) fn serve(options: Options, tokenizer: Tokenizer) -> Serving {
    serve_loaded(loaded(model().clone(), tokenizer), options)
}

/// The demo model for texts of another length.
pub(crate) fn serve_long(context: usize, options: Options, tokenizer: Tokenizer) -> Serving {
    serve_loaded(Loaded { context, ..loaded(model().clone(), tokenizer) }, options)
}

pub(crate) fn serve_loaded<R: Runtime + Send + 'static>(first: Loaded<R>, options: Options) -> Serving {
    let (_, never) = unbounded_channel();
    serve_again(first, options, || Err("nobody asked".to_owned()), never)
}

/// One that loads its model anew when it is told to.
pub(crate) fn serve_again<R: Runtime + Send + 'static>(
    first: Loaded<R>,
    options: Options,
    load: impl Fn() -> Result<Loaded<R>, String> + Send + Sync + 'static,
    reloads: UnboundedReceiver<()>,
) -> Serving {
    let server = Server::bind(([127, 0, 0, 1], 0).into()).expect("a free port");
    let address = server.address().expect("a bound socket");
    let (stop, stopped) = oneshot::channel();
    let thread = thread::spawn(move || {
        let stop = async { _ = stopped.await };
        server.run(first, options, (load, reloads), stop)
    });
    Serving { address, stop: Some(stop), thread: Some(thread) }
}

impl Serving {
    pub(crate) fn end(&mut self) {
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
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    /// The events of a stream, which ends as it should.
    pub(crate) fn events(&self) -> Vec<Value> {
        let mut events: Vec<&str> =
            self.body.split("\n\n").filter(|e| !e.is_empty() && !e.starts_with(':')).collect();
        assert_eq!(events.pop(), Some("data: [DONE]"), "{self:?}");
        let read = |e: &str| serde_json::from_str(e.strip_prefix("data: ").expect("an event")).expect("JSON");
        events.into_iter().map(read).collect()
    }
}

pub(crate) fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).expect("a listener");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    stream
}

/// Sends a request, with `head` beside what every request has.
pub(crate) fn send(address: SocketAddr, line: &str, head: &str, body: &str) -> TcpStream {
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
pub(crate) fn receive_head(reader: &mut impl BufRead) -> (u16, String) {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        assert!(reader.read_line(&mut head).expect("an answer in time") > 0, "a whole head: {head}");
    }
    let head = head.to_ascii_lowercase();
    (head.split(' ').nth(1).and_then(|s| s.parse().ok()).expect("a status"), head)
}

pub(crate) fn receive(stream: TcpStream) -> Answer {
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

pub(crate) fn ask(address: SocketAddr, line: &str, head: &str, body: &Value) -> Answer {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    receive(send(address, line, head, &body))
}

pub(crate) const COMPLETIONS: &str = "POST /v1/completions";
pub(crate) const CHAT: &str = "POST /v1/chat/completions";

/// The text of a completion.
pub(crate) fn complete(address: SocketAddr, body: &Value) -> String {
    let answer = ask(address, COMPLETIONS, "", body);
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()["choices"][0]["text"].as_str().expect("a text").to_owned()
}

/// What the library writes.
pub(crate) fn write(tokens: &[u32], sampling: SampleConfig, most: usize) -> String {
    write_by(model(), None, tokens, sampling, most)
}

pub(crate) fn write_by(
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
    let options = GenerateOptions { max_tokens: Some(most), end_tokens, scheduler };
    let written: Vec<u32> = Generation::new(model, &mut state, &mut sampler, tokens, options)
        .expect("a prompt")
        .map(|token| token.expect("a good model"))
        .collect();
    tokenizer.decode(&written, true).expect("tokens of the model")
}

/// Beginnings of the held-out stories.
pub(crate) fn prompts() -> Vec<String> {
    let (text, _) = stories();
    let words: Vec<&str> = text.split_whitespace().collect();
    (0..8).map(|i| words[i * 80..i * 80 + 10 + 30 * (i % 4)].join(" ")).collect()
}

/// A number that the server says of itself.
pub(crate) fn metric(address: SocketAddr, name: &str) -> f64 {
    let page = ask(address, "GET /metrics", "", &Value::Null).body;
    let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("`{name}`: {page}"))
}

/// Waits until a number is what it should be.
pub(crate) fn until(address: SocketAddr, name: &str, want: f64) {
    let start = Instant::now();
    while metric(address, name) != want {
        assert!(start.elapsed() < PATIENCE, "{name} is never {want}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// A tokenizer that ends no text.
pub(crate) fn endless() -> Tokenizer {
    let path = demo_model().join("tokenizer.json");
    Tokenizer::parse(&fs::read(&path).expect("the embedded model"), &path).expect("a tokenizer")
}

/// Most memory that this process has held so far, where the system tells.
pub(crate) fn peak_memory() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kb| kb << 10)
}
