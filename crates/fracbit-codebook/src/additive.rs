//! Nearest sum of centroids, one of each additive codebook.
//!
//! With one codebook the nearest centroid is found among all. With several the search is a beam
//! (Babenko and Lempitsky 2014, section 3.2; AQLM, section 3.2): codebook by codebook the best few
//! beginnings are kept. Half the squared distance of a sum to `x`, less the part that does not
//! depend on the sum, is the sum of `|c|^2 / 2 - x . c` over its centroids and of `c . c'` over
//! their pairs: the products of centroids with each other are made once for a codebook, those with
//! `x` once for a vector, and a candidate costs an addition for each codebook before its own.

use crate::{Rounder, RounderError};
use fracbit_base::Family;
use fracbit_format::{Codebook, Index, TILE, TILE_COLS, TILE_ROWS};
use std::{
    array::from_fn,
    ops::{Add, Mul, Sub},
};

/// Most codebooks of a scheme.
pub(crate) const MOST: usize = 6;
/// Most centroids of a codebook.
const MOST_CENTROIDS: usize = 256;
/// Beginnings that are kept.
const BEAM: usize = 16;
/// Centroids that are looked at together.
const BLOCK: usize = 16;
/// Largest magnitude of a weight in units of the integers that is searched for as it is: farther
/// off only the direction counts.
const FAR: f64 = (1u32 << 20) as f64;

/// A code for each codebook; those behind the last are 0.
pub(crate) type Codes = [u8; MOST];

/// Rounds vectors of neighbouring weights to sums of centroids: to the nearest with one codebook (a
/// tie takes the lowest code), to the best that a beam of 16 finds with several.
///
/// Finite weights of any size are rounded so; a vector that holds NaN or infinities takes some
/// code.
#[derive(Clone, Debug)]
pub struct AdditiveRounder {
    book: Codebook,
    index: Index,
    search: Search<f32>,
}

impl AdditiveRounder {
    /// A rounder for `book`.
    ///
    /// # Errors
    /// When `book` is not of the additive family.
    pub fn new(book: Codebook) -> Result<Self, RounderError> {
        let Some(index) = book.additive() else {
            let want = Family::Additive(fracbit_base::Books::ALL[0]).name();
            return Err(RounderError::Family { want, got: book.scheme() });
        };
        let centroids: Vec<f64> = book.entries().iter().map(|&entry| f64::from(entry)).collect();
        let search = Search::new((1 << index.bits, index.weights), &centroids);
        Ok(Self { book, index, search })
    }
}

impl Rounder for AdditiveRounder {
    fn codebook(&self) -> &Codebook {
        &self.book
    }

    fn encode(&self, tiles: &[[f32; TILE]], codes: &mut [u8]) {
        let bytes = self.book.tile_bytes();
        let scheme = self.book.scheme();
        assert_eq!(codes.len(), tiles.len() * bytes, "bytes of {} tiles of {scheme}", tiles.len());
        let Index { weights, count, bits } = self.index;
        let each = 8 / bits as usize;
        let (mut beam, mut x) = (Beam::default(), [0.0f32; TILE_COLS]);
        let x = &mut x[..weights];
        for (tile, code) in tiles.iter().zip(codes.chunks_exact_mut(bytes)) {
            for (i, vector) in tile.chunks_exact(weights).enumerate() {
                // In units of the integers, whose products are exact.
                let step = f64::from(self.book.step());
                let most = vector.iter().fold(0.0f64, |most, &w| most.max(f64::from(w).abs())) / step;
                let factor = if most > FAR { FAR / most / step } else { 1.0 / step };
                x.iter_mut().zip(vector).for_each(|(x, &w)| *x = f32::of(f64::from(w) * factor));
                let (row, across) = (i / (TILE_COLS / weights), i % (TILE_COLS / weights));
                let first = across * (count / each) * TILE_ROWS + row;
                let found = self.search.find(x, &mut beam);
                let places = code[first..].iter_mut().step_by(TILE_ROWS);
                for (place, codes) in places.zip(found[..count].chunks_exact(each)) {
                    *place = codes.iter().rev().fold(0, |byte, code| byte << (bits % 8) | code);
                }
            }
        }
    }
}

/// Numbers that are searched with: single precision rounds weights, double trains codebooks.
pub(crate) trait Real:
    Copy + Default + PartialOrd + From<f32> + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self>
{
    /// The nearest one.
    fn of(x: f64) -> Self;
}

impl Real for f32 {
    #[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is meant")]
    fn of(x: f64) -> Self {
        x as Self
    }
}

impl Real for f64 {
    fn of(x: f64) -> Self {
        x
    }
}

/// A sum of the first centroids: its score and codes.
#[derive(Clone, Copy, Debug)]
struct Path<T> {
    score: T,
    codes: Codes,
}

/// Working memory of a search.
#[derive(Debug, Default)]
pub(crate) struct Beam<T> {
    paths: Vec<Path<T>>,
    next: Vec<Path<T>>,
}

/// What the search wants to know of centroids.
#[derive(Clone, Debug)]
pub(crate) struct Search<T> {
    centroids: usize, // a multiple of `BLOCK`
    weights: usize,
    count: usize,
    columns: Vec<T>,    // (book, weight, centroid)
    half_norms: Vec<T>, // (book, centroid)
    /// Products of centroids of an earlier and a later book: (later, earlier, centroid of the
    /// earlier, centroid of the later). Exact for integers of 8 bits.
    products: Vec<f32>,
}

impl<T: Real> Search<T> {
    /// Of codebooks of so many centroids of so many weights, `(book, centroid, weight)`.
    pub(crate) fn new((each, weights): (usize, usize), centroids: &[f64]) -> Self {
        let books: Vec<&[f64]> = centroids.chunks_exact(each * weights).collect();
        let column =
            |(book, k): (&[f64], usize)| book.iter().skip(k).step_by(weights).copied().map(T::of).collect();
        let columns: Vec<Vec<T>> =
            books.iter().flat_map(|&book| (0..weights).map(move |k| column((book, k)))).collect();
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let half_norms = centroids.chunks_exact(weights).map(|c| T::of(dot(c, c) / 2.0)).collect();
        let mut products = Vec::with_capacity(books.len() * (books.len() - 1) / 2 * each * each);
        for (later, own) in books.iter().enumerate() {
            for earlier in &books[..later] {
                for first in earlier.chunks_exact(weights) {
                    #[expect(clippy::cast_possible_truncation, reason = "exact, or good enough to train by")]
                    products.extend(own.chunks_exact(weights).map(|second| dot(first, second) as f32));
                }
            }
        }
        Self { centroids: each, weights, count: books.len(), columns: columns.concat(), half_norms, products }
    }

    /// `|c|^2 / 2 - x . c` of the centroids of a book.
    fn scores(&self, book: usize, x: &[T], scores: &mut [T]) {
        let each = self.centroids;
        let columns = &self.columns[book * self.weights * each..][..self.weights * each];
        let norms = &self.half_norms[book * each..][..each];
        let blocks = scores.as_chunks_mut::<BLOCK>().0.iter_mut().zip(norms.as_chunks::<BLOCK>().0);
        for (block, (scores, norms)) in blocks.enumerate() {
            // Arrays as values, which become vectors.
            let mut sums = *norms;
            for (column, &x) in columns.chunks_exact(each).zip(x) {
                let column = column.as_chunks::<BLOCK>().0[block];
                sums = from_fn(|i| sums[i] - x * column[i]);
            }
            *scores = sums;
        }
    }

    /// Products of centroid `code` of an earlier book with all of a later one.
    fn products(&self, later: usize, earlier: usize, code: u8) -> &[[f32; BLOCK]] {
        let before = later * (later - 1) / 2 + earlier;
        let first = (before * self.centroids + usize::from(code)) * self.centroids;
        self.products[first..][..self.centroids].as_chunks().0
    }

    /// Codes of the best sum that the beam finds for `x`; of equals the first that it meets.
    pub(crate) fn find(&self, x: &[T], beam: &mut Beam<T>) -> Codes {
        let Beam { paths, next } = beam;
        paths.clear();
        paths.push(Path { score: T::default(), codes: [0; MOST] });
        let mut own = [T::default(); MOST_CENTROIDS];
        let own = &mut own[..self.centroids];
        for book in 0..self.count {
            self.scores(book, x, own);
            let keep = if book + 1 == self.count { 1 } else { BEAM };
            next.clear();
            // Of the sums that are kept, once there are as many as that.
            let worst_of =
                |next: &[Path<T>]| next.get(keep - 1).map_or(f32::INFINITY.into(), |path| path.score);
            for path in &*paths {
                let products: [&[[f32; BLOCK]]; MOST] = from_fn(|earlier| {
                    if earlier < book { self.products(book, earlier, path.codes[earlier]) } else { &[] }
                });
                let mut worst = worst_of(next);
                for (block, own) in own.as_chunks::<BLOCK>().0.iter().enumerate() {
                    let mut scores = own.map(|own| path.score + own);
                    for products in &products[..book] {
                        let products = products[block];
                        scores = from_fn(|i| scores[i] + T::from(products[i]));
                    }
                    // Most blocks have nothing to give, which vectors see at once.
                    let some = scores.iter().fold(false, |some, &score| some | (score < worst));
                    if !some && next.len() == keep {
                        continue;
                    }
                    for (code, &score) in (BLOCK * block..).zip(&scores) {
                        if score < worst || next.len() < keep {
                            let at = next.partition_point(|path| path.score <= score);
                            next.truncate(keep - 1);
                            let mut codes = path.codes;
                            codes[book] = u8::try_from(code).expect("a codebook has at most 256 centroids");
                            next.insert(at.min(next.len()), Path { score, codes });
                            worst = worst_of(next);
                        }
                    }
                }
            }
            std::mem::swap(paths, next);
        }
        paths[0].codes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On a grid so small that all sums can be tried: the best of one codebook is the nearest, and
    /// a beam finds the best of two nearly always and never does better.
    #[test]
    fn sums_are_the_nearest_or_nearly() {
        let all = [("aq-m1v4", true), ("aq-m1v8", true), ("aq-m2v8", false), ("aq-m2v8b4", true)];
        for (name, exact) in [all.as_slice(), &[("aq-m4v8b4", false)]].concat() {
            let book = crate::builtin(name.parse().unwrap()).unwrap();
            // All bytes: sums of all centroids of one codebook or two.
            let (Index { weights, count, bits }, step) = (book.additive().unwrap(), f64::from(book.step()));
            let (count, sums) = (count * bits as usize / 8, book.byte_centroids().unwrap());
            let rounder = AdditiveRounder::new(book.clone()).unwrap();
            let tiles = crate::laws::tiles(1, 3);
            let codes = crate::laws::encode(&rounder, &tiles);
            let decoded = crate::laws::decode(&rounder, &codes);
            let centroids: Vec<&[i16]> = sums.chunks_exact(weights).collect();
            let (mut found, mut best) = (0.0, 0.0);
            for (x, got) in tiles[0].chunks_exact(weights).zip(decoded[0].chunks_exact(weights)) {
                let error = |q: &dyn Fn(usize) -> f64| -> f64 {
                    x.iter().enumerate().map(|(k, &x)| (f64::from(x) - q(k)).powi(2)).sum()
                };
                let least = if count == 1 {
                    let each = centroids.iter().map(|c| error(&|k| f64::from(c[k]) * step));
                    each.fold(f64::INFINITY, f64::min)
                } else {
                    let (a, b) = centroids.split_at(MOST_CENTROIDS);
                    let sums = a.iter().flat_map(|a| b.iter().map(move |b| (a, b)));
                    let each = sums.map(|(a, b)| error(&|k| f64::from(a[k] + b[k]) * step));
                    each.fold(f64::INFINITY, f64::min)
                };
                let got = error(&|k| f64::from(got[k]));
                assert!(got >= least - 1e-5, "{name}: better than the best");
                assert!(!exact || got <= least + 1e-5, "{name}: {got}, the nearest has {least}");
                (found, best) = (found + got, best + least);
            }
            assert!(found <= 1.02 * best, "{name}: {found}, all sums {best}");
        }
    }

    #[test]
    fn single_precision_loses_nothing_at_any_size() {
        for name in ["aq-m1v4", "aq-m2v8", "aq-m3v8", "aq-m4v8b4", "aq-m6v8b4"] {
            let book = crate::builtin(name.parse().unwrap()).unwrap();
            let (Index { weights, bits, .. }, step) = (book.additive().unwrap(), f64::from(book.step()));
            let entries: Vec<f64> = book.entries().iter().map(|&entry| f64::from(entry)).collect();
            let search = Search::<f64>::new((1 << bits, weights), &entries);
            let rounder = AdditiveRounder::new(book.clone()).unwrap();
            for factor in [1.0, 1e-30, 1e6, 1e30] {
                let tiles =
                    crate::laws::tiles(4, 9).iter().map(|tile| tile.map(|w| w * factor)).collect::<Vec<_>>();
                let decoded = crate::laws::decode(&rounder, &crate::laws::encode(&rounder, &tiles));
                let (mut single, mut double) = (0.0, 0.0);
                let vectors = |tiles: &[[f32; TILE]]| {
                    tiles.as_flattened().chunks_exact(weights).map(<[f32]>::to_vec).collect::<Vec<_>>()
                };
                for (x, got) in vectors(&tiles).iter().zip(vectors(&decoded)) {
                    let x: Vec<f64> = x.iter().map(|&x| f64::from(x) / step).collect();
                    let codes = search.find(&x, &mut Beam::default());
                    let sum = |k: usize| -> f64 {
                        let own = |(book, &code): (usize, &u8)| {
                            entries[((book << bits) + usize::from(code)) * weights + k]
                        };
                        codes[..search.count].iter().enumerate().map(own).sum()
                    };
                    // What depends on codes: the squared distance without the square of `x`.
                    let score = |q: &dyn Fn(usize) -> f64| -> f64 {
                        x.iter().enumerate().map(|(k, x)| q(k) * (q(k) - 2.0 * x)).sum()
                    };
                    single += score(&|k| f64::from(got[k]) / step);
                    double += score(&sum);
                }
                assert!(
                    (single - double).abs() <= 1e-5 * double.abs(),
                    "{name} times {factor}: {single}, {double}"
                );
            }
        }
    }

    #[test]
    fn a_book_of_another_family_is_refused() {
        let other = crate::builtin("vq-2".parse().unwrap()).unwrap().clone();
        let refused = AdditiveRounder::new(other).unwrap_err();
        assert_eq!(refused.to_string(), "rounder: `book` should be of family aq, got vq-2");
    }
}
