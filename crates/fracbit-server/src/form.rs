//! What requests and answers look like to one kind of client. Behind all of them is the same
//! [`Request`].

use std::future::Future;
use std::sync::Arc;

use axum::response::{IntoResponse, Response};
use fracbit_engine::Done;
use fracbit_io::Tokenizer;
use serde_json::{Map, Value, json};
use tokio::sync::mpsc::UnboundedReceiver;

use crate::engine::Event;
use crate::fields::{Fields, Refusal};
use crate::request::Request;
use crate::tools::{Calls, Format, Spoken, rest_of, said_of};

/// The texts of a request, as they come: which, and what of it.
pub(crate) type Events = UnboundedReceiver<(usize, Event)>;

/// What an answer needs to know beside the request.
pub(crate) struct Answering {
    /// Texts that come.
    pub(crate) texts: usize,
    /// Tokens of the prompts.
    pub(crate) prompt: usize,
    /// The number of the answer.
    pub(crate) id: u64,
    /// The model's name, as the request called it.
    pub(crate) model: String,
    pub(crate) tokenizer: Arc<Tokenizer>,
    /// How the model calls functions.
    pub(crate) format: Format,
}

/// How answers are written for one kind of client.
pub(crate) trait Form: Send + Sized + 'static {
    /// An answer to a request.
    fn new(request: &Request, answering: Answering) -> Self;

    /// The answer in one piece, from all that comes.
    fn whole(self, events: &mut Events) -> impl Future<Output = Result<Value, Refusal>> + Send;

    /// What a stream begins with.
    fn first(&mut self) -> String;

    /// What a stream says of an event; `None` behind its end.
    fn event(&mut self, at: usize, event: Event) -> Option<String>;

    /// How a refusal is told.
    fn refused(refusal: Refusal) -> Response {
        refusal.into_response()
    }
}

/// An event of a stream with its name, which is also the type of its data.
pub(crate) fn named(name: &str, mut data: Value) -> String {
    data["type"] = name.into();
    format!("event: {name}\ndata: {data}\n\n")
}

/// The one text of a request, with its calls: all of it, its counts and the stop text that ended
/// it.
pub(crate) async fn text_of(
    events: &mut Events,
    calls: &mut Option<Calls>,
) -> Result<(Spoken, Done, Option<String>), Refusal> {
    let mut spoken = Spoken::default();
    loop {
        match events.recv().await {
            Some((_, Event::Piece(piece, _))) => spoken.add(said_of(calls, piece)),
            Some((_, Event::Done(done, stop))) => {
                spoken.add(rest_of(calls));
                return Ok((spoken, done, stop));
            }
            Some((_, Event::Failed(message))) => return Err(Refusal::new(500, message)),
            Some((_, Event::GivenUp)) | None => return Err(Refusal::ending()),
        }
    }
}

/// The messages of a conversation in the form of `/v1/chat/completions`.
pub(crate) struct Turns {
    /// The field that they come from.
    field: &'static str,
    all: Vec<Value>,
}

impl Turns {
    /// Begins with an instruction, if there is one.
    pub(crate) fn new(field: &'static str, system: Option<String>) -> Self {
        let all = system.map(|text| json!({ "role": "system", "content": text })).into_iter().collect();
        Self { field, all }
    }

    /// One more. Nothing of it should be left over.
    pub(crate) fn push(
        &mut self,
        role: &str,
        content: String,
        rest: &Map<String, Value>,
    ) -> Result<(), Refusal> {
        if let Some((name, _)) = rest.iter().find(|(_, value)| !value.is_null()) {
            return Err(Refusal::field(
                self.field,
                format_args!("should have no `{name}`: it is not served"),
            ));
        }
        self.all.push(json!({ "role": role, "content": content }));
        Ok(())
    }

    /// A call in an answer of the model: part of the message before, if that is one of its own.
    pub(crate) fn push_call(&mut self, id: &str, name: &str, arguments: &str) {
        let call = json!({
            "id": id, "type": "function", "function": { "name": name, "arguments": arguments },
        });
        if self.all.last().is_none_or(|last| last["role"] != "assistant") {
            self.all.push(json!({ "role": "assistant", "content": null }));
        }
        let last = self.all.last_mut().expect("one was pushed");
        match last["tool_calls"].as_array_mut() {
            Some(calls) => calls.push(call),
            None => last["tool_calls"] = json!([call]),
        }
    }

    /// What came of a call.
    pub(crate) fn push_result(&mut self, id: &str, content: &str) {
        self.all.push(json!({ "role": "tool", "tool_call_id": id, "content": content }));
    }

    /// The list, which should end with what is to be answered.
    pub(crate) fn end(self) -> Result<Value, Refusal> {
        match self.all.last() {
            Some(last) if last["role"] == "user" || last["role"] == "tool" => Ok(Value::Array(self.all)),
            _ => Err(Refusal::field(self.field, "should end with a message of the user")),
        }
    }
}

/// The functions of a request, `[{"name", "description", schema}]`, as those of chat completions;
/// what else a function has should be in `known`.
pub(crate) fn functions(
    fields: &mut Fields,
    schema: &str,
    known: &[(&str, Option<&str>)],
) -> Result<Option<Value>, Refusal> {
    let want = "a list of functions, each with a name";
    let Some(all) = fields.take::<Vec<Map<String, Value>>>("tools", want)? else { return Ok(None) };
    let mut functions = Vec::new();
    for (i, mut tool) in all.into_iter().enumerate() {
        let bad = |rule: &str| Refusal::field("tools", format_args!("[{i}] {rule}"));
        for (name, only) in known {
            let value = tool.shift_remove(*name).unwrap_or_default();
            let right = only.is_none_or(|only| value == only) || value.is_null();
            if !right {
                return Err(bad(&format!("should have no `{name}` of {value}: it is not served")));
            }
        }
        let mut take = |name: &str| tool.shift_remove(name).filter(|value| !value.is_null());
        let mut function = Map::new();
        for (from, to) in [("name", "name"), ("description", "description"), (schema, "parameters")] {
            function.extend(take(from).map(|value| (to.to_owned(), value)));
        }
        if let Some((name, _)) = tool.iter().find(|(_, value)| !value.is_null()) {
            return Err(bad(&format!("should have no `{name}`: it is not served")));
        }
        functions.push(json!({ "type": "function", "function": function }));
    }
    Ok(Some(Value::Array(functions)))
}

/// A name of a call without what a form puts before it.
pub(crate) fn plain_id<'a>(id: &'a str, prefix: &str) -> &'a str {
    id.strip_prefix(prefix).unwrap_or(id)
}

/// The text of a content: a text, or a list of parts of these types, each with a text.
pub(crate) fn text_in(content: Value, field: &str, types: &[&str]) -> Result<String, Refusal> {
    let want = || {
        Refusal::field(field, format_args!("should be a text or parts of type `{}`", types.join("` or `")))
    };
    match content {
        Value::String(text) => Ok(text),
        Value::Array(parts) => parts
            .iter()
            .map(|part| match (part["type"].as_str(), part["text"].as_str()) {
                (Some(kind), Some(text)) if types.contains(&kind) => Ok(text),
                _ => Err(want()),
            })
            .collect(),
        _ => Err(want()),
    }
}

/// Moves fields that have the same meaning into a request of `/v1/chat/completions`, under the
/// names that they have there.
pub(crate) fn moved(fields: &mut Fields, names: &[(&str, &str)], chat: &mut Map<String, Value>) {
    for (name, there) in names {
        if let Some(value) = fields.value(name) {
            chat.insert((*there).to_owned(), value);
        }
    }
}

/// A refusal with the name that a field has in the request, not in that of chat completions.
pub(crate) fn renamed(mut refusal: Refusal, names: &[(&str, &str)]) -> Refusal {
    let field = refusal.field.as_deref();
    if let Some((name, there)) = names.iter().find(|(_, there)| Some(*there) == field) {
        refusal.message = refusal.message.replace(&format!("`{there}`"), &format!("`{name}`"));
        refusal.field = Some((*name).to_owned());
    }
    refusal
}
