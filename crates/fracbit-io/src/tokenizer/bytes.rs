//! Tokens as bytes: what each stands for, and how many tokens a text takes at the least.

use std::collections::HashMap;

use serde_json::Value;
use tokenizers::ModelWrapper;

use super::Tokenizer;
use super::other::alphabet;

/// How many of the bytes that count an NFC normalizer may make one of: three letters of Hangul.
const NFC: usize = 3;

/// What a tokenizer's parts say of bytes.
#[derive(Debug)]
pub(super) struct Spelling {
    /// The bytes of the characters that tokens are spelled in; `None`: they are spelled as text.
    letters: Option<HashMap<char, u8>>,
    /// Most bytes that one token stands for, of those that count; `None`: there is no bound.
    most: Option<usize>,
    /// Which ASCII bytes have a token.
    ascii: [bool; 128],
}

/// Whether a part of a tokenizer, or one inside it, is of this type.
fn has(part: &Value, kind: &str) -> bool {
    match part {
        Value::Array(parts) => parts.iter().any(|part| has(part, kind)),
        Value::Object(part) => {
            part.get("type").is_some_and(|t| t == kind) || part.values().any(|part| has(part, kind))
        }
        _ => false,
    }
}

/// How many times fewer bytes that count a text may have behind a normalizer; `None`: any number.
fn shrinks(normalizer: &Value) -> Option<usize> {
    let text = |value: &Value| value.as_str().map(str::len);
    match normalizer["type"].as_str() {
        None => normalizer.is_null().then_some(1),
        Some("NFC") => Some(NFC),
        Some("Prepend" | "ByteLevel") => Some(1),
        // A space becomes another character.
        Some("Replace") => {
            let (from, to) = (text(&normalizer["pattern"]["String"])?, text(&normalizer["content"])?);
            (from == 1 && to >= 1).then_some(1)
        }
        Some("Sequence") => normalizer["normalizers"].as_array()?.iter().map(shrinks).product(),
        Some(_) => None,
    }
}

/// Whether all of a text is in the pieces that a pre-tokenizer makes of it.
fn keeps(splitter: &Value) -> bool {
    match splitter["type"].as_str() {
        None => splitter.is_null(),
        Some("ByteLevel" | "Metaspace" | "Digits") => true,
        Some("Split" | "Punctuation") => splitter["behavior"] != "Removed",
        Some("Sequence") => splitter["pretokenizers"].as_array().is_some_and(|all| all.iter().all(keeps)),
        Some(_) => false,
    }
}

impl Tokenizer {
    fn spelling(&self) -> &Spelling {
        self.spelling.get_or_init(|| {
            let decoder = serde_json::to_value(self.inner.get_decoder()).unwrap_or_default();
            let letters = has(&decoder, "ByteLevel")
                .then(|| alphabet().into_iter().zip(0..=u8::MAX).collect::<HashMap<char, u8>>());
            let mut ascii = [false; 128];
            let most = self.most_bytes(letters.is_some(), &mut ascii);
            Spelling { letters, most, ascii }
        })
    }

    /// Most bytes that one token stands for, where that is certain: no part drops what the
    /// vocabulary has no token for, but ASCII bytes, which `ascii` tells of.
    fn most_bytes(&self, byte_level: bool, ascii: &mut [bool; 128]) -> Option<usize> {
        let normalizer = serde_json::to_value(self.inner.get_normalizer()).ok()?;
        let splitter = serde_json::to_value(self.inner.get_pre_tokenizer()).ok()?;
        let ModelWrapper::BPE(model) = self.inner.get_model() else { return None };
        let shrinks = shrinks(&normalizer)?;
        let added = self.inner.get_added_tokens_decoder();
        if !keeps(&splitter) || added.values().any(|token| token.lstrip || token.rstrip) {
            return None;
        }
        let spelled_in_bytes = has(&splitter, "ByteLevel") || has(&normalizer, "ByteLevel");
        if spelled_in_bytes != byte_level || !(byte_level || model.byte_fallback) {
            return None;
        }
        let vocab = self.inner.get_vocab(false);
        let letters = alphabet();
        let known = |byte: u8| {
            let name =
                if byte_level { letters[byte as usize].to_string() } else { format!("<0x{byte:02X}>") };
            vocab.contains_key(&name)
        };
        (0..).zip(ascii.iter_mut()).for_each(|(byte, has)| *has = known(byte));
        // A character that is not ASCII has at least one of these.
        let others = if byte_level { 0x80..=0xbf } else { 0x00..=0xff };
        if !others.into_iter().all(known) {
            return None;
        }
        let bytes = |token: &String| if byte_level { token.chars().count() } else { token.len() };
        let longest = vocab.keys().map(bytes).max()?;
        let longest = added.values().map(|token| token.content.len()).fold(longest, usize::max);
        longest.checked_mul(shrinks)
    }

    /// The fewest tokens that a text can have, which takes no time to tell: its bytes, by those of
    /// the longest token. 0 where a token of this tokenizer may stand for any number of bytes, such
    /// as those that it does not know.
    #[must_use]
    pub fn fewest_tokens(&self, text: &str) -> usize {
        let Spelling { most, ascii, .. } = self.spelling();
        let Some(most) = *most else { return 0 };
        let counts = |byte: &u8| ascii.get(*byte as usize).map_or(*byte < 0xc0, |has| *has);
        text.as_bytes().iter().filter(|byte| counts(byte)).count().div_ceil(most)
    }

    /// The tokens, in order, that have one of `texts` within.
    #[must_use]
    pub fn tokens_with(&self, texts: &[impl AsRef<str>]) -> Vec<u32> {
        let has = |bytes: &[u8], text: &str| {
            let text = text.as_bytes();
            !text.is_empty() && bytes.windows(text.len()).any(|part| part == text)
        };
        let ids = 0..u32::try_from(self.vocab_size()).unwrap_or(u32::MAX);
        ids.filter(|&id| {
            self.token_bytes(id).is_some_and(|bytes| texts.iter().any(|text| has(&bytes, text.as_ref())))
        })
        .collect()
    }

    /// The bytes that a token stands for in the middle of a text, special ones included; they need
    /// not be whole characters.
    #[must_use]
    pub fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        if let Some(special) = self.special_text(id) {
            return Some(special.into_bytes());
        }
        let token = self.token(id)?;
        if let Some(letters) = &self.spelling().letters {
            let mut bytes = Vec::new();
            for c in token.chars() {
                match letters.get(&c) {
                    Some(&byte) => bytes.push(byte),
                    // An added token is spelled as text.
                    None => bytes.extend(c.encode_utf8(&mut [0; 4]).bytes()),
                }
            }
            return Some(bytes);
        }
        let byte = token.strip_prefix("<0x").and_then(|token| token.strip_suffix('>'));
        let byte = byte.filter(|hex| hex.len() == 2).and_then(|hex| u8::from_str_radix(hex, 16).ok());
        Some(byte.map_or_else(|| token.replace('\u{2581}', " ").into_bytes(), |byte| vec![byte]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{EncodeOptions, Tokenizer};
    use serde_json::json;
    use std::path::Path;

    /// A byte-level tokenizer that knows all bytes but one, and some longer tokens.
    fn tokenizer(change: impl Fn(&mut Value)) -> Tokenizer {
        let vocab: serde_json::Map<String, Value> = alphabet()
            .into_iter()
            .map(String::from)
            .filter(|letter| letter != "\u{104}")
            .chain(["ab", "Ġab", "cd", "abcd", "Ã©"].map(str::to_owned))
            .zip((0..).map(Value::from))
            .collect();
        let level = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true });
        let mut made = json!({
            "normalizer": null, "pre_tokenizer": level, "post_processor": null, "decoder": level,
            "added_tokens": [{
                "id": 260, "content": "<end>", "special": true,
                "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            }],
            "model": {
                "type": "BPE", "vocab": vocab,
                "merges": [["a", "b"], ["Ġ", "ab"], ["c", "d"], ["ab", "cd"], ["Ã", "©"]],
            },
        });
        change(&mut made);
        Tokenizer::parse(made.to_string().as_bytes(), Path::new("tokenizer.json")).expect("a tokenizer")
    }

    #[test]
    fn no_text_has_fewer_tokens_than_its_bytes_say() {
        let plain = tokenizer(|_| {});
        let nfc = tokenizer(|made| made["normalizer"] = json!({ "type": "NFC" }));
        let hangul = "\u{1100}\u{1161}\u{11a8}";
        for text in ["", "a", "abcdabcd", "<end><end>", " ab\u{4}\u{4}", "éé", hangul, "\u{40000}", "a  b"]
        {
            for (tokenizer, most) in [(&plain, 5), (&nfc, 15)] {
                let many = text.repeat(30);
                let tokens = tokenizer.encode(&many, EncodeOptions::default()).expect("a text").len();
                let fewest = tokenizer.fewest_tokens(&many);
                assert!(fewest <= tokens, "{text:?}: {fewest} {tokens}");
                let told = text.bytes().all(|b| b.is_ascii_graphic());
                assert!(!told || fewest == many.len().div_ceil(most), "{text:?}: {fewest}");
            }
        }
        let unbounded: [fn(&mut Value); 5] = [
            |made| made["normalizer"] = json!({ "type": "Strip", "strip_left": true, "strip_right": true }),
            |made| made["pre_tokenizer"] = json!({ "type": "WhitespaceSplit" }),
            |made| made["added_tokens"][0]["rstrip"] = true.into(),
            |made| made["pre_tokenizer"] = Value::Null,
            |made| _ = made["model"]["vocab"].as_object_mut().expect("a vocabulary").shift_remove("\u{a1}"),
        ];
        for (i, change) in unbounded.into_iter().enumerate() {
            assert_eq!(tokenizer(change).fewest_tokens(&"ab".repeat(999)), 0, "{i}");
        }
    }

    #[test]
    fn tokens_are_bytes() {
        let made = tokenizer(|_| {});
        for text in ["a", " ab", "é", "\u{7f}\u{40000}<end>"] {
            let tokens = made.encode(text, EncodeOptions::default()).expect("a text");
            let bytes: Vec<u8> =
                tokens.iter().flat_map(|&token| made.token_bytes(token).expect("a token")).collect();
            assert_eq!(bytes, text.as_bytes());
        }
        assert_eq!(made.token_bytes(999), None);
        // Every token that has the letter, and no other.
        let with_a: Vec<u32> = (0..u32::try_from(made.vocab_size()).expect("few"))
            .filter(|&id| made.token_bytes(id).is_some_and(|bytes| bytes.contains(&b'a')))
            .collect();
        assert!(!with_a.is_empty());
        assert_eq!(made.tokens_with(&["a"]), with_a);
        assert_eq!(made.tokens_with(&["", "no token has all this"]), Vec::<u32>::new());
        let fallback = json!({
            "normalizer": { "type": "Replace", "pattern": { "String": " " }, "content": "▁" },
            "decoder": { "type": "ByteFallback" },
            "model": {
                "type": "BPE", "byte_fallback": true, "unk_token": "<unk>", "merges": [],
                "vocab": { "<unk>": 0, "<0x0A>": 1, "▁": 2, "a": 3 },
            },
        });
        let made = Tokenizer::parse(fallback.to_string().as_bytes(), Path::new("t.json")).expect("good");
        let bytes = [1, 2, 3].map(|token| made.token_bytes(token).expect("a token"));
        assert_eq!(bytes, [b"\n", b" ", b"a"]);
        assert_eq!(made.fewest_tokens("aaa"), 0, "not every byte has a token");
    }
}
