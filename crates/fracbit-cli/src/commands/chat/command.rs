//! What a line says: a message, or something to do.

use std::path::{Path, PathBuf};

/// Commands as they are typed, and what each does.
pub(super) const COMMANDS: [(&str, &str); 7] = [
    ("/retry", "another answer to your last message"),
    ("/system [TEXT]", "shows or sets the instruction before the conversation; `-` takes it away"),
    ("/save FILE", "writes the conversation as JSON; another file is not replaced"),
    ("/load FILE", "goes on with a saved conversation"),
    ("/reset", "forgets the conversation"),
    ("/help", "shows this"),
    ("/exit", "leaves, as the end of the input does"),
];

/// What a line says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Line {
    /// Nothing.
    Empty,
    /// Something to the model.
    Message(String),
    Retry,
    /// The instruction: `None` shows it.
    System(Option<String>),
    Save(PathBuf),
    Load(PathBuf),
    Reset,
    Help,
    Exit,
    /// Looks like a command and is none, or one that lacks something.
    Unknown,
}

impl Line {
    /// Reads a line. Text that only begins with a slash, such as a path, is a message.
    pub(super) fn read(line: &str) -> Self {
        let line = line.trim();
        let (word, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let rest = rest.trim();
        let file = |make: fn(PathBuf) -> Self| {
            if rest.is_empty() { Self::Unknown } else { make(Path::new(rest).to_owned()) }
        };
        match (word, rest) {
            ("", _) => Self::Empty,
            ("/retry", "") => Self::Retry,
            ("/system", "") => Self::System(None),
            ("/system", text) => Self::System(Some(text.to_owned())),
            ("/save", _) => file(Self::Save),
            ("/load", _) => file(Self::Load),
            ("/reset", "") => Self::Reset,
            ("/help", "") => Self::Help,
            ("/exit" | "/quit", "") => Self::Exit,
            (word, "") if word.starts_with('/') => Self::Unknown,
            _ => Self::Message(line.to_owned()),
        }
    }

    /// The commands in lines, for people.
    pub(super) fn help() -> String {
        let lines = COMMANDS.map(|(command, does)| format!("{command:<15} {does}"));
        lines.join("\n") + "\nA line that ends with a backslash goes on in the next; Ctrl-C stops an answer."
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_messages_or_commands() {
        let message = |text: &str| Line::Message(text.to_owned());
        for (line, want) in [
            ("  \n", Line::Empty),
            (" Hello! \n", message("Hello!")),
            ("a\nb", message("a\nb")),
            ("/retry", Line::Retry),
            ("/retry now", message("/retry now")),
            ("/system", Line::System(None)),
            ("/system Be brief.\nAlways.", Line::System(Some("Be brief.\nAlways.".to_owned()))),
            ("/save a b.json ", Line::Save("a b.json".into())),
            ("/load", Line::Unknown),
            ("/rest", Line::Unknown),
            ("/usr/bin is what?", message("/usr/bin is what?")),
            ("/quit", Line::Exit),
        ] {
            assert_eq!(Line::read(line), want, "{line:?}");
        }
        let help = Line::help();
        assert!(COMMANDS.iter().all(|(command, _)| help.contains(command)), "{help}");
    }
}
