//! The product: activations to integers, strips to threads.

use crate::{
    Activations, Args, Block, Crew, Ints, PackedMatrix,
    args::{BLOCK_TILES, MAX_STRIPS, MAX_TOKENS, PANEL_FROM},
    crew::with_crew,
    matrix::Part,
};
use fracbit_base::{Shape, ShapeError};
use fracbit_format::{Grid, TILE_COLS, TILE_ROWS};
use std::marker::PhantomData;

/// Tasks for each thread: at the end of a loop a thread waits for half a task on average.
const TASKS: usize = 16;

/// `y = x W^T`: `x` is `(batch, cols)`, `y` is `(batch, rows)` row-major.
///
/// Rows are dealt to the threads of the current rayon pool; every sum is made by one thread in a fixed order, so the
/// result is the same at any number of threads and on every instruction set.
///
/// # Errors
/// When `x` has another width than `w`, or `y` another size than `batch x rows`.
pub fn matmul(w: &PackedMatrix, x: &mut Activations, y: &mut [f32]) -> Result<(), ShapeError> {
    with_crew(|crew| matmul_with(crew, w, x, y))
}

/// As [`matmul`], on the threads of a crew.
///
/// # Errors
/// As there.
pub fn matmul_with(
    crew: &Crew<'_>,
    w: &PackedMatrix,
    x: &mut Activations,
    y: &mut [f32],
) -> Result<(), ShapeError> {
    const OP: &str = "matmul";
    let Shape { rows, cols } = w.shape();
    if x.cols() != cols {
        return Err(ShapeError::new(
            OP,
            "x",
            format_args!("(batch, {cols})"),
            format_args!("(batch, {})", x.cols()),
        ));
    }
    ShapeError::check_len(OP, "y", x.batch() * rows, y.len())?;
    let out = Output { start: y.as_mut_ptr(), len: y.len(), rows, life: PhantomData };
    x.block_scales.clear();
    x.block_sums.clear();
    w.parts().iter().for_each(|part| prepare(part, w, x, crew));
    let x = &*x;
    let each = task_strips(w.strips(), crew.threads());
    crew.for_each(w.strips().div_ceil(each), |task| {
        run(w, x, task * each..w.strips().min((task + 1) * each), &out);
    });
    Ok(())
}

/// Strips of a task; even, so that only the last call of a body may have a single strip.
fn task_strips(strips: usize, threads: usize) -> usize {
    let tasks = if threads == 1 { 1 } else { TASKS * threads };
    strips.div_ceil(tasks).next_multiple_of(MAX_STRIPS)
}

/// Makes the integer form that `part` wants and appends the factors of its blocks: `(token, block)`, or for panels
/// `(block, token)` for each call's tokens.
fn prepare(part: &Part, w: &PackedMatrix, x: &mut Activations, crew: &Crew<'_>) {
    let panels = takes_panels(part, x);
    match part.codebook.grid() {
        Grid::I8 => x.make_narrow(w.vectors(), crew, panels),
        Grid::I16 => x.make_wide(w.vectors(), crew, panels),
    }
    let (batch, groups, tiles) = (x.batch(), x.groups(), x.tiles());
    let (scales, sums) = match part.codebook.grid() {
        Grid::I8 => (&x.narrow.scales, &x.narrow.sums),
        Grid::I16 => (&x.wide.scales, &x.wide.sums),
    };
    let factor = w.gain() * part.codebook.step();
    let (block_scales, block_sums) = (&mut x.block_scales, &mut x.block_sums);
    let mut push = |token: usize, block: &Block| {
        let first = part.segment.start + block.start;
        block_scales.push(scales[token * groups + first / BLOCK_TILES] * factor);
        block_sums.push(sums[token * tiles + first..][..block.tiles].iter().sum());
    };
    if panels {
        for first in (0..batch).step_by(MAX_TOKENS) {
            let tokens = first..batch.min(first + MAX_TOKENS);
            part.blocks.iter().for_each(|block| tokens.clone().for_each(|token| push(token, block)));
        }
    } else {
        (0..batch).for_each(|token| part.blocks.iter().for_each(|block| push(token, block)));
    }
}

fn takes_panels(part: &Part, x: &Activations) -> bool {
    part.body.panels() && x.batch() >= PANEL_FROM
}

/// One task: `strips`, all segments, all tokens.
fn run(w: &PackedMatrix, x: &Activations, strips: std::ops::Range<usize>, y: &Output<'_>) {
    let x_stride = x.stride();
    // Clearing the large one would cost a decode step's task several percent of its time.
    let (mut small, mut large);
    let buffer: &mut [f32] = if x.batch() == 1 {
        small = [0f32; MAX_STRIPS * TILE_ROWS];
        &mut small
    } else {
        large = [0f32; MAX_STRIPS * MAX_TOKENS * TILE_ROWS];
        &mut large
    };
    for strip in strips.clone().step_by(MAX_STRIPS) {
        let count = MAX_STRIPS.min(strips.end - strip);
        for token in (0..x.batch()).step_by(MAX_TOKENS) {
            let tokens = MAX_TOKENS.min(x.batch() - token);
            let out = &mut buffer[..count * tokens * TILE_ROWS];
            out.fill(0.0);
            let mut before = 0;
            for part in w.parts() {
                let first = token * x_stride + part.segment.start * TILE_COLS;
                let (blocks, per_strip) = (part.blocks.len(), part.groups * TILE_ROWS);
                let factors = before + token * blocks..before + (token + tokens) * blocks;
                before += x.batch() * blocks;
                let args = Args {
                    codebook: &part.codebook,
                    table: part.body.table(),
                    codes: w.codes_of(part, strip),
                    stride: w.stride(),
                    tile_bytes: part.segment.tile_bytes,
                    strips: count,
                    tiles: part.segment.end - part.segment.start,
                    scales: &part.scales[strip * per_strip..][..count * per_strip],
                    groups: part.groups,
                    blocks: &part.blocks,
                    tokens,
                    x: match part.codebook.grid() {
                        Grid::I8 => Ints::I8(&x.narrow.ints[first..]),
                        Grid::I16 => Ints::I16(&x.wide.ints[first..]),
                    },
                    x_stride,
                    panel: takes_panels(part, x)
                        .then(|| x.panel(part.codebook.grid(), part.segment.start, token)),
                    block_scales: &x.block_scales[factors.clone()],
                    block_sums: &x.block_sums[factors],
                };
                part.body.run(&args, out);
            }
            y.store(strip, token, tokens, out);
        }
    }
}

/// `y`, shared by tasks that own different strips, that is, different columns of it.
struct Output<'a> {
    start: *mut f32,
    len: usize,
    rows: usize,
    life: PhantomData<&'a mut [f32]>,
}

#[expect(unsafe_code, reason = "tasks write disjoint columns of a row-major matrix")]
// SAFETY: `matmul` deals every strip to one task, and `store` touches only the rows of the given strips.
unsafe impl Sync for Output<'_> {}

impl Output<'_> {
    /// Copies `(strip, token, 16)` to `y`, without the padded rows.
    fn store(&self, strip: usize, token: usize, tokens: usize, out: &[f32]) {
        for (i, out) in out.chunks_exact(TILE_ROWS).enumerate() {
            let (at, width) = self.place(strip + i / tokens, token + i % tokens);
            #[expect(unsafe_code, reason = "see `Output`")]
            // SAFETY: `place` checked that `at + width` is inside `y`; this task owns the strip; `width <= 16`.
            unsafe {
                std::ptr::copy_nonoverlapping(out.as_ptr(), self.start.add(at), width);
            }
        }
    }

    /// Where the outputs of a strip start for a token, and how many there are.
    fn place(&self, strip: usize, token: usize) -> (usize, usize) {
        let row = strip * TILE_ROWS;
        let width = TILE_ROWS.min(self.rows - row);
        let at = token * self.rows + row;
        assert!(at + width <= self.len, "strip {strip} of token {token} lies inside y");
        (at, width)
    }
}
