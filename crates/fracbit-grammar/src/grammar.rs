//! Grammars on their way through a text.

use std::fmt;

use fracbit_model::{Constraint, Error};
use llguidance::Matcher;

use crate::vocabulary::said;

/// A rule at some place of a text; see [`Vocabulary::grammar`](crate::Vocabulary::grammar).
#[derive(Clone)]
pub struct Grammar(Matcher);

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Grammar").field(&self.0.stop_reason()).finish()
    }
}

impl Grammar {
    pub(crate) fn new(matcher: Matcher) -> Self {
        Self(matcher)
    }

    /// A rule that begins behind one of `openers`: until then, everything may come. When the text
    /// that follows is complete, it is so `again`, or else the whole text is done.
    #[must_use]
    pub fn behind(self, openers: Vec<u32>, again: bool) -> Behind {
        Behind { openers, again, begun: None, first: self }
    }
}

fn error(error: impl fmt::Display) -> Error {
    Error::Constraint(said(&error.to_string()))
}

impl Constraint for Grammar {
    fn mask(&mut self, logits: &mut [f32]) -> Result<(), Error> {
        let mask = self.0.compute_mask_or_eos().map_err(error)?;
        let known = mask.len().min(logits.len());
        logits[known..].fill(f32::NEG_INFINITY);
        for (logits, &allowed) in logits[..known].chunks_mut(32).zip(mask.as_slice()) {
            match allowed {
                0 => logits.fill(f32::NEG_INFINITY),
                u32::MAX => {}
                _ => {
                    let barred = (0..).zip(logits).filter(|(bit, _)| allowed >> bit & 1 == 0);
                    barred.for_each(|(_, logit): (u32, _)| *logit = f32::NEG_INFINITY);
                }
            }
        }
        Ok(())
    }

    fn push(&mut self, token: u32) -> Result<(), Error> {
        self.0.consume_token(token).map_err(error)
    }

    fn valid(&mut self, tokens: &[u32]) -> usize {
        // What it cannot tell is left to the step that picks.
        self.0.validate_tokens(tokens).unwrap_or(0)
    }

    fn complete(&self) -> bool {
        self.0.is_stopped() && !self.0.is_error()
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

/// A rule that begins where the text says so; see [`Grammar::behind`].
#[derive(Clone, Debug)]
pub struct Behind {
    openers: Vec<u32>,
    again: bool,
    /// The rule where the text follows it.
    begun: Option<Grammar>,
    first: Grammar,
}

impl Behind {
    /// Free once more, where the rule is through and that is so.
    fn turn(&mut self) {
        if self.again && self.begun.as_ref().is_some_and(Grammar::complete) {
            self.begun = None;
        }
    }
}

impl Constraint for Behind {
    fn mask(&mut self, logits: &mut [f32]) -> Result<(), Error> {
        self.begun.as_mut().map_or(Ok(()), |grammar| grammar.mask(logits))
    }

    fn push(&mut self, token: u32) -> Result<(), Error> {
        match &mut self.begun {
            Some(grammar) => grammar.push(token)?,
            None if self.openers.contains(&token) => self.begun = Some(self.first.clone()),
            None => {}
        }
        self.turn();
        Ok(())
    }

    fn valid(&mut self, tokens: &[u32]) -> usize {
        if let Some(grammar) = &mut self.begun {
            return grammar.valid(tokens);
        }
        match tokens.iter().position(|token| self.openers.contains(token)) {
            // A draft is short: what stands behind the opener is guessed again.
            Some(opener) => opener + 1,
            None => tokens.len(),
        }
    }

    fn complete(&self) -> bool {
        !self.again && self.begun.as_ref().is_some_and(Grammar::complete)
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}
