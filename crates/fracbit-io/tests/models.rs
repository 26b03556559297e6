//! `docs/models.md` says what the code knows, and every reference checkpoint stands in it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use fracbit_io::{Architecture, ModelConfig};

/// The cells of the table that begins so.
fn rows<'a>(page: &'a str, begin: &str) -> Vec<Vec<&'a str>> {
    let table = page.split("\n\n").find(|part| part.starts_with(begin)).expect("a table");
    let cells = |line: &'a str| line.trim_matches('|').split('|').map(str::trim).collect();
    table.lines().skip(2).map(cells).collect()
}

/// Models are listed as their modules call them.
#[test]
fn the_first_page_lists_all_models() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = std::fs::read_to_string(root.join("README.md")).unwrap();
    let listed: Vec<&str> = rows(&page, "| models |").iter().map(|row| row[0]).collect();
    assert_eq!(listed, Architecture::ALL.map(Architecture::models));
}

#[test]
fn the_page_of_models_is_true() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = std::fs::read_to_string(root.join("docs/models.md")).unwrap();
    let mut checkpoints: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for entry in std::fs::read_dir(root.join("tests/reference/models")).unwrap() {
        let dir = entry.unwrap().path();
        let arch = ModelConfig::from_dir(&dir).unwrap().arch;
        let name = dir.file_name().unwrap().to_str().unwrap().to_owned();
        checkpoints.entry(arch.class_name()).or_default().insert(name);
    }
    let quoted =
        |cell: &str| -> BTreeSet<String> { cell.split('`').skip(1).step_by(2).map(str::to_owned).collect() };
    let rows = rows(&page, "| architecture |");
    assert_eq!(rows.len(), Architecture::ALL.len());
    for (row, arch) in rows.iter().zip(Architecture::ALL) {
        let [names, models, references, _published] = row[..] else { panic!("four columns: {row:?}") };
        assert_eq!(names, format!("`{}` (`{}`)", arch.class_name(), arch.model_type()));
        assert_eq!(models, arch.models(), "{names}");
        match checkpoints.get(arch.class_name()) {
            Some(there) => assert_eq!(&quoted(references), there, "{names}"),
            None => assert!(references.starts_with("none"), "{names}: {references}"),
        }
    }
    // What was done with a published file is told below the table.
    let (_, below) = page.split_once("## Published files").expect("a section");
    for model in rows.iter().map(|row| row[3]).filter(|model| *model != "-") {
        assert!(below.contains(model), "`{model}` should be told of");
    }
}
