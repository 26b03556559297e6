//! Vocabularies to `tokenizer.json` and `tokenizer_config.json`.
//!
//! | `tokenizer.ggml.model` | becomes |
//! | --- | --- |
//! | `gpt2` | BPE on bytes; how texts are cut first, `tokenizer.ggml.pre` says by a name (`pretokenizer`) |
//! | `llama` | SentencePiece's BPE: scores become merges, as transformers makes them of a `tokenizer.model` |
//! | `bert` | WordPiece: pieces that begin a word have U+2581 in front there, the others `##` here |
//!
//! The kinds of tokens decide which are cut out of a text before all else: control tokens (special)
//! and those that users defined.

use std::borrow::Cow;
use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::Gguf;
use super::pretokenizer::{self, Pretokenizer};
use crate::config::clip;
use crate::error::Error;
use crate::tokenizer::Tokenizer;

/// What SentencePiece writes for a space.
pub(super) const SPACE: char = '\u{2581}';

/// Kinds of tokens.
pub(super) const NORMAL: i64 = 1;
pub(super) const UNKNOWN: i64 = 2;
/// One that no text has.
pub(super) const CONTROL: i64 = 3;
pub(super) const USER_DEFINED: i64 = 4;
pub(super) const UNUSED: i64 = 5;
pub(super) const BYTE: i64 = 6;

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const KINDS: &str = "tokenizer.ggml.token_type";
const SCORES: &str = "tokenizer.ggml.scores";
const MERGES: &str = "tokenizer.ggml.merges";
/// The model of SentencePiece's BPE.
const PIECES: &str = "llama";
const TEMPLATE: &str = "tokenizer.chat_template";

/// How a vocabulary cuts texts.
enum Model {
    Bytes(&'static Pretokenizer),
    Pieces,
    Words,
}

impl Gguf {
    /// Whether the file has a vocabulary.
    pub(super) fn has_tokenizer(&self) -> bool {
        self.metadata().has(TOKENS)
    }

    /// The tokenizer.
    pub(crate) fn read_tokenizer(&self) -> Result<Tokenizer, Error> {
        let path = &self.parts[0].path;
        let mut tokenizer = Tokenizer::parse(self.tokenizer()?.to_string().as_bytes(), path)?;
        tokenizer.apply_settings(self.tokenizer_config()?.to_string().as_bytes(), path, None)?;
        Ok(tokenizer)
    }

    /// The tokens: empty ones by the name that llama.cpp gives them, and pieces that users defined
    /// with SentencePiece's spaces, which its converter replaces by real ones.
    pub(super) fn tokens(&self) -> Result<Vec<Cow<'_, str>>, Error> {
        let m = self.metadata();
        let tokens = m.texts(TOKENS)?.ok_or_else(|| m.missing(TOKENS, "an array of strings"))?;
        let (kinds, pieces) = (self.token_kinds()?, m.text(MODEL)? == Some(PIECES));
        let named = |(i, text): (usize, &'_ str)| match text {
            "" => format!("[EMPTY_{i}]").into(),
            t if pieces && kinds.get(i) == Some(&USER_DEFINED) && t.contains(' ') => {
                t.replace(' ', SPACE.encode_utf8(&mut [0; 4])).into()
            }
            text => Cow::Owned(text.to_owned()),
        };
        Ok(tokens.into_iter().enumerate().map(named).collect())
    }

    /// The kind of each token.
    pub(super) fn token_kinds(&self) -> Result<Vec<i64>, Error> {
        let m = self.metadata();
        Ok(m.numbers(KINDS)?.unwrap_or_default().into_iter().map(|n| n as i64).collect())
    }

    fn token_model(&self) -> Result<Model, Error> {
        let m = self.metadata();
        match m.text(MODEL)? {
            Some(PIECES) => Ok(Model::Pieces),
            Some("bert") => Ok(Model::Words),
            Some("gpt2") => {
                let name = match m.text(PRE)? {
                    Some(name) => name,
                    // Files of before April 2024. Qwen's were never cut otherwise.
                    None if self.family()?.name.starts_with("qwen") => "qwen2",
                    None => "default",
                };
                let rule = || format!("should be one of {}, got `{}`", pretokenizer::names(), clip(name));
                pretokenizer::find(name).map(Model::Bytes).ok_or_else(|| m.bad(PRE, rule()))
            }
            other => {
                let got = other.map_or("nothing".to_owned(), |o| format!("`{}`", clip(o)));
                Err(m.bad(MODEL, format!("should be `gpt2`, `llama` or `bert`, got {got}")))
            }
        }
    }

    /// The token of a metadata key: its text and number.
    fn special(&self, name: &str, tokens: &[Cow<'_, str>]) -> Result<Option<(String, u64)>, Error> {
        let key = format!("tokenizer.ggml.{name}_token_id");
        let Some(id) = self.metadata().unsigned(&key)? else { return Ok(None) };
        let text = usize::try_from(id).ok().and_then(|id| tokens.get(id)).ok_or_else(|| {
            self.metadata().bad(&key, format!("should be a token below {}, got {id}", tokens.len()))
        })?;
        Ok(Some((text.clone().into_owned(), id)))
    }

    /// Whether a text gets the token in front (`bos`) or behind (`eos`): as the file says, or as
    /// llama.cpp takes it where the file does not.
    fn adds(&self, name: &str, model: &Model) -> Result<bool, Error> {
        let usual = match (name, model) {
            ("bos", Model::Bytes(pre)) => pre.begins,
            ("bos", _) | ("eos", Model::Words) => true,
            _ => false,
        };
        Ok(self.metadata().flag(&format!("tokenizer.ggml.add_{name}_token"))?.unwrap_or(usual))
    }

    /// The `tokenizer.json`.
    pub(super) fn tokenizer(&self) -> Result<Value, Error> {
        let m = self.metadata();
        let (model, tokens, kinds) = (self.token_model()?, self.tokens()?, self.token_kinds()?);
        if !kinds.is_empty() && kinds.len() != tokens.len() {
            return Err(m.bad(KINDS, format!("should have {} entries, has {}", tokens.len(), kinds.len())));
        }
        let kind = |id: usize| kinds.get(id).copied().unwrap_or(NORMAL);
        let mut ids: HashMap<&str, usize> = HashMap::with_capacity(tokens.len());
        for (id, token) in tokens.iter().enumerate() {
            if let Some(other) = ids.insert(token, id) {
                let rule = format!("should be unique: {other} and {id} are `{}`", clip(token));
                return Err(m.bad(TOKENS, rule));
            }
        }
        let added: Vec<Value> = (0..tokens.len())
            .filter(|&id| matches!(kind(id), UNKNOWN | CONTROL | USER_DEFINED))
            .map(|id| {
                json!({
                    "id": id, "content": tokens[id], "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": kind(id) != USER_DEFINED,
                })
            })
            .collect();
        let unknown = self.special("unknown", &tokens)?.map(|(text, _)| text);
        let space_first = match model {
            Model::Pieces => m.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true),
            _ => false,
        };
        let vocab = |name: &dyn Fn(usize) -> String| -> Value {
            Value::Object((0..tokens.len()).map(|id| (name(id), json!(id))).collect())
        };
        let plain = |id: usize| tokens[id].clone().into_owned();
        let [normalizer, cut, inner, decoder] = match &model {
            Model::Bytes(pre) => {
                let merges = self.merges(&ids)?;
                let inner = bpe(
                    vocab(&plain),
                    merges,
                    json!({ "unk_token": null, "ignore_merges": pre.whole_words }),
                );
                let decoder = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
                [Value::Null, pre.json(), inner, decoder]
            }
            Model::Pieces => {
                let merges = self.merges_of_scores(&tokens, &kind, &ids)?;
                let inner = bpe(
                    vocab(&plain),
                    merges,
                    json!({ "unk_token": unknown, "fuse_unk": true, "byte_fallback": true }),
                );
                let spaces = json!({ "type": "Replace", "pattern": { "String": " " }, "content": SPACE });
                let prefix = json!({ "type": "Prepend", "prepend": SPACE });
                let back = json!({ "type": "Replace", "pattern": { "String": SPACE }, "content": " " });
                let mut decoders = vec![back, json!({ "type": "ByteFallback" }), json!({ "type": "Fuse" })];
                let mut normalizers = vec![spaces];
                if space_first {
                    normalizers.insert(0, prefix);
                    decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
                }
                let sequence = |name: &str, list| json!({ "type": "Sequence", name: list });
                [sequence("normalizers", normalizers), Value::Null, inner, sequence("decoders", decoders)]
            }
            Model::Words => {
                let name = |id: usize| match tokens[id].strip_prefix(SPACE) {
                    Some(word) => word.to_owned(),
                    None if kind(id) == NORMAL => format!("##{}", tokens[id]),
                    None => plain(id),
                };
                let unk =
                    unknown.clone().ok_or_else(|| m.missing("tokenizer.ggml.unknown_token_id", "a token"))?;
                let inner = json!({
                    "type": "WordPiece", "unk_token": unk, "continuing_subword_prefix": "##",
                    "max_input_chars_per_word": 100, "vocab": vocab(&name),
                });
                let normalizer = json!({
                    "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
                    "strip_accents": null, "lowercase": true,
                });
                let decoder = json!({ "type": "WordPiece", "prefix": "##", "cleanup": true });
                [normalizer, json!({ "type": "BertPreTokenizer" }), inner, decoder]
            }
        };
        Ok(json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
            "normalizer": normalizer, "pre_tokenizer": cut, "post_processor": self.template(&model, &tokens)?,
            "decoder": decoder, "model": inner,
        }))
    }

    /// What goes before and behind a text.
    fn template(&self, model: &Model, tokens: &[Cow<'_, str>]) -> Result<Value, Error> {
        let mut around = [None, None];
        for (slot, name) in around.iter_mut().zip(["bos", "eos"]) {
            if self.adds(name, model)? {
                // The end of a text of words is what separates it from the next.
                let separator = matches!(model, Model::Words) && name == "eos";
                *slot = match separator {
                    true => self.special("seperator", tokens)?,
                    false => self.special(name, tokens)?,
                };
            }
        }
        if around.iter().all(Option::is_none) {
            return Ok(Value::Null);
        }
        let [before, behind] = &around;
        let token = |t: &(String, u64), of: usize| json!({ "SpecialToken": { "id": t.0, "type_id": of } });
        let text = |of: usize, name: &str| {
            let mut parts: Vec<Value> = before.iter().map(|t| token(t, of)).collect();
            parts.push(json!({ "Sequence": { "id": name, "type_id": of } }));
            parts.extend(behind.iter().map(|t| token(t, of)));
            parts
        };
        let pair: Vec<Value> = text(0, "A").into_iter().chain(text(1, "B")).collect();
        let specials: Map<String, Value> = around
            .iter()
            .flatten()
            .map(|(t, id)| (t.clone(), json!({ "id": t, "ids": [id], "tokens": [t] })))
            .collect();
        Ok(
            json!({ "type": "TemplateProcessing", "single": text(0, "A"), "pair": pair, "special_tokens": specials }),
        )
    }

    /// The listed merges, as pairs.
    fn merges(&self, ids: &HashMap<&str, usize>) -> Result<Vec<Value>, Error> {
        let m = self.metadata();
        let merges = m.texts(MERGES)?.ok_or_else(|| m.missing(MERGES, "an array of strings"))?;
        let pair = |(i, merge): (usize, &str)| {
            // A part may begin with a space, none holds one further on.
            let at = merge.char_indices().skip(1).find(|(_, c)| *c == ' ').map(|(at, _)| at);
            let parts = at.map(|at| (&merge[..at], &merge[at + 1..]));
            let known = |(a, b): &(&str, &str)| {
                ids.contains_key(a) && ids.contains_key(b) && ids.contains_key(format!("{a}{b}").as_str())
            };
            let (a, b) = parts.filter(known).ok_or_else(|| {
                m.bad(MERGES, format!("{i} should be two tokens that make a third, got `{}`", clip(merge)))
            })?;
            Ok(json!([a, b]))
        };
        merges.into_iter().enumerate().map(pair).collect()
    }

    /// Every way to make a piece of two, the pieces in the order of their scores.
    fn merges_of_scores(
        &self,
        tokens: &[Cow<'_, str>],
        kind: &dyn Fn(usize) -> i64,
        ids: &HashMap<&str, usize>,
    ) -> Result<Vec<Value>, Error> {
        let m = self.metadata();
        let scores = m.numbers(SCORES)?.ok_or_else(|| m.missing(SCORES, "an array of numbers"))?;
        if scores.len() != tokens.len() || scores.iter().any(|s| s.is_nan()) {
            let rule =
                format!("should be {} numbers, one for each token, has {}", tokens.len(), scores.len());
            return Err(m.bad(SCORES, rule));
        }
        let piece =
            |text: &str| ids.get(text).filter(|&&id| matches!(kind(id), NORMAL | USER_DEFINED)).copied();
        let mut merges = Vec::new();
        for (id, token) in
            tokens.iter().enumerate().filter(|(id, _)| matches!(kind(*id), NORMAL | USER_DEFINED))
        {
            // A token longer than any word would be cut at every place of a hostile file's.
            if token.len() > MAX_PIECE {
                return Err(m.bad(
                    TOKENS,
                    format!("{id} should have at most {MAX_PIECE} bytes, has {}", token.len()),
                ));
            }
            // SentencePiece finds what users defined first; the converter wrote no score of theirs.
            let score = if kind(id) == USER_DEFINED { 0.0 } else { scores[id] };
            let own = merges.len();
            for (at, _) in token.char_indices().skip(1) {
                if let (Some(a), Some(b)) = (piece(&token[..at]), piece(&token[at..])) {
                    merges.push((score, a, b));
                }
            }
            merges[own..].sort_unstable_by_key(|&(_, a, b)| (a, b));
        }
        let chars = |id: usize| tokens[id].chars().count();
        merges.sort_by(|x, y| {
            y.0.total_cmp(&x.0)
                .then_with(|| chars(y.1).cmp(&chars(x.1)))
                .then_with(|| chars(y.2).cmp(&chars(x.2)))
        });
        Ok(merges.into_iter().map(|(_, a, b)| json!([tokens[a], tokens[b]])).collect())
    }

    /// The `tokenizer_config.json`.
    pub(super) fn tokenizer_config(&self) -> Result<Value, Error> {
        let (model, tokens) = (self.token_model()?, self.tokens()?);
        let mut c = Map::new();
        c.insert("tokenizer_class".to_owned(), "PreTrainedTokenizerFast".into());
        for (field, key) in
            [("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")]
        {
            if let Some((text, _)) = self.special(key, &tokens)? {
                c.insert(field.to_owned(), text.into());
            }
        }
        for (field, key) in [("add_bos_token", "bos"), ("add_eos_token", "eos")] {
            c.insert(field.to_owned(), self.adds(key, &model)?.into());
        }
        let m = self.metadata();
        if let Some(template) = m.text(TEMPLATE)? {
            let mut named = vec![json!({ "name": "default", "template": template })];
            for key in m.entries.keys() {
                if let Some(name) = key.strip_prefix(TEMPLATE).and_then(|k| k.strip_prefix('.')) {
                    named.push(json!({ "name": name, "template": m.text(key)? }));
                }
            }
            let alone = named.len() == 1;
            c.insert("chat_template".to_owned(), if alone { template.into() } else { named.into() });
        }
        Ok(Value::Object(c))
    }
}

/// Longest piece of a vocabulary of pieces, in bytes.
const MAX_PIECE: usize = 1024;

/// A BPE model; `more` are fields that differ from what is usual.
fn bpe(vocab: Value, merges: Vec<Value>, more: Value) -> Value {
    let mut model = json!({
        "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
    });
    if let (Some(model), Value::Object(more)) = (model.as_object_mut(), more) {
        model.extend(more);
        model.insert("vocab".to_owned(), vocab);
        model.insert("merges".to_owned(), Value::Array(merges));
    }
    model
}
