//! Tokenizers to the vocabularies of a GGUF file.

use std::collections::HashMap;
use std::path::Path;

use serde_json::Value;

use super::describe::Description;
use super::pretokenizer;
use super::vocab::{BYTE, CONTROL, NORMAL, SPACE, UNKNOWN, UNUSED, USER_DEFINED};
use crate::config::{ModelConfig, clip};
use crate::error::Error;
use crate::tokenizer::{EncodeOptions, Tokenizer};

/// Writes the vocabulary of `tokenizer`, the rows of the embedding that have no token filled up.
/// Added tokens beyond the embedding, such as those of images, are left out: the model has no row
/// for them.
pub(super) fn describe(
    d: &mut Description,
    tokenizer: &Tokenizer,
    config: &ModelConfig,
    path: &Path,
) -> Result<(), Error> {
    let bad = |rule: String| Error::Tokenizer { path: path.to_owned(), rule };
    let json: Value = serde_json::from_str(&tokenizer.to_json()?).map_err(|e| bad(e.to_string()))?;
    let model = &json["model"];
    let vocab = model["vocab"].as_object();
    let vocab = vocab.ok_or_else(|| bad("model.vocab should be an object, as of BPE".to_owned()))?;
    let mut tokens: Vec<(String, i32)> =
        (0..config.vocab_size).map(|i| (format!("[PAD{i}]"), UNUSED as i32)).collect();
    let rows = tokens.len();
    let mut set = |id: Option<u64>, text: &str, kind: i64| {
        let slot = id.and_then(|id| tokens.get_mut(usize::try_from(id).ok()?));
        let rule =
            || bad(format!("token `{}` should be below {rows}, the rows of the embedding", clip(text)));
        *slot.ok_or_else(rule)? = (text.to_owned(), kind as i32);
        Ok(())
    };
    let spaced = |part: &Value| part.to_string().contains(SPACE);
    let pieces =
        model["byte_fallback"] == true || spaced(&json["normalizer"]) || spaced(&json["pre_tokenizer"]);
    let unknown = model["unk_token"].as_str();
    for (text, id) in vocab {
        let byte = pieces && text.len() == 6 && text.starts_with("<0x") && text.ends_with('>');
        let kind = match text {
            _ if byte => BYTE,
            t if pieces && unknown == Some(t.as_str()) => UNKNOWN,
            _ => NORMAL,
        };
        set(id.as_u64(), text, kind)?;
    }
    for token in json["added_tokens"].as_array().into_iter().flatten() {
        let text = token["content"].as_str().unwrap_or_default();
        let kind = match token["special"] == true {
            true if pieces && unknown == Some(text) => UNKNOWN,
            true => CONTROL,
            false => USER_DEFINED,
        };
        let id = token["id"].as_u64();
        if id.is_some_and(|id| id >= rows as u64) {
            d.left_out.push(text.to_owned());
            continue;
        }
        set(id, text, kind)?;
    }
    let merges: Vec<(&str, &str)> = model["merges"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|m| match m {
            Value::String(s) => s.split_once(' '),
            pair => Some((pair[0].as_str()?, pair[1].as_str()?)),
        })
        .collect::<Option<_>>()
        .ok_or_else(|| bad("model.merges should be pairs".to_owned()))?;
    match model["type"].as_str() {
        Some("BPE") if pieces => {
            d.text("tokenizer.ggml.model", "llama");
            d.text("tokenizer.ggml.pre", "default");
            d.f32s("tokenizer.ggml.scores", &scores(&tokens, &merges).map_err(bad)?);
            let prefix = json["normalizer"].to_string().contains("\"Prepend\"")
                || json["pre_tokenizer"]["prepend_scheme"].as_str().is_some_and(|s| s != "never");
            d.bool("tokenizer.ggml.add_space_prefix", prefix);
        }
        Some("BPE") => {
            let pre = pretokenizer::of(&json["pre_tokenizer"], model["ignore_merges"] == true);
            let pre = pre.ok_or_else(|| {
                let got = clip(&json["pre_tokenizer"].to_string());
                bad(format!("pre_tokenizer should be that of one of {}, got {got}", pretokenizer::names()))
            })?;
            d.text("tokenizer.ggml.model", "gpt2");
            d.text("tokenizer.ggml.pre", pre);
            let joined: Vec<String> = merges.iter().map(|(a, b)| format!("{a} {b}")).collect();
            d.texts("tokenizer.ggml.merges", &joined);
        }
        other => {
            let got = other.map_or("nothing".to_owned(), |o| format!("`{}`", clip(o)));
            return Err(bad(format!("model.type should be BPE, which llama.cpp's decoders have, got {got}")));
        }
    }
    if pieces {
        // As llama.cpp looks for them.
        let defined = tokens.iter_mut().filter(|(_, kind)| i64::from(*kind) == USER_DEFINED);
        defined.for_each(|(text, _)| *text = text.replace(SPACE, " "));
    }
    let (texts, kinds): (Vec<String>, Vec<i32>) = tokens.into_iter().unzip();
    let ids: HashMap<&str, usize> = texts.iter().enumerate().map(|(i, t)| (t.as_str(), i)).collect();
    if ids.len() != texts.len() {
        return Err(bad("tokens should be unique".to_owned()));
    }
    for (key, token) in [("bos", tokenizer.bos_token()), ("eos", tokenizer.eos_token()), ("unknown", unknown)]
    {
        if let Some(&id) = token.and_then(|t| ids.get(t)) {
            d.u32(&format!("tokenizer.ggml.{key}_token_id"), id);
        }
    }
    // The other tokens that end a text: the first of them ends an answer.
    let eos = tokenizer.eos_token().and_then(|t| ids.get(t)).copied();
    if let Some(&other) = tokenizer.eos_ids().iter().find(|&&id| Some(id as usize) != eos) {
        d.u32("tokenizer.ggml.eot_token_id", other as usize);
    }
    let plain = tokenizer.encode("a", EncodeOptions::default())?;
    d.bool("tokenizer.ggml.add_bos_token", tokenizer.bos_id().is_some_and(|bos| plain.first() == Some(&bos)));
    let ends =
        plain.len() > 1 && tokenizer.eos_token().and_then(|t| tokenizer.token_id(t)) == plain.last().copied();
    d.bool("tokenizer.ggml.add_eos_token", ends);
    d.texts("tokenizer.ggml.tokens", &texts);
    d.i32s("tokenizer.ggml.token_type", &kinds);
    if let Some(template) = tokenizer.chat_template_source() {
        d.text("tokenizer.chat_template", template);
    }
    Ok(())
}

/// Scores of pieces: SentencePiece merges the pair whose piece has the highest, so they fall in the
/// order of the merges.
fn scores(tokens: &[(String, i32)], merges: &[(&str, &str)]) -> Result<Vec<f32>, String> {
    let kinds: HashMap<&str, i32> = tokens.iter().map(|(text, kind)| (text.as_str(), *kind)).collect();
    let mut made: HashMap<String, usize> = HashMap::with_capacity(merges.len());
    let mut last = None;
    let mut rank = 0usize;
    for (a, b) in merges {
        let piece = format!("{a}{b}");
        if last.as_ref() != Some(&piece) {
            rank += 1;
            let first = *made.entry(piece.clone()).or_insert(rank);
            // Two ways to a piece that other pieces come between have no score that says so. Where
            // users defined it, it is found before anything is merged.
            if first != rank && kinds.get(piece.as_str()) == Some(&(NORMAL as i32)) {
                return Err(format!(
                    "merges should be in the order of the pieces that they make, as of SentencePiece: `{}` comes twice",
                    clip(&piece)
                ));
            }
            last = Some(piece);
        }
    }
    // Beyond 2^24 single precision does not tell ranks apart.
    if rank >= 1 << 24 {
        return Err("should have fewer than 2^24 merges".to_owned());
    }
    let score = |(text, kind): &(String, i32)| match i64::from(*kind) {
        NORMAL => {
            let single = text.chars().count() == 1;
            made.get(text).map_or(if single { -(rank as f32) - 1.0 } else { -1e9 }, |r| -(*r as f32))
        }
        // As llama.cpp's converter has it.
        _ => -1000.0,
    };
    Ok(tokens.iter().map(score).collect())
}
