//! `/v1/responses`, in the form of OpenAI's API: texts and calls of functions. Nothing is kept
//! between requests.

use std::time::{SystemTime, UNIX_EPOCH};

use fracbit_engine::Done;
use fracbit_model::SampleConfig;
use serde_json::{Map, Value, json};

use crate::engine::Event;
use crate::fields::{Fields, Refusal, number};
use crate::form::{
    Answering, Events, Form, Turns, functions, moved, named, plain_id, renamed, text_in, text_of,
};
use crate::request::{EFFORT, Prompt, Request};
use crate::tools::{Calls, Part, Said, call_id, calls_of, rest_of, said_of};

/// Fields with the names that they have in chat completions.
const SAME: [(&str, &str); 5] = [
    ("model", "model"),
    ("max_output_tokens", "max_tokens"),
    ("temperature", "temperature"),
    ("top_p", "top_p"),
    ("stream", "stream"),
];

/// Fields that an answer repeats.
const REPEATED: [&str; 13] = [
    "instructions",
    "max_output_tokens",
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "reasoning",
    "safety_identifier",
    "temperature",
    "text",
    "tool_choice",
    "tools",
    "top_p",
    "user",
];

/// Reads a request.
pub(crate) fn read(body: &[u8], defaults: SampleConfig) -> Result<Request, Refusal> {
    let mut fields = Fields::parse(body)?;
    let asked = fields.copies(&REPEATED);
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
    tools(&mut fields, &mut chat)?;
    fields.only("include", |v| v.as_array().is_some_and(Vec::is_empty))?;
    fields.only("truncation", |v| v == "disabled")?;
    fields.only("background", |v| v == false)?;
    chat.extend(effort(&mut fields)?.map(|effort| (EFFORT.to_owned(), effort)));
    chat.extend(structure(&mut fields)?.map(|format| ("response_format".to_owned(), format)));
    fields.only("stream_options", |v| {
        v.as_object().is_some_and(|options| options.keys().all(|name| name == "include_obfuscation"))
    })?;
    fields.end()?;
    let body = Value::Object(chat).to_string();
    let names =
        [SAME.as_slice(), &[("text", "response_format"), ("input", "messages"), ("reasoning", EFFORT)]]
            .concat();
    let mut request = Request::chat(body.as_bytes(), defaults).map_err(|refusal| renamed(refusal, &names))?;
    for prompt in &mut request.prompts {
        if let Prompt::Chat { effort: Some(field), .. } = prompt {
            *field = "reasoning";
        }
    }
    Ok(Request { asked, ..request })
}

/// Functions, and what is to be done with them.
fn tools(fields: &mut Fields, chat: &mut Map<String, Value>) -> Result<(), Refusal> {
    let known = [("type", Some("function")), ("strict", None)];
    chat.extend(functions(fields, "parameters", &known)?.map(|all| ("tools".to_owned(), all)));
    moved(fields, &[("parallel_tool_calls", "parallel_tool_calls")], chat);
    let same = fields.value("tool_choice").map(|choice| match (choice["type"].as_str(), &choice["name"]) {
        (Some("function"), Value::String(name)) => {
            json!({ "type": "function", "function": { "name": name } })
        }
        _ => choice,
    });
    chat.extend(same.map(|choice| ("tool_choice".to_owned(), choice)));
    Ok(())
}

/// What `reasoning` says of how long the model should think. What it thinks is a part of its text,
/// so that nothing can sum it up.
fn effort(fields: &mut Fields) -> Result<Option<Value>, Refusal> {
    let Some(mut said) = fields.take::<Map<String, Value>>("reasoning", "an object with an `effort`")? else {
        return Ok(None);
    };
    let effort = said.shift_remove("effort").filter(|effort| !effort.is_null());
    match said.iter().find(|(_, value)| !value.is_null()) {
        Some((name, _)) => Err(Refusal::field("reasoning", format_args!("should have no `{name}`"))),
        None => Ok(effort),
    }
}

/// What `text` says of the form of the answer, as `response_format`.
fn structure(fields: &mut Fields) -> Result<Option<Value>, Refusal> {
    let want = "an object with a `format`";
    let Some(mut text) = fields.take::<Map<String, Value>>("text", want)? else { return Ok(None) };
    let (format, verbosity) = (text.shift_remove("format"), text.shift_remove("verbosity"));
    // How long answers should be is nothing that a model here was trained for.
    let other = verbosity.filter(|wanted| !(wanted.is_null() || wanted == "medium"));
    if let Some(name) = text.keys().map(String::as_str).chain(other.iter().map(|_| "verbosity")).next() {
        return Err(Refusal::field("text", format_args!("should have no `{name}`")));
    }
    Ok(format.filter(|format| !format.is_null()).map(|mut format| {
        if format["type"] != "json_schema" {
            return format;
        }
        // Its name and schema lie one level higher here.
        let mut schema = format.as_object_mut().map(std::mem::take).unwrap_or_default();
        schema.shift_remove("type");
        json!({ "type": "json_schema", "json_schema": schema })
    }))
}

/// What stands before the name of a call.
const PREFIX: &str = "call_";

/// One item of `input`: a message, perhaps one that this server gave as output, a call that it
/// made, or what came of it.
fn push(turns: &mut Turns, item: Value) -> Result<(), Refusal> {
    let word = |name: &str| {
        let bad = || Refusal::field("input", format_args!("should have a text as `{name}` in calls"));
        item[name].as_str().ok_or_else(bad)
    };
    match item["type"].as_str() {
        Some("function_call") => {
            turns.push_call(plain_id(word("call_id")?, PREFIX), word("name")?, word("arguments")?);
            return Ok(());
        }
        Some("function_call_output") => {
            let text = text_in(item["output"].clone(), "input", &["input_text", "output_text", "text"])?;
            turns.push_result(plain_id(word("call_id")?, PREFIX), &text);
            return Ok(());
        }
        _ => {}
    }
    let want = "should have messages, each with a role and a content";
    let Value::Object(mut item) = item else { return Err(Refusal::field("input", want)) };
    let mut take = |name: &str| item.shift_remove(name).unwrap_or_default();
    let (kind, role, content) = (take("type"), take("role"), take("content"));
    // What an output has beside.
    drop([take("id"), take("status")]);
    if !(kind.is_null() || kind == "message") {
        return Err(Refusal::field("input", want));
    }
    let role = match role.as_str() {
        Some(role @ ("user" | "assistant" | "system" | "developer")) => role,
        _ => return Err(Refusal::field("input", want)),
    };
    turns.push(role, text_in(content, "input", &["input_text", "output_text", "text"])?, &item)
}

/// A response.
pub(crate) struct Response {
    id: u64,
    model: String,
    created: u64,
    /// What it repeats of the request, with what holds where that said nothing.
    asked: Map<String, Value>,
    calls: Option<Calls>,
    /// What the output has so far; the last one may go on.
    items: Vec<Part>,
    /// Whether the last one does.
    open: bool,
    /// Events said so far.
    said: usize,
    over: bool,
}

impl Form for Response {
    fn new(request: &Request, Answering { id, model, format, .. }: Answering) -> Self {
        Self {
            id,
            model,
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
            asked: repeated(request),
            calls: calls_of(request, format),
            items: Vec::new(),
            open: false,
            said: 0,
            over: false,
        }
    }

    async fn whole(mut self, events: &mut Events) -> Result<Value, Refusal> {
        let (spoken, done, _) = text_of(events, &mut self.calls).await?;
        self.items = spoken.parts();
        Ok(self.response(Some(done)))
    }

    fn first(&mut self) -> String {
        let begun = self.response(None);
        let created = self.say("response.created", json!({ "response": begun }));
        created + &self.say("response.in_progress", json!({ "response": begun }))
    }

    fn event(&mut self, _: usize, event: Event) -> Option<String> {
        if self.over {
            return None;
        }
        let refusal = match event {
            Event::Piece(text, _) => {
                let said = said_of(&mut self.calls, text);
                return Some(self.tell(said));
            }
            Event::Done(done, _) => {
                self.over = true;
                let said = rest_of(&mut self.calls);
                return Some(self.tell(said) + &self.last(done));
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

    /// What a stream says of a piece.
    fn tell(&mut self, said: Vec<Said>) -> String {
        let mut all = String::new();
        for said in said {
            all += &match said {
                Said::Text(text) | Said::Broken { rest: text, .. } if text.is_empty() => continue,
                Said::Text(text) | Said::Broken { rest: text, .. } => self.text(&text),
                Said::Call(name) => self.begin(Part::Call(name, String::new())),
                Said::Arguments(piece) => {
                    if let Some(Part::Call(_, arguments)) = self.items.last_mut() {
                        *arguments += &piece;
                    }
                    let delta = self.at(json!({ "delta": piece }));
                    self.say("response.function_call_arguments.delta", delta)
                }
            };
        }
        all
    }

    fn text(&mut self, text: &str) -> String {
        let goes_on = self.open && matches!(self.items.last(), Some(Part::Text(_)));
        let begun = if goes_on { String::new() } else { self.begin(Part::Text(String::new())) };
        if let Some(Part::Text(all)) = self.items.last_mut() {
            *all += text;
        }
        let mut delta = self.at(json!({ "delta": text, "logprobs": [] }));
        delta["content_index"] = 0.into();
        begun + &self.say("response.output_text.delta", delta)
    }

    /// Begins an item behind the one that is open.
    fn begin(&mut self, item: Part) -> String {
        let closed = self.close("completed");
        let is_text = matches!(item, Part::Text(_));
        self.items.push(item);
        self.open = true;
        let at = self.items.len() - 1;
        let mut shown = self.item(at, "in_progress");
        if is_text {
            shown["content"] = json!([]);
        }
        let added = self.say("response.output_item.added", json!({ "output_index": at, "item": shown }));
        if !is_text {
            return closed + &added;
        }
        let mut begun = self.at(json!({ "part": part("") }));
        begun["content_index"] = 0.into();
        closed + &added + &self.say("response.content_part.added", begun)
    }

    /// Ends the item that is open.
    fn close(&mut self, status: &str) -> String {
        if !std::mem::replace(&mut self.open, false) {
            return String::new();
        }
        let at = self.items.len() - 1;
        let mut all = String::new();
        match self.items[at].clone() {
            Part::Text(text) => {
                for (name, data) in [
                    ("response.output_text.done", json!({ "text": text, "logprobs": [] })),
                    ("response.content_part.done", json!({ "part": part(&text) })),
                ] {
                    let mut data = self.at(data);
                    data["content_index"] = 0.into();
                    all += &self.say(name, data);
                }
            }
            Part::Call(name, arguments) => {
                let data = self.at(json!({ "name": name, "arguments": arguments }));
                all += &self.say("response.function_call_arguments.done", data);
            }
        }
        let item = self.item(at, status);
        all + &self.say("response.output_item.done", json!({ "output_index": at, "item": item }))
    }

    /// Something about the last item, with where it is.
    fn at(&self, mut data: Value) -> Value {
        let at = self.items.len() - 1;
        data["item_id"] = self.item(at, "")["id"].take();
        data["output_index"] = at.into();
        data
    }

    /// What a stream ends with.
    fn last(&mut self, done: Done) -> String {
        let mut all = String::new();
        if self.items.is_empty() {
            all += &self.begin(Part::Text(String::new()));
        }
        let status = if done.finish.is_cut() { "incomplete" } else { "completed" };
        all += &self.close(status);
        let response = self.response(Some(done));
        all + &self.say(&format!("response.{status}"), json!({ "response": response }))
    }

    fn item(&self, at: usize, status: &str) -> Value {
        match &self.items[at] {
            Part::Text(text) => json!({
                "id": format!("msg_{:016x}_{at}", self.id), "type": "message", "status": status,
                "role": "assistant", "content": [part(text)],
            }),
            Part::Call(name, arguments) => json!({
                "id": format!("fc_{:016x}_{at}", self.id), "type": "function_call", "status": status,
                "call_id": format!("{PREFIX}{}", call_id(self.id, 0, at)), "name": name, "arguments": arguments,
            }),
        }
    }

    /// The response; without `done` while it is being written.
    fn response(&self, done: Option<Done>) -> Value {
        let (status, why) = match done.map(|done| done.finish.is_cut()) {
            None => ("in_progress", Value::Null),
            Some(false) => ("completed", Value::Null),
            Some(true) => ("incomplete", json!({ "reason": "max_output_tokens" })),
        };
        // Only the last item can be cut.
        let last = self.items.len().saturating_sub(1);
        let of = |at: usize| self.item(at, if at == last { status } else { "completed" });
        let output: Vec<Value> = done.iter().flat_map(|_| (0..self.items.len()).map(of)).collect();
        let usage = done.map(|Done { prompt, cached, tokens, .. }| {
            json!({
                "input_tokens": prompt, "input_tokens_details": { "cached_tokens": cached },
                "output_tokens": tokens, "output_tokens_details": { "reasoning_tokens": 0 },
                "total_tokens": prompt + tokens,
            })
        });
        let mut response = json!({
            "id": format!("resp_{:016x}", self.id), "object": "response", "created_at": self.created,
            "status": status, "error": null, "incomplete_details": why, "model": self.model,
            "output": output, "usage": usage, "background": false, "previous_response_id": null,
            "store": false, "top_logprobs": 0,
            "truncation": "disabled",
        });
        if let Some(response) = response.as_object_mut() {
            response.extend(self.asked.clone());
        }
        response
    }
}

/// What an answer repeats of its request, with what holds where that said nothing.
fn repeated(request: &Request) -> Map<String, Value> {
    let asked = &request.asked;
    let mut all = Map::new();
    for (field, default) in [
        ("instructions", Value::Null),
        ("max_output_tokens", Value::Null),
        ("metadata", json!({})),
        ("parallel_tool_calls", true.into()),
        ("prompt_cache_key", Value::Null),
        ("safety_identifier", Value::Null),
        ("temperature", number(request.sampling.temperature)),
        ("tool_choice", "auto".into()),
        ("tools", json!([])),
        ("top_p", number(request.sampling.top_p)),
        ("user", Value::Null),
    ] {
        all.insert(field.to_owned(), asked.get(field).cloned().unwrap_or(default));
    }
    let format = asked.get("text").and_then(|text| text.get("format")).filter(|format| !format.is_null());
    let format = format.cloned().unwrap_or_else(|| json!({ "type": "text" }));
    let effort = asked.get("reasoning").map(|reasoning| &reasoning["effort"]);
    all.insert("reasoning".to_owned(), json!({ "effort": effort, "summary": null }));
    all.insert("text".to_owned(), json!({ "format": format, "verbosity": "medium" }));
    all
}

/// The one part of a text.
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
            "instructions": "Be brief.", "text": { "format": { "type": "text" } }, "reasoning": { "effort": "low" },
            "input": [
                { "role": "user", "content": "a" },
                { "id": "msg_1", "type": "message", "status": "completed", "role": "assistant",
                  "content": [{ "type": "output_text", "text": "A", "annotations": [] }] },
                { "role": "developer", "content": "now" },
                { "type": "message", "role": "user", "content": [{ "type": "input_text", "text": "b" }] },
            ],
        });
        let same = json!({
            "model": "m", "max_tokens": 9, "top_p": 0.5, "stream": true, "reasoning_effort": "low",
            "messages": [
                { "role": "system", "content": "Be brief." }, { "role": "user", "content": "a" },
                { "role": "assistant", "content": "A" }, { "role": "developer", "content": "now" },
                { "role": "user", "content": "b" },
            ],
        });
        let want = Request::chat(same.to_string().as_bytes(), SampleConfig::default());
        let mut want = want.expect("a good request");
        // A refusal calls it by the name that it has here.
        if let [Prompt::Chat { effort, .. }] = &mut want.prompts[..] {
            assert_eq!(effort.replace("reasoning"), Some(EFFORT));
        }
        let got = read_of(&body).expect("a good request");
        assert_eq!(Request { asked: Map::new(), ..got }, want);
    }

    #[test]
    fn an_answer_repeats_what_was_asked() {
        let tool =
            json!({ "type": "function", "name": "f", "strict": true, "parameters": { "type": "object" } });
        let asked = json!({
            "instructions": "Be brief.", "max_output_tokens": 9, "metadata": { "a": "b" },
            "parallel_tool_calls": false, "prompt_cache_key": "k", "safety_identifier": "s",
            "reasoning": { "effort": "low", "summary": null },
            "temperature": 0.7, "tool_choice": { "type": "function", "name": "f" }, "tools": [tool],
            "top_p": 0.9, "user": "u",
        });
        let mut body = asked.clone();
        body["input"] = "a".into();
        let mut got = repeated(&read_of(&body).expect("a good request"));
        let text = got.shift_remove("text").expect("a form");
        assert_eq!(text, json!({ "format": { "type": "text" }, "verbosity": "medium" }));
        assert_eq!(Value::Object(got), asked);
        // The form of a text, which is none beside functions.
        let format = json!({ "type": "json_schema", "name": "n", "schema": { "type": "integer" } });
        let body = json!({ "input": [{ "role": "system", "content": "s" }, { "role": "user", "content": "a" }],
            "text": { "format": format } });
        let defaults = SampleConfig { temperature: 0.8, ..SampleConfig::default() };
        let got = repeated(&read(body.to_string().as_bytes(), defaults).expect("a good request"));
        assert_eq!(got["text"]["format"], format);
        assert_eq!((&got["temperature"], &got["tools"]), (&json!(0.8), &json!([])));
        // What the input has as a system's message is none of the instructions.
        assert_eq!((&got["instructions"], &got["tool_choice"]), (&Value::Null, &json!("auto")));
    }

    #[test]
    fn what_is_not_served_is_refused_by_name() {
        let good = json!({ "input": "a" });
        assert!(read_of(&good).is_ok());
        for (field, value) in [
            ("input", Value::Null),
            ("input", json!([{ "type": "function_call_output", "output": "o" }])),
            ("input", json!([{ "type": "function_call", "call_id": "c", "name": "f", "arguments": {} }])),
            ("input", json!([{ "type": "reasoning", "summary": [] }])),
            ("tools", json!([{ "type": "function", "function": { "name": "f" } }])),
            ("tool_choice", json!("required")),
            ("input", json!([{ "role": "user", "content": [{ "type": "input_image", "image_url": "u" }] }])),
            ("max_output_tokens", json!(0)),
            ("tools", json!([{ "type": "web_search" }])),
            ("text", json!({ "size": 3 })),
            ("text", json!({ "verbosity": "low" })),
            ("text", json!({ "format": { "type": "xml" } })),
            ("reasoning", json!({ "effort": "high", "summary": "auto" })),
            ("reasoning", json!({ "effort": 3 })),
            ("reasoning", json!("high")),
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
