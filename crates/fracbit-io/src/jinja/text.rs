//! Text as Python sees it, a row of characters, each with a mark of where it came from.
//!
//! A unit holds a code point in its lower 21 bits and the marks above them. Slices, joints and
//! replacements of texts carry the marks along without knowing of them, so that in the rendered
//! prompt every character of a message can be told from those of the template.

use std::sync::Arc;

/// A character that came with the request: from a message or a variable.
pub(crate) const REQUEST: u32 = 1 << 31;
/// With it: from what the assistant said.
pub(crate) const ASSISTANT: u32 = 1 << 30;
const CHARACTER: u32 = (1 << 21) - 1;

/// A text.
#[derive(Clone, Debug, Default)]
pub(super) struct Text {
    units: Arc<[u32]>,
    /// Safe in a page ([`super::markup`]).
    pub(super) safe: bool,
}

impl Text {
    /// The same text, safe or not.
    pub(super) fn with_safety(mut self, safe: bool) -> Self {
        self.safe = safe;
        self
    }
}

impl std::ops::Deref for Text {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        &self.units
    }
}

impl<T: Into<Arc<[u32]>>> From<T> for Text {
    fn from(units: T) -> Self {
        Self { units: units.into(), safe: false }
    }
}

/// The character of a unit.
pub(crate) fn character(unit: u32) -> char {
    char::from_u32(unit & CHARACTER).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// The units of a text, all with the same marks.
pub(crate) fn units(text: &str, marks: u32) -> Vec<u32> {
    text.chars().map(|c| c as u32 | marks).collect()
}

pub(super) fn text(s: &str) -> Text {
    units(s, 0).into()
}

pub(crate) fn plain(units: &[u32]) -> String {
    units.iter().map(|&u| character(u)).collect()
}

pub(super) fn same(a: &[u32], b: &[u32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a ^ b) & CHARACTER == 0)
}

pub(super) fn is(a: &[u32], b: &str) -> bool {
    a.iter().map(|&u| character(u)).eq(b.chars())
}

pub(super) fn compare(a: &[u32], b: &[u32]) -> std::cmp::Ordering {
    a.iter().map(|u| u & CHARACTER).cmp(b.iter().map(|u| u & CHARACTER))
}

/// The first place of `needle` at or behind `from`.
pub(super) fn find(hay: &[u32], needle: &[u32], from: usize) -> Option<usize> {
    let last = hay.len().checked_sub(needle.len())?;
    (from..=last).find(|&at| same(&hay[at..at + needle.len()], needle))
}

pub(super) fn rfind(hay: &[u32], needle: &[u32]) -> Option<usize> {
    let last = hay.len().checked_sub(needle.len())?;
    (0..=last).rev().find(|&at| same(&hay[at..at + needle.len()], needle))
}

/// What Python's `isspace` says.
pub(super) fn is_space(unit: u32) -> bool {
    let c = character(unit);
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

/// What a line ends with in `splitlines`.
fn ends_line(unit: u32) -> bool {
    matches!(
        character(unit),
        '\n' | '\r' | '\x0b' | '\x0c' | '\x1c' | '\x1d' | '\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}'
    )
}

/// Which ends of a text.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Ends {
    Left,
    Right,
    Both,
}

/// Without the characters of `chars` (white space where there are none) at its ends.
pub(super) fn strip<'a>(s: &'a [u32], chars: Option<&[u32]>, ends: Ends) -> &'a [u32] {
    let drop = |u: &u32| match chars {
        None => is_space(*u),
        Some(chars) => chars.iter().any(|c| (c ^ u) & CHARACTER == 0),
    };
    let start = if ends == Ends::Right { 0 } else { s.iter().position(|u| !drop(u)).unwrap_or(s.len()) };
    let s = &s[start..];
    let end =
        if ends == Ends::Left { s.len() } else { s.iter().rposition(|u| !drop(u)).map_or(0, |i| i + 1) };
    &s[..end]
}

/// `split`, at most `most` times; at white space where there is no separator.
pub(super) fn split<'a>(s: &'a [u32], separator: Option<&[u32]>, most: Option<usize>) -> Vec<&'a [u32]> {
    let most = most.unwrap_or(usize::MAX);
    let mut out = Vec::new();
    if let Some(separator) = separator {
        let mut from = 0;
        while out.len() < most {
            let Some(at) = find(s, separator, from) else { break };
            out.push(&s[from..at]);
            from = at + separator.len();
        }
        out.push(&s[from..]);
        return out;
    }
    let mut rest = strip(s, None, Ends::Left);
    while !rest.is_empty() {
        if out.len() == most {
            out.push(strip(rest, None, Ends::Right));
            break;
        }
        let end = rest.iter().position(|&u| is_space(u)).unwrap_or(rest.len());
        out.push(&rest[..end]);
        rest = strip(&rest[end..], None, Ends::Left);
    }
    out
}

/// `rsplit`.
pub(super) fn rsplit<'a>(s: &'a [u32], separator: Option<&[u32]>, most: Option<usize>) -> Vec<&'a [u32]> {
    let most = most.unwrap_or(usize::MAX);
    let mut out = Vec::new();
    if let Some(separator) = separator {
        let mut rest = s;
        while out.len() < most {
            let Some(at) = rfind(rest, separator) else { break };
            out.push(&rest[at + separator.len()..]);
            rest = &rest[..at];
        }
        out.push(rest);
    } else {
        let mut rest = strip(s, None, Ends::Right);
        while !rest.is_empty() {
            if out.len() == most {
                // Python leaves what stands before the first word.
                out.push(rest);
                break;
            }
            let start = rest.iter().rposition(|&u| is_space(u)).map_or(0, |i| i + 1);
            out.push(&rest[start..]);
            rest = strip(&rest[..start], None, Ends::Right);
        }
    }
    out.reverse();
    out
}

/// `splitlines`.
pub(super) fn lines(s: &[u32], keep: bool) -> Vec<&[u32]> {
    let mut out = Vec::new();
    let mut from = 0;
    while let Some(len) = s[from..].iter().position(|&u| ends_line(u)) {
        let at = from + len;
        let crlf = character(s[at]) == '\r' && s.get(at + 1).is_some_and(|&u| character(u) == '\n');
        let next = at + if crlf { 2 } else { 1 };
        out.push(&s[from..if keep { next } else { at }]);
        from = next;
    }
    if from < s.len() {
        out.push(&s[from..]);
    }
    out
}

/// `replace`, at most `most` times.
pub(super) fn replace(s: &[u32], old: &[u32], new: &[u32], most: Option<usize>) -> Vec<u32> {
    let most = most.unwrap_or(usize::MAX);
    let mut out = Vec::new();
    let (mut from, mut count) = (0, 0);
    if old.is_empty() {
        for (i, unit) in s.iter().enumerate() {
            if i < most {
                out.extend_from_slice(new);
            }
            out.push(*unit);
        }
        if s.len() < most {
            out.extend_from_slice(new);
        }
        return out;
    }
    while count < most {
        let Some(at) = find(s, old, from) else { break };
        out.extend_from_slice(&s[from..at]);
        out.extend_from_slice(new);
        (from, count) = (at + old.len(), count + 1);
    }
    out.extend_from_slice(&s[from..]);
    out
}

/// Every character by its rule, with its marks.
pub(super) fn map<I: Iterator<Item = char>>(s: &[u32], rule: impl Fn(char) -> I) -> Vec<u32> {
    s.iter().flat_map(|&u| rule(character(u)).map(move |c| c as u32 | (u & !CHARACTER))).collect()
}

pub(super) fn lower(s: &[u32]) -> Vec<u32> {
    map(s, char::to_lowercase)
}

pub(super) fn upper(s: &[u32]) -> Vec<u32> {
    map(s, char::to_uppercase)
}

pub(super) fn capitalize(s: &[u32]) -> Vec<u32> {
    let (first, rest) = s.split_at(s.len().min(1));
    let mut out = upper(first);
    out.extend(lower(rest));
    out
}

/// `str.title`: a letter behind a letter is small, any other is large.
pub(super) fn title(s: &[u32]) -> Vec<u32> {
    let mut out = Vec::new();
    let mut inside = false;
    for unit in s.chunks(1) {
        out.extend(if inside { lower(unit) } else { upper(unit) });
        inside = character(unit[0]).is_alphabetic();
    }
    out
}

/// Filled up to a width; more on the left where both sides get some and `left` is odd.
pub(super) fn pad(s: &[u32], left: usize, right: usize, fill: u32) -> Vec<u32> {
    let mut out = vec![fill; left];
    out.extend_from_slice(s);
    out.resize(out.len() + right, fill);
    out
}

/// Whether `repr` shows a character as it is.
pub(super) fn is_printable(c: char) -> bool {
    // Rust escapes marks that combine as well, which Python prints: those are no controls and have
    // no width of their own.
    c == ' '
        || !c.is_whitespace()
            && (c.is_alphanumeric()
                || c.escape_debug().count() == 1
                || !c.is_control() && is_mark(c)
                || matches!(c, '\\' | '\'' | '"'))
}

fn is_mark(c: char) -> bool {
    matches!(c as u32, 0x300..=0x36f | 0x483..=0x489 | 0x591..=0x5c7 | 0x610..=0x61a | 0x64b..=0x65f | 0x900..=0xdff | 0xe31..=0xe4e
        | 0x1ab0..=0x1aff | 0x1dc0..=0x1dff | 0x20d0..=0x20ff | 0xfe00..=0xfe0f | 0xfe20..=0xfe2f | 0x1f3fb..=0x1f3ff)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_stay_with_their_characters() {
        let mut s = units("ab", 0);
        s.extend(units("Bc", REQUEST));
        let replaced = replace(&s, &units("b", 0), &units("x", 0), None);
        assert_eq!((plain(&replaced).as_str(), replaced[3] & REQUEST), ("axBc", REQUEST));
        let up = upper(&units("ß", REQUEST));
        assert_eq!(up, units("SS", REQUEST));
        assert!(same(&units("B", 0), &s[2..3]) && find(&s, &units("bB", 0), 0) == Some(1));
    }

    #[test]
    fn splits_are_those_of_python() {
        let show = |v: Vec<&[u32]>| v.into_iter().map(plain).collect::<Vec<_>>().join("|");
        let (s, comma) = (units(" a,b ,, c ", 0), units(",", 0));
        assert_eq!(show(split(&s, Some(&comma), None)), " a|b || c ");
        assert_eq!(show(split(&s, Some(&comma), Some(1))), " a|b ,, c ");
        assert_eq!(show(rsplit(&s, Some(&comma), Some(1))), " a,b ,| c ");
        let s = units("  a  b c ", 0);
        assert_eq!(show(split(&s, None, None)), "a|b|c");
        assert_eq!(show(split(&s, None, Some(1))), "a|b c");
        assert_eq!(show(rsplit(&s, None, Some(1))), "  a  b|c");
        assert_eq!(show(lines(&units("a\r\nb\n\nc\n", 0), false)), "a|b||c");
        assert_eq!(plain(&replace(&units("ab", 0), &[], &units("-", 0), None)), "-a-b-");
        assert_eq!(plain(&title(&units("it's a2b", 0))), "It'S A2B");
    }
}
