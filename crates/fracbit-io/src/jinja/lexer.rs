//! From the text of a template to tokens, by the rules of Jinja2's lexer with `trim_blocks` and
//! `lstrip_blocks`.

use std::sync::Arc;

use super::Fail;
use super::text::{Ends, is_space, strip, text, units};

/// What a token is.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Kind {
    /// Text outside of tags.
    Data(Arc<[u32]>),
    /// `{{`, `}}`, `{%`, `%}`.
    VariableBegin,
    VariableEnd,
    BlockBegin,
    BlockEnd,
    Name(Arc<str>),
    Text(Vec<u32>),
    Integer(i64),
    Float(f64),
    Operator(&'static str),
    End,
}

/// A token and the line that it begins in.
#[derive(Clone, Debug)]
pub(super) struct Token {
    pub(super) kind: Kind,
    pub(super) line: usize,
}

/// Longer ones first.
const OPERATORS: [&str; 26] = [
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}", ">", "<",
    "=", ".", ":", "|", ",", ";",
];

struct Lexer<'a> {
    source: &'a [char],
    at: usize,
    line: usize,
    tokens: Vec<Token>,
}

/// All tokens of a template; the last one is [`Kind::End`].
pub(super) fn tokens(source: &str) -> Result<Vec<Token>, Fail> {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let source: Vec<char> = source.strip_suffix('\n').unwrap_or(&source).chars().collect();
    let mut lexer = Lexer { source: &source, at: 0, line: 1, tokens: Vec::new() };
    lexer.run()?;
    let line = lexer.line;
    lexer.tokens.push(Token { kind: Kind::End, line });
    Ok(lexer.tokens)
}

impl Lexer<'_> {
    fn fail(&self, rule: impl Into<String>) -> Fail {
        Fail::at(self.line, format!("syntax error: {}", rule.into()))
    }

    fn looks_at(&self, at: usize, what: &str) -> bool {
        let mut chars = self.source.get(at..).unwrap_or_default().iter();
        what.chars().all(|c| chars.next() == Some(&c))
    }

    fn advance(&mut self, to: usize) {
        let to = to.min(self.source.len());
        self.line += self.source[self.at..to].iter().filter(|&&c| c == '\n').count();
        self.at = to;
    }

    fn push(&mut self, kind: Kind) {
        self.tokens.push(Token { kind, line: self.line });
    }

    /// Whether a line begins at the end of what was read.
    fn run(&mut self) -> Result<(), Fail> {
        let mut line_starts = true;
        while self.at < self.source.len() {
            let begins = |&at: &usize| {
                self.source[at] == '{' && matches!(self.source.get(at + 1), Some('{' | '%' | '#'))
            };
            let Some(tag) = (self.at..self.source.len()).find(begins) else {
                self.data(self.source.len(), false, line_starts, None);
                self.advance(self.source.len());
                return Ok(());
            };
            let kind = self.source[tag + 1];
            let sign = self.source.get(tag + 2).copied().filter(|c| matches!(c, '-' | '+'));
            // `{{+` is a plus of the expression.
            let sign = sign.filter(|&c| c == '-' || kind != '{');
            self.data(tag, kind != '{', line_starts, sign);
            let inside = tag + 2 + usize::from(sign.is_some());
            self.advance(tag);
            line_starts = match kind {
                '#' => self.comment(inside)?,
                '%' => match self.raw_begin(inside) {
                    Some(begin) => self.raw(begin)?,
                    None => {
                        self.push(Kind::BlockBegin);
                        self.advance(inside);
                        self.inside("%}", Kind::BlockEnd)?
                    }
                },
                _ => {
                    self.push(Kind::VariableBegin);
                    self.advance(inside);
                    self.inside("}}", Kind::VariableEnd)?
                }
            };
        }
        Ok(())
    }

    /// The text up to `end`, without the white space that the tag behind it takes.
    fn data(&mut self, end: usize, block: bool, line_starts: bool, sign: Option<char>) {
        let whole: String = self.source[self.at..end].iter().collect();
        let whole = units(&whole, 0);
        let mut kept = &whole[..];
        if sign == Some('-') {
            kept = strip(kept, None, Ends::Right);
        } else if sign.is_none() && block {
            let newline = self.source[self.at..end].iter().rposition(|&c| c == '\n').map_or(0, |i| i + 1);
            if (newline > 0 || line_starts) && whole[newline..].iter().all(|&u| is_space(u)) {
                kept = &whole[..newline];
            }
        }
        if !kept.is_empty() {
            self.push(Kind::Data(kept.into()));
        }
    }

    /// Where a tag ends that begins to end at `at`, and whether a line starts there.
    fn tag_end(&self, at: usize, close: &str) -> Option<(usize, bool)> {
        let block = close != "}}";
        if self.looks_at(at, "-") && self.looks_at(at + 1, close) {
            let mut end = at + 1 + close.len();
            while self.source.get(end).is_some_and(|&c| is_space(c as u32)) {
                end += 1;
            }
            return Some((end, self.source[end - 1] == '\n'));
        }
        if block && self.looks_at(at, "+") && self.looks_at(at + 1, close) {
            return Some((at + 1 + close.len(), false));
        }
        if self.looks_at(at, close) {
            let end = at + close.len();
            let newline = block && self.looks_at(end, "\n");
            return Some((end + usize::from(newline), newline));
        }
        None
    }

    fn comment(&mut self, inside: usize) -> Result<bool, Fail> {
        let found = (inside..self.source.len()).find_map(|at| self.tag_end(at, "#}"));
        let (end, line) = found.ok_or_else(|| self.fail("a comment `{#` should end with `#}`"))?;
        self.advance(end);
        Ok(line)
    }

    fn skip_space(&self, mut at: usize) -> usize {
        while self.source.get(at).is_some_and(|&c| is_space(c as u32)) {
            at += 1;
        }
        at
    }

    /// Where the text of `{% raw %}` begins.
    fn raw_begin(&self, inside: usize) -> Option<usize> {
        let at = self.skip_space(inside);
        let at = self.looks_at(at, "raw").then(|| self.skip_space(at + 3))?;
        if self.looks_at(at, "-%}") {
            return Some(self.skip_space(at + 3));
        }
        self.looks_at(at, "%}").then_some(at + 2)
    }

    fn raw(&mut self, begin: usize) -> Result<bool, Fail> {
        let line_starts = self.source[begin - 1] == '\n';
        for at in begin..self.source.len() {
            if !self.looks_at(at, "{%") {
                continue;
            }
            let sign = self.source.get(at + 2).copied().filter(|c| matches!(c, '-' | '+'));
            let name = self.skip_space(at + 2 + usize::from(sign.is_some()));
            if !self.looks_at(name, "endraw") {
                continue;
            }
            if let Some((end, line)) = self.tag_end(self.skip_space(name + 6), "%}") {
                self.advance(begin);
                self.data(at, true, line_starts, sign);
                self.advance(end);
                return Ok(line);
            }
        }
        Err(self.fail("`{% raw %}` should end with `{% endraw %}`"))
    }

    /// The tokens of a tag, up to its end.
    fn inside(&mut self, close: &str, end: Kind) -> Result<bool, Fail> {
        let mut open: Vec<&str> = Vec::new();
        loop {
            self.advance(self.skip_space(self.at));
            if open.is_empty()
                && let Some((behind, line)) = self.tag_end(self.at, close)
            {
                self.push(end);
                self.advance(behind);
                return Ok(line);
            }
            let Some(&c) = self.source.get(self.at) else {
                return Err(self.fail(format!("a tag should end with `{close}`")));
            };
            let behind = match c {
                '0'..='9' => self.number()?,
                '"' | '\'' => self.string(c)?,
                c if c.is_alphanumeric() || c == '_' => {
                    let word =
                        |at: usize| self.source.get(at).is_some_and(|c| c.is_alphanumeric() || *c == '_');
                    let end = (self.at..).find(|&at| !word(at)).unwrap_or(self.at);
                    let name: String = self.source[self.at..end].iter().collect();
                    self.push(Kind::Name(name.into()));
                    end
                }
                _ => {
                    let Some(operator) = OPERATORS.into_iter().find(|o| self.looks_at(self.at, o)) else {
                        return Err(self.fail(format!("unexpected character `{}`", c.escape_debug())));
                    };
                    match operator {
                        "(" => open.push(")"),
                        "[" => open.push("]"),
                        "{" => open.push("}"),
                        ")" | "]" | "}" if open.pop() != Some(operator) => {
                            return Err(self.fail(format!("unexpected `{operator}`")));
                        }
                        _ => {}
                    }
                    self.push(Kind::Operator(operator));
                    self.at + operator.len()
                }
            };
            self.advance(behind);
        }
    }

    fn number(&mut self) -> Result<usize, Fail> {
        let digits = |mut at: usize, radix: u32| {
            let start = at;
            while self.source.get(at).is_some_and(|&c| {
                c.is_digit(radix)
                    || c == '_' && at > start && self.source.get(at + 1).is_some_and(|c| c.is_digit(radix))
            }) {
                at += 1;
            }
            at
        };
        let written = |range: std::ops::Range<usize>| -> String {
            self.source[range].iter().filter(|&&c| c != '_').collect()
        };
        let too_large = || self.fail("an integer should fit in 64 bits");
        let prefixed = [('b', 2), ('o', 8), ('x', 16)].into_iter().find(|(letter, radix)| {
            self.looks_at(self.at, "0")
                && self.source.get(self.at + 1).is_some_and(|c| c.to_ascii_lowercase() == *letter)
                && self.source.get(self.at + 2).is_some_and(|c| c.is_digit(*radix))
        });
        if let Some((_, radix)) = prefixed {
            let end = digits(self.at + 2, radix);
            let value = i64::from_str_radix(&written(self.at + 2..end), radix).map_err(|_| too_large())?;
            self.push(Kind::Integer(value));
            return Ok(end);
        }
        let mut end = digits(self.at, 10);
        let mut float = false;
        if self.source.get(end) == Some(&'.') && self.source.get(end + 1).is_some_and(char::is_ascii_digit) {
            (end, float) = (digits(end + 1, 10), true);
        }
        if self.source.get(end).is_some_and(|c| matches!(c, 'e' | 'E')) {
            let sign = self.source.get(end + 1).is_some_and(|c| matches!(c, '+' | '-'));
            let from = end + 1 + usize::from(sign);
            if self.source.get(from).is_some_and(char::is_ascii_digit) {
                (end, float) = (digits(from, 10), true);
            }
        }
        let number = written(self.at..end);
        let kind = if float {
            Kind::Float(number.parse().map_err(|_| self.fail("a number should be one"))?)
        } else {
            Kind::Integer(number.parse().map_err(|_| too_large())?)
        };
        self.push(kind);
        Ok(end)
    }

    /// A string: escapes as Python's `unicode-escape` reads them.
    fn string(&mut self, quote: char) -> Result<usize, Fail> {
        let mut out = String::new();
        let mut at = self.at + 1;
        loop {
            let Some(&c) = self.source.get(at) else { return Err(self.fail("a string should end")) };
            at += 1;
            if c == quote {
                self.push(Kind::Text(text(&out).to_vec()));
                return Ok(at);
            }
            if c != '\\' {
                out.push(c);
                continue;
            }
            let Some(&escaped) = self.source.get(at) else { return Err(self.fail("a string should end")) };
            at += 1;
            let digits = match escaped {
                'x' => 2,
                'u' => 4,
                'U' => 8,
                '0'..='7' => {
                    let octal: String =
                        self.source[at - 1..].iter().take(3).take_while(|c| c.is_digit(8)).collect();
                    at += octal.len() - 1;
                    out.extend(u32::from_str_radix(&octal, 8).ok().and_then(char::from_u32));
                    continue;
                }
                'N' => return Err(self.fail("characters should be written out, not by name (`\\N`)")),
                _ => {
                    match escaped {
                        '\n' => {}
                        '\\' | '\'' | '"' => out.push(escaped),
                        'a' => out.push('\x07'),
                        'b' => out.push('\x08'),
                        'f' => out.push('\x0c'),
                        'n' => out.push('\n'),
                        'r' => out.push('\r'),
                        't' => out.push('\t'),
                        'v' => out.push('\x0b'),
                        // Jinja2 writes characters beyond ASCII as escapes before it reads escapes.
                        c if !c.is_ascii() => out.push_str(&match c as u32 {
                            n @ ..0x100 => format!("\\x{n:02x}"),
                            n @ ..0x1_0000 => format!("\\u{n:04x}"),
                            n => format!("\\U{n:08x}"),
                        }),
                        c => out.extend(['\\', c]),
                    }
                    continue;
                }
            };
            let hex: String =
                self.source[at..].iter().take(digits).take_while(|c| c.is_ascii_hexdigit()).collect();
            let value =
                u32::from_str_radix(&hex, 16).ok().filter(|_| hex.len() == digits).and_then(char::from_u32);
            out.push(value.ok_or_else(|| {
                self.fail(format!("`\\{escaped}` should have {digits} digits of a character"))
            })?);
            at += digits;
        }
    }
}
