//! Tables that turn codes into integers.

use crate::{TILE, TILE_COLS, TILE_ROWS, bits::read_bits, trellis};
use fracbit_base::{Code, Family, Scheme};
use std::{fmt, str::FromStr};

/// Integer width that a codebook's entries need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grid {
    /// Every entry lies in -127..=127: kernels take the int8 dot products.
    I8,
    /// Some entry needs 16 bits: kernels take the int16 dot products.
    I16,
}

/// The table of one scalar, vector or trellis scheme: integers and the step that makes them unit-variance weights.
#[derive(Clone, Debug, PartialEq)]
pub struct Codebook {
    scheme: Scheme,
    entries: Vec<i16>,
    step: f32,
    grid: Grid,
}

/// A table that does not fit its scheme.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CodebookError {
    /// Half-trellis schemes use the codebooks of their two halves.
    #[error("codebook: {0} has no table of its own, use those of its two halves")]
    Composite(Scheme),
    /// The number of entries does not match the scheme.
    #[error("codebook of {scheme}: expected {want} entries, got {got}")]
    Length {
        /// The scheme.
        scheme: Scheme,
        /// Allowed lengths.
        want: String,
        /// Given length.
        got: usize,
    },
    /// The step is not a positive finite number.
    #[error("codebook of {scheme}: the step should be positive and finite, got {step}")]
    Step {
        /// The scheme.
        scheme: Scheme,
        /// Given step.
        step: f32,
    },
    /// -32768 has no negative and is not allowed.
    #[error("codebook of {0}: entries should lie in -32767..=32767")]
    Range(Scheme),
    /// A line of text that is no codebook.
    #[error("codebook: expected `scheme step entry ...`, found no {0}")]
    Text(String),
}

impl Codebook {
    /// A codebook for `scheme` (not half-TCQ): `entries` on the integer grid, `step` the weight of one grid unit
    /// for a source of unit variance.
    ///
    /// # Errors
    /// When the number of entries, their range or the step does not fit the scheme.
    pub fn new(scheme: Scheme, entries: Vec<i16>, step: f32) -> Result<Self, CodebookError> {
        let bits = usize::from(scheme.quarters());
        let allowed: Vec<usize> = match (scheme.family(), scheme.code()) {
            (Family::HalfTcq, _) => return Err(CodebookError::Composite(scheme)),
            (Family::Nuq, _) => vec![1 << (bits / 4)],
            (Family::Vq, _) => vec![2 << (bits / 2)],
            (Family::Tcq, Some(Code::Hyb)) => vec![1024, 2048, 4096],
            (Family::Tcq, Some(Code::Fast)) => vec![64, 128],
            (Family::Tcq, _) => vec![64, 128, 256],
        };
        if !allowed.contains(&entries.len()) {
            let want = allowed.iter().map(ToString::to_string).collect::<Vec<_>>().join(" or ");
            return Err(CodebookError::Length { scheme, want, got: entries.len() });
        }
        if !(step.is_finite() && step > 0.0) {
            return Err(CodebookError::Step { scheme, step });
        }
        if entries.contains(&i16::MIN) {
            return Err(CodebookError::Range(scheme));
        }
        let narrow = entries.iter().all(|e| (-127..=127).contains(e));
        Ok(Self { scheme, entries, step, grid: if narrow { Grid::I8 } else { Grid::I16 } })
    }

    /// The scheme this table belongs to.
    #[must_use]
    pub const fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// The table: `2^b` values (scalar), `2^b` pairs (vector), or magnitudes as [`trellis`] describes.
    #[must_use]
    pub fn entries(&self) -> &[i16] {
        &self.entries
    }

    /// Weight of one grid unit for a source of unit variance.
    #[must_use]
    pub const fn step(&self) -> f32 {
        self.step
    }

    /// The integer width the entries need.
    #[must_use]
    pub const fn grid(&self) -> Grid {
        self.grid
    }

    /// Bytes of one coded tile.
    #[must_use]
    pub const fn tile_bytes(&self) -> usize {
        self.scheme.quarters() as usize * TILE / 32
    }

    /// Expands one coded tile to integers, row-major: the scalar reference of every kernel.
    ///
    /// # Panics
    /// When `code` is not [`tile_bytes`](Self::tile_bytes) long.
    pub fn expand_tile(&self, code: &[u8], out: &mut [i16; TILE]) {
        self.expand(code, 0, out);
    }

    /// Expands one row of a coded tile.
    ///
    /// # Panics
    /// When `code` is not [`tile_bytes`](Self::tile_bytes) long or `row` is not a row of a tile.
    pub fn expand_tile_row(&self, code: &[u8], row: usize, out: &mut [i16; TILE_COLS]) {
        assert!(row < TILE_ROWS, "row {row} of a tile");
        self.expand(code, row * TILE_COLS, out);
    }

    /// Weights `first..first + out.len()` of a tile; both multiples of 4, so that no step or pair is cut.
    fn expand(&self, code: &[u8], first: usize, out: &mut [i16]) {
        assert_eq!(code.len(), self.tile_bytes(), "one tile of {}", self.scheme);
        match self.scheme.family() {
            Family::Nuq => {
                let bits = u32::from(self.scheme.quarters() / 4);
                for (i, value) in (first..).zip(out) {
                    *value = self.entries[usize::from(read_bits(code, i * bits as usize, bits))];
                }
            }
            Family::Vq => {
                let bits = u32::from(self.scheme.quarters() / 2);
                for (i, pair) in (first / 2..).zip(out.as_chunks_mut::<2>().0) {
                    let index = 2 * usize::from(read_bits(code, i * bits as usize, bits));
                    pair.copy_from_slice(&self.entries[index..index + 2]);
                }
            }
            Family::Tcq | Family::HalfTcq => {
                let steps = trellis::Steps::of(self.scheme).expect("half-TCQ is refused by `new`");
                let kind = self.scheme.code().expect("a trellis scheme has a code");
                for (t, values) in (first / steps.weights..).zip(out.chunks_exact_mut(steps.weights)) {
                    let state = read_bits(code, steps.position(t), trellis::STATE_BITS);
                    let all = trellis::state_values(kind, steps.weights, &self.entries, state);
                    values.copy_from_slice(&all[..steps.weights]);
                }
            }
        }
    }
}

/// One line of text, `scheme step entry entry ...`: the form in which codebooks are committed and stored.
impl fmt::Display for Codebook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.scheme, self.step)?;
        self.entries.iter().try_for_each(|e| write!(f, " {e}"))
    }
}

impl FromStr for Codebook {
    type Err = CodebookError;

    fn from_str(line: &str) -> Result<Self, CodebookError> {
        let text = |what: &str| CodebookError::Text(what.to_owned());
        let mut words = line.split_ascii_whitespace();
        let mut next = |what: &str| words.next().ok_or_else(|| text(what));
        let scheme = next("a scheme name")?.parse().map_err(|_| text("a scheme name"))?;
        let step = next("a step")?.parse().map_err(|_| text("a step"))?;
        let entries = words.map(str::parse).collect::<Result<_, _>>().map_err(|_| text("16-bit integers"))?;
        Self::new(scheme, entries, step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_round_trips_and_bad_text_is_refused() {
        let book = Codebook::new("vq-1.5".parse().unwrap(), (-8..8).collect(), 0.1).unwrap();
        assert_eq!(book.to_string().parse(), Ok(book.clone()));
        for bad in [
            "",
            "nuq-2",
            "nuq-2 0.1 1 2 3",
            "nuq-2 0 1 2 3 4",
            "nuq-2 nan 1 2 3 4",
            "nuq-2 0.1 1 2 3 x",
            "half-tcq-3.25 1 1",
            "nuq-2 0.1 1 2 3 -32768",
        ] {
            assert!(bad.parse::<Codebook>().is_err(), "`{bad}` was accepted");
        }
    }

    #[test]
    fn a_row_equals_that_row_of_the_tile() {
        for scheme in Scheme::all().filter(|s| s.family() != Family::HalfTcq) {
            let want = [4, 16, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192];
            let book = want.iter().find_map(|&n| {
                Codebook::new(scheme, (0..n).map(|i| (i * 37 % 251 - 125) as i16).collect(), 0.1).ok()
            });
            let book = book.expect("one of the lengths fits");
            let code: Vec<u8> = (0..book.tile_bytes()).map(|i| (i * 89 + 7) as u8).collect();
            let (mut tile, mut row) = ([0; TILE], [0; TILE_COLS]);
            book.expand_tile(&code, &mut tile);
            for r in 0..TILE_ROWS {
                book.expand_tile_row(&code, r, &mut row);
                assert_eq!(row, tile[r * TILE_COLS..][..TILE_COLS], "{scheme} row {r}");
            }
        }
    }
}
