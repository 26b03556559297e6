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
    /// By code, where it has not the rates of the family.
    own_rates: BTreeMap<String, Vec<String>>,
    microkernels: Vec<String>,
}

impl Family {
    /// Rates of a code.
    fn rates_of(&self, code: &str) -> &[String] {
        self.own_rates.get(code).unwrap_or(&self.rates)
    }
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

/// The units of CUDA instances: one for pairs and scalars, one for group-wise and progressive
/// schemes, one for each trellis code, one for each half-trellis code, one for additive codebooks,
/// one for nested scalar codes.
pub(crate) const CUDA_UNITS: [&str; 10] =
    ["pair", "grouped", "fine", "fast", "hyb", "half_fine", "half_fast", "half_hyb", "additive", "nest"];

/// The instances of every family, by unit: (`kernels/cuda/gen/UNIT.inc`, text). An instance is
/// numbered by its rate in quarters of a bit per weight, of a half-trellis the lower.
fn cuda_units(families: &[Family]) -> Result<Vec<(String, String)>, Failure> {
    let mut bodies: BTreeMap<String, BTreeSet<(u32, String)>> = BTreeMap::new();
    let mut add = |unit: &str, q: u32, line: String| {
        bodies.entry(unit.to_owned()).or_default().insert((q, line));
    };
    for family in families.iter().filter(|f| f.microkernels.iter().any(|b| b == "cuda")) {
        if family.name == "aq" {
            // Codes of four bits share the kernels of the bytes that they are halves of.
            for books in family.rates.iter().filter(|books| !books.contains('b')) {
                let body = books.to_uppercase();
                add("additive", 0, format!("FB_GEMV(gemv_aq_{books}, {body}, {body})"));
                add("additive", 0, format!("FB_DEQUANT(dequant_aq_{books}, {body})"));
                // By bits of a partial sum and tokens side by side.
                for (bits, tokens) in [(16, 1), (16, 4), (32, 1), (32, 2)] {
                    let name = format!("psums_aq_{books}_{bits}_{tokens}");
                    add("additive", 0, format!("FB_PSUMS({name}, {body}, int{bits}_t, {tokens})"));
                }
            }
            continue;
        }
        if family.name == "nest-nuq" {
            // The coarsest codes alone run the kernels of scalar codes.
            for (low, bits) in family.rates.iter().filter_map(|rate| rate.split_once("..")) {
                if low != bits {
                    let q = quarters(bits)?;
                    add("nest", q, format!("FB_GEMV_NEST(gemv_nest_{low}_{bits}, {low}, {bits})"));
                    add("nest", q, format!("FB_DEQUANT_NEST(dequant_nest_{low}_{bits}, {low}, {bits})"));
                }
            }
            continue;
        }
        if family.name == "qoq" {
            add("grouped", 16, "FB_GEMV(gemv_levels_16, Levels<16>, Levels<16>)".to_owned());
            add("grouped", 16, "FB_DEQUANT(dequant_levels_16, Levels<16>)".to_owned());
            continue;
        }
        if family.name == "nest-tcq" {
            // Planes are matrices of trellis codes.
            continue;
        }
        for rate in if family.codes.is_empty() { family.rates.as_slice() } else { &[] } {
            let q = quarters(rate)?;
            // Two scalar codes side by side are a vector code whose table is the product of theirs.
            let (unit, body) = match family.name.as_str() {
                "int" | "gnuq" if q == 32 => ("grouped", "Bytes"),
                "int" => ("grouped", "Ints"),
                "gnuq" => ("grouped", "Books"),
                _ if q <= 28 => ("pair", "Pair"),
                _ => ("pair", "Single"),
            };
            let name = body.to_lowercase();
            add(unit, q, format!("FB_GEMV(gemv_{name}_{q}, {body}<{q}>, {body}<{q}>)"));
            add(unit, q, format!("FB_DEQUANT(dequant_{name}_{q}, {body}<{q}>)"));
        }
        for code in &family.codes {
            let body = code[..1].to_uppercase() + &code[1..];
            for rate in family.rates_of(code) {
                let q = quarters(rate)?;
                if family.name == "half-tcq" {
                    let (low, high) = (q - 1, q + 1);
                    let line = format!("FB_GEMV(gemv_half_{code}_{low}, {body}<{low}>, {body}<{high}>)");
                    add(&format!("half_{code}"), low, line);
                } else {
                    add(code, q, format!("FB_GEMV(gemv_{code}_{q}, {body}<{q}>, {body}<{q}>)"));
                    add(code, q, format!("FB_DEQUANT(dequant_{code}_{q}, {body}<{q}>)"));
                }
            }
        }
    }
    if !bodies.keys().map(String::as_str).eq(BTreeSet::from(CUDA_UNITS)) {
        return Err(format!("CUDA units: expected {CUDA_UNITS:?}, got {:?}", bodies.keys()));
    }
    let header = |unit: &str| {
        let source = if unit == "additive" { "psumbook" } else { "expand" };
        format!(
            "// Written by `cargo xtask codegen` from kernels/families.toml: do not edit.\n#include \"{source}.cuh\"\n"
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

/// Quarters of a bit per weight of a rate such as `2.25`.
fn quarters(rate: &str) -> Result<u32, Failure> {
    let bits: f64 = rate.parse().map_err(|_| format!("rate `{rate}` is no number"))?;
    (1..=32)
        .find(|&q| f64::from(q) == 4.0 * bits)
        .ok_or_else(|| format!("rate `{rate}` is no multiple of a quarter of a bit up to 8"))
}

/// Reads the small part of TOML that the file uses: `[[family]]` tables of strings and lists of
/// strings.
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
            "microkernels" => family.microkernels = strings,
            key if key.strip_prefix("rates_").is_some_and(|code| family.codes.iter().any(|c| c == code)) => {
                family.own_rates.insert(key["rates_".len()..].to_owned(), strings);
            }
            other => return Err(format!("{at}: unknown key `{other}`")),
        }
    }
    Ok(families)
}

fn support(families: &[Family]) -> String {
    const MICROKERNELS: [&str; 9] =
        ["scalar", "avx2", "avxvnni", "avx512", "amx", "neon", "dotprod", "i8mm", "cuda"];
    let mut out = String::from(
        "<!-- Written by `cargo xtask codegen` from kernels/families.toml: do not edit. -->\n\n# Schemes and where they run\n\n\
         Every scheme runs everywhere through the scalar reference; `yes` marks a microkernel of its own. Where AMX has one,\n\
         it serves codebooks on the int8 grid and five tokens or more; everything else there is the AVX-512 microkernel.\n\n\
         | family | codes | bits per weight | scalar | AVX2 | AVX-VNNI | AVX-512 (VNNI, VBMI, VBMI2) | AMX | NEON | dotprod | i8mm | CUDA (sm_80 and later) |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n",
    );
    for family in families {
        let codes = if family.codes.is_empty() { "-".to_owned() } else { family.codes.join(", ") };
        let mut rates = family.rates.join(", ");
        for (code, own) in &family.own_rates {
            let _ = write!(rates, "; {code}: {}", own.join(", "));
        }
        let _ = write!(out, "| `{}`: {} | {codes} | {rates} |", family.name, family.what);
        for isa in MICROKERNELS {
            let _ = write!(
                out,
                " {} |",
                if family.microkernels.iter().any(|name| name == isa) { "yes" } else { "-" }
            );
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
        let other = "[[family]]\ncodes = [\"fine\"]\nrates_fast = [\"1\"]";
        assert!(parse(other).is_err_and(|e| e.contains(":3") && e.contains("rates_fast")));
    }

    #[test]
    fn a_code_has_the_rates_of_its_family_or_its_own() {
        let text = "[[family]]\nrates = [\"1\", \"1.25\"]\ncodes = [\"fine\", \"hyb\"]\nrates_hyb = [\"1\"]";
        let family = &parse(text).unwrap()[0];
        assert_eq!((family.rates_of("fine").len(), family.rates_of("hyb").len()), (2, 1));
        assert_eq!(quarters("1.25"), Ok(5));
        assert!(quarters("1.1").is_err_and(|e| e.contains("1.1")));
    }
}
