//! Circles of modules: in the crates named here the modules at the top must form layers, so that
//! each can be understood, and moved, with those below it alone.
//!
//! Imports are read as text: paths that begin with `crate::`, and names that the root of the crate
//! hands on from a module.

use crate::{Failure, root};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

/// Crates without circles.
const LAYERED: [&str; 12] = [
    "fracbit",
    "fracbit-alloc",
    "fracbit-base",
    "fracbit-bench",
    "fracbit-codebook",
    "fracbit-engine",
    "fracbit-kernels-x86",
    "fracbit-load",
    "fracbit-model-cuda",
    "fracbit-pipeline",
    "fracbit-plan",
    "fracbit-schedule",
];

/// Modules, each with those that it imports from.
type Graph = BTreeMap<String, BTreeSet<String>>;

/// Adds the circle of each crate that has one.
pub(crate) fn check(breaches: &mut Vec<String>) -> Result<(), Failure> {
    for krate in LAYERED {
        let graph = graph(&sources(&root().join("crates").join(krate).join("src"))?);
        if let Some(circle) = circle(&graph) {
            breaches.push(format!("crates/{krate}: a circle of modules: {}", circle.join(" -> ")));
        }
    }
    Ok(())
}

/// Top module and text of every file below `dir`; the root of the crate has the name "".
fn sources(dir: &Path) -> Result<Vec<(String, String)>, Failure> {
    let mut found = Vec::new();
    let mut folders: Vec<(PathBuf, Option<String>)> = vec![(dir.to_owned(), None)];
    while let Some((folder, of)) = folders.pop() {
        for entry in fs::read_dir(&folder).map_err(|e| format!("{}: {e}", folder.display()))? {
            let path = entry.map_err(|e| format!("{}: {e}", folder.display()))?.path();
            let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let module = of.clone().unwrap_or_else(|| stem.clone());
            if path.is_dir() {
                folders.push((path, Some(module)));
            } else if path.extension().is_some_and(|e| e == "rs") && stem != "tests" {
                let text = fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
                let is_root = of.is_none() && matches!(stem.as_str(), "lib" | "main");
                found.push((if is_root { String::new() } else { module }, text));
            }
        }
    }
    Ok(found)
}

/// Who imports from whom.
fn graph(sources: &[(String, String)]) -> Graph {
    let mut graph: Graph = sources
        .iter()
        .filter(|(name, _)| !name.is_empty())
        .map(|(name, _)| (name.clone(), BTreeSet::new()))
        .collect();
    // Names that the root hands on, and from where.
    let mut homes: BTreeMap<String, String> = BTreeMap::new();
    for (_, text) in sources.iter().filter(|(name, _)| name.is_empty()) {
        for statement in code(text).split(';') {
            let Some((_, path)) = statement.split_once("pub use ") else { continue };
            for leaf in leaves(path) {
                let (module, name) = (leaf.first(), leaf.last());
                if let (Some(module), Some(name)) = (module, name)
                    && graph.contains_key(module)
                {
                    homes.insert(name.clone(), module.clone());
                }
            }
        }
    }
    for (name, text) in sources.iter().filter(|(name, _)| !name.is_empty()) {
        let text = code(text);
        for (at, _) in text.match_indices("crate::") {
            for leaf in leaves(&text[at + "crate::".len()..]) {
                // A name alone is that of a function or type where the root hands one on.
                let module = match leaf.as_slice() {
                    [one] => homes.get(one).or_else(|| graph.contains_key(one).then_some(one)),
                    [first, ..] => graph.contains_key(first).then_some(first).or_else(|| homes.get(first)),
                    [] => None,
                };
                if let Some(module) = module.filter(|m| *m != name).cloned() {
                    graph.entry(name.clone()).or_default().insert(module);
                }
            }
        }
    }
    graph
}

/// What is compiled into the library: without comments, and without the tests at the end.
fn code(text: &str) -> String {
    let end = text.find("#[cfg(test)]\nmod").unwrap_or(text.len());
    let lines = text[..end].lines().map(|line| line.split("//").next().unwrap_or(""));
    lines.collect::<Vec<_>>().join("\n")
}

/// The paths that `text` begins with: one, or all of a tree `a::{b, c::{d, e}}`, as their names.
fn leaves(text: &str) -> Vec<Vec<String>> {
    let (mut found, mut open, mut path) = (Vec::new(), Vec::new(), Vec::new());
    let mut rest = text.trim_start();
    loop {
        let end = rest.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(rest.len());
        if end > 0 {
            path.push(rest[..end].to_owned());
        }
        rest = rest[end..].trim_start();
        if let Some(more) = rest.strip_prefix("::") {
            rest = more.trim_start();
            if let Some(more) = rest.strip_prefix('{') {
                open.push(path.len());
                rest = more.trim_start();
            }
            continue;
        }
        if let Some(more) = rest.strip_prefix('{').filter(|_| path.is_empty() && open.is_empty()) {
            open.push(0);
            rest = more.trim_start();
            continue;
        }
        let Some(&depth) = open.last() else {
            found.extend((!path.is_empty()).then_some(path));
            return found;
        };
        // `self` is the path so far; a path of a tree ends at a comma or a brace.
        if path.last().is_some_and(|name| name == "self") {
            path.pop();
        }
        if path.len() > depth || (end > 0 && !path.is_empty()) {
            found.push(path.clone());
        }
        path.truncate(depth);
        if let Some(more) = rest.strip_prefix(',') {
            rest = more.trim_start();
        } else if let Some(more) = rest.strip_prefix('}') {
            open.pop();
            rest = more.trim_start();
            path.truncate(open.last().copied().unwrap_or(0));
            if open.is_empty() {
                return found;
            }
        } else {
            return found;
        }
    }
}

/// A way from a module back to itself, if there is one.
fn circle(graph: &Graph) -> Option<Vec<String>> {
    /// Follows `path` to modules that are not `done`.
    fn follow(graph: &Graph, path: &mut Vec<String>, done: &mut BTreeSet<String>) -> Option<Vec<String>> {
        let last = path.last()?.clone();
        for next in &graph[&last] {
            if let Some(from) = path.iter().position(|name| name == next) {
                let mut circle = path[from..].to_vec();
                circle.push(next.clone());
                return Some(circle);
            }
            if !done.contains(next) {
                path.push(next.clone());
                let found = follow(graph, path, done);
                path.pop();
                if found.is_some() {
                    return found;
                }
            }
        }
        done.insert(last);
        None
    }
    let mut done = BTreeSet::new();
    graph.keys().find_map(|start| follow(graph, &mut vec![start.clone()], &mut done))
}

#[cfg(test)]
mod tests {
    use super::{circle, graph, leaves};

    fn of(files: &[(&str, &str)]) -> Option<Vec<String>> {
        let files: Vec<(String, String)> =
            files.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect();
        circle(&graph(&files))
    }

    #[test]
    fn trees_of_imports_are_read() {
        let flat = |text: &str| leaves(text).iter().map(|path| path.join("::")).collect::<Vec<_>>();
        assert_eq!(flat("a::b::C;"), ["a::b::C"]);
        assert_eq!(
            flat("{\n    Error,\n    a::{self, b, c::{D, E}},\n    f::G,\n};\nuse x"),
            ["Error", "a", "a::b", "a::c::D", "a::c::E", "f::G"]
        );
        assert_eq!(flat("error::Error> {"), ["error::Error"]);
        assert_eq!(flat("a::{B, C};"), ["a::B", "a::C"]);
    }

    #[test]
    fn circles_are_found_and_layers_pass() {
        let lib = ("", "pub use a::{A, make};\npub use b::B;\nmod a;\nmod b;");
        assert_eq!(of(&[lib, ("a", "use crate::b::B;"), ("b", "fn f() {}")]), None);
        let both = of(&[lib, ("a", "use crate::{c, b::B};"), ("b", "fn f(a: crate::A) {}"), ("c", "")]);
        assert_eq!(both.unwrap(), ["a", "b", "a"], "by a name that the root hands on");
        let three = [("a", "use crate::b;"), ("b", "use crate::{c::{D}};"), ("c", "use crate::a::X;")];
        assert_eq!(of(&three).unwrap(), ["a", "b", "c", "a"]);
        let tested = "// use crate::a;\n#[cfg(test)]\nmod tests { use crate::a; }";
        assert_eq!(of(&[("a", "use crate::b;"), ("b", tested)]), None, "neither comments nor tests count");
    }
}
