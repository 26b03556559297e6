//! The product: activations to integers, strips to threads.

use crate::{
    Activations, Args, Block, Crew, Ints, PackedMatrix,
    args::{BLOCK_TILES, Interleave, MAX_STRIPS, MAX_TOKENS, ONE_TOKEN_STRIPS, PANEL_FROM, PANEL_TOKENS},
    crew::with_crew,
    matrix::Part,
};
use fracbit_base::{Shape, ShapeError};
use fracbit_format::{Grid, TILE_COLS, TILE_ROWS};
use std::marker::PhantomData;

/// Tasks for each thread: at the end of a loop a thread waits for half a task on average.
const TASKS: usize = 16;
/// Strips whose outputs are stored together when there are panels of tokens. The outputs of one strip are 64 bytes in each token's row of
/// `y`; rows are a power of two apart in most models, so that such pieces fall on the same few sets of the caches: stored strip
/// by strip they took 10 % of a prefill.
const GATHER: usize = 4 * MAX_STRIPS;

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
    if y.is_empty() {
        return Ok(());
    }
    let out = Output { start: y.as_mut_ptr(), len: y.len(), rows, life: PhantomData };
    x.block_scales.clear();
    x.block_sums.clear();
    w.parts().iter().for_each(|part| prepare(part, w, x, crew));
    let x = &*x;
    let each = task_strips(w.strips(), crew.threads(), gathered(x));
    crew.for_each(w.strips().div_ceil(each), |task| {
        run(w, x, task * each..w.strips().min((task + 1) * each), &out);
    });
    Ok(())
}

/// As [`matmul_with`], and the rounding error of the activations is multiplied too: what int8 loses of a token is the next token of the
/// same product, and the two results are added. The relative error of a product falls from about 0.6 % to 0.005 %, for the price of a
/// batch twice as large, which for one token is small, since a tile is expanded once. Logits want it: there is no later layer
/// that would average their errors.
///
/// # Errors
/// As [`matmul`].
pub fn matmul_refined_with(
    crew: &Crew<'_>,
    w: &PackedMatrix,
    x: &mut Activations,
    y: &mut [f32],
) -> Result<(), ShapeError> {
    // What int8 loses is no part of a product that rounds to 1023 steps; a matrix of both kinds takes the plain product.
    if x.cols() != w.shape().cols || w.parts().iter().any(|part| part.codebook.grid() == Grid::I16) {
        return matmul_with(crew, w, x, y);
    }
    ShapeError::check_len("matmul", "y", x.batch() * w.shape().rows, y.len())?;
    x.append_losses(w.vectors(), crew);
    let mut both = std::mem::take(&mut x.refined);
    both.resize(2 * y.len(), 0.0);
    let done = matmul_with(crew, w, x, &mut both);
    let (main, rest) = both.split_at(y.len());
    y.iter_mut().zip(main.iter().zip(rest)).for_each(|(y, (main, rest))| *y = main + rest);
    x.refined = both;
    x.drop_losses();
    done
}

/// Strips whose outputs are stored together.
const fn gathered(x: &Activations) -> usize {
    if x.batch() >= PANEL_FROM { GATHER } else { MAX_STRIPS }
}

/// Strips of a task; a multiple of `unit`, so that only the last call of a body may have a single strip.
fn task_strips(strips: usize, threads: usize, unit: usize) -> usize {
    let tasks = if threads == 1 { 1 } else { TASKS * threads };
    strips.div_ceil(tasks).next_multiple_of(unit)
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
    let first = |block: &Block| part.segment.start + block.start;
    let scale = |token: usize, block: &Block| scales[token * groups + first(block) / BLOCK_TILES] * factor;
    let sum =
        |token: usize, block: &Block| sums[token * tiles + first(block)..][..block.tiles].iter().sum::<i32>();
    let blocks = &part.blocks;
    let Some(interleave) = panels else {
        for token in 0..batch {
            block_scales.extend(blocks.iter().map(|block| scale(token, block)));
            block_sums.extend(blocks.iter().map(|block| sum(token, block)));
        }
        return;
    };
    for start in (0..batch).step_by(MAX_TOKENS) {
        let tokens = start..batch.min(start + MAX_TOKENS);
        let mut before = None;
        for block in blocks {
            let group = Some(first(block) / BLOCK_TILES);
            if group == before {
                block_scales.extend_from_within(block_scales.len() - tokens.len()..);
            } else {
                block_scales.extend(tokens.clone().map(|token| scale(token, block)));
            }
            before = group;
            if interleave.sums() {
                block_sums.extend(tokens.clone().map(|token| sum(token, block)));
            } else {
                block_sums.resize(block_sums.len() + tokens.len(), 0);
            }
        }
    }
}

fn takes_panels(part: &Part, x: &Activations) -> Option<Interleave> {
    part.body.panels().filter(|interleave| x.batch() >= interleave.from())
}

/// One task: `strips`, all segments, all tokens.
fn run(w: &PackedMatrix, x: &Activations, strips: std::ops::Range<usize>, y: &Output<'_>) {
    // Clearing a large one would cost a decode step's task several percent of its time.
    let (mut one, mut few, mut many);
    let buffer: &mut [f32] = match x.batch() {
        1 => {
            one = [0f32; ONE_TOKEN_STRIPS * TILE_ROWS];
            &mut one
        }
        2..=PANEL_TOKENS => {
            few = [0f32; GATHER * PANEL_TOKENS * TILE_ROWS];
            &mut few
        }
        _ => {
            many = [0f32; GATHER * MAX_TOKENS * TILE_ROWS];
            &mut many
        }
    };
    let gathered = if x.batch() == 1 { ONE_TOKEN_STRIPS } else { gathered(x) };
    for strip in strips.clone().step_by(gathered) {
        let count = gathered.min(strips.end - strip);
        for token in (0..x.batch()).step_by(MAX_TOKENS) {
            let tokens = MAX_TOKENS.min(x.batch() - token);
            let out = &mut buffer[..count * tokens * TILE_ROWS];
            out.fill(0.0);
            // One token reads codes as fast as it can, and they should come in one stream: the segments of a strip lie behind each other.
            let each = match tokens {
                1 if w.parts().len() > 1 => 1,
                1 if x.batch() == 1 => ONE_TOKEN_STRIPS,
                _ => MAX_STRIPS,
            };
            for (call, out) in out.chunks_mut(each * tokens * TILE_ROWS).enumerate() {
                multiply(w, x, strip + call * each, token..token + tokens, out);
            }
            y.store(strip, token, tokens, out);
        }
    }
}

/// The strips from `strip` on, as many as `out` has room for, all segments, added to `out`: `(strip, token, 16)`.
fn multiply(
    w: &PackedMatrix,
    x: &Activations,
    strip: usize,
    tokens: std::ops::Range<usize>,
    out: &mut [f32],
) {
    let strips = out.len() / (tokens.len() * TILE_ROWS);
    let mut before = 0;
    for part in w.parts() {
        let first = tokens.start * x.stride() + part.segment.start * TILE_COLS;
        let interleave = takes_panels(part, x);
        let (blocks, per_strip) = (part.blocks.len(), part.groups * TILE_ROWS);
        let factors = before + tokens.start * blocks..before + tokens.end * blocks;
        before += x.batch() * blocks;
        let args = Args {
            codebook: &part.codebook,
            table: part.body.table(),
            codes: w.codes_of(part, strip),
            stride: w.stride(),
            tile_bytes: part.segment.tile_bytes,
            strips,
            tiles: part.segment.end - part.segment.start,
            scales: &part.scales[strip * per_strip..][..strips * per_strip],
            groups: part.groups,
            blocks: &part.blocks,
            tokens: tokens.len(),
            x: match part.codebook.grid() {
                Grid::I8 => Ints::I8(x.narrow.ints.get(first..).unwrap_or(&[])),
                Grid::I16 => Ints::I16(x.wide.ints.get(first..).unwrap_or(&[])),
            },
            x_stride: x.stride(),
            interleave,
            panel: interleave
                .filter(|interleave| *interleave != Interleave::Rows)
                .map(|_| x.panel(part.codebook.grid(), part.segment.start, tokens.start)),
            block_scales: &x.block_scales[factors.clone()],
            block_sums: &x.block_sums[factors],
        };
        part.body.run(&args, out);
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
        let strips = out.len() / (tokens * TILE_ROWS);
        for t in 0..tokens {
            for s in 0..strips {
                let out: &[f32; TILE_ROWS] = out[(s * tokens + t) * TILE_ROWS..]
                    .first_chunk()
                    .expect("outputs of a strip and a token");
                let (at, width) = self.place(strip + s, token + t);
                #[expect(unsafe_code, reason = "see `Output`")]
                // SAFETY: `place` checked that `at + width` is inside `y`; this task owns the strip; `width <= 16`.
                unsafe {
                    let to = self.start.add(at);
                    if width == TILE_ROWS {
                        to.cast::<[f32; TILE_ROWS]>().write_unaligned(*out);
                    } else {
                        std::ptr::copy_nonoverlapping(out.as_ptr(), to, width);
                    }
                }
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
