//! Every checkpoint of a folder through every command: `cargo xtask zoo DIR [TEXT]`.
//!
//! A checkpoint is a directory with `config.json` or a GGUF file, up to three levels down. Each is
//! inspected, quantized to 4 and to 2.5 bits ([`QUICK`]), evaluated on a text as it is and
//! quantized, continued by `run`, and served one request. What fails has the program's error line
//! in its place; the rest goes on. The table is in Markdown, progress goes to standard error.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a command-line tool")]

use serde_json::{Value, json};
use std::{
    ffi::OsStr,
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

/// How checkpoints are quantized: the point is whether it works, and quality only as far as it
/// takes little time.
const QUICK: [&str; 6] = ["--effort", "fast", "--tokens", "2048", "--sensitivity", "prior"];
/// How they are evaluated.
const WINDOWS: [&str; 4] = ["--ctx", "256", "--windows", "8"];
const BITS: [&str; 2] = ["4", "2.5"];
const PROMPT: &str = "Once upon a time there was a little girl";
const HEADER: &str = "\
| checkpoint | architecture | parameters | inspect | quantize 4 | quantize 2.5 | eval: perplexity as it is, 4, 2.5 bits | KL 4, 2.5 | run | serve | s |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
";
/// Most characters of an error line.
const LINE: usize = 120;
/// How deep checkpoints may lie below the folder.
const DEPTH: usize = 3;

fn main() -> ExitCode {
    let args: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let (program, dir, text) = match args.as_slice() {
        [program, dir] => (program, dir, demo_text()),
        [program, dir, text] => (program, dir, text.clone()),
        _ => {
            eprintln!("usage: zoo PROGRAM DIR [TEXT]");
            return ExitCode::FAILURE;
        }
    };
    match table(program, dir, &text) {
        Ok((table, whole)) => {
            print!("{table}");
            if whole { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(message) => {
            eprintln!("zoo: {message}");
            ExitCode::FAILURE
        }
    }
}

/// The held-out text of the embedded model.
fn demo_text() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("demo-model/stories.txt")
}

/// The table of a folder, and whether all of it worked.
pub(crate) fn table(program: &Path, dir: &Path, text: &Path) -> Result<(String, bool), String> {
    let mut found = Vec::new();
    find(dir, DEPTH, &mut found)?;
    if found.is_empty() {
        return Err(format!("`{}` should hold checkpoints or GGUF files", dir.display()));
    }
    let (mut table, mut whole) = (HEADER.to_owned(), true);
    for model in &found {
        let row = Row::of(program, model, text)?;
        whole &= row.whole;
        let name = model.strip_prefix(dir).unwrap_or(model).display();
        table.push_str(&format!("| `{name}` | {} |\n", row.cells.join(" | ")));
    }
    Ok((table, whole))
}

/// Checkpoints in the order of their names; of split GGUF files the first.
fn find(dir: &Path, depth: usize, found: &mut Vec<PathBuf>) -> Result<(), String> {
    let entries = std::fs::read_dir(dir).map_err(|e| format!("`{}`: {e}", dir.display()))?;
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    for path in paths {
        let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
        let later = name.contains("-of-") && !name.contains("-00001-of-");
        if path.is_file() && name.ends_with(".gguf") && !later || path.join("config.json").is_file() {
            found.push(path);
        } else if path.is_dir() && depth > 1 && !name.starts_with('.') {
            find(&path, depth - 1, found)?;
        }
    }
    Ok(())
}

struct Row {
    cells: Vec<String>,
    whole: bool,
}

impl Row {
    fn of(program: &Path, model: &Path, text: &Path) -> Result<Self, String> {
        let start = Instant::now();
        let place = tempfile::tempdir().map_err(|e| e.to_string())?;
        let program = Program { path: program };
        let about = program.json(&["inspect".as_ref(), model.as_ref()]);
        let said = |field: &str| about.as_ref().map_or(Value::Null, |about| about[field].clone());
        let mut row = Self { cells: Vec::new(), whole: true };
        row.cells.push(said("architecture").as_str().unwrap_or("-").to_owned());
        row.cells.push(said("params").as_f64().map_or("-".to_owned(), |n| format!("{:.1} M", n / 1e6)));
        row.step(about.as_ref().map(|_| "ok".to_owned()));
        let mut evaluations = vec![program.eval(model, text, None)];
        let mut written = Vec::new();
        for bits in BITS {
            let (begun, out) = (Instant::now(), place.path().join(bits));
            let made = program.quantize(model, &out, bits);
            row.step(made.as_ref().map(|_| format!("ok ({:.0} s)", begun.elapsed().as_secs_f64())));
            // What is not there needs no further line about it.
            let small = made.is_ok().then_some(out);
            let none = || Err("-".to_owned());
            evaluations
                .push(small.as_ref().map_or_else(none, |small| program.eval(small, text, Some(model))));
            written.extend(small);
        }
        let column = |of: &[Result<Value, String>], field: &str, digits: usize| {
            let one = |e: &Result<Value, String>| match e {
                Ok(e) => e[field].as_f64().map_or("-".to_owned(), |v| format!("{v:.digits$}")),
                Err(line) => cell(line),
            };
            of.iter().map(one).collect::<Vec<_>>().join(", ")
        };
        row.whole &= evaluations.iter().all(Result::is_ok);
        row.cells.push(column(&evaluations, "perplexity", 2));
        row.cells.push(column(&evaluations[1..], "kl", 3));
        match written.first() {
            Some(small) => {
                let args = ["run".as_ref(), small.as_ref(), "-p".as_ref(), PROMPT.as_ref()];
                let args: [&[&OsStr]; 2] = [&args, &["-n", "16", "--greedy"].map(OsStr::new)];
                let ran = program.json(&args.concat());
                row.step(ran.as_ref().map(|ran| format!("{} tokens", ran["tokens"])));
                row.step(program.serve(small).as_ref().map(|n| format!("{n} tokens")));
            }
            None => row.cells.extend(["-".to_owned(), "-".to_owned()]),
        }
        row.cells.push(format!("{:.0}", start.elapsed().as_secs_f64()));
        Ok(row)
    }

    fn step(&mut self, outcome: Result<String, &String>) {
        self.whole &= outcome.is_ok();
        self.cells.push(outcome.unwrap_or_else(|line| cell(line)));
    }
}

/// A line as a cell of a table, the rest of a long one left out.
fn cell(line: &str) -> String {
    let short: String = line.chars().take(LINE).collect();
    let more = if short.len() < line.len() { " ..." } else { "" };
    short.replace('|', "\\|") + more
}

struct Program<'a> {
    path: &'a Path,
}

impl Program<'_> {
    /// The document that a command prints, or the line that says why there is none.
    fn json(&self, args: &[&OsStr]) -> Result<Value, String> {
        let shown: Vec<_> = args.iter().map(|arg| arg.to_string_lossy()).collect();
        eprintln!("$ fracbit {}", shown.join(" "));
        let ran = Command::new(self.path).args(args).arg("--json").stdin(Stdio::null()).output();
        let ran = ran.map_err(|e| e.to_string())?;
        if !ran.status.success() {
            return Err(error_line(&ran.stderr));
        }
        serde_json::from_slice(&ran.stdout).map_err(|e| format!("printed no JSON: {e}"))
    }

    fn quantize(&self, model: &Path, out: &Path, bits: &str) -> Result<Value, String> {
        let args = ["quantize".as_ref(), model.as_ref(), "-o".as_ref(), out.as_ref()];
        let args: [&[&OsStr]; 3] = [&args, &["--bits", bits].map(OsStr::new), &QUICK.map(OsStr::new)];
        self.json(&args.concat())
    }

    fn eval(&self, model: &Path, text: &Path, baseline: Option<&Path>) -> Result<Value, String> {
        let mut args: Vec<&OsStr> = vec!["eval".as_ref(), model.as_ref(), "--text".as_ref(), text.as_ref()];
        args.extend(WINDOWS.map(OsStr::new));
        if let Some(baseline) = baseline {
            args.extend([OsStr::new("--baseline"), baseline.as_ref()]);
        }
        self.json(&args)
    }

    /// Tokens of a completion that a server of the model answers with.
    fn serve(&self, model: &Path) -> Result<u64, String> {
        eprintln!("$ fracbit serve {}", model.display());
        let mut command = Command::new(self.path);
        command
            .arg("serve")
            .arg(model)
            .args(["--port", "0", "--ctx", "64", "--name", "zoo"])
            .stdin(Stdio::null());
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut child = Ended(child.map_err(|e| e.to_string())?);
        let mut line = String::new();
        let out = child.0.stdout.take().ok_or("no output")?;
        BufReader::new(out).read_line(&mut line).map_err(|e| e.to_string())?;
        let address = line.trim().strip_prefix("serving at http://").and_then(|l| l.strip_suffix("/v1"));
        let Some(address) = address else {
            let mut said = Vec::new();
            if let Some(mut err) = child.0.stderr.take() {
                err.read_to_end(&mut said).map_err(|e| e.to_string())?;
            }
            return Err(error_line(&said));
        };
        ask(address).map_err(|e| format!("the request failed: {e}"))
    }
}

/// A server that ends with its variable.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// One completion over HTTP; the tokens that were written.
fn ask(address: &str) -> Result<u64, String> {
    let body = json!({ "model": "zoo", "prompt": PROMPT, "max_tokens": 8, "temperature": 0 }).to_string();
    let exchange = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(Duration::from_secs(300)))?;
        write!(
            stream,
            "POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        )?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    let answer = exchange().map_err(|e| e.to_string())?;
    let (head, body) = answer.split_once("\r\n\r\n").ok_or("no answer")?;
    let answer: Value = serde_json::from_str(body).map_err(|e| e.to_string())?;
    match answer["usage"]["completion_tokens"].as_u64() {
        Some(tokens) if head.starts_with("HTTP/1.1 200") => Ok(tokens),
        _ => Err(answer["error"]["message"].as_str().unwrap_or(head).to_owned()),
    }
}

/// The line that says what went wrong.
fn error_line(said: &[u8]) -> String {
    let said = String::from_utf8_lossy(said);
    let error = said.lines().find_map(|line| line.strip_prefix("error: "));
    error.or(said.lines().last()).unwrap_or("no word").to_owned()
}
