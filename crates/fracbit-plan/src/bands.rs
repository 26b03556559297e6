//! Rows of a matrix by what an error in them costs.
//!
//! With one scale a row, an error of relative size D in row r costs about `a_r D`. The `a_r` of one
//! matrix differ: words are used as unevenly as Zipf's law says, so errors in a few rows of the
//! embedding are met all the time and those in most hardly ever; heads look sharply or hardly look;
//! channels of the stream count more or less to the norm behind them. Rows of like cost make a
//! *band*, and a plan gives each band a scheme of its own. The best bits of a row are `c +
//! log2(a_r) / 2`, so bands are cut by the logarithm of the cost, where the least of what a common
//! rate costs is left within them.
//!
//! The costs of all rows are those of the curvature of the divergence
//! (`fracbit_pipeline::sensitivity`), taken from two halves of a text: rows are cut only where what
//! one half says holds on the other ([`Bands::by_cost`]). Where losses are measured in a quantized
//! model, embedding and head are cut by how often their tokens occur ([`Bands::of`]), and what a
//! band costs is measured on other tokens than those that were counted: a word that happens to be
//! missing in one text is as rare as it seems there, and in no other.
//!
//! Q-Palette's plans and those of the other papers give a matrix one scheme and leave the embedding
//! alone.

use crate::Error;
use fracbit_format::{BitWriter, TILE_ROWS, read_bits};
use fracbit_model::LinearId;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// Most bands of a matrix.
pub const MOST: usize = 4;
/// Bits that say which band a row is in.
const BITS: usize = 2;
/// Added to the count of every token (Lidstone's rule): a short text says little of a large
/// vocabulary.
const PRIOR: f64 = 0.25;
/// Share of a loss that counts by rows alone, because the text that was looked at is not the only
/// one to come: another one has other rare words, and a model that writes its own hardly uses them.
const EVEN: f64 = 0.125;
/// Fewest rows that are worth bands.
const LEAST: usize = 64;
/// Places between rows that are tried for a cut at most.
const PLACES: usize = 256;
/// Bands are kept where they leave less than this of the loss, by the other half of the text: each
/// is a product of its own. Then there are [`MOST`]: with fewer, wherever one more takes only 2 or
/// 3 % off, SmolLM2 loses 3 to 5 % more for 2 % of its speed (`docs/lab/2026-11-quality.md`).
const WORTH: f64 = 0.95;

/// Bands of the rows of some matrices, by name.
pub type BandsOf = BTreeMap<String, Bands>;

/// The name of a band of rows of a matrix.
#[must_use]
pub fn band_name(id: LinearId, band: usize) -> String {
    format!("{id}.band{band}")
}

/// The matrix of a name, and the band if it is that of one.
#[must_use]
pub fn parse_name(name: &str) -> Option<(LinearId, Option<usize>)> {
    match name.rsplit_once(".band") {
        None => Some((name.parse().ok()?, None)),
        Some((id, band)) => {
            let (id, band): (LinearId, _) = (id.parse().ok()?, band.parse().ok()?);
            (band < MOST).then_some((id, Some(band)))
        }
    }
}

/// Earlier documents have one string `bands` for embedding and head: gives it to those of them that
/// are `named` in bands.
pub(crate) fn spread<'a>(document: &mut Value, named: impl Iterator<Item = &'a str>) {
    let Some(one @ Value::String(_)) = document.get("bands").cloned() else { return };
    let matrices = named.filter_map(|name| name.strip_suffix(".band0"));
    document["bands"] = matrices.map(|name| (name.to_owned(), one.clone())).collect();
}

/// Which band each row of a matrix is in; band 0 has those whose errors cost most. In documents a
/// string of digits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Bands(Vec<u8>);

impl Bands {
    /// Bands for the counts of all tokens; `None` where the vocabulary is too small or its counts
    /// too even for several.
    #[must_use]
    pub fn of(counts: &[u32]) -> Option<Self> {
        Self::cut(&counts.iter().map(|&count| (f64::from(count) + PRIOR).ln()).collect::<Vec<_>>())
    }

    /// Bands for the costs of all rows as two halves of a text have them; `None` where there are
    /// too few rows, or what one half says of them does not hold on the other.
    #[must_use]
    pub fn by_cost([first, second]: [&[f64]; 2]) -> Option<Self> {
        if first.len() != second.len() || !first.iter().chain(second).all(|cost| cost.is_finite()) {
            return None;
        }
        let left = f64::midpoint(Self::left(first, second)?, Self::left(second, first)?);
        let both: Vec<f64> = first.iter().zip(second).map(|(a, b)| a + b).collect();
        if left < WORTH { Self::cut(&logs(&both)) } else { None }
    }

    /// What bands by `known` costs leave of the loss by `other` ones, when each has the bits that
    /// are best for it.
    #[expect(clippy::cast_precision_loss, reason = "a mean")]
    fn left(known: &[f64], other: &[f64]) -> Option<f64> {
        let bands = Self::cut(&logs(known))?;
        let sums = |costs: &[f64]| -> Vec<f64> {
            (0..MOST).map(|band| bands.rows(band).map(|row| costs[row]).sum()).collect()
        };
        let rows: Vec<f64> = (0..MOST).map(|band| bands.rows(band).count() as f64).collect();
        let (shares, all) = (bands.shares(&sums(known)), known.len() as f64);
        // Bits go by the logarithm of the mean cost of a band; the mean of all stays.
        let mean: f64 = shares.iter().zip(&rows).map(|(s, n)| n / all * (s / n).ln()).sum();
        let left: f64 = sums(other).iter().zip(&shares).zip(&rows).map(|((o, s), n)| o * n / s).sum();
        Some(left * mean.exp() / other.iter().sum::<f64>())
    }

    /// Bands of whole strips of rows, cut where the variance of `logs` within them is least.
    fn cut(logs: &[f64]) -> Option<Self> {
        let mut order: Vec<usize> = (0..logs.len()).collect();
        order.sort_by(|&a, &b| logs[b].total_cmp(&logs[a]));
        let sorted: Vec<f64> = order.iter().map(|&row| logs[row]).collect();
        let even = sorted.first() == sorted.last();
        if sorted.len() < LEAST || even || !sorted.iter().all(|log| log.is_finite()) {
            return None;
        }
        let cuts = cuts(&sorted);
        let mut bands = vec![0; logs.len()];
        for (at, row) in order.into_iter().enumerate() {
            bands[row] = cuts.iter().take_while(|&&cut| cut <= at).count() as u8;
        }
        Some(Self(bands))
    }

    /// The band of each row; every band below the last has rows.
    fn new(bands: Vec<u8>) -> Result<Self, String> {
        let bands = Self(bands);
        match (0..bands.count()).find(|&band| bands.rows(band).next().is_none()) {
            Some(none) => Err(format!("band {none} has no rows, and one behind it has some")),
            None => Ok(bands),
        }
    }

    /// How many bands there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.iter().max().map_or(0, |&last| usize::from(last) + 1)
    }

    /// The rows of a band, ascending.
    pub fn rows(&self, band: usize) -> impl Iterator<Item = usize> + '_ {
        let of = self.0.iter().enumerate();
        of.filter(move |(_, b)| usize::from(**b) == band).map(|(row, _)| row)
    }

    /// The band of every row.
    #[must_use]
    pub fn each(&self) -> &[u8] {
        &self.0
    }

    /// A matrix of `cols` columns whose rows in `band` are those of `inside` and all others those
    /// of `outside`.
    #[must_use]
    pub fn mix(&self, band: usize, outside: &[f32], inside: &[f32], cols: usize) -> Vec<f32> {
        let mut mixed = outside.to_vec();
        for row in self.rows(band) {
            let row = row * cols..(row + 1) * cols;
            mixed[row.clone()].copy_from_slice(&inside[row]);
        }
        mixed
    }

    /// What falls on each band of a loss that was measured for one after another, [`EVEN`] of it by
    /// rows.
    #[expect(clippy::cast_precision_loss, reason = "a share")]
    pub(crate) fn shares(&self, losses: &[f64]) -> Vec<f64> {
        let sum: f64 = losses.iter().map(|loss| loss.max(0.0)).sum();
        let share = |(band, loss): (usize, &f64)| {
            let rows = self.rows(band).count() as f64 / self.0.len().max(1) as f64;
            if sum > 0.0 { (1.0 - EVEN) * loss.max(0.0) / sum + EVEN * rows } else { rows }
        };
        losses.iter().enumerate().map(share).collect()
    }

    /// The rows of a band of a matrix of `cols` columns.
    #[must_use]
    pub fn take(&self, band: usize, weights: &[f32], cols: usize) -> Vec<f32> {
        self.rows(band).flat_map(|row| &weights[row * cols..(row + 1) * cols]).copied().collect()
    }

    /// Bytes of [`Bands::to_bytes`] for a vocabulary.
    #[must_use]
    pub const fn bytes(rows: usize) -> usize {
        (rows * BITS).div_ceil(8)
    }

    /// Two bits a row, least significant first.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; Self::bytes(self.0.len())];
        let mut writer = BitWriter::new(&mut bytes);
        self.0.iter().for_each(|&band| writer.push(u16::from(band), BITS as u32));
        bytes
    }

    /// What [`Bands::to_bytes`] wrote for `rows` rows.
    ///
    /// # Errors
    /// The rule that is broken, when the length is another or a band has no rows.
    pub fn from_bytes(bytes: &[u8], rows: usize) -> Result<Self, String> {
        if bytes.len() != Self::bytes(rows) {
            return Err(format!(
                "should be {} bytes for {rows} rows, got {}",
                Self::bytes(rows),
                bytes.len()
            ));
        }
        Self::new((0..rows).map(|row| read_bits(bytes, row * BITS, BITS as u32) as u8).collect())
    }
}

/// Logarithms of costs, of which [`EVEN`] counts by rows.
#[expect(clippy::cast_precision_loss, reason = "a mean")]
fn logs(costs: &[f64]) -> Vec<f64> {
    let mean = costs.iter().map(|cost| cost.max(0.0)).sum::<f64>() / costs.len().max(1) as f64;
    costs.iter().map(|cost| ((1.0 - EVEN) * cost.max(0.0) + EVEN * mean).ln()).collect()
}

/// Where descending numbers are cut into [`MOST`] ranges so that the squares of what they are off
/// the mean of their range sum up to the least. Cuts stand between strips, so that packed bands are
/// not padded.
fn cuts(sorted: &[f64]) -> Vec<usize> {
    let step = TILE_ROWS * sorted.len().div_ceil(TILE_ROWS).div_ceil(PLACES);
    let places: Vec<usize> = (0..sorted.len()).step_by(step).chain([sorted.len()]).collect();
    let sums: Vec<[f64; 2]> = std::iter::once([0.0; 2])
        .chain(sorted.iter().scan([0.0; 2], |sums, v| {
            *sums = [sums[0] + v, sums[1] + v * v];
            Some(*sums)
        }))
        .collect();
    #[expect(clippy::cast_precision_loss, reason = "a mean")]
    let spread = |from: usize, to: usize| {
        let (a, b) = (places[from], places[to]);
        let [sum, squares] = [0, 1].map(|i| sums[b][i] - sums[a][i]);
        squares - sum * sum / (b - a) as f64
    };
    let last = places.len() - 1;
    // The least sum for the first places in one range, in two, and so on.
    let mut least: Vec<f64> =
        (0..=last).map(|to| if to == 0 { f64::INFINITY } else { spread(0, to) }).collect();
    let mut froms = Vec::new();
    for _ in 1..MOST {
        let best = |to: usize| {
            let ways = (1..to).map(|from| (from, least[from] + spread(from, to)));
            ways.min_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or((0, f64::INFINITY))
        };
        let (from, next): (Vec<usize>, Vec<f64>) = (0..=last).map(best).unzip();
        froms.push(from);
        least = next;
    }
    let mut at = last;
    let mut cuts: Vec<usize> = Vec::new();
    for from in froms.iter().rev() {
        at = from[at];
        cuts.push(places[at]);
    }
    cuts.reverse();
    cuts
}

impl From<Bands> for String {
    fn from(bands: Bands) -> Self {
        bands.0.iter().map(|&band| char::from(b'0' + band)).collect()
    }
}

impl TryFrom<String> for Bands {
    type Error = Error;

    fn try_from(digits: String) -> Result<Self, Error> {
        let bad = |rule| Error::Plan { origin: "bands".to_owned(), rule };
        let band = |(row, digit): (usize, char)| {
            let band = digit.to_digit(MOST as u32).and_then(|d| u8::try_from(d).ok());
            let rule = || format!("the band of row {row} should be a digit below {MOST}, got {digit:?}");
            band.ok_or_else(|| bad(rule()))
        };
        Self::new(digits.chars().enumerate().map(band).collect::<Result<_, _>>()?).map_err(bad)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts as Zipf's law has them, in an order that has nothing to do with their rank.
    fn zipf(rows: usize) -> Vec<u32> {
        (0..rows).map(|row| (16 * rows / (1 + (row * 7919 + 13) % rows)) as u32).collect()
    }

    #[test]
    fn bands_go_down_in_importance_and_hold_every_row_once() {
        for rows in [64, 1000, 8192] {
            // The last has most words never seen, as texts have it.
            let p: Vec<u32> =
                if rows < 8192 { zipf(rows) } else { zipf(rows).iter().map(|p| p / 64).collect() };
            let bands = Bands::of(&p).unwrap();
            let mut seen = vec![0; rows];
            let mut above = u32::MAX;
            for band in 0..MOST {
                assert!(bands.rows(band).count() > 0, "{rows} rows, band {band}");
                bands.rows(band).for_each(|row| seen[row] += 1);
                let all = || bands.rows(band).map(|row| p[row]);
                assert!(all().all(|p| p <= above), "{rows} rows, band {band}");
                above = all().min().unwrap();
            }
            assert!(seen.iter().all(|&times| times == 1));
            assert_eq!(bands.each().len(), rows);
        }
    }

    #[test]
    fn cuts_are_those_of_least_variance() {
        // All cuts of a small vocabulary between its strips, tried one by one.
        for rows in [240, 233] {
            let p = zipf(rows);
            let mut logs: Vec<f64> = p.iter().map(|&p| (f64::from(p) + PRIOR).ln()).collect();
            logs.sort_by(|a, b| b.total_cmp(a));
            let spread = |range: &[f64]| {
                let mean = range.iter().sum::<f64>() / range.len() as f64;
                range.iter().map(|l| (l - mean).powi(2)).sum::<f64>()
            };
            let total = |cuts: [usize; 5]| cuts.windows(2).map(|c| spread(&logs[c[0]..c[1]])).sum::<f64>();
            let mut best = f64::INFINITY;
            for a in 1..=12 {
                for b in a + 1..=13 {
                    for c in b + 1..=14 {
                        best = best.min(total([0, 16 * a, 16 * b, 16 * c, rows]));
                    }
                }
            }
            let bands = Bands::of(&p).unwrap();
            let mut cuts = [0; 5];
            for band in 0..MOST {
                cuts[band + 1] = cuts[band] + bands.rows(band).count();
                assert!(band == MOST - 1 || cuts[band + 1].is_multiple_of(TILE_ROWS), "{cuts:?}");
            }
            assert!(total(cuts) <= best + 1e-9, "{cuts:?}: {} against {best}", total(cuts));
        }
    }

    #[test]
    fn rows_are_cut_where_both_halves_agree() {
        let uneven: Vec<f64> = (0..256).map(|row| f64::from(1 + row % 64).powi(2)).collect();
        let off = |by: f64| -> Vec<f64> {
            let noise = (0..256).map(|row| 1.0 + by * f64::from(row * 7919 % 13) / 13.0);
            uneven.iter().zip(noise).map(|(cost, noise)| cost * noise).collect()
        };
        let bands = Bands::by_cost([&off(0.0), &off(0.5)]).expect("they agree");
        assert!(bands.rows(0).all(|row| row % 64 > 32), "{bands:?}");
        assert!(bands.rows(3).all(|row| row % 64 < 32), "{bands:?}");
        // As uneven, but the other way round; and nothing to win.
        let other: Vec<f64> = uneven.iter().rev().copied().collect();
        assert_eq!(Bands::by_cost([&uneven, &other]), None);
        assert_eq!(Bands::by_cost([&[1.0; 256], &[1.0; 256]]), None);
        let nearly: Vec<f64> = (0..256).map(|row| 1.0 + 0.1 * f64::from(row % 3)).collect();
        assert_eq!(Bands::by_cost([&nearly, &nearly]), None);
        let broken: Vec<f64> =
            uneven.iter().map(|cost| if *cost > 4000.0 { f64::NAN } else { *cost }).collect();
        assert_eq!(Bands::by_cost([&broken, &uneven]), None);
        assert_eq!(Bands::by_cost([&[0.0; 256], &uneven]), None);
    }

    #[test]
    fn one_string_of_old_documents_is_for_embedding_and_head() {
        let mut old = serde_json::json!({ "bands": "0123" });
        spread(&mut old, ["lm_head.band0", "lm_head.band1", "model.layers.0.mlp.up_proj"].into_iter());
        assert_eq!(old, serde_json::json!({ "bands": { "lm_head": "0123" } }));
        for new in [serde_json::json!({ "bands": { "lm_head": "0123" } }), serde_json::json!({})] {
            let mut same = new.clone();
            spread(&mut same, ["model.embed_tokens.band0"].into_iter());
            assert_eq!(same, new);
        }
    }

    #[test]
    fn small_or_even_vocabularies_stay_whole() {
        assert_eq!(Bands::of(&zipf(63)), None);
        assert_eq!(Bands::of(&[3; 100]), None);
        assert_eq!(Bands::of(&[u32::MAX; 100]), None);
        assert_eq!(Bands::of(&[]), None);
    }

    #[test]
    fn bytes_and_digits_come_back() {
        for rows in [64, 65, 66, 67] {
            let bands = Bands::of(&zipf(rows)).unwrap();
            let bytes = bands.to_bytes();
            assert_eq!(bytes.len(), Bands::bytes(rows));
            assert_eq!(Bands::from_bytes(&bytes, rows), Ok(bands.clone()));
            assert!(Bands::from_bytes(&bytes, rows + 4).unwrap_err().contains("bytes"));
            let digits = serde_json::to_string(&bands).unwrap();
            assert_eq!(serde_json::from_str::<Bands>(&digits).unwrap(), bands);
        }
        assert!(Bands::from_bytes(&[0b10_10_00_10], 4).unwrap_err().contains("band 1 has no rows"));
        for bad in ["\"0124\"", "\"01x\"", "\"0-1\"", "3", "\"0202\"", "\"1\""] {
            assert!(serde_json::from_str::<Bands>(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn rows_of_a_band_are_taken_and_mixed() {
        let bands = Bands(vec![1, 0, 1, 3]);
        let (a, b) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], [-1.0; 8]);
        assert_eq!(bands.take(1, &a, 2), [1.0, 2.0, 5.0, 6.0]);
        assert!(bands.take(2, &a, 2).is_empty());
        assert_eq!(bands.mix(1, &a, &b, 2), [-1.0, -1.0, 3.0, 4.0, -1.0, -1.0, 7.0, 8.0]);
    }
}
