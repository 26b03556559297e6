//! What a request changes of logits before a token is picked from them.

use std::collections::BTreeMap;

/// Changes of the logits of one text, behind the repetition penalty and before all filters. The
/// default changes nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Adjustments {
    /// Tokens at the beginning of the history that were not picked: the prompt. The two penalties
    /// and `min_tokens` do not count them.
    pub prompt: usize,
    /// Taken from the logit of a token that was picked before.
    pub presence_penalty: f32,
    /// Taken from the logit of a token each time that it was picked before.
    pub frequency_penalty: f32,
    /// What is added to the logits of some tokens.
    pub bias: BTreeMap<u32, f32>,
    /// How many tokens are picked before one of `ends` may be.
    pub min_tokens: usize,
    /// The tokens that end the text.
    pub ends: Vec<u32>,
    /// Tokens that no repetition goes across, in order: see
    /// [`crate::SampleConfig::dry_multiplier`].
    pub breakers: Vec<u32>,
}

impl Adjustments {
    /// Whether any logit may change.
    pub(super) fn any(&self) -> bool {
        self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
            || !self.bias.is_empty()
            || self.min_tokens > 0 && !self.ends.is_empty()
    }

    /// Changes one row of logits; tokens beyond it are passed over.
    pub(super) fn apply(&self, logits: &mut [f32], history: &[u32]) {
        let picked = &history[self.prompt.min(history.len())..];
        let mut change = |token: u32, by: f32| {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit += by;
            }
        };
        if self.presence_penalty != 0.0 || self.frequency_penalty != 0.0 {
            let mut counts = BTreeMap::<u32, f32>::new();
            picked.iter().for_each(|&token| *counts.entry(token).or_default() += 1.0);
            for (token, count) in counts {
                change(token, -self.presence_penalty - count * self.frequency_penalty);
            }
        }
        self.bias.iter().for_each(|(&token, &by)| change(token, by));
        if picked.len() < self.min_tokens {
            self.ends.iter().for_each(|&token| change(token, f32::NEG_INFINITY));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Error, SampleConfig, Sampler};

    #[test]
    fn logits_change_as_the_formula_says() {
        let rules = Adjustments {
            prompt: 2,
            presence_penalty: 0.5,
            frequency_penalty: 0.25,
            bias: BTreeMap::from([(1, 3.0), (9, 1.0)]),
            min_tokens: 4,
            ends: vec![3, 8],
            ..Adjustments::default()
        };
        let inf = f32::NEG_INFINITY;
        for (history, want) in [
            (&[][..], [0.0, 3.0, 0.0, inf]),
            (&[0, 0], [0.0, 3.0, 0.0, inf]),
            (&[0, 0, 2, 1, 2], [0.0, 2.25, -1.0, inf]),
            (&[0, 0, 2, 1, 2, 7], [0.0, 2.25, -1.0, 0.0]),
        ] {
            let mut logits = [0.0; 4];
            rules.apply(&mut logits, history);
            assert_eq!(logits, want, "{history:?}");
        }
        assert!(rules.any() && !Adjustments { prompt: 7, ends: vec![1], ..Adjustments::default() }.any());
    }

    #[test]
    fn samplers_pick_from_changed_logits() {
        let greedy = || Sampler::new(SampleConfig::default()).expect("good settings");
        let logits = [1.0, 2.0, 1.9];
        let pick = |rules: Adjustments, history: &[u32]| greedy().adjusted(rules).sample(&logits, history);
        let none = Adjustments::default();
        assert_eq!(pick(none.clone(), &[1]).expect("a token"), 1);
        let presence_penalty = 0.2;
        assert_eq!(pick(Adjustments { presence_penalty, ..none.clone() }, &[1]).expect("a token"), 2);
        assert_eq!(pick(Adjustments { presence_penalty, prompt: 1, ..none.clone() }, &[1]).expect("one"), 1);
        let late = Adjustments { min_tokens: 1, ends: vec![1, 2], ..none.clone() };
        assert_eq!(pick(late.clone(), &[]).expect("a token"), 0);
        assert_eq!(pick(late, &[0]).expect("a token"), 1);
        // Behind the repetition penalty: 2 / 2 + 0.95 against 1.9.
        let config = SampleConfig { repetition_penalty: 2.0, ..SampleConfig::default() };
        let rules = Adjustments { bias: BTreeMap::from([(1, 0.95)]), ..none.clone() };
        let mut both = Sampler::new(config).expect("good settings").adjusted(rules);
        assert_eq!(both.sample(&logits, &[1]).expect("a token"), 1);
        let nothing = Adjustments { min_tokens: 1, ends: vec![0, 1, 2], ..none };
        assert!(matches!(pick(nothing, &[]), Err(Error::NoLogit)));
    }
}
