//! How models call functions, as their chat templates say: prompts and grammars.

use fracbit_io::{Message, Tokenizer};
use serde_json::{Value, json};

use super::{Function, Tools};

/// How calls are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// `<tool_call>{"name": ..., "arguments": ...}</tool_call>`: Hermes, Qwen 2.5 and 3, SmolLM3.
    Hermes,
    /// `{"name": ..., "parameters": ...}`, all that is said or behind `<|python_tag|>`: Llama 3.
    Llama,
    /// `[TOOL_CALLS][{"name": ..., "arguments": ...}]`: Mistral to version 7 of its tokenizer.
    Mistral,
    /// `[TOOL_CALLS]name[ARGS]{...}`, a number of the call perhaps in between: Mistral since.
    MistralArgs,
    /// The template knows none, or calls of another form: as `Hermes`, and the prompt says so.
    Generic,
}

/// What may stand between the parts of a call.
const SPACE: &str = "ws: WS?\nWS: / |\\n/\n";

impl Format {
    /// What a chat template has.
    pub(crate) fn of(template: Option<&str>) -> Self {
        let has = |text: &str| template.is_some_and(|template| template.contains(text));
        if !has("tools") {
            Self::Generic
        } else if has("[TOOL_CALLS]") {
            if has("[ARGS]") { Self::MistralArgs } else { Self::Mistral }
        } else if has("<tool_call>") && !["<function=", "<arg_key>", "<parameter"].into_iter().any(has) {
            Self::Hermes
        } else if has("\"parameters\"") && (has("ipython") || has("<|python_tag|>")) {
            Self::Llama
        } else {
            Self::Generic
        }
    }

    /// Its name in `/props`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Hermes => "hermes",
            Self::Llama => "llama3",
            Self::Mistral => "mistral",
            Self::MistralArgs => "mistral-args",
            Self::Generic => "generic",
        }
    }

    /// What a call begins with.
    pub(super) fn opener(self) -> &'static str {
        match self {
            Self::Hermes | Self::Generic => "<tool_call>",
            Self::Llama => "<|python_tag|>",
            Self::Mistral | Self::MistralArgs => "[TOOL_CALLS]",
        }
    }

    /// What a call of [`Format::Hermes`] ends with.
    pub(super) const CLOSER: &'static str = "</tool_call>";

    /// What its calls have that may be a token of its own.
    fn marks(self) -> &'static [&'static str] {
        match self {
            Self::Hermes | Self::Generic => &["<tool_call>", Self::CLOSER],
            Self::Llama => &["<|python_tag|>"],
            Self::Mistral => &["[TOOL_CALLS]"],
            Self::MistralArgs => &["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"],
        }
    }

    /// Special tokens that are a part of calls: they belong to the text.
    pub(crate) fn tokens(self, tokenizer: &Tokenizer) -> Vec<u32> {
        self.marks().iter().filter_map(|mark| tokenizer.token_id(mark)).collect()
    }

    /// The token that a call begins with, where it is one.
    pub(crate) fn open_token(self, tokenizer: &Tokenizer) -> Option<u32> {
        tokenizer.token_id(self.opener())
    }

    /// Messages and list of functions for the chat template.
    pub(crate) fn prompt(self, messages: &[Message], tools: &[Value]) -> (Vec<Message>, Option<Value>) {
        if self == Self::Generic {
            return (spelled_out(messages, tools), None);
        }
        (messages.to_vec(), (!tools.is_empty()).then(|| tools.into()))
    }

    /// A grammar in the notation of Lark of an answer that is calls, or of what stands behind
    /// [`Format::open_token`].
    pub(crate) fn grammar(self, tools: &Tools, behind: bool, tokenizer: &Tokenizer) -> String {
        let mark = |text: &str| match tokenizer.token_id(text) {
            // No text spells it.
            Some(token) if tokenizer.special_text(token).is_some() => format!("<[{token}]>"),
            _ => quoted(text),
        };
        let bodies = |arguments: &str| {
            let one = |(i, function): (usize, &Function)| {
                let [key, name, arguments] =
                    [r#""name""#.to_owned(), quoted(&function.name), quoted(arguments)]
                        .map(|part| quoted(&part));
                format!(r#""{{" ws {key} ws ":" ws {name} ws "," ws {arguments} ws ":" ws args_{i} ws "}}""#)
            };
            tools.functions.iter().enumerate().map(one).collect::<Vec<_>>().join(" | ")
        };
        // One, or several with something between them.
        let several = |one: &str, between: &str| match tools.parallel {
            true => format!("{one} ({between} {one})*"),
            false => one.to_owned(),
        };
        let open = if behind { String::new() } else { mark(self.opener()) };
        let (start, call) = match self {
            Self::Hermes | Self::Generic if behind => {
                (format!("ws call ws {}", mark(Self::CLOSER)), bodies("arguments"))
            }
            Self::Hermes | Self::Generic => {
                let one = format!("{open} ws call ws {}", mark(Self::CLOSER));
                (several(&format!("({one})"), "ws"), bodies("arguments"))
            }
            Self::Llama => ("ws call".to_owned(), bodies("parameters")),
            Self::Mistral => {
                let calls = several("call", "ws \",\" ws");
                (format!("{open} ws \"[\" ws {calls} ws \"]\""), bodies("arguments"))
            }
            Self::MistralArgs => {
                let [id, arguments] = ["[CALL_ID]", "[ARGS]"].map(mark);
                let one = |(i, function): (usize, &Function)| {
                    format!("{} ({id} ID)? {arguments} args_{i}", quoted(&function.name))
                };
                let all: Vec<_> = tools.functions.iter().enumerate().map(one).collect();
                let one = format!("({open} call)");
                // Behind the token it begins anew by the next.
                let start = if behind { "call".to_owned() } else { several(&one, "") };
                (start, format!("{}\nID: /[A-Za-z0-9]{{9}}/", all.join(" | ")))
            }
        };
        let mut grammar = format!("start: {start}\ncall: {call}\n{SPACE}");
        for (i, function) in tools.functions.iter().enumerate() {
            let schema = fracbit_grammar::spaced(function.parameters.clone());
            grammar += &format!("args_{i}: %json {schema}\n");
        }
        grammar
    }

    /// Whether calls behind [`Format::open_token`] may be followed by text, or by others.
    pub(crate) fn goes_on(self, tools: &Tools) -> bool {
        tools.parallel && matches!(self, Self::Hermes | Self::Generic | Self::MistralArgs)
    }
}

/// A text between quotation marks, as JSON and Lark have it.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// A conversation for templates that know no functions: the first message says which there are, and
/// calls and what came of them are texts.
fn spelled_out(messages: &[Message], tools: &[Value]) -> Vec<Message> {
    let mut said: Vec<Message> = Vec::new();
    for message in messages {
        let mut text = message.content.clone();
        let calls = message.rest.get("tool_calls").and_then(Value::as_array);
        for call in calls.into_iter().flatten() {
            let call =
                json!({ "name": call["function"]["name"], "arguments": call["function"]["arguments"] });
            let line = if text.is_empty() { "" } else { "\n" };
            text += &format!("{line}<tool_call>\n{call}\n</tool_call>");
        }
        if message.role != "tool" {
            said.push(Message::new(&message.role, text));
            continue;
        }
        let text = format!("<tool_response>\n{text}\n</tool_response>");
        match said.last_mut() {
            // Many templates want turns that alternate.
            Some(last) if last.role == "user" => last.content += &format!("\n{text}"),
            _ => said.push(Message::new("user", text)),
        }
    }
    if tools.is_empty() {
        return said;
    }
    let list: Vec<String> = tools.iter().map(|tool| tool["function"].to_string()).collect();
    let rules = format!(
        "You may call functions to answer. To call one, write its name and arguments as JSON between tags:\n\
        <tool_call>\n{{\"name\": \"function name\", \"arguments\": {{...}}}}\n</tool_call>\n\
        What it returns comes between <tool_response> and </tool_response>. The functions are:\n{}",
        list.join("\n")
    );
    match said.first_mut() {
        Some(first) if first.role == "system" => first.content = format!("{}\n\n{rules}", first.content),
        _ => said.insert(0, Message::new("system", rules)),
    }
    said
}
