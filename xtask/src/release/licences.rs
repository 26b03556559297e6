//! The licences of what others wrote and the program contains.

use super::{crates::Krate, sbom::expression};
use std::{collections::BTreeMap, fmt::Write as _, fs, path::Path};

/// Names that files of licences begin with, in lower case.
const NAMES: [&str; 6] = ["licen", "copying", "copyright", "notice", "unlicen", "patents"];

/// Files that begin so, and are programs.
const CODE: [&str; 3] = [".rs", ".py", ".toml"];

/// The texts of a crate by the names of their files.
type Texts = Vec<(String, String)>;

/// The page of all crates but our own: a table, then every text once.
pub(crate) fn page(crates: &[Krate], rust: &str) -> Result<String, String> {
    let mut found = Vec::new();
    for krate in crates.iter().filter(|krate| !krate.own) {
        found.push((krate, texts(krate)?));
    }
    Ok(written(&found, rust))
}

/// The files of a crate's own folder that hold licences.
fn texts(krate: &Krate) -> Result<Texts, String> {
    let failed = |path: &Path, error: std::io::Error| format!("{}: {error}", path.display());
    let mut names = Vec::new();
    for entry in fs::read_dir(&krate.folder).map_err(|e| failed(&krate.folder, e))?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let low = name.to_lowercase();
        let code = CODE.iter().any(|end| low.ends_with(end));
        if entry.path().is_file() && !code && NAMES.iter().any(|start| low.starts_with(start)) {
            names.push(name);
        }
    }
    names.extend(krate.license_file.clone());
    names.sort();
    names.dedup();
    let read = |name: String| {
        let path = krate.folder.join(&name);
        let bytes = fs::read(&path).map_err(|e| failed(&path, e))?;
        Ok((name, String::from_utf8_lossy(&bytes).into_owned()))
    };
    names.into_iter().map(read).collect()
}

fn written(found: &[(&Krate, Texts)], rust: &str) -> String {
    let mut out = String::from(
        "Licences of what fracbit contains and others wrote\n\n\
         fracbit itself is under MIT or Apache-2.0. The crates below are compiled into it or, where it says\n\
         so, only run while it is built. Where a crate offers several licences, each may be chosen. Texts\n\
         that several crates share are printed once.\n\n",
    );
    let line = |out: &mut String, text: &str| writeln!(out, "{text}").expect("a String takes all");
    line(&mut out, &format!("The Rust standard library ({rust}): MIT OR Apache-2.0\n"));
    // The same words, whatever their lines end with and their edges are.
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut groups: BTreeMap<String, (&str, Vec<String>)> = BTreeMap::new();
    for (krate, texts) in found {
        let name = format!("{} {}", krate.name, krate.version);
        let built = if krate.linked { "" } else { " (while building)" };
        let license = krate.license.as_deref().map_or("see its text".to_owned(), expression);
        line(&mut out, &format!("{name}: {license}{built}"));
        if texts.is_empty() {
            let by = if krate.authors.is_empty() { "its authors" } else { &krate.authors.join(", ") };
            line(&mut out, &format!("    by {by}; the crate brings no text"));
        }
        for (file, text) in texts {
            groups.entry(words(text)).or_insert((text, Vec::new())).1.push(format!("{name} ({file})"));
        }
    }
    let mut groups: Vec<_> = groups.into_values().collect();
    groups.sort_by(|a, b| a.1.cmp(&b.1));
    for (text, users) in groups {
        line(&mut out, &format!("\n{}\n{}\n", "-".repeat(100), users.join(", ")));
        text.trim_matches(['\r', '\n', ' ']).lines().for_each(|text| line(&mut out, text.trim_end()));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_of_several_crates_is_printed_once() {
        let krate = |name: &str, license: Option<&str>| Krate {
            name: name.to_owned(),
            version: "1.0.0".to_owned(),
            license: license.map(str::to_owned),
            authors: vec!["somebody".to_owned()],
            linked: name != "c",
            ..Krate::default()
        };
        let (a, b, c) = (krate("a", Some("MIT")), krate("b", None), krate("c", Some("MIT/Zlib")));
        let text = |text: &str| vec![("LICENSE".to_owned(), text.to_owned())];
        let found = [(&a, text("free  as\r\nair\r\n")), (&b, text("\nfree as\nair")), (&c, Vec::new())];
        let page = written(&found, "rustc 1");
        assert_eq!(page.matches("free").count(), 1, "{page}");
        for part in [
            "\na 1.0.0: MIT\n",
            "\nb 1.0.0: see its text\n",
            "\nc 1.0.0: MIT OR Zlib (while building)\n    by somebody; the crate brings no text\n",
            "\na 1.0.0 (LICENSE), b 1.0.0 (LICENSE)\n\nfree  as\nair\n",
            "rustc 1",
        ] {
            assert!(page.contains(part), "{part}: {page}");
        }
        assert!(!page.contains('\r'));
    }
}
