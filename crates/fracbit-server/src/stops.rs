//! Texts that end a text.

use std::ops::Range;

/// Looks for stop texts in a text that comes in pieces, and holds back what may be the beginning of
/// one. Parts of the text may be hidden, such as special tokens: they are looked at and not said.
#[derive(Debug)]
pub(crate) struct Stops {
    stops: Vec<String>,
    /// The one that was met.
    met: Option<String>,
    held: String,
    /// Parts of `held`, in order.
    hidden: Vec<Range<usize>>,
}

impl Stops {
    /// Empty texts, which stand everywhere, do not count.
    pub(crate) fn new(mut stops: Vec<String>) -> Self {
        stops.retain(|stop| !stop.is_empty());
        Self { stops, met: None, held: String::new(), hidden: Vec::new() }
    }

    /// What can be said now that `piece` has come, and whether that was all: a stop text follows.
    pub(crate) fn push(&mut self, piece: &str) -> (String, bool) {
        self.held.push_str(piece);
        let found = self.stops.iter().filter_map(|stop| Some((self.held.find(stop)?, stop)));
        if let Some((at, stop)) = found.min_by_key(|(at, _)| *at) {
            self.met = Some(stop.clone());
            let said = self.say(at);
            self.held.clear();
            self.hidden.clear();
            return (said, true);
        }
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let first = self.held.len().saturating_sub(longest);
        let begins = |&at: &usize| {
            self.held.is_char_boundary(at) && self.stops.iter().any(|stop| stop.starts_with(&self.held[at..]))
        };
        let keep = (first..self.held.len()).find(begins).unwrap_or(self.held.len());
        (self.say(keep), false)
    }

    /// The same of a piece that is not said.
    pub(crate) fn push_hidden(&mut self, piece: &str) -> (String, bool) {
        let start = self.held.len();
        self.hidden.push(start..start + piece.len());
        self.push(piece)
    }

    /// Takes the text before `end`, without what is hidden.
    fn say(&mut self, end: usize) -> String {
        let (mut said, mut from) = (String::new(), 0);
        for hidden in &self.hidden {
            let start = hidden.start.min(end);
            said.push_str(&self.held[from..start]);
            from = hidden.end.min(end);
        }
        said.push_str(&self.held[from..end]);
        self.held.drain(..end);
        self.hidden.retain_mut(|hidden| {
            *hidden = hidden.start.saturating_sub(end)..hidden.end.saturating_sub(end);
            hidden.start < hidden.end
        });
        said
    }

    /// The stop text that was met, if one was.
    pub(crate) fn met(&mut self) -> Option<String> {
        self.met.take()
    }

    /// What was held back, when nothing more comes.
    pub(crate) fn finish(&mut self) -> String {
        self.say(self.held.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (Vec<String>, bool) {
        let mut found = Stops::new(stops.iter().map(ToString::to_string).collect());
        let mut said = Vec::new();
        for piece in pieces {
            let (text, end) = found.push(piece);
            said.push(text);
            if end {
                return (said, true);
            }
        }
        said.push(found.finish());
        (said, false)
    }

    #[test]
    fn pieces_pass_until_a_stop() {
        assert_eq!(run(&[], &["a", "b"]).0.concat(), "ab");
        assert_eq!(run(&[""], &["a", "b"]), (vec!["a".into(), "b".into(), String::new()], false));
        // Within a piece, across pieces, and the earliest of several.
        assert_eq!(run(&["END"], &["one END two"]), (vec!["one ".into()], true));
        assert_eq!(
            run(&["END"], &["one E", "N", "D"]),
            (vec!["one ".into(), String::new(), String::new()], true)
        );
        assert_eq!(run(&["c", "b"], &["abc"]), (vec!["a".into()], true));
        let mut found = Stops::new(vec!["c".into(), "b".into()]);
        found.push("abc");
        assert_eq!((found.met().as_deref(), found.met()), (Some("b"), None));
        // What looked like a stop and was none.
        assert_eq!(run(&["END"], &["one E", "Nd"]).0, ["one ", "ENd", ""]);
        assert_eq!(run(&["END"], &["EEN"]).0, ["E", "EN"]);
        assert_eq!(run(&["aab"], &["a", "a", "a", "b"]).0.concat(), "a");
        // Characters of several bytes.
        assert_eq!(run(&["é!"], &["caf", "é", "é", "!"]).0.concat(), "café");
    }

    #[test]
    fn cuts_do_not_matter() {
        let (text, stops) = ("abcabdabcéabcabe", ["abe", "éb", "bcx"]);
        let ends: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
        for &a in &ends {
            for &b in ends.iter().filter(|&&b| b >= a) {
                let (said, end) = run(&stops, &[&text[..a], &text[a..b], &text[b..]]);
                assert_eq!((said.concat().as_str(), end), ("abcabdabcéabc", true), "{a} {b}");
            }
        }
    }

    #[test]
    fn what_is_hidden_is_looked_at_and_not_said() {
        // (piece, hidden) of a text with special tokens.
        type Case = (&'static [&'static str], &'static [(&'static str, bool)], &'static str, bool);
        let cases: [Case; 6] = [
            (&["<e>"], &[("ab", false), ("<e>", true), ("cd", false)], "ab", true),
            (&["x"], &[("ab", false), ("<e>", true), ("cd", false)], "abcd", false),
            (&["b<e>c"], &[("ab", false), ("<e>", true), ("cd", false)], "a", true),
            (&["<e>cx"], &[("ab", false), ("<e>", true), ("cd", false), ("<e>", true)], "abcd", false),
            (
                &["<e><e>"],
                &[("<e>", true), ("a", false), ("<e>", true), ("<e>", true), ("b", false)],
                "a",
                true,
            ),
            (&["e>c"], &[("a<", false), ("e>", true), ("d", false)], "a<d", false),
        ];
        for (stops, pieces, want, ended) in cases {
            let mut found = Stops::new(stops.iter().map(ToString::to_string).collect());
            let (mut said, mut end) = (String::new(), false);
            for (piece, hidden) in pieces {
                let (text, stopped) = if *hidden { found.push_hidden(piece) } else { found.push(piece) };
                said += &text;
                end = stopped;
                if end {
                    break;
                }
            }
            said += &found.finish();
            assert_eq!((said.as_str(), end), (want, ended), "{stops:?} {pieces:?}");
        }
    }
}
