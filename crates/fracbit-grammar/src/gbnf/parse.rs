//! GBNF text to a tree.

use std::collections::BTreeMap;

use super::set::Set;

/// Groups within each other.
const DEPTH: usize = 64;
/// Most times that something is repeated, as in llama.cpp.
const TIMES: u32 = 2000;

/// What a part of a rule derives.
#[derive(Clone, Debug)]
pub(super) enum Node {
    /// One character of these.
    Class(Set),
    Seq(Vec<Node>),
    Alt(Vec<Node>),
    /// As often as the first says, at most as the second does.
    Repeat(Box<Node>, u32, Option<u32>),
    /// A rule, by number.
    Rule(usize),
}

/// Rules by number, and which of them texts begin with.
#[derive(Debug)]
pub(super) struct Rules {
    pub(super) bodies: Vec<Node>,
    pub(super) root: usize,
}

/// Reads a grammar; an error says at which line what should stand.
pub(super) fn parse(text: &str) -> Result<Rules, String> {
    let mut reader = Reader { text, at: 0, numbers: BTreeMap::new(), names: Vec::new(), bodies: Vec::new() };
    reader.space(true);
    while !reader.rest().is_empty() {
        let name = reader.name()?;
        let number = reader.number(&name);
        reader.space(false);
        if !reader.eat("::=") {
            return Err(reader.bad(&format!("`::=` should follow the name `{name}`")));
        }
        reader.space(true);
        let body = reader.alternatives(0)?;
        if reader.bodies[number].is_some() {
            return Err(reader.bad(&format!("rule `{name}` should be defined once")));
        }
        reader.bodies[number] = Some(body);
        let next = reader.rest().chars().next();
        if !matches!(next, None | Some('\n' | '\r')) {
            return Err(reader.bad("a rule should end with its line"));
        }
        reader.space(true);
    }
    let Reader { numbers, names, bodies, .. } = reader;
    let defined = |(body, name): (Option<Node>, &String)| {
        body.ok_or_else(|| format!("rule `{name}` should be defined"))
    };
    let bodies = bodies.into_iter().zip(&names).map(defined).collect::<Result<Vec<_>, _>>()?;
    let root = numbers.get("root").copied().ok_or("rule `root` should be defined: texts begin there")?;
    Ok(Rules { bodies, root })
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
    numbers: BTreeMap<String, usize>,
    names: Vec<String>,
    bodies: Vec<Option<Node>>,
}

impl<'a> Reader<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn bad(&self, rule: &str) -> String {
        let line = self.text[..self.at].matches('\n').count() + 1;
        let rest: String = self.rest().chars().take_while(|c| *c != '\n').take(20).collect();
        format!("line {line}: {rule}, at `{rest}`")
    }

    fn eat(&mut self, token: &str) -> bool {
        let there = self.rest().starts_with(token);
        self.at += if there { token.len() } else { 0 };
        there
    }

    fn next(&mut self) -> Option<char> {
        let next = self.rest().chars().next()?;
        self.at += next.len_utf8();
        Some(next)
    }

    /// Passes spaces and comments, and the ends of lines where they mean nothing.
    fn space(&mut self, lines: bool) {
        loop {
            match self.rest().chars().next() {
                Some(' ' | '\t') => self.at += 1,
                Some('\n' | '\r') if lines => self.at += 1,
                Some('#') => self.at += self.rest().find(['\n', '\r']).unwrap_or(self.rest().len()),
                _ => return,
            }
        }
    }

    fn name(&mut self) -> Result<String, String> {
        let part = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        let end = self.rest().find(|c| !part(c)).unwrap_or(self.rest().len());
        if end == 0 {
            return Err(self.bad("the name of a rule should stand there"));
        }
        let name = self.rest()[..end].to_owned();
        self.at += end;
        Ok(name)
    }

    fn number(&mut self, name: &str) -> usize {
        let next = self.names.len();
        let number = *self.numbers.entry(name.to_owned()).or_insert(next);
        if number == next {
            self.names.push(name.to_owned());
            self.bodies.push(None);
        }
        number
    }

    fn alternatives(&mut self, depth: usize) -> Result<Node, String> {
        if depth > DEPTH {
            return Err(self.bad(&format!("groups should be at most {DEPTH} within each other")));
        }
        let mut all = vec![self.sequence(depth)?];
        while self.eat("|") {
            self.space(true);
            all.push(self.sequence(depth)?);
        }
        Ok(if all.len() == 1 { all.swap_remove(0) } else { Node::Alt(all) })
    }

    fn sequence(&mut self, depth: usize) -> Result<Node, String> {
        let mut parts: Vec<Node> = Vec::new();
        loop {
            let part = match self.rest().chars().next() {
                Some('"') => self.literal()?,
                Some('[') => self.class()?,
                Some('.') => {
                    self.at += 1;
                    Node::Class(Set::all())
                }
                Some('(') => {
                    self.at += 1;
                    self.space(true);
                    let inner = self.alternatives(depth + 1)?;
                    if !self.eat(")") {
                        return Err(self.bad("a group should end with `)`"));
                    }
                    inner
                }
                Some('<' | '!') => return Err(self.bad("tokens (`<...>`) are not served: write their text")),
                Some(c) if c.is_ascii_alphanumeric() || c == '-' || c == '_' => {
                    let name = self.name()?;
                    Node::Rule(self.number(&name))
                }
                _ => break,
            };
            let part = self.repeated(part)?;
            self.space(depth > 0);
            parts.push(part);
        }
        Ok(if parts.len() == 1 { parts.swap_remove(0) } else { Node::Seq(parts) })
    }

    fn repeated(&mut self, mut part: Node) -> Result<Node, String> {
        loop {
            let (least, most) = match self.rest().chars().next() {
                Some('*') => (0, None),
                Some('+') => (1, None),
                Some('?') => (0, Some(1)),
                Some('{') => {
                    self.at += 1;
                    self.space(true);
                    let least = self.count()?;
                    let most = if self.eat(",") {
                        self.space(true);
                        if self.rest().starts_with('}') { None } else { Some(self.count()?) }
                    } else {
                        Some(least)
                    };
                    if !self.rest().starts_with('}') || most.is_some_and(|most| most < least) {
                        return Err(self.bad("should be `{m}`, `{m,}` or `{m,n}` with m at most n"));
                    }
                    (least, most)
                }
                _ => return Ok(part),
            };
            self.at += 1;
            part = Node::Repeat(Box::new(part), least, most);
        }
    }

    fn count(&mut self) -> Result<u32, String> {
        let end = self.rest().find(|c: char| !c.is_ascii_digit()).unwrap_or(self.rest().len());
        let count = self.rest()[..end].parse().ok().filter(|&count: &u32| count <= TIMES);
        let count =
            count.ok_or_else(|| self.bad(&format!("a number of at most {TIMES} should stand there")))?;
        self.at += end;
        self.space(true);
        Ok(count)
    }

    fn literal(&mut self) -> Result<Node, String> {
        self.at += 1;
        let mut chars = Vec::new();
        loop {
            if self.eat("\"") {
                return Ok(if chars.len() == 1 { chars.swap_remove(0) } else { Node::Seq(chars) });
            }
            chars.push(Node::Class(Set::of(&[self.character("a text should end with `\"`")?; 2])));
        }
    }

    fn class(&mut self) -> Result<Node, String> {
        self.at += 1;
        let (not, mut ranges) = (self.eat("^"), Vec::new());
        while !self.eat("]") {
            let end = "a set of characters should end with `]`";
            let first = self.character(end)?;
            let range = self.rest().starts_with('-') && !self.rest().starts_with("-]");
            let last = if range {
                self.at += 1;
                self.character(end)?
            } else {
                first
            };
            if last < first {
                return Err(self.bad(&format!("a range should rise, got `{first}-{last}`")));
            }
            ranges.push((first, last));
        }
        let set = Set::ranges(&ranges);
        let set = if not { set.complement() } else { set };
        if set.is_empty() { Err(self.bad("a set should have a character")) } else { Ok(Node::Class(set)) }
    }

    /// A character, escaped or not; at the end of the grammar `end` is not there.
    fn character(&mut self, end: &str) -> Result<char, String> {
        match self.next() {
            None => Err(self.bad(end)),
            Some('\\') => self.escaped(),
            Some(c) => Ok(c),
        }
    }

    fn escaped(&mut self) -> Result<char, String> {
        let digits = match self.next() {
            Some('n') => return Ok('\n'),
            Some('r') => return Ok('\r'),
            Some('t') => return Ok('\t'),
            Some(c @ ('\\' | '"' | '[' | ']' | '-' | '^' | '/')) => return Ok(c),
            Some('x') => 2,
            Some('u') => 4,
            Some('U') => 8,
            _ => {
                return Err(
                    self.bad("an escape should be one of \\n \\r \\t \\\\ \\\" \\[ \\] \\x \\u \\U, before")
                );
            }
        };
        let hex = self.rest().get(..digits).filter(|hex| hex.bytes().all(|b| b.is_ascii_hexdigit()));
        let found = hex.and_then(|hex| char::from_u32(u32::from_str_radix(hex, 16).ok()?));
        let rule = format!("{digits} hexadecimal digits of a character should stand there");
        let found = found.ok_or_else(|| self.bad(&rule))?;
        self.at += digits;
        Ok(found)
    }
}
