#![doc = include_str!("../README.md")]

mod gbnf;
mod grammar;
mod vocabulary;

pub use grammar::{Behind, Grammar};
pub use vocabulary::{MAX_RULE, Rule, RuleError, Vocabulary, spaced};
