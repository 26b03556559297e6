//! `fracbit serve` as a user meets it.
#![cfg(unix)]
#![expect(clippy::print_stderr, reason = "a test that does not run has to say so")]

mod common;

use common::{BAD_INPUT, DONE, FAILED, USAGE, command, copy, demo, fracbit, text};
use serde_json::{Value, json};
use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    process::{Command, Stdio},
};

#[test]
fn what_run_writes_is_what_serve_answers() {
    let demo = demo();
    let key = tempfile::NamedTempFile::new().expect("a temporary file");
    fs::write(&key, "another\n\n a-key\n").expect("a temporary file");
    let args = [
        "serve",
        text(&demo),
        "--port",
        "0",
        "--name",
        "mine",
        "--alias",
        "yours",
        "--api-keys",
        text(key.path()),
        "--temp",
        "0.5",
        "--kv",
        "6",
        "--cache-memory",
        "3MB",
        "--log-requests",
    ];
    let mut serving =
        command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
    let mut out = BufReader::new(serving.stdout.take().expect("piped"));
    let mut line = String::new();
    out.read_line(&mut line).expect("UTF-8");
    let address = line.trim().strip_prefix("serving at http://").and_then(|l| l.strip_suffix("/v1"));
    let address = address.unwrap_or_else(|| panic!("an address: {line}"));

    let body =
        json!({ "model": "yours", "prompt": "Once upon a time", "max_tokens": 20, "seed": 4 }).to_string();
    let mut stream = TcpStream::connect(address).expect("a listener");
    write!(
        stream,
        "POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer a-key\r\n\
         Content-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )
    .expect("a listener that reads");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    assert!(head.starts_with("HTTP/1.1 200"), "{answer}");
    let answer: Value = serde_json::from_str(body).expect("JSON");
    let run =
        ["run", text(&demo), "-p", "Once upon a time", "-n", "20", "--seed", "4", "--temp", "0.5", "--json"];
    let run = [&run[..], &["--kv", "6"]].concat();
    assert_eq!(answer["choices"][0]["text"], fracbit(&run).done().json()["text"]);

    // The shell's own: the program `kill` is not everywhere.
    let kill = format!("kill -TERM {}", serving.id());
    assert!(Command::new("sh").args(["-c", &kill]).status().expect("a shell").success());
    assert_eq!(serving.wait().expect("a child").code(), Some(DONE));
    let mut notes = String::new();
    serving.stderr.take().expect("piped").read_to_string(&mut notes).expect("UTF-8");
    assert!(notes.contains("`mine`: 4 texts at a time, 512 tokens each"), "{notes}");
    let logged: Vec<Value> = notes.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let [logged] = &logged[..] else { panic!("one answer is told: {notes}") };
    assert_eq!((&logged["path"], &logged["status"]), (&json!("/v1/completions"), &json!(200)));
    assert!(logged["seconds"].as_f64().is_some_and(|s| s > 0.0), "{logged}");
}

/// What a model's files say of picking tokens holds where flags and requests say nothing.
#[test]
fn models_say_how_tokens_are_picked() {
    let model = copy(&demo());
    let config = model.path().join("generation_config.json");
    let said = json!({ "eos_token_id": 0, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "do_sample": true });
    fs::write(&config, said.to_string()).expect("a temporary file");
    let text_of = |model: &Path, more: &[&str]| {
        let args = ["run", text(model), "-p", "Once upon a time", "-n", "30", "--seed", "4", "--json"];
        fracbit(&[&args[..], more].concat()).done().json()["text"].clone()
    };
    let same = text_of(&demo(), &["--temp", "0.6", "--top-k", "20", "--top-p", "0.9"]);
    assert_eq!(text_of(model.path(), &[]), same);
    let other = text_of(&demo(), &["--temp", "0.6", "--top-k", "3", "--top-p", "0.9"]);
    assert_eq!(text_of(model.path(), &["--top-k", "3"]), other);
    assert_ne!(other, same);
    fs::write(&config, r#"{"top_p": 1.5}"#).expect("a temporary file");
    let words = ["generation_config.json", "`top_p` should be above 0 and at most 1, got 1.5", "--top-p"];
    fracbit(&["run", text(model.path()), "-p", "a"]).failed(BAD_INPUT, &words);
    fracbit(&["serve", text(model.path()), "--port", "0"]).failed(BAD_INPUT, &words);
    text_of(model.path(), &["--top-p", "0.5"]);
}

/// SIGHUP: another model in the place of the first, and one that is none.
#[test]
fn a_signal_loads_the_directory_anew() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let model = place.path().join("model");
    let put = |from: &Path, change: &dyn Fn(&Path)| {
        let fresh = copy(from);
        change(fresh.path());
        if model.exists() {
            fs::rename(&model, place.path().join("old")).expect("a writable place");
            fs::remove_dir_all(place.path().join("old")).expect("a writable place");
        }
        fs::rename(fresh.keep(), &model).expect("one file system");
    };
    put(&demo(), &|_| {});
    let mut serving = command(&["serve", text(&model), "--port", "0"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let mut line = String::new();
    BufReader::new(serving.stdout.take().expect("piped")).read_line(&mut line).expect("UTF-8");
    let address = line.trim().strip_prefix("serving at http://").and_then(|l| l.strip_suffix("/v1"));
    let address = address.unwrap_or_else(|| panic!("an address: {line}")).to_owned();
    let get = |path: &str| {
        let mut stream = TcpStream::connect(&address).expect("a listener");
        write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")
            .expect("a listener that reads");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        answer
    };
    let context = |n: usize| get("/v1/models").contains(&format!("\"context_length\":{n},"));
    assert!(context(512), "{}", get("/v1/models"));
    let hang_up = |outcome: &str| {
        let kill = format!("kill -HUP {}", serving.id());
        assert!(Command::new("sh").args(["-c", &kill]).status().expect("a shell").success());
        let start = std::time::Instant::now();
        while !get("/metrics").contains(&format!("fracbit_reloads_total{{outcome=\"{outcome}\"}} 1")) {
            assert!(start.elapsed().as_secs() < 60, "{}", get("/metrics"));
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    };
    put(&demo(), &|dir| fs::write(dir.join("config.json"), "{").expect("a writable place"));
    hang_up("failed");
    assert!(context(512));
    let other = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/models/smollm2");
    put(&other, &|_| {});
    hang_up("done");
    assert!(!context(512), "{}", get("/v1/models"));
    let kill = format!("kill -TERM {}", serving.id());
    assert!(Command::new("sh").args(["-c", &kill]).status().expect("a shell").success());
    assert_eq!(serving.wait().expect("a child").code(), Some(DONE));
    let mut notes = String::new();
    serving.stderr.take().expect("piped").read_to_string(&mut notes).expect("UTF-8");
    assert!(notes.contains("was not loaded anew") || notes.contains("goes on"), "{notes}");
    assert!(notes.contains("config.json") && notes.contains("the model was loaded anew"), "{notes}");
}

#[test]
fn what_cannot_be_served_is_said_at_once() {
    let demo = demo();
    let demo = text(&demo);
    let few = ["serve", demo, "--cache-memory", "100kB"];
    fracbit(&few).failed(USAGE, &["--cache-memory", "at least", "100.0 kB", "--ctx"]);
    fracbit(&["serve", demo, "--host", "0.0.0.0"]).failed(USAGE, &["0.0.0.0", "--api-keys"]);
    fracbit(&["serve", demo, "--ctx", "9999"]).failed(USAGE, &["--ctx", "1 to 512", "9999"]);
    fracbit(&["serve", "no-such-model"]).failed(BAD_INPUT, &["no-such-model"]);
    let key = tempfile::NamedTempFile::new().expect("a temporary file");
    for (bad, found) in [
        ("", "holds none"),
        (" \n", "holds none"),
        ("two words", "line 1 is none"),
        ("good\n\nschlüssel", "line 3 is none"),
    ] {
        fs::write(&key, bad).expect("a temporary file");
        let args = ["serve", demo, "--key-file", text(key.path())];
        fracbit(&args).failed(BAD_INPUT, &[text(key.path()), "one on each line", found]);
    }
    fracbit(&["serve", demo, "--key-file", "no-such-file"]).failed(BAD_INPUT, &["no-such-file"]);
    let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = taken.local_addr().expect("a bound socket").port().to_string();
    fracbit(&["serve", demo, "--port", &port]).failed(FAILED, &[&port, "hint: `--port N`"]);
}

/// OpenAI's and Anthropic's own clients, what is built on them, and the requests of an evaluation
/// harness; skipped where there are no such packages (`cargo xtask test` installs them).
#[test]
fn published_clients_understand_the_answers() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let own = root.join(".venv/bin/python");
    let has = |python: &&str| {
        Command::new(python)
            .args(["-c", "import anthropic, openai"])
            .output()
            .is_ok_and(|out| out.status.success())
    };
    let Some(python) = [text(&own), "python3"].into_iter().find(has) else {
        eprintln!("skipped: the clients of OpenAI and Anthropic are not installed");
        return;
    };
    script(Command::new(python).arg(root.join("tests/reference/clients.py")), &[]);
}

/// The same in JavaScript, by the clients of OpenAI and Vercel.
#[test]
fn published_javascript_clients_understand_the_answers() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let packages = root.join("target/clients");
    let starts = Command::new("node").arg("--version").output().is_ok_and(|out| out.status.success());
    let wanted = ["openai", "ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "zod"];
    let there = |name: &str| packages.join("node_modules").join(name).join("package.json").is_file();
    if !starts || !wanted.into_iter().all(there) {
        eprintln!("skipped: no Node.js, or the packages {} of npm are not installed", wanted.join(", "));
        return;
    }
    script(Command::new("node").arg(root.join("tests/reference/clients.mjs")), &[text(&packages)]);
}

/// The page at `/` as a person uses it; skipped where there is no Chromium or Chrome.
#[test]
fn people_chat_in_a_browser() {
    let starts = |program: &&str| {
        Command::new(program).arg("--version").output().is_ok_and(|out| out.status.success())
    };
    let browsers = ["chromium", "chromium-browser", "google-chrome"];
    let (Some(browser), true) = (browsers.iter().find(|&&name| starts(&name)), starts(&"python3")) else {
        eprintln!("skipped: no Chromium (apt-get install chromium) or no Python to lead it");
        return;
    };
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    script(Command::new("python3").arg(root.join("tests/reference/page.py")).arg(browser), &[]);
}

/// Runs a script that is told where the program is and a model for conversations, made of the
/// embedded one, and then what is in `more`.
fn script(command: &mut Command, more: &[&str]) {
    let model = copy(&demo());
    let template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:";
    fs::write(model.path().join("chat_template.jinja"), template).expect("a temporary file");
    let done = command.args([env!("CARGO_BIN_EXE_fracbit"), text(model.path())]).args(more).output();
    let done = done.expect("an interpreter that starts");
    let notes = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{notes}");
    notes.lines().filter(|line| line.starts_with("skipped: ")).for_each(|line| eprintln!("{line}"));
}
