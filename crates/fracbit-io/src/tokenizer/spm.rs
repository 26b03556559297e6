//! SentencePiece models (`tokenizer.model`), written as a `tokenizer.json` that encodes as
//! SentencePiece does.
//!
//! The file is a protocol buffer (<https://github.com/google/sentencepiece>,
//! `sentencepiece_model.proto`), of which a few fields are read: pieces with score and type, the
//! kind of model, its special pieces and the rules for spaces. Pieces of a BPE merge in the order
//! of their scores; those that the user defined are taken whole. A model that normalizes by a table
//! of characters is refused.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

const NORMAL: u64 = 1;
const UNKNOWN: u64 = 2;
const CONTROL: u64 = 3;
const USER: u64 = 4;
/// Stands for a space.
const SPACE: &str = "\u{2581}";

struct Piece {
    text: String,
    score: f32,
    kind: u64,
}

/// A field of a message.
enum Field<'a> {
    Number(u64),
    Bytes(&'a [u8]),
    Four([u8; 4]),
    Eight,
}

/// The fields of a message, by number.
fn fields(mut bytes: &[u8]) -> Result<Vec<(u64, Field<'_>)>, String> {
    fn number(bytes: &mut &[u8]) -> Result<u64, String> {
        let mut value = 0_u64;
        for shift in (0..64).step_by(7) {
            let (&first, rest) = bytes.split_first().ok_or("ends within a field")?;
            *bytes = rest;
            value |= u64::from(first & 0x7f) << shift;
            if first < 0x80 {
                return Ok(value);
            }
        }
        Err("has a number of more than 64 bits".to_owned())
    }
    fn cut<'a>(bytes: &mut &'a [u8], len: usize) -> Result<&'a [u8], String> {
        let (head, rest) = bytes.split_at_checked(len).ok_or("ends within a field")?;
        *bytes = rest;
        Ok(head)
    }
    let mut out = Vec::new();
    while !bytes.is_empty() {
        let tag = number(&mut bytes)?;
        let field = match tag & 7 {
            0 => Field::Number(number(&mut bytes)?),
            1 => {
                cut(&mut bytes, 8)?;
                Field::Eight
            }
            2 => {
                let len = usize::try_from(number(&mut bytes)?).map_err(|_| "ends within a field")?;
                Field::Bytes(cut(&mut bytes, len)?)
            }
            5 => {
                let four = cut(&mut bytes, 4)?;
                Field::Four([four[0], four[1], four[2], four[3]])
            }
            kind => return Err(format!("has a field of unknown kind {kind}")),
        };
        out.push((tag >> 3, field));
    }
    Ok(out)
}

fn text(bytes: &[u8]) -> Result<String, String> {
    String::from_utf8(bytes.to_vec()).map_err(|_| "has a piece that is not UTF-8".to_owned())
}

/// The tokenizer, the special tokens that it names, and whether added tokens should be matched in
/// the text as it is. `legacy`: a space goes before every piece of text between added tokens, not
/// only before the first.
pub(super) fn read(bytes: &[u8], legacy: bool) -> Result<(Value, Map<String, Value>, bool), String> {
    let bad = |rule: String| format!("should be a SentencePiece model: {rule}");
    parse(bytes, legacy).map_err(bad)
}

fn parse(bytes: &[u8], legacy: bool) -> Result<(Value, Map<String, Value>, bool), String> {
    let mut pieces = Vec::new();
    let (mut bpe, mut byte_fallback) = (false, false);
    let mut special = [
        ("unk_token", 0_u64, "<unk>".to_owned()),
        ("bos_token", 1, "<s>".to_owned()),
        ("eos_token", 2, "</s>".to_owned()),
    ];
    let (mut dummy_prefix, mut fewer_spaces, mut escape) = (true, true, true);
    for (number, field) in fields(bytes)? {
        let Field::Bytes(message) = field else { continue };
        match number {
            1 => {
                let mut piece = Piece { text: String::new(), score: 0.0, kind: NORMAL };
                for (number, field) in fields(message)? {
                    match (number, field) {
                        (1, Field::Bytes(b)) => piece.text = text(b)?,
                        (2, Field::Four(b)) => piece.score = f32::from_le_bytes(b),
                        (3, Field::Number(n)) => piece.kind = n,
                        _ => {}
                    }
                }
                pieces.push(piece);
            }
            2 => {
                for (number, field) in fields(message)? {
                    match (number, field) {
                        (3, Field::Number(kind)) => match kind {
                            1 => bpe = false,
                            2 => bpe = true,
                            _ => return Err("model_type should be BPE or Unigram".to_owned()),
                        },
                        (24, Field::Number(n)) if n != 0 => {
                            return Err("treat_whitespace_as_suffix is not supported".to_owned());
                        }
                        (35, Field::Number(n)) => byte_fallback = n != 0,
                        (n @ 40..=42, Field::Number(id)) => special[n as usize - 40].1 = id,
                        (n @ 45..=47, Field::Bytes(b)) => special[n as usize - 45].2 = text(b)?,
                        _ => {}
                    }
                }
            }
            3 => {
                for (number, field) in fields(message)? {
                    match (number, field) {
                        (2, Field::Bytes(table)) if !table.is_empty() => {
                            return Err(
                                "normalizes by a table of characters, which is not supported".to_owned()
                            );
                        }
                        (3, Field::Number(n)) => dummy_prefix = n != 0,
                        (4, Field::Number(n)) => fewer_spaces = n != 0,
                        (5, Field::Number(n)) => escape = n != 0,
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    if pieces.is_empty() {
        return Err("has no pieces".to_owned());
    }
    let known: HashMap<&str, usize> = pieces.iter().enumerate().map(|(i, p)| (p.text.as_str(), i)).collect();
    if known.len() != pieces.len() {
        return Err("has a piece twice".to_owned());
    }
    if pieces.iter().any(|p| !p.score.is_finite() || p.text.is_empty()) {
        return Err("has a piece without text or score".to_owned());
    }
    let mut names = Map::new();
    for (name, id, piece) in special {
        // -1 is none.
        let there = usize::try_from(id).ok().and_then(|id| pieces.get(id));
        if there.is_some_and(|there| there.text == piece) {
            names.insert(name.to_owned(), piece.into());
        }
    }
    let user: Vec<&str> = pieces.iter().filter(|p| p.kind == USER).map(|p| p.text.as_str()).collect();
    let model = if bpe {
        let unk = names.get("unk_token").cloned().unwrap_or_default();
        let vocab: Map<String, Value> =
            pieces.iter().enumerate().map(|(i, p)| (p.text.clone(), i.into())).collect();
        json!({ "type": "BPE", "dropout": null, "unk_token": unk, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": true, "byte_fallback": byte_fallback, "ignore_merges": !user.is_empty(), "vocab": vocab, "merges": merges(&pieces, &known)? })
    } else {
        let unk_id = pieces.iter().position(|p| p.kind == UNKNOWN);
        let vocab: Vec<Value> = pieces.iter().map(|p| json!([p.text, f64::from(p.score)])).collect();
        json!({ "type": "Unigram", "unk_id": unk_id, "byte_fallback": byte_fallback, "vocab": vocab })
    };
    let added: Vec<Value> = pieces
        .iter()
        .enumerate()
        .filter(|(_, p)| matches!(p.kind, UNKNOWN | CONTROL))
        .map(|(id, p)| {
            json!({ "id": id, "content": p.text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true })
        })
        .collect();
    let replace = |pattern: Value, by: &str| json!({ "type": "Replace", "pattern": pattern, "content": by });
    let mut normalizers = Vec::new();
    if fewer_spaces {
        normalizers.push(replace(json!({ "Regex": r"\A +| +\z" }), ""));
        normalizers.push(replace(json!({ "Regex": " {2,}" }), " "));
    }
    if escape {
        normalizers.push(replace(json!({ "String": " " }), SPACE));
    }
    let mut cuts = Vec::new();
    if dummy_prefix {
        let scheme = if legacy { "always" } else { "first" };
        if legacy {
            // `Metaspace` puts none where there is one.
            normalizers.push(replace(json!({ "Regex": format!(r"\A{SPACE}") }), &SPACE.repeat(2)));
        }
        cuts.push(
            json!({ "type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": false }),
        );
    }
    if !user.is_empty() {
        let mut longest_first = user;
        longest_first.sort_by_key(|p| std::cmp::Reverse(p.chars().count()));
        let escaped: Vec<String> = longest_first.into_iter().map(escaped).collect();
        cuts.push(json!({ "type": "Split", "pattern": { "Regex": escaped.join("|") }, "behavior": "Isolated", "invert": false }));
    }
    let mut decoders = vec![replace(json!({ "String": SPACE }), " ")];
    if byte_fallback {
        decoders.push(json!({ "type": "ByteFallback" }));
    }
    decoders.push(json!({ "type": "Fuse" }));
    if dummy_prefix {
        decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }
    let sequence = |name: &str, kind: &str, items: Vec<Value>| {
        if items.is_empty() { Value::Null } else { json!({ "type": kind, name: items }) }
    };
    let made = json!({ "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": sequence("normalizers", "Sequence", normalizers), "pre_tokenizer": sequence("pretokenizers", "Sequence", cuts),
        "post_processor": null, "decoder": sequence("decoders", "Sequence", decoders), "model": model });
    Ok((made, names, dummy_prefix))
}

/// A piece as a regular expression of itself.
fn escaped(piece: &str) -> String {
    let mut out = String::new();
    for c in piece.chars() {
        if c.is_ascii_punctuation() {
            out.push('\\');
        }
        out.push(c);
    }
    out
}

/// All pairs of pieces that make a piece, best score first.
fn merges(pieces: &[Piece], known: &HashMap<&str, usize>) -> Result<Value, String> {
    const LONGEST: usize = 1 << 10;
    let mut ranked = Vec::new();
    let normal = |text: &str| known.get(text).is_some_and(|&i| pieces[i].kind == NORMAL);
    for (i, piece) in pieces.iter().enumerate().filter(|(_, p)| p.kind == NORMAL) {
        if piece.text.len() > LONGEST {
            return Err(format!("piece {i} should have at most {LONGEST} bytes"));
        }
        for (cut, _) in piece.text.char_indices().skip(1) {
            let (left, right) = piece.text.split_at(cut);
            if normal(left) && normal(right) {
                ranked.push((piece.score, i, left, right));
            }
        }
    }
    ranked.sort_by(|(a, i, l, r), (b, j, m, s)| b.total_cmp(a).then((i, l, r).cmp(&(j, m, s))));
    Ok(ranked.into_iter().map(|(_, _, left, right)| json!([left, right])).collect::<Vec<_>>().into())
}
