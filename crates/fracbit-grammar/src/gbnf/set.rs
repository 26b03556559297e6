//! Sets of characters.

use std::fmt::Write;

/// The gap in the numbers of characters.
const GAP: (u32, u32) = (0xD800, 0xDFFF);

/// Characters, as ranges of their numbers that rise and do not touch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Set(Vec<(u32, u32)>);

impl Set {
    pub(super) fn all() -> Self {
        Self(vec![(0, GAP.0 - 1), (GAP.1 + 1, char::MAX.into())])
    }

    pub(super) fn of(chars: &[char; 2]) -> Self {
        Self::ranges(&[(chars[0], chars[1])])
    }

    pub(super) fn ranges(ranges: &[(char, char)]) -> Self {
        Self::joined(ranges.iter().map(|&(a, b)| (a.into(), b.into())).collect())
    }

    fn joined(mut all: Vec<(u32, u32)>) -> Self {
        all.sort_unstable();
        let mut set: Vec<(u32, u32)> = Vec::new();
        for (first, last) in all {
            match set.last_mut() {
                Some(before) if first <= before.1 + 1 => before.1 = before.1.max(last),
                _ => set.push((first, last)),
            }
        }
        Self(set)
    }

    pub(super) fn complement(&self) -> Self {
        let mut set = Vec::new();
        for (from, to) in Self::all().0 {
            let mut next = from;
            for &(first, last) in self.0.iter().filter(|range| range.1 >= from && range.0 <= to) {
                if first > next {
                    set.push((next, first - 1));
                }
                next = last + 1;
            }
            if next <= to {
                set.push((next, to));
            }
        }
        Self(set)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn meets(&self, other: &Self) -> bool {
        self.0.iter().any(|a| other.0.iter().any(|b| a.0 <= b.1 && b.0 <= a.1))
    }

    /// Takes in others; whether there were new ones.
    pub(super) fn extend(&mut self, other: &Self) -> bool {
        let all = Self::joined([&self.0[..], &other.0[..]].concat());
        let grown = all != *self;
        *self = all;
        grown
    }

    /// Ranges, which is what an operation takes.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// The only character of a set of one.
    pub(super) fn single(&self) -> Option<char> {
        match self.0[..] {
            [(first, last)] if first == last => char::from_u32(first),
            _ => None,
        }
    }

    /// The set as a regular expression.
    pub(super) fn regex(&self) -> String {
        let mut regex = "[".to_owned();
        for &(first, last) in &self.0 {
            // Writing to a text never fails.
            let _ = write!(regex, "\\x{{{first:X}}}-\\x{{{last:X}}}");
        }
        regex + "]"
    }
}
