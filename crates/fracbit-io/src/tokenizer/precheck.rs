//! Rules a `tokenizer.json` must keep before the `tokenizers` crate sees it.
//!
//! Each rule names a file that made version 0.23.2 panic, misbehave or read beyond a string; see
//! the table in the hostile-input tests.

use serde_json::{Map, Value};

use crate::config::clip;

/// What every token id is below, the limit of a configuration's vocabulary: the crate writes a
/// vocabulary by counting up to its largest id, which a line of another file may set to 4 billion.
pub(super) const MAX_IDS: u32 = 1 << 24;

/// Checks the text of a `tokenizer.json`; the error is the broken rule.
pub(super) fn check(bytes: &[u8]) -> Result<(), String> {
    let v: Value = serde_json::from_slice(bytes).map_err(|e| format!("should be JSON: {e}"))?;
    let v = v.as_object().ok_or("should be a JSON object")?;
    check_rest(v)?;
    let model = v.get("model").ok_or("should have a `model`")?;
    let kind = model.get("type").and_then(Value::as_str);
    if !matches!(kind, None | Some("BPE" | "Unigram" | "WordPiece" | "WordLevel")) {
        return Err(format!(
            "model.type should be BPE, Unigram, WordPiece or WordLevel, got `{}`",
            clip(kind.unwrap_or(""))
        ));
    }
    for (token, id) in model.get("vocab").and_then(Value::as_object).into_iter().flatten() {
        if id.as_u64().is_none_or(|id| id >= MAX_IDS.into()) {
            return Err(format!("model.vocab: id of `{}` should be a number below 2^24", clip(token)));
        }
    }
    if kind == Some("BPE") || model.get("merges").is_some() {
        check_bpe(model)?;
    }
    Ok(())
}

/// Everything but the model.
pub(super) fn check_rest(v: &Map<String, Value>) -> Result<(), String> {
    for part in ["normalizer", "pre_tokenizer", "post_processor", "decoder"] {
        if let Some(v) = v.get(part) {
            check_part(v, part)?;
        }
    }
    if let Some(t) = v.get("truncation").filter(|t| !t.is_null()) {
        let n = |f: &str| t.get(f).and_then(Value::as_u64).unwrap_or(0);
        if n("stride") >= n("max_length").max(1) {
            return Err("truncation.stride should be less than truncation.max_length".to_owned());
        }
    }
    Ok(())
}

/// Anywhere inside a normalizer, pre-tokenizer, post-processor or decoder.
fn check_part(v: &Value, part: &str) -> Result<(), String> {
    match v {
        Value::Array(items) => items.iter().try_for_each(|i| check_part(i, part)),
        Value::Object(map) => {
            // A malformed table panics at load, a lying one at encode. None of the supported
            // architectures has one.
            if map.contains_key("precompiled_charsmap") {
                return Err(format!("{part} should not be of type Precompiled: it is not supported"));
            }
            // `chunks(0)` panics at encode; the untagged form has no `type`.
            if map.get("length").is_some_and(|n| n.as_u64() == Some(0)) {
                return Err(format!("{part}: length of FixedLength should be at least 1"));
            }
            if map.contains_key("special_tokens") {
                check_template(map).map_err(|rule| format!("{part}: {rule}"))?;
            }
            map.values().try_for_each(|i| check_part(i, part))
        }
        _ => Ok(()),
    }
}

/// The templates of a `TemplateProcessing`: a token or text that is not there panics at encode.
fn check_template(of: &Map<String, Value>) -> Result<(), String> {
    let tokens = of.get("special_tokens").and_then(Value::as_object);
    for name in ["single", "pair"] {
        let id = |piece: &Value, kind: &str| Some(piece.get(kind)?.get("id")?.as_str()?.to_owned());
        for piece in of.get(name).and_then(Value::as_array).into_iter().flatten() {
            if let Some(token) = id(piece, "SpecialToken")
                && tokens.is_none_or(|tokens| !tokens.contains_key(&token))
            {
                return Err(format!("`{}` of `{name}` should be among special_tokens", clip(&token)));
            }
            if name == "single" && id(piece, "Sequence").is_some_and(|text| text != "A") {
                return Err("`single` should hold one text, which is `A`".to_owned());
            }
        }
    }
    Ok(())
}

fn check_bpe(model: &Value) -> Result<(), String> {
    if model.get("dropout").and_then(Value::as_f64).is_some_and(|p| p != 0.0) {
        return Err("model.dropout should be null: it makes encoding random".to_owned());
    }
    let vocab = model.get("vocab").and_then(Value::as_object).ok_or("model.vocab should be an object")?;
    let prefix = model.get("continuing_subword_prefix").and_then(Value::as_str).unwrap_or("");
    let merges = model.get("merges").and_then(Value::as_array).ok_or("model.merges should be a list")?;
    let mut joined = String::new();
    for (i, m) in merges.iter().enumerate() {
        let pair = match m {
            Value::String(s) => s.split_once(' ').filter(|(_, b)| !b.contains(' ')),
            Value::Array(p) => match p.as_slice() {
                [Value::String(a), Value::String(b)] => Some((a.as_str(), b.as_str())),
                _ => None,
            },
            _ => None,
        };
        let Some((a, b)) = pair else {
            return Err(format!("model.merges[{i}] should be two tokens"));
        };
        for t in [a, b] {
            if !vocab.contains_key(t) {
                return Err(format!("model.merges[{i}]: `{}` should be in the vocabulary", clip(t)));
            }
        }
        // The crate cuts the prefix off by length alone (usize underflow, or a cut inside a
        // character).
        let Some(rest) = b.strip_prefix(prefix) else {
            return Err(format!(
                "model.merges[{i}]: `{}` should begin with continuing_subword_prefix",
                clip(b)
            ));
        };
        // The crate copies the pair into a buffer as long as the longest token before it looks it
        // up.
        joined.clear();
        joined.push_str(a);
        joined.push_str(rest);
        if !vocab.contains_key(&joined) {
            return Err(format!(
                "model.merges[{i}]: the result `{}` should be in the vocabulary",
                clip(&joined)
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn templates_hold_what_they_name() {
        let (bos, a, b) = (
            json!({"SpecialToken": {"id": "<s>", "type_id": 0}}),
            json!({"Sequence": {"id": "A", "type_id": 0}}),
            json!({"Sequence": {"id": "B", "type_id": 1}}),
        );
        let known = json!({"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}});
        let rest = |single: &[&Value], pair: &[&Value], known: &Value| {
            let template = json!({"type": "TemplateProcessing", "single": single, "pair": pair,
                                  "special_tokens": known});
            // As they come: in a list of processors.
            let all = json!({"post_processor": {"type": "Sequence", "processors": [template]}});
            check_rest(all.as_object().expect("an object"))
        };
        assert_eq!(rest(&[&bos, &a], &[&bos, &a, &b], &known), Ok(()));
        for (single, pair, known, rule) in [
            (vec![&bos, &a], vec![&a], &json!({}), "`<s>` of `single` should be among special_tokens"),
            (vec![&a], vec![&a, &bos], &json!({}), "`<s>` of `pair` should be among special_tokens"),
            (vec![&bos, &a, &b], vec![&a], &known, "`single` should hold one text"),
        ] {
            let refused = rest(&single, &pair, known).expect_err(rule);
            assert!(refused.starts_with("post_processor: ") && refused.contains(rule), "{refused}");
        }
    }
}
