//! The program run by the tests: what it said and how it ended.
#![allow(dead_code, reason = "each test crate uses its own part of the helpers")]

use serde_json::Value;
use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

pub(crate) const DONE: i32 = 0;
pub(crate) const FAILED: i32 = 1;
pub(crate) const USAGE: i32 = 2;
pub(crate) const BAD_INPUT: i32 = 3;
pub(crate) const OUT_OF_REACH: i32 = 4;

/// What a run of the program gave.
pub(crate) struct Ran {
    pub(crate) line: String,
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Ran {
    /// It worked.
    pub(crate) fn done(self) -> Self {
        assert_eq!(self.code, DONE, "{}:\n{}", self.line, self.err);
        self
    }

    /// It failed with one of these codes, and otherwise as [`Ran::failed`].
    pub(crate) fn failed_by_any(self, codes: &[i32], words: &[&str]) -> Self {
        assert!(codes.contains(&self.code), "{}: {}\n{}", self.line, self.code, self.err);
        let code = self.code;
        self.failed(code, words)
    }

    /// It failed with this code, said why in one line that holds these words, and did not panic.
    pub(crate) fn failed(self, code: i32, words: &[&str]) -> Self {
        let Self { line, err, .. } = &self;
        assert_eq!(self.code, code, "{line}:\n{err}");
        assert!(!err.contains("panicked"), "{line}:\n{err}");
        for word in words {
            assert!(err.contains(word), "{line}: `{word}` should be in:\n{err}");
        }
        if code != USAGE {
            let errors = err.lines().filter(|l| l.starts_with("error: ")).count();
            let hints = err.lines().filter(|l| l.starts_with("hint: ")).count();
            assert!(errors == 1 && hints <= 1, "{line}: one error, at most one hint:\n{err}");
        }
        assert_eq!(self.out, "", "{line}: results go to standard output, and there is none");
        self
    }

    /// The document on standard output, and nothing beside it.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|e| panic!("{}: {e}:\n{}", self.line, self.out))
    }
}

pub(crate) fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fracbit"));
    command.args(args).env_remove("FRACBIT_ISA").env_remove("FRACBIT_LOG").stdin(Stdio::null());
    command
}

pub(crate) fn finish(args: &[&str], command: &mut Command) -> Ran {
    let ran = command.output().expect("the program starts");
    Ran {
        line: format!("fracbit {}", args.join(" ")),
        code: ran.status.code().unwrap_or(-1),
        out: String::from_utf8(ran.stdout).expect("UTF-8"),
        err: String::from_utf8(ran.stderr).expect("UTF-8"),
    }
}

pub(crate) fn fracbit(args: &[&str]) -> Ran {
    finish(args, &mut command(args))
}

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

pub(crate) fn keys(value: &Value) -> Vec<&str> {
    value.as_object().expect("an object").keys().map(String::as_str).collect()
}

/// The embedded demo model.
pub(crate) fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("demo-model")
}

pub(crate) fn stories() -> PathBuf {
    demo().join("stories.txt")
}

pub(crate) fn copy(of: &Path) -> tempfile::TempDir {
    let place = tempfile::tempdir().expect("a temporary directory");
    for entry in fs::read_dir(of).expect("a readable directory") {
        let entry = entry.expect("a readable directory");
        fs::copy(entry.path(), place.path().join(entry.file_name())).expect("a writable place");
    }
    place
}

pub(crate) fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).expect("a readable directory");
    let mut all: Vec<String> = entries
        .map(|e| e.expect("a readable directory").file_name().to_string_lossy().into_owned())
        .collect();
    all.sort();
    all
}

/// Changes a JSON file.
pub(crate) fn edit_json(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut document = serde_json::from_slice(&fs::read(path).expect("a file")).expect("JSON");
    change(&mut document);
    fs::write(path, document.to_string()).expect("a writable place");
}

/// Changes header and data of a file of tensors.
pub(crate) fn edit_shard(path: &Path, change: impl FnOnce(&mut Value, &mut Vec<u8>)) {
    let bytes = fs::read(path).expect("a shard");
    let (length, rest) = bytes.split_first_chunk::<8>().expect("a length");
    let (header, data) = rest.split_at(usize::try_from(u64::from_le_bytes(*length)).expect("a small header"));
    let (mut header, mut data) = (serde_json::from_slice(header).expect("a header"), data.to_vec());
    change(&mut header, &mut data);
    let header = header.to_string();
    let length = (header.len() as u64).to_le_bytes();
    fs::write(path, [&length[..], header.as_bytes(), &data].concat()).expect("a writable place");
}

/// A server that ends with the test.
pub(crate) struct Serving {
    child: Child,
    address: String,
}

impl Serving {
    pub(crate) fn start(args: &[&str]) -> Self {
        let mut child =
            command(args).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("the program starts");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("UTF-8");
        let address = line.trim().strip_prefix("serving at http://").and_then(|l| l.strip_suffix("/v1"));
        let address = address.unwrap_or_else(|| panic!("an address: {line}")).to_owned();
        Self { child, address }
    }

    /// The answer to a request that is a good one.
    pub(crate) fn post(&self, path: &str, body: &Value) -> Value {
        let (address, body) = (&self.address, body.to_string());
        let mut stream = TcpStream::connect(address).expect("a listener");
        write!(
            stream,
            "POST {path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        )
        .expect("a listener that reads");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        assert!(head.starts_with("HTTP/1.1 200"), "{answer}");
        serde_json::from_str(body).expect("JSON")
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
