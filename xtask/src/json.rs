//! JSON as far as this tool needs it: what cargo prints is read, an SBOM is written.

use std::fmt::Write as _;

/// A JSON value. Maps keep their order.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Json {
    Null,
    Bool(bool),
    /// As it was written: nothing here computes.
    Number(String),
    Text(String),
    List(Vec<Json>),
    Map(Vec<(String, Json)>),
}

/// Deeper values are refused: each level takes stack.
const DEEPEST: usize = 128;

impl Json {
    /// Reads one value.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut reader = Reader { text, at: 0 };
        let value = reader.value(0)?;
        reader.space();
        if reader.at == text.len() { Ok(value) } else { Err(reader.wrong("the end")) }
    }

    /// A field of a map.
    pub(crate) fn get(&self, name: &str) -> Option<&Self> {
        let Self::Map(fields) = self else { return None };
        fields.iter().find(|(key, _)| key == name).map(|(_, value)| value)
    }

    /// A text in a field of a map.
    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        self.get(name)?.as_text()
    }

    pub(crate) fn as_text(&self) -> Option<&str> {
        if let Self::Text(text) = self { Some(text) } else { None }
    }

    /// The list in a field of a map; nothing where there is none.
    pub(crate) fn list(&self, name: &str) -> &[Self] {
        if let Some(Self::List(values)) = self.get(name) { values } else { &[] }
    }

    /// The value over several lines, indented.
    pub(crate) fn pretty(&self) -> String {
        let mut out = String::new();
        self.write(0, &mut out);
        out.push('\n');
        out
    }

    fn write(&self, depth: usize, out: &mut String) {
        let line = |out: &mut String, depth: usize| {
            out.push('\n');
            out.extend(std::iter::repeat_n("  ", depth));
        };
        match self {
            Self::Null => out.push_str("null"),
            Self::Bool(value) => out.push_str(if *value { "true" } else { "false" }),
            Self::Number(digits) => out.push_str(digits),
            Self::Text(text) => quote(text, out),
            Self::List(values) if values.is_empty() => out.push_str("[]"),
            Self::List(values) => {
                out.push('[');
                for (i, value) in values.iter().enumerate() {
                    out.push_str(if i > 0 { "," } else { "" });
                    line(out, depth + 1);
                    value.write(depth + 1, out);
                }
                line(out, depth);
                out.push(']');
            }
            Self::Map(fields) => {
                out.push('{');
                for (i, (name, value)) in fields.iter().enumerate() {
                    out.push_str(if i > 0 { "," } else { "" });
                    line(out, depth + 1);
                    quote(name, out);
                    out.push_str(": ");
                    value.write(depth + 1, out);
                }
                line(out, depth);
                out.push('}');
            }
        }
    }
}

/// A text value.
pub(crate) fn text(value: impl Into<String>) -> Json {
    Json::Text(value.into())
}

/// A map of these fields.
pub(crate) fn map<const N: usize>(fields: [(&str, Json); N]) -> Json {
    Json::Map(fields.map(|(name, value)| (name.to_owned(), value)).into())
}

fn quote(text: &str, out: &mut String) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            c if u32::from(c) < 0x20 => write!(out, "\\u{:04x}", u32::from(c)).expect("a String takes all"),
            c => out.push(c),
        }
    }
    out.push('"');
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
}

impl Reader<'_> {
    fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    fn wrong(&self, wanted: &str) -> String {
        format!("JSON should have {wanted} at byte {}", self.at)
    }

    fn space(&mut self) {
        let rest = self.rest();
        self.at += rest.len() - rest.trim_start_matches([' ', '\t', '\r', '\n']).len();
    }

    /// Whether `token` comes next; it is passed.
    fn takes(&mut self, token: &str) -> bool {
        self.space();
        let there = self.rest().starts_with(token);
        self.at += if there { token.len() } else { 0 };
        there
    }

    fn value(&mut self, depth: usize) -> Result<Json, String> {
        if depth > DEEPEST {
            return Err(self.wrong("fewer levels"));
        }
        for (word, value) in [("null", Json::Null), ("true", Json::Bool(true)), ("false", Json::Bool(false))]
        {
            if self.takes(word) {
                return Ok(value);
            }
        }
        if self.takes("[") {
            let mut values = Vec::new();
            while !self.takes("]") {
                if !values.is_empty() && !self.takes(",") {
                    return Err(self.wrong("`,` or `]`"));
                }
                values.push(self.value(depth + 1)?);
            }
            return Ok(Json::List(values));
        }
        if self.takes("{") {
            let mut fields = Vec::new();
            while !self.takes("}") {
                if !fields.is_empty() && !self.takes(",") {
                    return Err(self.wrong("`,` or `}`"));
                }
                let name = self.string()?;
                if !self.takes(":") {
                    return Err(self.wrong("`:`"));
                }
                fields.push((name, self.value(depth + 1)?));
            }
            return Ok(Json::Map(fields));
        }
        if self.rest().starts_with('"') {
            return Ok(Json::Text(self.string()?));
        }
        let rest = self.rest();
        let end = rest.find(|c: char| !(c.is_ascii_digit() || "+-.eE".contains(c))).unwrap_or(rest.len());
        let digits = rest[..end].to_owned();
        if digits.parse::<f64>().is_err() {
            return Err(self.wrong("a value"));
        }
        self.at += end;
        Ok(Json::Number(digits))
    }

    fn string(&mut self) -> Result<String, String> {
        if !self.takes("\"") {
            return Err(self.wrong("a text"));
        }
        let mut out = String::new();
        loop {
            let plain = self.rest().find(['"', '\\']).ok_or_else(|| self.wrong("the end of a text"))?;
            out.push_str(&self.text[self.at..self.at + plain]);
            self.at += plain;
            if self.rest().starts_with('"') {
                self.at += 1;
                return Ok(out);
            }
            let escape = self.rest().chars().nth(1).ok_or_else(|| self.wrong("an escape"))?;
            if !escape.is_ascii() {
                return Err(self.wrong("an escape"));
            }
            self.at += 2;
            out.push(match escape {
                'n' => '\n',
                't' => '\t',
                'r' => '\r',
                'b' => '\u{8}',
                'f' => '\u{c}',
                'u' => self.unicode()?,
                '"' | '\\' | '/' => escape,
                _ => return Err(self.wrong("an escape before")),
            });
        }
    }

    /// What follows `\u`; characters beyond 16 bits are two escapes.
    fn unicode(&mut self) -> Result<char, String> {
        let high = self.hex()?;
        let code = if (0xd800..0xdc00).contains(&high) && self.rest().starts_with("\\u") {
            self.at += 2;
            let low = self.hex()?;
            0x10000 + ((high - 0xd800) << 10) + (low.wrapping_sub(0xdc00) & 0x3ff)
        } else {
            high
        };
        char::from_u32(code).ok_or_else(|| self.wrong("a character before"))
    }

    fn hex(&mut self) -> Result<u32, String> {
        let digits = self.rest().get(..4).and_then(|hex| u32::from_str_radix(hex, 16).ok());
        let code = digits.ok_or_else(|| self.wrong("four hexadecimal digits"))?;
        self.at += 4;
        Ok(code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_again() {
        let value = map([
            ("a", Json::List(vec![Json::Null, Json::Bool(true), Json::Number("-1.5e3".into())])),
            ("b \"\\\n\u{1}é🦀", text("c \"\\\n\t\u{1f}é🦀")),
            ("empty", Json::List(Vec::new())),
            ("map", map([("x", Json::Bool(false))])),
        ]);
        assert_eq!(Json::parse(&value.pretty()), Ok(value.clone()));
        assert_eq!(value.get("map").and_then(|m| m.get("x")), Some(&Json::Bool(false)));
        assert_eq!((value.list("a").len(), value.list("none").len()), (3, 0));
        assert_eq!(Json::parse(r#""\ud83e\udd80\u00e9\/""#), Ok(text("🦀é/")));
    }

    #[test]
    fn what_is_no_json_is_refused() {
        let deep = "[".repeat(1000);
        for bad in [
            "",
            "[1",
            "{\"a\"}",
            "{\"a\":1,}",
            "[1 2]",
            "nul",
            "\"a",
            "\"\\x\"",
            "1 2",
            "-",
            "\"\\u12\"",
            &deep,
        ] {
            assert!(Json::parse(bad).is_err(), "{bad}");
        }
    }
}
