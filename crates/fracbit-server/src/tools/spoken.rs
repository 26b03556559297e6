//! Text and calls of an answer, for the forms of its clients.

use super::{Calls, Format, Said};
use crate::request::Request;

/// What finds the calls of one text, where a request has functions.
pub(crate) fn calls_of(request: &Request, format: Format) -> Option<Calls> {
    request.tools.as_ref().map(|tools| {
        let names = tools.functions.iter().map(|function| function.name.clone()).collect();
        Calls::new(format, names)
    })
}

/// Reads a piece of a text.
pub(crate) fn said_of(calls: &mut Option<Calls>, text: String) -> Vec<Said> {
    match calls {
        Some(calls) => calls.push(&text),
        None => vec![Said::Text(text)],
    }
}

/// What is left of a text.
pub(crate) fn rest_of(calls: &mut Option<Calls>) -> Vec<Said> {
    calls.as_mut().map(Calls::finish).unwrap_or_default()
}

/// A part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Text(String),
    /// A name and arguments.
    Call(String, String),
}

/// One answer as far as it is there, its parts in their order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Spoken(Vec<Part>);

impl Spoken {
    /// Adds what was said.
    pub(crate) fn add(&mut self, said: Vec<Said>) {
        for said in said {
            match said {
                Said::Text(text) => self.text(text),
                Said::Call(name) => self.0.push(Part::Call(name, String::new())),
                Said::Arguments(piece) => {
                    if let Some(Part::Call(_, arguments)) = self.0.last_mut() {
                        *arguments += &piece;
                    }
                }
                // Not a call: all of it is text.
                Said::Broken { all, .. } => {
                    self.0.pop_if(|last| matches!(last, Part::Call(..)));
                    self.text(all);
                }
            }
        }
    }

    fn text(&mut self, text: String) {
        match self.0.last_mut() {
            _ if text.is_empty() => {}
            Some(Part::Text(all)) => *all += &text,
            _ => self.0.push(Part::Text(text)),
        }
    }

    /// At least one part.
    pub(crate) fn parts(mut self) -> Vec<Part> {
        if self.0.is_empty() {
            self.0.push(Part::Text(String::new()));
        }
        self.0
    }

    /// All text, and all calls.
    pub(crate) fn apart(self) -> (String, Vec<(String, String)>) {
        let (mut all, mut calls) = (String::new(), Vec::new());
        for part in self.0 {
            match part {
                Part::Text(text) => all += &text,
                Part::Call(name, arguments) => calls.push((name, arguments)),
            }
        }
        (all, calls)
    }
}

/// The name of a call for answers: nine letters and digits, since some templates want that.
/// `number` is the answer's, `at` its text's.
pub(crate) fn call_id(number: u64, at: usize, index: usize) -> String {
    const LETTERS: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";
    // Numbers of requests follow each other; multiplying by an odd one keeps them apart.
    let mut rest = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) % 36u64.pow(5);
    rest = (rest * 36u64.pow(2) + at as u64 % 36u64.pow(2)) * 36u64.pow(2) + index as u64 % 36u64.pow(2);
    let mut id = String::new();
    for _ in 0..9 {
        id.push(LETTERS[(rest % 36) as usize].into());
        rest /= 36;
    }
    id
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_stand_in_their_order() {
        let text = |text: &str| Said::Text(text.to_owned());
        let broken = Said::Broken { all: "<c>g{".to_owned(), rest: "{".to_owned() };
        let call = |name: &str| [Said::Call(name.to_owned()), Said::Arguments("{".to_owned())];
        let mut spoken = Spoken::default();
        spoken.add(vec![text(""), text("a"), text("b")]);
        spoken.add(call("f").into());
        spoken.add(vec![Said::Arguments("}".to_owned()), text(" ")]);
        spoken.add(call("g").into());
        spoken.add(vec![broken]);
        let part = |text: &str| Part::Text(text.to_owned());
        let called = ("f".to_owned(), "{}".to_owned());
        let (name, arguments) = called.clone();
        // What is no call goes on with the text before it.
        let want = [part("ab"), Part::Call(name, arguments), part(" <c>g{")];
        assert_eq!(spoken.clone().parts(), want);
        assert_eq!(spoken.apart(), ("ab <c>g{".to_owned(), vec![called]));
        assert_eq!(Spoken::default().parts(), [part("")]);
    }
}
