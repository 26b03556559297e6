//! `/v1/messages`, in the form of Anthropic's API: text in, one text out.

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use fracbit_engine::Done;
use fracbit_model::SampleConfig;
use serde_json::{Map, Value, json};

use crate::engine::Event;
use crate::fields::{Fields, Refusal};
use crate::form::{Answering, Events, Form, Turns, moved, named, renamed, text_in, text_of};
use crate::request::Request;

/// Fields with the names that they have in chat completions.
const SAME: [(&str, &str); 7] = [
    ("model", "model"),
    ("max_tokens", "max_tokens"),
    ("temperature", "temperature"),
    ("top_p", "top_p"),
    ("top_k", "top_k"),
    ("stop_sequences", "stop"),
    ("stream", "stream"),
];

/// Reads a request.
pub(crate) fn read(body: &[u8], defaults: SampleConfig) -> Result<Request, Refusal> {
    let mut fields = Fields::parse(body)?;
    let mut chat = Map::new();
    moved(&mut fields, &SAME, &mut chat);
    if !chat.contains_key("max_tokens") {
        return Err(Refusal::field("max_tokens", "should be there: the most tokens of the answer"));
    }
    chat.insert("messages".to_owned(), conversation(&mut fields)?);
    let none = |v: &Value| v.as_array().is_some_and(Vec::is_empty);
    fields.only("tools", none)?;
    fields.only("mcp_servers", none)?;
    fields.only("tool_choice", |v| v["type"] == "none" || v["type"] == "auto")?;
    fields.only("thinking", |v| v["type"] == "disabled")?;
    fields.end()?;
    let body = Value::Object(chat).to_string();
    Request::chat(body.as_bytes(), defaults).map_err(|refusal| renamed(refusal, &SAME))
}

/// The messages, with `system` before them.
fn conversation(fields: &mut Fields) -> Result<Value, Refusal> {
    let system = fields.value("system").map(|text| text_in(text, "system", &["text"])).transpose()?;
    let mut turns = Turns::new("messages", system);
    let want = "a list of messages, each with a role and a content";
    let messages: Vec<Map<String, Value>> = fields.take("messages", want)?.unwrap_or_default();
    for mut message in messages {
        let role = message.shift_remove("role").unwrap_or_default();
        let role = role.as_str().filter(|role| ["user", "assistant"].contains(role));
        let role =
            role.ok_or_else(|| Refusal::field("messages", "should have roles `user` and `assistant`"))?;
        let content = message.shift_remove("content").unwrap_or_default();
        turns.push(role, text_in(content, "messages", &["text"])?, &message)?;
    }
    turns.end()
}

/// The body of `/v1/messages/count_tokens`, as one of `/tokenize`.
pub(crate) fn counted(mut fields: Fields) -> Result<Fields, Refusal> {
    let mut same = Map::new();
    moved(&mut fields, &[("model", "model")], &mut same);
    same.insert("messages".to_owned(), conversation(&mut fields)?);
    fields.end()?;
    Fields::parse(Value::Object(same).to_string().as_bytes())
}

/// An answer.
pub(crate) struct Message {
    id: String,
    model: String,
    /// The text is there.
    over: bool,
}

impl Form for Message {
    fn new(_: &Request, Answering { id, model, .. }: Answering) -> Self {
        Self { id: format!("msg_{id:016x}"), model, over: false }
    }

    async fn whole(self, events: &mut Events) -> Result<Value, Refusal> {
        let (text, done, stop) = text_of(events).await?;
        let content = json!([{ "type": "text", "text": text }]);
        let mut message = self.message(content, &usage(done));
        (message["stop_reason"], message["stop_sequence"]) = ended(done, stop);
        Ok(message)
    }

    fn first(&mut self) -> String {
        // How many tokens of the prompt are in the cache is only known once it runs.
        let usage = json!({ "input_tokens": 0, "output_tokens": 0 });
        let start = json!({ "message": self.message(json!([]), &usage) });
        let block = json!({ "index": 0, "content_block": { "type": "text", "text": "" } });
        named("message_start", start) + &named("content_block_start", block)
    }

    fn event(&mut self, _: usize, event: Event) -> Option<String> {
        if self.over {
            return None;
        }
        let refusal = match event {
            Event::Piece(text, _) => {
                let delta = json!({ "type": "text_delta", "text": text });
                return Some(named("content_block_delta", json!({ "index": 0, "delta": delta })));
            }
            Event::Done(done, stop) => {
                self.over = true;
                let (reason, sequence) = ended(done, stop);
                let delta = json!({ "stop_reason": reason, "stop_sequence": sequence });
                let last = json!({ "delta": delta, "usage": usage(done) });
                let block = named("content_block_stop", json!({ "index": 0 }));
                return Some(block + &named("message_delta", last) + &named("message_stop", json!({})));
            }
            Event::Failed(message) => Refusal::new(500, message),
            Event::GivenUp => Refusal::ending(),
        };
        self.over = true;
        Some(named("error", told(&refusal)))
    }

    fn refused(refusal: Refusal) -> Response {
        let body = told(&refusal);
        let mut response = refusal.into_response();
        let status = std::mem::replace(response.status_mut(), StatusCode::OK);
        // The headers of the status stay, the body is of this form.
        let mut answer = (status, axum::Json(body)).into_response();
        for (name, value) in response.headers() {
            answer.headers_mut().entry(name).or_insert_with(|| value.clone());
        }
        answer
    }
}

impl Message {
    fn message(&self, content: Value, usage: &Value) -> Value {
        json!({
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content,
            "stop_reason": null, "stop_sequence": null, "usage": usage,
        })
    }
}

/// A refusal in Anthropic's form, with the name of the field beside.
fn told(refusal: &Refusal) -> Value {
    let kind = match refusal.status {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        503 => "overloaded_error",
        500.. => "api_error",
        _ => "invalid_request_error",
    };
    let error = json!({ "type": kind, "message": refusal.message, "param": refusal.field });
    json!({ "type": "error", "error": error })
}

fn ended(done: Done, stop: Option<String>) -> (Value, Value) {
    match (done.finish.is_cut(), stop) {
        (true, _) => ("max_tokens".into(), Value::Null),
        (false, None) => ("end_turn".into(), Value::Null),
        (false, Some(stop)) => ("stop_sequence".into(), stop.into()),
    }
}

/// Tokens that were in the cache are counted apart from the rest of the prompt.
fn usage(done: Done) -> Value {
    json!({
        "input_tokens": done.prompt - done.cached, "cache_read_input_tokens": done.cached,
        "cache_creation_input_tokens": 0, "output_tokens": done.tokens,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_of(body: &Value) -> Result<Request, Refusal> {
        read(body.to_string().as_bytes(), SampleConfig::default())
    }

    #[test]
    fn a_request_is_one_of_chat_completions() {
        let body = json!({
            "model": "m", "max_tokens": 9, "temperature": 0.5, "top_k": 4, "stop_sequences": ["x"], "stream": true,
            "system": [{ "type": "text", "text": "Be " }, { "type": "text", "text": "brief." }],
            "metadata": { "user_id": "u" }, "thinking": { "type": "disabled" },
            "messages": [
                { "role": "user", "content": "a" },
                { "role": "assistant", "content": [{ "type": "text", "text": "A", "citations": null }] },
                { "role": "user", "content": [{ "type": "text", "text": "b", "cache_control": { "type": "ephemeral" } }] },
            ],
        });
        let same = json!({
            "model": "m", "max_tokens": 9, "temperature": 0.5, "top_k": 4, "stop": ["x"], "stream": true,
            "messages": [
                { "role": "system", "content": "Be brief." }, { "role": "user", "content": "a" },
                { "role": "assistant", "content": "A" }, { "role": "user", "content": "b" },
            ],
        });
        let want = Request::chat(same.to_string().as_bytes(), SampleConfig::default());
        assert_eq!(read_of(&body).expect("a good request"), want.expect("a good request"));
    }

    #[test]
    fn what_is_not_served_is_refused_by_name() {
        let good = json!({ "max_tokens": 9, "messages": [{ "role": "user", "content": "a" }] });
        assert!(read_of(&good).is_ok());
        let image = json!([{ "role": "user", "content": [{ "type": "image", "source": {} }] }]);
        for (field, value) in [
            ("max_tokens", Value::Null),
            ("max_tokens", json!(0)),
            ("tools", json!([{ "name": "f" }])),
            ("thinking", json!({ "type": "enabled", "budget_tokens": 1024 })),
            ("system", json!(1)),
            ("stop_sequences", json!([1])),
            ("temperature", json!(-1)),
            ("container", json!("c")),
            ("messages", json!([])),
            ("messages", image),
            ("messages", json!([{ "role": "system", "content": "a" }])),
            (
                "messages",
                json!([{ "role": "user", "content": "a" }, { "role": "assistant", "content": "b" }]),
            ),
            ("messages", json!([{ "role": "user", "content": "a", "name": "n" }])),
        ] {
            let mut body = good.clone();
            body[field] = value;
            let refusal = read_of(&body).expect_err(field);
            assert_eq!(refusal.field.as_deref(), Some(field), "{body}: {}", refusal.message);
            assert!(refusal.message.contains(field), "{}", refusal.message);
        }
    }
}
