//! A conversation: what was said, what of it the model still sees, and how it is kept in a file.

use crate::{failure::Failure, files};
use fracbit_io::Message;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// What was said.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Conversation {
    /// The instruction before it.
    pub(super) system: Option<String>,
    /// Messages in turn, the user's first.
    turns: Vec<Message>,
    /// The first message that the model still sees, one of the user.
    from: usize,
    /// The file that it was read from or written to.
    file: Option<PathBuf>,
}

/// The form of a file: that of a request to `fracbit serve`.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Saved {
    messages: Vec<Message>,
}

impl Conversation {
    pub(super) fn new(system: Option<String>) -> Self {
        Self { system, ..Self::default() }
    }

    /// Forgets what was said, not the instruction.
    pub(super) fn reset(&mut self) {
        *self = Self::new(self.system.take());
    }

    /// The user says something; a message that got no answer gives way to it.
    pub(super) fn ask(&mut self, text: String) {
        self.unask();
        self.turns.push(Message::new("user", text));
    }

    /// The model does.
    pub(super) fn answer(&mut self, text: String) {
        self.turns.push(Message::new("assistant", text));
    }

    /// Takes back the last answer, if there is one; whether a message of the user stands last.
    pub(super) fn retry(&mut self) -> bool {
        self.turns.pop_if(|last| last.role == "assistant");
        !self.turns.is_empty()
    }

    /// Takes back the user's last message.
    pub(super) fn unask(&mut self) {
        self.turns.pop_if(|last| last.role == "user");
    }

    /// What the model sees.
    pub(super) fn seen(&self) -> Vec<Message> {
        let system = self.system.iter().map(|text| Message::new("system", text));
        system.chain(self.turns[self.from..].iter().cloned()).collect()
    }

    /// Leaves the oldest turn, a message with its answer, out of what the model sees; `false` where
    /// only the last one is left.
    pub(super) fn drop_oldest(&mut self) -> bool {
        let later = self.turns.iter().enumerate().skip(self.from + 1);
        let next = later.filter(|(_, message)| message.role == "user").map(|(at, _)| at).next();
        self.from = next.unwrap_or(self.from);
        next.is_some()
    }

    /// Writes it. Another file than its own is not replaced.
    pub(super) fn save(&mut self, path: PathBuf) -> Result<(), Failure> {
        files::refuse_existing(&path, self.file.as_ref() == Some(&path)).map_err(|failure| {
            failure.hint("/save does not replace a file that is not of this conversation")
        })?;
        let system = self.system.iter().map(|text| Message::new("system", text));
        let saved = Saved { messages: system.chain(self.turns.iter().cloned()).collect() };
        let mut text = serde_json::to_string_pretty(&saved).expect("texts are JSON");
        text.push('\n');
        fracbit_io::write_atomic(&path, text.as_bytes()).map_err(|e| Failure::writing(&path, e))?;
        self.file = Some(path);
        Ok(())
    }

    /// Reads it.
    pub(super) fn load(path: PathBuf) -> Result<Self, Failure> {
        let text = files::read_text(&path)?;
        let bad = |rule: String| Failure::input(format!("`{}`: {rule}", path.display()));
        let Saved { mut messages } = serde_json::from_str(&text).map_err(|e| bad(e.to_string()))?;
        let system = messages.first().is_some_and(|first| first.role == "system");
        let system = system.then(|| messages.remove(0).content);
        for (at, message) in messages.iter().enumerate() {
            let want = if at % 2 == 0 { "user" } else { "assistant" };
            if message.role != want {
                let rule = "should be `user` and `assistant` in turn, after a `system` or none";
                return Err(bad(format!("`role` of messages {rule}, got `{}` for `{want}`", message.role)));
            }
        }
        Ok(Self { system, turns: messages, from: 0, file: Some(path) })
    }

    /// Messages of both.
    pub(super) fn len(&self) -> usize {
        self.turns.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn talked() -> Conversation {
        let mut talk = Conversation::new(Some("Be brief.".to_owned()));
        for (question, answer) in [("a", "A"), ("b", "B"), ("c", "C")] {
            talk.ask(question.to_owned());
            talk.answer(answer.to_owned());
        }
        talk
    }

    fn shown(talk: &Conversation) -> String {
        talk.seen().iter().map(|message| message.content.as_str()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn oldest_turns_go_whole_and_the_last_one_stays() {
        let mut talk = talked();
        assert_eq!(shown(&talk), "Be brief. a A b B c C");
        assert!(talk.drop_oldest());
        assert_eq!(shown(&talk), "Be brief. b B c C");
        assert!(talk.drop_oldest() && !talk.drop_oldest());
        assert_eq!((shown(&talk).as_str(), talk.len()), ("Be brief. c C", 6));
        assert!(talk.retry());
        assert_eq!(shown(&talk), "Be brief. c");
        talk.reset();
        assert_eq!((shown(&talk).as_str(), talk.retry()), ("Be brief.", false));
    }

    #[test]
    fn files_hold_all_of_it() -> std::io::Result<()> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("talk.json");
        let mut talk = talked();
        talk.drop_oldest();
        talk.save(path.clone()).expect("a new file");
        talk.ask("d".to_owned());
        talk.save(path.clone()).expect("its own file");
        let mut read = Conversation::load(path.clone()).expect("what was written");
        assert_eq!((shown(&read).as_str(), read.file.as_ref()), ("Be brief. a A b B c C d", Some(&path)));
        let other = dir.path().join("other.json");
        fs::write(&other, "x")?;
        assert!(read.save(other.clone()).is_err() && fs::read(&other)? == b"x");
        for bad in [
            r#"{"messages": [{"role": "assistant", "content": "A"}]}"#,
            r#"{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}"#,
            r#"{"messages": [{"role": "user", "content": "a"}], "model": "m"}"#,
            "no JSON",
        ] {
            fs::write(&other, bad)?;
            let failure = Conversation::load(other.clone()).expect_err(bad);
            assert!(format!("{failure:?}").contains("other.json"), "{failure:?}");
        }
        Ok(())
    }
}
