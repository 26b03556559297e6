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

/// One answer as far as it is there.
#[derive(Clone, Debug, Default)]
pub(crate) struct Spoken {
    pub(crate) text: String,
    /// Names and arguments.
    pub(crate) calls: Vec<(String, String)>,
}

impl Spoken {
    /// Adds what was said.
    pub(crate) fn add(&mut self, said: Vec<Said>) {
        for said in said {
            match said {
                Said::Text(text) => self.text += &text,
                Said::Call(name) => self.calls.push((name, String::new())),
                Said::Arguments(piece) => {
                    if let Some((_, arguments)) = self.calls.last_mut() {
                        *arguments += &piece;
                    }
                }
                // Not a call: all of it is text.
                Said::Broken { all, .. } => {
                    self.calls.pop();
                    self.text += &all;
                }
            }
        }
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
