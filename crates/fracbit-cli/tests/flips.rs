//! Single bits that change in files with checksums: of models in one file and in shards, of a plain
//! checkpoint and of a calibration, and of what interrupted runs keep. `verify` names the file, and
//! whoever reads it refuses; but for a model card, which may be edited.

use fracbit::{CalibrateOptions, Calibration, Opened, Quiet, calibrate};
use fracbit_io::{Header, MAX_SHARD, OutputDir, Overwrite, ShardWriter, TensorInfo, TensorSpec, verify};
use fracbit_model::{LinearId, RotationMode};
use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    time::Instant,
};

/// A directory of the repository.
fn committed(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests").join(name)
}

/// A small checkpoint with biases.
fn plain() -> PathBuf {
    committed("reference/models/llama-bias")
}

fn files(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = fs::read_dir(dir).expect("a readable directory").map(|e| e.expect("an entry"));
    let named = |e: fs::DirEntry| e.file_name().to_string_lossy().into_owned();
    let mut all: Vec<_> =
        entries.map(|e| (e.path(), named(e))).map(|(p, n)| (n, fs::read(p).expect("a file"))).collect();
    all.sort();
    all
}

/// What a message about a file may call it: the configuration's block has a name of its own.
fn names_file(text: &str, name: &str) -> bool {
    text.contains(name) || (name == "config.json" && text.contains("quantization_config"))
}

/// How a directory is read.
type Reading = fn(&Path) -> Result<(), String>;

fn said<T>(outcome: Result<T, impl std::fmt::Display>) -> Result<(), String> {
    outcome.map(drop).map_err(|e| e.to_string())
}

fn model(dir: &Path) -> Result<(), String> {
    let read = Opened::new(dir).and_then(|opened| {
        opened.tokenizer()?;
        opened.model(&fracbit::kernels()?, true)
    });
    said(read)
}

/// All that a quantization reads.
fn calibration(dir: &Path) -> Result<(), String> {
    let source = Opened::new(&plain()).and_then(|o| o.source(RotationMode::None, 0));
    let source = source.expect("a good checkpoint");
    let all = Calibration::open(dir).and_then(|calibration| {
        calibration.sequences()?;
        for id in LinearId::all(source.config()) {
            calibration.moments(&source, id)?;
        }
        (0..source.config().num_hidden_layers())
            .try_for_each(|block| calibration.means(source.config(), block).map(drop))
    });
    said(all)
}

/// The files of a directory once more, under a manifest, in shards of at most so many bytes.
fn rewritten(of: &Path, out: &Path, max_shard: u64) {
    const SHARD: &str = "model.safetensors";
    let bytes = fs::read(of.join(SHARD)).expect("a model in one file");
    let header = Header::parse(&bytes).expect("a good file");
    let spec = |(name, info): &(String, TensorInfo)| TensorSpec {
        name: name.clone(),
        dtype: info.dtype,
        shape: info.shape.clone(),
    };
    let mut dir = OutputDir::create(out, Overwrite::No).expect("a new directory");
    let specs = header.tensors.iter().map(spec).collect();
    let mut writer = ShardWriter::new(&mut dir, specs, max_shard, &BTreeMap::new()).expect("good tensors");
    for (name, info) in &header.tensors {
        writer.write(name, &bytes[info.range.clone()]).expect("the next of the list");
    }
    writer.finish().expect("all are written");
    for (name, bytes) in files(of) {
        if name != SHARD && name != "manifest.json" && !name.ends_with(".f32") {
            dir.write_file(&name, &bytes).expect("a writable place");
        }
    }
    dir.write_file("README.md", b"A model card.\n").expect("a writable place");
    dir.write_manifest("a test".into()).expect("a writable place");
    dir.commit().expect("a writable place");
}

/// Changes a bit where it lies.
fn flip(path: &Path, bit: u64) {
    let mut file = File::options().read(true).write(true).open(path).expect("a file");
    let mut byte = [0];
    let at = SeekFrom::Start(bit / 8);
    file.seek(at).and_then(|_| file.read_exact(&mut byte)).expect("a byte of the file");
    byte[0] ^= 1 << (bit % 8);
    file.seek(at).and_then(|_| file.write_all(&byte)).expect("a writable place");
}

/// Flips `count` bits, one at a time: file by file in turn, of tensors' files every second bit in
/// the header.
#[expect(clippy::print_stdout, reason = "how much was tried")]
fn flips(count: u64) {
    let place = tempfile::tempdir().expect("a temporary directory");
    let at = |name: &str| place.path().join(name);
    let packed = committed("golden/versions/v2-groups");
    rewritten(&packed, &at("model"), MAX_SHARD);
    rewritten(&packed, &at("shards"), 10_000);
    rewritten(&plain(), &at("plain"), MAX_SHARD);
    let opened = Opened::new(&plain()).expect("a good checkpoint");
    let options = CalibrateOptions { length: Some(32), ..CalibrateOptions::new(64) };
    calibrate(&opened, None, &at("calibration"), &options, &Quiet).expect("it can write");
    let kinds: [(&str, &Path, Reading); 4] = [
        ("model", &at("model"), model),
        ("model in shards", &at("shards"), model),
        ("plain checkpoint", &at("plain"), model),
        ("calibration", &at("calibration"), calibration),
    ];
    let scratch = at("scratch");
    fracbit_io::keep(&scratch, &fs::read(packed.join("plan.json")).expect("a plan")).expect("writable");

    let mut all = Vec::new();
    for (kind, dir, reading) in kinds {
        reading(dir).unwrap_or_else(|e| panic!("{kind}: {e}"));
        assert!(verify(dir).is_ok_and(|report| report.is_ok() && report.checksums), "{kind}");
        for (name, bytes) in files(dir) {
            let header = Header::parse(&bytes).ok().map(|header| header.data_start);
            all.push((kind, dir, reading, name, bytes, header));
        }
    }
    let of_tensors = all.iter().filter(|of| of.5.is_some()).count();
    assert!(all.len() > 20 && of_tensors > 5, "all types: {} files, {of_tensors} of tensors", all.len());
    let mut found: BTreeMap<&str, u64> = BTreeMap::new();
    let (start, mut state) = (Instant::now(), 0x5eed_u64);
    let mut below = |n: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 16) % n
    };
    for number in 0..count {
        let turn = usize::try_from(number).expect("64 bits");
        let Some((kind, dir, reading, name, bytes, header)) = all.get(turn % (all.len() + 1)) else {
            let bit = below(8 * fs::metadata(&scratch).expect("it is there").len());
            flip(&scratch, bit);
            assert_eq!(fracbit_io::kept(&scratch), None, "bit {bit} of a scratch file went unseen");
            flip(&scratch, bit);
            *found.entry("scratch").or_default() += 1;
            continue;
        };
        let end = header.filter(|_| turn / (all.len() + 1) % 2 == 0).unwrap_or(bytes.len());
        let bit = below(8 * end as u64);
        let (path, what) = (dir.join(name), format!("bit {bit} of {name} of a {kind}"));
        flip(&path, bit);
        let report = verify(dir).expect("readable");
        assert!(report.problems.iter().any(|p| p.file == *name), "{what} went unseen: {report}");
        match reading(dir) {
            Ok(()) => assert_eq!(name, "README.md", "{what} went unseen by whoever reads it"),
            Err(text) => assert!(names_file(&text, name), "{what}: `{name}` should be in: {text}"),
        }
        flip(&path, bit);
        *found.entry(kind).or_default() += 1;
    }
    for (kind, dir, reading) in kinds {
        reading(dir).unwrap_or_else(|e| panic!("{kind}: {e}"));
    }
    println!("{count} flipped bits in {:.0?}, all found: {found:?}", start.elapsed());
}

#[test]
fn flipped_bits_are_found() {
    flips(500);
}

/// As many as anybody asked for: `cargo test -p fracbit-cli --test flips -- --ignored`.
#[test]
#[ignore = "takes minutes"]
fn a_hundred_thousand_flipped_bits_are_found() {
    flips(100_000);
}
