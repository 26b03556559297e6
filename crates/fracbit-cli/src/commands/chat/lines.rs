//! Where messages come from: an editor at a terminal, or the lines of a pipe.

use super::command::COMMANDS;
use crate::{
    context::Context,
    failure::{Exit, Failure},
};
use fracbit::Progress;
use rustyline::{
    Behavior, Config, Editor, Helper,
    completion::Completer,
    error::ReadlineError,
    highlight::Highlighter,
    hint::Hinter,
    history::MemHistory,
    validate::{ValidationContext, ValidationResult, Validator},
};
use std::io::{self, BufRead, IsTerminal};

const PROMPT: &str = "> ";

/// Where messages come from.
pub(super) enum Lines {
    /// A person, who has an editor with the history of this run.
    Terminal(Box<Editor<Commands, MemHistory>>),
    /// Standard input, line by line.
    Pipe,
}

impl Lines {
    /// The editor where standard input is a terminal. It draws on the terminal itself, so that
    /// standard output holds answers only.
    pub(super) fn open() -> Result<Self, Failure> {
        if !io::stdin().is_terminal() {
            return Ok(Self::Pipe);
        }
        let config = Config::builder().auto_add_history(true).behavior(Behavior::PreferTerm).build();
        let mut editor = Editor::with_history(config, MemHistory::new()).map_err(failed)?;
        editor.set_helper(Some(Commands));
        Ok(Self::Terminal(Box::new(editor)))
    }

    /// The next message or command; `None` at the end.
    pub(super) fn next(&mut self, context: &Context) -> Result<Option<String>, Failure> {
        let editor = match self {
            Self::Terminal(editor) => editor,
            Self::Pipe => {
                let mut line = String::new();
                let read = io::stdin().lock().read_line(&mut line);
                let read = read.map_err(|e| Failure::reading("standard input".as_ref(), e))?;
                return Ok((read > 0).then_some(line));
            }
        };
        loop {
            match editor.readline(PROMPT) {
                Ok(line) => return Ok(Some(line.replace("\\\n", "\n"))),
                Err(ReadlineError::Eof) => return Ok(None),
                Err(ReadlineError::Interrupted) => context.progress.note("Ctrl-D or /exit leaves"),
                Err(error) => return Err(failed(error)),
            }
        }
    }
}

fn failed(error: ReadlineError) -> Failure {
    Failure::new(Exit::Failed, anyhow::Error::new(error).context("reading from the terminal"))
}

/// Completes commands, and lets a message go on where a line ends with a backslash.
pub(super) struct Commands;

impl Helper for Commands {}
impl Highlighter for Commands {}

impl Hinter for Commands {
    type Hint = String;
}

impl Completer for Commands {
    type Candidate = String;

    fn complete(
        &self,
        line: &str,
        at: usize,
        _: &rustyline::Context<'_>,
    ) -> rustyline::Result<(usize, Vec<String>)> {
        Ok((0, completions(&line[..at])))
    }
}

impl Validator for Commands {
    fn validate(&self, typed: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        let goes_on = typed.input().ends_with('\\');
        Ok(if goes_on { ValidationResult::Incomplete } else { ValidationResult::Valid(None) })
    }
}

/// Commands that begin so.
fn completions(typed: &str) -> Vec<String> {
    let named = COMMANDS.iter().map(|(name, _)| name.split(' ').next().unwrap_or(name));
    named.filter(|name| !typed.is_empty() && name.starts_with(typed)).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_completed() {
        assert_eq!(completions("/re"), ["/retry", "/reset"]);
        assert_eq!(completions("/s"), ["/system", "/save"]);
        assert!(
            completions("").is_empty() && completions("/save x").is_empty() && completions("re").is_empty()
        );
    }
}
