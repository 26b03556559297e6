//! Functions that a model may call: what requests say of them.

mod calls;
mod format;
mod spoken;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::fields::{Fields, Refusal};

pub(crate) use calls::{Calls, Said};
pub(crate) use format::Format;
pub(crate) use spoken::{Part, Spoken, call_id, calls_of, rest_of, said_of};

/// Most functions of a request, as in OpenAI's API.
const FUNCTIONS: usize = 128;

/// A function.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Function {
    pub(crate) name: String,
    /// The schema of its arguments.
    pub(crate) parameters: Value,
}

/// What may be called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    /// Text or calls, as the model likes.
    Auto,
    /// Calls alone.
    Required,
}

/// The functions of a request, at least one, and what is to be done with them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tools {
    /// Those that may be called.
    pub(crate) functions: Vec<Function>,
    pub(crate) choice: Choice,
    /// Several in one answer.
    pub(crate) parallel: bool,
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Tool {
    Function { function: Described },
}

#[derive(Deserialize)]
struct Described {
    name: String,
    parameters: Option<Value>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Wanted {
    Word(String),
    One {
        #[serde(rename = "type")]
        kind: String,
        function: Named,
    },
}

#[derive(Deserialize)]
struct Named {
    name: String,
}

/// Reads `tools` and what belongs to them: the list for the chat template, empty where nothing may
/// be called, and what may be called.
pub(crate) fn tools(fields: &mut Fields) -> Result<(Vec<Value>, Option<Tools>), Refusal> {
    let want = format!("a list of at most {FUNCTIONS} functions, each with a `type` and a `function`");
    let given = fields.within("tools", &want, |all: &Vec<Value>| all.len() <= FUNCTIONS)?.unwrap_or_default();
    let parallel = fields.take("parallel_tool_calls", "true or false")?.unwrap_or(true);
    let want = "`none`, `auto`, `required` or `{\"type\": \"function\", \"function\": {\"name\": ...}}`";
    let wanted = fields.take::<Wanted>("tool_choice", want)?;
    let bad = || Refusal::field("tool_choice", format_args!("should be {want}"));
    let choice = match &wanted {
        None => Some(Choice::Auto),
        Some(Wanted::Word(word)) => match word.as_str() {
            "none" => None,
            "auto" => Some(Choice::Auto),
            "required" => Some(Choice::Required),
            _ => return Err(bad()),
        },
        Some(Wanted::One { kind, .. }) if kind == "function" => Some(Choice::Required),
        Some(Wanted::One { .. }) => return Err(bad()),
    };
    if given.is_empty() {
        return match choice {
            Some(Choice::Required) => {
                Err(Refusal::field("tool_choice", "should be `none` or `auto` without `tools`"))
            }
            _ => Ok((Vec::new(), None)),
        };
    }
    let mut functions: Vec<Function> = Vec::new();
    for (i, tool) in given.iter().enumerate() {
        let function = function(tool).map_err(|rule| Refusal::field("tools", format!("[{i}] {rule}")))?;
        if functions.iter().any(|other| other.name == function.name) {
            return Err(Refusal::field("tools", format_args!("should have `{}` once", function.name)));
        }
        functions.push(function);
    }
    if let Some(Wanted::One { function, .. }) = &wanted {
        functions.retain(|one| one.name == function.name);
        if functions.is_empty() {
            return Err(Refusal::field("tool_choice", "should name a function of `tools`"));
        }
    }
    let Some(choice) = choice else { return Ok((Vec::new(), None)) };
    // Who names one function wants one call of it, as with OpenAI.
    let parallel = parallel && !matches!(wanted, Some(Wanted::One { .. }));
    Ok((given, Some(Tools { functions, choice, parallel })))
}

/// A function by its description.
fn function(tool: &Value) -> Result<Function, String> {
    let Ok(Tool::Function { function: Described { name, parameters } }) = Tool::deserialize(tool) else {
        return Err("should be `{\"type\": \"function\", \"function\": {\"name\": ...}}`".to_owned());
    };
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"_-.".contains(&b);
    if !(1..=64).contains(&name.len()) || !name.bytes().all(plain) {
        return Err("should have a name of 1 to 64 letters, digits, `_`, `-` and `.`".to_owned());
    }
    let parameters = parameters.unwrap_or_else(|| json!({ "type": "object", "properties": {} }));
    if !parameters.is_object() {
        return Err(format!("`{name}` should have `parameters` that are a JSON schema"));
    }
    Ok(Function { name, parameters })
}

#[cfg(test)]
mod tests;
