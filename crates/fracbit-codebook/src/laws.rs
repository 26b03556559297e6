//! What every [`Rounder`] must satisfy, as checks that any crate's tests can call; each panics with
//! what it found.

use crate::{Rounder, distortion, distortion::gaussian_chunk};
use fracbit_format::TILE;

/// Seeded N(0, 1) tiles.
#[must_use]
pub fn tiles(count: usize, seed: u64) -> Vec<[f32; TILE]> {
    let mut tiles = vec![[0.0; TILE]; count];
    gaussian_chunk(seed, 0, &mut tiles);
    tiles
}

/// The codes of `tiles`.
#[must_use]
pub fn encode(rounder: &dyn Rounder, tiles: &[[f32; TILE]]) -> Vec<u8> {
    let mut codes = vec![0xa5; tiles.len() * rounder.codebook().tile_bytes()];
    rounder.encode(tiles, &mut codes);
    codes
}

/// The weights of `codes`.
#[must_use]
pub fn decode(rounder: &dyn Rounder, codes: &[u8]) -> Vec<[f32; TILE]> {
    let book = rounder.codebook();
    let mut integers = [0; TILE];
    let tile = |code| {
        book.expand_tile(code, &mut integers);
        integers.map(|i| f32::from(i) * book.step())
    };
    codes.chunks_exact(book.tile_bytes()).map(tile).collect()
}

/// Squared error and energy of `tiles` against `decoded`.
#[must_use]
pub fn squared_error(tiles: &[[f32; TILE]], decoded: &[[f32; TILE]]) -> [f64; 2] {
    let pairs = tiles.as_flattened().iter().zip(decoded.as_flattened());
    pairs.fold([0.0; 2], |[error, energy], (&x, &q)| {
        let (x, q) = (f64::from(x), f64::from(q));
        [error + (x - q) * (x - q), energy + x * x]
    })
}

/// The same tiles give the same bytes: twice, one tile a call, whatever the buffer held and at 1 to
/// 3 threads.
///
/// # Panics
/// When they do not.
pub fn deterministic(rounder: &dyn Rounder, count: usize) {
    let scheme = rounder.codebook().scheme();
    let tiles = tiles(count, 7);
    let want = encode(rounder, &tiles);
    let single: Vec<u8> = tiles.chunks(1).flat_map(|tile| encode(rounder, tile)).collect();
    assert_eq!(single, want, "{scheme}: tile by tile");
    let mut codes = vec![0xff; want.len()];
    rounder.encode(&tiles, &mut codes);
    assert_eq!(codes, want, "{scheme}: a buffer that was not clear");
    let errors = [1, 2, 3].map(|threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a thread pool");
        pool.install(|| distortion(rounder, 130 * TILE, 7))
    });
    assert!(
        errors.iter().all(|e| e.to_bits() == errors[0].to_bits()),
        "{scheme}: {errors:?} at 1, 2, 3 threads"
    );
}

/// [`distortion`] is the error that decoding shows.
///
/// # Panics
/// When it is not.
pub fn error_is_what_decoding_shows(rounder: &dyn Rounder) {
    let tiles = tiles(20, 11);
    let [error, energy] = squared_error(&tiles, &decode(rounder, &encode(rounder, &tiles)));
    let measured = distortion(rounder, tiles.len() * TILE, 11);
    let scheme = rounder.codebook().scheme();
    assert!(
        (measured / (error / energy) - 1.0).abs() < 1e-12,
        "{scheme}: {measured} against {}",
        error / energy
    );
}

/// Encoding a decoded tile loses nothing: for exact searches only. Tries `count` tiles of arbitrary
/// code bytes.
///
/// # Panics
/// When it does lose something.
pub fn lossless_on_own_output(rounder: &dyn Rounder, count: usize) {
    let bytes = rounder.codebook().tile_bytes();
    let codes: Vec<u8> = (0..count * bytes).map(|i| (i * i * 31 + i * 89 + i / 256 * 7) as u8).collect();
    let decoded = decode(rounder, &codes);
    let again = decode(rounder, &encode(rounder, &decoded));
    assert!(decoded == again, "{}: a decoded tile changed when encoded again", rounder.codebook().scheme());
}

/// Tiles of zeros, of large, tiny and non-finite values are coded without a panic, and finite ones
/// no worse than by the largest weight the codebook holds.
///
/// # Panics
/// When that fails.
pub fn survives_extremes(rounder: &dyn Rounder) {
    let scheme = rounder.codebook().scheme();
    for value in [0.0, -0.0, f32::MIN_POSITIVE, 1e-45, 100.0, -100.0, 1e30, f32::MAX, f32::NAN, f32::INFINITY]
    {
        let mut tile = [value; TILE];
        tile.iter_mut().step_by(3).for_each(|w| *w = -*w);
        let decoded = decode(rounder, &encode(rounder, &[tile]));
        assert!(decoded.as_flattened().iter().all(|w| w.is_finite()), "{scheme}: tile of {value}");
        if value.abs() <= 100.0 {
            let [error, energy] = squared_error(&[tile], &decoded);
            assert!(error <= energy + TILE as f64, "{scheme}: tile of {value} has squared error {error}");
        }
    }
}
