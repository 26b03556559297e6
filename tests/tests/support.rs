//! `kernels/families.toml` against what the code offers, and microkernels against what it
//! promises.

use fracbit_base::{Code, Scheme};
use fracbit_format::{Grid, SchemeSpec};
use fracbit_kernels::Isa;
use fracbit_tests::{backends, root, skip};
use std::{collections::BTreeMap, fs};

/// A `[[family]]` of the file: lists by key; a plain string is a list of one.
type Entry = BTreeMap<String, Vec<String>>;

/// Reads the few constructs that the file uses: table headers, `key = "text"`, `key = ["a", "b"]`,
/// comments.
fn read() -> Vec<Entry> {
    let text =
        fs::read_to_string(root().join("kernels/families.toml")).expect("kernels/families.toml is committed");
    let mut entries: Vec<Entry> = Vec::new();
    for line in text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#')) {
        if line == "[[family]]" {
            entries.push(Entry::new());
        } else {
            let (key, value) = line.split_once('=').unwrap_or_else(|| panic!("`key = value`, got `{line}`"));
            let words = value.split('"').skip(1).step_by(2).map(str::to_owned).collect();
            let entry = entries.last_mut().expect("keys follow a [[family]]");
            assert!(entry.insert(key.trim().to_owned(), words).is_none(), "key `{key}` appears twice");
        }
    }
    entries
}

fn list<'a>(entry: &'a Entry, key: &str) -> &'a [String] {
    entry.get(key).unwrap_or_else(|| panic!("a family should have `{key}`: {entry:?}"))
}

#[test]
fn the_list_names_exactly_the_schemes_there_are() {
    let mut listed = Vec::new();
    for entry in read() {
        let name = &list(&entry, "name")[0];
        let codes = list(&entry, "codes");
        let rates = list(&entry, "rates");
        if codes.is_empty() {
            listed.extend(rates.iter().map(|rate| format!("{name}-{rate}")));
        }
        for code in codes {
            let rates = entry.get(&format!("rates_{code}")).map_or(rates, Vec::as_slice);
            // The default code is not part of a scheme's name.
            let code = if code == Code::ALL[0].name() { String::new() } else { format!("-{code}") };
            listed.extend(rates.iter().map(|rate| format!("{name}{code}-{rate}")));
        }
    }
    listed.sort();
    let mut offered: Vec<String> = Scheme::all().map(|s| s.to_string()).collect();
    offered.sort();
    assert_eq!(listed, offered, "kernels/families.toml and Scheme::all()");
}

#[test]
fn every_scheme_has_the_bodies_that_are_listed() {
    let microkernels: BTreeMap<String, Vec<String>> =
        read().iter().map(|e| (list(e, "name")[0].clone(), list(e, "microkernels").to_vec())).collect();
    for (isa, kernels) in backends() {
        let Some(kernels) = kernels else {
            skip(&format!("microkernels of {isa}"), "this processor lacks it");
            continue;
        };
        for scheme in Scheme::all() {
            let listed = microkernels[scheme.family().name()].iter().any(|name| name == isa.name());
            // A matrix of several components runs their microkernels.
            for half in scheme.tables() {
                let book =
                    fracbit_quant::codebook(half).unwrap_or_else(|| panic!("{half} has a built-in codebook"));
                let found = kernels.isa(book);
                // Codebooks on the int16 grid stay with AVX-512.
                let stays = isa == Isa::Amx && book.grid() == Grid::I16;
                let want = if stays { Isa::Avx512 } else { isa };
                assert_eq!(
                    found == want,
                    listed || stays,
                    "{scheme}: families.toml lists {isa}: {listed}; the microkernel is {found}"
                );
            }
        }
    }
}

#[test]
fn instruction_sets_are_known_by_the_names_in_the_list() {
    for entry in read() {
        // A GPU is no instruction set of the host; fracbit-kernels-cuda tests its instances against
        // the list.
        for microkernel in list(&entry, "microkernels").iter().filter(|microkernel| *microkernel != "cuda") {
            assert!(microkernel.parse::<Isa>().is_ok(), "`{microkernel}` names no instruction set");
        }
    }
}

#[test]
fn every_scheme_has_a_codebook_a_rounder_and_a_measured_error() {
    let rounders = fracbit_quant::Rounders::default();
    for scheme in Scheme::all() {
        let error = fracbit_codebook::nmse(scheme).unwrap_or_else(|| panic!("{scheme} has a measured error"));
        let bound = scheme.rate().gaussian_bound();
        // Nested scalar codes of 8 bits are as coarse as their grid, which serves 2 bits as well.
        let most = if SchemeSpec::of(scheme).coarsest().is_some() { 12.0 } else { 8.0 };
        assert!(error > bound && error < most * bound, "{scheme}: {error} beside the bound {bound}");
        let alone = scheme.group().is_none() && SchemeSpec::of(scheme).second_level.is_none();
        let whole = scheme.tables().eq([scheme]) && alone;
        assert_eq!(rounders.get(scheme).is_some(), whole, "{scheme}");
        for half in scheme.tables() {
            assert_eq!(fracbit_quant::codebook(half).map(fracbit_format::Codebook::scheme), Some(half));
        }
    }
}

#[test]
fn errors_fall_with_the_rate() {
    let mut last: Option<(Scheme, f64)> = None;
    for scheme in Scheme::all() {
        let error = fracbit_codebook::nmse(scheme).unwrap_or_else(|| panic!("{scheme} has a measured error"));
        if let Some((other, worse)) = last
            && (other.family(), other.code()) == (scheme.family(), scheme.code())
        {
            assert!(error < worse, "{scheme} has error {error}, {other} has {worse}");
        }
        last = Some((scheme, error));
    }
}
