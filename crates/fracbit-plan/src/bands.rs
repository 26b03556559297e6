//! Rows of embedding and head by how often their tokens occur.
//!
//! Words are used as unevenly as Zipf's law says, so errors in a few rows of the embedding are met
//! all the time and those in most rows hardly ever. With one scale a row, an error of relative size
//! D in row r costs about `h_r |w_r|^2 D`, where h_r follows how often token r is read and, in the
//! head, predicted. Rows of like frequency make a *band*, and a plan gives each band a scheme of
//! its own. The best bits of a row are `c + log2(h_r) / 2`, so bands are cut by the logarithm of
//! the frequency, where k-means leaves the least of what a common rate costs. What a band really
//! costs is measured (`fracbit::losses::measure_along`), and on other tokens than those that were
//! counted: a word that happens to be missing in one text is as rare as it seems there, and in no
//! other.
//!
//! Q-Palette's plans and those of the other papers leave the embedding alone; in small models it is
//! a quarter of the weights and more.

use crate::Error;
use fracbit_format::{BitWriter, read_bits};
use fracbit_model::LinearId;
use serde::{Deserialize, Serialize};

/// Bands of a matrix.
pub const COUNT: usize = 4;
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
/// Most rounds of k-means.
const ROUNDS: usize = 100;

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
            let fits = band < COUNT && !id.is_layer();
            fits.then_some((id, Some(band)))
        }
    }
}

/// Which band each row of a matrix is in; band 0 has the most frequent tokens. In documents a
/// string of digits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Bands(Vec<u8>);

impl Bands {
    /// Bands for the counts of all tokens; `None` where the vocabulary is too small or its counts
    /// too even for several.
    #[must_use]
    pub fn of(counts: &[u32]) -> Option<Self> {
        let logs: Vec<f64> = counts.iter().map(|&count| (f64::from(count) + PRIOR).ln()).collect();
        let mut sorted = logs.clone();
        sorted.sort_by(|a, b| b.total_cmp(a));
        let mut values = sorted.clone();
        values.dedup();
        if sorted.len() < LEAST || values.len() < COUNT {
            return None;
        }
        let sums: Vec<f64> = std::iter::once(0.0)
            .chain(sorted.iter().scan(0.0, |sum, log| {
                *sum += log;
                Some(*sum)
            }))
            .collect();
        #[expect(clippy::cast_precision_loss, reason = "a mean")]
        let mean = |from: usize, to: usize| (sums[to] - sums[from]) / (to - from) as f64;
        // Of sorted numbers a cluster is a range; equal ones stay together. Cuts start as quantiles
        // of the rows, or of the values where most rows have one, and move until they stay.
        let above = |floor: f64| sorted.partition_point(|&log| log >= floor);
        let quantiles = |of: &[f64]| -> Vec<usize> {
            (1..COUNT).map(|band| above(of[band * of.len() / COUNT - 1])).collect()
        };
        let mut cuts = quantiles(&sorted);
        if cuts.windows(2).any(|pair| pair[0] == pair[1]) || cuts[COUNT - 2] == sorted.len() {
            cuts = quantiles(&values);
        }
        cuts.insert(0, 0);
        cuts.push(sorted.len());
        for _ in 0..ROUNDS {
            let before = cuts.clone();
            for band in 1..COUNT {
                let [low, high] =
                    [mean(before[band - 1], before[band]), mean(before[band], before[band + 1])];
                let cut = above(f64::midpoint(low, high));
                if cut > cuts[band - 1] && cut < before[band + 1] {
                    cuts[band] = cut;
                }
            }
            if cuts == before {
                break;
            }
        }
        let floors: Vec<f64> = cuts[1..COUNT].iter().map(|&cut| sorted[cut - 1]).collect();
        let band = |log: &f64| floors.iter().take_while(|&&floor| *log < floor).count() as u8;
        Some(Self(logs.iter().map(band).collect()))
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

    /// What [`Bands::to_bytes`] wrote for `rows` rows; `None` when the length is another.
    #[must_use]
    pub fn from_bytes(bytes: &[u8], rows: usize) -> Option<Self> {
        let band = |row: usize| read_bits(bytes, row * BITS, BITS as u32) as u8;
        (bytes.len() == Self::bytes(rows)).then(|| Self((0..rows).map(band).collect()))
    }
}

impl From<Bands> for String {
    fn from(bands: Bands) -> Self {
        bands.0.iter().map(|&band| char::from(b'0' + band)).collect()
    }
}

impl TryFrom<String> for Bands {
    type Error = Error;

    fn try_from(digits: String) -> Result<Self, Error> {
        let band = |(row, digit): (usize, char)| {
            let band = digit.to_digit(COUNT as u32).and_then(|d| u8::try_from(d).ok());
            band.ok_or_else(|| Error::Plan {
                origin: "bands".to_owned(),
                rule: format!("the band of row {row} should be a digit below {COUNT}, got {digit:?}"),
            })
        };
        Ok(Self(digits.chars().enumerate().map(band).collect::<Result<_, _>>()?))
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
            for band in 0..COUNT {
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
        // All cuts of a small vocabulary, tried one by one.
        let p = zipf(80);
        let mut logs: Vec<f64> = p.iter().map(|&p| (f64::from(p) + PRIOR).ln()).collect();
        logs.sort_by(|a, b| b.total_cmp(a));
        let spread = |range: &[f64]| {
            let mean = range.iter().sum::<f64>() / range.len() as f64;
            range.iter().map(|l| (l - mean).powi(2)).sum::<f64>()
        };
        let total = |cuts: [usize; 5]| cuts.windows(2).map(|c| spread(&logs[c[0]..c[1]])).sum::<f64>();
        let mut best = f64::INFINITY;
        for a in 1..=77 {
            for b in a + 1..=78 {
                for c in b + 1..=79 {
                    best = best.min(total([0, a, b, c, 80]));
                }
            }
        }
        let bands = Bands::of(&p).unwrap();
        let mut cuts = [0; 5];
        for band in 0..COUNT {
            cuts[band + 1] = cuts[band] + bands.rows(band).count();
        }
        assert!(total(cuts) <= 1.1 * best, "{cuts:?}: {} against {best}", total(cuts));
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
            assert_eq!(Bands::from_bytes(&bytes, rows), Some(bands.clone()));
            assert_eq!(Bands::from_bytes(&bytes, rows + 4), None);
            let digits = serde_json::to_string(&bands).unwrap();
            assert_eq!(serde_json::from_str::<Bands>(&digits).unwrap(), bands);
        }
        for bad in ["\"0124\"", "\"01x\"", "\"0-1\"", "3"] {
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
