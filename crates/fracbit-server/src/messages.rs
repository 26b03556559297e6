//! `/v1/messages`, in the form of Anthropic's API: texts and calls of functions.

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use fracbit_engine::Done;
use fracbit_model::SampleConfig;
use serde_json::{Map, Value, json};

use crate::engine::Event;
use crate::fields::{Fields, Refusal};
use crate::form::{
    Answering, Events, Form, Turns, functions, moved, named, plain_id, renamed, text_in, text_of,
};
use crate::request::Request;
use crate::tools::{Calls, Part, Said, call_id, calls_of, rest_of, said_of};

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
    tools(&mut fields, &mut chat)?;
    fields.only("mcp_servers", |v| v.as_array().is_some_and(Vec::is_empty))?;
    fields.only("thinking", |v| v["type"] == "disabled")?;
    fields.end()?;
    let body = Value::Object(chat).to_string();
    Request::chat(body.as_bytes(), defaults).map_err(|refusal| renamed(refusal, &SAME))
}

/// Functions, and what is to be done with them.
fn tools(fields: &mut Fields, chat: &mut Map<String, Value>) -> Result<(), Refusal> {
    let known = [("type", Some("custom")), ("cache_control", None), ("eager_input_streaming", None)];
    chat.extend(functions(fields, "input_schema", &known)?.map(|all| ("tools".to_owned(), all)));
    let want = "`{\"type\": \"auto\"}`, `any`, `none`, or `tool` with a name";
    let Some(mut choice) = fields.take::<Map<String, Value>>("tool_choice", want)? else { return Ok(()) };
    let mut take = |name: &str| choice.shift_remove(name).unwrap_or_default();
    let (kind, name, alone) = (take("type"), take("name"), take("disable_parallel_tool_use"));
    let same = match (kind.as_str(), name.as_str()) {
        (Some(word @ ("auto" | "none")), None) => json!(word),
        (Some("any"), None) => json!("required"),
        (Some("tool"), Some(name)) => json!({ "type": "function", "function": { "name": name } }),
        _ => return Err(Refusal::field("tool_choice", format_args!("should be {want}"))),
    };
    if let Some(field) = choice.keys().next() {
        return Err(Refusal::field("tool_choice", format_args!("should have no `{field}`")));
    }
    chat.insert("tool_choice".to_owned(), same);
    if !alone.is_null() {
        let alone = alone.as_bool().ok_or_else(|| {
            Refusal::field("tool_choice", "should have a `disable_parallel_tool_use` of true or false")
        })?;
        chat.insert("parallel_tool_calls".to_owned(), (!alone).into());
    }
    Ok(())
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
        push(&mut turns, role, content, &message)?;
    }
    turns.end()
}

/// One message: its text, the calls of an answer, and before the text of a user what came of calls.
fn push(turns: &mut Turns, role: &str, content: Value, rest: &Map<String, Value>) -> Result<(), Refusal> {
    let Value::Array(parts) = content else {
        return turns.push(role, text_in(content, "messages", &["text"])?, rest);
    };
    let kind = if role == "user" { "tool_result" } else { "tool_use" };
    let (mut beside, texts): (Vec<Value>, Vec<Value>) =
        parts.into_iter().partition(|part| part["type"] == kind);
    let bad = |rule: &str| Refusal::field("messages", format_args!("should have {rule}"));
    let id = |part: &Value, field: &str| match part[field].as_str() {
        Some(id) => Ok(plain_id(id, PREFIX).to_owned()),
        None => Err(bad(&format!("a `{field}` in each `{kind}`"))),
    };
    if role == "user" {
        for part in &mut beside {
            let content = part["content"].take();
            let text =
                if content.is_null() { String::new() } else { text_in(content, "messages", &["text"])? };
            // The templates have no place for what went wrong but the text.
            let wrong = if part["is_error"] == true { "Error: " } else { "" };
            turns.push_result(&id(part, "tool_use_id")?, &format!("{wrong}{text}"));
        }
        if beside.is_empty() || !texts.is_empty() {
            turns.push(role, text_in(Value::Array(texts), "messages", &["text"])?, rest)?;
        }
        return Ok(());
    }
    turns.push(role, text_in(Value::Array(texts), "messages", &["text"])?, rest)?;
    for part in &beside {
        let name = part["name"].as_str().ok_or_else(|| bad("a `name` in each `tool_use`"))?;
        let input = part.get("input").filter(|input| input.is_object());
        let input = input.ok_or_else(|| bad("an object as `input` in each `tool_use`"))?;
        turns.push_call(&id(part, "id")?, name, &input.to_string());
    }
    Ok(())
}

/// What stands before the name of a call.
const PREFIX: &str = "toolu_";

/// The body of `/v1/messages/count_tokens`, as one of `/tokenize`.
pub(crate) fn counted(mut fields: Fields) -> Result<Fields, Refusal> {
    let mut same = Map::new();
    moved(&mut fields, &[("model", "model")], &mut same);
    same.insert("messages".to_owned(), conversation(&mut fields)?);
    tools(&mut fields, &mut same)?;
    fields.end()?;
    Fields::parse(Value::Object(same).to_string().as_bytes())
}

/// An answer.
pub(crate) struct Message {
    number: u64,
    /// Tokens of the prompt.
    prompt: usize,
    id: String,
    model: String,
    calls: Option<Calls>,
    /// Blocks that were begun, and calls among them.
    blocks: usize,
    called: usize,
    /// The block that is open is one of text, or a call; `None`: none is.
    open: Option<Block>,
    /// The text is there.
    over: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Block {
    Text,
    Call,
}

impl Form for Message {
    fn new(request: &Request, Answering { prompt, id, model, format, .. }: Answering) -> Self {
        Self {
            number: id,
            prompt,
            id: format!("msg_{id:016x}"),
            model,
            calls: calls_of(request, format),
            blocks: 0,
            called: 0,
            open: None,
            over: false,
        }
    }

    async fn whole(mut self, events: &mut Events) -> Result<Value, Refusal> {
        let (spoken, done, stop) = text_of(events, &mut self.calls).await?;
        let mut called = 0;
        let block = |part: &Part| match part {
            Part::Text(text) => json!({ "type": "text", "text": text }),
            Part::Call(name, arguments) => {
                called += 1;
                // What was cut has no end.
                let input: Value = serde_json::from_str(arguments).unwrap_or_else(|_| json!({}));
                self.call(called - 1, name, &input)
            }
        };
        let content: Value = spoken.parts().iter().map(block).collect();
        let mut message = self.message(content, &usage(done));
        (message["stop_reason"], message["stop_sequence"]) = ended(done, stop, called > 0);
        Ok(message)
    }

    fn first(&mut self) -> String {
        // How many of them are in the cache is only known once the prompt runs.
        let usage = json!({ "input_tokens": self.prompt, "output_tokens": 0 });
        named("message_start", json!({ "message": self.message(json!([]), &usage) }))
    }

    fn event(&mut self, _: usize, event: Event) -> Option<String> {
        if self.over {
            return None;
        }
        let refusal = match event {
            Event::Piece(text, _) => {
                let said = said_of(&mut self.calls, text);
                return Some(self.say(said));
            }
            Event::Done(done, stop) => {
                self.over = true;
                let said = rest_of(&mut self.calls);
                let mut all = self.say(said);
                if self.blocks == 0 {
                    all += &self.begin(Block::Text, json!({ "type": "text", "text": "" }));
                }
                all += &self.close();
                let called = self.calls.as_ref().is_some_and(|calls| calls.count() > 0);
                let (reason, sequence) = ended(done, stop, called);
                let delta = json!({ "stop_reason": reason, "stop_sequence": sequence });
                let last = json!({ "delta": delta, "usage": usage(done) });
                return Some(all + &named("message_delta", last) + &named("message_stop", json!({})));
            }
            Event::Failed(message) => Refusal::new(500, message),
            Event::GivenUp => Refusal::ending(),
        };
        self.over = true;
        Some(named("error", told(&refusal)))
    }

    fn refused(refusal: Refusal) -> Response {
        refused(refusal)
    }
}

/// How a refusal is told to clients of this form.
pub(crate) fn refused(refusal: Refusal) -> Response {
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

impl Message {
    /// What a stream says of a piece.
    fn say(&mut self, said: Vec<Said>) -> String {
        let mut all = String::new();
        for said in said {
            all += &match said {
                Said::Text(text) | Said::Broken { rest: text, .. } if text.is_empty() => continue,
                Said::Text(text) | Said::Broken { rest: text, .. } => {
                    let begun = match self.open {
                        Some(Block::Text) => String::new(),
                        _ => self.begin(Block::Text, json!({ "type": "text", "text": "" })),
                    };
                    begun + &self.delta(json!({ "type": "text_delta", "text": text }))
                }
                Said::Call(name) => {
                    self.called += 1;
                    let call = self.call(self.called - 1, &name, &json!({}));
                    self.begin(Block::Call, call)
                }
                Said::Arguments(piece) => {
                    self.delta(json!({ "type": "input_json_delta", "partial_json": piece }))
                }
            };
        }
        all
    }

    /// Begins a block behind the one that is open.
    fn begin(&mut self, kind: Block, block: Value) -> String {
        let closed = self.close();
        self.blocks += 1;
        self.open = Some(kind);
        closed + &named("content_block_start", json!({ "index": self.blocks - 1, "content_block": block }))
    }

    fn delta(&self, delta: Value) -> String {
        let index = self.blocks.saturating_sub(1);
        named("content_block_delta", json!({ "index": index, "delta": delta }))
    }

    fn close(&mut self) -> String {
        match self.open.take() {
            Some(_) => named("content_block_stop", json!({ "index": self.blocks - 1 })),
            None => String::new(),
        }
    }

    fn call(&self, index: usize, name: &str, input: &Value) -> Value {
        let id = format!("{PREFIX}{}", call_id(self.number, 0, index));
        json!({ "type": "tool_use", "id": id, "name": name, "input": input })
    }

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

fn ended(done: Done, stop: Option<String>, called: bool) -> (Value, Value) {
    match (done.finish.is_cut(), stop) {
        (true, _) => ("max_tokens".into(), Value::Null),
        (false, _) if called => ("tool_use".into(), Value::Null),
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
            ("tools", json!([{ "type": "web_search_20250305", "name": "web_search" }])),
            ("tools", json!([{ "name": "f", "input_schema": 1 }])),
            ("tools", json!([{ "description": "d" }])),
            ("tool_choice", json!({ "type": "any" })),
            ("tool_choice", json!({ "type": "tool" })),
            ("tool_choice", json!("auto")),
            ("messages", json!([{ "role": "user", "content": [{ "type": "tool_result", "content": "3" }] }])),
            (
                "messages",
                json!([
                    { "role": "user", "content": "a" },
                    { "role": "assistant", "content": [{ "type": "tool_use", "id": "toolu_1", "name": "f" }] },
                    { "role": "user", "content": [{ "type": "tool_result", "tool_use_id": "toolu_1" }] },
                ]),
            ),
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
