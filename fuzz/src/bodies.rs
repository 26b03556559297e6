//! What each target does with its bytes, and what a search begins with. Plain functions: the fuzzer
//! calls them, and so do tests of the workspace (`tests/tests/hostile/mutated.rs`, which includes
//! this file).

use fracbit::{ExportOptions, ExportType, MachineProfile, Opened, Plan, Quiet};
use fracbit_io::{
    ChatTemplate, Checkpoint, EncodeOptions, Header, Message, ModelConfig, RenderOptions, Tokenizer,
};
use fracbit_model::StateOptions;
use std::{
    cell::OnceCell,
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

/// Something that reads bytes of others.
pub struct Target {
    pub name: &'static str,
    /// Reads the bytes. It may refuse them, but not panic.
    pub body: fn(&[u8]),
    /// Good input.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

pub const HEADER: Target = Target { name: "header", body: header, seeds: header_seeds };
pub const GGUF: Target = Target { name: "gguf", body: gguf, seeds: gguf_seeds };
pub const CONFIG: Target = Target { name: "config", body: config, seeds: config_seeds };
pub const TOKENIZER: Target = Target { name: "tokenizer", body: tokenizer, seeds: tokenizer_seeds };
pub const TEMPLATE: Target = Target { name: "template", body: template, seeds: template_seeds };
pub const PLAN: Target = Target { name: "plan", body: plan, seeds: plan_seeds };
pub const PROFILE: Target = Target { name: "profile", body: profile, seeds: profile_seeds };
pub const MODEL: Target = Target { name: "model", body: model, seeds: model_seeds };
pub const REQUEST: Target = Target { name: "request", body: request, seeds: request_seeds };

/// A file of the repository.
fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name)
}

/// What a file of the repository holds, read once.
fn bytes(name: &str) -> &'static [u8] {
    static READ: Mutex<BTreeMap<String, &'static [u8]>> = Mutex::new(BTreeMap::new());
    let mut read = READ.lock().unwrap_or_else(PoisonError::into_inner);
    read.entry(name.to_owned()).or_insert_with(|| {
        let bytes = fs::read(file(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        Box::leak(bytes.into_boxed_slice())
    })
}

/// The files of this name of reference models.
fn of_models(models: &[&str], name: &str) -> Vec<Vec<u8>> {
    models.iter().map(|model| bytes(&format!("tests/reference/models/{model}/{name}")).to_vec()).collect()
}

thread_local! {
    /// Directories are made once: that, and taking them away, would take longer than most readers.
    static PLACE: OnceCell<tempfile::TempDir> = const { OnceCell::new() };
}

/// A directory with these files and no others, until this thread asks for the same again.
fn directory(files: &[(&str, &[u8])]) -> PathBuf {
    let names: Vec<&str> = files.iter().map(|(name, _)| *name).collect();
    let place = PLACE.with(|place| {
        let place = place.get_or_init(|| tempfile::tempdir().expect("a temporary directory"));
        place.path().join(names.join("+"))
    });
    if !place.is_dir() {
        fs::create_dir(&place).expect("a writable place");
    }
    for (name, bytes) in files {
        fs::write(place.join(name), bytes).expect("a writable place");
    }
    place
}

/// A safetensors file of zeros: names, types, shapes and bytes of each element.
fn zeros(tensors: &[(&str, &str, &[usize], usize)]) -> Vec<u8> {
    let mut end = 0;
    let entries = tensors.iter().map(|(name, dtype, shape, bytes)| {
        let start = end;
        end += shape.iter().product::<usize>() * bytes;
        let entry = serde_json::json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]});
        ((*name).to_owned(), entry)
    });
    let header = entries.collect::<serde_json::Map<_, _>>();
    let header = serde_json::to_vec(&header).expect("a document");
    [&(header.len() as u64).to_le_bytes(), header.as_slice(), &vec![0; end]].concat()
}

fn header_seeds() -> Vec<Vec<u8>> {
    let mut seeds = of_models(&["llama2", "llama-tied", "qwen3-fp8"], "model.safetensors");
    seeds.push(zeros(&[
        ("a.weight", "F8_E4M3", &[2, 3], 1),
        ("a.weight_scale_inv", "F32", &[1, 1], 4),
        ("b", "BF16", &[4], 2),
        ("c", "F16", &[2, 1, 2], 2),
        ("d", "I64", &[], 8),
    ]));
    seeds
}

fn header(bytes: &[u8]) {
    if let Ok(header) = Header::parse(bytes) {
        for (_, tensor) in &header.tensors {
            assert!(tensor.range.start <= tensor.range.end && tensor.range.end <= bytes.len());
        }
    }
    let place = directory(&[("model.safetensors", bytes)]);
    if let Ok(checkpoint) = Checkpoint::open(place) {
        for name in checkpoint.names() {
            let _ = checkpoint.to_f32(name);
        }
    }
}

const SMALL: &[u8] = br#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 64,
"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 101,
"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": true, "bos_token_id": 1, "eos_token_id": 2}"#;

/// The tensors of that model.
fn small() -> Vec<u8> {
    let layer = |name: &str| format!("model.layers.0.{name}.weight");
    let matrices = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"];
    let matrices: Vec<String> =
        matrices.into_iter().chain(["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]).map(layer).collect();
    let norms = ["input_layernorm", "post_attention_layernorm"].map(layer);
    let mut tensors: Vec<(&str, &str, &[usize], usize)> =
        vec![("model.embed_tokens.weight", "BF16", &[101, 32], 2), ("model.norm.weight", "F32", &[32], 4)];
    tensors.extend(matrices.iter().map(|name| (name.as_str(), "F16", &[32, 32][..], 2)));
    tensors.extend(norms.iter().map(|name| (name.as_str(), "F32", &[32][..], 4)));
    zeros(&tensors)
}

fn gguf_seeds() -> Vec<Vec<u8>> {
    let place = tempfile::tempdir().expect("a temporary directory");
    let small = directory(&[
        ("config.json", SMALL),
        ("model.safetensors", &small()),
        ("tokenizer.json", bytes("tests/golden/versions/v1/tokenizer.json")),
    ]);
    let one = |(model, kind): (&Path, &str)| {
        let opened = Opened::new(model).expect("a good model");
        let kind: ExportType = kind.parse().expect("a type");
        let out = place.path().join("model.gguf");
        let options = ExportOptions { kind, force: true, calibration: None };
        fracbit::export(&opened, &out, &options, &Quiet).expect("a good model");
        fs::read(out).expect("just written")
    };
    let whole = file("tests/reference/models/llama2");
    [(&*whole, "q8_0"), (&*whole, "f16"), (&*small, "q8_0")].map(one).into()
}

fn gguf(bytes: &[u8]) {
    let place = directory(&[("model.gguf", bytes)]);
    if let Ok(opened) = Opened::new(&place.join("model.gguf")) {
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
        [&[0], json].concat(),
        golden(1, "spm-llama"),
        golden(1, "spm-unigram"),
        golden(1, "tiktoken"),
        golden(2, "tekken"),
        golden(3, "gpt2"),
        [&[4], settings, &[BETWEEN], b"{\"<x>\": 3}"].concat(),
    ]
}

fn tokenizer(bytes: &[u8]) {
    let Some((&kind, rest)) = bytes.split_first() else { return };
    let names = TOKENIZERS[usize::from(kind) % TOKENIZERS.len()];
    let mut files: Vec<(&str, &[u8])> =
        names.iter().copied().zip(rest.splitn(names.len(), |&b| b == BETWEEN)).collect();
    let good = self::bytes("tests/golden/versions/v1/tokenizer.json");
    if names[0] == "tokenizer_config.json" {
        files.push(("tokenizer.json", good));
    }
    let place = directory(&files);
    if let Ok(tokenizer) = Tokenizer::from_dir(place, None) {
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
    let golden: serde_json::Value = serde_json::from_slice(golden).expect("it is committed");
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
    let whole = ["v1", "v2", "v2-groups"]
        .map(|version| bytes(&format!("tests/golden/versions/{version}/plan.json")).to_vec());
    let small = whole.iter().map(|plan| {
        let mut plan: serde_json::Value = serde_json::from_slice(plan).expect("it is committed");
        plan["layers"].as_array_mut().expect("a list").truncate(1);
        serde_json::to_vec(&plan).expect("a document")
    });
    small.chain(whole.iter().cloned()).collect()
}

fn plan(bytes: &[u8]) {
    let Ok(plan) = Plan::parse(&String::from_utf8_lossy(bytes), "plan.json") else { return };
    let again = serde_json::to_string(&plan).expect("a plan is JSON");
    assert_eq!(Plan::parse(&again, "plan.json").expect("what was written is read"), plan);
}

const MACHINE: &str = r#"{"profile_version": 3, "fracbit": "0.1.0", "build": "0", "cpu": "x", "isa": "avx2", "threads": 2,
"subject": "s", "shape": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256, "tied": true, "num_experts": 0, "num_experts_per_tok": 0},
"read_gb_per_s": 20.5, "int8_gmac_per_s": 200, "seconds": 1.5,
"kernels": [{"scheme": "tcq-3", "cols": 64, "rows": 128, "pieces": 1, "batch": 1, "us": 2.5, "spread": [2.0, 3.0]}],
"overheads": [{"batch": 1, "factor": 1, "layer_us": 1, "context_us": 0.1, "fixed_us": 2, "residual": 0.01,
"samples": [{"kernels_us": 5, "layers": 2, "context": 64, "us": 9}]}]}"#;

fn profile_seeds() -> Vec<Vec<u8>> {
    vec![MACHINE.as_bytes().to_vec()]
}

fn profile(bytes: &[u8]) {
    let _ = MachineProfile::parse(&String::from_utf8_lossy(bytes), "machine.json");
}

fn model_seeds() -> Vec<Vec<u8>> {
    vec![bytes("tests/golden/versions/v2-groups/model.safetensors").to_vec()]
}

/// The tensors of a packed model; what else its directory holds is good.
fn model(bytes: &[u8]) {
    let config = self::bytes("tests/golden/versions/v2-groups/config.json");
    let place = directory(&[("config.json", config), ("model.safetensors", bytes)]);
    let Ok(opened) = Opened::new(&place) else { return };
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
