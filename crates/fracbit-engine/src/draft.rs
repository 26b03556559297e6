//! Guessing what comes next from what came before.
//!
//! Texts repeat themselves: names, code, passages that a summary or an edit takes over. Where the
//! last tokens stood before, what followed them then is a draft of what follows now (Yang et al.
//! 2023, "Inference with Reference", arXiv 2304.04487). The model runs a draft together with the
//! one token that it must run anyway, and expands or reads every matrix once for all of them; how
//! much of a draft was right shows afterwards (Leviathan et al. 2023, arXiv 2211.17192). Every
//! token is still picked from the logits of its own position, by the same sampler in the same
//! order: a row's arithmetic does not depend on its neighbours, so drafts change the time that a
//! text takes and nothing else.
//!
//! A draft that is wrong costs time. So the share of right guesses is kept by length of the match,
//! from every token, drafted or not, and a draft is as long as its last token still pays.

use std::time::Duration;

/// Most tokens of a draft: with the token that is run anyway, as many rows as kernels take in their
/// way for few (`fracbit_kernels::PANEL_FROM` less one).
pub(crate) const MOST: usize = 7;
/// Matches at least this long count alike.
const LONG: usize = 8;
/// What the last token of a draft should be worth, in steps of one token. With AVX-512 and AMX a
/// token more costs .04 to .31 of a step (eight sequences in `docs/lab/2026-11-speed-intel.md`),
/// and in prefill up to .45 where weights are expanded in no time (`nuq-4` with AVX2).
const COST: f32 = 0.35;
/// Share of the news in the rates.
const NEWS: f32 = 1.0 / 16.0;

/// A text and how well it foretells itself.
#[derive(Clone, Debug)]
pub(crate) struct Drafter {
    text: Vec<u32>,
    /// Share of first guesses that were right, by length of the match less one.
    rates: [f32; LONG],
    /// Where what followed the last match begins, and its length less one.
    found: Option<(usize, usize)>,
}

impl Drafter {
    /// A text to be continued.
    #[must_use]
    pub(crate) fn new(text: Vec<u32>) -> Self {
        // What a match is worth before anything is known.
        let rates = std::array::from_fn(|i| [0.1, 0.2, 0.4, 0.6][i.min(3)]);
        let mut new = Self { text, rates, found: None };
        new.look();
        new
    }

    /// Room for so many tokens more.
    pub(crate) fn reserve(&mut self, tokens: usize) {
        self.text.reserve(tokens);
    }

    /// What probably comes next, as many tokens as pay, at most `most`; nothing where the end of
    /// the text is new. What ends with the text is taken to begin again.
    pub(crate) fn draft(&self, most: usize) -> impl Iterator<Item = u32> {
        let (start, rate) =
            self.found.map_or((self.text.len(), 0.0), |(start, len)| (start, self.rates[len]));
        let mut right = rate;
        let mut len = 0;
        while right >= COST && len < most.min(MOST) {
            (right, len) = (right * rate, len + 1);
        }
        self.text[start..].iter().copied().cycle().take(len)
    }

    /// The text goes on with `token`.
    pub(crate) fn push(&mut self, token: u32) {
        if let Some((start, rate)) = self.found {
            let right = f32::from(u8::from(self.text[start] == token));
            self.rates[rate] += (right - self.rates[rate]) * NEWS;
        }
        self.text.push(token);
        self.look();
    }

    /// Finds the longest earlier match of the end of the text, of equal ones the last.
    fn look(&mut self) {
        self.found = None;
        let Some((last, before)) = self.text.split_last() else { return };
        let mut best = 0;
        for at in (0..before.len()).rev() {
            if before[at] != *last {
                continue;
            }
            let pairs = before[..at].iter().rev().zip(before.iter().rev());
            let len = 1 + pairs.take(LONG - 1).take_while(|(a, b)| a == b).count();
            if len > best {
                (best, self.found) = (len, Some((at + 1, len - 1)));
                if best == LONG {
                    return;
                }
            }
        }
    }
}

/// What drafts by fewer planes cost and are worth, from what was measured of this text: times
/// decide how long drafts are, never which tokens come.
#[derive(Clone, Debug)]
pub(crate) struct Pace {
    /// Seconds of a step of one token, of a step of a draft, and of each token more in a step.
    step: Option<f64>,
    draft: Option<f64>,
    row: Option<f64>,
    /// Share of guesses that were right, where those before them were.
    right: f64,
    /// Steps since the last draft, and after how many of them one is tried again.
    idle: usize,
    again: usize,
    /// Steps without a draft, and steps with one since the last of those.
    plain: usize,
    busy: usize,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            step: None,
            draft: None,
            row: None,
            right: 0.8,
            idle: 0,
            again: Self::AGAIN[0],
            plain: 0,
            busy: 0,
        }
    }
}

impl Pace {
    /// Steps without a draft after which one is tried again: of the first trial, and the most.
    /// Every trial in vain doubles them, for it costs up to two steps.
    const AGAIN: [usize; 2] = [64, 4096];
    /// Steps without a draft before one is tried: the first does not count, since memory was cold.
    const FIRST: usize = 4;
    /// How many times the tokens a second of steps without drafts should be expected: what is
    /// measured is off by some percent, and where drafts seem to win less they lose as often.
    const WORTH: f64 = 1.05;
    /// Steps with drafts behind which one goes without, to see what that takes by now: an estimate
    /// that is too long would make all drafts seem to pay.
    const BETWEEN: usize = 16;

    /// Times belong to a precision.
    pub(crate) fn forget_times(&mut self) {
        *self = Self { right: self.right, ..Self::default() };
    }

    fn learn(known: &mut Option<f64>, news: f64) {
        *known = Some(known.map_or(news, |known| known + (news - known) / 8.0));
    }

    /// A guess was right or not.
    pub(crate) fn judge(&mut self, right: bool) {
        self.right += (f64::from(u8::from(right)) - self.right) / 16.0;
    }

    /// A step of a draft took so long.
    pub(crate) fn drafted(&mut self, time: Duration) {
        Self::learn(&mut self.draft, time.as_secs_f64());
        self.idle = 0;
    }

    /// A step with so many guesses took so long.
    pub(crate) fn ran(&mut self, guesses: usize, time: Duration) {
        self.idle += 1;
        let time = time.as_secs_f64();
        (self.plain, self.busy) =
            if guesses == 0 { (self.plain + 1, 0) } else { (self.plain, self.busy + 1) };
        match self.step {
            Some(step) if guesses > 0 => {
                #[expect(clippy::cast_precision_loss, reason = "at most seven")]
                Self::learn(&mut self.row, (time - step).max(0.0) / guesses as f64);
            }
            _ if guesses == 0 && self.plain > 1 => Self::learn(&mut self.step, time),
            _ => {}
        }
        if guesses > 0 {
            let [first, most] = Self::AGAIN;
            self.again = if self.pays() > 0 { first } else { most.min(2 * self.again) };
        }
    }

    /// Tokens of the next draft: those with which most tokens a second are expected.
    pub(crate) fn length(&self) -> usize {
        if self.step.is_none() || self.plain < Self::FIRST || self.busy >= Self::BETWEEN {
            return 0;
        }
        if self.draft.is_none() || self.row.is_none() {
            return 1;
        }
        let best = self.pays();
        if best == 0 && self.idle >= self.again { 1 } else { best }
    }

    /// Tokens of a draft with which most tokens a second are expected, as far as times are known.
    fn pays(&self) -> usize {
        let (Some(step), Some(draft), Some(row)) = (self.step, self.draft, self.row) else { return 0 };
        let (mut best, mut rate) = (0, Self::WORTH / step);
        let (mut tokens, mut time, mut right) = (1.0, step, 1.0);
        for length in 1..=MOST {
            right *= self.right;
            (tokens, time) = (tokens + right, time + draft + row);
            if tokens / time > rate {
                (best, rate) = (length, tokens / time);
            }
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By definition: all matches, the longest, of equal ones the last.
    fn oracle(text: &[u32]) -> Option<(usize, usize)> {
        let common =
            |end: usize| (0..end).take_while(|i| text[end - 1 - i] == text[text.len() - 1 - i]).count();
        let all = (1..text.len()).map(|end| (end, common(end).min(LONG))).filter(|(_, len)| *len > 0);
        all.max_by_key(|&(end, len)| (len, end)).map(|(end, len)| (end, len - 1))
    }

    #[test]
    fn finds_the_longest_and_last_match() {
        for words in [1, 2, 3, 7] {
            let mut drafter = Drafter::new(vec![0]);
            let mut state = 1u32;
            for _ in 0..200 {
                state = state.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
                drafter.push((state >> 16) % words);
                assert_eq!(drafter.found, oracle(&drafter.text), "{:?}", drafter.text);
            }
        }
        assert_eq!(Drafter::new(Vec::new()).draft(MOST).count(), 0);
        assert_eq!(Drafter::new(vec![5]).draft(MOST).count(), 0);
    }

    #[test]
    fn drafts_grow_where_they_are_right_and_end_where_they_are_not() {
        for period in [1, 2, 5, 12] {
            let song: Vec<u32> = (0..period).collect();
            let mut drafter = Drafter::new(song.clone());
            for (round, i) in (0..80).flat_map(|round| (0..song.len()).map(move |i| (round, i))) {
                let draft: Vec<u32> = drafter.draft(MOST).collect();
                assert!(draft.iter().zip(song.iter().cycle().skip(i)).all(|(a, b)| a == b), "{draft:?}");
                assert!(round < 50 || draft.len() == MOST, "{period} {draft:?}");
                drafter.push(song[i]);
            }
            assert_eq!(drafter.draft(2).count(), 2);
        }
        // Two words that follow each other by chance.
        let mut drafter = Drafter::new(vec![0]);
        let (mut state, mut drafted) = (1u32, 0);
        for i in 0..4000 {
            state = state.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
            drafted += usize::from(i >= 1000 && drafter.draft(MOST).next().is_some());
            drafter.push((state >> 16) % 50);
        }
        assert!(drafted < 30, "{drafted} drafts of noise");
    }

    #[test]
    fn drafts_by_planes_are_as_long_as_they_pay() {
        let ms = |ms: f64| Duration::from_secs_f64(ms / 1e3);
        let paced = |draft: f64, row: f64, right: usize| {
            let mut pace = Pace::default();
            pace.ran(0, ms(50.0)); // memory was cold
            for _ in 1..Pace::FIRST {
                assert_eq!(pace.length(), 0, "steps are measured first");
                pace.ran(0, ms(10.0));
            }
            assert_eq!(pace.length(), 1, "then a draft is tried");
            pace.drafted(ms(draft));
            pace.ran(1, ms(10.0 + row));
            (0..400).for_each(|i| pace.judge(i % 10 < right));
            pace
        };
        assert_eq!(paced(2.0, 0.5, 10).length(), MOST, "cheap and right");
        // All guesses right, in steps of 10 ms: 8 tokens in 69.5 and in 77.9 ms.
        assert_eq!(paced(7.0, 1.5, 10).length(), MOST, "15 % more tokens a second");
        assert_eq!(paced(7.0, 2.7, 10).length(), 0, "3 % are less than times are known to");
        let some = paced(3.0, 1.0, 8).length();
        assert!((1..MOST).contains(&some), "{some}");
        let mut dear = paced(9.0, 3.0, 9);
        assert_eq!(dear.length(), 0, "a draft that costs a step");
        // Tried again, more and more rarely, for ever.
        let (mut steps, mut trials) = (0, Vec::new());
        while steps < 20_000 {
            let guesses = dear.length();
            if guesses > 0 {
                trials.push(steps);
                dear.drafted(ms(9.0));
            }
            dear.ran(guesses, ms(10.0 + 3.0 * guesses as f64));
            steps += 1;
        }
        let between: Vec<usize> = trials.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(trials[0] <= 2 * Pace::AGAIN[0] && between.is_sorted(), "{trials:?}");
        assert!(between.iter().all(|&steps| steps <= Pace::AGAIN[1] + 1), "{trials:?}");
        assert!((7..12).contains(&trials.len()), "{trials:?}");
        dear.forget_times();
        assert_eq!(dear.length(), 0);
        // What a step takes is looked at again and again: here it has become shorter.
        let (mut slow, mut late) = (paced(3.0, 1.0, 8), 0);
        for round in 0..1000 {
            let guesses = slow.length();
            (0..guesses).for_each(|_| slow.drafted(ms(3.0)));
            slow.ran(guesses, ms(4.0 + guesses as f64));
            late += usize::from(round >= 800 && guesses > 0);
        }
        assert!(late < 10, "{late} drafts of 3 ms for steps of 4 ms");
    }
}
