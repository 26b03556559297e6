//! What it takes to publish the crates, in order: whole descriptions, and every file that a build
//! reads within its own package.

use crate::{Failure, json::Json, root};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Component, Path, PathBuf},
    process::Command,
};

/// Categories of crates.io that suit; it knows no others of these names.
const CATEGORIES: [&str; 14] = [
    "algorithms",
    "command-line-utilities",
    "compression",
    "concurrency",
    "data-structures",
    "development-tools::profiling",
    "encoding",
    "hardware-support",
    "mathematics",
    "parser-implementations",
    "science",
    "text-processing",
    "visualization",
    "web-programming::http-server",
];

/// What includes another file, up to its name.
const INCLUDES: [&str; 4] = ["include_str!(", "include_bytes!(", "include!(", "#[path ="];

/// Adds what keeps a crate from being published.
pub(crate) fn check(breaches: &mut Vec<String>) -> Result<(), Failure> {
    let metadata = metadata()?;
    let published: Vec<&Json> = metadata.list("packages").iter().filter(|p| is_published(p)).collect();
    for package in &published {
        let name = package.text("name").unwrap_or("?");
        breaches.extend(described(package).into_iter().map(|rule| format!("crates/{name}: {rule}")));
        let folder = root().join("crates").join(name);
        outside(&folder, &folder, breaches)?;
    }
    breaches.extend(order(&published).err());
    breaches.extend(toolchain()?);
    Ok(())
}

fn metadata() -> Result<Json, Failure> {
    let mut command = Command::new("cargo");
    command.args(["metadata", "--format-version", "1", "--no-deps", "--offline"]).current_dir(root());
    let out = command.output().map_err(|error| format!("could not start cargo: {error}"))?;
    if !out.status.success() {
        return Err(format!("cargo metadata: {}", String::from_utf8_lossy(&out.stderr).trim()));
    }
    Json::parse(&String::from_utf8_lossy(&out.stdout))
}

/// `publish = false` is an empty list of registries.
fn is_published(package: &Json) -> bool {
    !matches!(package.get("publish"), Some(Json::List(registries)) if registries.is_empty())
}

/// What is missing of a package's description.
fn described(package: &Json) -> Vec<String> {
    let mut missing = Vec::new();
    for field in ["description", "license", "repository", "readme"] {
        if package.text(field).is_none_or(str::is_empty) {
            missing.push(format!("its Cargo.toml should have `{field}`"));
        }
    }
    let words = |field: &str| package.list(field).iter().filter_map(Json::as_text).collect::<Vec<_>>();
    let plain = |word: &&str| {
        let rest = word.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-+".contains(&b));
        word.len() <= 20 && rest && word.starts_with(|c: char| c.is_ascii_alphanumeric())
    };
    let keywords = words("keywords");
    if keywords.is_empty() || keywords.len() > 5 || !keywords.iter().all(plain) {
        missing
            .push("it should have one to five `keywords` of at most 20 letters, digits and `_-+`".to_owned());
    }
    let categories = words("categories");
    if categories.is_empty() || categories.len() > 5 || !categories.iter().all(|c| CATEGORIES.contains(c)) {
        missing.push("it should have one to five `categories` of those in xtask/src/packages.rs".to_owned());
    }
    for dependency in package.list("dependencies") {
        let name = dependency.text("name").unwrap_or("?");
        if dependency.text("req") == Some("*") {
            missing.push(format!("`{name}` should have a version, beside its path"));
        }
    }
    missing
}

/// The crates in an order in which each comes after those that it needs, tests included: a registry
/// wants them first.
fn order<'a>(packages: &[&'a Json]) -> Result<Vec<&'a str>, String> {
    let name = |package: &'a Json| package.text("name").unwrap_or("?");
    let all: BTreeSet<&str> = packages.iter().map(|package| name(package)).collect();
    let mut waiting: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for package in packages {
        let on = package.list("dependencies").iter().filter_map(|dependency| dependency.text("name"));
        waiting.insert(name(package), on.filter(|on| all.contains(on)).collect());
    }
    let mut order = Vec::new();
    while !waiting.is_empty() {
        let ready: Vec<&str> =
            waiting.iter().filter(|(_, on)| on.is_empty()).map(|(name, _)| *name).collect();
        if ready.is_empty() {
            let names: Vec<&str> = waiting.into_keys().collect();
            return Err(format!(
                "crates that depend on each other cannot be published: {}",
                names.join(", ")
            ));
        }
        for name in ready {
            waiting.remove(name);
            waiting.values_mut().for_each(|on| _ = on.remove(name));
            order.push(name);
        }
    }
    Ok(order)
}

/// Adds the files of a package that include one outside of it. Tests may: who depends on the
/// package does not build them.
fn outside(folder: &Path, package: &Path, breaches: &mut Vec<String>) -> Result<(), Failure> {
    let failed = |path: &Path, error: std::io::Error| format!("{}: {error}", path.display());
    let entries = fs::read_dir(folder).map_err(|error| failed(folder, error))?;
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    for path in paths {
        if path.is_dir() {
            if path != package.join("tests") {
                outside(&path, package, breaches)?;
            }
        } else if path.extension().is_some_and(|end| end == "rs") {
            let text = fs::read_to_string(&path).map_err(|error| failed(&path, error))?;
            let here = path.parent().unwrap_or(package);
            for name in included(&text) {
                let file = resolved(&here.join(name));
                let shown = path.strip_prefix(root()).unwrap_or(&path).display().to_string();
                if !file.starts_with(package) {
                    breaches.push(format!("{shown}: `{name}` is not in its package"));
                } else if !file.exists() {
                    breaches.push(format!("{shown}: `{name}` is not there"));
                }
            }
        }
    }
    Ok(())
}

/// The names of files that a source includes. Names that are put together are none.
fn included(text: &str) -> Vec<&str> {
    let mut names = Vec::new();
    for line in text.lines().filter(|line| !line.trim_start().starts_with("//")) {
        for start in INCLUDES {
            for rest in line.split(start).skip(1) {
                let name = rest.trim_start().strip_prefix('"').and_then(|rest| rest.split('"').next());
                names.extend(name);
            }
        }
    }
    names
}

/// A path without `..`, as it is written.
fn resolved(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for part in path.components() {
        if part == Component::ParentDir {
            out.pop();
        } else {
            out.push(part);
        }
    }
    out
}

/// The oldest Rust that the crates claim to build with is the one that the checks run with.
fn toolchain() -> Result<Option<String>, Failure> {
    let field = |file: &str, name: &str| {
        let text = fs::read_to_string(root().join(file)).map_err(|error| format!("{file}: {error}"))?;
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.trim_start().strip_prefix('='));
        Ok::<_, Failure>(line.map(|value| value.trim().trim_matches('"').to_owned()).unwrap_or_default())
    };
    let claimed = field("Cargo.toml", "rust-version")?;
    let used = field("rust-toolchain.toml", "channel")?;
    let same = !claimed.is_empty() && (used == claimed || used.starts_with(&format!("{claimed}.")));
    Ok((!same).then(|| {
        format!("Cargo.toml: rust-version {claimed} is not tried: the checks run with {used} (rust-toolchain.toml)")
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(text: &str) -> Json {
        Json::parse(text).expect("JSON")
    }

    #[test]
    fn descriptions_are_whole() {
        let whole = r#"{"description": "d", "license": "MIT", "repository": "r", "readme": "README.md",
            "keywords": ["llm"], "categories": ["science"], "dependencies": [{"name": "a", "req": "^1"}]}"#;
        assert_eq!(described(&package(whole)), Vec::<String>::new());
        for (from, to, word) in [
            ("\"d\"", "null", "description"),
            ("\"README.md\"", "null", "readme"),
            ("\"llm\"", "", "keywords"),
            ("\"llm\"", "\"a keyword\"", "keywords"),
            ("\"llm\"", "\"twenty-one-characters\"", "keywords"),
            ("science", "llm", "categories"),
            ("^1", "*", "`a`"),
        ] {
            let found = described(&package(&whole.replacen(from, to, 1)));
            assert!(found.len() == 1 && found[0].contains(word), "{to}: {found:?}");
        }
    }

    #[test]
    fn crates_have_an_order() {
        let crates = [
            package(r#"{"name": "a", "dependencies": [{"name": "b"}, {"name": "serde"}]}"#),
            package(r#"{"name": "b", "dependencies": [{"name": "c", "kind": "dev"}]}"#),
            package(r#"{"name": "c", "dependencies": []}"#),
        ];
        let all: Vec<&Json> = crates.iter().collect();
        assert_eq!(order(&all), Ok(vec!["c", "b", "a"]));
        let circle = package(r#"{"name": "c", "dependencies": [{"name": "a"}]}"#);
        assert!(order(&[&crates[0], &crates[1], &circle]).is_err());
        assert!(
            is_published(&package(r#"{"publish": null}"#)) && !is_published(&package(r#"{"publish": []}"#))
        );
    }

    #[test]
    fn included_files_are_found() {
        let text = concat!(
            "#![doc = include_",
            "str!(\"../README.md\")]\n#[pa",
            "th = \"../x.rs\"]\nmod x;\n",
            "// include_",
            "str!(\"no\")\ninclude",
            "!(concat!(\"no\"));\n",
            "[include_",
            "bytes!(\"a\"), include_",
            "bytes!( \"b\")]"
        );
        assert_eq!(included(text), ["../README.md", "../x.rs", "a", "b"]);
        assert_eq!(resolved(Path::new("/p/src/../../q/./a")), Path::new("/q/a"));
    }
}
