//! JSON as Python writes it.
//!
//! The files of a model come from Python's `json`, which has three words more than JSON: `NaN`,
//! `Infinity` and `-Infinity`. They become the objects that transformers 5 itself writes for them
//! (`{"__float__": "Infinity"}`), so that a field that nobody needs does no harm and one that is
//! used is refused by what it holds. A byte-order mark is skipped. Comments, which Python does not
//! read either, are refused by name.

use std::borrow::Cow;
use std::path::Path;

use serde_json::{Map, Value};

use crate::error::Error;

/// The key of a number that JSON has no word for.
pub(crate) const FLOAT: &str = "__float__";
const WORDS: [&str; 3] = ["NaN", "Infinity", "-Infinity"];

/// Reads a JSON object.
pub(crate) fn object(bytes: &[u8], path: &Path) -> Result<Map<String, Value>, Error> {
    let bad = |detail| Error::Json { path: path.to_owned(), what: "a JSON object", detail };
    let text = plain(bytes).map_err(bad)?;
    serde_json::from_slice(&text).map_err(|e| bad(e.to_string()))
}

/// The same in the words of JSON, with line breaks where they were.
pub(crate) fn plain(bytes: &[u8]) -> Result<Cow<'_, [u8]>, String> {
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    let mut out = Vec::new();
    let (mut at, mut copied, mut in_string) = (0, 0, false);
    while let Some(&byte) = bytes.get(at) {
        match byte {
            b'"' => in_string = !in_string,
            b'\\' if in_string => at += 1,
            b'/' | b'#' if !in_string => {
                let line = bytes[..at].iter().filter(|&&b| b == b'\n').count() + 1;
                return Err(format!("line {line} holds a comment, which JSON does not have"));
            }
            b'N' | b'I' | b'-' if !in_string => {
                if let Some(word) = WORDS.into_iter().find(|word| bytes[at..].starts_with(word.as_bytes())) {
                    out.extend_from_slice(&bytes[copied..at]);
                    out.extend_from_slice(format!("{{\"{FLOAT}\":\"{word}\"}}").as_bytes());
                    copied = at + word.len();
                    at = copied - 1;
                }
            }
            _ => {}
        }
        at += 1;
    }
    if copied == 0 {
        return Ok(Cow::Borrowed(bytes));
    }
    out.extend_from_slice(&bytes[copied..]);
    Ok(Cow::Owned(out))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_python_are_read() {
        let read = |text: &str| object(text.as_bytes(), Path::new("c.json"));
        let got = read(
            "\u{feff}{\"a\": [0.0, Infinity], \"b\": -Infinity, \"Infinity\": \"NaN -Infinity \\\" NaN /\", \"c\":NaN}",
        );
        let want = serde_json::json!({ "a": [0.0, { FLOAT: "Infinity" }], "b": { FLOAT: "-Infinity" },
            "Infinity": "NaN -Infinity \" NaN /", "c": { FLOAT: "NaN" } });
        assert_eq!(Value::Object(got.unwrap()), want);
        for (text, word) in [
            ("{\"a\": 1, // one\n}", "line 1 holds a comment"),
            ("{\n/* two */\n}", "line 2 holds a comment"),
            ("{\n\n# three\n}", "line 3"),
            ("{\"a\": Infinit}", "c.json"),
            ("{\"a\": NaN1}", "c.json"),
            ("{\"a\": \"x", "c.json"),
            ("{\"a\": \"\\", "c.json"),
            ("[NaN]", "object"),
        ] {
            let e = read(text).unwrap_err().to_string();
            assert!(e.contains(word) && e.contains("c.json"), "{text}: {e}");
        }
    }
}
