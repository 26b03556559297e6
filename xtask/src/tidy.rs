//! House rules that no compiler checks.

use crate::{Failure, Outcome, circles, packages, root};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

/// Lines of a hand-written file above which it should be split by subject.
const MAX_LINES: usize = 800;

/// Layers of the crates: dependencies point to the same layer or down, and backends never see each
/// other.
const LAYERS: [(&str, u8); 26] = [
    ("fracbit-base", 0),
    ("fracbit-chart", 0),
    ("fracbit-format", 0),
    ("fracbit-codebook", 1),
    ("fracbit-trellis", 1),
    ("fracbit-rotation", 1),
    ("fracbit-alloc", 1),
    ("fracbit-schedule", 1),
    ("fracbit-quant", 2),
    ("fracbit-kernels", 2),
    ("fracbit-kernels-x86", 3),
    ("fracbit-kernels-cuda", 3),
    ("fracbit-kernels-neon", 3),
    ("fracbit-io", 3),
    ("fracbit-model", 4),
    ("fracbit-model-cuda", 4),
    ("fracbit-engine", 5),
    ("fracbit-grammar", 5),
    ("fracbit-plan", 5),
    ("fracbit-load", 5),
    ("fracbit-pipeline", 5),
    ("fracbit", 5),
    ("fracbit-bench", 5),
    ("fracbit-server", 5),
    ("fracbit-cli", 6),
    ("fracbit-python", 7),
];

/// Crates that must not appear among the dependencies of another, whatever the layers say.
const NEVER: [(&str, &str); 4] = [
    ("fracbit-alloc", "fracbit-format"),
    ("fracbit-kernels", "fracbit-trellis"),
    ("fracbit-rotation", "fracbit-base"),
    ("fracbit-io", "fracbit-format"),
];

/// Crates that implement families of schemes, and may ask which one a scheme is; everybody else
/// asks its `SchemeSpec`. `fracbit-io` knows no schemes: its families are of tokenizers and models.
const FAMILIES: [&str; 8] = [
    "fracbit-io",
    "fracbit-base",
    "fracbit-format",
    "fracbit-codebook",
    "fracbit-trellis",
    "fracbit-kernels-x86",
    "fracbit-kernels-neon",
    "fracbit-kernels-cuda",
];

/// Whether a library file asks for the family of a scheme, in a crate that implements none.
fn asks_for_family(name: &str, text: &str) -> bool {
    let mut parts = name.split('/');
    let (Some("crates"), Some(krate), Some("src")) = (parts.next(), parts.next(), parts.next()) else {
        return false;
    };
    let asks = |line: &str| line.contains("Family::") || line.contains(".family()");
    !FAMILIES.contains(&krate) && text.lines().any(asks)
}

/// Columns of a comment, beyond which it is hard to read beside code.
const MAX_COMMENT: usize = 100;

/// Numbers of the lines whose comment is too wide. Tables and what stands in fences of
/// documentation have their own width.
fn wide_comments(text: &str) -> Vec<usize> {
    let mut fenced = false;
    let wide = text.lines().enumerate().filter(|(_, line)| {
        let Some(comment) = line.trim_start().strip_prefix("//") else {
            fenced = false;
            return false;
        };
        let comment = comment.trim_start_matches(['/', '!']).trim_start();
        fenced ^= comment.starts_with("```");
        !fenced && !comment.starts_with('|') && line.chars().count() > MAX_COMMENT
    });
    wide.map(|(i, _)| i + 1).collect()
}

/// Checks every rule and reports all breaches at once.
pub(crate) fn run() -> Outcome {
    let mut breaches = Vec::new();
    layering(&mut breaches)?;
    circles::check(&mut breaches)?;
    packages::check(&mut breaches)?;
    for path in files()? {
        let Ok(text) = fs::read_to_string(&path) else { continue };
        let name = path.strip_prefix(root()).unwrap_or(&path).display().to_string();
        let lines = text.lines().count();
        if name.ends_with(".rs") && lines > MAX_LINES {
            breaches.push(format!("{name}: {lines} lines, split it by subject (limit {MAX_LINES})"));
        }
        if name.ends_with(".rs") {
            for line in wide_comments(&text) {
                breaches.push(format!("{name}:{line}: a comment beyond {MAX_COMMENT} columns"));
            }
        }
        if asks_for_family(&name, &text) {
            breaches.push(format!("{name}: asks for a scheme's family; ask its `SchemeSpec` instead"));
        }
        // Assembled so that this file does not trip over itself.
        for word in [concat!("/wor", "k/"), concat!("TO", "DO"), concat!("FIX", "ME")] {
            if text.contains(word) {
                breaches.push(format!("{name}: mentions `{word}`"));
            }
        }
    }
    for (krate, _) in LAYERS {
        for file in ["README.md", "Cargo.toml"] {
            if !root().join("crates").join(krate).join(file).exists() {
                breaches.push(format!("crates/{krate}: has no {file}"));
            }
        }
    }
    if breaches.is_empty() {
        println!("tidy: {} crates, all rules hold", LAYERS.len());
        Ok(())
    } else {
        Err(format!("tidy:\n  {}", breaches.join("\n  ")))
    }
}

fn layering(breaches: &mut Vec<String>) -> Outcome {
    let layers = BTreeMap::from(LAYERS);
    for (krate, layer) in LAYERS {
        let path = root().join("crates").join(krate).join("Cargo.toml");
        let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let mut section = "";
        for line in text.lines() {
            if line.starts_with('[') {
                section = line;
            }
            // Tests and examples may look up the stack; the library may not.
            if section.contains("dev-dependencies") {
                continue;
            }
            let dependency = line.split(['.', ' ', '=']).next().unwrap_or_default();
            if let Some(&below) = layers.get(dependency)
                && below > layer
            {
                breaches
                    .push(format!("crates/{krate} (layer {layer}) depends on {dependency} (layer {below})"));
            }
            if NEVER.contains(&(krate, dependency)) {
                breaches
                    .push(format!("crates/{krate} must not depend on {dependency} (docs/architecture.md)"));
            }
        }
    }
    let known: Vec<&str> = LAYERS.iter().map(|(name, _)| *name).collect();
    for entry in fs::read_dir(root().join("crates")).map_err(|error| error.to_string())?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if !known.contains(&name.as_str()) {
            breaches.push(format!("crates/{name}: give it a layer in xtask/src/tidy.rs"));
        }
    }
    Ok(())
}

/// Text files of the project, build products aside.
fn files() -> Result<Vec<PathBuf>, Failure> {
    fn walk(folder: &Path, found: &mut Vec<PathBuf>) -> std::io::Result<()> {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if path.is_dir() {
                if !name.starts_with("target")
                    && !name.starts_with(".git")
                    && !name.starts_with(".venv")
                    && name != "out"
                {
                    walk(&path, found)?;
                }
            } else if [".rs", ".md", ".toml", ".py", ".cuh", ".cu", ".hpp", ".cpp"]
                .iter()
                .any(|end| name.ends_with(end))
            {
                found.push(path);
            }
        }
        Ok(())
    }
    let mut found = Vec::new();
    walk(&root(), &mut found).map_err(|error| error.to_string())?;
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::{asks_for_family, wide_comments};

    #[test]
    fn comments_end_before_they_are_too_wide() {
        let long = "x".repeat(98);
        let text = format!(
            "// {long}\n/// |{long}\n//! ```\n//! {long}\n//! ```\n    /// {long}\nlet a = \"{long}\";\n"
        );
        assert_eq!(wide_comments(&text), [1, 6]);
        assert_eq!(wide_comments(&format!("// {}", "é".repeat(97))), [0usize; 0]);
    }

    #[test]
    fn families_are_for_those_who_implement_them() {
        for text in ["match scheme.family() {", "if f == Family::Vq {"] {
            assert!(asks_for_family("crates/fracbit/src/plan.rs", text), "{text}");
            assert!(!asks_for_family("crates/fracbit-trellis/src/train.rs", text), "{text}");
            assert!(!asks_for_family("crates/fracbit/tests/plan.rs", text), "tests may");
            assert!(!asks_for_family("xtask/src/tidy.rs", text), "{text}");
        }
        assert!(!asks_for_family("crates/fracbit/src/plan.rs", "scheme.family_name()"));
    }
}
