//! Activations and their integer forms.

use crate::{
    Interleave, Panel, Team,
    args::{PANEL_TOKENS, ROW_OVERREAD, ROWS, panel_groups},
    expand::psumbook::Psums,
    lines::Numbers,
    vectors::{
        Rounded, Vectors,
        plain::{GROUP, PIECE},
    },
};
use fracbit_base::ShapeError;
use fracbit_format::{Grid, TILE_COLS};

/// Tokens from which on their rounding is dealt to threads.
const PARALLEL: usize = 16;

/// A batch of activation vectors and their integer forms.
///
/// Each token has one scale per 256 columns, `absmax / 127` (int8) or `absmax / 1023` (int16), and
/// integers `round(x / scale)`, ties to even. A form is made when the first matrix that wants it
/// arrives and is kept until the next [`set`](Self::set), so that matrices with the same input
/// (queries, keys, values; gate, up) share it. Buffers only grow: after the first step of a size
/// nothing is allocated.
///
/// A NaN or an infinity makes its group's scale non-finite and so its token's results NaN or
/// infinite; groups with no magnitude above 1e-30 count as zero.
#[derive(Clone, Debug, Default)]
pub struct Activations {
    cols: usize,
    batch: usize,
    values: Vec<f32>, // (batch, cols), unless they come with each product
    pub(crate) narrow: Form<i8>,
    pub(crate) wide: Form<i16>,
    pub(crate) block_scales: Vec<f32>, // (segment, batch, block) of the current matrix
    pub(crate) block_starts: Vec<i32>, // (segment, batch, block)
    pub(crate) refined: Vec<f32>,      // (2, batch, rows), of a refined product
    pub(crate) psums: Vec<Psums>,      // of each set of additive codebooks that met the values
}

/// One integer form.
#[derive(Clone, Debug, Default)]
pub(crate) struct Form<T> {
    ready: bool,
    packed: Option<Interleave>,
    panel: Numbers<i32>, // see `Panel`
    /// [`Interleave::EvenOdd`], beside a panel of eights: gate and up may be of schemes that want
    /// one each.
    even_odd: Numbers<i32>,
    split: bool,
    /// `(batch, stride)`. Rows start with a cache line: tile registers take lines, and would take
    /// two for each of other rows.
    pub(crate) ints: Numbers<T>,
    pub(crate) scales: Vec<f32>, // (batch, groups)
    pub(crate) sums: Vec<i32>,   // (batch, tiles)
}

impl Activations {
    /// No activations yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes a copy of `x`, `(batch, cols)` row-major.
    ///
    /// # Errors
    /// When `x` is not a positive whole number of rows of `cols` (positive) values.
    pub fn set(&mut self, x: &[f32], cols: usize) -> Result<(), ShapeError> {
        self.announce(x, cols)?;
        self.values.extend_from_slice(x);
        Ok(())
    }

    /// As [`set`](Self::set), without a copy: `x` comes again with each product, see
    /// [`matmul_with`](crate::matmul_with).
    ///
    /// # Errors
    /// As there.
    pub fn announce(&mut self, x: &[f32], cols: usize) -> Result<(), ShapeError> {
        if cols == 0 || x.is_empty() || !x.len().is_multiple_of(cols) {
            let want = format_args!("a positive multiple of cols = {cols} long").to_string();
            return Err(ShapeError::new("activations", "x", want, x.len()));
        }
        self.cols = cols;
        self.batch = x.len() / cols;
        self.values.clear();
        self.forget();
        Ok(())
    }

    /// `f` with the copy of [`set`](Self::set), and forms that belong to it.
    pub(crate) fn with_values<R>(&mut self, f: impl FnOnce(&[f32], &mut Self) -> R) -> R {
        let values = std::mem::take(&mut self.values);
        let result = f(&values, self);
        self.values = values;
        result
    }

    /// No form is that of the values any more.
    fn forget(&mut self) {
        (self.narrow.ready, self.narrow.packed, self.narrow.split) = (false, None, false);
        (self.wide.ready, self.wide.packed) = (false, None);
        self.psums.iter_mut().for_each(|psums| psums.ready = false);
    }

    /// Doubles the batch: behind the tokens `x` come, in their order, the values that rounding them
    /// to int8 loses.
    pub(crate) fn append_losses(&mut self, x: &[f32], vectors: &Vectors, team: &Team<'_>) {
        self.make_narrow(x, vectors, team, None);
        let (cols, batch, groups, stride) = (self.cols, self.batch, self.groups(), self.stride());
        self.values.clear();
        self.values.extend_from_slice(x);
        self.values.resize(2 * x.len(), 0.0);
        let (values, losses) = self.values.split_at_mut(x.len());
        for (token, (values, losses)) in
            values.chunks_exact(cols).zip(losses.chunks_exact_mut(cols)).enumerate()
        {
            let ints = &self.narrow.ints[token * stride..][..cols];
            let scales = &self.narrow.scales[token * groups..][..groups];
            let parts = losses.chunks_mut(GROUP).zip(values.chunks(GROUP)).zip(ints.chunks(GROUP));
            for (((losses, values), ints), scale) in parts.zip(scales) {
                for ((loss, value), &int) in losses.iter_mut().zip(values).zip(ints) {
                    *loss = value - f32::from(int) * scale;
                }
            }
        }
        self.resize_batch(2 * batch);
    }

    /// Drops what [`append_losses`](Self::append_losses) appended.
    pub(crate) fn drop_losses(&mut self) {
        self.resize_batch(self.batch / 2);
        self.values.truncate(self.batch * self.cols);
    }

    fn resize_batch(&mut self, batch: usize) {
        self.batch = batch;
        self.forget();
    }

    /// Tokens.
    #[must_use]
    pub const fn batch(&self) -> usize {
        self.batch
    }

    /// Values of a token.
    #[must_use]
    pub const fn cols(&self) -> usize {
        self.cols
    }

    /// Elements from a token to the next in an integer form: an odd number of cache lines, so that
    /// the rows of a batch do not fall on the same few sets of a cache.
    pub(crate) const fn stride(&self) -> usize {
        stride(self.cols)
    }

    /// Tiles of columns, the last padded with zeros.
    pub(crate) const fn tiles(&self) -> usize {
        self.cols.div_ceil(TILE_COLS)
    }

    /// Activation scales of a token.
    pub(crate) const fn groups(&self) -> usize {
        self.cols.div_ceil(GROUP)
    }

    pub(crate) fn make_narrow(
        &mut self,
        values: &[f32],
        vectors: &Vectors,
        team: &Team<'_>,
        panel: Option<Interleave>,
    ) {
        let cols = self.cols;
        let token = |t: usize| &values[t * cols..][..cols];
        if panel == Some(Interleave::Pairs) {
            return self.narrow.make_pairs(vectors, cols, self.batch, team, token);
        }
        self.narrow.make(cols, self.batch, team, |t, to| vectors.narrow(token(t), to));
        match panel {
            Some(Interleave::Eights) => self.narrow.pack(cols, self.batch, team),
            Some(Interleave::EvenOdd) => self.narrow.split(cols, self.batch),
            _ => {}
        }
    }

    pub(crate) fn make_wide(
        &mut self,
        values: &[f32],
        vectors: &Vectors,
        team: &Team<'_>,
        panel: Option<Interleave>,
    ) {
        debug_assert!(
            panel.is_none_or(|panel| panel == Interleave::Eights),
            "the others are of the int8 grid"
        );
        let cols = self.cols;
        let token = |t: usize| &values[t * cols..][..cols];
        self.wide.make(cols, self.batch, team, |t, to| vectors.wide(token(t), to));
        if panel.is_some() {
            self.wide.pack(cols, self.batch, team);
        }
    }

    /// The panel of a call whose first token is `token`, for the segment from tile `start` on.
    pub(crate) fn panel(&self, grid: Grid, start: usize, token: usize, interleave: Interleave) -> Panel<'_> {
        if interleave == Interleave::EvenOdd {
            let stride = even_odd_row(self.cols);
            return Panel {
                pieces: &self.narrow.even_odd[token * stride..],
                stride,
                first: start * TILE_COLS / 8,
            };
        }
        let (all, per_tile) = match grid {
            Grid::I8 => (&self.narrow.panel, TILE_COLS / 4),
            Grid::I16 => (&self.wide.panel, TILE_COLS / 2),
        };
        let stride = self.tiles() * per_tile;
        Panel { pieces: &all[token * stride..], stride, first: start * per_tile }
    }
}

pub(crate) const fn stride(cols: usize) -> usize {
    (cols.div_ceil(64) | 1) * 64
}

impl<T: Copy + Default + bytemuck::Pod + Sync> Form<T> {
    /// Makes room for all tokens and calls `round(token, ...)` with the part of each.
    fn make(
        &mut self,
        cols: usize,
        batch: usize,
        team: &Team<'_>,
        round: impl Fn(usize, Rounded<'_, T>) + Sync,
    ) where
        T: Send,
    {
        if self.ready {
            return;
        }
        let (tiles, groups, stride) = (cols.div_ceil(TILE_COLS), cols.div_ceil(GROUP), stride(cols));
        // A microkernel that takes `Interleave::Rows` reads whole groups of them.
        let room = if batch == 1 { stride } else { batch.next_multiple_of(ROWS) * stride + ROW_OVERREAD };
        self.ints.renew(room);
        self.scales.resize(batch * groups, 0.0);
        self.sums.resize(batch * tiles, 0);
        let mut parts: Vec<_>;
        let tokens = self.ints.chunks_exact_mut(stride);
        let tokens = tokens.zip(self.scales.chunks_exact_mut(groups)).zip(self.sums.chunks_exact_mut(tiles));
        let tokens = tokens.map(|((ints, scales), sums)| {
            let (ints, behind) = ints.split_at_mut(tiles * TILE_COLS);
            behind.fill(T::default());
            Rounded { ints, scales, sums }
        });
        if batch < PARALLEL || team.threads() == 1 {
            tokens.enumerate().for_each(|(token, to)| round(token, to));
        } else {
            parts = tokens.map(Some).collect();
            team.chunks(&mut parts, 1, |token, to| round(token, to[0].take().expect("taken once")));
        }
        self.ready = true;
    }

    /// Lays the integers out as a panel of eights.
    fn pack(&mut self, cols: usize, batch: usize, team: &Team<'_>) {
        if self.packed == Some(Interleave::Eights) {
            return;
        }
        let tiles = cols.div_ceil(TILE_COLS) * TILE_COLS;
        let (pieces, stride) = (tiles * size_of::<T>() / 4, stride(cols));
        self.panel.renew(batch * pieces);
        let ints = &self.ints;
        let row = |token: usize| bytemuck::cast_slice::<T, [u8; 4]>(&ints[token * stride..][..tiles]);
        team.chunks(&mut self.panel, PANEL_TOKENS * pieces, |group, panel| {
            let first = group * PANEL_TOKENS;
            panel_groups(panel.len() / pieces, |from, size| {
                let panel = &mut panel[from * pieces..][..size * pieces];
                for t in 0..size {
                    let to = panel[t..].iter_mut().step_by(size);
                    to.zip(row(first + from + t)).for_each(|(to, piece)| *to = i32::from_ne_bytes(*piece));
                }
            });
        });
        self.packed = Some(Interleave::Eights);
    }
}

/// Pieces of a row of [`Interleave::EvenOdd`]: two halves of whole cache lines.
const fn even_odd_row(cols: usize) -> usize {
    2 * (cols.div_ceil(TILE_COLS) * TILE_COLS / 8).next_multiple_of(16)
}

impl Form<i8> {
    /// Lays the integers out as [`Interleave::EvenOdd`]; what is behind the pieces of a row is not
    /// written, nor met by weights.
    fn split(&mut self, cols: usize, batch: usize) {
        if self.split {
            return;
        }
        let (room, stride, row) = (cols.div_ceil(TILE_COLS) * TILE_COLS, stride(cols), even_odd_row(cols));
        self.even_odd.renew(batch * row + TILE_COLS);
        for (token, to) in self.even_odd.chunks_exact_mut(row).take(batch).enumerate() {
            let (even, odd) = to.split_at_mut(row / 2);
            let from = bytemuck::cast_slice::<i8, [[u8; 4]; 2]>(&self.ints[token * stride..][..room]);
            for ((even, odd), [a, b]) in even.iter_mut().zip(odd).zip(from) {
                (*even, *odd) = (i32::from_ne_bytes(*a), i32::from_ne_bytes(*b));
            }
        }
        self.split = true;
    }

    /// Rounds all tokens straight into a panel of pairs: the integers exist nowhere else.
    fn make_pairs<'a>(
        &mut self,
        vectors: &Vectors,
        cols: usize,
        batch: usize,
        team: &Team<'_>,
        token: impl Fn(usize) -> &'a [f32] + Sync,
    ) {
        if self.packed == Some(Interleave::Pairs) {
            return;
        }
        let (tiles, groups) = (cols.div_ceil(TILE_COLS), cols.div_ceil(GROUP));
        let room = tiles * TILE_COLS;
        self.panel.renew(batch * room / 4);
        self.scales.resize(batch * groups, 0.0);
        self.sums.resize(batch * tiles, 0);
        let panel = bytemuck::cast_slice_mut::<i32, i8>(&mut self.panel).chunks_mut(2 * room);
        let pairs = panel.zip(self.scales.chunks_mut(2 * groups)).zip(self.sums.chunks_mut(2 * tiles));
        let round = |pair: usize, panel: &mut [i8], scales: &mut [f32], sums: &mut [i32]| {
            let of = scales.chunks_exact_mut(groups).zip(sums.chunks_exact_mut(tiles)).enumerate();
            let alone = panel.len() == room;
            for (t, (scales, sums)) in of {
                let values = token(2 * pair + t);
                if alone {
                    vectors.narrow(values, Rounded { ints: &mut *panel, scales, sums });
                } else {
                    let ints = &mut panel[t * PIECE..][..2 * room - PIECE];
                    vectors.narrow_pair(values, Rounded { ints, scales, sums });
                }
            }
        };
        if batch < PARALLEL || team.threads() == 1 {
            pairs.enumerate().for_each(|(pair, ((panel, scales), sums))| round(pair, panel, scales, sums));
        } else {
            let mut parts: Vec<_> = pairs.collect();
            team.chunks(&mut parts, 1, |pair, to| {
                let ((panel, scales), sums) = &mut to[0];
                round(pair, panel, scales, sums);
            });
        }
        self.packed = Some(Interleave::Pairs);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_are_the_nearest_and_stay_in_range() {
        let cols = 300;
        let x: Vec<f32> = (0..2 * cols).map(|i| ((i * 7919 % 1000) as f32 - 500.0) * 0.37).collect();
        let mut a = Activations::new();
        a.set(&x, cols).unwrap();
        a.make_narrow(&x, &Vectors::scalar(), &Team::alone(), Some(Interleave::Eights));
        a.make_wide(&x, &Vectors::scalar(), &Team::alone(), Some(Interleave::Eights));
        assert!(a.narrow.ints.len() >= 2 * 320, "padded");
        let mut extremes = 0;
        for token in 0..2 {
            for c in 0..cols {
                let scale = a.narrow.scales[token * 2 + c / 256];
                let int = a.narrow.ints[token * 320 + c];
                assert!(
                    (x[token * cols + c] - f32::from(int) * scale).abs() <= 0.5001 * scale,
                    "int8 {token},{c}"
                );
                assert!(int != -128, "symmetric");
                extremes += i32::from(int.abs() == 127);
                let scale = a.wide.scales[token * 2 + c / 256];
                let int = a.wide.ints[token * 320 + c];
                assert!(
                    (x[token * cols + c] - f32::from(int) * scale).abs() <= 0.5001 * scale,
                    "int16 {token},{c}"
                );
                assert!(int.abs() <= 1023, "range");
            }
            assert_eq!(a.narrow.ints[token * 320 + 300..][..4], [0; 4], "padding");
        }
        assert!(extremes >= 4, "each group reaches 127");
        let sum: i32 = a.narrow.ints[..16].iter().map(|&i| i32::from(i)).sum();
        assert_eq!(a.narrow.sums[0], sum);
    }

    #[test]
    fn panels_hold_the_same_integers() {
        for cols in [1, 8, 9, 16, 255, 256, 300, 1000] {
            for batch in [2, 3, 5, 17] {
                let mut x: Vec<f32> =
                    (0..batch * cols).map(|i| ((i * 7919 % 1000) as f32 - 500.0) * 0.37).collect();
                x[cols / 2] = f32::NAN;
                let (mut a, mut b) = (Activations::new(), Activations::new());
                a.set(&x, cols).unwrap();
                b.set(&x, cols).unwrap();
                // What was there before does not show.
                b.narrow.panel.renew(10_000);
                b.narrow.panel.fill(77);
                a.make_narrow(&x, &Vectors::scalar(), &Team::alone(), None);
                b.make_narrow(&x, &Vectors::scalar(), &Team::alone(), Some(Interleave::Pairs));
                assert_eq!(a.narrow.sums, b.narrow.sums, "sums");
                assert!(
                    a.narrow.scales.iter().zip(&b.narrow.scales).all(|(a, b)| a.to_bits() == b.to_bits())
                );
                let (room, ints) = (a.tiles() * TILE_COLS, &a.narrow.ints);
                let panel = bytemuck::cast_slice::<i32, i8>(&b.narrow.panel);
                for token in 0..batch {
                    for c in 0..room {
                        let group = token / 2 * 2;
                        let size = 2.min(batch - group);
                        let at = group * room + (c / PIECE * size + token - group) * PIECE + c % PIECE;
                        assert_eq!(panel[at], ints[token * a.stride() + c], "{cols} {batch} {token} {c}");
                    }
                }
                assert!(!b.narrow.ready, "no second copy");
                b.forget();
                b.make_narrow(&x, &Vectors::scalar(), &Team::alone(), Some(Interleave::EvenOdd));
                let row = 2 * (room / 2).next_multiple_of(64);
                let panel = bytemuck::cast_slice::<i32, i8>(&b.narrow.even_odd);
                for token in 0..batch {
                    for c in 0..room {
                        let at = token * row + c / 4 % 2 * (row / 2) + c / 8 * 4 + c % 4;
                        assert_eq!(
                            panel[at],
                            ints[token * a.stride() + c],
                            "{cols} {batch} {token} {c}, even and odd"
                        );
                    }
                }
                assert!(panel.len() >= batch * row + 64, "room behind the last piece");
                b.forget();
                b.make_narrow(&x, &Vectors::scalar(), &Team::alone(), Some(Interleave::Pairs));
                assert!(!b.narrow.ready, "no second copy");
                b.make_narrow(&x, &Vectors::scalar(), &Team::alone(), None);
                assert_eq!(*a.narrow.ints, *b.narrow.ints, "made when wanted");
            }
        }
    }

    #[test]
    fn absurd_values_have_a_defined_meaning() {
        let mut a = Activations::new();
        for (bad, check) in [
            (f32::NAN, f32::is_nan as fn(f32) -> bool),
            (f32::INFINITY, f32::is_infinite),
            (f32::NEG_INFINITY, f32::is_infinite),
            (1e-38, |s| s == 0.0),
            (f32::MAX, f32::is_finite),
        ] {
            let mut x = [0.0; 16];
            x[3] = bad;
            a.set(&x, 16).unwrap();
            a.make_narrow(&x, &Vectors::scalar(), &Team::alone(), Some(Interleave::Eights));
            a.make_wide(&x, &Vectors::scalar(), &Team::alone(), Some(Interleave::Eights));
            assert!(
                check(a.narrow.scales[0]) && check(a.wide.scales[0]),
                "{bad}: scale {}",
                a.narrow.scales[0]
            );
        }
        assert_eq!(a.narrow.ints[3], 127);
        assert_eq!(a.wide.ints[3], 1023);
        assert!(a.set(&[], 16).is_err() && a.set(&[1.0], 0).is_err() && a.set(&[1.0; 17], 16).is_err());
    }
}
