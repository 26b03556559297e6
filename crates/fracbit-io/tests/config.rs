//! Model configurations as published, and each rule they can break.

use std::path::Path;

use fracbit_io::{
    Activation, Architecture, Error, Experts, LayerConfig, ModelConfig, QkNorm, RopeConfig, RopeScaling,
};
use serde_json::{Value, json};

fn parse(v: &Value) -> Result<ModelConfig, Error> {
    ModelConfig::parse(v.to_string().as_bytes(), Path::new("config.json"))
}

/// A configuration with some fields replaced.
fn replaced(mut v: Value, edits: Value) -> Value {
    for (k, e) in edits.as_object().expect("an object") {
        v[k.as_str()] = e.clone();
    }
    v
}

fn edited(v: &Value, edit: Value) -> Result<ModelConfig, Error> {
    parse(&replaced(v.clone(), edit))
}

fn base(model_type: &str) -> Value {
    json!({ "model_type": model_type, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "unknown_field": [1] })
}

fn with(model_type: &str, edits: Value) -> Value {
    replaced(base(model_type), edits)
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
    assert_eq!(c.arch, Architecture::Llama);
    assert_eq!(c.rope, RopeConfig { theta: 500_000.0, scaling: want, dim: 64, gain: 1.0, growth: None });
    assert_eq!((c.head_dim, c.q_dim(), c.kv_dim(), c.num_hidden_layers()), (64, 2048, 512, 16));
    assert_eq!((c.bos_token_id, c.eos_token_ids.clone()), (Some(128_000), vec![128_001, 128_008, 128_009]));
    assert!(c.tie_word_embeddings && !c.qkv_bias && !c.mlp_bias);
    assert_eq!((c.qk_norm, c.experts), (QkNorm::Absent, None));
    assert_eq!(Value::Object(c.raw.clone()), v, "nothing is lost");
    // The same in the spelling of transformers 5.
    let mut v5 = v.clone();
    let o = v5.as_object_mut().unwrap();
    let mut p = o.remove("rope_scaling").unwrap();
    p["rope_theta"] = o.remove("rope_theta").unwrap();
    o.insert("rope_parameters".to_owned(), p);
    let c5 = parse(&v5).unwrap();
    assert_eq!(c5.rope, c.rope);
}

#[test]
fn experts_by_architecture() {
    let experts =
        |t: &str, fields: Value| parse(&with(t, fields)).map(|c| (c.experts.unwrap(), c.intermediate_size));
    let want = |count, active, renormalized| Experts { count, active, renormalized };
    let qwen = |more: Value| {
        let mut fields = json!({ "moe_intermediate_size": 48, "num_experts": 12, "num_experts_per_tok": 3 });
        fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        experts("qwen3_moe", fields)
    };
    // `intermediate_size`, 128, is that of layers without experts.
    assert_eq!(qwen(json!({ "norm_topk_prob": true })).unwrap(), (want(12, 3, true), 48));
    assert_eq!(qwen(json!({})).unwrap(), (want(12, 3, false), 48));
    let local = json!({ "num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": null });
    for t in ["mixtral", "granitemoe"] {
        assert_eq!(experts(t, local.clone()).unwrap(), (want(8, 2, true), 128), "{t}");
    }
    let olmoe = json!({ "num_experts": 8, "num_experts_per_tok": 8, "clip_qkv": null });
    assert_eq!(experts("olmoe", olmoe.clone()).unwrap(), (want(8, 8, false), 128));
    let c = parse(&with("olmoe", olmoe)).unwrap();
    assert_eq!((c.qk_norm, c.rms_norm_eps), (QkNorm::Whole, 1e-5));
    let c = parse(&with("mixtral", local)).unwrap();
    assert_eq!((c.rope.theta, c.layers[0].sliding_window), (1e6, None));

    for (fields, rule) in [
        (
            json!({ "num_experts_per_tok": 13 }),
            "`num_experts_per_tok` should be a whole number in 1..=12, got 13",
        ),
        (
            json!({ "num_experts_per_tok": 0 }),
            "`num_experts_per_tok` should be a whole number in 1..=12, got 0",
        ),
        (json!({ "num_experts": 5000 }), "`num_experts` should be a whole number in 1..=4096"),
        (json!({ "num_experts": null }), "`num_experts` should be a whole number in 1..=4096, is missing"),
        (
            json!({ "moe_intermediate_size": 40 }),
            "should be a multiple of 16 in a model with experts, got 40",
        ),
        (
            json!({ "moe_intermediate_size": 1 << 23 }),
            "times the width of an expert should be at most 16777216",
        ),
        (json!({ "decoder_sparse_step": 2 }), "should be 1: every layer has experts"),
        (json!({ "mlp_only_layers": [3] }), "should be an empty list"),
        (json!({ "norm_topk_prob": 1 }), "should be true or false"),
    ] {
        let said = qwen(fields.clone()).unwrap_err().to_string();
        assert!(said.contains(rule), "{fields}: {said}");
    }
    let clipped = json!({ "num_experts": 8, "num_experts_per_tok": 2, "clip_qkv": 8.0 });
    assert!(experts("olmoe", clipped).unwrap_err().to_string().contains("clip_qkv"));
}

#[test]
fn biases_and_norms_by_architecture() {
    for (t, qkv, o, mlp, norm, tied) in [
        ("llama", true, true, true, false, false),
        ("mistral", false, false, false, false, false),
        ("qwen2", true, false, false, false, false),
        ("qwen3", true, true, false, true, false),
        ("smollm3", true, true, true, false, true),
        ("phi3", false, false, false, false, false),
        ("granite", true, true, true, false, false),
    ] {
        let c = parse(&with(t, json!({ "attention_bias": true, "mlp_bias": true, "sliding_window": null })))
            .unwrap();
        assert_eq!(
            (c.qkv_bias, c.o_bias, c.mlp_bias, c.qk_norm == QkNorm::Heads, c.tie_word_embeddings),
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
    assert_eq!(windows(base("phi3")), [None; 8]);
    assert_eq!(windows(with("phi3", json!({ "sliding_window": 2047 }))), [Some(2047); 8]);
    assert_eq!(windows(with("granite", json!({ "sliding_window": 9 }))), [None; 8]);
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
    assert_eq!(parse(&v).unwrap().rope.theta, 2e6);
}

#[test]
fn phi_turns_a_part_of_a_head_by_factors_of_its_own() {
    // As Phi-4-mini, whose heads have 128 channels: 96 turn.
    let (short, long): (Vec<f64>, Vec<f64>) = (0..48).map(|i| (1.0, 1.0 + f64::from(i))).unzip();
    let v = with(
        "phi3",
        json!({ "head_dim": 128, "partial_rotary_factor": 0.75, "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "rope_scaling": { "type": "longrope", "short_factor": short, "long_factor": long } }),
    );
    let c = parse(&v).unwrap();
    let want = RopeScaling::LongRope { short, long, original_max_position_embeddings: 4096 };
    assert_eq!((c.rope.dim, c.rope.scaling.clone(), c.max_position_embeddings), (96, want, 131_072));
    // sqrt(1 + ln 32 / ln 4096) = sqrt(1 + 5 / 12).
    assert!((c.rope.gain - (17.0f64 / 12.0).sqrt()).abs() < 1e-15, "{}", c.rope.gain);
    // The whole configuration's original context counts before the inner one, and Phi's own default
    // is 4096.
    let mut both = v.clone();
    both["rope_scaling"]["original_max_position_embeddings"] = 77.into();
    assert_eq!(parse(&both).unwrap().rope, c.rope);
    both.as_object_mut().unwrap().remove("original_max_position_embeddings");
    assert_ne!(parse(&both).unwrap().rope, c.rope);
    both["rope_scaling"].as_object_mut().unwrap().remove("original_max_position_embeddings");
    assert_eq!(parse(&both).unwrap().rope, c.rope);
    // Its older names, and those of transformers 5.
    for name in ["su", "yarn"] {
        let mut v = v.clone();
        v["rope_scaling"]["type"] = name.into();
        assert_eq!(parse(&v).unwrap().rope, c.rope);
    }
    let mut v5 = v.clone();
    let o = v5.as_object_mut().unwrap();
    let mut p = o.remove("rope_scaling").unwrap();
    p["partial_rotary_factor"] = o.remove("partial_rotary_factor").unwrap();
    p["original_max_position_embeddings"] = o.remove("original_max_position_embeddings").unwrap();
    o.insert("rope_parameters".to_owned(), p);
    assert_eq!(parse(&v5).unwrap().rope, c.rope);
    for (edit, word) in [
        (json!([1.0]), "48 numbers"),
        (json!(3), "got 3"),
        (Value::Null, "is missing"),
        (json!(vec![0.0; 48]), "got 0.0"),
        (json!(vec![1e300; 48]), "got 1e"),
    ] {
        let mut v = v.clone();
        v["rope_scaling"]["long_factor"] = edit;
        let e = parse(&v).expect_err("refused").to_string();
        assert!(e.contains("rope_scaling.long_factor") && e.contains(word), "{e}");
    }
    for part in [0.0, 0.001, 0.2, 1.5] {
        let e = parse(&with("phi3", json!({ "partial_rotary_factor": part }))).expect_err("refused");
        assert!(e.to_string().contains("partial_rotary_factor"), "{e}");
    }
}

#[test]
fn yarn_stretches_the_context() {
    let yarn = |edit: Value| {
        let mut v = with("qwen2", json!({ "rope_scaling": { "type": "yarn", "factor": 4.0 } }));
        for (k, e) in edit.as_object().unwrap() {
            v["rope_scaling"][k.as_str()] = e.clone();
        }
        parse(&v)
    };
    let c = yarn(json!({})).unwrap();
    let want = RopeScaling::Yarn {
        factor: 4.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        truncate: true,
        original_max_position_embeddings: 512,
    };
    assert_eq!((c.rope.scaling, c.max_position_embeddings), (want, 2048));
    assert!((c.rope.gain - (1.0 + 0.1 * 4f64.ln())).abs() < 1e-15, "{}", c.rope.gain);
    assert_eq!(yarn(json!({ "attention_factor": 0.75 })).unwrap().rope.gain, 0.75);
    assert_eq!(yarn(json!({ "original_max_position_embeddings": 64 })).unwrap().max_position_embeddings, 512);
    for (edit, word) in [
        (json!({ "beta_fast": 1.0 }), "beta_fast"),
        (json!({ "mscale": 1.0, "mscale_all_dim": 0.0 }), "mscale_all_dim"),
        (json!({ "llama_4_scaling_beta": 0.1 }), "known of `ministral3` only"),
        (json!({ "factor": null }), "rope_scaling.factor"),
        (json!({ "attention_factor": 1e300 }), "1e-6 to 1e6, got 1e300"),
    ] {
        assert!(yarn(edit).expect_err("refused").to_string().contains(word));
    }
}

#[test]
fn granite_multiplies() {
    let v = with(
        "granite",
        json!({ "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.015625, "logits_scaling": 8.0 }),
    );
    let c = parse(&v).unwrap();
    assert_eq!((c.residual_factor, c.logit_factor), (0.22 / 12.0, 0.125));
    assert_eq!(c.rms_norm_eps, 1e-5 / 144.0);
    // 0.015625 for each score, of which 1 / sqrt(16) is made anyway.
    assert_eq!(c.rope.gain, 0.25);
    let c = parse(&base("granite")).unwrap();
    assert_eq!((c.residual_factor, c.logit_factor, c.rms_norm_eps, c.rope.gain), (1.0, 1.0, 1e-5, 2.0));
    let e = parse(&with("granite", json!({ "logits_scaling": 1e9 }))).expect_err("refused").to_string();
    assert!(e.contains("`logits_scaling`") && e.contains("1e-6 to 1e6"), "{e}");
    let c = parse(&with("llama", json!({ "logits_scaling": 8.0 }))).unwrap();
    assert_eq!((c.residual_factor, c.logit_factor, c.rope.gain), (1.0, 1.0, 1.0), "no part of Llama");
}

#[test]
fn granite_4_without_state_spaces_is_granite() {
    let factors = json!({ "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.015625, "logits_scaling": 10.0 });
    let with_factors = |model_type: &str, more: Value| {
        let mut fields = factors.clone();
        fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        with(model_type, fields)
    };
    // The fields of the published granite-4.0-micro that say something else.
    let hybrid = |more: Value| {
        let mut v = with_factors(
            "granitemoehybrid",
            json!({ "architectures": ["GraniteMoeHybridForCausalLM"], "layer_types": vec!["attention"; 8], "num_local_experts": 0,
                "num_experts_per_tok": 0, "shared_intermediate_size": 96, "position_embedding_type": "rope", "mamba_n_heads": 128 }),
        );
        v.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        parse(&v)
    };
    let c = hybrid(json!({})).unwrap();
    let granite = parse(&with_factors("granite", json!({ "intermediate_size": 96 }))).unwrap();
    assert_eq!(ModelConfig { raw: granite.raw.clone(), ..c.clone() }, granite);
    assert_eq!((&c.raw["model_type"], &c.raw["mamba_n_heads"]), (&json!("granite"), &json!(128)));
    assert_eq!(parse(&Value::Object(c.raw.clone())).unwrap(), c, "what is written is read alike");
    assert!(hybrid(json!({ "architectures": null })).is_ok());
    for (fields, rule) in [
        (
            json!({ "layer_types": ["attention", "mamba"] }),
            "`layer_types` should be `attention` for every layer",
        ),
        (json!({ "layer_types": null }), "`layer_types` should be `attention` for every layer"),
        (json!({ "layer_types": ["attention"] }), "`layer_types` should be 8 names"),
        (json!({ "num_local_experts": 62 }), "`num_local_experts` should be 0"),
        (json!({ "num_local_experts": null }), "`num_local_experts` should be 0"),
        (
            json!({ "position_embedding_type": "nope" }),
            "`position_embedding_type` should be `rope`, got `nope`",
        ),
        (
            json!({ "position_embedding_type": null }),
            "`position_embedding_type` should be `rope`, got nothing",
        ),
        (json!({ "shared_intermediate_size": -1 }), "`shared_intermediate_size` should be a whole number"),
        (
            json!({ "architectures": ["GraniteForCausalLM"] }),
            "should be `GraniteMoeHybridForCausalLM`, as model_type says",
        ),
    ] {
        let said = hybrid(fields.clone()).expect_err("refused").to_string();
        assert!(said.contains(rule), "{fields}: {said}");
    }
}

#[test]
fn olmo_2_and_3() {
    // The fields of the published Olmo-3-7B that say anything, with its length stretched.
    let types: Vec<&str> =
        (1..=32).map(|i| if i % 4 == 0 { "full_attention" } else { "sliding_attention" }).collect();
    let v = json!({ "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "attention_bias": false, "eos_token_id": 100_257,
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008, "layer_types": types, "max_position_embeddings": 65536,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 100_277, "rms_norm_eps": 1e-6,
        "rope_scaling": { "attention_factor": 1.25, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
            "original_max_position_embeddings": 8192, "rope_type": "yarn" },
        "rope_theta": 500_000, "sliding_window": 4096, "tie_word_embeddings": false, "vocab_size": 100_278 });
    let c = parse(&v).unwrap();
    assert!(!c.pre_norms && c.post_norms && c.qk_norm == QkNorm::Whole && !c.qkv_bias && !c.o_bias);
    assert_eq!((c.gain_offset, c.residual_factor, c.rms_norm_eps, c.inner_norm_eps), (0.0, 1.0, 1e-6, 1e-6));
    // Only layers that see everything turn slower and more.
    assert!(matches!(c.rope.scaling, RopeScaling::Yarn { .. }), "{:?}", c.rope);
    let local = RopeConfig { theta: 5e5, scaling: RopeScaling::None, dim: 128, gain: 1.0, growth: None };
    assert_eq!((c.rope.gain, c.local_rope.clone()), (1.25, Some(local)));
    assert_eq!(
        (c.has_local_rope(2), c.has_local_rope(3), c.layers[2].sliding_window),
        (true, false, Some(4096))
    );
    let mut without = v.clone();
    without.as_object_mut().expect("an object").remove("layer_types");
    assert_eq!(parse(&without).unwrap().layers, c.layers);
    // As transformers 5 writes it: one set of parameters, or (from 5.13 on) one for each type of
    // layers.
    let mut newer = v.clone();
    for field in ["rope_scaling", "rope_theta"] {
        newer.as_object_mut().expect("an object").remove(field);
    }
    let mut yarn = v["rope_scaling"].clone();
    yarn["rope_theta"] = json!(500_000);
    newer["rope_parameters"] = yarn.clone();
    let one = parse(&newer).unwrap();
    assert_eq!((&one.rope, &one.local_rope), (&c.rope, &c.local_rope));
    let plain = json!({ "rope_type": "default", "rope_theta": 500_000 });
    newer["rope_parameters"] = json!({ "full_attention": yarn, "sliding_attention": plain });
    let each = parse(&newer).unwrap();
    assert_eq!((&each.rope, &each.local_rope), (&c.rope, &c.local_rope));
    assert_eq!(each.max_position_embeddings, c.max_position_embeddings);
    newer["rope_parameters"]["sliding_attention"]["rope_theta"] = json!(10_000);
    assert_eq!(parse(&newer).unwrap().local_rope.map(|rope| rope.theta), Some(1e4));
    newer["rope_parameters"].as_object_mut().expect("an object").remove("sliding_attention");
    let e = parse(&newer).unwrap_err().to_string();
    assert!(e.contains("rope_parameters.sliding_attention"), "{e}");

    let mut older = v;
    for (field, value) in [
        ("model_type", json!("olmo2")),
        ("architectures", json!(["Olmo2ForCausalLM"])),
        ("layer_types", json!(null)),
    ] {
        older[field] = value;
    }
    let c = parse(&older).unwrap();
    assert!(!c.pre_norms && c.post_norms && c.layers.iter().all(|l| l.sliding_window.is_none()));
    assert_eq!((c.local_rope, c.rope.gain), (None, 1.25));
    older["layer_types"] = json!(types);
    assert!(parse(&older).unwrap_err().to_string().contains("`olmo2`"));
    let c = parse(&with("llama", json!({}))).unwrap();
    assert!(c.pre_norms && !c.post_norms);
}

#[test]
fn exaone4() {
    // The fields of the published EXAONE-4.0-32B that say anything.
    let types: Vec<&str> =
        (1..=64).map(|i| if i % 4 == 0 { "full_attention" } else { "sliding_attention" }).collect();
    let v = json!({ "architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "bos_token_id": 1, "eos_token_id": 361, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 27392, "layer_types": types, "max_position_embeddings": 131_072,
        "num_attention_heads": 40, "num_hidden_layers": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000,
        "rope_scaling": { "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3" },
        "sliding_window": 4096, "sliding_window_pattern": "LLLG", "tie_word_embeddings": false, "vocab_size": 102_400 });
    let c = parse(&v).unwrap();
    let window = |i: usize| (i % 4 != 3).then_some(4096);
    let layers: Vec<_> =
        (0..64).map(|i| LayerConfig { rope: window(i).is_some(), sliding_window: window(i) }).collect();
    assert_eq!(c.layers, layers);
    assert_eq!((c.pre_norms, c.post_norms, c.qk_norm, c.gain_offset), (false, true, QkNorm::Heads, 0.0));
    assert!(!c.qkv_bias && !c.o_bias && !c.mlp_bias && c.local_rope.is_none());
    let edited = |edit: Value| edited(&v, edit);
    // The 1.2B has no windows, and turns in every layer.
    for types in [json!(vec!["full_attention"; 64]), Value::Null] {
        let c =
            edited(json!({ "sliding_window": null, "sliding_window_pattern": null, "layer_types": types }))
                .unwrap();
        assert!(c.layers.iter().all(|l| *l == LayerConfig { rope: true, sliding_window: None }));
    }
    // Every fourth by default; letters alone say too little.
    let c = edited(json!({ "sliding_window_pattern": null, "layer_types": null })).unwrap();
    assert_eq!(c.layers, layers);
    let e = edited(json!({ "layer_types": null })).unwrap_err().to_string();
    assert!(e.contains("`sliding_window_pattern`"), "{e}");
}

#[test]
fn neighbouring_channels_turn_in_ernie_and_glm() {
    // The fields of the published ERNIE-4.5-0.3B that say anything.
    let v = json!({ "architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5", "bos_token_id": 1, "eos_token_id": 2, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 131_072, "num_attention_heads": 16,
        "num_hidden_layers": 18, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "rope_scaling": null,
        "use_bias": false, "vocab_size": 103_424, "tie_word_embeddings": true });
    let c = parse(&v).unwrap();
    assert!(c.interleaved_rope && c.tie_word_embeddings && !c.qkv_bias && !c.o_bias && !c.mlp_bias);
    assert_eq!((c.rope.theta, c.rope.dim, c.q_dim()), (5e5, 128, 2048));
    let c = edited(
        &v,
        json!({ "use_bias": true, "rope_theta": null, "head_dim": null, "tie_word_embeddings": null }),
    )
    .unwrap();
    assert!(c.tie_word_embeddings && c.qkv_bias && c.o_bias && c.mlp_bias);
    assert_eq!((c.rope.theta, c.head_dim), (5e5, 64), "null is the width over the heads");
    // Those of GLM-4-9B-0414.
    let v = json!({ "architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "attention_bias": true, "attention_dropout": 0.0,
        "eos_token_id": [151_329, 151_336, 151_338], "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 13696,
        "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2,
        "pad_token_id": 151_329, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": false, "vocab_size": 151_552 });
    let c = parse(&v).unwrap();
    assert!(c.interleaved_rope && c.pre_norms && c.post_norms && c.qkv_bias && !c.o_bias && !c.mlp_bias);
    assert_eq!((c.rope.dim, c.gain_offset), (64, 0.0));
    let older = json!({ "architectures": ["GlmForCausalLM"], "model_type": "glm", "partial_rotary_factor": null, "rms_norm_eps": null });
    let c = edited(&v, older).unwrap();
    assert_eq!((c.post_norms, c.rope.dim, c.rms_norm_eps), (false, 64, 1.5625e-7));
    let e = edited(&v, json!({ "partial_rotary_factor": 0.2 })).unwrap_err().to_string();
    assert!(e.contains("`partial_rotary_factor`"), "{e}");
    assert!(!parse(&with("llama", json!({}))).unwrap().interleaved_rope);
}

#[test]
fn seed_oss() {
    let v = json!({ "architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss", "attention_bias": true, "attention_out_bias": false,
        "bos_token_id": 0, "eos_token_id": 2, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 27648,
        "max_position_embeddings": 524_288, "mlp_bias": false, "num_attention_heads": 80, "num_hidden_layers": 64, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6, "rope_scaling": { "rope_type": "default" }, "rope_theta": 10_000_000.0, "tie_word_embeddings": false,
        "vocab_size": 155_136 });
    let c = parse(&v).unwrap();
    assert_eq!((c.qkv_bias, c.o_bias, c.mlp_bias, c.qk_norm), (true, false, false, QkNorm::Absent));
    assert_eq!((c.q_dim(), c.kv_dim(), c.rope.theta), (10_240, 1024, 1e7));
    let mut bare = v.clone();
    let fields = bare.as_object_mut().expect("an object");
    for field in ["attention_bias", "attention_out_bias", "head_dim", "max_position_embeddings"] {
        fields.remove(field);
    }
    let got = parse(&bare).unwrap();
    assert_eq!(
        (got.qkv_bias, got.o_bias, got.head_dim, got.max_position_embeddings),
        (true, false, 128, 524_288)
    );
    bare["attention_bias"] = json!(false);
    bare["attention_out_bias"] = json!(true);
    let got = parse(&bare).unwrap();
    assert_eq!((got.qkv_bias, got.o_bias), (false, true));
}

#[test]
fn gemma2() {
    // The fields of the published gemma-2-2b that say anything.
    let v = json!({ "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attention_bias": false, "attn_logit_softcapping": 50.0,
        "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 107], "final_logit_softcapping": 30.0, "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "intermediate_size": 9216,
        "max_position_embeddings": 8192, "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4, "pad_token_id": 0,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": 4096, "torch_dtype": "bfloat16",
        "vocab_size": 256_000 });
    let c = parse(&v).unwrap();
    assert_eq!((c.score_cap, c.logit_cap), (Some(50.0), Some(30.0)));
    let rope = RopeConfig { theta: 1e4, scaling: RopeScaling::None, dim: 256, gain: 1.0, growth: None };
    assert_eq!((c.rope.clone(), c.local_rope.clone()), (rope, None));
    let windows: Vec<usize> = (0..26).filter(|&i| c.layers[i].sliding_window == Some(4096)).collect();
    assert_eq!(windows, (0..26).step_by(2).collect::<Vec<_>>());
    assert_eq!(
        (c.activation, c.pre_norms, c.post_norms, c.qk_norm, c.gain_offset),
        (Activation::GeluTanh, true, true, QkNorm::Absent, 1.0)
    );
    assert!(c.tie_word_embeddings && !c.qkv_bias && !c.o_bias && !c.mlp_bias);
    assert_eq!(c.residual_factor, 1.0 / 2304f64.sqrt());

    let edited = |edit: Value| edited(&v, edit);
    // The scale of scores of the 27B model; what null says, and what is left out.
    let c = edited(json!({ "query_pre_attn_scalar": 144, "head_dim": 128, "attn_logit_softcapping": null }))
        .unwrap();
    assert_eq!(
        (c.rope.gain, c.score_cap, c.logit_cap),
        ((8.0 * 2f64.sqrt() / 12.0).sqrt(), None, Some(30.0))
    );
    let mut bare = v.clone();
    let fields = bare.as_object_mut().expect("an object");
    for field in [
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "sliding_window",
        "head_dim",
        "num_attention_heads",
    ] {
        fields.remove(field);
    }
    assert_eq!(parse(&bare).unwrap().score_cap, Some(50.0));
    assert_eq!(parse(&bare).unwrap().layers, parse(&v).unwrap().layers);
    for (edit, word) in [
        (json!({ "hidden_activation": "gelu" }), "`gelu_pytorch_tanh`"),
        (json!({ "final_logit_softcapping": 0.0 }), "`final_logit_softcapping`"),
        (json!({ "attn_logit_softcapping": "50" }), "`attn_logit_softcapping`"),
        (json!({ "use_bidirectional_attention": true }), "`gemma2`"),
        (json!({ "attention_bias": true }), "`attention_bias`"),
    ] {
        let e = edited(edit).expect_err("refused").to_string();
        assert!(e.contains(word), "{e}");
    }
    // No other model has them.
    let c = parse(&with("llama", json!({ "attn_logit_softcapping": 50.0 }))).unwrap();
    assert_eq!((c.score_cap, c.logit_cap), (None, None));
}

#[test]
fn gemma3() {
    // The fields of the published gemma-3-1b that say anything; the head is tied where nothing is
    // said of it.
    let v = json!({ "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attention_bias": false, "attn_logit_softcapping": null,
        "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106], "final_logit_softcapping": null, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912, "max_position_embeddings": 32768,
        "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6, "rope_local_base_freq": 10000, "rope_scaling": null, "rope_theta": 1_000_000, "sliding_window": 512,
        "sliding_window_pattern": 6, "torch_dtype": "bfloat16", "vocab_size": 262_144 });
    let c = parse(&v).unwrap();
    let rope = |theta| RopeConfig { theta, scaling: RopeScaling::None, dim: 256, gain: 1.0, growth: None };
    assert_eq!((c.rope.clone(), c.local_rope.clone()), (rope(1e6), Some(rope(1e4))));
    let windows: Vec<usize> = (0..26).filter(|&i| c.layers[i].sliding_window == Some(512)).collect();
    assert_eq!(windows, (0..26).filter(|i| i % 6 != 5).collect::<Vec<_>>());
    assert_eq!((c.has_local_rope(4), c.has_local_rope(5)), (true, false));
    assert_eq!(
        (c.activation, c.post_norms, c.qk_norm, c.gain_offset),
        (Activation::GeluTanh, true, QkNorm::Heads, 1.0)
    );
    assert!(c.tie_word_embeddings && !c.qkv_bias && !c.o_bias && !c.mlp_bias);
    assert_eq!((c.rms_norm_eps, c.inner_norm_eps), (1e-6 / 1152f64.sqrt().powi(2), 1e-6));
    assert_eq!(c.residual_factor, 1.0 / 1152f64.sqrt());

    let edited = |edit: Value| edited(&v, edit);
    // As transformers 5 writes it.
    let types: Vec<&str> =
        (1..=26).map(|i| if i % 6 == 0 { "full_attention" } else { "sliding_attention" }).collect();
    let newer = json!({ "layer_types": types, "sliding_window_pattern": null, "rope_theta": null, "rope_local_base_freq": null,
        "rope_parameters": { "full_attention": { "rope_type": "linear", "factor": 8.0, "rope_theta": 1e6 },
            "sliding_attention": { "rope_type": "default", "rope_theta": 1e4 } } });
    let c5 = edited(newer).unwrap();
    assert_eq!((&c5.layers, &c5.local_rope), (&c.layers, &c.local_rope));
    assert_eq!((c5.rope.theta, c5.rope.scaling), (1e6, RopeScaling::Linear { factor: 8.0 }));
    // What is left out, and another scale of scores.
    let c = edited(
        json!({ "sliding_window_pattern": null, "rope_theta": null, "rope_local_base_freq": null, "head_dim": 64 }),
    );
    let c = c.unwrap();
    assert_eq!((c.rope.theta, c.rope.gain, c.layers.clone()), (1e6, (8.0f64 / 16.0).sqrt(), c5.layers));
    assert_eq!(c.local_rope.map(|r| (r.theta, r.gain)), Some((1e4, (8.0f64 / 16.0).sqrt())));
    for (edit, word) in [
        (json!({ "hidden_activation": "silu" }), "`gelu_pytorch_tanh`"),
        (json!({ "final_logit_softcapping": 30.0 }), "`final_logit_softcapping`"),
        (json!({ "attn_logit_softcapping": 50.0 }), "`attn_logit_softcapping`"),
        (json!({ "use_bidirectional_attention": true }), "`use_bidirectional_attention`"),
        (json!({ "attention_bias": true }), "`attention_bias`"),
        (json!({ "query_pre_attn_scalar": 0 }), "`query_pre_attn_scalar`"),
        (json!({ "rope_parameters": { "full_attention": {} } }), "rope_parameters.sliding_attention"),
        (json!({ "layer_types": ["full_attention"] }), "26 names"),
    ] {
        let e = edited(edit).expect_err("refused").to_string();
        assert!(e.contains(word), "{e}");
    }
}

#[test]
fn ministral3() {
    // As the published Ministral-3-3B-Instruct-2512 has it, in 8-bit floats.
    let rope = json!({ "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16_384, "rope_theta": 1e6, "rope_type": "yarn", "type": "yarn" });
    let text = json!({ "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 9216,
        "max_position_embeddings": 262_144, "model_type": "ministral3", "num_attention_heads": 32, "num_hidden_layers": 26,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_parameters": rope, "sliding_window": null, "tie_word_embeddings": true,
        "vocab_size": 131_072 });
    let v = json!({ "architectures": ["Mistral3ForConditionalGeneration"], "dtype": "bfloat16", "image_token_index": 10, "model_type": "mistral3",
        "quantization_config": { "activation_scheme": "static", "dequantize": false, "quant_method": "fp8" }, "text_config": text,
        "vision_config": { "model_type": "pixtral" } });
    let c = parse(&v).unwrap();
    assert_eq!((c.arch, c.head_dim, c.num_hidden_layers()), (Architecture::Ministral3, 128, 26));
    assert!(
        c.tie_word_embeddings && c.layers.iter().all(|layer| layer.rope && layer.sliding_window.is_none())
    );
    assert_eq!((c.rope.gain, c.max_position_embeddings), (1.0, 262_144), "two magnitudes of YaRN make one");
    let factors = [0, 16_383, 16_384, 40_000].map(|position| c.rope.query_factor(position));
    assert_eq!(factors, [1.0, 1.0, 1.0 + 0.1 * 2f64.ln(), 1.0 + 0.1 * 3f64.ln()]);
    assert_eq!(parse(&Value::Object(c.raw.clone())).unwrap(), c);
    let mut other = v;
    other["text_config"]["rope_parameters"]["mscale_all_dim"] = json!(0.5);
    let gain = |times: f64| 1.0 + 0.1 * times * 16f64.ln();
    assert_eq!(parse(&other).unwrap().rope.gain, gain(1.0) / gain(0.5));
    other["text_config"]["rope_parameters"] = Value::Null;
    let e = parse(&other).expect_err("refused").to_string();
    assert!(e.contains("rope_parameters") && e.contains("is missing"), "{e}");
}

#[test]
fn generation_config_overrides() {
    let mut c = parse(&with("llama", json!({ "eos_token_id": 1, "bos_token_id": 3 }))).unwrap();
    assert_eq!((c.bos_token_id, c.eos_token_ids.clone()), (Some(3), vec![1]));
    c.apply_generation_config(b"{\"eos_token_id\":[5,6],\"temperature\":0.6}", Path::new("g.json")).unwrap();
    assert_eq!((c.bos_token_id, c.eos_token_ids.clone()), (Some(3), vec![5, 6]));
    // Tokens that the vocabulary does not have end nothing.
    c.apply_generation_config(b"{\"eos_token_id\":[100, 7, -1]}", Path::new("g.json")).unwrap();
    assert_eq!((c.eos_token_ids.clone(), c.notes.len()), (vec![7], 2));
    assert!(c.notes.iter().all(|n| n.contains("`g.json`") && n.contains("eos_token_id")), "{:?}", c.notes);
    let c = parse(&with("llama", json!({ "eos_token_id": 100, "bos_token_id": 101 }))).unwrap();
    assert_eq!((c.eos_token_ids.len(), c.bos_token_id, c.notes.len()), (0, None, 2));
}

/// Checkpoints that transformers 5 saved and somebody edited as he was used to.
#[test]
fn rope_scaling_and_rope_parameters_are_one() {
    let llama = |rope: Value| {
        let mut v = with("llama", json!({ "rope_scaling": null }));
        v.as_object_mut().unwrap().remove("rope_theta");
        v.as_object_mut().unwrap().extend(rope.as_object().unwrap().clone());
        parse(&v)
    };
    let yarn = json!({ "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64 });
    let plain = json!({ "rope_type": "default", "rope_theta": 5e5 });
    let mut whole = yarn.clone();
    whole["rope_theta"] = json!(5e5);
    let want = llama(json!({ "rope_parameters": whole })).unwrap();
    assert!(matches!(want.rope.scaling, RopeScaling::Yarn { .. }) && want.rope.theta == 5e5);
    let mut partly = whole.clone();
    partly.as_object_mut().unwrap().remove("factor");
    for same in [
        json!({ "rope_parameters": plain, "rope_scaling": yarn }),
        json!({ "rope_parameters": plain, "rope_scaling": yarn, "rope_theta": 500_000 }),
        json!({ "rope_parameters": whole, "rope_scaling": yarn }),
        json!({ "rope_parameters": whole, "rope_scaling": { "type": "default" } }),
        json!({ "rope_parameters": partly, "rope_scaling": yarn }),
        json!({ "rope_scaling": whole }),
        json!({ "rope_scaling": yarn, "rope_theta": 5e5 }),
    ] {
        let got = llama(same.clone()).unwrap();
        assert_eq!(
            (got.rope, got.max_position_embeddings),
            (want.rope.clone(), want.max_position_embeddings),
            "{same}"
        );
    }
    let linear = json!({ "rope_type": "linear", "factor": 4.0 });
    let mut other = yarn.clone();
    other["factor"] = json!(8);
    for (differ, words) in [
        (
            json!({ "rope_parameters": linear, "rope_scaling": yarn }),
            ["rope_parameters.rope_type", "rope_scaling"],
        ),
        (
            json!({ "rope_parameters": yarn, "rope_scaling": other }),
            ["rope_parameters.factor", "rope_scaling"],
        ),
        (json!({ "rope_parameters": plain, "rope_theta": 1e4 }), ["rope_parameters.rope_theta", "agree"]),
        (json!({ "rope_scaling": whole, "rope_theta": 1e4 }), ["rope_scaling.rope_theta", "agree"]),
        (json!({ "rope_scaling": { "factor": 4.0 } }), ["rope_scaling.rope_type", "missing"]),
    ] {
        let e = llama(differ).expect_err("refused").to_string();
        assert!(words.iter().all(|word| e.contains(word)), "{e}");
    }
}

/// What Python's `json` writes and JSON does not have.
#[test]
fn words_of_python_in_fields() {
    let with_field = |field: &str| {
        let text = with("llama", json!({})).to_string();
        ModelConfig::parse(format!("\u{feff}{{{field}, {}", &text[1..]).as_bytes(), Path::new("config.json"))
    };
    assert!(with_field("\"time_step_limit\": [0.0, Infinity]").is_ok());
    assert!(with_field("\"unused\": NaN, \"other\": -Infinity").is_ok());
    let text = with("llama", json!({ "rope_theta": null }))
        .to_string()
        .replace("\"rope_theta\":null", "\"rope_theta\":Infinity");
    let e = ModelConfig::parse(text.as_bytes(), Path::new("config.json")).unwrap_err().to_string();
    assert!(e.contains("`rope_theta`") && e.contains("Infinity"), "{e}");
    let e = with_field("// no\n \"a\": 1").unwrap_err().to_string();
    assert!(e.contains("comment"), "{e}");
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
        (json!({ "rope_scaling": { "rope_type": "ntk", "factor": 2 } }), vec!["`yarn`", "`ntk`"]),
        (json!({ "rope_scaling": { "rope_type": "linear" } }), vec!["rope_scaling.factor", "missing"]),
        (json!({ "rope_scaling": 3 }), vec!["`rope_scaling`", "object"]),
        (json!({ "rope_parameters": { "full_attention": {} } }), vec!["`rope_parameters`", "layer type"]),
        (json!({ "partial_rotary_factor": 0.5 }), vec!["`partial_rotary_factor`", "phi3"]),
        (json!({ "eos_token_id": "2" }), vec!["`eos_token_id`", "below 100"]),
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
