//! One budget of memory for weights and cache.

mod common;

use common::{DONE, FAILED, OUT_OF_REACH, USAGE, demo, finish, fracbit, text};
use std::fs;

#[test]
fn a_memory_is_divided_between_weights_and_cache() {
    let demo = demo();
    let place = tempfile::tempdir().expect("a temporary directory");
    let saved = place.path().join("plan.json");
    let plan = |memory: &str, more: &[&str]| {
        let asked = ["plan", text(&demo), "--memory", memory, "--sensitivity", "prior", "--context", "512"];
        fracbit(&[&asked[..], more].concat())
    };
    let chosen = |memory: u64, sequences: &str| {
        let done = plan(
            &memory.to_string(),
            &["--sequences", sequences, "--json", "--save", text(&saved), "--force"],
        )
        .done();
        let (cache, bytes) = (done.json()["cache"].clone(), done.json()["bytes"].as_u64().expect("a number"));
        assert_eq!((&cache["context"], cache["sequences"].to_string()), (&512.into(), sequences.to_owned()));
        assert!(bytes + cache["bytes"].as_u64().expect("a number") <= memory, "{}", done.out);
        // Of all that were tried the one that loses least.
        let lines = done.err.lines().filter(|line| line.starts_with("memory: a cache of "));
        let losses: Vec<(f64, &str)> = lines
            .map(|line| {
                let together = line.split("together ").nth(1).and_then(|rest| rest.split(' ').next());
                let bits = line.split(' ').nth(4).expect("bits");
                (together.map_or(f64::INFINITY, |loss| loss.parse().expect("a number")), bits)
            })
            .collect();
        assert_eq!(losses.iter().map(|(_, bits)| *bits).collect::<Vec<_>>(), ["16", "8", "6", "4"]);
        let least = losses.iter().map(|(loss, _)| *loss).fold(f64::INFINITY, f64::min);
        let kv = cache["kv"].as_str().expect("a type")[1..].to_owned();
        let own = losses.iter().find(|(_, bits)| *bits == kv).expect("one of them").0;
        assert!(own <= least + 1e-4, "{kv} of {losses:?}");
        kv.parse::<u32>().expect("bits")
    };
    // Much memory: nothing is lost in the cache. Little, and many sequences: fewer bits.
    assert_eq!(chosen(40_000_000, "1"), 16);
    let tight = chosen(6_000_000, "8");
    assert!(tight < 16, "{tight}");
    // A saved plan keeps it.
    let again = fracbit(&["plan", text(&demo), "--plan", text(&saved)]).done();
    assert!(again.out.contains(&format!("`--kv {tight}`")), "{}", again.out);
    plan("100kB", &["--sequences", "8"]).failed(OUT_OF_REACH, &["the cache takes at least"]);
    plan("6MB", &["--bits", "4"]).failed(USAGE, &["--bits"]);
    fracbit(&["plan", text(&demo), "--bits", "4", "--context", "9"]).failed(USAGE, &["--profile"]);
    fracbit(&["plan", text(&demo), "--bits", "4", "--sequences", "9"]).failed(USAGE, &["--memory"]);
}

/// Runs the program in a process that may have so much memory (`ulimit -v`).
#[cfg(target_os = "linux")]
fn limited(megabytes: u32, words: &[&str]) -> common::Ran {
    let limit = format!("ulimit -v {}; exec \"$0\" \"$@\"", megabytes * 1024);
    let mut command = std::process::Command::new("sh");
    command.args(["-c", &limit, env!("CARGO_BIN_EXE_fracbit")]).args(words);
    finish(words, &mut command)
}

/// Less memory than a command takes: it works or says why not, and is never ended by an allocation
/// that fails.
#[cfg(target_os = "linux")]
#[test]
fn a_limit_of_the_process_is_a_refusal() {
    let stories = demo().join("stories.txt");
    let place = tempfile::tempdir().expect("a temporary directory");
    let (small, large, packed) =
        (place.path().join("small"), place.path().join("large"), place.path().join("packed"));
    fracbit(&["synth", "--shape", "tiny", "-o", text(&small)]).done();
    fracbit(&["synth", "--shape", "tiny", "--vocab", "200000", "-o", text(&large)]).done();
    fracbit(&["quantize", text(&small), "--scheme", "nuq-2", "--data-free", "-o", text(&packed)]).done();
    let commands = [
        vec!["calibrate", text(&small), "--text", text(&stories), "--tokens", "256", "--ctx", "64"],
        vec!["quantize", text(&small), "--scheme", "nuq-2", "--data-free"],
        vec!["run", text(&packed), "-p", "Once", "-n", "4"],
    ];
    for (which, words) in commands.iter().enumerate() {
        // Less does not hold the program itself.
        for megabytes in [150, 200, 300, 500, 4000] {
            let out = place.path().join(format!("out-{which}-{megabytes}"));
            let to = ["-o", text(&out)];
            let words = [&words[..], if words[0] == "run" { &[] } else { &to }].concat();
            let ran = limited(megabytes, &words);
            let told = format!("{megabytes} MB: {}: {}\n{}", ran.line, ran.code, ran.err);
            assert!([DONE, FAILED].contains(&ran.code) && !ran.err.contains("panicked"), "{told}");
            let errors = ran.err.lines().filter(|line| line.starts_with("error: ")).count();
            assert_eq!(errors, usize::from(ran.code == FAILED), "{told}");
            assert!(ran.code == DONE || megabytes < 4000, "{told}");
        }
    }
    // Every thread takes address space, on a machine of many processors most of it.
    for (megabytes, threads) in [(200, "8"), (500, "8"), (1000, "64")] {
        limited(megabytes, &["run", text(&packed), "-p", "Once", "-n", "4", "--threads", threads])
            .failed(FAILED, &["error: memory: starting threads takes about", "`ulimit -v`", "--threads"]);
    }
    // Logits of a large vocabulary.
    let out = place.path().join("out");
    limited(500, &["quantize", text(&large), "--bits", "3", "--data-free", "-o", text(&out)])
        .failed(FAILED, &["error: memory: measuring takes about", "`ulimit -v`", "--sensitivity prior"]);
    assert!(!out.exists());
}

/// Of a long text as much is made tokens as is wanted, which takes no gigabytes, and they are those
/// of a short one.
#[cfg(target_os = "linux")]
#[test]
fn of_a_long_text_only_so_many_tokens_are_made() {
    let demo = demo();
    let place = tempfile::tempdir().expect("a temporary directory");
    let at = |name: &str| text(&place.path().join(name)).to_owned();
    let told = fs::read_to_string(demo.join("stories.txt")).expect("a file") + "<|endoftext|>";
    let (short, long) = (at("short.txt"), at("long.txt"));
    for (file, times) in [(&short, 2), (&long, (20 << 20) / told.len())] {
        fs::write(file, told.repeat(times)).expect("a writable place");
    }
    for how in [&[][..], &["--separator", "<|endoftext|>"], &["--separator", "<|endoftext|>", "--bos"]] {
        let tokens = |file: &str| {
            let out = at("out");
            let words = ["calibrate", text(&demo), "--text", file, "--tokens", "900", "--ctx", "100"];
            limited(1000, &[&words[..], how, &["-o", &out, "--force"]].concat()).done();
            fs::read(format!("{out}/model.safetensors")).expect("a file")
        };
        assert!(tokens(&short) == tokens(&long), "{how:?}");
    }
}

/// Measurements that would walk through more than the machine has say so before they begin.
#[cfg(target_os = "linux")]
#[test]
fn benchmarks_have_a_place() {
    for line in [
        "bench limits",
        "bench kernels",
        "bench psumbook",
        "bench model --shape tiny",
        "explore --scheme nuq-2",
    ] {
        let words: Vec<&str> = line.split(' ').chain(["--bytes", "900000GB"]).collect();
        fracbit(&words).failed(FAILED, &["memory: what is walked through takes about", "--bytes"]);
    }
}
