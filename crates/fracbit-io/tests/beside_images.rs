//! Language models beside encoders of images.

use std::path::Path;

use fracbit_io::{Architecture, Error, ModelConfig, RopeScaling};
use serde_json::{Value, json};

fn parse(v: &Value) -> Result<ModelConfig, Error> {
    ModelConfig::parse(v.to_string().as_bytes(), Path::new("config.json"))
}

#[test]
fn gemma3_beside_images() {
    // What the published gemma-3-4b says of its language model.
    let text = json!({ "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": { "factor": 8.0, "rope_type": "linear" }, "sliding_window": 1024 });
    let v = json!({ "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255_999, "eos_token_id": [1, 106],
        "model_type": "gemma3", "text_config": text, "vision_config": { "hidden_size": 1152 } });
    let c = parse(&v).unwrap();
    assert_eq!((c.arch, c.num_attention_heads, c.num_key_value_heads), (Architecture::Gemma3, 8, 4));
    assert_eq!((c.head_dim, c.vocab_size, c.num_hidden_layers()), (256, 262_208, 34));
    assert_eq!(
        (c.rope.scaling.clone(), c.eos_token_ids.clone()),
        (RopeScaling::Linear { factor: 8.0 }, vec![1, 106])
    );
    // What is written is a model of text alone.
    assert_eq!(parse(&Value::Object(c.raw.clone())).unwrap(), c);
    assert_eq!((c.raw.get("vision_config"), c.raw["model_type"].as_str()), (None, Some("gemma3_text")));
    for (edit, word) in [(json!(3), "`text_config`"), (Value::Null, "`Gemma3ForConditionalGeneration`")] {
        let mut v = v.clone();
        v["text_config"] = edit;
        let e = parse(&v).expect_err("refused").to_string();
        assert!(e.contains(word), "{e}");
    }
}

#[test]
fn mistral_beside_images() {
    // What the published Mistral-Small-3.1-24B says of its language model.
    let text = json!({ "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 32_768,
        "max_position_embeddings": 131_072, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 40,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e9, "sliding_window": null, "use_cache": true, "vocab_size": 131_072 });
    let v = json!({ "architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10, "model_type": "mistral3",
        "multimodal_projector_bias": false, "text_config": text, "torch_dtype": "bfloat16", "vision_config": { "model_type": "pixtral" } });
    let c = parse(&v).unwrap();
    assert_eq!((c.arch, c.head_dim, c.num_hidden_layers()), (Architecture::Mistral, 128, 40));
    assert!(!c.tie_word_embeddings && c.layers.iter().all(|layer| layer.sliding_window.is_none()));
    assert_eq!(parse(&Value::Object(c.raw.clone())).unwrap(), c);
    let mut other = v;
    other["text_config"]["model_type"] = json!("pixtral");
    let e = parse(&other).expect_err("refused").to_string();
    let words = ["text_config.model_type", "Ministral3ForCausalLM (ministral3)", "got `pixtral`"];
    assert!(words.iter().all(|word| e.contains(word)), "{e}");
}

#[test]
fn language_models_beside_others() {
    // Qwen2.5-VL-3B has its language model's fields beside those of images, later ones have
    // `text_config`.
    let fields = json!({ "hidden_size": 2048, "intermediate_size": 11_008, "max_position_embeddings": 128_000, "max_window_layers": 70,
        "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "rope_scaling": { "mrope_section": [16, 24, 24], "type": "mrope" }, "sliding_window": 32_768, "tie_word_embeddings": true,
        "use_sliding_window": false, "vocab_size": 151_936 });
    let outer = json!({ "architectures": ["Qwen2_5_VLForConditionalGeneration"], "bos_token_id": 151_643, "eos_token_id": 151_645,
        "model_type": "qwen2_5_vl", "vision_config": { "model_type": "qwen2_5_vl", "hidden_size": 1280 } });
    let mut flat = outer.clone();
    flat.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    let mut nested = outer;
    nested["text_config"] = fields;
    nested["text_config"]["model_type"] = json!("qwen2_5_vl_text");
    let [c, other] = [flat, nested].map(|v| parse(&v).unwrap());
    assert_eq!(
        (c.arch, c.num_hidden_layers(), c.eos_token_ids.clone()),
        (Architecture::Qwen2, 36, vec![151_645])
    );
    assert!(c.qkv_bias && c.tie_word_embeddings && c.rope.scaling == RopeScaling::None);
    assert!(
        c.layers.iter().all(|layer| layer.sliding_window.is_none()) && c.raw.get("vision_config").is_none()
    );
    assert_eq!(ModelConfig { raw: c.raw.clone(), ..other }, c);
    assert_eq!(parse(&Value::Object(c.raw.clone())).unwrap(), c);

    let with_text = |kind: &str, inner: Value, rope: Value| {
        let text = json!({ "model_type": inner, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2,
            "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100, "rope_scaling": rope });
        parse(
            &json!({ "architectures": ["Some"], "model_type": kind, "text_config": text, "vision_config": {} }),
        )
    };
    let turned = json!({ "mrope_interleaved": true, "mrope_section": [24, 20, 20], "rope_type": "default" });
    for (kind, inner, rope, arch) in [
        ("qwen3_vl", "qwen3_vl_text", turned, Architecture::Qwen3),
        ("qwen2_vl", "qwen2_vl_text", Value::Null, Architecture::Qwen2),
        ("internvl", "qwen2", Value::Null, Architecture::Qwen2),
        ("idefics3", "llama", Value::Null, Architecture::Llama),
        ("llava", "mistral", Value::Null, Architecture::Mistral),
    ] {
        let c = with_text(kind, json!(inner), rope).unwrap();
        assert_eq!((c.arch, c.rope.scaling.clone()), (arch, RopeScaling::None), "{kind}");
        assert_eq!(c.raw["architectures"], json!([arch.class_name()]));
    }
    for inner in [json!("llama4_text"), Value::Null] {
        let e = with_text("llama4", inner, Value::Null).expect_err("refused").to_string();
        assert!(e.contains("text_config.model_type") && e.contains("Qwen3ForCausalLM"), "{e}");
    }
    let e = with_text("qwen3_vl", json!("qwen3_vl_text"), json!({ "type": "mrope" })).expect_err("refused");
    assert!(e.to_string().contains("rope_scaling.rope_type"), "{e}");
}
