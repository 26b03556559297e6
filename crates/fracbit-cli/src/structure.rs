//! What a text should be.

use crate::{
    failure::{Exit, Failure},
    files,
    generate::Words,
};
use clap::Args;
use fracbit_grammar::{Rule, Vocabulary};
use fracbit_model::Sampler;
use std::path::{Path, PathBuf};

/// A rule for the text, one at most.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Structure of the text")]
pub(crate) struct RuleArgs {
    /// Write JSON by this schema: a file, or the schema itself, which begins with `{`.
    #[arg(long, value_name = "FILE|SCHEMA", conflicts_with_all = ["grammar", "regex"])]
    json_schema: Option<String>,
    /// Write what this grammar derives from `start`; a file in the notation of Lark.
    #[arg(long, value_name = "FILE", conflicts_with = "regex")]
    grammar: Option<PathBuf>,
    /// Write what this regular expression matches.
    #[arg(long, value_name = "REGEX", allow_hyphen_values = true)]
    regex: Option<String>,
}

impl RuleArgs {
    /// The rule, and the option that it stands in.
    pub(crate) fn rule(&self) -> Result<Option<(&'static str, Rule)>, Failure> {
        if let Some(schema) = &self.json_schema {
            let inline = schema.trim_start().starts_with('{');
            let text = if inline { schema.clone() } else { files::read_text(Path::new(schema))? };
            let schema = serde_json::from_str(&text).map_err(|error| {
                refused("--json-schema", format_args!("should be a JSON schema: {error}"))
            })?;
            return Ok(Some(("--json-schema", Rule::Json(schema))));
        }
        if let Some(path) = &self.grammar {
            return Ok(Some(("--grammar", Rule::Lark(files::read_text(path)?))));
        }
        Ok(self.regex.clone().map(|regex| ("--regex", Rule::Regex(regex))))
    }
}

fn refused(option: &str, rule: impl std::fmt::Display) -> Failure {
    Failure::new(Exit::Usage, anyhow::Error::msg(format!("`{option}` {rule}")))
}

/// The same sampler, which follows a rule of [`RuleArgs::rule`].
pub(crate) fn follow(
    sampler: Sampler,
    rule: Option<(&'static str, Rule)>,
    words: &Words,
) -> Result<Sampler, Failure> {
    let Some((option, rule)) = rule else { return Ok(sampler) };
    let grammar = Vocabulary::new(&words.tokenizer, words.vocabulary, &words.end_tokens)
        .and_then(|vocabulary| vocabulary.grammar(&rule))
        .map_err(|error| refused(option, error))?;
    Ok(sampler.constrained(Box::new(grammar)))
}
