//! The products of a profile, each measured on its own with the weights coming from memory.
//!
//! Of experts, a product is that of all of them one above the other with the tokens of a step, each
//! of which meets some: at random here, as a router spreads them that was trained to.

use super::{Bench, ProfileOptions, dense::Dense};
use crate::{Spread, limits, random::Arena};
use fracbit_base::{Scheme, Shape};
use fracbit_format::TILE_ROWS;
use fracbit_io::{Experts, ModelConfig};
use fracbit_kernels::{
    Activations, Gate, Group, Kernels, PackedMatrix, RowsOf, cases, matmul, matmul_groups_with, with_team,
};
use fracbit_load::Error;
use fracbit_model::LinearId;
use fracbit_plan::{
    fusion,
    machine::{KernelTime, Product},
    plan::{Matrix, Storage},
};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use std::{collections::BTreeMap, time::Instant};

/// Weights of the largest matrix that is measured whole; of a larger one (a head) so many rows are,
/// and the time is scaled.
const MOST_WEIGHTS: usize = 1 << 26;
/// Rows of the matrix that is multiplied before those that count.
const WARM_ROWS: usize = 1024;

/// The distinct products of a model.
pub(super) struct Products {
    /// With single matrices, which half precision knows alone.
    pub(super) single: Vec<Product>,
    /// Those with fused ones as well.
    pub(super) all: Vec<Product>,
    experts: Option<Experts>,
    /// Most tokens of a step.
    most_tokens: usize,
}

impl Products {
    pub(super) fn of(config: &ModelConfig, most_tokens: usize) -> Self {
        let matrices = Matrix::all(config);
        let one = matrices.iter().filter(|m| multiplies(config, m.id)).filter_map(|m| Product::of([m]));
        let groups = fusion::candidates(&matrices);
        let fused = groups.iter().filter_map(|group| Product::of(group.iter().map(|&m| &matrices[m])));
        let distinct = |mut products: Vec<Product>| {
            products.sort_unstable();
            products.dedup();
            products
        };
        let single: Vec<Product> = one.collect();
        let all = single.iter().copied().chain(fused).collect();
        Self { single: distinct(single), all: distinct(all), experts: config.experts, most_tokens }
    }

    /// The pieces that a token meets, of those of a matrix.
    fn active(&self, product: Product) -> usize {
        self.experts.filter(|_| product.pieces > 1).map_or(1, |experts| experts.active)
    }

    /// What is measured of a matrix: at most `most` weights in pieces of a multiple of `unit` rows.
    pub(super) fn part(&self, product: Product, most: usize, unit: usize) -> Part {
        let Product { cols, rows, pieces } = product;
        let met = pieces.min(self.most_tokens * self.active(product));
        let rows = (rows / pieces).min((most / (met * cols) / unit * unit).max(unit));
        Part { pieces: (most / (rows * cols)).clamp(met, pieces), rows, cols }
    }

    /// What a step of `batch` tokens multiplies: for each piece of `part` its tokens.
    pub(super) fn routes(
        &self,
        product: Product,
        part: Part,
        batch: usize,
        rng: &mut ChaCha8Rng,
    ) -> Vec<Group> {
        let Some(experts) = self.experts.filter(|_| product.pieces > 1) else {
            return vec![Group { piece: 0, tokens: 0..batch }];
        };
        let mut tokens = BTreeMap::<usize, usize>::new();
        for expert in (0..batch).flat_map(|_| rand::seq::index::sample(rng, experts.count, experts.active)) {
            *tokens.entry(expert).or_default() += 1;
        }
        let mut end = 0;
        let group = |(expert, tokens): (usize, usize)| {
            end += tokens;
            Group { piece: expert % part.pieces, tokens: end - tokens..end }
        };
        tokens.into_iter().map(group).collect()
    }
}

/// What is measured of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// How many pieces: enough that those of a step are different ones.
    pub(super) pieces: usize,
    /// Rows of each.
    pub(super) rows: usize,
    pub(super) cols: usize,
}

impl Part {
    pub(super) const fn shape(self) -> Shape {
        Shape::new(self.pieces * self.rows, self.cols)
    }
}

/// Whether a decode step multiplies by this matrix; of an embedding that is not the head it reads
/// one row.
pub(super) fn multiplies(config: &ModelConfig, id: LinearId) -> bool {
    id != LinearId::Embed || config.tie_word_embeddings
}

/// Microseconds of all measurements.
pub(super) struct Times {
    /// (scheme, batch, product).
    packed: Vec<Vec<Vec<Vec<f64>>>>,
    /// (batch, product) of half precision.
    dense: Vec<Vec<Vec<f64>>>,
}

impl Times {
    pub(super) fn new(options: &ProfileOptions, products: &Products) -> Self {
        let per_batch = |products: &[Product]| vec![vec![Vec::new(); products.len()]; options.batch.len()];
        Self {
            packed: vec![per_batch(&products.all); options.schemes.len()],
            dense: per_batch(&products.single),
        }
    }

    pub(super) fn sweep(
        &mut self,
        products: &Products,
        dense: &Dense,
        backwards: bool,
        bench: &Bench<'_>,
        flush: &mut limits::Memory,
    ) -> Result<(), Error> {
        let ProfileOptions { schemes, batch, rounds, .. } = bench.options;
        for at in 0..schemes.len() {
            let at = if backwards { schemes.len() - 1 - at } else { at };
            let set = Set::new(schemes[at], products, bench.arena, bench.kernels)?;
            for (&batch, times) in batch.iter().zip(&mut self.packed[at]) {
                bench.pool.install(|| set.measure(products, batch, *rounds, flush, times));
            }
            bench.progress.advance(1);
        }
        for (&batch, times) in batch.iter().zip(&mut self.dense) {
            bench.pool.install(|| dense.measure(products, bench.kernels, batch, *rounds, flush, times));
        }
        Ok(())
    }

    pub(super) fn medians(
        &self,
        options: &ProfileOptions,
        products: &Products,
        dense: &Dense,
    ) -> Vec<KernelTime> {
        let mut all = Vec::new();
        let mut add = |scheme: Storage, parts: Vec<(Product, Part)>, times: &[Vec<Vec<f64>>]| {
            for (&batch, times) in options.batch.iter().zip(times) {
                for (&measured, times) in parts.iter().zip(times) {
                    all.push(kernel_time(scheme, measured, batch, times.clone()));
                }
            }
        };
        for (&scheme, times) in options.schemes.iter().zip(&self.packed) {
            let parts = products.all.iter().map(|&product| (product, packed_part(products, product)));
            add(Storage::Packed(scheme), parts.collect(), times);
        }
        let parts = products.single.iter().copied().zip(dense.parts());
        add(Storage::F16, parts.collect(), &self.dense);
        all
    }
}

fn packed_part(products: &Products, product: Product) -> Part {
    products.part(product, MOST_WEIGHTS, TILE_ROWS)
}

#[expect(clippy::cast_precision_loss, reason = "a ratio of rows")]
fn kernel_time(
    scheme: Storage,
    (product, part): (Product, Part),
    batch: usize,
    mut times: Vec<f64>,
) -> KernelTime {
    times.sort_by(f64::total_cmp);
    let scale = (product.rows / product.pieces) as f64 / part.rows as f64;
    let (last, scaled) = (times.len() - 1, |us: f64| us * scale);
    KernelTime {
        scheme,
        product,
        batch,
        spread: [scaled(times[last / 4]), scaled(times[last - last / 4])],
        us: scaled(Spread::of(times).median),
    }
}

/// One matrix of every product, of one scheme.
struct Set {
    matrices: Vec<PackedMatrix>,
    /// A strip for each number of columns, by columns.
    strips: BTreeMap<usize, PackedMatrix>,
    /// Multiplied first, so that threads, instructions and tables are at hand as within a model.
    first: PackedMatrix,
}

impl Set {
    fn new(scheme: Scheme, products: &Products, arena: &Arena, kernels: &Kernels) -> Result<Self, Error> {
        let all = &products.all;
        let narrow = all.iter().map(|p| p.cols).min().unwrap_or(TILE_ROWS);
        let first = arena.matrix(scheme, Shape::new(WARM_ROWS, narrow), false, all.len(), kernels)?;
        let mut set = Self { matrices: Vec::new(), strips: BTreeMap::new(), first };
        for (salt, &product) in all.iter().enumerate() {
            let part = packed_part(products, product);
            set.matrices.push(arena.matrix(scheme, part.shape(), false, salt, kernels)?);
            let strip = Shape::new(TILE_ROWS, part.cols);
            set.strips.insert(part.cols, arena.matrix(scheme, strip, false, salt, kernels)?);
        }
        Ok(set)
    }

    /// Microseconds of each product, `rounds` times; in a round each matrix is multiplied once,
    /// after the caches were filled with something else. What a step does once per input, the
    /// integers of the activations, is made by a strip before.
    fn measure(
        &self,
        products: &Products,
        batch: usize,
        rounds: usize,
        flush: &mut limits::Memory,
        times: &mut [Vec<f64>],
    ) {
        const FITS: &str = "shapes that fit";
        let (mut x, mut y, mut strip) = (Activations::new(), Vec::new(), Vec::new());
        let mut rng = ChaCha8Rng::seed_from_u64(0);
        for round in 0..=rounds {
            flush.sweep();
            let Shape { rows, cols } = self.first.shape();
            x.set(&cases::activations(batch * cols, 1), cols).expect(FITS);
            y.resize(batch * rows, 0.0);
            matmul(&self.first, &mut x, &mut y).expect(FITS);
            for ((matrix, &product), times) in self.matrices.iter().zip(&products.all).zip(times.iter_mut()) {
                let (part, tokens) = (packed_part(products, product), batch * products.active(product));
                let input = cases::activations(tokens * part.cols, 1);
                x.set(&input, part.cols).expect(FITS);
                strip.resize(tokens * TILE_ROWS, 0.0);
                matmul(&self.strips[&part.cols], &mut x, &mut strip).expect(FITS);
                y.resize(tokens * part.rows, 0.0);
                y.fill(f32::NAN);
                let start = if product.pieces > 1 {
                    let first = RowsOf::new(matrix, 0..part.rows).expect("whole strips");
                    let routes = products.routes(product, part, batch, &mut rng);
                    let groups = divided(&routes, first.group_tokens());
                    let start = Instant::now();
                    with_team(|team| {
                        matmul_groups_with(team, (&[first], Gate::default()), &groups, &input, &mut x, &mut y)
                    })
                    .expect(FITS);
                    start
                } else {
                    let start = Instant::now();
                    matmul(matrix, &mut x, &mut y).expect(FITS);
                    start
                };
                let us = start.elapsed().as_secs_f64() * 1e6;
                assert!(y.iter().all(|y| y.is_finite()), "{}: finite results", matrix.scheme());
                if round > 0 {
                    times.push(us);
                }
            }
        }
    }
}

/// Groups of at most `most` tokens.
fn divided(groups: &[Group], most: usize) -> Vec<Group> {
    let parts = |group: &Group| {
        let Group { piece, tokens } = group.clone();
        let end = tokens.end;
        tokens.step_by(most).map(move |from| Group { piece, tokens: from..end.min(from + most) })
    };
    groups.iter().flat_map(parts).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use fracbit_plan::Preset;

    fn products(shape: &str, most_tokens: usize) -> Products {
        Products::of(&Preset::named(shape).unwrap().model_config().unwrap(), most_tokens)
    }

    #[test]
    fn shapes_of_a_llama() {
        let products = products("llama-3.2-1b", 8);
        let shapes: Vec<_> = products.all.iter().map(|p| (p.rows, p.cols, p.pieces)).collect();
        let wide = [512, 1024, 2048, 2560, 3072, 8192, 16384, 128_256].map(|rows| (rows, 2048, 1));
        assert_eq!(shapes, [&wide[..], &[(2048, 8192, 1)]].concat());
        let head = Product { cols: 2048, rows: 128_256, pieces: 1 };
        assert_eq!(packed_part(&products, head), Part { pieces: 1, rows: 32768, cols: 2048 });
    }

    #[test]
    fn of_experts_so_many_are_held_as_a_step_meets() {
        let gate = Product { cols: 2048, rows: 128 * 768, pieces: 128 };
        let down = Product { cols: 768, rows: 128 * 2048, pieces: 128 };
        for (most_tokens, part) in [
            (1, Part { pieces: 42, rows: 768, cols: 2048 }),
            (8, Part { pieces: 64, rows: 512, cols: 2048 }),
            (100, Part { pieces: 128, rows: 256, cols: 2048 }),
        ] {
            let products = products("qwen3-30b-a3b", most_tokens);
            assert!(products.single.contains(&gate) && products.single.contains(&down), "gate, up and down");
            assert!(products.all.iter().all(|p| p.pieces == 1 || [gate, down].contains(p)), "none is fused");
            assert_eq!(packed_part(&products, gate), part, "{most_tokens}");
            assert_eq!(
                products.part(gate, 1, 1),
                Part { pieces: (8 * most_tokens).min(128), rows: 1, cols: 2048 }
            );
            let mut rng = ChaCha8Rng::seed_from_u64(1);
            for _ in 0..20 {
                let groups = products.routes(gate, part, most_tokens, &mut rng);
                let ends: Vec<usize> = groups.iter().map(|g| g.tokens.end).collect();
                assert!(groups.iter().skip(1).zip(&ends).all(|(g, &end)| g.tokens.start == end));
                assert_eq!((groups[0].tokens.start, ends.last()), (0, Some(&(8 * most_tokens))));
                assert!(groups.iter().all(|g| g.piece < part.pieces && g.tokens.len() <= most_tokens));
                let few = divided(&groups, 3);
                assert!(few.iter().all(|g| (1..=3).contains(&g.tokens.len())));
                assert_eq!(few.iter().map(|g| g.tokens.len()).sum::<usize>(), 8 * most_tokens);
            }
        }
    }
}
