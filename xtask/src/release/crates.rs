//! The crates that a program is built from, as cargo tells them without a network.

use crate::{json::Json, root};
use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    process::Command,
};

/// The package of the program.
pub(crate) const PACKAGE: &str = "fracbit-cli";

/// Name and version.
pub(crate) type Key = (String, String);

/// A crate of the dependency tree.
#[derive(Clone, Debug, Default)]
pub(crate) struct Krate {
    pub(crate) name: String,
    pub(crate) version: String,
    /// SPDX expression, if the crate says one.
    pub(crate) license: Option<String>,
    pub(crate) license_file: Option<String>,
    pub(crate) authors: Vec<String>,
    pub(crate) description: Option<String>,
    pub(crate) repository: Option<String>,
    /// Where its sources are.
    pub(crate) folder: PathBuf,
    /// SHA-256 of what was downloaded; a crate of this workspace has none.
    pub(crate) checksum: Option<String>,
    /// A crate of this workspace.
    pub(crate) own: bool,
    /// Its code is in the program; others only run while it is built.
    pub(crate) linked: bool,
    /// What it depends on, within the tree.
    pub(crate) dependencies: BTreeSet<Key>,
}

/// The tree of the program on any of these targets, in order of names.
pub(crate) fn tree(targets: &[&str]) -> Result<Vec<Krate>, String> {
    let lock = root().join("Cargo.lock");
    let lock = std::fs::read_to_string(&lock).map_err(|e| format!("{}: {e}", lock.display()))?;
    let sums = checksums(&lock);
    let mut found: BTreeMap<Key, Krate> = BTreeMap::new();
    for target in targets {
        // The features that the program is built with; `cargo metadata` has those of all members.
        let tree = |edges: &str| {
            let args = ["tree", "--package", PACKAGE, "--target", target, "--edges", edges];
            cargo(&[&args[..], &["--prefix", "none", "--format", "{p}"]].concat()).map(|text| keys(&text))
        };
        let (all, linked) = (tree("normal,build")?, tree("normal,no-proc-macro")?);
        let metadata =
            Json::parse(&cargo(&["metadata", "--format-version", "1", "--filter-platform", target])?)?;
        for krate in read(&metadata, &all, &linked, &sums)? {
            let known = found.entry((krate.name.clone(), krate.version.clone())).or_default();
            let dependencies = known.dependencies.union(&krate.dependencies).cloned().collect();
            *known = Krate { linked: known.linked || krate.linked, dependencies, ..krate };
        }
    }
    Ok(found.into_values().collect())
}

fn cargo(args: &[&str]) -> Result<String, String> {
    let mut command = Command::new("cargo");
    let out = command.args(args).args(["--locked", "--offline"]).current_dir(root()).output();
    let out = out.map_err(|error| format!("could not start cargo: {error}"))?;
    if out.status.success() {
        return Ok(String::from_utf8_lossy(&out.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&out.stderr);
    Err(format!("cargo {}: {}\n(`cargo fetch --locked` gets what is missing)", args.join(" "), said.trim()))
}

/// The packages of `cargo tree`: lines such as `serde v1.0.1 (proc-macro) (*)`.
fn keys(text: &str) -> BTreeSet<Key> {
    let key = |line: &str| {
        let mut words = line.split(' ');
        Some((words.next()?.to_owned(), words.next()?.strip_prefix('v')?.to_owned()))
    };
    text.lines().filter_map(key).collect()
}

/// The checksums of `Cargo.lock`.
fn checksums(lock: &str) -> BTreeMap<Key, String> {
    let field = |package: &str, name: &str| {
        let line = package.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(" = "))?;
        Some(line.trim_matches('"').to_owned())
    };
    let entry = |package: &str| {
        Some(((field(package, "name")?, field(package, "version")?), field(package, "checksum")?))
    };
    lock.split("[[package]]").filter_map(entry).collect()
}

/// The crates `all` out of what `cargo metadata` says.
fn read(
    metadata: &Json,
    all: &BTreeSet<Key>,
    linked: &BTreeSet<Key>,
    sums: &BTreeMap<Key, String>,
) -> Result<Vec<Krate>, String> {
    let key = |package: &Json| Some((package.text("name")?.to_owned(), package.text("version")?.to_owned()));
    let packages = metadata.list("packages");
    let ids: BTreeMap<&str, Key> =
        packages.iter().filter_map(|package| Some((package.text("id")?, key(package)?))).collect();
    let mut edges: BTreeMap<&str, BTreeSet<Key>> = BTreeMap::new();
    for node in metadata.get("resolve").map_or(&[][..], |resolve| resolve.list("nodes")) {
        // Dependencies of tests are none of the program's.
        let builds = |dep: &&Json| dep.list("dep_kinds").iter().any(|kind| kind.text("kind") != Some("dev"));
        let deps = node.list("deps").iter().filter(builds);
        let deps = deps.filter_map(|dep| ids.get(dep.text("pkg")?)).filter(|key| all.contains(*key));
        edges.insert(node.text("id").unwrap_or_default(), deps.cloned().collect());
    }
    let mut found = Vec::new();
    for package in packages {
        let Some(key) = key(package).filter(|key| all.contains(key)) else { continue };
        let own = |name: &str| package.text(name).map(str::to_owned);
        let manifest = PathBuf::from(package.text("manifest_path").unwrap_or_default());
        let authors = package.list("authors").iter().filter_map(Json::as_text).map(str::to_owned);
        found.push(Krate {
            license: own("license"),
            license_file: own("license_file"),
            authors: authors.collect(),
            description: own("description"),
            repository: own("repository"),
            folder: manifest.parent().map(PathBuf::from).unwrap_or_default(),
            checksum: sums.get(&key).cloned(),
            own: package.text("source").is_none(),
            linked: linked.contains(&key),
            dependencies: edges.remove(package.text("id").unwrap_or_default()).unwrap_or_default(),
            name: key.0,
            version: key.1,
        });
    }
    match all.iter().find(|key| !found.iter().any(|k| (&k.name, &k.version) == (&key.0, &key.1))) {
        Some((name, version)) => Err(format!("`cargo metadata` does not know {name} {version}")),
        None => Ok(found),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const METADATA: &str = r#"{
        "packages": [
            {"name": "app", "version": "0.1.0", "id": "app-id", "license": "MIT", "source": null,
             "manifest_path": "/a/Cargo.toml", "authors": ["x"]},
            {"name": "dep", "version": "1.0.0", "id": "dep-id", "license": null, "license_file": "L",
             "source": "registry", "manifest_path": "/d/Cargo.toml", "authors": []},
            {"name": "tests", "version": "1.0.0", "id": "tests-id", "source": "registry", "manifest_path": "/t/Cargo.toml"}
        ],
        "resolve": {"nodes": [
            {"id": "app-id", "deps": [
                {"pkg": "dep-id", "dep_kinds": [{"kind": null}]},
                {"pkg": "tests-id", "dep_kinds": [{"kind": "dev"}]}]}
        ]}
    }"#;
    const LOCK: &str =
        "version = 4\n\n[[package]]\nname = \"dep\"\nversion = \"1.0.0\"\nchecksum = \"00ff\"\n";

    #[test]
    fn trees_are_read() {
        let all = keys("app v0.1.0 (/a)\ndep v1.0.0 (proc-macro)\ndep v1.0.0 (proc-macro) (*)\n\n");
        let metadata = Json::parse(METADATA).expect("JSON");
        let linked = keys("app v0.1.0 (/a)");
        let found = read(&metadata, &all, &linked, &checksums(LOCK)).expect("a tree");
        let [app, dep] = found.as_slice() else { panic!("{found:?}") };
        assert!(app.own && app.linked && app.checksum.is_none() && app.dependencies.len() == 1);
        assert!(!dep.own && !dep.linked && dep.checksum.as_deref() == Some("00ff"));
        assert_eq!((dep.license_file.as_deref(), dep.folder.to_str()), (Some("L"), Some("/d")));
        let more = keys("other v1.0.0");
        assert!(read(&metadata, &more, &linked, &checksums(LOCK)).is_err_and(|e| e.contains("other")));
    }
}
