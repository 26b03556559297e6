//! The cases that every microkernel is checked on, and seeded inputs for them.
//!
//! Parity class of the family: exact. Integer sums are exact and the floating-point epilogue has
//! one order of operations (see [`Args`](crate::Args)), so a microkernel agrees with the scalar
//! reference bit for bit.

pub mod vectors;

use crate::{
    Activations, BandedMatrix, Group, Kernels, Operand, PackedMatrix, Precision, RowsOf, matmul,
    matmul_gated_with, matmul_groups_with, matmul_rows_with, matmul_together_with,
    vectors::{Gate, Vectors},
    with_team,
};
use fracbit_base::{Code, Scheme, Shape};
use fracbit_format::{
    BitWriter, Codebook, Grid, Grouping, Index, Layout, PackedError, PackedView, PiecewiseLinear, Planes,
    SchemeSpec, TwoLevel, quarter_turns, read_bits,
};
use half::f16;

/// One product to check.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// Tokens.
    pub batch: usize,
    /// Columns of a weight scale.
    pub group: usize,
    /// What it is there for.
    pub why: &'static str,
}

/// The table of cases.
pub const CASES: &[Case] = &[
    Case { rows: 16, cols: 16, batch: 1, group: 16, why: "one tile" },
    Case { rows: 1, cols: 1, batch: 1, group: 16, why: "one weight" },
    Case { rows: 16, cols: 256, batch: 1, group: 256, why: "one block" },
    Case {
        rows: 35,
        cols: 272,
        batch: 1,
        group: 272,
        why: "odd strip count, block of one tile, padded rows",
    },
    Case { rows: 33, cols: 1000, batch: 2, group: 1008, why: "padded columns, one scale per row" },
    Case { rows: 40, cols: 520, batch: 3, group: 64, why: "scales of 64 columns" },
    Case { rows: 48, cols: 600, batch: 5, group: 80, why: "scales that cross activation scales" },
    Case { rows: 34, cols: 700, batch: 8, group: 704, why: "the most tokens of the decode path" },
    Case { rows: 280, cols: 144, batch: 6, group: 144, why: "more strips than one call of few tokens takes" },
    Case { rows: 64, cols: 304, batch: 9, group: 128, why: "just past the decode path" },
    Case { rows: 50, cols: 336, batch: 21, group: 512, why: "token remainder of the prefill path" },
    Case { rows: 40, cols: 320, batch: 1, group: 32, why: "scales of two tiles" },
    Case {
        rows: 33,
        cols: 1088,
        batch: 17,
        group: 32,
        why: "scales of two tiles, many blocks, an odd token",
    },
    Case {
        rows: 18,
        cols: 80,
        batch: 515,
        group: 64,
        why: "more tokens than one call takes, and few in the last",
    },
];

/// The largest magnitudes of table entries to try: those of the grids that the scheme's tables are
/// made on.
#[must_use]
pub fn grids(scheme: Scheme) -> &'static [i16] {
    let wide = |s| SchemeSpec::of(s).table.is_some_and(|table| table.grids.contains(&Grid::I16));
    let wide = scheme.tables().any(wide);
    if wide { &[127, 32_767] } else { &[127] }
}

/// All sets of codebooks to try for a scheme: every grid, every length; for trellises of magnitudes
/// such as are never negative and such as are ramps, for pairs such as are a quarter and its turns,
/// and for additive codebooks such as a Psumbook takes, too.
#[must_use]
pub fn tables(scheme: Scheme) -> Vec<Vec<Codebook>> {
    let lengths = scheme.tables().map(|s| table_lengths(s).len()).max().unwrap_or(1);
    let all = grids(scheme).iter().flat_map(|&most| (0..lengths).map(move |nth| (nth, most)));
    let mut all: Vec<_> = all.map(|(nth, most)| codebooks(scheme, nth, most)).collect();
    if matches!(scheme.code(), Some(Code::Fine | Code::Fast)) {
        for layers in [None, Some([7, 9]), Some([0, 5]), Some([0, 0])] {
            let book = |scheme, length| magnitudes(scheme, length, layers);
            all.extend((0..lengths).map(|nth| each_table(scheme, nth, book)));
        }
        all.extend([63, 62].map(|mask| each_table(scheme, 0, |s, _| ramped(s, mask))));
    }
    if Codebook::may_be_turned(scheme) {
        all.push(vec![turned(scheme)]);
    }
    if scheme.family_name() == "nuq" && scheme.quarters() == 32 {
        // Fewer values, repeated: what is read of nested codes.
        for few in [32, 64, 128] {
            let entries = codebook(scheme, 256, 127).entries()[256 - few..].repeat(256 / few);
            all.push(vec![Codebook::new(scheme, entries, 0.01).expect("as many entries")]);
        }
    }
    if all.iter().flatten().any(|book| book.additive().is_some()) {
        all.push(vec![centroids(scheme)]);
    }
    all
}

/// The product of a packed matrix and activations, (batch, rows), on `kernels`.
///
/// # Panics
/// When the parts of `packed` or the columns of `x` do not fit.
#[must_use]
pub fn product(kernels: &Kernels, packed: &Packed, x: &mut Activations) -> Vec<f32> {
    let w = PackedMatrix::new(kernels, &packed.view().expect("parts that fit"));
    let mut y = vec![f32::NAN; x.batch() * w.shape().rows];
    matmul(&w, x, &mut y).expect("shapes that fit");
    y
}

/// Checks that a gate and its factor in one product are what they are apart, bit for bit, for
/// `batch` tokens.
///
/// # Panics
/// When they are not, or when the matrices differ in shape.
pub fn check_gated(gate: &RowsOf<'_>, up: &RowsOf<'_>, batch: usize, what: &str) {
    let Shape { cols, .. } = gate.matrix().shape();
    let input = activations(batch * cols, 7);
    let mut x = Activations::new();
    x.announce(&input, cols).expect("whole tokens");
    let mut product = |rows: &RowsOf<'_>| {
        let mut y = vec![f32::NAN; batch * rows.rows()];
        with_team(|team| matmul_rows_with(team, rows.clone(), &input, &mut x, &mut y))
            .expect("lengths that fit");
        y
    };
    let (first, factor) = (product(gate), product(up));
    // With the integer forms of the products above, and with forms made anew.
    for (anew, kind) in [(false, Gate::Silu), (true, Gate::GeluTanh)] {
        if anew {
            x.announce(&input, cols).expect("whole tokens");
        }
        let mut want = first.clone();
        Vectors::scalar().gate_mul(kind, &mut want, &factor);
        let mut got = vec![f32::NAN; want.len()];
        let both = [gate.clone(), up.clone()];
        with_team(|team| matmul_gated_with(team, kind, both, &input, &mut x, &mut got))
            .expect("lengths that fit");
        assert_same(&want, &got, &format!("{what}: {batch} tokens, {kind:?}, forms made anew: {anew}"));
    }
}

/// Checks that products of groups, up to the most tokens that one may have, are those of each group
/// alone: `gate` and `up` are the first pieces of their matrices, with `pieces` in each.
///
/// # Panics
/// When a number has other bits; names `what`.
pub fn check_groups(gate: &RowsOf<'_>, up: &RowsOf<'_>, pieces: usize, what: &str) {
    let (Shape { cols, .. }, rows) = (gate.matrix().shape(), gate.rows());
    let most = gate.group_tokens().min(up.group_tokens());
    assert!(most > 0, "{what}: one token is never interleaved");
    let (mut groups, mut end) = (Vec::new(), 0);
    for (i, tokens) in (1..=most).chain([1, most]).enumerate() {
        // Not in the order of the pieces, and some twice.
        groups.push(Group { piece: (5 * i + 2) % pieces, tokens: end..end + tokens });
        end += tokens;
    }
    let input = activations(end * cols, 11);
    let (mut x, mut alone) = (Activations::new(), Activations::new());
    let mut gated = vec![f32::NAN; end * rows];
    let mut plain = gated.clone();
    x.announce(&input, cols).expect("whole tokens");
    with_team(|team| {
        let both = [gate.clone(), up.clone()];
        matmul_groups_with(team, (&both, Gate::Silu), &groups, &input, &mut x, &mut gated)?;
        matmul_groups_with(team, (&both[1..], Gate::Silu), &groups, &input, &mut x, &mut plain)
    })
    .expect("groups that fit");
    for Group { piece, tokens } in &groups {
        let input = &input[tokens.start * cols..tokens.end * cols];
        let both = [gate, up].map(|first| first.piece(*piece).expect("a piece of the matrix"));
        let mut want = vec![f32::NAN; tokens.len() * rows];
        alone.announce(input, cols).expect("whole tokens");
        let mine = tokens.start * rows..tokens.end * rows;
        with_team(|team| matmul_rows_with(team, both[1].clone(), input, &mut alone, &mut want))
            .expect("rows");
        assert_same(&want, &plain[mine.clone()], &format!("{what}: tokens {tokens:?} of piece {piece}"));
        with_team(|team| matmul_gated_with(team, Gate::Silu, both, input, &mut alone, &mut want))
            .expect("rows");
        assert_same(&want, &gated[mine], &format!("{what}: tokens {tokens:?} of gate {piece}"));
    }
}

/// A matrix with these bands, a row of each in turn while they last.
///
/// # Panics
/// When columns differ, or there are none or too many.
#[must_use]
pub fn banded(bands: Vec<PackedMatrix>) -> BandedMatrix {
    let most = bands.iter().map(|band| band.shape().rows).max().unwrap_or(0);
    let turn = |row| (0..).zip(&bands).filter(move |(_, band)| row < band.shape().rows).map(|(i, _)| i);
    let band_of: Vec<u8> = (0..most).flat_map(turn).collect();
    BandedMatrix::new(bands, &band_of).expect("bands that fit")
}

/// Checks that products of matrices and of a banded one in one loop have the bits of one product
/// for each.
///
/// # Panics
/// When they do not.
pub fn check_together(whole: &RowsOf<'_>, banded: &BandedMatrix, batch: usize, what: &str) {
    let Shape { rows, cols } = banded.shape();
    let input = activations(batch * cols, 13);
    let (mut x, mut alone) = (Activations::new(), Activations::new());
    x.announce(&input, cols).expect("whole tokens");
    alone.announce(&input, cols).expect("whole tokens");
    let [mut first, mut last] = [0; 2].map(|_| vec![f32::NAN; batch * whole.rows()]);
    let mut mixed = vec![f32::NAN; batch * rows];
    let banded_operand = Operand::Banded(banded, Precision::FULL);
    let products = [
        (Operand::Rows(whole.clone()), &mut first[..]),
        (banded_operand, &mut mixed[..]),
        (Operand::Rows(whole.clone()), &mut last[..]),
    ];
    with_team(|team| matmul_together_with(team, products, &input, &mut x)).expect("products that fit");
    let mut product = |of: RowsOf<'_>| {
        let mut y = vec![f32::NAN; batch * of.rows()];
        with_team(|team| matmul_rows_with(team, of, &input, &mut alone, &mut y)).expect("rows");
        y
    };
    let want = product(whole.clone());
    assert_same(&want, &first, &format!("{what}: the first of {batch} tokens"));
    assert_same(&want, &last, &format!("{what}: the last of {batch} tokens"));
    for (band, members) in banded.parts() {
        let (want, members) = (product(RowsOf::all(band)), members.get());
        let own = mixed.chunks_exact(rows).flat_map(|y| members.iter().map(|&row| y[row as usize]));
        let what = format!("{what}: a band of {} rows, {batch} tokens", members.len());
        assert_same(&want, &own.collect::<Vec<_>>(), &what);
    }
}

/// Checks on some cases that products of nested scalar codes have the reference's bits at every
/// precision, which are those of the matrix that is left of it there.
///
/// # Panics
/// When they do not.
pub fn check_nested(kernels: &Kernels, cases: &[Case], what: &str) {
    let at = |kernels: &Kernels, packed: &Packed, input: &[f32], precision| {
        let w = PackedMatrix::new(kernels, &packed.view().expect("parts that fit"));
        let rows = RowsOf::all(&w).at(precision);
        let cols = packed.shape.cols;
        let mut y = vec![f32::NAN; input.len() / cols * rows.rows()];
        let mut x = Activations::new();
        x.announce(input, cols).expect("whole tokens");
        with_team(|team| matmul_rows_with(team, rows, input, &mut x, &mut y)).expect("shapes that fit");
        let mut weights = vec![0.0; packed.shape.cols];
        w.row_at(packed.shape.rows - 1, precision, &mut weights);
        (y, weights)
    };
    for (seed, name) in (0..).zip(["nest-nuq-2..8", "nest-nuq-3..4", "nest-nuq-4..7", "nest-nuq-2..2"]) {
        let scheme: Scheme = name.parse().expect("a scheme");
        for &Case { rows, cols, batch, group, why } in cases {
            let packed =
                Packed::random(scheme, Shape::new(rows, cols), codebooks(scheme, 0, 127), group, seed);
            let input = activations(batch * cols, seed);
            for rate in scheme.precisions() {
                let precision = Precision::at_most(rate);
                let (want, row) = at(&Kernels::scalar(), &packed, &input, precision);
                let (got, own_row) = at(kernels, &packed, &input, precision);
                let what =
                    format!("{what}: {name} at {} bits, {rows}x{cols} batch {batch} ({why})", rate.bits());
                assert_same(&want, &got, &what);
                assert_same(&row, &own_row, &what);
                let (left, left_row) = at(kernels, &packed.left(scheme.at(rate)), &input, Precision::FULL);
                assert_same(&want, &left, &format!("{what}, alone"));
                assert_same(&row, &left_row, &format!("{what}, alone"));
            }
        }
    }
}

/// Checks that results agree bit for bit; one NaN is as good as another.
///
/// # Panics
/// When they do not; names `what` and the place.
#[track_caller]
pub fn assert_same(want: &[f32], got: &[f32], what: &str) {
    assert_eq!(want.len(), got.len(), "{what}");
    for (i, (w, g)) in want.iter().zip(got).enumerate() {
        let same = w.to_bits() == g.to_bits() || (w.is_nan() && g.is_nan());
        assert!(same, "{what}: output {i} is {g}, the reference has {w}");
    }
}

/// Table lengths that a scheme's codebook may have (one of several components has none of its own),
/// those of less than a register last where there are others.
#[must_use]
pub fn table_lengths(scheme: Scheme) -> Vec<usize> {
    let mut lengths = SchemeSpec::of(scheme).table.map_or(Vec::new(), |table| table.lengths);
    lengths.sort_by_key(|&n| n < 16);
    lengths
}

/// A codebook with pseudo-random entries of magnitude up to `most`, both extremes among them (plain
/// integers are their own table).
///
/// # Panics
/// When `length` is not one of [`table_lengths`] or `most` is not positive.
#[must_use]
pub fn codebook(scheme: Scheme, length: usize, most: i16) -> Codebook {
    let mut random = Random::new(length as u64 ^ u64::from(scheme.quarters()) << 32);
    let index = SchemeSpec::of(scheme).table.and_then(|table| table.index);
    // Where entries are added, their sums reach `most`, or nearly.
    let most = index.map_or(most, |index| most / i16::try_from(index.count).expect("a few"));
    let mut entries: Vec<i16> = (0..length)
        .map(|_| i16::try_from(i64::from(random.next() >> 1) % (2 * i64::from(most) + 1) - i64::from(most)))
        .collect::<Result<_, _>>()
        .expect("at most `most` in magnitude");
    entries[0] = most;
    entries[length - 1] = -most;
    if let Some(integers) = (0..length).map(|code| Codebook::integer(scheme, code)).collect() {
        entries = integers;
    }
    Codebook::new(scheme, entries, 0.01 * 127.0 / f32::from(most)).expect("a length of the scheme")
}

/// A codebook of magnitudes from 0 to 127, both among them; with layers and these first entries, if
/// they are given.
///
/// # Panics
/// When `length` is not one of [`table_lengths`] of a trellis scheme.
#[must_use]
pub fn magnitudes(scheme: Scheme, length: usize, layers: Option<[i16; 2]>) -> Codebook {
    let mut random = Random::new(length as u64 ^ 1);
    let mut below = |most: u32| i16::try_from(random.next() % (most + 1)).expect("small");
    let mut coarse: [i16; 16] = std::array::from_fn(|_| below(64));
    let mut fine: [i16; 16] = std::array::from_fn(|_| below(63));
    if let Some([first, second]) = layers {
        (coarse[0], fine[0], fine[1]) = (first, 0, second - first);
    }
    let mut entries: Vec<i16> = (0..length)
        .map(|x| match layers.is_some() && x < TwoLevel::free(length) {
            true => coarse[x / (length / 16)] + fine[x % 16],
            false => below(127),
        })
        .collect();
    (entries[length - 2], entries[length - 1]) = (0, 127);
    let book = Codebook::new(scheme, entries, 0.01).expect("a length of the scheme");
    assert_eq!(book.two_level().is_some(), layers.is_some(), "{scheme}, {length} entries");
    book
}

/// A codebook of magnitudes that are a [`PiecewiseLinear`] with this mask, 0 and 127 among them.
///
/// # Panics
/// When `scheme` is no trellis scheme of one sign a weight.
#[must_use]
pub fn ramped(scheme: Scheme, mask: u8) -> Codebook {
    let mut random = Random::new(u64::from(mask));
    let mut ends: [i16; PiecewiseLinear::LEN] =
        std::array::from_fn(|_| i16::try_from(random.next() % 128).expect("small"));
    (ends[PiecewiseLinear::FREE], ends[PiecewiseLinear::LEN - 2]) = (0, 127);
    let entry = |x: usize| if x < PiecewiseLinear::FREE { PiecewiseLinear::at(x) } else { ends[x] };
    let entries = (0..PiecewiseLinear::LEN).map(|x| entry(x & usize::from(mask))).collect();
    let book = Codebook::new(scheme, entries, 0.01).expect("a length of the scheme");
    assert_eq!(book.piecewise_linear(), Some(PiecewiseLinear { mask }), "{scheme}");
    book
}

/// A codebook of pairs that is a [quarter](Codebook::quarter) and its turns, with 0 and 127 among
/// the numbers.
///
/// # Panics
/// When `scheme` has no such codebook.
#[must_use]
pub fn turned(scheme: Scheme) -> Codebook {
    let mut random = Random::new(u64::from(scheme.quarters()));
    let pairs = 1usize << (scheme.quarters() / 2);
    let mut quarter: Vec<[i16; 2]> = (0..pairs / 4)
        .map(|_| [(); 2].map(|()| i16::try_from(random.next() % 128).expect("small")))
        .collect();
    (quarter[0], quarter[pairs / 4 - 1]) = ([0, 127], [127, 1]);
    let entries = (0..4).flat_map(|turns| quarter.iter().flat_map(move |&pair| quarter_turns(pair, turns)));
    let book = Codebook::new(scheme, entries.collect(), 0.01).expect("a length of the scheme");
    assert!(book.quarter().is_some(), "{scheme}");
    book
}

/// Additive codebooks whose partial sums fit 16 bits, the largest and the smallest among them, with
/// activations of 127 in magnitude.
///
/// # Panics
/// When `scheme` has no additive codebooks.
#[must_use]
pub fn centroids(scheme: Scheme) -> Codebook {
    let index = SchemeSpec::of(scheme).table.and_then(|table| table.index);
    let Index { weights, count, bits } = index.expect("codes that are indices");
    let (most, room) = (127 / count, 32_767 / 127);
    let mut random = Random::new(u64::from(scheme.quarters()));
    let mut entries: Vec<i16> = Vec::new();
    let each = 1 << bits;
    for i in 0..count * each {
        let mut left = room;
        for _ in 0..weights {
            // Two of a codebook take what there is.
            let most = most.min(left);
            let far = i % (each / 2) == 0;
            let magnitude = if far { most } else { random.next() as usize % (most + 1) };
            left -= magnitude;
            let magnitude = i16::try_from(magnitude).expect("small");
            let negative = if far { i % each > 0 } else { random.next() & 64 > 0 };
            entries.push(if negative { -magnitude } else { magnitude });
        }
    }
    Codebook::new(scheme, entries, 0.01).expect("centroids whose sums are within the grid")
}

/// Codebooks of every segment of `scheme`, as [`codebook`] makes them, with the `nth` allowed
/// length of each.
#[must_use]
pub fn codebooks(scheme: Scheme, nth: usize, most: i16) -> Vec<Codebook> {
    each_table(scheme, nth, |s, length| codebook(s, length, most))
}

/// A codebook that `make` makes for every table of `scheme`, of the `nth` allowed length of each.
fn each_table(scheme: Scheme, nth: usize, make: impl Fn(Scheme, usize) -> Codebook) -> Vec<Codebook> {
    let make = |s: Scheme| {
        let lengths = table_lengths(s);
        make(s, lengths[nth % lengths.len()])
    };
    scheme.tables().map(make).collect()
}

/// The parts of a packed matrix with pseudo-random codes and scales.
#[derive(Clone, Debug)]
pub struct Packed {
    /// Scheme.
    pub scheme: Scheme,
    /// Shape.
    pub shape: Shape,
    /// A codebook for each segment of the layout.
    pub codebooks: Vec<Codebook>,
    /// Codes.
    pub codes: Vec<u8>,
    /// Integer scales and zeros of a progressive scheme.
    pub second_level: Vec<u8>,
    /// Scales.
    pub scales: Vec<f16>,
    /// Columns of a scale.
    pub group: usize,
}

impl Packed {
    /// Pseudo-random codes and scales around 1. A progressive scheme has a scale a row, whatever
    /// `group` says.
    ///
    /// # Panics
    /// When `group` is zero.
    #[must_use]
    pub fn random(scheme: Scheme, shape: Shape, codebooks: Vec<Codebook>, group: usize, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let second_level = SchemeSpec::of(scheme).second_level;
        let group = if second_level.is_some() { Grouping::Row.columns(shape.cols) } else { group };
        let seconds = second_level.map_or(0, |groups| shape.rows * groups.groups(shape.cols));
        let mut codes = vec![0; Layout::new(scheme, shape).len()];
        for chunk in codes.chunks_mut(4) {
            chunk.copy_from_slice(&random.next().to_le_bytes()[..chunk.len()]);
        }
        let scales = scheme.planes() * shape.rows * shape.cols.div_ceil(group);
        let scales = (0..scales).map(|_| f16::from_f32(0.5 + random.unit())).collect();
        // Of even seeds such that weights are bytes, -128 among them, as a quantizer makes them.
        let second = |byte: u8| match byte {
            _ if !seed.is_multiple_of(2) => byte,
            0x80.. => 0xf8,
            _ => byte,
        };
        let second_level = (0..seconds).map(|_| second(random.next().to_le_bytes()[3])).collect();
        Self { scheme, shape, codebooks, codes, second_level, scales, group }
    }

    /// What is left of a matrix of nested scalar codes in a scheme of fewer bits.
    fn left(&self, scheme: Scheme) -> Self {
        let [from, to] = [self.scheme, scheme].map(|s| usize::from(s.quarters() / 4));
        let mut codes = vec![0; self.codes.len() / from * to];
        let mut writer = BitWriter::new(&mut codes);
        let width = u32::try_from(to).expect("at most 8 bits");
        let count = self.codes.len() * 8 / from;
        (0..count).for_each(|i| writer.push(read_bits(&self.codes, i * from, width), width));
        let book = &self.codebooks[0];
        let entries = book.entries()[..table_lengths(scheme)[0]].to_vec();
        let codebooks = vec![Codebook::new(scheme, entries, book.step()).expect("the first tables")];
        Self { scheme, codebooks, codes, ..self.clone() }
    }

    /// The view that [`PackedMatrix::new`](crate::PackedMatrix::new) takes. A one-column-tile
    /// half-TCQ matrix has only the segment of the higher or lower rate; its codebook is picked by
    /// the layout.
    ///
    /// # Errors
    /// As [`PackedView::new`].
    pub fn view(&self) -> Result<PackedView<'_>, PackedError> {
        let layout = Layout::new(self.scheme, self.shape);
        let books: Vec<&Codebook> = layout
            .segments()
            .iter()
            .filter_map(|s| self.codebooks.iter().find(|c| c.scheme() == s.scheme))
            .collect();
        let Self { codes, second_level, scales, .. } = self;
        let gains = &[0.7, 0.2, 0.05][..self.scheme.planes()];
        let planes = Planes { codes, second_level, scales, gains };
        PackedView::new(self.scheme, self.shape, &books, planes, self.group)
    }
}

/// Pseudo-random activations in -1..1 with one value in each 100 four times as large.
#[must_use]
pub fn activations(len: usize, seed: u64) -> Vec<f32> {
    let mut random = Random::new(seed);
    (0..len).map(|i| (2.0 * random.unit() - 1.0) * if i % 100 == 7 { 4.0 } else { 1.0 }).collect()
}

/// A 64-bit linear congruential generator (Knuth's MMIX constants): inputs for tests need no more.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Starts at `seed`.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x1234_5678)
    }

    /// The next 32 bits.
    pub const fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as u32
    }

    /// A number in 0..1.
    pub fn unit(&mut self) -> f32 {
        #[expect(clippy::cast_precision_loss, reason = "24 bits fit")]
        {
            (self.next() >> 8) as f32 / (1 << 24) as f32
        }
    }
}
