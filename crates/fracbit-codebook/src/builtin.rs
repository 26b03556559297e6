//! The codebooks that come with the crate.

use crate::{AdditiveRounder, NestedRounder, Rounder, ScalarRounder, VectorRounder, train};
use fracbit_base::{Family, Scheme};
use fracbit_format::Codebook;
use std::{collections::BTreeMap, sync::LazyLock};

static BOOKS: LazyLock<BTreeMap<Scheme, Codebook>> = LazyLock::new(|| {
    let integers = ["int-4", "int-8", "qoq-g128", "qoq-channel"]
        .map(|name| train::integers(name.parse().expect("a scheme")).to_string());
    let files = [
        include_str!("../data/nuq.txt"),
        include_str!("../data/vq.txt"),
        include_str!("../data/gnuq.txt"),
        include_str!("../data/aq.txt"),
        include_str!("../data/nest-nuq.txt"),
    ];
    files
        .into_iter()
        .chain(integers.iter().map(String::as_str))
        .flat_map(str::lines)
        .map(|line| line.parse::<Codebook>().expect("committed codebooks are well-formed"))
        .map(|book| (book.scheme(), book))
        .collect()
});

/// The committed codebook of a scalar, vector, integer, group-wise, progressive, additive or nested
/// scalar scheme, `None` for the trellis families.
///
/// Trained for N(0, 1) by `cargo run --release -p fracbit-codebook --example train_codebooks`; see
/// [`train`](crate::train).
#[must_use]
pub fn builtin(scheme: Scheme) -> Option<&'static Codebook> {
    BOOKS.get(&scheme)
}

/// A rounder for the committed codebook of a scalar (nested or not), vector or additive scheme (all
/// but the last exact), `None` for the others (those whose groups have a scale each go through
/// [`GroupCoder`](crate::GroupCoder)).
#[must_use]
pub fn rounder(scheme: Scheme) -> Option<Box<dyn Rounder>> {
    let book = builtin(scheme)?.clone();
    match scheme.family() {
        Family::Nuq => Some(Box::new(ScalarRounder::new(book).expect("a scalar codebook"))),
        Family::NestNuq(_) => Some(Box::new(NestedRounder::new(book).expect("a nested codebook"))),
        Family::Vq => Some(Box::new(VectorRounder::new(book).expect("a vector codebook"))),
        Family::Additive(_) => Some(Box::new(AdditiveRounder::new(book).expect("additive codebooks"))),
        _ => None,
    }
}
