//! Numbers the build, so that a machine profile can tell whether it was measured with these
//! kernels: a hash of the sources that decide how long a decode step takes, and of how they are
//! compiled.

use std::{
    env, fs, io,
    path::{Path, PathBuf},
};

/// Crates whose code runs in a decode step, beside the kernels of the target.
const CRATES: [&str; 4] = ["fracbit-codebook", "fracbit-format", "fracbit-kernels", "fracbit-model"];

#[expect(clippy::disallowed_methods, reason = "cargo tells a build script in variables what it builds")]
fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let var = |name: &str| env::var(name).unwrap_or_default();
    let of_target = match var("CARGO_CFG_TARGET_ARCH").as_str() {
        "x86_64" => "fracbit-kernels-x86",
        "aarch64" => "fracbit-kernels-neon",
        _ => "",
    };
    let mut hash = Fnv::new();
    // Where the sources lie does not matter, and neither what is said of that.
    let flags = var("CARGO_ENCODED_RUSTFLAGS");
    let flags: Vec<&str> = flags.split('\u{1f}').filter(|f| !f.starts_with("--remap-path-prefix")).collect();
    for name in ["TARGET", "PROFILE", "OPT_LEVEL", "DEBUG"] {
        hash.add(var(name).as_bytes());
    }
    hash.add(flags.join("\u{1f}").as_bytes());
    hash.add(var("CARGO_PKG_VERSION").as_bytes());
    let here = PathBuf::from(var("CARGO_MANIFEST_DIR"));
    for name in CRATES.into_iter().chain([of_target]).filter(|name| !name.is_empty()) {
        // In a registry the crates do not lie side by side under these names; there the version
        // stands for them, since it cannot change.
        let folder = here.join("..").join(name);
        for part in ["src", "data"].map(|part| folder.join(part)) {
            if part.is_dir() {
                println!("cargo::rerun-if-changed={}", part.display());
                add(&part, &mut hash).expect("the workspace can be read");
            }
        }
    }
    println!("cargo::rustc-env=FRACBIT_BUILD={:016x}", hash.0);
}

/// Adds the names and contents of all files of a folder, in order.
fn add(folder: &Path, hash: &mut Fnv) -> io::Result<()> {
    let mut entries: Vec<PathBuf> =
        fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>()?;
    entries.sort();
    for entry in entries {
        if entry.is_dir() {
            add(&entry, hash)?;
            continue;
        }
        hash.add(entry.file_name().unwrap_or_default().as_encoded_bytes());
        hash.add(&fs::read(&entry)?);
    }
    Ok(())
}

/// FNV-1a, 64 bits, over pieces of bytes with their lengths.
struct Fnv(u64);

impl Fnv {
    fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    fn add(&mut self, bytes: &[u8]) {
        for byte in bytes.iter().chain(&(bytes.len() as u64).to_le_bytes()) {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}
