//! DRY ("don't repeat yourself", as text-generation-webui and llama.cpp have it): a token that
//! would continue a repetition is the less likely, the longer the repetition is.

use super::SampleConfig;
use std::collections::BTreeMap;

/// The usual texts that no repetition goes across: a token that has one of them within is a
/// breaker ([`crate::Adjustments::breakers`]).
pub const DRY_BREAKERS: [&str; 4] = ["\n", ":", "\"", "*"];

/// Takes its penalty from each token of `logits` that continues a repetition in `history`, which
/// none of `breakers` (in order) is part of.
pub(super) fn apply(config: &SampleConfig, breakers: &[u32], logits: &mut [f32], history: &[u32]) {
    let window = if config.dry_window == 0 { history.len() } else { config.dry_window };
    let history = &history[history.len().saturating_sub(window)..];
    for (token, length) in repeated(history, breakers) {
        let Some(beyond) = length.checked_sub(config.dry_allowed_length) else { continue };
        if let Some(logit) = logits.get_mut(token as usize) {
            #[expect(clippy::cast_precision_loss, reason = "a length of a text")]
            let penalty = f64::from(config.dry_base).powf(beyond as f64) * f64::from(config.dry_multiplier);
            // Finite, so that a text where everything repeats still has a most likely token.
            #[expect(clippy::cast_possible_truncation, reason = "clamped")]
            let penalty = penalty.min(1e30) as f32;
            *logit -= penalty;
        }
    }
}

/// Tokens that came behind an earlier copy of the end of `history`, with the length of the longest
/// such copy.
fn repeated(history: &[u32], breakers: &[u32]) -> BTreeMap<u32, usize> {
    let breaks = |token: &u32| breakers.binary_search(token).is_ok();
    let mut lengths = BTreeMap::<u32, usize>::new();
    let most = history.iter().rev().take_while(|token| !breaks(token)).count();
    if most == 0 {
        return lengths;
    }
    // From the end backwards: how much of the end stands at each place (the Z function of the
    // reversed history, in one pass).
    let back = |i: usize| history[history.len() - 1 - i];
    let mut z = vec![0; history.len()];
    let (mut start, mut end) = (0, 0);
    for i in 1..history.len() {
        let mut length = if i < end { z[i - start].min(end - i) } else { 0 };
        while i + length < history.len() && back(length) == back(i + length) {
            length += 1;
        }
        if i + length > end {
            (start, end) = (i, i + length);
        }
        z[i] = length;
        let next = back(i - 1);
        if length > 0 && !breaks(&next) {
            let longest = lengths.entry(next).or_default();
            *longest = (*longest).max(length.min(most));
        }
    }
    lengths
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Sampler;

    #[test]
    fn penalties_by_hand() {
        let dry = SampleConfig {
            dry_multiplier: 0.5,
            dry_base: 2.0,
            dry_allowed_length: 2,
            ..SampleConfig::default()
        };
        let of = |config: &SampleConfig, breakers: &[u32], history: &[u32]| {
            let mut logits = [0.0; 6];
            apply(config, breakers, &mut logits, history);
            logits
        };
        let none = [0.0; 6];
        assert_eq!(of(&dry, &[], &[]), none);
        assert_eq!(of(&dry, &[], &[1, 2, 3, 1]), none, "one token may be repeated");
        assert_eq!(of(&dry, &[], &[1, 2, 3, 1, 2]), [0.0, 0.0, 0.0, -0.5, 0.0, 0.0]);
        assert_eq!(of(&dry, &[], &[4, 1, 2, 3, 0, 4, 1, 2]), [0.0, 0.0, 0.0, -1.0, 0.0, 0.0]);
        // The longer of two copies counts, and each that is long enough has its own token.
        let history = [1, 2, 5, 4, 1, 2, 3, 0, 4, 1, 2];
        assert_eq!(of(&dry, &[], &history), [0.0, 0.0, 0.0, -1.0, 0.0, -0.5]);
        // Nothing goes across a breaker, and breakers are never made less likely.
        assert_eq!(of(&dry, &[1], &[4, 1, 2, 3, 0, 4, 1, 2]), none);
        assert_eq!(of(&dry, &[4], &[4, 1, 2, 3, 0, 4, 1, 2]), [0.0, 0.0, 0.0, -0.5, 0.0, 0.0]);
        assert_eq!(of(&dry, &[3], &[4, 1, 2, 3, 0, 4, 1, 2]), none);
        assert_eq!(of(&dry, &[2], &[4, 1, 2, 3, 0, 4, 1, 2]), none, "the end is one");
        // Only the last tokens are looked at.
        let window = SampleConfig { dry_window: 5, ..dry };
        assert_eq!(of(&window, &[], &[1, 2, 3, 1, 2]), [0.0, 0.0, 0.0, -0.5, 0.0, 0.0]);
        assert_eq!(of(&window, &[], &[1, 2, 3, 0, 1, 2]), none);
        // Tokens beyond the vocabulary, and penalties beyond all numbers.
        assert_eq!(of(&dry, &[], &[1, 2, 9, 1, 2]), none);
        let long = vec![1; 5000];
        assert_eq!(of(&dry, &[], &long)[1], -1e30);
    }

    #[test]
    fn lengths_are_those_of_a_search() {
        let mut state = 1u32;
        let mut chance = |n: u32| {
            state = state.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
            (state >> 16) % n
        };
        for round in 0..400 {
            let kinds = 1 + chance(4);
            let history: Vec<u32> = (0..chance(40)).map(|_| chance(kinds)).collect();
            let breakers: Vec<u32> = (0..kinds).filter(|_| chance(5) == 0).collect();
            let mut want = BTreeMap::<u32, usize>::new();
            for at in 1..history.len() {
                let [earlier, next] = [&history[..at], &history[at..]];
                let same = earlier.iter().rev().zip(history.iter().rev());
                let length = same.take_while(|(a, b)| a == b && !breakers.contains(a)).count();
                if length > 0 && !breakers.contains(&next[0]) {
                    let longest = want.entry(next[0]).or_default();
                    *longest = (*longest).max(length);
                }
            }
            assert_eq!(repeated(&history, &breakers), want, "{round}: {history:?}, {breakers:?}");
        }
    }

    #[test]
    fn samplers_have_it() {
        let config = SampleConfig { dry_multiplier: 1.0, ..SampleConfig::default() };
        let mut sampler = Sampler::new(config).expect("good settings");
        let logits = [1.0, 2.0, 1.5];
        assert_eq!(sampler.sample(&logits, &[0, 2, 1, 0, 2]).expect("a token"), 2);
        let breakers = vec![2];
        let mut broken =
            sampler.clone().adjusted(crate::Adjustments { breakers, ..crate::Adjustments::default() });
        assert_eq!(broken.sample(&logits, &[0, 2, 1, 0, 2]).expect("a token"), 1);
    }
}
