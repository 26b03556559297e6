//! Whether the longest match is the right one.
//!
//! `llguidance` cuts a text into lexemes, each as long as it can be; GBNF knows characters only. A
//! cut loses nothing where no lexeme A has a text w that a character c may follow while w c begins
//! a text of some lexeme B (A itself or another): then the longest match is the only one. Lexemes
//! are compared as automata of positions (Glushkov 1961), in pairs.

use std::collections::{BTreeSet, VecDeque};

use super::parse::{Node, Rules};
use super::set::Set;

/// Most positions of a lexeme.
const POSITIONS: usize = 600;

/// A regular part of a grammar: its characters, which of them begin and end its texts, and which
/// follow which.
#[derive(Clone, Debug, Default)]
pub(super) struct Lexeme {
    chars: Vec<Set>,
    first: BTreeSet<usize>,
    last: BTreeSet<usize>,
    follow: Vec<BTreeSet<usize>>,
    pub(super) nullable: bool,
}

impl Lexeme {
    /// Of a part that refers to no rule that refers to itself; `None` of one that is too large.
    pub(super) fn new(rules: &Rules, node: &Node) -> Option<Self> {
        let mut all = Self::default();
        let part = all.add(rules, node)?;
        (all.first, all.last, all.nullable) = (part.first, part.last, part.nullable);
        Some(all)
    }

    fn link(&mut self, from: &BTreeSet<usize>, to: &BTreeSet<usize>) {
        for &at in from {
            self.follow[at].extend(to);
        }
    }

    /// Two parts, one behind the other.
    fn join(&mut self, a: Ends, b: Ends) -> Ends {
        self.link(&a.last, &b.first);
        let (mut first, mut last) = (a.first, b.last);
        if a.nullable {
            first.extend(&b.first);
        }
        if b.nullable {
            last.extend(&a.last);
        }
        Ends { first, last, nullable: a.nullable && b.nullable }
    }

    fn add(&mut self, rules: &Rules, node: &Node) -> Option<Ends> {
        let empty = Ends { nullable: true, ..Ends::default() };
        match node {
            Node::Class(set) => {
                if self.chars.len() == POSITIONS {
                    return None;
                }
                let only = BTreeSet::from([self.chars.len()]);
                self.chars.push(set.clone());
                self.follow.push(BTreeSet::new());
                Some(Ends { first: only.clone(), last: only, nullable: false })
            }
            Node::Seq(parts) => parts.iter().try_fold(empty, |before, part| {
                let part = self.add(rules, part)?;
                Some(self.join(before, part))
            }),
            Node::Alt(parts) => parts.iter().try_fold(Ends::default(), |mut all, part| {
                let part = self.add(rules, part)?;
                all.first.extend(part.first);
                all.last.extend(part.last);
                all.nullable |= part.nullable;
                Some(all)
            }),
            Node::Repeat(part, least, most) => {
                let mut all = empty;
                let copies = most.unwrap_or(*least.max(&1));
                for i in 0..copies {
                    let mut one = self.add(rules, part)?;
                    if i + 1 == copies && most.is_none() {
                        self.link(&one.last, &one.first);
                    }
                    one.nullable |= i >= *least;
                    all = self.join(all, one);
                }
                Some(all)
            }
            Node::Rule(number) => self.add(rules, &rules.bodies[*number]),
        }
    }

    /// The characters that begin its texts.
    pub(super) fn begins(&self) -> Set {
        let mut set = Set::default();
        for &at in &self.first {
            set.extend(&self.chars[at]);
        }
        set
    }

    /// Whether a text of this one, with one of the characters `behind` it, begins a text of
    /// another.
    pub(super) fn runs_into(&self, other: &Self, behind: &Set) -> bool {
        let mut seen = BTreeSet::new();
        let mut todo = VecDeque::new();
        let mut meet = |a: &BTreeSet<usize>, b: &BTreeSet<usize>, todo: &mut VecDeque<(usize, usize)>| {
            for &p in a {
                for &q in b {
                    if self.chars[p].meets(&other.chars[q]) && seen.insert((p, q)) {
                        todo.push_back((p, q));
                    }
                }
            }
        };
        meet(&self.first, &other.first, &mut todo);
        while let Some((p, q)) = todo.pop_front() {
            if self.last.contains(&p) && other.follow[q].iter().any(|&next| other.chars[next].meets(behind)) {
                return true;
            }
            meet(&self.follow[p], &other.follow[q], &mut todo);
        }
        false
    }
}

/// Where a part begins and ends.
#[derive(Clone, Debug, Default)]
struct Ends {
    first: BTreeSet<usize>,
    last: BTreeSet<usize>,
    nullable: bool,
}
