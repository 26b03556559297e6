//! Generated files: their source of truth is `kernels/families.toml`.

use crate::{Failure, Outcome, root};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs,
};

/// One kernel family of `kernels/families.toml`.
#[derive(Default)]
struct Family {
    name: String,
    what: String,
    rates: Vec<String>,
    codes: Vec<String>,
    bodies: Vec<String>,
}

/// Writes every generated file, or with `check` fails when one is not current.
pub(crate) fn run(check: bool) -> Outcome {
    let source = root().join("kernels/families.toml");
    let text = fs::read_to_string(&source).map_err(|error| format!("{}: {error}", source.display()))?;
    let families = parse(&text)?;
    let mut files = vec![("docs/support.md".to_owned(), support(&families))];
    files.extend(cuda_units(&families)?);
    for (name, want) in &files {
        let path = root().join(name);
        if check {
            if fs::read_to_string(&path).unwrap_or_default() != *want {
                return Err(format!("{name} is not current: run `cargo xtask codegen`"));
            }
        } else {
            fs::write(&path, want).map_err(|error| format!("{}: {error}", path.display()))?;
        }
    }
    if check {
        println!("codegen: {} files are current", files.len());
    }
    Ok(())
}

/// The units of CUDA instances: one for pairs and scalars, two for their products without tensor cores, one for group-wise schemes, one for each trellis code, one for each half-trellis code.
pub(crate) const CUDA_UNITS: [&str; 10] =
    ["pair", "core", "core_wide", "grouped", "fine", "fast", "hyb", "half_fine", "half_fast", "half_hyb"];

/// Instances of one form of `core.cuh`.
struct Core {
    unit: &'static str,
    name: &'static str,
    form: &'static str,
    /// Rates in half bits.
    rates: &'static [u32],
    /// Most tokens of an instance; the next larger one takes the batches between.
    batches: &'static [u32],
}

/// Products without tensor cores. Built-in tables are on the int8 grid up to 4 bits and at `nuq-5`; `wide` forms are for the 16-bit
/// grid. Forms that the tensor cores beat at every batch have no instances between 1 and 8.
const CORES: [Core; 4] = [
    Core { unit: "core", name: "quads", form: "Quads", rates: &[3, 4, 5], batches: &[1, 2, 4, 8] },
    Core { unit: "core", name: "pairs", form: "Pairs", rates: &[6, 7, 8, 10], batches: &[1, 8] },
    Core { unit: "core_wide", name: "wide", form: "WidePairs", rates: &[9, 10, 11, 12], batches: &[1, 8] },
    Core { unit: "core_wide", name: "ones", form: "Ones", rates: &[14, 16], batches: &[1, 8] },
];

/// The instances of every family, by unit: (`kernels/cuda/gen/UNIT.inc`, text). `H` of an instance is its rate in half bits.
fn cuda_units(families: &[Family]) -> Result<Vec<(String, String)>, Failure> {
    let mut bodies: BTreeMap<String, BTreeSet<(u32, String)>> = BTreeMap::new();
    let mut add = |unit: &str, h: u32, line: String| {
        bodies.entry(unit.to_owned()).or_default().insert((h, line));
    };
    for family in families.iter().filter(|f| f.bodies.iter().any(|b| b == "cuda")) {
        for rate in &family.rates {
            let bits: f64 = rate.parse().map_err(|_| format!("rate `{rate}` of {}", family.name))?;
            let low = if family.name == "half-tcq" { bits - 0.25 } else { bits };
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "2 to 16 half bits")]
            let h = (2.0 * low) as u32;
            if f64::from(h) != 2.0 * low {
                return Err(format!("rate `{rate}` of {} is no multiple of a half bit", family.name));
            }
            if ["int", "gnuq"].contains(&family.name.as_str()) {
                let (name, body) = if h == 16 { ("bytes", "Bytes") } else { ("books", "Books") };
                add("grouped", h, format!("FB_DEQUANT_GROUPED(dequant_{name}_{h}, {body}<{h}>)"));
                for tokens in [1, 8] {
                    add("grouped", h, format!("FB_GROUPED(core_{name}_{h}_{tokens}, {body}<{h}>, {tokens})"));
                }
                continue;
            }
            if family.codes.is_empty() {
                // Two scalar codes side by side are a vector code whose table is the product of theirs.
                let (name, body) = if h <= 14 { ("pair", "Pair") } else { ("single", "Single") };
                add("pair", h, format!("FB_GEMV(gemv_{name}_{h}, {body}<{h}>, {body}<{h}>)"));
                add("pair", h, format!("FB_DEQUANT(dequant_{name}_{h}, {body}<{h}>)"));
                for Core { unit, name, form, batches, .. } in CORES.iter().filter(|c| c.rates.contains(&h)) {
                    for tokens in *batches {
                        let line = format!("FB_CORE(core_{name}_{h}_{tokens}, {form}<{h}>, {tokens})");
                        add(unit, h, line);
                    }
                }
            }
            for code in &family.codes {
                let body = code[..1].to_uppercase() + &code[1..];
                if family.name == "half-tcq" {
                    let line =
                        format!("FB_GEMV(gemv_half_{code}_{h}, {body}<{h}>, {body}<{high}>)", high = h + 1);
                    add(&format!("half_{code}"), h, line);
                } else {
                    add(code, h, format!("FB_GEMV(gemv_{code}_{h}, {body}<{h}>, {body}<{h}>)"));
                    add(code, h, format!("FB_DEQUANT(dequant_{code}_{h}, {body}<{h}>)"));
                }
            }
        }
    }
    if !bodies.keys().map(String::as_str).eq(BTreeSet::from(CUDA_UNITS)) {
        return Err(format!("CUDA units: expected {CUDA_UNITS:?}, got {:?}", bodies.keys()));
    }
    let header = |unit: &str| {
        let include = match unit {
            "core" | "core_wide" => "core",
            "grouped" => "grouped",
            _ => "gemv",
        };
        format!(
            "// Written by `cargo xtask codegen` from kernels/families.toml: do not edit.\n#include \"{include}.cuh\"\n"
        )
    };
    let text = |lines: &BTreeSet<(u32, String)>| {
        lines.iter().map(|(_, line)| line.as_str()).collect::<Vec<_>>().join("\n")
    };
    Ok(bodies
        .iter()
        .map(|(unit, lines)| {
            (format!("kernels/cuda/gen/{unit}.inc"), format!("{}{}\n", header(unit), text(lines)))
        })
        .collect())
}

/// Reads the small part of TOML that the file uses: `[[family]]` tables of strings and lists of strings.
fn parse(text: &str) -> Result<Vec<Family>, Failure> {
    let mut families: Vec<Family> = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let at = format!("kernels/families.toml:{}", number + 1);
        if line == "[[family]]" {
            families.push(Family::default());
            continue;
        }
        let (key, value) = line.split_once('=').ok_or_else(|| format!("{at}: expected `key = value`"))?;
        let family = families.last_mut().ok_or_else(|| format!("{at}: a key before the first [[family]]"))?;
        let strings: Vec<String> = value.split('"').skip(1).step_by(2).map(str::to_owned).collect();
        let one = || strings.first().cloned().ok_or_else(|| format!("{at}: expected a quoted text"));
        match key.trim() {
            "name" => family.name = one()?,
            "what" => family.what = one()?,
            "rates" => family.rates = strings,
            "codes" => family.codes = strings,
            "bodies" => family.bodies = strings,
            other => return Err(format!("{at}: unknown key `{other}`")),
        }
    }
    Ok(families)
}

fn support(families: &[Family]) -> String {
    const BODIES: [&str; 9] =
        ["scalar", "avx2", "avxvnni", "avx512", "amx", "neon", "dotprod", "i8mm", "cuda"];
    let mut out = String::from(
        "<!-- Written by `cargo xtask codegen` from kernels/families.toml: do not edit. -->\n\n# Schemes and where they run\n\n\
         Every scheme runs everywhere through the scalar reference; `yes` marks a body of its own. Where AMX has one,\n\
         it serves codebooks on the int8 grid and nine tokens or more; everything else there is the AVX-512 body.\n\n\
         | family | codes | bits per weight | scalar | AVX2 | AVX-VNNI | AVX-512 (VNNI, VBMI, VBMI2) | AMX | NEON | dotprod | i8mm | CUDA (sm_80 and later) |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n",
    );
    for family in families {
        let codes = if family.codes.is_empty() { "-".to_owned() } else { family.codes.join(", ") };
        let _ = write!(out, "| `{}`: {} | {codes} | {} |", family.name, family.what, family.rates.join(", "));
        for body in BODIES {
            let _ = write!(out, " {} |", if family.bodies.iter().any(|b| b == body) { "yes" } else { "-" });
        }
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generated_files_are_current() {
        run(true).unwrap();
    }

    #[test]
    fn bad_sources_are_refused_with_a_line() {
        assert!(parse("name = \"x\"").is_err_and(|e| e.contains(":1")));
        assert!(parse("[[family]]\nwat = \"x\"").is_err_and(|e| e.contains("wat")));
    }
}
