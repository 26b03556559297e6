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

/// Most codebooks of a scheme.
pub(crate) const MOST: usize = 6;
/// Most centroids of a codebook.
const MOST_CENTROIDS: usize = 256;
/// Beginnings that are kept.
const BEAM: usize = 16;

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
    search: Search,
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
        let (mut beam, mut x) = (Beam::default(), [0.0; TILE_COLS]);
        let x = &mut x[..weights];
        for (tile, code) in tiles.iter().zip(codes.chunks_exact_mut(bytes)) {
            for (i, vector) in tile.chunks_exact(weights).enumerate() {
                // In units of the integers, whose products are exact.
                let scaled = vector.iter().map(|&w| f64::from(w) / f64::from(self.book.step()));
                x.iter_mut().zip(scaled).for_each(|(x, scaled)| *x = scaled);
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

/// A sum of the first centroids: its score and codes.
#[derive(Clone, Copy, Debug)]
struct Path {
    score: f64,
    codes: Codes,
}

/// Working memory of a search.
#[derive(Debug, Default)]
pub(crate) struct Beam {
    paths: Vec<Path>,
    next: Vec<Path>,
}

/// What the search wants to know of centroids.
#[derive(Clone, Debug)]
pub(crate) struct Search {
    centroids: usize,
    weights: usize,
    count: usize,
    columns: Vec<f64>,    // (book, weight, centroid)
    half_norms: Vec<f64>, // (book, centroid)
    /// Products of centroids of an earlier and a later book: (later, earlier, centroid of the
    /// earlier, centroid of the later). Exact for integers of 8 bits.
    products: Vec<f32>,
}

impl Search {
    /// Of codebooks of so many centroids of so many weights, `(book, centroid, weight)`.
    pub(crate) fn new((each, weights): (usize, usize), centroids: &[f64]) -> Self {
        let books: Vec<&[f64]> = centroids.chunks_exact(each * weights).collect();
        let column = |(book, k): (&[f64], usize)| book.iter().skip(k).step_by(weights).copied().collect();
        let columns: Vec<Vec<f64>> =
            books.iter().flat_map(|&book| (0..weights).map(move |k| column((book, k)))).collect();
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let half_norms = centroids.chunks_exact(weights).map(|c| dot(c, c) / 2.0).collect();
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
    fn scores(&self, book: usize, x: &[f64], scores: &mut [f64]) {
        let each = self.centroids;
        scores.copy_from_slice(&self.half_norms[book * each..][..each]);
        for (k, &x) in x.iter().enumerate() {
            let column = &self.columns[(book * self.weights + k) * each..][..each];
            scores.iter_mut().zip(column).for_each(|(score, c)| *score -= x * c);
        }
    }

    /// Products of centroid `code` of an earlier book with all of a later one.
    fn products(&self, later: usize, earlier: usize, code: u8) -> &[f32] {
        let before = later * (later - 1) / 2 + earlier;
        &self.products[(before * self.centroids + usize::from(code)) * self.centroids..][..self.centroids]
    }

    /// Codes of the best sum that the beam finds for `x`; of equals the first that it meets.
    pub(crate) fn find(&self, x: &[f64], beam: &mut Beam) -> Codes {
        let Beam { paths, next } = beam;
        paths.clear();
        paths.push(Path { score: 0.0, codes: [0; MOST] });
        let (mut own, mut scores) = ([0.0; MOST_CENTROIDS], [0.0; MOST_CENTROIDS]);
        let (own, scores) = (&mut own[..self.centroids], &mut scores[..self.centroids]);
        for book in 0..self.count {
            self.scores(book, x, own);
            let keep = if book + 1 == self.count { 1 } else { BEAM };
            next.clear();
            for path in &*paths {
                scores.iter_mut().zip(&*own).for_each(|(score, own)| *score = path.score + own);
                for (earlier, &code) in path.codes[..book].iter().enumerate() {
                    let products = self.products(book, earlier, code);
                    scores.iter_mut().zip(products).for_each(|(score, &p)| *score += f64::from(p));
                }
                let mut worst = if next.len() < keep { f64::INFINITY } else { next[keep - 1].score };
                for (code, &score) in (0..=u8::MAX).zip(&*scores) {
                    if score < worst || next.len() < keep {
                        let at = next.partition_point(|path| path.score <= score);
                        next.truncate(keep - 1);
                        let mut codes = path.codes;
                        codes[book] = code;
                        next.insert(at.min(next.len()), Path { score, codes });
                        worst = if next.len() < keep { f64::INFINITY } else { next[keep - 1].score };
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
    fn a_book_of_another_family_is_refused() {
        let other = crate::builtin("vq-2".parse().unwrap()).unwrap().clone();
        let refused = AdditiveRounder::new(other).unwrap_err();
        assert_eq!(refused.to_string(), "rounder: `book` should be of family aq, got vq-2");
    }
}
