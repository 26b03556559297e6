//! What options say they do: sizes, temperatures, control tokens in messages.
#![cfg(unix)]

mod common;

use common::{BAD_INPUT, FAILED, OUT_OF_REACH, command, copy, demo, fracbit, names, text};
use serde_json::{Value, json};
use std::{
    fs,
    io::Write,
    path::Path,
    process::{Command, Output, Stdio},
};

fn bytes_in(dir: &Path) -> u64 {
    names(dir).iter().map(|name| fs::metadata(dir.join(name)).expect("a file").len()).sum()
}

/// `--size` is the whole directory's, and next to all of it is used.
#[test]
fn a_size_is_that_of_the_directory() {
    let demo = demo();
    let place = tempfile::tempdir().expect("a temporary directory");
    let out = place.path().join("out");
    // The tokenizer is a tenth of it.
    for size in [1_500_000, 2_200_000] {
        let given = size.to_string() + "B";
        let args = ["quantize", text(&demo), "-o", text(&out), "--size", &given, "--palette", "nuq"];
        let rest = ["--data-free", "--sensitivity", "prior", "--force"];
        let ran = fracbit(&[&args[..], &rest].concat()).done();
        assert!(ran.err.contains("for the directory"), "{}", ran.err);
        let taken = bytes_in(&out);
        assert!(taken <= size, "{taken} of {size}");
        assert!(taken > size - 300_000, "{taken} of {size}");
    }
    let tokenizer = fs::metadata(demo.join("tokenizer.json")).expect("a file").len();
    let given = (tokenizer + 10_000).to_string() + "B";
    let words = ["out of reach", "tokenizer and other files take up to", "--size should be at least "];
    let small = place.path().join("small");
    fracbit(&["quantize", text(&demo), "-o", text(&small), "--size", &given]).failed(OUT_OF_REACH, &words);
    assert!(!small.exists());
    let refused = fracbit(&["plan", text(&demo), "--size", &given]).failed(OUT_OF_REACH, &words);
    assert!(!refused.err.contains("budget 0 B"), "{}", refused.err);
    // What it says is the least suffices.
    let least = refused.err.split_once(words[2]).and_then(|(_, least)| least.split_once(';'));
    let (least, _) = least.expect("a size");
    fracbit(&["plan", text(&demo), "--size", least, "--sensitivity", "prior"]).done();
}

/// 16 bits are no limit, also where norms take more than 16.
#[test]
fn sixteen_bits_are_in_reach() {
    let demo = demo();
    let args = ["plan", text(&demo), "--bits", "16", "--exclude", "*", "--rotation", "online"];
    let plan = fracbit(&[&args[..], &["--sensitivity", "prior", "--json"]].concat()).done().json();
    let layers = plan["layers"].as_array().expect("a list");
    assert!(layers.iter().all(|layer| layer["bits"] == 16.0), "{plan}");
    assert!(plan["bits_per_weight"].as_f64().expect("a number") > 16.0);
}

#[test]
fn temperatures_have_two_names() {
    let demo = demo();
    let with = |name: &str| {
        let args = ["run", text(&demo), "-p", "Once upon a time", "-n", "12", "--seed", "3", "--json"];
        fracbit(&[&args[..], &[name, "1.5"]].concat()).done().json()["text"].clone()
    };
    assert_eq!(with("--temp"), with("--temperature"));
}

const END: &str = "<|endoftext|>";

/// The demo model with a chat template that writes its control token.
fn chatting() -> tempfile::TempDir {
    let place = copy(&demo());
    let path = place.path().join("tokenizer_config.json");
    let mut settings: Value = serde_json::from_slice(&fs::read(&path).expect("a file")).expect("JSON");
    let template =
        "{% for m in messages %}{{ bos_token }}{{ m.role }}: {{ m.content }}{% endfor %}{{ bos_token }}";
    settings["chat_template"] = template.into();
    fs::write(&path, json!(settings).to_string()).expect("a writable place");
    place
}

/// A control token in a prompt is text, unless `--allow-special`.
#[test]
fn prompts_make_control_tokens_where_they_may() {
    let model = chatting();
    let tokens = |prompt: &str, more: &[&str]| {
        let args = ["run", text(model.path()), "--chat", "-n", "1", "--json", "-p", prompt];
        let ran = fracbit(&[&args[..], more].concat()).done().json();
        ran["prompt_tokens"].as_u64().expect("a count")
    };
    let plain = tokens("Hi", &[]);
    assert_eq!(tokens("Hi", &["--allow-special"]), plain);
    let spelled = format!("Hi{END}");
    assert_eq!(tokens(&spelled, &["--allow-special"]), plain + 1);
    assert!(tokens(&spelled, &[]) > plain + 1, "as text it has several");
    // Without a template a prompt is the user's own.
    let args = ["run", text(model.path()), "-n", "1", "--json", "-p", &spelled];
    let own = fracbit(&args).done().json()["prompt_tokens"].as_u64().expect("a count");
    assert!(own < plain, "{own} and {plain}");
}

/// The same in `chat`, by what it says of its speed.
#[test]
fn chats_make_control_tokens_where_they_may() {
    let model = chatting();
    let prefill = |said: &str, more: &[&str]| {
        let args = ["chat", text(model.path()), "-n", "1", "--greedy"];
        let mut command = command(&[&args[..], more].concat());
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        writeln!(child.stdin.take().expect("piped"), "{said}").expect("it reads");
        let Output { status, stderr, .. } = child.wait_with_output().expect("it ends");
        let notes = String::from_utf8(stderr).expect("UTF-8");
        assert!(status.success(), "{notes}");
        let (_, rest) = notes.split_once("prefill ").unwrap_or_else(|| panic!("a speed: {notes}"));
        rest.split(' ').next().and_then(|n| n.parse::<u64>().ok()).unwrap_or_else(|| panic!("{notes}"))
    };
    let plain = prefill("Hi", &[]);
    let spelled = format!("Hi{END}");
    assert_eq!(prefill(&spelled, &["--allow-special"]), plain + 1);
    assert!(prefill(&spelled, &[]) > plain + 1);
}

/// The editor, the commands and Ctrl-C at a terminal; skipped where there is no Python to type.
#[test]
#[expect(clippy::print_stderr, reason = "a test that does not run has to say so")]
fn a_person_chats_at_a_terminal() {
    if !Command::new("python3").arg("--version").output().is_ok_and(|out| out.status.success()) {
        eprintln!("skipped: no python3 to type at a terminal");
        return;
    }
    let model = chatting();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/terminal.py");
    let mut typing = Command::new("python3");
    typing.arg(script).args([env!("CARGO_BIN_EXE_fracbit"), text(model.path())]);
    let ran = typing.output().expect("python3 starts");
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
}

/// A conversation that outgrows its context loses its oldest turns and goes on.
#[test]
fn the_oldest_turns_make_room() {
    let model = chatting();
    let story = "Once upon a time there was a little girl who had a red ball. ".repeat(3);
    let said = format!("{story}\n{story}\n{story}\n/help\n/nothing\n{}\nHi\n", story.repeat(9));
    let args = ["chat", text(model.path()), "--greedy", "-n", "8", "--ctx", "128"];
    let mut command = command(&args);
    let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = child.expect("the program starts");
    child.stdin.take().expect("piped").write_all(said.as_bytes()).expect("it reads");
    let Output { status, stderr, .. } = child.wait_with_output().expect("it ends");
    let notes = String::from_utf8(stderr).expect("UTF-8");
    assert!(status.success(), "{notes}");
    for word in [
        "context of 128 tokens is full: the oldest turn is left out from now on (1)",
        "/save FILE",
        "no such command",
        "the context has 128: shorten it",
    ] {
        assert!(notes.contains(word), "`{word}` should be in:\n{notes}");
    }
    // Three stories and the greeting are answered, the message that is too long is not.
    assert_eq!(notes.matches("prefill ").count(), 4, "{notes}");
}

/// Commands that write, each with `OUT` for what it writes, on the models of [`outputs`].
const WRITERS: [&str; 12] = [
    "quantize MODEL -o OUT --scheme nuq-3 --data-free",
    "calibrate MODEL --text TEXT -o OUT",
    "tune SMALL --baseline MODEL --text TEXT -o OUT",
    "synth --shape tiny -o OUT",
    "plan MODEL --bits 3 --sensitivity prior --save OUT",
    "plan MODEL --bits 3 --sensitivity prior --html OUT",
    "explore --scheme nuq-* --budget 2..4 --shape 256x256 --bytes 1MiB --rounds 1 --svg OUT",
    "profile --shape tiny -o OUT",
    "sensitivity MODEL -o OUT",
    "schedule fit NESTED --prompts TEXT -o OUT",
    "export MODEL -o OUT --type q8_0",
    "demo --keep OUT",
];

/// What is there is not replaced, a place that cannot be written and a run that writes the same are
/// told, all before any work: for every command that writes.
#[test]
fn outputs_are_looked_at_first() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let (small, nested) = (place.path().join("small"), place.path().join("nested"));
    let (demo, stories) = (demo(), demo().join("stories.txt"));
    for (out, scheme) in [(&small, "nuq-3"), (&nested, "nest-tcq-fast-2+1")] {
        let args = ["quantize", text(&demo), "-o", text(out), "--scheme", scheme, "--data-free"];
        fracbit(&[&args[..], &["--effort", "fast"]].concat()).done();
    }
    let run = |writer: &str, out: &Path| {
        let filled = writer.split(' ').map(|word| match word {
            "MODEL" => text(&demo),
            "SMALL" => text(&small),
            "NESTED" => text(&nested),
            "TEXT" => text(&stories),
            "OUT" => text(out),
            word => word,
        });
        fracbit(&filled.collect::<Vec<_>>())
    };
    for writer in WRITERS {
        let here = tempfile::tempdir().expect("a temporary directory");
        let began =
            |err: &str| err.lines().any(|line| line.ends_with(" ...") || line.starts_with("memory: "));
        let refused = |out: &Path, words: &[&str]| {
            let ran = run(writer, out);
            assert!(!began(&ran.err), "{writer}: no work before\n{}", ran.err);
            ran.failed_by_any(&[FAILED, BAD_INPUT], words);
        };
        // A file of somebody's.
        let file = here.path().join("file");
        fs::write(&file, "mine").expect("a writable place");
        refused(&file, &["file"]);
        assert_eq!(fs::read(&file).expect("a file"), b"mine", "{writer}");
        // A directory of somebody's.
        let dir = here.path().join("dir");
        fs::create_dir(&dir).expect("a writable place");
        fs::write(dir.join("note"), "mine").expect("a writable place");
        refused(&dir, &["dir"]);
        assert_eq!(names(&dir), ["note"], "{writer}");
        // No place for it.
        refused(&here.path().join("absent").join("out"), &["absent"]);
        assert_eq!(names(here.path()), ["dir", "file"], "{writer}");
        // Another run, which has begun. The demo makes its directory at once.
        if writer.starts_with("demo") {
            continue;
        }
        let other = fs::File::create(here.path().join("out.partial-other")).expect("a writable place");
        other.try_lock().expect("a file system with locks");
        refused(&here.path().join("out"), &["another run writes it now", "out.partial-other"]);
        // It was killed.
        drop(other);
        if ["synth", "plan", "explore"].iter().any(|quick| writer.starts_with(quick)) {
            let out = here.path().join("out");
            run(writer, &out).done();
            if writer.contains("--svg") {
                let svg = fs::read_to_string(&out).expect("it was written");
                assert!(svg.starts_with("<svg") && svg.contains(">nuq-3</text>"), "{svg}");
            }
        }
    }
}

/// Where a microkernel of an instruction set runs, the processor is said to have that.
#[test]
fn instruction_sets_that_are_used_are_listed() {
    let machine = fracbit(&["inspect", "--machine", "--json"]).done().json();
    let features = machine["features"].to_string();
    let kernels = machine["microkernels"].as_object().expect("an object");
    assert!(!kernels.is_empty());
    for (isa, feature) in [("amx", "amx-int8"), ("avx512", "avx512vnni"), ("avx2", "avx2")] {
        let used = kernels.values().any(|of| of == isa);
        assert!(!used || features.contains(&format!("\"{feature}\"")), "{isa}: {features}");
    }
}
