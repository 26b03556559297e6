//! Packed layers in a whole model.

#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test's helpers fail by panicking and report on stderr"
)]

mod common;
mod pack;

use common::{F32, logits, references, relative};
use fracbit_base::Shape;
use fracbit_format::TILE_ROWS;
use fracbit_kernels::{PackedMatrix, Team};
use fracbit_model::{
    KvType, LayerLinear, Linear, LinearId, LinearScratch, Matrix, Model, Read, RotationMode, StateOptions,
};
use pack::pack;
use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

#[test]
fn an_eight_bit_model_stays_close_to_the_original() {
    for r in references().unwrap_or_default() {
        for mode in [RotationMode::None, RotationMode::Fold, RotationMode::Online] {
            let source = r.smooth(mode, 7);
            let original = Model::from_source(&source).unwrap();
            let (mut packed, mut rounded) = (original.clone(), original.clone());
            let exact = logits(&original, &mut original.state(&F32), &r.tokens);
            for id in LinearId::all(source.config()) {
                let matrix = pack(&source.linear(id).unwrap());
                let layer = Linear::packed(matrix, source.bias(id).unwrap()).unwrap();
                let dense = Linear::dense(layer.shape(), layer.to_dense().unwrap(), source.bias(id).unwrap());
                rounded.replace(id, dense.unwrap()).unwrap();
                packed.replace(id, layer).unwrap();
            }
            assert!(packed.weight_bytes() < rounded.weight_bytes());
            for chunk in [1, 64] {
                let options = StateOptions { chunk, ..F32 };
                let want = logits(&rounded, &mut rounded.state(&options), &r.tokens);
                let got = logits(&packed, &mut packed.state(&options), &r.tokens);
                let (activations, all) = (relative(&got, &want), relative(&got, &exact));
                eprintln!("{:12} {mode:?} chunk {chunk}: activations {activations:.4}, all {all:.4}", r.name);
                // Integer activations alone, then with the weights' rounding: a few percent in
                // these tiny models, most where norms bring what every layer writes, and its error,
                // to the size of the residual stream, or a router weighs experts.
                let mixed = source.config().post_norms || source.config().experts.is_some();
                let most = if mixed { 0.08 } else { 0.05 };
                assert!(activations < most, "{} {mode:?}: {activations}", r.name);
                assert!(all < 2.0 * most, "{} {mode:?}: {all}", r.name);
            }
        }
    }
}

#[test]
fn experts_may_be_packed_in_part() {
    for r in references().unwrap_or_default() {
        let source = r.smooth(RotationMode::Fold, 7);
        let original = Model::from_source(&source).unwrap();
        if source.config().experts.is_none() {
            continue;
        }
        for which in [LayerLinear::Gate, LayerLinear::Up, LayerLinear::Down] {
            let id = LinearId::Layer(0, which);
            let (mut packed, mut rounded) = (original.clone(), original.clone());
            let layer = Linear::packed(pack(&source.linear(id).unwrap()), None).unwrap();
            let dense = Linear::dense(layer.shape(), layer.to_dense().unwrap(), None).unwrap();
            rounded.replace(id, dense).unwrap();
            packed.replace(id, layer).unwrap();
            for chunk in [1, 3, 64] {
                let options = StateOptions { chunk, ..F32 };
                let [want, got] = [&rounded, &packed].map(|m| logits(m, &mut m.state(&options), &r.tokens));
                let error = relative(&got, &want);
                assert!(error > 0.0 && error < 0.03, "{} {id} in chunks of {chunk}: {error}", r.name);
            }
        }
    }
}

#[test]
fn fused_layers_give_the_bits_of_separate_ones() {
    let mut fused_inputs = 0;
    for r in references().unwrap_or_default() {
        let source = r.source(RotationMode::Fold, 7);
        let config = source.config().clone();
        let (mut apart, mut fused) =
            (Model::from_source(&source).unwrap(), Model::from_source(&source).unwrap());
        for i in 0..config.num_hidden_layers() {
            // A pair that skips the middle one, and all that read one input.
            for group in [&[LayerLinear::Q, LayerLinear::V][..], &[LayerLinear::Gate, LayerLinear::Up]] {
                let ids: Vec<LinearId> = group.iter().map(|&l| LinearId::Layer(i, l)).collect();
                if !ids[0].shape(&config).rows.is_multiple_of(TILE_ROWS) {
                    continue;
                }
                fused_inputs += 1;
                let mut whole = Matrix { shape: ids[0].shape(&config), data: Vec::new() };
                whole.shape.rows = 0;
                let mut members = Vec::new();
                for &id in &ids {
                    let one = source.linear(id).unwrap();
                    apart.replace(id, Linear::packed(pack(&one), source.bias(id).unwrap()).unwrap()).unwrap();
                    members.push((one.shape.rows, source.bias(id).unwrap()));
                    whole.shape.rows += one.shape.rows;
                    whole.data.extend(one.data);
                }
                let linears = Linear::fused(pack(&whole), members).unwrap();
                for (&id, linear) in ids.iter().zip(linears) {
                    assert_eq!(linear.shape(), id.shape(&config));
                    assert_eq!(linear.to_dense().unwrap(), apart.linear(id).unwrap().to_dense().unwrap());
                    fused.replace(id, linear).unwrap();
                }
                let [first, last] = [ids[0], ids[1]].map(|id| fused.linear(id).unwrap().as_packed().unwrap());
                assert!(std::ptr::eq(first, last), "one matrix");
            }
        }
        for chunk in [1, 3, 64] {
            let options = StateOptions { chunk, ..F32 };
            let want = logits(&apart, &mut apart.state(&options), &r.tokens);
            let got = logits(&fused, &mut fused.state(&options), &r.tokens);
            assert!(
                got.iter().map(|x| x.to_bits()).eq(want.iter().map(|x| x.to_bits())),
                "{} {chunk}",
                r.name
            );
        }
    }
    assert!(fused_inputs > 10, "{fused_inputs}");
}

#[test]
fn observers_see_what_fused_layers_read() {
    let Some(all) = references() else { return };
    let r = all.iter().find(|r| r.name == "llama3").unwrap();
    let source = r.source(RotationMode::Fold, 7);
    let ids = [LayerLinear::Gate, LayerLinear::Up].map(|l| LinearId::Layer(0, l));
    let [gate, up] = ids.map(|id| source.linear(id).unwrap());
    assert!(gate.shape.rows.is_multiple_of(TILE_ROWS));
    let shape = Shape::new(gate.shape.rows + up.shape.rows, gate.shape.cols);
    let whole = Matrix { shape, data: [gate.data, up.data].concat() };
    let linears = Linear::fused(pack(&whole), vec![(gate.shape.rows, None), (up.shape.rows, None)]).unwrap();
    let mut model = Model::from_source(&source).unwrap();
    let seen = Arc::new([AtomicUsize::new(0), AtomicUsize::new(0)]);
    for (at, (id, linear)) in ids.into_iter().zip(linears).enumerate() {
        let seen = Arc::clone(&seen);
        let observer = move |_: &Team<'_>, Read { x, .. }: Read<'_>| {
            seen[at].fetch_add(x.len() / shape.cols, Ordering::Relaxed);
        };
        model.replace(id, linear.observed(Arc::new(observer))).unwrap();
    }
    logits(&model, &mut model.state(&F32), &r.tokens);
    assert_eq!([0, 1].map(|at: usize| seen[at].load(Ordering::Relaxed)), [r.tokens.len(); 2]);
}

#[test]
fn fused_rows_must_add_up() {
    let matrix = Matrix { shape: Shape::new(48, 32), data: vec![0.5; 48 * 32] };
    let members = |rows: &[usize]| rows.iter().map(|&r| (r, None)).collect::<Vec<_>>();
    for bad in [&[16usize, 16][..], &[48, 16], &[48, 0], &[8, 40]] {
        assert!(Linear::fused(pack(&matrix), members(bad)).is_err(), "{bad:?}");
    }
    let bias = vec![(32, Some(vec![0.0; 31])), (16, None)];
    assert!(Linear::fused(pack(&matrix), bias).is_err());
    let parts = Linear::fused(pack(&matrix), members(&[32, 16])).unwrap();
    let bytes: usize = parts.iter().map(Linear::weight_bytes).sum();
    assert_eq!(bytes, parts[0].as_packed().unwrap().bytes(), "each has its share");
}

#[test]
fn banded_rows_are_those_of_their_bands() {
    let (rows, cols) = (75, 40);
    let value = |i: usize| (i as f32 * 0.37).sin();
    let matrix = Matrix { shape: Shape::new(rows, cols), data: (0..rows * cols).map(value).collect() };
    let band_of: Vec<u8> = (0..rows).map(|r| [2, 0, 1, 0, 2][r * 7 % 5]).collect();
    let row = |r: usize| &matrix.data[r * cols..(r + 1) * cols];
    let bands = || -> Vec<PackedMatrix> {
        (0..3)
            .map(|band| {
                let inside = (0..rows).filter(|&r| band_of[r] == band);
                let data: Vec<f32> = inside.flat_map(row).copied().collect();
                pack(&Matrix { shape: Shape::new(data.len() / cols, cols), data })
            })
            .collect()
    };
    let bias: Vec<f32> = (0..rows).map(|r| r as f32).collect();
    let whole = Linear::packed(pack(&matrix), Some(bias.clone())).unwrap();
    let banded = Linear::banded(bands(), &band_of, Some(bias)).unwrap();
    assert_eq!(banded.shape(), matrix.shape);
    assert!(banded.is_quantized() && banded.as_packed().is_none());
    // A scale for each row: the same numbers wherever a row lies.
    assert_eq!(banded.to_dense().unwrap(), whole.to_dense().unwrap());
    assert_eq!(banded.weight_bytes(), bands().iter().map(PackedMatrix::bytes).sum::<usize>());
    for batch in [1, 2, 9] {
        let x: Vec<f32> = (0..batch * cols).map(|i| (i as f32 * 0.11).cos()).collect();
        let run = |layer: &Linear| {
            let mut out = vec![0.0; batch * rows];
            layer.apply(&x, &mut LinearScratch::new(), &mut out).unwrap();
            out
        };
        assert_eq!(run(&banded), run(&whole), "{batch} tokens");
    }
    assert!(Linear::banded(bands(), &band_of[1..], None).is_err(), "a row is missing");
    assert!(Linear::banded(bands()[..2].iter().map(|_| pack(&matrix)).collect(), &band_of, None).is_err());
    let mut swapped = bands();
    swapped.swap(0, 1);
    assert!(Linear::banded(swapped, &band_of, None).is_err(), "bands of other sizes");
}

#[test]
fn caches_of_every_kind_live_side_by_side() {
    const KINDS: [KvType; 5] = [KvType::I16, KvType::I4, KvType::F32, KvType::I8, KvType::I6];
    for r in references().unwrap_or_default() {
        let source = r.source(RotationMode::Fold, 7);
        let mut model = Model::from_source(&source).unwrap();
        for id in LinearId::all(source.config()) {
            let matrix = pack(&source.linear(id).unwrap());
            model.replace(id, Linear::packed(matrix, source.bias(id).unwrap()).unwrap()).unwrap();
        }
        let (width, tokens) = (source.config().hidden_size, &r.tokens[..16]);
        let mut states = KINDS.map(|kv| model.state(&StateOptions { kv, ..F32 }));
        let (mut hidden, mut together) = (Vec::new(), vec![Vec::new(); KINDS.len()]);
        for &token in tokens {
            model.forward_batch(&mut states, &[token; KINDS.len()], &[1; KINDS.len()], &mut hidden).unwrap();
            together.iter_mut().zip(hidden.chunks(width)).for_each(|(all, row)| all.extend_from_slice(row));
        }
        for (kv, together) in KINDS.into_iter().zip(&together) {
            for chunk in [1, 7, 16] {
                let mut state = model.state(&StateOptions { kv, chunk, ..F32 });
                model.forward(&mut state, tokens, &mut hidden).unwrap();
                assert!(hidden == *together, "{} {kv:?} chunks of {chunk}", r.name);
                // What is forgotten leaves nothing behind.
                state.truncate(5);
                model.forward(&mut state, &tokens[5..], &mut hidden).unwrap();
                assert!(hidden == together[5 * width..], "{} {kv:?} again", r.name);
            }
        }
        let distinct = |i: usize| together[..i].iter().all(|other| *other != together[i]);
        assert!((1..KINDS.len()).all(distinct), "{}: kinds differ", r.name);
    }
}
