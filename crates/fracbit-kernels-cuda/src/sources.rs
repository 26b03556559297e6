// What the device code is made of. The build script of this crate and `xtask` include this file.

/// Units of device code, each one module: a name and the instances it includes.
pub(crate) const UNITS: [(&str, &str); 16] = [
    ("model", "model.inc"),
    ("kv", "kv.inc"),
    ("gemm", "gemm.inc"),
    ("prompt", "prompt.inc"),
    ("encode", "encode.inc"),
    ("w4a8", "w4a8.inc"),
    ("pair", "gen/pair.inc"),
    ("grouped", "gen/grouped.inc"),
    ("fine", "gen/fine.inc"),
    ("fast", "gen/fast.inc"),
    ("hyb", "gen/hyb.inc"),
    ("half_fine", "gen/half_fine.inc"),
    ("half_fast", "gen/half_fast.inc"),
    ("half_hyb", "gen/half_hyb.inc"),
    ("additive", "gen/additive.inc"),
    ("nest", "gen/nest.inc"),
];

/// The headers that the units include, by unit: `gen` stands for all generated ones.
pub(crate) const HEADERS: [(&str, &[&str]); 8] = [
    (
        "model",
        &[
            "attend_few.cuh",
            "dense.cuh",
            "experts.cuh",
            "kv_codes.cuh",
            "model.cuh",
            "repack.cuh",
            "rotate_few.cuh",
            "sample.cuh",
        ],
    ),
    ("kv", &["attend_few.cuh", "kv_codes.cuh", "kv_prompt.cuh", "model.cuh"]),
    ("gemm", &["gemm.cuh", "gemm_warpgroup.cuh", "warpgroup.cuh"]),
    ("prompt", &["model.cuh", "prompt.cuh"]),
    ("encode", &["encode.cuh"]),
    ("w4a8", &["codes.cuh", "gemv.cuh", "w4a8.cuh"]),
    ("additive", &["additive.cuh", "codes.cuh", "expand.cuh", "gemv.cuh", "psumbook.cuh"]),
    ("gen", &["codes.cuh", "gemv.cuh", "expand.cuh"]),
];

/// FNV-1a of names and contents of what a unit is made of: artefacts carry it, and do not fit other
/// sources.
pub(crate) fn unit_hash(folder: &std::path::Path, unit: &str, instances: &str) -> std::io::Result<u64> {
    let headers = HEADERS.iter().find(|(name, _)| *name == unit).unwrap_or(&HEADERS[HEADERS.len() - 1]).1;
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for name in ["device.cuh", "instances.cu", "instances.inc", instances].iter().chain(headers) {
        for byte in name.bytes().chain(std::fs::read(folder.join(name))?) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        }
    }
    Ok(hash)
}
