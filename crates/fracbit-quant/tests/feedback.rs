//! Error feedback against what its algebra promises.

use fracbit_base::{Scheme, Shape};
use fracbit_codebook::Rounder;
use fracbit_format::{Codebook, SchemeSpec, TILE};
use fracbit_quant::{
    Grouping, Hessian, QuantError, Quantized, Rounders, Rounding, codebook, hessian, quantize_with,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;
use std::sync::{Arc, LazyLock, Mutex};

fn gaussian(count: usize, seed: u64) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..count).map(|_| rng.sample::<f32, _>(StandardNormal)).collect()
}

/// Built once for all tests.
static ROUNDERS: LazyLock<Rounders> = LazyLock::new(Rounders::default);

fn under(moments: &Hessian) -> Rounding<'_> {
    Rounding { moments: std::slice::from_ref(moments), ..Rounding::new(&ROUNDERS) }
}

fn quantize(
    weights: &[f32],
    shape: Shape,
    scheme: Scheme,
    grouping: Grouping,
    progress: &(dyn Fn(usize) + Sync),
) -> Result<Quantized, QuantError> {
    fracbit_quant::quantize(weights, shape, scheme, grouping, &ROUNDERS, progress)
}

fn scheme(name: &str) -> Scheme {
    name.parse().expect("a scheme of the palette")
}

/// `rho^|i - j|`: the moments of an autoregressive channel order.
fn autoregressive(n: usize, rho: f32) -> Vec<f32> {
    (0..n * n).map(|at| rho.powi((at / n).abs_diff(at % n) as i32)).collect()
}

/// Moments with eigenvalues `decay^i` in a random basis (products of reflections).
fn decaying(n: usize, decay: f64, seed: u64) -> Vec<f32> {
    let mut h = vec![0.0f64; n * n];
    (0..n).for_each(|i| h[i * n + i] = decay.powi(i as i32));
    for k in 0..8 {
        let v = gaussian(n, seed + k);
        let norm: f64 = v.iter().map(|&v| f64::from(v).powi(2)).sum();
        // (1 - 2 v v^T / |v|^2) from both sides.
        for _ in 0..2 {
            for row in h.chunks_mut(n) {
                let dot: f64 = row.iter().zip(&v).map(|(h, &v)| h * f64::from(v)).sum();
                row.iter_mut().zip(&v).for_each(|(h, &v)| *h -= 2.0 * dot / norm * f64::from(v));
            }
            h = (0..n * n).map(|at| h[at % n * n + at / n]).collect();
        }
    }
    (0..n * n).map(|at| ((h[at] + h[at % n * n + at / n]) / 2.0) as f32).collect()
}

/// Diagonal blocks of D in `H + damping = L D L^T`, by plain elimination from the last column:
/// their trace is the loss per unit of white rounding error.
fn trace_of_d(h: &[f32], n: usize, block: usize, damping: f64) -> f64 {
    let mean = (0..n).map(|i| f64::from(h[i * n + i])).sum::<f64>() / n as f64;
    let mut a: Vec<f64> = h.iter().map(|&v| f64::from(v)).collect();
    (0..n).for_each(|i| a[i * n + i] += damping * mean);
    let mut trace = 0.0;
    for first in (0..n).step_by(block) {
        let last = n.min(first + block);
        trace += (first..last).map(|i| a[i * n + i]).sum::<f64>();
        for k in first..last {
            for i in k + 1..n {
                let f = a[i * n + k] / a[k * n + k];
                (k..n).for_each(|j| a[i * n + j] -= f * a[k * n + j]);
            }
        }
    }
    trace
}

fn loss(h: &Hessian, weights: &[f32], packed: &Quantized) -> f64 {
    let error: Vec<f32> = weights.iter().zip(packed.view().dequantize()).map(|(w, q)| w - q).collect();
    h.loss(&error)
}

#[test]
fn identity_moments_change_no_bit() {
    for (name, rows, cols) in [
        ("nuq-3", 70, 200),
        ("vq-2", 33, 136),
        ("tcq-2", 20, 150),
        ("tcq-fast-3", 16, 144),
        ("half-tcq-2.25", 65, 300),
        ("int-4", 33, 200),
        ("gnuq-2", 70, 136),
        ("aq-m2v8", 33, 136),
    ] {
        let shape = Shape::new(rows, cols);
        let weights = gaussian(shape.len(), 1);
        let identity = (0..cols * cols).map(|at| f32::from(u8::from(at / cols == at % cols))).collect();
        let h = Hessian::new(cols, identity).unwrap();
        for grouping in [Grouping::Row, Grouping::Columns(32), Grouping::Columns(64), Grouping::Columns(160)]
        {
            let plain = quantize(&weights, shape, scheme(name), grouping, &|_| ()).unwrap();
            let fed = quantize_with(&weights, shape, scheme(name), grouping, under(&h), &|_| ()).unwrap();
            assert!(plain == fed, "{name} {grouping:?}");
        }
    }
}

/// The processor's rounder as a device would have it: it wants so many tiles at once, and notes how
/// many it gets.
struct Batched {
    rounder: Arc<dyn Rounder>,
    batch: usize,
    calls: Arc<Mutex<Vec<usize>>>,
}

impl Rounder for Batched {
    fn codebook(&self) -> &Codebook {
        self.rounder.codebook()
    }

    fn encode(&self, tiles: &[[f32; TILE]], codes: &mut [u8]) {
        self.calls.lock().expect("no other panic").push(tiles.len());
        self.rounder.encode(tiles, codes);
    }

    fn batch(&self) -> usize {
        self.batch
    }
}

#[test]
fn strips_that_go_together_change_no_bit() {
    let rows = 320;
    for (name, cols, grouping) in [
        ("vq-2", 150, Grouping::Columns(32)),
        ("tcq-fast-2", 40, Grouping::Row),
        ("half-tcq-2.25", 40, Grouping::Row),
        ("nest-tcq-2+1", 40, Grouping::Row),
    ] {
        let shape = Shape::new(rows, cols);
        let weights = gaussian(shape.len(), 3);
        let both =
            [decaying(cols, 0.95, 4), autoregressive(cols, 0.9)].map(|h| Hessian::new(cols, h).unwrap());
        for moments in [&both[..1], &both] {
            let by = |rounders: &Rounders| {
                let rounding = Rounding { moments, ..Rounding::new(rounders) };
                quantize_with(&weights, shape, scheme(name), grouping, rounding, &|_| ()).unwrap()
            };
            let want = by(&ROUNDERS);
            // 20 rows of tiles, or twice 10, in equal parts of whole strips.
            let parts: [(usize, &[usize]); 4] = match moments.len() {
                1 => [(1, &[4]), (8, &[4, 8]), (19, &[8, 12]), (1000, &[20])],
                _ => [(1, &[2, 4]), (8, &[2, 8]), (19, &[10]), (1000, &[10])],
            };
            for (batch, parts) in parts {
                let calls = Arc::new(Mutex::new(Vec::new()));
                let told = Arc::clone(&calls);
                let batched = Rounders::provided(Box::new(move |scheme| {
                    let rounder = ROUNDERS.get(scheme)?;
                    Some(Box::new(Batched { rounder, batch, calls: Arc::clone(&told) }))
                }));
                assert!(by(&batched) == want, "{name} {batch}");
                let mut calls = std::mem::take(&mut *calls.lock().unwrap());
                calls.sort_unstable();
                calls.dedup();
                assert_eq!(calls, parts, "{name} {batch}");
            }
        }
    }
}

#[test]
fn strips_of_any_height_change_no_bit() {
    // Few threads take high strips; 790 rows end within a tile.
    for (name, rows, cols, grouping) in [
        ("vq-2", 790, 150, Grouping::Row),
        ("vq-2", 790, 150, Grouping::Columns(64)),
        ("int-4", 790, 150, Grouping::Columns(32)),
        ("qoq-g128", 790, 300, Grouping::Row),
        ("nest-tcq-fast-2+1", 790, 40, Grouping::Row),
    ] {
        let shape = Shape::new(rows, cols);
        let weights = gaussian(shape.len(), 5);
        let moments = Hessian::new(cols, autoregressive(cols, 0.9)).unwrap();
        let on = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let rounding = under(&moments);
            pool.install(|| {
                quantize_with(&weights, shape, scheme(name), grouping, rounding, &|_| ()).unwrap()
            })
        };
        let one = on(1);
        assert!(one == on(2) && one == on(9), "{name} {grouping:?}");
    }
}

/// L below the diagonal, of moments of mean 1 with the usual damping: column by column elimination.
fn unit_lower(h: &[f32], n: usize) -> Vec<f64> {
    let mut a: Vec<f64> = h.iter().map(|&v| f64::from(v)).collect();
    (0..n).for_each(|i| a[i * n + i] += hessian::DAMPING);
    for k in 0..n {
        for i in k + 1..n {
            let f = a[i * n + k] / a[k * n + k];
            (k + 1..n).for_each(|j| a[i * n + j] -= f * a[k * n + j]);
            a[i * n + k] = f;
        }
    }
    a
}

/// LDLQ of one row in f64, a column at a time, as the algebra says it.
#[test]
fn scalar_feedback_follows_the_recurrence() {
    let (rows, cols) = (5, 300);
    let shape = Shape::new(rows, cols);
    let weights = gaussian(shape.len(), 2);
    let h = autoregressive(cols, 0.6);
    let moments = Hessian::new(cols, h.clone()).unwrap();
    let packed =
        quantize_with(&weights, shape, scheme("nuq-3"), Grouping::Row, under(&moments), &|_| ()).unwrap();
    let a = unit_lower(&h, cols);
    let book = codebook(scheme("nuq-3")).unwrap();
    let decoded = packed.view().dequantize();
    let mut different = 0;
    for (r, row) in weights.chunks(cols).enumerate() {
        let rms = (row.iter().map(|&w| f64::from(w).powi(2)).sum::<f64>() / cols as f64).sqrt();
        let scale = f64::from(
            half::f16::from_f32((rms / f64::from(packed.data.gain())) as f32).to_f32() * packed.data.gain(),
        );
        let mut error = vec![0.0; cols];
        for k in (0..cols).rev() {
            let target = f64::from(row[k]) + (k + 1..cols).map(|j| error[j] * a[j * cols + k]).sum::<f64>();
            let value = |e: &i16| f64::from(*e) * f64::from(book.step());
            let best = book
                .entries()
                .iter()
                .min_by(|x, y| {
                    (value(x) - target / scale).abs().total_cmp(&(value(y) - target / scale).abs())
                })
                .unwrap();
            error[k] = f64::from(row[k]) - scale * value(best);
            // The packed weight is the same entry under the re-fitted scale.
            let fitted = f64::from(packed.data.scales()[r].to_f32() * packed.data.gain());
            let got = f64::from(decoded[r * cols + k]) / fitted;
            different += usize::from((got - value(best)).abs() > 1e-5);
        }
    }
    // Single precision may turn a near tie, and then what follows in that row.
    assert!(different <= rows * cols / 100, "{different} of {} weights differ", rows * cols);
}

/// White rounding error of variance s² per weight costs `s² tr H` without feedback and `s² tr D`
/// with it. For `rho^|i - j|` and single columns D is `1 - rho²` but for the first, so the loss
/// falls by `rho²`.
#[test]
fn the_loss_falls_as_derived() {
    let n = 256;
    let shape = Shape::new(128, n);
    let weights = gaussian(shape.len(), 3);
    let rho = 0.8f32;
    let closed = 1.0 - f64::from(rho * rho);
    let traced = trace_of_d(&autoregressive(n, rho), n, 1, 0.0) / n as f64;
    assert!((traced / closed - 1.0).abs() < 0.02, "{traced} {closed}");
    for (name, block) in [
        ("nuq-4", 1),
        ("vq-3.5", 2),
        ("tcq-3", 16),
        ("half-tcq-2.75", 16),
        ("int-4", 1),
        ("gnuq-3", 1),
        ("qoq-g128", 1),
        ("qoq-channel", 1),
        ("aq-m1v4", 4),
        ("aq-m2v8", 8),
    ] {
        let grouping = SchemeSpec::of(scheme(name)).grouping;
        for (what, h) in [("autoregressive", autoregressive(n, rho)), ("decaying", decaying(n, 0.97, 9))] {
            let promised = trace_of_d(&h, n, block, hessian::DAMPING)
                / (0..n).map(|i| f64::from(h[i * n + i])).sum::<f64>();
            let h = Hessian::new(n, h).unwrap();
            // `left` counts the damping in the whole too.
            let left = h.left(block).unwrap() * (1.0 + hessian::DAMPING);
            assert!((left / promised - 1.0).abs() < 1e-3, "{name}, {what}: {left} {promised}");
            let plain = quantize(&weights, shape, scheme(name), grouping, &|_| ()).unwrap();
            let fed = quantize_with(&weights, shape, scheme(name), grouping, under(&h), &|_| ()).unwrap();
            let ratio = loss(&h, &weights, &fed) / loss(&h, &weights, &plain);
            // Feedback widens the targets, which costs a little; re-fitted scales win a little
            // back.
            assert!(
                (0.8 * promised..1.2 * promised).contains(&ratio),
                "{name}, {what}: the loss falls to {ratio:.4}, promised {promised:.4}"
            );
            assert!(fed.relative_error > plain.relative_error, "{name}, {what}: the weights themselves pay");
        }
    }
}

#[test]
fn deficient_and_dead_inputs_are_rounded_all_the_same() {
    let n = 80;
    let shape = Shape::new(20, n);
    let weights = gaussian(shape.len(), 4);
    // One sample, so rank one, and dead channels.
    let x: Vec<f32> =
        gaussian(n, 5).into_iter().enumerate().map(|(i, v)| if i % 3 == 0 { 0.0 } else { v }).collect();
    let h = Hessian::new(n, (0..n * n).map(|at| x[at / n] * x[at % n]).collect()).unwrap();
    assert_eq!(h.dead(), 27);
    for name in ["nuq-2", "vq-2", "tcq-2"] {
        let plain = quantize(&weights, shape, scheme(name), Grouping::Row, &|_| ()).unwrap();
        let fed = quantize_with(&weights, shape, scheme(name), Grouping::Row, under(&h), &|_| ()).unwrap();
        assert!(loss(&h, &weights, &fed) < 0.3 * loss(&h, &weights, &plain), "{name}");
        assert!(fed.relative_error < 0.8, "{name}: {}", fed.relative_error);
    }
    let none = Hessian::new(n, vec![0.0; n * n]).unwrap();
    let plain = quantize(&weights, shape, scheme("tcq-2"), Grouping::Row, &|_| ()).unwrap();
    let fed = quantize_with(&weights, shape, scheme("tcq-2"), Grouping::Row, under(&none), &|_| ()).unwrap();
    assert_eq!(plain.data.codes(), fed.data.codes());
    let wrong = Hessian::new(3, vec![1.0; 9]).unwrap();
    assert!(quantize_with(&weights, shape, scheme("tcq-2"), Grouping::Row, under(&wrong), &|_| ()).is_err());
}

#[test]
fn same_bytes_at_any_thread_count() {
    let n = 320;
    let shape = Shape::new(150, n);
    let weights = gaussian(shape.len(), 6);
    let run = |name, threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let h = Hessian::new(n, decaying(n, 0.98, 1)).unwrap();
            let one_level = SchemeSpec::of(scheme(name)).second_level.is_none();
            let grouping = if one_level { Grouping::Columns(64) } else { Grouping::Row };
            quantize_with(&weights, shape, scheme(name), grouping, under(&h), &|_| ()).unwrap()
        })
    };
    for name in ["tcq-2", "gnuq-2", "qoq-g128"] {
        assert!(run(name, 1) == run(name, 3), "{name}");
    }
}

/// Groups with scales of their own: every weight is the entry nearest to its target under the scale
/// of its group.
#[test]
fn feedback_of_groups_follows_the_recurrence() {
    let (rows, cols) = (5, 300);
    let shape = Shape::new(rows, cols);
    let weights = gaussian(shape.len(), 8);
    let h = autoregressive(cols, 0.6);
    let moments = Hessian::new(cols, h.clone()).unwrap();
    let lower = unit_lower(&h, cols);
    let small = ["int-4", "int-8", "gnuq-2", "gnuq-4"].map(|name| (name, 32));
    // Wide ones take their columns in several steps.
    for (name, group) in small.into_iter().chain([("int-4", 160), ("int-8", cols)]) {
        let grouping = if group == cols { Grouping::Row } else { Grouping::Columns(group) };
        let packed =
            quantize_with(&weights, shape, scheme(name), grouping, under(&moments), &|_| ()).unwrap();
        let book = &packed.data.codebooks()[0];
        let size = book.entries().len() / book.books();
        let (decoded, groups) = (packed.view().dequantize(), grouping.groups(cols));
        let (mut different, mut squares) = (0, 0.0);
        for (r, row) in weights.chunks(cols).enumerate() {
            let off = |k: usize| f64::from(row[k]) - f64::from(decoded[r * cols + k]);
            squares += (0..cols).map(|k| off(k).powi(2)).sum::<f64>();
            for k in 0..cols {
                let target =
                    f64::from(row[k]) + (k + 1..cols).map(|j| off(j) * lower[j * cols + k]).sum::<f64>();
                let scale = packed.data.scales()[r * groups + k / group];
                let factor = f64::from(scale.to_f32() * packed.data.gain() * book.step());
                let entries = &book.entries()[usize::from(book.book_of(scale)) * size..][..size];
                let far = |value: f64| (value - target).abs();
                let best = entries.iter().map(|&e| far(f64::from(e) * factor)).fold(f64::INFINITY, f64::min);
                different += usize::from(far(f64::from(decoded[r * cols + k])) > best + 1e-5);
            }
        }
        assert_eq!(different, 0, "{name}, {group}: weights that are not the nearest to their targets");
        let energy: f64 = weights.iter().map(|&w| f64::from(w).powi(2)).sum();
        assert!((packed.relative_error - squares / energy).abs() < 1e-6, "{name}");
    }
}

/// Whatever feedback makes of the targets, the weights of the first level stay int8.
#[test]
fn progressive_weights_stay_int8_under_feedback() {
    let (rows, cols) = (40, 300);
    let shape = Shape::new(rows, cols);
    let mut weights = gaussian(shape.len(), 11);
    weights.iter_mut().step_by(97).for_each(|w| *w *= 5.0);
    weights[cols..2 * cols].fill(0.0);
    let moments = Hessian::new(cols, autoregressive(cols, 0.97)).unwrap();
    for name in ["qoq-g128", "qoq-channel"] {
        let packed =
            quantize_with(&weights, shape, scheme(name), Grouping::Row, under(&moments), &|_| ()).unwrap();
        let view = packed.view();
        let mut tile = [0; TILE];
        let mut largest = 0;
        for down in 0..view.layout().tiles_down() {
            for across in 0..view.layout().tiles_across() {
                view.expand_tile(0, down, across, &mut tile);
                largest = tile.iter().fold(largest, |most, w| w.abs().max(most));
            }
        }
        assert!(largest <= 127, "{name}: {largest}");
        assert!(name == "qoq-channel" || largest > 100, "{name}: {largest}, the range is used");
        assert!(view.dequantize()[cols..2 * cols].iter().all(|&w| w == 0.0), "{name}: a row of zeros");
    }
    let groups = Grouping::Columns(64);
    let refused = quantize(&weights, shape, scheme("qoq-g128"), groups, &|_| ()).unwrap_err().to_string();
    assert!(refused.contains("the whole row") && refused.contains("64"), "{refused}");
}

/// Experts one above the other, each with moments of its own: as if each were rounded alone.
#[test]
fn every_piece_has_its_own_moments() {
    let (n, rows) = (48, 80);
    let moments: Vec<Hessian> =
        [0.9, 0.0, 0.5].map(|rho| Hessian::new(n, autoregressive(n, rho)).unwrap()).into();
    let weights = gaussian(3 * rows * n, 7);
    let shape = Shape::new(3 * rows, n);
    for name in ["tcq-2", "vq-2", "nuq-3", "half-tcq-2.25"] {
        let rounding = Rounding { moments: &moments, ..Rounding::new(&ROUNDERS) };
        let whole = quantize_with(&weights, shape, scheme(name), Grouping::Row, rounding, &|_| ()).unwrap();
        for (piece, h) in moments.iter().enumerate() {
            let part = &weights[piece * rows * n..(piece + 1) * rows * n];
            let alone =
                quantize_with(part, Shape::new(rows, n), scheme(name), Grouping::Row, under(h), &|_| ())
                    .unwrap();
            let bytes = alone.data.codes().len();
            assert_eq!(whole.data.gain(), alone.data.gain(), "{name}: weights of one distribution");
            assert_eq!(
                whole.data.codes()[piece * bytes..(piece + 1) * bytes],
                *alone.data.codes(),
                "{name} {piece}"
            );
            assert_eq!(
                whole.data.scales()[piece * rows..(piece + 1) * rows],
                *alone.data.scales(),
                "{name} {piece}"
            );
        }
        let rounding = Rounding { moments: &moments[..2], ..Rounding::new(&ROUNDERS) };
        let error = quantize_with(
            &weights[..72 * n],
            Shape::new(72, n),
            scheme(name),
            Grouping::Row,
            rounding,
            &|_| (),
        );
        let error = error.unwrap_err().to_string();
        assert!(error.contains("2 times a multiple of 16") && error.contains("72"), "{error}");
    }
}
