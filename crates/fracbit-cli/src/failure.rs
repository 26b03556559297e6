//! Why a command ends early: one error line, its causes, at most one hint, and an exit code that
//! means something.

use fracbit::PlanError;
use fracbit_alloc::AllocError;
use fracbit_engine::EngineError;
use std::{
    fmt::Display,
    io::{self, Write},
    path::Path,
    process::ExitCode,
};

/// The exit codes, as the top-level help lists them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Done.
    Done = 0,
    /// Failed at run time.
    Failed = 1,
    /// A flag or a value is wrong.
    Usage = 2,
    /// A model or file is missing, damaged or does not fit.
    BadInput = 3,
    /// The budget is out of reach.
    OutOfReach = 4,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// What an error line begins with.
const ERROR: &str = "error: ";

/// Why a command ends early.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Whoever read our output has gone (`| head`): nothing to say, and nobody to say it to.
    ClosedPipe,
    /// Something to tell.
    Because(Box<Reason>),
}

impl Failure {
    /// The error with its causes in one line, for a log.
    pub(crate) fn line(&self) -> String {
        match self {
            Self::ClosedPipe => "the output is closed".to_owned(),
            Self::Because(reason) => format!("{:#}", reason.error),
        }
    }
}

/// What to tell.
#[derive(Debug)]
pub(crate) struct Reason {
    pub(crate) exit: Exit,
    error: anyhow::Error,
    hint: Option<String>,
}

impl Reason {
    /// `error:` and below it the causes that it does not already tell, then the hint.
    pub(crate) fn print(&self, to: &mut dyn Write) -> io::Result<()> {
        let mut told = self.error.to_string();
        writeln!(to, "{ERROR}{told}")?;
        for cause in self.error.chain().skip(1) {
            let cause = cause.to_string();
            if !told.contains(&cause) {
                writeln!(to, "caused by: {cause}")?;
                told = cause;
            }
        }
        self.hint.iter().try_for_each(|hint| writeln!(to, "hint: {hint}"))
    }
}

impl Failure {
    pub(crate) fn new(exit: Exit, error: anyhow::Error) -> Self {
        Self::Because(Box::new(Reason { exit, error, hint: None }))
    }

    /// An input that cannot be used.
    pub(crate) fn input(message: impl Display) -> Self {
        Self::new(Exit::BadInput, anyhow::Error::msg(message.to_string()))
    }

    /// A failure to read `path`: bad input.
    pub(crate) fn reading(path: &Path, error: io::Error) -> Self {
        let context = format!("reading `{}`", path.display());
        Self::new(Exit::BadInput, anyhow::Error::new(error).context(context))
    }

    /// A failure to write `path`.
    pub(crate) fn writing(path: &Path, error: io::Error) -> Self {
        let context = format!("writing `{}`", path.display());
        Self::new(Exit::Failed, anyhow::Error::new(error).context(context))
    }

    /// Adds what the user may try, unless there is a hint already.
    #[must_use]
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        if let Self::Because(reason) = &mut self {
            reason.hint.get_or_insert_with(|| hint.into());
        }
        self
    }
}

/// Why a command that a program called ended early.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// What the exit code would be.
    pub exit: Exit,
    /// What would be printed behind `error: `: the error, its causes and a hint, a line each.
    pub message: String,
}

impl From<Failure> for Refusal {
    fn from(failure: Failure) -> Self {
        let Failure::Because(reason) = failure else {
            // Only standard output closes.
            return Self { exit: Exit::Done, message: String::new() };
        };
        let mut text = Vec::new();
        let _ = reason.print(&mut text); // a vector takes everything
        let text = String::from_utf8_lossy(&text);
        let message = text.strip_prefix(ERROR).unwrap_or(&text).trim_end().to_owned();
        Self { exit: reason.exit, message }
    }
}

/// Arguments that do not parse: the reason and what might have been meant, without the advice to
/// type `--help`.
impl From<clap::Error> for Refusal {
    fn from(error: clap::Error) -> Self {
        let text = error.render().to_string();
        let text = text.strip_prefix(ERROR).unwrap_or(&text);
        let advice = |part: &&str| !part.starts_with("Usage:") && !part.starts_with("For more information");
        let parts: Vec<&str> = text.trim_end().split("\n\n").filter(advice).collect();
        Self { exit: Exit::Usage, message: parts.join("\n\n") }
    }
}

impl From<fracbit::Error> for Refusal {
    fn from(error: fracbit::Error) -> Self {
        Failure::from(error).into()
    }
}

/// Writing our own output failed.
impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe {
            return Self::ClosedPipe;
        }
        Self::new(Exit::Failed, anyhow::Error::new(error).context("writing to standard output"))
    }
}

impl From<fracbit::Error> for Failure {
    fn from(error: fracbit::Error) -> Self {
        let (exit, hint) = (facade_exit(&error), facade_hint(&error));
        let failure = Self::new(exit, error.into());
        match hint {
            Some(hint) => failure.hint(hint),
            None => failure,
        }
    }
}

impl From<PlanError> for Failure {
    fn from(error: PlanError) -> Self {
        fracbit::Error::from(error).into()
    }
}

impl From<fracbit_model::Error> for Failure {
    fn from(error: fracbit_model::Error) -> Self {
        fracbit::Error::from(error).into()
    }
}

impl From<EngineError> for Failure {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::Model(error) => error.into(),
            other => Self::new(Exit::Failed, other.into()),
        }
    }
}

impl From<fracbit_io::Error> for Failure {
    fn from(error: fracbit_io::Error) -> Self {
        fracbit::Error::from(error).into()
    }
}

fn facade_exit(error: &fracbit::Error) -> Exit {
    use fracbit::Error as E;
    match error {
        E::Io(e) => io_exit(e),
        E::Model(e) => model_exit(e),
        E::Plan(e) => plan_exit(e),
        E::Scheme(_) | E::Isa(_) | E::Option { .. } => Exit::Usage,
        E::Tensor { .. }
        | E::Packed { .. }
        | E::QuantizationConfig { .. }
        | E::Quantized { .. }
        | E::Calibration { .. }
        | E::Moments { .. }
        | E::Text { .. } => Exit::BadInput,
        _ => Exit::Failed,
    }
}

fn plan_exit(error: &PlanError) -> Exit {
    use fracbit::PlanError as E;
    match error {
        E::Alloc(AllocError::Unreachable { .. } | AllocError::NotTogether { .. })
        | E::Budget { .. }
        | E::Latency { .. } => Exit::OutOfReach,
        E::Plan { .. } | E::Profile { .. } | E::Sensitivity { .. } => Exit::BadInput,
        _ => Exit::Failed,
    }
}

fn model_exit(error: &fracbit_model::Error) -> Exit {
    use fracbit_model::Error as E;
    match error {
        E::Io(e) => io_exit(e),
        E::Sampling { .. } => Exit::Usage,
        E::Rotation(_)
        | E::Linear { .. }
        | E::Floats { .. }
        | E::MissingLinear(_)
        | E::MissingFloats(_)
        | E::Unexpected { .. }
        | E::HeadDim { .. }
        | E::NoLogit
        | E::Token { .. }
        | E::Vocabularies(..) => Exit::BadInput,
        _ => Exit::Failed,
    }
}

fn io_exit(error: &fracbit_io::Error) -> Exit {
    use fracbit_io::Error as E;
    match error {
        E::Io { op, .. } => {
            let reading =
                ["opening", "reading", "listing", "looking"].iter().any(|verb| op.starts_with(verb));
            if reading { Exit::BadInput } else { Exit::Failed }
        }
        E::NoSpace { .. } | E::Output { .. } => Exit::Failed,
        _ => Exit::BadInput,
    }
}

fn facade_hint(error: &fracbit::Error) -> Option<String> {
    use fracbit::Error as E;
    use fracbit_io::{Error as Io, HeaderError, tokenizer::TOKENIZER};
    let hint = match error {
        E::Io(Io::Output { rule, .. }) if rule.contains("to be replaced, or") => {
            "--force replaces a directory of the same kind"
        }
        E::Io(Io::Checksum { .. }) | E::Model(fracbit_model::Error::Io(Io::Checksum { .. })) => {
            "`fracbit verify MODEL` names every damaged file and tensor"
        }
        E::Io(Io::Header {
            source: HeaderError::BeyondFile { .. } | HeaderError::HeaderBeyondFile { .. },
            ..
        }) => "the file ends too early, as after an interrupted download: fetch it again",
        E::Io(Io::Header { source: HeaderError::HeaderTooLarge { got }, .. })
            if got.to_le_bytes().iter().all(|b| b.is_ascii_graphic() || b.is_ascii_whitespace()) =>
        {
            "the file holds text, perhaps a web page or a message of the server: fetch it again"
        }
        E::Model(fracbit_model::Error::Token { .. }) => {
            "tokenizer.json knows tokens that the weights have no rows for: it is another model's, or was added to"
        }
        E::Io(Io::LfsPointer { .. }) => {
            "`git lfs pull` in the clone fetches the files; so does a download of the model"
        }
        E::Io(Io::Io { source, path, .. })
            if source.kind() == io::ErrorKind::NotFound && path.ends_with(TOKENIZER) =>
        {
            "a tokenizer is in tokenizer.json, or in tokenizer.model, vocab.json with merges.txt, tekken.json or a .tiktoken file; transformers makes \
             the first of others: AutoTokenizer.from_pretrained(MODEL).save_pretrained(MODEL)"
        }
        E::Io(Io::NoSpace { .. }) => {
            "free some space (`quantize` and `calibrate` then go on with --resume) or write to another disk; nothing was left under the final name"
        }
        E::Plan(PlanError::Plan { rule, .. }) if rule.contains("hash") => {
            "a plan belongs to one checkpoint: make one with `fracbit plan MODEL --bits B --save plan.json`"
        }
        E::Plan(PlanError::Profile { .. }) => "measure this machine: `fracbit profile MODEL -o machine.json`",
        E::Plan(PlanError::Sensitivity { .. }) => "measure this model: `fracbit sensitivity MODEL -o a.json`",
        E::Quantized { .. } => "another program quantized this model: start from the original checkpoint",
        E::QuantizationConfig { rule, .. } if rule.contains("original") => {
            "`fracbit inspect MODEL` shows where a quantized model came from"
        }
        _ => return None,
    };
    Some(hint.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    fn exit(failure: Failure) -> Exit {
        match failure {
            Failure::ClosedPipe => Exit::Done,
            Failure::Because(reason) => reason.exit,
        }
    }

    fn printed(failure: Failure) -> String {
        let mut text = Vec::new();
        match failure {
            Failure::ClosedPipe => {}
            Failure::Because(reason) => reason.print(&mut text).expect("a vector takes everything"),
        }
        String::from_utf8(text).expect("messages are UTF-8")
    }

    #[test]
    fn codes_follow_the_help() {
        use fracbit_base::Bytes;
        let path = PathBuf::from("m");
        let io =
            |op, kind: io::ErrorKind| fracbit_io::Error::Io { op, path: "m".into(), source: kind.into() };
        let budget = PlanError::Budget {
            asked: Bytes(1),
            asked_bits: 0.1,
            min: Bytes(2),
            min_bits: 0.2,
            max: Bytes(3),
            max_bits: 0.3,
            binds: String::new(),
        };
        let rule = String::new();
        let table: Vec<(Failure, Exit)> = vec![
            (io("opening", io::ErrorKind::NotFound).into(), Exit::BadInput),
            (io("creating a directory in", io::ErrorKind::PermissionDenied).into(), Exit::Failed),
            (fracbit_io::Error::Output { path: path.clone(), rule: rule.clone() }.into(), Exit::Failed),
            (fracbit_io::Error::Template(rule.clone()).into(), Exit::BadInput),
            (fracbit_model::Error::EmptyPrompt.into(), Exit::Failed),
            (fracbit_model::Error::Vocabularies(1, 2).into(), Exit::BadInput),
            (fracbit_model::Error::Token { token: 2, vocab: 2 }.into(), Exit::BadInput),
            (fracbit_model::Error::NoLogit.into(), Exit::BadInput),
            (fracbit_model::Error::from(io("reading", io::ErrorKind::UnexpectedEof)).into(), Exit::BadInput),
            (budget.into(), Exit::OutOfReach),
            (fracbit::Error::Option { option: "--ctx", rule: rule.clone() }.into(), Exit::Usage),
            (PlanError::Profile { origin: rule.clone(), rule: rule.clone() }.into(), Exit::BadInput),
            (PlanError::Latency { rule: rule.clone(), best_us: 1.0 }.into(), Exit::OutOfReach),
            (PlanError::Plan { origin: rule.clone(), rule }.into(), Exit::BadInput),
            (io::Error::from(io::ErrorKind::StorageFull).into(), Exit::Failed),
            (Failure::reading(&path, io::ErrorKind::NotFound.into()), Exit::BadInput),
            (Failure::writing(&path, io::ErrorKind::NotFound.into()), Exit::Failed),
        ];
        for (failure, want) in table {
            let text = format!("{failure:?}");
            assert_eq!(exit(failure), want, "{text}");
        }
    }

    #[test]
    fn a_closed_pipe_ends_quietly() {
        let failure = Failure::from(io::Error::from(io::ErrorKind::BrokenPipe));
        assert!(matches!(failure, Failure::ClosedPipe));
        assert_eq!(printed(failure.hint("not shown")), "");
    }

    #[test]
    fn causes_are_told_once() {
        let failure = Failure::reading(Path::new("x.txt"), io::Error::other("it is on fire")).hint("run");
        assert_eq!(printed(failure), "error: reading `x.txt`\ncaused by: it is on fire\nhint: run\n");
        // This type writes its source into its own message.
        let source = io::Error::other("it is on fire");
        let failure = Failure::from(fracbit_io::Error::Io { op: "opening", path: "x".into(), source });
        assert_eq!(printed(failure), "error: opening `x`: it is on fire\n");
    }

    #[test]
    fn a_short_file_should_be_fetched_again() {
        let source = fracbit_io::HeaderError::HeaderBeyondFile { header: 5, file: 8 };
        let text = printed(fracbit_io::Error::Header { path: "x".into(), source }.into());
        assert!(
            text.starts_with("error: `x`: ") && text.contains("\nhint: the file ends too early"),
            "{text}"
        );
    }

    #[test]
    fn the_first_hint_stays() {
        assert_eq!(printed(Failure::input("no").hint("a").hint("b")), "error: no\nhint: a\n");
    }
}
