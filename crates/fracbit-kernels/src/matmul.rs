//! The product: activations to integers, strips to threads.

use crate::{
    Activations, Gate, PackedMatrix, Precision, Team,
    args::{MAX_STRIPS, MAX_TOKENS, ONE_TOKEN_STRIPS, PANEL_FROM, ROWS},
    linear::{Call, Input, Prepared},
    team::with_team,
};
use fracbit_base::ShapeError;
use fracbit_format::TILE_ROWS;
use std::{array, marker::PhantomData, mem::MaybeUninit, ops::Range, slice};

/// Tasks for each thread: at the end of a loop a thread waits for half a task on average.
const TASKS: usize = 16;
/// Matrices of one loop at most: bands of rows.
pub const PARTS: usize = 4;
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
    product(team, (&[RowsOf::all(w)], Gate::default()), &Group::whole(x), values, x, y)
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
    product(team, (&[rows], Gate::default()), &Group::whole(x), values, x, y)
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
    let [gate, up] = &gate_and_up;
    ShapeError::check_len("matmul", "rows of up", gate.rows.len(), up.rows.len())?;
    product(team, (&gate_and_up, kind), &Group::whole(x), values, x, y)
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
    product(team, (first, kind), groups, values, x, y)
}

/// As [`matmul_rows_with`] for several matrices that read one input, in one loop of the team: `y`
/// is (batch, rows of all), those of one matrix behind those of another. The bits are those of one
/// product for each.
///
/// # Errors
/// As there, and for more than [`PARTS`] matrices.
pub fn matmul_parts_with(
    team: &Team<'_>,
    parts: &[RowsOf<'_>],
    values: &[f32],
    x: &mut Activations,
    y: &mut [f32],
) -> Result<(), ShapeError> {
    if parts.is_empty() || parts.len() > PARTS {
        return Err(ShapeError::new(OP, "matrices", format_args!("1 to {PARTS}"), parts.len()));
    }
    let rows = parts.iter().map(|of| of.rows.len()).sum();
    for of in parts {
        check(of, x)?;
    }
    ShapeError::check_len(OP, "x", x.batch() * x.cols(), values.len())?;
    ShapeError::check_len(OP, "y", x.batch() * rows, y.len())?;
    if y.is_empty() {
        return Ok(());
    }
    x.block_scales.clear();
    x.block_starts.clear();
    let together = x.batch();
    let mut factors = [0; PARTS];
    for (of, factors) in parts.iter().zip(&mut factors) {
        *factors = prepare(of, (values, together, call_tokens(slice::from_ref(of), together)), x, team);
    }
    let groups = Group::whole(x);
    let strips: usize = parts.iter().map(|of| of.rows.len().div_ceil(TILE_ROWS)).sum();
    let (start, mut first, mut tasks) = (y.as_mut_ptr(), 0, 0);
    // Each with the tasks before it.
    let jobs: [Option<(Job<'_>, usize, usize)>; PARTS] = array::from_fn(|i| {
        let of = slice::from_ref(parts.get(i)?);
        let own = of[0].rows.len();
        let out = Output { start, len: y.len(), stride: rows, first, rows: own, life: PhantomData };
        let (wide, unit) = call_width(of, together, strips / team.threads());
        let most = call_tokens(of, together);
        let job =
            Job { of, gate: Gate::default(), factors: [factors[i], 0], most, wide, together, x, y: out };
        let each = task_strips(strips, team.threads(), unit);
        let before = tasks;
        first += own;
        tasks += own.div_ceil(TILE_ROWS).div_ceil(each);
        Some((job, before, each))
    });
    team.for_each(tasks, |task| {
        let of = jobs.iter().flatten().rfind(|(_, before, _)| *before <= task);
        let Some((job, before, each)) = of else { return };
        let strips = job.y.rows.div_ceil(TILE_ROWS);
        let task = task - before;
        job.run(&groups[0], (task * each).min(strips)..strips.min((task + 1) * each));
    });
    Ok(())
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

/// Strips of one call of a kernel where a thread has `share` of them, and of what a task's are a
/// multiple of.
fn call_width(of: &[RowsOf<'_>], together: usize, share: usize) -> (usize, usize) {
    let wide = call_strips(of, together, share);
    let unit = match wide {
        _ if together >= PANEL_FROM => GATHER,
        ONE_TOKEN_STRIPS => MAX_STRIPS,
        wide => wide,
    };
    (wide, unit)
}

/// One matrix, or a gate and its factor.
fn product(
    team: &Team<'_>,
    (of, gate): (&[RowsOf<'_>], Gate),
    groups: &[Group],
    values: &[f32],
    x: &mut Activations,
    y: &mut [f32],
) -> Result<(), ShapeError> {
    let rows = of[0].rows.len();
    for of in of {
        check(of, x)?;
    }
    ShapeError::check_len(OP, "x", x.batch() * x.cols(), values.len())?;
    ShapeError::check_len(OP, "y", x.batch() * rows, y.len())?;
    if y.is_empty() {
        return Ok(());
    }
    let out = Output { start: y.as_mut_ptr(), len: y.len(), stride: rows, first: 0, rows, life: PhantomData };
    x.block_scales.clear();
    x.block_starts.clear();
    let together = groups.iter().map(|group| group.tokens.len()).max().unwrap_or(0);
    let most = call_tokens(of, together);
    let mut factors = [0; 2];
    for (of, factors) in of.iter().zip(&mut factors) {
        *factors = prepare(of, (values, together, most), x, team);
    }
    let strips = rows.div_ceil(TILE_ROWS);
    let (wide, unit) = call_width(of, together, groups.len() * strips / team.threads());
    let job = Job { of, gate, factors, most, wide, together, x, y: out };
    let each = task_strips(groups.len() * strips, team.threads(), unit);
    let tasks = strips.div_ceil(each);
    team.for_each(groups.len() * tasks, |task| {
        let (group, task) = (&groups[task / tasks], task % tasks);
        job.run(group, task * each..strips.min((task + 1) * each));
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
    w: RowsOf<'_>,
    values: &[f32],
    x: &mut Activations,
    y: &mut [f32],
) -> Result<(), ShapeError> {
    // What int8 loses is no part of a product that rounds to 1023 steps; a matrix of both kinds
    // takes the plain product.
    if x.cols() != w.matrix.shape().cols || !w.matrix.kernel().rounds_to_int8(w.precision) {
        return matmul_rows_with(team, w, values, x, y);
    }
    ShapeError::check_len("matmul", "x", x.batch() * x.cols(), values.len())?;
    ShapeError::check_len("matmul", "y", x.batch() * w.rows(), y.len())?;
    x.append_losses(values, w.matrix.vectors(), team);
    let mut both = std::mem::take(&mut x.refined);
    both.resize(2 * y.len(), 0.0);
    let done = x.with_values(|values, x| matmul_rows_with(team, w, values, x, &mut both));
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

/// Strips of one call of a kernel for few tokens, where a thread has `share` of them.
fn call_strips(of: &[RowsOf<'_>], together: usize, share: usize) -> usize {
    let each = of.iter().map(|of| of.matrix.kernel().call_strips(of.precision, together));
    let most = each.max().unwrap_or(ONE_TOKEN_STRIPS).min(MOST_STRIPS);
    // A few tasks for each thread, so that they end at about the same time.
    most.min((share / 4).next_multiple_of(ONE_TOKEN_STRIPS)).max(ONE_TOKEN_STRIPS)
}

/// Most tokens of one call of a kernel.
fn call_tokens(of: &[RowsOf<'_>], together: usize) -> usize {
    let each = of.iter().map(|of| of.matrix.kernel().call_tokens(of.precision, together));
    let fit = each.max().unwrap_or(MAX_TOKENS);
    (fit / (2 * ROWS) * (2 * ROWS)).clamp(2 * ROWS, MAX_TOKENS)
}

/// What the tasks of a product share.
struct Job<'a> {
    /// A matrix, or a gate and its factor.
    of: &'a [RowsOf<'a>],
    gate: Gate,
    /// Where the factors of each start.
    factors: [usize; 2],
    /// Most tokens of a call.
    most: usize,
    /// Most strips of a call for few tokens.
    wide: usize,
    /// Most tokens of a group.
    together: usize,
    x: &'a Activations,
    y: Output<'a>,
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
                self.add((0, group), some.clone(), tokens.clone(), out);
                if let Some(up) = self.of.get(1) {
                    let factor = cleared(&mut rest[..out.len()]);
                    self.add((1, group), some.clone(), tokens, factor);
                    up.matrix.vectors().gate_mul(self.gate, out, factor);
                }
                self.y.store(strip, token, stride, out);
            }
        }
    }

    /// Some strips of one of the matrices, all segments, added to `out`: `(token, strip, 16)`.
    fn add(
        &self,
        (which, group): (usize, &Group),
        strips: Range<usize>,
        tokens: Range<usize>,
        out: &mut [f32],
    ) {
        let of = &self.of[which];
        let first = (of.rows.start + group.piece * of.rows.len()) / TILE_ROWS;
        let call = Call {
            x: self.x,
            factors: self.factors[which],
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
struct Output<'a> {
    start: *mut f32,
    len: usize,
    /// Columns of `y`, and those of the matrix among them.
    stride: usize,
    first: usize,
    rows: usize,
    life: PhantomData<&'a mut [f32]>,
}

#[expect(unsafe_code, reason = "tasks write disjoint columns of a row-major matrix")]
// SAFETY: `product` and `matmul_parts_with` deal every strip of every group to one task, groups
// have different tokens, parts different columns, and `store` touches only the columns of the given
// strips of the given tokens.
unsafe impl Sync for Output<'_> {}

impl Output<'_> {
    /// Copies `(token, strip, 16)`, `stride` from a token to the next, to `y`, without the padded
    /// rows.
    fn store(&self, strip: usize, token: usize, stride: usize, out: &[f32]) {
        let row = strip * TILE_ROWS;
        let width = stride.min(self.rows - row);
        for (t, out) in out.chunks_exact(stride).enumerate() {
            let at = (token + t) * self.stride + self.first + row;
            assert!(at + width <= self.len, "strip {strip} of token {token} lies inside y");
            #[expect(unsafe_code, reason = "see `Output`")]
            // SAFETY: inside `y` by the assertion; this task owns the strips; `width <= stride`.
            unsafe {
                std::ptr::copy_nonoverlapping(out.as_ptr(), self.start.add(at), width);
            }
        }
    }
}
