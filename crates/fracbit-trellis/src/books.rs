//! The committed codebooks.

use fracbit_base::Scheme;
use fracbit_format::Codebook;
use std::sync::OnceLock;

/// One codebook a line; written by `cargo run --release -p fracbit-trellis --example
/// train_trellis`.
const TEXT: &str = include_str!("../data/trellis.txt");

/// The built-in codebook of a `tcq` scheme; `None` for every other family.
#[must_use]
pub fn builtin(scheme: Scheme) -> Option<&'static Codebook> {
    static BOOKS: OnceLock<Vec<Codebook>> = OnceLock::new();
    let books = BOOKS.get_or_init(|| {
        TEXT.lines().map(|line| line.parse().expect("data/trellis.txt holds codebooks (tested)")).collect()
    });
    books.iter().find(|book| book.scheme() == scheme)
}
