//! The product: activations to integers, strips to threads.

use crate::{
    Activations, BANDS, BandedMatrix, Gate, PackedMatrix, Precision, Team,
    args::{MAX_STRIPS, MAX_TOKENS, ONE_TOKEN_STRIPS, PANEL_FROM, ROWS},
    banded::BandRows,
    linear::{Call, Input, Prepared},
    team::with_team,
};
use fracbit_base::ShapeError;
use fracbit_format::TILE_ROWS;
use std::{array, iter, marker::PhantomData, mem::MaybeUninit, ops::Range, slice};

/// Tasks for each thread: at the end of a loop a thread waits for half a task on average.
const TASKS: usize = 16;
/// Most products of [`matmul_together_with`]: queries, keys and values.
pub const TOGETHER: usize = 3;
/// Most packed matrices of one loop.
const PARTS: usize = TOGETHER * BANDS;
/// Most strips of a call for few tokens, whatever a kernel wants.
const MOST_STRIPS: usize = 4 * ONE_TOKEN_STRIPS;
/// Strips whose outputs are stored together when there are panels of tokens. The outputs of one
/// strip are 64 bytes in each token's row of `y`; rows are a power of two apart in most models, so
/// that such pieces fall on the same few sets of the caches: stored strip by strip they took 10 %
/// of a prefill.
const GATHER: usize = 4 * MAX_STRIPS;

/// `y = x W^T`: `x` is `(batch, cols)`, `y` is `(batch, rows)` row-major.
///
/// Rows are dealt to the threads of the current rayon pool; every sum is made by one thread in a
/// fixed order, so the result is the same at any number of threads and on every instruction set.
///
/// # Errors
/// When `x` has another width than `w`, or `y` another size than `batch x rows`.
pub fn matmul(w: &PackedMatrix, x: &mut Activations, y: &mut [f32]) -> Result<(), ShapeError> {
    with_team(|team| x.with_values(|values, x| matmul_with(team, w, values, x, y)))
}

/// As [`matmul`], on the threads of a team; `values` are those that `x` was [set](Activations::set)
/// to or that were [announced](Activations::announce).
///
/// # Errors
/// As there, and when `values` has another length than was announced.
pub fn matmul_with(
    team: &Team<'_>,
    w: &PackedMatrix,
    values: &[f32],
    x: &mut Activations,
    y: &mut [f32],
) -> Result<(), ShapeError> {
    matmul_rows_with(team, RowsOf::all(w), values, x, y)
}

/// Some rows of a matrix, from the start of a strip on, at a precision.
#[derive(Clone, Debug)]
pub struct RowsOf<'a> {
    matrix: &'a PackedMatrix,
    rows: Range<usize>,
    precision: Precision,
}

impl<'a> RowsOf<'a> {
    /// The whole matrix.
    #[must_use]
    pub const fn all(matrix: &'a PackedMatrix) -> Self {
        Self { matrix, rows: 0..matrix.shape().rows, precision: Precision::FULL }
    }

    /// The same rows at another precision than the full one.
    #[must_use]
    pub fn at(self, precision: Precision) -> Self {
        Self { precision, ..self }
    }

    /// `None` when the rows are not in the matrix or do not start with a strip of 16.
    #[must_use]
    pub fn new(matrix: &'a PackedMatrix, rows: Range<usize>) -> Option<Self> {
        let whole = rows.start.is_multiple_of(TILE_ROWS) && rows.start <= rows.end;
        (whole && rows.end <= matrix.shape().rows).then_some(Self { rows, ..Self::all(matrix) })
    }

    /// The matrix.
    #[must_use]
    pub const fn matrix(&self) -> &'a PackedMatrix {
        self.matrix
    }

    /// As many rows behind these, `index` times as far: an expert of a mixture. `None` as for
    /// [`RowsOf::new`].
    #[must_use]
    pub fn piece(&self, index: usize) -> Option<Self> {
        let start = index.checked_mul(self.rows.len())?.checked_add(self.rows.start)?;
        Some(Self::new(self.matrix, start..start.checked_add(self.rows.len())?)?.at(self.precision))
    }

    /// How many rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// Most tokens of a [`Group`]: those whose integers lie token by token.
    #[must_use]
    pub fn group_tokens(&self) -> usize {
        self.matrix.kernel().group_tokens(self.precision)
    }
}

/// As [`matmul_with`], for some rows of a matrix.
///
/// # Errors
/// As there.
pub fn matmul_rows_with(
    team: &Team<'_>,
    rows: RowsOf<'_>,
    values: &[f32],
    x: &mut Activations,
    y: &mut [f32],
) -> Result<(), ShapeError> {
    product(team, (rows, None), Gate::default(), &Group::whole(x), values, x, y)
}

/// `y = f(x G^T) * (x U^T)` with the function of `kind`, elementwise, for as many rows of a gate
/// and of its factor: of neither product more is ever there than what fits a cache.
///
/// # Errors
/// As [`matmul_with`], and when the numbers of rows differ.
pub fn matmul_gated_with(
    team: &Team<'_>,
    kind: Gate,
    gate_and_up: [RowsOf<'_>; 2],
    values: &[f32],
    x: &mut Activations,
    y: &mut [f32],
) -> Result<(), ShapeError> {
    let [gate, up] = gate_and_up;
    ShapeError::check_len("matmul", "rows of up", gate.rows.len(), up.rows.len())?;
    product(team, (gate, Some(up)), kind, &Group::whole(x), values, x, y)
}

/// Some tokens and the piece of a matrix that they meet, counted in pieces of as many rows each: an
/// expert of a mixture.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Group {
    /// Which piece.
    pub piece: usize,
    /// Tokens, consecutive ones.
    pub tokens: Range<usize>,
}

impl Group {
    /// All tokens and the first piece.
    fn whole(x: &Activations) -> [Self; 1] {
        [Self { piece: 0, tokens: 0..x.batch() }]
    }
}

/// As [`matmul_rows_with`] for one matrix and [`matmul_gated_with`] for a gate and its factor, with
/// other rows for each group of tokens, in one loop of the team: `first` are those of the first
/// piece, the others lie behind. The bits are those of one product for each group.
///
/// # Errors
/// As there; when the groups are not all tokens in their order, at most [`RowsOf::group_tokens`] in
/// each, or a piece is not in the matrix or does not end with a strip of 16.
pub fn matmul_groups_with(
    team: &Team<'_>,
    (first, kind): (&[RowsOf<'_>], Gate),
    groups: &[Group],
    values: &[f32],
    x: &mut Activations,
    y: &mut [f32],
) -> Result<(), ShapeError> {
    const OP: &str = "matmul of groups";
    let ([_] | [_, _]) = first else {
        return Err(ShapeError::new(OP, "matrices", "one, or a gate and its factor", first.len()));
    };
    ShapeError::check_len(OP, "rows of up", first[0].rows(), first[first.len() - 1].rows())?;
    let most = first.iter().map(RowsOf::group_tokens).min().unwrap_or(0);
    let mut end = 0;
    for Group { piece, tokens } in groups {
        if tokens.start != end || tokens.is_empty() || tokens.len() > most {
            let want = format!("1 to {most} tokens behind {end}");
            return Err(ShapeError::new(OP, "tokens of a group", want, format_args!("{tokens:?}")));
        }
        end = tokens.end;
        for of in first {
            if !of.rows().is_multiple_of(TILE_ROWS) || of.piece(*piece).is_none() {
                let want = format!("whole strips within {} rows", of.matrix.shape().rows);
                return Err(ShapeError::new(
                    OP,
                    "piece",
                    want,
                    format_args!("{piece} of {} rows", of.rows()),
                ));
            }
        }
    }
    ShapeError::check_len(OP, "tokens", x.batch(), end)?;
    product(team, (first[0].clone(), first.get(1).cloned()), kind, groups, values, x, y)
}

/// What an input is multiplied by.
#[derive(Clone, Debug)]
pub enum Operand<'a> {
    /// A matrix, or some rows of it.
    Rows(RowsOf<'a>),
    /// Rows that lie in several matrices.
    Banded(&'a BandedMatrix, Precision),
}

impl Operand<'_> {
    /// How many rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        match self {
            Self::Rows(rows) => rows.rows(),
            Self::Banded(banded, _) => banded.shape().rows,
        }
    }
}

impl<'a> From<RowsOf<'a>> for Operand<'a> {
    fn from(rows: RowsOf<'a>) -> Self {
        Self::Rows(rows)
    }
}

/// As [`matmul_rows_with`] for several products of one input, each with its own output, in one loop
/// of the team: its threads wait for each other once. The bits are those of one product for each.
///
/// # Errors
/// As there, and for more than [`TOGETHER`] products.
pub fn matmul_together_with<'a>(
    team: &Team<'_>,
    products: impl IntoIterator<Item = (Operand<'a>, &'a mut [f32])>,
    values: &[f32],
    x: &mut Activations,
) -> Result<(), ShapeError> {
    let mut parts = [const { None }; PARTS];
    let mut room = parts.iter_mut();
    let mut add = |of, y| *room.next().expect("room for all bands") = Some(Part::new((of, None), y));
    for (i, (of, y)) in products.into_iter().enumerate() {
        if i == TOGETHER {
            return Err(ShapeError::new(OP, "products", format_args!("up to {TOGETHER}"), "more"));
        }
        ShapeError::check_len(OP, "y", x.batch() * of.rows(), y.len())?;
        let whole = Output::new(y, of.rows());
        match of {
            Operand::Rows(of) => add(of, whole),
            Operand::Banded(of, precision) => {
                of.parts().for_each(|(band, rows)| add(RowsOf::all(band).at(precision), whole.at(rows)));
            }
        }
    }
    make_products(team, &parts, &Group::whole(x), values, x)
}

const OP: &str = "matmul";

/// Whether a matrix reads inputs of this width.
fn check(of: &RowsOf<'_>, x: &Activations) -> Result<(), ShapeError> {
    let cols = of.matrix.shape().cols;
    if x.cols() == cols {
        return Ok(());
    }
    Err(ShapeError::new(OP, "x", format_args!("(batch, {cols})"), format_args!("(batch, {})", x.cols())))
}

/// Prepares the input of a matrix, and says where its factors start.
fn prepare(
    of: &RowsOf<'_>,
    (values, together, most): (&[f32], usize, usize),
    x: &mut Activations,
    team: &Team<'_>,
) -> usize {
    let factors = x.block_scales.len();
    let input = Input { values, precision: of.precision, together, most };
    of.matrix.kernel().prepare(&input, &mut Prepared(x), team);
    factors
}

/// One matrix, or a gate and its factor.
fn product(
    team: &Team<'_>,
    of: (RowsOf<'_>, Option<RowsOf<'_>>),
    gate: Gate,
    groups: &[Group],
    values: &[f32],
    x: &mut Activations,
    y: &mut [f32],
) -> Result<(), ShapeError> {
    let rows = of.0.rows();
    ShapeError::check_len(OP, "y", x.batch() * rows, y.len())?;
    let part = Part { gate, ..Part::new(of, Output::new(y, rows)) };
    make_products(team, &[Some(part)], groups, values, x)
}

/// All products of one input, whose outputs have been checked to be of the input's tokens, in one
/// loop of the team.
fn make_products<const N: usize>(
    team: &Team<'_>,
    parts: &[Option<Part<'_>>; N],
    groups: &[Group],
    values: &[f32],
    x: &mut Activations,
) -> Result<(), ShapeError> {
    for of in parts.iter().flatten().flat_map(Part::of) {
        check(of, x)?;
    }
    ShapeError::check_len(OP, "x", x.batch() * x.cols(), values.len())?;
    let strips = groups.len() * parts.iter().flatten().map(Part::strips).sum::<usize>();
    if strips == 0 || x.batch() == 0 {
        return Ok(());
    }
    x.block_scales.clear();
    x.block_starts.clear();
    let together = groups.iter().map(|group| group.tokens.len()).max().unwrap_or(0);
    let mut factors = [[0; 2]; N];
    for (part, factors) in parts.iter().flatten().zip(&mut factors) {
        let most = part.call_tokens(together);
        for (of, factors) in part.of().zip(factors) {
            *factors = prepare(of, (values, together, most), x, team);
        }
    }
    let mut tasks = 0;
    let jobs: [Option<Job<'_>>; N] = array::from_fn(|i| {
        let part = parts[i].as_ref()?;
        let wide = part.call_strips(together, strips / team.threads());
        let each = task_strips(strips, team.threads(), task_unit(wide, together));
        let of_group = part.strips().div_ceil(each);
        let most = part.call_tokens(together);
        let job = Job { part, factors: factors[i], most, wide, together, x, first: tasks, each, of_group };
        tasks += groups.len() * of_group;
        Some(job)
    });
    team.for_each(tasks, |task| {
        if let Some(job) = jobs.iter().flatten().rfind(|job| job.first <= task) {
            let task = task - job.first;
            let (group, task) = (&groups[task / job.of_group], task % job.of_group);
            job.run(group, task * job.each..job.part.strips().min((task + 1) * job.each));
        }
    });
    Ok(())
}

/// As [`matmul_with`], and the rounding error of the activations is multiplied too: what int8 loses
/// of a token is the next token of the same product, and the two results are added. The relative
/// error of a product falls from about 0.6 % to 0.005 %, for the price of a batch twice as large,
/// which for one token is small, since a tile is expanded once. Logits want it: there is no later
/// layer that would average their errors.
///
/// # Errors
/// As [`matmul`].
pub fn matmul_refined_with(
    team: &Team<'_>,
    of: Operand<'_>,
    values: &[f32],
    x: &mut Activations,
    y: &mut [f32],
) -> Result<(), ShapeError> {
    // What int8 loses is no part of a product that rounds to 1023 steps; a matrix of both kinds
    // takes the plain product.
    let fits = |matrix: &PackedMatrix, precision| {
        x.cols() == matrix.shape().cols && matrix.kernel().rounds_to_int8(precision)
    };
    let (fit, vectors) = match &of {
        Operand::Rows(of) => (fits(of.matrix, of.precision), of.matrix.vectors()),
        Operand::Banded(of, precision) => {
            (of.bands().iter().all(|band| fits(band, *precision)), of.bands()[0].vectors())
        }
    };
    if !fit {
        return matmul_together_with(team, [(of, y)], values, x);
    }
    ShapeError::check_len(OP, "x", x.batch() * x.cols(), values.len())?;
    ShapeError::check_len(OP, "y", x.batch() * of.rows(), y.len())?;
    x.append_losses(values, vectors, team);
    let mut both = std::mem::take(&mut x.refined);
    both.resize(2 * y.len(), 0.0);
    let done = x.with_values(|values, x| matmul_together_with(team, [(of, &mut both[..])], values, x));
    let (main, rest) = both.split_at(y.len());
    team.chunks(y, SUMS, |i, y| {
        let from = i * SUMS;
        y.iter_mut()
            .zip(main[from..].iter().zip(&rest[from..]))
            .for_each(|(y, (main, rest))| *y = main + rest);
    });
    x.refined = both;
    x.drop_losses();
    done
}

/// Outputs of a task that adds two products: microseconds of work.
const SUMS: usize = 1 << 14;

/// Strips of a task; a multiple of `unit`, so that only the last call of a microkernel may have a
/// single strip.
fn task_strips(strips: usize, threads: usize, unit: usize) -> usize {
    let tasks = if threads == 1 { 1 } else { TASKS * threads };
    strips.div_ceil(tasks).next_multiple_of(unit)
}

/// What strips of a task are a multiple of, where a call has `wide`.
const fn task_unit(wide: usize, together: usize) -> usize {
    match wide {
        _ if together >= PANEL_FROM => GATHER,
        ONE_TOKEN_STRIPS => MAX_STRIPS,
        wide => wide,
    }
}

/// One matrix, or a gate and its factor, and where the product goes.
struct Part<'a> {
    of: (RowsOf<'a>, Option<RowsOf<'a>>),
    gate: Gate,
    y: Output<'a>,
}

impl<'a> Part<'a> {
    fn new(of: (RowsOf<'a>, Option<RowsOf<'a>>), y: Output<'a>) -> Self {
        Self { of, gate: Gate::default(), y }
    }

    fn of(&self) -> impl Iterator<Item = &RowsOf<'a>> {
        iter::once(&self.of.0).chain(&self.of.1)
    }

    fn strips(&self) -> usize {
        self.of.0.rows().div_ceil(TILE_ROWS)
    }

    /// Strips of one call of a kernel for few tokens, where a thread has `share` of them.
    fn call_strips(&self, together: usize, share: usize) -> usize {
        let each = self.of().map(|of| of.matrix.kernel().call_strips(of.precision, together));
        let most = each.max().unwrap_or(ONE_TOKEN_STRIPS).min(MOST_STRIPS);
        // A few tasks for each thread, so that they end at about the same time.
        most.min((share / 4).next_multiple_of(ONE_TOKEN_STRIPS)).max(ONE_TOKEN_STRIPS)
    }

    /// Most tokens of one call of a kernel.
    fn call_tokens(&self, together: usize) -> usize {
        let each = self.of().map(|of| of.matrix.kernel().call_tokens(of.precision, together));
        let fit = each.max().unwrap_or(MAX_TOKENS);
        (fit / (2 * ROWS) * (2 * ROWS)).clamp(2 * ROWS, MAX_TOKENS)
    }
}

/// What the tasks of a product share.
struct Job<'a> {
    part: &'a Part<'a>,
    /// Where the factors of each matrix start.
    factors: [usize; 2],
    /// Most tokens of a call.
    most: usize,
    /// Most strips of a call for few tokens.
    wide: usize,
    /// Most tokens of a group.
    together: usize,
    x: &'a Activations,
    /// The first task, strips of each, and tasks of a group.
    first: usize,
    each: usize,
    of_group: usize,
}

impl Job<'_> {
    /// One task: all segments of some strips, all tokens. A buffer is as large as the tokens want
    /// it, and only what is used is cleared: a decode step's task would spend several percent of
    /// its time on more, and so would prefill's on several threads.
    fn run(&self, group: &Group, strips: Range<usize>) {
        const ONE: usize = 2 * MOST_STRIPS * TILE_ROWS;
        const FEW: usize = (PANEL_FROM - 1) * ONE;
        match group.tokens.len() {
            1 => self.through(&mut [const { MaybeUninit::uninit() }; ONE], group, strips, self.wide),
            2..PANEL_FROM => {
                self.through(&mut [const { MaybeUninit::uninit() }; FEW], group, strips, self.wide)
            }
            _ => self.many(group, strips),
        }
    }

    #[inline(never)] // so that no other call makes room for its buffer
    fn many(&self, group: &Group, strips: Range<usize>) {
        const MANY: usize = 2 * GATHER * MAX_TOKENS * TILE_ROWS;
        self.through(&mut [const { MaybeUninit::uninit() }; MANY], group, strips, GATHER);
    }

    /// The strips, `together` at a time, through a buffer that holds the outputs of these for all
    /// tokens of a call twice.
    fn through(&self, buffer: &mut [MaybeUninit<f32>], group: &Group, strips: Range<usize>, together: usize) {
        for strip in strips.clone().step_by(together) {
            let some = strip..strips.end.min(strip + together);
            let stride = some.len() * TILE_ROWS;
            for token in group.tokens.clone().step_by(self.most) {
                let tokens = token..group.tokens.end.min(token + self.most);
                let (out, rest) = buffer.split_at_mut(tokens.len() * stride);
                let out = cleared(out);
                let Part { of: (first, up), gate, y } = self.part;
                self.add((first, self.factors[0]), group, some.clone(), tokens.clone(), out);
                if let Some(up) = up {
                    let factor = cleared(&mut rest[..out.len()]);
                    self.add((up, self.factors[1]), group, some.clone(), tokens, factor);
                    up.matrix.vectors().gate_mul(*gate, out, factor);
                }
                y.store(strip, token, stride, out);
            }
        }
    }

    /// Some strips of one of the matrices, all segments, added to `out`: `(token, strip, 16)`.
    fn add(
        &self,
        (of, factors): (&RowsOf<'_>, usize),
        group: &Group,
        strips: Range<usize>,
        tokens: Range<usize>,
        out: &mut [f32],
    ) {
        let first = (of.rows.start + group.piece * of.rows.len()) / TILE_ROWS;
        let call = Call {
            x: self.x,
            factors,
            stride: strips.len() * TILE_ROWS,
            strips: first + strips.start..first + strips.end,
            tokens,
            precision: of.precision,
            together: self.together,
            alone: group.tokens.len() == 1,
        };
        of.matrix.kernel().rows(&call, out);
    }
}

/// Zeros.
fn cleared(numbers: &mut [MaybeUninit<f32>]) -> &mut [f32] {
    numbers.fill(MaybeUninit::new(0.0));
    #[expect(unsafe_code, reason = "numbers that were just written")]
    // SAFETY: the same numbers, all written.
    unsafe {
        slice::from_raw_parts_mut(numbers.as_mut_ptr().cast(), numbers.len())
    }
}

/// `y`, shared by tasks that own different strips, that is, different columns of it.
#[derive(Clone, Copy)]
struct Output<'a> {
    start: *mut f32,
    len: usize,
    /// Columns of `y`.
    stride: usize,
    /// Which of them each row is; as many as the matrix has. Without them row r is column r.
    places: Option<&'a [u32]>,
    life: PhantomData<&'a mut [f32]>,
}

#[expect(unsafe_code, reason = "tasks write disjoint columns of a row-major matrix")]
// SAFETY: `make_products` deals every strip of every group to one task, groups have different
// tokens, parts different outputs or, as bands of one matrix, different columns, and `store`
// touches only the columns of the given strips of the given tokens.
unsafe impl Sync for Output<'_> {}

impl<'a> Output<'a> {
    fn new(y: &'a mut [f32], stride: usize) -> Self {
        Self { start: y.as_mut_ptr(), len: y.len(), stride, places: None, life: PhantomData }
    }

    /// The same for a band of the rows.
    const fn at(self, rows: BandRows<'a>) -> Self {
        Self { places: Some(rows.get()), ..self }
    }

    /// Copies `(token, strip, 16)`, `stride` from a token to the next, to `y`, without the padded
    /// rows.
    fn store(&self, strip: usize, token: usize, stride: usize, out: &[f32]) {
        let row = strip * TILE_ROWS;
        let width = stride.min(self.places.map_or(self.stride, <[u32]>::len) - row);
        for (t, out) in out.chunks_exact(stride).enumerate() {
            let first = (token + t) * self.stride;
            assert!(first + self.stride <= self.len, "token {token} lies inside y");
            let out = &out[..width];
            if let Some(places) = self.places {
                for (&place, &value) in places[row..row + width].iter().zip(out) {
                    #[expect(unsafe_code, reason = "see `Output`")]
                    // SAFETY: a place is below `self.stride` (`BandRows`), so that by the assertion
                    // it is inside `y`; this task owns the strips.
                    unsafe {
                        self.start.add(first + place as usize).write(value);
                    }
                }
                continue;
            }
            #[expect(unsafe_code, reason = "see `Output`")]
            // SAFETY: `row + width <= self.stride`, so that by the assertion all is inside `y`;
            // this task owns the strips.
            unsafe {
                std::ptr::copy_nonoverlapping(out.as_ptr(), self.start.add(first + row), width);
            }
        }
    }
}
