//! A scheduler that reads prompts, trained on what precision the model's own answers to some of
//! them want (PMPD, arXiv 2410.13461, appendix A.1).

use super::{Answered, FitOptions, Quality, answer, loss_of, state};
use fracbit_base::Rate;
use fracbit_load::{Error, Progress};
use fracbit_model::{Model, Precision};
use fracbit_schedule::{
    AdamOptions, Features, Learned, Network, Sample, Schedule, Scheduler, Shape, train as fit,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Serialize;
use std::{
    ops::RangeInclusive,
    time::{Duration, Instant},
};

/// Neurons of the hidden layer.
const HIDDEN: usize = 64;

/// How to train a scheduler.
#[derive(Clone, Debug)]
pub struct TrainOptions {
    /// How an answer is judged, the largest loss of one, its tokens, and the classes of answers:
    /// `points` places, evenly spread from the first token to never, at which precision falls.
    pub fit: FitOptions,
    /// Precision of the prompt and of the beginning of an answer, and that to which it falls;
    /// `None`: the most and the least that the model has.
    pub rates: Option<[Rate; 2]>,
    /// Blocks whose cache may be read, each by a network of its own: that with the least loss on
    /// prompts that it was not trained on is taken. None: the last.
    pub blocks: Vec<usize>,
    /// Of the random numbers.
    pub seed: u64,
}

impl Default for TrainOptions {
    fn default() -> Self {
        let fit = FitOptions { points: 4, ..FitOptions::default() };
        Self { fit, rates: None, blocks: Vec::new(), seed: 0 }
    }
}

/// A policy on prompts that nothing was trained or chosen on.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Policy {
    /// Its name.
    pub name: String,
    /// Mean of the most bits that decode steps read.
    pub mean_bits: f64,
    /// Mean loss.
    pub loss: f64,
    /// Share of prompts whose loss is within the tolerance.
    pub within: f64,
    /// Share of prompts that got the precision of their label.
    pub right: f64,
}

/// What training found.
#[derive(Clone, Debug, Serialize)]
pub struct Trained {
    /// What losses are.
    pub quality: Quality,
    /// The largest loss of an answer.
    pub tolerance: f64,
    /// Tokens of an answer.
    pub steps: usize,
    /// The schedules to choose from, the lowest first.
    pub schedules: Vec<Schedule>,
    /// Prompts whose label is each of them.
    pub labels: Vec<usize>,
    /// Uniform, static, learned (of each block), drawn at random as often as labels are, and the
    /// labels themselves.
    pub policies: Vec<Policy>,
    /// The block whose network was taken.
    pub block: usize,
    /// Reading the cache and running the network, as a share of the time of running the prompts.
    pub overhead: f64,
    /// The scheduler of that block.
    #[serde(skip)]
    pub scheduler: Scheduler,
}

/// `count` beginnings of texts, pieces of `tokens` of these lengths at random places, each behind
/// `before` (such as a BOS token). None where the text is too short.
#[must_use]
pub fn beginnings(
    tokens: &[u32],
    before: &[u32],
    count: usize,
    lengths: RangeInclusive<usize>,
    seed: u64,
) -> Vec<Vec<u32>> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let most = (*lengths.end()).min(tokens.len());
    if most < *lengths.start() || most == 0 {
        return Vec::new();
    }
    let one = |_| {
        let len = rng.random_range((*lengths.start()).max(1)..=most);
        let at = rng.random_range(0..=tokens.len() - len);
        [before, &tokens[at..at + len]].concat()
    };
    (0..count).map(one).collect()
}

/// A prompt, what blocks hold of it, and the loss of every class.
struct Labelled {
    features: Vec<Features>, // of each block
    losses: Vec<f64>,        // of each class
    label: usize,
}

/// Trains a scheduler on two of three prompts and says what it does on the others.
///
/// # Errors
/// When the model has one precision or not those asked for, a block that it lacks is asked for,
/// there are fewer than six prompts, or a prompt with its answer does not fit the context.
pub fn train(
    model: &Model,
    prompts: &[Vec<u32>],
    options: &TrainOptions,
    progress: &dyn Progress,
) -> Result<Trained, Error> {
    let refuse = |option, rule: String| Err(Error::Option { option, rule });
    let own = model.precisions();
    let (Some(&least), Some(&most)) = (own.first(), own.last()) else {
        return refuse("MODEL", super::ONE_PRECISION.to_owned());
    };
    let rates = options.rates.unwrap_or([most, least]);
    if rates[0] <= rates[1] || !rates.iter().all(|rate| own.contains(rate)) {
        let names: Vec<String> = own.iter().map(|rate| rate.bits().to_string()).collect();
        return refuse("--bits", format!("should be two of {}, the higher first", names.join(", ")));
    }
    let (layers, last) = (model.config().num_hidden_layers(), model.config().num_hidden_layers() - 1);
    let blocks = if options.blocks.is_empty() { vec![last] } else { options.blocks.clone() };
    if let Some(other) = blocks.iter().find(|&&block| block >= layers) {
        return refuse("--block", format!("should be at most {last}, the last one, got {other}"));
    }
    if prompts.len() < 6 {
        return refuse("--samples", format!("should leave at least 6 prompts, there are {}", prompts.len()));
    }
    let FitOptions { quality, tolerance, steps, points: classes } = options.fit;
    if classes < 2 {
        return refuse("--points", format!("should be at least 2, got {classes}"));
    }
    let falls: Vec<Option<usize>> =
        (0..classes).map(|i| (i + 1 < classes).then(|| i * steps / (classes - 1))).collect();
    let schedules: Vec<Schedule> =
        falls.iter().map(|&from| Schedule::falling(rates[0], rates, from)).collect();

    progress.stage("answering prompts at every precision", prompts.len() as u64);
    let (mut running, mut reading) = (Duration::ZERO, Duration::ZERO);
    let mut labelled = Vec::with_capacity(prompts.len());
    for prompt in prompts {
        let answered = answer(model, prompt, steps)?;
        let (features, times) = read(model, &answered, rates[0], &blocks)?;
        (running, reading) = (running + times[0], reading + times[1]);
        let losses = schedules.iter().map(|schedule| loss_of(model, &answered, schedule, quality));
        let losses: Vec<f64> = losses.collect::<Result<_, Error>>()?;
        // Where not even the highest is within it, there is nothing better.
        let label = losses.iter().position(|&loss| loss <= tolerance).unwrap_or(classes - 1);
        labelled.push(Labelled { features, losses, label });
        progress.advance(1);
    }
    let (training, held) = labelled.split_at(labelled.len() * 2 / 3);

    progress.stage("training", blocks.len() as u64);
    let config = model.config();
    let shape =
        Shape { heads: config.num_key_value_heads, head_dim: config.head_dim, hidden: HIDDEN, classes };
    let networks = (0..blocks.len()).map(|i| {
        let sample = |one: &Labelled| Sample { features: one.features[i].clone(), class: one.label };
        let samples: Vec<Sample> = training.iter().map(sample).collect();
        let made = fit(shape, &samples, AdamOptions { seed: options.seed, ..AdamOptions::default() });
        progress.advance(1);
        made.map_err(|e| fracbit_model::Error::from(e).into())
    });
    let networks: Vec<(Network, f64)> = networks.collect::<Result<_, Error>>()?;

    let bits: Vec<f64> = schedules.iter().map(|s| s.mean_bits(steps)).collect();
    let policy =
        |name: String, choose: &dyn Fn(&Labelled) -> usize| judge(name, held, &bits, tolerance, choose);
    let mut policies = vec![
        policy(format!("uniform, {} bits", rates[1].bits()), &|_| 0),
        policy(format!("uniform, {} bits", rates[0].bits()), &|_| classes - 1),
        policy("static".to_owned(), &|_| static_class(training, classes, tolerance)),
    ];
    let start = Instant::now();
    for ((network, _), (i, block)) in networks.iter().zip(blocks.iter().enumerate()) {
        policies.push(policy(format!("learned, block {block}"), &|one| network.class(&one.features[i])));
    }
    let running_networks = start.elapsed() / u32::try_from(held.len() * blocks.len()).unwrap_or(u32::MAX);
    policies.push(random(held, training, &bits, tolerance));
    policies.push(policy("labels".to_owned(), &|one| one.label));

    let best = (0..networks.len()).min_by(|&a, &b| networks[a].1.total_cmp(&networks[b].1)).unwrap_or(0);
    let network = networks[best].0.clone();
    let learned = Learned::new(rates[0], rates, falls, blocks[best], network);
    let scheduler = learned.map_err(fracbit_model::Error::from)?.into();
    let labels = (0..classes).map(|class| labelled.iter().filter(|one| one.label == class).count());
    let reading = reading.as_secs_f64() / (prompts.len() * blocks.len()) as f64;
    Ok(Trained {
        quality,
        tolerance,
        steps,
        labels: labels.collect(),
        schedules,
        policies,
        block: blocks[best],
        overhead: (reading + running_networks.as_secs_f64()) / (running.as_secs_f64() / prompts.len() as f64),
        scheduler,
    })
}

/// What blocks hold of a prompt, with the time of running it and of reading them.
fn read(
    model: &Model,
    answered: &Answered,
    precision: Rate,
    blocks: &[usize],
) -> Result<(Vec<Features>, [Duration; 2]), Error> {
    let mut state = state(model, answered.prompt.len());
    state.set_precision(Precision::at_most(precision));
    let start = Instant::now();
    model.forward(&mut state, &answered.prompt, &mut Vec::new())?;
    let run = start.elapsed();
    let cached = |&block: &usize| model.cached(&state, block, answered.prompt.len()).unwrap_or_default();
    let features = blocks.iter().map(cached).collect();
    Ok((features, [run, start.elapsed() - run]))
}

/// The lowest class whose mean loss is within the tolerance.
fn static_class(all: &[Labelled], classes: usize, tolerance: f64) -> usize {
    let mean = |class: usize| all.iter().map(|one| one.losses[class]).sum::<f64>() / all.len() as f64;
    (0..classes).find(|&class| mean(class) <= tolerance).unwrap_or(classes - 1)
}

fn judge(
    name: String,
    all: &[Labelled],
    bits: &[f64],
    tolerance: f64,
    choose: &dyn Fn(&Labelled) -> usize,
) -> Policy {
    let chosen: Vec<(&Labelled, usize)> = all.iter().map(|one| (one, choose(one))).collect();
    let mean = |of: &dyn Fn(&Labelled, usize) -> f64| {
        chosen.iter().map(|&(one, class)| of(one, class)).sum::<f64>() / all.len() as f64
    };
    Policy {
        name,
        mean_bits: mean(&|_, class| bits[class]),
        loss: mean(&|one, class| one.losses[class]),
        within: mean(&|one, class| f64::from(one.losses[class] <= tolerance)),
        right: mean(&|one, class| f64::from(one.label == class)),
    }
}

/// What drawing classes as often as they are labels would do, in the mean.
fn random(held: &[Labelled], training: &[Labelled], bits: &[f64], tolerance: f64) -> Policy {
    let mut sum = Policy { name: "random".to_owned(), mean_bits: 0.0, loss: 0.0, within: 0.0, right: 0.0 };
    for class in 0..bits.len() {
        let share = training.iter().filter(|one| one.label == class).count() as f64 / training.len() as f64;
        let one = judge(String::new(), held, bits, tolerance, &|_| class);
        sum.mean_bits += share * one.mean_bits;
        sum.loss += share * one.loss;
        sum.within += share * one.within;
        sum.right += share * one.right;
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beginnings_are_pieces_of_the_text() {
        let tokens: Vec<u32> = (0..100).collect();
        let made = beginnings(&tokens, &[7], 50, 5..=20, 3);
        assert_eq!(made, beginnings(&tokens, &[7], 50, 5..=20, 3));
        assert_eq!(made.len(), 50);
        for piece in made {
            assert!((6..=21).contains(&piece.len()) && piece[0] == 7);
            assert!(piece[1..].windows(2).all(|pair| pair[1] == pair[0] + 1), "{piece:?}");
        }
        assert!(beginnings(&tokens, &[], 5, 101..=200, 0).is_empty());
        assert!(beginnings(&[], &[], 5, 0..=3, 0).is_empty());
    }

    #[test]
    fn policies_are_judged_by_what_they_choose() {
        let one = |losses: [f64; 3], label| Labelled { features: Vec::new(), losses: losses.to_vec(), label };
        let all = [one([0.5, 0.1, 0.0], 1), one([0.1, 0.05, 0.0], 0), one([0.9, 0.5, 0.0], 2)];
        let bits = [2.0, 3.0, 4.0];
        let labels = judge(String::new(), &all, &bits, 0.1, &|one| one.label);
        assert_eq!([labels.mean_bits, labels.within, labels.right], [3.0, 1.0, 1.0]);
        assert!((labels.loss - 0.2 / 3.0).abs() < 1e-12);
        let low = judge(String::new(), &all, &bits, 0.1, &|_| 0);
        assert_eq!(low.mean_bits, 2.0);
        assert!((low.within - 1.0 / 3.0).abs() < 1e-12 && (low.right - 1.0 / 3.0).abs() < 1e-12);
        assert_eq!(static_class(&all, 3, 0.5), 0);
        assert_eq!(static_class(&all, 3, 0.3), 1);
        assert_eq!(static_class(&all, 3, 0.1), 2);
        let drawn = random(&all, &all, &bits, 0.1);
        assert!((drawn.mean_bits - 3.0).abs() < 1e-12 && (drawn.right - 1.0 / 3.0).abs() < 1e-12);
    }
}
