//! Runs that are killed at random moments and continued end with the bytes of one run.
#![cfg(unix)]
#![expect(clippy::print_stderr, reason = "a test that does not run has to say so")]

use std::{
    collections::BTreeMap,
    fs,
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
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let share = f64::from(u32::try_from(random >> 32).expect("32 bits")) / f64::from(u32::MAX);
            let patience = took.mul_f64(0.5 * share * (1.0 + f64::from(in_vain)));
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

#[test]
fn killed_calibration_and_quantization_continue_to_the_same_bytes() {
    all_survive(KILLS);
}

/// The same with fifty kills of each command, or `FRACBIT_KILLS`, for whoever has minutes: `cargo
/// test -p fracbit-cli --test resume -- --ignored`.
#[test]
#[ignore = "takes minutes"]
#[expect(clippy::disallowed_methods, reason = "how long somebody is willing to wait")]
fn many_kills_change_no_byte() {
    all_survive(std::env::var("FRACBIT_KILLS").map_or(50, |kills| kills.parse().expect("a number")));
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
    let weights = |dir: &Path| contents(&dir.join("whole"))["model.safetensors"].clone();
    assert!(weights(&last) != weights(&models), "the mode counts");
    assert!(weights(&tuned) != weights(&models), "scales were tuned");
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
