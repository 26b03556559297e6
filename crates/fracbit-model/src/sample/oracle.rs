//! The rules, one after another over all tokens, and the sampler against them.

use super::*;

/// A token, its logit and its weight.
type Weighed = (u32, f32, f64);

/// Most likely first.
fn order(a: &Weighed, b: &Weighed) -> std::cmp::Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

fn total(all: &[Weighed]) -> f64 {
    all.iter().map(|a| a.2).sum()
}

/// The shortest prefix that has this share of the weight.
fn prefix(all: &mut Vec<Weighed>, share: f32, total: f64) {
    let (mut mass, mut keep) = (0.0, 0);
    while keep < all.len() && mass < f64::from(share) * total {
        mass += all[keep].2;
        keep += 1;
    }
    all.truncate(keep);
}

/// Tokens that survive the filters, in the order in which sums run.
fn survivors(config: &SampleConfig, logits: &[f32], history: &[u32]) -> Vec<Weighed> {
    let SampleConfig { temperature, top_k, top_p, min_p, repetition_penalty: penalty, .. } = *config;
    let mut all: Vec<Weighed> = (0..).zip(logits).map(|(token, &logit)| (token, logit, 0.0)).collect();
    for (token, logit, _) in &mut all {
        if penalty != 1.0 && history.contains(token) {
            *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
        }
    }
    all.retain(|a| a.1 > f32::NEG_INFINITY);
    let Some(top) = all.iter().map(|a| a.1).reduce(f32::max) else { return Vec::new() };
    if temperature == 0.0 || top == f32::INFINITY {
        return all.into_iter().find(|a| a.1 == top).map(|a| vec![(a.0, a.1, 1.0)]).unwrap();
    }
    for a in &mut all {
        a.2 = ((f64::from(a.1) - f64::from(top)) / f64::from(temperature)).exp();
    }
    if top_k > 0 {
        all.sort_by(order);
        all.truncate(top_k);
        all.sort_by_key(|a| a.0);
    }
    if top_p < 1.0 {
        let total = total(&all);
        let least = (1.0 - f64::from(top_p)) / all.len() as f64 * total;
        all.retain(|a| a.2 >= least);
        all.sort_by(order);
        prefix(&mut all, top_p, total);
    }
    all.retain(|a| min_p == 0.0 || a.2 >= f64::from(min_p));
    if config.typical_p < 1.0 {
        let total = total(&all);
        let p = |a: &Weighed| a.2 / total;
        let entropy: f64 = all.iter().filter(|a| p(a) > 0.0).map(|a| p(a) * -p(a).ln()).sum();
        let far = |a: &Weighed| (-p(a).ln() - entropy).abs();
        all.sort_by(|a, b| far(a).total_cmp(&far(b)).then(order(a, b)));
        prefix(&mut all, config.typical_p, total);
    }
    all
}

/// What mirostat leaves within `bound` bits, and the weight of all that there was.
fn within(config: &SampleConfig, all: &mut Vec<Weighed>, bound: f64) -> f64 {
    let total = total(all);
    if config.mirostat_tau > 0.0 {
        let first = all.iter().copied().min_by(order);
        all.retain(|a| (total / a.2).log2() <= bound);
        if all.is_empty() {
            all.extend(first);
        }
    }
    total
}

/// What is left where XTC drops its top choices; `None` where there are none.
fn without_choices(config: &SampleConfig, all: &[Weighed]) -> Option<Vec<Weighed>> {
    let least = f64::from(config.xtc_threshold) * total(all);
    let mut top: Vec<Weighed> = all.iter().copied().filter(|a| a.2 > 0.0 && a.2 >= least).collect();
    top.sort_by(order);
    top.pop()?;
    Some(all.iter().copied().filter(|a| !top.contains(a)).collect())
}

fn by_the_rules(
    config: &SampleConfig,
    (rng, bound): (&mut ChaCha8Rng, &mut f64),
    logits: &[f32],
    history: &[u32],
) -> Option<u32> {
    let mut all = survivors(config, logits, history);
    let &(first, top, _) = all.first()?;
    if config.temperature == 0.0 || top == f32::INFINITY {
        return Some(first);
    }
    let before = within(config, &mut all, *bound);
    let mut uniform = || (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
    if config.xtc_probability > 0.0 && uniform() < f64::from(config.xtc_probability) {
        all = without_choices(config, &all).unwrap_or(all);
    }
    let mut left = uniform() * total(&all);
    let drawn = all.iter().find(|a| {
        left -= a.2;
        left < 0.0
    });
    let (token, _, weight) = *drawn.or_else(|| all.iter().rfind(|a| a.2 > 0.0))?;
    if config.mirostat_tau > 0.0 {
        *bound -=
            f64::from(config.mirostat_eta) * ((before / weight).log2() - f64::from(config.mirostat_tau));
    }
    Some(token)
}

/// Numbers by chance.
struct Chance(ChaCha8Rng);

impl Chance {
    fn new(seed: u64) -> Self {
        Self(ChaCha8Rng::seed_from_u64(seed))
    }

    fn below(&mut self, n: usize) -> usize {
        (self.0.next_u64() % n as u64) as usize
    }

    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// About normal.
    fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.0.next_u32() as f32 / 4_294_967_296.0).sum::<f32>() - 6.0
    }

    /// A row of logits of one of many kinds, and what kind.
    fn logits(&mut self, len: usize) -> (Vec<f32>, usize) {
        let kind = self.below(12);
        let mut out: Vec<f32> = (0..len)
            .map(|i| match kind {
                0 => self.normal() * 3.0,
                1 => 0.25,
                2 => self.of(&[0.0, -0.0]),
                3 => self.of(&[1.0, 2.0, 2.000_000_2, 3.0]),
                4 => i as f32 * -0.01,
                5 => i as f32 * 0.5 - 7.0,
                6 => self.of(&[f32::MAX, f32::MIN, 0.0, 1e-40]),
                7 => self.normal() * 1e-6,
                8 => self.normal() * 40.0,
                9 if i == len / 2 => 12.0,
                9 => self.normal() * 1e-4 - 3.0,
                10 => (self.normal() * 4.0).round(),
                _ => self.normal() * 2.0 + if self.below(500) == 0 { 15.0 } else { 0.0 },
            })
            .collect();
        let odd: &[f32] = self.of(&[
            &[],
            &[],
            &[],
            &[f32::NAN],
            &[f32::NEG_INFINITY],
            &[f32::NAN, f32::NEG_INFINITY, f32::INFINITY],
        ]);
        if len > 0 && !odd.is_empty() {
            let most = if odd.contains(&f32::INFINITY) { 3 } else { len + 1 };
            for _ in 0..self.below(most) {
                let at = self.below(len);
                out[at] = self.of(odd);
            }
        }
        (out, kind)
    }

    fn config(&mut self, len: usize) -> SampleConfig {
        let off = self.below(2) == 0;
        SampleConfig {
            temperature: self.of(&[0.0, 1e-45, 1e-3, 0.3, 1.0, 1.0, 1.0, 1.7, 50.0, 3e38]),
            top_k: if off {
                0
            } else {
                self.of(&[0, 0, 1, 2, 5, 40, 64, len.saturating_sub(1), len, len + 1])
            },
            top_p: self.of(&[1.0, 1.0, 1.0, 0.999_999_94, 0.95, 0.5, 1e-9]),
            min_p: if off { 0.0 } else { self.of(&[0.0, 0.0, 1e-3, 0.05, 0.5, 1.0]) },
            repetition_penalty: self.of(&[1.0, 1.0, 1.3, 0.5, 1e-30, 1e30]),
            typical_p: self.of(&[1.0, 1.0, 1.0, 0.999_999_94, 0.9, 0.5, 1e-9]),
            xtc_probability: self.of(&[0.0, 0.0, 0.0, 0.5, 1.0]),
            xtc_threshold: self.of(&[0.0, 1e-3, 0.1, 0.3, 1.0]),
            mirostat_tau: self.of(&[0.0, 0.0, 0.0, 1e-3, 1.0, 3.0, 30.0]),
            mirostat_eta: self.of(&[0.0, 0.1, 1.0]),
            seed: self.0.next_u64(),
            ..SampleConfig::default()
        }
    }
}

#[test]
fn picks_what_the_rules_pick() {
    let mut chance = Chance::new(1);
    for round in 0..4000 {
        let len = chance.of(&[0, 1, 2, 15, 63, 64, 65, 129, 300, 1000, 1000, 4000]);
        let (logits, kind) = chance.logits(len);
        let config = chance.config(len);
        let history: Vec<u32> =
            (0..chance.below(30)).map(|_| u32::try_from(chance.below(len + 2)).unwrap()).collect();
        // The wider the bounds, the more often exact sums must be made.
        let slack = chance.of(&[SLACK, SLACK, 1e-6, 1e-3, 0.1, 10.0]);
        let mut sampler = Sampler::new(config).unwrap();
        let mut rng = ChaCha8Rng::seed_from_u64(config.seed);
        let mut bound = 2.0 * f64::from(config.mirostat_tau);
        for _ in 0..4 {
            let want = by_the_rules(&config, (&mut rng, &mut bound), &logits, &history);
            let got = sampler.change(&logits, &history, |this, logits| this.pick(logits, slack)).ok();
            assert_eq!(got, want, "round {round}, {len} logits of kind {kind}, slack {slack}, {config:?}");
        }
        let mut all = survivors(&config, &logits, &history);
        let drawn = config.temperature > 0.0 && all.first().is_some_and(|a| a.1 < f32::INFINITY);
        if drawn {
            within(&config, &mut all, bound);
        }
        let (sum, chance) = (total(&all), f64::from(config.xtc_probability));
        let left = if drawn && chance > 0.0 { without_choices(&config, &all) } else { None };
        let left = left.unwrap_or_default();
        let of = |a: &Weighed| {
            let (p, rest) = (a.2 / sum, total(&left));
            let without = if left.contains(a) { a.2 / rest } else { 0.0 };
            if left.is_empty() { p } else { (1.0 - chance) * p + chance * without }
        };
        let mut want: Vec<(u32, f64)> = all.iter().map(|a| (a.0, of(a))).collect();
        want.retain(|(_, p)| left.is_empty() || *p > 0.0);
        let got = sampler.distribution(&logits, &history).unwrap_or_default();
        assert_eq!(got, want, "round {round}, {len} logits of kind {kind}, {config:?}");
    }
}

#[test]
fn large_vocabularies_hardly_ever_want_exact_sums() {
    let mut chance = Chance::new(2);
    for (flat, temperature) in [(false, 1.0), (false, 0.6), (true, 1.0)] {
        let logits: Vec<f32> = (0..100_000).map(|_| if flat { 0.5 } else { chance.normal() * 2.5 }).collect();
        let config = SampleConfig { temperature, seed: 3, ..SampleConfig::default() };
        let mut sampler = Sampler::new(config).unwrap();
        let scale = sampler.scale(&logits).unwrap();
        let (total, margin) = sampler.nearly_total(&logits, scale, SLACK);
        assert!(margin < 1e-10 * total);
        let all: Vec<(u32, f64)> = usable(&logits).map(|(t, l)| (t, scale.weight(l))).collect();
        let exact: f64 = all.iter().map(|a| a.1).sum();
        assert!((exact - total).abs() < margin / 2.0, "{exact} {total}");
        for _ in 0..60 {
            let uniform = (chance.0.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
            let got = sampler.nearly_drawn(&logits, scale, uniform * total, margin);
            assert_eq!(got, Some(draw(uniform, all.iter().copied())), "flat {flat}, {uniform}");
        }
        // On the edge between two tokens they do not tell.
        let edge: f64 = all[..700].iter().map(|a| a.1).sum();
        assert_eq!(sampler.nearly_drawn(&logits, scale, edge, margin), None);
        for top_p in [0.5, 0.95] {
            sampler.config.top_p = top_p;
            let near = total - margin..=total + margin;
            let found = sampler.gather_nucleus(&logits, scale, near, logits.len());
            // Of equal weights a nucleus of half ends between two.
            assert!(found.is_some() || flat);
        }
    }
}
