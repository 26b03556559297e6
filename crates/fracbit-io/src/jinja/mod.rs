//! Templates in the language of Jinja2, with Python's values.
//!
//! Chat templates are written for one implementation, Jinja2 as transformers sets it up, and lean
//! on what it inherits from Python: `None` and `True` in the text, `[1:]` and `% x`, methods, what
//! is empty and what is iterable. So this follows that implementation, construct by construct
//! (<https://jinja.palletsprojects.com>, 3.1): its lexer with `trim_blocks` and `lstrip_blocks`,
//! its grammar, scopes, macros, filters, tests and the functions that transformers adds.
//! Deviations: integers have 64 bits; what belongs to pages or files (`include`, `extends`,
//! `autoescape`, `urlize`, `xmlattr`), and chance (`random`), is refused by name; the sandbox's
//! rules are kept by there being nothing to escape to.
//!
//! An engine of our own rather than minijinja, which we used before: what a template prints, adds
//! or compares there is not Python's, which no hook can change; its memory had no bound; and it
//! cannot tell the characters of a message from those of the template ([`text`]), which is how text
//! of messages is kept from becoming control tokens.
//!
//! Bounds: [`FUEL`] steps of time, [`MAX_TEXT`] characters and items made on the way,
//! [`MAX_OUTPUT`] of output, nesting in source and while running. Every one is an error.

mod access;
mod dump;
mod eval;
mod filters;
mod format;
mod functions;
mod lexer;
mod markup;
mod methods;
mod parser;
mod tests;
pub(crate) mod text;
mod text_filters;
mod time;
mod value;

use std::sync::Arc;

use parser::Statement;
use value::Value;

/// Most steps of one rendering.
pub const FUEL: u64 = 2_000_000;
/// Most characters of output.
pub const MAX_OUTPUT: usize = 16 << 20;
/// Most characters and items that are made while rendering, all together.
pub const MAX_TEXT: usize = 64 << 20;

/// Functions that templates can call by name.
const FUNCTIONS: [&str; 7] =
    ["raise_exception", "strftime_now", "range", "dict", "namespace", "cycler", "joiner"];

/// Why a template cannot be read or rendered.
#[derive(Debug)]
pub(crate) struct Fail {
    line: Option<usize>,
    rule: String,
}

impl Fail {
    fn new(rule: impl Into<String>) -> Self {
        Self { line: None, rule: rule.into() }
    }

    fn at(line: usize, rule: impl Into<String>) -> Self {
        Self { line: Some(line), rule: rule.into() }
    }

    /// The innermost line counts.
    fn in_line(self, line: usize) -> Self {
        Self { line: self.line.or(Some(line)), ..self }
    }
}

impl From<String> for Fail {
    fn from(rule: String) -> Self {
        Self::new(rule)
    }
}

impl std::fmt::Display for Fail {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.line {
            Some(line) => write!(f, "{} (line {line})", self.rule),
            None => f.write_str(&self.rule),
        }
    }
}

/// A template that was read.
#[derive(Debug)]
pub(crate) struct Template(Vec<Statement>);

/// A variable of a rendering.
pub(crate) struct Variable {
    value: Value,
}

impl Variable {
    /// A JSON value, its texts with these marks.
    pub(crate) fn json(value: &serde_json::Value, marks: u32) -> Self {
        Self { value: Value::of_json(value, marks) }
    }

    /// A text with marks of its own.
    pub(crate) fn text(text: Vec<u32>) -> Self {
        Self { value: text.into() }
    }

    /// A list of dicts.
    pub(crate) fn dicts(dicts: Vec<Vec<(String, Self)>>) -> Self {
        let dict = |fields: Vec<(String, Self)>| {
            let entries = fields.into_iter().map(|(name, of)| (name.as_str().into(), of.value)).collect();
            Value::dict(entries)
        };
        Self { value: Value::list(dicts.into_iter().map(dict).collect()) }
    }
}

impl Template {
    pub(crate) fn new(source: &str) -> Result<Self, Fail> {
        Ok(Self(parser::parse(lexer::tokens(source)?)?))
    }

    /// The rendered text, with the marks of its characters. `now` is for `strftime_now`, in seconds
    /// since 1970.
    pub(crate) fn render(
        &self,
        variables: Vec<(String, Variable)>,
        now: Option<u64>,
    ) -> Result<Vec<u32>, Fail> {
        let variables = variables.into_iter().map(|(name, v)| (Arc::from(name.as_str()), v.value)).collect();
        let mut run = eval::Run::new(variables, now);
        run.whole(&self.0)?;
        Ok(std::mem::take(&mut run.out))
    }
}
