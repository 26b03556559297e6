//! What requests say: the part of OpenAI's API that a model alone can serve, and what other servers
//! have beside it.
//!
//! Nothing is ignored that would change the text: a field that is unknown, or not served here with
//! the value it has, is refused by name.

use std::collections::BTreeMap;

use fracbit_io::{Ending, Message};
use fracbit_model::{Adjustments, DRY_BREAKERS, Error, SampleConfig, Sampler};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::fields::{Fields, Refusal, shown};
use crate::structure::{Structure, structure};
use crate::tools::{Tools, tools};

/// Most texts of a request: prompts times `n`, or times `best_of`.
pub(crate) const CHOICES: usize = 128;
/// Most stop texts of a request.
const STOPS: usize = 16;
/// Most bytes of one.
const STOP_BYTES: usize = 1024;
/// Most tokens that a request may name as ends, or give a bias.
const TOKENS: usize = 1024;
/// Most tokens that a request may have beside each token of its text.
const TOP: usize = 20;
/// What mirostat aims at where a request does not say it, as in llama.cpp's server.
const TAU: f32 = 5.0;
/// How long a model should think, as a field and as a variable of templates.
pub(crate) const EFFORT: &str = "reasoning_effort";
/// Tokens of a completion that says nothing of it, as in OpenAI's API.
const COMPLETION_TOKENS: usize = 16;

/// What is to be continued.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
    Chat {
        messages: Vec<Message>,
        /// Variables of the template.
        variables: BTreeMap<String, Value>,
        /// Functions that may be called, as the template gets them.
        tools: Vec<Value>,
        ending: Ending,
        /// The field that asks for an effort, which the template has to know.
        effort: Option<&'static str>,
    },
}

/// A request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Request {
    pub(crate) model: Option<String>,
    /// At least one.
    pub(crate) prompts: Vec<Prompt>,
    /// Texts for each of them.
    pub(crate) n: usize,
    /// Texts that are written for each of them, with seeds that follow each other: at least `n`, of
    /// which the likeliest are told.
    pub(crate) best_of: usize,
    /// `None`: as many as there is room for.
    pub(crate) max_tokens: Option<usize>,
    pub(crate) sampling: SampleConfig,
    /// Without the prompt and the ends of the text, which only the server knows.
    pub(crate) adjustments: Adjustments,
    /// Texts that no repetition goes across, for DRY.
    pub(crate) breakers: Vec<String>,
    /// What the text should be.
    pub(crate) structure: Option<Structure>,
    /// What the text may call.
    pub(crate) tools: Option<Tools>,
    pub(crate) stops: Vec<String>,
    /// Tokens that end the text, beside the model's.
    pub(crate) stop_tokens: Vec<u32>,
    /// The model's own end tokens end nothing.
    pub(crate) ignore_eos: bool,
    /// Special tokens are left out of the text.
    pub(crate) skip_special: bool,
    /// The text begins with its prompt.
    pub(crate) echo: bool,
    /// Logarithms of probabilities, of each token and of so many likeliest ones beside it.
    pub(crate) logprobs: Option<usize>,
    pub(crate) stream: bool,
    /// Count tokens at the end of a stream.
    pub(crate) usage: bool,
    /// Fields as they came, of those that an answer of the request's form repeats.
    pub(crate) asked: Map<String, Value>,
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

/// One message; what it says may come in parts, or be calls alone.
#[derive(Deserialize)]
struct Turn {
    role: String,
    content: Option<Content>,
    #[serde(default)]
    tool_calls: Option<Vec<Call>>,
    tool_call_id: Option<String>,
    name: Option<String>,
    /// Clients send an answer back as they got it, with all that it does not have.
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// A call that an answer had.
#[derive(Deserialize)]
struct Call {
    id: Option<String>,
    function: Called,
}

#[derive(Deserialize)]
struct Called {
    name: String,
    /// An object; clients send it as a text.
    arguments: Value,
}

impl Call {
    /// As templates want it.
    fn value(self) -> Result<Value, Refusal> {
        let Called { name, arguments } = self.function;
        let arguments = match arguments {
            Value::String(text) if text.trim().is_empty() => json!({}),
            Value::String(text) => serde_json::from_str(&text).unwrap_or(Value::Null),
            arguments => arguments,
        };
        if !arguments.is_object() {
            let rule =
                format!("should have calls whose `arguments` are an object, those of `{name}` are not");
            return Err(Refusal::field("messages", rule));
        }
        let mut call = json!({ "type": "function", "function": { "name": name, "arguments": arguments } });
        if let Some(id) = self.id {
            call["id"] = id.into();
        }
        Ok(call)
    }
}

impl Turn {
    fn message(self) -> Result<Message, Refusal> {
        let empty = |v: &Value| v.is_null() || v.as_array().is_some_and(Vec::is_empty);
        let refuse = |rule: String| Refusal::field("messages", rule);
        if let Some((field, _)) = self.rest.iter().find(|(_, v)| !empty(v)) {
            return Err(refuse(format!("should have nothing but role, content and calls, found `{field}`")));
        }
        let calls = self.tool_calls.unwrap_or_default();
        let of_role = [
            ("tool_calls", "assistant", !calls.is_empty()),
            ("tool_call_id", "tool", self.tool_call_id.is_some()),
            ("name", "tool", self.name.is_some()),
        ];
        if let Some((field, role, _)) = of_role.iter().find(|(_, role, there)| *there && self.role != *role) {
            return Err(refuse(format!("should have `{field}` with the role `{role}` only")));
        }
        let content = match self.content {
            None if calls.is_empty() => return Err(refuse("should each have a content of text".to_owned())),
            None => String::new(),
            Some(Content::Text(text)) => text,
            Some(Content::Parts(parts)) => parts.into_iter().map(|Part::Text { text }| text).collect(),
        };
        let mut message = Message::new(self.role, content);
        if !calls.is_empty() {
            let calls = calls.into_iter().map(Call::value).collect::<Result<Vec<_>, _>>()?;
            message.rest.insert("tool_calls".to_owned(), calls.into());
        }
        for (field, value) in [("tool_call_id", self.tool_call_id), ("name", self.name)] {
            message.rest.extend(value.map(|value| (field.to_owned(), value.into())));
        }
        Ok(message)
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

/// A list of tokens.
pub(crate) fn tokens(value: &Value) -> Option<Vec<u32>> {
    value.as_array()?.iter().map(|token| token.as_u64().and_then(|token| token.try_into().ok())).collect()
}

/// One prompt, or a list of them.
pub(crate) fn prompts(value: Value) -> Option<Vec<Prompt>> {
    match value {
        Value::String(text) => Some(vec![Prompt::Text(text)]),
        Value::Array(all) if matches!(all.first(), Some(Value::String(_))) => {
            let text = |one| if let Value::String(text) = one { Some(Prompt::Text(text)) } else { None };
            all.into_iter().map(text).collect()
        }
        Value::Array(all) if matches!(all.first(), Some(Value::Array(_))) => {
            all.iter().map(|one| tokens(one).map(Prompt::Tokens)).collect()
        }
        all => Some(vec![Prompt::Tokens(tokens(&all)?)]),
    }
}

impl Request {
    /// Reads the body of `/v1/completions`; what it leaves out is as in `defaults`, with a seed of
    /// its own.
    pub(crate) fn completion(body: &[u8], defaults: SampleConfig) -> Result<Self, Refusal> {
        let mut fields = Fields::parse(body)?;
        let want = |got: &str| {
            Refusal::field(
                "prompt",
                format_args!("should be a text, a list of tokens, or a list of either{got}"),
            )
        };
        let prompt = fields.value("prompt").ok_or_else(|| want(""))?;
        let got =
            format!(", got {}", if prompt.is_array() { "another list".to_owned() } else { shown(&prompt) });
        let prompts = prompts(prompt).ok_or_else(|| want(&got))?;
        let echo = fields.take("echo", "true or false")?.unwrap_or(false);
        let least = usize::from(!echo);
        let want = if echo { "a number of tokens" } else { "at least 1 without `echo`" };
        let max_tokens = fields.within("max_tokens", want, |n: &usize| *n >= least)?;
        let logprobs = fields.within("logprobs", &format!("0 to {TOP}"), |n: &usize| *n <= TOP)?;
        fields.only("suffix", |v| v == &json!(""))?;
        let max_tokens = Some(max_tokens.unwrap_or(COMPLETION_TOKENS));
        Self::rest(fields, prompts, max_tokens, (echo, logprobs), defaults)
    }

    /// Reads the body of `/v1/chat/completions`; otherwise as [`Request::completion`].
    pub(crate) fn chat(body: &[u8], defaults: SampleConfig) -> Result<Self, Refusal> {
        let mut fields = Fields::parse(body)?;
        let (prompt, tools) = chat_prompt(&mut fields)?.ok_or_else(no_messages)?;
        let [new, old] = ["max_completion_tokens", "max_tokens"]
            .map(|field| fields.within(field, "at least 1", |n: &usize| *n >= 1));
        let max_tokens = new?.or(old?);
        let logprobs = fields.take("logprobs", "true or false")?.unwrap_or(false);
        let top = fields.within("top_logprobs", &format!("0 to {TOP}"), |n: &usize| *n <= TOP)?;
        if top.is_some_and(|top| top > 0) && !logprobs {
            return Err(Refusal::field("top_logprobs", "should be there with `\"logprobs\": true` only"));
        }
        let none = |v: &Value| v.as_array().is_some_and(Vec::is_empty);
        fields.only("functions", none)?;
        fields.only("function_call", |v| v == "none" || v == "auto")?;
        // How long answers should be is nothing that a model here was trained for.
        fields.only("verbosity", |v| v == "medium")?;
        fields.only("modalities", |v| v == &json!(["text"]))?;
        let logprobs = logprobs.then_some(top.unwrap_or(0));
        let mut request = Self::rest(fields, vec![prompt], max_tokens, (false, logprobs), defaults)?;
        if let (Some(structure), Some(_)) = (&request.structure, &tools) {
            let rule =
                "should not be there beside `tools` that may be called: what is called is no such text";
            return Err(Refusal::field(structure.field, rule));
        }
        request.tools = tools;
        Ok(request)
    }

    fn rest(
        mut fields: Fields,
        prompts: Vec<Prompt>,
        max_tokens: Option<usize>,
        (echo, logprobs): (bool, Option<usize>),
        defaults: SampleConfig,
    ) -> Result<Self, Refusal> {
        let n = fields.within("n", &format!("1 to {CHOICES}"), |n| (1..=CHOICES).contains(n))?.unwrap_or(1);
        let mut best_of = n;
        if !matches!(prompts[..], [Prompt::Chat { .. }]) {
            let want = format!("{n} to {CHOICES}, at least `n`");
            let asked = fields.within("best_of", &want, |best| (n..=CHOICES).contains(best))?;
            best_of = asked.unwrap_or(n);
        }
        if prompts.len() * best_of > CHOICES {
            let times = if best_of > n { "best_of" } else { "n" };
            let rule = format!(
                "should be at most {CHOICES}, times `{times}`, got {} times {best_of}",
                prompts.len()
            );
            return Err(Refusal::field("prompt", rule));
        }
        let lengths = 1..=STOP_BYTES;
        let want = format!("a text or a list of at most {STOPS}, each of 1 to {STOP_BYTES} bytes");
        let stops = match fields.take("stop", &want)? {
            None => Vec::new(),
            Some(Stop::One(stop)) => vec![stop],
            Some(Stop::Many(stops)) => stops,
        };
        if stops.len() > STOPS || !stops.iter().all(|stop| lengths.contains(&stop.len())) {
            return Err(Refusal::field("stop", format_args!("should be {want}")));
        }
        let want = format!("a list of at most {TOKENS} tokens");
        let stop_tokens = fields.within("stop_token_ids", &want, |all: &Vec<u32>| all.len() <= TOKENS)?;
        let sampling = sampling(&mut fields, defaults)?;
        let want = format!("a list of at most {STOPS} texts, each of 1 to {STOP_BYTES} bytes");
        let fits =
            |all: &Vec<String>| all.len() <= STOPS && all.iter().all(|text| lengths.contains(&text.len()));
        let breakers = fields.within("dry_sequence_breakers", &want, fits)?;
        let adjustments = adjustments(&mut fields)?;
        if max_tokens.is_some_and(|most| adjustments.min_tokens > most) {
            let rule = format!("should be at most `max_tokens`, got {}", adjustments.min_tokens);
            return Err(Refusal::field("min_tokens", rule));
        }
        let structure = structure(&mut fields)?;
        let flag = "true or false";
        let ignore_eos = fields.take("ignore_eos", flag)?.unwrap_or(false);
        if let Some(structure) = structure.as_ref().filter(|_| ignore_eos) {
            let rule = format!("should be false beside `{}`, which says where a text ends", structure.field);
            return Err(Refusal::field("ignore_eos", rule));
        }
        let stream = fields.take("stream", flag)?.unwrap_or(false);
        if stream && best_of > n {
            let rule = "should be `n` in a stream: which texts are the best is known at their end";
            return Err(Refusal::field("best_of", rule));
        }
        let options =
            fields.take::<StreamOptions>("stream_options", "an object with no more than `include_usage`")?;
        if options.is_some() && !stream {
            return Err(Refusal::field("stream_options", "should be there with `\"stream\": true` only"));
        }
        let request = Self {
            model: fields.take("model", "a text")?,
            prompts,
            n,
            best_of,
            max_tokens,
            sampling,
            adjustments,
            breakers: breakers.unwrap_or_else(|| DRY_BREAKERS.map(str::to_owned).to_vec()),
            structure,
            tools: None,
            stops,
            stop_tokens: stop_tokens.unwrap_or_default(),
            ignore_eos,
            skip_special: fields.take("skip_special_tokens", flag)?.unwrap_or(true),
            echo,
            logprobs,
            stream,
            usage: options.is_some_and(|o| o.include_usage),
            asked: Map::new(),
        };
        fields.end()?;
        Ok(request)
    }
}

fn no_messages() -> Refusal {
    Refusal::field("messages", "should be a list of at least one message")
}

/// The conversation of a request, and what it may call; `None` where there is none.
pub(crate) fn chat_prompt(fields: &mut Fields) -> Result<Option<(Prompt, Option<Tools>)>, Refusal> {
    let want = "a list of messages, each with a role and a content of text";
    let Some(turns) = fields.take::<Vec<Turn>>("messages", want)? else { return Ok(None) };
    if turns.is_empty() {
        return Err(no_messages());
    }
    let messages = turns.into_iter().map(Turn::message).collect::<Result<Vec<_>, _>>()?;
    let ending = ending(fields, &messages)?;
    let mut variables: BTreeMap<String, Value> =
        fields.take("chat_template_kwargs", "an object")?.unwrap_or_default();
    let effort = fields.take::<String>(EFFORT, "a word such as `low`")?;
    if effort.is_some() && variables.contains_key(EFFORT) {
        return Err(Refusal::field(EFFORT, "should not be there beside that of `chat_template_kwargs`"));
    }
    let asks_effort = effort.is_some().then_some(EFFORT);
    variables.extend(effort.map(|effort| (EFFORT.to_owned(), effort.into())));
    let (list, tools) = tools(fields)?;
    if !list.is_empty() && variables.contains_key("tools") {
        return Err(Refusal::field(
            "chat_template_kwargs",
            "should have no `tools` beside those of the request",
        ));
    }
    Ok(Some((Prompt::Chat { messages, variables, tools: list, ending, effort: asks_effort }, tools)))
}

/// What the conversation ends with, by the names of vLLM.
fn ending(fields: &mut Fields, messages: &[Message]) -> Result<Ending, Refusal> {
    let (field, opening) = ("continue_final_message", "add_generation_prompt");
    let continued = fields.take(field, "true or false")?.unwrap_or(false);
    let opened = fields.take::<bool>(opening, "true or false")?;
    if !continued {
        return Ok(if opened == Some(false) { Ending::Message } else { Ending::Answer });
    }
    if opened == Some(true) {
        return Err(Refusal::field(field, format_args!("should be false beside `{opening}` of true")));
    }
    let last = messages.last().filter(|last| last.role == "assistant" && !last.content.trim().is_empty());
    if last.is_none_or(|last| last.rest.contains_key("tool_calls")) {
        let rule = "should be there with a last message of the assistant that has a text and no calls";
        return Err(Refusal::field(field, rule));
    }
    Ok(Ending::Continued)
}

/// How tokens are picked.
fn sampling(fields: &mut Fields, defaults: SampleConfig) -> Result<SampleConfig, Refusal> {
    let number = "a number";
    let penalty = fields.take("repetition_penalty", number)?;
    let same = fields.take("repeat_penalty", number)?;
    if penalty.is_some() && same.is_some() {
        return Err(Refusal::field("repeat_penalty", "is `repetition_penalty`: one of both should be there"));
    }
    // Other servers say -1 for all.
    let top_k = fields.within("top_k", "at least 1, or 0 or -1 for all", |k: &i64| *k >= -1)?;
    let seed = fields.take::<i64>("seed", "a whole number of 64 bits")?;
    let version = fields.within("mirostat", "0 or 2", |version: &u32| *version == 0 || *version == 2)?;
    let [tau, eta] = ["mirostat_tau", "mirostat_eta"].map(|field| fields.take::<f32>(field, number));
    let (tau, eta) = (tau?, eta?);
    for (field, value) in [("mirostat_tau", tau), ("mirostat_eta", eta)] {
        if version.is_none() && value.is_some() {
            return Err(Refusal::field(field, "should be there with `mirostat` only"));
        }
    }
    let mirostat_tau = match version {
        Some(0) => 0.0,
        Some(_) => tau.unwrap_or(TAU),
        None => defaults.mirostat_tau,
    };
    // Beside mirostat only those filters apply that the request, or whoever started the server,
    // asks for.
    let newly = mirostat_tau > 0.0 && defaults.mirostat_tau == 0.0;
    let defaults = if newly { defaults.unfiltered() } else { defaults };
    let length = "a number of tokens";
    // Other servers say -1 for all, and 0 for none.
    let last = "at least 1, or -1 for all";
    let dry_window = fields.within("dry_penalty_last_n", last, |n: &i64| *n == -1 || *n >= 1)?;
    let sampling = SampleConfig {
        typical_p: fields.take("typical_p", number)?.unwrap_or(defaults.typical_p),
        xtc_probability: fields.take("xtc_probability", number)?.unwrap_or(defaults.xtc_probability),
        xtc_threshold: fields.take("xtc_threshold", number)?.unwrap_or(defaults.xtc_threshold),
        mirostat_tau,
        mirostat_eta: eta.unwrap_or(defaults.mirostat_eta),
        dry_multiplier: fields.take("dry_multiplier", number)?.unwrap_or(defaults.dry_multiplier),
        dry_base: fields.take("dry_base", number)?.unwrap_or(defaults.dry_base),
        dry_allowed_length: fields.take("dry_allowed_length", length)?.unwrap_or(defaults.dry_allowed_length),
        dry_window: dry_window.map_or(defaults.dry_window, |n| usize::try_from(n).unwrap_or(0)),
        temperature: fields.take("temperature", number)?.unwrap_or(defaults.temperature),
        top_k: top_k.map_or(defaults.top_k, |k| usize::try_from(k).unwrap_or(0)),
        top_p: fields.take("top_p", number)?.unwrap_or(defaults.top_p),
        min_p: fields.take("min_p", number)?.unwrap_or(defaults.min_p),
        repetition_penalty: penalty.or(same).unwrap_or(defaults.repetition_penalty),
        seed: seed.map_or(defaults.seed, i64::cast_unsigned),
    };
    match Sampler::new(sampling) {
        Ok(_) => Ok(sampling),
        Err(Error::Sampling { field, want, got }) => {
            let field =
                if same.is_some() && field == "repetition_penalty" { "repeat_penalty" } else { field };
            Err(Refusal::field(field, format_args!("should be {want}, got {got}")))
        }
        Err(error) => Err(Refusal::new(400, error.to_string())),
    }
}

/// What is changed of logits before.
fn adjustments(fields: &mut Fields) -> Result<Adjustments, Refusal> {
    let [presence_penalty, frequency_penalty] = ["presence_penalty", "frequency_penalty"]
        .map(|field| fields.within(field, "a number from -2 to 2", |x: &f32| (-2.0..=2.0).contains(x)));
    let want = format!("an object of at most {TOKENS} tokens with numbers from -100 to 100");
    let fits = |bias: &BTreeMap<u32, f32>| {
        bias.len() <= TOKENS && bias.values().all(|by| (-100.0..=100.0).contains(by))
    };
    Ok(Adjustments {
        presence_penalty: presence_penalty?.unwrap_or(0.0),
        frequency_penalty: frequency_penalty?.unwrap_or(0.0),
        bias: fields.within("logit_bias", &want, fits)?.unwrap_or_default(),
        min_tokens: fields.take("min_tokens", "a number of tokens")?.unwrap_or(0),
        ..Adjustments::default()
    })
}

#[cfg(test)]
mod tests;
