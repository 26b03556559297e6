//! With feature `cuda`: embeds the fat binaries that `cargo xtask kernels` made, if they are those
//! of today's sources.

use std::{env, fmt::Write as _, fs, path::Path};

#[path = "src/sources.rs"]
mod sources;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernels/cuda");
    println!("cargo::rerun-if-changed={}", folder.display());
    let units = units(&folder);
    let (reason, list) = match &units {
        Ok(list) => (String::new(), list.as_str()),
        Err(reason) => (reason.clone(), ""),
    };
    if units.is_err() {
        println!("cargo::warning=no CUDA kernels embedded: {reason}; run `cargo xtask kernels`");
    }
    let out = env::var_os("OUT_DIR").expect("cargo sets OUT_DIR");
    let text = format!(
        "pub(crate) const MISSING: &str = {reason:?};\npub(crate) const UNITS: &[(&str, &[u8])] = &[{list}];\n"
    );
    fs::write(Path::new(&out).join("units.rs"), text).expect("OUT_DIR is writable");
}

/// The list of units as Rust source.
fn units(folder: &Path) -> Result<String, String> {
    let mut list = String::new();
    for (unit, instances) in sources::UNITS {
        let hash =
            sources::unit_hash(folder, unit, instances).map_err(|e| format!("kernels/cuda, {unit}: {e}"))?;
        let made = fs::read_to_string(folder.join(format!("out/{unit}.hash")))
            .map_err(|_| format!("unit `{unit}` was not compiled"))?;
        if made.trim() != format!("{hash:016x}") {
            return Err(format!("unit `{unit}` was compiled from other sources"));
        }
        let file = folder.join(format!("out/{unit}.fatbin"));
        let file = fs::canonicalize(&file).map_err(|e| format!("{}: {e}", file.display()))?;
        write!(list, "({unit:?}, include_bytes!({file:?})),").expect("a String takes all");
    }
    Ok(list)
}
