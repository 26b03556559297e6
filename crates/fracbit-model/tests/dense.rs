//! Dense layers: the products of one, of a few and of many tokens.

#![expect(
    clippy::unwrap_used,
    clippy::cast_precision_loss,
    reason = "a test's helpers fail by panicking; counts are small"
)]

use fracbit_base::Shape;
use fracbit_io::Checkpoint;
use fracbit_kernels::cases::activations;
use fracbit_model::{Linear, LinearScratch};
use half::{bf16, f16};
use std::sync::Arc;

/// Rows, columns, and what the shape is there for.
const SHAPES: [(usize, usize, &str); 7] = [
    (1, 1, "one weight"),
    (3, 15, "nothing but a tail"),
    (16, 16, "one block, one group"),
    (17, 33, "a row and a column more"),
    (40, 512, "one piece of columns"),
    (33, 1071, "three pieces and a tail"),
    (200, 96, "several tasks"),
];
/// Tokens: around the steps of the bodies, and on both sides of the largest number that counts as
/// few.
const TOKENS: [usize; 10] = [2, 3, 4, 5, 7, 8, 31, 32, 33, 50];

/// The name of an element type, and the bytes of the weights in it.
type Stored = (&'static str, Vec<u8>);

fn stored(weights: &[f32]) -> [Stored; 4] {
    let bytes = |f: &dyn Fn(f32) -> Vec<u8>| weights.iter().flat_map(|&w| f(w)).collect();
    [
        ("F32", bytes(&|w| w.to_le_bytes().to_vec())),
        ("BF16", bytes(&|w| bf16::from_f32(w).to_le_bytes().to_vec())),
        ("F16", bytes(&|w| f16::from_f32(w).to_le_bytes().to_vec())),
        ("F64", bytes(&|w| f64::from(w).to_le_bytes().to_vec())),
    ]
}

/// A checkpoint of one matrix.
fn checkpoint(name: &str, shape: Shape, (dtype, bytes): &Stored) -> Arc<Checkpoint> {
    let dir = std::env::temp_dir().join(format!("fracbit-dense-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let (rows, cols, end) = (shape.rows, shape.cols, bytes.len());
    let header = format!(r#"{{"w":{{"dtype":"{dtype}","shape":[{rows},{cols}],"data_offsets":[0,{end}]}}}}"#);
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(bytes);
    std::fs::write(dir.join("model.safetensors"), file).unwrap();
    let opened = Arc::new(Checkpoint::open(&dir).unwrap());
    // Mapped: the file lives on until it is unmapped.
    let _ = std::fs::remove_dir_all(&dir);
    opened
}

fn product(layer: &Linear, x: &[f32], tokens: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; tokens * layer.shape().rows];
    layer.apply(x, &mut LinearScratch::new(), &mut out).unwrap();
    out
}

/// What the rounding errors of a sum of products may be together, in any order: n u / (1 - n u)
/// times the sum of the magnitudes (Higham, Accuracy and Stability, section 3.1).
fn bound(weights: &[f32], x: &[f32]) -> f64 {
    let nu = weights.len() as f64 * f64::from(f32::EPSILON) / 2.0;
    let sum: f64 = weights.iter().zip(x).map(|(w, x)| (f64::from(*w) * f64::from(*x)).abs()).sum();
    nu / (1.0 - nu) * sum
}

#[test]
fn few_tokens_have_the_bits_of_one_and_many_stay_within_the_bound() {
    for (rows, cols, why) in SHAPES {
        let shape = Shape::new(rows, cols);
        let random = activations(rows * cols, 1);
        for stored in stored(&random) {
            let checkpoint = checkpoint(&format!("{rows}-{cols}-{}", stored.0), shape, &stored);
            let layer = Linear::stored(checkpoint, "w", None).unwrap();
            let weights = layer.to_dense().unwrap();
            let dense = Linear::dense(shape, weights.clone(), None).unwrap();
            for tokens in TOKENS {
                let what = format!("{} {shape} ({why}), {tokens} tokens", stored.0);
                let x = activations(tokens * cols, 2);
                let together = product(&layer, &x, tokens);
                assert!(together == product(&dense, &x, tokens), "{what}: in memory");
                for (t, (x, together)) in x.chunks(cols).zip(together.chunks(rows)).enumerate() {
                    let alone = product(&layer, x, 1);
                    if tokens <= 32 {
                        assert!(together == alone, "{what}: token {t}");
                        continue;
                    }
                    for ((a, b), w) in together.iter().zip(&alone).zip(weights.chunks(cols)) {
                        let off = f64::from((a - b).abs());
                        assert!(off <= 2.0 * bound(w, x), "{what}: token {t} is {off:e} off");
                    }
                }
            }
        }
    }
}

#[test]
fn few_tokens_have_the_same_bits_on_any_number_of_threads() {
    let shape = Shape::new(333, 700);
    let layer = Linear::dense(shape, activations(shape.len(), 3), Some(activations(333, 4))).unwrap();
    for tokens in [2, 9, 32] {
        let x = activations(tokens * 700, 5);
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| product(&layer, &x, tokens))
        };
        let one = run(1);
        assert!(run(2) == one && run(5) == one, "{tokens} tokens");
    }
}
