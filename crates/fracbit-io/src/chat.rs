//! Chat templates: what a model's files say a conversation looks like, rendered with limits.
//!
//! Templates are programs written by whoever published the model, in the language of Jinja2 (an
//! engine of our own in this crate says why and how). They get what transformers gives them:
//! `messages`, `tools` and `documents` (none, unless given), `add_generation_prompt`, the special
//! tokens that the tokenizer has, and further variables; `raise_exception`, `strftime_now` (in
//! UTC). They reach neither files nor a network, and their time, memory and output are bounded
//! ([`FUEL`], [`MAX_TEXT`], [`MAX_OUTPUT`]).
//!
//! The rendered text knows of every character whether it came with the request, which
//! [`crate::Tokenizer::conversation`] needs to keep what somebody said from becoming a control
//! token.

use std::collections::BTreeMap;

use crate::error::Error;
use crate::jinja::text::{ASSISTANT, REQUEST, plain, units};
use crate::jinja::{Fail, Template, Variable};

pub use crate::jinja::{FUEL, MAX_OUTPUT, MAX_TEXT};

/// Most bytes of a template.
pub const MAX_TEMPLATE: usize = 1 << 20;

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant` or what else the template knows.
    pub role: String,
    /// What was said.
    pub content: String,
    /// What else templates know of a turn, such as `tool_calls` and `tool_call_id`.
    #[serde(flatten)]
    pub rest: BTreeMap<String, serde_json::Value>,
}

impl Message {
    /// A message.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into(), rest: BTreeMap::new() }
    }

    /// As a variable. Templates build control tokens of plain roles (`'<|' + role + '|>'`), so
    /// those are theirs.
    fn marked(&self) -> Vec<(String, Variable)> {
        let plain = self.role.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-');
        let marks = if self.role == "assistant" { REQUEST | ASSISTANT } else { REQUEST };
        let rest = self.rest.iter().map(|(name, value)| (name.clone(), Variable::json(value, marks)));
        let said = [
            ("role", Variable::text(units(&self.role, if plain { 0 } else { REQUEST }))),
            ("content", Variable::text(units(&self.content, marks))),
        ];
        said.into_iter().map(|(name, value)| (name.to_owned(), value)).chain(rest).collect()
    }
}

/// What a template may use besides the messages.
#[derive(Clone, Debug, Default)]
pub struct RenderOptions {
    /// End with the opening of the assistant's turn.
    pub add_generation_prompt: bool,
    /// Texts of the special tokens that there are, by their names such as `bos_token`; see
    /// [`crate::Tokenizer::special_tokens`].
    pub special_tokens: BTreeMap<String, String>,
    /// The time that `strftime_now` tells, in seconds since 1970, UTC; `None`: the clock. Fix it
    /// for reproducible prompts.
    pub now: Option<u64>,
    /// Further variables, such as `enable_thinking` or `tools`.
    pub extra: BTreeMap<String, serde_json::Value>,
}

/// A chat template that was read.
#[derive(Debug)]
pub struct ChatTemplate {
    template: Template,
    source: String,
}

impl ChatTemplate {
    /// Reads a template.
    ///
    /// # Errors
    /// [`Error::Template`] with line and reason.
    pub fn new(source: &str) -> Result<Self, Error> {
        if source.len() > MAX_TEMPLATE {
            return Err(Error::Template(format!(
                "should have at most {MAX_TEMPLATE} bytes, has {}",
                source.len()
            )));
        }
        let template = Template::new(source).map_err(|e| describe(&e))?;
        Ok(Self { template, source: source.to_owned() })
    }

    /// The text of the template.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The prompt of a conversation.
    ///
    /// # Errors
    /// [`Error::Template`] when the template refuses the messages, fails or exceeds a limit, or a
    /// variable has the name of another thing.
    pub fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<String, Error> {
        Ok(plain(&self.render_marked(messages, options)?))
    }

    /// The same, with marks of what came with the request.
    pub(crate) fn render_marked(
        &self,
        messages: &[Message],
        options: &RenderOptions,
    ) -> Result<Vec<u32>, Error> {
        const OURS: [&str; 2] = ["messages", "add_generation_prompt"];
        if let Some(name) = OURS.into_iter().find(|name| options.extra.contains_key(*name)) {
            return Err(Error::Template(format!("`{name}` should not be given as a variable")));
        }
        let json = |value: &serde_json::Value| Variable::json(value, REQUEST);
        let none = serde_json::Value::Null;
        let mut variables: BTreeMap<String, Variable> = BTreeMap::new();
        for name in ["tools", "documents"] {
            variables.insert(name.to_owned(), json(&none));
        }
        for (name, text) in &options.special_tokens {
            variables.insert(name.clone(), Variable::json(&text.as_str().into(), 0));
        }
        for (name, value) in &options.extra {
            variables.insert(name.clone(), json(value));
        }
        let prompt = options.add_generation_prompt.into();
        variables.insert("add_generation_prompt".to_owned(), json(&prompt));
        let turns = messages.iter().map(Message::marked).collect();
        variables.insert("messages".to_owned(), Variable::dicts(turns));
        self.template.render(variables.into_iter().collect(), options.now).map_err(|e| describe(&e))
    }
}

fn describe(fail: &Fail) -> Error {
    Error::Template(fail.to_string())
}
