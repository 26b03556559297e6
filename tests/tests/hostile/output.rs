//! Places where a model cannot be written.

use crate::{names, refused_with};
use fracbit_model::RotationMode;
use fracbit_tests::{Parts, Source, files, load, reference, skip};
use half::f16;
use std::{fs, path::Path, process::Command};

fn source() -> Source {
    Source::open(&reference("llama2").dir, RotationMode::Fold, 0).expect("a good checkpoint")
}

fn quantize(out: &Path, force: bool) -> Result<(), fracbit::Error> {
    let source = source();
    let plan = source.uniform("nuq-3").expect("no budget to miss");
    source.quantize(&plan, out, force).map(drop)
}

#[test]
fn a_name_that_is_taken_is_left_alone() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let (file, other, model, empty) = (
        place.path().join("file"),
        place.path().join("other"),
        place.path().join("model"),
        place.path().join("empty"),
    );
    fs::write(&file, b"mine").expect("a writable place");
    fs::create_dir_all(other.join("letters")).expect("a writable place");
    fs::create_dir(&empty).expect("a writable place");
    quantize(&model, false).expect("nothing in the way");
    let before = files(&model);

    refused_with("a file", quantize(&file, false), &["file", "should not exist"]);
    refused_with("a file, by force", quantize(&file, true), &["file", "should not exist"]);
    refused_with("a directory of something else", quantize(&other, false), &["other", "should not exist"]);
    refused_with(
        "the same by force",
        quantize(&other, true),
        &["other", "does not look like a model directory"],
    );
    refused_with("a model", quantize(&model, false), &["model", "should not exist"]);
    assert_eq!(fs::read(&file).expect("still there"), b"mine");
    assert!(other.join("letters").is_dir());
    assert_eq!(files(&model), before);

    // What may be replaced is.
    quantize(&empty, false).expect("an empty directory is no loss");
    let source = source();
    source.quantize(&source.uniform("nuq-5").expect("no budget to miss"), &model, true).expect("asked for");
    assert_ne!(files(&model), before, "replaced");
    load(&model).expect("the new one runs");
    assert_eq!(names(place.path()), ["empty", "file", "model", "other"], "nothing partial is left");
}

#[test]
fn a_parent_that_takes_no_directory() {
    let place = tempfile::tempdir().expect("a temporary directory");
    fs::write(place.path().join("file"), b"mine").expect("a writable place");
    refused_with("a file for a parent", quantize(&place.path().join("file/out"), false), &["file"]);
    refused_with("no parent", quantize(&place.path().join("absent/out"), false), &["absent"]);
    refused_with("no name", quantize(Path::new("/"), false), &["should end in the name of a directory"]);
    assert_eq!(names(place.path()), ["file"]);
}

#[test]
fn a_failure_halfway_leaves_the_old_model() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let out = place.path().join("out");
    quantize(&out, false).expect("nothing in the way");
    let before = files(&out);
    // The head is written last.
    let mut parts = Parts::read(&reference("llama2").dir);
    parts.tensor("lm_head.weight").bytes[..2].copy_from_slice(&f16::NAN.to_le_bytes());
    let dir = place.path().join("model");
    parts.write(&dir);
    let bad = Source::open(&dir, RotationMode::Fold, 0).expect("headers are good");
    let plan = bad.uniform("nuq-3").expect("no budget to miss");
    refused_with("NaN at the end", bad.quantize(&plan, &out, true), &["lm_head.weight"]);
    assert_eq!(files(&out), before, "the old model is untouched");
    assert_eq!(names(place.path()), ["model", "out"], "nothing partial is left");
}

#[test]
fn a_full_disk_is_refused_with_both_numbers() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let mount = place.path().join("small");
    fs::create_dir(&mount).expect("a writable place");
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=32k", "tmpfs"]).arg(&mount).output();
    if !mounted.is_ok_and(|m| m.status.success()) {
        skip(
            "a full disk",
            "mounting a small tmpfs needs privileges; the command line's tests limit the file size instead",
        );
        return;
    }
    let outcome = quantize(&mount.join("out"), false);
    let left = names(&mount);
    let unmounted = Command::new("umount").arg(&mount).status();
    assert!(unmounted.is_ok_and(|s| s.success()), "the small disk goes away");
    refused_with("a disk of 32 KB", outcome, &["small", "needed", "free"]);
    assert!(left.is_empty(), "nothing is left: {left:?}");
}
