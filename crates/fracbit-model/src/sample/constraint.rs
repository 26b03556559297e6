//! What may come next in a text, such as a grammar that it should follow.

use std::fmt::Debug;

use crate::Error;

/// Rules for the tokens of one text. A [`Sampler`](crate::Sampler) that has them picks only tokens
/// that they allow, and tells them each that it picks.
pub trait Constraint: Debug + Send {
    /// Makes the logits of tokens that may not come next minus infinity; those at and beyond the
    /// end of what the rules know may not.
    ///
    /// # Errors
    /// [`Error::Constraint`] where the rules cannot be followed further.
    fn mask(&mut self, logits: &mut [f32]) -> Result<(), Error>;

    /// The text goes on with `token`.
    ///
    /// # Errors
    /// [`Error::Constraint`] for a token that may not come next.
    fn push(&mut self, token: u32) -> Result<(), Error>;

    /// How many of `tokens`, from the first on, may come next one after the other.
    fn valid(&mut self, tokens: &[u32]) -> usize;

    /// Whether nothing may come next but an end: the text is done without one.
    fn complete(&self) -> bool;

    /// The same rules at the same place, for a text that goes on in another way.
    fn fork(&self) -> Box<dyn Constraint>;
}

impl Clone for Box<dyn Constraint> {
    fn clone(&self) -> Self {
        self.fork()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{SampleConfig, Sampler};

    /// Numbers that rise by at most two, up to five.
    #[derive(Clone, Debug, Default)]
    struct Rising(Option<u32>);

    impl Rising {
        fn allows(&self, token: u32) -> bool {
            self.0.is_none_or(|last| token > last && token <= last + 2) && token <= 5
        }
    }

    impl Constraint for Rising {
        fn mask(&mut self, logits: &mut [f32]) -> Result<(), Error> {
            let barred = (0..).zip(logits).filter(|(token, _)| !self.allows(*token));
            barred.for_each(|(_, logit)| *logit = f32::NEG_INFINITY);
            Ok(())
        }
        fn push(&mut self, token: u32) -> Result<(), Error> {
            if !self.allows(token) {
                return Err(Error::Constraint(format!("{token} is not next")));
            }
            self.0 = Some(token);
            Ok(())
        }
        fn valid(&mut self, tokens: &[u32]) -> usize {
            let mut at = self.clone();
            tokens.iter().take_while(|token| at.push(**token).is_ok()).count()
        }
        fn complete(&self) -> bool {
            self.0 == Some(5)
        }
        fn fork(&self) -> Box<dyn Constraint> {
            Box::new(self.clone())
        }
    }

    #[test]
    fn samplers_pick_what_is_allowed() {
        let logits = [3.0, 1.0, 2.0, 1.5, 0.0, 1.0, 9.0, 8.0];
        for temperature in [0.0, 0.8] {
            for top_k in [0, 1, 3] {
                let config = SampleConfig { temperature, top_k, seed: 3, ..SampleConfig::default() };
                let mut sampler =
                    Sampler::new(config).expect("good settings").constrained(Box::new(Rising::default()));
                let mut picked = Vec::new();
                while !sampler.complete() {
                    picked.push(sampler.sample(&logits, &picked.clone()).expect("a token"));
                }
                assert!(picked.windows(2).all(|pair| (1..=2).contains(&(pair[1] - pair[0]))), "{picked:?}");
                assert_eq!(picked.last(), Some(&5));
                if temperature == 0.0 || top_k == 1 {
                    assert_eq!(picked, [0, 2, 3, 5]);
                }
                // A sampler beside it goes its own way.
                let mut other = sampler.clone();
                assert!(matches!(other.sample(&logits, &picked), Err(Error::NoLogit)));
            }
        }
        let mut sampler =
            Sampler::new(SampleConfig::default()).expect("good").constrained(Box::new(Rising::default()));
        assert_eq!(sampler.distribution(&logits, &[]).expect("tokens"), [(0, 1.0)]);
        assert_eq!((sampler.valid(&[0, 1, 3, 6]), sampler.valid(&[6])), (3, 0));
    }
}
