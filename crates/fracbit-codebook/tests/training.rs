//! Training repeats itself, gives the committed books, and is no worse than the `kmeans` crate.

use fracbit_base::{Family, Scheme};
use fracbit_codebook::{
    builtin, nmse,
    train::{self, gaussian_pairs, lloyd, sunflower},
};
use fracbit_format::Grid;
use kmeans::{EuclideanDistance, KMeans, KMeansConfig};

#[test]
fn scalar_training_gives_the_committed_books() {
    for scheme in Scheme::all().filter(|s| s.family() == Family::Nuq) {
        assert_eq!(train::codebook(scheme, train::SEED).as_ref(), builtin(scheme), "{scheme}");
    }
}

#[test]
fn the_integer_grid_costs_little() {
    for scheme in Scheme::all().filter(|s| s.family() == Family::Nuq) {
        let best = train::scalar_error(&train::lloyd_max(u32::from(scheme.quarters() / 4)));
        let cost = nmse(scheme).unwrap() / best - 1.0;
        let limit = if builtin(scheme).unwrap().grid() == Grid::I8 { 0.01 } else { 0.001 };
        assert!((0.0..limit).contains(&cost), "{scheme}: {cost}");
    }
}

#[test]
fn vector_training_gives_the_committed_book_at_one_thread_and_at_two() {
    let scheme = "vq-1.5".parse().unwrap();
    for threads in [1, 2] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let book = pool.install(|| train::codebook(scheme, train::SEED));
        assert_eq!(book.as_ref(), builtin(scheme), "{threads} threads");
    }
}

#[test]
fn additive_training_gives_the_committed_book() {
    for scheme in ["aq-m1v4", "aq-m2v8b4"].map(|name| name.parse().unwrap()) {
        assert_eq!(train::codebook(scheme, train::SEED).as_ref(), builtin(scheme), "{scheme}");
    }
}

/// Moments of the stratified sample: N(0, 1) per coordinate, uncorrelated.
#[test]
fn sample_is_gaussian() {
    let pairs = gaussian_pairs(256, 5);
    let mean = |f: &dyn Fn(f64, f64) -> f64| {
        pairs.iter().map(|p| f(p[0].into(), p[1].into())).sum::<f64>() / pairs.len() as f64
    };
    for (name, got, want) in [
        ("x", mean(&|x, _| x), 0.0),
        ("y", mean(&|_, y| y), 0.0),
        ("x^2", mean(&|x, _| x * x), 1.0),
        ("y^2", mean(&|_, y| y * y), 1.0),
        ("x y", mean(&|x, y| x * y), 0.0),
        ("x^4", mean(&|x, _| x.powi(4)), 3.0),
        ("x^2 y^2", mean(&|x, y| x * x * y * y), 1.0),
        ("x > 1", mean(&|x, _| f64::from(u8::from(x > 1.0))), 0.158_655),
    ] {
        assert!((got - want).abs() < 2e-3, "{name}: {got}");
    }
}

/// Same sample, same start: the crate's Lloyd iteration and ours end at nearly the same error
/// (over-relaxation may lead to another minimum nearby).
#[test]
fn no_worse_than_the_kmeans_crate() {
    for count in [16, 64] {
        let samples = gaussian_pairs(48, 9);
        let start = sunflower(count, 0.0);
        let flat: Vec<f32> = start.iter().flatten().map(|&v| v as f32).collect();
        let peer: KMeans<f32, 8, _> =
            KMeans::new(samples.as_flattened(), samples.len(), 2, EuclideanDistance);
        let peer = peer.kmeans_lloyd(count, 120, KMeans::init_precomputed(flat), &KMeansConfig::default());
        let peer = f64::from(peer.distsum) / (2 * samples.len()) as f64;
        let own = lloyd(&samples, start, 120, 1e-7).error;
        assert!((0.97..=1.002).contains(&(own / peer)), "{count} points: own {own}, kmeans crate {peer}");
    }
}
