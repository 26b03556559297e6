//! Model configurations as published, and each rule they can break.

use std::path::Path;

use fracbit_io::{Architecture, Error, ModelConfig, RopeScaling};
use serde_json::{Value, json};

fn parse(v: &Value) -> Result<ModelConfig, Error> {
    ModelConfig::parse(v.to_string().as_bytes(), Path::new("config.json"))
}

fn base(model_type: &str) -> Value {
    json!({ "model_type": model_type, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "unknown_field": [1] })
}

fn with(model_type: &str, edits: Value) -> Value {
    let mut v = base(model_type);
    for (k, e) in edits.as_object().expect("an object") {
        v[k.as_str()] = e.clone();
    }
    v
}

#[test]
fn llama_3_2() {
    // The fields of the published Llama-3.2-1B.
    let v = json!({ "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama", "num_attention_heads": 32,
        "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": { "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3" },
        "rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 128256 });
    let c = parse(&v).unwrap();
    let want = RopeScaling::Llama3 {
        factor: 32.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192,
    };
    assert_eq!((c.arch, c.rope_theta, c.rope_scaling), (Architecture::Llama, 500_000.0, want));
    assert_eq!((c.head_dim, c.q_dim(), c.kv_dim(), c.num_hidden_layers()), (64, 2048, 512, 16));
    assert_eq!((c.bos_token_id, c.eos_token_ids.clone()), (Some(128_000), vec![128_001, 128_008, 128_009]));
    assert!(c.tie_word_embeddings && !c.qkv_bias && !c.mlp_bias && !c.qk_norm);
    assert_eq!(Value::Object(c.raw.clone()), v, "nothing is lost");
    // The same in the spelling of transformers 5.
    let mut v5 = v.clone();
    let o = v5.as_object_mut().unwrap();
    let mut p = o.remove("rope_scaling").unwrap();
    p["rope_theta"] = o.remove("rope_theta").unwrap();
    o.insert("rope_parameters".to_owned(), p);
    let c5 = parse(&v5).unwrap();
    assert_eq!((c5.rope_theta, c5.rope_scaling), (c.rope_theta, c.rope_scaling));
}

#[test]
fn biases_and_norms_by_architecture() {
    for (t, qkv, o, mlp, norm, tied) in [
        ("llama", true, true, true, false, false),
        ("mistral", false, false, false, false, false),
        ("qwen2", true, false, false, false, false),
        ("qwen3", true, true, false, true, false),
        ("smollm3", true, true, true, false, true),
    ] {
        let c = parse(&with(t, json!({ "attention_bias": true, "mlp_bias": true, "sliding_window": null })))
            .unwrap();
        assert_eq!(
            (c.qkv_bias, c.o_bias, c.mlp_bias, c.qk_norm, c.tie_word_embeddings),
            (qkv, o, mlp, norm, tied),
            "{t}"
        );
        let c = parse(&base(t)).unwrap();
        assert_eq!((c.qkv_bias, c.o_bias, c.mlp_bias), (t == "qwen2", false, false), "{t}");
        assert_eq!(c.head_dim, if t == "qwen3" { 128 } else { 16 });
    }
    let c = parse(&with("llama", json!({ "num_key_value_heads": null }))).unwrap();
    assert_eq!(c.num_key_value_heads, 4);
}

#[test]
fn windows() {
    let windows = |v: Value| -> Vec<Option<usize>> {
        parse(&v).unwrap().layers.iter().map(|l| l.sliding_window).collect()
    };
    assert_eq!(windows(with("llama", json!({ "sliding_window": 7 }))), [None; 8]);
    assert_eq!(windows(base("mistral")), [Some(4096); 8]);
    assert_eq!(windows(with("mistral", json!({ "sliding_window": null }))), [None; 8]);
    assert_eq!(windows(with("mistral", json!({ "sliding_window": 9 }))), [Some(9); 8]);
    let q = |e: Value| windows(with("qwen2", e));
    assert_eq!(
        q(json!({ "use_sliding_window": false, "sliding_window": 9, "max_window_layers": 0 })),
        [None; 8]
    );
    let half = [None, None, None, None, None, Some(9), Some(9), Some(9)];
    assert_eq!(q(json!({ "use_sliding_window": true, "sliding_window": 9, "max_window_layers": 5 })), half);
    let (f, s) = ("full_attention", "sliding_attention");
    let types = json!([f, f, f, f, f, s, s, s]);
    assert_eq!(q(json!({ "use_sliding_window": true, "sliding_window": 9, "layer_types": types })), half);
    assert_eq!(
        q(json!({ "use_sliding_window": true, "sliding_window": 9 })),
        [None; 8],
        "max_window_layers is 28 by default"
    );
    assert!(parse(&with("llama", json!({ "layer_types": types }))).is_err());
}

#[test]
fn smollm3_rotates_where_the_list_says_1() {
    let rope = |v: Value| -> Vec<bool> { parse(&v).unwrap().layers.iter().map(|l| l.rope).collect() };
    let every_fourth = [true, true, true, false, true, true, true, false];
    assert_eq!(rope(with("smollm3", json!({ "no_rope_layers": [1, 1, 1, 0, 1, 1, 1, 0] }))), every_fourth);
    assert_eq!(rope(base("smollm3")), every_fourth);
    assert_eq!(
        rope(with("smollm3", json!({ "no_rope_layer_interval": 2 }))),
        [true, false, true, false, true, false, true, false]
    );
    let c = parse(&with("smollm3", json!({ "use_sliding_window": true, "sliding_window": 9 }))).unwrap();
    assert!(c.layers.iter().all(|l| l.rope == l.sliding_window.is_none()));
    let mut v = base("smollm3");
    v.as_object_mut().unwrap().remove("rope_theta");
    assert_eq!(parse(&v).unwrap().rope_theta, 2e6);
}

#[test]
fn generation_config_overrides() {
    let mut c = parse(&with("llama", json!({ "eos_token_id": 1, "bos_token_id": 3 }))).unwrap();
    assert_eq!((c.bos_token_id, c.eos_token_ids.clone()), (Some(3), vec![1]));
    c.apply_generation_config(b"{\"eos_token_id\":[5,6],\"temperature\":0.6}", Path::new("g.json")).unwrap();
    assert_eq!((c.bos_token_id, c.eos_token_ids.clone()), (Some(3), vec![5, 6]));
    assert!(
        c.apply_generation_config(b"{\"eos_token_id\":[100]}", Path::new("g.json"))
            .unwrap_err()
            .to_string()
            .contains("below 100")
    );
}

/// `(edit, words the message must contain)`
#[test]
fn refusals() {
    let cases = [
        (json!({ "model_type": "gpt2" }), vec!["model_type", "LlamaForCausalLM", "smollm3", "`gpt2`"]),
        (
            json!({ "architectures": ["GPT2LMHeadModel"] }),
            vec!["architectures", "Qwen3ForCausalLM", "`GPT2LMHeadModel`"],
        ),
        (json!({ "architectures": ["Qwen2ForCausalLM"] }), vec!["agree", "`llama`"]),
        (json!({ "model_type": null }), vec!["both are missing"]),
        (json!({ "hidden_size": null }), vec!["`hidden_size`", "is missing"]),
        (json!({ "hidden_size": "64" }), vec!["`hidden_size`", "whole number", "\\\"64\\\""]),
        (json!({ "hidden_size": 0 }), vec!["`hidden_size`", "got 0"]),
        (json!({ "hidden_size": 1u64 << 40 }), vec!["`hidden_size`", "1..=16777216"]),
        (json!({ "num_hidden_layers": 1e9 as u64 }), vec!["`num_hidden_layers`"]),
        (json!({ "vocab_size": -5 }), vec!["`vocab_size`", "got -5"]),
        (json!({ "num_key_value_heads": 3 }), vec!["`num_key_value_heads`", "divide", "(4)", "got 3"]),
        (
            json!({ "num_attention_heads": 5, "num_key_value_heads": 5 }),
            vec!["`num_attention_heads`", "hidden_size (64)", "got 5"],
        ),
        (json!({ "head_dim": 15 }), vec!["`head_dim`", "even"]),
        (json!({ "hidden_act": "gelu" }), vec!["`hidden_act`", "silu", "`gelu`"]),
        (json!({ "rms_norm_eps": 0 }), vec!["`rms_norm_eps`", "positive"]),
        (json!({ "rope_theta": "x" }), vec!["`rope_theta`"]),
        (
            json!({ "rope_scaling": { "type": "dynamic", "factor": 2 } }),
            vec!["rope_scaling.rope_type", "llama3", "`dynamic`"],
        ),
        (json!({ "rope_scaling": { "rope_type": "yarn", "factor": 2 } }), vec!["`yarn`"]),
        (json!({ "rope_scaling": { "rope_type": "linear" } }), vec!["rope_scaling.factor", "missing"]),
        (json!({ "rope_scaling": 3 }), vec!["`rope_scaling`", "object"]),
        (json!({ "rope_parameters": { "full_attention": {} } }), vec!["`rope_parameters`", "layer type"]),
        (json!({ "partial_rotary_factor": 0.5 }), vec!["`partial_rotary_factor`"]),
        (json!({ "eos_token_id": 100 }), vec!["`eos_token_id`", "below 100"]),
        (json!({ "tie_word_embeddings": 1 }), vec!["`tie_word_embeddings`", "true or false"]),
    ];
    for (edit, words) in cases {
        let e = parse(&with("llama", edit.clone())).expect_err("refused").to_string();
        assert!(e.contains("config.json"), "{e}");
        for w in words {
            assert!(e.contains(w), "{edit}: `{w}` should be in: {e}");
        }
    }
    assert!(
        parse(&with("smollm3", json!({ "no_rope_layers": [1] })))
            .unwrap_err()
            .to_string()
            .contains("8 numbers")
    );
    assert!(ModelConfig::parse(b"[", Path::new("config.json")).is_err());
    assert!(ModelConfig::parse(b"[]", Path::new("config.json")).is_err());
}
