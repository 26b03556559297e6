//! GBNF, the notation of llama.cpp's grammars, in that of Lark, which `llguidance` follows.
//!
//! Rules that refer to themselves become rules, and the largest parts of them that do not become
//! lexemes (terminals). A part that the longest match would cut wrongly (see [`lexemes`]) is taken
//! apart until none is left, at worst into single characters: the texts are those of the grammar.

mod lexemes;
mod parse;
mod set;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use lexemes::Lexeme;
use parse::{Node, Rules};
use set::Set;

/// Most rounds of taking lexemes apart; each makes one smaller.
const ROUNDS: usize = 400;

/// A grammar in the notation of Lark with the texts of one in GBNF.
///
/// # Errors
/// At which line what should stand.
pub(crate) fn lark(text: &str) -> Result<String, String> {
    let rules = parse::parse(text)?;
    let recursive = recursive(&rules);
    let mut parts = Parts { rules: &rules, recursive, apart: BTreeSet::new(), whole: BTreeMap::new() };
    for _ in 0..ROUNDS {
        parts.find()?;
        match parts.wrong() {
            Some(path) => _ = parts.apart.insert(path),
            None => return Ok(parts.written()),
        }
    }
    Err(format!("it should be simpler: {ROUNDS} of its parts have no end that is sure"))
}

/// Rules that refer to themselves, by whatever way.
fn recursive(rules: &Rules) -> Vec<bool> {
    let count = rules.bodies.len();
    let mut reach: Vec<BTreeSet<usize>> = rules.bodies.iter().map(refers).collect();
    loop {
        let mut grown = false;
        for i in 0..count {
            let more: BTreeSet<usize> = reach[i].iter().flat_map(|&j| reach[j].iter().copied()).collect();
            let before = reach[i].len();
            reach[i].extend(more);
            grown |= reach[i].len() > before;
        }
        if !grown {
            break;
        }
    }
    // A rule that only leads to such a rule is none that a lexeme may hold, either.
    let own: Vec<bool> = (0..count).map(|i| reach[i].contains(&i)).collect();
    (0..count).map(|i| own[i] || reach[i].iter().any(|&j| own[j])).collect()
}

fn refers(node: &Node) -> BTreeSet<usize> {
    match node {
        Node::Class(_) => BTreeSet::new(),
        Node::Seq(parts) | Node::Alt(parts) => parts.iter().flat_map(refers).collect(),
        Node::Repeat(part, ..) => refers(part),
        Node::Rule(number) => BTreeSet::from([*number]),
    }
}

/// Where a part stands: its rule, and which part of which part.
type Path = (usize, Vec<usize>);

/// A grammar and how it is taken apart.
struct Parts<'a> {
    rules: &'a Rules,
    recursive: Vec<bool>,
    /// Parts that are no lexemes though they could be.
    apart: BTreeSet<Path>,
    /// Those that are.
    whole: BTreeMap<Path, (&'a Node, Lexeme)>,
}

/// What may stand at the beginning of a part.
#[derive(Clone, Debug, Default)]
struct Begin {
    chars: Set,
    nullable: bool,
}

impl<'a> Parts<'a> {
    fn regular(&self, node: &Node) -> bool {
        !refers(node).iter().any(|&rule| self.recursive[rule])
    }

    /// Finds the lexemes of all rules that are not inside of one.
    fn find(&mut self) -> Result<(), String> {
        self.whole.clear();
        let (mut todo, mut seen) = (vec![self.rules.root], BTreeSet::from([self.rules.root]));
        while let Some(rule) = todo.pop() {
            let mut found = BTreeSet::new();
            self.find_in(&self.rules.bodies[rule], &mut (rule, Vec::new()), &mut found)?;
            todo.extend(found.into_iter().filter(|&next| seen.insert(next)));
        }
        Ok(())
    }

    fn find_in(
        &mut self,
        node: &'a Node,
        path: &mut Path,
        found: &mut BTreeSet<usize>,
    ) -> Result<(), String> {
        if self.regular(node) && !self.apart.contains(path) {
            match Lexeme::new(self.rules, node) {
                Some(lexeme) => {
                    self.whole.insert(path.clone(), (node, lexeme));
                    return Ok(());
                }
                None => _ = self.apart.insert(path.clone()),
            }
        }
        let parts = match node {
            Node::Class(_) => return Err("a character should be a lexeme".to_owned()),
            Node::Rule(number) => {
                found.insert(*number);
                return Ok(());
            }
            Node::Seq(parts) | Node::Alt(parts) => &parts[..],
            Node::Repeat(part, ..) => std::slice::from_ref(&**part),
        };
        for (i, part) in parts.iter().enumerate() {
            path.1.push(i);
            self.find_in(part, path, found)?;
            path.1.pop();
        }
        Ok(())
    }

    /// A lexeme that the longest match takes too far.
    fn wrong(&self) -> Option<Path> {
        let begins = self.begins();
        let behind = self.behind(&begins);
        for (path, (_, lexeme)) in &self.whole {
            for (other, (node, longer)) in &self.whole {
                if !matches!(node, Node::Class(_)) && lexeme.runs_into(longer, &behind[path]) {
                    return Some(other.clone());
                }
            }
        }
        None
    }

    /// What begins the texts of each rule.
    fn begins(&self) -> Vec<Begin> {
        let mut begins = vec![Begin::default(); self.rules.bodies.len()];
        loop {
            let mut grown = false;
            for rule in 0..begins.len() {
                let of = self.begin(&self.rules.bodies[rule], &mut (rule, Vec::new()), &begins);
                grown |= begins[rule].chars.extend(&of.chars) || of.nullable && !begins[rule].nullable;
                begins[rule].nullable |= of.nullable;
            }
            if !grown {
                return begins;
            }
        }
    }

    fn begin(&self, node: &Node, path: &mut Path, begins: &[Begin]) -> Begin {
        if let Some((_, lexeme)) = self.whole.get(path) {
            return Begin { chars: lexeme.begins(), nullable: lexeme.nullable };
        }
        match node {
            Node::Class(set) => Begin { chars: set.clone(), nullable: false },
            Node::Rule(number) => begins[*number].clone(),
            Node::Repeat(part, least, most) => {
                let of = self.below(0, part, path, begins);
                let chars = if *most == Some(0) { Set::default() } else { of.chars };
                Begin { chars, nullable: of.nullable || *least == 0 }
            }
            Node::Seq(parts) => {
                let mut all = Begin { nullable: true, ..Begin::default() };
                for (i, part) in parts.iter().enumerate() {
                    if !all.nullable {
                        break;
                    }
                    let of = self.below(i, part, path, begins);
                    all.chars.extend(&of.chars);
                    all.nullable = of.nullable;
                }
                all
            }
            Node::Alt(parts) => {
                let mut all = Begin::default();
                for (i, part) in parts.iter().enumerate() {
                    let of = self.below(i, part, path, begins);
                    all.chars.extend(&of.chars);
                    all.nullable |= of.nullable;
                }
                all
            }
        }
    }

    fn below(&self, i: usize, part: &Node, path: &mut Path, begins: &[Begin]) -> Begin {
        path.1.push(i);
        let of = self.begin(part, path, begins);
        path.1.pop();
        of
    }

    /// The characters that may follow each lexeme.
    fn behind(&self, begins: &[Begin]) -> BTreeMap<Path, Set> {
        let mut rules = vec![Set::default(); self.rules.bodies.len()];
        let mut lexemes: BTreeMap<Path, Set> =
            self.whole.keys().map(|path| (path.clone(), Set::default())).collect();
        loop {
            let mut grown = false;
            for rule in 0..rules.len() {
                let behind = rules[rule].clone();
                let mut walk = Walk { parts: self, begins, rules: &mut rules, lexemes: &mut lexemes };
                grown |= walk.visit(&self.rules.bodies[rule], &mut (rule, Vec::new()), &behind);
            }
            if !grown {
                return lexemes;
            }
        }
    }

    /// The grammar in Lark.
    fn written(&self) -> String {
        let mut out = format!("start: r{}\n", self.rules.root);
        let (mut rules, mut terminals) = (BTreeSet::from([self.rules.root]), BTreeSet::new());
        let mut todo = vec![self.rules.root];
        while let Some(rule) = todo.pop() {
            let mut body = String::new();
            let mut found = BTreeSet::new();
            self.write(&self.rules.bodies[rule], &mut (rule, Vec::new()), &mut body, &mut found);
            // Writing to a text never fails.
            let _ = writeln!(out, "r{rule}: {body}");
            todo.extend(found.into_iter().filter(|&next| rules.insert(next)));
        }
        let mut names = BTreeMap::new();
        for (number, (path, (node, _))) in self.whole.iter().enumerate() {
            names.insert(path, number);
            let mut body = String::new();
            terminal(node, &mut body);
            // What is there in any case is left to the rule.
            let _ = writeln!(out, "L{number}: ({body}) & /(?s:.)+/");
            terminals.extend(refers(node));
        }
        let mut todo: Vec<usize> = terminals.iter().copied().collect();
        while let Some(rule) = todo.pop() {
            let mut body = String::new();
            terminal(&self.rules.bodies[rule], &mut body);
            let _ = writeln!(out, "T{rule}: {body}");
            todo.extend(refers(&self.rules.bodies[rule]).into_iter().filter(|&next| terminals.insert(next)));
        }
        out
    }

    fn write(&self, node: &Node, path: &mut Path, out: &mut String, found: &mut BTreeSet<usize>) {
        if let Some((_, lexeme)) = self.whole.get(path) {
            let number = self.whole.keys().position(|key| key == path).unwrap_or_default();
            let _ = write!(out, "L{number}{}", if lexeme.nullable { "?" } else { "" });
            return;
        }
        let mut below = |i: usize, part: &Node, out: &mut String| {
            path.1.push(i);
            self.write(part, path, out, found);
            path.1.pop();
        };
        match node {
            Node::Class(_) => {}
            Node::Rule(number) => {
                let _ = write!(out, "r{number}");
                found.insert(*number);
            }
            Node::Repeat(part, least, most) => {
                let start = out.len();
                below(0, part, out);
                let inner = out.split_off(start);
                *out += &repeated(&inner, *least, *most);
            }
            Node::Seq(parts) if parts.is_empty() => *out += "\"\"",
            Node::Seq(parts) => {
                for (i, part) in parts.iter().enumerate() {
                    *out += if i > 0 { " " } else { "" };
                    below(i, part, out);
                }
            }
            Node::Alt(parts) => {
                *out += "(";
                for (i, part) in parts.iter().enumerate() {
                    *out += if i > 0 { " | " } else { "" };
                    below(i, part, out);
                }
                *out += ")";
            }
        }
    }
}

/// Finds what follows the parts of rules.
struct Walk<'a, 'b> {
    parts: &'b Parts<'a>,
    begins: &'b [Begin],
    rules: &'b mut [Set],
    lexemes: &'b mut BTreeMap<Path, Set>,
}

impl Walk<'_, '_> {
    /// A part with what may follow it; whether something was new.
    fn visit(&mut self, node: &Node, path: &mut Path, behind: &Set) -> bool {
        if let Some(set) = self.lexemes.get_mut(path) {
            return set.extend(behind);
        }
        match node {
            Node::Class(_) => false,
            Node::Rule(number) => self.rules[*number].extend(behind),
            Node::Repeat(part, ..) => {
                let mut again = behind.clone();
                again.extend(&self.parts.below(0, part, path, self.begins).chars);
                self.below(0, part, path, &again)
            }
            Node::Seq(parts) => {
                let (mut next, mut grown) = (behind.clone(), false);
                for (i, part) in parts.iter().enumerate().rev() {
                    grown |= self.below(i, part, path, &next);
                    let of = self.parts.below(i, part, path, self.begins);
                    if of.nullable {
                        next.extend(&of.chars);
                    } else {
                        next = of.chars;
                    }
                }
                grown
            }
            Node::Alt(parts) => {
                let mut grown = false;
                for (i, part) in parts.iter().enumerate() {
                    grown |= self.below(i, part, path, behind);
                }
                grown
            }
        }
    }

    fn below(&mut self, i: usize, part: &Node, path: &mut Path, behind: &Set) -> bool {
        path.1.push(i);
        let grown = self.visit(part, path, behind);
        path.1.pop();
        grown
    }
}

/// A part so many times. Lark has no zero as the last number.
fn repeated(inner: &str, least: u32, most: Option<u32>) -> String {
    match (least, most) {
        (_, Some(0)) => "\"\"".to_owned(),
        (0, None) => format!("({inner})*"),
        (1, None) => format!("({inner})+"),
        (0, Some(1)) => format!("({inner})?"),
        (_, None) => format!("({inner}){{{least},}}"),
        (_, Some(most)) => format!("({inner}){{{least},{most}}}"),
    }
}

/// A part as the body of a terminal.
fn terminal(node: &Node, out: &mut String) {
    match node {
        Node::Class(set) => match set.single() {
            Some(c) => *out += &serde_json::Value::from(c.to_string()).to_string(),
            None => *out += &format!("/{}/", set.regex()),
        },
        Node::Rule(number) => *out += &format!("T{number}"),
        Node::Repeat(part, least, most) => {
            let mut inner = String::new();
            terminal(part, &mut inner);
            *out += &repeated(&inner, *least, *most);
        }
        Node::Seq(parts) if parts.is_empty() => *out += "\"\"",
        Node::Seq(parts) => {
            // Characters that stand behind each other are one text.
            let mut text = String::new();
            let mut pieces: Vec<String> = Vec::new();
            let flush = |text: &mut String, pieces: &mut Vec<String>| {
                if !text.is_empty() {
                    pieces.push(serde_json::Value::from(std::mem::take(text)).to_string());
                }
            };
            for part in parts {
                match part {
                    Node::Class(set) if set.single().is_some() => text.extend(set.single()),
                    part => {
                        flush(&mut text, &mut pieces);
                        let mut piece = String::new();
                        terminal(part, &mut piece);
                        pieces.push(piece);
                    }
                }
            }
            flush(&mut text, &mut pieces);
            *out += &pieces.join(" ");
        }
        Node::Alt(parts) => {
            let mut all = Vec::new();
            for part in parts {
                let mut piece = String::new();
                terminal(part, &mut piece);
                all.push(piece);
            }
            *out += &format!("({})", all.join(" | "));
        }
    }
}
