//! Runs that are killed at random moments and continued end with the bytes of one run.
#![cfg(unix)]
#![expect(clippy::print_stderr, reason = "a test that does not run has to say so")]

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

/// Kills per command.
const KILLS: usize = 17;

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("demo-model")
}

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fracbit"));
    command.args(args).args(["--threads", "2"]).stdin(Stdio::null()).stdout(Stdio::null());
    command
}

fn finish(args: &[&str]) -> (ExitStatus, String) {
    let ran = command(args).output().expect("the program starts");
    (ran.status, String::from_utf8_lossy(&ran.stderr).into_owned())
}

fn done(args: &[&str]) {
    let (status, said) = finish(args);
    assert!(status.success(), "{args:?}:\n{said}");
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

/// Files of a directory, by name.
fn contents(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(dir).expect("a directory").map(|e| e.expect("an entry"));
    entries
        .map(|e| (e.file_name().to_string_lossy().into_owned(), fs::read(e.path()).expect("a file")))
        .collect()
}

/// Steps in the journals beside `out`.
fn steps(out: &Path) -> usize {
    let beside = fs::read_dir(out.parent().expect("a parent")).expect("a directory");
    let journals =
        beside.filter_map(|e| fs::read_to_string(e.expect("an entry").path().join("journal")).ok());
    journals.map(|j| j.matches('\n').count()).sum()
}

/// The next random number from 0 to 1.
fn share(random: &mut u64) -> f64 {
    *random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    f64::from(u32::try_from(*random >> 32).expect("32 bits")) / f64::from(u32::MAX)
}

/// Runs `args` (with `-o OUT` added) once whole, then killed at random moments and continued, as
/// often as it takes to end and over again until it was killed `enough` times.
fn survives(args: &[&str], place: &Path, seed: u64, enough: usize) {
    let whole = place.join("whole");
    let start = Instant::now();
    done(&[args, &["-o", text(&whole)]].concat());
    let took = start.elapsed().max(Duration::from_millis(20));
    let want = contents(&whole);
    let mut random = seed;
    let (mut kills, mut rounds, mut in_vain) = (0, 0, 0);
    while kills < enough {
        let out = place.join(format!("out-{rounds}"));
        rounds += 1;
        let line = [args, &["-o", text(&out), "--resume"]].concat();
        let mut finished = 0;
        loop {
            let mut child = command(&line).stderr(Stdio::null()).spawn().expect("the program starts");
            // Longer patience after runs that got nowhere, so that a slow machine comes to an end
            // too.
            let patience = took.mul_f64(0.5 * share(&mut random) * (1.0 + f64::from(in_vain)));
            std::thread::sleep(patience);
            if let Some(status) = child.try_wait().expect("a child") {
                assert!(status.success(), "{line:?}");
                break;
            }
            child.kill().expect("it was running");
            child.wait().expect("it ends");
            kills += 1;
            if out.exists() {
                break;
            }
            // A finished step is never lost.
            let now = steps(&out);
            assert!(now >= finished, "{now} steps after {finished}");
            in_vain = if now > finished { 0 } else { in_vain + 1 };
            finished = now;
        }
        assert!(contents(&out) == want, "{line:?}: after {kills} kills");
        if rounds > 1 && steps(&out) == 0 {
            fs::remove_dir_all(&out).expect("it is there");
        }
    }
    eprintln!("{args:?}: {kills} kills in {rounds} runs, each of which takes {took:?}");
}

/// Every file below a directory.
fn below(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).expect("a directory").map(|e| e.expect("an entry").path());
    let mut all: Vec<PathBuf> =
        entries.flat_map(|path| if path.is_dir() { below(&path) } else { vec![path] }).collect();
    all.sort();
    all
}

/// Runs `args` until it is killed at a random moment, changes one bit of what it left, and
/// continues: to the bytes of one run, or it says what was changed. `times` bits, in all files in
/// turn.
fn notices(args: &[&str], place: &Path, seed: u64, times: usize) {
    let whole = place.join("whole");
    let start = Instant::now();
    done(&[args, &["-o", text(&whole)]].concat());
    let took = start.elapsed().max(Duration::from_millis(20));
    let want = contents(&whole);
    let (mut random, mut refused, mut changed) = (seed, 0, BTreeMap::<String, usize>::new());
    while changed.values().sum::<usize>() < times {
        let room = tempfile::tempdir_in(place).expect("a temporary directory");
        let out = room.path().join("out");
        let line = [args, &["-o", text(&out), "--resume"]].concat();
        let mut child = command(&line).stderr(Stdio::null()).spawn().expect("the program starts");
        std::thread::sleep(took.mul_f64(share(&mut random)));
        // It may have ended.
        let _ = child.kill();
        child.wait().expect("it ends");
        let left: Vec<PathBuf> =
            below(room.path()).into_iter().filter(|f| fs::metadata(f).is_ok_and(|f| f.len() > 0)).collect();
        if out.exists() || left.is_empty() {
            continue;
        }
        let name = |path: &Path| path.file_name().expect("a file").to_string_lossy().into_owned();
        let fewest = |path: &&PathBuf| changed.get(&name(path)).copied().unwrap_or(0);
        let path = left.iter().min_by_key(fewest).expect("there are some");
        let mut bytes = fs::read(path).expect("a file");
        share(&mut random);
        let bit = usize::try_from((random >> 16) % (8 * bytes.len() as u64)).expect("a place in it");
        bytes[bit / 8] ^= 1 << (bit % 8);
        fs::write(path, bytes).expect("a writable place");
        let (status, said) = finish(&line);
        let what = format!("{line:?}: bit {bit} of {}", path.display());
        if status.success() {
            assert!(contents(&out) == want, "{what} went unseen:\n{said}");
        } else {
            let error = said.lines().find(|line| line.starts_with("error: ")).unwrap_or_default();
            assert!(error.contains(".partial-"), "{what}: the error should name the place:\n{said}");
            assert!(!out.exists(), "{what}: there is a result");
            refused += 1;
        }
        *changed.entry(name(path)).or_default() += 1;
    }
    eprintln!("{args:?}: bits of {changed:?} changed, {refused} of them refused, the others made good");
}

#[test]
fn bits_that_change_in_what_a_killed_run_left_change_no_result() {
    all_notice(2);
}

#[test]
#[ignore = "takes minutes"]
fn many_bits_that_change_in_what_killed_runs_left_change_no_result() {
    all_notice(patience());
}

fn all_notice(times: usize) {
    let place = tempfile::tempdir().expect("a temporary directory");
    let (demo, stories) = (demo(), demo().join("stories.txt"));
    let dirs = ["stats", "sequential", "learned", "tuned"].map(|name| place.path().join(name));
    dirs.iter().for_each(|dir| fs::create_dir(dir).expect("a new directory"));
    let [stats, sequential, learned, tuned] = &dirs;
    let calibrate = ["calibrate", text(&demo), "--text", text(&stories), "--tokens", "2048", "--ctx", "256"];
    notices(&calibrate, stats, 11, times);
    let calibration = stats.join("whole");
    let quantize = ["quantize", text(&demo), "--scheme", "nuq-3", "--calibration", text(&calibration)];
    notices(&[&quantize[..], &["--sequential"]].concat(), sequential, 12, times);
    let learn = ["quantize", text(&demo), "--bits", "3.1", "--palette", "nuq", "--learn", "--tokens", "512"];
    notices(&learn, learned, 13, times);
    let (rounded, stories) = (sequential.join("whole"), text(&stories));
    let tune = ["tune", text(&rounded), "--baseline", text(&demo), "--text", stories, "--tokens", "600"];
    notices(&tune, tuned, 14, times);
}

#[test]
fn killed_calibration_and_quantization_continue_to_the_same_bytes() {
    all_survive(KILLS);
}

/// The same with fifty kills of each command, or `FRACBIT_KILLS`, for whoever has minutes: `cargo
/// test -p fracbit-cli --test resume -- --ignored`.
#[test]
#[ignore = "takes minutes"]
fn many_kills_change_no_byte() {
    all_survive(patience());
}

#[expect(clippy::disallowed_methods, reason = "how long somebody is willing to wait")]
fn patience() -> usize {
    std::env::var("FRACBIT_KILLS").map_or(50, |kills| kills.parse().expect("a number"))
}

fn all_survive(kills: usize) {
    let place = tempfile::tempdir().expect("a temporary directory");
    let (demo, stories) = (demo(), demo().join("stories.txt"));
    let stats = place.path().join("stats");
    let models = place.path().join("models");
    let last = place.path().join("sequential");
    let learned = place.path().join("learned");
    let tuned = place.path().join("tuned");
    for dir in [&stats, &models, &last, &learned, &tuned] {
        fs::create_dir(dir).expect("a new directory");
    }
    let calibrate = ["calibrate", text(&demo), "--text", text(&stories), "--tokens", "2048", "--ctx", "256"];
    survives(&calibrate, &stats, 1, kills);
    let calibration = stats.join("whole");
    let quantize = ["quantize", text(&demo), "--scheme", "nuq-3", "--calibration", text(&calibration)];
    let learn = ["quantize", text(&demo), "--bits", "3.1", "--palette", "nuq", "--learn", "--tokens", "512"];
    // One alone leaves processors idle where it begins anew and is compared.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            survives(&quantize, &models, 2, kills);
            let (rounded, stories) = (models.join("whole"), text(&stories));
            let tune =
                ["tune", text(&rounded), "--baseline", text(&demo), "--text", stories, "--tokens", "600"];
            survives(&tune, &tuned, 5, kills.div_ceil(6));
        });
        // Nine runs through a block or a part of it: slow enough that few kills have to do in CI.
        survives(&[&quantize[..], &["--sequential"]].concat(), &last, 3, kills.div_ceil(6));
        survives(&learn, &learned, 4, kills.div_ceil(6));
    });
    serves_again(6, kills.div_ceil(6));
    let weights = |dir: &Path| contents(&dir.join("whole"))["model.safetensors"].clone();
    assert!(weights(&last) != weights(&models), "the mode counts");
    assert!(weights(&tuned) != weights(&models), "scales were tuned");
}

/// A server that is killed while it answers has nothing to repair: it writes no files, and the next
/// one takes its port at once and answers alike.
fn serves_again(seed: u64, enough: usize) {
    let place = tempfile::tempdir().expect("a temporary directory");
    let model = place.path().join("model");
    fs::create_dir(&model).expect("a new directory");
    for (name, bytes) in contents(&demo()) {
        fs::write(model.join(name), bytes).expect("a writable place");
    }
    let before = contents(&model);
    let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    let address = free.expect("a free port").to_string();
    let port = address.rsplit(':').next().expect("a port");
    let begin = || {
        let mut serving = command(&["serve", text(&model), "--port", port]);
        let mut serving =
            serving.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("the program starts");
        let mut line = String::new();
        BufReader::new(serving.stdout.take().expect("piped")).read_line(&mut line).expect("UTF-8");
        assert!(line.contains(&address), "it serves at {address}: {line}");
        let mut stream = TcpStream::connect(&address).expect("a listener");
        let body = r#"{"model": "model", "prompt": "Once upon a time", "max_tokens": 60, "seed": 4}"#;
        write!(
            stream,
            "POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        )
        .expect("a listener that reads");
        (serving, stream)
    };
    let answer = || {
        let (mut serving, mut stream) = begin();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        serving.kill().expect("it was running");
        serving.wait().expect("it ends");
        let (_, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("a body: {answer}"));
        let body: serde_json::Value = serde_json::from_str(body).expect("JSON");
        body["choices"][0]["text"].as_str().expect("a text").to_owned()
    };
    let start = Instant::now();
    let (first, took, mut random) = (answer(), start.elapsed(), seed);
    for _ in 0..enough {
        let (mut serving, stream) = begin();
        std::thread::sleep(took.mul_f64(0.5 * share(&mut random)));
        serving.kill().expect("it was running");
        serving.wait().expect("it ends");
        drop(stream);
    }
    assert_eq!(answer(), first, "after {enough} kills");
    assert!(contents(&model) == before, "a server writes nothing");
    assert_eq!(fs::read_dir(place.path()).expect("a directory").count(), 1, "nothing lies beside the model");
    eprintln!("serve: {enough} kills, each within {took:?}");
}

/// Ctrl-C says how to go on, in a line that a shell takes.
#[test]
fn an_interrupted_run_says_how_to_continue() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let whole = place.path().join("whole");
    let demo = demo();
    let args = ["quantize", text(&demo), "--scheme", "tcq-3", "--data-free", "--effort", "fast", "-o"];
    done(&[&args[..], &[text(&whole)]].concat());
    // A name that wants quotes.
    let out = place.path().join("it's mine");
    let child = command(&[&args[..], &[text(&out)]].concat()).stderr(Stdio::piped()).spawn();
    let mut child = child.expect("the program starts");
    while steps(&out) < 3 {
        assert!(child.try_wait().expect("a child").is_none(), "it takes longer than three steps");
        std::thread::sleep(Duration::from_millis(1));
    }
    let kill = Command::new("sh").args(["-c", &format!("kill -INT {}", child.id())]).status();
    assert!(kill.expect("a shell").success());
    let ran = child.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&ran.stderr).into_owned();
    assert_eq!(ran.status.code(), Some(130), "{said}");
    let line = said.lines().last().expect("last words").trim();
    assert!(line.ends_with("--resume") && said.contains("this continues it"), "{said}");
    let resumed = Command::new("sh").args(["-c", line]).output().expect("a shell");
    assert!(resumed.status.success(), "{line}: {}", String::from_utf8_lossy(&resumed.stderr));
    assert!(contents(&out) == contents(&whole), "the bytes of one run");
}

/// A file system that is too small, for real: it takes root to make one.
#[test]
fn a_full_disk_is_explained_and_calibration_goes_on_when_there_is_room() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let disk = place.path().join("disk");
    fs::create_dir(&disk).expect("a new directory");
    let mount = |options: &str| {
        let ran = Command::new("mount").args(["-t", "tmpfs", "-o", options, "none", text(&disk)]).output();
        ran.is_ok_and(|r| r.status.success())
    };
    if !mount("size=8m") {
        eprintln!("SKIPPED: mounting a small file system takes root");
        return;
    }
    let (demo, stories) = (demo(), demo().join("stories.txt"));
    let out = disk.join("stats");
    let args = ["calibrate", text(&demo), "--text", text(&stories), "--tokens", "2048", "--ctx", "256", "-o"];
    // Full up front: refused with numbers before anything is computed.
    let ballast = disk.join("ballast");
    fs::write(&ballast, vec![1u8; 6 << 20]).expect("it fits");
    let (first, said) = finish(&[&args[..], &[text(&out)]].concat());
    // Room for the start only: it fills up on the way.
    let whole = place.path().join("whole");
    done(&[&args[..], &[text(&whole)]].concat());
    fs::remove_file(&ballast).expect("it is there");
    let (resumed, later) = finish(&[&args[..], &[text(&out), "--resume"]].concat());
    let same = resumed.success() && contents(&out) == contents(&whole);
    // What is asked for is what is written: 1.5 MB of a model, and no round number.
    fs::remove_dir_all(&out).expect("it is there");
    fs::write(&ballast, vec![1u8; 5 << 20]).expect("it fits");
    let [small, tuned] = ["small", "tuned"].map(|name| disk.join(name));
    let quantize = ["quantize", text(&demo), "--scheme", "nuq-2", "--data-free", "-o", text(&small)];
    let tune =
        ["tune", text(&small), "--baseline", text(&demo), "--text", text(&stories), "-o", text(&tuned)];
    let fits = [&quantize[..], &tune].map(finish);
    let _ = Command::new("umount").arg(&disk).status();
    assert!(!first.success() && said.contains("needed") && said.contains("free"), "{said}");
    assert!(same, "{later}");
    fits.into_iter().for_each(|(ran, said)| assert!(ran.success(), "{said}"));
}
