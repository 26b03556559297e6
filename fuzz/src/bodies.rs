//! What each target does with its bytes, and what a search begins with. Plain functions: the fuzzer
//! calls them, and so do tests of the workspace on stable Rust (`tests/tests/hostile/mutated.rs`,
//! which includes this file).

use fracbit::{ExportOptions, ExportType, MachineProfile, Opened, Plan, Quiet};
use fracbit_io::{
    ChatTemplate, Checkpoint, EncodeOptions, Header, Message, ModelConfig, RenderOptions, Tokenizer,
};
use fracbit_model::StateOptions;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Something that reads bytes of others.
pub(crate) struct Target {
    pub(crate) name: &'static str,
    /// Reads the bytes. It may refuse them, but not panic.
    pub(crate) body: fn(&[u8]),
    /// Good input.
    pub(crate) seeds: fn() -> Vec<Vec<u8>>,
}

pub(crate) const TARGETS: [Target; 9] = [
    Target { name: "header", body: header, seeds: || tensors(&["llama2", "llama-tied", "qwen3-fp8"]) },
    Target { name: "gguf", body: gguf, seeds: gguf_seeds },
    Target { name: "config", body: config, seeds: config_seeds },
    Target { name: "tokenizer", body: tokenizer, seeds: tokenizer_seeds },
    Target { name: "template", body: template, seeds: template_seeds },
    Target { name: "plan", body: plan, seeds: plan_seeds },
    Target { name: "profile", body: profile, seeds: || vec![PROFILE.as_bytes().to_vec()] },
    Target { name: "model", body: model, seeds: model_seeds },
    Target { name: "request", body: request, seeds: request_seeds },
];

/// A file of the repository.
fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name)
}

fn bytes(name: &str) -> Vec<u8> {
    fs::read(file(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The files of this name of reference models.
fn of_models(models: &[&str], name: &str) -> Vec<Vec<u8>> {
    models.iter().map(|model| bytes(&format!("tests/reference/models/{model}/{name}"))).collect()
}

/// A directory with these files.
fn directory(files: &[(&str, &[u8])]) -> tempfile::TempDir {
    let place = tempfile::tempdir().expect("a temporary directory");
    for (name, bytes) in files {
        fs::write(place.path().join(name), bytes).expect("a writable place");
    }
    place
}

fn tensors(models: &[&str]) -> Vec<Vec<u8>> {
    of_models(models, "model.safetensors")
}

fn header(bytes: &[u8]) {
    if let Ok(header) = Header::parse(bytes) {
        for (_, tensor) in &header.tensors {
            assert!(tensor.range.start <= tensor.range.end && tensor.range.end <= bytes.len());
        }
    }
    let place = directory(&[("model.safetensors", bytes)]);
    if let Ok(checkpoint) = Checkpoint::open(place.path()) {
        for name in checkpoint.names() {
            let _ = checkpoint.to_f32(name);
        }
    }
}

fn gguf_seeds() -> Vec<Vec<u8>> {
    let place = tempfile::tempdir().expect("a temporary directory");
    let opened = Opened::new(&file("tests/reference/models/llama2")).expect("a good model");
    let one = |kind: &str| {
        let kind: ExportType = kind.parse().expect("a type");
        let out = place.path().join(format!("{kind}.gguf"));
        let options = ExportOptions { kind, force: false, calibration: None };
        fracbit::export(&opened, &out, &options, &Quiet).expect("a good model");
        fs::read(out).expect("just written")
    };
    ["q8_0", "f16"].map(one).into()
}

fn gguf(bytes: &[u8]) {
    let place = directory(&[("model.gguf", bytes)]);
    if let Ok(opened) = Opened::new(&place.path().join("model.gguf")) {
        let _ = (opened.notes(), opened.tokenizer());
        for name in opened.checkpoint.names().take(8) {
            let _ = opened.checkpoint.to_f32(name);
        }
    }
}

fn config_seeds() -> Vec<Vec<u8>> {
    let models = ["exaone4", "gemma3", "granite-moe", "ministral3", "phi3", "qwen3-moe", "llama3"];
    of_models(&models, "config.json")
}

fn config(bytes: &[u8]) {
    if let Ok(mut config) = ModelConfig::parse(bytes, Path::new("config.json")) {
        assert!(config.head_dim > 0 && config.num_attention_heads.is_multiple_of(config.num_key_value_heads));
        assert!(config.q_dim() > 0 && config.kv_dim() > 0 && !config.layers.is_empty());
        let _ = config.apply_generation_config(bytes, Path::new("generation_config.json"));
    }
}

/// Files that a tokenizer may be in; the first byte of an input says which. Where there are two, a
/// byte that no text has stands between them.
const TOKENIZERS: [&[&str]; 5] = [
    &["tokenizer.json"],
    &["tokenizer.model"],
    &["tekken.json"],
    &["vocab.json", "merges.txt"],
    &["tokenizer_config.json", "added_tokens.json"],
];
const BETWEEN: u8 = 0xff;

fn tokenizer_seeds() -> Vec<Vec<u8>> {
    let golden = |kind: u8, name: &str| {
        let parts = TOKENIZERS[usize::from(kind)].iter();
        let parts =
            parts.map(|part| bytes(&format!("crates/fracbit-io/tests/golden/tokenizers/{name}/{part}")));
        [vec![kind], parts.collect::<Vec<_>>().join(&BETWEEN)].concat()
    };
    let json = bytes("tests/golden/versions/v1/tokenizer.json");
    let settings = bytes("crates/fracbit-io/tests/golden/tokenizers/qwen2/tokenizer_config.json");
    vec![
        [vec![0], json].concat(),
        golden(1, "spm-llama"),
        golden(1, "spm-unigram"),
        golden(1, "tiktoken"),
        golden(2, "tekken"),
        golden(3, "gpt2"),
        [vec![4], settings, vec![BETWEEN], b"{\"<x>\": 3}".to_vec()].concat(),
    ]
}

fn tokenizer(bytes: &[u8]) {
    let Some((&kind, rest)) = bytes.split_first() else { return };
    let names = TOKENIZERS[usize::from(kind) % TOKENIZERS.len()];
    let mut files: Vec<(&str, &[u8])> =
        names.iter().copied().zip(rest.splitn(names.len(), |&b| b == BETWEEN)).collect();
    let good = self::bytes("tests/golden/versions/v1/tokenizer.json");
    if names[0] == "tokenizer_config.json" {
        files.push(("tokenizer.json", &good));
    }
    let place = directory(&files);
    if let Ok(tokenizer) = Tokenizer::from_dir(place.path(), None) {
        for text in ["the cat sat\n\n 12", "na\u{ef}ve <s>\u{1F980}</s>"] {
            if let Ok(tokens) = tokenizer.encode(text, EncodeOptions::default()) {
                assert!(tokens.len() >= tokenizer.fewest_tokens(text), "{text}");
                let _ = tokenizer.decode(&tokens, false);
            }
        }
        let _ = (tokenizer.chat_template(), tokenizer.special_tokens(), tokenizer.to_json());
    }
}

fn template_seeds() -> Vec<Vec<u8>> {
    let golden = bytes("crates/fracbit-io/tests/golden/templates.json");
    let golden: serde_json::Value = serde_json::from_slice(&golden).expect("it is committed");
    let cases = golden["cases"].as_array().expect("a list");
    cases.iter().filter_map(|case| Some(case["template"].as_str()?.as_bytes().to_vec())).collect()
}

fn template(bytes: &[u8]) {
    let Ok(template) = ChatTemplate::new(&String::from_utf8_lossy(bytes)) else { return };
    let messages = [("system", "Be brief."), ("user", "<b> 1 & 2"), ("assistant", ""), ("user", "{{ x }}")];
    let messages = messages.map(|(role, content)| Message::new(role, content));
    let mut options = RenderOptions { add_generation_prompt: true, now: Some(0), ..RenderOptions::default() };
    options.special_tokens.insert("bos_token".to_owned(), "<s>".to_owned());
    let _ = template.render(&messages, &options);
}

fn plan_seeds() -> Vec<Vec<u8>> {
    ["v1", "v2", "v2-groups"]
        .map(|version| bytes(&format!("tests/golden/versions/{version}/plan.json")))
        .into()
}

fn plan(bytes: &[u8]) {
    let Ok(plan) = Plan::parse(&String::from_utf8_lossy(bytes), "plan.json") else { return };
    let again = serde_json::to_string(&plan).expect("a plan is JSON");
    assert_eq!(Plan::parse(&again, "plan.json").expect("what was written is read"), plan);
}

const PROFILE: &str = r#"{"profile_version": 3, "fracbit": "0.1.0", "build": "0", "cpu": "x", "isa": "avx2", "threads": 2,
"subject": "s", "shape": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256, "tied": true, "num_experts": 0, "num_experts_per_tok": 0},
"read_gb_per_s": 20.5, "int8_gmac_per_s": 200, "seconds": 1.5,
"kernels": [{"scheme": "tcq-3", "cols": 64, "rows": 128, "pieces": 1, "batch": 1, "us": 2.5, "spread": [2.0, 3.0]}],
"overheads": [{"batch": 1, "factor": 1, "layer_us": 1, "context_us": 0.1, "fixed_us": 2, "residual": 0.01,
"samples": [{"kernels_us": 5, "layers": 2, "context": 64, "us": 9}]}]}"#;

fn profile(bytes: &[u8]) {
    let place = directory(&[("machine.json", bytes)]);
    let _ = MachineProfile::read(&place.path().join("machine.json"));
}

fn model_seeds() -> Vec<Vec<u8>> {
    vec![bytes("tests/golden/versions/v2-groups/model.safetensors")]
}

/// The tensors of a packed model; what else its directory holds is good.
fn model(bytes: &[u8]) {
    let config = self::bytes("tests/golden/versions/v2-groups/config.json");
    let place = directory(&[("config.json", &config), ("model.safetensors", bytes)]);
    let Ok(opened) = Opened::new(place.path()) else { return };
    let kernels = fracbit::kernels().expect("the kernels of this machine");
    let Ok(model) = opened.model(&kernels, false) else { return };
    // Whatever was accepted runs.
    let mut state = model.state(&StateOptions { context: Some(3), ..StateOptions::default() });
    let (mut hidden, mut logits) = (Vec::new(), Vec::new());
    if model.forward(&mut state, &[0, 5, 9], &mut hidden).is_ok() {
        let _ = model.logits(&mut state, &hidden, &mut logits);
    }
}

/// Where bodies are sent to; the first byte of an input says which.
const PATHS: [&str; 5] =
    ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"];

const REQUESTS: [(u8, &str); 8] = [
    (
        0,
        r#"{"model": "m", "prompt": ["a", "b"], "n": 2, "max_tokens": 5, "echo": true, "logprobs": 3, "stop": ["x", "y"]}"#,
    ),
    (
        0,
        r#"{"prompt": [1, 2, 3], "logit_bias": {"5": -100}, "temperature": 0.5, "top_k": 4, "seed": 7, "guided_regex": "[a-z]+"}"#,
    ),
    (
        1,
        r#"{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "u"}]}],
        "stream": true, "stream_options": {"include_usage": true}, "chat_template_kwargs": {"enable_thinking": false}}"#,
    ),
    (
        1,
        r#"{"messages": [{"role": "user", "content": "u"}], "tools": [{"type": "function", "function": {"name": "f",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}], "tool_choice": "required"}"#,
    ),
    (
        1,
        r#"{"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": null, "tool_calls": [{"id": "1",
        "type": "function", "function": {"name": "f", "arguments": "{}"}}]}, {"role": "tool", "tool_call_id": "1", "content": "2"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}}"#,
    ),
    (
        2,
        r#"{"model": "m", "input": [{"role": "user", "content": [{"type": "input_text", "text": "u"}]}], "instructions": "i",
        "max_output_tokens": 9}"#,
    ),
    (
        3,
        r#"{"model": "m", "max_tokens": 9, "system": "s", "messages": [{"role": "user", "content": "u"}], "stop_sequences": ["x"]}"#,
    ),
    (4, r#"{"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "u"}]}]}"#),
];

fn request_seeds() -> Vec<Vec<u8>> {
    REQUESTS.iter().map(|(path, body)| [&[*path], body.as_bytes()].concat()).collect()
}

fn request(bytes: &[u8]) {
    let Some((&path, body)) = bytes.split_first() else { return };
    if let Err(status) = fracbit_server::judged(PATHS[usize::from(path) % PATHS.len()], body) {
        assert!((400..500).contains(&status), "the request is at fault, not the server: {status}");
    }
}

/// Damage of every kind to good input, the same for the same number.
pub(crate) fn mutated(seed: &[u8], number: u64) -> Vec<u8> {
    /// What parsers are surprised by, in documents and in binary files.
    const WORDS: [&[u8]; 14] = [
        b"0",
        b"-1",
        b"1e999",
        b"18446744073709551615",
        b"null",
        b"\"",
        b"{",
        b"[",
        b"]}",
        b",",
        b"\\ud800",
        b"\0\0\0\0",
        b"\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"{%",
    ];
    let mut state = number;
    // SplitMix64.
    let mut pick = |n: usize| {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((z ^ (z >> 31)) % n.max(1) as u64).unwrap_or(0)
    };
    let mut out = seed.to_vec();
    for _ in 0..=pick(3) {
        // Beginnings are full of rules: aim there half of the time.
        let end = if pick(2) == 0 { out.len().min(4096) } else { out.len() };
        let at = pick(end);
        match pick(7) {
            0 if !out.is_empty() => out[at] ^= 1 << pick(8),
            1 if !out.is_empty() => drop(out.remove(at)),
            2 => out.truncate(at),
            3 => drop(out.splice(at..at, WORDS[pick(WORDS.len())].iter().copied())),
            4 => {
                // A number, or a word, gives way to another one.
                let word = |b: &u8| b.is_ascii_alphanumeric() || *b == b'.';
                let length = out[at..].iter().take_while(|b| word(b)).count();
                drop(out.splice(at..at + length, WORDS[pick(WORDS.len())].iter().copied()));
            }
            5 => {
                let piece = out[at..end.min(at + 1 + pick(64))].to_vec();
                drop(out.splice(at..at, piece));
            }
            _ => {
                let to = end.min(at + 1 + pick(16));
                drop(out.drain(at..to));
            }
        }
    }
    out
}
