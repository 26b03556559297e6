//! Nested scalar codebooks: the values of least error at the lowest rate, and every cell cut in two
//! for each bit more.
//!
//! Source: Any-Precision LLM (arXiv 2402.10517), section 4.1: a seed model whose clusters are each
//! split by weighted 2-means. Here the weights are N(0, 1), so that cells are intervals, both
//! centroids and the cut between them exact integrals, and every value the centroid of those that
//! it is split into.

use super::{finish, integer, lloyd_max, normal::moments, single};
use fracbit_base::{Ladder, Scheme};
use fracbit_format::Codebook;

/// Bits of the finest table, by which all of one lowest rate have the same integers.
const FINEST: u32 = 8;
/// The largest integer.
const LIMIT: f64 = 127.0;

/// An interval of weights that share a code.
#[derive(Clone, Copy)]
struct Cell {
    from: f64,
    to: f64,
}

impl Cell {
    fn mean(self) -> f64 {
        let [mass, first, _] = moments(self.from, self.to);
        first / mass
    }

    /// The halves of least error: each ends halfway between the means of both (Lloyd's two
    /// conditions; a log-concave density has one solution).
    fn halves(self) -> [Self; 2] {
        let cut_at = |cut| [Self { to: cut, ..self }, Self { from: cut, ..self }];
        let mut cut = self.mean();
        for _ in 0..500 {
            let [low, high] = cut_at(cut).map(Self::mean);
            let next = f64::midpoint(low, high);
            let done = (next - cut).abs() < 1e-14;
            cut = next;
            if done {
                break;
            }
        }
        cut_at(cut)
    }
}

/// The table of every number of bits from `low` to [`FINEST`]: bit `p` of a code says which half of
/// the cell it is that its lower `p` bits name.
fn tables(low: u32) -> Vec<Vec<f64>> {
    let values = lloyd_max(low);
    let bound = |i: usize| match i {
        0 => f64::NEG_INFINITY,
        i if i == values.len() => f64::INFINITY,
        i => f64::midpoint(values[i - 1], values[i]),
    };
    let mut cells: Vec<Cell> = (0..values.len()).map(|i| Cell { from: bound(i), to: bound(i + 1) }).collect();
    let mut all = vec![cells.iter().map(|cell| cell.mean()).collect::<Vec<f64>>()];
    for _ in low..FINEST {
        let halves: Vec<[Cell; 2]> = cells.iter().map(|cell| cell.halves()).collect();
        cells = [0, 1].iter().flat_map(|&half| halves.iter().map(move |both| both[half])).collect();
        all.push(cells.iter().map(|cell| cell.mean()).collect());
    }
    all
}

/// The codebook of a nested scalar scheme: the first tables of the lowest rate's.
pub(super) fn codebook(scheme: Scheme, ladder: Ladder) -> Codebook {
    let tables = tables(ladder.low());
    let largest = tables.iter().flatten().fold(0.0, |most: f64, v| most.max(v.abs()));
    let step = single(largest / LIMIT);
    let own = &tables[..=(ladder.high() - ladder.low()) as usize];
    let entries = own.iter().flatten().map(|v| integer((v / step).round().clamp(-LIMIT, LIMIT)));
    finish(scheme, entries.collect(), step)
}

#[cfg(test)]
mod tests {
    use super::{super::scalar_error, *};

    #[test]
    fn every_value_is_the_centroid_of_its_halves() {
        for low in 2..=4 {
            let tables = tables(low);
            for (pair, bits) in tables.windows(2).zip(low..) {
                for (code, value) in pair[0].iter().enumerate() {
                    let [a, b] = [pair[1][code], pair[1][code | 1 << bits]];
                    assert!(a < *value && *value < b, "{low}, {bits} bits: {a} {value} {b}");
                }
            }
        }
    }

    #[test]
    fn errors_are_near_those_of_codebooks_of_their_own() {
        for (low, table, bits) in [(2, 1, 3), (2, 2, 4), (3, 1, 4), (2, 4, 6), (4, 4, 8)] {
            let mut values = tables(low)[table].clone();
            values.sort_by(f64::total_cmp);
            let more = scalar_error(&values) / scalar_error(&lloyd_max(bits));
            assert!((1.0..1.2).contains(&more), "{bits} bits from {low}: {more}");
        }
    }
}
