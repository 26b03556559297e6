//! Opening models and reading and writing small files, with errors that say what to do.

use crate::{
    context::Context,
    failure::{Exit, Failure},
    interrupt,
};
use fracbit::{Opened, Progress};
use fracbit_io::{
    Claim, OutputDir, Overwrite, Resumable, Tokenizer, config, manifest::MANIFEST, output, tokenizer,
};
use std::{fs, io::Read, path::Path};

/// The flag that continues a run.
const RESUME: &str = "--resume";
/// Where text comes from when a path is `-`.
const STDIN: &str = "-";

/// Opens a model directory or a GGUF file, and says what in it is not followed.
pub(crate) fn open(dir: &Path, context: &Context) -> Result<Opened, Failure> {
    require_dir(dir)?;
    let opened = Opened::new(dir)?;
    opened.notes().iter().for_each(|note| context.progress.note(&format!("note: {note}")));
    Ok(opened)
}

/// The tokenizer of a model; says what in its files is not followed.
pub(crate) fn tokenizer(opened: &Opened, context: &Context) -> Result<Tokenizer, Failure> {
    let tokenizer = opened.tokenizer()?;
    tell(&tokenizer, context);
    Ok(tokenizer)
}

/// Says what in the files of a tokenizer is not followed.
pub(crate) fn tell(tokenizer: &Tokenizer, context: &Context) {
    tokenizer.notes().iter().for_each(|note| context.progress.note(&format!("note: {note}")));
}

/// Refuses what cannot be a model directory, with a hint.
pub(crate) fn require_dir(dir: &Path) -> Result<(), Failure> {
    let shown = dir.display();
    let holds = "a model directory holds config.json, tokenizer.json and model.safetensors (or shards with their index)";
    if !dir.exists() {
        let failure = Failure::input(format_args!(
            "model `{shown}` should be a directory or a GGUF file, there is nothing of this name"
        ));
        return Err(match hub_name(dir) {
            Some(name) => failure
                .hint(format!("download it first, for instance: hf download {shown} --local-dir {name}")),
            None => failure.hint(holds),
        });
    }
    if fracbit_io::gguf::is_gguf(dir) {
        return Ok(());
    }
    if !dir.is_dir() {
        let failure = Failure::input(format_args!(
            "model `{shown}` should be a directory or a GGUF file, it is another file"
        ));
        return Err(failure.hint(holds));
    }
    if !dir.join("config.json").exists() {
        let failure = Failure::input(format_args!("model `{shown}` should hold config.json"));
        return Err(if dir.join("snapshots").is_dir() {
            failure.hint("in a cache of the Hugging Face hub the model is a directory within `snapshots`")
        } else {
            failure.hint(holds)
        });
    }
    Ok(())
}

/// Refuses an output directory that a command reads from or that holds what it reads: it would be
/// replaced, and is then gone.
pub(crate) fn apart(out: &Path, read: &[&Path]) -> Result<(), Failure> {
    read.iter().find(|path| output::holds(out, path)).map_or(Ok(()), |path| {
        let rule =
            format!("output `{}`: should be apart from `{}`, which is read", out.display(), path.display());
        Err(Failure::new(Exit::Usage, anyhow::Error::msg(rule)).hint("choose another name"))
    })
}

/// Refuses the name of an output directory that no JSON document can hold.
pub(crate) fn nameable(out: &Path, json: bool) -> Result<(), Failure> {
    if !json || out.to_str().is_some() {
        return Ok(());
    }
    let rule = format!("--json: the name of the output should be UTF-8, got `{}`", out.display());
    Err(Failure::new(Exit::Usage, anyhow::Error::msg(rule)))
}

/// Starts or continues a resumable directory for the run that `key` describes, and tells what
/// earlier runs left beside it. `None` when the run that is to be continued had finished.
pub(crate) fn begin(
    out: &Path,
    overwrite: Overwrite,
    key: &str,
    resume: bool,
    context: &Context,
) -> Result<Option<OutputDir>, Failure> {
    let left = output::leftovers(out);
    let progress = &context.progress;
    match OutputDir::resumable(out, overwrite, key, resume)? {
        Resumable::Finished(path) => {
            progress.note(&format!("{}: the interrupted run had finished it", path.display()));
            Ok(None)
        }
        Resumable::Continued(dir) => {
            say_how_to_resume(context)?;
            progress.note(&format!("continuing {}", dir.scratch("").display()));
            Ok(Some(dir))
        }
        Resumable::New(dir) => {
            say_how_to_resume(context)?;
            for old in left {
                let path = old.path.display();
                progress.note(&match (old.resumable, resume) {
                    (true, false) => format!("note: {path} is of an interrupted run: --resume continues it if it was this one; otherwise delete it"),
                    (true, true) => format!("note: {path} is of another run, or in use by one"),
                    (false, _) => format!("note: {path} is of an interrupted run and cannot be continued: delete it"),
                });
            }
            if resume {
                progress.note("nothing to continue: starting from the beginning");
            }
            Ok(Some(dir))
        }
    }
}

/// Has Ctrl-C say how the command that runs can be continued; a program that called it has a way
/// of its own with Ctrl-C.
pub(crate) fn say_how_to_resume(context: &Context) -> Result<(), Failure> {
    if context.progress.is_heard() {
        return Ok(());
    }
    let typed_again: Vec<String> = std::env::args_os().map(|word| typed(Path::new(&word))).collect();
    let resume = if typed_again.iter().any(|word| word == RESUME) { "" } else { " --resume" };
    interrupt::say_at_interrupt(format!(
        "interrupted; this continues it:\n  {}{resume}",
        typed_again.join(" ")
    ))
}

/// A path as a shell takes it: in quotes where it holds more than letters, digits and what is plain
/// in a path.
pub(crate) fn typed(path: &Path) -> String {
    let shown = path.display().to_string();
    let plain = |c: char| c.is_alphanumeric() || "/._-+=:,@%~".contains(c);
    if !shown.is_empty() && shown.chars().all(plain) {
        return shown;
    }
    format!("'{}'", shown.replace('\'', "'\\''"))
}

/// Looks at a directory that is to be written before any work for it is done: whether its name is
/// free, its place can be written, and no other run writes it now. To `resume`, it may be there,
/// since the interrupted run may have finished it.
pub(crate) fn available(out: &Path, overwrite: Overwrite, resume: bool) -> Result<(), Failure> {
    if resume && out.exists() {
        return Ok(());
    }
    Ok(OutputDir::create(out, overwrite).map(drop)?)
}

/// The same of a file, whose name is then this run's until the value is dropped; `model` is read
/// meanwhile.
pub(crate) fn claim(path: &Path, force: bool, model: Option<&Path>) -> Result<Claim, Failure> {
    refuse_existing(path, force).map_err(|failure| failure.hint("--force replaces the file"))?;
    if let Some(model) = model.filter(|model| path.exists() && is_part(path, model)) {
        let rule =
            format!("output `{}`: should be no file of `{}`, which is read", path.display(), model.display());
        return Err(Failure::new(Exit::Usage, anyhow::Error::msg(rule)).hint("choose another name"));
    }
    Ok(Claim::new(path)?)
}

/// Whether a file is a model or one of those that a model directory is read from.
fn is_part(path: &Path, model: &Path) -> bool {
    let place = path.parent().map(|dir| if dir.as_os_str().is_empty() { Path::new(".") } else { dir });
    let same = |a: &Path, b: &Path| a.canonicalize().is_ok_and(|a| b.canonicalize().is_ok_and(|b| a == b));
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let others = [config::CONFIG, config::GENERATION_CONFIG, MANIFEST];
    let read = name.contains(".safetensors") || tokenizer::FILES.contains(&name) || others.contains(&name);
    same(path, model) || (read && place.is_some_and(|place| same(place, model)))
}

/// Refuses to replace a file, unless `force`, and to take the place of anything else, such as a
/// device, always.
pub(crate) fn refuse_existing(path: &Path, force: bool) -> Result<(), Failure> {
    // A link that leads nowhere is there, too.
    let Ok(there) = path.metadata().or_else(|_| path.symlink_metadata()) else { return Ok(()) };
    if !(there.is_file() || there.is_symlink()) {
        let rule = format!("output `{}`: should be a file, it is something else", path.display());
        return Err(Failure::new(Exit::Failed, anyhow::Error::msg(rule)).hint("choose another name"));
    }
    if force {
        return Ok(());
    }
    let exists = std::io::Error::from(std::io::ErrorKind::AlreadyExists);
    Err(Failure::writing(path, exists))
}

/// The last part of a path, for what goes out with a model: where it lies on this machine is
/// nobody's business, and the same files give the same bytes wherever they lie.
pub(crate) fn name(path: &Path) -> String {
    let whole = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    typed(whole.file_name().map_or(path, Path::new))
}

/// The last part of a path that looks like `organization/model`.
fn hub_name(dir: &Path) -> Option<&str> {
    let (organization, name) = dir.to_str()?.split_once('/')?;
    let plain = |s: &str| !s.is_empty() && !s.starts_with(['.', '~']) && !s.contains('/');
    (plain(organization) && plain(name)).then_some(name)
}

/// Text of a file, or of standard input for `-`.
pub(crate) fn read_text(path: &Path) -> Result<String, Failure> {
    let bytes = if path.as_os_str() == STDIN {
        let mut bytes = Vec::new();
        std::io::stdin().lock().read_to_end(&mut bytes).map(|_| bytes)
    } else {
        fs::read(path)
    };
    let named = if path.as_os_str() == STDIN { Path::new("standard input") } else { path };
    let bytes = bytes.map_err(|e| Failure::reading(named, e))?;
    String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        Failure::input(format_args!("`{}`: should be UTF-8 text, byte {at} is not", named.display()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(failure: Failure) -> String {
        format!("{failure:?}")
    }

    #[test]
    fn hub_names_are_recognized() {
        for (path, want) in [
            ("meta-llama/Llama-3.2-1B", Some("Llama-3.2-1B")),
            ("./models/x", None),
            ("../x", None),
            ("/models/x", None),
            ("a/b/c", None),
            ("plain", None),
        ] {
            assert_eq!(hub_name(Path::new(path)), want, "{path}");
        }
    }

    #[test]
    fn paths_can_be_typed() {
        for (path, want) in
            [("a/b-1.5", "a/b-1.5"), ("../ü", "../ü"), ("sp ace", "'sp ace'"), ("it's", "'it'\\''s'")]
        {
            assert_eq!(typed(Path::new(path)), want);
        }
    }

    #[test]
    fn what_is_no_model_says_so() -> std::io::Result<()> {
        let dir = tempfile::tempdir()?;
        let file = dir.path().join("m.bin");
        fs::write(&file, b"x")?;
        let hub = dir.path().join("models--a--b");
        fs::create_dir_all(hub.join("snapshots"))?;
        for (path, word) in [
            (dir.path().join("absent"), "nothing of this name"),
            (file, "another file"),
            (dir.path().to_path_buf(), "should hold config.json"),
            (hub, "within `snapshots`"),
        ] {
            let failure = require_dir(&path).expect_err("it is no model");
            assert!(message(failure).contains(word), "{word}");
        }
        Ok(())
    }

    #[test]
    fn text_must_be_utf8() -> std::io::Result<()> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("t");
        fs::write(&path, b"ab\xff")?;
        assert!(message(read_text(&path).expect_err("not UTF-8")).contains("byte 2"));
        Ok(())
    }
}
