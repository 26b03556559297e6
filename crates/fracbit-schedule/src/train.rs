//! Training of the network that reads prompts: cross-entropy, by Adam with decoupled weight decay
//! (Loshchilov and Hutter 2019).

use crate::{Features, Network, ScheduleError, Shape, learned::Tape};
use rand::{Rng, SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;

/// A prompt's cache and the class that it should get.
#[derive(Clone, Debug)]
pub struct Sample {
    /// What the network reads.
    pub features: Features,
    /// The best answer.
    pub class: usize,
}

/// How to train: Adam's settings, how long, and from which random numbers.
#[derive(Clone, Copy, Debug)]
pub struct AdamOptions {
    /// Most passes over the samples.
    pub epochs: usize,
    /// Samples of a step.
    pub batch: usize,
    /// Length of a step.
    pub rate: f64,
    /// Share of a weight that a step of length 1 takes away.
    pub decay: f64,
    /// Of the random numbers.
    pub seed: u64,
}

impl Default for AdamOptions {
    fn default() -> Self {
        Self { epochs: 60, batch: 8, rate: 2e-3, decay: 0.05, seed: 0 }
    }
}

/// Trains a network on three of four samples; of all epochs the one that the fourth one likes best
/// is kept. Returns it with its mean cross-entropy on those (with fewer than four samples, on all).
///
/// Samples should have the shape's width, a position at least, and classes that it has. The same
/// samples and options give the same network.
///
/// # Errors
/// [`ScheduleError::Network`] when the shape is none, or when there is no sample.
pub fn train(
    shape: Shape,
    samples: &[Sample],
    options: AdamOptions,
) -> Result<(Network, f64), ScheduleError> {
    if samples.is_empty() {
        return Err(ScheduleError::Network);
    }
    let mut rng = ChaCha8Rng::seed_from_u64(options.seed);
    let mut network = Network::random(shape, || rng.sample(StandardNormal))?;
    let (mut training, mut judging): (Vec<&Sample>, Vec<&Sample>) = (Vec::new(), Vec::new());
    for (i, sample) in samples.iter().enumerate() {
        if i % 4 == 3 { judging.push(sample) } else { training.push(sample) }
    }
    if judging.is_empty() {
        judging.clone_from(&training);
    }
    let mut adam = Adam::new(network.params().len());
    let mut gradient = vec![0.0; network.params().len()];
    let mut best = (network.clone(), loss(&network, &judging));
    for _ in 0..options.epochs {
        training.shuffle(&mut rng);
        for batch in training.chunks(options.batch.max(1)) {
            gradient.fill(0.0);
            for sample in batch {
                add_gradient(&network, sample, batch.len() as f64, &mut gradient);
            }
            adam.step(network.params_mut(), &gradient, options);
        }
        let judged = loss(&network, &judging);
        if judged < best.1 {
            best = (network.clone(), judged);
        }
    }
    Ok(best)
}

/// Cross-entropy of scores, and with it their softmax.
fn cross_entropy(scores: &[f64], class: usize) -> (f64, Vec<f64>) {
    let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|s| (s - most).exp()).sum();
    let shares = scores.iter().map(|s| (s - most).exp() / sum).collect();
    (sum.ln() + most - scores[class], shares)
}

/// Mean cross-entropy.
fn loss(network: &Network, samples: &[&Sample]) -> f64 {
    let mut tape = Tape::default();
    let each = samples.iter().map(|sample| {
        network.forward(&sample.features, &mut tape);
        cross_entropy(&tape.scores, sample.class).0
    });
    each.sum::<f64>() / samples.len() as f64
}

/// Adds what a sample gives, divided by `count`.
fn add_gradient(network: &Network, sample: &Sample, count: f64, gradient: &mut [f64]) {
    let mut tape = Tape::default();
    network.forward(&sample.features, &mut tape);
    let (_, mut scores) = cross_entropy(&tape.scores, sample.class);
    scores[sample.class] -= 1.0;
    scores.iter_mut().for_each(|s| *s /= count);
    network.backward(&sample.features, &tape, &scores, gradient);
}

struct Adam {
    steps: i32,
    mean: Vec<f64>,
    square: Vec<f64>,
}

impl Adam {
    fn new(len: usize) -> Self {
        Self { steps: 0, mean: vec![0.0; len], square: vec![0.0; len] }
    }

    fn step(&mut self, params: &mut [f64], gradient: &[f64], options: AdamOptions) {
        const BETA: [f64; 2] = [0.9, 0.999];
        self.steps += 1;
        let [first, second] = BETA.map(|b| 1.0 - b.powi(self.steps));
        let moments = self.mean.iter_mut().zip(&mut self.square);
        for ((param, g), (mean, square)) in params.iter_mut().zip(gradient).zip(moments) {
            *mean = BETA[0] * *mean + (1.0 - BETA[0]) * g;
            *square = BETA[1] * *square + (1.0 - BETA[1]) * g * g;
            let by = *mean / first / ((*square / second).sqrt() + 1e-8);
            *param -= options.rate * (by + options.decay * *param);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Learned, Schedule, Scheduler};
    use fracbit_base::Rate;
    use proptest::prelude::{any, proptest};
    use rand::Rng;

    const SHAPE: Shape = Shape { heads: 2, head_dim: 4, hidden: 6, classes: 3 };

    fn features(rng: &mut ChaCha8Rng, positions: usize) -> Features {
        let mut numbers = || (0..positions * SHAPE.width()).map(|_| rng.sample(StandardNormal)).collect();
        Features { keys: numbers(), values: numbers() }
    }

    fn random(seed: u64) -> (Network, ChaCha8Rng) {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        (Network::random(SHAPE, || rng.sample(StandardNormal)).unwrap(), rng)
    }

    #[test]
    fn gradients_are_those_of_finite_differences() {
        for seed in 0..5 {
            let (network, mut rng) = random(seed);
            let sample = Sample { features: features(&mut rng, 5), class: seed as usize % 3 };
            let mut gradient = vec![0.0; network.params().len()];
            add_gradient(&network, &sample, 1.0, &mut gradient);
            for (i, g) in gradient.iter().enumerate() {
                let at = |by: f64| {
                    let mut params = network.params().to_vec();
                    params[i] += by;
                    loss(&Network::new(SHAPE, params).unwrap(), &[&sample])
                };
                let by_hand = (at(1e-6) - at(-1e-6)) / 2e-6;
                assert!((g - by_hand).abs() < 1e-7, "seed {seed}, parameter {i}: {g} {by_hand}");
            }
        }
    }

    /// The class is which of three directions some position's key has; the rest is noise.
    #[test]
    fn what_a_position_holds_is_learned() {
        let mut rng = ChaCha8Rng::seed_from_u64(7);
        let mut made = |count: usize| -> Vec<Sample> {
            let one = |i: usize| {
                let mut features = features(&mut rng, 9);
                let (class, at) = (i % 3, i / 3 % 9);
                features.keys[at * SHAPE.width()] = 6.0;
                features.values[at * SHAPE.width() + 1 + class] = 6.0;
                Sample { features, class }
            };
            (0..count).map(one).collect()
        };
        let (samples, held) = (made(240), made(60));
        let (network, judged) = train(SHAPE, &samples, AdamOptions::default()).unwrap();
        let right = held.iter().filter(|s| network.class(&s.features) == s.class).count();
        assert!(right >= 50 && judged < 0.6, "{right} of 60, {judged}");
        let again = train(SHAPE, &samples, AdamOptions::default()).unwrap();
        assert_eq!((network, judged), again);
        assert_eq!(train(SHAPE, &[], AdamOptions::default()), Err(ScheduleError::Network));
    }

    fn learned() -> Learned {
        let rates = [16, 8].map(Rate::quarter_bits);
        Learned::new(rates[0], rates, vec![Some(0), Some(9), None], 2, random(3).0).unwrap()
    }

    #[test]
    fn files_go_there_and_back_and_others_are_refused() {
        let before = Scheduler::from(learned());
        let text = serde_json::to_string(&before).unwrap();
        let after: Scheduler = serde_json::from_str(&text).unwrap();
        // Parameters are written in single precision: from then on nothing changes.
        assert_eq!(serde_json::to_string(&after).unwrap(), text);
        let fixed: Schedule = "prefill=4,decode=4..2@9".parse().unwrap();
        let fixed = Scheduler::from(fixed);
        let short = serde_json::to_string(&fixed).unwrap();
        assert_eq!(serde_json::from_str::<Scheduler>(&short).unwrap(), fixed);
        let refused = |text: &str, word: &str| {
            let error = serde_json::from_str::<Scheduler>(text).unwrap_err().to_string();
            assert!(error.contains(word), "{word}: {error}");
        };
        refused(r#"{"prefill": 4}"#, "one of `decode`");
        refused(&text.replace(r#""hidden":6"#, r#""hidden":7"#), "as many finite parameters");
        refused(&text.replace(r#""hidden":6"#, r#""hidden":0"#), "sizes above 0");
        refused(&text.replace(r#""hidden":6"#, r#""hidden":18446744073709551615"#), "sizes above 0");
        refused(&text.replace(r#""falls":[0,"#, r#""falls":["#), "one class for each");
        refused(&text.replace(r#""bits":[4.0,2.0]"#, r#""bits":[2.0,4.0]"#), "not rise");
        refused(&text.replace(r#""block":2"#, r#""block":-2"#), "-2");
    }

    #[test]
    fn a_class_is_a_schedule_and_another_model_is_refused() {
        let learned = learned();
        let texts: Vec<String> = learned.schedules().map(|s| s.to_string()).collect();
        assert_eq!(texts, ["prefill=4,decode=2", "prefill=4,decode=4..2@9", "prefill=4,decode=4"]);
        assert!(Scheduler::from(learned.clone()).changes());
        let (_, mut rng) = random(1);
        let features = features(&mut rng, 3);
        let chosen = learned.schedule(&features).to_string();
        assert!(texts.contains(&chosen), "{chosen}");
        let asked = Scheduler::from(learned.clone()).schedule(|block| {
            assert_eq!(block, 2);
            features
        });
        assert_eq!(asked.to_string(), chosen);
        learned.check(3, 2, 4).unwrap();
        for (blocks, heads, head_dim) in [(2, 2, 4), (3, 1, 4), (3, 2, 8)] {
            let error = learned.check(blocks, heads, head_dim).unwrap_err().to_string();
            assert!(error.contains("block 2 with 2 heads"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_a_scheduler_or_an_error(cut in 0usize..400, byte in any::<u8>()) {
            let text = serde_json::to_string(&Scheduler::from(learned())).unwrap();
            let mut bytes = text.into_bytes();
            let at = cut % bytes.len();
            bytes[at] = byte;
            if let Ok(scheduler) = serde_json::from_slice::<Scheduler>(&bytes) {
                let (_, mut rng) = random(1);
                let _ = scheduler.schedule(|_| features(&mut rng, 3));
            }
        }
    }
}
