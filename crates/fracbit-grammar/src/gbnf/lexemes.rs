//! Whether the longest match is the right one.
//!
//! `llguidance` cuts a text into lexemes, each as long as it can be; GBNF knows characters only. A
//! cut loses nothing where no lexeme A has a text w that a character c may follow while w c begins
//! a text of some lexeme B (A itself or another): then the longest match is the only one. Lexemes
//! are compared as automata of positions (Glushkov 1961), in pairs.

use std::collections::{BTreeSet, VecDeque};

use super::Steps;
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
    /// Of a part that refers to no rule that refers to itself; `None` of one that is too large, and
    /// where no steps are left.
    pub(super) fn new(rules: &Rules, node: &Node, steps: &Steps) -> Option<Self> {
        let mut all = Self::default();
        let part = all.add(rules, node, steps)?;
        (all.first, all.last, all.nullable) = (part.first, part.last, part.nullable);
        Some(all)
    }

    fn link(&mut self, from: &BTreeSet<usize>, to: &BTreeSet<usize>, steps: &Steps) -> Option<()> {
        for &at in from {
            steps.take(to.len()).then_some(())?;
            self.follow[at].extend(to);
        }
        Some(())
    }

    /// Two parts, one behind the other.
    fn join(&mut self, a: Ends, b: Ends, steps: &Steps) -> Option<Ends> {
        self.link(&a.last, &b.first, steps)?;
        steps.take(a.last.len() + b.first.len()).then_some(())?;
        let (mut first, mut last) = (a.first, b.last);
        if a.nullable {
            first.extend(&b.first);
        }
        if b.nullable {
            last.extend(&a.last);
        }
        Some(Ends { first, last, nullable: a.nullable && b.nullable })
    }

    fn add(&mut self, rules: &Rules, node: &Node, steps: &Steps) -> Option<Ends> {
        // Also of parts without characters, which may refer to each other in any number.
        steps.take(1).then_some(())?;
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
                let part = self.add(rules, part, steps)?;
                self.join(before, part, steps)
            }),
            Node::Alt(parts) => parts.iter().try_fold(Ends::default(), |mut all, part| {
                let part = self.add(rules, part, steps)?;
                steps.take(part.first.len() + part.last.len()).then_some(())?;
                all.first.extend(part.first);
                all.last.extend(part.last);
                all.nullable |= part.nullable;
                Some(all)
            }),
            Node::Repeat(part, least, most) => {
                let (mut all, mut before) = (empty, BTreeSet::new());
                let copies = most.unwrap_or(*least.max(&1));
                for i in 0..copies {
                    let one = self.add(rules, part, steps)?;
                    if i + 1 == copies && most.is_none() {
                        self.link(&one.last, &one.first, steps)?;
                    }
                    let last = one.last.clone();
                    if i < *least || i == 0 {
                        all = self.join(all, one, steps)?;
                    } else {
                        // One that need not be there follows the one before it only: links grow
                        // with the copies, not with their square.
                        self.link(&before, &one.first, steps)?;
                        steps.take(last.len()).then_some(())?;
                        all.last.extend(&last);
                    }
                    before = last;
                }
                all.nullable |= *least == 0;
                Some(all)
            }
            Node::Rule(number) => self.add(rules, &rules.bodies[*number], steps),
        }
    }

    /// Positions that begin its texts.
    pub(super) fn size(&self) -> usize {
        self.first.len()
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
    /// another; also where no steps are left.
    pub(super) fn runs_into(&self, other: &Self, behind: &Set, steps: &Steps) -> bool {
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
        if !steps.take(self.first.len() * other.first.len()) {
            return true;
        }
        meet(&self.first, &other.first, &mut todo);
        while let Some((p, q)) = todo.pop_front() {
            if !steps.take(1 + behind.len() + self.follow[p].len() * other.follow[q].len()) {
                return true;
            }
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
