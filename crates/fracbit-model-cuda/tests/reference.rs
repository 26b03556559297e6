//! The decoder on the host shim against logits computed in float64, for every architecture and
//! rotation mode.
#![expect(clippy::print_stderr, reason = "skips are said aloud")]

#[path = "../../fracbit-model/tests/common/mod.rs"]
#[allow(clippy::unwrap_used, reason = "shared with the tests of fracbit-model")]
mod common;
mod device;

use common::{Reference, references, relative};
use device::{dense, device, random};
use fracbit_base::{Rate, Scheme, Shape};
use fracbit_format::{Layout, PackedView};
use fracbit_kernels::{Kernels, PackedMatrix, Precision};
use fracbit_kernels_cuda::shim::Shim;
use fracbit_model::{
    FloatId, KvType, LayerLinear, Linear, LinearId, Model, ModelBuilder, RotationMode, SampleConfig,
    StateOptions,
};
use fracbit_model_cuda::{Builder, Decoder, DeviceModel, Error, PROMPT_FROM};

fn logits(model: &DeviceModel<'_, Shim>, tokens: &[u32]) -> Vec<f32> {
    logits_at(model, tokens, (Precision::FULL, KvType::I16))
}

fn logits_at(
    model: &DeviceModel<'_, Shim>,
    tokens: &[u32],
    (precision, kv): (Precision, KvType),
) -> Vec<f32> {
    let mut state = model.state_of(64, kv).expect("memory");
    state.set_precision(precision);
    let mut all = Vec::new();
    let mut each = |logits: &[f32]| -> Result<(), Error> {
        all.extend_from_slice(logits);
        Ok(())
    };
    model.run(&mut state, tokens, Some(&mut each)).expect("a run");
    all
}

/// Half-precision weights and cache: 2^-11 a factor, some tens of factors deep.
const HALF: f64 = 5e-3;

#[test]
fn every_architecture_gives_the_reference_logits() {
    let Some(references) = references() else { return };
    let device = device();
    for r in &references {
        let mode = match r.name {
            "llama2" | "llama-tied" | "qwen3" | "phi4-mini" | "gemma3" | "olmo3" | "glm4" | "mixtral" => {
                RotationMode::Fold
            }
            "llama3" | "smollm2" | "granite" | "gemma2" | "olmo2" | "exaone4" | "qwen3-moe" => {
                RotationMode::Online
            }
            _ => RotationMode::None,
        };
        let model = dense(&device, &r.source(mode, 42));
        let error = relative(&logits(&model, &r.tokens), &r.logits);
        assert!(error < HALF, "{} ({mode}): {error}", r.name);
        eprintln!("{} ({mode}): {error:.1e}", r.name);
    }
}

/// As far from the float64 logits as the processor may be with a cache of as many bits, and near
/// what that gives.
#[test]
fn caches_of_few_bits_give_the_logits_of_the_processor() {
    let Some(references) = references() else { return };
    let device = device();
    for r in &references {
        let source = r.source(RotationMode::None, 0);
        let (model, plain) = (dense(&device, &source), r.model(RotationMode::None));
        match model.state_of(64, KvType::I8) {
            Err(Error::Heads { head_dim, .. }) if !head_dim.is_multiple_of(8) => continue,
            of => drop(of.expect("memory")),
        }
        // Fewer bits may choose another expert.
        let factor = if source.config().experts.is_some() { 3.0 } else { 1.0 };
        // Codes of 4 bits that other roundings before them move count for more.
        for (kv, most, near) in
            [(KvType::I8, 3e-2, 4.0 * HALF), (KvType::I6, 0.3, 0.1), (KvType::I4, 0.5, 0.1)]
        {
            let got = logits_at(&model, &r.tokens, (Precision::FULL, kv));
            assert_eq!(got, logits_at(&model, &r.tokens, (Precision::FULL, kv)), "{}, {kv:?}", r.name);
            let mut state = plain.state(&StateOptions { kv, ..common::F32 });
            let want = common::logits(&plain, &mut state, &r.tokens);
            let (error, off) = (relative(&got, &r.logits), relative(&got, &want));
            eprintln!("{} {kv:?}: {error:.1e}, from the processor's {off:.1e}", r.name);
            assert!(error < factor * most, "{}, {kv:?}: {error}", r.name);
            assert!(off < near, "{}, {kv:?}: {off} from the processor's", r.name);
        }
    }
}

#[test]
fn greedy_decoding_follows_the_reference_and_repeats_itself() {
    let Some(references) = references() else { return };
    let device = device();
    let r: &Reference = references.iter().find(|r| r.name == "mistral").expect("a reference");
    let model = dense(&device, &r.source(RotationMode::None, 0));
    let mut state = model.state(64).expect("memory");
    let greedy = SampleConfig::default();
    let mut decoder = Decoder::new(&model, &mut state, &r.tokens, &greedy, 4).expect("a decoder");
    let mut got = Vec::new();
    while let Some(token) = decoder.next_token().expect("a token") {
        got.push(token);
    }
    assert_eq!(got, decoder.tokens().expect("tokens"));
    // The reference's list may begin with the prompt's continuation only.
    assert_eq!(got, r.greedy[..4.min(r.greedy.len())]);
    // A draw: the same seed gives the same text, another seed and a high temperature another.
    let draw = |seed, top_k| {
        let config = SampleConfig { temperature: 3.0, top_k, seed, ..SampleConfig::default() };
        let mut state = model.state(64).expect("memory");
        let mut decoder = Decoder::new(&model, &mut state, &r.tokens[..3], &config, 6).expect("a decoder");
        while decoder.next_token().expect("a token").is_some() {}
        decoder.tokens().expect("tokens")
    };
    assert_eq!(draw(1, 0), draw(1, 0));
    assert_ne!(draw(1, 0), draw(2, 0));
    assert_eq!(draw(1, 1), draw(2, 1), "one candidate leaves no choice");
}

#[test]
fn packed_matrices_in_fused_and_single_launches() {
    let Some(references) = references() else { return };
    let device = device();
    // Rows of whole tiles fuse: q, k and v. Others, here with biases, do not.
    let palette = ["tcq-fast-2", "nuq-4", "half-tcq-2.25", "vq-3", "tcq-3"];
    // A scale for every 32 columns; activations are rounded to 8 bits.
    let grouped = ["gnuq-2", "int-8", "gnuq-3", "int-4", "gnuq-4"];
    let additive = ["aq-m2v8", "aq-m1v4", "aq-m3v8", "aq-m1v8", "aq-m2v8"];
    let progressive = ["qoq-g128", "qoq-channel", "qoq-g128", "vq-3", "qoq-channel"];
    for (name, launches, schemes, bound) in [
        ("llama3", 5, palette, 2.0 * HALF),
        ("qwen2", 7, palette, 2.0 * HALF),
        ("llama3", 5, grouped, 8.0 * HALF),
        ("llama3", 5, additive, 2.0 * HALF),
        ("llama3", 5, progressive, 8.0 * HALF),
        // Experts: pieces with scales of rows, beside the codes, in two halves, of bytes.
        ("mixtral", 5, ["half-tcq-2.25", "int-4", "tcq-3", "vq-3", "nuq-4"], 8.0 * HALF),
        ("qwen3-moe", 5, ["qoq-g128", "aq-m2v8", "gnuq-3", "vq-3", "qoq-channel"], 8.0 * HALF),
    ] {
        let r: &Reference = references.iter().find(|r| r.name == name).expect("a reference");
        packed(&device, r, launches, schemes, (bound, &[None]));
    }
    // Nested codes at every precision, beside a head of one.
    let nested = ["nest-tcq-2+2", "nest-nuq-2..4", "nest-tcq-fast-2+1+1", "nuq-4", "nest-nuq-3..8"];
    let bits = [None, Some(2), Some(3), Some(4), Some(8)];
    for name in ["llama3", "qwen2", "olmoe"] {
        let r: &Reference = references.iter().find(|r| r.name == name).expect("a reference");
        packed(&device, r, if name == "qwen2" { 7 } else { 5 }, nested, (4.0 * HALF, &bits));
    }
}

/// `schemes`: of gate, up, down, embedding and head, all others. `bits` of nested weights are read,
/// one after the other.
fn packed(
    device: &Shim,
    r: &Reference,
    launches: usize,
    schemes: [&str; 5],
    (bound, bits): (f64, &[Option<u32>]),
) {
    let source = r.source(RotationMode::None, 0);
    let config = source.config();
    let mut builder = Builder::new(device, config.clone(), source.rotations().clone());
    let precision = |bits: &Option<u32>| {
        bits.map_or(Precision::FULL, |bits| Precision::at_most(Rate::quarter_bits(4 * bits)))
    };
    let plain = || ModelBuilder::new(config.clone(), source.rotations().clone()).expect("a builder");
    let mut plain: Vec<_> = bits.iter().map(|bits| (precision(bits), plain())).collect();
    for id in LinearId::all(config) {
        let shape = id.shape(config);
        let bias = source.bias(id).expect("its bias");
        // q, k and v share a scheme and become one launch; gate and up do not.
        let scheme: Scheme = match id {
            LinearId::Layer(_, LayerLinear::Gate) => schemes[0],
            LinearId::Layer(_, LayerLinear::Up) => schemes[1],
            LinearId::Layer(_, LayerLinear::Down) => schemes[2],
            LinearId::Embed | LinearId::Head => schemes[3],
            LinearId::Layer(..) => schemes[4],
        }
        .parse()
        .expect("a scheme");
        let packed = random(scheme, shape);
        let view: PackedView<'_> = packed.view().expect("parts that fit");
        assert_eq!(view.codes().len(), Layout::new(scheme, shape).len());
        let matrix = PackedMatrix::new(&Kernels::scalar(), &view);
        for (precision, plain) in &mut plain {
            let mut weights = vec![0.0; shape.len()];
            for (row, weights) in weights.chunks_exact_mut(shape.cols).enumerate() {
                matrix.row_at(row, *precision, weights);
            }
            plain.set(id, Linear::dense(shape, weights, bias.clone()).expect("a matrix")).expect("a shape");
        }
        builder.packed(id, &view, bias);
    }
    for id in FloatId::all(config) {
        let gain = source.floats(id).expect("a norm");
        for (_, plain) in &mut plain {
            plain.set_floats(id, gain.clone()).expect("a norm");
        }
        builder.norm(id, gain);
    }
    let model = builder.build().expect("a whole model");
    assert_eq!(model.products(), config.num_hidden_layers() * launches, "{}: gate and up apart", r.name);
    for ((precision, plain), bits) in plain.into_iter().zip(bits) {
        let plain = plain.build().expect("a whole model");
        let mut state = plain.state(&common::F32);
        let want = common::logits(&plain, &mut state, &r.tokens);
        let error = relative(&logits_at(&model, &r.tokens, (precision, KvType::I16)), &want);
        assert!(error < bound, "{}, {schemes:?} at {bits:?} bits: {error}", r.name);
        eprintln!("{}, {schemes:?} at {bits:?} bits: {error:.1e}", r.name);
    }
}

/// Rows in two schemes, turn by turn: of all matrices that read one input, those of one scheme are
/// one launch, and every row comes to its place.
#[test]
fn bands_of_one_scheme_are_one_launch() {
    let Some(references) = references() else { return };
    let device = device();
    // With biases of queries, keys and values, and without.
    for name in ["llama3", "qwen2"] {
        let r: &Reference = references.iter().find(|r| r.name == name).expect("a reference");
        let source = r.source(RotationMode::None, 0);
        let config = source.config();
        let mut builder = Builder::new(&device, config.clone(), source.rotations().clone());
        let mut plain = ModelBuilder::new(config.clone(), source.rotations().clone()).expect("a builder");
        for id in LinearId::all(config) {
            let (shape, bias) = (id.shape(config), source.bias(id).expect("its bias"));
            let rows_of = |band: usize| (0..shape.rows).filter(move |row| row / 16 % 2 == band);
            let bands = [0, 1].map(|band| {
                let scheme: Scheme = ["nuq-4", "tcq-3"][band].parse().expect("a scheme");
                random(scheme, Shape::new(rows_of(band).count(), shape.cols))
            });
            let views = bands.each_ref().map(|band| band.view().expect("parts that fit"));
            let mut weights = vec![0.0; shape.len()];
            for (band, view) in views.iter().enumerate() {
                for (row, values) in rows_of(band).zip(view.dequantize().chunks_exact(shape.cols)) {
                    weights[row * shape.cols..][..shape.cols].copy_from_slice(values);
                }
            }
            let rows = [0, 1].into_iter().flat_map(rows_of).map(|row| row as u32).collect();
            let data = views.iter().map(PackedView::to_data).collect();
            plain.set(id, Linear::dense(shape, weights, bias.clone()).expect("a matrix")).expect("a shape");
            builder.banded(id, data, rows, bias);
        }
        for id in FloatId::all(config) {
            let gain = source.floats(id).expect("a norm");
            plain.set_floats(id, gain.clone()).expect("a norm");
            builder.norm(id, gain);
        }
        let model = builder.build().expect("a whole model");
        // Two for each of the four inputs of a layer, where the matrices end with whole tiles.
        let launches = if name == "llama3" { 8 } else { 11 };
        assert_eq!(model.products(), config.num_hidden_layers() * launches, "{name}");
        let plain = plain.build().expect("a whole model");
        let want = common::logits(&plain, &mut plain.state(&common::F32), &r.tokens);
        let error = relative(&logits(&model, &r.tokens), &want);
        assert!(error < 2.0 * HALF, "{name}: {error}");
    }
}

/// Some numbers of the key biases of the first and last layer become large, in planes that turn and
/// that do not: caches of few bits are as near the exact logits as without, in steps and prompts,
/// across pages.
#[test]
fn large_biases_of_keys_cost_caches_of_few_bits_nothing() {
    let Some(references) = references() else { return };
    let device = device();
    let mut seen = 0;
    for r in &references {
        let source = r.source(RotationMode::None, 0);
        let config = source.config();
        if !config.qkv_bias || !config.head_dim.is_multiple_of(8) {
            continue;
        }
        seen += 1;
        let of = |more: f32| {
            let last = config.num_hidden_layers() - 1;
            changed(&device, r, &|id, _, bias| {
                if matches!(id, LinearId::Layer(i, LayerLinear::K) if i == 0 || i == last) {
                    let heads = bias.iter_mut().flat_map(|bias| bias.chunks_mut(config.head_dim));
                    heads.for_each(|head| [head[0], head[config.head_dim - 2]] = [more, -more]);
                }
            })
        };
        let exact = StateOptions { context: Some(128), ..common::F32 };
        let tokens: Vec<u32> = (0..110).map(|i| (i * 37 % config.vocab_size) as u32).collect();
        // Of a prompt, a step of some tokens, and single ones.
        let run = |model: &DeviceModel<'_, Shim>, kv, first: usize| {
            let mut state = model.state_of(tokens.len(), kv).expect("memory");
            let mut all = Vec::new();
            let cuts = [&tokens[..first], &tokens[first..100], &tokens[100..107]];
            for some in cuts.into_iter().chain(tokens[107..].chunks(1)) {
                let mut each = |logits: &[f32]| -> Result<(), Error> {
                    all.extend_from_slice(logits);
                    Ok(())
                };
                model.run(&mut state, some, Some(&mut each)).expect("a run");
            }
            all
        };
        let models = [0.5, 40.0].map(of);
        let kinds = [(KvType::I8, 90), (KvType::I8, 30), (KvType::I6, 30), (KvType::I4, 90)];
        for &(kv, first) in if r.name == "seed-oss" { &kinds[..] } else { &kinds[1..2] } {
            let [small, large] = models.each_ref().map(|(plain, model)| {
                let want = common::logits(plain, &mut plain.state(&exact), &tokens);
                relative(&run(model, kv, first), &want)
            });
            eprintln!("{} {kv:?}, {first}: {small:.1e}, {large:.1e}", r.name);
            assert!(large < 2.0 * small, "{}, {kv:?}: {large} beside {small}", r.name);
        }
        // A step that is recorded before any other was run.
        let (plain, model) = &models[1];
        let mut state = model.state_of(64, KvType::I8).expect("memory");
        let mut decoder =
            Decoder::new(model, &mut state, &tokens[1..2], &SampleConfig::default(), 1).expect("a decoder");
        let got = decoder.next_token().expect("a step").expect("a token");
        let logits = common::logits(plain, &mut plain.state(&exact), &tokens[1..2]);
        let most = logits.iter().fold(f32::MIN, |most, &v| most.max(v));
        assert_eq!(logits[got as usize], most, "{}", r.name);
    }
    assert!(seen > 2, "references with biases of keys");
}

/// Inputs of which a part is the same for all tokens give keys a mean, which caches of 4 bits go
/// without.
#[test]
fn keys_of_4_bits_are_without_their_mean() {
    let Some(references) = references() else { return };
    let device = device();
    // Angles of all layers alike, or layers with a window have others; scores with a cap.
    for name in ["llama3", "gemma3", "gemma2"] {
        let r: &Reference = references.iter().find(|r| r.name == name).expect("a reference");
        let (plain, model) = changed(&device, r, &|id, weights, _| {
            if id == LinearId::Embed {
                let rms = (weights.iter().map(|w| w * w).sum::<f32>() / weights.len() as f32).sqrt();
                weights.iter_mut().step_by(2).for_each(|w| *w += 3.0 * rms);
            }
        });
        let tokens: Vec<u32> = (0..60).map(|i| (i * 37 % model.config().vocab_size) as u32).collect();
        let of = |kv| {
            let mut state = plain.state(&StateOptions { kv, ..common::F32 });
            common::logits(&plain, &mut state, &tokens)
        };
        let (exact, processor) = (of(KvType::F32), of(KvType::I4));
        let got = logits_at(&model, &tokens, (Precision::FULL, KvType::I4));
        let [error, want] = [&got, &processor].map(|of| relative(of, &exact));
        let apart = relative(&got, &processor);
        eprintln!("{name}: {error:.1e}, of the processor {want:.1e}, {apart:.1e} apart");
        assert!(error < 1.2 * want, "{name}: {error}, of the processor {want}");
        // Whole keys have other errors, more than half as large.
        assert!(apart < 0.4 * want, "{name}: {apart} apart, beside {want}");
    }
}

/// Changes weights, (rows, columns), and bias of a matrix.
type Change<'a> = dyn Fn(LinearId, &mut [f32], &mut Option<Vec<f32>>) + 'a;

/// A model on both, some of whose weights and biases are others.
fn changed<'d>(device: &'d Shim, r: &Reference, change: &Change<'_>) -> (Model, DeviceModel<'d, Shim>) {
    let source = r.source(RotationMode::None, 0);
    let config = source.config();
    let mut plain = r.model(RotationMode::None);
    let mut builder = Builder::new(device, config.clone(), source.rotations().clone());
    for id in LinearId::all(config) {
        let mut matrix = source.linear(id).expect("a matrix of the checkpoint");
        let mut bias = source.bias(id).expect("its bias");
        change(id, &mut matrix.data, &mut bias);
        builder.dense(id, &matrix.data, bias.clone());
        let linear = Linear::dense(matrix.shape, matrix.data, bias).expect("a matrix");
        plain.replace(id, linear).expect("a shape");
    }
    for id in FloatId::all(config) {
        builder.norm(id, source.floats(id).expect("a norm of the checkpoint"));
    }
    (plain, builder.build().expect("a whole model"))
}

/// Long prompts run as dense products of expanded weights: the same logits as eight tokens at a
/// time, and positions go on behind them.
#[test]
fn long_prompts_give_the_logits_of_short_steps() {
    let Some(references) = references() else { return };
    let device = device();
    // Two of four experts for each token: most have enough to be expanded.
    for (name, tokens) in [("llama3", PROMPT_FROM + 5), ("mixtral", 3 * PROMPT_FROM)] {
        let r: &Reference = references.iter().find(|r| r.name == name).expect("a reference");
        long_prompt(&device, r, tokens, (KvType::I16, HALF));
    }
}

/// The same with caches of codes, which prompts halve; other roundings before them move codes.
#[test]
fn long_prompts_over_few_bits_give_the_logits_of_short_steps() {
    let Some(references) = references() else { return };
    let device = device();
    for (name, kv, bound) in [
        ("llama3", KvType::I8, 2e-2),
        ("seed-oss", KvType::I8, 2e-2),
        ("qwen3", KvType::I6, 0.2),
        ("mistral", KvType::I4, 0.4),
    ] {
        let r: &Reference = references.iter().find(|r| r.name == name).expect("a reference");
        long_prompt(&device, r, PROMPT_FROM + 5, (kv, bound));
    }
}

fn long_prompt(device: &Shim, r: &Reference, count: usize, (kv, bound): (KvType, f64)) {
    let source = r.source(RotationMode::None, 0);
    let config = source.config();
    let mut builder = Builder::new(device, config.clone(), source.rotations().clone());
    for id in LinearId::all(config) {
        if matches!(id, LinearId::Layer(_, LayerLinear::Gate | LayerLinear::O)) {
            let shape = id.shape(config);
            let scheme: Scheme = "half-tcq-2.25".parse().expect("a scheme");
            let packed = random(scheme, shape);
            builder.packed(id, &packed.view().expect("parts that fit"), source.bias(id).expect("its bias"));
        } else {
            let matrix = source.linear(id).expect("a matrix of the checkpoint");
            builder.dense(id, &matrix.data, source.bias(id).expect("its bias"));
        }
    }
    for id in FloatId::all(config) {
        builder.norm(id, source.floats(id).expect("a norm of the checkpoint"));
    }
    let model = builder.build().expect("a whole model");
    let tokens: Vec<u32> = (0..count).map(|i| (i * 37 % config.vocab_size) as u32).collect();
    let run = |step: usize| {
        let mut state = model.state_of(count + 9, kv).expect("memory");
        let mut all = Vec::new();
        for some in tokens.chunks(step) {
            let mut each = |logits: &[f32]| -> Result<(), Error> {
                all.extend_from_slice(logits);
                Ok(())
            };
            model.run(&mut state, some, Some(&mut each)).expect("a run");
        }
        all
    };
    let want = run(8);
    let (whole, two) = (run(tokens.len()), run(PROMPT_FROM));
    assert_eq!(whole.len(), tokens.len() * config.vocab_size);
    for got in [whole, two] {
        let error = relative(&got, &want);
        assert!(error > 0.0 && error < bound, "{kv:?}, {error}: another way of rounding, not another result");
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let Some(references) = references() else { return };
    let r = &references[0];
    let device = device();
    let model = dense(&device, &r.source(RotationMode::None, 0));
    let mut state = model.state(4).expect("memory");
    let tokens = [1, 2, 3, 4, 5];
    assert!(matches!(
        model.run::<Error>(&mut state, &tokens, None),
        Err(Error::ContextFull { capacity: 4, len: 0, got: 5 })
    ));
    let far = [u32::MAX];
    assert!(matches!(model.run::<Error>(&mut state, &far, None), Err(Error::Token { .. })));
    assert!(state.is_empty());
    assert!(matches!(
        Decoder::new(&model, &mut state, &[], &SampleConfig::default(), 1),
        Err(Error::Missing(_))
    ));
    let _: Shape = LinearId::Embed.shape(model.config());
}
