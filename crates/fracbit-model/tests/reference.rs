//! Every architecture against float64 logits, and against itself run in other ways.

#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test's helpers fail by panicking and report on stderr"
)]

mod common;

use std::sync::Arc;

use common::{F32, Reference, logits, max_difference, references, relative};
use fracbit_io::{QkNorm, RopeScaling};
use fracbit_model::{
    Error, EvalOptions, FloatId, GenerateOptions, Generation, KvPool, KvType, LayerLinear, Linear, LinearId,
    Model, Place, RotationMode, SampleConfig, Sampler, Smoothing, StateOptions, Stop, WeightSource, eval,
};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

fn each(f: impl FnMut(&Reference)) {
    references().unwrap_or_default().iter().for_each(f);
}

#[test]
fn logits_match_float64() {
    each(|r| {
        let model = r.model(RotationMode::None);
        let got = logits(&model, &mut model.state(&F32), &r.tokens);
        let error = max_difference(&got, &r.logits);
        eprintln!("{:12} max |Δlogit| {error:.1e}", r.name);
        // Measured at most 2e-5; the promise is 1e-3.
        assert!(error <= 1e-3, "{}: {error}", r.name);
    });
}

#[test]
fn rotated_models_give_the_same_logits() {
    each(|r| {
        let plain = r.model(RotationMode::None);
        let want = logits(&plain, &mut plain.state(&F32), &r.tokens);
        for mode in [RotationMode::Fold, RotationMode::Online] {
            for seed in [0, 42] {
                let model = Model::from_source(&r.source(mode, seed)).unwrap();
                let got = logits(&model, &mut model.state(&F32), &r.tokens);
                let error = relative(&got, &want);
                eprintln!("{:12} {mode:?} seed {seed}: relative {error:.1e}", r.name);
                assert!(error <= 1e-4, "{} {mode:?}: {error:e}", r.name);
                let row = plain.config().vocab_size;
                for (got, want) in got.chunks(row).zip(want.chunks(row)) {
                    assert!(relative(got, want) <= 1e-4, "{} {mode:?}: one row", r.name);
                }
            }
        }
    });
}

#[test]
fn smoothed_models_give_the_same_logits() {
    each(|r| {
        let plain = r.model(RotationMode::None);
        let want = logits(&plain, &mut plain.state(&F32), &r.tokens);
        for mode in [RotationMode::Fold, RotationMode::Online] {
            let rotated = r.source(mode, 7);
            let mut smoothing = Smoothing::default();
            for (at, place) in Place::all(rotated.config()).enumerate() {
                // Mean squares over four orders of magnitude, other ones for each place.
                let spread = |salt: usize| {
                    let one = move |j: usize| 10f64.powf(((7 * j + 3 * at + salt) % 41) as f64 / 10.0);
                    (0..place.width(rotated.config())).map(one).collect::<Vec<_>>()
                };
                smoothing.balance(place, &spread(0), &spread(19));
                let factors = smoothing.of(place).unwrap();
                // Keys of some of these models have two planes.
                let far = if matches!(place, Place::Keys(_)) { 1.1 } else { 2.0f32 };
                let spread = factors.iter().any(|&f| f > far) && factors.iter().any(|&f| f < far.recip());
                assert!(spread, "{} {place:?}: {factors:?}", r.name);
            }
            let source = rotated.clone().smoothed(Arc::new(smoothing));
            let changed = LinearId::all(rotated.config())
                .filter(|&id| source.linear(id).unwrap() != rotated.linear(id).unwrap())
                .count();
            assert!(changed > 0, "{} {mode:?}: factors should move weights", r.name);
            let model = Model::from_source(&source).unwrap();
            let got = logits(&model, &mut model.state(&F32), &r.tokens);
            let error = relative(&got, &want);
            eprintln!("{:12} {mode:?} smoothed: relative {error:.1e}", r.name);
            assert!(error <= 1e-4, "{} {mode:?}: {error:e}", r.name);
        }
    });
}

#[test]
fn factors_of_keys_change_no_score() {
    let mut rng = ChaCha8Rng::seed_from_u64(47);
    each(|r| {
        let plain = r.model(RotationMode::None);
        let want = logits(&plain, &mut plain.state(&F32), &r.tokens);
        for mode in [RotationMode::Fold, RotationMode::Online] {
            let rotated = r.source(mode, 7);
            let (config, mut smoothing) = (rotated.config().clone(), Smoothing::default());
            for layer in 0..config.num_hidden_layers() {
                // Factors over four decades.
                let place = Place::Keys(layer);
                let mut squares = || -> Vec<f64> {
                    (0..place.width(&config))
                        .map(|_| 10f64.powf(f64::from(rng.next_u32() % 8001) / 1e3 - 4.0))
                        .collect()
                };
                smoothing.balance(place, &squares(), &squares());
            }
            let source = rotated.clone().smoothed(Arc::new(smoothing));
            let model = Model::from_source(&source).unwrap();
            let got = logits(&model, &mut model.state(&F32), &r.tokens);
            let error = relative(&got, &want);
            eprintln!("{:12} {mode:?} keys with factors: relative {error:.1e}", r.name);
            assert!(error <= 1e-4, "{} {mode:?}: {error:e}", r.name);

            // They are where they should be, and nowhere else.
            let normed = config.qk_norm != QkNorm::Absent;
            for id in LinearId::all(&config) {
                let reads = matches!(id, LinearId::Layer(_, LayerLinear::Q | LayerLinear::K)) && !normed;
                let same = source.linear(id).unwrap() == rotated.linear(id).unwrap();
                assert_eq!(same, !reads, "{} {mode:?} {id}", r.name);
                let bias = |source: &WeightSource| source.bias(id).unwrap();
                let same = bias(&source) == bias(&rotated);
                assert_eq!(same, !reads || bias(&rotated).is_none(), "{} {mode:?} {id}", r.name);
            }
            for id in FloatId::all(&config) {
                let reads = matches!(id, FloatId::Query(_) | FloatId::Key(_));
                let same = source.floats(id).unwrap() == rotated.floats(id).unwrap();
                assert_eq!(same, !reads, "{} {mode:?} {id}", r.name);
            }
        }
    });
}

#[test]
fn moments_follow_the_weights() {
    // x^T H x of what a row of weights reads stays the same in every basis: w' H' w'^T = w H w^T.
    each(|r| {
        let plain = r.source(RotationMode::None, 0);
        for mode in [RotationMode::Fold, RotationMode::Online] {
            let rotated = r.source(mode, 3);
            let mut smoothing = Smoothing::default();
            // Factors of keys scale rows, of which a moment of inputs knows nothing.
            for place in Place::all(rotated.config()).filter(|p| !matches!(p, Place::Keys(_))) {
                let inputs: Vec<f64> =
                    (0..place.width(rotated.config())).map(|j| 1.0 + (j % 5) as f64).collect();
                smoothing.balance(place, &inputs, &vec![1.0; inputs.len()]);
            }
            let source = rotated.smoothed(Arc::new(smoothing));
            let ids = [LayerLinear::Q, LayerLinear::O, LayerLinear::Gate, LayerLinear::Down];
            for id in ids.map(|linear| LinearId::Layer(0, linear)) {
                if plain.config().experts.is_some() && id == LinearId::Layer(0, LayerLinear::Down) {
                    continue; // has no moments
                }
                let n = id.shape(plain.config()).cols;
                let x: Vec<f32> = (0..n).map(|j| ((j * j) % 13) as f32 / 6.0 - 1.0).collect();
                let mut moments: Vec<f32> = x.iter().flat_map(|a| x.iter().map(move |b| a * b)).collect();
                source.rotate_moments(id, &mut moments).unwrap();
                let row = |source: &WeightSource| source.linear(id).unwrap().data[..n].to_vec();
                let form = |w: &[f32], h: &[f32]| -> f64 {
                    let dot = |h: &[f32]| h.iter().zip(w).map(|(h, w)| f64::from(h * w)).sum::<f64>();
                    h.chunks(n).zip(w).map(|(h, w)| f64::from(*w) * dot(h)).sum()
                };
                // Rows of v and up, and those that write the stream, are mixed or scaled; these are
                // of readers' inputs alone.
                if mode == RotationMode::Fold
                    && matches!(id, LinearId::Layer(_, LayerLinear::O | LayerLinear::Down))
                {
                    continue;
                }
                let plain = row(&plain);
                let want = plain.iter().zip(&x).map(|(w, x)| f64::from(w * x)).sum::<f64>().powi(2);
                let got = form(&row(&source), &moments);
                let scale: f64 = plain.iter().zip(&x).map(|(w, x)| f64::from(w * x).powi(2)).sum();
                assert!(
                    (got - want).abs() <= 1e-3 * (want + scale),
                    "{} {mode:?} {id}: {got} {want}",
                    r.name
                );
            }
        }
    });
}

#[test]
fn a_state_of_the_original_context_turns_by_short_factors() {
    each(|r| {
        let source = r.source(RotationMode::None, 0);
        let RopeScaling::LongRope { short, original_max_position_embeddings: original, .. } =
            source.config().rope.scaling.clone()
        else {
            return;
        };
        let run = |model: &Model, context| {
            let mut state = model.state(&StateOptions { context: Some(context), ..F32 });
            logits(model, &mut state, &r.tokens[..original])
        };
        let model = Model::from_source(&source).unwrap();
        // Short ones everywhere: the same model at every context.
        let mut config = source.config().clone();
        config.rope.scaling = RopeScaling::LongRope {
            short: short.clone(),
            long: short,
            original_max_position_embeddings: original,
        };
        let source =
            WeightSource::new(Arc::clone(source.checkpoint()), config, RotationMode::None, 0).unwrap();
        let shortened = Model::from_source(&source).unwrap();
        assert_eq!(run(&model, original), run(&shortened, original), "{}", r.name);
        assert_eq!(run(&shortened, original), run(&shortened, original + 1), "{}", r.name);
        let moved = max_difference(&run(&model, original), &run(&model, original + 1));
        assert!(moved > 1.0, "{}: {moved}", r.name);
    });
}

#[test]
fn one_state_serves_models_of_one_shape() {
    // Fold needs scratch that none does not, and lookups between them must not mix.
    each(|r| {
        let (plain, folded) = (r.model(RotationMode::None), r.model(RotationMode::Fold));
        let mut state = plain.state(&F32);
        let want = logits(&plain, &mut state, &r.tokens[..3]);
        state.reset();
        assert!(
            relative(&logits(&folded, &mut state, &r.tokens[..1]), &want[..plain.config().vocab_size]) < 1e-4
        );
    });
}

#[test]
fn rotations_move_the_weights() {
    // Guards the test above: a mode that does nothing would pass it.
    each(|r| {
        let plain = r.source(RotationMode::None, 1);
        let layers = plain.config().num_hidden_layers();
        let folded = if plain.config().post_norms { 3 * layers } else { layers };
        for (mode, rotations) in [(RotationMode::Fold, folded), (RotationMode::Online, 4 * layers)] {
            let rotated = r.source(mode, 1);
            assert_eq!(rotated.rotations().online_rotations(), rotations);
            for id in LinearId::all(plain.config()) {
                let (a, b) = (plain.linear(id).unwrap(), rotated.linear(id).unwrap());
                assert_eq!(a.shape, b.shape);
                assert!(relative(&b.data, &a.data) > 0.5, "{} {mode:?} {id}", r.name);
                let other = r.source(mode, 2).linear(id).unwrap();
                assert!(relative(&other.data, &b.data) > 0.5, "{} {mode:?} {id}: the seed matters", r.name);
            }
        }
    });
}

#[test]
fn decoding_and_chunks_equal_one_pass() {
    each(|r| {
        for mode in [RotationMode::None, RotationMode::Fold] {
            let model = r.model(mode);
            let whole = logits(&model, &mut model.state(&F32), &r.tokens);
            for chunk in [1, 7, 16, 39] {
                let mut state = model.state(&StateOptions { chunk, ..F32 });
                let got = logits(&model, &mut state, &r.tokens);
                let error = max_difference(&got, &whole);
                assert!(error <= 1e-4, "{} {mode:?} chunk {chunk}: {error}", r.name);
            }
            let mut state = model.state(&F32);
            let mut got = logits(&model, &mut state, &r.tokens[..11]);
            for token in &r.tokens[11..] {
                got.extend(logits(&model, &mut state, std::slice::from_ref(token)));
            }
            assert!(max_difference(&got, &whole) <= 1e-4, "{} {mode:?}: prefill, then decode", r.name);
            assert_eq!(state.len(), r.tokens.len());

            // Back to the middle, and on: the same rows again, to the bit.
            state.truncate(20);
            let row = model.config().vocab_size;
            let again = logits(&model, &mut state, &r.tokens[20..21]);
            assert_eq!(again, got[20 * row..21 * row], "{}: after truncating", r.name);
        }
    });
}

#[test]
fn a_pass_may_be_taken_in_parts() {
    each(|r| {
        for mode in [RotationMode::None, RotationMode::Fold, RotationMode::Online] {
            let model = r.model(mode);
            let blocks = model.config().num_hidden_layers();
            for options in [F32, StateOptions { chunk: 7, ..F32 }] {
                let mut state = model.state(&options);
                let (mut whole, mut entering) = (Vec::new(), Vec::new());
                model.forward(&mut state, &r.tokens, &mut whole).unwrap();
                state.reset();
                model.embed(&mut state, &r.tokens, &mut entering).unwrap();
                assert!(state.is_empty(), "{}: an embedding holds no token", r.name);
                for block in 0..=blocks {
                    // The state of another pass: only the blocks that run read it.
                    state.reset();
                    let mut rest = entering.clone();
                    model.forward_from(&mut state, block, &mut rest).unwrap();
                    assert!(rest == whole, "{} {mode:?} from block {block}", r.name);
                    state.reset();
                    model.forward_blocks(&mut state, block..blocks.min(block + 1), &mut entering).unwrap();
                }
                let past = model.forward_blocks(&mut state, 0..blocks + 1, &mut entering);
                assert!(past.is_err() && model.forward_from(&mut state, blocks + 1, &mut entering).is_err());
            }
        }
    });
}

#[test]
fn integer_cache_stays_close() {
    each(|r| {
        let model = r.model(RotationMode::None);
        let mut before = 0.0;
        // 12, 7 and some 3.5 bits of the largest number of a row; attention scores of standard
        // deviation 2 let that grow by a small factor.
        for (kv, most) in [(KvType::I16, 1e-3), (KvType::I8, 3e-2), (KvType::I6, 0.3), (KvType::I4, 0.5)] {
            let got = logits(&model, &mut model.state(&StateOptions { kv, ..F32 }), &r.tokens);
            let error = relative(&got, &r.logits);
            eprintln!("{:12} {kv:?}: relative {error:.1e}", r.name);
            // Fewer bits may choose another expert.
            let moved = model.config().experts.is_some() && kv != KvType::I16;
            let factor = if moved { 3.0 } else { 1.0 };
            assert!(error <= factor * most, "{}, {kv:?}: {error:e}", r.name);
            assert!(error > before, "{}, {kv:?}: fewer bits say less", r.name);
            before = error;
        }
    });
}

/// The model with `more` added to the key biases of two planes in the first and last layer: to the
/// first number of each, and taken from the second.
fn with_key_bias(model: &Model, source: &WeightSource, planes: [usize; 2], more: f32) -> Model {
    let (mut out, config) = (model.clone(), source.config());
    for layer in [0, config.num_hidden_layers() - 1] {
        let id = LinearId::Layer(layer, LayerLinear::K);
        let weights = source.linear(id).unwrap();
        let mut bias = source.bias(id).unwrap().unwrap();
        for head in bias.chunks_mut(config.head_dim) {
            for plane in planes {
                head[plane] += more;
                head[plane + config.head_dim / 2] -= more;
            }
        }
        out.replace(id, Linear::dense(weights.shape, weights.data, Some(bias)).unwrap()).unwrap();
    }
    out
}

#[test]
fn large_key_biases_cost_small_caches_nothing() {
    // As published Qwen2 and 2.5 have them in the first and last layer.
    let mut seen = 0;
    each(|r| {
        let source = r.source(RotationMode::None, 0);
        let mut config = source.config().clone();
        if !config.qkv_bias {
            return;
        }
        seen += 1;
        // The slowest plane stands nearly still: whatever is added to it, attention is the same.
        let (half, dim) = (config.head_dim / 2, config.rope.dim as f64);
        let slowest = config.rope.theta.powf(-(dim - 2.0) / dim);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "some hundred positions")]
        let original_max_position_embeddings = (0.99 * std::f64::consts::TAU / slowest) as usize;
        config.rope.scaling = RopeScaling::Llama3 {
            factor: 1e6,
            low_freq_factor: 1.0,
            high_freq_factor: 1.0001,
            original_max_position_embeddings,
        };
        let slowest = config.rope.dim / 2 - 1;
        let source =
            WeightSource::new(Arc::clone(source.checkpoint()), config, RotationMode::None, 0).unwrap();
        let plain = Model::from_source(&source).unwrap();
        let run = |model: &Model, kv| logits(model, &mut model.state(&StateOptions { kv, ..F32 }), &r.tokens);
        let want = run(&plain, KvType::F32);
        // The last plane stands still where only some of a head's channels turn.
        let still = with_key_bias(&plain, &source, [slowest, half - 1], 300.0);
        let moved = relative(&run(&still, KvType::F32), &want);
        assert!(moved < 2e-3, "{}: {moved:e}", r.name);
        // This one turns, and changes attention.
        let turning = with_key_bias(&plain, &source, [0, slowest], 3.0);
        let changed = run(&turning, KvType::F32);
        assert!(relative(&changed, &want) > 0.02, "{}", r.name);
        for kv in [KvType::I8, KvType::I6, KvType::I4] {
            let [before, after, with_turning] = [(&plain, &want), (&still, &want), (&turning, &changed)]
                .map(|(model, want)| relative(&run(model, kv), want));
            eprintln!("{:12} {kv:?}: {before:.1e}, {after:.1e}, {with_turning:.1e}", r.name);
            assert!(after <= 1.3 * before + 2e-3, "{} {kv:?}: {after:e} {before:e}", r.name);
            assert!(with_turning <= 2.0 * before, "{} {kv:?}: {with_turning:e} {before:e}", r.name);
        }
        // The same bits at every cut and beside other sequences.
        let at = r.tokens.len() - 1;
        let (before, last) = (&r.tokens[..at], &r.tokens[at..]);
        let kinds = [KvType::I4, KvType::I16, KvType::I8, KvType::F32];
        let alone = kinds.map(|kv| {
            let run = |chunk| {
                let mut state = turning.state(&StateOptions { kv, chunk, ..F32 });
                (logits(&turning, &mut state, before), logits(&turning, &mut state, last))
            };
            let want = run(1);
            assert!([3, 16].into_iter().all(|chunk| run(chunk) == want), "{} {kv:?}", r.name);
            want.1
        });
        let mut states = kinds.map(|kv| {
            // Made by another model, of which no bias is large.
            let mut state = plain.state(&StateOptions { kv, chunk: 16, ..F32 });
            logits(&turning, &mut state, before);
            state
        });
        // And where the beginning was run in another state, to the middle of a page.
        for (kv, want) in kinds.into_iter().zip(&alone) {
            let options = StateOptions { kv, chunk: 16, ..F32 };
            let pool = KvPool::new(turning.config(), kv, usize::MAX);
            let mut first = turning.state_in(&pool, &options);
            logits(&turning, &mut first, &before[..at / 2]);
            let mut second = turning.state_in(&pool, &options);
            second.share(first.pages(), at / 2).unwrap();
            logits(&turning, &mut second, &before[at / 2..]);
            assert!(logits(&turning, &mut second, last) == *want, "{} {kv:?}: shared", r.name);
        }
        let (mut hidden, mut together) = (Vec::new(), Vec::new());
        turning.forward_batch(&mut states, &[last[0]; 4], &[1; 4], &mut hidden).unwrap();
        turning.logits(&mut states[0], &hidden, &mut together).unwrap();
        assert!(together == alone.concat(), "{}: sequences side by side", r.name);
    });
    assert!(seen == 0 || seen >= 4, "references with biases of keys");
}

#[test]
fn greedy_generation_matches() {
    each(|r| {
        let model = r.model(RotationMode::Fold);
        let mut state = model.state(&F32);
        let mut sampler = Sampler::new(SampleConfig::default()).unwrap();
        let options = GenerateOptions { max_tokens: Some(r.greedy.len()), ..GenerateOptions::default() };
        let mut generation = Generation::new(&model, &mut state, &mut sampler, &r.tokens, options).unwrap();
        let got: Vec<u32> = generation.by_ref().map(Result::unwrap).collect();
        assert_eq!(got, r.greedy, "{}", r.name);
        assert_eq!(generation.stop(), Some(Stop::MaxTokens));
    });
}

#[test]
fn generation_stops() {
    each(|r| {
        let Some(&first) = r.greedy.first() else { return };
        let model = r.model(RotationMode::None);
        let mut sampler = Sampler::new(SampleConfig::default()).unwrap();
        let mut state = model.state(&F32);
        let options = GenerateOptions { end_tokens: vec![first], ..GenerateOptions::default() };
        let mut generation = Generation::new(&model, &mut state, &mut sampler, &r.tokens, options).unwrap();
        assert!(generation.next().is_none());
        assert_eq!((generation.stop(), generation.pending().len()), (Some(Stop::End(first)), 0));

        // Two places are left: the third token is picked from the last one's logits, and no more.
        let mut state = model.state(&StateOptions { context: Some(r.tokens.len() + 2), ..F32 });
        let mut generation =
            Generation::new(&model, &mut state, &mut sampler, &r.tokens, GenerateOptions::default()).unwrap();
        assert_eq!(generation.by_ref().map(Result::unwrap).count(), 3);
        assert_eq!((generation.stop(), generation.pending().len()), (Some(Stop::ContextFull), 1));

        let mut state = model.state(&StateOptions { context: Some(r.tokens.len() - 1), ..F32 });
        let mut generation =
            Generation::new(&model, &mut state, &mut sampler, &r.tokens, GenerateOptions::default()).unwrap();
        assert!(matches!(generation.next(), Some(Err(Error::ContextFull { .. }))));
        assert!(generation.next().is_none());
    });
}

#[test]
fn evaluation_matches_float64() {
    each(|r| {
        let model = r.model(RotationMode::None);
        for rows in [1, 16, 100] {
            let options = EvalOptions { state: F32, rows };
            let nll = eval::nll(&model, &[&r.tokens], &options, |_| {}).unwrap();
            assert_eq!(nll.tokens, r.tokens.len() as u64 - 1);
            assert!((nll.nats_per_token() - r.nats_per_token).abs() < 1e-4, "{}: {nll:?}", r.name);
            let (a, b) = r.tokens.split_at(17);
            let two = eval::compare(&model, &model, &[a, b], &options, |_| {}).unwrap();
            assert_eq!((two.kl(), two.top1_agreement()), (0.0, 1.0));
            assert_eq!(two.model.tokens, r.tokens.len() as u64 - 2);
            assert_eq!(two.baseline, eval::nll(&model, &[a, b], &options, |_| {}).unwrap());
        }
    });
}

#[test]
fn comparison_sees_a_changed_layer() {
    each(|r| {
        let baseline = r.model(RotationMode::None);
        let mut model = baseline.clone();
        let id: LinearId = "model.layers.1.mlp.down_proj".parse().unwrap();
        let old = model.linear(id).unwrap();
        let (shape, bias) = (old.shape(), old.bias().map(<[f32]>::to_vec));
        let mut weights = old.to_dense().unwrap();
        weights.iter_mut().enumerate().for_each(|(i, w)| *w *= if i % 3 == 0 { 1.3 } else { 0.9 });
        let old = model.replace(id, Linear::dense(shape, weights, bias).unwrap()).unwrap();
        let options = EvalOptions { state: F32, ..EvalOptions::default() };
        let changed = eval::compare(&baseline, &model, &[&r.tokens], &options, |_| {}).unwrap();
        // The definition, on whole logits.
        let (p, q) = (
            logits(&baseline, &mut baseline.state(&F32), &r.tokens),
            logits(&model, &mut model.state(&F32), &r.tokens),
        );
        let row = baseline.config().vocab_size;
        let predictions = r.tokens.len() - 1;
        let want: f64 =
            p.chunks(row).zip(q.chunks(row)).take(predictions).map(|(p, q)| eval::row_kl(p, q)).sum::<f64>();
        assert!(changed.kl() > 1e-4, "{}: {}", r.name, changed.kl());
        assert!((changed.kl_sum - want).abs() <= 1e-4 * want, "{}: {} {want}", r.name, changed.kl_sum);
        model.replace(id, old).unwrap();
        let back = eval::compare(&baseline, &model, &[&r.tokens], &options, |_| {}).unwrap();
        assert_eq!(back.kl(), 0.0);
    });
}

#[test]
fn a_window_ends_where_it_should() {
    // Three layers that see 8 positions each: a token reaches 3 · 7 positions on, and no further.
    each(|r| {
        if r.name != "mistral" {
            return;
        }
        let model = r.model(RotationMode::None);
        let row = model.config().vocab_size;
        let want = logits(&model, &mut model.state(&F32), &r.tokens);
        let mut tokens = r.tokens.clone();
        tokens[3] = (tokens[3] + 1) % 160;
        let got = logits(&model, &mut model.state(&F32), &tokens);
        for (i, (got, want)) in got.chunks(row).zip(want.chunks(row)).enumerate() {
            let reached = (3..=3 + 21).contains(&i);
            assert_eq!(got != want, reached, "position {i}");
        }
    });
}

#[test]
fn same_bits_at_any_thread_count() {
    each(|r| {
        for mode in [RotationMode::None, RotationMode::Online] {
            let run = |threads| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                pool.install(|| {
                    let model = r.model(mode);
                    let mut state = model.state(&F32);
                    let mut out = logits(&model, &mut state, &r.tokens[..30]);
                    out.extend(logits(&model, &mut state, &r.tokens[30..31]));
                    out
                })
            };
            let one = run(1);
            assert!(run(3) == one, "{} {mode:?}", r.name);
        }
    });
}

#[test]
fn stored_weights_give_the_bits_of_dense_ones() {
    each(|r| {
        let source = r.source(RotationMode::None, 0);
        let stored = Model::from_source(&source).unwrap();
        let mut dense = Model::from_source(&source).unwrap();
        for id in LinearId::all(source.config()) {
            let m = source.linear(id).unwrap();
            dense.replace(id, Linear::dense(m.shape, m.data, source.bias(id).unwrap()).unwrap()).unwrap();
        }
        assert!(stored.weight_bytes() <= dense.weight_bytes());
        for chunk in [1, 64] {
            let options = StateOptions { chunk, ..F32 };
            let a = logits(&stored, &mut stored.state(&options), &r.tokens);
            assert!(a == logits(&dense, &mut dense.state(&options), &r.tokens), "{} chunk {chunk}", r.name);
        }
    });
}

#[test]
fn a_model_serves_many_threads() {
    fn shared<T: Send + Sync>() {}
    fn sent<T: Send>() {}
    shared::<Model>();
    sent::<fracbit_model::State>();
}

#[test]
fn refusals_leave_the_state_alone() {
    each(|r| {
        let model = r.model(RotationMode::None);
        let vocab = model.config().vocab_size;
        let mut state = model.state(&StateOptions { context: Some(8), ..F32 });
        let mut hidden = Vec::new();
        model.forward(&mut state, &r.tokens[..5], &mut hidden).unwrap();
        let bad = [1, u32::try_from(vocab).unwrap()];
        let e = model.forward(&mut state, &bad, &mut hidden).unwrap_err();
        assert_eq!(
            e.to_string(),
            format!("forward: token {vocab} should be below the vocabulary size {vocab}")
        );
        let e = model.forward(&mut state, &[1; 4], &mut hidden).unwrap_err();
        assert_eq!(e.to_string(), "forward: 4 tokens after the 5 present should fit the context of 8 tokens");
        assert_eq!(state.len(), 5);
        model.forward(&mut state, &[1; 3], &mut hidden).unwrap();
        model.forward(&mut state, &[], &mut hidden).unwrap();
        assert!(hidden.is_empty());
        let wrong: [(usize, usize, &[usize]); 8] = [
            (0, 0, &[]),
            (0, 1, &[1]),
            (1, 0, &[1]),
            (1, 0, &[0]),
            (1, 2, &[1]),
            (2, 2, &[2]),
            (2, 2, &[2, 0]),
            (2, 4, &[2, 1]),
        ];
        for (states, tokens, counts) in wrong {
            let mut states: Vec<_> = (0..states).map(|_| model.state(&F32)).collect();
            let refused = model.forward_batch(&mut states, &vec![1; tokens], counts, &mut hidden);
            let case = (states.len(), tokens, counts);
            assert!(matches!(refused, Err(Error::Shape(_))), "{case:?}");
            assert!(states.iter().all(fracbit_model::State::is_empty), "{case:?}");
        }
        let default = model.state(&StateOptions::default());
        assert_eq!(default.capacity(), model.config().max_position_embeddings);
        assert!(matches!(
            eval::nll(&model, &[&[1u32][..]], &EvalOptions::default(), |_| {}),
            Err(Error::Window(1))
        ));
    });
    let Some(all) = references() else { return };
    let (a, b) = (all[0].model(RotationMode::None), all[1].model(RotationMode::None));
    let mut state = a.state(&F32);
    assert!(matches!(b.forward(&mut state, &[1], &mut Vec::new()), Err(Error::State { .. })));
    assert!(matches!(
        eval::compare(&a, &b, &[&[1u32, 2][..]], &EvalOptions::default(), |_| {}),
        Err(Error::Vocabularies(..))
    ));
}

#[test]
fn configurations_that_do_not_fit_the_checkpoint() {
    let Some(all) = references() else { return };
    let with = |name: &str, change: &dyn Fn(&mut fracbit_io::ModelConfig)| {
        let r = all.iter().find(|r| r.name == name).unwrap();
        let source = r.source(RotationMode::None, 0);
        let mut config = source.config().clone();
        change(&mut config);
        WeightSource::new(source.checkpoint().clone(), config, RotationMode::None, 0).unwrap_err().to_string()
    };
    let e = with("llama-bias", &|c| c.qkv_bias = false);
    assert!(e.contains("model.layers.0.self_attn.q_proj.bias") && e.contains("is stored"), "{e}");
    let e = with("qwen3", &|c| c.qk_norm = QkNorm::Absent);
    assert!(e.contains("q_norm.weight") && e.contains("is stored"), "{e}");
    let e = with("llama2", &|c| c.layers.push(c.layers[0]));
    assert!(e.contains("model.layers.2.self_attn.q_proj.weight"), "{e}");
    let e = with("llama2", &|c| c.intermediate_size += 1);
    assert!(e.contains("model.layers.0.mlp.gate_proj.weight") && e.contains("shape"), "{e}");
}
