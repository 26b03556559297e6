//! What requests say and what answers look like: the part of OpenAI's API that a model alone can
//! serve.
//!
//! Nothing is ignored that would change the text: a field that is unknown, or not served here with
//! the value it has, is refused by name.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use fracbit_engine::{Done, Finish};
use fracbit_io::Message;
use fracbit_model::SampleConfig;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

/// Most stop texts of a request.
const STOPS: usize = 16;
/// Most tokens that a request may name as ends.
const STOP_TOKENS: usize = 1024;
/// Tokens of a completion that says nothing of it, as in OpenAI's API.
const COMPLETION_TOKENS: usize = 16;
/// Fields that change nothing of a text.
const OF_NO_CONSEQUENCE: [&str; 9] = [
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
    "verbosity",
];

/// A request that cannot be served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) status: u16,
    pub(crate) message: String,
    pub(crate) field: Option<String>,
    pub(crate) code: Option<&'static str>,
}

impl Refusal {
    pub(crate) fn new(status: u16, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), field: None, code: None }
    }

    /// A field that is wrong.
    pub(crate) fn field(field: &str, rule: impl std::fmt::Display) -> Self {
        Self { field: Some(field.to_owned()), ..Self::new(400, format!("`{field}` {rule}")) }
    }

    pub(crate) fn coded(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }

    /// The body.
    pub(crate) fn json(&self) -> Value {
        let kind = match self.status {
            401 => "authentication_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        };
        json!({ "error": { "message": self.message, "type": kind, "param": self.field, "code": self.code } })
    }
}

/// The fields of a request that nobody has looked at yet.
struct Fields(Map<String, Value>);

impl Fields {
    fn parse(body: &[u8]) -> Result<Self, Refusal> {
        let fields = serde_json::from_slice(body);
        fields.map(Self).map_err(|e| Refusal::new(400, format!("the body should be a JSON object: {e}")))
    }

    /// A field; null is absent.
    fn take<T: DeserializeOwned>(&mut self, field: &str) -> Result<Option<T>, Refusal> {
        let value = self.0.shift_remove(field).filter(|value| !value.is_null());
        let value = value.map(serde_json::from_value).transpose();
        value.map_err(|e| Refusal::field(field, format_args!("has a value that it cannot have: {e}")))
    }

    /// A number within a range.
    fn number(&mut self, field: &str, or: f32) -> Result<f32, Refusal> {
        Ok(self.take(field)?.unwrap_or(or))
    }

    /// A field that is served with the values of `fine` only.
    fn only(&mut self, field: &str, fine: impl Fn(&Value) -> bool) -> Result<(), Refusal> {
        match self.take::<Value>(field)? {
            Some(value) if !fine(&value) => {
                Err(Refusal::field(field, "is not served by this server: leave it out"))
            }
            _ => Ok(()),
        }
    }

    /// Nothing should be left.
    fn end(mut self) -> Result<(), Refusal> {
        self.0.retain(|field, value| !value.is_null() && !OF_NO_CONSEQUENCE.contains(&field.as_str()));
        match self.0.keys().next() {
            Some(field) => Err(Refusal::field(field, "is not a field that this server knows: leave it out")),
            None => Ok(()),
        }
    }
}

/// What is to be continued.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
    Chat {
        messages: Vec<Message>,
        /// Variables of the template.
        variables: BTreeMap<String, Value>,
    },
}

/// A request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Request {
    pub(crate) model: Option<String>,
    pub(crate) prompt: Prompt,
    /// `None`: as many as there is room for.
    pub(crate) max_tokens: Option<usize>,
    pub(crate) sampling: SampleConfig,
    pub(crate) stops: Vec<String>,
    /// Tokens that end the text, beside the model's.
    pub(crate) stop_tokens: Vec<u32>,
    /// Special tokens are left out of the text.
    pub(crate) skip_special: bool,
    pub(crate) stream: bool,
    /// Count tokens at the end of a stream.
    pub(crate) usage: bool,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Stop {
    One(String),
    Many(Vec<String>),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
    #[serde(default, rename = "include_obfuscation")]
    _padding: bool,
}

/// One message; what it says may come in parts.
#[derive(Deserialize)]
struct Turn {
    role: String,
    content: Content,
    /// Clients send an answer back as they got it, with all that it does not have.
    #[serde(flatten)]
    rest: Map<String, Value>,
}

impl Turn {
    fn message(self) -> Result<Message, Refusal> {
        let empty = |v: &Value| v.is_null() || v.as_array().is_some_and(Vec::is_empty);
        if let Some((field, _)) = self.rest.iter().find(|(_, v)| !empty(v)) {
            let rule = format!("should have nothing but role and content, found `{field}`");
            return Err(Refusal::field("messages", rule));
        }
        let content = match self.content {
            Content::Text(text) => text,
            Content::Parts(parts) => parts.into_iter().map(|Part::Text { text }| text).collect(),
        };
        Ok(Message::new(self.role, content))
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Part {
    Text { text: String },
}

impl Request {
    /// Reads the body of `/v1/completions`; what it leaves out is as in `defaults`, with a seed of
    /// its own.
    pub(crate) fn completion(body: &[u8], defaults: SampleConfig) -> Result<Self, Refusal> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Given {
            Text(String),
            One([String; 1]),
            Tokens(Vec<u32>),
        }
        let mut fields = Fields::parse(body)?;
        let want =
            || Refusal::field("prompt", "should be a text, or a list of tokens: one prompt in a request");
        let prompt = fields.0.shift_remove("prompt").ok_or_else(want)?;
        let prompt = match serde_json::from_value(prompt).map_err(|_| want())? {
            Given::Text(text) | Given::One([text]) => Prompt::Text(text),
            Given::Tokens(tokens) => Prompt::Tokens(tokens),
        };
        let max_tokens = Some(count(&mut fields, "max_tokens")?.unwrap_or(COMPLETION_TOKENS));
        fields.only("echo", |v| v == &json!(false))?;
        fields.only("suffix", |v| v == &json!(""))?;
        fields.only("best_of", |v| v == &json!(1))?;
        fields.only("logprobs", |_| false)?;
        Self::rest(fields, prompt, max_tokens, defaults)
    }

    /// Reads the body of `/v1/chat/completions`; otherwise as [`Request::completion`].
    pub(crate) fn chat(body: &[u8], defaults: SampleConfig) -> Result<Self, Refusal> {
        let mut fields = Fields::parse(body)?;
        let turns: Vec<Turn> = fields.take("messages")?.unwrap_or_default();
        if turns.is_empty() {
            return Err(Refusal::field("messages", "should be a list of at least one message"));
        }
        let messages = turns.into_iter().map(Turn::message).collect::<Result<_, _>>()?;
        let variables = fields.take("chat_template_kwargs")?.unwrap_or_default();
        let (new, old) = (count(&mut fields, "max_completion_tokens")?, count(&mut fields, "max_tokens")?);
        let none = |v: &Value| v.as_array().is_some_and(Vec::is_empty);
        fields.only("tools", none)?;
        fields.only("functions", none)?;
        fields.only("tool_choice", |v| v == "none" || v == "auto")?;
        fields.only("function_call", |v| v == "none" || v == "auto")?;
        fields.only("response_format", |v| v == &json!({ "type": "text" }))?;
        fields.only("modalities", |v| v == &json!(["text"]))?;
        fields.only("logprobs", |v| v == &json!(false))?;
        fields.only("top_logprobs", |v| v == &json!(0))?;
        Self::rest(fields, Prompt::Chat { messages, variables }, new.or(old), defaults)
    }

    fn rest(
        mut fields: Fields,
        prompt: Prompt,
        max_tokens: Option<usize>,
        defaults: SampleConfig,
    ) -> Result<Self, Refusal> {
        fields.only("n", |v| v == &json!(1))?;
        fields.only("logit_bias", |v| v == &json!({}))?;
        fields.only("frequency_penalty", |v| v.as_f64() == Some(0.0))?;
        fields.only("presence_penalty", |v| v.as_f64() == Some(0.0))?;
        let stops = match fields.take("stop")? {
            None => Vec::new(),
            Some(Stop::One(stop)) => vec![stop],
            Some(Stop::Many(stops)) => stops,
        };
        if stops.len() > STOPS {
            return Err(Refusal::field("stop", format_args!("should be at most {STOPS} texts")));
        }
        let stop_tokens: Vec<u32> = fields.take("stop_token_ids")?.unwrap_or_default();
        if stop_tokens.len() > STOP_TOKENS {
            return Err(Refusal::field(
                "stop_token_ids",
                format_args!("should be at most {STOP_TOKENS} tokens"),
            ));
        }
        let seed = fields.take::<i64>("seed")?;
        let sampling = SampleConfig {
            temperature: fields.number("temperature", defaults.temperature)?,
            top_k: fields.take("top_k")?.unwrap_or(defaults.top_k),
            top_p: fields.number("top_p", defaults.top_p)?,
            min_p: fields.number("min_p", defaults.min_p)?,
            repetition_penalty: fields.number("repetition_penalty", defaults.repetition_penalty)?,
            seed: seed.map_or(defaults.seed, i64::cast_unsigned),
        };
        let options = fields.take::<StreamOptions>("stream_options")?;
        let request = Self {
            model: fields.take("model")?,
            prompt,
            max_tokens,
            sampling,
            stops,
            stop_tokens,
            skip_special: fields.take("skip_special_tokens")?.unwrap_or(true),
            stream: fields.take("stream")?.unwrap_or(false),
            usage: options.is_some_and(|o| o.include_usage),
        };
        fields.end()?;
        Ok(request)
    }
}

/// A number of tokens.
fn count(fields: &mut Fields, field: &str) -> Result<Option<usize>, Refusal> {
    match fields.take(field)? {
        Some(0) => Err(Refusal::field(field, "should be at least 1")),
        count => Ok(count),
    }
}

/// The answers to one request.
#[derive(Clone, Debug)]
pub(crate) struct Answers {
    chat: bool,
    usage: bool,
    id: String,
    created: u64,
    model: String,
}

impl Answers {
    pub(crate) fn new(request: &Request, id: u64, model: String) -> Self {
        let chat = matches!(request.prompt, Prompt::Chat { .. });
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        let id = format!("{}-{id:016x}", if chat { "chatcmpl" } else { "cmpl" });
        Self { chat, usage: request.usage, id, created, model }
    }

    fn object(&self, kind: &str, choices: Value) -> Value {
        let Self { id, created, model, .. } = self;
        json!({ "id": id, "object": kind, "created": created, "model": model, "choices": choices })
    }

    /// The answer in one piece.
    pub(crate) fn whole(&self, text: &str, done: Done) -> Value {
        let mut choice = if self.chat {
            json!({ "index": 0, "message": { "role": "assistant", "content": text } })
        } else {
            json!({ "index": 0, "text": text })
        };
        choice["logprobs"] = Value::Null;
        choice["finish_reason"] = reason(done.finish).into();
        let mut answer =
            self.object(if self.chat { "chat.completion" } else { "text_completion" }, json!([choice]));
        answer["usage"] = usage(done);
        answer
    }

    fn chunk(&self, choices: Value) -> String {
        let kind = if self.chat { "chat.completion.chunk" } else { "text_completion" };
        let mut chunk = self.object(kind, choices);
        if self.usage {
            chunk["usage"] = Value::Null;
        }
        event(&chunk)
    }

    fn choice(&self, delta: Value, text: &str, finish: Option<Finish>) -> String {
        let finish = finish.map(reason);
        self.chunk(if self.chat {
            json!([{ "index": 0, "delta": delta, "logprobs": null, "finish_reason": finish }])
        } else {
            json!([{ "index": 0, "text": text, "logprobs": null, "finish_reason": finish }])
        })
    }

    /// What a stream begins with.
    pub(crate) fn first(&self) -> String {
        if self.chat {
            self.choice(json!({ "role": "assistant", "content": "" }), "", None)
        } else {
            String::new()
        }
    }

    /// A piece of the text.
    pub(crate) fn piece(&self, text: &str) -> String {
        self.choice(json!({ "content": text }), text, None)
    }

    /// What a stream ends with.
    pub(crate) fn last(&self, done: Done) -> String {
        let mut all = self.choice(json!({}), "", Some(done.finish));
        if self.usage {
            let mut chunk =
                self.object(if self.chat { "chat.completion.chunk" } else { "text_completion" }, json!([]));
            chunk["usage"] = usage(done);
            all += &event(&chunk);
        }
        all + "data: [DONE]\n\n"
    }
}

/// An event of a stream.
pub(crate) fn event(value: &Value) -> String {
    format!("data: {value}\n\n")
}

fn reason(finish: Finish) -> &'static str {
    match finish {
        Finish::Stop => "stop",
        Finish::Length => "length",
    }
}

fn usage(done: Done) -> Value {
    json!({
        "prompt_tokens": done.prompt,
        "completion_tokens": done.tokens,
        "total_tokens": done.prompt + done.tokens,
        "prompt_tokens_details": { "cached_tokens": done.cached },
        "completion_tokens_details": { "accepted_prediction_tokens": done.guessed },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(chat: bool, body: &str) -> Result<Request, Refusal> {
        let defaults = SampleConfig { temperature: 0.8, seed: 7, ..SampleConfig::default() };
        if chat {
            Request::chat(body.as_bytes(), defaults)
        } else {
            Request::completion(body.as_bytes(), defaults)
        }
    }

    #[test]
    fn requests_are_read() {
        let short = read(false, r#"{"prompt": "a"}"#).unwrap();
        assert_eq!((&short.prompt, short.max_tokens), (&Prompt::Text("a".into()), Some(16)));
        assert_eq!((short.sampling.temperature, short.sampling.seed), (0.8, 7));
        assert!(!short.stream && !short.usage && short.stops.is_empty() && short.model.is_none());
        assert!(short.skip_special && short.stop_tokens.is_empty());
        let ends = read(false, r#"{"prompt": "a", "stop_token_ids": [3, 4], "skip_special_tokens": false}"#)
            .unwrap();
        assert_eq!((ends.stop_tokens, ends.skip_special), (vec![3, 4], false));
        assert_eq!(read(false, r#"{"prompt": ["a"]}"#).unwrap().prompt, short.prompt);
        assert_eq!(read(false, r#"{"prompt": [1, 2]}"#).unwrap().prompt, Prompt::Tokens(vec![1, 2]));
        let long = read(
            true,
            r#"{"model": "m", "messages": [
                {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": "c", "refusal": null, "annotations": []}],
                "max_completion_tokens": 5, "max_tokens": 6, "temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1,
                "repetition_penalty": 1.5, "seed": -1, "stop": "x", "stream": true, "stream_options": {"include_usage": true},
                "n": 1, "tools": [], "tool_choice": "auto", "logit_bias": {}, "presence_penalty": 0, "user": "u",
                "logprobs": false, "response_format": {"type": "text"}, "chat_template_kwargs": {"enable_thinking": false}}"#,
        )
        .unwrap();
        let messages = vec![Message::new("system", "ab"), Message::new("assistant", "c")];
        let variables = BTreeMap::from([("enable_thinking".to_owned(), json!(false))]);
        assert_eq!(long.prompt, Prompt::Chat { messages, variables });
        assert_eq!(
            (long.max_tokens, long.stops, long.model.as_deref()),
            (Some(5), vec!["x".into()], Some("m"))
        );
        assert!(long.stream && long.usage);
        let sampling = SampleConfig {
            temperature: 0.0,
            top_k: 3,
            top_p: 0.5,
            min_p: 0.1,
            repetition_penalty: 1.5,
            seed: u64::MAX,
        };
        assert_eq!(long.sampling, sampling);
        let old = read(
            true,
            r#"{"messages": [{"role": "user", "content": "a"}], "max_tokens": 6, "stop": ["x", "y"]}"#,
        );
        let old = old.unwrap();
        assert_eq!((old.max_tokens, old.stops.len()), (Some(6), 2));
    }

    #[test]
    fn what_is_not_served_is_refused_by_name() {
        let bodies = [
            (false, "", ""),
            (false, "[]", ""),
            (false, "{}", "prompt"),
            (false, r#"{"prompt": 3}"#, "prompt"),
            (false, r#"{"prompt": ["a", "b"]}"#, "prompt"),
            (false, r#"{"prompt": "a", "max_tokens": 0}"#, "max_tokens"),
            (false, r#"{"prompt": "a", "max_tokens": -1}"#, "max_tokens"),
            (false, r#"{"prompt": "a", "max_completion_tokens": 1}"#, "max_completion_tokens"),
            (false, r#"{"prompt": "a", "echo": true}"#, "echo"),
            (false, r#"{"prompt": "a", "suffix": "b"}"#, "suffix"),
            (false, r#"{"prompt": "a", "logprobs": 0}"#, "logprobs"),
            (false, r#"{"prompt": "a", "n": 2}"#, "n"),
            (false, r#"{"prompt": "a", "temprature": 1}"#, "temprature"),
            (false, r#"{"prompt": "a", "temperature": "hot"}"#, "temperature"),
            (false, r#"{"prompt": "a", "frequency_penalty": 0.5}"#, "frequency_penalty"),
            (false, r#"{"prompt": "a", "logit_bias": {"3": 1}}"#, "logit_bias"),
            (false, r#"{"prompt": "a", "stream_options": {"speed": 1}}"#, "stream_options"),
            (true, "{}", "messages"),
            (true, r#"{"messages": []}"#, "messages"),
            (true, r#"{"messages": [{"role": "user"}]}"#, "messages"),
            (true, r#"{"messages": [{"role": "user", "content": "a", "name": "b"}]}"#, "messages"),
            (true, r#"{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}"#, "messages"),
            (true, r#"{"messages": [{"role": "user", "content": "a"}], "tools": [{}]}"#, "tools"),
            (true, r#"{"messages": [{"role": "user", "content": "a"}], "logprobs": true}"#, "logprobs"),
            (
                true,
                r#"{"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_object"}}"#,
                "response_format",
            ),
            (true, r#"{"messages": [{"role": "user", "content": "a"}], "prompt": "b"}"#, "prompt"),
        ];
        for (chat, body, field) in bodies {
            let refusal = read(chat, body).expect_err(body);
            assert_eq!(
                (refusal.status, refusal.field.as_deref().unwrap_or_default()),
                (400, field),
                "{body}"
            );
            assert!(refusal.message.contains(field), "{}", refusal.message);
            assert_eq!(refusal.json()["error"]["type"], "invalid_request_error");
        }
        let many = format!(r#"{{"prompt": "a", "stop": {:?}}}"#, vec!["x"; STOPS + 1]);
        assert_eq!(read(false, &many).unwrap_err().field.as_deref(), Some("stop"));
    }
}
