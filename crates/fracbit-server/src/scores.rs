//! Logarithms of probabilities: those of the model's own distribution, before penalties, bias,
//! temperature and filters.

use std::collections::VecDeque;

use fracbit_model::eval::log_sum_exp;

/// What stands for minus infinity, which JSON has not.
const LEAST: f64 = -9999.0;

/// A token of a text, with its probability and those of others in its place.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Score {
    pub(crate) token: u32,
    /// Characters of the text before it.
    pub(crate) offset: usize,
    /// `None`: nothing stands before it.
    pub(crate) logprob: Option<f64>,
    /// The likeliest tokens, in their order.
    pub(crate) top: Vec<(u32, f64)>,
}

impl Score {
    /// The score of a token by the logits of its place, with those of `top` others.
    pub(crate) fn of(token: u32, offset: usize, logits: &[f32], top: usize) -> Self {
        let sum = log_sum_exp(logits);
        let logprob = |token: u32| {
            let value = f64::from(logits[token as usize]) - sum;
            if value > LEAST { value } else { LEAST }
        };
        let likeliest = likeliest(logits, top).into_iter().map(|token| (token, logprob(token)));
        Self { token, offset, logprob: Some(logprob(token)), top: likeliest.collect() }
    }
}

/// The tokens with the largest logits, the lower of equal ones first.
fn likeliest(logits: &[f32], count: usize) -> Vec<u32> {
    let before = |a: u32, b: u32| logits[a as usize].total_cmp(&logits[b as usize]).reverse().then(a.cmp(&b));
    let mut top: Vec<u32> = Vec::with_capacity(count + 1);
    for (token, logit) in (0..).zip(logits) {
        let out = top.len() == count && top.last().is_none_or(|&last| *logit <= logits[last as usize]);
        if out || logit.is_nan() {
            continue;
        }
        let at = top.partition_point(|&other| before(other, token).is_lt());
        top.insert(at, token);
        top.truncate(count);
    }
    top
}

/// Scores that wait for their text to be said, which stop texts hold back.
#[derive(Debug)]
pub(crate) struct Scores {
    /// Likeliest tokens beside each.
    top: usize,
    waiting: VecDeque<Score>,
    /// Offsets of the prompt's tokens that are still to come.
    prompt: VecDeque<usize>,
}

impl Scores {
    /// Scores of a text. Where it begins with its prompt, that has its tokens at these offsets.
    pub(crate) fn new(top: usize, prompt: &[u32], mut offsets: VecDeque<usize>) -> Self {
        let first = offsets.pop_front().zip(prompt.first());
        let first = first.map(|(offset, &token)| Score { token, offset, logprob: None, top: Vec::new() });
        Self { top, waiting: first.into_iter().collect(), prompt: offsets }
    }

    /// The next token, of the prompt or else behind so many characters.
    pub(crate) fn push(&mut self, token: u32, logits: &[f32], chars: usize) {
        let offset = self.prompt.pop_front().unwrap_or(chars);
        self.waiting.push_back(Score::of(token, offset, logits, self.top));
    }

    /// The scores of tokens whose text begins within so many characters.
    pub(crate) fn take(&mut self, said: usize) -> Vec<Score> {
        let known = self.waiting.partition_point(|score| score.offset < said);
        self.waiting.drain(..known).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_by_hand() {
        let logits = [1f32, 3.0, 2.0, 3.0, f32::NEG_INFINITY];
        let sum = logits.iter().map(|&l| f64::from(l).exp()).sum::<f64>().ln();
        let score = Score::of(2, 7, &logits, 3);
        let close = |a: f64, b: f64| (a - b).abs() < 1e-12;
        assert!(close(score.logprob.expect("a number"), 2.0 - sum) && score.offset == 7);
        let tokens: Vec<u32> = score.top.iter().map(|top| top.0).collect();
        assert_eq!(tokens, [1, 3, 2]);
        assert!(score.top.iter().all(|&(t, p)| close(p, f64::from(logits[t as usize]) - sum)));
        assert_eq!(score.logprob, Some(score.top[2].1));
        assert_eq!(Score::of(4, 0, &logits, 0).logprob, Some(LEAST));
        assert!(Score::of(4, 0, &logits, 0).top.is_empty());
        // By definition.
        let many: Vec<f32> = (0..500u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 26) as f32).collect();
        let mut all: Vec<u32> = (0..500).collect();
        all.sort_by(|&a, &b| many[b as usize].total_cmp(&many[a as usize]).then(a.cmp(&b)));
        assert_eq!(likeliest(&many, 20), all[..20]);
        assert_eq!(likeliest(&many, 999), all);
    }

    #[test]
    fn scores_come_with_their_text() {
        let mut scores = Scores::new(0, &[5, 6], VecDeque::from([0, 2]));
        scores.push(6, &[0.0; 9], 99);
        scores.push(7, &[0.0; 9], 4);
        scores.push(8, &[0.0; 9], 4);
        let mut take = |said| scores.take(said).iter().map(|s| (s.token, s.offset)).collect::<Vec<_>>();
        assert_eq!(take(0), []);
        assert_eq!(take(3), [(5, 0), (6, 2)]);
        assert_eq!(take(4), []);
        assert_eq!(take(usize::MAX), [(7, 4), (8, 4)]);
        assert_eq!(Scores::new(0, &[5], VecDeque::new()).take(usize::MAX), []);
    }
}
