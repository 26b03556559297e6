//! `/v1/embeddings`: one vector for each text, of its final hidden states.

use std::fmt::Write;

use axum::http::header;
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use fracbit_io::{Pool, Pooling};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::app::{Coming, RESULTS};
use crate::engine::Event;
use crate::fields::{Fields, Refusal};
use crate::request::{Prompt, prompts};

/// Most texts of a request, as in OpenAI's API.
const INPUTS: usize = 2048;
/// Bytes of a number of an answer, twice: in the text of its vector, and in all of them.
const NUMBER: usize = 24;

/// How vectors are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Encoding {
    /// A list of numbers.
    #[default]
    Float,
    /// Their bytes, four each, the lowest first, in base64.
    Base64,
}

/// A request for vectors.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Wanted {
    pub(crate) model: Option<String>,
    /// At least one.
    pub(crate) inputs: Vec<Prompt>,
    pub(crate) encoding: Encoding,
}

/// The vector of one text in the making.
#[derive(Clone, Debug)]
pub(crate) struct Embedding {
    pool: Pool,
    width: usize,
    encoding: Encoding,
}

impl Wanted {
    /// Reads the body.
    pub(crate) fn read(body: &[u8]) -> Result<Self, Refusal> {
        let mut fields = Fields::parse(body)?;
        let want = || {
            Refusal::field("input", "should be a text, a list of tokens, or a list of at least one of either")
        };
        let inputs = fields.value("input").and_then(prompts).ok_or_else(want)?;
        let encoding = fields.take("encoding_format", "`float` or `base64`")?.unwrap_or_default();
        if fields.value("dimensions").is_some() {
            let rule = "is not served, vectors have the model's width: leave it out";
            return Err(Refusal::field("dimensions", rule));
        }
        let wanted = Self { model: fields.take("model", "a text")?, inputs, encoding };
        fields.end()?;
        Ok(wanted)
    }

    /// Bytes of the answer of a model of `width` channels while it is made, unless they are too
    /// many.
    pub(crate) fn bytes(&self, width: usize) -> Result<usize, Refusal> {
        let most = (RESULTS / (NUMBER * width)).clamp(1, INPUTS);
        if self.inputs.len() > most {
            let rule = format!("should have at most {most} texts, has {}", self.inputs.len());
            return Err(Refusal::field("input", rule));
        }
        Ok(self.inputs.len() * NUMBER * width)
    }
}

impl Embedding {
    pub(crate) fn new(pooling: Pooling, width: usize, encoding: Encoding) -> Self {
        Self { pool: pooling.summary(), width, encoding }
    }

    /// Takes hidden states of further tokens, (tokens, width).
    pub(crate) fn push(&mut self, rows: &[f32]) {
        self.pool.push(rows, self.width);
    }

    /// The vector as it stands in the answer.
    pub(crate) fn text(self) -> String {
        let vector = self.pool.vector();
        match self.encoding {
            Encoding::Float => serde_json::to_string(&vector).expect("numbers serialize"),
            Encoding::Base64 => {
                let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
                format!("\"{}\"", BASE64_STANDARD.encode(bytes))
            }
        }
    }
}

/// The answer, from all vectors as they come.
pub(crate) async fn answer(mut coming: Coming, model: &str) -> Result<Response, Refusal> {
    let mut vectors = vec![String::new(); coming.texts];
    let (mut left, mut tokens) = (coming.texts, 0);
    while left > 0 {
        match coming.events.recv().await {
            Some((at, Event::Piece(text, _))) => vectors[at] += &text,
            Some((_, Event::Done(done, _))) => {
                left -= 1;
                tokens += done.prompt;
            }
            Some((_, Event::Failed(message))) => return Err(Refusal::new(500, message)),
            Some((_, Event::GivenUp)) | None => return Err(Refusal::ending()),
        }
    }
    let mut body = String::with_capacity(vectors.iter().map(|vector| vector.len() + 64).sum());
    body += "{\"object\":\"list\",\"data\":[";
    for (index, vector) in vectors.into_iter().enumerate() {
        let comma = if index > 0 { "," } else { "" };
        // Writing to a text never fails.
        let _ = write!(body, "{comma}{{\"object\":\"embedding\",\"index\":{index},\"embedding\":{vector}}}");
    }
    let usage = json!({ "prompt_tokens": tokens, "total_tokens": tokens });
    let _ = write!(body, "],\"model\":{},\"usage\":{usage}}}", Value::from(model));
    Ok(([(header::CONTENT_TYPE, "application/json")], body).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_say_texts_or_tokens() {
        let text = |text: &str| Prompt::Text(text.to_owned());
        for (input, want) in [
            (json!("a"), vec![text("a")]),
            (json!(["a", "b"]), vec![text("a"), text("b")]),
            (json!([1, 2]), vec![Prompt::Tokens(vec![1, 2])]),
            (json!([[1], [2, 3]]), vec![Prompt::Tokens(vec![1]), Prompt::Tokens(vec![2, 3])]),
        ] {
            let body = json!({ "input": input, "user": "me", "encoding_format": "base64" }).to_string();
            let read = Wanted::read(body.as_bytes()).expect("a good request");
            assert_eq!((read.inputs, read.encoding), (want, Encoding::Base64));
        }
        for (body, field) in [
            (json!({}), "input"),
            (json!({ "input": 1 }), "input"),
            (json!({ "input": ["a", 1] }), "input"),
            (json!({ "input": [1, -1] }), "input"),
            (json!({ "input": "a", "encoding_format": "int8" }), "encoding_format"),
            (json!({ "input": "a", "dimensions": 8 }), "dimensions"),
            (json!({ "input": "a", "truncate": true }), "truncate"),
        ] {
            let refusal = Wanted::read(body.to_string().as_bytes()).expect_err("a refusal");
            assert_eq!((refusal.status, refusal.field.as_deref()), (400, Some(field)), "{body}");
        }
        let many = Wanted { model: None, inputs: vec![text("a"); 400], encoding: Encoding::Float };
        assert_eq!(many.bytes(64).ok(), Some(400 * NUMBER * 64));
        assert_eq!(many.bytes(4096).err().and_then(|refusal| refusal.field), Some("input".to_owned()));
    }

    #[test]
    fn vectors_are_written_as_asked() {
        let of = |encoding| {
            let mut embedding =
                Embedding::new(Pooling { normalize: false, ..Pooling::default() }, 2, encoding);
            embedding.push(&[1.0, -2.5]);
            embedding.text()
        };
        assert_eq!(of(Encoding::Float), "[1.0,-2.5]");
        assert_eq!(of(Encoding::Base64), "\"AACAPwAAIMA=\"");
    }
}
