//! GBNF, the notation of llama.cpp's grammars, in that of Lark, which `llguidance` follows.
//!
//! Rules that refer to themselves become rules, and the largest parts of them that do not become
//! lexemes (terminals). A part that the longest match would cut wrongly (see [`lexemes`]) is taken
//! apart until none is left, at worst into single characters: the texts are those of the grammar.

mod lexemes;
mod parse;
mod set;

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use lexemes::Lexeme;
use parse::{Node, Rules};
use set::Set;

/// Most rounds of taking lexemes apart; each makes one smaller.
const ROUNDS: usize = 400;
/// Steps of everything together, a second or two: rules are short, and what they mean together may
/// grow with any power of their number.
const STEPS: usize = 10_000_000;

/// Steps that are left.
#[derive(Debug)]
struct Steps(Cell<usize>);

impl Steps {
    /// Takes so many; false where they are not left, from then on.
    fn take(&self, count: usize) -> bool {
        let left = self.0.get().checked_sub(count);
        self.0.set(left.unwrap_or(0));
        left.is_some_and(|left| left > 0)
    }

    /// # Errors
    /// Where none is left.
    fn check(&self) -> Result<(), String> {
        if self.0.get() > 0 {
            Ok(())
        } else {
            Err("it should be simpler: it takes too long to read".to_owned())
        }
    }
}

/// A grammar in the notation of Lark with the texts of one in GBNF.
///
/// # Errors
/// At which line what should stand.
pub(crate) fn lark(text: &str) -> Result<String, String> {
    let rules = parse::parse(text)?;
    let recursive = recursive(&rules);
    let steps = Steps(Cell::new(STEPS));
    let mut parts = Parts { rules: &rules, recursive, apart: BTreeSet::new(), whole: BTreeMap::new(), steps };
    for _ in 0..ROUNDS {
        let found = parts.find();
        parts.steps.check()?;
        found?;
        let wrong = parts.wrong();
        parts.steps.check()?;
        match wrong {
            Some(path) => _ = parts.apart.insert(path),
            None => return Ok(parts.written()),
        }
    }
    Err(format!("it should be simpler: {ROUNDS} of its parts have no end that is sure"))
}

/// Rules that refer to themselves, by whatever way, or lead to such a rule: none that a lexeme may
/// hold. The others are found from those that refer to nothing on.
fn recursive(rules: &Rules) -> Vec<bool> {
    let refers: Vec<BTreeSet<usize>> = rules.bodies.iter().map(refers).collect();
    let mut readers = vec![Vec::new(); refers.len()];
    for (rule, others) in refers.iter().enumerate() {
        others.iter().for_each(|&other| readers[other].push(rule));
    }
    let mut left: Vec<usize> = refers.iter().map(BTreeSet::len).collect();
    let mut done: Vec<usize> = (0..left.len()).filter(|&rule| left[rule] == 0).collect();
    while let Some(rule) = done.pop() {
        for &reader in &readers[rule] {
            left[reader] -= 1;
            if left[reader] == 0 {
                done.push(reader);
            }
        }
    }
    left.into_iter().map(|left| left > 0).collect()
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
    /// Those that are, with their numbers.
    whole: BTreeMap<Path, (usize, &'a Node, Lexeme)>,
    steps: Steps,
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
            match Lexeme::new(self.rules, node, &self.steps) {
                Some(lexeme) => {
                    self.whole.insert(path.clone(), (self.whole.len(), node, lexeme));
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
        for (path, (_, _, lexeme)) in &self.whole {
            if !self.steps.take(self.whole.len()) {
                return None;
            }
            for (other, (_, node, longer)) in &self.whole {
                if !matches!(node, Node::Class(_)) && lexeme.runs_into(longer, &behind[path], &self.steps) {
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
            if !grown || self.steps.check().is_err() {
                return begins;
            }
        }
    }

    fn begin(&self, node: &Node, path: &mut Path, begins: &[Begin]) -> Begin {
        if let Some((_, _, lexeme)) = self.whole.get(path) {
            let chars = lexeme.begins();
            let _ = self.steps.take(lexeme.size() + chars.len());
            return Begin { chars, nullable: lexeme.nullable };
        }
        if !self.steps.take(1) {
            return Begin::default();
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
            if !grown || self.steps.check().is_err() {
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
        for (number, node, _) in self.whole.values() {
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
        if let Some((number, _, lexeme)) = self.whole.get(path) {
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
        if !self.parts.steps.take(1 + behind.len()) {
            return false;
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vocabulary::STACK;
    use std::thread;

    #[test]
    fn rules_are_recursive_where_they_lead_to_a_circle() {
        let rules =
            parse::parse("root ::= a b\na ::= c\nb ::= \"x\" | b \"y\"\nc ::= \"z\"\nd ::= d").unwrap();
        // In the order in which names come: root, a, b, c, d.
        assert_eq!(recursive(&rules), [true, false, true, false, true]);
    }

    /// As `Vocabulary::grammar` does it: chains of rules are followed by recursion.
    fn lark_of(grammar: &str) -> Result<String, String> {
        thread::scope(|scope| {
            let read = thread::Builder::new().stack_size(STACK).spawn_scoped(scope, || lark(grammar));
            read.unwrap().join().unwrap()
        })
    }

    #[test]
    fn short_grammars_take_no_time_without_end() {
        let doubled = |least: &str| {
            let pairs = (1..60).map(|i| format!("r{i} ::= r{0} r{0}\n", i - 1));
            format!("root ::= r59 \"a\"\nr0 ::= {least}\n{}", pairs.collect::<String>())
        };
        let chain: String = (0..1990).map(|i| format!("r{i} ::= r{} | \"a\"\n", i + 1)).collect();
        let ring: String =
            (0..1500).map(|i| format!("r{i} ::= \"a\" r{} | [b-z]\n", (i + 1) % 1500)).collect();
        for (grammar, simple) in [
            (doubled("\"\""), false),
            (doubled("\"b\""), true),
            ("root ::= (((\"\"{2000}){2000}){2000}){2000} \"a\"".to_owned(), false),
            (format!("root ::= r0\n{chain}r1990 ::= \"b\""), false),
            (format!("root ::= r0\n{ring}"), true),
            (format!("root ::= ({})?", "\"a\" root [b-z] ".repeat(8000)), false),
            (format!("root ::= ([{}] root)?", "a".repeat(200_000)), true),
        ] {
            let start: String = grammar.chars().take(60).collect();
            match lark_of(&grammar) {
                Ok(_) => assert!(simple, "{start}"),
                Err(error) => assert!(!simple && error.contains("simpler"), "{start}: {error}"),
            }
        }
    }
}
