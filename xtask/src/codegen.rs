//! Generated files: their source of truth is `kernels/families.toml`.

use crate::{Failure, Outcome, root};
use std::{fmt::Write as _, fs};

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
    let path = root().join("docs/support.md");
    let want = support(&families);
    if check {
        if fs::read_to_string(&path).unwrap_or_default() != want {
            return Err("docs/support.md is not current: run `cargo xtask codegen`".to_owned());
        }
        println!("codegen: docs/support.md is current");
        return Ok(());
    }
    fs::write(&path, want).map_err(|error| format!("{}: {error}", path.display()))
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
    const BODIES: [&str; 3] = ["scalar", "avx2", "avx512"];
    let mut out = String::from(
        "<!-- Written by `cargo xtask codegen` from kernels/families.toml: do not edit. -->\n\n# Schemes and where they run\n\n\
         Every scheme runs everywhere through the scalar reference; `yes` marks a body of its own.\n\n\
         | family | codes | bits per weight | scalar | AVX2 | AVX-512 (VNNI, VBMI, VBMI2) |\n| --- | --- | --- | --- | --- | --- |\n",
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
