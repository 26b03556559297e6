//! Conversations in the form of a chat template, as tokens.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{Bos, EncodeOptions, PrefixSpace, Tokenizer};
use crate::chat::{ChatTemplate, Message, RenderOptions};
use crate::error::Error;
use crate::jinja::text::{ASSISTANT, plain};

/// What ends a conversation in the form of a chat template.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ending {
    /// The opening of the answer.
    #[default]
    Answer,
    /// The last message, as the template closes it.
    Message,
    /// The text of the last message, which is the assistant's: an answer goes on from there.
    Continued,
}

/// A conversation in the form of a chat template, up to where the answer begins.
#[derive(Debug)]
pub struct Rendered<'a> {
    text: String,
    /// The same with marks of what came with the request, where that makes no control tokens.
    marked: Option<Vec<u32>>,
    template: &'a ChatTemplate,
}

impl Rendered<'_> {
    /// What the template made.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }
}

impl Tokenizer {
    /// A conversation in the chat template, for [`Tokenizer::encode_conversation`]; `None` without
    /// a template. `variables` are further ones for it, such as `enable_thinking`. Text of messages
    /// and variables will make no control tokens, unless `allow_special`.
    ///
    /// # Errors
    /// [`Error::Template`] when the template refuses the messages or has no text to be continued,
    /// [`Error::Config`] when it does not compile.
    pub fn render_conversation(
        &self,
        messages: &[Message],
        variables: &BTreeMap<String, Value>,
        ending: Ending,
        allow_special: bool,
    ) -> Result<Option<Rendered<'_>>, Error> {
        let tools = variables.get("tools").is_some_and(|tools| !tools.is_null());
        let named = self.templates.iter().any(|t| t.name == "tool_use");
        let name = if tools && named { "tool_use" } else { "default" };
        let Some(template) = self.template_for(name)? else { return Ok(None) };
        let options = RenderOptions {
            add_generation_prompt: ending == Ending::Answer,
            special_tokens: self.special_tokens(),
            extra: variables.clone(),
            ..RenderOptions::default()
        };
        let mut marked = template.render_marked(messages, &options)?;
        if ending == Ending::Continued {
            let last = marked.iter().rposition(|unit| unit & ASSISTANT != 0);
            marked.truncate(last.map_or(0, |at| at + 1));
        }
        let text = plain(&marked);
        // Templates trim what was said, or leave it out.
        let said = messages.last().map_or("", |message| message.content.trim());
        if ending == Ending::Continued && (said.is_empty() || !text.trim_end().ends_with(said)) {
            let rule = "the last message should have a text that the template keeps, to be continued";
            return Err(Error::Template(rule.to_owned()));
        }
        Ok(Some(Rendered { text, marked: (!allow_special).then_some(marked), template }))
    }

    /// Its tokens.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`]; [`Error::Template`] where text cannot be kept from becoming a
    /// control token.
    pub fn encode_conversation(&self, rendered: &Rendered<'_>) -> Result<Vec<u32>, Error> {
        match &rendered.marked {
            Some(marked) => self.encode_guarded(marked, rendered.template.source()),
            // The template writes its special tokens itself.
            None => self
                .encode(&rendered.text, EncodeOptions { bos: Bos::Never, prefix_space: PrefixSpace::Keep }),
        }
    }

    /// Both at once, with the opening of the answer.
    ///
    /// # Errors
    /// As for the two.
    pub fn conversation(
        &self,
        messages: &[Message],
        variables: &BTreeMap<String, Value>,
        allow_special: bool,
    ) -> Result<Option<Vec<u32>>, Error> {
        let rendered = self.render_conversation(messages, variables, Ending::Answer, allow_special)?;
        rendered.map(|rendered| self.encode_conversation(&rendered)).transpose()
    }
}
