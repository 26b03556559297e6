//! From a tokenizer's tokens and a rule to a grammar.

use std::fmt;
use std::sync::Arc;
use std::thread;

use fracbit_io::Tokenizer;
use llguidance::api::{GrammarWithLexer, ParserLimits, TopLevelGrammar};
use llguidance::toktrie::{ApproximateTokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory, regex_to_lark};
use serde_json::{Value, json};

use crate::gbnf;
use crate::grammar::Grammar;

/// Most bytes of a rule.
pub const MAX_RULE: usize = 256 << 10;
/// Most lines of a grammar: each may refer to the next, and what that takes grows with the square
/// of their number (20 s for 9000, measured).
const MAX_LINES: usize = 2000;
/// Stack of the thread that makes a rule ready: rules may refer to each other in long chains, which
/// `llguidance` follows by recursion. Only what is used takes memory.
pub(crate) const STACK: usize = 256 << 20;
/// What stands between the parts of JSON. Any number of spaces would let a model that has nothing
/// to say write spaces for ever.
const SPACE: &str = r"\x20|\x0A[\x20\x09]{0,16}";

/// What a text should be.
#[derive(Clone, Debug, PartialEq)]
pub enum Rule {
    /// JSON that a schema describes.
    Json(Value),
    /// What a regular expression matches, all of it.
    Regex(String),
    /// One of some texts.
    Choice(Vec<String>),
    /// What a grammar in the notation of Lark derives from `start`.
    Lark(String),
    /// What a grammar in the notation of llama.cpp (GBNF) derives from `root`.
    Gbnf(String),
}

/// A rule that no grammar can be made of.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RuleError {
    /// More bytes than [`MAX_RULE`].
    #[error("should have at most {MAX_RULE} bytes, has {0}")]
    Size(usize),
    /// A grammar of more lines than may be.
    #[error("should have at most {MAX_LINES} lines, has {0}")]
    Lines(usize),
    /// What is wrong with it, or not supported of it.
    #[error("cannot be followed: {0}")]
    Rule(String),
    /// The tokenizer has no end token that the model knows.
    #[error("wants a model with an end token, and this one has none")]
    NoEnd,
    /// No thread.
    #[error("could not be read: {0}")]
    Thread(#[from] std::io::Error),
}

/// The tokens of a model as bytes. Made once, which takes some tenths of a second for a hundred
/// thousand tokens; cheap to clone.
#[derive(Clone)]
pub struct Vocabulary(Arc<ParserFactory>);

impl fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tokens = self.0.tok_env().tok_trie().vocab_size();
        f.debug_struct("Vocabulary").field("tokens", &tokens).finish_non_exhaustive()
    }
}

impl Vocabulary {
    /// The tokens of `tokenizer` below `tokens`, the rows of the model's head. Where a rule lets a
    /// text end, one of `ends` may come, and nothing else ever is an end.
    ///
    /// # Errors
    /// [`RuleError::NoEnd`]; [`RuleError::Rule`] where `llguidance` refuses the tokens.
    pub fn new(tokenizer: &Tokenizer, tokens: usize, ends: &[u32]) -> Result<Self, RuleError> {
        let count = u32::try_from(tokens).unwrap_or(u32::MAX);
        let ends: Vec<u32> = ends.iter().copied().filter(|&end| end < count).collect();
        let Some(&end) = ends.first() else { return Err(RuleError::NoEnd) };
        // The mark of tokens that no text spells.
        const MARK: u8 = TokTrie::SPECIAL_TOKEN_MARKER;
        let spelled = |token| match tokenizer.special_text(token) {
            Some(text) => [&[MARK], text.as_bytes()].concat(),
            None if ends.contains(&token) => format!("\u{0}{token}").into_bytes(),
            None => tokenizer.token_bytes(token).unwrap_or_default(),
        };
        let words: Vec<Vec<u8>> = (0..count).map(spelled).collect();
        let trie = TokTrie::from(&TokRxInfo::new(count, end), &words).with_eos_tokens(&ends);
        let tokens = Arc::new(ApproximateTokEnv::new(trie));
        let factory = ParserFactory::new_simple(&(tokens as _));
        let mut factory = factory.map_err(|error| RuleError::Rule(error.to_string()))?;
        factory.quiet();
        // A step may take some milliseconds, a grammar some tens of megabytes.
        *factory.limits_mut() = ParserLimits {
            max_lexer_states: 50_000,
            step_lexer_fuel: 100_000,
            verbose_errors: false,
            ..ParserLimits::default()
        };
        Ok(Self(Arc::new(factory)))
    }

    /// The grammar of a rule, at its beginning.
    ///
    /// # Errors
    /// [`RuleError`].
    pub fn grammar(&self, rule: &Rule) -> Result<Grammar, RuleError> {
        let size = match rule {
            Rule::Json(schema) => schema.to_string().len(),
            Rule::Regex(text) | Rule::Lark(text) | Rule::Gbnf(text) => text.len(),
            Rule::Choice(texts) => texts.iter().map(String::len).sum(),
        };
        if size > MAX_RULE {
            return Err(RuleError::Size(size));
        }
        if let Rule::Lark(grammar) | Rule::Gbnf(grammar) = rule {
            let lines = grammar.lines().count();
            if lines > MAX_LINES {
                return Err(RuleError::Lines(lines));
            }
        }
        let written = || -> Result<_, RuleError> {
            Ok(match rule {
                Rule::Json(schema) => GrammarWithLexer::from_json_schema(spaced(schema.clone())),
                Rule::Regex(regex) => {
                    GrammarWithLexer::from_lark(format!("start: /{}/", regex_to_lark(regex, "")))
                }
                Rule::Choice(texts) => GrammarWithLexer::from_lark(choice(texts)?),
                Rule::Lark(grammar) => GrammarWithLexer::from_lark(grammar.clone()),
                Rule::Gbnf(grammar) => {
                    GrammarWithLexer::from_lark(gbnf::lark(grammar).map_err(RuleError::Rule)?)
                }
            })
        };
        let make = || -> Result<_, RuleError> {
            let parser = self.0.create_parser(TopLevelGrammar::from_grammar(written()?));
            let mut matcher = Matcher::new(parser);
            // A rule that nothing fits is told here; an error stays in the matcher.
            let _ = matcher.compute_mask_or_eos();
            Ok(matcher)
        };
        let matcher = thread::scope(|scope| {
            let made = thread::Builder::new().stack_size(STACK).spawn_scoped(scope, make)?;
            made.join().map_err(|_| RuleError::Rule("reading it failed".to_owned()))?
        })?;
        match matcher.get_error() {
            None => Ok(Grammar::new(matcher)),
            Some(error) if error.starts_with("NoExtension") => {
                Err(RuleError::Rule("no text fits it".to_owned()))
            }
            Some(error) => Err(RuleError::Rule(said(&error))),
        }
    }
}

/// A schema with what may stand between the parts of its JSON, unless it says so itself.
///
/// The schema of a value inside a grammar (`%json`) should have this, too.
#[must_use]
pub fn spaced(mut schema: Value) -> Value {
    if let Some(members) = schema.as_object_mut() {
        members.entry("x-guidance").or_insert_with(|| json!({ "whitespace_pattern": SPACE }));
    }
    schema
}

/// A grammar of some texts.
fn choice(texts: &[String]) -> Result<String, RuleError> {
    if texts.is_empty() {
        return Err(RuleError::Rule("there should be at least one text".to_owned()));
    }
    let texts: Vec<String> = texts.iter().map(|text| Value::from(text.as_str()).to_string()).collect();
    Ok(format!("start: {}", texts.join(" | ")))
}

/// What `llguidance` says, without traces of its own.
pub(crate) fn said(error: &str) -> String {
    let error = error.split("\n<").next().unwrap_or(error);
    let mut said: String = error.chars().take(400).collect();
    if said.len() < error.len() {
        said.push_str("...");
    }
    said.trim().to_owned()
}
