//! Files that cannot be written: in runs of the program, one call after the other that changes
//! files fails, as on a full disk or a broken one, or writes a part. A layer before the C library
//! (`common/faults.c`) does that.
#![cfg(all(target_os = "linux", target_env = "gnu"))]
#![expect(clippy::print_stderr, reason = "a test that does not run has to say so")]

mod common;

use common::{DONE, FAILED, Ran, command, finish};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Faults of one kind for one command on every change; `every_fault` has them all.
const SOME: usize = 6;

const KINDS: [&str; 3] = ["full", "io", "short"];

/// The layer, compiled; none where there is no C compiler.
fn layer(place: &Path) -> Option<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/common/faults.c");
    let layer = place.join("faults.so");
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o"])
        .args([&layer, &source])
        .arg("-ldl")
        .output();
    match built {
        Ok(ran) => {
            assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
            Some(layer)
        }
        Err(why) => {
            eprintln!("SKIPPED: runs in which writing fails: cc: {why}");
            None
        }
    }
}

/// What lies below a place: the contents of files, `None` for directories.
fn contents(dir: &Path) -> BTreeMap<PathBuf, Option<Vec<u8>>> {
    let mut found = BTreeMap::new();
    let mut rest = vec![dir.to_owned()];
    while let Some(next) = rest.pop() {
        for entry in fs::read_dir(&next).expect("a directory") {
            let path = entry.expect("an entry").path();
            let name = path.strip_prefix(dir).expect("it lies below").to_owned();
            if path.is_dir() {
                found.insert(name, None);
                rest.push(path);
            } else {
                found.insert(name, Some(fs::read(&path).expect("a file")));
            }
        }
    }
    found
}

/// A command that writes `OUT` below the place that it is given.
struct Case<'a> {
    name: &'static str,
    args: Vec<&'a str>,
    /// The flag of what it writes, and its name: a directory or a file.
    flag: &'static str,
    out: &'static str,
    resumes: bool,
}

struct Run<'a> {
    layer: &'a Path,
    case: &'a Case<'a>,
    place: PathBuf,
}

impl Run<'_> {
    fn out(&self) -> PathBuf {
        self.place.join(self.case.out)
    }

    /// Runs it with a fault at this call; returns what it said and how many calls there were.
    fn ran(&self, kind: &str, at: usize, more: &[&str]) -> (Ran, usize) {
        let out = self.out();
        let mut args = [&self.case.args[..], &[self.case.flag, out.to_str().expect("UTF-8")], more].concat();
        args.extend(["--threads", "1"]);
        let count = self.place.with_extension("count");
        let mut command = command(&args);
        command
            .env("LD_PRELOAD", self.layer)
            .env("FAULT_UNDER", &self.place)
            .env("FAULT_KIND", kind)
            .env("FAULT_AT", at.to_string())
            .env("FAULT_COUNT", &count);
        let ran = finish(&args, &mut command);
        let calls = fs::read_to_string(count).expect("the program ended by itself");
        (ran, calls.parse().expect("a number"))
    }
}

/// Goes through faults of every kind in every case, `some` of each at most.
fn survive(some: usize) {
    let place = tempfile::tempdir().expect("a temporary directory");
    let place = place.path().canonicalize().expect("a path");
    let Some(layer) = layer(&place) else { return };
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("demo-model");
    let (demo, stories) = (demo.to_str().expect("UTF-8"), demo.join("stories.txt"));
    let stories = stories.to_str().expect("UTF-8");
    let (tiny, small) = (place.join("tiny"), place.join("small"));
    let (tiny, small) = (tiny.to_str().expect("UTF-8"), small.to_str().expect("UTF-8"));
    let quantize = ["quantize", tiny, "--scheme", "nuq-2"];
    for made in [
        vec!["synth", "--shape", "tiny", "-o", tiny],
        [&quantize[..], &["--data-free", "-o", small]].concat(),
    ] {
        finish(&made, &mut command(&made)).done();
    }
    let short = ["--text", stories, "--tokens", "256"];
    let cases = [
        Case {
            name: "quantize",
            args: [&quantize[..], &short].concat(),
            flag: "-o",
            out: "small",
            resumes: true,
        },
        Case {
            name: "calibrate",
            args: [&["calibrate", tiny, "--ctx", "64"][..], &short].concat(),
            flag: "-o",
            out: "stats",
            resumes: true,
        },
        Case {
            name: "tune",
            args: vec!["tune", small, "--baseline", tiny, "--text", stories, "--tokens", "600"],
            flag: "-o",
            out: "tuned",
            resumes: true,
        },
        Case {
            name: "plan",
            args: vec!["plan", tiny, "--bits", "6", "--sensitivity", "prior"],
            flag: "--save",
            out: "plan.json",
            resumes: false,
        },
        Case {
            name: "export",
            args: vec!["export", demo, "--type", "q8_0"],
            flag: "-o",
            out: "small.gguf",
            resumes: false,
        },
        Case {
            name: "synth",
            args: vec!["synth", "--shape", "tiny"],
            flag: "-o",
            out: "synth",
            resumes: false,
        },
    ];
    std::thread::scope(|scope| {
        for case in &cases {
            scope.spawn(|| case.survives(some, &layer, &place));
        }
    });
}

impl Case<'_> {
    fn survives(&self, some: usize, layer: &Path, place: &Path) {
        let run = |name: &str| {
            let run = Run { layer, case: self, place: place.join(self.name).join(name) };
            fs::create_dir_all(&run.place).expect("a new directory");
            run
        };
        let whole = run("whole");
        let (ran, calls) = whole.ran("none", 0, &[]);
        ran.done();
        let want = contents(&whole.place);
        let step = calls.div_ceil(some);
        let mut failed = 0;
        for (kind, first) in KINDS.into_iter().zip([1, 1 + step / 3, 1 + 2 * step / 3]) {
            for at in (first..=calls).step_by(step) {
                let run = run(&format!("{kind}-{at}"));
                failed += usize::from(run.one(kind, at, &want) != DONE);
                fs::remove_dir_all(&run.place).expect("it is there");
            }
        }
        assert!(failed > 2, "{}: {failed} runs failed, of {calls} calls", self.name);
        eprintln!(
            "{}: {calls} calls that change files, each {step}th failed in three ways: {failed} runs refused",
            self.name
        );
    }
}

impl Run<'_> {
    /// One fault: the final name holds all or nothing, the message names a file, and the next run
    /// ends with the bytes of one. Returns the exit code.
    fn one(&self, kind: &str, at: usize, want: &BTreeMap<PathBuf, Option<Vec<u8>>>) -> i32 {
        let told = format!("{}, {kind} at {at}", self.case.name);
        let (ran, _) = self.ran(kind, at, &[]);
        let code = ran.code;
        if kind == "short" {
            ran.done();
        } else if code != DONE {
            // What is full or broken is a place, and a place has a name.
            let Ran { err, .. } = &ran;
            let errors = err.lines().filter(|line| line.starts_with("error: ")).count();
            let named = err.contains(self.place.to_str().expect("UTF-8"));
            assert!(code == FAILED && errors == 1 && named, "{told}: {code}\n{err}");
        }
        let found = contents(&self.place);
        let of_final_name = |path: &PathBuf| path.starts_with(self.case.out);
        if self.out().exists() {
            let whole = want.iter().filter(|(path, _)| of_final_name(path));
            let found = found.iter().filter(|(path, _)| of_final_name(path));
            assert!(found.eq(whole), "{told}: the final name holds a part");
        } else {
            assert_ne!(code, DONE, "{told}: it says that it is done");
        }
        if code != DONE && !self.out().exists() {
            let resume: &[&str] = if self.case.resumes { &["--resume"] } else { &[] };
            self.ran("none", 0, resume).0.done();
            // What a broken disk did not let anyone remove may lie there; nothing else.
            let found = contents(&self.place);
            assert!(
                want.iter().all(|(path, bytes)| found.get(path) == Some(bytes)),
                "{told}: continued to other bytes"
            );
        }
        code
    }
}

#[test]
fn a_failing_disk_leaves_all_or_nothing() {
    survive(SOME);
}

/// `cargo test -p fracbit-cli --test faults -- --ignored`
#[test]
#[ignore = "takes minutes"]
fn every_fault() {
    survive(usize::MAX);
}
