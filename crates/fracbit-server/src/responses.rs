//! `/v1/responses`, in the form of OpenAI's API: text in, one text out. Nothing is kept between
//! requests.

use std::time::{SystemTime, UNIX_EPOCH};

use fracbit_engine::Done;
use fracbit_model::SampleConfig;
use serde_json::{Map, Value, json};

use crate::engine::Event;
use crate::fields::{Fields, Refusal};
use crate::form::{Answering, Events, Form, Turns, instruction, moved, named, renamed, text_in, text_of};
use crate::request::Request;

/// Fields with the names that they have in chat completions.
const SAME: [(&str, &str); 5] = [
    ("model", "model"),
    ("max_output_tokens", "max_tokens"),
    ("temperature", "temperature"),
    ("top_p", "top_p"),
    ("stream", "stream"),
];

/// Reads a request.
pub(crate) fn read(body: &[u8], defaults: SampleConfig) -> Result<Request, Refusal> {
    let mut fields = Fields::parse(body)?;
    let mut chat = Map::new();
    moved(&mut fields, &SAME, &mut chat);
    let instructions = fields.take("instructions", "a text")?;
    let mut turns = Turns::new("input", instructions);
    match fields.value("input") {
        Some(Value::String(text)) => turns.push("user", text, &Map::new())?,
        Some(Value::Array(items)) => items.into_iter().try_for_each(|item| push(&mut turns, item))?,
        _ => return Err(Refusal::field("input", "should be a text or a list of messages")),
    }
    chat.insert("messages".to_owned(), turns.end()?);
    let none = |v: &Value| v.as_array().is_some_and(Vec::is_empty);
    for field in ["tools", "include"] {
        fields.only(field, none)?;
    }
    fields.only("tool_choice", |v| v == "none" || v == "auto")?;
    fields.only("truncation", |v| v == "disabled")?;
    fields.only("background", |v| v == false)?;
    fields.only("text", |v| {
        let plain = |(name, value): (&String, &Value)| match name.as_str() {
            "format" => value == &json!({ "type": "text" }),
            name => name == "verbosity",
        };
        v.as_object().is_some_and(|text| text.iter().all(plain))
    })?;
    fields.only("stream_options", |v| {
        v.as_object().is_some_and(|options| options.keys().all(|name| name == "include_obfuscation"))
    })?;
    fields.end()?;
    let body = Value::Object(chat).to_string();
    Request::chat(body.as_bytes(), defaults).map_err(|refusal| renamed(refusal, &SAME))
}

/// One item of `input`: a message, perhaps one that this server gave as output.
fn push(turns: &mut Turns, item: Value) -> Result<(), Refusal> {
    let want = "should have messages, each with a role and a content";
    let Value::Object(mut item) = item else { return Err(Refusal::field("input", want)) };
    let mut take = |name: &str| item.shift_remove(name).unwrap_or_default();
    let (kind, role, content) = (take("type"), take("role"), take("content"));
    // What an output has beside.
    drop([take("id"), take("status")]);
    if !(kind.is_null() || kind == "message") {
        return Err(Refusal::field("input", want));
    }
    // A developer says what systems said before.
    let role = match role.as_str() {
        Some("developer") => "system",
        Some(role @ ("user" | "assistant" | "system")) => role,
        _ => return Err(Refusal::field("input", want)),
    };
    turns.push(role, text_in(content, "input", &["input_text", "output_text", "text"])?, &item)
}

/// A response.
pub(crate) struct Response {
    id: u64,
    model: String,
    created: u64,
    instructions: Option<String>,
    max_tokens: Option<usize>,
    sampling: SampleConfig,
    /// The text as far as it is there.
    text: String,
    /// Events said so far.
    said: usize,
    over: bool,
}

impl Form for Response {
    fn new(request: &Request, Answering { id, model, .. }: Answering) -> Self {
        Self {
            id,
            model,
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
            instructions: instruction(request),
            max_tokens: request.max_tokens,
            sampling: request.sampling,
            text: String::new(),
            said: 0,
            over: false,
        }
    }

    async fn whole(mut self, events: &mut Events) -> Result<Value, Refusal> {
        let (text, done, _) = text_of(events).await?;
        self.text = text;
        Ok(self.response(Some(done)))
    }

    fn first(&mut self) -> String {
        let begun = self.response(None);
        let created = self.say("response.created", json!({ "response": begun }));
        let running = self.say("response.in_progress", json!({ "response": begun }));
        let (item, part) = (self.item("in_progress", &[]), part(""));
        let added = self.say("response.output_item.added", json!({ "output_index": 0, "item": item }));
        created
            + &running
            + &added
            + &self.say("response.content_part.added", self.at(json!({ "part": part })))
    }

    fn event(&mut self, _: usize, event: Event) -> Option<String> {
        if self.over {
            return None;
        }
        let refusal = match event {
            Event::Piece(text, _) => {
                self.text += &text;
                let delta = json!({ "delta": text, "logprobs": [] });
                return Some(self.say("response.output_text.delta", self.at(delta)));
            }
            Event::Done(done, _) => {
                self.over = true;
                return Some(self.last(done));
            }
            Event::Failed(message) => Refusal::new(500, message),
            Event::GivenUp => Refusal::ending(),
        };
        self.over = true;
        let error = json!({ "code": refusal.code, "message": refusal.message, "param": refusal.field });
        Some(self.say("error", error))
    }
}

impl Response {
    /// An event, with its number.
    fn say(&mut self, name: &str, mut data: Value) -> String {
        data["sequence_number"] = self.said.into();
        self.said += 1;
        named(name, data)
    }

    /// Something about the text, with where it is.
    fn at(&self, mut data: Value) -> Value {
        data["item_id"] = self.item_id().into();
        data["output_index"] = 0.into();
        data["content_index"] = 0.into();
        data
    }

    /// What a stream ends with.
    fn last(&mut self, done: Done) -> String {
        let (text, response) = (self.text.clone(), self.response(Some(done)));
        let (status, item) = (response["status"].clone(), response["output"][0].clone());
        let name = format!("response.{}", status.as_str().unwrap_or_default());
        let all = [
            ("response.output_text.done", self.at(json!({ "text": text, "logprobs": [] }))),
            ("response.content_part.done", self.at(json!({ "part": part(&text) }))),
            ("response.output_item.done", json!({ "output_index": 0, "item": item })),
            (name.as_str(), json!({ "response": response })),
        ];
        all.into_iter().map(|(name, data)| self.say(name, data)).collect()
    }

    fn item_id(&self) -> String {
        format!("msg_{:016x}", self.id)
    }

    fn item(&self, status: &str, content: &[Value]) -> Value {
        json!({ "id": self.item_id(), "type": "message", "status": status, "role": "assistant", "content": content })
    }

    /// The response; without `done` while it is being written.
    fn response(&self, done: Option<Done>) -> Value {
        let (status, why) = match done.map(|done| done.finish.is_cut()) {
            None => ("in_progress", Value::Null),
            Some(false) => ("completed", Value::Null),
            Some(true) => ("incomplete", json!({ "reason": "max_output_tokens" })),
        };
        let output: Vec<Value> = done.iter().map(|_| self.item(status, &[part(&self.text)])).collect();
        let usage = done.map(|Done { prompt, cached, tokens, .. }| {
            json!({
                "input_tokens": prompt, "input_tokens_details": { "cached_tokens": cached },
                "output_tokens": tokens, "output_tokens_details": { "reasoning_tokens": 0 },
                "total_tokens": prompt + tokens,
            })
        });
        json!({
            "id": format!("resp_{:016x}", self.id), "object": "response", "created_at": self.created,
            "status": status, "error": null, "incomplete_details": why, "model": self.model,
            "instructions": self.instructions, "output": output, "usage": usage,
            "max_output_tokens": self.max_tokens, "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p, "background": false, "metadata": {}, "parallel_tool_calls": false,
            "previous_response_id": null, "store": false, "text": { "format": { "type": "text" } },
            "tool_choice": "none", "tools": [], "truncation": "disabled",
        })
    }
}

/// The one part of the output.
fn part(text: &str) -> Value {
    json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": [] })
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
            "model": "m", "max_output_tokens": 9, "top_p": 0.5, "stream": true, "store": true,
            "instructions": "Be brief.", "text": { "format": { "type": "text" } }, "reasoning": null,
            "input": [
                { "role": "user", "content": "a" },
                { "id": "msg_1", "type": "message", "status": "completed", "role": "assistant",
                  "content": [{ "type": "output_text", "text": "A", "annotations": [] }] },
                { "role": "developer", "content": "now" },
                { "type": "message", "role": "user", "content": [{ "type": "input_text", "text": "b" }] },
            ],
        });
        let same = json!({
            "model": "m", "max_tokens": 9, "top_p": 0.5, "stream": true,
            "messages": [
                { "role": "system", "content": "Be brief." }, { "role": "user", "content": "a" },
                { "role": "assistant", "content": "A" }, { "role": "system", "content": "now" },
                { "role": "user", "content": "b" },
            ],
        });
        let want = Request::chat(same.to_string().as_bytes(), SampleConfig::default());
        let got = read_of(&body).expect("a good request");
        assert_eq!(got, want.expect("a good request"));
        assert_eq!(instruction(&got).as_deref(), Some("Be brief."));
    }

    #[test]
    fn what_is_not_served_is_refused_by_name() {
        let good = json!({ "input": "a" });
        assert!(read_of(&good).is_ok());
        for (field, value) in [
            ("input", Value::Null),
            ("input", json!([{ "type": "function_call_output", "call_id": "c", "output": "o" }])),
            ("input", json!([{ "role": "user", "content": [{ "type": "input_image", "image_url": "u" }] }])),
            ("max_output_tokens", json!(0)),
            ("tools", json!([{ "type": "web_search" }])),
            ("text", json!({ "format": { "type": "json_object" } })),
            ("reasoning", json!({ "effort": "high" })),
            ("previous_response_id", json!("resp_1")),
            ("conversation", json!("conv_1")),
            ("truncation", json!("auto")),
            ("background", json!(true)),
            ("top_logprobs", json!(2)),
            ("temperature", json!(-1)),
        ] {
            let mut body = good.clone();
            body[field] = value;
            let refusal = read_of(&body).expect_err(field);
            assert_eq!(refusal.field.as_deref(), Some(field), "{body}: {}", refusal.message);
            assert!(refusal.message.contains(field), "{}", refusal.message);
        }
    }
}
