//! The way around three readings of a large vocabulary.
//!
//! `tokenizers` reads the model of a `tokenizer.json` into buffers of untyped values, twice, before
//! it makes a vocabulary of it, and the checks of [`super::precheck`] want a third. For Gemma's 262
//! 144 tokens and 514 906 merges that took 2.3 s of 2.7; read once into what the crate's own
//! builder takes, .6 s. Building the table of merges is most of what is left, so a cache beside the
//! model would save little.
//!
//! Only what is plainly right goes this way. Everything else, and with it every message about what
//! is wrong, is left to the other one.

use serde::Deserialize;
use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use serde_json::{Map, Value, json};
use tokenizers::AddedToken;
use tokenizers::models::bpe::{BPE, Merges, Vocab};

use super::{guard, precheck};

/// A `tokenizer.json` whose model is BPE.
#[derive(Deserialize)]
struct Document {
    model: Model,
    #[serde(default)]
    added_tokens: Vec<Added>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Model {
    r#type: Bpe,
    dropout: Option<f32>,
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    fuse_unk: Option<bool>,
    byte_fallback: Option<bool>,
    ignore_merges: Option<bool>,
    vocab: Vocab,
    merges: Pairs,
}

#[derive(Deserialize)]
enum Bpe {
    #[serde(rename = "BPE")]
    Bpe,
}

#[derive(Deserialize)]
struct Added {
    #[serde(rename = "id")]
    _id: u32,
    #[serde(flatten)]
    token: AddedToken,
}

/// Merges, all as lists of two tokens or all as two tokens with a space between.
struct Pairs(Merges);

/// One of them, and whether it is a list.
struct Pair(String, String, bool);

impl<'de> Deserialize<'de> for Pairs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct List;
        impl<'de> Visitor<'de> for List {
            type Value = Pairs;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a list of merges")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Pairs, A::Error> {
                let (mut pairs, mut lists) = (Merges::new(), None);
                while let Some(Pair(a, b, is_list)) = list.next_element()? {
                    if *lists.get_or_insert(is_list) != is_list {
                        return Err(A::Error::custom("merges of two kinds"));
                    }
                    pairs.push((a, b));
                }
                Ok(Pairs(pairs))
            }
        }
        deserializer.deserialize_seq(List)
    }
}

impl<'de> Deserialize<'de> for Pair {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct One;
        impl<'de> Visitor<'de> for One {
            type Value = Pair;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("two tokens")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Pair, E> {
                // The crate leaves out lines that begin so.
                let pair = text.split_once(' ').filter(|(_, b)| !b.contains(' '));
                let pair = pair.filter(|_| !text.starts_with("#version"));
                let (a, b) = pair.ok_or_else(|| E::custom("not two tokens"))?;
                Ok(Pair(a.to_owned(), b.to_owned(), false))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Pair, A::Error> {
                let mut next =
                    || list.next_element::<String>()?.ok_or_else(|| A::Error::custom("not two tokens"));
                Ok(Pair(next()?, next()?, true))
            }
        }
        deserializer.deserialize_any(One)
    }
}

/// Loads the text of a `tokenizer.json` whose model is BPE; `None` when it is another or anything
/// is odd about it.
pub(super) fn load(bytes: &[u8]) -> Option<tokenizers::Tokenizer> {
    let Document { model, added_tokens, mut rest } = serde_json::from_slice(bytes).ok()?;
    precheck::check_rest(&rest).ok()?;
    let Bpe::Bpe = model.r#type;
    // The prefix is cut off by length alone, so only the other checks know whether it can be.
    if model.dropout.is_some_and(|p| p != 0.0)
        || model.continuing_subword_prefix.as_ref().is_some_and(|p| !p.is_empty())
    {
        return None;
    }
    // A pair is copied into a buffer of this length before it is looked up.
    let longest = model.vocab.keys().map(String::len).max().unwrap_or(0);
    if model.merges.0.iter().any(|(a, b)| a.len() + b.len() > longest) {
        return None;
    }
    // Of two tokens with one number the crate keeps either.
    let mut ids: Vec<u32> = model.vocab.values().copied().collect();
    ids.sort_unstable();
    if ids.windows(2).any(|two| two[0] == two[1]) || ids.last().is_some_and(|&id| id >= precheck::MAX_IDS) {
        return None;
    }
    let mut builder = BPE::builder()
        .vocab_and_merges(model.vocab, model.merges.0)
        .fuse_unk(model.fuse_unk.unwrap_or(false))
        .byte_fallback(model.byte_fallback.unwrap_or(false))
        .ignore_merges(model.ignore_merges.unwrap_or(false));
    if let Some(none) = model.dropout {
        builder = builder.dropout(none);
    }
    if let Some(empty) = model.continuing_subword_prefix {
        builder = builder.continuing_subword_prefix(empty);
    }
    if let Some(unknown) = model.unk_token {
        builder = builder.unk_token(unknown);
    }
    if let Some(suffix) = model.end_of_word_suffix {
        builder = builder.end_of_word_suffix(suffix);
    }
    let model = guard(|| builder.build()).ok()?;
    rest.insert("model".to_owned(), json!({ "type": "BPE", "vocab": {}, "merges": [] }));
    let mut t = super::load_with_crate(Value::Object(rest).to_string().as_bytes()).ok()?;
    t.with_model(model);
    guard(|| t.add_tokens(added_tokens.into_iter().map(|added| added.token))).ok()?;
    Some(t)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use proptest::prelude::*;

    use super::*;
    use crate::tokenizer::other;

    /// A small one with most of what such files have: byte fallback, added tokens within and behind
    /// the vocabulary.
    fn small() -> Value {
        let mut vocab = Map::new();
        let bytes = (0..256).map(|byte| format!("<0x{byte:02X}>"));
        let letters = "\u{2581}abcehlorwé".chars().map(|c| c.to_string());
        let merged = ["he", "el", "hel", "\u{2581}w", "hé"].map(str::to_owned);
        for token in
            ["<unk>".to_owned(), "<s>".to_owned()].into_iter().chain(bytes).chain(letters).chain(merged)
        {
            vocab.insert(token, vocab.len().into());
        }
        let added = |id: usize, content: &str, special: bool, normalized: bool| {
            json!({ "id": id, "content": content, "special": special, "normalized": normalized,
                "single_word": false, "lstrip": false, "rstrip": content == "<mask>" })
        };
        let n = vocab.len();
        json!({ "version": "1.0", "truncation": null, "padding": null,
            "added_tokens": [added(0, "<unk>", true, false), added(1, "<s>", true, false),
                added(n, "<mask>", false, true), added(n + 1, "he llo", false, true)],
            "normalizer": { "type": "Replace", "pattern": { "String": " " }, "content": "\u{2581}" },
            "pre_tokenizer": null, "post_processor": null,
            "decoder": { "type": "Sequence", "decoders": [{ "type": "ByteFallback" }, { "type": "Fuse" }] },
            "model": { "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
                "vocab": vocab, "merges": [["h", "e"], ["he", "l"], ["e", "l"], ["\u{2581}", "w"], ["h", "é"]] } })
    }

    const TEXTS: [&str; 12] = [
        "",
        " ",
        "hello world",
        "he llo<mask>  he\u{2581}llo",
        "<s><unk><s <mask",
        "\u{0}\u{7f}\u{85}\u{a0}\u{2028}\u{feff}",
        "na\u{ef}ve cafe\u{301} caf\u{e9} hé",
        "\u{1F469}\u{200D}\u{1F4BB}\u{1F1E9}\u{1F1EA} \u{FDFA} \u{2581}\u{2581}",
        "1234567890 ١٢٣ 一二三 ꙮ\u{10FFFF}",
        "\r\n\r\n\t  \n  x",
        "don't DON'T I'll\u{2019}s",
        "<0x41><0xFF>",
    ];

    /// The quick way gives the same tokenizer, or none.
    fn same_or_none(bytes: &[u8], name: &str) -> bool {
        let Some(quick) = load(bytes) else { return false };
        assert_eq!(precheck::check(bytes), Ok(()), "{name}");
        let slow = super::super::load_with_crate(bytes).unwrap_or_else(|e| panic!("{name}: {e}"));
        let json = |t: &tokenizers::Tokenizer| t.to_string(false).unwrap();
        assert_eq!(json(&quick), json(&slow), "{name}");
        for text in TEXTS {
            let ids = |t: &tokenizers::Tokenizer| t.encode_fast(text, true).map(|e| e.get_ids().to_vec());
            let (quick_ids, slow_ids) = (ids(&quick), ids(&slow));
            assert_eq!(quick_ids.as_ref().ok(), slow_ids.as_ref().ok(), "{name}: {text:?}");
            if let Ok(ids) = quick_ids {
                assert_eq!(quick.decode(&ids, false).ok(), slow.decode(&ids, false).ok(), "{name}: {text:?}");
            }
        }
        true
    }

    #[test]
    fn tokenizers_are_the_same_both_ways() {
        let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
        let demo = std::fs::read(root.join("../fracbit-cli/demo-model/tokenizer.json")).unwrap();
        assert!(same_or_none(&demo, "demo"));
        let mut quick = 0;
        for entry in std::fs::read_dir(root.join("tests/golden/tokenizers")).unwrap() {
            let dir = entry.unwrap().path();
            let settings = std::fs::read(dir.join("tokenizer_config.json"));
            let settings = settings.map_or_else(|_| Map::new(), |s| serde_json::from_slice(&s).unwrap());
            if let Some(made) = other::read(&dir, &settings).unwrap() {
                quick +=
                    usize::from(same_or_none(made.json.to_string().as_bytes(), &dir.display().to_string()));
            }
        }
        assert!(quick >= 6, "{quick}");
        assert!(same_or_none(small().to_string().as_bytes(), "small"));
    }

    /// What is odd takes the other way, and what is not is the same.
    #[test]
    fn odd_files_take_the_other_way() {
        type Edit = fn(&mut Value);
        let cases: [(&str, bool, Edit); 21] = [
            ("merges as texts", true, |v| v["model"]["merges"] = json!(["h e", "he l"])),
            ("no merges", true, |v| v["model"]["merges"] = json!([])),
            ("no added tokens", true, |v| drop(v.as_object_mut().unwrap().remove("added_tokens"))),
            ("flags that are null", true, |v| v["model"]["fuse_unk"] = Value::Null),
            ("no dropout", true, |v| v["model"]["dropout"] = json!(0.0)),
            ("no prefix", true, |v| v["model"]["continuing_subword_prefix"] = json!("")),
            ("suffix", true, |v| v["model"]["end_of_word_suffix"] = json!("e")),
            ("unknown token that is not there", true, |v| v["model"]["unk_token"] = json!("<none>")),
            ("truncation", true, |v| {
                v["truncation"] =
                    json!({ "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0 });
            }),
            ("holes", true, |v| v["model"]["vocab"]["zz"] = json!(100_000)),
            ("two of one number", false, |v| v["model"]["vocab"]["zz"] = json!(7)),
            ("both kinds of merges", false, |v| v["model"]["merges"] = json!(["h e", ["he", "l"]])),
            ("merges with a version", false, |v| v["model"]["merges"] = json!(["#version: 0.2", "h e"])),
            ("prefix", false, |v| v["model"]["continuing_subword_prefix"] = json!("##")),
            ("dropout", false, |v| v["model"]["dropout"] = json!(0.1)),
            ("merge too long", false, |v| v["model"]["merges"] = json!([["<unk>", "<unk>"]])),
            ("merge of nothing", false, |v| v["model"]["merges"] = json!([["q", "e"]])),
            ("merge into nothing", false, |v| v["model"]["merges"] = json!([["a", "b"]])),
            ("more than a vocabulary has", false, |v| v["model"]["vocab"]["zz"] = json!(1 << 24)),
            ("large number", false, |v| v["model"]["vocab"]["a"] = json!(4_294_967_296_u64)),
            ("another version", false, |v| v["version"] = json!("2.0")),
        ];
        for (name, quick, edit) in cases {
            let mut v = small();
            edit(&mut v);
            assert_eq!(same_or_none(v.to_string().as_bytes(), name), quick, "{name}");
        }
        let text = small().to_string();
        for (name, from, to) in [
            ("token twice", "\"vocab\":{", "\"vocab\":{\"a\":7,"),
            ("decoder twice", "\"decoder\":", "\"decoder\":null,\"decoder\":"),
            ("normalizer twice", "\"pre_tokenizer\":null", "\"normalizer\":{\"type\":\"NFC\"}"),
            ("no type", "\"type\":\"BPE\",", ""),
            ("another field", "\"type\":\"BPE\",", "\"type\":\"BPE\",\"more\":[1],"),
        ] {
            let changed = text.replace(from, to);
            assert_ne!(changed, text, "{name}");
            same_or_none(changed.as_bytes(), name);
        }
    }

    proptest! {
        #[test]
        fn damaged_files_are_the_same_or_take_the_other_way(at in 0_usize..6_000, byte in any::<u8>(), cut in any::<bool>()) {
            let mut bytes = small().to_string().into_bytes();
            let at = at % bytes.len();
            if cut {
                bytes.remove(at);
            } else {
                bytes[at] = byte;
            }
            same_or_none(&bytes, "damaged");
        }
    }
}
