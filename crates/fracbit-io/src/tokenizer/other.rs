//! Tokenizers of models that come without `tokenizer.json`, written as one.
//!
//! | files | whose | read as |
//! | --- | --- | --- |
//! | `tokenizer.model` | Llama 1 and 2, Mistral, Gemma, Phi-3, ERNIE | a SentencePiece model ([`super::spm`]); else ranks as below |
//! | `vocab.json`, `merges.txt` | GPT-2, Qwen2 | byte-level BPE; `tokenizer_class` says how words are cut |
//! | `tekken.json` | Mistral since Nemo | ranks of byte strings, special tokens before them, the pattern of words |
//! | `*.tiktoken` | Qwen 1, Kimi | ranks of byte strings (base64 and a number per line) |
//!
//! A merge of ranked byte strings is every pair that makes one, in the order of what it makes, as
//! in the converters of transformers; whole words that are tokens are taken as they are.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};

use super::precheck::MAX_IDS;
use super::{MAX_TOKENIZER, spm};
use crate::config::clip;
use crate::error::{Error, read_limited, read_optional};
use crate::json;

/// How Qwen2 cuts words.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// How OpenAI's later tokenizers and Llama 3 do.
const RANKED: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The same content as a `tokenizer.json`, and the file that it came from.
pub(super) struct Made {
    pub(super) json: Value,
    pub(super) path: PathBuf,
    /// Special tokens that the file itself names, such as `bos_token`.
    pub(super) special: Map<String, Value>,
    /// Added tokens are matched in the text as it is.
    pub(super) raw_added: bool,
}

/// Looks for other files than `tokenizer.json`; `None` when there are none.
pub(super) fn read(dir: &Path, settings: &Map<String, Value>) -> Result<Option<Made>, Error> {
    let class = settings.get("tokenizer_class").and_then(Value::as_str).unwrap_or_default();
    let class = class.strip_suffix("Fast").unwrap_or(class);
    let bad = |path: &Path, rule: String| Error::Tokenizer { path: path.to_owned(), rule };
    let made = |json, path| Made { json, path, special: Map::new(), raw_added: false };

    let path = dir.join("tekken.json");
    if let Some(bytes) = read_optional(&path, MAX_TOKENIZER)? {
        let json = tekken(&json::object(&bytes, &path)?).map_err(|rule| bad(&path, rule))?;
        return Ok(Some(made(json, path)));
    }
    let path = dir.join("tokenizer.model");
    if let Some(bytes) = read_optional(&path, MAX_TOKENIZER)? {
        if looks_ranked(&bytes) {
            let json = ranked(&bytes, settings).map_err(|rule| bad(&path, rule))?;
            return Ok(Some(made(json, path)));
        }
        let legacy = settings.get("legacy").and_then(Value::as_bool).unwrap_or(!class.starts_with("Llama"));
        let (json, special, raw_added) = spm::read(&bytes, legacy).map_err(|rule| bad(&path, rule))?;
        return Ok(Some(Made { json, path, special, raw_added }));
    }
    let path = dir.join("vocab.json");
    if let Some(bytes) = read_optional(&path, MAX_TOKENIZER)? {
        let vocab = json::object(&bytes, &path)?;
        let merges = dir.join("merges.txt");
        let text = String::from_utf8(read_limited(&merges, MAX_TOKENIZER)?)
            .map_err(|_| bad(&merges, "should be UTF-8".to_owned()))?;
        let (normalizer, pattern) = match class {
            "GPT2Tokenizer" => (Value::Null, None),
            "Qwen2Tokenizer" | "Qwen3Tokenizer" => (json!({ "type": "NFC" }), Some(QWEN2)),
            other => {
                let rule = format!(
                    "should have tokenizer.json beside it: how `{}` (tokenizer_class) cuts words is not known here, \
                     only of GPT2Tokenizer and Qwen2Tokenizer",
                    clip(other)
                );
                return Err(bad(&path, rule));
            }
        };
        let lines =
            text.lines().enumerate().filter(|(i, l)| !(l.is_empty() || *i == 0 && l.starts_with("#version")));
        let merges: Vec<Value> = lines.map(|(_, line)| line.into()).collect();
        let space = settings.get("add_prefix_space").and_then(Value::as_bool).unwrap_or(false);
        let json = byte_level(vocab.into(), merges.into(), pattern, normalizer, space, false);
        return Ok(Some(made(json, path)));
    }
    let Ok(entries) = std::fs::read_dir(dir) else { return Ok(None) };
    let mut found: Vec<PathBuf> = entries
        .filter_map(|e| Some(e.ok()?.path()))
        .filter(|p| p.extension().is_some_and(|e| e == "tiktoken"))
        .collect();
    found.sort();
    let Some(path) = found.into_iter().next() else { return Ok(None) };
    let json = ranked(&read_limited(&path, MAX_TOKENIZER)?, settings).map_err(|rule| bad(&path, rule))?;
    Ok(Some(made(json, path)))
}

/// A byte-level BPE; words are cut by GPT-2's rule where there is no pattern.
fn byte_level(
    vocab: Value,
    merges: Value,
    pattern: Option<&str>,
    normalizer: Value,
    prefix_space: bool,
    whole_words: bool,
) -> Value {
    let bytes = json!({ "type": "ByteLevel", "add_prefix_space": prefix_space, "trim_offsets": true, "use_regex": pattern.is_none() });
    let pre_tokenizer = match pattern {
        None => bytes,
        Some(pattern) => json!({ "type": "Sequence", "pretokenizers": [
            { "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false }, bytes] }),
    };
    json!({ "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer, "post_processor": null,
        "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true },
        "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": "", "end_of_word_suffix": "",
            "fuse_unk": false, "byte_fallback": false, "ignore_merges": whole_words, "vocab": vocab, "merges": merges } })
}

/// Whether a file has lines of base64 and a number.
fn looks_ranked(bytes: &[u8]) -> bool {
    let line = bytes.split(|&b| b == b'\n').next().unwrap_or_default();
    let Some((text, rank)) = std::str::from_utf8(line).ok().and_then(|l| l.trim_end().split_once(' ')) else {
        return false;
    };
    STANDARD.decode(text).is_ok() && rank.parse::<u32>().is_ok()
}

fn ranked(bytes: &[u8], settings: &Map<String, Value>) -> Result<Value, String> {
    let text = std::str::from_utf8(bytes).map_err(|_| "should be lines of base64 and a number".to_owned())?;
    let mut ranks = Vec::new();
    for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.is_empty()) {
        let bad = || format!("line {} should be base64 and a number", i + 1);
        let (token, rank) = line.trim_end().split_once(' ').ok_or_else(bad)?;
        let rank: u32 = rank.parse().map_err(|_| bad())?;
        ranks.push((STANDARD.decode(token).map_err(|_| bad())?, rank));
    }
    let (vocab, merges) = merges_of(&ranks, 0)?;
    let space = settings.get("add_prefix_space").and_then(Value::as_bool).unwrap_or(false);
    let mut made = byte_level(vocab.into(), merges.into(), Some(RANKED), Value::Null, space, true);
    // Special tokens follow the ranks, as the settings number them; what lies between is taken.
    let first = ranks.iter().map(|(_, rank)| rank + 1).max().unwrap_or(0);
    let named: HashMap<u32, &str> = settings
        .get("added_tokens_decoder")
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
        .filter_map(|(id, token)| Some((id.parse().ok()?, token.get("content")?.as_str()?)))
        .collect();
    let last = named.keys().copied().max().filter(|&last| last >= first && last - first < 1 << 16);
    let added: Vec<Value> = (first..last.map_or(first, |last| last + 1))
        .map(|id| {
            let content =
                named.get(&id).map_or_else(|| format!("<|reserved_token_{id}|>"), |&s| s.to_owned());
            special(id, &content)
        })
        .collect();
    made["added_tokens"] = added.into();
    Ok(made)
}

fn special(id: u32, content: &str) -> Value {
    json!({ "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true })
}

fn tekken(v: &Map<String, Value>) -> Result<Value, String> {
    let config = v.get("config").and_then(Value::as_object).ok_or("should have `config`")?;
    let pattern = config.get("pattern").and_then(Value::as_str).ok_or("config.pattern should be a string")?;
    let count = |field: &str| config.get(field).and_then(Value::as_u64).and_then(|n| usize::try_from(n).ok());
    let listed = v.get("special_tokens").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let specials = count("default_num_special_tokens").unwrap_or(1000);
    if specials > 1 << 16 || listed.len() > specials {
        return Err("config.default_num_special_tokens should hold all special_tokens".to_owned());
    }
    let mut names: Vec<String> = (0..specials).map(|i| format!("<SPECIAL_{i}>")).collect();
    // Versions before 7 do not list them.
    let known = [
        "<unk>",
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
        "[TOOL_CALLS]",
        "[IMG]",
        "<pad>",
        "[IMG_BREAK]",
        "[IMG_END]",
        "[PREFIX]",
        "[MIDDLE]",
        "[SUFFIX]",
        "[SYSTEM_PROMPT]",
        "[/SYSTEM_PROMPT]",
        "[TOOL_CONTENT]",
    ];
    if listed.is_empty() {
        names.iter_mut().zip(known).for_each(|(name, known)| known.clone_into(name));
    }
    for token in listed {
        let rank = token.get("rank").and_then(Value::as_u64).and_then(|r| usize::try_from(r).ok());
        let slot = rank.and_then(|rank| names.get_mut(rank));
        let name = token.get("token_str").and_then(Value::as_str);
        match (slot, name) {
            (Some(slot), Some(name)) => name.clone_into(slot),
            _ => return Err("special_tokens should be {rank, token_str}".to_owned()),
        }
    }
    let words = v.get("vocab").and_then(Value::as_array).ok_or("vocab should be a list")?;
    let used =
        count("default_vocab_size").map_or(words.len(), |all| all.saturating_sub(specials)).min(words.len());
    let mut ranks = Vec::with_capacity(used);
    for (rank, word) in words[..used].iter().enumerate() {
        let bytes = word.get("token_bytes").and_then(Value::as_str).and_then(|s| STANDARD.decode(s).ok());
        let rank = u32::try_from(rank).map_err(|_| "vocab should be shorter")?;
        ranks.push((bytes.ok_or_else(|| format!("vocab[{rank}].token_bytes should be base64"))?, rank));
    }
    let first = u32::try_from(specials).map_err(|_| "should have fewer special tokens")?;
    let (mut vocab, merges) = merges_of(&ranks, first)?;
    let mut added = Vec::new();
    for (id, name) in (0..).zip(&names) {
        vocab.insert(name.clone(), id.into());
        added.push(special(id, name));
    }
    let mut made = byte_level(vocab.into(), merges.into(), Some(pattern), Value::Null, false, true);
    made["added_tokens"] = added.into();
    Ok(made)
}

/// The byte alphabet of GPT-2: printable bytes stand for themselves, the others are moved up from
/// U+0100.
pub(super) fn alphabet() -> [char; 256] {
    let mut moved = 0;
    std::array::from_fn(|b| {
        let b = b as u32;
        let plain = matches!(b, 33..=126 | 161..=172 | 174..=255);
        let c = if plain { b } else { 256 + moved };
        moved += u32::from(!plain);
        char::from_u32(c).unwrap_or('?')
    })
}

/// Vocabulary and merges of ranked byte strings; numbers are ranks above `first`.
fn merges_of(ranks: &[(Vec<u8>, u32)], first: u32) -> Result<(Map<String, Value>, Vec<Value>), String> {
    const LONGEST: usize = 1 << 10;
    let letters = alphabet();
    let spelled = |bytes: &[u8]| bytes.iter().map(|&b| letters[b as usize]).collect::<String>();
    let by_bytes: HashMap<&[u8], u32> = ranks.iter().map(|(bytes, rank)| (bytes.as_slice(), *rank)).collect();
    if by_bytes.len() != ranks.len() {
        return Err("should have every byte string once".to_owned());
    }
    let mut vocab = Map::new();
    let mut merges = Vec::new();
    for (bytes, rank) in ranks {
        if bytes.is_empty() || bytes.len() > LONGEST {
            return Err(format!("the byte string of rank {rank} should have 1 to {LONGEST} bytes"));
        }
        let id = rank.checked_add(first).filter(|&id| id < MAX_IDS);
        let id = id.ok_or_else(|| format!("rank {rank} should be below 2^24"))?;
        vocab.insert(spelled(bytes), id.into());
        for cut in 1..bytes.len() {
            let (left, right) = bytes.split_at(cut);
            if let (Some(l), Some(r)) = (by_bytes.get(left), by_bytes.get(right)) {
                merges.push((*rank, *l, *r, left, right));
            }
        }
    }
    merges.sort_unstable_by_key(|(rank, l, r, ..)| (*rank, *l, *r));
    let pair = |(.., left, right): &(u32, u32, u32, &[u8], &[u8])| json!([spelled(left), spelled(right)]);
    Ok((vocab, merges.iter().map(pair).collect()))
}
