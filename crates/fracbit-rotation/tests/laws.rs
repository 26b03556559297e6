//! Laws on random widths: norms and inner products are kept, the inverse undoes, superposition
//! holds.

use fracbit_rotation::Rotation;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

fn width() -> impl Strategy<Value = usize> {
    let of_models = [
        2048, 2560, 3072, 4864, 5120, 5632, 6912, 8192, 8960, 9728, 11008, 13824, 14336, 18944, 22016, 24576,
        27648, 28672, 29568, 49152, 53248,
    ];
    prop_oneof![
        2 => proptest::sample::select(of_models.to_vec()),
        1 => 1usize..4000,
        1 => (1usize..300, 4u32..9).prop_map(|(k, p)| k << p),
    ]
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, rng_seed: RngSeed::Fixed(2), ..ProptestConfig::default() })]

    #[test]
    fn orthogonal_and_invertible(n in width(), seed: u64, stream: u64) {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut vector = || (0..n).map(|_| rng.random_range(-1.0f32..1.0)).collect::<Vec<_>>();
        let (x, y) = (vector(), vector());
        let rotation = Rotation::new(n, seed, stream).unwrap();
        let (mut rx, mut ry) = (x.clone(), y.clone());
        rotation.apply(&mut rx);
        rotation.apply(&mut ry);
        let size = (dot(&x, &x) * dot(&y, &y)).sqrt();
        prop_assert!((dot(&rx, &rx) / dot(&x, &x) - 1.0).abs() < 2e-6);
        prop_assert!((dot(&rx, &ry) - dot(&x, &y)).abs() < 2e-6 * size);
        rotation.apply_inverse(&mut rx);
        for (got, want) in rx.iter().zip(&x) {
            prop_assert!((got - want).abs() < 1e-5, "{got} for {want}");
        }
    }
}
