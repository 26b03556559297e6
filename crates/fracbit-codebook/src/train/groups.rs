//! A few small codebooks for all groups of a model.
//!
//! Two phases, then both together until nothing is gained:
//!
//! 1. *Shapes.* Every group is divided by its weight of largest magnitude (sign included, because a
//!    negative scale mirrors a codebook) and its values are sorted: `k`-means on these vectors,
//!    weighted by the group's energy, makes `C` clusters.
//! 2. *Centroids.* Within a cluster the weighted `k`-means of its divided weights gives `2^b`
//!    centroids, scaled to the int8 range.
//! 3. Each group is coded by the codebook, sign and scale of least error ([`GroupCoder`]), then
//!    every entry moves to the weighted mean of what it codes, `q = sum h s w / sum h s^2`, and
//!    back to the int8 grid. The best round is kept, so that rounding to the grid cannot spoil the
//!    result.
//!
//! `C * 2^b` entries of a byte fit the register budget by construction: 16 bytes are one 128-bit
//! register, 32 and 64 two and four. Source of the idea: arXiv 2501.00032, section 5 (see
//! [`GroupCoder`]); the part of the paper that describes its clustering was not available, so the
//! features, the weights and the alternation are our own.

use crate::GroupCoder;
use fracbit_base::{Family, Scheme};
use fracbit_format::Codebook;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Exp1, StandardNormal};
use rayon::prelude::*;

/// How to train group-wise codebooks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupTraining {
    /// Weights of a group.
    pub group: usize,
    /// Bytes that all codebooks together take: 16, 32 or 64, or `2^b` for a single one.
    pub budget: usize,
    /// Rounds of phase 3.
    pub rounds: usize,
}

impl Default for GroupTraining {
    /// Groups of 32, one register, 24 rounds.
    fn default() -> Self {
        Self { group: 32, budget: 16, rounds: 24 }
    }
}

/// The table of codes that are integers. One step is what makes the largest code 1.
///
/// # Panics
/// When `scheme` is of another family.
#[must_use]
pub fn integers(scheme: Scheme) -> Codebook {
    let codes = 1usize << (scheme.quarters() / 4);
    let entries: Option<Vec<i16>> = (0..codes).map(|code| Codebook::integer(scheme, code)).collect();
    let largest = if scheme.group().is_none() {
        1.0
    } else if codes == 16 {
        8.0
    } else {
        127.0
    };
    Codebook::new(scheme, entries.expect("codes that are integers"), 1.0 / largest).expect("its own integers")
}

/// `groups` groups of 32 weights, a third each from N(0, 1), from a Laplace distribution, and from
/// a mixture of nine parts N(0, 1) and one part N(0, 9): what rows look like after a rotation,
/// without one, and with outliers.
#[must_use]
pub fn mixed_groups(groups: usize, seed: u64) -> Vec<f32> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut weights = Vec::with_capacity(32 * groups);
    for group in 0..groups {
        for _ in 0..32 {
            let normal: f32 = random.sample(StandardNormal);
            let size: f32 = random.sample(Exp1);
            let pick: f32 = random.random();
            weights.push(match group % 3 {
                0 => normal,
                1 => size.copysign(normal),
                _ => normal * if pick < 0.1 { 3.0 } else { 1.0 },
            });
        }
    }
    weights
}

/// Trains the codebooks of `scheme` on groups of `weights` (all layers of a model, or a sample of
/// them); `importance` as in [`GroupCoder::encode`]. A fixed function of its arguments, at any
/// thread count.
///
/// # Panics
/// When `scheme` is not group-wise, the budget is not one of its table lengths, `weights` is not a
/// positive number of groups, or `importance` has another length.
#[must_use]
pub fn group_codebooks(
    scheme: Scheme,
    weights: &[f32],
    importance: Option<&[f32]>,
    options: GroupTraining,
) -> Codebook {
    assert_eq!(scheme.family(), Family::Gnuq, "group-wise codebooks for {scheme}");
    let GroupTraining { group, budget, rounds } = options;
    assert!(!weights.is_empty() && weights.len().is_multiple_of(group), "whole groups of {group} weights");
    assert!(importance.is_none_or(|h| h.len() == weights.len()), "an importance for each weight");
    let entries = 1usize << (scheme.quarters() / 4);
    let count = budget / entries;
    let sample = Sample { weights, importance, group };
    let mut books: Vec<Vec<f64>> =
        sample.shapes(count).into_iter().map(|members| sample.centroids(&members, entries)).collect();
    let mut best: Option<(f64, Codebook)> = None;
    for _ in 0..=rounds {
        let book = on_grid(scheme, &books);
        let coder = GroupCoder::new(book.clone()).expect("a group-wise codebook");
        let (error, means) = sample.round(&coder, entries);
        for (book, means) in books.iter_mut().zip(means.chunks(entries)) {
            for (entry, &[cross, own]) in book.iter_mut().zip(means) {
                if own > 0.0 {
                    *entry = cross / own;
                }
            }
        }
        if best.as_ref().is_none_or(|b| error < b.0) {
            best = Some((error, book));
        }
    }
    best.expect("at least one round").1
}

/// Integers of the codebooks, each scaled so that its largest magnitude is 127, ascending.
fn on_grid(scheme: Scheme, books: &[Vec<f64>]) -> Codebook {
    let mut entries = Vec::new();
    for book in books {
        let largest = book.iter().fold(1e-30f64, |m, e| m.max(e.abs()));
        let mut integers: Vec<i16> = book
            .iter()
            .map(|e| {
                #[expect(clippy::cast_possible_truncation, reason = "at most 127 in magnitude")]
                let integer = (e / largest * 127.0).round() as i16;
                integer
            })
            .collect();
        integers.sort_unstable();
        entries.extend(integers);
    }
    Codebook::new(scheme, entries, 1.0 / 127.0).expect("a budget that the scheme knows")
}

/// Groups to train on.
struct Sample<'a> {
    weights: &'a [f32],
    importance: Option<&'a [f32]>,
    group: usize,
}

impl Sample<'_> {
    fn groups(&self) -> usize {
        self.weights.len() / self.group
    }

    fn of(&self, group: usize) -> (&[f32], Option<&[f32]>) {
        let range = group * self.group..(group + 1) * self.group;
        (&self.weights[range.clone()], self.importance.map(|h| &h[range]))
    }

    /// A group divided by its weight of largest magnitude, and that magnitude; zeros for a group of
    /// zeros.
    fn divided(&self, group: usize) -> (Vec<f64>, f64) {
        let (weights, _) = self.of(group);
        let largest = weights.iter().fold(0.0f32, |m, &w| if w.abs() > m.abs() { w } else { m });
        let by = if largest == 0.0 { 1.0 } else { f64::from(largest) };
        (weights.iter().map(|&w| f64::from(w) / by).collect(), f64::from(largest.abs()))
    }

    /// Phase 1: members of `count` clusters of sorted shapes. The first centre is the mean, each
    /// further one the group farthest from all centres.
    fn shapes(&self, count: usize) -> Vec<Vec<usize>> {
        let shapes: Vec<(Vec<f64>, f64)> = (0..self.groups())
            .into_par_iter()
            .map(|g| {
                let (mut shape, largest) = self.divided(g);
                shape.sort_by(f64::total_cmp);
                (shape, largest * largest)
            })
            .collect();
        let off = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| (x - y).powi(2)).sum::<f64>();
        let mean = |members: &[usize]| {
            let mut sum = vec![0.0; self.group];
            let mut total = 0.0;
            for &g in members {
                let (shape, weight) = &shapes[g];
                sum.iter_mut().zip(shape).for_each(|(s, v)| *s += weight * v);
                total += weight;
            }
            sum.iter_mut().for_each(|s| *s /= f64::max(total, 1e-300));
            sum
        };
        let all: Vec<usize> = (0..shapes.len()).collect();
        let mut centres = vec![mean(&all)];
        while centres.len() < count {
            let least = |g: usize| centres.iter().map(|c| off(c, &shapes[g].0)).fold(f64::INFINITY, f64::min);
            let far = all.iter().copied().max_by(|&a, &b| least(a).total_cmp(&least(b))).expect("groups");
            centres.push(shapes[far].0.clone());
        }
        let mut members = vec![Vec::new(); count];
        for _ in 0..10 {
            let nearest: Vec<usize> = shapes
                .par_iter()
                .map(|(shape, _)| {
                    let of = |c: usize| off(&centres[c], shape);
                    (0..count).min_by(|&a, &b| of(a).total_cmp(&of(b))).expect("at least one centre")
                })
                .collect();
            members = vec![Vec::new(); count];
            nearest.iter().enumerate().for_each(|(g, &c)| members[c].push(g));
            for (centre, members) in centres.iter_mut().zip(&members).filter(|(_, m)| !m.is_empty()) {
                *centre = mean(members);
            }
        }
        members
    }

    /// Phase 2: weighted `k`-means of the divided weights of `members`.
    fn centroids(&self, members: &[usize], entries: usize) -> Vec<f64> {
        let mut values: Vec<(f64, f64)> = Vec::new();
        for &g in members {
            let (divided, largest) = self.divided(g);
            let importance = self.of(g).1;
            let weight = |i: usize| largest * largest * importance.map_or(1.0, |h| f64::from(h[i]));
            values.extend(divided.into_iter().enumerate().map(|(i, v)| (v, weight(i))));
        }
        if values.is_empty() {
            values.push((1.0, 1.0));
        }
        values.sort_by(|a, b| a.0.total_cmp(&b.0));
        #[expect(clippy::cast_precision_loss, reason = "at most 16 entries")]
        let at = |i: usize| values[((i as f64 + 0.5) / entries as f64 * values.len() as f64) as usize].0;
        let mut centres: Vec<f64> = (0..entries).map(at).collect();
        for _ in 0..40 {
            let mut sums = vec![[0.0f64; 2]; entries];
            let mut here = 0;
            for &(value, weight) in &values {
                while here + 1 < entries && value > f64::midpoint(centres[here], centres[here + 1]) {
                    here += 1;
                }
                sums[here][0] += weight * value;
                sums[here][1] += weight;
            }
            for (centre, [sum, weight]) in centres.iter_mut().zip(sums) {
                if weight > 0.0 {
                    *centre = sum / weight;
                }
            }
        }
        centres
    }

    /// Codes every group; returns the error and for each entry `[sum h s w, sum h s^2]`. Sums run
    /// over fixed pieces in order.
    fn round(&self, coder: &GroupCoder, entries: usize) -> (f64, Vec<[f64; 2]>) {
        let groups: Vec<usize> = (0..self.groups()).collect();
        let parts: Vec<(f64, Vec<[f64; 2]>)> = groups
            .par_chunks(256)
            .map(|piece| {
                let mut means = vec![[0.0; 2]; coder.codebook().entries().len()];
                let (mut error, mut codes) = (0.0, vec![0; self.group]);
                for &g in piece {
                    let (weights, importance) = self.of(g);
                    let coded = coder.encode(weights, importance, 1.0, &mut codes);
                    error += coded.error;
                    let first = usize::from(coder.codebook().book_of(coded.scale)) * entries;
                    let scale = f64::from(coded.scale.to_f32() * coder.codebook().step());
                    for (i, (&code, &w)) in codes.iter().zip(weights).enumerate() {
                        let h = importance.map_or(1.0, |h| f64::from(h[i]));
                        let mean = &mut means[first + usize::from(code)];
                        mean[0] += h * scale * f64::from(w);
                        mean[1] += h * scale * scale;
                    }
                }
                (error, means)
            })
            .collect();
        let mut total = (0.0, vec![[0.0; 2]; coder.codebook().entries().len()]);
        for (error, means) in parts {
            total.0 += error;
            for (t, m) in total.1.iter_mut().zip(means) {
                t[0] += m[0];
                t[1] += m[1];
            }
        }
        total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(book: Codebook, weights: &[f32]) -> f64 {
        let coder = GroupCoder::new(book).unwrap();
        let mut codes = [0; 32];
        let sum: f64 = weights.chunks(32).map(|g| coder.encode(g, None, 1.0, &mut codes).error).sum();
        sum / weights.iter().map(|&w| f64::from(w).powi(2)).sum::<f64>()
    }

    #[test]
    fn codebooks_that_fit_beat_codebooks_that_do_not() {
        // Four kinds of groups, each from four values of its own: four codebooks code them all but
        // exactly.
        let kinds =
            [[-1.0, -0.3, 0.2, 0.9], [-0.1, 0.0, 0.1, 1.0], [-1.0, 0.5, 0.6, 0.7], [-0.8, -0.7, 0.7, 0.8]];
        let mut random = ChaCha8Rng::seed_from_u64(3);
        let mut weights = Vec::new();
        for g in 0..400 {
            let size: f32 = random.sample::<f32, _>(Exp1) + 0.1;
            (0..32).for_each(|i| weights.push(size * kinds[g % 4][(i * 7 + g) % 4]));
        }
        let scheme = "gnuq-2".parse().unwrap();
        let options = GroupTraining { rounds: 8, ..GroupTraining::default() };
        let four = error(group_codebooks(scheme, &weights, None, options), &weights);
        let one =
            error(group_codebooks(scheme, &weights, None, GroupTraining { budget: 4, ..options }), &weights);
        assert!(four < 1e-4 && one > 0.01, "four codebooks {four}, one {one}");
    }

    #[test]
    fn importance_moves_the_error_to_where_it_is_cheap() {
        let weights = mixed_groups(300, 5);
        let importance: Vec<f32> = (0..weights.len()).map(|i| if i % 4 == 0 { 20.0 } else { 0.1 }).collect();
        let scheme = "gnuq-2".parse().unwrap();
        let options = GroupTraining { rounds: 4, ..GroupTraining::default() };
        let weighted = |h: Option<&[f32]>| {
            let coder = GroupCoder::new(group_codebooks(scheme, &weights, h, options)).unwrap();
            let mut codes = [0; 32];
            let both = weights.chunks(32).zip(importance.chunks(32));
            both.map(|(w, i)| {
                let coded = coder.encode(w, h.map(|_| i), 1.0, &mut codes);
                let book = coder.codebook();
                let first = usize::from(book.book_of(coded.scale)) * 4;
                let unit = coded.scale.to_f32() * book.step();
                let rest = |(k, &w): (usize, &f32)| {
                    let value = unit * f32::from(book.entries()[first + usize::from(codes[k])]);
                    f64::from(i[k]) * f64::from(w - value).powi(2)
                };
                w.iter().enumerate().map(rest).sum::<f64>()
            })
            .sum::<f64>()
        };
        let (with, without) = (weighted(Some(&importance)), weighted(None));
        assert!(with < 0.8 * without, "with {with}, without {without}");
    }

    #[test]
    fn reported_error_is_that_of_the_codes_and_never_above_the_largest_weight() {
        let weights = mixed_groups(90, 9);
        for name in ["int-4", "int-8", "gnuq-3"] {
            let scheme: Scheme = name.parse().unwrap();
            let book = if name.starts_with("int") {
                integers(scheme)
            } else {
                group_codebooks(
                    scheme,
                    &weights,
                    None,
                    GroupTraining { rounds: 2, ..GroupTraining::default() },
                )
            };
            let coder = GroupCoder::new(book).unwrap();
            let book = coder.codebook();
            let mut codes = [0; 32];
            for group in weights.chunks(32) {
                let coded = coder.encode(group, None, 0.5, &mut codes);
                let first = usize::from(book.book_of(coded.scale)) << (scheme.quarters() / 4);
                let unit = 0.5 * book.step() * coded.scale.to_f32();
                let value = |code: u8| unit * f32::from(book.entries()[first + usize::from(code)]);
                let sum: f64 = group.iter().zip(codes).map(|(&w, c)| f64::from(w - value(c)).powi(2)).sum();
                assert!((sum - coded.error).abs() <= 1e-6 * sum, "{name}: {sum} {}", coded.error);
                for (&w, code) in group.iter().zip(codes) {
                    let all = (0..1usize << (scheme.quarters() / 4)).map(|c| (w - value(c as u8)).abs());
                    let least = all.fold(f32::INFINITY, f32::min);
                    assert!((w - value(code)).abs() <= least * 1.001 + 1e-6, "{name}: the nearest entry");
                }
            }
            assert_eq!(coder.encode(&[0.0; 32], None, 1.0, &mut codes).scale.to_f32(), 0.0, "zeros");
        }
    }

    #[test]
    fn plain_integers_beat_rounding_by_the_largest_weight() {
        let weights = mixed_groups(300, 7);
        let ours = error(integers("int-4".parse().unwrap()), &weights);
        let mut theirs = 0.0;
        for group in weights.chunks(32) {
            // Q4_0: the weight of largest magnitude becomes -8.
            let largest = group.iter().fold(0.0f32, |m, &w| if w.abs() > m.abs() { w } else { m });
            let d = largest / -8.0;
            for &w in group {
                theirs += f64::from(w - d * (w / d + 8.5).floor().clamp(0.0, 15.0) + 8.0 * d).powi(2);
            }
        }
        theirs /= weights.iter().map(|&w| f64::from(w).powi(2)).sum::<f64>();
        assert!(ours < theirs, "ours {ours}, theirs {theirs}");
    }
}
