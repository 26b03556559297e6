//! Finds calls of functions in a text that comes in pieces.
//!
//! A call is said as soon as its name is known, and its arguments as they come. What looks like a
//! call and is none, of an unknown function or not of the right form, is text like any other.

use serde_json::{Map, Value};

use super::Format;

/// What a piece of the text turned out to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Said {
    Text(String),
    /// The next call begins.
    Call(String),
    /// More of the arguments of the last one, as the model wrote them.
    Arguments(String),
    /// The last one was none: all that was written of it, and what of that was not said yet.
    Broken {
        all: String,
        rest: String,
    },
}

/// Where the text is.
#[derive(Clone, Debug)]
enum Place {
    Text,
    /// Behind what opens calls.
    Open,
    /// Between calls of a list.
    List,
    /// At the `{` of a call, up to its arguments.
    Call,
    /// In the arguments.
    Arguments(Scan),
    /// Behind the arguments, in the object of the call.
    Rest(Scan),
    /// Behind a call.
    Close,
}

/// What to do next.
enum Step {
    /// Wait for more of the text.
    Wait,
    /// Look again.
    Again,
}

/// The calls of one text.
#[derive(Clone, Debug)]
pub(crate) struct Calls {
    format: Format,
    names: Vec<String>,
    place: Place,
    /// Whether any text was said.
    began: bool,
    count: usize,
    /// What is not looked at yet.
    held: String,
    /// What was looked at of a call that is not through, with what opened it.
    raw: String,
    arguments: String,
    said: Vec<Said>,
}

/// Looks for the end of an object: braces and brackets outside of texts.
#[derive(Clone, Debug, Default)]
struct Scan {
    depth: usize,
    text: bool,
    escaped: bool,
}

impl Scan {
    /// Where the object ends, if it does in what comes next.
    fn end(&mut self, piece: &str) -> Option<usize> {
        for (at, byte) in piece.bytes().enumerate() {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' if self.text => self.escaped = true,
                b'"' => self.text = !self.text,
                _ if self.text => {}
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return Some(at + 1);
                    }
                }
                _ => {}
            }
        }
        None
    }
}

/// How a call begins.
enum Header {
    /// More should come before one can tell.
    More,
    /// It is none.
    None,
    /// Its name, and where its arguments begin.
    Named(String, usize),
    /// Its parts stand in another order: it is looked at when all of it is there.
    Whole,
}

/// Reads `{"name": "...", "arguments": ` as far as it is there.
fn header(text: &str, names: &[String]) -> Header {
    let mut at = 1;
    let blank = |at: usize| text.len() - text[at..].trim_start().len();
    // The text at this place, and what is behind it.
    let string = |at: usize| -> Result<(String, usize), Header> {
        match text[at..].chars().next() {
            None => return Err(Header::More),
            Some('"') => {}
            Some(_) => return Err(Header::None),
        }
        let mut escaped = false;
        for (i, byte) in text.bytes().enumerate().skip(at + 1) {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => {
                    let found = serde_json::from_str(&text[at..=i]).map_err(|_| Header::None)?;
                    return Ok((found, i + 1));
                }
                _ => {}
            }
        }
        Err(Header::More)
    };
    let mark = |at: usize, want: char| match text[at..].chars().next() {
        None => Err(Header::More),
        Some(c) if c == want => Ok(at + 1),
        Some(_) => Err(Header::None),
    };
    let mut read = || -> Result<Header, Header> {
        let (key, end) = string(blank(at))?;
        at = blank(mark(blank(end), ':')?);
        if key != "name" {
            let known = ["arguments", "parameters", "id", "type", "function"].contains(&key.as_str());
            return Err(if known { Header::Whole } else { Header::None });
        }
        let (name, end) = string(at)?;
        if !names.contains(&name) {
            return Err(Header::None);
        }
        at = blank(end);
        if text[at..].starts_with('}') {
            return Err(Header::Whole);
        }
        let (key, end) = string(blank(mark(at, ',')?))?;
        at = blank(mark(blank(end), ':')?);
        if key != "arguments" && key != "parameters" {
            return Err(Header::Whole);
        }
        match text[at..].chars().next() {
            None => Err(Header::More),
            Some('{') => Ok(Header::Named(name, at)),
            Some(_) => Err(Header::Whole),
        }
    };
    read().unwrap_or_else(|other| other)
}

/// Name and arguments of a call that is all there.
fn whole(text: &str, names: &[String]) -> Option<(String, String)> {
    let object: Map<String, Value> = serde_json::from_str(text).ok()?;
    let object = match object.get("function") {
        Some(Value::Object(inner)) => inner,
        _ => &object,
    };
    let name = object.get("name")?.as_str().filter(|name| names.iter().any(|known| known == name))?;
    let arguments = match object.get("arguments").or_else(|| object.get("parameters")) {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(arguments)) => arguments.clone(),
        Some(Value::String(text)) => serde_json::from_str(text).ok()?,
        Some(_) => return None,
    };
    Some((name.to_owned(), Value::Object(arguments).to_string()))
}

impl Calls {
    /// Calls of these functions.
    pub(crate) fn new(format: Format, names: Vec<String>) -> Self {
        Self {
            format,
            names,
            place: Place::Text,
            began: false,
            count: 0,
            held: String::new(),
            raw: String::new(),
            arguments: String::new(),
            said: Vec::new(),
        }
    }

    /// Calls so far.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// What is known now that `piece` has come.
    pub(crate) fn push(&mut self, piece: &str) -> Vec<Said> {
        self.held.push_str(piece);
        while let Step::Again = self.step() {}
        std::mem::take(&mut self.said)
    }

    /// What is known when nothing more comes.
    pub(crate) fn finish(&mut self) -> Vec<Said> {
        let rest = std::mem::take(&mut self.held);
        match std::mem::replace(&mut self.place, Place::Text) {
            Place::Text | Place::Close if self.count > 0 && rest.trim().is_empty() => {}
            // The call is through, and its end was cut off.
            Place::Close if self.closer().starts_with(rest.trim()) => {}
            Place::Text | Place::Close => self.text(rest),
            Place::Arguments(_) | Place::Rest(_) => self.broken(rest),
            Place::List if self.raw.is_empty() && rest.trim().is_empty() => {}
            Place::Open | Place::List | Place::Call => self.no_call(rest),
        }
        std::mem::take(&mut self.said)
    }

    /// What a call ends with, where it is more than its arguments.
    fn closer(&self) -> &'static str {
        match self.format {
            Format::Hermes | Format::Generic => Format::CLOSER,
            Format::Llama | Format::Mistral | Format::MistralArgs => "",
        }
    }

    fn text(&mut self, text: String) {
        if !text.is_empty() {
            self.began = true;
            self.said.push(Said::Text(text));
        }
    }

    /// Takes so many bytes, which belong to a call.
    fn take(&mut self, bytes: usize) -> String {
        let rest = self.held.split_off(bytes);
        let taken = std::mem::replace(&mut self.held, rest);
        self.raw.push_str(&taken);
        taken
    }

    /// What was looked at is a text, and `rest` behind it.
    fn no_call(&mut self, rest: String) {
        let text = std::mem::take(&mut self.raw) + &rest;
        self.text(text);
        self.place = Place::Text;
    }

    /// The call that was said is none.
    fn broken(&mut self, rest: String) {
        self.count -= 1;
        self.began = true;
        let all = std::mem::take(&mut self.raw) + &rest;
        self.said.push(Said::Broken { all, rest });
        self.place = Place::Text;
    }

    /// A call begins; its arguments follow.
    fn begin(&mut self, name: String) {
        self.count += 1;
        self.arguments.clear();
        self.said.push(Said::Call(name));
    }

    /// A call is through.
    fn end(&mut self) {
        self.raw.clear();
        self.place = match self.format {
            Format::MistralArgs => Place::Text,
            _ => Place::Close,
        };
    }

    fn step(&mut self) -> Step {
        let blank = self.held.len() - self.held.trim_start().len();
        match &mut self.place {
            Place::Text => self.look(),
            Place::Open => self.opened(blank),
            Place::List => match self.held[blank..].chars().next() {
                None => Step::Wait,
                Some('{') => {
                    self.take(blank);
                    self.place = Place::Call;
                    Step::Again
                }
                Some(']') => {
                    self.held.drain(..=blank);
                    self.raw.clear();
                    self.place = Place::Text;
                    Step::Again
                }
                Some(_) => self.nothing(),
            },
            Place::Call => self.called(),
            Place::Arguments(scan) => {
                let end = scan.end(&self.held);
                let piece = self.take(end.unwrap_or(self.held.len()));
                if piece.is_empty() {
                    return Step::Wait;
                }
                self.arguments.push_str(&piece);
                self.said.push(Said::Arguments(piece));
                if end.is_none() {
                    return Step::Wait;
                }
                if serde_json::from_str::<Map<String, Value>>(&self.arguments).is_err() {
                    self.broken(String::new());
                } else if self.format == Format::MistralArgs {
                    self.end();
                } else {
                    self.place = Place::Rest(Scan { depth: 1, ..Scan::default() });
                }
                Step::Again
            }
            Place::Rest(scan) => {
                // Nothing was looked at yet, or a member.
                let first = self.held[blank..].chars().next();
                if self.raw.ends_with(&self.arguments) && !matches!(first, None | Some('}' | ',')) {
                    let rest = std::mem::take(&mut self.held);
                    self.broken(rest);
                    return Step::Again;
                }
                if first.is_none() {
                    return Step::Wait;
                }
                let end = scan.end(&self.held);
                self.take(end.unwrap_or(self.held.len()));
                if end.is_none() {
                    return Step::Wait;
                }
                self.end();
                Step::Again
            }
            Place::Close => self.closed(blank),
        }
    }

    /// What is held is text, and no call.
    fn nothing(&mut self) -> Step {
        // What looked like a call does not do so again; what follows it may.
        let first = if self.raw.is_empty() { self.held.chars().next().map_or(0, char::len_utf8) } else { 0 };
        let rest = self.held.drain(..first).collect();
        self.no_call(rest);
        Step::Again
    }

    /// Looks for the beginning of a call in text.
    fn look(&mut self) -> Step {
        let opener = self.format.opener();
        let blank = self.held.len() - self.held.trim_start().len();
        if self.format == Format::Llama && !self.began && self.held[blank..].starts_with('{') {
            self.take(blank);
            self.place = Place::Call;
            return Step::Again;
        }
        if let Some(at) = self.held.find(opener) {
            let text = self.held[..at].trim_end().to_owned();
            self.held.drain(..text.len());
            self.text(text);
            self.take(self.held.find(opener).expect("it is behind that") + opener.len());
            self.place = Place::Open;
            return Step::Again;
        }
        // What may be the beginning of one is held back, and spaces before it.
        let mut keep = (1..opener.len().min(self.held.len() + 1)).rev();
        let kept = keep.find(|&len| self.held.ends_with(&opener[..len])).unwrap_or(0);
        let text = self.held[..self.held.len() - kept].trim_end().to_owned();
        self.held.drain(..text.len());
        self.text(text);
        Step::Wait
    }

    /// Behind what opens calls.
    fn opened(&mut self, blank: usize) -> Step {
        let list = self.format == Format::Mistral;
        match self.held[blank..].chars().next() {
            None => Step::Wait,
            Some('[') if list => {
                self.take(blank + 1);
                self.place = Place::List;
                Step::Again
            }
            Some('{') if self.format != Format::MistralArgs => {
                self.take(blank);
                self.place = Place::Call;
                Step::Again
            }
            Some(_) if self.format == Format::MistralArgs => self.named(),
            Some(_) => self.nothing(),
        }
    }

    /// The name that stands before `[ARGS]`.
    fn named(&mut self) -> Step {
        const ARGUMENTS: &str = "[ARGS]";
        // Longer than any name with its number.
        const MOST: usize = 64 + 64;
        let Some(at) = self.held.find(ARGUMENTS) else {
            return if self.held.len() > MOST { self.nothing() } else { Step::Wait };
        };
        let name = self.held[..at].split("[CALL_ID]").next().unwrap_or_default().trim().to_owned();
        let behind = at + ARGUMENTS.len();
        let blank = self.held[behind..].len() - self.held[behind..].trim_start().len();
        match self.held[behind + blank..].chars().next() {
            None if self.names.contains(&name) => Step::Wait,
            Some('{') if self.names.contains(&name) => {
                self.take(behind + blank);
                self.begin(name);
                self.place = Place::Arguments(Scan::default());
                Step::Again
            }
            _ => self.nothing(),
        }
    }

    /// At the `{` of a call.
    fn called(&mut self) -> Step {
        match header(&self.held, &self.names) {
            Header::More => Step::Wait,
            Header::None => self.nothing(),
            Header::Named(name, at) => {
                self.take(at);
                self.begin(name);
                self.place = Place::Arguments(Scan::default());
                Step::Again
            }
            Header::Whole => {
                let Some(end) = Scan::default().end(&self.held) else { return Step::Wait };
                let Some((name, arguments)) = whole(&self.held[..end], &self.names) else {
                    return self.nothing();
                };
                self.take(end);
                self.begin(name);
                self.said.push(Said::Arguments(arguments));
                self.end();
                Step::Again
            }
        }
    }

    /// Behind a call.
    fn closed(&mut self, blank: usize) -> Step {
        let rest = &self.held[blank..];
        let Some(first) = rest.chars().next() else { return Step::Wait };
        let closer = self.closer();
        match self.format {
            Format::Hermes | Format::Generic if rest.starts_with(closer) => {
                self.held.drain(..blank + closer.len());
                self.place = Place::Text;
            }
            Format::Hermes | Format::Generic if closer.starts_with(rest) => return Step::Wait,
            Format::Llama if first == ';' => {
                self.held.drain(..=blank);
            }
            Format::Llama if first == '{' => {
                self.take(blank);
                self.place = Place::Call;
            }
            Format::Mistral if first == ',' => {
                self.held.drain(..=blank);
                self.place = Place::List;
            }
            Format::Mistral if first == ']' => {
                self.held.drain(..=blank);
                self.place = Place::Text;
            }
            _ => self.place = Place::Text,
        }
        Step::Again
    }
}
